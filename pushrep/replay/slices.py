"""Which bytes of which segment a session is sent next: found by the headers alone, sent as slices of the file.

    position ─ segment, sparse index ─▶ header ─ length ─▶ header ─ length ─▶ ...     until the limit, or enough bytes

Nothing is checked here but that a header follows another, in its segment: the reader of the bytes checks their CRC.
Offsets and length lie outside of it as far as they say where the next one stands, so a damaged one must not pass for a
hole. If the log was cut meanwhile, call `forget`, and look again where `read` finds none of what
should be there.
"""

from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pushrep.env import File, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.errors import CorruptBatch
from pushrep.log.reader import hold_against_seal
from pushrep.log.segment import begin_near
from pushrep.log.segment_files import list_segments, segment_path
from pushrep.log.walk import ScanRange, ends_clean, scan_headers, why_not
from pushrep.records import RecordBatch
from pushrep.records.header import OFFSET_MAX
from pushrep.replay.limits import Span
from pushrep.wire.values import FileSlice

_FIRST_BYTES = 4096  # the header of a large batch, or some small batches whole: what follows live comes in one read
_FILES_MAX = 64


class NoBatchThere(PushrepError):
    """Where offset `position` should be there is no batch's header: the log was cut meanwhile, or is damaged."""

    def __init__(self, position: int, segment: int, why: str) -> None:
        super().__init__(f"segment {segment} holds no batch for offset {position}: {why}")
        self.position, self.segment, self.why = position, segment, why


class OpenSegment:
    """A segment's file, open as long as it is sent from."""

    def __init__(self, file: File) -> None:
        self.file, self._users, self._is_dropped = file, 0, False

    def use(self) -> "OpenSegment":
        """One user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        self._close_if_last()

    def drop(self) -> None:
        """No further reader gets it."""
        self._is_dropped = True
        self._close_if_last()

    def _close_if_last(self) -> None:
        if self._is_dropped and self._users == 0:
            self.file.close()


class OpenSegments:
    """The files that sessions send from, the last ones used kept open. Not thread-safe."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._open: OrderedDict[tuple[Path, int], OpenSegment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, directory: Path, base: int) -> OpenSegment:
        """Raises CorruptBatch if the segment is not the one that was sealed, OSError."""
        found = self.get_again(directory, base)
        cleaned_offset = partial(read_cleaned_offset, directory, self._filesystem)
        hold_against_seal(self._filesystem, directory, base, found.file, cleaned_offset)
        return found

    def get_again(self, directory: Path, base: int) -> OpenSegment:
        """Of what was found by `get` just now. Raises OSError."""
        key = (directory, base)
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = OpenSegment(self._filesystem.open(segment_path(directory, base), writable=False))
            if len(self._open) > _FILES_MAX:
                self._open.popitem(last=False)[1].drop()
        self._open.move_to_end(key)
        return found

    def forget(self, directory: Path) -> None:
        """The log was cut: a file of that name may be another one now."""
        for key in [key for key in self._open if key[0] == directory]:
            self._open.pop(key).drop()

    def close(self) -> None:
        """Let go of all."""
        while self._open:
            self._open.popitem()[1].drop()


class FoundBatch(NamedTuple):
    """A batch and where it lies."""

    span: Span
    segment: int
    position: int
    leader_epoch: int

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.position + self.span.size_bytes


class _Wanted(NamedTuple):
    """What `SliceReader.read` is asked for."""

    position: int
    limit: int
    max_bytes: int
    want_offsets: bool
    written: int


