"""Values in, one record batch v2 out. The batch's header is drawn in header.py; a record is

    | length varint | attributes 1 = 0 | timestampDelta varlong | offsetDelta varint |
    | keyLength varint, key | valueLength varint, value | headerCount varint, headers |          length -1 is null
    header: | nameLength varint, name UTF-8 | valueLength varint, value |

Deltas count from the batch's base offset and from the timestamp of its first record.  Source: Kafka's protocol guide.
Two roads give the same bytes: joined.py for records of any shape, template.py for many of equal size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records import joined
from pushrep.records.batch import RecordBatch
from pushrep.records.checksum import crc32c
from pushrep.records.codecs import compress
from pushrep.records.errors import RecordTooLarge
from pushrep.records.header import CRC_COVERS_FROM, HEADER_BYTES, LENGTH_ENDS_AT, MAGIC, BatchHeader, write_crc
from pushrep.records.model import Buffer, Codec, Header
from pushrep.records.template import Field, bands, encode_template, pieces
from pushrep.records.varint import VARINTS
from pushrep.records.varint_arrays import Ints

_BATCH_BYTES_LIMIT = (1 << 31) - 1  # the length field is signed
_TIMESTAMP_LIMIT_MS = 1 << 62  # so that no delta leaves 64 bits; 146 million years
# Measured (benchmarks/records_codec.py): with keys the template makes 10 M records/s at 100 B where joining makes 2.5;
# below 256 records its thirty numpy calls cost more, above 1 KiB the second move of every value does.
_TEMPLATE_RECORDS_MIN = 256
_TEMPLATE_VALUE_BYTES_MAX = 1024


class HeaderColumn(NamedTuple):
    """Every record has exactly one header of this name: the values as a sequence, or as n equal pieces in one bytes."""

    name: str
    values: Sequence[bytes | None] | Buffer


Keys: TypeAlias = Sequence[bytes | None] | Buffer
Headers: TypeAlias = Sequence[Iterable[Header]] | HeaderColumn
Timestamps: TypeAlias = int | Sequence[int] | NDArray[np.int64]


def encode_batch(  # noqa: PLR0913 - a batch has this many fields
    values: Sequence[bytes | None],
    *,
    keys: Keys | None = None,
    headers: Headers | None = None,
    timestamps_ms: Timestamps,
    codec: Codec = Codec.NONE,
    base_offset: int = 0,
    leader_epoch: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> RecordBatch:
    """One batch of `len(values)` records with consecutive offsets from `base_offset` on; its data is a bytearray.

    `keys` is a sequence, or n keys of equal size in one bytes (as `pack_keys` makes them), or None for null keys.
    `headers` has an iterable of (name, value) per record, or is a `HeaderColumn`. `timestamps_ms` is one time for all
    or one per record, in any order. Raises ValueError for columns of different lengths or times out of range,
    RecordTooLarge if the batch would pass 2 GiB.
    """
    count = len(values)
    if count == 0:
        raise ValueError("a record batch has at least one record: values is empty")
    times = _times(timestamps_ms, count)
    _check_lengths(keys, headers, count)
    data = _encode(values, keys, headers, times.deltas)
    if codec is not Codec.NONE:
        payload = compress(codec, memoryview(data)[HEADER_BYTES:])
        data = bytearray().join((bytes(HEADER_BYTES), payload))
    if len(data) > _BATCH_BYTES_LIMIT:
        raise RecordTooLarge(len(data), _BATCH_BYTES_LIMIT, "a batch's length field")
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=len(data) - LENGTH_ENDS_AT,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=int(codec),
        last_offset_delta=count - 1,
        base_timestamp_ms=times.base,
        max_timestamp_ms=times.max,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=count,
    )
    data[:HEADER_BYTES] = header.pack()
    crc = crc32c(data, CRC_COVERS_FROM)
    write_crc(data, crc)
    return RecordBatch(data, header._replace(crc=crc))


class _Times(NamedTuple):
    base: int
    max: int
    deltas: Ints | None  # None: all are 0


def _times(timestamps_ms: Timestamps, count: int) -> _Times:
    if isinstance(timestamps_ms, int):
        lowest = highest = base = timestamps_ms
        deltas = None
    else:
        _same_length("timestamps_ms", len(timestamps_ms), count)
        times = np.asarray(timestamps_ms)
        if times.dtype.kind not in "iu" or times.ndim != 1:
            raise ValueError(f"timestamps_ms has to be integers of 64 bits, not {times.dtype}")
        lowest, highest, base = int(times.min()), int(times.max()), int(times[0])
        deltas = None if lowest == highest else times.astype(np.int64) - base
    if lowest < -_TIMESTAMP_LIMIT_MS or highest >= _TIMESTAMP_LIMIT_MS:
        raise ValueError(f"timestamps_ms from {lowest} to {highest} are outside +-2**62")
    return _Times(base, highest, deltas)


def _check_lengths(keys: Keys | None, headers: Headers | None, count: int) -> None:
    columns = [("keys", keys), ("headers", headers.values if isinstance(headers, HeaderColumn) else headers)]
    for name, column in columns:
        if isinstance(column, bytes | bytearray | memoryview):
            if len(column) % count:
                raise ValueError(f"{name}: {len(column)} bytes are not {count} pieces of equal size")
        elif column is not None:
            _same_length(name, len(column), count)


def _same_length(name: str, got: int, count: int) -> None:
    if got != count:
        raise ValueError(f"{name} has {got} entries for {count} values")


def _encode(
    values: Sequence[bytes | None], keys: Keys | None, headers: Headers | None, time_deltas: Ints | None
) -> bytearray:
    """Room for the header, then the records, by the faster road that can take them."""
    count = len(values)
    if count >= _TEMPLATE_RECORDS_MIN and len(values[0] or b"") <= _TEMPLATE_VALUE_BYTES_MAX:
        fields = _template_fields(values, keys, headers)
        spans = bands(count, time_deltas) if fields is not None else None
        if fields is not None and spans is not None:
            return encode_template(fields, spans, time_deltas, HEADER_BYTES)
    if isinstance(headers, HeaderColumn):
        tails: Iterable[bytes] = joined.header_column_tails(headers.name, _sequence(headers.values, count))
    else:
        tails = joined.header_tails(headers)
    deltas = None if time_deltas is None else time_deltas.tolist()
    return joined.encode_joined(values, None if keys is None else _sequence(keys, count), tails, deltas, HEADER_BYTES)


def _template_fields(values: Sequence[bytes | None], keys: Keys | None, headers: Headers | None) -> list[Field] | None:
    """What follows the deltas in every record, if all records agree in their sizes; else None."""
    count = len(values)
    value = _equal_pieces(values, count)
    key = joined.NULL if keys is None else _equal_pieces(keys, count)
    if value is None or key is None or not (headers is None or isinstance(headers, HeaderColumn)):
        return None
    fields: list[Field] = [joined.NULL] if keys is None else [_size_varint(key), key]
    fields += [_size_varint(value), value]
    if headers is None:
        return [*fields, joined.NO_HEADERS]
    header = _equal_pieces(headers.values, count)
    if header is None:
        return None
    return [*fields, joined.ONE_HEADER + joined.header_name(headers.name) + _size_varint(header), header]


def _equal_pieces(column: Sequence[bytes | None] | Buffer, count: int) -> Field | None:
    if isinstance(column, bytes | bytearray | memoryview):
        return pieces(column, count)
    try:
        sizes = set(map(len, column))  # type: ignore[arg-type] # a null has no length: that is the question
    except TypeError:
        return None
    return pieces(b"".join(column), count) if len(sizes) == 1 else None  # type: ignore[arg-type] # no nulls


def _size_varint(field: Field) -> bytes:
    return VARINTS[len(field) if isinstance(field, bytes) else field.itemsize]


def _sequence(column: Sequence[bytes | None] | Buffer, count: int) -> Sequence[bytes | None]:
    if not isinstance(column, bytes | bytearray | memoryview):
        return column
    whole = bytes(column)
    size = len(whole) // count
    return [whole[start : start + size] for start in range(0, len(whole), size)] if size else [b""] * count
