"""ReplayFilteredBatches: marks by batch, re-runs, rollbacks, owners; a batch frame inside a pretended query."""

import dataclasses
import logging
import re
import shlex

import pytest
from click.testing import CliRunner

from filtering import BadFilterSetting, PairSplit, StreamMetadata, WrongCarrier
from spark_jobs import FileMarks, ReplayFilteredBatches, SourcePosition, filter_frame
from spark_jobs import frame as frame_room
from spark_jobs.batch_marks import BatchMarks, MarksFenced, RowCounts
from spark_jobs.errors import CheckpointWentBack, FrameUnusable, MarksMissing, MarksOfAnotherQuery, TableWentBack
from spark_jobs.marks_command import marks
from spark_jobs.sql import SqlTable

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("generated_code")]


class Table:
    """An idempotent handler in memory."""

    def __init__(self):
        self.batches, self.calls, self.fail = {}, [], False

    def __call__(self, rows, batch_id):
        self.calls.append(batch_id)
        self.batches[batch_id] = sorted(row["value"] for row in rows.select("value").collect())
        if self.fail:
            raise RuntimeError("killed here")

    def drop_from(self, batch_id):
        self.batches = {n: rows for n, rows in self.batches.items() if n < batch_id}

    @property
    def ids(self):
        found = [i for rows in self.batches.values() for i in rows]
        assert len(found) == len(set(found)), "a row stands twice in the table"
        return set(found)


@pytest.fixture
def store(tmp_path):
    return FileMarks(tmp_path / "marks")


@pytest.fixture
def table():
    return Table()


@pytest.fixture
def topics(logs):
    return [row for seed in range(100, 112) for row in logs.random_topic(seed)]


@pytest.mark.parametrize(("carrier", "window"), [pytest.param("key", 0, marks=pytest.mark.long), ("header", 4)])
def test_a_stream_of_batches_with_failures_gives_what_the_rule_says(
    frames, logs, topics, store, table, inside_query, carrier, window
):
    inside_query("q")
    once = ReplayFilteredBatches(table, store, carrier=carrier, window=window)
    batches = logs.in_batches(topics, 4, seed=2)
    for n, batch in enumerate(batches):
        frame = frames.split(batch, 3, carrier, seed=n)
        if n == 2:  # the handler wrote and died before its marks were stored
            table.fail = True
            with pytest.raises(RuntimeError):
                once(frame, n)
            table.fail, first = False, table.batches[n]
            once = ReplayFilteredBatches(table, store, carrier=carrier, window=window)
            once(frame.repartition(3), n)
            assert table.batches[n] == first, "a re-run hands over the same rows, however they lie"
        else:
            once(frame, n)
    assert table.ids == logs.Model(window).kept(topics)


def test_a_batch_that_is_stored_is_skipped(frames, logs, store, table, inside_query):
    inside_query("q")
    rows = logs.random_topic(3)
    once = ReplayFilteredBatches(table, store)
    once(frames.split(rows, 2), 0)
    told = once.last_counts
    once(frames.split(rows, 3), 0)
    assert (table.calls, once.last_counts.skipped) == ([0], True)
    kept = RowCounts(len(rows), told.kept, told.dropped, told.unkeyed, told.late, told.jumped)
    assert store.read("q", 0).counts == kept, "whatever a handler read"
    assert (kept.kept + kept.unkeyed, kept.dropped > 0) == (len(logs.Model().kept(rows)), True)
    once(frames.split([], 1), 1)
    assert table.calls == [0, 1], "an empty batch is handed on"
    assert store.batches("q") == [0, 1], "and its marks are stored"
    once(frames.split([], 1), 1)
    assert table.calls == [0, 1]


def test_a_checkpoint_that_was_rolled_back(frames, logs, store, table, inside_query):
    inside_query("q")
    rows = sorted(logs.random_topic(6, rows=120), key=lambda r: (r.partition, r.offset))
    once = ReplayFilteredBatches(table, store)
    for n, batch in enumerate(logs.in_batches(rows, 4, seed=1)):
        once(frames.split(batch, 2), n)
    expected = table.ids
    done = logs.in_batches(rows, 4, seed=1)[0]
    rest = [row for row in rows if row not in done]
    for n, batch in enumerate(logs.in_batches(rest, 2, seed=9), start=1):  # Spark planned 1 and 2 anew; 3 is no more
        once(frames.split(batch, 2), n)
    assert table.ids == expected == logs.Model().kept(rows)
    assert (sorted(table.batches), store.batches("q")) == ([0, 1, 2], [0, 1, 2])


