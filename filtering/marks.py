"""HighwaterMarks: the highest source offset seen of each pair (PID, source partition), as an immutable value.

    pair → offset · destination partition · last advance in ms · bits of the window below the offset

A million pairs are a few sorted numpy columns, never a million objects.

Columns: one row for each pair, sorted by (pid, partition), and how two rows of one pair merge.

    offset                  the larger
    destination partition   the one that is known; two different ones are PairSplit
    last advance            of the row with the larger offset; at equal offsets the earlier known one, since a
                            replay of the newest record is no advance
    bits                    shifted up to the larger offset, then OR; the lower offset becomes a bit itself

A row with its bits says which offsets are closed: those seen, and all below the window. The window of the row with the
larger offset begins higher: bits that shifting drops from the other row lie below it, so they are closed anyhow.
Merging is therefore the union of closed offsets, hence associative, commutative and idempotent. That is what lets Spark
merge the results of slices.

Bytes, format version 1: what a marks store keeps and a commit carries.

     0       4           8          12       20                              end-4
    | "HWMK"  | version u32 | window u32 | count u64 | count entries, ascending | CRC-32 u32 |   big-endian

     0        8            12         20              24             32
    | pid i64 | partition i32 | offset i64 | destination i32 | advanced_ms i64 | ceil(window / 8) bytes of bits |

-1 stands for a destination partition or an advance that is not known. Entries rise strictly by (pid, partition) and
stray bits are 0, so the same marks always give the same bytes. Magic, version and the CRC-32 (zlib's, over all
before it) keep their places in every version: the checksum is proven before the version is believed, so a flipped
bit is never taken for another version. Format: docs/internals/formats/marks.md.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.errors import BadFilterSetting, CorruptMarks, PairSplit
from filtering.rule import Numbers, lowest_bits, no_bits, raised_bits, resized_bits, row_bytes

UNKNOWN = -1  # stands in the columns for a destination partition or an advance that is not known
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


def _arrays(columns: MarkColumns) -> Sequence[npt.NDArray[Any]]:
    return columns[:-1]


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
    shape = (count, row_bytes(columns.window))
    if columns.bitmaps.shape != shape:
        raise BadFilterSetting("bitmaps", columns.bitmaps.shape, f"uint8 of shape {shape} for window={columns.window}")
    return columns


def with_window(columns: MarkColumns, window: int) -> MarkColumns:
    """The same marks for another window: a narrower one forgets, a wider one has all below the old one as seen."""
    bits = resized_bits(columns.bitmaps, columns.offsets, columns.window, window)
    return columns._replace(bitmaps=bits, window=window)


def select_rows(columns: MarkColumns, rows: Any) -> MarkColumns:
    """Some rows, by index or by mask."""
    return MarkColumns._make([*(column[rows] for column in _arrays(columns)), columns.window])


def concatenated(first: MarkColumns, second: MarkColumns) -> MarkColumns:
    """The rows of both, under the wider window."""
    window = max(first.window, second.window)
    first, second = with_window(first, window), with_window(second, window)
    return MarkColumns._make([*map(np.concatenate, zip(_arrays(first), _arrays(second), strict=True)), window])


def canonical(columns: MarkColumns) -> MarkColumns:
    """Sorted, each pair once, no stray bits: the one form of these marks. Raises PairSplit."""
    if len(columns.pids) == 0:
        return with_window(columns, 0)
    if columns.window:
        columns = columns._replace(bitmaps=columns.bitmaps & lowest_bits(columns.offsets, columns.window))
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
    return first.window == second.window and all(map(np.array_equal, _arrays(first), _arrays(second)))


def _merged_repeats(columns: MarkColumns) -> MarkColumns:
    """Sorted rows in which a pair may come several times → each pair once, merged as the file's map says."""
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
        shifted = raised_bits(bits, offsets, row_highest - offsets, window)
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
assert _HEADER.size == 20, "docs/internals/formats/marks.md promises 20 bytes"
_ENTRY_BYTES = 32  # without the bits

_FIELDS = ("pids", "partitions", "offsets", "destination_partitions", "advanced_ms")
_TYPES = (">i8", ">i4", ">i8", ">i4", ">i8")


def _entry_type(window: int) -> "np.dtype[np.void]":
    bits = ("bitmaps", "u1", (row_bytes(window),))
    return np.dtype([*zip(_FIELDS, _TYPES, strict=True), bits] if window else [*zip(_FIELDS, _TYPES, strict=True)])


