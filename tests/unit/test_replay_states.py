"""The table of a replay session, every state and event of it, as the session lives it; its time, credit and bounds."""

import itertools

import pytest

from pushrep.log.published import LogOffsets
from pushrep.replay import events as e
from pushrep.replay.events import NEXT, ReplayState
from pushrep.replay.plan import ReplayPlan, ReplaySettings, Span
from pushrep.replay.session import FetchCredit, ReplaySession
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason

SETTINGS = ReplaySettings(connect_timeout_ms=5_000, liveness_timeout_ms=10_000, heartbeat_ms=1_000, block_bytes=1_000)


def stable(end):
    return LogOffsets(0, end, end, end)


STABLE_100 = stable(100)
SPAN = Span(0, 10, 400, 10)

# The contract, said a second time and without the code's own table. "!" can't happen; else the states it may lead to.
MAY = {
    state: dict(zip(e.EVENTS, row.split(), strict=True))
    for state, row in {
        #            opened fail att  cred turn block rfail sent stop gone del  trunc lease ended
        "INIT":     "IRD    D    IR   I    IDN  !     !     !    DN   D    DN   IDN   DN    !",
        "REPLAY":   "!      !    !    R    RN   R     N     R    N    D    N    RN    N     !",
        "INACTIVE": "N      N    N    N    ND   N     N     N    N    D    N    N     N     D",
        "DONE":     "D      D    D    D    D    D     D     D    D    D    D    D     D     D",
    }.items()
}  # fmt: skip
LETTER = {ReplayState.INIT: "I", ReplayState.REPLAY: "R", ReplayState.INACTIVE: "N", ReplayState.DONE: "D"}
EVENTS = {
    e.SegmentOpened: [e.SegmentOpened(), e.SegmentOpened(leader_epoch=3, epoch_by_log=2)],
    e.OpenFailed: [e.OpenFailed(ErrorCode.CORRUPT_MESSAGE, "damaged")],
    e.SubscriberAttached: [e.SubscriberAttached(10_000)],
    e.Credited: [e.Credited(10)],
    e.Turn: [e.Turn(STABLE_100), e.Turn(LogOffsets(0, 1, 1, 1))],
    e.BlockRead: [e.BlockRead((SPAN,)), e.BlockRead(())],
    e.ReadFailed: [e.ReadFailed(ErrorCode.CORRUPT_MESSAGE, "damaged", 0)],
    e.BlockSent: [e.BlockSent()],
    e.Stop: [e.Stop()],
    e.SubscriberGone: [e.SubscriberGone()],
    e.Deleted: [e.Deleted()],
    e.Truncated: [e.Truncated(2), e.Truncated(50)],
    e.LeaseLost: [e.LeaseLost("the disk is full")],
    e.EndSent: [e.EndSent()],
}


class Driver:
    """A session and its clock; what it wanted done so far."""

    def __init__(self, *, settings=SETTINGS, **plan):
        self.now = 0
        self.session = ReplaySession(1, ReplayPlan(**{"recording": 7, "position": 0} | plan), settings, 0)
        self.effects = []

    def __call__(self, *events, at=None):
        self.now = self.now if at is None else at
        got = [effect for event in events for effect in self.session.handle(event, self.now)]
        self.effects += got
        return got

    def started(self, credit=10_000):
        self(e.SegmentOpened(), e.SubscriberAttached(credit))
        return self

    @property
    def state(self):
        return self.session.state

    def ends(self):
        return [effect for effect in self.effects if isinstance(effect, e.SendEnd)]


