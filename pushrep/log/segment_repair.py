"""The repair of one sealed segment of an open log, with the batches of another member.

    ours       | batch | batch | ?????? | batch | batch |      whole and in place up to the damage, and again after it
    theirs             | batch | batch  | batch |              from our last whole batch on, which they must have, too
    new file   | batch | batch | batch  | batch | batch |      <segment>.log.repair: written, read again, renamed

The other member's batches are checked: CRC, place, leader epoch (by our log's list), and that they join ours on both
sides. If the new bytes match the segment's seal, that proves all of them, and the seal stays. If they contradict it,
all batches are taken from the other member and compared with the seal again. Without a matching seal the replaced bytes
are kept as `.corrupt`, the old seal is removed before the rename, and a new one is made.

Order: write, sync, read, (remove the seal), rename, sync the directory, (seal). After a crash either the old, damaged
file or the new one is there; the next opening removes a `.repair`.

Further down: rebuilding a log's indexes and its list of leader epochs from its batches.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol
from uuid import UUID

from pushrep.env import File, Filesystem
from pushrep.log.config import LogConfig
from pushrep.log.cut_files import keep_range
from pushrep.log.directory_files import (
    CORRUPT_SUFFIX,
    INDEX_SUFFIX,
    REPAIR_SUFFIX,
    TIME_INDEX_SUFFIX,
    list_segments,
    parse_log_name,
    segment_path,
)
from pushrep.log.errors import RepairRefused
from pushrep.log.indexes import IndexFile
from pushrep.log.seals import HeadersCrc, Seal, read_seal, remove_seals, write_seal
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY, Segment
from pushrep.log.verify import segment_name
from pushrep.log.walk import CleanEnd, ScanRange, WholeBatch, count_in_history, scan, scan_vectorised
from pushrep.records import BatchHeader, BatchRun
from pushrep.records.header import split_batches
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


class RepairedLog(Protocol):
    """What a repair needs of a log's writer."""

    @property
    def path(self) -> Path: ...
    @property
    def log_id(self) -> UUID | None: ...
    @property
    def leader_epochs(self) -> LeaderEpochs: ...
    def replace_sealed(self, base: int, following: int, cuts: int, put: Callable[[], None]) -> bool:
        """`put` the new file there, unless the log was cut meanwhile; whether it was. Raises OSError."""
        ...

    @property
    def cuts(self) -> int:
        """How often it was cut so far."""
        ...


@dataclass(slots=True)
class _Replaced:
    """Replaced bytes of our file: [start, end), None: to its end."""

    start: int
    end: int | None = None


