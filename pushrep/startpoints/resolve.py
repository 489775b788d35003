"""From a startpoint and a log to an offset; and where a partition starts, by all that is known. Pure.

    fits the log                -> Resolved(offset)
    does not, policy error      -> Unresolved(why): the partition does not start
    does not, earliest, latest  -> Resolved(the log's start or end, by_policy = why it did not fit)

The log is its readable range [start, end). A time without a match does not fit: no record is that late.

A start is the first of these:

startpoint applied    its resolved offset
reset asked for       the job's default, whatever the checkpoint says
checkpoint            its offset, if it is for this very log and not below the log start
neither               the job's default, resolved as a startpoint is
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias, assert_never

from pushrep.startpoints.event_log import ReaderState
from pushrep.startpoints.model import (
    Applied,
    Checkpoint,
    Failed,
    Kind,
    OutOfRange,
    Reader,
    Startpoint,
    StartpointRefused,
    State,
)

FirstAt: TypeAlias = Callable[[int], int | None]
"""Offset of the first record at or after ms since 1970, None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """A partition at one moment: readable offsets [start, end), a look-up of times, the log's id ("" unknown)."""

    start: int
    end: int
    first_at: FirstAt
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """offset: to start at; until: the end that a bootstrap must reach; by_policy: why the policy decided."""

    offset: int
    until: int | None = None
    by_policy: str | None = None


@dataclass(frozen=True, slots=True)
class Unresolved:
    """It does not fit, and `why`."""

    why: str


def resolve(  # noqa: PLR0911 - an answer per kind
    startpoint: Startpoint, log: LogFacts, *, created_ms: int, position: int | None = None
) -> Resolved | Unresolved:
    """Where `startpoint`, written at `created_ms`, starts in `log`. position: the consumer's, if it is known."""
    kind, value = startpoint.kind, startpoint.value or 0
    match kind:
        case Kind.EARLIEST:
            return Resolved(log.start)
        case Kind.LATEST:
            return Resolved(log.end)
        case Kind.BOOTSTRAP:
            # In an empty log there is no end to reach, so no partition waits for it.
            return Resolved(log.start, until=log.end if log.end > log.start else None)
        case Kind.SPECIFIC_OFFSET:
            return _in_range(startpoint, log, value)
        case Kind.RELATIVE_RECORDS:
            if position is None:
                why = "the consumer has no checkpoint to count from"
                return _by_policy(startpoint, log, f"{startpoint}: {why}")
            return _in_range(startpoint, log, position + value)
        case Kind.TIMESTAMP:
            return _at(startpoint, log, value)
        case Kind.RELATIVE_MS:
            return _at(startpoint, log, created_ms + value)
    assert_never(kind)


def _in_range(startpoint: Startpoint, log: LogFacts, offset: int) -> Resolved | Unresolved:
    if log.start <= offset <= log.end:
        return Resolved(offset)
    where = "below the log start" if offset < log.start else "beyond the end"
    return _by_policy(startpoint, log, f"offset {offset} is {where}: the log holds [{log.start}, {log.end})")


def _at(startpoint: Startpoint, log: LogFacts, ms: int) -> Resolved | Unresolved:
    # Times before 1970 count as 1970: every record is later, so the first one is found.
    found = log.first_at(max(ms, 0))
    if found is None or found >= log.end:
        return _by_policy(startpoint, log, f"no record of [{log.start}, {log.end}) is as late as {ms} ms since 1970")
    return Resolved(max(found, log.start))


def _by_policy(startpoint: Startpoint, log: LogFacts, why: str) -> Resolved | Unresolved:
    match startpoint.out_of_range:
        case OutOfRange.ERROR:
            return Unresolved(why)
        case OutOfRange.EARLIEST:
            return Resolved(log.start, by_policy=why)
        case OutOfRange.LATEST:
            return Resolved(log.end, by_policy=why)
    assert_never(startpoint.out_of_range)


class ApplyAnswer(NamedTuple):
    """The answer to a reader that applies a startpoint. `is_new`: it still has to be written."""

    fact: Applied | Failed
    is_new: bool


