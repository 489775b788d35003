"""A query's checkpoint as Spark writes it: the files, what they say, and the sources whose offsets can be moved.

    metadata          {"id": "<query id>"}
    offsets/<N>       v1 | {"batchWatermarkMs": ...} | one line a source: its offset, or -
                      v2 | the same                  | <source>:<offset>          offset log version 2 (Spark 4.1 on)
    commits/<N>       v1 | {"nextBatchWatermarkMs": 0}
                      v2 | the same with "stateUniqueIds"                         state checkpoint version 2
    sources/<n>/<N>   the file source's own log: v1 | one line a file
    state/            only of stateful queries

Lines are kept as they are but for the one offset that is moved, so what this release does not know of stays. Seen with
Spark 3.5 and 4.2. Only local directories. A file without its `.crc` is read by Hadoop unchecked.

A source is known by its offset's form. The positions of all three are "the next offset to read", as startpoints have
it:

    pushrep    {"version": 1, "topic": "orders", "partitions": {...}, "start": {}}    resolved by the logs
    kafka      {"orders": {"0": 23, "1": 7}}     offsets, and so many records back: no broker is asked
    files      {"logOffset": 4}                  the 4th batch of files was the last: partition 0, next one 5
"""

import json
import os
import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pushrep.log import NotALog, SegmentLog
from pushrep.log.directory_files import log_at, shown_name
from pushrep.startpoints import Kind, LogFacts, OutOfRange, Startpoint, facts_of
from spark_jobs.errors import SparkJobError
from spark_jobs.sources.planning import StreamOffset

VERSIONS = ("v1", "v2")
_VOID = "-"
_V2_LINE = re.compile(r"([^:{}]+):(.*)", re.DOTALL)


class CheckpointUnreadable(SparkJobError):
    """It is no checkpoint of a query, or one that this release can't read; name another directory."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class QueryStateful(SparkJobError):
    """State can't be moved back with the offsets: start the query over with a fresh checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} holds state of a stateful query, which no offset can take back: begin a fresh checkpoint, with "
            "the starting offsets that pushrep startpoint export prints"
        )
        self.path = path


class LastBatchUncommitted(SparkJobError):
    """Batch `batch` is planned and not committed: let the query finish it (available-now is enough), then stop it."""

    def __init__(self, path: Path, batch: int, committed: int) -> None:
        super().__init__(
            f"{path}: batch {batch} is planned and not committed (the last committed one is {committed}): start the "
            "query, let it finish that batch, stop it, and try again"
        )
        self.path, self.batch, self.committed = path, batch, committed


class QueryRunning(SparkJobError):
    """The checkpoint changed while it was watched, or a batch of this number is there already: stop the query."""

    def __init__(self, path: Path, changed: str) -> None:
        super().__init__(f"{path}: {changed} meanwhile, so its query is running: stop it, and try again")
        self.path, self.changed = path, changed


@dataclass(frozen=True, slots=True)
class LoggedOffsets:
    """One file of offsets: version, metadata line, and for each source its name and its offset (None: nothing yet)."""

    version: str
    metadata: str
    sources: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, path: Path | str, text: str) -> "LoggedOffsets":
        version, *lines = text.split("\n")
        if version not in VERSIONS or not lines or not lines[0].startswith("{"):
            why = f"no offsets of version {' or '.join(VERSIONS)}; this release knows no other"
            raise CheckpointUnreadable(path, why)
        found: list[tuple[str, str | None]] = []
        for number, line in enumerate(line for line in lines[1:] if line):
            name, offset = str(number), line
            if version == "v2":
                match = _V2_LINE.fullmatch(line)
                if match is None:
                    raise CheckpointUnreadable(path, f"{line[:60]!r} names no source")
                name, offset = match[1], match[2]
            found.append((name, None if offset == _VOID else offset))
        return cls(version, lines[0], tuple(found))

    def with_offset(self, name: str, offset: str) -> "LoggedOffsets":
        """The same with another offset of one source."""
        return replace(self, sources=tuple((n, offset if n == name else old) for n, old in self.sources))

    def text(self) -> str:
        """As Spark writes it."""
        lines = [(f"{name}:" if self.version == "v2" else "") + (offset or _VOID) for name, offset in self.sources]
        return "\n".join([self.version, self.metadata, *lines])


@dataclass(frozen=True, slots=True)
class QueryCheckpoint:
    """A stopped query's checkpoint: the query, its last batch, where that ended, and its commit's text."""

    path: Path
    query_id: str
    batch: int
    offsets: LoggedOffsets
    commit: str


