"""G19: idle partitions beside a busy one: what they cost its throughput, and what memory each takes, here and there.

Two outboxes with acks=ALL and one replica each: one has a single partition, the other as many idle ones beside its
first. Both append the same lists to partition 0, in turn. Each outbox lives in a process of its own, so that memory
and threads are its own. `--long`: ten thousand partitions, which takes minutes to make them at both ends.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from benchmarks.push_sides import Node, nodes, processor_s, resident_bytes
from pushrep.log import Durability
from pushrep.outbox import Acks, Outbox, OutboxConfig

IDLE, IDLE_LONG = 1_000, 10_000
KILOBYTES_MAX = 20
RECORDS, LIST = 40_000, 1_000
QUIET_S = 5.0
WAIT_S = 1200.0


def run(rounds: int, idle: int = IDLE) -> dict[str, Any]:
    """Throughput of the busy partition, and memory."""
    with (
        scratch("push-idle") as root,
        nodes(root, 2) as (lonely, crowded),
        _service(root / "one", lonely, 1) as one,
        _service(root / "many", crowded, 1 + idle) as many,
    ):
        kilobytes = {
            "the service": (resident_bytes(many.pid) - resident_bytes(one.pid)) / idle / 1000,
            "the replica": (resident_bytes(crowded.pid) - resident_bytes(lonely.pid)) / idle / 1000,
        }
        sides = {f"beside {idle:,} idle": many.append, "alone": one.append}
        result = compare(sides, rounds=rounds, goals={"alone": 0.9})
        began = {pid: processor_s(pid) for pid in (many.pid, crowded.pid)}
        time.sleep(QUIET_S)
        used = {pid: processor_s(pid) - before for pid, before in began.items()}
        quiet = ", ".join(f"{100 * spent / QUIET_S:.1f} %" for spent in used.values())
        notes = [
            f"opened, all in sync: {many.opened_s:.1f} s beside {one.opened_s:.1f}",
            f"of a processor while nothing is appended, service and replica: {quiet}",
        ]
    memory: dict[str, Any] = {"unit": "kB a partition", "rounds": 1, "ours": "the service"}
    memory["rates"] = {name: spread([size]) for name, size in kilobytes.items()} | {"limit": spread([KILOBYTES_MAX])}
    memory["ratios"] = {"limit": spread([max(kilobytes.values()) / KILOBYTES_MAX]) | AtMost(1.0).cells()}
    return {
        "G19: a busy partition, 1 KiB": result | {"notes": notes},
        "G19: memory of an idle partition": memory,
    }


def run_long(rounds: int) -> dict[str, Any]:
    """As many as the goal names."""
    return run(rounds, IDLE_LONG)


class Service:
    """An outbox in another process."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._pipe = pipe
        self.pid: int = process.pid
        self.opened_s: float = pipe.recv()

    def append(self) -> float:
        """One round."""
        self._pipe.send(True)
        done: float = self._pipe.recv()
        return done


@contextmanager
def _service(place: Path, node: Node, partitions: int) -> Iterator[Service]:
    here, there = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn")
    process = spawned.Process(target=_serve, args=(there, place, str(node.address), partitions))
    process.start()
    there.close()
    try:
        yield Service(process, here)
    finally:
        here.close()
        process.join()


def _serve(pipe: Connection, place: Path, address: str, partitions: int) -> None:
    began = time.perf_counter()
    values = random_values(RECORDS, 1024)
    with Outbox.open(
        place,
        "orders",
        partitions,
        place.name,
        replicas=[address],
        acks=Acks.ALL,
        durability=Durability.BUFFERED,
        config=OutboxConfig(open_timeout_s=WAIT_S, close_timeout_s=WAIT_S),
    ) as outbox:
        if any(lag.in_sync < partitions for lag in outbox.lag().values()):
            raise TimeoutError(f"not in sync after {WAIT_S:.0f} s: {outbox.lag()}")
        pipe.send(time.perf_counter() - began)
        try:
            while pipe.recv():
                receipts = [outbox.append_many(0, values[at : at + LIST]) for at in range(0, RECORDS, LIST)]
                receipts[-1].result(WAIT_S)
                pipe.send(RECORDS)
        except EOFError:
            os.sync()
