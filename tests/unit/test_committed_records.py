"""A topic that serves as a store, read while others write: nothing that comes in meanwhile is passed over."""

import re
from concurrent.futures import Future
from types import SimpleNamespace
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition, Uuid

from pushrep.kafka import KafkaDestination, startpoints
from pushrep.kafka.errors import KafkaUnreachable
from pushrep.kafka.startpoints import CommittedRecords
from pushrep.kafka.topic import TopicFacts


class _Record:
    def __init__(self, offset, key, value):
        self._offset, self._key, self._value = offset, key, value

    def offset(self):
        return self._offset

    def key(self):
        return self._key.encode()

    def value(self):
        return self._value

    def error(self):
        return None


class _EndOfPartition(_Record):
    def error(self):
        return KafkaError(KafkaError._PARTITION_EOF)


class _Log:
    """The consumer's part for one partition, whose end is what it was when it was asked for."""

    def __init__(self):
        self.records, self.end = [], 0
        self._at = 0

    def append(self, key, value, *, is_last=True):
        self.records.append(_Record(self.end, key, value))
        self.end += 1 + is_last  # and the mark that ends its transaction

    def get_watermark_offsets(self, partition: TopicPartition, _):
        return 0, self.end

    def assign(self, partitions):
        self._at = partitions[0].offset

    def unassign(self):
        pass

    def poll(self, _):
        found = next((one for one in self.records if one.offset() >= self._at), None)
        if found is None:
            return _EndOfPartition(self.end, "", None)
        self._at = found.offset() + 1
        return found


class _Admin:
    """Of a cluster where nobody makes the topic anew."""

    def describe_topics(self, topics, *, request_timeout):
        same = Future()
        same.set_result(SimpleNamespace(topic_id=Uuid(0, 7)))
        return {"marks": same}


@pytest.fixture
def log(monkeypatch):
    log = _Log()
    monkeypatch.setattr(startpoints, "Consumer", lambda _settings: log)
    monkeypatch.setattr(startpoints, "AdminClient", lambda _settings: _Admin())
    return log


def reader(left_s=10.0):
    facts = TopicFacts("marks", UUID(int=7), 1, "compact", 1 << 20, -1, False, 86_400_000)
    destination = KafkaDestination(bootstrap_servers="127.0.0.1:1", topic="marks")
    return CommittedRecords(destination, facts, lambda: left_s)


def fails(error):
    def call(*_, **__):
        raise error

    return call


REFUSED = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.mark.parametrize(
    ("call", "answer", "raised", "why"),
    [
        ("get_watermark_offsets", lambda *_: None, KafkaUnreachable, ""),
        ("get_watermark_offsets", fails(TimeoutError()), KafkaUnreachable, "no answer in time"),
        ("get_watermark_offsets", fails(REFUSED), KafkaUnreachable, "Kafka refuses.*READ"),
        ("poll", lambda _: None, KafkaUnreachable, "offset 0 of topic marks, which ends at 2, can't be read in time"),
        ("poll", fails(REFUSED), KafkaUnreachable, "Kafka refuses.*READ"),
    ],
    ids=["no end", "late", "no right", "no record", "no right to the record"],
)
def test_what_can_not_be_read_is_no_end_of_the_topic(log, monkeypatch, call, answer, raised, why):
    log.append("a", b"1")
    records = reader(left_s=0.01)
    monkeypatch.setattr(log, call, answer)
    with pytest.raises(raised) as refused:
        list(records.new())
    assert re.search(why, str(refused.value)), refused.value


def test_the_end_is_waited_for_and_no_longer_than_it_may(log):
    log.append("a", b"1")
    with pytest.raises(KafkaUnreachable, match="the record before offset 3 of topic marks can't be read"):
        list(reader(left_s=0.01).new(at_least=3))
    assert [message.offset() for message in reader().new(at_least=2)] == [0]


def test_a_record_that_comes_in_while_the_end_is_read_is_read_the_next_time(log):
    records = reader()
    log.append("format", b"{}", is_last=False)
    log.append("a", b"1")

    asked = log.get_watermark_offsets
    answers = [asked(None, 0)]
    log.append("b", b"2")  # by another writer, between the question for the end and the reading up to it
    log.get_watermark_offsets = lambda *_: answers.pop() if answers else asked(None, 0)
    assert [message.offset() for message in records.new()] == [0, 1]
    assert [message.offset() for message in records.new()] == [3]
