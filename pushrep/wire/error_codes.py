"""The error codes of every answer, in one table: number, name, meaning, whether the same request may be sent again.

Numbers below 1000 are Kafka's, with Kafka's names; from 1000 on they are ours. None is ever given a second meaning.
"Retriable" means that the same bytes may succeed later on the same session. That differs from Kafka, where a storage
error is retriable because another broker may lead by then.
"""

from enum import IntEnum
from typing import Self


class ErrorCode(IntEnum):
    """The error code of an answer. A number that this version does not know reads as UNKNOWN_SERVER_ERROR."""

    _value_: int
    meaning: str
    """One sentence for people."""

    def __new__(cls, number: int, meaning: str) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.meaning = number, meaning
        return member

    __hash__ = int.__hash__  # Enum's own hashes the name in Python, at every look-up

    UNKNOWN_SERVER_ERROR = -1, "the peer failed in a way that has no code here"
    NONE = 0, "no error"
    OFFSET_OUT_OF_RANGE = 1, "the offset lies above the log's end, or below its start"
    CORRUPT_MESSAGE = 2, "a record batch is damaged or of an impossible epoch"
    REQUEST_TIMED_OUT = 7, "the peer could not finish in time"
    UNSUPPORTED_VERSION = 35, "the call is known, its version is not"
    INVALID_REQUEST = 42, "the request contradicts itself or names a bad value"
    KAFKA_STORAGE_ERROR = 56, "the peer's disk failed or is full"
    FENCED_LEADER_EPOCH = 74, "the peer has seen a newer leader epoch or grant"
    UNKNOWN_TOPIC_ID = 100, "no such log here, and the sender may not create it"
    INCONSISTENT_TOPIC_ID = 103, "a log of that name has another topic id"
    LOG_DIVERGED = 1000, "the logs differ at or before the append offset"
    STALE_SESSION = 1001, "the replica has restarted or has a newer session"
    NOT_A_MEMBER = 1002, "the sender or the peer is not in the grant's member list"
    IMPOSSIBLE_EPOCH = 1003, "an epoch is not the sender's to take, or jumps too far"
    LOG_OFFLINE = 1004, "the log waits for an operator"
    NODE_STOPPING = 1005, "the peer is shutting down"
    UNSUPPORTED = 1006, "this peer does not serve this call"
    INCONSISTENT_OUTBOX = 1007, "topic, partitions or carrier differ from the outbox's own"
    MEMBER_TWICE = 1008, "the peer is another member of the outbox already"
    MAX_REPLAYS = 1100, "as many replay sessions run as the peer allows"
    UNKNOWN_RECORDING = 1101, "no such recording"
    INVALID_POSITION = 1102, "the position lies outside of the recording"
    EMPTY_RECORDING = 1103, "there is nothing to replay"
    UNAUTHORISED = 1104, "the peer does not allow this to the sender"
    UNKNOWN_REPLAY = 1105, "no such replay session, or its time to attach is over"
    TRUNCATED = 1106, "the log was cut below what the session had reached"
    RECORDING_IN_USE = 1107, "replays run on it, or a leader writes it"
    RECORDING_DELETED = 1108, "the recording was deleted"
    STALLED = 1109, "no byte could be sent for too long although there were some to send"
    LEASE_BROKEN = 1110, "the disk was needed: segments of the session were removed"
    INVALID_RECORDING = 1111, "its log can't be opened, or lacks a file"

    @classmethod
    def _missing_(cls, value: object) -> "ErrorCode | None":
        # An answer of a peer, so it is handled as an unknown error.
        return cls.UNKNOWN_SERVER_ERROR if isinstance(value, int) else None

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later on the same session."""
        return self in _RETRIABLE


_RETRIABLE = (ErrorCode.CORRUPT_MESSAGE, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NODE_STOPPING, ErrorCode.MAX_REPLAYS)
