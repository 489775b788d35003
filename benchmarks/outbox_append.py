"""Appending through an Outbox: one record at a time, with a position of its own, many at once; how long an open takes.

The peer of `append` is confluent-kafka's `produce()` with librdkafka's mock cluster behind it. Both return at once and
deliver in the background; both are timed until everything is delivered (page cache; acks=1). The memory is the resident
set of a process of its own that appends ten million records one by one, taken at every million.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from benchmarks.harness import compare, random_values, spread
from filtering import StreamMetadata
from pushrep.log import Durability
from pushrep.outbox import Outbox

VALUE_BYTES = 100
RECORDS = 200_000
SINGLES = 300
OPENED_RECORDS = 5_000_000
MEMORY_RECORDS = 10_000_000


def run(rounds: int) -> dict[str, Any]:
    """Two comparisons and the time of an open, by title; the first one's notes hold the memory."""
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="outbox-append-", dir=Path.cwd()))  # not /tmp: it may be memory
        stack.callback(shutil.rmtree, root)
        values = random_values(10_000, VALUE_BYTES)
        return {
            "append one by one, until all is in the log": _one_by_one(stack, root, values, rounds),
            "one caller, each record on disk before the next": _durable_singles(stack, root, values, rounds),
            f"open with {OPENED_RECORDS:,} records": _open(root, values, rounds),
        }


def _one_by_one(stack: ExitStack, root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    outbox = stack.enter_context(_outbox(root / "buffered", Durability.BUFFERED))
    positions = count()
    producer = Producer(
        {"test.mock.num.brokers": 1, "queue.buffering.max.messages": RECORDS * 2, "acks": 1, "log_level": 3}
    )

    def append() -> int:
        for number in range(RECORDS):
            outbox.append(0, values[number % 10_000])
        outbox.flush()
        return RECORDS

    def append_positioned() -> int:
        for number in range(RECORDS):
            metadata = StreamMetadata(7, 0, next(positions))
            outbox.append(0, values[number % 10_000], timestamp_ms=1_700_000_000_000, metadata=metadata)
        outbox.flush()
        return RECORDS

    def append_many() -> int:
        for _ in range(RECORDS // len(values)):
            outbox.append_many(0, values)
        outbox.flush()
        return RECORDS

    def produce() -> int:
        for number in range(RECORDS):
            producer.produce("outbox", values[number % 10_000], partition=0)
        producer.flush()
        return RECORDS

    sides: dict[str, Callable[[], float]] = {
        "append": append,
        "confluent-kafka produce": produce,
        "append with metadata and time": append_positioned,
        "append_many of 10,000": append_many,
    }
    result = compare(sides, rounds=rounds, goals={"confluent-kafka produce": 0.8})
    resident = _memory()
    result["memory"] = resident
    told = f"{resident[0]:.1f} MiB after the first million, {resident[-1]:.1f} at the end, at most {max(resident):.1f}"
    result["notes"] = [f"memory over {MEMORY_RECORDS:,} records one by one: {told}"]
    return result


def _durable_singles(stack: ExitStack, root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    outbox = stack.enter_context(_outbox(root / "flushed", Durability.FLUSHED))
    bare = os.open(root / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    stack.callback(os.close, bare)

    def append_and_wait() -> int:
        for value in values[:SINGLES]:
            outbox.append(0, value).result()
        return SINGLES

    def write() -> int:
        for value in values[:SINGLES]:
            os.write(bare, value)
            os.fdatasync(bare)
        return SINGLES

    return compare({"append and wait": append_and_wait, "write + fdatasync": write}, rounds=rounds)


def _open(root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    """Records per second that an open reads the positions of: there is no peer, so only our own side."""
    path = root / "opened"
    with _outbox(path, Durability.BUFFERED) as outbox:
        for _ in range(OPENED_RECORDS // len(values)):
            outbox.append_many(0, values)
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        with _outbox(path, Durability.BUFFERED):
            rates.append(OPENED_RECORDS / (time.perf_counter() - began))
    return {
        "unit": "records/s", "rounds": rounds, "ours": "open", "rates": {"open": spread(rates)}, "ratios": {},
        "notes": ["every key is read, for last_metadata; after a clean close nothing else is"],
    }  # fmt: skip


@contextmanager
def _outbox(path: Path, durability: Durability) -> Iterator[Outbox]:
    with Outbox.open(path, topic="outbox", partitions=1, producer="benchmark", durability=durability) as outbox:
        yield outbox


def _memory() -> list[float]:
    """Resident MiB of an appending process at every million records."""
    done = subprocess.run([sys.executable, "-m", __name__], check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(done.stdout))


def _append_and_measure() -> list[float]:
    values = random_values(10_000, VALUE_BYTES)
    taken = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root, _outbox(Path(root), Durability.BUFFERED) as outbox:
        for number in range(MEMORY_RECORDS):
            outbox.append(0, values[number % 10_000])
            if (number + 1) % 1_000_000 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                taken.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return taken


if __name__ == "__main__":
    print(json.dumps(_append_and_measure()))
