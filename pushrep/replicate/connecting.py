"""A connection to a replica: TCP, TLS if it is wanted, ApiVersions. Blocking, each attempt within its time.

`ReplicaClient`: requests to a replica one after another, for calls once a session, not once a push.
"""

import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from filtering.closing import ClosedAtExit
from filtering.retry import Backoff, RetryPolicy
from pushrep.env import Event
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address, AnySocket, send_all, tune
from pushrep.wire.connection import CallAnswer, ClientConnection
from pushrep.wire.frames import FrameLimits, ProtocolError
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.values import Struct

S = TypeVar("S", bound=Struct)
T = TypeVar("T")
_LIMITS = FrameLimits(header_bytes_max=(1 << 24) - 1)  # for peers that we chose to ask: the largest header possible


class OpenConnection(NamedTuple):
    """A blocking socket, and its agreed protocol state."""

    sock: AnySocket
    protocol: ClientConnection


def connect(address: Address, settings: PushSettings) -> OpenConnection:
    """Raises ReplicaUnreachable with the reason: nobody listens, a wrong certificate, another protocol."""
    sock: AnySocket | None = None
    try:
        sock = settings.network.connect(address, settings.connect_timeout_ms / 1000)
        tune(sock)
        if settings.tls is not None:
            assert isinstance(sock, socket.socket), "TLS runs on the system's own sockets"
            sock = settings.tls.wrap_socket(sock, server_hostname=address.host)
        opened = OpenConnection(sock, ClientConnection(_LIMITS))
        call(opened, ApiVersionsRequest())
    except ssl.SSLCertVerificationError as error:
        _close(sock)
        raise ReplicaUnreachable(str(address), f"its certificate is refused: {error.verify_message}") from error
    except (OSError, ProtocolError, UnicodeError) as error:  # UnicodeError: no valid host name
        _close(sock)
        raise ReplicaUnreachable(str(address), _why(error, sock, settings)) from error
    except BaseException:
        _close(sock)
        raise
    return opened


def call(opened: OpenConnection, request: Struct) -> Struct:
    """Send a request and wait for the answer. After an OSError or ProtocolError the connection is unusable."""
    _, parts = opened.protocol.ask(request)
    send_all(opened.sock, parts)
    while True:
        count = opened.sock.recv_into(opened.protocol.get_buffer())
        if count == 0:
            raise ConnectionError("the replica closed the connection")
        for answer in opened.protocol.buffer_updated(count):
            if isinstance(answer, CallAnswer):
                return answer.message


def retry_connecting(
    attempt: Callable[[], T], settings: PushSettings, stop: Event, on_failure: Callable[[BaseException], None]
) -> T:
    """Call `attempt` with growing random pauses until it succeeds or `stop` is set, then raise the last error.

    on_failure: called with each error.
    """
    passing = (ReplicaUnreachable, ProtocolError, OSError)
    policy = RetryPolicy(is_retriable=lambda error: isinstance(error, passing), backoff=_backoff(settings))
    return policy.call(attempt, sleep=stop.wait, is_stopped=stop.is_set, on_failure=on_failure)


def pause_s(settings: PushSettings, failures: int) -> float:
    """The pause of `retry_connecting` after so many failures in a row, for callers that must not block."""
    return _backoff(settings).pause_s(max(1, failures))


def _backoff(settings: PushSettings) -> Backoff:
    return Backoff(settings.backoff_min_ms / 1000, settings.backoff_max_ms / 1000)


def _why(error: Exception, sock: AnySocket | None, settings: PushSettings) -> str:
    """The reason; a certificate error in plain words."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and "_ALERT_" in reason:
        said = reason.partition("_ALERT_")[2].replace("_", " ").lower()
        return f"it refuses our certificate: {said}" if "ca" in said.split() or "cert" in said else f"TLS: {said}"
    is_hung_up = isinstance(error, ConnectionError | ssl.SSLEOFError) and not isinstance(error, ConnectionRefusedError)
    if sock is not None and is_hung_up and settings.tls is not None:
        return "it hung up during or right behind the TLS handshake: it refuses our certificate, or wants no TLS"
    if sock is not None and is_hung_up:
        return f"it hung up on the first bytes, perhaps it wants TLS (PushSettings.tls): {error}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {str(reason or error).replace('_', ' ').lower()}; perhaps it does not speak TLS"
    return str(error) or type(error).__name__


def _close(sock: AnySocket | None) -> None:
    if sock is not None:
        with suppress(OSError):
            sock.close()


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
        shown = self.certificate
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
