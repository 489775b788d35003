"""A compacted topic as a map from keys to values, changed by one writer at a time: `KeyedTopic.open(destination, ...)`.

    topic     one partition, cleanup.policy=compact       record 0: key `format`, JSON that says whose records these are
    change    one transaction: all of its records or none. A value None is a tombstone
    writer    one transactional.id for the topic: whoever begins fences all others

    look ─▶ decide ─▶ change      refused with ChangedByOther if anyone else changed the topic since the look

A writer that was fenced begins again, looks at what came in, and writes if that is nothing. So of two that decided from
one state a single one gets its change in, and a mere reader that began does no harm.

    0        1        2        3        4            offsets: {"a": 3, "b": 2}; the values stay on the brokers
    format   a        b        a        c, null      last_offset 4, written by the change in its header

Compaction removes a tombstone delete.retention.ms after it was written. A reader that was away for longer may have
missed some, and reads everything again.

CommittedRecords and `send` are shared with the store of startpoints in a topic (startpoints.py). They stay two because
their records differ, and both formats are released. A startpoint's number is its record's offset: that store says
before it writes at which offset its records have to come, refuses the change elsewhere, keeps every record, and knows
by the offset whether a commit whose answer was lost counts. A map's record may come at any offset: this one keeps the
newest offset of each key, knows tombstones, and finds its change again by a header.

An idle reader costs the brokers one question for the end: its consumer has the partition assigned only while it reads.
A topic that was deleted and made again under its name is another one, whatever its end is.
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

_PAUSE_S = 0.005  # readers see a commit some ms after its answer


class CommittedRecords:
    """See the file's map. `left_s`: how long a call may take now. Not thread-safe.

    position: of the next record to read. Everything raises KafkaUnreachable, TopicReplaced.
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
        """Behind the last record that is committed."""
        with _naming(self._topic):
            return self._end(self._left_s())

    def has_open_change(self) -> bool:
        """Whether a transaction is begun that is neither committed nor aborted yet."""
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
        """What is behind the position, which moves along. `at_least`: wait until the end is there."""
        deadline_s = monotonic() + self._left_s()
        with _naming(self._topic):
            asked = None if at_least else self._ask_identity(self._left_s())  # on its way together with what follows
            while (end := self._end(deadline_s - monotonic())) < at_least:
                if monotonic() > deadline_s:
                    why = f"the record before offset {at_least} of topic {self._topic} can't be read"
                    raise KafkaUnreachable(why)
                sleep(_PAUSE_S)
            if asked is not None:
                self._check_identity(asked)
        if end < self.position:
            raise TopicReplaced(self._topic)  # in this very moment
        yield from self.between(self.position, end, deadline_s)

    def between(self, start: int, end: int, deadline_s: float | None = None) -> Iterator[Message]:
        """Records of [start, end); the position moves along with them."""
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
            self.position = min(offset + 1, end)  # records behind the end belong to the next call
            return message if offset < end else None
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return None  # the client looks for its group's coordinator; no group is used here
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
            self.position = max(self.position, offset)  # behind the mark that ends a transaction
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
        """By the answer to a question that is under way, or to another one if that fails for a moment."""
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
"""Of a change. UNKNOWN: a coordinator's answer at times while another writer takes the transactional id."""
_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001 - their only names
"""What a client reports of records whose transaction has failed; the reason is not in it."""
_FULL_QUEUE_S = 0.05

QUIET = logging.getLogger("pushrep.kafka.stores.librdkafka")
"""Swallows librdkafka's log: it reports a fenced producer as fatal, and errors that matter are raised."""
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())


def send(
    producer: Producer, topic: str, records: Sequence[tuple[str, bytes | None]], timeout_s: float, **more: Any
) -> list[int]:
    """Send (key, value) of each to partition 0; their offsets, in order. Raises KafkaException."""
    reports: list[tuple[KafkaError | None, Message]] = []
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, 0, lambda *report: reports.append(report), **more)
                break
            except BufferError:  # its queue is full: parts of 1 MB fill it at a hundred thousand
                producer.poll(_FULL_QUEUE_S)
    flush(producer, timeout_s)
    for error, message in reports:
        if error is not None and error.code() in _PURGED:
            why = f"the brokers refused the transaction: is the right WRITE on topic {message.topic()!r} there?"
            raise KafkaException(KafkaError(error.code(), why))
        if error is not None:
            raise KafkaException(error)
    if len(reports) < len(records):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - its only name
    return [int(message.offset() or 0) for _, message in reports]


class KeyedTopicError(PushrepError):
    """Anything a KeyedTopic refuses; brokers that don't answer are KafkaUnreachable."""


class ChangedByOther(KeyedTopicError):
    """Someone else changed the topic since it was looked at. Nothing of this change is stored."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} was changed by another writer meanwhile; nothing of this change is stored")
        self.topic = topic


class ChangeNotStored(KeyedTopicError):
    """The brokers refused a change; nothing of it is stored."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic} took nothing of a change: {why}")
        self.topic, self.why = topic, why


class RecordsOfOthers(KeyedTopicError):
    """The topic holds records that are none of this map's: take a topic of its own, or restore it."""

    def __init__(self, topic: str, offset: int, why: str) -> None:
        super().__init__(
            f"topic {topic}: the record at offset {offset} is none of ours ({why}): take a topic of its own"
        )
        self.topic, self.offset, self.why = topic, offset, why


FORMAT, CHANGE = "format", "change"


