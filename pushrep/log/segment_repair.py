"""The repair of one segment with the batches of another copy: a member's, or one in a directory (repair.py).

    ours       | batch | batch | ?????? | batch | batch |      whole and in place up to the damage, and again after it
    theirs             | batch | batch  | batch |              from our last whole batch on, which they must have, too
    new file   | batch | batch | batch  | batch | batch |      <segment>.log.repair: written, read again, renamed

The other copy's batches are checked: CRC, place, leader epoch (by our log's list), and that they join ours on both
sides. If the new bytes match the segment's seal, that proves all of them, and the seal stays. If they contradict it,
all batches are taken from the other copy and compared with the seal again. Without a matching seal the replaced bytes
are kept as `.corrupt`, the old seal is removed before the rename, and a new one is made.

Order: write, sync, read, keep, (remove the seal), rename, sync the directory, (seal). After a crash either the old,
damaged file or the new one is there; the next opening removes a `.repair`.

Further down: rebuilding a log's indexes and its list of leader epochs from its batches.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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
    segment_path,
)
from pushrep.log.errors import RepairRefused
from pushrep.log.indexes import IndexFile
from pushrep.log.seals import HeadersCrc, Seal, read_seal, remove_seals, write_seal
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY, Segment
from pushrep.log.verify import segment_name
from pushrep.log.walk import CleanEnd, ScanEnd, ScanRange, WholeBatch, scan, scan_vectorised
from pushrep.records import BatchHeader, BatchRun
from pushrep.records.header import split_batches
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


@dataclass(slots=True)
class Hole:
    """A replaced range: offsets [first, end), in our file from byte `position` to `position_end` (None: its end)."""

    position: int
    position_end: int | None
    first_offset: int
    end_offset: int
    reason: str


class SegmentRepair:
    """One repair. Not thread-safe. Ask the other copy for batches from `wanted` on and `add` them, until `is_done`.

    Raises RepairRefused and OSError; call `close` in any case.
    """

    def __init__(  # noqa: PLR0913 - what is known of both copies
        self,
        filesystem: Filesystem,
        log: Path,
        base_offset: int,
        end_offset: int | None,
        *,
        epochs: LeaderEpochs | None,
        log_id: UUID | None,
        on_done: Callable[["SegmentRepair"], None],
        near: BatchHeader | None = None,
        is_newest: bool = False,
        why: str = "",
    ) -> None:
        """end_offset: the next segment's base; of the newest segment where it has to end, None: with the other copy.

        on_done: called with this repair once the new file is complete; it calls `put`. near: our last batch before the
        segment, for a log that nobody writes. why: the reason if there is no file.
        """
        self.base_offset, self.end_offset, self.is_newest = base_offset, end_offset, is_newest
        self.is_done = False
        """Whether the new file is complete, and `on_done` has returned."""
        self.taken_bytes = 0
        """Batches taken from the other copy."""
        self.is_compared = False
        """Whether a batch of ours was the other copy's, too."""
        self.holes: list[Hole] = []
        self._filesystem, self._log, self._log_id, self._on_done = filesystem, log, log_id, on_done
        self._epochs, self._near_before, self._why = epochs, near, why
        self._path = segment_path(log, base_offset)
        self._temp_path = self._path.with_name(self._path.name + REPAIR_SUFFIX)
        self._temp: File | None = None
        self._seal: Seal | None = None
        self.is_proved, self._is_put = False, False
        self._own: File | None = None
        with suppress(FileNotFoundError):
            self._own = filesystem.open(self._path, writable=False)
        try:
            if self._own is not None:
                self._own.drop_cache()  # read from the disk, not the page cache
            self._begin(trusts_own=True)
        except BaseException:
            self.close()
            raise

    @property
    def wanted(self) -> int:
        """The offset from which batches are needed; that of our last whole batch, until it was compared."""
        return self._near.base_offset if self._near is not None else self.next_offset

    @property
    def is_past_own(self) -> bool:
        """Whether our file has no bytes any more where the next batch goes."""
        return self._own is None or self._position >= self._own.size()

    def add(self, data: bytes | memoryview) -> None:
        """Add the other copy's whole batches from `wanted` on.

        Raises RepairRefused if one does not join, is damaged, or is of another history than ours; OSError.
        """
        data, found, trusts_own = memoryview(data), split_batches(data), self.trusts_own
        for at, header in found.placed:
            if self.is_done or self.trusts_own is not trusts_own:
                return
            self.add_batch(header, data[at : at + header.size_bytes])
        if found.why_not is not None and not self.is_done:
            raise RepairRefused(f"what came for offset {self.wanted} is no batch: {found.why_not}")

    def add_batch(self, header: BatchHeader, data: bytes | bytearray | memoryview) -> None:
        """The same for one checked batch; one that ours reach beyond is passed over."""
        if self._near is not None:
            self._compare_near(self._near, header)
        elif header.next_offset > self.next_offset:
            self._take(header, data)

    def finish(self) -> None:
        """The other copy has no more batches for this segment: it ends here. Raises as `add`."""
        self.end_offset, self.holes[-1].position_end = self.next_offset, None
        self._finish()

    def keep_replaced(self) -> list[str]:
        """Keep the bytes that are replaced in `.corrupt` files; returns their names."""
        own, kept = self._own, list[str | None]()
        for hole in self.holes if own is not None else ():
            try:
                assert own is not None
                where = (hole.position, hole.position_end)
                kept.append(keep_range(self._filesystem, self._path, own, *where, suffix=CORRUPT_SUFFIX))
            except OSError as error:  # unreadable sectors: nothing can be kept
                _LOG.warning("%s: bytes from %d on are not kept: %s", self._path, hole.position, error)
        return [name for name in kept if name is not None]

    def put(self) -> None:
        """Rename the new file over the old one, in the order of the file's map. Raises OSError."""
        filesystem = self._filesystem
        if not self.is_proved:
            remove_seals(filesystem, self._log, [self.base_offset])
        filesystem.rename(self._temp_path, self._path)
        self._is_put = True
        filesystem.sync_directory(self._log)
        if self._seal is not None:
            with suppress(OSError):  # on a full disk the scrub makes it later
                write_seal(filesystem, self._log, self._seal)
                filesystem.sync_directory(self._log)

    def close(self) -> None:
        """Close the files; a new file that was not put is removed."""
        for file in (self._own, self._temp):
            if file is not None:
                file.close()
        with suppress(OSError):
            if not self._is_put and self._filesystem.exists(self._temp_path):
                self._filesystem.remove(self._temp_path)

    def _begin(self, *, trusts_own: bool) -> None:
        self.trusts_own = trusts_own
        if self._temp is None:
            self._temp = self._filesystem.open(self._temp_path, create=True)
        self._temp.truncate(0)
        self._position = 0  # end of the whole batches, in both files
        self.next_offset, self._epoch = self.base_offset, -1
        self.last_own = self._near = self._near_before
        self.holes = []
        if trusts_own and self._own is not None:
            self._take_own(self._own)
        else:
            self._open_hole(self._why)

    def _range(self) -> ScanRange:
        """The range to scan in our own file, from the present position on."""
        return ScanRange(
            base_offset=self.base_offset,
            position=self._position,
            next_offset=self.next_offset,
            end_offset=None if self.is_newest else self.end_offset,
            recovery_point=self.end_offset or 0,
            leader_epoch=self._epoch,
            epochs=self._epochs,
        )

    def _take_own(self, own: File) -> None:
        """Take our batches as far as they are whole and in place; finish, if they reach the end."""
        end: ScanEnd | None = None
        with suppress(OSError):  # an unreadable sector is damage
            for step in scan_vectorised(own, self._range()):
                if not isinstance(step, BatchRun):
                    end = step
                    break
                start = int(step.position[0])
                data = own.read_at(step.end - start, start)
                *_, (_, last) = step.headers()
                self._write(data, last)
                self.last_own = self._near = last
        is_clean, reason = isinstance(end, CleanEnd), getattr(end, "reason", f"it ends there, not at {self.end_offset}")
        is_enough = self.is_newest and self.end_offset is not None and self.next_offset >= self.end_offset
        if not is_clean or not (is_enough or self.end_offset in {None, self.next_offset}):
            self._open_hole(reason)  # of a newest segment that reaches far enough: a torn tail
        if is_enough or (is_clean and self.end_offset in {None, self.next_offset}):
            self._finish()

    def _open_hole(self, reason: str) -> None:
        self.holes.append(Hole(self._position, None, self.next_offset, self.next_offset, reason))

    def _compare_near(self, near: BatchHeader, header: BatchHeader) -> None:
        if header.next_offset <= near.base_offset:
            return
        if header != near:
            raise RepairRefused(
                f"it does not join: its batch at offset {header.base_offset} is not ours at {near.base_offset}, the "
                "last whole one before the damage"
            )
        self._near, self.is_compared = None, True

    def _take(self, header: BatchHeader, data: bytes | bytearray | memoryview) -> None:
        """Take one of their batches, then go on with ours if our file has the same batch."""
        base, epoch = header.base_offset, header.leader_epoch
        why = self._range().why_misplaced(self.next_offset, self._epoch, base, header.next_offset, epoch)
        if why is None and self.end_offset is not None and header.next_offset > self.end_offset:
            why = f"offsets up to {header.last_offset} reach into the next segment at {self.end_offset}"
        if why is not None:
            raise RepairRefused(f"it does not join at offset {self.next_offset}: {why}")
        if self.trusts_own and self._own is not None and self._own_stands(self._own, header):
            self.is_compared = True
            self._take_own(self._own)
            if self.is_done or self.next_offset > base or not self.trusts_own:
                return  # else our file can't be read there
        self._write(data, header)
        self.last_own = None
        self.taken_bytes += len(data)
        self.holes[-1].position_end, self.holes[-1].end_offset = self._position, self.next_offset
        if self.next_offset == self.end_offset:
            self.holes[-1].position_end = None
            self._finish()

    def _own_stands(self, own: File, header: BatchHeader) -> bool:
        """Whether our file has this batch, whole, at the present position."""
        what = ScanRange(base_offset=self.base_offset, position=self._position, next_offset=header.base_offset)
        try:
            step = next(scan(own, what, window_bytes=header.size_bytes))
        except OSError:
            return False
        return isinstance(step, WholeBatch) and step.batch.header == header

    def _write(self, data: bytes | bytearray | memoryview, last: BatchHeader) -> None:
        assert self._temp is not None, "it is open until it is done"
        self._temp.write_at(data, self._position)
        self._position += len(data)
        self.next_offset, self._epoch = last.next_offset, last.leader_epoch

    def _finish(self) -> None:
        """The new file is complete: read it, compare it with the seal, and let `on_done` put it over the old one."""
        assert self._temp is not None, "it is open until it is done"
        self._temp.sync()
        self._temp.drop_cache()
        headers = self._read_again(self._temp)
        log_id, found = self._log_id, (self._log, self.base_offset, self.next_offset, self._position)
        kept = read_seal(self._filesystem, self._log, self.base_offset)
        if kept is not None and kept.end_offset == self.end_offset:  # else a file behind it is missing
            why = kept.contradiction(headers.seal(log_id or kept.log_id, *found))
            if why is not None and self.trusts_own:
                self._why = why
                self._begin(trusts_own=False)
                return
            if why is not None:
                raise RepairRefused(f"the other copy's batches are not those that were sealed here: {why}")
            self.is_proved = True
        elif log_id is not None and not self.is_newest:
            self._seal = headers.seal(log_id, *found)
        self._on_done(self)
        self.is_done = True

    def _read_again(self, file: File) -> HeadersCrc:
        headers, end = HeadersCrc(), None
        end_offset = None if self.is_newest else self.end_offset
        what = ScanRange(base_offset=self.base_offset, end_offset=end_offset, recovery_point=self.next_offset)
        for step in scan_vectorised(file, what):
            if isinstance(step, BatchRun):
                headers.add_run(step)
            else:
                end = step
        if not isinstance(end, CleanEnd) or end.position != self._position:
            raise RepairRefused(f"the new file can't be read again: {getattr(end, 'reason', 'it ends early')}")
        return headers


