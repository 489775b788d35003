"""How full may the disk be, what does a log do at each level, and which blocks are reserved for a full disk?

    used      0 ... 75 ......... 85 ......... 90 ... 100 %        (LogConfig: disk_warn_percent and so on)
    and free    < 40       < 20       < 10 GiB                    (LogConfig: disk_warn_free_bytes and so on)
    level       ROOM    TIGHT       PRESSED      FULL
                        a warning   leases are   appends are refused, too; until it is below PRESSED again
                                    broken, retention runs at once

A limit is reached when both hold: the percentage rules on a disk of less than some 100 GiB, the free bytes on a larger
one, which at 90 % may have a terabyte left.

    level before   below TIGHT   TIGHT    PRESSED    FULL
    ROOM           ROOM          TIGHT    PRESSED    FULL
    TIGHT          ROOM          TIGHT    PRESSED    FULL
    PRESSED        ROOM          TIGHT    PRESSED    FULL
    FULL           ROOM          TIGHT    FULL       FULL

FULL alone depends on the level before: a log that accepted appends again at 89.9 % would soon refuse them again. On a
disk without free blocks the system refuses the write, whatever the level (AppendFailed).

`disk_level` is the table, `DiskWatch` asks the system, once a second at most for all logs of a directory.
`DiskHeadroom` reserves a few blocks, so that operations which free space work on a full disk:

    <directory of logs>/.pushrep_reserve     64 KiB and 128 bytes a log, allocated, never read

    truncate, purge, retention, opening, closing ─ write a checkpoint beside the old one ─▶ no room?
        ─▶ give the reserve up ─▶ write again, rename: the old file's blocks are free ─▶ take the reserve back

Without it an operator could not even cut a log, because the checkpoints have to be lowered first. Appends never use it.
If it could not be made, or another program took the blocks, the error says what to do.

Threads that wait for a disk, for everything in this process that writes to one file system.

    an outbox's writers  ─▶ submit(call)     ─┐
    a request to a node  ─▶ run_all(calls)   ─┴▶ queue ─▶ threads, one more whenever a call waits, up to `count_max`
                              └ the caller's thread takes calls, too

Syncs of different files run beside each other: a disk takes several at once, and a journalling file system commits once
for all that wait. One call each, so a failed sync is known by its file (docs/internals/decisions/0013).

A disk that hangs blocks only the threads of its own file system, and no `run_all` for another one. The threads end with
the last user.

`ManyFiles` writes many files that are of use only together: if the file system can be synced as a whole
(`Filesystem.whole_sync`), one call syncs all of them; else each file is synced, in several threads.
"""

import errno
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import closing, suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Generic, NamedTuple, TypeVar

from filtering.closing import ClosedAtExit
from pushrep.env import SYSTEM_CLOCK, Clock, DiskUsage, Filesystem, shared_by_process, write_beside
from pushrep.env.filesystem import NO_PLAIN_FILE
from pushrep.log.config import DiskLimits
from pushrep.log.errors import NO_ROOM, AppendFailed, NoRoomToCut

_LOG = logging.getLogger("pushrep.log")


class DiskLevel(IntEnum):
    """How full the disk is, by a log's own limits; a higher level includes what the lower ones do."""

    ROOM = 0
    """Nothing to do."""
    TIGHT = 1
    """A warning is logged."""
    PRESSED = 2
    """Leases are broken and retention runs at once."""
    FULL = 3
    """Appends are refused."""


def above_limit(path: Path, usage: DiskUsage, limits: DiskLimits) -> AppendFailed:
    """Refuses an append while the disk is fuller than the settings allow, until it is below the pressed limit."""
    remedy = (
        f"free space (pushrep log purge, retention_ms) until it is below disk_pressed_percent={limits.pressed_percent} "
        f"or has more than disk_pressed_free_bytes={limits.pressed_free_bytes}, or set disk_refuse_percent="
        f"{limits.refuse_percent} higher or disk_refuse_free_bytes={limits.refuse_free_bytes} lower"
    )
    used = f"{usage.used_bytes} of {usage.total_bytes} bytes are used, {usage.used_percent:.1f} %"
    return AppendFailed(path, OSError(errno.ENOSPC, f"the disk is too full: {used}"), remedy)


