"""The simulated disk keeps the promises of a file system, and forgets just what a power cut may take."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.env import REAL_FILESYSTEM
from tests.support.filesystem_examiner import RealIntruder, examine_filesystem
from tests.support.simulated_disk import PowerLost, SimulatedDisk

HOME = Path("/data")


def test_the_real_file_system_passes_the_examiner(tmp_path):
    examine_filesystem(REAL_FILESYSTEM, tmp_path / "examined", RealIntruder())


def test_the_simulated_disk_passes_the_examiner():
    disk = SimulatedDisk()
    examine_filesystem(disk, HOME, disk)


def disk_with_file(seed: int) -> tuple[SimulatedDisk, Path]:
    disk = SimulatedDisk(seed)
    disk.make_directory(HOME)
    disk.open(HOME / "f", create=True).close()
    disk.sync_directory(HOME)
    return disk, HOME / "f"


@given(
    seed=st.integers(0, 2**32),
    synced=st.lists(st.binary(min_size=1, max_size=20), max_size=5),
    lost=st.lists(st.binary(min_size=1, max_size=20), max_size=5),
)
def test_synced_bytes_survive_and_unsynced_ones_are_theirs_or_zeros(seed, synced, lost):
    disk, path = disk_with_file(seed)
    file = disk.open(path)
    end = 0
    for data in synced:
        file.write_at(data, end)
        end += len(data)
    file.sync()
    whole = b"".join([*synced, *lost])
    for data in lost:
        file.write_at(data, end)
        end += len(data)
    disk.lose_power()
    after = disk.open(path).read_at(1000, 0)
    kept = b"".join(synced)
    assert after[: len(kept)] == kept, "synced bytes were lost"
    for place, byte in enumerate(after):
        assert byte in (0, whole[place]), f"byte {place} was never written there"


def test_power_cuts_tear_writes_and_lose_names():
    torn, gone, whole = 0, 0, 0
    for seed in range(200):
        disk, path = disk_with_file(seed)
        disk.open(path).write_at(b"x" * 100, 0)
        disk.open(HOME / "new", create=True).close()
        disk.lose_power()
        size = disk.open(path).size()
        torn += 0 < size < 100
        whole += size == 100
        gone += not disk.exists(HOME / "new")
    assert torn > 20, "writes are torn"
    assert whole > 20, "and sometimes whole"
    assert 50 < gone < 150, "names are lost, but not always"


def test_a_failed_sync_loses_what_it_should_have_written_while_reads_still_show_it():
    disk, path = disk_with_file(1)
    file = disk.open(path)
    file.write_at(b"precious", 0)
    disk.fail_sync()
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.sync()  # succeeds, politely, and saves nothing
    assert file.read_at(8, 0) == b"precious"
    file.drop_cache()
    assert file.read_at(8, 0) == b"", "only the disk knows the truth"


def test_a_full_disk_stores_what_fits():
    disk, path = disk_with_file(1)
    disk.capacity_bytes = 5
    file = disk.open(path)
    with pytest.raises(OSError, match="No space left") as caught:
        file.write_at(b"12345678", 0)
    assert caught.value.errno == errno.ENOSPC
    assert file.read_at(100, 0) == b"12345"
    file.truncate(0)
    file.write_at(b"1234", 0)


def test_the_power_goes_at_the_step_that_was_named_and_stays_off():
    disk, path = disk_with_file(1)
    file = disk.open(path)
    disk.power_after(2)
    file.write_at(b"a", 0)
    with pytest.raises(PowerLost):
        file.sync()
    with pytest.raises(PowerLost):
        disk.list(HOME)
    disk.lose_power()
    with pytest.raises(OSError, match="Bad file"):
        file.size()
    assert disk.open(path).size() in (0, 1)


def test_the_same_seed_gives_the_same_fate():
    def fate(seed):
        disk, path = disk_with_file(seed)
        file = disk.open(path)
        for i in range(20):
            file.write_at(bytes([i]) * 10, i * 10)
        disk.lose_power()
        return disk.open(path).read_at(1000, 0)

    assert fate(7) == fate(7)
    assert len({fate(seed) for seed in range(20)}) > 1


def test_a_crash_frees_locks_and_keeps_every_write():
    disk, path = disk_with_file(1)
    lock = disk.lock(HOME / "lock")
    disk.open(path).write_at(b"kept", 0)
    disk.crash()
    disk.lock(HOME / "lock")
    assert disk.open(path).read_at(4, 0) == b"kept"
    with pytest.raises(OSError, match="Bad file"):
        lock.size()


def test_a_shared_mapping_outlives_its_process_and_not_the_power():
    disk, _ = disk_with_file(1)
    mapped = disk.map_shared(HOME / "m", 64, writable=True)
    mapped[:5] = b"words"
    disk.crash()
    mapped[:5] = b"ghost"
    assert disk.map_shared(HOME / "m", 64, writable=False)[:5] == b"words"
    disk.sync_directory(HOME)
    disk.lose_power()
    assert disk.map_shared(HOME / "m", 64, writable=True)[:5] != b"words"


def test_a_read_only_file_system_changes_nothing_and_goes_on_reading():
    disk, path = disk_with_file(1)
    file = disk.open(path)
    file.write_at(b"before", 0)
    file.sync()
    disk.read_only = True
    for change in (
        lambda: file.write_at(b"after", 0),
        lambda: file.truncate(0),
        lambda: disk.open(path),
        lambda: disk.open(HOME / "new", create=True),
        lambda: disk.rename(path, HOME / "other"),
        lambda: disk.remove(path),
        lambda: disk.make_directory(HOME / "below"),
        lambda: disk.lock(HOME / ".lock"),
    ):
        with pytest.raises(OSError, match="Read-only"):
            change()
    assert disk.open(path, writable=False).read_at(10, 0) == b"before"
    assert disk.list(HOME) == ["f"]


def test_a_quota_answers_by_its_own_name_and_a_hole_takes_no_room():
    disk, path = disk_with_file(1)
    disk.capacity_bytes, disk.full_errno = 5, errno.EDQUOT
    file = disk.open(path)
    file.truncate(1000)
    file.write_at(b"12345", 0)
    assert disk.usage(path).used_bytes <= 5
    with pytest.raises(OSError, match="quota") as refused:
        file.allocate(2000)
    assert refused.value.errno == errno.EDQUOT
