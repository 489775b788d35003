"""Are the two indexes of a segment true? Compared with its batches while a scan yields them, in one pass.

    .index       an entry (rel, pos) is true if a batch begins at pos and ends with the offset base + rel
    .timeindex   an entry (time, rel) is true if the batch that ends with base + rel raised the greatest time to `time`

Every entry has to be true, but none has to be there: a sparse index may lack any. Zeros at a file's end are space that
Kafka allocates ahead. One fault per file is told, since one `rebuild-index` cures them all. Pure.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from pushrep.log.segment_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from pushrep.records import BatchHeader, BatchRun
from pushrep.records.batch_run import Column

_FEW = 32  # batches; below, forty numpy calls cost more than looking at each
_OFFSETS = np.dtype([("key", ">i4"), ("value", ">i4")])
_TIMES = np.dtype([("key", ">i8"), ("value", ">i4")])
assert (_OFFSETS.itemsize, _TIMES.itemsize) == (8, 12), "Kafka's index entries"


class IndexFault(NamedTuple):
    """What is wrong in the file of this suffix, at the byte `position` of it."""

    suffix: str
    position: int
    reason: str


class Entries(NamedTuple):
    """The whole entries of an index file, without what is allocated ahead, and the bytes at its end that are none."""

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
        """`offsets`, `times`: the files' bytes, None for a file that is not there and is not judged."""
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
        """The next whole batches of the segment. Entries that are all true are taken together, others one by one.

        `few`: in a run of less the batches are looked at one by one at once.
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
        """What is wrong, after the last batch.

        Entries from the offset `tolerated_from` on may be ahead of the batches that were shown; None: no entry may.
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
            self._fault(suffix, 0, "it begins with a number below 0", entries.entry_bytes)
        elif entries.rest_bytes:
            end = len(entries.keys) * entries.entry_bytes
            self._faults[suffix] = IndexFault(suffix, end, f"{entries.rest_bytes} bytes at its end are no entry")
        return entries

    def _fault(self, suffix: str, at: int, reason: str, entry_bytes: int | None = None) -> None:
        size = entry_bytes or (self._offsets if suffix == INDEX_SUFFIX else self._times).entry_bytes
        self._faults.setdefault(suffix, IndexFault(suffix, at * size, f"entry {at} {reason}"))
