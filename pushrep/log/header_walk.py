"""From header to header of a segment's file: for who needs to know where batches lie, and none of their records.

    | batch          | batch | batch | batch |        a header's length says where the next one stands
      header ──────────▶ header ▶ ...                  large batches: a read each; small ones: many in a window

Nothing is checked but what `BatchHeader.parse` checks: the CRC is the business of who reads the bytes, and whether the
offsets follow each other that of who walks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

from pushrep.log.index_file import IndexFile
from pushrep.log.segment import OFFSET_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, segment_path
from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.header import (
    CODEC_MASK,
    CONTROL_BIT,
    HEADER_BYTES,
    LENGTH_ENDS_AT,
    MAGIC,
    OFFSET_MAX,
    RECORD_BYTES_MIN,
    BatchHeader,
    unpack_walked,
)
from pushrep.seams import Filesystem

_WINDOW_BYTES, _SMALL_BYTES = 64 << 10, 4096
"""A batch of fewer bytes is one of many as a rule, and what is read next holds more headers than one."""

Walked: TypeAlias = tuple[int, int, int, int, int, int]
"""A batch: position, base offset, next offset, size in bytes, leader epoch, records of data (none in a control batch).

No NamedTuple: making one costs a third of the walk.
"""


class Readable(Protocol):
    """What a walk needs of a File."""

    def read_at(self, size: int, position: int) -> bytes: ...


def walk(file: Readable, position: int, first_bytes: int = HEADER_BYTES) -> Iterator[Walked]:
    """Neighbouring batches from byte `position` on, where one begins, up to what is no header; `why_not` says why.

    first_bytes: of the first read; more than a header where small batches are expected. Raises OSError.
    """
    read_at, unpack = file.read_at, unpack_walked
    begin, at, last_at, size = position, 0, -1, _SMALL_BYTES
    while True:
        if at > last_at:
            begin += at
            window = read_at(first_bytes or (_WINDOW_BYTES if size < _SMALL_BYTES else HEADER_BYTES), begin)
            first_bytes = at = 0
            last_at = len(window) - HEADER_BYTES
            if last_at < 0:
                return
        base, length, epoch, magic, attributes, delta, count = unpack(window, at)
        size, following = length + LENGTH_ENDS_AT, base + delta + 1
        # BatchHeader.parse's rules, inlined: a call and a tuple of 13 would take twice as long as all of this.
        if not (
            magic == MAGIC
            and size >= HEADER_BYTES
            and 0 <= base < following <= OFFSET_MAX
            and 0 <= count <= delta + 1
            and epoch >= -1
            and (attributes & CODEC_MASK or count * RECORD_BYTES_MIN <= size - HEADER_BYTES)
        ):
            return
        yield begin + at, base, following, size, epoch, 0 if attributes & CONTROL_BIT else count
        at += size


def why_not(file: Readable, position: int) -> str:
    """Why no walk goes on at this byte, in words. Raises OSError."""
    data = file.read_at(HEADER_BYTES, position)
    if len(data) < HEADER_BYTES:
        return "the file ends"
    try:
        BatchHeader.parse(data)
    except CorruptRecordBatch as error:
        return error.reason
    return "it was written meanwhile"


def position_near(filesystem: Filesystem, directory: Path, segment: int, file: Readable, offset: int) -> int:
    """A byte of the segment's `file` where a batch begins that holds `offset`, or lies before it. Raises OSError.

    Found by the sparse index, which is believed only if the batch that it names stands there; else the file's begin.
    """
    index = IndexFile(filesystem, segment_path(directory, segment, INDEX_SUFFIX), OFFSET_ENTRY)
    entry = index.floor(offset - segment)
    if entry is None or entry[1] < 0:
        return 0
    for _, _, next_offset, *_ in walk(file, entry[1]):
        return entry[1] if next_offset - 1 - segment == entry[0] else 0
    return 0
