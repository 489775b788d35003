"""Files are read by columns, by the first pass and by the handler, and give what reading whole rows gives."""

import os
import re
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.stream_metadata import StreamMetadata
from spark_jobs import FileMarks, ReplayFilteredBatches, columns, spark_internals
from spark_jobs import frame as frame_room
from spark_jobs.columns import FilterRule
from spark_jobs.frame import by_rows, by_runs, keyed_frame
from spark_jobs.spark_internals import column_pruned

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("generated_code")]

NAMES = ("key", "value", "topic", "partition", "offset")


def write_file(path, rows, at):
    """One file of a log, rows in log order; Spark takes files by their age."""
    columns = zip(*(row.cells()[:5] for row in rows), strict=True)
    kinds = (pa.binary(), pa.string(), pa.string(), pa.int32(), pa.int64())
    arrays = [pa.array(cells, kind) for cells, kind in zip(columns, kinds, strict=True)]
    pq.write_table(pa.table(arrays, names=NAMES), path)
    os.utime(path, (at, at))


@pytest.fixture
def stream_of(spark, tmp_path):
    """Batches of rows as a stream of files, a file a batch."""

    def begin(batches, **options):
        directory = tmp_path / "log"
        directory.mkdir()
        for n, rows in enumerate(batches):
            in_order = sorted(rows, key=lambda r: (r.topic, r.partition, r.offset))
            write_file(directory / f"{n}.parquet", in_order, 1_700_000_000 + n)
        schema = "key binary, value string, topic string, partition int, offset bigint"
        return spark.readStream.schema(schema).options(maxFilesPerTrigger=1, **options).parquet(str(directory))

    return begin


def run(stream, handler, checkpoint):
    writer = stream.writeStream.foreachBatch(handler).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query.recentProgress


def read_columns(frame):
    """The columns that reading this frame's offsets takes out of the files; all of them where rows come whole."""
    plan = frame.select("offset")._jdf.queryExecution().executedPlan().toString()
    return "ReadSchema: struct<offset:bigint>" in plan


def reads_files(frame):
    """Whether the frame reads its rows from the files, not from rows that Spark has already built."""
    return "FileScan parquet" in frame._jdf.queryExecution().executedPlan().toString()


def test_a_stream_of_files_gives_what_the_rule_says_and_counts_its_input_once(logs, stream_of, tmp_path, monkeypatch):
    """The exact definition, over batches that runs decide and batches that only rows do; some cut by stretches."""
    topics = [row for seed in range(200, 206) for row in logs.random_topic(seed)]
    steady = [
        logs.Row("steady", 0, n, StreamMetadata(1, 0, n), None, f"s{n}") for n in range(40)
    ]  # runs decide it alone: the batch of nothing else
    batches = [[*steady[:20]], *logs.in_batches(topics, 2, seed=5), [*steady[20:], *again(steady[10:20], logs)]]
    seen, passes, by_column = {}, [], {}
    for name in ("by_runs", "by_rows"):
        monkeypatch.setattr(frame_room, name, spied(getattr(frame_room, name), passes))

    def handle(rows, n):
        seen[n], by_column[n] = logs.ids(rows), reads_files(rows)

    marks = FileMarks(tmp_path / "marks")
    once = ReplayFilteredBatches(handle, marks)
    progress = run(stream_of(batches), once, tmp_path / "c")
    assert len(marks.read(marks.owner(), 3).marks) == len({row.topic for row in [*topics, *steady]})

    assert set.union(*seen.values()) == logs.Model().kept([row for batch in batches for row in batch])
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())), "no row passes in two batches"
    runs, rows = ("by_runs", "narrow"), ("by_rows", "narrow")
    assert passes == [runs, runs, rows, rows, runs], "rows are looked at where runs cross, and in the batch behind it"
    assert set(by_column.values()) == {True}, "the handler gets rows from the files, too"
    assert {p["batchId"]: p["numInputRows"] for p in progress} == {n: len(rows) for n, rows in enumerate(batches)}


def again(rows, logs):
    """These records once more, behind the log's end."""
    return [logs.Row(r.topic, r.partition, r.offset + 1000, r.metadata, None, f"{r.id} again") for r in rows]


