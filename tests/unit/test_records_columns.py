"""Columns at the places where the walk changes its gait, and over every kind of buffer."""

import mmap

import numpy as np
import pytest

from pushrep.records import (
    HEADER_BYTES,
    HEADER_OVERHEAD_BYTES_MAX,
    RECORD_OVERHEAD_BYTES_MAX,
    CorruptRecordBatch,
    RecordBatch,
    encode_batch,
)
from pushrep.records.encoder import encode_concatenating, general_heads, header_tails
from pushrep.records.header import CRC_COVERS_FROM, LENGTH, LENGTH_AT, LENGTH_ENDS_AT, crc32c, write_crc


def values_of(batch):
    columns = batch.columns()
    data = bytes(columns.payload)
    spans = zip(columns.value_start.tolist(), columns.value_length.tolist(), strict=True)
    return [data[start : start + length] for start, length in spans]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129, 1_000, 20_000])
def test_equal_records_across_wider_offset_deltas(count):
    values = [b"%020d" % n for n in range(count)]
    batch = encode_batch(values, timestamps_ms=7, base_offset=1 << 40)
    assert values_of(batch) == values
    assert batch.columns().offsets.tolist() == list(range(1 << 40, (1 << 40) + count))
    assert [record.value for record in batch.records()] == values


@pytest.mark.parametrize("size", [0, 1, 63, 64, 8_191, 8_192, 20_000])
@pytest.mark.parametrize("keys", [None, b"k" * 20, b"k" * 64])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 255, 256, 1_025])
def test_equal_records_have_the_bytes_that_any_others_have(size, keys, count):
    """From a table or part by part: what is behind the first value differs in nothing but the way there."""
    values = [bytes([n % 256]) * size for n in range(count)]
    batch = encode_batch(values, keys=None if keys is None else keys * count, timestamps_ms=7)
    heads = general_heads(count, None if keys is None else [keys] * count, None)
    tails = header_tails(None)
    assert bytes(batch.data[HEADER_BYTES:]) == bytes(encode_concatenating(heads, values, tails, 0))
    assert values_of(RecordBatch.check(bytes(batch.data))) == values


def test_runs_between_ragged_stretches():
    values = [b"equal" * 20] * 700 + [b"x" * (n * 37 % 301) for n in range(1_500)] + [b"equal"] * 900 + [b"y" * 9_000]
    batch = encode_batch(values, timestamps_ms=7)
    assert values_of(batch) == values


def test_a_record_with_very_many_headers():
    headers = [[("name", b"%d" % n) for n in range(500)]] + [[("one", None)]] * 200
    batch = encode_batch([b"v"] * 201, headers=headers, timestamps_ms=7)
    assert [list(record.headers) for record in batch.records()] == headers
    flat = batch.columns().headers
    assert len(flat) == 700
    assert np.bincount(flat.record).tolist() == [500] + [1] * 200


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer(kind):
    values = [b"a" * 30, None, b"b"] * 60
    data = kind(bytes(encode_batch(values, timestamps_ms=7).data))
    batch = RecordBatch.check(data)
    assert [record.value for record in batch.records()] == values
    assert batch.columns().value_length.tolist() == [30, -1, 1] * 60


def test_a_slice_of_a_mapped_file(tmp_path):
    data = bytes(encode_batch([b"v" * 100] * 300, timestamps_ms=7).data)
    path = tmp_path / "segment"
    path.write_bytes(b"before" + data + b"behind")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)[6 : 6 + len(data)]
        assert len(RecordBatch.check(view).records()) == 300
        view.release()


def test_a_batch_that_compaction_emptied_has_no_records():
    header = encode_batch([b"v"], timestamps_ms=7).header._replace(record_count=0, last_offset_delta=9)
    data = bytearray(header.pack())
    LENGTH.pack_into(data, LENGTH_AT, len(data) - LENGTH_ENDS_AT)
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    batch = RecordBatch.check(data)
    assert batch.records() == []
    assert len(batch.columns()) == 0
    assert batch.header.next_offset == 10


def test_header_names_that_are_not_utf8_are_read_as_kafka_reads_them():
    for count in (1, 300):
        batch = encode_batch([b"v"] * count, headers=[[("name", b"")]] * count, timestamps_ms=7)
        data = bytearray(bytes(batch.data).replace(b"name", b"n\xffme"))
        write_crc(data, crc32c(data, CRC_COVERS_FROM))
        assert RecordBatch.check(data).records()[-1].headers == (("n\ufffdme", b""),)


@pytest.mark.parametrize("count", [3, 300])
def test_offsets_that_do_not_ascend_are_refused(count):
    batch = encode_batch([b"value"] * count, timestamps_ms=7)
    data = bytearray(batch.data)
    size = len(encode_batch([b"value"], timestamps_ms=7).data) - 61
    data[61 + 2 * size : 61 + 3 * size] = data[61 + size : 61 + 2 * size]
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    for read in (RecordBatch.check(data).records, RecordBatch.check(data).columns):
        with pytest.raises(CorruptRecordBatch, match="offset delta"):
            read()


def test_no_record_exceeds_the_promised_overhead():
    far = [0, (1 << 62) - 1]
    batch = encode_batch([b"v" * 300] * 2, keys=[b"k"] * 2, headers=[[("h", b"x")]] * 2, timestamps_ms=far)
    one = RECORD_OVERHEAD_BYTES_MAX + 300 + 1 + HEADER_OVERHEAD_BYTES_MAX + 2
    assert len(batch.payload()) <= 2 * one
