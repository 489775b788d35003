"""What the peers of one port may cost: connections, bytes and time; of each identity, and in sum.

    accept ─▶ admit: without a role ── promote ─▶ with a role ──▶ leave
              half of all connections              the other half; of one identity a quarter of all
              if full, a random one of whoever     if full, it is closed
              has most of them is closed

    hold      waits while the bytes, or the identity's quarter of them, are out: what the peer sends stays unread
    due_ms    set while the peer has to do something: whoever lets it pass is closed

Whoever shows no certificate counts by address. A node, a health port and a console have a budget each, so that a flood
of one leaves the others alone.
"""

import logging
import random
import resource
import socket
import ssl
from collections import Counter
from contextlib import suppress

from pushrep.env import SYSTEM_CLOCK, SYSTEM_THREADS, Clock, Threads
from pushrep.log.flush_scheduler import Tick
from pushrep.replicate.access import UNPROVEN, identity_in
from pushrep.replicate.node_status import BudgetStatus
from pushrep.replicate.sockets import AnySocket

FIRST_S, REQUEST_S, SEND_S = 10.0, 30.0, 30.0
"""How long handshake and first whole request together may take, a later request, and that the peer takes an answer."""
CONNECTIONS_MAX, HELD_BYTES_MAX = 1024, 256 << 20
_DESCRIPTORS_MAX = 1 << 20
_LOOK_MS = 1000
_SHARE = 4
"""A quarter of the descriptors are for connections, a quarter of connections and bytes for one identity."""


def raise_descriptors() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns what this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return _DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS_MAX)