class SliceReader:
    """The batches of one log, in order, by their headers. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, files: OpenSegments) -> None:
        self._directory, self._filesystem, self._files = directory, filesystem, files
        self._next: tuple[int, int, int, int] | None = None  # where the last read ended: offset, segment, byte, epoch
        self._bases: list[int] = []
        self.behind_hole = -1
        """Base offset of the last batch found behind offsets that a cleaner took."""
        self._ask_cleaned_offset = partial(read_cleaned_offset, directory, filesystem)

    @property
    def cleaned_offset(self) -> int:
        """Below it Kafka's cleaner may have left holes; 0 for a log that it never saw."""
        return self._ask_cleaned_offset()

    def forget(self) -> None:
        """The log was cut, or is another process's now."""
        self._next, self._bases = None, []
        self._files.forget(self._directory)

    def read(
        self, position: int, limit: int, max_bytes: int, *, want_offsets: bool, written: int = OFFSET_MAX
    ) -> list[FoundBatch]:
        """The batches that hold offsets in [position, limit), about `max_bytes` of them, one at least.

        written: where the log ended when `limit` was taken: no batch of then ends behind it. Empty if compaction left
        none. Raises NoBatchThere, CorruptBatch for a segment that is not the one that was sealed, OSError,
        CorruptRecordBatch for offsets that can't be read.
        """
        if position >= limit:
            return []
        if self._next is not None and self._next[0] == position:
            _, segment, at, epoch = self._next
            what = self._range(segment, at, position, epoch)
        else:
            what = self.place(position)
        wanted, found = _Wanted(position, limit, max_bytes, want_offsets, written), list[FoundBatch]()
        while True:
            segment = what.base_offset
            try:
                file = self._files.get(self._directory, segment).file
            except CorruptBatch:
                if not found:
                    raise
                self._next = None  # what stands before it goes out first
                return found
            what, is_all = self._collect(wanted, found, file, what)
            expected = found[-1].span.next_offset if found else position
            following = None if is_all else self._following(what, expected)
            if following is not None and following != expected and not ends_clean(file, what):
                following = None  # what stands there is no hole but a batch out of its place
            if following is not None and following >= limit:  # a hole up to there
                is_all, following = True, None
            if following is None:
                if not is_all and not found:
                    raise NoBatchThere(expected, segment, why_not(file, what))
                self._next = (expected, segment, what.position, what.leader_epoch)
                return found
            what = self._range(following, leader_epoch=what.leader_epoch)

    def _collect(self, wanted: _Wanted, found: list[FoundBatch], file: File, what: ScanRange) -> tuple[ScanRange, bool]:
        """Add what is wanted from where `what` begins in its segment; where to go on, and whether that is all."""
        position, limit, max_bytes, want_offsets, written = wanted
        segment, at, due, last_epoch = what.base_offset, what.position, what.first_offset, what.leader_epoch
        size, expected = sum([one.span.size_bytes for one in found]), found[-1].span.next_offset if found else position
        is_all = False
        for byte, base, next_offset, size_bytes, epoch, records, _ in scan_headers(file, what, _FIRST_BYTES):
            if base > expected:
                self.behind_hole = base
            if (base > expected or next_offset > written) and self._is_misplaced(
                segment, expected, base, next_offset, written
            ):
                if not found:
                    raise NoBatchThere(expected, segment, f"a batch there says that it holds [{base}, {next_offset})")
                is_all = True  # what stands before it goes out first
            if is_all or base >= limit:
                is_all = True
                break
            at, due, last_epoch = byte + size_bytes, next_offset, epoch
            if next_offset <= position:
                continue
            offsets = None
            if want_offsets and 0 < records < next_offset - base:
                offsets = _offsets(file, byte, size_bytes)
            found.append(FoundBatch(Span(base, next_offset, size_bytes, records, offsets), segment, byte, epoch))
            size, expected = size + size_bytes, next_offset
            if size >= max_bytes or expected >= limit:
                is_all = True
                break
        return self._range(segment, at, due, last_epoch), is_all  # `replace` takes thrice as long

    def slices(self, found: list[FoundBatch], held: list[OpenSegment]) -> tuple[FileSlice, ...]:
        """Their bytes; neighbours in one piece. Files that are used are added to `held`, each to be released.

        Raises OSError.
        """
        pieces: list[FileSlice] = []
        segment, begin, end = -1, 0, 0
        for one in found:
            if one.segment != segment or one.position != end:
                if end > begin:
                    pieces.append(FileSlice(held[-1].file, begin, end - begin))
                if one.segment != segment:
                    held.append(self._files.get_again(self._directory, one.segment).use())
                    segment = one.segment
                begin = one.position
            end = one.end
        if end > begin:
            pieces.append(FileSlice(held[-1].file, begin, end - begin))
        return tuple(pieces)

    def rewind(self, found: list[FoundBatch], taken: int) -> None:
        """Only the first `taken` of what was read went out: the next read begins behind them."""
        if taken < len(found):
            one, before = found[taken], found[taken - 1]
            self._next = (before.span.next_offset, one.segment, one.position, before.leader_epoch) if taken else None

    def place(self, offset: int) -> ScanRange:
        """From a batch of a segment on that holds `offset`, or lies before it. Raises as `read`."""
        if not self._bases or self._bases[-1] <= offset:
            self._bases = list_segments(self._filesystem, self._directory)
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            raise NoBatchThere(offset, self._bases[0] if self._bases else 0, "no segment begins so early")
        base = self._bases[at]
        file = self._files.get(self._directory, base).file
        return begin_near(self._filesystem, self._directory, file, self._range(base), offset)

    def _range(
        self, segment: int, position: int = 0, next_offset: int | None = None, leader_epoch: int = -1
    ) -> ScanRange:
        at = bisect_right(self._bases, segment)
        end_offset = self._bases[at] if at < len(self._bases) else None
        return ScanRange(
            base_offset=segment,
            position=position,
            next_offset=next_offset,
            end_offset=end_offset,
            leader_epoch=leader_epoch,
            cleaned_offset=self._ask_cleaned_offset,
        )

    def _following(self, what: ScanRange, expected: int) -> int | None:
        """The segment behind this one, if it begins with that offset, or behind a hole that compaction made."""
        base = self._behind(what.base_offset)
        return base if base is not None and (base == expected or what.is_hole(expected, base)) else None

    def _behind(self, segment: int) -> int | None:
        """The base offset of the segment behind this one."""
        if not self._bases or self._bases[-1] <= segment:
            self._bases = list_segments(self._filesystem, self._directory)
        at = bisect_right(self._bases, segment)
        return self._bases[at] if at < len(self._bases) else None

    def _is_misplaced(self, segment: int, expected: int, base: int, next_offset: int, written: int) -> bool:
        """Whether a batch reaches out of its segment, or behind what was written."""
        following = self._behind(segment)
        if following is not None:
            return next_offset > following
        # What was compacted away up to the log's end may have newer batches behind it by now.
        is_behind_a_hole = base > expected and base >= written
        return next_offset > written and not is_behind_a_hole


def _offsets(file: File, position: int, size_bytes: int) -> tuple[int, ...]:
    """Of the records of a batch with holes. Raises CorruptRecordBatch, OSError."""
    return tuple(RecordBatch.check(file.read_at(size_bytes, position)).rows().offsets)