def read_checkpoint(path: Path) -> QueryCheckpoint:
    """Raises CheckpointUnreadable, QueryStateful, LastBatchUncommitted."""
    query_id = query_id_of(path)
    planned, committed = _numbers(path / "offsets"), _numbers(path / "commits")
    if not planned:
        raise CheckpointUnreadable(path, "no batch was ever planned; say by the source's own options where to start")
    if not committed or committed[-1] != planned[-1]:
        raise LastBatchUncommitted(path, planned[-1], committed[-1] if committed else -1)
    commit = (path / "commits" / str(committed[-1])).read_text(encoding="utf-8")
    if any(_files(path / "state")) or _state_ids(path, commit):
        raise QueryStateful(path)
    file = path / "offsets" / str(planned[-1])
    offsets = LoggedOffsets.parse(file, file.read_text(encoding="utf-8"))
    return QueryCheckpoint(path, query_id, planned[-1], offsets, commit)


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change: if two snapshots differ, the query runs."""
    found = {}
    for file in _files(path):
        status = file.stat()
        found[str(file.relative_to(path))] = (status.st_size, status.st_mtime_ns)
    return found


def back_up(path: Path, copy: Path) -> None:
    """A whole copy, on disk when this returns; `copy` must not be there. Put back as it is, it restores the query."""
    shutil.copytree(path, copy)
    for file in [*_files(copy), *(place for place in copy.rglob("*") if place.is_dir()), copy, copy.parent]:
        _sync(file)


def create(path: Path, text: str, scratch: Path) -> None:
    """Write a file that must not be there, whole or not at all, on disk when this returns. Raises FileExistsError.

    `scratch` is a directory on the same file system.
    """
    made = scratch / f".{path.parent.name}-{path.name}"
    made.write_text(text, encoding="utf-8")
    _sync(made)
    try:
        os.link(made, path)
    finally:
        made.unlink()
    _sync(path.parent)


def source_files(path: Path, source: str) -> Iterator[tuple[int, int]]:
    """(batch of the file source, ms since 1970 when its file was changed) of every file that it knows."""
    places = list((path / "sources" / source).glob("*")) if source.isdigit() else []
    for place in places:
        if not re.fullmatch(r"[0-9]+(\.compact)?", place.name):
            continue
        version, *lines = place.read_text(encoding="utf-8").split("\n")
        if version != "v1":
            raise CheckpointUnreadable(place, f"a file source's log of version {version!r}; this release knows v1")
        for line in filter(None, lines):
            entry = _json(place, line)
            yield int(entry["batchId"]), int(entry["timestamp"])


def query_id_of(path: Path) -> str:
    """The query's id, which lives as long as its checkpoint. Raises CheckpointUnreadable."""
    if not path.is_dir():
        raise CheckpointUnreadable(path, "there is no such directory")
    file = path / "metadata"
    if not file.is_file():
        raise CheckpointUnreadable(path, "it is no checkpoint of a streaming query: it has no file metadata")
    return str(_json(file, file.read_text(encoding="utf-8"))["id"])


def _state_ids(path: Path, commit: str) -> Any:
    version, _, text = commit.partition("\n")
    if version not in VERSIONS:
        raise CheckpointUnreadable(path / "commits", f"a commit of version {version!r}; this release knows no such")
    return _json(path / "commits", text or "{}").get("stateUniqueIds")


def _json(path: Path, text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckpointUnreadable(path, f"{text[:60]!r} is no JSON") from error
    if not isinstance(found, dict):
        raise CheckpointUnreadable(path, f"{text[:60]!r} is no JSON object")
    return found


def _numbers(directory: Path) -> list[int]:
    return sorted(int(file.name) for file in directory.glob("*") if file.name.isdigit())


def _files(directory: Path) -> Iterator[Path]:
    return (file for file in directory.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_BY_NUMBER = (Kind.SPECIFIC_OFFSET, Kind.RELATIVE_RECORDS)


class SourceNotMovable(SparkJobError):
    """This source's offset can't be moved, or not so; the message says what can be done instead."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"source {source} of the checkpoint: {why}")
        self.source, self.why = source, why


class MovableSource(Protocol):
    """A source of a checkpoint: its positions, what its log holds, and its offset with other positions."""

    topic: str
    positions: dict[int, int]
    """Partition to the next offset to read."""
    is_v1: bool
    """Spark's older sources are asked for the last committed range once more at a restart."""

    def facts(self, partition: int, startpoint: Startpoint) -> LogFacts:
        """The facts of the log by which `startpoint` is resolved. Raises SourceNotMovable."""
        ...

    def moved(self, offsets: Mapping[int, int]) -> str:
        """The logged offset with these partitions at other positions."""
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
            why = "it follows startpoints by itself: pushrep startpoint set is enough, it applies them when it starts"
            raise SourceNotMovable(name, why)
        if logs is None:
            raise SourceNotMovable(name, "it reads logs of pushrep: say where they lie, --logs")
        self._name, self._logs, self._offset = name, logs, found
        self.positions = {partition: position.offset for partition, position in found.positions.items()}

    def facts(self, partition: int, startpoint: Startpoint) -> LogFacts:  # noqa: ARG002 - any can be resolved
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

    def facts(self, partition: int, startpoint: Startpoint) -> LogFacts:
        if startpoint.kind not in _BY_NUMBER:
            why = (
                f"{startpoint} needs the broker, which is not asked here: give offsets, by partition (kafka-get-offsets"
                " tells those of a time), or a number of records back"
            )
            raise SourceNotMovable(self._name, why)
        # Only the broker knows the range; an offset outside of it fails when Spark starts.
        forward = startpoint.value or 0
        if startpoint.kind is Kind.RELATIVE_RECORDS:
            forward += self.positions[partition]
        if forward < 0 and startpoint.out_of_range is not OutOfRange.ERROR:
            why = (
                f"offset {forward} of partition {partition} is below 0, and only the broker knows the topic's "
                f"{startpoint.out_of_range} offset: give fewer records back, or an offset"
            )
            raise SourceNotMovable(self._name, why)
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

    def facts(self, partition: int, startpoint: Startpoint) -> LogFacts:  # noqa: ARG002 - all is in the source's own log
        return LogFacts(start=self._files[0][0], end=self._files[-1][0] + 1, first_at=self._first_at)

    def moved(self, offsets: Mapping[int, int]) -> str:
        return json.dumps({"logOffset": offsets.get(0, self.positions[0]) - 1}, separators=(",", ":"))

    def _first_at(self, ms: int) -> int | None:
        by_time = sorted((changed_ms, batch) for batch, changed_ms in self._files)
        later = by_time[bisect_left(by_time, (ms, -1)) :]
        return min((batch for _, batch in later), default=None)


def _is_by_partition(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(k.isdigit() and isinstance(v, int) for k, v in value.items())
