"""A network in memory whose every delay and fault comes from one seed: `Network` for tests.

    network = SimulatedNetwork(seed, clock)          network.step() lets one thread go on, or time
    machine = network.machine("a")                   its name is its host name
    process = machine.start()                        a `Network`, for one run of a program on it
    process.thread(program, "main").start()

    delay, loss        each piece takes a time of its own within its stream's order; connections overtake each other.
                       A stream loses nothing in its middle, as TCP: loss is delay, or a broken connection
    block(a, b)        nothing gets from a to b until `unblock`; the other way goes on. What was sent waits
    cut(a, b)          every connection between the two breaks, with a tail of what was on its way
    process.kill()     what was sent is delivered, then the other side sees the end or a reset
    machine.lose_power()  what was on its way from it goes in part; the other side hears nothing, and gives up after
                       KEEPALIVE_MS, or is reset when it sends to the machine that is up again

Buffers are small and of a drawn size, so senders meet partial sends, and readers parts of what they wait for.
"""

import errno
import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from pushrep.env import Listener, Network, Poller, Ready, Socket, Threads
from pushrep.env.network import READABLE, WRITABLE, HostPort
from tests.support.simulated_disk import SimulatedClock
from tests.support.simulated_threads import Scheduler, ThreadGroup

KEEPALIVE_MS = 40_000
_FIRST_PORT = 40_000
_NEVER_MS = float("inf")
_BITE_BYTES = 7


class _Piece(NamedTuple):
    """Bytes on their way; without any, the stream's end."""

    arrives_ms: int
    data: bytes


class SimulatedNetwork:
    """All machines and what lies between them. `delay_ms`: the longest way of one piece."""

    def __init__(self, seed: int, clock: SimulatedClock, *, delay_ms: int = 5) -> None:
        self.scheduler = Scheduler(seed, clock)
        self.clock, self.random, self.delay_ms = clock, self.scheduler.random, delay_ms
        self.scheduler.arrivals = self._next_arrival
        self.machines: dict[str, Machine] = {}
        self.ends: list[_End] = []
        self.blocked: dict[tuple[str, str], None] = {}
        self.keepalive_ms = KEEPALIVE_MS
        self.buffer_bytes = self.random.choice((2_000, 10_000, 100_000))

    def machine(self, name: str) -> "Machine":
        """The machine of this name."""
        return self.machines.setdefault(name, Machine(self, name))

    def step(self) -> bool:
        """One turn of one thread, or time passes; False if nothing can ever happen any more."""
        return self.scheduler.step()

    def block(self, source: str, target: str) -> None:
        """Nothing arrives at `target` from `source`."""
        self.blocked[source, target] = None

    def unblock(self, source: str, target: str) -> None:
        """It does again, what was sent meanwhile first."""
        self.blocked.pop((source, target), None)

    def cut(self, one: str, other: str) -> None:
        """Break every connection between these machines."""
        for end in list(self.ends):
            if (end.host, end.peer_host) in {(one, other), (other, one)}:
                end.lose_tail()
                end.reset(self.clock.monotonic_ms() + self.delay())

    def delay(self) -> int:
        """What one way takes now, in ms."""
        return self.random.randint(0, self.delay_ms)

    def forget(self, end: "_End") -> None:
        """Nobody reads there any more."""
        if end in self.ends:
            self.ends.remove(end)

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self.blocked

    def _next_arrival(self) -> float:
        now = self.clock.monotonic_ms()
        return min((at for end in self.ends if (at := end.next_ms()) > now), default=_NEVER_MS)


class Machine:
    """A host. One process runs on it at a time."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.process: SimulatedProcess | None = None
        self._next_port = _FIRST_PORT

    @property
    def is_up(self) -> bool:
        """Whether anybody here answers."""
        return self.process is not None and self.process.is_alive

    def start(self) -> "SimulatedProcess":
        """A process with this machine's network and threads."""
        assert not self.is_up, f"a process runs on {self.name} already"
        self.process = SimulatedProcess(self)
        return self.process

    def kill(self) -> None:
        """End its process; what it has sent is delivered."""
        self._end(silently=False)

    def lose_power(self) -> None:
        """End its process; no peer is notified."""
        self._end(silently=True)

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def _end(self, *, silently: bool) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.listeners.clear()
        for end in [end for end in self.network.ends if end.process is process]:
            end.die(silently=silently)
        process.kill()


