"""Values in, one record batch v2 out. The batch's header is drawn in header.py; a record is

    | length varint | attributes 1 = 0 | timestampDelta varlong | offsetDelta varint |
    | keyLength varint, key | valueLength varint, value | headerCount varint, headers |          length -1 is null
    header: | nameLength varint, name UTF-8 | valueLength varint, value |

Deltas count from the batch's base offset and from the timestamp of its first record.  Source: Kafka's protocol guide.

Concatenating takes anything: the parts of all records in a list and one join, so that no byte of a value is copied
twice. Lengths and small deltas come from a table, and so do whole heads where the keys are of one size.

    parts   reserved | length, head, size, value, tail | length, head, size, value, tail | ...
    head    attributes, time delta, offset delta, key       tail    headers

Two fast paths give the same bytes (a property test holds them equal) where values are of one size, and keys, too:

`encode_equal`        up to 1,024 records without headers and with one time: everything but keys and values from a
                      table. Twice as fast at 236 records of 1 KiB (docs/internals/benchmark-notes.md).
`encode_vectorised`   from 256 records on, headers of one size, too: numpy writes a field of all records in one go. Four
                      times as fast at 1,680 records of 100 B with keys.

    | length | 0 | time delta | offset delta | key size, key | value size, value | 1, name, header size, header |
      same     same  per row      per row      same, per row    same, per row      same             per row

    A row's length depends on the widths of its two deltas, so rows come in bands of equal widths: with one timestamp
    for all, [0, 64), [64, 8192), [8192, 2^20) ...
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, repeat
from operator import add
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.errors import BadArgument
from pushrep.records.batch import RecordBatch, compress
from pushrep.records.header import (
    CRC_COVERS_FROM,
    HEADER_BYTES,
    LENGTH_ENDS_AT,
    MAGIC,
    BatchHeader,
    Buffer,
    Codec,
    Header,
    RecordTooLarge,
    crc32c,
    crc32c_of,
    pack_covered,
    write_crc,
)
from pushrep.records.varint import SMALL_VARINTS, VARINTS, Ints, varint, varint_matrix, widths, zigzag

NULL = varint(-1)
NO_HEADERS = varint(0)
_LISTS = {tuple, list}
_TIMES = [b"\0" + time_delta for time_delta in SMALL_VARINTS[:1024]]  # ms: batches of records that lingered
_KEPT_RECORDS_MAX = 1 << 12


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


def equal_key_heads(
    keys: Sequence[bytes] | None, key_bytes: int | None, count: int, time_deltas: list[int] | None
) -> list[bytes]:
    """`general_heads` of keys of one size, or of none (None), in a quarter to a half of its time."""
    make, size = _starts_kept if count <= _KEPT_RECORDS_MAX else _starts, 1 << (count - 1).bit_length()
    if time_deltas is None:
        starts = make(size, key_bytes, b"\0\0")
        return starts[:count] if keys is None else list(map(add, starts, keys))
    heads = map(add, _times_of(time_deltas), make(size, key_bytes, b""))
    return list(heads if keys is None else map(add, heads, keys))


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


def _times_of(time_deltas: list[int]) -> Iterable[bytes]:
    """Attributes and time delta of each record."""
    if 0 <= min(time_deltas) <= max(time_deltas) < len(_TIMES):
        return map(_TIMES.__getitem__, time_deltas)
    return map(add, repeat(b"\0"), map(VARINTS.__getitem__, time_deltas))


def _starts(count: int, key_bytes: int | None, before: bytes) -> list[bytes]:
    """`before`, then what stands between time delta and key of each record; fewer records take the first ones."""
    size = NULL if key_bytes is None else VARINTS[key_bytes]
    return [before + VARINTS[offset] + size for offset in range(count)]


_starts_kept = lru_cache(maxsize=32)(_starts)  # of 4,096 records at most, 160 KB: 5 MB in all


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


def header_column_tails(columns: Sequence[tuple[str, Sequence[bytes | None]]], count: int) -> list[bytes]:
    """The encoded headers of records that have one of each of these columns, in a third of `header_tails`' time."""
    tails: Iterable[bytes] = repeat(varint(len(columns)), count)
    for name, values in columns:
        start = header_name(name)
        if (size := common_length(values)) is not None:
            tails = map(add, map(add, tails, repeat(start + VARINTS[size])), values)
        else:
            tails = map(add, tails, [start + nullable(value) for value in values])
    return list(tails)


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


class Band(NamedTuple):
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


_BATCH_BYTES_LIMIT = (1 << 31) - 1  # the length field is signed
_PLAIN_HEAD = b"\0\0\0" + NULL  # attributes, both deltas, a null key
_TIMESTAMP_LIMIT_MS = 1 << 62  # so that no delta leaves 64 bits; 146 million years
# Measured (benchmarks/records_codec.py): `encode_vectorised` makes 10 M records/s of 100 B with keys, the other 2.5.
# Below 256 records its thirty numpy calls cost more, above 1 KiB the second copy of every value does.
_RECORDS_MIN = 256
# Values of one size without headers are joined between parts from a table: 256 of 100 B take a quarter of numpy's
# time, 1,000 a third. The table of a size is made once; a caller that never sends that size again has paid for nothing.
_EQUAL_RECORDS_MAX = 1024
_VALUE_BYTES_MAX = 1024


