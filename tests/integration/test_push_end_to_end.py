"""A leader, nodes and sockets in one process: what replicas hold, who is in sync, what survives which stop."""

import errno
import os
import socket
from dataclasses import replace
from threading import Event, Semaphore

import pytest

from pushrep.election.errors import NotLeader
from pushrep.election.messages import PushSessionEndReason
from pushrep.env import REAL_NETWORK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.reader import LogSlices
from pushrep.records import BatchHeader
from pushrep.replicate.errors import MayStillBeDelivered
from pushrep.replicate.settings import Replica
from pushrep.replicate.sockets import Address
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameLimits
from tests.integration.conftest import QUICK, SMALL, WAIT_S
from tests.ports import reserve


class CountedNetwork:
    """The system's network; how often it connected."""

    threads, listen, poller = REAL_NETWORK.threads, REAL_NETWORK.listen, REAL_NETWORK.poller

    def __init__(self):
        self.connected = 0

    def connect(self, address, timeout_s):
        self.connected += 1
        return REAL_NETWORK.connect(address, timeout_s)


def record_bytes(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def test_replicas_hold_the_leaders_bytes_and_its_watermark(world):
    service = world.service([world.node(1), world.node(2)])
    early = service.append(b"before anybody listened")
    service.start()
    for number in range(200):
        service.append(b"%d" % number, b"x" * number)
    assert service.wait() is None
    service.wait_for_all()
    for index in (1, 2):
        log = world.replica(index).log
        assert log.log_end_offset == service.logs[0].log_end_offset == early + 400
        assert log.leader_epochs == service.logs[0].leader_epochs
    # A bare rise of the watermark is shipped, too.
    service.wait_for(lambda _: all(world.replica(index).log.high_watermark == early + 400 for index in (1, 2)))
    assert service.leading.manager.memory.used_bytes == 0, "acknowledged by all: nothing is kept"
    world.close()
    leader = record_bytes(world.root / "leader" / "orders-0")
    assert leader
    assert record_bytes(world.directory(1)) == record_bytes(world.directory(2)) == leader


def test_flushed_counts_only_what_is_on_disk_everywhere(world):
    service = world.service([world.node(1), world.node(2)], durability=Durability.FLUSHED, min_insync=3).start()
    end = service.append(b"a", b"b")
    assert service.wait(end) is None
    for index in (1, 2):
        assert world.replica(index).log.flushed_offset == end


def test_a_node_that_flushes_always_says_so(world):
    service = world.service([world.node(1, flush=True)]).start()
    end = service.append(b"a")
    assert service.wait(end) is None
    service.wait_for(lambda leader: leader.sessions[1].flushed == end)


@pytest.mark.parametrize("partitions", [8])
def test_many_partitions_share_one_connection(world, partitions):
    network = CountedNetwork()
    service = world.service([world.node(1)], partitions=partitions, settings=replace(QUICK, network=network)).start()
    for n in range(partitions):
        service.append(b"to %d" % n, partition=n)
    for n in range(partitions):
        assert service.wait(partition=n) is None
    assert network.connected == 1, "what the logs were described on is gone on with"


def test_a_replica_that_was_away_gets_what_it_missed(world):
    service = world.service([world.node(1), world.node(2)], replica_lag_max_ms=200).start()
    service.append(b"all three")
    service.wait_for_all()
    world.nodes[2].stop()
    before = world.nodes[2].replica_epoch
    for number in range(50):
        service.append(b"two %d" % number)
    assert service.wait() is None, "two of three are enough"
    world.node(2)
    service.wait_for_all()
    assert world.replica(2).replica_epoch == before + 1, "a restart is a new replica epoch"
    world.close()
    assert record_bytes(world.directory(2)) == record_bytes(world.root / "leader" / "orders-0")


def test_an_idle_leader_notices_a_replica_that_was_started_again_and_gives_it_what_it_lost(world):
    """A power cut removed its newest records: they are pushed again without waiting for the next append."""
    service = world.service([world.node(1), world.node(2)], partitions=2).start()
    for number in range(50):
        service.append(b"record %d" % number)
    service.wait_for_all()
    before = world.nodes[2].replica_epoch
    world.nodes[2].stop()
    with SegmentLog.open(world.directory(2), SMALL, has_replicas=True) as log:
        log.truncate_to(20, force=True)
    world.node(2)
    for partition in (0, 1):  # the other was never written to
        service.wait_for(lambda leader: leader.sessions[2].id.replica_epoch == before + 1, partition)
        service.wait_for_all(partition)
    assert world.replica(2).log.log_end_offset == 50


def test_a_node_that_takes_smaller_frames_than_requests_from_the_file_is_caught_up_all_the_same(world):
    """The node's limit ends the connection, with a logged reason: requests get smaller, down to `request_bytes_max`."""
    limits = FrameLimits(frame_bytes_max=2 << 20)
    service = world.service([world.node(1, limits=limits)])
    for _ in range(40):
        service.append(bytes(300_000))
    service.start()
    service.wait_for_all()
    assert record_bytes(world.directory(1)) == record_bytes(world.root / "leader" / "orders-0")


def test_too_few_replicas_acknowledge_nothing_and_say_so_at_the_end(world):
    service = world.service([world.node(1), world.node(2)], min_insync=3).start()
    assert service.wait(service.append(b"three of three")) is None
    world.nodes[2].stop()
    service.wait_for(lambda leader: not leader.may_append_all or not leader.sessions[2].in_flight)
    failures = []
    service.leading.partitions[0].when_replicated(service.append(b"only two"), failures.append)
    service.wait_for(lambda leader: leader.sessions[1].acknowledged == 2)
    assert not failures
    service.leading.close()
    assert isinstance(failures[0], MayStillBeDelivered)


def test_records_that_only_the_old_leader_had_are_cut_by_epoch(world, tmp_path):
    """Divergence: member 0 wrote more, then member 1 led; member 0 comes back as a replica and is truncated."""
    node = world.node(1)
    service = world.service([node], members=(0, 1, 2)).start()
    service.append(b"both")
    service.wait_for_all()
    world.nodes[1].stop()
    for number in range(5):
        service.append(b"lost %d" % number)
    service.close()
    world.services.remove(service)
    # Member 1 leads with the log that it has; member 0 serves the old leader's directory.
    old = tmp_path / "node-0" / str(world.outbox_id)
    old.parent.mkdir()
    (tmp_path / "leader").rename(old)
    second = world.service([world.node(0)], name=f"node-1/{world.outbox_id}", epoch=513, members=(0, 1, 2)).start()
    end = second.append(b"new 1", b"new 2")
    assert second.wait(end) is None
    second.wait_for_all()
    assert world.replica(0).log.leader_epochs.entries == ((256, 0), (513, 1))
    assert [record.value for record in world.replica(0).log.records(0)] == [b"both", b"new 1", b"new 2"]
    world.close()
    assert record_bytes(old / "orders-0") == record_bytes(tmp_path / "node-1" / str(world.outbox_id) / "orders-0")


def test_a_replica_below_the_leaders_log_start_begins_anew(world):
    config = LogConfig(segment_bytes=4096, preallocate_bytes=0)
    service = world.service([world.node(1)], config=config)
    for number in range(20):
        service.append(b"%d" % number * 200)
    service.logs[0].advance_high_watermark(15)
    service.logs[0].flush()
    service.logs[0].purge(15)
    start = service.logs[0].log_start_offset
    assert start > 0
    service.close()
    world.services.remove(service)
    service = world.service([Replica(1, world.nodes[1].address)]).start()
    service.append(b"now")
    service.wait_for_all()
    assert world.replica(1).log.log_start_offset == start
    assert world.replica(1).log.log_end_offset == 21


def test_a_newer_leader_ends_the_old_ones_sessions(world):
    node = world.node(1)
    old = world.service([node], members=(0, 1, 2)).start()
    assert old.wait(old.append(b"by the old one")) is None
    with SegmentLog.open_reader(world.root / "leader" / "orders-0", isolation="written") as reader:
        batches = list(reader.batches(0))
    second = world.root / "second" / "orders-0"
    with SegmentLog.open(second, log_id=old.logs[0].log_id, has_replicas=True) as log:
        log.append_as_is(batches)
    new = world.service([node], name="second", epoch=514, members=(0, 1, 2)).start()
    assert new.wait(new.append(b"by the new one")) is None
    failures = []
    old.leading.partitions[0].when_replicated(old.append(b"too late"), failures.append)
    old.wait_for(lambda leader: leader.sessions[1].reason is PushSessionEndReason.STALE_REPLICA_EPOCH)
    old.wait_for(lambda _: bool(failures))  # of the other members none confirms the old grant
    led = old.leading.partitions[0]
    assert isinstance(led.resigned, NotLeader)
    assert isinstance(failures[0], NotLeader)
    assert not led.leader.may_append_all


def test_a_length_that_the_leaders_disk_changed_ends_the_session(world):
    """The file has fewer bytes than the header says: a push of the whole batch would be retried without end."""
    service = world.service([world.node(1)])
    good = service.append(b"whole")
    path = world.root / "leader" / "orders-0" / f"{0:020}.log"
    position = BatchHeader.parse(path.read_bytes()).size_bytes
    service.append(b"x" * 10_000)
    with path.open("r+b") as file:
        file.seek(position + 8)
        file.write((1 << 20).to_bytes(4))
    service.start()
    ends = service.leading.manager.session_ends
    service.wait_for(lambda _: ends[PushSessionEndReason.LEADER_LOG_ERROR] > 0)
    assert world.replica(1).log.log_end_offset in {0, good}


def test_faults_s4_a_name_is_resolved_at_each_connection(world, monkeypatch):
    """faults S4: a node that moved to another host is found there under its name."""
    port, hosts, resolve = world.node(1).address.port, {"node.test": "127.0.0.1"}, socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **named: resolve(hosts.get(host, host), *more, **named)
    )
    service = world.service([Replica(1, Address("node.test", port))])
    service.append(b"at the first host")
    service.start().wait_for_all()
    world.nodes[1].stop()
    world.ports[1].close()
    world.ports[1] = reserve("127.0.0.2", port)
    world.node(1)
    hosts["node.test"] = "127.0.0.2"
    end = service.append(b"at the other one")
    assert service.wait(end) is None
    assert world.replica(1).log.log_end_offset == end


