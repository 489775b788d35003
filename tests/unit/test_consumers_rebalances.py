"""Consumers while partitions come and go, without brokers: what is fetched, seeked and committed around a rebalance."""

import asyncio
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as ConfluentPartition

from filtering import PairSplit, StreamMetadata
from filtering.consumers import aiokafka, confluent, confluent_client
from filtering.consumers.startpoints import RefusedStartpoint, StartTarget
from filtering.errors import BadFilterSetting

PARTITION, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1)


def record(offset, partition=0):
    key = StreamMetadata(7, 0, offset).pack()
    return ConsumerRecord("orders", partition, offset, 0, 0, key, b"", None, len(key), 0, ())


class _Sent:
    """An operator's word, for the next look at a partition that comes."""

    look_every_s = 30.0
    target = None

    def version(self):
        return 1

    def pending(self, *_):
        return self.target

    def moved(self, *_):
        return None


class _Committed:
    """The group's admin client."""

    offset, is_away = 5000, False

    async def start(self):
        pass

    async def close(self):
        pass

    async def list_consumer_group_offsets(self, _, partitions):
        if self.is_away:
            raise OSError("away")
        return dict.fromkeys(partitions, OffsetAndMetadata(self.offset, ""))


class _Client(AIOKafkaConsumer):
    """Never connected: it fetches what is in `fetched`, and goes nowhere."""

    def __init__(self):
        super().__init__(bootstrap_servers="127.0.0.1:1", group_id=None)
        self.assign([PARTITION, OTHER])
        self.fetched, self.seeks, self.places = [], [], []

    async def start(self):
        pass

    def subscribe(self, topics, *, listener):
        pass

    def seek(self, partition, offset):
        self.seeks.append(offset)
        self.places.append((partition, offset))

    async def getone(self):
        return (await self.fetched.pop(0)())[0]

    async def getmany(self, **_):
        found = await self.fetched.pop(0)()
        return found if isinstance(found, dict) else {PARTITION: found}


@asynccontextmanager
async def joined(startpoints=None, committed=None, **more):
    client, admin = _Client(), committed or _Committed()
    with (
        patch.object(aiokafka, "AIOKafkaConsumer", lambda **_: client),
        patch.object(aiokafka, "AIOKafkaAdminClient", lambda **_: admin),
    ):
        async with aiokafka.ReplayFilteredConsumer("orders", group_id="g", startpoints=startpoints, **more) as consumer:
            yield consumer, client


@pytest.mark.parametrize("late", [5000, 1000])
def test_what_was_fetched_while_a_startpoint_was_applied_at_assignment_hides_nothing(late):
    """A record from the committed position would raise the mark above everything that the startpoint goes back for; a
    record after the seek is read again.
    """

    async def run():
        startpoints = _Sent()
        async with joined(startpoints) as (consumer, client):
            await consumer.assigned({PARTITION})
            startpoints.target = StartTarget(1000, 3, reset_marks=True)

            async def during_a_rebalance():
                await consumer.assigned({PARTITION})
                return [record(late)]

            async def after_it():
                return [record(client.seeks[-1])]

            client.fetched = [during_a_rebalance, after_it]
            found = await consumer.getone()
            assert (found.offset, client.seeks) == (1000, [5000, 1000, 1000])
            assert consumer.position(PARTITION) == 1001

    asyncio.run(run())


def test_a_call_that_is_cancelled_while_partitions_come_loses_nothing():
    """`asyncio.wait_for(consumer.getone(), ...)`: what the client handed over meanwhile is read again."""

    async def run():
        async with joined() as (consumer, client):
            await consumer.assigned({PARTITION})

            handed_over = asyncio.Event()

            async def at_once():
                handed_over.set()
                return [record(5000)]

            async def again():
                return [record(client.seeks[-1])]

            client.fetched = [at_once, again, at_once, again]
            for read in (consumer.getone, consumer.getmany):
                await consumer._moving.acquire()
                waiting = asyncio.ensure_future(read())
                await handed_over.wait()
                handed_over.clear()
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                consumer._moving.release()
                assert (await consumer.getone()).offset == client.seeks[-1]
            assert client.seeks == [5000, 5000, 5001]

    asyncio.run(run())


