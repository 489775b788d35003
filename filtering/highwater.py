"""HighwaterMarks: the highest source offset seen of each pair (PID, source partition), as an immutable value.

    pair → offset · destination partition · last advance in ms · bits of the window below the offset

A million pairs are a few sorted numpy columns (mark_columns.py), never a million objects; bytes are in
mark_columns.py. Merging is associative, commutative and idempotent, so marks of slices may be merged in any order.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering import mark_columns, window_bits
from filtering.errors import BadFilterSetting
from filtering.mark_columns import UNKNOWN, MarkColumns

_PARTITION_BITS = 31


class MarkEntry(NamedTuple):
    """What is remembered of one pair; None where nobody told the destination partition or the time.

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
        self._hold(MarkColumns(none, none, none, none, none, window_bits.empty(0, 0), 0))

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
        window = mark_columns.check_window(window)
        pid_column = _column("pids", pids)
        count = len(pid_column)
        columns = MarkColumns(
            pid_column,
            _column("partitions", partitions),
            _column("offsets", offsets),
            _column("destination_partitions", destination_partitions, count),
            _column("advanced_ms", advanced_ms, count),
            window_bits.empty(count, window) if bitmaps is None else np.asarray(bitmaps, np.uint8),
            window,
        )
        return cls._of(mark_columns.canonical(mark_columns.checked(columns)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "HighwaterMarks":
        """Read what `to_bytes` wrote. Raises CorruptMarks naming what is wrong, MarksVersionUnsupported."""
        return cls._of(mark_columns.decode(data))

    def to_bytes(self) -> bytes:
        """Versioned, checksummed bytes; the same marks give the same bytes (docs/formats/marks.md)."""
        return mark_columns.encode(self._columns)

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
        """What someone knows who saw what both saw (the law: mark_columns.py), under the wider window.

        Raises PairSplit if one pair lies in two destination partitions.
        """
        if len(other) == 0 or other is self:
            return self
        if len(self) == 0:
            return other
        return self._of(mark_columns.canonical(mark_columns.concatenated(self._columns, other.to_columns())))

    def with_window(self, window: int) -> "HighwaterMarks":
        """The same marks with another window: narrower forgets bits, wider holds all below the old one as seen."""
        window = mark_columns.check_window(window)
        if window == self.window or len(self) == 0:
            return self
        return self._of(mark_columns.with_window(self._columns, window))

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
        return mark_columns.same(self._columns, other.to_columns())

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
        return self._of(mark_columns.canonical(mark_columns.select_rows(self._columns, mask)))

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
