"""Where the marks of a foreachBatch query live between batches: the Protocol, and the store on a local disk.

LocalMarks writes into a segment log of its own, `<path>/marks-<generation>`, flushed before `write` returns:

    record key    | part u32 | parts u32 |    big-endian; a value above PART_BYTES travels as several records
    record value  a batch's marks (batch_marks.py), or {"drop_from": [query, batch]} as JSON

The newest entry of a (query, batch) counts. Entries that are no longer needed stay in the log until it is four times as
large as the others. Then the others are copied into the next generation, which is valid once its last record
{"complete": true} is written; only then the older one is removed. Killed anywhere in between, one of the two is
complete.
"""

import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from filtering.closing import ClosedAtExit
from pushrep.errors import PushrepError
from pushrep.log import Durability, LogConfig, LogReader, SegmentLog, list_logs
from spark_jobs.batch_marks import BatchMarks, BatchMarksVersionUnsupported, CorruptBatchMarks
from spark_jobs.errors import SparkJobError, StoreUnfit

PART_BYTES = 8 << 20
REWRITE_AT_LEAST_BYTES = 16 << 20
"""A log smaller than this is never rewritten: opening reads it in milliseconds."""

TOPIC = "marks"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_ELSEWHERE = (
    "it is a URL, and LocalMarks is a segment log on this machine's disk. FileMarks keeps marks on Spark's file "
    "systems and in object stores, SqlTable beside the rows"
)
_PART = struct.Struct(">II")
COMPLETE = json.dumps({"complete": True}).encode()
KEEP_ALL = 1 << 30
"""Batches of a query that `write` keeps: more than any has."""


class MarksStore(Protocol):
    """Keeps the marks of queries, keyed (query id, batch). One query owns a store: the one that wrote last."""

    location: str
    """For messages: where a person finds it."""

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""
        ...

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending, with the one that it adopted."""
        ...

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """What was written last for this batch; None if nothing was, or it was dropped."""
        ...

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; of this query the newest `keep` batches stay, and no other query's do
        once this one has written `keep` (BatchMarks.drops).
        """
        ...

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, durably."""
        ...


class MarksFenced(SparkJobError):
    """Another driver wrote marks since this one read them: two run at once, or a checkpoint was copied. End one."""

    def __init__(self, location: str, query_id: str, batch_id: int) -> None:
        super().__init__(
            f"marks at {location} were written by another driver while batch {batch_id} of query {query_id} ran: the "
            "marks of this batch are not stored; end one of the two, and start the other again"
        )
        self.location, self.query_id, self.batch_id = location, query_id, batch_id


class MarksStoreDamaged(SparkJobError):
    """The store can't be trusted: restore a copy, or start a fresh checkpoint with `adopt=` from an older batch."""

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"marks at {location}: {why}")
        self.location, self.why = location, why


def parsed_marks(data: bytes, location: str, batch: tuple[str, int] | None = None) -> BatchMarks:
    """A store's bytes. Raises MarksStoreDamaged, also where they are not of this (query, batch)."""
    try:
        marks = BatchMarks.from_bytes(data)
    except (CorruptBatchMarks, BatchMarksVersionUnsupported) as error:
        raise MarksStoreDamaged(location, str(error)) from error
    if batch not in {None, (marks.query_id, marks.batch_id)}:
        raise MarksStoreDamaged(location, f"it holds batch {marks.batch_id} of query {marks.query_id}")
    return marks


