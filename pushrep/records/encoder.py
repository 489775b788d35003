"""Values in, one record batch v2 out. The batch's header is drawn in header.py; a record is

    | length varint | attributes 1 = 0 | timestampDelta varlong | offsetDelta varint |
    | keyLength varint, key | valueLength varint, value | headerCount varint, headers |          length -1 is null
    header: | nameLength varint, name UTF-8 | valueLength varint, value |

Deltas count from the batch's base offset and from the timestamp of its first record.  Source: Kafka's protocol guide.
Here are the checks, the compression, the header and the checksum, and which encoder of record_encoders.py the records
take: three that give the same bytes, each the fastest for its shape.

vectorised            all values of one size, keys and headers too: a field at a time by numpy
vectorised in parts   ragged values: what precedes and follows them by numpy where it is of one size, joined one by one
concatenating         anything, and few records: parts from tables
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.errors import BadArgument
from pushrep.records.batch import RecordBatch
from pushrep.records.compression import compress
from pushrep.records.header import (
    CRC_COVERS_FROM,
    HEADER_BYTES,
    LENGTH_ENDS_AT,
    MAGIC,
    BatchHeader,
    crc32c,
    crc32c_of_bytes,
    pack_covered,
    write_crc,
)
from pushrep.records.model import Buffer, Codec, Header, RecordTooLarge
from pushrep.records.record_encoders import (
    NO_HEADERS,
    NULL,
    ONE_HEADER,
    Band,
    Field,
    bands,
    encode_concatenating,
    encode_equal,
    encode_heads,
    encode_rows,
    encode_vectorised,
    equal_key_heads,
    general_heads,
    header_column_tails,
    header_name,
    header_tails,
    keyless_heads,
    pieces,
)
from pushrep.records.varint import VARINTS, Ints

_BATCH_BYTES_LIMIT = (1 << 31) - 1  # the length field is signed
_PLAIN_HEAD = b"\0\0\0" + NULL  # attributes, both deltas, a null key
_TIMESTAMP_LIMIT_MS = 1 << 62  # so that no delta leaves 64 bits; 146 million years
# Measured (benchmarks/records_codec.py): with keys the template makes 10 M records/s at 100 B where joining makes 2.5;
# below 256 records its thirty numpy calls cost more, above 1 KiB the second move of every value does.
_RECORDS_MIN = 256
# Values of one size without headers are joined between parts from a table: 256 of 100 B take a quarter of numpy's
# time, 1,000 a third. The table of a size is made once; who never sends that size again pays for it.
_EQUAL_RECORDS_MAX = 1024
_VALUE_BYTES_MAX = 1024


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
    or one per record, in any order. Raises BadArgument for columns of different lengths or times out of range,
    RecordTooLarge if the batch would pass 2 GiB.
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
    return RecordBatch(data, header._replace(crc=crc))


def encode_alone(value: bytes, timestamp_ms: int) -> RecordBatch:
    """What `encode_batch` makes of one value without key, headers and codec, in a third of its time.

    Who waits for its own record to be on disk waits for this, too. Raises BadArgument for a time out of range.
    """
    if not -_TIMESTAMP_LIMIT_MS <= timestamp_ms < _TIMESTAMP_LIMIT_MS:
        raise BadArgument("timestamps_ms", f"{timestamp_ms} is outside +-2**62")
    count = len(value)
    size = VARINTS[count]
    length = VARINTS[len(_PLAIN_HEAD) + len(size) + count + 1]
    fields = pack_covered(0, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1)
    covered = b"".join((fields, length, _PLAIN_HEAD, size, value, NO_HEADERS))
    crc = crc32c_of_bytes(covered)
    batch_length = len(covered) + CRC_COVERS_FROM - LENGTH_ENDS_AT
    header = BatchHeader._make((0, batch_length, 0, MAGIC, crc, 0, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1))
    return RecordBatch(bytearray(header.pack()[:CRC_COVERS_FROM] + covered), header)


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


def _check_lengths(keys: Keys | None, headers: Headers | None, count: int) -> None:
    columns = [("keys", keys), ("headers", headers.values if isinstance(headers, HeaderColumn) else headers)]
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
    values: Sequence[bytes | None], keys: Keys | None, headers: Headers | None, time_deltas: Ints | None, reserved: int
) -> bytearray:
    """`reserved` zero bytes for the batch's header, then the records. Columns fit in length; no deltas: all are 0."""
    count = len(values)
    if 0 < count <= _EQUAL_RECORDS_MAX and headers is None and time_deltas is None:
        equal = _equal(values, keys, count, reserved)
        if equal is not None:
            return equal
    key = tail = spans = None
    if count >= _RECORDS_MIN:
        key, tail, spans = _key_fields(keys, count), _tail_fields(headers, count), bands(count, time_deltas)
    if key is not None and tail is not None and spans is not None and len(values[0] or b"") <= _VALUE_BYTES_MAX:
        value = _equal_pieces(values, count)
        if value is not None:
            fields = [*key, _size_varint(value), value, *tail]
            return encode_vectorised(fields, spans, time_deltas, reserved)
    return encode_concatenating(
        _heads(keys, key, spans, count, time_deltas), values, _tails(headers, tail, count), reserved
    )


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


def _heads(
    keys: Keys | None, key: list[Field] | None, spans: list[Band] | None, count: int, time_deltas: Ints | None
) -> list[bytes]:
    """What stands before each value: attributes, deltas, key."""
    if keys is None and time_deltas is None:
        return keyless_heads(count)
    if key is not None and spans is not None:
        return encode_heads(key, spans, time_deltas)
    if time_deltas is None and isinstance(keys, bytes | bytearray | memoryview) and 0 < count < _RECORDS_MIN:
        return equal_key_heads(_cut(keys, count), len(keys) // count)
    deltas = None if time_deltas is None else time_deltas.tolist()
    return general_heads(count, None if keys is None else _sequence(keys, count), deltas)


def _tails(headers: Headers | None, tail: list[Field] | None, count: int) -> Iterable[bytes]:
    """What stands behind each value: the headers."""
    if not isinstance(headers, HeaderColumn):
        return header_tails(headers)
    if tail is not None:
        return encode_rows(tail, count)
    return header_column_tails(headers.name, _sequence(headers.values, count))


def _key_fields(keys: Keys | None, count: int) -> list[Field] | None:
    """The fields of keys that agree in their size; else None."""
    if keys is None:
        return [NULL]
    key = _equal_pieces(keys, count)
    return None if key is None else [_size_varint(key), key]


def _tail_fields(headers: Headers | None, count: int) -> list[Field] | None:
    """The fields of headers that agree in number, name and size; else None."""
    if headers is None:
        return [NO_HEADERS]
    value = _equal_pieces(headers.values, count) if isinstance(headers, HeaderColumn) else None
    if value is None or not isinstance(headers, HeaderColumn):
        return None
    return [ONE_HEADER + header_name(headers.name) + _size_varint(value), value]


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
