"""After a kill, a log with nothing above its recovery point has nothing to prove: it is opened without a sync."""

import pytest

from pushrep.log import Durability, LogPoisoned
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    CheckpointFile,
    read_checkpoint,
    segment_path,
    write_checkpoint,
)
from pushrep.log.indexes import PENDING_MAX
from tests.unit.test_log_keeping import PATH, Machine

RECORDS = 40


@pytest.fixture
def killed():
    """A log of several segments whose process ended when all of it was on disk, and its end."""
    machine = Machine()
    machine.open()
    machine.fill(RECORDS)
    machine.log.close()
    machine.disk.remove(PATH.parent / ".pushrep_cleanshutdown")
    machine.log = None
    return machine


def recovery_point(machine):
    return read_checkpoint(PATH.parent, CheckpointFile.RECOVERY_POINT, machine.disk)[PATH.name]


def test_a_log_that_was_not_written_to_needs_no_sync(killed):
    assert recovery_point(killed) == RECORDS
    killed.disk.fail_sync()
    with killed.open() as log:
        assert log.recovery.opening.value == "abnormal"
        assert (log.log_end_offset, log.flushed_offset) == (RECORDS, RECORDS)
        killed.disk.fail_sync(0)
        assert [r.offset for r in log.records(0)] == list(range(RECORDS))


def test_room_allocated_ahead_is_nothing_to_prove_either(killed):
    path = segment_path(PATH, killed.bases()[-1])
    file = killed.disk.open(path)
    size = file.size()
    file.allocate(size + 5000)
    killed.disk.fail_sync()
    with killed.open() as log:
        assert log.log_end_offset == RECORDS
        assert file.size() == size
        killed.disk.fail_sync(0)


def test_a_record_above_the_recovery_point_is_synced_before_it_is_believed(killed):
    log = killed.open()
    log.append(b"buffered", durability=Durability.BUFFERED)
    killed.end_process()
    killed.disk.fail_sync()
    with pytest.raises(LogPoisoned):
        killed.open()
    killed.disk.crash()


@pytest.mark.parametrize("point", [0, 7, RECORDS - 1])
def test_everything_above_a_lower_recovery_point_is_synced(killed, point):
    write_checkpoint(PATH.parent, CheckpointFile.RECOVERY_POINT, {PATH.name: point}, killed.disk)
    killed.disk.fail_sync()
    with pytest.raises(LogPoisoned):
        killed.open()
    with killed.open() as log:
        assert (log.log_end_offset, log.flushed_offset) == (RECORDS, RECORDS)


def test_bytes_that_are_no_batch_are_judged_as_the_disk_holds_them(killed):
    path = segment_path(PATH, killed.bases()[-1])
    file = killed.disk.open(path)
    size = file.size()
    file.write_at(b"rubbish", size)
    killed.disk.fail_sync()
    with pytest.raises(LogPoisoned):
        killed.open()
    with killed.open() as log:  # the sync that failed has lost them: the cache showed what the disk never had
        assert log.log_end_offset == RECORDS


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_index_entries_that_a_killed_process_did_not_sync_are_on_disk_before_the_recovery_point_rises(killed, more):
    """They are in the files already, as the scan makes them: nothing has to be written, but to be synced."""
    log = killed.open(segment_bytes=1 << 20, index_interval_bytes=1, flush_bytes=1 << 30, flush_ms=86_400_000)
    for n in range(PENDING_MAX + more):
        log.append(b"%d" % n, timestamps_ms=killed.clock.wall_ms() + n, durability=Durability.BUFFERED)
    killed.end_process()
    with killed.open(segment_bytes=1 << 20, index_interval_bytes=1) as log:
        assert recovery_point(killed) == log.log_end_offset == RECORDS + PENDING_MAX + more
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            index = segment_path(PATH, killed.bases()[-1], suffix)
            assert len(killed.disk.contents(index)) >= 8
            assert killed.disk.contents(index, synced=True) == killed.disk.contents(index), suffix
