"""Consumers on a real broker: each record once, over restarts, rebalances, seeks and transactions."""

import asyncio
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from filtering import METADATA_HEADER, NotDeserialized, StreamMetadata, WrongCarrier, sqe_producer_id
from filtering.consumers import MarksTooLarge
from filtering.consumers.commits import decode
from filtering.consumers.confluent_client import ask_partitions, failure_of_code
from filtering.consumers.startpoints import StartTarget
from filtering.retry import Failure
from pushrep.kafka import KafkaDestination
from pushrep.startpoints import GroupStartpoints, Startpoint, StartpointFailed, StartpointStore
from tests.kafka.cluster import QUICK_START, java
from tests.kafka.plain_client import alter_topic, create_topic, plain_producer
from tests.kafka.plain_client import consume as read_plainly

pytestmark = [pytest.mark.java, pytest.mark.slow]

PID, WAIT_S = 7, 120
SESSION_MS = 60_000
"""aiokafka's own is 10 s: a machine that stalls for longer would have its partitions assigned anew."""
_names = (f"consumer-{number}" for number in itertools.count())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), partitions=2)
    return name


def fill(broker, topic, partition, offsets, source=None, pid=PID):
    """Records of one pair, as a gapless producer of that source partition would send them."""
    producer = plain_producer(broker.bootstrap_servers)
    for offset in offsets:
        metadata = StreamMetadata(pid, partition if source is None else source, offset)
        producer.produce(topic, key=metadata.pack(), value=b"%d" % offset, partition=partition)
    assert producer.flush(WAIT_S) == 0


def consumer(broker, group, **more):
    from filtering.consumers.confluent import ReplayFilteredConsumer

    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group, "auto.offset.reset": "earliest"}
    settings |= {"log_level": 0, **more.pop("settings", {})}
    if settings.get("group.protocol") != "consumer":  # there the brokers say how often
        settings["heartbeat.interval.ms"] = 300
    return ReplayFilteredConsumer(settings, **more)


def offset_of(message):
    assert message.error() is None, message.error()
    return StreamMetadata.unpack(message.key()).offset


def records_of(messages):
    """Records without the client's events; the client continues after an event by itself."""
    return [
        message
        for message in messages
        if message.error() is None or failure_of_code(message.error()) is not Failure.TRANSIENT
    ]


