"""S3: whoever reads a damaged log gets the error at once when it comes to the damage; every length, every way."""

import os
import shutil
import struct
from contextlib import ExitStack
from uuid import uuid4

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import CorruptBatch, LogConfig, SegmentLog
from pushrep.log.directory_files import PARTITION_METADATA_NAME, list_segments, segment_path
from pushrep.records import BatchHeader
from pushrep.replay import (
    FOLLOW,
    TO_END,
    AtTime,
    RecordingState,
    ReplayClient,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
)
from pushrep.replay.client import compare_copies
from pushrep.replicate.errors import Refusal
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode

RECORDS, DAMAGED_FROM = 300, 290
BIG = LogConfig(preallocate_bytes=0)


def batches_of_ten():
    """Offsets, which are times as well."""
    return [[*range(start, start + 10)] for start in range(0, RECORDS, 10)]


def values_of(times):
    return [b"%d" % n for n in times]


def damage_last_batch(log, whole):
    """Its base offset, which no CRC covers. whole: gets a copy of its directory from before."""
    shutil.copytree(log.parent, whole)
    path = segment_path(log, list_segments(REAL_FILESYSTEM, log)[-1])
    data, position = bytearray(path.read_bytes()), 0
    while position + BatchHeader.parse(data, position).size_bytes < len(data):
        position += BatchHeader.parse(data, position).size_bytes
    struct.pack_into(">q", data, position, DAMAGED_FROM + 1)
    path.write_bytes(data)


def damaged_log(directory):
    """300 records in batches of 10, the last of them damaged; closed clean."""
    path = directory / "orders-0"
    with SegmentLog.open(path, BIG) as log:
        for times in batches_of_ten():
            log.append(values_of(times), timestamps_ms=times)
    damage_last_batch(path, directory.parent / "whole")
    return path


@pytest.fixture(params=["stopped", "owner", "beside", "network"])
def client(request, tmp_path):
    """A client of a directory without a writer, in the writer's process, beside it, or of a node."""
    with ExitStack() as opened:
        if request.param == "network":
            world = request.getfixturevalue("world")
            node = world.node(config=BIG)
            leader = world.leader(node)
            for times in batches_of_ten():
                leader.append(*values_of(times), timestamps_ms=times)
            node.stop()
            damage_last_batch(world.root / "node" / str(leader.outbox) / "orders-0", tmp_path / "whole")
            yield world.client(world.node(port=node.address.port, config=BIG))
            return
        path = damaged_log(tmp_path / "ours")
        logs = []
        if request.param != "stopped":
            log = opened.enter_context(SegmentLog.open(path))
            assert log.damaged_from == DAMAGED_FROM
            logs = [log] if request.param == "owner" else []
        yield opened.enter_context(ReplayClient(path.parent, logs=logs))


@pytest.mark.parametrize("length", [TO_END, FOLLOW, RECORDS])
@pytest.mark.parametrize("position", [None, 255, AtTime(255)], ids=["start", "offset", "time"])
def test_a_replay_ends_with_the_damage(client, length, position):
    got, start = [], 0 if position is None else 255
    with pytest.raises(ReplayFailed) as told:
        got.extend(record.offset for record in client.replay(ReplayRequest("orders-0", position, length)))
    assert got == list(range(start, DAMAGED_FROM))
    assert (told.value.code, told.value.offset, told.value.segment) == (ErrorCode.CORRUPT_MESSAGE, DAMAGED_FROM, 0)


@pytest.mark.parametrize("length", [TO_END, FOLLOW, RECORDS])
def test_a_time_that_is_looked_for_in_the_damage_is_refused_with_its_place(client, length):
    with pytest.raises(ReplayRefused, match=f"offset {DAMAGED_FROM}") as told:
        client.replay(ReplayRequest("orders-0", AtTime(DAMAGED_FROM + 1), length))
    assert (told.value.code, told.value.segment) == (ErrorCode.CORRUPT_MESSAGE, 0)


def test_below_the_damage_nothing_fails(client):
    got = [record.offset for record in client.replay(ReplayRequest("orders-0", 280, 10))]
    assert got == list(range(280, DAMAGED_FROM))


