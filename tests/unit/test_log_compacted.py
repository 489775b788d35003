"""Logs that Kafka's cleaner has compacted: gaps inside of segments and between them, below the offset in its
checkpoint.
"""

from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import CorruptBatch, CorruptLog, Durability, LogConfig, LogDamaged, SegmentLog
from pushrep.log.directory_files import (
    CheckpointFile,
    decode_checkpoint,
    read_checkpoint,
    segment_path,
    write_checkpoint,
    write_partition_metadata,
)
from pushrep.log.repair import Repairer
from pushrep.log.seals import read_seal
from pushrep.log.verify import verify_log
from pushrep.records import BatchHeader, RecordBatch, encode_batch
from pushrep.records.header import MAGIC_AT
from pushrep.replay.slices import BatchNotFound, OpenSegments, SliceReader
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

NAME = "compact-0"
# base of the segment -> the first offsets of its batches of three records; 40 was emptied, 60 is where it is written
CLEANED = {0: [6, 12], 20: [20, 30], 40: [], 50: [53], 60: [60, 63]}
CLEANED_OFFSET, END = 60, 66
LEADER_EPOCH_LAST_AT = 15  # no CRC covers it
OFFSETS = [first + n for batches in CLEANED.values() for first in batches for n in range(3)]


def batch(first):
    """Three records, of which a cleaner took the middle one: what is left keeps its offsets."""
    return encode_batch(
        [b"value %d" % n for n in range(first, first + 3)],
        keys=[b"%d" % n for n in range(first, first + 3)],
        timestamps_ms=1_700_000_000_000 + first,
        base_offset=first,
    )


@pytest.fixture
def log_path(tmp_path):
    path = tmp_path / NAME
    path.mkdir()
    (tmp_path / "other-3").mkdir()
    write_partition_metadata(path, UUID(int=1))
    for base, batches in CLEANED.items():
        segment_path(path, base).write_bytes(b"".join(bytes(batch(first).data) for first in batches))
    write_checkpoint(tmp_path, CheckpointFile.CLEANED_OFFSET, {NAME: CLEANED_OFFSET, "other-3": 7})
    write_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT, {NAME: END})
    write_checkpoint(tmp_path, CheckpointFile.HIGH_WATERMARK, {NAME: END})
    return path


def first_batch(data):
    return RecordBatch.check(data[: BatchHeader.parse(data).size_bytes])


def offsets(log, start=0, end=None):
    return [record.offset for record in log.records(start, end)]


def test_a_compacted_log_is_read_from_every_offset(log_path):
    with SegmentLog.open(log_path) as log, SegmentLog.open_reader(log_path) as reader:
        assert (log.log_start_offset, log.log_end_offset, log.recovery.damaged_from) == (0, END, None)
        for each in (log, reader):
            for start in range(END + 1):
                expected = [offset for offset in OFFSETS if offset >= start]
                assert offsets(each, start) == expected, f"from {start}"
                data = each.read(start, 1 << 20)
                assert bool(data) == bool(expected), f"from {start}"
                assert not data or first_batch(data).header.next_offset > expected[0] >= start
            for start, end in pairwise(range(0, END, 7)):
                assert offsets(each, start, end) == [offset for offset in OFFSETS if start <= offset < end]
        assert log.offset_for_timestamp(1_700_000_000_000 + 31) == 53
    for opening in range(2):  # the second is a normal one
        with SegmentLog.open(log_path) as log:
            assert log.append([b"next"]).base_offset == END + opening
            assert offsets(log) == [*OFFSETS, *range(END, END + 1 + opening)]


def found_from(reader, start, end):
    """The base offsets of what is read by headers alone."""
    bases = []
    while start < end and (found := reader.read(start, end, 1, want_offsets=True)):
        bases += [one.span.base_offset for one in found]
        start = found[-1].span.next_offset
    return bases


@pytest.mark.parametrize("cleaned", [60, 50])
def test_by_headers_alone_a_hole_between_segments_is_one_as_far_as_the_cleaner_came(log_path, cleaned):
    firsts = [first for batches in CLEANED.values() for first in batches]
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, {NAME: cleaned})
    files = OpenSegments(REAL_FILESYSTEM)
    for start in range(END):
        reader = SliceReader(log_path, REAL_FILESYSTEM, files)
        if start < 60 and cleaned < 60:
            below = min(start, 50)
            assert found_from(reader, below, 50) == [first for first in firsts if below - 3 < first < 50]
            with pytest.raises(BatchNotFound, match=r"segment 50 holds no batch for offset 5.*base offset 53 where 50"):
                found_from(reader, max(start, 50), END)
        else:
            assert found_from(reader, start, END) == [first for first in firsts if first > start - 3]
    files.close()


def slice_reader(log_path):
    return SliceReader(log_path, REAL_FILESYSTEM, OpenSegments(REAL_FILESYSTEM))


