"""Ten thousand partitions in one directory: opening them after a clean stop, after a kill, and the memory each takes.

The clock counts `SegmentLog.open` of every log of the directory and nothing else. Each holds a few records. A killed
process had written to every tenth of them. Goals: 10 s, 20 KB.
The peer is what no opening can do without: to list each directory and to read the first bytes of its newest segment.
"""

import gc
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.harness import AtMost, scratch, spread
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import (
    PARTITION_METADATA_NAME,
    CheckpointFile,
    encode_partition_metadata,
    read_checkpoint,
    read_clean_marker,
    write_checkpoint,
    write_clean_marker,
)

PARTITIONS = 10_000
SECONDS_MAX, KILOBYTES_MAX = 10, 20
RECORDS = 20


def make(directory: Path, partitions: int) -> None:
    """`partitions` logs of a few records each, as a clean stop leaves them: one is made, the others are its copies."""
    with SegmentLog.open(directory / "many-0") as log:
        log.append([b"%04d" % n * 25 for n in range(RECORDS)])
        first = log.path
    files = {name: (first / name).read_bytes() for name in os.listdir(first) if name != PARTITION_METADATA_NAME}
    for n in range(1, partitions):
        path = directory / f"many-{n}"
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        (path / PARTITION_METADATA_NAME).write_bytes(encode_partition_metadata(uuid4()))
    names = [f"many-{n}" for n in range(partitions)]
    (clean,) = read_clean_marker(directory, REAL_FILESYSTEM).values()
    write_clean_marker(directory, dict.fromkeys(names, clean), REAL_FILESYSTEM)
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.LOG_START_OFFSET, CheckpointFile.HIGH_WATERMARK):
        (offset,) = read_checkpoint(directory, checkpoint).values()
        write_checkpoint(directory, checkpoint, dict.fromkeys(names, offset))


def open_all(directory: Path, partitions: int) -> tuple[list[SegmentLog], dict[str, float]]:
    """The opened logs; the seconds that took, of the clock and of the processor; kilobytes of memory each takes."""
    gc.collect()
    before, began, worked = _resident_bytes(), time.perf_counter(), time.process_time()
    logs = [SegmentLog.open(directory / f"many-{n}", LogConfig()) for n in range(partitions)]
    seconds, processor_s = time.perf_counter() - began, time.process_time() - worked
    gc.collect()
    return logs, {
        "open_s": seconds,
        "processor_s": processor_s,
        "kilobytes": (_resident_bytes() - before) / partitions / 1000,
    }


def _measure(directory: Path, partitions: int, *, kill: bool) -> dict[str, float]:
    logs, found = open_all(directory, partitions)
    descriptors = len(os.listdir("/proc/self/fd"))
    opening = logs[0].recovery.opening.value
    began = time.perf_counter()
    for log in logs[::10] if kill else ():
        log.append([b"unflushed"] * RECORDS, durability=Durability.BUFFERED)
    if not kill:
        for log in logs:
            log.close()
    return found | {
        "close_s": time.perf_counter() - began,
        "descriptors": descriptors,
        "clean": float(opening == "normal"),
    }


def _in_a_process(directory: Path, partitions: int, *, kill: bool) -> dict[str, float]:
    """In a fresh process, so that memory is what the logs take; `kill` leaves without closing them."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(there, directory, partitions, kill))
    process.start()
    there.close()
    found: dict[str, float] = here.recv()
    process.join()
    return found


def _child(pipe: Any, directory: Path, partitions: int, kill: bool) -> None:  # noqa: FBT001
    pipe.send(_measure(directory, partitions, kill=kill))
    pipe.close()
    if kill:
        os._exit(9)


def _bare(directory: Path, partitions: int) -> float:
    began = time.perf_counter()
    for n in range(partitions):
        path = directory / f"many-{n}"
        newest = max(name for name in os.listdir(path) if name.endswith(".log"))
        fd = os.open(path / newest, os.O_RDONLY)
        os.pread(fd, 4096, 0)
        os.close(fd)
    return time.perf_counter() - began


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(rounds: int, partitions: int = PARTITIONS) -> dict[str, Any]:
    """Seconds to open `partitions` logs, after a clean stop and after a kill, beside the bare calls; memory a log."""
    notes: list[str] = []
    seconds: dict[str, list[float]] = {"open, killed": [], "open, closed clean": [], "bare: list and read each": []}
    kilobytes: list[float] = []
    with scratch("many") as directory:
        began = time.perf_counter()
        make(directory, partitions)
        notes.append(f"made {partitions} logs in {time.perf_counter() - began:.1f} s")
        os.sync()
        for _ in range(rounds):
            clean = _in_a_process(directory, partitions, kill=True)
            killed = _in_a_process(directory, partitions, kill=False)
            assert (clean["clean"], killed["clean"]) == (1.0, 0.0), "each opening finds what the one before left"
            for name, found in (("open, killed", killed), ("open, closed clean", clean)):
                seconds[name].append(found["open_s"])
                kilobytes.append(found["kilobytes"])
                notes.append(_told(name, found))
            seconds["bare: list and read each"].append(_bare(directory, partitions))
    return {
        f"{partitions:,} partitions: open": _beside(seconds, SECONDS_MAX, "s", rounds) | {"notes": notes},
        f"{partitions:,} partitions: memory": _beside({"a log": kilobytes}, KILOBYTES_MAX, "kB", rounds),
    }


def _told(name: str, found: dict[str, float]) -> str:
    return (
        f"{name}: {found['processor_s']:.2f} of {found['open_s']:.2f} s on the processor; "
        f"{found['descriptors']:.0f} descriptors in all"
    ) + (f"; closing all takes {found['close_s']:.2f} s" if "killed" in name else "")


def _beside(sides: dict[str, list[float]], limit: float, unit: str, rounds: int) -> dict[str, Any]:
    """The first side beside the others and its limit."""
    ours, *others = sides
    ratios = {
        name: spread([mine / other for mine, other in zip(sides[ours], sides[name], strict=True)]) for name in others
    }
    ratios["limit"] = spread([value / limit for value in sides[ours]]) | AtMost(1).cells()
    rates = {name: spread(values) for name, values in sides.items()} | {"limit": spread([limit])}
    return {"unit": unit, "rounds": rounds, "ours": ours, "rates": rates, "ratios": ratios}
