"""The sources whose logged offsets can be moved, each known by its offset's form. Pure but for the facts they look up.

    pushrep    {"version": 1, "topic": "orders", "partitions": {...}, "start": {}}    resolved by the logs
    kafka      {"orders": {"0": 23, "1": 7}}     offsets, and so many records back: nobody here can ask the broker
    files      {"logOffset": 4}                  the 4th batch of files was the last: partition 0, next one 5

The positions of all three are "the next offset to read", as startpoints have it.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pushrep.log import NotALog, SegmentLog
from pushrep.log.slots import log_at, shown_name
from pushrep.startpoints import Kind, LogFacts, Startpoint, facts_of
from spark_jobs.checkpoint_files import source_files
from spark_jobs.errors import SparkJobError
from spark_jobs.sources.progress import StreamOffset

_BY_NUMBER = (Kind.SPECIFIC_OFFSET, Kind.RELATIVE_RECORDS)


class SourceNotMovable(SparkJobError):
    """This source's offset can't be moved, or not so; the message says what can be done instead."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"source {source} of the checkpoint: {why}")
        self.source, self.why = source, why


class MovableSource(Protocol):
    """A source of a checkpoint: where it stands, what is there, and its offset elsewhere."""

    topic: str
    positions: dict[int, int]
    """Partition to the next offset to read."""
    is_v1: bool
    """Spark's older sources are asked for the last committed range once more at a restart."""

    def facts(self, partition: int, wish: Startpoint) -> LogFacts:
        """What is there to resolve `wish` by. Raises SourceNotMovable."""
        ...

    def moved(self, offsets: Mapping[int, int]) -> str:
        """The logged offset with these partitions elsewhere."""
        ...


def movable_source(checkpoint: Path, name: str, offset: str, *, topic: str | None, logs: Path | None) -> MovableSource:
    """The source `name` by its logged offset. Raises SourceNotMovable."""
    found = json.loads(offset)
    if isinstance(found, dict) and set(found) == {"logOffset"}:
        return _Files(checkpoint, name, int(found["logOffset"]), topic)
    if isinstance(found, dict) and {"version", "topic", "partitions"} <= set(found):
        return _Pushrep(name, found, logs)
    if isinstance(found, dict) and found and all(_is_by_partition(value) for value in found.values()):
        return _Kafka(name, found, topic)
    raise SourceNotMovable(name, f"offsets like {offset[:80]} are none of pushrep, Kafka or files: nothing was changed")


class _Pushrep:
    is_v1 = False

    def __init__(self, name: str, logged: Mapping[str, Any], logs: Path | None) -> None:
        self.topic = str(logged["topic"])
        found = StreamOffset.from_json(logged, self.topic)
        assert found is not None, "an offset with partitions"
        if any(position.epoch for position in found.positions.values()):
            why = "it follows startpoints by itself: pushrep startpoint set is enough, it takes them up when it starts"
            raise SourceNotMovable(name, why)
        if logs is None:
            raise SourceNotMovable(name, "it reads logs of pushrep: say where they lie, --logs")
        self._name, self._logs, self._offset = name, logs, found
        self.positions = {partition: position.offset for partition, position in found.positions.items()}

    def facts(self, partition: int, wish: Startpoint) -> LogFacts:  # noqa: ARG002 - any wish can be resolved
        try:
            with SegmentLog.open_reader(log_at(self._logs, self.topic, partition)) as reader:
                facts = facts_of(reader)
        except NotALog as error:
            raise SourceNotMovable(self._name, str(error)) from error
        known = self._offset.positions[partition].log_id
        if facts.log_id != known:
            why = f"{shown_name(self.topic, partition)} in {self._logs} is log {facts.log_id}, the query read {known}"
            raise SourceNotMovable(self._name, why)
        return replace(facts, first_at=self._first_at(partition))

    def moved(self, offsets: Mapping[int, int]) -> str:
        positions = {p: replace(at, offset=offsets.get(p, at.offset)) for p, at in self._offset.positions.items()}
        return json.dumps(StreamOffset(self.topic, positions, {}).to_json())

    def _first_at(self, partition: int) -> Callable[[int], int | None]:
        def first_at(ms: int) -> int | None:
            with SegmentLog.open_reader(log_at(self._logs, self.topic, partition)) as reader:
                return reader.offset_for_timestamp(ms)

        return first_at


class _Kafka:
    is_v1 = False

    def __init__(self, name: str, logged: Mapping[str, Any], topic: str | None) -> None:
        if topic is None and len(logged) > 1:
            raise SourceNotMovable(name, f"it reads {', '.join(sorted(logged))}: say which one, --topic")
        if topic is not None and topic not in logged:
            raise SourceNotMovable(name, f"it reads {', '.join(sorted(logged))}, not {topic}")
        self._name, self._logged = name, logged
        self.topic = topic if topic is not None else next(iter(logged))
        self.positions = {int(partition): int(offset) for partition, offset in logged[self.topic].items()}

    def facts(self, partition: int, wish: Startpoint) -> LogFacts:
        if wish.kind not in _BY_NUMBER:
            why = (
                f"{wish} needs the broker, which is not asked here: give offsets, by partition (kafka-get-offsets "
                "tells those of a time), or a number of records back"
            )
            raise SourceNotMovable(self._name, why)
        # The broker alone knows the range; where the offset is not in it Spark says so at its start.
        forward = wish.value or 0
        if wish.kind is Kind.RELATIVE_RECORDS:
            forward += self.positions[partition]
        return LogFacts(start=0, end=max(self.positions[partition], forward), first_at=lambda _ms: None)

    def moved(self, offsets: Mapping[int, int]) -> str:
        own = self._logged[self.topic] | {str(partition): offset for partition, offset in offsets.items()}
        return json.dumps({**self._logged, self.topic: own}, separators=(",", ":"))


class _Files:
    is_v1 = True

    def __init__(self, checkpoint: Path, name: str, log_offset: int, topic: str | None) -> None:
        self.topic = topic if topic is not None else f"files-{name}"
        self.positions = {0: log_offset + 1}
        self._files = sorted(set(source_files(checkpoint, name)))
        if not self._files:
            raise SourceNotMovable(name, f"sources/{name} of the checkpoint names no file that was read")

    def facts(self, partition: int, wish: Startpoint) -> LogFacts:  # noqa: ARG002 - all is in the source's own log
        return LogFacts(start=self._files[0][0], end=self._files[-1][0] + 1, first_at=self._first_at)

    def moved(self, offsets: Mapping[int, int]) -> str:
        return json.dumps({"logOffset": offsets.get(0, self.positions[0]) - 1}, separators=(",", ":"))

    def _first_at(self, ms: int) -> int | None:
        by_time = sorted((changed_ms, batch) for batch, changed_ms in self._files)
        later = by_time[bisect_left(by_time, (ms, -1)) :]
        return min((batch for _, batch in later), default=None)


def _is_by_partition(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(k.isdigit() and isinstance(v, int) for k, v in value.items())
