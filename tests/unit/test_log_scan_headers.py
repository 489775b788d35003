"""The scan by headers gives what BatchHeader.parse takes in its place, wherever its windows begin and end."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.env import REAL_FILESYSTEM
from pushrep.log.directory_files import INDEX_SUFFIX, segment_path
from pushrep.log.indexes import IndexFile
from pushrep.log.segment import OFFSET_ENTRY, begin_near
from pushrep.log.walk import ScanRange, scan_headers
from pushrep.records import Codec, CorruptRecordBatch, encode_batch
from pushrep.records.header import HEADER_BYTES, BatchHeader


class Bytes:
    """A file in memory, which counts its reads."""

    def __init__(self, data):
        self.data, self.reads = bytes(data), 0

    def read_at(self, size, position):
        self.reads += 1
        return self.data[position : position + size]

    def size(self):
        return len(self.data)


def headers(file):
    return list(scan_headers(file, ScanRange(base_offset=0)))


def by_parse(data):
    """The expected result of the scan, header by header."""
    position, expected, epoch = 0, 0, -1
    while position + HEADER_BYTES <= len(data):
        try:
            header = BatchHeader.parse(data, position)
        except CorruptRecordBatch:
            return
        records = 0 if header.is_control else header.record_count
        size_bytes, offsets, before = header.size_bytes, (header.base_offset, header.next_offset), epoch
        if offsets[0] != expected or header.leader_epoch < before or position + size_bytes > len(data):
            return
        if header.record_count != offsets[1] - offsets[0]:
            return
        if offsets[1] > 1 << 31:  # too far from the segment's base for an index
            return
        yield position, *offsets, size_bytes, header.leader_epoch, records, header.max_timestamp_ms
        position, expected, epoch = position + size_bytes, offsets[1], header.leader_epoch


def batches(sizes, *, codecs=(Codec.NONE,)):
    """Neighbours of 1, 2, 3, 4, 1 ... records of so many bytes."""
    data, offset = bytearray(), 0
    for number, size in enumerate(sizes):
        codec = codecs[number % len(codecs)]
        batch = encode_batch([b"v" * size] * (1 + number % 4), codec=codec, timestamps_ms=1)
        batch.stamp(base_offset=offset, leader_epoch=number // 2)
        data, offset = data + batch.data, batch.header.next_offset
    return bytes(data)


@given(
    sizes=st.lists(st.sampled_from([0, 30, 1000, 5000, 30_000]), max_size=12),
    tail=st.sampled_from([b"", b"\0" * 200, b"\0" * 7]),
)
def test_every_batch_up_to_the_end_or_the_zeros(sizes, tail):
    data = batches(sizes, codecs=[Codec.NONE, Codec.NONE, Codec.GZIP]) + tail
    assert headers(Bytes(data)) == list(by_parse(data))
    assert len(list(by_parse(data))) == len(sizes)


_FIELDS = [">q", ">i", ">i", "b", ">I", ">h", ">i", ">q", ">q", ">q", ">h", ">i", ">i"]
_INTERESTING = [0, 1, -1, -2, 2, 7, 48, 49, 50, 127, 2**15 - 1, 2**31 - 2, 2**31 - 1, 2**63 - 2, 2**63 - 1, -(2**63)]


@given(data=st.data())
def test_it_ends_where_parse_refuses_whatever_the_fields_say(data):
    """One or two fields of the middle batch are anything that fits into them."""
    whole = batches([3, 5, 7], codecs=data.draw(st.sampled_from([[Codec.NONE], [Codec.GZIP]])))
    places = [found[0] for found in headers(Bytes(whole))]
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(_FIELDS) - 1))
        field = struct.Struct(_FIELDS[number])
        low, high = (
            (0, 2**32 - 1) if field.format == ">I" else (-(2 ** (8 * field.size - 1)), 2 ** (8 * field.size - 1) - 1)
        )
        fitting = [one for one in _INTERESTING if low <= one <= high]
        value = data.draw(st.sampled_from(fitting) | st.integers(low, high))
        field.pack_into(
            broken, places[1] + struct.calcsize(">" + "".join(f.strip(">") for f in _FIELDS[:number])), value
        )
    assert headers(Bytes(broken)) == list(by_parse(bytes(broken)))


def test_large_batches_cost_a_read_of_a_header_each_and_small_ones_share_a_window():
    large, small = Bytes(batches([20_000] * 10)), Bytes(batches([1] * 400))
    assert len(headers(large)) == 10
    assert large.reads == 11, "and one that finds the end"
    assert len(headers(small)) == 400
    assert small.reads == 3, "a header, as nothing is known yet, 400 in one window, and one that finds the end"


@pytest.mark.parametrize(
    ("entries", "position"),
    [
        ([], 0),
        ([(2, "batch 1")], "batch 1"),
        ([(1, "batch 1")], 0),  # another batch's last offset
        ([(2, "inside")], 0),
        ([(2, "beyond")], 0),
        ([(2, -5)], 0),
        ([(0, 0), (2, "batch 1"), (5, "batch 2")], "batch 1"),
    ],
)
def test_an_index_is_believed_if_the_batch_that_it_names_stands_there(tmp_path, entries, position):
    data = batches([100, 100, 100, 100])  # offsets 0, 1-2, 3-5, 6-9
    found = list(by_parse(data))
    names = {"batch 1": found[1][0], "batch 2": found[2][0], "inside": found[1][0] + 5, "beyond": len(data) + 100}
    index = IndexFile(REAL_FILESYSTEM, segment_path(tmp_path, 10, INDEX_SUFFIX), OFFSET_ENTRY)
    for last, at in entries:
        index.append(last, names.get(at, at))
    index.write()
    shifted = bytearray(data)
    for at, base, *_ in found:
        struct.pack_into(">q", shifted, at, base + 10)
    near = begin_near(REAL_FILESYSTEM, tmp_path, Bytes(shifted), ScanRange(base_offset=10), 14)
    assert (near.position, near.first_offset) == (names.get(position, position), 11 if position else 10)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129, 1000])
def test_an_entry_is_found_among_few_and_among_many(tmp_path, count):
    index = IndexFile(REAL_FILESYSTEM, tmp_path / "0.index", OFFSET_ENTRY)
    for number in range(count):
        index.append(3 * number + 1, 100 * number)
    index.write()
    for key in range(3 * count + 3):
        number = (key - 1) // 3 if key < 3 * count else count - 1
        assert index.floor(key) == ((3 * number + 1, 100 * number) if number >= 0 else None), key


@pytest.mark.parametrize(("end_offset", "count"), [(None, 3), (6, 3), (5, 2), (3, 2), (1, 1), (0, 0)])
def test_no_batch_reaches_into_the_next_segment(end_offset, count):
    data = Bytes(batches([3, 5, 7]))  # offsets 0, 1-2, 3-5
    assert len(list(scan_headers(data, ScanRange(base_offset=0, end_offset=end_offset)))) == count