def test_a_rollback_needs_a_handler_that_can_take_back(frames, logs, store, inside_query):
    inside_query("q")
    rows = logs.random_topic(6)
    once = ReplayFilteredBatches(lambda batch, _: batch.count(), store)
    once(frames.split(rows, 1), 0)
    with pytest.raises(CheckpointWentBack, match="drop_from"):
        once(frames.split(rows[:9], 1), 0)
    assert store.batches("q") == [0], "nothing was dropped"


def test_what_never_held_a_row_needs_nothing_taken_back(frames, logs, store, inside_query):
    """An empty batch is planned again, with rows."""
    inside_query("q")
    rows, handed = logs.random_topic(6), {}
    once = ReplayFilteredBatches(lambda batch, n: handed.update({n: logs.ids(batch)}), store)
    once(frames.split(rows[:40], 1), 0)
    for number in (1, 2):
        store.write(BatchMarks("q", number, marks=store.read("q", 0).marks), keep=9)
    once(frames.split(rows[40:], 1), 1)
    assert set().union(*handed.values()) == logs.Model().kept(rows)
    assert store.batches("q") == [0, 1]


def batches_of(logs, count=4):
    rows = sorted(logs.random_topic(6, rows=120), key=lambda r: (r.partition, r.offset))
    return rows, logs.in_batches(rows, count, seed=1)


class Saying(Table):
    """It knows which batches it holds."""

    def last_batch(self, session):
        return max(self.batches, default=-1)


def test_faults_f7_stored_batches_run_again_where_newer_ones_are_stored(frames, logs, store, table, inside_query):
    """Table and checkpoint were restored, the marks are newer: each planned batch has the ranges of a stored one."""
    inside_query("q")
    rows, batches = batches_of(logs)
    once = ReplayFilteredBatches(table, store)
    for n, batch in enumerate(batches):
        once(frames.split(batch, 2), n)
    table.drop_from(2)
    for n in (2, 3):
        ReplayFilteredBatches(table, FileMarks(store.location))(frames.split(batches[n], 2), n)
    assert table.ids == logs.Model().kept(rows)
    assert table.calls == [0, 1, 2, 3, 2, 3]
    assert FileMarks(store.location).batches("q") == [0, 1, 2, 3]


@pytest.mark.parametrize("went_back", [False, True], ids=["the checkpoint alone", "the table, too"])
def test_faults_f7_a_plain_handler_is_told_both_ways_on(frames, logs, store, inside_query, went_back):
    """Whether its table went back only its owner knows; run again, or skipped, one of the two would be wrong."""
    inside_query("q")
    rows, batches = batches_of(logs)
    table = Table()
    plain = table.__call__  # without its other methods
    for n, batch in enumerate(batches):
        ReplayFilteredBatches(plain, store)(frames.split(batch, 2), n)
    if went_back:
        table.drop_from(2)
    with pytest.raises(CheckpointWentBack, match=r"Spark runs batch 2 .*up to batch 3.*no method drop_from") as refused:
        ReplayFilteredBatches(plain, FileMarks(store.location))(frames.split(batches[2], 2), 2)
    assert table.calls == [0, 1, 2, 3]
    ways = re.findall(r"--adopt (\w+):(\d+)", str(refused.value))
    query_id, batch = ways[went_back]
    inside_query("fresh")
    for n, again in enumerate(batches):  # a fresh checkpoint reads all of the log
        keyed = [row for row in again if row.metadata is not None]
        once = ReplayFilteredBatches(plain, FileMarks(store.location), adopt=(query_id, int(batch)))
        once(frames.split(keyed, 2), n)
    keyed = {row.id for row in rows if row.metadata is not None}
    assert table.ids & keyed == logs.Model().kept(rows) & keyed


