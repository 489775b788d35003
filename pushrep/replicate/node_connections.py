"""The sockets of a node: one thread a connection, so that a slow peer or disk holds up no other.

    accept ─▶ thread: read into the frame's own memory ─▶ calls, in order ─▶ answer each ─▶ read on
                      no call that its identity may make within handshake_timeout_s, a later request or an answer that
                      takes longer than 30 s, or bytes that are no frame: closed, logged

A connection holds the records of one frame at most, because nothing more is read while a request is carried out. Of a
large one nothing is read before its identity may make the call, and the budget (budget.py) has room for it.
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
from pushrep.replicate.access import Access
from pushrep.replicate.budget import REQUEST_S, SEND_S, Admitted, ConnectionBudget
from pushrep.replicate.node_calls import FETCH_BYTES_MAX
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replay_calls import REPLAY_CALLS
from pushrep.replicate.replay_server import AcceptedConnection
from pushrep.replicate.sockets import send_all
from pushrep.wire.calls import REQUESTS, ApiKey, refusal
from pushrep.wire.connection import Call, ClientEvent, ServerConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import SPARE_BYTES, Prefix, ProtocolError
from pushrep.wire.push_messages import FetchRecordsRequest
from pushrep.wire.values import Part, Struct

_LOG = logging.getLogger("pushrep.node")
_AGAIN_S, _SOON_S = 0.1, 0.001


class Peer:
    """A connection that is open."""

    def __init__(self, budget: Admitted, name: str, sender: str) -> None:
        self.budget, self.name = budget, name
        self.sender = sender
        """Its identity."""
        self.has_versions = False
        """Whether it asked for our versions, as it has to first."""
        self.thread: Thread | None = None


class Connections:
    """Serves all connections to `listener`, until `stop`.

    answer(request, sender): called in many threads.
    access: says who has a role; None: everybody. replays: takes over a connection with a replay call.
    """

    def __init__(  # noqa: PLR0913 - a listener, the calls, and what both need
        self,
        listener: Listener,
        settings: NodeSettings,
        answer: Callable[[Struct, str], Struct],
        access: Access | None = None,
        replays: Callable[[AcceptedConnection], None] | None = None,
        *,
        network: Network = REAL_NETWORK,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.tls = None if settings.certificates is None else settings.certificates.context()
        """For new connections; open ones keep theirs."""
        self._listener, self._settings, self._answer = listener, settings, answer
        self._access, self._replays = access, replays
        self.budget = ConnectionBudget(
            "node", _LOG, connections_max=settings.connections_max, held_bytes_max=settings.requests_bytes_max,
            first_s=settings.handshake_timeout_s, clock=clock, threads=network.threads,
        )  # fmt: skip
        """What its peers hold."""
        self._buffers = Buffers(SPARE_BYTES)
        self._threads, self._clock = network.threads, clock
        self._lock = threading.Lock()
        self._peers: dict[Peer, None] = {}  # in the order in which they came
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
            peer.budget.cut(socket.SHUT_RD)
        self.budget.stop()
        for peer in peers:
            assert peer.thread is not None, "it was started before it was listed"
            peer.thread.join(max(0, deadline_ms - self._clock.monotonic_ms()) / 1000)
            peer.budget.cut()
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
            admitted = self.budget.admit(str(address[0]), sock)
            peer = Peer(admitted, str(address[:2]), self._settings.plain_identity)
            peer.thread = self._threads.thread(partial(self._serve, peer), "pushrep-node-peer")
            with self._lock:
                self._peers[peer] = None
            try:
                peer.thread.start()
            except RuntimeError:  # the system has no thread left
                self._forget(peer)
            # Those that were closed for others have a descriptor until their threads end, which is soon.
            while len(self._peers) > self.budget.connections_max and not self._stopping.wait(_SOON_S):
                pass

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
        tune(peer.budget.socket)
        if self.tls is not None:
            peer.sender = peer.budget.secure(self.tls)
        connection = ServerConnection(self._settings.limits, self._buffers.acquire_kept, partial(self._hold, peer))
        is_handed_over = False
        try:
            while count := peer.budget.socket.recv_into(connection.get_buffer()):
                # The calls are not kept here: once they are answered, the next body may use their memory.
                if (ended := self._answer_all(peer, connection, connection.buffer_updated(count))) is not None:
                    is_handed_over = ended
                    return ended
                if connection.failure is not None:  # it came behind these calls
                    raise connection.failure
                if not connection.held_bytes:
                    peer.budget.relax()
                    peer.budget.give_back()
                elif peer.budget.due_ms is None:
                    peer.budget.expect(REQUEST_S)
        finally:
            if not is_handed_over:
                connection.drop()
        return False

    def _may(self, peer: Peer, key: ApiKey) -> bool:
        """Whether its identity may make this call about any outbox; then it has a role, and room among those. Raises
        ConnectionError if there are too many of them.
        """
        if self._access is not None and not self._access.could(peer.sender, key):
            return False
        if not peer.budget.promote():
            raise ConnectionError("it has no room among those with a role")
        return True

    def _hold(self, peer: Peer, prefix: Prefix) -> None:
        """A large request comes. Raises ProtocolError, ConnectionError."""
        if prefix.api_key not in REQUESTS:
            raise ProtocolError(f"{prefix.place}: no request has {prefix.size} bytes")
        if not self._may(peer, key := ApiKey(prefix.api_key)):
            assert self._access is not None, "without it everybody may"
            raise ProtocolError(f"{self._access.refused(peer.sender, key)}; its {prefix.size} bytes are not read")
        peer.budget.hold(prefix.size)
        peer.budget.expect(REQUEST_S)

    def _answer_all(self, peer: Peer, connection: ServerConnection, calls: Sequence[Call | ClientEvent]) -> bool | None:
        """None: it goes on; True: the replay server has taken it over; False: it is over."""
        for number, call in enumerate(calls):
            if not isinstance(call, Call):
                continue
            if call.api_key is ApiKey.API_VERSIONS:
                self._send(peer, connection.answer_versions(call))
                peer.has_versions = True
                continue
            is_allowed = self._may(peer, call.api_key)
            hand_over = self._replays if call.api_key in REPLAY_CALLS and not self._stopping.is_set() else None
            if hand_over is not None and peer.has_versions and is_allowed:
                closed, sender = partial(self._forget, peer), peer.sender
                peer.budget.relax()
                hand_over(AcceptedConnection(peer.budget, connection, calls[number:], peer.name, sender, closed))
                return True
            peer.budget.relax()
            if self._stopping.is_set():
                answer = refusal(call.api_key, ErrorCode.NODE_STOPPING)
            else:
                if isinstance(call.request, FetchRecordsRequest):
                    peer.budget.hold(max(0, min(call.request.max_bytes, FETCH_BYTES_MAX)))
                answer = self._answer(call.request, peer.sender)
            self._send(peer, connection.answer(call, answer))
            if not is_allowed and self._access is not None and not self._access.has_role(peer.sender):
                return False
        return None

    def _send(self, peer: Peer, parts: Sequence[Part]) -> None:
        peer.budget.expect(SEND_S)
        send_all(peer.budget.socket, parts)
        peer.budget.relax()

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.pop(peer, None)
        with suppress(OSError):
            peer.budget.socket.close()
        peer.budget.leave()