def only(effects, kind):
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def drivers_in(state):
    """Sessions in that state, by every short way that leads there."""
    if state is ReplayState.INIT:
        yield Driver(position=5)
        for event in (e.SegmentOpened(), e.SubscriberAttached(10_000)):
            driver = Driver(position=5)
            driver(event)
            yield driver
    elif state is ReplayState.REPLAY:
        yield Driver().started()
        reading = Driver().started()
        reading(e.Turn(STABLE_100))
        yield reading
        sending = Driver().started()
        sending(e.Turn(STABLE_100), e.BlockRead((SPAN,)))
        yield sending
        between = Driver().started()
        between(e.Turn(STABLE_100), e.BlockRead((SPAN,)), e.BlockSent())
        yield between
    elif state is ReplayState.INACTIVE:
        for driver in drivers_in(ReplayState.REPLAY):
            driver(e.Stop())
            yield driver
    else:
        for driver in drivers_in(ReplayState.INACTIVE):
            driver(e.EndSent())
            yield driver
        unattached = Driver()
        unattached(e.Stop())
        yield unattached


def test_every_state_can_be_reached():
    for state in ReplayState:
        assert {driver.state for driver in drivers_in(state)} == {state}


@pytest.mark.parametrize(
    ("state", "kind"),
    list(itertools.product(ReplayState, e.EVENTS)),
    ids=lambda item: getattr(item, "name", None) or item.__name__,
)
def test_an_event_leads_where_the_table_says_and_nowhere_else(state, kind):
    may = MAY[state.name][kind]
    seen = set()
    ways = sum(1 for _ in drivers_in(state))
    for way, event, late in itertools.product(range(ways), EVENTS[kind], (0, 60_000)):
        driver = next(itertools.islice(drivers_in(state), way, None))
        ends_before = len(driver.ends())
        try:
            driver(event, at=driver.now + late)
        except AssertionError as error:
            if "can't meet" not in str(error):
                raise
            # A block that was not asked for is as impossible as the wrong state.
            assert may == "!" or kind in {e.BlockRead, e.BlockSent}
            continue
        seen.add(LETTER[driver.state])
        told = len(driver.ends()) - ends_before
        assert told == (1 if driver.state is ReplayState.INACTIVE and state is not driver.state else 0)
        assert (driver.state is ReplayState.DONE) == (e.Forget() in driver.effects), "the slot goes with DONE, only"
    assert seen == set(may.replace("!", "")), f"{state.name} x {kind.__name__}"


def test_the_codes_table_is_this_one():
    for state, kind in itertools.product(ReplayState, e.EVENTS):
        cell = NEXT[state][kind]
        wanted = MAY[state.name][kind]
        if cell is None:
            assert wanted == "!"
        else:
            assert {LETTER[s] for s in cell} - {LETTER[state]} == set(wanted) - {LETTER[state]}, (state, kind)


@pytest.mark.parametrize("event", [one for kinds in EVENTS.values() for one in kinds], ids=repr)
def test_an_end_is_told_once_and_its_slot_comes_back_whatever_follows(event):
    driver = Driver().started()
    driver(e.Turn(STABLE_100), e.Stop())
    for follows in itertools.islice(itertools.cycle([event, e.Turn(STABLE_100)]), 8):
        driver(follows)
    driver(e.EndSent())
    assert len(driver.ends()) == 1
    assert driver.effects.count(e.Forget()) == 1
    assert driver.effects.count(e.ReleaseLease()) >= 1


# ---- time


def test_who_does_not_attach_in_time_loses_the_slot():
    driver = Driver()
    assert driver(e.SegmentOpened()) == [e.Started(0)]
    assert driver(e.Turn(STABLE_100), at=4_999) == []
    assert driver(e.Turn(STABLE_100), at=5_000) == [e.ReleaseLease(), e.Forget()]


def test_a_block_that_does_not_leave_is_an_error_not_a_silent_stall():
    driver = Driver().started()
    driver(e.Turn(STABLE_100), at=100)
    driver(e.BlockRead((SPAN,)), at=200)
    assert driver(e.Turn(STABLE_100), at=10_199) == []
    end = only(driver(e.Turn(STABLE_100), at=10_200), e.SendEnd)
    assert (end.reason, end.code, end.offset) == (ReplayEndReason.ERROR, ErrorCode.STALLED, 10)