assert _entry_type(0).itemsize == _ENTRY_BYTES, "docs/internals/formats/marks.md promises 32 bytes and the bits"


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
    """Bytes → canonical columns. Raises CorruptMarks naming what is wrong."""
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
        raise CorruptMarks("version", f"format version {version}, this release reads version {VERSION}")
    if window > WINDOW_MAX or (count == 0 and window):
        raise CorruptMarks("window", f"{window} for {count} pairs, at most {WINDOW_MAX}, and 0 without pairs")
    body_bytes = len(view) - _HEADER.size - _CHECKSUM.size
    # Proven before anything is allocated: a count is believed only if that many entries are there.
    if count * (_ENTRY_BYTES + row_bytes(window)) != body_bytes:
        raise CorruptMarks("count", f"{count} pairs with window {window} do not fill {body_bytes} bytes")
    return _checked(_columns(view, window, count))


def _columns(view: memoryview, window: int, count: int) -> MarkColumns:
    entries = np.frombuffer(view, _entry_type(window), count, _HEADER.size)
    bits = entries["bitmaps"].reshape(count, -1).copy() if window else no_bits(count, 0)
    pids, partitions, offsets, destinations, advanced = (entries[name].astype(np.int64) for name in _FIELDS)
    return MarkColumns(pids, partitions, offsets, destinations, advanced, bits, window)


def _checked(columns: MarkColumns) -> MarkColumns:
    """Entries that no writer of ours makes, under a right checksum: refused like damage."""
    try:
        checked(columns)
    except BadFilterSetting as error:
        raise CorruptMarks(error.setting, str(error)) from error
    if not ascending(columns.pids, columns.partitions):
        raise CorruptMarks("entries", "the pairs do not rise strictly")
    if columns.window and (columns.bitmaps & ~lowest_bits(columns.offsets, columns.window)).any():
        raise CorruptMarks("bits", "set outside the window or for negative offsets")
    return columns


_PARTITION_BITS = 31


class MarkEntry(NamedTuple):
    """What is remembered of one pair; None where the destination partition or the time is not known.

    Bit i of `bitmap`, counted from the lowest bit of byte 0, says whether `offset` - 1 - i was seen.
    """

    offset: int
    destination_partition: int | None
    advanced_ms: int | None
    bitmap: bytes


