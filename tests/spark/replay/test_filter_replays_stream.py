"""The operator form in a stream: state in the checkpoint, restarts, refusals. Each file is a batch."""

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException

from filtering import BadFilterSetting, HighwaterMarks, StreamMetadata
from filtering.stream_metadata import OFFSET_MAX
from spark_jobs import FileMarks, filter_frame, filter_replays, spark_internals
from spark_jobs.batch_marks import BatchMarks, MarksKey
from spark_jobs.errors import SparkUnfit
from spark_jobs.marks_command import marks as marks_command
from spark_jobs.operator_counts import operator_counts, operator_gaps
from tests.unit.gated_disk import until

pytestmark = pytest.mark.spark

ARROW = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
SCHEMA = (
    "key binary, value string, topic string, partition int, offset bigint, "
    "headers array<struct<key: string, value: binary>>"
)


class Query:
    """Writes rows as the file of one trigger, and runs the query from its checkpoint over all files."""

    def __init__(self, spark, place):
        self.spark, self.source, self.checkpoint = spark, place / "in", place / "checkpoint"
        self.source.mkdir(parents=True)
        self.handed = {}
        self.fails_at = self.progress = None
        self.reads_otherwise = None
        self.files = 0

    def add(self, rows, carrier="key"):
        cells = [dict(zip(ARROW.names, row.cells(carrier), strict=True)) for row in rows]
        for cell in cells:
            cell["headers"] = cell["headers"] and [{"key": k, "value": v} for k, v in cell["headers"]]
        path = self.source / f"{self.files:05}.parquet"
        pq.write_table(pa.Table.from_pylist(cells, schema=ARROW), path)
        # Spark reads files in the order of their times, and the kernel gives files of one tick the same time.
        os.utime(path, (1_700_000_000 + self.files,) * 2)
        self.files += 1

    def run(self, carrier="key", **rule):
        """The rows of each batch, by batch."""
        stream = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.source))
        writer = filter_replays(stream, carrier=carrier, **rule).select("value").writeStream.foreachBatch(self)
        running = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        try:
            running.awaitTermination()
        finally:
            self.progress = running.lastProgress
        return self.handed

    def __call__(self, rows, batch_id):
        if self.reads_otherwise is not None:
            self.reads_otherwise(rows)
            return
        found = [row["value"] for row in rows.collect()]
        assert len(found) == len(set(found)), "a row came out twice"
        self.handed[batch_id] = set(found)
        if batch_id == self.fails_at:
            raise RuntimeError("the handler died before the batch was done")

    def one(self, rows, carrier="key", frames=None, **rule):
        """The ids that came out of these rows. frames: the carrier that the rows have."""
        self.add(rows, frames or carrier)
        before = set(self.handed)
        self.run(carrier, **rule)
        # Where marks may expire Spark runs batches without rows, too.
        return {value for batch_id in self.handed.keys() - before for value in self.handed[batch_id]}


@pytest.fixture
def query(spark, tmp_path):
    return Query(spark, tmp_path)


@pytest.mark.parametrize(("carrier", "window"), [pytest.param("key", 0, marks=pytest.mark.long), ("header", 6)])
def test_restarts_go_on_with_the_marks_in_the_checkpoint(query, frames, logs, torture, carrier, window):
    """Marks live in Spark's checkpoint; the form in foreachBatch keeps the same rows; order of rows does not count."""
    first = torture.random(carrier).randrange(10**6) if torture.is_long else 200
    rows = [row for seed in range(first, first + 12) for row in logs.random_topic(seed)]
    model, marks = logs.Model(window), {}
    for n, batch in enumerate(logs.in_batches(rows, torture.count(3, 40), seed=first)):
        other_form = filter_frame(frames.split(batch, 3, carrier), marks, carrier=carrier, window=window)
        expected, marks = logs.ids(other_form.rows), other_form.marks
        random.Random(n).shuffle(batch)  # the operator itself brings a pair's rows into log order
        assert query.one(batch, carrier, window=window) == expected == model.kept(batch), f"batch {n} from {first}"


