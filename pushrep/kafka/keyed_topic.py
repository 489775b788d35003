"""A compacted topic as a map from keys to values, changed by one writer at a time: `KeyedTopic.open(destination, ...)`.

    topic     one partition, cleanup.policy=compact       record 0: key `format`, JSON that says whose records these are
    change    one transaction: all of its records or none. A value None is a tombstone
    writer    one transactional.id for the topic: whoever begins fences all others

    look ─▶ decide ─▶ change      refused with ChangedByOther if anyone else changed the topic since the look

A writer that was fenced begins again, looks at what came in, and writes if that is nothing. So of two that decided from
one state a single one gets its change in, and a mere reader that began does no harm.
"""

import json
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from filtering.consumers.asking import Failure, ask
from filtering.consumers.confluent_asking import failure_of_code
from pushrep.kafka.committed import CommittedRecords
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable, TopicMissing
from pushrep.kafka.keyed_topic_errors import ChangedByOther, ChangeNotStored
from pushrep.kafka.keyed_topic_reading import CHANGE, FORMAT, KeyedReading
from pushrep.kafka.topic import TopicFacts, look_at_topic
from pushrep.kafka.transactional import FENCED, QUIET, Report, delivered

RECORD_OVERHEAD_BYTES = 1024
"""What a record alone in its batch takes beside its value, with a key and some headers: less, by far."""
MESSAGE_BYTES_MIN = 16 * 1024
_TRANSACTION_TIMEOUT_MS = 300_000  # one that is left open ends when the next writer begins, not later
_AGAIN = FENCED | {
    KafkaError._TIMED_OUT,  # noqa: SLF001 - their only names
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError._PURGE_QUEUE,  # noqa: SLF001
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
}
_PAUSE_S = 0.05


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
        """Read what is new: the offset of the last record, -1 if there is none. `offsets` then tells what is there."""
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
            reading, deadline_s = self._reading, monotonic() + self._timeout_s
            seen = reading.last_offset
            while True:
                self._begin()
                reading.to_the_end()
                if reading.last_offset != seen and reading.last_change != self._undecided:
                    raise ChangedByOther(self.topic)
                if self._write(records, deadline_s):
                    return reading.last_offset
                sleep(_PAUSE_S)

    def close(self) -> None:
        """Let the clients go; a change that is not done is none."""
        with self._mutex:
            self._producer = None
            self._reading.close()

    def _begin(self) -> None:
        """From here on all writers of before are fenced, and what they had begun is decided."""
        deadline_s = monotonic() + self._timeout_s
        while self._producer is None:
            producer = Producer(self._settings)
            try:
                producer.init_transactions(self._timeout_s)
            except KafkaException as error:
                code = error.args[0]
                if _is_worth_another(code, FENCED) and monotonic() < deadline_s:
                    sleep(_PAUSE_S)  # another began at the same moment, or the coordinator moves
                    continue
                raise KafkaUnreachable(f"no transaction on topic {self.topic} can begin: {code.str()}") from error
            self._producer = producer

    def _write(self, records: Sequence[tuple[str, bytes | None]], deadline_s: float) -> bool:
        """False: surely not stored, and worth another try. Raises ChangedByOther, ChangeNotStored."""
        producer, reading, change = self._producer, self._reading, uuid.uuid4().bytes
        assert producer is not None, "who writes has begun"
        before, self._undecided = reading.last_offset, change
        if before < 0:
            records = [(FORMAT, _json(self._format)), *records]
        try:
            producer.begin_transaction()
            last = self._sent(producer, records, change)
            producer.commit_transaction(self._timeout_s)
        except KafkaException as error:
            self._producer = None
            self._begin()  # with it the fate of our change is decided
            reading.to_the_end()
            if reading.last_change == change:
                return True  # only the answer was lost
            if reading.last_offset != before:
                raise ChangedByOther(self.topic) from error
            code = error.args[0]
            if _is_worth_another(code, _AGAIN) and monotonic() < deadline_s:
                return False
            raise ChangeNotStored(self.topic, code.str()) from error
        reading.to_the_end(last + 1)
        if reading.last_offset != last:
            raise ChangedByOther(self.topic)  # by someone who writes here without the right to
        return True

    def _sent(self, producer: Producer, records: Sequence[tuple[str, bytes | None]], change: bytes) -> int:
        """The offset of the last one. Raises KafkaException."""
        reports: list[Report] = []
        headers: Any = [(CHANGE, change)]
        for key, value in records:
            while True:
                try:
                    producer.produce(self.topic, value, key, 0, lambda *report: reports.append(report), headers=headers)
                    break
                except BufferError:  # its queue is full: parts of 1 MB fill it at a hundred thousand
                    producer.poll(_PAUSE_S)
        return delivered(producer, reports, len(records), self._timeout_s)[-1]


def _missing_topics(error: BaseException) -> Failure:
    return Failure.NOT_THERE if isinstance(error, TopicMissing) else Failure.STAYS


def _is_worth_another(error: KafkaError, known: set[int]) -> bool:
    return error.code() in known or failure_of_code(error) is Failure.PASSES


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
