"""A new replica is filled while its leader runs: the log over loopback, beside a bare copy of the same file.

Ours: a leader with a log of 128 MiB or 1 GiB and a replica without a record, a process of its own, from the leader's
start until the replica has acknowledged the last one: connect, describe, push, check of every batch, append. The peer:
one process reads the file in pieces of 1 MiB and sends them, another receives, takes the CRC-32C of each and writes
them into a file. Neither is told to wait for the disk; but a replica's log is never more than 128 MiB ahead of its
disk (`flush_bytes`), and the copy may be.
"""

import multiprocessing
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values, scratch
from benchmarks.push_sides import led, nodes
from pushrep.log import Durability, SegmentLog
from pushrep.records import encode_batch
from pushrep.records.header import crc32c

LOG_BYTES = {"128 MiB": 128 << 20, "1 GiB": 1 << 30}
BATCH_BYTES = 256 << 10
PIECE_BYTES = 1 << 20
GOAL = 0.7


def run(rounds: int) -> dict[str, Any]:
    """Records of 1 KiB, a short log and a long one."""
    results = {}
    for name, log_bytes in LOG_BYTES.items():
        with scratch("catch-up") as root, ExitStack() as opened:
            results[f"catch-up of a replica, {name} of 1 KiB records"] = _compared(root, log_bytes, rounds, opened)
    return results


def _compared(root: Path, log_bytes: int, rounds: int, opened: ExitStack) -> dict[str, Any]:
    size = write_log(root / "leader" / "orders-0", log_bytes)
    ready = []
    for number in range(rounds + 1):  # both are there before the clock starts
        # A leader of its own: one whose watermark is at the end waits for nobody.
        shutil.copytree(root / "leader", root / f"leader-{number}", copy_function=link_segment)
        (node,) = opened.enter_context(nodes(root / f"fresh-{number}", 1))
        ready.append((root / f"leader-{number}", node.address))
    copier = opened.enter_context(receiver(root))

    def ours() -> float:
        directory, address = ready.pop()
        opened.enter_context(led(directory, [address])).wait()
        return size

    def bare() -> float:
        return copy(root / "leader" / "orders-0", copier)

    return compare(
        {"push to a new replica": ours, "bare copy with CRC": bare},
        rounds=rounds,
        unit="bytes/s",
        goals={"bare copy with CRC": GOAL},
    )


def link_segment(source: str, target: str) -> str:
    """Copy a file, but for a segment: nobody appends to it, and every leader's would have to come to disk first."""
    (os.link if source.endswith(".log") else shutil.copy2)(source, target)
    return target


def write_log(path: Path, log_bytes: int) -> int:
    """Batches of 256 KiB; how many bytes."""
    values = random_values(BATCH_BYTES // 1024, 1024)
    with SegmentLog.open(path, has_replicas=True) as log:
        for _ in range(log_bytes // BATCH_BYTES):
            log.append(encode_batch(values, timestamps_ms=1), durability=Durability.BUFFERED)
        log.flush()
    return sum(segment.stat().st_size for segment in path.glob("*.log"))


@contextmanager
def receiver(root: Path) -> Iterator[tuple[str, int]]:
    """A process that takes copies, one connection each; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("fork").Process(target=_receive, args=(listening, root / "copy"), daemon=True)
    process.start()
    try:
        yield listening.getsockname()
    finally:
        listening.close()
        process.terminate()
        process.join()


def copy(log: Path, to: tuple[str, int]) -> float:
    """The segments one after the other; returns when the other side has written the last byte."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    sent = 0
    with socket.create_connection(to) as line:
        for segment in sorted(log.glob("*.log")):
            fd = os.open(segment, os.O_RDONLY)
            try:
                at = 0
                while got := os.preadv(fd, [buffer], at):
                    line.sendall(buffer[:got])
                    at += got
                sent += at
            finally:
                os.close(fd)
        line.shutdown(socket.SHUT_WR)
        assert int.from_bytes(line.recv(8)) == sent, "it has all of it"
    return sent


def _receive(listening: socket.socket, path: Path) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    while True:
        line, _ = listening.accept()
        with line, path.open("wb", buffering=0) as file:
            path.unlink()  # what is left of it when it is closed would be written to the disk beside the next round
            got = filled = 0
            while True:
                filled = _fill(line, buffer)
                crc32c(buffer, 0, filled)
                file.write(buffer[:filled])
                got += filled
                if filled < len(buffer):
                    break
            line.sendall(got.to_bytes(8))


def _fill(line: socket.socket, buffer: memoryview) -> int:
    filled = 0
    while filled < len(buffer):
        count = line.recv_into(buffer[filled:])
        if count == 0:
            break
        filled += count
    return filled
