"""The refusals of a replay request, one by one and in their order; slots and ids of many sessions."""

import random
from typing import NamedTuple

import pytest

from pushrep.errors import BadArgument
from pushrep.log.published import LogOffsets
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.plan import (
    FOLLOW,
    TO_END,
    AtTime,
    Node,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
    Span,
    plan_replay,
)
from pushrep.replay.session import ReplaySessions
from pushrep.wire.error_codes import ErrorCode


class Stopped(NamedTuple):
    """The ends of a log that no writer has open."""

    ends: LogOffsets


LIVE = LogOffsets(10, 100, 80, 60)
STOPPED = Stopped(LogOffsets(10, 60, 60, 60))
EMPTY = LogOffsets(10, 10, 10, 10)
EMPTY_STOPPED = Stopped(EMPTY)
TIMES = {5: 12, 7: 59, 8: 200}


def plan(facts, *, node=None, **request):
    if isinstance(facts, Stopped):
        facts, node = facts.ends, (node or Node())._replace(is_live=False)
    return plan_replay(ReplayRequest(recording=3, **request), facts, TIMES.get, node or Node())


OK = "OK"
TABLE = {
    "no such recording": (None, {}, ErrorCode.UNKNOWN_RECORDING),
    "from the start": (LIVE, {}, OK),
    "at the log start": (LIVE, {"position": 10}, OK),
    "below the log start": (LIVE, {"position": 9}, ErrorCode.INVALID_POSITION),
    "at the tip, following": (LIVE, {"position": 60}, OK),
    "at the tip, counted": (LIVE, {"position": 60, "length": 3}, OK),
    "at the tip, to the end": (LIVE, {"position": 60, "length": TO_END}, ErrorCode.EMPTY_RECORDING),
    "above the tip": (LIVE, {"position": 61}, ErrorCode.INVALID_POSITION),
    "above what is stable, but written": (LIVE, {"position": 99, "bound": "written"}, OK),
    "above what is written": (LIVE, {"position": 101, "bound": "written"}, ErrorCode.INVALID_POSITION),
    "above the flushed offset": (LIVE, {"position": 81, "bound": "flushed"}, ErrorCode.INVALID_POSITION),
    "end of a stopped one, following": (STOPPED, {"position": 60}, OK),
    "end of a stopped one, counted": (STOPPED, {"position": 60, "length": 1}, ErrorCode.INVALID_POSITION),
    "end of a stopped one, to the end": (STOPPED, {"position": 60, "length": TO_END}, ErrorCode.INVALID_POSITION),
    "a stopped one, counted": (STOPPED, {"position": 59, "length": 1}, OK),
    "empty, following": (EMPTY, {}, OK),
    "empty, counted": (EMPTY, {"length": 1}, OK),
    "empty, to the end": (EMPTY, {"length": TO_END}, ErrorCode.EMPTY_RECORDING),
    "empty and stopped, to the end": (EMPTY_STOPPED, {"length": TO_END}, ErrorCode.EMPTY_RECORDING),
    "empty and stopped, following": (EMPTY_STOPPED, {}, OK),
    "empty and stopped, counted": (EMPTY_STOPPED, {"length": 1}, ErrorCode.INVALID_POSITION),
    "nothing of an empty one": (EMPTY, {"length": 0}, OK),
    "nothing at the end of a stopped one": (STOPPED, {"position": 60, "length": 0}, OK),
    "nothing outside of the range": (STOPPED, {"position": 61, "length": 0}, ErrorCode.INVALID_POSITION),
    "unknown bound": (LIVE, {"bound": "stabel"}, ErrorCode.INVALID_REQUEST),
    "unknown counter": (LIVE, {"bound": "applied"}, ErrorCode.INVALID_REQUEST),
    "rate of zero": (LIVE, {"max_bytes_per_s": 0}, ErrorCode.INVALID_REQUEST),
    "a rate below zero": (LIVE, {"max_bytes_per_s": -1}, ErrorCode.INVALID_REQUEST),
    "a rate that no message can say": (LIVE, {"max_bytes_per_s": 1 << 63}, ErrorCode.INVALID_REQUEST),
}


@pytest.mark.parametrize("name", TABLE)
def test_refusals(name):
    facts, request, wanted = TABLE[name]
    if wanted == OK:
        assert plan(facts, **request).position == request.get("position", 10)
        return
    with pytest.raises(ReplayRefused) as refusal:
        plan(facts, **request)
    assert refusal.value.code is wanted
    if wanted is ErrorCode.INVALID_POSITION:
        assert refusal.value.start == 10
        assert f"[10, {refusal.value.end})" in str(refusal.value), "a refused position tells the range"
        assert request.get("position", 10) != refusal.value.end or isinstance(facts, Stopped)


def test_what_is_asked_first_answers():
    wrong_in_every_way = ReplayRequest(recording=3, position=1, bound="x", length=TO_END)
    full = Node(active_sessions=20, counters=("x",))

    def code(request, facts, node):
        with pytest.raises(ReplayRefused) as refusal:
            plan_replay(request, facts, TIMES.get, node)
        return refusal.value.code

    assert code(wrong_in_every_way, None, Node(active_sessions=20, is_allowed=False)) is ErrorCode.UNAUTHORISED
    assert code(wrong_in_every_way, None, Node(active_sessions=20)) is ErrorCode.INVALID_REQUEST
    assert code(wrong_in_every_way, None, full) is ErrorCode.UNKNOWN_RECORDING
    assert code(wrong_in_every_way, EMPTY, full) is ErrorCode.MAX_REPLAYS
    assert code(wrong_in_every_way, EMPTY, full._replace(active_sessions=19)) is ErrorCode.INVALID_POSITION


