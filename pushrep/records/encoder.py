"""Values in, one record batch v2 out. The header is drawn in header.py; a record is

    | length varint | attributes 1 = 0 | timestampDelta varlong | offsetDelta varint |
    | keyLength varint, key | valueLength varint, value | headerCount varint, headers |          length -1 is null
    header: | nameLength varint, name UTF-8 | valueLength varint, value |

Deltas count from the batch's base offset and from the timestamp of its first record.  Source: Kafka's protocol guide.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from pushrep.records.batch import RecordBatch
from pushrep.records.checksum import crc32c, extend_crc32c
from pushrep.records.codecs import compress
from pushrep.records.errors import RecordTooLarge
from pushrep.records.header import CRC_COVERS_FROM, HEADER_BYTES, LENGTH_ENDS_AT, MAGIC, BatchHeader
from pushrep.records.model import Buffer, Codec, Header
from pushrep.records.varint import VARINTS, varint

_NULL = varint(-1)
_NO_HEADERS = varint(0)
_BATCH_BYTES_LIMIT = (1 << 31) - 1  # the length field is signed
_TIMESTAMP_LIMIT_MS = 1 << 62  # so that no delta leaves 64 bits; 146 million years


class HeaderColumn(NamedTuple):
    """Every record has exactly one header of this name: the values as a sequence, or as n equal pieces in one bytes."""

    name: str
    values: Sequence[bytes | None] | Buffer


Keys: TypeAlias = Sequence[bytes | None] | Buffer
Headers: TypeAlias = Sequence[Iterable[Header]] | HeaderColumn


def encode_batch(  # noqa: PLR0913 - a batch has this many fields
    values: Sequence[bytes | None],
    *,
    keys: Keys | None = None,
    headers: Headers | None = None,
    timestamps_ms: int | Sequence[int],
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
    times = [timestamps_ms] if isinstance(timestamps_ms, int) else [int(time) for time in timestamps_ms]
    base_time, max_time = times[0] if times else 0, max(times, default=0)
    if times and (min(times) < -_TIMESTAMP_LIMIT_MS or max_time >= _TIMESTAMP_LIMIT_MS):
        raise ValueError(f"timestamps_ms from {min(times)} to {max_time} are outside +-2**62")
    if isinstance(timestamps_ms, int):
        prefixes = [b"\0\0" + VARINTS[delta] for delta in range(count)]
    else:
        _same_length("timestamps_ms", len(times), count)
        prefixes = [b"\0" + VARINTS[time - base_time] + VARINTS[delta] for delta, time in enumerate(times)]
    payload = compress(codec, _join(prefixes, _encoded_keys(keys, count), values, _encoded_headers(headers, count)))
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=HEADER_BYTES - LENGTH_ENDS_AT + len(payload),
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=int(codec),
        last_offset_delta=count - 1,
        base_timestamp_ms=base_time,
        max_timestamp_ms=max_time,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=count,
    )
    return seal(header, payload)


def seal(header: BatchHeader, payload: bytes) -> RecordBatch:
    """Header and (compressed) records as one batch, the CRC computed."""
    if header.size_bytes > _BATCH_BYTES_LIMIT:
        raise RecordTooLarge(header.size_bytes, _BATCH_BYTES_LIMIT, "a batch's length field")
    crc = extend_crc32c(crc32c(header.pack(), CRC_COVERS_FROM), payload)
    header = header._replace(crc=crc)
    return RecordBatch(bytearray().join((header.pack(), payload)), header)


def _join(
    prefixes: list[bytes], keys: Iterable[bytes], values: Sequence[bytes | None], tails: Iterable[bytes]
) -> bytes:
    """All records as one bytes: parts in a list and one join, so that no byte of a value moves more than once."""
    parts: list[bytes] = []
    for prefix, key, value, tail in zip(prefixes, keys, values, tails, strict=True):
        if value is None:
            parts += (VARINTS[len(prefix) + len(key) + 1 + len(tail)], prefix, key, _NULL, tail)
        else:
            size = VARINTS[len(value)]
            length = len(prefix) + len(key) + len(size) + len(value) + len(tail)
            parts += (VARINTS[length], prefix, key, size, value, tail)
    return b"".join(parts)


def _encoded_keys(keys: Keys | None, count: int) -> list[bytes]:
    if keys is None:
        return [_NULL] * count
    return [_nullable(key) for key in _column("keys", keys, count)]


def _encoded_headers(headers: Headers | None, count: int) -> list[bytes]:
    if headers is None:
        return [_NO_HEADERS] * count
    if isinstance(headers, HeaderColumn):
        name = headers.name.encode()
        start = varint(1) + VARINTS[len(name)] + name
        return [start + _nullable(value) for value in _column("headers", headers.values, count)]
    _same_length("headers", len(headers), count)
    names: dict[str, bytes] = {}
    return [_encoded_header_list(each, names) for each in headers]


def _encoded_header_list(headers: Iterable[Header], names: dict[str, bytes]) -> bytes:
    parts, number = [b""], 0
    for name, value in headers:
        if name not in names:
            utf8 = name.encode()
            names[name] = VARINTS[len(utf8)] + utf8
        parts += (names[name], _nullable(value))
        number += 1
    parts[0] = VARINTS[number]
    return b"".join(parts)


def _nullable(data: bytes | None) -> bytes:
    return _NULL if data is None else VARINTS[len(data)] + data


def _column(name: str, data: Sequence[bytes | None] | Buffer, count: int) -> Sequence[bytes | None]:
    if not isinstance(data, bytes | bytearray | memoryview):
        _same_length(name, len(data), count)
        return data
    size, rest = divmod(len(data), count)
    if rest:
        raise ValueError(f"{name}: {len(data)} bytes are not {count} pieces of equal size")
    whole = bytes(data)
    return [whole[start : start + size] for start in range(0, len(whole), size)] if size else [b""] * count


def _same_length(name: str, got: int, count: int) -> None:
    if got != count:
        raise ValueError(f"{name} has {got} entries for {count} values")