def test_faults_f7_the_newest_stored_batch_is_skipped_unless_the_sink_lacks_it(frames, logs, store, inside_query):
    inside_query("q")
    rows, batches = batches_of(logs, 3)
    table = Saying()
    for n, batch in enumerate(batches):
        ReplayFilteredBatches(table, store)(frames.split(batch, 2), n)
    last = frames.split(batches[2], 2)
    ReplayFilteredBatches(table, store)(last, 2)
    table.drop_from(2)
    once = ReplayFilteredBatches(table, store)
    once(last, 2)
    once(last, 2)
    assert table.calls == [0, 1, 2, 2]
    assert (table.ids, once.last_counts.skipped) == (logs.Model().kept(rows), True)


def test_faults_f7_a_table_that_is_older_than_its_marks_is_refused_with_a_way_on(frames, logs, store, inside_query):
    inside_query("q")
    rows, batches = batches_of(logs)
    table = Saying()
    for n, batch in enumerate(batches[:3]):
        ReplayFilteredBatches(table, store)(frames.split(batch, 2), n)
    table.drop_from(1)
    with pytest.raises(TableWentBack, match=r"ends with batch 0 .*go on behind batch 2") as refused:
        ReplayFilteredBatches(table, store)(frames.split(batches[3], 2), 3)
    query_id, batch = re.search(r"--adopt (\w+):(\d+)", str(refused.value)).groups()
    assert (table.calls, query_id, batch) == ([0, 1, 2], "q", "0")
    inside_query("fresh")
    for n, again in enumerate(batches[1:]):  # what batch 0 held is known
        once = ReplayFilteredBatches(table, FileMarks(store.location), adopt=(query_id, int(batch)))
        once(frames.split(again, 2), n)
    assert table.ids == logs.Model().kept(rows)
    inside_query("another")
    begins = ReplayFilteredBatches(Saying(), FileMarks(store.location), adopt=("fresh", 3))
    begins(frames.split([], 1), 0)  # a new table has none of them


def test_faults_f7_batches_of_a_table_that_is_newer_than_its_marks_are_dropped(frames, logs, store, inside_query):
    """Marks and checkpoint were restored; planned anew in larger batches, the later old ones would stay."""
    inside_query("q")
    rows, batches = batches_of(logs)
    table = Saying()
    for n, batch in enumerate(batches):
        ReplayFilteredBatches(table, store)(frames.split(batch, 2), n)
    store.drop_from("q", 1)
    rest = [row for row in rows if row not in batches[0]]
    ReplayFilteredBatches(table, FileMarks(store.location))(frames.split(rest, 2), 1)
    assert table.ids == logs.Model().kept(rows)
    assert sorted(table.batches) == [0, 1]


def test_faults_f8_a_second_query_on_one_store_object_is_refused_before_it_reads(frames, logs, store, inside_query):
    """Both begin while the store is empty, so neither finds the other in it."""
    inside_query("first")
    rows, others = logs.random_topic(3), Table()

    def handler(batch, batch_id):
        frame, read = frames.counted(rows)
        inside_query("second")
        with pytest.raises(MarksOfAnotherQuery, match=r"of query first .* this is query second.*marks .* of its own"):
            ReplayFilteredBatches(others, store)(frame, 0)
        inside_query("first")
        assert (others.calls, read.value) == ([], 0)

    once = ReplayFilteredBatches(handler, store)
    once(frames.split(rows, 1), 0)
    once(frames.split([], 1), 1)
    assert (store.owner(), store.batches("first")) == ("first", [0, 1])


@pytest.mark.parametrize(
    ("handler", "marks", "named"),
    [
        ("table", FileMarks("m"), "handler"),
        (Table(), "m", "marks"),
        (SqlTable("sqlite:x", "t"), FileMarks("m"), "marks"),
    ],
)
def test_parts_that_can_t_work_are_refused_at_once(handler, marks, named):
    """Of a SqlTable without its marks no row would ever be seen."""
    with pytest.raises(BadFilterSetting) as refused:
        ReplayFilteredBatches(handler, marks)
    assert refused.value.setting == named


