"""The apply and relay jobs beside the same jobs without a filter, and with Spark's own two ways to drop duplicates.

    topic of a real broker (4 partitions, 16 pairs, 100-byte values) ─▶ Spark's Kafka source ─▶ filter ─▶ the job's sink
        apply: a Parquet table that a batch may be written to again      relay: a second topic, one task a partition

All sides read the same topic from its start to its end by two batches (--long: by eight), each with a fresh
checkpoint, and hand the rows to the job's own sink; state in RocksDB. In the middle of its log every pair goes back,
so that a tenth of the records are replays: every side but the one without a filter has to leave each record once in
the table or the topic, which is looked at behind the clock. State is what lies on disk in the end: marks of ours, the
checkpoint's state of the others. --long has more records, so that state grows; the seconds of each batch are in the
notes.
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Timed, compare, random_values, scratch
from benchmarks.push_sides import brokers, produce, topic
from benchmarks.spark_filter import size_of
from filtering.stream_metadata import KEY_BYTES, pack_keys
from spark_jobs.jobs.command import Reporter
from spark_jobs.jobs.options import ApplyOptions, JobOptions
from spark_jobs.jobs.pipeline import DecodedBatches, apply_in
from spark_jobs.jobs.relaying import RelayedBatches, RelayOptions, identity_of, relay_in
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.spark_driver import LIBS, missing_jars

RECORDS = {"apply": 1_000_000, "relay": 200_000}
RECORDS_LONG = {"apply": 8_000_000, "relay": 2_000_000}
PARTITIONS, PAIRS_EACH, RUN = 4, 4, 250
BATCHES, BATCHES_LONG, ROUNDS_MAX = 2, 8, 3
REPLAYED_PART = 10  # one in so many
VALUE_BYTES = 100
_WAIT_S = 120
_QUIET = {"log_level": "0"}
_NUMBERS = count(1)

Stream = Callable[[DataFrame], DataFrame]
PEERS: dict[str, Stream] = {
    "no filter": lambda rows: rows,
    "dropDuplicates": lambda rows: rows.dropDuplicates(["key"]),
    "dropDuplicatesWithinWatermark": lambda rows: rows.withWatermark(
        "timestamp", "1 hour"
    ).dropDuplicatesWithinWatermark(["key"]),
}


class Ran(NamedTuple):
    """Of a run: seconds of its batches, bytes of its state."""

    batches_s: list[float]
    state_bytes: int


class Job(NamedTuple):
    """One of the two: its options for a place, its sink, itself, and how many records its sink has got."""

    name: str
    options: Callable[[Path], JobOptions]
    handler: Callable[[JobOptions], Callable[[DataFrame, int], None]]
    run: Callable[[JobOptions, Reporter], None]
    arrived: Callable[[JobOptions], int]


def run(rounds: int) -> dict[str, Any]:
    """Three rounds at most: each starts eight queries, which take seconds whatever they read."""
    return _run(min(rounds, ROUNDS_MAX), RECORDS, BATCHES)


def run_long(rounds: int) -> dict[str, Any]:
    return _run(rounds, RECORDS_LONG, BATCHES_LONG)


def _run(rounds: int, sizes: dict[str, int], batches: int) -> dict[str, Any]:
    if why := missing() or missing_jars():
        raise SystemExit(f"the jobs need a real broker and Spark's connector: {why}")
    results = {}
    with scratch("kafka-jobs") as root, brokers(root, 1) as cluster:
        spark = session(str(root))
        try:
            for job in (apply_job(spark, cluster, batches), relay_job(spark, cluster, batches)):
                records = sizes[job.name]
                filled = fill(cluster, job.name, records)
                results[f"{job.name} job, {records:,} records"] = one(spark, job, root / "work", filled, rounds)
        finally:
            spark.stop()
    return results


class Filled(NamedTuple):
    """The source topic, all of its records, and those that are no replays."""

    topic: str
    records: int
    new: int


def one(spark: SparkSession, job: Job, place: Path, filled: Filled, rounds: int) -> dict[str, Any]:
    """One comparison."""
    ran: dict[str, Ran] = {}

    def timed(side: str, work: Callable[[JobOptions], Ran], kept: int) -> Timed:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        options = job.options(place)
        began = perf_counter()
        ran[side] = work(options)
        seconds = perf_counter() - began
        if (found := job.arrived(options)) != kept:
            raise AssertionError(f"{job.name}, {side}: {found} records arrived of {kept}")
        return Timed(filled.records, seconds)

    ours = f"{job.name} job"
    sides: dict[str, Callable[[], Timed]] = {ours: lambda: timed(ours, partial(_filtered, job), filled.new)}
    for name, stream in PEERS.items():
        kept = filled.records if name == "no filter" else filled.new
        sides[name] = partial(timed, name, partial(_peer, spark, job, stream), kept)
    result = compare(sides, rounds=rounds)
    state = ", ".join(f"{name} {one.state_bytes:,}" for name, one in ran.items())
    batches = "; ".join(f"{name} {' '.join(f'{one:.1f}' for one in done.batches_s)}" for name, done in ran.items())
    result["notes"] = [f"state on disk, bytes: {state}", f"seconds of the last round's batches: {batches}"]
    return result


def _filtered(job: Job, options: JobOptions) -> Ran:
    told = io.StringIO()
    job.run(options, Reporter(told))
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "batch"]
    return Ran(seconds, size_of(Path(options.marks)))


def _peer(spark: SparkSession, job: Job, stream: Stream, options: JobOptions) -> Ran:
    rows = spark.readStream.format(options.source).options(**options.reader_options()).load()
    writer = stream(rows).writeStream.foreachBatch(job.handler(options))
    query = writer.option("checkpointLocation", options.checkpoint).trigger(**options.trigger_arguments()).start()
    query.awaitTermination()
    seconds = [done["durationMs"]["triggerExecution"] / 1000 for done in query.recentProgress if done["numInputRows"]]
    return Ran(seconds, size_of(Path(options.checkpoint, "state")))


def apply_job(spark: SparkSession, cluster: KafkaCluster, batches: int) -> Job:
    """Topic to table."""

    def options(place: Path) -> ApplyOptions:
        return ApplyOptions(
            **_source(cluster, "apply", place, batches), sink=f"{place}/table", keep=("partition", "offset")
        )

    def handler(given: JobOptions) -> Callable[[DataFrame, int], None]:
        assert isinstance(given, ApplyOptions), "its own"
        return DecodedBatches(given.decoder(), given.table())

    return Job(
        "apply",
        options,
        handler,
        lambda given, reporter: apply_in(spark, given, reporter),  # type: ignore[arg-type] # its own
        lambda given: spark.read.parquet(given.sink).count(),  # type: ignore[attr-defined] # its own
    )


def relay_job(spark: SparkSession, cluster: KafkaCluster, batches: int) -> Job:
    """Topic to topic, a new one for each run."""

    def options(place: Path) -> RelayOptions:
        to = topic(cluster, f"relayed-{next(_NUMBERS)}", PARTITIONS)
        return RelayOptions(
            **_source(cluster, "relay", place, batches), application="bench", to_topic=to, to_options=_QUIET
        )

    def handler(given: JobOptions) -> Callable[[DataFrame, int], None]:
        assert isinstance(given, RelayOptions), "its own"
        return RelayedBatches(given, identity_of(spark, given))

    return Job(
        "relay",
        options,
        handler,
        lambda given, reporter: relay_in(spark, given, reporter),  # type: ignore[arg-type] # its own
        lambda given: length(cluster, given.to_topic),  # type: ignore[attr-defined] # its own
    )


def _source(cluster: KafkaCluster, name: str, place: Path, batches: int) -> dict[str, Any]:
    """What both jobs are told of the topic of that name."""
    return {
        "source": "kafka",
        "topic": name,
        "source_options": {"kafka.bootstrap.servers": cluster.bootstrap_servers},
        "max_records_per_trigger": -(-length(cluster, name) // batches),
        "checkpoint": f"{place}/checkpoint",
        "marks": f"{place}/marks",
    }


def length(cluster: KafkaCluster, name: str) -> int:
    """Records of a topic."""
    client = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "length", **_QUIET})
    try:
        marks = [client.get_watermark_offsets(TopicPartition(name, p), _WAIT_S) for p in range(PARTITIONS)]
        return sum(high - low for low, high in marks)
    finally:
        client.close()


def fill(cluster: KafkaCluster, name: str, records: int) -> Filled:
    """Make the topic; the pairs of a partition take turns, and go back by a tenth in the middle."""
    turns = records // (PARTITIONS * PAIRS_EACH * RUN)
    back = max(1, turns // REPLAYED_PART)
    topic(cluster, name, PARTITIONS)
    client = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "linger.ms": 20,
            "batch.size": 480_000,
            "queue.buffering.max.messages": 5_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )
    values = random_values(10_000, VALUE_BYTES)
    for number, (partition, key) in enumerate(_keys(turns, back)):
        produce(client, name, values[number % len(values)], partition, key=key)
    if client.flush(_WAIT_S):
        raise TimeoutError("the broker did not take everything")
    each = PARTITIONS * PAIRS_EACH * RUN
    return Filled(name, turns * each, (turns - back) * each)


def _keys(turns: int, back: int) -> Iterator[tuple[int, bytes]]:
    for turn in range(turns):
        first = (turn if turn < turns // 2 else turn - back) * RUN
        for pair in range(PAIRS_EACH):
            for partition in range(PARTITIONS):
                keys = pack_keys(7, partition + PARTITIONS * pair, first, RUN)
                for at in range(0, len(keys), KEY_BYTES):
                    yield partition, keys[at : at + KEY_BYTES]


def session(home: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.jars": ",".join(map(str, sorted(LIBS.glob("*.jar")))),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.local.dir": home,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    builder = SparkSession.builder.master("local[2]").appName("pushrep-kafka-jobs")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
