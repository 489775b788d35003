"""apply-checkpoint and real queries of Spark: the restarted one reads from the named offset, and what is refused."""

import itertools
import json
import os
import shutil
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from filtering import StreamMetadata
from pushrep.log import SegmentLog
from pushrep.startpoints import Startpoint, StartpointStore
from spark_jobs import LocalMarks, ReplayFilteredBatches, register_sources
from spark_jobs.checkpoint_append import NOTES_NAME, MarksPlace
from spark_jobs.checkpoint_apply import CheckpointPlace, apply
from spark_jobs.checkpoint_files import LastBatchUncommitted, QueryRunning, QueryStateful
from spark_jobs.file_marks import FileMarks
from spark_jobs.spark_internals import setting
from spark_jobs.sql import SqlTable
from tests.postgresql import new_database
from tests.unit.test_checkpoint_apply import stop_after

pytestmark = pytest.mark.spark

CONSUMER, COUNT = "billing", 20


@pytest.fixture
def store(tmp_path):
    return StartpointStore.open(tmp_path / "store")


@pytest.fixture
def send(tmp_path, checkpoint, store):
    """Write a startpoint and apply it to the checkpoint, without the half minute of watching."""

    def to(topic, partition, startpoint, *, sleep=lambda _s: None, **place):
        store.write(CONSUMER, topic, partition, startpoint, "again")
        where = CheckpointPlace(checkpoint=tmp_path / "checkpoint", consumer=CONSUMER, **place)
        return apply(where, store, sleep=sleep)

    return to


def run(frame, checkpoint, handler=None):
    """Let a query read all there is; returns the content of each batch, as `handler` or the columns give it."""
    batches = []

    def collect(rows, _batch_id):
        batches.append(sorted(tuple(row) for row in rows.collect()))

    writer = frame.writeStream.foreachBatch(handler or collect).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_source_goes_on_at_the_named_file(spark, tmp_path, checkpoint, send, version):
    place = tmp_path / "in"
    place.mkdir()
    lines = lambda *numbers: [(f"line {n}",) for n in numbers]  # noqa: E731
    with setting(spark, "spark.sql.streaming.offsetLog.formatVersion", version):
        for n in range(3):
            (place / f"{n}.txt").write_text(f"line {n}\n")
            frame = spark.readStream.format("text").load(str(place))
            assert run(frame, checkpoint) == lines(n)
        logged = (tmp_path / "checkpoint" / "offsets" / "2").read_text()
        assert logged.startswith(f"v{version}\n"), "Spark wrote the version that was asked for"
        send("files-0", 0, Startpoint.specific(1))
        assert run(frame, checkpoint) == lines(1, 2), "files 1 and 2 again, and not 0"
        assert run(frame, checkpoint) == [], "once"
        (place / "3.txt").write_text("line 3\n")
        send("files-0", 0, Startpoint.earliest())
        assert run(frame, checkpoint) == lines(0, 1, 2, 3)


def test_a_query_of_files_that_is_started_on_half_a_pair_reads_each_line_once(spark, tmp_path, monkeypatch, torture):
    """Killed between the two pairs of files, or within one: the query refuses or continues; the next call finishes or
    records it.
    """
    place = tmp_path / "in"
    place.mkdir()
    frame = spark.readStream.format("text").load(str(place))
    for n in range(3):
        (place / f"{n}.txt").write_text(f"line {n}\n")
        run(frame, str(tmp_path / "before"))
    for written in range(5) if torture.is_long else (2, 3):
        checkpoint = tmp_path / f"checkpoint-{written}"
        shutil.copytree(tmp_path / "before", checkpoint)
        store = StartpointStore.open(tmp_path / f"store-{written}")
        store.write(CONSUMER, "files-0", 0, Startpoint.specific(1), "again")
        where = CheckpointPlace(checkpoint=checkpoint, consumer=CONSUMER)
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            stop_after(written, patched)
            apply(where, store, sleep=lambda _s: None)
        read = []
        try:
            read += run(frame, str(checkpoint))
        except StreamingQueryException:
            assert 0 < written < 4, "nothing is written yet, or all"
        if store.read(CONSUMER, "files-0", 0) is not None:
            apply(where, store, sleep=lambda _s: None)
        read += run(frame, str(checkpoint))
        assert read == [("line 1",), ("line 2",)], written
        assert store.read(CONSUMER, "files-0", 0) is None


@pytest.fixture
def logs(tmp_path):
    for partition in range(2):
        append(tmp_path / "logs", partition, COUNT)
    return tmp_path / "logs"


def append(logs, partition, count):
    with SegmentLog.open(logs / f"orders-{partition}") as log:
        first = log.log_end_offset
        keys = [StreamMetadata(7, partition, n).pack() for n in range(first, first + count)]
        log.append([b"x"] * count, keys=keys, timestamps_ms=range(first, first + count))


def orders(spark, logs):
    register_sources(spark)
    return spark.readStream.format("pushrep").options(path=str(logs), topic="orders").load()