def answer_of(  # noqa: PLR0913 - all that decides
    found: ReaderState,
    reader: Reader,
    log: LogFacts,
    *,
    position: int | None,
    now_ms: int,
    refused: Mapping[Kind, str] | None = None,
) -> ApplyAnswer:
    """The stored answer of an applied or failed startpoint, a new one for a pending one. Pure.

    refused: kinds that this reader can't apply, and why: they fail. A stored offset that the log has lost meanwhile, or
    of another log, fails, too: it is never resolved again.
    """

    def failed(why: str, *, is_new: bool = True) -> ApplyAnswer:
        return ApplyAnswer(Failed(sequence=found.sequence, reader=reader, at_ms=now_ms, why=why), is_new)

    written = found.written
    if found.state is State.FAILED:
        return failed(found.failure or "", is_new=False)
    if found.applied is not None:
        why = _lost(found.applied, log)
        return ApplyAnswer(found.applied, is_new=False) if why is None else failed(why)
    if (why := (refused or {}).get(written.startpoint.kind)) is not None:
        return failed(why)
    resolved = resolve(written.startpoint, log, created_ms=written.created_ms, position=position)
    if isinstance(resolved, Unresolved):
        return failed(resolved.why)
    applied = Applied(
        sequence=found.sequence,
        reader=reader,
        at_ms=now_ms,
        offset=resolved.offset,
        start=log.start,
        end=log.end,
        log_id=log.log_id,
        until=resolved.until,
        by_policy=resolved.by_policy,
        position=position,
    )
    return ApplyAnswer(applied, is_new=True)


def _lost(applied: Applied, log: LogFacts) -> str | None:
    if applied.log_id and log.log_id and applied.log_id != log.log_id:
        return f"it was resolved to {applied.offset} of a log that was made anew since (it is {log.log_id} now)"
    if applied.offset < log.start:
        return f"it was resolved to {applied.offset}, and the log starts at {log.start} now"
    # An offset above the end is not lost: without its writer a log's end may be unknown.
    return None


class Origin(StrEnum):
    """The reason for a start."""

    STARTPOINT = "startpoint"
    CHECKPOINT = "checkpoint"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a partition starts, and why.

    sequence: the startpoint of this run, 0 for none: it is in every commit, and the column `startpoint_epoch`. until: a
    bootstrap up to this offset, for which partitions without one wait.
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
    """The start of a reader without a pending startpoint. last: the startpoint of its checkpoint's run.

    Raises StartpointRefused.
    """

    def unusable(why: str) -> StartpointRefused:
        return StartpointRefused(f"{checkpoint.reader} has no place to start: {why}. Set a startpoint that says where")

    if checkpoint.offset is None or reset:
        answer = resolve(default, log, created_ms=now_ms)
        if isinstance(answer, Unresolved):
            raise unusable(f"there is no checkpoint, and its default does not fit: {answer.why}")
        return Start(offset=answer.offset, origin=Origin.DEFAULT, sequence=checkpoint.sequence, until=answer.until)
    if checkpoint.log_id and log.log_id and checkpoint.log_id != log.log_id:
        made_anew = f"it is {log.log_id}, the checkpoint is of {checkpoint.log_id}"
        raise unusable(f"the log of its checkpoint was made anew ({made_anew})")
    if checkpoint.offset < log.start:
        raise unusable(f"its checkpoint is at {checkpoint.offset} and the log starts at {log.start}")
    # The others still wait for a bootstrap that was interrupted after its first commit.
    until = last.applied.until if last is not None and last.applied is not None else None
    return Start(
        offset=checkpoint.offset,
        origin=Origin.CHECKPOINT,
        sequence=checkpoint.sequence,
        until=until if until is not None and checkpoint.offset < until else None,
        reset_marks=last.written.startpoint.reset_marks if last is not None else False,
    )


class BootstrapGate:
    """Which partitions of one process may be read now: while any are bootstrapping, only those.

    Nobody waits for one that reached its end, failed or was revoked.
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
