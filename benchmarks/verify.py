"""A full verification of a log beside a bare sequential read of the same files, both from the disk and not the cache.

Before each side's turn the pages are dropped (posix_fadvise DONTNEED on synced files), outside of the timing. Two
shapes: batches of 256 KiB, as lists of values make them, and batches of 4 KiB, where the work per batch counts.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values, spread
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.verify import verify_log

GOAL = 0.8
READ_BYTES = 1 << 20
SHAPES = {"batches of 256 KiB": (1 << 30, 2560), "batches of 4 KiB": (256 << 20, 40)}


def run(rounds: int) -> dict[str, Any]:
    """One comparison a shape; the rates are bytes per second."""
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="verify-", dir=Path.cwd()))  # not /tmp: it may be memory
        stack.callback(shutil.rmtree, root)
        results = {}
        for number, (title, (size_bytes, values_per_batch)) in enumerate(SHAPES.items()):
            log = _filled(root / f"log-{number}", size_bytes, values_per_batch)
            results[f"verify, {title}, {size_bytes >> 20} MiB"] = _beside_a_read(log, rounds)
        return results


def _filled(path: Path, size_bytes: int, values_per_batch: int) -> Path:
    values = random_values(values_per_batch, 100)
    with SegmentLog.open(path, LogConfig(segment_bytes=256 << 20)) as log:
        written = 0
        while written < size_bytes:
            log.append(values, timestamps_ms=0, durability=Durability.BUFFERED)
            written += values_per_batch * 108
    return path


def _beside_a_read(log: Path, rounds: int) -> dict[str, Any]:
    files = sorted(log.glob("*.log"))
    sides: dict[str, Callable[[], int]] = {"pushrep log verify": lambda: _verify(log), "read": lambda: _read(files)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    # harness.compare times whole sides; what makes the cache cold must not count, so the turns are taken here.
    for turn in range(rounds + 1):
        for name, side in sides.items():
            _drop(files)
            began = time.perf_counter()
            work = side()
            if turn:  # the first one warms up
                rates[name].append(work / (time.perf_counter() - began))
    ours, theirs = rates.values()
    warm = compare(sides, rounds=3, unit="bytes/s")["rates"]
    cached = {name: rate["median"] / 2**20 for name, rate in warm.items()}
    return {
        "unit": "bytes/s",
        "rounds": rounds,
        "ours": "pushrep log verify",
        "rates": {name: spread(values) for name, values in rates.items()},
        "ratios": {"read": spread([a / b for a, b in zip(ours, theirs, strict=True)]) | {"goal": GOAL}},
        "notes": [
            f"from the page cache: {cached['pushrep log verify']:,.0f} MiB/s verified, {cached['read']:,.0f} MiB/s read"
        ],
    }


def _verify(log: Path) -> int:
    report = verify_log(log)
    assert report.is_whole, report.findings
    return report.bytes_read


def _read(files: list[Path]) -> int:
    buffer, total = bytearray(READ_BYTES), 0
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := os.readv(fd, [buffer]):
            total += count
        os.close(fd)
    return total


def _drop(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
