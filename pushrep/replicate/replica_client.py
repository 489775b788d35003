"""ReplicaClient: requests to a replica one after another, for calls once a session, not once a push."""

import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from filtering.closing import ClosedAtExit
from pushrep.replicate.connecting import OpenConnection, call, connect
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire.calls import ApiKey
from pushrep.wire.errors import NoCommonVersion, NotInVersion, ProtocolError
from pushrep.wire.push_messages import DescribeLogResponse, GrantResponse
from pushrep.wire.values import Struct

S = TypeVar("S", bound=Struct)
_NAMES_DIRECTORIES, _CARRIES_HOLDS = 2, 3
"""The version of Grant with these fields."""


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
        except (OSError, ProtocolError, NotInVersion) as error:
            raise ReplicaUnreachable(str(self.address), str(error) or type(error).__name__) from error
        if not isinstance(found, answer):
            raise ReplicaUnreachable(str(self.address), f"it answered with {type(found).__name__}")
        return found

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The replica's certificate, as `getpeercert` gives it; empty without TLS."""
        sock = self._opened.sock if self._opened is not None else None
        return (sock.getpeercert() or {}) if isinstance(sock, ssl.SSLSocket) else {}

    def speaks(self, key: ApiKey) -> bool:
        """Whether the replica knows this call; an older one may not."""
        return self._version_of(key) is not None

    def directory_in(self, answer: DescribeLogResponse | GrantResponse) -> UUID | None:
        """The directory that it shows; None without one, or for an older node, which would not store a grant that names
        it.
        """
        return answer.directory_id if self._grant_version >= _NAMES_DIRECTORIES else None

    @property
    def carries_holds(self) -> bool:
        """Whether it stores the hold and takeover of a grant; an older node drops them."""
        return self._grant_version >= _CARRIES_HOLDS

    @property
    def _grant_version(self) -> int:
        return self._version_of(ApiKey.GRANT) or 0

    def _version_of(self, key: ApiKey) -> int | None:
        assert self._opened is not None, "it was not handed over"
        versions = self._opened.protocol.versions
        assert versions is not None, "they were agreed on"
        try:
            return versions.version_of(key)
        except NoCommonVersion:
            return None

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
