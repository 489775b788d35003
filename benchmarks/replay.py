"""G15: replay of a local log from the page cache, as whole batches beside preadv of the same bytes, and as records.

One partition, values of 1 KiB from a random pool, batches of 400 KB, 64 KiB and 4 KiB. Every batch is checked (CRC) and
handed out as a view of memory that stays as it is. preadv reads the segments in pieces of 1 MiB into one buffer and
looks at nothing; the buffer begins with a page, which the kernel's copy is a third faster for, and another side has a
plain bytearray. The third takes the CRC-32C of what it read, too, and knows nothing of batches. `log.records` is the
plain reader's loop over the same log: what a session costs beside it. Records beside Kafka: replay_kafka.
"""

import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values, scratch
from pushrep.log import Durability, SegmentLog
from pushrep.records.header import crc32c
from pushrep.replay import TO_END, ReplayClient, ReplayRequest

LOG_BYTES = 256 << 20
BATCHES = {"400 KB": 400_000, "64 KiB": 64 << 10, "4 KiB": 4 << 10}
BLOCK_BYTES = 1 << 20
BATCHES_GOAL = 0.7


def run(rounds: int) -> dict[str, Any]:
    results = {}
    paged = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    for told, batch_bytes in BATCHES.items():
        with scratch("replay") as root:
            write_log(root / "orders-0", 1024, batch_bytes)
            segments = sorted((root / "orders-0").glob("*.log"))
            with ReplayClient(root) as client:
                results[f"as batches of {told}"] = compare(
                    {
                        "batches()": partial(batches, client),
                        "preadv": partial(plain, segments, paged),
                        "preadv into a bytearray": partial(plain, segments, memoryview(bytearray(BLOCK_BYTES))),
                        "preadv and CRC": partial(plain, segments, paged, is_checked=True),
                    },
                    rounds=rounds,
                    unit="bytes/s",
                    goals={"preadv": BATCHES_GOAL},
                )
    for size in (100, 1024):
        with scratch("replay") as root:
            write_log(root / "orders-0", size, BATCHES["400 KB"])
            with ReplayClient(root) as client, SegmentLog.open_reader(root / "orders-0") as reader:
                results[f"as records, {size} B values"] = compare(
                    {
                        "replay": lambda c=client: sum(1 for _ in c.replay(ReplayRequest("orders-0", length=TO_END))),
                        "log.records": lambda r=reader: sum(1 for _ in r.records(0)),
                    },
                    rounds=rounds,
                )
    return results


def write_log(path: Path, value_bytes: int, batch_bytes: int) -> None:
    per_batch = batch_bytes // value_bytes
    values = random_values(per_batch, value_bytes)
    with SegmentLog.open(path) as log:
        for _ in range(LOG_BYTES // (per_batch * value_bytes)):
            log.append(values, durability=Durability.BUFFERED)


def batches(client: ReplayClient) -> float:
    replay = client.replay(ReplayRequest("orders-0", length=TO_END))
    return sum(len(given.batch.data) for given in replay.batches())


def plain(segments: list[Path], buffer: memoryview, *, is_checked: bool = False) -> float:
    done = 0
    for path in segments:
        fd = os.open(path, os.O_RDONLY)
        try:
            position = 0
            while got := os.preadv(fd, [buffer], position):
                position += got
                if is_checked:
                    crc32c(buffer, 0, got)
            done += position
        finally:
            os.close(fd)
    return done
