"""Whether a partition's records may be appended, for how long they could not, and which have waited too long."""

from types import SimpleNamespace

import pytest

from pushrep.election.errors import NotLeader
from pushrep.outbox.errors import NotEnoughReplicas
from pushrep.outbox.partition_replicas import PartitionReplicas, Waiting, holding_back
from tests.support.simulated_disk import SimulatedClock


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def replicas(clock):
    return PartitionReplicas("orders-0", needs_all=True, min_insync_replicas=2, clock=clock)


def led(*, enough=True, resigned=None):
    in_sync = {0, 1} if enough else {0}
    return SimpleNamespace(resigned=resigned, leader=SimpleNamespace(in_sync=in_sync, may_append_all=enough))


RESIGNED, FAILED = NotLeader(1, 5), ValueError("damaged")


@pytest.mark.parametrize(
    ("of_led", "failure", "with_all", "with_local"),
    [
        (None, None, NotEnoughReplicas, None),  # nobody leads yet
        (led(), None, None, None),
        (led(enough=False), None, NotEnoughReplicas, None),
        (led(resigned=RESIGNED), None, RESIGNED, RESIGNED),
        (led(), FAILED, FAILED, FAILED),
    ],
)
def test_what_refuses_an_append(replicas, of_led, failure, with_all, with_local):
    replicas.led, replicas.failure = of_led, failure
    for replicas.needs_all, expected in ((True, with_all), (False, with_local)):
        refusal = replicas.refusal()
        assert type(refusal) is expected if isinstance(expected, type) else refusal is expected
        with holding_back([replicas]):  # then it waits, and is asked again
            assert replicas.refusal() is failure
        assert type(replicas.refusal()) is type(refusal)


def test_members_that_were_enough_may_be_away_for_a_moment(replicas, clock):
    clock.advance(10)
    assert replicas.refused_ms(5_000) == 10, "they never were"
    replicas.led = led()
    assert replicas.refused_ms(5_000) is None
    replicas.led = led(enough=False)
    clock.advance(4_999)
    assert (replicas.refused_ms(), replicas.refused_ms(5_000)) == (4_999, None)
    clock.advance(1)
    assert replicas.refused_ms(5_000) == 5_000
    replicas.led = led()
    assert replicas.refused_ms() is None
    replicas.failure = FAILED
    assert replicas.refused_ms(5_000) == 0, "that does not pass"


def test_records_are_acknowledged_while_the_first_one_that_waits_is_another_one(replicas, clock):
    assert replicas.acknowledges(0), "nothing waits, whoever leads"
    clock.advance(10_000)
    assert replicas.acknowledges(5_000)
    replicas.led = led()
    for base in range(3):
        replicas.waiting.append(Waiting(base, None, clock.monotonic_ms(), replicas.led))
    for _ in range(3):
        clock.advance(4_999)
        assert replicas.acknowledges(5_000)
        replicas.remove(replicas.waiting[0])
        replicas.look()
    replicas.waiting.append(Waiting(3, None, clock.monotonic_ms(), replicas.led))
    assert replicas.acknowledges(5_000)
    clock.advance(5_000)
    assert not replicas.acknowledges(5_000)


def test_what_has_waited_for_so_long_is_given_up_and_no_other(replicas):
    replicas.waiting.extend(Waiting(base, None, since_ms, None) for base, since_ms in enumerate([5, 7, 7, 8]))
    assert [one.base_offset for one in replicas.remove_expired(7)] == [0, 1, 2]
    assert [one.base_offset for one in replicas.waiting] == [3]
