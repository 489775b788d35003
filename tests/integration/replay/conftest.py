"""Nodes whose logs are replayed, and a leader that sends them exactly what a test wants."""

import errno
import os
import time
from contextlib import ExitStack
from uuid import uuid4

import pytest

from pushrep.election.grants import Grant
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.env.filesystem import RealFilesystem
from pushrep.log import LogConfig
from pushrep.records import RecordBatch, encode_batch
from pushrep.replay import NodeAccess, ReplayClient, ReplaySettings
from pushrep.replay.remote import RemoteSession
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import (
    AppendRecordsPartition,
    AppendRecordsRequest,
    AppendRecordsResponse,
    DescribeLogRequest,
    DescribeLogResponse,
    GrantRequest,
    GrantResponse,
)
from tests.ports import reserve
from tests.support.control_batches import as_control

WAIT_S = 60
SMALL = LogConfig(segment_bytes=4096, preallocate_bytes=0)
# Quick to come again, and patient with a machine that is busy: it may be a while until the other side is heard.
PATIENT = PushSettings(connect_timeout_ms=60_000, request_timeout_ms=60_000)
QUICK = NodeAccess(backoff_min_ms=1, backoff_max_ms=20, credit_bytes=64 << 10, connect_timeout_ms=60_000)


def until(what, told="it did not happen"):
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, told
        time.sleep(0.002)
    return found


@pytest.fixture
def connections(monkeypatch):
    """The connection of each remote replay, by the id of the session that it has attached to."""
    connections, attach = {}, RemoteSession.attach

    def attached(session, connection, session_id):
        attach(session, connection, session_id)
        connections[session_id] = connection

    monkeypatch.setattr(RemoteSession, "attach", attached)
    return connections


class Stubborn(RealFilesystem):
    """A disk from which no segment can be removed while it `keeps` them."""

    keeps = True

    def remove(self, path):
        if self.keeps and path.suffix == ".log":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().remove(path)


class StandingClock:
    """Clocks that stand until a test puts them forward."""

    def __init__(self):
        self.ms = 0

    def wall_ms(self):
        return 1_700_000_000_000 + self.ms

    def monotonic_ms(self):
        return self.ms


def open_log(node, tp):
    """A node's log while it is in use."""
    return next(replica.log for _, replica in node.replicas() if replica.tp == tp)


def take(replay, count):
    """`count` records of a replay that follows."""
    got = []
    until(lambda: got.extend(replay.poll()) or len(got) >= count, f"only {len(got)} of {count} records came")
    return got


def offsets(records):
    return [record.offset for record in records]


def control(batch: RecordBatch) -> RecordBatch:
    """The same as a marker, which is no data."""
    return RecordBatch(as_control(batch.data))


