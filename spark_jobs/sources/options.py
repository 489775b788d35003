"""What a reader of the source asked for: option texts in, one checked value out. Pure: looks at no disk.

    option                default    meaning
    path                  required   the directory that holds the logs (`<topic>-<n>` below it)
    topic                 required
    partitions            all        "0,2"; all: new ones are taken up while a stream runs
                                     of a directory of worker slots: those of every slot
    startingOffsets       earliest   earliest | latest | {"topic": {"0": 23, "1": -2}}   (-2 earliest, -1 latest)
                                     of worker slots: {"topic": {"slot-0/0": 23, "slot-1/0": -2}}
    startingTimestamp     -          ms since 1970, or ISO 8601 with a zone: first record at or after it
    endingOffsets         latest     batch only: latest | {"topic": {"0": 50, "1": -1}}, exclusive
    maxRecordsPerTrigger  -          streams only: at most so many records a batch, shared among partitions
    startingStartpoint    -          streams only: the consumer whose startpoints are followed while the stream runs
    startpoints           <path>/startpoints   the store that holds them: a directory, or kafka:TOPIC
    startpoints.NAME      -          of kafka:TOPIC: settings of its client, as startpoints.bootstrap.servers
    failOnDataLoss        true       false: continue after lost records, with a warning
    includeHeaders        false      adds the column headers
    splitBytes            64m        a partition's range is read by several tasks, each about so many log bytes

Names and forms follow Spark's Kafka source; names are read without regard to case, as Spark hands them over.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

from pushrep.env.checked_json import parse_json
from pushrep.errors import BadArgument
from pushrep.log.directory_files import parse_shown_partition
from pushrep.log.errors import InvalidLogName
from pushrep.startpoints import StorePlace, StoreUnavailable
from spark_jobs.errors import SparkJobError

SPLIT_BYTES = 64 << 20
_EPOCH = datetime.fromtimestamp(0, UTC)

EARLIEST_OFFSET, LATEST_OFFSET = -2, -1  # Kafka's own numbers for the two ends


class BadOption(SparkJobError):
    """An option of the source is unknown, malformed or out of place; `option` and `value` name it."""

    def __init__(self, option: str, value: str | None, why: str) -> None:
        given = "" if value is None else f"={value!r}"
        super().__init__(f"source pushrep: option {option}{given}: {why}")
        self.option, self.value, self.why = option, value, why


class Edge(StrEnum):
    """An end of the log, named as Spark's Kafka source names it."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class AtTimestamp:
    """The first record at or after `ms` since 1970; the end of the log where there is none."""

    ms: int


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for every partition; -2 is the earliest, -1 the latest."""

    offsets: Mapping[int, int]


Place: TypeAlias = Edge | AtTimestamp | AtOffsets


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """A checked set of options; `given` keeps the texts as they came, by option name."""

    path: str
    topic: str
    partitions: tuple[int, ...] | None
    start: Place
    end: Place
    max_records: int | None
    fail_on_data_loss: bool
    include_headers: bool
    split_bytes: int
    startpoint_consumer: str | None
    startpoints: StorePlace | None
    given: Mapping[str, str]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "SourceOptions":
        """Read Spark's options; raises BadOption that names the first one that is unknown, malformed or missing."""
        given = _known(options)
        topic = _required(given, "topic", "name the topic to read")
        if "startingOffsets" in given and "startingTimestamp" in given:
            raise BadOption("startingTimestamp", given["startingTimestamp"], "give it or startingOffsets, not both")
        partitions = _optional(given, "partitions", _partition_list)
        if "startingTimestamp" in given:
            start: Place = AtTimestamp(_timestamp_ms("startingTimestamp", given["startingTimestamp"]))
        else:
            start = _place("startingOffsets", given.get("startingOffsets", Edge.EARLIEST), topic)
        end = _place("endingOffsets", given.get("endingOffsets", Edge.LATEST), topic)
        if end is Edge.EARLIEST or (isinstance(end, AtOffsets) and EARLIEST_OFFSET in end.offsets.values()):
            why = "a read that ends at the start reads nothing; give latest or offsets, of which -1 is the latest"
            raise BadOption("endingOffsets", given["endingOffsets"], why)
        return cls(
            path=_required(given, "path", "name the directory that holds the logs"),
            topic=topic,
            partitions=partitions,
            start=start,
            end=end,
            max_records=_optional(given, "maxRecordsPerTrigger", _positive),
            fail_on_data_loss=_optional(given, "failOnDataLoss", _boolean) is not False,
            include_headers=_optional(given, "includeHeaders", _boolean) is True,
            split_bytes=_optional(given, "splitBytes", _size) or SPLIT_BYTES,
            startpoint_consumer=_optional(given, "startingStartpoint", _named),
            startpoints=_store(given),
            given=given,
        )

    def check(self, *, stream: bool) -> None:
        """Raise BadOption for what only a stream, or only a batch read, can honour, or a start that reads nothing."""
        for option, of_streams in _ONLY_OF_STREAMS.items():
            if option in self.given and of_streams is not stream:
                raise BadOption(option, self.given[option], f"only {'readStream' if of_streams else 'read'} takes it")
        if not stream and self.start is Edge.LATEST:
            raise BadOption("startingOffsets", "latest", "a batch read from the end reads nothing; name another start")


