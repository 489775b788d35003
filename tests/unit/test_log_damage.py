"""A log that lost records which were on disk: below the damage it is read-only and kept; on request the rest is set
aside.
"""

import os
import shutil
from contextlib import suppress

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import (
    CorruptBatch,
    CorruptLog,
    Durability,
    LogConfig,
    LogDamaged,
    LogPoisoned,
    SegmentLog,
)
from pushrep.log.directory_files import (
    CheckpointFile,
    CleanLog,
    list_segments,
    read_clean_marker,
    segment_path,
    write_checkpoint,
    write_clean_marker,
)
from pushrep.log.recovery import Opening
from pushrep.log.segment import OFFSET_ENTRY
from tests.support.simulated_disk import PowerLost, SimulatedDisk
from tests.unit.test_log_keeping import PATH, Machine

pytestmark = pytest.mark.usefixtures("closes_its_files")

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
    write_checkpoint(PATH.parent, CheckpointFile.RECOVERY_POINT, {PATH.name: bases[1] + 4}, machine.disk)
    plain = LogConfig(segment_bytes=1000, preallocate_bytes=0)
    return machine, bases, plain


def opened(machine, config):
    machine.log = SegmentLog.open(PATH, config, filesystem=machine.disk, clock=machine.clock)
    return machine.log


def contents(machine):
    return {name: machine.disk.contents(PATH / name) for name in machine.disk.list(PATH)}


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
    assert [r.offset for r in log.records(0, bad)] == list(range(bad))
    for offset in (bad, bad + 1):
        with pytest.raises(CorruptBatch) as met:
            log.read(offset, 100)
        assert met.value.offset == bad
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


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("has_replicas", [True, False])
def test_a_reader_in_another_process_meets_the_damage_and_does_not_take_what_is_left_for_the_whole_log(
    tmp_path, has_replicas, is_open
):
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, has_replicas=has_replicas) as log:
        for value in (b"one", b"two", b"three"):
            log.append(value, durability=Durability.FLUSHED)
        if has_replicas:
            log.advance_high_watermark(3)
    with segment_path(path, 0).open("r+b") as file:
        file.seek(100)
        file.write(bytes(1))
    for _ in range(2):  # the second opening knows no more than the first published
        log = SegmentLog.open(path, has_replicas=has_replicas)
        assert log.damaged_from == 1
        if not is_open:
            log.close()
        with SegmentLog.open_reader(path) as reader:
            assert reader.ends() == (0, 3, 3, 3, None)
            assert [record.value for record in reader.records(0, 1)] == [b"one"]
            with pytest.raises(CorruptBatch):
                reader.read(1, 100)
        log.close()
    with SegmentLog.open(path, has_replicas=has_replicas) as log, SegmentLog.open_reader(path) as reader:
        log.quarantine()
        assert reader.ends() == (0, 1, 1, 1, None), "after the quarantine the log ends there"


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


def test_a_log_that_was_closed_behind_its_quarantine_is_clean_and_reads_by_its_indexes(damaged):
    machine, bases, plain = damaged
    log = opened(machine, plain)
    log.quarantine()
    end = log.log_end_offset
    log.close()
    entries = {
        suffix: len(machine.disk.contents(segment_path(PATH, bases[1], suffix))) for suffix in (".index", ".timeindex")
    }
    assert entries[".timeindex"], "as of a log that was never damaged, its newest time is there"
    with SegmentLog.open(PATH, plain, filesystem=machine.disk, clock=machine.clock) as again:
        assert (again.log_end_offset, again.damaged_from) == (end, None)


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
        assert [r.offset for r in log.records(0, bad)] == list(range(bad))
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


