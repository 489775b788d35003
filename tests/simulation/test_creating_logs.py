"""Many logs made at once, and led at once: whole after any power cut, few syncs for all of them."""

import errno
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from pushrep.env import RealFilesystem
from pushrep.env.filesystem import REAL_FILESYSTEM, syncfs_says_errors
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory, create_logs
from pushrep.log.directory_files import read_leader_epochs
from pushrep.log.recovery import Opening
from pushrep.records import encode_batch
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk
from tests.unit.gated_disk import MeetingDisk

HOME = Path("/data")
LOG_ID = uuid4()
NAMES = [f"orders-{n}" for n in range(4)]


def create(disk, clock):
    held = LogDirectory.acquire(HOME, disk, clock)
    try:
        create_logs(held, dict.fromkeys(NAMES, LOG_ID))
    finally:
        held.release()


def create_and_begin(disk, clock):
    """As an outbox with replicas does."""
    held = LogDirectory.acquire(HOME, disk, clock)
    try:
        create_logs(held, dict.fromkeys(NAMES, LOG_ID), has_replicas=True)
        for epoch in (256, 512):
            with ExitStack() as opened:
                logs = [
                    opened.enter_context(SegmentLog.open(HOME / name, has_replicas=True, filesystem=disk, clock=clock))
                    for name in NAMES
                ]
                logs[0].begin_epochs([(log, epoch, log.log_end_offset) for log in logs])
                for log in logs:
                    log.append(b"x", durability=Durability.FLUSHED)
    finally:
        held.release()


def create_until(steps, seed, create=create, *, syncs_whole=False):
    """The power goes at that step; False if all were made before."""
    clock = SimulatedClock()
    disk = SimulatedDisk(seed, clock=clock)
    disk.syncs_whole = syncs_whole
    disk.power_after(steps)
    try:
        create(disk, clock)
    except PowerLost:
        return disk, clock, False
    return disk, clock, True


@pytest.mark.parametrize("syncs_whole", [False, True])
def test_a_log_with_replicas_has_each_epoch_before_its_first_record_after_a_power_cut_at_any_step(syncs_whole, torture):
    done, steps, stride = False, 3 * syncs_whole, torture.count(7, 1)
    while not done:
        steps += stride
        disk, clock, done = create_until(steps, steps, create_and_begin, syncs_whole=syncs_whole)
        disk.lose_power()
        for name in NAMES:
            with SegmentLog.open(HOME / name, log_id=LOG_ID, has_replicas=True, filesystem=disk, clock=clock) as log:
                assert log.log_id == LOG_ID
                assert log.recovery.damaged_from is None
                kept = read_leader_epochs(HOME / name, disk)
                if log.log_end_offset:
                    begun = ((256, 0), (512, 1))[: len(kept.entries)]
                    assert log.leader_epochs.entries == kept.entries == begun
                    assert len(begun) >= log.log_end_offset
                log.begin_epoch(768, log.log_end_offset)
                log.append(b"y")
                assert read_leader_epochs(HOME / name, disk).latest_epoch == 768
    assert steps > 50, "it was cut in the middle of everything"


@pytest.mark.parametrize("syncs_whole", [False, True])
def test_after_a_power_cut_at_any_step_each_opens_with_its_id_and_takes_records(syncs_whole, torture):
    done, steps, stride = False, 3 * syncs_whole, torture.count(7, 1)
    while not done:
        steps += stride
        disk, clock, done = create_until(steps, steps, syncs_whole=syncs_whole)
        disk.lose_power()
        for name in NAMES:
            with SegmentLog.open(HOME / name, log_id=LOG_ID, filesystem=disk, clock=clock) as log:
                assert log.log_id == LOG_ID
                assert log.append(b"x").base_offset == 0
    assert steps > 50, "it was cut in the middle of everything"


def test_what_was_made_is_there_after_a_power_cut_and_opens_as_closed_clean():
    disk, clock, done = create_until(10_000, 1)
    assert done
    disk.lose_power()
    for name in NAMES:
        assert {"partition.metadata", "leader-epoch-checkpoint", f"{0:020}.log"} <= set(disk.list(HOME / name))
        with SegmentLog.open(HOME / name, filesystem=disk, clock=clock) as log:
            assert (log.log_id, log.recovery.opening) == (LOG_ID, Opening.NORMAL)


@pytest.mark.parametrize("syncs_whole", [False, True])
def test_epochs_that_could_not_be_brought_to_disk_have_not_begun(syncs_whole):
    disk, clock, _ = create_until(10_000, 1, syncs_whole=syncs_whole)
    with ExitStack() as opened:
        logs = [
            opened.enter_context(SegmentLog.open(HOME / name, has_replicas=True, filesystem=disk, clock=clock))
            for name in NAMES
        ]
        disk.fail_sync()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            logs[0].begin_epochs([(log, 256, 0) for log in logs])
        assert {log.leader_epochs.latest_epoch for log in logs} == {0}
        logs[0].begin_epochs([(log, 256, 0) for log in logs])
        assert {read_leader_epochs(log.path, disk).latest_epoch for log in logs} == {256}


