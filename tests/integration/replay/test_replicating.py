"""`recording replicate`: a node's copy of another node's recording, through faults of both and of the link."""

import errno
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from pushrep.cli import main as cli_main
from pushrep.election.grants import Member
from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replay import NodeAccess, ReplayRefused
from pushrep.replay.catalogue import CopyOrigin
from pushrep.replicate.copying import RecordingCopies
from pushrep.wire.error_codes import ErrorCode
from tests.crash.test_failover_kill import Proxy
from tests.integration.replay.conftest import open_log, until
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

IMPATIENT = NodeAccess(backoff_min_ms=1, backoff_max_ms=20, reconnect_for_ms=200, connect_timeout_ms=2000)


@pytest.fixture
def target(world):
    return started(world.node(directory="target"))


def started(node):
    node.copies.access = lambda: IMPATIENT
    return node


def held(node, leader):
    """(end, the bytes of every batch) of the log at a node."""
    path = node.directory / str(leader.outbox) / str(leader.tp)
    with SegmentLog.open_reader(path, isolation="written", filesystem=node.store.filesystem) as log:
        return log.ends().end, b"".join(bytes(batch.data) for batch in log.batches(log.bounds().start))


def copied(node, origin, **more):
    state = node.copies.replicate(origin, **more)
    return until(lambda: (now := node.copies.state(state.recording_id)).end and now, "the copy did not end")


def test_a_stopped_recording_is_copied_as_it_is_and_again_from_where_the_copy_ends(world, node, leader, client, target):
    leader.stop()
    origin = CopyOrigin(str(node.address), 1)
    state = copied(target, origin)
    assert (state.end, state.position, state.name) == ("LIMIT_REACHED", 100, "orders-0")
    assert held(target, leader) == held(node, leader)
    there = world.client(target)
    (one,) = there.recordings()
    assert (one.origin, one.stable_offset, one.is_live) == (str(origin), 100, False)
    client.extend(1, 512)
    leader.epoch, leader.start_offset = 512, 100
    leader.come(node.address)
    leader.fill(150).stop()
    assert copied(target, origin).position == 150
    assert held(target, leader) == held(node, leader)
    with pytest.raises(ReplayRefused, match="is recording 1 here, not 7"):
        target.copies.replicate(origin, into=7)
    with pytest.raises(ReplayRefused, match="no recording 9"):
        target.copies.replicate(CopyOrigin(str(node.address), 9))


def test_a_recording_that_is_deleted_here_at_this_moment_is_in_use(node, leader, target):
    """The log is found, and then marked as deleted before its id is looked up."""
    leader.stop()
    origin = CopyOrigin(str(node.address), 1)
    copied(target, origin)
    server = target.replay_server
    to_delete = [1]

    def deletes_first(call):
        while to_delete:
            server.on_worker(lambda: server.recordings.deleted(server.recordings.find(to_delete.pop())))
        return server.on_worker(call)

    with (
        RecordingCopies(server.recordings, deletes_first, lambda: IMPATIENT) as copies,
        pytest.raises(ReplayRefused, match="is being deleted here: ask again"),
    ):
        copies.replicate(origin)


def test_until_an_offset_no_batch_goes_above_it_and_the_next_call_goes_on(node, leader, target):
    assert copied(target, CopyOrigin(str(node.address), 1, until=50)).position == 49
    assert held(target, leader)[0] == 49
    assert copied(target, CopyOrigin(str(node.address), 1)).position == 100
    assert held(target, leader) == held(node, leader)


def test_a_recording_that_begins_above_0_is_copied_from_there(world, node, leader, client, target):
    leader.stop()
    start = client.purge(1, 100)
    assert start > 0
    assert copied(target, CopyOrigin(str(node.address), 1)).end == "LIMIT_REACHED"
    assert world.client(target).recordings()[0].start_offset == start
    assert held(target, leader) == held(node, leader)


def test_a_live_one_is_followed_through_restarts_of_both_until_it_is_stopped(world, node, leader, target):
    state = target.copies.replicate(CopyOrigin(str(node.address), 1, follows=True))
    until(lambda: held(target, leader)[0] == 100)
    assert world.client(target).recordings()[0].is_live
    target = started(world.again(target, directory="target"))
    leader.fill(120)
    until(lambda: held(target, leader)[0] == 120)
    node = world.again(node)
    leader.come(node.address)
    leader.fill(140)
    until(lambda: held(target, leader)[0] == 140)
    assert target.copies.end(state.recording_id).end == "STOPPED"
    target = started(world.again(target, directory="target"))
    with pytest.raises(ReplayRefused, match="no copy 1 was begun here"):
        target.copies.state(state.recording_id)
    assert held(target, leader) == held(node, leader)


