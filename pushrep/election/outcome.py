"""What an answer says: the errors of replication, by the names that stand on the wire.

The numbers belong to the protocol's table; whoever writes the answer looks a name up there.
"""

from enum import Enum, auto


class Outcome(Enum):
    """How a member judged a request."""

    __hash__ = object.__hash__  # Enum's own is Python: it hashes the name, for every look into a table

    NONE = auto()
    OFFSET_OUT_OF_RANGE = auto()
    CORRUPT_MESSAGE = auto()
    INVALID_REQUEST = auto()
    KAFKA_STORAGE_ERROR = auto()
    FENCED_LEADER_EPOCH = auto()
    UNKNOWN_TOPIC_ID = auto()
    INCONSISTENT_TOPIC_ID = auto()
    LOG_DIVERGED = auto()
    STALE_SESSION = auto()
    NOT_A_MEMBER = auto()
    IMPOSSIBLE_EPOCH = auto()
    LOG_OFFLINE = auto()
    INCONSISTENT_OUTBOX = auto()
    REQUEST_TIMED_OUT = auto()
    NODE_STOPPING = auto()
    UNKNOWN_SERVER_ERROR = auto()
