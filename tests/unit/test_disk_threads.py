"""The shared threads of one disk: calls run in parallel, and no call waits for another disk."""

import threading

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.log.disk import disk_threads, release_disk_threads
from tests.support.forks import code_in_fork
from tests.unit.gated_disk import until

WAIT_S = 60


@pytest.fixture
def threads(tmp_path):
    # A file system of its own: what other tests of this process left open shares nothing with it.
    threads = disk_threads(RealFilesystem(), tmp_path, 4)
    yield threads
    release_disk_threads(threads)


def test_calls_run_beside_each_other_and_answer_in_their_order(threads):
    met = threading.Barrier(4, timeout=WAIT_S)
    assert threads.run_all([lambda n=n: (met.wait(), n)[1] for n in range(8)]) == list(range(8))
    assert threads.run_all([]) == []


def test_the_first_error_is_raised_when_all_have_ended(threads):
    ended = []

    def fails(n):
        ended.append(n)
        raise OSError(n, "the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as raised:
        threads.run_all([lambda n=n: fails(n) for n in range(1, 6)])
    assert raised.value.errno == 1
    assert sorted(ended) == [1, 2, 3, 4, 5]


def test_who_waits_for_all_goes_on_where_every_thread_hangs(threads):
    gate = threading.Event()
    try:
        for _ in range(4):
            threads.submit(gate.wait)
        assert threads.run_all([lambda: 1, lambda: 2]) == [1, 2]
    finally:
        gate.set()


def test_users_of_one_disk_share_threads_that_end_with_the_last(tmp_path):
    filesystem = RealFilesystem()
    first, second = (disk_threads(filesystem, tmp_path / name, 2) for name in ("a", "b"))
    assert first is second
    assert disk_threads(REAL_FILESYSTEM, tmp_path, 2) is not first
    met, mine = threading.Barrier(3, timeout=WAIT_S), []
    for _ in range(2):
        first.submit(lambda: (mine.append(threading.current_thread()), met.wait()))
    met.wait()
    release_disk_threads(first)
    assert all(thread.is_alive() for thread in mine)
    release_disk_threads(second)
    until(lambda: not any(thread.is_alive() for thread in mine), "the threads end")
    release_disk_threads(disk_threads(REAL_FILESYSTEM, tmp_path, 2))


def test_a_fork_has_threads_of_its_own(tmp_path, threads):
    def child():
        own = disk_threads(REAL_FILESYSTEM, tmp_path, 4)
        assert own is not threads
        assert own.run_all([lambda: 1, lambda: 2]) == [1, 2]

    assert code_in_fork(child) == 0
