"""One batch from the outside: what goes in comes out, and what is patched stays whole."""

import pytest

from pushrep.records import (
    HEADER_BYTES,
    BatchHeader,
    Codec,
    CorruptRecordBatch,
    HeaderColumn,
    Record,
    RecordBatch,
    TimestampType,
    UnsupportedCodec,
    encode_batch,
)

VALUES = [b"first", None, b"", b"x" * 70_000]
KEYS = [b"k" * 20, b"", None, b"key"]
HEADERS = [(), (("a", b"1"), ("a", None)), (("ü", b""),), ()]
TIMES = [1_700_000_000_000, 1_600_000_000_000, 1_800_000_000_000, -1]


@pytest.mark.parametrize("codec", Codec)
def test_everything_comes_back(codec):
    batch = encode_batch(
        VALUES, keys=KEYS, headers=HEADERS, timestamps_ms=TIMES, codec=codec, base_offset=40, leader_epoch=3
    )
    back = RecordBatch.check(bytes(batch.data))
    expected = [
        Record(40 + n, TIMES[n], TimestampType.CREATE_TIME, KEYS[n], VALUES[n], HEADERS[n]) for n in range(len(VALUES))
    ]
    assert back.records() == expected
    assert back.header == batch.header
    assert (len(back), back.header.codec, back.header.next_offset) == (4, codec, 44)
    assert back.header.max_timestamp_ms == max(TIMES)
    assert back.header.size_bytes == len(batch.data)


def test_keys_in_one_piece_equal_keys_in_a_list():
    keys = [bytes([n]) * 20 for n in range(200)]
    values = [b"v" * n for n in range(200)]
    one = encode_batch(values, keys=b"".join(keys), timestamps_ms=5)
    many = encode_batch(values, keys=keys, timestamps_ms=5)
    assert one.data == many.data


def test_a_header_column_equals_a_header_list():
    metadata = [bytes([n]) * 20 for n in range(200)]
    values = [b"v" * n for n in range(200)]
    column = HeaderColumn("stream-metadata", b"".join(metadata))
    lists = [[("stream-metadata", each)] for each in metadata]
    assert encode_batch(values, headers=column, timestamps_ms=5).data == (
        encode_batch(values, headers=lists, timestamps_ms=5).data
    )


def test_stamp_changes_offset_and_epoch_and_keeps_the_checksum():
    batch = encode_batch([b"a", b"b"], timestamps_ms=1)
    before = batch.data
    batch.stamp(1_000, 7)
    assert batch.data is before, "a bytearray is stamped in place"
    again = RecordBatch.check(batch.data)
    assert (again.header.base_offset, again.header.leader_epoch) == (1_000, 7)
    assert [record.offset for record in again.records()] == [1_000, 1_001]


def test_stamping_bytes_leaves_them_alone():
    data = bytes(encode_batch([b"a"], timestamps_ms=1).data)
    batch = RecordBatch(data)
    batch.stamp(9, 1)
    assert BatchHeader.parse(data).base_offset == 0
    assert RecordBatch.check(batch.data).header.base_offset == 9


def test_with_producer_gives_what_a_producer_sends():
    batch = encode_batch([b"a", b"b"], timestamps_ms=1, base_offset=500, leader_epoch=4)
    sent = RecordBatch.check(batch.with_producer(4711, 2, 90))
    header = sent.header
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4711, 2, 90)
    assert header.base_offset == 0
    assert [record.value for record in sent.records()] == [b"a", b"b"]
    assert RecordBatch.check(batch.data).header.producer_id == -1, "the batch itself is as it was"


def test_a_header_can_be_read_in_the_middle_of_a_file():
    first, second = encode_batch([b"a"], timestamps_ms=1), encode_batch([b"b"], timestamps_ms=2, base_offset=1)
    file = bytes(first.data) + bytes(second.data)
    assert BatchHeader.parse(file, len(first.data)) == second.header


