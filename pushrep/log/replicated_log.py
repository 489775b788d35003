"""What replication does to a log beside appending and cutting: epochs that begin, a watermark that others move.

    append_as_is     batches that hold their offsets and epochs; a new epoch is on disk before its first batch
                     | 0-8 |  hole that was announced  | 12-14 . 17-19 |    what follows one is sealed in a segment of
                                                                    its own before it is shown
    begin_epoch      a line in the list of epochs, with or without a record of it
    begin_anew       | all of it ......|  ->  .stale      and an empty segment where the leader's log starts
    high watermark   follows nobody but `advance_high_watermark`, from the last one known on

Who decides any of this is in pushrep/replication.
"""

from collections.abc import Sequence
from itertools import groupby

from pushrep.log.config import POSITION_MAX
from pushrep.log.cutting import move_aside
from pushrep.log.directory_files import write_leader_epochs
from pushrep.log.errors import AppendFailed, EpochOutOfPlace, LogEndMoved, append_remedy
from pushrep.log.housekeeping import Housekeeping
from pushrep.log.log_cuts import CuttableLog
from pushrep.log.log_writer import Surroundings
from pushrep.log.recovery import Recovered
from pushrep.log.segment import Segment, size_of_sealed
from pushrep.records import CorruptRecordBatch, RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs

STALE_SUFFIX = ".stale"