def test_a_batch_that_died_is_run_again_and_one_rolled_back_too_with_the_same_rows(query, logs):
    """Same marks + same rows → same rows and same new marks: the state is as of the batch before."""
    rows = logs.random_topic(7, rows=150)
    model, batches = logs.Model(), logs.in_batches(rows, 3, seed=9)
    expected = {n: model.kept(batch) for n, batch in enumerate(batches)}
    for batch in batches:
        query.add(batch)
    query.fails_at = 1
    with pytest.raises(Exception, match="died before the batch was done"):
        query.run()
    assert query.handed == {0: expected[0], 1: expected[1]}
    query.handed, query.fails_at = {}, None
    assert query.run() == {1: expected[1], 2: expected[2]}
    for file in (query.checkpoint / "commits").glob("*2*"):
        file.unlink()
    query.handed = {}
    assert query.run() == {2: expected[2]}


def test_counts_gaps_and_silent_pairs_are_in_the_progress(query, logs):
    """Metrics observed before and after the operator; a pair of which every row was dropped is named."""
    row = lambda offset, *metadata: logs.Row(  # noqa: E731
        "t", 0, offset, StreamMetadata(*metadata), None, f"{offset}:" + "x" * 100_000
    )
    rows = [row(n, 5, 0, n) for n in range(30)] + [row(30, 5, 0, 33), row(31, 5, 0, 9), row(32, 6, 1, 4)]
    chance = (b"by chance 20 letters", StreamMetadata(1, 0, 2**53).pack())
    others = [logs.Row("t", 0, 33 + n, None, key, key.hex()) for n, key in enumerate((b"business", *chance))]
    assert query.one([*rows, *others]) == {r.id for r in [*rows, *others] if r.offset != 31}
    counts = operator_counts(query.progress)
    assert (counts.rows, counts.unkeyed, counts.pairs, counts.kept, counts.dropped) == (36, 1, 4, 34, 1)
    assert (counts.late, counts.jumped, counts.all_dropped, counts.unlikely_pairs) == (0, 3, (), 2)
    assert operator_gaps(query.progress) == {("t", 5, 0): 3}
    jumps = [row(38 + 2 * n + k, 7, n, k * OFFSET_MAX) for n in range(2) for k in range(2)]
    assert query.one([row(36, 6, 1, 4), row(37, 5, 0, 34), *jumps]) == {r.id for r in (row(37, 5, 0, 34), *jumps)}
    counts = operator_counts(query.progress)
    assert (counts.kept, counts.dropped, counts.all_dropped) == (5, 1, (("t", 6, 1),))
    assert counts.jumped == OFFSET_MAX, "two pairs jumped over more offsets than a bigint counts"


def test_a_pair_in_two_partitions_stops_the_batch(query, logs):
    query.one([logs.Row("t", 0, 0, StreamMetadata(5, 1, 0), None, "a")])
    with pytest.raises(Exception, match="pid 5, source partition 1 was in destination partition 0"):
        query.one([logs.Row("t", 1, 0, StreamMetadata(5, 1, 1), None, "b")])


