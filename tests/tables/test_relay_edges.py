"""What a relay refuses, what it waits for, and that it ends when it is asked to, whatever it waits for."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

from pushrep import LogConfig, Outbox, OutboxConfig
from pushrep.env import RealFilesystem
from pushrep.errors import BadArgument
from pushrep.outbox import BufferFull
from pushrep.tables import AnotherRelay, DatabaseFailed, OutboxTable, TableRelay, TablesDiffer
from pushrep.tables.database import RelayDatabase
from tests.tables.conftest import engine_of, open_outbox
from tests.unit.gated_disk import GatedDisk


class GatedLogs(GatedDisk):
    """Syncs of segments alone wait while the gate is shut."""

    def open(self, path, *, create=False, writable=True):
        opened = super().open if path.suffix == ".log" else partial(RealFilesystem.open, self)
        return opened(path, create=create, writable=writable)


@pytest.fixture
def dsn(tmp_path):
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture
def engine(dsn):
    engine = engine_of(dsn)
    yield engine
    engine.dispose()


@pytest.fixture
def orders(engine):
    """A topic of texts, each of which is its own key."""
    metadata = MetaData()
    topic = OutboxTable(metadata).topic("orders", str, partitions=2, partition=lambda _: 1, serializer=str.encode)
    metadata.create_all(engine)
    return topic


def place(engine, orders, *events):
    with Session(engine) as session, session.begin():
        for one in events:
            orders.add(session, one)


def wait_until(holds, thread):
    deadline_s = time.monotonic() + 60
    while not holds():
        assert thread.is_alive(), "the relay ended"
        assert time.monotonic() < deadline_s
        thread.join(0.005)


@contextmanager
def relaying(outbox, dsn, **settings):
    """A relay in a thread, which is asked to end at the block's end and has to."""
    relay, stop, failed = TableRelay(outbox, dsn, poll_ms=1, **settings), threading.Event(), []

    def run():
        try:
            relay.run(stop)
        except Exception as error:  # noqa: BLE001 - any would be wrong
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield relay, thread
    finally:
        stop.set()
        thread.join(60)
    assert (thread.is_alive(), failed) == (False, [])


def test_a_relay_that_could_not_work_is_not_made(dsn, tmp_path):
    with Outbox.open(tmp_path / "key", "orders", 2, "shop") as of_keys, open_outbox(tmp_path / "outbox") as outbox:
        for given, dsn_given, more, why in (
            (of_keys, dsn, {}, "outbox: its carrier is 'key'"),
            (outbox, dsn, {"on_refused": "drop"}, "on_refused: 'drop' is neither 'stop' nor 'park'"),
            (outbox, dsn, {"poll_ms": 0}, "poll_ms"),
            (outbox, "shop", {}, "dsn: give a URL"),
            (outbox, "mysql://a/b", {}, "dsn: mysql is neither postgresql nor sqlite"),
            (outbox, "sqlite://", {}, "dsn: a database in memory"),
            (outbox, "sqlite:///:memory:", {}, "dsn: a database in memory"),
            (outbox, "postgresql+unknown://a/b", {}, r"dsn: .*unknown.*pip install 'pushrep\[tables\]'"),
        ):
            with pytest.raises(BadArgument, match=why):
                TableRelay(given, dsn_given, **more)


def test_a_row_that_was_refused_before_a_batch_was_cut_short_is_parked_with_the_reason(
    engine, dsn, orders, tmp_path, monkeypatch
):
    """Each row of its append is then tried alone, in order, and the next start knows by the rows behind it."""

    class Killed(BaseException):
        pass

    def killed(*_given):
        raise Killed

    place(engine, orders, *"abc", "d" * 3000, *"ef")
    config = OutboxConfig(log_config=LogConfig(batch_bytes_max=2000))
    with monkeypatch.context() as patched, open_outbox(tmp_path / "outbox", config=config) as outbox:
        patched.setattr(RelayDatabase, "close_batch", killed)
        with pytest.raises(Killed):
            TableRelay(outbox, dsn, on_refused="park").run()
        assert [record.value for record in outbox.log(1).records(0)] == [b"a", b"b", b"c", b"e", b"f"]
    parked = text("SELECT id, why FROM pushrep_outbox_parked")
    with open_outbox(tmp_path / "outbox", config=config) as outbox, engine.connect() as connection:
        with relaying(outbox, dsn, on_refused="park") as (relay, thread):
            wait_until(lambda: not relay.status().rows.waiting, thread)
        assert outbox.log(1).log_end_offset == 5, "nothing comes twice"
        assert connection.execute(parked).all() == [(4, "it was refused when the batch was appended first")]


def test_a_statement_that_the_database_refuses_ends_the_relay_in_one_line(engine, dsn, orders, tmp_path):
    place(engine, orders, "a")
    refuse = "CREATE TRIGGER no BEFORE INSERT ON pushrep_outbox_relay BEGIN SELECT RAISE(ABORT, 'not here'); END"
    with engine.begin() as connection:
        connection.execute(text(refuse))
    with open_outbox(tmp_path / "outbox") as outbox, pytest.raises(DatabaseFailed, match=r"^the database: not here$"):
        TableRelay(outbox, dsn).run()


