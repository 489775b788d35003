"""A source that gives other rows the second time it is read: refused before marks say that its rows were seen."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from filtering.stream_metadata import StreamMetadata
from spark_jobs import FileMarks, ReplayFilteredBatches
from spark_jobs.decide import PartitionRows, check_unchanged
from spark_jobs.errors import FrameChanged
from spark_jobs.spark_internals import RowsRead

pytestmark = pytest.mark.spark

ROWS_EACH = 20


@pytest.fixture
def log(logs, tmp_path):
    """Two files, of a log partition each."""
    (tmp_path / "log").mkdir()
    files = {}
    for partition in range(2):
        rows = [
            logs.Row("t", partition, n, StreamMetadata(7, partition, n), None, f"{partition}:{n}")
            for n in range(ROWS_EACH)
        ]
        key, value, topic, partitions, offset, _ = zip(*(row.cells() for row in rows), strict=True)
        columns = {
            "key": pa.array(key, pa.binary()),
            "value": value,
            "topic": topic,
            "partition": pa.array(partitions, pa.int32()),
            "offset": offset,
        }
        path = tmp_path / "log" / f"{partition}.parquet"
        pq.write_table(pa.table(columns), path)
        files[path] = {row.id for row in rows}
    return files


@pytest.fixture
def run(spark, tmp_path):
    def once_over(handler, where="offset >= 0"):
        schema = "key binary, value string, topic string, partition int, offset bigint"
        stream = spark.readStream.schema(schema).option("ignoreMissingFiles", "true").parquet(str(tmp_path / "log"))
        writer = stream.where(where).writeStream.foreachBatch(handler)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    return once_over


@pytest.mark.parametrize("rule", [{}, {"window": 2}], ids=["whole runs decide", "rows decide"])
def test_a_file_that_goes_between_the_passes_fails_the_batch_before_its_marks(log, logs, run, tmp_path, rule):
    """Otherwise its rows, which were never written, would count as seen, and be dropped as replays when they are read
    again.
    """
    (gone, _), (_, kept) = log.items()
    table = {}

    def handler(rows, n):
        gone.unlink(missing_ok=True)
        table[n] = logs.ids(rows)

    marks = FileMarks(tmp_path / "marks")
    once = ReplayFilteredBatches(handler, marks, **rule)
    with pytest.raises(StreamingQueryException, match=r"FrameChanged: partition 0, .* 20 rows .* 0 when"):
        run(once)
    assert (marks.owner(), once.last_counts) == (None, None), "nothing says that the batch was seen"

    run(once)  # what is there now is another matter, and agrees with itself
    assert table[0] == kept
    (stored,) = marks.read(marks.owner(), 0).marks.values()
    assert (stored.get(7, 0), stored.get(7, 1).offset) == (None, ROWS_EACH - 1)


@pytest.mark.parametrize("where", ["offset >= 0", "offset % 2 = 0"])
def test_a_handler_that_takes_a_part_is_no_change(log, logs, run, tmp_path, where):
    read = []

    def handler(rows, _):
        frames = RowsRead(rows)
        before = frames.count()
        assert len(rows.limit(3).collect()) == 3
        read.append(frames.count() - before)

    marks = FileMarks(tmp_path / "marks")
    once = ReplayFilteredBatches(handler, marks)
    run(once, where)
    assert marks.batches(marks.owner()) == [0]
    rows = sum(map(len, log.values()))
    assert once.last_counts.kept == (rows if where == "offset >= 0" else rows // 2)
    assert 0 < read[0] < once.last_counts.rows, "Spark counts what is read, and a part shows"


def test_of_other_frames_nobody_knows_how_often_they_were_read(frames, logs, inside_query):
    frame = frames.split(logs.random_topic(1), 1)
    assert RowsRead(frame).count() is None
    inside_query("no number at all")
    assert RowsRead(frame).count() is None
    assert RowsRead(frame.persist()).count() is None
    frame.unpersist()


def found(partition=0, start=0, end=9, rows=9, unkeyed=0):
    from filtering import HighwaterMarks

    return PartitionRows("t", partition, start, end, rows, unkeyed, HighwaterMarks())


@pytest.mark.parametrize(
    ("again", "told"),
    [
        pytest.param([found(0), found(1, rows=8)], (1, 9, 8), id="rows are missing"),
        pytest.param([found(0)], (1, 9, 0), id="a partition is missing"),
        pytest.param([found(0), found(1), found(2)], (2, 0, 9), id="a partition came"),
        pytest.param([found(0), found(1, start=1, end=10)], (1, 9, 9), id="as many, but others"),
        pytest.param([found(0, unkeyed=1), found(1)], (0, 9, 9), id="other keys"),
    ],
)
def test_what_has_changed_is_told(again, told):
    first = [found(0), found(1)]
    check_unchanged(first, [found(1), found(0)])
    with pytest.raises(FrameChanged) as refused:
        check_unchanged(first, again)
    assert (refused.value.partition, refused.value.expected, refused.value.got) == told