def test_a_rollback_over_a_batch_that_replaced_rows_is_refused(frames, logs, store, table, inside_query):
    """The rows that the batch wrote, and those that it replaced, would both be lost."""
    inside_query("q")
    rows = sorted(logs.random_topic(6), key=lambda r: (r.partition, r.offset))
    once = ReplayFilteredBatches(table, store)
    for n, batch in enumerate(logs.in_batches(rows, 3, seed=1)):
        once(frames.split(batch, 1), n)
    second = store.read("q", 2)
    store.write(dataclasses.replace(second, replaced=second.ranges[:1]), keep=9)
    before = table.ids
    with pytest.raises(CheckpointWentBack, match=r"back to batch 1, and batch 2 behind it.*fresh checkpoint"):
        once(frames.split(rows[-3:], 1), 1)
    assert (table.ids, store.batches("q")) == (before, [0, 1, 2]), "nothing was dropped"
    once(frames.split(logs.in_batches(rows, 3, seed=1)[2], 1), 2)
    assert once.last_counts.skipped, "the same batch again is no rollback"


def test_a_batch_without_its_predecessor_is_an_error(frames, logs, store, table, inside_query):
    inside_query("q")
    once = ReplayFilteredBatches(table, store)
    with pytest.raises(MarksMissing, match=r"lack batch 4 .*it has none"):
        once(frames.split(logs.random_topic(1), 1), 5)
    store.write(BatchMarks("q", 2), keep=9)
    with pytest.raises(MarksMissing, match="it has batches 2 to 2"):
        once(frames.split(logs.random_topic(1), 1), 5)
    assert table.calls == []


def test_a_store_of_another_query_is_refused_or_adopted(frames, logs, store, table, inside_query):
    rows = logs.random_topic(7, rows=200)
    first, second, third = logs.in_batches(rows, 3, seed=3)
    inside_query("old")
    for n, batch in enumerate([first, second]):
        ReplayFilteredBatches(table, store)(frames.split(batch, 1), n)
    expected = logs.Model()
    kept = [expected.kept(batch) for batch in (first, second, third)]

    inside_query("new")
    with pytest.raises(MarksOfAnotherQuery, match=r"without the option checkpointLocation.* adopt=\('old', 1\)"):
        ReplayFilteredBatches(table, store)(frames.split(third, 1), 0)
    with pytest.raises(MarksMissing, match="lack batch 7 of query old"):
        ReplayFilteredBatches(table, store, adopt=("old", 7))(frames.split(third, 1), 0)
    assert store.owner() == "old", "a refusal changes nothing"

    successor = Table()
    adopting = ReplayFilteredBatches(successor, store, adopt=("old", 1))
    successor.fail = True
    with pytest.raises(RuntimeError):
        adopting(frames.split(third, 1), 0)
    successor.fail = False
    adopting(frames.split(third, 1), 0)
    adopting = ReplayFilteredBatches(successor, store)  # started again: the store knows where the numbers began
    adopting(frames.split(first, 1), 1)
    adopting(frames.split(first, 1), 1)
    assert (adopting.last_counts.batch_id, adopting.last_counts.skipped) == (3, True)
    assert successor.batches == {2: sorted(kept[2]), 3: sorted(r.id for r in first if r.metadata is None)}
    assert store.batches("new") == [1, 2, 3], "the first is the adopted one"
    adopting(frames.split(second[:9], 1), 0)
    assert (sorted(successor.batches), store.batches("new")) == ([2], [1, 2]), "rolled back to its own first batch"
    inside_query("old")
    with pytest.raises(MarksOfAnotherQuery, match="belong to query new"):
        ReplayFilteredBatches(table, store)(frames.split(third, 1), 2)


def test_with_adopted_marks_a_sink_that_replaces_a_batch_by_its_number_keeps_what_was_there(
    spark, frames, logs, store, inside_query, tmp_path
):
    """A fresh checkpoint counts from 0 again, and README's sink overwrites `batch_id=0`."""

    def write(rows, batch_id):
        rows.write.mode("overwrite").parquet(f"{tmp_path}/orders/batch_id={batch_id}")

    rows = logs.random_topic(8)
    inside_query("old")
    for n, part in enumerate((rows[:30], rows[30:60])):
        ReplayFilteredBatches(write, store)(frames.split(part, 1), n)
    inside_query("new")
    for n, part in enumerate((rows[60:70], rows[70:])):
        ReplayFilteredBatches(write, store, adopt=("old", 1))(frames.split(part, 1), n)
    table = spark.read.parquet(f"{tmp_path}/orders")
    assert sorted(row[0] for row in table.select("value").collect()) == sorted(logs.Model().kept(rows))
    assert {row[0] for row in table.select("batch_id").distinct().collect()} == {0, 1, 2, 3}


