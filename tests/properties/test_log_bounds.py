"""A batch that crosses the bound waits until the bound has passed it, for any bound and any reader."""

from itertools import accumulate, pairwise
from pathlib import Path
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from pushrep.env import write_atomic
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import CheckpointFile, write_checkpoint
from pushrep.log.published import PUBLISHED_NAME
from pushrep.records import BatchHeader
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

PATH = Path("/logs/orders-0")
SMALL = LogConfig(segment_bytes=1000, index_interval_bytes=1, preallocate_bytes=0, flush_ms=600_000)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CONFIG = LogConfig(segment_bytes=1000, index_interval_bytes=100, preallocate_bytes=0, flush_ms=600_000)


def written(sizes):
    """(disk, log with replicas, where each batch begins and the last one ends)."""
    disk = SimulatedDisk()
    for directory in (PATH.parent, BOOT_ID.parent):
        disk.make_directory(directory)
    write_atomic(disk, BOOT_ID, [str(UUID(int=5)).encode()])  # a machine that tells its starts apart
    log = SegmentLog.open(PATH, CONFIG, has_replicas=True, filesystem=disk, clock=SimulatedClock())
    for number, size in enumerate(sizes):
        log.append([b"%d" % number * 20] * size, timestamps_ms=number, durability=Durability.BUFFERED)
    log.flush()
    return disk, log, [0, *accumulate(sizes)]


def offsets_of(data):
    """[base, end) of each batch in these bytes."""
    found = []
    while data:
        header = BatchHeader.parse(data)
        found.append((header.base_offset, header.next_offset))
        data = data[header.size_bytes :]
    return found


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9), data=st.data())
def test_what_leaves_the_log_leaves_below_the_stable_offset(sizes, data):
    """segment_log.md: a reader goes up to min(HWM, flushed offset); replay_sessions.md: a batch that crosses waits."""
    disk, log, ends = written(sizes)
    every = list(pairwise(ends))
    bounds = sorted(data.draw(st.sets(st.integers(0, ends[-1]), min_size=1, max_size=6)))
    with log, SegmentLog.open_reader(PATH, filesystem=disk) as reader:
        for bound in bounds:
            log.advance_high_watermark(bound)
            assert reader.stable_offset == bound
            for start in range(bound + 1):
                whole = [batch for batch in every if batch[1] > start and batch[1] <= bound]
                assert [(b.header.base_offset, b.header.next_offset) for b in reader.batches(start)] == whole
                assert [record.offset for record in reader.records(start)] == list(range(start, bound))
                pieces = offsets_of(reader.read(start, data.draw(st.sampled_from([1, 150, 10_000]))))
                assert pieces == whole[: len(pieces)]
                assert bool(pieces) == bool(whole), "at least one batch, if one is there to be read"
                end = data.draw(st.integers(start, bound))
                part = [batch for batch in whole if batch[0] < end and start < end]
                assert [(b.header.base_offset, b.header.next_offset) for b in reader.batches(start, end)] == part
                assert [record.offset for record in reader.records(start, end)] == list(range(start, end))
            for time in range(len(sizes)):
                first = next((base for number, (base, _) in enumerate(every) if number >= time), None)
                wanted = first if first is not None and first < bound else None
                assert reader.offset_for_timestamp(time) == wanted


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9), data=st.data())
def test_the_checkpoints_alone_tell_of_whole_batches(sizes, data):
    """No writer has spoken since the machine started: an end inside a batch is lowered to where the batch begins.

    Else a range that was planned to this end would be read to the batch before it, and the rest would count as read.
    """
    disk, log, ends = written(sizes)
    log.close()
    disk.remove(PATH.parent / PUBLISHED_NAME)
    for bound in range(ends[-1] + 1):
        write_checkpoint(PATH.parent, CheckpointFile.HIGH_WATERMARK, {PATH.name: bound}, disk)
        for isolation in ("stable", "written"):
            with SegmentLog.open_reader(PATH, isolation=isolation, filesystem=disk) as reader:
                whole = max(end for end in ends if end <= bound)
                assert (reader.stable_offset, reader.log_end_offset) == (whole, whole)
                assert [record.offset for record in reader.records(0)] == list(range(whole))
                assert sum(len(batch) for batch in reader.batches(0)) == whole


@settings(max_examples=60)
@given(batches=st.lists(st.lists(st.integers(-1, 6), min_size=1, max_size=5), min_size=1, max_size=12), data=st.data())
def test_the_largest_time_is_of_what_can_be_read(batches, data):
    """The first record that has it, of any range: both ends may lie inside of a batch."""
    times = [time for batch in batches for time in batch]
    disk = SimulatedDisk()
    with SegmentLog.open(PATH, SMALL, has_replicas=True, filesystem=disk, clock=SimulatedClock()) as log:
        for batch in batches:
            values = [b"%d" % time * 20 for time in batch]
            log.append(values, timestamps_ms=batch, durability=Durability.BUFFERED)
        log.flush()
        log.advance_high_watermark(data.draw(st.integers(0, len(times))))
        log.delete_records(data.draw(st.integers(0, log.stable_offset)))
        with SegmentLog.open_reader(PATH, filesystem=disk) as reader:
            for readable in (log, reader):
                end = len(times) if readable is log else reader.stable_offset
                timed = [(times[offset], -offset) for offset in range(log.log_start_offset, end) if times[offset] >= 0]
                assert readable.offset_of_largest_timestamp() == (-max(timed)[1] if timed else None)
