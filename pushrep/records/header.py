"""What one record is, and the 61 bytes before the records of a batch: read, checked and patched only here. Big-endian.

     0            8          12           16     17    21          23
    | baseOffset | length   | leaderEpoch | magic | CRC | attributes |    length counts from byte 12 to the end
     23                27              35             43            51              53             57
    | lastOffsetDelta | baseTimestamp | maxTimestamp | producerId | producerEpoch | baseSequence | recordCount | 61

The CRC-32C covers everything from byte 21 on. It does not cover base offset, length, epoch and magic: so a log stamps
them for free, and they can only be checked by their range. Attributes: bits 0-2 codec, 3 timestamp type, 4
transactional, 5 control. Source: Kafka's protocol guide, "Record Batch"; docs/internals/formats/record-batch.md.

The CRC goes over any buffer without copying it. google-crc32c takes only objects that promise not to move; bytearray
and memoryview do not, a numpy view of them does: 27 GB/s, where a copy into `bytes` first makes 15 to 17 (512 KiB on
one core).

`checked_run` checks many neighbouring batches at once: their headers as columns, their CRCs in one loop.

    bytes   | head | records | head | records | head | rec      a length leads to the next: the one thing that goes
            ^ 0     ───────▶ ^ 1     ───────▶ ^ 2               step by step, with the CRC of what lies between
    columns   base offset, length, epoch, magic, CRC, ...       every other check is one numpy operation for all

It applies the rules of `BatchHeader.parse` and `RecordBatch.check`, but does not tell which one failed: the run ends
before the first batch that does not pass, and the caller checks that batch alone. A batch of 4 KiB takes 1.2 µs where
one by one takes 6 (docs/internals/benchmark-notes.md).

`split_batches` is the one loop over bytes that came from somebody: out of a file, over the wire, or from a topic.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.crc32c import crc32c_value
from pushrep.errors import PushrepError

Header: TypeAlias = tuple[str, bytes | None]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes in one piece."""


class Codec(IntEnum):
    """Compression of a batch's records; the numbers are Kafka's (attributes, bits 0-2)."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class TimestampType(IntEnum):
    """Who set the timestamps: the producer, or the log that appended the batch (attributes, bit 3)."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Record(NamedTuple):
    """One decoded record. `timestamp_ms` counts from 1970-01-01 UTC, -1 for none; null keys and values are None.

    A tuple and not a dataclass: a reader makes millions, and tuples are built in C.
    """

    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class CorruptRecordBatch(PushrepError):
    """These bytes are no whole record batch v2: quarantine them or fetch them again; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a valid record batch: {reason}")
        self.reason = reason


class UnsupportedCodec(PushrepError):
    """The batch is whole, but its attributes name compression `number`, which this version can't read: upgrade."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"compression {number} is unknown (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd): upgrade the reader"
        )
        self.number = number


class RecordTooLarge(PushrepError):
    """A record or batch of `size` bytes exceeds `limit`: split it, or raise the limit where the message says so."""

    def __init__(self, size: int, limit: int, setting: str = "batch_bytes_max") -> None:
        super().__init__(f"{size} bytes exceed {setting} = {limit}: split the data or raise {setting}")
        self.size, self.limit, self.setting = size, limit, setting


_HEADER = struct.Struct(">qiibIhiqqqhii")
_STAMP_OFFSET = struct.Struct(">q")
_STAMP_EPOCH = struct.Struct(">i")
_PRODUCER = struct.Struct(">qhi")
_CRC = struct.Struct(">I")
LENGTH = struct.Struct(">i")

HEADER_BYTES = 61
SEALED_BYTES = 21
"""Base offset, length, leader epoch and magic, which the CRC does not cover, and the CRC."""
LENGTH_AT = 8
LENGTH_ENDS_AT = 12  # what the length counts begins here
EPOCH_AT = 12
MAGIC_AT = 16
CRC_AT = 17
CRC_COVERS_FROM = 21
PRODUCER_AT = 43
MAGIC = 2
RECORD_BYTES_MIN = 7  # length, attributes, two deltas, key length, value length, header count: a byte each
# Upper bounds for callers that cut batches by size. A record beside its key, value and headers: length, attributes, two
# deltas, two lengths and the header count, each at its widest. A header beside its name and value: two lengths.
RECORD_OVERHEAD_BYTES_MAX = 5 + 1 + 10 + 5 + 5 + 5 + 5
HEADER_OVERHEAD_BYTES_MAX = 5 + 5
_COVERED = struct.Struct(">hiqqqhii")
assert _COVERED.size == HEADER_BYTES - CRC_COVERS_FROM, "the fields that the CRC covers, attributes to record count"
pack_covered = _COVERED.pack
assert _HEADER.size == HEADER_BYTES, "docs/internals/formats/record-batch.md promises 61 bytes"
assert _PRODUCER.size == 57 - PRODUCER_AT, "producer id, epoch and sequence are neighbours"

