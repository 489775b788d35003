"""Leaders and nodes on sockets of this machine: in this process where a test looks inside, else processes."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from pushrep.election.grants import Grant, Member
from pushrep.election.messages import batches_of
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.leading import Leading
from pushrep.replicate.node_connections import Connections
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from pushrep.wire import push_messages as wire
from tests.ports import reserve

WAIT_S = 60
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1)
SMALL = LogConfig(preallocate_bytes=0)


class Service:
    """A leader of `partitions` logs in one directory, with what an outbox does: append, tell, wait."""

    def __init__(
        self, directory, outbox_id, replicas, *, epoch=256, partitions=1, members=None, settings=QUICK, **more
    ):
        self.durability = more.pop("durability", Durability.BUFFERED)
        self.replicas = replicas
        members = members if members is not None else (0, *(replica.index for replica in replicas))
        leader = epoch % 256
        self.grant = Grant(
            outbox_id=outbox_id,
            epoch=epoch,
            leader=leader,
            members=tuple(Member(index) for index in members),
            min_insync_replicas=more.pop("min_insync", len(members) // 2 + 1),
            members_epoch=epoch,
            pid_epoch=0,
            topic_id=UUID(int=1),
            topic="orders",
            partitions=partitions,
            carrier="key",
        )
        config = more.pop("config", SMALL)
        self.logs = {
            n: SegmentLog.open(directory / f"orders-{n}", config, has_replicas=True) for n in range(partitions)
        }
        self.leading = Leading(
            outbox_id, self.grant, self.logs, replicas, durability=self.durability, settings=settings, **more
        )

    def start(self):
        self.leading.start()
        return self

    def append(self, *values, partition=0):
        """The end offset."""
        batch = encode_batch(list(values), timestamps_ms=1)
        result = self.logs[partition].append(batch, durability=self.durability)
        self.leading.partitions[partition].on_append(result.base_offset, [batch], SYSTEM_CLOCK.monotonic_ms())
        if self.durability is Durability.FLUSHED:
            self.leading.partitions[partition].on_flush(self.logs[partition].flushed_offset)
        return result.last_offset + 1

    def wait(self, end=None, partition=0, timeout=WAIT_S):
        """Wait until enough members hold everything below `end`; returns the error, None without one."""
        end = self.logs[partition].log_end_offset if end is None else end
        told, answer = threading.Event(), []

        def callback(error):
            answer.append(error)
            told.set()

        self.leading.partitions[partition].when_replicated(end, callback)
        assert told.wait(timeout), f"{end} not reached, the watermark is {self.logs[partition].high_watermark}"
        return answer[0]

    def wait_for(self, what, partition=0):
        """Wait until `what(leader)` of a partition is true."""
        led = self.leading.partitions[partition]
        pause = threading.Event()
        for _ in range(WAIT_S * 200):
            with led.lock:
                if what(led.leader):
                    return
            pause.wait(0.005)
        pytest.fail(f"never so: {led.leader.__dict__}")

    def wait_for_all(self, partition=0):
        """Wait until every replica has acknowledged everything."""
        self.wait_for(
            lambda leader: (
                all(
                    progress.is_live and progress.acknowledged == leader.log.log_end_offset
                    for progress in leader.sessions.values()
                )
                and len(leader.sessions) == len(self.replicas)
            ),
            partition,
        )

    def close(self):
        self.leading.close()
        for log in self.logs.values():
            log.close()


class World:
    """Nodes and services below one directory; everything is closed at the end."""

    def __init__(self, root):
        self.root, self.outbox_id = root, uuid4()
        self.nodes, self.services, self.ports = {}, [], {}

    def node(self, index, *, filesystem=REAL_FILESYSTEM, **settings):
        """A node; started again on the port that it had."""
        if index not in self.ports:
            self.ports[index] = reserve()
        address = Address(*self.ports[index].getsockname())
        settings = {"allow": frozenset({"any"}), "log_config": SMALL, **settings}
        settings = NodeSettings(address=address, **settings)
        node = ReplicaNode(self.root / f"node-{index}", settings, filesystem=filesystem)
        self.nodes[index] = node
        return Replica(index, node.address)

    def service(self, replicas, *, name="leader", **more):
        service = Service(self.root / name, self.outbox_id, replicas, **more)
        self.services.append(service)
        return service

    def outboxes(self, index):
        """The node's stored state of each outbox."""
        return self.nodes[index].store.outboxes()

    def kept(self, index):
        """The node's stored state of its only outbox."""
        (kept,) = self.outboxes(index)
        return kept

    def replica(self, index, partition=0):
        """A node's open log."""
        return next(one for _, one in self.nodes[index].replicas() if one.tp.partition == partition)

    def directory(self, index, partition=0):
        """The directory of a node's log."""
        return self.root / f"node-{index}" / str(self.outbox_id) / f"orders-{partition}"

    def close(self):
        for service in self.services:
            service.close()
        for node in self.nodes.values():
            node.stop()
        for held in self.ports.values():
            held.close()


