"""A log that failures of the disk stop, and that is opened again in place: for every seed the records stay a prefix of
what was appended, with every flushed one, and no refused one among them.
"""

import random
from pathlib import Path

import pytest

from pushrep.errors import PushrepError
from pushrep.log import AppendFailed, Durability, LogConfig, LogPoisoned, SegmentLog
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

HOME = Path("/logs/orders-0")
CONFIG = LogConfig(
    segment_bytes=1500, batch_bytes=400, index_interval_bytes=200, preallocate_bytes=0, flush_ms=3_600_000,
    disk_warn_percent=100, disk_pressed_percent=100, disk_refuse_percent=100,
)  # fmt: skip


class World:
    def __init__(self, seed):
        self.random, self.clock = random.Random(seed), SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        self.appended = []
        """What may be in the log, in its order."""
        self.flushed = self.number = 0
        self.log = SegmentLog.open(HOME, CONFIG, filesystem=self.disk, clock=self.clock)

    def append(self):
        values = [b"%d " % (self.number + n) * 20 for n in range(self.random.choice((1, 1, 3, 9)))]
        self.number += len(values)
        durability = self.random.choice(list(Durability))
        end, was_stopped = self.log.log_end_offset, self.log.stopped_by is not None
        try:
            result = self.log.append(values, durability=durability)
        except AppendFailed:
            assert self.log.log_end_offset == end
        except LogPoisoned:
            if not was_stopped:
                self.appended = [*self.appended[:end], *values]  # whether they are there shows when it is open again
        else:
            assert result.base_offset == end == len(self.appended)
            self.appended += values
            self.flushed = len(self.appended) if durability is Durability.FLUSHED else self.flushed

    def hurt(self):
        match self.random.randrange(5):
            case 0:
                self.disk.fail_sync(self.random.choice((1, 3)), after=self.random.randrange(3))
            case 1:
                self.disk.fail_write(self.random.choice((1, 2)))
            case 2:
                self.disk.read_only = not self.disk.read_only
            case 3:
                self.disk.capacity_bytes = self.disk.used_bytes() + self.random.randrange(2000)
            case 4:
                self.disk.capacity_bytes = None

    def reopen(self):
        was_stopped = self.log.stopped_by is not None
        try:
            self.log.reopen()
        except (OSError, PushrepError):
            assert was_stopped
            assert self.log.stopped_by is not None
        else:
            self.check()

    def lose_power(self):
        self.disk.lose_power()
        self.disk.read_only, self.disk.capacity_bytes = False, None
        self.log = SegmentLog.open(HOME, CONFIG, filesystem=self.disk, clock=self.clock)
        self.check()

    def check(self):
        found = [record.value for record in self.log.records(0)]
        assert found == self.appended[: len(found)]
        assert len(found) >= self.flushed
        self.appended, self.flushed = found, max(self.flushed, self.log.flushed_offset)


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_a_log_that_is_opened_again_in_place_has_what_was_flushed_and_nothing_refused(first):
    reopened = 0
    for seed in range(first, first + 25):
        world = World(seed)
        for _ in range(40):
            step = world.random.choices((world.append, world.hurt, world.reopen, world.lose_power), (12, 3, 4, 0.3))[0]
            was_stopped = world.log.stopped_by is not None
            step()
            reopened += was_stopped and step == world.reopen and world.log.stopped_by is None
        world.lose_power()
    assert reopened > 5, "else it shows nothing"


def test_an_opening_in_place_that_fails_settles_nothing_that_is_not_on_disk():
    disk = SimulatedDisk()
    log = SegmentLog.open(HOME, CONFIG, filesystem=disk, clock=SimulatedClock())
    log.append(b"on disk")
    log.append(b"in memory", durability=Durability.BUFFERED)
    disk.fail_sync()
    with pytest.raises(LogPoisoned):
        log.flush()
    disk.read_only = True
    with pytest.raises(OSError, match="Read-only"):
        log.reopen()
    assert (log.flushed_offset, log.log_end_offset) == (1, 2)
    with pytest.raises(LogPoisoned):
        log.flush()
    disk.read_only = False
    log.close()
