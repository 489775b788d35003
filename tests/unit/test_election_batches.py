"""Splitting the bytes of a request: many batches at once give the same result as one after the other, with damage,
too.
"""

import pytest

from pushrep.election.messages import batches_of
from pushrep.records import RecordBatch, encode_batch, header

COUNT = 40


@pytest.fixture(scope="module")
def data():
    batches = []
    for number in range(COUNT):
        batch = encode_batch([b"%d" % number * (1 + number % 3)], timestamps_ms=number)
        batch.stamp(number, 256)
        batches.append(bytes(batch.data))
    return b"".join(batches)


def one_by_one(data, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(header, "_RUN_MIN", len(data) + 1)
        return batches_of(data)


def test_all_at_once_is_one_by_one(data, monkeypatch):
    batches, is_whole = batches_of(data)
    assert is_whole
    assert (batches, is_whole) == one_by_one(data, monkeypatch)
    assert [batch.base_offset for batch in batches] == list(range(COUNT))
    assert b"".join(batch.data for batch in batches) == data
    assert all(RecordBatch(batch.data).header == batch.header for batch in batches)


def test_a_byte_that_is_changed_ends_it_at_the_same_batch(data, monkeypatch):
    taken = set()
    for at in range(0, len(data), 3):  # more than twenty in each batch
        broken = bytearray(data)
        broken[at] ^= 0x41
        found = batches_of(bytes(broken))
        assert found == one_by_one(bytes(broken), monkeypatch), f"byte {at}"
        taken.add(len(found[0]))
    assert taken >= set(range(COUNT)), "each batch was the broken one"


def test_a_cut_anywhere_ends_it_at_the_same_batch(data, monkeypatch):
    for size in range(0, len(data), 5):
        assert batches_of(data[:size]) == one_by_one(data[:size], monkeypatch), f"{size} bytes"


@pytest.mark.parametrize("count", [2, 31, 32, 33, 100])
def test_whether_each_begins_where_the_one_before_ends_is_said_of_few_and_of_many(count):
    made = [encode_batch([b"%03d" % n], timestamps_ms=1) for n in range(count)]
    for n, batch in enumerate(made):
        batch.stamp(n, 3)
    parts = [bytes(batch.data) for batch in made]
    assert header.split_batches(b"".join(parts)).joins
    if count > 2:
        assert not header.split_batches(b"".join([*parts[:-1], parts[0]])).joins
        assert not header.split_batches(b"".join([parts[1], parts[0], *parts[2:]])).joins


@pytest.mark.parametrize("count", [1, 40])
def test_a_batch_that_lacks_records_is_none_of_a_log(count):
    whole = bytes(encode_batch([b"a"] * 2, timestamps_ms=1).data)
    sparse = bytearray(encode_batch([b"a"], timestamps_ms=1).data)
    sparse[26] = 1  # the last offset's delta
    header.write_crc(sparse, header.crc32c(sparse, header.CRC_COVERS_FROM))
    data = whole * count + bytes(sparse)
    found = header.split_batches(data)
    assert (len(found.placed), found.why_not, found.is_cut) == (count, "1 records for 2 offsets", False)
    assert len(header.split_batches(data, of_log=False).placed) == count + 1, "a compacted topic's"
