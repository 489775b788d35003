"""Why a push session ended, with the number that stands on the wire and whether the replica is told."""

from enum import IntEnum

NOT_ENDED = -1
"""What a request says in the place of a reason while its session goes on."""


class PushSessionEndReason(IntEnum):
    """A number is never given a second meaning; one from a newer peer that is unknown here reads as UNKNOWN."""

    UNKNOWN = 0
    NEW_LEADER_EPOCH = 1
    STALE_REPLICA_EPOCH = 2
    NON_RETRIABLE_ERROR = 3
    LEADER_LOG_ERROR = 4
    LOG_DIVERGED = 5
    REPLICA_REMOVED = 6
    PARTITION_DELETED = 7
    PUSH_DISABLED = 8
    SHUTDOWN = 9

    @classmethod
    def _missing_(cls, value: object) -> "PushSessionEndReason | None":
        return cls.UNKNOWN if isinstance(value, int) else None

    @property
    def replica_is_told(self) -> bool:
        """Whether an end-session signal goes to the replica: not where it has said so itself, or would refuse it."""
        return self in _TOLD


_TOLD = frozenset(
    {
        PushSessionEndReason.LEADER_LOG_ERROR,
        PushSessionEndReason.REPLICA_REMOVED,
        PushSessionEndReason.PARTITION_DELETED,
        PushSessionEndReason.PUSH_DISABLED,
        PushSessionEndReason.SHUTDOWN,
    }
)
