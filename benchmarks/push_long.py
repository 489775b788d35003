"""G10: over a long link, 50 ms there and back: how much of its rate a push uses, and what many requests in flight give.

Two network namespaces of this process's own, joined by a cable made of two TUN devices and a loop that holds every
packet for half the round trip and lets no more than LINK_BYTES_S through, as netem does where the kernel has it. So
the TCP between them is the system's own, windows and all. Needs root; nothing of it outlives the processes.
The peers: a bare TCP connection over the same cable, and the same push with one request in flight.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import random_values, scratch, spread
from benchmarks.push_sides import Led, led, nodes
from pushrep.replicate.settings import PushSettings

ROUND_TRIP_S = 0.05
LINK_BYTES_S = 50e6
REQUEST_BYTES = 256 << 10
WINDOW = 16
BYTES = 100_000_000
BYTES_ALONE = 10_000_000
HERE, THERE = "10.250.0.1", "10.250.0.2"
MTU = 32_000
"""Few large packets: the loop is Python, and it is the delay that is looked at."""

_COUNT = struct.Struct(">Q")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def run(rounds: int) -> dict[str, Any]:
    """Bytes a second over the cable, of each side."""
    if os.geteuid() != 0:
        raise SystemExit("G10 makes network namespaces: it needs root")
    with scratch("push-long") as root:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.push_long", str(root), str(rounds)], stdout=subprocess.PIPE, check=True
        )
    rates: dict[str, list[float]] = json.loads(done.stdout)
    push, tcp, alone = rates.values()
    ratios = {
        "the cable's rate": [rate / LINK_BYTES_S for rate in push],
        "one request in flight": [mine / other for mine, other in zip(push, alone, strict=True)],
        "bare TCP": [mine / other for mine, other in zip(push, tcp, strict=True)],
    }
    goals = {"the cable's rate": {"goal": 0.8}, "one request in flight": {"goal": 10.0}}
    result = {
        "unit": "bytes/s",
        "rounds": rounds,
        "ours": "push",
        "rates": {name: spread(found) for name, found in rates.items()} | {"the cable's rate": spread([LINK_BYTES_S])},
        "ratios": {name: spread(found) | goals.get(name, {}) for name, found in ratios.items()},
        "notes": [
            f"{ROUND_TRIP_S * 1000:.0f} ms there and back; requests of {REQUEST_BYTES >> 10} KiB, {WINDOW} at once"
        ],
    }
    return {"G10: a long link": result}


def measure(root: Path, rounds: int) -> dict[str, list[float]]:
    """In a process of its own, which ends up at the cable's near end with the leaders."""
    values = random_values(REQUEST_BYTES // 1024 - 1, 1024)
    with ExitStack() as stack:
        far = new_namespace(THERE)
        sink, port = listening()
        stack.enter_context(forked(lambda: count_bytes(sink)))
        (node,) = stack.enter_context(nodes(root, 1, host=THERE))
        near = new_namespace(HERE)
        stack.enter_context(forked(lambda: carry(far, near)))
        wide, narrow = (
            stack.enter_context(led(root / f"window-{window}", [node.address], settings(window)))
            for window in (WINDOW, 1)
        )
        bare = stack.enter_context(socket.create_connection((THERE, port)))
        sides: dict[str, Callable[[], float]] = {
            "push": lambda: push(wide, values, BYTES),
            "bare TCP": lambda: blast(bare, BYTES),
            "one request in flight": lambda: push(narrow, values, BYTES_ALONE),
        }
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                began = time.perf_counter()
                work = side()
                if number:  # the first round opens the windows
                    found[name].append(work / (time.perf_counter() - began))
        return found


def settings(window: int) -> PushSettings:
    """So many requests in flight."""
    return PushSettings(requests_in_flight_max=window, request_bytes_max=REQUEST_BYTES)


def push(leader: Led, values: list[bytes], size_bytes: int) -> float:
    """Batches until so many bytes are acknowledged."""
    size = sum(map(len, values))
    for _ in range(size_bytes // size):
        leader.append(values)
    leader.wait()
    return size_bytes // size * size


def blast(sock: socket.socket, size_bytes: int) -> float:
    """So many bytes until the other end has them."""
    sock.sendall(_COUNT.pack(size_bytes))
    block = bytes(REQUEST_BYTES)
    for _ in range(size_bytes // len(block)):
        sock.sendall(block)
    sock.sendall(bytes(size_bytes % len(block)))
    sock.recv(1)
    return size_bytes


def listening() -> tuple[socket.socket, int]:
    """A socket at this end of the cable, and its port."""
    sock = socket.create_server((THERE, 0))
    return sock, sock.getsockname()[1]


def count_bytes(sink: socket.socket) -> None:
    """The far end of `blast`: a byte back once everything that was announced is there."""
    peer, _ = sink.accept()
    with peer:
        while head := peer.recv(_COUNT.size, socket.MSG_WAITALL):
            (left,) = _COUNT.unpack(head)
            while left:
                left -= len(peer.recv(min(left, 1 << 20)))
            peer.sendall(b"x")


def new_namespace(address: str) -> int:
    """From here on this process and its children are in a network of their own; the descriptor of its one cable."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    cable = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(cable, _TUNSETIFF, struct.pack("16sH14x", b"cable", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add {address}/24 dev cable",
        f"link set cable mtu {MTU} txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return cable


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[None]:
    """`work` in a child of this process, which has no threads yet, until the end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def carry(one: int, other: int) -> None:
    """The cable: every packet comes out at the other end half a round trip later, one after another at its rate."""
    ways = {one: Way(other), other: Way(one)}
    while True:
        now = time.perf_counter()
        waits = [way.packets[0][0] - now for way in ways.values() if way.packets]
        ready, _, _ = select.select(list(ways), [], [], max(0.0, min(waits)) if waits else None)
        for end in ready:
            ways[end].take(end)
        for way in ways.values():
            way.give()


class Way:
    """One direction of the cable."""

    def __init__(self, to: int) -> None:
        self.packets: deque[tuple[float, bytes]] = deque()
        """When each comes out, and its bytes."""
        self._to, self._free_s = to, 0.0

    def take(self, end: int) -> None:
        """Every packet that waits at its beginning."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(end, 1 << 16)
                self._free_s = max(self._free_s, time.perf_counter()) + len(packet) / LINK_BYTES_S
                self.packets.append((self._free_s + ROUND_TRIP_S / 2, packet))

    def give(self) -> None:
        """What is due."""
        now = time.perf_counter()
        while self.packets and self.packets[0][0] <= now:
            with suppress(BlockingIOError, OSError):  # a packet that nobody takes is lost
                os.write(self._to, self.packets[0][1])
            self.packets.popleft()


if __name__ == "__main__":
    json.dump(measure(Path(sys.argv[1]), int(sys.argv[2])), sys.stdout)