def test_by_headers_alone_a_gap_between_segments_that_no_cleaner_made_is_none(log_path):
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, {NAME: 15})
    assert found_from(slice_reader(log_path), 6, 15) == [6, 12]
    with pytest.raises(BatchNotFound, match="offset 15"):
        found_from(slice_reader(log_path), 6, END)


def test_by_headers_alone_a_damaged_batch_before_a_hole_is_no_part_of_the_hole(log_path):
    write_byte(log_path, 0, 1, MAGIC_AT, 7)
    assert found_from(slice_reader(log_path), 0, 9) == [6]
    with pytest.raises(BatchNotFound, match="offset 9"):
        found_from(slice_reader(log_path), 0, END)


def write_byte(log_path, segment, number, at, value):
    """Byte `at` of the header of one of the segment's batches."""
    path = segment_path(log_path, segment)
    start = sum(len(batch(first).data) for first in CLEANED[segment][:number])
    data = bytearray(path.read_bytes())
    data[start + at] = value
    path.write_bytes(data)


def by_records(log_path):
    return [one.header.base_offset for one in SegmentLog.open_reader(log_path, isolation="written").batches(0)]


def by_reads(log_path):
    reader, at = SegmentLog.open_reader(log_path, isolation="written"), 0
    while data := reader.read(at, 1):
        at = first_batch(data).header.next_offset
    return at


@pytest.mark.parametrize("way", [by_records, by_reads, lambda path: found_from(slice_reader(path), 0, END)])
def test_a_leader_epoch_that_falls_from_one_segment_to_the_next_is_found_by_every_way_of_reading(log_path, way):
    for segment, epoch in {0: 5, 20: 3, 50: 6, 60: 6}.items():
        for number in range(len(CLEANED[segment])):
            write_byte(log_path, segment, number, LEADER_EPOCH_LAST_AT, epoch)
    with pytest.raises((CorruptBatch, BatchNotFound), match="falls from 5 to 3"):
        way(log_path)


@pytest.mark.parametrize("recovery_point", [None, END])
@pytest.mark.parametrize(("cleaned", "damaged_from"), [(None, 0), (29, 23), (50, 50)])
def test_a_hole_above_the_cleaned_offset_is_damage_and_nothing_is_cut(log_path, cleaned, damaged_from, recovery_point):
    """A write that tears leaves no whole batch behind a hole: so this is one even where nothing was promised."""
    for checkpoint, offset in (
        (CheckpointFile.CLEANED_OFFSET, cleaned),
        (CheckpointFile.RECOVERY_POINT, recovery_point),
    ):
        write_checkpoint(log_path.parent, checkpoint, {} if offset is None else {NAME: offset})
    before = {path.name: path.read_bytes() for path in log_path.glob("*.log*")}
    with SegmentLog.open(log_path) as log:
        assert log.damaged_from == damaged_from
        assert "mark-cleaned" in log.recovery.damage
        assert offsets(log) == [offset for offset in OFFSETS if offset < damaged_from]
        with pytest.raises(LogDamaged):
            log.append([b"next"])
    assert {path.name: path.read_bytes() for path in log_path.glob("*.log*")} == before
    with SegmentLog.open_reader(log_path, isolation="written") as reader:
        assert [record.offset for record in reader.records(0, damaged_from)] == [
            offset for offset in OFFSETS if offset < damaged_from
        ]
        with pytest.raises(CorruptBatch, match="mark-cleaned"):
            offsets(reader)


@pytest.mark.parametrize("before", [None, 23, 50])
def test_mark_cleaned_admits_a_directory_whose_checkpoint_is_missing_or_too_low(log_path, before, capsys):
    other = {"other-3": 7}
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, other | ({} if before is None else {NAME: before}))
    assert not verify_log(log_path).is_whole
    assert cli_main.run(["log", "mark-cleaned", str(log_path), str(CLEANED_OFFSET)]) == 0
    assert "cleaned below 60" in capsys.readouterr().out
    assert read_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET) == other | {NAME: CLEANED_OFFSET}
    assert verify_log(log_path).is_whole
    seals = [read_seal(REAL_FILESYSTEM, log_path, base) for base in (0, 20, 40, 50)]
    assert [(seal.base_offset, seal.is_witnessed) for seal in seals] == [
        (0, False),
        (20, False),
        (40, False),
        (50, False),
    ]
    with SegmentLog.open(log_path) as log:
        assert (offsets(log), log.damaged_from) == (OFFSETS, None)


