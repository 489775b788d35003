"""What happens to startpoints, as facts with their JSON; a store keeps them in order and forgets none. Pure.

    written    sequence, target, startpoint, author, reason, created_ms, ttl_s, origin    one per startpoint
    applied    sequence, reader, at_ms, offset, start, end, log, until, by_policy         it was resolved, once
    consumed   sequence, reader, at_ms                                                    the commit behind it is in
    failed     sequence, reader, at_ms, why                                               it stops the reader's start
    expired    sequence, at_ms                               for all who had not applied it
    cancelled  sequence, at_ms, author, reason               for all who had not consumed it

Field by field in docs/formats/startpoints.md. Times are ms since 1970 of the writer's wall clock: for people and for
`ttl_s` only, order is the sequence's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pushrep.startpoints.model import Reader, Startpoint, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A startpoint as it was written; `origin` is the one that a fan-out copied."""

    sequence: int
    target: Target
    startpoint: Startpoint
    author: str
    reason: str
    created_ms: int
    ttl_s: int | None
    origin: int | None = None

    def is_due(self, now_ms: int) -> bool:
        """Whether its time to be applied is over."""
        return self.ttl_s is not None and now_ms >= self.created_ms + self.ttl_s * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What it resolved to, and the log's range [start, end) at that moment; `until` as in `Resolved`."""

    sequence: int
    reader: Reader
    at_ms: int
    offset: int
    start: int
    end: int
    log_id: str
    until: int | None = None
    by_policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """The reader committed behind it, or read it with `remove`."""

    sequence: int
    reader: Reader
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It does not fit the reader's log, and `why`."""

    sequence: int
    reader: Reader
    at_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """Nobody applies it from now on."""

    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """It was taken back, by whom and why."""

    sequence: int
    at_ms: int
    author: str
    reason: str


Fact: TypeAlias = Written | Applied | Consumed | Failed | Expired | Cancelled


def to_json(fact: Fact) -> dict[str, Any]:
    """The fact's fields, all of them JSON's own types."""
    match fact:
        case Written():
            return {
                "event": "written",
                "sequence": fact.sequence,
                "consumer": fact.target.consumer,
                "topic": fact.target.topic,
                "partition": fact.target.partition,
                "task": fact.target.task,
                "startpoint": fact.startpoint.to_json(),
                "author": fact.author,
                "reason": fact.reason,
                "created_ms": fact.created_ms,
                "ttl_s": fact.ttl_s,
                "origin": fact.origin,
            }
        case Applied():
            return {
                "event": "applied",
                **_for_reader(fact),
                "offset": fact.offset,
                "start": fact.start,
                "end": fact.end,
                "log": fact.log_id,
                "until": fact.until,
                "by_policy": fact.by_policy,
            }
        case Consumed():
            return {"event": "consumed", **_for_reader(fact)}
        case Failed():
            return {"event": "failed", **_for_reader(fact), "why": fact.why}
        case Expired():
            return {"event": "expired", "sequence": fact.sequence, "at_ms": fact.at_ms}
        case Cancelled():
            return {
                "event": "cancelled",
                "sequence": fact.sequence,
                "at_ms": fact.at_ms,
                "author": fact.author,
                "reason": fact.reason,
            }


def from_json(fields: Mapping[str, Any]) -> Fact:
    """The fact; raises KeyError, TypeError or ValueError (BadArgument is one) for what `to_json` does not give."""
    return _PARSERS[fields["event"]](fields)


def _for_reader(fact: Applied | Consumed | Failed) -> dict[str, Any]:
    reader = fact.reader
    return {
        "sequence": fact.sequence,
        "consumer": reader.consumer,
        "topic": reader.topic,
        "partition": reader.partition,
        "task": reader.task or None,
        "at_ms": fact.at_ms,
    }


def _reader(fields: Mapping[str, Any]) -> Reader:
    return Reader(fields["consumer"], fields["topic"], fields["partition"], fields["task"] or "")


def _written(fields: Mapping[str, Any]) -> Written:
    return Written(
        sequence=fields["sequence"],
        target=Target(fields["consumer"], fields["topic"], fields["partition"], fields["task"]),
        startpoint=Startpoint.from_json(fields["startpoint"]),
        author=fields["author"],
        reason=fields["reason"],
        created_ms=fields["created_ms"],
        ttl_s=fields["ttl_s"],
        origin=fields["origin"],
    )


def _applied(fields: Mapping[str, Any]) -> Applied:
    return Applied(
        sequence=fields["sequence"],
        reader=_reader(fields),
        at_ms=fields["at_ms"],
        offset=fields["offset"],
        start=fields["start"],
        end=fields["end"],
        log_id=fields["log"],
        until=fields["until"],
        by_policy=fields["by_policy"],
    )


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], Fact]] = {
    "written": _written,
    "applied": _applied,
    "consumed": lambda fields: Consumed(sequence=fields["sequence"], reader=_reader(fields), at_ms=fields["at_ms"]),
    "failed": lambda fields: Failed(
        sequence=fields["sequence"], reader=_reader(fields), at_ms=fields["at_ms"], why=fields["why"]
    ),
    "expired": lambda fields: Expired(sequence=fields["sequence"], at_ms=fields["at_ms"]),
    "cancelled": lambda fields: Cancelled(
        sequence=fields["sequence"], at_ms=fields["at_ms"], author=fields["author"], reason=fields["reason"]
    ),
}
