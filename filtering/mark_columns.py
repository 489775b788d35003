"""Marks as columns: one row for each pair, sorted by (pid, partition), and the law by which two rows become one.

    offset                  the larger
    destination partition   the one that is known; two different ones are PairSplit
    last advance            of the row with the larger offset; at equal offsets the earlier known one, since a
                            replay of the newest record is no advance
    bits                    shifted up to the larger offset, then OR; the lower offset becomes a bit itself

A row with its bits says which offsets are closed: those seen, and all below the window. The row with the larger
offset has the higher floor, so shifting forgets nothing that it does not close: merging is the union of closed
offsets, hence associative, commutative and idempotent. That is what lets Spark merge the results of slices.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering import window_bits
from filtering.errors import BadFilterSetting, PairSplit

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


def take(columns: MarkColumns, rows: Any) -> MarkColumns:
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
        columns = take(columns, np.lexsort((columns.partitions, columns.pids)))
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
