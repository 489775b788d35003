"""Sessions of a node, by the statements of the contract: requests and refusals, credit, ends, slots, restarts."""

import asyncio
import errno
import os
import struct
import threading
from dataclasses import replace
from itertools import islice

import pytest

from pushrep.log import LogConfig
from pushrep.log.reader import LogSlices
from pushrep.records import BatchHeader
from pushrep.replay import (
    MAX_TIMESTAMP,
    TO_END,
    AtTime,
    NodeAccess,
    ReplayClient,
    ReplayEndReason,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplayTruncated,
)
from pushrep.replay.node_connection import NodeConnection
from pushrep.replay.plan import LOG_BOUNDS
from pushrep.replicate.replay_recordings import Recordings
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey, encode
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import frame_head
from pushrep.wire.push_messages import AppendRecordsRequest, AppendRecordsResponse
from tests.integration.replay.conftest import QUICK, WAIT_S, StandingClock, offsets, take, until


def refusal(client, recording="orders-0", **request):
    with pytest.raises(ReplayRefused) as refused:
        client.replay(ReplayRequest(recording, **request))
    return refused.value


def test_records_and_batches_are_those_of_the_log_whatever_the_position_and_length(client):
    """Not on a batch boundary: served from the batch that holds it, records below dropped; n exactly."""
    for position, length, end in [(None, TO_END, 100), (0, 1, 1), (3, 10, 13), (13, 1, 14), (95, 5, 100), (50, 0, 50)]:
        request = ReplayRequest("orders-0", position=position, length=length)
        replay = client.replay(request)
        records = list(replay)
        assert offsets(records) == list(range(position or 0, end))
        assert [record.value[:6] for record in records] == [b"%06d" % n for n in range(position or 0, end)]
        assert (replay.position, replay.end_reason) == (end, ReplayEndReason.LIMIT_REACHED)
        batches = list(client.replay(request).batches())
        assert [record for batch in batches for record in batch.records()] == records


def test_a_time_is_the_first_record_by_offset_at_or_after_it(world, node):
    leader = world.leader(node)
    for time_ms in (50, 10, 70, 30):
        leader.append(b"a", b"b", timestamps_ms=[time_ms, time_ms + 5])
    client = world.client(node)
    for time_ms, first in [(0, 0), (52, 1), (56, 4), (75, 5)]:
        assert offsets(client.replay(ReplayRequest("orders-0", AtTime(time_ms), TO_END))) == list(range(first, 8))
    assert refusal(client, position=AtTime(76), length=TO_END).code is ErrorCode.EMPTY_RECORDING
    leader.append(b"a", timestamps_ms=[75])
    assert offsets(client.replay(ReplayRequest("orders-0", AtTime(MAX_TIMESTAMP), TO_END))) == [5, 6, 7, 8]


def test_an_event_loop_gets_the_same(client):
    async def both():
        request = ReplayRequest("orders-0", position=5, length=TO_END)
        records = [record.offset async for record in client.replay(request)]
        batches = [batch async for batch in client.replay(request).batches()]
        return records, [record.offset for batch in batches for record in batch.records()]

    assert asyncio.run(both()) == (list(range(5, 100)), list(range(5, 100)))


def test_an_event_loop_that_follows_is_woken_by_what_comes_and_by_a_stop(client, leader):
    async def follow():
        replay = client.replay(ReplayRequest("orders-0", position=98))
        got = []
        async for record in replay:
            got.append(record.offset)
            if record.offset == 99:
                threading.Timer(0, leader.append, [b"new"]).start()
            if record.offset == 100:
                threading.Timer(0, replay.stop).start()
        return got, replay.end_reason

    assert asyncio.run(follow()) == ([98, 99, 100], ReplayEndReason.STOPPED)


