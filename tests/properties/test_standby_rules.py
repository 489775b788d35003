"""When a standby looks, and when a leader resigns, against the contract's sentences; how many members either needs."""

from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pushrep.election.candidate import Candidate, MemberAnswer, Purpose, Refused
from pushrep.election.effects import TakeEpoch
from pushrep.election.errors import CantStandBy
from pushrep.election.grants import Grant, Member, Quorum
from pushrep.election.standby import (
    MAY_BECOME,
    LeaderHealth,
    Seen,
    Standby,
    StandbyState,
    TakeoverTimes,
    check_standby,
)

TIMES = TakeoverTimes(takeover_after_ms=10_000, takeover_pause_ms=30_000)


def grant(epoch=256, count=3, m=2, **changes):
    fields = {
        "outbox_id": UUID(int=1), "epoch": epoch, "leader": epoch % 256, "members": tuple(map(Member, range(count))),
        "min_insync_replicas": m, "members_epoch": 0, "pid_epoch": 0, "topic_id": UUID(int=2), "topic": "orders",
        "partitions": 1, "carrier": "key",
    }  # fmt: skip
    return Grant(**fields | changes)


@pytest.mark.parametrize("n", range(3, 8))
def test_any_two_that_take_over_meet_and_each_meets_whatever_was_acknowledged(n):
    for m in range(n // 2 + 1, n + 1):
        needed = Quorum(frozenset(range(n)), m).to_take_over
        assert needed == max(n - m + 1, n // 2 + 1)
        for one in combinations(range(n), needed):
            assert all(set(one) & set(other) for other in combinations(range(n), needed))
            assert all(set(one) & set(held) for held in combinations(range(n), m))


@pytest.mark.parametrize(("count", "m", "why"), [(2, 2, "2 members, 3 are needed"), (3, 1, "3 members is no majority")])
def test_too_few_members_and_less_than_a_majority_are_refused_by_name(count, m, why):
    with pytest.raises(CantStandBy, match=why):
        check_standby(grant(count=count, m=m))
    with pytest.raises(CantStandBy):
        Standby(TIMES, lambda n: 0).why_not_look(Seen(0, grant(count=count, m=m), 1, 20_000))


def test_its_own_lead_is_looked_after_at_once_also_after_another_led():
    standby = Standby(TIMES, lambda n: n - 1)
    assert standby.why_not_look(Seen(0, grant(), 2, 0)) is not None
    assert standby.why_not_look(Seen(5, grant(258), 2, None)) is None


def test_a_leader_that_says_goodbye_is_followed_within_the_spread():
    standby = Standby(TIMES, lambda n: n - 1)
    assert "soon" in standby.why_not_look(Seen(0, grant(), 1, None))
    assert "soon" in standby.why_not_look(Seen(TIMES.spread_ms - 1, grant(), 1, None))
    assert standby.why_not_look(Seen(TIMES.spread_ms, grant(), 1, None)) is None


def test_after_another_took_over_the_next_waits_and_the_first_failure_is_taken_over_at_once():
    standby = Standby(TIMES, lambda n: 0)
    assert "was in contact" in standby.why_not_look(Seen(0, grant(), 1, 0))
    assert "took over lately: the next may in 30.0 s" in standby.why_not_look(Seen(5_000, grant(258), 1, None))
    assert "took over lately" in standby.why_not_look(Seen(34_999, grant(514), 1, None))
    assert standby.why_not_look(Seen(35_000, grant(514), 1, None)) is None
    assert Standby(TIMES, lambda n: 0).why_not_look(Seen(5_000, grant(258), 1, None)) is None


def test_a_leader_resigns_without_a_majority_or_a_disk_and_not_before_its_time():
    health, three = LeaderHealth(TIMES, 0), grant()
    health.on_answer(2, 5_000)
    assert health.why_resign(three, "", 14_999) is None
    assert "no majority" in health.why_resign(three, "", 15_000)
    health = LeaderHealth(TIMES, 0)
    health.on_answer(1, 9_000)
    assert health.why_resign(three, "the disk is full", 9_999) is None
    assert "the disk is full" in health.why_resign(three, "the disk is full", 10_000)
    health = LeaderHealth(TIMES, 0)
    health.on_answer(1, 15_000)
    assert health.why_resign(three, "the disk is full", 9_999) is None
    assert health.why_resign(three, "", 10_000) is None
    assert health.why_resign(three, "the disk is full", 19_999) is None


def test_members_that_answer_at_different_times_are_a_majority_together():
    health, five = LeaderHealth(TIMES, 0), grant(count=5, m=3)
    health.on_answer(1, 2_000)
    health.on_answer(2, 9_000)
    assert health.why_resign(five, "", 11_999) is None
    assert "[1, 3, 4] did not answer" in health.why_resign(five, "", 12_000)


class StandingBy(RuleBasedStateMachine):
    """Member 1 of three: leaders come, beat, fall silent, say goodbye."""

    @initialize()
    def begin(self):
        self.now_ms, self.spread = 0, 0
        self.standby = Standby(TIMES, lambda n: min(self.spread, n - 1))
        self.grant, self.known_ms, self.heard_ms, self.is_over = grant(), 0, 0, False
        self.idle_since_ms, self.pause_until_ms = None, 0
        self.look()

    def renew(self, leader):
        self.grant = grant(self.grant.epoch + 256 + leader - self.grant.leader)
        self.known_ms, self.heard_ms, self.is_over = self.now_ms, self.now_ms, False
        self.idle_since_ms = None  # a new leader has its time

    @rule(leader=st.sampled_from([0, 2]))
    def another_leads(self, leader):
        """It is seen at once: the pause begins with what a standby sees."""
        if leader != self.grant.leader:
            self.pause_until_ms = self.now_ms + 30_000
        self.renew(leader)
        self.look()

    @precondition(lambda self: not self.is_over)
    @rule()
    def beat(self):
        self.heard_ms = self.now_ms

    @rule()
    def goodbye(self):
        self.is_over = True

    @rule(ms=st.sampled_from([1, 300, 1_000, 4_000, 31_000]), spread=st.integers(0, 1_000))
    def time(self, ms, spread):
        self.now_ms, self.spread = self.now_ms + ms, spread

    @rule()
    def look(self):
        is_free = self.may_look()
        age_ms = None if self.is_over else self.now_ms - self.heard_ms
        seen = Seen(self.now_ms, self.grant, 1, age_ms)
        why_not = self.standby.why_not_look(seen)
        if why_not is None:
            assert is_free, "it looked while a leader, or a pause stood in the way"
            self.standby.on_refused(self.now_ms)
            self.idle_since_ms = None
        elif is_free:
            if self.idle_since_ms is not None:
                assert self.now_ms - self.idle_since_ms <= 2 * TIMES.spread_ms, (
                    "nobody looks, and nothing is in the way"
                )
            else:
                self.idle_since_ms = self.now_ms
        else:
            self.idle_since_ms = None

    def may_look(self):
        silent = self.is_over or self.now_ms - self.heard_ms >= TIMES.takeover_after_ms
        return silent and self.now_ms >= self.pause_until_ms

    @invariant()
    def the_state_is_one_that_waits(self):
        assert self.standby.state in {StandbyState.WAITING, StandbyState.STANDING_BY}


StandingBy.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStandingBy = StandingBy.TestCase


def test_every_state_is_left_by_the_table_alone():
    for state, others in MAY_BECOME.items():
        for other in set(StandbyState) - others:
            standby = Standby(TIMES, lambda n: 0)
            standby.state = state
            with pytest.raises(AssertionError):
                standby.become(other)


@pytest.mark.parametrize(("is_standby", "leads"), [(False, True), (True, False)])
def test_a_standby_that_is_alone_takes_nothing_where_an_operator_could(is_standby, leads):
    """Three members, m = 3: one is enough to lead, and could be the one that is cut off."""
    own = MemberAnswer(index=0, grant=grant(m=3), highest_epoch=256)
    candidate = Candidate(0, Purpose.OPEN, own, is_standby=is_standby)
    effects = [*candidate.start(), *candidate.on_deadline()]
    assert any(isinstance(effect, TakeEpoch) for effect in effects) == leads
    if not leads:
        (refused,) = (effect.error for effect in effects if isinstance(effect, Refused))
        assert (refused.answered, refused.needed) == (1, 2)