def disk_level(before: DiskLevel, usage: DiskUsage, limits: DiskLimits) -> DiskLevel:
    """The level at this usage, coming from level `before`."""
    used, free = usage.used_percent, usage.free_bytes
    if used >= limits.refuse_percent and free <= limits.refuse_free_bytes:
        return DiskLevel.FULL
    if used >= limits.pressed_percent and free <= limits.pressed_free_bytes:
        return DiskLevel.FULL if before is DiskLevel.FULL else DiskLevel.PRESSED
    is_tight = used >= limits.warn_percent and free <= limits.warn_free_bytes
    return DiskLevel.TIGHT if is_tight else DiskLevel.ROOM


LOOK_MS = 1000

_WHAT_HAPPENS = {
    DiskLevel.TIGHT: "free space soon",
    DiskLevel.PRESSED: "leases are broken and retention runs now",
    DiskLevel.FULL: "appends are refused",
}


SYNC_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""A disk with a battery-backed cache syncs in 0.1 ms, an SSD in 1 ms, a spinning disk in 10 ms; above 1 s something is
wrong.
"""


class Durations:
    """A histogram of durations with these upper bounds; the last class has none. Only one thread adds."""

    def __init__(self, bounds_s: Sequence[float] = SYNC_BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """The count of each class, and the sum of all seconds."""
        return tuple(self._counts), self._sum_s


class DiskStatus(NamedTuple):
    """The file system of logs, by its mount point. level: the worst by the limits of any of its logs; since_ms: when it
    became so, wall clock.
    """

    mount: str
    used_bytes: int
    size_bytes: int
    level: DiskLevel
    since_ms: int


class DiskWatch:
    """The level of one disk by any limits. Thread-safe."""

    def __init__(self, path: Path, filesystem: Filesystem, clock: Clock) -> None:
        self.path, self._filesystem, self._clock = path, filesystem, clock
        self._lock = threading.Lock()
        self._looked_ms: int | None = None
        self.usage = DiskUsage(0, 1)
        """The usage as of the last look; it stays while the disk does not answer."""
        self._levels: dict[DiskLimits, tuple[DiskLevel, int]] = {}  # and since when, wall clock
        self.syncs = Durations()
        self._syncs_lock = threading.Lock()

    def timed(self, sync: Callable[[], None]) -> None:
        """Call `sync` and count its duration, also if it fails. Raises as `sync`."""
        started_s = perf_counter()
        try:
            sync()
        finally:
            with self._syncs_lock:
                self.syncs.add(perf_counter() - started_s)

    def status(self, limits: Collection[DiskLimits]) -> DiskStatus:
        """How full it is now, and the level that logs with these limits are at."""
        with self._lock:
            self._look()
        for one in limits:
            self.level(one)
        with self._lock:
            levels, usage = [self._levels[one] for one in limits], self.usage
        worst = max(levels, key=lambda one: (one[0], -one[1]), default=(DiskLevel.ROOM, 0))
        return DiskStatus(mount_of(self.path), usage.used_bytes, usage.total_bytes, *worst)

    def level(self, limits: DiskLimits, *, max_age_ms: int = LOOK_MS) -> DiskLevel:
        """The level now, by a look that is at most `max_age_ms` old. A disk that can't be asked keeps its level."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= max_age_ms:
                self._looked_ms = now_ms
                self._look()
            before, _ = self._levels.get(limits, (DiskLevel.ROOM, 0))
            level = disk_level(before, self.usage, limits)
            if level is not before or limits not in self._levels:
                self._levels[limits] = level, self._clock.wall_ms()
            if level > before:
                used = f"{self.usage.used_bytes} of {self.usage.total_bytes} bytes, {self.usage.used_percent:.1f} %"
                _LOG.warning("the disk of %s is filling (%s): %s", self.path, used, _WHAT_HAPPENS[level])
            return level

    def _look(self) -> None:
        try:
            self.usage = self._filesystem.usage(self.path)
        except OSError as error:
            _LOG.warning("%s: how full the disk is can't be read: %s", self.path, error)


