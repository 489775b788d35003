"""Durable appends that one thread writes for all: each gets the answer that it would have got alone."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pushrep.env import RealFilesystem
from pushrep.log import AppendFailed, Durability, LogClosed, LogConfig, LogPoisoned, SegmentLog, flush_scheduler
from pushrep.log.flush_scheduler import CommitRequest, GroupCommitLeader

WAIT_S = 60


class Gate(RealFilesystem):
    """Syncs of segments wait until they are let through, or fail; what holds `refused` is not written."""

    def __init__(self):
        self.is_open, self.begun = threading.Event(), threading.Event()
        self.sync_fails, self.refused, self.writes, self.syncs = False, b"", 0, 0

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        return GatedFile(file, self) if path.suffix == ".log" else file


class GatedFile:
    def __init__(self, file, gate):
        self._file, self._gate = file, gate

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write_at(self, data, position):
        self._gate.writes += 1
        if self._gate.refused and self._gate.refused in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.write_at(data, position)

    def sync(self):
        self._gate.syncs += 1
        self._gate.begun.set()
        assert self._gate.is_open.wait(WAIT_S)
        if self._gate.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._file.sync()


def wait_until(reached):
    pause = threading.Event()
    while not reached():
        pause.wait(0.001)


@pytest.fixture(autouse=True)
def _no_second_look(monkeypatch):
    """Each waiting thread is notified: no test here relies on the poll after a second, which an interruption may
    need.
    """
    monkeypatch.setattr(flush_scheduler, "_LOOK_AGAIN_S", 2 * WAIT_S)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def log(tmp_path, gate):
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(flush_ms=600_000), filesystem=gate)
    yield log
    gate.is_open.set()
    log.close()


@pytest.fixture
def handed_over(log, gate, monkeypatch):
    """A first durable append is in its sync, and all others wait for the next leader of the group commit: their
    futures.
    """
    acquire, waiting = GroupCommitLeader.acquire, []

    def counted(leader, settled, wanted):  # a request is queued by now
        if isinstance(wanted, CommitRequest):
            waiting.append(wanted)
        return acquire(leader, settled, wanted)

    monkeypatch.setattr(GroupCommitLeader, "acquire", counted)

    @contextmanager
    def begun(appended, append=log.append):
        with ThreadPoolExecutor(len(appended) + 1) as pool:
            try:
                futures = [pool.submit(append, b"first")]
                assert gate.begun.wait(WAIT_S)
                for number, data in enumerate(appended, 2):  # one after the other, so that their order is known
                    futures.append(pool.submit(append, data))
                    wait_until(lambda number=number: len(waiting) == number)
                yield futures
            finally:
                gate.is_open.set()

    return begun


def is_closed(log):
    try:
        return not log.state()
    except LogClosed:
        return True


def values_of(log):
    return [record.value for record in log.records(0)]


def test_the_lead_is_one_threads_until_it_releases():
    leader, calls = GroupCommitLeader(), []
    with leader.held():
        assert leader.owner == threading.get_ident()
        assert not leader.try_acquire()
        assert not leader.do_unless_held(lambda: calls.append("beside the leader"))
    assert leader.do_unless_held(lambda: calls.append("nobody leads"))
    assert calls == ["nobody leads"]
    assert leader.try_acquire()
    assert leader.owner == threading.get_ident()


def test_one_write_for_all_in_the_order_they_came(log, gate, handed_over):
    lists = [[b"%d" % number] * (number % 3 + 1) for number in range(30)]
    with handed_over(lists) as futures:
        before = gate.writes
        gate.is_open.set()
        answers = [future.result(WAIT_S) for future in futures]
    assert gate.writes == before + 1, "they are small"
    assert values_of(log) == [b"first", *(value for values in lists for value in values)]
    assert [last - first + 1 for first, last in answers] == [1, *map(len, lists)]
    assert [first for first, _ in answers[1:]] == [last + 1 for _, last in answers[:-1]]


def test_one_sync_serves_all_who_wait_and_appends_go_on_beside_it(log, gate, handed_over):
    def append(value):
        appended = log.append(value)
        assert log.flushed_offset > appended.last_offset
        return appended

    with handed_over([b"x"] * 39, append) as futures:
        beside = log.append(b"beside it", durability=Durability.BUFFERED)
        assert beside == (1, 1), "a sync is running: appends don't wait for it"
        gate.is_open.set()
        assert [future.result(WAIT_S).last_offset for future in futures] == [0, *range(2, 41)]
    assert gate.syncs == 2, "the first one, and one for the 39 who came while it ran"


def test_one_that_the_disk_refuses_does_not_take_the_others_with_it(log, gate, handed_over):
    gate.refused = b"too much"
    with handed_over([b"a", b"too much", b"b"]) as futures:
        gate.is_open.set()
        with pytest.raises(AppendFailed, match="No space left"):
            futures[2].result(WAIT_S)
        assert [futures[number].result(WAIT_S) for number in (0, 1, 3)] == [(0, 0), (1, 1), (2, 2)]
    assert values_of(log) == [b"first", b"a", b"b"]
    assert log.flushed_offset == 3


def test_a_failed_sync_poisons_for_all_and_nothing_is_written_after_it(log, gate, handed_over):
    gate.sync_fails = True
    with handed_over([b"a", b"b"]) as futures:
        gate.is_open.set()
        for future in futures:
            with pytest.raises(LogPoisoned):
                future.result(WAIT_S)
    assert log.log_end_offset == 1
    assert log.flushed_offset == 0


def test_a_close_refuses_what_nobody_has_written_yet(log, gate, handed_over):
    with handed_over([b"a", b"b"]) as futures, ThreadPoolExecutor(1) as pool:
        closing = pool.submit(log.close)
        wait_until(lambda: is_closed(log))
        gate.is_open.set()
        assert futures[0].result(WAIT_S) == (0, 0)
        for future in futures[1:]:
            with pytest.raises(LogClosed):
                future.result(WAIT_S)
        closing.result(WAIT_S)
    with SegmentLog.open(log.path) as opened:
        assert values_of(opened) == [b"first"]


def test_what_is_written_meanwhile_comes_before_what_was_handed_over(log, gate, handed_over):
    with handed_over([b"later"]) as futures:
        assert log.append(b"here", base_offset=1, durability=Durability.BUFFERED) == (1, 1)
        gate.is_open.set()
        assert futures[1].result(WAIT_S) == (2, 2)


def test_the_thread_that_gets_ctrl_c_writes_for_itself_and_waits_like_the_others(log, gate, handed_over):
    with handed_over([b"left to others"]) as futures:
        opening = threading.Timer(0.01, gate.is_open.set)
        opening.start()
        assert log.append(b"main") == (1, 1)
        assert log.flushed_offset >= 2
        assert futures[1].result(WAIT_S) == (2, 2)
        opening.join()
