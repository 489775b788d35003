"""Appending to the log: lists of 100 B values into the page cache and to disk, one durable caller, 256 of them.

Sides are compared within one durability class only. The memory figure is the resident set of a process of its own
that appends ten million records, taken at every million.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch

VALUE_BYTES = 100
LIST_RECORDS = 10_000
LISTS = 40
SINGLES = 300
CALLERS = 256
MEMORY_RECORDS = 10_000_000


def run(rounds: int) -> dict[str, Any]:
    """Four comparisons by title; the first one's notes hold the memory of the appending process."""
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="log-append-", dir=Path.cwd()))  # not /tmp: it may be memory
        stack.callback(shutil.rmtree, root)
        values = random_values(LIST_RECORDS, VALUE_BYTES)
        return {
            "lists of 10,000 values, page cache": _lists(stack, root, values, rounds, flushed=False),
            "lists of 10,000 values, fdatasync each": _lists(stack, root, values, rounds, flushed=True),
            "one value at a time, on disk before the answer": _singles(stack, root, values, rounds),
            f"{CALLERS} callers, each waits for its own value to be on disk": _callers(stack, root, values, rounds),
        }


def _lists(stack: ExitStack, root: Path, values: list[bytes], rounds: int, *, flushed: bool) -> dict[str, Any]:
    durability = Durability.FLUSHED if flushed else Durability.BUFFERED
    kind = "flushed" if flushed else "buffered"
    log = stack.enter_context(_fresh_log(root, f"{kind}-0"))
    bare = stack.enter_context(_fresh_file(root / f"{kind}.bare"))
    table = stack.enter_context(_sqlite(root / f"{kind}.sqlite", "FULL" if flushed else "OFF"))
    encoded = bytes(encode_batch(values, timestamps_ms=0).data)

    def ours() -> int:
        for _ in range(LISTS):
            log.append(values, durability=durability)
        return LISTS * len(values)

    def writes() -> int:
        for _ in range(LISTS):
            os.write(bare, encoded)
            if flushed:
                os.fdatasync(bare)
        return LISTS * len(values)

    def inserts() -> int:
        for _ in range(LISTS):
            with table:
                table.executemany("INSERT INTO log (value) VALUES (?)", zip(values))
        return LISTS * len(values)

    result = compare({"pushrep": ours, "write of encoded bytes": writes, "SQLite executemany": inserts}, rounds=rounds)
    if not flushed:
        result["memory"] = memory = _memory()
        resident = f"{memory['first_mib']:.1f} MiB after the first million, {memory['last_mib']:.1f} MiB at the end"
        result["notes"] = [f"memory over {MEMORY_RECORDS:,} records: {resident}, at most {memory['peak_mib']:.1f} MiB"]
    return result


def _singles(stack: ExitStack, root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    log = stack.enter_context(_fresh_log(root, "singles-0"))
    bare = stack.enter_context(_fresh_file(root / "singles.bare"))
    table = stack.enter_context(_sqlite(root / "singles.sqlite", "FULL"))

    def each(one: Callable[[bytes], object]) -> Callable[[], int]:
        def side() -> int:
            for value in values[:SINGLES]:
                one(value)
            return SINGLES

        return side

    def insert(value: bytes) -> None:
        with table:
            table.execute("INSERT INTO log (value) VALUES (?)", (value,))

    def write(value: bytes) -> None:
        os.write(bare, value)
        os.fdatasync(bare)

    sides = {"pushrep": each(log.append), "SQLite FULL": each(insert), "write + fdatasync": each(write)}
    return compare(sides, rounds=rounds, goals={"SQLite FULL": 1.3, "write + fdatasync": 0.67})


def _callers(stack: ExitStack, root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    log = stack.enter_context(_fresh_log(root, "callers-0"))

    def alone() -> int:
        for value in values[:CALLERS]:
            log.append(value)
        return CALLERS

    def together() -> int:
        threads = [threading.Thread(target=log.append, args=(value,)) for value in values[:CALLERS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return CALLERS

    return compare({"256 callers": together, "one caller": alone}, rounds=rounds, goals={"one caller": 4})


@contextmanager
def _fresh_log(root: Path, name: str) -> Iterator[SegmentLog]:
    with SegmentLog.open(root / name, LogConfig(preallocate_bytes=16 << 20)) as log:
        yield log


@contextmanager
def _fresh_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _sqlite(path: Path, synchronous: str) -> Iterator[sqlite3.Connection]:
    table = sqlite3.connect(path)
    table.execute("PRAGMA journal_mode = WAL")
    table.execute(f"PRAGMA synchronous = {synchronous}")
    table.execute("CREATE TABLE log (n INTEGER PRIMARY KEY, value BLOB)")
    try:
        yield table
    finally:
        table.close()


def _memory() -> dict[str, float]:
    """Resident MiB of a process that appends: after the first million records, at the end, the most at any million."""
    command = [sys.executable, "-m", "benchmarks.log_append"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    taken = json.loads(done.stdout)
    return {"first_mib": taken[0], "last_mib": taken[-1], "peak_mib": max(taken)}


def _append_and_measure() -> list[float]:
    values = random_values(LIST_RECORDS, VALUE_BYTES)
    taken = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root, _fresh_log(Path(root), "memory-0") as log:
        for number in range(MEMORY_RECORDS // LIST_RECORDS):
            log.append(values, durability=Durability.BUFFERED)
            if (number + 1) * LIST_RECORDS % 1_000_000 == 0:
                taken.append(_resident_mib())
    return taken


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    print(json.dumps(_append_and_measure()))
