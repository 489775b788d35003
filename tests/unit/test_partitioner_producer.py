"""The gapless producer beside brokers that fail: who reads with a filter sees every record once, and in order.

The brokers are simulated, and librdkafka speaks to them over loopback; tests/kafka has Kafka's own.
"""

import random
import threading
import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from filtering import METADATA_HEADER, MissingRight, ReplayFilter, StreamMetadata, retry
from partitioner import (
    BadPartitionerSetting,
    NotDelivered,
    OffsetNotAbove,
    PartitionStopped,
    TopicUnfit,
    confluent,
)
from partitioner.confluent import SourcePartitionProducer, topic_facts
from pushrep.kafka.answers import Code
from tests.unit.simulated_brokers import CONFIGS, LOST, METADATA, PRODUCE, UNSENT, SimulatedBrokers

PID, WAIT_S = 7, 60


@pytest.fixture
def brokers():
    """One broker with a topic of two partitions; librdkafka speaks no newer Produce than 10."""
    with SimulatedBrokers(partitions=2) as made:
        made.produce_version = 8
        yield made


@pytest.fixture
def failures(monkeypatch):
    """After how many failures in a row each new client came; none is waited for."""
    counts = []

    class Counting:
        @staticmethod
        def pause_s(count):
            counts.append(count)
            return 0.0

    monkeypatch.setattr(confluent, "_BACKOFF", Counting)
    return counts


def settings_of(brokers, **more):
    given = {"bootstrap.servers": brokers.servers, "log_level": 0, "linger.ms": 1, "retry.backoff.ms": 1}
    return {**given, "retry.backoff.max.ms": 5, "reconnect.backoff.ms": 1, **more}


def opened(brokers, settings=None, **more):
    return SourcePartitionProducer(settings_of(brokers, **(settings or {})), brokers.name, **more)


def produce(producer, offsets, sources=(0, 1, 2, 3), **more):
    for offset in offsets:
        for source in sources:
            producer.produce(StreamMetadata(PID, source, offset), b"%d" % offset, **more)


def filtered(brokers, carrier="key"):
    """The source offsets that a filtering reader sees, by source partition."""
    rule, kept = ReplayFilter(), {}
    for number, partition in enumerate(brokers.topic):
        for record in partition.records():
            packed = record.key if carrier == "key" else dict(record.headers)[METADATA_HEADER]
            if rule.admit(packed, number):
                metadata = StreamMetadata.unpack(packed)
                assert metadata.partition % len(brokers.topic) == number
                kept.setdefault(metadata.partition, []).append(metadata.offset)
    return kept


def test_a_record_is_what_was_given_with_its_source_position(brokers):
    first = StreamMetadata(PID, 3, 5)
    with opened(brokers) as producer:
        producer.produce(first, b"v", headers=[("h", b"1"), (METADATA_HEADER, b"old")], timestamp_ms=1_000)
        began_ms = time.time_ns() // 1_000_000
        producer.produce(StreamMetadata(PID, 3, 6), None)
        with pytest.raises(BadPartitionerSetting, match="carrier"):
            producer.produce(StreamMetadata(PID, 3, 7), b"v", key=b"own")
    one, two = brokers.topic[1].records()
    assert (one.key, one.value, one.headers, one.timestamp_ms) == (first.pack(), b"v", (("h", b"1"),), 1_000)
    assert (two.value, two.headers) == (None, ())
    assert two.timestamp_ms >= began_ms
    with opened(brokers, carrier="header") as producer:
        producer.produce(StreamMetadata(8, 0, 0), b"v", key=b"own", headers=[("h", None), (METADATA_HEADER, b"old")])
    [record] = brokers.topic[0].records()
    assert record.key == b"own"
    assert record.headers == (("h", None), (METADATA_HEADER, StreamMetadata(8, 0, 0).pack()))


def test_every_delivery_is_told_once_whatever_a_callback_raises(brokers):
    told = []

    def tell(metadata, message):
        told.append((metadata.partition, metadata.offset, message.offset()))
        if metadata.offset == 1:
            raise ValueError(metadata.partition)

    with opened(brokers) as producer:
        produce(producer, range(3), on_delivery=tell)
        with pytest.raises(ValueError, match=r"[0-3]"):
            producer.flush(WAIT_S)
        assert len(producer) == 0
        assert producer.poll() == 0, "the other errors were logged"
    assert sorted(told) == sorted(
        (StreamMetadata.unpack(one.key).partition, StreamMetadata.unpack(one.key).offset, one.offset)
        for partition in brokers.topic
        for one in partition.records()
    )


