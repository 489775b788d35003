"""Where a partition starts, once everything is known: startpoint > reset > checkpoint > default. Pure.

startpoint applied    its resolved offset
reset asked for       the default, whatever the checkpoint says
checkpoint            its offset, if it is for this very log and not below the log start
neither               the default, resolved as a startpoint is
"""

from dataclasses import dataclass
from enum import StrEnum

from pushrep.startpoints.checkpoints import Checkpoint
from pushrep.startpoints.errors import CheckpointUnusable, DefaultUnusable
from pushrep.startpoints.event_log import ReaderState
from pushrep.startpoints.events import Applied
from pushrep.startpoints.model import Startpoint
from pushrep.startpoints.resolve import LogFacts, Unresolved, resolve


class Origin(StrEnum):
    """What decided on a start."""

    STARTPOINT = "startpoint"
    CHECKPOINT = "checkpoint"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a partition starts, and why.

    `sequence` is the startpoint that this run descends from, 0 for none: it goes into every commit, and is the column
    `startpoint_epoch`. `until`: a bootstrap that partitions without one wait for, up to this offset.
    """

    offset: int
    origin: Origin
    sequence: int = 0
    until: int | None = None
    reset_marks: bool = False


def from_startpoint(applied: Applied, startpoint: Startpoint) -> Start:
    """The start that an applied startpoint gives."""
    return Start(
        offset=applied.offset,
        origin=Origin.STARTPOINT,
        sequence=applied.sequence,
        until=applied.until,
        reset_marks=startpoint.reset_marks,
    )


def without_startpoint(  # noqa: PLR0913 - all that decides
    checkpoint: Checkpoint, last: ReaderState | None, log: LogFacts, default: Startpoint, *, reset: bool, now_ms: int
) -> Start:
    """The start of a reader for which none is pending; `last` is the startpoint that its checkpoint descends from.

    Raises CheckpointUnusable, DefaultUnusable.
    """
    if checkpoint.offset is None or reset:
        answer = resolve(default, log, created_ms=now_ms)
        if isinstance(answer, Unresolved):
            raise DefaultUnusable(checkpoint.reader, answer.why)
        return Start(offset=answer.offset, origin=Origin.DEFAULT, sequence=checkpoint.sequence, until=answer.until)
    if checkpoint.log_id and log.log_id and checkpoint.log_id != log.log_id:
        why = f"the log was made anew (it is {log.log_id}, the checkpoint is of {checkpoint.log_id})"
        raise CheckpointUnusable(checkpoint.reader, why)
    if checkpoint.offset < log.start:
        raise CheckpointUnusable(checkpoint.reader, f"it is at {checkpoint.offset} and the log starts at {log.start}")
    applied = last.applied if last is not None else None
    # A bootstrap that was interrupted after its first commit goes on holding the others.
    until = applied.until if applied is not None and applied.until is not None else None
    return Start(
        offset=checkpoint.offset,
        origin=Origin.CHECKPOINT,
        sequence=checkpoint.sequence,
        until=until if until is not None and checkpoint.offset < until else None,
        reset_marks=last.written.startpoint.reset_marks if last is not None else False,
    )


class BootstrapGate:
    """Which partitions of one process may be read now: while any is bootstrapping, only those that are.

    Bootstrapping ones run together; one that reached its end, failed or was revoked holds nobody.
    """

    def __init__(self) -> None:
        self._until: dict[int, int] = {}

    def start(self, partition: int, offset: int, until: int | None) -> None:
        """A partition starts (again)."""
        self._until.pop(partition, None)
        if until is not None and offset < until:
            self._until[partition] = until

    def advance(self, partition: int, offset: int) -> None:
        """Its next offset to read is `offset` now."""
        if partition in self._until and offset >= self._until[partition]:
            del self._until[partition]

    def leave(self, partition: int) -> None:
        """It failed or was revoked."""
        self._until.pop(partition, None)

    def may_read(self, partition: int) -> bool:
        return not self._until or partition in self._until