def test_a_read_that_does_not_answer_is_an_error_too():
    driver = Driver().started()
    driver(e.Turn(STABLE_100))
    assert only(driver(e.Turn(STABLE_100), at=10_000), e.SendEnd).code is ErrorCode.STALLED


def test_an_end_that_nobody_takes_gives_the_slot_back():
    driver = Driver().started()
    driver(e.Stop(), at=100)
    assert driver(e.Turn(STABLE_100), at=10_099) == []
    assert driver(e.Turn(STABLE_100), at=10_100) == [e.Forget()]


def test_heartbeats_go_out_at_the_tip_and_hold_the_lease():
    driver = Driver(position=100).started()
    assert driver(e.Turn(STABLE_100), at=999) == []
    assert driver(e.Turn(STABLE_100), at=1_000) == [e.RenewLease(100), e.Heartbeat(100, 100)]
    assert driver(e.Turn(STABLE_100), at=1_500) == []
    assert driver(e.Turn(STABLE_100), at=600_000) == [e.RenewLease(100), e.Heartbeat(100, 100)], "a wait is no stall"


# ---- credit and rate


def test_without_credit_nothing_is_read_and_no_lease_is_renewed():
    driver = Driver().started(credit=0)
    assert driver(e.Turn(STABLE_100), at=5) == []
    assert driver(e.Turn(STABLE_100), at=50_000) == [e.Heartbeat(0, 100)], "a paused subscriber holds no disk"
    driver(e.Credited(1), at=50_001)
    assert only(driver(e.Turn(STABLE_100), at=50_002), e.ReadBlock) == e.ReadBlock(0, 100, 1)


@pytest.mark.parametrize(
    ("spent", "given", "begins"), [(0, 1, True), (0, 0, False), (5, 5, False), (5, 6, True), (-1, 5, False)]
)
def test_a_subscriber_that_accepted_nothing_is_told_from_one_that_accepts_more(spent, given, begins):
    credit = FetchCredit(None, now_ms=0)
    credit.spend(spent, now_ms=0)
    assert (credit.give(given), credit.left_bytes) == (begins, given - spent)


def test_credit_is_overdrawn_by_one_batch_at_most():
    driver = Driver().started(credit=500)
    spans = tuple(Span(base, base + 10, 400, 10) for base in range(0, 50, 10))
    driver(e.Turn(STABLE_100))
    assert only(driver(e.BlockRead(spans)), e.SendBlock) == e.SendBlock(0, 10, 1, 400, 100)
    driver(e.BlockSent(), e.Turn(STABLE_100))
    assert only(driver(e.BlockRead(spans[1:])), e.SendBlock).spans == 1, "100 bytes of credit take one batch of 400"
    driver(e.BlockSent())
    assert driver(e.Turn(STABLE_100)) == [], "300 bytes overdrawn"
    driver(e.Credited(300))
    assert driver(e.Turn(STABLE_100)) == []
    driver(e.Credited(1))
    assert driver(e.Turn(STABLE_100)) != []


def test_a_block_is_what_one_turn_may_take():
    driver = Driver().started(credit=1 << 40)
    driver(e.Turn(STABLE_100))
    spans = tuple(Span(base, base + 10, 400, 10) for base in range(0, 100, 10))
    assert only(driver(e.BlockRead(spans)), e.SendBlock) == e.SendBlock(0, 20, 2, 800, 100)
    assert driver(e.Turn(STABLE_100)) == [], "one block is under way at a time"


def test_the_rate_is_kept_and_is_no_stall():
    driver = Driver(max_bytes_per_s=1_000).started(credit=1 << 40)
    sent = []
    for now in range(0, 60_000, 50):
        for effect in driver(e.Turn(STABLE_100), at=now):
            if isinstance(effect, e.ReadBlock) and effect.position < 100:
                base = effect.position
                driver(e.BlockRead((Span(base, base + 1, 400, 1),)), e.BlockSent())
                sent.append(now)
    assert driver.ends() == []
    assert len(sent) == 100
    assert all(later - earlier == 400 for earlier, later in itertools.pairwise(sent))


