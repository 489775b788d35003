"""How far a relay is, as the outbox's status, metrics, page and command line show it: contracts' D6."""

import threading
import time
from contextlib import contextmanager, suppress

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

from pushrep.outbox import status as outbox_status
from pushrep.status import Blocks
from pushrep.status.metrics import StatusCollector
from pushrep.status.text import status_lines
from pushrep.tables import OldestSnapshot, OutboxTable, RelayStatus, TableRelay, TableRows
from pushrep.tables.database import RelayDatabase
from tests.tables.conftest import engine_of, open_outbox


@pytest.fixture
def orders(engine):
    metadata = MetaData()
    topic = OutboxTable(metadata).topic("orders", bytes, partitions=2)
    metadata.create_all(engine)
    return topic


@pytest.fixture
def quick(monkeypatch):
    """The database is asked often, and trouble is one at once."""
    monkeypatch.setattr("pushrep.tables.relay.WATCH_S", 0.01)
    monkeypatch.setattr(outbox_status, "PAUSE_MS", 0)


def place(engine, orders, *values):
    with Session(engine) as session, session.begin():
        for value in values:
            orders.add(session, value)


@contextmanager
def relaying(outbox, dsn, **settings):
    """What the relay is stopped by is no matter here."""
    relay = TableRelay(outbox, dsn, poll_ms=1, **settings).start()
    try:
        yield relay
    finally:
        with suppress(Exception):
            relay.close()


def until(holds):
    looked = threading.Event()
    while not holds():
        looked.wait(0.01)


def words(outbox):
    return [one.name for one in outbox.status().problems()]


def metrics(outbox):
    registry = CollectorRegistry()
    registry.register(StatusCollector(outbox.status))
    lines = generate_latest(registry).decode().splitlines()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("pushrep_table")}


def test_lag_and_rows_relayed_are_in_the_outboxs_status_and_end_with_the_relay(engine, dsn, orders, tmp_path, quick):
    with open_outbox(tmp_path / "outbox") as outbox:
        assert outbox.status().relay is None
        with relaying(outbox, dsn):
            place(engine, orders, b"a", b"b", b"c")
            until(lambda: outbox.status().relay.relayed == 3)
            until(lambda: (rows := outbox.status().relay.rows) is not None and rows.waiting == 0)
            shown = metrics(outbox)
            assert shown["pushrep_table_relayed_rows_total"] == 3
            assert shown["pushrep_table_lag_rows"] == shown["pushrep_table_lag_seconds"] == 0
            said = "\n".join(status_lines({"place": "here", **outbox.status().as_dict()}, None))
            assert "table: 3 rows relayed, 0 wait" in said
            assert words(outbox) == []
        assert outbox.status().relay is None


def test_a_relay_that_is_stopped_by_a_row_is_a_problem_until_it_is_closed(engine, dsn, orders, tmp_path, quick):
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO pushrep_outbox (topic, partition) VALUES ('orders', 7)"))
    with open_outbox(tmp_path / "outbox") as outbox:
        with relaying(outbox, dsn):
            until(lambda: words(outbox) == ["table_stopped"])
            [problem] = outbox.status().problems()
            assert problem.blocked is Blocks.SHIPPING
            assert "row 1 of topic orders can't be appended" in problem.why
            assert problem.as_dict("here")["command"] == "pushrep tables status DSN --topic orders"
            assert outbox.status().is_ready, "the service takes requests: its rows wait"
            assert metrics(outbox)["pushrep_table_lag_rows"] == 1
        assert words(outbox) == []
        with relaying(outbox, dsn, on_refused="park"):
            until(lambda: words(outbox) == ["rows_parked"])
            assert metrics(outbox)["pushrep_table_parked_rows"] == 1


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_relay_that_is_stopped_before_anybody_looked_still_shows_what_waits(
    engine, dsn, orders, tmp_path, quick, monkeypatch
):
    monkeypatch.setattr(TableRelay, "_watch", lambda _relay, _ended: None)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO pushrep_outbox (topic, partition) VALUES ('orders', 7)"))
    with open_outbox(tmp_path / "outbox") as outbox, relaying(outbox, dsn):
        until(lambda: words(outbox) == ["table_stopped"])
        assert outbox.status().relay.rows.waiting == 1


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_a_database_that_takes_no_statement_is_a_problem_and_keeps_no_status_waiting(
    engine, dsn, orders, tmp_path, quick, monkeypatch
):
    monkeypatch.setattr("pushrep.tables.relay.PAUSE_MS", 0)
    hangs, asked = threading.Event(), threading.Event()
    with open_outbox(tmp_path / "outbox") as outbox, relaying(outbox, dsn):
        until(lambda: outbox.status().relay.rows is not None)
        asks = RelayDatabase.rows
        monkeypatch.setattr(RelayDatabase, "rows", lambda database: (asked.set(), hangs.wait(60), asks(database))[-1])
        asked.wait(60)
        until(lambda: words(outbox) == ["table_waits"])
        assert "does not answer" in outbox.status().problems()[0].why
        hangs.set()
        until(lambda: words(outbox) == [])


def test_a_relay_that_ends_while_its_database_hangs_leaves_no_connection_behind(postgresql_dsn, tmp_path, quick):
    engine, metadata = engine_of(postgresql_dsn), MetaData()
    OutboxTable(metadata).topic("orders", bytes, partitions=2)
    metadata.create_all(engine)
    engine.dispose()
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with open_outbox(tmp_path / "outbox") as outbox, psycopg.connect(postgresql_dsn, autocommit=True) as look:
        with psycopg.connect(postgresql_dsn) as migration, relaying(outbox, postgresql_dsn):
            until(lambda: outbox.status().relay.rows is not None)
            migration.execute("LOCK TABLE pushrep_outbox_parked")
            until(lambda: look.execute(f"SELECT 1 {others} AND wait_event_type = 'Lock'").fetchone())
        # The relay has ended; who looks for it goes on now.
        until(lambda: not look.execute(f"SELECT 1 {others}").fetchone())


def test_what_keeps_deleted_rows_from_vacuum_is_named(postgresql_dsn, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(outbox_status, "VACUUM_HELD_MS", 0)
    engine = engine_of(postgresql_dsn)
    metadata = MetaData()
    OutboxTable(metadata).topic("orders", bytes, partitions=2)
    metadata.create_all(engine)
    with open_outbox(tmp_path / "outbox") as outbox, relaying(outbox, postgresql_dsn):
        idle = psycopg.connect(postgresql_dsn)
        idle.execute("CREATE TABLE elsewhere (id int)")
        pid = idle.info.backend_pid
        until(lambda: any(f"process {pid} of postgres" in one.why for one in outbox.status().problems()))
        idle.rollback()
        idle.close()
        until(lambda: not any(f"process {pid} " in one.why for one in outbox.status().problems()))
    engine.dispose()


def test_an_old_snapshot_is_a_problem_by_its_age_or_by_its_transactions():
    def told(transactions, since_ms):
        rows = TableRows(0, None, 0, OldestSnapshot("prepared transaction a", transactions, since_ms), sees_all=True)
        return [one.name for one in RelayStatus("orders", 0, rows, None, None, is_stopped=False).find_problems()]

    now_ms = time.time_ns() // 1_000_000
    assert told(1, now_ms) == told(1, None) == []
    assert told(1, now_ms - 3_600_001) == told(10_000_000, None) == ["vacuum_held"]
