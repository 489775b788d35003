"""Scanning a segment's file batch by batch, and the only place that decides whether a batch is where it has to be.

    | batch | batch | batch | ??????          at every position one of four answers:
      WholeBatch  WholeBatch  ...           header and length have room; magic, CRC; in its place (`why_misplaced`)
      CleanEnd                              the file ends there, or only zeros follow (space allocated ahead)
      TornTail                              bad, at or above the recovery point: a write that was never acknowledged
      Damage                                bad, below the recovery point: bytes that were on disk are not any more;
                                            or whole, with offsets missing before it, as no write that tore leaves it

A batch's CRC does not cover base offset, length, leader epoch and magic. So a base offset is checked by the end of the
batch before it, by the file's name for the first batch, or by an index entry for this batch. No offset is missing: not
between two batches, and not inside of one.

    scan            batch by batch, where the records are needed, or where one of the others stops
    scan_vectorised the same, many batches checked at once: recovery, verify, rebuilding of indexes
    scan_headers    by the headers alone, for bytes that are sent on, whose CRC the receiver checks

The other two stop at everything that is not plainly in order, or leave it to `scan`; property tests hold them equal.
Nothing after a bad batch is read: unsynced writes reach the disk in any order, so a whole batch there proves nothing.
Memory: one window, or one batch if that is larger.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pushrep.env import File
from pushrep.log.config import BATCH_BYTES_LIMIT, POSITION_MAX
from pushrep.records import HEADER_BYTES, BatchHeader, BatchRun, CorruptRecordBatch, RecordBatch
from pushrep.records.header import (
    CODEC_MASK,
    CONTROL_BIT,
    LENGTH,
    LENGTH_AT,
    LENGTH_ENDS_AT,
    MAGIC,
    MAGIC_AT,
    OFFSET_MAX,
    RECORD_BYTES_MIN,
    Column,
    checked_run,
    length_of_first,
    unpack_walked,
)
from pushrep.records.leader_epochs import LeaderEpochs

WINDOW_BYTES = 1 << 20
"""Reads of 1 MiB hold four batches of the usual size, and stay in the processor's cache."""

RUN_BYTES_MAX = 2 << 20
"""A run costs 0.1 ms before its first batch, whatever the batches' size: 2 MiB hide that; the memory of 4 MiB goes back
to the system after each of them, and every page of it has to be had again."""
_RUN_BYTES_MIN = 64 << 10  # small, for directories of ten thousand logs with a few records each
_RUN_GROWTH = 8

_HEADERS_BYTES, _SMALL_BYTES = 64 << 10, 4096
"""Batches below this size mostly come in large numbers, so the next read is for more than one header."""


