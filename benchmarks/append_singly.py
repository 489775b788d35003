"""G1: `append()` one record at a time, 100 B, into the page cache (D0), beside a producer and two queues on disk.

`append` and confluent-kafka's `produce()` (librdkafka's mock cluster behind it, acks=1) return at once and deliver in
the background; both are timed until everything is delivered. The queues have put a record when `put` returns:
litequeue (WAL, synchronous=NORMAL) and persist-queue's file queue sync no single record, so they are of this class as
they come; persist-queue's SQLite queue syncs each, so its syncs are switched off here, which it has no setting for.
The memory is the resident set of a process of its own that appends ten million records, taken at every million.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from benchmarks.harness import compare, random_values, scratch
from filtering import StreamMetadata
from pushrep.log import Durability
from pushrep.outbox import Outbox

VALUE_BYTES = 100
RECORDS = 200_000
QUEUED = 5_000  # of the slow peers
VALUES = 10_000
MEMORY_RECORDS = 10_000_000
GOALS = {"confluent-kafka produce()": 0.8, "litequeue": 30, "persist-queue": 60}


def run(rounds: int) -> dict[str, Any]:
    """Two comparisons by title; the first one's notes hold the memory."""
    from litequeue import LiteQueue  # noqa: PLC0415 - `make bench` installs the peers
    from persistqueue import Queue, SQLiteQueue  # noqa: PLC0415

    with ExitStack() as stack:
        root = stack.enter_context(scratch("append-singly"))
        values = random_values(VALUES, VALUE_BYTES)
        texts = [value[: VALUE_BYTES // 2].hex() for value in values]  # litequeue takes text
        outbox = stack.enter_context(_outbox(root / "outbox"))
        producer = Producer(
            {"test.mock.num.brokers": 1, "queue.buffering.max.messages": RECORDS * 2, "acks": 1, "log_level": 3}
        )

        def produce() -> int:
            for number in range(RECORDS):
                producer.produce("outbox", values[number % VALUES], partition=0)
            producer.flush()
            return RECORDS

        def putting(put: Callable[[Any], object], these: list[Any]) -> Callable[[], int]:
            def side() -> int:
                for number in range(QUEUED):
                    put(these[number % VALUES])
                return QUEUED

            return side

        sqlite, files = SQLiteQueue(str(root / "persist"), auto_commit=True), Queue(str(root / "persist-files"))
        sqlite._putter.execute("PRAGMA synchronous = OFF")  # noqa: SLF001
        sides: dict[str, Callable[[], float]] = {
            "append": lambda: _append(outbox, values),
            "confluent-kafka produce()": produce,
            "litequeue": putting(LiteQueue(str(root / "lite.sqlite")).put, texts),
            "persist-queue": putting(files.put, values),
            "persist-queue's SQLite, no syncs": putting(sqlite.put, values),
        }
        singly = compare(sides, rounds=rounds, goals=GOALS)
        sqlite.close()
        singly["memory"] = resident = _memory()
        told = f"{resident[0]:.1f} MiB after a million, {resident[-1]:.1f} at the end, at most {max(resident):.1f}"
        singly["notes"] = [f"memory of append over {MEMORY_RECORDS:,} records: {told}"]
        return {
            "G1: append one by one, 100 B, D0": singly,
            "the outbox's other ways, 100 B, D0": _other_ways(outbox, values, rounds),
        }


def _other_ways(outbox: Outbox, values: list[bytes], rounds: int) -> dict[str, Any]:
    positions = count()

    def append_positioned() -> int:
        for number in range(RECORDS):
            metadata = StreamMetadata(7, 0, next(positions))
            outbox.append(0, values[number % VALUES], timestamp_ms=1_700_000_000_000, metadata=metadata)
        outbox.flush()
        return RECORDS

    def append_many() -> int:
        for _ in range(RECORDS // VALUES):
            outbox.append_many(0, values)
        outbox.flush()
        return RECORDS

    sides: dict[str, Callable[[], float]] = {
        "append": lambda: _append(outbox, values),
        "append with metadata and time": append_positioned,
        "append_many of 10,000": append_many,
    }
    return compare(sides, rounds=rounds)


def _append(outbox: Outbox, values: list[bytes]) -> int:
    for number in range(RECORDS):
        outbox.append(0, values[number % VALUES])
    outbox.flush()
    return RECORDS


def _outbox(path: Path) -> Outbox:
    return Outbox.open(path, topic="outbox", partitions=1, producer="benchmark", durability=Durability.BUFFERED)


def _memory() -> list[float]:
    """Resident MiB of an appending process at every million records."""
    done = subprocess.run([sys.executable, "-m", __name__], check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(done.stdout))


def _append_and_measure() -> list[float]:
    values = random_values(VALUES, VALUE_BYTES)
    taken = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root, _outbox(Path(root)) as outbox:
        for number in range(MEMORY_RECORDS):
            outbox.append(0, values[number % VALUES])
            if (number + 1) % 1_000_000 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                taken.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return taken


if __name__ == "__main__":
    print(json.dumps(_append_and_measure()))
