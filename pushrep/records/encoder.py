"""Values in, one record batch v2 out. The batch's header is drawn in header.py; a record is

    | length varint | attributes 1 = 0 | timestampDelta varlong | offsetDelta varint |
    | keyLength varint, key | valueLength varint, value | headerCount varint, headers |          length -1 is null
    header: | nameLength varint, name UTF-8 | valueLength varint, value |

Deltas count from the batch's base offset and from the timestamp of its first record.  Source: Kafka's protocol guide.
The records are encoded by encoder_choice.py; here are the checks, the compression, the header and the checksum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pushrep.errors import BadArgument
from pushrep.records.batch import RecordBatch
from pushrep.records.checksum import crc32c, crc32c_of_bytes
from pushrep.records.codecs import compress
from pushrep.records.concatenating import NO_HEADERS, NULL
from pushrep.records.encoder_choice import HeaderColumn, Headers, Keys, Timestamps, encode_records
from pushrep.records.errors import RecordTooLarge
from pushrep.records.header import (
    CRC_COVERS_FROM,
    HEADER_BYTES,
    LENGTH_ENDS_AT,
    MAGIC,
    BatchHeader,
    pack_covered,
    write_crc,
)
from pushrep.records.model import Codec
from pushrep.records.varint import VARINTS
from pushrep.records.varint_arrays import Ints

__all__ = ["HeaderColumn", "Headers", "Keys", "Timestamps", "encode_batch"]

_BATCH_BYTES_LIMIT = (1 << 31) - 1  # the length field is signed
_PLAIN_HEAD = b"\0\0\0" + NULL  # attributes, both deltas, a null key
_TIMESTAMP_LIMIT_MS = 1 << 62  # so that no delta leaves 64 bits; 146 million years


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
