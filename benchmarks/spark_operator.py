"""filter_replays, the operator form, beside no filter and Spark's own two ways to drop duplicates (G16, G17).

    Parquet (4 log partitions, 16 pairs, 4 M keys, 100-byte values) ─▶ one trigger of a stream ─▶ noop sink

All sides are the same stream with one operator exchanged, each with a fresh checkpoint; state in RocksDB. First no row
is a replay, which is what a healthy stream does, then a tenth of them. State is what the checkpoint holds on disk.

The last part looks at batch time while keys grow: batches of 1 M new keys, the rate of the first ones beside that of
the last ones. --long goes to 50 M keys; dropDuplicates, which fills up the disk, to a fifth of that. Values are cut
from a random pool when they are read, so that 50 M rows are 1 GB of files.
"""

import os
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from benchmarks.harness import POOL_BYTES, compare, random_values, spread
from benchmarks.spark_filter import RECORDS, VALUE_BYTES, Bench, Stream, session, size_of, write_log
from filtering.stream_metadata import KEY_BYTES, pack_keys
from spark_jobs import filter_replays
from spark_jobs.operator_counts import operator_counts

KEYS_EACH = 1_000_000
WARM_UPS = 3
"""So many streams of each side, until the JVM has compiled most of what a row passes through."""

LOG_PARTITIONS, PAIRS_EACH = 2, 4
BATCHES, BATCHES_LONG = 12, 50  # enough for LOOKED_AT at each end
PEER_PART = 5  # dropDuplicates goes to one in so many
LOOKED_AT = 5  # batches at each end; the very first is a warm-up


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-operator-") as place:
        home = Path(place)
        write_log(home / "new")
        write_log(home / "replayed", replayed=True)
        spark = session(place)
        try:
            return _beside_peers(spark, home, rounds) | _growing(spark, home, BATCHES)
        finally:
            spark.stop()


def run_long(rounds: int) -> dict[str, Any]:  # noqa: ARG001 - a round takes minutes
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-operator-", dir=Path.cwd()) as place:
        spark = session(place)
        try:
            return _growing(spark, Path(place), BATCHES_LONG)
        finally:
            spark.stop()


def _beside_peers(spark: SparkSession, home: Path, rounds: int) -> dict[str, Any]:
    new, replayed = Bench(spark, home, "new"), Bench(spark, home, "replayed")
    state: dict[str, int] = {}

    def side(bench: Bench, name: str, operator: Stream) -> float:
        done = bench.deduplicated(operator)
        state[name] = bench.state_bytes
        return done

    results = {
        "operator form, every row is new": compare(
            {
                "filter_replays": lambda: side(new, "ours", filter_replays),
                "no filter": lambda: side(new, "none", lambda f: f),
                "dropDuplicates": lambda: side(new, "theirs", lambda f: f.dropDuplicates(["key"])),
                "dropDuplicatesWithinWatermark": lambda: side(
                    new,
                    "watermark",
                    lambda f: f.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["key"]),
                ),
            },
            rounds=rounds,
            goals={"dropDuplicates": 2.0},
            warm_ups=WARM_UPS,
        ),
        "operator form, a tenth are replays": compare(
            {
                "filter_replays": lambda: side(replayed, "replayed", filter_replays),
                "no filter": lambda: side(replayed, "none", lambda f: f),
            },
            rounds=rounds,
        ),
    }
    ours, theirs = state["ours"], state["theirs"]
    results["operator form, every row is new"]["notes"] = [
        f"state on disk for 16 pairs: {ours:,} bytes with all of Spark's own files, {ours // 16:,} a pair",
        f"state of dropDuplicates for {RECORDS:,} keys: {theirs:,} bytes, {theirs // ours:,}x",
    ]
    return results


