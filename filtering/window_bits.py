"""The bits behind a mark: which offsets just below it were seen. Many pairs at once, one row of bytes each.

    mark m, window W:    offset  m-1  m-2  m-3 ...  m-W   | below m-W: closed, whatever was seen
                         bit      0    1    2  ...  W-1      bit i lies in byte i // 8, at 1 << (i % 8)

A row is ceil(W / 8) bytes. Bits at or above W, and bits of negative offsets (i >= m), are always 0, so that one
state has one form. Everything here is pure; rows are uint8 arrays of shape (n, ceil(W / 8)).
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


def row_bytes(window: int) -> int:
    """Bytes that the bits of one pair take."""
    return (window + 7) // 8


def empty(count: int, window: int) -> Rows:
    """Rows of pairs below whose mark nothing was seen."""
    return np.zeros((count, row_bytes(window)), np.uint8)


def lowest(counts: Numbers, window: int) -> Rows:
    """Rows with the lowest `counts[i]` bits set, at most `window` of them."""
    rows: Rows = np.repeat(_lowest(np.array([window]), window), len(counts), axis=0)
    short = np.flatnonzero(counts < window)  # marks near offset 0 only, so few
    rows[short] = _lowest(counts[short], window)
    return rows


def _lowest(counts: Numbers, window: int) -> Rows:
    in_byte = counts[:, None] - 8 * np.arange(row_bytes(window), dtype=np.int64)
    ones: Rows = ((1 << np.clip(in_byte, 0, 8)) - 1).astype(np.uint8)
    return ones


def resized(rows: Rows, marks: Numbers, old: int, new: int) -> Rows:
    """Rows of another window: narrower forgets, wider takes everything that was below the old window as seen."""
    if old == new:
        return rows
    if new < old:
        narrow: Rows = rows[:, : row_bytes(new)].copy()
        narrow &= lowest(np.full(len(rows), new, np.int64), new)
        return narrow
    wide = empty(len(rows), new)
    wide[:, : row_bytes(old)] = rows
    closed = lowest(marks, new) & ~lowest(np.full(len(rows), old, np.int64), new)
    wide |= closed
    return wide


def raised(rows: Rows, marks: Numbers, by: Numbers, window: int) -> Rows:
    """Rows after each mark went up by `by[i]` >= 0; where it did, the old mark itself becomes a bit."""
    result = rows.copy()
    rose = np.flatnonzero(by > 0)
    if len(rose):
        result[rose] = _shifted(rows[rose], np.minimum(by[rose], 8 * rows.shape[1]))
        near = rose[by[rose] <= window]
        set_bits(result, near, by[near] - 1)
        result[rose] &= lowest((marks + by)[rose], window)
    return result


def _shifted(rows: Rows, by: Numbers) -> Rows:
    """Each row moved up by 0 to 8 x width bits."""
    width = rows.shape[1]
    # One zero byte on the left gives "the byte below byte 0", one behind it all gives "far outside".
    padded = np.zeros((len(rows), width + 2), np.uint16)
    padded[:, 1 : width + 1] = rows
    source = 1 + np.arange(width, dtype=np.int64) - (by >> 3)[:, None]
    bit = (by & 7).astype(np.uint16)[:, None]
    upper = np.take_along_axis(padded, np.where(source > 0, source, width + 1), axis=1)
    lower = np.take_along_axis(padded, np.where(source > 1, source - 1, width + 1), axis=1)
    moved: Rows = (((upper << bit) | (lower >> (8 - bit))) & 0xFF).astype(np.uint8)
    return moved


def set_bits(rows: Rows, of: Numbers, bits: Numbers) -> None:
    """Set bit `bits[k]` of row `of[k]`, in place; a row may come several times."""
    np.bitwise_or.at(rows, (of, bits >> 3), np.left_shift(1, bits & 7).astype(np.uint8))


def test_bits(rows: Rows, of: Numbers, bits: Numbers) -> npt.NDArray[np.bool_]:
    """Whether bit `bits[k]` of row `of[k]` is set."""
    octets: Rows = rows[of, bits >> 3]
    octets >>= (bits & 7).astype(np.uint8)
    return np.asarray(octets & 1, np.bool_)