def mount_of(path: Path) -> str:
    """Where the file system of `path` is mounted."""
    at = Path(os.path.realpath(path))
    while not at.is_mount():
        at = at.parent
    return str(at)


RESERVE_NAME = ".pushrep_reserve"
RESERVE_BYTES_MIN = 64 << 10  # sixteen blocks: each small file needs one, and the directory may need one for a name
_BYTES_A_LOG = 128  # two lines in each file that lists all logs: in the old file and in the new one

_PARTS = 16

_Answer = TypeVar("_Answer")


class DiskHeadroom:
    """The disk reserve of one directory of logs, for the holder of its lock. Thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, logs: int) -> None:
        self._path, self._filesystem = directory / RESERVE_NAME, filesystem
        self._size_bytes = RESERVE_BYTES_MIN + _BYTES_A_LOG * logs
        self._lock = threading.Lock()  # not held during `write`, which takes other locks
        self._users = 0
        self._fill()

    def call(self, write: Callable[[], _Answer]) -> _Answer:
        """Call `write` and return its result; if the disk is full, free the reserve and call it again.

        So `write` must be repeatable. Raises what it raises; ENOSPC and EDQUOT (as OSError, or as NoRoomToCut) only
        from the second call.
        """
        try:
            return write()
        except (OSError, NoRoomToCut) as error:
            if error.errno not in NO_ROOM or not self._begin():
                raise
        try:
            return write()
        finally:
            self._end()

    def _begin(self) -> bool:
        """Free the reserve; False if there is none."""
        with self._lock:
            if not self._users and not self._empty():
                return False
            self._users += 1
            return True

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._fill()

    def _empty(self) -> bool:
        with suppress(OSError), closing(self._filesystem.open(self._path)) as file:
            if file.size():
                file.truncate(0)
                return True
        return False

    def _fill(self) -> None:
        """Allocate as much of the reserve as fits; the next opening or use tries again. Raises OSError for a path that
        can't be a plain file.
        """
        try:
            file = self._filesystem.open(self._path, create=True)
        except OSError as error:
            if error.errno in NO_PLAIN_FILE:
                raise
            return
        try:
            # In steps: if another program took a block meanwhile, most of the reserve still fits.
            for part in range(_PARTS, 0, -1):
                with suppress(OSError):
                    file.allocate(self._size_bytes * part // _PARTS)
                    return
        finally:
            file.close()


_T = TypeVar("_T")
SYNCS_AT_ONCE = 16
"""With 10 ms a sync, 1,000 files are on disk in 0.6 s; on a fast disk more threads gain little."""
_JOIN_S = 1.0
_WORTH_IT = 4


class DiskThreads:
    """Carries out calls that may wait for the disk. Thread-safe; made by `disk_threads`, given back by `release`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        # A queue in C: Ctrl-C in the submitting thread can't leave it locked.
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self.submit = self._calls.put
        """Queue this call, which must not raise, for another thread. Never waits."""
        self._grow()

    def run_all(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """The results of the calls, in their order. They run concurrently, some of them in this thread.

        Returns when all have ended; raises the error of the first that failed, in their order.
        """
        if not calls:
            return []
        shared = _SharedCalls(calls)
        for _ in range(min(len(calls), self._count_max) - 1):
            self.submit(shared.work)
        shared.work()
        return shared.results()

    def end(self) -> None:
        """End the threads; nothing may be submitted any more. A thread that waits for a hanging disk ends when that
        answers.
        """
        with self._lock:
            self._ended = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        deadline_s = monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - monotonic()))

    def _grow(self) -> None:
        with self._lock:
            if self._ended or len(self._threads) >= self._count_max:
                return
            name = f"pushrep-disk-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            with suppress(RuntimeError):  # the system has no thread left: the others go on
                thread.start()
                self._threads.append(thread)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._calls.empty():
                self._grow()
            try:
                call()
            except Exception:  # noqa: BLE001 - a bug of ours: other calls wait behind this one
                _LOG.exception("a call in a disk thread failed; the thread goes on")
            del call  # else the last reference to something large stays until the next call


