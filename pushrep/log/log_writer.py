"""The writing half of a log: appends, rolls, syncs. Knows offsets and files, not names, locks or readers.

    append   under _lock: stamp, write, note, then let readers see the new end        [log end offset]
    flush    one thread syncs for all who wait (group_commit.py)                         [flushed offset]
    both     by the thread that syncs, for all who handed over (group_commit.py)
    flusher  every flush_ms or flush_bytes (flusher.py): flush, checkpoints     [recovery point]

Lock order: the turn, then _lock. The sync itself does not run under _lock, so that appends go on beside it; a segment
that is rolled meanwhile keeps its descriptor until the sync has ended.
What was flushed is published before a `flush` returns, to whomever: other processes see it from then on.
A failed sync poisons: the kernel may have dropped the pages, and a second sync could succeed over lost data.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from uuid import UUID

from pushrep.env import Clock, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.config import AppendResult, LogConfig
from pushrep.log.cutting import move_aside
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import CleanLog, parse_log_name
from pushrep.log.errors import AppendFailed, LogClosed, LogDamaged, LogEndMoved, LogPoisoned, append_remedy
from pushrep.log.flusher import ACKNOWLEDGED_MS, SHARE_MS, Due, FlushPromise
from pushrep.log.group_commit import HandedOver, SyncTurn, write_each
from pushrep.log.housekeeping import Housekeeping
from pushrep.log.reading import Bounds
from pushrep.log.recovery import Recovered
from pushrep.log.seals import Seal, remove_seals, write_seal
from pushrep.log.segment import Segment, SegmentMark
from pushrep.log.segment_files import list_segments
from pushrep.records import RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a log stands on."""

    filesystem: Filesystem
    clock: Clock
    view: DirectoryView
    config: LogConfig


