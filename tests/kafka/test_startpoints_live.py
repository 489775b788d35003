"""Groups of Kafka that an operator moves while they are read, without a rejoin: both consumers, on a real broker."""

import asyncio
import itertools

import pytest

from filtering import StreamMetadata
from filtering.consumers.commits import decode
from filtering.consumers.confluent_client import ask_partitions
from filtering.consumers.startpoints import PartitionFacts
from pushrep.startpoints import GroupStartpoints, Startpoint, StartpointFailed, State, StoreUnavailable, store_at
from tests.kafka.plain_client import create_topic, plain_producer
from tests.kafka.test_filtering_consumers import SESSION_MS, WAIT_S, records_of, turns

pytestmark = [pytest.mark.java, pytest.mark.slow]

PID, COUNT = 7, 40
_names = (f"live-{number}" for number in itertools.count())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), partitions=2)
    for partition in range(2):
        fill(broker, name, partition, range(COUNT))
    return name


def fill(broker, topic, partition, offsets):
    producer = plain_producer(broker.bootstrap_servers, enable_idempotence=True)
    for offset in offsets:
        producer.produce(topic, key=StreamMetadata(PID, partition, offset).pack(), value=b"v", partition=partition)
    assert producer.flush(WAIT_S) == 0


@pytest.fixture
def store(request, broker, tmp_path):
    """A real store of startpoints, by its place."""
    if request.param == "directory":
        made = store_at(tmp_path / "startpoints")
    else:
        create_topic(broker.bootstrap_servers, name := f"{next(_names)}-startpoints", cleanup_policy="compact")
        made = store_at(f"kafka:{name}", {"bootstrap.servers": broker.bootstrap_servers})
    with made:
        yield made


def events(store):
    return [type(fact).__name__ for fact in store.history()]


class Reader:
    """Both clients' consumers as one."""

    def __init__(self):
        self.assigned, self.failures = [], []

    async def read(self, count):
        """Read until so many records have arrived, at least once; failures are collected."""
        found = {}
        for _ in turns():
            try:
                await self.take(found)
            except StartpointFailed as failed:
                self.failures.append(failed)
            if sum(map(len, found.values())) >= count:
                break
        return found

    async def failed(self):
        """The next failure, while nothing is read."""
        for _ in turns():
            if self.failures:
                return self.failures.pop()
            assert await self.read(0) == {}
        raise AssertionError("it never failed")


class ByConfluent(Reader):
    def __init__(self, broker, topic, store):
        super().__init__()
        from filtering.consumers.confluent import ReplayFilteredConsumer

        settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
        self.consumer = ReplayFilteredConsumer(
            {**settings, "log_level": 0, "fetch.wait.max.ms": 10},
            startpoints=GroupStartpoints(store, look_every_s=0.05),
        )
        self.consumer.subscribe([topic], on_assign=lambda _, partitions: self.assigned.append(len(partitions)))

    async def take(self, found):
        for message in records_of(self.consumer.consume(500, 0.03)):
            assert message.error() is None, message.error()
            found.setdefault(message.partition(), []).append(message.offset())

    async def one(self):
        """Blocks until there is one, however long that takes."""
        while not (records := records_of([self.consumer.poll(-1)])):
            pass
        return records[0].partition(), records[0].offset()

    async def commit(self):
        self.consumer.commit()

    async def close(self):
        self.consumer.close()


class ByAiokafka(Reader):
    def __init__(self, broker, topic, store):
        super().__init__()
        from filtering.consumers.aiokafka import ReplayFilteredConsumer

        async def assigned(_, partitions):
            self.assigned.append(len(partitions))

        self.consumer = ReplayFilteredConsumer(
            topic,
            group_id=topic,
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=10,
            session_timeout_ms=SESSION_MS,
            startpoints=GroupStartpoints(store, look_every_s=0.05),
            on_assign=assigned,
        )
        self.is_started = False

    async def take(self, found):
        if not self.is_started:
            await self.consumer.start()
            self.is_started = True
        for partition, records in (await self.consumer.getmany(timeout_ms=30)).items():
            found.setdefault(partition.partition, []).extend(record.offset for record in records)

    async def one(self):
        return (record := await self.consumer.getone()).partition, record.offset

    async def commit(self):
        await self.consumer.commit()

    async def close(self):
        await self.consumer.close()


