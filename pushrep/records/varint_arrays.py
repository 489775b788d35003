"""Zigzag varints by the array: the same bytes as varint.py, a numpy operation for all records at a time."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.varint import VARINT_BYTES_MAX, VARLONG_BYTES_MAX

Bytes: TypeAlias = NDArray[np.uint8]
Ints: TypeAlias = NDArray[np.int64]

_WIDTH_LIMITS = np.array([1 << (7 * width) for width in range(1, VARLONG_BYTES_MAX)], np.uint64)


def zigzag(values: Ints) -> NDArray[np.uint64]:
    """0, -1, 1, -2 ... -> 0, 1, 2, 3 ..."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def widths(zigzags: NDArray[np.uint64]) -> Ints:
    """Bytes that each number takes as a varint, 1-10."""
    return np.searchsorted(_WIDTH_LIMITS, zigzags, side="right") + 1


def varint_matrix(zigzags: NDArray[np.uint64], width: int) -> Bytes:
    """The n x `width` bytes of numbers that take `width` bytes each."""
    matrix = np.empty((len(zigzags), width), np.uint8)
    for column in range(width):
        more = 0x80 if column < width - 1 else 0
        matrix[:, column] = (zigzags >> np.uint64(7 * column)).astype(np.uint8) & 0x7F | more
    return matrix


def read_varints(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """(values, positions behind them) of the 32-bit varints at the positions `at`, all inside `data`.

    A varint that runs out of the data is read on as if its last byte were repeated: its position tells. Raises
    CorruptRecordBatch for one that exceeds 5 bytes or 32 bits.
    """
    zigzags, behind = _read(data, at, VARINT_BYTES_MAX)
    if zigzags.size and int(zigzags.max()) >> 32:
        raise CorruptRecordBatch("a varint exceeds 32 bits")
    return _unzigzag(zigzags), behind


def read_varlongs(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """As `read_varints`, for numbers of 64 bits in at most 10 bytes."""
    zigzags, behind = _read(data, at, VARLONG_BYTES_MAX)
    return _unzigzag(zigzags), behind


def _unzigzag(zigzags: NDArray[np.uint64]) -> Ints:
    return (zigzags >> np.uint64(1)).view(np.int64) ^ -(zigzags & np.uint64(1)).view(np.int64)


def _read(data: Bytes, at: Ints, bytes_max: int) -> tuple[NDArray[np.uint64], Ints]:
    first = data.take(at)
    more = first >> 7
    if not more.any():
        return first.astype(np.uint64), at + 1
    # Two bytes are what lengths from 64 and deltas from 64 take: worth a pass over all, without picking rows.
    second = data.take(at + 1, mode="clip") * more
    zigzags = (first & 0x7F).astype(np.uint64) | (second & 0x7F).astype(np.uint64) << np.uint64(7)
    behind = at + 1 + more
    rows = np.flatnonzero(second >> 7)
    for index in range(2, bytes_max):
        if not rows.size:
            return zigzags, behind
        byte = data.take(behind[rows], mode="clip")
        if index == VARLONG_BYTES_MAX - 1 and (byte & 0x7E).any():
            raise CorruptRecordBatch("a varlong exceeds 64 bits")
        zigzags[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        behind[rows] += 1
        rows = rows[byte >= 0x80]
    if rows.size:
        raise CorruptRecordBatch(f"a varint has more than {bytes_max} bytes")
    return zigzags, behind
