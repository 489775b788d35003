"""Reading a topic that serves as a map: where the newest record of each key is, and the values at such places.

0        1        2        3        4            offsets: {"a": 3, "b": 2}; the values stay on the brokers
format   a        b        a        c, null      last_offset 4, written by the change in its header

Compaction takes a tombstone delete.retention.ms after it was written. Who was away for longer may have missed some, and
reads all anew.
"""

import json
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from confluent_kafka import Message

from pushrep.kafka.committed import CommittedRecords
from pushrep.kafka.keyed_topic_errors import RecordsOfOthers
from pushrep.kafka.topic import TopicFacts

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
            self._take(message)

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
