"""What a marks store keeps of one batch, as a value and as bytes.

     0        4             8                12             12 + head                    end - 4
    | "PBMK" | version u32 | head bytes u32 | head, JSON   | marks of each topic ...    | CRC-32 u32 |   big-endian

The head names the query, the batch, the log ranges it held, and for each (topic, startpoint epoch) how many bytes of
marks follow, in that order (docs/internals/formats/marks.md describes those bytes). Magic, version and CRC-32
(zlib's, over all before it) keep their places in every version: the checksum is proven before the version is believed,
so a flipped bit is never taken for another version. Pure: no Spark, no disk.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from filtering.errors import FilteringError, shown_partition
from filtering.marks import HighwaterMarks
from pushrep.env.checked_json import parse_json
from spark_jobs.errors import SparkJobError

VERSION = 6

_MAGIC = b"PBMK"
_HEADER = struct.Struct(">4sII")
_CHECKSUM = struct.Struct(">I")
assert _HEADER.size == 12, "docs/internals/formats/batch-marks.md promises 12 bytes"


class MarksStoreDamaged(SparkJobError):
    """Marks can't be trusted: restore a copy, or start a fresh checkpoint with `adopt=` from an older batch."""


class MarksFenced(SparkJobError):
    """Another driver wrote marks since this one read them: two run at once, or a checkpoint was copied. End one."""

    def __init__(self, location: str, query_id: str, batch_id: int) -> None:
        super().__init__(
            f"marks at {location} were written by another driver while batch {batch_id} of query {query_id} ran: the "
            "marks of this batch are not stored; end one of the two, and start the other again"
        )
        self.location, self.query_id, self.batch_id = location, query_id, batch_id


def _damaged(why: str) -> MarksStoreDamaged:
    return MarksStoreDamaged(f"they are corrupt: {why}; restore a copy of the store, or adopt an older batch")


class MarksKey(NamedTuple):
    """Marks are separate for every destination topic, and for what a startpoint began: see decide.py."""

    topic: str
    startpoint_epoch: int = 0


class LogRange(NamedTuple):
    """Half-open: log offsets [start, end) of one partition of a topic, holes included, read in a startpoint epoch."""

    topic: str
    partition: int
    start: int
    end: int
    startpoint_epoch: int = 0

    def __str__(self) -> str:
        return f"{self.topic}-{shown_partition(self.partition)} [{self.start}, {self.end})"


class RowCounts(NamedTuple):
    """What became of a batch's rows: rows = kept + dropped + unkeyed; late rows are among the dropped.

    unkeyed: they passed untouched. jumped: source offsets that marks passed over; None where a position has no
    distances.
    """

    rows: int
    kept: int
    dropped: int
    unkeyed: int
    late: int
    jumped: int | None


