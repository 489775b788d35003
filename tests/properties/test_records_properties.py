"""Any records survive the trip; the decoders agree on everything; no bytes whatever raise a foreign error."""

import random
from contextlib import suppress

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from pushrep.errors import BadArgument
from pushrep.records import Codec, CorruptRecordBatch, HeaderColumn, RecordBatch, UnsupportedCodec, encode_batch
from pushrep.records.columns import columns_by_arrays, columns_of_scan, rows_of_columns
from pushrep.records.decoder import read_small_batch, scan, scanned_rows
from pushrep.records.encoder import encode_alone, header_columns
from pushrep.records.header import CRC_COVERS_FROM, HEADER_BYTES, LENGTH, LENGTH_AT, LENGTH_ENDS_AT, crc32c, write_crc

# Sizes around every change of a varint's width, and few distinct ones, so that runs of equal records occur.
SIZES = st.sampled_from(
    [0, 1, 2, 20, 30, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 100, 127, 128, 300, 8190, 8192, 9000]
)
SMALL_SIZES = st.sampled_from([0, 1, 20, 56, 61, 63, 64, 127, 128, 300])
BLOBS = st.one_of(
    st.none(), st.binary(max_size=5), st.builds(lambda size, byte: bytes([byte]) * size, SIZES, st.integers(0, 255))
)
TIMES = st.one_of(
    st.integers(-1, 3),
    st.integers(1_700_000_000_000, 1_700_000_000_100),
    st.integers(-(1 << 62), (1 << 62) - 1),
)
HEADERS = st.lists(st.tuples(st.text(max_size=3), BLOBS), max_size=3).map(tuple)


@st.composite
def batches(draw):
    """(arguments of encode_batch, the records as tuples): ragged records, or long runs of equal ones."""
    count = draw(st.one_of(st.integers(1, 8), st.integers(1, 200)))

    def column(each):
        few = draw(st.lists(each, min_size=1, max_size=4))
        chosen = draw(st.lists(st.sampled_from(few), max_size=count))
        return (chosen + [few[0]] * count)[:count]

    values, keys, times, headers = column(BLOBS), column(BLOBS), column(TIMES), column(HEADERS)
    arguments = {
        "values": values,
        "keys": keys,
        "timestamps_ms": times,
        "headers": headers,
        "base_offset": draw(st.integers(0, 1 << 62)),
        "codec": draw(st.sampled_from(Codec)),
    }
    base = arguments["base_offset"]
    return arguments, [(base + n, times[n], keys[n], values[n], headers[n]) for n in range(count)]


def plain(records):
    return [(r.offset, r.timestamp_ms, r.key, r.value, r.headers) for r in records]


@given(batches())
def test_what_goes_in_comes_out_by_either_decoder(case):
    arguments, expected = case
    batch = RecordBatch.check(bytes(encode_batch(**arguments).data))
    assert plain(one_by_one(batch)) == expected
    assert plain(by_columns(batch)) == expected
    assert plain(batch.records()) == expected
    found = few(batch)
    assert found == (None if any(each[4] for each in expected) else expected), "it is for whatever has no headers"


@st.composite
def like_headers(draw):
    """(arguments of encode_batch, its headers by column): headers of the same names in each record."""
    arguments, expected = draw(batches())
    columns = [
        HeaderColumn(name, tuple(draw(st.lists(each, min_size=len(expected), max_size=len(expected)))))
        for name in draw(st.lists(st.text(max_size=3), min_size=1, max_size=3))
        for each in [draw(st.sampled_from([BLOBS, st.binary(min_size=20, max_size=20)]))]
    ]
    each = zip(*(zip([one.name] * len(expected), one.values, strict=True) for one in columns), strict=True)
    return {**arguments, "headers": list(each)}, columns


@given(like_headers())
def test_headers_by_column_give_the_same_bytes(case):
    arguments, columns = case
    assert header_columns(arguments["headers"]) == columns
    by_column = encode_batch(**{**arguments, "headers": columns})
    assert by_column.data == encode_batch(**arguments).data


@given(batches())
def test_headers_have_columns_if_all_records_have_the_same_names(case):
    arguments, _ = case
    names = {tuple(name for name, _ in headers) for headers in arguments["headers"]}
    assert (header_columns(arguments["headers"]) is not None) == (len(names) == 1)