CLIENTS = pytest.mark.parametrize("reader", [ByConfluent, ByAiokafka], ids=["confluent", "aiokafka"], indirect=True)
# Which store it is, a client does not see; so not each of one with each of the other.
BOTH = pytest.mark.parametrize(
    ("store", "reader"),
    [("directory", ByConfluent), ("topic", ByAiokafka)],
    ids=["directory-confluent", "topic-aiokafka"],
    indirect=True,
)
IN_A_DIRECTORY = pytest.mark.parametrize("store", ["directory"], indirect=True, ids=[""])


@pytest.fixture
def reader(request, broker, topic, store):
    """A reader to call in a loop; `told` closes it."""
    return lambda: request.param(broker, topic, store)


def told(make, story):
    async def whole():
        reader = make()
        try:
            return await story(reader)
        finally:
            await reader.close()

    return asyncio.run(whole())


EVERYTHING = {0: list(range(COUNT)), 1: list(range(COUNT))}


@BOTH
def test_rules_2_and_3_a_running_group_is_sent_back_once_without_a_rejoin(broker, topic, store, reader):
    """The startpoint is applied between two reads, stored before it is used, and consumed by the next commit; the other
    member continues.
    """

    async def story(one):
        assert await one.read(2 * COUNT) == EVERYTHING
        await one.commit()
        first = store.write(topic, topic, 0, Startpoint.relative(records=-15, reset_marks=True), "nonsense since 25")
        assert await one.read(15) == {0: list(range(25, 40))}
        assert events(store) == ["Written", "Applied"]
        await one.commit()
        assert events(store) == ["Written", "Applied", "Consumed"]
        second = store.write(topic, topic, None, Startpoint.specific(30, reset_marks=True), "again")
        assert await one.read(20) == {0: list(range(30, 40)), 1: list(range(30, 40))}
        third = store.write(topic, topic, 0, Startpoint.specific(35, reset_marks=True), "before anyone committed")
        assert await one.read(5) == {0: list(range(35, 40))}
        await one.commit()
        assert len(one.assigned) == 1, "no rejoin"
        reader = store.checkpoints()[0].reader
        assert store.reader_state(first, reader).state is State.CONSUMED
        assert store.reader_state(second, reader).state is State.APPLIED, "passed by before it was committed"
        return third

    third = told(reader, story)
    fill(broker, topic, 0, range(35, 45))

    async def later(one):
        assert await one.read(5) == {0: list(range(45, 50))}, "the log's offsets; the records 35 to 39 are replays"

    told(reader, later)
    assert committed(broker, topic, 0).startpoint == third


@BOTH
def test_a_late_claim_of_who_was_held_up_inside_its_start_leaves_the_holder_not_deaf(topic, store, reader):
    """The group gave partition 0 to this member while another was inside its start; then that one claimed it."""

    async def story(one):
        assert await one.read(2 * COUNT) == EVERYTHING
        await one.commit()
        late, facts = GroupStartpoints(store), PartitionFacts(topic, 0, lambda *_: (0, COUNT), lambda *_: None, COUNT)
        assert late.pending(topic, facts, 0) is None
        sequence = store.write(topic, topic, 0, Startpoint.specific(30, reset_marks=True), "nonsense since 30")
        assert await one.read(10) == {0: list(range(30, 40))}
        assert late.moved(topic, facts, 0) is None, "rule 3: the group says that it is not its"
        assert late.pending(topic, facts, 0).sequence == sequence, "and again, before the commit is told"
        await one.commit()
        while "Consumed" not in events(store):
            assert await one.read(0) == {}
        assert events(store) == ["Written", "Applied", "Consumed"]
        assert len(one.assigned) == 1, "no rejoin"

    told(reader, story)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_coordinator_tells_who_holds_a_partition(broker, topic, protocol):
    from filtering.consumers.confluent import ReplayFilteredConsumer

    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0}
    settings |= {"group.protocol": protocol}
    if protocol == "classic":
        settings |= {"partition.assignment.strategy": "cooperative-sticky"}
    members = [ReplayFilteredConsumer(settings) for _ in range(2)]
    held = [set(), set()]
    try:
        for member, own in zip(members, held, strict=True):
            member.subscribe(
                [topic],
                on_assign=lambda _, given, own=own: own.update(one.partition for one in given),
                on_revoke=lambda _, gone, own=own: own.difference_update(one.partition for one in gone),
            )
        for _ in turns():
            for member in members:
                member.poll(0.02)
            said = [{n for n in range(2) if member._facts.is_held(topic, n)} for member in members]
            if sorted(map(len, held)) == [1, 1] and said == held:
                break
        assert said == held
        assert sorted(map(len, held)) == [1, 1]
    finally:
        for member in members:
            member.close()


