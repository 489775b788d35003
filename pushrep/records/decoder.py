"""One record after the other out of a batch's decompressed bytes, in plain Python. The layout is drawn in encoder.py.

Whatever the bytes say, the answer is positions or CorruptRecordBatch: every field has to end where its record says.
For small batches; columns.py reads large ones faster, with the same answers.

`read_small_batch` reads few records without headers, of whatever sizes, each field straight into its column:

    payload   |len|a|time|off|klen|key|vlen|value|0|   numbers of a byte are read in place: a call for each of them
                                                       would take longer than all the rest
Whatever is not plainly so (headers, negative lengths, damage) it leaves to `scan`, refusals included: tests hold the
two against each other.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import NamedTuple

from pushrep.records.header import RECORD_BYTES_MIN, BatchHeader
from pushrep.records.model import CorruptRecordBatch, Header, TimestampType
from pushrep.records.record_rows import Column, RecordRows
from pushrep.records.varint import read_varint, read_varlong

_TIMESTAMP_LIMIT = 1 << 63


class Scan(NamedTuple):
    """Where everything lies in the payload; a length of -1 is null.

    records: (offset, time, key start, key length, value start, value length, header count, headers start) each
    headers: (row of the record, name start, name length, value start, value length) each, in order
    """

    records: list[tuple[int, ...]]
    headers: list[tuple[int, ...]]


def scan(header: BatchHeader, payload: bytes) -> Scan:
    """The `header.record_count` records in `payload`, offsets ascending; raises CorruptRecordBatch."""
    check_count(header, len(payload))
    # Looked up once: these are per-batch facts, and an enumeration's property costs as much as a field.
    append_time = header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND_TIME else None
    base_time, base_offset, last_delta = header.base_timestamp_ms, header.base_offset, header.last_offset_delta
    found = Scan([], [])
    position, previous = 0, -1
    try:
        for row in range(header.record_count):
            length, position = read_varint(payload, position)
            end = position + length
            if not position < end <= len(payload):
                raise CorruptRecordBatch(f"record {row} claims {length} of {len(payload) - position} bytes")
            time_delta, position = read_varlong(payload, position + 1)  # behind the attributes, unused by Kafka so far
            delta, position = read_varint(payload, position)
            if not previous < delta <= last_delta:
                raise CorruptRecordBatch(f"record {row} has offset delta {delta} after {previous}, up to {last_delta}")
            previous = delta
            key_length, key_start, position = _nullable(payload, position, end)
            value_length, value_start, position = _nullable(payload, position, end)
            headers_count, headers_start = read_varint(payload, position)
            position = headers_start
            if headers_count:
                position = _scan_headers(payload, position, end, headers_count, found)
            if position != end:
                raise CorruptRecordBatch(f"record {row} has fields up to byte {position} and ends at {end}")
            time = base_time + time_delta if append_time is None else append_time
            if not -_TIMESTAMP_LIMIT <= time < _TIMESTAMP_LIMIT:
                raise CorruptRecordBatch(f"timestamp {time} exceeds 64 bits")
            key_and_value = key_start, key_length, value_start, value_length
            found.records.append((base_offset + delta, time, *key_and_value, headers_count, headers_start))
    except IndexError:
        raise CorruptRecordBatch(f"record {len(found.records)} ends behind the batch") from None
    if position != len(payload):
        raise CorruptRecordBatch(f"{len(payload) - position} bytes follow the last record")
    return found


def scanned_rows(found: Scan, payload: bytes, timestamp_type: TimestampType) -> RecordRows:
    """The records of a scan."""
    if not found.records:
        return RecordRows((), (), repeat(timestamp_type), (), (), ())
    offsets, times, key_start, key_length, value_start, value_length, headers_count, _ = zip(
        *found.records, strict=True
    )
    return RecordRows(
        offsets,
        times,
        repeat(timestamp_type),
        _pieces(payload, key_start, key_length),
        _pieces(payload, value_start, value_length),
        _headers(found, payload, headers_count) if found.headers else repeat(()),
    )


def _pieces(payload: bytes, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes | None]:
    return [
        None if length < 0 else payload[start : start + length] for start, length in zip(starts, lengths, strict=True)
    ]


def _headers(found: Scan, payload: bytes, counts: Sequence[int]) -> list[tuple[Header, ...]]:
    flat: Iterator[Header] = (
        (
            decoded_name(payload[name_start : name_start + name_length]),
            None if value_length < 0 else payload[value_start : value_start + value_length],
        )
        for _, name_start, name_length, value_start, value_length in found.headers
    )
    return [tuple(islice(flat, count)) for count in counts]


def decoded_name(name: bytes) -> str:
    """A header's name. Kafka's own clients replace what is not UTF-8; refusing would make a topic unreadable."""
    return name.decode("utf-8", "replace")


def check_count(header: BatchHeader, payload_bytes: int) -> None:
    """Refuse a count that the decompressed bytes can't hold, before anything is sized by it."""
    if header.record_count * RECORD_BYTES_MIN > payload_bytes:
        raise CorruptRecordBatch(f"{header.record_count} records can't fit into {payload_bytes} bytes")