class _SharedCalls(Generic[_T]):
    """Calls that several threads carry out together."""

    def __init__(self, calls: Sequence[Callable[[], _T]]) -> None:
        self._calls = deque(enumerate(calls))
        self._results: dict[int, _T] = {}
        self._errors: dict[int, BaseException] = {}
        self._count, self._lock, self._done = len(calls), threading.Lock(), threading.Event()

    def work(self) -> None:
        """Take calls until none is left."""
        while True:
            try:
                at, call = self._calls.popleft()
            except IndexError:
                return
            try:
                self._results[at] = call()
            except BaseException as error:  # noqa: BLE001 - `results` raises it
                self._errors[at] = error
            with self._lock:
                if len(self._results) + len(self._errors) == self._count:
                    self._done.set()

    def results(self) -> list[_T]:
        self._done.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[at] for at in range(self._count)]


_OF_DISKS = shared_by_process(DiskThreads.end)


def disk_threads(filesystem: Filesystem, directory: Path, count_max: int = SYNCS_AT_ONCE) -> DiskThreads:
    """The threads of the file system that holds `directory`, shared by callers: each calls `release_disk_threads`."""
    key: Hashable = (id(filesystem), _device_of(directory), count_max)
    return _OF_DISKS.acquire(key, lambda: DiskThreads(count_max), keep=filesystem)


def release_disk_threads(threads: DiskThreads) -> None:
    """Release the threads; the last release ends them."""
    _OF_DISKS.release(threads)


def run_beside_each_other(
    filesystem: Filesystem, clock: Clock, directory: Path, calls: Sequence[Callable[[], object]]
) -> None:
    """Run calls that wait for the disk of `directory` concurrently. Raises as `DiskThreads.run_all`.

    With a simulated clock one after the other, so that a run is repeatable.
    """
    if len(calls) < _WORTH_IT or clock is not SYSTEM_CLOCK:
        for call in calls:
            call()
        return
    threads = disk_threads(filesystem, directory)
    try:
        threads.run_all(calls)
    finally:
        release_disk_threads(threads)


class ManyFiles(ClosedAtExit):
    """Writes files in one or more directories and syncs them together. A context manager."""

    def __init__(self, filesystem: Filesystem, clock: Clock, directories: Sequence[Path]) -> None:
        """directories: existing ones, at least one."""
        self._filesystem, self._clock, self._directory = filesystem, clock, directories[0]
        is_one = len(directories) >= _WORTH_IT and len(set(map(_device_of, directories))) == 1
        self._whole = filesystem.whole_sync(self._directory) if is_one else None

    def close(self) -> None:
        """Close the file system's sync."""
        if self._whole is not None:
            self._whole.close()

    def write_beside(self, files: Sequence[tuple[Path, bytes]]) -> None:
        """As `pushrep.env.write_beside` for each; all are on disk when this returns. Raises OSError."""
        if self._whole is None:
            self._each([partial(write_beside, self._filesystem, path, data) for path, data in files])
            return
        for path, data in files:
            write_beside(self._filesystem, path, data, sync=False)
        self._whole.sync()

    def sync_directories(self, directories: Sequence[Path]) -> None:
        """The names in them are on disk when this returns. Raises OSError."""
        if self._whole is None:
            self._each([partial(self._filesystem.sync_directory, one) for one in directories])
        else:
            self._whole.sync()

    def _each(self, calls: Sequence[Callable[[], object]]) -> None:
        run_beside_each_other(self._filesystem, self._clock, self._directory, calls)


def _device_of(directory: Path) -> int:
    try:
        return directory.stat().st_dev
    except OSError:  # a simulated one
        return 0
