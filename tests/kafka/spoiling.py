"""A proxy before a broker that damages batches: the broker refuses such a batch, and accepts the ones after it.

    client ─▶ SpoilingProxy ─▶ broker      a spoiled produce request has a byte of its last record's value changed

The broker answers CORRUPT_MESSAGE, after which every client sends the batch again. This represents all errors that
refuse one batch and not the next: a new leader, too few replicas in sync.
"""

import socket
import threading
from contextlib import ExitStack, suppress
from typing import Self

_PRODUCE = 0
_FROM_THE_END = 12
"""Where a record's value still is: behind it are an empty header list and, in later versions, tagged fields."""
VALUE_BYTES_MIN = 20


class SpoilingProxy:
    """`with SpoilingProxy() as proxy:` listens at `port`; say where to with `target` before anybody connects."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target = 0
        self.spoiled = 0
        self._to_spoil = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def spoil_next(self) -> None:
        """The next produce request that comes, of whomever."""
        with self._lock:
            self._to_spoil += 1

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for one in (self._listener, *self._open):
                closing.callback(_end, one)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # it is away
                    client.close()
                    continue
                self._open |= {client, broker}
                for work in (self._requests, self._answers):
                    threading.Thread(target=work, args=(client, broker), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError), client.makefile("rb") as requests:
            while size := requests.read(4):
                request = bytearray(requests.read(int.from_bytes(size)))
                if int.from_bytes(request[:2]) == _PRODUCE and self._is_to_be_spoiled():
                    request[-_FROM_THE_END] ^= 1
                broker.sendall(size + request)
        self._close(client, broker)

    def _answers(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while some := broker.recv(1 << 16):
                client.sendall(some)
        self._close(client, broker)

    def _is_to_be_spoiled(self) -> bool:
        with self._lock:
            wanted = self._to_spoil > 0
            self._to_spoil -= wanted
            self.spoiled += wanted
            return wanted

    def _close(self, *sockets: socket.socket) -> None:
        for one in sockets:
            _end(one)
        self._open.difference_update(sockets)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
    one.close()
