"""Events that coincide: a leader and a deletion, a cut and a replay to the end."""

import threading
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import pytest

from pushrep.election.grants import Member
from pushrep.log import SegmentLog
from pushrep.replay import TO_END, NodeUnreachable, RecordingState, ReplayEndReason, ReplayRefused, ReplayRequest
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.replay_recordings import Recordings
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse
from tests.integration.replay.conftest import QUICK, WAIT_S, offsets, until


@pytest.fixture
def between(monkeypatch):
    """Have something happen the next time that a method of the node's recordings is called, before it does its work."""
    return partial(have_between, monkeypatch)


def have_between(monkeypatch, name, what):
    original, happened = getattr(Recordings, name), []

    def called(*args, **more):
        if not happened:
            happened.append(name)
            what()
        return original(*args, **more)

    monkeypatch.setattr(Recordings, name, called)
    return happened


@pytest.mark.parametrize("by", ["grant", "session"])
def test_delete_is_refused_for_a_leader_that_came_after_the_first_look(node, client, leader, between, by):
    """Delete is refused for a log whose newest grant lists this node as a member, or that a leader writes."""
    leader.stop()

    def come():
        leader.come(node.address)
        if by == "grant":
            leader.grant(Member(0, "elsewhere:1"), Member(1, str(node.address)))
            leader.say(end_session_reason=0)

    happened = between("deleted", come)
    with pytest.raises(ReplayRefused) as refused:
        client.delete("orders-0")
    assert (refused.value.code, happened) == (ErrorCode.RECORDING_IN_USE, ["deleted"])
    if by == "grant":
        leader.come(node.address)
    leader.fill(120)
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(120))
    assert client.recordings()[0].state is RecordingState.VALID


def test_a_leader_that_comes_while_a_recording_is_deleted_is_acknowledged_nothing_and_begins_anew(
    world, node, client, leader, between
):
    """State DELETED first, files after: nothing is appended in between that would go with them."""
    leader.stop()
    (one,) = client.recordings()
    asked = DescribeLogRequest(outbox_id=leader.outbox, create=True, partitions=(leader.tp,))
    answers = []

    def come():
        with closing(ReplicaClient(node.address)) as another:
            answers.append(another.ask(asked, DescribeLogResponse).logs[0].error_code)

    happened = between("remove", come)
    assert client.delete("orders-0").wait() > 0
    assert (happened, answers) == (["remove"], [ErrorCode.KAFKA_STORAGE_ERROR])
    world.leader(node, leader.tp, outbox=leader.outbox, epoch=512).fill(5)
    (again,) = client.recordings()
    assert again.recording_id > one.recording_id
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(5))


def held_up(world, node):
    """A replay to the end that has had its first batches and waits for its reader, and what it gave."""
    client = world.client(node, replace(QUICK, credit_bytes=700))
    replay = client.replay(ReplayRequest("orders-0", 0, TO_END))
    batches = iter(replay.batches())
    return replay, batches, [record for _ in range(3) for record in next(batches).records()]


def test_to_end_ends_at_a_cut_that_a_leader_made_above_it(world, node):
    """TO_END is up to what is recorded when the request is handled: what was cut of that is not waited for."""
    leader = world.leader(node).fill(63, per_batch=7)
    leader.fill(100, per_batch=7, watermark=63)
    client = world.client(node, replace(QUICK, credit_bytes=700))
    replay = client.replay(ReplayRequest("orders-0", 0, TO_END, bound="written"))
    batches = iter(replay.batches())
    got = list(next(batches).records())
    leader.epoch_before = leader.epoch
    leader.cut(70)
    for batch in batches:
        got += batch.records()
    assert offsets(got)[:70] == list(range(70))
    assert replay.end_reason is ReplayEndReason.LIMIT_REACHED


def test_to_end_of_a_log_that_was_cut_while_the_node_was_down_ends_where_it_ends_now(world, node, leader):
    """The client does not retry for minutes: no wait restores the records that were cut."""
    replay, batches, got = held_up(world, node)
    leader.stop()
    node.stop()
    with SegmentLog.open(world.root / "node" / str(leader.outbox) / "orders-0", has_replicas=True) as log:
        cut = next(log.batches(60, 61)).header.base_offset
        log.truncate_to(cut, force=True)
    node = world.node(port=node.address.port)
    for batch in batches:
        got += batch.records()
    assert offsets(got) == list(range(cut))
    assert replay.end_reason is ReplayEndReason.LIMIT_REACHED
    until(lambda: len(node.replay_server.counters().sessions) == 0, "slots always come back")


def values(client):
    return [record.value for record in client.replay(ReplayRequest("orders-0", length=TO_END))]


def test_a_recording_that_begins_anew_under_the_name_of_a_deleted_one_is_given_and_not_the_old_files(
    world, node, client, leader
):
    """The recording does not exist any more: the files that a session of the deleted one had open are not used."""
    assert len(values(client)) == 100
    leader.stop()
    client.delete("orders-0").wait()
    world.leader(node, leader.tp, outbox=leader.outbox, epoch=512).append(b"new")
    assert values(client) == [b"new"]


def test_a_log_that_was_cut_and_grew_again_while_nobody_read_it_is_given_as_it_is_now(world, node):
    """The segments above the cut went, and others of the same name came."""
    leader = world.leader(node).fill(100)
    leader.say(watermark=100)
    client = world.client(node)
    before = values(client)
    leader.stop()
    end = client.truncate("orders-0", 20)
    leader.end = leader.start_offset = end
    leader.watermark, leader.epoch_before, leader.epoch = end, 256, 512
    leader.come(node.address)
    while leader.end < 120:
        leader.append(*[b"new %03d" % n + b"." * 40 for n in range(leader.end, leader.end + 7)])
    now = values(client)
    assert now[:end] == before[:end]
    assert [value[:7] for value in now[end:]] == [b"new %03d" % n for n in range(end, leader.end)]


def test_a_connection_that_is_handed_over_while_the_node_stops_is_closed(world, node, leader, client, monkeypatch):
    """It stayed open, with its descriptor, until the garbage collector came."""
    client.recordings()
    server, posted = node.replay_server, []
    reached, free = threading.Event(), threading.Event()
    server.post(lambda: (reached.set(), free.wait(WAIT_S)))
    assert reached.wait(WAIT_S)
    post = server.post
    monkeypatch.setattr(server, "post", lambda job: (post(job), posted.append(job)))
    other = world.client(node)

    def ask():
        with suppress(NodeUnreachable):
            other.recordings()

    asking = threading.Thread(target=ask)
    stopping = threading.Thread(target=node.stop)
    for thread, count in ((asking, 1), (stopping, 2)):
        thread.start()
        until(lambda count=count: len(posted) == count)
    free.set()
    stopping.join()
    asking.join()
    assert len(node.connections) == 0