def test_a_source_with_another_history_ends_the_copy_and_changes_nothing_of_it(world, node, leader, client, target):
    leader.stop()
    origin = CopyOrigin(str(node.address), 1)
    assert copied(target, origin).position == 100
    before = held(target, leader)
    client.truncate(1, 50)
    state = copied(target, origin)
    assert (state.end, state.why) == ("TRUNCATED", "its source ends at offset 49, the copy at 100")
    client.extend(1, 512)
    leader.epoch, leader.end, leader.start_offset = 512, 49, 49
    leader.come(node.address)
    leader.fill(130).stop()
    assert copied(target, origin).end == "TRUNCATED"
    assert held(target, leader) == before


@pytest.mark.parametrize("by", ["session", "grant"])
def test_a_leader_that_pushes_to_the_copy_goes_on_from_its_end_and_the_copy_is_over(world, node, leader, target, by):
    state = target.copies.replicate(CopyOrigin(str(node.address), 1, follows=True))
    until(lambda: held(target, leader)[0] == 100)
    pushing = world.leader(target, leader.tp, outbox=leader.outbox)
    if by == "grant":
        pushing.grant(Member(0, "elsewhere:1"), Member(1, str(target.address)))
    pushing.end, pushing.epoch_before = 100, 256
    pushing.fill(110)
    leader.fill(110)
    assert until(lambda: target.copies.state(state.recording_id).end) == "LED"
    assert held(target, leader) == held(node, leader)
    with pytest.raises(ReplayRefused, match="leader's to write here"):
        target.copies.replicate(CopyOrigin(str(node.address), 1))


def test_a_copy_that_is_deleted_here_is_over(world, node, leader, target):
    state = target.copies.replicate(CopyOrigin(str(node.address), 1, follows=True))
    until(lambda: held(target, leader)[0] == 100)
    there = world.client(target)
    with pytest.raises(ReplayRefused) as live:
        there.extend(1, 999)
    assert live.value.code is ErrorCode.RECORDING_IN_USE
    there.delete(1).wait()
    leader.fill(110)
    assert until(lambda: target.copies.state(state.recording_id).end) == "RECORDING_DELETED"


def test_a_node_that_stops_begins_no_copy(node, leader, target):
    target.copies.close()
    with pytest.raises(ReplayRefused) as refused:
        target.copies.replicate(CopyOrigin(str(node.address), 1, follows=True))
    assert refused.value.code is ErrorCode.NODE_STOPPING


@pytest.fixture
def noting(target, monkeypatch):
    """The catalogue is told of a copy once this is set; `begun`: the copy waits for it."""
    catalogue, noting, begun = target.replay_server.recordings.catalogue, threading.Event(), threading.Event()
    originates = catalogue.originates

    def waiting(*origin):
        begun.set()
        assert noting.wait(30)
        originates(*origin)

    monkeypatch.setattr(catalogue, "originates", waiting)
    with ThreadPoolExecutor() as pool:
        yield SimpleNamespace(begun=begun, set=noting.set, submit=pool.submit, catalogue=catalogue)
        noting.set()


def test_a_node_that_stops_waits_for_no_catalogue(node, leader, target, noting):
    first = noting.submit(target.copies.replicate, CopyOrigin(str(node.address), 1, follows=True))
    assert noting.begun.wait(30)
    noting.submit(target.copies.close).result(30)
    noting.set()
    assert first.result(30).end is None, "the next start of the node goes on with it"
    assert not noting.catalogue.get(1).origin.is_done


def test_a_copy_that_is_ended_while_it_begins_is_over(node, leader, target, noting):
    first = noting.submit(target.copies.replicate, CopyOrigin(str(node.address), 1, follows=True))
    assert noting.begun.wait(30)
    ended = noting.submit(target.copies.end, 1)
    noting.set()
    assert ended.result(30).end == "STOPPED"
    first.result(30)
    assert noting.catalogue.get(1).origin.is_done
    assert copied(target, CopyOrigin(str(node.address), 1)).position == 100


