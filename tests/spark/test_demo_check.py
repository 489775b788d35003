"""The demo's judge: it must find every kind of wrong in a table, and nothing in a right one."""

import datetime as dt

import pytest
from pyspark.sql.functions import lit

from examples.demo.check import compare_carriers, compare_rows, count_batches, count_days, event_times, name_views
from examples.demo.flights import COLUMNS, encode, parse_row, schema_json
from spark_jobs.sinks.idempotent_sink import BATCH_COLUMN
from spark_jobs.values import ValueDecoder

pytestmark = pytest.mark.spark

LINES = [
    "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z",
    "2013,1,1,533,529,4,850,830,20,UA,1714,N24211,LGA,IAH,227,1416,5,29,2013-01-01T10:00:00Z",
    "2013,1,1,NA,1935,NA,NA,2240,NA,AA,791,NA,LGA,DFW,NA,1389,19,35,2013-01-02T00:00:00Z",
    "2013,1,2,42,2359,43,518,442,36,B6,707,N580JB,JFK,SJU,189,1598,23,59,2013-01-03T04:00:00Z",
]
FOREIGN = LINES[0].replace("1545", "9999")


@pytest.fixture
def views(spark, tmp_path):
    """Make the views from lines of the file and lines of the table; the table goes through Avro."""

    def make(file_lines, table_lines):
        original = tmp_path / "flights.csv"
        original.write_text("\n".join([",".join(COLUMNS), *file_lines]) + "\n")
        values = [(encode(parse_row(line.split(","))),) for line in table_lines]
        decode = ValueDecoder("avro", schema_json(), keep=())
        rows = decode(spark.createDataFrame(values, "value BINARY")).withColumn(BATCH_COLUMN, lit(7))
        rows.write.mode("overwrite").parquet(str(tmp_path / "table"))
        return name_views(spark, original, tmp_path / "table")

    return make


def test_a_table_that_went_through_avro_equals_the_file(spark, views):
    columns = views(LINES, LINES)
    assert tuple(columns) == COLUMNS
    assert compare_rows(spark, columns) == {"flights": 4, "kept": 4, "missing": 0, "twice": 0, "foreign": 0}
    assert compare_carriers(spark) == [("AA", 1389, 1389), ("B6", 1598, 1598), ("UA", 2816, 2816)]
    assert count_batches(spark) == {7: 4}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (LINES[1:], {"kept": 3, "missing": 1, "twice": 0, "foreign": 0}),
        ([*LINES, LINES[2], LINES[2]], {"kept": 6, "missing": 0, "twice": 2, "foreign": 0}),
        ([*LINES, FOREIGN, FOREIGN], {"kept": 6, "missing": 0, "twice": 0, "foreign": 2}),
        ([*LINES[1:], LINES[1]], {"kept": 4, "missing": 1, "twice": 1, "foreign": 0}),
    ],
    ids=["missing", "twice", "foreign", "one for another"],
)
def test_what_is_wrong_is_counted(spark, views, table, expected):
    assert compare_rows(spark, views(LINES, table)) == {"flights": 4} | expected


def test_equal_rows_of_the_file_are_expected_as_often(spark, views):
    twice = [*LINES, LINES[0]]
    assert compare_rows(spark, views(twice, twice))["twice"] == 0
    assert compare_rows(spark, views(twice, LINES))["missing"] == 1


def test_miles_of_a_carrier_that_one_side_lacks(spark, views):
    views(LINES, LINES[:2])
    assert compare_carriers(spark) == [("AA", 1389, None), ("B6", 1598, None), ("UA", 2816, 2816)]


def test_days_count_the_log_by_first_sight_and_the_table_by_departure(spark, views):
    views(LINES, LINES)
    at = [dt.datetime(2013, 1, day, tzinfo=dt.UTC) for day in (1, 1, 1, 2)]
    rows = [(0, 0, at[0], 7, 0, 0), (0, 1, at[0], 7, 0, 0), (2, 0, at[1], 7, 2, 0), (1, 0, at[3], 7, 1, 0)]
    logged = spark.createDataFrame(
        rows, "partition INT, offset LONG, timestamp TIMESTAMP, pid LONG, source_partition INT, source_offset LONG"
    )
    logged.createOrReplaceTempView("logged")
    assert count_days(spark) == [("2013-01-01", 3, 1, 2), ("2013-01-02", 1, 0, 1), ("2013-01-03", 0, 0, 1)]
    first, second = (int(moment.timestamp() * 1000) for moment in (at[0], at[3]))
    assert event_times(logged, [[1, 0, 1], [1, 1, 1], [0, 0, 0]], "source_offset") == [first, second, None]
    assert event_times(logged, [[2, 0, 0]], "offset") == [first]
    assert event_times(logged, [], "offset") == []
