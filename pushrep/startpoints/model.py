"""What is wished: a startpoint, whom it is for, and the wish as it was written. Values; pure.

    kind              value            means, when it is applied
    SPECIFIC_OFFSET   offset           that offset
    TIMESTAMP         ms since 1970    the first record at or after it
    EARLIEST          -                the log start
    LATEST            -                the end
    BOOTSTRAP         -                the log start; partitions without one hold still until the end of now is reached
    RELATIVE_RECORDS  records, not 0   so many from where the consumer stands (its checkpoint, or its live position)
    RELATIVE_MS       ms below 0       as TIMESTAMP, so long before the startpoint was written

The first five are those of Samza's SEP-18, RELATIVE_* are `--shift-by` and `--by-duration` of kafka-consumer-groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pushrep.errors import BadArgument
from pushrep.log.directory_files import is_topic
from pushrep.log.slots import shown_name
from pushrep.topic_id_partition import PARTITION_MAX

OFFSET_END = 1 << 63
NAME_CHARACTERS_MAX = 249
REASON_CHARACTERS_MAX = 2000


class Kind(StrEnum):
    """The kinds of wishes, see the file's map."""

    SPECIFIC_OFFSET = "SPECIFIC_OFFSET"
    TIMESTAMP = "TIMESTAMP"
    EARLIEST = "EARLIEST"
    LATEST = "LATEST"
    BOOTSTRAP = "BOOTSTRAP"
    RELATIVE_RECORDS = "RELATIVE_RECORDS"
    RELATIVE_MS = "RELATIVE_MS"


class OutOfRange(StrEnum):
    """What to do where a startpoint does not fit the log (out of range, or no record that late)."""

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
    consumer shall forget what it has seen, so that records read again are not dropped as replayed.
    """

    kind: Kind
    value: int | None = None
    out_of_range: OutOfRange = OutOfRange.ERROR
    reset_marks: bool = False

    def __post_init__(self) -> None:
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
        cls, offset: int, *, out_of_range: OutOfRange | str = OutOfRange.ERROR, reset_marks: bool = False
    ) -> "Startpoint":
        """At this offset; the log's end is in range, too."""
        return cls._make(Kind.SPECIFIC_OFFSET, offset, out_of_range, reset_marks)

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
    def _make(
        cls,
        kind: Kind,
        value: int | None,
        out_of_range: OutOfRange | str,
        reset_marks: bool,  # noqa: FBT001 - private
    ) -> "Startpoint":
        try:
            policy = OutOfRange(out_of_range)
        except ValueError:
            raise BadArgument("out_of_range", f"give error, earliest or latest, not {out_of_range!r}") from None
        return cls(kind=kind, value=value, out_of_range=policy, reset_marks=bool(reset_marks))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "value": self.value,
            "out_of_range": str(self.out_of_range),
            "reset_marks": self.reset_marks,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Startpoint":
        """Raises KeyError, TypeError or ValueError for what `to_json` does not give."""
        return cls._make(Kind(fields["kind"]), fields["value"], fields["out_of_range"], fields["reset_marks"])

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
    """Whom a startpoint is for: None is every consumer, every partition, every task."""

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
        """Whether it is for everyone whom `other` is for."""
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
    if isinstance(partition, bool) or not isinstance(partition, int) or not 0 <= partition <= PARTITION_MAX:
        raise BadArgument("partition", f"give a number from 0 to {PARTITION_MAX}, not {partition!r}")
