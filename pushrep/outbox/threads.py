"""The outbox's own threads: writers, which seal and write, and the sealer, which ends lingering.

Both sleep while nothing happens, and neither is woken per record: a writer once per round of a lane, the sealer once
per linger time while batches are being opened.
"""

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pushrep.outbox.batch import Batch
from pushrep.seams import Clock

if TYPE_CHECKING:
    from pushrep.outbox.lane import Lane

WRITERS_MAX = 4  # so many flushes can be under way at once; disks gain little from more


class Writers:
    """A few threads that take lanes in the order in which they became ready."""

    def __init__(self, count: int, name: str) -> None:
        self._ready: SimpleQueue[Lane | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"pushrep-writer-{name}-{n}", daemon=True)
            for n in range(min(count, WRITERS_MAX))
        ]
        self.ready = self._ready.put

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> bool:
        """End after what is ready now; True if all threads ended within `timeout` seconds each."""
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (lane := self._ready.get()) is not None:
            lane.write_round()


class Sealer:
    """Seals a batch `linger_ms` after it was begun, unless it was full before."""

    def __init__(self, linger_ms: int, clock: Clock, name: str) -> None:
        self._linger_ms, self._clock = linger_ms, clock
        # In order, as all linger alike. A queue in C: Ctrl-C in the appending thread can't leave it locked.
        self._due: SimpleQueue[tuple[int, Batch] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pushrep-sealer-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what lingers stays as it is."""
        self._stop.set()
        self._due.put(None)
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
