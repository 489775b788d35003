"""Recordings over the network: extend, truncate, purge, delete; who is refused, what is left, what comes later."""

import json
import shutil
import threading
from uuid import UUID, uuid4

import pytest

from pushrep.cli import main as cli_main
from pushrep.election.grants import Member
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import LogConfig, SegmentLog
from pushrep.records import BatchHeader, RecordBatch, encode_batch
from pushrep.replay import (
    TO_END,
    Catalogue,
    RecordingState,
    ReplayClient,
    ReplayEndReason,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplayTruncated,
)
from pushrep.replay.catalogue import FoundLog
from pushrep.replay.node_connection import NodeConnection
from pushrep.replicate.election_state import find_election_state
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import QUICK, Stubborn, offsets, open_log, take, until

IN_USE = ErrorCode.RECORDING_IN_USE


def refused(call, *args, **more):
    with pytest.raises(ReplayRefused) as told:
        call(*args, **more)
    return told.value.code


@pytest.fixture
def stopped(leader):
    """A recording without a leader: its leader has closed the log, and no grant names this node."""
    leader.stop()
    return leader


def directory(world, leader):
    return world.root / "node" / str(leader.outbox) / "orders-0"


def test_extend_a_stopped_log_goes_on_at_its_end_only_with_a_higher_epoch(world, node, client, stopped):
    following = client.replay(ReplayRequest("orders-0", position=100))
    for epoch in (255, 256):
        assert refused(client.extend, "orders-0", epoch) is ErrorCode.FENCED_LEADER_EPOCH
    assert client.extend("orders-0", 512) == 100
    assert client.recordings()[0].is_live
    assert refused(client.extend, "orders-0", 768) is IN_USE, "it is not stopped any more"
    stopped.epoch, stopped.start_offset = 512, 100
    stopped.come(node.address)
    stopped.append(b"more")
    assert offsets(take(following, 1)) == [100]


def test_extend_goes_on_above_the_newest_grant_too(node, client, leader):
    """No record of it came here, but others may have some."""
    leader.say(end_session_reason=0)
    leader.epoch = 768
    leader.grant(Member(0, "elsewhere:1"), Member(2, "elsewhere:2"))
    for epoch in (512, 768):
        assert refused(client.extend, "orders-0", epoch) is ErrorCode.FENCED_LEADER_EPOCH
    assert client.extend("orders-0", 1024) == 100


def test_extend_goes_on_at_an_end_that_is_on_disk(world):
    """Else a power cut would leave the log shorter than where its next epoch begins."""
    node = world.node(config=LogConfig(preallocate_bytes=0, flush_ms=3_600_000))
    leader = world.leader(node).fill(10)
    leader.fill(17, flush=False)
    leader.say(flush=False, end_session_reason=0)
    assert open_log(node, leader.tp).flushed_offset == 10
    assert world.client(node).extend("orders-0", 512) == 17
    assert open_log(node, leader.tp).flushed_offset == 17


def test_truncate_tells_the_sessions_before_it_cuts_and_those_that_began_meanwhile(node, client, stopped):
    recordings, told = node.replay_server.recordings, []
    notify = recordings.notify_sessions

    def noted(recording, event):
        told.append((event.offset, event.leader_epoch, open_log(node, stopped.tp).log_end_offset))
        return notify(recording, event)

    recordings.notify_sessions = noted
    assert client.truncate("orders-0", 50) == 49
    assert told == [(49, 256, 100), (49, 256, 49)], "cut, epoch, and where the log ended then"


def test_truncate_stops_replays_above_the_cut_first_and_leaves_those_below(world, node, client, stopped):
    above = client.replay(ReplayRequest("orders-0"))
    take(above, 100)
    below = client.start_replay(ReplayRequest("orders-0", length=10))
    assert client.truncate("orders-0", 50) == 49, "the base of the batch that holds it"
    with pytest.raises(ReplayTruncated) as told:
        list(above)
    assert (told.value.cut_offset, told.value.leader_epoch) == (49, 256)
    assert len(list(client.attach(below))) == 10
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(49))
    assert refused(client.truncate, "orders-0", 50) is ErrorCode.INVALID_POSITION
    with SegmentLog.open_reader(directory(world, stopped)) as reader:
        assert reader.log_end_offset == 49


