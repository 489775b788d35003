"""Threads that wait for a disk, for everything in this process that writes to one file system.

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

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from pushrep.env import SYSTEM_CLOCK, Clock, Filesystem, shared_by_process, write_beside

_T = TypeVar("_T")
_LOG = logging.getLogger("pushrep.log")

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


class ManyFiles:
    """Writes files in one or more directories and syncs them together. A context manager."""

    def __init__(self, filesystem: Filesystem, clock: Clock, directories: Sequence[Path]) -> None:
        """directories: existing ones, at least one."""
        self._filesystem, self._clock, self._directory = filesystem, clock, directories[0]
        is_one = len(directories) >= _WORTH_IT and len(set(map(_device_of, directories))) == 1
        self._whole = filesystem.whole_sync(self._directory) if is_one else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
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
