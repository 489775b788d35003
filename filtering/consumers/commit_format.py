"""What stands beside a committed offset: the marks as of that offset, so that both are one fact.

    {"pushrep": 1, "marks": "<base64 of zlib of the marks' bytes>", "startpoint": 12}
    {"pushrep": 1, "stored": [partition, offset, "<version>"], "startpoint": 12}        too big: in the marks topic

`startpoint` is the number of the startpoint that this run began with; left out for none. Kafka allows 4096
characters (`offset.metadata.max.bytes`). Metadata that is not ours counts as none. Format: docs/formats/positions.md.

Each ends in a NUL, which confluent-kafka's client adds by itself: it reads up to one, past the end if there is none.
"""

import base64
import binascii
import json
import zlib
from typing import NamedTuple

from filtering.consumers.errors import CorruptPosition
from filtering.errors import FilteringError
from filtering.marks import HighwaterMarks

METADATA_CHARACTERS_MAX = 4095  # and the NUL
END = "\0"
FORMAT_VERSION = 1
_MARKS_BYTES_MAX = 64 << 20  # of one partition; what 4096 characters of a commit can inflate to is far below


class Stored(NamedTuple):
    """Where in the marks topic the marks lie, and the record's key there."""

    partition: int
    offset: int
    version: str


class CommittedPosition(NamedTuple):
    """What a commit says beside its offset. `marks` None: they are `stored`, or there are none."""

    marks: HighwaterMarks | None
    stored: Stored | None = None
    startpoint: int = 0


NOTHING = CommittedPosition(None)


def encode(position: CommittedPosition) -> str:
    """The metadata of a commit, without its END; it may be longer than Kafka allows."""
    fields: dict[str, object] = {"pushrep": FORMAT_VERSION}
    if position.stored is not None:
        fields["stored"] = list(position.stored)
    elif position.marks is not None:
        fields["marks"] = base64.b64encode(pack_marks(position.marks)).decode()
    if position.startpoint:
        fields["startpoint"] = position.startpoint
    return json.dumps(fields, separators=(",", ":"))


def decode(metadata: str | None) -> CommittedPosition:
    """What `encode` wrote, whatever a client put behind it; NOTHING for metadata of others. Raises CorruptPosition."""
    try:
        fields, _ = json.JSONDecoder().raw_decode(metadata or "")
    except ValueError:
        return NOTHING
    if not isinstance(fields, dict) or "pushrep" not in fields:
        return NOTHING
    if fields["pushrep"] != FORMAT_VERSION:
        raise CorruptPosition(f"format version {fields['pushrep']!r}, this release reads {FORMAT_VERSION}")
    startpoint, stored, marks = fields.get("startpoint", 0), fields.get("stored"), fields.get("marks")
    if not isinstance(startpoint, int) or startpoint < 0:
        raise CorruptPosition(f"startpoint {startpoint!r}")
    if stored is not None:
        return CommittedPosition(None, _stored(stored), startpoint)
    if marks is None:
        return CommittedPosition(None, None, startpoint)
    try:
        packed = base64.b64decode(marks, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptPosition("its marks are no base64") from error
    return CommittedPosition(unpack_marks(packed), None, startpoint)


def pack_marks(marks: HighwaterMarks) -> bytes:
    """Marks as they lie in the marks topic."""
    return zlib.compress(marks.to_bytes(), 9)


def unpack_marks(packed: bytes) -> HighwaterMarks:
    """What `pack_marks` wrote. Raises CorruptPosition."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, _MARKS_BYTES_MAX)
        if not inflater.eof:
            raise CorruptPosition("its marks end early, or are larger than marks can be")
        return HighwaterMarks.from_bytes(data)
    except zlib.error as error:
        raise CorruptPosition(f"its marks can't be inflated: {error}") from error
    except FilteringError as error:
        raise CorruptPosition(str(error)) from error


def _stored(fields: object) -> Stored:
    if (
        isinstance(fields, list)
        and len(fields) == 3
        and all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in fields[:2])
        and isinstance(fields[2], str)
    ):
        return Stored(*fields)
    raise CorruptPosition(f"stored {fields!r}")