@pytest.mark.parametrize("keep", [False, True])
def test_a_cut_erases_all_above_it_or_keeps_all_of_it_for_restore(world, node, client, stopped, keep):
    log = directory(world, stopped)
    assert client.truncate("orders-0", 23, keep=keep) == 21
    kept = sorted(log.glob("*.cut"), key=lambda path: BatchHeader.parse(path.read_bytes()).base_offset)
    assert bool(kept) is keep
    assert sorted(path.name for path in log.glob("*.log")) == ["0" * 20 + ".log"]
    node.stop()
    for path in kept:
        assert cli_main.run(["log", "restore", str(log.parent), "orders-0", str(path)]) == 0
    again = world.client(world.again(node)).replay(ReplayRequest("orders-0", length=TO_END))
    assert [record.value[:6] for record in again] == [b"%06d" % n for n in range(100 if keep else 21)]


def test_truncate_inside_of_the_batch_that_the_log_start_lies_in_is_refused_and_says_where_it_may_be_cut(
    world, node, client, leader
):
    leader.say(log_start_offset=10)
    leader.stop()
    assert client.recordings()[0].start_offset == 10
    with pytest.raises(ReplayRefused, match="cut at 14 or above") as told:
        client.truncate("orders-0", 12)
    assert told.value.code is ErrorCode.INVALID_POSITION
    assert client.truncate("orders-0", 14) == 14
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(10, 14))


def test_a_cut_never_waits_for_a_lease(client, stopped):
    sleeping = client.replay(ReplayRequest("orders-0"))
    sleeping.pause()
    assert client.truncate("orders-0", 7) == 7


def test_purge_removes_whole_segments_and_waits_for_the_lease_of_a_session(world, node, client, stopped):
    """A session holds a lease on its segments: retention and purge wait for it."""
    before = sorted(directory(world, stopped).glob("*.log"))
    session_id = client.start_replay(ReplayRequest("orders-0", position=10, length=90))
    assert refused(client.purge, "orders-0", 95) is IN_USE
    assert len(list(client.attach(session_id))) == 90
    until(lambda: len(node.replay_server.counters().sessions) == 0)
    start = client.purge("orders-0", 95)
    left = sorted(directory(world, stopped).glob("*.log"))
    assert (len(left) < len(before), int(left[0].stem)) == (True, start)
    assert start <= 95
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END)))[0] == start
    with pytest.raises(ReplayRefused) as told:
        client.replay(ReplayRequest("orders-0", position=start - 1))
    assert (told.value.code, told.value.start) == (ErrorCode.INVALID_POSITION, start)


def test_delete_is_told_when_the_files_are_gone_and_the_id_is_never_given_again(world, node, client, stopped):
    """State DELETED first, files after; asynchronous, with a completion signal."""
    size = sum(path.stat().st_size for path in directory(world, stopped).glob("*.log"))
    (one,) = client.recordings()
    assert client.delete("orders-0").wait() > size > 0
    assert not directory(world, stopped).exists()
    assert client.recordings() == []
    assert refused(client.delete, one.recording_id) is ErrorCode.UNKNOWN_RECORDING
    world.leader(node, stopped.tp, outbox=stopped.outbox, epoch=512).fill(5)
    (again,) = client.recordings()
    assert again.recording_id > one.recording_id
    state = find_election_state(node.directory / str(stopped.outbox), REAL_FILESYSTEM)[1]
    assert state.unfilled == {}, "what was deleted is no loss"
    assert len(list(client.replay(ReplayRequest("orders-0", length=TO_END)))) == 5


@pytest.mark.parametrize("before", [101, 10_000])
def test_a_purge_of_what_is_not_there_is_refused_with_the_range(client, stopped, before):
    with pytest.raises(ReplayRefused, match="100") as told:
        client.purge("orders-0", before)
    assert told.value.code is ErrorCode.INVALID_POSITION
    assert client.recordings()[0].start_offset == 0


def test_a_deletion_whose_files_could_not_be_removed_says_so_and_is_finished_at_the_next_start(world):
    """State DELETED first, files after."""
    disk = Stubborn()
    node = world.node(filesystem=disk)
    leader = world.leader(node).fill(100)
    leader.stop()
    client = world.client(node)
    deletion = client.delete("orders-0")
    with pytest.raises(ReplayRefused, match="Input/output error") as told:
        deletion.wait()
    assert told.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    assert directory(world, leader).exists()
    disk.keeps = False
    node = world.again(node)
    assert world.client(node).recordings() == []
    assert not directory(world, leader).exists()


