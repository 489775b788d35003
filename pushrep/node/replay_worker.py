"""A thread for what waits for the disk: opening logs, looking up times, cutting and deleting, one after the other.

It is started with the first job, so that a node without replays has none.
"""

import logging
from collections import deque
from collections.abc import Callable

from pushrep.env import Thread, Threads

_LOG = logging.getLogger("pushrep.node")


class DiskWorker:
    """Does jobs in order. `do` and `stop` may come from any thread; a job's errors are its own."""

    def __init__(self, threads: Threads, name: str) -> None:
        self._threads, self._name = threads, name
        self._changed = threads.condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: Thread | None = None
        self._is_stopped = False

    def do(self, job: Callable[[], None]) -> None:
        """Have it done; after `stop` nothing is."""
        with self._changed:
            if self._is_stopped:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = self._threads.thread(self._run, self._name)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Finish the job that runs, forget the others."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_stopped)
                if self._is_stopped:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:  # noqa: BLE001 - a fault of one job ends no other
                _LOG.exception("a job of %s failed", self._name)
