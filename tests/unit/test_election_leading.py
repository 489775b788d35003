"""Leading: the leader's column of the table, sessions, watermark and in-sync set, opening and promoting."""

from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.election.candidate import (
    Candidate,
    CandidateState,
    Fetch,
    Lead,
    Look,
    MemberAnswer,
    MemberLog,
    Purpose,
    Refused,
    SendGrant,
)
from pushrep.election.epochs import EpochEnd, LogEnds, Unfenced
from pushrep.election.errors import (
    BadGrant,
    CantLead,
    LeaderMayBeAlive,
    LogNotFit,
    NotAhead,
    NotLeader,
    RivalGenerations,
    TooFewMembers,
    label,
)
from pushrep.election.follower import SetAside, StoreEpoch, StoreGrant
from pushrep.election.grants import EPOCH_LEAP, Grant, Member, next_generation
from pushrep.election.leader import (
    MARK_EVERY_MS,
    AppendTimes,
    Confirmations,
    Contested,
    HighWatermarkMoved,
    Joined,
    Left,
    PartitionLeader,
    Push,
    Resigned,
    SessionEnded,
)
from pushrep.election.messages import PushSessionEndReason
from pushrep.election.push_session import BEGINS_ANEW, MAY_BECOME, REACTIONS, SessionId, SessionState, Step
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.promotion import ListChange
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult

TP = TopicIdPartition(UUID(int=2), "t", 0)


def grant(epoch=256, members=3, m=2, **changes):
    fields = {
        "outbox_id": UUID(int=1), "epoch": epoch, "leader": epoch % 256, "members_epoch": 0, "min_insync_replicas": m,
        "members": tuple(Member(index) for index in range(members)), "pid_epoch": 0, "topic_id": UUID(int=2),
        "topic": "t", "partitions": 1, "carrier": "key",
    }  # fmt: skip
    return Grant(**fields | changes)


def ends(end, *entries, start=0):
    return LogEnds(start, end, LeaderEpochs(entries))


def leading(end=4, *, flushed=None, watermark=0, flushed_only=False, m=2, start=0):
    log = ends(end, (0, start), (256, end), start=start)
    return PartitionLeader(
        grant(m=m), log, flushed_offset=end if flushed is None else flushed, high_watermark=watermark,
        flushed_only=flushed_only, now_ms=0,
    )  # fmt: skip


def pushed(leader, theirs, *, to=1, upto=None):
    """A session with one request in flight: (id, sequence, request)."""
    session = SessionId(256, 1, 1)
    leader.start_session(to, session, theirs)
    offset = leader.sessions[to].next_offset
    sent, request = leader.request(to, offset, leader.log.log_end_offset if upto is None else upto, TP)
    return session, sent.sequence, request


def answer(error=ErrorCode.NONE, end=0, **changes):
    return AppendRecordsResult(error_code=error, log_end_offset=end, flushed_offset=end, **changes)


# ---- the leader's column


def test_success_advances_joins_and_moves_the_watermark():
    leader = leading()
    session, sequence, request = pushed(leader, ends(1, (0, 0)))
    assert (request.append_offset, request.previous_epoch, request.epoch_start_offset) == (1, 0, 4)
    assert leader.on_answer(1, session, sequence, answer(end=4)) == [Joined(1), HighWatermarkMoved(4), Push(1)]


def test_diverged_goes_back_in_the_epoch_history_and_asks_again():
    leader = leading()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    effects = leader.on_answer(1, session, sequence, answer(ErrorCode.LOG_DIVERGED, 4, epoch=-1, epoch_end_offset=0))
    assert effects == [Push(1)]
    assert leader.sessions[1].next_offset == 0


def test_diverged_without_an_epoch_ends_the_session_with_an_alarm():
    leader = leading()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    (ended,) = leader.on_answer(1, session, sequence, answer(ErrorCode.LOG_DIVERGED, 4))
    assert ended == SessionEnded(1, session, PushSessionEndReason.LOG_DIVERGED, is_alarm=True)


def test_out_of_range_goes_on_from_the_replicas_end():
    leader = leading()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    assert leader.on_answer(1, session, sequence, answer(ErrorCode.OFFSET_OUT_OF_RANGE, 2)) == [Push(1)]
    assert leader.sessions[1].next_offset == 2


def test_a_replica_below_the_log_start_begins_anew_there():
    leader = leading(end=9, start=6)
    _, _, request = pushed(leader, ends(3, (0, 0)))
    assert (request.append_offset, request.restart, request.previous_epoch) == (6, True, -1)


def test_records_that_retention_took_from_under_a_session_make_it_begin_anew():
    leader = leading(end=9)
    pushed(leader, ends(2, (0, 0)), upto=3)
    leader.on_log_start(5)
    sent, request = leader.request(1, 5, 9, TP)
    assert (sent.append_offset, request.restart) == (5, True)


@pytest.mark.parametrize("shown", [{"grant_epoch": 257, "grant_leader": 1}, {}])
def test_n10_fenced_ends_the_session_and_asks_who_leads(shown):
    leader = leading()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    leader.start_session(2, SessionId(256, 1, 2), ends(4, (0, 0)))
    leader.stored.add(1)
    effects = leader.on_answer(1, session, sequence, answer(ErrorCode.FENCED_LEADER_EPOCH, 4, **shown))
    contested = Contested(1, shown.get("grant_epoch", -1), shown.get("grant_leader", -1))
    assert effects == [contested, SessionEnded(1, session, PushSessionEndReason.STALE_REPLICA_EPOCH)]
    assert (leader.stored, leader.has_resigned, leader.sessions[2].is_live) == ({0}, False, True)


def test_a_leader_that_resigns_ends_every_session():
    leader = leading()
    pushed(leader, ends(4, (0, 0)))
    leader.start_session(2, SessionId(256, 1, 2), ends(4, (0, 0)))
    first, *ended = leader.resign(257, 1)
    assert first == Resigned(257, 1)
    assert [e.replica for e in ended] == [1, 2]
    assert {e.reason for e in ended} == {PushSessionEndReason.NEW_LEADER_EPOCH}
    assert not leader.may_append_all
    assert leader.on_grant_shown(2, 0, 513, 1) == []


def confirmations(m=2, members=3):
    found = Confirmations(grant(m=m, members=members), 3_000)
    found.on_own(1, 0)
    found.on_own(2, 0)
    return found


