"""Reading a topic of startpoints: from where it was read to, up to the end of now. Its records: startpoints.py."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Message

from pushrep.kafka.committed import CommittedRecords
from pushrep.kafka.errors import KafkaUnreachable, TopicReplaced
from pushrep.startpoints import Checkpoint, CorruptStore, Fact, Reader, StoreUnavailable
from pushrep.startpoints.changing import View
from pushrep.startpoints.events import from_json

HEAD, CHECKPOINT = "format", "checkpoint/"
FORMAT = {"format": "pushrep.startpoints", "version": 1}


class TopicReading:
    """What was read so far: facts in order, checkpoints, the newest offset of each key. Thread-safe.

    left_s: how long a call may take now. Everything raises StoreUnavailable where brokers don't answer, CorruptStore
    for records that are no store's and for a topic that was made anew.
    """

    def __init__(self, records: CommittedRecords, topic: str, left_s: Callable[[], float]) -> None:
        self._records, self._place, self._left_s = records, f"kafka:{topic}", left_s
        self._lock = threading.Lock()
        self._facts: list[Fact] = []
        self.checkpoints: dict[Reader, Checkpoint] = {}
        self.last: dict[str, int] = {}

    @property
    def position(self) -> int:
        """Up to where it was read."""
        return self._records.position

    def end(self) -> int:
        """Behind the last record that is committed."""
        with self._alone():
            return self._records.end()

    def to_the_end(self, at_least: int = 0) -> View:
        """Read what is new; View.end is the next offset. `at_least`: wait until the end is there, in the given time."""
        with self._alone():
            for message in self._records.new(at_least):
                self._take(message)
            return View(self._facts, len(self._facts), self._records.position)

    def close(self) -> None:
        """Let the client go."""
        with self._lock:
            self._records.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._left_s()):
            raise StoreUnavailable(self._place, "another thread waits for its brokers")
        try:
            yield
        except KafkaUnreachable as error:
            raise StoreUnavailable(self._place, error.why) from error
        except TopicReplaced as error:
            why = "the topic was deleted and made again, what was known of it is void: start again"
            raise CorruptStore(self._place, why) from error
        finally:
            self._lock.release()

    def _take(self, message: Message) -> None:
        offset = message.offset() or 0
        try:
            key, fields = (message.key() or b"").decode(), json.loads(message.value() or b"null")
            self._add(key, offset, fields)
        except (KeyError, TypeError, ValueError) as error:
            # Before it: whoever asks again meets it again.
            self._records.position = offset
            why = f"the record at offset {offset} is no startpoint's ({error}): take a topic of its own"
            raise CorruptStore(self._place, why) from error
        self.last[key] = offset

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
