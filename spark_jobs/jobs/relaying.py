"""The relay job without its command line: which PIDs its records get, fixed at the first start, checked at each batch.

source's incarnation ┐   (cluster id and topic id, or a log's id)
destination's        ├─▶ PID of each source partition ─┐
application, epoch   ┘   stored beside the checkpoint; the brokers are asked again for every batch
                                                       │
rows ─▶ one task per source partition, in log order ───┴─▶ SourcePartitionProducer of that task ─▶ topic

A relay stores beside its checkpoint, once, what must not change: its names, and to how many partitions it sends.

    <checkpoint>-relay/epoch-<n>.json     written once, whole or not at all; the highest n counts

Partitions that are added to the destination later are not used: of a source partition that moved, a reader could read
the new destination partition first, and drop what it then reads of the old one. To use them, raise the PID's epoch.

A task owns its client and ends when all its records are acknowledged. Killed anywhere, the batch runs again and sends
again, from its first record on: records that are then in the topic twice are replays, which readers with a filter drop.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import StructType

from filtering import StreamMetadata, producer_id
from partitioner.confluent import (
    DestinationTopic,
    SourcePartitionProducer,
    refuse_compaction,
    topic_facts,
    with_required_settings,
)
from partitioner.source_partition import BadPartitionerSetting, PartitionerError, check_not_shrunk
from pushrep.env.checked_json import parse_json
from spark_jobs.batch_marks import MarksStore
from spark_jobs.errors import BadJobOption, RecordUnfit
from spark_jobs.jobs.command import Reporter, served
from spark_jobs.jobs.options import JobOptions
from spark_jobs.jobs.pipeline import Handler, before_spark, named, progress_with_spark, stream
from spark_jobs.jobs.source_topics import SourceTopics
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sources.logs import TopicLogs
from spark_jobs.spark_internals import a_task_a_number, session_of

_NAME = re.compile(r"epoch-([0-9]{1,9})\.json")
_VERSION = 1


def _pinned(setting: str, wanted: object, pinned: object, remedy: str) -> BadJobOption:
    return BadJobOption(setting, wanted, f"this checkpoint's relay began with {pinned!r}: {remedy}")


def _unreadable(path: str, why: str) -> BadJobOption:
    return BadJobOption("--checkpoint", path, f"{why}; restore it, or begin with a fresh checkpoint and a new --epoch")


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayIdentity:
    """What must not change under one PID epoch.

    `sources`: the incarnation (cluster and topic id, or the log's id) of each source topic or log that was there;
    `destination`: that of the destination topic.
    """

    application: str
    topic: str
    destination: str
    partition_count: int
    carrier: str
    epoch: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)


class RelayIdentityStore:
    """What one checkpoint's relay began with, and with each epoch since."""

    def __init__(self, directory: HadoopDirectory, checkpoint: HadoopDirectory) -> None:
        self._directory, self._checkpoint = directory, checkpoint

    def agree(self, wanted: RelayIdentity, partition_count: int | None) -> RelayIdentity:
        """The stored identity, if `wanted` agrees with it; at the first start, or for a new epoch, `wanted` is stored.

        `wanted` has the destination's present number of partitions; `partition_count` is the one that was asked for,
        None: the stored one. Raises BadJobOption.
        """
        stored = self.read()
        if stored is None:
            if self._checkpoint.names("offsets"):
                path = self._directory.path_of("")
                raise _unreadable(path, "the checkpoint has batches, and nothing says how they were sent")
            return self._write(wanted)
        fresh = "begin with a fresh checkpoint"
        for setting, ours, theirs in (
            ("--application", wanted.application, stored.application),
            ("--to-topic", wanted.topic, stored.topic),
            ("--to-carrier", wanted.carrier, stored.carrier),
        ):
            if ours != theirs:
                raise _pinned(setting, ours, theirs, f"give that, or {fresh}")
        check_same(wanted, stored)
        if wanted.epoch > stored.epoch:
            self._check_settled(wanted.epoch, stored.epoch)
            return self._write(wanted)
        if wanted.epoch < stored.epoch:
            raise _pinned("--epoch", wanted.epoch, stored.epoch, "an epoch only rises: give that")
        if partition_count not in {None, stored.partition_count}:
            remedy = f"raise --epoch above {stored.epoch} with it"
            raise _pinned("--partition-count", partition_count, stored.partition_count, remedy)
        return stored

    def read(self) -> RelayIdentity | None:
        """The identity of the highest epoch, None before the first start. Raises BadJobOption."""
        epochs = sorted(int(found[1]) for found in map(_NAME.fullmatch, self._directory.names()) if found)
        if not epochs:
            return None
        name = f"epoch-{epochs[-1]}.json"
        try:
            fields: dict[str, Any] = parse_json(self._directory.read(name))
            if fields.pop("version") != _VERSION:
                raise _unreadable(self._directory.path_of(name), f"it is not of version {_VERSION}")
            return RelayIdentity(**fields)
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            path = self._directory.path_of(name)
            raise _unreadable(path, f"it is not what a relay writes ({error})") from error

    def _write(self, identity: RelayIdentity) -> RelayIdentity:
        name = f"epoch-{identity.epoch}.json"
        fields = {"version": _VERSION, **asdict(identity), "sources": dict(identity.sources)}
        if not self._directory.create_bytes(name, json.dumps(fields, indent=1).encode()):
            raise _unreadable(self._directory.path_of(name), "the file system refused to make it")
        return identity

    def _check_settled(self, epoch: int, stored: int) -> None:
        """Refuse a new epoch while a batch is half sent: sent again under a new PID, its records were no replays."""
        last = [
            max(map(int, filter(str.isdigit, self._checkpoint.names(log))), default=-1)
            for log in ("offsets", "commits")
        ]
        if last[0] != last[1]:
            why = f"batch {last[0]} is not finished: run once with --epoch {stored}, till it ends, then raise it"
            raise _pinned("--epoch", epoch, stored, why)


def check_same(now: RelayIdentity, stored: RelayIdentity) -> None:
    """Topics and logs are still the same. Raises BadJobOption for one that was made anew."""
    if now.destination != stored.destination:
        remedy = f"topic {now.topic!r} was made anew and lacks what was sent before; begin with a fresh checkpoint"
        raise _pinned("--to-topic", now.destination, stored.destination, remedy)
    for name, incarnation in now.sources.items():
        if stored.sources.get(name, incarnation) != incarnation:
            remedy = f"source {name!r} was made anew, its offsets count from 0 again; begin with a fresh checkpoint"
            raise _pinned("--topic", incarnation, stored.sources[name], remedy)


_SERVERS = "bootstrap.servers"


@dataclass(frozen=True, kw_only=True)
class RelayOptions(JobOptions):
    """The relay's command's --help describes each. Raises BadJobOption."""

    application: str
    to_topic: str
    to_servers: str | None = None
    to_options: dict[str, str] = field(default_factory=dict)
    to_carrier: str | None = None
    partition_count: int | None = None
    epoch: int = 0
    _named_always: ClassVar[tuple[str, ...]] = ("application", "topic", "to_topic", "checkpoint")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in {"pushrep", "kafka"}:
            why = "the id of its topic or log, a part of the new metadata, is not known: relay from pushrep or kafka"
            raise BadJobOption("--source", self.source, why)
        lossy = {name: text for name, text in self.source_options.items() if name.lower() == "failondataloss"}
        if "false" in map(str.lower, lossy.values()):
            why = "records that were not sent would be a hole, after which no later record may be sent"
            raise BadJobOption("--source-option failOnDataLoss", "false", why)
        if _SERVERS in self.to_options:
            raise BadJobOption(f"--to-option {_SERVERS}", self.to_options[_SERVERS], "use --to-servers")
        is_one_cluster = self.to_servers in {None, self.source_servers()}
        if self.source == "kafka" and (twice := set(self.topics()) & {self.to_topic}) and is_one_cluster:
            raise BadJobOption("--to-topic", twice.pop(), "it is the topic that is read: each record would come again")
        self.client()
        self._check_client()

    def carrier_out(self) -> str:
        """Where the new metadata travels: as the source has it, unless set otherwise."""
        return self.to_carrier or self.carrier

    def client(self) -> dict[str, str]:
        """Settings of librdkafka for the destination. Raises BadJobOption without its servers."""
        servers = self.to_servers or self.source_servers()
        if servers is None:
            raise BadJobOption("--to-servers", None, "name the destination's brokers: HOST:9092")
        return {_SERVERS: servers, **self.to_options}

    def reader_options(self) -> dict[str, str]:
        """As every job's; the headers travel on."""
        return {"includeHeaders": "true"} | super().reader_options()

    def _check_client(self) -> None:
        try:
            with_required_settings(self.client())
        except BadPartitionerSetting as error:
            why = re.sub(r"^[^:]*: ", "", str(error))
            raise BadJobOption(f"--to-option {error.setting}", error.value, why) from error


def relay(options: RelayOptions, reporter: Reporter, *, debug: bool = False) -> None:
    """Run the query until it has read all (available-now), a signal comes, or it fails: then what failed is raised."""
    before_spark(options)
    destination_of(options)  # without it no Spark is started
    with (
        served(options.health, f"relay {options.topic}", reporter),
        session_of(f"relay-{options.topic}", options.conf, debug=debug) as spark,
    ):
        relay_in(spark, options, reporter)


def relay_in(spark: SparkSession, options: RelayOptions, reporter: Reporter) -> None:
    """As `relay`, in a session that stays."""

    def prepare(record: StructType, marks: MarksStore, topics: SourceTopics) -> Handler:  # noqa: ARG001 - as every job
        progress_with_spark(spark, options, marks)
        return RelayedBatches(options, topics, identity_of(spark, options, topics))

    stream(spark, options, prepare, reporter)


class RelayedBatches:
    """The filter's handler: rows → the destination topic."""

    def __init__(self, options: RelayOptions, topics: SourceTopics, identity: RelayIdentity) -> None:
        self._options, self._topics, self._identity = options, topics, identity

    def __call__(self, rows: DataFrame, batch_id: int) -> None:  # noqa: ARG002 - a handler's form
        options = self._options
        sources, facts = sources_of(options, self._topics), destination_of(options)
        now = _wanted(options, sources, facts)
        check_same(now, self._identity)
        check_not_shrunk(self._identity.partition_count, facts.partitions)
        # A log that was made after the relay began is known from its first batch on.
        self._identity = replace(self._identity, sources={**now.sources, **self._identity.sources})
        Sending(
            client=options.client(),
            topic=options.to_topic,
            partition_count=self._identity.partition_count,
            carrier=cast('Literal["key", "header"]', options.carrier_out()),
            source_carrier=options.carrier,
            retention_ms=facts.retention_ms,
            pids={
                (topic, partition): producer_id(
                    application=options.application,
                    stream=topic,
                    source=incarnation,
                    destination=self._identity.destination,
                    epoch=self._identity.epoch,
                )
                for (topic, partition), incarnation in sources.items()
            },
        ).send(rows)

    def drop_from(self, batch_id: int) -> None:
        """The checkpoint was rolled back: records that are sent again keep their places, so readers drop them."""


def destination_of(options: RelayOptions) -> DestinationTopic:
    """What the brokers say of it. Raises BadJobOption for a topic that is not there, or is compacted."""
    try:
        facts = topic_facts(options.client(), options.to_topic)
        refuse_compaction(options.client(), options.to_topic)
    except PartitionerError as error:
        raise BadJobOption("--to-topic", options.to_topic, str(error)) from error
    return facts


def sources_of(options: RelayOptions, topics: SourceTopics) -> Mapping[tuple[str, int], str]:
    """The incarnation behind each source partition. Raises BadJobOption for a topic that is not there."""
    if options.source == "kafka":
        found = topics.look()
        return {(name, n): topic.incarnation for name, topic in found.items() for n in range(topic.partitions)}
    with closing(TopicLogs(options.path or "", options.topic, None)) as logs:
        ids = {partition: logs.reader(partition).log_id for partition in logs.present()}
    # A log that is just being made has no id yet, and no record either.
    return {(options.topic, partition): str(log_id) for partition, log_id in ids.items() if log_id is not None}


def identity_of(spark: SparkSession, options: RelayOptions, topics: SourceTopics) -> RelayIdentity:
    """The identity of this checkpoint's relay, which is stored at the first use. Raises BadJobOption."""
    place = options.checkpoint.rstrip("/") + "-relay"
    with named("--checkpoint", options.checkpoint):
        store = RelayIdentityStore(HadoopDirectory(spark, place), HadoopDirectory(spark, options.checkpoint))
        wanted = _wanted(options, sources_of(options, topics), destination_of(options))
        return store.agree(wanted, options.partition_count)


def _wanted(options: RelayOptions, sources: Mapping[tuple[str, int], str], facts: DestinationTopic) -> RelayIdentity:
    count = options.partition_count or facts.partitions
    if count > facts.partitions:
        why = f"topic {options.to_topic} has {facts.partitions} partitions: add some first"
        raise BadJobOption("--partition-count", options.partition_count, why)
    return RelayIdentity(
        application=options.application,
        topic=options.to_topic,
        destination=facts.incarnation,
        partition_count=count,
        carrier=options.carrier_out(),
        epoch=options.epoch,
        sources={f"{topic}-{partition}": incarnation for (topic, partition), incarnation in sources.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What every task of one batch needs. pids: by source topic and partition. Pickled to the workers."""

    client: Mapping[str, Any]
    topic: str
    partition_count: int
    carrier: Literal["key", "header"]
    source_carrier: str
    retention_ms: int | None
    pids: Mapping[tuple[str, int], int]

    def send(self, rows: DataFrame) -> int:
        """Every row is in the topic when this returns; how many. Raises what a task raised, as Spark wraps it."""
        columns: list[Any] = [
            "topic",
            "partition",
            "offset",
            "key",
            "value",
            F.unix_millis("timestamp").alias("timestamp_ms"),
        ]
        if "headers" in rows.columns:
            columns.append("headers")
        # Spark sorts: a task gets source partitions whole, in log order.
        tasks = 1 + max((partition for _, partition in self.pids), default=0)
        ordered = a_task_a_number(rows.select(*columns), tasks, "partition")
        ordered = ordered.sortWithinPartitions("topic", "partition", "offset")
        [[sent]] = ordered.mapInArrow(self._task, "sent bigint").agg(F.sum("sent")).collect()
        return int(sent or 0)

    def _task(self, batches: Iterator[Any]) -> Iterator[Any]:
        sent = 0
        with ExitStack() as stack:
            producer = None
            for batch in batches:
                if producer is None and len(batch):
                    producer = stack.enter_context(
                        SourcePartitionProducer(
                            self.client, self.topic, partition_count=self.partition_count, carrier=self.carrier
                        )
                    )
                for row in batch.to_pylist():
                    self._produce(producer, row)
                sent += len(batch)
        yield pa.RecordBatch.from_pydict({"sent": pa.array([sent], pa.int64())})

    def _produce(self, producer: Any, row: dict[str, Any]) -> None:
        place = (row["topic"], row["partition"], row["offset"])
        pid = self.pids.get(place[:2])
        if pid is None:
            raise _refused(*place, "its partition was not there when the batch began: run the batch again")
        own_key = None if self.source_carrier == "key" and StreamMetadata.try_unpack(row["key"]) else row["key"]
        if own_key is not None and self.carrier == "key":
            why = "it has a key of its own, which the metadata would replace: give --to-carrier header"
            raise _refused(*place, why)
        age_ms = time.time_ns() // 1_000_000 - row["timestamp_ms"]
        if self.retention_ms is not None and age_ms > self.retention_ms:
            why = (
                f"it is {age_ms} ms old, and topic {self.topic} has retention.ms={self.retention_ms}: raise that first"
            )
            raise _refused(*place, why)
        producer.produce(
            StreamMetadata(pid, row["partition"], row["offset"]),
            row["value"],
            key=own_key,
            headers=[(header["key"], header["value"]) for header in row.get("headers") or ()],
            timestamp_ms=row["timestamp_ms"],
        )


def _refused(topic: str, partition: int, offset: int, why: str) -> RecordUnfit:
    return RecordUnfit(f"record {offset} of {topic}-{partition} can't be relayed: {why}")