class _Nothing(_Committed):
    offset = -1


@pytest.mark.parametrize("first", [PARTITION, OTHER])
def test_aiokafka_a_refused_first_batch_is_not_passed_over_where_nothing_is_committed(first):
    """With `latest` a partition would continue after records that were not yielded. A partition without records keeps
    its place.

    Records before the refused one are yielded, because a commit covers them.
    """

    async def run():
        async with joined(committed=_Nothing()) as (consumer, client):
            client.assign([PARTITION, OTHER, third := TopicPartition("orders", 2)])
            await consumer.assigned({PARTITION, OTHER, third})

            async def one_pair_in_two():
                second = OTHER if first is PARTITION else PARTITION
                return {each: [record(70 + each.partition, each.partition)] for each in (first, second)}

            client.fetched = [one_pair_in_two]
            assert {each: len(records) for each, records in (await consumer.getmany()).items()} == {first: 1}
            second = OTHER if first is PARTITION else PARTITION
            assert [consumer.position(one) for one in (first, second)] == [71 + first.partition, None]
            with pytest.raises(PairSplit):
                await consumer.getmany()
            await consumer.seek(PARTITION, 71)
            assert client.places == [(PARTITION, 70), (OTHER, 71), (PARTITION, 71)]

    asyncio.run(run())


def test_aiokafka_partitions_that_could_not_be_loaded_are_loaded_by_the_next_read():
    """Contract: "Loaded on assignment": no rebalance is needed, and no record comes without marks."""

    async def run():
        calls, committed = [], _Committed()

        async def assigned(_, partitions):
            calls.append(partitions)

        async with joined(committed=committed, on_assign=assigned) as (consumer, client):
            committed.is_away = True
            with pytest.raises(OSError, match="away"):
                await consumer.assigned({PARTITION, OTHER})
            for _ in range(2):
                with pytest.raises(OSError, match="away"):
                    await consumer.getone()
            assert (client.paused(), calls) == ({PARTITION, OTHER}, [])
            committed.is_away = False

            async def next_one():
                return [record(5000)]

            client.fetched = [next_one]
            assert (await consumer.getone()).offset == 5000
            assert (client.paused(), calls) == (set(), [{PARTITION, OTHER}])
            assert client.places == [(PARTITION, 5000), (OTHER, 5000)]

    asyncio.run(run())


def test_aiokafka_a_position_that_can_t_be_loaded_is_left_by_a_seek():
    async def run():
        committed = _Committed()
        async with joined(committed=committed) as (consumer, client):
            committed.is_away = True
            with pytest.raises(OSError, match="away"):
                await consumer.assigned({PARTITION})
            committed.is_away = False
            await consumer.seek(PARTITION, 7)
            assert (consumer.position(PARTITION), client.paused()) == (7, set())

    asyncio.run(run())


def test_aiokafka_a_callback_that_fails_at_revocation_leaves_nothing_to_commit():
    """Contract: "dropped on revocation"."""

    async def fails(*_):
        raise OSError("no commit")

    async def run():
        async with joined(on_revoke=fails) as (consumer, _):
            await consumer.assigned({PARTITION})
            with pytest.raises(OSError, match="no commit"):
                await consumer.revoked({PARTITION})
            with pytest.raises(BadFilterSetting):
                consumer.position(PARTITION)

    asyncio.run(run())


def test_aiokafka_a_seek_after_a_refused_batch_brings_the_others_back_to_their_committed_positions():
    """A batch that the filter refuses because of one partition is lost in the client for the other partitions, too."""

    async def run():
        async with joined() as (consumer, client):
            await consumer.assigned({PARTITION, OTHER})

            async def one_pair_in_two():
                return {PARTITION: [record(5000)], OTHER: [record(5001, 1)]}

            async def nothing():
                return {}

            client.fetched = [one_pair_in_two, nothing]
            await consumer.getmany()
            with pytest.raises(PairSplit):
                await consumer.getmany()
            client.places.clear()
            await consumer.seek(PARTITION, 7)
            assert client.places == [(PARTITION, 5000), (OTHER, 5000), (PARTITION, 7)]
            assert consumer.position(OTHER) == 5000
            assert await consumer.getmany() == {}, "it reads on"

    asyncio.run(run())


