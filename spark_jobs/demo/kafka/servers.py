"""Broker and database of a run, our own or the user's: up before the first record, down after the last.

    broker    format ─▶ start ─┐
    database  start ───────────┴─▶ both answer ─▶ topics are made ─▶ Road

What is started here ends here; the broker, which dies and rises on the way, belongs to the supervisor.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pushrep.testing.kafka_node import KafkaJars
from spark_jobs.demo.kafka.broker import BrokerHome
from spark_jobs.demo.kafka.programs import Road, Servers
from spark_jobs.demo.processes import Child, ProgramFailed
from spark_jobs.errors import SparkJobError

TICK_S: Final = 0.02
READY_WITHIN_S: Final = 120.0
STOP_WAIT_S: Final = 90.0
"""How long a database may take to end all its connections and write down where it is."""


class NotReady(SparkJobError):
    """A server that was started doesn't answer; its words are in its .err file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """brokers: the user's, or None for one of our own from `jars`; database: likewise. topic: of the first."""

    brokers: str | None
    database: str | None
    jars: Path
    connector: tuple[Path, ...]
    topic: str


class Home:
    """What a run stands on. `close` may be called at any time, and ends what was started here but for the broker.

    `home` is our own broker's; None before `prepare_broker`, and where the brokers are the user's.
    """

    def __init__(self, servers: Servers, wanted: Wanted, say: Callable[[str], None]) -> None:
        self._servers, self._wanted, self._say = servers, wanted, say
        self._stack = ExitStack()
        self.home: BrokerHome | None = None

    def close(self) -> None:
        """End what runs."""
        self._stack.close()

    def start_broker(self) -> Child:
        """Again and again, on its data; ended by whoever asked for it."""
        assert self.home is not None, "the brokers are the user's"
        return self._servers.broker(self.home)

    def database(self) -> Child | None:
        """Start the database, if it is to be ours."""
        if self._wanted.database is not None:
            return None
        child = self._servers.database()
        self._stack.callback(child.close)
        self._stack.callback(child.stop, STOP_WAIT_S)
        return child

    def prepare_broker(self) -> None:
        """Format the broker's directory, if it is to be ours."""
        if self._wanted.brokers is None:
            self.home = BrokerHome(self._servers.output.broker, KafkaJars(self._wanted.jars))
            self._stack.callback(self.home.close)

    def road(self, database: Child | None) -> Road:
        """Wait for the database and make the topics, which waits for the brokers. Raises ProgramFailed, NotReady."""
        wanted = self._wanted
        first, second = wanted.topic, f"{wanted.topic}-relayed"
        servers = self.home.servers if self.home is not None else wanted.brokers
        assert servers is not None, "either is there"
        url = str(wanted.database if database is None else json.loads(_first_line(database))["url"])
        making = self._servers.topics(servers, first, second)
        self._stack.callback(making.close)
        _wait_end(making)
        self._say(f"topics {first} and {second} are there, at {servers}")
        return Road(
            servers=servers,
            first=first,
            second=second,
            database=url,
            table=wanted.topic.replace("-", "_").replace(".", "_"),
            connector=wanted.connector,
        )


def _first_line(child: Child) -> bytes:
    until_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < until_s:
        if lines := list(child.lines()):
            return lines[0]
        if (code := child.exit_code()) is not None:
            raise ProgramFailed(child.name, code, child.errors)
        time.sleep(TICK_S)
    raise NotReady(f"the {child.name} was not ready within {READY_WITHIN_S:.0f} s; see {child.errors}")


def _wait_end(child: Child) -> None:
    until_s = time.monotonic() + READY_WITHIN_S
    while (code := child.exit_code()) is None:
        if time.monotonic() > until_s:
            raise NotReady(f"the {child.name} were not made within {READY_WITHIN_S:.0f} s; see {child.errors}")
        time.sleep(TICK_S)
    if code:
        raise ProgramFailed(child.name, code, child.errors)
