"""One connection of the replay server: never waits, sends slices of files without having their bytes in memory.

send(parts, sent) ─▶ | frame | frame | ... ─▶ flush ─▶ socket        how a slice is sent: sockets.py
                                                 └ sent(), once all of a frame has left
"""

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pushrep.env import READABLE, WRITABLE
from pushrep.replicate.sockets import AnySocket, Piece, pieces_of, send_some
from pushrep.wire.server import Call, ClientEvent, ServerConnection
from pushrep.wire.values import Part

_FRAMES_MAX = 256
"""So many answers may wait for a peer that asks and does not read; then nothing more is read of it."""
_READS_MAX = 16


class AcceptedConnection(NamedTuple):
    """A connection on which replays are asked for. calls: what was read of it already. sender: its certificate's name.

    closed: to be called once it is.
    """

    socket: AnySocket
    protocol: ServerConnection
    calls: Sequence[Call | ClientEvent]
    name: str
    sender: str
    closed: Callable[[], None]


class ReplayConnection:
    """The server's end of a connection. For one thread. Everything raises OSError once the peer is gone."""

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
        """Nothing waits to be sent."""
        return not self._frames

    @property
    def wanted_mask(self) -> int:
        """What the poller should wait for."""
        mask = READABLE if len(self._frames) < _FRAMES_MAX else 0
        return mask | WRITABLE if self._frames else mask

    def receive(self) -> list[Call | ClientEvent]:
        """What came. Raises ProtocolError; ConnectionError at its end."""
        calls: list[Call | ClientEvent] = []
        for _ in range(_READS_MAX):
            try:
                count = self.socket.recv_into(self.protocol.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return calls
            if count == 0:
                if not calls:
                    raise ConnectionError("the peer hung up")
                return calls  # it is met again
            calls += self.protocol.buffer_updated(count)
            if calls:
                return calls if self._buffered() == 0 else calls + self._rest()
        return calls

    def _buffered(self) -> int:
        return self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) else 0

    def _rest(self) -> list[Call | ClientEvent]:
        """What TLS has decrypted already, of which the poller knows nothing."""
        calls: list[Call | ClientEvent] = []
        while self._buffered():
            calls += self.protocol.buffer_updated(self.socket.recv_into(self.protocol.get_buffer()))
        return calls

    def send(self, parts: Sequence[Part], sent: Callable[[], None] | None = None) -> None:
        """Have a frame sent; `sent` is called in `flush` once it has left."""
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
