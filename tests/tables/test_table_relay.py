"""Rows of a service's transactions reach the outbox once, whatever ends in between."""

import errno
import json
import shutil
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

from pushrep import Durability, Outbox
from pushrep.errors import BadArgument
from pushrep.log import StillNeeded
from pushrep.outbox.relay_note import RelayNotes
from pushrep.tables import (
    EVENT_ID,
    AnotherRelay,
    DatabaseWentBack,
    EventId,
    OutboxTable,
    OutboxWentBack,
    RowRefused,
    TableRelay,
    TablesDiffer,
)
from pushrep.tables.database import Holder, Page, RelayDatabase, RelayState
from pushrep.tables.decide import BatchState
from pushrep.tables.relay import chunks_of
from tests.tables.conftest import OrderPlaced, engine_of, open_outbox, relayed


@pytest.fixture
def table():
    return OutboxTable(MetaData())


@pytest.fixture
def orders(table, engine):
    topic = table.topic("orders", OrderPlaced, partitions=2, key=lambda one: one.customer)
    for one in table.tables:
        if one is not None:
            one.metadata.create_all(engine)
    return topic


def place(engine, orders, *numbers, customer="c"):
    with Session(engine) as session, session.begin():
        for number in numbers:
            orders.add(session, OrderPlaced(number, f"{customer}{number % 5}"))


def relay_until(outbox, dsn, count, **settings):
    """Relay until the logs hold `count` records, and none waits."""
    stop = threading.Event()
    relay = TableRelay(outbox, dsn, poll_ms=1, **settings)
    failed = []

    def run():
        try:
            relay.run(stop)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and (
        sum(outbox.log(n).log_end_offset for n in range(2)) < count or relay.status().rows.waiting
    ):
        thread.join(0.01)
    stop.set()
    thread.join()
    if failed:
        raise failed[0]


def test_committed_rows_are_relayed_once_and_rolled_back_ones_are_not(engine, dsn, orders, tmp_path):
    place(engine, orders, *range(20))
    with Session(engine) as session:
        orders.add(session, OrderPlaced(99, "x"))
        assert len(orders.pending(session)) == 21
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 20)
        place(engine, orders, *range(20, 30))
        relay_until(outbox, dsn, 30)
        assert sorted(number for _, number in relayed(outbox)) == list(range(30))
        ids = [EventId.parse(dict(record.headers)[EVENT_ID]) for n in range(2) for record in outbox.log(n).records(0)]
    assert len(set(ids)) == 30
    assert {one[:2] for one in ids} == {(1, 1), (1, 2)}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pushrep_outbox")).scalar() == 0
        assert connection.execute(text("SELECT relayed FROM pushrep_outbox_relay")).scalar() == 30


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_row_is_not_serialized_again_by_the_outbox_of_the_service(engine, dsn, orders, tmp_path):
    place(engine, orders, 1)
    with open_outbox(tmp_path / "outbox", serializer=lambda _: b"again", key_serializer=lambda _: b"again") as outbox:
        relay_until(outbox, dsn, 1)
        assert [number for _, number in relayed(outbox)] == [1]
        assert [record.key for n in range(2) for record in outbox.log(n).records(0)] == [b"c1"]


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12), limit=st.integers(1, 20))
def test_rows_are_appended_in_order_in_as_few_appends_as_their_bytes_allow(sizes, limit):
    chunks = list(chunks_of(Page(*[range(len(sizes))] * 7, sizes), limit))
    assert [row for one in chunks for row in one.id] == list(range(len(sizes)))
    for one, following in zip(chunks, [*chunks[1:], None], strict=True):
        assert sum(one.size_bytes) <= limit or len(one.id) == 1
        assert one.id, "an append of nothing is refused"
        if following is not None:
            assert sum(one.size_bytes) + following.size_bytes[0] > limit, "the next row would have fitted"


def test_an_outbox_whose_keys_are_its_own_and_a_word_that_means_nothing_are_refused(dsn, tmp_path):
    with Outbox.open(tmp_path / "keys", "orders", 1, "shop") as outbox, pytest.raises(BadArgument, match="'header'"):
        TableRelay(outbox, dsn)
    with open_outbox(tmp_path / "outbox") as outbox, pytest.raises(BadArgument, match="neither 'stop' nor 'park'"):
        TableRelay(outbox, dsn, on_refused="skip")


