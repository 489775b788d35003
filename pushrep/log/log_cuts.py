"""The cuts of a log, at both ends: what is truncated, purged or set aside, and in which order.

    truncate_to      | kept ............ | cut ......     derived stores, checkpoints, later segments, this one, epochs
    move_log_start   | gone | kept ..............         log start checkpointed, segments oldest first, epochs
    quarantine       | kept .... | x damaged .....        checkpoints, later segments, the damaged one's tail, epochs

Before either cut of the end is begun, what readers may have seen of it is noted as given up (given_up.py).
A crash between any two steps leaves a log that opens: checkpoints are never above what is left, names stay contiguous,
and what lies below the log start is removed by the next opening.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from pushrep.errors import PushrepError
from pushrep.log.cutting import TailMove, keep_range, move_aside, remove_segments, set_aside
from pushrep.log.directory_files import write_leader_epochs
from pushrep.log.disk_space import RESERVE_BYTES_MIN
from pushrep.log.errors import NoRoomToCut
from pushrep.log.log_writer import LogWriter
from pushrep.log.segment import Segment
from pushrep.log.segment_files import CORRUPT_SUFFIX, list_segments
from pushrep.records.leader_epochs import LeaderEpochs


class CuttableLog(LogWriter):
    """The one writer of a log, with its cuts. Thread-safe; `truncate_to` and `quarantine` while keeping is paused."""

    def truncate_to(self, offset: int, *, keep: bool = False) -> int:
        """Cut at the base of the batch that holds `offset`; where. The caller checked the range. Raises NoRoomToCut.

        keep: what goes is in `.cut` files then, of this segment's tail, too.
        """
        with self._turn.own(), self._lock:
            self._check_writable()
            if offset >= self.log_end_offset:
                return self.log_end_offset
            number = max(i for i, base in enumerate(self._bases) if base <= offset)
            with self._wanting_room():
                self._around.view.give_up(self.log_end_offset)
            self._changed = True
            try:
                at = self._cut(number, offset, keep=keep)
            except PushrepError:  # before anything was changed
                raise
            except BaseException as error:
                self._poison_by(error)
                raise
            self._publish(self.flushed_offset)
            return at

    def move_log_start(self, offset: int) -> tuple[int, ...]:
        """Let the log start at `offset`, or where it does if that is higher; then remove the segments below it.

        The bases of those. The new start is on disk before a file goes. Raises OSError: the next call goes on.
        """
        around = self._around
        with self._lock:
            self._check_writable()
            self.log_start_offset = max(self.log_start_offset, offset)
            self._publish(self.flushed_offset)
            gone = [base for base, next_base in pairwise(self._bases) if next_base <= self.log_start_offset]
        try:
            # The recovery point with it: a log must never end below its start.
            around.view.reserve.with_room(self.checkpoint)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            with self._turn.own(), self._lock:
                self._active.trim()  # what was allocated ahead makes room for the few bytes that free the most
            self.checkpoint()
        remove_segments(around.filesystem, around.view.path, gone)
        with self._lock:
            self._bases = tuple(base for base in self._bases if base not in gone)
            self._keep_epochs(self._epochs.cut_below(self.log_start_offset))
        return tuple(gone)

    def quarantine(self) -> tuple[str, ...]:
        """Set everything from the damage on aside as `.corrupt`; the names of those files. The log takes appends then.

        Order: a copy of the damaged one's tail, checkpoints, later segments newest first, the tail, epochs. Nothing is
        thrown away. On a disk without room for the copy the tail is moved, into `.cut` (cutting.py). Raises
        NoRoomToCut if there is no room even for its first piece; nothing was changed then.
        """
        return self._around.view.reserve.with_room(self._quarantine)

    def _quarantine(self) -> tuple[str, ...]:
        around, damaged_from = self._around, self._report.damaged_from
        if damaged_from is None:
            return ()
        with self._turn.own(), self._lock:
            self.check_open()
            segment = self._active
            position = segment.size_bytes
            tail = set_aside(around.filesystem, segment.path, segment.file, position, suffix=CORRUPT_SUFFIX)
            with self._wanting_room():
                around.view.give_up(around.view.seen_to)
            self._lower_checkpoints(damaged_from)
            self._changed = True
            try:
                # Not only those that the log counts as its own: it ends at the damage.
                later = [base for base in list_segments(around.filesystem, around.view.path) if base > self._bases[-1]]
                kept, _ = move_aside(around.filesystem, around.view.path, later, suffix=CORRUPT_SUFFIX)
                kept += [] if tail is None else [tail.finish() if isinstance(tail, TailMove) else tail]
                around.view.reserve.with_room(lambda: segment.cut(position, damaged_from))
                around.filesystem.sync_directory(around.view.path)
                self._keep_epochs(self._epochs.cut_from(damaged_from))
            except BaseException as error:
                self._poison_by(error)
                raise
            self._report = replace(self._report, damaged_from=None, damage=None)
            return tuple(reversed(kept))

    def _cut(self, number: int, offset: int, *, keep: bool) -> int:
        """Checkpoints, later segments, this one, epochs: a crash between any two leaves a log that opens."""
        around, base = self._around, self._bases[number]
        segment = self._active
        if number + 1 < len(self._bases):
            self._active.close()
            segment = Segment(around.filesystem, around.view.path, base, self._config)
        following = self._bases[number + 1] if number + 1 < len(self._bases) else None
        in_hole = following is not None and following <= around.view.cleaned_offset
        try:
            position, end = segment.locate(offset, may_end_before=in_hole)
            if keep:
                keep_range(around.filesystem, segment.path, segment.file, position)
            self._housekeeping.about_to_cut(end)
            self._lower_checkpoints(min(end, self.flushed_offset), high_watermark=min(end, self.high_watermark))
        except BaseException:
            segment.close()
            raise
        self.cuts += 1
        self.log_end_offset, self.flushed_offset = end, min(end, self.flushed_offset)
        if self._watermark is not None:
            self._watermark = min(end, self._watermark)
        # A start inside of the batch that goes, as `delete_records` leaves it: no log begins above its end.
        self.log_start_offset = min(self.log_start_offset, end)
        # Before the files change: readers take what they then miss for cut, not for corrupt.
        self._publish(self.flushed_offset)
        move_aside(around.filesystem, around.view.path, self._bases[number + 1 :])
        around.view.reserve.with_room(lambda: segment.cut(position, end))
        around.filesystem.sync_directory(around.view.path)
        self._active, self._bases = segment, self._bases[: number + 1]
        self.flushed_offset = end
        self._unflushed_bytes = 0
        around.view.lower_to_end(end)
        # In a log with replicas an epoch that starts at its end stays: what is below may be safe only by that.
        self._keep_epochs(self._epochs.cut_from(end if self._watermark is None else end + 1))
        return end

    def _lower_checkpoints(self, recovery_point: int, high_watermark: int | None = None) -> None:
        view = self._around.view
        view.checkpoint(
            recovery_point=recovery_point,
            high_watermark=min(self.high_watermark, recovery_point) if high_watermark is None else high_watermark,
        )
        with self._wanting_room():
            view.sync_checkpoints()

    @contextmanager
    def _wanting_room(self) -> Iterator[None]:
        """NoRoomToCut if even the reserve has none. A number that some file got by then does no harm: it is lower."""
        try:
            yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise NoRoomToCut(self._around.view.path, RESERVE_BYTES_MIN, error) from error

    def _keep_epochs(self, epochs: LeaderEpochs) -> None:
        if epochs is not self._epochs:
            self._epochs = epochs if epochs.entries else epochs.assigned(0, self.log_end_offset)
            around, kept = self._around, self._epochs
            around.view.reserve.with_room(lambda: write_leader_epochs(around.view.path, kept, around.filesystem))