def test_adopting_from_an_empty_store_is_an_error(frames, logs, store, table, inside_query):
    inside_query("new")
    with pytest.raises(MarksMissing, match="query old"):
        ReplayFilteredBatches(table, store, adopt=("old", 1))(frames.split(logs.random_topic(1), 1), 0)


def test_old_versions_go_and_as_many_as_spark_keeps_stay(frames, logs, store, table, inside_query, spark):
    inside_query("q")
    name = "spark.sql.streaming.minBatchesToRetain"
    once = ReplayFilteredBatches(table, store)
    spark.conf.set(name, 3)
    try:
        for n in range(6):
            once(frames.split([], 1), n)
    finally:
        spark.conf.unset(name)
    assert store.batches("q") == [2, 3, 4, 5], "batches 3, 4, 5 can be run again: each with the marks before it"


def test_counts_callback_and_dropped_rows(frames, logs, store, inside_query, caplog):
    inside_query("q")
    rows = [logs.Row("t", 0, n, StreamMetadata(5, 1, o), None, f"a{n}") for n, o in enumerate([0, 1, 2, 5, 1, 2])]
    rows += [logs.Row("t", 1, 0, StreamMetadata(6, 2, 9), None, "b0"), logs.Row("t", 1, 1, None, b"k", "c")]
    told, audited = [], {}

    def audit(dropped, batch_id):
        audited[batch_id] = logs.ids(dropped)

    once = ReplayFilteredBatches(
        lambda batch, _: batch.count(), store, window=2, on_counts=told.append, on_dropped=audit
    )
    once(frames.split(rows, 1), 0)
    counts = once.last_counts
    assert (counts.rows, counts.kept, counts.dropped, counts.unkeyed) == (8, 5, 2, 1)
    assert (counts.late, counts.jumped, counts.pairs, counts.all_dropped) == (2, 2, 2, ())
    again = [logs.Row("t", 1, 5, StreamMetadata(6, 2, 9), None, "b1")]
    with caplog.at_level(logging.WARNING, logger="spark_jobs.replay_filter"):
        once(frames.split(again, 1), 1)
    assert once.last_counts.all_dropped == (("t", 6, 2),)
    assert "every row of 1 (topic, pid, source partition)" in caplog.text
    assert audited == {0: {"a4", "a5"}, 1: {"b1"}}
    assert told == [counts, once.last_counts]


def test_faults_s7_a_batch_without_any_metadata_is_told_once(frames, logs, store, inside_query, caplog):
    inside_query("q")
    once = ReplayFilteredBatches(lambda batch, _: batch.count(), store)
    with caplog.at_level(logging.WARNING, logger="spark_jobs"):
        for n in range(2):
            rows = [logs.Row("t", 0, n, None, b"k", f"a{n}"), logs.Row("u", 0, n, StreamMetadata(1, 0, n), None, "b")]
            once(frames.split(rows, 1), n)
    [line] = caplog.messages
    assert line.startswith("topic t: no record of a batch has stream metadata as carrier='key'")
    filter_frame(frames.split(rows[:1], 1), only_pids=[7])
    assert "topic t: no record of a batch has stream metadata of one of only_pids" in caplog.messages[-1]


@pytest.mark.parametrize("at_once", [60, 200])
def test_faults_s7_a_topic_that_carries_it_in_the_header_is_refused_before_the_handler(
    frames, logs, store, table, inside_query, at_once
):
    inside_query("q")
    rows = [logs.Row("t", n % 3, n, StreamMetadata(7, n % 3, n), None, f"{n}") for n in range(200)]
    once = ReplayFilteredBatches(table, store)
    batches = [frames.split(rows[n : n + at_once], 2, "header") for n in range(0, 200, at_once)]
    if at_once == 60:
        once(batches.pop(0), 0)
    with pytest.raises(WrongCarrier, match="carrier is 'header' for topic t: its first 100 records"):
        once(batches.pop(0), int(at_once == 60))
    assert table.calls == [0] * (at_once == 60), "the second batch completes the hundred"
    if at_once == 200:
        with pytest.raises(WrongCarrier):
            filter_frame(frames.split(rows, 2, "header"))
    stranger = dataclasses.replace(rows[0], metadata=None, other_key=b"business")
    filter_frame(frames.in_one_piece([stranger, *rows[1:]], "header"))