def test_one_refused_row_among_many_keeps_none_of_the_others_from_the_log(engine, dsn, orders, tmp_path):
    """They are appended together at first, and one by one once that is refused."""
    insert = text("INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', 0, :value)")
    with engine.begin() as connection:
        for number in range(20):
            connection.execute(insert, {"value": bytes(2_000_000) if number == 7 else b"%d" % number})
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 19, on_refused="park")
        assert [int(one.value) for one in outbox.log(0).records(0)] == [n for n in range(20) if n != 7], "in order"


@pytest.mark.parametrize("dsn", ["postgresql"], indirect=True)
def test_a_transaction_that_commits_late_is_relayed_late_and_keeps_nobody_waiting(engine, dsn, orders, tmp_path):
    """Its rows have lower ids than those that were relayed before: no reading behind the highest id would find them."""
    with open_outbox(tmp_path / "outbox") as outbox, Session(engine) as slow:
        orders.add(slow, OrderPlaced(0, "a"))
        place(engine, orders, 1, 2)
        relay_until(outbox, dsn, 2)
        assert sorted(number for _, number in relayed(outbox)) == [1, 2]
        slow.commit()
        relay_until(outbox, dsn, 3)
        assert sorted(number for _, number in relayed(outbox)) == [0, 1, 2]


