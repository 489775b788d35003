"""When the fence is renewed: in time for coordinator and partitions, and without holding up those that ship."""

import asyncio
from types import SimpleNamespace
from uuid import UUID

import pytest
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest

from pushrep.env import SYSTEM_CLOCK
from pushrep.kafka import KafkaDestination, fence_driver
from pushrep.kafka.answers import Code
from pushrep.kafka.cluster import broker_refused, right_missing
from pushrep.kafka.errors import BeginsAnew
from pushrep.kafka.fence_driver import Fencing, transactional_id
from pushrep.kafka.fence_rules import MARKER_WITHIN_MS, Fence, PartitionState, ProducerId
from pushrep.kafka.topic import TopicFacts
from pushrep.outbox.status import DestinationStatus
from pushrep.records import encode_batch
from pushrep.records import header as layout
from pushrep.records.header import crc32c
from pushrep.status import PROBLEMS
from tests.support.simulated_disk import SimulatedClock

HOUR_MS = 3_600_000
DESTINATION = KafkaDestination(bootstrap_servers="127.0.0.1:1")


def facts(transactional_ms, producer_ms):
    return TopicFacts(
        topic="orders", topic_id=UUID(int=7), partitions=2, cleanup_policy="delete", max_message_bytes=1 << 20,
        retention_ms=-1, has_append_time=False, producer_id_expiration_ms=producer_ms,
        transactional_id_expiration_ms=transactional_ms,
    )  # fmt: skip


class Session:
    """What a driver needs of one: partitions lost nothing, and acknowledged what they were sent, but for `unsent`."""

    def __init__(self, cluster, clock):
        self.clock = clock
        self.cluster, self.marked, self.noted, self.unsent, self.tasks = cluster, [], [], set(), []
        self.went_on = []

    async def ends(self, _node, partitions):
        return dict.fromkeys(partitions, 40)

    async def check_loss(self, partition, end):
        pass

    def acknowledged_end(self, partition):
        return None if partition in self.unsent else 40

    def on_marked(self, partition):
        self.marked.append(partition)
        self.driver.partitions.on_matched(partition, self.clock.monotonic_ms())

    def go_on(self, partition):
        self.went_on.append(partition)

    def note_fence(self, why):
        self.noted.append(why)

    def refresh_soon(self):
        self.cluster.refresh()

    def run_beside(self, work):
        self.tasks.append(asyncio.ensure_future(work))


class Brokers:
    """Two partitions, of which the second gets a leader with the second metadata request; a coordinator that gives
    another epoch with each end of a transaction, and writes the markers at once.
    """

    def __init__(self):
        self.partitions, self.leaders, self.refreshed, self.asked = 2, {0: 1}, 0, []
        self.held, self.epoch, self.listed, self.codes, self.refused = {0: b"", 1: b""}, 0, [], [], {}

    def refresh(self):
        self.refreshed += 1
        if self.refreshed > 1:
            self.leaders = {0: 1, 1: 2}

    async def find_coordinator(self, _name):
        return 1

    async def ask(self, _coordinator, request):
        self.asked.append(request)
        code = self.codes.pop(0) if self.codes else Code.NONE
        if isinstance(code, Exception):
            raise code
        if isinstance(request, AddPartitionsToTxnRequest):
            [(_, self.listed)] = request._topics
            return SimpleNamespace(errors=[("orders", [(one, self.refused.get(one, code)) for one in self.listed])])
        if isinstance(request, EndTxnRequest):
            assert not request.prepare({26: (0, 1)}).transaction_result, "nothing is ever committed"
            for partition in self.listed:
                marker = encode_batch([b"end"], timestamps_ms=1).with_producer(7, self.epoch, -1)
                self.held[partition] = as_control(marker, 40 + self.epoch)
        return SimpleNamespace(error_code=code, tags={}, producer_id=7, producer_epoch=self.epoch)

    async def fetch_many(self, offsets, *, wait_ms, failed):
        assert (wait_ms, failed) == (0, {})
        return {partition: self.held[partition] for partition in offsets}


