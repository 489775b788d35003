"""Threads that all outboxes of a process share: writers, which seal and write, and a timer, which ends lingering.

Both sleep while nothing happens, and neither is woken per record: a writer once per round of an appender, the
timer once per linger time while batches are being opened.
"""

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from pushrep.env import Clock, Filesystem, shared_by_process
from pushrep.log import Durability
from pushrep.log.disk_threads import SYNCS_AT_ONCE, disk_threads, release_disk_threads
from pushrep.outbox.batch import PendingBatch

if TYPE_CHECKING:
    from pushrep.outbox.partition_appender import PartitionAppender

_BUFFERED_AT_ONCE = 4  # rounds without a sync are work for the processor: more threads only queue for the interpreter


class WriterThreads:
    """Lets appenders write, in the order in which they became ready, in threads that all outboxes of a disk share."""

    def __init__(self, filesystem: Filesystem, directory: Path, durability: Durability) -> None:
        count_max = SYNCS_AT_ONCE if durability is Durability.FLUSHED else _BUFFERED_AT_ONCE
        self._acquire = partial(disk_threads, filesystem, directory, count_max)

    def start(self) -> None:
        """Before anything is ready."""
        self._threads = self._acquire()

    def ready(self, appender: "PartitionAppender") -> None:
        """It has something to write."""
        self._threads.submit(appender.write_round)

    def stop(self, appenders: Iterable["PartitionAppender"], timeout_s: float) -> bool:
        """True once nobody writes any of these, which take nothing more; False if the disk holds one up for longer."""
        deadline_s = monotonic() + timeout_s
        is_still = all(appender.is_idle_within(max(0.0, deadline_s - monotonic())) for appender in appenders)
        release_disk_threads(self._threads)
        return is_still


class LingerTimer:
    """Seals a batch `linger_ms` after it was begun, unless it was full before; for all outboxes that linger so long."""

    def __init__(self, linger_ms: int, clock: Clock) -> None:
        self._linger_ms, self._clock = linger_ms, clock
        # In order, as all linger alike. A queue in C: Ctrl-C in the appending thread can't leave it locked.
        self._due: SimpleQueue[tuple[int, PendingBatch] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pushrep-linger-{linger_ms}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread; open batches stay as they are."""
        self._stop.set()
        self._due.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def opened(self, batch: PendingBatch) -> None:
        """A batch was begun now."""
        self._due.put((self._clock.monotonic_ms() + self._linger_ms, batch))

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            due_ms, batch = due
            while (wait_ms := due_ms - self._clock.monotonic_ms()) > 0 and not batch.decided:
                if self._stop.wait(wait_ms / 1000):
                    return
            batch.appender.request_flush(batch)


_LINGER_TIMERS = shared_by_process(LingerTimer.end)


def linger_timer_for(linger_ms: int, clock: Clock) -> LingerTimer:
    """The one of this process that lingers so long. Each needs a `release_linger_timer`."""
    return _LINGER_TIMERS.acquire((linger_ms, id(clock)), lambda: LingerTimer(linger_ms, clock), keep=clock)


def release_linger_timer(linger_timer: LingerTimer) -> None:
    """Give it back; its thread ends with the last outbox."""
    _LINGER_TIMERS.release(linger_timer)
