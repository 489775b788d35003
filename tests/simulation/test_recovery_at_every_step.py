"""A recovery that is stopped at any of its calls, by a kill or a power cut, is repeated: the next ends with the same
log.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

PATH = Path("/logs/orders-0")
CONFIG = LogConfig(segment_bytes=900, preallocate_bytes=500, index_interval_bytes=200, flush_ms=3_600_000)
RECORDS = 60
ASKED = range(0, RECORDS, 4)  # about one in each entry of an index; each look-up costs as much as a step


class Kept:
    """A store derived from the log, whose memory survives everything."""

    name = "kept"

    def __init__(self):
        self.values, self.epochs = {}, {}

    @property
    def end_offset(self):
        return max(self.values, default=-1) + 1

    @property
    def last(self):
        return (self.end_offset - 1, self.epochs[self.end_offset - 1]) if self.values else None

    def dispatch(self, batch):
        for record in batch.records():
            self.values[record.offset], self.epochs[record.offset] = record.value, batch.header.leader_epoch

    def cut_to(self, offset):
        self.values = {n: value for n, value in self.values.items() if n < offset}

    def destroy(self):
        self.values = {}

    def sync(self):
        pass


def end_process(disk):
    disk.crash()


def end_stopped(disk, end):
    """End the process, or the machine with it; afterwards the power is on."""
    if end == "power":
        disk.lose_power()
    disk.power_at, disk.is_off = None, False
    end_process(disk)


def broken(seed):
    """A log as a power cut left it: synced to record 20, torn somewhere behind; and a store that knew too much."""
    clock = SimulatedClock()
    disk = SimulatedDisk(seed, clock=clock)
    store = Kept()
    log = SegmentLog.open(PATH, CONFIG, derived=(store,), filesystem=disk, clock=clock)
    for n in range(RECORDS):
        durability = Durability.FLUSHED if n == 20 else Durability.BUFFERED
        log.append(b"%02d" % n * 40, durability=durability, timestamps_ms=n)
    for batch in log.batches(0):
        store.dispatch(batch)
    disk.lose_power()
    end_process(disk)
    return disk, clock, store


def opened(disk, clock, store):
    return SegmentLog.open(PATH, CONFIG, derived=(store,), filesystem=disk, clock=clock)


def picture(log, store):
    """All that must not depend on how often the recovery was stopped; an empty newest segment may be there or not."""
    records = [(record.offset, record.value) for record in log.records(0)]
    assert store.values == dict(records)
    answers = [log.offset_for_timestamp(n) for n in ASKED]
    return records, answers, log.log_end_offset, log.flushed_offset, log.log_start_offset


@pytest.mark.parametrize("end", ["kill", "power"])
def test_a_cut_of_the_batch_in_which_the_log_starts_is_no_damage_wherever_it_is_stopped(end, torture):
    ends = set()
    for step in range(1, 60, torture.count(2, 1)):
        clock = SimulatedClock()
        disk = SimulatedDisk(step, clock=clock)
        log = SegmentLog.open(PATH, CONFIG, filesystem=disk, clock=clock)
        for _ in range(3):
            log.append([b"value"] * 10)
        log.delete_records(24)
        disk.power_after(step)
        with suppress(PowerLost):
            log.truncate_to(27, force=True)
        end_stopped(disk, end)
        log = SegmentLog.open(PATH, CONFIG, filesystem=disk, clock=clock)
        assert log.recovery.damaged_from is None, f"stopped at step {step}: {log.recovery}"
        ends.add((log.log_start_offset, log.log_end_offset))
        log.close()
    assert ends == {(24, 30), (20, 20)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["kill", "power"])
def test_the_next_recovery_ends_at_the_same_log(seed, end, torture):
    disk, clock, store = broken(seed)
    before = disk.steps
    log = opened(disk, clock, store)
    steps = disk.steps - before
    expected = picture(log, store)
    assert expected[2] > 20
    assert log.recovery.cut is not None or expected[2] == RECORDS
    log.close()
    for step in range(1 + torture.count(seed + 3 * (end == "kill"), 0), steps + 1, torture.count(24, 1)):
        disk, clock, store = broken(seed)
        disk.power_after(step)
        with pytest.raises(PowerLost):
            opened(disk, clock, store)
        end_stopped(disk, end)
        log = opened(disk, clock, store)
        found = picture(log, store)
        assert found == expected, f"seed {seed}, stopped at call {step} of {steps}: {log.recovery}"
        assert log.append(b"next") == (expected[2], expected[2])
        log.close()


def member_below_its_watermark(seed):
    """A member's log whose end, after a power cut, is below the high watermark in its checkpoint."""
    clock = SimulatedClock()
    disk = SimulatedDisk(seed, clock=clock)
    log = SegmentLog.open(PATH, CONFIG, has_replicas=True, filesystem=disk, clock=clock)
    for n in range(RECORDS):
        log.append(b"%02d" % n * 40, durability=Durability.BUFFERED, timestamps_ms=n)
    held = LogDirectory.acquire(PATH.parent, disk, clock)
    held.remember(PATH.name, {CheckpointFile.HIGH_WATERMARK: RECORDS})
    held.sync_checkpoints()
    disk.lose_power()
    end_process(disk)
    return disk, clock


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["kill", "power"])
@pytest.mark.parametrize("what", ["torn", "removed"])
def test_what_a_member_lost_is_told_however_its_opening_is_stopped(seed, end, what, torture):
    def member():
        disk, clock = member_below_its_watermark(seed)
        if what == "removed":
            disk.remove_tree(PATH)
            disk.sync_directory(PATH.parent)
        return disk, clock, []

    def opened_member(disk, clock, noted):
        return SegmentLog.open(PATH, CONFIG, has_replicas=True, on_lost=noted.append, filesystem=disk, clock=clock)

    disk, clock, noted = member()
    before = disk.steps
    log = opened_member(disk, clock, noted)
    steps = disk.steps - before
    assert log.log_end_offset < RECORDS
    assert set(noted) == {RECORDS}
    log.close()
    for step in range(1 + torture.count(seed, 0), steps + 1, torture.count(6, 1)):
        disk, clock, noted = member()
        disk.power_after(step)
        with pytest.raises(PowerLost):
            opened_member(disk, clock, noted)
        end_stopped(disk, end)
        log = opened_member(disk, clock, noted)
        assert set(noted) == {RECORDS}, f"seed {seed}, stopped at call {step} of {steps}: {log.recovery}"
        log.close()


def test_a_second_recovery_changes_nothing():
    disk, clock, store = broken(1)
    first = picture(opened(disk, clock, store), store)
    end_process(disk)
    log = opened(disk, clock, store)
    assert picture(log, store) == first
    assert log.recovery.cut is None
    log.close()


def test_what_is_proven_is_not_scanned_again():
    disk, clock, store = broken(0)
    log = opened(disk, clock, store)
    everything = log.recovery.bytes_scanned
    end_process(disk)
    log = opened(disk, clock, store)
    assert log.recovery.bytes_scanned < everything
    log.close()