def _nullable(payload: bytes, position: int, end: int) -> tuple[int, int, int]:
    """(length, start, position behind it) of a key or value."""
    length, start = read_varint(payload, position)
    behind = start + length if length > 0 else start
    if length < -1 or behind > end:
        raise CorruptRecordBatch(f"field at byte {start} claims {length} of {end - start} bytes")
    return length, start, behind


def _scan_headers(payload: bytes, position: int, end: int, count: int, found: Scan) -> int:
    """Read the headers of the record behind those found, and give the position behind them."""
    row = len(found.records)
    if not 0 < 2 * count <= end - position:  # a header takes two bytes: no name, no value
        raise CorruptRecordBatch(f"record {row} claims {count} headers in {end - position} bytes")
    for _ in range(count):
        name_length, name_start, position = _nullable(payload, position, end)
        if name_length < 0:
            raise CorruptRecordBatch(f"record {row} has a header without a name")
        value_length, value_start, position = _nullable(payload, position, end)
        found.headers.append((row, name_start, name_length, value_start, value_length))
    return position


_TIME_LIMIT = 1 << 63
_SMALL = [(byte >> 1) ^ -(byte & 1) if byte < 0x80 else None for byte in range(0x100)]
"""What a varint of one byte says."""


class _Columns(NamedTuple):
    offsets: list[int]
    times: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]


def read_small_batch(header: BatchHeader, payload: bytes) -> RecordRows | None:
    """All records of a batch; None if they have headers, or something is wrong with them."""
    try:
        columns = None if payload[-1] else _columns(header, payload)  # no headers: a 0 at the end of each record
    except (IndexError, CorruptRecordBatch):
        return None
    if columns is None:
        return None
    offsets, times, keys, values = columns
    kind, time_column = header.timestamp_type, _times(header, times)
    if time_column is None:
        return None
    return RecordRows(offsets, time_column, repeat(kind), keys, values, repeat(()))


def _columns(header: BatchHeader, data: bytes) -> _Columns | None:  # noqa: C901 - see the file's map
    """Offsets, what the times are more than the base time, keys, values. Raises IndexError, CorruptRecordBatch."""
    columns = offsets, times, keys, values = _Columns([], [], [], [])
    base_offset, last_delta, small = header.base_offset, header.last_offset_delta, _SMALL
    fields = (keys.append, values.append)
    at, before = 0, -1
    for _ in range(header.record_count):
        number = small[data[at]]
        at += 1
        if number is None:
            number, at = read_varint(data, at - 1)
        end = at + number
        at += 1  # the attributes, unused by Kafka so far
        number = small[data[at]]
        at += 1
        if number is None:
            number, at = read_varlong(data, at - 1)
        times.append(number)
        number = small[data[at]]
        at += 1
        if number is None:
            number, at = read_varint(data, at - 1)
        if not before < number <= last_delta:
            return None
        before = number
        offsets.append(base_offset + number)
        for append in fields:
            number = small[data[at]]
            at += 1
            if number is None:
                number, at = read_varint(data, at - 1)
            if number == -1:
                append(None)
            elif number >= 0:
                append(data[at : at + number])
                at += number
            else:
                return None
        if data[at] or at + 1 != end:
            return None
        at = end
    return columns if at == len(data) else None


def _times(header: BatchHeader, deltas: list[int]) -> Column[int] | None:
    """None if one is beyond 64 bits."""
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        return repeat(header.max_timestamp_ms)
    base = header.base_timestamp_ms
    if not deltas:
        return deltas
    low, high = min(deltas), max(deltas)
    if not -_TIME_LIMIT <= base + low <= base + high < _TIME_LIMIT:
        return None
    return repeat(base + low) if low == high else [base + delta for delta in deltas]
