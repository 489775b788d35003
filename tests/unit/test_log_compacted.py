"""Logs that Kafka's cleaner has compacted: identity O2. They are refused by name; tools report each hole."""

import json
from uuid import UUID

import pytest

from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import CompactedLog, CorruptBatch, CorruptLog, SegmentLog
from pushrep.log.directory_files import (
    CLEANER_CHECKPOINT_NAME,
    CheckpointFile,
    compacted_logs,
    segment_path,
    write_checkpoint,
    write_partition_metadata,
)
from pushrep.log.reader import LogSlices
from pushrep.log.repair import Repairer
from pushrep.log.verify import FindingKind, verify_log
from pushrep.records import encode_batch
from pushrep.records.header import crc32c, write_crc

NAME = "compact-0"
# base of the segment -> the first offsets of its batches of three records; 40 was emptied
CLEANED = {0: [6, 12], 20: [20, 30], 40: [], 50: [53], 60: [60, 63]}
END = 66
HOLES = [(0, 6), (9, 12), (15, 20), (23, 30), (33, 40), (40, 50), (50, 53), (56, 60)]


def batch(first):
    return bytes(encode_batch([b"value"] * 3, timestamps_ms=1_700_000_000_000 + first, base_offset=first).data)


def put(path, segments, end=END):
    """A log's files, and its checkpoints."""
    path.mkdir(parents=True)
    write_partition_metadata(path, UUID(int=1))
    for base, batches in segments.items():
        segment_path(path, base).write_bytes(b"".join(batches))
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
        write_checkpoint(path.parent, checkpoint, {NAME: end})
    return path


@pytest.fixture
def log_path(tmp_path):
    path = put(tmp_path / NAME, {base: map(batch, firsts) for base, firsts in CLEANED.items()})
    (tmp_path / CLEANER_CHECKPOINT_NAME).write_text("0\n2\ncompact 0 60\nother 3 0\n")
    return path


def test_identity_o2_a_log_that_a_cleaner_went_over_is_refused_by_name_and_stays_as_it_is(log_path):
    before = {file: file.read_bytes() for file in log_path.iterdir()}
    for way in (SegmentLog.open, SegmentLog.open_reader, Repairer):
        with pytest.raises(CompactedLog, match=r"compact-0: a broker's cleaner has compacted it below offset 60") as no:
            way(log_path)
        assert (no.value.path, no.value.cleaned_offset) == (log_path, 60)
    assert {file: file.read_bytes() for file in log_path.iterdir()} == before


def test_identity_o2_a_log_beside_it_that_no_cleaner_went_over_is_opened(log_path):
    assert compacted_logs(log_path.parent) == {NAME: 60}
    with SegmentLog.open(log_path.with_name("other-3")) as log:
        assert log.append([b"x"]).base_offset == 0
    assert (log_path.parent / CLEANER_CHECKPOINT_NAME).read_text().startswith("0\n2\ncompact 0 60\n"), "a broker's"


def test_identity_o2_verify_reports_each_hole_and_goes_on(log_path):
    report = verify_log(log_path)
    assert {finding.kind for finding in report.findings} == {FindingKind.HOLE}
    assert [finding.offset for finding in report.findings] == [start for start, _ in HOLES]
    assert [f"up to {end} are missing" in one.reason for one, (_, end) in zip(report.findings, HOLES, strict=True)]
    assert (report.batches, report.records, report.is_whole) == (7, 21, False)
    assert cli_main.run(["log", "verify", str(log_path.parent), log_path.name]) == 1


def test_identity_o2_verify_of_a_compacted_log_names_damage_beside_the_holes(log_path):
    path = segment_path(log_path, 20)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = verify_log(log_path)
    assert [(one.kind, one.offset) for one in report.findings if one.kind is not FindingKind.HOLE] == [
        (FindingKind.DAMAGE, 23)
    ]