# ---- ends


def test_a_cut_below_what_was_reached_ends_it_with_offset_and_epoch():
    driver = Driver().started()
    driver(e.Turn(STABLE_100), e.BlockRead((SPAN,)), e.BlockSent())
    assert driver(e.Truncated(10, 4)) == [], "nothing above the cut was given"
    end = only(driver(e.Truncated(9, 5)), e.SendEnd)
    assert (end.reason, end.code, end.cut_offset, end.leader_epoch) == (
        ReplayEndReason.TRUNCATED, ErrorCode.TRUNCATED, 9, 5,
    )  # fmt: skip


def test_a_cut_lowers_the_end_that_was_recorded_when_the_request_came():
    driver = Driver(end=100).started()
    driver(e.Truncated(10, 4))
    driver(e.Turn(STABLE_100), e.BlockRead((SPAN,)), e.BlockSent())
    assert only(driver(e.Turn(STABLE_100)), e.SendEnd).reason is ReplayEndReason.LIMIT_REACHED


def test_a_resumed_session_is_refused_if_the_record_before_is_of_another_epoch():
    driver = Driver(position=50, epoch_before=3)
    refusal = only(driver(e.SegmentOpened(leader_epoch=5, epoch_before=4)), e.Refuse)
    assert refusal.code is ErrorCode.TRUNCATED
    assert driver.state is ReplayState.DONE
    driver = Driver(position=50, epoch_before=4)
    assert driver(e.SegmentOpened(leader_epoch=5, epoch_before=4)) == [e.Started(50)]


def test_a_counted_replay_waits_at_a_live_tip_and_ends_at_a_stop():
    driver = Driver(position=100, records=5).started()
    assert driver.session.wants_liveness
    assert driver(e.Turn(STABLE_100)) == []
    assert only(driver(e.Turn(STABLE_100, is_live=False)), e.SendEnd).reason is ReplayEndReason.LIMIT_REACHED


def test_following_survives_a_stop_of_the_writer():
    driver = Driver(position=100).started()
    assert driver(e.Turn(STABLE_100, is_live=False)) == []
    more = LogOffsets(0, 120, 120, 120)
    assert only(driver(e.Turn(more)), e.ReadBlock).position == 100


def test_nothing_asked_for_ends_at_once_and_normally():
    driver = Driver(records=0).started()
    end = only(driver(e.Turn(STABLE_100)), e.SendEnd)
    assert (end.reason, end.code) == (ReplayEndReason.LIMIT_REACHED, ErrorCode.NONE)


# ---- bounds


@pytest.mark.parametrize(
    ("bound", "limit"), [("stable", 60), ("high_watermark", 60), ("flushed", 80), ("written", 100)]
)
def test_a_bound_of_the_log_is_the_limit_of_every_read(bound, limit):
    driver = Driver(bound=bound).started()
    facts = LogOffsets(0, 100, 80, 60)
    assert only(driver(e.Turn(facts)), e.ReadBlock).limit == limit


def test_a_batch_that_crosses_the_bound_waits_until_it_has_passed():
    driver = Driver(bound="applied").started()
    driver(e.Turn(STABLE_100, counter=5), e.BlockRead((SPAN,)))
    assert driver.session.position == 0
    assert driver(e.Turn(STABLE_100, counter=9)) == [], "it is not read again before the counter has passed it"
    driver(e.Turn(STABLE_100, counter=10))
    assert only(driver(e.BlockRead((SPAN,))), e.SendBlock).end == 10


