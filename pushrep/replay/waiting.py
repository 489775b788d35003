"""Waits of a replay: for a node's socket, and at the tip of a log that another process writes.

Both wait in a thread or in an event loop, until there is something, `wake` is called, or the time is over. At the tip:

    a write ─▶ look at once ─▶ not there yet: its end is published a moment later, its flush and its watermark some
                               milliseconds later, without an event ─▶ look again: soon, then less and less often
"""

import asyncio
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pushrep.env import READABLE, REAL_NETWORK, Filesystem, Network, Poller, Watch


class ReplayWaiter:
    """For one thread or task at a time; `wake` may come from any. With a socket of None only `wake` ends a wait."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._poller: Poller | None = None  # made by the first wait, because it needs descriptors
        self._polled: Any = None  # the registered socket: once, not at every wait
        self._async_wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        # A closed poller's descriptors may be reused at once, so no wait or wake may use it then.
        self._waits, self._wakes = threading.RLock(), threading.RLock()
        self._is_woken = False  # set by `wake`, for a wait that has not begun yet
        self._is_closed = False

    def wait(self, sock: Any, timeout_s: float) -> None:
        """Wait until `sock` is readable, `wake` is called, or the time is over. Does not wait once it is closed."""
        with self._waits:
            if self._is_closed:
                return
            if self._poller is None:
                self._poller = self._network.poller()
            if sock is not self._polled:
                self._release()
                if sock is not None:
                    self._poller.register(sock, READABLE, self)
                    self._polled = sock
            self._poller.select(0 if self._is_woken or _has_decrypted(sock) else timeout_s)
            self._is_woken = False

    async def wait_async(self, sock: Any, timeout_s: float) -> None:
        """The same in an event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._async_wake = (loop, event)
        if self._is_woken or _has_decrypted(sock):
            event.set()
        descriptor = sock.fileno() if sock is not None else -1
        if descriptor >= 0:
            loop.add_reader(descriptor, event.set)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            self._async_wake, self._is_woken = None, False
            if descriptor >= 0:
                loop.remove_reader(descriptor)

    def wake(self) -> None:
        """End the wait, or the next one."""
        self._is_woken = True
        with self._wakes:
            if self._poller is not None:
                self._poller.wake()
        if self._async_wake is not None:
            loop, event = self._async_wake
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Close it; wakes a wait in another thread, which has ended when this returns."""
        self._is_closed = True
        self.wake()
        with self._waits, self._wakes:
            if self._poller is not None:
                self._release()
                self._poller.close()
                self._poller = None

    def _release(self) -> None:
        if self._polled is not None and self._poller is not None:
            with suppress(KeyError, ValueError):  # it was closed meanwhile
                self._poller.unregister(self._polled)
        self._polled = None


def _has_decrypted(sock: Any) -> bool:
    """Whether TLS has decrypted bytes that the poller does not see."""
    return isinstance(sock, ssl.SSLSocket) and sock.fileno() >= 0 and sock.pending() > 0


_AT_ONCE_S, _AT_ONCE = 0.000_1, 2
"""A write is published microseconds later, unless its writer loses the processor in between."""
_SOON_S, _SOON = 0.001, 16
"""About how long a flush takes, or a watermark to arrive."""
_SELDOM_S, _HARDLY_S = 0.05, 0.5
"""For changes without an event, and to notice that the log is gone."""


class Listening:
    """For one thread or task at a time; any may call `wake`. Without a watch it polls."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory, filesystem
        self._waiting = ReplayWaiter(REAL_NETWORK)
        self._watch: Watch | None = None
        self._is_begun = False
        self._looks = 0

    def wait(self, timeout_s: float, *, needs_write: bool = False) -> None:
        """Wait until there may be news, `wake` is called, or the time is over. needs_write: only a write can bring
        news.
        """
        pause_s = min(self._pause_s(needs_write=needs_write), timeout_s)
        if pause_s < _SOON_S:  # below what a poller can wait
            time.sleep(pause_s)
        else:
            with suppress(ValueError, OSError):  # closed in this moment: the next look finds that it is over
                self._waiting.wait(self._watch, pause_s)
        self._on_change()

    async def wait_async(self, timeout_s: float, *, needs_write: bool = False) -> None:
        """The same in an event loop."""
        pause_s = max(_SOON_S, self._pause_s(needs_write=needs_write))
        await self._waiting.wait_async(self._watch, min(pause_s, timeout_s))
        self._on_change()

    def wake(self) -> None:
        """End the wait, or the next one."""
        self._waiting.wake()

    def found(self) -> None:
        """News were found: more may come soon, and without an event, as the kernel reports several writes at once."""
        self._looks = _AT_ONCE

    def close(self) -> None:
        """Close the watch; a wait ends."""
        self._is_begun = True
        self._waiting.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _pause_s(self, *, needs_write: bool) -> float:
        if not self._is_begun:  # a replay that never comes to the tip needs no watch
            self._is_begun, self._watch = True, self._filesystem.watch(self._directory)
            return 0  # what was written before it
        self._looks += 1
        if self._looks <= _AT_ONCE:
            return _AT_ONCE_S
        if self._looks <= _AT_ONCE + _SOON:
            return _SOON_S
        if needs_write and self._watch is not None:
            return _HARDLY_S
        return min(_SELDOM_S, _SOON_S * (1 << min(self._looks - _AT_ONCE - _SOON, 10)))  # doubling

    def _on_change(self) -> None:
        watch = self._watch
        if watch is not None and watch.has_changed():
            self._looks = 0
