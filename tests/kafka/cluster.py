"""Real Kafka brokers: one node or three, on loopback, killed and restarted at will.

Each node is broker and controller (KRaft). Everything lives below one directory; `stop()` ends what was started, by
process id. They run from Maven's jars (`make jars`) or in containers: tests/kafka/broker_processes.py.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.kafka.broker_processes import BrokerProcess, broker_process, image, no_jars, run, with_jars
from tests.support.kafka_node import (
    MEMORY,
    QUICK_START,
    free_ports,
    new_cluster_id,
    node_settings,
    write_properties,
)

START_TIMEOUT_S = 150
_BOOTSTRAP = "bootstrap.checkpoint"
_FORMATTED: list[bytes] = []
"""That file, as Kafka's own tool left it on this process's first node. Only ids tell another node's directory from it;
the tool takes a second of processor time for each."""


class NotReady(Exception):
    """The cluster does not name all of its brokers yet."""


def missing() -> str | None:
    """Why no broker can be started here, in words for a person; None if one can."""
    return None if image() is not None else no_jars()


class KafkaCluster:
    """`with KafkaCluster(directory, nodes=3) as cluster:` yields when every broker answers at `bootstrap_servers`."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 1,
        settings: dict[str, str] | None = None,
        jvm: Sequence[str] = QUICK_START,
        at: "KafkaCluster | None" = None,
    ) -> None:
        """At: the addresses of another cluster, which is away."""
        self.directory, self.nodes, self._jvm = directory, range(1, nodes + 1), jvm
        self._settings = settings or {}
        self._brokers: dict[int, BrokerProcess] = {}
        self._running: set[int] = set()
        self._resting: set[int] = set()
        self._reserved = ExitStack()
        ports = free_ports(2 * nodes, self._reserved)
        self._ports = dict(zip(self.nodes, ports[:nodes], strict=True))
        self._controllers = dict(zip(self.nodes, ports[nodes:], strict=True))
        if at is not None:
            self._ports, self._controllers = at.addresses
        self.cluster_id = new_cluster_id()

    @property
    def pids(self) -> list[int]:
        """The process ids of the running brokers."""
        return [self._brokers[node].pid for node in sorted(self._running)]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    @property
    def addresses(self) -> tuple[dict[int, int], dict[int, int]]:
        """The ports of the brokers and of the controllers, by node."""
        return self._ports, self._controllers

    def log_directory(self, node: int = 1) -> Path:
        """The directory of this node's topic partitions."""
        return self.directory / f"node-{node}" / "data"

    def __enter__(self) -> Self:
        for node in self.nodes:
            self._format(node)
        try:
            for node in self.nodes:
                self.start(node)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, node: int = 1) -> None:
        """Start a node on its data; `wait_ready` tells when it serves."""
        self._brokers[node].start()
        self._running.add(node)

    def kill(self, node: int = 1) -> None:
        """kill -9."""
        self._end(node, signal.SIGKILL)

    def send_signal(self, how: signal.Signals, node: int = 1) -> None:
        """Stop a broker's process where it stands, or let it go on."""
        os.kill(self._brokers[node].pid, how)

    def is_running(self, node: int = 1) -> bool:
        """Whether it was started, and not ended since."""
        return node in self._running

    def shut_down(self, node: int = 1) -> None:
        """SIGTERM: the broker leaves its clean-shutdown marker."""
        self._end(node, signal.SIGTERM)

    def stop(self) -> None:
        """End every node; nothing is left running."""
        with ExitStack() as stack:
            stack.callback(self._reserved.close)
            for broker in self._brokers.values():
                stack.callback(broker.remove)
            for node in list(self._running):
                stack.callback(self._end, node, signal.SIGKILL)

    def rest(self) -> None:
        """Stop all nodes until `wake`: an idle broker takes 2 % of a core, for as long as the tests run."""
        self._resting |= self._running
        for node in list(self._running):
            self.kill(node)

    def wake(self) -> None:
        """Start again what rests, and return when it serves."""
        if self._resting:
            for node in self._resting:
                self.start(node)
            self._resting = set()
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when a metadata request names every node that was started."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0, "socket.timeout.ms": 3000})
        for attempt in Retrying(
            stop=stop_after_delay(START_TIMEOUT_S),
            wait=wait_fixed(0.2),
            retry=retry_if_exception_type((NotReady, KafkaException)),
            reraise=True,
        ):
            with attempt:
                for node in self._running:
                    if (code := self._brokers[node].ended_with()) is not None:
                        raise RuntimeError(f"broker {node} ended with {code}: {self._brokers[node].said()}")
                named = set(admin.list_topics(timeout=3).brokers)
                if not named >= self._running:
                    raise NotReady(f"{sorted(named)} of {sorted(self._running)} brokers answer")

    def _end(self, node: int, how: signal.Signals) -> None:
        self._running.remove(node)
        self._brokers[node].end(how)

    def _format(self, node: int) -> None:
        home = self.directory / f"node-{node}"
        home.mkdir(parents=True, exist_ok=True)
        described = node_settings(node, self.log_directory(node), self._ports, self._controllers)
        settings = (
            described
            | {
                # A member learns at its next heartbeat that partitions move.
                "group.consumer.heartbeat.interval.ms": "300",
                "group.consumer.min.heartbeat.interval.ms": "300",
                # Else a broker that nobody uses writes to its metadata twice a second, for as long as the tests run.
                "metadata.max.idle.interval.ms": "10000",
                # Each of its threads looks for work three times a second; there are 14 without these.
                "num.io.threads": "2",
                "num.network.threads": "1",
                # Else a broker fills 128 MiB with zeros when it starts.
                "log.cleaner.dedupe.buffer.size": "2097152",
            }
            | self._settings
        )
        properties = home / "server.properties"
        write_properties(properties, settings)
        options, program = (*MEMORY, *self._jvm), ("kafka.Kafka", str(properties))
        self._brokers[node] = broker_process(home, options, program)
        data = self.log_directory(node)
        if _FORMATTED:
            data.mkdir()
            (data / _BOOTSTRAP).write_bytes(_FORMATTED[0])
            ids = {"cluster.id": self.cluster_id, "directory.id": new_cluster_id(), "node.id": str(node)}
            write_properties(data / "meta.properties", {"version": "1", **ids})
            return
        run(home, QUICK_START, ("kafka.tools.StorageTool", "format", "-t", self.cluster_id, "-c", str(properties)))
        _FORMATTED.append((data / _BOOTSTRAP).read_bytes())


def java(*options: str) -> list[str]:
    """The command that runs a class of Kafka's jars. Raises RuntimeError where they can't be run."""
    return with_jars(*options)
