"""Waiting for a socket, in a thread or in an event loop, until others say that it is enough."""

import asyncio
import ssl
import threading
from contextlib import suppress
from typing import Any

from pushrep.seams import READABLE, Network, Poller


class ReplayWaiter:
    """For one thread or task at a time; `wake` may come from any. A socket of None is waited for in vain."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._poller: Poller | None = None  # made by who waits: it costs descriptors
        self._polled: Any = None  # what it watches: told once, not with every wait
        self._async_wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        # Descriptors of a poller that is closed may be somebody else's: neither a wait nor a wake may be in it then.
        self._waits, self._wakes = threading.RLock(), threading.RLock()
        self._is_woken = False  # by `wake`, for whoever was not waiting yet
        self._is_closed = False

    def wait(self, sock: Any, timeout_s: float) -> None:
        """Until `sock` can be read, `wake`, or the time is over. Not at all once it is closed."""
        with self._waits:
            if self._is_closed:
                return
            if self._poller is None:
                self._poller = self._network.poller()
            if sock is not self._polled:
                self._let_go()
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
        """Let go; who waits in another thread is woken, and has left when this returns."""
        self._is_closed = True
        self.wake()
        with self._waits, self._wakes:
            if self._poller is not None:
                self._let_go()
                self._poller.close()
                self._poller = None

    def _let_go(self) -> None:
        if self._polled is not None and self._poller is not None:
            with suppress(KeyError, ValueError):  # it was closed meanwhile
                self._poller.unregister(self._polled)
        self._polled = None


def _has_decrypted(sock: Any) -> bool:
    """Whether TLS has read what the poller knows nothing of any more."""
    return isinstance(sock, ssl.SSLSocket) and sock.fileno() >= 0 and sock.pending() > 0
