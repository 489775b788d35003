"""Decodes the records of one batch from its decompressed bytes, in three ways. The layout is drawn in encoder.py.

`scan` reads any batch, one record after the other, in plain Python. For any bytes it returns positions or raises
CorruptRecordBatch: every field has to end where its record says. Two fast paths read the common shapes, and return None
for all others (headers, damage): those go to `scan`, or to columns.py if there are many records. Tests hold the results
of all of them equal.

`read_small_batch`: few records without headers, of any sizes, each field appended to its column. Numbers of one byte
are read inline, because a call for each would take longer than everything else.

    payload   |len|a|time|off|klen|key|vlen|value|0|

`read_uniform`: records of one layout and length. The first one's layout is compared with the others, many at once.

    payload   |len|a|time|off|klen|key|vlen|value|0||len|a|time|off|klen|key|vlen|value|0| ...
    a run      ═══════════════════     ════       ═   the same in every record but for offsets, which count up, and
              ◀────────── stride ─────────────────▶   times; keys and values are cut out, a stride from one to the next
                                          └─ boundary ──────────────┘   from a value to the next key, or value

The offset's width changes with the 64th and the 8,192nd record, so a batch is a few runs. A run takes a handful of
numpy operations where columns.py takes a hundred: that decides up to some thousand records.

All return `RecordRows`: columns of Python objects, from which a `Record` is made when it is taken. A reader that drops
each record before it takes the next holds one at a time, so that the garbage collector, which counts live new objects,
does not run.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, repeat
from operator import length_hint
from typing import NamedTuple, TypeAlias, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from pushrep.records.header import RECORD_BYTES_MIN, BatchHeader, CorruptRecordBatch, Header, Record, TimestampType
from pushrep.records.varint import (
    VARINT_BYTES_MAX,
    VARLONG_BYTES_MAX,
    Bytes,
    read_varint,
    read_varlong,
    read_varlongs,
    varint_matrix,
    zigzag,
)

T = TypeVar("T")
Column: TypeAlias = Union[Sequence[T], "repeat[T]"]
"""One for each record, or endlessly what all have."""


class RecordRows:
    """The fields of records as columns. `offsets` ascend, and have one entry per record."""

    __slots__ = ("_columns", "offsets")

    def __init__(  # noqa: PLR0913, PLR0917 - the fields of a record
        self,
        offsets: Sequence[int],
        timestamps_ms: Column[int],
        timestamp_type: Column[TimestampType],
        keys: Column[bytes | None],
        values: Column[bytes | None],
        headers: Column[tuple[Header, ...]],
    ) -> None:
        self.offsets = offsets
        self._columns = (timestamps_ms, timestamp_type, keys, values, headers)

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Record]:
        return self.beside(iter(self.offsets))

    def beside(self, offsets: Iterator[int]) -> Iterator[Record]:
        """All records, each as one is taken from `offsets`, a new iterator of the offsets here."""
        # As `Record._make`, without its Python frame: two thirds of its time.
        return map(tuple.__new__, repeat(Record), zip(offsets, *self._columns, strict=False))

    def between(self, start: int, end: int) -> "RecordRows":
        """Those with offsets in [start, end)."""
        first, behind = bisect_left(self.offsets, start), bisect_left(self.offsets, end)
        if behind - first == len(self.offsets):
            return self
        chosen = slice(first, behind)
        columns = [column if isinstance(column, repeat) else column[chosen] for column in self._columns]
        return RecordRows(self.offsets[chosen], *columns)  # type: ignore[arg-type]  # each of its own kind


class RecordCursor:
    """An iterator `records`, and `position`: the offset after the last record taken, `start` before the first.

    It costs nothing per record, because the iterator of offsets knows how many are left.
    """

    __slots__ = ("_left", "_offsets", "_start", "records")

    def __init__(self, start: int, rows: RecordRows | None = None) -> None:
        """Without rows there is nothing to take."""
        self._start = start
        self._offsets: Sequence[int] = rows.offsets if rows is not None else ()
        self._left = iter(self._offsets)
        self.records: Iterator[Record] = rows.beside(self._left) if rows is not None else iter(())

    @property
    def position(self) -> int:
        """An offset."""
        taken = len(self._offsets) - length_hint(self._left)
        return self._offsets[taken - 1] + 1 if taken else self._start


_TIMESTAMP_LIMIT = 1 << 63


class Scan(NamedTuple):
    """The positions of all fields in the payload; a length of -1 is null.

    records: (offset, time, key start, key length, value start, value length, header count) each
    headers: (row of the record, name start, name length, value start, value length) each, in order
    """

    records: list[tuple[int, ...]]
    headers: list[tuple[int, ...]]


def scan(header: BatchHeader, payload: bytes) -> Scan:
    """The `header.record_count` records in `payload`, offsets ascending; raises CorruptRecordBatch."""
    check_count(header, len(payload))
    # Looked up once a batch: an enumeration's property costs as much as decoding a field.
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
            time_delta, position = read_varlong(payload, position + 1)  # after the attributes, unused by Kafka so far
            delta, position = read_varint(payload, position)
            if not previous < delta <= last_delta:
                raise CorruptRecordBatch(f"record {row} has offset delta {delta} after {previous}, up to {last_delta}")
            previous = delta
            key_length, key_start, position = _nullable(payload, position, end)
            value_length, value_start, position = _nullable(payload, position, end)
            headers_count, position = read_varint(payload, position)
            if headers_count:
                position = _scan_headers(payload, position, end, headers_count, found)
            if position != end:
                raise CorruptRecordBatch(f"record {row} has fields up to byte {position} and ends at {end}")
            time = base_time + time_delta if append_time is None else append_time
            if not -_TIMESTAMP_LIMIT <= time < _TIMESTAMP_LIMIT:
                raise CorruptRecordBatch(f"timestamp {time} exceeds 64 bits")
            key_and_value = key_start, key_length, value_start, value_length
            found.records.append((base_offset + delta, time, *key_and_value, headers_count))
    except IndexError:
        raise CorruptRecordBatch(f"record {len(found.records)} ends behind the batch") from None
    if position != len(payload):
        raise CorruptRecordBatch(f"{len(payload) - position} bytes follow the last record")
    return found


def scanned_rows(found: Scan, payload: bytes, timestamp_type: TimestampType) -> RecordRows:
    """The records of a scan."""
    if not found.records:
        return RecordRows((), (), repeat(timestamp_type), (), (), ())
    offsets, times, key_start, key_length, value_start, value_length, headers_count = zip(*found.records, strict=True)
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
    """A header's name. Bytes that are not UTF-8 are replaced, as by Kafka's clients: an error would make a topic
    unreadable.
    """
    return name.decode("utf-8", "replace")


def check_count(header: BatchHeader, payload_bytes: int) -> None:
    """Refuse a record count that the decompressed bytes can't hold, before memory is allocated by it."""
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


