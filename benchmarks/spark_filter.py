"""The replay filter in Spark's foreachBatch beside no filter and Spark's own two ways to drop duplicates (G16).

    Parquet (4 log partitions, 16 pairs, 4 M keys, 100-byte values) ─▶ one trigger of a stream ─▶ noop sink, or Parquet

Every side is a stream with a fresh checkpoint, so that each pays for its start, its offsets and its commit; those of
dropDuplicates keep 4 M keys in RocksDB, ours keeps 16 marks in a file. In the first comparison no row is a replay:
every side hands on all rows, which is what a healthy stream does; the second has Spark's own ways beside it. In the
third every pair goes back in the middle of its log, so that a tenth of the rows is dropped. The last writes what a job
writes, a table of files, where the others' sink throws rows away. State is the peers' and our own on disk after the run
(G17). Beside no filter what a row passes through is compiled before a side counts. Spark's planner is not: it runs once
a batch, and the JVM compiles it over hundreds of them. So --long compares after many streams over a small log. What a
batch of 10 rows costs: spark_small_batches.py.
The processor time is that of this process and the JVM, user and system, with all of their threads.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Side, compare, random_values, spread
from filtering.stream_metadata import KEY_BYTES, pack_keys
from spark_jobs import FileMarks, ReplayFilteredBatches

RECORDS = 4_000_000
PARTITIONS, PAIRS_EACH = 4, 4
VALUE_BYTES = 100
ROW_GROUP = 100_000
RUN = 250  # records of one pair in a row, as a producer's batches come
WARM_UPS = 6
"""So many streams of each side, until the JVM has compiled what a row passes through."""
PLANNED, PLANNED_RECORDS = 300, 400_000
"""So many streams of each side, over so many records, until the JVM has compiled most of Spark's planner."""

GOALS = {"no filter": 0.8}
PEER_GOALS = {"dropDuplicates": 4.0, "dropDuplicatesWithinWatermark": 4.0}
TABLE_GOALS = {"no filter": 0.95}

REPLAYED_PART = 10  # one in so many

Stream = Callable[[DataFrame], DataFrame]
Sink = Callable[[DataFrame, int], None]


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-filter-") as home:
        write_log(Path(home, "new"))
        write_log(Path(home, "replayed"), replayed=True)
        spark = session(home)
        new, replayed = Bench(spark, Path(home), "new"), Bench(spark, Path(home), "replayed")
        files = Bench(spark, Path(home), "new", sink=new.write_files)
        try:
            results = {
                **beside_no_filter("every row is new", new, rounds),
                "every row is new, beside Spark's own": compare(
                    {
                        "ReplayFilteredBatches": new.filtered,
                        "dropDuplicates": lambda: new.deduplicated(lambda f: f.dropDuplicates(["key"])),
                        "dropDuplicatesWithinWatermark": lambda: new.deduplicated(
                            lambda f: f.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["key"])
                        ),
                    },
                    rounds=rounds,
                    goals=PEER_GOALS,
                ),
                "a tenth are replays": compare(
                    {"ReplayFilteredBatches": replayed.filtered, "no filter": replayed.unfiltered},
                    rounds=rounds,
                    warm_ups=WARM_UPS,
                ),
                "every row is new, to a Parquet table": compare(
                    {"ReplayFilteredBatches": files.filtered, "no filter": files.unfiltered},
                    rounds=rounds,
                    goals=TABLE_GOALS,
                ),
            }
        finally:
            spark.stop()
    ours, theirs = new.marks_bytes, new.state_bytes
    note = (
        f"state on disk: {ours:,} bytes in the directory of the marks; {theirs:,} of dropDuplicates: "
        f"{theirs // ours:,}x"
    )
    results["every row is new, beside Spark's own"]["notes"] = [note]
    return results


