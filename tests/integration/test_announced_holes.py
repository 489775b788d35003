"""A hole of Kafka's cleaner reaches a copy or a subscriber only if it is announced: identity O3, over sockets."""

import errno
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import pytest

from pushrep.election.grants import Grant, Member
from pushrep.election.messages import PushSessionEndReason
from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.log import AppendFailed, Durability, SegmentLog
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import CheckpointFile, read_checkpoint, segment_path, write_checkpoint
from pushrep.log.segment import Segment
from pushrep.log.verify import verify_log
from pushrep.records import encode_batch
from pushrep.replay import TO_END, NodeAccess, ReplayClient, ReplayFailed, ReplayRequest
from pushrep.replicate import NodeSettings, ReplicaNode
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.leading import Leading
from pushrep.replicate.member_clients import MemberClients, tp_of
from pushrep.replicate.node_calls import NodeCalls
from pushrep.replicate.replica_client import ReplicaClient
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from pushrep.wire import push_messages as wire
from pushrep.wire import server
from pushrep.wire.calls import VOCABULARY, ApiKey, versions_answer
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import ApiVersion, ApiVersionsResponse
from tests.integration.outboxes import wait_until
from tests.ports import reserve
from tests.readers.batch_bytes import parse_batches
from tests.readers.small_logs import CLEANED_OFFSET, CONFIG, LOG_ID, NAME, make_log
from tests.readers.ways import TP, raw

OUTBOX = UUID(int=7)


@pytest.fixture
def log(tmp_path):
    """A log with holes, as a node keeps it."""
    return make_log(tmp_path / "node" / str(OUTBOX), cleaned=True)


@pytest.fixture
def node(tmp_path, log):
    with ExitStack() as opened:
        port = opened.enter_context(reserve()).getsockname()[1]
        settings = NodeSettings(address=Address("127.0.0.1", port), allow=frozenset({"any"}), log_config=CONFIG)
        yield opened.enter_context(ReplicaNode(tmp_path / "node", settings))


@pytest.fixture
def old_peers(monkeypatch):
    """All servers support only version 0, like the release before announced gaps."""

    def answer(vocabulary, code=ErrorCode.NONE):
        found = versions_answer(vocabulary, code)
        oldest = (ApiVersion(api_key=one.api_key, min_version=0, max_version=0) for one in found.api_versions)
        return ApiVersionsResponse(error_code=code, api_versions=tuple(oldest))

    monkeypatch.setattr(server, "versions_answer", answer)


def fetched(node, offset):
    with ReplicaClient(node.address) as client:
        client.ask(wire.DescribeLogRequest(outbox_id=OUTBOX, partitions=(TP,)), wire.DescribeLogResponse)
        request = wire.FetchRecordsRequest(tp=TP, grant_epoch=256, offset=offset, max_bytes=1 << 20)
        return client.ask(request, wire.FetchRecordsResponse)


def test_identity_o3_what_is_fetched_tells_of_its_holes(node, log):
    assert fetched(node, 0).cleaned_offset == CLEANED_OFFSET
    assert fetched(node, 20).cleaned_offset == 0, "nothing is missing there"


def test_identity_o3_who_can_not_be_told_fetches_no_hole(node, log, old_peers):
    refused = fetched(node, 0)
    assert (refused.error_code, refused.records) == (ErrorCode.UNSUPPORTED_VERSION, ())
    dense = fetched(node, 20)
    assert [batch.base_offset for batch in parse_batches(bytes(dense.records[0]))] == [20, 22, 25]


def test_identity_o3_a_subscriber_is_told_of_holes_or_gets_none(node, log):
    with ReplayClient(str(node.address), node=NodeAccess()) as client:
        assert list(map(raw, client.replay(ReplayRequest(NAME, 0, TO_END)))) == list(log.records)


