"""Marks as bytes, format version 1: what a marks store keeps and a commit carries.

     0       4           8          12       20                              end-4
    | "HWMK"  | version u32 | window u32 | count u64 | count entries, ascending | CRC-32 u32 |   big-endian

     0        8            12         20              24             32
    | pid i64 | partition i32 | offset i64 | destination i32 | advanced_ms i64 | ceil(window / 8) bytes of bits |

-1 stands for a destination partition or an advance that is not known. Entries rise strictly by (pid, partition) and
stray bits are 0, so the same marks always give the same bytes. Magic, version and the CRC-32 (zlib's, over all
before it) keep their places in every version: the checksum is proven before the version is believed, so a flipped
bit is never taken for another version. Format: docs/formats/marks.md.
"""

import struct
import zlib

import numpy as np

from filtering import window_bits
from filtering.errors import CorruptMarks, MarksVersionUnsupported
from filtering.mark_columns import UNKNOWN, WINDOW_MAX, MarkColumns, ascending

VERSION = 1

_MAGIC = b"HWMK"
_HEADER = struct.Struct(">4sIIQ")
_CHECKSUM = struct.Struct(">I")
assert _HEADER.size == 20, "docs/formats/marks.md promises 20 bytes"
_ENTRY_BYTES = 32  # without the bits

_FIELDS = ("pids", "partitions", "offsets", "destination_partitions", "advanced_ms")
_TYPES = (">i8", ">i4", ">i8", ">i4", ">i8")


def _entry_type(window: int) -> "np.dtype[np.void]":
    bits = ("bitmaps", "u1", (window_bits.row_bytes(window),))
    return np.dtype([*zip(_FIELDS, _TYPES, strict=True), bits] if window else [*zip(_FIELDS, _TYPES, strict=True)])


assert _entry_type(0).itemsize == _ENTRY_BYTES, "docs/formats/marks.md promises 32 bytes and the bits"


def encode(columns: MarkColumns) -> bytes:
    """Canonical columns → their bytes."""
    count, window = len(columns.pids), columns.window
    entries = np.empty(count, _entry_type(window))
    for name in _FIELDS:
        entries[name] = getattr(columns, name)
    if window:
        entries["bitmaps"] = columns.bitmaps
    header = _HEADER.pack(_MAGIC, VERSION, window, count)
    body = entries.tobytes()
    return header + body + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header)))


def decode(data: bytes | bytearray | memoryview) -> MarkColumns:
    """Bytes → canonical columns. Raises CorruptMarks naming what is wrong, MarksVersionUnsupported."""
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size + _CHECKSUM.size:
        raise CorruptMarks("length", f"{len(view)} bytes, the shortest marks have {_HEADER.size + _CHECKSUM.size}")
    magic, version, window, count = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptMarks("magic", f"begins with {magic!r}, marks begin with {_MAGIC!r}")
    (stored,) = _CHECKSUM.unpack_from(view, len(view) - _CHECKSUM.size)
    computed = zlib.crc32(view[: -_CHECKSUM.size])
    if stored != computed:
        raise CorruptMarks("checksum", f"the bytes give {computed:#010x}, the stored one is {stored:#010x}")
    if version != VERSION:
        raise MarksVersionUnsupported(version, VERSION)
    if window > WINDOW_MAX or (count == 0 and window):
        raise CorruptMarks("window", f"{window} for {count} pairs, at most {WINDOW_MAX}, and 0 without pairs")
    body_bytes = len(view) - _HEADER.size - _CHECKSUM.size
    # Proven before anything is allocated: a count is believed only if that many entries are there.
    if count * (_ENTRY_BYTES + window_bits.row_bytes(window)) != body_bytes:
        raise CorruptMarks("count", f"{count} pairs with window {window} do not fill {body_bytes} bytes")
    return _checked(_columns(view, window, count))


def _columns(view: memoryview, window: int, count: int) -> MarkColumns:
    entries = np.frombuffer(view, _entry_type(window), count, _HEADER.size)
    bits = entries["bitmaps"].reshape(count, -1).copy() if window else window_bits.empty(count, 0)
    pids, partitions, offsets, destinations, advanced = (entries[name].astype(np.int64) for name in _FIELDS)
    return MarkColumns(pids, partitions, offsets, destinations, advanced, bits, window)


def _checked(columns: MarkColumns) -> MarkColumns:
    """A right checksum over wrong entries: some other writer's mistake, refused like damage."""
    for name in _FIELDS[1:]:
        least = UNKNOWN if name in ("destination_partitions", "advanced_ms") else 0
        low = np.flatnonzero(getattr(columns, name) < least)
        if len(low):
            raise CorruptMarks(
                name, f"entry {low[0]} has {getattr(columns, name)[low[0]]}, at least {least} is possible"
            )
    if not ascending(columns.pids, columns.partitions):
        raise CorruptMarks("entries", "the pairs do not rise strictly")
    if columns.window and (columns.bitmaps & ~window_bits.lowest(columns.offsets, columns.window)).any():
        raise CorruptMarks("bits", "set outside the window or for negative offsets")
    return columns