def turns():
    """Turns of a polling loop, for as long as a stalled machine may need; afterwards the condition has to hold."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        yield


def until(reader, count, *, one_by_one=False):
    """The source offsets by partition, once so many records have come; and that nothing else comes."""
    found = {}
    left = count
    for _ in turns():
        for message in records_of(filter(None, [reader.poll(0.2)]) if one_by_one else reader.consume(500, 0.2)):
            found.setdefault(message.partition(), []).append(offset_of(message))
            left -= 1
        if left <= 0:
            break
    assert left == 0, f"{left} of {count} records are missing or too many: {found}"
    return found


@pytest.mark.parametrize("one_by_one", [True, False], ids=["poll", "consume"])
def test_replays_are_dropped_also_over_restarts(broker, topic, one_by_one):
    fill(broker, topic, 0, [*range(100), *range(50, 120)])
    fill(broker, topic, 1, [*range(30), *range(30)])
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        assert until(reader, 150, one_by_one=one_by_one) == {0: list(range(120)), 1: list(range(30))}
        reader.commit()
        assert reader.counts[topic].kept == 150
    fill(broker, topic, 0, [*range(80, 130)])
    fill(broker, topic, 1, [*range(10, 40)])
    with consumer(broker, topic) as again:
        again.subscribe([topic])
        assert until(again, 20, one_by_one=one_by_one) == {0: list(range(120, 130)), 1: list(range(30, 40))}


def fill_in_header(broker, topic, offsets):
    """Records of one pair that carry their metadata in the header, under keys of their own."""
    producer = plain_producer(broker.bootstrap_servers)
    for offset in offsets:
        headers = [(METADATA_HEADER, StreamMetadata(PID, 0, offset).pack())]
        producer.produce(topic, key=b"customer", value=b"%d" % offset, headers=headers, partition=0)
    assert producer.flush(WAIT_S) == 0


def read_by(client, broker, topic, count, **more):
    """The values that a consumer yields, until there are `count`; then it commits. client: which one, and how."""
    name, _, way = client.partition(" ")

    def by_confluent():
        with consumer(broker, topic, **more) as reader:
            reader.subscribe([topic])
            for _ in turns():
                messages = filter(None, [reader.poll(0.2)]) if way == "poll" else reader.consume(50, 0.2)
                yielded.extend(int(message.value()) for message in records_of(messages))
                if len(yielded) >= count:
                    break
            reader.commit()

    async def by_aiokafka():
        from filtering.consumers.aiokafka import ReplayFilteredConsumer

        settings = {"bootstrap_servers": broker.bootstrap_servers, "auto_offset_reset": "earliest"}
        async with asyncio.timeout(WAIT_S), ReplayFilteredConsumer(topic, group_id=topic, **settings, **more) as reader:
            while len(yielded) < count:
                if way == "getone":
                    yielded.append(int((await reader.getone()).value))
                else:
                    found = await reader.getmany(timeout_ms=100, max_records=50)
                    yielded.extend(int(record.value) for records in found.values() for record in records)
            await reader.commit()

    yielded = []
    try:
        by_confluent() if name == "confluent" else asyncio.run(by_aiokafka())
    except WrongCarrier as error:
        return yielded, error
    return yielded, None


CLIENTS = ["confluent poll", "confluent consume", "aiokafka getone", "aiokafka getmany"]


@pytest.mark.parametrize("client", CLIENTS)
def test_faults_s7_a_reader_of_keys_says_so_and_stops_where_the_metadata_are_in_the_header(
    broker, topic, client, caplog
):
    fill_in_header(broker, topic, [*range(50), *range(100), *range(50)])
    yielded, refused = read_by(client, broker, topic, 200)
    assert (refused.value, refused.right) == ("key", "header")
    assert len(yielded) < 100
    [line] = [line for line in caplog.messages if "stream metadata" in line]
    assert line.startswith(f"topic {topic}: no record of a batch has stream metadata as carrier='key'")
    assert read_by(client, broker, topic, 100, carrier="header") == (list(range(100)), None)


@pytest.mark.parametrize("client", [CLIENTS[0], CLIENTS[3]])
def test_faults_s7_marks_of_another_carrier_are_refused_until_the_printed_command_forgets_them(broker, topic, client):
    fill_in_header(broker, topic, range(20))
    assert read_by(client, broker, topic, 20, carrier="header") == (list(range(20)), None)
    fill(broker, topic, 0, range(7))
    for carrier in ("key", own_position):
        yielded, refused = read_by(client, broker, topic, 1, carrier=carrier)
        assert (yielded, refused.right) == ([], "header")
    printed = re.search(r"kafka-consumer-groups.sh (.* --execute)", str(refused))[1]
    tool = [*java(*QUICK_START), "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"]
    arguments = shlex.split(printed.replace("HOST:9092", broker.bootstrap_servers))
    for _ in turns():
        done = subprocess.run([*tool, *arguments], capture_output=True, text=True, timeout=WAIT_S)
        if "Error" not in done.stdout + done.stderr:  # until the coordinator knows that its members are gone
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_by(client, broker, topic, 7) == (list(range(7)), None), "where it stood, without marks"


@pytest.mark.parametrize("client", CLIENTS)
def test_values_are_deserialized_and_those_that_can_not_be_are_handed_over_as_they_came(broker, topic, client):
    """Each record once, the refused one in the error; a replay that can't be read is dropped like any other."""
    name, _, way = client.partition(" ")
    seen, refused = [], []

    def number_of(data):
        if int(data) == 3:
            raise ValueError("three")
        return {"n": int(data)}

    def took(read):
        try:
            seen.extend(read())
        except NotDeserialized as error:
            seen.extend(error.records)
            refused.extend((one, why) for one, why in error.failed)

    def by_confluent():
        with consumer(broker, topic, carrier="header", deserializer=number_of) as reader:
            reader.subscribe([topic])
            for _ in turns():
                took(lambda: records_of(filter(None, [reader.poll(0.2)]) if way == "poll" else reader.consume(50, 0.2)))
                if len(seen) >= 9:
                    break
            reader.commit()
        return [(one.value(), one.key()) for one in seen], [(one.value(), str(why)) for one, why in refused]

    async def by_aiokafka():
        from filtering.consumers.aiokafka import ReplayFilteredConsumer

        settings = {"bootstrap_servers": broker.bootstrap_servers, "auto_offset_reset": "earliest"}
        async with (
            asyncio.timeout(WAIT_S),
            ReplayFilteredConsumer(
                topic, group_id=topic, carrier="header", deserializer=number_of, **settings
            ) as reader,
        ):
            while len(seen) < 9:
                try:
                    if way == "getone":
                        seen.append(await reader.getone())
                    else:
                        found = await reader.getmany(timeout_ms=100, max_records=50)
                        seen.extend(one for records in found.values() for one in records)
                except NotDeserialized as error:
                    seen.extend(error.records)
                    refused.extend(error.failed)
            await reader.commit()
        return [(one.value, one.key) for one in seen], [(one.value, str(why)) for one, why in refused]

    fill_in_header(broker, topic, [*range(6), *range(2, 10)])
    good, bad = by_confluent() if name == "confluent" else asyncio.run(by_aiokafka())
    assert good == [({"n": number}, b"customer") for number in range(10) if number != 3]
    assert bad == [(b"3", "three")]


