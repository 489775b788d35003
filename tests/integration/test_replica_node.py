"""A node and its peers: what it refuses, what it survives, what it promises on disk."""

import errno
import re
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest
from click.testing import CliRunner

from pushrep.cli.main import cli
from pushrep.election.grants import Grant, Member, next_generation
from pushrep.env.filesystem import RealFilesystem
from pushrep.errors import BadArgument, CorruptFile
from pushrep.log import SegmentLog
from pushrep.log.directory_files import read_leader_epochs
from pushrep.log.disk import disk_threads, release_disk_threads
from pushrep.records import encode_batch
from pushrep.replay.client import ReplayClient
from pushrep.replay.plan import ReplayRefused, ReplayRequest
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.errors import NodeInUse
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.connection import ClientConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameLimits
from pushrep.wire.push_messages import (
    ApiVersionsRequest,
    AppendRecordsPartition,
    AppendRecordsRequest,
    AppendRecordsResponse,
    BeatRequest,
    BeatResponse,
    DescribeLogRequest,
    DescribeLogResponse,
    EndOffsetForEpochRequest,
    EndOffsetForEpochResponse,
    EpochQuestion,
    EpochStart,
    FetchRecordsRequest,
    FetchRecordsResponse,
    GrantRequest,
    GrantResponse,
    ListLogsRequest,
    ListLogsResponse,
)
from pushrep.wire.replay_messages import StartReplayRequest, StartReplayResponse
from tests.integration.conftest import WAIT_S
from tests.programs import PUSHREP, PythonProgram
from tests.unit.gated_disk import MeetingDisk

HERE = Address("127.0.0.1", 0)
OUTBOX = uuid4()
TP = TopicIdPartition(uuid4(), "orders", 0)


@pytest.fixture
def start(tmp_path):
    nodes = []

    def make(directory="node", filesystem=None, **settings):
        settings = {"address": HERE, "allow": frozenset({"any"}), **settings}
        more = {"filesystem": filesystem} if filesystem is not None else {}
        nodes.append(ReplicaNode(tmp_path / directory, NodeSettings(**settings), **more))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def describe(client, *tps, create=True, outbox=OUTBOX):
    return client.ask(DescribeLogRequest(outbox_id=outbox, create=create, partitions=tps or (TP,)), DescribeLogResponse)


def part(replica_epoch, base_offset, *values, tp=TP, epoch=256, flush=False):
    records = ()
    if values:
        batch = encode_batch(list(values), timestamps_ms=1)
        batch.stamp(base_offset, epoch)
        records = (bytes(batch.data),)
    return AppendRecordsPartition(
        tp=tp,
        leader_epoch=epoch,
        replica_epoch=replica_epoch,
        session_id=1,
        append_offset=base_offset,
        previous_epoch=-1 if base_offset == 0 else epoch,
        epoch_start_offset=0,
        high_watermark=0,
        log_start_offset=0,
        flush_wanted=flush,
        records=records,
    )


def push(client, *parts):
    return client.ask(AppendRecordsRequest(partitions=parts), AppendRecordsResponse).results


def grant_of(epoch, leader=None, **more):
    leader = epoch % 256 if leader is None else leader
    fields = {"members": (Member(0), Member(1), Member(2)), "min_insync_replicas": 2, "members_epoch": epoch, **more}
    fixed = {"pid_epoch": 0, "topic_id": TP.topic_id, "topic": "orders", "carrier": "key"}
    return Grant(outbox_id=OUTBOX, epoch=epoch, leader=leader, **{"partitions": 1, **fields}, **fixed)


def offer(client, grant, sender=None):
    sender = grant.leader if sender is None else sender
    return client.ask(GrantRequest(grant=grant, sender=sender, member=2, partitions=(TP,)), GrantResponse)