def as_control(batch, offset):
    """The batch there, with the bit of control batches."""
    data = bytearray(batch)
    layout.stamp(data, offset, -1)
    data[22] |= 0x20
    layout.write_crc(data, crc32c(data, layout.CRC_COVERS_FROM))
    return bytes(data)


def driver(clock, cluster, transactional_ms=168 * HOUR_MS, producer_ms=24 * HOUR_MS, destination=DESTINATION):
    """A driver and its session."""
    fencing = Fencing(destination, "an outbox", None, None, clock)
    session = Session(cluster, clock)
    session.driver = fencing.driver(session, facts(transactional_ms, producer_ms), cluster, has_shipped=False)
    return session.driver, session


def run(made, session, *until):
    """Let the driver run until each of these held in turn; one may do something when it holds."""

    async def story():
        session.run_beside(made.run())
        async with asyncio.timeout(30):
            for holds in until:
                while not holds():
                    for task in session.tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.001)
        for task in session.tasks:
            task.cancel()
        await asyncio.gather(*session.tasks, return_exceptions=True)

    asyncio.run(story())


def added(cluster):
    """The partitions of each transaction."""
    return [request._topics[0][1] for request in cluster.asked if isinstance(request, AddPartitionsToTxnRequest)]


def test_a_partition_that_gets_a_leader_later_gets_a_transaction_of_its_own():
    """faults B3: "A fencing transaction lists only partitions with a leader", "one without a leader keeps nobody else
    waiting".
    """
    cluster = Brokers()
    made, session = driver(SYSTEM_CLOCK, cluster)
    run(made, session, lambda: session.marked == [0, 1])
    assert added(cluster) == [[0], [1]]


@pytest.mark.parametrize(
    ("transactional_ms", "producer_ms", "due_ms"),
    [(168 * HOUR_MS, 24 * HOUR_MS, 12 * HOUR_MS), (8 * HOUR_MS, 24 * HOUR_MS, 2 * HOUR_MS)],
)
def test_a_renewal_is_due_before_coordinator_or_partitions_forget(transactional_ms, producer_ms, due_ms):
    """Contract: "at each quarter of transactional.id.expiration.ms"; and half of producer.id.expiration.ms."""
    cluster, clock = Brokers(), SimulatedClock()
    cluster.refresh(), cluster.refresh()
    made, session = driver(clock, cluster, transactional_ms, producer_ms)
    run(made, session, lambda: session.marked == [0, 1])
    clock.advance(due_ms - 1)
    assert list(made.partitions.drain_due(clock.monotonic_ms())) == []
    clock.advance(1)
    assert list(made.partitions.drain_due(clock.monotonic_ms())) == [0, 1]


def test_a_partition_that_does_not_drain_keeps_no_other_from_its_renewal(monkeypatch):
    """faults B3: each is renewed by itself. Below transaction version 2 a renewal begins with an init."""
    monkeypatch.setattr(fence_driver, "_WATCH_S", 0.001)
    cluster, clock = Brokers(), SimulatedClock()
    cluster.refresh(), cluster.refresh()
    made, session = driver(clock, cluster)

    def begins():
        if session.marked != [0, 1]:
            return False
        clock.advance(12 * HOUR_MS)
        cluster.epoch, session.unsent, cluster.held = 1, {1}, {0: b"", 1: b""}
        return True

    run(made, session, begins, lambda: session.marked == [0, 1, 0])
    assert added(cluster) == [[0, 1], [0]]
    assert made.partitions[0].producer == ProducerId(7, 1)
    assert (made.partitions[1].producer, made.partitions[1].state) == (ProducerId(7, 0), PartitionState.DRAINING)


