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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeAlias

from pushrep.errors import BadArgument, PushrepError
from pushrep.log.directory_files import shown_name
from pushrep.settings import checked, printable_text, whole_number
from pushrep.topic_id_partition import PARTITION_MAX, check_topic

OFFSET_END = 1 << 63
NAME_CHARACTERS_MAX = 249


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
    consumer shall forget what it has seen, so that records read again are not dropped as replayed. `replace_until`, of
    an offset with `reset_marks`, is for a job that fills a table: rows of records from there on stay as they are.
    """

    kind: Kind
    value: int | None = None
    out_of_range: OutOfRange = OutOfRange.ERROR
    reset_marks: bool = False
    replace_until: int | None = None

    def __post_init__(self) -> None:
        if self.replace_until is not None:
            if self.kind is not Kind.SPECIFIC_OFFSET or not self.reset_marks:
                raise BadArgument("replace_until", "it is for an offset, with reset_marks")
            whole_number("replace_until", self.replace_until, (self.value or 0) + 1, OFFSET_END - 1)
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

    @classmethod
    def specific(
        cls,
        offset: int,
        *,
        out_of_range: OutOfRange | str = OutOfRange.ERROR,
        reset_marks: bool = False,
        replace_until: int | None = None,
    ) -> Self:
        """At this offset; the log's end is in range, too."""
        return cls(
            kind=Kind.SPECIFIC_OFFSET,
            value=offset,
            out_of_range=_policy(out_of_range),
            reset_marks=reset_marks,
            replace_until=replace_until,
        )

    @classmethod
    def timestamp(
        cls, ms: int, *, out_of_range: OutOfRange | str = OutOfRange.ERROR, reset_marks: bool = False
    ) -> Self:
        """At the first record whose time is `ms` since 1970 or later."""
        return cls(kind=Kind.TIMESTAMP, value=ms, out_of_range=_policy(out_of_range), reset_marks=reset_marks)

    @classmethod
    def earliest(cls, *, reset_marks: bool = False) -> Self:
        """At the log start."""
        return cls(kind=Kind.EARLIEST, reset_marks=reset_marks)

    @classmethod
    def latest(cls, *, reset_marks: bool = False) -> Self:
        """At the end: only what comes later."""
        return cls(kind=Kind.LATEST, reset_marks=reset_marks)

    @classmethod
    def bootstrap(cls, *, reset_marks: bool = False) -> Self:
        """At the log start, and before the partitions without one go on, up to the end seen when applied."""
        return cls(kind=Kind.BOOTSTRAP, reset_marks=reset_marks)

    @classmethod
    def relative(
        cls,
        *,
        records: int | None = None,
        ms: int | None = None,
        out_of_range: OutOfRange | str = OutOfRange.ERROR,
        reset_marks: bool = False,
    ) -> Self:
        """So many `records` from where the consumer stands, or so many `ms` (below 0) before now. One of the two."""
        if (records is None) == (ms is None):
            raise BadArgument("relative", "give records or ms, one of the two")
        kind, value = (Kind.RELATIVE_MS, ms) if records is None else (Kind.RELATIVE_RECORDS, records)
        return cls(kind=kind, value=value, out_of_range=_policy(out_of_range), reset_marks=reset_marks)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Of its fields. Raises KeyError, TypeError or ValueError for what is no startpoint."""
        found = {**fields, "kind": Kind(fields["kind"]), "out_of_range": OutOfRange(fields["out_of_range"])}
        return checked(cls(**found))

    def __str__(self) -> str:
        return str(self.kind) if self.value is None else f"{self.kind} {self.value}"


def _policy(out_of_range: OutOfRange | str) -> OutOfRange:
    try:
        return OutOfRange(out_of_range)
    except ValueError:
        raise BadArgument("out_of_range", f"give error, earliest or latest, not {out_of_range!r}") from None


@dataclass(frozen=True, slots=True, order=True)
class Reader:
    """One that starts: a consumer (a task of it, where tasks share a partition) in one partition of a topic."""

    consumer: str
    topic: str
    partition: int
    task: str = ""

    def __post_init__(self) -> None:
        _check_names(self.consumer, self.task or None, self.topic, self.partition)

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
        if self.consumer is None and self.task is not None:
            raise BadArgument("task", "it belongs to a consumer; name that, too")
        _check_names(self.consumer, self.task, self.topic, self.partition)

    def covers(self, other: "Target | Reader") -> bool:
        """Whether it is for this reader, or for all readers of this target."""
        return (
            self.topic == other.topic
            and self.partition in (None, other.partition)
            and self.consumer in (None, other.consumer)
            and self.task in (None, other.task)
        )

    def __str__(self) -> str:
        who = "every consumer" if self.consumer is None else self.consumer
        task = f" (task {self.task})" if self.task is not None else ""
        return f"{who} at {self.topic if self.partition is None else shown_name(self.topic, self.partition)}{task}"


def _check_names(consumer: object, task: object, topic: object, partition: object) -> None:
    """Raise BadArgument for what can't name a consumer, a task, a topic of Kafka or a partition; None names none."""
    for argument, name in (("consumer", consumer), ("task", task)):
        if name is not None and printable_text(argument, name, NAME_CHARACTERS_MAX) == "*":
            raise BadArgument(argument, "* is no name")
    check_topic("topic", topic)
    if partition is not None:
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


