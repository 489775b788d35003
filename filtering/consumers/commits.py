"""What a consumer commits: the next offset of a partition, and beside it the marks as of that offset, as one fact.

    due (assignment.py) ─▶ Commits.of: encoded, or WriteMarks first ─▶ the client commits ─▶ Commits.stored: DeleteMarks
    committed metadata ─▶ Commits.read: decoded, or ReadMarks

    {"pushrep": 2, "carrier": "key", "marks": "<base64 of zlib of the marks' bytes>", "startpoint": 12}
    {"pushrep": 2, "carrier": "key", "stored": [partition, offset, "<version>"], ...}     too big: in the marks topic

`carrier`: where the metadata were of which these are the marks. `startpoint`: the number of the startpoint that this
run began with; left out for none. Kafka allows 4096 characters (`offset.metadata.max.bytes`). Metadata that is not ours
counts as none. Format: docs/internals/formats/positions.md.

Metadata ends in a NUL (END). confluent-kafka's client adds it when it writes, and reads up to the next NUL: where none
was written, past the end of the metadata.
The steps of `Commits` are generators that yield calls, as those of group_member.py.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

from filtering.consumers.assignment import PendingCommit, TopicPartition
from filtering.errors import BadFilterSetting, CorruptMarks, FilteringError, WrongCarrier
from filtering.marks import HighwaterMarks

METADATA_CHARACTERS_MAX = 4095  # and the NUL
_TAKEN_BY = "The consumer of filtering.consumers.confluent takes one"
END = "\0"
FORMAT_VERSION = 2
NO_AUTO_COMMIT = (
    "not for a filtering consumer: the client would commit positions by itself, without the marks that belong to them; "
    "leave it out and call commit()"
)
FORGET_MARKS = (
    "kafka-consumer-groups.sh --bootstrap-server HOST:9092 --group {group} --topic {topic} "
    "--reset-offsets --to-current --execute"
)
"""Kafka's own command: it commits the positions again, without what lies beside them."""
_WHAT = "of a committed position; or seek, which begins with empty marks"
_MARKS_BYTES_MAX = 64 << 20  # of one partition; what 4096 characters of a commit can inflate to is far below


class CommitFailed(FilteringError):
    """Positions are not committed, and nothing is lost: read on and commit again.

    Partitions move between the group's members, or its coordinator does not answer. The next commit stores what this
    one was to store, of the partitions that this consumer still has; the records of others come to their
    current consumers.
    """

    def __init__(self, group: str, why: object) -> None:
        super().__init__(f"the positions of group {group!r} are not committed ({why}): read on and commit again")
        self.group, self.why = group, str(why)


class Stored(NamedTuple):
    """Where in the marks topic the marks lie, and the record's key there."""

    partition: int
    offset: int
    version: str


class CommittedPosition(NamedTuple):
    """What a commit says beside its offset. `marks` None: they are `stored`, or there are none. `carrier`: by which
    they were made; empty if there is nothing of ours.
    """

    marks: HighwaterMarks | None
    stored: Stored | None = None
    startpoint: int = 0
    carrier: str = ""


NOTHING = CommittedPosition(None)


class ReadMarks(NamedTuple):
    """Marks that do not lie beside their offset → HighwaterMarks."""

    partition: TopicPartition
    stored: Stored


class WriteMarks(NamedTuple):
    """Store marks that take `characters` beside their offset, more than fit → Stored."""

    due: PendingCommit
    characters: int
    characters_max: int


class DeleteMarks(NamedTuple):
    """No commit names this version any more."""

    stored: Stored


class MarksTooLarge(BadFilterSetting):
    """The marks of one partition do not fit beside its offset: give the consumer a `marks_topic`."""

    def __init__(self, topic: str, partition: int, size: int, allowed: int, pairs: int) -> None:
        super().__init__(
            "marks_topic", None,
            f"needed, a compacted topic: the marks of {topic}-{partition} ({pairs} pairs) take {size} characters in "
            f"the commit, the broker allows {allowed} at most (offset.metadata.max.bytes). {_TAKEN_BY}",
        )  # fmt: skip
        self.topic, self.partition, self.size, self.size_max, self.pairs = topic, partition, size, allowed, pairs


def marks_topic_needed(call: ReadMarks | WriteMarks) -> BadFilterSetting:
    """The refusal of a consumer that has no topic for marks."""
    if isinstance(call, WriteMarks):
        due = call.due
        return MarksTooLarge(due.topic, due.partition, call.characters, call.characters_max, len(due.marks))
    return BadFilterSetting("marks_topic", None, f"needed: the marks of a committed position lie in one. {_TAKEN_BY}")


class CommitPosition(NamedTuple):
    """One partition's part of a commit. `stored`: where its marks were written to, if they do not fit."""

    due: PendingCommit
    metadata: str
    stored: Stored | None


