"""The logs of a directory share the writes of its checkpoints: how long a write is valid, and that no log waits for
it.
"""

import threading

import pytest

from pushrep.env import RealFilesystem
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile, read_checkpoint
from pushrep.log.retention import Retention
from pushrep.log.writer import LogWriter
from pushrep.records import encode_batch
from tests.support.simulated_disk import SimulatedClock


class SlowDisk(RealFilesystem):
    """Renaming takes as long as told, by the clock; `under_way` and `go_on` show and hold a write in the middle."""

    def __init__(self, clock):
        self.clock, self.takes_ms = clock, 0
        self.under_way, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def rename(self, source, target):
        self.under_way.set()
        assert self.go_on.wait(60)
        self.clock.advance(self.takes_ms)
        super().rename(source, target)


@pytest.fixture
def disk():
    return SlowDisk(SimulatedClock())


@pytest.fixture
def view(tmp_path, disk):
    (tmp_path / "orders-0").mkdir()
    directory = LogDirectory.acquire(tmp_path, disk, disk.clock)
    yield directory.attach("orders-0")
    directory.release()


@pytest.mark.parametrize(("takes_ms", "shared_ms"), [(0, 250), (25, 250), (60, 600), (5000, 1000)])
def test_a_slow_write_serves_for_longer_but_never_for_more_than_four_times(view, disk, tmp_path, takes_ms, shared_ms):
    disk.takes_ms = takes_ms
    view.checkpoint(recovery_point=1)
    assert view.sync_checkpoints(250)
    view.checkpoint(recovery_point=2)
    disk.clock.advance(shared_ms - 1)
    assert not view.sync_checkpoints(250)
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 1}
    disk.clock.advance(1)
    assert view.sync_checkpoints(250)
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 2}


def test_beside_a_write_nobody_waits_who_can_come_again(view, disk):
    view.checkpoint(recovery_point=1)
    disk.go_on.clear()
    writer = threading.Thread(target=view.sync_checkpoints)
    writer.start()
    try:
        assert disk.under_way.wait(60)
        assert not view.sync_checkpoints(250), "it is not known to be written"
    finally:
        disk.go_on.set()
        writer.join()
    assert view.sync_checkpoints(250)


class Called:
    """A flusher that runs when the test lets it. asked: the logs that it will call."""

    def __init__(self):
        self.asked = []

    def attach(self, log):
        pass

    def detach(self, log):
        pass

    def soon(self, log, _delay_ms):
        self.asked.append(log)
        return True


@pytest.fixture
def flusher(monkeypatch):
    called = Called()
    for module in ("directory", "flush_scheduler"):
        monkeypatch.setattr(f"pushrep.log.{module}.process_flusher", lambda: called)
    return called


def test_logs_that_share_a_write_are_not_flushed_again_for_it(tmp_path, flusher):
    """Each of a thousand logs would be called four times a second, and find that another had just written."""
    names = [f"orders-{n}" for n in range(4)]
    logs = [SegmentLog.open(tmp_path / name) for name in names]
    flusher.asked.clear()
    for log in logs:
        log.append(encode_batch([b"a"], timestamps_ms=1), durability=Durability.FLUSHED)
    flushed, flusher.asked = dict.fromkeys(flusher.asked), []
    for one in flushed:
        one.flush_in_background()
    assert not flushed.keys() & {*flusher.asked}
    while flusher.asked:  # the directory, for all of them; again, while the last write is too young
        flusher.asked.pop().flush_in_background()
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == dict.fromkeys(names, 1)
    for log in logs:
        log.close()


def test_checkpoints_that_the_disk_refused_are_written_later_with_pauses_that_grow(
    tmp_path, flusher, monkeypatch, caplog
):
    """The flusher comes as often as each log likes: a minute of a full disk would be hundreds of lines."""
    disk = SlowDisk(SimulatedClock())
    monkeypatch.setattr("pushrep.log.directory.SYSTEM_CLOCK", disk.clock)  # so that it is flushed in the background
    directory = LogDirectory.acquire(tmp_path, disk, disk.clock)
    view = directory.attach("orders-0")
    view.checkpoint(recovery_point=1)

    def refuse(*_):
        raise OSError(28, "no space left")

    with monkeypatch.context() as full:
        full.setattr(SlowDisk, "rename", refuse)
        for _ in range(600):
            directory.flush_in_background()
            assert flusher.asked.pop() is directory
            disk.clock.advance(100)
        assert 4 <= caplog.text.count("put off") <= 16
        with pytest.raises(OSError, match="no space"):
            view.sync_checkpoints()  # who has to know is told at once
    disk.clock.advance(15_000)
    directory.flush_in_background()
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {"orders-0": 1}
    view.checkpoint(recovery_point=2)
    disk.clock.advance(250)
    assert view.sync_checkpoints(250), "it is written as before"
    directory.release()


def test_a_log_whose_checkpoint_the_disk_refused_is_flushed_again(tmp_path, flusher, disk, monkeypatch, caplog):
    """Its records are on disk; its recovery point rises later, without another append."""

    def refuse(*_):
        raise OSError(28, "no space left")

    with SegmentLog.open(tmp_path / "orders-0", filesystem=disk) as log:
        flusher.asked.clear()
        log.append([b"a"], durability=Durability.FLUSHED)
        (writer,) = {*flusher.asked}
        flusher.asked.clear()
        with monkeypatch.context() as full:
            full.setattr(SlowDisk, "rename", refuse)
            writer.flush_in_background()
        assert "orders-0: checkpoint put off: [Errno 28] no space left" in caplog.text
        assert flusher.asked == [writer], "nobody writes its checkpoint any more"


def test_a_roll_brings_one_pass_of_retention_with_the_next_flush_and_no_more(tmp_path, flusher, monkeypatch):
    """Each pass looks at every segment: with every flush it would cost more than the flush."""
    passes, run = [], Retention.run
    monkeypatch.setattr(Retention, "run", lambda retention: passes.append(retention) or run(retention))
    config = LogConfig(segment_bytes=1000, preallocate_bytes=0, retention_bytes=1 << 20)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        flusher.asked.clear()
        log.append([b"x" * 100] * 30, durability=Durability.BUFFERED)
        (writer,) = {one for one in flusher.asked if isinstance(one, LogWriter)}
        passes.clear()
        for _ in range(3):
            writer.flush_in_background()
            assert len(passes) == 1


def test_a_write_that_was_wanted_earlier_makes_no_later_one_early(tmp_path, flusher):
    disk = SlowDisk(SimulatedClock())
    directory = LogDirectory.acquire(tmp_path, disk, disk.clock)
    view = directory.attach("orders-0")
    for recovery_point, wanted_ms, is_written in ((1, 2, True), (2, 250, False)):
        disk.clock.advance(100)
        view.checkpoint(recovery_point=recovery_point)
        view.sync_checkpoints_soon(wanted_ms)
        directory.flush_in_background()
        assert (read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT)["orders-0"] == recovery_point) is is_written
    directory.release()
