"""The job anyone can run: a log or a topic through the replay filter into a table, every record once.

    source (pushrep, kafka, ...) ─▶ ReplayFilteredBatches ─▶ values into columns ─▶ idempotent table
    checkpoint: Spark's             marks beside it                                 batch_id = N, replaced if run again
                                    or in the database, with the rows               or PostgreSQL, in one transaction

Kill it at any moment and start it with the same options: it goes on, and the table is the one that an undisturbed run
would have made. Run it as `python -m spark_jobs.jobs.apply --help`, or give this file (`--where` prints its path) to
spark-submit.
"""

from typing import Any, TextIO

import click

from filtering.extras import needed_by

with needed_by("this job", is_program=__name__ == "__main__"):
    from pyspark import __version__ as SPARK_VERSION  # noqa: N812 - a constant

    from spark_jobs.errors import BadJobOption
    from spark_jobs.jobs.command import given_as_options, name_value, run_job, run_options, source_options
    from spark_jobs.jobs.options import ApplyOptions
    from spark_jobs.jobs.pipeline import apply
    from spark_jobs.marks_stores import is_database

_EPILOG = f"""\b
Examples
  a log into Parquet, all that is there, then stop:
    python -m spark_jobs.jobs.apply --path outbox --topic orders \\
        --sink ./orders-table --checkpoint orders-checkpoint
  follow it, Avro values as columns, a batch every 5 seconds:
    python -m spark_jobs.jobs.apply --path outbox --topic orders \\
        --value-format avro --value-schema order.avsc \\
        --sink ./orders-table --checkpoint orders-checkpoint --trigger 5s
  the same, run again by `pushrep startpoint repair outbox orders --consumer billing --from -1h --sink ./orders-table`:
    python -m spark_jobs.jobs.apply --path outbox --topic orders --consumer billing --trigger 5s \\
        --sink ./orders-table --checkpoint orders-checkpoint
  a Kafka topic by spark-submit, which wants this file's path, with Spark's Kafka connector:
    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION} \\
        "$(python -m spark_jobs.jobs.apply --where)" \\
        --source kafka --source-option kafka.bootstrap.servers=HOST:9092 \\
        --topic orders --sink /data/orders --checkpoint /data/orders-checkpoint
  the same into PostgreSQL, rows and marks in one transaction (password: PGPASSWORD or ~/.pgpass):
    ... --topic orders --sink postgresql://HOST/shop --table orders --checkpoint /data/orders-checkpoint

\b
SIGTERM or Ctrl-C: the running batch is finished, then the job ends with 0.
Refused or failed: one line on standard error that names the option, and 1 (2: wrong usage).
"""


@click.command(epilog=_EPILOG, context_settings={"max_content_width": 110, "show_default": True})
@source_options
@click.option("--consumer", help="Source pushrep: follow this consumer's startpoints while the job runs.")
@click.option(
    "--sink", required=True, help="Where rows go: a path (with a /), a catalog table's name, or a database's URL."
)
@click.option("--table", "sink_table", help="Of a database (postgresql://HOST/DATABASE, sqlite:PATH): its table.")
@click.option("--format", "sink_format", default="parquet", help="The table's format.")
@click.option(
    "--sink-option",
    "sink_options",
    type=name_value,
    metavar="NAME=VALUE",
    multiple=True,
    help="Any option of the format.",
)
@click.option("--partition-by", multiple=True, help="A column to partition by, below batch_id.")
@click.option("--value-format", type=click.Choice(["binary", "string", "json", "avro"]), default="binary")
@click.option("--value-schema", type=click.File(encoding="utf-8"), help="json, avro: a file.")
@click.option("--keep", default="topic,partition,offset,timestamp", help="The record's own columns beside the value's.")
@click.option(
    "--append-only",
    is_flag=True,
    help="With --consumer: what a startpoint with --reset-marks gives again comes beside the old rows, not in place.",
)
@run_options(__file__)
def main(**given: Any) -> None:
    """Apply a log or a topic to a table: every record once, whatever was replayed, killed or run again.

    Records whose key (or header stream-metadata) names a source record are filtered by the rule of
    docs/spark.md; records without it pass. The marks live in a directory beside the checkpoint, or in the
    database with the rows: keep both, or neither.
    """
    run_job(given, lambda given, reporter, debug: apply(_options(given), reporter, debug=debug))


def _options(given: dict[str, Any]) -> ApplyOptions:
    settings = given_as_options(given, "sink_options")
    if is_database(settings["sink"]) and given["marks"] is None:
        settings["marks"] = ""
    schema: TextIO | None = settings.pop("value_schema")
    settings["keep"] = tuple(name.strip() for name in settings["keep"].split(",") if name.strip())
    try:
        text = None if schema is None else schema.read()
    except ValueError as error:
        raise BadJobOption("--value-schema", getattr(schema, "name", None), f"it is no text: {error}") from error
    return ApplyOptions(value_schema=text, **settings)


if __name__ == "__main__":
    main()