def test_n10_m_members_that_confirm_keep_the_lead_whatever_one_shows():
    asked = confirmations()
    assert asked.newer_grant(10_000) is None, "nobody shows another"
    for now_ms in range(10_000, 60_000, 1_000):
        asked.on_newer(1, 513, 1, now_ms)
        asked.on_own(2, now_ms)
        assert asked.newer_grant(now_ms + 500) is None


def test_n10_a_leader_that_too_few_confirm_is_deposed_in_time():
    """What the others showed before the doubt confirms nothing."""
    asked = confirmations()
    asked.on_newer(1, 513, 1, 1_000)
    assert asked.newer_grant(3_999) is None
    assert asked.newer_grant(4_000) == (513, 1)
    asked.on_own(2, 4_500)
    assert asked.newer_grant(4_500) is None
    asked.on_newer(2, 514, 2, 4_600)
    assert asked.newer_grant(7_499) is None
    assert asked.newer_grant(7_500) == (514, 2)


def test_n10_a_member_that_shows_the_leaders_grant_again_ends_the_doubt():
    asked = confirmations(m=2, members=2)
    asked.on_newer(1, 513, 1, 1_000)
    asked.on_own(1, 2_000)
    assert asked.newer_grant(9_000) is None
    asked.on_newer(1, 513, 1, 10_000)
    assert asked.newer_grant(12_999) is None, "the first doubt counts no more"


def test_n10_a_leader_that_is_enough_by_itself_leads_on():
    """With m = 1 nobody leads without a grant that this member stored."""
    asked = confirmations(m=1)
    asked.on_newer(1, 513, 1, 1_000)
    asked.on_newer(2, 513, 1, 1_000)
    assert asked.newer_grant(60_000) is None


FIRST, SECOND = next_generation(0, 5), next_generation(next_generation(0, 5), 1)


def leading_forced():
    made = leading()
    made.grant = replace(made.grant, generation=FIRST)
    return made


@pytest.mark.parametrize("error", [ErrorCode.NONE, ErrorCode.FENCED_LEADER_EPOCH])
def test_an_answer_of_an_older_generation_deposes_nobody_and_acknowledges_nothing(error):
    leader = leading_forced()
    session, sequence, request = pushed(leader, ends(4, (0, 0)))
    assert request.generation == FIRST
    effects = leader.on_answer(1, session, sequence, answer(error, 4, grant_epoch=768, grant_leader=1))
    assert effects == [SessionEnded(1, session, PushSessionEndReason.STALE_REPLICA_EPOCH)]
    assert (leader.high_watermark, leader.stored, leader.has_resigned) == (0, {0}, False)
    assert PushSessionEndReason.STALE_REPLICA_EPOCH in BEGINS_ANEW, "the next one begins with our grant"


def test_an_answer_that_tells_of_no_grant_is_of_no_generation():
    leader = leading_forced()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    assert leader.on_answer(1, session, sequence, answer(ErrorCode.REQUEST_TIMED_OUT)) == [Push(1, backoff=True)]


@pytest.mark.parametrize(("shown", "rival"), [(SECOND, None), (FIRST + 1, FIRST + 1), (FIRST - 1, FIRST - 1)])
def test_a_higher_generation_ends_the_lead_whatever_its_epoch_and_so_does_a_rival(shown, rival):
    leader = leading_forced()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    told = answer(ErrorCode.FENCED_LEADER_EPOCH, 4, grant_epoch=1, grant_leader=1, generation=shown)
    assert leader.on_answer(1, session, sequence, told)[0] == Resigned(1, 1, rival)


def test_n10_a_newer_grant_in_any_answer_acknowledges_nothing():
    leader = leading()
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    effects = leader.on_answer(1, session, sequence, answer(end=4, grant_epoch=257, grant_leader=1))
    assert effects[0] == Contested(1, 257, 1)
    assert (leader.high_watermark, leader.sessions[1].is_live, leader.has_resigned) == (0, False, False)


def test_corrupt_is_sent_once_more_then_ends_the_session():
    leader = leading()
    session, sequence, request = pushed(leader, ends(1, (0, 0)))
    assert leader.on_answer(1, session, sequence, answer(ErrorCode.CORRUPT_MESSAGE, 1)) == [Push(1)]
    again, repeated = leader.request(1, 1, 4, TP)
    assert repeated == request
    (ended,) = leader.on_answer(1, session, again.sequence, answer(ErrorCode.CORRUPT_MESSAGE, 1))
    assert ended.reason is PushSessionEndReason.NON_RETRIABLE_ERROR


def test_r2_a_retriable_answer_sends_the_same_again_after_a_pause():
    leader = leading()
    session, sequence, request = pushed(leader, ends(1, (0, 0)))
    assert leader.on_answer(1, session, sequence, answer(ErrorCode.REQUEST_TIMED_OUT, 1)) == [Push(1, backoff=True)]
    assert leader.request(1, 1, 4, TP)[1] == request


def test_every_state_has_an_answer_to_every_outcome():
    assert REACTIONS.keys() == {(state, outcome) for state in SessionState for outcome in ErrorCode}
    assert all(REACTIONS[SessionState.ENDED, outcome].step is Step.IGNORE for outcome in ErrorCode)
    assert MAY_BECOME.keys() == set(SessionState)
    for reaction in REACTIONS.values():
        assert (reaction.reason is not None) == (reaction.step in {Step.END, Step.CONTEST})
    assert not BEGINS_ANEW & {PushSessionEndReason.NEW_LEADER_EPOCH, PushSessionEndReason.SHUTDOWN}
    assert {PushSessionEndReason.STALE_REPLICA_EPOCH, PushSessionEndReason.LOG_DIVERGED} <= BEGINS_ANEW


def test_s4_newer_identifiers_replace_a_session_and_end_it():
    leader = leading()
    old, sequence, _ = pushed(leader, ends(4, (0, 0)))
    newer = SessionId(256, 2, 1)
    assert leader.start_session(1, newer, ends(4, (0, 0)))[0].id == old
    assert leader.start_session(1, old, ends(4, (0, 0))) == []
    assert leader.on_answer(1, old, sequence, answer(end=4)) == [], "E3: of a session that has ended"
    leader.end_session(1, PushSessionEndReason.STALE_REPLICA_EPOCH)
    assert leader.start_session(1, old, ends(4, (0, 0))) != [], "an older copy of its disk counts starts from there"


