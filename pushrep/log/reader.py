"""Reading a log by offset, the same for the process that writes it and for every other.

    offset ─ names of the segments ─▶ segment ─ sparse index ─▶ a batch at or before it ─ scan ─▶ whole batches

Only files are read, by position, so reading never waits for an append. An index entry is used only if the batch at its
position is the one that it names; else the segment is scanned from its beginning. Everything below the end of `bounds`
was written whole, so other bytes there, or a batch out of place, are CorruptBatch, and never skipped. So is a sealed
segment that is not the one that was sealed, before any of it is given (seals.py).

    | batch 0-3 | batch 4-7 | batch 8-11 |       a batch that crosses the end of the range waits until that has passed
                     ^ end 6                     it: as a batch, 0-3 is all there is; as records, 0 to 5

`LogReader`: a log read beside its writer, or after it: no lock, no recovery, no writes.

where is the end?     what the writer published      (directory's mapped file, by the same start of the machine)
                      else the checkpoints           min(high watermark, recovery point), or the base of the batch
                                                     that this would cut in two: more is not known
isolation "stable"    min(high watermark, flushed offset): what can never be cut off
          "written"   the log end offset

`LogSlices`: neighbouring batches as a slice of their segment's file, found by their headers, to be sent by sendfile.

    offset ─ segment, sparse index ─▶ header ─▶ header ─▶ ...       until the limit, or enough bytes: walk.py
             | batch | batch | batch |                  one slice: whole batches, none of whose records was read

Each batch has to begin with the offset after the one before; the receiver checks the CRC. Where one does not, there is
no slice, and reading raises the error. For a push, for a topic, and for a replay at a node.
"""

import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from filtering.closing import ClosedAtExit
from pushrep.env import REAL_FILESYSTEM, File, Filesystem
from pushrep.errors import BadArgument, ForkedProcess
from pushrep.log.directory_files import (
    TIME_INDEX_SUFFIX,
    list_segments,
    parse_log_name,
    read_partition_metadata,
    real_log_path,
    refuse_compacted,
    segment_path,
)
from pushrep.log.errors import CorruptBatch, LogClosed, NotALog, OffsetOutOfRange
from pushrep.log.indexes import IndexFile
from pushrep.log.inspection import read_state
from pushrep.log.published import Damaged, LogOffsets, PublishedReader
from pushrep.log.seals import SealChecks
from pushrep.log.segment import TIME_ENTRY, SealedSegment, begin_near, newest_timestamp_ms
from pushrep.log.walk import (
    WINDOW_BYTES,
    CleanEnd,
    Damage,
    ScanEnd,
    ScannedHeader,
    ScanRange,
    ScanStep,
    WholeBatch,
    scan,
    scan_headers,
)
from pushrep.records import BatchHeader, Record, RecordBatch, RecordRows
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


class SlicedFile:
    """A segment's file, closed with its last reference, because nothing reports when sendfile has sent its bytes."""

    __slots__ = ("__weakref__", "_file")

    def __init__(self, file: File) -> None:
        self._file = file

    def read_at(self, size: int, position: int) -> bytes:
        """As a File's."""
        return self._file.read_at(size, position)

    def size(self) -> int:
        """In bytes, now."""
        return self._file.size()

    def fileno(self) -> int:
        """For sendfile; valid as long as this object."""
        return self._file.fileno()

    def __del__(self) -> None:
        with suppress(OSError):
            self._file.close()


class LogSlice(NamedTuple):
    """Batches that lie one behind the other in `file`, the segment of that base offset; one at least."""

    file: SlicedFile
    segment: int
    batches: list[ScannedHeader]

    @property
    def base_offset(self) -> int:
        """Of the first one."""
        return self.batches[0][1]

    @property
    def end_offset(self) -> int:
        """The offset behind the last one."""
        return self.batches[-1][2]

    @property
    def position(self) -> int:
        """The byte where the first one begins."""
        return self.batches[0][0]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return self.batches[-1][0] + self.batches[-1][3] - self.position


class _Place(NamedTuple):
    """A batch's position in a segment, the offset that it has to begin with, the epoch of the batch before it. wanted:
    an offset, if the index is to find the batch: one at or before it.
    """

    base: int
    position: int
    next_offset: int
    leader_epoch: int = -1
    wanted: int | None = None


