"""The commands of the programs on the road through Kafka.

broker     java kafka.Kafka                          ours, unless there are --brokers
database   python -m spark_jobs.demo.kafka.database  a PostgreSQL, unless there is --database
topics     python -m pushrep.demo.topics make        once
watch      python -m pushrep.demo.topics watch       where both topics end
producer   python -m pushrep.demo.producer --kafka   appends and ships
relay      python -m spark_jobs.jobs.relay           topic ─▶ topic
apply      python -m spark_jobs.jobs.apply           topic ─▶ PostgreSQL
check      python -m pushrep.demo.kafka_check        when all are done
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_jobs.demo.history import APPLY, RELAY
from spark_jobs.demo.kafka.broker import BrokerHome
from spark_jobs.demo.kafka.output import KafkaOutput
from spark_jobs.demo.plan import records_per_trigger
from spark_jobs.demo.processes import Child
from spark_jobs.demo.programs import DemoSurroundings, Pace

PARTITIONS: Final = 3
"""One for each airport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """Where the records go: brokers, both topics, database and table; `connector`: jars of Spark's Kafka connector."""

    servers: str
    first: str
    second: str
    database: str
    table: str
    connector: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Servers:
    """Starts what the road needs before there is one."""

    output: KafkaOutput
    surroundings: DemoSurroundings

    def broker(self, home: BrokerHome) -> Child:
        """On its data; `home` was formatted."""
        return self.surroundings.start_command("broker", home.command())

    def database(self) -> Child:
        """In the system's own temporary directory: what is below ours is too long for a socket's name."""
        return self.surroundings.start("database", "spark_jobs.demo.kafka.database", environment=os.environ)

    def topics(self, servers: str, *topics: str) -> Child:
        """Make them."""
        return self._topics("topics", "make", servers, topics)

    def watch(self, servers: str, *topics: str) -> Child:
        """Tell where they end."""
        return self._topics("watch", "watch", servers, topics)

    def _topics(self, name: str, what: str, servers: str, topics: tuple[str, ...]) -> Child:
        arguments = (what, "--servers", servers, "--partitions", str(PARTITIONS), *topics)
        return self.surroundings.start(name, "pushrep.demo.topics", *arguments)


@dataclass(frozen=True, slots=True)
class KafkaPrograms:
    """Starts what moves the records, and who judges them."""

    output: KafkaOutput
    surroundings: DemoSurroundings
    pace: Pace
    road: Road

    def producer(self) -> Child:
        """Append from the saved position on, and ship."""
        return self.surroundings.producer(self.pace, self.road.first, "--kafka", self.road.servers)

    def relay(self) -> Child:
        """The first topic into the second, from the checkpoint on, until it is told to stop."""
        return self._job(
            RELAY,
            self.road.first,
            self.output.relay,
            *("--application", "pushrep-demo", "--to-topic", self.road.second, "--to-option", "log_level=0"),
        )

    def apply(self) -> Child:
        """The second topic into the table, from the checkpoint on, until it is told to stop."""
        return self._job(
            APPLY,
            self.road.second,
            self.output.apply,
            *("--value-format", "avro", "--value-schema", str(self.output.schema)),
            *("--keep", "topic,partition,offset,timestamp"),
            *("--sink", self.road.database, "--table", self.road.table),
        )

    def check(self, asked: str) -> Child:
        """Compare the table with the original file."""
        return self.surroundings.start(
            "check",
            "pushrep.demo.kafka_check",
            *("--original", str(self.output.original), "--servers", self.road.servers),
            *("--first", self.road.first, "--second", self.road.second),
            *("--database", self.road.database, "--table", self.road.table, "--asked", asked),
        )

    def _job(self, name: str, topic: str, checkpoint: Path, *more: str) -> Child:
        return self.surroundings.start(
            name,
            f"spark_jobs.jobs.{name}",
            *("--source", "kafka", "--topic", topic),
            *("--source-option", f"kafka.bootstrap.servers={self.road.servers}"),
            *("--conf", f"spark.jars={','.join(map(str, self.road.connector))}"),
            *("--checkpoint", str(checkpoint), "--trigger", "1s", "--json", "-"),
            *("--max-records-per-trigger", str(records_per_trigger(self.pace.flights))),
            *more,
        )