def test_a_moment_without_descriptors_ends_no_session(world, monkeypatch):
    """faults B6: a log that can't be read for a shortage is read again after a pause, and the session goes on."""
    service = world.service([world.node(1)])
    end = service.append(b"only in the file")
    tried, is_short, read = Semaphore(0), Event(), LogSlices.read

    def read_if_possible(*arguments):
        if is_short.is_set():
            tried.release()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(*arguments)

    is_short.set()
    monkeypatch.setattr(LogSlices, "read", read_if_possible)
    service.start()
    for _ in range(3):
        assert tried.acquire(timeout=WAIT_S)
    is_short.clear()
    service.wait_for_all()
    assert world.replica(1).log.log_end_offset == end
    assert not service.leading.manager.session_ends, "it is the first one"


def test_a_batch_that_the_leaders_disk_changed_reaches_no_replica(world):
    """The replica's rules, bad CRC: the leader sends it once more from the log, where it finds it damaged."""
    service = world.service([world.node(1)])
    service.append(b"whole")
    good = service.logs[0].log_end_offset
    service.append(b"x" * 1000)
    path = world.root / "leader" / "orders-0" / f"{0:020}.log"
    with path.open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"y")
    service.start()
    ends = service.leading.manager.session_ends
    service.wait_for(lambda _: ends[PushSessionEndReason.LEADER_LOG_ERROR] > 0)
    assert (1, ErrorCode.CORRUPT_MESSAGE) in service.leading.manager.refusals
    assert world.replica(1).log.log_end_offset in {0, good}
