"""The one writer of a log: appends, rolls and syncs; its cuts; epochs and watermarks of replication.

    append   under _lock: stamp, write, index, publish the new end to readers         [log end offset]
    flush    one thread syncs for all that wait (flush_scheduler.py)                         [flushed offset]
    both     by the thread that syncs, for all that queued a request (flush_scheduler.py)
    flusher  every flush_ms or flush_bytes (flush_scheduler.py): flush, checkpoints     [recovery point]

Lock order: leading (flush_scheduler.py), then _lock. A flush syncs without _lock, so that appends go on; a roll, a cut
and a new epoch sync under it. A segment that is rolled during a flush keeps its descriptor until the flush has ended.
The flushed offset is published before a `flush` returns, so that other processes see it from then on. A failed sync
poisons the log: the kernel may have dropped the pages, and a second sync could succeed over lost data.

Cuts, at both ends, and in which order:

    truncate_to      | kept ............ | cut ......     derived stores, checkpoints, later segments, this one, epochs
    move_log_start   | gone | kept ..............         log start checkpointed, segments oldest first, epochs
    quarantine       | kept .... | x damaged .....        checkpoints, later segments, the damaged one's tail, epochs

Before a cut of the end, the end of what readers may have seen is written to given-up-offset-checkpoint (directory.py).
After a crash between any two steps the log opens: checkpoints are never above the log's end, names stay contiguous, and
the next opening removes segments below the log start.

Replication (pushrep/election decides when these are called):

    append_as_is     batches that hold their offsets and epochs; a new epoch is on disk before its first batch
    begin_epoch      adds an epoch to the list, before or without a record of it
    begin_anew       | all of it ......|  ->  .stale      and an empty segment where the leader's log starts
    high watermark   rises by `advance_high_watermark` alone, from the last one known on
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from threading import get_ident
from typing import NamedTuple
from uuid import UUID

from pushrep.env import Clock, File, Filesystem, file_size
from pushrep.errors import BadArgument, PushrepError
from pushrep.log.config import AppendResult, LogConfig
from pushrep.log.cut_files import (
    TailBackup,
    keep_range,
    move_aside,
    no_room_to_cut,
    put_back,
    quarantine_tail,
    remove_segments,
)
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import CORRUPT_SUFFIX, CleanLog, list_segments, write_leader_epochs
from pushrep.log.disk import RESERVE_BYTES_MIN
from pushrep.log.errors import (
    NO_ROOM,
    AppendFailed,
    FileRemoved,
    LogClosed,
    LogDamaged,
    LogEndMoved,
    LogPoisoned,
    append_remedy,
    is_shortage,
)
from pushrep.log.flush_scheduler import (
    ACKNOWLEDGED_MS,
    SHARE_MS,
    CommitRequest,
    FlushDue,
    FlushScheduler,
    GroupCommitLeader,
    is_injected,
    write_each,
)
from pushrep.log.published import Damaged, Ends, LogOffsets
from pushrep.log.reader import Bounds
from pushrep.log.recovery import Recovered
from pushrep.log.retention import BackgroundTasks
from pushrep.log.seals import Seal, remove_seals, write_seal
from pushrep.log.segment import Segment, SegmentMark, size_of_sealed
from pushrep.records import CorruptRecordBatch, RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


STALE_SUFFIX = ".stale"


@dataclass(frozen=True, slots=True)
class LogContext:
    """What a log needs of its process and its directory."""

    filesystem: Filesystem
    clock: Clock
    view: DirectoryView
    config: LogConfig


class WriterState(NamedTuple):
    """A log's offsets and epochs at one moment. damaged_from: as in SegmentLog."""

    log_start_offset: int
    log_end_offset: int
    flushed_offset: int
    high_watermark: int
    leader_epochs: LeaderEpochs
    damaged_from: int | None


class LoadedLog(NamedTuple):
    """A log as it is on disk: recovered, with its epochs, high watermark, and derived stores that agree with it.

    watermark: None for a log without replicas. is_unlisted: the list of epochs is not on disk yet, and the first append
    writes it before its record.
    """

    recovered: Recovered
    epochs: LeaderEpochs
    watermark: int | None
    is_unlisted: bool