def _growing(spark: SparkSession, home: Path, batches: int) -> dict[str, Any]:
    write_batches(home / "growing", batches)
    write_batches(home / "growing-peer", max(LOOKED_AT + 1, batches // PEER_PART))
    ours, ours_bytes = _rates(spark, home, "growing", filter_replays)
    peer, peer_bytes = _rates(spark, home, "growing-peer", lambda f: f.dropDuplicates(["key"]))
    sides = {}
    for name, rates in (("filter_replays", ours), ("dropDuplicates", peer)):
        looked_at = min(LOOKED_AT, (len(rates) - 1) // 2)
        sides[f"{name}, to {looked_at + 1} M keys"] = rates[1 : looked_at + 1]
        sides[f"{name}, to {len(rates)} M keys"] = rates[-looked_at:]
    first, last, peer_first, peer_last = sides
    flat = statistics.median(sides[last]) / statistics.median(sides[first])
    result = {
        "unit": "records/s",
        "rounds": LOOKED_AT,
        "ours": last,
        "rates": {name: spread(rates) for name, rates in sides.items()},
        "ratios": {
            first: {"median": flat, "min": flat, "max": flat, "goal": 0.9},
            **{
                name: spread([statistics.median(sides[last]) / statistics.median(sides[name])])
                for name in (peer_first, peer_last)
            },
        },
        "notes": [
            f"checkpoint in the end, with all versions that Spark keeps: ours {ours_bytes:,} bytes",
            f"dropDuplicates {peer_bytes:,} bytes",
        ],
    }
    return {f"batch after batch of {KEYS_EACH:,} new keys": result}


def _rates(spark: SparkSession, home: Path, log: str, operator: Stream) -> tuple[list[float], int]:
    """Records a second of each batch, by the query's own progress, and the bytes of its state."""
    checkpoint = home / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1000")
    writer = operator(growing_stream(spark, home / log)).writeStream.format("noop")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    done = [progress for progress in query.recentProgress if progress["numInputRows"]]
    for progress in done:
        counts = operator_counts(progress)
        assert counts is None or counts.kept == KEYS_EACH, counts
    return [KEYS_EACH / progress["durationMs"]["triggerExecution"] * 1000 for progress in done], size_of(checkpoint)


def growing_stream(spark: SparkSession, log: Path) -> DataFrame:
    """One file of each log partition a batch; 100-byte values from a random pool."""
    schema = "key binary, partition int, offset bigint"
    keys = spark.readStream.schema(schema).option("maxFilesPerTrigger", LOG_PARTITIONS).parquet(str(log))
    pool = random_values(1, POOL_BYTES // 4)[0]
    place = F.col("offset") * 977 % (len(pool) - VALUE_BYTES) + 1
    return keys.select(
        "key",
        F.substring(F.lit(pool), place.cast("int"), F.lit(VALUE_BYTES)).alias("value"),
        F.lit("orders").alias("topic"),
        "partition",
        "offset",
    )


def write_batches(directory: Path, batches: int) -> None:
    """KEYS_EACH new keys a batch, in log order; Spark takes files by their age, so each is a second younger."""
    directory.mkdir()
    each = KEYS_EACH // LOG_PARTITIONS
    of_pair = each // PAIRS_EACH
    names: Any = [("key", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64())]
    for first, _ in pairwise(range(0, (batches + 1) * each, each)):
        for partition in range(LOG_PARTITIONS):
            keys = b"".join(
                pack_keys(7, partition + LOG_PARTITIONS * pair, first // PAIRS_EACH, of_pair)
                for pair in range(PAIRS_EACH)
            )
            own = pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), each, [None, pa.py_buffer(keys)])
            offsets = np.arange(first, first + each, dtype=np.int64)
            columns: Any = [own.cast(pa.binary()), pa.array(np.full(each, partition, np.int32)), pa.array(offsets)]
            file = directory / f"{first:012}-{partition}.parquet"
            pq.write_table(pa.table(columns, schema=pa.schema(names)), file, use_dictionary=False)
            at = 1_700_000_000 + first // each * LOG_PARTITIONS + partition
            os.utime(file, (at, at))