def test_m6_a_beat_fences_an_older_generation_and_shows_a_rival_that_was_offered(start):
    """A leader without records to push learns of both only by beats."""
    own, rival = next_generation(0, 7), next_generation(0, 8)

    def beat(generation, epoch):
        request = BeatRequest(outbox_id=OUTBOX, leader=0, leader_epoch=epoch, generation=generation)
        answer = client.ask(request, BeatResponse)
        return answer.error_code, answer.generation

    with ReplicaClient(start().address) as client:
        assert offer(client, grant_of(256, generation=own)).error_code is ErrorCode.NONE
        assert beat(own, 256) == (ErrorCode.NONE, own)
        assert beat(0, 1 << 20) == (ErrorCode.FENCED_LEADER_EPOCH, own)
        assert offer(client, grant_of(257, generation=rival)).error_code is ErrorCode.INCONSISTENT_OUTBOX
        assert beat(own, 256) == (ErrorCode.NONE, rival)


def test_what_is_pushed_is_there_after_a_restart_under_a_higher_replica_epoch(start):
    node = start()
    with ReplicaClient(node.address) as client:
        first = describe(client)
        assert [result.log_end_offset for result in push(client, part(first.replica_epoch, 0, b"a", b"b"))] == [2]
    node.stop()
    with ReplicaClient(start().address) as client:
        again = describe(client, create=False)
        assert (again.replica_epoch, again.logs[0].log_end_offset) == (first.replica_epoch + 1, 2)
        (stale,) = push(client, part(first.replica_epoch, 2, b"c"))
        assert stale.error_code is ErrorCode.STALE_SESSION, "the session was with the process before"


def test_a_log_that_was_not_described_since_the_start_has_no_session(start):
    with ReplicaClient(start().address) as client:
        assert push(client, part(1, 0, b"a"))[0].error_code is ErrorCode.STALE_SESSION


@pytest.mark.parametrize(
    ("allow", "code"),
    [
        (frozenset(), ErrorCode.UNAUTHORISED),
        (frozenset({str(uuid4())}), ErrorCode.UNAUTHORISED),
        (frozenset({str(OUTBOX)}), ErrorCode.NONE),
        (frozenset({"any"}), ErrorCode.NONE),
    ],
)
def test_only_who_is_allowed_creates_logs(start, tmp_path, allow, code):
    node = start(allow=allow)
    with ReplicaClient(node.address) as client:
        described = describe(client)
        assert {described.error_code, *(log.error_code for log in described.logs)} == {code}
    with ReplicaClient(node.address) as client:  # one without a role is closed after its first refusal
        assert offer(client, grant_of(256)).error_code is code
    assert (tmp_path / "node" / str(OUTBOX)).exists() is (code is ErrorCode.NONE)


def test_another_topic_id_under_the_same_name_is_refused(start):
    with ReplicaClient(start().address) as client:
        describe(client)
        other = describe(client, TopicIdPartition(uuid4(), "orders", 0))
        assert other.logs[0].error_code is ErrorCode.INCONSISTENT_TOPIC_ID


def test_grants_are_on_disk_and_older_leaders_fenced(start):
    node = start()
    with ReplicaClient(node.address) as client:
        epoch = describe(client).replica_epoch
        assert push(client, part(epoch, 0, b"a"))[0].error_code is ErrorCode.NONE
        stored = offer(client, grant_of(513))
        assert stored.error_code is ErrorCode.NONE
        assert (stored.logs[0].granted_epoch, stored.logs[0].granted_end_offset) == (256, 1)
        (fenced,) = push(client, part(epoch, 1, b"b"))
        assert (fenced.error_code, fenced.grant_epoch, fenced.grant_leader) == (ErrorCode.FENCED_LEADER_EPOCH, 513, 1)
        assert offer(client, grant_of(258)).error_code is ErrorCode.FENCED_LEADER_EPOCH
    node.stop()
    with ReplicaClient(start().address) as client:
        shown = describe(client)
        assert [grant.epoch for grant in shown.grants] == [513]
        assert shown.highest_epoch == 513
        assert offer(client, grant_of(258)).error_code is ErrorCode.FENCED_LEADER_EPOCH


