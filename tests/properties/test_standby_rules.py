"""When a standby looks, and when a leader resigns, against the contract's sentences; how many members either needs."""

from dataclasses import replace
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pushrep.election.candidate import Candidate, Lead, MemberAnswer, Purpose, Refused, SendGrant, StandbyElection
from pushrep.election.errors import CantLead, CantStandBy
from pushrep.election.follower import StoreEpoch
from pushrep.election.grants import Grant, Hold, Member, Quorum, Takeover, next_ballot
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


@pytest.mark.parametrize(("after_ms", "spread_ms"), [(2_000, 500), (4_000, 1_000), (60_000, 1_000)])
def test_a_random_delay_takes_a_quarter_of_the_patience_and_a_second_at_most(after_ms, spread_ms):
    """A takeover is promised within the patience and 5 s, so that the delay has to be a small part of both."""
    assert TakeoverTimes(takeover_after_ms=after_ms).spread_ms == spread_ms


def test_the_successor_that_a_leader_names_looks_at_once_outside_of_the_pause_and_not_during_a_hold():
    wall_ms = 1_700_000_000_000
    after = {"takeover": Takeover(256, wall_ms)}
    named = Seen(0, grant(**after), 1, None, wall_ms=wall_ms, is_successor=True)
    standby = Standby(TIMES, lambda n: n - 1)
    assert standby.why_not_look(named) is None
    assert standby.why_not_take_over(grant(**after), 0, wall_ms) == ""
    assert "took over lately" in standby.why_not_take_over(grant(514, **after), 0, wall_ms), "another leads meanwhile"
    assert "took over lately" in Standby(TIMES, lambda n: 0).why_not_look(named._replace(is_successor=False))
    held = grant(hold=Hold(256, wall_ms, wall_ms + 1_000, "work"))
    assert "are held" in Standby(TIMES, lambda n: 0).why_not_look(named._replace(grant=held))
    assert "are held" in standby.why_not_take_over(held, 0, wall_ms), "a member shows it only now"


def test_who_handed_the_lead_over_leaves_it_to_the_successor_as_long_as_all_others_do():
    standby = Standby(TIMES, lambda n: 0)
    seen = Seen(0, grant(), 0, None, has_handed_over=True)
    assert "another takes over now" in standby.why_not_look(seen)
    assert "another takes over now" in standby.why_not_look(seen._replace(now_ms=TIMES.takeover_after_ms - 1))
    assert standby.why_not_look(seen._replace(now_ms=TIMES.takeover_after_ms)) is None


def test_until_a_shorter_list_is_settled_the_longer_one_says_whether_there_are_enough_members():
    three = grant()
    joint = three.with_members(next_ballot(0, three.epoch), three.members[:2])
    check_standby(joint)
    with pytest.raises(CantStandBy, match="2 members"):
        check_standby(joint.settled(next_ballot(0, joint.epoch)))


def test_after_another_took_over_the_next_waits_and_the_first_failure_is_taken_over_at_once():
    """A running standby uses what it has observed; an instance that was started since uses the grant."""
    standby, wall_ms = Standby(TIMES, lambda n: 0), 1_700_000_000_000
    assert "was in contact" in standby.why_not_look(Seen(0, grant(), 1, 0, wall_ms=wall_ms))
    after = {"takeover": Takeover(258, wall_ms + 5_000)}
    late_ms = wall_ms + 3_600_000  # its wall clock is an hour ahead
    assert "took over lately: the next may in 30.0 s" in standby.why_not_look(
        Seen(5_000, grant(258, **after), 1, None, wall_ms=late_ms)
    )
    assert "member 2 took over lately" in standby.why_not_look(Seen(34_999, grant(514, **after), 1, None))
    assert standby.why_not_look(Seen(35_000, grant(514, **after), 1, None)) is None

    started = Standby(TIMES, lambda n: 0)
    assert "the next may in 20.0 s" in started.why_not_look(
        Seen(0, grant(258, **after), 1, None, wall_ms=wall_ms + 15_000)
    )
    assert started.why_not_look(Seen(20_000, grant(258, **after), 1, None)) is None
    assert Standby(TIMES, lambda n: 0).why_not_look(Seen(0, grant(258), 1, None)) is None, "an operator's promotion"
    behind = Standby(TIMES, lambda n: 0)
    assert "in 30.0 s" in behind.why_not_look(Seen(0, grant(258, **after), 1, None, wall_ms=0))
    assert behind.why_not_look(Seen(30_000, grant(258, **after), 1, None, wall_ms=0)) is None


