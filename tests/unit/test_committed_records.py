"""A topic that serves as a store, read while others write: nothing that comes in meanwhile is passed over."""

from concurrent.futures import Future
from types import SimpleNamespace
from uuid import UUID

from confluent_kafka import KafkaError, TopicPartition, Uuid

from pushrep.kafka import KafkaDestination, startpoints
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


def test_a_record_that_comes_in_while_the_end_is_read_is_read_the_next_time(monkeypatch):
    log = _Log()
    monkeypatch.setattr(startpoints, "Consumer", lambda _settings: log)
    monkeypatch.setattr(startpoints, "AdminClient", lambda _settings: _Admin())
    facts = TopicFacts("marks", UUID(int=7), 1, "compact", 1 << 20, -1, False, 86_400_000)
    destination = KafkaDestination(bootstrap_servers="127.0.0.1:1", topic="marks")
    records = CommittedRecords(destination, facts, lambda: 10.0)
    log.append("format", b"{}", is_last=False)
    log.append("a", b"1")

    asked = log.get_watermark_offsets
    answers = [asked(None, 0)]
    log.append("b", b"2")  # by another writer, between the question for the end and the reading up to it
    log.get_watermark_offsets = lambda *_: answers.pop() if answers else asked(None, 0)
    assert [message.offset() for message in records.new()] == [0, 1]
    assert [message.offset() for message in records.new()] == [3]