@pytest.mark.parametrize("before", [[], [Code.NONE]], ids=["the init", "the transaction"])
def test_faults_b3_an_open_transaction_keeps_no_renewal_waiting(monkeypatch, before):
    """faults B3: "CONCURRENT_TRANSACTIONS delays only partitions without a marker": one that was drained for a renewal
    is shipped to under the marker that it has, and is renewed later.
    """
    monkeypatch.setattr(fence_driver, "_WATCH_S", 0.001)
    monkeypatch.setattr(fence_driver, "_SOON_TRIES", 2)
    cluster, clock = Brokers(), SimulatedClock()
    cluster.refresh(), cluster.refresh()
    made, session = driver(clock, cluster)

    def begins():
        if session.marked != [0, 1]:
            return False
        clock.advance(12 * HOUR_MS)
        cluster.codes = before + [Code.CONCURRENT_TRANSACTIONS] * 9
        cluster.epoch, session.unsent, cluster.held = 1, {1}, {0: b"", 1: b""}
        return True

    def goes_on():
        if session.went_on != [0]:
            return False
        states = [made.partitions[one].state for one in (0, 1)]
        assert states == [PartitionState.SHIPPING, PartitionState.DRAINING]
        assert session.noted[-1] is None, "nobody waits"
        cluster.codes = []
        clock.advance(60_000)
        return True

    run(made, session, begins, goes_on, lambda: session.marked == [0, 1, 0])
    assert made.partitions[0].producer == ProducerId(7, 1)


def test_a_transaction_that_is_still_open_is_said_with_the_way_out():
    """faults B3: "CONCURRENT_TRANSACTIONS delays only partitions without a marker", and is named."""
    cluster = Brokers()
    cluster.codes = [Code.CONCURRENT_TRANSACTIONS] * 60
    made, session = driver(SimulatedClock(), cluster)
    run(made, session, lambda: len(session.marked) == 2)
    said = next(one for one in session.noted if one is not None)
    assert "CONCURRENT_TRANSACTIONS" in said
    assert 'fence="off"' in said
    assert session.noted[-1] is None


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (Code.TOPIC_AUTHORIZATION_FAILED, "WRITE on topic 'orders'"),
        (Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "WRITE on transactional-id"),
    ],
)
def test_the_partition_that_was_refused_says_why_and_not_those_that_were_not_tried(code, missing, caplog):
    cluster = Brokers()
    cluster.leaders = {0: 1, 1: 2}
    cluster.refused = {0: Code.OPERATION_NOT_ATTEMPTED, 1: code}
    made, session = driver(SimulatedClock(), cluster)
    run(made, session, lambda: session.marked == [0, 1])
    assert missing in caplog.text


def test_brokers_with_a_shorter_limit_get_a_shorter_transaction():
    cluster = Brokers()
    cluster.leaders = {0: 1, 1: 2}
    cluster.codes = [Code.INVALID_TRANSACTION_TIMEOUT] * 3
    run(*driver(SimulatedClock(), cluster), lambda: len(cluster.asked) > 3)
    asked = [one.prepare({22: (0, 9)}) for one in cluster.asked[:4]]
    assert [one.transaction_timeout_ms for one in asked] == [900_000, 450_000, 225_000, 112_500]


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ([Code.INVALID_TRANSACTION_TIMEOUT] * 10, "transaction.max.timeout.ms of the brokers is below a second"),
        ([Code.UNSUPPORTED_VERSION], "the brokers are too old"),
        ([IncompatibleBrokerVersion("no such request")], "the brokers are too old (IncompatibleBrokerVersion"),
    ],
)
def test_brokers_that_can_not_fence_are_shipped_to_without_and_it_is_said_why(codes, why, caplog):
    cluster = Brokers()
    cluster.leaders, cluster.codes = {0: 1, 1: 2}, codes
    made, session = driver(SimulatedClock(), cluster)
    run(made, session, lambda: session.marked == [0, 1])
    assert made.partitions[0].producer is None
    assert f"shipped to without a fence, so another instance is not stopped: {why}" in caplog.text


@pytest.mark.parametrize("has_topic", [False, True])
def test_brokers_that_never_made_their_transactions_topic_are_shipped_to_without_a_fence(monkeypatch, has_topic):
    """Not those whose coordinator is only away: they have the topic."""
    monkeypatch.setattr(fence_driver, "backoff_of", lambda _: SimpleNamespace(pause_s=lambda _: 0.001))
    cluster, clock = Brokers(), SimulatedClock()
    cluster.leaders, cluster.codes = {0: 1, 1: 2}, [Code.COORDINATOR_NOT_AVAILABLE] * 9_999
    looked = []

    async def there_is(name):
        assert name == "__transaction_state"
        looked.append(name)
        clock.advance(2_000)
        if has_topic and len(looked) == 20:
            cluster.codes = []
        return has_topic

    cluster.has_topic = there_is
    made, session = driver(clock, cluster)
    run(made, session, lambda: session.marked == [0, 1])
    assert (made.partitions[0].producer is not None, len(looked)) == ((True, 20) if has_topic else (False, 6))


