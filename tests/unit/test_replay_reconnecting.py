"""What a replay over the network does when its connection is lost, refused or silent: a node that answers by a script.

The node is in memory and answers at once; the clock is put forward by the test. So each line of the rules is one case:

    lost while it runs     at once to the node again, for the rest of the request, from (position, epoch before it)
    refused, or silent     again after a pause that grows; an error once that has gone on for `reconnect_for_ms`
    not to come again      one error that says why: `reconnect=False`, or a session known by its id alone
"""

import gc
from itertools import pairwise
from weakref import ref

import pytest

from pushrep.records import encode_batch
from pushrep.replay import FOLLOW, TO_END, NodeAccess, ReplayClient, ReplayEndReason, ReplayRefused, ReplayRequest
from pushrep.replay.node_connection import NodeConnection, NodeUnreachable, request_to_wire, started
from pushrep.replay.remote import RemoteReplays, RemoteSession
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import PLACE_OF, ApiKey
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.values import OFFSET_MAX
from tests.support.control_batches import as_control
from tests.support.simulated_disk import SimulatedClock
from tests.unit.scripted_node import BREAKS, HERE, ScriptedNode


def answering(
    start=wire.StartReplayResponse(session_id=2, start_offset=10, end_offset=100),  # noqa: B008 - it is frozen
    *,
    attach=wire.AttachResponse(),  # noqa: B008
    versions=None,
):
    return {
        ApiKey.API_VERSIONS: versions, ApiKey.START_REPLAY: start, ApiKey.ATTACH: attach,
        ApiKey.STOP_REPLAY: wire.StopReplayResponse(),
    }  # fmt: skip


def batch(base_offset, next_offset, epoch=7):
    made = encode_batch([b"x"] * (next_offset - base_offset), timestamps_ms=1)
    made.stamp(base_offset, epoch)
    return bytes(made.data)


def block(start, end, *batches):
    return wire.ReplayData(session_id=1, start_offset=start, end_offset=end, tip_offset=100, records=batches)


def beat(offset):
    return wire.ReplayData(session_id=1, start_offset=offset, end_offset=offset, tip_offset=100)


def ended(reason, code=ErrorCode.NONE, offset=10):
    return wire.ReplayEnd(session_id=1, reason=reason, offset=offset, error_code=code, error_message="so it is")


def starts(node):
    """The replays that were asked for, and forget them."""
    found = [one for one in node.asked if isinstance(one, wire.StartReplayRequest)]
    node.asked.clear()
    return found


class Reader:
    """A replay whose reader has taken [0, 10), in one batch of leader epoch 7."""

    def __init__(self, length=FOLLOW, *, is_known_by_id=False, begins=0, ends=100, **access):
        self.clock = SimulatedClock()
        self.clock.advance(1_000_000)
        self.node = node = ScriptedNode(self.clock)
        self.access = NodeAccess(network=node, **access)
        node.connections.append(answering())
        self.request = ReplayRequest(1, 0, length, bound="flushed", max_bytes_per_s=1_000_000)
        self.session = RemoteSession(HERE, 1, None if is_known_by_id else self.request, self.access, self.clock)
        connection = NodeConnection(HERE, self.access)
        if is_known_by_id:
            self.session.attach(connection, 1)
        else:
            response = wire.StartReplayResponse(session_id=1, start_offset=begins, end_offset=ends)
            node.line.answers[ApiKey.START_REPLAY] = response
            self.session.start(connection, started(connection, request_to_wire(1, self.request)))
        if not begins:
            assert self.gives(block(0, 10, batch(0, 10))).end == 10
        starts(node), node.tried_ms.clear()

    def gives(self, event):
        self.node.line.gives(event)
        return self.session.step()

    def lose(self, how):
        """The connection is lost; whatever comes is not the end of a step."""
        LOSSES[how](self)

    def comes_back(self, answers=None):
        """The next connection is as `answers`; what was asked on it."""
        self.node.connections.append(answering() if answers is None else answers)
        assert self.session.step() is None
        return starts(self.node)

    def runs(self):
        """Whether it is attached and gives what comes."""
        return self.gives(block(10, 12, batch(10, 12))).end == 12

    @property
    def end(self):
        return self.session.end


def _broken(how):
    def lose(reader):
        reader.node.line.breaks(how)
        assert reader.session.step() is None

    return lose


def _silent(reader):
    reader.clock.advance(reader.access.silence_max_ms + 1)
    assert reader.session.step() is None