def test_a_state_that_is_another_s_by_now_is_not_written_over(engine, dsn, orders, tmp_path):
    with open_outbox(tmp_path / "outbox") as outbox:
        with relaying(outbox, dsn) as (relay, thread):
            wait_until(lambda: relay.status().rows is not None and state_in(dsn) is not None, thread)
        database = RelayDatabase(dsn, "pushrep_outbox", "orders")
        state = database.state()
        with pytest.raises(AnotherRelay, match=outbox.identity.outbox_id):
            database.create(state)
        with engine.begin() as connection:
            connection.execute(text("UPDATE pushrep_outbox_relay SET ends = 'nonsense'"))
        with pytest.raises(TablesDiffer, match="`ends` holds no JSON"):
            database.state()
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM pushrep_outbox_relay"))
        with pytest.raises(AnotherRelay, match="its state was removed"):
            database.change(state, replace(state, relayed=7))
        assert database.state() is None
        database.close()


def state_in(dsn):
    database = RelayDatabase(dsn, "pushrep_outbox", "orders")
    try:
        return database.state()
    finally:
        database.close()


@pytest.fixture
def appends(monkeypatch):
    """How many values each append of a relay was given."""
    counts, append = [], Outbox.append_serialized_many

    def counted(outbox, partition, values, **more):
        counts.append(len(values))
        return append(outbox, partition, values, **more)

    monkeypatch.setattr(Outbox, "append_serialized_many", counted)
    return counts


def test_rows_of_one_append_are_so_many_bytes_or_one_row(engine, dsn, orders, tmp_path, monkeypatch, appends):
    """The limit is 1,000 bytes, and a row counts 100 more than its value."""
    monkeypatch.setattr("pushrep.tables.relay._CHUNK_BYTES", 1000)
    sizes = [500, 500, 1001, 101, 1001, 500, 500, 101, 101, 798, 101]
    place(engine, orders, *("a" * (size - 100) for size in sizes))
    with open_outbox(tmp_path / "outbox") as outbox, relaying(outbox, dsn) as (relay, thread):
        wait_until(lambda: not relay.status().rows.waiting, thread)
        assert [len(record.value) + 100 for record in outbox.log(1).records(0)] == sizes
    assert appends == [2, 1, 1, 1, 2, 3, 1]


def test_a_disk_that_answers_nothing_is_told_and_keeps_no_relay_from_ending(engine, dsn, orders, tmp_path, monkeypatch):
    monkeypatch.setattr("pushrep.tables.relay._RECEIPT_S", 0.001)
    waits = f"the outbox has not acknowledged what was appended: pushrep status {tmp_path / 'outbox'}"
    disk = GatedLogs()
    with open_outbox(tmp_path / "outbox", filesystem=disk) as outbox:
        with disk.hanging(), relaying(outbox, dsn) as (relay, thread):
            wait_until(lambda: state_in(dsn) is not None, thread)
            place(engine, orders, "a")
            wait_until(lambda: relay.status().trouble is not None, thread)
            assert relay.status().trouble == waits
        with relaying(outbox, dsn) as (relay, thread):
            wait_until(lambda: not relay.status().rows.waiting, thread)
            assert relay.status().trouble is None, "an append that is there again ends it"


def test_a_relay_that_begins_on_a_disk_that_answers_nothing_says_so_and_ends(dsn, orders, tmp_path, monkeypatch):
    """What others appended before has to be on disk first."""
    monkeypatch.setattr("pushrep.tables.relay._RECEIPT_S", 0.001)
    disk = GatedLogs()
    with open_outbox(tmp_path / "outbox", filesystem=disk) as outbox, disk.hanging():
        outbox.append(0, b"before it")
        with relaying(outbox, dsn) as (relay, thread):
            wait_until(lambda: relay.status().trouble is not None, thread)
            assert "has not acknowledged what was appended" in relay.status().trouble


def test_a_full_buffer_keeps_no_relay_from_ending(engine, dsn, orders, tmp_path, appends):
    disk = GatedLogs()
    config = OutboxConfig(buffer_bytes=1 << 20, block_ms=0)
    with (
        open_outbox(tmp_path / "outbox", filesystem=disk, config=config) as outbox,
        disk.hanging(),
        relaying(outbox, dsn) as (_, thread),
    ):
        wait_until(lambda: state_in(dsn) is not None, thread)
        fill(outbox)
        place(engine, orders, *["a" * 200] * 20)
        wait_until(lambda: len(appends) > 1, thread)
        assert appends[:2] == [20, 20], "it is tried again"


def fill(outbox):
    for _ in range(1000):
        try:
            outbox.append(0, bytes(3000))
        except BufferFull:
            return
    pytest.fail("the buffer takes 3 MB")
