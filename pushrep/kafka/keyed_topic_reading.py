"""Reading a topic that serves as a map: where the newest record of each key is, and the values at such places.

0        1        2        3        4            offsets: {"a": 3, "b": 2}; the values stay on the brokers
format   a        b        a        c, null      last_offset 4, written by the change in its header
"""

import json
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from filtering.consumers.asking import Failure
from filtering.consumers.confluent_asking import ask_bounds, ask_brokers, failure_of_code
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import KafkaUnreachable, TopicReplaced
from pushrep.kafka.keyed_topic_errors import RecordsOfOthers

FORMAT, CHANGE = "format", "change"
_PAUSE_S = 0.005  # a commit is seen by readers some ms after its answer


class KeyedReading:
    """What was read so far, committed records only. Not thread-safe.

    offsets: of each key that is there, its newest record's; last_offset: of the newest record, -1 before the first;
    last_change: what its header says. Everything raises KafkaUnreachable, TopicReplaced, RecordsOfOthers.
    """

    def __init__(self, destination: KafkaDestination, topic: str, format_: Mapping[str, Any]) -> None:
        self._topic, self._format = topic, dict(format_)
        self._timeout_s = destination.request_timeout_ms / 1000
        self._settings = {**destination.librdkafka_settings(), "log_level": 0}
        own = {
            "group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True,
            "isolation.level": "read_committed", "auto.offset.reset": "error", "check.crcs": True,
            "fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 10,
        }  # fmt: skip
        self._consumer = Consumer({**self._settings, **own})
        self._position = 0
        self.offsets: dict[str, int] = {}
        self.last_offset, self.last_change = -1, b""

    def has_open_change(self) -> bool:
        """Whether a transaction is begun that is neither committed nor aborted yet."""
        place, admin = TopicPartition(self._topic, 0), AdminClient(self._settings)  # held until it has answered

        def end(left_s: float) -> int:
            asked = admin.list_offsets(
                {place: OffsetSpec.latest()},  # type: ignore[no-untyped-call]
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=max(1.0, left_s),
            )
            return int(asked[place].result(max(1.0, left_s)).offset)

        try:
            return ask_brokers(end, self._timeout_s) > self._end()
        except (KafkaException, TimeoutError) as error:
            raise _unreachable(error) from error

    def to_the_end(self, at_least: int = 0) -> None:
        """Read what is new. `at_least`: wait until the end is there."""
        deadline_s = monotonic() + self._timeout_s
        try:
            while (end := self._end()) < at_least:
                if monotonic() > deadline_s:
                    why = f"the record before offset {at_least} of topic {self._topic} can't be read"
                    raise KafkaUnreachable(why)
                sleep(_PAUSE_S)
            if end < self._position:
                raise TopicReplaced(self._topic)
            for message in self._from(self._position, end, deadline_s):
                self._take(message)
        except KafkaException as error:
            raise _unreachable(error) from error

    def values(self, wanted: Mapping[int, str]) -> dict[str, bytes]:
        """Offset → key as of the last reading, to key → value; what was replaced since is left out."""
        found: dict[str, bytes] = {}
        if not wanted:
            return found
        try:
            position = self._position
            for message in self._from(min(wanted), max(wanted) + 1, monotonic() + self._timeout_s):
                key = wanted.get(int(message.offset() or 0))
                if key is not None:
                    found[key] = bytes(message.value() or b"")
        except KafkaException as error:
            raise _unreachable(error) from error
        finally:
            self._position = position
        return found

    def close(self) -> None:
        """Let the client go."""
        self._consumer.close()

    def _end(self) -> int:
        return ask_bounds(self._consumer, self._topic, 0, self._timeout_s)[1]

    def _from(self, start: int, end: int, deadline_s: float) -> Any:
        """Records of [start, end); the position moves with them. The consumer has the partition only meanwhile."""
        self._position = start
        if start >= end:
            return
        self._consumer.assign([TopicPartition(self._topic, 0, start)])
        try:
            while self._position < end:
                message = self._consumer.poll(max(0.0, deadline_s - monotonic()))
                if message is None:
                    why = f"offset {self._position} of topic {self._topic}, which ends at {end}, can't be read in time"
                    raise KafkaUnreachable(why)
                offset = int(message.offset() or 0)
                error = message.error()
                if error is None:
                    self._position = min(offset + 1, end)  # what came in behind the end belongs to the next reading
                    if offset < end:
                        yield message
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
                    self._position = max(self._position, offset)  # behind the mark that ends a transaction
                elif failure_of_code(error) is not Failure.PASSES:
                    raise KafkaException(error)
        finally:
            self._consumer.unassign()

    def _take(self, message: Message) -> None:
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
        if key == FORMAT and (told := json.loads(message.value() or b"null")) != self._format:
            raise ValueError(f"it says {told}, this pushrep reads {self._format}")
        return key, bytes(headers[CHANGE])


def _unreachable(error: Exception) -> KafkaUnreachable:
    told = error.args[0].str() if isinstance(error, KafkaException) else "no answer in time"
    return KafkaUnreachable(told)