def run_long(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-spark-filter-") as home:
        write_log(Path(home, "new"))
        write_log(Path(home, "small"), records=PLANNED_RECORDS)
        spark = session(home)
        new, small = Bench(spark, Path(home), "new"), Bench(spark, Path(home), "small", records=PLANNED_RECORDS)
        try:
            for _ in range(PLANNED):
                small.filtered()
                small.unfiltered()
            files = Bench(spark, Path(home), "new", sink=new.write_files)
            return beside_no_filter("every row is new, the planner compiled", new, rounds) | {
                "every row is new, to a Parquet table, the planner compiled": compare(
                    {"ReplayFilteredBatches": files.filtered, "no filter": files.unfiltered},
                    rounds=rounds,
                    goals=TABLE_GOALS,
                    warm_ups=WARM_UPS,
                )
            }
        finally:
            spark.stop()


def beside_no_filter(title: str, bench: "Bench", rounds: int) -> dict[str, Any]:
    """The filter and no filter in turn, by the wall clock and by processor time of the same streams."""
    spent: dict[str, list[float]] = {"ReplayFilteredBatches": [], "no filter": []}

    def metered(name: str, side: Side) -> Side:
        def once() -> float:
            before = processor_s()
            records = side()
            spent[name].append(processor_s() - before)
            assert isinstance(records, int | float)
            return records

        return once

    sides = {"ReplayFilteredBatches": bench.filtered, "no filter": bench.unfiltered}
    by_clock = compare(
        {name: metered(name, side) for name, side in sides.items()}, rounds=rounds, goals=GOALS, warm_ups=WARM_UPS
    )
    ours, theirs = ([RECORDS / seconds for seconds in spent[name][-rounds:]] for name in sides)
    ratios = spread([mine / other for mine, other in zip(ours, theirs, strict=True)])
    by_processor = by_clock | {
        "unit": "records/s of processor time",
        "rates": {name: spread(rates) for name, rates in zip(sides, (ours, theirs), strict=True)},
        "ratios": {"no filter": ratios | {"goal": GOALS["no filter"]}},
    }
    return {title: by_clock, f"{title}, by processor time": by_processor}


def processor_s() -> float:
    """User and system time of this process, of those that it started, and of theirs that have ended."""
    own, total_s = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # ended since it was listed: its parent's figure has it
            total_s += sum(process.cpu_times()[:4])  # user, system, and both of ended children
    return total_s


def drain(rows: DataFrame, batch_id: int = 0) -> None:  # noqa: ARG001 - foreachBatch's signature
    rows.write.format("noop").mode("overwrite").save()


class Bench:
    """Sides over one log; `batches`: a file each, else all files in one."""

    def __init__(
        self,
        spark: SparkSession,
        home: Path,
        log: str,
        sink: Sink = drain,
        *,
        batches: bool = False,
        records: int = RECORDS,
    ) -> None:
        self._spark, self._log, self._work, self._sink = spark, str(home / log), home / "work", sink
        self._options = {"maxFilesPerTrigger": 1} if batches else {}
        self._schema = spark.read.parquet(self._log).schema
        self._records, self._kept = records, records - (records // REPLAYED_PART if log == "replayed" else 0)
        self.marks_bytes = self.state_bytes = 0

    def filtered(self) -> float:
        marks = FileMarks(self._fresh() / "marks")
        once = ReplayFilteredBatches(self._sink, marks)
        self._stream().writeStream.foreachBatch(once).option("checkpointLocation", str(self._work / "c")).trigger(
            availableNow=True
        ).start().awaitTermination()
        counts = once.last_counts
        assert counts is not None
        assert self._options or counts.kept == self._kept, counts
        self.marks_bytes = size_of(self._work / "marks")
        return self._records

    def unfiltered(self, sink: Sink | None = None) -> float:
        self._fresh()
        writer = (
            self._stream()
            .writeStream.foreachBatch(sink or self._sink)
            .option("checkpointLocation", str(self._work / "c"))
        )
        writer.trigger(availableNow=True).start().awaitTermination()
        return self._records

    def deduplicated(self, drop: Stream) -> float:
        self._fresh()
        writer = drop(self._stream()).writeStream.format("noop").option("checkpointLocation", str(self._work / "c"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        self.state_bytes = size_of(self._work / "c" / "state")
        return self._records

    def write_files(self, rows: DataFrame, batch_id: int) -> None:
        rows.write.parquet(str(self._work / "table" / f"batch_id={batch_id}"), mode="overwrite")

    def _stream(self) -> DataFrame:
        return self._spark.readStream.schema(self._schema).options(**self._options).parquet(self._log)

    def _fresh(self) -> Path:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        return self._work


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def write_log(directory: Path, *, replayed: bool = False, records: int = RECORDS) -> None:
    """One file a log partition, rows in log order; the pairs of a partition take turns.

    `replayed`: in the middle every pair goes back by a tenth of its records.
    """
    directory.mkdir()
    turns = records // PARTITIONS // (RUN * PAIRS_EACH)
    back = turns // REPLAYED_PART if replayed else 0
    values = pa.array(random_values(ROW_GROUP, VALUE_BYTES), pa.binary())
    for partition in range(PARTITIONS):
        keys = b"".join(
            pack_keys(7, partition + PARTITIONS * pair, (turn if turn < turns // 2 else turn - back) * RUN, RUN)
            for turn in range(turns)
            for pair in range(PAIRS_EACH)
        )
        # No dictionaries: real values and keys are not a handful of repeated ones.
        with pq.ParquetWriter(directory / f"orders-{partition}.parquet", schema(), use_dictionary=["topic"]) as writer:
            for first in range(0, records // PARTITIONS, ROW_GROUP):
                own = pa.py_buffer(keys[first * KEY_BYTES : (first + ROW_GROUP) * KEY_BYTES])
                offsets = np.arange(first, first + ROW_GROUP, dtype=np.int64)
                columns = [
                    pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), ROW_GROUP, [None, own]).cast(
                        pa.binary()
                    ),
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


def session(home: str, **settings: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = (
        builder.master("local[2]")
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
