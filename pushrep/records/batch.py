"""A whole record batch: its bytes, its header, the ways to look inside, and the compression of its records.

The five codecs, by cramjam, in the framing that Kafka's own clients read.

gzip, zstd  one standard frame.
lz4         one LZ4 frame of independent blocks: Kafka's Java reader refuses linked ones.
snappy      xerial's framing, which Kafka's Java reader demands; raw snappy, which some clients write, is read too:
            | 82 S N A P P Y 00 | version i32 = 1 | compatible i32 = 1 | then per block: length i32, raw snappy |

Other writers put several frames or streams one behind the other, or bytes behind the last gzip member or lz4 frame.
Kafka's Java reader takes the former and passes over the latter, and so does this module.

Sizes in the input may be wrong: the output buffer never exceeds `bytes_max`.
"""

import struct
import zlib
from typing import Any

import cramjam
import numpy as np

from pushrep.records import header as layout
from pushrep.records.columns import RecordColumns, decode_columns, rows_of_columns
from pushrep.records.decoder import RecordRows, read_small_batch, read_uniform, scan, scanned_rows
from pushrep.records.header import BatchHeader, Buffer, Codec, CorruptRecordBatch, Record, crc32c

DECOMPRESSED_BYTES_MAX = 256 << 20
"""Default limit of one batch's decompressed records: far above Kafka's largest batch, and harmless for a compression
bomb.
"""

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_LENGTH = struct.Struct(">i")
_XERIAL_BLOCK_BYTES = 32 << 10  # the default of xerial's library, and so of every Java producer
_ZSTD_LEVEL = 3  # as Kafka's compression.zstd.level
_GZIP_LEVEL = 6  # as zlib's, and so Kafka's default
_GZIP_MEMBER, _GZIP_HEADER_BYTES = b"\x1f\x8b\x08", 10
_LZ4_FRAME = b"\x04\x22\x4d\x18"
_GUESS_BYTES_MIN = 64 << 10
_GROWTH = 8  # text and JSON compress 3-6 times


def compress(codec: Codec, data: memoryview) -> Buffer:
    """The records of a batch, compressed."""
    if codec is Codec.NONE:
        return data
    if codec is Codec.GZIP:
        return bytes(cramjam.gzip.compress(data, level=_GZIP_LEVEL))
    if codec is Codec.SNAPPY:
        return _compress_xerial(data)
    if codec is Codec.LZ4:
        compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        compressor.compress(data.tobytes())  # it takes bytes only
        return bytes(compressor.finish())
    return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))


