"""The error codes of every answer, in one table: number, name, whether the same request may be sent again, meaning.

Numbers below 1000 are Kafka's, with Kafka's names; from 1000 on they are ours. None is ever given a second meaning.
A new one is a member of ErrorCode and a row of ERROR_TABLE.
"Retriable" means that the same bytes may succeed later on the same session. That differs from Kafka, where a storage
error is retriable because another broker may lead by then.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple


class ErrorCode(IntEnum):
    """The error code of an answer. A number that this version does not know reads as UNKNOWN_SERVER_ERROR."""

    __hash__ = int.__hash__  # Enum's own hashes the name in Python, at every look-up

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    REQUEST_TIMED_OUT = 7
    UNSUPPORTED_VERSION = 35
    INVALID_REQUEST = 42
    KAFKA_STORAGE_ERROR = 56
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    LOG_DIVERGED = 1000
    STALE_SESSION = 1001
    NOT_A_MEMBER = 1002
    IMPOSSIBLE_EPOCH = 1003
    LOG_OFFLINE = 1004
    NODE_STOPPING = 1005
    UNSUPPORTED = 1006
    INCONSISTENT_OUTBOX = 1007
    MEMBER_TWICE = 1008
    MAX_REPLAYS = 1100
    UNKNOWN_RECORDING = 1101
    INVALID_POSITION = 1102
    EMPTY_RECORDING = 1103
    UNAUTHORISED = 1104
    UNKNOWN_REPLAY = 1105
    TRUNCATED = 1106
    RECORDING_IN_USE = 1107
    RECORDING_DELETED = 1108
    STALLED = 1109
    LEASE_BROKEN = 1110

    @classmethod
    def _missing_(cls, value: object) -> "ErrorCode | None":
        # An answer of a peer, so it is handled as an unknown error.
        return cls.UNKNOWN_SERVER_ERROR if isinstance(value, int) else None

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later on the same session."""
        return ERROR_TABLE[self].retriable

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return ERROR_TABLE[self].meaning


class ErrorRow(NamedTuple):
    """A row of the table."""

    retriable: bool
    meaning: str


_AGAIN, _FINAL = True, False

ERROR_TABLE: Mapping[ErrorCode, ErrorRow] = MappingProxyType(
    {
        ErrorCode.UNKNOWN_SERVER_ERROR: ErrorRow(_FINAL, "the peer failed in a way that has no code here"),
        ErrorCode.NONE: ErrorRow(_FINAL, "no error"),
        ErrorCode.OFFSET_OUT_OF_RANGE: ErrorRow(_FINAL, "the offset lies above the log's end, or below its start"),
        ErrorCode.CORRUPT_MESSAGE: ErrorRow(_AGAIN, "a record batch is damaged or of an impossible epoch"),
        ErrorCode.REQUEST_TIMED_OUT: ErrorRow(_AGAIN, "the peer could not finish in time"),
        ErrorCode.UNSUPPORTED_VERSION: ErrorRow(_FINAL, "the call is known, its version is not"),
        ErrorCode.INVALID_REQUEST: ErrorRow(_FINAL, "the request contradicts itself or names a bad value"),
        ErrorCode.KAFKA_STORAGE_ERROR: ErrorRow(_FINAL, "the peer's disk failed or is full"),
        ErrorCode.FENCED_LEADER_EPOCH: ErrorRow(_FINAL, "the peer has seen a newer leader epoch or grant"),
        ErrorCode.UNKNOWN_TOPIC_ID: ErrorRow(_FINAL, "no such log here, and the sender may not create it"),
        ErrorCode.INCONSISTENT_TOPIC_ID: ErrorRow(_FINAL, "a log of that name has another topic id"),
        ErrorCode.LOG_DIVERGED: ErrorRow(_FINAL, "the logs differ at or before the append offset"),
        ErrorCode.STALE_SESSION: ErrorRow(_FINAL, "the replica has restarted or has a newer session"),
        ErrorCode.NOT_A_MEMBER: ErrorRow(_FINAL, "the sender or the peer is not in the grant's member list"),
        ErrorCode.IMPOSSIBLE_EPOCH: ErrorRow(_FINAL, "an epoch is not the sender's to take, or jumps too far"),
        ErrorCode.LOG_OFFLINE: ErrorRow(_FINAL, "the log waits for an operator"),
        ErrorCode.NODE_STOPPING: ErrorRow(_AGAIN, "the peer is shutting down"),
        ErrorCode.UNSUPPORTED: ErrorRow(_FINAL, "this peer does not serve this call"),
        ErrorCode.INCONSISTENT_OUTBOX: ErrorRow(_FINAL, "topic, partitions or carrier differ from the outbox's own"),
        ErrorCode.MEMBER_TWICE: ErrorRow(_FINAL, "the peer is another member of the outbox already"),
        ErrorCode.MAX_REPLAYS: ErrorRow(_AGAIN, "as many replay sessions run as the peer allows"),
        ErrorCode.UNKNOWN_RECORDING: ErrorRow(_FINAL, "no such recording"),
        ErrorCode.INVALID_POSITION: ErrorRow(_FINAL, "the position lies outside of the recording"),
        ErrorCode.EMPTY_RECORDING: ErrorRow(_FINAL, "there is nothing to replay"),
        ErrorCode.UNAUTHORISED: ErrorRow(_FINAL, "the peer does not allow this to the sender"),
        ErrorCode.UNKNOWN_REPLAY: ErrorRow(_FINAL, "no such replay session, or its time to attach is over"),
        ErrorCode.TRUNCATED: ErrorRow(_FINAL, "the log was cut below what the session had reached"),
        ErrorCode.RECORDING_IN_USE: ErrorRow(_FINAL, "replays run on it, or a leader writes it"),
        ErrorCode.RECORDING_DELETED: ErrorRow(_FINAL, "the recording was deleted"),
        ErrorCode.STALLED: ErrorRow(_FINAL, "no byte could be sent for too long although there were some to send"),
        ErrorCode.LEASE_BROKEN: ErrorRow(_FINAL, "the disk was needed: segments of the session were removed"),
    }
)
"""Every code has a row."""
assert ERROR_TABLE.keys() == set(ErrorCode), "every error code has a row"
