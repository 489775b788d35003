"""The two sparse indexes of a segment: a file of ascending fixed-size entries, two numbers each, and their check.

    | entry 0 | entry 1 | ... | entry n-1 |        big-endian, second number 4 bytes; no header, nothing allocated ahead
                              `- entries still in memory, up to PENDING_MAX

New entries are kept in memory and written together: until then a reader scans a little further. The file is opened for
each use, so that ten thousand idle logs hold no descriptor for it. Entries that are dropped and added again unchanged,
as by a scan, cost no write: so opening a log that was closed clean writes nothing.
Invariant: first numbers ascend strictly. Source: Kafka's AbstractIndex, OffsetIndex, TimeIndex.

`IndexCheck` compares both with the batches while a scan yields them, in one pass:

    .index       an entry (rel, pos) is true if a batch begins at pos and ends with the offset base + rel
    .timeindex   an entry (time, rel) is true if the batch that ends with base + rel raised the greatest time to `time`

Every entry has to be true, but a sparse index may lack any. Zeros at a file's end are space that Kafka allocates ahead.
One fault per file is reported, because one repair makes them anew. Pure.
"""

import errno
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.env import File, Filesystem
from pushrep.log.directory_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from pushrep.records import BatchHeader, BatchRun
from pushrep.records.header import Column

PENDING_MAX = 64
"""512 bytes of offset index. With small batches an entry covers 4 KiB, so a reader scans 256 KiB too much at most."""

IndexMark: TypeAlias = tuple[int, tuple[int, int] | None]
"""How many entries an index has, and the newest."""

_BLOCK = 64
"""A range of so few entries is read in one system call, where a binary search would need six."""
_KEPT_MAX = 64
"""How many dropped entries are remembered: enough for the end of a clean log, not for a long scan."""