_ONLY_OF_STREAMS = {"maxRecordsPerTrigger": True, "startingStartpoint": True, "endingOffsets": False}
_OPTIONS = (
    "path",
    "topic",
    "partitions",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "maxRecordsPerTrigger",
    "failOnDataLoss",
    "includeHeaders",
    "splitBytes",
    "startingStartpoint",
    "startpoints",
)
_NAMES = {name.lower(): name for name in _OPTIONS}
_STORE_SETTINGS = "startpoints."


def _known(options: Mapping[str, str]) -> dict[str, str]:
    given = {}
    for option, text in options.items():
        name = option.lower()
        if name not in _NAMES and not name.startswith(_STORE_SETTINGS):
            raise BadOption(option, text, f"there is no such option; known are {', '.join(_OPTIONS)}")
        given[_NAMES.get(name, name)] = text
    return given


def _store(given: Mapping[str, str]) -> StorePlace | None:
    settings = {name.removeprefix(_STORE_SETTINGS): given[name] for name in given if name.startswith(_STORE_SETTINGS)}
    if "startpoints" not in given and not settings:
        return None
    if "startpoints" not in given:
        first = min(_STORE_SETTINGS + name for name in settings)
        raise BadOption(first, None, "belongs to a store in a topic: give startpoints=kafka:TOPIC, too")
    text = _named("startpoints", given["startpoints"])
    try:
        return StorePlace.parse(text, settings)
    except BadArgument as error:
        raise BadOption(_STORE_SETTINGS + error.argument, None, error.why) from error  # the value may be a secret
    except StoreUnavailable as error:
        raise BadOption("startpoints", text, error.why) from error


def _required(given: Mapping[str, str], option: str, what_to_do: str) -> str:
    text = given.get(option, "")
    if not text.strip():
        raise BadOption(option, given.get(option), f"it is required: {what_to_do}")
    return text


def _optional(given: Mapping[str, str], option: str, parse: Callable[[str, str], Any]) -> Any:
    return parse(option, given[option]) if option in given else None


def _named(option: str, text: str) -> str:
    if not text.strip():
        raise BadOption(option, text, "it is empty; give a name, or leave it out")
    return text


def _positive(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise BadOption(option, text, "give a whole number above 0")
    return int(text)


def _size(option: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})(?:([kmgt])b?)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise BadOption(option, text, "give bytes above 0, as 1048576 or 64m")
    return int(match[1]) << {None: 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2]]


def _boolean(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadOption(option, text, "give true or false")
    return text.lower() == "true"


def _partition_list(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,6}\s*", part) for part in parts):
        raise BadOption(option, text, "give partition numbers as 0,2")
    return tuple(sorted(set(map(int, parts))))


def _timestamp_ms(option: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(option, text, "give ms since 1970, or ISO 8601 as 2013-07-01T00:00:00Z") from None
    if moment.tzinfo is None:
        raise BadOption(option, text, "it names no zone; append Z or an offset as +02:00")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _place(option: str, text: str, topic: str) -> Place:
    if text.lower() in tuple(Edge):
        return Edge(text.lower())
    form = f'give earliest, latest or {{"{topic}": {{"0": 23, "1": -2}}}}'
    try:
        by_topic = parse_json(text)
    except ValueError:
        raise BadOption(option, text, form) from None
    if not isinstance(by_topic, dict) or list(by_topic) != [topic] or not isinstance(by_topic[topic], dict):
        raise BadOption(option, text, f"it must name the topic {topic!r} and no other; {form}")
    offsets: dict[int, int] = {}
    for partition, offset in by_topic[topic].items():
        try:
            number = parse_shown_partition(partition)
        except InvalidLogName:
            raise BadOption(option, text, f"{partition!r} is not a partition number; {form}") from None
        if isinstance(offset, bool) or not isinstance(offset, int) or not EARLIEST_OFFSET <= offset < 2**63:
            raise BadOption(option, text, f"{offset!r} of partition {partition} is not an offset, -1 or -2; {form}")
        offsets[number] = offset
    return AtOffsets(offsets)