def test_delete_refuses_while_replays_run_unless_forced_and_then_they_are_told(client, stopped):
    running = client.replay(ReplayRequest("orders-0"))
    take(running, 100)
    assert refused(client.delete, "orders-0") is IN_USE
    assert client.delete("orders-0", force=True).wait() > 0
    with pytest.raises(ReplayFailed) as told:
        list(running)
    assert told.value.code is ErrorCode.RECORDING_DELETED
    assert (running.end_reason, list(running)) == (ReplayEndReason.RECORDING_DELETED, [])


def test_a_deletion_that_a_crash_interrupted_is_finished_at_the_next_start(world, node, client, stopped):
    (one,) = client.recordings()
    node.stop()
    catalogue = Catalogue.open(world.root / "node")
    catalogue.deleted(one.recording_id)
    node = world.node(port=node.address.port)
    assert world.client(node).recordings() == []
    assert not directory(world, stopped).exists()
    entry = Catalogue.open(world.root / "node").get(one.recording_id)
    assert (entry.state, entry.is_removing) == (RecordingState.DELETED, False)


def test_a_log_that_vanished_and_comes_back_is_no_deletion_and_keeps_its_files(world, node, client, stopped):
    """Only what was deleted by request is removed: an operator may have moved a directory away for a while."""
    (one,) = client.recordings()
    node.stop()
    away = world.root / "away"
    directory(world, stopped).rename(away)
    node = world.again(node)
    assert world.client(node).recordings() == []
    node.stop()
    away.rename(directory(world, stopped))
    (back,) = world.client(world.again(node)).recordings()
    assert (back.stable_offset, back.recording_id > one.recording_id) == (100, True)


@pytest.mark.parametrize("by", ["grant", "session"])
def test_extend_truncate_and_delete_are_refused_for_a_members_log_and_purge_goes_no_higher_than_its_leaders_start(
    world, node, client, leader, by
):
    if by == "grant":
        leader.grant(Member(0, "elsewhere:1"), Member(1, str(node.address)))
        leader.say(end_session_reason=0)
    assert refused(client.extend, "orders-0", 512) is IN_USE
    assert refused(client.truncate, "orders-0", 100) is IN_USE
    assert refused(client.delete, "orders-0", force=True) is IN_USE
    assert client.purge("orders-0", 95) == 0
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(100))


def test_a_log_whose_newest_grant_names_others_only_is_kept_as_one_likes(node, client, leader):
    leader.grant(Member(0, "elsewhere:1"), Member(2, "elsewhere:2"))
    leader.stop()
    assert client.truncate("orders-0", 49) == 49


def test_keeping_house_is_for_whom_allow_names(world, node, leader):
    leader.stop()
    client = world.client(world.again(node, allow=frozenset({"billing"})))
    for call in (lambda: client.truncate(1, 0), lambda: client.delete(1), lambda: client.purge(1, 5)):
        assert refused(call) is ErrorCode.UNAUTHORISED


def test_retention_that_comes_first_is_told_where_there_is_no_lease_to_wait_for(world, node, client, stopped):
    """Retention continues once a session is over; a later request gets the new range."""
    take(client.replay(ReplayRequest("orders-0", length=5)), 5)
    until(lambda: len(node.replay_server.counters().sessions) == 0)
    start = client.purge("orders-0", 100)
    assert [one.start_offset for one in client.recordings()] == [start]


