"""Few records without headers, of whatever sizes: one after the other, each field straight into its column.

    payload   |len|a|time|off|klen|key|vlen|value|0|   numbers of a byte are read in place: a call for each of them
                                                       would take longer than all the rest
Whatever is not plainly so (headers, negative lengths, damage) is left to decoder.py, refusals included: tests hold the
two against each other.
"""

from itertools import repeat
from typing import NamedTuple

from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.header import BatchHeader
from pushrep.records.model import TimestampType
from pushrep.records.record_rows import Column, RecordRows
from pushrep.records.varint import read_varint, read_varlong

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