_SMALL = [(byte >> 1) ^ -(byte & 1) if byte < 0x80 else None for byte in range(0x100)]
"""The value of a varint of one byte."""


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
    """Offsets, time deltas, keys, values. Raises IndexError, CorruptRecordBatch."""
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
    low, high = min(deltas), max(deltas)
    if not -_TIMESTAMP_LIMIT <= base + low <= base + high < _TIMESTAMP_LIMIT:
        return None
    return repeat(base + low) if low == high else [base + delta for delta in deltas]


Flags: TypeAlias = NDArray[np.bool_]

UNIFORM_WORTHWHILE = 16  # records; fewer are decoded one by one before a run was looked at
_RUNS_MAX = 8
_HEAD_BYTES_MAX = 1 + VARLONG_BYTES_MAX + 4 * VARINT_BYTES_MAX
_KEPT_RECORDS_MAX = 1 << 13  # what 32 runs should look like is kept: 64 KiB each at most, as a rule


class _Layout(NamedTuple):
    """Where the fields of a record lie in its `stride` bytes; a length of -1 is null.

    `head`: all before the key, or before the value if the key has no bytes.
    """

    head: bytes
    time_at: int
    offset_at: int
    key_length_at: int
    key_start: int
    key_length: int
    value_length_at: int
    value_start: int
    value_length: int
    stride: int


class _Run(NamedTuple):
    """`records` of one layout from byte `position` on, in steps of a stride."""

    layout: _Layout
    position: int
    records: int
    has_one_time: bool

    @property
    def end(self) -> int:
        """The byte behind them."""
        return self.position + self.records * self.layout.stride


def read_uniform(header: BatchHeader, payload: memoryview) -> RecordRows | None:
    """All records of a batch; None if they differ in layout or length, or something is wrong with them."""
    count = header.record_count
    if count < UNIFORM_WORTHWHILE or count != header.last_offset_delta + 1:
        return None
    runs: list[_Run] = []
    position = row = 0
    while row < count:
        run = _run_at(payload, position, row, count) if len(runs) < _RUNS_MAX else None
        if run is None:
            return None
        runs.append(run)
        row += run.records
        position = run.end
    times = _run_times(header, payload, runs)
    if position != len(payload) or times is None:
        return None
    return RecordRows(
        range(header.base_offset, header.next_offset),
        times,
        repeat(header.timestamp_type),
        _run_column(payload, runs, [(run.layout.key_start, run.layout.key_length) for run in runs]),
        _run_column(payload, runs, [(run.layout.value_start, run.layout.value_length) for run in runs]),
        repeat(()),
    )


def _run_at(payload: memoryview, position: int, row: int, count: int) -> _Run | None:
    """The run that begins at byte `position` with record `row`; None for one that is too short to be worth it."""
    try:
        layout = _layout(payload, position, row)
    except (IndexError, CorruptRecordBatch):
        return None
    if layout is None:
        return None
    offset_width = layout.key_length_at - layout.offset_at
    behind = min(count, 1 << (7 * offset_width - 1))  # from there on offsets are wider
    records = min(behind - row, (len(payload) - position) // layout.stride)
    if records < min(UNIFORM_WORTHWHILE, count - row) or not _is_followed(payload, position, layout, records):
        return None
    if _all_uniform(payload, position, records, layout, row):
        return _Run(layout, position, records, has_one_time=True)
    size = records * layout.stride
    matrix = np.frombuffer(payload, np.uint8, size, position).reshape(records, layout.stride)
    uniform, has_one_time = _is_uniform(matrix, layout, row)
    return _Run(layout, position, uniform, has_one_time) if uniform >= min(UNIFORM_WORTHWHILE, count - row) else None


def _layout(payload: memoryview, position: int, row: int) -> _Layout | None:
    """Of the record at `position`, which should be the batch's `row`th; None if it is not, or has headers."""
    start = payload[position : position + _HEAD_BYTES_MAX].tobytes()
    length, body = read_varint(start, 0)
    time_at = body + 1
    _, offset_at = read_varlong(start, time_at)
    offset_delta, key_length_at = read_varint(start, offset_at)
    key_length, key_start = read_varint(start, key_length_at)
    value_length_at = key_start + max(key_length, 0)
    at = position + value_length_at
    value_length, width = read_varint(payload[at : at + VARINT_BYTES_MAX].tobytes(), 0)
    value_start = value_length_at + width
    stride = value_start + max(value_length, 0) + 1  # the number of headers: 0
    is_plain = offset_delta == row and key_length >= -1 <= value_length and stride == body + length
    may_overflow = offset_at - time_at == VARLONG_BYTES_MAX  # a later record may have a time beyond 64 bits
    if not is_plain or may_overflow or payload[position + stride - 1]:
        return None
    head = start[: key_start if key_length > 0 else value_start]
    key, value = (key_start, key_length), (value_length_at, value_start, value_length)
    return _Layout(head, time_at, offset_at, key_length_at, *key, *value, stride)


def _is_followed(payload: memoryview, position: int, layout: _Layout, records: int) -> bool:
    """Whether the second record has the first one's length: asked before anything is done for all of them."""
    length = layout.head[: layout.time_at - 1]
    at = position + layout.stride
    return records == 1 or payload[at : at + len(length)] == length


def _all_uniform(payload: memoryview, position: int, records: int, layout: _Layout, row: int) -> bool:
    """Whether all of so many records look like the first, their times included."""
    stride = layout.stride
    boundaries = _strided(payload, position + stride - 1, 1 + len(layout.head), stride, records - 1).tobytes()
    if payload[position + records * stride - 1] or boundaries != _boundaries(layout, row + 1, records - 1):
        return False
    at, size = layout.value_length_at, layout.value_start - layout.value_length_at
    if at < len(layout.head):
        return True
    first = payload[position + at : position + at + size].tobytes()
    return _strided(payload, position + at, size, stride, records).tobytes() == first * records


def _is_uniform(matrix: Bytes, layout: _Layout, row: int) -> tuple[int, bool]:
    """How many of the rows, a record each, look like the first, and whether all have its time."""
    times = slice(layout.time_at, layout.offset_at)
    heads = matrix[:, : len(layout.head)]
    differs = heads != _heads(layout, row, len(matrix))
    has_one_time = not differs.any()
    if not has_one_time:
        # A time may differ, but not its width: of its bytes only the bit counts that says whether another one follows.
        differs[:, times] = (heads[:, times] ^ heads[0, times]) >> 7
    good = len(matrix) if has_one_time else _first(differs)
    behind_key = max(layout.value_length_at, len(layout.head))
    for part in (slice(behind_key, layout.value_start), slice(layout.stride - 1, None)):
        good = min(good, _first(matrix[:good, part] != matrix[0, part]))
    return good, has_one_time


def _first(differs: Flags) -> int:
    """The first row with anything that differs; the number of rows if there is none."""
    return int(differs.any(axis=1).argmax()) if differs.any() else len(differs)


def _heads(layout: _Layout, row: int, records: int) -> Bytes:
    """The expected heads of `records` records from `row` on: the layout's head, with offsets that count up."""
    made = np.empty((records, len(layout.head)), np.uint8)
    made[:] = np.frombuffer(layout.head, np.uint8)
    offset = slice(layout.offset_at, layout.key_length_at)
    made[:, offset] = varint_matrix(zigzag(np.arange(row, row + records)), offset.stop - offset.start)
    return made


def _boundaries(layout: _Layout, row: int, records: int) -> bytes:
    """The same heads, each behind the end of a record without headers."""
    return (_boundaries_kept if records <= _KEPT_RECORDS_MAX else _boundaries_made)(layout, row, records)


def _boundaries_made(layout: _Layout, row: int, records: int) -> bytes:
    made = np.zeros((records, 1 + len(layout.head)), np.uint8)
    made[:, 1:] = _heads(layout, row, records)
    return made.tobytes()


_boundaries_kept = lru_cache(maxsize=32)(_boundaries_made)


def _run_times(header: BatchHeader, payload: memoryview, runs: list[_Run]) -> Column[int] | None:
    """Of all records; None if one is beyond 64 bits."""
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        return repeat(header.max_timestamp_ms)
    firsts = {read_varlong(run.layout.head, run.layout.time_at)[0] for run in runs}
    if len(firsts) == 1 and all(run.has_one_time for run in runs):
        time = header.base_timestamp_ms + firsts.pop()
        return repeat(time) if -_TIMESTAMP_LIMIT <= time < _TIMESTAMP_LIMIT else None
    data = np.frombuffer(payload, np.uint8)
    at = [np.arange(run.position, run.end, run.layout.stride) + run.layout.time_at for run in runs]
    deltas, _ = read_varlongs(data, np.concatenate(at))
    low, high = int(deltas.min()) + header.base_timestamp_ms, int(deltas.max()) + header.base_timestamp_ms
    if not -_TIMESTAMP_LIMIT <= low <= high < _TIMESTAMP_LIMIT:
        return None
    times: list[int] = (deltas + header.base_timestamp_ms).tolist()
    return times


def _run_column(payload: memoryview, runs: list[_Run], fields: list[tuple[int, int]]) -> Column[bytes | None]:
    """The field of all records that has this start and length in each run."""
    if all(size < 0 for _, size in fields):
        return repeat(None)
    column: list[bytes | None] = []
    for run, (start, size) in zip(runs, fields, strict=True):
        column += _run_pieces(payload, run, start, size) if size > 0 else [None if size else b""] * run.records
    return column


def _run_pieces(payload: memoryview, run: _Run, start: int, size: int) -> list[bytes]:
    """`size` bytes from byte `start` of each record on: a third of what slices take, and the payload stays in place."""
    places = _strided(payload, run.position + start, size, run.layout.stride, run.records)
    pieces: list[bytes] = places.tolist()
    return pieces


def _strided(payload: memoryview, position: int, size: int, stride: int, count: int) -> NDArray[np.void]:
    """`count` times `size` bytes, each a stride behind the one before, none of them moved."""
    return np.ndarray((count,), np.dtype((np.void, size)), payload, position, (stride,))