# ---- watermark and set


def test_an_answer_counts_up_to_its_requests_end():
    """The replica is longer: with what an older leader left."""
    leader = leading(end=4)
    session, sequence, _ = pushed(leader, ends(2, (0, 0)), upto=3)
    assert leader.on_answer(1, session, sequence, answer(end=9)) == [Push(1)]
    assert leader.sessions[1].acknowledged == 3
    assert 1 not in leader.in_sync, "below the epoch's start"


def test_a_replica_joins_at_the_watermark_and_the_epochs_start():
    leader = leading(end=4)
    session, sequence, _ = pushed(leader, ends(2, (0, 0)), upto=3)
    assert Joined(1) not in leader.on_answer(1, session, sequence, answer(end=3))
    sent, _ = leader.request(1, 3, 4, TP)
    assert Joined(1) in leader.on_answer(1, session, sent.sequence, answer(end=4))


def test_nothing_is_acknowledged_before_the_leader_has_its_epochs_start_on_disk():
    """A power cut would take the epoch out of its log, and an older, longer log would be ahead."""
    leader = leading(end=4, flushed=2, flushed_only=True)
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    assert not any(isinstance(e, HighWatermarkMoved) for e in leader.on_answer(1, session, sequence, answer(end=4)))
    assert HighWatermarkMoved(4) in leader.on_flush(4)


def test_flushed_durability_counts_flushed_offsets():
    leader = leading(end=4, flushed_only=True)
    session, sequence, request = pushed(leader, ends(4, (0, 0)))
    assert request.flush_wanted
    result = AppendRecordsResult(log_end_offset=4, flushed_offset=3)
    assert Joined(1) not in leader.on_answer(1, session, sequence, result)


def test_with_m_1_the_leader_alone_is_enough_from_the_start():
    leader = leading(end=4, m=1)
    assert leader.start() == [HighWatermarkMoved(4)]


def test_below_m_the_watermark_stands_and_all_is_refused():
    leader = leading(end=4)
    assert not leader.may_append_all
    leader.on_append(6, 0)
    assert leader.high_watermark == 0


def test_it_leaves_by_age_and_its_session_goes_on():
    leader = leading(end=4)
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    leader.on_answer(1, session, sequence, answer(end=4))
    assert leader.on_tick(1_000_000) == [], "an idle one does not age"
    leader.on_append(5, 1_000_000)
    assert leader.on_tick(1_030_000) == []
    assert leader.on_tick(1_030_001) == [Left(1, too_slow=True)]
    assert leader.sessions[1].is_live


def test_marks_of_time_stay_few():
    times = AppendTimes(0, 0)
    for offset in range(100_000):
        times.on_append(offset, offset // 10)
        times.forget(0, offset // 10 - 1_000)
    assert len({times.time_of(offset) for offset in range(100_000)}) <= 1_000 / MARK_EVERY_MS + 60
    assert 0 <= times.time_of(99_999) - (9_999 - MARK_EVERY_MS) <= MARK_EVERY_MS
    for age_ms in (1_500, 3_000, 6_000, 9_000):
        told = 9_999 - times.time_of((9_999 - age_ms) * 10)
        assert age_ms <= told <= age_ms * 9 / 8 + 2 * MARK_EVERY_MS, "old ages are told to an eighth"


def test_how_long_a_replica_owes_a_record_is_told_over_sessions():
    """lag(): records and the age of the oldest, of a replica that is away, too."""
    leader = leading(end=4)
    assert (leader.held_by(0), leader.held_by(1)) == (4, 0)
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    assert leader.held_by(1) == 4, "by the description of its log"
    leader.on_answer(1, session, sequence, answer(end=4))
    assert leader.owes_since(1) is None
    leader.on_append(5, 1_000_000)
    leader.on_append(6, 2_000_000)
    leader.end_session(1, PushSessionEndReason.NON_RETRIABLE_ERROR)
    other, sequence, _ = pushed(leader, ends(4, (0, 0)), to=2)
    leader.on_answer(2, other, sequence, answer(end=6))
    assert leader.high_watermark == 6, "enough others hold them"
    for now_ms in range(2_000_000, 6_000_000, 100_000):
        leader.on_tick(now_ms)
    assert (leader.held_by(1), leader.owes_since(1)) == (4, 1_000_000), "not only as far as replica_lag_max_ms"
    leader.on_append(7, 6_000_000)
    assert leader.owes_since(0) is None, "a leader owes itself nothing"


# ---- opening and promoting


def member(index, log, kept=None, *, watermark=0, seen=256, **changes):
    part = MemberLog(log=log, high_watermark=watermark, **changes)
    return MemberAnswer(index=index, grant=kept or grant(), highest_epoch=seen, logs={0: part})


LOG = ends(4, (0, 0), (256, 2))


def candidate(index=0, purpose=Purpose.OPEN, own=None, **changes):
    made = Candidate(index, purpose, own or member(index, LOG), **changes)
    assert made.start() == [Look(tuple(sorted({0, 1, 2} - {index})))]
    return made


def refusal(effects):
    assert isinstance(effects[-1], Refused), effects
    return effects[-1].error


def stored(made, index, log=LOG, **changes):
    return made.on_answer(member(index, log, made.grant, **changes))


def test_an_opening_takes_its_next_number_and_stores_it_before_it_asks():
    opening = candidate()
    effects = opening.on_answer(member(1, LOG, seen=770))
    assert [type(effect) for effect in effects] == [StoreEpoch, StoreGrant, SendGrant]
    assert effects[0].leader_epoch == effects[2].grant.epoch == 1024, "its own, above all that anybody has seen"
    assert stored(opening, 1) == [Lead(opening.grant)]
    assert opening.state is CandidateState.LEADING


def test_an_opening_never_takes_the_lead_from_another():
    error = refusal(candidate().on_answer(member(1, LOG, grant(epoch=257))))
    assert isinstance(error, NotLeader)
    assert (error.leader, error.epoch) == (1, 257)


def test_too_few_members_take_no_number():
    opening = candidate()
    error = refusal(opening.on_deadline())
    assert isinstance(error, TooFewMembers)
    assert (error.answered, error.needed, error.silent) == (1, 2, (1, 2))
    assert opening.grant is None, "nobody was fenced"


def test_only_what_is_shown_after_the_grant_was_stored_counts():
    opening = candidate()
    opening.on_answer(member(1, LOG))
    assert opening.on_answer(member(2, LOG)) == [], "it has not stored this grant"
    assert isinstance(refusal(opening.on_deadline()), TooFewMembers)


def test_a_promotion_that_is_not_ahead_is_refused_with_both_pairs_and_fences_nobody():
    promotion = candidate(1, Purpose.PROMOTE)
    effects = promotion.on_answer(member(2, ends(7, (0, 0), (256, 2))))
    error = refusal(effects)
    assert isinstance(error, NotAhead)
    assert (error.own, error.theirs, error.member) == ((256, 4), (256, 7), 2)
    assert not any(isinstance(effect, StoreEpoch | StoreGrant | SendGrant) for effect in effects)
    assert not error.is_fenced
    assert "nobody was fenced" in str(error)


def heard(index, age_ms, log=LOG, kept=None):
    return replace(member(index, log, kept), contact_age_ms=age_ms)


@pytest.mark.parametrize("purpose", [Purpose.PROMOTE, Purpose.PROMOTE_AND_CATCH_UP])
def test_a_leader_that_may_be_alive_is_fenced_by_no_promotion(purpose):
    """The leader and one member that had contact with it are m of three; no epoch was taken."""
    looking = candidate(1, purpose)
    assert looking.on_answer(heard(2, 2_999)) == [], "its own node may answer that no service has it"
    error = refusal(looking.on_deadline())
    assert isinstance(error, LeaderMayBeAlive)
    assert (error.leader, error.epoch, error.contacts, error.silent) == (0, 256, {2: 2_999}, ())
    assert "2999 ms ago" in str(error)
    own = candidate(1, purpose, heard(1, 0))
    assert refusal(own.on_deadline()).contacts == {1: 0}, "this member itself heard it: that is no case for a loss"
    deposing = candidate(1, purpose, heard(1, 0), leader_alive_ms=0)
    deposing.on_answer(heard(0, None, kept=grant(epoch=1)))
    deposing.on_answer(heard(2, 0))
    assert deposing.state is CandidateState.GRANTING, "--depose"


def test_a_leader_that_nobody_heard_lately_is_not_alive():
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, heard(1, 5_000))
    assert promotion.on_answer(heard(2, 3_000))[0] == StoreEpoch(257)


def test_who_cant_say_has_no_contact():
    """A member of an older version."""
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, heard(1, None))
    assert promotion.on_answer(heard(2, None))[0] == StoreEpoch(257)