def spied(scan, passes):
    def scanned(keyed, *rest):
        passes.append((scan.__name__, "narrow" if read_columns(keyed) else "whole"))
        return scan(keyed, *rest)

    return scanned


def test_only_the_batch_as_it_was_handed_over_is_read_narrowly(logs, stream_of, tmp_path):
    rows = logs.random_topic(3)
    found = {}

    def look(df, _):
        found["as it is"] = read_columns(column_pruned(df))
        found["rows"] = logs.ids(column_pruned(df)), logs.ids(df)
        kept = df.persist()
        found["kept in memory"] = column_pruned(kept) is kept
        kept.unpersist()
        other = df.where("offset > 2")
        found["other"] = column_pruned(other) is other

    run(stream_of([rows]).where("offset % 3 < 2").withColumn("more", F.col("offset") + 1), look, tmp_path / "c")
    assert found["as it is"], "filters and projections before foreachBatch are read through"
    assert found["rows"][0] == found["rows"][1] == {row.id for row in rows if row.offset % 3 < 2}
    assert found["kept in memory"], "a frame is kept because it can't be read twice"
    assert found["other"], "another frame than the batch's is left alone"


def shuffle_tasks(frame):
    """Into how many tasks a shuffle of this frame is planned."""
    plan = frame.groupBy("offset").count()._jdf.queryExecution().executedPlan().toString()
    return int(re.search(r"hashpartitioning\(offset#\d+L?, (\d+)\)", plan)[1])


@pytest.mark.parametrize("batches", [1, 2])
def test_faults_f8_a_query_changes_no_setting_of_any_session(
    spark, logs, stream_of, tmp_path, monkeypatch, watch, batches
):
    """The first pass alone has as many shuffle tasks as cores: it is planned in a session that nobody else has."""
    looked, tasks = frame_room.by_runs, []

    def look(keyed, rule):
        with watch.over(keyed.sparkSession, spark):
            tasks.append(shuffle_tasks(keyed))
            return looked(keyed, rule)

    def handle(rows, _):
        watch.look(rows.sparkSession)
        tasks.append(shuffle_tasks(rows))

    monkeypatch.setattr(frame_room, "by_runs", look)
    once = ReplayFilteredBatches(handle, FileMarks(str(tmp_path / "marks")))
    rows = logs.rewound(15, back=5)
    run(stream_of([rows[:6], rows[6:]][-batches:]), once, tmp_path / "c")
    assert tasks == [2, 7] * batches
    watch.check()


@pytest.mark.parametrize(
    ("before", "options"),
    [(lambda stream: stream.where("offset >= 0"), {}), (lambda stream: stream, {"ignoreMissingFiles": "true"})],
    ids=["a filter before, whose input nobody has counted", "files that may be missing"],
)
def test_where_only_the_batch_itself_tells_what_was_read_the_handler_gets_it(
    logs, stream_of, tmp_path, before, options
):
    rows, by_column = logs.rewound(15, back=5), []
    marks = FileMarks(tmp_path / "marks")
    once = ReplayFilteredBatches(lambda found, _: by_column.append((reads_files(found), found.count())), marks)
    progress = run(before(stream_of([rows], **options)), once, tmp_path / "c")
    assert by_column == [(False, 10)]
    assert [p["numInputRows"] for p in progress] == [15]


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (lambda stream: stream.withColumn("drawn", F.rand()).where("drawn < 2"), {}),
        (lambda stream: stream.dropDuplicates(["key"]), {}),
        (lambda stream: stream, {"ignoreCorruptFiles": "true"}),
    ],
    ids=["draws lots", "remembers", "takes broken files"],
)
def test_a_stream_whose_columns_are_not_sure_to_tell_the_same_rows_is_left_alone(
    logs, stream_of, tmp_path, what, options
):
    left = []

    def look(df, _):
        left.append(column_pruned(df) is df)
        df.write.format("noop").mode("overwrite").save()  # Spark wants every part of a state committed

    run(what(stream_of([logs.random_topic(3)], **options)), look, tmp_path / "c")
    assert left == [True]