class LogSlices:
    """Slices of one log, best in order. Not thread-safe. Made by `SegmentLog.slices`; for a log of another process
    without what that says of it.

    bases(fresh): the base offsets of the segments, ascending; None: the directory's. epochs(): which leader epoch
    begins where: checks the batches' own, which no CRC covers. files: the open ones, shared with other LogSlices; a
    file is among them as long as there is a slice of it. seals: shared with whoever opens segments beside this.
    """

    def __init__(  # noqa: PLR0913 - the log, and what others know of it
        self,
        filesystem: Filesystem,
        directory: Path,
        *,
        bases: Callable[[bool], Sequence[int]] | None = None,
        epochs: Callable[[], LeaderEpochs] = LeaderEpochs,
        files: MutableMapping[Path, SlicedFile] | None = None,
        seals: SealChecks | None = None,
    ) -> None:
        self._filesystem, self._directory = filesystem, directory
        self._seals = seals or SealChecks(filesystem, directory)
        self._bases, self._epochs = bases or self._listed, epochs
        self._files = files
        self._known: Sequence[int] = ()
        self._next: _Place | None = None  # where the last slice ended

    def read(self, offset: int, limit: int, max_bytes: int) -> LogSlice | None:
        """The batches with offsets in [offset, limit), from one segment: at most `max_bytes`, but at least one.

        None if a header is out of place, or the segment is not the one that was sealed. limit: the end of a batch,
        below which everything was written. Raises OSError.
        """
        return self._read(self._bases(False), offset, limit, max_bytes) or self._read(
            self._bases(True), offset, limit, max_bytes
        )

    def forget(self) -> None:
        """Forget the files, because the log was cut, or another process writes it now."""
        self._next, self._known = None, ()
        self._seals.forget()
        files = self._files or {}
        for path in [path for path in files if path.parent == self._directory]:
            files.pop(path, None)

    def _read(self, bases: Sequence[int], offset: int, limit: int, max_bytes: int) -> LogSlice | None:
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        segment = bases[at]
        path = segment_path(self._directory, segment)
        file = None if self._files is None else self._files.get(path)
        try:
            file = file or SlicedFile(self._filesystem.open(path, writable=False))
        except FileNotFoundError:  # removed by retention
            return None
        if self._files is not None:
            self._files[path] = file
        if self._seals.contradiction(segment, file) is not None:
            return None
        end_offset = bases[at + 1] if at + 1 < len(bases) else None
        batches = scan_headers(file, self._begun(file, segment, end_offset, offset))
        found = _slice(batches, self._epochs(), offset, limit, max_bytes)
        if not found:
            return None
        position, _, end_offset, size, epoch, _, _ = found[-1]
        self._next = _Place(segment, position + size, end_offset, epoch)
        return LogSlice(file, segment, found)

    def _listed(self, fresh: bool) -> Sequence[int]:  # noqa: FBT001 - a function of one argument
        if fresh or not self._known:
            self._known = list_segments(self._filesystem, self._directory)
        return self._known

    def _begun(self, file: SlicedFile, segment: int, end_offset: int | None, offset: int) -> ScanRange:
        """Where to begin a scan of the segment that finds `offset`."""
        position, epoch, is_next = 0, -1, segment == offset
        if self._next is not None and self._next.next_offset == offset:
            epoch = self._next.leader_epoch
            if self._next.base == segment:
                position, is_next = self._next.position, True
        what = ScanRange(
            base_offset=segment,
            position=position,
            next_offset=offset if is_next else None,
            end_offset=end_offset,
            leader_epoch=epoch,
        )
        return what if is_next else begin_near(self._filesystem, self._directory, file, what, offset)


def _slice(
    batches: Iterator[ScannedHeader], epochs: LeaderEpochs, offset: int, limit: int, max_bytes: int
) -> list[ScannedHeader]:
    """The batches, up to the first one with another leader epoch than in the log's list."""
    holds = next((batch for batch in batches if batch[2] > offset), None)
    if holds is None or holds[1] > offset or holds[1] >= limit:
        return []
    newest, newest_from = epochs.entries[-1] if epochs.entries else (-1, 0)
    begin, first, end_offset, size, epoch, *_ = holds
    if (epoch != newest or first < newest_from) and epochs.contradiction(first, epoch) is not None:
        return []
    found = [holds]
    end, until = begin + size, begin + max_bytes
    if end < until and end_offset < limit:
        for batch in batches:
            _, base, following, size, epoch, _, _ = batch
            if base != end_offset or end + size > until:
                break
            if (epoch != newest or base < newest_from) and epochs.contradiction(base, epoch) is not None:
                break
            found.append(batch)
            end, end_offset = end + size, following
            if end_offset >= limit:
                break
    return found