@pytest.mark.parametrize("dsn", ["postgresql"], indirect=True)
def test_events_of_a_row_that_was_locked_first_are_in_the_order_of_its_changes(engine, dsn, orders, tmp_path):
    """A transaction that has its number early, and gets the lock late."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE account (id int primary key, n int)"))
        connection.execute(text("INSERT INTO account VALUES (1, 0)"))
        connection.execute(text("CREATE TABLE elsewhere (id int)"))
    turn = threading.Event()

    def late():
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO elsewhere VALUES (1)"))
            turn.set()
            order = connection.execute(text("UPDATE account SET n = n + 1 RETURNING n")).scalar()
            orders.add(connection, OrderPlaced(order, "a"))

    with open_outbox(tmp_path / "outbox") as outbox:
        with engine.begin() as connection:
            order = connection.execute(text("UPDATE account SET n = n + 1 RETURNING n")).scalar()
            thread = threading.Thread(target=late)
            thread.start()
            assert turn.wait(10)
            orders.add(connection, OrderPlaced(order, "a"))
        thread.join()
        relay_until(outbox, dsn, 2)
        assert [number for _, number in relayed(outbox)] == [1, 2]


@pytest.mark.parametrize("dsn", ["postgresql"], indirect=True)
def test_savepoints_and_prepared_transactions(engine, dsn, orders, tmp_path):
    with open_outbox(tmp_path / "outbox") as outbox:
        with Session(engine) as session, session.begin():
            orders.add(session, OrderPlaced(1, "a"))
            inner = session.begin_nested()
            orders.add(session, OrderPlaced(2, "a"))
            inner.rollback()
            with session.begin_nested():
                orders.add(session, OrderPlaced(3, "a"))
        relay_until(outbox, dsn, 2)
        assert sorted(number for _, number in relayed(outbox)) == [1, 3]


def test_a_batch_that_was_cut_short_is_gone_on_with(engine, dsn, orders, tmp_path, monkeypatch):
    """Killed behind the appends and before the rows are deleted: the next start leaves out what is there."""
    place(engine, orders, *range(10))
    close = RelayDatabase.close_batch

    class Killed(BaseException):
        pass

    def killed(*_given):
        raise Killed

    monkeypatch.setattr(RelayDatabase, "close_batch", killed)
    with open_outbox(tmp_path / "outbox") as outbox:
        with pytest.raises(Killed):
            TableRelay(outbox, dsn).run()
        assert len(relayed(outbox)) == 10
    monkeypatch.setattr(RelayDatabase, "close_batch", close)
    place(engine, orders, *range(10, 15))
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 15)
        assert sorted(number for _, number in relayed(outbox)) == list(range(15))


def test_a_second_outbox_of_the_same_rows_is_refused_by_name(engine, dsn, orders, tmp_path):
    place(engine, orders, 1)
    with open_outbox(tmp_path / "one") as outbox:
        relay_until(outbox, dsn, 1)
        mine = outbox.identity.outbox_id
    place(engine, orders, 2)
    with open_outbox(tmp_path / "two") as outbox:
        with pytest.raises(AnotherRelay, match=mine):
            TableRelay(outbox, dsn).run()
        assert relayed(outbox) == []


def test_an_outbox_that_lacks_what_the_database_gave_it_is_refused(engine, dsn, orders, tmp_path):
    directory, backup = tmp_path / "outbox", tmp_path / "backup"
    with open_outbox(directory):
        pass
    shutil.copytree(directory, backup)
    place(engine, orders, 1, 2, 3)
    with open_outbox(directory) as outbox:
        relay_until(outbox, dsn, 3)
    shutil.rmtree(directory)
    shutil.copytree(backup, directory)
    with open_outbox(directory) as outbox, pytest.raises(OutboxWentBack, match="pushrep tables adopt"):
        TableRelay(outbox, dsn).run()


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_database_that_was_restored_is_refused(engine, dsn, orders, tmp_path):
    place(engine, orders, 1)
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 1)
        engine.dispose()
        file = Path(dsn.removeprefix("sqlite:///"))
        backup = file.read_bytes()
        place(engine, orders, 2, 3)
        relay_until(outbox, dsn, 3)
    engine.dispose()
    file.write_bytes(backup)
    with open_outbox(tmp_path / "outbox") as outbox, pytest.raises(DatabaseWentBack, match="batch 1-2"):
        TableRelay(outbox, dsn).run()


def test_a_database_that_goes_back_under_a_running_relay_is_named(engine, dsn, orders, tmp_path, monkeypatch):
    """As by a failover to a standby that lacks the last commits, behind a pooler that hides it."""
    close = RelayDatabase.close_batch

    def closing(database, state, *given):
        if state.batch.batch == 2:
            with engine.begin() as connection:
                connection.execute(text("UPDATE pushrep_outbox_relay SET batch = 1, is_open = 0"))
        return close(database, state, *given)

    monkeypatch.setattr(RelayDatabase, "close_batch", closing)
    with open_outbox(tmp_path / "outbox") as outbox:
        place(engine, orders, 1)
        relay_until(outbox, dsn, 1)
        place(engine, orders, 2)
        with pytest.raises(DatabaseWentBack, match="batch 1-2"):
            TableRelay(outbox, dsn).run()


def test_a_row_that_is_refused_stops_the_relay_or_is_parked(engine, dsn, orders, tmp_path):
    """A row that somebody inserted by hand."""
    place(engine, orders, 1)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO pushrep_outbox (topic, partition) VALUES ('orders', 7)"))
    place(engine, orders, 2)
    with open_outbox(tmp_path / "outbox") as outbox:
        with pytest.raises(RowRefused, match=r"row 2 of topic orders .* partition"):
            TableRelay(outbox, dsn).run()
        relay_until(outbox, dsn, 2, on_refused="park")
        assert sorted(number for _, number in relayed(outbox)) == [1, 2]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM pushrep_outbox_parked")).scalars().all() == [2]


def test_a_copy_of_the_outbox_is_refused_by_name(engine, dsn, orders, tmp_path):
    place(engine, orders, 1)
    with open_outbox(tmp_path / "one") as outbox:
        relay_until(outbox, dsn, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    place(engine, orders, 2)
    with open_outbox(tmp_path / "two") as copy, pytest.raises(AnotherRelay, match="by directory"):
        TableRelay(copy, dsn).run()
    with open_outbox(tmp_path / "one") as outbox:
        relay_until(outbox, dsn, 2)


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_backlog_in_sqlite_is_many_batches_so_that_the_service_may_write_between_them(
    engine, dsn, orders, tmp_path, monkeypatch
):
    monkeypatch.setattr("pushrep.tables.database.LOCKED_ROWS", 10)
    place(engine, orders, *range(25))
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 25)
        assert sorted(number for _, number in relayed(outbox)) == list(range(25))
        ids = [EventId.parse(dict(record.headers)[EVENT_ID]) for n in range(2) for record in outbox.log(n).records(0)]
    assert sorted(one.batch for one in ids) == [1] * 10 + [2] * 10 + [3] * 5


def test_each_topic_has_its_own_relay(engine, dsn, table, orders, tmp_path):
    refunds = table.topic("refunds", OrderPlaced, partitions=2)
    for number in range(0, 20, 2):
        place(engine, orders, number)
        place(engine, refunds, number + 1)
    with open_outbox(tmp_path / "orders") as first, open_outbox(tmp_path / "refunds", "refunds") as second:
        relay_until(first, dsn, 10)
        assert relayed(second) == []
        relay_until(second, dsn, 10)
        for outbox, numbers in ((first, range(0, 20, 2)), (second, range(1, 20, 2))):
            assert sorted(number for _, number in relayed(outbox)) == list(numbers)
    with engine.connect() as connection:
        states = connection.execute(text("SELECT topic, relayed FROM pushrep_outbox_relay ORDER BY topic")).all()
    assert list(map(tuple, states)) == [("orders", 10), ("refunds", 10)]


def test_a_batch_is_closed_once_it_is_on_disk_and_until_then_nobody_removes_it(
    engine, dsn, orders, tmp_path, monkeypatch
):
    close, unflushed = RelayDatabase.close_batch, []

    def closing(database, *given):
        for log in map(outbox.log, range(2)):
            unflushed.append(log.log_end_offset - log.flushed_offset)
            with pytest.raises(StillNeeded, match="table relay"):
                log.delete_records(log.log_end_offset)
        return close(database, *given)

    monkeypatch.setattr(RelayDatabase, "close_batch", closing)
    place(engine, orders, *range(20))
    with open_outbox(tmp_path / "outbox", durability=Durability.BUFFERED) as outbox:
        relay_until(outbox, dsn, 20)
        assert unflushed == [0, 0]
        for log in map(outbox.log, range(2)):
            assert log.delete_records(log.log_end_offset) == log.log_end_offset


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_record_has_the_time_of_its_append_unless_add_gave_one(engine, dsn, orders, tmp_path):
    with engine.begin() as connection:
        orders.add(connection, OrderPlaced(1, "a"), timestamp_ms=5)
        orders.add(connection, OrderPlaced(2, "a"))
    with engine.begin() as connection:  # as if it had waited for long
        connection.execute(text("UPDATE pushrep_outbox SET created = '2020-01-02T03:04:05.678Z'"))
    began_ms = time.time_ns() // 1_000_000
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 2)
        records = [record for n in range(2) for record in outbox.log(n).records(0)]
    assert records[0].timestamp_ms == 5
    assert records[1].timestamp_ms >= began_ms
    assert {dict(record.headers)["created"] for record in records} == {b"2020-01-02T03:04:05.678Z"}


def test_a_state_of_another_version_is_refused_by_name(engine, dsn, orders, tmp_path):
    with open_outbox(tmp_path / "outbox") as outbox:
        place(engine, orders, 1)
        relay_until(outbox, dsn, 1)
        with engine.begin() as connection:
            connection.execute(text("UPDATE pushrep_outbox_relay SET version = 2"))
        with pytest.raises(TablesDiffer, match="version 2"):
            TableRelay(outbox, dsn).run()


def test_an_idle_relay_writes_nothing(engine, dsn, orders, tmp_path, monkeypatch):
    written = "SELECT xmin FROM pushrep_outbox_relay" if engine.dialect.name == "postgresql" else "PRAGMA data_version"
    polls, begin, polled = count(), RelayDatabase.begin_batch, threading.Event()

    def counted(database, state):
        if next(polls) == 10:
            polled.set()
        return begin(database, state)

    place(engine, orders, 1)
    with open_outbox(tmp_path / "outbox") as outbox, engine.connect() as connection:
        relay_until(outbox, dsn, 1)
        monkeypatch.setattr(RelayDatabase, "begin_batch", counted)
        before = connection.execute(text(written)).scalar()
        connection.rollback()
        with TableRelay(outbox, dsn, poll_ms=1):
            assert polled.wait(60)
        assert connection.execute(text(written)).scalar() == before


@pytest.mark.parametrize(("set_to", "seen"), [("off", "on"), ("remote_apply", "remote_apply")])
def test_what_the_relay_commits_is_on_disk_whatever_the_database_is_set_to(postgresql_dsn, tmp_path, set_to, seen):
    engine = engine_of(postgresql_dsn)
    metadata = MetaData()
    topic = OutboxTable(metadata).topic("orders", OrderPlaced, partitions=2)
    metadata.create_all(engine)
    with engine.begin() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f"ALTER DATABASE {name} SET synchronous_commit = {set_to}"))
        connection.execute(text("CREATE TABLE seen (setting text)"))
        connection.execute(
            text(
                "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$"
            )
        )
        note = (
            "CREATE TRIGGER note BEFORE INSERT OR UPDATE ON pushrep_outbox_relay FOR EACH ROW EXECUTE FUNCTION note()"
        )
        connection.execute(text(note))
    place(engine, topic, 1)
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, postgresql_dsn, 1)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT setting FROM seen")).scalars().all() == [seen] * 3
    engine.dispose()


def open_batch(dsn):
    """A relay's database with a batch that shows all rows."""
    database = RelayDatabase(dsn, "pushrep_outbox", "orders")
    database.check()
    state = RelayState(Holder("an outbox", "here", 0, 0), "this", BatchState(1, 0, False, {}), None, None, 0)
    database.create(state)
    return database, database.begin_batch(state)[0]