def rebuild_indexes(
    filesystem: Filesystem, log: Path, bases: Sequence[int] | None = None, config: LogConfig | None = None
) -> list[str]:
    """Rebuild the indexes of these segments (None: of all), durably; returns the names of the files.

    The caller holds the log's lock. An index ends at bytes that are no batch. Raises OSError.
    """
    everything, names = list_segments(filesystem, log), []
    for base in everything if bases is None else bases:
        following = next((other for other in everything if other > base), None)
        with closing(Segment(filesystem, log, base, config or LogConfig())) as segment:
            _fill(segment, following)
        names += [segment_name(base, INDEX_SUFFIX), segment_name(base, TIME_INDEX_SUFFIX)]
    if names:
        filesystem.sync_directory(log)
    return names


@contextmanager
def new_indexes(
    filesystem: Filesystem, log: Path, base: int | None, following: int | None, config: LogConfig
) -> Iterator[Callable[[], None]]:
    """Write new indexes of a segment beside the old ones, durably; the yielded function renames them over those, if the
    segment is whole. Without that call they are removed. Raises OSError.
    """
    assert base is not None, "a segment has one"
    pairs = [
        (path.with_name(path.name + REPAIR_SUFFIX), path)
        for path in (segment_path(log, base, suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
    ]
    segment = Segment(filesystem, log, base, config)
    try:
        segment.index = IndexFile(filesystem, pairs[0][0], OFFSET_ENTRY)
        segment.time_index = IndexFile(filesystem, pairs[1][0], TIME_ENTRY)
        is_whole = _fill(segment, following)

        def put() -> None:
            for made, path in pairs if is_whole else ():
                filesystem.rename(made, path)
            filesystem.sync_directory(log)

        yield put
    finally:
        segment.close()
        for made, _ in pairs:
            if filesystem.exists(made):
                filesystem.remove(made)


def _fill(segment: Segment, following: int | None) -> bool:
    """Whether the segment is whole."""
    segment.index.keep(0)
    segment.time_index.keep(0)
    *_, end = segment.walk(0, following)
    segment.index_time()
    segment.sync_indexes()
    return isinstance(end, CleanEnd)


def epochs_of_batches(filesystem: Filesystem, log: Path) -> LeaderEpochs:
    """The leader epochs in the headers of the whole batches."""
    epochs = LeaderEpochs()
    for base in list_segments(filesystem, log):
        with closing(filesystem.open(segment_path(log, base), writable=False)) as file:
            for step in scan(file, ScanRange(base_offset=base)):
                if isinstance(step, WholeBatch):
                    epochs = epochs.assigned(max(0, step.batch.header.leader_epoch), step.batch.header.base_offset)
    return epochs
