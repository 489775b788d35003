"""Rows of a service's transactions reach the outbox once, whatever ends in between."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

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
from pushrep.tables.database import RelayDatabase
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
