"""What the commands of all jobs share: the options of source and run, and how a job runs and prints its errors."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.errors import BadArgument
from pushrep.health import HealthSettings
from spark_jobs.errors import BadJobOption
from spark_jobs.jobs.reporting import Reporter, one_line

Command = TypeVar("Command", bound=Callable[..., Any])


def name_value(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def query_batch(text: str) -> tuple[str, int]:
    """QUERY:BATCH."""
    query, _, batch = text.rpartition(":")
    if not query or not batch.isdigit():
        raise click.BadParameter(f"{text!r} is not QUERY:BATCH, as in 0b5a...:17")
    return query, int(batch)


_SOURCE = (
    click.option("--source", default="pushrep", help="Spark's name of the source: pushrep, kafka, ..."),
    click.option("--path", help="Source pushrep: the directory that holds the logs, <topic>-<n> below it."),
    click.option("--topic", required=True, help="The topic to read (for kafka its option `subscribe`)."),
    click.option(
        "--source-option",
        "source_options",
        type=name_value,
        metavar="NAME=VALUE",
        multiple=True,
        help="Any option of the source.",
    ),
    click.option("--carrier", type=click.Choice(["key", "header"]), default="key", help="Where the metadata travels."),
    click.option(
        "--starting-offsets", help="earliest, latest or JSON; for a fresh checkpoint only.  [default: earliest]"
    ),
    click.option("--max-records-per-trigger", type=click.IntRange(min=1), help="At most so many records a batch."),
    click.option("--window", type=click.IntRange(min=0), default=0, help="Offsets so far below a mark may still come."),
    click.option(
        "--only-pid",
        "only_pids",
        type=click.IntRange(-(2**63), 2**63 - 1),
        multiple=True,
        help="Filter these PIDs only; others pass.",
    ),
    click.option(
        "--leave-out",
        metavar="SQL",
        help="Read no records of which this condition over the source's columns is true: past a PairSplit.",
    ),
    click.option("--ttl-s", type=click.FloatRange(min=0, min_open=True), help="Forget marks that rose so long ago."),
    click.option(
        "--retention-ms",
        type=click.IntRange(min=-1),
        help="With --ttl-s: the topic's retention.ms, which must not be longer; 0 takes any ttl.",
    ),
)
_RUN = (
    click.option("--checkpoint", required=True, help="Spark's checkpoint directory; one for each table."),
    click.option("--marks", help="The directory of the marks.  [default: the checkpoint's path + -marks]"),
    click.option(
        "--adopt", type=query_batch, metavar="QUERY:BATCH", help="A fresh checkpoint goes on after that query's batch."
    ),
    click.option(
        "--trigger", default="available-now", help="available-now: what is there, then stop; or 10s, 1m, 500ms."
    ),
    click.option(
        "--conf",
        "conf",
        type=name_value,
        metavar="NAME=VALUE",
        multiple=True,
        help="A setting of Spark, as spark-submit takes them.",
    ),
    click.option("--health", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics (Prometheus) there."),
    click.option("--health-cert", help="Its certificate (PEM), with --health-key and --health-ca: TLS."),
    click.option("--health-key", help="Its private key (PEM)."),
    click.option("--health-ca", help="Who signs the certificates of those that may read /metrics (PEM)."),
    click.option("--health-plain", is_flag=True, help="Listen off loopback without TLS."),
    click.option("--json", "json_path", help="Progress as JSON lines into this file; - is standard output."),
    click.option("--debug", is_flag=True, help="Errors with their whole stack; Spark's log too."),
)


def source_options(command: Command) -> Command:
    """What is read, and how it is filtered."""
    return _all(_SOURCE, command)


def run_options(file: str) -> Callable[[Command], Command]:
    """Where progress is kept, when batches run, what is reported; `file` is the job's own, for --where."""

    def print_path(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's form
        if value:
            click.echo(Path(file).resolve())
            ctx.exit()

    where = click.option(
        "--where",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_path,
        help="Print the path of this job's file, for spark-submit.",
    )
    return lambda command: _all((*_RUN, where), command)


def run_job(given: dict[str, Any], job: Callable[[dict[str, Any], Reporter, bool], None]) -> None:
    """Call job(given, reporter, debug); an error is one line on standard error and exit code 1."""
    debug, json_path = given.pop("debug"), given.pop("json_path")
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if not debug:
        # Py4J logs an error of a batch with its stack; the job prints it in one line.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Spark's workers must be this very Python, with what is installed beside it.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        with Reporter.open(json_path) as reporter:
            try:
                job(given, reporter, debug)
            except Exception as error:
                reporter.failed(one_line(error))
                raise
    except Exception as error:
        if debug:
            raise
        click.echo(f"error: {one_line(error)}", err=True)
        sys.exit(1)


def given_as_options(given: dict[str, Any], *pairs: str) -> dict[str, Any]:
    """What click parsed, as the options take it; `pairs`: the options that take NAME=VALUE and may be repeated."""
    settings = dict(given)
    for name in ("source_options", "conf", *pairs):
        settings[name] = dict(settings[name])
    settings["only_pids"] = frozenset(settings["only_pids"]) or None
    settings["marks"] = settings["marks"] or settings["checkpoint"].rstrip("/") + "-marks"
    settings["health"] = _health(
        {name: settings.pop(f"health_{name}") for name in ("cert", "key", "ca", "plain")}, settings["health"]
    )
    return settings


def _health(given: dict[str, Any], listen: str | None) -> HealthSettings | None:
    if listen is None:
        if named := [name for name, value in given.items() if value]:
            raise BadJobOption(f"--health-{named[0]}", None, "belongs to --health HOST:PORT: give both")
        return None
    try:
        return HealthSettings(listen=listen, **given)
    except BadArgument as error:
        option = error.argument.removesuffix(".listen").replace(".", "-")
        raise BadJobOption(f"--{option}", None, error.why) from error


def _all(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