def test_a_leader_epoch_is_on_disk_before_it_is_followed(start):
    node = start()
    with ReplicaClient(node.address) as client:
        push(client, part(describe(client).replica_epoch, 0, b"a", epoch=512))
    node.stop()
    with ReplicaClient(start().address) as client:
        (fenced,) = push(client, part(describe(client).replica_epoch, 1, b"b", epoch=256))
        assert fenced.error_code is ErrorCode.FENCED_LEADER_EPOCH


def test_promises_that_cant_be_believed_stop_that_outbox_and_no_other(start, tmp_path):
    node = start()
    with ReplicaClient(node.address) as client:
        describe(client)
        offer(client, grant_of(256))
    node.stop()
    path = tmp_path / "node" / str(OUTBOX) / "promises.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch": 256', b'"epoch": 512'))
    with ReplicaClient(start().address) as client:
        assert describe(client).error_code is ErrorCode.KAFKA_STORAGE_ERROR
        other = TopicIdPartition(uuid4(), "orders", 0)
        assert describe(client, other, outbox=uuid4()).logs[0].error_code is ErrorCode.NONE


def test_a_replica_epoch_that_cant_be_believed_stops_the_start(start, tmp_path):
    start().stop()
    path = tmp_path / "node" / "replica-epoch.json"
    path.write_text(re.sub(r'"replica_epoch": \d', '"replica_epoch": 0', path.read_text()))
    with pytest.raises(CorruptFile, match="crc32c"):
        start()


class _OneBadLog(RealFilesystem):
    """The disk below one partition's log fails, the rest of it works."""

    is_broken = False
    fails = frozenset({"write_at", "sync", "truncate"})

    def open(self, path, **more):
        file = super().open(path, **more)
        is_it = path.parent.name == "orders-0" and path.suffix == ".log"
        return _BadFile(file, self) if is_it else file


class _BadFile:
    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def __getattr__(self, name):
        if self._disk.is_broken and name in self._disk.fails:
            raise OSError(errno.EIO, "the disk is gone")
        return getattr(self._file, name)


class _SyncedWhole(RealFilesystem):
    """Counts syncs of the whole file system, which may fail."""

    wholes = 0
    is_broken = False

    def whole_sync(self, _directory):
        return self

    def sync(self):
        self.wholes += 1
        if self.is_broken:
            raise OSError(errno.EIO, "the disk is gone")

    def close(self):
        pass


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_epoch_of_many_sessions_is_brought_to_disk_together_or_else_by_each(start, is_broken):
    disk = _SyncedWhole()
    node = start(filesystem=disk)
    tps = [TopicIdPartition(TP.topic_id, "orders", number) for number in range(5)]
    with ReplicaClient(node.address) as client:
        assert offer(client, grant_of(256, partitions=5)).error_code is ErrorCode.NONE
        epoch = describe(client, *tps).replica_epoch
        wholes, disk.is_broken = disk.wholes, is_broken
        results = push(client, *(part(epoch, 0, tp=tp) for tp in tps))
        assert {one.error_code for one in results} == {ErrorCode.NONE}
        assert disk.wholes - wholes == (1 if is_broken else 2), "contents, then names"
        described = describe(client, *tps).logs
        assert {log.leader_epochs for log in described} == {(EpochStart(epoch=256, start_offset=0),)}
        again = disk.wholes
        push(client, *(part(epoch, 0, b"a", tp=tp) for tp in tps))
        assert disk.wholes == again, "a record is synced in its own file"
    for tp in tps:
        kept = read_leader_epochs(node.directory / str(OUTBOX) / str(tp))
        assert kept.entries == ((256, 0),)