def test_a_leader_whose_own_node_answers_is_not_alive():
    """Its node answers only while no service has the directory; a node that shows an older grant has not got the new
    one.
    """
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, heard(1, 10))
    assert promotion.on_answer(member(0, LOG))[0] == StoreEpoch(257)
    other = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, heard(1, 10, kept=grant(epoch=512)))
    other.on_answer(member(0, LOG))
    assert isinstance(refusal(other.on_deadline()), LeaderMayBeAlive)


def test_those_that_do_not_answer_may_be_with_the_leader():
    """Five members, m = 3: the candidate, one that has had contact with the leader, and one that does not answer. Once
    the second one has had no contact any more, the leader is not alive.
    """
    five = replace(grant(members=5), min_insync_replicas=3)
    ask = Look((0, 2, 3, 4))

    def looked():
        made = Candidate(1, Purpose.PROMOTE_AND_CATCH_UP, heard(1, None, kept=five))
        assert made.start() == [ask]
        assert made.on_answer(heard(2, 5, kept=five)) == []
        assert made.on_answer(heard(3, None, kept=five)) == [], "enough to lead, but member 4 may be with it"
        return made

    error = refusal(looked().on_deadline())
    assert isinstance(error, LeaderMayBeAlive)
    assert (error.contacts, error.silent) == ({2: 5}, (0, 4))
    assert looked().on_answer(heard(4, None, kept=five))[0] == StoreEpoch(257)


def test_a_promotion_compares_with_everybody_who_answers_before_it_takes_a_number():
    promotion = candidate(1, Purpose.PROMOTE)
    assert promotion.on_answer(member(2, LOG)) == [], "enough to lead, but member 0 may hold more"
    error = refusal(promotion.on_answer(member(0, ends(7, (0, 0), (256, 2)))))
    assert isinstance(error, NotAhead)
    assert not error.is_fenced


def test_a_promotion_that_is_overtaken_after_its_grant_says_that_nobody_leads():
    promotion = candidate(1, Purpose.PROMOTE)
    promotion.on_answer(member(2, LOG))
    promotion.on_deadline()
    error = refusal(stored(promotion, 2, ends(7, (0, 0), (256, 2))))
    assert isinstance(error, NotAhead)
    assert error.is_fenced
    assert "nobody leads" in str(error)


def bare(index):
    """A member that shows nothing: its disk is new, or it lost everything."""
    return MemberAnswer(index=index, grant=None, highest_epoch=-1)


def test_a_member_without_a_grant_counts_for_nothing_once_something_was_acknowledged():
    promotion = candidate(1, Purpose.PROMOTE)
    assert promotion.on_answer(bare(2)) == []
    assert isinstance(refusal(promotion.on_deadline()), TooFewMembers)
    opening = candidate()
    assert opening.on_answer(bare(2)) == []
    effects = opening.on_answer(member(1, LOG))
    assert isinstance(effects[-1], SendGrant)
    assert opening.on_answer(replace(bare(2), grant=opening.grant, is_unfilled=True)) == [], "its first grant"
    assert stored(opening, 1) == [Lead(opening.grant)]


def test_a_member_that_says_it_is_unfilled_counts_for_nothing():
    opening = candidate()
    unfilled = replace(member(2, ends(1, (0, 0))), is_unfilled=True)
    assert opening.on_answer(unfilled) == []
    opening.on_answer(member(1, LOG))
    assert opening.on_answer(replace(unfilled, grant=opening.grant)) == []
    assert opening.on_answer(replace(member(1, LOG, opening.grant), is_unfilled=False)) == [Lead(opening.grant)]


