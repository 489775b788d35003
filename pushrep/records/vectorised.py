"""Equal-sized records, or parts of records, by numpy: a struct whose fields are written for all records in one go.

    | length | 0 | time delta | offset delta | key size, key | value size, value | 1, name, header size, header |
      same     same  per row      per row      same, per row    same, per row      same             per row

A row's length depends on the widths of its two deltas, so rows come in bands of equal widths: with one timestamp for
all, [0, 64), [64, 8192), [8192, 2^20) ... The bytes are those of concatenating.py, by property test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.model import Buffer
from pushrep.records.varint import varint
from pushrep.records.varint_arrays import Ints, varint_matrix, widths, zigzag

Pieces: TypeAlias = NDArray[np.void]
"""`n` byte strings of one size: numpy moves an element of `size` opaque bytes in one go."""
Field: TypeAlias = bytes | Pieces
"""The same bytes in every record, or a piece for each."""

_BAND_RECORDS_MIN = 32  # with shorter bands the general encoder is faster


def pieces(data: Buffer, count: int) -> Field:
    """`data` cut into `count` pieces of equal size; pieces of no bytes are the constant b"". The sum has to fit."""
    size = len(data) // count
    return np.frombuffer(data, f"V{size}") if size else b""


@dataclass(frozen=True, slots=True)
class Band:
    """Records [start, end), whose time deltas and offset deltas have these widths in bytes."""

    start: int
    end: int
    time_width: int
    offset_width: int


def bands(count: int, time_deltas: Ints | None) -> list[Band] | None:
    """The bands of `count` records, in order; None if they are too short to be worth it. No deltas: all are 0."""
    offset_widths = widths(zigzag(np.arange(count)))
    time_widths = np.ones(count, np.int64) if time_deltas is None else widths(zigzag(time_deltas))
    changes = np.flatnonzero(np.diff(offset_widths * 16 + time_widths)) + 1
    if (len(changes) + 1) * _BAND_RECORDS_MIN > count:
        return None
    edges = [0, *changes.tolist(), count]
    return [Band(start, end, int(time_widths[start]), int(offset_widths[start])) for start, end in pairwise(edges)]


def encode_vectorised(fields: Sequence[Field], spans: list[Band], time_deltas: Ints | None, reserved: int) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records. `fields` are those behind the two deltas."""
    common = sum(_size(field) for field in fields)
    layouts = []
    for band in spans:
        length = 1 + band.time_width + band.offset_width + common
        prefix = varint(length) + b"\0"
        layouts.append((band, prefix, len(prefix) - 1 + length))
    out = bytearray(reserved + sum(stride * (band.end - band.start) for band, _, stride in layouts))
    position = reserved
    for band, prefix, stride in layouts:
        _write(out, position, stride, [prefix, *_band_fields(band, time_deltas, fields)], band.end - band.start)
        position += stride * (band.end - band.start)
    return out


def encode_heads(fields: Sequence[Field], spans: list[Band], time_deltas: Ints | None) -> list[bytes]:
    """The records up to their values, without the lengths, one bytes each. `fields` are the key's."""
    heads: list[bytes] = []
    for band in spans:
        heads += encode_rows([b"\0", *_band_fields(band, time_deltas, fields)], band.end - band.start)
    return heads


def encode_rows(fields: Sequence[Field], count: int) -> list[bytes]:
    """The fields side by side, one bytes a row."""
    stride = sum(_size(field) for field in fields)
    out = bytearray(stride * count)
    _write(out, 0, stride, fields, count)
    rows: list[bytes] = np.frombuffer(out, np.dtype((np.void, stride))).tolist()  # ten times as fast as slicing
    return rows


def _band_fields(band: Band, time_deltas: Ints | None, fields: Sequence[Field]) -> list[Field]:
    rows = slice(band.start, band.end)
    times = b"\0" if time_deltas is None else _varint_pieces(time_deltas[rows], band.time_width)
    offsets = _varint_pieces(np.arange(band.start, band.end), band.offset_width)
    return [times, offsets, *(field if isinstance(field, bytes) else field[rows] for field in fields)]


def _write(out: bytearray, position: int, stride: int, fields: Sequence[Field], count: int) -> None:
    """Write each field into its place of `count` records; numpy checks that every place lies inside `out`."""
    for field in fields:
        if size := _size(field):
            dtype = np.dtype((np.void, size))
            column: Pieces = np.ndarray((count,), dtype, out, position, (stride,))
            column[:] = np.frombuffer(field, dtype) if isinstance(field, bytes) else field
        position += size


def _size(field: Field) -> int:
    return len(field) if isinstance(field, bytes) else field.itemsize


def _varint_pieces(values: Ints, width: int) -> Pieces:
    return varint_matrix(zigzag(values), width).view(np.dtype((np.void, width))).reshape(-1)
