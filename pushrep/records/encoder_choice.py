"""Which encoder the records take: three that give the same bytes, each the fastest for its shape.

vectorised            all values of one size, keys and headers too: a field at a time by numpy (vectorised.py)
vectorised in parts   ragged values: what precedes and follows them by numpy where it is of one size, joined one by one
concatenating         anything, and few records: parts from tables (concatenating.py)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records import concatenating, vectorised
from pushrep.records.model import Buffer, Header
from pushrep.records.varint import VARINTS
from pushrep.records.varint_arrays import Ints
from pushrep.records.vectorised import Band, Field

# Measured (benchmarks/records_codec.py): with keys the template makes 10 M records/s at 100 B where joining makes 2.5;
# below 256 records its thirty numpy calls cost more, above 1 KiB the second move of every value does.
_RECORDS_MIN = 256
_VALUE_BYTES_MAX = 1024


class HeaderColumn(NamedTuple):
    """Every record has exactly one header of this name: the values as a sequence, or as n equal pieces in one bytes."""

    name: str
    values: Sequence[bytes | None] | Buffer


Keys: TypeAlias = Sequence[bytes | None] | Buffer
Headers: TypeAlias = Sequence[Iterable[Header]] | HeaderColumn
Timestamps: TypeAlias = int | Sequence[int] | NDArray[np.int64]


def encode_records(
    values: Sequence[bytes | None], keys: Keys | None, headers: Headers | None, time_deltas: Ints | None, reserved: int
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records. Columns fit in length; no deltas: all are 0."""
    count = len(values)
    key = tail = spans = None
    if count >= _RECORDS_MIN:
        key, tail, spans = _key_fields(keys, count), _tail_fields(headers, count), vectorised.bands(count, time_deltas)
    if key is not None and tail is not None and spans is not None and len(values[0] or b"") <= _VALUE_BYTES_MAX:
        value = _equal_pieces(values, count)
        if value is not None:
            fields = [*key, _size_varint(value), value, *tail]
            return vectorised.encode_vectorised(fields, spans, time_deltas, reserved)
    if 0 < count < _RECORDS_MIN and headers is None and time_deltas is None:
        equal = _equal(values, keys, count, reserved)
        if equal is not None:
            return equal
    return concatenating.encode_concatenating(
        _heads(keys, key, spans, count, time_deltas), values, _tails(headers, tail, count), reserved
    )


def _equal(values: Sequence[bytes | None], keys: Keys | None, count: int, reserved: int) -> bytearray | None:
    """Few records of one size, without headers; None for others."""
    value_bytes = common_length(values)
    if value_bytes is None:
        return None
    plain: Sequence[bytes] = values  # type: ignore[assignment] # no nulls
    if keys is None:
        return concatenating.encode_equal(None, 0, plain, value_bytes, reserved)
    if isinstance(keys, bytes | bytearray | memoryview):
        return concatenating.encode_equal(_cut(keys, count), len(keys) // count, plain, value_bytes, reserved)
    return None


def _heads(
    keys: Keys | None, key: list[Field] | None, spans: list[Band] | None, count: int, time_deltas: Ints | None
) -> list[bytes]:
    """What stands before each value: attributes, deltas, key."""
    if keys is None and time_deltas is None:
        return concatenating.keyless_heads(count)
    if key is not None and spans is not None:
        return vectorised.encode_heads(key, spans, time_deltas)
    if time_deltas is None and isinstance(keys, bytes | bytearray | memoryview) and 0 < count < _RECORDS_MIN:
        return concatenating.equal_key_heads(_cut(keys, count), len(keys) // count)
    deltas = None if time_deltas is None else time_deltas.tolist()
    return concatenating.heads(count, None if keys is None else _sequence(keys, count), deltas)


def _tails(headers: Headers | None, tail: list[Field] | None, count: int) -> Iterable[bytes]:
    """What stands behind each value: the headers."""
    if not isinstance(headers, HeaderColumn):
        return concatenating.header_tails(headers)
    if tail is not None:
        return vectorised.encode_rows(tail, count)
    return concatenating.header_column_tails(headers.name, _sequence(headers.values, count))


def _key_fields(keys: Keys | None, count: int) -> list[Field] | None:
    """The fields of keys that agree in their size; else None."""
    if keys is None:
        return [concatenating.NULL]
    key = _equal_pieces(keys, count)
    return None if key is None else [_size_varint(key), key]


def _tail_fields(headers: Headers | None, count: int) -> list[Field] | None:
    """The fields of headers that agree in number, name and size; else None."""
    if headers is None:
        return [concatenating.NO_HEADERS]
    value = _equal_pieces(headers.values, count) if isinstance(headers, HeaderColumn) else None
    if value is None or not isinstance(headers, HeaderColumn):
        return None
    return [concatenating.ONE_HEADER + concatenating.header_name(headers.name) + _size_varint(value), value]


def common_length(column: Sequence[bytes | None]) -> int | None:
    """The length that all have; None if they differ, or one is null. Half the time of a set of the lengths."""
    try:
        lengths = list(map(len, column))  # type: ignore[arg-type] # a null has no length: that is the question
    except TypeError:
        return None
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) else None


def _equal_pieces(column: Sequence[bytes | None] | Buffer, count: int) -> Field | None:
    if isinstance(column, bytes | bytearray | memoryview):
        return vectorised.pieces(column, count)
    if common_length(column) is None:
        return None
    return vectorised.pieces(b"".join(column), count)  # type: ignore[arg-type] # no nulls


def _size_varint(field: Field) -> bytes:
    return VARINTS[len(field) if isinstance(field, bytes) else field.itemsize]


def _sequence(column: Sequence[bytes | None] | Buffer, count: int) -> Sequence[bytes | None]:
    return _cut(column, count) if isinstance(column, bytes | bytearray | memoryview) else column


def _cut(column: Buffer, count: int) -> list[bytes]:
    piece = vectorised.pieces(column, count)
    return [piece] * count if isinstance(piece, bytes) else piece.tolist()