class LogWriter:
    """The only writer of a log's files. Thread-safe. The caller pauses retention for `truncate_to`, `quarantine` and
    `begin_anew`. After `close` appends, cuts and new epochs raise LogClosed; `keep_seal` does nothing.
    """

    def __init__(self, context: LogContext, loaded: LoadedLog, background: BackgroundTasks) -> None:
        self.log_id: UUID = loaded.recovered.log_id
        """The id in partition.metadata."""
        self.path: Path = context.view.path
        """The log's directory."""
        self._ahead_bytes_max, self._wall_ms = context.view.ahead_bytes_max, context.clock.wall_ms
        self._context, self._config, self._background = context, context.config, background
        self._revision = 0
        self.is_closed = self._ended = False
        self._lock = threading.Lock()
        self._leader = GroupCommitLeader()
        self._requests: list[CommitRequest] = []
        self.on_unsealed: Callable[[int], None] | None = None
        """Called under the lock with the base offset of a segment that rolled without a seal."""
        self.on_stopped: Callable[[BaseException], object] = lambda _failure: None
        """Called with the failure that stops the log, perhaps under the lock. It must not wait."""
        self.reopened_after: BaseException | None = None
        """The failure after which the log was reopened last."""
        self._retired: list[Segment] = []
        self.used = True  # for OpenFiles
        self._flush_scheduler = FlushScheduler(self, context.config, context.clock)
        self._begin(loaded)

    def _begin(self, loaded: LoadedLog) -> None:
        recovered, self.leader_epochs, self._watermark, self._is_unlisted = loaded
        report, active = recovered.report, recovered.active
        self._active, self._bases = active, recovered.bases
        active.config = self._config  # perhaps changed while it was recovered
        self.log_start_offset = report.log_start_offset
        # After recovery the whole log is on disk; the readable part of a damaged one is below its recovery point.
        self.log_end_offset = self.flushed_offset = active.next_offset
        self.damage: Damaged | None = None
        if report.damaged_from is not None:
            self.damage = Damaged(report.damaged_from, active.path, active.size_bytes, report.damage or "")
        self.stopped_by: BaseException | None = None
        """The failure after which the log takes nothing until it is opened again."""
        self.is_told = False
        """Whether a caller knows that the log is poisoned."""
        self._unflushed_bytes = 0
        self._has_leftover = self._has_new_names = False  # of a refused append; in the directory, too
        self._changed = active.size_bytes == 0  # else the files have their final form
        if recovered.has_news:
            self._flush_scheduler.schedule()  # write the new recovery point soon
        self._publish(self.flushed_offset)

    def configure(self, config: LogConfig) -> None:
        """Go on with these settings, also in the newest segment."""
        with self._lock:
            self._config = self._active.config = config

    def reopen(self, recover: Callable[[], LoadedLog]) -> None:
        """Go on with what `recover` finds on disk, after a failure has stopped the log; else do nothing.

        recover: recovers the files, as an opening does, and gives what `__init__` takes of it. While it runs, the log
        ends for readers where it is known to be on disk. Raises its errors.
        """
        with self._leader.held(), self._lock:
            self.check_open()
            if self.stopped_by is None:
                return
            if self._has_leftover:
                self._remove_leftover()  # recovery would take it for records
            self._put_back()
            for segment in (*self._retired, self._active):
                segment.close()
            self._retired.clear()
            self._context.view.count_cut()
            end, self.log_end_offset = self.log_end_offset, self.flushed_offset
            self._publish(self.flushed_offset)
            try:
                loaded = recover()
            except BaseException:
                self.log_end_offset = end
                raise
            self.reopened_after = self.stopped_by
            self._begin(loaded)

    @property
    def high_watermark(self) -> int:
        """First offset not yet held by enough replicas; the log end offset without replicas."""
        return self.log_end_offset if self._watermark is None else self._watermark

    @property
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset)."""
        return min(self.high_watermark, self.flushed_offset)

    @property
    def newest_timestamp_ms(self) -> int:
        """The newest time in the newest segment; -1: it has none."""
        return self._active.newest_timestamp_ms

    def state(self) -> WriterState:
        """The offsets and epochs for the rules of leader and follower, which ask with each request."""
        end, watermark = self.log_end_offset, self._watermark
        return WriterState(
            self.log_start_offset,
            end,
            self.flushed_offset,
            end if watermark is None else watermark,
            self.leader_epochs,
            self.damaged_from,
        )

    def ends(self) -> LogOffsets:
        """The log's ends, as they are published to readers in other processes."""
        return LogOffsets(*self._ends(self.flushed_offset))

    def _ends(self, flushed_offset: int) -> Ends:
        # A plain tuple: with each append a LogOffsets would cost as much as packing it.
        end, watermark, damage = self.log_end_offset, self._watermark, self.damage
        if damage is not None:
            view = self._context.view
            end = flushed_offset = max(view.seen_to, view.known_on_disk or 0, end + 1)
            watermark = None if watermark is None else min(end, view.known_watermark)
        return self.log_start_offset, end, flushed_offset, end if watermark is None else watermark, damage

    @property
    def is_writable(self) -> bool:
        """Neither closed nor poisoned nor damaged."""
        return not self.is_closed and self.stopped_by is None and self.damaged_from is None

    @property
    def damaged_from(self) -> int | None:
        """First offset that was on disk and can't be read."""
        return None if self.damage is None else self.damage.offset

    def bounds(self) -> Bounds:
        """What this process can read: up to the log end."""
        return Bounds(self.log_start_offset, self.log_end_offset if self.damage is None else self.ends().end)

    def bases(self, *, fresh: bool) -> Sequence[int]:  # noqa: ARG002 - the writer's answer is always fresh
        """Base offsets of the segments."""
        return self._bases

    def revision(self) -> int:
        """Grows with each publish, also with that of a cut, before its files change."""
        return self._revision

    def cuts(self) -> int:
        """How often the log was cut or begun anew."""
        return self._context.view.cuts

    def append(self, batches: Sequence[RecordBatch], expected: int | None = None) -> AppendResult:
        """Write all batches, or none. Raises AppendFailed, LogPoisoned, LogDamaged, LogEndMoved (see `expected`)."""
        with self._lock:
            self._check_writable()
            # The segment's offset is higher if Ctrl-C came between a write and the assignment below.
            base_offset = self.log_end_offset = self._active.next_offset
            if expected is not None and expected != base_offset:
                raise LogEndMoved(self.path, expected=expected, end=base_offset)
            self._background.check_disk()
            self.used, was_open = True, self._active.is_open
            self._changed = True
            self._unflushed_bytes += self._write(batches)
            self.log_end_offset = self._active.next_offset
            self._publish(self.flushed_offset)
            self._active.write_indexes_if_due()
            result = AppendResult(base_offset, self.log_end_offset - 1)
        if not was_open:
            self._context.view.open_files.opened(self)
        self._flush_now(self._flush_scheduler.on_change(self._unflushed_bytes))
        return result

    def append_together(self, batches: Sequence[RecordBatch]) -> AppendResult:
        """Write all batches, or none; they are on disk when this returns. Raises as `append` and `flush` do.

        If another thread is already syncing, this thread queues its batches and the next leader writes them: one write,
        one sync for all.
        """
        mine, reopened_after = CommitRequest(batches), self.reopened_after
        self._requests.append(mine)
        leader, me = self._leader, get_ident()
        try:
            if not leader.acquire(self._is_answered, mine):
                return self._answer(mine, reopened_after)
            self._write_requests(mine)
            if not self._is_settled(self.log_end_offset):
                self._sync()
        finally:
            if leader.owner == me:  # an assignment, see flush_scheduler.py
                leader.owner = None
                leader.notify()
        self._context.view.open_files.opened(self)
        self._flush_now(self._flush_scheduler.on_acknowledged())
        return self._answer(mine, reopened_after)

    def _answer(self, request: CommitRequest, reopened_after: BaseException | None) -> AppendResult:
        result = request.answer()
        self._check_not_reopened(reopened_after)
        return result

    def _check_not_reopened(self, reopened_after: BaseException | None) -> None:
        """Raise LogPoisoned if the log was reopened since, perhaps without records that were in it before."""
        failure = self.reopened_after
        if failure is not None and failure is not reopened_after:
            raise LogPoisoned(self.path, failure)

    def flush(self, offset: int | None = None) -> None:
        """Everything below `offset` (None: the log end now) is on disk when this returns. Raises LogPoisoned."""
        self.flush_to(self.reopened_after, self.log_end_offset if offset is None else offset)

    def flush_to(self, reopened_after: BaseException | None, wanted: int) -> None:
        """Everything below `wanted` is on disk when this returns. Raises LogPoisoned, also if it was reopened since.

        reopened_after: as it was when `wanted` was known to be in the log.
        """
        leader, me = self._leader, get_ident()
        while True:
            try:
                if not leader.acquire(self._is_settled, wanted):
                    self._check_not_reopened(reopened_after)
                    return
                self._sync()
            finally:
                if leader.owner == me:  # an assignment, see flush_scheduler.py
                    leader.owner = None
                    leader.notify()

    def flush_acknowledged(self, reopened_after: BaseException | None, offset: int) -> None:
        """As `flush`, for a caller that acknowledges the records: the checkpoint follows within a second.

        reopened_after: as it was before they were appended.
        """
        self.flush_to(reopened_after, offset)
        self._flush_now(self._flush_scheduler.on_acknowledged())

    def flush_in_background(self) -> None:
        """The flusher's call: a flush and the checkpoints."""
        try:
            self._flush_scheduler.on_flush()
            self.flush()
            share_ms = min(SHARE_MS, self._config.flush_ms // 4)
            if not self.checkpoint(share_ms):  # another log has just written the files: ours follow with the next write
                self._context.view.sync_checkpoints_soon(share_ms)
            self._background.after_flush()
        except LogPoisoned:
            _LOG.exception("%s takes no appends until it is opened again", self.path)
        except (OSError, PushrepError) as error:  # the log is on disk; its recovery point rises later
            _LOG.warning("%s: checkpoint put off: %s", self.path, error)
            self._flush_scheduler.schedule()

    def checkpoint(self, max_age_ms: int = 0) -> bool:
        """Raise the recovery point to the flushed offset, after syncing the index entries.

        max_age_ms: if the checkpoint files are younger, leave writing them to a later call of any log in the directory.
        False if something is left to be written.
        """
        flushed_offset = self.flushed_offset
        with self._lock:
            segment = self._active
            segment.write_indexes()
        segment.sync_written_indexes()
        view = self._context.view
        with self._lock:
            if self.stopped_by is not None:  # perhaps half cut, so that these offsets may not be those on disk
                raise LogPoisoned(view.path, self.stopped_by)
            offset = min(flushed_offset, self.flushed_offset)  # the log may have been cut meanwhile
            watermark = offset if self._watermark is None else self._watermark
            view.checkpoint(recovery_point=offset, high_watermark=watermark, log_start_offset=self.log_start_offset)
        return view.sync_checkpoints(max_age_ms)

    def close_idle_file(self, *, flush: bool) -> bool:
        """Close the newest segment's file if nothing unflushed is in it; see OpenFiles."""
        if flush:
            try:
                self.flush()
            except PushrepError:
                return False
        leader, me = self._leader, get_ident()
        try:
            if not leader.try_acquire() or not self._lock.acquire(blocking=False):
                return False
            try:
                if self.flushed_offset < self.log_end_offset:
                    return False
                self._active.close()
                return True
            finally:
                self._lock.release()
        finally:
            if leader.owner == me:
                leader.owner = None
                leader.notify()

    def close(self) -> CleanLog | None:
        """Write everything to disk in its final form. None if the log must not count as closed clean.

        Raises LogPoisoned, OSError; descriptors are closed in any case.
        """
        with self._lock:
            self.is_closed = True
        self._flush_scheduler.end()
        try:
            if self.stopped_by is not None and not self.is_told and self.flushed_offset < self.log_end_offset:
                raise LogPoisoned(self.path, self.stopped_by)
            if self.stopped_by is not None or self.damage is not None:
                return None
            if self._has_leftover:
                with self._leader.held(), self._lock:
                    self._remove_leftover()
            self.flush()
            with self._leader.held():
                if self._changed:  # from the reserve, so that index entries fit on a full disk
                    self._check(partial(self._context.view.reserve.call, self._active.finish))
                    self._active.sync()
                self._check(self._active.check_written if self._changed else self._active.check_file)
            # Also for a log that only recovery changed, whose checkpoints are older than the kill. Ten thousand logs
            # that close share a few writes; the directory writes the last ones.
            self.checkpoint(min(ACKNOWLEDGED_MS, self._config.flush_ms))
            return CleanLog(self.log_end_offset, self._active.size_bytes, self.leader_epochs.latest_epoch)
        finally:
            self._ended = True
            self._leader.notify()
            with suppress(OSError):
                self._put_back()
            self._active.close()
            self._context.view.open_files.forget(self)

    def sealed(self) -> list[tuple[int, int]]:
        """(base, base of the next one) of every segment but the newest."""
        return list(pairwise(self._bases))

    def _kept(self) -> dict[int, int]:
        """The segments of `sealed` above the log start; others may be removed without the lock."""
        return {base: following for base, following in self.sealed() if following > self.log_start_offset}

    def keep_seal(self, seal: Seal, cuts: int) -> bool:
        """Write a seal that the scrub has made, unless the log was cut since `cuts`. Raises OSError."""
        context = self._context
        with self._lock:
            is_same = cuts == self.cuts() and self._kept().get(seal.base_offset) == seal.end_offset
            if not self.is_writable or not is_same:
                return False
            write_seal(context.filesystem, self.path, seal)
            context.filesystem.sync_directory(self.path)
            return True

    def replace_sealed(self, base: int, following: int, cuts: int, put: Callable[[], None]) -> bool:
        """Call `put`, which renames a file over a sealed segment's, unless the log was cut since `cuts` or the segment
        is about to be removed.

        Whether it was called. Raises LogClosed, LogPoisoned, LogDamaged, OSError.
        """
        with self._lock:
            self._check_writable()
            if cuts != self.cuts() or self._kept().get(base) != following:
                return False
            put()
            self._publish(self.flushed_offset)
            return True

    def check_open(self) -> None:
        """Raise LogClosed after `close`."""
        if self.is_closed:
            raise LogClosed(self.path)

    def _check_writable(self) -> None:
        path, damage = self.path, self.damage
        if self.is_closed:
            raise LogClosed(path)
        if self.stopped_by is not None:
            raise LogPoisoned(path, self.stopped_by) from self.stopped_by
        if damage is not None:
            raise LogDamaged(path, damage.offset, damage.reason)
        if self._has_leftover:
            self._remove_leftover()

    def _write_requests(self, mine: CommitRequest) -> None:
        """Write all present requests: at once or, if that fails, one by one. An exception that was injected into this
        thread is raised here alone: the next leader writes what is not written, without `mine`.
        """
        with self._lock:
            self.used = self._changed = True
            requests, begun = self._requests[:], self._active.next_offset
            try:
                del self._requests[: len(requests)]  # others may have been added meanwhile
                write_each(requests, self._write_all)
            except BaseException:
                for one in requests:
                    one.take_over(begun, self._active.next_offset)
                again = [one for one in requests if one is not mine and one.is_open and one not in self._requests]
                self._requests[:0] = again
                raise
            finally:
                if self.stopped_by is None:  # the segment's offset is higher if an exception came behind the write
                    self.log_end_offset = self._active.next_offset
                self._publish(self.flushed_offset)
            self._active.write_indexes_if_due()

    def _write_all(self, batches: Sequence[RecordBatch]) -> None:
        """Write all batches or none; the caller holds _lock."""
        self._check_writable()
        self._background.check_disk()
        self._unflushed_bytes += self._write(batches)
        self.log_end_offset = self._active.next_offset

    def _write(self, batches: Sequence[RecordBatch], *, roll: bool = False) -> int:
        """Write all batches or none; returns their bytes. The caller holds _lock. roll: into a new segment."""
        segment, bases, size_bytes = self._active, self._bases, 0
        epoch, offset, mark = self.leader_epochs.latest_epoch, segment.next_offset, segment.mark()
        segment.ahead_bytes_max, segment.wall_ms = self._ahead_bytes_max, self._wall_ms
        try:
            if not self._unflushed_bytes:  # once for all that the next sync, which looks again, brings to disk
                segment.check_file()
            if self._is_unlisted:
                self._write_epochs(self.leader_epochs)
            if roll:
                self._roll()
            for batch in batches:
                batch.stamp(offset, epoch)
                if not self._active.has_room(batch.header):
                    self._roll()
                self._active.append(batch)
                offset = batch.header.next_offset
                size_bytes += len(batch.data)
            self._active.write()
        except BaseException as error:
            if isinstance(error, FileRemoved):
                self._poison_by(error)
            if self.stopped_by is not None:
                raise LogPoisoned(self.path, self.stopped_by) from error
            self._take_back(segment, mark, bases)
            if not isinstance(error, OSError) or is_injected(error):
                raise
            raise AppendFailed(self._active.path, error, append_remedy(error)) from error
        return size_bytes

    def roll(self) -> None:
        """Begin a new segment, so that the newest one counts as old; for retention. Raises as `append`."""
        with self._lock:
            self._check_writable()
            self._write((), roll=True)
            self._publish(self.flushed_offset)

    def _take_back(self, segment: Segment, mark: SegmentMark, bases: tuple[int, ...]) -> None:
        """Undo a failed append: remove the segments that it began, and cut the one in which it began.

        In memory at once; on disk here or, where the system refuses that, too, before the next change of the log.
        """
        try:
            self._has_leftover = True
            if self._active is not segment:
                self._has_new_names = True
                self._active.close()
            self._active, self._bases = segment, bases
            segment.rewind(mark)
            self._remove_leftover()
        except AppendFailed as error:
            _LOG.warning("%s: what the refused append left is removed before the next one", error)
        except BaseException as error:
            self._poison_by(error)
            raise

    def _remove_leftover(self) -> None:
        """Take off the disk what a refused append has left behind the log's end. The file that it began in is open as a
        rule, so that this needs no descriptor. Raises AppendFailed if the system is short of something: the next call
        tries again. Any other failure poisons the log.
        """
        filesystem, path = self._context.filesystem, self.path
        try:
            if self._has_new_names:
                # Listed from disk: an interrupted thread may have made a segment that is not in `_bases` yet.
                begun = [base for base in list_segments(filesystem, path) if base > self._bases[-1]]
                move_aside(filesystem, path, begun, keep=False)
                remove_seals(filesystem, path, [self._bases[-1]])
                filesystem.sync_directory(path)  # also for names that an earlier try removed
            self._active.cut_back()
        except BaseException as error:
            if isinstance(error, OSError) and is_shortage(error):
                raise AppendFailed(self._active.path, error, append_remedy(error)) from error
            self._poison_by(error)
            raise
        self._sync_file(self._active.file)  # else a power cut could bring refused records back
        self._has_leftover = self._has_new_names = False

    def _sync_file(self, file: File) -> None:
        """Sync the segment's file; a failure poisons the log, whatever it is."""
        try:
            self._context.view.disk.timed(file.sync)
        except OSError as error:
            if is_injected(error):
                raise
            self._poison_by(error)

    def _check(self, check: Callable[[], None]) -> None:
        """Call a check of the newest segment's file; if that is not the log's own any more, the log is poisoned."""
        try:
            check()
        except FileRemoved as error:
            self._poison_by(error)

    def _put_back(self) -> None:
        """If the newest file's name was taken from it, write it there again: nothing of it is lost while it is open.
        Raises OSError.
        """
        segment, filesystem = self._active, self._context.filesystem
        file = segment.lost_file if isinstance(self.stopped_by, FileRemoved) else None
        if file is not None and filesystem.exists(self.path) and not file_size(filesystem, segment.path):
            _LOG.warning("%s was removed by another program: it is written there again", segment.path)
            put_back(filesystem, segment.path, file)

    def _poison_by(self, error: BaseException) -> None:
        """A failed sync, a change that was left half done, or a file that is another: the log has to be opened again.
        Raises LogPoisoned for an OSError and for FileRemoved.
        """
        if self.stopped_by is None:
            self.stopped_by = error
            self.on_stopped(error)
        if isinstance(error, OSError | FileRemoved):
            raise LogPoisoned(self.path, error) from error

    def _roll(self) -> None:
        """Close the newest segment and begin the next. The old one is on disk before the new name is."""
        old, view = self._active, self._context.view
        old.write()
        old.finish()
        self._sync_file(old.file)
        old.check_written()
        old.sync_written_indexes()
        self._has_new_names = True  # until the new segment is there
        is_sealed = self._seal(old)
        new = Segment.create(self._context.filesystem, view.path, old.next_offset, self._config)
        new.ahead_bytes_max, new.wall_ms = old.ahead_bytes_max, old.wall_ms
        self._active, self._bases = new, (*self._bases, new.base_offset)
        self._has_new_names = False
        self._background.rolled()
        # Not the new base: the append under way may be undone, together with its batches in the old segment.
        end = self.log_end_offset
        view.checkpoint(
            recovery_point=end,
            high_watermark=min(self.high_watermark, end),
            log_start_offset=self.log_start_offset,
        )
        view.sync_checkpoints_soon()
        if not self._leader.do_unless_held(old.close):
            self._retired.append(old)
        if not is_sealed and self.on_unsealed is not None:
            self.on_unsealed(old.base_offset)

    def _seal(self, segment: Segment) -> bool:
        """Write the segment's seal; whether it has one. Its name is synced with the next segment's.

        For a segment that was reopened with records in it, and on a full disk, the scrub makes it later.
        """
        context = self._context
        seal = segment.seal(self.log_id)
        if seal is None:
            return False
        try:
            write_seal(context.filesystem, self.path, seal)
        except OSError:
            return False
        return True

    def _sync(self) -> None:
        """Sync everything that is in the log now. Only the leader calls it."""
        with self._lock:
            target, segment, size = self.log_end_offset, self._active, self._unflushed_bytes
            file = segment.file
        self._sync_file(file)
        with self._lock:
            try:
                # Else a roll has checked it, or what a refused append has left is behind its end.
                if segment is self._active and not self._has_leftover:
                    self._check(segment.check_file)
            except OSError as error:
                self._poison_by(error)
            self._unflushed_bytes -= size
            flushed_offset = max(self.flushed_offset, target)
            self._publish(flushed_offset)
            self.flushed_offset = flushed_offset  # from here on waiting threads may return
            for old in self._retired:
                if old is not self._active:
                    old.close()
            self._retired.clear()

    def _publish(self, flushed_offset: int) -> None:
        self._revision += 1
        self._context.view.publish(self._ends(flushed_offset), self.leader_epochs.latest_epoch)

    def _is_settled(self, wanted: int) -> bool:
        """Whether `wanted` is flushed or cut off. Raises LogPoisoned, LogClosed if it never will be."""
        if self.flushed_offset >= min(wanted, self.log_end_offset):
            return True
        if self.stopped_by is not None:
            raise LogPoisoned(self.path, self.stopped_by) from self.stopped_by
        if self._ended:
            raise LogClosed(self.path)
        return False

    def _is_answered(self, request: CommitRequest) -> bool:
        """Whether `request` failed or is on disk. Raises if neither will ever be."""
        if request.result is not None:
            return self._is_settled(request.result.last_offset + 1)
        if request.error is None and self._ended:
            raise LogClosed(self.path)
        return request.error is not None

    def _flush_now(self, due: FlushDue) -> None:
        if due is FlushDue.NOTHING:
            return
        self.flush()
        if due is FlushDue.FLUSH_AND_CHECKPOINT:
            self.checkpoint()
            self._background.after_flush()

    # ---- cuts

    def truncate_to(self, offset: int, *, keep: bool = False) -> int:
        """Cut at the base of the batch that holds `offset`, and return that base. The caller has checked the range.

        keep: keep this segment's tail and each later segment in `.cut` files; else all of it is erased. Raises
        NoRoomToCut.
        """
        with self._leader.held(), self._lock:
            self._check_writable()
            if offset >= self.log_end_offset:
                return self.log_end_offset
            number = max(i for i, base in enumerate(self._bases) if base <= offset)
            with no_room_to_cut(self.path, RESERVE_BYTES_MIN):
                self._context.view.give_up(self.log_end_offset)
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
        """Raise the log start to `offset`, then remove the segments below it. Returns their bases.

        The new start is on disk before a file is removed. Raises OSError; the next call goes on.
        """
        context = self._context
        with self._lock:
            self._check_writable()
            self.log_start_offset = max(self.log_start_offset, offset)
            self._publish(self.flushed_offset)
            gone = [base for base, next_base in pairwise(self._bases) if next_base <= self.log_start_offset]
        try:
            # The recovery point with it: a log must never end below its start.
            context.view.reserve.call(self.checkpoint)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            with self._leader.held(), self._lock:
                self._active.trim()  # frees space for the checkpoint, which frees segments
            self.checkpoint()
        remove_segments(context.filesystem, self.path, gone)
        with self._lock:
            self._bases = tuple(base for base in self._bases if base not in gone)
            self._keep_epochs(self.leader_epochs.cut_below(self.log_start_offset))
        return tuple(gone)

    def quarantine(self) -> tuple[str, ...]:
        """Move everything from the damage on to `.corrupt` files; returns their names.

        The log takes appends afterwards. Order: a copy of the damaged segment's tail, checkpoints, later segments
        newest first, the tail, epochs. Nothing is deleted. On a full disk the tail is moved into `.cut` instead
        (cut_files.py). Raises NoRoomToCut if not even its first piece fits; then nothing was changed.
        """
        return self._context.view.reserve.call(self._quarantine)

    def _quarantine(self) -> tuple[str, ...]:
        context, damaged_from = self._context, self.damaged_from
        if damaged_from is None:
            return ()
        with self._leader.held(), self._lock:
            self.check_open()
            segment = self._active
            position = segment.size_bytes
            tail = quarantine_tail(context.filesystem, segment.path, segment.file, position, suffix=CORRUPT_SUFFIX)
            with no_room_to_cut(self.path, RESERVE_BYTES_MIN):
                context.view.give_up(context.view.seen_to)
            self._lower_checkpoints(damaged_from)
            context.view.lower_published(damaged_from)
            self._changed = True
            try:
                # From disk: the log, which ends at the damage, does not list them.
                later = [base for base in list_segments(context.filesystem, self.path) if base > self._bases[-1]]
                kept, _ = move_aside(context.filesystem, self.path, later, suffix=CORRUPT_SUFFIX)
                kept += [] if tail is None else [tail.finish() if isinstance(tail, TailBackup) else tail]
                context.view.reserve.call(lambda: segment.cut(position, damaged_from))
                context.filesystem.sync_directory(self.path)
                self._keep_epochs(self.leader_epochs.cut_from(damaged_from))
            except BaseException as error:
                self._poison_by(error)
                raise
            self.damage = None
            return tuple(reversed(kept))

    def _cut(self, number: int, offset: int, *, keep: bool) -> int:
        """Checkpoints, later segments, this one, epochs: a crash between any two leaves a log that opens."""
        context, base = self._context, self._bases[number]
        segment = self._active
        if number + 1 < len(self._bases):
            self._active.close()
            segment = Segment(context.filesystem, self.path, base, self._config)
        try:
            position, end = segment.locate(offset)
            if keep:
                keep_range(context.filesystem, segment.path, segment.file, position)
            self._background.about_to_cut(end)
            self._lower_checkpoints(min(end, self.flushed_offset), high_watermark=min(end, self.high_watermark))
        except BaseException:
            segment.close()
            raise
        context.view.count_cut()
        self.log_end_offset, self.flushed_offset = end, min(end, self.flushed_offset)
        if self._watermark is not None:
            self._watermark = min(end, self._watermark)
        # A start inside of the batch that is cut, as after `delete_records`: a log never begins above its end.
        self.log_start_offset = min(self.log_start_offset, end)
        # Before the files change, so that readers take missing bytes for cut, not for corrupt.
        self._publish(self.flushed_offset)
        move_aside(context.filesystem, self.path, self._bases[number + 1 :], keep=keep)
        context.view.reserve.call(lambda: segment.cut(position, end))
        context.filesystem.sync_directory(self.path)
        self._active, self._bases = segment, self._bases[: number + 1]
        self.flushed_offset = end
        self._unflushed_bytes = 0
        context.view.lower_to_end(end)
        # With replicas an epoch that starts at the log's end stays: records below it may be safe only because of it.
        self._keep_epochs(self.leader_epochs.cut_from(end if self._watermark is None else end + 1))
        return end

    def _lower_checkpoints(self, recovery_point: int, high_watermark: int | None = None) -> None:
        view = self._context.view
        view.checkpoint(
            recovery_point=recovery_point,
            high_watermark=min(self.high_watermark, recovery_point) if high_watermark is None else high_watermark,
        )
        with no_room_to_cut(self.path, RESERVE_BYTES_MIN):
            view.sync_checkpoints()  # on a full disk those written before do no harm: they are lower

    def _keep_epochs(self, epochs: LeaderEpochs) -> None:
        if epochs is not self.leader_epochs:
            self.leader_epochs = epochs if epochs.entries else epochs.assigned(0, self.log_end_offset)
            self._write_epochs(self.leader_epochs)

    def _write_epochs(self, epochs: LeaderEpochs) -> None:
        context = self._context
        context.view.reserve.call(lambda: write_leader_epochs(self.path, epochs, context.filesystem))
        self._is_unlisted = False

    # ---- what replication does

    def append_as_is(self, batches: Sequence[RecordBatch]) -> None:
        """Append a leader's batches.

        Raises LogEndMoved if they do not follow, CorruptRecordBatch if their epochs fall, else as `append`.
        """
        expected = self.log_end_offset
        # The last record's epoch: an epoch without a record may be replaced.
        epoch_before = self.leader_epochs.epoch_of(expected - 1)
        for batch in batches:
            header = batch.header
            if header.base_offset != expected:
                raise LogEndMoved(self.path, expected=header.base_offset, end=expected)
            if header.leader_epoch < epoch_before:  # the next opening would report damage
                raise CorruptRecordBatch(f"leader epoch falls from {epoch_before} to {header.leader_epoch}")
            expected, epoch_before = header.next_offset, header.leader_epoch
        for epoch, of_epoch in groupby(batches, lambda batch: batch.header.leader_epoch):
            run = list(of_epoch)
            if epoch != self.leader_epochs.latest_epoch:
                self.begin_epoch(epoch, run[0].header.base_offset)
            self.append(run, run[0].header.base_offset)

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
        filesystem, directory = self._context.filesystem, self.path
        return in_active + size_of_sealed(filesystem, directory, bases[:-1], offset)

    def begin_epoch(self, leader_epoch: int, start_offset: int) -> None:
        """See SegmentLog.begin_epoch; writes nothing if the list has it. After an error nothing has changed."""
        with self.beginning_epoch(leader_epoch, start_offset) as epochs:
            if epochs is not None:
                self._write_epochs(epochs)

    @contextmanager
    def beginning_epoch(self, leader_epoch: int, start_offset: int) -> Iterator[LeaderEpochs | None]:
        """A context with the new list of epochs, for the caller to write; at its end the log takes it over. _lock is
        held meanwhile. None: the log has the epoch. Raises as `begin_epoch`.
        """
        with self._lock:
            self._check_writable()
            epochs = self.leader_epochs.assigned(leader_epoch, start_offset)
            if epochs is self.leader_epochs:
                yield None
                return
            path, end = self.path, self.log_end_offset
            newest = self.leader_epochs.epoch_of(end - 1)
            if start_offset != end or leader_epoch < newest:
                why = f"can't begin at {start_offset}: {path} ends at {end}, with a record of {newest}"
                raise BadArgument("start_offset", f"epoch {leader_epoch} {why}")
            yield epochs
            self.leader_epochs, self._is_unlisted = epochs, False
            self._publish(self.flushed_offset)

    def forget_epochs_above(self, leader_epoch: int) -> None:
        """See SegmentLog.forget_epochs_above."""
        with self._lock:
            self._check_writable()
            end = self.log_end_offset
            kept = tuple(entry for entry in self.leader_epochs.entries if entry[0] <= leader_epoch)
            for epoch, start in self.leader_epochs.entries[len(kept) :]:
                if start != end:
                    raise BadArgument("leader_epoch", f"{self.path} has records of epoch {epoch}")
            self._keep_epochs(LeaderEpochs(kept) if len(kept) < len(self.leader_epochs.entries) else self.leader_epochs)
            self._publish(self.flushed_offset)

    def begin_anew(self, offset: int, leader_epoch: int) -> tuple[str, ...]:
        """Rename everything to `.stale` and start at `offset`; returns the names.

        Order: derived stores, checkpoints, segments newest first, checkpoints, the new segment, epochs. After a crash
        the oldest segments open as a shorter log, or none as an empty one; the leader then begins it anew again.
        """
        context = self._context
        with self._leader.held(), self._lock:
            self._check_writable()
            context.view.give_up(self.log_end_offset)
            self._background.about_to_cut(0)
            self._changed = True
            context.view.count_cut()
            try:
                # Both are lowered before a file is renamed, because a log that ends below its recovery point is
                # refused.
                context.view.checkpoint(recovery_point=0, high_watermark=0)
                context.view.sync_checkpoints()
                context.view.lower_published(0)
                self._active.close()
                kept, _ = move_aside(context.filesystem, self.path, self._bases, suffix=STALE_SUFFIX)
                context.view.checkpoint(recovery_point=offset, high_watermark=offset, log_start_offset=offset)
                context.view.sync_checkpoints()
                self._active = Segment.create(context.filesystem, self.path, offset, self._config)
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
        """Raise the high watermark, never above the log end; a lower one changes nothing."""
        with self._lock:
            self.check_open()
            offset = min(offset, self.log_end_offset)
            if self._watermark is None or offset <= self._watermark:
                return
            self._watermark = offset
            self._changed = True
            self._publish(self.flushed_offset)
        self._flush_now(self._flush_scheduler.on_change())
