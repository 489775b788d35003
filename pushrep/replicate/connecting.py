"""A connection to a replica, and when to connect again.

`ReplicaClient`: requests to a replica one after another, for calls once a session, not once a push.
"""

import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from filtering.retry import Backoff, RetryPolicy
from pushrep.env import Event
from pushrep.env.network import Address
from pushrep.replay.node_connection import NodeAccess, NodeConnection, NodeUnreachable
from pushrep.replicate.settings import PushSettings
from pushrep.wire.frames import ProtocolError

T = TypeVar("T")


def retry_connecting(
    attempt: Callable[[], T], settings: PushSettings, stop: Event, on_failure: Callable[[BaseException], None]
) -> T:
    """Call `attempt` with growing random pauses until it succeeds or `stop` is set, then raise the last error.

    on_failure: called with each error.
    """
    passing = (NodeUnreachable, ProtocolError, OSError)
    policy = RetryPolicy(is_retriable=lambda error: isinstance(error, passing), backoff=_backoff(settings))
    return policy.call(attempt, sleep=stop.wait, is_stopped=stop.is_set, on_failure=on_failure)


def pause_s(settings: PushSettings, failures: int) -> float:
    """The pause of `retry_connecting` after so many failures in a row, for callers that must not block."""
    return _backoff(settings).pause_s(max(1, failures))


def _backoff(settings: PushSettings) -> Backoff:
    return Backoff(settings.backoff_min_ms / 1000, settings.backoff_max_ms / 1000)


class ReplicaClient(NodeConnection):
    """A connection to a replica, whose answers it waits for. Raises NodeUnreachable."""

    def __init__(self, address: Address, settings: PushSettings | None = None) -> None:
        settings = settings or PushSettings()
        access = NodeAccess(
            tls=settings.tls,
            connect_timeout_ms=settings.connect_timeout_ms,
            request_timeout_ms=settings.request_timeout_ms,  # the node may have to open many logs
            network=settings.network,
        )
        self._is_handed_over = False
        super().__init__(address, access)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The replica's certificate, as `getpeercert` gives it; empty without TLS."""
        return (self.socket.getpeercert() or {}) if isinstance(self.socket, ssl.SSLSocket) else {}

    def certificate_expires_s(self) -> int | None:
        """When the replica's certificate expires, Unix time; None without TLS."""
        shown = self.certificate
        return int(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if "notAfter" in shown else None

    def hand_over(self) -> "ReplicaClient | None":
        """For the caller to use its socket, and close that; None if it was handed over before."""
        was_before, self._is_handed_over = self._is_handed_over, True
        return None if was_before else self

    def cut(self) -> None:
        """Make a call fail that waits in another thread."""
        if not self._is_handed_over:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, unless it was handed over."""
        if not self._is_handed_over:
            super().close()
