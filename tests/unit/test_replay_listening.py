"""A reader beside a writer of another hand: what ends its wait at the tip of a log."""

import asyncio
import gc
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.filesystem import Inotify, RealFilesystem, watch_directory
from pushrep.log import Durability, SegmentLog
from pushrep.replay import ReplayClient, ReplayRequest, waiting
from pushrep.replay.local import LocalReplays
from pushrep.replay.replay import Replay
from pushrep.replay.waiting import Listening, ReplayWaiter

WAIT_S = 30
LOOKS = 18
"""So many come soon after news."""


class DeafDisk(RealFilesystem):
    """A disk without notifications of writes."""

    def watch(self, directory):
        return None


def test_a_watch_hears_of_writes_once(tmp_path):
    (tmp_path / "there").write_bytes(b"before")
    watch = watch_directory(tmp_path)
    try:
        assert not watch.has_changed()
        with (tmp_path / "there").open("ab") as file:
            file.write(b"x")
        assert watch.has_changed()
        assert not watch.has_changed()
    finally:
        watch.close()
        watch.close()


def test_where_there_is_no_directory_or_no_room_nobody_tells(tmp_path):
    assert watch_directory(tmp_path / "nowhere") is None
    counts = []
    for _ in range(2):
        taken = list(iter(partial(watch_directory, tmp_path), None))
        assert not Inotify.has_room()
        for watch in taken:
            watch.close()
        counts.append(len(taken))
    assert counts[0] == counts[1] > 0, "this system has them, and each that is closed gives its place back"


def test_a_wait_ends_with_a_write_however_long_nothing_was_written(tmp_path, monkeypatch):
    listening = Listening(tmp_path, REAL_FILESYSTEM)
    try:
        for _ in range(LOOKS):
            listening.wait(WAIT_S, needs_write=True)
        monkeypatch.setattr("pushrep.replay.waiting._HARDLY_S", 2 * WAIT_S)
        begin_s = time.monotonic()
        threading.Timer(0.01, (tmp_path / "new").write_bytes, [b"x"]).start()
        for _ in range(2):  # it heard, so the next look comes soon
            listening.wait(WAIT_S, needs_write=True)
        assert time.monotonic() - begin_s < WAIT_S
    finally:
        listening.close()


class OverheardDisk(RealFilesystem):
    def watch(self, directory):
        self.heard = super().watch(directory)
        return self.heard


@pytest.mark.parametrize("is_async", [True, False])
def test_a_write_that_ended_a_wait_ends_no_other(tmp_path, is_async):
    """Else whoever follows a log would be busy from its first write on."""
    listening = Listening(tmp_path, disk := OverheardDisk())

    def wait(timeout_s):
        return asyncio.run(listening.wait_async(timeout_s)) if is_async else listening.wait(timeout_s)

    try:
        wait(0)
        (tmp_path / "new").write_bytes(b"x")
        wait(WAIT_S)
        assert not disk.heard.has_changed()
    finally:
        listening.close()


@pytest.mark.parametrize("disk", [REAL_FILESYSTEM, DeafDisk()], ids=["told", "not told"])
@pytest.mark.parametrize("bound", ["written", "stable"])
def test_who_follows_a_directory_gets_each_record_and_is_woken_by_a_stop(tmp_path, disk, bound):
    got = []
    with SegmentLog.open(tmp_path / "orders-0") as log, ReplayClient(tmp_path, filesystem=disk) as client:
        log.append(b"first")
        replay = client.replay(ReplayRequest("orders-0", bound=bound))
        reader = threading.Thread(target=lambda: got.extend(iter_noting(replay, log)))
        reader.start()
        reader.join(60)
        assert not reader.is_alive()
    assert got == [b"first", *(b"%d" % n for n in range(20))]


def iter_noting(replay, log):
    """While a record is read, another thread writes the next one; after the last one the replay is stopped."""
    for count, record in enumerate(replay):
        if count < 20:
            threading.Timer(0, log.append, [b"%d" % count], {"durability": Durability.FLUSHED}).start()
        else:
            threading.Timer(0.01, replay.stop).start()
        yield record.value


