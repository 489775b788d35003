"""One batch as columns: the positions of each record's fields in the decompressed bytes, without Python objects per
record.

    payload        |len|a|ts|off|klen|key....|vlen|value..........|hc|headers...| |len|a|...
    positions                        ^key_start    ^value_start

The only sequential work is the walk from record to record, because each length leads to the next record. It goes by
runs: where the bytes of one length repeat at its stride, numpy confirms a whole run at once, exactly. The fields are
then read one column at a time; headers in rounds, the k-th of every record that has one. Small batches are scanned by
decoder.py instead, with the same results and errors.

`rows_of_columns` makes Python objects of them, with two slices per record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pushrep.records.decoder import Column, RecordRows, Scan, check_count, decoded_name, scan
from pushrep.records.header import BatchHeader, CorruptRecordBatch, Header, TimestampType
from pushrep.records.varint import VARINT_BYTES_MAX, Bytes, Ints, read_varint, read_varints, read_varlongs

Positions: TypeAlias = NDArray[np.int32]

_RUN_TRIED = 64  # records compared before a run counts as long: offset deltas grow to two bytes there
_RUN_WORTHWHILE = 16
_WALKED_AT_ONCE = 512  # plain steps before the next run is tried, which costs as much as some 30 steps
ARRAYS_WORTHWHILE = 64  # records; for fewer, a hundred numpy calls cost more than a scan in plain Python
_PAYLOAD_BYTES_LIMIT = (1 << 31) - 1
_ROUNDS_MAX = 32  # with more headers in a record it is a scan: a round costs the same for one record as for a thousand
_GATHERED_BYTES_MAX = 256  # pieces of one size: gathered and cut by numpy, as long as the extra copy is cheap


@dataclass(frozen=True, slots=True, eq=False)
class HeaderColumns:
    """`m` headers, those of one record together and in order; a value length of -1 is null. Positions as the records'.

    `record` is the row of each header's record, ascending. Names are UTF-8 as they stand in the batch.
    """

    record: Positions
    name_start: Positions
    name_length: Positions
    value_start: Positions
    value_length: Positions

    def __len__(self) -> int:
        return len(self.record)


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
    """Columns from a scan."""
    records = np.array(found.records, np.int64).reshape(-1, 7).T
    headers = np.array(found.headers, np.int32).reshape(-1, 5).T
    key_start, key_length, value_start, value_length, count = np.ascontiguousarray(records[2:], np.int32)
    return RecordColumns(
        payload,
        np.ascontiguousarray(records[0]),
        np.ascontiguousarray(records[1]),
        key_start,
        key_length,
        value_start,
        value_length,
        count,
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
    if headers_count.max(initial=0) > _ROUNDS_MAX:
        return columns_of_scan(scan(header, payload.tobytes()), payload)
    headers = read_header_columns(data, headers_count, headers_start, ends)
    return RecordColumns(
        payload,
        _offsets(header, offset_deltas),
        _timestamps(header, time_deltas),
        key_start.astype(np.int32),
        key_length.astype(np.int32),
        value_start.astype(np.int32),
        value_length.astype(np.int32),
        headers_count.astype(np.int32),
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
        for byte in range(1, width):  # by column: reducing rows of two bytes takes ten times as long
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


def read_header_columns(data: Bytes, counts: Ints, starts: Ints, ends: Ints) -> HeaderColumns:
    """Read all headers, and check that each record ends after its last one; raises CorruptRecordBatch."""
    if (counts < 0).any() or (2 * counts > ends - starts).any():  # a header takes two bytes: no name, no value
        raise CorruptRecordBatch("a record claims more headers than it has bytes, or less than none")
    firsts = np.cumsum(counts) - counts
    total = int(counts.sum())
    fields = np.empty((4, total), np.int32)
    at = starts.copy()
    rows = np.flatnonzero(counts)
    for turn in range(int(counts.max(initial=0))):
        rows = rows[counts[rows] > turn]
        at[rows] = _read_round(data, at[rows], ends[rows], fields, firsts[rows] + turn)
    if (at != ends).any():
        raise CorruptRecordBatch(f"record {int((at != ends).argmax())} does not end behind its last field")
    return HeaderColumns(np.repeat(np.arange(len(counts), dtype=np.int32), counts), *fields)


def _read_round(data: Bytes, at: Ints, ends: Ints, fields: Positions, to: Ints) -> Ints:
    for start_field, length_min in ((0, 0), (2, -1)):  # a name is never null
        if (at >= ends).any():
            raise CorruptRecordBatch("a record ends inside its headers")
        lengths, at = read_varints(data, at)
        if (lengths < length_min).any() or (at + lengths > ends).any():
            raise CorruptRecordBatch("a header's name or value is longer than its record")
        fields[start_field, to] = at
        fields[start_field + 1, to] = lengths
        at = at + np.maximum(lengths, 0)
    return at


def rows_of_columns(columns: RecordColumns, timestamp_type: TimestampType) -> RecordRows:
    """All records of a batch, as `decoder.scanned_rows` would give them."""
    data = columns.payload.tobytes()
    return RecordRows(
        _offset_column(columns.offsets),
        _time_column(columns.timestamps_ms),
        repeat(timestamp_type),
        _pieces(data, columns.key_start, columns.key_length),
        _pieces(data, columns.value_start, columns.value_length),
        _headers(data, columns),
    )


def _offset_column(offsets: Ints) -> Sequence[int]:
    """Offsets ascend, so if they span exactly their count none is missing."""
    count = len(offsets)
    if count and int(offsets[-1]) - int(offsets[0]) == count - 1:
        return range(int(offsets[0]), int(offsets[-1]) + 1)
    numbers: list[int] = offsets.tolist()
    return numbers


def _time_column(times: Ints) -> Column[int]:
    if len(times) and (times == times[0]).all():
        return repeat(int(times[0]))
    numbers: list[int] = times.tolist()
    return numbers


def _pieces(data: bytes, starts: Positions, lengths: Positions) -> Column[bytes | None]:
    nulls = np.flatnonzero(lengths < 0)
    if len(nulls) == len(lengths):
        return repeat(None)
    pieces: list[bytes | None]
    size = int(lengths[0])
    if 0 < size <= _GATHERED_BYTES_MAX and (lengths == size).all():
        windows = sliding_window_view(np.frombuffer(data, np.uint8), size)
        cut: list[Any] = windows[starts].view(np.dtype((np.void, size))).reshape(-1).tolist()
        return cut
    pieces = [data[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    for row in nulls.tolist():
        pieces[row] = None
    return pieces


def _headers(data: bytes, columns: RecordColumns) -> Column[tuple[Header, ...]]:
    flat = columns.headers
    if not len(flat):
        return repeat(())
    known: dict[bytes | None, str] = {}  # a name repeats in every record: decode it once
    headers: list[Header] = []
    names = _pieces(data, flat.name_start, flat.name_length)
    values = _pieces(data, flat.value_start, flat.value_length)
    for name, value in zip(names, values, strict=False):  # values that are all null have no end
        text = known.get(name)
        if text is None:
            text = known[name] = decoded_name(name or b"")
        headers.append((text, value))
    edges = np.append(0, np.cumsum(columns.headers_count)).tolist()
    return [tuple(headers[start:end]) for start, end in pairwise(edges)]
