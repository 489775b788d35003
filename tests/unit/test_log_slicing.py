"""LogSlices: what is sent by sendfile are the batches that `read` gives, found by their headers alone."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import segment_path
from pushrep.log.reader import LogSlices


def bytes_of(found):
    return found.file.read_at(found.size_bytes, found.position)


def walk(log, max_bytes, offset=0):
    """Every slice from `offset` to the log's end."""
    slices = log.slices()
    while offset < log.log_end_offset:
        found = slices.read(offset, log.log_end_offset, max_bytes)
        yield found
        assert found.end_offset > offset, "it goes on"
        offset = found.end_offset


def fill(log, sizes):
    for size in sizes:
        log.append([os.urandom(size)] * 3, durability=Durability.BUFFERED)


@given(
    sizes=st.lists(st.sampled_from([1, 100, 1500, 6000, 70_000]), min_size=1, max_size=25),
    segment_bytes=st.sampled_from([250_000, 1 << 30]),
    preallocate_bytes=st.sampled_from([0, 1 << 20]),
    max_bytes=st.sampled_from([1, 5000, 90_000, 1 << 20]),
)
def test_the_slices_are_the_log(tmp_path_factory, sizes, segment_bytes, preallocate_bytes, max_bytes):
    config = LogConfig(segment_bytes=segment_bytes, preallocate_bytes=preallocate_bytes)
    with SegmentLog.open(tmp_path_factory.mktemp("log") / "orders-0", config) as log:
        fill(log, sizes)
        batches = {batch.header.base_offset: batch for batch in log.batches(0)}
        for found in walk(log, max_bytes):
            within = [batches[base] for base in sorted(batches) if found.base_offset <= base < found.end_offset]
            assert bytes_of(found) == b"".join(bytes(batch.data) for batch in within)
            assert found.end_offset == within[-1].header.next_offset
            assert found.size_bytes <= max_bytes or len(within) == 1


@pytest.mark.parametrize("size", [10, 5000])
def test_inside_of_a_batch_the_slice_begins_with_it(tmp_path, size):
    """A replica can end where no batch of the leader does."""
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, [size] * 200)
        for offset in (0, 1, 2, 3, 299, 300, 301, 598, 599):
            found = log.slices().read(offset, 600, 1 << 20)
            assert found.base_offset == offset // 3 * 3
            assert bytes_of(found) == log.read(offset, 1 << 20)


def test_the_limit_is_where_it_ends(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, [10] * 10)
        found = log.slices().read(3, 12, 1 << 20)
        assert (found.base_offset, found.end_offset) == (3, 12)
        assert log.slices().read(12, 12, 1 << 20) is None


def test_a_damaged_header_gives_no_slice_beyond_it(tmp_path):
    """`read` then tells what is the matter."""
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, [10] * 10)
        second = log.slices().read(0, 3, 1 << 20).size_bytes
        with segment_path(tmp_path / "orders-0", 0).open("r+b") as file:
            file.seek(second + 16)
            file.write(b"\x07")  # its magic
        assert log.slices().read(0, 30, 1 << 20).end_offset == 3
        assert log.slices().read(3, 30, 1 << 20) is None


def test_an_offset_that_is_not_the_next_one_ends_it(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, [10] * 10)
        second = log.slices().read(0, 3, 1 << 20).size_bytes
        with segment_path(tmp_path / "orders-0", 0).open("r+b") as file:
            file.seek(second)
            file.write((4).to_bytes(8))
        assert log.slices().read(0, 30, 1 << 20).end_offset == 3
        assert log.slices().read(3, 30, 1 << 20) is None


def test_what_retention_took_is_on_its_way_still(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=20_000)) as log:
        fill(log, [5000] * 10)
        log.flush()
        first, whole = log.slices().read(0, 30, 1 << 20), log.read(0, 1 << 20)
        assert log.purge(20) > 0
        assert bytes_of(first) == whole, "its file stays open as long as somebody sends from it"
        descriptor = first.file.fileno()
        del first
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)


def test_a_segment_that_went_gives_no_slice(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=20_000)) as log:
        fill(log, [5000] * 10)
        log.flush()
        slices = log.slices()
        assert slices.read(0, 3, 1) is not None
        assert log.purge(20) > 0
        assert slices.read(3, 30, 1) is None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_slice_ends_before_a_leader_epoch_that_the_logs_list_contradicts(tmp_path, number):
    """No CRC covers it, and who got it would take its log for another history than the leader's."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as log:
        log.begin_epoch(3, 0)
        fill(log, [10, 10, 10])
        position = sum(len(batch.data) for batch in list(log.batches(0))[:number])
        with segment_path(tmp_path / "orders-0", 0).open("r+b") as file:
            file.seek(position + 15)
            file.write(b"\x07")
        found = log.slices().read(0, 9, 1 << 20)
        assert (None if found is None else found.end_offset) == (3 * number or None)


def test_a_leader_epoch_that_falls_from_one_segment_to_the_next_ends_the_slices(tmp_path):
    """Also where the log keeps no list of epochs that contradicts it."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=1000)) as log:
        log.begin_epoch(3, 0)
        fill(log, [100] * 9)
        first, second = sorted(int(path.stem) for path in log.path.glob("*.log"))[:2]
        with segment_path(log.path, second).open("r+b") as file:
            file.seek(15)
            file.write(b"\x02")
        slices = LogSlices(REAL_FILESYSTEM, log.path)
        assert slices.read(first, second, 1 << 20).end_offset == second
        assert slices.read(second, log.log_end_offset, 1 << 20) is None


def test_who_lists_the_directory_itself_finds_segments_that_came_since(tmp_path, monkeypatch):
    listed, list_directory = [], RealFilesystem.list
    monkeypatch.setattr(RealFilesystem, "list", lambda one, path: listed.append(path) or list_directory(one, path))
    config = LogConfig(segment_bytes=400, preallocate_bytes=0)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        slices, end = LogSlices(REAL_FILESYSTEM, log.path), 0
        for number in range(4):
            fill(log, [80])
            found = slices.read(end, log.log_end_offset, 1 << 20)
            assert (found.base_offset, found.end_offset, found.segment) == (end, log.log_end_offset, 3 * number)
            end = found.end_offset
        listed.clear()
        assert slices.read(0, end, 1 << 20).segment == 0
        assert listed == [], "its segment is known"