class SimulatedProcess(ThreadGroup):
    """A `Network`: connections and threads of one process on one machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.network.scheduler)
        self.machine, self.network = machine, machine.network
        self.listeners: dict[int, _Listener] = {}

    @property
    def threads(self) -> Threads:
        return self

    def connect(self, address: HostPort, timeout_s: float) -> Socket:
        (host, port), network = address, self.network
        there_ms = network.clock.monotonic_ms() + network.delay() + network.delay()

        def arrived() -> bool:
            ways = network.is_blocked(self.machine.name, host) or network.is_blocked(host, self.machine.name)
            is_up = host in network.machines and network.machines[host].is_up
            return is_up and not ways and network.clock.monotonic_ms() >= there_ms

        if not self.scheduler.wait(arrived, max(timeout_s, (there_ms - network.clock.monotonic_ms()) / 1000)):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), f"{host}:{port}")
        other = network.machines[host].process
        listener = other.listeners.get(port) if other is not None else None
        if listener is None or other is None:
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED), f"{host}:{port}")
        here, there = _End(self, host), _End(other, self.machine.name)
        here.peer, there.peer = there, here
        here.settimeout(timeout_s)
        network.ends += [here, there]
        listener.waiting.append((there, (self.machine.name, self.machine.free_port())))
        return here

    def listen(self, address: HostPort) -> Listener:
        host, port = address[0], address[1] or self.machine.free_port()
        if port in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), f"{host}:{port}")
        self.listeners[port] = _Listener(self, (self.machine.name, port))
        return self.listeners[port]

    def poller(self) -> Poller:
        return _Poller(self.scheduler)


class _Listener:
    def __init__(self, process: SimulatedProcess, address: HostPort) -> None:
        self._process, self._address, self._is_closed = process, address, False
        self.waiting: deque[tuple[_End, HostPort]] = deque()

    def accept(self) -> tuple[Socket, HostPort]:
        self._process.scheduler.wait(lambda: self.waiting or self._is_closed)
        if self._is_closed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self.waiting.popleft()

    def getsockname(self) -> HostPort:
        return self._address

    def shutdown(self, _how: int, /) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._process.listeners.pop(self._address[1], None)
        for end, _ in self.waiting:
            end.close()
        self.waiting.clear()


class _End:
    """One end of a connection; `coming` is what is on its way to it, or lies there unread."""

    def __init__(self, process: SimulatedProcess, peer_host: str) -> None:
        self.process, self.host, self.peer_host = process, process.machine.name, peer_host
        self.network = process.network
        self.peer: _End = self
        self.coming: deque[_Piece] = deque()
        self.is_closed = self.is_vanished = self._has_ended = False
        self.broken_ms = _NEVER_MS  # a reset arrives then
        self._timeout_s: float | None = None
        self._is_blocking = True
        self._bytes_max = self.network.buffer_bytes
        self._bites = self.network.random.choice((0, 0, 0, 60))  # so many reads get a few bytes only

    # ---- as its process sees it

    def recv_into(self, buffer: memoryview, /) -> int:
        self._await(self.is_readable)
        self._check()
        piece = self.coming[0]
        if not piece.data:
            return 0
        count = min(len(buffer), len(piece.data))
        if self._bites:
            self._bites -= 1
            count = min(count, _BITE_BYTES)
        buffer[:count] = piece.data[:count]
        if count < len(piece.data):
            self.coming[0] = piece._replace(data=piece.data[count:])
        else:
            self.coming.popleft()
        return count

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        self._await(self.is_writable)
        self._check()
        if self._has_ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        data = b"".join(buffers)[: self._room()]
        self._deliver(data)
        return len(data)

    def setblocking(self, flag: bool, /) -> None:
        self._is_blocking, self._timeout_s = flag, None

    def settimeout(self, value: float | None, /) -> None:
        self._is_blocking, self._timeout_s = value != 0, value

    def setsockopt(self, _level: int, _optname: int, _value: int, /) -> None:
        """What is set there (delays, keepalive) is simulated as it is wanted."""

    def shutdown(self, how: int, /) -> None:
        self._check()
        if how in {socket.SHUT_RD, socket.SHUT_RDWR}:
            self.coming.clear()
            self.coming.append(_Piece(0, b""))
        if how in {socket.SHUT_WR, socket.SHUT_RDWR}:
            self._end()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if not self.is_vanished:
            self._end()
        self.network.forget(self)

    # ---- as pollers and the network see it

    def is_readable(self) -> bool:
        """Whether `recv_into` would not wait."""
        now = self.network.clock.monotonic_ms()
        if self.is_closed or self.broken_ms <= now:
            return True
        if not self.coming or self.coming[0].arrives_ms > now:
            return False
        return self.coming[0].arrives_ms == 0 or not self.network.is_blocked(self.peer_host, self.host)

    def is_writable(self) -> bool:
        """Whether `send` would not wait."""
        return self.is_closed or self.broken_ms <= self.network.clock.monotonic_ms() or self._room() > 0

    def next_ms(self) -> float:
        """When something arrives here next."""
        if self.coming and self.network.is_blocked(self.peer_host, self.host):
            return self.broken_ms
        return min(self.broken_ms, self.coming[0].arrives_ms) if self.coming else self.broken_ms

    def reset(self, at_ms: int) -> None:
        """It breaks then, if it has not before."""
        self.broken_ms = min(self.broken_ms, at_ms)

    def lose_tail(self) -> None:
        """Some of what is on its way to it never arrives."""
        now = self.network.clock.monotonic_ms()
        late = sum(piece.arrives_ms > now for piece in self.coming)
        for _ in range(self.network.random.randint(0, late)):
            self.coming.pop()

    def die(self, *, silently: bool) -> None:
        """Its process is gone."""
        if silently:
            self.is_vanished = True
            self.peer.lose_tail()
            self.peer.reset(self.network.clock.monotonic_ms() + self.network.keepalive_ms)
        elif self.coming:  # unread bytes: the system resets
            self.peer.reset(self.network.clock.monotonic_ms() + self.network.delay())
        self.close()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._deliver(b"")

    def _deliver(self, data: bytes) -> None:
        now, peer = self.network.clock.monotonic_ms(), self.peer
        last_ms = peer.coming[-1].arrives_ms if peer.coming else 0
        arrives_ms = max(last_ms, now + self.network.delay())
        if not peer.is_closed:
            peer.coming.append(_Piece(max(1, arrives_ms), data))
        elif data and (not peer.is_vanished or self.network.machines[self.peer_host].is_up):
            self.reset(arrives_ms + self.network.delay())

    def _room(self) -> int:
        return max(0, self._bytes_max - sum(len(piece.data) for piece in self.peer.coming))

    def _await(self, is_ready: Any) -> None:
        if self._is_blocking:
            if not self.network.scheduler.wait(is_ready, self._timeout_s):
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
        elif not is_ready():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.broken_ms <= self.network.clock.monotonic_ms():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class _Poller:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._registered: dict[_End, tuple[int, Any]] = {}
        self._is_woken = False

    def register(self, sock: Any, mask: int, data: Any) -> None:
        if sock in self._registered:
            raise KeyError(f"{sock!r} is registered already")
        self._registered[sock] = (mask, data)

    def modify(self, sock: Any, mask: int, data: Any) -> None:
        if sock not in self._registered:
            raise KeyError(f"{sock!r} is not registered")
        self._registered[sock] = (mask, data)

    def unregister(self, sock: Any) -> None:
        del self._registered[sock]

    def select(self, timeout_s: float | None) -> list[Ready]:
        self._scheduler.wait(lambda: self._is_woken or any(map(self._mask_of, self._registered)), timeout_s)
        self._is_woken = False
        return [Ready(self._registered[sock][1], mask) for sock in self._registered if (mask := self._mask_of(sock))]

    def wake(self) -> None:
        self._is_woken = True

    def close(self) -> None:
        self._registered.clear()

    def _mask_of(self, sock: _End) -> int:
        wanted, _ = self._registered[sock]
        readable = READABLE if wanted & READABLE and sock.is_readable() else 0
        return readable | (WRITABLE if wanted & WRITABLE and sock.is_writable() else 0)


_: type[Network] = SimulatedProcess