class SegmentRepair:
    """One repair. Not thread-safe. Ask another member for batches from `wanted` on and `add` them, until `is_done`.

    Raises RepairRefused and OSError; call `close` in any case.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        log: RepairedLog,
        base_offset: int,
        end_offset: int,
        on_done: Callable[[], None],
    ) -> None:
        self.base_offset, self.end_offset = base_offset, end_offset
        """The segment's base offset, and the next one's."""
        self.is_done = False
        """Whether the new file has replaced the old one."""
        self.taken_bytes = 0
        """Batches taken from the other member."""
        self._filesystem, self._log, self._cuts, self._on_done = filesystem, log, log.cuts, on_done
        self._path = segment_path(log.path, base_offset)
        self._epochs = log.leader_epochs
        self._own = filesystem.open(self._path, writable=False)
        self._temp_path = self._path.with_name(self._path.name + REPAIR_SUFFIX)
        self._temp: File | None = None
        try:
            self._own.drop_cache()  # read from the disk, not the page cache
            self._begin(trusts_own=True)
        except BaseException:
            self.close()
            raise

    @property
    def wanted(self) -> int:
        """The offset from which batches are needed; that of our last whole batch, until it was compared."""
        return self._near.base_offset if self._near is not None else self._next_offset

    def add(self, data: bytes | memoryview) -> None:
        """Add the other member's whole batches from `wanted` on.

        Raises RepairRefused if one does not join, is damaged, or is of another history than ours; OSError.
        """
        data, found, trusts_own = memoryview(data), split_batches(data), self._trusts_own
        for at, header in found.placed:
            if self.is_done or self._trusts_own is not trusts_own:
                return
            piece = data[at : at + header.size_bytes]
            if self._near is not None:
                self._compare_near(header)
            elif header.next_offset > self._next_offset:
                self._take(header, piece)
        if found.why_not is not None and not self.is_done:
            raise RepairRefused(f"what came for offset {self.wanted} is no batch: {found.why_not}")

    def close(self) -> None:
        """Close the files; a new file that is not finished is removed."""
        self._own.close()
        if self._temp is not None:
            self._temp.close()
            self._forget_temp()

    def _begin(self, *, trusts_own: bool) -> None:
        self._trusts_own = trusts_own
        if self._temp is None:
            self._temp = self._filesystem.open(self._temp_path, create=True)
        self._temp.truncate(0)
        self._position = 0  # end of the whole batches, in both files
        self._next_offset, self._epoch = self.base_offset, -1
        self._near: BatchHeader | None = None
        self._replaced: list[_Replaced] = []
        if trusts_own:
            self._take_own()

    def _range(self) -> ScanRange:
        """The range to scan in our own file, from the present position on."""
        return ScanRange(
            base_offset=self.base_offset,
            position=self._position,
            next_offset=self._next_offset,
            end_offset=self.end_offset,
            recovery_point=self.end_offset,
            leader_epoch=self._epoch,
        )

    def _take_own(self) -> None:
        """Take our batches as far as they are whole and in place; finish, if they reach the end."""
        end, last = None, None
        with suppress(OSError):  # an unreadable sector is damage
            for step in scan_vectorised(self._own, self._range()):
                if not isinstance(step, BatchRun):
                    end = step
                    break
                good = step.first(count_in_history(step, self._epochs))
                if not len(good):
                    break
                start = int(good.position[0])
                data = self._own.read_at(good.end - start, start)
                *_, (_, last) = good.headers()
                self._write(data, last)
                if len(good) < len(step):
                    break
        if isinstance(end, CleanEnd) and self._next_offset == self.end_offset:
            self._finish()
            return
        self._near = last
        self._replaced.append(_Replaced(self._position))

    def _compare_near(self, header: BatchHeader) -> None:
        near = self._near
        assert near is not None, "there is one to compare with"
        if header.next_offset <= near.base_offset:
            return
        if header != near:
            raise RepairRefused(
                f"it does not join: its batch at offset {header.base_offset} is not ours at {near.base_offset}, the "
                "last whole one before the damage"
            )
        self._near = None

    def _take(self, header: BatchHeader, piece: memoryview) -> None:
        """Take one of their batches, then go on with ours if our file has the same batch."""
        what = self._range()
        base, epoch = header.base_offset, header.leader_epoch
        why = what.why_misplaced(self._next_offset, self._epoch, base, header.next_offset, epoch)
        why = why or self._epochs.contradiction(base, epoch)
        if why is None and header.next_offset > self.end_offset:
            why = f"offsets up to {header.last_offset} reach into the next segment at {self.end_offset}"
        if why is not None:
            raise RepairRefused(f"it does not join at offset {self._next_offset}: {why}")
        if self._trusts_own and self._own_stands(header):
            self._replaced[-1].end = self._position
            self._take_own()
            if self.is_done or self._next_offset > base or not self._trusts_own:
                return  # our file can't be read there
        self._write(piece, header)
        self.taken_bytes += len(piece)
        if self._next_offset == self.end_offset:
            self._finish()

    def _own_stands(self, header: BatchHeader) -> bool:
        """Whether our file has this batch, whole, at the present position."""
        what = ScanRange(base_offset=self.base_offset, position=self._position, next_offset=header.base_offset)
        try:
            step = next(scan(self._own, what, window_bytes=header.size_bytes))
        except OSError:
            return False
        return isinstance(step, WholeBatch) and step.batch.header == header

    def _write(self, data: bytes | memoryview, last: BatchHeader) -> None:
        assert self._temp is not None, "it is open until it is done"
        self._temp.write_at(data, self._position)
        self._position += len(data)
        self._next_offset, self._epoch = last.next_offset, last.leader_epoch

    def _finish(self) -> None:
        """The new file is complete: read it, compare it with the seal, rename it over the old one."""
        assert self._temp is not None, "it is open until it is done"
        self._temp.sync()
        self._temp.drop_cache()
        headers = self._read_again(self._temp)
        partition = parse_log_name(self._log.path.name)[1]
        kept = read_seal(self._filesystem, self._log.path, self.base_offset)
        if kept is not None and kept.end_offset != self.end_offset:
            kept = None  # a file behind it is missing, whose offsets this one takes over
        is_proved = kept is not None
        if kept is not None:
            found = (self.base_offset, self._next_offset, self._position)
            why = kept.contradiction(self._log.log_id, partition, *found, headers)
            if why is not None and self._trusts_own:
                self._begin(trusts_own=False)
                return
            if why is not None:
                raise RepairRefused(f"the other member's batches are not those that were sealed here: {why}")
        seal = None
        if not is_proved:
            self._keep_replaced()
            if self._log.log_id is not None:
                seal = Seal(
                    log_id=self._log.log_id,
                    partition=partition,
                    base_offset=self.base_offset,
                    end_offset=self._next_offset,
                    size_bytes=self._position,
                    batches=headers.batches,
                    headers_crc=headers.value,
                )
        self._temp.close()
        try:
            put = partial(self._put, seal, is_proved=is_proved)
            if not self._log.replace_sealed(self.base_offset, self.end_offset, self._cuts, put):
                raise RepairRefused("the log was cut meanwhile, or starts behind it")
        finally:
            self._forget_temp()
        self.is_done = True
        self._on_done()

    def _put(self, seal: Seal | None, *, is_proved: bool) -> None:
        """Rename the new file over the old one, in the order of the file's map."""
        filesystem, directory = self._filesystem, self._log.path
        if not is_proved:
            remove_seals(filesystem, directory, [self.base_offset])
        filesystem.rename(self._temp_path, self._path)
        filesystem.sync_directory(directory)
        if seal is not None:
            with suppress(OSError):  # on a full disk the scrub makes it later
                write_seal(filesystem, directory, seal)
                filesystem.sync_directory(directory)

    def _forget_temp(self) -> None:
        self._temp = None
        with suppress(OSError):
            if self._filesystem.exists(self._temp_path):
                self._filesystem.remove(self._temp_path)

    def _read_again(self, file: File) -> HeadersCrc:
        headers, end = HeadersCrc(), None
        what = ScanRange(base_offset=self.base_offset, end_offset=self.end_offset, recovery_point=self.end_offset)
        for step in scan_vectorised(file, what):
            if isinstance(step, BatchRun):
                headers.add_run(step)
            else:
                end = step
        if not isinstance(end, CleanEnd) or end.position != self._position:
            raise RepairRefused(f"the new file can't be read again: {getattr(end, 'reason', 'it ends early')}")
        return headers

    def _keep_replaced(self) -> None:
        for replaced in self._replaced:
            end = self._own.size() if replaced.end is None else replaced.end
            if replaced.start < end:
                try:
                    keep_range(self._filesystem, self._path, self._own, replaced.start, end, suffix=CORRUPT_SUFFIX)
                except OSError as error:  # unreadable sectors: nothing can be kept
                    _LOG.warning("%s: bytes from %d on are not kept: %s", self._path, replaced.start, error)