class LocalMarks(ClosedAtExit):
    """Marks in a directory on this machine's disk, which survive kill -9 and power loss once `write` returned.

    Opened at first use and then locked for this process; close it, or use it as a context manager. Use raises
    `pushrep.log.LogLocked` with the pid while another process has it, MarksStoreDamaged for damaged marks. Raises
    StoreUnfit for a URL, which is no directory of this machine.
    """

    def __init__(self, path: str | Path) -> None:
        self.location = str(path)
        if _URL.match(self.location):
            raise StoreUnfit(self.location, _ELSEWHERE)
        self._path = Path(path)
        self._log: SegmentLog | None = None
        self._generation = 0
        self._places: dict[tuple[str, int], _Place] = {}
        self._owner: str | None = None
        self._latest: BatchMarks | None = None
        self._log_bytes = 0

    def owner(self) -> str | None:
        self._opened()
        return self._owner

    def batches(self, query_id: str) -> list[int]:
        self._opened()
        return sorted(batch for query, batch in self._places if query == query_id)

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        log = self._opened()
        latest = self._latest
        if latest is not None and (latest.query_id, latest.batch_id) == (query_id, batch_id):
            return latest
        place = self._places.get((query_id, batch_id))
        if place is None:
            return None
        return parsed_marks(_joined(log, place), self.location)

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        log = self._opened()
        self._remember(marks.query_id, marks.batch_id, _append(log, marks.to_bytes()))
        self._latest = marks
        # Only in memory: a store that is opened again still finds old batches in the log, until that is rewritten.
        for query_id, batch_id in [known for known in self._places if marks.drops(*known, keep)]:
            del self._places[query_id, batch_id]
        live = sum(place.size for place in self._places.values())
        if self._log_bytes > max(REWRITE_AT_LEAST_BYTES, 4 * live):
            self._rewrite(log)

    def drop_from(self, query_id: str, batch_id: int) -> None:
        log = self._opened()
        if any(batch >= batch_id for batch in self.batches(query_id)):
            place = _append(log, json.dumps({"drop_from": [query_id, batch_id]}).encode())
            self._log_bytes += place.size
            self._drop(query_id, batch_id)

    def close(self) -> None:
        """Close the log and free its lock; the next use opens it again."""
        if self._log is not None:
            log, self._log = self._log, None
            self._places, self._owner, self._latest, self._log_bytes = {}, None, None, 0
            log.close()

    def _opened(self) -> SegmentLog:
        if self._log is None:
            try:
                self._log = self._open_newest()
                self._load(self._log)
            except BaseException:
                self.close()
                raise
        return self._log

    def _open_newest(self) -> SegmentLog:
        """The newest complete generation; older ones are removed.

        An incomplete one stays until a rewrite takes a higher number: a number is never used for two logs.
        """
        while True:
            seen = self._generations()
            for generation in reversed(seen or [0]):
                log = self._open(generation)
                if generation == min(seen, default=0) or any(value == COMPLETE for value, _ in entries(log)):
                    break
                log.close()
            # Another process may have rewritten the store between listing it and locking it.
            if self._generations() == (seen or [generation]):
                for old in seen[: seen.index(generation)] if seen else []:
                    self._remove(old)
                self._generation = generation
                return log
            log.close()

    def _generations(self) -> list[int]:
        if not self._path.is_dir():
            return []
        return [partition for topic, partition in list_logs(self._path) if topic == TOPIC]

    def _open(self, generation: int) -> SegmentLog:
        # Preallocation is not worth its bytes at one write a micro-batch.
        config = LogConfig(batch_bytes_max=2 * PART_BYTES, segment_bytes=1 << 30, preallocate_bytes=0)
        log = SegmentLog.open(self._path / f"{TOPIC}-{generation}", config=config)
        if log.recovery.damaged_from is not None:
            damaged = log.recovery.damaged_from
            log.close()
            raise MarksStoreDamaged(self.location, f"the log is damaged from record {damaged} on; restore a copy of it")
        return log

    def _remove(self, generation: int) -> None:
        shutil.rmtree(self._path / f"{TOPIC}-{generation}")

    def _load(self, log: SegmentLog) -> None:
        """Read the log once: where the newest entry of each batch is, and which query wrote last."""
        try:
            for value, place in entries(log):
                self._replay(value, place)
        except PushrepError as error:
            raise MarksStoreDamaged(self.location, f"can't be read ({error}); restore a copy of it") from error

    def _replay(self, value: bytes, place: "_Place") -> None:
        note = json_of(value)
        if note is None:
            marks = parsed_marks(value, self.location)
            self._remember(marks.query_id, marks.batch_id, place)
            self._latest = marks
        else:
            self._log_bytes += place.size
            if "drop_from" in note:
                self._drop(*note["drop_from"])

    def _remember(self, query_id: str, batch_id: int, place: "_Place") -> None:
        self._places[query_id, batch_id] = place
        self._owner = query_id
        self._log_bytes += place.size

    def _drop(self, query_id: str, batch_id: int) -> None:
        for key in [key for key in self._places if key[0] == query_id and key[1] >= batch_id]:
            del self._places[key]
        newest = max(self._places.items(), key=lambda item: item[1].start, default=None)
        self._owner = None if newest is None else newest[0][0]
        latest = self._latest
        if latest is not None and latest.query_id == query_id and latest.batch_id >= batch_id:
            self._latest = None

    def _rewrite(self, log: SegmentLog) -> None:
        """Copy what is wanted into a new generation; the old log stays locked until the new one is complete."""
        wanted = sorted(self._places.values(), key=lambda place: place.start)
        generation = self._generations()[-1] + 1
        copy = self._open(generation)
        try:
            for place in wanted:
                _append(copy, _joined(log, place))
            _append(copy, COMPLETE)
        except BaseException:
            copy.close()
            raise
        self._log, self._generation, self._places, self._log_bytes = copy, generation, {}, 0
        self._load(copy)
        log.close()
        for old in self._generations():
            if old != generation:
                self._remove(old)


class _Place:
    """Where an entry is: its records are [start, end)."""

    __slots__ = ("end", "size", "start")

    def __init__(self, start: int, end: int, size: int) -> None:
        self.start, self.end, self.size = start, end, size


def _append(log: SegmentLog, value: bytes) -> _Place:
    """Append one entry, flushed; as several records if it is large. It counts once its last part is there."""
    parts = [value[i : i + PART_BYTES] for i in range(0, len(value), PART_BYTES)]
    first = log.log_end_offset
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        durability = Durability.FLUSHED if last else Durability.BUFFERED
        log.append([part], keys=[_PART.pack(number, len(parts))], durability=durability)
    return _Place(first, log.log_end_offset, len(value))


def entries(log: SegmentLog | LogReader) -> Iterator[tuple[bytes, _Place]]:
    """Every complete entry. Parts of an entry that a kill left incomplete are skipped."""
    pieces: list[bytes] = []
    start = log.log_start_offset
    for record in log.records(log.log_start_offset):
        number, count = _PART.unpack(record.key or b"")
        if number == 0:
            pieces, start = [], record.offset
        pieces.append(bytes(record.value or b""))
        if len(pieces) == count:
            value = b"".join(pieces)
            yield value, _Place(start, record.offset + 1, len(value))


def _joined(log: SegmentLog, place: _Place) -> bytes:
    return b"".join(bytes(record.value or b"") for record in log.records(place.start, place.end))


def json_of(value: bytes) -> dict[str, Any] | None:
    """The JSON of an entry that is no marks; None for marks."""
    return json.loads(value) if value.startswith(b"{") else None
