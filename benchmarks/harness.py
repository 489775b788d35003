"""How every figure here is taken: the sides in turn (A B A B ...), a warm-up thrown away, medians with their range.

A side is a function that does the work once and returns how much it did (records, bytes); the harness times it. The
result of `compare` is a plain dict, so that `--json` and the table show the same numbers.
"""

import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

POOL_BYTES = 4 << 20  # payloads come from a random pool: one repeated value flatters every codec and cache


class Timed(NamedTuple):
    """What a side did by its own clock, because it had to get ready before, or to tidy up behind."""

    work: float
    seconds: float


Side = Callable[[], float | Timed]


class AtMost(NamedTuple):
    """A goal that ours divided by the peer's has to stay below: a time, a size."""

    ratio: float

    def cells(self) -> dict[str, float]:
        """What a result keeps of it."""
        return {"goal": self.ratio, "at_most": 1}


def compare(
    sides: Mapping[str, Side],
    *,
    rounds: int,
    unit: str = "records/s",
    ours: str | None = None,
    goals: Mapping[str, float] | None = None,
    warm_ups: int = 1,
) -> dict[str, Any]:
    """Run every side `rounds` times in turn after `warm_ups`; rates per side, and ours over each peer, pair by pair.

    `sides`: name to function that returns the amount of work done, or that and its own seconds. `ours`: the side that
    the others are peers of (the first by default). `goals`: peer's name to the least ratio wanted, shown beside what
    was measured.
    """
    ours = ours or next(iter(sides))
    for _ in range(warm_ups):
        for side in sides.values():
            side()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            done = side()
            taken_s = time.perf_counter() - began
            work, seconds = done if isinstance(done, Timed) else (done, taken_s)
            rates[name].append(work / seconds)
    result: dict[str, Any] = {"unit": unit, "rounds": rounds, "ours": ours, "rates": {}, "ratios": {}}
    for name, values in rates.items():
        result["rates"][name] = spread(values)
        if name != ours:
            pairs = [mine / theirs for mine, theirs in zip(rates[ours], values, strict=True)]
            result["ratios"][name] = spread(pairs) | ({"goal": goals[name]} if goals and name in goals else {})
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum of what the rounds gave."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory on the disk that the working directory is on (/tmp may be memory), removed at the end."""
    root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path.cwd()))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def random_values(count: int, size_bytes: int, *, seed: int = 1) -> list[bytes]:
    """`count` values cut from a random pool at rising places, so that no two neighbours are equal."""
    pool = random.Random(seed).randbytes(POOL_BYTES + size_bytes)
    step = 977  # prime: the places do not repeat before the pool is through
    places = ((i * step) % POOL_BYTES for i in range(count))
    return [pool[place : place + size_bytes] for place in places]


def machine() -> dict[str, Any]:
    """What the figures were taken on: processors, memory, kernel, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("numpy", "pyspark", "pyarrow", "aiokafka", "confluent-kafka")
    peers = ("lmdb", "rocksdict", "litequeue", "persist-queue")
    return {
        "processors": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in (*packages, *peers)},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
