"""Both filtering consumers, by each of their reads, against brokers in this process: tests/kafka has Kafka's own."""

import asyncio
import time

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("aiokafka")

import aiokafka
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import KafkaException, TopicPartition

from filtering import METADATA_HEADER, NotDeserialized, StreamMetadata, WrongCarrier
from filtering.consumers import MarksTooLarge
from filtering.consumers import aiokafka as of_aiokafka
from filtering.consumers import confluent as of_confluent
from filtering.consumers.commits import CommitFailed
from filtering.consumers.startpoints import RefusedStartpoint, StartTarget
from filtering.errors import BadFilterSetting, CorruptMarks, MissingRight
from tests.unit.simulated_brokers import COMMIT, COMMITTED, FETCH, HEARTBEAT, SimulatedBrokers

GROUP, PID, WAIT_S = "billing", 7, 20
ILLEGAL_GENERATION, UNKNOWN_MEMBER, REBALANCING = 22, 25, 27
LOADING, NO_COORDINATOR, MOVED = 14, 15, 16
NO_TOPIC_RIGHT, NO_GROUP_RIGHT, COMMIT_TOO_LARGE = 29, 30, 28


@pytest.fixture
def brokers():
    with SimulatedBrokers(partitions=2, more=("marks",)) as brokers:
        brokers.produce_version = 8
        brokers.configs["cleanup.policy"] = "compact"
        yield brokers


def fill(brokers, partition, offsets, carrier="key", values=None):
    """Records as a gapless producer of that source partition sends them."""
    names = [StreamMetadata(PID, partition, offset).pack() for offset in offsets]
    beside = {"keys": names} if carrier == "key" else {"headers": [[(METADATA_HEADER, one)] for one in names]}
    brokers.topic[partition].write(*(values or [b"%d" % one for one in offsets]), **beside)


class Confluent:
    """By `read`: poll or consume."""

    def __init__(self, brokers, read="poll", settings=(), **more):
        given = {
            "bootstrap.servers": brokers.servers, "group.id": GROUP, "auto.offset.reset": "earliest", "log_level": 0,
            "heartbeat.interval.ms": 100, "fetch.wait.max.ms": 20, "reconnect.backoff.ms": 10,
        }  # fmt: skip
        told = {name: more.pop(name) for name in ("on_assign", "on_revoke", "on_lost") if name in more}
        self.inside = of_confluent.ReplayFilteredConsumer(given | dict(settings), **more)
        self.inside.subscribe(["orders"], **{name: self._telling(one) for name, one in told.items()})
        self._read = read

    def _telling(self, told):
        return lambda _, partitions: told(self, [one.partition for one in partitions])

    def read(self):
        """What one read brings: partition and value of each record."""
        if self._read == "poll":
            found = [one for one in [self.inside.poll(0.1)] if one is not None]
        else:
            found = self.inside.consume(100, 0.1)
        return [(one.partition(), one.value()) for one in found]

    def commit(self):
        self.inside.commit()

    def seek(self, partition, offset):
        self.inside.seek(TopicPartition("orders", partition, offset))

    def position(self, partition):
        [found] = self.inside.position([TopicPartition("orders", partition)])
        return None if found.offset < 0 else found.offset

    def close(self):
        self.inside.close()


class Aiokafka:
    """By `read`: getone or getmany. Its loop runs while it is called."""

    def __init__(self, brokers, read="getone", **more):
        self._loop, self._read = asyncio.new_event_loop(), read
        for name in ("on_assign", "on_revoke"):
            if name in more:
                more[name] = self._telling(more[name])
        given = {"heartbeat_interval_ms": 100, "fetch_max_wait_ms": 20, "auto_offset_reset": "earliest"}
        given |= {"bootstrap_servers": brokers.servers, "retry_backoff_ms": 20, "metadata_max_age_ms": 500}

        async def begin():
            self.inside = of_aiokafka.ReplayFilteredConsumer("orders", group_id=GROUP, **given, **more)
            await self.inside.start()

        self._loop.run_until_complete(begin())

    def _telling(self, told):
        async def tell(_, partitions):
            found = told(self, sorted(one.partition for one in partitions))
            if asyncio.iscoroutine(found):
                await found

        return tell

    def read(self):
        return self._loop.run_until_complete(self._one_read())

    async def _one_read(self):
        if self._read == "getone":
            try:
                found = [await asyncio.wait_for(self.inside.getone(), 0.5)]
            except TimeoutError:
                return []
        else:
            some = await self.inside.getmany(timeout_ms=100)
            found = [one for records in some.values() for one in records]
        return [(one.partition, one.value) for one in found]

    def commit(self):
        done = self.inside.commit()
        return done if self._loop.is_running() else self._loop.run_until_complete(done)

    def seek(self, partition, offset):
        self._loop.run_until_complete(self.inside.seek(aiokafka.TopicPartition("orders", partition), offset))

    def position(self, partition):
        return self.inside.position(aiokafka.TopicPartition("orders", partition))

    def close(self):
        if not self._loop.is_closed():
            self._loop.run_until_complete(self.inside.close())
            self._loop.close()


