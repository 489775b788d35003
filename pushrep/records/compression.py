"""The five codecs, by cramjam, in the framing that Kafka's own clients read.

gzip, zstd  one standard frame.
lz4         one LZ4 frame of independent blocks: Kafka's Java reader refuses linked ones.
snappy      xerial's framing, which Kafka's Java reader demands; raw snappy, which some clients write, is read too:
            | 82 S N A P P Y 00 | version i32 = 1 | compatible i32 = 1 | then per block: length i32, raw snappy |

Sizes in the input may be wrong: the output buffer never exceeds `bytes_max`.
"""

import struct
from typing import Any

import cramjam
import numpy as np

from pushrep.records.model import Buffer, Codec, CorruptRecordBatch

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
                raise CorruptRecordBatch(
                    f"{codec.name} records do not decompress into {bytes_max} bytes (decompressed_bytes_max): {error}"
                ) from error
            size = min(bytes_max, size * _GROWTH)
        else:
            return out.data[:written]


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
    blocks, position = [], len(_XERIAL_HEADER)
    while position < len(view):
        start = position + _XERIAL_LENGTH.size
        if start > len(view):
            raise CorruptRecordBatch(f"SNAPPY block at byte {position} has no room for its length")
        (length,) = _XERIAL_LENGTH.unpack_from(view, position)
        position = start + length
        if length <= 0 or position > len(view):
            raise CorruptRecordBatch(f"SNAPPY block at byte {start} claims {length} of {len(view) - start} bytes")
        blocks.append(view[start:position])
    return blocks
