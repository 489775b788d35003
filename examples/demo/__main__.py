"""`python -m examples.demo`: options in, an exit code out; supervisor.py makes the run.

The exit codes are those of shell.py.
"""

from contextlib import closing
from typing import Any

import click
from rich.console import Console

from examples.demo.output import Output, data_set
from examples.demo.plan import ChaosPlan
from examples.demo.programs import DemoSurroundings, Pace, Programs
from examples.demo.shell import (
    Live,
    SharedOptions,
    begun,
    claimed,
    require_packages,
    shared_options,
    show_run,
    written,
)
from examples.demo.summary import Summary

_EPILOG = """\b
What it leaves in --out
  report.html   a picture of the run, complete in one file; picture.svg the picture alone
  summary.json  its numbers, as --json prints them
  table/        the Parquet table
  log/          the log, in Kafka's own file format
  flights.avsc  the Avro schema of the records' values
  *.err         what the programs said

\b
Examples
  python -m examples.demo --seed 42                    these kills and no others
  python -m examples.demo --limit 20000 --rate 1000    a shorter run
"""


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 110})
@shared_options("demo-out", cores="Spark")
def demo(**given: Any) -> None:
    """Flights of 2013 through crashes and replays, into a table that has each of them once.

    A producer appends 336,776 real flights to a log and is killed with kill -9 three times; it continues at a saved
    position that lags, so thousands of records enter twice. A Spark stream filters the replays out and writes a
    Parquet table; its JVM is killed in the middle of a batch. Then Spark SQL compares the table with the original file.

    Needs Java 17, and the packages that `make demo` installs before it runs this. No server, no root, about two
    minutes. The exit code is 1 if a flight is missing or in the table twice.
    """
    options = SharedOptions(**given)

    def checked_run(console: Console) -> Summary:
        require_packages()
        from spark_jobs.spark_internals import require_java  # noqa: PLC0415 - not before pyspark is known to be there

        require_java()
        with claimed(options, Output) as output:
            return run(output, console, options)

    show_run(options, checked_run)


def run(output: Output, console: Console, options: SharedOptions) -> Summary:
    """Make the run, write summary and report. Raises SparkJobError, PushrepError and OSError."""
    from examples.demo.report import render  # noqa: PLC0415 - Spark may be missing
    from examples.demo.supervisor import Supervisor  # noqa: PLC0415 - the same

    flights, seed = begun(output, console, options)
    plan = ChaosPlan.draw(seed, flights)
    pace = Pace(flights, options.rate, data_set())
    programs = Programs(output, DemoSurroundings(output, options.cores), pace)
    with Live(console, flights, ("append", "apply")) as live, closing(Supervisor(programs, plan, live)) as supervisor:
        found = supervisor.run()
    summary = Summary.of(plan.seed, supervisor.history, found, supervisor.dropped)
    written(output, summary, render(supervisor.history, found, summary))
    return summary


if __name__ == "__main__":
    demo(prog_name="python -m examples.demo", auto_envvar_prefix="PUSHREP_DEMO")
