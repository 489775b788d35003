"""Waiting for a socket, in a thread or in an event loop, until others say that it is enough."""

import asyncio
from contextlib import suppress
from typing import Any

from pushrep.seams import READABLE, Network, Poller


class Waiting:
    """For one thread or task at a time; `wake` may come from any. A socket of None is waited for in vain."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._poller: Poller | None = None  # made by who waits: it costs descriptors
        self._async_wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def wait(self, sock: Any, timeout_s: float) -> None:
        """Until `sock` can be read, `wake`, or the time is over."""
        if self._poller is None:
            self._poller = self._network.poller()
        if sock is None:
            self._poller.select(timeout_s)
            return
        self._poller.register(sock, READABLE, self)
        try:
            self._poller.select(timeout_s)
        finally:
            self._poller.unregister(sock)

    async def wait_async(self, sock: Any, timeout_s: float) -> None:
        """The same in an event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._async_wake = (loop, event)
        descriptor = sock.fileno() if sock is not None else -1
        if descriptor >= 0:
            loop.add_reader(descriptor, event.set)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            self._async_wake = None
            if descriptor >= 0:
                loop.remove_reader(descriptor)

    def wake(self) -> None:
        """End the wait."""
        if self._poller is not None:
            self._poller.wake()
        if self._async_wake is not None:
            loop, event = self._async_wake
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Let go."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None