CODEC_MASK, _TIMESTAMP_TYPE_BIT, _TRANSACTIONAL_BIT, CONTROL_BIT = 0x07, 0x08, 0x10, 0x20
OFFSET_MAX = (1 << 63) - 1
_WALKED = struct.Struct(">qiibxxxxhi8xq14xi")
assert _WALKED.size == HEADER_BYTES, "a header without its CRC, base timestamp and producer"
unpack_walked = _WALKED.unpack_from
"""Base offset, length, leader epoch, magic, attributes, last offset delta, newest time, record count: for a scan over
headers."""


class BatchHeader(NamedTuple):
    """The fields of a batch's header, in the order of the bytes. Times are milliseconds, -1 where there is none."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @classmethod
    def parse(cls, buffer: Buffer, position: int = 0) -> "BatchHeader":
        """Read the header at byte `position`.

        Raises CorruptRecordBatch if bytes are missing or a field has a value that no whole batch can have. It reads the
        header alone: `RecordBatch.check` checks the CRC, and the caller the end of the file.
        """
        try:
            header = tuple.__new__(cls, _HEADER.unpack_from(buffer, position))  # half of `_make`
        except struct.error:
            here = max(0, len(buffer) - position)
            raise CorruptRecordBatch(f"{here} bytes at {position} are less than a header of {HEADER_BYTES}") from None
        if reason := _why_impossible(header):
            raise CorruptRecordBatch(reason)
        return header

    @property
    def size_bytes(self) -> int:
        """The whole batch, header included."""
        return self.batch_length + LENGTH_ENDS_AT

    @property
    def last_offset(self) -> int:
        """Offset of the last record (kept by compaction even where that record is gone)."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The base offset of the batch that follows in a log without holes."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """Compression of the records; raises UnsupportedCodec for a number that Kafka has not named yet."""
        number = self.attributes & CODEC_MASK
        try:
            return Codec(number)
        except ValueError:
            raise UnsupportedCodec(number) from None

    @property
    def timestamp_type(self) -> TimestampType:
        """With LOG_APPEND_TIME every record has `max_timestamp_ms` as its time."""
        return TimestampType.LOG_APPEND_TIME if self.attributes & _TIMESTAMP_TYPE_BIT else TimestampType.CREATE_TIME

    @property
    def is_transactional(self) -> bool:
        """Part of a transaction: read_committed readers must know how it ended."""
        return bool(self.attributes & _TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """The record is a marker (commit, abort) and not data: readers of data skip the batch."""
        return bool(self.attributes & CONTROL_BIT)

    def pack(self) -> bytes:
        """The 61 bytes."""
        return _HEADER.pack(*self)


def _why_impossible(header: BatchHeader) -> str | None:
    """Why no whole batch can have these fields, as text; None if one can."""
    base_offset, length, leader_epoch, magic, _, attributes, delta, _, _, _, _, _, count = header
    records_bytes = length + LENGTH_ENDS_AT - HEADER_BYTES
    reason = None
    if magic != MAGIC:
        reason = f"magic {magic}, only {MAGIC} is known"
    elif records_bytes < 0:
        reason = f"length {length} is below the header's own {HEADER_BYTES - LENGTH_ENDS_AT}"
    elif base_offset < 0 or delta < 0 or base_offset + delta >= OFFSET_MAX:
        reason = f"offsets {base_offset} + {delta} are out of range"
    elif leader_epoch < -1:
        reason = f"leader epoch {leader_epoch} is below -1"
    elif not 0 <= count <= delta + 1:
        reason = f"{count} records in {delta + 1} offsets"
    elif not attributes & CODEC_MASK and count * RECORD_BYTES_MIN > records_bytes:  # not compressed
        reason = f"{count} records can't fit into {records_bytes} bytes"
    return reason


def stamp(data: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and leader epoch into the batch at the start of `data`; the CRC does not cover them."""
    _STAMP_OFFSET.pack_into(data, 0, base_offset)
    _STAMP_EPOCH.pack_into(data, EPOCH_AT, leader_epoch)


def write_producer(data: bytearray | memoryview, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
    """Write the idempotent producer's three fields; the CRC has to be written again after it."""
    _PRODUCER.pack_into(data, PRODUCER_AT, producer_id, producer_epoch, base_sequence)


def write_crc(data: bytearray | memoryview, crc: int) -> None:
    """Write the CRC-32C of everything from byte 21 on."""
    _CRC.pack_into(data, CRC_AT, crc)


def crc32c_of(data: bytes | NDArray[np.uint8]) -> int:
    """The CRC-32C of all of `data`: a view of many batches, or a few hundred bytes, where a view costs more."""
    return int(crc32c_value(data))


def crc32c(data: Buffer, start: int = 0, end: int | None = None) -> int:
    """CRC-32C (Castagnoli, RFC 3720 B.4) of `data[start:end]` as an unsigned 32-bit number."""
    count = (len(data) if end is None else end) - start
    if count <= 0:
        return 0
    return int(crc32c_value(np.frombuffer(data, np.uint8, count, start)))


Column: TypeAlias = NDArray[np.int64]

_FIELDS = [">i8", ">i4", ">i4", "i1", ">u4", ">i2", ">i4", ">i8", ">i8", ">i8", ">i2", ">i4", ">i4"]
_COLUMNS = np.dtype(list(zip(BatchHeader._fields, _FIELDS, strict=True)))
assert _COLUMNS.itemsize == HEADER_BYTES, "the columns are the header's fields"


@dataclass(frozen=True, slots=True, eq=False)
class BatchRun:
    """Neighbouring whole batches that passed every check of a single batch. Columns of int64, one per batch.

    position: the byte where it begins. size_bytes: header included. last_offset: kept by compaction.
    """

    position: Column
    size_bytes: Column
    base_offset: Column
    last_offset: Column
    leader_epoch: Column
    max_timestamp_ms: Column
    record_count: Column
    _headers: NDArray[Any]

    @classmethod
    def of(cls, position: int, header: BatchHeader) -> "BatchRun":
        """One batch that was checked by others, with this header."""
        return _run(np.frombuffer(header.pack(), _COLUMNS), np.array([position], np.int64))

    def __len__(self) -> int:
        return len(self.position)

    @property
    def end(self) -> int:
        """The byte behind the last batch."""
        return int(self.position[-1] + self.size_bytes[-1])

    @property
    def next_offset(self) -> int:
        """The offset behind the last batch."""
        return int(self.last_offset[-1]) + 1

    def sealed_bytes(self) -> bytes:
        """The first bytes of each batch, which a seal's CRC covers, concatenated."""
        rows = np.ascontiguousarray(self._headers).view(np.uint8).reshape(len(self), HEADER_BYTES)
        return rows[:, :SEALED_BYTES].tobytes()

    def headers(self) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of each batch, for callers that need them one by one."""
        for position, fields in zip(self.position.tolist(), self._headers.tolist(), strict=True):
            yield position, BatchHeader._make(fields)

    def first(self, count: int) -> "BatchRun":
        """The first `count` batches of it."""
        return BatchRun(*(getattr(self, column)[:count] for column in self.__slots__)) if count < len(self) else self


def checked_run(data: Buffer, position: int, size_max: int) -> BatchRun:
    """The whole batches at the beginning of `data`, which stands at byte `position` of its file; perhaps none.

    It ends before the first batch that `data` does not hold whole, that is larger than `size_max` bytes, or that
    `RecordBatch.check` would refuse.
    """
    bounds = _hop(data, size_max)
    pairs = list(pairwise(bounds))
    headers = np.frombuffer(b"".join([data[at : at + HEADER_BYTES] for at, _ in pairs]), _COLUMNS)
    raw, checksum = np.frombuffer(data, np.uint8), crc32c_value
    crcs = np.array([checksum(raw[at + CRC_COVERS_FROM : end]) for at, end in pairs], np.uint32)
    run = _run(headers, np.array(bounds[:-1], np.int64) + position)
    good = (headers["crc"] == crcs) & _possible(run, headers)
    return run if good.all() else run.first(int(good.argmin()))


_RUN_MIN = 32
"""At least so many batches of the first one's length are checked together; for fewer, numpy calls cost more."""


class SplitBatches(NamedTuple):
    """The whole batches at the beginning of some bytes, as (position, header); they end at byte `end`.

    why_not: why the bytes behind them are no batch; None if there are none. is_cut: because the bytes end inside of it.
    joins: whether each begins where the one before ends.
    """

    placed: list[tuple[int, BatchHeader]]
    end: int
    why_not: str | None
    is_cut: bool
    joins: bool


def split_batches(data: Buffer, *, of_log: bool = True) -> SplitBatches:
    """The batches in `data`, each with good magic, size and CRC-32C. of_log: and with a record for each of its offsets,
    as all batches of a log have; a topic's may be compacted.
    """
    placed, at, joins = list[tuple[int, BatchHeader]](), 0, True
    first = length_of_first(data)
    if first and len(data) >= _RUN_MIN * first:
        run = checked_run(data, 0, len(data))
        if of_log:
            dense = run.record_count == run.last_offset - run.base_offset + 1
            run = run if dense.all() else run.first(int(dense.argmin()))
        if len(run):
            placed, at = list(run.headers()), run.end
            joins = bool((run.base_offset[1:] == run.last_offset[:-1] + 1).all())
    expected = placed[-1][1].next_offset if placed else None
    raw, size = np.frombuffer(data, np.uint8), len(data)
    while at < size:
        try:
            header = BatchHeader.parse(data, at)
        except CorruptRecordBatch as error:
            if at + MAGIC_AT < size and raw[at + MAGIC_AT] < MAGIC:
                why_not = f"magic {raw[at + MAGIC_AT]}, only {MAGIC} is read: a message of the format before Kafka 0.11"
                return SplitBatches(placed, at, why_not, is_cut=False, joins=joins)
            return SplitBatches(placed, at, error.reason, size - at < HEADER_BYTES, joins)
        end = at + header.batch_length + LENGTH_ENDS_AT
        if end > size:
            return SplitBatches(placed, at, f"{size - at} bytes of {end - at}", is_cut=True, joins=joins)
        crc = crc32c_of(raw[at + CRC_COVERS_FROM : end])
        if crc != header.crc:
            why_not = f"CRC-32C is {crc:#010x}, the header says {header.crc:#010x}"
            return SplitBatches(placed, at, why_not, is_cut=False, joins=joins)
        if of_log and header.record_count != header.last_offset_delta + 1:
            why_not = f"{header.record_count} records for {header.last_offset_delta + 1} offsets"
            return SplitBatches(placed, at, why_not, is_cut=False, joins=joins)
        joins = joins and (expected is None or header.base_offset == expected)
        placed.append((at, header))
        at, expected = end, header.next_offset
    return SplitBatches(placed, at, None, is_cut=False, joins=joins)


def length_of_first(data: Buffer) -> int:
    """The size in bytes that the first header of `data` claims; 0 if there is none."""
    if len(data) < LENGTH_ENDS_AT:
        return 0
    return int(LENGTH.unpack_from(data, LENGTH_AT)[0]) + LENGTH_ENDS_AT


def _run(headers: NDArray[Any], positions: Column) -> BatchRun:
    base_offset = headers["base_offset"].astype(np.int64)
    return BatchRun(
        positions,
        headers["batch_length"] + np.int64(LENGTH_ENDS_AT),
        base_offset,
        base_offset + headers["last_offset_delta"],
        headers["leader_epoch"].astype(np.int64),
        headers["max_timestamp_ms"].astype(np.int64),
        headers["record_count"].astype(np.int64),
        headers,
    )


def _hop(data: Buffer, size_max: int) -> list[int]:
    """The positions of the batches, and the end of the last one, by their lengths alone."""
    available, length_at = len(data), LENGTH.unpack_from  # found once, not for each batch
    at, bounds = 0, [0]
    while at + HEADER_BYTES <= available:
        size = length_at(data, at + LENGTH_AT)[0] + LENGTH_ENDS_AT
        if not HEADER_BYTES <= size <= size_max or at + size > available:
            break
        at += size
        bounds.append(at)
    return bounds


def _possible(run: BatchRun, headers: NDArray[Any]) -> NDArray[np.bool_]:
    """`BatchHeader.parse`'s rules for all at once; a last offset that overflowed, or of a delta below 0, is too low."""
    delta, count = headers["last_offset_delta"], run.record_count
    plain = (headers["attributes"] & CODEC_MASK) == Codec.NONE
    too_many = plain & (count * RECORD_BYTES_MIN > run.size_bytes - HEADER_BYTES)
    possible: NDArray[np.bool_] = (
        (headers["magic"] == MAGIC)
        & (run.base_offset >= 0)
        & (run.last_offset >= run.base_offset)
        & (run.last_offset < OFFSET_MAX)
        & (run.leader_epoch >= -1)
        & (count >= 0)
        & (count <= delta.astype(np.int64) + 1)
        & ~too_many
    )
    return possible
