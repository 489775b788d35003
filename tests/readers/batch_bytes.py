"""Record batches by the bytes alone, written and read from Kafka's protocol guide: no line of the product is used here.

0        8       12      16 17    21  23      27        35        43      51 53      57      61
| base   | length| epoch |m| crc  |at | delta | base ms | max ms  | producer | seq    | count | records
  i64      i32     i32   i8 u32   i16  i32      i64       i64       i64 i16    i32      i32
"""

import struct
import zlib
from typing import NamedTuple

import google_crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES = 61
assert HEADER.size == HEADER_BYTES
FIELDS = {
    "base offset": (0, 8), "length": (8, 12), "leader epoch": (12, 16), "magic": (16, 17), "crc": (17, 21),
    "attributes": (21, 23), "last offset delta": (23, 27), "base timestamp": (27, 35), "max timestamp": (35, 43),
    "producer id": (43, 51), "producer epoch": (51, 53), "base sequence": (53, 57), "record count": (57, 61),
}  # fmt: skip
CRC_FROM = 21
GZIP = 1


class RawRecord(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class RawBatch(NamedTuple):
    """`position`: of its first byte in what was parsed."""

    position: int
    size: int
    base_offset: int
    next_offset: int
    leader_epoch: int
    records: tuple[RawRecord, ...]


def build_batch(base, records, *, next_offset, epoch, gzip):
    """The bytes of a batch of [base, next_offset) with these records, which may leave some of its offsets out."""
    first_ms = records[0].timestamp_ms
    payload = b"".join(_record(one, base, first_ms) for one in records)
    if gzip:
        packer = zlib.compressobj(wbits=31)
        payload = packer.compress(payload) + packer.flush()
    newest_ms = max(one.timestamp_ms for one in records)
    rest = struct.pack(
        ">hiqqqhii", GZIP if gzip else 0, next_offset - base - 1, first_ms, newest_ms, -1, -1, -1, len(records)
    )
    rest += payload
    crc = google_crc32c.value(rest)
    return struct.pack(">qiibI", base, len(rest) + 9, epoch, 2, crc) + rest


def parse_batches(data):
    """Every batch of `data`, which has to be nothing else."""
    found, at = [], 0
    while at < len(data):
        base, length, epoch, magic, crc, attributes, delta, first_ms, _, _, _, _, count = HEADER.unpack_from(data, at)
        size = length + 12
        assert magic == 2, f"magic {magic} at byte {at}"
        assert at + size <= len(data), f"the batch at byte {at} goes on behind the end"
        assert google_crc32c.value(data[at + CRC_FROM : at + size]) == crc, f"checksum at byte {at}"
        payload = data[at + HEADER_BYTES : at + size]
        if attributes & 7:
            assert attributes & 7 == GZIP
            payload = zlib.decompress(payload, wbits=31)
        records = tuple(_records(payload, count, base, first_ms))
        found.append(RawBatch(at, size, base, base + delta + 1, epoch, records))
        at += size
    return found


def _record(record, base, first_ms):
    body = b"\0" + _varint(record.timestamp_ms - first_ms) + _varint(record.offset - base)
    for piece in (record.key, record.value):
        body += _varint(-1) if piece is None else _varint(len(piece)) + piece
    body += _varint(len(record.headers))
    for name, value in record.headers:
        body += _varint(len(name.encode())) + name.encode()
        body += _varint(-1) if value is None else _varint(len(value)) + value
    return _varint(len(body)) + body


def _records(payload, count, base, first_ms):
    at = 0
    for _ in range(count):
        size, at = _read_varint(payload, at)
        end = at + size
        time, at = _read_varint(payload, at + 1)
        delta, at = _read_varint(payload, at)
        key, at = _read_bytes(payload, at)
        value, at = _read_bytes(payload, at)
        count_of_headers, at = _read_varint(payload, at)
        headers = []
        for _ in range(count_of_headers):
            name, at = _read_bytes(payload, at)
            piece, at = _read_bytes(payload, at)
            headers.append((name.decode(), piece))
        assert at == end, f"a record of {size} bytes ends elsewhere"
        yield RawRecord(base + delta, first_ms + time, key, value, tuple(headers))
    assert at == len(payload), "bytes behind the last record"


def _varint(number):
    zigzag = number * 2 if number >= 0 else -number * 2 - 1
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


def _read_varint(data, at):
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at


def _read_bytes(data, at):
    size, at = _read_varint(data, at)
    return (None, at) if size < 0 else (bytes(data[at : at + size]), at + size)
