"""The source as a stream: every record once over restarts, limits kept, and batch 0 the same batch when run again."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pushrep.log import SegmentLog

pytestmark = pytest.mark.spark

Batches = dict[int, list[tuple[int, int, bytes]]]
Run = Callable[..., Batches]


class SinkFailed(Exception):
    """Represents a driver that is killed inside a batch, before its commit."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    path.mkdir()
    return path


@pytest.fixture
def append(directory: Path) -> Callable[..., None]:
    def to_partition(partition: int, count: int, *, per_batch: int = 10, topic: str = "orders") -> None:
        """`count` values that say where they are: b"<partition>:<offset>"."""
        with SegmentLog.open(directory / f"{topic}-{partition}") as log:
            end = log.log_end_offset + count
            while (base := log.log_end_offset) < end:
                log.append([f"{partition}:{n}".encode() for n in range(base, min(base + per_batch, end))])

    return to_partition


@pytest.fixture
def run(spark: SparkSession, directory: Path, checkpoint: str) -> Run:
    """Run a stream to the present end (AvailableNow); returns the rows by batch. fail_in: the batch in which the sink
    fails.
    """
    from spark_jobs import register_sources

    register_sources(spark)

    def to_the_end(*, fail_in: int | None = None, **options: str) -> Batches:
        batches: Batches = {}

        def handle(rows: DataFrame, batch_id: int) -> None:
            batches[batch_id] = sorted((row.partition, row.offset, bytes(row.value)) for row in rows.collect())
            if batch_id == fail_in:
                raise SinkFailed

        given = {"path": str(directory), "topic": "orders"} | options
        frame = spark.readStream.format("pushrep").options(**given).load()
        query = (
            frame.writeStream.foreachBatch(handle)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except PySparkException as error:
            if fail_in is None or "SinkFailed" not in str(error):
                raise
        return batches

    return to_the_end


def records(partition: int, start: int, end: int) -> list[tuple[int, int, bytes]]:
    return [(partition, offset, f"{partition}:{offset}".encode()) for offset in range(start, end)]


def everything(batches: Batches) -> list[tuple[int, int, bytes]]:
    return sorted(row for rows in batches.values() for row in rows)


def test_limits_are_kept_and_a_restart_goes_on_exactly(run, append):
    append(0, 70)
    append(1, 25)
    first = run(maxRecordsPerTrigger="40")
    assert everything(first) == records(0, 0, 70) + records(1, 0, 25)
    assert all(len(rows) <= 40 for rows in first.values())
    assert len(first) == 3
    assert len({partition for partition, *_ in first[0]}) == 2, "partitions move abreast"

    append(0, 13)
    append(1, 7)
    second = run(maxRecordsPerTrigger="40")
    assert list(second) == [3]
    assert everything(second) == records(0, 70, 83) + records(1, 25, 32)

    assert run(maxRecordsPerTrigger="40") == {}, "nothing new is no batch"


@pytest.mark.parametrize(
    ("words", "in_batch_0"),
    [
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": '{"orders": {"0": 12, "1": -1}}'}, records(0, 12, 30)),
    ],
    ids=["latest", "offsets"],
)
def test_batch_0_killed_before_its_commit_is_the_same_batch(run, append, words, in_batch_0):
    append(0, 30)
    append(1, 10)
    assert run(fail_in=0, **words) == {0: in_batch_0}
    append(0, 5)
    append(1, 3)
    again = run(**words)
    assert again[0] == in_batch_0, "whatever was appended since, and whatever the words would mean now"
    assert again[1] == records(0, 30, 35) + records(1, 10, 13)


def test_batch_0_whose_commit_was_lost_is_the_same_batch(run, append, checkpoint):
    append(0, 30)
    first = run(startingOffsets="earliest")
    append(0, 5)
    for entry in Path(checkpoint, "commits").iterdir():
        entry.unlink()
    assert run(startingOffsets="latest") == {0: first[0], 1: records(0, 30, 35)}


def test_a_later_batch_is_run_again_as_it_was(run, append):
    append(0, 30)
    run()
    append(0, 5)
    assert run(fail_in=1) == {1: records(0, 30, 35)}
    append(0, 5)
    append(1, 4)
    assert run() == {1: records(0, 30, 35), 2: records(0, 35, 40) + records(1, 0, 4)}


def test_beside_a_running_writer_nothing_is_missed_and_new_partitions_join(spark, directory, checkpoint):
    from spark_jobs import register_sources

    register_sources(spark)
    total, got, complete = 3000, [], threading.Event()

    def handle(rows: DataFrame, batch_id: int) -> None:
        got.extend((row.partition, row.offset, bytes(row.value)) for row in rows.collect())
        if len(got) >= 2 * total:
            complete.set()

    def write(log: SegmentLog) -> None:
        while (base := log.log_end_offset) < total:
            log.append([f"{log.partition}:{n}".encode() for n in range(base, base + 50)])

    with SegmentLog.open(directory / "orders-0") as first:
        frame = spark.readStream.format("pushrep").options(path=str(directory), topic="orders").load()
        query = frame.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).start()
        writer = threading.Thread(target=write, args=(first,))
        writer.start()
        with SegmentLog.open(directory / "orders-1") as second:
            write(second)
        writer.join()
        assert complete.wait(timeout=120), f"{len(got)} of {2 * total} records, {query.exception()}"
        query.stop()
    assert sorted(got) == records(0, 0, total) + records(1, 0, total)


def test_a_log_made_anew_is_data_loss(run, append, directory):
    append(0, 30)
    run()
    shutil.rmtree(directory / "orders-0")
    append(0, 40)
    with pytest.raises(PySparkException, match=r"orders-0: offsets \[30, 30\) are gone: the log was made anew"):
        run()
    assert everything(run(failOnDataLoss="false")) == records(0, 0, 40)
    assert run(failOnDataLoss="false") == {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets"),
        ({"topic": "absent"}, "'absent'"),
        ({"startingOffsets": '{"orders": {"0": 4}}'}, "beyond the end"),
    ],
)
def test_bad_input_is_refused_by_name(run, append, options, named):
    append(0, 3)
    with pytest.raises(PySparkException, match=named):
        run(**options)


def test_what_spark_logs_is_the_documented_offset(run, append, directory, checkpoint):
    append(0, 12)
    run(maxRecordsPerTrigger="8")
    ends = [json.loads(Path(checkpoint, "offsets", str(n)).read_text().splitlines()[-1]) for n in (0, 1)]
    log_id = str(SegmentLog.open_reader(directory / "orders-0").log_id)
    assert [end["partitions"]["0"] for end in ends] == [
        {"epoch": 0, "offset": 8, "log": log_id},
        {"epoch": 0, "offset": 12, "log": log_id},
    ]
    assert [end["start"] for end in ends] == [{"0": 0}, {}]