READS = {"poll": Confluent, "consume": Confluent, "getone": Aiokafka, "getmany": Aiokafka}


@pytest.fixture(params=READS)
def begin(request, brokers):
    """Begins a consumer; it is closed at the end."""
    begun = []

    def begin(**more):
        begun.append(READS[request.param](brokers, request.param, **more))
        return begun[-1]

    begin.is_confluent = READS[request.param] is Confluent
    yield begin
    for one in begun:
        one.close()


def read(consumer, count):
    """So many records, or what came in the time."""
    found, until_s = [], time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < until_s:
        found += consumer.read()
    return sorted(found)


def numbers(partition, *offsets):
    return [(partition, b"%d" % one) for one in offsets]


def test_each_record_comes_once_over_a_restart_and_what_was_not_committed_again(brokers, begin):
    fill(brokers, 0, range(5))
    fill(brokers, 1, range(3))
    first = begin()
    assert read(first, 8) == numbers(0, *range(5)) + numbers(1, *range(3))
    first.commit()
    assert {at: offset for (_, at), (offset, _) in brokers.groups[GROUP].committed.items()} == {0: 5, 1: 3}
    fill(brokers, 0, [5])
    assert read(first, 1) == numbers(0, 5)
    assert first.position(0) == 6
    first.close()
    fill(brokers, 0, [2, 3, 4, 5, 6])
    fill(brokers, 1, [1, 2, 3])
    second = begin()
    assert read(second, 3) == [*numbers(0, 5, 6), *numbers(1, 3)], "without what was sent twice"
    counts = second.inside.counts["orders"]
    assert (counts.kept, counts.dropped) == (3, 6)
    second.commit()
    assert brokers.groups[GROUP].committed["orders", 0][0] == 11


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (ILLEGAL_GENERATION, CommitFailed, "read on and commit again"),
        (UNKNOWN_MEMBER, CommitFailed, "read on and commit again"),
        (REBALANCING, CommitFailed, "read on and commit again"),
        (NO_GROUP_RIGHT, MissingRight, "the right READ on group 'billing'"),
        (NO_TOPIC_RIGHT, MissingRight, "the right READ on topic 'orders'"),
        (COMMIT_TOO_LARGE, (KafkaException, AiokafkaError), "(?i)invalid_?commit_?offset_?size"),
    ],
)
def test_after_a_commit_that_is_refused_nothing_is_committed_and_the_next_one_counts(
    brokers, begin, code, error, words
):
    fill(brokers, 0, range(3))
    consumer = begin()
    read(consumer, 3)
    brokers.faults[COMMIT].append(code)
    with pytest.raises(error, match=words):
        consumer.commit()
    assert brokers.groups[GROUP].committed == {}
    if error is not CommitFailed:
        consumer.commit()
        assert brokers.groups[GROUP].committed["orders", 0][0] == 3


def test_a_coordinator_that_moves_is_asked_again(brokers, begin):
    brokers.faults[COMMITTED] += [LOADING, MOVED]
    fill(brokers, 0, range(3))
    consumer = begin()
    assert read(consumer, 3) == numbers(0, 0, 1, 2)
    brokers.faults[COMMIT] += [LOADING, MOVED]
    consumer.commit()
    assert brokers.groups[GROUP].committed["orders", 0][0] == 3


@pytest.mark.parametrize("carrier", ["header", lambda _record: StreamMetadata(PID, 0, 1).pack(), lambda _record: None])
def test_the_metadata_are_read_where_it_is_said(brokers, begin, carrier):
    fill(brokers, 0, range(3), "header")
    consumer = begin(carrier=carrier)
    kept = 3
    if carrier != "header":
        kept = 1 if carrier(None) else 3
    assert len(read(consumer, kept)) == kept
    counts = consumer.inside.counts["orders"]
    assert (counts.kept, counts.unkeyed) == ((0, 3) if carrier != "header" and carrier(None) is None else (kept, 0))