def test_files_of_lines_are_read_whole(spark, tmp_path):
    """Whether a line is malformed may depend on the columns that are read."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "0.csv").write_text("a,1\nb,2\n")
    lines, left = spark.readStream.schema("value string, offset bigint").csv(str(tmp_path / "log")), []
    run(lines, lambda df, _: left.append(column_pruned(df) is df), tmp_path / "c")
    assert left == [True]


def test_outside_of_a_query_and_with_other_names_inside_of_spark_the_frame_stays(frames, logs, inside_query):
    frame = frames.split(logs.random_topic(1), 1)
    assert column_pruned(frame) is frame
    inside_query("no number at all")
    assert column_pruned(frame) is frame


def test_without_spark_s_inner_objects_a_stream_gives_the_same_rows(spark, logs, stream_of, tmp_path, monkeypatch):
    """Spark does not guarantee their names: without them batches follow the rule, by runs and row by row."""
    batches, seen, by_column = [logs.rewound(20, back=5), logs.random_topic(7)], {}, []
    monkeypatch.setattr(spark_internals, "asked", lambda _: None)
    monkeypatch.setattr(columns, "_made", WeakKeyDictionary())

    def handle(rows, n):
        seen[n] = logs.ids(rows)
        by_column.append(reads_files(rows))

    marks = FileMarks(tmp_path / "marks")
    once = ReplayFilteredBatches(handle, marks)
    run(stream_of(batches), once, tmp_path / "c")
    assert seen == {n: logs.Model().kept(rows) for n, rows in enumerate(batches)}
    assert by_column == [False, False], "each comes from the frame as it was handed over"
    assert columns.made_once(spark, columns.key_numbers, lambda: None) is columns.by_digits
    assert once.last_counts.rows == len(batches[1])


def test_a_key_is_one_number_by_either_way(spark, frames, logs, monkeypatch):
    """The fast path exists in this version of Spark; both paths, and the rows, give the same result in the first
    pass.
    """
    assert spark_internals.by_prefix(spark) is not None
    topics = [row for seed in range(20) for row in logs.random_topic(seed)]
    edges = [StreamMetadata(pid, 2**31 - 1, offset) for pid in (-(2**63), -1, 2**63 - 1) for offset in (0, 2**63 - 1)]
    topics += [logs.Row("edges", 0, n, metadata, None, f"e{n}") for n, metadata in enumerate(edges)]
    keyed = keyed_frame(frames.split(topics, 3), FilterRule())
    for rule in (FilterRule(), FilterRule(only_pids=frozenset([5, -(2**63)]))):
        monkeypatch.setattr(columns, "_made", WeakKeyDictionary())
        fast = by_runs(keyed, rule)
        monkeypatch.setattr(columns, "_made", WeakKeyDictionary())
        assert columns.made_once(spark, columns.key_numbers, lambda: columns.by_digits) is columns.by_digits
        assert by_runs(keyed, rule) == fast
        assert sorted(by_rows(keyed, {}, rule), key=lambda one: (one.topic, one.partition)) == fast
        assert (sum(one.rows for one in fast), any(len(one.marks) for one in fast)) == (len(topics), True)


def test_without_the_inner_function_the_digits_are_taken(spark, monkeypatch):
    monkeypatch.setattr(columns, "_made", WeakKeyDictionary())
    monkeypatch.setattr(spark_internals, "_prefix_of", lambda _: lambda eight: F.lit(7))
    assert columns.key_numbers(spark) is columns.by_digits, "it gives other numbers than it should"


def test_the_first_pass_makes_few_calls_into_the_jvm(spark, frames, logs, monkeypatch):
    """Each is a message to another process, and a batch waits for all of them, however few rows it has."""
    keyed = keyed_frame(frames.split(logs.random_topic(1), 2), FilterRule())
    by_runs(keyed, FilterRule())  # what is asked once a session was asked
    sent, client = [], spark.sparkContext._gateway._gateway_client
    send = client.send_command

    def counted(command, *rest, **named):
        if not command.startswith("m\n"):  # Python's garbage collector lets an object go
            sent.append(command)
        return send(command, *rest, **named)

    monkeypatch.setattr(client, "send_command", counted)
    assert by_runs(keyed, FilterRule())
    assert 45 < len(sent) < 66, f"{len(sent)} calls"
