"""A disk or a quota that is full to the last byte: appends are refused, and everything that frees space works.

Also a disk that is remounted read-only under its writer, as Linux does after an error of the file system.
"""

import errno
from pathlib import Path

import pytest

from pushrep.env import read_whole
from pushrep.log import AppendFailed, Durability, LogConfig, LogPoisoned, NoRoomToCut, NotALog, SegmentLog
from pushrep.log.directory_files import CLEAN_MARKER_NAME
from pushrep.log.disk import RESERVE_NAME
from pushrep.log.repair import Repairer
from pushrep.log.walk import ScanRange, scan
from tests.simulation.power_cuts import end_process
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

HOME = Path("/logs/orders-0")
FULL = pytest.mark.parametrize("full_errno", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
AHEAD = pytest.mark.parametrize("preallocate", [0, 3000])


class Machine:
    """A log whose own limits never refuse: only the file system does."""

    def __init__(self, full_errno=errno.ENOSPC, preallocate=0):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(3, clock=self.clock)
        self.disk.full_errno = full_errno
        limits = {"disk_warn_percent": 100, "disk_pressed_percent": 100, "disk_refuse_percent": 100}
        self.config = LogConfig(
            segment_bytes=4000, index_interval_bytes=300, preallocate_bytes=preallocate, flush_ms=3_600_000, **limits
        )
        self.values = []

    def open(self):
        return SegmentLog.open(HOME, self.config, filesystem=self.disk, clock=self.clock)

    def append(self, log, count, durability=Durability.BUFFERED):
        for _ in range(count):
            value = b"%d " % len(self.values) * 20
            assert log.append(value, durability=durability).base_offset == len(self.values)
            self.values.append(value)

    def fill(self, log):
        """Append until it is refused, then take the last bytes away, too."""
        self.disk.capacity_bytes = self.disk.used_bytes() + 9000
        with pytest.raises(AppendFailed) as refused:
            self.append(log, 10_000)
        assert refused.value.errno == self.disk.full_errno
        self.take_the_rest()
        return refused.value

    def take_the_rest(self):
        self.disk.capacity_bytes = self.disk.used_bytes()

    def tidy(self):
        for name in self.disk.list(HOME):
            if ".cut" in name or ".corrupt" in name:
                self.disk.remove(HOME / name)

    def holds(self, log):
        start, end = log.log_start_offset, log.log_end_offset
        assert [record.value for record in log.records(start, end)] == self.values[start:end]

    def bytes_of(self, name):
        return read_whole(self.disk, HOME / name, 1 << 24)

    def files(self):
        return {name: self.bytes_of(name) for name in self.disk.list(HOME)}


@FULL
@AHEAD
def test_an_append_is_refused_whole_and_taken_when_there_is_room(full_errno, preallocate):
    machine = Machine(full_errno, preallocate)
    with machine.open() as log:
        refused = machine.fill(log)
        assert ("quota" in str(refused)) == (full_errno == errno.EDQUOT)
        assert log.log_end_offset == len(machine.values)
        machine.holds(log)
        log.flush()
        machine.disk.capacity_bytes = None
        machine.append(log, 5, Durability.FLUSHED)
        machine.holds(log)
    with machine.open() as log:
        assert log.recovery.opening.value == "normal"
        machine.holds(log)


@FULL
@AHEAD
def test_truncate_works_on_a_full_disk_and_frees_it(full_errno, preallocate):
    machine = Machine(full_errno, preallocate)
    with machine.open() as log:
        machine.append(log, 60)
        machine.fill(log)
        for offset in (len(machine.values) - 1, len(machine.values) // 2, 3):
            machine.take_the_rest()  # somebody else has what was freed
            with pytest.raises(AppendFailed):
                machine.append(log, 1)
            end = log.truncate_to(offset, force=True)
            assert end == offset == log.log_end_offset
            del machine.values[end:]
            machine.holds(log)
        machine.append(log, 30, Durability.FLUSHED)
        machine.holds(log)
    with machine.open() as log:
        machine.holds(log)


@FULL
def test_purge_without_a_reserve_takes_the_room_that_the_newest_segment_has_ahead(full_errno):
    """Somebody has removed that file to make room."""
    machine = Machine(full_errno, 3000)
    with machine.open() as log:
        machine.append(log, 300)
        log.flush()
        machine.disk.unlink(HOME.parent / RESERVE_NAME)
        machine.take_the_rest()
        _, second, *_ = sorted(int(name[:20]) for name in machine.disk.list(HOME) if name.endswith(".log"))
        assert log.purge(second) == second
        machine.holds(log)
        machine.append(log, 10)
    with machine.open() as log:
        assert (log.log_start_offset, log.recovery.opening.value) == (second, "normal")
        machine.holds(log)


@FULL
@AHEAD
@pytest.mark.parametrize("how", ["purge", "delete_records"])
def test_purge_works_on_a_full_disk_and_frees_it(full_errno, preallocate, how):
    machine = Machine(full_errno, preallocate)
    with machine.open() as log:
        machine.append(log, 60)
        machine.fill(log)
        log.flush()
        start = getattr(log, how)(len(machine.values) // 2)
        assert 0 < start == log.log_start_offset
        machine.append(log, 20, Durability.FLUSHED)
        machine.holds(log)
    with machine.open() as log:
        assert log.log_start_offset == start
        machine.holds(log)


@FULL
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_full_disk_is_opened_and_cut_offline(full_errno, end):
    machine = Machine(full_errno)
    log = machine.open()
    machine.append(log, 60)
    machine.fill(log)
    if end == "closed":
        log.close()
    end_process(machine.disk)
    for offset in (50, 20):
        machine.take_the_rest()
        with machine.open() as log:
            machine.holds(log)
            assert log.truncate_to(offset, force=True) == offset
        del machine.values[offset:]
    with machine.open() as log:
        machine.holds(log)
        machine.append(log, 10, Durability.FLUSHED)


@FULL
def test_without_its_reserve_a_cut_is_refused_and_nothing_has_changed(full_errno):
    machine = Machine(full_errno)
    with machine.open() as log:
        machine.append(log, 60)
        machine.fill(log)
        machine.disk.remove(HOME.parent / RESERVE_NAME)
        machine.take_the_rest()
        before = machine.files()
        with pytest.raises(NoRoomToCut, match=r"nothing was cut: (free space|raise the user)") as refused:
            log.truncate_to(10, force=True)
        assert refused.value.errno == full_errno
        assert machine.files() == before
        assert log.log_end_offset == len(machine.values)
        machine.holds(log)
        machine.disk.capacity_bytes += 100_000
        assert log.truncate_to(10, force=True) == 10
        del machine.values[10:]
        machine.append(log, 5)
        machine.holds(log)
    machine.disk.capacity_bytes += 100_000
    machine.open().close()
    assert machine.disk.exists(HOME.parent / RESERVE_NAME), "the next opening takes it back"


@FULL
def test_the_reserve_is_taken_back_after_each_use(full_errno):
    machine = Machine(full_errno)
    with machine.open() as log:
        machine.append(log, 200)
        size = len(read_whole(machine.disk, HOME.parent / RESERVE_NAME, 1 << 20))
        assert size >= 64 << 10
        machine.fill(log)
        for offset in range(190, 20, -17):
            log.truncate_to(offset, force=True)
            now = len(read_whole(machine.disk, HOME.parent / RESERVE_NAME, 1 << 20))
            assert now >= size * 15 // 16, "but for what a new small file took of it"


def torn_on_a_full_disk(full_errno):
    """A machine whose log has 100 KB of torn tail, a disk without a byte left, and the bytes of the segment."""
    machine = Machine(full_errno)
    machine.config = LogConfig(segment_bytes=1 << 20, preallocate_bytes=0, flush_ms=3_600_000)
    log = machine.open()
    machine.append(log, 10, Durability.FLUSHED)
    at = len(machine.bytes_of(f"{0:020d}.log"))
    for _ in range(10):
        log.append(b"x" * 10_000)  # on disk, but no recovery point tells of it yet
    end_process(machine.disk)
    machine.disk.flip_bit(HOME / f"{0:020d}.log", (at + 100) * 8)
    machine.take_the_rest()
    return machine, at


def tail_of(machine, log):
    (kept,) = log.recovery.cut.kept_as
    names = machine.disk.list(HOME)
    assert [name for name in names if ".cut" in name] == [kept], "and nothing half made beside it"
    return machine.bytes_of(kept)


@FULL
def test_a_torn_tail_moves_where_there_is_no_room_for_a_copy(full_errno):
    """The cut bytes are kept as a .cut file, also on a full disk: an operator has to open a log to free space."""
    machine, at = torn_on_a_full_disk(full_errno)
    before = machine.bytes_of(f"{0:020d}.log")
    with machine.open() as log:
        machine.holds(log)
        assert log.log_end_offset == 10
        assert tail_of(machine, log) == before[at:]
        machine.tidy()
        machine.append(log, 10)
        machine.holds(log)
    with machine.open() as log:
        assert log.recovery.cut is None
        machine.holds(log)


@FULL
def test_without_a_block_for_the_first_piece_nothing_is_cut(full_errno):
    machine, at = torn_on_a_full_disk(full_errno)
    machine.disk.remove(HOME.parent / RESERVE_NAME)
    machine.take_the_rest()
    before = machine.files()
    for _ in range(2):
        with pytest.raises(NoRoomToCut, match=r"nothing was cut: .* \(8192 bytes at most\)") as refused:
            machine.open()
        assert refused.value.errno == full_errno
        end_process(machine.disk)
        assert machine.files() == before, "no half of a copy fills the disk"
    machine.disk.capacity_bytes += refused.value.wanted_bytes
    with machine.open() as log:
        machine.holds(log)
        assert tail_of(machine, log) == before[f"{0:020d}.log"][at:]


@pytest.mark.parametrize("end", ["kill", "power"])
def test_a_move_that_is_stopped_at_any_call_goes_on(end, torture):
    machine, at = torn_on_a_full_disk(errno.ENOSPC)
    wanted, before = machine.bytes_of(f"{0:020d}.log")[at:], machine.disk.steps
    machine.open()
    steps = machine.disk.steps - before
    for step in range(1 + torture.count(7, 0), steps + 1, torture.count(17, 1)):
        machine, at = torn_on_a_full_disk(errno.ENOSPC)
        machine.disk.power_after(step)
        with pytest.raises(PowerLost):
            machine.open()
        if end == "power":
            machine.disk.lose_power()
            machine.disk.capacity_bytes += 128 << 10  # what the directory itself keeps was not all synced
        else:
            machine.disk.power_at, machine.disk.is_off = None, False  # the machine goes on, the process does not
        end_process(machine.disk)
        with machine.open() as log:
            assert log.log_end_offset == 10
            machine.holds(log)
        kept = [machine.bytes_of(name) for name in machine.disk.list(HOME) if ".cut" in name]
        assert kept == [wanted], f"stopped at call {step} of {steps}"
        assert not [name for name in machine.disk.list(HOME) if name.endswith(".moving")]


def damaged_on_a_full_disk(full_errno=errno.ENOSPC):
    """A machine whose log has 100 KB of damage and what lies behind it, and a disk without a byte left."""
    machine = Machine(full_errno)
    machine.config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=1 << 20, preallocate_bytes=0)
    with machine.open() as log:
        machine.append(log, 10)
        for _ in range(10):
            log.append(b"x" * 10_000)
    machine.disk.flip_bit(HOME / f"{0:020d}.log", (machine.bytes_of(f"{0:020d}.log").index(b"xx") + 5) * 8)
    end_process(machine.disk)
    machine.disk.remove(HOME.parent / CLEAN_MARKER_NAME)
    return machine


def quarantine(machine):
    with machine.open() as log:
        machine.take_the_rest()
        assert log.damaged_from == 10
        return log.quarantine()


def repair(machine):
    machine.take_the_rest()
    report = Repairer(HOME, filesystem=machine.disk, clock=machine.clock).repair(cut=True)
    assert report.is_whole
    return report.cut.kept_as


def segments(machine):
    return {name: data for name, data in machine.files().items() if name.endswith(".log")}


def damaged_bytes(machine):
    """From the first byte that is not the log's any more."""
    *_, last = scan(machine.disk.open(HOME / f"{0:020d}.log", writable=False), ScanRange(base_offset=0))
    return machine.bytes_of(f"{0:020d}.log")[last.position :]


@FULL
@pytest.mark.parametrize("mend", [quarantine, repair])
def test_damage_moves_where_there_is_no_room_for_a_copy(full_errno, mend):
    machine = damaged_on_a_full_disk(full_errno)
    wanted = damaged_bytes(machine)
    (kept,) = mend(machine)
    assert machine.bytes_of(kept) == wanted
    assert [name for name in machine.disk.list(HOME) if ".cut" in name or ".corrupt" in name] == [kept]
    machine.tidy()
    with machine.open() as log:
        assert (log.log_end_offset, log.damaged_from, log.recovery.cut) == (10, None, None)
        machine.append(log, 10)
        machine.holds(log)


@FULL
def test_damage_that_there_is_no_room_to_keep_stays_for_quarantine_and_repair(full_errno):
    machine = damaged_on_a_full_disk(full_errno)
    before = segments(machine)
    log = machine.open()
    machine.disk.remove(HOME.parent / RESERVE_NAME)
    machine.take_the_rest()
    assert log.damaged_from == 10
    with pytest.raises(NoRoomToCut):
        log.quarantine()
    assert log.damaged_from == 10
    machine.holds(log)
    end_process(machine.disk)
    with pytest.raises((NoRoomToCut, OSError)):
        Repairer(HOME, filesystem=machine.disk, clock=machine.clock).repair(cut=True)
    assert segments(machine) == before
    machine.disk.capacity_bytes = None
    assert Repairer(HOME, filesystem=machine.disk, clock=machine.clock).repair(cut=True).is_whole
    with machine.open() as log:
        assert log.log_end_offset == 10
        machine.holds(log)


@FULL
def test_whole_batches_are_never_moved_but_copied(full_errno):
    """A move that is stopped leaves what it has not moved: at the next opening that would be part of the log again."""
    machine = damaged_on_a_full_disk(full_errno)
    machine.take_the_rest()
    before = segments(machine)
    with pytest.raises(NoRoomToCut):
        Repairer(HOME, filesystem=machine.disk, clock=machine.clock).repair(cut_at=5)
    assert segments(machine) == before


@pytest.mark.parametrize("end", ["kill", "power"])
@pytest.mark.parametrize("mend", [quarantine, repair])
def test_a_move_of_damage_that_is_stopped_at_any_call_goes_on(end, mend, torture):
    machine = damaged_on_a_full_disk()
    wanted, before = damaged_bytes(machine), machine.disk.steps
    mend(machine)
    steps = machine.disk.steps - before
    for step in range(1 + torture.count(5, 0), steps + 1, torture.count(19, 1)):
        machine = damaged_on_a_full_disk()
        machine.disk.power_after(step)
        with pytest.raises(PowerLost):
            mend(machine)
        if end == "power":
            machine.disk.lose_power()
            machine.disk.capacity_bytes = machine.disk.used_bytes() + (128 << 10)
        else:
            machine.disk.power_at, machine.disk.is_off = None, False  # the machine goes on, the process does not
        end_process(machine.disk)
        with machine.open() as log:
            if log.damaged_from is not None:
                log.quarantine()
            assert (log.log_end_offset, log.damaged_from) == (10, None), f"stopped at call {step} of {steps}"
            machine.holds(log)
        kept = [machine.bytes_of(name) for name in machine.disk.list(HOME) if ".cut" in name or ".corrupt" in name]
        assert set(kept) == {wanted}, f"stopped at call {step} of {steps}"
        assert not [name for name in machine.disk.list(HOME) if name.endswith(".moving")]


def test_a_disk_that_turns_read_only_refuses_and_loses_nothing():
    machine = Machine()
    log = machine.open()
    machine.append(log, 20, Durability.FLUSHED)
    machine.append(log, 10)
    machine.disk.read_only = True
    with pytest.raises((AppendFailed, LogPoisoned), match="Read-only file system"):
        log.append(b"refused")
    with pytest.raises(LogPoisoned):
        log.flush()
    machine.holds(log)
    with pytest.raises((LogPoisoned, OSError)):
        log.truncate_to(5, force=True)
    with pytest.raises(NotALog):
        SegmentLog.open(Path("/logs2/orders-0"), filesystem=machine.disk, clock=machine.clock)
    with SegmentLog.open_reader(HOME, isolation="written", filesystem=machine.disk) as reader:
        machine.holds(reader)
    with pytest.raises(OSError, match="Read-only file system"):
        log.close()
    end_process(machine.disk)
    with pytest.raises(NotALog, match="Read-only"):
        machine.open()
    machine.disk.lose_power()
    machine.disk.read_only = False
    with machine.open() as log:
        assert 20 <= log.log_end_offset <= 30
        assert log.damaged_from is None
        machine.holds(log)
        del machine.values[log.log_end_offset :]
        machine.append(log, 3)