def test_an_event_loop_that_follows_a_directory_hears_too(tmp_path):
    async def follow(client, log):
        got = []
        async for record in (replay := client.replay(ReplayRequest("orders-0", bound="written"))):
            got.append(record.value)
            threading.Timer(0, *((log.append, [b"more"]) if len(got) < 5 else (replay.stop, []))).start()
        return got

    with SegmentLog.open(tmp_path / "orders-0") as log, ReplayClient(tmp_path) as client:
        log.append(b"first")
        assert asyncio.run(follow(client, log)) == [b"first", *[b"more"] * 4]


@pytest.fixture
def pauses(monkeypatch):
    """How long each wait would have lasted."""
    pauses = []
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(ReplayWaiter, "wait", lambda _self, _sock, timeout_s: pauses.append(timeout_s))
    return pauses


def test_who_has_all_that_is_written_looks_again_with_a_write_or_hardly_ever(tmp_path, pauses):
    """An idle follower costs little; what may come without a write, as a watermark does, is looked for more often."""
    listening, deaf = Listening(tmp_path, REAL_FILESYSTEM), Listening(tmp_path, DeafDisk())
    try:
        for one in (listening, deaf):
            one.found()
            for _ in range(LOOKS):
                one.wait(0, needs_write=True)
        pauses.clear()
        listening.wait(WAIT_S, needs_write=True)
        listening.wait(WAIT_S, needs_write=False)
        assert pauses[0] > 5 * pauses[1]
        deaf.wait(WAIT_S, needs_write=True)
        assert pauses[2] < 0.01, "nobody tells it: where one record came, the next one is near"
        (tmp_path / "written").write_bytes(b"x")
        listening.wait(WAIT_S, needs_write=True)
        listening.wait(WAIT_S, needs_write=True)
        assert pauses[3] > 5 * pauses[4]
        assert pauses[4] < 0.01, "it is published in a moment"
    finally:
        listening.close()
        deaf.close()


def test_a_write_that_was_heard_with_the_one_before_and_is_published_later_is_looked_for_soon(tmp_path, pauses):
    """The writer may be suspended between the write and its publication: no further notification follows."""
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append(b"first")
        session = LocalReplays(tmp_path).replay(ReplayRequest("orders-0", bound="written"))
        with Replay(session) as replay:
            assert next(iter(replay)).value == b"first"
            session.wait(0)
            log.append(b"second")
            log.append(b"third")
            session.wait(WAIT_S)
            published = session.source.facts
            session.source.facts = lambda: published()._replace(end=2)
            assert [record.value for record in replay.poll()] == [b"second"]
            session.wait(WAIT_S)
            assert pauses[-1] < 0.01
            session.source.facts = published
            assert [record.value for record in replay.poll()] == [b"third"]


def test_a_replay_that_is_closed_while_another_thread_waits_for_it_just_ends(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log, ReplayClient(tmp_path) as client:
        log.append(b"first")
        for _ in range(10):
            replay, got, begun = client.replay(ReplayRequest("orders-0")), [], threading.Event()

            def read(replay=replay, got=got, begun=begun):
                for record in replay:
                    got.append(record.value)
                    begun.set()
                got.append("over")

            reader = threading.Thread(target=read)
            reader.start()
            assert begun.wait(WAIT_S)
            replay.close()
            reader.join(WAIT_S)
            assert got == [b"first", "over"]


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def watches():
    found = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            found += str(link.readlink()) == "anon_inode:inotify"
    return found


def test_replays_that_waited_and_came_to_their_end_keep_no_descriptors(tmp_path):
    """A caller that iterates to the end does not call `close`: `for record in client.replay(...)`."""
    with SegmentLog.open(tmp_path / "orders-0") as log, ReplayClient(tmp_path) as client:
        before, before_watches = descriptors(), watches()
        for _ in range(30):
            end = log.log_end_offset
            replay = client.replay(ReplayRequest("orders-0", position=end, length=1, bound="written"))
            threading.Timer(0.002, log.append, [[b"soon"]]).start()
            assert len(list(replay)) == 1
            del replay
        assert descriptors() < before + 30, "the last few may be there still"
        assert watches() < before_watches + 10