class Commits:
    """A member's commits. Remembers where the marks of the last ones lie that did not fit. Not thread-safe."""

    def __init__(self, group: str, carrier: str) -> None:
        self._group, self._carrier = group, carrier
        self._stored: dict[TopicPartition, Stored] = {}
        self._characters_max = METADATA_CHARACTERS_MAX

    def read(
        self, partition: TopicPartition, offset: int | None, metadata: str | None
    ) -> Generator[ReadMarks, Any, CommittedPosition]:
        """What a committed offset says, with its marks, wherever they lie. Raises CorruptMarks, WrongCarrier."""
        position = decode(metadata if offset is not None else None)
        if position.carrier != self._carrier and (position.marks or position.stored is not None):
            raise self._made_by_another(partition, position.carrier)
        if position.stored is None:
            return position
        self._stored[partition] = position.stored  # also if they can't be read: the next commit replaces them
        marks: HighwaterMarks = yield ReadMarks(partition, position.stored)
        return position._replace(marks=marks)

    def of(self, due: Iterable[PendingCommit]) -> Generator[WriteMarks, Any, list[CommitPosition]]:
        """What a commit says; marks that do not fit beside an offset are stored before this returns."""
        found = []
        for one in due:
            stored: Stored | None = None
            metadata = encode(CommittedPosition(one.marks, None, one.startpoint, self._carrier))
            if len(metadata) > self._characters_max:
                stored = yield WriteMarks(one, len(metadata), self._characters_max)
                metadata = encode(CommittedPosition(None, stored, one.startpoint, self._carrier))
            found.append(CommitPosition(one, metadata, stored))
        return found

    def refused(self, positions: Sequence[CommitPosition]) -> bool:
        """The broker allows less than Kafka's default: from now on less fits.

        Returns whether another try is worth it: the longest metadata held its marks.
        """
        longest = max(positions, key=lambda one: len(one.metadata))
        self._characters_max = len(longest.metadata) - 1
        return longest.stored is None

    def stored(self, positions: Sequence[CommitPosition]) -> Generator[DeleteMarks, Any, None]:
        """The client has committed these: marks of the commits that they replace are deleted."""
        for due, _, stored in positions:
            old = self._stored.pop((due.topic, due.partition), None)
            if stored is not None:
                self._stored[due.topic, due.partition] = stored
            if old is not None:
                yield DeleteMarks(old)

    def _made_by_another(self, partition: TopicPartition, carrier: str) -> WrongCarrier:
        topic, number = partition
        why = (
            f"in the position that group {self._group!r} committed of {topic}-{number}: its marks are of metadata that "
            f"were there. If that was wrong, and it is {self._carrier!r} from now on, let the group go on without "
            f"marks: stop its consumers, then {FORGET_MARKS.format(group=self._group, topic=topic)}"
        )
        return WrongCarrier(self._carrier, carrier, why)


def encode(position: CommittedPosition) -> str:
    """The metadata of a commit, without its END; it may be longer than Kafka allows."""
    fields: dict[str, object] = {"pushrep": FORMAT_VERSION, "carrier": position.carrier}
    if position.stored is not None:
        fields["stored"] = list(position.stored)
    elif position.marks is not None:
        fields["marks"] = base64.b64encode(pack_marks(position.marks)).decode()
    if position.startpoint:
        fields["startpoint"] = position.startpoint
    return json.dumps(fields, separators=(",", ":"))


def decode(metadata: str | None) -> CommittedPosition:
    """What `encode` wrote, whatever a client put behind it; NOTHING for metadata of others. Raises CorruptMarks."""
    try:
        fields, _ = json.JSONDecoder().raw_decode(metadata or "")
    except ValueError:
        return NOTHING
    if not isinstance(fields, dict) or "pushrep" not in fields:
        return NOTHING
    if fields["pushrep"] != FORMAT_VERSION:
        raise CorruptMarks(_WHAT, f"format version {fields['pushrep']!r}, this release reads {FORMAT_VERSION}")
    startpoint, stored, marks = fields.get("startpoint", 0), fields.get("stored"), fields.get("marks")
    carrier = fields.get("carrier")
    if not isinstance(startpoint, int) or startpoint < 0:
        raise CorruptMarks(_WHAT, f"startpoint {startpoint!r}")
    if not isinstance(carrier, str) or not carrier:
        raise CorruptMarks(_WHAT, f"carrier {carrier!r}")
    if stored is not None:
        return CommittedPosition(None, _stored(stored), startpoint, carrier)
    if marks is None:
        return CommittedPosition(None, None, startpoint, carrier)
    try:
        packed = base64.b64decode(marks, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptMarks(_WHAT, "its marks are no base64") from error
    return CommittedPosition(unpack_marks(packed), None, startpoint, carrier)


def pack_marks(marks: HighwaterMarks) -> bytes:
    """Marks as they lie in the marks topic."""
    return zlib.compress(marks.to_bytes(), 9)


def unpack_marks(packed: bytes) -> HighwaterMarks:
    """What `pack_marks` wrote. Raises CorruptMarks."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, _MARKS_BYTES_MAX)
        if not inflater.eof:
            raise CorruptMarks(_WHAT, "its marks end early, or are larger than marks can be")
        return HighwaterMarks.from_bytes(data)
    except zlib.error as error:
        raise CorruptMarks(_WHAT, f"its marks can't be inflated: {error}") from error


def _stored(fields: object) -> Stored:
    if (
        isinstance(fields, list)
        and len(fields) == 3
        and all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in fields[:2])
        and isinstance(fields[2], str)
    ):
        return Stored(*fields)
    raise CorruptMarks(_WHAT, f"stored {fields!r}")
