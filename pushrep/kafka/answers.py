"""What to do after a broker's answer to a batch: a table by the protocol's error codes.

Source: Kafka's protocol guide, "Error Codes". A code that is not in the table is tried again: what was appended and
not acknowledged is found by its sequence number.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import NamedTuple


class Code(IntEnum):
    """The error codes that are distinguished here."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    TOPIC_AUTHORIZATION_FAILED = 29
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_VERSION = 35
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    UNKNOWN_PRODUCER_ID = 59
    LISTENER_NOT_FOUND = 72
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    INVALID_RECORD = 87
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103

    @classmethod
    def name_of(cls, code: int) -> str:
        """The code's name for messages; a code without a name here stays a number."""
        try:
            return cls(code).name
        except ValueError:
            return f"error {code}"


class BrokerAnswer(NamedTuple):
    """A broker's answer for one batch. `base_offset` is -1 if it does not know; `message` is for people.

    record_errors: the records that it refused, each by its number in the batch, with the broker's words (KIP-467).
    """

    error_code: int
    base_offset: int
    message: str = ""
    record_errors: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        name = Code.name_of(self.error_code)
        return f"{name} ({self.message})" if self.message else name


class AnswerReaction(Enum):
    """What to do with an answered batch."""

    DONE = auto()
    RETRY = auto()
    """Send the same bytes again, after a pause."""
    REFRESH = auto()
    """The same, after asking who leads."""
    CHECK_TOPIC = auto()
    """The same, after making sure that the topic is still the one it was."""
    RESYNC = auto()
    """The broker has lost this producer id's state: go on under a new id, after what the topic holds."""
    SPLIT = auto()
    """Too large as one batch; a record that is refused alone stops its partition."""
    ISOLATE = auto()
    """One of its records is refused: send that one alone, after those before it; refused again it stops its partition.
    """
    STOP = auto()
    """Wait until somebody changes the topic's settings or the rights."""


_REACTIONS: Mapping[int, AnswerReaction] = {
    Code.NONE: AnswerReaction.DONE,
    # the topic has it, and the broker has forgotten where
    Code.DUPLICATE_SEQUENCE_NUMBER: AnswerReaction.DONE,
    Code.LEADER_NOT_AVAILABLE: AnswerReaction.REFRESH,
    Code.NOT_LEADER_OR_FOLLOWER: AnswerReaction.REFRESH,
    Code.KAFKA_STORAGE_ERROR: AnswerReaction.REFRESH,
    Code.NETWORK_EXCEPTION: AnswerReaction.REFRESH,
    Code.LISTENER_NOT_FOUND: AnswerReaction.REFRESH,
    Code.FENCED_LEADER_EPOCH: AnswerReaction.REFRESH,
    Code.UNKNOWN_LEADER_EPOCH: AnswerReaction.REFRESH,
    Code.UNKNOWN_TOPIC_OR_PARTITION: AnswerReaction.CHECK_TOPIC,
    Code.UNKNOWN_TOPIC_ID: AnswerReaction.CHECK_TOPIC,
    Code.INCONSISTENT_TOPIC_ID: AnswerReaction.CHECK_TOPIC,
    Code.OUT_OF_ORDER_SEQUENCE_NUMBER: AnswerReaction.RESYNC,
    Code.INVALID_PRODUCER_EPOCH: AnswerReaction.RESYNC,
    Code.UNKNOWN_PRODUCER_ID: AnswerReaction.RESYNC,
    Code.PRODUCER_FENCED: AnswerReaction.RESYNC,
    Code.MESSAGE_TOO_LARGE: AnswerReaction.SPLIT,
    Code.RECORD_LIST_TOO_LARGE: AnswerReaction.SPLIT,
    Code.INVALID_TOPIC_EXCEPTION: AnswerReaction.STOP,
    Code.TOPIC_AUTHORIZATION_FAILED: AnswerReaction.STOP,
    Code.CLUSTER_AUTHORIZATION_FAILED: AnswerReaction.STOP,
    Code.INVALID_TIMESTAMP: AnswerReaction.ISOLATE,
    Code.UNSUPPORTED_FOR_MESSAGE_FORMAT: AnswerReaction.STOP,
    Code.POLICY_VIOLATION: AnswerReaction.STOP,
    Code.UNSUPPORTED_COMPRESSION_TYPE: AnswerReaction.STOP,
    Code.INVALID_RECORD: AnswerReaction.ISOLATE,
}


def reaction_to(error_code: int) -> AnswerReaction:
    """What an answer with this code means for its batch."""
    return _REACTIONS.get(error_code, AnswerReaction.RETRY)