def rows(partition, start, end=COUNT):
    return [(partition, offset) for offset in range(start, end)]


def test_logs_go_on_at_the_named_time_and_the_backup_restores(spark, logs, tmp_path, checkpoint, send):
    frame = orders(spark, logs).select("partition", "offset")
    assert run(frame, checkpoint) == rows(0, 0) + rows(1, 0)
    pair = send("orders", 1, Startpoint.timestamp(15), logs=logs)
    assert run(frame, checkpoint) == rows(1, 15)
    shutil.rmtree(checkpoint)
    backup = pair.backup_of(tmp_path / "checkpoint")
    (backup / NOTES_NAME).unlink()
    backup.rename(checkpoint)
    append(logs, 0, 2)
    assert run(frame, checkpoint) == rows(0, COUNT, COUNT + 2), "as if nothing had happened"


@pytest.fixture(params=["local", pytest.param("files", marks=pytest.mark.long), "postgresql"])
def kept_in(request, spark, tmp_path):
    """The place of a query's marks, as apply-checkpoint names it; and a context that opens the store for the query."""
    place = str(tmp_path / "marks")
    if request.param == "local":
        return MarksPlace(place), lambda: LocalMarks(place)
    if request.param == "files":
        return MarksPlace(f"file://{place}"), lambda: closing(FileMarks(f"file://{place}", spark))
    url = new_database(request.getfixturevalue("postgresql"), f"c{abs(hash(str(tmp_path)))}")
    return MarksPlace(url, "orders"), lambda: closing(SqlTable(url, "orders"))


def test_rule_9_marks_outside_begin_anew_in_the_same_run(spark, logs, checkpoint, send, kept_in):
    named, opened = kept_in
    kept = []

    def filtered():
        kept.clear()
        with opened() as marks:

            def handle(batch, batch_id):
                rows = batch.select("topic", "partition", "offset")
                if isinstance(marks, SqlTable):
                    marks(rows, batch_id)
                kept.extend(sorted((row.partition, row.offset) for row in rows.collect()))

            run(orders(spark, logs), checkpoint, ReplayFilteredBatches(handle, marks))
        return kept

    assert filtered() == rows(0, 0) + rows(1, 0)
    pair = send("orders", None, Startpoint.specific(12), logs=logs, marks=named)
    assert named.table is None or named.table in pair.marks
    assert filtered() == [], "seen before: the marks went on"
    send("orders", 1, Startpoint.specific(14, reset_marks=True), logs=logs, marks=named)
    assert filtered() == rows(1, 14)
    append(logs, 0, 1)
    assert filtered() == rows(0, COUNT, COUNT + 1), "and on from there"


def test_state_a_batch_on_its_way_and_a_running_query_are_refused(spark, logs, tmp_path, checkpoint, send):
    frame = orders(spark, logs).select("partition", "offset")

    def fail(_rows, _batch_id):
        raise RuntimeError("killed here")

    with pytest.raises(Exception, match="killed here"):
        run(frame, checkpoint, fail)
    with pytest.raises(LastBatchUncommitted, match="batch 0 is planned"):
        send("orders", 0, Startpoint.specific(3), logs=logs)
    query = frame.writeStream.foreachBatch(lambda *_: None).option("checkpointLocation", checkpoint).start()
    try:
        query.processAllAvailable()

        def meanwhile(_seconds):
            append(logs, 0, 1)
            query.processAllAvailable()

        with pytest.raises(QueryRunning, match="stop it"):
            send("orders", 0, Startpoint.specific(3), logs=logs, sleep=meanwhile)
    finally:
        query.stop()
    counted = frame.groupBy("partition").count().writeStream.outputMode("complete").format("memory")
    shutil.rmtree(checkpoint)
    writer = counted.queryName("counted").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    writer.start().awaitTermination()
    with pytest.raises(QueryStateful):
        send("orders", 0, Startpoint.specific(3), logs=logs)


@pytest.mark.skipif("PUSHREP_OTHER_SPARK" not in os.environ, reason="name a Python with another release of pyspark")
def test_another_release_of_spark_goes_on_at_the_named_file(tmp_path, send):
    """PUSHREP_OTHER_SPARK=<its python>; seen with 3.5.9, whose files tests/unit/test_checkpoint_apply.py keeps."""

    def read():
        program = Path(__file__).with_name("file_stream_program.py")
        host = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": os.environ["PUSHREP_OTHER_SPARK"]}
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | host
        command = [os.environ["PUSHREP_OTHER_SPARK"], str(program), str(tmp_path)]
        subprocess.run(command, check=True, env=own, capture_output=True, timeout=200)
        return json.loads((tmp_path / "read.json").read_text())

    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / "in" / f"{n}.txt").write_text(f"{n}\n")
        assert read() == [str(n)]
    send("files-0", 0, Startpoint.specific(1))
    assert read() == ["1", "2"]
    assert read() == []
