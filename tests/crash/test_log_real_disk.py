"""Full disks, limits and read-only mounts of the operating system: each is refused by name, nothing is half written,
and the log continues afterwards.

Each case runs in a child process: in a mount namespace (a tmpfs of a megabyte, or an ext4 in a file; it needs root and
ends with the child), or with an RLIMIT_FSIZE, which needs no rights.
"""

import ctypes
import errno
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pushrep.log import AppendFailed, Durability, LogConfig, LogPoisoned, NotALog, SegmentLog
from tests.support.forks import code_in_fork

CLONE_NEWNS = 0x00020000
MIB = 1 << 20
VALUE = b"0123456789" * 40
AHEAD = pytest.mark.parametrize("preallocate", [0, 100_000])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")


def config_of(preallocate, segment_bytes=200_000):
    """A configuration whose own limits never refuse: only the file system does."""
    limits = {"disk_warn_percent": 100, "disk_pressed_percent": 100, "disk_refuse_percent": 100}
    return LogConfig(segment_bytes=segment_bytes, batch_bytes=5000, preallocate_bytes=preallocate, **limits)


def in_child(case):
    assert code_in_fork(case) == 0, "see the child's words in the captured stderr"


def mounted(directory: Path, size_bytes=MIB, image=None):
    """A small file system in the mount namespace of this process; it ends with the process.

    A tmpfs, or what an image holds.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    directory.mkdir()
    if image is not None:
        options = ["-o", "loop,errors=remount-ro"]
        subprocess.run(["mount", *options, image, directory], check=True)
        return directory
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", directory], check=True)
    return directory


def remount(directory, how):
    subprocess.run(["mount", "-o", f"remount,{how}", directory], check=True)


def fill(log, appended, durability=Durability.BUFFERED):
    """Append until it is refused; the refusal. Nothing of what was refused may be seen anywhere."""
    while len(appended) < 100_000:
        values = [b"%d " % (len(appended) + n) + VALUE for n in range(1 + len(appended) % 30)]
        try:
            result = log.append(values, durability=durability)
        except AppendFailed as refusal:
            assert log.log_end_offset == len(appended), "its offsets were given back"
            assert_holds(log, appended)
            return refusal
        assert result.base_offset == len(appended)
        appended += values
    raise AssertionError("the disk never got full")


def assert_holds(log, appended):
    found = list(log.records(0))
    assert [record.offset for record in found] == list(range(len(found)))
    assert [record.value for record in found] == appended


def assert_no_loose_bytes(path, preallocate):
    """The newest file has its batches and nothing else but zeros ahead."""
    newest = max(path.glob("*.log"))
    with SegmentLog.open_reader(path, isolation="written") as reader:
        size = sum(len(bytes(batch.data)) for batch in reader.batches(int(newest.stem)))
    behind = newest.read_bytes()[size:]
    assert not behind.strip(b"\0"), "half of a refused batch is left"
    assert preallocate or not behind


@as_root
@AHEAD
def test_a_full_disk_refuses_and_goes_on_when_space_returns(tmp_path, preallocate):
    def case():
        disk = mounted(tmp_path / "disk")
        path, appended = disk / "orders-0", []
        ballast = [disk / f"ballast {n}" for n in range(2)]
        for file in ballast:
            file.write_bytes(bytes(MIB // 4))
        with SegmentLog.open(path, config_of(preallocate)) as log:
            for file in ballast:
                refusal = fill(log, appended)
                assert refusal.errno == errno.ENOSPC
                assert "free space on the disk" in str(refusal)
                assert_no_loose_bytes(path, preallocate)
                log.flush()
                before = len(appended)
                file.unlink()
                log.append([b"space is back"], durability=Durability.FLUSHED)
                appended.append(b"space is back")
            assert before * len(VALUE) > 0.5 * MIB, "what was freed was used"
            assert_holds(log, appended)
        with SegmentLog.open(path, config_of(preallocate)) as log:
            assert log.recovery.opening.value == "normal"
            assert_holds(log, appended)

    in_child(case)


@as_root
@AHEAD
def test_a_log_that_is_closed_on_a_full_disk_opens_there(tmp_path, preallocate):
    """`close` may fail because the disk is full, with a named error, and the next opening has all records."""

    def case():
        disk = mounted(tmp_path / "disk")
        path, appended = disk / "orders-0", []
        log = SegmentLog.open(path, config_of(preallocate))
        (disk / "ballast").write_bytes(bytes(MIB // 4))
        fill(log, appended, Durability.FLUSHED)
        fill_up(disk)
        with may_want_space():
            log.close()
        with may_want_space():
            SegmentLog.open(path, config_of(preallocate)).close()
        with SegmentLog.open_reader(path, isolation="written") as reader:
            assert_holds(reader, appended)
        (disk / "ballast").unlink()
        with SegmentLog.open(path, config_of(preallocate)) as log:
            assert log.recovery.damaged_from is None
            assert_holds(log, appended)
            appended.append(b"after")
            assert log.append([b"after"]).base_offset == len(appended) - 1
            assert_holds(log, appended)

    in_child(case)


@contextmanager
def may_want_space():
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def fill_up(disk):
    """Not a block is left."""
    fd = os.open(disk / "last_blocks", os.O_WRONLY | os.O_CREAT)
    with may_want_space():
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)


@as_root
def test_a_directory_that_can_not_even_be_begun_is_refused(tmp_path):
    def case():
        disk = mounted(tmp_path / "disk")
        fill_up(disk)
        with pytest.raises(OSError, match="No space left") as refused:
            SegmentLog.open(disk / "logs" / "orders-0", config_of(0))
        assert refused.value.errno == errno.ENOSPC
        (disk / "last_blocks").unlink()
        with SegmentLog.open(disk / "logs" / "orders-0", config_of(0)) as log:
            assert log.append([b"first"]).base_offset == 0

    in_child(case)


@as_root
def test_a_read_only_file_system_is_refused_to_writers_and_read_by_readers(tmp_path):
    def case():
        disk = mounted(tmp_path / "disk")
        path = disk / "orders-0"
        with SegmentLog.open(path, config_of(0)) as log:
            log.append([b"%d" % n for n in range(100)])
        before = {file: file.read_bytes() for file in sorted(disk.rglob("*")) if file.is_file()}
        remount(disk, "ro")  # which the kernel does only if nothing is in use: a closed log holds nothing
        with pytest.raises(NotALog, match="Read-only file system"):
            SegmentLog.open(path, config_of(0))
        with pytest.raises(NotALog, match="Read-only file system"):
            SegmentLog.open(disk / "new" / "orders-0", config_of(0))
        with SegmentLog.open_reader(path) as reader:
            assert [record.value for record in reader.records(0)] == [b"%d" % n for n in range(100)]
        assert {file: file.read_bytes() for file in sorted(disk.rglob("*")) if file.is_file()} == before
        remount(disk, "rw")
        with SegmentLog.open(path, config_of(0)) as log:
            assert log.recovery.opening.value == "normal", "a refused opening left the marker where it was"
            assert log.append([b"after"]).base_offset == 100

    in_child(case)


@as_root
@AHEAD
@pytest.mark.parametrize("cut", ["truncate_to", "purge"])
def test_what_frees_space_works_without_a_block_left(tmp_path, preallocate, cut):
    def case():
        disk = mounted(tmp_path / "disk")
        path, appended = disk / "orders-0", []
        with SegmentLog.open(path, config_of(preallocate)) as log:
            fill(log, appended)
            log.flush()
            fill_up(disk)
            middle = len(appended) // 2
            if cut == "purge":
                start = log.purge(middle)
                assert 0 < start <= middle
            else:
                start = 0
                del appended[log.truncate_to(middle, force=True) :]
            values = [b"again " + VALUE] * 100
            assert log.append(values, durability=Durability.FLUSHED).base_offset == len(appended)
            appended += values
        with SegmentLog.open(path, config_of(preallocate)) as log:
            assert log.log_start_offset == start
            assert [record.value for record in log.records(start)] == appended[start:]

    in_child(case)


def image_of_ext4(tmp_path):
    """A file that holds an empty ext4; the test is skipped where that can't be made or mounted."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    for tool in ("mkfs.ext4", "e2fsck"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-o", "loop", image, "/mnt"], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"no loop device can be mounted here: {tried.stderr.strip()}")
    return image


