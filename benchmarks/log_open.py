"""G12, G13: how long an open takes, after a clean stop and after kill -9, with 1 GiB in the log (and 10 with --long).

After a clean stop: the log and the outbox on it, and the log when nothing of its files is in the page cache.
After kill -9: a process of its own opens the log, appends a tail that it never syncs, and kills itself; the open that
follows has to sync, read back and check that tail. RocksDB's peer process does the same: its tail is in its own log,
with the rest in tables (no compaction, a memtable larger than the tail). Records of 1 KiB, in lists of 1,000.
Memory: the largest resident set of a process that opens a log without checkpoints, so that all of it is scanned.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import AtMost, random_values, scratch, spread
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.outbox import Outbox

GIB, MIB = 1 << 30, 1 << 20
TAILS = (16 * MIB, 64 * MIB)
OPEN_MS_MAX, TIMES_MAX = 50, 1.5
MEMORY_MIB_MAX = 200
NEVER = LogConfig(flush_bytes=1 << 40, flush_ms=86_400_000)  # the tail stays above the recovery point
ROCKS_BUFFER_BYTES = 256 * MIB


def run(rounds: int) -> dict[str, Any]:
    """With 1 GiB."""
    return _run(rounds, (GIB,))


def run_long(rounds: int) -> dict[str, Any]:
    """With 1 and 10 GiB; takes 25 GB of disk."""
    return _run(rounds, (GIB, 10 * GIB))


def _run(rounds: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    with scratch("log-open") as root:
        logs = {f"{size // GIB} GiB": root / f"{size // GIB}" for size in sizes}
        for (label, path), size in zip(logs.items(), sizes, strict=True):
            _fill(path, size)
            print(f"{label} are in the log")
        results = {"G12: open after a clean stop": _clean(logs, rounds)}
        _fill_rocks(root / "rocks", GIB)
        for tail in TAILS:
            title = f"G13: open after kill -9 with {tail // MIB} MiB unflushed"
            results[title] = _killed(logs, root / "rocks", tail, rounds)
        results["G13: memory of a recovery that scans everything"] = _memory(logs)
        return results


def _clean(logs: dict[str, Path], rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for label, path in logs.items():
            for name, cold, open_ in (
                (f"SegmentLog, {label}", False, _log),
                (f"SegmentLog, {label}, cold", True, _log),
                (f"Outbox, {label}", False, _outbox),
            ):
                if cold:
                    _drop(path)
                milliseconds = _open_ms(open_, path)
                if turn:
                    taken.setdefault(name, []).append(milliseconds)
    ours = f"SegmentLog, {list(logs)[-1]}"
    rates = {name: spread(times) for name, times in taken.items()} | {"limit": spread([OPEN_MS_MAX])}
    ratios = {"limit": spread([time / OPEN_MS_MAX for time in taken[ours]]) | AtMost(1).cells()}
    notes = [f"the outbox beside the limit: {max(v['median'] for k, v in rates.items() if 'Outbox' in k):.1f} ms"]
    if len(logs) > 1:
        first = f"SegmentLog, {next(iter(logs))}"
        pairs = [large / small for large, small in zip(taken[ours], taken[first], strict=True)]
        ratios[first] = spread(pairs) | AtMost(TIMES_MAX).cells()
        small, large = (taken[f"Outbox, {label}"] for label in (next(iter(logs)), list(logs)[-1]))
        growth = spread([b / a for a, b in zip(small, large, strict=True)])
        notes.append(f"the outbox with ten times as much takes {growth['median']:.2f} times as long")
    return {"unit": "ms", "rounds": rounds, "ours": ours, "rates": rates, "ratios": ratios, "notes": notes}


def _killed(logs: dict[str, Path], rocks: Path, tail: int, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {label: [] for label in [*logs, "RocksDB, 1 GiB"]}
    scanned = []
    for turn in range(rounds + 1):
        for label, path in logs.items():
            end = _die("tail", path, tail)
            began = time.perf_counter()
            with SegmentLog.open(path / "opened-0") as log:
                seconds = time.perf_counter() - began
                if log.log_end_offset != end:
                    raise AssertionError(f"{end} records were acknowledged, {log.log_end_offset} are there")
                scanned.append(log.recovery.bytes_scanned / MIB)
            if turn:
                taken[label].append(seconds * 1000)
        _die("tail-rocks", rocks, tail)
        milliseconds = _open_ms(_rocks, rocks)
        if turn:
            taken["RocksDB, 1 GiB"].append(milliseconds)
    ours = list(logs)[-1]
    ratios = {
        name: spread([mine / theirs for mine, theirs in zip(taken[ours], times, strict=True)])
        for name, times in taken.items()
        if name != ours
    }
    ratios["RocksDB, 1 GiB"] |= AtMost(1).cells()
    rates = {name: spread(times) for name, times in taken.items()}
    notes = [f"scanned: {min(scanned):.1f} to {max(scanned):.1f} MiB; every acknowledged record was there"]
    return {"unit": "ms", "rounds": rounds, "ours": ours, "rates": rates, "ratios": ratios, "notes": notes}


def _memory(logs: dict[str, Path]) -> dict[str, Any]:
    label, path = list(logs.items())[-1]
    for file in path.iterdir():
        if file.is_file() and ("checkpoint" in file.name or "clean" in file.name):
            file.unlink()
    told = _child("recover", path, 0)
    rates = {f"{label} scanned": spread([told["mib"]]), "limit": spread([MEMORY_MIB_MAX])}
    rate = told["bytes_scanned"] / told["seconds"] / 1e9
    notes = [f"{told['bytes_scanned'] / GIB:.1f} GiB scanned in {told['seconds']:.1f} s, {rate:.2f} GB/s, cold"]
    ratios = {"limit": spread([told["mib"] / MEMORY_MIB_MAX]) | AtMost(1).cells()}
    return {"unit": "MiB", "rounds": 1, "ours": f"{label} scanned", "rates": rates, "ratios": ratios, "notes": notes}


def _open_ms(open_: Callable[[Path], AbstractContextManager[object]], path: Path) -> float:
    """Milliseconds until it is open; closing is not timed."""
    began = time.perf_counter()
    with open_(path):
        return (time.perf_counter() - began) * 1000


def _log(path: Path) -> SegmentLog:
    return SegmentLog.open(path / "opened-0")


def _outbox(path: Path) -> Outbox:
    return Outbox.open(path, topic="opened", partitions=1, producer="benchmark", durability=Durability.BUFFERED)


def _fill(path: Path, size_bytes: int) -> None:
    values = random_values(1000, 1024)
    with _outbox(path) as outbox:
        for _ in range(size_bytes // (1000 * 1024)):
            outbox.append_many(0, values)


def _drop(path: Path) -> None:
    """Ask the kernel to forget the files' pages; a clean stop has synced them."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class _rocks:  # noqa: N801 - a context manager, called like a function
    def __init__(self, path: Path) -> None:
        from rocksdict import Options, Rdict  # noqa: PLC0415 - `make bench` installs the peers

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(ROCKS_BUFFER_BYTES)
        options.set_disable_auto_compactions(True)
        self.store = Rdict(str(path), options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def put(self, first: int, size_bytes: int, *, with_wal: bool) -> None:
        from rocksdict import WriteBatch, WriteOptions  # noqa: PLC0415

        options = WriteOptions()
        options.disable_wal = not with_wal
        values = random_values(1000, 1024)
        for number in range(size_bytes // (1000 * 1024)):
            batch = WriteBatch(raw_mode=True)
            for at, value in enumerate(values):
                batch.put((first + number * 1000 + at).to_bytes(8), value)
            self.store.write(batch, options)


def _fill_rocks(path: Path, size_bytes: int) -> None:
    with _rocks(path) as rocks:
        rocks.put(0, size_bytes, with_wal=False)
        rocks.store.flush()


def _die(task: str, path: Path, tail: int) -> int:
    """Let a process append the tail and kill itself; the log's end that it told."""
    return int(_child(task, path, tail, expected=-signal.SIGKILL)["end"])


def _child(task: str, path: Path, tail: int, expected: int = 0) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, task, str(path), str(tail)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != expected:
        raise RuntimeError(f"{task} ended with {done.returncode}")
    return dict(json.loads(done.stdout))


def _tell(**told: float) -> None:
    print(json.dumps(told), flush=True)


def _append_tail_and_die(path: Path, tail: int) -> None:
    values = random_values(1000, 1024, seed=2)
    log = SegmentLog.open(path / "opened-0", NEVER)
    for _ in range(tail // (1000 * 1024)):
        log.append(values, durability=Durability.BUFFERED)
    _tell(end=log.log_end_offset)
    os.kill(os.getpid(), signal.SIGKILL)


def _put_tail_and_die(path: Path, tail: int) -> None:
    rocks = _rocks(path)  # held until the end: a store that is let go of writes its tables first
    rocks.put(time.time_ns(), tail, with_wal=True)
    _tell(end=0)
    os.kill(os.getpid(), signal.SIGKILL)


def _recover(path: Path, _: int) -> None:
    began = time.perf_counter()
    with SegmentLog.open(path / "opened-0") as log:
        seconds, scanned = time.perf_counter() - began, log.recovery.bytes_scanned
    # Not ru_maxrss: that begins with what the parent had when it forked.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mib = int(status["VmHWM"].split()[0]) / 1024
    _tell(seconds=seconds, bytes_scanned=scanned, mib=mib)


TASKS = {"tail": _append_tail_and_die, "tail-rocks": _put_tail_and_die, "recover": _recover}

if __name__ == "__main__":
    TASKS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