def test_who_fetched_nothing_by_its_own_grant_takes_no_answer_for_the_first_one():
    """1 led and had a record acknowledged with 2. Its disk was lost. 0 was promoted, both stored that, and it came no
    further than its first fetch: whoever answers shows a grant for 0, or none, and 2 shows the record.
    """
    own, third = member(0, ends(0), grant(512, members_epoch=0)), member(2, ends(4, (257, 0)), grant(512))
    for lost in (bare(1), replace(bare(1), grant=own.grant, is_unfilled=True)):
        opening = candidate(own=own)
        assert opening.on_answer(lost) == []
        assert isinstance(opening.on_answer(third)[-1], SendGrant)
        assert opening.on_answer(replace(lost, grant=opening.grant, is_unfilled=True)) == []
        (fetched,) = stored(opening, 2, ends(4, (257, 0)))
        assert fetched.until == EpochEnd(257, 4)


def test_records_of_a_grant_whose_list_was_settled_since_may_be_acknowledged():
    """It stored a newer list, which only names directories, and did not begin it; another one's disk was lost."""
    opening = candidate(own=member(0, ends(9, (256, 0)), grant(512, members_epoch=512)))
    assert opening.on_answer(bare(1)) == opening.on_answer(bare(2)) == []
    assert isinstance(refusal(opening.on_deadline()), TooFewMembers)


def test_a_list_that_is_changed_is_no_first_one():
    joint = grant(0).with_members(512, tuple(Member(index) for index in range(4)))
    own = replace(member(0, ends(0, (256, 0)), joint), directory_id=DISKS[0])
    opening = Candidate(0, Purpose.OPEN, own)
    opening.start()
    for index in (1, 2, 3):
        opening.on_answer(replace(bare(index), directory_id=DISKS[index]))
    assert opening.grant.previous_members
    assert not opening.grant.entering, "nobody has another directory"


def test_a_change_is_made_though_nothing_was_acknowledged():
    """Another member has the first grant already; a raised PID epoch has to reach it before a record does."""
    first = grant(0, members=2, m=1)
    own = member(0, ends(0), first, seen=0)
    opening = Candidate(0, Purpose.OPEN, own, change=lambda base, epoch: replace(base.renewed(epoch, 0), pid_epoch=1))
    opening.start()
    opening.on_answer(member(1, ends(0), first, seen=0))
    assert opening.grant.pid_epoch == 1


def test_what_an_operator_can_do_is_said_though_a_member_has_no_log_yet():
    two = grant(members=2, m=1)
    opening = Candidate(0, Purpose.OPEN, member(0, ends(1, (0, 0)), two, is_damaged=True, held_to=EpochEnd(256, 4)))
    opening.start()
    opening.on_answer(MemberAnswer(index=1, grant=two, highest_epoch=256))
    assert isinstance(refusal(opening.on_deadline()), LogNotFit)


@pytest.mark.parametrize("purpose", [Purpose.PROMOTE, Purpose.PROMOTE_AND_CATCH_UP])
def test_an_unfilled_member_leads_with_what_it_has_where_those_that_count_have_no_log_yet(purpose):
    """Of three in sync nothing was acknowledged, else each would have it."""
    alone = grant(min_insync_replicas=3)
    promotion = candidate(1, purpose, replace(member(1, ends(0), alone), is_unfilled=True), leader_alive_ms=0)
    answer = MemberAnswer(index=2, grant=alone, highest_epoch=256)
    effects = promotion.on_answer(answer) or promotion.on_deadline()
    assert isinstance(effects[-1], SendGrant), effects
    assert promotion.on_answer(replace(answer, grant=promotion.grant)) == [Lead(promotion.grant)]


def test_a_member_that_was_not_heard_before_counts_if_it_says_that_it_is_filled():
    opening = candidate()
    opening.on_answer(member(1, LOG))
    assert opening.on_answer(replace(member(2, LOG, opening.grant), is_unfilled=False)) == [Lead(opening.grant)]


def test_before_anything_was_acknowledged_whoever_stores_the_grant_counts():
    """The candidate's disk has the first grant from an attempt that reached no other member: it asks all of them."""
    opening = candidate(own=member(0, ends(0), grant(epoch=0), seen=0))
    assert opening.on_answer(bare(1)) == [], "the silent one may have led since"
    assert isinstance(opening.on_answer(bare(2))[-1], SendGrant)
    assert opening.grant.members_epoch == opening.grant.epoch == 256
    assert opening.on_answer(replace(bare(1), grant=opening.grant, is_unfilled=True)) == [Lead(opening.grant)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_leader_without_records_is_no_first_one_while_a_member_is_silent(index):
    """It made the first grant, or stored one for itself and came no further. The third may hold what another leader
    acknowledged with it and with one whose disk was lost since.
    """
    own = member(index, ends(0), grant(256 + index, members_epoch=256))
    opening = candidate(index, own=own)
    assert opening.on_answer(bare(2)) == []
    assert isinstance(refusal(opening.on_deadline()), TooFewMembers)
    opening = candidate(index, own=own)
    opening.on_answer(bare(2))
    effects = opening.on_answer(member(1 - index, LOG, grant(256 + 1 - index, members_epoch=256)))
    assert not opening.is_first, effects


def test_catch_up_fetches_what_the_one_ahead_has():
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, member(1, ends(9, (0, 0))))
    promotion.on_answer(member(2, LOG))
    assert stored(promotion, 2) == [Fetch(0, 2, 2, EpochEnd(256, 4))], "9 records of an older epoch are behind 4"
    assert promotion.on_fetched(0) == [Lead(promotion.grant)]


def test_catch_up_from_a_log_that_starts_above_begins_anew_with_its_epoch():
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, member(1, ends(2, (0, 0))))
    promotion.on_answer(member(2, LOG))
    (fetch,) = stored(promotion, 2, ends(8, (256, 6), start=6))
    assert fetch == Fetch(0, 2, 6, EpochEnd(256, 8), SetAside(6, 256))


def test_nobody_cuts_below_its_own_watermark_to_lead():
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, member(1, ends(9, (0, 0)), watermark=3))
    assert isinstance(refusal(promotion.on_answer(member(2, LOG))), LogNotFit)
    assert promotion.grant is None, "nobody was fenced"


