"""Batch frames against the rule by brute force: many random topics in one frame, so that few Spark jobs decide."""

import importlib
import pkgutil
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql.functions import udf
from pyspark.sql.types import StructType

import spark_jobs
from filtering import BadFilterSetting, HighwaterMarks, PairSplit, StreamMetadata
from spark_jobs import FileMarks, ReplayFilteredBatches, filter_frame, filter_replays
from spark_jobs import frame as frame_room
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import FrameChanged, FrameUnusable
from tests.spark.replay.conftest import with_setting

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("generated_code")]

SCHEMA = "key binary, value string, topic string, partition int, offset bigint"
RULES = {
    "plain": {},
    "window": {"window": 7},
    "only-pids": {"only_pids": [5, -7]},
    "window-only-pids": {"window": 3, "only_pids": [2**62]},
}
SHORT = {("plain", "key"), ("window", "header"), ("only-pids", "key"), ("window-only-pids", "header")}
CELLS = [
    pytest.param(rule, carrier, id=f"{name}-{carrier}", marks=[] if (name, carrier) in SHORT else [pytest.mark.long])
    for name, rule in RULES.items()
    for carrier in ("key", "header")
]


@pytest.fixture
def topics(logs):
    return [row for seed in range(40) for row in logs.random_topic(seed)]


@pytest.mark.parametrize(("rule", "carrier"), CELLS)
def test_splits_and_shuffles_change_nothing(frames, logs, topics, rule, carrier):
    only = rule.get("only_pids")
    model = logs.Model(rule.get("window", 0), None if only is None else frozenset(only))
    expected = model.kept(topics)
    split = filter_frame(frames.split(topics, 7, carrier), carrier=carrier, now_ms=1, **rule)
    assert logs.ids(split.rows) == expected
    assert logs.ids(split.dropped) == {row.id for row in topics} - expected

    counts = split.counts()
    assert (counts.rows, counts.dropped) == (len(topics), len(topics) - len(expected))
    assert counts.kept + counts.unkeyed == len(expected)

    shuffled = filter_frame(frames.split(topics, 3, carrier).repartition(4), carrier=carrier, now_ms=1, **rule)
    assert logs.ids(shuffled.rows) == expected
    assert shuffled.marks == split.marks, "the same rows leave the same marks"


@pytest.mark.parametrize(("rule", "carrier"), CELLS)
def test_operator_form_on_a_batch_frame(frames, logs, topics, rule, carrier):
    only = rule.get("only_pids")
    model = logs.Model(rule.get("window", 0), None if only is None else frozenset(only))
    kept = filter_replays(frames.unordered(topics, carrier), carrier=carrier, **rule)
    assert logs.ids(kept) == model.kept(topics)


def test_counts_of_late_rows_and_gaps_as_the_plain_filter_counts_them(frames, logs):
    from filtering import ReplayFilter

    rows = logs.random_topic(4, rows=400)
    filters = {}
    for row in sorted(rows, key=lambda r: (r.partition, r.offset)):
        filters.setdefault(row.partition, ReplayFilter(window=3)).admit(
            row.metadata.pack() if row.metadata else row.other_key, row.partition
        )
    counts = [f.counts for f in filters.values()]
    ours = filter_frame(frames.split(rows, 4), window=3).counts()
    for name in ("kept", "dropped", "unkeyed", "late", "pairs", "jumped"):
        assert getattr(ours, name) == sum(getattr(c, name) for c in counts), name


def test_marks_carry_from_frame_to_frame(frames, logs, topics):
    model, marks = logs.Model(window=5), {}
    for batch in logs.in_batches(topics, 3, seed=1):
        result = filter_frame(frames.split(batch, 3), marks, window=5)
        assert logs.ids(result.rows) == model.kept(batch)
        by_operator = filter_replays(frames.split(batch, 3), window=5, marks=marks)
        assert logs.ids(by_operator) == logs.ids(result.rows)
        marks = result.marks


def test_rows_that_are_part_of_the_plan_are_filtered_as_any_others(spark, logs):
    """A user's first test: Spark's optimizer computes such rows itself, without tasks."""
    import pyarrow as pa

    rows = [logs.Row("t", 0, n, StreamMetadata(1, 0, s), None, f"v{n}") for n, s in enumerate((5, 7, 6, 8, 2, 9))]
    names = ("key", "value", "topic", "partition", "offset")
    columns = [pa.array(column) for column in zip(*(row.cells()[:5] for row in rows), strict=True)]
    arrow = spark.createDataFrame(pa.table(dict(zip(names, columns, strict=True))))
    cells = ", ".join(f"(X'{r.metadata.pack().hex()}', '{r.id}', 't', 0, {r.offset}L)" for r in rows)
    kept = logs.Model().kept(rows)
    for frame in (
        arrow,
        spark.sql(f"select * from values {cells} as t({', '.join(names)})"),
        arrow.withColumn("made", udf(lambda value: value * 2)("value")),  # which the first pass does without
    ):
        result = filter_frame(frame)
        assert logs.ids(result.rows) == kept
        assert logs.ids(result.dropped) == {row.id for row in rows} - kept


