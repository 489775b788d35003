"""The batches behind the last one, without an index: of who follows a log closely."""

import random

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import list_segments, segment_path
from pushrep.replay.slices import Tail

SMALL = LogConfig(segment_bytes=100_000, preallocate_bytes=0)


@pytest.fixture(params=[SMALL, LogConfig()], ids=["small segments", "room ahead"])
def log(tmp_path, request):
    with SegmentLog.open(tmp_path / "orders-0", request.param, has_replicas=True) as opened:
        yield opened


def grow(log, *sizes, epoch=None):
    if epoch is not None:
        log.begin_epoch(epoch, log.log_end_offset)
    for size in sizes:
        log.append(random.Random(size).randbytes(size), durability=Durability.BUFFERED)


def followed(tail, log, last):
    """All that is behind `last`, as one asks again and again."""
    found = []
    while last.next_offset < log.log_end_offset:
        behind = tail.behind(last, log.log_end_offset)
        assert behind, f"nothing behind {last}"
        found += behind
        last = behind[-1].header
    return found


def test_it_gives_what_the_log_holds_whatever_the_sizes_and_the_segments(log):
    tail, rng = Tail(log.path, REAL_FILESYSTEM), random.Random(7)
    grow(log, 10)
    last, seen = next(log.batches(0)).header, 1
    for _ in range(30):
        grow(log, *(rng.choice([1, 100, 3_000, 20_000, 70_000]) for _ in range(rng.randint(1, 6))))
        found = followed(tail, log, last)
        assert [bytes(batch.data) for batch in found] == [bytes(batch.data) for batch in log.batches(seen)]
        last, seen = found[-1].header, log.log_end_offset
    assert tail.behind(last, log.log_end_offset) == []


def test_nothing_is_given_at_or_above_the_limit(log):
    tail = Tail(log.path, REAL_FILESYSTEM)
    grow(log, 10, 10, 10)
    first = next(log.batches(0)).header
    assert tail.behind(first, 1) == []
    assert [batch.header.base_offset for batch in tail.behind(first, 2)] == [1]


def test_it_knows_whether_more_was_written_than_may_be_read(log):
    tail = Tail(log.path, REAL_FILESYSTEM)
    grow(log, 10, 10, 10)
    first = next(log.batches(0)).header
    assert len(tail.behind(first, 2)) == 1
    assert tail.has_more
    assert len(tail.behind(first, 3)) == 2
    assert not tail.has_more


def test_a_log_that_was_cut_and_has_grown_again_is_not_taken_for_the_one_before(log):
    tail = Tail(log.path, REAL_FILESYSTEM)
    grow(log, 10, 11, 12)
    *_, last = (batch.header for batch in log.batches(0))
    assert tail.behind(last, 3) == []
    log.truncate_to(1)
    assert tail.behind(last, 3) is None
    grow(log, 11, 12, 13, epoch=5)
    assert tail.behind(last, 4) is None
    log.begin_anew(2, 6)
    grow(log, 12, 13)
    assert tail.behind(last, 4) is None


def test_what_is_damaged_or_gone_is_left_to_the_logs_own_reader(log):
    tail = Tail(log.path, REAL_FILESYSTEM)
    grow(log, 10, 10, 10, 10)
    first, second, third, _ = (batch.header for batch in log.batches(0))
    path = segment_path(log.path, list_segments(REAL_FILESYSTEM, log.path)[0])
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[first.size_bytes + second.size_bytes + third.size_bytes - 1] ^= 1
    path.write_bytes(damaged)
    assert [batch.header for batch in tail.behind(first, 4)] == [second]
    assert not tail.behind(second, 4)
    path.write_bytes(whole)
    assert [batch.header.base_offset for batch in tail.behind(second, 4)] == [2, 3]
    path.unlink()
    assert tail.behind(third, 4) is None
    path.write_bytes(whole)  # the log closes as if nothing had been
