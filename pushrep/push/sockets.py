"""Plain sockets, and what has to be said to them: addresses, parts of frames, peers that went without a word."""

import socket
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple, TypeAlias

from pushrep.errors import BadArgument
from pushrep.protocol.values import FileSlice, Part
from pushrep.seams import Socket

AnySocket: TypeAlias = Socket | ssl.SSLSocket

_PARTS_MAX = 512  # below IOV_MAX, which is 1024 on Linux
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 20, 5, 4  # a silent peer is given up after 40 s
_PORT_MAX = 65_535


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """`host:port`, `[v6]:port`. Raises BadArgument."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > _PORT_MAX:
            raise BadArgument("address", f"{text!r} is not host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nobody on another machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


def tune(sock: AnySocket) -> None:
    """Small frames leave at once; a peer that vanished is noticed while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def views_of(parts: Sequence[Part]) -> list[memoryview]:
    """The parts as bytes to be sent; slices of files are read."""
    views = []
    for part in parts:
        data = part.file.read_at(part.size_bytes, part.position) if isinstance(part, FileSlice) else part  # type: ignore[attr-defined]
        views.append(memoryview(data).cast("B"))
    return views


def send_some(sock: AnySocket, views: list[memoryview]) -> int:
    """Send from the front of `views`, and take what was sent off it; how much that was. Raises as `send`."""
    # An SSLSocket has no sendmsg: a record of TLS is encrypted as one piece.
    sent = sock.send(views[0]) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(views[:_PARTS_MAX])
    left, gone = sent, 0
    while gone < len(views) and left >= len(views[gone]):
        left -= len(views[gone])
        gone += 1
    del views[:gone]
    if left:
        views[0] = views[0][left:]
    return sent


def send_all(sock: AnySocket, parts: Sequence[Part]) -> None:
    """Send a frame on a socket that waits."""
    views = [view for view in views_of(parts) if len(view)]
    while views:
        send_some(sock, views)