class IndexFile:
    """Entries of one index file. The writer of the log appends and cuts; readers only look.

    Raises OSError as the file does; a missing file is an empty index.
    """

    __slots__ = (
        "_dropped",
        "_entry",
        "_filesystem",
        "_is_there",
        "_path",
        "_pending",
        "_ragged",
        "_retaken",
        "_synced",
        "_written",
        "last",
    )

    def __init__(self, filesystem: Filesystem, path: Path, entry: struct.Struct) -> None:
        self._filesystem, self._path, self._entry = filesystem, path, entry
        self._pending: list[tuple[int, int]] = []
        self._dropped: list[tuple[int, int]] = []  # still in the file, after the written ones
        self._retaken = False
        self._ragged = False  # bytes after the last whole entry
        self._written = 0  # whole entries in the file
        self._is_there = False  # whether the file exists, as far as is known
        self.last: tuple[int, int] | None = None
        """The newest entry."""
        self._synced = True
        try:
            self._look()
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            self._ragged = True  # a sparse file can seem terabytes long: it counts as empty, and the next write cuts it

    def _look(self) -> None:
        entry = self._entry
        with self._opened() as file:
            if file is not None:
                self._is_there = True
                size = file.size()
                self._written, self._ragged = size // entry.size, size % entry.size != 0
                self.last = self._read(file, self._written - 1) if self._written else None

    def __len__(self) -> int:
        return self._written + len(self._pending)

    @property
    def is_whole(self) -> bool:
        """Whether the file exists and ends with a whole entry, if it has any."""
        return self._is_there and not self._ragged

    def append(self, first: int, second: int) -> None:
        """Add an entry; the next `write` writes it to the file."""
        self.last = (first, second)
        if self._dropped:
            if self._dropped[0] == self.last:
                del self._dropped[0]
                self._written += 1
                self._retaken = True
                return
            self._cut_file()
        self._pending.append(self.last)

    @property
    def is_due(self) -> bool:
        """Whether enough entries wait for a `write` to be worth it."""
        return len(self._pending) >= PENDING_MAX

    def write(self) -> None:
        """Write the pending entries to the file; may be repeated after a failure."""
        if self._dropped or self._ragged:
            self._cut_file()
        if self._pending or not self._is_there:  # not looked up: each flush of each log would
            data = b"".join([self._entry.pack(*entry) for entry in self._pending])
            with self._opened(create=True) as file:
                if file is not None:
                    file.write_at(data, self._written * self._entry.size)
            self._written += len(self._pending)
            self._pending.clear()
            self._synced, self._is_there = False, True

    def sync(self, *, retaken: bool = False) -> None:
        """Write and sync every entry, if there are new ones.

        retaken: sync also entries that were dropped and added again, which another process may have written without a
        sync.
        """
        self.write()
        if retaken and self._retaken:
            self._synced = self._retaken = False
        self.sync_written()

    def sync_written(self) -> None:
        """Sync the entries in the file; another thread may append and write meanwhile."""
        if self._synced:
            return
        self._synced = True  # set before the sync, so that the next call syncs writes from now on
        try:
            with self._opened(writable=True) as file:
                if file is not None:
                    file.sync()
        except OSError:
            self._synced = False
            raise

    def keep(self, count: int) -> None:
        """Drop all but the first `count` entries, and bytes at the end that are no entry."""
        if count >= len(self):
            return
        del self._pending[max(0, count - self._written) :]
        if count < self._written:
            many = self._written - count > _KEPT_MAX
            with self._opened() as file:
                if file is not None and not many:
                    self._dropped[:0] = [self._read(file, number) for number in range(count, self._written)]
            self._written = count
            if many:
                self._cut_file()
        self.last = self._pending[-1] if self._pending else None
        if self._written and not self._pending:
            with self._opened() as file:
                self.last = self._read(file, self._written - 1) if file is not None else None

    def mark(self) -> IndexMark:
        """Its end, for `rewind`."""
        return self._written + len(self._pending), self.last

    def rewind(self, mark: IndexMark) -> None:
        """Drop the entries that were added since `mark`. Opens no file: the next `write` cuts it."""
        count, self.last = mark
        del self._pending[max(0, count - self._written) :]
        if count < self._written:
            self._written, self._ragged = count, True
            self._dropped.clear()

    def floor(self, key: int) -> tuple[int, int] | None:
        """The last entry in the file whose first number is at most `key`; None if there is none."""
        if not self._written:
            return None
        with self._opened() as file:
            count = self._search(file, key, 0) if file is not None else 0
            return self._read(file, count - 1) if file is not None and count else None

    def floor_now(self, key: int) -> tuple[int, int] | None:
        """As `floor`, but including entries that are still in memory."""
        at = bisect_right(self._pending, key, key=lambda entry: entry[0])
        return self._pending[at - 1] if at else self.floor(key)

    def count_up_to(self, key: int, column: int = 0) -> int:
        """How many entries, of the file and in memory, have a number of at most `key` in `column`, which ascends."""
        if self.last is None or 0 <= self.last[column] <= key:
            return len(self)
        with self._opened() as file:
            count = self._search(file, key, column) if file is not None else 0
        return count + sum(entry[column] <= key for entry in self._pending)

    def ascends(self, *columns: int) -> bool:
        """Whether the numbers of each column in the file ascend strictly: they don't where a power cut left zeros."""
        if not self._written:
            return True
        with self._opened() as file:
            if file is None:
                return True
            data = file.read_at(self._written * self._entry.size, 0)
        entries = np.frombuffer(data, _dtype(self._entry.size))
        return all(_ascends(entries[f"f{column}"]) for column in columns)

    def _cut_file(self) -> None:
        with self._opened(writable=True) as file:
            if file is not None:
                file.truncate(self._written * self._entry.size)
        self._dropped.clear()
        self._ragged = self._synced = False

    def _search(self, file: File, key: int, column: int) -> int:
        size = self._entry.size
        low, high = 0, min(self._written, file.size() // size)
        while high - low > _BLOCK:
            middle = (low + high) // 2
            if self._read(file, middle)[column] <= key:
                low = middle + 1
            else:
                high = middle
        block = file.read_at((high - low) * size, low * size)  # shorter if the writer cut the file meanwhile
        entries = list(self._entry.iter_unpack(block[: len(block) // size * size]))
        return low + bisect_right(entries, key, key=lambda entry: entry[column])

    def _read(self, file: File, number: int) -> tuple[int, int]:
        data = file.read_at(self._entry.size, number * self._entry.size)
        if len(data) < self._entry.size:
            return (-1, -1)  # the writer cut the file meanwhile
        first, second = self._entry.unpack(data)
        return first, second

    @contextmanager
    def _opened(self, *, create: bool = False, writable: bool = False) -> Iterator[File | None]:
        try:
            file = self._filesystem.open(self._path, create=create, writable=create or writable)
        except FileNotFoundError:
            yield None
            return
        try:
            yield file
        finally:
            file.close()


def _ascends(numbers: NDArray[np.int64]) -> bool:
    return bool(np.all(numbers[1:] > numbers[:-1])) and (not len(numbers) or bool(numbers[0] >= 0))


@cache
def _dtype(entry_bytes: int) -> np.dtype[np.void]:
    return np.dtype([("f0", f">i{entry_bytes - 4}"), ("f1", ">i4")])


_FEW = 32  # batches; below, forty numpy calls cost more than a check of each
_OFFSETS = np.dtype([("key", ">i4"), ("value", ">i4")])
_TIMES = np.dtype([("key", ">i8"), ("value", ">i4")])
assert (_OFFSETS.itemsize, _TIMES.itemsize) == (8, 12), "Kafka's index entries"


class IndexFault(NamedTuple):
    """What is wrong in the index file with this suffix, at byte `position`."""

    suffix: str
    position: int
    reason: str


class Entries(NamedTuple):
    """The whole entries of an index file, without space allocated ahead; rest_bytes: bytes at its end that are no
    entry.
    """

    keys: list[int]
    values: list[int]
    entry_bytes: int
    rest_bytes: int


def parse_index(suffix: str, data: bytes) -> Entries:
    """The entries in the bytes of an index file: (relative offset, position) or (timestamp, relative offset)."""
    dtype = _OFFSETS if suffix == INDEX_SUFFIX else _TIMES
    size = dtype.itemsize
    rest = len(data) % size
    used = len(data) - rest
    while used and data[used - size : used] == bytes(size):
        used -= size
    entries = np.frombuffer(data, dtype, used // size)
    allocated_ahead = used < len(data) - rest
    return Entries(entries["key"].tolist(), entries["value"].tolist(), size, 0 if allocated_ahead else rest)


class IndexCheck:
    """One segment's indexes against its batches: `run` for all of them in order, then `faults`."""

    def __init__(self, base_offset: int, offsets: bytes | None, times: bytes | None) -> None:
        """offsets, times: the files' bytes; None: there is no such file, and nothing to check."""
        self._base_offset = base_offset
        self._faults: dict[str, IndexFault] = {}
        self._offsets = self._entries(INDEX_SUFFIX, offsets)
        self._times = self._entries(TIME_INDEX_SUFFIX, times)
        self._next_offset_entry = self._next_time_entry = 0
        self._max_timestamp_ms = -1

    def batch(self, position: int, header: BatchHeader) -> None:
        """The next whole batch of the segment begins at `position`."""
        self._one_by_one([position], [header.last_offset], [header.max_timestamp_ms])

    def run(self, run: BatchRun, few: int = _FEW) -> None:
        """The next whole batches of the segment.

        They are checked together and, if an entry is wrong, one by one; runs of less than `few` batches always one by
        one.
        """
        columns = (run.position, run.last_offset, run.max_timestamp_ms)
        if len(run) < few:
            self._one_by_one(*(column.tolist() for column in columns))
            return
        offsets = self._slice(self._offsets.values, self._next_offset_entry, int(run.position[-1]))
        last = int(run.last_offset[-1]) - self._base_offset
        times = self._slice(self._times.values, self._next_time_entry, last)
        peaks = np.maximum.accumulate(run.max_timestamp_ms)
        if not (self._offsets_are_true(offsets, run) and self._times_are_true(times, run, peaks)):
            self._one_by_one(*(column.tolist() for column in columns))
            return
        self._next_offset_entry, self._next_time_entry = offsets.stop, times.stop
        self._max_timestamp_ms = max(self._max_timestamp_ms, int(peaks[-1]))

    def faults(self, tolerated_from: int | None) -> list[IndexFault]:
        """The faults, after the last batch.

        Entries from the offset `tolerated_from` on may be ahead of the batches; None: no entry may.
        """
        for suffix, entries, at, relatives in (
            (INDEX_SUFFIX, self._offsets, self._next_offset_entry, self._offsets.keys),
            (TIME_INDEX_SUFFIX, self._times, self._next_time_entry, self._times.values),
        ):
            if suffix in self._faults or at >= len(entries.keys):
                continue
            offset = self._base_offset + relatives[at]
            if tolerated_from is None or offset < tolerated_from:
                self._fault(suffix, at, f"points to offset {offset}, for which no batch is there")
        return list(self._faults.values())

    def _one_by_one(self, positions: list[int], last_offsets: list[int], times_ms: list[int]) -> None:
        """For each batch: where it begins, its last offset, its newest time."""
        base, pointed_at, relatives = self._base_offset, self._offsets.values, self._times.values
        pointers, timed = len(pointed_at), len(relatives)
        for position, last_offset, time_ms in zip(positions, last_offsets, times_ms, strict=True):
            at = self._next_offset_entry
            if at < pointers and pointed_at[at] <= position:
                self._check_offset(at, position, last_offset)
            rose = time_ms > self._max_timestamp_ms
            if rose:
                self._max_timestamp_ms = time_ms
            at = self._next_time_entry
            if at < timed and relatives[at] + base <= last_offset:
                self._check_time(at, last_offset, time_ms, rose=rose)

    @staticmethod
    def _slice(values: list[int], begin: int, last: int) -> slice:
        """The entries from `begin` on whose value is at most `last`."""
        return slice(begin, max(begin, bisect_right(values, last, begin)))

    def _offsets_are_true(self, entries: slice, run: BatchRun) -> bool:
        positions = np.array(self._offsets.values[entries], np.int64)
        at = np.searchsorted(run.position, positions)  # below the end: no entry lies behind the run
        relative = run.last_offset[at] - self._base_offset
        return bool((run.position[at] == positions).all() and (relative == self._offsets.keys[entries]).all())

    def _times_are_true(self, entries: slice, run: BatchRun, peaks: Column) -> bool:
        relatives = np.array(self._times.values[entries], np.int64)
        at = np.searchsorted(run.last_offset, relatives + self._base_offset)
        before = np.maximum(np.where(at > 0, peaks[at - 1], -1), self._max_timestamp_ms)
        found = run.max_timestamp_ms[at]
        return bool(
            (run.last_offset[at] - self._base_offset == relatives).all()
            and (found == self._times.keys[entries]).all()
            and (found > before).all()
        )

    def _check_offset(self, at: int, position: int, last_offset: int) -> None:
        promised, offset = self._offsets.values[at], self._base_offset + self._offsets.keys[at]
        if promised != position:
            self._fault(INDEX_SUFFIX, at, f"points to byte {promised}, where no batch begins")
        elif offset != last_offset:
            self._fault(INDEX_SUFFIX, at, f"says {offset} for byte {position}, the batch there ends with {last_offset}")
        self._next_offset_entry = at + 1

    def _check_time(self, at: int, last_offset: int, time_ms: int, *, rose: bool) -> None:
        promised_ms, offset = self._times.keys[at], self._base_offset + self._times.values[at]
        if offset != last_offset:
            self._fault(TIME_INDEX_SUFFIX, at, f"points to offset {offset}, with which no batch ends")
        elif promised_ms != time_ms:
            self._fault(TIME_INDEX_SUFFIX, at, f"says {promised_ms} for offset {offset}, it is {time_ms}")
        elif not rose:
            self._fault(TIME_INDEX_SUFFIX, at, f"points to offset {offset}, but the time {time_ms} was reached before")
        self._next_time_entry = at + 1

    def _entries(self, suffix: str, data: bytes | None) -> Entries:
        entries = parse_index(suffix, b"" if data is None else data)
        columns = (np.asarray(entries.keys, np.int64), np.asarray(entries.values, np.int64))
        for column in columns:
            falls = np.flatnonzero(np.diff(column) <= 0)
            if len(falls):
                self._faults[suffix] = IndexFault(
                    suffix, int(falls[0] + 1) * entries.entry_bytes, "its entries do not ascend"
                )
                return entries._replace(keys=[], values=[])
        if entries.keys and min(entries.keys[0], entries.values[0]) < 0:
            self._fault(suffix, 0, "has a number below 0", entries.entry_bytes)
        elif entries.rest_bytes:
            end = len(entries.keys) * entries.entry_bytes
            self._faults[suffix] = IndexFault(suffix, end, f"{entries.rest_bytes} bytes at its end are no entry")
        return entries

    def _fault(self, suffix: str, at: int, reason: str, entry_bytes: int | None = None) -> None:
        size = entry_bytes or (self._offsets if suffix == INDEX_SUFFIX else self._times).entry_bytes
        self._faults.setdefault(suffix, IndexFault(suffix, at * size, f"entry {at} {reason}"))
