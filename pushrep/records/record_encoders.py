"""Records to their bytes: of any shape by concatenating, equal-sized ones by numpy. The layout is drawn in encoder.py.

Concatenating: the parts of all records in a list and one join, so that no byte of a value moves more than once. Lengths
and small deltas come ready-made from a table.

    parts   reserved | length, head, size, value, tail | length, head, size, value, tail | ...
    head    attributes, time delta, offset delta, key       tail    headers

Vectorised: a struct whose fields are written for all records in one go.

    | length | 0 | time delta | offset delta | key size, key | value size, value | 1, name, header size, header |
      same     same  per row      per row      same, per row    same, per row      same             per row

A row's length depends on the widths of its two deltas, so rows come in bands of equal widths: with one timestamp for
all, [0, 64), [64, 8192), [8192, 2^20) ... A property test holds the bytes of both against each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, repeat
from operator import add
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.model import Buffer, Header
from pushrep.records.varint import SMALL_VARINTS, VARINTS, Ints, varint, varint_matrix, widths, zigzag

NULL = varint(-1)
NO_HEADERS = varint(0)
ONE_HEADER = varint(1)
_KEYLESS = [b"\0\0" + offset_delta + NULL for offset_delta in SMALL_VARINTS]  # attributes, a time delta of 0 ...


def encode_concatenating(
    heads: list[bytes], values: Sequence[bytes | None], tails: Iterable[bytes], reserved: int
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records."""
    try:
        # A list is indexed faster than the dictionary that knows every number; it ends at records of 16 KiB, where a
        # second pass costs little beside the bytes.
        return _join(heads, values, tails, SMALL_VARINTS, reserved)
    except IndexError:
        return _join(heads, values, tails, VARINTS, reserved)


def keyless_heads(count: int) -> list[bytes]:
    """The heads of `count` records with null keys and a time delta of 0."""
    more = range(len(_KEYLESS), count)
    return _KEYLESS[:count] + [b"\0\0" + VARINTS[offset] + NULL for offset in more]


def equal_key_heads(keys: Sequence[bytes], key_bytes: int) -> list[bytes]:
    """The heads of records with keys of one size and a time delta of 0, in a quarter of the time of `general_heads`."""
    return list(map(add, _starts(len(keys), key_bytes), keys))


def encode_equal(
    keys: Sequence[bytes] | None, key_bytes: int, values: Sequence[bytes], value_bytes: int, reserved: int
) -> bytearray:
    """What `encode_concatenating` makes of keys of one size, or none, and values of one size, without headers, deltas.

    In half the time: all but the keys and values are from a table, and no step is taken for a single record.
    """
    count = len(values)
    starts = _equal_starts(1 << (count - 1).bit_length(), None if keys is None else key_bytes, value_bytes)[:count]
    if keys is None:
        parts = [b""] * (2 * count)
        parts[0::2], parts[1::2] = starts, values
    else:
        parts = [VARINTS[value_bytes]] * (4 * count)
        parts[0::4], parts[1::4], parts[3::4] = starts, keys, values
    parts[0] = bytes(reserved) + parts[0][len(NO_HEADERS) :]
    parts.append(NO_HEADERS)
    return bytearray().join(parts)


@lru_cache(maxsize=32)  # of 1,024 records at most, 70 KB: 2 MB in all
def _equal_starts(count: int, key_bytes: int | None, value_bytes: int) -> list[bytes]:
    """The tail of the record before, then what comes before each key, or before each value where there are no keys.

    Fewer records take the first ones.
    """
    size = VARINTS[value_bytes]
    key_size, behind = (NULL, size) if key_bytes is None else (VARINTS[key_bytes], b"")
    heads = [b"\0\0" + VARINTS[offset] + key_size for offset in range(count)]
    more = (key_bytes or 0) + len(size) + value_bytes + len(NO_HEADERS)
    return [NO_HEADERS + VARINTS[len(head) + more] + head + behind for head in heads]


@lru_cache(maxsize=64)
def _starts(count: int, key_bytes: int) -> list[bytes]:
    return [b"\0\0" + VARINTS[offset] + VARINTS[key_bytes] for offset in range(count)]


def general_heads(count: int, keys: Sequence[bytes | None] | None, time_deltas: list[int] | None) -> list[bytes]:
    """The heads of any `count` records. No keys: null. No deltas: all are 0."""
    times = repeat(b"\0\0", count) if time_deltas is None else [b"\0" + VARINTS[time] for time in time_deltas]
    if keys is None:
        return [time + VARINTS[offset] + NULL for offset, time in enumerate(times)]
    return [
        time + VARINTS[offset] + (NULL if key is None else VARINTS[len(key)] + key)
        for offset, (time, key) in enumerate(zip(times, keys, strict=True))
    ]


def header_tails(headers: Sequence[Iterable[Header]] | None) -> Iterable[bytes]:
    """The encoded headers of each record; without headers an endless supply of none."""
    if headers is None:
        return repeat(NO_HEADERS)
    names: dict[str, bytes] = {}  # a name comes back in every record: encode it once
    return [_header_tail(each, names) for each in headers]


def header_column_tails(name: str, values: Sequence[bytes | None]) -> list[bytes]:
    """The encoded headers of records that have this one each."""
    start = ONE_HEADER + header_name(name)
    return [start + nullable(value) for value in values]


def header_name(name: str) -> bytes:
    """Size and UTF-8 of a header's name."""
    utf8 = name.encode()
    return VARINTS[len(utf8)] + utf8


def nullable(data: bytes | None) -> bytes:
    """Size and bytes of a key or value."""
    return NULL if data is None else VARINTS[len(data)] + data


def _join(
    heads: list[bytes],
    values: Sequence[bytes | None],
    tails: Iterable[bytes],
    varints: Sequence[bytes] | Mapping[int, bytes],
    reserved: int,
) -> bytearray:
    parts = [bytes(reserved)]
    # not strict: `tails` may be endless
    for head, value, tail in zip(heads, values, tails, strict=False):
        if value is None:
            parts += (varints[len(head) + 1 + len(tail)], head, NULL, tail)
        else:
            count = len(value)
            size = varints[count]
            parts += (varints[len(head) + len(size) + count + len(tail)], head, size, value, tail)
    return bytearray().join(parts)


def _header_tail(headers: Iterable[Header], names: dict[str, bytes]) -> bytes:
    parts, number = [b""], 0
    for name, value in headers:
        encoded = names.get(name)
        if encoded is None:
            encoded = names[name] = header_name(name)
        if value is None:
            parts += (encoded, NULL)
        else:
            parts += (encoded, VARINTS[len(value)], value)
        number += 1
    parts[0] = VARINTS[number]
    return b"".join(parts)


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
