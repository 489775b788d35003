"""Every prefix and every flipped byte of a small log: a torn tail is cut, damage below the recovery point is
reported.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from pushrep.env import read_whole
from pushrep.log import CorruptBatch, CorruptLog, Durability, LogConfig, LogDamaged, SegmentLog
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, read_checkpoint, write_checkpoint
from pushrep.log.published import PUBLISHED_NAME
from pushrep.records import BatchHeader
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

NAME = "orders-0"
FIRST = "00000000000000000000.log"
BATCHES = [[b"a"], [b"bb", b"cc"], [b"d" * 30], [b"e", b"f", b"g"]]
VALUES = [value for batch in BATCHES for value in batch]


DIRECTORY = Path("/logs")
PATH = DIRECTORY / NAME


class Log:
    """A log on a disk in memory, so that it can be opened a thousand times."""

    def __init__(self, files):
        self.disk = SimulatedDisk()
        self.disk.make_directory(PATH)
        for path, data in files.items():
            file = self.disk.open(path, create=True)
            file.write_at(data, 0)
            file.close()

    def with_recovery_point(self, offset):
        write_checkpoint(DIRECTORY, CheckpointFile.RECOVERY_POINT, {NAME: offset}, self.disk)
        write_checkpoint(DIRECTORY, CheckpointFile.HIGH_WATERMARK, {NAME: offset}, self.disk)
        return self

    def open(self):
        return SegmentLog.open(PATH, filesystem=self.disk, clock=SimulatedClock())

    def bytes_of(self, path):
        return read_whole(self.disk, path, 1 << 20)

    def files(self):
        paths = [*(DIRECTORY / name for name in self.disk.list(DIRECTORY) if name != NAME)]
        paths += [PATH / name for name in self.disk.list(PATH)]
        return {path: self.bytes_of(path) for path in paths}

    def values(self, log):
        """All that it reads; of a damaged log what lies before the damage, where a reader gets the error."""
        damaged_from, found = log.recovery.damaged_from, []
        with nullcontext() if damaged_from is None else pytest.raises(CorruptBatch) as refused:
            found.extend(record.value for record in log.records(0))
        assert damaged_from is None or refused.value.offset == damaged_from
        return found


@pytest.fixture(scope="module")
def small_log():
    """Files of a log of four batches that was not closed clean, its bytes, where each batch ends: [(byte, offset)]."""
    small = Log({})
    with small.open() as log:
        for batch in BATCHES:
            log.append(batch, timestamps_ms=1_700_000_000_000, durability=Durability.BUFFERED)
    files = small.files()
    del files[DIRECTORY / CLEAN_MARKER_NAME]
    data = files[PATH / FIRST]
    ends, position = [(0, 0)], 0
    while position < len(data):
        header = BatchHeader.parse(data, position)
        position += header.size_bytes
        ends.append((position, header.next_offset))
    return files, data, ends


def changed(small_log, data, recovery_point):
    """The small log with other bytes in its file, and with this recovery point."""
    return Log({**small_log[0], PATH / FIRST: bytes(data)}).with_recovery_point(recovery_point)


def whole_below(ends, size):
    """(byte, offset) of the end of the last batch that is wholly within `size` bytes."""
    return max(end for end in ends if end[0] <= size)


def test_every_prefix_reopens_to_its_whole_batches(small_log):
    _, data, ends = small_log
    for size in range(len(data) + 1):
        here = changed(small_log, data[:size], 0)
        position, offset = whole_below(ends, size)
        with here.open() as log:
            assert here.values(log) == VALUES[:offset], f"cut to {size} bytes"
            cut = log.recovery.cut
            torn = data[position:size].rstrip(b"\0")  # zeros at the end are space that was allocated ahead
            assert (cut is None) == (torn == b""), f"{size}: {log.recovery}"
            if cut is not None:
                assert [here.bytes_of(PATH / name) for name in cut.kept_as] == [data[position:size]], "kept to the byte"
            assert log.append([b"next"]).base_offset == offset
            assert log.recovery.log_end_offset == offset


def test_recovery_run_twice_gives_the_same_log(small_log):
    _, data, ends = small_log
    here = changed(small_log, data[:-5], 0)
    here.open().close()
    first = here.bytes_of(PATH / FIRST)
    here.disk.remove(DIRECTORY / CLEAN_MARKER_NAME)
    with here.open() as log:
        assert log.recovery.opening.value == "abnormal"
        assert log.recovery.cut is None, "nothing is left to cut"
        assert log.log_end_offset == whole_below(ends, len(data) - 5)[1]
    assert here.bytes_of(PATH / FIRST) == first


def test_a_flipped_byte_above_the_recovery_point_is_a_torn_tail(small_log):
    _, data, ends = small_log
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x55
        here = changed(small_log, flipped, 0)
        position, offset = whole_below(ends, at)
        with here.open() as log:
            found, cut = here.values(log), log.recovery.cut
            if 0 <= at - position < 8 or 12 <= at - position < 16:
                # Base offset and epoch lie outside of the CRC. One that only grew can't be told from a true one; the
                # batch behind it then falls.
                assert found == VALUES[: len(found)], f"byte {at}"
                assert len(found) >= offset
            else:
                assert found == VALUES[:offset], f"byte {at}: {log.recovery}"
                assert cut is not None
                assert cut.offset == offset


def test_a_flipped_byte_below_the_recovery_point_is_damage_and_nothing_is_deleted(small_log):
    _, data, ends = small_log
    found_damage = 0
    for at in range(len(data)):
        position, offset = whole_below(ends, at)
        if at - position < 16:
            continue  # outside of the CRC: above
        flipped = bytearray(data)
        flipped[at] ^= 0x55
        for recovery_point in (offset + 1, len(VALUES)):
            here = changed(small_log, flipped, recovery_point)
            with here.open() as log:
                assert log.recovery.damaged_from == offset, f"byte {at}: {log.recovery}"
                assert here.values(log) == VALUES[:offset]
                assert log.log_end_offset == log.stable_offset == offset
                with pytest.raises(LogDamaged) as refused:
                    log.append([b"more"])
                assert refused.value.damaged_from == offset
                with pytest.raises(LogDamaged):
                    log.truncate_to(0, force=True)
            assert here.bytes_of(PATH / FIRST) == flipped, "nothing was deleted"
            marker = here.bytes_of(DIRECTORY / CLEAN_MARKER_NAME)
            assert NAME.encode() not in marker, "a damaged log is never listed as clean"
            found_damage += 1
    assert found_damage > 100


def test_what_opening_did_not_scan_is_found_by_a_read(tmp_path):
    path = tmp_path / NAME
    with SegmentLog.open(path, LogConfig(index_interval_bytes=200)) as log:
        for n in range(40):
            log.append([b"%03d" % n * 20], durability=Durability.BUFFERED)
    data = bytearray((path / FIRST).read_bytes())
    data[300] ^= 1
    (path / FIRST).write_bytes(data)
    with SegmentLog.open(path) as log:
        assert log.recovery.opening.value == "normal"
        assert len(list(log.records(30))) == 10, "what lies behind it can be read"
        with pytest.raises(CorruptBatch) as found:
            list(log.records(0))
        assert found.value.segment == path / FIRST
        assert found.value.position <= 300
        with pytest.raises(CorruptBatch):
            log.read(found.value.offset, 1000)


def test_a_log_that_ends_below_its_recovery_point_is_damaged(small_log):
    _, data, ends = small_log
    position, offset = ends[2]
    with changed(small_log, data[:position], len(VALUES)).open() as log:
        assert log.recovery.damaged_from == offset
        assert "DAMAGED" in str(log.recovery)
        assert log.log_end_offset == offset


def test_zeros_at_the_end_are_space_and_zeros_before_something_are_torn(small_log):
    _, data, _ends = small_log
    space = changed(small_log, data + bytes(5000), 0)
    with space.open() as log:
        assert log.log_end_offset == len(VALUES)
        assert log.recovery.cut is None
    assert space.bytes_of(PATH / FIRST) == data
    torn = changed(small_log, data + bytes(500) + b"x" + bytes(70), 0)
    with torn.open() as log:
        assert log.log_end_offset == len(VALUES)
        assert log.recovery.cut.position == len(data)
        assert torn.bytes_of(PATH / log.recovery.cut.kept_as[0]) == bytes(500) + b"x" + bytes(70)


@pytest.fixture
def rolled(tmp_path):
    """A log of several segments that was not closed clean, with recovery point 0."""
    path = tmp_path / NAME
    with SegmentLog.open(path, LogConfig(segment_bytes=400, index_interval_bytes=100)) as log:
        for n in range(30):
            log.append([b"%03d" % n * 10], durability=Durability.BUFFERED)
    (tmp_path / CLEAN_MARKER_NAME).unlink()
    write_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT, {NAME: 0})
    (tmp_path / PUBLISHED_NAME).unlink()  # the machine stopped: nothing is known to be on disk
    return path


def segments(path):
    return sorted(p for p in path.iterdir() if p.suffix == ".log")


def test_a_torn_segment_in_the_middle_takes_the_later_ones_aside(rolled):
    files = segments(rolled)
    data = bytearray(files[2].read_bytes())
    data[-1] ^= 1
    files[2].write_bytes(data)
    held = {file.name: file.read_bytes() for file in files}
    with SegmentLog.open(rolled) as log:
        end = log.log_end_offset
        assert int(files[2].stem) < end < int(files[3].stem)
        assert [int(r.value[:3]) for r in log.records(0)] == list(range(end))
        kept = log.recovery.cut.kept_as
        assert {name.removesuffix(".cut") for name in kept[1:]} == {file.name for file in files[3:]}
        assert all((rolled / f"{file.name}.cut").read_bytes() == held[file.name] for file in files[3:])
    assert [p.name for p in segments(rolled)] == [p.name for p in files[:3]]


@pytest.mark.parametrize("number", [0, 2])
def test_a_missing_segment_is_named_and_nothing_changes(rolled, number):
    files = segments(rolled)
    if number == 0:
        write_checkpoint(rolled.parent, CheckpointFile.LOG_START_OFFSET, {NAME: 0})
    files[number].unlink()
    before = {p.name: p.read_bytes() for p in segments(rolled)}
    with pytest.raises(CorruptLog) as refused:
        SegmentLog.open(rolled)
    assert files[number + 1].name in refused.value.names
    assert {p.name: p.read_bytes() for p in segments(rolled)} == before


def test_an_overlap_is_named(rolled):
    files = segments(rolled)
    wrong = files[2].with_name(f"{int(files[2].stem) - 1:020d}.log")
    files[2].rename(wrong)
    with pytest.raises(CorruptLog, match="overlap") as refused:
        SegmentLog.open(rolled)
    assert set(refused.value.names) == {files[1].name, wrong.name}


def test_an_empty_newest_segment_goes_and_its_predecessor_is_written_on(rolled):
    end = 30
    (rolled / f"{end:020d}.log").touch()
    with SegmentLog.open(rolled, LogConfig(segment_bytes=4000)) as log:
        assert log.log_end_offset == end
        log.append([b"030"])
        assert len(list(log.records(0))) == end + 1
    assert not (rolled / f"{end:020d}.log").exists()


def test_lost_and_broken_indexes_are_rebuilt(rolled):
    indexes = sorted(p for p in rolled.iterdir() if p.suffix in {".index", ".timeindex"})
    before = {p.name: p.read_bytes() for p in indexes}
    assert any(before.values())
    for n, index in enumerate(indexes):
        (index.unlink, lambda i=index: i.write_bytes(bytes(80)), lambda i=index: i.write_bytes(b"xyz"))[n % 3]()
    with SegmentLog.open(rolled, LogConfig(segment_bytes=400, index_interval_bytes=100)) as log:
        assert [int(r.value[:3]) for r in log.records(0)] == list(range(30))
    after = {p.name: p.read_bytes() for p in rolled.iterdir() if p.suffix in {".index", ".timeindex"}}
    assert after == before


def test_progress_of_a_recovery_is_saved(rolled):
    with SegmentLog.open(rolled) as log:
        assert log.recovery.segments_scanned == len(segments(rolled))
        assert log.recovery.bytes_scanned == sum(p.stat().st_size for p in segments(rolled))
        newest = int(segments(rolled)[-1].stem)
        saved = read_checkpoint(rolled.parent, CheckpointFile.RECOVERY_POINT)[NAME]
        assert saved in {newest, 30}, "every sealed segment at once; the newest with what other logs have to say"
    assert read_checkpoint(rolled.parent, CheckpointFile.RECOVERY_POINT) == {NAME: 30}
