"""Reading a log by offset, the same for the process that writes it and for every other.

    offset ─ names of the segments ─▶ segment ─ sparse index ─▶ a batch at or before it ─ scan ─▶ whole batches

Only files are read, by position, so reading never waits for an append. An index is believed only if the batch stands
there that it promises; else the segment is scanned from its beginning. Everything below the end that `bounds` gives was
written whole, so bytes that are no batch there, or one that is not in its place, are CorruptBatch, never skipped.

    | batch 0-3 | batch 4-7 | batch 8-11 |       a batch that crosses the end of the range waits until that has passed
                     ^ end 6                     it: as a batch, 0-3 is all there is; as records, 0 to 5
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.env import Filesystem
from pushrep.errors import BadArgument
from pushrep.log.errors import CorruptBatch, OffsetOutOfRange
from pushrep.log.indexes import IndexFile
from pushrep.log.retention import SealedSegment
from pushrep.log.seal_check import hold_against_seal
from pushrep.log.segment import TIME_ENTRY, begin_near
from pushrep.log.segment_files import TIME_INDEX_SUFFIX, segment_path
from pushrep.log.segment_times import newest_timestamp_ms
from pushrep.log.walk import WINDOW_BYTES, CleanEnd, ScanEnd, ScanRange, ScanStep, WholeBatch, scan
from pushrep.records import Record, RecordBatch, RecordRows

_LOG = logging.getLogger("pushrep.log")

_PAGE_BYTES = 4096
_HINTS_MAX = 64
_LOOKS_MAX = 100  # beside a writer that publishes all the time, what is damaged is to be called so in the end


class Bounds(NamedTuple):
    """What can be read: offsets in [start, end)."""

    start: int
    end: int


class _Place(NamedTuple):
    """A byte in a segment where a batch begins, the offset that it has to begin with, the epoch of the one before."""

    base: int
    position: int
    next_offset: int
    leader_epoch: int = -1


class ReadableLog(Protocol):
    """A log as its reader needs it; every answer may change between two calls."""

    def bounds(self) -> Bounds:
        """The range that can be read now."""
        ...

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments, ascending; `fresh` if what was told before did not suffice."""
        ...

    def cleaned_offset(self) -> int:
        """Below it Kafka's cleaner may have taken offsets; 0 for a log that it never saw."""
        ...

    def revision(self) -> int:
        """The same number before and after a look at the files: nothing was cut meanwhile."""
        ...


