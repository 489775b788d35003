"""Tools that are stopped at any of their calls, by a kill or a power cut: run again, they end with the same result.

The tool is stopped at each of its calls to the disk. Afterwards the log opens or reports what is damaged, no good
record is lost, and the same command ends with the same log.
"""

from pathlib import Path

import pytest

from pushrep.env import read_whole
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.repair import Repairer
from pushrep.log.verify import verify_log
from tests.simulation.power_cuts import end_process
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

HOME, COPY = Path("/logs/orders-0"), Path("/copy/orders-0")
CONFIG = LogConfig(segment_bytes=900, preallocate_bytes=500, index_interval_bytes=200, flush_ms=3_600_000)
RECORDS = 50


class Scene:
    """A log of some segments on a disk, closed clean, and another copy of it."""

    def __init__(self, seed):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        with self.open(HOME) as log:
            for n in range(RECORDS):
                log.append(b"%02d " % n * 14, durability=Durability.BUFFERED, timestamps_ms=n)
        self.disk.make_directory(COPY)
        for name in self.disk.list(HOME):
            self.write(COPY / name, self.bytes_of(HOME / name))
        self.disk.sync_directory(COPY)

    def open(self, path=HOME):
        return SegmentLog.open(path, CONFIG, filesystem=self.disk, clock=self.clock)

    def repairer(self):
        return Repairer(HOME, filesystem=self.disk, clock=self.clock)

    def write(self, path, data):
        file = self.disk.open(path, create=True)
        file.truncate(0)
        file.write_at(data, 0)
        file.sync()
        file.close()

    def bytes_of(self, path):
        return read_whole(self.disk, path, 1 << 20)

    def logs(self, path=HOME):
        return [name for name in self.disk.list(path) if name.endswith(".log")]

    def damage(self, *, segment, at):
        path = HOME / self.logs()[segment]
        data = bytearray(self.bytes_of(path))
        data[at] ^= 1
        self.write(path, bytes(data))

    def stop(self, how):
        """The process ends at the call that was named; with "power" the machine does."""
        if how == "power":
            self.disk.lose_power()
        else:
            self.disk.power_at, self.disk.is_off = None, False
        end_process(self.disk)

    def kept(self):
        """The bytes of the log and of all that was put aside."""
        return b"".join(self.bytes_of(HOME / name) for name in self.disk.list(HOME) if ".log" in name)

    def values(self, log):
        return [record.value for record in log.records(log.log_start_offset)]


VALUES = [b"%02d " % n * 14 for n in range(RECORDS)]


def splice(scene):
    report = scene.repairer().repair(copy=COPY)
    assert report.is_whole


def prepare_splice(scene):
    """A batch in the first segment, the end of the second, a segment that is gone, the list of epochs."""
    scene.damage(segment=0, at=100)
    scene.damage(segment=1, at=-1)
    scene.disk.remove(HOME / scene.logs()[3])
    scene.disk.sync_directory(HOME)
    scene.write(HOME / "leader-epoch-checkpoint", b"nonsense")


def judge_spliced(scene):
    for name in scene.logs(COPY):
        assert scene.bytes_of(HOME / name) == scene.bytes_of(COPY / name), name
    with scene.open() as log:
        assert scene.values(log) == VALUES
        assert log.recovery.damaged_from is None


def cut(scene):
    report = scene.repairer().repair(cut=True)
    assert report.is_whole


def prepare_cut(scene):
    scene.damage(segment=1, at=300)


def judge_cut(scene):
    assert len(scene.logs()) == 2, "the later segments went aside"
    second = int(scene.logs()[1].removesuffix(".log"))
    with scene.open() as log:
        end = log.log_end_offset
        assert second < end < RECORDS
        assert scene.values(log) == VALUES[:end]
        assert log.append(b"next").base_offset == end
    assert all(value in scene.kept() for n, value in enumerate(VALUES) if n != end), "all that is good is kept aside"


def truncate(scene):
    with scene.open() as log:
        log.truncate_to(17, force=True)


def judge_truncated(scene):
    with scene.open() as log:
        assert scene.values(log) == VALUES[:17]
        assert log.append(b"next").base_offset == 17


def purge(scene):
    with scene.open() as log:
        log.purge(30)


def judge_purged(scene):
    with scene.open() as log:
        start = log.log_start_offset
        assert 20 < start <= 30
        assert scene.logs()[0] == f"{start:020d}.log"
        assert scene.values(log) == VALUES[start:]


def rebuild(scene):
    scene.repairer().repair()


def prepare_rebuild(scene):
    for name in scene.disk.list(HOME):
        if name.endswith((".index", ".timeindex")):
            scene.write(HOME / name, b"not an entry of any index")


def judge_rebuilt(scene):
    with scene.open() as log:
        assert scene.values(log) == VALUES
        assert [log.offset_for_timestamp(n) for n in range(RECORDS)] == list(range(RECORDS))


def nothing(scene):
    pass


TOOLS = {
    "repair --from-copy": (prepare_splice, splice, judge_spliced),
    "repair --cut": (prepare_cut, cut, judge_cut),
    "truncate": (nothing, truncate, judge_truncated),
    "purge": (nothing, purge, judge_purged),
    "rebuild-index": (prepare_rebuild, rebuild, judge_rebuilt),
}


def no_litter(scene):
    """Copies half made are gone, and nothing was kept twice."""
    names = scene.disk.list(HOME)
    assert not [name for name in names if name.endswith((".part", ".repair", ".tmp"))], names
    kept = [scene.bytes_of(HOME / name) for name in names if ".cut" in name or (".log" in name and ".corrupt" in name)]
    assert len(kept) == len(set(kept)), names


@pytest.mark.parametrize("how", ["kill", "power"])
@pytest.mark.parametrize("tool", TOOLS)
def test_done_again_it_ends_as_if_it_had_not_been_stopped(tool, how, torture):
    prepare, run, judge = TOOLS[tool]
    seed = torture.random("tools", tool, how).getrandbits(32)
    whole = Scene(seed)
    prepare(whole)
    before = whole.disk.steps
    run(whole)
    steps = whole.disk.steps - before
    judge(whole)
    stride = torture.count(53, 1)
    for step in range(1 + seed % stride, steps + 1, stride):
        told = f"{tool}, seed {seed}, stopped by {how} at call {step} of {steps}"
        scene = Scene(seed)
        prepare(scene)
        scene.disk.power_after(step)
        with pytest.raises(PowerLost):
            run(scene)
        scene.stop(how)
        try:
            run(scene)
            judge(scene)
            no_litter(scene)
            assert verify_log(HOME, filesystem=scene.disk, clock=scene.clock).is_whole
        except Exception as error:
            raise AssertionError(f"{told}: {error}") from error