def own_position(record):
    """The position of records without metadata, whose value is "<source offset>"."""
    value = record.value() if callable(record.value) else record.value
    return None if value == b"none" else StreamMetadata(PID, 0, int(value)).pack()


def fill_without_metadata(broker, topic, values):
    producer = plain_producer(broker.bootstrap_servers)
    for value in values:
        producer.produce(topic, value=str(value).encode(), partition=0)
    assert producer.flush(WAIT_S) == 0


@pytest.mark.parametrize("one_by_one", [True, False], ids=["poll", "consume"])
def test_a_function_gives_records_without_metadata_a_position_and_what_it_raises_stops_the_consumer(
    broker, topic, one_by_one
):
    fill_without_metadata(broker, topic, [0, 1, "none", 2, 1, 2, "none", 3])
    with consumer(broker, topic, carrier=own_position) as reader:
        reader.subscribe([topic])
        found = []
        for _ in turns():
            found += records_of(filter(None, [reader.poll(0.2)]) if one_by_one else reader.consume(500, 0.2))
            if len(found) >= 6:
                break
        assert [message.value() for message in found] == [b"0", b"1", b"none", b"2", b"none", b"3"]
        reader.commit()
        fill_without_metadata(broker, topic, [3, "no number", 4])

        def read_on():
            for _ in turns():
                (reader.poll if one_by_one else partial(reader.consume, 500))(0.2)

        for _ in range(2):  # it stays so: what comes behind must not be committed over it
            with pytest.raises(ValueError, match="no number"):
                read_on()
        assert reader.counts[topic].kept == 4


def test_what_was_yielded_but_not_committed_is_yielded_again(broker, topic):
    fill(broker, topic, 0, range(50))
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        until(reader, 50)
        reader.commit()
        fill(broker, topic, 0, range(40, 100))
        until(reader, 50)
    with consumer(broker, topic) as again:
        again.subscribe([topic])
        assert until(again, 50) == {0: list(range(50, 100))}


def test_a_seek_loads_the_marks_of_the_committed_position_or_clears_them(broker, topic, caplog):
    from confluent_kafka import TopicPartition

    fill(broker, topic, 0, [*range(20), *range(20)])
    with consumer(broker, topic) as reader:
        reader.assign([TopicPartition(topic, 0)])
        until(reader, 20)
        reader.commit()
        [committed] = ask_partitions(lambda left_s: reader.client.committed([TopicPartition(topic, 0)], left_s))
        fill(broker, topic, 0, range(10, 30))
        until(reader, 10)
        reader.seek(TopicPartition(topic, 0, committed.offset))
        assert until(reader, 10) == {0: list(range(20, 30))}, "the marks of that position came with it"
        reader.seek(TopicPartition(topic, 0, 20))
        assert "begins with empty marks" in caplog.text
        assert until(reader, 30) == {0: [*range(20), *range(20, 30)]}, "no marks: the first replay passes"


