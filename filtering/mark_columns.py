"""Marks as columns and as bytes.

Columns: one row for each pair, sorted by (pid, partition), and the law by which two rows become one.

    offset                  the larger
    destination partition   the one that is known; two different ones are PairSplit
    last advance            of the row with the larger offset; at equal offsets the earlier known one, since a
                            replay of the newest record is no advance
    bits                    shifted up to the larger offset, then OR; the lower offset becomes a bit itself

A row with its bits says which offsets are closed: those seen, and all below the window. The row with the larger
offset has the higher floor, so shifting forgets nothing that it does not close: merging is the union of closed
offsets, hence associative, commutative and idempotent. That is what lets Spark merge the results of slices.

Bytes, format version 1: what a marks store keeps and a commit carries.

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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering import window_bits
from filtering.errors import BadFilterSetting, CorruptMarks, MarksVersionUnsupported, PairSplit

Numbers = npt.NDArray[np.int64]

UNKNOWN = -1  # stands in the columns for a destination partition or an advance nobody told
WINDOW_MAX = 1 << 20  # offsets; 128 KiB of bits for a pair
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1


class MarkColumns(NamedTuple):
    """n pairs: int64 arrays of length n, and `bitmaps` as uint8 of shape (n, ceil(window / 8)).

    Bit i of a bitmap, counted from the lowest bit of byte 0, says whether offset - 1 - i was seen. -1 stands for a
    destination partition or an `advanced_ms` that is not known.
    """

    pids: Numbers
    partitions: Numbers
    offsets: Numbers
    destination_partitions: Numbers
    advanced_ms: Numbers
    bitmaps: npt.NDArray[np.uint8]
    window: int


def check_window(window: object) -> int:
    """The window if it is one; raises BadFilterSetting."""
    if isinstance(window, bool) or not isinstance(window, int | np.integer) or not 0 <= window <= WINDOW_MAX:
        raise BadFilterSetting("window", window, f"a number of offsets in [0, {WINDOW_MAX}]")
    return int(window)


def checked(columns: MarkColumns) -> MarkColumns:
    """The columns if every field is in its range and all have one length; raises BadFilterSetting naming the column."""
    count = len(columns.pids)
    for name, low, high in (
        ("partitions", 0, _INT32_MAX),
        ("offsets", 0, _INT64_MAX),
        ("destination_partitions", UNKNOWN, _INT32_MAX),
        ("advanced_ms", UNKNOWN, _INT64_MAX),
    ):
        column = getattr(columns, name)
        if column.shape != (count,):
            raise BadFilterSetting(name, column.shape, f"a column of {count} rows, as long as pids")
        wrong = (column < low) | (column > high)
        if wrong.any():
            raise BadFilterSetting(name, int(column[wrong][0]), f"in [{low}, {high}]")
    shape = (count, window_bits.row_bytes(columns.window))
    if columns.bitmaps.shape != shape:
        raise BadFilterSetting("bitmaps", columns.bitmaps.shape, f"uint8 of shape {shape} for window={columns.window}")
    return columns


def with_window(columns: MarkColumns, window: int) -> MarkColumns:
    """The same marks for another window: narrower forgets, wider holds all that was below the old one as seen."""
    bits = window_bits.resized(columns.bitmaps, columns.offsets, columns.window, window)
    return columns._replace(bitmaps=bits, window=window)


def select_rows(columns: MarkColumns, rows: Any) -> MarkColumns:
    """Some rows, by index or by mask."""
    pids, partitions, offsets, destinations, advanced, bits, window = columns
    return MarkColumns(
        pids[rows], partitions[rows], offsets[rows], destinations[rows], advanced[rows], bits[rows], window
    )


def concatenated(first: MarkColumns, second: MarkColumns) -> MarkColumns:
    """The rows of both, under the wider window."""
    window = max(first.window, second.window)
    first, second = with_window(first, window), with_window(second, window)
    return MarkColumns(
        np.concatenate([first.pids, second.pids]),
        np.concatenate([first.partitions, second.partitions]),
        np.concatenate([first.offsets, second.offsets]),
        np.concatenate([first.destination_partitions, second.destination_partitions]),
        np.concatenate([first.advanced_ms, second.advanced_ms]),
        np.concatenate([first.bitmaps, second.bitmaps]),
        window,
    )


def canonical(columns: MarkColumns) -> MarkColumns:
    """Sorted, each pair once, no stray bits: the one form of these marks. Raises PairSplit."""
    if len(columns.pids) == 0:
        return with_window(columns, 0)
    if columns.window:
        columns = columns._replace(bitmaps=columns.bitmaps & window_bits.lowest(columns.offsets, columns.window))
    if not ascending(columns.pids, columns.partitions):
        columns = select_rows(columns, np.lexsort((columns.partitions, columns.pids)))
        if not ascending(columns.pids, columns.partitions):
            columns = _merged_repeats(columns)
    return columns


def ascending(pids: Numbers, partitions: Numbers) -> bool:
    """Whether pairs rise strictly."""
    rises = (pids[1:] > pids[:-1]) | ((pids[1:] == pids[:-1]) & (partitions[1:] > partitions[:-1]))
    return bool(rises.all())


def same(first: MarkColumns, second: MarkColumns) -> bool:
    """Whether two canonical forms are one."""
    return (
        first.window == second.window
        and np.array_equal(first.pids, second.pids)
        and np.array_equal(first.partitions, second.partitions)
        and np.array_equal(first.offsets, second.offsets)
        and np.array_equal(first.destination_partitions, second.destination_partitions)
        and np.array_equal(first.advanced_ms, second.advanced_ms)
        and np.array_equal(first.bitmaps, second.bitmaps)
    )


def _merged_repeats(columns: MarkColumns) -> MarkColumns:
    """Sorted rows in which a pair may come several times → each pair once, by the law above."""
    pids, partitions, offsets, destinations, advanced, bits, window = columns
    starts = np.flatnonzero(
        np.concatenate([np.ones(1, np.bool_), (pids[1:] != pids[:-1]) | (partitions[1:] != partitions[:-1])])
    )
    sizes = np.diff(starts, append=len(pids))
    highest = np.maximum.reduceat(offsets, starts)
    row_highest = np.repeat(highest, sizes)

    known = np.maximum.reduceat(destinations, starts)
    lowest_known = np.minimum.reduceat(np.where(destinations == UNKNOWN, _INT64_MAX, destinations), starts)
    split = np.flatnonzero((known != UNKNOWN) & (lowest_known != known))
    if len(split):
        k = split[0]
        raise PairSplit(int(pids[starts[k]]), int(partitions[starts[k]]), int(lowest_known[k]), int(known[k]))

    counts = (offsets == row_highest) & (advanced != UNKNOWN)
    earliest = np.minimum.reduceat(np.where(counts, advanced, _INT64_MAX), starts)
    any_known = np.maximum.reduceat(counts, starts)
    if window:
        shifted = window_bits.raised(bits, offsets, row_highest - offsets, window)
        bits = np.bitwise_or.reduceat(shifted, starts, axis=0)
    else:
        bits = bits[starts]
    return MarkColumns(
        pids[starts], partitions[starts], highest, known, np.where(any_known, earliest, UNKNOWN), bits, window
    )


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
