"""A connection to a replica: TCP, TLS if it is wanted, ApiVersions. Blocking, each attempt within its time."""

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from filtering.retry import Backoff, RetryPolicy
from pushrep.env import Event
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address, AnySocket, send_all, tune
from pushrep.wire.client import CallAnswer, ClientConnection
from pushrep.wire.errors import ProtocolError
from pushrep.wire.frames import FrameLimits
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.values import Struct

T = TypeVar("T")
_LIMITS = FrameLimits(header_bytes_max=(1 << 24) - 1)  # for peers that we chose to ask: the largest header possible

BEATS_IN_FLIGHT_MAX = 2
"""One at a time, and a last one when a channel closes, which does not wait for the one before (channel.py)."""


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
        in_flight_max = settings.requests_in_flight_max + BEATS_IN_FLIGHT_MAX
        protocol = ClientConnection(in_flight_max=in_flight_max, limits=_LIMITS)
        opened = OpenConnection(sock, protocol)
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