def test_faults_s7_another_carrier_at_a_restart_is_refused_until_the_printed_command(
    frames, logs, store, table, inside_query
):
    inside_query("q")
    rows = [logs.Row("t", 0, n, StreamMetadata(7, 0, n), None, f"{n}") for n in range(3)]
    once = ReplayFilteredBatches(table, store)
    once(frames.split(rows, 1), 0)
    for carrier in ("header", SourcePosition("'p'", "offset")):
        again = ReplayFilteredBatches(table, store, carrier=carrier)
        with pytest.raises(WrongCarrier) as refused:
            again(frames.split(rows, 1, "header"), 1)
        assert (refused.value.value, refused.value.right) == (str(carrier), "key")
    assert table.calls == [0]
    command = shlex.split(re.search(r"pushrep marks (import .* --empty --replace)", str(refused.value))[1])
    done = CliRunner().invoke(marks, command)
    assert done.exit_code == 0, done.output
    ReplayFilteredBatches(table, FileMarks(store.location), carrier="header")(frames.split(rows, 1, "header"), 1)
    assert table.calls == [0, 1]
    assert FileMarks(store.location).read("q", 1).carrier == "header"


def test_business_keys_that_are_metadata_by_chance_are_told_before_the_handler(
    frames, logs, store, inside_query, caplog
):
    inside_query("q")
    # As any text of 20 characters; those that differ at the end only are one pair, and must ascend.
    text = [StreamMetadata.unpack(f"{name}-{n:014}".encode()) for name, n in (("order", 5), ("order", 4), ("event", 1))]
    rows = [logs.Row("t", 0, n, metadata, None, f"a{n}") for n, metadata in enumerate([*text, StreamMetadata(5, 1, 7)])]
    told = []
    with caplog.at_level(logging.WARNING, logger="spark_jobs.replay_filter"):
        once = ReplayFilteredBatches(lambda *_: told.append(caplog.text), store)
        once(frames.split(rows, 1), 0)
    assert "batch 0: 2 of 3 (pid, source partition) name a source partition from 1048576" in told[0]
    assert "--only-pid" in told[0]
    assert (once.last_counts.unlikely_pairs, once.last_counts.dropped) == (2, 1)


@pytest.mark.parametrize(
    "handler", [lambda *_: None, lambda batch, _: batch.isEmpty(), lambda batch, _: batch.limit(3).collect()]
)
@pytest.mark.parametrize("window", [0, 1], ids=["runs decide", "rows decide"])
def test_counts_are_those_of_all_rows_whatever_the_handler_does(frames, logs, store, inside_query, handler, window):
    inside_query("q")
    once = ReplayFilteredBatches(handler, store, window=window)
    once(frames.split(logs.rewound(15, back=5), 1), 0)
    counts = once.last_counts
    assert (counts.rows, counts.kept, counts.dropped, counts.late) == (15, 10, 5, 3 * (window > 0))


def test_a_ttl_shorter_than_the_topic_s_retention_is_refused(frames, store, table):
    for told in ({}, {"retention_ms": -1}, {"retention_ms": 10_001}):
        with pytest.raises(BadFilterSetting, match="with retention_ms=0 any ttl_s is accepted"):
            ReplayFilteredBatches(table, store, ttl_s=10, **told)
        with pytest.raises(BadFilterSetting, match="with retention_ms=0 any ttl_s is accepted"):
            filter_frame(frames.split([], 1), ttl_s=10, **told)


def test_rows_without_order_are_decided_by_the_log_s(frames, logs, store, table, inside_query, monkeypatch):
    inside_query("q")
    rows = [*logs.random_topic(9, rows=150), *logs.out_of_order()]
    for n, runs_max in enumerate((frame_room.RUNS_MAX, 1)):
        monkeypatch.setattr(frame_room, "RUNS_MAX", runs_max)
        once = ReplayFilteredBatches(table, store)
        once(frames.in_one_piece([dataclasses.replace(row, topic=f"{row.topic}-{n}") for row in rows]), n)
        assert set(table.batches[n]) == logs.Model().kept(rows)


