"""The relay job without its command line: who the records are in the next hop, looked up, pinned and looked at again.

source's incarnation ┐
destination's        ├─▶ PID of each source partition ─▶ sending.py
application, epoch   ┘   pinned beside the checkpoint; asked again for every batch
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from filtering import producer_id
from partitioner.confluent import refuse_compaction
from partitioner.confluent_topics import TopicFacts, topic_facts
from partitioner.errors import PartitionerError, TopicShrunk
from spark_jobs.jobs.checks import before_spark, named, progress_with_spark
from spark_jobs.jobs.options import BadOption
from spark_jobs.jobs.pipeline import Handler, session_of, stream
from spark_jobs.jobs.relay_options import RelayOptions
from spark_jobs.jobs.reporting import Reporter
from spark_jobs.marks import MarksStore
from spark_jobs.relay.pin import PinStore, RelayPin, check_same
from spark_jobs.relay.sending import Sending
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sources.logs import TopicLogs


def relay(options: RelayOptions, reporter: Reporter, *, debug: bool = False) -> None:
    """Run the query until it has read all (available-now), a signal comes, or it fails: then what failed is raised."""
    before_spark(options)
    look(options)  # without topics no Spark is started
    with session_of("relay", options, debug=debug) as spark:
        relay_in(spark, options, reporter)


def relay_in(spark: SparkSession, options: RelayOptions, reporter: Reporter) -> None:
    """As `relay`, in a session that stays."""

    def prepare(spark: SparkSession, record: StructType, marks: MarksStore) -> Handler:  # noqa: ARG001 - as every job
        progress_with_spark(spark, options, marks)
        return RelayedBatches(options, pinned(spark, options))

    stream(spark, options, prepare, reporter)


class RelayedBatches:
    """The filter's handler: rows → the destination topic."""

    def __init__(self, options: RelayOptions, pin: RelayPin) -> None:
        self._options, self._pin = options, pin

    def __call__(self, rows: DataFrame, batch_id: int) -> None:  # noqa: ARG002 - a handler's form
        options = self._options
        sources, facts = look(options)
        now = _pin_of(options, sources, facts)
        check_same(now, self._pin)
        if facts.partitions < self._pin.partition_count:
            raise TopicShrunk(self._pin.partition_count, facts.partitions)
        # A log that was not there at the pin is known from its first batch on.
        self._pin = replace(self._pin, sources={**now.sources, **self._pin.sources})
        Sending(
            client=options.client(),
            topic=options.to_topic,
            partition_count=self._pin.partition_count,
            carrier=cast('Literal["key", "header"]', options.carrier_out()),
            source_carrier=options.carrier,
            retention_ms=facts.retention_ms,
            pids=_pids(options, sources, self._pin),
        ).send(rows)

    def drop_from(self, batch_id: int) -> None:
        """The checkpoint was rolled back: what is sent again under its own place is a replay, which readers drop."""


def look(options: RelayOptions) -> tuple[Mapping[tuple[str, int], str], TopicFacts]:
    """The incarnation behind each source partition, and the destination. Raises BadOption for a topic not there."""
    with _topic_named("--to-topic", options.to_topic):
        facts = topic_facts(options.client(), options.to_topic)
        refuse_compaction(options.client(), options.to_topic)
    sources: dict[tuple[str, int], str] = {}
    if options.source == "kafka":
        for topic in options.topics():
            with _topic_named("--topic", topic):
                found = topic_facts(options.source_client(), topic)
            sources.update({(topic, partition): found.incarnation for partition in range(found.partitions)})
        return sources, facts
    logs = TopicLogs(options.path or "", options.topic, None)
    try:
        for partition in logs.present():
            # A log that is just being made has no id yet, and no record either.
            if (log_id := logs.reader(partition).log_id) is not None:
                sources[options.topic, partition] = str(log_id)
    finally:
        logs.close()
    return sources, facts


@contextmanager
def _topic_named(option: str, topic: str) -> Iterator[None]:
    """What a topic is refused for, under the option that names it."""
    try:
        yield
    except PartitionerError as error:
        raise BadOption(option, topic, str(error)) from error


def pinned(spark: SparkSession, options: RelayOptions) -> RelayPin:
    """What this checkpoint's relay is; pins it at the first use."""
    place = options.checkpoint.rstrip("/") + "-relay"
    with named("--checkpoint", options.checkpoint):
        store = PinStore(HadoopDirectory(spark, place), HadoopDirectory(spark, options.checkpoint))
        return store.settle(_pin_of(options, *look(options)), options.partition_count)


def _pin_of(options: RelayOptions, sources: Mapping[tuple[str, int], str], facts: TopicFacts) -> RelayPin:
    count = options.partition_count or facts.partitions
    if count > facts.partitions:
        why = f"topic {options.to_topic} has {facts.partitions} partitions: add some first"
        raise BadOption("--partition-count", options.partition_count, why)
    return RelayPin(
        application=options.application,
        topic=options.to_topic,
        destination=facts.incarnation,
        partition_count=count,
        carrier=options.carrier_out(),
        epoch=options.epoch,
        sources={f"{topic}-{partition}": incarnation for (topic, partition), incarnation in sources.items()},
    )


def _pids(options: RelayOptions, sources: Mapping[tuple[str, int], str], pin: RelayPin) -> dict[tuple[str, int], int]:
    return {
        (topic, partition): producer_id(
            application=options.application,
            stream=topic,
            source=incarnation,
            destination=pin.destination,
            epoch=pin.epoch,
        )
        for (topic, partition), incarnation in sources.items()
    }
