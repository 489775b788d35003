"""The programs of a run through Kafka: broker and database, our own or the user's, and the jobs between them.

    broker     java kafka.Kafka                          ours, unless there are --brokers
    database   python -m examples.demo.kafka.database  a PostgreSQL, unless there is --database
    topics     python -m examples.demo.kafka.topics make        once
    watch      python -m examples.demo.kafka.topics watch       where both topics end
    producer   python -m examples.demo.producer --kafka   appends and ships
    relay      python -m spark_jobs.jobs.relay           topic ─▶ topic
    apply      python -m spark_jobs.jobs.apply           topic ─▶ PostgreSQL
    check      python -m examples.demo.kafka.check        when all are done

Broker and database are up before the first record and down after the last. The broker is killed on the way; a broker
that ends by itself ends the demo:

    starting ──the topics' watch is answered──▶ running ──records ≥ plan──▶ kill -9 ──▶ starting (on the same data)

Beside what every demo leaves in its directory there are

    relay/ apply/         checkpoints of the two jobs; the relay's marks beside its own
    broker/               the broker's settings and its topics, in Kafka's own file format
    *.err                 what the programs said
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from examples.demo.flights import schema_json
from examples.demo.history import APPLY, BROKER, RELAY, History, Kill
from examples.demo.output import Output
from examples.demo.plan import records_per_trigger
from examples.demo.processes import TICK_S, Child, ProgramFailed
from examples.demo.programs import DemoSurroundings, Pace
from pushrep.env import REAL_FILESYSTEM, write_atomic
from spark_jobs.errors import SparkJobError
from tests.support.kafka_node import (
    MEMORY,
    QUICK_START,
    KafkaJars,
    free_ports,
    new_cluster_id,
    node_settings,
    write_properties,
)


class KafkaOutput(Output):
    """Names of the files under the output directory."""

    OURS: ClassVar[tuple[str, ...]] = (
        *("original", "log", "flights.avsc", "position.json", "relay", "relay-marks", "relay-relay", "apply", "broker"),
        *("broker.err", "database.err", "topics.err", "watch.err", "producer.err", "relay.err", "apply.err"),
        *("check.err", "summary.json", "report.html", "picture.svg", "scratch"),
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.relay = root / "relay"
        self.apply = root / "apply"
        self.broker = root / "broker"


_NODE: Final = 1
_FORMAT_WITHIN_S: Final = 120
# Standard output is nobody's: what the broker has to say goes where the other programs' words are.
_LOG4J: Final = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.err.ref = err
appender.err.type = Console
appender.err.name = err
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = [%d] %p %m (%c)%n
"""


class BrokerHome:
    """The broker's directory, and its address, which is kept from others until `close`, also while it is dead.

    Raises SparkJobError if Kafka's tool can't format the directory.
    """

    def __init__(self, directory: Path, jars: KafkaJars) -> None:
        self.directory = directory
        self._jars = jars
        self._reserved = ExitStack()
        port, controller = free_ports(2, self._reserved)
        self.servers = f"127.0.0.1:{port}"
        directory.mkdir(parents=True)
        self._properties, self._log4j = directory / "server.properties", directory / "log4j2.properties"
        settings = node_settings(_NODE, directory / "data", {_NODE: port}, {_NODE: controller})
        write_properties(self._properties, settings)
        self._log4j.write_text(_LOG4J)
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-t", new_cluster_id()]
        done = subprocess.run(  # noqa: S603 - Kafka's own tool
            [*command, "-c", str(self._properties)],
            capture_output=True,
            text=True,
            timeout=_FORMAT_WITHIN_S,
            check=False,
        )
        if done.returncode:
            self.close()
            raise SparkJobError(f"the broker's directory could not be formatted: {done.stderr or done.stdout}")

    def close(self) -> None:
        """Its ports are anybody's."""
        self._reserved.close()

    def command(self) -> list[str]:
        """What runs the broker."""
        return [*self._java(*MEMORY), "kafka.Kafka", str(self._properties)]

    def _java(self, *options: str) -> list[str]:
        return self._jars.command(*options, *QUICK_START, f"-Dlog4j2.configurationFile={self._log4j}")