def test_a_read_in_the_wrong_place_yields_nothing_until_it_is_put_right(brokers, begin):
    fill(brokers, 0, range(100), "header")
    consumer = begin()
    for _ in range(2):
        with pytest.raises(WrongCarrier, match="'header'"):
            read(consumer, 100)
    consumer.close()
    assert len(read(begin(carrier="header"), 100)) == 100


def test_what_a_carrier_of_yours_raises_ends_the_read_until_a_seek(brokers, begin):
    fill(brokers, 0, range(4))
    broken = [2]

    def of_key(record):
        value = record.value() if begin.is_confluent else record.value
        if int(value) in broken:
            raise ZeroDivisionError(value)
        return record.key() if begin.is_confluent else record.key

    consumer = begin(carrier=of_key)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            read(consumer, 4)
    broken.clear()
    consumer.seek(0, 2)
    assert read(consumer, 2) == numbers(0, 2, 3)


def test_a_value_that_is_refused_hides_no_other(brokers, begin):
    fill(brokers, 0, range(4), values=[b"0", b"x", None, b"3"])
    consumer = begin(deserializer=int)
    found, failed = [], []
    until_s = time.monotonic() + WAIT_S
    while len(found) + len(failed) < 4 and time.monotonic() < until_s:
        try:
            found += [value for _, value in consumer.read()]
        except NotDeserialized as error:
            found += [one.value() if begin.is_confluent else one.value for one in error.records]
            failed += [(one.value() if begin.is_confluent else one.value, type(why)) for one, why in error.failed]
    assert (found, failed) == ([0, None, 3], [(b"x", ValueError)])
    consumer.commit()
    assert brokers.groups[GROUP].committed["orders", 0][0] == 4


def test_a_commit_as_partitions_go_counts_and_they_come_with_their_marks(brokers, begin):
    told = []

    def goes(consumer, partitions):
        told.append(("goes", partitions))
        return consumer.commit()

    fill(brokers, 0, range(3))
    consumer = begin(on_assign=lambda _, partitions: told.append(("comes", partitions)), on_revoke=goes)
    assert read(consumer, 3) == numbers(0, 0, 1, 2)
    brokers.faults[HEARTBEAT].append(REBALANCING)
    until_s = time.monotonic() + WAIT_S
    while len(told) < 3 and time.monotonic() < until_s:
        assert consumer.read() == []
    assert [one for one in told if one[1]] == [("comes", [0, 1]), ("goes", [0, 1]), ("comes", [0, 1])]
    assert brokers.groups[GROUP].committed["orders", 0][0] == 3
    fill(brokers, 0, [1, 2, 3])
    assert read(consumer, 1) == numbers(0, 3)


def test_a_seek_to_the_committed_position_brings_its_marks_and_any_other_none(brokers, begin):
    fill(brokers, 0, range(3))
    consumer = begin()
    read(consumer, 3)
    consumer.commit()
    fill(brokers, 0, [2, 3])
    assert read(consumer, 1) == numbers(0, 3)
    consumer.seek(0, 3)
    assert consumer.position(0) == 3
    assert read(consumer, 1) == numbers(0, 3), "the replay of 2 is dropped"
    consumer.seek(0, 1)
    assert read(consumer, 3) == numbers(0, 1, 2, 3)
    with pytest.raises(BadFilterSetting):
        consumer.position(7)


def test_marks_that_do_not_fit_are_refused_with_the_way_on(brokers, begin):
    brokers.metadata_size_max = 60
    fill(brokers, 0, range(3))
    consumer = begin()
    read(consumer, 3)
    with pytest.raises(MarksTooLarge, match="marks_topic"):
        consumer.commit()
    assert brokers.groups[GROUP].committed == {}