@pytest.mark.parametrize("asked", [2, 3], ids=["its features", "the end"])
def test_a_transaction_whose_end_is_refused_is_begun_anew(asked):
    cluster = Brokers()
    cluster.leaders = {0: 1, 1: 2}
    cluster.codes = [Code.NONE] * asked + [Code.PRODUCER_FENCED]
    made, session = driver(SYSTEM_CLOCK, cluster)
    run(made, session, lambda: session.marked == [0, 1])
    assert sum(isinstance(one, AddPartitionsToTxnRequest) for one in cluster.asked) == 2


@pytest.mark.parametrize(
    ("fails", "told"),
    [(None, None), (right_missing("READ", "topic", "orders", 29), "READ on topic"), (OSError("reset"), None)],
    ids=["of one partition", "of all", "the connection"],
)
def test_a_read_for_markers_that_fails_asks_who_leads_and_is_made_again(monkeypatch, fails, told):
    """A partition whose leader has changed would wait for ever for a marker that another broker has."""
    monkeypatch.setattr(fence_driver, "_LOOK_S_MAX", 0.01)
    cluster = Brokers()
    cluster.leaders = {0: 1, 1: 1}

    async def fetch_many(offsets, *, wait_ms, failed, read=cluster.fetch_many):
        if fails is not None and not cluster.refreshed:
            raise fails
        moved = {0} & offsets.keys() if not cluster.refreshed else set()
        found = await read(offsets.keys() - moved, wait_ms=wait_ms, failed=failed)
        failed.update({one: broker_refused("reading", Code.NOT_LEADER_OR_FOLLOWER) for one in moved})
        return found

    cluster.fetch_many = fetch_many
    made, session = driver(SYSTEM_CLOCK, cluster)
    run(made, session, lambda: sorted(session.marked) == [0, 1])
    assert cluster.refreshed == 1, "once, and not for what was read"
    said = [one for one in session.noted if one is not None]
    assert [one for one in said if told is None or told not in one] == []
    assert bool(said) is (told is not None)
    assert session.noted[-1] is None


def test_a_partition_that_lost_its_end_is_not_searched_for_a_marker():
    cluster = Brokers()

    async def fetch_many(offsets, *, wait_ms, failed):
        failed.update({one: broker_refused("reading", Code.OFFSET_OUT_OF_RANGE) for one in offsets})
        return {}

    cluster.fetch_many = fetch_many
    with pytest.raises(BeginsAnew, match="orders-0 lost its end"):
        run(*driver(SYSTEM_CLOCK, cluster), lambda: False)


def test_partitions_that_miss_their_marker_are_named_until_each_has_one():
    cluster, clock = Brokers(), SimulatedClock()
    cluster.leaders = {0: 1, 1: 2}
    written = set()

    async def fetch_many(offsets, *, read=cluster.fetch_many, **how):
        return {one: data if one in written else b"" for one, data in (await read(offsets, **how)).items()}

    cluster.fetch_many = fetch_many
    made, session = driver(clock, cluster)

    def are_sought():
        if made.partitions.in_state(PartitionState.SOUGHT) != [0, 1]:
            return False
        clock.advance(MARKER_WITHIN_MS)
        return True

    def are_named():
        if "no marker came into partition 0" not in str(session.noted[-1:]):
            return False
        written.add(0)
        return True

    def one_has_come():
        if session.marked != [0]:
            return False
        assert session.noted[-1] is not None, "the other one's is missing"
        written.add(1)
        return True

    run(made, session, are_sought, are_named, one_has_come, lambda: session.marked == [0, 1])
    assert session.noted[-1] is None


