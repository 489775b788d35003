"""What this machine does without any of our code, printed with every run: figures without it say little.

pwrite + fdatasync of 4 KiB, into a growing file and into one whose blocks are written     p50, microseconds
sequential write, 1 MiB at a time, with one fdatasync at the end                           bytes/s
loopback TCP, 256 KiB at a time, and the round trip of one byte                            bytes/s, microseconds
"""

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MIB = 1 << 20
SYNCS = 200
SEQUENTIAL_BYTES = 512 * MIB
LOOPBACK_BYTES = 1024 * MIB
ROUND_TRIPS = 500
TOUCHED_BYTES = 10_000 * MIB


def figures(directory: Path | None = None) -> dict[str, float]:
    """The figures, by name with unit; files are made in `directory` (the working directory by default) and removed."""
    with tempfile.TemporaryDirectory(prefix="bare-", dir=directory or Path.cwd()) as root:
        growing, written = sync_latencies_us(Path(root))
        return {
            "pwrite_fdatasync_p50_us": growing,
            "pwrite_fdatasync_written_p50_us": written,
            "sequential_write_bytes_per_s": sequential_write(Path(root)),
            "loopback_tcp_bytes_per_s": loopback_throughput(),
            "loopback_round_trip_p50_us": loopback_round_trip_us(),
        }


def told(found: dict[str, float]) -> str:
    """The figures in one line, for people."""
    return (
        f"pwrite + fdatasync of 4 KiB p50 {found['pwrite_fdatasync_p50_us']:.0f} µs into a growing file, "
        f"{found['pwrite_fdatasync_written_p50_us']:.0f} µs into written blocks; sequential write "
        f"{found['sequential_write_bytes_per_s'] / 1e9:.2f} GB/s; loopback TCP "
        f"{found['loopback_tcp_bytes_per_s'] / 1e9:.2f} GB/s, round trip {found['loopback_round_trip_p50_us']:.0f} µs"
    )


def touch_memory(size_bytes: int = TOUCHED_BYTES) -> None:
    """Write a byte into every page once: the first touch of a fresh virtual machine's memory is several times slower.

    No more than half of what is free, so that nothing else has to make room.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.empty(min(size_bytes, free // 2), np.uint8)[::4096] = 1


def sync_latencies_us(root: Path) -> tuple[float, float]:
    """p50 of pwrite + fdatasync of 4 KiB: behind the file's end, and over blocks that were written before."""
    block = os.urandom(4096)
    with _file(root / "growing") as growing, _file(root / "written") as written:
        os.pwrite(written, bytes(SYNCS * len(block)), 0)
        os.fsync(written)
        taken: dict[int, list[float]] = {growing: [], written: []}
        for number in range(SYNCS):
            for fd, times in taken.items():
                began = time.perf_counter()
                os.pwrite(fd, block, number * len(block))
                os.fdatasync(fd)
                times.append(time.perf_counter() - began)
        return statistics.median(taken[growing]) * 1e6, statistics.median(taken[written]) * 1e6


def sequential_write(root: Path) -> float:
    """Bytes per second of one large file, on disk at the end."""
    block = os.urandom(MIB)
    with _file(root / "sequential") as fd:
        began = time.perf_counter()
        for position in range(0, SEQUENTIAL_BYTES, MIB):
            os.pwrite(fd, block, position)
        os.fdatasync(fd)
        return SEQUENTIAL_BYTES / (time.perf_counter() - began)


def loopback_throughput() -> float:
    """Bytes per second from one thread's socket to another's."""
    block = os.urandom(256 << 10)

    def send(peer: socket.socket) -> None:
        for _ in range(LOOPBACK_BYTES // len(block)):
            peer.sendall(block)

    with _pair(send) as here:
        buffer = bytearray(len(block))
        began, got = time.perf_counter(), 0
        while got < LOOPBACK_BYTES:
            got += here.recv_into(buffer)
        return got / (time.perf_counter() - began)


def loopback_round_trip_us() -> float:
    """p50 of one byte to another thread and back."""

    def echo(peer: socket.socket) -> None:
        for _ in range(ROUND_TRIPS):
            peer.sendall(peer.recv(1))

    taken = []
    with _pair(echo) as here:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            here.sendall(b"x")
            here.recv(1)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


@contextmanager
def _file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
        path.unlink()


@contextmanager
def _pair(other_end: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """A loopback connection; `other_end` runs in a thread on its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    with here, peer:
        for end in (here, peer):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=other_end, args=(peer,))
        thread.start()
        try:
            yield here
        finally:
            thread.join()


if __name__ == "__main__":
    print(told(figures()))
