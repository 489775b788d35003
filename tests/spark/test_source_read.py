"""The source as a batch read: the rows are the log's records, ranges and splits are exact, refusals have names."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pushrep import Outbox
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec, Record

pytestmark = pytest.mark.spark

Read = Callable[..., DataFrame]


def row_of(topic: str, partition: int, record: Record) -> tuple:
    headers = [tuple(header) for header in record.headers] or None
    return (
        record.key,
        record.value,
        topic,
        partition,
        record.offset,
        record.timestamp_ms,
        int(record.timestamp_type),
        headers,
    )


def seen(row: Row) -> tuple:
    headers = None if row.headers is None else [tuple(header) for header in row.headers]
    return (row.key, row.value, row.topic, row.partition, row.offset, row.ms, row.timestampType, headers)


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    """orders: 0 has 900 records in 9 batches of several codecs, 1 has odd ones, 2 is empty. other: a record."""
    directory = tmp_path_factory.mktemp("logs")
    with SegmentLog.open(directory / "orders-0", config=LogConfig(segment_bytes=16 << 10)) as log:
        for n in range(9):
            values = [f"value-{n}-{i}".encode() * (1 + i % 3) for i in range(100)]
            log.append(values, timestamps_ms=[1000 * n + i for i in range(100)])
    with SegmentLog.open(directory / "orders-1", config=LogConfig(codec=Codec.ZSTD)) as log:
        log.append(
            [None, b"", b"x" * 5000, b"plain"],
            keys=[b"k", None, b"", None],
            headers=[[("a", b"1"), ("a", None)], [], [("stream-metadata", b"s")], []],
            timestamps_ms=[1, 2**40, 0, 4],
        )
    SegmentLog.open(directory / "orders-2").close()
    with SegmentLog.open(directory / "other-0") as log:
        log.append(b"elsewhere")
    return directory


@pytest.fixture
def read(spark: SparkSession, logs: Path) -> Read:
    from spark_jobs import register_sources

    register_sources(spark)

    def load(**options: str) -> DataFrame:
        given = {"path": str(logs), "topic": "orders"} | options
        return spark.read.format("pushrep").options(**given).load()

    return load


def test_the_rows_are_the_records_of_every_partition(read, logs):
    frame = read(includeHeaders="true")
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    rows = frame.withColumn("ms", F.unix_millis("timestamp")).collect()
    expected = []
    for partition in range(3):
        with SegmentLog.open_reader(logs / f"orders-{partition}") as reader:
            expected += [row_of("orders", partition, record) for record in reader.records(0)]
    assert len(expected) == 904
    assert sorted(map(seen, rows), key=lambda row: row[3:5]) == expected


def test_a_range_is_split_at_record_batches_and_stays_in_order(read):
    frame = read(
        partitions="0",
        startingOffsets=json.dumps({"orders": {"0": 150}}),
        endingOffsets=json.dumps({"orders": {"0": 850}}),
        splitBytes="5k",
    )
    tasks: dict[int, list[int]] = {}
    for row in frame.select("offset", F.spark_partition_id().alias("task")).collect():
        tasks.setdefault(row.task, []).append(row.offset)
    assert len(tasks) > 2, "the range is larger than a split"
    pieces = sorted(tasks.values())
    assert all(piece == list(range(piece[0], piece[-1] + 1)) for piece in pieces), "contiguous, in offset order"
    assert [piece[0] for piece in pieces[1:]] == [piece[-1] + 1 for piece, _ in pairwise(pieces)]
    assert (pieces[0][0], pieces[-1][-1]) == (150, 849)
    assert all(piece[0] % 100 == 0 for piece in pieces[1:]), "no record batch is read by two tasks"


def test_a_starting_timestamp_begins_at_the_first_record_of_that_time(read):
    rows = read(startingTimestamp="5050").groupBy("partition").agg(F.min("offset"), F.count("*")).collect()
    assert sorted(map(tuple, rows)) == [(0, 550, 350), (1, 1, 3)]


def test_an_empty_partition_gives_no_rows(read):
    assert read(partitions="2").collect() == []


def test_a_writer_beside_it_is_neither_waited_for_nor_read_ahead_of(read, tmp_path):
    config = LogConfig(flush_ms=3_600_000, flush_bytes=1 << 40)
    with SegmentLog.open(tmp_path / "orders-0", config=config) as log:
        log.append([b"on disk"] * 3, durability=Durability.FLUSHED)
    # Opened again: a second after an acknowledgement the flusher syncs, with the buffered records behind it.
    with SegmentLog.open(tmp_path / "orders-0", config=config) as log:
        log.append([b"only in memory"] * 4, durability=Durability.BUFFERED)
        assert (log.stable_offset, log.log_end_offset) == (3, 7)
        frame = read(path=str(tmp_path))
        assert [row.offset for row in frame.collect()] == [0, 1, 2]
        log.flush()
        assert frame.count() == 3, "a frame keeps the ends of its first action"
        assert read(path=str(tmp_path)).count() == 7


def test_a_refusal_reaches_the_caller_with_its_words(read):
    with pytest.raises(PySparkException, match=r"option startingOffsets: offset 901 of partition 0 is beyond the end"):
        read(partitions="0", startingOffsets='{"orders": {"0": 901}}').collect()
    with pytest.raises(PySparkException, match="option subscribe='orders': there is no such option"):
        read(subscribe="orders")


def test_a_schema_of_ones_own_is_refused(spark, logs, read):
    reader = spark.read.format("pushrep").schema("key string").options(path=str(logs), topic="orders")
    with pytest.raises(PySparkException, match=r"leave \.schema"):
        reader.load().collect()


def test_the_filter_keeps_worker_slots_apart(read, tmp_path):
    """Each slot has the same source partitions and offsets, under another PID."""
    from spark_jobs import filter_replays

    for slot in range(2):
        with Outbox.open(tmp_path / f"slot-{slot}", "orders", 1, "web-shop") as outbox:
            outbox.append_many(0, [b"%d" % slot] * 20).result(60)
    rows = read(path=str(tmp_path))
    again = rows.withColumn("offset", F.col("offset") + 20)  # as a producer that went back writes them
    once = filter_replays(rows.unionAll(again)).select("value", "partition").collect()
    assert Counter(bytes(row.value) for row in once) == {b"0": 20, b"1": 20}
    assert len({row.partition for row in once}) == 2
