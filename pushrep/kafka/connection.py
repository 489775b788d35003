"""A broker's connection that writes a request in pieces: aiokafka's, but for the way of large batches to the socket.

    aiokafka    batch ─ copy ─▶ request ─ copy ─▶ behind its header ─ copy ─▶ behind its size ─▶ socket
    here        size, header, fields ─▶ socket, batch from where it lies ─▶ socket, the rest ─▶ socket

Its own send joins the parts of a request three times, each time into memory that has to be got from the system.
"""

import struct
from collections.abc import Awaitable
from typing import Any

from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.util import wait_for

from pushrep.records.model import Buffer

_SIZE = struct.Struct(">i")
_LARGE_BYTES = 16 << 10  # below, a copy is cheaper than a call of the system


class Connection(AIOKafkaConnection):  # type: ignore[misc] # aiokafka has no types
    """See the file's map."""

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
