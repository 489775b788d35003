"""One batch as columns: where each record's fields lie in the decompressed bytes, with no Python object per record.

    payload        |len|a|ts|off|klen|key....|vlen|value..........|hc|headers...| |len|a|...
    positions                        ^key_start    ^value_start      ^headers_start

The only sequential work is the walk from record to record, since each length tells where the next one begins. It
goes by runs: where one length (its bytes) repeats at its own stride, numpy confirms a whole run at a time, which is
exact and no guess. The fields are then read one column at a time. Small batches are scanned by decoder.py instead:
same answers, refusals included.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.decoder import Scan, check_count, scan
from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.header import BatchHeader
from pushrep.records.header_columns import HeaderColumns, read_header_columns
from pushrep.records.model import TimestampType
from pushrep.records.varint import VARINT_BYTES_MAX, read_varint
from pushrep.records.varint_arrays import Bytes, Ints, read_varints, read_varlongs

Positions: TypeAlias = NDArray[np.int32]

_RUN_TRIED = 64  # records compared before a run is believed long: offset deltas grow to two bytes there
_RUN_WORTHWHILE = 16
_WALKED_AT_ONCE = 512  # plain steps before the next run is tried: its cost is that of some 30 steps
ARRAYS_WORTHWHILE = 64  # records; below, the hundred numpy calls cost more than a scan in plain Python
_PAYLOAD_BYTES_LIMIT = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class RecordColumns:
    """`n` records: positions count bytes of `payload`, a length of -1 is null (its start means nothing).

    `payload` is not copied from the batch where its records are not compressed: keep neither longer than needed.
    """

    payload: memoryview
    offsets: Ints
    timestamps_ms: Ints
    key_start: Positions
    key_length: Positions
    value_start: Positions
    value_length: Positions
    headers_count: Positions
    headers_start: Positions
    headers: HeaderColumns
    """Every header of every record, in order: record r's are those with `headers.record == r`."""

    def __len__(self) -> int:
        return len(self.offsets)


def decode_columns(header: BatchHeader, payload: memoryview) -> RecordColumns:
    """The columns of the `header.record_count` records in `payload`; raises CorruptRecordBatch."""
    if len(payload) > _PAYLOAD_BYTES_LIMIT:
        raise CorruptRecordBatch(f"{len(payload)} bytes of records exceed 2 GiB")
    if header.record_count < ARRAYS_WORTHWHILE:
        return columns_of_scan(scan(header, payload.tobytes()), payload)
    return columns_by_arrays(header, payload)


def columns_of_scan(found: Scan, payload: memoryview) -> RecordColumns:
    """Columns out of what was scanned one by one."""
    records = np.array(found.records, np.int64).reshape(-1, 8).T
    headers = np.array(found.headers, np.int32).reshape(-1, 5).T
    key_start, key_length, value_start, value_length, count, start = np.ascontiguousarray(records[2:], np.int32)
    return RecordColumns(
        payload,
        np.ascontiguousarray(records[0]),
        np.ascontiguousarray(records[1]),
        key_start,
        key_length,
        value_start,
        value_length,
        count,
        start,
        HeaderColumns(*np.ascontiguousarray(headers)),
    )


def columns_by_arrays(header: BatchHeader, payload: memoryview) -> RecordColumns:
    """Columns read column by column."""
    check_count(header, len(payload))
    data = np.frombuffer(payload, np.uint8)
    begins = _walk(data, payload, header.record_count)
    ends = np.append(begins, len(payload))[1:]
    _, at = read_varints(data, begins)
    time_deltas, at = read_varlongs(data, _inside(at + 1, ends))
    offset_deltas, at = read_varints(data, _inside(at, ends))
    key_start, key_length, at = _nullable(data, at, ends)
    value_start, value_length, at = _nullable(data, at, ends)
    headers_count, headers_start = read_varints(data, _inside(at, ends))
    headers = read_header_columns(data, payload, headers_count, headers_start, ends)
    return RecordColumns(
        payload,
        _offsets(header, offset_deltas),
        _timestamps(header, time_deltas),
        key_start.astype(np.int32),
        key_length.astype(np.int32),
        value_start.astype(np.int32),
        value_length.astype(np.int32),
        headers_count.astype(np.int32),
        headers_start.astype(np.int32),
        headers,
    )