class Brokering:
    """Drives the demo's broker; `step` never waits."""

    def __init__(
        self,
        start: Callable[[], Child],
        kills: Sequence[int],
        history: History,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """clock: seconds of the run."""
        self._start, self._kills, self._history, self._say, self._clock = start, kills, history, say, clock
        self._killed = 0
        self._started_at_s: float | None = None
        self.child = start()

    @property
    def done(self) -> bool:
        """Whether every planned kill was made, and the broker answers."""
        return self._killed == len(self._kills) and self._started_at_s is None

    def step(self, records: int, answered_at_s: float) -> None:
        """Kill it if the plan wants it; `answered_at_s`: when the newest answer of the watch was asked for.

        Raises ProgramFailed.
        """
        for _ in self.child.lines():
            pass
        if (code := self.child.exit_code()) is not None:
            raise ProgramFailed(BROKER, code, self.child.errors)
        if self._started_at_s is not None:
            if answered_at_s > self._started_at_s:
                kill = self._history.kills_of(BROKER)[-1]
                kill.back_s, self._started_at_s = self._clock() - kill.at_s, None
                self._say(f"the broker is back after {kill.back_s:.1f} s")
        elif self._killed < len(self._kills) and records >= self._kills[self._killed]:
            self._kill()

    def _kill(self) -> None:
        at_s = self._clock()
        dead = self.child.kill()
        self.child.close()
        self._history.kills.append(Kill(BROKER, at_s, [(p.pid, p.name) for p in dead]))
        # What is answered now was not answered by the one that died.
        self._killed, self._started_at_s = self._killed + 1, self._clock()
        self._say(f"kill -9 {self.child.pid}: the broker, {self._killed} of {len(self._kills)}")
        self.child = self._start()


class Watching:
    """Follows the topics' watch: where both topics end, as the brokers themselves say. Raises ProgramFailed."""

    def __init__(self, start: Callable[[], Child], topics: Sequence[str], clock: Callable[[float], float]) -> None:
        """clock: from this machine's monotonic seconds to the run's."""
        self._clock = clock
        self.ends: dict[str, list[int]] = {topic: [] for topic in topics}
        self.answered_at_s = -1.0
        self.child = start()

    def step(self) -> None:
        """Read what was reported."""
        for line in self.child.lines():
            event = json.loads(line)
            if event["event"] == "ends":
                self.ends, self.answered_at_s = event["ends"], self._clock(event["asked_at_s"])
        if (code := self.child.exit_code()) is not None:
            raise ProgramFailed("watch of the topics", code, self.child.errors)

    def records(self, topic: str) -> int:
        """In all of its partitions, copies included."""
        return sum(self.ends[topic])


PARTITIONS: Final = 3
"""One for each airport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the records go: brokers, both topics, database and table; `connector`: jars of Spark's Kafka connector."""

    servers: str
    first: str
    second: str
    database: str
    table: str
    connector: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Servers:
    """Starts what the route needs before there is one."""

    output: KafkaOutput
    surroundings: DemoSurroundings

    def broker(self, home: BrokerHome) -> Child:
        """On its data; `home` was formatted."""
        return self.surroundings.start_command("broker", home.command())

    def database(self) -> Child:
        """In the system's own temporary directory: what is below ours is too long for a socket's name."""
        return self.surroundings.start("database", "examples.demo.kafka.database", environment=os.environ)

    def topics(self, servers: str, *topics: str) -> Child:
        """Make them."""
        return self._topics("topics", "make", servers, topics)

    def watch(self, servers: str, *topics: str) -> Child:
        """Print where they end."""
        return self._topics("watch", "watch", servers, topics)

    def _topics(self, name: str, what: str, servers: str, topics: tuple[str, ...]) -> Child:
        arguments = (what, "--servers", servers, "--partitions", str(PARTITIONS), *topics)
        return self.surroundings.start(name, "examples.demo.kafka.topics", *arguments)


@dataclass(frozen=True, slots=True)
class KafkaPrograms:
    """Starts what moves the records, and what checks them."""

    output: KafkaOutput
    surroundings: DemoSurroundings
    pace: Pace
    route: Route

    def producer(self) -> Child:
        """Append from the saved position on, and ship."""
        return self.surroundings.producer(self.pace, self.route.first, "--kafka", self.route.servers)

    def relay(self) -> Child:
        """The first topic into the second, from the checkpoint on, until it is stopped."""
        return self._job(
            RELAY,
            self.route.first,
            self.output.relay,
            *("--application", "pushrep-demo", "--to-topic", self.route.second, "--to-option", "log_level=0"),
        )

    def apply(self) -> Child:
        """The second topic into the table, from the checkpoint on, until it is stopped."""
        # The job is refused without its schema, and the producer may not have come to write it.
        write_atomic(REAL_FILESYSTEM, self.output.schema, [schema_json().encode()])
        return self._job(
            APPLY,
            self.route.second,
            self.output.apply,
            *("--value-format", "avro", "--value-schema", str(self.output.schema)),
            *("--keep", "topic,partition,offset,timestamp"),
            *("--sink", self.route.database, "--table", self.route.table),
        )

    def check(self, asked: str) -> Child:
        """Compare the table with the original file."""
        return self.surroundings.start(
            "check",
            "examples.demo.kafka.check",
            *("--original", str(self.output.original), "--servers", self.route.servers),
            *("--first", self.route.first, "--second", self.route.second),
            *("--database", self.route.database, "--table", self.route.table, "--asked", asked),
        )

    def _job(self, name: str, topic: str, checkpoint: Path, *more: str) -> Child:
        return self.surroundings.start(
            name,
            f"spark_jobs.jobs.{name}",
            *("--source", "kafka", "--topic", topic),
            *("--source-option", f"kafka.bootstrap.servers={self.route.servers}"),
            *("--conf", f"spark.jars={','.join(map(str, self.route.connector))}"),
            *("--checkpoint", str(checkpoint), "--trigger", "1s", "--json", "-"),
            *("--max-records-per-trigger", str(records_per_trigger(self.pace.flights))),
            *more,
        )


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
        """Again and again, on its data; ended by its caller."""
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

    def route(self, database: Child | None) -> Route:
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
        return Route(
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
