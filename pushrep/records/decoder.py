"""One record after the other out of a batch's decompressed bytes, in plain Python. The layout is drawn in encoder.py.

Whatever the bytes say, the answer is records or CorruptRecordBatch: every field has to end where its record says.
"""

from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.header import RECORD_BYTES_MIN, BatchHeader
from pushrep.records.model import Header, Record, TimestampType
from pushrep.records.varint import read_varint, read_varlong

_TIMESTAMP_LIMIT = 1 << 63


def decode_records(header: BatchHeader, payload: bytes) -> list[Record]:
    """The `header.record_count` records in `payload`, offsets ascending; raises CorruptRecordBatch."""
    check_count(header, len(payload))
    records: list[Record] = []
    position, previous = 0, -1
    try:
        for _ in range(header.record_count):
            record, position = _decode(header, payload, position)
            delta = record.offset - header.base_offset
            if not previous < delta <= header.last_offset_delta:
                raise CorruptRecordBatch(f"record {len(records)} has offset delta {delta} after {previous}")
            previous = delta
            records.append(record)
    except IndexError:
        raise CorruptRecordBatch(f"record {len(records)} ends behind the batch") from None
    if position != len(payload):
        raise CorruptRecordBatch(f"{len(payload) - position} bytes follow the last record")
    return records


def check_count(header: BatchHeader, payload_bytes: int) -> None:
    """Refuse a count that the decompressed bytes can't hold, before anything is sized by it."""
    if header.record_count * RECORD_BYTES_MIN > payload_bytes:
        raise CorruptRecordBatch(f"{header.record_count} records can't fit into {payload_bytes} bytes")


def _decode(header: BatchHeader, payload: bytes, position: int) -> tuple[Record, int]:
    length, position = read_varint(payload, position)
    end = position + length
    if not position < end <= len(payload):
        raise CorruptRecordBatch(f"record at byte {position} claims {length} of {len(payload) - position} bytes")
    time_delta, position = read_varlong(payload, position + 1)  # a byte of attributes, unused by Kafka so far
    offset_delta, position = read_varint(payload, position)
    key, position = _read_nullable(payload, position, end)
    value, position = _read_nullable(payload, position, end)
    headers: tuple[Header, ...] = ()
    count, position = read_varint(payload, position)
    if count:
        headers, position = _read_headers(payload, position, end, count)
    if position != end:
        raise CorruptRecordBatch(f"record fields end at byte {position}, the record at {end}")
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        time = header.max_timestamp_ms
    else:
        time = header.base_timestamp_ms + time_delta
        if not -_TIMESTAMP_LIMIT <= time < _TIMESTAMP_LIMIT:
            raise CorruptRecordBatch(f"timestamp {time} exceeds 64 bits")
    offset = header.base_offset + offset_delta
    return Record(offset, time, header.timestamp_type, key, value, headers), end


def _read_nullable(payload: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    length, position = read_varint(payload, position)
    if length == -1:
        return None, position
    if not 0 <= length <= end - position:
        raise CorruptRecordBatch(f"field at byte {position} claims {length} of {end - position} bytes")
    return payload[position : position + length], position + length


def _read_headers(payload: bytes, position: int, end: int, count: int) -> tuple[tuple[Header, ...], int]:
    if not 0 < 2 * count <= end - position:
        raise CorruptRecordBatch(f"{count} headers in {end - position} bytes")
    headers: list[Header] = []
    for _ in range(count):
        name, position = _read_nullable(payload, position, end)
        if name is None:
            raise CorruptRecordBatch(f"header without a name before byte {position}")
        value, position = _read_nullable(payload, position, end)
        # Kafka's own clients replace what is not UTF-8; refusing would make a foreign topic unreadable.
        headers.append((name.decode("utf-8", "replace"), value))
    return tuple(headers), position