def test_a_copy_that_the_catalogue_can_not_keep_does_not_run(node, leader, target, monkeypatch):
    origin = CopyOrigin(str(node.address), 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as failing:
        failing.setattr(target.replay_server.recordings.catalogue, "originates", full)
        with pytest.raises(OSError, match="full"):
            target.copies.replicate(origin)
        assert target.copies.state(1).end == "FAILED"
    assert copied(target, origin).position == 100


def test_the_command_copies_into_a_running_node_and_into_a_directory(world, node, leader, capfd):
    where = str(node.address)

    def replicate(data, *more):
        code = cli_main.run(["recording", "replicate", where, "orders-0", "--to", str(data), *more])
        return code, capfd.readouterr().out

    done = "orders-0 is copied up to offset 100, LIMIT_REACHED\n"
    assert replicate(world.root / "offline") == (0, done)
    target = started(world.node(directory="online"))
    with HandoverSocket(target):
        assert replicate(target.directory, "--until", "50") == (
            0,
            "orders-0 is copied up to offset 49, LIMIT_REACHED\n",
        )
        assert replicate(target.directory) == (0, done)
        assert replicate(target.directory, "--follow")[0] == 0
        leader.fill(120)
        until(lambda: held(target, leader)[0] == 120)
        assert "STOPPED" in replicate(target.directory, "--follow", "--stop")[1]
    assert held(target, leader) == held(node, leader)
    leader.stop()
    world.client(node).truncate(1, 50)
    assert replicate(world.root / "offline")[0] == 1


def rounds(world, seed, steps):
    """One source behind a link that is cut, one target on a disk that loses what was not synced."""
    chance, clock = random.Random(seed), SimulatedClock()
    disk = SimulatedDisk(seed, clock=clock)
    source = world.node(directory=f"source-{seed}")
    leader = world.leader(source).fill(20)
    link = Proxy()
    world.opened.callback(link.close)
    link.port = source.address.port
    target = started(world.node(directory=f"target-{seed}", filesystem=disk))
    origin = CopyOrigin(link.address, 1, follows=True)
    is_cut = False
    world.client(source).recordings()
    target.copies.replicate(origin)
    for _ in range(steps):
        step = chance.choice(["grow", "grow", "cut link", "source", "target", "power", "truncate", "look"])
        if step == "grow":
            leader.fill(leader.end + chance.randint(1, 60))
        elif step == "cut link":
            link.cut()
        elif step == "source":
            source = world.again(source, directory=f"source-{seed}")
            leader.come(source.address)
        elif step in {"target", "power"}:
            disk.is_off = step == "power"  # so that no thread of this node opens a log behind the cut
            with suppress(PushrepError, OSError, PowerLost):
                target.stop()
            if step == "power":
                disk.lose_power()
            target = started(world.node(port=target.address.port, directory=f"target-{seed}", filesystem=disk))
        elif step == "truncate" and leader.end > 10:
            at = chance.randint(1, leader.end - 1)
            leader.stop()
            end = world.client(source).truncate(1, at)
            is_cut = True
            log = open_log(source, leader.tp)
            leader.epoch, leader.epoch_before = leader.epoch + 256, log.leader_epochs.epoch_of(end - 1)
            leader.end = leader.start_offset = end
            leader.come(source.address)
            leader.fill(end + chance.randint(1, 40))
        else:
            wait_until_even(target, source, leader, seed)
        if ends(target):
            break
    wait_until_even(target, source, leader, seed)
    assert ends(target) in ({None} if not is_cut else {None, "TRUNCATED"}), (seed, ends(target))
    if ends(target) is None:
        assert held(target, leader) == held(source, leader), seed
    link.cut()
    target.stop()
    source.stop()


def wait_until_even(target, source, leader, seed):
    until(lambda: ends(target) or held(target, leader)[0] == held(source, leader)[0], f"seed {seed}")


def ends(node):
    with suppress(ReplayRefused):
        return node.copies.state(1).end
    catalogue = node.replay_server.recordings.catalogue  # over before this start of the node
    return "TRUNCATED" if catalogue.get(1).origin.is_done else None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of threads without a disk
def test_a_copy_under_faults_equals_its_source_or_says_truncated(world, torture):
    for seed in range(torture.count(4, 200)):
        rounds(world, seed, 12)