class Operator:
    """A store of startpoints that answers what it was told. `asked`: how the logs look to it."""

    look_every_s = 0.05

    def __init__(self):
        self.answers, self.number, self.asked, self.said = {}, 0, [], []

    def version(self):
        return self.number

    def pending(self, consumer, facts, committed_sequence):
        return self._answer(consumer, facts, committed_sequence)

    def moved(self, consumer, facts, running_sequence):
        facts.is_held(facts.topic, facts.partition)
        return self._answer(consumer, facts, running_sequence)

    def _answer(self, consumer, facts, running):
        here = facts.topic, facts.partition
        written = facts.first_at(*here, 1), facts.first_at(*here, 1 << 42)
        self.asked.append((consumer, *here, facts.bounds(*here), written, facts.position, facts.is_held(*here)))
        found = self.answers.get(facts.partition)
        return found if found is not None and found.sequence > running else None

    def consumed(self, *said):
        self.said.append(said)

    def says(self, **answers):
        self.answers = {int(name[1:]): one for name, one in answers.items()}
        self.number += 1


def test_an_operator_moves_a_running_partition_and_stops_one(brokers, begin):
    fill(brokers, 0, range(4))
    fill(brokers, 1, range(2))
    operator = Operator()
    operator.says(p1=StartTarget(1, 1, reset_marks=False))
    consumer = begin(startpoints=operator)
    assert read(consumer, 5) == [*numbers(0, *range(4)), *numbers(1, 1)], "it comes at the startpoint"
    assert (GROUP, "orders", 0, (0, 4), (0, None), None, False) in [(*one[:6], False) for one in operator.asked]
    consumer.commit()
    assert operator.said == [(GROUP, "orders", 1, 1)]
    operator.says(p0=StartTarget(2, 2, reset_marks=True))
    assert read(consumer, 2) == numbers(0, 2, 3)
    operator.says(p0=RefusedStartpoint(3, KeyError("gone")))
    with pytest.raises(KeyError, match="gone"):
        read(consumer, 1)
    assert list(consumer.inside.stopped) == [("orders", 0)]
    fill(brokers, 0, [4])
    fill(brokers, 1, [2])
    assert read(consumer, 1) == numbers(1, 2), "the other one goes on"
    assert consumer.read() == []
    operator.says(p0=StartTarget(3, 4, reset_marks=True))
    assert read(consumer, 2) == numbers(0, 3, 4)
    assert dict(consumer.inside.stopped) == {}
    held = [one[-1] for one in operator.asked]
    assert held[-1], "the coordinator says so"


@pytest.mark.parametrize(
    ("code", "resource", "committed"),
    [(NO_GROUP_RIGHT, "group", None), (NO_GROUP_RIGHT, "group", 1), (NO_TOPIC_RIGHT, "topic", None)],
)
def test_confluent_positions_that_may_not_be_read_for_a_while_are_said_and_loaded_again(
    brokers, code, resource, committed
):
    fill(brokers, 0, range(2))
    if committed is not None:
        brokers.groups[GROUP].committed["orders", 0] = committed, ""
    brokers.faults[COMMITTED] += [code] * 3  # enough for what the client asks by itself, too
    consumer, refused, found = Confluent(brokers), [], []
    expected = numbers(0, *range(committed or 0, 2))
    until_s = time.monotonic() + WAIT_S
    while len(found) < len(expected) and time.monotonic() < until_s:
        try:
            found += consumer.read()
        except MissingRight as error:
            refused.append(str(error))
    assert found == expected, "the right is there again, and nothing more is said: it is read"
    assert refused
    assert all(f"READ on {resource}" in one for one in refused)
    consumer.close()


def test_confluent_marks_that_do_not_fit_lie_in_their_topic_and_the_former_are_deleted(brokers):
    brokers.metadata_size_max = 200
    marks = brokers.more["marks"][0]

    def begin(**more):
        return Confluent(brokers, marks_topic="marks", **more)

    for pid in range(40):
        brokers.topic[0].write(b"%d" % pid, keys=[StreamMetadata(pid, 0, 5).pack()])
    first = begin()
    assert len(read(first, 40)) == 40
    first.commit()
    [stored] = marks.records()
    assert stored.key.startswith(b"billing/orders/0/")
    brokers.topic[0].write(b"a", keys=[StreamMetadata(7, 0, 6).pack()])
    read(first, 1)
    first.commit()
    first.close()
    assert [(one.key == stored.key, one.value is None) for one in marks.records()] == [
        (True, False), (False, False), (True, True),
    ]  # fmt: skip
    brokers.topic[0].write(b"b", b"c", keys=[StreamMetadata(7, 0, 6).pack(), StreamMetadata(9, 0, 6).pack()])
    second = begin()
    assert read(second, 1) == [(0, b"c")]
    second.close()
    marks.retain(marks.end)
    third = begin()
    with pytest.raises(CorruptMarks, match="restore that topic"):
        read(third, 1)
    third.close()
    without = Confluent(brokers)
    with pytest.raises(BadFilterSetting, match="the marks of a committed position lie in one"):
        read(without, 1)
    without.close()