@as_root
@AHEAD
def test_a_torn_tail_larger_than_what_is_free_is_set_aside(tmp_path, preallocate):
    """Killed with half a disk of records that no recovery point tells of, one byte of them bad, and no block left."""

    def case():
        path = mounted(tmp_path / "disk") / "orders-0"
        config = config_of(preallocate, segment_bytes=MIB)

        def write():
            log = SegmentLog.open(path, replace(config, flush_ms=600_000))
            for n in range(10):
                log.append(b"%d" % n, durability=Durability.BUFFERED)
            log.append([os.urandom(100) * 40 for _ in range(100)], durability=Durability.BUFFERED)
            os._exit(0)  # it is killed: nothing is closed

        assert code_in_fork(write) == 0
        segment = path / f"{0:020d}.log"
        data = bytearray(segment.read_bytes())
        at = 10 * (12 + int.from_bytes(data[8:12]))  # ten batches of one size
        data[at + 100] ^= 1
        with segment.open("r+b") as file:
            file.seek(at + 100)
            file.write(data[at + 100 : at + 101])
        with suppress(OSError), (path.parent / "others").open("wb", buffering=0) as others:
            while True:
                others.write(bytes(4096))
        with SegmentLog.open(path, config) as log:
            assert [record.value for record in log.records(0)] == [b"%d" % n for n in range(10)]
            (kept,) = log.recovery.cut.kept_as
            assert (path / kept).read_bytes() == data[at:]

    in_child(case)