@pytest.mark.parametrize("index", ["true", "lies"])
def test_a_cut_above_rot_that_nobody_has_met_writes_over_nothing(tmp_path, index):
    config = LogConfig(preallocate_bytes=0)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        for number in range(60):
            log.append(b"%05d" % number + bytes(500), durability=Durability.BUFFERED)
    path = segment_path(log.path, 0)
    entries = list(OFFSET_ENTRY.iter_unpack(path.with_suffix(".index").read_bytes()))
    at, position = entries[-2]
    whole = path.read_bytes()
    log = SegmentLog.open(log.path, config)
    path.write_bytes(rotten := whole[:150] + b"rot" + whole[153:])
    if index == "lies":  # the batch before the cut is found all the same, but such an index is made anew
        path.with_suffix(".index").write_bytes(
            b"".join(OFFSET_ENTRY.pack(*entry) for entry in [*entries[1::-1], *entries[2:]])
        )
    try:
        assert log.truncate_to(at, force=True) == at
        assert log.append(b"new").base_offset == at
    except LogPoisoned:
        assert index == "lies"
    with suppress(LogPoisoned):
        log.close()
    assert path.read_bytes()[:position] == rotten[:position]
    with SegmentLog.open(log.path, LogConfig(verify_last_segments=1)) as log:
        assert log.damaged_from == 0
    assert path.read_bytes()[:position] == rotten[:position]


def test_damage_that_a_verification_at_open_finds_counts_however_far_below_the_end_it_lies(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        for number in range(60):
            log.append(b"%05d" % number + bytes(500), durability=Durability.BUFFERED)
    path = segment_path(log.path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:150] + b"rot" + whole[153:])
    for _ in range(2):
        with SegmentLog.open(log.path, LogConfig(verify_last_segments=1)) as log:
            assert (log.damaged_from, log.recovery.opening) == (0, Opening.ABNORMAL)
            with pytest.raises(LogDamaged):
                log.append(b"value")
        marker = {log.path.name: CleanLog(60, len(whole), 0)}
        write_clean_marker(tmp_path, marker, REAL_FILESYSTEM)  # as if it had been closed clean again
    assert len(path.read_bytes()) == len(whole)


def test_damage_is_no_end_of_the_log_where_nothing_tells_how_far_that_was_on_disk(tmp_path):
    """The seal alone tells, and only the directory of the log is left."""
    for name, value in (("here", b"ours"), ("there", b"none")):
        with SegmentLog.open(tmp_path / name / "orders-0", LogConfig(segment_bytes=200, preallocate_bytes=0)) as log:
            for _ in range(3):
                log.append([value] * 10)
    path = tmp_path / "here" / "orders-0"
    shutil.copy(segment_path(tmp_path / "there" / "orders-0", 0), path)
    for file in path.parent.iterdir():
        if file != path:
            file.unlink()
    with SegmentLog.open(path) as log, SegmentLog.open_reader(path, isolation="written") as reader:
        assert log.damaged_from == 0
        for one in (log, reader):
            with pytest.raises(CorruptBatch):
                one.read(0, 1)


def test_an_index_with_more_entries_than_there_are_batches_is_not_read(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append(b"value")
    for suffix in (".index", ".timeindex"):
        index = segment_path(log.path, 0).with_suffix(suffix)
        os.truncate(index, 1 << 40)  # no machine has the memory
        with SegmentLog.open(log.path) as log:
            assert [record.value for record in log.records(0)] == [b"value"]
        assert index.stat().st_size < 100


@pytest.mark.parametrize("lost", ["checkpoint", "checkpoint and bytes", "checkpoint and segment"])
def test_the_marker_tells_what_was_on_disk_where_the_checkpoint_is_lost(tmp_path, lost):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        for number in range(10):
            log.append(b"value%d" % number)
    path = segment_path(log.path, 0)
    (tmp_path / CheckpointFile.RECOVERY_POINT.value).unlink()
    if lost == "checkpoint and bytes":
        os.truncate(path, path.stat().st_size // 2)
    if lost == "checkpoint and segment":
        path.unlink()
        with pytest.raises(CorruptLog, match="offsets up to 10 were on disk"):
            SegmentLog.open(log.path)
        return
    with SegmentLog.open(log.path) as log:
        assert log.damaged_from == (5 if lost == "checkpoint and bytes" else None)
