"""Awaiting receipts in an event loop: no thread for each, one wake-up of the loop for many batches.

    task ─ await receipt ─▶ a future in `_waiting[batch]`        the batch is sealed at the end of the loop's iteration,
                                                                 with everything that was appended in it
    writer ─ batch decided ─▶ `_decided` ─ one call_soon_threadsafe ─▶ the loop resolves STEP futures an iteration

The futures of one batch may be many thousands: they are resolved in steps, so that other tasks run in between.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

STEP = 256  # futures resolved in one iteration: their tasks run in the next one, a few milliseconds at most


class Flushed(Protocol):
    """What a wait needs of a batch's appender."""

    @property
    def name(self) -> str: ...
    def request_flush(self, batch: Any, /) -> None: ...


class Awaited(Protocol):
    """What a wait needs of a PendingBatch."""

    @property
    def appender(self) -> Flushed: ...
    def when_decided(self, call: Callable[[], object]) -> None: ...


class LoopReceipts:
    """The batches that tasks of one event loop wait for. All but `_on_decided` runs in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Awaited, dict[asyncio.Future[None], None]] = {}
        self._to_seal: dict[Awaited, None] = {}
        self._resolving: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()  # guards `_decided` and `_is_called`
        self._decided: list[Awaited] = []
        self._is_called = False

    def future_of(self, batch: Awaited) -> "asyncio.Future[None]":
        """A future that is done once the batch is decided; the batch is not decided yet. A caller that stops waiting
        calls `gave_up`. A plain future, no coroutine: with ten thousand waiting, each full garbage collection visits
        every object.
        """
        future = self._loop.create_future()
        futures = self._waiting.get(batch)
        if futures is None:
            batch.when_decided(partial(self._on_decided, batch))  # runs after the code below: it goes through the loop
            futures = self._waiting[batch] = {}
            if not self._to_seal:
                self._loop.call_soon(self._seal)
            self._to_seal[batch] = None
        futures[future] = None
        return future

    def gave_up(self, batch: Awaited, future: "asyncio.Future[None]", error: BaseException) -> None:
        """A cancelled wait does not stop the records: a note on the error says so."""
        if (futures := self._waiting.get(batch)) is not None:
            futures.pop(future, None)
        if isinstance(error, asyncio.CancelledError):
            error.add_note(
                f"the record is on its way to {batch.appender.name} and may still be delivered: await its receipt again"
            )

    def _seal(self) -> None:
        batches, self._to_seal = self._to_seal, {}
        for batch in batches:
            batch.appender.request_flush(batch)

    def _on_decided(self, batch: Awaited) -> None:
        """Runs in the thread that decides the batch."""
        with self._lock:
            self._decided.append(batch)
            if self._is_called:
                return
            self._is_called = True
        call_in_loop(self._loop, self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            decided, self._decided = self._decided, []
            self._is_called = False
        is_under_way = bool(self._resolving)
        for batch in decided:
            self._resolving.extend(self._waiting.pop(batch, ()))
        if not is_under_way:
            self._resolve_some()

    def _resolve_some(self) -> None:
        for _ in range(min(STEP, len(self._resolving))):
            future = self._resolving.popleft()
            if not future.done():
                future.set_result(None)
        if self._resolving:
            self._loop.call_soon(self._resolve_some)


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Schedule `call` in the loop's thread. If the loop is closed, nobody waits in it, and nothing is called."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise


_OF_LOOP: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopReceipts]" = WeakKeyDictionary()
_OF_LOOP_LOCK = threading.Lock()


def receipts_of_running_loop() -> LoopReceipts:
    """Raises RuntimeError outside of a running asyncio (or uvloop) loop."""
    loop = asyncio.get_running_loop()
    with _OF_LOOP_LOCK:
        found = _OF_LOOP.get(loop)
        if found is None:
            found = _OF_LOOP[loop] = LoopReceipts(loop)
        return found
