"""A startpoint, its target, its states for a reader, and the facts that a store keeps of it. Values; pure.

    kind              value            means, when it is applied
    SPECIFIC_OFFSET   offset           that offset
    TIMESTAMP         ms since 1970    the first record at or after it
    EARLIEST          -                the log start
    LATEST            -                the end
    BOOTSTRAP         -                the log start; partitions without one wait until its present end is reached
    RELATIVE_RECORDS  records, not 0   so many from the consumer's position (its checkpoint, or its live position)
    RELATIVE_MS       ms below 0       as TIMESTAMP, so long before the startpoint was written

The first five are those of Samza's SEP-18, RELATIVE_* are `--shift-by` and `--by-duration` of kafka-consumer-groups.

The states of a startpoint are kept per reader: a table, no flags. Drawn in docs/startpoints.md.

                APPLY     CONSUME    FAIL      EXPIRE    CANCEL
    PENDING     APPLIED   CONSUMED   FAILED    EXPIRED   CANCELLED     consumed at once: read with remove=True
    APPLIED     -         CONSUMED   FAILED    -         CANCELLED     "-" stays as it is: the first event wins, so
    FAILED      -         -          -         -         CANCELLED     two writers that race leave one answer
    CONSUMED, EXPIRED, CANCELLED     final

A failed one is not over: it stops its partition's start until it is cancelled or a newer one is written.

Everything that happens to startpoints is stored as facts, in order, and never removed:

    written    sequence, target, startpoint, author, reason, created_ms, ttl_s, origin    one per startpoint
    applied    sequence, reader, at_ms, offset, start, end, log, until, by_policy, position     it was resolved, once
    consumed   sequence, reader, at_ms                                                    the commit behind it is in
    failed     sequence, reader, at_ms, why                                               it stops the reader's start
    expired    sequence, at_ms                               for all that had not applied it
    cancelled  sequence, at_ms, author, reason               for all that had not consumed it

Field by field in docs/internals/formats/startpoints.md. Times are ms since 1970 of the writer's wall clock:
for people and for `ttl_s` only, order is the sequence's.
"""

import getpass
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeAlias

from pushrep.errors import BadArgument
from pushrep.log.directory_files import is_topic, shown_name
from pushrep.settings import whole_number
from pushrep.topic_id_partition import PARTITION_MAX

OFFSET_END = 1 << 63
NAME_CHARACTERS_MAX = 249
REASON_CHARACTERS_MAX = 2000


class Kind(StrEnum):
    """The kinds of startpoints, see the file's map."""

    SPECIFIC_OFFSET = "SPECIFIC_OFFSET"
    TIMESTAMP = "TIMESTAMP"
    EARLIEST = "EARLIEST"
    LATEST = "LATEST"
    BOOTSTRAP = "BOOTSTRAP"
    RELATIVE_RECORDS = "RELATIVE_RECORDS"
    RELATIVE_MS = "RELATIVE_MS"


class OutOfRange(StrEnum):
    """What to do if a startpoint does not fit the log (out of range, or no record that late)."""

    ERROR = "error"
    EARLIEST = "earliest"
    LATEST = "latest"