@dataclass(frozen=True, slots=True)
class BatchMarks:
    """The marks after one batch of one query, and the log ranges which that batch held; ranges ascend.

    first: the number of the query's own first batch. It is above 0 for a query that adopted the marks of another one
    and continues its numbers; the adopted marks are batch first - 1. Batch -1 has nothing: it is before the first.
    replaced: the ranges in which its rows replaced those of other batches in the table. counts: of the rows that the
    filter saw, whatever its handler read of them; None where nobody knows, as in marks that were imported. carrier:
    where the metadata were of which these are the marks, as FilterRule names it; None where nobody knows.
    """

    query_id: str
    batch_id: int
    ranges: tuple[LogRange, ...] = ()
    marks: Mapping[MarksKey, HighwaterMarks] = field(default_factory=dict)
    replaced: tuple[LogRange, ...] = ()
    first: int = 0
    counts: RowCounts | None = None
    carrier: str | None = None

    def __post_init__(self) -> None:
        if not self.query_id or not -1 <= self.first - 1 <= self.batch_id:
            raise ValueError(f"not a batch of a query: {self.query_id!r}, {self.batch_id}, from {self.first} on")

    @property
    def is_adopted(self) -> bool:
        """Whether these are the marks that the query began with: another query computed them."""
        return self.batch_id < self.first

    def drops(self, query_id: str, batch_id: int, keep: int) -> bool:
        """Whether a store that has just written this batch, and keeps `keep` of a query, forgets that other one."""
        if query_id != self.query_id:
            return self.batch_id - self.first >= keep
        return batch_id <= self.batch_id - keep

    def to_bytes(self) -> bytes:
        """Versioned, checksummed bytes; equal values give equal bytes."""
        blobs = [(key, self.marks[key].to_bytes()) for key in sorted(self.marks)]
        head = {
            "query": self.query_id,
            "batch": self.batch_id,
            "first": self.first,
            "ranges": [list(one) for one in self.ranges],
            "replaced": [list(one) for one in self.replaced],
            "counts": None if self.counts is None else self.counts._asdict(),
            "carrier": self.carrier,
            "marks": [[key.topic, key.startpoint_epoch, len(blob)] for key, blob in blobs],
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        body = b"".join([_HEADER.pack(_MAGIC, VERSION, len(text)), text, *(blob for _, blob in blobs)])
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> "BatchMarks":
        """Read what `to_bytes` wrote. Raises MarksStoreDamaged."""
        head, position = _head(data)
        try:
            marks = {}
            for topic, epoch, size in head["marks"]:
                marks[MarksKey(str(topic), int(epoch))] = HighwaterMarks.from_bytes(data[position : position + size])
                position += size
            ranges, replaced = (
                tuple(LogRange(str(t), *map(int, numbers)) for t, *numbers in listed)
                for listed in (head["ranges"], head["replaced"])
            )
            counts = None if head["counts"] is None else RowCounts(**head["counts"])
            carrier = None if head["carrier"] is None else str(head["carrier"])
            return cls(
                str(head["query"]), int(head["batch"]), ranges, marks, replaced, int(head["first"]), counts, carrier
            )
        except FilteringError as error:
            raise _damaged(str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(f"the head does not say what follows ({error!r})") from error


def _head(data: bytes) -> tuple[dict[str, Any], int]:
    """The head, and the position of the first byte behind it."""
    if len(data) < _HEADER.size + _CHECKSUM.size:
        raise _damaged(f"{len(data)} bytes, too few for a head")
    magic, version, head_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged(f"they begin with {magic!r}, not {_MAGIC!r}")
    (stored,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    computed = zlib.crc32(memoryview(data)[: -_CHECKSUM.size])
    if stored != computed:
        raise _damaged(f"the bytes give checksum {computed:#010x}, the stored one is {stored:#010x}")
    if version != VERSION:
        why = f"they have format version {version}, this release reads version {VERSION}"
        raise MarksStoreDamaged(f"{why}: run the job with the release that wrote them")
    try:
        head = parse_json(data[_HEADER.size : _HEADER.size + head_bytes])
    except ValueError as error:
        raise _damaged("the head is no JSON") from error
    if not isinstance(head, dict):
        raise _damaged("the head is no JSON object")
    return head, _HEADER.size + head_bytes


class MarksStore(Protocol):
    """Keeps the marks of queries, keyed (query id, batch). One query owns a store: the one that wrote last."""

    location: str
    """For messages: where a person finds it."""

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending, with the one that it adopted."""

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """What was written last for this batch; None if nothing was, or it was dropped."""

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; of this query the newest `keep` batches stay, and no other query's do
        once this one has written `keep` (BatchMarks.drops).
        """

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, durably."""


def parsed_marks(data: bytes, location: str, batch: tuple[str, int]) -> BatchMarks:
    """A store's bytes. Raises MarksStoreDamaged, also where they are not of this (query, batch)."""
    try:
        marks = BatchMarks.from_bytes(data)
    except MarksStoreDamaged as error:
        raise MarksStoreDamaged(f"marks at {location}: {error}") from error
    if batch != (marks.query_id, marks.batch_id):
        raise MarksStoreDamaged(f"marks at {location}: it holds batch {marks.batch_id} of query {marks.query_id}")
    return marks
