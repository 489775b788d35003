"""The job anyone can run: a log or a topic through the replay filter into a table, every record once.

    source (pushrep, kafka, ...) ─▶ ReplayFilteredBatches ─▶ values into columns ─▶ idempotent table
    checkpoint: Spark's             marks beside it                                 batch_id = N, replaced if run again

Kill it at any moment and start it with the same options: it goes on, and the table is the one that an undisturbed run
would have made. Run it as `python -m spark_jobs.jobs.apply --help`, or give this file (`--where` tells its path) to
spark-submit.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

try:
    from pyspark import __version__ as SPARK_VERSION  # noqa: N812 - a constant

    from spark_jobs.jobs.options import ApplyOptions, BadOption
    from spark_jobs.jobs.pipeline import apply
    from spark_jobs.jobs.reporting import Reporter, one_line
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"error: this job needs {missing.name}, which {sys.executable} does not have: pip install '.[spark]' in "
        "pushrep's repository, or point PYSPARK_PYTHON at the Python that has it"
    )


class _Pair(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, rest = str(value).partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, rest


class _Adopt(click.ParamType[tuple[str, int]]):
    """QUERY:BATCH."""

    name = "query:batch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        query, _, batch = str(value).rpartition(":")
        if not query or not batch.isdigit():
            self.fail(f"{value!r} is not QUERY:BATCH, as in 0b5a...:17", param, ctx)
        return query, int(batch)


_EPILOG = f"""\b
Examples
  a log into Parquet, all that is there, then stop:
    python -m spark_jobs.jobs.apply --path outbox --topic orders \\
        --sink ./orders-table --checkpoint orders-checkpoint
  follow it, Avro values as columns, a batch every 5 seconds:
    python -m spark_jobs.jobs.apply --path outbox --topic orders \\
        --value-format avro --value-schema order.avsc \\
        --sink ./orders-table --checkpoint orders-checkpoint --trigger 5s
  the same, and sent back by `pushrep startpoint set outbox orders --consumer billing --to -1h --reset-marks`:
    python -m spark_jobs.jobs.apply --path outbox --topic orders --consumer billing --trigger 5s \\
        --sink ./orders-table --checkpoint orders-checkpoint \\
        --keep topic,partition,offset,timestamp,startpoint_epoch
  by spark-submit, which wants this file's path and the Python that has pushrep:
    export PYSPARK_PYTHON=$(command -v python)
    spark-submit "$(python -m spark_jobs.jobs.apply --where)" --path outbox --topic orders \\
        --sink ./orders-table --checkpoint orders-checkpoint
  a Kafka topic, with Spark's Kafka connector:
    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION} \\
        "$(python -m spark_jobs.jobs.apply --where)" \\
        --source kafka --source-option kafka.bootstrap.servers=HOST:9092 \\
        --topic orders --sink /data/orders --checkpoint /data/orders-checkpoint

\b
SIGTERM or Ctrl-C: the running batch is finished, then the job ends with 0.
Refused or failed: one line on standard error that names the option, and 1 (2: wrong usage).
"""


def _tell_where(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's form
    if value:
        click.echo(Path(__file__).resolve())
        ctx.exit()


@click.command(epilog=_EPILOG, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--source", default="pushrep", help="Spark's name of the source: pushrep, kafka, ...")
@click.option("--path", help="Source pushrep: the directory that holds the logs, <topic>-<n> below it.")
@click.option("--topic", required=True, help="The topic to read (for kafka its option `subscribe`).")
@click.option("--source-option", "source_options", type=_Pair(), multiple=True, help="Any option of the source.")
@click.option("--carrier", type=click.Choice(["key", "header"]), default="key", help="Where the metadata travels.")
@click.option("--starting-offsets", help="earliest, latest or JSON; for a fresh checkpoint only.  [default: earliest]")
@click.option("--consumer", help="Source pushrep: follow this consumer's startpoints while the job runs.")
@click.option("--max-records-per-trigger", type=click.IntRange(min=1), help="At most so many records a batch.")
@click.option("--window", type=click.IntRange(min=0), default=0, help="Offsets so far below a mark may still come.")
@click.option(
    "--only-pid",
    "only_pids",
    type=click.IntRange(-(2**63), 2**63 - 1),
    multiple=True,
    help="Filter these PIDs only; others pass.",
)
@click.option("--sink", required=True, help="Where rows go: a path (with a /), or a catalog table's name.")
@click.option("--format", "sink_format", default="parquet", help="The table's format.")
@click.option("--sink-option", "sink_options", type=_Pair(), multiple=True, help="Any option of the format.")
@click.option("--partition-by", multiple=True, help="A column to partition by, below batch_id.")
@click.option("--checkpoint", required=True, help="Spark's checkpoint directory; one for each table.")
@click.option("--marks", help="Directory of the marks.  [default: the checkpoint's path + -marks]")
@click.option("--adopt", type=_Adopt(), help="QUERY:BATCH, a fresh checkpoint goes on after that query's batch.")
@click.option("--trigger", default="available-now", help="available-now: what is there, then stop; or 10s, 1m, 500ms.")
@click.option("--value-format", type=click.Choice(["binary", "string", "json", "avro"]), default="binary")
@click.option(
    "--value-schema", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="json, avro: a file."
)
@click.option("--keep", default="topic,partition,offset,timestamp", help="The record's own columns beside the value's.")
@click.option("--conf", "conf", type=_Pair(), multiple=True, help="A setting of Spark, as spark-submit takes them.")
@click.option("--json", "json_path", help="Progress as JSON lines into this file; - is standard output.")
@click.option(
    "--where",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_where,
    help="Print the path of this job's file, for spark-submit.",
)
@click.option("--debug", is_flag=True, help="Errors with their whole stack; Spark's log too.")
def main(**given: Any) -> None:
    """Apply a log or a topic to a table: every record once, whatever was replayed, killed or run again.

    Records whose key (or header stream-metadata) names a source record are filtered by the rule of
    docs/replay-filter.md; records without it pass. The marks live in a directory beside the checkpoint: keep
    both, or neither.
    """
    debug, json_path = given.pop("debug"), given.pop("json_path")
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if not debug:
        # Py4J logs what a batch raises with its stack; the job says it in one line.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Spark's workers must be this very Python, with what is installed beside it.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        with _reporter(json_path) as reporter:
            try:
                apply(_options(given), reporter, debug=debug)
            except Exception as error:
                reporter.failed(one_line(error))
                raise
    except Exception as error:
        if debug:
            raise
        click.echo(f"error: {one_line(error)}", err=True)
        sys.exit(1)


def _options(given: dict[str, Any]) -> ApplyOptions:
    """What click parsed → checked options; raises SparkJobError."""
    schema: Path | None = given.pop("value_schema")
    given["source_options"], given["sink_options"] = dict(given["source_options"]), dict(given["sink_options"])
    given["conf"] = dict(given["conf"])
    given["keep"] = tuple(name.strip() for name in given["keep"].split(",") if name.strip())
    given["only_pids"] = frozenset(given["only_pids"]) or None
    given["marks"] = given["marks"] or given["checkpoint"].rstrip("/") + "-marks"
    return ApplyOptions(value_schema=None if schema is None else _text(schema), **given)


def _text(schema: Path) -> str:
    try:
        return schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption("--value-schema", str(schema), f"can't be read: {error}") from error


def _reporter(path: str | None) -> Reporter:
    try:
        return Reporter.open(path)
    except OSError as error:
        raise BadOption("--json", path, f"can't be written: {error.strerror}; name a file, or -") from error


if __name__ == "__main__":
    main()