class ReplicatedLog(CuttableLog):
    """The one writer of a log. Thread-safe; `begin_anew` while keeping is paused.

    watermark: where the high watermark was; None for a log without replicas.
    """

    def __init__(
        self,
        around: Surroundings,
        recovered: Recovered,
        epochs: LeaderEpochs,
        housekeeping: Housekeeping,
        watermark: int | None = None,
    ) -> None:
        self._watermark = watermark  # before the first word to readers
        super().__init__(around, recovered, epochs, housekeeping)

    def append_as_is(self, batches: Sequence[RecordBatch], cleaned_offset: int = 0) -> None:
        """Write a leader's batches behind the end; below `cleaned_offset` offsets may be missing.

        Raises LogEndMoved if they do not follow, CorruptRecordBatch if their epochs fall, else as `append`.
        """
        expected = self.log_end_offset
        epoch_before = self._epochs.epoch_of(expected - 1)  # of a record: an epoch without one may give way
        dense, behind_hole = len(batches), 0
        for number, batch in enumerate(batches):
            header = batch.header
            if header.base_offset != expected:
                if not expected < header.base_offset <= cleaned_offset:
                    raise LogEndMoved(self._around.view.path, expected=header.base_offset, end=expected)
                dense, behind_hole = min(dense, number), header.base_offset
            if header.leader_epoch < epoch_before:  # the next opening would take it for damage
                raise CorruptRecordBatch(f"leader epoch falls from {epoch_before} to {header.leader_epoch}")
            expected, epoch_before = header.next_offset, header.leader_epoch
        if behind_hole:
            self._admit_holes_below(behind_hole)
        for epoch, of_epoch in groupby(batches[:dense], lambda batch: batch.header.leader_epoch):
            run = list(of_epoch)
            if epoch != self._epochs.latest_epoch:
                self.begin_epoch(epoch, run[0].header.base_offset)
            self.append(run, run[0].header.base_offset)
        if dense < len(batches):
            self._append_with_holes(batches[dense:])

    def _admit_holes_below(self, offset: int) -> None:
        """Durably, before anything behind the hole is written: else an opening would take it for damage."""
        view = self._around.view
        if offset > view.cleaned_offset:
            view.checkpoint(cleaned_offset=offset)
            view.reserve.with_room(view.sync_checkpoints)

    def _append_with_holes(self, batches: Sequence[RecordBatch]) -> None:
        """Batches that offsets are missing before and between: all, or none, in segments of their own.

        These are sealed before anybody is shown what they hold: nothing else witnesses an offset behind a hole inside
        of a segment. Raises as `append`.
        """
        with self._lock:
            self._check_writable()
            self._housekeeping.check_room()
            around, before, size_bytes = self._around, self._epochs, 0
            epochs = before
            for batch in batches:
                epochs = epochs.assigned(batch.header.leader_epoch, batch.header.base_offset)
            self._keep_epochs(epochs)
            self.used = self._changed = True
            segment, mark, bases = self._active, self._active.mark(), self._bases
            try:
                self._roll(batches[0].header.base_offset)
                for batch in batches:
                    header = batch.header
                    is_far = header.last_offset - self._active.base_offset > POSITION_MAX
                    if is_far or not self._active.has_room(header):
                        self._roll(header.base_offset)
                    self._active.append(batch)
                    size_bytes += header.size_bytes
                self._roll()
            except BaseException as error:
                self._take_back(segment, mark, bases, error)
                self._keep_epochs(before)
                if not isinstance(error, OSError):
                    raise
                raise AppendFailed(self._active.path, error, append_remedy(error)) from error
            self._unflushed_bytes += size_bytes
            self.log_end_offset = self._active.next_offset
            self._publish(self.flushed_offset)
        around.view.open_files.opened(self)
        self._keep_promise(self._unflushed_bytes)

    def size_from(self, offset: int) -> int:
        """Bytes of the records from `offset` on, too many by an entry of the index at most. Raises OSError."""
        with self._lock:
            active, bases = self._active, self._bases
            if offset >= active.next_offset:
                return 0
            entry = active.index.floor_now(offset - 1 - active.base_offset) if offset > active.base_offset else None
            in_active = active.size_bytes - (entry[1] if entry is not None else 0)
        if offset >= active.base_offset:
            return in_active
        filesystem, directory = self._around.filesystem, self._around.view.path
        return in_active + size_of_sealed(filesystem, directory, bases[:-1], offset)

    def begin_epoch(self, leader_epoch: int, start_offset: int) -> None:
        """Durably; no news is no write. Raises EpochOutOfPlace, OSError, and nothing has changed then."""
        with self._lock:
            self._check_writable()
            epochs = self._epochs.assigned(leader_epoch, start_offset)
            if epochs is self._epochs:
                return
            around, end = self._around, self.log_end_offset
            newest = self._epochs.epoch_of(end - 1)
            if start_offset != end or leader_epoch < newest:
                raise EpochOutOfPlace(around.view.path, leader_epoch, start_offset, end=end, newest_epoch=newest)
            around.view.reserve.with_room(lambda: write_leader_epochs(around.view.path, epochs, around.filesystem))
            self._epochs = epochs
            self._publish(self.flushed_offset)

    def forget_epochs_above(self, leader_epoch: int) -> None:
        """Durably take newer epochs out of the list. Raises EpochOutOfPlace if one of them holds a record, OSError."""
        with self._lock:
            self._check_writable()
            around, end = self._around, self.log_end_offset
            kept = tuple(entry for entry in self._epochs.entries if entry[0] <= leader_epoch)
            for epoch, start in self._epochs.entries[len(kept) :]:
                if start != end:
                    raise EpochOutOfPlace(around.view.path, epoch, start, end=end, newest_epoch=epoch)
            self._keep_epochs(LeaderEpochs(kept) if len(kept) < len(self._epochs.entries) else self._epochs)
            self._publish(self.flushed_offset)

    def begin_anew(self, offset: int, leader_epoch: int) -> tuple[str, ...]:
        """Set everything aside and start at `offset`; the names of the files.

        Order: derived stores, checkpoints, segments newest first, checkpoints, the new segment, epochs. A crash leaves
        the oldest ones, which open as a shorter log, or none, which opens as an empty one; the leader begins it anew
        again.
        """
        around = self._around
        with self._turn.own(), self._lock:
            self._check_writable()
            around.view.give_up(self.log_end_offset)
            self._housekeeping.about_to_cut(0)
            self._changed = True
            self.cuts += 1
            try:
                # A log that is shorter than its recovery point would be refused: both go down before a file does.
                around.view.checkpoint(recovery_point=0, high_watermark=0)
                around.view.sync_checkpoints()
                around.view.lower_published(0)
                self._active.close()
                kept, _ = move_aside(around.filesystem, around.view.path, self._bases, suffix=STALE_SUFFIX)
                around.view.checkpoint(recovery_point=offset, high_watermark=offset, log_start_offset=offset)
                around.view.sync_checkpoints()
                self._active = Segment.create(around.filesystem, around.view.path, offset, self._config)
                self._bases, self._unflushed_bytes = (offset,), 0
                self.log_start_offset = self.log_end_offset = self.flushed_offset = offset
                if self._watermark is not None:
                    self._watermark = offset
                self._keep_epochs(LeaderEpochs().assigned(leader_epoch, offset))
            except BaseException as error:
                self._poison_by(error)
                raise
            self._publish(self.flushed_offset)
        return tuple(reversed(kept))

    def advance_high_watermark(self, offset: int) -> None:
        """It only rises, and never above the log end."""
        with self._lock:
            self.check_open()
            offset = min(offset, self.log_end_offset)
            if self._watermark is None or offset <= self._watermark:
                return
            self._watermark = offset
            self._changed = True
            self._publish(self.flushed_offset)
        self._keep_promise()