def record_bytes(directory):
    """All segments of a log, one behind the other."""
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


class Listener(socket.socket):
    """Knows what it has accepted."""

    def __init__(self):
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.accepted = []
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self):
        sock, address = super().accept()
        self.accepted.append(sock)
        return sock, address


class ScriptedReplica:
    """A scripted replica behind the node's real sockets: the test chooses its responses.

    By default it describes empty logs. `answer(part)` gives a partition's result, by default success up to the part's
    end. `requests` has the requests, one for each partition. While `gate` is cleared, no response is sent. `beats` has
    the leader's beats.
    """

    def __init__(self, index=1):
        self.listener = Listener()
        self.replica = Replica(index, Address(*self.listener.getsockname()))
        self.requests, self.beats, self.frames = [], [], 0
        self.changed = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        self.answer = succeed
        self.describe = lambda tp: wire.LogDescription(tp=tp)
        self.replica_epoch = 7
        settings = NodeSettings(address=self.replica.address, allow=frozenset({"any"}), stop_timeout_s=1)
        self._connections = Connections(self.listener, settings, self._call)
        self._connections.start()

    def _call(self, request, _sender):
        if isinstance(request, wire.BeatRequest):
            with self.changed:
                self.beats.append(request)
                self.changed.notify_all()
            grant = {"grant_epoch": request.leader_epoch, "grant_leader": request.leader}
            return wire.BeatResponse(generation=request.generation, **grant)
        if isinstance(request, wire.GrantRequest):
            return wire.GrantResponse(member=request.member)
        if isinstance(request, wire.DescribeLogRequest):
            logs = tuple(map(self.describe, request.partitions))
            return wire.DescribeLogResponse(replica_epoch=self.replica_epoch, logs=logs)
        with self.changed:
            self.frames += 1
            # The memory of their records is used again once they are answered.
            self.requests += [replace(part, records=tuple(map(bytes, part.records))) for part in request.partitions]
            self.changed.notify_all()
        self.gate.wait(WAIT_S)
        return wire.AppendRecordsResponse(results=tuple(self.answer(part) for part in request.partitions))

    def wait_for(self, what):
        """Wait until `what(requests)` is true; returns the requests."""
        with self.changed:
            assert self.changed.wait_for(lambda: what(self.requests), WAIT_S), f"never so: {self.requests}"
            return list(self.requests)

    def records(self, tp=None):
        """The bytes that came, in order."""
        return b"".join(bytes(r) for part in self.requests if tp in {None, part.tp} for r in part.records)

    def cut(self):
        """Every connection goes, as by a cable that was pulled."""
        for accepted in self.listener.accepted:
            with suppress(OSError):  # it has gone by itself
                accepted.shutdown(socket.SHUT_RDWR)

    def stop(self):
        self.gate.set()
        self._connections.stop()


def end_of(part):
    """The offset behind a part's last record."""
    batches, _ = batches_of(part.records[0]) if part.records else ((), True)
    return batches[-1].next_offset if batches else part.append_offset


def succeed(part):
    return wire.AppendRecordsResult(log_end_offset=end_of(part), flushed_offset=end_of(part))


@pytest.fixture
def scripted():
    """Make scripted replicas: `scripted(index)`."""
    made = []

    def make(index=1):
        made.append(ScriptedReplica(index))
        return made[-1]

    yield make
    for replica in made:
        replica.stop()