def test_confluent_a_seek_after_a_refused_batch_brings_the_others_back_to_their_committed_positions(of_three):
    """A batch that the filter refuses because of one partition is lost in the client for the other partitions, too."""

    client = _Refused(committed=50)
    consumer = of_three(client)
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    client.batch = []
    consumer.seek(ConfluentPartition("orders", 0, 7))
    assert client.seeks == [(0, 50), (1, 50), (2, 50), (0, 7)]
    assert [one.offset for one in consumer.position([ConfluentPartition("orders", 1)])] == [50]
    assert consumer.consume(10, 0) == [], "it reads on"


class _Refused:
    """A client that hands over one batch, in which one pair is of two partitions."""

    def __init__(self, events=(), committed=OFFSET_INVALID):
        key = StreamMetadata(7, 0, 3).pack()
        found = [Message(topic="orders", partition=n, offset=70 + n, key=key, value=b"v") for n in (0, 1)]
        self.batch, self.seeks, self.at = [*found, *events], [], committed

    def assign(self, partitions):
        self.assigned = partitions

    def close(self):
        pass

    def committed(self, partitions, _):
        return [ConfluentPartition(one.topic, one.partition, self.at) for one in partitions]

    def consume(self, *_):
        return self.batch

    def seek(self, place):
        self.seeks.append((place.partition, place.offset))

    def pause(self, _):
        pass


@pytest.fixture
def of_client(monkeypatch):
    """Makes a consumer around a client."""
    config = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0, "auto.offset.reset": "latest"}

    def made(client, settings=(), **more):
        monkeypatch.setattr(confluent, "Consumer", lambda _: client)
        return confluent.ReplayFilteredConsumer(config | dict(settings), **more)

    return made


@pytest.fixture
def of_three(of_client):
    """The same, which reads three partitions without a group's help."""

    def reads(client):
        consumer = of_client(client)
        consumer.assign([ConfluentPartition("orders", number) for number in range(3)])
        return consumer

    return reads


def test_confluent_a_refused_first_batch_is_not_passed_over_where_nothing_is_committed(of_three):
    """With `latest` a partition would continue after records that were not yielded. A partition without records keeps
    its place.
    """
    client = _Refused()
    consumer = of_three(client)
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    consumer.commit()  # of nothing
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    consumer.seek(ConfluentPartition("orders", 0, 71))
    assert sorted(client.seeks) == [(0, 70), (0, 71), (1, 71)]


def test_confluent_a_refused_batch_ends_reads_until_nothing_that_it_was_read_with_is_read_any_more(of_client):
    """Records of all these partitions are gone from the client: while one of them stays, going on would lose some."""

    class Client(_Refused):
        def subscribe(self, _, *, on_assign, on_revoke, **__):
            self.came, self.revoked = on_assign, on_revoke

        def incremental_assign(self, _):
            pass

        def incremental_unassign(self, _):
            pass

    client, partitions = Client(committed=50), [ConfluentPartition("orders", number) for number in range(2)]
    consumer = of_client(client, {"partition.assignment.strategy": "cooperative-sticky"})
    consumer.subscribe(["orders"])
    client.came(client, partitions)
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    client.batch = []
    client.revoked(client, partitions[:1])
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    client.revoked(client, partitions[1:])
    client.came(client, partitions)
    assert consumer.consume(10, 0) == [], "they come at their committed positions"


class _Silent(_Refused):
    """A client whose group's coordinator does not answer for a while."""

    def __init__(self):
        super().__init__()
        key = StreamMetadata(7, 0, 3).pack()
        self.batch = [Message(topic="orders", partition=0, offset=50, key=key, value=b"v")]
        self.is_silent, self.paused = True, set()

    def committed(self, partitions, _):
        if self.is_silent:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return super().committed(partitions, _)

    def subscribe(self, _, *, on_assign, on_revoke, **__):
        self.came, self.revoked = on_assign, on_revoke

    def unassign(self):
        pass

    def pause(self, partitions):
        self.paused |= {one.partition for one in partitions}

    def resume(self, partitions):
        self.paused -= {one.partition for one in partitions}

    def consume(self, *_):
        return [one for one in self.batch if one.partition() not in self.paused]