def test_of_several_callbacks_that_fail_the_first_one_is_raised_and_the_others_are_logged(brokers, caplog):
    called = []

    def fail(metadata, _message):
        called.append(metadata.offset)
        raise ValueError(metadata.offset)

    with opened(brokers) as producer:
        produce(producer, range(3), sources=[0], on_delivery=fail)
        with pytest.raises(ValueError, match="0"):
            producer.flush(WAIT_S)
    assert called == [0, 1, 2]
    assert caplog.text.count("failed, after another that is raised") == 2


def test_a_flush_waits_for_what_can_still_be_delivered_though_a_partition_is_stopped(brokers, failures):
    brokers.topic[0].refuses = lambda record: "it is bad" if record.value == b"0" else None
    with opened(brokers) as producer:
        produce(producer, [0], sources=[0])
        with pytest.raises(PartitionStopped):
            producer.flush(WAIT_S)
        brokers.down = {1}
        brokers.disconnect()
        produce(producer, range(5), sources=[1])
        with pytest.raises(NotDelivered):
            producer.flush(0.1)
        brokers.down = set()
        with pytest.raises(PartitionStopped):
            producer.flush(WAIT_S)
        assert len(brokers.topic[1].records()) == 5
        brokers.topic[0].refuses = lambda _record: None
        producer.retry(0)
        producer.flush(WAIT_S)


def test_one_poll_takes_every_delivery_that_has_come(brokers):
    with opened(brokers, {"linger.ms": 200, "batch.num.messages": 10}) as producer:
        produce(producer, [0], sources=[0])
        producer.flush(WAIT_S)
        produce(producer, range(1, 11), sources=[0])
        until_s = time.monotonic() + WAIT_S
        while len(producer) == 10 and time.monotonic() < until_s:
            producer.poll(1)
        assert len(producer) == 0, "the broker acknowledged all ten at once"


@pytest.mark.parametrize("seed", range(3))
def test_faults_at_random_lose_and_reorder_nothing(brokers, failures, seed):
    rng, delivered = random.Random(seed), set()
    faults = [
        LOST, UNSENT, Code.NOT_LEADER_OR_FOLLOWER, Code.REQUEST_TIMED_OUT, Code.NOT_ENOUGH_REPLICAS,
        Code.OUT_OF_ORDER_SEQUENCE_NUMBER, Code.UNKNOWN_PRODUCER_ID,
    ]  # fmt: skip
    with opened(brokers) as producer:
        for at in range(0, 60, 10):
            brokers.faults[PRODUCE] += rng.sample(faults, 2)
            produce(producer, range(at, at + 10))
            if rng.random() < 0.5:
                producer.flush(WAIT_S)
                delivered.add(len(failures))
        producer.flush(WAIT_S)
    assert filtered(brokers) == {source: list(range(60)) for source in range(4)}
    assert {failures[at] for at in delivered if at < len(failures)} <= {0}, "a delivery ends failures in a row"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (Code.INVALID_TIMESTAMP, r"its timestamp is 1000 ms; the topic's limit is message\.timestamp\.before\.max\.ms"),
        (Code.INVALID_RECORD, "INVALID_RECORD|refused"),
    ],
)
def test_one_refused_record_stops_its_partition_at_itself_until_a_retry(brokers, failures, code, told):
    brokers.topic[0].refuses = lambda record: "it is bad" if record.value == b"bad" else None
    brokers.topic[0].refuses_with = code
    with opened(brokers, {"linger.ms": 50}) as producer:
        produce(producer, range(3))
        producer.produce(StreamMetadata(PID, 0, 3), b"bad", timestamp_ms=1_000)
        produce(producer, range(4, 8))
        with pytest.raises(PartitionStopped, match=told) as stopped:
            producer.flush(WAIT_S)
        assert (stopped.value.partition, stopped.value.metadata) == (0, StreamMetadata(PID, 0, 3))
        assert producer.stopped.keys() == {0}
        assert len(failures) <= 2, "what fails together is one failure"
        with pytest.raises(PartitionStopped):
            producer.produce(StreamMetadata(PID, 0, 9), b"9")
        produce(producer, [8], sources=[1])
        seen = filtered(brokers)
        assert seen[0] == [0, 1, 2], "what is before it is in the log, what is behind it is not"
        producer.retry(1)  # of a partition that goes on: nothing
        brokers.topic[0].refuses = lambda _record: None
        producer.retry(0)
        producer.flush(WAIT_S)
        assert producer.stopped == {}
    seen = filtered(brokers)
    assert (seen[0], seen[1]) == (list(range(8)), [0, 1, 2, 4, 5, 6, 7, 8])


