"""The outboxes' threads: writers, which seal and write, and the sealer, which ends lingering. They share them.

Both sleep while nothing happens, and neither is woken per record: a writer once per round of a lane, the sealer once
per linger time while batches are being opened.
"""

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from pushrep.log import Durability
from pushrep.log.disk_threads import SYNCS_AT_ONCE, disk_threads, release_disk_threads
from pushrep.outbox.batch import Batch
from pushrep.seams import Clock, Filesystem, shared_by_process

if TYPE_CHECKING:
    from pushrep.outbox.lane import Lane

_BUFFERED_AT_ONCE = 4  # rounds without a sync are work for the processor: more threads only queue for the interpreter


class Writers:
    """Lets lanes write, in the order in which they became ready, in threads that all outboxes of a disk share."""

    def __init__(self, filesystem: Filesystem, directory: Path, durability: Durability) -> None:
        count_max = SYNCS_AT_ONCE if durability is Durability.FLUSHED else _BUFFERED_AT_ONCE
        self._acquire = partial(disk_threads, filesystem, directory, count_max)

    def start(self) -> None:
        """Before anything is ready."""
        self._threads = self._acquire()

    def ready(self, lane: "Lane") -> None:
        """It has something to write."""
        self._threads.submit(lane.write_round)

    def stop(self, lanes: Iterable["Lane"], timeout_s: float) -> bool:
        """True once nobody writes any of these, which take nothing more; False if the disk holds one up for longer."""
        deadline_s = monotonic() + timeout_s
        is_still = all(lane.stands_still(max(0.0, deadline_s - monotonic())) for lane in lanes)
        release_disk_threads(self._threads)
        return is_still


class Sealer:
    """Seals a batch `linger_ms` after it was begun, unless it was full before; for all outboxes that linger so long."""

    def __init__(self, linger_ms: int, clock: Clock) -> None:
        self._linger_ms, self._clock = linger_ms, clock
        # In order, as all linger alike. A queue in C: Ctrl-C in the appending thread can't leave it locked.
        self._due: SimpleQueue[tuple[int, Batch] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pushrep-sealer-{linger_ms}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread; what lingers stays as it is."""
        self._stop.set()
        self._due.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def opened(self, batch: Batch) -> None:
        """A batch was begun now."""
        self._due.put((self._clock.monotonic_ms() + self._linger_ms, batch))

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            due_ms, batch = due
            while (wait_ms := due_ms - self._clock.monotonic_ms()) > 0 and not batch.decided:
                if self._stop.wait(wait_ms / 1000):
                    return
            batch.lane.want_seal(batch)


_SEALERS = shared_by_process(Sealer.end)


def sealer_for(linger_ms: int, clock: Clock) -> Sealer:
    """The one of this process that lingers so long. Each needs a `release_sealer`."""
    return _SEALERS.acquire((linger_ms, id(clock)), lambda: Sealer(linger_ms, clock), keep=clock)


def release_sealer(sealer: Sealer) -> None:
    """Give it back; its thread ends with the last outbox."""
    _SEALERS.release(sealer)
