"""A log whose records were on disk and are not any more: read-only below, kept, and set aside when told so."""

from contextlib import suppress

import pytest

from pushrep.log import LogConfig, LogDamaged, OffsetOutOfRange, SegmentLog
from pushrep.log.checkpoints import Checkpoint, write_checkpoint
from pushrep.log.clean_marker import read_clean_marker
from pushrep.log.segment_files import list_segments, segment_path
from pushrep.seams import REAL_FILESYSTEM
from pushrep.testing import PowerLost, SimulatedDisk
from tests.unit.test_log_keeping import PATH, Machine

RECORDS = 40


def damaged_machine(seed=0):
    """A log of several segments, closed, with one bit flipped in the second; the bytes of every file beside it."""
    machine = Machine()
    machine.disk = SimulatedDisk(seed, clock=machine.clock)
    machine.open()
    machine.fill(RECORDS)
    bases = machine.bases()
    machine.log.close()
    machine.disk.flip_bit(segment_path(PATH, bases[1]), 8 * 200 + 3)
    # Nobody says that it was closed: the opening scans.
    machine.disk.remove(PATH.parent / ".pushrep_cleanshutdown")
    # The scan begins at the recovery point: at a batch before the bad one, with the damage below it all the same.
    write_checkpoint(PATH.parent, Checkpoint.RECOVERY_POINT, {PATH.name: bases[1] + 4}, machine.disk)
    plain = LogConfig(segment_bytes=1000, preallocate_bytes=0)
    return machine, bases, plain


def opened(machine, config):
    machine.log = SegmentLog.open(PATH, config, filesystem=machine.disk, clock=machine.clock)
    return machine.log


def contents(machine):
    return {name: bytes(machine.disk._inode(PATH / name).cache) for name in machine.disk.list(PATH)}


@pytest.fixture
def damaged():
    machine, bases, plain = damaged_machine()
    yield machine, bases, plain
    if machine.log is not None:
        machine.log.close()


def test_it_is_read_below_the_damage_and_written_nowhere(damaged):
    machine, bases, plain = damaged
    before = contents(machine)
    log = opened(machine, plain)
    bad = log.damaged_from
    assert bases[1] <= bad < bases[2]
    assert log.recovery.damaged_from == bad == log.log_end_offset
    assert [r.offset for r in log.records(0)] == list(range(bad))
    with pytest.raises(OffsetOutOfRange):
        log.read(bad + 1, 100)
    for write in (
        lambda: log.append(b"x"),
        lambda: log.truncate_to(0, force=True),
        lambda: log.purge(bases[1]),
    ):
        with pytest.raises(LogDamaged) as caught:
            write()
        assert caught.value.damaged_from == bad
    assert log.apply_retention() == ()
    log.close()
    machine.log = None
    after = contents(machine)
    assert {n: d for n, d in after.items() if n.endswith(".log")} == {
        n: d for n, d in before.items() if n.endswith(".log")
    }
    assert PATH.name not in read_clean_marker(PATH.parent, machine.disk), "never counted as closed clean"
    assert opened(machine, plain).damaged_from == bad, "found again"


def test_quarantine_keeps_every_byte_and_takes_appends_again(damaged):
    machine, bases, plain = damaged
    before = contents(machine)
    log = opened(machine, plain)
    bad = log.damaged_from
    kept = log.quarantine()
    later = [f"{base:020d}.log" for base in bases[2:]]
    assert kept[1:] == tuple(f"{name}.corrupt" for name in later)
    for name in later:
        assert contents(machine)[f"{name}.corrupt"] == before[name]
    second = f"{bases[1]:020d}.log"
    position = int(kept[0].split(".")[2])
    assert kept[0] == f"{second}.{position}.corrupt"
    assert before[second][:position] == contents(machine)[second]
    assert before[second][position:] == contents(machine)[kept[0]], "to the last byte: most batches end with a zero"
    assert log.damaged_from is None
    assert log.recovery.damaged_from == bad, "what the opening found stays told"
    assert log.append(b"again") == (bad, bad)
    assert log.quarantine() == ()
    log.close()
    log = opened(machine, plain)
    assert (log.log_end_offset, log.damaged_from, log.recovery.opening.value) == (bad + 1, None, "normal")


def test_a_power_cut_at_any_step_of_the_quarantine_loses_nothing():
    steps = 0
    while True:
        steps += 1
        machine, bases, plain = damaged_machine(steps)
        before = contents(machine)
        log = opened(machine, plain)
        bad = log.damaged_from
        machine.disk.power_after(steps)
        done = False
        with suppress(PowerLost):
            log.quarantine()
            done = True
        machine.disk.lose_power()
        machine.end_process()
        log = opened(machine, plain)
        assert log.log_end_offset == bad, f"{steps} steps"
        assert [r.offset for r in log.records(0)] == list(range(bad))
        kept = b"".join(data for name, data in contents(machine).items() if ".corrupt" in name or ".cut" in name)
        for base in bases[2:]:
            name = f"{base:020d}.log"
            assert before[name] in kept or contents(machine).get(name) == before[name], f"{name} after {steps} steps"
        log.close()
        if done:
            break
    assert steps > 5


def test_a_log_without_damage_has_nothing_to_set_aside(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"x"] * 3)
        assert log.quarantine() == ()
        assert log.damaged_from is None
        assert list_segments(REAL_FILESYSTEM, log.path) == [0]
