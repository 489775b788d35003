"""When the fence is renewed: in time for coordinator and partitions, and without holding up those that ship."""

import asyncio
from types import SimpleNamespace
from uuid import UUID

import pytest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest

from pushrep.kafka import KafkaDestination
from pushrep.kafka import fence_rules as core
from pushrep.kafka.answers import Code
from pushrep.kafka.cluster import Cluster, broker_refused
from pushrep.kafka.errors import BeginsAnew, KafkaUnreachable
from pushrep.kafka.fence_driver import Fencing, transactional_id
from pushrep.kafka.fence_rules import Fence, ProducerId
from pushrep.kafka.requests import Ask
from pushrep.kafka.topic import TopicFacts
from tests.support.simulated_disk import SimulatedClock

HOUR_MS = 3_600_000
DESTINATION = KafkaDestination(bootstrap_servers="127.0.0.1:1")


def facts(transactional_ms, producer_ms):
    return TopicFacts(
        topic="orders", topic_id=UUID(int=7), partitions=2, cleanup_policy="delete", max_message_bytes=1 << 20,
        retention_ms=-1, has_append_time=False, producer_id_expiration_ms=producer_ms,
        transactional_id_expiration_ms=transactional_ms,
    )  # fmt: skip


async def nothing_is_asked(what):
    raise AssertionError(what)


def driver(clock, transactional_ms=168 * HOUR_MS, producer_ms=24 * HOUR_MS):
    """The driver of a fence that has just been established; both partitions have a leader."""
    cluster = Cluster(DESTINATION, "orders")
    cluster.leaders, cluster.partitions = {0: 1, 1: 1}, 2
    fencing = Fencing(DESTINATION, "an outbox", None, None, clock)
    found = fencing.driver(facts(transactional_ms, producer_ms), cluster, nothing_is_asked, has_shipped=False)
    fence, producer = fencing.newest, ProducerId(7, 0)
    for event in (core.Begun(), core.Given(producer), core.Added(), core.Ended(producer), core.MarkersRead()):
        fence.on(event)
    assert found.matched() == producer
    return found, cluster


@pytest.mark.parametrize(
    ("transactional_ms", "producer_ms", "due_ms"),
    [(168 * HOUR_MS, 24 * HOUR_MS, 12 * HOUR_MS), (8 * HOUR_MS, 24 * HOUR_MS, 2 * HOUR_MS)],
)
def test_a_renewal_is_due_before_coordinator_or_partitions_forget(transactional_ms, producer_ms, due_ms):
    """Contract: "at each quarter of transactional.id.expiration.ms"; and half of producer.id.expiration.ms."""
    clock = SimulatedClock()
    fence, _ = driver(clock, transactional_ms, producer_ms)
    clock.advance(due_ms - 1)
    assert not fence.wants_renewal()
    clock.advance(1)
    assert fence.wants_renewal()


def test_partitions_wait_half_a_minute_for_one_that_does_not_drain():
    clock = SimulatedClock()
    fence, _ = driver(clock)
    clock.advance(12 * HOUR_MS)
    assert fence.wants_renewal()
    clock.advance(30_000)
    assert fence.wants_renewal()
    clock.advance(1)
    assert not fence.wants_renewal(), "the others go on"
    clock.advance(599_999)
    assert not fence.wants_renewal()
    clock.advance(1)
    assert fence.wants_renewal(), "and it is tried again"


def test_nobody_waits_while_a_partition_has_no_leader_for_its_marker():
    clock = SimulatedClock()
    fence, cluster = driver(clock)
    clock.advance(12 * HOUR_MS)
    cluster.leaders = {0: 1}
    assert not fence.wants_renewal()
    cluster.leaders = {0: 1, 1: 2}
    assert fence.wants_renewal()


class Behind:
    """A broker that knows only one of the topic's two partitions, until the second metadata request."""

    def __init__(self):
        self.partitions, self.refreshed, self.asked = 1, 0, []

    async def refresh(self):
        self.partitions, self.refreshed = 2, self.refreshed + 1

    async def find_coordinator(self, _name):
        return 1

    async def ask(self, _coordinator, request):
        self.asked.append(request)
        given = {"producer_id": 7, "producer_epoch": 0} if isinstance(request, Ask) else {}
        return SimpleNamespace(error_code=Code.NONE, tags={}, **given)

    async def fetch_many(self, at):
        raise BeginsAnew(f"markers are looked for from {at} on")

    async def ends(self, partitions):
        if unknown := [one for one in partitions if one >= self.partitions]:
            raise broker_refused(f"orders-{unknown[0]}", Code.LEADER_NOT_AVAILABLE)
        return dict.fromkeys(partitions, 40)


def test_a_broker_that_has_not_heard_of_all_partitions_lets_none_without_a_marker():
    """identity T3: "AddPartitionsToTxn over **all** partitions of the topic"; a batch of the older epoch is taken in
    one that is left out.
    """
    cluster = Behind()

    async def until_done(perform):
        while True:
            try:
                return await perform()
            except KafkaUnreachable:
                await cluster.refresh()

    fencing = Fencing(DESTINATION, "an outbox", None, None, SimulatedClock())
    found = fencing.driver(facts(HOUR_MS, HOUR_MS), cluster, until_done, has_shipped=False)
    with pytest.raises(BeginsAnew, match=r"from \{0: 40, 1: 40\} on"):
        asyncio.run(found.begin())
    added = [request for request in cluster.asked if isinstance(request, AddPartitionsToTxnRequest)]
    assert [request._topics for request in added] == [[("orders", [0, 1])]]


def test_a_fence_that_is_off_has_no_driver_and_a_copy_a_name_of_its_own():
    off = KafkaDestination(bootstrap_servers="127.0.0.1:1", fence="off")
    fencing = Fencing(off, "an outbox", None, None, SimulatedClock())
    given = facts(HOUR_MS, HOUR_MS), Cluster(off, "orders"), nothing_is_asked
    assert fencing.driver(*given, has_shipped=False) is None
    assert transactional_id("a", UUID(int=7)) == f"pushrep-a-{UUID(int=7)}"
    assert transactional_id("a", UUID(int=7), "b") == f"pushrep-a-{UUID(int=7)}-b"


def test_one_fence_lasts_for_an_opening_and_a_topic_id():
    """A second session names what the first was given; a topic that was made again has another transactional id."""
    fencing = Fencing(DESTINATION, "an outbox", None, None, SimulatedClock())
    cluster, first = Cluster(DESTINATION, "orders"), facts(HOUR_MS, HOUR_MS)
    fencing.driver(first, cluster, nothing_is_asked, has_shipped=False)
    known: Fence = fencing.newest
    fencing.driver(first, cluster, nothing_is_asked, has_shipped=True)
    assert fencing.newest is known
    fencing.driver(first._replace(topic_id=UUID(int=8)), cluster, nothing_is_asked, has_shipped=False)
    assert fencing.newest is not known
