"""The directory of logs inside one process: sharing, the marker's life, checkpoints, refusals."""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pushrep.env import RealFilesystem
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import (
    CLEAN_MARKER_NAME,
    LOCK_NAME,
    CheckpointFile,
    CleanLog,
    decode_clean_marker,
    read_checkpoint,
)
from pushrep.log.errors import InvalidLogName, LogClosed, LogLocked, NotALog
from pushrep.log.published import LogOffsets, read_published
from tests.support.forks import code_in_fork

pytestmark = pytest.mark.usefixtures("closes_its_files")

CLEAN = CleanLog(end_offset=5, last_segment_bytes=100, leader_epoch=1)


class FaultyFilesystem(RealFilesystem):
    """Fails the named call with an errno if its path has this end; counts the calls."""

    def __init__(self):
        self.fail = {}
        self.calls = []

    def _maybe_fail(self, call, path):
        self.calls.append((call, path.name))
        if code := self.fail.get((call, path.name)):
            raise OSError(code, os.strerror(code), str(path))

    def make_directory(self, path):
        self._maybe_fail("make_directory", path)
        super().make_directory(path)

    def lock(self, path):
        self._maybe_fail("lock", path)
        return super().lock(path)

    def rename(self, source, target):
        self._maybe_fail("rename", target)
        super().rename(source, target)

    def map_shared(self, path, size, *, writable):
        self._maybe_fail("map_shared", path)
        return super().map_shared(path, size, writable=writable)


class ManualClock:
    def __init__(self):
        self.now_ms = 1_000

    def wall_ms(self):
        return self.now_ms

    def monotonic_ms(self):
        return self.now_ms


def make_logs(directory, *names):
    for name in names:
        (directory / name).mkdir(parents=True, exist_ok=True)


def close_all(path, *names, clean=CLEAN):
    """One session in which these logs are opened and closed clean."""
    directory = LogDirectory.acquire(path)
    for name in names:
        directory.attach(name).close(clean)
    directory.release()


def marker(path):
    file = path / CLEAN_MARKER_NAME
    return decode_clean_marker(file.read_bytes()) if file.exists() else None


