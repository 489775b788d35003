"""One connection of the replay server: never waits, sends slices of files without having their bytes in memory.

send(parts, sent) ─▶ | frame | frame | ... ─▶ flush ─▶ socket        sendfile; under TLS through a buffer of 128 KiB
                                                 └ sent(), once all of a frame has left
"""

import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pushrep.protocol.server import Call, ServerConnection, Told
from pushrep.protocol.values import FileSlice, Part, size_of
from pushrep.push.sockets import AnySocket, FileIsShorter
from pushrep.seams import READABLE, WRITABLE

_TLS_BYTES = 128 << 10
_FRAMES_MAX = 256
"""So many answers may wait for a peer that asks and does not read; then nothing more is read of it."""
_READS_MAX = 16


class Handed(NamedTuple):
    """A connection on which replays are asked for. calls: what was read of it already. sender: its certificate's name.

    closed: to be called once it is.
    """

    socket: AnySocket
    protocol: ServerConnection
    calls: Sequence[Call | Told]
    name: str
    sender: str
    closed: Callable[[], None]


class Line:
    """The server's end of a connection. For one thread. Everything raises OSError once the peer is gone."""

    def __init__(self, handed: Handed) -> None:
        self.name, self.sender, self.protocol = handed.name, handed.sender, handed.protocol
        self.closed = handed.closed
        self.socket = handed.socket
        self.socket.setblocking(False)
        self.is_open = True
        self.mask = READABLE
        """What the poller was told last."""
        self._frames: deque[tuple[deque[Part], Callable[[], None] | None]] = deque()
        self._may_sendfile = not isinstance(self.socket, ssl.SSLSocket) and hasattr(self.socket, "fileno")

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._frames

    @property
    def wanted_mask(self) -> int:
        """What the poller should wait for."""
        mask = READABLE if len(self._frames) < _FRAMES_MAX else 0
        return mask | WRITABLE if self._frames else mask

    def receive(self) -> list[Call | Told]:
        """What came. Raises ProtocolError; ConnectionError at its end."""
        calls: list[Call | Told] = []
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

    def _rest(self) -> list[Call | Told]:
        """What TLS has decrypted already, of which the poller knows nothing."""
        calls: list[Call | Told] = []
        while self._buffered():
            calls += self.protocol.buffer_updated(self.socket.recv_into(self.protocol.get_buffer()))
        return calls

    def send(self, parts: Sequence[Part], sent: Callable[[], None] | None = None) -> None:
        """Have a frame sent; `sent` is called in `flush` once it has left."""
        self._frames.append((deque(part for part in parts if size_of((part,))), sent))

    def flush(self) -> None:
        """Send as much as the network takes now."""
        while self._frames:
            parts, sent = self._frames[0]
            while parts:
                try:
                    self._send_first(parts)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return
            self._frames.popleft()
            if sent is not None:
                sent()

    def _send_first(self, parts: deque[Part]) -> None:
        part = parts[0]
        if not isinstance(part, FileSlice):
            view = memoryview(part)
            if self._may_sendfile and len(parts) > 1:  # else the peer is woken for a header alone
                count = self.socket.send(view, socket.MSG_MORE)  # type: ignore[call-arg]  # it is the system's own
            else:
                count = self.socket.send(view)
            parts.popleft()
            if count < len(view):
                parts.appendleft(view[count:])
            return
        if self._may_sendfile:
            count = os.sendfile(self.socket.fileno(), part.file.fileno(), part.position, part.size_bytes)  # type: ignore[union-attr]
        else:
            data = part.file.read_at(min(part.size_bytes, _TLS_BYTES), part.position)  # type: ignore[attr-defined]
            count = self.socket.send(memoryview(data)) if data else 0
        if count == 0:
            raise FileIsShorter(f"{part.size_bytes} bytes at {part.position} are not there any more")
        parts.popleft()
        if count < part.size_bytes:
            parts.appendleft(FileSlice(part.file, part.position + count, part.size_bytes - count))

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._frames.clear()
        self.closed()