@pytest.mark.parametrize(
    ("offset", "why"), [(50, "cleaned below 50 already"), (58, "up to offset 56 only"), (67, "up to offset 66 only")]
)
def test_mark_cleaned_refuses_what_helps_nothing_and_changes_nothing(log_path, offset, why, capsys):
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, {NAME: 50})
    before = {path: path.read_bytes() for path in log_path.parent.rglob("*") if path.is_file()}
    assert cli_main.run(["log", "mark-cleaned", str(log_path), str(offset)]) == 1
    assert why in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_what_mark_cleaned_writes_is_on_disk_when_it_returns():
    disk, clock = SimulatedDisk(), SimulatedClock()
    home = Path("/logs") / NAME
    disk.make_directory(home)
    for base, batches in CLEANED.items():
        file = disk.open(segment_path(home, base), create=True)
        file.write_at(b"".join(bytes(batch(first).data) for first in batches), 0)
        file.sync()
        file.close()
    disk.sync_directory(home)
    Repairer(home, filesystem=disk, clock=clock).mark_cleaned(CLEANED_OFFSET)
    disk.lose_power()
    assert read_checkpoint(home.parent, CheckpointFile.CLEANED_OFFSET, disk) == {NAME: CLEANED_OFFSET}


def test_a_gap_between_two_files_is_named(log_path):
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, {NAME: 53})
    with pytest.raises(CorruptLog, match="a gap") as refused:
        SegmentLog.open(log_path)
    assert refused.value.names == ("00000000000000000050.log", "00000000000000000060.log")


def test_a_file_that_shrinks_above_the_cleaned_offset_is_found_by_reading(log_path):
    with SegmentLog.open(log_path, LogConfig(segment_bytes=200)) as log:
        for _ in range(4):
            log.append([b"x" * 100])
        path = segment_path(log_path, 67)
        assert path.exists()
        path.write_bytes(b"")
        with pytest.raises(CorruptBatch) as refused:
            offsets(log, END)
        assert (refused.value.segment, refused.value.offset) == (path, 67)


@pytest.mark.parametrize("cut", [0, 3, 6, 8, 9, 14, 16, 20, 21, 24, 31, 36, 40, 44, 50, 51, 55, 58, 60, 62, 64, 65])
def test_a_cut_in_a_hole_leaves_a_log_that_goes_on_behind_its_last_batch(log_path, cut):
    firsts = [first for batches in CLEANED.values() for first in batches]
    kept = [first for first in firsts if first + 3 <= cut]
    holder_base = max(base for base in CLEANED if base <= cut)
    in_file = [first for first in CLEANED[holder_base] if first + 3 <= cut]
    expected_end = in_file[-1] + 3 if in_file else holder_base
    with SegmentLog.open(log_path) as log:
        assert log.truncate_to(cut, force=True) == expected_end == log.log_end_offset
        assert offsets(log) == [first + n for first in kept for n in range(3)]
        base = log.append([b"a"] * 3, durability=Durability.BUFFERED).base_offset
        assert base == expected_end
    cleaned = read_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET)
    assert cleaned == {NAME: min(CLEANED_OFFSET, expected_end), "other-3": 7}, "nothing written since was cleaned"
    with SegmentLog.open(log_path) as log:
        assert log.recovery.damaged_from is None
        assert offsets(log)[-3:] == [base, base + 1, base + 2]


def test_a_torn_tail_below_the_cleaned_offset_lowers_it(log_path):
    write_checkpoint(log_path.parent, CheckpointFile.RECOVERY_POINT, {})
    path = segment_path(log_path, 20)
    path.write_bytes(path.read_bytes()[:-1])
    with SegmentLog.open(log_path) as log:
        assert log.recovery.cut is not None
        assert log.log_end_offset == 23
    assert read_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET) == {NAME: 23, "other-3": 7}


def test_a_broker_that_was_stopped_while_it_replaced_segments_has_to_finish(log_path):
    segment_path(log_path, 0).rename(segment_path(log_path, 0, ".log.swap"))
    before = sorted(log_path.iterdir())
    with pytest.raises(CorruptLog, match="start that broker once") as refused:
        SegmentLog.open(log_path)
    assert refused.value.names == ("00000000000000000000.log.swap",)
    assert sorted(log_path.iterdir()) == before or len(before) + 1 == len(list(log_path.iterdir()))


def test_kafkas_own_file_is_read_and_never_made(tmp_path):
    (tmp_path / "cleaner-offset-checkpoint").write_text("0\n2\ncompact 0 5100\n__consumer_offsets 12 3\n")
    assert read_checkpoint(tmp_path, CheckpointFile.CLEANED_OFFSET) == {"compact-0": 5100, "__consumer_offsets-12": 3}
    other = tmp_path / "never"
    with SegmentLog.open(other / "orders-0") as log:
        log.append([b"x"] * 10)
        log.truncate_to(0, force=True)
    assert not (other / "cleaner-offset-checkpoint").exists()


def test_a_lowered_offset_is_written_as_kafka_reads_it(log_path):
    with SegmentLog.open(log_path) as log:
        log.truncate_to(25, force=True)
    data = (log_path.parent / "cleaner-offset-checkpoint").read_bytes()
    assert decode_checkpoint(data) == {NAME: 23, "other-3": 7}
    assert data.startswith(b"0\n3\ncompact 0 23\n")