@pytest.mark.parametrize(
    ("position", "replacement", "reason"),
    [
        (16, b"\x01", "magic 1"),
        (8, b"\0\0\0\x30", "length 48"),
        (0, b"\xff" * 8, "offsets -1"),
        (0, b"\x7f" + b"\xff" * 7, "out of range"),
        (12, b"\xff\xff\xff\xf0", "leader epoch -16"),
        (57, b"\0\0\0\x09", "9 records in 1 offsets"),
        (57, b"\xff\xff\xff\xff", "-1 records"),
        (23, b"\0\xff\xff\xff\0\0\0\0", None),
    ],
)
def test_an_impossible_field_is_named(position, replacement, reason):
    data = bytearray(encode_batch([b"a"], timestamps_ms=1).data)
    data[position : position + len(replacement)] = replacement
    with pytest.raises(CorruptRecordBatch, match=reason) as caught:
        RecordBatch.check(data)
    assert caught.value.reason


def test_a_count_that_the_bytes_cannot_hold_is_refused_by_the_header():
    data = bytearray(encode_batch([b"a"], timestamps_ms=1).data)
    data[23:27] = data[57:61] = b"\x7f\xff\xff\xf0"
    with pytest.raises(CorruptRecordBatch, match="can't fit"):
        BatchHeader.parse(data)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1])
def test_too_few_bytes_for_a_header(cut):
    data = encode_batch([b"a"], timestamps_ms=1).data[:cut]
    with pytest.raises(CorruptRecordBatch, match="less than a header"):
        BatchHeader.parse(data)


def test_a_batch_is_exactly_as_long_as_it_says():
    data = encode_batch([b"a"], timestamps_ms=1).data
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(CorruptRecordBatch, match="length field says"):
            RecordBatch(wrong)


def test_every_flipped_bit_under_the_checksum_is_seen():
    data = bytearray(encode_batch([b"ab"], keys=[b"k"], timestamps_ms=1).data)
    for position in range(17, len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(CorruptRecordBatch):
                RecordBatch.check(data)
            data[position] ^= 1 << bit
    RecordBatch.check(data)


def test_a_codec_from_the_future_is_no_corruption():
    batch = encode_batch([b"a"], timestamps_ms=1)
    header = batch.header._replace(attributes=6)
    with pytest.raises(UnsupportedCodec) as caught:
        RecordBatch(header.pack() + bytes(batch.data[HEADER_BYTES:])).records()
    assert caught.value.number == 6


def test_log_append_time_is_the_time_of_every_record():
    batch = encode_batch([b"a", b"b"], timestamps_ms=[5, 9])
    header = batch.header._replace(attributes=8, max_timestamp_ms=77)
    records = RecordBatch(header.pack() + bytes(batch.data[HEADER_BYTES:])).records()
    assert [(r.timestamp_ms, r.timestamp_type) for r in records] == [(77, TimestampType.LOG_APPEND_TIME)] * 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"values": [], "timestamps_ms": 1}, "at least one record"),
        ({"values": [b"a"], "timestamps_ms": [1, 2]}, "timestamps_ms: has 2 entries for 1"),
        ({"values": [b"a"], "timestamps_ms": []}, "timestamps_ms: has 0 entries for 1"),
        ({"values": [b"a"], "keys": [b"k", b"l"], "timestamps_ms": 1}, "keys: has 2 entries"),
        ({"values": [b"a", b"b"], "keys": b"123", "timestamps_ms": 1}, "keys: 3 bytes are not 2 pieces"),
        ({"values": [b"a"], "headers": [], "timestamps_ms": 1}, "headers: has 0 entries"),
        ({"values": [b"a"], "timestamps_ms": 1 << 62}, "timestamps_ms"),
    ],
)
def test_columns_of_different_length_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        encode_batch(**arguments)


def test_log_append_time_is_the_time_of_every_record_of_columns():
    """Of so many that numpy reads them."""
    values = [b"a" * (n % 3) for n in range(100)]
    batch = encode_batch(values, timestamps_ms=list(range(100)))
    header = batch.header._replace(attributes=8, max_timestamp_ms=77)
    assert [*RecordBatch(batch.data).columns().timestamps_ms] == list(range(100))
    assert [*RecordBatch(header.pack() + bytes(batch.data[HEADER_BYTES:])).columns().timestamps_ms] == [77] * 100


def test_a_batch_is_shown_by_its_offsets():
    batch = encode_batch([b"a", b"b"], timestamps_ms=1)
    assert repr(batch) == f"RecordBatch([0, 2), 2 records, {len(batch.data)} bytes)"
