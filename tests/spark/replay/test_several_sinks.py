"""all_of: each sink gets each batch once, whichever fails, and is told what the handler is told."""

import sqlite3
from contextlib import closing
from threading import get_ident

import pytest

from filtering import BadFilterSetting
from spark_jobs import FileMarks, ReplayFilteredBatches, all_of, idempotent_table
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantReplace, CheckpointWentBack
from spark_jobs.sinks.idempotent_sink import TableNotOurs
from spark_jobs.sql import SqlTable

pytestmark = pytest.mark.spark

COLUMNS = ("topic", "partition", "offset", "value")


@pytest.fixture
def parts(spark, tmp_path):
    """(name) -> a table of that name; .ids(name) of its rows."""

    class Parts:
        def table(self, name):
            return idempotent_table(str(tmp_path / name))

        def ids(self, name):
            found = [row["value"] for row in spark.read.parquet(str(tmp_path / name)).select("value").collect()]
            assert len(found) == len(set(found)), "a row stands twice in the table"
            return set(found)

    return Parts()


class Failing:
    """A sink around another one that fails once, behind its rows."""

    def __init__(self, sink):
        self._sink, self.fails, self.seen = sink, True, []
        self.expect, self.drop_from, self.last_batch = sink.expect, sink.drop_from, sink.last_batch

    def __call__(self, rows, batch_id):
        context = rows.sparkSession.sparkContext
        self.seen.append((context.getLocalProperty("sql.streaming.queryId"), get_ident()))
        self._sink(rows, batch_id)
        if self.fails and batch_id == 1:
            self.fails = False
            raise RuntimeError("this sink died")


@pytest.mark.parametrize("in_threads", [False, True])
def test_faults_f8_a_failing_sink_fails_the_batch_and_the_retry_is_exact_in_each(
    frames, logs, inside_query, parts, tmp_path, in_threads
):
    inside_query("q")
    rows = logs.random_topic(5, rows=90)
    failing = Failing(parts.table("second"))
    once = ReplayFilteredBatches(
        all_of(parts.table("first"), failing, parts.table("third"), in_threads=in_threads), FileMarks(tmp_path / "m")
    )
    batches = [frames.counted(batch) for batch in logs.in_batches(rows, 3, seed=1)]
    for n, (frame, _) in enumerate(batches):
        if n == 1:
            with pytest.raises(RuntimeError, match="this sink died"):
                once(frame, n)
        once(frame, n)
    for name in ("first", "second", "third"):
        assert parts.ids(name) == logs.Model().kept(rows), name
    assert {query for query, _ in failing.seen} == {"q"}, "its jobs are the query's"
    assert (get_ident() in {thread for _, thread in failing.seen}) is not in_threads
    inside_query("other")
    with pytest.raises(TableNotOurs, match="this is query other"):
        ReplayFilteredBatches(all_of(parts.table("first")), FileMarks(tmp_path / "others"))(batches[0][0], 0)


def test_a_batch_is_read_once_for_all_sinks_and_they_go_back_together(frames, logs, inside_query, parts, tmp_path):
    inside_query("q")
    rows = logs.random_topic(5, rows=90)
    early, late = rows[:40], rows[40:]
    frame, read = frames.counted(late)

    def once():
        return ReplayFilteredBatches(all_of(parts.table("a"), parts.table("b")), FileMarks(tmp_path / "m"))

    once()(frames.split(early, 1), 0)
    once()(frames.split(late[:-7], 1), 1)
    once()(frame, 1)
    assert read.value <= 3 * len(late), "passes of the filter, and one for both sinks"
    assert parts.ids("a") == parts.ids("b") == logs.Model().kept(rows)
    lagging = parts.table("b")
    lagging.expect("q", 1, ())
    lagging.drop_from(1)
    again = once()
    again(frame, 1)
    assert not again.last_counts.skipped, "one of them lacks the batch"
    assert parts.ids("a") == parts.ids("b") == logs.Model().kept(rows)


def test_a_database_among_them_commits_with_the_marks(frames, logs, inside_query, parts, tmp_path):
    inside_query("q")
    rows = logs.random_topic(5, rows=90)
    table = SqlTable(f"sqlite:{tmp_path / 'orders.db'}", "orders")

    once = ReplayFilteredBatches(all_of(table, parts.table("files")), table)
    batches = [frames.split(part, 1).select("key", *COLUMNS) for part in (rows[:40], rows[40:80], rows[40:])]
    for n, frame in zip((0, 1, 1), batches, strict=True):  # the last one was planned anew
        once(frame, n)
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        held = [value for (value,) in database.execute("select value from orders")]
    assert len(held) == len(set(held))
    assert set(held) == parts.ids("files") == logs.Model().kept(rows)
    with pytest.raises(BadFilterSetting, match="the very SqlTable of the handler"):
        ReplayFilteredBatches(all_of(table, SqlTable(f"sqlite:{tmp_path / 'orders.db'}", "others")), table)
    with pytest.raises(BadFilterSetting, match="the very SqlTable of the handler"):
        ReplayFilteredBatches(all_of(table), FileMarks(tmp_path / "m"))


def test_what_one_sink_can_t_all_can_t(frames, logs, inside_query, parts, tmp_path):
    inside_query("q")
    rows, plain = logs.random_topic(5), lambda batch, _: batch.count()
    both = all_of(parts.table("a"), plain)
    once = ReplayFilteredBatches(both, FileMarks(tmp_path / "m"))
    once(frames.split(rows, 1), 0)
    with pytest.raises(CheckpointWentBack, match="drop_from"):
        once(frames.split(rows[:9], 1), 0)
    assert parts.ids("a") == logs.Model().kept(rows)
    with pytest.raises(CantReplace, match="has no method replace"):
        both.replace(frames.split(rows, 1), 1, [LogRange("t", 0, 0, 9)])
    for wrong in ((), (parts.table("a"), "a table's name")):
        with pytest.raises(BadFilterSetting, match="one sink or more"):
            all_of(*wrong)