@pytest.mark.parametrize("rule", [{}, {"window": 3}], ids=["by runs", "by rows"])
def test_faults_f8_no_setting_of_the_user_s_session_changes(spark, frames, logs, watch, rule):
    """From four threads at once, which once left another number of shuffle partitions behind."""
    rows = logs.rewound(15, back=5)
    frame = frames.split(rows, 2)
    with watch.over(spark), ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: filter_frame(frame, **rule), range(4)):
            assert logs.ids(result.rows) == logs.Model(rule.get("window", 0)).kept(rows)
            assert len(logs.ids(result.dropped)) == 5
    watch.check()


def test_reserved_words_are_none_of_the_filter_s(spark, frames, logs, monkeypatch):
    """With runs such a session ran for days, and then failed near 'end' at the first batch whose rows had to decide."""
    rows = logs.out_of_order()
    frame = frames.split(rows, 2)
    with with_setting(spark, "spark.sql.ansi.enforceReservedKeywords", "true"):
        for form in (filter_frame(frame).rows, filter_frame(frame, window=3).rows, filter_replays(frame)):
            assert logs.ids(form)
        schemas = {
            f"{module.name}.{name}": text
            for module in pkgutil.iter_modules(spark_jobs.__path__, "spark_jobs.")
            for name, text in vars(importlib.import_module(module.name)).items()
            if isinstance(text, str) and re.search(r"^\S+ (string|bigint|int|binary)\b", text)
        }
        assert len(schemas) > 4, sorted(schemas)
        for text in schemas.values():
            StructType.fromDDL(text)