def test_the_recordings_show_it(client):
    (one,) = client.recordings()
    assert (one.damaged_from, one.end_offset >= DAMAGED_FROM) == (DAMAGED_FROM, True)


def test_the_log_and_its_reader_raise_it(tmp_path):
    path = damaged_log(tmp_path / "ours")
    with SegmentLog.open(path) as log, SegmentLog.open_reader(path) as reader:
        for one in (log, reader):
            got = []
            with pytest.raises(CorruptBatch) as met:
                got.extend(record.offset for record in one.records(0))
            assert (got, met.value.offset) == ([*range(DAMAGED_FROM)], DAMAGED_FROM)
            assert one.offset_for_timestamp(DAMAGED_FROM - 1) == DAMAGED_FROM - 1
            with pytest.raises(CorruptBatch):
                one.offset_for_timestamp(DAMAGED_FROM)
        assert log.ends()[:4] == reader.ends()[:4]


def test_a_comparison_with_a_damaged_copy_fails(tmp_path, client):
    """`pushrep log verify --against`."""
    with ReplayClient(tmp_path / "whole") as whole, pytest.raises(ReplayFailed):
        compare_copies(whole, client, "orders-0")


UNOPENED = {
    "damaged": lambda log: (log / PARTITION_METADATA_NAME).write_text("no id"),
    "compacted": lambda log: (log.parent / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 5\n"),
}


@pytest.mark.parametrize("why", UNOPENED)
def test_a_log_that_can_not_be_opened_is_invalid_and_hides_no_other(world, why):
    """Of a node and of its directory; who asks for it is refused with the reason, and counted."""
    node = world.node()
    leader = world.leader(node).fill(100)
    world.leader(node, TopicIdPartition(uuid4(), "rates", 0), outbox=leader.outbox).fill(10)
    world.client(node).recordings()
    log = world.root / "node" / str(leader.outbox) / "orders-0"
    node.stop()
    UNOPENED[why](log)
    node = world.node(port=node.address.port)
    with ReplayClient(log.parent) as directory:
        for client in (world.client(node), directory):
            found = {one.name: one for one in client.recordings()}
            assert found["orders-0"].state is RecordingState.INVALID
            assert why in found["orders-0"].invalid
            assert found["rates-0"].state is RecordingState.VALID
            assert len(list(client.replay(ReplayRequest("rates-0", length=TO_END)))) == 10
            if (client, why) == (directory, "damaged"):  # whose records they are is not known, but they are whole
                assert len(list(client.replay(ReplayRequest("orders-0", length=TO_END)))) == 100
                continue
            with pytest.raises(ReplayRefused, match=why) as told:
                client.replay(ReplayRequest("orders-0"))
            assert told.value.code is ErrorCode.INVALID_RECORDING
    assert node.replay_server.counters().refused == {ErrorCode.INVALID_RECORDING: 1}


def test_a_log_whose_metadata_are_damaged_counts_for_who_may_read_the_outbox(world):
    """A rule for some topics opens no outbox that has others, too, whatever became of their files."""
    node = world.node()
    leader = world.leader(node).fill(10)
    world.leader(node, TopicIdPartition(uuid4(), "rates", 0), outbox=leader.outbox).fill(10)
    log = world.root / "node" / str(leader.outbox) / "orders-0"
    node.stop()
    UNOPENED["damaged"](log)
    node = world.node(port=node.address.port, allow=frozenset({"reader=rates:read", "both=*:read"}))
    node.access.check("both", ApiKey.START_REPLAY, leader.outbox)
    with pytest.raises(Refusal):
        node.access.check("reader", ApiKey.START_REPLAY, leader.outbox)


def test_a_log_whose_opening_failed_is_invalid_until_its_files_are_back(world):
    node = world.node()
    leader = world.leader(node).fill(100)
    world.client(node).recordings()
    first = segment_path(world.root / "node" / str(leader.outbox) / "orders-0", 0)
    node.stop()
    first.rename(world.root / "aside")
    os.mkfifo(first)
    client = world.client(world.node(port=node.address.port))
    with pytest.raises(ReplayRefused, match="a pipe") as told:
        client.replay(ReplayRequest("orders-0"))
    assert told.value.code is ErrorCode.INVALID_RECORDING
    (one,) = client.recordings()
    assert (one.state, "a pipe" in one.invalid) == (RecordingState.INVALID, True)
    (world.root / "aside").rename(first)
    (one,) = client.recordings()
    assert (one.state, one.invalid) == (RecordingState.VALID, "")
    assert len(list(client.replay(ReplayRequest("orders-0", length=TO_END)))) == 100


def test_a_recording_without_its_first_file_is_invalid_and_says_why(world):
    """Of a node and of its directory; whole again once the file is back."""
    node = world.node()
    leader = world.leader(node).fill(100)
    log = world.root / "node" / str(leader.outbox) / "orders-0"
    node.stop()
    first, aside = segment_path(log, 0), world.root / "aside"
    first.rename(aside)
    node = world.node(port=node.address.port)
    following = segment_path(log, list_segments(REAL_FILESYSTEM, log)[0])
    with ReplayClient(log.parent) as directory:
        for client, which in ((world.client(node), 1), (directory, "orders-0")):
            for _ in range(2):  # the second time the node has tried to open it
                (one,) = client.recordings()
                assert one.state is RecordingState.INVALID
                assert str(int(following.stem)) in one.invalid
                for length in (TO_END, FOLLOW):
                    with pytest.raises(ReplayRefused, match=str(int(following.stem))) as told:
                        client.replay(ReplayRequest(which, None, length))
                    assert told.value.code is ErrorCode.INVALID_RECORDING
        with pytest.raises(ReplayRefused, match="first file") as told:
            world.client(node).truncate(1, 50)
        assert told.value.code is ErrorCode.INVALID_RECORDING
        aside.rename(first)
        for client in (world.client(node), directory):
            (one,) = client.recordings()
            assert (one.state, one.invalid) == (RecordingState.VALID, "")
            assert len(list(client.replay(ReplayRequest("orders-0", None, TO_END)))) == 100


def flip_value(data, position):
    data[position + 80] ^= 1


def move_base(data, position):
    struct.pack_into(">q", data, position, MIDDLE + 1)


def lower_epoch(data, position):
    struct.pack_into(">i", data, position + 12, -1)


def lengthen(data, position):
    struct.pack_into(">i", data, position + 8, 1 << 20)


def other_magic(data, position):
    data[position + 16] = 9


MIDDLE = 150
SPOILING = [flip_value, move_base, lower_epoch, lengthen, other_magic]


@pytest.mark.parametrize("spoil", SPOILING)
@pytest.mark.parametrize("position", [None, 95], ids=["start", "offset"])
@pytest.mark.parametrize("length", [TO_END, FOLLOW, RECORDS])
def test_a_block_with_damage_in_it_gives_its_whole_batches_first_and_the_same_place_everywhere(
    world, spoil, position, length
):
    """Of a node, beside its files, and as a directory of its own."""
    node = world.node(config=BIG)
    leader = world.leader(node)
    for times in batches_of_ten():
        leader.append(*values_of(times), timestamps_ms=times)
    log = world.root / "node" / str(leader.outbox) / "orders-0"
    node.stop()
    node = world.node(port=node.address.port, config=BIG)  # it has opened the log, and found it whole
    path = segment_path(log, 0)
    data, at = bytearray(path.read_bytes()), 0
    while BatchHeader.parse(data, at).base_offset < MIDDLE:
        at += BatchHeader.parse(data, at).size_bytes
    spoil(data, at)
    with path.open("r+b") as file:
        file.write(data)
    ends = []
    with ReplayClient(log.parent) as directory:
        for client in (directory, world.client(node)):
            got = []
            with pytest.raises(ReplayFailed) as told:
                got.extend(record.offset for record in client.replay(ReplayRequest("orders-0", position, length)))
            ends.append((got, told.value.code, told.value.offset, told.value.segment))
    assert ends[0] == (list(range(position or 0, MIDDLE)), ErrorCode.CORRUPT_MESSAGE, MIDDLE, 0)
    assert ends[1] == ends[0]
