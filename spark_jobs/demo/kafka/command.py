"""`pushrep demo-kafka`: the shell around one run. Options in, an exit code out; what happens is the supervisor's.

Exit code 0: every flight is in the PostgreSQL table once and in order. 1: not so, or the run failed, or a tool is
missing. 2: an option is wrong. 130: Ctrl-C.
"""

import json
import secrets
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pushrep.errors import PushrepError
from spark_jobs.demo.command import terminated_as_interrupt
from spark_jobs.demo.kafka.output import KafkaOutput
from spark_jobs.demo.kafka.plan import KafkaPlan
from spark_jobs.demo.kafka.preflight import require_tools
from spark_jobs.demo.kafka.programs import KafkaPrograms, Servers
from spark_jobs.demo.kafka.servers import Home, Wanted
from spark_jobs.demo.kafka.summary import KafkaSummary
from spark_jobs.demo.live import Live
from spark_jobs.demo.output import claim, data_set, unpack_flights
from spark_jobs.demo.plan import new_seed
from spark_jobs.demo.processes import adopt_orphans
from spark_jobs.demo.programs import Pace, Surroundings
from spark_jobs.errors import SparkJobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options, by name."""

    out: Path
    brokers: str | None
    database: str | None
    seed: int | None
    rate: float
    limit: int | None
    kills: int
    cores: int
    master: str | None
    kafka_jars: Path
    connector: Path
    as_json: bool


_EPILOG = """\b
What it leaves in --out
  report.html   a picture of the run, complete in one file
  summary.json  its numbers, as --json prints them
  log/          the outbox's log; broker/ the topics, in the same file format
  flights.avsc  the Avro schema of the records' values
  *.err         what the programs said

\b
Examples
  pushrep demo-kafka --seed 42                            these kills and no others
  pushrep demo-kafka --limit 20000 --rate 2000 --kills 1  a shorter run
  pushrep demo-kafka --brokers broker-1:9092,broker-2:9092 --database postgresql://postgres@db/postgres
      through your own brokers, which are not killed, into your own database: two new topics, and a table with its
      staging and marks; they stay
"""


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-kafka-out"),
    help="Directory for everything the demo makes. What an earlier demo left there is replaced; a directory with "
    "other content is refused.",
)
@click.option("--brokers", help="HOST:PORT,... of brokers that run.  [default: one of the demo's own, which is killed]")
@click.option("--database", help="postgresql://HOST/DATABASE that runs.  [default: one of the demo's own]")
@click.option("--seed", type=click.IntRange(min=0), help="Repeats the moments of a run's kills. Default: a new one.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=8500.0,
    help="Records a second that the producer appends, so that there is something to see; 0 is as fast as it goes.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1000),
    help="Only the first so many flights: a shorter run through the same programs. Lower --rate with it, or the "
    "producer is done before it can be killed.",
)
@click.option("--kills", type=click.IntRange(1, 5), default=2, help="Of the producer, and as many of the broker.")
@click.option("--cores", type=click.IntRange(min=1), default=2, help="Cores for each of the two Spark jobs.")
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of bars and tables.")
def demo_kafka(**given: Any) -> None:
    """Flights of 2013 through Kafka, Spark and PostgreSQL, with each of them killed on the way.

    A producer appends 336,776 real flights to an outbox, which ships its log to a topic. A Spark job relays that topic
    to a second one, and another applies the second to a PostgreSQL table, rows and marks in one transaction. kill -9
    ends the producer, which goes on from a saved position that lags; the broker; and the JVM of each job, inside a
    batch. So both topics hold records for a second time. Then SQL compares the table with the original file.

    Needs Java 17, the jars that `make jars` fetches by Maven, and the extra demo-kafka: pip install '.[demo-kafka]' in
    pushrep's repository; no root. The exit code is 1 if a flight is missing, in the table twice, or out of order.
    """
    options = Options(**given)
    console = Console(stderr=options.as_json, highlight=False, quiet=options.as_json)
    try:
        connector = require_tools(
            brokers=options.brokers,
            database=options.database,
            kafka_jars=options.kafka_jars,
            connector=options.connector,
        )
        with terminated_as_interrupt(), claim(options.out.resolve(), KafkaOutput) as output:
            summary = run(output, console, options, connector)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        raise click.exceptions.Exit(130) from None
    except (SparkJobError, PushrepError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if options.as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
    console.print(summary.table())
    console.print(summary.verdict(), style="bold green" if summary.right else "bold red")
    console.print(f"picture: {options.out / 'report.html'}", soft_wrap=True)
    if not summary.right:
        raise click.exceptions.Exit(1)


def run(output: KafkaOutput, console: Console, options: Options, connector: tuple[Path, ...]) -> KafkaSummary:
    """Make the run, write summary and report. Raises SparkJobError, PushrepError and OSError."""
    from spark_jobs.demo.kafka.report import render_run  # noqa: PLC0415 - plotly takes a second, and may be missing
    from spark_jobs.demo.kafka.supervisor import LABELS, KafkaSupervisor  # noqa: PLC0415 - the same

    if output.holds_old_output():
        console.print(f"replacing what the last demo left in {output.root}")
    output.clear()
    flights = unpack_flights(output.original, options.limit)
    seed = new_seed() if options.seed is None else options.seed
    plan = KafkaPlan.draw(seed, flights, options.kills)
    console.print(f"{flights:,} flights; seed {seed} (--seed {seed} repeats these kills)")
    adopt_orphans()
    surroundings = Surroundings(output, options.cores, options.master)
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
            found = supervisor.run(lambda road: KafkaPrograms(output, surroundings, pace, road))
    summary = KafkaSummary.of(seed, supervisor.history, found, supervisor.counted)
    output.summary.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    output.report.write_text(render_run(supervisor.history, supervisor.samples, found, summary), encoding="utf-8")
    output.discard_scratch()
    return summary


def topic_of(options: Options) -> str:
    """A name that nobody has on servers that are the user's; table and second topic follow from it."""
    return "flights" if options.brokers is None and options.database is None else f"flights-{secrets.token_hex(4)}"
