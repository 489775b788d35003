"""Zigzag varints, as Protocol Buffers and Kafka write them: small numbers of either sign in few bytes.

    zigzag:  0 -> 0, -1 -> 1, 1 -> 2, -2 -> 3 ...     then 7 bits a byte, lowest first, high bit = more follows
A varint (32-bit) takes 1-5 bytes, a varlong (64-bit) 1-10. First one by one; further down for arrays, with the same
bytes by one numpy operation for all records.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.header import CorruptRecordBatch

TABLE_SIZE = 1 << 14
VARINT_BYTES_MAX = 5
VARLONG_BYTES_MAX = 10


def varint(value: int) -> bytes:
    """The bytes of a signed number of at most 64 bits."""
    zigzag = (value << 1) ^ (value >> 63)
    if zigzag < 0x80:
        return bytes((zigzag,))
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


class _Varints(dict[int, bytes]):
    """Number -> bytes: numbers that are not in the table are computed, and not stored."""

    def __missing__(self, value: int) -> bytes:
        return varint(value)


SMALL_VARINTS = [varint(number) for number in range(TABLE_SIZE)]
"""`SMALL_VARINTS[n]` is `varint(n)` for 0 <= n < 2^14: encoding does little else than make them. IndexError above."""

VARINTS = _Varints(enumerate(SMALL_VARINTS))
"""`VARINTS[n]` is `varint(n)` for every n; twice as slow as the list."""


def read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    """(value, position behind it) of a 32-bit varint; IndexError past the end, CorruptRecordBatch if it is too long."""
    low = buffer[position]
    if low < 0x80:
        return (low >> 1) ^ -(low & 1), position + 1
    high = buffer[position + 1]
    if high < 0x80:
        zigzag = (low & 0x7F) | high << 7
        return (zigzag >> 1) ^ -(zigzag & 1), position + 2
    value, position = _read(buffer, position, VARINT_BYTES_MAX)
    if not -(1 << 31) <= value < 1 << 31:
        raise CorruptRecordBatch(f"varint {value} before byte {position} of the records exceeds 32 bits")
    return value, position


def read_varlong(buffer: bytes, position: int) -> tuple[int, int]:
    """(value, position behind it) of a 64-bit varint; IndexError past the end, CorruptRecordBatch if it is too long."""
    low = buffer[position]
    if low < 0x80:
        return (low >> 1) ^ -(low & 1), position + 1
    value, position = _read(buffer, position, VARLONG_BYTES_MAX)
    if not -(1 << 63) <= value < 1 << 63:
        raise CorruptRecordBatch(f"varlong before byte {position} of the records exceeds 64 bits")
    return value, position


def _read(buffer: bytes, position: int, bytes_max: int) -> tuple[int, int]:
    zigzag = 0
    for shift in range(0, 7 * bytes_max, 7):
        byte = buffer[position]
        position += 1
        zigzag |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (zigzag >> 1) ^ -(zigzag & 1), position
    raise CorruptRecordBatch(f"varint before byte {position} of the records has more than {bytes_max} bytes")


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

    A varint that runs out of the data is read on as if its last byte were repeated: its position shows it. Raises
    CorruptRecordBatch for one that exceeds 5 bytes or 32 bits.
    """
    zigzags, behind = _read_arrays(data, at, VARINT_BYTES_MAX)
    if zigzags.size and int(zigzags.max()) >> 32:
        raise CorruptRecordBatch("a varint exceeds 32 bits")
    return _unzigzag(zigzags), behind


def read_varlongs(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """As `read_varints`, for numbers of 64 bits in at most 10 bytes."""
    zigzags, behind = _read_arrays(data, at, VARLONG_BYTES_MAX)
    return _unzigzag(zigzags), behind


def _unzigzag(zigzags: NDArray[np.uint64]) -> Ints:
    return (zigzags >> np.uint64(1)).view(np.int64) ^ -(zigzags & np.uint64(1)).view(np.int64)


def _read_arrays(data: Bytes, at: Ints, bytes_max: int) -> tuple[NDArray[np.uint64], Ints]:
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