@pytest.mark.parametrize("unfit", [{"is_damaged": True}, {"watermark": 5}], ids=["damaged", "below its checkpoint"])
def test_an_unfit_member_neither_leads_nor_counts(unfit):
    broken = Candidate(0, Purpose.OPEN, member(0, LOG, **unfit))
    assert isinstance(refusal(broken.start()), LogNotFit)
    opening = candidate()
    assert opening.on_answer(member(1, LOG, **unfit)) == []
    assert isinstance(refusal(opening.on_deadline()), TooFewMembers)


LOST = {"is_damaged": True, "held_to": EpochEnd(256, 4)}
"""An own log that held [1, 4) and does not any more."""


def test_o8_a_leader_that_lost_records_fetches_them_and_counts_for_nothing_before():
    opening = candidate(own=member(0, ends(1, (0, 0)), **LOST))
    assert opening.on_answer(member(1, LOG)) == [], "with itself it would be enough"
    opening.on_answer(member(2, ends(3, (0, 0), (256, 2))))
    assert opening.grant is not None
    assert stored(opening, 1) == [], "it does not count here either"
    assert stored(opening, 2, ends(3, (0, 0), (256, 2))) == [Fetch(0, 1, 1, EpochEnd(256, 4))]
    assert opening.on_fetched(0) == [Lead(opening.grant)]


@pytest.mark.parametrize("theirs", [ends(3, (0, 0), (256, 2)), ends(9, (0, 0)), None])
def test_o8_a_leader_that_lost_what_nobody_holds_is_refused_by_its_range_and_takes_no_number(theirs):
    opening = candidate(own=member(0, ends(1, (0, 0)), **LOST))
    for index in (1, 2) if theirs is not None else (1,):
        assert opening.on_answer(member(index, theirs or LOG)) == []
    error = refusal(opening.on_deadline())
    assert isinstance(error, LogNotFit)
    assert r"of [1, 4) it lost records" in str(error)
    assert opening.grant is None


def test_o8_what_such_a_leader_holds_more_of_in_another_partition_stays():
    own = member(0, ends(1, (0, 0)), **LOST)
    own.logs[1] = MemberLog(log=ends(9, (0, 0), (256, 2)), high_watermark=4)
    answers = [member(1, LOG), member(2, LOG)]
    for answer in answers:
        answer.logs[1] = MemberLog(log=LOG, high_watermark=4)
    opening = candidate(own=own)
    for answer in answers:
        opening.on_answer(answer)
    effects = [effect for answer in answers for effect in opening.on_answer(replace(answer, grant=opening.grant))]
    assert [effect.partition for effect in effects] == [0]


def test_o8_a_member_that_was_not_filled_yet_is_ahead_of_nobody():
    own = replace(member(0, ends(9, (0, 0), (256, 2))), is_unfilled=True)
    opening = candidate(own=own)
    answers = [member(1, LOG), member(2, LOG)]
    for answer in answers:
        opening.on_answer(answer)
    effects = [effect for answer in answers for effect in opening.on_answer(replace(answer, grant=opening.grant))]
    assert effects == [Fetch(0, 1, 4, EpochEnd(256, 4))]


def test_o8_a_member_that_lost_records_and_was_not_filled_is_ahead_of_nobody_in_any_partition():
    own = replace(member(0, ends(1, (0, 0)), **LOST), is_unfilled=True)
    own.logs[1] = MemberLog(log=ends(9, (0, 0), (256, 2)), high_watermark=0)
    answers = [member(1, LOG), member(2, LOG)]
    for answer in answers:
        answer.logs[1] = MemberLog(log=LOG, high_watermark=4)
    opening = candidate(own=own)
    for answer in answers:
        opening.on_answer(answer)
    effects = [effect for answer in answers for effect in opening.on_answer(replace(answer, grant=opening.grant))]
    assert effects == [Fetch(0, 1, 1, EpochEnd(256, 4)), Fetch(1, 1, 4, EpochEnd(256, 4))]


def test_a_newer_grant_of_another_ends_the_attempt():
    opening = candidate()
    opening.on_answer(member(1, LOG))
    assert isinstance(refusal(opening.on_answer(member(1, LOG, grant(epoch=513)))), NotLeader)


def test_what_was_not_granted_becomes_granted_by_the_next_own_grant():
    own = member(0, ends(6, (0, 0), (256, 2), (512, 4)), unfenced=Unfenced(4, EpochEnd(256, 4)), seen=512)
    opening = candidate(own=own)
    opening.on_answer(member(1, LOG))
    assert stored(opening, 1) == [Lead(opening.grant)]


def test_what_was_not_granted_is_set_aside_if_another_led_since():
    own = member(0, ends(6, (0, 0), (256, 2), (512, 4)), unfenced=Unfenced(4, EpochEnd(256, 4)), seen=512)
    promotion = candidate(purpose=Purpose.PROMOTE, own=own)
    promotion.on_answer(member(1, LOG, grant(epoch=513), seen=513))
    promotion.on_deadline()
    assert stored(promotion, 1) == [Fetch(0, 0, 4, EpochEnd(256, 4))]


def test_a_candidate_goes_by_the_newest_list_that_anybody_shows():
    joint = grant(epoch=512).with_members(512, tuple(Member(index) for index in range(4)))
    opening = candidate()
    effects = opening.on_answer(member(1, LOG, joint, seen=512))
    assert effects[0] == Look((3,))
    assert opening.grant.quorums == joint.quorums
    assert opening.grant.members_epoch == 512


def test_a_removed_member_leads_no_more():
    removed = grant(epoch=257, members=3).with_members(513, (Member(1), Member(2)))
    error = refusal(candidate(0, Purpose.PROMOTE).on_answer(member(1, LOG, removed, seen=513)))
    assert isinstance(error, CantLead)
    assert "member 0 was removed by epoch 513" in str(error)


def test_the_first_grant_of_an_outbox():
    own = MemberAnswer(index=0, grant=None, highest_epoch=-1, logs={0: MemberLog(log=ends(0), high_watermark=0)})
    opening = Candidate(0, Purpose.OPEN, own, first=grant(epoch=0))
    opening.start()
    opening.on_answer(MemberAnswer(index=1, grant=None, highest_epoch=-1))
    assert (opening.grant.epoch, opening.grant.members_epoch) == (0, 0)
    assert opening.on_answer(MemberAnswer(index=1, grant=opening.grant, highest_epoch=0)) == [Lead(opening.grant)]


