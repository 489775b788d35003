"""Reading a topic of startpoints: from where it was read to, up to the end of now. See startpoints.py for its records.

An idle store reads nothing and costs the brokers nothing: the consumer has the partition only while it reads.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from filtering.consumers.asking import Failure
from filtering.consumers.confluent_asking import ask_bounds, failure_of_code
from pushrep.startpoints import Checkpoint, CorruptStore, Fact, Reader, StoreUnavailable
from pushrep.startpoints.changing import View
from pushrep.startpoints.events import from_json

HEAD, CHECKPOINT = "format", "checkpoint/"
_PAUSE_S = 0.005  # a commit is seen by readers some ms after its answer
FORMAT = {"format": "pushrep.startpoints", "version": 1}


class TopicReading:
    """What was read so far: facts in order, checkpoints, the newest offset of each key. Thread-safe.

    Committed records only. left_s: how long a call may take now. Everything raises StoreUnavailable where brokers don't
    answer, CorruptStore for records that are no store's.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str, left_s: Callable[[], float]) -> None:
        self._topic, self._left_s, self._place = topic, left_s, f"kafka:{topic}"
        own = {
            "group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True,
            "isolation.level": "read_committed", "auto.offset.reset": "error", "check.crcs": True, "log_level": 0,
            "fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 10,
        }  # fmt: skip
        self._consumer = Consumer({**settings, **own})
        self._lock = threading.Lock()
        self._facts: list[Fact] = []
        self.checkpoints: dict[Reader, Checkpoint] = {}
        self.last: dict[str, int] = {}
        self.position = 0

    def end(self) -> int:
        """Behind the last record that is committed."""
        try:
            with self._alone(self._left_s()):
                return self._end(self._left_s())
        except KafkaException as error:
            raise StoreUnavailable(self._place, error.args[0].str()) from error

    def to_the_end(self, at_least: int = 0) -> View:
        """Read what is new; View.end is the next offset. `at_least`: wait until the end is there, in the given time."""
        deadline_s = monotonic() + self._left_s()
        with self._alone(deadline_s - monotonic()):
            try:
                while (end := self._end(deadline_s - monotonic())) < at_least and monotonic() < deadline_s:
                    sleep(_PAUSE_S)
                if self.position < end:
                    self._read(end, deadline_s)
            except KafkaException as error:
                raise StoreUnavailable(self._place, error.args[0].str()) from error
            return View(self._facts, len(self._facts), self.position)

    def close(self) -> None:
        """Let the client go."""
        with self._lock:
            self._consumer.close()

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, wait_s)):
            raise StoreUnavailable(self._place, "another thread waits for its brokers")
        try:
            yield
        finally:
            self._lock.release()

    def _end(self, left_s: float) -> int:
        return ask_bounds(self._consumer, self._topic, 0, max(0.001, left_s))[1]

    def _read(self, end: int, deadline_s: float) -> None:
        self._consumer.assign([TopicPartition(self._topic, 0, self.position)])
        try:
            while self.position < end:
                message = self._consumer.poll(max(0.0, deadline_s - monotonic()))
                if message is None:
                    why = f"offset {self.position} of {end} can't be read in time"
                    raise StoreUnavailable(self._place, why)
                self._take(message)
        finally:
            self._consumer.unassign()

    def _take(self, message: Message) -> None:
        offset = message.offset() or 0
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
                self.position = max(self.position, offset)  # behind the mark that ends a transaction
            elif failure_of_code(error) is not Failure.PASSES:
                raise KafkaException(error)
            return
        try:
            key, fields = (message.key() or b"").decode(), json.loads(message.value() or b"null")
            self._add(key, offset, fields)
        except (KeyError, TypeError, ValueError) as error_:
            why = f"the record at offset {offset} is no startpoint's ({error_}): take a topic of its own"
            raise CorruptStore(self._place, why) from error_
        self.last[key] = offset
        self.position = offset + 1

    def _add(self, key: str, offset: int, fields: Any) -> None:
        if not self.last and key != HEAD:
            raise ValueError("the first one says the format")
        if key == HEAD:
            if fields != FORMAT:
                raise ValueError(f"{fields}, this pushrep reads {FORMAT}")
        elif key.startswith(CHECKPOINT):
            checkpoint = _checkpoint(fields)
            self.checkpoints[checkpoint.reader] = checkpoint
        else:
            fact = from_json(fields)
            if fields["event"] == "written" and fact.sequence != offset:
                raise ValueError(f"it is numbered {fact.sequence}")
            self._facts.append(fact)


def reader_words(reader: Reader) -> str:
    """A reader in a key."""
    return f"{reader.consumer}/{reader.topic}/{reader.partition}/{reader.task}"


def _checkpoint(fields: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        reader=Reader(fields["consumer"], fields["topic"], fields["partition"], fields["task"] or ""),
        generation=fields["generation"],
        offset=fields["offset"],
        sequence=fields["sequence"],
        log_id=fields["log"],
    )
