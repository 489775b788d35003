"""Rows of a service's transactions reach the outbox once, whatever ends in between."""

import threading

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

from pushrep.tables import (
    EVENT_ID,
    EventId,
    OutboxTable,
    TableRelay,
)
from tests.tables.conftest import OrderPlaced, open_outbox, relayed


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
        sum(outbox.log(n).log_end_offset for n in range(2)) < count or relay.status().waiting.rows
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
