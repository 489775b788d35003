"""The number of bytes after an offset, and the durations of syncs, for metrics and `lag`."""

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.filesystem import RealFile
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import list_segments, segment_path
from pushrep.log.disk import SYNC_BOUNDS_S, Durations
from pushrep.log.segment import SealedSegment, newest_timestamp_ms

INTERVAL = 4096


@pytest.mark.parametrize("segment_bytes", [1 << 30, 40_000])
def test_the_bytes_from_an_offset_on_are_told_to_an_index_entry(tmp_path, segment_bytes):
    config = LogConfig(segment_bytes=segment_bytes, preallocate_bytes=0)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        for number in range(3000):
            log.append(b"x" * (number % 100), durability=Durability.BUFFERED)
        ends = {}
        size = 0
        for batch in log.batches(0):
            ends[batch.header.base_offset] = size
            size += batch.header.size_bytes
        assert log.size_from(0) == size
        assert log.size_from(3000) == 0
        for offset in range(0, 3000, 7):
            assert 0 <= log.size_from(offset) - (size - ends[offset]) <= INTERVAL + 400, offset
        if segment_bytes < size:
            log.flush()
            before = log.size_from(1500)
            assert log.purge(1200) > 1000
            assert log.size_from(1500) == before
            assert log.size_from(0) < size, "what was removed counts nothing"


@pytest.mark.parametrize("records", [1, 3])
def test_the_newest_time_of_a_sealed_segment_is_read_from_its_last_index_entry_on(tmp_path, monkeypatch, records):
    config = LogConfig(segment_bytes=5000, index_interval_bytes=1000, preallocate_bytes=0)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        for number in range(100):
            log.append([b"x" * 100] * records, timestamps_ms=number + 1)
    _, base, end, *_ = list_segments(REAL_FILESYSTEM, log.path)
    positions, read_at = [], RealFile.read_at

    def noted(file, size, position):
        if file.path.suffix == ".log":
            positions.append(position)
        return read_at(file, size, position)

    monkeypatch.setattr(RealFile, "read_at", noted)
    assert newest_timestamp_ms(REAL_FILESYSTEM, log.path, SealedSegment(base, end, 0)) == end // records
    assert min(positions) > segment_path(log.path, base).stat().st_size // 2


def test_every_sync_is_counted_in_its_class():
    times = Durations()
    for seconds in (0.00005, 0.0001, 0.003, 99.0):
        times.add(seconds)
    counts, total = times.read()
    assert len(counts) == len(SYNC_BOUNDS_S) + 1
    assert (counts[0], counts[SYNC_BOUNDS_S.index(0.005)], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert total == pytest.approx(99.00315)


def test_a_log_counts_its_syncs(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append(b"a")
        log.append(b"b")
        counts, seconds = log.disk.syncs.read()
        assert sum(counts) == 2
        assert seconds > 0