def test_a_disk_error_takes_one_log_offline_and_it_comes_back(start):
    disk = _OneBadLog()
    other = TopicIdPartition(uuid4(), "orders", 1)
    node = start(filesystem=disk)
    with ReplicaClient(node.address) as client:
        epoch = describe(client, TP, other).replica_epoch
        disk.is_broken = True
        bad, good = push(client, part(epoch, 0, b"a"), part(epoch, 0, b"a", tp=other))
        assert (bad.error_code, good.error_code) == (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NONE)
        assert good.log_end_offset == 1
        (problem,) = (status := node.status()).problems()
        assert (problem.name, status.is_ready) == ("log_offline", True), "the node serves its other logs"
        assert problem.since_ms > 0
        disk.is_broken = False
        assert describe(client, TP).logs[0].error_code is ErrorCode.NONE
        assert push(client, part(epoch, 0, b"a"))[0].log_end_offset == 1


class _WithoutDescriptors(RealFilesystem):
    """While it lacks them, no list of epochs can be written."""

    lacks = False

    def open(self, path, **more):
        if self.lacks and path.name.startswith("leader-epoch-checkpoint") and more.get("create"):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return super().open(path, **more)


def test_a_shortage_at_a_new_epoch_refuses_one_request_and_the_log_stays_online(start):
    disk = _WithoutDescriptors()
    node = start(filesystem=disk)
    with ReplicaClient(node.address) as client:
        epoch = describe(client, TP).replica_epoch
        disk.lacks = True
        assert push(client, part(epoch, 0, b"a"))[0].error_code is ErrorCode.KAFKA_STORAGE_ERROR
        (problem,) = node.status().problems()
        assert "Too many open files" in problem.why
        disk.lacks = False
        again = push(client, part(epoch, 0, b"a"))[0]
        assert (again.error_code, again.log_end_offset) == (ErrorCode.NONE, 1), "it was not described again"
        assert list(node.status().problems()) == []


def test_the_syncs_of_one_request_wait_beside_each_other(start):
    disk = MeetingDisk()
    tps = [TopicIdPartition(TP.topic_id, "orders", n) for n in range(6)]
    with ReplicaClient(start(filesystem=disk).address) as client:
        epoch = describe(client, *tps).replica_epoch
        disk.meet(6)
        results = push(client, *(part(epoch, 0, b"a", tp=tp, flush=True) for tp in tps))
        disk.party = None
        assert [(one.error_code, one.flushed_offset) for one in results] == [(ErrorCode.NONE, 1)] * 6
        twice = push(client, part(epoch, 1, b"b", flush=True), part(epoch, 2, b"c", flush=True))
        assert [one.flushed_offset for one in twice] == [2, 3], "one partition's requests keep their order"


def test_a_failed_sync_among_several_takes_its_own_log_offline(start):
    disk = _OneBadLog()
    tps = [TopicIdPartition(TP.topic_id, "orders", n) for n in range(6)]
    with ReplicaClient(start(filesystem=disk).address) as client:
        epoch = describe(client, *tps).replica_epoch
        disk.fails = {"sync"}
        disk.is_broken = True
        bad, *good = push(client, *(part(epoch, 0, b"a", tp=tp, flush=True) for tp in tps))
        disk.is_broken = False
        assert (bad.error_code, bad.flushed_offset) == (ErrorCode.KAFKA_STORAGE_ERROR, 0)
        assert [(one.error_code, one.flushed_offset) for one in good] == [(ErrorCode.NONE, 1)] * 5