def test_confluent_a_marks_topic_that_is_not_compacted_is_refused(brokers):
    brokers.configs["cleanup.policy"] = "delete"
    with pytest.raises(BadFilterSetting, match=r"cleanup\.policy=compact, this has delete"):
        Confluent(brokers, marks_topic="marks")


def test_confluent_positions_in_a_transaction_count_if_it_is_committed(brokers):
    sent = []

    class Producer:
        def send_offsets_to_transaction(self, offsets, group, _timeout_s):
            sent.append({one.partition: one.offset for one in offsets})
            self.metadata = [one.metadata for one in offsets]

    fill(brokers, 0, range(3))
    consumer = Confluent(brokers)
    read(consumer, 3)
    consumer.inside.send_to_transaction(Producer())
    consumer.inside.transaction_aborted()
    assert read(consumer, 3) == numbers(0, 0, 1, 2), "again"
    consumer.inside.send_to_transaction(producer := Producer())
    brokers.groups[GROUP].committed["orders", 0] = 3, producer.metadata[0]
    consumer.inside.transaction_committed()
    assert sent == [{0: 3}, {0: 3}]
    fill(brokers, 0, [2, 3])
    assert read(consumer, 1) == numbers(0, 3)
    consumer.close()


@pytest.mark.parametrize("end", ["transaction_committed", "transaction_aborted"])
def test_confluent_a_startpoint_waits_for_the_end_of_a_transaction_and_no_longer(brokers, end):
    """The positions in the transaction are of before the move."""

    class Producer:
        def send_offsets_to_transaction(self, *_):
            pass

    fill(brokers, 0, range(3))
    operator = Operator()
    operator.says(p0=StartTarget(0, 1, reset_marks=True))
    consumer = Confluent(brokers, startpoints=operator)
    assert read(consumer, 3) == numbers(0, 0, 1, 2)
    consumer.inside.send_to_transaction(Producer())
    operator.says(p0=StartTarget(2, 2, reset_marks=True))
    assert consumer.read() == []
    assert consumer.position(0) == 3, "not yet"
    getattr(consumer.inside, end)()
    assert read(consumer, 1) == numbers(0, 2)
    assert operator.said == ([(GROUP, "orders", 0, 1)] if end == "transaction_committed" else [])
    operator.says(p0=StartTarget(1, 3, reset_marks=True))
    assert read(consumer, 2) == numbers(0, 1, 2)
    consumer.close()


def test_confluent_partitions_that_are_assigned_by_hand_come_with_their_marks(brokers):
    fill(brokers, 0, range(3))
    fill(brokers, 1, range(3))
    settings = {"bootstrap.servers": brokers.servers, "group.id": GROUP, "auto.offset.reset": "earliest"}
    for expected, more in ([0, 1, 2], [1, 2, 3]), ([3], []):
        with of_confluent.ReplayFilteredConsumer(settings) as consumer:
            consumer.assign([TopicPartition("orders", 1)])
            assert [int(consumer.poll(WAIT_S).value()) for _ in expected] == expected
            assert consumer.poll(0.05) is None
            consumer.commit()
            if more:
                fill(brokers, 1, more)
    assert list(brokers.groups[GROUP].committed) == [("orders", 1)]


def test_confluent_what_is_assigned_by_hand_instead_begins_at_its_committed_position_with_its_marks(brokers):
    fill(brokers, 0, range(3))
    fill(brokers, 1, range(3))
    settings = {"bootstrap.servers": brokers.servers, "group.id": GROUP, "auto.offset.reset": "earliest"}
    one, two = (TopicPartition("orders", number) for number in (0, 1))
    with of_confluent.ReplayFilteredConsumer(settings) as consumer:
        consumer.assign([one])
        assert [consumer.poll(WAIT_S).value() for _ in range(3)] == [b"0", b"1", b"2"]
        consumer.assign([two])
        with pytest.raises(BadFilterSetting):
            consumer.position([one])
        assert consumer.poll(WAIT_S).partition() == 1
        consumer.commit()
        assert list(brokers.groups[GROUP].committed) == [("orders", 1)], "the other one was not committed in time"
        consumer.assign([one])
        assert [consumer.poll(WAIT_S).value() for _ in range(3)] == [b"0", b"1", b"2"], "it comes again, and no replays"