_STAYS: Mapping[StartpointEvent, State | None] = dict.fromkeys(StartpointEvent)

NEXT: Mapping[State, Mapping[StartpointEvent, State | None]] = {
    State.PENDING: {event: State(event.value) for event in StartpointEvent},
    State.APPLIED: {
        **_STAYS,
        StartpointEvent.CONSUME: State.CONSUMED,
        StartpointEvent.FAIL: State.FAILED,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.FAILED: {**_STAYS, StartpointEvent.CANCEL: State.CANCELLED},
    State.CONSUMED: _STAYS,
    State.EXPIRED: _STAYS,
    State.CANCELLED: _STAYS,
}
assert NEXT.keys() == set(State)

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
        return _fields_of(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """The checkpoint; raises KeyError, TypeError or ValueError for what `as_json` does not give."""
        return checked(cls(**_values_of(fields)))


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's right to its partition, until another instance claims it."""

    reader: Reader
    generation: int


def author_name(author: str | None) -> str:
    """Who writes: the name given, else the user whom this process runs as."""
    if author is not None:
        return printable_text("author", author)
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


_KINDS: Mapping[str, type[Fact]] = {
    kind.__name__.lower(): kind for kind in (Written, Applied, Consumed, Failed, Expired, Cancelled)
}


def to_json(fact: Fact) -> dict[str, Any]:
    """The fact's fields, all of them JSON's own types."""
    return {"event": type(fact).__name__.lower(), **_fields_of(fact)}


def from_json(fields: Mapping[str, Any]) -> Fact:
    """The fact; raises KeyError, TypeError or ValueError (BadArgument is one) for what `to_json` does not give."""
    values = dict(fields)
    kind = _KINDS[values.pop("event")]
    if kind is Written:
        where = [values.pop(name) for name in ("consumer", "topic", "partition", "task")]
        values |= {"target": Target(*where), "startpoint": Startpoint.from_json(values["startpoint"])}
        return checked(Written(**values))
    return checked(kind(**_values_of(values)))


def _fields_of(one: Fact | Checkpoint) -> dict[str, Any]:
    """Fields under their names in JSON: those of a reader or target beside the others."""
    fields: dict[str, Any] = {}
    for field in dataclass_fields(one):
        value = getattr(one, field.name)
        match value:
            case Reader() | Target():
                fields |= {"consumer": value.consumer, "topic": value.topic, "partition": value.partition}
                fields["task"] = value.task or None
            case Startpoint():
                fields[field.name] = asdict(value)
            case _:
                fields["log" if field.name == "log_id" else field.name] = value
    return fields


def _values_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `_fields_of` made fields of, for a fact of one reader, or of none."""
    values = dict(fields)
    if "consumer" in values:
        consumer, topic, partition, task = (values.pop(name) for name in ("consumer", "topic", "partition", "task"))
        values["reader"] = checked(Reader(consumer, topic, partition, task or ""))
    if "log" in values:
        values["log_id"] = values.pop("log")
    return values


class StoreUnavailable(PushrepError):
    """The store at `location` can't be used now, or this place can't be one: `why`, and what to do."""

    def __init__(self, location: Path | str, why: str) -> None:
        super().__init__(f"the store of startpoints {location} can't be used: {why}")
        self.location, self.why = location, why


def busy(location: Path | str, pid: int | None, waited_s: float) -> StoreUnavailable:
    """The error after waiting so long for the store's lock."""
    who = f"process {pid}" if pid is not None else "another process"
    return StoreUnavailable(location, f"{who} held its lock for {waited_s:g} s: try again, or end it if it hangs")


def not_written(location: Path | str, why: str, *, is_known: bool) -> StoreUnavailable:
    """The error of a refused write. is_known: it is sure that nothing stays."""
    outcome = "nothing was written" if is_known else "whether it was written is not known: look with list"
    return StoreUnavailable(location, f"{why}; {outcome}")


class Overtaken(PushrepError):
    """Somebody else changed the store in between, and nothing was written; the store does it again by itself."""

    def __init__(self, place: Path | str) -> None:
        super().__init__(f"{place} was changed by another writer meanwhile; nothing was written: try again")
        self.place = place


class StartpointRefused(PushrepError):
    """It does not fit the startpoint, the checkpoint, the log or the store as they are; the message says what to do.
    Nothing was written.
    """


class PartitionLost(PushrepError):
    """Another instance took the partition over (`generation` is its); stop reading it. Nothing was written."""

    def __init__(self, reader: object, *, held: int, generation: int) -> None:
        super().__init__(f"{reader} was taken over: generation {held} is fenced by {generation}; stop reading it here")
        self.reader, self.held, self.generation = reader, held, generation


class StartpointFailed(PushrepError):
    """The newest startpoint can't be applied, so the partition does not start; cancel it or set another one."""

    def __init__(self, reader: object, sequence: int, why: str) -> None:
        super().__init__(f"startpoint {sequence} of {reader} failed: {why}. Cancel it or set another one")
        self.reader, self.sequence, self.why = reader, sequence, why
