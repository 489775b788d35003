"""A subscriber gets a record by the append itself, before the record is on disk, and without polling."""

import threading

import pytest

from pushrep.env.filesystem import RealFile, RealFilesystem
from pushrep.replay import NodeAccess, ReplayRequest
from pushrep.replicate import replay_server
from tests.integration.replay.conftest import offsets, take

FOR_EVER_MS = 600_000
PATIENT = NodeAccess(silence_max_ms=FOR_EVER_MS)


class SlowFile(RealFile):
    __slots__ = ()
    may_sync = threading.Event()

    def sync(self):
        assert self.may_sync.wait(60)
        super().sync()


class SlowDisk(RealFilesystem):
    """A disk whose syncs end only when `SlowFile.may_sync` is set."""

    def open(self, path, *, create=False, writable=True):
        opened = super().open(path, create=create, writable=writable)
        opened.__class__ = SlowFile
        return opened


@pytest.fixture
def slow_disk(monkeypatch):
    """A slow disk, without polling of the log and without heartbeats: only notifications are left."""
    monkeypatch.setattr(replay_server, "_LOOK_MS", FOR_EVER_MS)
    SlowFile.may_sync.set()
    yield SlowFile.may_sync
    SlowFile.may_sync.set()


def test_what_is_written_is_read_before_the_disk_has_it_and_the_rest_when_it_has(world, slow_disk):
    node = world.node(replay={"heartbeat_ms": FOR_EVER_MS}, filesystem=SlowDisk())
    leader = world.leader(node).append(b"first")
    client = world.client(node, PATIENT)
    with (
        client.replay(ReplayRequest("orders-0", position=1, bound="written")) as written,
        client.replay(ReplayRequest("orders-0", position=1, bound="flushed")) as flushed,
        client.replay(ReplayRequest("orders-0", position=1, bound="high_watermark")) as watermarked,
    ):
        slow_disk.clear()
        appending = threading.Thread(target=leader.append, args=[b"second"])
        appending.start()
        assert offsets(take(written, 1)) == [1]
        assert appending.is_alive(), "its leader has no answer before the disk has it"
        assert flushed.poll() == watermarked.poll() == []
        slow_disk.set()
        assert offsets(take(flushed, 1)) == [1]
        assert offsets(take(watermarked, 1)) == [1]
        appending.join(60)


def test_a_watermark_alone_wakes_who_waits_for_it(world, slow_disk):
    node = world.node(replay={"heartbeat_ms": FOR_EVER_MS}, filesystem=SlowDisk())
    leader = world.leader(node).append(b"first")
    with world.client(node, PATIENT).replay(ReplayRequest("orders-0", position=1, bound="high_watermark")) as replay:
        leader.say(leader.batch([b"second"]), watermark=1)
        assert replay.poll() == []
        leader.say(watermark=2)
        assert offsets(take(replay, 1)) == [1]