LOSSES = {
    "hangs up": _broken("hangs up"),
    "is reset": _broken("is reset"),
    "says rubbish": _broken("says rubbish"),
    "says nothing": _silent,
    "was too slow": lambda reader: reader.gives(ended(ReplayEndReason.ERROR, ErrorCode.STALLED)),
    "the node stops": lambda reader: reader.gives(ended(ReplayEndReason.STOPPED, ErrorCode.NODE_STOPPING)),
    "a damaged block": lambda reader: reader.gives(block(10, 12, batch(10, 12)[:-1] + b"?")),
}
CODES = {
    "was too slow": ErrorCode.STALLED, "the node stops": ErrorCode.NODE_STOPPING,
    "a damaged block": ErrorCode.CORRUPT_MESSAGE,
}  # fmt: skip
LENGTHS = {
    FOLLOW: (wire.LengthKind.FOLLOW, 0), TO_END: (wire.LengthKind.TO_END, 0), 25: (wire.LengthKind.RECORDS, 15),
}  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("how", LOSSES)
def test_a_replay_that_is_lost_asks_at_once_for_the_rest_of_its_request(how, length):
    """It resumes with (offset, epoch before it); all else is as it was asked first."""
    reader = Reader(length)
    lost = reader.node.line
    reader.lose(how)
    assert not lost.is_open
    (asked,) = reader.comes_back()
    kind, left = LENGTHS[length]
    assert asked == wire.StartReplayRequest(
        recording_id=1, position_kind=wire.PositionKind.OFFSET, position=10, length_kind=kind, length=left,
        bound="flushed", max_bytes_per_s=1_000_000, epoch_before=7,
    )  # fmt: skip
    assert reader.node.tried_ms == [reader.clock.monotonic_ms()]
    assert (reader.session.session_id, reader.runs(), reader.end) == (2, True, None)


@pytest.mark.parametrize("is_known_by_id", [False, True])
@pytest.mark.parametrize("how", LOSSES)
def test_a_replay_that_may_not_come_again_ends_with_the_reason(how, is_known_by_id):
    """With one error, and at the offset that it has come to."""
    reader = Reader(reconnect=is_known_by_id, is_known_by_id=is_known_by_id)
    lost = reader.node.line
    reader.lose(how)
    reader.session.step()
    assert reader.end.code is CODES.get(how, ErrorCode.REQUEST_TIMED_OUT)
    assert (reader.end.offset, lost.is_open, reader.node.tried_ms) == (10, False, [])
    assert how in CODES or "the connection broke: " in reader.end.why
    assert reader.session.step() is None


def test_a_replay_that_is_lost_while_it_gives_credit_keeps_the_blocks_that_came():
    reader = Reader(credit_bytes=400)
    line = reader.node.line
    line.gives(block(10, 50, batch(10, 50)))
    line.gives(block(50, 100, batch(50, 100)))
    line.breaks("is reset")
    assert [reader.session.step().end for _ in range(2)] == [50, 100]
    assert not line.is_open
    assert [one.position for one in reader.comes_back()] == [100]


ANSWERED = wire.StartReplayResponse
NO_WAY_BACK = {
    # what comes of a connection, and what breaks it once it is attached
    "refused": ("refused", None),
    **{f"its first answer: {how}": (answering(versions=how), None) for how in BREAKS[1:]},
    **{f"its start: {how}": (answering(how), None) for how in BREAKS[1:]},
    **{f"its attach: {how}": (answering(attach=how), None) for how in BREAKS[1:]},
    **{f"attached: {how}": (answering(), lose) for how, lose in LOSSES.items() if how != "a damaged block"},
    "the node is full": (answering(ANSWERED(error_code=ErrorCode.MAX_REPLAYS)), None),
    "the node stops": (answering(ANSWERED(error_code=ErrorCode.NODE_STOPPING)), None),
    "its time to attach is over": (answering(attach=wire.AttachResponse(error_code=ErrorCode.UNKNOWN_REPLAY)), None),
}