class Leader:
    """The leader of one log on one node. By default its records are below the high watermark and flushed at once."""

    def __init__(self, address, tp=None, *, outbox=None, epoch=256, tls=None):
        self.tp = tp or TopicIdPartition(uuid4(), "orders", 0)
        self.outbox, self.epoch, self.session, self.end, self.tls = outbox or uuid4(), epoch, 0, 0, tls
        self.client, self.watermark = None, 0
        self.epoch_before = -1
        self.start_offset = 0
        self.come(address)

    def describe(self):
        """The node's answer about the log, which it makes if it is missing."""
        asked = DescribeLogRequest(outbox_id=self.outbox, create=True, partitions=(self.tp,))
        described = self.client.ask(asked, DescribeLogResponse)
        assert described.error_code is ErrorCode.NONE
        self.replica_epoch = described.replica_epoch
        return described.logs[0]

    def come(self, address, *, is_refused=False):
        """Connect, describe, and begin a session. is_refused: the log is being removed, and there is no session."""
        if self.client is not None:
            self.client.close()
        self.client = ReplicaClient(address, self.tls or PATIENT)
        described = self.describe()
        if is_refused:
            assert described.error_code is ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp} was given out: {described}"
            return
        self.session += 1
        self.say(watermark=self.watermark)

    def say(self, *batches, flush=True, watermark=None, **more):
        end = batches[-1].header.next_offset if batches else self.end
        self.watermark = max(self.watermark, end) if watermark is None else watermark
        fields = {
            "tp": self.tp, "leader_epoch": self.epoch, "replica_epoch": self.replica_epoch, "session_id": self.session,
            "append_offset": self.end, "previous_epoch": self.epoch_before, "epoch_start_offset": self.start_offset,
            "high_watermark": self.watermark, "log_start_offset": 0, "flush_wanted": flush,
            "records": (b"".join(bytes(batch.data) for batch in batches),) if batches else (),
        }  # fmt: skip
        request = AppendRecordsRequest(partitions=(AppendRecordsPartition(**{**fields, **more}),))
        (result,) = self.client.ask(request, AppendRecordsResponse).results
        assert result.error_code is ErrorCode.NONE, result
        if batches:
            self.end, self.epoch_before = end, batches[-1].header.leader_epoch
        return result

    def batch(self, values, at=None, **columns):
        made = encode_batch(list(values), **{"timestamps_ms": 1, **columns})
        made.stamp(self.end if at is None else at, self.epoch)
        return made

    def append(self, *values, **columns):
        """One batch."""
        self.say(self.batch(values, **columns))
        return self

    def fill(self, count, per_batch=7, size=40, **more):
        """Records that tell their offset, up to offset `count`."""
        batches, at = [], self.end
        while at < count:
            many = min(per_batch, count - at)
            batches.append(self.batch([b"%06d" % n + b"." * size for n in range(at, at + many)], at))
            at += many
        for first in range(0, len(batches), 500):
            self.say(*batches[first : first + 500], **more)
        return self

    def cut(self, offset):
        """Another leader has only the records below the offset, and continues there; no record above it was
        acknowledged.
        """
        self.epoch += 256
        self.end = self.start_offset = offset
        self.say(self.batch([b"other"]), watermark=self.watermark)

    def close(self):
        self.client.close()

    def stop(self):
        """The leader closes its log."""
        self.say(end_session_reason=0)
        self.client.close()

    def grant(self, *members):
        grant = Grant(
            outbox_id=self.outbox, epoch=self.epoch, leader=self.epoch % 256, members=members, min_insync_replicas=1,
            members_epoch=self.epoch, pid_epoch=0, topic_id=self.tp.topic_id, topic="orders", partitions=1,
            carrier="key",
        )  # fmt: skip
        asked = GrantRequest(grant=grant, sender=grant.leader, member=1, partitions=(self.tp,))
        assert self.client.ask(asked, GrantResponse).error_code is ErrorCode.NONE


class World:
    def __init__(self, root):
        self.root, self.opened, self.leaders = root, ExitStack(), []

    def node(
        self, *, replay=None, directory="node", port=0, config=SMALL, filesystem=REAL_FILESYSTEM, clock=SYSTEM_CLOCK,
        **settings,
    ):  # fmt: skip
        if port == 0:
            port = self.opened.enter_context(reserve()).getsockname()[1]
        patient = {"connect_timeout_ms": 60_000, "liveness_timeout_ms": 60_000}  # as in PATIENT
        replay = ReplaySettings(**{"heartbeat_ms": 20, **patient, **(replay or {})})
        settings = NodeSettings(
            **{
                "address": Address("127.0.0.1", port), "allow": frozenset({"any"}), "replay": replay,
                "log_config": config, **settings,
            }
        )  # fmt: skip
        node = ReplicaNode(self.root / directory, settings, filesystem=filesystem, clock=clock)
        self.opened.callback(node.stop)
        return node

    def leader(self, node, *args, **more):
        leader = Leader(node.address, *args, **more)
        self.opened.callback(leader.close)
        return leader

    def client(self, node, access=QUICK):
        return self.opened.enter_context(ReplayClient(str(node.address), node=access))

    def again(self, node, **more):
        """The node, stopped and started at the same address."""
        node.stop()
        return self.node(port=node.address.port, **more)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    with made.opened:
        yield made


@pytest.fixture
def node(world):
    return world.node()


@pytest.fixture
def leader(world, node):
    """The leader of a log of 100 records in several segments."""
    return world.leader(node).fill(100)


@pytest.fixture
def client(world, node, leader):
    return world.client(node)