@pytest.mark.parametrize(
    "settings",
    [{}, {"partition.assignment.strategy": "cooperative-sticky"}, {"group.protocol": "consumer"}],
    ids=["eager", "cooperative", "consumer protocol"],
)
def test_partitions_move_between_consumers_with_their_marks(broker, topic, settings):
    fill(broker, topic, 0, range(50))
    fill(broker, topic, 1, range(50))

    are_moving = True

    def hand_over(one, _):
        if are_moving:  # at the end nobody reads on, and a group that has forgotten its member takes no commit
            one.commit()

    def open_(**more):
        made = consumer(broker, topic, settings=settings, **more)
        made.subscribe([topic], on_revoke=hand_over)
        return made

    first = open_()
    try:
        got = until(first, 100)
        second = open_()
        try:
            for _ in turns():
                seen = [records_of(one.consume(10, 0.1)) for one in (first, second)]
                assert seen == [[], []], "all of it was committed"
                if len(second.client.assignment()) == len(first.client.assignment()) == 1:
                    break
            else:
                pytest.fail("the second consumer was given no partition")
            for partition in (0, 1):
                fill(broker, topic, partition, [*range(25, 75)])
            got = {}
            for _ in turns():
                for message in records_of([*first.consume(100, 0.1), *second.consume(100, 0.1)]):
                    got.setdefault(message.partition(), []).append(offset_of(message))
                if sum(map(len, got.values())) >= 50:
                    break
            assert got == {0: list(range(50, 75)), 1: list(range(50, 75))}
            assert {len(first.counts), len(second.counts)} == {1}
        finally:
            are_moving = False
            second.close()
    finally:
        are_moving = False
        first.close()


def test_marks_that_do_not_fit_lie_in_a_compacted_topic(broker, topic):
    marks_topic = next(_names)
    create_topic(broker.bootstrap_servers, marks_topic, cleanup_policy="compact")
    producer = plain_producer(broker.bootstrap_servers)
    for source in range(300):
        key = StreamMetadata(sqe_producer_id("topology", str(source)), source, 10).pack()
        producer.produce(topic, key=key, value=b"v", partition=0)
    assert producer.flush(WAIT_S) == 0
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        until(reader, 300)
        with pytest.raises(MarksTooLarge, match="marks_topic"):
            reader.commit()
    with consumer(broker, topic, marks_topic=marks_topic) as reader:
        reader.subscribe([topic])
        until(reader, 300)
        reader.commit()
        fill(broker, topic, 0, [1], source=2)
        until(reader, 1)
        reader.commit()
    first, second, tombstone = read_plainly(broker.bootstrap_servers, marks_topic)
    assert first.key == tombstone.key
    assert tombstone.value is None, "the older version goes once the newer is committed"
    with consumer(broker, topic, marks_topic=marks_topic) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, [1, 2], source=2)
        assert until(again, 1) == {0: [2]}
    assert second.key != first.key


def test_consume_transform_produce_in_one_transaction(broker, topic):
    """Marks and offsets are committed with the output; an aborted transaction is read again."""
    from confluent_kafka import Producer

    create_topic(broker.bootstrap_servers, output := next(_names))
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(WAIT_S)

    def transform(reader, count, *, commit):
        producer.begin_transaction()
        for offsets in until(reader, count).values():
            for offset in offsets:
                producer.produce(output, value=b"%d" % offset)
        reader.send_to_transaction(producer)
        if commit:
            producer.commit_transaction(WAIT_S)
            reader.transaction_committed()
        else:
            producer.abort_transaction(WAIT_S)
            reader.transaction_aborted()

    fill(broker, topic, 0, [*range(20), *range(10)])
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        transform(reader, 20, commit=False)
        transform(reader, 20, commit=True)
        fill(broker, topic, 0, range(15, 30))
        transform(reader, 10, commit=False)
        transform(reader, 10, commit=True)
    with consumer(broker, topic) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(25, 40))
        transform(again, 10, commit=True)
    with consumer(broker, output + "-judge", settings={"isolation.level": "read_committed"}) as judge:
        judge.subscribe([output])
        values = []
        for _ in turns():
            values += [int(message.value()) for message in records_of(judge.consume(100, 0.2))]
            if len(values) >= 40:
                break
    assert values == list(range(40))