def test_identity_o2_dump_shows_each_hole_inside_of_a_segment(log_path, capsys):
    assert cli_main.run(["log", "dump", str(log_path.parent), log_path.name, "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [tuple(line["missing"]) for line in lines if "missing" in line] == [(0, 6), (9, 12), (23, 30), (50, 53)]
    assert [line["baseOffset"] for line in lines if "baseOffset" in line] == [6, 12, 20, 30, 53, 60, 63]
    assert cli_main.run(["log", "dump", str(log_path.parent), log_path.name]) == 1
    assert "Missing offsets: 23 to 29 before position:" in capsys.readouterr().out


def sparse(first, *, count, last_delta):
    """A batch of `count` records over `last_delta` + 1 offsets, as a cleaner leaves it."""
    data = bytearray(encode_batch([b"value"] * count, timestamps_ms=1, base_offset=first).data)
    data[23:27] = last_delta.to_bytes(4)
    write_crc(data, crc32c(data, 21))
    return bytes(data)


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        ({0: [batch(0), batch(6)]}, "base offset 6 where 3 is expected"),
        ({0: [batch(0), sparse(3, count=2, last_delta=2)]}, "2 records for 3 offsets"),
        ({0: [batch(0), sparse(3, count=1, last_delta=2)]}, "1 records for 3 offsets"),
    ],
)
def test_identity_o2_without_a_cleaner_a_hole_is_damage_and_nothing_is_cut(tmp_path, segments, why):
    path = put(tmp_path / NAME, segments, end=9)
    before = segment_path(path, 0).read_bytes()
    with SegmentLog.open(path) as log:
        assert log.damaged_from == 3
        assert why in log.recovery.damage
        assert [record.offset for record in log.records(0, 3)] == [0, 1, 2]
    assert segment_path(path, 0).read_bytes() == before
    assert [(one.kind, one.offset) for one in verify_log(path).findings] == [(FindingKind.DAMAGE, 3)]
    assert LogSlices(REAL_FILESYSTEM, path).read(3, 9, 1 << 20) is None


def test_identity_o2_without_a_cleaner_a_gap_between_two_files_is_refused_with_both_names(tmp_path):
    path = put(tmp_path / NAME, {0: [batch(0)], 5: [batch(5)]}, end=8)
    with pytest.raises(CorruptLog, match="ends at 3, the second begins at 5: a gap") as refused:
        SegmentLog.open(path)
    assert refused.value.names == ("00000000000000000000.log", "00000000000000000005.log")


def with_epoch(data, epoch):
    return data[:12] + epoch.to_bytes(4) + data[16:]


@pytest.mark.parametrize("by", ["batches", "read"])
def test_a_leader_epoch_that_falls_from_one_segment_to_the_next_is_found_by_every_way_of_reading(tmp_path, by):
    path = put(tmp_path / NAME, {0: [with_epoch(batch(0), 7)], 3: [with_epoch(batch(3), 5)]}, end=6)
    reader, slices = SegmentLog.open_reader(path, isolation="written"), LogSlices(REAL_FILESYSTEM, path)
    assert (slices.read(0, 6, 1).end_offset, slices.read(3, 6, 1)) == (3, None)
    if by == "batches":
        read = iter(reader.batches(0))
        assert next(read).header.base_offset == 0
        again = lambda: next(read)  # noqa: E731
    else:
        assert len(reader.read(0, 1)) == len(batch(0))
        again = lambda: reader.read(3, 1)  # noqa: E731
    with reader, pytest.raises(CorruptBatch, match="leader epoch falls from 7 to 5"):
        again()


def test_a_broker_that_was_stopped_while_it_replaced_segments_has_to_finish(tmp_path):
    path = put(tmp_path / NAME, {0: [batch(0)], 3: [batch(3)]}, end=6)
    segment_path(path, 0).rename(segment_path(path, 0, ".log.swap"))
    with pytest.raises(CorruptLog, match="start that broker once") as refused:
        SegmentLog.open(path)
    assert refused.value.names == ("00000000000000000000.log.swap",)
