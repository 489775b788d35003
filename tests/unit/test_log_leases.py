"""Leases: held, renewed, released, expired, broken; and the notification of their holder."""

import pytest

from pushrep.errors import ForkedProcess
from pushrep.log import SegmentLog
from pushrep.log.errors import LeaseBroken, LogClosed
from pushrep.log.retention import Leases
from tests.support.forks import code_in_fork
from tests.support.simulated_disk import SimulatedClock


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def leases(clock):
    return Leases(clock, 60)


def test_a_lease_moves_up_and_never_down(leases):
    lease = leases.acquire("audit", 10)
    lease.renew(25)
    lease.renew(20)
    lease.renew()
    assert [held.offset for held in leases] == [25]
    assert (lease.name, lease.broken) == ("audit", None)


def test_released_it_holds_nothing_and_says_so(leases):
    with leases.acquire("audit", 10) as lease:
        assert len(leases) == 1
    lease.release()
    assert len(leases) == 0
    with pytest.raises(LeaseBroken, match="released"):
        lease.renew()


def test_who_does_not_renew_in_time_is_told(leases, clock):
    told = []
    late, kept = leases.acquire("late", 1, told.append), leases.acquire("kept", 2, told.append)
    clock.advance(60_000)
    leases.expire()
    assert told == [], "exactly as long as allowed"
    kept.renew()
    clock.advance(1)
    leases.expire()
    assert told == ["it was not renewed for 60 s"]
    assert list(leases) == [kept]
    assert late.broken == "it was not renewed for 60 s"
    with pytest.raises(LeaseBroken, match="not renewed for 60 s") as caught:
        late.renew(5)
    assert (caught.value.name, caught.value.reason) == ("late", "it was not renewed for 60 s")


def test_all_are_broken_with_the_reason_and_one_that_fails_keeps_nobody_from_knowing(leases, caplog):
    told = []

    def fails(reason):
        raise RuntimeError("no route")

    held = [leases.acquire("a", 1, fails), leases.acquire("b", 2, told.append), leases.acquire("c", 3)]
    leases.break_all("the disk is 86 % full")
    assert told == ["the disk is 86 % full"]
    assert {lease.broken for lease in held} == {"the disk is 86 % full"}
    assert len(leases) == 0
    assert "no route" in caplog.text
    leases.break_all("again")
    assert held[0].broken == "the disk is 86 % full", "the first reason stays"


def test_who_is_told_that_the_log_was_closed_finds_it_closed(tmp_path):
    """A replay that looks goes on with a reader, or with the log opened anew; else it would end for nothing."""
    log, told = SegmentLog.open(tmp_path / "orders-0"), []
    log.append([b"a"])

    def look(reason):
        with pytest.raises(LogClosed):
            log.ends()
        told.append(reason)

    lease = log.acquire_lease("audit", 0, look)
    log.close()
    assert (told, lease.broken) == (["the log was closed"], "the log was closed")


def test_a_fork_holds_nothing(leases):
    lease = leases.acquire("audit", 10)

    def child():
        for use in (lease.renew, lease.release):
            with pytest.raises(ForkedProcess):
                use()

    assert code_in_fork(child) == 0
    lease.renew(11)
