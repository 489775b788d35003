"""What an opening trusts: a clean marker that contradicts the last batch, and how much of a log was on disk."""

import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from pushrep.log import CorruptLog, Durability, LogConfig, LogDamaged, LogPoisoned, SegmentLog, directory
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, read_checkpoint, write_checkpoint
from pushrep.log.inspection import summarize
from pushrep.log.published import PUBLISHED_NAME, LogOffsets
from pushrep.log.verify import verify_log
from pushrep.records import encode_batch
from tests.programs import PythonProgram
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

pytestmark = pytest.mark.usefixtures("closes_its_files")

SMALL = LogConfig(segment_bytes=1024)


def closed_log(directory: Path, batches: int = 10, config: LogConfig | None = None) -> Path:
    """A log of ten records a batch, closed clean."""
    path = directory / "orders-0"
    with SegmentLog.open(path, config) as log:
        for first in range(0, 10 * batches, 10):
            log.append([b"%06d" % n for n in range(first, first + 10)], durability=Durability.BUFFERED)
    return path


def newest(path: Path) -> Path:
    return max(path.glob("*.log"))


def last_batch_at(segment: Path) -> int:
    data, at = segment.read_bytes(), 0
    while (following := at + 12 + struct.unpack_from(">i", data, at + 8)[0]) < len(data):
        at = following
    return at


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.log*")}


