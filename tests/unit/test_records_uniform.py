"""Runs of like records: read in a few looks where they are what they seem, and left to the other decoders else."""

import pytest

from pushrep.records import Codec, CorruptRecordBatch, RecordBatch, TimestampType, encode_batch
from pushrep.records.columns import columns_by_arrays, rows_of_columns
from pushrep.records.decoder import RecordCursor, read_uniform, scan
from pushrep.records.varint import varint


def alike(batch):
    found = read_uniform(batch.header, batch.payload())
    return None if found is None else list(found)


def by_columns(batch):
    return list(rows_of_columns(columns_by_arrays(batch.header, batch.payload()), batch.header.timestamp_type))


@pytest.mark.parametrize(
    ("count", "size"),
    [
        *[(count, size) for count in (16, 63, 64, 65, 80, 300, 8_191, 8_192, 8_300) for size in (0, 1, 64)],
        (16, 9_000),
        (80, 9_000),
    ],
)
@pytest.mark.parametrize("key", [None, b"", b"k" * 63, b"k" * 64])
def test_equal_records_are_read_at_once(count, key, size):
    keys = None if key is None else [key[:-1] + bytes([row % 256])[: len(key)] for row in range(count)]
    values = [bytes([row % 251]) * size for row in range(count)]
    batch = encode_batch(values, keys=keys, timestamps_ms=7, base_offset=1 << 40)
    found = alike(batch)
    assert found == by_columns(batch) == batch.records()
    assert [record.value for record in found] == values
    assert [record.key for record in found] == (keys or [None] * count)


def test_null_values_are_read_at_once():
    batch = encode_batch([None] * 100, keys=[b"key"] * 100, timestamps_ms=7)
    assert {record.value for record in alike(batch)} == {None}


@pytest.mark.parametrize("codec", Codec)
def test_whatever_the_codec(codec):
    batch = encode_batch([b"value"] * 200, timestamps_ms=7, codec=codec)
    assert alike(batch) == by_columns(batch)


@pytest.mark.parametrize(
    "times",
    [
        [1_000 + row % 60 for row in range(200)],
        [1_000 - row % 60 for row in range(200)],
        [1_000 + 200 * (row > 80) for row in range(200)],
        [1_000] * 80 + [1_001] * 120,
        [-(1 << 61)] + [1 << 61] * 199,
    ],
    ids=["ascending", "descending", "wider later", "another from the middle", "far apart"],
)
def test_times_may_differ(times):
    batch = encode_batch([b"value"] * len(times), timestamps_ms=times)
    found = alike(batch)
    assert (found is None) == (times[0] < 0), "a run of one record is none"
    assert found is None or [record.timestamp_ms for record in found] == times
    assert [record.timestamp_ms for record in batch.records()] == times


def test_times_beyond_64_bits_are_left_to_those_who_refuse_them():
    for times in ([1_000] * 100, list(range(1_000, 1_060))):
        batch = encode_batch([b"value"] * len(times), timestamps_ms=times)
        assert alike(batch) is not None
        batch.header = batch.header._replace(base_timestamp_ms=(1 << 63) - 1 - (0 if len(times) == 60 else -1))
        assert alike(batch) is None


@pytest.mark.parametrize("time_type", TimestampType)
def test_one_time_that_is_no_number_of_64_bits_is_refused_though_the_append_set_the_times(time_type):
    def record(row, last_byte):
        fields = b"\0" + b"\xfe" + b"\xff" * 8 + bytes([last_byte]) + varint(row) + varint(-1) + varint(-1) + b"\0"
        return varint(len(fields)) + fields

    header = encode_batch([b""] * 40, timestamps_ms=1).header._replace(attributes=time_type << 3)
    payload = b"".join(record(row, 2 if row == 30 else 1) for row in range(40))
    with pytest.raises(CorruptRecordBatch):
        scan(header, payload)
    assert read_uniform(header, memoryview(payload)) is None, "it is left to those who refuse it"


def test_the_time_of_the_append_is_that_of_the_header():
    batch = encode_batch([b"value"] * 100, timestamps_ms=list(range(100, 200)))
    batch.header = batch.header._replace(attributes=batch.header.attributes | 8, max_timestamp_ms=5)
    found = alike(batch)
    assert {(record.timestamp_ms, record.timestamp_type) for record in found} == {(5, TimestampType.LOG_APPEND_TIME)}


def test_records_of_different_sizes_headers_and_holes_are_for_the_others():
    ragged = encode_batch([b"v" * (row % 40) for row in range(200)], timestamps_ms=7)
    with_headers = encode_batch([b"v"] * 200, headers=[[("a", b"b")]] * 200, timestamps_ms=7)
    few = encode_batch([b"v"] * 15, timestamps_ms=7)
    with_holes = encode_batch([b"v"] * 200, timestamps_ms=7)
    with_holes.header = with_holes.header._replace(last_offset_delta=300)
    for batch in (ragged, with_headers, few, with_holes):
        assert alike(batch) is None
        assert len(batch.records()) == len(batch)


def test_two_sizes_are_two_runs():
    values = [b"short"] * 100 + [b"and long"] * 100 + [b"short"] * 100
    batch = encode_batch(values, timestamps_ms=7)
    assert [record.value for record in alike(batch)] == values


def test_one_odd_record_ends_the_run():
    for odd in (b"v" * 6, b"", None):
        for row in (1, 40, 98, 99):
            values = [b"value"] * 100
            values[row] = odd
            batch = encode_batch(values, timestamps_ms=7)
            assert alike(batch) is None or alike(batch) == by_columns(batch)
            assert [record.value for record in batch.records()] == values


def test_a_changed_byte_is_seen_or_belongs_to_a_key_value_or_time(torture):
    """The codec returns what the other decoders read, or refuses, for any bytes in place of lengths and offsets."""
    chosen = torture.random("alike")
    answered = 0
    for number in range(torture.count(400, 20_000)):
        count, size, key = chosen.choice([20, 70, 200]), chosen.choice([0, 3, 70]), chosen.choice([None, b"", b"key"])
        times = 7 if number % 2 else [chosen.randint(0, 60) for _ in range(count)]
        batch = encode_batch([bytes(size)] * count, keys=None if key is None else [key] * count, timestamps_ms=times)
        data = bytearray(batch.data)
        for _ in range(chosen.choice([1, 1, 1, 2, 5])):
            at = chosen.randrange(61, len(data))
            data[at] = chosen.choice([0, 1, 2, 3, 127, 128, 255, data[at] ^ 1 << chosen.randrange(8)])
        broken = RecordBatch(data, batch.header)
        try:
            expected = by_columns(broken)
        except CorruptRecordBatch:
            expected = None
        found = alike(broken)
        assert found is None or found == expected
        answered += found is not None
    assert answered, "some changes are of a value or a time"


def test_a_cut_gives_the_records_between_and_a_cursor_the_place_behind_the_last_one_taken():
    batch = encode_batch([b"%d" % row for row in range(10, 90)], timestamps_ms=7, base_offset=500)
    whole = batch.rows()
    assert whole.between(0, 1 << 60) is whole
    for start, end in ((500, 501), (510, 530), (400, 503), (579, 999), (520, 520)):
        cut = whole.between(start, end)
        assert len(cut) == len(list(cut))
        assert list(cut) == [record for record in batch.records() if start <= record.offset < end]
    cursor = RecordCursor(505, whole.between(510, 512))
    assert cursor.position == 505
    assert [(record.offset, cursor.position) for record in cursor.records] == [(510, 511), (511, 512)]
    assert cursor.position == 512
    assert RecordCursor(7).position == 7
    assert list(RecordCursor(7).records) == []
