"""The words of a replay: what is asked for, what the log says about itself, how a session is set.

position   None       offset         AtTime(ms)                       where to begin: log start without one
length     FOLLOW     TO_END         n records                        how far to go
bound      stable     high_watermark flushed    written    a counter  what may be read of what is recorded
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias
from uuid import UUID

from pushrep.errors import BadArgument
from pushrep.log.slots import shown_name
from pushrep.wire.replay_messages import RecordingState

OFFSET_MAX = 2**63 - 2


class Length(Enum):
    """How far a replay goes that counts no records."""

    FOLLOW = "follow"
    TO_END = "to_end"


FOLLOW: Final = Length.FOLLOW
"""All that is there, then what comes."""
TO_END: Final = Length.TO_END
"""Up to what is recorded when the request is handled."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record at or after `timestamp_ms`, ms since 1970 UTC, by offset; the end if there is none."""

    timestamp_ms: int

    def __post_init__(self) -> None:
        if self.timestamp_ms < 0:
            raise BadArgument("timestamp_ms", f"{self.timestamp_ms} is before 1970")


Position: TypeAlias = int | AtTime | None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay. `recording`: its id, or `<topic>-<partition>`. Raises BadArgument for what can mean nothing.

    `length` n: at most n records, exactly. `bound`: stable, high_watermark, flushed, written, or a counter's name.
    `epoch_before`: who resumes names the leader epoch of the record before `position`; another one is TRUNCATED.
    """

    recording: int | str
    position: Position = None
    length: Length | int = FOLLOW
    bound: str = "stable"
    max_bytes_per_s: int | None = None
    epoch_before: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.position, bool) or not isinstance(self.position, int | AtTime | None):
            raise BadArgument("position", f"give an offset, AtTime(ms) or None, not {self.position!r}")
        if isinstance(self.length, bool) or not isinstance(self.length, int | Length):
            raise BadArgument("length", f"give FOLLOW, TO_END or a number of records, not {self.length!r}")
        if isinstance(self.length, int) and self.length < 0:
            raise BadArgument("length", f"{self.length} records can't be replayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """A log at one moment: its offsets, each the next one, and whether a writer has it open."""

    start: int
    written: int
    flushed: int
    high_watermark: int
    is_live: bool = True

    @property
    def stable(self) -> int:
        """min(high watermark, flushed offset): nothing below is ever taken back."""
        return min(self.flushed, self.high_watermark)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How sessions are kept. Times in ms; `block_bytes`: what one session reads in its turn. Raises BadArgument."""

    max_sessions: int = 20
    connect_timeout_ms: int = 5_000
    liveness_timeout_ms: int = 10_000
    heartbeat_ms: int = 3_000
    block_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise BadArgument(name, f"{getattr(self, name)} is below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingInfo:
    """A recording as it is now. `recording_id` None: no catalogue knows it. `is_live`: somebody writes it.

    Offsets [start_offset, end_offset) were written, those below `stable_offset` are never taken back; a log
    that the catalogue holds for INVALID may not be readable. A node tells of no offset above the stable one while
    the log is live. `outbox_id`: whose log it is, None if that is not known. `partition`: where a directory has worker
    slots, a number of its own for each slot's (pushrep.log.slots).
    """

    recording_id: int | None
    topic: str
    partition: int
    log_id: UUID | None
    start_offset: int
    stable_offset: int
    end_offset: int
    is_live: bool
    state: RecordingState
    outbox_id: UUID | None = None

    @property
    def name(self) -> str:
        """`<topic>-<partition>`, which a request may name it by; of a worker slot `slot-<m>/<topic>-<n>`."""
        return shown_name(self.topic, self.partition)
