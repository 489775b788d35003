"""The gap when who takes records is killed: a standby's takeover, beside a real Kafka broker's failover, in one run.

Ours: three machines, each a node and an instance that stands by; the leading instance dies by kill -9, and another
acknowledges a record with ALL (two of three members, flushed). The peer: three real brokers, one partition with three
copies, min.insync.replicas=2; the partition's leader dies by kill -9, and an idempotent producer with acks=all gets its
next acknowledgement. The brokers are controllers, too: at times the active one dies with the leader. Both sides notice
the death after the same time: `takeover_after_ms`, and `broker.session.timeout.ms`. One record is on its way at a time.
With --long each side has its own defaults: 10 s, and 9 s.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from benchmarks.harness import scratch, spread
from benchmarks.push_sides import BROKER_JVM, topic
from tests.crash.test_standby_kill import Machines
from tests.kafka.cluster import KafkaCluster, missing

NOTICED_MS = 3_000
KAFKA_DEFAULT_MS, OUR_DEFAULT_MS = 9_000, 10_000
_TOPIC = "takeover"
_WAIT_S, _LOOK_S = 120.0, 0.02
_ON_THE_WAY_S = 0.5  # what the dead one had answered may come for so long; nobody notices its death sooner
_WARM_RECORDS = 50
T = TypeVar("T")


def run(rounds: int) -> dict[str, Any]:
    """Both notice it after 3 s."""
    return _compared(rounds, NOTICED_MS, NOTICED_MS)


def run_long(rounds: int) -> dict[str, Any]:
    """Each by its defaults."""
    return _compared(rounds, OUR_DEFAULT_MS, KAFKA_DEFAULT_MS)


def _compared(rounds: int, ours_ms: int, kafka_ms: int) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {}
    with scratch("takeover") as root, ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {"standby": stack.enter_context(_standbys(root / "ours", ours_ms))}
        why = missing()
        if why is None:
            sides["Kafka broker"] = stack.enter_context(_brokers(root / "kafka", kafka_ms))
        for number in range(rounds + 1):
            for name, side in sides.items():
                gap_s = side()
                if number:  # the first round warms up
                    gaps.setdefault(name, []).append(gap_s)
    result: dict[str, Any] = {"unit": "s, p50", "rounds": rounds, "ours": "standby", "ratios": {}}
    result["rates"] = {name: spread(values) for name, values in gaps.items()}
    if why is None:
        pairs = [mine / theirs for mine, theirs in zip(gaps["standby"], gaps["Kafka broker"], strict=True)]
        result["ratios"]["Kafka broker"] = spread(pairs)
    p99 = ", ".join(f"{name} {_p99(values):.2f} s" for name, values in gaps.items())
    result["notes"] = [f"p99: {p99}", *([f"no peer: {why}"] if why is not None else [])]
    title = f"kill -9 to the next acknowledgement, noticed after {ours_ms / 1000:g} s, {kafka_ms / 1000:g} s"
    return {title: result}


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


@contextmanager
def _standbys(root: Path, takeover_ms: int) -> Iterator[Callable[[], float]]:
    root.mkdir()
    with ExitStack() as stack:
        machines = Machines(root, stack, takeover_ms=takeover_ms)
        for index in range(3):
            machines.run(index)
        machines.create()
        known: set[int] = set()

        def acknowledged_s(since_s: float) -> float | None:
            times = (float(line[3]) for one in machines.services.values() for line in one.said("acked") if line[4:])
            return min((at_s for at_s in times if at_s > since_s + _ON_THE_WAY_S), default=None)

        def side() -> float:
            leader = machines.leader()
            machines.services[leader].wait_for_more("acked", _WARM_RECORDS)
            for index in known - {leader}:
                machines.services[index].wait_for("standing_by")
            known.clear()
            killed_s = time.monotonic()
            machines.kill_service(leader)
            gap_s = _first(lambda: acknowledged_s(killed_s)) - killed_s
            machines.run(leader)
            known.add(leader)
            return gap_s

        yield side


@contextmanager
def _brokers(root: Path, session_ms: int) -> Iterator[Callable[[], float]]:
    settings = {
        "broker.session.timeout.ms": str(session_ms),
        "broker.heartbeat.interval.ms": str(min(2_000, session_ms // 4)),
    }
    with KafkaCluster(root, nodes=3, settings=settings, jvm=BROKER_JVM) as cluster:
        topic(cluster, _TOPIC, 1, {"min.insync.replicas": "2"})
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        client = Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        times: list[float] = []
        stop = threading.Event()

        def produce() -> None:
            for number in count():
                client.produce(_TOPIC, b"%d" % number, on_delivery=lambda *_: times.append(time.monotonic()))
                client.flush()
                if stop.is_set():
                    return

        def leader_in_sync() -> int | None:
            partition = admin.list_topics(_TOPIC, timeout=10).topics[_TOPIC].partitions[0]
            return int(partition.leader) if len(partition.isrs) == len(cluster.nodes) else None

        def acknowledged_s(known: int, since_s: float) -> float | None:
            return next((at_s for at_s in times[known:] if at_s > since_s + _ON_THE_WAY_S), None)

        def side() -> float:
            leader = _first(leader_in_sync)
            known = len(times)
            _first(lambda: len(times) > known + _WARM_RECORDS or None)
            killed_s = time.monotonic()
            cluster.kill(leader)
            gap_s = _first(lambda: acknowledged_s(known, killed_s)) - killed_s
            cluster.start(leader)
            cluster.wait_ready()
            return gap_s

        thread = threading.Thread(target=produce)
        thread.start()
        try:
            yield side
        finally:
            stop.set()
            thread.join()


def _first(look: Callable[[], T | None]) -> T:
    """What a look finds, once it finds anything."""
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s:
        if (found := look()) is not None:
            return found
        time.sleep(_LOOK_S)
    raise TimeoutError("nothing was acknowledged")