CRASHING = """
import os, sys
from filtering import METADATA_HEADER, NotDeserialized, StreamMetadata, WrongCarrier, sqe_producer_id
from filtering.consumers.confluent import ReplayFilteredConsumer
servers, topic, out, commit_every = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
config = {"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest", "group.instance.id": "one"}
with ReplayFilteredConsumer(config) as reader, open(out, "a", buffering=1) as seen:
    reader.subscribe([topic])
    count = 0
    while True:
        message = reader.poll(1)
        if message is None or message.error():
            continue
        print(message.partition(), StreamMetadata.unpack(message.key()).offset, file=seen)
        count += 1
        if count % commit_every == 0:
            reader.commit()
            print("committed", flush=True)
"""


def test_a_consumer_that_is_killed_goes_on_behind_its_last_commit(broker, topic, tmp_path):
    fill(broker, topic, 0, [*range(300), *range(150, 300)])
    out = tmp_path / "seen"
    command = [sys.executable, "-c", CRASHING, broker.bootstrap_servers, topic, str(out), "70"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        for _ in range(2):
            assert process.stdout.readline() == "committed\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        process.stdout.close()
    before = [int(line.split()[1]) for line in out.read_text().splitlines() if line.count(" ") == 1]
    assert before[:140] == list(range(140))
    # By its name it takes the place of the dead one at once, whose session lasts as long as a machine may stall.
    with consumer(broker, topic, settings={"group.instance.id": "one"}) as again:
        again.subscribe([topic])
        assert until(again, 300 - _committed(broker, topic)) == {0: list(range(_committed(broker, topic), 300))}


def _found(broker, topic):
    """The offset that the group of this name committed for partition 0."""
    from confluent_kafka import Consumer, TopicPartition

    reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0})
    try:
        [found] = ask_partitions(lambda left_s: reader.committed([TopicPartition(topic, 0)], left_s))
    finally:
        reader.close()
    return found


def _committed(broker, topic):
    found = _found(broker, topic)
    position = decode(found.metadata)
    assert position.marks.get(PID, 0).offset == found.offset - 1
    return found.offset


def test_aiokafkas_consumer_yields_each_record_once_over_restarts_seeks_and_rebalances(broker, topic, caplog):
    from aiokafka import TopicPartition

    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    def open_(**more):
        return ReplayFilteredConsumer(
            topic, group_id=topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest",
            heartbeat_interval_ms=300, session_timeout_ms=SESSION_MS, **more,
        )  # fmt: skip

    async def until(count, *readers, one_by_one=False):
        found = {}
        async with asyncio.timeout(WAIT_S):
            while sum(map(len, found.values())) < count:
                for reader in readers:
                    records = (
                        [await reader.getone()]
                        if one_by_one
                        else itertools.chain.from_iterable((await reader.getmany(timeout_ms=100)).values())
                    )
                    for record in records:
                        found.setdefault(record.partition, []).append(StreamMetadata.unpack(record.key).offset)
        return found

    async def story():
        fill(broker, topic, 0, [*range(60), *range(30, 60)])
        fill(broker, topic, 1, [*range(30), *range(10)])
        async with open_() as reader:
            assert await until(90, reader) == {0: list(range(60)), 1: list(range(30))}
            await reader.commit()
            assert decode(_found(broker, topic).metadata).marks is not None
            fill(broker, topic, 0, range(50, 70))
            assert await until(10, reader, one_by_one=True) == {0: list(range(60, 70))}
        moved = asyncio.Event()

        async def assigned(_, partitions):
            if len(partitions) == 1:
                moved.set()

        async def revoked(consumer, _):
            await consumer.commit()

        async with open_(on_assign=assigned, on_revoke=revoked) as first:
            assert await until(10, first) == {0: list(range(60, 70))}, "what was not committed comes again"
            async with open_(on_revoke=revoked) as second:
                async with asyncio.timeout(WAIT_S):
                    while not moved.is_set():
                        assert await first.getmany(timeout_ms=50) == await second.getmany(timeout_ms=50) == {}
                for partition in (0, 1):
                    fill(broker, topic, partition, range(20, 80))
                assert await until(60, first, second) == {0: list(range(70, 80)), 1: list(range(30, 80))}
        async with open_() as reader:
            [place] = [one async for one in _first_assigned(reader, topic)]
            await reader.seek(place, 5)
            assert "begins with empty marks" in caplog.text
            assert (await until(75, reader))[0][:3] == [5, 6, 7]

    async def _first_assigned(reader, topic):
        async with asyncio.timeout(WAIT_S):
            while TopicPartition(topic, 0) not in reader.client.assignment():
                await reader.getmany(timeout_ms=50)
        yield TopicPartition(topic, 0)

    asyncio.run(story())


