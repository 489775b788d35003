"""A new replica is filled while its leader runs: the log over loopback, beside a bare copy of the same file.

Ours: a leader with a log of 128 MiB and a replica without a record, a process of its own, from the leader's start until
the replica has acknowledged the last one: connect, describe, push, check of every batch, append. The peer: one process
reads the file in pieces of 1 MiB and sends them, another receives, takes the CRC-32C of each and writes them into a
file. Neither waits for the disk.
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
from pushrep.records.checksum import crc32c

LOG_BYTES = 128 << 20
BATCH_BYTES = 256 << 10
PIECE_BYTES = 1 << 20
GOAL = 0.7


def run(rounds: int) -> dict[str, Any]:
    """Records of 1 KiB."""
    with scratch("catch-up") as root, ExitStack() as opened:
        size = write_log(root / "leader" / "orders-0")
        ready = []
        for number in range(rounds + 1):  # both are there before the clock starts
            # A leader of its own: one whose watermark is at the end waits for nobody.
            shutil.copytree(root / "leader", root / f"leader-{number}")
            (node,) = opened.enter_context(nodes(root / f"fresh-{number}", 1))
            ready.append((root / f"leader-{number}", node.address))
        copier = opened.enter_context(receiver(root))

        def ours() -> float:
            directory, address = ready.pop()
            with led(directory, [address]) as leader:
                leader.wait()
            return size

        def bare() -> float:
            return copy(root / "leader" / "orders-0", copier)

        return {
            "catch-up of a replica, 1 KiB records": compare(
                {"push to a new replica": ours, "bare copy with CRC": bare},
                rounds=rounds,
                unit="bytes/s",
                goals={"bare copy with CRC": GOAL},
            )
        }


def write_log(path: Path) -> int:
    """Batches of 256 KiB; how many bytes."""
    values = random_values(BATCH_BYTES // 1024, 1024)
    with SegmentLog.open(path, has_replicas=True) as log:
        for _ in range(LOG_BYTES // BATCH_BYTES):
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