@pytest.mark.parametrize("comes", NO_WAY_BACK)
def test_who_finds_no_way_back_tries_less_and_less_often_and_gives_up_in_the_end(comes):
    """No silent stall, no storm of connections: pauses from backoff_min_ms to twice that, doubled up to the most."""
    reader = Reader(backoff_min_ms=100, backoff_max_ms=1_000, reconnect_for_ms=30_000, silence_max_ms=1)
    reader.lose("hangs up")
    answers, lose_again = NO_WAY_BACK[comes]
    lost_ms, tried_ms = reader.clock.monotonic_ms(), reader.node.tried_ms
    reader.node.connections.extend([answers] * 1_000)
    while reader.end is None:
        tries = len(tried_ms)
        for _ in range(2):
            assert reader.session.step() is None
        if lose_again is not None and len(tried_ms) > tries and reader.end is None:
            lose_again(reader)
        assert not any(line.is_open for line in reader.node.lines)
        reader.session.wait(1.0)
    assert (reader.end.code, reader.end.offset) == (ErrorCode.REQUEST_TIMED_OUT, 10)
    assert "no way back for" in reader.end.why
    assert (tried_ms[0], 30_000 < tried_ms[-1] - lost_ms < 31_100) == (lost_ms, True), "at once, and as long as said"
    for number, (before, after) in enumerate(pairwise(tried_ms)):
        most_ms = min(1_000, 200 << number)
        assert most_ms // 2 <= after - before <= most_ms + 5, f"the pause after {number + 1} tries"


def test_what_comes_again_is_a_way_back_and_the_next_loss_is_met_at_once():
    """The time and the pauses count from the newest loss on: a node may be restarted every day."""
    reader = Reader(backoff_min_ms=100, reconnect_for_ms=1_000)
    for came_to in (12, 14, 16):
        reader.lose("is reset")
        for _ in range(3):
            assert reader.session.step() is None
            reader.session.wait(1.0)
        reader.comes_back(answering(ANSWERED(session_id=2, start_offset=came_to - 2, end_offset=100)))
        assert reader.gives(block(came_to - 2, came_to, batch(came_to - 2, came_to))).end == came_to
        reader.clock.advance(2_000)
        reader.gives(beat(came_to))
        reader.node.tried_ms.clear()
    assert reader.end is None


def test_a_heartbeat_is_a_way_back_too():
    """At the tip nothing else comes."""
    reader = Reader(backoff_min_ms=100, reconnect_for_ms=1_000)
    for _ in range(5):
        reader.lose("hangs up")
        reader.comes_back()
        assert reader.gives(beat(10)) is None
        reader.clock.advance(900)
    assert (reader.end, len(reader.node.tried_ms)) == (None, 5)


@pytest.mark.parametrize(
    ("length", "end", "is_over"),
    [(10, 100, True), (13, 100, False), (TO_END, 10, True), (TO_END, 12, False)],
    ids=["n had", "n left", "all had", "some left"],
)
def test_a_replay_that_is_lost_when_it_has_all_is_over_and_asks_nobody(length, end, is_over):
    reader = Reader(length, ends=end)
    reader.lose("hangs up")
    assert bool(reader.comes_back()) is not is_over
    found = reader.end and (reader.end.reason, reader.end.code, reader.end.offset)
    assert found == ((ReplayEndReason.LIMIT_REACHED, ErrorCode.NONE, 10) if is_over else None)