def test_callers_of_one_real_path_share_the_instance_through_symlinks_too(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    first, second = LogDirectory.acquire(real), LogDirectory.acquire(link / ".." / "link")
    assert first is second
    first.release()
    second.attach("orders-0").close()  # still open for the second caller
    second.release()
    third = LogDirectory.acquire(real)
    assert third is not first, "the last release ends the instance"
    third.release()


def test_release_is_counted_and_one_too_many_is_refused(tmp_path):
    directory = LogDirectory.acquire(tmp_path)
    directory.release()
    with pytest.raises(LogClosed):
        directory.release()
    with pytest.raises(LogClosed):
        directory.attach("orders-0")


def test_a_daemon_that_closed_the_lock_opens_the_directory_anew_and_nothing_runs_for_the_lost_one(tmp_path):
    def become_daemon():
        lost = LogDirectory.acquire(tmp_path)
        lost.sync_checkpoints_soon(3_600_000)
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if descriptor.readlink().is_relative_to(tmp_path):
                    os.close(int(descriptor.name))
        opened = LogDirectory.acquire(tmp_path)
        assert opened is not lost, "another process may have the lock by now"
        with pytest.raises(LogClosed):
            lost.attach("orders-0")
        opened.attach("orders-0").close()
        opened.release()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pushrep")]
        assert left == [], "a thread still writes for the instance without a lock"

    assert code_in_fork(become_daemon) == 0, "see the child's words in the captured stderr"


def test_two_file_systems_on_one_path_do_not_share_and_the_lock_holds_inside_a_process(tmp_path):
    directory = LogDirectory.acquire(tmp_path)
    with pytest.raises(LogLocked) as refused:
        LogDirectory.acquire(tmp_path, RealFilesystem())
    assert refused.value.pid == os.getpid()
    assert refused.value.directory == tmp_path
    directory.release()


def test_a_log_is_attached_once(tmp_path):
    directory = LogDirectory.acquire(tmp_path)
    view = directory.attach("orders-0")
    with pytest.raises(LogLocked) as refused:
        directory.attach("orders-0")
    assert (refused.value.directory, refused.value.pid) == (tmp_path / "orders-0", os.getpid())
    view.close()
    directory.attach("orders-0")
    directory.release()


def test_the_marker_lists_clean_logs_and_is_gone_while_the_directory_is_open(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1")
    close_all(tmp_path, "orders-0", "orders-1")
    assert marker(tmp_path) == {"orders-0": CLEAN, "orders-1": CLEAN}
    directory = LogDirectory.acquire(tmp_path)
    assert marker(tmp_path) is None, "removed before any log is loaded"
    assert directory.attach("orders-0").clean == CLEAN
    directory.release()
    assert marker(tmp_path) == {"orders-1": CLEAN}, "orders-0 was left open; orders-1 was never touched"


def test_lines_of_logs_that_nobody_opened_are_carried_over(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1")
    directory = LogDirectory.acquire(tmp_path)
    for name in ("orders-0", "orders-1"):
        view = directory.attach(name)
        view.checkpoint(recovery_point=5, high_watermark=4, log_start_offset=1)
        view.close(CLEAN)
    directory.release()
    close_all(tmp_path, "orders-0", clean=CleanLog(9, 200, 2))
    assert marker(tmp_path) == {"orders-0": CleanLog(9, 200, 2), "orders-1": CLEAN}
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT)["orders-1"] == 5


def test_a_poisoned_log_is_never_listed_even_if_it_was_clean_before(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1")
    close_all(tmp_path, "orders-0", "orders-1")
    directory = LogDirectory.acquire(tmp_path)
    directory.attach("orders-0").close()
    directory.release()
    assert marker(tmp_path) == {"orders-1": CLEAN}


def test_closing_and_opening_a_log_while_the_directory_stays_open(tmp_path):
    make_logs(tmp_path, "orders-0")
    directory = LogDirectory.acquire(tmp_path)
    directory.attach("orders-0").close(CLEAN)
    again = directory.attach("orders-0")
    assert again.clean == CLEAN
    again.close()
    assert directory.attach("orders-0").clean is None
    directory.release()


def test_a_log_whose_directory_was_removed_inherits_nothing(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1")
    directory = LogDirectory.acquire(tmp_path)
    for name in ("orders-0", "orders-1"):
        view = directory.attach(name)
        view.checkpoint(recovery_point=1000)
        view.publish(LogOffsets(0, 1000, 1000, 1000), 0)
        view.close(CLEAN)
    directory.release()
    (tmp_path / "orders-0").rmdir()
    directory = LogDirectory.acquire(tmp_path)
    (tmp_path / "orders-1").rmdir()  # gone while the directory is held
    for name in ("orders-0", "orders-1"):
        view = directory.attach(name)
        assert (view.clean, view.recovery_point, view.published_before) == (None, None, None), name
        assert read_published(tmp_path, name) is None
        view.close()
    directory.release()


def test_a_log_that_is_opened_while_what_is_left_of_its_name_is_removed_keeps_what_it_publishes(tmp_path, monkeypatch):
    close_all(tmp_path, "orders-0")
    directory, views = LogDirectory.acquire(tmp_path), []
    write = directory.sync_checkpoints

    def write_and_attach():
        monkeypatch.undo()
        write()
        views.append(directory.attach("orders-0"))
        views[0].publish(LogOffsets(0, 5, 5, 5), 0)

    directory.attach("orders-0").checkpoint(recovery_point=1000)
    directory.detach("orders-0", CLEAN)
    monkeypatch.setattr(directory, "sync_checkpoints", write_and_attach)
    with pytest.raises(LogLocked):
        directory.forget_missing("orders-0")
    assert read_published(tmp_path, "orders-0").log_end_offset == 5
    directory.release()


def test_what_the_last_process_published_is_told(tmp_path):
    make_logs(tmp_path, "orders-0")
    directory = LogDirectory.acquire(tmp_path)
    directory.attach("orders-0").publish(LogOffsets(1, 9, 8, 7), 2)
    directory.release()
    directory = LogDirectory.acquire(tmp_path)
    before = directory.attach("orders-0").published_before
    assert (before.log_end_offset, before.high_watermark, before.ends.stable) == (9, 7, 7)
    directory.release()


def test_checkpoints_are_remembered_then_written_once_for_all(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1")
    filesystem = FaultyFilesystem()
    directory = LogDirectory.acquire(tmp_path, filesystem)
    first, second = directory.attach("orders-0"), directory.attach("orders-1")
    first.checkpoint(recovery_point=3)
    second.checkpoint(recovery_point=7)
    assert (first.recovery_point, first.high_watermark) == (3, None)
    assert not read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT)
    first.sync_checkpoints()
    second.sync_checkpoints()  # nothing new since
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 3, "orders-1": 7}
    assert [name for call, name in filesystem.calls if call == "rename"] == [CheckpointFile.RECOVERY_POINT.value]
    directory.release()


def test_checkpoints_within_max_age_wait_for_the_next_write(tmp_path):
    make_logs(tmp_path, "orders-0")
    clock = ManualClock()
    directory = LogDirectory.acquire(tmp_path, clock=clock)
    view = directory.attach("orders-0")
    view.checkpoint(high_watermark=1)
    view.sync_checkpoints()
    view.checkpoint(high_watermark=2)
    clock.now_ms += 999
    view.sync_checkpoints(max_age_ms=1000)
    assert read_checkpoint(tmp_path, CheckpointFile.HIGH_WATERMARK) == {"orders-0": 1}
    clock.now_ms += 1
    view.sync_checkpoints(max_age_ms=1000)
    assert read_checkpoint(tmp_path, CheckpointFile.HIGH_WATERMARK) == {"orders-0": 2}
    directory.release()


def test_a_failed_checkpoint_keeps_the_old_file_and_is_written_by_the_next(tmp_path):
    make_logs(tmp_path, "orders-0")
    filesystem = FaultyFilesystem()
    directory = LogDirectory.acquire(tmp_path, filesystem)
    view = directory.attach("orders-0")
    view.checkpoint(recovery_point=1)
    view.sync_checkpoints()
    view.checkpoint(recovery_point=2)
    filesystem.fail["rename", CheckpointFile.RECOVERY_POINT.value] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        view.sync_checkpoints()
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 1}
    filesystem.fail.clear()
    view.sync_checkpoints()
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 2}
    directory.release()


def test_an_unclean_close_drops_numbers_that_were_not_written(tmp_path):
    make_logs(tmp_path, "orders-0", "orders-1", "orders-2")
    directory = LogDirectory.acquire(tmp_path)
    risen, fallen, new = (directory.attach(f"orders-{n}") for n in range(3))
    risen.checkpoint(recovery_point=10, high_watermark=10, log_start_offset=1)
    fallen.checkpoint(recovery_point=10)
    risen.sync_checkpoints()
    risen.checkpoint(recovery_point=20, high_watermark=20, log_start_offset=2)
    fallen.checkpoint(recovery_point=5)
    new.checkpoint(recovery_point=5)
    for view in (risen, fallen, new):
        view.close()
    directory.release()
    found = {one: read_checkpoint(tmp_path, one) for one in CheckpointFile}
    assert found[CheckpointFile.RECOVERY_POINT] == {"orders-0": 10, "orders-1": 5}, (
        "never above what a sync stood behind"
    )
    assert found[CheckpointFile.HIGH_WATERMARK] == {"orders-0": 10}
    assert found[CheckpointFile.LOG_START_OFFSET] == {"orders-0": 2}, "the segments below it are gone"


def test_no_marker_and_a_free_lock_if_the_last_release_fails(tmp_path):
    make_logs(tmp_path, "orders-0")
    filesystem = FaultyFilesystem()
    directory = LogDirectory.acquire(tmp_path, filesystem)
    view = directory.attach("orders-0")
    view.checkpoint(recovery_point=5)
    view.close(CLEAN)
    filesystem.fail["rename", CheckpointFile.RECOVERY_POINT.value] = errno.EIO
    with pytest.raises(OSError, match=r"Input/output error"):
        directory.release()
    assert marker(tmp_path) is None
    directory = LogDirectory.acquire(tmp_path)
    assert directory.attach("orders-0").clean is None
    directory.release()


def test_a_failed_opening_leaves_the_marker_and_frees_the_lock(tmp_path):
    make_logs(tmp_path, "orders-0")
    close_all(tmp_path, "orders-0")
    filesystem = FaultyFilesystem()
    filesystem.fail["map_shared", ".pushrep_published"] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        LogDirectory.acquire(tmp_path, filesystem)
    assert marker(tmp_path) == {"orders-0": CLEAN}
    LogDirectory.acquire(tmp_path).release()


@pytest.mark.parametrize("spoil", [b"", b"0\n", b"garbage", b"0\n1\norders-0 5 100 1\n"])
def test_a_bad_marker_counts_as_absent_and_is_removed(tmp_path, spoil):
    make_logs(tmp_path, "orders-0")
    (tmp_path / CLEAN_MARKER_NAME).write_bytes(spoil)
    directory = LogDirectory.acquire(tmp_path)
    assert directory.attach("orders-0").clean is None
    assert not (tmp_path / CLEAN_MARKER_NAME).exists()
    directory.release()


def test_a_file_where_the_directory_should_be_is_named(tmp_path):
    (tmp_path / "data").write_bytes(b"")
    for path in (tmp_path / "data", tmp_path / "data" / "below"):
        with pytest.raises(NotALog, match="it is a file, or one of its parents is") as refused:
            LogDirectory.acquire(path)
        assert refused.value.path == path


@pytest.mark.parametrize(
    ("call", "name", "code", "why"),
    [
        ("make_directory", "data", errno.EACCES, "may not be written"),
        ("lock", LOCK_NAME, errno.EACCES, "may not be written"),
        ("lock", LOCK_NAME, errno.EROFS, "Read-only file system"),
    ],
)
def test_a_directory_that_cant_be_written_is_named(tmp_path, call, name, code, why):
    filesystem = FaultyFilesystem()
    filesystem.fail[call, name] = code
    with pytest.raises(NotALog, match=why) as refused:
        LogDirectory.acquire(tmp_path / "data", filesystem)
    assert refused.value.path == tmp_path / "data"


def test_a_full_disk_is_no_fault_of_the_path(tmp_path):
    filesystem = FaultyFilesystem()
    filesystem.fail["lock", LOCK_NAME] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        LogDirectory.acquire(tmp_path, filesystem)


def test_a_name_that_is_no_log_is_refused(tmp_path):
    directory = LogDirectory.acquire(tmp_path)
    for name in ("orders", "../orders-0", "orders-01", "-0", "a/b-0", "", "orders-2147483648"):
        with pytest.raises(InvalidLogName):
            directory.attach(name)
    directory.release()


def test_a_closed_view_refuses_everything(tmp_path):
    directory = LogDirectory.acquire(tmp_path)
    view = directory.attach("orders-0")
    view.close()
    for use in (
        lambda: view.publish(LogOffsets(0, 0, 0, 0), 0),
        lambda: view.checkpoint(recovery_point=1),
        view.sync_checkpoints,
        view.close,
        lambda: view.close(CLEAN),
    ):
        with pytest.raises(LogClosed):
            use()
    directory.release()


def test_threads_that_acquire_attach_and_checkpoint_together(tmp_path):
    make_logs(tmp_path, *(f"orders-{n}" for n in range(8)))
    failures = []

    def session(number):
        try:
            directory = LogDirectory.acquire(tmp_path)
            view = directory.attach(f"orders-{number}")
            for offset in range(1, 6):
                view.checkpoint(recovery_point=offset)
                view.sync_checkpoints()
                assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT)[view.name] == offset, (
                    "on disk when sync returned"
                )
            view.close(CleanLog(number, number, 0))
            directory.release()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    keeper = LogDirectory.acquire(tmp_path)
    threads = [threading.Thread(target=session, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keeper.release()
    assert not failures
    assert marker(tmp_path) == {f"orders-{n}": CleanLog(n, n, 0) for n in range(8)}
