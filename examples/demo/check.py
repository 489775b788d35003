"""Does the table hold every flight once? Asked of Spark SQL, against the original file, in a JVM of its own.

    original/flights.csv ─┐
    table (Parquet)      ─┼─▶ one JSON object on standard output: `Findings`
    log (source pushrep) ─┘

No code that wrote the table is used to check it: the file is read by Spark's own CSV reader and the log by plain SQL
over the key's three numbers, without the replay filter. The file may lawfully hold equal rows, so rows are compared as
a bag: per distinct row, how often the file has it and how often the table.

Run as `python -m examples.demo.check --original CSV --table DIR --log DIR --topic NAME --moments FILE`.
"""

import json
import sys
from dataclasses import asdict
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from examples.demo.history import Findings
from spark_jobs.columns import stream_metadata_columns
from spark_jobs.sinks.idempotent_sink import BATCH_COLUMN
from spark_jobs.sources import register_sources

ORIGINAL_COLUMNS: Final = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT, "
    "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, "
    "distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
# The departure as the demo defines it, in SQL: scheduled instant plus delay.
_DAY: Final = "to_date(time_hour + make_dt_interval(0, 0, minute + coalesce(dep_delay, 0), 0))"


def compare_rows(spark: SparkSession, columns: list[str]) -> dict[str, int]:
    """The views `original` and `applied` as bags of rows."""
    every = ", ".join(columns)
    row = spark.sql(f"""
        WITH sides AS (
            SELECT {every}, 1 AS in_file, 0 AS in_table FROM original
            UNION ALL SELECT {every}, 0, 1 FROM applied
        ), bag AS (
            SELECT sum(in_file) AS in_file, sum(in_table) AS in_table FROM sides GROUP BY {every}
        )
        SELECT coalesce(sum(in_file), 0) AS flights,
               coalesce(sum(in_table), 0) AS kept,
               coalesce(sum(greatest(in_file - in_table, 0)), 0) AS missing,
               coalesce(sum(CASE WHEN in_file > 0 THEN greatest(in_table - in_file, 0) END), 0) AS twice,
               coalesce(sum(CASE WHEN in_file = 0 THEN in_table END), 0) AS foreign
        FROM bag
    """).first()  # noqa: S608 - column names from the schema above
    assert row is not None, "an aggregate without groups gives one row"
    return {name: int(count) for name, count in row.asDict().items()}


def compare_carriers(spark: SparkSession) -> list[tuple[str, int | None, int | None]]:
    """Miles per carrier in the file and in the table; None where a side doesn't have the carrier."""
    rows = spark.sql("""
        SELECT carrier, o.miles AS expected, a.miles AS found
        FROM (SELECT carrier, sum(distance) AS miles FROM original GROUP BY carrier) o
        FULL OUTER JOIN (SELECT carrier, sum(distance) AS miles FROM applied GROUP BY carrier) a USING (carrier)
        ORDER BY carrier
    """).collect()
    return [(r["carrier"], r["expected"], r["found"]) for r in rows]


def count_days(spark: SparkSession) -> list[tuple[str, int, int, int]]:
    """(day of departure in UTC, records in the log, of these replayed, rows of the table), ascending by day."""
    rows = spark.sql(f"""
        WITH source_records AS (
            SELECT pid, source_partition, source_offset, to_date(min(timestamp)) AS day, count(*) AS times
            FROM logged GROUP BY pid, source_partition, source_offset
        ), log_days AS (
            SELECT day, sum(times) AS appended, sum(times - 1) AS replayed FROM source_records GROUP BY day
        ), table_days AS (
            SELECT {_DAY} AS day, count(*) AS kept FROM applied GROUP BY 1
        )
        SELECT day, coalesce(appended, 0) AS appended, coalesce(replayed, 0) AS replayed, coalesce(kept, 0) AS kept
        FROM log_days FULL OUTER JOIN table_days USING (day) ORDER BY day
    """).collect()  # noqa: S608 - an expression of this module
    return [(str(r["day"]), int(r["appended"]), int(r["replayed"]), int(r["kept"])) for r in rows]


def count_batches(spark: SparkSession) -> dict[int, int]:
    """Rows of the table by the batch that wrote them."""
    rows = spark.table("with_batches").groupBy(BATCH_COLUMN).count().collect()
    return {int(r[BATCH_COLUMN]): int(r["count"]) for r in rows}


def event_times(logged: DataFrame, moments: list[list[int]], column: str) -> list[int | None]:
    """For each moment (next offset per partition) the event time of the latest record before it, ms since 1970 UTC.

    `column` is what the moments count in: `source_offset` (the producer's) or `offset` (the log's).
    """
    partition = "source_partition" if column == "source_offset" else "partition"
    wanted = sorted({(p, n - 1) for moment in moments for p, n in enumerate(moment) if n > 0})
    is_wanted = [(F.col(partition) == p) & (F.col(column) == n) for p, n in wanted]
    rows = (
        logged.where(reduce(or_, is_wanted))
        .groupBy(partition, column)
        .agg(F.unix_millis(F.min("timestamp")).alias("ms"))
        .collect()
        if wanted
        else []
    )
    found = {(r[partition], r[column]): int(r["ms"]) for r in rows}
    return [
        max((found[p, n - 1] for p, n in enumerate(moment) if (p, n - 1) in found), default=None) for moment in moments
    ]


def name_views(spark: SparkSession, original: Path, table: Path) -> list[str]:
    """Make the views `original`, `applied` (the same columns, returned) and `with_batches` (one more)."""
    rows = (
        spark.read.schema(ORIGINAL_COLUMNS)
        .options(header=True, nullValue="NA", mode="FAILFAST", enforceSchema=False)
        .csv(str(original))
    )
    rows.createOrReplaceTempView("original")
    applied = spark.read.parquet(str(table))
    applied.createOrReplaceTempView("with_batches")
    applied.select(rows.columns).createOrReplaceTempView("applied")
    return rows.columns


def read_log(spark: SparkSession, log: Path, topic: str) -> DataFrame:
    """Make the view `logged`: where each record lies, its source position, and its event time."""
    records = spark.read.format("pushrep").options(path=str(log), topic=topic).load()
    logged = records.select("partition", "offset", "timestamp", *stream_metadata_columns()).cache()
    logged.createOrReplaceTempView("logged")
    return logged


def find(spark: SparkSession, columns: list[str], logged: DataFrame, moments: dict[str, Any]) -> Findings:
    """Compare the three views. `moments` maps a counting column to next offsets per partition."""
    days = count_days(spark)
    return Findings(
        **compare_rows(spark, columns),
        appended=sum(day[1] for day in days),
        replayed=sum(day[2] for day in days),
        carriers=compare_carriers(spark),
        days=days,
        batches=count_batches(spark),
        moments_ms=[ms for column, asked in moments.items() for ms in event_times(logged, asked, column)],
    )


@click.command()
@click.option("--original", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--table", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--log", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--topic", default="flights", show_default=True)
@click.option("--moments", default="{}", help="JSON: counting column to lists of next offsets per partition.")
def main(original: Path, table: Path, log: Path, topic: str, moments: str) -> None:
    """Compare the applied table with the original file, and print what was found as JSON."""
    spark = (
        SparkSession.builder.appName("pushrep demo: check")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", 2)
        .getOrCreate()
    )
    try:
        register_sources(spark)
        columns, logged = name_views(spark, original, table), read_log(spark, log, topic)
        found = find(spark, columns, logged, json.loads(moments))
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
