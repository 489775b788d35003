"""Power cuts of a directory of logs: at any call, with any of the unsynced writes lost or torn.

A model has what the clean marker of each log may contain, and the bounds of its recovery point.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CleanLog
from pushrep.log.errors import LogClosed
from tests.support.simulated_disk import PowerLost, SimulatedDisk

HOME = Path("/data")
NAMES = ("orders-0", "orders-1", "orders-2")

LOG_STEPS = st.tuples(st.sampled_from(NAMES), st.sampled_from(["attach", "remember", "sync", "clean", "unclean"]))
SESSIONS = st.lists(st.lists(LOG_STEPS, max_size=10), min_size=1, max_size=4)


class Model:
    """The states that a reader may find after the power is back."""

    def __init__(self):
        self.clean = dict.fromkeys(NAMES)  # the line that is true, None while a log is or was open since
        self.promised = dict.fromkeys(NAMES, 0)  # a sync that returned stands behind it
        self.remembered = dict.fromkeys(NAMES, 0)
        self.clock = 0

    def run(self, disk, steps):
        directory = LogDirectory.acquire(HOME, disk)
        views = {}
        for name, step in steps:
            if step == "attach" and name not in views:
                self.clean[name] = None
                views[name] = directory.attach(name)
                # A session that ended without closing the log took back what no sync stood behind, and nothing else.
                self.remembered[name] = views[name].recovery_point or 0
                assert self.remembered[name] >= self.promised[name], f"{name}: a promise was taken back"
                disk.make_directory(HOME / name)
            elif name not in views:
                continue
            elif step == "remember":
                self.clock += 1
                self.remembered[name] = self.clock
                views[name].checkpoint(recovery_point=self.clock)
            elif step == "sync":
                told = {one: self.remembered[one] for one in views}
                views[name].sync_checkpoints()
                self.promised.update(told)
            elif step == "clean":
                self.clock += 1
                line = CleanLog(self.clock, self.clock, 0)
                views.pop(name).close(line)
                self.clean[name] = line
            elif step == "unclean":
                views.pop(name).close()
        directory.release()

    def judge(self, disk):
        directory = LogDirectory.acquire(HOME, disk)
        for name in NAMES:
            if not disk.exists(HOME / name):
                continue
            view = directory.attach(name)
            assert view.clean in (None, self.clean[name]), f"{name} changed since it was left as {view.clean}"
            found = view.recovery_point or 0
            assert found >= self.promised[name], f"{name}: a sync returned for {self.promised[name]}"
            assert found <= self.clock
        directory.release()


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), sessions=SESSIONS, power_at=st.integers(1, 250))
def test_no_line_and_no_number_survives_that_is_not_true(seed, sessions, power_at):
    disk, model = SimulatedDisk(seed), Model()
    disk.make_directory(HOME)
    disk.power_after(power_at)
    try:
        for steps in sessions:
            model.run(disk, steps)
    except PowerLost:
        pass
    disk.lose_power()
    model.judge(disk)


def test_a_completed_release_survives_any_power_cut():
    """Everything is synced before `release` returns: the marker is there, whatever the disk loses."""
    for seed in range(50):
        disk = SimulatedDisk(seed)
        disk.make_directory(HOME / "orders-0")
        directory = LogDirectory.acquire(HOME, disk)
        view = directory.attach("orders-0")
        view.checkpoint(recovery_point=5)
        view.close(CleanLog(5, 100, 0))
        directory.release()
        disk.lose_power()
        directory = LogDirectory.acquire(HOME, disk)
        view = directory.attach("orders-0")
        assert (view.clean, view.recovery_point) == (CleanLog(5, 100, 0), 5), f"seed {seed}"
        directory.release()


def test_a_marker_that_was_removed_does_not_come_back():
    """An opening that returned has synced the removal: after a power cut the logs count as unclean."""
    for seed in range(50):
        disk = SimulatedDisk(seed)
        disk.make_directory(HOME / "orders-0")
        directory = LogDirectory.acquire(HOME, disk)
        directory.attach("orders-0").close(CleanLog(5, 100, 0))
        directory.release()
        abandoned = LogDirectory.acquire(HOME, disk)
        disk.lose_power()
        directory = LogDirectory.acquire(HOME, disk)
        assert directory is not abandoned, "its lock died with the machine"
        assert directory.attach("orders-0").clean is None, f"seed {seed}"
        with pytest.raises(LogClosed):
            abandoned.attach("orders-1")
        directory.release()