def test_a_leader_that_lost_its_disk_is_no_first_one_and_counts_once_it_was_filled():
    """Another one, which never had a record, remembers its grant; what was acknowledged lies with the third."""
    own = MemberAnswer(index=0, grant=None, highest_epoch=-1, logs={0: MemberLog(log=ends(0), high_watermark=0)})
    opening = Candidate(0, Purpose.OPEN, own, first=grant(epoch=0))
    opening.start()
    assert opening.on_answer(member(1, ends(0), grant())) == []
    assert isinstance(opening.on_answer(member(2, LOG, grant()))[-1], SendGrant)
    assert stored(opening, 1, ends(0)) == [], "itself it does not count"
    (fetched,) = stored(opening, 2)
    assert (fetched.member, fetched.until) == (2, EpochEnd(256, 4))


# ---- whose directory it is

DISKS = tuple(UUID(int=100 + index) for index in range(5))


def named(*directories, **changes):
    made = grant(**changes)
    return replace(made, members=tuple(map(replace_directory, made.members, directories or DISKS)))


def replace_directory(one, directory_id):
    return replace(one, directory_id=directory_id)


def test_the_first_grant_names_the_directories_that_all_showed():
    log = {0: MemberLog(log=ends(0), high_watermark=0)}
    own = MemberAnswer(index=0, grant=None, highest_epoch=-1, logs=log, directory_id=DISKS[0])
    opening = Candidate(0, Purpose.OPEN, own, first=grant(epoch=0))
    opening.start()
    assert opening.on_answer(replace(bare(1), directory_id=DISKS[1])) == [], "another one can be named, too"
    opening.on_answer(replace(bare(2), directory_id=DISKS[2]))
    assert [one.directory_id for one in opening.grant.members] == list(DISKS[:3])
    waits = Candidate(0, Purpose.OPEN, own, first=grant(epoch=0))
    waits.start()
    waits.on_answer(replace(bare(1), directory_id=DISKS[1]))
    waits.on_deadline()
    assert waits.grant.nameless == {0, 1, 2}, "not everybody could say whether it keeps such a grant"


def test_a_member_whose_directory_the_first_grant_names_counts_though_that_did_not_reach_it():
    """It has lost nothing since. Another directory in its place may have."""
    own = replace(member(0, ends(0), named()), directory_id=DISKS[0])
    assert candidate(own=own).on_answer(replace(bare(1), directory_id=DISKS[4])) == []
    opening = candidate(own=own)
    assert isinstance(opening.on_answer(replace(bare(1), directory_id=DISKS[1]))[-1], SendGrant)
    assert not opening.is_first, "the silent one may have led, and another one may have lost its disk"
    answer = replace(member(1, ends(0), opening.grant), directory_id=DISKS[1])
    assert opening.on_answer(answer) == [Lead(opening.grant)]
    log = replace(member(1, ends(1), own.grant), grant=None, directory_id=DISKS[1])
    assert candidate(own=own).on_answer(log) == [], "it has a record and no grant: it lost its promises"
    forced = replace(own, grant=replace(own.grant, generation=FIRST), generation=FIRST)
    assert candidate(own=forced).on_answer(replace(bare(1), directory_id=DISKS[1])) == [], "it would be unfilled there"


def test_a_later_grant_carries_the_directories_on_and_never_takes_them_from_a_look():
    opening = candidate(own=replace(member(0, LOG, named()), directory_id=DISKS[0]))
    other = replace(member(1, LOG, named()), directory_id=DISKS[4], is_unfilled=False)
    assert opening.on_answer(other) == [], "it shows another directory: its disk is new, or a copy"
    opening.on_answer(replace(member(2, LOG, named()), directory_id=DISKS[2]))
    assert opening.grant.members == named().members
    assert opening.on_answer(replace(other, grant=opening.grant)) == []
    assert opening.on_answer(replace(member(2, LOG, opening.grant), directory_id=DISKS[2])) == [Lead(opening.grant)]


def test_a_member_without_a_name_counts_by_its_index():
    kept = named(DISKS[0], None, DISKS[2])
    opening = candidate(own=replace(member(0, LOG, kept), directory_id=DISKS[0]))
    assert isinstance(opening.on_answer(replace(member(1, LOG, kept), directory_id=DISKS[4]))[-1], SendGrant)
    assert opening.grant.nameless == {1}


def test_another_directory_does_not_lead():
    promotion = Candidate(1, Purpose.PROMOTE, replace(member(1, LOG, named()), directory_id=DISKS[4]))
    error = refusal(promotion.start())
    assert isinstance(error, CantLead)
    assert "not the directory that counts as member 1" in str(error)


def test_one_directory_under_two_names_is_refused():
    opening = candidate(own=replace(member(0, LOG), directory_id=DISKS[0]))
    error = refusal(opening.on_answer(replace(member(2, LOG), directory_id=DISKS[0])))
    assert isinstance(error, CantLead)
    assert "MEMBER_TWICE: the addresses of members 0 and 2 lead" in str(error)


def test_a_replica_with_another_directory_is_pushed_to_and_acknowledges_nothing():
    leader = leading(end=4)
    session, sequence, _ = pushed(leader, ends(4, (0, 0)))
    leader.on_directory(1, is_members=False)
    assert leader.on_answer(1, session, sequence, answer(end=4, grant_epoch=256)) == []
    assert (leader.in_sync, leader.caught_up) == ({0}, {0, 1})
    assert leader.on_directory(1, is_members=True) == [Joined(1), HighWatermarkMoved(4), Push(1)]
    assert leader.on_directory(1, is_members=False) == [Left(1, too_slow=False)]


@pytest.mark.parametrize(("n", "m", "others"), [(2, 2, 1), (3, 2, 2), (3, 3, 2), (3, 1, 2), (5, 3, 3), (5, 4, 4)])
def test_a_directory_comes_in_once_enough_others_stored_its_name(n, m, others):
    """Contract M2: by itself and by min(N - 1, max(m, N - m)) others."""
    joint = named(members=n, m=m).with_directory(512, 1, UUID(int=7))
    assert (joint.entering, joint.members_epoch, joint.directory_of(1)) == ({1}, 512 + EPOCH_LEAP, UUID(int=7))
    everybody = frozenset(range(n))
    stored = frozenset(sorted(everybody - {1})[:others])
    assert joint.may_settle(stored | {1}, everybody)
    assert not joint.may_settle(stored, everybody), "not by itself"
    assert not joint.may_settle(stored | {1}, everybody - {1}), "it was not filled"
    assert not joint.may_settle(frozenset(sorted(stored)[1:]) | {1}, everybody)
    assert joint.settled(768).entering == frozenset()