def test_a_page_ends_once_it_has_so_many_rows_or_bytes(engine, dsn, table, orders):
    blobs = table.topic("orders", bytes, partitions=1)
    with engine.begin() as connection:
        for size in (100_000, 100_000, 100_000, 900_000, 10, 10):
            blobs.add(connection, bytes(size), headers=[("h", b"v")])
    database, state = open_batch(dsn)
    pages, last = [], 0
    is_last = False
    while not is_last:
        with database.reading(state, rows_max=3, bytes_max=150_000) as read:
            page, is_last = read(last)
        last = page.id[-1]
        pages.append(list(map(len, page.value)))
    database.close()
    assert pages == [[100_000, 100_000], [100_000, 900_000], [10, 10]]


@pytest.mark.parametrize("dsn", ["postgresql"], indirect=True)
def test_a_batch_of_many_pages_and_a_large_row_is_relayed_in_order(engine, dsn, orders, tmp_path):
    rows = (
        "INSERT INTO pushrep_outbox (topic, partition, value) SELECT 'orders', n % 2, "
        "convert_to(n || repeat(' ', CASE n WHEN 8500 THEN 300000 ELSE 0 END), 'UTF8') FROM generate_series(0, 8999) n"
    )
    with engine.begin() as connection:
        connection.execute(text(rows))
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 9000)
        values = [[int(record.value) for record in outbox.log(n).records(0)] for n in range(2)]
    assert values == [list(range(0, 9000, 2)), list(range(1, 9000, 2))]


