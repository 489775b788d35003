"""From columns of positions to those of Python objects, with as little Python per record as it can have: two slices."""

from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pushrep.records.columns import Positions, RecordColumns
from pushrep.records.decoder import decoded_name
from pushrep.records.model import Header, TimestampType
from pushrep.records.record_rows import Column, RecordRows
from pushrep.records.varint_arrays import Ints

_GATHERED_BYTES_MAX = 256  # pieces of one size: gathered and cut by numpy, as long as the extra copy is cheap


def rows(columns: RecordColumns, timestamp_type: TimestampType) -> RecordRows:
    """All records of a batch, as `decoder.scanned_rows` would give them."""
    data = columns.payload.tobytes()
    return RecordRows(
        _offsets(columns.offsets),
        _times(columns.timestamps_ms),
        repeat(timestamp_type),
        _pieces(data, columns.key_start, columns.key_length),
        _pieces(data, columns.value_start, columns.value_length),
        _headers(data, columns),
    )


def _offsets(offsets: Ints) -> Sequence[int]:
    """They ascend: as far from each other as there are of them, none is missing."""
    count = len(offsets)
    if count and int(offsets[-1]) - int(offsets[0]) == count - 1:
        return range(int(offsets[0]), int(offsets[-1]) + 1)
    numbers: list[int] = offsets.tolist()
    return numbers


def _times(times: Ints) -> Column[int]:
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
    known: dict[bytes | None, str] = {}  # a name comes back in every record: decode it once
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