def rebuild_indexes(
    filesystem: Filesystem, log: Path, bases: Sequence[int] | None = None, config: LogConfig | None = None
) -> list[str]:
    """Rebuild the indexes of these segments (None: of all), durably; returns the names of the files.

    The caller holds the log's lock. An index ends at bytes that are no batch. Raises OSError.
    """
    everything, names = list_segments(filesystem, log), []
    for base in everything if bases is None else bases:
        following = next((other for other in everything if other > base), None)
        segment = Segment(filesystem, log, base, config or LogConfig())
        try:
            _fill(segment, following)
        finally:
            segment.close()
        names += [segment_name(base, INDEX_SUFFIX), segment_name(base, TIME_INDEX_SUFFIX)]
    if names:
        filesystem.sync_directory(log)
    return names


@contextmanager
def new_indexes(
    filesystem: Filesystem, log: Path, base: int, following: int, config: LogConfig
) -> Iterator[Callable[[], None]]:
    """Write new indexes of a sealed segment beside the old ones, durably; the yielded function renames them over those.
    Without that call they are removed. Raises OSError.
    """
    pairs = [
        (path.with_name(path.name + REPAIR_SUFFIX), path)
        for path in (segment_path(log, base, suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
    ]
    segment = Segment(filesystem, log, base, config)
    try:
        segment.index = IndexFile(filesystem, pairs[0][0], OFFSET_ENTRY)
        segment.time_index = IndexFile(filesystem, pairs[1][0], TIME_ENTRY)
        _fill(segment, following)

        def put() -> None:
            for made, path in pairs:
                filesystem.rename(made, path)
            filesystem.sync_directory(log)

        yield put
    finally:
        segment.close()
        for made, _ in pairs:
            if filesystem.exists(made):
                filesystem.remove(made)


def _fill(segment: Segment, following: int | None) -> None:
    segment.index.keep(0)
    segment.time_index.keep(0)
    for _ in segment.walk(0, following):
        pass
    segment.index_time()
    segment.sync_indexes()


def rebuild_suspect_indexes(filesystem: Filesystem, log: Path, suspects: Collection[int], config: LogConfig) -> None:
    """Rebuild the indexes of the suspects whose batches are whole; a damaged segment keeps its own.

    The caller holds the log's lock and has nothing open. Raises OSError.
    """
    bases = list_segments(filesystem, log)
    for base, following in pairwise([*bases, None]):
        if base is None or base not in suspects:
            continue
        what = ScanRange(base_offset=base, end_offset=following)
        file = filesystem.open(segment_path(log, base), writable=False)
        try:
            *_, end = scan_vectorised(file, what)
        finally:
            file.close()
        if isinstance(end, CleanEnd):
            rebuild_indexes(filesystem, log, [base], config)


def epochs_of_batches(filesystem: Filesystem, log: Path) -> LeaderEpochs:
    """The leader epochs in the headers of the whole batches."""
    epochs = LeaderEpochs()
    for base in list_segments(filesystem, log):
        file = filesystem.open(segment_path(log, base), writable=False)
        try:
            for step in scan(file, ScanRange(base_offset=base)):
                if isinstance(step, WholeBatch):
                    epochs = epochs.assigned(max(0, step.batch.header.leader_epoch), step.batch.header.base_offset)
        finally:
            file.close()
    return epochs