@pytest.mark.parametrize("bit", [0, 6, 16, 33, 40])
@pytest.mark.parametrize("config", [None, SMALL], ids=["one segment", "segments"])
def test_a_last_batch_that_contradicts_the_clean_marker_is_damage(tmp_path, bit, config):
    """identity P1: its base offset rotted, CRC and size of all are right; twice opened, it is damaged twice."""
    path = closed_log(tmp_path, config=config)
    segment = newest(path)
    at = last_batch_at(segment)
    data = bytearray(segment.read_bytes())
    data[at + 7 - bit // 8] ^= 1 << bit % 8
    segment.write_bytes(data)
    before = contents(path)
    for opening in ("first", "second"):
        assert not verify_log(path).is_whole, f"before the {opening} opening"
        with SegmentLog.open(path, config) as log:
            assert (log.damaged_from, log.log_end_offset) == (90, 90), opening
            with pytest.raises(LogDamaged):
                log.append(b"over it")
            assert [record.offset for record in log.records(0, 90)] == list(range(90))
        assert contents(path) == before, "something was overwritten"
    assert not verify_log(path).is_whole


@pytest.mark.parametrize(("values", "damaged_from"), [([b"abc"] * 13, 90), ([b"x" * 19] * 5, 95)])
def test_another_file_of_the_same_size_is_damage(tmp_path, values, damaged_from):
    """identity P1: every batch is whole and in its place, but the log has another end than the marker says."""
    path = closed_log(tmp_path / "ours")
    other = closed_log(tmp_path / "others", batches=9)
    with SegmentLog.open(other) as log:
        log.append(values)
    assert newest(other).stat().st_size == newest(path).stat().st_size
    newest(path).write_bytes(newest(other).read_bytes())
    before = contents(path)
    with SegmentLog.open(path) as log:
        assert log.damaged_from == damaged_from
    assert contents(path) == before


def test_bytes_behind_the_end_that_the_marker_names_are_damage(tmp_path):
    """identity P1: the log ends where it was closed, and its last batch is another; of what was closed nothing tore."""
    path = closed_log(tmp_path)
    segment = newest(path)
    data = segment.read_bytes()
    at = last_batch_at(segment)
    shorter = encode_batch([b"x"] * 10, timestamps_ms=1, base_offset=90).data
    segment.write_bytes((data[:at] + shorter).ljust(len(data), b"x"))
    before = contents(path)
    with SegmentLog.open(path) as log:
        assert (log.damaged_from, log.recovery.cut) == (100, None)
    assert contents(path) == before


def test_a_newest_segment_that_begins_behind_the_end_is_refused(tmp_path):
    """identity P1."""
    path = closed_log(tmp_path, config=SMALL)
    newest(path).rename(path / "00000000000000000500.log")
    with pytest.raises(CorruptLog, match=r"00000000000000000500\.log.*closed clean at 100"):
        SegmentLog.open(path)


WRITER = """
import sys, time
from pathlib import Path
from pushrep.log import Durability, LogConfig, SegmentLog
log = SegmentLog.open(sys.argv[1], LogConfig(flush_ms=int(sys.argv[2])))
for first in range(0, 100, 10):
    log.append([b"%06d" % n for n in range(first, first + 10)], durability=Durability.FLUSHED)
print("acknowledged", flush=True)
sys.stdin.read()
"""


def killed_writer(path: Path, flush_ms: int) -> PythonProgram:
    """A process that has acknowledged 100 records as flushed, and waits to be killed."""
    process = PythonProgram("-c", WRITER, path, flush_ms, has_input=True)
    assert process.stdout.readline() == "acknowledged\n"
    return process


def kill(process: PythonProgram) -> None:
    with process:
        process.kill()


def test_what_was_acknowledged_before_a_kill_is_never_cut_as_a_torn_tail(tmp_path):
    """identity P2: the state published since the last start of the machine has a higher end than the checkpoint."""
    path = tmp_path / "orders-0"
    process = killed_writer(path, 600_000)
    kill(process)
    (tmp_path / "recovery-point-offset-checkpoint").unlink(missing_ok=True)  # killed before it could be written
    segment = newest(path)
    data = bytearray(segment.read_bytes())
    data[len(data.rstrip(b"\0")) - 3] ^= 1  # in the last record's value; zeros behind it were allocated ahead
    segment.write_bytes(data)
    (finding,) = verify_log(path).findings
    assert (finding.kind.value, finding.offset) == ("damage", 90), "verify and opening agree"
    with SegmentLog.open(path) as log:
        assert (log.damaged_from, log.recovery.cut) == (90, None)
        with pytest.raises(LogDamaged):
            log.append(b"at an offset that was given out")
    assert segment.read_bytes() == data


@pytest.mark.parametrize("number", [1, 2], ids=["one before the last batch", "the last batch"])
@pytest.mark.parametrize(("written", "rotten"), [(3, 3 | 1 << 20), (5, 4)], ids=["a higher epoch", "a lower one"])
def test_a_rotten_epoch_in_the_unflushed_tail_is_no_new_epoch(tmp_path, written, rotten, number):
    """No CRC covers it, and it does not fall; the list of epochs has each one before its first batch is written."""
    path = tmp_path / "here" / "orders-0"
    with SegmentLog.open(path) as log:
        log.begin_epoch(3, 0)
        log.append([b"flushed"] * 10)
        log.begin_epoch(written, 10)
        for _ in range(2):
            log.append([b"written"] * 10, durability=Durability.BUFFERED)
        shutil.copytree(path.parent, tmp_path / "killed")
        epochs = log.leader_epochs
    path = tmp_path / "killed" / "orders-0"
    (path.parent / PUBLISHED_NAME).unlink()  # the machine went down: nothing says that more was on disk
    segment = newest(path)
    data = bytearray(segment.read_bytes())
    at = number * (12 + struct.unpack_from(">i", data, 8)[0])  # the batches are of one size
    assert struct.unpack_from(">i", data, at + 12) == (written,)
    struct.pack_into(">i", data, at + 12, rotten)
    segment.write_bytes(data)
    with SegmentLog.open(path) as log:
        assert (log.leader_epochs, log.log_end_offset, log.damaged_from) == (epochs, 10 * number, None)
        assert log.recovery.cut is not None
        assert str(rotten) in log.recovery.cut.reason


@pytest.mark.parametrize("has_index", [True, False])
def test_rot_below_the_log_start_is_no_torn_tail_where_the_recovery_point_is_lost(tmp_path, has_index):
    """identity P2: records below the log's start were on disk; their offsets were assigned, and are not assigned
    again.
    """
    path = closed_log(tmp_path, batches=30, config=LogConfig(index_interval_bytes=256))
    with SegmentLog.open(path) as log:
        log.delete_records(150)
    for name in (CLEAN_MARKER_NAME, PUBLISHED_NAME, CheckpointFile.RECOVERY_POINT.value):
        (tmp_path / name).unlink(missing_ok=True)
    segment = newest(path)
    if not has_index:
        segment.with_suffix(".index").unlink()
    data = bytearray(segment.read_bytes())
    data[3 * (12 + struct.unpack_from(">i", data, 8)[0]) + 100] ^= 1
    segment.write_bytes(data)
    with SegmentLog.open(path) as log:
        assert log.recovery.cut is None
        if has_index:  # what is read is not damaged
            assert [record.offset for record in log.records(150)] == list(range(150, 300))
            assert log.append(b"next").base_offset == 300
        else:
            assert log.damaged_from == 30
            with pytest.raises(LogDamaged):
                log.append(b"at an offset that was given out")
    assert has_index or segment.read_bytes() == data


def test_the_checkpoint_follows_what_was_acknowledged_whatever_flush_ms_says(tmp_path):
    """identity P2."""
    process = killed_writer(tmp_path / "orders-0", 600_000)
    try:
        wait_until(lambda: read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT).get("orders-0") == 100)
    finally:
        kill(process)