def test_an_entering_directory_joins_no_in_sync_set():
    joint = named().with_directory(512, 1, UUID(int=7))
    epoch = joint.epoch
    log = ends(4, (0, 0), (epoch, 4))
    leader = PartitionLeader(joint, log, flushed_offset=4, high_watermark=0, flushed_only=False, now_ms=0)
    leader.on_directory(1, is_members=True)
    session = SessionId(epoch, 1, 1)
    leader.start_session(1, session, ends(4, (0, 0)))
    sent, _ = leader.request(1, 4, 4, TP)
    leader.on_answer(1, session, sent.sequence, answer(end=4, grant_epoch=epoch))
    assert leader.in_sync == {0}
    assert not leader.may_settle, "one other is not enough of three"
    leader.stored.add(2)
    assert leader.may_settle


def test_one_directory_is_not_two_members():
    with pytest.raises(BadGrant, match="2 directories"):
        named(DISKS[0], DISKS[1], DISKS[1])


def of_generation(index, generation, log=LOG, epoch=256, **changes):
    kept = replace(grant(epoch=epoch), generation=generation)
    return replace(member(index, log, kept), generation=generation, **changes)


AHEAD = ends(9, (0, 0), (512, 2))


def test_a_member_of_an_older_generation_counts_for_nothing_and_is_compared_with_nobody():
    promotion = candidate(1, Purpose.PROMOTE, of_generation(1, FIRST), leader_alive_ms=0)
    assert promotion.on_answer(of_generation(0, 0, AHEAD, epoch=512)) == []
    effects = promotion.on_answer(of_generation(2, FIRST))
    assert [type(effect) for effect in effects] == [StoreEpoch, StoreGrant, SendGrant]
    assert promotion.grant.generation == FIRST
    late = promotion.on_answer(of_generation(0, 0, AHEAD, epoch=promotion.grant.epoch + 256))
    assert late == [], "it deposes nobody"
    assert stored(promotion, 2) == [Lead(promotion.grant)]


def test_who_keeps_a_grant_of_another_generation_is_not_enough_to_lead_on():
    own, another = of_generation(1, FIRST), of_generation(2, FIRST)
    without, older = replace(another, grant=None), of_generation(2, 0)
    empty = [replace(of_generation(index, FIRST, ends(0)), grant=None) for index in (0, 2)]

    def too_few(own, *others):
        found = {one.index: one for one in others}
        return Candidate(1, Purpose.OPEN, own, first=another.grant).too_few_with(found)

    assert too_few(own, another) is None
    assert too_few(own, without).needed == 2, "its disk may have been lost, and the silent one may have led"
    assert too_few(own, of_generation(0, 0), without).needed == 2, "there are records"
    assert too_few(replace(own, grant=None), without) is None, "nobody has one"
    assert too_few(replace(own, logs=empty[0].logs), *empty) is None, "all answer, and no log has a record"
    assert (too_few(own, older).answered, too_few(own).needed) == (1, 2)


@pytest.mark.parametrize("purpose", Purpose)
def test_a_directory_of_an_older_generation_does_not_lead(purpose):
    attempt = candidate(1, purpose, of_generation(1, 0, AHEAD, epoch=513), leader_alive_ms=0)
    error = refusal(attempt.on_answer(of_generation(0, FIRST, epoch=256)))
    assert (type(error), error.leader) == (NotLeader, 0)
    assert f"is of generation 0, member 0 leads in {label(FIRST)} since a loss was accepted" in str(error)


@pytest.mark.parametrize("purpose", Purpose)
def test_of_two_that_were_forced_beside_each_other_neither_leads(purpose):
    attempt = candidate(1, purpose, of_generation(1, FIRST, epoch=257), leader_alive_ms=0)
    error = refusal(attempt.on_answer(of_generation(2, FIRST + 1, epoch=258)))
    assert isinstance(error, RivalGenerations)
    assert error.leader == 2
    assert f"here in generation {label(FIRST)}, by member 2, epoch 258, in {label(FIRST + 1)}" in str(error)


def test_a_forced_grant_that_is_shown_while_grants_are_stored_refuses_the_candidate():
    for shown, expected in ((SECOND, NotLeader), (FIRST + 1, RivalGenerations)):
        opening = candidate(0, Purpose.OPEN, of_generation(0, FIRST))
        opening.on_answer(of_generation(1, FIRST))
        assert type(refusal(opening.on_answer(of_generation(2, shown, epoch=258)))) is expected


def test_a_candidate_that_was_not_filled_counts_for_nothing_itself():
    """Its former records and promises may be held only by members that have not answered yet."""
    own = replace(member(1, LOG), is_unfilled=True)
    promotion = candidate(1, Purpose.PROMOTE_AND_CATCH_UP, own, leader_alive_ms=0)
    promotion.on_answer(member(0, LOG))
    promotion.on_answer(member(2, LOG))
    assert promotion.state is CandidateState.GRANTING
    assert stored(promotion, 2) == []
    assert stored(promotion, 0) == [Lead(promotion.grant)]


@pytest.mark.parametrize(
    ("answer", "is_lost"),
    [
        (MemberAnswer(index=2, grant=grant(), highest_epoch=256), False),
        (MemberAnswer(index=2, grant=grant(), highest_epoch=256, is_unfilled=True), True),
        (MemberAnswer(index=2, grant=None, highest_epoch=0), True),
        (MemberAnswer(index=2, grant=None, highest_epoch=0, is_unfilled=True), True),
    ],
)
def test_a_member_is_lost_whose_directory_is_not_the_one_that_it_was(tmp_path, answer, is_lost):
    """What answers at its address has no grant, or holds less than was acknowledged to it."""
    change = ListChange(frozenset({2}))
    found = {1: MemberAnswer(index=1, grant=grant(), highest_epoch=256), 2: answer}
    if is_lost:
        change.check_looked(tmp_path, grant(), 0, found)
    else:
        with pytest.raises(CommandRefused, match="member 2 answers: it is not lost"):
            change.check_looked(tmp_path, grant(), 0, found)