def test_whole_batches_are_fetched_ends_are_told_and_logs_listed(start):
    with ReplicaClient(start().address) as client:
        epoch = describe(client).replica_epoch
        sent = part(epoch, 0, b"a", b"b")
        push(client, sent)
        fetched = client.ask(FetchRecordsRequest(tp=TP, grant_epoch=256, offset=0, max_bytes=1), FetchRecordsResponse)
        assert b"".join(map(bytes, fetched.records)) == sent.records[0]
        for offset, grant_epoch, code in (
            (9, 256, ErrorCode.OFFSET_OUT_OF_RANGE),
            (0, 5, ErrorCode.FENCED_LEADER_EPOCH),
        ):
            request = FetchRecordsRequest(tp=TP, grant_epoch=grant_epoch, offset=offset, max_bytes=1)
            assert client.ask(request, FetchRecordsResponse).error_code is code
        questions = tuple(EpochQuestion(tp=TP, leader_epoch=300, epoch=at) for at in (300, 255))
        ends = client.ask(EndOffsetForEpochRequest(partitions=questions), EndOffsetForEpochResponse).results
        assert [(end.epoch, end.end_offset) for end in ends] == [(256, 2), (-1, 0)]
        (listed,) = client.ask(ListLogsRequest(), ListLogsResponse).logs
        assert (listed.outbox_id, listed.tp, listed.log_end_offset, listed.leader_epoch) == (OUTBOX, TP, 2, 256)