def test_a_roll_and_a_close_bring_the_recovery_point_to_disk(tmp_path):
    """identity P2: other logs of the directory stay open."""
    config = LogConfig(segment_bytes=1024, flush_ms=600_000)
    with SegmentLog.open(tmp_path / "orders-1", config):
        log = SegmentLog.open(tmp_path / "orders-0", config)
        for _ in range(20):
            log.append([b"%06d" % n for n in range(10)], durability=Durability.BUFFERED)
        wait_until(lambda: read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT).get("orders-0", 0) > 0)
        log.close()
        wait_until(lambda: read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT).get("orders-0") == 200)


def test_after_a_kill_a_close_writes_the_true_high_watermark(tmp_path):
    """identity P4: of a log to which nothing was appended since."""
    path = tmp_path / "orders-0"
    kill(killed_writer(path, 1000))
    write_checkpoint(tmp_path, CheckpointFile.HIGH_WATERMARK, {"orders-0": 29})
    SegmentLog.open(path).close()
    assert read_checkpoint(tmp_path, CheckpointFile.HIGH_WATERMARK)["orders-0"] == 100
    shown = summarize(path)
    assert (shown.is_clean, shown.high_watermark, shown.log_end_offset) == (True, 100, 100)


def test_a_cut_lowers_what_was_published(tmp_path):
    """identity P2: a kill behind a cut must not call the log damaged, since it ends below what was flushed once."""
    path = closed_log(tmp_path)
    shared = LogDirectory.acquire(tmp_path)
    try:
        view = shared.attach("orders-0")
        view.publish(LogOffsets(0, 100, 100, 100), 0)
        view.lower_published(40)
        view.close()
        view = shared.attach("orders-0")
        assert view.published_before is not None
        assert view.published_before.flushed_offset == 40
        view.close()
    finally:
        shared.release()
    assert path.exists()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class CountingDisk(SimulatedDisk):
    """Knows which files are open."""

    def __init__(self):
        super().__init__(clock=SimulatedClock())
        self.files = []

    def open(self, path, *, create=False, writable=True):
        self.files.append(super().open(path, create=create, writable=writable))
        return self.files[-1]

    def still_open(self):
        """Without the file that is mapped, which a real disk closes at once."""
        found = []
        for file in self.files:
            with suppress(OSError):
                file.size()
                found.append(file.path.name)
        return [name for name in found if name != PUBLISHED_NAME]


def open_on(disk):
    return SegmentLog.open(Path("/data/orders-0"), SMALL, filesystem=disk, clock=disk.clock)


def test_ctrl_c_in_a_call_of_the_disk_leaves_no_file_open():
    """Of a program that goes on: in an opening, in an append that begins a segment, and in an opening that recovers."""
    for number in count(1):
        disk, log = CountingDisk(), None
        open_on(disk).close()
        disk.interrupt_after(number)
        try:
            log = open_on(disk)
            log.append([b"x" * 900])
            log.append([b"y" * 900])
            disk.crash()
            log = None
            log = open_on(disk)
        except KeyboardInterrupt:
            pass
        is_over, disk.interrupt_at = disk.steps < disk.interrupt_at, None
        if log is not None:
            with suppress(LogPoisoned):  # the append could not be taken back
                log.close()
        assert disk.still_open() == [], f"Ctrl-C in call {number}"
        open_on(disk).close()
        if is_over:
            break
    assert number > 100, "the calls were interrupted"


def test_ctrl_c_behind_the_lock_frees_it(tmp_path, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "process_scrubber", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SegmentLog.open(tmp_path / "orders-0")
    monkeypatch.undo()
    SegmentLog.open(tmp_path / "orders-0").close()
