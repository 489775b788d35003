"""Real Kafka brokers: one node or three, on loopback, killed and restarted at will.

Each node is broker and controller (KRaft). Everything lives below one directory; `stop()` ends what was started, by
process id. They run from Maven's jars (`make jars`) or in containers: tests/kafka/broker_processes.py.
"""

import random
import signal
import socket
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.kafka.broker_processes import BrokerProcess, broker_process, image, no_jars, run, with_jars

START_TIMEOUT_S = 90
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
"""A broker of a test lives for seconds: the second compiler would never earn back what it costs."""


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
    ) -> None:
        self.directory, self.nodes, self._jvm = directory, range(1, nodes + 1), jvm
        self._settings = settings or {}
        self._brokers: dict[int, BrokerProcess] = {}
        self._running: set[int] = set()
        ports = free_ports(2 * nodes)
        self._ports = dict(zip(self.nodes, ports[:nodes], strict=True))
        self._controllers = dict(zip(self.nodes, ports[nodes:], strict=True))
        self.cluster_id = new_cluster_id()

    @property
    def pids(self) -> list[int]:
        """Of the brokers that run."""
        return [self._brokers[node].pid for node in sorted(self._running)]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def log_directory(self, node: int = 1) -> Path:
        """Where this node keeps its topic directories."""
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

    def shut_down(self, node: int = 1) -> None:
        """SIGTERM: the broker leaves its clean-shutdown marker."""
        self._end(node, signal.SIGTERM)

    def stop(self) -> None:
        """End every node; nothing is left running."""
        with ExitStack() as stack:
            for broker in self._brokers.values():
                stack.callback(broker.remove)
            for node in list(self._running):
                stack.callback(self._end, node, signal.SIGKILL)

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
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in self._controllers.items())
        copies, in_sync = str(len(self.nodes)), str(max(1, len(self.nodes) - 1))
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(node),
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://127.0.0.1:{self._ports[node]},CONTROLLER://127.0.0.1:{self._controllers[node]}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._ports[node]}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.log_directory(node)),
            "auto.create.topics.enable": "false",
            # After a kill the controller keeps the old session for so long, and refuses the node until it is over.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "250",
            "offsets.topic.num.partitions": "4",
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": "4",
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": in_sync,
            "min.insync.replicas": in_sync,
            "default.replication.factor": copies,
            "group.initial.rebalance.delay.ms": "0",
            # A member learns at its next heartbeat that partitions move.
            "group.consumer.heartbeat.interval.ms": "300",
            "group.consumer.min.heartbeat.interval.ms": "300",
        } | self._settings
        properties = home / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        options, program = ("-Xms256m", "-Xmx768m", *self._jvm), ("kafka.Kafka", str(properties))
        self._brokers[node] = broker_process(home, options, program)
        run(home, QUICK_START, ("kafka.tools.StorageTool", "format", "-t", self.cluster_id, "-c", str(properties)))


def java(*options: str) -> list[str]:
    """The command that runs a class of Kafka's jars. Raises RuntimeError where they can't be run."""
    return with_jars(*options)


def new_cluster_id() -> str:
    """A random id without a dash in front, which Kafka's tools would take for an option; Kafka makes none such."""
    while (made := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, below those that the system gives to whoever connects.

    Between this look and a broker's start any connection could be given one of the system's own.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            one = stack.enter_context(socket.socket())
            port = random.SystemRandom().randrange(15_000, 32_000)
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
        return ports
