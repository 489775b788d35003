"""A moment in which the system is short of something refuses one append and nothing else; a failed sync stops the log.

where the error comes     a shortage (EMFILE ... EFBIG)              EIO, EROFS
open, write               refused                                    refused if it could be undone, else stopped
a roll, before the sync   refused; the next append rolls             refused
the undoing               refused; undone before the next append     stopped
seal, checkpoint, index   nothing: they are written later            nothing
sync of the records       stopped: what the disk holds is unknown    stopped
"""

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pushrep import Outbox, OutboxConfig
from pushrep.env import RealFilesystem
from pushrep.log import AppendFailed, CorruptBatch, Durability, LogConfig, LogPoisoned, SegmentLog
from pushrep.log.errors import SHORTAGES
from pushrep.log.flush_scheduler import GroupCommitLeader
from pushrep.log.segment import Segment
from pushrep.log.writer import LogWriter
from pushrep.outbox import DeliveryFailed
from tests.support.forks import code_in_fork
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

BUFFERED = Durability.BUFFERED


def in_child(case):
    assert code_in_fork(case) == 0, "see the child's words in the captured stderr"


@contextmanager
def without_descriptors():
    """Not one more may be opened. The system's own limit: `with` it, nothing else of the process may run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    spare = []
    while (fd := os.dup(0)) < used:  # numbers in between
        spare.append(fd)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)


def refused_by_number(append):
    with pytest.raises(AppendFailed, match="ulimit -n") as refused:
        append()
    assert refused.value.errno == errno.EMFILE


def test_a_moment_without_descriptors_refuses_and_the_next_append_goes_on(tmp_path):
    def case():
        config = LogConfig(segment_bytes=2000, batch_bytes=1000, flush_ms=600_000)
        logs = [SegmentLog.open(tmp_path / f"orders-{n}", config) for n in range(40)]
        for log in logs[:20]:  # these have their file open
            log.append(b"before", durability=BUFFERED)
        rolling = logs[0]
        rolling.append(b"x" * 900)
        with without_descriptors():
            for log in logs[20:]:
                refused_by_number(lambda log=log: log.append(b"refused"))
            for log in logs[1:20]:
                assert log.append(b"no new file is needed") == (1, 1)
            refused_by_number(lambda: rolling.append(b"y" * 1500))
            refused_by_number(lambda: rolling.append([b"in both segments" * 50] * 3))
            refused_by_number(lambda: logs[20].append(b"refused again"))
        assert rolling.append(b"y" * 1500) == (2, 2)
        for log in logs[20:]:
            assert log.append(b"taken") == (0, 0)
        assert [log.stopped_by for log in logs] == [None] * 40
        for log in logs:
            log.close()
        with SegmentLog.open(rolling.path) as log:
            assert [record.value[:6] for record in log.records(0)] == [b"before", b"xxxxxx", b"yyyyyy"]
        for log in logs[20:]:
            with SegmentLog.open(log.path) as opened:
                assert opened.recovery.opening.value == "normal"
                assert [record.value for record in opened.records(0)] == [b"taken"]

    in_child(case)


def test_a_moment_without_descriptors_stops_no_partition(tmp_path):
    def case():
        with Outbox.open(tmp_path, "orders", 8, "billing", config=OutboxConfig(linger_ms=0)) as outbox:
            with without_descriptors():
                for partition in range(8):
                    with pytest.raises(DeliveryFailed, match="ulimit -n") as failed:
                        outbox.append(partition, b"refused").result(30)
                    assert not failed.value.may_be_delivered
            assert [outbox.append(partition, b"taken").result(30) for partition in range(8)] == [0] * 8
            assert [record.value for record in outbox.log(7).records(0)] == [b"taken"]

    in_child(case)


class FaultyDisk(RealFilesystem):
    """While `faults` has (call, part of a file's name), that call raises the error."""

    def __init__(self):
        self.faults = {}

    def check(self, call, path):
        for (name, part), number in self.faults.items():
            if name == call and part in path.name:
                raise OSError(number, os.strerror(number), str(path))

    def open(self, path, *, create=False, writable=True):
        self.check("create" if create and not path.exists() else "open", path)
        return FaultyFile(super().open(path, create=create, writable=writable), self, path)

    def sync_directory(self, directory):
        self.check("sync", directory)
        super().sync_directory(directory)

    def rename(self, source, target):
        self.check("rename", target)
        super().rename(source, target)

    def list(self, directory):
        self.check("list", directory)
        return super().list(directory)


class FaultyFile:
    def __init__(self, file, disk, path):
        self._file, self._disk, self._path = file, disk, path

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write_at(self, data, position):
        self._disk.check("write", self._path)
        self._file.write_at(data, position)

    def truncate(self, size):
        self._disk.check("truncate", self._path)
        self._file.truncate(size)

    def sync(self):
        self._disk.check("sync", self._path)
        self._file.sync()


NEWEST, NEXT, DIRECTORY = f"{0:020d}.log", f"{2:020d}.log", "orders-0"
REFUSED, STOPPED, TAKEN = "refused", "stopped", "taken"
PLACES = {
    # name: (the calls that fail, rolls, what a shortage does, what EIO and EROFS do)
    "open": ({("open", NEWEST)}, False, REFUSED, STOPPED),
    "write": ({("write", NEWEST)}, False, REFUSED, REFUSED),
    "write and undo": ({("write", NEWEST), ("truncate", NEWEST)}, False, REFUSED, STOPPED),
    "write, and sync of the undo": ({("write", NEWEST), ("sync", NEWEST)}, False, STOPPED, STOPPED),
    "sync": ({("sync", NEWEST)}, False, STOPPED, STOPPED),
    "roll: index": ({("open", ".index"), ("create", ".index")}, True, REFUSED, REFUSED),
    "roll: sync of the index": ({("sync", ".index")}, True, REFUSED, REFUSED),
    "roll: sync": ({("sync", NEWEST)}, True, STOPPED, STOPPED),
    "roll: seal": ({("rename", ".seal")}, True, TAKEN, TAKEN),
    "roll: next file": ({("create", NEXT)}, True, REFUSED, REFUSED),
    "roll: directory": ({("sync", DIRECTORY)}, True, REFUSED, STOPPED),
    "roll: next file and undo": ({("create", NEXT), ("list", DIRECTORY)}, True, REFUSED, STOPPED),
    "roll: write": ({("write", NEXT)}, True, REFUSED, REFUSED),
    "roll: write and undo": ({("write", NEXT), ("list", DIRECTORY)}, True, REFUSED, STOPPED),
    "checkpoints": ({("rename", "checkpoint")}, True, TAKEN, TAKEN),
}


@pytest.mark.parametrize("number", sorted({*SHORTAGES, errno.EIO, errno.EROFS}), ids=errno.errorcode.get)
@pytest.mark.parametrize("place", PLACES)
def test_what_an_error_does_to_an_append(tmp_path, place, number):
    calls, rolls, by_shortage, else_ = PLACES[place]
    expected = by_shortage if number in SHORTAGES else else_
    disk, path = FaultyDisk(), tmp_path / DIRECTORY
    config = LogConfig(segment_bytes=2000, flush_ms=600_000, preallocate_bytes=0)
    log = SegmentLog.open(path, config, filesystem=disk)
    values = [b"first", b"second"]
    for value in values:
        log.append(value)
    if place == "open":
        log.close()
        log = SegmentLog.open(path, config, filesystem=disk)
    disk.faults = dict.fromkeys(calls, number)
    third = b"3" * (1900 if rolls else 10)
    if expected == TAKEN:
        assert log.append(third) == (2, 2)
        values.append(third)
    else:
        with pytest.raises(AppendFailed if expected == REFUSED else LogPoisoned) as raised:
            log.append(third)
        if expected == REFUSED:
            assert raised.value.errno == number
            assert (log.log_end_offset, log.stopped_by) == (2, None)
        else:
            assert log.stopped_by is not None
    disk.faults = {}
    if expected == STOPPED:
        with pytest.raises(LogPoisoned):
            log.append(b"no")
        log.reopen()
        values = [record.value for record in log.records(0)]
        assert values in ([b"first", b"second"], [b"first", b"second", third]), (
            "the sync failed, the bytes may be there"
        )
    fourth = b"4" * (1900 if rolls else 10)
    assert log.append(fourth) == (len(values), len(values))
    values.append(fourth)
    log.close()
    with SegmentLog.open(path, config) as opened:
        assert opened.recovery.opening.value == "normal"
        assert [record.value for record in opened.records(0)] == values
        assert not [name for name in os.listdir(path) if ".cut" in name]


LEFT = {
    # where whole batches of a refused append are left: what fails, and how many batches of 5 KB there were
    "in its file": ({("create", ".log"): errno.ENOSPC, ("truncate", NEWEST): errno.ENOMEM}, 6),
    "in a segment of theirs": ({("create", f"{9:020d}.log"): errno.ENOSPC, ("list", DIRECTORY): errno.ENOMEM}, 10),
}


@pytest.mark.parametrize("place", LEFT)
def test_what_a_refused_append_left_is_gone_when_the_log_is_closed_at_once(tmp_path, place):
    disk, path = FaultyDisk(), tmp_path / DIRECTORY
    config = LogConfig(batch_bytes=5000, segment_bytes=20_000, preallocate_bytes=0)
    log = SegmentLog.open(path, config, filesystem=disk)
    log.append(b"first")
    # Batches of 5 KB are written one by one: some are in their file before another file is needed.
    disk.faults, count = LEFT[place]
    with pytest.raises(AppendFailed):
        log.append([b"refused" * 700] * count, durability=BUFFERED)
    assert sum(file.stat().st_size for file in path.glob("*.log")) > 10_000, "whole batches of it are still there"
    disk.faults = {}
    log.close()
    with SegmentLog.open(path, config) as opened:
        assert (opened.log_end_offset, opened.recovery.opening.value) == (1, "normal")
    assert [file.name for file in path.glob("*.log")] == [NEWEST]


def test_an_interruption_while_the_rest_of_a_refused_append_is_removed_ends_the_next_append(tmp_path, monkeypatch):
    disk = FaultyDisk()
    with SegmentLog.open(tmp_path / DIRECTORY, LogConfig(preallocate_bytes=0), filesystem=disk) as log:
        log.append(b"first")
        disk.faults = {("write", NEWEST): errno.ENOSPC, ("truncate", NEWEST): errno.ENOMEM}
        with pytest.raises(AppendFailed):
            log.append(b"refused")
        disk.faults = {}

        def interrupt(_segment):
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(Segment, "cut_back", interrupt)
            with pytest.raises(KeyboardInterrupt):
                log.append(b"interrupted")
        with pytest.raises(LogPoisoned, match="KeyboardInterrupt"):
            log.append(b"the rest may be there")
        log.reopen()
        assert log.append(b"second") == (1, 1)
        assert [record.value for record in log.records(0)] == [b"first", b"second"]


def in_a_thread(call):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def append(log):
    log.append(b"mine", durability=Durability.FLUSHED)


WAITS = {
    "a flush": lambda log: log.flush(),
    "an append": append,
    "an append in another thread": lambda log: in_a_thread(lambda: append(log)),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
def test_who_waited_for_a_sync_that_failed_is_told_also_once_the_log_is_open_again(monkeypatch, call):
    """Another thread leads the sync, fails, and opens the log anew, before the one that waits looks again."""
    disk, acquire, to_come = SimulatedDisk(), GroupCommitLeader.acquire, [True]
    config = LogConfig(preallocate_bytes=0, flush_ms=3_600_000)
    with SegmentLog.open(Path("/logs/orders-0"), config, filesystem=disk, clock=SimulatedClock()) as log:
        log.append(b"first")
        log.append(b"before a flush", durability=BUFFERED)

        def acquire_late(leader, settled, wanted):
            if to_come:
                to_come.clear()
                disk.fail_sync()
                with pytest.raises(LogPoisoned):
                    log.append(b"another thread's")
                log.reopen()
            return acquire(leader, settled, wanted)

        monkeypatch.setattr(GroupCommitLeader, "acquire", acquire_late)
        with pytest.raises(LogPoisoned):
            call(log)
        assert [record.value for record in log.records(0)] == [b"first"], "nothing of it is on disk"
        call(log)
        assert log.flushed_offset == log.log_end_offset


def test_an_append_that_the_log_lost_before_its_flush_began_is_not_acknowledged(monkeypatch):
    """In the main thread an append and its flush are two steps."""
    disk, flush, to_come = SimulatedDisk(), LogWriter.flush_acknowledged, [True]
    config = LogConfig(preallocate_bytes=0, flush_ms=3_600_000)
    with SegmentLog.open(Path("/logs/orders-0"), config, filesystem=disk, clock=SimulatedClock()) as log:
        log.append(b"first")

        def flush_late(writer, *arguments):
            if to_come:
                to_come.clear()
                disk.fail_sync()
                with pytest.raises(LogPoisoned):
                    log.flush()
                log.reopen()
            return flush(writer, *arguments)

        monkeypatch.setattr(LogWriter, "flush_acknowledged", flush_late)
        with pytest.raises(LogPoisoned):
            append(log)
        assert log.log_end_offset == 1
        append(log)
        assert [record.value for record in log.records(0)] == [b"first", b"mine"]


def rolled(path, disk, count=30, **settings):
    config = LogConfig(segment_bytes=1000, batch_bytes=1000, preallocate_bytes=0, **settings)
    log = SegmentLog.open(path, config, filesystem=disk)
    for n in range(count):
        log.append(b"%03d" % n * 30, timestamps_ms=1)
    return log


@pytest.mark.parametrize("number", sorted(SHORTAGES - {errno.EFBIG}), ids=errno.errorcode.get)
def test_a_shortage_while_a_segment_is_read_says_nothing_of_it(tmp_path, number):
    disk = FaultyDisk()
    with rolled(tmp_path / "orders-0", disk) as log:
        disk.faults = {("open", ".log"): number}
        assert log.scrub.run_pass().findings == ()
        disk.faults = {}
        status = log.scrub.run_pass()
        assert (status.findings, status.segments) == ((), len(list(log.path.glob("*.seal"))))
        disk.faults = {("open", ".log"): errno.EIO}
        assert len(log.scrub.run_pass().findings) == len(list(log.path.glob("*.seal")))


class FailsOnce(FaultyDisk):
    """Each fault happens once."""

    def check(self, call, path):
        try:
            super().check(call, path)
        except OSError:
            self.faults = {}
            raise

    def remove(self, path):
        self.check("remove", path)
        super().remove(path)


@pytest.mark.parametrize("fault", [("rename", "checkpoint"), ("remove", f"{6:020d}.log")], ids=["checkpoint", "file"])
@pytest.mark.parametrize("call", [SegmentLog.purge, SegmentLog.delete_records, SegmentLog.purge_old])
def test_a_removal_that_an_error_stopped_is_told_and_goes_on_at_the_next_call(tmp_path, call, fault):
    disk = FailsOnce()
    with rolled(tmp_path / "orders-0", disk) as log:
        bases = [int(path.stem) for path in sorted(log.path.glob("*.log"))]
        assert bases[1] == 6
        before = {"before_offset": bases[3]}
        disk.faults = {fault: errno.EIO}
        with pytest.raises(OSError, match="Input/output error"):
            call(log, **before)
        call(log, **before)
        left = [int(path.stem) for path in sorted(log.path.glob("*.log"))]
        assert (left, log.log_start_offset) == (bases[3:], bases[3]), "what the first call left was never removed"


class Resting:
    """A scrub in the background that reads when the test says so."""

    def attach(self, scrub):
        pass

    detach = attach

    def soon(self, scrub, delay_ms):
        pass


def test_a_shortage_while_a_segment_is_read_that_a_reader_found_damaged_puts_it_off(tmp_path, monkeypatch):
    """It is still the next that is read, before any pass."""
    monkeypatch.setattr("pushrep.log.directory.process_scrubber", Resting)
    disk = FaultyDisk()
    with rolled(tmp_path / "orders-0", disk) as log:
        segment = sorted(log.path.glob("*.log"))[1]
        data = bytearray(segment.read_bytes())
        data[-1] ^= 1
        segment.write_bytes(data)
        with pytest.raises(CorruptBatch):
            list(log.records(0))
        disk.faults = {("open", ".log"): errno.EMFILE}
        log.scrub.flush_in_background()
        assert log.scrub.status.findings == ()
        disk.faults = {}
        log.scrub.flush_in_background()
        status = log.scrub.status
        assert [(one.segment, status.passes) for one in status.findings] == [(segment.name, 0)]


def test_a_shortage_while_a_seal_is_read_lets_no_segment_pass_for_good(tmp_path):
    disk = FaultyDisk()
    with rolled(tmp_path / "orders-0", disk) as log, rolled(tmp_path / "other" / "orders-0", disk) as other:
        for theirs in other.path.glob(f"{0:020d}.*"):  # of the same bytes, with the seal: the owner tells them apart
            (log.path / theirs.name).write_bytes(theirs.read_bytes())
        for part in (".seal", "partition.metadata"):
            disk.faults = {("open", part): errno.EMFILE}
            with pytest.raises(OSError, match="Too many open files"):
                next(log.batches(0))
        disk.faults = {}
        with pytest.raises(CorruptBatch, match="sealed as a segment of log"):
            next(log.batches(0))


def test_a_shortage_while_a_segments_age_is_read_does_not_keep_it_for_good(tmp_path):
    disk = FaultyDisk()
    with rolled(tmp_path / "orders-0", disk, retention_ms=1000) as log:
        disk.faults = {("open", f"{0:020d}.timeindex"): errno.EMFILE}
        assert log.apply_retention() == ()
        disk.faults = {}
        assert log.apply_retention()