def test_identity_o3_an_old_subscriber_gets_what_is_before_a_hole_and_then_an_error(node, log, old_peers):
    with ReplayClient(str(node.address), node=NodeAccess()) as client:
        assert list(map(raw, client.replay(ReplayRequest(NAME, 20, TO_END)))) == log.between(20, log.end)
        with pytest.raises(ReplayFailed) as failed:
            list(client.replay(ReplayRequest(NAME, 8, TO_END)))
    assert failed.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_identity_o3_a_replica_notes_its_cleaners_offset_first_and_seals_what_is_behind_holes(tmp_path, log):
    with SegmentLog.open(log.path, CONFIG) as leader:
        batches, cleaned_offset = list(leader.batches(0)), leader.cleaned_offset
    path = tmp_path / "copy" / NAME
    with SegmentLog.open(path, CONFIG, log_id=LOG_ID, has_replicas=True) as copy:
        with pytest.raises(Exception, match="0"):
            copy.append_as_is(batches)
        assert copy.log_end_offset == 0
        copy.append_as_is(batches, cleaned_offset=cleaned_offset)
        assert read_checkpoint(path.parent, CheckpointFile.CLEANED_OFFSET) == {NAME: 20}, (
            "before a flush of anything else"
        )
        assert list(map(raw, copy.records(0))) == list(log.records)
    held = {int(one.stem): parse_batches(one.read_bytes()) for one in sorted(path.glob("*.log"))}
    assert {base: [batch.base_offset for batch in found] for base, found in held.items()} == {
        0: [], 1: [1, 4, 12, 15, 20, 22, 25], 27: [],
    }  # fmt: skip
    assert (path / f"{1:020d}.seal").exists()
    with SegmentLog.open(path, CONFIG, has_replicas=True) as copy:
        assert (copy.damaged_from, copy.log_end_offset) == (None, log.end)
        assert list(map(raw, copy.records(0))) == list(log.records)


def test_identity_o3_no_batch_behind_a_hole_is_written_before_the_cleaners_offset_is_on_disk(tmp_path, monkeypatch):
    """A kill between the two would leave a gap without a cleaner's offset: the next opening would count it as
    damage.
    """
    path, noted = tmp_path / "copy" / NAME, []
    append = Segment.append

    def look_first(segment, batch):
        known = read_checkpoint(path.parent, CheckpointFile.CLEANED_OFFSET)
        noted.append((batch.header.base_offset, known.get(NAME, 0)))
        return append(segment, batch)

    monkeypatch.setattr(Segment, "append", look_first)
    with SegmentLog.open(path, CONFIG, log_id=LOG_ID, has_replicas=True) as copy:
        copy.append_as_is([encode_batch([b"a"], base_offset=n, timestamps_ms=1) for n in (5, 8)], cleaned_offset=9)
    assert noted == [(5, 8), (8, 8)]


def test_identity_o6_what_is_behind_an_announced_hole_is_sealed_before_it_is_shown(tmp_path, monkeypatch):
    """A log of many holes gives two segments for each request with holes, not one for each hole."""
    path, shown = tmp_path / "copy" / NAME, []
    publish = DirectoryView.publish

    def look_first(view, log_end_offset, *rest):
        sealed = {int(one.stem) for one in path.glob("*.seal")}
        for one in path.glob("*.log"):
            held = [batch.base_offset for batch in parse_batches(one.read_bytes())]
            has_hole = any(following != first + 2 for first, following in pairwise(held))
            if has_hole and int(one.stem) < log_end_offset:
                shown.append((log_end_offset, int(one.stem) in sealed))
        publish(view, log_end_offset, *rest)

    monkeypatch.setattr(DirectoryView, "publish", look_first)
    firsts = [offset for offset in range(0, 400, 2) if offset % 10]
    values = {first: encode_batch([b"a", b"b"], base_offset=first, timestamps_ms=1) for first in firsts}
    with SegmentLog.open(path, CONFIG, log_id=LOG_ID, has_replicas=True) as copy:
        for begin in range(0, len(firsts), 40):
            copy.append_as_is([values[first] for first in firsts[begin : begin + 40]], cleaned_offset=400)
        assert copy.log_end_offset == 400
        assert [record.offset for record in copy.records(0)] == [n for first in firsts for n in (first, first + 1)]
        copy.append_as_is([encode_batch([b"dense"], base_offset=400, timestamps_ms=1)])
    assert shown
    assert all(is_sealed for _, is_sealed in shown)
    assert len(list(path.glob("*.log"))) <= 2 * 4 + 2
    with SegmentLog.open(path, CONFIG, has_replicas=True) as copy:
        assert (copy.damaged_from, copy.log_end_offset) == (None, 401)
        assert copy.scrub.run_pass().findings == ()
    assert verify_log(path).is_whole


class Full(RealFilesystem):
    """So many segments can be made, then the disk is full."""

    left = 1 << 30

    def open(self, path, *, create=False, writable=True):
        if create and path.suffix == ".log":
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            self.left -= 1
        return super().open(path, create=create, writable=writable)


