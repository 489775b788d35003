"""A broker's connection that writes a request in pieces: aiokafka's, but for the way of large batches to the socket.

    aiokafka    batch ─ copy ─▶ request ─ copy ─▶ behind its header ─ copy ─▶ behind its size ─▶ socket
    here        size, header, fields ─▶ socket, batch from where it lies ─▶ socket, the rest ─▶ socket

Its own send joins the parts of a request three times, each time into memory that has to be got from the system. What
the socket does not take at once waits in asyncio's buffer for this thread's next turn, piece by piece, and the broker
with it: so where the system allows it, the socket takes all that may be on its way.
"""

import socket
import struct
from collections.abc import Awaitable
from functools import cache
from typing import Any

from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.util import wait_for

from pushrep.records.model import Buffer

_SIZE = struct.Struct(">i")
_LARGE_BYTES = 16 << 10  # below, a copy is cheaper than a call of the system
_SEND_BUFFER_BYTES = 4 << 20


class Connection(AIOKafkaConnection):  # type: ignore[misc] # aiokafka has no types
    """See the file's map."""

    async def connect(self) -> Any:
        """As aiokafka's."""
        reader, writer = await super().connect()
        if _is_granted(_SEND_BUFFER_BYTES):
            opened = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return reader, writer

    def send_in_parts(self, request: Any) -> Awaitable[Any]:
        """As `send`; a request whose structure has `parts()` goes out by them. Raises as `send`."""
        if self._writer is None:
            raise KafkaConnectionError(f"No connection to broker at {self.host}:{self.port}")
        struct_ = request.prepare(self._versions)
        if not hasattr(struct_, "parts"):
            return self.send(request)  # type: ignore[no-any-return] # as above
        correlation_id = self._next_correlation_id()
        header = struct_.build_request_header(correlation_id=correlation_id, client_id=self._client_id).encode()
        parts = struct_.parts()
        size = len(header) + sum(map(len, parts))
        for piece in _joined([_SIZE.pack(size), header, *parts]):
            self._writer.write(piece)
        answer = self._loop.create_future()
        self._requests.append((correlation_id, struct_, answer))
        return wait_for(answer, self._request_timeout)  # type: ignore[no-any-return] # as above


def _joined(parts: list[Buffer]) -> list[Buffer]:
    """Small neighbours in one piece, large parts as they are."""
    pieces: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < _LARGE_BYTES:
            small.append(part)
            continue
        pieces += [b"".join(small), part]
        small = []
    return [*pieces, b"".join(small)] if small else pieces


@cache
def _is_granted(size_bytes: int) -> bool:
    """Whether the system lets a socket have so large a send buffer (Linux: net.core.wmem_max).

    Asked of a socket that is not used: one that gets less keeps that, and would have grown further by itself.
    """
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)
        return asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= size_bytes