def test_confluent_a_poll_that_meets_replays_only_ends_at_its_time(brokers):
    fill(brokers, 0, range(3))
    consumer = Confluent(brokers)
    assert read(consumer, 3) == numbers(0, 0, 1, 2)
    fill(brokers, 0, [0] * 200)
    end, until_s = brokers.topic[0].end, time.monotonic() + WAIT_S
    while consumer.position(0) < end and time.monotonic() < until_s:
        at = consumer.position(0)
        assert consumer.inside.poll(0) is None
        assert consumer.position(0) - at <= 1, "without time it looks at one record"
    assert consumer.position(0) == end
    consumer.close()


@pytest.mark.parametrize("way", ["poll", "consume"])
def test_confluent_a_topic_that_may_not_be_read_is_named(brokers, way):
    consumer = Confluent(brokers, way)
    brokers.faults[FETCH] += [NO_TOPIC_RIGHT] * 3
    fill(brokers, 0, range(2))
    with pytest.raises(MissingRight, match="READ on topic 'orders'"):
        read(consumer, 3)
    consumer.close()


def test_aiokafka_records_come_one_after_the_other_in_a_loop_and_from_the_end_where_nothing_is_committed(brokers):
    fill(brokers, 0, range(2))

    async def read():
        given = {"bootstrap_servers": brokers.servers, "fetch_max_wait_ms": 20, "retry_backoff_ms": 20}
        async with of_aiokafka.ReplayFilteredConsumer("orders", group_id=GROUP, **given) as consumer:
            assert await consumer.getmany(timeout_ms=100) == {}, "auto_offset_reset is latest"
            fill(brokers, 0, range(2, 5))
            found = []
            async for record in consumer:
                found.append(int(record.value))
                if len(found) == 3:
                    break
            await consumer.seek(aiokafka.TopicPartition("orders", 0), 0)
            return found, [int((await consumer.getone()).value) for _ in range(5)]

    assert asyncio.run(asyncio.wait_for(read(), WAIT_S)) == ([2, 3, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("read", ["poll", "consume"])
def test_confluent_what_the_client_has_to_say_comes_between_the_records(brokers, read):
    fill(brokers, 0, range(2))
    consumer = Confluent(brokers, read, {"enable.partition.eof": True})
    found, until_s = [], time.monotonic() + WAIT_S
    while len(found) < 4 and time.monotonic() < until_s:
        one = consumer.inside.poll(0.1) if read == "poll" else consumer.inside.consume(10, 0.1)
        found += one if isinstance(one, list) else [one] * (one is not None)
    events = [one.error().code() for one in found if one.error() is not None]
    assert events == [-191] * 2, "the end of each partition"
    assert [one.value() for one in found if one.error() is None] == [b"0", b"1"]
    consumer.close()
    consumer.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: of_confluent.ReplayFilteredConsumer({"group.id": "g"}, carrier="value"), '"key", "header"'),
        (lambda: of_confluent.ReplayFilteredConsumer({"group.id": ""}), "group.id=''"),
        (lambda: of_confluent.ReplayFilteredConsumer({}), "group.id=None"),
        (lambda: of_confluent.ReplayFilteredConsumer({"group.id": "g", "enable.auto.commit": True}), "by itself"),
        (lambda: of_confluent.ReplayFilteredConsumer({"group.id": "g"}, deserializer=7), "deserializer=7"),
        (lambda: of_aiokafka.ReplayFilteredConsumer("t", group_id="g", carrier="value"), '"key", "header"'),
        (lambda: of_aiokafka.ReplayFilteredConsumer("t", group_id=""), "group_id=''"),
        (lambda: of_aiokafka.ReplayFilteredConsumer("t", group_id="g", enable_auto_commit=True), "by itself"),
        (lambda: of_aiokafka.ReplayFilteredConsumer("t", group_id="g").client, "async with"),
    ],
)
def test_a_setting_that_would_part_positions_from_marks_is_refused_by_name(make, words):
    with pytest.raises(BadFilterSetting, match=words):
        make()
