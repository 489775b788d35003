"""Reading a log through the Spark source "pushrep", beside Parquet with the same rows; the goal is 0.5 M records/s.

local[2], two partitions, 20-byte keys, 100-byte values from a random pool; the sink is `noop`, so that the read is all
there is. Both sides run warm, from the page cache. Parquet holds the same seven columns, in Spark's default encoding.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import compare, random_values
from filtering.stream_metadata import pack_keys
from pushrep.log import Durability, SegmentLog
from spark_jobs import register_sources

RECORDS = 4_000_000
PARTITIONS = 2
VALUE_BYTES = 100
PER_APPEND = 4_000
GOAL_PER_S = 500_000


def run(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pushrep-source-read-") as home:
        directory = Path(home, "logs")
        write_logs(directory)
        spark = session(home)
        try:
            register_sources(spark)

            def source() -> DataFrame:
                return spark.read.format("pushrep").options(path=str(directory), topic="orders").load()

            parquet = str(Path(home, "parquet"))
            source().write.parquet(parquet)
            result = compare(
                {"source pushrep": lambda: drain(source()), "Parquet": lambda: drain(spark.read.parquet(parquet))},
                rounds=rounds,
            )
        finally:
            spark.stop()
    rate = result["rates"]["source pushrep"]["median"]
    verdict = "met" if rate >= GOAL_PER_S else "missed"
    result["notes"] = [f"goal {GOAL_PER_S:,} records/s through the source: {verdict} ({rate:,.0f})"]
    return result


def write_logs(directory: Path) -> None:
    for partition in range(PARTITIONS):
        values = random_values(PER_APPEND, VALUE_BYTES, seed=partition)
        with SegmentLog.open(directory / f"orders-{partition}") as log:
            for first in range(0, RECORDS // PARTITIONS, PER_APPEND):
                keys = pack_keys(7, partition, first, PER_APPEND)
                log.append(values, keys=keys, durability=Durability.BUFFERED)


def session(home: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("pushrep-source-read")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", home)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def drain(frame: DataFrame) -> float:
    """Read every row and column, keep none."""
    frame.write.format("noop").mode("overwrite").save()
    return RECORDS