def test_where_runs_are_too_many_nobody_looks_for_them_for_a_while(
    frames, logs, store, table, inside_query, monkeypatch
):
    inside_query("q")
    monkeypatch.setattr(frame_room, "RUNS_MAX", 1)
    monkeypatch.setattr(frame_room, "WITHOUT_RUNS", 2)
    looked = []
    by_runs = frame_room.by_runs
    monkeypatch.setattr(frame_room, "by_runs", lambda *rest: looked.append(n) or by_runs(*rest))
    once = ReplayFilteredBatches(table, store)
    batches = logs.in_batches(logs.random_topic(9, rows=150), 5, seed=1)
    for n, batch in enumerate(batches):
        once(frames.split(batch, 1), n)
    assert looked == [0, 2]
    assert table.ids == logs.Model().kept([row for batch in batches for row in batch])


def test_where_runs_cross_they_are_looked_for_in_vain_less_and_less_often(
    frames, logs, store, table, inside_query, monkeypatch
):
    inside_query("q")
    monkeypatch.setattr(frame_room, "WITHOUT_RUNS", 2)
    once, rows, reads = ReplayFilteredBatches(table, store), [], []
    for n, sources in enumerate([(0, 1, 2, 1, 3, 2, 4)] * 5 + [(0, 1), (0, 1, 2, 1, 3, 2, 4)]):
        batch = [
            logs.Row("t", 0, at := 10 * n + i, StreamMetadata(1, 0, 5 * n + s), None, f"a{at}")
            for i, s in enumerate(sources)
        ]
        frame, read = frames.counted(batch)
        once(frame, n)
        rows += batch
        reads.append(read.value // len(batch))
    assert reads == [3, 2, 3, 2, 2, 2, 3], "the sixth batch has no crossing runs"
    assert table.ids == logs.Model().kept(rows)


def test_marks_expire_at_the_commit_and_only_there(frames, logs, store, inside_query):
    class Hands:
        now = 1_000_000

        def wall_ms(self):
            return self.now

        def monotonic_ms(self):
            return self.now

    inside_query("q")
    clock, table = Hands(), Table()
    once = ReplayFilteredBatches(table, store, ttl_s=10, retention_ms=10_000, clock=clock)
    rows = [logs.Row("t", 0, n, StreamMetadata(5, 1, o), None, f"a{n}") for n, o in enumerate([3, 3, 3, 3])]
    for n, row in enumerate(rows):
        once(frames.split([row], 1), n)
        clock.now += 6_000
    # Advanced at 0 s; commits at 0, 6 and 12 s: gone at the third, so the fourth batch sees it for the first time.
    assert table.batches == {0: ["a0"], 1: [], 2: [], 3: ["a3"]}


def test_the_way_past_a_batch_in_which_a_pair_moved(frames, logs, store, table, inside_query, tmp_path):
    """The way in docs/spark.md: remove the new partition's records, set a mark without a partition, and move that one
    back.
    """
    inside_query("q")
    moving, other = (5, 1), (6, 0)
    places = [(0, moving, n) for n in range(4)] + [(3, other, 0), (3, moving, 4), (3, moving, 5), (3, other, 1)]
    at = {0: iter(range(9)), 3: iter(range(9))}
    rows = [logs.Row("t", p, next(at[p]), StreamMetadata(*pair, n), None, f"{p}:{n}") for p, pair, n in places]
    once = ReplayFilteredBatches(table, store)
    once(frames.split(rows[:2], 1), 0)
    with pytest.raises(PairSplit):
        once(frames.split(rows[2:], 1), 1)
    pair = StreamMetadata(*moving, 0).pack()[:12].hex().upper()
    once(frames.split(rows[2:], 1).where(f"not (partition = 3 and hex(substring(key, 1, 12)) <=> '{pair}')"), 1)
    done = CliRunner().invoke(marks, ["import", store.location, "--pair", "5:1=3", "--replace"])
    assert done.exit_code == 0, done.output
    with pytest.raises(MarksFenced):
        once(frames.split(rows[4:], 1), 2)
    once = ReplayFilteredBatches(table, FileMarks(store.location))  # the query is started again
    once(frames.split(rows[4:], 1), 2)
    assert table.batches[2] == ["3:4", "3:5"]
    assert table.ids == {row.id for row in rows}


def test_outside_of_a_query_it_says_what_to_use(frames, logs, store, table):
    with pytest.raises(FrameUnusable, match="filter_frame"):
        ReplayFilteredBatches(table, store)(frames.split(logs.random_topic(2), 1), 0)