class LogWriter:
    """The one writer of a log's files. Thread-safe. Every method raises LogClosed once it is closed."""

    _watermark: int | None = None  # None: no replicas

    def __init__(
        self, around: Surroundings, recovered: Recovered, epochs: LeaderEpochs, housekeeping: Housekeeping
    ) -> None:
        self._log_id = recovered.log_id
        self._ahead_bytes_max = around.view.ahead_bytes_max
        self._around, self._config, self._housekeeping = around, around.config, housekeeping
        self._active = recovered.active
        self._bases = recovered.bases
        self._epochs = epochs
        self.log_start_offset = recovered.report.log_start_offset
        # After recovery all that was found is on disk; a damaged log's readable part lies below its recovery point.
        self.log_end_offset = self.flushed_offset = recovered.active.next_offset
        self._report = recovered.report
        self._poison: BaseException | None = None
        self._revision = 0
        self.is_closed = self._ended = False
        self._unflushed_bytes = 0
        self._lock = threading.Lock()
        self._turn = SyncTurn()
        self._handed: list[HandedOver] = []
        self.on_unsealed: Callable[[int], None] | None = None
        """Told of a segment that rolled without a seal, under the lock."""
        self.cuts = 0
        """How often the log was cut, or begun anew, since it was opened."""
        self._retired: list[Segment] = []
        self.used = True  # for OpenFiles
        self._changed = recovered.active.size_bytes == 0  # else the files have their final form already
        self._active.close()  # opened again by the first append
        self._promise = FlushPromise(self, around.config, around.clock)
        if recovered.has_news:
            self._promise.again()  # the recovery point that was found is brought to disk soon
        self._publish(self.flushed_offset)

    @property
    def high_watermark(self) -> int:
        """What enough replicas hold; the log end where there is nobody to wait for."""
        return self.log_end_offset if self._watermark is None else self._watermark

    @property
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset)."""
        return min(self.high_watermark, self.flushed_offset)

    @property
    def is_writable(self) -> bool:
        """Neither closed nor poisoned nor damaged."""
        return not self.is_closed and self._poison is None and self.damaged_from is None

    @property
    def damaged_from(self) -> int | None:
        """First offset that was on disk and can't be read."""
        return self._report.damaged_from

    def bounds(self) -> Bounds:
        """What this process reads: to the log end."""
        return Bounds(self.log_start_offset, self.log_end_offset)

    def bases(self, *, fresh: bool) -> Sequence[int]:  # noqa: ARG002 - the writer's answer is always fresh
        """Base offsets of the segments."""
        return self._bases

    def cleaned_offset(self) -> int:
        """Below it Kafka's cleaner may have left holes between segments."""
        return self._around.view.cleaned_offset

    def revision(self) -> int:
        """Grows with everything that is published, a cut before its files change included."""
        return self._revision

    def append(self, batches: Sequence[RecordBatch], expected: int | None = None) -> AppendResult:
        """Write all batches, or none. Raises AppendFailed, LogPoisoned, LogDamaged, LogEndMoved (see `expected`)."""
        with self._lock:
            self._check_writable()
            base_offset = self.log_end_offset = self._active.next_offset  # higher if Ctrl-C came right behind a write
            if expected is not None and expected != base_offset:
                raise LogEndMoved(self._around.view.path, expected=expected, end=base_offset)
            self._housekeeping.check_room()
            self.used, was_open = True, self._active.is_open
            self._changed = True
            self._unflushed_bytes += self._write(batches)
            self.log_end_offset = self._active.next_offset
            self._publish(self.flushed_offset)
            self._active.write_indexes_if_due()
            result = AppendResult(base_offset, self.log_end_offset - 1)
        if not was_open:
            self._around.view.open_files.opened(self)
        self._keep_promise(self._unflushed_bytes)
        return result

    def append_together(self, batches: Sequence[RecordBatch]) -> AppendResult:
        """Write all batches, or none; they are on disk when this returns. Raises as `append` and `flush` do.

        Who finds that somebody has the turn leaves the batches to whoever has it next: one write, one sync for all.
        """
        mine = HandedOver(batches)
        self._handed.append(mine)
        turn = self._turn
        if not turn.take(self._is_answered, mine):
            return mine.answer()
        try:
            self._write_handed()
            if not self._is_settled(self.log_end_offset):
                self._sync()
        finally:
            turn.owner = None
            turn.tell()
        self._around.view.open_files.opened(self)
        self._do(self._promise.acknowledged())
        return mine.answer()

    def flush(self, offset: int | None = None) -> None:
        """Everything below `offset` (None: the log end now) is on disk when this returns. Raises LogPoisoned."""
        wanted = self.log_end_offset if offset is None else offset
        turn, me = self._turn, get_ident()
        while True:
            try:
                if not turn.take(self._is_settled, wanted):
                    return
                self._sync()
            finally:
                if turn.owner == me:  # by an assignment, see there
                    turn.owner = None
                    turn.tell()

    def flush_acknowledged(self, offset: int) -> None:
        """As `flush`, for who is told that it is on disk: the checkpoint follows within a second."""
        self.flush(offset)
        self._do(self._promise.acknowledged())

    def flush_in_background(self) -> None:
        """The flusher's call: a flush and the checkpoints."""
        try:
            self._promise.kept()
            self.flush()
            share_ms = min(SHARE_MS, self._config.flush_ms // 4)
            if not self.checkpoint(share_ms):
                self._promise.again(share_ms)  # another log has just written the files: the next write has ours
            self._housekeeping.after_flush()
        except LogPoisoned:
            _LOG.exception("%s takes no more appends", self._around.view.path)
        except (OSError, PushrepError) as error:  # the log itself is on disk; the recovery point rises another time
            _LOG.warning("%s: checkpoint put off: %s", self._around.view.path, error)
            self._promise.again()

    def checkpoint(self, max_age_ms: int = 0) -> bool:
        """Raise the recovery point over what is flushed, the index entries of it on disk first.

        `max_age_ms`: leave the writing to a later call, of any log of the directory, if the files are no older. False
        if something waits for that.
        """
        flushed_offset = self.flushed_offset
        with self._lock:
            segment = self._active
            segment.write_indexes()
        segment.sync_written_indexes()
        view = self._around.view
        with self._lock:
            if self._poison is not None:  # half cut, perhaps: what is known of the log is not what the disk holds
                raise LogPoisoned(view.path, self._poison)
            offset = min(flushed_offset, self.flushed_offset)  # a cut may have come in between
            watermark = offset if self._watermark is None else self._watermark
            view.checkpoint(recovery_point=offset, high_watermark=watermark, log_start_offset=self.log_start_offset)
        return view.sync_checkpoints(max_age_ms)

    def let_go(self, *, flush: bool) -> bool:
        """Close the newest segment's file if nothing unflushed is in it; see OpenFiles."""
        if flush:
            try:
                self.flush()
            except PushrepError:
                return False
        turn, me = self._turn, get_ident()
        try:
            if not turn.take_now() or not self._lock.acquire(blocking=False):
                return False
            try:
                if self.flushed_offset < self.log_end_offset:
                    return False
                self._active.close()
                return True
            finally:
                self._lock.release()
        finally:
            if turn.owner == me:
                turn.owner = None
                turn.tell()

    def close(self) -> CleanLog | None:
        """Bring everything to disk in its final form. None if the log must not count as closed clean.

        Raises LogPoisoned, OSError; descriptors are given back in any case.
        """
        with self._lock:
            self.is_closed = True
        self._promise.end()
        try:
            if self._poison is not None or self._report.damaged_from is not None:
                return None
            self.flush()
            if self._changed:
                with self._turn.own():
                    self._around.view.reserve.with_room(self._active.finish)  # index entries, on a full disk, too
                    self._active.sync()
            # Also of a log that only recovery changed: its numbers are those of before the kill. Ten thousand logs that
            # close share a few writes; the directory brings the last ones to disk.
            self.checkpoint(min(ACKNOWLEDGED_MS, self._config.flush_ms))
            return CleanLog(self.log_end_offset, self._active.size_bytes, self._epochs.latest_epoch)
        finally:
            self._ended = True
            self._turn.tell()
            self._active.close()
            self._around.view.open_files.forget(self)

    @property
    def path(self) -> Path:
        """The log's directory."""
        return self._around.view.path

    @property
    def log_id(self) -> UUID | None:
        """In partition.metadata."""
        return self._log_id

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """The list as it is now."""
        return self._epochs

    def sealed(self) -> list[tuple[int, int]]:
        """(base, base of the next one) of every segment but the newest."""
        return list(pairwise(self._bases))

    def _kept(self) -> dict[int, int]:
        """Of `sealed`, those that stay: the files of those below the log start go without the lock."""
        return {base: following for base, following in self.sealed() if following > self.log_start_offset}

    def keep_seal(self, seal: Seal) -> bool:
        """Write what the scrub has made, unless the segment was cut or taken up again meanwhile. Raises OSError."""
        around = self._around
        with self._lock:
            if not self.is_writable or seal.base_offset not in self._kept():
                return False
            write_seal(around.filesystem, around.view.path, seal)
            around.filesystem.sync_directory(around.view.path)
            return True

    def roll_cleaned(self) -> None:
        """Begin a segment if offsets may be missing inside of the newest: only a seal witnesses those behind them.

        Raises LogClosed, LogPoisoned, OSError.
        """
        with self._lock:
            active = self._active
            if not self.is_writable or not active.size_bytes or active.base_offset >= self.cleaned_offset():
                return
            self.used = self._changed = True
            self._roll()
        self._around.view.open_files.opened(self)

    def replace_sealed(self, base: int, following: int, cuts: int, put: Callable[[], None]) -> bool:
        """Call `put`, which renames another file over a sealed segment's, unless the log was cut since `cuts`, or the
        segment is about to be removed.

        Whether it was called. Raises LogClosed, LogPoisoned, LogDamaged, OSError.
        """
        with self._lock:
            self._check_writable()
            if cuts != self.cuts or self._kept().get(base) != following:
                return False
            put()
            self._publish(self.flushed_offset)
            return True

    def check_open(self) -> None:
        """Raise LogClosed after `close`."""
        if self.is_closed:
            raise LogClosed(self._around.view.path)

    def _check_writable(self) -> None:
        path, report = self._around.view.path, self._report
        if self.is_closed:
            raise LogClosed(path)
        if self._poison is not None:
            raise LogPoisoned(path, self._poison) from self._poison
        if report.damaged_from is not None:
            raise LogDamaged(path, report.damaged_from, report.damage or "")

    def _write_handed(self) -> None:
        """Write what was handed over until now: at once, or, where that fails, each as far as it can be."""
        with self._lock:
            self.used = self._changed = True
            handed = self._handed[:]
            del self._handed[: len(handed)]  # behind them others may have come meanwhile
            write_each(handed, self._write_all)
            self._publish(self.flushed_offset)
            self._active.write_indexes_if_due()

    def _write_all(self, batches: Sequence[RecordBatch]) -> None:
        """All or none, under _lock."""
        self._check_writable()
        self._housekeeping.check_room()
        self._unflushed_bytes += self._write(batches)
        self.log_end_offset = self._active.next_offset

    def _write(self, batches: Sequence[RecordBatch]) -> int:
        """The bytes written."""
        segment, bases, size_bytes = self._active, self._bases, 0
        epoch, offset, mark = self._epochs.latest_epoch, segment.next_offset, segment.mark()
        segment.ahead_bytes_max = self._ahead_bytes_max
        try:
            for batch in batches:
                batch.stamp(offset, epoch)
                if not self._active.has_room(batch.header):
                    self._roll()
                self._active.append(batch)
                offset = batch.header.next_offset
                size_bytes += len(batch.data)
            self._active.write()
        except BaseException as error:
            self._take_back(segment, mark, bases, error)
            if not isinstance(error, OSError):
                raise
            raise AppendFailed(self._active.path, error, append_remedy(error)) from error
        return size_bytes

    def _take_back(self, segment: Segment, mark: SegmentMark, bases: tuple[int, ...], cause: BaseException) -> None:
        """Nothing of a failed append remains: segments that it began go, the one it began in is cut to where it was."""
        if self._poison is not None:
            raise LogPoisoned(self._around.view.path, cause) from cause
        try:
            if self._active is not segment:
                self._active.close()
                remove_seals(self._around.filesystem, self._around.view.path, [segment.base_offset])
            self._active, self._bases = segment, bases
            # By the files: who was interrupted while a segment was made has not noted it yet.
            filesystem, path = self._around.filesystem, self._around.view.path
            begun = [base for base in list_segments(filesystem, path) if base > bases[-1]]
            move_aside(filesystem, path, begun, keep=False)
            segment.rewind(mark)
        except BaseException as error:
            self._poison_by(error)
            raise

    def _poison_by(self, error: BaseException) -> None:
        """Files were left half changed, by the disk or by an interruption: only an opening can judge them now."""
        self._poison = error
        if isinstance(error, OSError):
            raise LogPoisoned(self._around.view.path, error) from error

    def _roll(self, base_offset: int | None = None) -> None:
        """Close the newest segment and begin the next. What is in the old one is on disk before the new name is.

        base_offset: where the next one begins, behind a hole; None: where the old one ends.
        """
        old, view = self._active, self._around.view
        old.write()
        old.finish()
        try:
            old.sync()
        except OSError as error:
            self._poison = error
            raise
        is_sealed = self._seal(old)
        begin = old.next_offset if base_offset is None else base_offset
        new = Segment.create(self._around.filesystem, view.path, begin, self._config)
        new.ahead_bytes_max = old.ahead_bytes_max
        self._active, self._bases = new, (*self._bases, new.base_offset)
        self._housekeeping.rolled()
        # Not to the new base: the append under way may be taken back, and what it has put into the old segment with it.
        end = self.log_end_offset
        view.checkpoint(
            recovery_point=end,
            high_watermark=min(self.high_watermark, end),
            log_start_offset=self.log_start_offset,
        )
        view.sync_checkpoints_soon()
        if not self._turn.do_unless_taken(old.close):
            self._retired.append(old)
        if not is_sealed and self.on_unsealed is not None:
            self.on_unsealed(old.base_offset)

    def _seal(self, segment: Segment) -> bool:
        """Whether there is one: not of a segment that was taken up again. Its name comes to disk with the next one's.

        Without it, or without room for it, the scrub makes one.
        """
        around = self._around
        seal = segment.seal(self._log_id, parse_log_name(around.view.name)[1])
        if seal is None:
            return False
        try:
            write_seal(around.filesystem, around.view.path, seal)
        except OSError:
            return False
        return True

    def _sync(self) -> None:
        """One sync for everything that is in the log now. Only one thread at a time gets here."""
        with self._lock:
            target, segment, size = self.log_end_offset, self._active, self._unflushed_bytes
            file = segment.file
        try:
            self._around.view.disk.timed(file.sync)
        except OSError as error:
            with self._lock:
                self._poison = error
            raise LogPoisoned(self._around.view.path, error) from error
        with self._lock:
            self._unflushed_bytes -= size
            flushed_offset = max(self.flushed_offset, target)
            self._publish(flushed_offset)
            self.flushed_offset = flushed_offset  # from here on who waits may go
            for old in self._retired:
                if old is not self._active:
                    old.close()
            self._retired.clear()

    def _publish(self, flushed_offset: int) -> None:
        self._revision += 1
        end, watermark = self.log_end_offset, self._watermark
        self._around.view.publish(
            end,
            flushed_offset,
            end if watermark is None else watermark,
            self.log_start_offset,
            self._epochs.latest_epoch,
        )

    def _is_settled(self, wanted: int) -> bool:
        """Whether nobody has to wait for `wanted` any more: it is flushed, or cut off. Raises if it never will be."""
        if self.flushed_offset >= min(wanted, self.log_end_offset):
            return True
        if self._poison is not None:
            raise LogPoisoned(self._around.view.path, self._poison) from self._poison
        if self._ended:
            raise LogClosed(self._around.view.path)
        return False

    def _is_answered(self, handed: HandedOver) -> bool:
        """Whether the answer to `handed` is known: refused, or on disk. Raises if there never will be one."""
        if handed.result is not None:
            return self._is_settled(handed.result.last_offset + 1)
        if handed.error is None and self._ended:
            raise LogClosed(self._around.view.path)
        return handed.error is not None

    def _keep_promise(self, unflushed_bytes: int = 0) -> None:
        due = self._promise.made(unflushed_bytes)
        if due is not Due.NOTHING:
            self._do(due)

    def _do(self, due: Due) -> None:
        if due is Due.NOTHING:
            return
        self.flush()
        if due is Due.FLUSH_AND_CHECKPOINT:
            self.checkpoint()
            self._housekeeping.after_flush()
