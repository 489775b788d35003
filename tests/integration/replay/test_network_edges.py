"""Replays and deletions where two things meet: a deletion and a leader, a start and a cut, an end and a crash."""

import shutil
from contextlib import closing
from dataclasses import replace
from itertools import count
from uuid import uuid4

import pytest

from pushrep.election.grants import Member
from pushrep.env.filesystem import RealFilesystem
from pushrep.log.directory_files import CheckpointFile, encode_checkpoint, read_checkpoint, read_partition_metadata
from pushrep.log.reader import LogSlices
from pushrep.replay import (
    TO_END,
    Catalogue,
    RecordingState,
    ReplayEndReason,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
)
from pushrep.replay import events as e
from pushrep.replay.remote import RemoteSession
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.errors import Refusal
from pushrep.replicate.replay_recordings import remove_files
from pushrep.replicate.replay_server import ReplayServer, ServedSession
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse
from tests.integration.replay.conftest import QUICK, WAIT_S, Stubborn, offsets, take, until


@pytest.mark.parametrize("is_started_again", [False, True])
def test_an_interrupted_deletion_is_not_finished_once_a_grant_relies_on_the_log(
    world, node, client, leader, is_started_again
):
    """Delete is refused for a log whose newest grant lists this node; so it is after a crash, however it was begun."""
    leader.stop()
    (one,) = client.recordings()
    node.stop()
    Catalogue.open(world.root / "node").deleted(one.recording_id)
    node = world.node(port=node.address.port, filesystem=Stubborn())
    leader.come(node.address, is_refused=True)
    mine = node.store.outbox(leader.outbox).directory_id
    leader.grant(Member(0, "elsewhere:1"), Member(1, str(node.address), directory_id=mine))
    if is_started_again:
        node = world.again(node)
    again = world.client(node)
    (back,) = again.recordings()
    assert back.recording_id > one.recording_id
    leader.come(node.address)
    leader.fill(120)
    leader.say(end_session_reason=0)
    assert offsets(again.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(120))
    entry = Catalogue.open(world.root / "node").get(one.recording_id)
    assert (entry.state, entry.is_removing) == (RecordingState.DELETED, False)


@pytest.mark.parametrize("is_started_again", [False, True])
def test_nobody_gets_the_name_of_a_deleted_recording_before_its_files_are_gone(world, is_started_again):
    """What a leader writes under the name is never removed by a deletion that was asked for before."""
    disk = Stubborn()
    node = world.node(filesystem=disk)
    leader = world.leader(node).fill(100)
    leader.stop()
    client = world.client(node)
    (one,) = client.recordings()
    with pytest.raises(ReplayRefused, match="tried again"):
        client.delete(one.recording_id).wait()
    if is_started_again:
        node = world.again(node, filesystem=disk)
    leader.come(node.address, is_refused=True)
    assert world.client(node).recordings() == [], "a log that is being removed was listed as a new recording"
    disk.keeps = False
    until(lambda: leader.describe().error_code is ErrorCode.NONE, "the deletion was not tried again for its leader")
    world.leader(node, leader.tp, outbox=leader.outbox, epoch=512).fill(5).stop()
    client = world.client(world.again(node))
    (again,) = client.recordings()
    assert again.recording_id > one.recording_id
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(5))


def test_a_deletion_waits_while_another_process_has_the_directory(node, client, leader):
    """A service that is promoted there opens all its logs: their files may not go under it."""
    leader.stop()
    (one,) = client.recordings()
    with node.store.outbox(leader.outbox).hand_over() as directory:
        with pytest.raises(ReplayRefused, match="handed over"):
            client.delete(one.recording_id).wait()
        assert (directory / "orders-0").exists(), "the files of a log that another process may have open were removed"
    assert client.recordings() == []
    assert not (directory / "orders-0").exists(), "the deletion was forgotten"


def test_a_log_that_vanished_counts_as_lost_after_another_of_its_outbox_was_deleted(world, node, client, leader):
    """Only what was deleted by request may be missing without being a loss."""
    other = world.leader(node, TopicIdPartition(uuid4(), "orders", 1), outbox=leader.outbox).fill(50)
    for one in (leader, other):
        one.stop()
    node = world.again(node)
    shutil.rmtree(world.root / "node" / str(leader.outbox) / "orders-1")
    client.delete("orders-0").wait()
    with pytest.raises(Refusal, match="orders-1 is gone: it held records up to offset 50"):
        node.store.outbox(leader.outbox).replica(other.tp)


