"""The parking log: records that a topic refused and that shipping passed (KafkaDestination(on_refused="park")).

    <outbox>/<topic>.parked-<n>    one log beside those of the n partitions, so that no number is used twice. Each of
                                   its records has the header `parked`, JSON:
        a refused record           {"topic", "partition", "offset", "error", "message", "at_ms"}; its value is a record
                                   batch that holds the record alone
        the end of one             {"done": its offset in this log, "at_ms"}, without a value

The outbox appends to it as to its partitions, so that its members hold it, too. A record is acknowledged there before
shipping passes it. If the process ends between both, the next start finds it there and passes it without another look
at the topic; of several entries of an offset the first one counts. A parked record is never sent under its own key,
because every filtering reader has seen later ones of its pair and would drop it.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pushrep.env.checked_json import BadJsonFile, parse_json
from pushrep.kafka.answers import Code
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.progress import Skip
from pushrep.log import CorruptBatch, LogConfig, LogDamaged, LogReader, SegmentLog
from pushrep.log.config import BATCH_BYTES_LIMIT
from pushrep.log.directory_files import log_name
from pushrep.records import Record, RecordBatch, encode_batch

_LOG = logging.getLogger("pushrep.kafka")

HEADER = "parked"
IN_A_ROW_MAX, AN_HOUR_MAX = 10, 100
_WORDS_MAX = 2_000
_ROOM_BYTES = 6 * _WORDS_MAX + 2048  # JSON writes a character as six
"""An entry is larger than its record by less than this."""
_HOUR_MS = 3_600_000
_ABOUT_ONE_RECORD = {Code.INVALID_TIMESTAMP, Code.INVALID_RECORD, Code.MESSAGE_TOO_LARGE}
AppendEntry = Callable[[bytes | None, Sequence[tuple[str, bytes | None]]], int]


class ParkedRecord(NamedTuple):
    """A record that is parked: `offset` is that in its own log, `number` its offset in the parking log."""

    topic: str
    partition: int
    offset: int
    error: str
    message: str
    at_ms: int
    number: int = -1
    is_done: bool = False

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset


class ParkingLog:
    """See the file's map. Thread-safe."""

    def __init__(self, log: SegmentLog) -> None:
        self.log = log
        self.append_entry: AppendEntry | None = None
        """The open outbox's: appends an entry, and returns its offset once it is acknowledged."""
        self._writing = threading.Lock()
        self._parked = parked_in(log)

    def all(self) -> list[ParkedRecord]:
        """All records that were ever parked, in order."""
        return list(self._parked.values())

    def of(self, topic: str) -> list[ParkedRecord]:
        """Those that this topic refused."""
        return [one for one in self.all() if one.topic == topic]

    def waiting(self, topic: str) -> list[ParkedRecord]:
        """Those that no operator has dealt with."""
        return [one for one in self.of(topic) if not one.is_done]

    def skips(self, topic: str) -> list[Skip]:
        """What is not shipped to the topic because it is here."""
        return [Skip(one.partition, one.offset, f"parked: {one.error}", one.at_ms) for one in self.of(topic)]

    def why_not(self, error: RefusedByTopic, in_a_row: int, now_ms: int) -> str | None:
        """Why the partition stops at this record instead; None if it may be parked."""
        if error.code not in _ABOUT_ONE_RECORD:
            return "only a record that its broker refuses for itself is parked"
        if in_a_row >= IN_A_ROW_MAX:
            return f"{in_a_row} records in a row were parked"
        recent = sum(one.partition == error.partition and one.at_ms > now_ms - _HOUR_MS for one in self.of(error.topic))
        return f"{recent} records of the partition were parked within an hour" if recent >= AN_HOUR_MAX else None

    def park(self, record: Record, error: RefusedByTopic, now_ms: int) -> None:
        """Keep the record, unless it is here; acknowledged and on disk when this returns. Raises as an append does."""
        name = Code.name_of(error.code or 0)
        one = ParkedRecord(error.topic, error.partition, error.offset, name, error.why[:_WORDS_MAX], now_ms)
        with self._writing:
            if any(one.place == known.place for known in self.all()):
                return
            alone = encode_batch(
                [record.value], keys=[record.key], headers=[record.headers], timestamps_ms=record.timestamp_ms
            )
            number = self._append(bytes(alone.data), dict(zip(one._fields, one[:-2], strict=False)))
            self._parked[number] = one._replace(number=number)

    def finish(self, number: int, now_ms: int) -> None:
        """Note that an operator has dealt with a parked record. Raises as an append does."""
        with self._writing:
            if not self._parked[number].is_done:
                self._append(None, {"done": number, "at_ms": now_ms})
                self._parked[number] = self._parked[number]._replace(is_done=True)

    def record(self, number: int) -> Record:
        """The record as it was refused, but for its offset. Raises CorruptRecordBatch, and as reading a log."""
        (entry,) = self.log.records(number, number + 1)
        assert entry.value is not None, "it is no end of one"
        return RecordBatch.check(entry.value).records()[0]

    def _append(self, value: bytes | None, fields: dict[str, Any]) -> int:
        assert self.append_entry is not None, "shipping begins when the outbox is open"
        number = self.append_entry(value, [(HEADER, json.dumps(fields).encode())])
        self.log.flush()  # an outbox may acknowledge before
        return number


def _readable(log: "SegmentLog | LogReader") -> Iterator[Record]:
    try:
        yield from log.records(log.log_start_offset)
    except (CorruptBatch, LogDamaged) as error:  # it stops what has to be parked, and no opening
        _LOG.error("what is parked behind it is not known: %s", error)


def parking_config(config: LogConfig) -> LogConfig:
    """Of the parking log, beside logs with this one: without retention, and with room for each of their records."""
    limit = min(config.batch_limit_bytes + _ROOM_BYTES, BATCH_BYTES_LIMIT)
    config = replace(config, batch_bytes_max=limit, segment_bytes=max(config.segment_bytes, limit))
    return replace(config, retention_ms=-1, retention_bytes=-1)


def parking_name(topic: str, partitions: int) -> str:
    """The directory of the parking log of an outbox."""
    return log_name(f"{topic}.parked", partitions)


def parked_in(log: "SegmentLog | LogReader") -> dict[int, ParkedRecord]:
    """The parked records in a parking log, by their offset in it; of a damaged one those before the damage."""
    found: dict[int, ParkedRecord] = {}
    places = set()
    for record in _readable(log):
        said = _said_in(record)
        if said is None:
            _LOG.error("%s: at offset %d is no entry of a parked record: it is passed over", log.topic, record.offset)
        elif isinstance(said, int):
            if said in found:
                found[said] = found[said]._replace(is_done=True)
        elif said.place not in places:
            places.add(said.place)
            found[record.offset] = said._replace(number=record.offset)
    return found


def _said_in(record: Record) -> ParkedRecord | int | None:
    """What an entry parks, or the number that it ends; None if others wrote it."""
    try:
        fields = parse_json(dict(record.headers)[HEADER] or b"")
        if fields.keys() == {"done", "at_ms"}:
            return fields["done"] if type(fields["done"]) is int else None
        one = ParkedRecord(**fields)
    except (BadJsonFile, KeyError, TypeError, AttributeError):
        return None
    whole = record.value is not None and (type(one.partition), type(one.offset), type(one.at_ms)) == (int, int, int)
    return one if whole and all(isinstance(word, str) for word in (one.topic, one.error, one.message)) else None