class HeaderColumn(NamedTuple):
    """Every record has exactly one header of this name: the values as a sequence, or as n equal pieces in one bytes."""

    name: str
    values: Sequence[bytes | None] | Buffer


Keys: TypeAlias = Sequence[bytes | None] | Buffer
Headers: TypeAlias = Sequence[Iterable[Header]] | HeaderColumn
HeaderFields: TypeAlias = Headers | Sequence[HeaderColumn] | None
Timestamps: TypeAlias = int | Sequence[int] | NDArray[np.int64]


def encode_batch(  # noqa: PLR0913 - a batch has this many fields
    values: Sequence[bytes | None],
    *,
    keys: Keys | None = None,
    headers: HeaderFields = None,
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
    `headers` has an iterable of (name, value) per record, or is a `HeaderColumn`, or several, in their order.
    `timestamps_ms` is one time for all or one per record, in any order. Raises BadArgument for columns of different
    lengths or times out of range, RecordTooLarge if the batch would pass 2 GiB.
    """
    count = len(values)
    if count == 0:
        raise BadArgument("values", "is empty; a record batch has at least one record")
    times = _times(timestamps_ms, count)
    _check_lengths(keys, headers, count)
    data = encode_records(values, keys, headers, times.deltas, HEADER_BYTES)
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
    return RecordBatch(data, header._replace(crc=crc), is_own=True)


def encode_alone(value: bytes, timestamp_ms: int) -> RecordBatch:
    """What `encode_batch` makes of one value without key, headers and codec, in a third of its time.

    A caller that waits for its own record to be on disk waits for this, too. Raises BadArgument for a time out of
    range.
    """
    if not -_TIMESTAMP_LIMIT_MS <= timestamp_ms < _TIMESTAMP_LIMIT_MS:
        raise BadArgument("timestamps_ms", f"{timestamp_ms} is outside +-2**62")
    count = len(value)
    size = VARINTS[count]
    length = VARINTS[len(_PLAIN_HEAD) + len(size) + count + 1]
    fields = pack_covered(0, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1)
    covered = b"".join((fields, length, _PLAIN_HEAD, size, value, NO_HEADERS))
    crc = crc32c_of(covered)
    batch_length = len(covered) + CRC_COVERS_FROM - LENGTH_ENDS_AT
    header = BatchHeader._make((0, batch_length, 0, MAGIC, crc, 0, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1))
    return RecordBatch(bytearray(header.pack()[:CRC_COVERS_FROM] + covered), header, is_own=True)


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
            raise BadArgument("timestamps_ms", f"give integers of 64 bits, not {times.dtype}")
        lowest, highest, base = int(times.min()), int(times.max()), int(times[0])
        deltas = None if lowest == highest else times.astype(np.int64) - base
    if lowest < -_TIMESTAMP_LIMIT_MS or highest >= _TIMESTAMP_LIMIT_MS:
        raise BadArgument("timestamps_ms", f"{lowest} to {highest} are outside +-2**62")
    return _Times(base, highest, deltas)


def _check_lengths(keys: Keys | None, headers: HeaderFields, count: int) -> None:
    columns: list[tuple[str, Any]] = [("keys", keys)]
    given = given_columns(headers)
    columns += [("headers", headers)] if given is None else [("headers", one.values) for one in given]
    for name, column in columns:
        if isinstance(column, bytes | bytearray | memoryview):
            if len(column) % count:
                raise BadArgument(name, f"{len(column)} bytes are not {count} pieces of equal size")
        elif column is not None:
            _same_length(name, len(column), count)


def _same_length(name: str, got: int, count: int) -> None:
    if got != count:
        raise BadArgument(name, f"has {got} entries for {count} values")


def encode_records(
    values: Sequence[bytes | None], keys: Keys | None, headers: HeaderFields, time_deltas: Ints | None, reserved: int
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records. Columns fit in length; no deltas: all are 0."""
    count = len(values)
    made = None
    if 0 < count <= _EQUAL_RECORDS_MAX and headers is None and time_deltas is None:
        made = _equal(values, keys, count, reserved)
    if made is None and count >= _RECORDS_MIN and len(values[0] or b"") <= _VALUE_BYTES_MAX:
        made = _vectorised(values, keys, headers, time_deltas, reserved)
    if made is None:
        made = encode_concatenating(_heads(keys, count, time_deltas), values, _tails(headers, count), reserved)
    return made


def _vectorised(
    values: Sequence[bytes | None], keys: Keys | None, headers: HeaderFields, time_deltas: Ints | None, reserved: int
) -> bytearray | None:
    """Records whose values, keys and headers are each of one size; None for others."""
    count = len(values)
    if common_length(values) is None:
        return None
    key, tail, spans = _key_fields(keys, count), _tail_fields(headers, count), bands(count, time_deltas)
    if key is None or tail is None or spans is None:
        return None
    value = pieces(b"".join(values), count)  # type: ignore[arg-type] # no nulls
    return encode_vectorised([*key, _size_varint(value), value, *tail], spans, time_deltas, reserved)


def _equal(values: Sequence[bytes | None], keys: Keys | None, count: int, reserved: int) -> bytearray | None:
    """Records of one size, without headers; None for others."""
    if not (keys is None or isinstance(keys, bytes | bytearray | memoryview)):
        return None
    value_bytes = common_length(values)
    if value_bytes is None:
        return None
    plain: Sequence[bytes] = values  # type: ignore[assignment] # no nulls
    if keys is None:
        return encode_equal(None, 0, plain, value_bytes, reserved)
    return encode_equal(_cut(keys, count), len(keys) // count, plain, value_bytes, reserved)


def _heads(keys: Keys | None, count: int, time_deltas: Ints | None) -> list[bytes]:
    """What stands before each value: attributes, deltas, key."""
    deltas = None if time_deltas is None else time_deltas.tolist()
    column = None if keys is None else _sequence(keys, count)
    key_bytes = None if column is None else common_length(column)
    if count and (column is None or key_bytes is not None):
        return equal_key_heads(column, key_bytes, count, deltas)  # type: ignore[arg-type] # no nulls
    return general_heads(count, column, deltas)


def _tails(headers: HeaderFields, count: int) -> Iterable[bytes]:
    """What stands behind each value: the headers."""
    if (columns := given_columns(headers)) is None:
        return header_tails(headers)  # type: ignore[arg-type] # no columns
    return header_column_tails([(one.name, _sequence(one.values, count)) for one in columns], count)


def given_columns(headers: HeaderFields) -> Sequence[HeaderColumn] | None:
    """The columns, if `headers` are columns."""
    if isinstance(headers, HeaderColumn):
        return [headers]
    return headers if headers and isinstance(headers[0], HeaderColumn) else None  # type: ignore[return-value] # so all are


def _key_fields(keys: Keys | None, count: int) -> list[Field] | None:
    """The fields of keys that agree in their size; else None."""
    if keys is None:
        return [NULL]
    key = _equal_pieces(keys, count)
    return None if key is None else [_size_varint(key), key]


def _tail_fields(headers: HeaderFields, count: int) -> list[Field] | None:
    """The fields of headers that agree in number, name and size; else None."""
    if headers is None:
        return [NO_HEADERS]
    if (columns := given_columns(headers)) is None:
        return None
    fields: list[Field] = []
    before = varint(len(columns))
    for name, values in columns:
        if (value := _equal_pieces(values, count)) is None:
            return None
        fields += [before + header_name(name) + _size_varint(value), value]
        before = b""
    return fields


def header_columns(headers: Sequence[Iterable[Header]]) -> list[HeaderColumn] | None:
    """A column for each header, if all records have headers of the same names in the same order; else None."""
    if not set(map(type, headers)) <= _LISTS:
        return None
    columns = []
    try:
        for column in zip(*headers, strict=True):
            names, values = zip(*column, strict=True) if set(map(type, column)) <= _LISTS else ((), ())
            if not names or names.count(names[0]) != len(names):
                return None
            columns.append(HeaderColumn(names[0], values))
    except ValueError:  # more headers, or parts, in one than in another
        return None
    return columns


def header_rows(columns: Sequence[HeaderColumn]) -> list[tuple[Header, ...]]:
    """The headers of each record: the reverse of `header_columns`."""
    columns_of_headers: list[Iterable[Header]] = [
        zip(repeat(name), values, strict=False)  # type: ignore[arg-type] # no buffer
        for name, values in columns
    ]
    return list(zip(*columns_of_headers, strict=True))


def common_length(column: Sequence[bytes | None]) -> int | None:
    """The length that all have; None if they differ, or one is null. Half the time of a set of the lengths."""
    try:
        lengths = list(map(len, column))  # type: ignore[arg-type] # a null has no length: that is the question
    except TypeError:
        return None
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) else None


def _equal_pieces(column: Sequence[bytes | None] | Buffer, count: int) -> Field | None:
    if isinstance(column, bytes | bytearray | memoryview):
        return pieces(column, count)
    if common_length(column) is None:
        return None
    return pieces(b"".join(column), count)  # type: ignore[arg-type] # no nulls


def _size_varint(field: Field) -> bytes:
    return VARINTS[len(field) if isinstance(field, bytes) else field.itemsize]


def _sequence(column: Sequence[bytes | None] | Buffer, count: int) -> Sequence[bytes | None]:
    return _cut(column, count) if isinstance(column, bytes | bytearray | memoryview) else column


def _cut(column: Buffer, count: int) -> list[bytes]:
    piece = pieces(column, count)
    return [piece] * count if isinstance(piece, bytes) else piece.tolist()