class KeyedReading:
    """What was read so far, committed records only. Not thread-safe.

    offsets: of each key that is there, its newest record's; last_offset: of the newest record, -1 before the first;
    last_change: what its header says. Everything raises KafkaUnreachable, TopicReplaced, RecordsOfOthers.
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
        self._was_there_s: float | None = None  # when it asked for the end up to which it has read
        self.offsets: dict[str, int] = {}
        self.last_offset, self.last_change = -1, b""

    def has_open_change(self) -> bool:
        """Whether a transaction is begun that is neither committed nor aborted yet."""
        return self._records.has_open_change()

    def to_the_end(self, at_least: int = 0) -> None:
        """Read what is new. `at_least`: wait until the end is there."""
        began_s, before = self._now_s(), self._records.position
        self._read(at_least)
        was_there_s, self._was_there_s = self._was_there_s, began_s
        is_away_for_s = 0.0 if was_there_s is None else self._now_s() - was_there_s
        if self._records.position > before and is_away_for_s > self._tombstones_s:
            self._forget()
            self.to_the_end(at_least)

    def values(self, wanted: Mapping[int, str]) -> dict[str, bytes]:
        """Offset → key as of the last reading, to key → value; what was replaced since is left out."""
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
        """Let the client go."""
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
        """The key, and which change it is of. Raises KeyError, TypeError, ValueError for records of others."""
        key = (message.key() or b"").decode()
        headers: dict[str, Any] = dict(message.headers() or ())
        if self.last_offset < 0 and key != FORMAT:
            raise ValueError("the first one says the format")
        if key == FORMAT and (found := json.loads(message.value() or b"null")) != self._format:
            raise ValueError(f"it says {found}, this pushrep reads {self._format}")
        return key, bytes(headers[CHANGE])


RECORD_OVERHEAD_BYTES = 1024
"""What a record alone in its batch takes beside its value, with a key and some headers: less, by far."""
MESSAGE_BYTES_MIN = 16 * 1024
_TRANSACTION_TIMEOUT_MS = 300_000  # one that is left open ends when the next writer begins, not later
_AGAIN = OVERTAKEN | {
    KafkaError._TIMED_OUT,  # noqa: SLF001 - their only names
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError._PURGE_QUEUE,  # noqa: SLF001
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
}


class KeyedTopic:
    """The map and the right to change it. Thread-safe; not for a fork, which opens one of its own.

    Everything raises KafkaUnreachable where brokers don't answer, RecordsOfOthers for records that are none of ours.
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
        self._undecided = b""  # our change whose fate could not be asked for, when the brokers went away

    @classmethod
    def open(cls, destination: KafkaDestination, *, name: str, version: int) -> Self:
        """The map in `destination.topic`, which has to be there. `name`, `version`: of the format in its first record.

        Nothing is read yet. Raises DestinationRefused, which names the setting to change, TopicMissing,
        KafkaUnreachable.
        """
        # Not every broker knows a new topic yet.
        timeout_s = destination.request_timeout_ms / 1000
        facts = ask(lambda _left_s: look_at_topic(destination, destination.topic or ""), _missing_topics, timeout_s)
        if facts.cleanup_policy != "compact":
            why = "it would delete what is still wanted: make the topic with cleanup.policy=compact"
            raise DestinationRefused(facts.topic, "cleanup.policy", facts.cleanup_policy, why)
        if facts.partitions != 1:
            why = "records of one change must lie in one order: make the topic with 1 partition"
            raise DestinationRefused(facts.topic, "partitions", facts.partitions, why)
        if facts.max_message_bytes < MESSAGE_BYTES_MIN:
            why = f"a value would go in too many parts: raise it to {MESSAGE_BYTES_MIN} or more"
            raise DestinationRefused(facts.topic, "max.message.bytes", facts.max_message_bytes, why)
        return cls(destination, facts, name, version)

    def look(self) -> int:
        """Read what is new: the offset of the last record, -1 if there is none. `offsets` is then what is there."""
        with self._mutex:
            if not self._has_looked and self._reading.has_open_change():
                self._begin()  # a writer was killed within a change: decide it, before anyone relies on what is there
            self._reading.to_the_end()
            self._has_looked = True
            return self._reading.last_offset

    def offsets(self) -> dict[str, int]:
        """Each key that was there at the last look, with the offset of its newest record."""
        with self._mutex:
            return dict(self._reading.offsets)

    def values(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of keys as of the last look; those that are gone by now are left out."""
        with self._mutex:
            offsets = self._reading.offsets
            return self._reading.values({offsets[key]: key for key in keys if key in offsets})

    def change(self, records: Sequence[tuple[str, bytes | None]]) -> int:
        """Stored, all of them, and read back, when this returns: the offset of the last one.

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
        """Let the clients go; a change that is not done is none."""
        with self._mutex:
            self._producer = None
            self._reading.close()

    def _begin(self) -> None:
        """From here on all writers of before are fenced, and what they had begun is decided."""
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
        """Raises ChangedByOther, ChangeNotStored: nothing of it is stored."""
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
            self._begin()  # with it the fate of our change is decided
            reading.to_the_end()
            if reading.last_change == change:
                return  # only the answer was lost
            if reading.last_offset != before:
                raise ChangedByOther(self.topic) from error
            raise ChangeNotStored(self.topic, error.args[0].str()) from error
        reading.to_the_end(last + 1)
        if reading.last_offset != last:
            raise ChangedByOther(self.topic)  # by someone who writes here without the right to


def _missing_topics(error: BaseException) -> Failure:
    return Failure.NOT_THERE if isinstance(error, TopicMissing) else Failure.PERMANENT


def _failure_of_begin(error: BaseException) -> Failure:
    """Another writer began at the same moment, or the coordinator moves: that passes."""
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