def test_confluent_a_read_survives_a_coordinator_that_does_not_answer(of_client, monkeypatch, caplog):
    """Partitions are assigned while the coordinator does not answer: they are not read, other reads continue, and a
    later read loads them.
    """
    monkeypatch.setattr(confluent_client, "ask", lambda question, *_: question(1.0))
    client = _Silent()
    consumer = of_client(client)
    consumer.subscribe(["orders"])
    client.came(client, [ConfluentPartition("orders", 0)])
    for _ in range(2):
        assert consumer.consume(10, 0) == []
    assert "a later read asks again" in caplog.text
    client.is_silent = False
    assert [one.offset() for one in consumer.consume(10, 0)] == [50]


def test_confluent_what_was_paused_as_it_went_comes_again_as_if_for_the_first_time(of_client, monkeypatch):
    """The client remembers what it paused, whoever has it meanwhile."""
    monkeypatch.setattr(confluent_client, "ask", lambda question, *_: question(1.0))
    client, startpoints, partitions = _Silent(), _Sent(), [ConfluentPartition("orders", 0)]
    consumer = of_client(client, startpoints=startpoints)
    consumer.subscribe(["orders"])
    client.came(client, partitions)
    assert client.paused == {0}, "not loaded"
    client.revoked(client, partitions)
    assert client.paused == set()
    client.is_silent = False
    assert consumer.consume(10, 0) == []
    with pytest.raises(BadFilterSetting):
        consumer.position(partitions)
    startpoints.target = RefusedStartpoint(1, KeyError("gone"))
    for _ in range(2):
        client.came(client, partitions)
        assert client.paused == {0}, "stopped"
        client.revoked(client, partitions)
        assert client.paused == set()


def test_confluent_what_stands_before_a_refused_record_is_yielded_since_a_commit_counts_it(of_three):
    """Events among them make the client's batch go record by record."""
    event = Message(topic="orders", partition=2, offset=5, error=KafkaError(KafkaError._PARTITION_EOF))
    client = _Refused([event])
    consumer = of_three(client)
    assert [one.offset() for one in consumer.consume(10, 0) if one.error() is None] == [70]
    places = [ConfluentPartition("orders", number) for number in range(3)]
    assert [one.offset for one in consumer.position(places)] == [71, OFFSET_INVALID, OFFSET_INVALID]
    with pytest.raises(PairSplit):
        consumer.consume(10, 0)
    consumer.seek(ConfluentPartition("orders", 0, 71))
    assert sorted(client.seeks) == [(0, 70), (0, 71), (1, 71)]


def test_confluent_a_callback_that_fails_at_revocation_leaves_nothing_to_commit(of_client):
    """Contract: "dropped on revocation"."""

    class Client(_Refused):
        def subscribe(self, _, *, on_assign, on_revoke, **__):
            self.came, self.revoked = on_assign, on_revoke

        def unassign(self):
            self.is_unassigned = True

    def fails(*_):
        raise OSError("no commit")

    client, partitions = Client(committed=5), [ConfluentPartition("orders", 0)]
    consumer = of_client(client)
    consumer.subscribe(["orders"], on_revoke=fails)
    client.came(client, partitions)
    assert [one.offset for one in consumer.position(partitions)] == [5]
    with pytest.raises(OSError, match="no commit"):
        client.revoked(client, partitions)
    with pytest.raises(BadFilterSetting):
        consumer.position(partitions)
    assert client.is_unassigned


def test_confluent_a_callback_that_fails_at_the_end_leaves_no_client_of_the_marks_topic_open(of_client, monkeypatch):
    class Closing:
        is_closed = False

        def close(self):
            self.is_closed = True

    class Failing:
        def close(self):
            raise OSError("no commit")

    marks_topic = Closing()
    monkeypatch.setattr(confluent, "ConfluentMarksTopic", lambda *_: marks_topic)
    consumer = of_client(Failing(), marks_topic="marks")
    with pytest.raises(OSError, match="no commit"):
        consumer.close()
    assert marks_topic.is_closed
