"""Rows and marks in one transaction, in SQLite and in a real PostgreSQL: whatever ends a batch, both agree."""

import datetime as dt
import re
import sqlite3
from contextlib import closing, suppress
from decimal import Decimal

import pytest

from filtering import StreamMetadata, WrongCarrier
from spark_jobs import ReplayFilteredBatches
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksFenced, MarksStoreDamaged
from spark_jobs.sql import BadSink, PostgreSQL, SqlTable, dialect_of, stage_rows
from tests.postgresql import new_database

pytestmark = pytest.mark.spark

COLUMNS = ("topic", "partition", "offset", "value")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'table.db'}"
    return new_database(request.getfixturevalue("postgresql"), f"t{abs(hash(str(tmp_path)))}")


def _first(kind, other):
    """Parameters of a test whose long form alone takes the other database, too."""
    return pytest.mark.parametrize("url", [kind, pytest.param(other, marks=pytest.mark.long)], indirect=True)


SQLITE, POSTGRESQL = _first("sqlite", "postgresql"), _first("postgresql", "sqlite")


def query(url, statement):
    if url.startswith("sqlite:"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:"))) as connection, connection:
            return connection.execute(statement).fetchall()
    import psycopg

    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def ids(url, table="orders"):
    found = [row[0] for row in query(url, f"SELECT value FROM {table}")]
    assert len(found) == len(set(found)), "a row stands twice in the table"
    return set(found)


def rows_of(frame):
    return frame.select(*COLUMNS)


class Sink:
    """The table, taking the columns that a database can hold."""

    def __init__(self, table):
        self.table, self.fail = table, False

    def __call__(self, rows, batch_id):
        self.table(rows_of(rows), batch_id)
        if self.fail:
            raise RuntimeError("killed here")

    def drop_from(self, batch_id):
        """The store's own `drop_from` takes rows and marks together."""


def told(table, batch_id):
    """The table, as the form tells it what comes."""
    table.expect("q", batch_id, ())
    return table


def filtered(table, **more):
    sink = Sink(table)
    return ReplayFilteredBatches(sink, table, **more), sink


@SQLITE
def test_a_stream_of_batches_with_failures_gives_what_the_rule_says(frames, logs, inside_query, url):
    inside_query("q")
    topics = [row for seed in range(100, 106) for row in logs.random_topic(seed)]
    once, sink = filtered(SqlTable(url, "orders"))
    for n, batch in enumerate(logs.in_batches(topics, 3, seed=2)):
        frame = frames.split(batch, 3, seed=n)
        if n == 1:
            sink.fail, before = True, ids(url)
            with pytest.raises(RuntimeError):
                once(frame, n)
            assert ids(url) == before, "rows without their marks are not in the table"
            once, sink = filtered(SqlTable(url, "orders"))
            frame = frame.repartition(3)
        once(frame, n)
    assert ids(url) == logs.Model().kept(topics)
    assert query(url, "SELECT count(*) FROM orders_staging") == [(0,)]
    assert {row[0] for row in query(url, "SELECT pushrep_query FROM orders")} == {"q"}


@POSTGRESQL
def test_a_batch_that_is_stored_is_skipped_and_a_rolled_back_one_is_replaced(frames, logs, inside_query, url):
    inside_query("q")
    rows = logs.random_topic(3)
    early, late = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    table = SqlTable(url, "orders")
    once, _ = filtered(table)
    once(frames.split(early, 2), 0)
    once(frames.split(early, 3), 0)
    once(frames.split(late, 2), 1)
    assert ids(url) == logs.Model().kept(rows)
    again, _ = filtered(SqlTable(url, "orders"))
    again(frames.split(late[:-7], 2), 1)  # the checkpoint went back, and Spark plans batch 1 anew
    again(frames.split(late[-7:], 1), 2)
    assert ids(url) == logs.Model().kept(rows)
    assert table.batches("q")[-1] == 2
    assert table.owner() == "q"


@SQLITE
def test_a_table_that_is_handler_and_store_takes_a_rolled_back_checkpoint(frames, logs, inside_query, url):
    inside_query("q")
    rows = logs.random_topic(3)
    table = SqlTable(url, "orders")
    once = ReplayFilteredBatches(table, table)
    once(frames.split(rows, 2).drop("headers"), 0)
    once(frames.split(rows[:-7], 2).drop("headers"), 0)
    once(frames.split(rows[-7:], 1).drop("headers"), 1)
    assert ids(url) == logs.Model().kept(rows)


class Killed(BaseException):
    """The driver dies here."""


class Breaking:
    """A connection to the database that does something at its nth statement; `commit` counts as one."""

    def __init__(self, connection, at, act):
        self._connection, self._left, self._act = connection, at, act

    def _count(self):
        self._left[0] -= 1
        if self._left[0] == 0:
            self._act(self._connection)

    def cursor(self):
        return _Cursor(self._connection.cursor(), self._count)

    def commit(self):
        self._count()
        self._connection.commit()

    def close(self):
        self._connection.close()


class _Cursor:
    def __init__(self, cursor, count):
        self._cursor, self._count = cursor, count

    def execute(self, *args):
        self._count()
        return self._cursor.execute(*args)

    def __getattr__(self, name):
        return getattr(self._cursor, name)


def statements(monkeypatch, at, act):
    """Only the driver's statements: tasks have separate connections, in separate processes."""
    connect, left = PostgreSQL.connect, [at]
    monkeypatch.setattr(PostgreSQL, "connect", lambda dialect: Breaking(connect(dialect), left, act))
    return left


def test_killed_at_each_statement_rows_and_marks_agree(frames, logs, postgresql, monkeypatch):
    rows = logs.random_topic(5)
    batches = [rows_of(frames.split(part, 1)).coalesce(1).cache() for part in (rows[:40], rows[40:])]
    first, second = ({row["value"] for row in batch.collect()} for batch in batches)
    at, outcomes, ended = 0, set(), False
    while not ended:
        at += 1
        name = f"killed{at}"
        table = SqlTable(postgresql, name)
        told(table, 0)(batches[0], 0)
        table.write(BatchMarks("q", 0), keep=3)
        told(table, 1)(batches[1], 1)
        with monkeypatch.context() as patch:

            def die(_):
                raise Killed

            left = statements(patch, at, die)
            with suppress(Killed):
                table.write(BatchMarks("q", 1), keep=3)
            ended = left[0] > 0
        again = SqlTable(postgresql, name)
        has_marks = again.read("q", 1) is not None
        assert ids(postgresql, name) == (first | second if has_marks else first), f"killed at statement {at}"
        outcomes.add(has_marks)
        if not has_marks:
            told(again, 1)(batches[1], 1)
            again.write(BatchMarks("q", 1), keep=3)
        assert ids(postgresql, name) == first | second, f"run again after statement {at}"
    assert outcomes == {True, False}
    assert at > 5, "the transaction has more statements than that"


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
def test_a_lost_connection_is_made_again(frames, logs, inside_query, postgresql, after, monkeypatch):
    """PostgreSQL's backend is terminated; the client does not learn whether the commit was done."""
    import psycopg

    inside_query("q")
    rows = logs.random_topic(6)
    name = "lost_after" if after else "lost_before"
    table = SqlTable(postgresql, name)
    once, _ = filtered(table)
    once(frames.split(rows[:40], 2), 0)

    def cut(connection):
        if after:
            connection.commit()
        with psycopg.connect(postgresql, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        if after:
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    commit = table._commit

    def breaking(connection, *args):
        commit(connection, *args)
        if not breaking.done:
            breaking.done = True
            cut(connection)

    breaking.done = False
    monkeypatch.setattr(table, "_commit", breaking)
    once(frames.split(rows[40:], 2), 1)
    assert breaking.done
    assert ids(postgresql, name) == logs.Model().kept(rows)


def test_a_serialization_failure_is_tried_again(frames, logs, inside_query, postgresql, monkeypatch):
    """Two real transactions in each other's way, under the strictest isolation."""
    import psycopg

    inside_query("q")
    rows = logs.random_topic(7)
    strict = postgresql + "&options=-c%20default_transaction_isolation%3Dserializable"
    table = SqlTable(strict, "strictly")
    once, _ = filtered(table)
    once(frames.split(rows[:40], 2), 0)
    commit, tries = table._commit, []

    def crossed(connection, *args):
        tries.append(1)
        if len(tries) == 1:
            connection.cursor().execute('SELECT count(*) FROM "strictly_marks"').fetchall()
            connection.cursor().execute('UPDATE "strictly_marks" SET marks = marks')
            with psycopg.connect(strict) as other:
                other.execute("SET lock_timeout = '50ms'")
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    other.execute('UPDATE "strictly_marks" SET marks = marks')
            raise psycopg.errors.SerializationFailure("could not serialize access due to concurrent update")
        commit(connection, *args)

    monkeypatch.setattr(table, "_commit", crossed)
    once(frames.split(rows[40:], 2), 1)
    assert len(tries) == 2
    assert ids(postgresql, "strictly") == logs.Model().kept(rows)


@POSTGRESQL
def test_a_second_driver_of_the_same_query_commits_nothing(frames, logs, inside_query, url):
    inside_query("q")
    rows = logs.random_topic(8)
    mine, theirs = SqlTable(url, "orders"), SqlTable(url, "orders")
    once, _ = filtered(mine)
    once(frames.split(rows[:40], 2), 0)
    told(theirs, 1)(rows_of(frames.split(rows[40:], 2)), 1)
    once(frames.split(rows[40:], 2), 1)
    before = ids(url)
    with pytest.raises(MarksFenced, match="batch 1 of query q"):
        theirs.write(BatchMarks("q", 1), keep=3)
    assert ids(url) == before


def test_a_task_that_runs_twice_stages_once(frames, logs, url):
    frame = rows_of(frames.split(logs.random_topic(9), 1))
    table = SqlTable(url, "orders")
    told(table, 0)(frame.where("false"), 0)
    batches = frame.toArrow().to_batches()
    for _ in range(2):
        list(stage_rows(dialect_of(url), "orders_staging", ("q", 0, "attempt"), iter(batches)))
    assert query(url, "SELECT count(*) FROM orders_staging") == [(frame.count(),)]


def test_faults_f8_rows_of_a_batch_that_nobody_told_are_refused(spark, url):
    with pytest.raises(BadSink, match="nobody told the sink whose batch this is"):
        told(SqlTable(url, "orders"), 0)(spark.sql("SELECT 't' topic, 0 partition, 7L `offset`"), 1)


def test_marks_without_their_rows_are_refused(url):
    with pytest.raises(BadSink, match="as handler and as marks"):
        SqlTable(url, "orders").write(BatchMarks("q", 0), keep=3)


def test_marks_that_were_damaged_or_moved_are_refused_by_the_name_that_other_stores_have(url):
    table = SqlTable(url, "orders")
    table.write(BatchMarks("q", 0, first=1), keep=2)  # adopted: without rows
    for damage, why in (("batch_id = 1", "holds batch 0 of query q"), ("marks = substr(marks, 1, 8)", "too few")):
        query(url, f"UPDATE orders_marks SET {damage} RETURNING 1")
        with pytest.raises(MarksStoreDamaged, match=why):
            table.read("q", 1)


@SQLITE
def test_an_adopted_table_goes_on_behind_the_adopted_batch(frames, logs, inside_query, url):
    inside_query("old")
    rows = logs.random_topic(10)
    once, _ = filtered(SqlTable(url, "orders"))
    for n, part in enumerate((rows[:30], rows[30:60], rows[60:])):
        once(frames.split(part, 2), n)
    inside_query("new")
    again, _ = filtered(SqlTable(url, "orders", adopt=("old", 1)), adopt=("old", 1))
    again(frames.split(rows[60:], 2), 0)
    assert ids(url) == logs.Model().kept(rows)
    assert SqlTable(url, "orders").owner() == "new"


@SQLITE
def test_faults_s7_another_carrier_is_refused_until_a_fresh_checkpoint_adopts(frames, logs, inside_query, url):
    rows = [logs.Row("t", 0, n, StreamMetadata(7, 0, n), None, f"{n}") for n in range(4)]
    table = SqlTable(url, "orders")
    inside_query("q")
    ReplayFilteredBatches(Sink(table), table)(frames.split(rows[:2], 1), 0)
    again = ReplayFilteredBatches(Sink(table), table, carrier="header")
    with pytest.raises(WrongCarrier, match="carrier is 'key' in the marks at") as refused:
        again(frames.split(rows[2:], 1, "header"), 1)
    assert ids(url) == {"0", "1"}
    query_id, batch = re.search(r"--adopt (\w+):(\d+)", str(refused.value)).groups()
    inside_query("fresh")
    adopt = (query_id, int(batch))
    table = SqlTable(url, "orders", adopt=adopt)
    fresh = ReplayFilteredBatches(Sink(table), table, carrier="header", adopt=adopt)
    fresh(frames.split(rows[2:], 1, "header"), 0)
    assert ids(url) == {"0", "1", "2", "3"}


def test_every_type_that_a_column_can_have_comes_back(spark, url):
    frame = spark.sql(
        "SELECT 't' topic, 0 partition, 7L `offset`, true yes, 1Y tiny, 2S small, 3 whole, 4L large, 1.5F single, "
        "2.5D double, 12.34BD money, 'text' `a \"text\"`, X'00ff' bytes, DATE'2013-01-02' day, "
        "TIMESTAMP'2013-01-02 03:04:05.678Z' time, CAST(NULL AS bigint) absent"
    )
    table = SqlTable(url, "orders")
    told(table, 0)(frame, 0)
    table.write(BatchMarks("q", 0), keep=3)
    [row] = query(
        url, 'SELECT yes, tiny, small, whole, large, single, double, money, "a ""text""", bytes, absent FROM orders'
    )
    assert row[:7] == (True, 1, 2, 3, 4, 1.5, 2.5)
    assert (Decimal(row[7]), row[8], bytes(row[9]), row[10]) == (Decimal("12.34"), "text", b"\x00\xff", None)
    [(day, time)] = query(url, "SELECT day, time FROM orders")
    assert (str(day), str(time)[:19]) == ("2013-01-02", "2013-01-02 03:04:05")
    if isinstance(time, dt.datetime):
        assert time == dt.datetime(2013, 1, 2, 3, 4, 5, 678000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("'t' topic, 0 partition, 1 value", "offset"),
        ("'t' topic, 0 partition, 1L `offset`, array(1) many", "many"),
        ("'t' topic, 0 partition, 1L `offset`, 1 pushrep_batch", "pushrep_batch"),
        ("'t' topic, 0 partition, 1L `offset`, 1 `why?`", "why?"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused_by_name(spark, columns, named, tmp_path):
    with pytest.raises(BadSink) as refusal:
        SqlTable(f"sqlite:{tmp_path / 'x.db'}", "orders")(spark.sql(f"SELECT {columns}"), 0)
    assert refusal.value.value == named


@pytest.mark.parametrize(
    ("url", "table"), [("mysql://x", "t"), ("sqlite:x", ""), ("sqlite:x", "a."), ("sqlite:x", "a?")]
)
def test_settings_that_name_no_table_are_refused(url, table):
    with pytest.raises(BadSink):
        SqlTable(url, table)


def test_no_password_is_told(postgresql):
    table = SqlTable("postgresql://someone:secret@127.0.0.1:1/db", "orders")
    assert "secret" not in table.location
    assert table.location == "postgresql://127.0.0.1/db table orders"


def test_rows_that_are_read_again_are_replaced_with_the_marks_of_their_batch(spark, url):
    def rows(low, high, text):
        return spark.range(low, high, 1, 1).selectExpr(
            "'t' as topic", "0 as partition", "id as `offset`", f"concat('{text}', id) as value"
        )

    table = SqlTable(url, "orders")
    for number in range(2):
        told(table, number)(rows(number * 4, number * 4 + 4, "old"), number)
        table.write(BatchMarks("q", number), keep=2)
    again = LogRange("t", 0, 2, 6)
    assert told(table, 2).held_until(spark, again, 2) == 8
    assert table.held_until(spark, again._replace(partition=1), 2) == 0
    assert sorted(row[0] for row in told(table, 1).held(spark, again, 1).collect()) == [2, 3], (
        "of other batches than this one"
    )
    old = {f"old{n}" for n in range(8)}
    told(table, 2)
    table.replace(rows(2, 6, "new"), 2, [again])
    assert ids(url) == old, "nothing of it is seen before the marks are there"
    table.replace(rows(2, 6, "new"), 2, [again])
    table.write(BatchMarks("q", 2), keep=2)
    assert ids(url) == {*old, *(f"new{n}" for n in range(2, 6))} - {f"old{n}" for n in range(2, 6)}