@pytest.mark.parametrize(
    ("recording", "request_", "code"),
    [
        ("orders-1", {}, ErrorCode.UNKNOWN_RECORDING),
        (77, {}, ErrorCode.UNKNOWN_RECORDING),
        ("lunch", {}, ErrorCode.UNKNOWN_RECORDING),
        ("orders-0", {"bound": "lunch"}, ErrorCode.INVALID_REQUEST),
        ("orders-0", {"position": 101}, ErrorCode.INVALID_POSITION),
        ("orders-0", {"position": 100, "length": TO_END}, ErrorCode.EMPTY_RECORDING),
    ],
)
def test_refusals_have_their_code_and_cost_no_session(client, node, recording, request_, code):
    """TO_END with nothing to replay: EMPTY_RECORDING, and no session is made."""
    assert refusal(client, recording, **request_).code is code
    assert len(node.replay_server.counters().sessions) == 0


@pytest.mark.parametrize("bound", LOG_BOUNDS)
@pytest.mark.parametrize("recording", ["orders-1", 77])
def test_the_tip_of_what_is_not_there_is_refused(client, recording, bound):
    with pytest.raises(ReplayRefused) as refused:
        client.tip_of(recording, bound)
    assert refused.value.code is ErrorCode.UNKNOWN_RECORDING


def test_refused_positions_tell_the_range(client):
    refused = refusal(client, position=101)
    assert (refused.start, refused.end) == (0, 100)


def test_a_start_at_a_negative_offset_is_answered_also_of_one_that_resumes(client, node):
    start = wire.StartReplayRequest(
        recording_id=1, position_kind=wire.PositionKind.OFFSET, position=-5, length_kind=wire.LengthKind.TO_END,
        length=0, epoch_before=256,
    )  # fmt: skip
    with NodeConnection(node.address, NodeAccess()) as connection:
        assert connection.ask(start, wire.StartReplayResponse).error_code is ErrorCode.INVALID_REQUEST
    assert len(node.replay_server.counters().sessions) == 0


def test_max_replays_by_default_is_20_and_every_end_gives_its_slot_back(client, node):
    running = [client.replay(ReplayRequest("orders-0")) for _ in range(20)]
    assert refusal(client).code is ErrorCode.MAX_REPLAYS
    for replay in running[:3]:
        replay.close()
    for replay in [client.replay(ReplayRequest("orders-0")) for _ in range(3)]:
        assert len(take(replay, 100)) == 100
    assert refusal(client).code is ErrorCode.MAX_REPLAYS
    assert node.replay_server.counters().refused[ErrorCode.MAX_REPLAYS] == 2


def test_unauthorised_is_who_may_not_create_logs_either_and_learns_of_no_recording(world):
    node = world.node()
    world.leader(node).fill(10)
    node = world.again(node, allow=frozenset({"billing"}))
    client = world.client(node)
    with pytest.raises(ReplayRefused) as refused:
        client.recordings()
    assert refused.value.code is ErrorCode.UNAUTHORISED
    for recording in (1, 77):
        assert refusal(client, recording).code is ErrorCode.UNAUTHORISED
        with pytest.raises(ReplayRefused) as refused:
            client.stop_all(recording)
        assert refused.value.code is ErrorCode.UNAUTHORISED


def test_an_outbox_that_is_allowed_is_replayed_and_others_are_not_even_listed(world):
    node = world.node()
    mine, other = world.leader(node).fill(10), world.leader(node)
    node = world.again(node, allow=frozenset({str(mine.outbox)}))
    client = world.client(node)
    (only,) = client.recordings()
    assert (only.outbox_id, only.name) == (mine.outbox, "orders-0")
    assert len(list(client.replay(ReplayRequest("orders-0", length=TO_END)))) == 10
    assert refusal(client, 3 - only.recording_id).code is ErrorCode.UNAUTHORISED
    assert other.outbox != mine.outbox