@as_root
@AHEAD
def test_a_disk_that_turns_read_only_under_its_writer_loses_nothing(tmp_path, preallocate):
    """ext4 remounts itself read-only after an error. A remount by an administrator would wait for the writer to end."""
    image = image_of_ext4(tmp_path)

    def case():
        disk = mounted(tmp_path / "disk", image=image)
        path, values = disk / "orders-0", [b"%d " % n + VALUE for n in range(400)]
        log = SegmentLog.open(path, config_of(preallocate))
        for n in range(0, 300, 50):
            log.append(values[n : n + 50], durability=Durability.FLUSHED)
        log.append(values[300:], durability=Durability.BUFFERED)
        refused = subprocess.run(["mount", "-o", "remount,ro", disk], check=False, capture_output=True, text=True)
        assert "busy" in refused.stderr
        remount(disk, "abort")
        with pytest.raises((AppendFailed, LogPoisoned), match="Read-only file system"):
            log.append([b"refused"], durability=Durability.FLUSHED)
        assert_holds(log, values)
        with SegmentLog.open_reader(path) as reader:
            assert len(list(reader.records(0))) >= 300
        with suppress(OSError, LogPoisoned):
            log.close()
        with pytest.raises(NotALog, match="Read-only file system"):
            SegmentLog.open(path, config_of(preallocate))
        subprocess.run(["umount", disk], check=True)
        assert subprocess.run(["e2fsck", "-p", image], check=False, capture_output=True).returncode < 4
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
        with SegmentLog.open(path, config_of(preallocate)) as log:
            assert log.recovery.damaged_from is None
            end = log.log_end_offset
            assert 300 <= end <= 400
            assert_holds(log, values[:end])
            assert log.append([b"after"]).base_offset == end

    in_child(case)


@AHEAD
def test_a_file_size_limit_refuses_and_goes_on_when_it_is_raised(tmp_path, preallocate):
    def case():
        path, appended = tmp_path / "orders-0", []
        with SegmentLog.open(path, config_of(preallocate, segment_bytes=MIB)) as log:
            for limit in (50_000, 130_001):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                refusal = fill(log, appended)
                assert refusal.errno == errno.EFBIG
                assert "ulimit -f" in str(refusal)
                newest = max(path.glob("*.log"))
                assert limit - 20_000 < newest.stat().st_size <= limit
                assert_no_loose_bytes(path, preallocate)
                log.append([b"small"], durability=Durability.FLUSHED)
                appended.append(b"small")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            log.append([b"after"])
            appended.append(b"after")
        with SegmentLog.open(path, config_of(preallocate)) as log:
            assert log.recovery.opening.value == "normal"
            assert_holds(log, appended)

    in_child(case)
