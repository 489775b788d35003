"""The disk's levels: the whole table, its edges, and the one look that serves all logs."""

import logging
from pathlib import Path

import pytest

from pushrep.env import DiskUsage
from pushrep.log import LogConfig
from pushrep.log.config import DiskLimits
from pushrep.log.disk import LOOK_MS, DiskLevel, DiskWatch, disk_level
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

ROOM, TIGHT, PRESSED, FULL = DiskLevel
LIMITS = DiskLimits(warn_percent=75, pressed_percent=85, refuse_percent=90)
TABLE = {
    0: (ROOM, ROOM, ROOM, ROOM),
    74.99: (ROOM, ROOM, ROOM, ROOM),
    75: (TIGHT, TIGHT, TIGHT, TIGHT),
    84.99: (TIGHT, TIGHT, TIGHT, TIGHT),
    85: (PRESSED, PRESSED, PRESSED, FULL),
    89.99: (PRESSED, PRESSED, PRESSED, FULL),
    90: (FULL, FULL, FULL, FULL),
    100: (FULL, FULL, FULL, FULL),
}


@pytest.mark.parametrize("before", DiskLevel)
@pytest.mark.parametrize("used", TABLE)
def test_the_table(before, used):
    usage = DiskUsage(round(used * 1000), 100_000)  # a small disk: the percentages rule
    assert disk_level(before, usage, LIMITS) is TABLE[used][before]


FREE_GIB = {
    1000: (ROOM, ROOM, ROOM, ROOM),
    40.5: (ROOM, ROOM, ROOM, ROOM),
    40: (TIGHT, TIGHT, TIGHT, TIGHT),
    20.5: (TIGHT, TIGHT, TIGHT, TIGHT),
    20: (PRESSED, PRESSED, PRESSED, FULL),
    10.5: (PRESSED, PRESSED, PRESSED, FULL),
    10: (FULL, FULL, FULL, FULL),
    0: (FULL, FULL, FULL, FULL),
}


@pytest.mark.parametrize("before", DiskLevel)
@pytest.mark.parametrize("free_gib", FREE_GIB)
def test_on_a_large_disk_the_free_bytes_rule(before, free_gib):
    total = 16_384 << 30  # 1,000 GiB free are 94 % used
    usage = DiskUsage(total - round(free_gib * (1 << 30)), total)
    assert disk_level(before, usage, LIMITS) is FREE_GIB[free_gib][before]


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_warn_percent": 86},
        {"disk_pressed_percent": 91},
        {"disk_refuse_percent": 84},
        {"disk_refuse_percent": 101},
        {"disk_warn_percent": -1},
        {"disk_warn_free_bytes": 1 << 30},
        {"disk_pressed_free_bytes": 50 << 30},
        {"disk_refuse_free_bytes": -1},
    ],
)
def test_limits_that_do_not_rise_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LogConfig(**settings)


def test_the_settings_reach_the_table():
    config = LogConfig(disk_warn_percent=10, disk_pressed_percent=20, disk_refuse_percent=30)
    assert config.disk_limits == DiskLimits(warn_percent=10, pressed_percent=20, refuse_percent=30)
    assert LogConfig().disk_limits == LIMITS == DiskLimits()
    config = LogConfig(disk_warn_free_bytes=3, disk_pressed_free_bytes=2, disk_refuse_free_bytes=1)
    assert config.disk_limits == DiskLimits(warn_free_bytes=3, pressed_free_bytes=2, refuse_free_bytes=1)


def test_one_look_a_second_and_one_warning_a_rise(caplog):
    clock, home = SimulatedClock(), Path("/data")
    disk = SimulatedDisk(clock=clock)
    disk.make_directory(home)
    disk.open(home / "f", create=True).write_at(bytes(80), 0)
    watch = DiskWatch(home, disk, clock)
    with caplog.at_level(logging.WARNING):
        assert watch.level(LIMITS) is ROOM, "a disk without an end is never full"
        disk.capacity_bytes = 100
        assert watch.level(LIMITS) is ROOM, "the look is not a second old"
        clock.advance(LOOK_MS)
        assert watch.level(LIMITS) is TIGHT
        assert watch.level(DiskLimits(warn_percent=0, pressed_percent=0, refuse_percent=80)) is FULL
        steps = disk.steps
        assert [watch.level(LIMITS) for _ in range(5)] == [TIGHT] * 5
        assert disk.steps == steps, "no further look"
    told = [record.getMessage() for record in caplog.records]
    assert [("free space soon" in text, "refused" in text) for text in told] == [(True, False), (False, True)]
    assert all("80 of 100 bytes, 80.0 %" in text for text in told)
    disk.capacity_bytes = 88
    assert watch.level(LIMITS, max_age_ms=0) is FULL
    disk.capacity_bytes = 94
    assert watch.level(LIMITS, max_age_ms=0) is FULL, "85.1 %: not below the lower limit yet"
    disk.capacity_bytes = 95
    assert watch.level(LIMITS, max_age_ms=0) is TIGHT


def test_a_disk_that_cannot_be_asked_keeps_its_level(caplog):
    clock = SimulatedClock()
    watch = DiskWatch(Path("/nowhere/f"), SimulatedDisk(clock=clock), clock)
    with caplog.at_level(logging.WARNING):
        assert watch.level(LIMITS) is ROOM
    assert "how full the disk is can't be read" in caplog.text