@pytest.mark.parametrize("left", [0, 1])
def test_batches_behind_holes_are_appended_all_or_none(tmp_path, left):
    path, disk = tmp_path / "copy" / NAME, Full()
    dense = encode_batch([b"a", b"b"], base_offset=0, timestamps_ms=1)
    behind = [encode_batch([b"c"], base_offset=first, timestamps_ms=1) for first in (10, 20)]
    for batch in behind:
        batch.stamp(batch.header.base_offset, 3)
    with SegmentLog.open(path, CONFIG, log_id=LOG_ID, has_replicas=True, filesystem=disk) as copy:
        copy.append_as_is([dense])
        epochs, files = copy.leader_epochs, sorted(one.name for one in path.glob("*.log"))
        disk.left = left
        with pytest.raises(AppendFailed):
            copy.append_as_is(behind, cleaned_offset=20)
        assert (copy.log_end_offset, copy.leader_epochs) == (2, epochs)
        assert sorted(one.name for one in path.glob("*.log")) == files
        disk.left = 1 << 30
        copy.append_as_is(behind, cleaned_offset=20)
        assert [record.offset for record in copy.records(0)] == [0, 1, 10, 20]
        assert copy.leader_epochs.entries == ((0, 0), (3, 10))
    assert verify_log(path).is_whole


def held_by(led):
    """The offset that the replica has acknowledged."""
    with led.lock:
        progress = led.leader.sessions.get(1)
        return None if progress is None else progress.acknowledged


def led_to_a_node(tmp_path, log, first, *, and_then=lambda leader, led: None, durability=Durability.BUFFERED):
    """Push a log from offset `first` on to a node that holds nothing; (the node's bytes, why sessions ended)."""
    ended = []
    with ExitStack() as opened:
        port = opened.enter_context(reserve()).getsockname()[1]
        settings = NodeSettings(address=Address("127.0.0.1", port), allow=frozenset({"any"}), log_config=CONFIG)
        node = opened.enter_context(ReplicaNode(tmp_path / "other", settings))
        leader = opened.enter_context(SegmentLog.open(log.path, CONFIG, has_replicas=True))
        leader.delete_records(first)
        grant = Grant(
            outbox_id=OUTBOX, epoch=256, leader=0, members=(Member(0), Member(1, str(node.address))),
            min_insync_replicas=2, members_epoch=256, pid_epoch=0, topic_id=LOG_ID, topic="orders", partitions=1,
            carrier="key",
        )  # fmt: skip
        quick = PushSettings(backoff_min_ms=1, backoff_max_ms=50)
        leading = Leading(OUTBOX, grant, {0: leader}, [Replica(1, node.address)], durability=durability, settings=quick)
        opened.callback(leading.close)
        led = leading.partitions[0]
        on_ended = led.on_ended

        def told(session, reason):
            on_ended(session, reason)
            ended.append(reason)

        led.on_ended = told
        leading.start()
        wait_until(lambda: ended or held_by(led) == leader.log_end_offset, "the replica holds all, or its session ends")
        and_then(leader, led)
        troubles = leading.troubles()
    path = tmp_path / "other" / str(OUTBOX) / NAME
    held = [batch for one in sorted(path.glob("*.log")) for batch in parse_batches(one.read_bytes())]
    return held, [reason for reason in ended if reason is not PushSessionEndReason.SHUTDOWN], troubles


def test_identity_o3_a_leader_announces_its_holes(tmp_path, log):
    held, ended, troubles = led_to_a_node(tmp_path, log, 0)
    assert [batch.base_offset for batch in held] == [batch.base_offset for batch in log.batches]
    assert (ended, troubles) == ([], {})