@pytest.mark.parametrize("decide", ["by runs", "by rows"])
def test_files_that_spark_packs_out_of_log_order_are_decided_in_it(spark, logs, tmp_path, monkeypatch, decide):
    """Tasks take files by size, the largest first: a log's later file may come before an earlier one."""
    if decide == "by rows":
        monkeypatch.setattr(frame_room, "RUNS_MAX", 10)
    # Every second one is a replay of its neighbour: more stretches than are told one by one.
    rows = [logs.Row("t", 0, n, StreamMetadata(1, 0, n // 2), None, f"v{n}") for n in range(300)]
    for n, part in enumerate((rows[:40], rows[40:])):
        spark.createDataFrame([row.cells()[:5] for row in part], SCHEMA).coalesce(1).write.parquet(f"{tmp_path}/{n}")
    frame = spark.read.parquet(f"{tmp_path}/0", f"{tmp_path}/1")
    with with_setting(spark, "spark.sql.files.minPartitionNum", 1):
        assert frame.first().offset == 40, "the larger file comes first"
        result = filter_frame(frame)
        assert result.verdict.by_runs == (decide == "by runs")
        assert logs.ids(result.rows) == logs.Model().kept(rows)


@pytest.mark.parametrize("runs_max", [frame_room.RUNS_MAX, 1], ids=["by runs", "by rows"])
def test_unordered_rows_are_decided_by_the_log_s_order(frames, logs, monkeypatch, runs_max):
    monkeypatch.setattr(frame_room, "RUNS_MAX", runs_max)
    rows = [*logs.random_topic(3, rows=200), *logs.out_of_order()]
    found_out = filter_frame(frames.unordered(rows))
    assert logs.ids(found_out.rows) == logs.Model().kept(rows)
    assert logs.ids(found_out.dropped) == {row.id for row in rows} - logs.Model().kept(rows)


@pytest.mark.parametrize("most", [64, 0], ids=["a comparison each", "bitmaps"])
def test_what_drops_is_told_by_either_way_also_where_topics_need_quotes(frames, logs, monkeypatch, most):
    monkeypatch.setattr(frame_room, "STRETCHES_MAX", most)
    rows = [
        logs.Row(topic, partition, first + n, StreamMetadata(1, partition, source), None, f"{topic}{partition}:{n}")
        for topic, partition, first in (("it's `a` \\ topic", 0, 1000), ("t", 1, 2**40), ("t", 2, 0))
        for n, source in enumerate([0, 1, 2, 0, 1, 3, 2, *range(2, 2100)])
    ]
    result = filter_frame(frames.split(rows, 3))
    kept = logs.Model().kept(rows)
    assert (result.verdict.by_runs, result.counts().kept) == (True, len(kept))
    assert logs.ids(result.rows) == kept
    assert logs.ids(result.dropped) == {row.id for row in rows} - kept


def test_batches_that_differ_in_numbers_alone_run_the_same_generated_code(spark, frames, logs):
    """Code with the numbers of one batch would be compiled for each batch, by Spark and by the JVM."""
    metrics = getattr(spark.sparkContext._jvm, "org.apache.spark.metrics.source.CodegenMetrics")
    compiled = []
    for first, partition, stretches in ((0, 0, 3), (7000, 5, 4), (2**40, 2, 3)):
        rows = [
            logs.Row("t", partition, first + n, StreamMetadata(1, 0, n // 20 * 10 + n % 10), None, f"{n}")
            for n in range(20 * stretches)
        ]
        result = filter_frame(frames.split(rows, 2))
        assert len(result.verdict.dropped["t", partition].starts) == stretches
        assert logs.ids(result.rows) == logs.Model().kept(rows)
        compiled.append(metrics.METRIC_COMPILATION_TIME().getCount())
    assert len(set(compiled)) == 1, "of three stretches and of four"


@pytest.mark.parametrize("twice", ["keyed", "unkeyed"])
def test_a_record_that_stands_twice_is_refused_by_name_also_where_holes_hide_it(frames, logs, twice):
    """Log offsets 0, 0, 2, 3 are as many as 0 to 3 have."""
    metadata = {n: StreamMetadata(1, 0, n) if twice == "keyed" else None for n in range(4)}
    rows = [logs.Row("t", 0, n, metadata[n], None, f"{number}") for number, n in enumerate((0, 0, 2, 3))]
    steady = [logs.Row("steady", 0, n, StreamMetadata(2, 0, n), None, f"s{n}") for n in range(4)]
    for frame in (frames.split([*rows, *steady], 1), frames.split([*rows[1:], *steady, rows[0]], 3).repartition(2)):
        with pytest.raises(Exception, match=r"FrameUnusable: log offset 0 of partition 0 of t .*dropDuplicates"):
            filter_frame(frame).rows.collect()
    once = filter_frame(frames.split([*rows[1:], *steady], 1))
    assert once.verdict.by_runs, "a hole is no reason to look at each row"
    assert logs.ids(once.rows) == {row.id for row in [*rows[1:], *steady]}
    if twice == "keyed":
        with pytest.raises(Exception, match="FrameUnusable: log offset 0 of partition 0 of t"):
            filter_replays(frames.split(rows, 2)).collect()


def test_counts_are_known_before_anyone_reads_the_rows(frames, logs):
    by_rows = filter_frame(frames.split(logs.rewound(15, back=5), 2), window=3).counts()
    assert (by_rows.kept, by_rows.dropped, by_rows.late, by_rows.jumped) == (10, 5, 1, 0)
    by_runs = filter_frame(frames.split(logs.rewound(15, back=5), 2)).counts()
    assert (by_runs.kept, by_runs.dropped, by_runs.late, by_runs.jumped) == (10, 5, 0, 0)


def test_a_frame_that_changes_between_the_passes_is_found_out(frames, logs, spark, tmp_path):
    flag = tmp_path / "fewer"
    frame = frames.split(logs.random_topic(5, rows=300), 2)
    changing = frame.rdd.filter(lambda row: row.offset % 2 or not flag.exists())
    for rule in ({}, {"window": 3}):
        result = filter_frame(spark.createDataFrame(changing, frame.schema), **rule)
        result.check_unchanged()
        flag.touch()
        with pytest.raises(FrameChanged, match="persist"):
            result.check_unchanged()
        flag.unlink()


def test_a_pair_in_two_log_partitions_stops_it(frames, logs):
    rows = [logs.Row("t", p, 0, StreamMetadata(5, 1, p), None, str(p)) for p in range(2)]
    with pytest.raises(Exception, match="pid 5, source partition 1 was in destination partition 0"):
        filter_frame(frames.split(rows, 1))
    with pytest.raises(Exception, match="pid 5, source partition 1 was in destination partition"):
        filter_replays(frames.split(rows, 2)).collect()
    before = {MarksKey("t"): HighwaterMarks.from_columns([5], [1], [9], [3])}
    with pytest.raises(PairSplit, match="source partition 1"):
        filter_frame(frames.split(rows[:1], 1), before)


def test_the_ways_past_a_pair_in_two_partitions(frames, logs):
    """The two ways of docs/spark.md: drop the records of the other producer, or continue the pair in any partition."""
    rows = [logs.Row("t", p, n, StreamMetadata(5, 1, n), None, f"{p}:{n}") for p in (0, 3) for n in range(3)]
    pair = StreamMetadata(5, 1, 0).pack()[:12].hex().upper()
    with_others = [*rows, *(logs.Row("t", 3, 3 + n, None, key, f"other {n}") for n, key in enumerate((None, b"k")))]
    right = frames.split(with_others, 1).where(f"not (partition = 3 and hex(substring(key, 1, 12)) <=> '{pair}')")
    assert logs.ids(filter_frame(right).rows) == {"0:0", "0:1", "0:2", "other 0", "other 1"}
    anywhere = {MarksKey("t"): HighwaterMarks.from_columns([5], [1], [1], [-1])}
    moved = filter_frame(frames.split(rows[3:], 1), anywhere)
    assert logs.ids(moved.rows) == {"3:2"}
    assert moved.marks[MarksKey("t")].get(5, 1).destination_partition == 3


def test_an_empty_frame(frames, logs):
    before = {MarksKey("t"): HighwaterMarks.from_columns([5], [1], [9], [3])}
    for rule in ({}, {"window": 4}):
        result = filter_frame(frames.split([], 1), before, **rule)
        assert result.rows.collect() == []
        assert result.counts().kept == 0
        assert result.marks[MarksKey("t")].get(5, 1).offset == 9
    assert filter_replays(frames.split([], 1)).collect() == []


def test_other_columns_come_through_as_they_are(frames, logs, spark):
    rows = logs.random_topic(8, rows=60)
    frame = frames.split(rows, 2).selectExpr(
        "*",
        "cast(offset as timestamp) as timestamp",
        "cast(offset as decimal(20, 3)) as price",
        "map('a', array(offset, null)) as nested",
        "cast(null as date) as nothing",
        "cast(cast(offset as timestamp) as timestamp_ntz) as wall",
        "offset as `with.a dot`",
        "offset as `with ``a`` tick`",
    )
    for kept in (filter_frame(frame).rows, filter_replays(frame)):
        assert kept.schema == frame.schema
        wanted = {row["value"]: row for row in frame.collect()}
        for row in kept.collect():
            assert row == wanted[row["value"]]


def test_arguments_of_another_kind_are_refused_where_they_are_given(spark, frames, logs):
    frame, stream = frames.split(logs.random_topic(1, rows=5), 1), spark.readStream.format("rate").load()
    with pytest.raises(FrameUnusable, match="it is a stream: filter it by filter_replays"):
        filter_frame(stream.selectExpr("'t' topic", "0 partition", "value offset", "cast(null as binary) key"))
    for form in (filter_frame, filter_replays):
        for marks in ({"t": HighwaterMarks()}, {MarksKey("t"): 5}, [MarksKey("t")]):
            with pytest.raises(BadFilterSetting, match=r"marks is \{MarksKey\(topic\): HighwaterMarks\}"):
                form(frame, marks=marks)
        for pids in (1, "12", [2**63], [1.5]):
            with pytest.raises(BadFilterSetting, match="only_pids is None, or producer ids"):
                form(frame, only_pids=pids)
    store = FileMarks("marks")
    for handler, marks, named in ((print, "marks", "marks is a store"), ("orders", store, "handler is called with")):
        with pytest.raises(BadFilterSetting, match=named):
            ReplayFilteredBatches(handler, marks)


def test_settings_and_frames_that_cannot_work_are_refused_by_name(frames, logs):
    frame = frames.split(logs.random_topic(1, rows=5), 1)
    with pytest.raises(FrameUnusable, match="'offset'"):
        filter_frame(frame.drop("offset"))
    with pytest.raises(FrameUnusable, match="'topic'"):
        filter_replays(frame.drop("topic"))
    for column, kind in (
        ("offset", "string"),
        ("offset", "decimal(20,0)"),
        ("partition", "string"),
        ("topic", "binary"),
    ):
        other = frame.withColumn(column, frame[column].cast("string").cast(kind))
        for form in (filter_frame, filter_replays):
            with pytest.raises(FrameUnusable, match=rf"'{column}': it is {kind.split('(')[0]}.*: cast it to"):
                form(other)
    with pytest.raises(FrameUnusable, match="includeHeaders"):
        filter_frame(frame.drop("headers"), carrier="header")
    with pytest.raises(ValueError, match="'value'"):
        filter_frame(frame, carrier="value")
    with pytest.raises(ValueError, match="window=-1"):
        filter_replays(frame, window=-1)
    for column in ("topic", "partition", "offset"):
        kind = dict(frame.dtypes)[column]
        holed = frame.selectExpr(*[c for c in frame.columns if c != column], f"cast(null as {kind}) as {column}")
        with pytest.raises(Exception, match=f"column '{column}': a row has a null"):
            filter_frame(holed)
        with pytest.raises(Exception, match=f"column '{column}': a row has a null"):
            filter_frame(holed, window=2)