@pytest.fixture
def compact_state(spark):
    """Compact the files of a state; else RocksDB chooses when replaced entries are removed."""
    name = "spark.sql.streaming.stateStore.rocksdb.compactOnCommit"
    spark.conf.set(name, "true")
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("compact_state")
def test_state_is_below_1_kib_a_pair_and_constant_in_records(query, logs):
    """G17: state by pair; rows without metadata leave none."""
    rows = [logs.Row("t", 0, n, StreamMetadata(5, n % 50, n // 50), None, str(n)) for n in range(2000)]
    rows[7] = logs.Row("t", 0, 7, None, b"business", "7")
    sizes = []
    for batch in (rows[:200], rows[200:]):
        query.one(batch)
        (operator,) = query.progress["stateOperators"]
        assert operator["numRowsTotal"] == 50 + 1, "and the topic's carrier"
        sizes.append(operator["customMetrics"]["rocksdbSstFileSize"])
    assert 0 < max(sizes) < 50 * 1024
    assert max(sizes) < 1.2 * min(sizes)


def of_pair(logs, count, first=0):
    return [logs.Row("t", 0, n, StreamMetadata(7, 0, n), None, f"{n}") for n in range(first, first + count)]


def test_faults_s7_a_filter_that_finds_no_metadata_says_so_once(query, logs, caplog):
    """Once for a run of the query; and the advice works, since what found nothing left no marks."""
    for row in of_pair(logs, 3):
        query.add([row], "header")
    keyed = logs.Row("u", 0, 0, StreamMetadata(7, 0, 0), None, "u")
    query.add([keyed])
    with caplog.at_level("WARNING", logger="spark_jobs"):
        assert query.run() == {0: {"0"}, 1: {"1"}, 2: {"2"}, 3: {"u"}}
        until(lambda: caplog.messages, "Spark told of the progress")
    [line] = caplog.messages
    assert line.startswith("topic t: no record of a batch has stream metadata as carrier='key'")
    query.add(of_pair(logs, 3, 3), "header")
    assert query.run("header")[4] == {"3", "4", "5"}


def test_faults_s7_the_first_hundred_records_with_metadata_in_the_header_stop_the_query(query, logs):
    with pytest.raises(Exception, match="carrier is 'header' for topic t: its first 100 records"):
        query.one(of_pair(logs, 100), frames="header")
    assert not query.handed


def test_faults_s7_another_carrier_at_a_restart_stops_the_query(query, logs):
    query.add(of_pair(logs, 5))
    query.add(of_pair(logs, 200, 5), "header")
    assert [len(rows) for rows in query.run().values()] == [5, 200], "later no number of strangers stops it"
    with pytest.raises(Exception, match="carrier is 'key' in this query's state of topic t"):
        query.one(of_pair(logs, 2, 205), carrier="header")
    assert query.one([]) == {"205", "206"}, "by the old one it goes on"


def test_marks_can_be_inherited(query, logs):
    rows = [logs.Row("t", 0, n, StreamMetadata(5, p, 7 + n), None, f"{p}-{n}") for n in range(4) for p in range(2)]
    marks = {MarksKey("t"): HighwaterMarks.from_columns([5, 5, 6], [0, 3, 0], [8, 1, 1], [0, 0, 0])}
    assert query.one(rows[:4], marks=marks) == {"1-0", "1-1"}
    assert query.one(rows[4:], marks=marks) == {row.id for row in rows[4:]}


def test_an_export_of_the_other_form_s_marks_is_where_a_stream_begins(query, frames, logs, tmp_path):
    """`pushrep marks export` → `filter_replays(marks=)`: a query changes from foreachBatch to the operator."""
    model = logs.Model(3)
    first, second = logs.in_batches(logs.random_topic(12, rows=120), 2, seed=3)
    result = filter_frame(frames.split(first, 2), window=3)
    assert logs.ids(result.rows) == model.kept(first)
    store = FileMarks(tmp_path / "marks")
    store.write(BatchMarks("the-query", 4, marks=result.marks), keep=2)
    file = tmp_path / "orders.marks"
    done = CliRunner().invoke(marks_command, ["export", str(tmp_path / "marks"), str(file)])
    assert done.exit_code == 0, done.output
    inherited = BatchMarks.from_bytes(file.read_bytes()).marks
    assert query.one(second, window=3, marks=inherited) == model.kept(second)


@pytest.mark.parametrize(
    ("read", "window"),
    [
        pytest.param(lambda _: None, 0, id="returns early"),
        pytest.param(lambda _: None, 6, id="returns early, with a window", marks=pytest.mark.long),
        pytest.param(lambda rows: rows.limit(1).collect(), 0, id="takes limit(1)"),
        pytest.param(lambda rows: rows.first(), 0, id="takes the first", marks=pytest.mark.long),
    ],
)
def test_a_batch_that_was_not_read_whole_ends_the_query_and_its_marks_before_go_on(
    query, logs, tmp_path, caplog, read, window
):
    """`marks import --from-checkpoint`: as of the last whole batch, for either form, also with a window."""
    model = logs.Model(window)
    topics = [row for seed in range(12, 17) for row in logs.random_topic(seed, rows=60)]  # some pairs in each task
    whole, lost, rest = logs.in_batches(topics, 3, seed=3)
    assert query.one(whole, window=window) == model.kept(whole)
    query.reads_otherwise = read
    with pytest.raises(StreamingQueryException):
        query.one(lost, window=window)
    query.reads_otherwise = None
    with pytest.raises(StreamingQueryException):
        query.one(rest, window=window)
    until(lambda: "marks import STORE --from-checkpoint" in caplog.text, "the log names the way on")
    store = FileMarks(tmp_path / "marks")
    done = CliRunner().invoke(
        marks_command, ["import", str(tmp_path / "marks"), "--from-checkpoint", str(query.checkpoint)]
    )
    assert done.exit_code == 0, done.output
    assert "the state of batch 1 is not whole: the marks are those as of batch 0" in caplog.text
    held = store.read(store.owner(), 0)
    assert (held.carrier, held.first) == ("key", 1)
    again = Query(query.spark, tmp_path / "again")
    rows = whole + lost + rest
    assert again.one(rows, window=window, marks=held.marks) == model.kept(rows)


def test_a_directory_that_is_no_checkpoint_has_no_marks(query, tmp_path):
    (tmp_path / "none").mkdir()
    asked = ["import", str(tmp_path / "marks"), "--from-checkpoint", str(tmp_path / "none")]
    done = CliRunner().invoke(marks_command, asked)
    assert (done.exit_code, "no checkpoint of a query" in done.output) == (1, True), done.output


def state_rows(query):
    """The pairs that the checkpoint keeps marks of."""
    frame = query.spark.read.format("statestore").option("stateVarName", "marks").load(str(query.checkpoint))
    return {(row["key"]["topic"], row["key"]["pid"]) for row in frame.where("key.source_partition >= 0").collect()}


def test_marks_expire_at_the_end_of_a_batch_by_its_own_time(query, logs):
    """Contract: "by last advance, judged only at commit"; and "a field of the state against the batch timestamp"."""

    def row(offset, ident, pid=5):
        return logs.Row("t", pid, offset, StreamMetadata(pid, 1, 7), None, ident)

    kept = {"ttl_s": 3600, "retention_ms": 3_600_000}
    assert query.one([row(0, "a")], **kept) == {"a"}
    assert query.one([row(1, "b")], **kept) == set()
    forced = {"ttl_s": 0.001, "retention_ms": 0}
    assert query.one([row(2, "c")], **forced) == set(), "this batch still goes by the mark"
    assert query.one([row(3, "d")], **forced) == {"d"}


def test_a_pair_that_nobody_hears_of_again_is_dropped_from_the_state(query, logs):
    """Otherwise a ttl would not bound the state, which would grow by every pair that ever existed."""

    def row(pid, ident):
        return logs.Row("t", pid, 0, StreamMetadata(pid, 1, 7), None, ident)

    long = {"ttl_s": 3600, "retention_ms": 0}
    short = {"ttl_s": 0.001, "retention_ms": 0}
    marks = {MarksKey("t"): HighwaterMarks.from_columns([8], [1], [3], [0], advanced_ms=[1])}
    assert query.one([row(5, "a"), row(6, "b")], marks=marks, **short) == {"a", "b"}
    assert query.one([row(7, "c")], **short) == {"c"}
    assert ("t", 5) not in state_rows(query)
    assert ("t", 8) not in state_rows(query), "what it inherited expires as well"
    assert query.one([row(9, "d")], **long) == {"d"}
    assert ("t", 9) in state_rows(query)


@pytest.mark.parametrize("retention_ms", [None, -1, 3_600_001])
def test_a_ttl_shorter_than_the_topic_s_retention_is_refused_unless_forced(frames, retention_ms):
    with pytest.raises(BadFilterSetting, match="with retention_ms=0 any ttl_s is accepted"):
        filter_replays(frames.split([], 1), ttl_s=3600, retention_ms=retention_ms)


def test_another_state_store_is_refused_by_name(spark, tmp_path):
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path))
    name = "spark.sql.streaming.stateStore.providerClass"
    rocks = spark.conf.get(name)
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider")
    try:
        with pytest.raises(SparkUnfit, match=r"RocksDBStateStoreProvider; set it before"):
            filter_replays(stream)
    finally:
        spark.conf.set(name, rocks)


def test_workers_beside_the_driver_find_a_package_that_came_as_an_archive(spark, tmp_path, monkeypatch):
    """The worker that names the operator's state; as a program: tests/kafka/test_spark_submit_zip.py."""
    (archive := tmp_path / "pushrep.zip").write_bytes(b"")
    monkeypatch.setattr(spark_internals, "__file__", str(archive / "spark_jobs" / "spark_internals.py"))
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", "own")
    for _ in range(2):
        spark_internals.use_driver_python(spark)
    assert spark.sparkContext.environment["PYTHONPATH"] == os.pathsep.join([str(archive), "own"])