@pytest.mark.parametrize(
    "decode", [columns_by_arrays, lambda h, payload: columns_of_scan(scan(h, bytes(payload)), payload)]
)
@given(case=batches())
def test_columns_point_at_the_fields(decode, case):
    arguments, expected = case
    batch = encode_batch(**arguments)
    columns = decode(batch.header, batch.payload())
    for name in ("key_start", "value_length", "headers_count"):
        assert getattr(columns, name).dtype == np.int32
        assert getattr(columns, name).flags.c_contiguous
    data = bytes(columns.payload)

    def cut(starts, lengths):
        return [None if n < 0 else data[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]

    assert len(columns) == len(expected)
    assert columns.offsets.tolist() == [each[0] for each in expected]
    assert columns.timestamps_ms.tolist() == [each[1] for each in expected]
    assert cut(columns.key_start, columns.key_length) == [each[2] for each in expected]
    assert cut(columns.value_start, columns.value_length) == [each[3] for each in expected]
    assert columns.headers_count.tolist() == [len(each[4]) for each in expected]
    flat = columns.headers
    owners = [row for row, each in enumerate(expected) for _ in each[4]]
    assert flat.record.tolist() == owners
    assert cut(flat.name_start, flat.name_length) == [name.encode() for each in expected for name, _ in each[4]]
    assert cut(flat.value_start, flat.value_length) == [value for each in expected for _, value in each[4]]


def one_by_one(batch, bound=1 << 28):
    payload = batch.payload(decompressed_bytes_max=bound).tobytes()
    return scanned_rows(scan(batch.header, payload), payload, batch.header.timestamp_type)


def by_columns(batch, bound=1 << 28):
    columns = columns_by_arrays(batch.header, batch.payload(decompressed_bytes_max=bound))
    return rows_of_columns(columns, batch.header.timestamp_type)


def verdict(read, batch):
    """The records or the named refusal; anything else is a bug."""
    try:
        return plain(read(batch, 1 << 20))
    except (CorruptRecordBatch, UnsupportedCodec) as error:
        return type(error)


def few(batch, bound=1 << 28):
    found = read_small_batch(batch.header, batch.payload(decompressed_bytes_max=bound).tobytes())
    return None if found is None else plain(found)


def both_decoders(batch):
    known = verdict(by_columns, batch)
    assert known == verdict(one_by_one, batch)
    with suppress(CorruptRecordBatch, UnsupportedCodec):  # of the codec
        found = few(batch, 1 << 20)
        assert found is None or found == known, "what it does not leave to the others is what they read"


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_by_name(data):
    try:
        batch = RecordBatch.check(data)
    except CorruptRecordBatch:
        return
    both_decoders(batch)


@given(st.binary(max_size=200), st.integers(0, 40), st.sampled_from(range(8)))
def test_arbitrary_records_under_a_valid_checksum(records, count, codec):
    data = forged(records, count, codec)
    try:
        batch = RecordBatch.check(data)
    except CorruptRecordBatch:
        return
    both_decoders(batch)


def forged(records, count, attributes):
    header = encode_batch([b""], timestamps_ms=0).header
    header = header._replace(record_count=count, last_offset_delta=max(count - 1, 0), attributes=attributes)
    data = bytearray(header.pack() + records)
    LENGTH.pack_into(data, LENGTH_AT, len(data) - LENGTH_ENDS_AT)
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    return data


@settings(max_examples=settings().max_examples * 3 // 2)
@given(batches(), st.integers(0, 1 << 32))
@example(({"values": [b"v"], "timestamps_ms": 0}, None), 0)
def test_damaged_records_under_a_valid_checksum(case, seed):
    hold_damaged(random.Random(seed), encode_batch(**case[0]).data)


def test_n8_many_damaged_records_under_a_valid_checksum(torture):
    """The same of a few batches of each codec, so often that making them would take most of the time."""
    chance = torture.random("batches")
    records = [{"values": [b"value"] * 20}, {"values": [b"", None, b"v" * 70], "keys": [None, b"k", b""]}]
    records.append({"values": [b"v"] * 3, "headers": [[("a", b"b"), ("", None)], [], [("c", b"")]]})
    kept = [encode_batch(**one, timestamps_ms=7, codec=codec).data for one in records for codec in Codec]
    for _ in range(torture.count(1_500, 200_000)):
        hold_damaged(chance, chance.choice(kept))


def hold_damaged(chance, whole):
    """A few bytes of a real batch are changed, cut or doubled, and the checksum is made to fit."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(CRC_COVERS_FROM if chance.random() < 0.3 else HEADER_BYTES, len(data) + 1)
        what = chance.random()
        if what < 0.6 and at < len(data):
            data[at] = chance.choice([0, 1, 2, 0x7F, 0x80, 0xFF, data[at] ^ (1 << chance.randrange(8))])
        elif what < 0.8:
            del data[at : at + chance.randint(1, 9)]
        else:
            data[at:at] = chance.choice([b"\xff" * 12, b"\x00", b"\xfe\xff\xff\xff\x0f", data[at : at + 7]])
    if len(data) < HEADER_BYTES:
        return
    LENGTH.pack_into(data, LENGTH_AT, len(data) - LENGTH_ENDS_AT)
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    try:
        batch = RecordBatch.check(data)
    except CorruptRecordBatch:
        return
    both_decoders(batch)


@settings(max_examples=settings().max_examples // 2)
@given(st.data(), st.one_of(st.integers(1, 10), st.integers(250, 600), st.just(8_300)), st.integers())
def test_equal_sized_records_give_the_same_bytes_by_either_encoder(data, count, seed):
    """The columns in one piece, and the same columns with an odd record behind them, which forces the general path."""
    # So many records reach the next width of an offset's varint; large ones beside them would be 200 MB an example.
    sizes = SIZES if count < 8_000 else SMALL_SIZES
    key_size, header_size = data.draw(st.one_of(st.none(), sizes)), data.draw(st.one_of(st.none(), sizes))
    times = data.draw(st.lists(TIMES, max_size=4))
    size, chance = data.draw(sizes), random.Random(seed)
    values = [chance.randbytes(size) for _ in range(count)]
    keys = None if key_size is None else [chance.randbytes(key_size) for _ in range(count)]
    metadata = None if header_size is None else [chance.randbytes(header_size) for _ in range(count)]
    stamps = [times[n * len(times) // count] for n in range(count)] if times else 1_700_000_000_000
    fast = encode_batch(
        values,
        keys=b"".join(keys) if keys is not None else None,
        headers=None if metadata is None else HeaderColumn("stream-metadata", b"".join(metadata)),
        timestamps_ms=np.array(stamps, np.int64) if times else stamps,
    )
    lists = None if metadata is None else [(("stream-metadata", each),) for each in metadata]
    odd = encode_batch(
        [*values, None],
        keys=None if keys is None else [*keys, None],
        headers=None if lists is None else [*lists, ()],
        timestamps_ms=[*stamps, stamps[0]] if times else stamps,
    )
    payload = bytes(fast.payload())
    assert payload == bytes(odd.payload())[: len(payload)]
    assert plain(fast.records()) == plain(odd.records()[:-1])
    assert fast.header.max_timestamp_ms == odd.header.max_timestamp_ms


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@given(data=st.binary(max_size=120))
@settings(max_examples=60)
def test_arbitrary_compressed_bytes_are_refused_by_name(codec, data):
    batch = RecordBatch(forged(data, 1, int(codec)))
    with suppress(CorruptRecordBatch):
        batch.payload(decompressed_bytes_max=1 << 16)


@given(st.binary(max_size=300) | st.sampled_from([bytes(8191), bytes(8192), bytes(1 << 20)]), st.integers())
def test_a_value_alone_gives_the_same_bytes_by_either_encoder(value, timestamp_ms):
    try:
        expected = encode_batch((value,), timestamps_ms=timestamp_ms)
    except BadArgument:
        with pytest.raises(BadArgument):
            encode_alone(value, timestamp_ms)
        return
    found = encode_alone(value, timestamp_ms)
    assert (type(found.data), found.data, found.header) == (bytearray, expected.data, expected.header)
