"""The network as a parameter: streams of bytes to an address, and the threads that wait for them.

The Protocols have the used methods of the standard library's sockets, so that a real socket fits. Every call raises
`OSError`; `BlockingIOError` if it would have to wait and may not, `TimeoutError` after its timeout.
"""

import os
import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol, TypeAlias

from filtering.closing import closed_on_error
from pushrep.env.threads import SYSTEM_THREADS, Threads
from pushrep.errors import BadArgument

HostPort: TypeAlias = tuple[str, int]
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE

BACKLOG = 1024
"""Connections that wait to be accepted. The system drops one that finds the queue full, and its peer asks again after
1, 3, 7 seconds: so long a good peer would wait because others came while this process had no time."""
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 20, 5, 4  # a lost peer is noticed after 40 s
_PORT_MAX = 65_535


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """`host:port`, `[v6]:port`. Raises BadArgument."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal():
            raise BadArgument("address", f"{text!r} is not host:port")
        if int(port) > _PORT_MAX:
            raise BadArgument("address", f"{text!r}: {port} is no port: give 0 to {_PORT_MAX}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def is_own_host(self, header: str) -> bool:
        """Whether a server at this address answers a request with this Host: it has the address's own host, a loopback
        name or address, or off loopback any address. Another name may be another site's that resolves to this machine
        (DNS rebinding). A zone behind "%" may be any text, and is no part of a Host (RFC 9844).
        """
        name, colon, port = header.rpartition(":")
        host = (name if colon and port.isdecimal() else header).strip("[]").lower()
        if host in {"localhost", self.host.lower()}:
            return True
        try:
            return "%" not in host and (ip_address(host).is_loopback or not self.is_loopback)
        except ValueError:
            return False


class Socket(Protocol):
    """One end of a stream: bytes arrive whole and in order, or the stream breaks."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """How many bytes were read, at least 1; 0: the peer sends no more."""
        ...

    def send(self, data: memoryview, /) -> int:
        """How many bytes were taken, from the front."""
        ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """The same for several pieces."""
        ...

    def setblocking(self, flag: bool, /) -> None: ...  # noqa: FBT001 - the standard library's signature
    def settimeout(self, value: float | None, /) -> None:
        """Seconds that one call may wait; None: for ever."""
        ...

    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...
    def shutdown(self, how: int, /) -> None:
        """End one direction or both; calls that wait in other threads return."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """A listening socket."""

    def accept(self) -> tuple[Socket, Any]:
        """The next connection, and where it comes from; waits for it. OSError once it is shut down or closed."""
        ...

    def getsockname(self) -> Any:
        """(host, port, ...) as others reach it."""
        ...

    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


def tune(sock: Any) -> None:
    """Send small frames at once, and notice a lost peer while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Ready(NamedTuple):
    """A socket that can be read or written (`mask`), by what it was registered with."""

    data: Any
    mask: int


class Poller(Protocol):
    """Waits for many sockets at once. One thread registers and selects; `wake` is for all others."""

    def register(self, sock: Any, mask: int, data: Any) -> None: ...
    def modify(self, sock: Any, mask: int, data: Any) -> None: ...
    def unregister(self, sock: Any) -> None: ...
    def select(self, timeout_s: float | None) -> list[Ready]:
        """What is ready; nothing after `timeout_s` or `wake`. None waits for ever."""
        ...

    def wake(self) -> None:
        """End the `select` that waits now, or the next one."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    """Opens and accepts connections. `threads`: those that wait for them."""

    @property
    def threads(self) -> Threads: ...
    def connect(self, address: HostPort, timeout_s: float) -> Socket:
        """A socket with this timeout for every call. OSError if nobody listens or answers within it."""
        ...

    def listen(self, address: HostPort) -> Listener:
        """Port 0 lets the system choose. OSError if it is taken."""
        ...

    def poller(self) -> Poller: ...


class RealPoller:
    """epoll or its like, and a pipe that wakes it."""

    def __init__(self) -> None:
        self._pipe: tuple[int, ...] = ()
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._reader, READABLE, None)

    def register(self, sock: Any, mask: int, data: Any) -> None:
        self._selector.register(sock, mask, data)

    def modify(self, sock: Any, mask: int, data: Any) -> None:
        self._selector.modify(sock, mask, data)

    def unregister(self, sock: Any) -> None:
        self._selector.unregister(sock)

    def select(self, timeout_s: float | None) -> list[Ready]:
        ready = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._reader, 4096)
            else:
                ready.append(Ready(key.data, mask))
        return ready

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._writer, b"\0")

    def close(self) -> None:
        self._selector.close()
        pipe, self._pipe = self._pipe, ()
        for descriptor in pipe:
            os.close(descriptor)

    def __del__(self) -> None:
        if self._pipe:  # of a replay that is over, which need not be closed
            self.close()


class RealNetwork:
    """TCP of the operating system, with its threads."""

    threads: Threads = SYSTEM_THREADS

    def connect(self, address: HostPort, timeout_s: float) -> Socket:
        return socket.create_connection(address, timeout_s)

    def listen(self, address: HostPort) -> Listener:
        family, kind, proto, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with closed_on_error(socket.socket(family, kind, proto)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(BACKLOG)
        return listener

    def poller(self) -> Poller:
        return RealPoller()


REAL_NETWORK: Network = RealNetwork()