def test_a_record_that_is_too_large_is_told_with_the_topics_limit(brokers, failures):
    brokers.topic[0].size_max = brokers.topic[1].size_max = 2_000
    with opened(brokers) as producer:
        producer.produce(StreamMetadata(PID, 0, 0), b"0")
        producer.flush(WAIT_S)
        producer.produce(StreamMetadata(PID, 0, 1), bytes(3_000))
        with pytest.raises(PartitionStopped, match=r"max\.message\.bytes=2000 \(set for the topic\)") as stopped:
            producer.flush(WAIT_S)
        assert stopped.value.cause.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
        assert failures == [0, 1], "the pause before the next client grows"
        brokers.topic[0].size_max = 10_000
        producer.retry(0)
    assert [len(one.value) for one in brokers.topic[0].records()] == [1, 3_000]


def test_a_missing_right_is_named(brokers):
    brokers.topic[0].refuses, brokers.topic[0].refuses_with = lambda _: "no", Code.TOPIC_AUTHORIZATION_FAILED
    producer = opened(brokers)
    producer.produce(StreamMetadata(PID, 0, 0), b"0")
    with pytest.raises(PartitionStopped, match="WRITE on topic 'orders'"):
        producer.close(WAIT_S)
    with pytest.raises(BadPartitionerSetting, match="closed"):
        producer.produce(StreamMetadata(PID, 1, 0), b"0")
    producer.close()


def test_while_brokers_are_away_records_wait_and_so_does_who_has_no_room(brokers):
    with opened(brokers, {"queue.buffering.max.messages": 1}, max_block_ms=50) as producer:
        brokers.down = {1}
        brokers.disconnect()
        producer.produce(StreamMetadata(PID, 0, 0), b"0")
        with pytest.raises(OffsetNotAbove):
            producer.produce(StreamMetadata(PID, 0, 0), b"0")
        with pytest.raises(NotDelivered) as late:
            producer.produce(StreamMetadata(PID, 1, 0), b"0")
        assert (late.value.records, late.value.timeout_s) == (1, 0.05)
        with pytest.raises(NotDelivered):
            producer.flush(0.01)
        assert len(producer) == 1
        brokers.down = set()
        producer.flush(WAIT_S)
    assert filtered(brokers) == {0: [0]}


def test_an_error_of_the_caller_leaves_at_once(brokers):
    began_s = time.monotonic()

    def fail():
        with opened(brokers) as producer:
            brokers.down = {1}
            brokers.disconnect()
            producer.produce(StreamMetadata(PID, 0, 0), b"0")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert time.monotonic() - began_s < 30


def test_the_count_is_that_of_the_start_or_a_given_one_and_a_topic_that_does_not_fit_is_named(brokers):
    with opened(brokers) as producer, opened(brokers, partition_count=1) as fewer:
        assert (producer.partition_count, fewer.partition_count) == (2, 1)
        produce(fewer, range(2))
    assert len(brokers.topic[1].records()) == 0
    with pytest.raises(TopicUnfit, match="partition_count=3 is fixed but the topic has 2"):
        opened(brokers, partition_count=3)
    with pytest.raises(BadPartitionerSetting, match="carrier"):
        opened(brokers, carrier="value")
    brokers.configs = {"cleanup.policy": "compact,delete"}
    with pytest.raises(TopicUnfit, match=r"cleanup\.policy=compact,delete"):
        opened(brokers)


def test_a_topic_is_told_by_its_cluster_its_id_and_how_long_it_keeps_records(brokers):
    config = {"bootstrap.servers": brokers.servers, "log_level": 0}
    facts = topic_facts(config, brokers.name)
    assert facts.incarnation.startswith("a cluster/")
    assert (facts.partitions, facts.retention_ms) == (2, None)
    brokers.configs = {"retention.ms": "86400000"}
    assert topic_facts(config, brokers.name).retention_ms == 86_400_000


def test_what_is_produced_while_refused_records_go_alone_waits_behind_those_after_them(brokers, failures):
    """Two records together are too large here, and each alone is not."""
    came, may_answer = threading.Event(), threading.Event()

    def hold(_record):
        came.set()
        assert may_answer.wait(WAIT_S)

    with opened(brokers, {"linger.ms": 50, "batch.num.messages": 2}, max_block_ms=50) as producer:
        produce(producer, [0], sources=[0])
        producer.flush(WAIT_S)
        brokers.topic[0].size_max, brokers.topic[0].refuses = 2_000, hold
        for offset in range(1, 5):
            producer.produce(StreamMetadata(PID, 0, offset), bytes(1_200))
        until_s = time.monotonic() + WAIT_S
        while not came.is_set() and time.monotonic() < until_s:
            producer.poll(0.01)
        try:
            with pytest.raises(NotDelivered):
                producer.produce(StreamMetadata(PID, 0, 5), b"behind")
        finally:
            may_answer.set()
        producer.flush(WAIT_S)
        producer.produce(StreamMetadata(PID, 0, 5), b"behind")
    assert filtered(brokers)[0] == list(range(6))


