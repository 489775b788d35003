"""The sockets of a node: one thread a connection, so that a slow peer or disk holds up no other.

    accept ─▶ thread: read into the frame's own memory ─▶ calls, in order ─▶ answer each ─▶ read on
                      silent for handshake_timeout_s before it has spoken, or bytes that are no frame: closed, logged

A connection holds the records of one frame at most, because nothing more is read while a request is carried out. So
peers can make the node hold limits.frame_bytes_max for each of connections_max.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK, Clock, Listener, Network, Thread
from pushrep.env.network import tune
from pushrep.replay.slices import Buffers
from pushrep.replicate.access import identity_in
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replay_calls import REPLAY_CALLS
from pushrep.replicate.replay_server import AcceptedConnection
from pushrep.replicate.sockets import AnySocket, send_all
from pushrep.wire.calls import ApiKey, refusal
from pushrep.wire.connection import Call, ClientEvent, ServerConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import SPARE_BYTES, ProtocolError
from pushrep.wire.values import Struct

_LOG = logging.getLogger("pushrep.node")
_AGAIN_S = 0.1


class Peer:
    """A connection that is open."""

    def __init__(self, sock: AnySocket, name: str, opened_ms: int) -> None:
        self.socket: AnySocket = sock
        self.name, self.opened_ms = name, opened_ms
        self.has_spoken = False
        self.thread: Thread | None = None

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the socket down; its thread then ends."""
        with suppress(OSError):
            self.socket.shutdown(how)


class Connections:
    """Serves all connections to `listener`, until `stop`.

    answer(request, sender): called in many threads.
    replays: takes over a connection with a replay call.
    """

    def __init__(  # noqa: PLR0913 - a listener, the calls, and what both need
        self,
        listener: Listener,
        settings: NodeSettings,
        answer: Callable[[Struct, str], Struct],
        replays: Callable[[AcceptedConnection], None] | None = None,
        *,
        network: Network = REAL_NETWORK,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.tls = None if settings.certificates is None else settings.certificates.context()
        """For new connections; open ones keep theirs."""
        self._listener, self._settings, self._answer = listener, settings, answer
        self._replays = replays
        self._buffers = Buffers(SPARE_BYTES)
        self._threads, self._clock = network.threads, clock
        self._lock = threading.Lock()
        self._peers: dict[Peer, None] = {}  # oldest first
        self._stopping = self._threads.event()
        self._accepting = self._threads.thread(self._accept, "pushrep-node-accept")

    def __len__(self) -> int:
        return len(self._peers)

    def start(self) -> None:
        """Begin to accept."""
        self._accepting.start()

    def stop(self) -> bool:
        """Accept nothing more, and answer the running requests; False if some took too long."""
        deadline_ms = self._clock.monotonic_ms() + int(self._settings.stop_timeout_s * 1000)
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self._accepting.join()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.cut(socket.SHUT_RD)
        for peer in peers:
            assert peer.thread is not None, "it was started before it was listed"
            peer.thread.join(max(0, deadline_ms - self._clock.monotonic_ms()) / 1000)
            peer.cut()
        return not any(peer.thread is not None and peer.thread.is_alive() for peer in peers)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                _LOG.warning("accept: %s", error)  # out of descriptors: open connections go on
                self._stopping.wait(_AGAIN_S)
                continue
            peer = Peer(sock, str(address[:2]), self._clock.monotonic_ms())
            peer.thread = self._threads.thread(partial(self._serve, peer), "pushrep-node-peer")
            with self._lock:
                silent = [other for other in self._peers if not other.has_spoken]
                full = len(self._peers) >= self._settings.connections_max
                if not full or silent:
                    self._peers[peer] = None
                if full and silent:
                    oldest = min(silent, key=lambda other: other.opened_ms)
                    self._peers.pop(oldest, None)
                    oldest.cut()
            if full and not silent:
                _LOG.warning("%s is refused: %d connections are open", peer.name, self._settings.connections_max)
                sock.close()
                continue
            try:
                peer.thread.start()
            except RuntimeError:  # the system has no thread left
                self._forget(peer)

    def _serve(self, peer: Peer) -> None:
        is_handed_over = False
        try:
            is_handed_over = self._converse(peer)
        except ProtocolError as error:
            _LOG.warning("%s is cut off: %s", peer.name, error.reason)
        except TimeoutError:
            _LOG.info("%s said nothing, or took nothing, in time", peer.name)
        except (OSError, ssl.SSLError) as error:
            _LOG.info("%s went: %s", peer.name, error)
        except Exception:  # noqa: BLE001 - a fault of ours ends one connection, not the node
            _LOG.exception("%s is cut off", peer.name)
        finally:
            if not is_handed_over:
                self._forget(peer)

    def _converse(self, peer: Peer) -> bool:
        """Answer until the peer hangs up; True if the replay server has taken the connection over."""
        settings = self._settings
        peer.socket.settimeout(settings.handshake_timeout_s)
        tune(peer.socket)
        sender = settings.plain_identity
        if (tls := self.tls) is not None:
            assert isinstance(peer.socket, socket.socket), "TLS runs on the system's own sockets"
            peer.socket = secured = tls.wrap_socket(peer.socket, server_side=True)
            sender = identity_in(secured.getpeercert() or {})
        connection = ServerConnection(settings.limits, self._buffers.acquire_kept)
        while count := peer.socket.recv_into(connection.get_buffer()):
            # The calls are not kept here: once they are answered, the next body may use their memory.
            if self._answer_all(peer, connection, connection.buffer_updated(count), sender):
                return True
        return False

    def _answer_all(
        self, peer: Peer, connection: ServerConnection, calls: Sequence[Call | ClientEvent], sender: str
    ) -> bool:
        for number, call in enumerate(calls):
            if not isinstance(call, Call):
                continue
            hand_over = self._replays if call.api_key in REPLAY_CALLS and not self._stopping.is_set() else None
            if hand_over is not None and peer.has_spoken:
                closed = partial(self._forget, peer)
                hand_over(AcceptedConnection(peer.socket, connection, calls[number:], peer.name, sender, closed))
                return True
            self._reply(peer, connection, call, sender)
        return False

    def _reply(self, peer: Peer, connection: ServerConnection, call: Call, sender: str) -> None:
        if call.api_key is ApiKey.API_VERSIONS:
            parts = connection.answer_versions(call)
            if not peer.has_spoken:
                peer.has_spoken = True
                peer.socket.settimeout(None)  # an idle leader costs nothing; keepalive notices a lost one
        elif self._stopping.is_set():
            parts = connection.answer(call, refusal(call.api_key, ErrorCode.NODE_STOPPING))
        else:
            parts = connection.answer(call, self._answer(call.request, sender))
        send_all(peer.socket, parts)

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.pop(peer, None)
        with suppress(OSError):
            peer.socket.close()