_PAGE_BYTES = 4096
_FEW, _FEW_BYTES = 1000, 16 << 10
"""For so few offsets less is read at once."""
_HINTS_MAX = 64
_TIME_MAX = (1 << 63) - 1
_LOOKS_MAX = 100  # a writer that publishes all the time must not prevent that damage is reported


class Bounds(NamedTuple):
    """What can be read: offsets in [start, end)."""

    start: int
    end: int


_Found: TypeAlias = tuple[int, int, WholeBatch]
"""A batch, with the base offset of its segment before it and the leader epoch of the batch before."""


class ReadableLog(Protocol):
    """What BatchReader needs of a log; every answer may change between two calls."""

    def bounds(self) -> Bounds:
        """The range that can be read now."""
        ...

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments, ascending. fresh: read the names again."""
        ...

    def revision(self) -> int:
        """A number; if it is the same before and after reading the files, nothing was published meanwhile."""
        ...

    def cuts(self) -> int:
        """A number that changes before records are taken off the log's end."""
        ...

    @property
    def damage(self) -> Damaged | None:
        """Where reading ends with an error, whatever the files hold there."""
        ...


class BatchReader:
    """Whole batches of one log by offset. Thread-safe; holds no file open between calls.

    Everything raises OffsetOutOfRange outside of the range, CorruptBatch at bytes that are no batch, OSError. An
    iterator whose last batch was cut off meanwhile raises OffsetOutOfRange also if the log has grown again: what
    follows would be of another history. The error's `end` is at most that batch's base.
    """

    def __init__(self, filesystem: Filesystem, directory: Path, log: ReadableLog) -> None:
        self._filesystem, self._directory, self._log = filesystem, directory, log
        # Where the last reads ended, so that reading on from there needs no index.
        self._hints: dict[int, _Place] = {}
        self.seals = SealChecks(filesystem, directory)
        """What was compared already; its slices need not be again."""
        # The newest time of sealed segments whose time index was checked against the batches, by the segment's bounds
        # and the entry that was used.
        self._newest_ms: dict[tuple[int, int, tuple[int, int]], int] = {}
        self.ignored_entries = 0
        """How many index entries were wrong and ignored."""
        self.suspect_segments: set[int] = set()
        """Base offsets of the segments whose indexes held such entries."""
        self.on_suspect: Callable[[int], None] = lambda _base: None
        """Called once with each of these base offsets."""
        self.on_damage: Callable[[int], None] = lambda _base: None
        """Called with the base offset of a damaged segment."""

    def read(self, offset: int, max_bytes: int, *, below_start: bool = False) -> bytes:
        """Whole batches of one segment from the one that holds `offset` on, as bytes.

        At most `max_bytes`, but at least one batch; empty at the end of the range, and in a batch that crosses that.
        below_start: also below the log start, as far as files are there.
        """
        bounds = self._checked(offset, None, below_start=below_start)
        if not hasattr(max_bytes, "__index__"):
            raise BadArgument("max_bytes", f"give a number of bytes, not {max_bytes!r}")
        if offset == bounds.end:
            return b""
        parts: list[bytes | bytearray | memoryview] = []
        size, window_bytes = 0, min(WINDOW_BYTES, max(max_bytes, _PAGE_BYTES))
        try:
            for base, _, found in self._walk(offset, bounds.end, window_bytes):
                header = found.batch.header
                is_full = parts and (found.position == 0 or size + header.size_bytes > max_bytes)
                if is_full or header.next_offset > bounds.end:
                    break
                parts.append(found.batch.data)
                size += header.size_bytes
                self._remember(_Place(base, found.end, header.next_offset, header.leader_epoch))
                if size >= max_bytes:
                    break
        except CorruptBatch:
            if not parts:  # else the next read meets it
                raise
        except OffsetOutOfRange:
            if not parts:
                raise
            return self.read(offset, max_bytes, below_start=below_start)  # it was cut meanwhile
        return b"".join(parts)

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch with an offset in [start, end), in order; None: the present end of the range.

        A batch that crosses the end of the range is left out.
        """
        bounds = self._checked(start, end)
        until = bounds.end if end is None else end
        walk = self._walk(start, until, WINDOW_BYTES if until - start > _FEW else _FEW_BYTES)
        return self._up_to(bounds.end, until, walk)

    def _up_to(self, bound: int, end: int, walk: Iterator[_Found]) -> Iterator[RecordBatch]:
        """The batches up to the bound. The place of the one at the end is remembered, for who looks at it again and
        goes on behind it.
        """
        for base, epoch, found in walk:
            header = found.batch.header
            next_offset = header.next_offset
            if next_offset >= end:
                if next_offset > bound:
                    return
                self._remember(
                    _Place(base, found.position, header.base_offset, epoch),
                    _Place(base, found.end, next_offset, header.leader_epoch),
                )
            yield found.batch

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), decoded; control batches hold none."""
        bounds = self._checked(start, end)
        return chain.from_iterable(self._decoded(start, bounds.end if end is None else end))

    def base_of(self, offset: int) -> int:
        """The base offset of the batch that `offset` would cut in two; `offset` itself if there is none."""
        bases = self._log.bases(fresh=False)
        at = bisect_right(bases, offset) - 1
        if at < 0 or bases[at] == offset:
            return offset
        try:
            step = next(self._scan(_Place(bases[at], 0, bases[at], wanted=offset), offset, _PAGE_BYTES), None)
        except CorruptBatch:  # a read there will raise it
            return offset
        return min(offset, step.batch.header.base_offset) if isinstance(step, WholeBatch) else offset

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        if not hasattr(timestamp_ms, "__index__"):
            raise BadArgument("timestamp_ms", f"give whole milliseconds since 1970, not {timestamp_ms!r}")
        return self._found(partial(self._first_since, timestamp_ms))

    def offset_of_largest_timestamp(self) -> int | None:
        """Offset of the first record with the largest time, as Kafka's ListOffsets gives it for the time -3; None if no
        record has a time.
        """
        return self._found(self._of_largest_timestamp)

    def _found(self, search: Callable[[Bounds], int | None]) -> int | None:
        """The result of a search in what can be read now; begun anew if retention or a cut came in between."""
        while True:
            bounds, cuts = self._log.bounds(), self._log.cuts()
            try:
                return search(bounds)
            except OffsetOutOfRange:
                if (self._log.bounds(), self._log.cuts()) == (bounds, cuts):
                    raise

    def _first_since(self, timestamp_ms: int, bounds: Bounds) -> int | None:
        start = self._start_for_timestamp(timestamp_ms, bounds)
        if start is None:
            return None
        for _, _, (_, batch) in self._walk(start, bounds.end, WINDOW_BYTES):
            if batch.header.max_timestamp_ms < timestamp_ms or batch.header.is_control:
                continue
            for record in batch.records():
                if record.timestamp_ms >= timestamp_ms and bounds.start <= record.offset < bounds.end:
                    return record.offset
        return None

    def _of_largest_timestamp(self, bounds: Bounds) -> int | None:
        """The newest time of the segments, then the first record that has it. If that is a record outside of the range,
        or a control batch in a log that a broker wrote, the records alone tell.
        """
        bases = [base for base in self._log.bases(fresh=True) if base < bounds.end]
        newest_ms = -1
        for base, next_base in pairwise([*bases, bounds.end]):
            if next_base > bounds.start:
                newest_ms = max(newest_ms, self._newest_of(base, next_base, bounds, is_sealed=base != bases[-1]))
        found = self._first_since(newest_ms, bounds) if newest_ms >= 0 else None
        if found is None and newest_ms >= 0:
            times = [(one.timestamp_ms, -one.offset) for one in self.records(*bounds) if one.timestamp_ms >= 0]
            found = -max(times)[1] if times else None
        return found

    def _newest_of(self, base: int, next_base: int, bounds: Bounds, *, is_sealed: bool) -> int:
        """The newest time of the segment's batches that hold what can be read, or a later one; -1: none."""
        last = IndexFile(self._filesystem, segment_path(self._directory, base, TIME_INDEX_SUFFIX), TIME_ENTRY).last
        if is_sealed and (newest_ms := self._newest(base, next_base, last, _TIME_MAX)) != _TIME_MAX:
            return newest_ms
        start = base
        if last is not None and base + last[1] < next_base and self._is_true(base, last):
            start = base + last[1]  # no batch before the entry's is newer
        walk = self._walk(max(start, bounds.start), next_base, WINDOW_BYTES)
        return max((batch.header.max_timestamp_ms for _, _, (_, batch) in walk), default=-1)

    def forget(self) -> None:
        """Forget the remembered positions and times: the log was cut."""
        self._hints, self._newest_ms = {}, {}
        self.seals.forget()

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

    def _decoded(self, start: int, end: int) -> Iterator[RecordRows]:
        for _, _, (_, batch) in self._walk(start, end, WINDOW_BYTES):
            if not batch.header.is_control:
                yield batch.rows().between(start, end)

    def _walk(self, start: int, end: int, window_bytes: int) -> Iterator[_Found]:
        """Every batch with an offset in [start, end), over all its segments, up to known damage."""
        damage = self._log.damage
        yield from self._present(start, end if damage is None else min(end, damage.offset), window_bytes)
        if damage is not None and damage.offset < end:
            raise CorruptBatch(*damage)

    def _present(self, start: int, end: int, window_bytes: int) -> Iterator[_Found]:
        """The same, in files without known damage. After a cut it begins anew, if the last batch is still there."""
        last: _Found | None = None
        while True:
            cuts = self._log.cuts()
            for found in self._in_files(start, end, window_bytes):
                if self._log.cuts() != cuts:
                    break
                last = found
                yield found
            else:
                return
            self.forget()
            if last is not None:
                header = last[2].batch.header
                self._check_stands(header)
                start = header.next_offset

    def _in_files(self, start: int, end: int, window_bytes: int) -> Iterator[_Found]:
        """The same, of whatever history the files are.

        After a cut other batches may be in an expected place. So if one does not fit, its place is looked up again in
        the present files before it counts as damage.
        """
        if start >= end:
            return
        looks, revision = 0, self._log.revision()
        place = self._hints.get(start) or self._look_up(start, fresh=False)
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
                yield place.base, epoch, found
                start, looks, epoch = header.next_offset, 0, header.leader_epoch
                if start >= end:
                    return
            following = self._following(place.base, step, start, end)
            if following is None:
                return
            if isinstance(following, _Place):
                place = following._replace(leader_epoch=epoch)
            elif looks and (looks >= _LOOKS_MAX or self._log.revision() == revision):  # nothing was published meanwhile
                raise self._reported(following, place.base)
            else:
                looks, revision = looks + 1, self._log.revision()
                # From the batch before, to compare its epoch: it may be another batch by now.
                before = start - 1 if start > self._log.bounds().start else start
                place, epoch = self._look_up(before, fresh=True), -1

    def _check_stands(self, last: BatchHeader) -> None:
        """Raise OffsetOutOfRange if this batch, which was given, was cut off. One that retention took: all is well."""
        bounds = self._log.bounds()
        if last.base_offset < bounds.start:
            return
        if last.next_offset <= bounds.end:
            at = last.base_offset
            step = next(self._scan(self._look_up(at, fresh=True), at, _PAGE_BYTES), None)
            if isinstance(step, WholeBatch) and step.batch.header == last:
                return
        raise OffsetOutOfRange(last.next_offset, bounds.start, min(last.base_offset, bounds.end))

    def _scan(self, place: _Place, start: int, window_bytes: int) -> Iterator[ScanStep]:
        """Scan the segment from `place` on, without batches that end before `start`. Empty if the file is gone."""
        for step in self._steps(place, window_bytes):
            if not isinstance(step, WholeBatch) or step.batch.header.next_offset > start:
                yield step

    def _steps(self, place: _Place, window_bytes: int) -> Iterator[ScanStep]:
        try:
            file = self._filesystem.open(segment_path(self._directory, place.base), writable=False)
        except FileNotFoundError:
            return
        try:
            if place.wanted is not None:
                place = self._by_index(place.base, file, place.wanted)
            if (why := self.seals.contradiction(place.base, file)) is not None:
                yield Damage(place.position, place.next_offset, why)
                return
            what = ScanRange(
                base_offset=place.base,
                position=place.position,
                next_offset=place.next_offset,
                leader_epoch=place.leader_epoch,
            )
            yield from scan(file, what, window_bytes=window_bytes)
        finally:
            file.close()

    def _reported(self, error: OffsetOutOfRange | CorruptBatch, base: int) -> OffsetOutOfRange | CorruptBatch:
        """`error`, after `on_damage` was called."""
        if isinstance(error, CorruptBatch):
            self.on_damage(base)
        return error

    def _following(
        self, base: int, step: ScanEnd | None, offset: int, end: int
    ) -> _Place | OffsetOutOfRange | CorruptBatch | None:
        """The beginning of the next segment, if this one ended where that begins; else the error to raise.

        None if there is nothing more to read. step: how the scan ended; None if a batch did not fit.
        """
        bases = self._log.bases(fresh=False)
        if bases[-1] <= base:
            bases = self._log.bases(fresh=True)
        at = bisect_right(bases, base)
        if step is not None and step.next_offset >= end:
            return None
        if isinstance(step, CleanEnd) and at < len(bases) and bases[at] == step.next_offset:
            return _Place(bases[at], 0, bases[at])
        bounds = self._log.bounds()
        if step is None or not bounds.start <= offset < bounds.end:  # cut meanwhile
            return OffsetOutOfRange(offset, *bounds)
        if isinstance(step, CleanEnd):
            follows = f"the next one begins at {bases[at]}" if at < len(bases) else "no segment follows"
            reason = f"the segment ends there and {follows}"
        else:
            reason = step.reason
        return CorruptBatch(step.next_offset, segment_path(self._directory, base), step.position, reason)

    def _look_up(self, offset: int, *, fresh: bool) -> _Place:
        """Where to begin a scan that finds `offset`. fresh: by the present names."""
        bases = self._log.bases(fresh=fresh)
        if not bases or not bases[0] <= offset or bases[-1] <= offset:
            bases = self._log.bases(fresh=True)
        at = bisect_right(bases, offset) - 1
        if at < 0:
            raise OffsetOutOfRange(offset, *self._log.bounds())
        return _Place(bases[at], 0, bases[at], wanted=offset)

    def _by_index(self, base: int, file: File, wanted: int) -> _Place:
        what = ScanRange(base_offset=base)
        begun = begin_near(self._filesystem, self._directory, file, what, wanted, self._ignore)
        return _Place(base, begun.position, base if begun.next_offset is None else begun.next_offset)

    def _start_for_timestamp(self, timestamp_ms: int, bounds: Bounds) -> int | None:
        """An offset before which nothing has that time or a later one, by the newest time of each segment."""
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
        """An offset of the segment before which nothing has that time or a later one.

        The lower one by two entries of earlier times: a single damaged entry may lead to a later batch with the same
        time, which the batch itself does not show.
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

        An index that was cut short gives a too early time. So the batches after its last entry are read, too.
        """
        if last is None or last[0] >= enough_ms:
            return enough_ms
        key = (base, next_base, last)
        if key not in self._newest_ms:
            try:
                sealed = SealedSegment(base, next_base, 0)
                self._newest_ms[key] = newest_timestamp_ms(self._filesystem, self._directory, sealed)
            except (CorruptBatch, FileNotFoundError):  # the scan that follows raises it, or finds the new log start
                return enough_ms
        return self._newest_ms[key]

    def _is_true(self, base: int, entry: tuple[int, int]) -> bool:
        """Whether the batch that a time entry names is there, with that time."""
        time_ms, offset = entry[0], base + entry[1]
        step = next(self._scan(_Place(base, 0, base, wanted=offset), offset, _PAGE_BYTES), None)
        if not isinstance(step, WholeBatch):
            return False
        return step.batch.header.base_offset <= offset and step.batch.header.max_timestamp_ms == time_ms

    def _ignore(self, base: int) -> None:
        self.ignored_entries += 1
        if base not in self.suspect_segments:
            self.suspect_segments.add(base)
            self.on_suspect(base)
            _LOG.warning(
                "%s: an index of the segment %d leads to no batch that is its own: ignored", self._directory, base
            )

    def _remember(self, *places: _Place) -> None:
        if len(self._hints) >= _HINTS_MAX:
            self._hints = {}
        self._hints |= {place.next_offset: place for place in places}