class CountingDisk(RealFilesystem):
    syncs_whole = False

    def __init__(self):
        self.synced, self.files_synced, self.wholes = Counter(), Counter(), 0

    def whole_sync(self, directory):
        return self if self.syncs_whole else None

    def sync(self):
        self.wholes += 1

    def close(self):
        pass

    def open(self, path, *, create=False, writable=True):
        return CountedFile(super().open(path, create=create, writable=writable), path, self.files_synced)

    def sync_directory(self, directory):
        self.synced[directory.name] += 1
        super().sync_directory(directory)


class CountedFile:
    def __init__(self, file, path, synced):
        self.file, self.path, self.synced = file, path, synced

    def __getattr__(self, name):
        return getattr(self.file, name)

    def sync(self):
        self.synced[self.path.parent.name] += 1
        self.file.sync()


def test_the_directory_above_is_synced_once_for_all(tmp_path):
    disk = CountingDisk()
    held = LogDirectory.acquire(tmp_path / "logs", disk)
    disk.synced.clear()
    create_logs(held, {f"orders-{n}": LOG_ID for n in range(20)})
    assert disk.synced == {"logs": 1, **{f"orders-{n}": 1 for n in range(20)}}
    create_logs(held, {f"orders-{n}": LOG_ID for n in range(20)})
    assert disk.synced["logs"] == 1, "they are there"
    held.release()


def test_a_log_with_replicas_that_is_made_and_led_takes_five_syncs(tmp_path):
    """In a new outbox of a thousand partitions each member pays these syncs for each of them."""
    disk = CountingDisk()
    held = LogDirectory.acquire(tmp_path / "logs", disk)
    names = [f"orders-{n}" for n in range(5)]
    create_logs(held, dict.fromkeys(names, LOG_ID), has_replicas=True)
    for name in names:
        with SegmentLog.open(tmp_path / "logs" / name, has_replicas=True, filesystem=disk) as log:
            log.begin_epoch(256, 0)
            assert disk.files_synced[name] + disk.synced[name] == 5
    held.release()


def test_thousands_that_are_made_and_led_take_five_syncs_together_where_a_file_system_is_synced_whole(tmp_path):
    disk = CountingDisk()
    disk.syncs_whole = True
    held = LogDirectory.acquire(tmp_path / "logs", disk)
    names = [f"orders-{n}" for n in range(5)]
    disk.synced.clear()
    create_logs(held, dict.fromkeys(names, LOG_ID), has_replicas=True)
    with ExitStack() as opened:
        logs = [
            opened.enter_context(SegmentLog.open(tmp_path / "logs" / name, has_replicas=True, filesystem=disk))
            for name in names
        ]
        logs[0].begin_epochs([(log, 256, 0) for log in logs])
        assert (disk.wholes, disk.synced, sum(disk.files_synced[name] for name in names)) == (4, {"logs": 1}, 0)
        logs[0].begin_epochs([(log, 512, 0) for log in logs])
        assert disk.wholes == 7, "a list that is replaced has its new CRC on disk before"
    held.release()


def test_a_file_system_is_synced_whole_only_where_it_says_whether_it_succeeded(tmp_path, monkeypatch):
    assert REAL_FILESYSTEM.whole_sync(Path("/proc")) is None, (
        "what it holds is on no disk, and other kinds are not known"
    )
    if (whole := REAL_FILESYSTEM.whole_sync(tmp_path)) is not None:
        whole.sync()
        whole.close()
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            whole.sync()
    for release, says in (("5.7.19-x", False), ("5.8.0", True), ("6.1", True), ("unknown", False)):
        syncfs_says_errors.cache_clear()
        monkeypatch.setattr(os, "uname", lambda release=release: SimpleNamespace(release=release))
        assert syncfs_says_errors() is says
    syncfs_says_errors.cache_clear()


def test_the_first_record_of_a_log_with_replicas_that_comes_without_an_epoch_brings_the_list_along(tmp_path):
    """As records that were appended before an outbox had replicas: they are of epoch 0."""
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        assert read_leader_epochs(log.path) is None
        log.append_as_is([encode_batch([b"x"], timestamps_ms=1, leader_epoch=0)])
        assert read_leader_epochs(log.path).entries == ((0, 0),)


def test_their_files_are_synced_beside_each_other(tmp_path):
    disk = MeetingDisk()
    disk.meets = ".tmp"
    held = LogDirectory.acquire(tmp_path / "logs", disk)
    disk.meet(4)
    create_logs(held, {f"orders-{n}": LOG_ID for n in range(4)})
    disk.party = None
    held.release()


def test_the_first_segment_of_a_log_made_so_is_sealed_when_it_rolls(tmp_path):
    held = LogDirectory.acquire(tmp_path)
    create_logs(held, {"orders-0": LOG_ID})
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=200, preallocate_bytes=0)) as log:
        log.append(b"x" * 100)
        log.append(b"x" * 100)
        assert list(log.path.glob("*.seal")), "whatever is in it was seen as it was written"
    held.release()


def test_one_that_was_removed_by_hand_is_made_anew_and_remembers_what_was_seen(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"x"] * 5)
    for path in (*log.path.iterdir(), log.path):
        path.unlink() if path.is_file() else path.rmdir()
    held = LogDirectory.acquire(tmp_path)
    create_logs(held, {"orders-0": LOG_ID})
    assert held.seen_to("orders-0") == 5
    with SegmentLog.open(tmp_path / "orders-0") as log:
        assert (log.log_end_offset, log.log_id) == (0, LOG_ID)
    held.release()