@CLIENTS
@IN_A_DIRECTORY
def test_rule_9_without_reset_marks_nothing_comes_twice(topic, store, reader):
    async def story(one):
        assert await one.read(2 * COUNT) == EVERYTHING
        store.write(topic, topic, None, Startpoint.earliest(), "nothing to see")
        assert await one.read(0) == {}
        while "Applied" not in events(store):
            assert await one.read(0) == {}
        store.write(topic, topic, 1, Startpoint.specific(38, reset_marks=True), "but here")
        assert await one.read(2) == {1: [38, 39]}

    told(reader, story)


@CLIENTS
@IN_A_DIRECTORY
def test_who_waits_for_a_record_hears_of_a_startpoint(topic, store, reader):
    async def story(one):
        assert await one.read(2 * COUNT) == EVERYTHING
        await one.commit()
        loop = asyncio.get_running_loop()
        startpoint = (topic, topic, 0, Startpoint.specific(39, reset_marks=True), "the last one")
        later = loop.run_in_executor(None, lambda: store.write(*startpoint))
        assert await asyncio.wait_for(one.one(), WAIT_S) == (0, 39)
        await later

    told(reader, story)


@CLIENTS
@IN_A_DIRECTORY
def test_rule_4_a_failed_startpoint_stops_its_partition_until_it_is_cancelled_or_replaced(broker, topic, store, reader):
    async def story(one):
        assert await one.read(2 * COUNT) == EVERYTHING
        await one.commit()
        first = store.write(topic, topic, 0, Startpoint.specific(999), "a typo")
        failed = await one.failed()
        assert "beyond the end" in str(failed)
        assert (failed.sequence, list(one.consumer.stopped)) == (first, [(topic, 0)])
        for partition in (0, 1):
            fill(broker, topic, partition, range(40, 42))
        assert await one.read(2) == {1: [40, 41]}, "the other one goes on"
        await one.commit()
        store.cancel(first, "it was one")
        assert await one.read(2) == {0: [40, 41]}, "from where it was committed"
        assert one.consumer.stopped == {}
        store.write(topic, topic, 0, Startpoint.specific(999), "again a typo")
        await one.failed()
        store.write(topic, topic, 0, Startpoint.specific(41, reset_marks=True), "meant was this")
        assert await one.read(1) == {0: [41]}
        assert len(one.assigned) == 1

    told(reader, story)


@CLIENTS
@IN_A_DIRECTORY
def test_rule_4_a_group_that_comes_starts_but_for_the_failed_partition(topic, store, reader):
    sequence = store.write(topic, topic, 0, Startpoint.specific(999), "a typo")

    async def story(one):
        assert await one.read(COUNT) == {1: list(range(COUNT))}
        assert (await one.failed()).sequence == sequence
        store.cancel(sequence, "it was one")
        assert await one.read(COUNT) == {0: list(range(COUNT))}, "never committed: the client's own policy"

    told(reader, story)


@CLIENTS
@IN_A_DIRECTORY
def test_a_store_that_is_away_when_partitions_come_is_told_by_every_read(store, reader, monkeypatch):
    """Not only by the first: nothing is read then, and nothing must look like an idle topic."""

    def away(*_words, **_named):
        raise StoreUnavailable("kafka:startpoints", "no broker answers")

    monkeypatch.setattr(store, "claim", away)

    async def take_all(one):
        for _ in turns():
            await one.take({})

    async def story(one):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await take_all(one)

    told(reader, story)


def committed(broker, topic, partition):
    from confluent_kafka import Consumer, TopicPartition

    client = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0})
    try:
        [found] = ask_partitions(lambda left_s: client.committed([TopicPartition(topic, partition)], left_s))
    finally:
        client.close()
    return decode(found.metadata)
