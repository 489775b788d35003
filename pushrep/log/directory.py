"""The directory of logs: what its partitions share, opened once per process.

    <directory>/.lock                       flock, our pid in it; never removed
               /.pushrep_cleanshutdown      clean marker       (directory_files.py)
               /*-offset-checkpoint         checkpoints        (directory_files.py)
               /.pushrep_published          for readers        (published.py)
               /.pushrep_reserve            blocks held back   (disk.py)
               /directory-id.json           of an outbox's     (directory_id.py)
               /<topic>-<n>/                a log

    acquire ─ first one ─▶ lock → read → remove the marker ──▶ attach a log ⇄ close it ──▶ last release: checkpoints,
               others share the instance                                                   marker, unlock

The marker's lines and checkpoints of logs that are not opened are kept unchanged: no other process writes these logs
while this one holds the lock. Attaching a log removes its line, and only `close` adds it again; after a crash
there is no marker, and every log counts as unclean.
Locking, in this order: the registry's, _write_lock (files), _lock (fields; never held over a sync).

`create_logs` makes many logs at once: their files are written, then synced together, and the directory above once.

    <directory>/<topic>-<n>/                        all made, then <directory> synced once
                   /partition.metadata.tmp       ┐  contents of all of them: one sync of the file system, or each
                   /leader-epoch-checkpoint.tmp  ┘  synced, beside the others (disk.py)
                   /partition.metadata           ┐
                   /00000000000000000000.*       │  in this order; then the names, in the same way
                   /leader-epoch-checkpoint      ┘

Each is then an empty log that was closed clean, and opening it writes nothing. A crash in between leaves the first few
of a log's files; opening that log makes the others.

`OpenFiles`: limits how many logs keep their newest segment's file open.

    a log opens its file ─▶ | oldest ... newest |       above the limit: the oldest that was not used since it was last
                                                        looked at closes its file (second chance, a cheap kind of LRU)

The files of all directories together take at most half of the process's descriptors. Above that, a directory that opens
another file closes others, down to an equal part of that half for each directory with open files.
A file is closed only when all of it is flushed: the kernel reports a later write error only to descriptors that were
open when it happened. So a log with unflushed bytes is flushed first.

Given-up offsets: readers may have seen records at them, and the log assigns them to other records.

    0 ............. log end ............... given up ..............
      records     | given out once, gone  | never given out
                    given out again by the next appends

A replay filter that has seen such an offset drops the second record. So before records are cut off the end of a log,
the end of what readers may have seen is written to given-up-offset-checkpoint. An outbox that opens its logs and finds
one that ends below that number goes on under another PID (outbox/identity.py) and removes the number. What "seen"
means is decided here:

    records go by                                 the log ended at           written
    truncate_to, repair's cut                     its end                    always: readers of `written` saw the end
    quarantine, recovery, repair's splice, a      what was seen of it        if the new end lies below: a torn tail that
      directory restored from an older copy                                  was never flushed is nobody's loss
    a directory that was removed                  what was seen of it        always

What was seen of a log is below the highest of: the stable offset that its writer published (since any start of the
machine: a false alarm costs a PID), its recovery point, its line of the clean marker, and the ends of its derived
stores. All of these rise only after a successful sync, and readers go no further.
"""

import logging
import os
import resource
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self
from uuid import UUID
from weakref import WeakValueDictionary

from filtering.retry import Backoff
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem, put_in_place
from pushrep.errors import ForkedProcess, PushrepError
from pushrep.log.config import LogConfig
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    PARTITION_METADATA_NAME,
    TIME_INDEX_SUFFIX,
    BadLogFile,
    CheckpointFile,
    CleanLog,
    DirectoryLock,
    compacted_logs,
    decode_checkpoint,
    encode_partition_metadata,
    epochs_files,
    is_log_name,
    parse_log_name,
    read_bounded,
    read_checkpoint,
    read_clean_marker,
    remove_clean_marker,
    segment_path,
    write_checkpoint,
    write_clean_marker,
)
from pushrep.log.directory_id import (
    DIRECTORY_ID_NAME,
    CopyVerdict,
    opened_id,
    read_directory_id,
    settled_id,
    write_directory_id,
)
from pushrep.log.disk import DiskHeadroom, DiskWatch, ManyFiles
from pushrep.log.errors import NO_ROOM, CompactedLog, DirectoryIsCopy, LogClosed, LogLocked
from pushrep.log.flush_scheduler import process_flusher, process_scrubber
from pushrep.log.published import ClockNote, Ends, PublishedEntry, PublishedFile, PublishedState
from pushrep.log.scrub import Scrub
from pushrep.log.segment import PREALLOCATE_BYTES_MIN
from pushrep.records.header import OFFSET_MAX
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


