"""A table relay into an outbox with replicas: members that are away, and another member that leads."""

import threading
from contextlib import contextmanager

import pytest
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import Session

from pushrep import Acks
from pushrep.tables import AnotherRelay, OutboxTable, TableRelay
from tests.integration.test_failover import Members, open_outbox, wait_until

HEADER = {"carrier": "header"}


class Shop:
    """A database with rows for one partition."""

    def __init__(self, directory):
        self.dsn = f"sqlite:///{directory / 'shop.db'}"
        metadata = MetaData()
        self.topic = OutboxTable(metadata).topic("orders", bytes, partitions=1)
        self.engine = create_engine(self.dsn)
        metadata.create_all(self.engine)

    def place(self, *values):
        with Session(self.engine) as session, session.begin():
            for value in values:
                self.topic.add(session, value)

    def waiting(self):
        with Session(self.engine) as session:
            return len(self.topic.pending(session))

    @contextmanager
    def relay(self, outbox):
        """A relay that runs; what stopped it is raised at the end."""
        with TableRelay(outbox, self.dsn, poll_ms=1) as relay:
            yield relay


@pytest.fixture
def shop(tmp_path):
    made = Shop(tmp_path)
    yield made
    made.engine.dispose()


@pytest.fixture
def members(world):
    return Members(world)


def values_of(outbox):
    return [record.value for record in outbox.log(0).records(0)]


def test_members_that_are_away_stop_no_relay_for_good(members, shop):
    """While too few are in sync no row is deleted; once they are back it goes on, and each row is there once."""
    with members.lead(**HEADER) as outbox, shop.relay(outbox) as relay:
        shop.place(b"a")
        wait_until(lambda: shop.waiting() == 0, "the first row is relayed")
        for index in (1, 2):
            members.world.nodes[index].stop()
        shop.place(b"b", b"c")
        wait_until(lambda: relay.status().trouble is not None, "it says what it waits for")
        assert not relay.status().is_stopped
        assert shop.waiting() == 2
        for index in (1, 2):
            members.world.node(index)
        wait_until(lambda: shop.waiting() == 0, "it goes on")
        assert values_of(outbox) == [b"a", b"b", b"c"]


def test_another_member_that_leads_goes_on_and_the_old_relay_stops_by_name(members, shop):
    with members.lead(**HEADER) as outbox, shop.relay(outbox):
        shop.place(b"a", b"b")
        wait_until(lambda: shop.waiting() == 0, "relayed")
    shop.place(b"c")
    members.promote(1, depose=True)
    with open_outbox(members.directory(1), [members.address(2)], **HEADER) as promoted:
        with shop.relay(promoted):
            wait_until(lambda: shop.waiting() == 0, "the new leader's relay goes on")
        assert values_of(promoted) == [b"a", b"b", b"c"]


def test_a_leader_without_a_grant_relays_nothing(members, shop):
    """With acks LOCAL it takes appends while too few members answer, and another one may lead."""
    with members.lead(**HEADER) as outbox, shop.relay(outbox):
        shop.place(b"a")
        wait_until(lambda: shop.waiting() == 0, "relayed")
    for index in (1, 2):
        members.world.nodes[index].stop()
    shop.place(b"b")
    alone = members.lead(**HEADER, acks=Acks.LOCAL, open_timeout_s=0.2)
    with alone as outbox, shop.relay(outbox) as relay:
        wait_until(lambda: relay.status().trouble is not None, "it says what it waits for")
        assert values_of(outbox) == [b"a"]
        assert shop.waiting() == 1


def test_a_relay_whose_state_a_newer_grant_took_stops_by_name(members, shop):
    """The deposed leader has not heard of it: what it writes into the database is conditional on its grant."""
    with members.lead(**HEADER, acks=Acks.LOCAL) as old:
        with shop.relay(old):
            shop.place(b"a")
            wait_until(lambda: shop.waiting() == 0, "relayed")
        gate, stop = threading.Event(), threading.Event()
        relay = TableRelay(old, shop.dsn, poll_ms=1)
        thread = threading.Thread(target=lambda: (gate.wait(60), _run(relay, stop)))
        thread.start()
        with shop.engine.begin() as connection:  # as the relay of the newer grant does
            connection.exec_driver_sql("UPDATE pushrep_outbox_relay SET leader_epoch = leader_epoch + 256")
        gate.set()
        thread.join(60)
        assert isinstance(FAILED.pop(), AnotherRelay)


FAILED: list[Exception] = []


def _run(relay, stop):
    try:
        relay.run(stop)
    except Exception as error:  # noqa: BLE001 - looked at by the test
        FAILED.append(error)
