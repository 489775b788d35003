"""The job that sends a log or a topic to another topic, whose readers with a replay filter see each record once.

    source (pushrep, kafka) ─▶ ReplayFilteredBatches ─▶ one task per source partition ─▶ topic
    checkpoint: Spark's        marks beside it          key or header: (PID of this hop, source partition, offset)

Kill it at any moment and start it with the same options: the batch that ran is sent again, and a reader of the
topic through a replay filter sees each record once, in the order of its source partition. Run it as
`python -m spark_jobs.jobs.relay --help`, or give this file (`--where` prints its path) to spark-submit.
"""

from typing import Any

import click

from filtering.extras import needed_by

with needed_by("this job", is_program=__name__ == "__main__"):
    from pyspark import __version__ as SPARK_VERSION  # noqa: N812 - a constant

    from spark_jobs.jobs.command import given_as_options, name_value, run_job, run_options, source_options
    from spark_jobs.jobs.relaying import RelayOptions, relay

_EPILOG = f"""\b
Examples
  a log into a topic of brokers that run, all that is there, then stop:
    python -m spark_jobs.jobs.relay --path outbox --topic orders --application billing \\
        --to-servers HOST:9092 --to-topic orders-checked --checkpoint relay-checkpoint
  a topic into another one, followed every second, with Spark's Kafka connector:
    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION} \\
        "$(python -m spark_jobs.jobs.relay --where)" --trigger 1s \\
        --source kafka --source-option kafka.bootstrap.servers=HOST:9092 --topic orders \\
        --application billing --to-topic orders-checked --checkpoint /data/relay-checkpoint
  the topic got more partitions, which are to be used:
    ... --partition-count 12 --epoch 1

\b
SIGTERM or Ctrl-C: the running batch is finished, then the job ends with 0.
Refused or failed: one line on standard error that names the option, and 1 (2: wrong usage).
"""


@click.command(epilog=_EPILOG, context_settings={"max_content_width": 110, "show_default": True})
@source_options
@click.option("--application", required=True, help="Name of the sender, part of the new PID; each relay has its own.")
@click.option("--to-topic", required=True, help="The topic to send to; it must be there.")
@click.option("--to-servers", help="Its brokers.  [default: those of --source kafka]")
@click.option(
    "--to-option",
    "to_options",
    type=name_value,
    metavar="NAME=VALUE",
    multiple=True,
    help="Any librdkafka setting for it.",
)
@click.option("--to-carrier", type=click.Choice(["key", "header"]), help="[default: as --carrier]")
@click.option("--partition-count", type=click.IntRange(min=1), help="Partitions to use, fixed at the first start.")
@click.option(
    "--epoch", type=click.IntRange(0, 10**9 - 1), default=0, help="Of the PID; raise it with --partition-count."
)
@run_options(__file__)
def main(**given: Any) -> None:
    """Relay a log or a topic to a topic: replays dropped, each record's metadata being its offset in the source.

    A record keeps value, headers, timestamp and its partition's number (modulo the partitions used). Its new
    metadata is its own offset in the source, under the PID of this relay. A batch that runs again sends again:
    read the topic through a replay filter. Marks and its identity lie beside the checkpoint: keep all, or none.
    """
    run_job(given, lambda given, reporter, debug: relay(_options(given), reporter, debug=debug))


def _options(given: dict[str, Any]) -> RelayOptions:
    return RelayOptions(**given_as_options(given, "to_options"))


if __name__ == "__main__":
    main()