def decompress(codec: Codec, data: Buffer, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> memoryview:
    """The decompressed records of a batch; raises CorruptRecordBatch if they are damaged or above `bytes_max`."""
    view = memoryview(data)
    if codec is Codec.NONE:
        return view
    if codec is Codec.SNAPPY:
        return _decompress_snappy(view, bytes_max)
    module = {Codec.GZIP: cramjam.gzip, Codec.LZ4: cramjam.lz4, Codec.ZSTD: cramjam.zstd}[codec]
    return _decompress_frame(codec, module, view, bytes_max)


def _decompress_frame(codec: Codec, module: Any, view: memoryview, bytes_max: int) -> memoryview:
    """Decompress into a guessed size, and into more if that fails: a frame may lack its size, or give a wrong one."""
    size = min(bytes_max, max(_GUESS_BYTES_MIN, _GROWTH * len(view)))
    while True:
        out = np.empty(size, np.uint8)  # not zeroed: unwritten pages take no memory
        try:
            written = module.decompress_into(view, out)
        except cramjam.DecompressionError as error:
            if size == bytes_max:  # cramjam has no distinct error for "too small", so try up to the limit
                if codec is Codec.GZIP and (found := _gzip_members(view, bytes_max)) is not None:
                    return found
                if codec is Codec.LZ4 and 0 < (end := _lz4_frames_end(view)) < len(view):
                    return _decompress_frame(codec, module, view[:end], bytes_max)
                raise CorruptRecordBatch(
                    f"{codec.name} records do not decompress into {bytes_max} bytes (decompressed_bytes_max): {error}"
                ) from error
            size = min(bytes_max, size * _GROWTH)
        else:
            return out.data[:written]


def _gzip_members(view: memoryview, bytes_max: int) -> memoryview | None:
    """What the gzip members hold, without the bytes behind the last one; None if one is damaged, or it is too much."""
    out, rest = bytearray(), bytes(view)
    while len(rest) >= _GZIP_HEADER_BYTES and rest.startswith(_GZIP_MEMBER):
        member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            out += member.decompress(rest, bytes_max - len(out) + 1)
        except zlib.error:
            return None
        if not member.eof or len(out) > bytes_max:
            return None
        rest = member.unused_data
    return memoryview(out) if len(rest) < len(view) else None


def _lz4_frames_end(view: memoryview) -> int:
    """Where the last LZ4 frame ends; behind the end of `view` if that frame is not whole."""
    end = 0
    while view[end : end + 4] == _LZ4_FRAME and len(view) > (position := end + 7):
        flags = view[end + 4]
        position += (8 if flags & 8 else 0) + (4 if flags & 1 else 0)  # content size, dictionary
        end = len(view) + 1
        while position + 4 <= len(view):
            length = int.from_bytes(view[position : position + 4], "little") & 0x7FFF_FFFF
            position += 4
            if not length:
                end = position + (4 if flags & 4 else 0)
                break
            position += length + (4 if flags & 16 else 0)
    return end


def _compress_xerial(data: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (_XERIAL_LENGTH.pack(len(block)), block)
    return b"".join(parts)


def _decompress_snappy(view: memoryview, bytes_max: int) -> memoryview:
    blocks = [view] if bytes(view[:8]) != _XERIAL_MAGIC else _xerial_blocks(view)
    try:
        sizes = [int(cramjam.snappy.decompress_raw_len(block)) for block in blocks]
        if sum(sizes) > bytes_max:
            raise CorruptRecordBatch(f"SNAPPY records claim {sum(sizes)} bytes, decompressed_bytes_max is {bytes_max}")
        out, position = np.empty(sum(sizes), np.uint8).data, 0
        for block, size in zip(blocks, sizes, strict=True):
            cramjam.snappy.decompress_raw_into(block, out[position : position + size])
            position += size
    except cramjam.DecompressionError as error:
        raise CorruptRecordBatch(f"SNAPPY records do not decompress: {error}") from error
    return out


def _xerial_blocks(view: memoryview) -> list[memoryview]:
    blocks, position = list[memoryview](), len(_XERIAL_HEADER)
    while position < len(view):
        start = position + _XERIAL_LENGTH.size
        if view[position:start] == _XERIAL_MAGIC[:4]:  # another stream
            position += len(_XERIAL_HEADER)
            continue
        if start > len(view):
            if blocks:
                break
            raise CorruptRecordBatch(f"SNAPPY block at byte {position} has no room for its length")
        (length,) = _XERIAL_LENGTH.unpack_from(view, position)
        position = start + length
        if length <= 0 or position > len(view):
            raise CorruptRecordBatch(f"SNAPPY block at byte {start} claims {length} of {len(view) - start} bytes")
        blocks.append(view[start:position])
    return blocks


_COLUMNS_WORTHWHILE = 160  # records; for fewer, a hundred numpy calls cost more than decoding one by one


class RecordBatch:
    """The bytes of one batch and their header. The constructor does not check the CRC; `check` does. is_own: it was
    encoded here, so its records can be decoded. Raises CorruptRecordBatch unless `data` is exactly one batch by its
    length field.
    """

    __slots__ = ("data", "header", "is_own")

    def __init__(self, data: Buffer, header: BatchHeader | None = None, *, is_own: bool = False) -> None:
        self.data: Buffer = data
        self.header: BatchHeader = BatchHeader.parse(data) if header is None else header
        self.is_own = is_own
        if self.header.batch_length + layout.LENGTH_ENDS_AT != len(data):
            raise CorruptRecordBatch(f"{len(data)} bytes, the length field says {self.header.size_bytes}")

    @classmethod
    def check(cls, data: Buffer, header: BatchHeader | None = None) -> "RecordBatch":
        """`data` as a batch whose length, magic and CRC were verified; raises CorruptRecordBatch with the reason.

        `header`: of these very bytes, if they were parsed before.
        """
        batch = cls(data, header)
        crc = crc32c(data, layout.CRC_COVERS_FROM)
        if crc != batch.header.crc:
            raise CorruptRecordBatch(f"CRC-32C is {crc:#010x}, the header says {batch.header.crc:#010x}")
        return batch

    def __len__(self) -> int:
        return self.header.record_count

    def __repr__(self) -> str:
        first, end = self.header.base_offset, self.header.next_offset
        return f"RecordBatch([{first}, {end}), {len(self)} records, {self.header.size_bytes} bytes)"

    def records(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> list[Record]:
        """Every record, offsets ascending. A control batch gives its markers: see `header.is_control`.

        Raises CorruptRecordBatch, also if the records take more than `decompressed_bytes_max`, and UnsupportedCodec.
        """
        return list(self.rows(decompressed_bytes_max=decompressed_bytes_max))

    def rows(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> RecordRows:
        """The same, each Record made only when it is taken; decoding happens first. Raises as `records`."""
        header, payload = self.header, self.payload(decompressed_bytes_max=decompressed_bytes_max)
        if (uniform := read_uniform(header, payload)) is not None:
            return uniform
        if header.record_count < _COLUMNS_WORTHWHILE:
            data = payload.tobytes()
            few = read_small_batch(header, data)
            return few if few is not None else scanned_rows(scan(header, data), data, header.timestamp_type)
        return rows_of_columns(decode_columns(header, payload), header.timestamp_type)

    def columns(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> RecordColumns:
        """The same records as numpy columns of positions, without Python code per record. Raises as `records` does."""
        return decode_columns(self.header, self.payload(decompressed_bytes_max=decompressed_bytes_max))

    def payload(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> memoryview:
        """The encoded records, decompressed; no copy where they are not compressed. Raises as `records` does."""
        records = memoryview(self.data)[layout.HEADER_BYTES :]
        return decompress(self.header.codec, records, decompressed_bytes_max)

    def stamp(self, base_offset: int, leader_epoch: int) -> None:
        """Write base offset and leader epoch; in place where `data` is writable, else into a copy of its own.

        The CRC covers neither. A batch that has both already, as a leader's at its replica, is not changed.
        """
        if self.header.base_offset == base_offset and self.header.leader_epoch == leader_epoch:
            return
        layout.stamp(self._writable(), base_offset, leader_epoch)
        header = self.header
        fields = (base_offset, header.batch_length, leader_epoch, *header[3:])
        self.header = tuple.__new__(BatchHeader, fields)  # a quarter of `_replace`

    def with_producer(self, producer_id: int, producer_epoch: int, base_sequence: int) -> bytearray | memoryview:
        """This batch as an idempotent producer sends it: base offset 0, the producer's fields, the CRC redone.

        The records are not encoded again. A batch in writable memory, a memoryview's, is changed in its place, because
        a copy costs as much as the new CRC; another stays as it is.
        """
        data = self.data if isinstance(self.data, memoryview) and not self.data.readonly else bytearray(self.data)
        layout.stamp(data, 0, -1)
        layout.write_producer(data, producer_id, producer_epoch, base_sequence)
        layout.write_crc(data, crc32c(data, layout.CRC_COVERS_FROM))
        return data

    def _writable(self) -> bytearray | memoryview:
        if isinstance(self.data, bytes) or (isinstance(self.data, memoryview) and self.data.readonly):
            self.data = bytearray(self.data)
        return self.data