class WholeBatch(NamedTuple):
    """A batch that passed every check, and the byte where it begins. A tuple: a frozen dataclass takes twice as long to
    make, and there is one for each batch that is read.
    """

    position: int
    batch: RecordBatch

    @property
    def end(self) -> int:
        """The position after it."""
        return self.position + self.batch.header.size_bytes


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """The batches end at `position`; `next_offset` would follow."""

    position: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes from `position` on, where `next_offset` should be, are no batch; their write was never acknowledged."""

    position: int
    next_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Damage:
    """From `position` on, where `next_offset` should be, bytes that were on disk are not any more, or offsets are
    missing.

    goes_on_at: if offsets are missing before a whole batch, that batch's base offset. Tools scan on there, to report
    every hole that Kafka's cleaner made; nothing else does.
    """

    position: int
    next_offset: int
    reason: str
    goes_on_at: int | None = None


ScanEnd: TypeAlias = CleanEnd | TornTail | Damage
ScanStep: TypeAlias = WholeBatch | ScanEnd
RunStep: TypeAlias = BatchRun | ScanEnd
_Step = TypeVar("_Step", ScanStep, RunStep)

ScannedHeader: TypeAlias = tuple[int, int, int, int, int, int, int]
"""Position, base offset, next offset, size in bytes, leader epoch, records of data (none in a control batch), newest
time. No NamedTuple: making one costs a third of the scan."""


class ReadableFile(Protocol):
    """What `scan` and `scan_headers` need of a File."""

    def read_at(self, size: int, position: int) -> bytes: ...
    def size(self) -> int: ...


class ScanRange(NamedTuple):
    """The range to scan, and what is known about it; given by name. A tuple: `_replace` takes a third of the time that
    `dataclasses.replace` does, and there are some for each read.

    base_offset: of the segment; offsets in it are at most 31 bits above, the limit of Kafka's indexes.
    position, next_offset: where a batch begins, and the offset that it has to begin with (None: the base offset).
    last_offset: instead of next_offset: the last offset of the first batch, by an index entry.
    end_offset: base offset of the next segment; None if this is the newest one.
    recovery_point: everything below was on disk.
    leader_epoch: of the batch before; epochs never fall.
    closed_at: the log's end at a clean close; no batch reaches above. None: it was not closed clean.
    epochs: which epoch wrote which offset, if that is known; a scan of headers does not check it.
    may_lack_records: for tools, over a log that Kafka's cleaner went over, whose batches lack records.
    """

    base_offset: int
    position: int = 0
    next_offset: int | None = None
    last_offset: int | None = None
    end_offset: int | None = None
    recovery_point: int = 0
    leader_epoch: int = -1
    closed_at: int | None = None
    epochs: LeaderEpochs | None = None
    may_lack_records: bool = False

    @property
    def first_offset(self) -> int | None:
        """The base offset of the first batch; None if only its last offset is known."""
        if self.last_offset is not None:
            return None
        return self.base_offset if self.next_offset is None else self.next_offset

    def why_misplaced(
        self, expected: int | None, epoch_before: int, base_offset: int, next_offset: int, leader_epoch: int
    ) -> str | None:
        """Why a batch of [base_offset, next_offset) can't be where `expected` should be; None if it can.

        expected: the end of the batch before; None for a first one that an index entry names. This checks all fields
        that no CRC covers. A batch that follows the one before and reaches into the next segment is in its place: two
        segments overlap there, which recovery refuses by name.
        """
        reason, last_offset = None, next_offset - 1
        if expected is None and (last_offset != self.last_offset or base_offset < self.base_offset):
            reason = f"it ends with offset {last_offset}, an index entry says {self.last_offset}"
        elif expected is not None and base_offset != expected:
            reason = f"base offset {base_offset} where {expected} is expected"
        elif last_offset - self.base_offset > POSITION_MAX:
            reason = f"base offset {base_offset} is too far from the segment's {self.base_offset}"
        elif self.closed_at is not None and next_offset > self.closed_at:
            reason = f"offsets up to {last_offset} in a log that ended at {self.closed_at}"
        elif leader_epoch < epoch_before:
            reason = f"leader epoch falls from {epoch_before} to {leader_epoch}"
        elif self.epochs is not None:
            reason = self.epochs.contradiction(base_offset, leader_epoch)
        return reason


def scan(file: ReadableFile, what: ScanRange, *, window_bytes: int = WINDOW_BYTES) -> Iterator[ScanStep]:
    """Every whole batch in order, then exactly one CleanEnd, TornTail or Damage. Raises OSError."""
    window = _Window(file, window_bytes)
    position, expected, epoch = what.position, what.first_offset, what.leader_epoch
    while True:
        found, goes_on_at = _batch_at(window, position), None
        if isinstance(found, RecordBatch):
            header = found.header
            base_offset, next_offset = header.base_offset, header.next_offset
            if expected is not None and base_offset > expected:
                goes_on_at = base_offset
            if header.record_count != next_offset - base_offset and not what.may_lack_records:
                found = f"{header.record_count} records for {next_offset - base_offset} offsets"
            else:
                found = what.why_misplaced(expected, epoch, base_offset, next_offset, header.leader_epoch) or found
        if not isinstance(found, RecordBatch):
            at = CleanEnd(position, what.base_offset if expected is None else expected)
            if goes_on_at is not None:
                yield Damage(position, at.next_offset, found, goes_on_at)
            else:
                yield _end(window, what, at, found)
            return
        yield WholeBatch(position, found)
        position, expected, epoch = position + header.size_bytes, next_offset, header.leader_epoch


def scan_over_holes(file: File, what: ScanRange, walk: Callable[[File, ScanRange], Iterator[_Step]]) -> Iterator[_Step]:
    """`scan` or `scan_vectorised`, going on behind each hole: for tools, over a log whose offsets Kafka's cleaner took.
    Each hole is a Damage with `goes_on_at`. Raises OSError.
    """
    while True:
        for step in walk(file, what):
            yield step
            if isinstance(step, WholeBatch):
                what = what._replace(leader_epoch=step.batch.header.leader_epoch)
            elif isinstance(step, BatchRun):
                what = what._replace(leader_epoch=int(step.leader_epoch[-1]))
        if not isinstance(step, Damage) or step.goes_on_at is None:
            return
        what = what._replace(position=step.position, next_offset=step.goes_on_at)


def _batch_at(window: "_Window", position: int) -> RecordBatch | str:
    """The whole batch at `position`, or why there is none."""
    head = window.view(position, HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return f"{len(head)} bytes are no header"
    try:
        header = BatchHeader.parse(head)
        size = header.size_bytes
        if size > BATCH_BYTES_LIMIT:
            return f"length {size} is above {BATCH_BYTES_LIMIT}"
        data = window.view(position, size)
        if len(data) < size:
            return f"{len(data)} bytes of {size}: the file ends inside the batch"
        return RecordBatch.check(data, header)
    except CorruptRecordBatch as error:
        return error.reason


def _end(window: "_Window", what: ScanRange, at: CleanEnd, reason: str) -> ScanEnd:
    """Which of the three ends it is."""
    nothing, zeros = window.only_zeros_from(at.position)
    reached = at.next_offset >= (what.recovery_point if what.end_offset is None else what.end_offset)
    if nothing or zeros:
        # A sealed segment that is only too short leaves a gap between two segments, which recovery refuses.
        if reached or (nothing and what.end_offset is not None):
            return at
        reason = f"{'zeros follow' if zeros else 'the log ends'} where offset {at.next_offset} should be"
    if at.next_offset < what.recovery_point:
        return Damage(at.position, at.next_offset, reason)
    return TornTail(at.position, at.next_offset, reason)


def holds_whole_batch(file: File, position: int, next_offset: int) -> bool:
    """Whether a whole batch with offsets from `next_offset` on begins anywhere at or after byte `position`."""
    window, size = _Window(file, WINDOW_BYTES), file.size()
    while position + HEADER_BYTES <= size:
        data = file.read_at(WINDOW_BYTES + HEADER_BYTES - 1, position)
        starts = np.frombuffer(data, np.uint8)[MAGIC_AT : len(data) - HEADER_BYTES + 1 + MAGIC_AT]
        for at in np.flatnonzero(starts == MAGIC).tolist():
            length = LENGTH.unpack_from(data, at + LENGTH_AT)[0] + LENGTH_ENDS_AT
            if HEADER_BYTES <= length <= min(size - position - at, BATCH_BYTES_LIMIT):
                found = _batch_at(window, position + at)
                if isinstance(found, RecordBatch) and found.header.base_offset >= next_offset:
                    return True
        position += WINDOW_BYTES
    return False


class _Window:
    """Reads a file in large pieces and returns views; pieces are never changed, so views stay valid."""

    __slots__ = ("_data", "_file", "_size", "_start")

    def __init__(self, file: ReadableFile, size_bytes: int) -> None:
        self._file, self._size = file, size_bytes
        self._start, self._data = 0, memoryview(b"")

    def view(self, position: int, size: int) -> memoryview:
        """`size` bytes from `position` on; fewer only at the end of the file."""
        begin = position - self._start
        if begin < 0 or begin + size > len(self._data):
            self._data = memoryview(self._file.read_at(max(size, self._size), position))
            self._start, begin = position, 0
        return self._data[begin : begin + size]

    def only_zeros_from(self, position: int) -> tuple[bool, bool]:
        """(whether nothing follows, whether something follows and is all zeros)."""
        start = position
        while chunk := self._file.read_at(max(self._size, HEADER_BYTES), position):
            if chunk.count(0) != len(chunk):
                return False, False
            position += len(chunk)
        return position == start, position > start


def scan_vectorised(file: File, what: ScanRange, *, window_bytes: int = _RUN_BYTES_MIN) -> Iterator[RunStep]:
    """Every whole batch in order, in runs, then exactly one CleanEnd, TornTail or Damage: those of `scan`.

    window   | batch | batch | batch | bat|      all of its whole batches are checked together       BatchRun
             ──────────────────────────▶         next window from the first that is not whole

    The first batch that does not pass, the end of the file included, is looked at by `scan`, which goes on from there.
    `window_bytes`: of the first read; the following ones grow. Raises OSError.
    """
    _advise(file)
    while what.last_offset is None:
        what, run = _next_run(file, what, window_bytes)
        if run is None:
            break
        yield run
        window_bytes = min(window_bytes * _RUN_GROWTH, RUN_BYTES_MAX)
        what = what._replace(position=run.end, next_offset=run.next_offset, leader_epoch=int(run.leader_epoch[-1]))
    for step in scan(file, what):
        yield BatchRun.of(step.position, step.batch.header) if isinstance(step, WholeBatch) else step


def _advise(file: File) -> None:
    """Tell the system that the file is read sequentially: it reads ahead twice as much, at half the cost a byte.

    WILLNEED for 2 to 16 MiB halved the speed where the system reads 8 MiB ahead by itself.
    """
    with suppress(OSError):  # a file in memory has no descriptor
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _next_run(file: File, what: ScanRange, window_bytes: int) -> tuple[ScanRange, BatchRun | None]:
    """The run of whole batches at `what.position`, None if `scan` has to go on; and the range after it."""
    if what.base_offset > OFFSET_MAX:  # a name of twenty digits may exceed a column's 64 bits
        return what, None
    data = file.read_at(window_bytes, what.position)
    size = length_of_first(data)
    if not HEADER_BYTES <= size <= BATCH_BYTES_LIMIT:
        return what, None
    if size > len(data) == window_bytes:
        data = file.read_at(size, what.position)  # a batch larger than the window
    run = checked_run(data, what.position, BATCH_BYTES_LIMIT)
    if not len(run):
        return what, None
    good = well_placed(run, what)
    run = run if good.all() else run.first(int(good.argmin()))
    return what, run if len(run) else None


def well_placed(run: BatchRun, what: ScanRange) -> NDArray[np.bool_]:
    """`ScanRange.why_misplaced` for many batches: which are in place.

    The rule stands here a second time, as arrays; tests/properties/test_log_scan_runs.py holds the two equal.
    """
    before = np.empty_like(run.base_offset)
    before[0] = what.base_offset if what.next_offset is None else what.next_offset
    before[1:] = run.last_offset[:-1] + 1
    epoch_before = np.empty_like(run.leader_epoch)
    epoch_before[0], epoch_before[1:] = what.leader_epoch, run.leader_epoch[:-1]
    good: NDArray[np.bool_] = (
        (run.base_offset == before)
        & (what.may_lack_records | (run.record_count == run.last_offset - run.base_offset + 1))
        & (run.last_offset - what.base_offset <= POSITION_MAX)
        & (run.leader_epoch >= epoch_before)
    )
    if what.closed_at is not None:
        good &= run.last_offset < what.closed_at
    if what.epochs is not None:
        good &= _in_history(run.base_offset, run.leader_epoch, what.epochs)
    return good


def _in_history(base_offset: Column, leader_epoch: Column, epochs: LeaderEpochs) -> NDArray[np.bool_]:
    """`LeaderEpochs.contradiction` for many batches: True for those without one."""
    starts = np.array([start for _, start in epochs.entries], np.int64)
    known = np.array([-1, *(epoch for epoch, _ in epochs.entries)], np.int64)
    known = known[starts.searchsorted(base_offset, side="right")]
    good: NDArray[np.bool_] = (known == np.maximum(leader_epoch, 0)) | (known == -1)
    return good


def scan_headers(file: ReadableFile, what: ScanRange) -> Iterator[ScannedHeader]:
    """Every batch that is in its place by its header, up to the first that is not, or is not all in the file.

    `scan` then gives the reason. The CRC is checked when the bytes are read; until then a last offset may be wrong,
    too, so no batch may reach into the next segment. The recovery point is not used. Raises OSError.
    """
    read_at, unpack = file.read_at, unpack_walked
    begin = position = what.position
    last, size, file_bytes = begin - 1, _SMALL_BYTES, -1  # the first read is for a header alone
    first, epoch_before = what.first_offset, what.leader_epoch
    expected = -1 if first is None else first
    highest = min(what.base_offset + POSITION_MAX + 1, OFFSET_MAX)
    highest = highest if what.end_offset is None else min(highest, what.end_offset)
    size_min, size_max, magic_known = HEADER_BYTES, BATCH_BYTES_LIMIT, MAGIC  # local names: half the cost of globals
    codec_mask, control_bit, record_bytes, length_ends_at = CODEC_MASK, CONTROL_BIT, RECORD_BYTES_MIN, LENGTH_ENDS_AT
    while True:
        if position > last:
            begin = position
            window = read_at(_HEADERS_BYTES if size < _SMALL_BYTES else HEADER_BYTES, begin)
            last = begin + len(window) - HEADER_BYTES
            if last < begin:
                return
        base, length, epoch, magic, attributes, delta, newest_ms, count = unpack(window, position - begin)
        size, offsets = length + length_ends_at, delta + 1
        end, following = position + size, base + offsets
        # The rules of BatchHeader.parse, inlined: a call and a tuple of 13 would take twice as long as all of this.
        # Lower bounds of base offset and epoch follow from what is expected.
        if (
            magic != magic_known
            or not count == offsets > 0
            or following > highest
            or not size_min <= size <= size_max
            or (count * record_bytes > size - size_min and not attributes & codec_mask)
        ):
            return
        if (base != expected or epoch < epoch_before) and what.why_misplaced(
            None if expected < 0 else expected, epoch_before, base, following, epoch
        ):
            return
        if end > file_bytes:
            file_bytes = file.size()
            if end > file_bytes:
                return
        yield position, base, following, size, epoch, 0 if attributes & control_bit else count, newest_ms
        position, expected, epoch_before = end, following, epoch


def from_index_entry(file: ReadableFile, what: ScanRange, entry: tuple[int, int] | None) -> ScanRange:
    """`what`, beginning at the batch that an index entry (relative offset, position) names; unchanged without one.

    An entry is a hint: it is used if the batch there ends with that offset. Raises OSError.
    """
    if entry is None or entry[1] < what.position:
        return what
    hinted = what._replace(position=entry[1], next_offset=None, last_offset=what.base_offset + entry[0])
    for position, base_offset, *_ in scan_headers(file, hinted):
        return hinted._replace(position=position, next_offset=base_offset, last_offset=None)
    return what