def test_a_client_that_ended_takes_no_record_and_a_new_one_takes_it(brokers, failures, monkeypatch):
    """It ends at a failure, before anybody has heard of that."""
    monkeypatch.setattr(confluent, "_SERVE_EVERY_S", WAIT_S)
    with opened(brokers) as producer:
        produce(producer, [0], sources=[0])
        producer.flush(WAIT_S)
        brokers.faults[PRODUCE] += [Code.OUT_OF_ORDER_SEQUENCE_NUMBER]
        until_s, offset = time.monotonic() + WAIT_S, 1
        while not failures and time.monotonic() < until_s:
            producer.produce(StreamMetadata(PID, 0, offset), b"v")
            offset += 1
        assert failures, "the client's end is seen by who produces"
    assert filtered(brokers) == {0: list(range(offset))}


def test_more_than_a_new_client_takes_at_once_goes_out_with_the_next_ones(brokers, failures):
    brokers.topic[0].refuses = lambda record: "it is bad" if record.value == b"0" else None
    with opened(brokers, {"queue.buffering.max.messages": 1}) as producer:
        produce(producer, [0], sources=[0])
        with pytest.raises(PartitionStopped):
            producer.flush(WAIT_S)
        brokers.down = {1}
        brokers.disconnect()
        produce(producer, [0], sources=[1])
        brokers.topic[0].refuses = lambda _record: None
        count = len(failures)
        producer.retry(0)
        producer.poll()
        assert len(failures) > count, "it had room for one of two"
        brokers.down = set()
        producer.flush(WAIT_S)
    assert filtered(brokers) == {0: [0], 1: [0]}


def test_a_topic_that_is_not_there_is_named_and_a_refusal_is_passed_on(brokers, monkeypatch):
    config = settings_of(brokers)
    brokers.faults[CONFIGS] += [Code.TOPIC_AUTHORIZATION_FAILED] * 2
    with pytest.raises(KafkaException) as told:
        topic_facts({"bootstrap.servers": brokers.servers, "log_level": 0}, brokers.name)
    assert told.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    brokers.faults.clear()
    monkeypatch.setattr(retry, "APPEARS_WITHIN_S", 0.0)
    brokers.is_missing = True
    with pytest.raises(TopicUnfit, match="orders"):
        topic_facts({"bootstrap.servers": brokers.servers, "log_level": 0}, brokers.name)
    with pytest.raises(TopicUnfit, match="orders"):
        SourcePartitionProducer(config, brokers.name)
    brokers.is_missing = False
    brokers.faults[METADATA] += [Code.TOPIC_AUTHORIZATION_FAILED] * 9
    with pytest.raises(MissingRight, match="WRITE on topic 'orders'"):
        SourcePartitionProducer(config, brokers.name)


@pytest.mark.parametrize(
    ("code", "before"), [(Code.INVALID_RECORD, []), (Code.POLICY_VIOLATION, []), (Code.INVALID_RECORD, [100])]
)
def test_what_follows_a_first_batch_that_is_refused_does_not_come_before_it(brokers, failures, code, before):
    """A broker takes any first sequence number of a client that it does not know: each new one's first batch counts."""
    brokers.topic[0].refuses, brokers.topic[0].refuses_with = lambda one: "bad" if one.value == b"0" else None, code
    with opened(brokers, {"batch.num.messages": 2, "linger.ms": 20}) as producer:
        produce(producer, before, sources=[2])
        producer.flush(WAIT_S)
        produce(producer, range(6), sources=[0])
        with pytest.raises(PartitionStopped):
            producer.flush(WAIT_S)
        brokers.topic[0].refuses = lambda _record: None
        producer.retry(0)
        producer.flush(WAIT_S)
    assert filtered(brokers)[0] == list(range(6))
    assert len(brokers.topic[0].records()) == len(before) + 6, "none went past the one that was refused"


def test_who_waits_behind_a_first_record_has_room_as_in_the_clients_queue(brokers):
    with opened(brokers, {"queue.buffering.max.messages": 3}, max_block_ms=50) as producer:
        brokers.down = {1}
        brokers.disconnect()
        produce(producer, range(3), sources=[0])
        with pytest.raises(NotDelivered):
            produce(producer, [3], sources=[0])
        brokers.down = set()
        producer.flush(WAIT_S)
        produce(producer, range(3, 9), sources=[0])
    assert filtered(brokers) == {0: list(range(9))}