def test_a_name_that_several_outboxes_have_is_asked_for_by_id(world, node, leader):
    world.leader(node).fill(3)
    client = world.client(node)
    refused = refusal(client)
    assert (refused.code, "name it by its id" in refused.why) == (ErrorCode.INVALID_REQUEST, True)
    sizes = {one.recording_id: one.stable_offset for one in client.recordings()}
    assert {len(list(client.replay(ReplayRequest(one, length=TO_END)))) for one in sizes} == {100, 3}


def test_connect_timeout_a_session_that_nobody_attaches_to_is_an_error_and_its_slot_is_free(world):
    """INIT: wait for the subscriber to attach, from the request on, else error and the slot is free."""
    node = world.node(replay={"connect_timeout_ms": 300, "max_sessions": 1})
    world.leader(node).fill(10)
    client = world.client(node)
    session_id = client.start_replay(ReplayRequest("orders-0"))
    until(lambda: len(node.replay_server.counters().sessions) == 0)
    with pytest.raises(ReplayRefused) as refused:
        client.attach(session_id)
    assert refused.value.code is ErrorCode.UNKNOWN_REPLAY
    assert len(take(client.replay(ReplayRequest("orders-0")), 10)) == 10


def test_the_time_to_attach_counts_from_the_request_on(world, monkeypatch):
    """5 s from the request: what a slow disk takes of it is not given again."""
    clock = StandingClock()
    node = world.node(replay={"connect_timeout_ms": 5_000}, clock=clock)
    world.leader(node).fill(10)
    client, look_up = world.client(node), Recordings.source

    def slowly(*arguments):
        clock.ms += 4_000
        return look_up(*arguments)

    monkeypatch.setattr(Recordings, "source", slowly)
    client.start_replay(ReplayRequest("orders-0"))
    for passed_ms, sessions in ((999, 1), (1, 0)):
        clock.ms += passed_ms
        for _ in range(2):  # each answer is behind a look of the server
            client.recordings()
        assert len(node.replay_server.counters().sessions) == sessions


@pytest.mark.parametrize(
    ("in_its_place", "code"), [("nothing", ErrorCode.UNKNOWN_RECORDING), ("a file", ErrorCode.INVALID_RECORDING)]
)
def test_a_log_that_vanishes_while_it_is_looked_up_is_unknown_and_one_that_can_not_be_read_is_invalid(
    world, node, leader, client, monkeypatch, in_its_place, code
):
    """INVALID_RECORDING with its reason; "there is none" is said only of what is not there."""
    place, look_up = world.root / "node" / str(leader.outbox) / "orders-0", Recordings.source
    (one,) = client.recordings()

    def changed(*arguments):
        found = look_up(*arguments)
        node.store.outbox(leader.outbox).close()
        place.rename(world.root / "away")
        if in_its_place == "a file":
            place.write_bytes(b"")
        return found

    monkeypatch.setattr(Recordings, "source", changed)
    refused = refusal(client, one.recording_id)
    assert (refused.code, str(place) in refused.why) == (code, code is ErrorCode.INVALID_RECORDING)
    assert node.replay_server.counters().refused == {code: 1}


def test_attach_needs_all_64_bits_and_takes_one_subscriber_even_from_another_client(world, node, client):
    session_id = client.start_replay(ReplayRequest("orders-0", position=90, length=TO_END))
    assert session_id >> 32 > 0
    stranger = world.client(node)
    for guess in (session_id ^ 1, session_id >> 32, session_id & 0xFFFF_FFFF):
        with pytest.raises(ReplayRefused) as refused:
            stranger.attach(guess)
        assert refused.value.code is ErrorCode.UNKNOWN_REPLAY
    replay = stranger.attach(session_id)
    with pytest.raises(ReplayRefused):
        client.attach(session_id)
    assert offsets(replay) == list(range(90, 100))
    ids = [client.start_replay(ReplayRequest("orders-0")) for _ in range(3)]
    assert [one >> 32 for one in ids] == sorted({one >> 32 for one in ids}), "serials rise"


