"""Few files stay open: the pool alone, and fifty logs under a limit of eight."""

import os
import resource
import threading
from pathlib import Path

import pytest

from pushrep.env import RealFilesystem
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory import OpenFiles, OpenInProcess
from pushrep.log.directory_files import segment_path


class Log:
    def __init__(self, *, clean=True):
        self.used, self.clean, self.open = False, clean, True

    def close_idle_file(self, *, flush):
        self.clean = self.clean or flush
        self.open = not self.clean
        return self.clean


@pytest.fixture
def pool():
    pool = OpenFiles()
    pool.limit = 3
    return pool


def test_the_longest_unused_closes(pool):
    logs = [Log() for _ in range(3)]
    for log in logs:
        pool.opened(log)
    for log in logs:
        log.used = False
    logs[0].used = True
    pool.opened(Log())
    assert [log.open for log in logs] == [True, False, True], "the first was used since"
    assert len(pool) == 3


def test_unflushed_logs_are_flushed_only_if_no_other_can_go(pool):
    dirty, clean = [Log(clean=False) for _ in range(2)], Log()
    for log in (*dirty, clean):
        pool.opened(log)
        log.used = False
    third = Log(clean=False)
    pool.opened(third)
    assert [log.open for log in (*dirty, clean)] == [True, True, False]
    pool.opened(Log(clean=False))
    assert len(pool) == 3
    assert sum(log.open for log in (*dirty, third)) == 2


def test_a_log_that_closed_by_itself_is_forgotten(pool):
    log = Log()
    pool.opened(log)
    pool.opened(log)
    pool.forget(log)
    pool.forget(log)
    assert len(pool) == 0


def test_the_files_of_all_directories_take_half_of_the_descriptors_of_the_process(monkeypatch):
    process = OpenInProcess()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    first, second = OpenFiles(process), OpenFiles(process)
    for _ in range(6):
        first.opened(Log())
    assert len(first) == 4, "alone it may have all of that half"
    logs = [Log() for _ in range(3)]
    for log in logs:
        second.opened(log)
    assert (len(first), len(second)) == (4, 2), "a second one gets its part of it, whatever the first has"
    assert [log.open for log in logs] == [False, True, True]
    first.opened(Log())
    assert (len(first), len(second)) == (2, 2), "and the first goes down to its own when it opens the next"
    for log in logs:
        second.forget(log)
    for _ in range(3):
        first.opened(Log())
    assert len(first) == 4


def test_without_a_limit_of_descriptors_the_setting_holds(pool, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(5):
        pool.opened(Log())
    assert len(pool) == 3


def open_log_files(directory):
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [name for name in links if name.endswith(".log") and name.startswith(os.path.realpath(directory))]


class Opened(RealFilesystem):
    """Records which files were opened for writing."""

    def __init__(self):
        self.paths = []

    def open(self, path, *, create=False, writable=True):
        if writable:
            self.paths.append(path)
        return super().open(path, create=create, writable=writable)


def test_fifty_logs_share_eight_files(tmp_path):
    config, filesystem = LogConfig(open_files_max=8, preallocate_bytes=0, flush_ms=3_600_000), Opened()
    logs = [SegmentLog.open(tmp_path / f"many-{n}", config, filesystem=filesystem) for n in range(50)]
    assert open_log_files(tmp_path) == [], "a file is opened by the first append"
    for turn in range(3):
        for n, log in enumerate(logs):
            log.append(b"%d.%d" % (n, turn), durability=Durability.BUFFERED)
            assert len(open_log_files(tmp_path)) <= 8
    hot = logs[7]
    for log in logs:
        hot.append(b"hot", durability=Durability.BUFFERED)
        filesystem.paths.clear()
        log.append(b"again")
        hot.append(b"hot", durability=Durability.BUFFERED)
        assert segment_path(hot.path, 0) not in filesystem.paths, "what is in use stays open"
    for log in logs:
        log.close()
    assert open_log_files(tmp_path) == []
    for n in range(50):
        with SegmentLog.open(tmp_path / f"many-{n}", config) as log:
            found = [record.value for record in log.records(0) if record.value not in {b"hot", b"again"}]
            assert found == [b"%d.%d" % (n, turn) for turn in range(3)]


def test_many_threads_over_few_files(tmp_path):
    config = LogConfig(open_files_max=2, preallocate_bytes=0)
    logs = [SegmentLog.open(tmp_path / f"many-{n}", config) for n in range(8)]

    def write(log):
        for n in range(20):
            log.append(b"%d" % n, durability=Durability.BUFFERED if n % 3 else Durability.FLUSHED)

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        assert [record.value for record in log.records(0)] == [b"%d" % n for n in range(20)]
        log.close()
    assert Path(tmp_path / ".pushrep_cleanshutdown").read_text().count("many-") == 8