def test_a_right_that_is_given_is_used_by_the_next_session():
    cluster, clock = Brokers(), SimulatedClock()
    cluster.leaders, cluster.codes = {0: 1, 1: 2}, [Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED]
    fencing = Fencing(DESTINATION, "an outbox", None, None, clock)
    for is_fenced in (False, True):
        session = Session(cluster, clock)
        session.driver = fencing.driver(session, facts(HOUR_MS, HOUR_MS), cluster, has_shipped=False)
        run(session.driver, session, lambda session=session: session.marked == [0, 1])
        assert (fencing.newest.is_standing, fencing.newest.why_unfenced is None) == (is_fenced, is_fenced)


def test_a_fence_that_waits_is_a_problem_of_its_own():
    """faults B3: problem `fence_waits`, "naming `fence="off"`"; what else is in the way is another one."""
    told = {"name": "kafka:orders", "topic": "orders", "records": 3, "trouble": "a transaction", "trouble_ms": 9_000}
    waits = DestinationStatus(**told, fence_waits=("a transaction", 5))
    assert [(one.name, one.since_ms) for one in waits.find_problems()] == [("fence_waits", 5)]
    assert [one.name for one in DestinationStatus(**told).find_problems()] == ["kafka_away"]
    assert 'fence="off"' in PROBLEMS["fence_waits"].advice


def test_a_fence_that_is_off_asks_nobody_and_a_copy_has_a_name_of_its_own():
    off, cluster = KafkaDestination(bootstrap_servers="127.0.0.1:1", fence="off"), Brokers()
    made, session = driver(SYSTEM_CLOCK, cluster, destination=off)
    run(made, session, lambda: session.marked == [0, 1])
    assert cluster.asked == []
    assert transactional_id("a", UUID(int=7)) == f"pushrep-a-{UUID(int=7)}"
    assert transactional_id("a", UUID(int=7), "b") == f"pushrep-a-{UUID(int=7)}-b"


def test_one_fence_lasts_for_an_opening_and_a_topic_id():
    """A second session names what the first was given; a topic that was made again has another transactional id."""
    clock = SimulatedClock()
    fencing = Fencing(DESTINATION, "an outbox", None, None, clock)
    cluster, first = Brokers(), facts(HOUR_MS, HOUR_MS)
    session = Session(cluster, clock)
    fencing.driver(session, first, cluster, has_shipped=False)
    known: Fence = fencing.newest
    fencing.driver(session, first, cluster, has_shipped=True)
    assert fencing.newest is known
    fencing.driver(session, first._replace(topic_id=UUID(int=8)), cluster, has_shipped=False)
    assert fencing.newest is not known


@pytest.mark.parametrize(
    ("producer", "is_marker"), [((8, 1), True), ((8, 0), True), ((7, 0), True), ((7, 1), False)],
    ids=["another's", "another's of the same epoch", "our earlier one", "records under ours"],
)  # fmt: skip
def test_only_a_control_batch_of_our_producer_is_its_marker(producer, is_marker):
    """faults B3: a partition is shipped to once the marker of this very producer id and epoch stands in it."""
    cluster = Brokers()
    cluster.leaders = {0: 1}
    other = encode_batch([b"end"], timestamps_ms=1).with_producer(*producer, -1 if is_marker else 0)
    made, session = driver(SYSTEM_CLOCK, cluster)
    seen = []

    async def ask(coordinator, request, answer=cluster.ask):
        answered = await answer(coordinator, request)
        if isinstance(request, EndTxnRequest) and not seen:  # the coordinator writes it later
            seen.append(cluster.held[0])
            cluster.held[0] = at(other, 40) if not is_marker else as_control(other, 40)
        return answered

    def is_read():
        if made.partitions[0].read_to != 41:
            return False
        assert (session.marked, made.partitions[0].state) == ([], PartitionState.SOUGHT)
        cluster.held[0] += seen[0]
        return True

    cluster.epoch, cluster.ask = 1, ask
    run(made, session, is_read, lambda: 0 in session.marked)
    assert made.partitions[0].producer == ProducerId(7, 1)


def at(batch, offset):
    data = bytearray(batch)
    layout.stamp(data, offset, -1)
    return bytes(data)
