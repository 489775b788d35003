"""ReadingAhead: the next piece is read by a thread while the caller works on the one before.

Reading releases the interpreter, checking and decoding do not: with a second processor the one costs nothing beside
the other, and a disk works while records are looked at. One piece is under way at a time.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ReadingAhead(Generic[T]):
    """For one caller. The thread is started with the first piece, and ends with `close`."""

    def __init__(self) -> None:
        self.is_under_way = False
        """A piece was begun whose result was not asked for yet."""
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[T | OSError] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have `read(...)` done; it may raise OSError, and nothing else."""
        if self._thread is None:
            # A daemon: who abandons a replay in the middle keeps no process from ending.
            self._thread = threading.Thread(target=self._run, name="pushrep-replay-reads-ahead", daemon=True)
            self._thread.start()
        self.is_under_way = True
        self._jobs.put(lambda: read(*args, **kwargs))

    def result(self) -> T:
        """What came of it, waiting for that. Raises the OSError that it raised."""
        found = self._results.get()
        self.is_under_way = False
        if isinstance(found, OSError):
            raise found
        return found

    def close(self) -> None:
        """Wait until nothing is read any more: the file may be closed then."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put(job())
            except OSError as error:
                self._results.put(error)
