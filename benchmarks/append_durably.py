"""G4, G5: the caller waits until its own record is on disk (D2): one caller, and 256 whom one sync may serve together.

The bare side writes the same 100 B behind one another and syncs each time, into a growing file and into one whose
blocks were written before. Every call is timed by itself: the rates are of whole rounds, the latencies p50 of a round.
"""

import os
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from pushrep.log import SegmentLog
from pushrep.outbox import Outbox

VALUE_BYTES = 100
CALLS = 100  # a round: short ones, so that what else the disk does meets all sides equally
CALLERS, CALLS_EACH = 256, 64  # a thread's start costs half a call: it must not be what is measured

Append = Callable[[bytes], object]


def run(rounds: int) -> dict[str, Any]:
    """Throughput and latency of one caller, throughput of many, by title."""
    values = random_values(4000, VALUE_BYTES)
    with ExitStack() as stack:
        root = stack.enter_context(scratch("append-durably"))
        throughput, latency = _one_caller(stack, root, values, 3 * rounds)
        return {
            "G4: one caller, 100 B, D2": throughput,
            "G4: latency of one caller, p50 of a round": latency,
            "G5: 256 callers, 100 B, D2": _many_callers(stack, root, values, rounds),
        }


def _one_caller(
    stack: ExitStack, root: Path, values: list[bytes], rounds: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    log = stack.enter_context(SegmentLog.open(root / "alone-0"))
    outbox = stack.enter_context(Outbox.open(root / "outbox", topic="alone", partitions=1, producer="benchmark"))
    appends: dict[str, Append] = {
        "SegmentLog.append": log.append,
        "SQLite FULL": _sqlite(stack, root / "sqlite"),
        "bare, growing file": _bare(stack, root / "growing", 0),
        "bare, written blocks": _bare(stack, root / "written", (rounds + 1) * CALLS * VALUE_BYTES),
        "Outbox.append and result": lambda value: outbox.append(0, value).result(),
    }
    taken: dict[str, list[list[float]]] = {name: [] for name in appends}

    def side(name: str, append: Append) -> Callable[[], float]:
        def calls() -> float:
            times = []
            for value in values[:CALLS]:
                began = time.perf_counter()
                append(value)
                times.append(time.perf_counter() - began)
            taken[name].append(times)
            return CALLS

        return calls

    sides = {name: side(name, append) for name, append in appends.items()}
    throughput = compare(sides, rounds=rounds, goals={"SQLite FULL": 1.3})
    return throughput, _latency({name: of_rounds[1:] for name, of_rounds in taken.items()})


def _latency(taken: dict[str, list[list[float]]]) -> dict[str, Any]:
    """From the seconds of every call, round by round: p50 of a round, ours beside each other side."""
    medians = {name: [statistics.median(times) * 1e6 for times in of_rounds] for name, of_rounds in taken.items()}
    ours = medians["SegmentLog.append"]
    ratios = {
        name: spread([mine / other for mine, other in zip(ours, others, strict=True)])
        for name, others in medians.items()
        if name != "SegmentLog.append"
    }
    for name in ("bare, growing file", "bare, written blocks"):
        ratios[name] |= AtMost(1.5).cells()
    p99 = {name: statistics.quantiles(chain.from_iterable(rounds), n=100)[98] * 1e6 for name, rounds in taken.items()}
    return {
        "unit": "µs",
        "rounds": len(ours),
        "ours": "SegmentLog.append",
        "rates": {name: spread(values) for name, values in medians.items()},
        "ratios": ratios,
        "notes": ["p99 over all rounds: " + ", ".join(f"{name} {value:.0f}" for name, value in p99.items())],
    }


def _many_callers(stack: ExitStack, root: Path, values: list[bytes], rounds: int) -> dict[str, Any]:
    log = stack.enter_context(SegmentLog.open(root / "many-0"))

    def alone() -> float:
        for value in values[:CALLS]:
            log.append(value)
        return CALLS

    def together() -> float:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return CALLERS * CALLS_EACH

    def work(number: int) -> None:
        for value in values[number : number + CALLS_EACH]:
            log.append(value)

    return compare({"256 callers": together, "one caller": alone}, rounds=rounds, goals={"one caller": 4})


def _sqlite(stack: ExitStack, path: Path) -> Append:
    table = sqlite3.connect(path, isolation_level=None)  # each insert is a transaction of its own
    stack.callback(table.close)
    table.execute("PRAGMA journal_mode = WAL")
    table.execute("PRAGMA synchronous = FULL")
    table.execute("CREATE TABLE log (n INTEGER PRIMARY KEY, value BLOB)")
    return lambda value: table.execute("INSERT INTO log (value) VALUES (?)", (value,))


def _bare(stack: ExitStack, path: Path, written_bytes: int) -> Append:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    stack.callback(os.close, fd)
    os.pwrite(fd, bytes(written_bytes), 0)
    os.fsync(fd)
    end = 0

    def append(value: bytes) -> None:
        nonlocal end
        os.pwrite(fd, value, end)
        os.fdatasync(fd)
        end += len(value)

    return append