def test_pages_of_a_table_that_nobody_analysed_are_read_by_its_index(postgresql_dsn):
    """Else each page sorts all rows that wait, and a million of them take hours."""
    engine = engine_of(postgresql_dsn)
    metadata = MetaData()
    OutboxTable(metadata)
    metadata.create_all(engine)
    with engine.begin() as connection:
        rows = "INSERT INTO pushrep_outbox (topic, partition) SELECT 'orders', 0 FROM generate_series(1, 20000)"
        connection.execute(text(rows))
    database, state = open_batch(postgresql_dsn)
    with database.reading(state, rows_max=4_000, bytes_max=1 << 20) as read:
        assert len(read(0)[0].id) == 4_000
    database.close()  # a session tells what it counted when it ends
    read_rows = "SELECT seq_tup_read + idx_tup_read FROM pg_stat_user_tables JOIN pg_stat_user_indexes USING (relid)"
    with engine.connect() as connection:
        counted = connection.execute(text(f"{read_rows} WHERE indexrelname = 'pushrep_outbox_pkey'"))
        assert counted.scalar() < 5_000, "no more rows than the page has"
    engine.dispose()


def test_missing_tables_are_named(dsn, tmp_path):
    engine = engine_of(dsn)
    engine.connect().close()
    with open_outbox(tmp_path / "outbox") as outbox, pytest.raises(TablesDiffer, match="pushrep_outbox"):
        TableRelay(outbox, dsn).run()
    engine.dispose()


def test_rows_that_are_kept_go_to_their_own_table(engine, dsn, tmp_path):
    metadata = MetaData()
    topic = OutboxTable(metadata, keep_rows=True).topic("orders", OrderPlaced, partitions=2)
    metadata.create_all(engine)
    place(engine, topic, 1, 2)
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 2)
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT value FROM pushrep_outbox_kept ORDER BY id")).scalars()
        assert [json.loads(bytes(value))["order"] for value in kept] == [1, 2]


