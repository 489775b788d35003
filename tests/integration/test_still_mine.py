"""Files that change underneath a leader, its nodes and a node's readers (the one log: unit/test_log_still_mine.py)."""

import os
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

from pushrep.log import FileRemoved, LogPoisoned
from pushrep.outbox import DeliveryFailed, LogStopped, NotEnoughReplicas
from pushrep.replay import ReplayRequest, ReplayTruncated
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until
from tests.integration.replay import conftest as replaying
from tests.integration.test_outbox_replicas import copy_of, record_bytes

HISTORY = 80
BATCH = 10


@pytest.fixture
def readers(tmp_path):
    made = replaying.World(tmp_path)
    with made.opened:
        yield made


@pytest.mark.parametrize("credit_bytes", [700, 64 << 10], ids=["a slow reader", "a reader that has all"])
@pytest.mark.parametrize("cut_at", [10, 30, 40, 70])
def test_faults_f5_a_reader_of_a_node_is_told_from_where_on_what_it_got_is_void(readers, cut_at, credit_bytes):
    """The log is cut and grows again, batch by batch as long as before, between two looks of the node's replay.

    What the kernel had not taken of a frame yet is of the new history: void, as all from the cut on.
    """

    def append(leader, value, until):
        while leader.end < until:
            leader.say(leader.batch([value] * BATCH), watermark=0)

    node = readers.node()
    leader = readers.leader(node)
    append(leader, b"old", HISTORY)
    client = readers.client(node, replace(replaying.QUICK, credit_bytes=credit_bytes))
    replay = client.replay(ReplayRequest("orders-0", bound="written"))
    batches = iter(replay.batches())
    given = [record for _ in range(3) for record in next(batches).records()]
    held, may_go = threading.Event(), threading.Event()
    node.replay_server.post(lambda: (held.set(), may_go.wait(WAIT_S)))
    assert held.wait(WAIT_S)
    leader.epoch += 256
    leader.end = leader.start_offset = cut_at
    append(leader, b"new", HISTORY + BATCH)
    may_go.set()
    told = None
    try:
        for batch in islice(batches, (HISTORY + BATCH) // BATCH - 3):
            given += batch.records()
    except ReplayTruncated as truncated:
        told = truncated
    values = [record.value for record in given]
    assert [record.offset for record in given] == list(range(len(given)))
    if told is not None:
        assert told.cut_offset == cut_at
        assert set(values[:cut_at]) == {b"old"}
    else:
        assert values == [b"old"] * cut_at + [b"new"] * (HISTORY + BATCH - cut_at)
        assert cut_at >= 3 * BATCH, "what was given was cut, and nobody said so"


def removed(path):
    path.unlink()


def renamed_and_made_anew(path):
    path.rename(path.with_name(path.name + ".1"))
    path.touch()


def emptied(path):
    os.truncate(path, 0)


WAYS = pytest.mark.parametrize("way", [removed, renamed_and_made_anew, emptied])


def newest(log_directory):
    return max(log_directory.glob("*.log"))


@WAYS
def test_faults_f2_a_leader_whose_newest_file_is_another_leads_on_with_what_members_hold(world, way):
    """Nothing is acknowledged into it; its partition stops alone, by name, and is opened again."""
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, 2, partitions=2) as outbox:
        for n in range(3):
            assert outbox.append(0, b"%d" % n).result(WAIT_S) == n
        wait_for_all(outbox)
        epoch = outbox.log(0).leader_epochs.latest_epoch
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(outbox.log(0)), "reopen", lambda _: None)  # not before it was looked at
            way(newest(outbox.log(0).path))
            with pytest.raises(DeliveryFailed):
                outbox.append(0, b"not here").result(WAIT_S)
            assert isinstance(outbox.log(0).stopped_by, FileRemoved)
            assert outbox.append(1, b"the other partition goes on").result(WAIT_S) == 0
            (problem,) = outbox.status().problems()
            assert (problem.name, problem.subject) == ("log_stopped", "partition 0")
            assert "another program has changed a file that only its writer may change" in problem.why

        def offset():
            with suppress(DeliveryFailed, LogStopped, NotEnoughReplicas):
                return outbox.append(0, b"after").result(WAIT_S)

        wait_until(lambda: offset() is not None, "its log is opened again by itself")
        values = [record.value for record in outbox.log(0).records(0)]
        assert values[:3] == [b"0", b"1", b"2"]
        assert values[3:] in ([b"after"], [b"not here", b"after"])
        wait_for_all(outbox)
        if way is emptied:  # else nothing was lost: what is still open is written back
            assert outbox.log(0).leader_epochs.latest_epoch > epoch
        held = [
            record_bytes(path) for path in (outbox.log(0).path, copy_of(world, outbox, 1), copy_of(world, outbox, 2))
        ]
        assert held[0] == held[1] == held[2]
        assert list(outbox.status().problems()) == []


@WAYS
def test_faults_f2_a_member_whose_newest_file_is_another_acknowledges_nothing_until_it_has_all_again(world, way):
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        for n in range(3):
            assert outbox.append(0, b"%d" % n).result(WAIT_S) == n
        wait_for_all(outbox)
        way(newest(copy_of(world, outbox, 1)))
        assert outbox.append(0, b"3").result(WAIT_S) == 3, "the leader and the other member are enough"
        wait_for_all(outbox)
        for n in range(4, 8):
            assert outbox.append(0, b"%d" % n).result(WAIT_S) == n
        wait_for_all(outbox)
        own = record_bytes(outbox.log(0).path)
        assert [record_bytes(copy_of(world, outbox, index)) for index in (1, 2)] == [own, own]
        assert list(outbox.status().problems()) == []
    with suppress(LogPoisoned):
        world.close()
