"""Replay over loopback: batches and records beside a local replay; latency of following; what idle followers cost.

The node runs in a process of its own, as it does on its machine. `idle followers`: seconds of processor time that the
node used in ten seconds while 1,000 sessions followed a log that nobody wrote, as a share of one processor.
"""

import multiprocessing
import resource
import statistics
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, random_values, scratch, spread
from pushrep.log import LogConfig
from pushrep.outbox import Outbox
from pushrep.replay import TO_END, NodeAccess, ReplayClient, ReplayRequest, ReplaySettings
from pushrep.replay.node_connection import NodeConnection
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address
from pushrep.wire import replay_messages as wire

LOG_BYTES = 128 << 20
FOLLOWERS, IDLE_S = 1_000, 10
APPENDS = 500


def run(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with scratch("replay-network") as root, _node(root) as (where, cpu_s):  # noqa: SIM117 - the outbox closes first
        with Outbox.open(root / "out", topic="orders", partitions=1, producer="bench", replicas=[where]) as outbox:
            _fill(outbox)
            with ReplayClient(where) as far, ReplayClient(root / "out") as near:
                results["as batches, 1,000 B values"] = compare(
                    {"node": lambda: _batches(far), "directory": lambda: _batches(near)}, rounds=rounds, unit="bytes/s"
                )
                results["as records, 1,000 B values"] = compare(
                    {"node": lambda: _records(far), "directory": lambda: _records(near)}, rounds=rounds
                )
                results["append to subscriber"] = _latency(outbox, far)
            results[f"{FOLLOWERS} idle followers"] = _idle(where, cpu_s)
    return results


def _serve(root: Path, pipe: Any) -> None:
    settings = NodeSettings(
        address=Address("127.0.0.1", 0),
        allow=frozenset({"any"}),
        replay=ReplaySettings(max_sessions=FOLLOWERS + 20),
        connections_max=FOLLOWERS + 100,
        log_config=LogConfig(),
    )
    with ReplicaNode(root / "node", settings) as node:
        pipe.send(str(node.address))
        while pipe.recv() == "time":
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)


@contextmanager
def _node(root: Path) -> Any:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(root, theirs))
    process.start()

    def cpu_s() -> float:
        ours.send("time")
        return float(ours.recv())

    try:
        yield ours.recv(), cpu_s
    finally:
        ours.send("stop")
        process.join()


def _fill(outbox: Outbox) -> None:
    values = random_values(1_000, 1_000)
    for _ in range(LOG_BYTES // 1_000_000):
        receipts = [outbox.append(0, value) for value in values]
        receipts[-1].result(timeout=60)
    while any(lag.records for lag in outbox.lag().values()):
        time.sleep(0.05)
    time.sleep(2)  # the node flushes in the background, and a stable replay ends where that is


def _batches(client: ReplayClient) -> float:
    return sum(len(one.batch.data) for one in client.replay(ReplayRequest("orders-0", length=TO_END)).batches())


def _records(client: ReplayClient) -> float:
    return sum(1 for _ in client.replay(ReplayRequest("orders-0", length=TO_END)))


def _latency(outbox: Outbox, client: ReplayClient) -> dict[str, Any]:
    """Milliseconds from `append` to the subscriber, a thousand a second; bound: what the node has written."""
    sent: list[float] = []
    heard: list[float] = []
    first = client.tip_of("orders-0", "written")
    with client.replay(ReplayRequest("orders-0", position=first, length=APPENDS, bound="written")) as replay:
        listener = threading.Thread(target=lambda: heard.extend(time.perf_counter() for _ in replay))
        listener.start()
        for _ in range(APPENDS):
            sent.append(time.perf_counter())
            outbox.append(0, b"x" * 100)
            time.sleep(0.001)
        listener.join()
    took = sorted((there - here) * 1000 for here, there in zip(sent, heard, strict=True))
    return _told("ms", {"p50": statistics.median(took), "p99": took[int(len(took) * 0.99)]})


def _idle(where: str, cpu_s: Any) -> dict[str, Any]:
    address = Address.parse(where)
    lines = []
    for _ in range(FOLLOWERS):
        line = NodeConnection(address, NodeAccess())
        started = line.ask(wire.StartReplayRequest(recording_id=1, **_at_the_tip()), wire.StartReplayResponse)
        line.ask(wire.AttachRequest(session_id=started.session_id, credit_bytes=1 << 20), wire.AttachResponse)
        lines.append(line)
    time.sleep(1)
    before = cpu_s()
    time.sleep(IDLE_S)
    share = (cpu_s() - before) / IDLE_S
    for line in lines:
        line.close()
    return _told("share of a core", {"node": share, "goal: at most": 0.05})


def _told(unit: str, figures: dict[str, float]) -> dict[str, Any]:
    """Figures that have no peer, as `compare` tells its own."""
    rates = {name: spread([value]) for name, value in figures.items()}
    return {"unit": unit, "rounds": 1, "ours": next(iter(figures)), "rates": rates, "ratios": {}}


def _at_the_tip() -> dict[str, Any]:
    return {"position_kind": wire.PositionKind.TIMESTAMP_MS, "position": 1 << 50}
