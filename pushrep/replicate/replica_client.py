"""ReplicaClient: requests to a replica one after another, for calls once a session, not once a push."""

import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from filtering.closing import ClosedAtExit
from pushrep.replicate.connecting import OpenConnection, call, connect
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire.errors import ProtocolError
from pushrep.wire.values import Struct

S = TypeVar("S", bound=Struct)


class ReplicaClient(ClosedAtExit):
    """A connection that waits for each answer. Not thread-safe; a context manager. Raises ReplicaUnreachable."""

    def __init__(self, address: Address, settings: PushSettings | None = None) -> None:
        self.address = address
        settings = settings or PushSettings()
        self._opened: OpenConnection | None = connect(address, settings)
        self._opened.sock.settimeout(settings.request_timeout_ms / 1000)  # the node may have to open many logs

    def ask(self, request: Struct, answer: type[S]) -> S:
        """The answer to `request`, which is an `answer`. Raises ReplicaUnreachable."""
        assert self._opened is not None, "it was not handed over"
        try:
            found = call(self._opened, request)
        except (OSError, ProtocolError) as error:
            raise ReplicaUnreachable(str(self.address), str(error) or type(error).__name__) from error
        if not isinstance(found, answer):
            raise ReplicaUnreachable(str(self.address), f"it answered with {type(found).__name__}")
        return found

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The replica's certificate, as `getpeercert` gives it; empty without TLS."""
        sock = self._opened.sock if self._opened is not None else None
        return (sock.getpeercert() or {}) if isinstance(sock, ssl.SSLSocket) else {}

    def certificate_expires_s(self) -> int | None:
        """When the replica's certificate expires, Unix time; None without TLS."""
        assert self._opened is not None, "it was not handed over"
        if not isinstance(self._opened.sock, ssl.SSLSocket):
            return None
        shown = self._opened.sock.getpeercert() or {}
        return int(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if "notAfter" in shown else None

    def hand_over(self) -> OpenConnection | None:
        """Hand the connection over, for the caller to use and close; None if it was handed over before."""
        opened, self._opened = self._opened, None
        return opened

    def cut(self) -> None:
        """Make a call fail that waits in another thread."""
        if (opened := self._opened) is not None:
            with suppress(OSError):
                opened.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, unless it was handed over."""
        if (opened := self._opened) is not None:
            with suppress(OSError):
                opened.sock.close()