def test_a_hold_keeps_every_standby_from_looking_until_it_ends_and_its_own_lead_from_nothing():
    hold = Hold(256, 1_000_000, 4_600_000, "new switches")
    standby = Standby(TIMES, lambda n: 0)
    assert "held for 1800.0 s (new switches)" in standby.why_not_look(
        Seen(0, grant(hold=hold), 1, None, wall_ms=2_800_000)
    )
    assert "held" in standby.why_not_look(Seen(1_799_999, grant(hold=hold), 1, None, wall_ms=9_000_000))
    assert standby.why_not_look(Seen(1_800_000, grant(hold=hold), 1, None, wall_ms=2_800_000)) is None
    assert Standby(TIMES, lambda n: 0).why_not_look(Seen(0, grant(hold=hold), 0, None, wall_ms=2_800_000)) is None
    ended = Standby(TIMES, lambda n: 0)
    assert "held" in ended.why_not_look(Seen(0, grant(hold=hold), 1, None, wall_ms=2_800_000))
    over = replace(hold, epoch=512, until_ms=hold.since_ms)
    assert ended.why_not_look(Seen(1, grant(512, hold=over), 1, None, wall_ms=2_800_001)) is None
    assert ended.why_not_take_over(grant(hold=hold), 2, 2_800_002) == "", "an older one that a member shows still"


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
        self.now_ms, self.spread, self.wall_offset_ms = 0, 0, 1_700_000_000_000
        self.standby = Standby(TIMES, lambda n: min(self.spread, n - 1))
        self.grant, self.known_ms, self.heard_ms, self.is_over = grant(), 0, 0, False
        self.idle_since_ms = None
        self.began = {}  # what the grant carries: (when it began, for how long, the wall clock's offset then)
        self.not_before_ms, self.free_from_ms = {}, {}  # the latest and the earliest look that it may keep away
        self.look()

    def renew(self, leader, **changes):
        carried = {"hold": self.grant.hold, "takeover": self.grant.takeover, **changes}
        self.grant = grant(self.grant.epoch + 256 + leader - self.grant.leader, **carried)
        self.known_ms, self.heard_ms, self.is_over = self.now_ms, self.now_ms, False
        self.idle_since_ms = None  # a new leader has its time

    @rule(leader=st.sampled_from([0, 2]))
    def promoted(self, leader):
        """By an operator: no pause begins, and what the grant carries stays."""
        self.renew(leader)
        self.look()

    @rule(leader=st.sampled_from([0, 2]))
    def took_over(self, leader):
        epoch = self.grant.epoch + 256 + leader - self.grant.leader
        self.renew(leader, takeover=Takeover(epoch, self.now_ms + self.wall_offset_ms))
        self.begins("takeover", TIMES.takeover_pause_ms)
        self.look()

    @rule(length_ms=st.sampled_from([0, 5_000, 60_000]))
    def hold(self, length_ms):
        since_ms = self.now_ms + self.wall_offset_ms
        epoch = self.grant.epoch + 256
        self.renew(self.grant.leader, hold=Hold(epoch, since_ms, since_ms + length_ms, "work"))
        self.begins("hold", length_ms)
        self.look()

    def begins(self, what, length_ms):
        self.began[what] = (self.now_ms, length_ms, self.wall_offset_ms)
        self.not_before_ms[what] = self.free_from_ms[what] = self.now_ms + length_ms

    @rule(ms=st.sampled_from([-3_600_000, -20_000, 20_000, 3_600_000]))
    def wall_clock_steps(self, ms):
        self.wall_offset_ms += ms

    @rule()
    def started_again(self):
        """It computes the remaining pause from the wall clock: exactly, unless the clock was set since; never
        longer.
        """
        self.standby = Standby(TIMES, lambda n: min(self.spread, n - 1))
        self.known_ms, self.idle_since_ms = self.now_ms, None
        for what, (at_ms, length_ms, offset_ms) in self.began.items():
            is_same = offset_ms == self.wall_offset_ms
            self.not_before_ms[what] = at_ms + length_ms if is_same else 0
            self.free_from_ms[what] = at_ms + length_ms if is_same else self.now_ms + length_ms
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
        is_free = self.nobody_leads() and self.now_ms >= max(self.free_from_ms.values(), default=0)
        age_ms = None if self.is_over else self.now_ms - self.heard_ms
        seen = Seen(self.now_ms, self.grant, 1, age_ms, wall_ms=self.now_ms + self.wall_offset_ms)
        why_not = self.standby.why_not_look(seen)
        if why_not is None:
            assert self.nobody_leads(), "it looked while a leader stood in the way"
            for what, until_ms in self.not_before_ms.items():
                assert self.now_ms >= until_ms, f"it looked while a {what} stood in the way"
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

    def nobody_leads(self):
        silent_ms = self.now_ms - max(self.heard_ms, self.known_ms)
        return self.is_over or silent_ms >= TIMES.takeover_after_ms

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


