"""G15: replay of a local log from the page cache, as whole batches beside preadv of the same bytes, and as records.

One partition, 100-byte and 1-KiB values from a random pool, batches of about 400 KB. The batches are checked (CRC) and
handed out; preadv reads the segments into one buffer and looks at nothing. `log.records` is the plain reader's loop
over the same log: what a session costs beside it.
"""

import os
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values, scratch
from pushrep.log import Durability, SegmentLog
from pushrep.replay import TO_END, ReplayClient, ReplayRequest

LOG_BYTES = 128 << 20
BATCH_BYTES = 400_000
BLOCK_BYTES = 1 << 20
BATCHES_GOAL = 0.7


def run(rounds: int) -> dict[str, Any]:
    results = {}
    for size in (100, 1024):
        with scratch("replay") as root:
            write_log(root / "orders-0", size)
            segments = sorted((root / "orders-0").glob("*.log"))
            with ReplayClient(root) as client, SegmentLog.open_reader(root / "orders-0") as reader:
                results[f"as batches, {size} B values"] = compare(
                    {"batches()": lambda c=client: batches(c), "preadv": lambda s=segments: plain(s)},
                    rounds=rounds,
                    unit="bytes/s",
                    goals={"preadv": BATCHES_GOAL},
                )
                results[f"as records, {size} B values"] = compare(
                    {
                        "replay": lambda c=client: sum(1 for _ in c.replay(ReplayRequest("orders-0", length=TO_END))),
                        "log.records": lambda r=reader: sum(1 for _ in r.records(0)),
                    },
                    rounds=rounds,
                )
    return results


def write_log(path: Path, value_bytes: int) -> None:
    per_batch = BATCH_BYTES // value_bytes
    values = random_values(per_batch, value_bytes)
    with SegmentLog.open(path) as log:
        for _ in range(LOG_BYTES // (per_batch * value_bytes)):
            log.append(values, durability=Durability.BUFFERED)


def batches(client: ReplayClient) -> float:
    replay = client.replay(ReplayRequest("orders-0", length=TO_END))
    return sum(len(given.batch.data) for given in replay.batches())


def plain(segments: list[Path]) -> float:
    buffer, done = bytearray(BLOCK_BYTES), 0
    for path in segments:
        fd = os.open(path, os.O_RDONLY)
        try:
            position = 0
            while got := os.preadv(fd, [buffer], position):
                position += got
            done += position
        finally:
            os.close(fd)
    return done
