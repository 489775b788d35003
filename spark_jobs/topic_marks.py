"""TopicMarks: a foreachBatch query's marks in a compacted Kafka topic, for drivers that share nothing but brokers.

    <query id>/<batch>/0 ... /n-1    the parts of a batch's bytes (batch_marks.py), each below max.message.bytes
    <query id>/<batch>               {"parts": n, "size_bytes": ..., "crc32": ...}: without this seal no part counts

A batch is one transaction: its parts, its seal, and the tombstones of what is no longer wanted; of one batch the one
written last counts. Two drivers of one query: the one that commits second finds the topic changed since it read the
marks, and fails with MarksFenced. Format: docs/internals/formats/batch-marks.md.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from filtering.closing import ClosedAtExit
from pushrep.kafka import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, TopicMissing
from pushrep.kafka.store_topic import ChangedByOther, KeyedTopic, RecordsOfOthers
from spark_jobs.batch_marks import BatchMarks
from spark_jobs.errors import SparkJobError
from spark_jobs.marks import MarksFenced, MarksStoreDamaged, parsed_marks

FORMAT, VERSION = "pushrep.marks", 1
PART_BYTES_MAX = 900_000
"""A topic that takes more gets parts of this size all the same: readers of its records need no larger buffers."""

_KEY = re.compile(r"(?P<query>[^/]+)/(?P<batch>[0-9]+)(/(?P<part>[0-9]+))?")


class MarksTopicUnfit(SparkJobError):
    """The topic can't keep marks: `setting` names what to change, or the topic is to be made."""

    def __init__(self, location: str, setting: str, why: str) -> None:
        super().__init__(f"marks at {location}: {setting}: {why}")
        self.location, self.setting, self.why = location, setting, why


class _Batch(NamedTuple):
    """Where a batch is: the offset of its seal, and the keys of its parts."""

    seal: int
    parts: tuple[str, ...]