def test_stop_is_idempotent_unknown_ids_are_fine_and_stop_all_ends_every_session(world, node, client):
    replays = [client.replay(ReplayRequest("orders-0")) for _ in range(3)]
    client.stop(replays[0].session_id)
    client.stop(replays[0].session_id)
    client.stop(12345)
    list(replays[0])
    assert replays[0].end_reason is ReplayEndReason.STOPPED
    assert client.stop_all("orders-0") == 2
    assert client.stop_all("orders-0") == 0
    for replay in replays[1:]:
        list(replay)
        assert replay.end_reason is ReplayEndReason.STOPPED
    until(lambda: len(node.replay_server.counters().sessions) == 0)


def test_a_subscriber_that_vanishes_frees_its_slot(node, client, connections):
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    connections[replay.session_id].close()  # as the system does for a process that is killed
    until(lambda: len(node.replay_server.counters().sessions) == 0)
    assert node.replay_server.counters().ended == {ReplayEndReason.SUBSCRIBER_GONE: 1}


class Raw:
    """A subscriber that sends what a test wants: credit by the byte."""

    def __init__(self, node, credit, **request):
        self.connection = NodeConnection(node.address, QUICK)
        asked = wire.StartReplayRequest(recording_id=1, **request)
        self.started = self.connection.ask(asked, wire.StartReplayResponse)
        assert self.started.error_code is ErrorCode.NONE
        attach = wire.AttachRequest(session_id=self.started.session_id, credit_bytes=credit)
        self.connection.ask(attach, wire.AttachResponse)
        self.call = self.connection.correlation_id

    def hear(self):
        return self.connection.event_of(self.call, WAIT_S)

    def give(self, count):
        credit = wire.Credit(session_id=self.started.session_id, bytes=count)
        self.connection.send_event(self.call, credit)


def test_without_credit_nothing_comes_but_heartbeats_and_credit_is_overdrawn_by_less_than_a_batch(node, client):
    raw = Raw(node, 0)
    for _ in range(3):
        beat = raw.hear()
        assert (beat.records, beat.start_offset, beat.tip_offset) == ((), 0, 100)
    raw.give(1)
    while not (data := raw.hear()).records:
        pass
    assert (data.start_offset, data.end_offset) == (0, 7), "a batch is never split, and more was not owed"
    assert raw.hear().records == ()
    raw.connection.close()


def test_credit_is_given_by_the_sessions_own_subscriber_only(node, client):
    """Another connection that knows the id can't have its memory filled."""
    raw, stranger = Raw(node, 0), Raw(node, 0)
    stranger.connection.send_event(stranger.call, wire.Credit(session_id=raw.started.session_id, bytes=1 << 20))
    stranger.give(1)
    while not stranger.hear().records:
        pass
    assert [raw.hear().records for _ in range(3)] == [()] * 3
    raw.connection.close()
    stranger.connection.close()


def heard_after(connection, data):
    """What a connection gets, after an answer has moved it to the replays, for these bytes; b"": it is hung up."""
    connection.ask(wire.DescribeRecordingsRequest(), wire.DescribeRecordingsResponse)
    connection.socket.sendall(data)
    return connection.socket.recv(100)