def test_a_deletion_that_removed_all_files_and_no_more_leaves_no_loss_behind(world, node, client, leader):
    """Its checkpoint says how far the log went: it has to go, too, if the node was killed before."""
    leader.stop()
    (one,) = client.recordings()
    node.stop()
    Catalogue.open(world.root / "node").deleted(one.recording_id)
    shutil.rmtree(world.root / "node" / str(leader.outbox) / "orders-0")
    node = world.node(port=node.address.port)
    assert world.client(node).recordings() == []
    with pytest.raises(Refusal, match="no log orders-0 here"):
        node.store.outbox(leader.outbox).replica(leader.tp)


class Crash(BaseException):
    pass


class CrashingAfter(RealFilesystem):
    """A file system whose process is killed after so many files were removed."""

    def __init__(self, removals):
        self.left = removals

    def remove(self, path):
        if self.left == 0:
            raise Crash
        self.left -= 1
        super().remove(path)


@pytest.mark.parametrize("removals", [1, 2])
def test_no_other_log_begins_among_the_files_of_an_interrupted_deletion(world, node, client, leader, removals):
    """After a crash the directory is a shorter log, which keeps its id until the last file is removed."""
    leader.stop()
    client.recordings()
    node.stop()
    place = world.root / "node" / str(leader.outbox) / "orders-0"
    segments = sorted(path.name for path in place.glob("*.log"))
    with pytest.raises(Crash):
        remove_files(CrashingAfter(removals), place)
    left = sorted(path.name for path in place.glob("*.log"))
    assert left == segments[: len(segments) - removals]
    assert read_partition_metadata(place) == leader.tp.topic_id
    node = world.node(port=node.address.port)
    asked = DescribeLogRequest(outbox_id=leader.outbox, create=True, partitions=(replace(leader.tp, topic_id=uuid4()),))
    with closing(ReplicaClient(node.address)) as another:
        assert another.ask(asked, DescribeLogResponse).logs[0].error_code is ErrorCode.INCONSISTENT_TOPIC_ID


def test_to_end_asked_again_of_a_node_whose_watermark_fell_back_gives_all_that_was_recorded_then(world, node, leader):
    """TO_END means the end when the request was handled first; a node that crashed may have an older watermark."""
    client = world.client(node, replace(QUICK, credit_bytes=700))
    replay = client.replay(ReplayRequest("orders-0", 0, TO_END))
    batches = iter(replay.batches())
    got = [record for _ in range(3) for record in next(batches).records()]
    assert len(got) == 21
    leader.close()
    node.stop()
    path = world.root / "node" / str(leader.outbox) / CheckpointFile.HIGH_WATERMARK.value
    assert read_checkpoint(path.parent, CheckpointFile.HIGH_WATERMARK) == {"orders-0": 100}
    path.write_bytes(encode_checkpoint({"orders-0": 63}))
    for name in (".pushrep_published", ".pushrep_cleanshutdown"):  # its machine crashed
        (path.parent / name).unlink()
    node = world.node(port=node.address.port)
    for batch in batches:
        got += batch.records()
        if got[-1].offset == 62:
            leader.come(node.address)
    assert offsets(got) == list(range(100))
    assert replay.end_reason is ReplayEndReason.LIMIT_REACHED


def test_a_start_that_a_cut_overtakes_is_answered_and_holds_no_lease(world, node, client, leader, monkeypatch):
    """No silent stall: the client gets an answer even if the session ends before its log is open."""
    leader.stop()
    keep = ReplayServer.keep

    def kept(server, served):
        keep(server, served)
        server.on_disk(lambda: server.post_and_wait(served.source.recording, e.Truncated(10, 256)))

    monkeypatch.setattr(ReplayServer, "keep", kept)
    with pytest.raises(ReplayRefused) as refused:
        world.client(node, replace(QUICK, request_timeout_ms=WAIT_S * 1000)).replay(ReplayRequest("orders-0", 50))
    assert refused.value.code is ErrorCode.TRUNCATED
    assert client.purge("orders-0", 95) > 50
    assert len(node.replay_server.counters().sessions) == 0


class Running:
    """A clock that goes on by a few ms whenever it is looked at."""

    def __init__(self):
        self.ms = count(0, 3)

    def wall_ms(self):
        return 1_700_000_000_000 + next(self.ms)

    def monotonic_ms(self):
        return next(self.ms)


