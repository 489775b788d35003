"""A broker of the demo's own: formatted once, started on its data, killed as planned, started again at once.

    starting ──the topics' watch is answered──▶ running ──records ≥ plan──▶ kill -9 ──▶ starting (on the same data)

A broker that ends by itself ends the demo.
"""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pushrep.testing.kafka_node import (
    MEMORY,
    QUICK_START,
    KafkaJars,
    free_ports,
    new_cluster_id,
    node_settings,
    write_properties,
)
from spark_jobs.demo.history import BROKER, History, Kill
from spark_jobs.demo.processes import Child, ProgramFailed
from spark_jobs.errors import SparkJobError

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
        """Read what was told."""
        for line in self.child.lines():
            told = json.loads(line)
            if told["event"] == "ends":
                self.ends, self.answered_at_s = told["ends"], self._clock(told["asked_at_s"])
        if (code := self.child.exit_code()) is not None:
            raise ProgramFailed("watch of the topics", code, self.child.errors)

    def records(self, topic: str) -> int:
        """In all of its partitions, copies included."""
        return sum(self.ends[topic])