Isolation: TypeAlias = Literal["stable", "written"]


class LogReader(ClosedAtExit):
    """Reads a log of any process. Thread-safe; a context manager. Made by `SegmentLog.open_reader`.

    Its offsets are read from the writer's published state each time. After `close` everything raises LogClosed, in a
    fork of the process that opened it ForkedProcess.
    """

    def __init__(
        self, directory: Path | str, *, isolation: Isolation = "stable", filesystem: Filesystem = REAL_FILESYSTEM
    ) -> None:
        """Use `SegmentLog.open_reader`."""
        if isolation not in {"stable", "written"}:
            raise BadArgument("isolation", f'give "stable" or "written", not {isolation!r}')
        self.path = real_log_path(directory)
        self.topic, self.partition = parse_log_name(self.path.name)
        self._filesystem, self._isolation = filesystem, isolation
        try:
            self._bases: Sequence[int] = list_segments(filesystem, self.path)
            refuse_compacted(self.path, filesystem)
        except FileNotFoundError:
            raise NotALog(self.path) from None
        except NotADirectoryError:
            raise NotALog(self.path, "it is a file; a log is a directory") from None
        except PermissionError as error:
            raise NotALog(self.path, "it may not be read by this user") from error
        self._published = PublishedReader(self.path.parent, self.path.name, filesystem)
        self._published_lock = threading.Lock()
        self._reader = BatchReader(filesystem, self.path, self)
        self._owner_pid = os.getpid()
        self._closed = False
        self._whole_end = (0, 0)  # the end by the last checkpoints, and the end of the batches below it
        self.damage: Damaged | None = None  # it is met in the files

    @property
    def log_id(self) -> UUID | None:
        """The id in partition.metadata; None if the file is not there yet."""
        self._check()
        return read_partition_metadata(self.path, self._filesystem)

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read."""
        return self.ends().start

    @property
    def log_end_offset(self) -> int:
        """The offset of the writer's next record, as far as it is known."""
        return self.ends().end

    @property
    def flushed_offset(self) -> int:
        """First offset not known to be on disk."""
        return self.ends().flushed

    @property
    def high_watermark(self) -> int:
        """First offset not yet held by enough replicas."""
        return self.ends().high_watermark

    @property
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset): records below it are never cut off."""
        return self.ends().stable

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Whole batches from the one that holds `offset` on, at most `max_bytes` but at least one.

        Empty at the end of what this isolation reads; a batch that crosses that end is read once it lies below it.
        Raises OffsetOutOfRange, CorruptBatch.
        """
        return self._reader.read(offset, max_bytes)

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch that holds an offset in [start, end), up to what can be read now, as `read`. Raises as `read`."""
        return self._reader.batches(start, end)

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), up to what can be read now, also of a batch that crosses that end. Raises as
        `read`.
        """
        return self._reader.records(start, end)

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        return self._reader.offset_for_timestamp(timestamp_ms)

    def offset_of_largest_timestamp(self) -> int | None:
        """As SegmentLog's, of what this isolation reads."""
        return self._reader.offset_of_largest_timestamp()

    def bounds(self) -> Bounds:
        """[log start, end of what this isolation reads)."""
        ends = self.ends()
        return Bounds(ends.start, max(ends.start, ends.end if self._isolation == "written" else ends.stable))

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments; `fresh` looks into the directory again."""
        if fresh or not self._bases:
            self._bases = list_segments(self._filesystem, self.path)
        return self._bases

    def cuts(self) -> int:
        """How often the writer cut the log, as it publishes it."""
        return self._published.cuts()

    def history(self) -> int:
        """As SegmentLog.history."""
        self._check()
        return self._published.cuts()

    def revision(self) -> int:
        """If it is the same before and after reading the files, the writer published nothing meanwhile."""
        self._check()
        with self._published_lock:
            state = self._published.read()
        return state.sequence if state is not None else 0

    def close(self) -> None:
        """Close it; closing twice is fine."""
        self._closed = True
        if self._published_lock.acquire(blocking=False):  # in a fork its holder may be gone
            try:
                self._published.unmap()
            finally:
                self._published_lock.release()

    def __repr__(self) -> str:
        return f"LogReader({str(self.path)!r}, isolation={self._isolation!r})"

    def ends(self) -> LogOffsets:
        """All offsets at one moment, by one read of the published state."""
        self._check()
        with self._published_lock:
            state = self._published.read()
        if state is not None:
            return state.ends
        bases = self.bases(fresh=True)
        first_base = bases[0] if bases else 0
        known = read_state(self.path, self._filesystem).ends(first_base)
        start = first_base if known is None else known.start
        stable = start if known is None else known.stable
        if self._whole_end[0] != stable:
            self._whole_end = (stable, self._reader.base_of(stable))
        stable = max(start, self._whole_end[1])
        return LogOffsets(start, stable, stable, stable)

    def _check(self) -> None:
        if self._closed:
            raise LogClosed(self.path)
        if os.getpid() != self._owner_pid:
            raise ForkedProcess(f"the reader of {self.path}", owner_pid=self._owner_pid, pid=os.getpid())
