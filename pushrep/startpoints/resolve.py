"""A wish and a log in, an offset out: the one place where a startpoint is resolved. Pure.

    fits the log                -> Resolved(offset)
    does not, policy error      -> Unresolved(why): the partition does not start
    does not, earliest, latest  -> Resolved(that end, by_policy = why it did not fit)

The log is what its readers may see, [start, end). Time without a match: no record in it is that late.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from pushrep.startpoints.model import Kind, OutOfRange, Startpoint

FirstAt: TypeAlias = Callable[[int], int | None]
"""Offset of the first record at or after ms since 1970, None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """A partition as it is now: readable offsets [start, end), how to look a time up, the log's own id ("" unknown)."""

    start: int
    end: int
    first_at: FirstAt
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """`offset` to start at; `until` the end that a bootstrap must reach; `by_policy` why the policy had to answer."""

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
    """Where `startpoint`, written at `created_ms`, starts in `log`; `position`: where the consumer is, if known."""
    kind, value = startpoint.kind, startpoint.value or 0
    match kind:
        case Kind.EARLIEST:
            return Resolved(log.start)
        case Kind.LATEST:
            return Resolved(log.end)
        case Kind.BOOTSTRAP:
            # Nothing to reach in an empty log: it holds nobody.
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
    # Nothing is that late before 1970 began: a log whose times are all later starts at its first record.
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