def test_a_batch_that_never_comes_to_its_place_ends_the_session_by_name(world, monkeypatch):
    """No silent stall: it is looked for a while, because a cut takes a moment, and then it is an error."""
    patient = {"heartbeat_ms": 60_000, "liveness_timeout_ms": 3_600_000, "connect_timeout_ms": 3_600_000}
    node = world.node(clock=Running(), replay=patient)
    world.leader(node).fill(100)
    looks = []
    monkeypatch.setattr(LogSlices, "read", lambda *_: looks.append(1) and None)
    with pytest.raises(ReplayFailed, match="no header of a batch is in its place at offset 30") as told:
        list(world.client(node).replay(ReplayRequest("orders-0", 30, 5)))
    assert told.value.code is ErrorCode.CORRUPT_MESSAGE
    assert len(looks) > 10, "it was looked for only a few times"


@pytest.fixture
def fails_at(monkeypatch):
    """A fault of the program: events of these classes can't be handled by a session."""

    def fails(*classes):
        handle = ServedSession.handle

        def handled(served, event):
            assert not isinstance(event, classes), "a fault"
            return handle(served, event)

        monkeypatch.setattr(ServedSession, "handle", handled)

    return fails


def test_a_fault_of_a_session_is_answered_to_whoever_cuts_its_log_and_holds_up_nobody(node, leader, client, fails_at):
    leader.stop()
    running = client.replay(ReplayRequest("orders-0"))
    fails_at(e.Truncated, e.Stop)
    with pytest.raises(ReplayRefused) as told:
        client.truncate("orders-0", 49)
    assert told.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    with pytest.raises(AssertionError, match="a fault"):
        node.stop_replay(running.session_id, "somebody")
    assert [one.stable_offset for one in client.recordings()] == [100], "the sessions were not told, and it was cut"


def test_a_deletion_goes_on_after_a_fault_of_a_session(world, leader, client, fails_at):
    """It is marked as deleted by then: nobody can ask for it again."""
    leader.stop()
    running = client.replay(ReplayRequest("orders-0"))
    take(running, 100)
    fails_at(e.Deleted)
    with pytest.raises(ReplayRefused) as told:
        client.delete("orders-0", force=True)
    assert told.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert client.recordings() == []
    assert not (world.root / "node" / str(leader.outbox) / "orders-0").exists(), "its files stay until the next start"


def test_n_records_end_at_a_stop_that_came_while_the_connection_was_broken(client, leader, connections):
    """n waits at a live tip and ends at a stop, however often it had to come again."""
    replay = client.replay(ReplayRequest("orders-0", 90, 50))
    got = take(replay, 10)
    connections[replay.session_id].close()
    leader.stop()
    got += list(replay)
    assert offsets(got) == list(range(90, 100))
    assert replay.end_reason is ReplayEndReason.LIMIT_REACHED


def test_who_comes_again_too_late_for_its_new_session_comes_once_more(client, leader, connections, monkeypatch):
    """A client that is stopped between the two calls: its session was never attached to, and sent nothing."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    attach, late = RemoteSession.attach, []

    def attach_late(session, connection, session_id):
        if not late:
            late.append(session_id)
            client.stop(session_id)
        attach(session, connection, session_id)

    monkeypatch.setattr(RemoteSession, "attach", attach_late)
    connections[replay.session_id].close()
    leader.append(b"new")
    assert offsets(take(replay, 1)) == [100]
    assert (len(late), replay.end_reason) == (1, None)


def test_who_attaches_by_the_id_alone_is_where_the_session_is(world, client, node):
    """`position` is the offset from which another replay would continue, even without records."""
    other = world.client(node)
    ended = other.attach(client.start_replay(ReplayRequest("orders-0", 53, 0)))
    assert (list(ended), ended.position) == ([], 53)
    following = other.attach(client.start_replay(ReplayRequest("orders-0", 100)))
    until(lambda: following.poll() == [] and following.position == 100)
    part = other.attach(client.start_replay(ReplayRequest("orders-0", 53, 20)))
    assert (offsets(part), part.position) == (list(range(53, 73)), 73)


@pytest.mark.parametrize("rate", [0, -1])
def test_a_bad_rate_is_refused_by_a_node_as_by_a_directory(client, rate):
    with pytest.raises(ReplayRefused) as refused:
        client.replay(ReplayRequest("orders-0", max_bytes_per_s=rate))
    assert refused.value.code is ErrorCode.INVALID_REQUEST
