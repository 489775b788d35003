"""The one walk over a segment file. Reads, dump and repair read this generator; recovery and verify read scan_runs.py,
which takes many batches at once and leaves to this one whatever is not plainly whole.

    | batch | batch | batch | ??????          at every position one of four answers:
      WholeBatch  WholeBatch  ...           header and length have room; magic, CRC; offsets and epochs in order
      CleanEnd                              the file ends there, or only zeros follow (space allocated ahead)
      TornTail                              bad, at or above the recovery point: a write that was never promised
      Damage                                bad, below the recovery point: bytes that were on disk are not any more

The last three end the scan. What lies behind a bad batch is never looked at: unsynced writes reach the disk in any
order, and a batch that happens to be whole there proves nothing. Memory: one window, or one batch if that is larger.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pushrep.log.config import BATCH_BYTES_LIMIT, POSITION_MAX
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.seams import File

WINDOW_BYTES = 1 << 20
"""Sequential reads of 1 MiB: four batches of the usual size each, and they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A batch that passed every check, and the byte where it begins."""

    position: int
    batch: RecordBatch

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.position + self.batch.header.size_bytes


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """Nothing more: the batches end at `position`, and `next_offset` would follow."""

    position: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class TornTail:
    """From `position` on there are bytes that are no batch, where `next_offset` should be; nobody was promised them."""

    position: int
    next_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Damage:
    """From `position` on there are bytes that are no batch, where `next_offset` was known to be on disk."""

    position: int
    next_offset: int
    reason: str


ScanEnd: TypeAlias = CleanEnd | TornTail | Damage
ScanStep: TypeAlias = WholeBatch | ScanEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRange:
    """What is to be scanned, and what is known about it.

    base_offset: of the segment; no offset in it is further away than Kafka's indexes can say.
    position, next_offset: where a batch begins, and the lowest offset that it may have (None: the base offset).
    end_offset: base offset of the next segment; None if this is the newest one.
    recovery_point: everything below was on disk.
    leader_epoch: of the batch before; epochs never fall.
    """

    base_offset: int
    position: int = 0
    next_offset: int | None = None
    end_offset: int | None = None
    recovery_point: int = 0
    leader_epoch: int = -1


def scan(file: File, what: ScanRange, *, window_bytes: int = WINDOW_BYTES) -> Iterator[ScanStep]:
    """Every whole batch in order, then exactly one CleanEnd, TornTail or Damage."""
    window = _Window(file, window_bytes)
    position, epoch = what.position, what.leader_epoch
    next_offset = what.base_offset if what.next_offset is None else what.next_offset
    while True:
        found = _batch_at(window, position)
        if isinstance(found, RecordBatch):
            found = _misplaced(found.header, what, next_offset, epoch) or found
        if not isinstance(found, RecordBatch):
            yield _end(window, what, CleanEnd(position, next_offset), found)
            return
        yield WholeBatch(position, found)
        header = found.header
        position, next_offset, epoch = position + header.size_bytes, header.next_offset, header.leader_epoch


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


def _misplaced(header: BatchHeader, what: ScanRange, next_offset: int, epoch: int) -> str | None:
    """Why a whole batch can't stand here; offset and epoch lie outside of the CRC: only their order can be judged."""
    if header.base_offset < next_offset:
        return f"base offset {header.base_offset} where at least {next_offset} is expected"
    if header.last_offset - what.base_offset > POSITION_MAX:
        return f"base offset {header.base_offset} is too far from the segment's {what.base_offset}"
    # In sequence it is no broken number but an overlap of two segments, which is the opener's to refuse by their names.
    end = what.end_offset
    if end is not None and header.next_offset > end and header.base_offset != next_offset:
        return f"offsets up to {header.last_offset} reach into the next segment at {end}"
    if header.leader_epoch < epoch:
        return f"leader epoch falls from {epoch} to {header.leader_epoch}"
    return None


def _end(window: "_Window", what: ScanRange, at: CleanEnd, reason: str) -> ScanEnd:
    """Which of the three ends this is."""
    nothing, zeros = window.only_zeros_from(at.position)
    reached = at.next_offset >= (what.recovery_point if what.end_offset is None else what.end_offset)
    if nothing or zeros:
        # A sealed segment that is merely short is a gap between two names, which is the opener's to refuse.
        if reached or (nothing and what.end_offset is not None):
            return at
        reason = f"{'zeros follow' if zeros else 'the log ends'} where offset {at.next_offset} should be"
    if at.next_offset < what.recovery_point:
        return Damage(at.position, at.next_offset, reason)
    return TornTail(at.position, at.next_offset, reason)


class _Window:
    """A file read in large pieces and handed out as views; the pieces are never changed, so that views stay valid."""

    __slots__ = ("_data", "_file", "_size", "_start")

    def __init__(self, file: File, size_bytes: int) -> None:
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
        """(nothing follows, something follows and all of it is zero)."""
        start = position
        while chunk := self._file.read_at(max(self._size, HEADER_BYTES), position):
            if chunk.count(0) != len(chunk):
                return False, False
            position += len(chunk)
        return position == start, position > start