# Kind -> half-open range of its value; None: it takes none.
_VALUES: Mapping[Kind, tuple[int, int] | None] = {
    Kind.SPECIFIC_OFFSET: (0, OFFSET_END),
    Kind.TIMESTAMP: (0, OFFSET_END),
    Kind.EARLIEST: None,
    Kind.LATEST: None,
    Kind.BOOTSTRAP: None,
    Kind.RELATIVE_RECORDS: (-OFFSET_END, OFFSET_END),
    Kind.RELATIVE_MS: (-OFFSET_END, 0),
}
assert _VALUES.keys() == set(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Startpoint:
    """Where to start next. Use the constructors below; raises BadArgument for a value that its kind can't have.

    `out_of_range` says what to do where it does not fit the log; `reset_marks` that the replay filter behind the
    consumer shall forget what it has seen, so that records read again are not dropped as replayed. Of an offset with
    `reset_marks` one of two more, for a job that fills a table: `replace_until`, rows of records from there on stay as
    they are; `append_only`, all rows stay, and what is read again comes beside them.
    """

    kind: Kind
    value: int | None = None
    out_of_range: OutOfRange = OutOfRange.ERROR
    reset_marks: bool = False
    replace_until: int | None = None
    append_only: bool = False

    def __post_init__(self) -> None:
        if self.replace_until is not None:
            self._check_replace_until(self.replace_until)
        if self.append_only and (self.kind is not Kind.SPECIFIC_OFFSET or not self.reset_marks or self.replace_until):
            raise BadArgument("append_only", "it is for an offset, with reset_marks and without replace_until")
        wanted = _VALUES[self.kind]
        if wanted is None:
            if self.value is not None:
                raise BadArgument("value", f"{self.kind} takes none, got {self.value!r}")
            return
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise BadArgument("value", f"{self.kind} takes a whole number, got {self.value!r}")
        first, end = wanted
        if not first <= self.value < end:
            raise BadArgument("value", f"{self.kind} takes a number from {first} to {end - 1}, got {self.value}")
        if self.kind is Kind.RELATIVE_RECORDS and self.value == 0:
            raise BadArgument("records", "0 records from where the consumer stands changes nothing")

    def _check_replace_until(self, until: object) -> None:
        if self.kind is not Kind.SPECIFIC_OFFSET or not self.reset_marks:
            raise BadArgument("replace_until", "it is for an offset, with reset_marks")
        whole_number("replace_until", until, (self.value or 0) + 1, OFFSET_END - 1)

    @classmethod
    def specific(
        cls,
        offset: int,
        *,
        out_of_range: OutOfRange | str = OutOfRange.ERROR,
        reset_marks: bool = False,
        replace_until: int | None = None,
        append_only: bool = False,
    ) -> "Startpoint":
        """At this offset; the log's end is in range, too."""
        kind = Kind.SPECIFIC_OFFSET
        return cls._make(kind, offset, out_of_range, reset_marks, replace_until, append_only=append_only)

    @classmethod
    def timestamp(
        cls, ms: int, *, out_of_range: OutOfRange | str = OutOfRange.ERROR, reset_marks: bool = False
    ) -> "Startpoint":
        """At the first record whose time is `ms` since 1970 or later."""
        return cls._make(Kind.TIMESTAMP, ms, out_of_range, reset_marks)

    @classmethod
    def earliest(cls, *, reset_marks: bool = False) -> "Startpoint":
        """At the log start."""
        return cls._make(Kind.EARLIEST, None, OutOfRange.ERROR, reset_marks)

    @classmethod
    def latest(cls, *, reset_marks: bool = False) -> "Startpoint":
        """At the end: only what comes later."""
        return cls._make(Kind.LATEST, None, OutOfRange.ERROR, reset_marks)

    @classmethod
    def bootstrap(cls, *, reset_marks: bool = False) -> "Startpoint":
        """At the log start, and before the partitions without one go on, up to the end seen when applied."""
        return cls._make(Kind.BOOTSTRAP, None, OutOfRange.ERROR, reset_marks)

    @classmethod
    def relative(
        cls,
        *,
        records: int | None = None,
        ms: int | None = None,
        out_of_range: OutOfRange | str = OutOfRange.ERROR,
        reset_marks: bool = False,
    ) -> "Startpoint":
        """So many `records` from where the consumer stands, or so many `ms` (below 0) before now. One of the two."""
        if (records is None) == (ms is None):
            raise BadArgument("relative", "give records or ms, one of the two")
        kind = Kind.RELATIVE_RECORDS if records is not None else Kind.RELATIVE_MS
        return cls._make(kind, records if records is not None else ms, out_of_range, reset_marks)

    @classmethod
    def _make(  # noqa: PLR0913 - what a startpoint is made of
        cls,
        kind: Kind,
        value: int | None,
        out_of_range: OutOfRange | str,
        reset_marks: bool,  # noqa: FBT001 - private
        replace_until: int | None = None,
        *,
        append_only: bool = False,
    ) -> "Startpoint":
        try:
            policy = OutOfRange(out_of_range)
        except ValueError:
            raise BadArgument("out_of_range", f"give error, earliest or latest, not {out_of_range!r}") from None
        return cls(
            kind=kind,
            value=value,
            out_of_range=policy,
            reset_marks=bool(reset_marks),
            replace_until=replace_until,
            append_only=append_only,
        )

    def to_json(self) -> dict[str, Any]:
        fields = {
            "kind": str(self.kind),
            "value": self.value,
            "out_of_range": str(self.out_of_range),
            "reset_marks": self.reset_marks,
        }
        # Absent by default: then all rows of a table that are read again are replaced.
        if self.replace_until is not None:
            fields["replace_until"] = self.replace_until
        return fields | {"append_only": True} if self.append_only else fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Startpoint":
        """Raises KeyError, TypeError or ValueError for what `to_json` does not give."""
        kind, value, until = Kind(fields["kind"]), fields["value"], fields.get("replace_until")
        append_only = fields.get("append_only", False)
        return cls._make(kind, value, fields["out_of_range"], fields["reset_marks"], until, append_only=append_only)

    def __str__(self) -> str:
        return str(self.kind) if self.value is None else f"{self.kind} {self.value}"


@dataclass(frozen=True, slots=True, order=True)
class Reader:
    """One that starts: a consumer (a task of it, where tasks share a partition) in one partition of a topic."""

    consumer: str
    topic: str
    partition: int
    task: str = ""

    def __post_init__(self) -> None:
        check_name("consumer", self.consumer)
        if self.task:
            check_name("task", self.task)
        check_topic(self.topic)
        check_partition(self.partition)

    def __str__(self) -> str:
        task = f" (task {self.task})" if self.task else ""
        return f"{self.consumer} at {shown_name(self.topic, self.partition)}{task}"


@dataclass(frozen=True, slots=True)
class Target:
    """Which readers a startpoint is for; None: every consumer, partition or task."""

    consumer: str | None
    topic: str
    partition: int | None
    task: str | None = None

    def __post_init__(self) -> None:
        if self.consumer is not None:
            check_name("consumer", self.consumer)
        elif self.task is not None:
            raise BadArgument("task", "it belongs to a consumer; name that, too")
        if self.task is not None:
            check_name("task", self.task)
        check_topic(self.topic)
        if self.partition is not None:
            check_partition(self.partition)

    def includes(self, other: "Target") -> bool:
        """Whether it includes all readers of `other`."""
        return (
            self.topic == other.topic
            and self.partition in (None, other.partition)
            and self.consumer in (None, other.consumer)
            and self.task in (None, other.task)
        )

    def covers(self, reader: Reader) -> bool:
        """Whether it is for this reader."""
        return (
            self.topic == reader.topic
            and self.partition in (None, reader.partition)
            and self.consumer in (None, reader.consumer)
            and self.task in (None, reader.task)
        )

    def __str__(self) -> str:
        who = "every consumer" if self.consumer is None else self.consumer
        task = f" (task {self.task})" if self.task is not None else ""
        return f"{who} at {self.topic if self.partition is None else shown_name(self.topic, self.partition)}{task}"


def check_name(argument: str, name: object) -> None:
    """Raise BadArgument for what can't name a consumer or a task."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name == "*":
        raise BadArgument(argument, f"give a name of 1 to {NAME_CHARACTERS_MAX} printable characters, not {name!r}")


def check_topic(topic: object) -> None:
    """Raise BadArgument for what Kafka would not accept as a topic's name."""
    if not isinstance(topic, str) or not is_topic(topic):
        raise BadArgument("topic", f"{topic!r} is no topic name: 1 to 249 of a-z A-Z 0-9 . _ -")


def check_partition(partition: object) -> None:
    """Raise BadArgument for what is no partition number."""
    whole_number("partition", partition, 0, PARTITION_MAX)


class State(StrEnum):
    """The state of a startpoint for one reader."""

    PENDING = "pending"
    APPLIED = "applied"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StartpointEvent(StrEnum):
    """What can happen to it."""

    APPLY = "applied"
    CONSUME = "consumed"
    FAIL = "failed"
    EXPIRE = "expired"
    CANCEL = "cancelled"


_FINAL: Mapping[StartpointEvent, State | None] = dict.fromkeys(StartpointEvent)

NEXT: Mapping[State, Mapping[StartpointEvent, State | None]] = {
    State.PENDING: {
        StartpointEvent.APPLY: State.APPLIED,
        StartpointEvent.CONSUME: State.CONSUMED,
        StartpointEvent.FAIL: State.FAILED,
        StartpointEvent.EXPIRE: State.EXPIRED,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.APPLIED: {
        StartpointEvent.APPLY: None,
        StartpointEvent.CONSUME: State.CONSUMED,
        StartpointEvent.FAIL: State.FAILED,
        StartpointEvent.EXPIRE: None,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.FAILED: {
        StartpointEvent.APPLY: None,
        StartpointEvent.CONSUME: None,
        StartpointEvent.FAIL: None,
        StartpointEvent.EXPIRE: None,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.CONSUMED: _FINAL,
    State.EXPIRED: _FINAL,
    State.CANCELLED: _FINAL,
}
assert NEXT.keys() == set(State)
assert all(row.keys() == set(StartpointEvent) for row in NEXT.values())

OVER = frozenset({State.CONSUMED, State.EXPIRED, State.CANCELLED})
"""States of startpoints that are not pending any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A reader's committed position. `offset` None: it has claimed the partition and committed nothing."""

    reader: Reader
    generation: int = 0
    offset: int | None = None
    sequence: int = 0
    log_id: str = ""

    def as_json(self) -> dict[str, Any]:
        """Its fields, all of them JSON's own types."""
        reader = self.reader
        return {
            "consumer": reader.consumer,
            "topic": reader.topic,
            "partition": reader.partition,
            "task": reader.task or None,
            "generation": self.generation,
            "offset": self.offset,
            "sequence": self.sequence,
            "log": self.log_id,
        }

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """The checkpoint; raises KeyError, TypeError or ValueError for what `as_json` does not give."""
        return cls(
            reader=Reader(fields["consumer"], fields["topic"], fields["partition"], fields["task"] or ""),
            generation=fields["generation"],
            offset=fields["offset"],
            sequence=fields["sequence"],
            log_id=fields["log"],
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's right to its partition, until another instance claims it."""

    reader: Reader
    generation: int


def check_text(argument: str, text: object) -> None:
    """Raise BadArgument for an empty or too long text, or one that UTF-8 can't carry."""
    if not isinstance(text, str) or not text.strip() or len(text) > REASON_CHARACTERS_MAX:
        raise BadArgument(argument, f"say in 1 to {REASON_CHARACTERS_MAX} characters, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArgument(argument, f"{text!r} is no text that UTF-8 can carry") from None


def author_name(author: str | None) -> str:
    """Who writes: the name given, else the user whom this process runs as."""
    if author is not None:
        check_text("author", author)
        return author
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


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
    """The resolved offset, and the log's range [start, end) at that moment. until: as in `Resolved`.

    position: the reader's, if it was known.
    """

    sequence: int
    reader: Reader
    at_ms: int
    offset: int
    start: int
    end: int
    log_id: str
    until: int | None = None
    by_policy: str | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """The reader committed after it, or read it with `remove`."""

    sequence: int
    reader: Reader
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It does not fit the reader's log; `why` is the reason."""

    sequence: int
    reader: Reader
    at_ms: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """Its time is over: nobody applies it any more."""

    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """It was cancelled, by whom and why."""

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
                **({} if fact.position is None else {"position": fact.position}),
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
        position=fields.get("position"),
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
