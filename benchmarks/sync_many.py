"""G21: one record to each of a thousand partitions, FLUSHED and ALL, beside the bare syncs of as many files; creation.

The outbox has one replica, a process of its own on the same disk: each record is synced in two files. The peer writes
as many bytes to as many files of the same disk, allocated ahead, and syncs each in turn: `pwrite`, `fdatasync`.
Then the same with every sync of leader and replica made to last 10 ms, and how long a new outbox takes until all of its
partitions are in sync.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import AtMost, Timed, compare, random_values, scratch, spread
from benchmarks.push_sides import nodes
from pushrep.env import REAL_FILESYSTEM, File, Filesystem, RealFilesystem
from pushrep.outbox import Acks, Outbox, OutboxConfig
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address

PARTITIONS = 1_000
CREATED_S_MAX, SLOW_S_MAX = 5.0, 2.0
SLOW_SYNC_S = 0.01
WAIT_S = 600.0


def run(rounds: int, partitions: int = PARTITIONS) -> dict[str, Any]:
    """Seconds of one round, of one with slow syncs, and of a creation."""
    values = random_values(partitions, 100)
    created: list[float] = []
    with scratch("sync-many") as root:
        with nodes(root, 1) as (node,), _opened(root / "first", node.address, partitions, created) as outbox:
            files = _Files(root / "bare", partitions)
            sides = {
                "one record to each": lambda: _round(outbox, values),
                "bare: as many files": lambda: files.round(values),
                "bare: both members' files": lambda: files.round(values, times=2),
            }
            result = _seconds(compare(sides, rounds=rounds, unit="rounds/s"), "bare: as many files", 2.0)
            for number in range(1, rounds):
                with _opened(root / f"again-{number}", node.address, partitions, created):
                    pass
        slow = _slow(root / "slow", values, rounds)
    return {
        f"G21: one record to each of {partitions:,} partitions, FLUSHED + ALL": result,
        "G21: the same, each sync made to last 10 ms": _limited("a round", slow, SLOW_S_MAX),
        f"G21: a new outbox of {partitions:,}, all in sync": _limited("opening", created, CREATED_S_MAX),
    }


def _round(outbox: Outbox, values: list[bytes]) -> float:
    receipts = [outbox.append(partition, value) for partition, value in enumerate(values)]
    for receipt in receipts:
        receipt.result(WAIT_S)
    return 1.0


@contextmanager
def _opened(
    place: Path, address: Address, partitions: int, created: list[float], filesystem: Filesystem = REAL_FILESYSTEM
) -> Iterator[Outbox]:
    """An outbox with one replica; `created` gets how long it took until all was in sync."""
    began = time.perf_counter()
    with Outbox.open(
        place,
        "orders",
        partitions,
        place.name,
        replicas=[str(address)],
        acks=Acks.ALL,
        filesystem=filesystem,
        config=OutboxConfig(open_timeout_s=WAIT_S, close_timeout_s=WAIT_S),
    ) as outbox:
        if any(lag.in_sync < partitions for lag in outbox.lag().values()):
            raise TimeoutError(f"not in sync after {WAIT_S:.0f} s: {outbox.lag()}")
        created.append(time.perf_counter() - began)
        yield outbox


class _Files:
    """What the records are at least: bytes at the end of files that were allocated ahead."""

    def __init__(self, directory: Path, count: int) -> None:
        directory.mkdir()
        self._descriptors = []
        for number in range(2 * count):
            descriptor = os.open(directory / str(number), os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(descriptor, 0, 64 << 10)
            os.fsync(descriptor)
            self._descriptors.append(descriptor)
        self._end = 0

    def round(self, values: list[bytes], times: int = 1) -> Timed:
        self._end += 200
        began = time.perf_counter()
        for at, value in enumerate(values * times):
            os.pwrite(self._descriptors[at], value, self._end)
            os.fdatasync(self._descriptors[at])
        return Timed(1.0, time.perf_counter() - began)


class _SlowFile:
    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        time.sleep(SLOW_SYNC_S)
        self._file.sync()


class SlowSyncs(RealFilesystem):
    """The real one, on which the sync of a segment takes long once `slow` is set."""

    slow = False

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
        file = super().open(path, create=create, writable=writable)
        return _SlowFile(file) if self.slow and path.suffix == ".log" else file


def _slow(root: Path, values: list[bytes], rounds: int) -> list[float]:
    here, there = SlowSyncs(), SlowSyncs()
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    seconds = []
    with (
        ReplicaNode(root / "node", settings, filesystem=there) as node,
        _opened(root / "service", node.address, len(values), [], here) as outbox,
    ):
        here.slow = there.slow = True
        for _ in range(rounds + 1):
            began = time.perf_counter()
            _round(outbox, values)
            seconds.append(time.perf_counter() - began)
        here.slow = there.slow = False
    return seconds[1:]


def _seconds(result: dict[str, Any], peer: str, goal: float) -> dict[str, Any]:
    """Of rates: what a round took."""
    result["unit"] = "s"
    result["rates"] = {name: _inverted(rate) for name, rate in result["rates"].items()}
    result["ratios"] = {name: _inverted(ratio) for name, ratio in result["ratios"].items()}
    result["ratios"][peer] |= AtMost(goal).cells()
    return result


def _inverted(cells: dict[str, float]) -> dict[str, float]:
    return {"median": 1 / cells["median"], "min": 1 / cells["max"], "max": 1 / cells["min"]}


def _limited(name: str, seconds: list[float], limit_s: float) -> dict[str, Any]:
    ratios = {"limit": spread([one / limit_s for one in seconds]) | AtMost(1.0).cells()}
    rates = {name: spread(seconds), "limit": spread([limit_s])}
    return {"unit": "s", "rounds": len(seconds), "ours": name, "rates": rates, "ratios": ratios}
