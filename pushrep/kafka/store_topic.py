"""What a store in a compacted topic of one partition is made of: reading what is committed there, and sending.

An idle reader costs the brokers one request for the end: its consumer has the partition assigned only while it reads.
A topic that was deleted and made again under the same name is another topic; its id shows that.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from time import monotonic, sleep
from typing import Any

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
from filtering.retry import Failure
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import KafkaUnreachable, TopicReplaced
from pushrep.kafka.topic import TopicFacts, kafka_failure, uuid_of

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
