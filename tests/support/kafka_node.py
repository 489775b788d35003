"""A Kafka broker from Kafka's own jars, on loopback: what to run and with which settings. Starts nothing.

    jars.command(...) kafka.tools.StorageTool format -t ID -c node/server.properties     once, into an empty directory
    jars.command(...) kafka.Kafka node/server.properties                                 again and again, on its data

Each node is broker and controller (KRaft). Who starts one ends it, too.
"""

import os
import random
import shutil
import socket
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

QUICK_START: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
"""A broker of a test lives for seconds: the second JIT compiler would cost more than it gains."""
MEMORY: Final = ("-Xms256m", "-Xmx768m")


class KafkaJars:
    """The directory that holds Kafka's jars and, once they are complete, an empty file `.done`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def missing(self) -> str | None:
        """Why no broker can be started from here, in words for a person; None if one can."""
        if shutil.which("java") is None:
            return "java is not installed: Kafka's brokers need Java 17 or newer"
        if not (self.directory / ".done").exists():
            return f"Kafka's jars are not in {self.directory}: run `make jars`"
        return None

    def command(self, *options: str) -> list[str]:
        """What runs a class of the jars, but for its name; options: of the JVM. Raises RuntimeError if it can't."""
        if why := self.missing():
            raise RuntimeError(why)
        return [shutil.which("java") or "java", *options, "-cp", f"{self.directory}{os.sep}*"]


def node_settings(node: int, data: Path, ports: Mapping[int, int], controllers: Mapping[int, int]) -> dict[str, str]:
    """Of server.properties. ports: of every node, by its id, for clients; controllers: for the nodes themselves."""
    copies, in_sync = str(len(ports)), str(max(1, len(ports) - 1))
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{port}" for n, port in controllers.items()),
        "listeners": f"PLAINTEXT://127.0.0.1:{ports[node]},CONTROLLER://127.0.0.1:{controllers[node]}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{ports[node]}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
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
    }


def write_properties(path: Path, settings: Mapping[str, str]) -> None:
    """As Java reads them."""
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def new_cluster_id() -> str:
    """A random id without a dash in front, which Kafka's tools would take for an option; Kafka makes none such."""
    while (made := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


def free_ports(count: int, reserved: ExitStack | None = None) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, below those that the system gives to whoever connects.

    Between this look and a broker's start any connection could be given one of the system's own. reserved: until it is
    closed nobody else who looks gets them, also while a broker that was killed is away; the broker itself does.
    """
    with ExitStack() as looking:
        kept = looking if reserved is None else reserved
        ports: list[int] = []
        while len(ports) < count:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            except OSError:
                one.close()
                continue
            # A listener with SO_REUSEADDR, as Java's, can have the port beside this socket, which never listens.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.append(kept.enter_context(one).getsockname()[1])
        return ports