def test_a_commit_of_the_same_process_wakes_the_relay(engine, dsn, orders, table, tmp_path):
    with (
        open_outbox(tmp_path / "outbox") as outbox,
        TableRelay(outbox, dsn, table=table, poll_ms=3_600_000) as relay,
    ):
        waited = threading.Event()
        while sum(outbox.log(n).log_end_offset for n in range(2)) == 0:  # once it waits, each commit wakes it
            place(engine, orders, 1)
            waited.wait(0.05)
        assert relay.status().trouble is None


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_relay_that_looks_once_an_hour_ends_when_it_is_asked_to(dsn, orders, tmp_path):
    with open_outbox(tmp_path / "outbox") as outbox:
        stop = threading.Event()
        thread = threading.Thread(target=TableRelay(outbox, dsn, poll_ms=3_600_000).run, args=(stop,))
        thread.start()
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def test_a_database_from_before_its_first_relay_is_refused_by_name(engine, dsn, orders, tmp_path):
    """Restored to a moment at which no relay had ever run, or made anew: its rows are in the outbox already."""
    place(engine, orders, 1, 2)
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 2)
    place(engine, orders, 1, 2)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM pushrep_outbox_relay"))
    with open_outbox(tmp_path / "outbox") as outbox:
        with pytest.raises(DatabaseWentBack, match="batch 1-1"):
            relay_until(outbox, dsn, 4)
        assert len(relayed(outbox)) == 2


def test_an_idle_relay_and_one_that_ended_keep_nothing_of_a_closed_batch(engine, dsn, orders, tmp_path, monkeypatch):
    """What somebody appends by hand meanwhile is retention's; the next start knows that it was not the relay's."""
    monkeypatch.setattr("pushrep.tables.relay.WATCH_S", 0.0)
    place(engine, orders, 1)
    with open_outbox(tmp_path / "outbox") as outbox:
        relay_until(outbox, dsn, 1)
        by_hand = outbox.append(0, b"{}").result(60)
        waits = threading.Event()
        with TableRelay(outbox, dsn, poll_ms=1):
            while outbox.facts.relay_notes.needed_from(0) != by_hand + 1:
                waits.wait(0.01)
            outbox.log(0).delete_records(by_hand + 1)
            by_hand = outbox.append(0, b"{}").result(60)
        outbox.log(0).delete_records(by_hand + 1)
        place(engine, orders, 2)
        relay_until(outbox, dsn, by_hand + 2)


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_full_disk_that_takes_no_note_is_a_trouble_that_passes(engine, dsn, orders, tmp_path, monkeypatch):
    is_full, write, waits = threading.Event(), RelayNotes.write, threading.Event()

    def writing(notes, note):
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(notes, note)

    monkeypatch.setattr(RelayNotes, "write", writing)
    is_full.set()
    place(engine, orders, 1)
    with open_outbox(tmp_path / "outbox") as outbox:
        with TableRelay(outbox, dsn, poll_ms=1) as relay:
            while "No space left" not in str(relay.status().trouble):
                waits.wait(0.01)
            assert relayed(outbox) == []
            is_full.clear()
            while (rows := relay.status().rows) is None or rows.waiting:
                waits.wait(0.01)
            is_full.set()
        assert len(relayed(outbox)) == 1


@pytest.mark.parametrize(
    ("newest", "of_the_outbox"),
    [("rows", OutboxWentBack), ("rows of one partition", OutboxWentBack), ("refused rows", AnotherRelay)],
)
def test_one_side_that_is_behind_by_batches_is_refused_whatever_these_held(
    engine, dsn, orders, tmp_path, newest, of_the_outbox
):
    """Of refused rows the outbox lacks nothing: a copy of it is refused as such."""
    directory, backup = tmp_path / "outbox", tmp_path / "backup"
    place(engine, orders, 1)
    with open_outbox(directory) as outbox:
        relay_until(outbox, dsn, 1)
    shutil.copytree(directory, backup)
    with engine.connect() as connection:
        before = connection.execute(
            text("SELECT epoch, batch, is_open, ends, snapshot FROM pushrep_outbox_relay")
        ).one()
    with open_outbox(directory) as outbox:
        for number in (5, 10):  # of one key
            if newest == "refused rows":
                with engine.begin() as connection:
                    connection.execute(text("INSERT INTO pushrep_outbox (topic, partition) VALUES ('orders', 7)"))
            else:
                place(engine, orders, *range(number, number + (5 if newest == "rows" else 1)))
            relay_until(outbox, dsn, 0, on_refused="park")
    shutil.move(directory, tmp_path / "newest")
    shutil.copytree(backup, directory)
    with open_outbox(directory) as outbox, pytest.raises(of_the_outbox):
        relay_until(outbox, dsn, 99)
    sets = ", ".join(f"{name} = :{name}" for name in before._fields)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE pushrep_outbox_relay SET {sets}"), before._asdict())
    with open_outbox(tmp_path / "newest") as outbox, pytest.raises(DatabaseWentBack, match="batch 1-3"):
        relay_until(outbox, dsn, 99)