def seen_to(published: PublishedState | None, clean: CleanLog | None, recovery_point: int | None) -> int:
    """The offset below which readers may have seen records, by the files beside the log; 0 if there are none."""
    stable = 0 if published is None else published.ends.stable
    return max(stable, 0 if clean is None else clean.end_offset, recovery_point or 0)


def seen_of_removed(
    names: set[str], clean: Mapping[str, CleanLog], recovery_points: Mapping[str, int]
) -> dict[str, int]:
    """{log: end of what was seen} for logs in the files whose directories are not among `names`."""
    removed = (clean.keys() | recovery_points.keys()) - names
    seen = {name: seen_to(None, clean.get(name), recovery_points.get(name)) for name in removed}
    return {name: end for name, end in seen.items() if end}


def read_given_up(directory: Path, names: set[str], filesystem: Filesystem) -> dict[str, int]:
    """{log: offset below which it gave offsets up}; of a damaged file the highest possible offset for every log.

    Other damaged checkpoints count as absent. This one can't: offsets would be assigned twice without notice.
    """
    path = directory / CheckpointFile.GIVEN_UP.value
    try:
        data = read_bounded(path, filesystem)
        return decode_checkpoint(data) if data is not None else {}
    except BadLogFile as error:
        _LOG.warning("%s is damaged, so every log here may have given up offsets: %s", path, error)
        return {name: OFFSET_MAX for name in names if is_log_name(name)}


class FileOwner(Protocol):
    """A log that keeps a file open for writing."""

    used: bool
    """Set by the log at each use, cleared by OpenFiles."""

    def close_idle_file(self, *, flush: bool) -> bool:
        """Close the file, unless it has unflushed bytes (`flush`: flush them first) or is in use. Whether it was
        closed.
        """
        ...


class OpenInProcess:
    """How many files all directories have open. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """The logs belong to the parent."""
        self._lock, self._files, self._directories = threading.Lock(), 0, 0

    def changed(self, before: int, now: int) -> None:
        """A directory had `before` files open and has `now`."""
        with self._lock:
            self._files = max(0, self._files + now - before)
            self._directories = max(0, self._directories + bool(now) - bool(before))

    def are_too_many(self, count: int) -> bool:
        """Whether a directory with `count` open files has more than its part, and all together have too many."""
        half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # sockets and readers need some, too
        return self._files > half >= 0 and count > half // max(1, self._directories)


_OPEN = OpenInProcess()
os.register_at_fork(after_in_child=_OPEN.after_fork_in_child)


class OpenFiles:
    """The logs of one directory that have a file open. Thread-safe; call it without holding a log's lock."""

    def __init__(self, process: OpenInProcess = _OPEN) -> None:
        self.limit = LogConfig().open_files_max
        self._process = process
        self._lock = threading.Lock()
        self._open: deque[FileOwner] = deque()
        self._known: set[FileOwner] = set()

    def __len__(self) -> int:
        return len(self._known)

    def opened(self, log: FileOwner) -> None:
        """`log` has opened its file; others may have to close theirs. Raises LogPoisoned for `log` only."""
        log.used = True
        with self._lock:
            if log in self._known:
                return
            self._known.add(log)
            self._open.append(log)
            self._process.changed(len(self._known) - 1, len(self._known))
        for flush in (False, True):
            for _ in range(2 * len(self._open)):
                count = len(self._known)
                if count <= self.limit and not self._process.are_too_many(count):
                    return
                self._close_one(log, flush=flush)

    def forget(self, log: FileOwner) -> None:
        """`log` has closed its own file."""
        with self._lock:
            if log in self._known:
                self._forget(log)
                with suppress(ValueError):  # another thread is about to close it
                    self._open.remove(log)

    def _forget(self, log: FileOwner) -> None:
        self._known.discard(log)
        self._process.changed(len(self._known) + 1, len(self._known))

    def _close_one(self, newcomer: FileOwner, *, flush: bool) -> None:
        with self._lock:
            if not self._open:
                return
            log = self._open.popleft()
        closed = False
        if log is not newcomer and (flush or not log.used):
            closed = log.close_idle_file(flush=flush)
        log.used = False
        with self._lock:
            if closed and log in self._known:
                self._forget(log)
            elif log in self._known:
                self._open.append(log)