class TopicMarks(ClosedAtExit):
    """Marks in `destination.topic` for ReplayFilteredBatches; the topic has 1 partition and cleanup.policy=compact.

    Opened at first use; close it, or use it as a context manager. Use raises MarksTopicUnfit, MarksStoreDamaged,
    `pushrep.kafka.KafkaUnreachable`; writing also MarksFenced, and ChangeNotStored for what the brokers refuse.
    """

    def __init__(self, destination: KafkaDestination) -> None:
        self.location = f"kafka:{destination.topic}"
        self._destination = destination
        self._topic: KeyedTopic | None = None
        self._known: dict[tuple[str, int], _Batch] = {}  # as of the last read of the topic, up to this record:
        self._last_offset: int | None = None
        self._latest: tuple[int, BatchMarks] | None = None  # with the offset of its seal

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""
        found = max(self._read_batches().items(), key=lambda item: item[1].seal, default=None)
        return None if found is None else found[0][0]

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending."""
        return sorted(batch for query, batch in self._read_batches() if query == query_id)

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """What was written last for this batch; None if nothing was, or it was dropped."""
        found = self._read_batches().get((query_id, batch_id))
        if found is None:
            return None
        if self._latest is not None and self._latest[0] == found.seal:
            return self._latest[1]
        key = _key(query_id, batch_id)
        values = self._opened().values([*found.parts, key])
        seal = json.loads(values.get(key, b"{}"))
        numbered = [f"{key}/{part}" for part in range(int(seal.get("parts", 0)))]
        data = b"".join(values.get(part, b"") for part in numbered)
        if (len(data), zlib.crc32(data)) != (seal.get("size_bytes"), seal.get("crc32")):
            if self._read_batches().get((query_id, batch_id)) != found:
                return self.read(query_id, batch_id)  # replaced while it was read, and compacted
            raise MarksStoreDamaged(self.location, f"the parts of {key} are not what its seal says; restore the topic")
        return parsed_marks(data, f"{self.location}, {key}", (query_id, batch_id))

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; see MarksStore. Raises MarksFenced."""
        if not marks.query_id or "/" in marks.query_id:
            raise MarksStoreDamaged(self.location, f"a query id {marks.query_id!r} is no part of a key")
        topic, key, data = self._opened(), _key(marks.query_id, marks.batch_id), marks.to_bytes()
        size = min(PART_BYTES_MAX, topic.value_bytes_max)
        parts = {f"{key}/{n}": data[at : at + size] for n, at in enumerate(range(0, len(data), size))}
        seal = {"parts": len(parts), "size_bytes": len(data), "crc32": zlib.crc32(data)}
        known = self._seen()
        gone = [old for old in known if marks.drops(*old, keep)]
        before = known.get((marks.query_id, marks.batch_id), _Batch(-1, ()))
        unused = [part for part in before.parts if part not in parts]
        records = [*parts.items(), *((part, None) for part in unused), *self._tombstones(gone)]
        # The seal comes last: the last record of the topic then says which query wrote last.
        offset = self._change([*records, (key, json.dumps(seal).encode())], marks.query_id, marks.batch_id)
        found = self._read_batches().get((marks.query_id, marks.batch_id))
        if found is None or found.seal != offset:  # dropped, or written again, while it was read
            raise MarksFenced(self.location, marks.query_id, marks.batch_id)
        self._latest = offset, marks

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, all at once. Raises MarksFenced."""
        gone = [(query, batch) for query, batch in self._seen() if query == query_id and batch >= batch_id]
        if gone:
            self._change(self._tombstones(gone), query_id, batch_id)

    def check(self) -> None:
        """Raise what the first batch would: MarksTopicUnfit for the topic, KafkaUnreachable."""
        self._opened()

    def close(self) -> None:
        """Close the clients; the next use opens them again."""
        if self._topic is not None:
            topic, self._topic = self._topic, None
            self._known, self._last_offset, self._latest = {}, None, None
            topic.close()

    def _opened(self) -> KeyedTopic:
        if self._topic is None:
            try:
                self._topic = KeyedTopic.open(self._destination, name=FORMAT, version=VERSION)
            except DestinationRefused as error:
                raise MarksTopicUnfit(self.location, f"{error.setting}={error.value}", error.why) from error
            except TopicMissing as error:
                why = "there is none: make it with 1 partition and cleanup.policy=compact"
                raise MarksTopicUnfit(self.location, "topic", why) from error
        return self._topic

    def _read_batches(self) -> dict[tuple[str, int], _Batch]:
        """What is there now."""
        topic = self._opened()
        try:
            last_offset = topic.look()
        except RecordsOfOthers as error:
            raise MarksStoreDamaged(self.location, str(error)) from error
        if last_offset != self._last_offset:
            self._known, self._last_offset = self._batches_of(topic.offsets()), last_offset
        return self._known

    def _seen(self) -> dict[tuple[str, int], _Batch]:
        """The batches as last read. A change must be based on these, not on anything newer."""
        return self._read_batches() if self._last_offset is None else self._known

    def _batches_of(self, offsets: Mapping[str, int]) -> dict[tuple[str, int], _Batch]:
        seals: dict[tuple[str, int], int] = {}
        parts: dict[tuple[str, int], list[str]] = {}
        for key, offset in offsets.items():
            named = _KEY.fullmatch(key)
            if named is None:
                raise MarksStoreDamaged(self.location, f"the key {key!r} is not one of marks: use another topic")
            batch = named["query"], int(named["batch"])
            if named["part"] is None:
                seals[batch] = offset
            else:
                parts.setdefault(batch, []).append(key)
        return {batch: _Batch(seal, tuple(parts.get(batch, ()))) for batch, seal in seals.items()}

    def _tombstones(self, batches: Iterable[tuple[str, int]]) -> list[tuple[str, bytes | None]]:
        return [(key, None) for batch in batches for key in (*self._known[batch].parts, _key(*batch))]

    def _change(self, records: list[tuple[str, bytes | None]], query_id: str, batch_id: int) -> int:
        try:
            return self._opened().change(records)
        except ChangedByOther as error:
            raise MarksFenced(self.location, query_id, batch_id) from error


def _key(query_id: str, batch_id: int) -> str:
    return f"{query_id}/{batch_id}"