class Admitted:
    """A connection within a budget. Whoever reads its socket calls `leave` when that is closed."""

    __slots__ = ("_budget", "_is_out", "due_ms", "has_role", "held_bytes", "key", "socket")

    def __init__(self, budget: "ConnectionBudget", key: str, sock: AnySocket, due_ms: int) -> None:
        self._budget = budget
        self.socket: AnySocket = sock
        self.key = key
        """Its identity, or its address."""
        self.has_role, self._is_out, self.held_bytes = False, False, 0
        self.due_ms: int | None = due_ms
        """When it is closed; None: nothing is expected from the peer."""

    def expect(self, seconds: float) -> None:
        """The peer has so long for what it has to do, unless it is bound by an earlier deadline without a role."""
        if self.has_role:
            self.due_ms = self._budget.now_ms() + int(seconds * 1000)

    def relax(self) -> None:
        """Nothing is expected from a peer with a role; one without keeps its first deadline."""
        if self.has_role:
            self.due_ms = None

    def promote(self) -> bool:
        """It made a call that needs a role, and was allowed. False: there are too many of them, or it was closed
        meanwhile.
        """
        return self.has_role or self._budget.promote(self)

    def hold(self, size_bytes: int) -> None:
        """Wait until so many bytes may be held for it. Raises ConnectionError if it has to be closed instead."""
        self._budget.hold(self, size_bytes)

    def give_back(self) -> None:
        """It holds nothing any more."""
        if self.held_bytes:
            self._budget.give_back(self)

    def secure(self, tls: ssl.SSLContext) -> str:
        """Do the handshake; returns the identity by its certificate, `anonymous` without one. Raises OSError."""
        assert isinstance(self.socket, socket.socket), "TLS runs on the system's own sockets"
        # The handshake only once `cut` can reach it.
        self.socket = secured = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        if self._is_out:
            raise ConnectionError("it was closed for another one")
        secured.do_handshake()
        identity = identity_in(secured.getpeercert() or {})
        if identity not in UNPROVEN:
            self.key = identity
        return identity

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut its socket down; whoever reads it then ends."""
        with suppress(OSError):
            if isinstance(self.socket, ssl.SSLSocket):  # whose own method takes TLS from the thread that uses it
                socket.socket.shutdown(self.socket, how)
            else:
                self.socket.shutdown(how)

    def close(self) -> None:
        """As `cut`, also if it is not secured yet."""
        self._is_out = True
        self.cut()

    def leave(self) -> None:
        """It is closed. A second call does nothing."""
        self._budget.leave(self)


class ConnectionBudget:
    """The budget of one port, until `stop`. Thread-safe.

    name: for its log. connections_max: as wished; a quarter of the descriptors at most.
    """

    def __init__(  # noqa: PLR0913 - what it bounds, and what a simulation replaces
        self,
        name: str,
        log: logging.Logger,
        *,
        connections_max: int = CONNECTIONS_MAX,
        held_bytes_max: int = HELD_BYTES_MAX,
        first_s: float = FIRST_S,
        clock: Clock = SYSTEM_CLOCK,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        descriptors = raise_descriptors()
        self.connections_max = min(connections_max, max(2, descriptors // _SHARE))
        self.held_bytes_max = held_bytes_max
        self.closed = {"full": 0, "late": 0}
        """How many were closed, by reason: full, late."""
        self._name, self._log, self._clock = name, log, clock
        self._first_ms = int(first_s * 1000)
        self._half = max(1, self.connections_max // 2)
        self._each = max(1, self.connections_max // _SHARE)
        self._without: dict[Admitted, None] = {}
        self._with: dict[Admitted, None] = {}
        self._by_key: Counter[str] = Counter()  # of those with a role
        self._held: dict[str, int] = {}
        self.held_bytes = 0
        self._is_over = False
        self._changed = threads.condition()
        self._tick = None
        if clock is SYSTEM_CLOCK and threads is SYSTEM_THREADS:  # a simulated peer that is silent is gone
            self._tick = Tick(max(10, min(_LOOK_MS, self._first_ms // 4)), self.close_late)
        level = logging.WARNING if self.connections_max < connections_max else logging.INFO
        log.log(
            level,
            "%s: at most %d connections (of %d descriptors), %d without a role, %d of one identity; %d MiB held",
            name, self.connections_max, descriptors, self._half, self._each, held_bytes_max >> 20,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._without) + len(self._with)

    def status(self) -> BudgetStatus:
        """For any thread."""
        return BudgetStatus(self.connections_max, self.held_bytes, self.held_bytes_max, dict(self.closed))

    def now_ms(self) -> int:
        """Its clock's time."""
        return self._clock.monotonic_ms()

    def admit(self, address: str, sock: AnySocket) -> Admitted:
        """Take a new connection in; another one without a role may be closed for it."""
        one = Admitted(self, address, sock, self.now_ms() + self._first_ms)
        out = None
        with self._changed:
            if len(self._without) >= self._half:
                many = Counter(other.key for other in self._without)
                most = max(many.values())
                # Not the oldest: who keeps the port full could time that.
                out = random.choice([other for other in self._without if many[other.key] == most])  # noqa: S311
                del self._without[out]
                self.closed["full"] += 1
            self._without[one] = None
        if out is not None:
            out.close()
        return one

    def promote(self, one: Admitted) -> bool:
        """See `Admitted`."""
        key = one.key
        with self._changed:
            if one not in self._without:
                return False
            if self._by_key[key] >= self._each or len(self._with) >= self._half:
                self.closed["full"] += 1
                has = f"{self._by_key[key]} connections of {key!r}, {len(self._with)} of all with a role"
                self._log.warning("%s: %s are open: another one is closed", self._name, has)
                return False
            del self._without[one]
            self._with[one] = None
            self._by_key[key] += 1
            one.has_role, one.due_ms = True, None
        return True

    def hold(self, one: Admitted, size_bytes: int) -> None:
        """See `Admitted`. What is larger than a share is held alone."""
        with self._changed:
            if one.held_bytes:  # it would wait for itself
                raise ConnectionError("it sends a large request before its last one was answered")
            one.relax()  # it waits for us
            if not self._has_room(one.key, size_bytes):
                self._changed.wait_for(lambda: self._is_over or self._has_room(one.key, size_bytes))
            if self._is_over:
                raise ConnectionError("the port is closed")
            one.held_bytes = size_bytes
            self._held[one.key] = self._held.get(one.key, 0) + size_bytes
            self.held_bytes += size_bytes

    def _has_room(self, key: str, size_bytes: int) -> bool:
        of_key, of_all = self._held.get(key, 0), self.held_bytes
        is_within_share = not of_key or of_key + size_bytes <= self.held_bytes_max // _SHARE
        return is_within_share and (not of_all or of_all + size_bytes <= self.held_bytes_max)

    def give_back(self, one: Admitted) -> None:
        """See `Admitted`."""
        with self._changed:
            self._give_back(one)

    def leave(self, one: Admitted) -> None:
        """See `Admitted`."""
        with self._changed:
            self._give_back(one)
            self._without.pop(one, None)
            if one in self._with:
                del self._with[one]
                self._by_key[one.key] -= 1
                if not self._by_key[one.key]:
                    del self._by_key[one.key]

    def _give_back(self, one: Admitted) -> None:
        if one.held_bytes:
            left = self._held.pop(one.key) - one.held_bytes
            if left:
                self._held[one.key] = left
            self.held_bytes -= one.held_bytes
            one.held_bytes = 0
            self._changed.notify_all()

    def close_late(self) -> None:
        """Close whoever let its deadline pass."""
        now_ms = self.now_ms()
        with self._changed:
            late = [one for one in (*self._without, *self._with) if one.due_ms is not None and one.due_ms <= now_ms]
            self.closed["late"] += len(late)
        for one in late:
            one.due_ms = None
            self._log.info("%s: %r said nothing, or took nothing, in time", self._name, one.key)
            one.close()

    def stop(self) -> None:
        """Nobody waits any more; whoever would is to be closed."""
        if self._tick is not None:
            self._tick.end()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