def test_a_stall_is_counted_from_when_there_was_something_to_send():
    """A replay that follows a quiet topic has sent nothing for an hour, and is not stalled at any moment of it."""
    hour_ms = 3_600_000
    driver = Driver(position=100).started(credit=0)
    driver(e.Turn(STABLE_100), at=1_000)
    driver(e.Turn(stable(101)), at=hour_ms)
    assert (driver.session.lag, driver.session.stalled_ms(hour_ms)) == (1, 0)
    driver(e.Turn(stable(102)), at=hour_ms + 400)
    assert driver.session.stalled_ms(hour_ms + 500) == 500, "another record makes it no younger"
    driver(e.Credited(10), at=hour_ms + 600)
    assert driver.session.stalled_ms(hour_ms + 700) == 100, "it could send nothing before"


def test_a_session_that_waits_for_its_bound_is_not_stalled():
    driver = Driver(position=90).started()
    driver(e.Turn(STABLE_100), e.BlockRead((Span(90, 110, 400, 20),)))
    assert driver.session.lag == 10
    assert driver.session.stalled_ms(50_000) == 0
    driver(e.Turn(stable(110)), at=60_000)
    assert driver.session.stalled_ms(60_100) == 100


def test_a_counter_that_closed_freezes_and_its_session_ends_there():
    driver = Driver(bound="applied").started()
    driver(e.Turn(STABLE_100, counter=15), e.BlockRead((SPAN, Span(10, 20, 400, 10))), e.BlockSent())
    assert driver.session.position == 10
    assert driver(e.Turn(STABLE_100, counter=15)) == []
    end = only(driver(e.Turn(STABLE_100, counter=None)), e.SendEnd)
    assert (end.reason, end.offset) == (ReplayEndReason.LIMIT_REACHED, 10)


def test_what_a_counter_had_passed_before_it_closed_is_still_sent():
    driver = Driver(bound="applied").started()
    driver(e.Turn(STABLE_100, counter=20), e.BlockRead((SPAN,)), e.BlockSent())
    assert only(driver(e.Turn(STABLE_100, counter=None)), e.ReadBlock).limit == 20
    driver(e.BlockRead((Span(10, 20, 400, 10),)), e.BlockSent())
    assert only(driver(e.Turn(STABLE_100, counter=None)), e.SendEnd).offset == 20


def test_a_counter_lets_nothing_out_above_the_stable_offset():
    driver = Driver(bound="applied").started()
    facts = LogOffsets(0, 100, 80, 60)
    assert only(driver(e.Turn(facts, counter=1_000)), e.ReadBlock).limit == 60


def test_heartbeats_of_many_sessions_fall_together_and_are_late_by_a_twentieth_at_most():
    dues = set()
    for begun in range(1_001, 1_050):
        one = Driver(position=100)
        one(e.SegmentOpened(), e.SubscriberAttached(1), at=begun)
        due = one.session.next_turn_ms
        assert 0 <= due - begun - SETTINGS.heartbeat_ms < SETTINGS.heartbeat_ms // 20
        dues.add(due)
    assert len(dues) == 1


def test_to_end_of_a_log_that_was_cut_ends_there_although_it_has_grown_again():
    driver = Driver(end=100).started()
    driver(e.Turn(STABLE_100), e.BlockRead((SPAN,)), e.BlockSent())
    assert only(driver(e.Turn(stable(50))), e.ReadBlock).limit == 50
    driver(e.BlockRead(()))
    assert only(driver(e.Turn(stable(200))), e.ReadBlock).limit == 50


def test_a_block_that_is_under_way_is_looked_after_when_it_counts_as_stalled():
    driver = Driver().started()
    driver(e.Turn(STABLE_100), at=3_000)
    assert driver.session.next_turn_ms == 13_000, "it is read"
    driver(e.BlockRead((SPAN,)), at=5_000)
    assert driver.session.next_turn_ms == 15_000, "it is sent"
    driver(e.Turn(STABLE_100), at=15_000)
    assert [end.code for end in driver.ends()] == [ErrorCode.STALLED]
