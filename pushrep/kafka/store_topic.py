"""A compacted topic as a map from keys to values, changed by one writer at a time: `KeyedTopic.open(destination, ...)`.

    topic     one partition, cleanup.policy=compact      record 0: key `format`, JSON with the format's name and version
    change    one transaction: all of its records or none. A value None is a tombstone
    writer    one transactional.id for the topic: a writer that begins fences all others

    look ─▶ decide ─▶ change      refused with ChangedByOther if another writer changed the topic since the look

A writer that was fenced begins again, reads new records, and writes its change if there are none. So of two writers
that decided from the same state only one succeeds; a process that begins only to read does not prevent a change.

    0        1        2        3        4            offsets: {"a": 3, "b": 2}; the values stay on the brokers
    format   a        b        a        c, null      last_offset 4, written by the change in its header

Compaction removes a tombstone delete.retention.ms after it was written. A reader that was away for longer may have
missed some, and reads everything again.

CommittedRecords and `send` are shared with the store of startpoints in a topic (startpoints.py). There are two stores
because both formats are released, and their records differ. The number of a startpoint is the offset of its record:
that store chooses the offset before it writes, refuses a change at another offset, keeps all records, and finds out by
the offset whether a commit without an answer was stored. A record of this map may get any offset: this store keeps the
newest offset of each key, has tombstones, and finds its change again by a header.

An idle reader costs the brokers one request for the end: its consumer has the partition assigned only while it reads.
A topic that was deleted and made again under the same name is another topic; its id shows that.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from time import monotonic, sleep
from typing import Any, Self

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from filtering.consumers.confluent_client import ask_bounds, ask_brokers, failure_of_code, flush
from filtering.retry import Failure, ask
from pushrep.errors import PushrepError
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable, TopicMissing, TopicReplaced
from pushrep.kafka.topic import TopicFacts, kafka_failure, look_at_topic, uuid_of

_PAUSE_S = 0.005  # a commit becomes visible to readers some ms after its answer


class CommittedRecords:
    """Reads the committed records of the topic. Not thread-safe.

    left_s: returns how many seconds a call may take now. position: the offset of the next record to read. All methods
    raise KafkaUnreachable, TopicReplaced.
    """

    def __init__(self, destination: KafkaDestination, facts: TopicFacts, left_s: Callable[[], float]) -> None:
        self._topic, self._topic_id, self._left_s = facts.topic, facts.topic_id, left_s
        settings = {**destination.librdkafka_settings(), "log_level": 0}
        own = {
            "group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True,
            "isolation.level": "read_committed", "auto.offset.reset": "error", "check.crcs": True,
            "fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 10,
        }  # fmt: skip
        self._consumer, self._admin = Consumer({**settings, **own}), AdminClient(settings)
        self.position = 0

    def end(self) -> int:
        """The offset after the last committed record (the last stable offset)."""
        with _naming(self._topic):
            return self._end(self._left_s())

    def has_open_change(self) -> bool:
        """Whether a transaction is open: neither committed nor aborted yet."""
        place = TopicPartition(self._topic, 0)

        def end(left_s: float) -> int:
            asked = self._admin.list_offsets(
                {place: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=max(1.0, left_s),
            )
            return int(asked[place].result(max(1.0, left_s)).offset)

        with _naming(self._topic):
            return ask_brokers(end, self._left_s()) > self._end(self._left_s())

    def new(self, at_least: int = 0) -> Iterator[Message]:
        """Yield the records from `position` to the end, and advance `position`. at_least: wait until the end has this
        offset.
        """
        deadline_s = monotonic() + self._left_s()
        with _naming(self._topic):
            asked = (
                None if at_least else self._ask_identity(self._left_s())
            )  # sent before the next request, so that both wait once
            while (end := self._end(deadline_s - monotonic())) < at_least:
                if monotonic() > deadline_s:
                    why = f"the record before offset {at_least} of topic {self._topic} can't be read"
                    raise KafkaUnreachable(why)
                sleep(_PAUSE_S)
            if asked is not None:
                self._check_identity(asked)
        if end < self.position:
            raise TopicReplaced(self._topic)  # replaced after its id was checked
        yield from self.between(self.position, end, deadline_s)

    def between(self, start: int, end: int, deadline_s: float | None = None) -> Iterator[Message]:
        """Yield the records of [start, end), and advance `position`."""
        self.position = start
        if start >= end:
            return
        deadline_s = monotonic() + self._left_s() if deadline_s is None else deadline_s
        self._consumer.assign([TopicPartition(self._topic, 0, start)])
        try:
            while self.position < end:
                with _naming(self._topic):
                    message = self._next(end, deadline_s)
                if message is not None:
                    yield message
        finally:
            self._consumer.unassign()

    def close(self) -> None:
        """Close the clients."""
        self._consumer.close()

    def _next(self, end: int, deadline_s: float) -> Message | None:
        message = self._consumer.poll(max(0.0, deadline_s - monotonic()))
        if message is None:
            why = f"offset {self.position} of topic {self._topic}, which ends at {end}, can't be read in time"
            raise KafkaUnreachable(why)
        offset, error = int(message.offset() or 0), message.error()
        if error is None:
            self.position = min(offset + 1, end)  # records after the end are for the next call
            return message if offset < end else None
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return None  # the client looks for its group's coordinator; no group is used here
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
            self.position = max(self.position, offset)  # after the control record that ends a transaction
        elif failure_of_code(error) is not Failure.TRANSIENT:
            raise KafkaException(error)
        return None

    def _end(self, left_s: float) -> int:
        return ask_bounds(self._consumer, self._topic, 0, max(0.001, left_s))[1]

    def _ask_identity(self, left_s: float) -> "Future[Any]":
        topics = TopicCollection([self._topic])
        asked: Future[Any] = self._admin.describe_topics(topics, request_timeout=left_s)[self._topic]
        return asked

    def _check_identity(self, asked: "Future[Any]") -> None:
        """Raise TopicReplaced if the topic has another id. asked: the request; it is repeated after a transient
        error.
        """
        questions = chain([asked], iter(lambda: self._ask_identity(self._left_s()), None))
        found = ask_brokers(lambda left_s: next(questions).result(left_s).topic_id, self._left_s())
        if uuid_of(found) != self._topic_id:
            raise TopicReplaced(self._topic)


@contextmanager
def _naming(topic: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise kafka_failure(error.args[0], topic, "READ") from error
    except TimeoutError as error:
        raise KafkaUnreachable("no answer in time") from error


FENCED = {
    KafkaError._FENCED,  # noqa: SLF001 - its only name
    KafkaError._FATAL,  # noqa: SLF001 - fenced before this call
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.INVALID_TXN_STATE,
}
OVERTAKEN = {*FENCED, KafkaError.UNKNOWN}
"""Errors of a change after another writer began. UNKNOWN: coordinators give it at times while they fence a producer."""
_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001 - their only names
"""Errors of records whose transaction has failed; they do not have the reason."""
_FULL_QUEUE_S = 0.05

QUIET = logging.getLogger("pushrep.kafka.stores.librdkafka")
"""A logger for librdkafka that prints nothing: librdkafka logs a fenced producer as fatal, and errors that matter are
raised.
"""
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())


def send(
    producer: Producer, topic: str, records: Sequence[tuple[str, bytes | None]], timeout_s: float, **more: Any
) -> list[int]:
    """Send records (key, value) to partition 0, and return their offsets, in order. Raises KafkaException."""
    reports: list[tuple[KafkaError | None, Message]] = []
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, 0, lambda *report: reports.append(report), **more)
                break
            except BufferError:  # the client's queue is full (100,000 messages, or 1 GB)
                producer.poll(_FULL_QUEUE_S)
    flush(producer, timeout_s)
    for error, message in reports:
        if error is not None and error.code() in _PURGED:
            why = f"the brokers refused the transaction: check the right WRITE on topic {message.topic()!r}"
            raise KafkaException(KafkaError(error.code(), why))
        if error is not None:
            raise KafkaException(error)
    if len(reports) < len(records):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - its only name
    return [int(message.offset() or 0) for _, message in reports]


class KeyedTopicError(PushrepError):
    """The root of KeyedTopic's errors. Brokers that do not answer are KafkaUnreachable."""