GARBAGE = {
    "no frame": b"GET / HTTP/1.1\r\n\r\n" * 9,
    "the beginning of a large request": frame_head((ApiKey.TRUNCATE, 0), 0, 9, bytes(900_000), 0)[:100],
    "an event of a node": b"".join(encode(wire.ReplayEnd(session_id=1, reason=ReplayEndReason.STOPPED, offset=1), 1)),
    "garbage behind a request": b"".join(encode(wire.StopReplayRequest(session_id=1), 9)) + b"?" * 99,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_who_sends_what_no_reader_sends_is_cut_off_and_nobody_else(node, client, leader, data):
    """A fault of one peer ends one connection."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    before = len(node.connections)
    with NodeConnection(node.address, QUICK) as connection:
        heard = heard_after(connection, data)
        while heard:  # the answers to what came before it
            heard = connection.socket.recv(100)
        until(lambda: len(node.connections) == before)
    leader.append(b"more")
    assert offsets(take(replay, 1)) == [100]


def test_a_leaders_request_over_a_readers_connection_is_refused(node, client):
    """It could hold up all sessions, which share a thread."""
    with NodeConnection(node.address, QUICK) as connection:
        connection.ask(wire.DescribeRecordingsRequest(), wire.DescribeRecordingsResponse)
        assert (
            connection.ask(AppendRecordsRequest(partitions=()), AppendRecordsResponse).error_code
            is ErrorCode.INVALID_REQUEST
        )
        assert connection.ask(wire.StopReplayRequest(), wire.StopReplayResponse).error_code is ErrorCode.NONE


def test_a_reader_that_went_before_its_session_was_started_holds_no_slot(node, client, monkeypatch):
    """Nobody knows the id, so nobody can attach: it does not take the time that there is for that."""
    begun, may_go, look_up = threading.Event(), threading.Event(), Recordings.source

    def slowly(*arguments):
        begun.set()
        assert may_go.wait(WAIT_S)
        return look_up(*arguments)

    monkeypatch.setattr(Recordings, "source", slowly)
    before = len(node.connections)
    with NodeConnection(node.address, QUICK) as connection:
        _, parts = connection.protocol.ask(wire.StartReplayRequest(recording_id=1))
        connection.socket.sendall(b"".join(parts))
        assert begun.wait(WAIT_S)
    until(lambda: len(node.connections) == before)
    may_go.set()
    until(lambda: node.replay_server.counters().ended == {ReplayEndReason.STOPPED: 1}, "the session waits for nobody")
    assert node.replay_server.counters().sessions == ()


def test_a_disk_error_is_told_by_its_name_and_text(world):
    """A refusal reaches the other side under its own name."""
    (world.root / "node" / ".pushrep_recordings").mkdir(parents=True)
    with pytest.raises(ReplayRefused, match="directory") as refused:
        world.client(world.node()).recordings()
    assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR


def test_at_the_tip_heartbeats_go_out_and_tell_how_far_it_is(node, client, leader):
    raw = Raw(node, 1 << 20, position_kind=wire.PositionKind.OFFSET, position=100)
    assert (raw.hear().records, raw.hear().tip_offset) == ((), 100)
    leader.append(b"new")
    while not (data := raw.hear()).records:
        pass
    assert (data.start_offset, data.end_offset, data.tip_offset) == (100, 101, 101)
    raw.connection.close()


def test_a_pause_gives_nothing_and_resume_goes_on(client, leader):
    replay = client.replay(ReplayRequest("orders-0"))
    replay.pause()
    assert [replay.poll() for _ in range(20)] == [[]] * 20
    leader.append(b"new")
    replay.resume()
    assert offsets(take(replay, 101)) == list(range(101))


def test_following_is_told_of_appends_as_they_come_without_gap_or_duplicate(client, leader):
    replay = client.replay(ReplayRequest("orders-0", position=90))
    writer = threading.Thread(target=leader.fill, args=(400, 3))
    writer.start()
    got = offsets(islice(replay, 310))
    writer.join()
    assert got == list(range(90, 400))


def test_a_moment_without_descriptors_ends_no_session(client, leader, monkeypatch):
    """faults B6: a log that can't be read for a shortage is looked at again, and nothing is left out."""
    left, read = iter(range(20)), LogSlices.read

    def read_after_a_while(*arguments):
        if next(left, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(*arguments)

    monkeypatch.setattr(LogSlices, "read", read_after_a_while)
    replay = client.replay(ReplayRequest("orders-0"))
    assert offsets(take(replay, 100)) == list(range(100))
    assert next(left, None) is None


@pytest.mark.parametrize(("bound", "reaches"), [("stable", 100), ("high_watermark", 100), ("written", 107)])
def test_a_session_goes_no_further_than_its_bound_and_on_when_it_has_passed(client, leader, bound, reaches):
    """A batch that crosses a bound waits until the bound has passed it."""
    leader.say(leader.batch([b"%d" % n for n in range(7)]), watermark=103, flush=True)
    replay = client.replay(ReplayRequest("orders-0", bound=bound))
    assert offsets(take(replay, reaches)) == list(range(reaches))
    assert client.tip_of("orders-0", bound) == (107 if bound == "written" else 103)
    leader.say(watermark=107)
    if reaches < 107:
        assert offsets(take(replay, 107 - reaches)) == list(range(reaches, 107))


def test_a_named_counter_bounds_and_freezes_when_it_closes(world):
    value = [10]
    node = world.node(replay_counters={"billed": lambda: value[0]})
    leader = world.leader(node).fill(30, per_batch=5)
    client = world.client(node)
    replay = client.replay(ReplayRequest("orders-0", bound="billed"))
    assert offsets(take(replay, 10)) == list(range(10))
    value[0] = 20
    assert offsets(take(replay, 10)) == list(range(10, 20))
    value[0] = None
    assert list(replay) == []
    assert (replay.end_reason, replay.position) == (ReplayEndReason.LIMIT_REACHED, 20)
    assert leader.end == 30


def test_n_records_wait_at_a_live_tip_and_end_at_a_stop(client, leader):
    replay = client.replay(ReplayRequest("orders-0", position=98, length=5))
    assert len(take(replay, 2)) == 2
    leader.append(b"one more")
    assert len(take(replay, 1)) == 1
    assert replay.end_reason is None
    leader.stop()
    assert list(replay) == []
    assert (replay.end_reason, replay.position) == (ReplayEndReason.LIMIT_REACHED, 101)


def test_the_end_of_a_stopped_recording_is_for_follow_only(world, node, client, leader):
    leader.stop()
    (one,) = client.recordings()
    assert (one.is_live, one.end_offset) == (False, 100)
    assert refusal(client, position=100, length=5).code is ErrorCode.INVALID_POSITION
    replay = client.replay(ReplayRequest("orders-0", position=100))
    leader.come(node.address)
    leader.append(b"again")
    assert offsets(take(replay, 1)) == [100]


def test_a_cut_below_ends_the_session_once_with_truncated_offset_and_epoch(world, node):
    leader = world.leader(node).fill(49)
    leader.fill(100, watermark=49)
    client = world.client(node)
    replay, far = (client.replay(ReplayRequest("orders-0", position=at, bound="written")) for at in (0, 20))
    take(replay, 100)
    take(far, 80)
    low = client.replay(ReplayRequest("orders-0"))
    take(low, 49)
    leader.cut(49)
    for one in (replay, far):
        with pytest.raises(ReplayTruncated) as told:
            list(one)
        assert (told.value.cut_offset, told.value.leader_epoch) == (49, 512)
        assert list(one) == []
        assert one.end_reason is ReplayEndReason.TRUNCATED
    until(lambda: node.replay_server.counters().ended.get(ReplayEndReason.TRUNCATED) == 2)
    leader.say(watermark=50)
    assert [record.value for record in take(low, 1)] == [b"other"], "who had not reached the cut goes on"


def test_who_resumes_over_another_history_is_told_truncated(world, node):
    """A client resumes with (offset, epoch before it), and a mismatch is TRUNCATED."""
    leader = world.leader(node).fill(49)
    leader.fill(100, watermark=49)
    replays = [world.client(node).replay(ReplayRequest("orders-0", bound="written")) for _ in range(2)]
    for replay in replays:
        take(replay, 100)
    node.stop()
    node = world.node(port=node.address.port)
    leader.come(node.address)
    leader.cut(49)
    with pytest.raises(ReplayTruncated) as shorter:
        list(islice(replays[0], 100))
    leader.fill(130)
    with pytest.raises(ReplayTruncated) as longer:
        list(islice(replays[1], 100))
    assert (shorter.value.cut_offset, longer.value.cut_offset) == (49, 49)


def test_a_cut_that_the_log_has_grown_over_between_two_looks_is_found_out(world, node):
    leader = world.leader(node).fill(49)
    leader.fill(100, watermark=49)
    sent = world.client(node).replay(ReplayRequest("orders-0", bound="written"))
    take(sent, 100)
    waiting = world.client(node).replay(ReplayRequest("orders-0", position=100, bound="written", epoch_before=256))
    server = node.replay_server
    held, may_go = threading.Event(), threading.Event()
    server.post(lambda: (held.set(), may_go.wait(WAIT_S)))  # the server is busy while the leader cuts and writes on
    assert held.wait(WAIT_S)
    leader.cut(49)
    leader.fill(130)
    may_go.set()
    for replay in (sent, waiting):
        with pytest.raises(ReplayTruncated) as told:
            list(islice(replay, 100))
        assert told.value.cut_offset == 49


def test_follow_survives_a_restart_of_the_writer_and_of_the_node(world, node, client, leader):
    replay = client.replay(ReplayRequest("orders-0"))
    got = take(replay, 100)
    leader.stop()
    leader.come(node.address)
    leader.fill(120)
    got += take(replay, 20)
    for end in (140, 160):
        node = world.again(node)
        leader.come(node.address)
        leader.fill(end)
        got += take(replay, 20)
    assert offsets(got) == list(range(160))
    assert replay.end_reason is None


@pytest.mark.parametrize(("length", "end"), [(60, 65), (TO_END, 100)])
def test_a_bounded_replay_resumes_and_gives_the_rest_of_what_was_asked(world, node, leader, connections, length, end):
    """n records and TO_END mean what they meant when they were asked first, however often the connection breaks."""
    client = world.client(node, replace(QUICK, credit_bytes=700))
    replay = client.replay(ReplayRequest("orders-0", 5, length))
    got, broken = [], 0
    for batch in replay.batches():
        got += batch.records()
        if len(got) < 40 and (connection := connections.pop(replay.session_id, None)) is not None:
            connection.close()
            leader.append(b"later")
            broken += 1
    assert broken
    assert offsets(got) == list(range(5, end))
    assert replay.end_reason is ReplayEndReason.LIMIT_REACHED


def test_who_does_not_want_to_come_again_hears_of_it_once(world, node, leader):
    client = world.client(node, NodeAccess(reconnect=False))
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    node.stop()
    with pytest.raises(ReplayFailed) as told:
        list(replay)
    assert told.value.code is ErrorCode.NODE_STOPPING
    assert (told.value.offset, list(replay)) == (100, [])


def test_a_node_that_never_comes_back_is_an_error_after_its_time_not_a_silent_stall(world, node, leader):
    client = world.client(node, NodeAccess(backoff_min_ms=1, backoff_max_ms=5, reconnect_for_ms=50))
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    node.stop()
    with pytest.raises(ReplayFailed, match="no way back"):
        list(replay)


def test_the_reader_checks_the_crc_and_damage_is_told_once(world, node, client, leader):
    path = min((world.root / "node" / str(leader.outbox) / "orders-0").glob("0*.log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    replay = client.replay(ReplayRequest("orders-0"))
    with pytest.raises(ReplayFailed) as told:
        take(replay, 100)
    assert told.value.code is ErrorCode.CORRUPT_MESSAGE
    assert (list(replay), replay.end_reason) == ([], ReplayEndReason.ERROR)


@pytest.mark.parametrize(
    ("segment", "at", "field", "value"),
    [
        (min, 16, "b", 3),
        (max, 0, ">q", 60),
        (min, 0, ">q", (1 << 63) - 3),
        (max, 8, ">i", 1 << 20),
        (min, 8, ">i", (1 << 31) - 13),
        (max, 23, ">i", 1000),
    ],
    ids=["magic", "base offset", "largest base offset", "length", "largest length", "last offset"],
)
def test_a_damaged_header_ends_it_there_and_is_not_taken_for_a_hole(world, segment, at, field, value):
    """Of a header only the last offset is under the CRC, and this scan does not check that CRC either."""
    node = world.node(config=LogConfig(preallocate_bytes=0, segment_bytes=20_000))
    leader = world.leader(node)
    for _ in range(60):
        leader.append(b"x" * 1000)
    path = segment((world.root / "node" / str(leader.outbox) / "orders-0").glob("0*.log"))
    data, position = bytearray(path.read_bytes()), 0
    for _ in range(3):
        position += BatchHeader.parse(data, position).size_bytes
    damaged = BatchHeader.parse(data, position).base_offset
    struct.pack_into(field, data, position + at, value)
    path.write_bytes(data)
    replay, got = world.client(node).replay(ReplayRequest("orders-0")), []
    with pytest.raises(ReplayFailed) as told:
        got.extend(record.offset for record in replay)  # 60 of them would be followed by a wait at the tip
    assert got == list(range(damaged))
    assert (told.value.code, told.value.offset, told.value.segment) == (
        ErrorCode.CORRUPT_MESSAGE,
        damaged,
        int(path.stem),
    )


def test_a_position_inside_of_damage_is_refused_when_the_batch_is_checked(world, node, client, leader):
    path = min((world.root / "node" / str(leader.outbox) / "orders-0").glob("0*.log"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert refusal(client, position=2).code is ErrorCode.CORRUPT_MESSAGE
    assert len(node.replay_server.counters().sessions) == 0


def test_a_slow_subscriber_is_stalled_after_its_time_and_comes_again_where_it_was(world):
    """No silent stall; and no subscriber, however slow, costs memory or its slot."""
    node = world.node(replay={"liveness_timeout_ms": 100}, config=LogConfig(preallocate_bytes=0))
    leader = world.leader(node)
    big = b"x" * 100_000
    for _ in range(200):
        leader.append(big)
    client = world.client(node, NodeAccess(credit_bytes=64 << 20))
    replay = client.replay(ReplayRequest("orders-0", length=200))
    until(lambda: len(node.replay_server.counters().sessions) == 0, "it was not given up")
    assert list(node.replay_server.counters().ended) == [ReplayEndReason.ERROR]
    assert offsets(replay) == list(range(200))
    with ReplayClient(str(node.address), node=NodeAccess(credit_bytes=64 << 20, reconnect=False)) as impatient:
        replay = impatient.replay(ReplayRequest("orders-0", length=200))
        until(lambda: len(node.replay_server.counters().sessions) == 0, "it was not given up")
        with pytest.raises(ReplayFailed):
            list(replay)


def test_counters_tell_per_session_and_node_what_went_and_what_is_behind(node, client, leader):
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    told = until(lambda: next((one for one in [node.replay_server.counters()] if one.records_sent == 100), None))
    (one,) = told.sessions
    assert (one.session_id, one.recording, one.position, one.lag) == (replay.session_id, 1, 100, 0)
    assert one.bytes_sent == told.bytes_sent > 100 * 46
    assert told.sessions_max == 80
    replay.close()
    assert (len(node.replay_server.counters().sessions), node.replay_server.counters().records_sent) == (0, 100)


def test_the_client_of_a_node_and_of_its_directory_tell_the_same_recordings(world, node, client, leader):
    (over_network,) = client.recordings()
    with ReplayClient(world.root / "node" / str(leader.outbox)) as beside:
        (local,) = beside.recordings()
    for name in ("name", "log_id", "start_offset", "stable_offset", "end_offset"):
        assert getattr(over_network, name) == getattr(local, name)
