"""A store of startpoints in a compacted Kafka topic, `open_store(destination)`, with the interface of one in a
directory.

    topic      one partition, cleanup.policy=compact
    record 0   key `format`, value {"format": "pushrep.startpoints", "version": 1}
    facts      written/7, expired/7, cancelled/7, applied/7/READER, failed/7/READER, consumed/7/READER    see model.py
    positions  checkpoint/READER      the newest record of a key counts; READER: consumer/topic/partition/task

The sequence of a startpoint is the offset of its `written` record. It is in the key of each fact about the startpoint,
so compaction removes no facts, only older checkpoints. A change is a transaction under one transactional.id for the
whole topic: the writer begins, which fences all others, reads to the end, decides, appends, and reads its own records
back before it uses them. A writer that was fenced before its commit has written nothing, and starts again.
Format: docs/internals/formats/startpoints.md.

An idle reader costs the brokers one request for the end: its consumer has the partition assigned only while it reads.
A topic that was deleted and made again under the same name is another topic; its id shows that.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain
from time import monotonic, sleep
from typing import Any, NoReturn

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from filtering.consumers.confluent_client import ask_bounds, ask_brokers, failure_of_code, failure_of_transaction, send
from filtering.retry import Failure, ask
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.env.checked_json import parse_json
from pushrep.errors import CorruptFile
from pushrep.kafka.destination import KafkaDestination, destination_by
from pushrep.kafka.errors import KafkaUnreachable, TopicMissing, TopicReplaced
from pushrep.kafka.topic import TopicFacts as FoundTopic
from pushrep.kafka.topic import kafka_failure, look_at_topic, uuid_of
from pushrep.startpoints import Checkpoint, Fact, Reader, StartpointStore, StoreUnavailable
from pushrep.startpoints.event_log import TimeBudget, View
from pushrep.startpoints.model import (
    Applied,
    Consumed,
    Failed,
    Overtaken,
    Written,
    busy,
    from_json,
    not_written,
    to_json,
)

HEAD, CHECKPOINT = "format", "checkpoint/"
FORMAT = {"format": "pushrep.startpoints", "version": 1}
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_PAUSE_S = 0.005  # a commit becomes visible to readers some ms after its answer


class CommittedRecords:
    """Reads the committed records of the topic. Not thread-safe.

    left_s: returns how many seconds a call may take now. position: the offset of the next record to read. All methods
    raise KafkaUnreachable, TopicReplaced.
    """

    def __init__(self, destination: KafkaDestination, facts: FoundTopic, left_s: Callable[[], float]) -> None:
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

    def new(self, at_least: int = 0) -> Iterator[Message]:
        """Yield the records from `position` to the end, and advance `position`. at_least: wait until the end has this
        offset.
        """
        deadline_s = monotonic() + self._left_s()
        with _naming(self._topic):
            # Sent before the next request, so that both wait once.
            asked = None if at_least else self._ask_identity(self._left_s())
            while (end := self._end(deadline_s - monotonic())) < at_least:
                if monotonic() > deadline_s:
                    why = f"the record before offset {at_least} of topic {self._topic} can't be read"
                    raise KafkaUnreachable(why)
                sleep(_PAUSE_S)
            if asked is not None:
                self._check_identity(asked)
        if end < self.position:
            raise TopicReplaced(self._topic)  # replaced after its id was checked
        if self.position == end:
            return
        self._consumer.assign([TopicPartition(self._topic, 0, self.position)])
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

QUIET = logging.getLogger("pushrep.kafka.stores.librdkafka")
"""A logger for librdkafka that prints nothing: librdkafka logs a fenced producer as fatal, and errors that matter are
raised.
"""
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())


def reader_words(reader: Reader) -> str:
    """The text of a reader in a key."""
    return f"{reader.consumer}/{reader.topic}/{reader.partition}/{reader.task}"


def open_store(
    destination: KafkaDestination, *, clock: Clock = SYSTEM_CLOCK, lock_wait_s: float = 60.0
) -> StartpointStore:
    """The store in the existing topic `destination.topic`, with one partition and compaction. The caller closes it.

    lock_wait_s: for how long a change starts again after other writers, before it raises StoreUnavailable.
    Raises StoreUnavailable for a topic that does not keep all facts, and for brokers that can't be reached.
    """
    topic = destination.topic or ""
    place = f"kafka:{topic}"
    try:
        found = ask(
            lambda _: look_at_topic(destination, topic),
            lambda error: Failure.TRANSIENT if isinstance(error, KafkaUnreachable) else Failure.PERMANENT,
            destination.request_timeout_ms / 1000,
        )
    except TopicMissing as error:
        raise StoreUnavailable(
            place, "there is no such topic: create it with 1 partition and cleanup.policy=compact"
        ) from error
    except KafkaUnreachable as error:
        raise StoreUnavailable(place, str(error)) from error
    if found.cleanup_policy != "compact":
        why = f"cleanup.policy={found.cleanup_policy} would delete startpoints: set cleanup.policy=compact"
        raise StoreUnavailable(place, why)
    if found.partitions != 1:
        why = f"it has {found.partitions} partitions, but sequences are offsets of one: use a topic with 1 partition"
        raise StoreUnavailable(place, why)
    facts = FactsInTopic(destination, found, lock_wait_s=lock_wait_s)
    return StartpointStore(facts, facts, clock)


class FactsInTopic:
    """Reads and appends facts and checkpoints. Thread-safe; a forked process has to open another store.

    What was read so far is kept: facts in order, checkpoints, the newest offset of each key. Reading raises
    StoreUnavailable if brokers do not answer, CorruptFile for records of another format and for a topic that was
    deleted and made again.
    """

    def __init__(self, destination: KafkaDestination, found: FoundTopic, *, lock_wait_s: float) -> None:
        self.place, self.lock_wait_s = f"kafka:{found.topic}", lock_wait_s
        self._topic, self._settings = found.topic, destination.librdkafka_settings()
        self.budget, self._timeout_s = TimeBudget(), destination.request_timeout_ms / 1000
        self._records = CommittedRecords(destination, found, self._left_s)
        self._facts: list[Fact] = []
        self._checkpoints: dict[Reader, Checkpoint] = {}
        self._last: dict[str, int] = {}
        self._reads, self._mutex = threading.Lock(), threading.Lock()
        self._producer: Producer | None = None

    def view(self, at_least: int = 0) -> View:
        """All facts now; View.end is the next offset. at_least: wait until the end has this offset."""
        with self._reading():
            for message in self._records.new(at_least):
                self._read_message(message)
            return View(self._facts, len(self._facts), self._records.position)

    def size_bytes(self) -> int:
        """The end offset of the topic, which each change raises."""
        with self._reading():
            return self._records.end()

    def load(self, reader: Reader) -> Checkpoint:
        """The reader's checkpoint; an empty one (generation 0) if there is none."""
        self.view()
        return self._checkpoints.get(reader) or Checkpoint(reader=reader)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint. When this returns, it is stored and read back. Raises StoreUnavailable, Overtaken."""
        self.write([(CHECKPOINT + reader_words(checkpoint.reader), checkpoint.as_json())])

    def all(self) -> list[Checkpoint]:
        """The checkpoints of all readers, sorted."""
        self.view()
        return sorted(self._checkpoints.values(), key=lambda checkpoint: checkpoint.reader)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store against other threads, and begin as the topic's only writer. Another process that begins later
        fences this one.
        """
        wait_s = self.budget.left_s(self.lock_wait_s)
        if not self._mutex.acquire(timeout=wait_s):
            raise busy(self.place, os.getpid(), wait_s)
        try:
            if self._producer is None:
                self._producer = self._begin()
            self.view()
            if not self._last:  # no records; an aborted transaction takes offsets, too, so the next one may be above 0
                self.write([(HEAD, FORMAT)])
            yield
        finally:
            self._mutex.release()

    @contextmanager
    def transaction(self) -> Iterator["FactsInTopic"]:
        """As `locked`."""
        with self.locked():
            yield self

    def next_sequence(self, at_least: int) -> int:
        """The offset of the next record."""
        return max(at_least, self.view().end)

    def append(self, facts: Sequence[Fact]) -> None:
        """Append all facts in one transaction. When this returns, they are stored and read back.

        Raises StoreUnavailable, Overtaken.
        """
        at = self._records.position
        if any(isinstance(fact, Written) and fact.sequence != at + i for i, fact in enumerate(facts)):
            raise Overtaken(self.place)  # another program writes to the topic without a transaction
        self.write([(_key(fact), to_json(fact)) for fact in facts])

    def write(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Write records (key, fields) behind those read, in one transaction. Raises StoreUnavailable, Overtaken."""
        producer, at = self._producer, self._records.position
        end = at + len(records)
        assert producer is not None, "locked makes it"
        encoded = [(key, _JSON.encode(fields).encode()) for key, fields in records]
        try:
            producer.begin_transaction()
            sent = send(producer, self._topic, encoded, self._left_s())
            if [message.offset() for message in sent] != list(range(at, end)):
                ask(producer.abort_transaction, failure_of_transaction, self._left_s())
                raise Overtaken(self.place)
        except KafkaException as error:
            self._failed(error, is_known=True)
        try:
            ask(producer.commit_transaction, failure_of_transaction, self._left_s())
        except KafkaException as error:
            if not self._is_stored(end - 1, records[-1][0]):
                self._failed(error, is_known=self._records.position >= end)
        try:
            self.view(end)
        except StoreUnavailable as error:
            raise not_written(self.place, f"it can't be read back: {error.why}", is_known=False) from error

    def close(self) -> None:
        """Close the clients."""
        with self._mutex, self._reads:
            self._producer = None
            self._records.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if not self._reads.acquire(timeout=self._left_s()):
            raise StoreUnavailable(self.place, "another thread is waiting for the brokers")
        try:
            yield
        except KafkaUnreachable as error:
            raise StoreUnavailable(self.place, error.why) from error
        except TopicReplaced as error:
            why = "the topic was deleted and made again, and its startpoints are gone: restart this program"
            raise CorruptFile(self.place, why) from error
        finally:
            self._reads.release()

    def _read_message(self, message: Message) -> None:
        offset = message.offset() or 0
        try:
            key, fields = (message.key() or b"").decode(), parse_json(message.value() or b"null")
            self._add(key, offset, fields)
        except (KeyError, TypeError, ValueError) as error:
            # Before the bad record, so that the next call raises the error again.
            self._records.position = offset
            why = f"the record at offset {offset} is not a startpoint's ({error}): use another topic for startpoints"
            raise CorruptFile(self.place, why) from error
        self._last[key] = offset

    def _add(self, key: str, offset: int, fields: Any) -> None:
        if not self._last and key != HEAD:
            raise ValueError("the first record has to hold the format")
        if key == HEAD:
            if fields != FORMAT:
                raise ValueError(f"{fields}, this pushrep reads {FORMAT}")
        elif key.startswith(CHECKPOINT):
            checkpoint = Checkpoint.of_json(fields)
            self._checkpoints[checkpoint.reader] = checkpoint
        else:
            fact = from_json(fields)
            if fields["event"] == "written" and fact.sequence != offset:
                raise ValueError(f"it is numbered {fact.sequence}")
            self._facts.append(fact)

    def _left_s(self) -> float:
        return self.budget.left_s(self._timeout_s)

    def _begin(self) -> Producer:
        settings = {
            **self._settings,
            "transactional.id": f"pushrep-startpoints-{self._topic}",
            "transaction.timeout.ms": max(60_000, round(self._timeout_s * 1000)),  # the client accepts no shorter one
            "linger.ms": 0,
            "logger": QUIET,
        }
        producer = Producer(settings)
        try:
            ask(producer.init_transactions, failure_of_transaction, self._left_s())
        except KafkaException as error:
            if error.args[0].code() in FENCED:
                raise Overtaken(self.place) from error
            raise StoreUnavailable(self.place, error.args[0].str()) from error
        return producer

    def _is_stored(self, offset: int, key: str) -> bool:
        """Whether a commit without an answer was stored. It is decided once another transaction has begun after it."""
        with suppress(StoreUnavailable, Overtaken):
            self._begin()
        with suppress(StoreUnavailable):
            self.view(offset + 1)
        self._producer = None
        return self._last.get(key) == offset

    def _failed(self, error: KafkaException, *, is_known: bool) -> NoReturn:
        """Close this producer. The next one aborts its transaction; without one, the brokers abort it after
        transaction.timeout.ms.
        """
        self._producer = None
        code: KafkaError = error.args[0]
        if code.code() in _PURGED:
            why = f"the brokers refused the transaction: check the right WRITE on topic {self._topic!r}"
            code = KafkaError(code.code(), why)
        if is_known and code.code() in OVERTAKEN:
            raise Overtaken(self.place) from error
        raise not_written(self.place, code.str(), is_known=is_known) from error


def _key(fact: Fact) -> str:
    event = to_json(fact)["event"]
    whose = f"/{reader_words(fact.reader)}" if isinstance(fact, Applied | Consumed | Failed) else ""
    return f"{event}/{fact.sequence}{whose}"


def store_in_topic(topic: str, settings: Mapping[str, str]) -> StartpointStore:
    """The store in `topic`: what `pushrep.startpoints.store_at("kafka:TOPIC", settings)` calls by its entry point.

    settings: with librdkafka's names. Raises BadArgument, StoreUnavailable.
    """
    return open_store(destination_by(settings, topic))