def test_recordings_are_listed_by_topic_from_an_id_and_by_pages(world, node, client, leader, capfd):
    """Of a node, and of the directory of an outbox there; a deleted one takes no place on a page."""
    for topic, partition in (("rates", 0), ("orders", 1), ("rates", 1)):
        world.leader(node, TopicIdPartition(uuid4(), topic, partition), outbox=leader.outbox).stop()
    client.recordings()
    world.leader(node, TopicIdPartition(uuid4(), "orders", 2), outbox=leader.outbox).stop()
    client.delete("rates-0").wait()
    by_id = {one.recording_id: one.name for one in client.recordings()}
    assert len(by_id) == 4
    with ReplayClient(world.root / "node" / str(leader.outbox)) as directory:
        for where in (client, directory):
            assert [one.name for one in where.recordings()] == ["orders-0", "orders-1", "orders-2", "rates-1"]
            assert [one.name for one in where.recordings("orders")] == ["orders-0", "orders-1", "orders-2"]
            assert where.recordings("nothing") == []
    first, found = 0, []
    while page := client.recordings(from_id=first, limit=1):
        found += page
        first = page[-1].recording_id + 1
    assert {one.recording_id: one.name for one in found} == by_id
    assert [one.recording_id for one in found] == sorted(by_id)
    newest = max(by_id)
    assert [one.recording_id for one in client.recordings("orders", from_id=newest, limit=5)] == [newest]
    assert cli_main.run(["recording", "list", str(node.address), "--topic", "orders", "--limit", "2", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capfd.readouterr().out.splitlines()] == [
        name for name in (by_id[one] for one in sorted(by_id)) if name.startswith("orders")
    ][:2]


def test_a_page_of_recordings_has_a_thousand_at_most(world):
    """Whatever was asked for: an answer of any size would be held in memory, and sent ahead of the replays' blocks."""
    there = [FoundLog(TopicIdPartition(uuid4(), "orders", n), 0) for n in range(1_001)]
    (world.root / "node").mkdir()
    Catalogue.open(world.root / "node").reconcile(there, 0)
    first, pages = 0, []
    with NodeConnection(world.node().address, QUICK) as connection:
        for _ in range(3):
            asked = wire.DescribeRecordingsRequest(from_recording_id=first, limit=5_000)
            page = connection.ask(asked, wire.DescribeRecordingsResponse)
            pages.append((len(page.recordings), page.has_more))
            first = page.recordings[-1].recording_id + 1 if page.recordings else first
    assert pages == [(1_000, True), (1, False), (0, False)]


def test_many_askers_at_once_leave_one_truth(world, node, client, stopped):
    """Calls of several clients at once: each is carried out whole, one after the other."""
    ends = []
    askers = [
        threading.Thread(target=lambda at=at: ends.append(world.client(node).truncate("orders-0", at)))
        for at in (21, 21, 21)
    ]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert ends == [21, 21, 21]
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(21))


def test_the_command_line_lists_and_keeps(world, node, client, stopped, capfd):
    where = str(node.address)

    def pushrep(*arguments):
        code = cli_main.run(["recording", *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    code, out, _ = pushrep("list", where, "--json")
    assert (code, '"name": "orders-0"' in out, f'"outbox_id": "{UUID(str(stopped.outbox))}"' in out) == (0, True, True)
    assert "stopped" in pushrep("list", where)[1]
    assert pushrep("extend", where, "orders-0", "--leader-epoch", "3")[0] == 1
    assert pushrep("truncate", where, "orders-0", "--at", "49", "--yes")[:2] == (0, "orders-0 ends at offset 49\n")
    assert pushrep("purge", where, "1", "--before", "0", "--yes")[:2] == (0, "1 begins at offset 0\n")
    assert "continues at offset 49" in pushrep("extend", where, "1", "--leader-epoch", "512")[1]
    code, out, _ = pushrep("delete", where, "orders-0", "--yes")
    assert (code, "is deleted" in out) == (0, True)
    code, _, err = pushrep("delete", where, "orders-0", "--yes")
    assert (code, "no recording orders-0" in err) == (1, True)


def test_two_copies_are_compared_over_the_network_batch_by_batch(world, node, client, leader, capfd):
    """`pushrep log verify --against`: the bytes of every batch that both hold."""
    copy = world.root / "copy"
    shutil.copytree(directory(world, leader), copy / "orders-0")

    def verify():
        code = cli_main.run(["log", "verify", str(copy), "orders-0", "--against", str(node.address)])
        return code, capfd.readouterr().out

    code, out = verify()
    assert (code, "the same as at" in out) == (0, True)
    shutil.rmtree(copy)
    with SegmentLog.open(copy / "orders-0", log_id=leader.tp.topic_id) as log:
        with SegmentLog.open_reader(directory(world, leader)) as reader:
            batches = [RecordBatch(bytearray(batch.data)) for batch in reader.batches(0)]
        other = encode_batch([b"changed"] * 7, timestamps_ms=1)
        other.stamp(49, 256)
        log.append_as_is([*batches[:7], other, *batches[8:]])
    code, out = verify()
    assert (code, "DIFFERS" in out, "from offset 49 on" in out) == (1, True, True)
