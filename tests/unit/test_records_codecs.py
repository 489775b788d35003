"""Compression: the framings that Kafka reads, and no buffer larger than allowed, whatever the input claims."""

import struct

import cramjam
import pytest

from pushrep.records import Codec, CorruptRecordBatch, RecordBatch, encode_batch
from pushrep.records.batch import compress, decompress

COMPRESSED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
DATA = bytes(range(256)) * 1_000
MEBIBYTE = 1 << 20


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", [0, 1, 100, 32 << 10, (32 << 10) + 1, 256_000])
def test_round_trip(codec, size):
    packed = compress(codec, memoryview(DATA[:size]))
    assert bytes(decompress(codec, packed)) == DATA[:size]


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_bomb_stops_at_the_bound(codec):
    bomb = compress(codec, memoryview(bytes(64 * MEBIBYTE)))
    with pytest.raises(CorruptRecordBatch, match="decompressed_bytes_max"):
        decompress(codec, bomb, MEBIBYTE)
    assert len(decompress(codec, bomb, 64 * MEBIBYTE)) == 64 * MEBIBYTE, "the bound itself is allowed"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_broken_data_is_refused_by_name(codec):
    packed = bytes(compress(codec, memoryview(DATA)))
    for broken in (packed[:-9], packed[: len(packed) // 2], b"", b"\xff" * 40):
        with pytest.raises(CorruptRecordBatch, match=codec.name):
            decompress(codec, broken)


def test_a_small_guess_grows_to_the_bound():
    assert len(decompress(Codec.ZSTD, compress(Codec.ZSTD, memoryview(bytes(10 * MEBIBYTE))))) == 10 * MEBIBYTE


def test_snappy_is_framed_as_javas_reader_wants_it():
    packed = bytes(compress(Codec.SNAPPY, memoryview(DATA)))
    assert packed[:16] == bytes.fromhex("82534e41505059000000000100000001")
    (length,) = struct.unpack_from(">i", packed, 16)
    assert bytes(cramjam.snappy.decompress_raw(packed[20 : 20 + length])) == DATA[: 32 << 10]


def test_raw_snappy_is_read_too():
    assert bytes(decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(DATA)))) == DATA


@pytest.mark.parametrize("codec", COMPRESSED)
def test_frames_one_behind_the_other_are_read_as_one_up_to_the_bound(codec):
    packed = b"".join(bytes(compress(codec, memoryview(DATA[:size]))) for size in (1_000, 100_000))
    assert bytes(decompress(codec, packed, 101_000)) == DATA[:1_000] + DATA[:100_000]
    with pytest.raises(CorruptRecordBatch, match="decompressed_bytes_max"):
        decompress(codec, packed, 100_999)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4])
@pytest.mark.parametrize("behind", [bytes(3), bytes(700), b"no frame begins here"])
def test_bytes_behind_the_last_frame_are_passed_over_up_to_the_bound(codec, behind):
    packed = bytes(compress(codec, memoryview(DATA))) + behind
    assert bytes(decompress(codec, packed, len(DATA))) == DATA
    with pytest.raises(CorruptRecordBatch, match="decompressed_bytes_max"):
        decompress(codec, packed, len(DATA) - 1)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (b"\0\0", "no room for its length"),
        (struct.pack(">i", 50) + b"x", "claims 50 of 1 bytes"),
        (struct.pack(">i", -1), "claims -1"),
        (struct.pack(">i", 0), "claims 0"),
        (struct.pack(">i", 6) + b"\xff\xff\xff\xff\x0f\x00", "decompressed_bytes_max"),
        (struct.pack(">i", 3) + b"\x05\xff\xff", "do not decompress"),
    ],
)
def test_wrong_snappy_blocks_are_named(blocks, reason):
    with pytest.raises(CorruptRecordBatch, match=reason):
        decompress(Codec.SNAPPY, bytes.fromhex("82534e41505059000000000100000001") + blocks, MEBIBYTE)


def test_lz4_blocks_stand_alone():
    """Kafka's Java reader does not support linked blocks, and needs version 1 in the frame's flags."""
    packed = bytes(compress(Codec.LZ4, memoryview(DATA)))
    assert packed[:4] == bytes.fromhex("04224d18")
    flags = packed[4]
    assert flags >> 6 == 1, "version"
    assert flags & 0x20, "independent blocks"
    assert not flags & 0x04, "no content checksum"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_the_bound_is_the_callers(codec):
    batch = encode_batch([bytes(3 * MEBIBYTE)], timestamps_ms=1, codec=codec)
    back = RecordBatch.check(bytes(batch.data))
    for read in (back.records, back.columns, back.payload):
        with pytest.raises(CorruptRecordBatch, match="decompressed_bytes_max"):
            read(decompressed_bytes_max=MEBIBYTE)
    assert back.records()[0].value == bytes(3 * MEBIBYTE)


def test_a_count_beyond_the_decompressed_bytes_is_refused_before_anything_is_sized_by_it():
    batch = encode_batch([b"a"], timestamps_ms=1, codec=Codec.ZSTD)
    header = batch.header._replace(record_count=(1 << 31) - 1, last_offset_delta=(1 << 31) - 2)
    forged = RecordBatch(header.pack() + bytes(batch.data[61:]))
    for read in (forged.records, forged.columns):
        with pytest.raises(CorruptRecordBatch, match="can't fit"):
            read()
