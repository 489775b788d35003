"""The replay filter in Spark's foreachBatch beside no filter and Spark's own two ways to drop duplicates (G16).

    Parquet (4 log partitions, 16 pairs, 4 M keys, 100-byte values) ─▶ one trigger of a stream ─▶ noop sink

Every side is a stream with a fresh checkpoint, so that each pays for its start, its offsets and its commit; those of
dropDuplicates keep 4 M keys in RocksDB, ours keeps 16 marks in a segment log. No row is a replay: every side hands on
all rows, which is what a healthy stream does. State is the peers' and our own on disk after the run (G17).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import compare, random_values
from filtering.stream_metadata import pack_keys
from spark_jobs import LocalMarks, ReplayFilteredBatches

RECORDS = 4_000_000
PARTITIONS, PAIRS_EACH = 4, 4
VALUE_BYTES = 100
ROW_GROUP = 100_000
RUN = 250  # records of one pair in a row, as a producer's batches come
GOALS = {"no filter": 0.8, "dropDuplicates": 4.0, "dropDuplicatesWithinWatermark": 4.0}

Stream = Callable[[DataFrame], DataFrame]


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-filter-") as home:
        write_log(Path(home, "log"))
        spark = session(home)
        bench = Bench(spark, Path(home))
        try:
            result = compare(
                {
                    "ReplayFilteredBatches": bench.filtered,
                    "no filter": bench.unfiltered,
                    "dropDuplicates": lambda: bench.deduplicated(lambda f: f.dropDuplicates(["key"])),
                    "dropDuplicatesWithinWatermark": lambda: bench.deduplicated(
                        lambda f: f.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["key"])
                    ),
                },
                rounds=rounds,
                goals=GOALS,
            )
        finally:
            spark.stop()
    ours, theirs = bench.marks_bytes, bench.state_bytes
    result["notes"] = [f"state on disk: {ours:,} bytes of marks, {theirs:,} of dropDuplicates: {theirs // ours:,}x"]
    return result


class Bench:
    def __init__(self, spark: SparkSession, home: Path) -> None:
        self._spark, self._log, self._work = spark, str(home / "log"), home / "work"
        self._schema = spark.read.parquet(self._log).schema
        self.marks_bytes = self.state_bytes = 0

    def filtered(self) -> float:
        with LocalMarks(self._fresh() / "marks") as marks:
            once = ReplayFilteredBatches(drain, marks)
            self._stream().writeStream.foreachBatch(once).option("checkpointLocation", str(self._work / "c")).trigger(
                availableNow=True
            ).start().awaitTermination()
            counts = once.last_counts
            assert counts is not None
            assert counts.kept == RECORDS, counts
        self.marks_bytes = size_of(self._work / "marks")
        return RECORDS

    def unfiltered(self) -> float:
        self._fresh()
        writer = self._stream().writeStream.foreachBatch(drain).option("checkpointLocation", str(self._work / "c"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return RECORDS

    def deduplicated(self, drop: Stream) -> float:
        self._fresh()
        writer = drop(self._stream()).writeStream.format("noop").option("checkpointLocation", str(self._work / "c"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        self.state_bytes = size_of(self._work / "c" / "state")
        return RECORDS

    def _stream(self) -> DataFrame:
        return self._spark.readStream.schema(self._schema).parquet(self._log)

    def _fresh(self) -> Path:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        return self._work


def drain(rows: DataFrame, batch_id: int = 0) -> None:  # noqa: ARG001 - foreachBatch's signature
    rows.write.format("noop").mode("overwrite").save()


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def write_log(directory: Path) -> None:
    """One file a log partition, rows in log order; the pairs of a partition take turns."""
    directory.mkdir()
    turns = ROW_GROUP // (RUN * PAIRS_EACH)
    values = pa.array(random_values(ROW_GROUP, VALUE_BYTES), pa.binary())
    for partition in range(PARTITIONS):
        # No dictionaries: real values and keys are not a handful of repeated ones.
        with pq.ParquetWriter(directory / f"orders-{partition}.parquet", schema(), use_dictionary=["topic"]) as writer:
            for group in range(RECORDS // PARTITIONS // ROW_GROUP):
                keys = b"".join(
                    pack_keys(7, partition + PARTITIONS * pair, turn * RUN, RUN)
                    for turn in range(group * turns, (group + 1) * turns)
                    for pair in range(PAIRS_EACH)
                )
                key = pa.FixedSizeBinaryArray.from_buffers(pa.binary(20), ROW_GROUP, [None, pa.py_buffer(keys)])
                offsets = np.arange(group * ROW_GROUP, (group + 1) * ROW_GROUP, dtype=np.int64)
                columns = [
                    key.cast(pa.binary()),
                    values,
                    pa.array(["orders"] * ROW_GROUP),
                    pa.array(np.full(ROW_GROUP, partition, np.int32)),
                    pa.array(offsets),
                    pa.array(offsets * 1000 + 1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
                ]
                writer.write_table(pa.table(columns, schema=schema()))


def schema() -> pa.Schema:
    fields: Any = [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
    return pa.schema(fields)


def session(home: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("pushrep-spark-filter")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", home)
        .config("spark.sql.shuffle.partitions", "2")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark
