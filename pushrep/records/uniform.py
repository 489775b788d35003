"""Batches whose records look alike: what the first one looks like is held against the others, many at a time.

    payload   |len|a|time|off|klen|key|vlen|value|0||len|a|time|off|klen|key|vlen|value|0| ...
    a run      ═══════════════════     ════       ═   the same in every record but for offsets, which count up, and
              ◀────────── stride ─────────────────▶   times; keys and values are cut out, a stride from one to the next
                                          └─ seam ──────────────────┘   from a value to the next key, or value

The offset's width changes with the 64th and the 8,192nd record, so a batch is a few runs. A run takes a handful of
numpy operations where the columns of any records take a hundred: that decides up to some thousand records. Whatever is
not plainly so (headers, holes, ragged records, damage) is left to decoder.py and columns.py, refusals
included: tests hold them against each other.
"""

from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.header import BatchHeader
from pushrep.records.model import CorruptRecordBatch, TimestampType
from pushrep.records.record_rows import Column, RecordRows
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

Flags: TypeAlias = NDArray[np.bool_]

ALIKE_WORTHWHILE = 16  # records; fewer are decoded one by one before a run was looked at
_RUNS_MAX = 8
_HEAD_BYTES_MAX = 1 + VARLONG_BYTES_MAX + 4 * VARINT_BYTES_MAX
_KEPT_RECORDS_MAX = 1 << 13  # what 32 runs should look like is kept: 64 KiB each at most, as a rule
_TIME_LIMIT = 1 << 63


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
    """All records of a batch; None if they do not look alike, or something is wrong with them."""
    count = header.record_count
    if count < ALIKE_WORTHWHILE or count != header.last_offset_delta + 1:
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
    times = _times(header, payload, runs)
    if position != len(payload) or times is None:
        return None
    return RecordRows(
        range(header.base_offset, header.next_offset),
        times,
        repeat(header.timestamp_type),
        _column(payload, runs, [(run.layout.key_start, run.layout.key_length) for run in runs]),
        _column(payload, runs, [(run.layout.value_start, run.layout.value_length) for run in runs]),
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
    if records < min(ALIKE_WORTHWHILE, count - row) or not _is_followed(payload, position, layout, records):
        return None
    if _all_uniform(payload, position, records, layout, row):
        return _Run(layout, position, records, has_one_time=True)
    size = records * layout.stride
    matrix = np.frombuffer(payload, np.uint8, size, position).reshape(records, layout.stride)
    alike, has_one_time = _is_uniform(matrix, layout, row)
    return _Run(layout, position, alike, has_one_time) if alike >= min(ALIKE_WORTHWHILE, count - row) else None


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
    may_overflow = offset_at - time_at == VARLONG_BYTES_MAX  # what follows may have a time beyond 64 bits
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
    seams = _strided(payload, position + stride - 1, 1 + len(layout.head), stride, records - 1).tobytes()
    if payload[position + records * stride - 1] or seams != _seams(layout, row + 1, records - 1):
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
    """What the heads of so many records from `row` on should be: all are the layout's, but the offset counts up."""
    made = np.empty((records, len(layout.head)), np.uint8)
    made[:] = np.frombuffer(layout.head, np.uint8)
    offset = slice(layout.offset_at, layout.key_length_at)
    made[:, offset] = varint_matrix(zigzag(np.arange(row, row + records)), offset.stop - offset.start)
    return made


def _seams(layout: _Layout, row: int, records: int) -> bytes:
    """The same heads, each behind the end of a record without headers."""
    return (_seams_kept if records <= _KEPT_RECORDS_MAX else _seams_made)(layout, row, records)


def _seams_made(layout: _Layout, row: int, records: int) -> bytes:
    made = np.zeros((records, 1 + len(layout.head)), np.uint8)
    made[:, 1:] = _heads(layout, row, records)
    return made.tobytes()


_seams_kept = lru_cache(maxsize=32)(_seams_made)


def _times(header: BatchHeader, payload: memoryview, runs: list[_Run]) -> Column[int] | None:
    """Of all records; None if one is beyond 64 bits."""
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        return repeat(header.max_timestamp_ms)
    firsts = {read_varlong(run.layout.head, run.layout.time_at)[0] for run in runs}
    if len(firsts) == 1 and all(run.has_one_time for run in runs):
        time = header.base_timestamp_ms + firsts.pop()
        return repeat(time) if -_TIME_LIMIT <= time < _TIME_LIMIT else None
    data = np.frombuffer(payload, np.uint8)
    at = [np.arange(run.position, run.end, run.layout.stride) + run.layout.time_at for run in runs]
    deltas, _ = read_varlongs(data, np.concatenate(at))
    low, high = int(deltas.min()) + header.base_timestamp_ms, int(deltas.max()) + header.base_timestamp_ms
    if not -_TIME_LIMIT <= low <= high < _TIME_LIMIT:
        return None
    times: list[int] = (deltas + header.base_timestamp_ms).tolist()
    return times


def _column(payload: memoryview, runs: list[_Run], fields: list[tuple[int, int]]) -> Column[bytes | None]:
    """The field of all records that has this start and length in each run."""
    if all(size < 0 for _, size in fields):
        return repeat(None)
    column: list[bytes | None] = []
    for run, (start, size) in zip(runs, fields, strict=True):
        column += _pieces(payload, run, start, size) if size > 0 else [None if size else b""] * run.records
    return column


def _pieces(payload: memoryview, run: _Run, start: int, size: int) -> list[bytes]:
    """`size` bytes from byte `start` of each record on: a third of what slices take, and the payload stays in place."""
    places = _strided(payload, run.position + start, size, run.layout.stride, run.records)
    pieces: list[bytes] = places.tolist()
    return pieces


def _strided(payload: memoryview, position: int, size: int, stride: int, count: int) -> NDArray[np.void]:
    """`count` times `size` bytes, each a stride behind the one before, none of them moved."""
    return np.ndarray((count,), np.dtype((np.void, size)), payload, position, (stride,))