_GIVEN_UP, _HIGH_WATERMARK = CheckpointFile.GIVEN_UP, CheckpointFile.HIGH_WATERMARK
_OUTLIVE = frozenset({_GIVEN_UP, _HIGH_WATERMARK})
"""The checkpoints that stay when a log's directory is gone: they say what its member lost, until it is filled again."""
AHEAD_BYTES_MAX = 1 << 30
"""Files grow ahead of their data by so much at most, over all open logs of a directory: 16 MiB for 64 of them."""
_SOON_MS = 250
"""How long the checkpoints of rolled or closed logs wait, so that one write serves many."""
_AGAIN = Backoff(first_s=1.0, longest_s=15.0, least=0.5)
"""After how long a write that the disk refused is tried again in the background."""


class LogDirectory:
    """One directory of logs, locked by this process. Made by `acquire`, given back by `release` or a `with` block."""

    def __init__(self, path: Path, filesystem: Filesystem, clock: Clock, *, copy_check: bool = True) -> None:
        self.path, self.filesystem = path, filesystem
        self._copy_check = copy_check
        self.owner_pid = os.getpid()
        self.forked = False
        self.references = 0
        self.disk, self.open_files = DiskWatch(path, filesystem, clock), OpenFiles()
        self.clock = clock
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._written_ms: int | None = None  # when the last write ended; below: how long it took
        self._write_took_ms = 0
        self._refused, self._again_ms = 0, 0  # writes that failed in a row, and when the next is due
        self._shared_ms = _SOON_MS  # how old the files may be at the next background write
        self._moved_ms: int | None = None
        self._directory_lock = DirectoryLock(path, filesystem)
        try:
            if copy_check:
                self.directory_id, self.copy_verdict = opened_id(path, filesystem)
            else:
                self.directory_id, self.copy_verdict = read_directory_id(path, filesystem)[0], CopyVerdict.UNKNOWN
            self._load()
            self._flusher = process_flusher() if clock is SYSTEM_CLOCK else None
            self.scrub = Scrub(filesystem, process_scrubber() if clock is SYSTEM_CLOCK else None, clock)
            if self._flusher is not None:
                self._flusher.attach(self)
        except BaseException:
            self._directory_lock.close()
            raise

    @classmethod
    def acquire(
        cls,
        path: Path | str,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
        *,
        is_real: bool = False,
        copy_check: bool = True,
    ) -> "LogDirectory":
        """The directory at `path`, made if it is missing; the same instance for every caller in this process.

        Symbolic links are followed first (`is_real`: they were), so two names share it. Each needs a `release`.
        copy_check: False: the first caller does not check whether the directory is a copy.
        Raises LogLocked with the other process's pid, NotALog for a file or a place that can't be written.
        """
        real = Path(path if is_real else os.path.realpath(path))
        key = (id(filesystem), str(real))
        with _REGISTRY.lock:
            directory = _REGISTRY.held.get(key)
            if directory is None or not directory.holds_lock():
                directory = _REGISTRY.held[key] = cls(real, filesystem, clock, copy_check=copy_check)
            directory.references += 1
            return directory

    def attach(self, name: str) -> "DirectoryView":
        """The only view of a log in this process; call this before the log's own directory is made or read.

        Raises LogLocked if the log is attached already, CompactedLog, InvalidLogName, LogClosed, ForkedProcess.
        """
        if name in self._compacted:
            raise CompactedLog(self.path / name, self._compacted[name])
        self.forget_missing(name)
        with self._lock:
            self._refuse_attached(name)
            entry = self._published.entry(name)
            self._attached.add(name)
            seen = self._seen_to(name, entry.last_words())
            clean = self._clean.pop(name, None)
            return DirectoryView(self, name, entry, clean, seen, is_copy=self.is_unsettled_copy)

    def forget_missing(self, name: str) -> bool:
        """Whether there is no such log; then checkpoints of an earlier one of this name are removed. Raises as
        `attach`.
        """
        parse_log_name(name)
        self.check_usable()
        if self.filesystem.exists(self.path / name):
            return False
        self._forget(name)  # perhaps it was removed by hand
        with self._lock:
            self._refuse_attached(name)
            self._published.entry(name).clear()
        return True

    def forget_removed(self) -> None:
        """Forget logs whose directories were removed on purpose, so that nothing of them counts as lost. Raises
        OSError.
        """
        with self._lock:
            names = [*self._offsets[_HIGH_WATERMARK]]
        for name in names:
            self.forget_missing(name)

    def note_created(self, names: Iterable[str]) -> None:
        """These logs were made, empty and on disk: count them as closed clean."""
        with self._lock:
            self._clean.update(dict.fromkeys(names, CleanLog(0, 0, 0)))

    def release(self) -> None:
        """Give the directory back; the last one writes checkpoints and the clean marker and frees the lock.

        A log that is still attached is left out of the marker. Raises OSError if the files could not be written: the
        lock is free then and there is no marker. Raises LogClosed if it was released before, ForkedProcess.
        """
        with _REGISTRY.lock:
            self.check_usable()
            if self.references > 1:
                self.references -= 1
                return
            self._stop_background()
            try:
                for name in sorted(self._attached):
                    self.detach(name, None)
                self.sync_checkpoints()
                self._renew_id()
                self.reserve.call(lambda: write_clean_marker(self.path, self._clean, self.filesystem))
            finally:
                self.references = 0
                del _REGISTRY.held[id(self.filesystem), str(self.path)]
                self._directory_lock.close()
                del self._published  # while the mapping is there, the disk can't be unmounted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def ahead_bytes_max(self) -> int:
        """Each open log's share of the space allocated ahead in all: 1 GiB, or a twentieth of a small disk."""
        together = min(AHEAD_BYTES_MAX, self.disk.usage.total_bytes // 20)
        return max(PREALLOCATE_BYTES_MIN, together // max(1, len(self._attached)))

    def checkpointed(self, checkpoint: CheckpointFile, name: str) -> int | None:
        """A log's number in the checkpoint, None if it has none."""
        with self._lock:
            return self._offsets[checkpoint].get(name)

    def given_up(self, name: str) -> int:
        """The end of what a log lost since it was opened last; 0: nothing."""
        return self.checkpointed(_GIVEN_UP, name) or 0

    def seen_to(self, name: str) -> int:
        """The offset below which readers may have seen records of a log, or of an earlier log of this name."""
        with self._lock:
            return self._seen_or_given_up(name)

    def remember(self, name: str, offsets: dict[CheckpointFile, int]) -> None:
        """Set a log's checkpoints in memory; `sync_checkpoints` writes them to disk."""
        self.check_usable()
        with self._lock:
            for checkpoint, offset in offsets.items():
                if self._offsets[checkpoint].get(name) != offset:
                    self._offsets[checkpoint][name] = offset
                    self._unwritten.add(checkpoint)

    def sync_checkpoints(self, max_age_ms: int = 0) -> bool:
        """Write the files whose numbers changed; on disk when this returns. One write serves all that wait.

        With `max_age_ms` it does nothing while another write runs, within that time after the last one (up to four
        times that, if it took more than a tenth of it), and soon after a failed one. Returns whether nothing is left to
        be written.
        Raises OSError; the old file stands then, and the numbers are written with the next call.
        """
        self.check_usable()
        if max_age_ms and (self._write_lock.locked() or self.clock.monotonic_ms() < self._again_ms):
            return False
        with self._write_lock:
            began_ms = self.clock.monotonic_ms()
            if self._written_ms is not None and began_ms - self._written_ms < self._spaced_ms(max_age_ms):
                with self._lock:
                    return not self._unwritten
            with self._lock:
                changed = {at: dict(self._offsets[at]) for at in CheckpointFile if at in self._unwritten}
                self._unwritten.clear()
            try:
                for checkpoint, offsets in changed.items():
                    self.reserve.call(partial(write_checkpoint, self.path, checkpoint, offsets, self.filesystem))
                    self._on_disk[checkpoint] = offsets
            except BaseException:
                with self._lock:
                    self._unwritten.update(changed)
                self._refused += 1
                self._again_ms = self.clock.monotonic_ms() + int(1000 * _AGAIN.pause_s(self._refused))
                raise
            self._refused = self._again_ms = 0
            if changed:
                self.moved_ms()
                self._written_ms = self.clock.monotonic_ms()
                self._write_took_ms = self._written_ms - began_ms
            return True

    def detach(self, name: str, clean: CleanLog | None) -> None:
        """A log is closed. Without `clean` it stays out of the marker, and its unwritten checkpoints are dropped."""
        self.check_usable()
        with self._write_lock, self._lock:
            self._attached.discard(name)
            if clean is not None:
                self._clean[name] = clean
                if self._unwritten:  # this log's, while others stay open
                    self.sync_checkpoints_soon()
                return
            for checkpoint in CheckpointFile:
                self._fall_back(checkpoint, name)

    def sync_checkpoints_soon(self, delay_ms: int = _SOON_MS) -> None:
        """Have them written in the background. A simulated clock has no thread: then the next write does it.

        In `delay_ms`, or later if writes are slow (`_spaced_ms`) or failed.
        """
        self._shared_ms = min(self._shared_ms, delay_ms)
        if self._flusher is not None:
            self._flusher.soon(self, max(self._spaced_ms(delay_ms), self._again_ms - self.clock.monotonic_ms()))

    def _spaced_ms(self, wanted_ms: int) -> int:
        """`wanted_ms`, or up to four times that if the last write took more than a tenth of it."""
        return min(max(wanted_ms, 10 * self._write_took_ms), 4 * wanted_ms)

    def flush_in_background(self) -> None:
        """The flusher's call: the checkpoints of logs that were rolled or closed."""
        shared_ms, self._shared_ms = self._shared_ms, _SOON_MS
        try:
            if not self.sync_checkpoints(shared_ms):  # a log has just written them
                self.sync_checkpoints_soon(shared_ms)
        except (OSError, PushrepError) as error:
            _LOG.warning("%s: checkpoints put off: %s", self.path, error)
            self.sync_checkpoints_soon(shared_ms)

    def check_usable(self) -> None:
        """Raise ForkedProcess in a fork of the owner, LogClosed after the last release."""
        if self.forked:
            raise ForkedProcess(f"the directory of logs {self.path}", owner_pid=self.owner_pid, pid=os.getpid())
        if self.references < 1:
            raise LogClosed(self.path)

    def holds_lock(self) -> bool:
        """Whether the lock's descriptor is still open; a process that closed all of them (a daemon) has lost it."""
        if self._directory_lock.is_open:
            return True
        self.references = 0  # callers that still have this instance get LogClosed
        self._directory_lock.let_go()
        self._stop_background()
        return False

    def moved_ms(self) -> int | None:
        """Since when (wall clock) the directory's path leads elsewhere, as far as was seen; None: it leads here."""
        with suppress(OSError):  # can't be told now
            if self._directory_lock.is_in_place:
                self._moved_ms = None
            elif self._moved_ms is None:
                self._moved_ms = self.clock.wall_ms()
                _LOG.error("%s leads to another directory now: this process goes on in its own, moved one", self.path)
        return self._moved_ms

    def _stop_background(self) -> None:
        self.scrub.end()
        if self._flusher is not None:
            self._flusher.detach(self)

    def disown(self) -> None:
        """In a fork: refuse every use and close the lock's descriptor, so that the lock is free when the owner ends.

        Closing a descriptor that the parent has, too, does not unlock; nothing is written.
        """
        self.forked = True
        self._directory_lock.close()

    @property
    def is_unsettled_copy(self) -> bool:
        """Whether it was found to be a copy, and its outbox has not gone on as one yet (`settle_id`)."""
        return self.directory_id is not None and not self.directory_id.is_settled

    def refuse_copy(self) -> None:
        """Raise DirectoryIsCopy where the original may still exist: for a member, whose election state it may share."""
        if self.directory_id is not None and self.directory_id.is_copy:
            raise DirectoryIsCopy(self.path, self.directory_id.copy_of[-1])

    def settle_id(self, new_id: UUID | None = None) -> None:
        """Write the directory's id with its present witness. A directory without an id gets one (`new_id`, if it was
        given out before), and a copy gets another one than its original.

        On a full disk the old file stays, except for a copy, which raises OSError as for other errors.
        """
        self.check_usable()
        unknown = self.copy_verdict is CopyVerdict.UNKNOWN
        if not self._copy_check and not self.is_unsettled_copy:
            return  # with copy_check=False nobody checked the witness: it must not be renewed
        new = settled_id(self.directory_id, new_id)
        try:
            self.copy_verdict = self.reserve.call(lambda: write_directory_id(self.path, self.filesystem, new))
        except OSError as error:
            if error.errno not in NO_ROOM or self.is_unsettled_copy:
                raise
            _LOG.warning("%s: no room for %s: the next opening writes it", self.path, DIRECTORY_ID_NAME)
            return
        self.directory_id = new
        if unknown or self.copy_verdict is CopyVerdict.UNKNOWN:
            _LOG.warning(
                "%s: its file system has nothing that distinguishes a directory from a copy of it, so a restored "
                "backup is not noticed here; after one, run pushrep log new-epoch (copy_check=False: no such warning)",
                self.path,
            )

    def forget_original(self) -> None:
        """The leader has filled this copy and counts it by its own id: it is no copy any more. Raises OSError."""
        known = self.directory_id
        if known is not None and known.is_copy and known.is_settled:
            new = replace(known, copy_of=())
            write_directory_id(self.path, self.filesystem, new)
            self.directory_id = new

    def _renew_id(self) -> None:
        """Write the id's file anew, so that a backup made until now has an older witness."""
        known = self.directory_id
        if known is None or self.is_unsettled_copy or self.copy_verdict is not CopyVerdict.ORIGINAL:
            return
        try:
            self.reserve.call(lambda: write_directory_id(self.path, self.filesystem, known))
        except OSError as error:
            _LOG.warning("%s: %s stays as it was: %s", self.path, DIRECTORY_ID_NAME, error)

    def _load(self) -> None:
        names = set(self.filesystem.list(self.path))  # removed logs have no lines
        clean = read_clean_marker(self.path, self.filesystem)
        self._clean = {name: log for name, log in clean.items() if name in names}
        found = {_GIVEN_UP: read_given_up(self.path, names, self.filesystem)}
        found |= {at: read_checkpoint(self.path, at, self.filesystem) for at in CheckpointFile if at is not _GIVEN_UP}
        self._compacted = compacted_logs(self.path, self.filesystem)
        self._offsets = {at: {n: o for n, o in of.items() if n in names or at in _OUTLIVE} for at, of in found.items()}
        for name in clean.keys() & names:  # the marker, too, says how far a log was on disk
            self._offsets[CheckpointFile.RECOVERY_POINT].setdefault(name, clean[name].end_offset)
        self._on_disk = {checkpoint: dict(offsets) for checkpoint, offsets in self._offsets.items()}
        self._unwritten = {checkpoint for checkpoint, kept in self._offsets.items() if kept != found[checkpoint]}
        for name, seen in seen_of_removed(names, clean, found[CheckpointFile.RECOVERY_POINT]).items():
            if seen > self._offsets[_GIVEN_UP].get(name, 0):
                self._offsets[_GIVEN_UP][name] = seen
                self._unwritten.add(_GIVEN_UP)
        self._attached: set[str] = set()
        self._published = PublishedFile(self.path, self.owner_pid, self.filesystem)
        self.reserve = DiskHeadroom(self.path, self.filesystem, len(names))
        # Last: if anything above fails, nothing was opened and the marker is still true.
        remove_clean_marker(self.path, self.filesystem)

    def _forget(self, name: str) -> None:
        """Remove an earlier log's checkpoints, except the end of what was seen of it; on disk when this returns."""
        with self._lock:
            self._refuse_attached(name)
            seen = self._seen_or_given_up(name)
            self._clean.pop(name, None)
            for checkpoint in CheckpointFile:
                if self._offsets[checkpoint].pop(name, None) is not None:
                    self._unwritten.add(checkpoint)
            if seen:
                self._offsets[_GIVEN_UP][name] = seen
                self._unwritten.add(_GIVEN_UP)
            changed = bool(self._unwritten)
        if changed:  # before the new log's directory is made: nobody may take it for the old one
            self.sync_checkpoints()

    def _seen_or_given_up(self, name: str) -> int:
        published = self._published.entry(name).last_words()
        return max(self._seen_to(name, published), self._offsets[_GIVEN_UP].get(name, 0))

    def _seen_to(self, name: str, published: PublishedState | None) -> int:
        return seen_to(published, self._clean.get(name), self._offsets[CheckpointFile.RECOVERY_POINT].get(name))

    def _refuse_attached(self, name: str) -> None:
        if name in self._attached:
            raise LogLocked(self.path / name, self.owner_pid, is_own=True)

    def _fall_back(self, checkpoint: CheckpointFile, name: str) -> None:
        """Fall back to the lower of the remembered and the written number: a close after a failed sync must not raise
        one.

        A raised log start stays, because the segments below it are gone. So do given-up offsets.
        """
        offset, written = self._offsets[checkpoint].get(name), self._on_disk[checkpoint].get(name)
        if offset is None or checkpoint in {CheckpointFile.LOG_START_OFFSET, _GIVEN_UP}:
            return
        if written is None:
            del self._offsets[checkpoint][name]
        else:
            self._offsets[checkpoint][name] = min(offset, written)


class DirectoryView:
    """What one open log may do with its directory. `publish` calls must not overlap; the rest is thread-safe."""

    def __init__(  # noqa: PLR0913 - what is known of a log
        self,
        directory: LogDirectory,
        name: str,
        entry: PublishedEntry,
        clean: CleanLog | None,
        seen_to: int,
        *,
        is_copy: bool = False,
    ) -> None:
        self.name, self.path = name, directory.path / name
        self.clean = clean
        """How the last close left the log; None if it was not closed clean, or was never there."""
        self.published_before: PublishedState | None = entry.state()
        """What the last writer published since this machine started; newer than the checkpoints after a kill."""
        self.seen_to = seen_to
        """The end of what readers may have seen; see the file's map."""
        self.is_copy = is_copy
        """The files were copied, perhaps during writes: a checkpoint may be newer than the segment that it speaks of.
        """
        self.disk, self.open_files, self.reserve = directory.disk, directory.open_files, directory.reserve
        self._directory, self._entry = directory, entry
        self.cuts = entry.cuts
        """How often records that may have been read were taken off its end; it rises before the files change."""
        self._flushed_offset = 0
        self._closed = False

    def look_again(self, flushed_offset: int) -> None:
        """Its log, stopped by a failure, is about to be recovered in place: as after a kill of this process, but what
        is on disk is known.
        """
        self.clean, self.published_before, self._flushed_offset = None, self._entry.state(), flushed_offset
        self.seen_to = seen_to(self.published_before, None, self.recovery_point)

    @property
    def recovery_point(self) -> int | None:
        """First offset not known to be on disk, as remembered; None if the log has none."""
        return self._directory.checkpointed(CheckpointFile.RECOVERY_POINT, self.name)

    @property
    def known_on_disk(self) -> int | None:
        """The recovery point of an opening, below which bad bytes are damage; None if the log has none.

        What was published as flushed since this machine started is newer than the checkpoint. In a copy of the
        directory it is about the original: the two were not copied at one moment.
        """
        published = None if self.is_copy else self.published_before
        if published is None and not self._flushed_offset:
            return self.recovery_point
        flushed_offset = 0 if published is None else published.flushed_offset
        return max(self.recovery_point or 0, flushed_offset, self._flushed_offset)

    @property
    def known_watermark(self) -> int:
        """The highest known high watermark: the published one survives a kill, the checkpoint a power cut."""
        published = self.published_before.high_watermark if self.published_before is not None else 0
        return max(published, self.high_watermark or 0)

    @property
    def log_start_offset(self) -> int | None:
        """First readable offset, as remembered; None if the log has none."""
        return self._directory.checkpointed(CheckpointFile.LOG_START_OFFSET, self.name)

    @property
    def high_watermark(self) -> int | None:
        """The high watermark, as remembered; None if the log has none."""
        return self._directory.checkpointed(CheckpointFile.HIGH_WATERMARK, self.name)

    def ahead_bytes_max(self) -> int:
        """How many bytes one log's newest file may be allocated ahead of its data."""
        return self._directory.ahead_bytes_max()

    def publish(self, ends: Ends, leader_epoch: int) -> None:
        """Publish these offsets to readers in other processes: no system call, about a microsecond."""
        if self._closed or self._directory.forked:
            self._check_open()
        self._entry.publish(ends, leader_epoch)

    def lower_published(self, offset: int) -> None:
        """Lower what was published to `offset`: the log is about to be cut there."""
        self._check_open()
        self._entry.lower(offset)
        self.cuts = self._entry.cuts

    @property
    def clock_note(self) -> ClockNote | None:
        """What retention saw of the clocks last."""
        return self._entry.clock()

    def keep_clock_note(self, note: ClockNote) -> None:
        """Keep it for the next opening."""
        self._check_open()
        self._entry.keep_clock(note)

    def count_cut(self) -> None:
        """The log is about to be cut, which its next `publish` shows."""
        self._check_open()
        self._entry.count_cut()
        self.cuts = self._entry.cuts

    def checkpoint(
        self,
        *,
        recovery_point: int | None = None,
        high_watermark: int | None = None,
        log_start_offset: int | None = None,
    ) -> None:
        """Remember these; on disk after the next `sync_checkpoints` of any log here, or the directory's last close."""
        self._check_open()
        given = {
            CheckpointFile.RECOVERY_POINT: recovery_point,
            CheckpointFile.HIGH_WATERMARK: high_watermark,
            CheckpointFile.LOG_START_OFFSET: log_start_offset,
        }
        self._directory.remember(self.name, {at: offset for at, offset in given.items() if offset is not None})

    def give_up(self, offset: int) -> None:
        """Write to disk that readers may have seen records below `offset` which are about to be cut. Raises OSError."""
        self._check_open()
        if offset > self._directory.given_up(self.name):
            self._directory.remember(self.name, {_GIVEN_UP: offset})
        self._directory.sync_checkpoints()

    def lower_to_end(self, log_end_offset: int) -> None:
        """Lower the log's start to `log_end_offset`, on disk: the log was cut there.

        Only after the cut: until then the start hides what goes.
        """
        if (self.log_start_offset or 0) > log_end_offset:
            self.checkpoint(log_start_offset=log_end_offset)
            self.sync_checkpoints()

    def sync_checkpoints(self, max_age_ms: int = 0) -> bool:
        """Put the remembered numbers of every log on disk; see LogDirectory.sync_checkpoints."""
        self._check_open()
        return self._directory.sync_checkpoints(max_age_ms)

    def sync_checkpoints_soon(self, delay_ms: int = _SOON_MS) -> None:
        """The same in the background, in `delay_ms` or later."""
        self._directory.sync_checkpoints_soon(delay_ms)

    def close(self, clean: CleanLog | None = None) -> None:
        """The log is closed. clean: every byte of it is flushed, and the directory's last release lists it in the
        marker; None: it is poisoned or damaged, or its opening failed.
        """
        self._check_open()
        self._directory.detach(self.name, clean)
        self._closed = True
        del self._entry

    def _check_open(self) -> None:
        self._directory.check_usable()
        if self._closed:
            raise LogClosed(self.path)


class _Registry:
    """The directories that this process holds, by file system and real path."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Weak references: a directory that nobody holds any more (as simulated ones are left) is not kept.
        self.held: WeakValueDictionary[tuple[int, str], LogDirectory] = WeakValueDictionary()

    def after_fork_in_child(self) -> None:
        self.lock = threading.Lock()  # another thread of the parent may hold it
        for directory in self.held.values():
            directory.disown()
        self.held.clear()


_REGISTRY = _Registry()
os.register_at_fork(after_in_child=_REGISTRY.after_fork_in_child)


def create_logs(held: LogDirectory, wanted: Mapping[str, UUID], *, has_replicas: bool = False) -> None:
    """Make these logs, each with its id, where their names are free; on disk when this returns.

    has_replicas: as they will be opened. Then their first epoch writes the list of epochs, which does not exist before.
    Raises OSError: some may be made then, and some in part. LogLocked for one that is open.
    """
    missing = {name: log_id for name, log_id in wanted.items() if held.forget_missing(name)}
    if not missing:
        return
    filesystem, ids = held.filesystem, {held.path / name: log_id for name, log_id in missing.items()}
    filesystem.make_directories(ids)
    epochs = () if has_replicas else epochs_files(LeaderEpochs().assigned(0, 0))
    with ManyFiles(filesystem, held.clock, list(ids)) as files:
        metadata = [(path / PARTITION_METADATA_NAME, encode_partition_metadata(one)) for path, one in ids.items()]
        files.write_beside([*metadata, *((path / name, data) for path in ids for name, data in epochs)])
        for path in ids:
            put_in_place(filesystem, path / PARTITION_METADATA_NAME)
            for suffix in (LOG_SUFFIX, TIME_INDEX_SUFFIX, INDEX_SUFFIX):
                filesystem.open(segment_path(path, 0, suffix), create=True).close()
            for name, _ in epochs:
                put_in_place(filesystem, path / name)
        files.sync_directories(list(ids))
    held.note_created(missing)