def asks_by_itself(why_not="", wall_ms=0):
    return StandbyElection(lambda _: why_not, wall_ms)


@pytest.mark.parametrize(("standby", "leads"), [(None, True), (asks_by_itself(), False)])
def test_a_standby_that_is_alone_takes_nothing_where_an_operator_could(standby, leads):
    """Three members, m = 3: one is enough to lead, and could be the one that is cut off."""
    own = MemberAnswer(index=0, grant=grant(m=3), highest_epoch=256)
    candidate = Candidate(0, Purpose.OPEN, own, standby=standby)
    effects = [*candidate.start(), *candidate.on_deadline()]
    assert any(isinstance(effect, StoreEpoch) for effect in effects) == leads
    if not leads:
        (refused,) = (effect.error for effect in effects if isinstance(effect, Refused))
        assert (refused.answered, refused.needed) == (1, 2)


@pytest.mark.parametrize(("stored", "leads"), [(1, False), (2, True)])
def test_a_standby_leads_once_so_many_have_stored_its_grant_not_when_they_answered(stored, leads):
    """Five members, m = 5: one is enough for an operator, three for a standby. All answer the look."""
    shown = grant(count=5, m=5)
    answers = [MemberAnswer(index=index, grant=shown, highest_epoch=256) for index in range(5)]
    candidate = Candidate(1, Purpose.PROMOTE_AND_CATCH_UP, answers[1], standby=asks_by_itself())
    effects = candidate.start()
    for answer in (answers[0], *answers[2:]):
        effects += candidate.on_answer(answer)
    (sent,) = (one.grant for one in effects if isinstance(one, SendGrant))
    for index in (2, 3)[:stored]:
        told = MemberAnswer(index=index, grant=sent, highest_epoch=sent.epoch, is_unfilled=False)
        effects += candidate.on_answer(told)
    assert candidate.asks_again is not leads
    effects += candidate.on_deadline()
    assert any(isinstance(effect, Lead) for effect in effects) == leads


HELD = Hold(256, 0, 60_000, "work")


def looked(standby, shown, purpose=Purpose.PROMOTE_AND_CATCH_UP, own=None):
    """Member 1 of three looks, and member 2 answers with `shown`; member 0 led, and is silent."""
    candidate = Candidate(1, purpose, MemberAnswer(index=1, grant=own or grant(), highest_epoch=256), standby=standby)
    answer = MemberAnswer(index=2, grant=shown, highest_epoch=shown.epoch)
    return [*candidate.start(), *candidate.on_answer(answer), *candidate.on_deadline()]


def test_a_hold_that_only_another_member_knows_refuses_a_standby_before_a_number_is_taken_and_no_operator():
    """Its own node was away when the hold came."""
    seen = []
    effects = looked(StandbyElection(lambda one: (seen.append(one.hold), "held")[1], 0), grant(512, hold=HELD))
    (refused,) = (effect.error for effect in effects if isinstance(effect, Refused))
    assert isinstance(refused, CantLead)
    assert seen[-1] == HELD
    assert not [effect for effect in effects if isinstance(effect, StoreEpoch)]
    assert [effect for effect in looked(None, grant(512, hold=HELD)) if isinstance(effect, StoreEpoch)]


@pytest.mark.parametrize("standby", [None, asks_by_itself(wall_ms=7_000)])
def test_the_next_grant_carries_what_anybody_shows_and_a_standbys_says_when_it_took_over(standby):
    """The newest grant need not have them: its candidate looked at others."""
    own = grant(hold=HELD, takeover=Takeover(3, 1))
    (sent,) = (one.grant for one in looked(standby, grant(512), own=own) if isinstance(one, SendGrant))
    assert sent.hold == HELD
    assert sent.takeover == (Takeover(3, 1) if standby is None else Takeover(sent.epoch, 7_000))
    mine = grant(257, hold=HELD, takeover=Takeover(3, 1))
    (sent,) = (one.grant for one in looked(standby, grant(257), Purpose.OPEN, own=mine) if isinstance(one, SendGrant))
    assert sent.takeover == Takeover(3, 1), "to lead on is no takeover"