CUT = ANSWERED(error_code=ErrorCode.TRUNCATED, error_message="cut", log_start_offset=0, end_offset=4)
REFUSALS = {
    # what it is refused with when it comes back, and its end then: reason, code, cut
    "cut": (CUT, (ReplayEndReason.TRUNCATED, ErrorCode.TRUNCATED, 4)),
    "deleted": (
        ANSWERED(error_code=ErrorCode.UNKNOWN_RECORDING),
        (ReplayEndReason.RECORDING_DELETED, ErrorCode.RECORDING_DELETED, None),
    ),
    "not allowed": (
        ANSWERED(error_code=ErrorCode.UNAUTHORISED), (ReplayEndReason.ERROR, ErrorCode.UNAUTHORISED, None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS)
def test_who_is_refused_for_good_hangs_up_and_is_told_once(refused):
    reader = Reader()
    reader.lose("hangs up")
    answer, expected = REFUSALS[refused]
    reader.node.connections.append(answering(answer))
    reader.session.step()
    assert (reader.end.reason, reader.end.code, reader.end.cut_offset) == expected
    assert not reader.node.line.is_open
    reader.session.step()
    assert len(reader.node.tried_ms) == 1


def range_(start, end):
    return ANSWERED(error_code=ErrorCode.INVALID_POSITION, log_start_offset=start, end_offset=end)


@pytest.mark.parametrize(
    ("now", "is_over"),
    [
        (range_(0, 10), True),
        (range_(0, 40), False),
        (range_(0, 9), True),
        (range_(0, 200), False),
        (ANSWERED(error_code=ErrorCode.MAX_REPLAYS, log_start_offset=0, end_offset=10), False),
    ],
    ids=["cut to here", "cut above", "cut below meanwhile", "as long as before", "not said"],
)
def test_to_end_with_nothing_more_to_give_asks_where_the_log_ends_now(now, is_over):
    """A cut log's TO_END ends at its new end; a restarted node's watermark may only be late, and is waited for."""
    reader = Reader(TO_END)
    reader.lose("hangs up")
    line = answering([ANSWERED(error_code=ErrorCode.EMPTY_RECORDING), now])
    first, second = reader.comes_back(line)
    assert (first.position, second.position, second.bound) == (10, OFFSET_MAX, "written")
    assert (reader.end is not None) == is_over
    if not is_over:
        reader.session.wait(1.0)
        assert [one.length_kind for one in reader.comes_back()] == [wire.LengthKind.TO_END]
        assert reader.runs()
        assert reader.gives(ended(ReplayEndReason.LIMIT_REACHED, offset=12)) is None
        assert (reader.end.reason, reader.end.offset) == (ReplayEndReason.LIMIT_REACHED, 12)


def test_to_end_that_ends_sooner_after_a_restart_comes_once_more_for_the_rest():
    """Its first end counts: the node's watermark was lower than before its crash."""
    reader = Reader(TO_END)
    reader.lose("the node stops")
    reader.comes_back(answering(ANSWERED(session_id=2, start_offset=10, end_offset=12)))
    assert reader.runs()
    reader.gives(ended(ReplayEndReason.LIMIT_REACHED, offset=12))
    assert reader.end is None
    (asked,) = reader.comes_back(answering(ANSWERED(session_id=3, start_offset=12, end_offset=100)))
    assert asked.position == 12
    assert reader.gives(block(12, 100, batch(12, 100))).end == 100
    reader.gives(ended(ReplayEndReason.LIMIT_REACHED, offset=100))
    assert (reader.end.reason, reader.end.offset) == (ReplayEndReason.LIMIT_REACHED, 100)


def test_damage_that_comes_again_is_told_and_elsewhere_it_is_asked_for_once_more():
    """The log may have been cut meanwhile; if it is damaged, the node says where."""
    reader, damaged = Reader(), batch(10, 12)[:-1] + b"?"
    reader.gives(block(10, 12, damaged))
    reader.comes_back()
    assert reader.gives(block(10, 14, batch(10, 12), batch(12, 14)[:-1] + b"?")).end == 12, "what is whole is given"
    assert len(reader.comes_back()) == 1
    assert reader.gives(block(12, 14, batch(12, 14)[:-1] + b"?")) is None
    assert (reader.end.reason, reader.end.code, reader.end.offset) == (
        ReplayEndReason.ERROR, ErrorCode.CORRUPT_MESSAGE, 12,
    )  # fmt: skip
    assert (reader.node.line.is_open, len(reader.node.tried_ms)) == (False, 2)


@pytest.mark.parametrize("reconnect", [False, True])
def test_what_does_not_join_is_told_at_once_also_with_damage_behind_it(reconnect):
    reader = Reader(reconnect=reconnect)
    assert reader.gives(block(10, 14, batch(11, 12), batch(12, 14)[:-1] + b"?")) is None
    assert (reader.end.code, reader.end.offset, reader.node.tried_ms) == (ErrorCode.CORRUPT_MESSAGE, 10, [])
    assert "is expected" in reader.end.why


def test_what_comes_behind_a_loss_is_of_the_old_connection_and_not_taken():
    reader = Reader()
    line = reader.node.line
    line.gives(block(10, 12, batch(10, 12)[:-1] + b"?"))
    line.gives(block(12, 14, batch(12, 14)))
    line.gives(ended(ReplayEndReason.STOPPED, offset=14))
    assert reader.session.step() is None
    reader.comes_back()
    assert (reader.runs(), reader.end) == (True, None)


def given_credit(reader):
    found = [one.bytes for one in reader.node.asked if isinstance(one, wire.Credit)]
    reader.node.asked.clear()
    return found


def test_credit_is_given_by_quarters_of_what_was_taken_on_this_connection():
    """Both sides count what may be in flight; a new session begins with all of it."""
    size = len(batch(10, 11))
    reader = Reader(begins=13, credit_bytes=4 * 3 * size)
    for offset in range(13, 17):
        assert reader.gives(block(offset, offset + 1, batch(offset, offset + 1))).end == offset + 1
    assert given_credit(reader) == [3 * size]
    reader.lose("hangs up")
    reader.comes_back()
    for offset in range(17, 20):
        assert given_credit(reader) == [], "what was taken before the loss is not counted again"
        assert reader.gives(block(offset, offset + 1, batch(offset, offset + 1))).end == offset + 1
    assert given_credit(reader) == [3 * size]
    line, settings = reader.node.line, reader.access
    assert (line.waits_s, line.wait_s) == ([settings.request_timeout_ms / 1000], 0), "else it reads without waiting"


def test_a_block_that_comes_right_behind_the_answer_is_not_lost():
    """In the same piece of the stream."""
    reader = Reader()
    reader.lose("hangs up")
    connect = reader.node.connect

    def connected(*arguments):
        line = connect(*arguments)
        line.behind = [block(10, 12, batch(10, 12)), block(12, 14, batch(12, 14))]
        return line

    reader.node.connect = connected
    reader.node.connections.append(answering())
    assert [reader.session.step().end for _ in range(2)] == [12, 14]


@pytest.mark.parametrize("times", [1, 2])
def test_a_replay_whose_session_expired_before_it_attached_is_started_once_more(times):
    """This machine was stopped between start and attach."""
    clock = SimulatedClock()
    node = ScriptedNode(clock)
    late = answering(attach=wire.AttachResponse(error_code=ErrorCode.UNKNOWN_REPLAY))
    node.connections.extend([late] * times + [answering()])
    with ReplayClient(str(HERE), node=NodeAccess(network=node), clock=clock) as client:
        if times == 1:
            assert client.replay(ReplayRequest(1)).position == 10
        else:
            with pytest.raises(ReplayRefused) as refused:
                client.replay(ReplayRequest(1))
            assert refused.value.code is ErrorCode.UNKNOWN_REPLAY
        assert [line.is_open for line in node.lines] == [False, times == 1]
    assert not any(line.is_open for line in node.lines)


def test_no_credit_is_given_for_a_replay_that_has_ended():
    reader = Reader(credit_bytes=4)
    given_credit(reader)
    reader.node.line.gives(block(10, 12, batch(10, 12)))
    assert reader.gives(ended(ReplayEndReason.STOPPED, offset=12)).end == 12
    assert given_credit(reader) == []
    assert reader.session.step() is None
    assert (reader.end.reason, reader.node.line.is_open) == (ReplayEndReason.STOPPED, False)


STOPS = {
    "running": lambda reader: None,
    "the node says nothing": lambda reader: reader.node.line.answers.update({ApiKey.STOP_REPLAY: "says nothing"}),
    "the node hangs up": lambda reader: reader.node.line.answers.update({ApiKey.STOP_REPLAY: "hangs up"}),
    "the connection is reset": lambda reader: reader.node.line.breaks("is reset"),
    "lost": lambda reader: (reader.node.line.breaks("hangs up"), reader.session.rest()),
}


@pytest.mark.parametrize("state", STOPS)
def test_a_stop_tells_the_node_and_waits_for_its_answer_for_a_second(state):
    """The node's slot is free when it returns, where the node answers."""
    reader = Reader()
    reader.node.line.gives(block(10, 12, batch(10, 12)))
    reader.node.line.gives(block(12, 14, batch(12, 14)))
    assert reader.session.step().end == 12
    line = reader.node.line
    STOPS[state](reader)
    reader.node.asked.clear()
    reader.session.stop()
    told = [] if state in {"lost", "the connection is reset"} else [wire.StopReplayRequest(session_id=1)]
    assert (reader.node.asked, line.is_open) == (told, False)
    assert not told or line.wait_s == 1
    assert (reader.end.reason, reader.end.offset) == (ReplayEndReason.STOPPED, 12)
    assert (reader.session.step(), reader.session.is_over) == (None, True), "what was not delivered is dropped"
    reader.session.stop()
    reader.session.close()
    assert len(reader.node.asked) == len(told), "once"


def test_a_stop_of_a_replay_that_has_ended_keeps_its_reason():
    reader = Reader()
    reader.node.line.gives(block(10, 12, batch(10, 12)))
    assert reader.gives(ended(ReplayEndReason.RECORDING_DELETED, ErrorCode.RECORDING_DELETED, 12)).end == 12
    reader.session.stop()
    assert reader.end.reason is ReplayEndReason.RECORDING_DELETED


@pytest.mark.parametrize("reason", [ReplayEndReason.STOPPED, ReplayEndReason.TRUNCATED])
def test_another_end_of_a_replay_that_is_short_is_its_end(reason):
    reader = Reader(TO_END)
    reader.lose("the node stops")
    reader.comes_back(answering(ANSWERED(session_id=2, start_offset=10, end_offset=12)))
    reader.gives(ended(reason, offset=10))
    assert (reader.end.reason, reader.node.line.is_open) == (reason, False)


def test_to_end_gives_nothing_that_was_recorded_after_it_was_asked_for_first():
    """Whatever the node holds when it is asked again."""
    reader = Reader(TO_END)
    reader.lose("hangs up")
    reader.comes_back(answering(ANSWERED(session_id=2, start_offset=10, end_offset=120)))
    assert reader.gives(block(10, 104, batch(10, 104))).end == 100
    assert reader.gives(ended(ReplayEndReason.LIMIT_REACHED, offset=104)) is None
    assert (reader.end.reason, reader.end.offset) == (ReplayEndReason.LIMIT_REACHED, 100)


def test_n_counts_records_and_not_offsets():
    """A transaction's marker has an offset, and is no record."""
    reader = Reader(25)
    reader.gives(block(10, 11, as_control(batch(10, 11))))
    reader.lose("hangs up")
    assert [(one.position, one.length) for one in reader.comes_back()] == [(11, 15)]


def test_a_paused_replay_comes_back_behind_what_has_come_and_not_behind_what_was_taken():
    reader = Reader()
    reader.node.line.gives(block(10, 12, batch(10, 12)))
    reader.session.rest()
    reader.node.line.breaks("hangs up")
    reader.node.connections.append(answering())
    for _ in range(2):
        reader.session.rest()
    assert [(reader.session.position, one.position) for one in starts(reader.node)] == [(10, 12)]
    reader.node.line.gives(block(12, 14, batch(12, 14)))
    assert [reader.session.step().end for _ in range(2)] == [12, 14]


def test_n_that_stand_at_the_end_of_a_stopped_log_are_over():
    reader = Reader(25)
    reader.lose("hangs up")
    assert len(reader.comes_back(answering(range_(0, 10)))) == 1, "it asks for no other end"
    assert (reader.end.reason, reader.end.code) == (ReplayEndReason.LIMIT_REACHED, ErrorCode.NONE)


def test_to_end_that_is_to_ask_later_asks_for_no_other_end():
    reader = Reader(TO_END)
    reader.lose("hangs up")
    assert len(reader.comes_back(answering(ANSWERED(error_code=ErrorCode.MAX_REPLAYS)))) == 1


ENDS = [
    (ended(ReplayEndReason.STOPPED), (ReplayEndReason.STOPPED, ErrorCode.NONE, None, None, -1)),
    (
        wire.ReplayEnd(
            session_id=1, reason=ReplayEndReason.ERROR, offset=10, error_code=ErrorCode.CORRUPT_MESSAGE, segment=0
        ),
        (ReplayEndReason.ERROR, ErrorCode.CORRUPT_MESSAGE, 0, None, -1),
    ),
    (
        wire.ReplayEnd(
            session_id=1, reason=ReplayEndReason.TRUNCATED, offset=4, error_code=ErrorCode.TRUNCATED, leader_epoch=9
        ),
        (ReplayEndReason.TRUNCATED, ErrorCode.TRUNCATED, None, 4, 9),
    ),
]


@pytest.mark.parametrize(("event", "expected"), ENDS)
def test_an_end_is_told_with_all_that_the_node_says_and_where_the_reader_is(event, expected):
    reader = Reader()
    assert reader.gives(event) is None
    end = reader.end
    assert (end.reason, end.code, end.segment, end.cut_offset, end.leader_epoch) == expected
    assert (end.offset, end.why, reader.node.line.is_open) == (10, event.error_message, False)


def test_a_replay_may_begin_inside_of_a_batch_and_only_there():
    reader = Reader(begins=13)
    assert reader.gives(block(13, 20, batch(10, 20))).end == 20
    reader.lose("hangs up")
    assert [one.position for one in reader.comes_back()] == [20]
    assert reader.gives(block(20, 22, batch(18, 22))) is None
    assert reader.end.code is ErrorCode.CORRUPT_MESSAGE, "its batches are others now"


def test_how_far_the_node_is_is_known_from_its_last_word():
    assert Reader(begins=13).session.tip == 100
    reader = Reader()
    reader.gives(wire.ReplayData(session_id=1, start_offset=10, end_offset=10, tip_offset=120))
    assert reader.session.tip == 120
    reader.gives(wire.ReplayData(session_id=1, start_offset=10, end_offset=10, tip_offset=5))
    assert reader.session.tip == 10, "never behind the reader"


def test_what_may_wait_is_known_before_it_is_done():
    """An event loop has it done by a thread."""
    reader = Reader()
    assert not reader.session.step_waits
    reader.lose("hangs up")
    assert reader.session.step_waits
    reader.comes_back()
    assert not reader.session.step_waits
    reader.node.line.meanwhile = reader.session.stop
    assert reader.session.step() is None
    assert (reader.session.step_waits, reader.end) == (True, None), "who uses it tells the node"
    assert reader.session.step() is None
    assert reader.end.reason is ReplayEndReason.STOPPED


# ---- requests without a replay of their own, over the one connection that is kept for them

RECORDINGS = wire.DescribeRecordingsResponse()
REPEATABLE = {
    # what may be asked twice: (the request, its answer)
    "list": (wire.DescribeRecordingsRequest(), RECORDINGS),
    "stop": (wire.StopReplayRequest(session_id=1), wire.StopReplayResponse()),
    "start": (wire.StartReplayRequest(recording_id=1), ANSWERED(session_id=2, start_offset=0, end_offset=100)),
}
CHANGES = {
    "extend": (wire.ExtendRequest(recording_id=1, leader_epoch=3), wire.ExtendResponse(end_offset=1)),
    "truncate": (wire.TruncateRequest(recording_id=1, offset=3), wire.TruncateResponse(end_offset=3)),
    "purge": (wire.PurgeRequest(recording_id=1, before_offset=3), wire.PurgeResponse(log_start_offset=3)),
    "delete": (wire.DeleteRequest(recording_id=1), wire.DeleteResponse()),
}


class Asker:
    """The client of a node, which has asked once and keeps its connection; `answer` is what is answered from now on."""

    def __init__(self, answer):
        self.clock = SimulatedClock()
        self.node = ScriptedNode(self.clock)
        self.replays = RemoteReplays(HERE, NodeAccess(network=self.node), self.clock)
        self.answers = answering() | {ApiKey.DESCRIBE_RECORDINGS: RECORDINGS, PLACE_OF[type(answer)][0]: answer}
        self.node.connections.append(self.answers)
        assert self.replays.recordings("", 0, None) == []
        self.node.asked.clear()

    def ask(self, request, answer):
        return self.replays.ask(request, type(answer))

    def asked(self):
        """The requests since, but for versions."""
        found = [one for one in self.node.asked if not isinstance(one, ApiVersionsRequest)]
        self.node.asked.clear()
        return found


@pytest.mark.parametrize("what", REPEATABLE | CHANGES)
def test_a_request_goes_over_the_connection_that_is_there(what):
    request, answer = (REPEATABLE | CHANGES)[what]
    asker = Asker(answer)
    for _ in range(2):
        assert asker.ask(request, answer) == answer
    assert (asker.asked(), len(asker.node.lines)) == ([request] * 2, 1)


@pytest.mark.parametrize("how", BREAKS[1:])
@pytest.mark.parametrize("what", REPEATABLE)
def test_what_may_be_repeated_is_asked_once_more_if_the_idle_connection_was_broken(what, how):
    request, answer = REPEATABLE[what]
    asker = Asker(answer)
    asker.node.line.answers = asker.answers | {PLACE_OF[type(answer)][0]: how}
    asker.node.connections.append(asker.answers)
    assert asker.ask(request, answer) == answer
    assert asker.asked() == [request] * 2
    assert [line.is_open for line in asker.node.lines] == [False, True]


@pytest.mark.parametrize("how", BREAKS[1:])
@pytest.mark.parametrize("what", REPEATABLE)
def test_what_fails_over_a_new_connection_too_is_told_and_the_next_request_connects_anew(what, how):
    request, answer = REPEATABLE[what]
    asker = Asker(answer)
    broken = asker.answers | {PLACE_OF[type(answer)][0]: how}
    asker.node.line.answers = broken
    asker.node.connections.extend([broken, broken, asker.answers])
    for times in (2, 1):  # over the kept connection, and a new one; then over a new one alone
        with pytest.raises(NodeUnreachable):
            asker.ask(request, answer)
        assert asker.asked() == [request] * times
        assert not any(line.is_open for line in asker.node.lines)
    assert asker.ask(request, answer) == answer


@pytest.mark.parametrize("how", BREAKS[1:])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_asked_for_once_because_it_may_have_been_made(what, how):
    request, answer = CHANGES[what]
    asker = Asker(answer)
    asker.node.line.answers = asker.answers | {PLACE_OF[type(answer)][0]: how}
    asker.node.connections.append(asker.answers)
    with pytest.raises(NodeUnreachable):
        asker.ask(request, answer)
    assert (asker.asked(), asker.node.line.is_open) == ([request], False)
    assert asker.ask(request, answer) == answer


def test_an_answer_to_something_else_is_a_node_that_does_not_answer_as_it_should():
    """The connection is not used again: what comes on it next may be anything."""
    asker = Asker(RECORDINGS)
    asker.node.connections.append(asker.answers)
    with pytest.raises(NodeUnreachable, match="it answered with DescribeRecordingsResponse"):
        asker.replays.ask(wire.DescribeRecordingsRequest(), wire.ExtendResponse)
    assert not any(line.is_open for line in asker.node.lines)


STARTED = REPEATABLE["start"][1]


def test_a_closed_client_ends_what_it_has_started_and_what_runs():
    """Their slots at the node are free at once."""
    asker = Asker(STARTED)
    assert asker.replays.start_replay(ReplayRequest(1)) == 2
    asker.node.connections.append(answering(ANSWERED(session_id=3, start_offset=0, end_offset=100)))
    running = asker.replays.replay(ReplayRequest(1))
    asker.asked()
    for _ in range(2):
        asker.replays.close()
        assert running.end.reason is ReplayEndReason.STOPPED
        assert not any(line.is_open for line in asker.node.lines)
    assert asker.asked() == [wire.StopReplayRequest(session_id=3), wire.StopReplayRequest(session_id=2)], "each once"


def test_a_client_is_closed_though_its_node_is_away():
    asker = Asker(STARTED)
    asker.replays.start_replay(ReplayRequest(1))
    asker.node.line.breaks("is reset")
    asker.replays.close()
    assert not any(line.is_open for line in asker.node.lines)


def test_a_session_that_was_stopped_is_not_stopped_again_by_a_close():
    asker = Asker(STARTED)
    session_id = asker.replays.start_replay(ReplayRequest(1))
    asker.replays.stop(session_id)
    asker.asked()
    asker.replays.close()
    assert asker.asked() == []


def test_a_client_forgets_the_replays_that_are_over():
    """A service keeps its client for months."""
    asker, seen = Asker(RECORDINGS), []
    for _ in range(3):
        asker.node.connections.append(answering(STARTED))
        session = asker.replays.replay(ReplayRequest(1))
        session.stop()
        seen.append(ref(session))
        del session
    gc.collect()
    assert [one() is None for one in seen] == [True, True, False], "the last one goes with the next"


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR])
def test_a_deletion_tells_whether_the_files_could_be_removed(code):
    asker = Asker(RECORDINGS)
    asker.node.connections.append(asker.answers | {ApiKey.DELETE: wire.DeleteResponse()})
    deletion = asker.replays.delete(1, force=False, outbox_gone=False)
    asker.node.line.gives(wire.DeleteDone(recording_id=1, freed_bytes=17, error_code=code, error_message="EIO"))
    if code is ErrorCode.NONE:
        assert deletion.wait() == 17
    else:
        with pytest.raises(ReplayRefused, match="EIO"):
            deletion.wait()
    assert not asker.node.line.is_open


def test_a_deletion_whose_node_goes_away_is_not_known_to_be_done():
    asker = Asker(RECORDINGS)
    asker.node.connections.append(asker.answers | {ApiKey.DELETE: wire.DeleteResponse()})
    deletion = asker.replays.delete(1, force=False, outbox_gone=False)
    with pytest.raises(NodeUnreachable, match="timed out"):
        deletion.wait(5)
    assert (asker.node.line.wait_s, asker.node.line.is_open) == (5, False)