@pytest.mark.parametrize(("ms", "position"), [(5, 12), (6, 60), (7, 59), (8, 60)])
def test_a_time_is_the_first_record_since_or_the_end(ms, position):
    assert plan(LIVE, position=AtTime(ms)).position == position


def test_the_end_is_what_is_recorded_when_the_request_is_handled():
    assert plan(LIVE, length=TO_END).end == 60
    assert plan(LIVE, length=TO_END, bound="written").end == 100
    assert plan(LIVE, length=7).records == 7
    follows = plan(LIVE, length=FOLLOW)
    assert (follows.end, follows.records) == (None, None)


def test_a_counter_may_be_behind_the_position():
    node = Node(counters=("applied",))
    assert plan(LIVE, node=node, position=60, bound="applied").position == 60
    with pytest.raises(ReplayRefused, match=r"\[10, 60\)"):
        plan(LIVE, node=node, position=61, bound="applied")


@pytest.mark.parametrize(
    "arguments",
    [{"position": "0"}, {"position": -1}, {"position": True}, {"length": -1}, {"length": 1.5}, {"length": True}],
    ids=repr,
)
def test_a_request_that_can_mean_nothing_is_never_made(arguments):
    with pytest.raises(BadArgument):
        ReplayRequest(recording=1, **arguments)


def test_settings_below_one_are_refused_by_name():
    with pytest.raises(BadArgument, match="heartbeat_ms"):
        ReplaySettings(heartbeat_ms=0)


# ---- many sessions


def sessions(**settings):
    return ReplaySessions(ReplaySettings(**settings), random.Random(5).getrandbits)


def start(many, recording=3, **request):
    session = many.start(ReplayRequest(recording=recording, **request), LIVE, TIMES.get, 0)
    many.handle(session, e.SegmentOpened(), 0)
    return session


def test_slots_are_counted_refused_by_code_and_come_back():
    many = sessions(max_sessions=3)
    first, *_ = [start(many) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(ReplayRefused, match="3 replays run"):
            start(many)
    assert many.refused == {ErrorCode.MAX_REPLAYS: 2}
    many.stop(first.id, 0)
    assert first.state is ReplayState.DONE
    assert start(many).state is ReplayState.INIT


def test_ids_rise_in_their_high_half_are_random_in_the_low_and_all_64_bits_count():
    many = sessions()
    ids = [start(many).id for _ in range(20)]
    assert [one >> 32 for one in ids] == list(range(1, 21))
    assert len({one & 0xFFFFFFFF for one in ids}) == 20
    assert many.stop(ids[0] ^ 1, 0) == many.stop(ids[0] ^ 1 << 40, 0) == []
    assert len(many.stop(ids[0], 0)) == 1


def test_stop_is_idempotent_and_unknown_ids_are_fine():
    many = sessions()
    session = start(many)
    assert len(many.stop(session.id, 0)) == 1
    assert many.stop(session.id, 0) == []
    assert many.stop(12345, 0) == []


def test_stop_all_is_for_one_recording():
    many = sessions()
    threes, four = [start(many), start(many)], start(many, recording=4)
    told = many.notify_all(3, e.Stop(), 0)
    assert {session.id for session, _ in told} == {session.id for session in threes}
    assert list(many) == [four]


def test_a_refusal_at_opening_is_counted_and_gives_the_slot_back():
    many = sessions(max_sessions=1)
    session = many.start(ReplayRequest(recording=3), LIVE, TIMES.get, 0)
    many.handle(session, e.OpenFailed(ErrorCode.CORRUPT_MESSAGE, "damaged"), 0)
    assert len(many) == 0
    assert many.refused == {ErrorCode.CORRUPT_MESSAGE: 1}


def test_a_session_that_nobody_attaches_to_gives_its_slot_back_by_its_turns():
    many = sessions(max_sessions=1)
    session = start(many)
    assert list(many) == [session]
    many.handle(session, e.Turn(LIVE), 5_000)
    assert list(many) == []


def test_one_block_a_turn_is_fair_to_200_sessions_with_unequal_batches():
    many = sessions(max_sessions=200, block_bytes=1 << 16)
    chosen = random.Random(7)
    sizes = {}
    for _ in range(200):
        session = start(many)
        many.handle(session, e.SubscriberAttached(1 << 50), 0)
        sizes[session.id] = chosen.choice([1_000, 9_000, 30_000])
    endless = LogOffsets(10, 1 << 40, 1 << 40, 1 << 40)
    budget = 200 * 15 * (1 << 16)  # what the link takes in this test
    while budget > 0:
        for session in many:
            for effect in many.handle(session, e.Turn(endless), 0):
                assert isinstance(effect, e.ReadBlock)
                at, size = effect.position, sizes[session.id]
                spans = tuple(Span(at + i, at + i + 1, size, 1) for i in range(effect.max_bytes // size + 2))
                (block,) = many.handle(session, e.BlockRead(spans), 0)
                many.handle(session, e.BlockSent(), 0)
                budget -= block.size_bytes
            if budget <= 0:
                break
    sent = [session.bytes_sent for session in many]
    assert max(sent) <= 1.2 * min(sent), f"from {min(sent)} to {max(sent)} bytes"


def test_below_the_end_it_is_the_same_whether_somebody_writes():
    for position in (None, 10, 59):
        assert plan(STOPPED, position=position) == plan(STOPPED.ends, position=position)