@pytest.mark.parametrize("durability", Durability)
def test_identity_o3_a_leader_whose_log_ends_in_a_hole_goes_on(tmp_path, log, durability):
    """The cleaner took the newest records: nothing is left to send, and the next append announces the hole."""
    for one in log.path.glob(f"{20:020d}*"):
        one.unlink()
    segment_path(log.path, 27).write_bytes(b"")
    write_checkpoint(log.path.parent, CheckpointFile.CLEANED_OFFSET, {NAME: 27}, REAL_FILESYSTEM)
    write_checkpoint(log.path.parent, CheckpointFile.RECOVERY_POINT, {NAME: 27}, REAL_FILESYSTEM)

    def append(leader, led):
        assert leader.log_end_offset == 27
        wait_until(lambda: led.leader.in_sync == {0, 1}, "it is in sync")
        batch = encode_batch([b"behind"], timestamps_ms=1)
        end = leader.append(batch).last_offset + 1
        led.on_append(27, [batch], 1)
        led.on_flush(leader.flushed_offset)
        wait_until(lambda: leader.high_watermark == end == 28, "it is acknowledged")

    held, ended, troubles = led_to_a_node(tmp_path, log, 0, and_then=append, durability=durability)
    assert [batch.base_offset for batch in held] == [1, 4, 12, 15, 27]
    assert (ended, troubles) == ([], {})
    assert verify_log(tmp_path / "other" / str(OUTBOX) / NAME).is_whole


def test_identity_o3_a_replica_of_before_gets_no_hole(tmp_path, log, old_peers):
    held, ended, troubles = led_to_a_node(tmp_path, log, 0)
    assert (held, ended[0]) == ([], PushSessionEndReason.NON_RETRIABLE_ERROR)
    assert "UNSUPPORTED_VERSION" in troubles[1], "status shows it, not only the log"


def test_identity_o3_a_replica_of_before_gets_what_is_dense(tmp_path, log, old_peers):
    held, ended, _ = led_to_a_node(tmp_path, log, 20)
    assert ([batch.base_offset for batch in held], ended) == ([20, 22, 25], [])


def test_versions_of_the_calls_that_announce_holes():
    for key in (ApiKey.APPEND_RECORDS, ApiKey.FETCH_RECORDS, ApiKey.ATTACH, ApiKey.REPLAY_DATA):
        oldest, newest = VOCABULARY.versions[key]
        assert oldest == 0 < newest, "version 0 is spoken with nodes from before"


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (lambda data, first: data[first:], "base offset 2 came where 0 is expected"),
        (lambda data, _: data[:-1] + bytes([data[-1] ^ 1]), "broken batches"),
        (lambda data, first: data[:first] + data[:first], "base offset 0 came where 2 is expected"),
        (lambda data, _: data + b"rest", "broken batches"),
        (lambda _, __: b"", "it gave no records"),
    ],
    ids=["another beginning", "a rotten bit", "one twice", "bytes behind", "nothing"],
)
def test_identity_o5_who_catches_up_takes_nothing_that_does_not_join(tmp_path, monkeypatch, answered, why):
    log = make_log(tmp_path / "node" / str(OUTBOX), cleaned=False)
    whole = (log.path / f"{0:020d}.log").read_bytes()
    _, second, _ = parse_batches(whole)
    as_it_is = NodeCalls.answer

    def lying(self, request, sender):
        answer = as_it_is(self, request, sender)
        if not isinstance(request, wire.FetchRecordsRequest):
            return answer
        data = answered(bytes(answer.records[0]), second.position)
        return replace(answer, records=(data,) if data else ())

    monkeypatch.setattr(NodeCalls, "answer", lying)
    monkeypatch.setattr("pushrep.replicate.node_calls.FETCH_BYTES_MAX", len(whole))
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=CONFIG)
    with (
        ReplicaNode(tmp_path / "node", settings) as node,
        SegmentLog.open(tmp_path / "own" / NAME, CONFIG, log_id=LOG_ID, has_replicas=True) as own,
    ):
        asking = MemberClients(OUTBOX, 0, [tp_of(own)], PushSettings())
        asking.describe(1, node.address)
        with pytest.raises(ReplicaUnreachable, match=why):
            next(asking.fetch(node.address, own, 256, log.end))


def test_who_catches_up_takes_nothing_above_the_end_that_was_granted(tmp_path):
    make_log(tmp_path / "node" / str(OUTBOX), cleaned=False)
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=CONFIG)
    with (
        ReplicaNode(tmp_path / "node", settings) as node,
        SegmentLog.open(tmp_path / "own" / NAME, CONFIG, log_id=LOG_ID, has_replicas=True) as own,
    ):
        asking = MemberClients(OUTBOX, 0, [tp_of(own)], PushSettings())
        asking.describe(1, node.address)
        with pytest.raises(ReplicaUnreachable, match="broken batches"):
            next(asking.fetch(node.address, own, 256, 1))  # inside of a batch
        for batches, _ in asking.fetch(node.address, own, 256, 12):
            own.append_as_is(batches)
        assert own.log_end_offset == 12