class HighwaterMarks:
    """The marks of one destination topic; `HighwaterMarks()` has none. Immutable, hashable, cheap to pickle."""

    __slots__ = ("_codes", "_columns", "_first_rows")

    def __init__(self) -> None:
        none = np.empty(0, np.int64)
        self._hold(MarkColumns(none, none, none, none, none, no_bits(0, 0), 0))

    @classmethod
    def from_columns(  # noqa: PLR0913 - the columns of a mark, one argument each
        cls,
        pids: npt.ArrayLike,
        partitions: npt.ArrayLike,
        offsets: npt.ArrayLike,
        destination_partitions: npt.ArrayLike = UNKNOWN,
        *,
        advanced_ms: npt.ArrayLike = UNKNOWN,
        bitmaps: npt.NDArray[np.uint8] | None = None,
        window: int = 0,
    ) -> "HighwaterMarks":
        """Marks of n rows in any order; a pair that comes several times is merged (see MarkColumns for the shapes).

        `destination_partitions` and `advanced_ms` are columns or one number for all, -1 where unknown. Without
        `bitmaps` nothing below the offsets counts as seen inside the `window`.
        Raises BadFilterSetting naming the column, PairSplit for a pair in two destination partitions.
        """
        window = check_window(window)
        pid_column = _column("pids", pids)
        count = len(pid_column)
        columns = MarkColumns(
            pid_column,
            _column("partitions", partitions),
            _column("offsets", offsets),
            _column("destination_partitions", destination_partitions, count),
            _column("advanced_ms", advanced_ms, count),
            no_bits(count, window) if bitmaps is None else np.asarray(bitmaps, np.uint8),
            window,
        )
        return cls._of(canonical(checked(columns)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "HighwaterMarks":
        """Read what `to_bytes` wrote. Raises CorruptMarks naming what is wrong."""
        return cls._of(decode(data))

    def to_bytes(self) -> bytes:
        """Versioned, checksummed bytes; the same marks give the same bytes (docs/internals/formats/marks.md)."""
        return encode(self._columns)

    def to_columns(self) -> MarkColumns:
        """The marks as read-only columns, sorted by (pid, partition)."""
        return self._columns

    @property
    def window(self) -> int:
        """How many offsets below each mark have a bit; 0 without pairs."""
        return self._columns.window

    def get(self, pid: int, partition: int) -> MarkEntry | None:
        """The entry of one pair, or None."""
        pids, partitions = self._columns.pids, self._columns.partitions
        low, high = np.searchsorted(pids, pid, "left"), np.searchsorted(pids, pid, "right")
        row = int(low + np.searchsorted(partitions[low:high], partition))
        return self._entry(row) if row < high and partitions[row] == partition else None

    def find(self, pids: npt.NDArray[np.int64], partitions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows in `to_columns()` of many pairs at once, -1 for those without a mark."""
        if len(self) == 0 or len(pids) == 0:
            return np.full(len(pids), -1, np.int64)
        first_rows, codes = self._index()
        unique = self._columns.pids[first_rows]
        rank = np.minimum(np.searchsorted(unique, pids), len(unique) - 1)
        wanted = (rank << _PARTITION_BITS) | partitions
        row = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        return np.where((unique[rank] == pids) & (codes[row] == wanted), row, -1)

    def items(self) -> Iterator[tuple[tuple[int, int], MarkEntry]]:
        """((pid, partition), entry) of every pair, ascending."""
        for row, pair in enumerate(zip(self._columns.pids.tolist(), self._columns.partitions.tolist(), strict=True)):
            yield pair, self._entry(row)

    def merge(self, other: "HighwaterMarks") -> "HighwaterMarks":
        """The marks after everything that either saw (how two rows merge: the file's map), under the wider window.

        Raises PairSplit if one pair lies in two destination partitions.
        """
        if len(other) == 0 or other is self:
            return self
        if len(self) == 0:
            return other
        return self._of(canonical(concatenated(self._columns, other.to_columns())))

    def with_window(self, window: int) -> "HighwaterMarks":
        """The same marks with another window: narrower forgets bits, wider holds all below the old one as seen."""
        window = check_window(window)
        if window == self.window or len(self) == 0:
            return self
        return self._of(with_window(self._columns, window))

    def without_expired(self, *, now_ms: int, ttl_s: float) -> "HighwaterMarks":
        """Without pairs whose last advance is more than `ttl_s` seconds before `now_ms`; unknown times stay."""
        advanced = self._columns.advanced_ms
        expired = (advanced != UNKNOWN) & (now_ms - advanced > ttl_s * 1000)
        return self._keep(~expired) if expired.any() else self

    def without_rows(self, rows: npt.NDArray[np.int64]) -> "HighwaterMarks":
        """Without some rows of `to_columns()`, as `find` numbers them."""
        keep = np.ones(len(self), np.bool_)
        keep[rows] = False
        return self._keep(keep)

    def __len__(self) -> int:
        return len(self._columns.pids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HighwaterMarks):
            return NotImplemented
        return same(self._columns, other.to_columns())

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        return f"<HighwaterMarks of {len(self)} pairs, window {self.window}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return HighwaterMarks.from_bytes, (self.to_bytes(),)

    @classmethod
    def _of(cls, columns: MarkColumns) -> "HighwaterMarks":
        marks = cls.__new__(cls)
        marks._hold(columns)  # noqa: SLF001 - its own class
        return marks

    def _hold(self, columns: MarkColumns) -> None:
        for column in columns:
            if isinstance(column, np.ndarray):
                column.setflags(write=False)
        self._columns = columns
        self._first_rows: npt.NDArray[np.int64] | None = None
        self._codes: npt.NDArray[np.int64] | None = None

    def _keep(self, mask: npt.NDArray[np.bool_]) -> "HighwaterMarks":
        return self._of(canonical(select_rows(self._columns, mask)))

    def _index(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Built once, when first asked: each PID's first row, and (rank of the PID, partition) as one number a row."""
        if self._codes is None or self._first_rows is None:
            pids = self._columns.pids
            new_pid = np.concatenate([np.ones(1, np.bool_), pids[1:] != pids[:-1]])
            self._first_rows = np.flatnonzero(new_pid)
            self._codes = ((np.cumsum(new_pid) - 1) << _PARTITION_BITS) | self._columns.partitions
        return self._first_rows, self._codes

    def _entry(self, row: int) -> MarkEntry:
        columns = self._columns
        destination, advanced = int(columns.destination_partitions[row]), int(columns.advanced_ms[row])
        return MarkEntry(
            int(columns.offsets[row]),
            None if destination == UNKNOWN else destination,
            None if advanced == UNKNOWN else advanced,
            columns.bitmaps[row].tobytes(),
        )


def _column(name: str, values: npt.ArrayLike, count: int | None = None) -> npt.NDArray[np.int64]:
    """An int64 column of its own; with `count` one number may stand for all rows."""
    column = np.asarray(values)
    if column.size and not np.issubdtype(column.dtype, np.integer):
        raise BadFilterSetting(name, str(column.dtype), "a column of whole numbers")
    if column.ndim == 0 and count is not None:
        column = np.full(count, column)
    if column.ndim != 1:
        raise BadFilterSetting(name, column.shape, "a column: one dimension")
    return column.astype(np.int64)
