"""One connection of the replay server: never waits, and sends slices of files without reading them into memory.

send(parts, sent) ─▶ | frame | frame | ... ─▶ flush ─▶ socket        how a slice is sent: sockets.py
                                                 └ sent(), once all of a frame has left
"""

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pushrep.env import READABLE, WRITABLE
from pushrep.replicate.sockets import AnySocket, Piece, pieces_of, send_some
from pushrep.wire.connection import Call, ClientEvent, ServerConnection
from pushrep.wire.values import Part

_FRAMES_MAX = 256
"""How many unsent answers a connection may have; with more, nothing is read from it."""
_READS_MAX = 16


class AcceptedConnection(NamedTuple):
    """A connection with replay calls. calls: those already read. sender: its identity.

    closed: to be called when it is closed.
    """

    socket: AnySocket
    protocol: ServerConnection
    calls: Sequence[Call | ClientEvent]
    name: str
    sender: str
    closed: Callable[[], None]


class ReplayConnection:
    """The server's end of a connection. For one thread. Everything raises OSError once the peer has disconnected."""

    def __init__(self, handed: AcceptedConnection) -> None:
        self.name, self.sender, self.protocol = handed.name, handed.sender, handed.protocol
        self.closed = handed.closed
        self.socket = handed.socket
        self.socket.setblocking(False)
        self.is_open = True
        self.mask = READABLE
        """What the poller was asked for last."""
        self._frames: deque[tuple[list[Piece], Callable[[], None] | None]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._frames

    @property
    def wanted_mask(self) -> int:
        """What the poller should wait for."""
        mask = READABLE if len(self._frames) < _FRAMES_MAX else 0
        return mask | WRITABLE if self._frames else mask

    def receive(self) -> list[Call | ClientEvent]:
        """The received calls. Raises ProtocolError; ConnectionError at the end of the stream."""
        calls: list[Call | ClientEvent] = []
        for _ in range(_READS_MAX):
            try:
                count = self.socket.recv_into(self.protocol.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return calls
            if count == 0:
                if not calls:
                    raise ConnectionError("the peer hung up")
                return calls  # the next call meets the error again
            calls += self.protocol.buffer_updated(count)
            if calls:
                return calls if self._buffered() == 0 else calls + self._rest()
        return calls

    def _buffered(self) -> int:
        return self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) else 0

    def _rest(self) -> list[Call | ClientEvent]:
        """Bytes that TLS has decrypted already, which the poller does not see."""
        calls: list[Call | ClientEvent] = []
        while self._buffered():
            calls += self.protocol.buffer_updated(self.socket.recv_into(self.protocol.get_buffer()))
        return calls

    def send(self, parts: Sequence[Part], sent: Callable[[], None] | None = None) -> None:
        """Queue a frame; `flush` calls `sent` once it was sent."""
        self._frames.append((pieces_of(parts), sent))

    def flush(self) -> None:
        """Send as much as the network takes now."""
        while self._frames:
            pieces, sent = self._frames[0]
            while pieces:
                try:
                    send_some(self.socket, pieces)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return
            self._frames.popleft()
            if sent is not None:
                sent()

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._frames.clear()
        self.closed()