class BatchReader:
    """Whole batches of one log by offset. Thread-safe; holds no file open between calls.

    Everything raises OffsetOutOfRange outside of the range, CorruptBatch at bytes that are no batch, OSError.
    """

    def __init__(self, filesystem: Filesystem, directory: Path, log: ReadableLog) -> None:
        self._filesystem, self._directory, self._log = filesystem, directory, log
        # Where the last reads ended: who reads on needs no index.
        self._hints: dict[int, _Place] = {}
        # Of sealed segments whose time index was held against its batches: the newest time, by where they begin and end
        # and by the entry that was believed.
        self._newest_ms: dict[tuple[int, int, tuple[int, int]], int] = {}
        self.ignored_entries = 0
        """So many index entries led to no batch that is theirs."""
        self.suspect_segments: set[int] = set()
        """Base offsets of the segments whose indexes held them."""
        self.on_suspect: Callable[[int], None] | None = None
        """Told of each of these once."""
        self.on_damage: Callable[[int], None] | None = None
        """Told of a segment, by its base offset, whose batches are not what they should be."""

    def read(self, offset: int, max_bytes: int, *, below_start: bool = False) -> bytes:
        """Whole batches from the one that holds `offset` on, in one piece, of one segment.

        At most `max_bytes`, but at least one batch; empty at the end of the range, and in a batch that crosses it.
        below_start: from where the files begin.
        """
        bounds = self._checked(offset, None, below_start=below_start)
        if not hasattr(max_bytes, "__index__"):
            raise BadArgument("max_bytes", f"give a number of bytes, not {max_bytes!r}")
        if offset == bounds.end:
            return b""
        parts: list[bytes | bytearray | memoryview] = []
        size, window_bytes = 0, min(WINDOW_BYTES, max(max_bytes, _PAGE_BYTES))
        for place, batch in self._below(bounds.end, self._walk(offset, bounds.end, window_bytes)):
            header = batch.header
            if parts and (place.position == 0 or size + header.size_bytes > max_bytes):
                break
            parts.append(batch.data)
            size += header.size_bytes
            behind = place.position + header.size_bytes
            self._remember(_Place(place.base, behind, header.next_offset, header.leader_epoch))
            if size >= max_bytes:
                break
        return b"".join(parts)

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch that holds an offset in [start, end), in order; `end` None is the end of the range now.

        But for one that crosses the end of the range.
        """
        bounds = self._checked(start, end)
        walk = self._walk(start, bounds.end if end is None else end, WINDOW_BYTES)
        return (batch for _, batch in self._below(bounds.end, walk))

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), decoded; control batches hold none."""
        bounds = self._checked(start, end)
        return chain.from_iterable(self._decoded(start, bounds.end if end is None else end))

    def base_of(self, offset: int) -> int:
        """Where the batch begins that `offset` would cut in two; `offset` itself if there is none."""
        bases = self._log.bases(fresh=False)
        at = bisect_right(bases, offset) - 1
        if at < 0 or bases[at] == offset:
            return offset
        try:
            step = next(self._scan(self._by_index(bases[at], offset), offset, _PAGE_BYTES), None)
        except CorruptBatch:  # who reads there is told
            return offset
        return min(offset, step.batch.header.base_offset) if isinstance(step, WholeBatch) else offset

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        if not hasattr(timestamp_ms, "__index__"):
            raise BadArgument("timestamp_ms", f"give whole milliseconds since 1970, not {timestamp_ms!r}")
        while True:
            bounds = self._log.bounds()
            try:
                return self._first_since(timestamp_ms, bounds)
            except OffsetOutOfRange:
                if self._log.bounds() == bounds:
                    raise  # else retention or a cut came in between: the answer lies in what is left

    def _first_since(self, timestamp_ms: int, bounds: Bounds) -> int | None:
        start = self._start_for_timestamp(timestamp_ms, bounds)
        if start is None:
            return None
        for _, batch in self._walk(start, bounds.end, WINDOW_BYTES):
            if batch.header.max_timestamp_ms < timestamp_ms or batch.header.is_control:
                continue
            for record in batch.records():
                if record.timestamp_ms >= timestamp_ms and bounds.start <= record.offset < bounds.end:
                    return record.offset
        return None

    def forget(self) -> None:
        """The log was cut: what was remembered of it may not hold."""
        self._hints, self._newest_ms = {}, {}

    def _checked(self, start: int, end: int | None, *, below_start: bool = False) -> Bounds:
        for name, offset in (("start", start), ("end", end)):
            if offset is not None and not hasattr(offset, "__index__"):
                raise BadArgument(name, f"give an offset, not {offset!r}")
        bounds = self._log.bounds()
        if below_start:
            bounds = bounds._replace(start=min([bounds.start, *self._log.bases(fresh=False)]))
        if not bounds.start <= start <= bounds.end:
            raise OffsetOutOfRange(start, *bounds)
        if end is not None and not start <= end <= bounds.end:
            raise OffsetOutOfRange(end, *bounds)
        return bounds

    @staticmethod
    def _below(bound: int, walk: Iterator[tuple[_Place, RecordBatch]]) -> Iterator[tuple[_Place, RecordBatch]]:
        """The batches that end at or below the bound."""
        for found in walk:
            if found[1].header.next_offset > bound:
                return
            yield found

    def _decoded(self, start: int, end: int) -> Iterator[RecordRows]:
        for _, batch in self._walk(start, end, WINDOW_BYTES):
            if not batch.header.is_control:
                yield batch.rows().between(start, end)
            start = batch.header.next_offset  # behind a cut the next batch may begin below what was given

    def _walk(self, start: int, end: int, window_bytes: int) -> Iterator[tuple[_Place, RecordBatch]]:
        """Every batch that holds an offset in [start, end), with its place, over as many segments as it takes.

        A cut may have put other batches where one is expected. So what does not fit is looked up again, in the files
        of now, before it is believed.
        """
        if start >= end:
            return
        looks, revision = 0, self._log.revision()
        place = self._locate(start)
        epoch = place.leader_epoch
        while True:
            step: ScanEnd | None = None
            for found in self._steps(place, window_bytes):
                if not isinstance(found, WholeBatch):
                    step = found
                    break
                header = found.batch.header
                if header.next_offset <= start:
                    epoch = header.leader_epoch
                    continue
                yield _Place(place.base, found.position, header.base_offset), found.batch
                start, looks, epoch = header.next_offset, 0, header.leader_epoch
                if start >= end:
                    return
            following = self._following(place.base, step, start, end)
            if following is None:
                return
            if isinstance(following, _Place):
                place = following._replace(leader_epoch=epoch)
            elif self._settled(looks, revision):
                raise self._told(following, place.base)
            else:
                looks, revision = looks + 1, self._log.revision()
                # From the batch before, which is the witness of the epoch: it may be another one by now.
                before = start - 1 if start > self._log.bounds().start else start
                place, epoch = self._look_up(before, fresh=True), -1

    def _settled(self, looks: int, revision: int) -> bool:
        """Whether a second look at `revision` was undisturbed, so that what it found is so."""
        return looks > 0 and (looks >= _LOOKS_MAX or self._log.revision() == revision)

    def _scan(self, place: _Place, start: int, window_bytes: int) -> Iterator[ScanStep]:
        """The segment's steps from there on, without the batches that end before `start`; none if its file is gone."""
        for step in self._steps(place, window_bytes):
            if not isinstance(step, WholeBatch) or step.batch.header.next_offset > start:
                yield step

    def _steps(self, place: _Place, window_bytes: int) -> Iterator[ScanStep]:
        try:
            file = self._filesystem.open(segment_path(self._directory, place.base), writable=False)
        except FileNotFoundError:
            return
        try:
            try:
                hold_against_seal(self._filesystem, self._directory, place.base, file, self._log.cleaned_offset)
            except CorruptBatch as error:
                raise self._told(error, place.base) from None
            what = self._range(place.base)._replace(
                position=place.position,
                next_offset=place.next_offset,
                leader_epoch=place.leader_epoch,
            )
            yield from scan(file, what, window_bytes=window_bytes)
        finally:
            file.close()

    def _told(self, error: OffsetOutOfRange | CorruptBatch, base: int) -> OffsetOutOfRange | CorruptBatch:
        """`error`, of which `on_damage` has heard."""
        if isinstance(error, CorruptBatch) and self.on_damage is not None:
            self.on_damage(base)
        return error

    def _range(self, base: int) -> ScanRange:
        return ScanRange(base_offset=base, cleaned_offset=self._log.cleaned_offset)

    def _following(
        self, base: int, step: ScanEnd | None, offset: int, end: int
    ) -> _Place | OffsetOutOfRange | CorruptBatch | None:
        """The beginning of the next segment, if this one ended as it should; else what is to be raised.

        None if there is nothing more to read. Without `step`, what was found did not fit.
        """
        bases = self._log.bases(fresh=False)
        if bases[-1] <= base:
            bases = self._log.bases(fresh=True)
        at = bisect_right(bases, base)
        if step is not None and step.next_offset >= end:
            return None  # the last batches were compacted away
        if isinstance(step, CleanEnd) and at < len(bases):
            following = bases[at]
            if following == step.next_offset or self._range(base).is_hole(step.next_offset, following):
                return _Place(following, 0, following)
        bounds = self._log.bounds()
        if step is None or not bounds.start <= offset < bounds.end:  # cut while we read
            return OffsetOutOfRange(offset, *bounds)
        if isinstance(step, CleanEnd):
            follows = f"the next one begins at {bases[at]}" if at < len(bases) else "no segment follows"
            reason = f"the segment ends there and {follows}"
        else:
            reason = step.reason
        return CorruptBatch(step.next_offset, segment_path(self._directory, base), step.position, reason)

    def _locate(self, offset: int) -> _Place:
        """Where to begin a scan that will meet `offset`."""
        return self._hints.get(offset) or self._look_up(offset, fresh=False)

    def _look_up(self, offset: int, *, fresh: bool) -> _Place:
        """As `_locate`, but not by where an earlier read ended; `fresh`: by the names of now."""
        bases = self._log.bases(fresh=fresh)
        if not bases or not bases[0] <= offset or bases[-1] <= offset:
            bases = self._log.bases(fresh=True)
        at = bisect_right(bases, offset) - 1
        if at < 0:
            raise OffsetOutOfRange(offset, *self._log.bounds())
        return self._by_index(bases[at], offset)

    def _by_index(self, base: int, offset: int) -> _Place:
        try:
            file = self._filesystem.open(segment_path(self._directory, base), writable=False)
        except FileNotFoundError:
            return _Place(base, 0, base)
        try:
            begun = begin_near(self._filesystem, self._directory, file, self._range(base), offset, self._ignore)
        finally:
            file.close()
        return _Place(base, begun.position, base if begun.next_offset is None else begun.next_offset)

    def _start_for_timestamp(self, timestamp_ms: int, bounds: Bounds) -> int | None:
        """An offset with nothing of that time or later before it: by the time indexes, newest time of each segment."""
        bases = [base for base in self._log.bases(fresh=True) if base < bounds.end]
        for number, base in enumerate(bases):
            next_base = bases[number + 1] if number + 1 < len(bases) else bounds.end
            if next_base <= bounds.start:
                continue
            path = segment_path(self._directory, base, TIME_INDEX_SUFFIX)
            times = IndexFile(self._filesystem, path, TIME_ENTRY)
            is_sealed = number + 1 < len(bases)
            if is_sealed and self._newest(base, next_base, times.last, timestamp_ms) < timestamp_ms:
                continue
            start = self._believed_start(base, times, timestamp_ms)
            return max(start, bounds.start) if start < bounds.end else max(base, bounds.start)
        return None

    def _believed_start(self, base: int, times: IndexFile, timestamp_ms: int) -> int:
        """An offset of the segment with nothing of that time or later before it.

        By two entries of earlier times, the lower offset: one alone may be rotten and lead to a later batch that has
        the same time, or whose records have it, which nothing at that batch shows.
        """
        starts, before_ms = [], timestamp_ms
        for _ in range(2):
            entry = times.floor(before_ms - 1)
            if entry is None:
                return base
            if not self._is_true(base, entry):
                self._ignore(base)
                return base
            starts.append(base + entry[1])
            before_ms = entry[0]
        return min(starts)

    def _newest(self, base: int, next_base: int, last: tuple[int, int] | None, enough_ms: int) -> int:
        """The newest time in a sealed segment; `enough_ms` if it might be as new as that.

        An index that was cut short says less than there is. So it is believed only as far as the batches behind its
        last entry bear it out.
        """
        if last is None or last[0] >= enough_ms:
            return enough_ms
        key = (base, next_base, last)
        if key not in self._newest_ms:
            try:
                sealed = SealedSegment(base, next_base, 0)
                self._newest_ms[key] = newest_timestamp_ms(self._filesystem, self._directory, sealed)
            except (CorruptBatch, FileNotFoundError):  # the walk that follows says so, or where the log begins now
                return enough_ms
        return self._newest_ms[key]

    def _is_true(self, base: int, entry: tuple[int, int]) -> bool:
        """Whether a batch stands where a time entry says, with its time."""
        time_ms, offset = entry[0], base + entry[1]
        step = next(self._scan(self._by_index(base, offset), offset, _PAGE_BYTES), None)
        if not isinstance(step, WholeBatch):
            return False
        return step.batch.header.base_offset <= offset and step.batch.header.max_timestamp_ms == time_ms

    def _ignore(self, base: int) -> None:
        self.ignored_entries += 1
        if base not in self.suspect_segments:
            self.suspect_segments.add(base)
            if self.on_suspect is not None:
                self.on_suspect(base)
            _LOG.warning(
                "%s: an index of the segment %d leads to no batch that is its own: ignored", self._directory, base
            )

    def _remember(self, place: _Place) -> None:
        if len(self._hints) >= _HINTS_MAX:
            self._hints = {}
        self._hints[place.next_offset] = place