def test_aiokafkas_consumer_takes_a_function_too_and_stops_at_what_it_raises(broker, topic):
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    async def read():
        settings = {"bootstrap_servers": broker.bootstrap_servers, "auto_offset_reset": "earliest"}
        async with ReplayFilteredConsumer(topic, group_id=topic, carrier=own_position, **settings) as reader:
            async with asyncio.timeout(WAIT_S):
                found = [(await reader.getone()).value for _ in range(4)]
            assert found == [b"0", b"none", b"1", b"2"]
            await reader.commit()
            fill_without_metadata(broker, topic, [2, "no number", 3])

            async def read_on(call):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await call()

            for call in (reader.getone, partial(reader.getmany, timeout_ms=100)):
                with pytest.raises(ValueError, match="no number"):
                    await read_on(call)

    fill_without_metadata(broker, topic, [0, "none", 0, 1, 0, 1, 2])
    asyncio.run(read())


def test_each_client_goes_on_where_the_other_one_stopped(broker, topic):
    """Both clients read the metadata of a committed offset that the other client wrote."""
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    async def with_aiokafka(count):
        found = []
        settings = {"bootstrap_servers": broker.bootstrap_servers, "auto_offset_reset": "earliest"}
        settings["session_timeout_ms"] = SESSION_MS
        async with asyncio.timeout(WAIT_S), ReplayFilteredConsumer(topic, group_id=topic, **settings) as reader:
            while len(found) < count:
                for records in (await reader.getmany(timeout_ms=100)).values():
                    found += [StreamMetadata.unpack(record.key).offset for record in records]
            await reader.commit()
        return found

    fill(broker, topic, 0, range(50))
    assert asyncio.run(with_aiokafka(50)) == list(range(50))
    fill(broker, topic, 0, range(40, 60))
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        assert until(reader, 10) == {0: list(range(50, 60))}
        reader.commit()
    fill(broker, topic, 0, range(55, 70))
    assert asyncio.run(with_aiokafka(10)) == list(range(60, 70))


class OneStartpoint:
    look_every_s = 0.1

    def version(self):
        return 0

    def moved(self, consumer, facts, running_sequence):
        return None

    def __init__(self, offset, *, reset_marks):
        self.target, self.events = StartTarget(offset, 12, reset_marks), []

    def pending(self, consumer, facts, committed_sequence):
        self.events.append((consumer, facts.partition, facts.bounds(facts.topic, facts.partition), committed_sequence))
        return self.target if facts.partition == 0 and committed_sequence < self.target.sequence else None

    def consumed(self, consumer, topic, partition, sequence):
        self.events.append(("consumed", partition, sequence))


@pytest.mark.parametrize("reset_marks", [True, False])
def test_a_startpoint_sends_a_partition_back_once(broker, topic, reset_marks):
    fill(broker, topic, 0, range(40))
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        until(reader, 40)
        reader.commit()
    startpoint = OneStartpoint(25, reset_marks=reset_marks)
    fill(broker, topic, 0, range(40, 45))
    with consumer(broker, topic, startpoints=startpoint) as reader:
        reader.subscribe([topic])
        expected = list(range(25, 45)) if reset_marks else list(range(40, 45))
        assert until(reader, len(expected)) == {0: expected}
        assert ("consumed", 0, 12) not in startpoint.events
        reader.commit()
        assert startpoint.events[-1] == ("consumed", 0, 12)
    with consumer(broker, topic, startpoints=startpoint) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(43, 48))
        assert until(again, 3) == {0: [45, 46, 47]}, "applied once"