def test_a_connection_that_replays_takes_no_calls_of_leaders_any_more(start):
    with ReplicaClient(start().address) as client:
        answer = client.ask(StartReplayRequest(recording_id=1), StartReplayResponse)
        assert answer.error_code is ErrorCode.UNKNOWN_RECORDING
        assert client.ask(ListLogsRequest(), ListLogsResponse).error_code is ErrorCode.INVALID_REQUEST


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "a size of 2 GiB": b"\x7f\xff\xff\xff" + bytes(16),
    "zeros": bytes(64),
    "an unknown call": bytes.fromhex("00000010 4242 0000 00000001 00000000 00000000"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_cut_off_and_others_are_served(start, garbage):
    node = start()
    with ReplicaClient(node.address) as good, socket.create_connection(node.address) as bad:
        bad.settimeout(WAIT_S)
        bad.sendall(garbage)
        with suppress(ConnectionResetError):
            assert bad.recv(1) == b"", "cut off without an answer"
        assert describe(good).logs[0].error_code is ErrorCode.NONE


def test_a_valid_frame_with_a_flipped_bit_anywhere_never_stops_the_node(start, torture):
    node = start()
    random = torture.random("flipped bits")
    protocol = ClientConnection()
    frame = b"".join(map(bytes, protocol.ask(ApiVersionsRequest())[1]))
    for _ in range(torture.count(40, 4000)):
        bit = random.randrange(8 * len(frame))
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        with socket.create_connection(node.address) as sock:
            sock.sendall(bytes(bad))
    with ReplicaClient(node.address) as client:
        assert describe(client).logs[0].error_code is ErrorCode.NONE


def test_valid_frames_of_nonsense_leave_a_log_that_is_whole(start, torture):
    """Epochs, offsets, flags and damaged records at random: every one is answered, and what is kept can be read."""
    node = start()
    random = torture.random("nonsense")
    answered, tps, newest = set(), [TP], 256
    with ReplicaClient(node.address) as client:
        epoch = describe(client).replica_epoch
        for _ in range(torture.count(150, 20_000)):
            near = [0, 1, 2, 3, 5, 1 << 40]
            newest += random.random() < 0.03
            leader_epoch = newest - (random.random() < 0.1)
            values = [b"x"] * random.randrange(4)
            sent = part(random.choice([epoch] * 9 + [0]), random.choice(near), *values, tp=tps[-1], epoch=leader_epoch)
            records = bytearray(b"".join(sent.records))
            if records and random.random() < 0.3:
                records[random.randrange(len(records))] ^= 1 << random.randrange(8)
            if records and random.random() < 0.2:
                del records[random.randrange(len(records)) :]
            sent = replace(
                sent,
                leader_epoch=leader_epoch,
                session_id=random.choice([1, 1, 1, 2]),
                append_offset=random.choice([sent.append_offset, random.choice(near)]),
                previous_epoch=random.choice([-1, leader_epoch, leader_epoch, leader_epoch - 1]),
                epoch_start_offset=random.choice(near),
                high_watermark=random.choice(near),
                log_start_offset=random.choice(near),
                restart=random.random() < 0.1,
                flush_wanted=random.random() < 0.1,
                records=(bytes(records),) if records else (),
            )
            (result,) = push(client, sent)
            answered.add(result.error_code)
            if result.error_code is ErrorCode.LOG_OFFLINE:  # it waits for an operator: on with another
                tps.append(TopicIdPartition(uuid4(), "orders", len(tps)))
                describe(client, tps[-1])
        logs = {str(log.tp): log for log in describe(client, *tps).logs}
        assert all(log.log_start_offset <= log.high_watermark <= log.log_end_offset for log in logs.values())
    assert len(answered) >= torture.count(4, 8), answered
    assert ErrorCode.UNKNOWN_SERVER_ERROR not in answered
    node.stop()
    for name, log in logs.items():
        with SegmentLog.open_reader(node.directory / str(OUTBOX) / name, isolation="written") as reader:
            offsets = [record.offset for record in reader.records(reader.log_start_offset)]
        assert offsets == list(range(log.log_start_offset, log.log_end_offset)), name


def test_a_frame_above_the_limit_is_refused_before_it_is_kept(start):
    node = start(limits=FrameLimits(frame_bytes_max=100_000, header_bytes_max=10_000))
    with ReplicaClient(node.address) as client:
        epoch = describe(client).replica_epoch
        with pytest.raises(Exception, match=r"closed the connection|reset|Broken pipe"):
            push(client, part(epoch, 0, bytes(200_000)))
    with ReplicaClient(node.address) as client:
        assert describe(client).logs[0].log_end_offset == 0


def test_silent_connections_make_room_for_those_that_speak(start):
    node = start(connections_max=8)
    with ReplicaClient(node.address) as first:
        describe(first)
        silent = [socket.create_connection(node.address) for _ in range(30)]
        try:
            with ReplicaClient(node.address) as second:
                assert describe(second).logs[0].error_code is ErrorCode.NONE
            assert describe(first).logs[0].error_code is ErrorCode.NONE, "who has spoken stays"
            assert len(node.connections) <= 9
        finally:
            for sock in silent:
                sock.close()


def test_stop_answers_what_is_being_carried_out_and_leaves_nothing_running(start):
    node = start()
    with ReplicaClient(node.address) as client:
        epoch = describe(client).replica_epoch
        for number in range(20):
            push(client, part(epoch, number, b"x"))
        node.stop()
        node.stop()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pushrep-node")]
        assert not left
    with pytest.raises(Exception, match=r"refused"):
        ReplicaClient(node.address)
    with ReplicaClient(start().address) as client:
        assert describe(client).logs[0].log_end_offset == 20


def test_a_second_stop_takes_nothing_from_others_in_the_process(start):
    node = start()
    ours = disk_threads(node.store.filesystem, node.directory)  # as another node on this disk has them
    node.stop()
    node.stop()
    again = disk_threads(node.store.filesystem, node.directory)
    release_disk_threads(again)
    if again is ours:
        release_disk_threads(ours)
    assert again is ours, "the second call has released the other's threads"


def test_two_nodes_never_share_a_directory_or_a_port(start):
    node = start()
    with pytest.raises(NodeInUse):
        start()
    with pytest.raises(BadArgument, match="can't listen on"):
        start("other", address=node.address)


def test_off_loopback_without_tls_is_refused_unless_told():
    with pytest.raises(BadArgument, match="plain_off_loopback"):
        NodeSettings(address=Address("0.0.0.0", 0))
    assert NodeSettings(address=Address("0.0.0.0", 0), plain_off_loopback=True)


@pytest.mark.parametrize("text", ["nowhere", ":1", "host:", "host:99999", "host:x"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(BadArgument):
        Address.parse(text)


def test_addresses_of_both_families():
    assert Address.parse("[::1]:7400") == Address("::1", 7400)
    assert str(Address("::1", 7400)) == "[::1]:7400"
    assert Address.parse("::1:7400").is_loopback
    assert not Address.parse("10.0.0.1:1").is_loopback


def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    serve = ("replica", "serve", tmp_path / "copies")
    process = PythonProgram("-m", "pushrep.cli.main", *serve, "--listen", "127.0.0.1:0", "--allow", "any")
    try:
        line = process.stdout.readline()
        address = Address.parse(line.split()[2].rstrip(","))
        with ReplicaClient(address) as client:
            push(client, part(describe(client).replica_epoch, 0, b"a"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.stdout.close()
    refused = subprocess.run([PUSHREP, *serve, "--listen", "0.0.0.0:0"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--plain" in refused.stderr


def test_the_command_takes_settings_of_logs_and_replays_by_option_and_variable(tmp_path):
    options = ("--listen", "127.0.0.1:0", "--allow", "any", "--log", "segment_bytes=300")
    serve = ("replica", "serve", tmp_path / "n", *options)
    settings = "connect_timeout_ms=60000 max_sessions=1"
    process = PythonProgram("-m", "pushrep.cli.main", *serve, PUSHREP_REPLICA_SERVE_REPLAY=settings)
    try:
        address = Address.parse(process.stdout.readline().split()[2].rstrip(","))
        with ReplicaClient(address) as client:
            epoch = describe(client).replica_epoch
            for offset in range(3):
                push(client, part(epoch, offset, b"x" * 200))
        assert len(list((tmp_path / "n").glob("*/orders-0/*.log"))) == 3, "each filled its segment"
        with ReplayClient(str(address)) as replays:
            request = ReplayRequest("orders-0", bound="written")
            replays.start_replay(request)
            with pytest.raises(ReplayRefused, match="MAX_REPLAYS"):
                replays.start_replay(request)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--log", "retention=1"], "did you mean retention_"),
        (["--replay", "block_bytes=0"], "block_bytes"),
        (["--replay", "sessions=1"], "max_sessions"),
        (["--replay", "max_sessions=0"], "max_sessions"),
    ],
)
def test_a_setting_that_the_command_does_not_take_is_refused_by_name(tmp_path, options, said):
    result = CliRunner().invoke(cli, ["replica", "serve", str(tmp_path / "copies"), *options])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--allow", "billing=orders-*:fly"], "fly"),
        (["--allow-file", "rules"], "fly"),
        (["--listen", "0.0.0.0:0"], "--plain"),
        (["--metrics", "0.0.0.0:0"], "--plain"),
        (["--cert", "rules"], "--key"),
        (["--cert", "rules", "--key", "rules", "--ca", "rules"], "rules"),
    ],
)
def test_what_a_node_can_not_be_started_with_is_wrong_usage_and_makes_nothing(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").write_text("billing=orders-*:fly\n")
    result = CliRunner().invoke(cli, ["replica", "serve", "copies", *options])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
    assert said in result.output
    assert not (tmp_path / "copies").exists()


def test_a_cut_inside_of_a_batch_is_refused_and_takes_nothing(start):
    """Such a cut would mean that an epoch has two histories; a cut at the batch's base could remove acknowledged
    records.
    """
    node = start()
    with ReplicaClient(node.address) as client:
        epoch = describe(client).replica_epoch
        push(client, replace(part(epoch, 0, b"a", b"b", b"c"), high_watermark=3))
        push(client, part(epoch, 3, b"d", b"e", b"f"))
        odd = replace(part(epoch, 4, b"x", epoch=512), previous_epoch=256, epoch_start_offset=4)
        assert push(client, odd)[0].error_code is ErrorCode.KAFKA_STORAGE_ERROR
        assert describe(client).logs[0].log_end_offset == 6
