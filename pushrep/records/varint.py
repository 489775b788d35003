"""Zigzag varints, as Protocol Buffers and Kafka write them: small numbers of either sign in few bytes.

    zigzag:  0 -> 0, -1 -> 1, 1 -> 2, -2 -> 3 ...     then 7 bits a byte, lowest first, high bit = more follows
A varint (32-bit) takes 1-5 bytes, a varlong (64-bit) 1-10. Writing here, one by one; whole arrays in varint_arrays.py.
"""

from pushrep.records.errors import CorruptRecordBatch

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
    """Number -> bytes: what is not in the table is computed, and not kept."""

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