class ChangedByOther(KeyedTopicError):
    """Another writer changed the topic since the last look. Nothing of this change is stored."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"another writer has changed topic {topic}; nothing of this change is stored")
        self.topic = topic


class ChangeNotStored(KeyedTopicError):
    """The brokers refused a change; nothing of it is stored."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"nothing of a change is stored in topic {topic}: {why}")
        self.topic, self.why = topic, why


class RecordsOfOthers(KeyedTopicError):
    """The topic holds records of another format: use another topic, or restore this one."""

    def __init__(self, topic: str, offset: int, why: str) -> None:
        super().__init__(f"topic {topic}: the record at offset {offset} has another format ({why}): use another topic")
        self.topic, self.offset, self.why = topic, offset, why


FORMAT, CHANGE = "format", "change"


class KeyedReading:
    """The map as read so far, from committed records. Not thread-safe.

    offsets: the offset of the newest record of each present key. last_offset: of the newest record, -1 before the
    first. last_change: the change in its header. All methods raise KafkaUnreachable, TopicReplaced, RecordsOfOthers.
    """

    def __init__(
        self,
        records: CommittedRecords,
        facts: TopicFacts,
        format_: Mapping[str, Any],
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._records, self._topic, self._format, self._now_s = records, facts.topic, dict(format_), now_s
        self._tombstones_s = facts.delete_retention_ms / 1000
        self._was_there_s: float | None = None  # the time of the request for the end that it has read to
        self.offsets: dict[str, int] = {}
        self.last_offset, self.last_change = -1, b""

    def has_open_change(self) -> bool:
        """Whether a transaction is open: neither committed nor aborted yet."""
        return self._records.has_open_change()

    def to_the_end(self, at_least: int = 0) -> None:
        """Read new records to the end. at_least: wait until the end has this offset."""
        began_s, before = self._now_s(), self._records.position
        self._read(at_least)
        was_there_s, self._was_there_s = self._was_there_s, began_s
        is_away_for_s = 0.0 if was_there_s is None else self._now_s() - was_there_s
        if self._records.position > before and is_away_for_s > self._tombstones_s:
            self._forget()
            self.to_the_end(at_least)

    def values(self, wanted: Mapping[int, str]) -> dict[str, bytes]:
        """{key: value} for {offset: key} as of the last reading. Records that were replaced since are left out."""
        found: dict[str, bytes] = {}
        if not wanted:
            return found
        position = self._records.position
        try:
            for message in self._records.between(min(wanted), max(wanted) + 1):
                key = wanted.get(int(message.offset() or 0))
                if key is not None:
                    found[key] = bytes(message.value() or b"")
        finally:
            self._records.position = position
        return found

    def close(self) -> None:
        """Close the client."""
        self._records.close()

    def _forget(self) -> None:
        self.offsets, self.last_offset, self.last_change = {}, -1, b""
        self._was_there_s, self._records.position = None, 0

    def _read(self, at_least: int) -> None:
        for message in self._records.new(at_least):
            self._read_message(message)

    def _read_message(self, message: Message) -> None:
        offset, value = int(message.offset() or 0), message.value()
        try:
            key, change = self._parsed(message)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordsOfOthers(self._topic, offset, repr(error)) from error
        if value is None:
            self.offsets.pop(key, None)
        elif key != FORMAT:
            self.offsets[key] = offset
        self.last_offset, self.last_change = offset, change

    def _parsed(self, message: Message) -> tuple[str, bytes]:
        """The record's key, and its change. Raises KeyError, TypeError, ValueError for records of another format."""
        key = (message.key() or b"").decode()
        headers: dict[str, Any] = dict(message.headers() or ())
        if self.last_offset < 0 and key != FORMAT:
            raise ValueError("the first record has to hold the format")
        if key == FORMAT and (found := json.loads(message.value() or b"null")) != self._format:
            raise ValueError(f"it has {found}, this pushrep reads {self._format}")
        return key, bytes(headers[CHANGE])


RECORD_OVERHEAD_BYTES = 1024
"""More than a record, alone in its batch, takes besides its value: batch header, key and headers."""
MESSAGE_BYTES_MIN = 16 * 1024
_TRANSACTION_TIMEOUT_MS = 300_000  # the next writer to begin aborts an open one earlier
_AGAIN = OVERTAKEN | {
    KafkaError._TIMED_OUT,  # noqa: SLF001 - their only names
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError._PURGE_QUEUE,  # noqa: SLF001
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
}


class KeyedTopic:
    """A map in a topic, for reading and changing. Thread-safe; a forked process has to open another one.

    All methods raise KafkaUnreachable if brokers do not answer, RecordsOfOthers for records of another format.
    """

    def __init__(self, destination: KafkaDestination, facts: TopicFacts, name: str, version: int) -> None:
        self.topic = facts.topic
        self.value_bytes_max = facts.max_message_bytes - RECORD_OVERHEAD_BYTES
        self._format = {"format": name, "version": version}
        self._timeout_s = destination.request_timeout_ms / 1000
        self._settings = {
            **destination.librdkafka_settings(),
            "transactional.id": f"{name}-{self.topic}",
            "transaction.timeout.ms": max(_TRANSACTION_TIMEOUT_MS, destination.request_timeout_ms),
            "message.max.bytes": max(MESSAGE_BYTES_MIN, facts.max_message_bytes),
            "linger.ms": 0,
            "logger": QUIET,
        }
        records = CommittedRecords(destination, facts, lambda: self._timeout_s)
        self._reading = KeyedReading(records, facts, self._format)
        self._mutex = threading.Lock()
        self._producer: Producer | None = None
        self._has_looked = False
        self._undecided = b""  # our change of which it is unknown whether it is stored, after a lost answer

    @classmethod
    def open(cls, destination: KafkaDestination, *, name: str, version: int) -> Self:
        """The map in the existing topic `destination.topic`. name, version: of the format in its first record.

        Reads nothing yet. Raises DestinationRefused, which names the setting to change, TopicMissing, KafkaUnreachable.
        """
        # Some brokers may not know a new topic yet.
        timeout_s = destination.request_timeout_ms / 1000
        facts = ask(lambda _left_s: look_at_topic(destination, destination.topic or ""), _missing_topics, timeout_s)
        if facts.cleanup_policy != "compact":
            why = "it would delete records that are needed: create the topic with cleanup.policy=compact"
            raise DestinationRefused(facts.topic, "cleanup.policy", facts.cleanup_policy, why)
        if facts.partitions != 1:
            why = "the records of a change need one order: create the topic with 1 partition"
            raise DestinationRefused(facts.topic, "partitions", facts.partitions, why)
        if facts.max_message_bytes < MESSAGE_BYTES_MIN:
            why = f"a value would need too many records: raise it to {MESSAGE_BYTES_MIN} or more"
            raise DestinationRefused(facts.topic, "max.message.bytes", facts.max_message_bytes, why)
        return cls(destination, facts, name, version)

    def look(self) -> int:
        """Read new records, after which `offsets` is up to date. Returns the offset of the last record, -1 without
        any.
        """
        with self._mutex:
            if not self._has_looked and self._reading.has_open_change():
                self._begin()  # a killed writer left a transaction open: abort or commit it, before the caller decides
            self._reading.to_the_end()
            self._has_looked = True
            return self._reading.last_offset

    def offsets(self) -> dict[str, int]:
        """The keys as of the last look, with the offset of the newest record of each."""
        with self._mutex:
            return dict(self._reading.offsets)

    def values(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of keys as of the last look; keys that were removed or replaced since are left out."""
        with self._mutex:
            offsets = self._reading.offsets
            return self._reading.values({offsets[key]: key for key in keys if key in offsets})

    def change(self, records: Sequence[tuple[str, bytes | None]]) -> int:
        """Write all records in one transaction. When this returns, they are stored and read back. Returns the offset of
        the last one.

        Raises ChangedByOther, ChangeNotStored.
        """
        with self._mutex:
            reading, seen = self._reading, self._reading.last_offset

            def attempt(_left_s: float) -> int:
                self._begin()
                reading.to_the_end()
                if reading.last_offset != seen and reading.last_change != self._undecided:
                    raise ChangedByOther(self.topic)
                self._write(records)
                return reading.last_offset

            return ask(attempt, _failure_of_change, self._timeout_s)

    def close(self) -> None:
        """Close the clients. An open change is aborted."""
        with self._mutex:
            self._producer = None
            self._reading.close()

    def _begin(self) -> None:
        """Fence all earlier writers. Afterwards their transactions are committed or aborted."""
        if self._producer is not None:
            return

        def begun(left_s: float) -> Producer:
            producer = Producer(self._settings)
            producer.init_transactions(left_s)
            return producer

        try:
            self._producer = ask(begun, _failure_of_begin, self._timeout_s)
        except KafkaException as error:
            why = f"no transaction on topic {self.topic} can begin: {error.args[0].str()}"
            raise KafkaUnreachable(why) from error

    def _write(self, records: Sequence[tuple[str, bytes | None]]) -> None:
        """Write the records in a transaction. Raises ChangedByOther, ChangeNotStored; then none of them is stored."""
        producer, reading, change = self._producer, self._reading, uuid.uuid4().bytes
        assert producer is not None, "a writer has begun"
        before, self._undecided = reading.last_offset, change
        if before < 0:
            records = [(FORMAT, _json(self._format)), *records]
        try:
            producer.begin_transaction()
            last = send(producer, self.topic, records, self._timeout_s, headers=[(CHANGE, change)])[-1]
            producer.commit_transaction(self._timeout_s)
        except KafkaException as error:
            self._producer = None
            self._begin()  # afterwards our change is either committed or aborted
            reading.to_the_end()
            if reading.last_change == change:
                return  # only the answer was lost
            if reading.last_offset != before:
                raise ChangedByOther(self.topic) from error
            raise ChangeNotStored(self.topic, error.args[0].str()) from error
        reading.to_the_end(last + 1)
        if reading.last_offset != last:
            raise ChangedByOther(self.topic)  # by a program that writes without this transactional.id


def _missing_topics(error: BaseException) -> Failure:
    return Failure.NOT_THERE if isinstance(error, TopicMissing) else Failure.PERMANENT


def _failure_of_begin(error: BaseException) -> Failure:
    """Whether a failed begin is retried: after another writer began at the same moment, or while the coordinator
    moves.
    """
    return _judged(error, FENCED)


def _failure_of_change(error: BaseException) -> Failure:
    return _judged(error.__cause__, _AGAIN) if isinstance(error, ChangeNotStored) else Failure.PERMANENT


def _judged(error: BaseException | None, passing: set[int]) -> Failure:
    if not isinstance(error, KafkaException):
        return Failure.PERMANENT
    again = error.args[0].code() in passing or failure_of_code(error.args[0]) is Failure.TRANSIENT
    return Failure.TRANSIENT if again else Failure.PERMANENT


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