@pytest.fixture(params=["directory", "topic"])
def store(request, broker, tmp_path):
    """A real store of startpoints."""
    if request.param == "directory":
        made = StartpointStore.open(tmp_path / "startpoints")
    else:
        from pushrep.kafka.startpoints import open_store

        create_topic(broker.bootstrap_servers, name := f"{next(_names)}-startpoints", cleanup_policy="compact")
        made = open_store(KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name))
    with made:
        yield made


def events(store):
    return [type(fact).__name__ for fact in store.history()]


def test_a_group_obeys_the_store_and_a_killed_holder_starts_again_from_what_was_stored(broker, topic, store):
    """Resolved once, stored before it is used, in the commit, consumed after it: rules 2 and 3 on Kafka."""
    from confluent_kafka import TopicPartition

    fill(broker, topic, 0, range(40))
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as reader:
        reader.subscribe([topic])
        until(reader, 40)
        reader.commit()
    sequence = store.write(topic, topic, 0, Startpoint.relative(records=-15, reset_marks=True), "nonsense since 25")
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as reader:
        reader.subscribe([topic])
        assert until(reader, 15) == {0: list(range(25, 40))}
        # it ends here, between applied and commit
    assert events(store) == ["Written", "Applied"]
    fill(broker, topic, 0, range(40, 45))
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as reader:
        reader.subscribe([topic])
        assert until(reader, 20) == {0: list(range(25, 45))}, "the stored offset, not 15 from somewhere else"
        assert events(store) == ["Written", "Applied"]
        reader.commit()
        assert events(store) == ["Written", "Applied", "Consumed"]
        [committed] = ask_partitions(lambda left_s: reader.client.committed([TopicPartition(topic, 0)], left_s))
        assert decode(committed.metadata).startpoint == sequence
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(43, 48))
        assert until(again, 3) == {0: [45, 46, 47]}, "applied once"


@pytest.mark.parametrize("store", ["directory"], indirect=True)
def test_what_was_committed_and_not_said_is_said_by_the_next_holder(broker, topic, store):
    class KilledAfterTheCommit(GroupStartpoints):
        def consumed(self, consumer, topic, partition, sequence):
            raise KeyboardInterrupt

    fill(broker, topic, 0, range(10))
    store.write(topic, topic, 0, Startpoint.specific(4), "the first ones are of a test")
    with consumer(broker, topic, startpoints=KilledAfterTheCommit(store)) as reader:
        reader.subscribe([topic])
        assert until(reader, 6) == {0: list(range(4, 10))}
        with pytest.raises(KeyboardInterrupt):
            reader.commit()
    assert events(store) == ["Written", "Applied"]
    fill(broker, topic, 0, range(10, 12))
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as again:
        again.subscribe([topic])
        assert until(again, 2) == {0: [10, 11]}
    assert events(store) == ["Written", "Applied", "Consumed"]


@pytest.mark.parametrize("startpoint", [Startpoint.specific(99), Startpoint.bootstrap()], ids=str)
def test_a_startpoint_that_fails_stops_the_start_with_the_reason(broker, topic, tmp_path, startpoint):
    store = StartpointStore.open(tmp_path)
    fill(broker, topic, 0, range(3))
    sequence = store.write(topic, topic, 0, startpoint, "a typo")
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as reader:
        reader.subscribe([topic])
        with pytest.raises(StartpointFailed, match=r"beyond the end|take EARLIEST") as failed:
            until(reader, 1)
        assert failed.value.sequence == sequence
    store.cancel(sequence, "it was one")
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as again:
        again.subscribe([topic])
        assert until(again, 3) == {0: [0, 1, 2]}


def test_a_time_is_looked_up_in_the_topic(broker, topic, tmp_path):
    store = StartpointStore.open(tmp_path)
    alter_topic(broker.bootstrap_servers, topic, retention_ms=-1)  # the records are old
    producer = plain_producer(broker.bootstrap_servers)
    for offset in range(10):
        key = StreamMetadata(PID, 0, offset).pack()
        producer.produce(topic, key=key, partition=0, timestamp=1_000_000 + 1000 * offset)
    assert producer.flush(WAIT_S) == 0
    store.write(topic, topic, None, Startpoint.timestamp(1_006_500, out_of_range="earliest"), "from there")
    with consumer(broker, topic, startpoints=GroupStartpoints(store)) as reader:
        reader.subscribe([topic])
        assert until(reader, 3) == {0: [7, 8, 9]}