def _walk(data: Bytes, payload: memoryview, count: int) -> Ints:
    """The position of each record's length field; raises unless `count` records end at the end of the payload."""
    begins: list[Ints] = [np.empty(0, np.int64)]
    plain = b""  # indexing bytes is twice as fast as indexing a memoryview; copied only if steps are needed
    position = done = 0
    try:
        while done < count:
            length, body = read_varint(payload[position : position + VARINT_BYTES_MAX].tobytes(), 0)
            stride = body + length
            if length <= 0 or position + stride > len(data):
                raise CorruptRecordBatch(f"record {done} claims {length} of {len(data) - position - body} bytes")
            run = _run(data[position:], stride, body, count - done)
            begins.append(np.arange(position, position + run * stride, stride))
            position += run * stride
            done += run
            if run < _RUN_WORTHWHILE and done < count:
                plain = plain or payload.tobytes()
                steps, position = _step(plain, position, min(_WALKED_AT_ONCE, count - done))
                begins.append(np.array(steps, np.int64))
                done += len(steps)
    except IndexError:
        raise CorruptRecordBatch(f"record {done} or a later one ends behind the batch") from None
    if position != len(data):
        raise CorruptRecordBatch(f"the last record ends at byte {position}, the batch at {len(data)}")
    return np.concatenate(begins)


def _run(rest: Bytes, stride: int, width: int, records_max: int) -> int:
    """How many records from here on have the first one's length, so that each begins a stride after the other."""
    records = min(records_max, len(rest) // stride)
    for tried in (min(records, _RUN_TRIED), records):
        lengths = rest[: tried * stride].reshape(tried, stride)
        differs = lengths[:, 0] != lengths[0, 0]
        for byte in range(1, width):  # a column at a time: reducing rows of two bytes takes ten times as long
            differs |= lengths[:, byte] != lengths[0, byte]
        first = int(differs.argmax())
        if first:  # 0 is the first record itself: none differs
            return first
    return records


def _step(plain: bytes, position: int, steps: int) -> tuple[list[int], int]:
    begins = []
    for _ in range(steps):
        begins.append(position)
        low = plain[position]
        if low < 0x80:
            position += 1 + (low >> 1)
        elif (high := plain[position + 1]) < 0x80:
            position += 2 + ((low & 0x7F | high << 7) >> 1)
        else:
            length, position = read_varint(plain, position)
            position += max(length, 0)
        if low & 1:  # zigzag's sign is the lowest bit
            raise CorruptRecordBatch(f"record before byte {position} has a negative length")
    return begins, position


def _inside(at: Ints, ends: Ints) -> Ints:
    """`at`, once every record still has a byte there."""
    if (at >= ends).any():
        raise CorruptRecordBatch(f"record {int((at >= ends).argmax())} ends inside a field")
    return at


def _nullable(data: Bytes, at: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    lengths, start = read_varints(data, _inside(at, ends))
    if lengths.size and int(lengths.min()) < -1:
        raise CorruptRecordBatch(f"record {int(lengths.argmin())} has a field of length {int(lengths.min())}")
    return start, lengths, start + np.maximum(lengths, 0)


def _offsets(header: BatchHeader, deltas: Ints) -> Ints:
    if deltas.size and (deltas[0] < 0 or deltas[-1] > header.last_offset_delta or (np.diff(deltas) <= 0).any()):
        raise CorruptRecordBatch(f"offset deltas do not ascend from 0 to {header.last_offset_delta}")
    return deltas + header.base_offset


def _timestamps(header: BatchHeader, deltas: Ints) -> Ints:
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        return np.full(len(deltas), header.max_timestamp_ms, np.int64)
    base = np.int64(header.base_timestamp_ms)
    times: Ints = deltas + base
    if (((times ^ base) & (times ^ deltas)) < 0).any():  # the sign of neither term: it wrapped around
        raise CorruptRecordBatch("a timestamp exceeds 64 bits")
    return times
