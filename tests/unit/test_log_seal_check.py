"""The first read of a sealed segment below the cleaner's offset: identity O2, O4, O6."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import CorruptBatch, SegmentLog
from pushrep.log import reader as log_reader
from pushrep.log.directory_files import CheckpointFile, segment_path, write_checkpoint, write_partition_metadata
from pushrep.log.repair import Repairer
from pushrep.log.seals import read_seal
from pushrep.log.verify import FindingKind, verify_log
from pushrep.records import RecordBatch, encode_batch
from pushrep.replay.slices import OpenSegments, SliceReader, Tail
from pushrep.replicate.repairing import Repairs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.push_messages import DescribeLogResponse, FetchRecordsResponse

NAME = "compact-0"
CLEANED = {0: [2, 6, 12], 20: [23, 30], 40: [40, 43]}
CLEANED_OFFSET, END = 40, 46
FLIP_TO = {
    "a hole closed up": (0, 1, 5),
    "a hole made wider": (0, 1, 7),
    "a last batch": (0, 2, 13),
    "a first one": (20, 0, 22),
}


def batch(first):
    values = [b"value %d" % n for n in range(3)]
    return bytes(encode_batch(values, base_offset=first, timestamps_ms=1_700_000_000_000).data)


@pytest.fixture
def log_path(tmp_path):
    """Sealed, and closed clean."""
    path = tmp_path / NAME
    path.mkdir()
    write_partition_metadata(path, UUID(int=1))
    for base, firsts in CLEANED.items():
        segment_path(path, base).write_bytes(b"".join(map(batch, firsts)))
    write_checkpoint(tmp_path, CheckpointFile.CLEANED_OFFSET, {NAME: CLEANED_OFFSET})
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
        write_checkpoint(tmp_path, checkpoint, {NAME: END})
    with SegmentLog.open(path) as log:
        assert log.scrub.run_pass().seals_made == 2
    return path


def rot(path: Path, base: int, number: int, first: int) -> None:
    """Give batch `number` of a segment another base offset, in place."""
    file = segment_path(path, base)
    data, size = bytearray(file.read_bytes()), len(batch(0))
    data[number * size : number * size + 8] = first.to_bytes(8)
    file.write_bytes(data)


def firsts_of(path: Path) -> list[int]:
    with SegmentLog.open_reader(path) as reader:
        return [one.header.base_offset for one in reader.batches(0)]


@pytest.mark.parametrize("change", FLIP_TO)
def test_o6_no_record_of_a_segment_that_contradicts_its_seal_is_given(log_path, change):
    base, number, first = FLIP_TO[change]
    assert firsts_of(log_path) == [2, 6, 12, 23, 30, 40, 43]
    rot(log_path, base, number, first)
    given = []
    with SegmentLog.open_reader(log_path) as reader, pytest.raises(CorruptBatch, match="sealed") as refused:
        given += [record.offset for record in reader.records(base)]
    assert (refused.value.offset, refused.value.segment, refused.value.position) == (
        base,
        segment_path(log_path, base),
        0,
    )
    assert given == []
    with SegmentLog.open_reader(log_path) as reader:
        assert [record.offset for record in reader.records(40)] == [*range(40, 46)], "the others are given"
    files = OpenSegments(REAL_FILESYSTEM)
    with pytest.raises(CorruptBatch):
        SliceReader(log_path, REAL_FILESYSTEM, files).read(base, END, 1 << 20, want_offsets=False)
    files.close()
    (finding,) = verify_log(log_path).findings
    assert finding.kind is FindingKind.SEAL


def test_o6_what_is_no_batch_in_a_sealed_segment_is_named_by_its_place(log_path):
    file, size = segment_path(log_path, 20), len(batch(0))
    data = bytearray(file.read_bytes())
    data[size + 9] ^= 1  # of the second one's length
    file.write_bytes(data)
    with (
        SegmentLog.open_reader(log_path) as reader,
        pytest.raises(CorruptBatch, match="ends inside the batch") as refused,
    ):
        next(reader.records(23))
    assert (refused.value.offset, refused.value.position) == (26, size)


def test_o6_a_follower_passes_into_no_segment_that_contradicts_its_seal(tmp_path):
    """A hole closed up: the wrong offset is the very one that is expected."""
    path = tmp_path / NAME
    path.mkdir()
    write_partition_metadata(path, UUID(int=1))
    for base, firsts in {0: [0, 3], 6: [6, 10], 13: [13]}.items():
        segment_path(path, base).write_bytes(b"".join(map(batch, firsts)))
    write_checkpoint(tmp_path, CheckpointFile.CLEANED_OFFSET, {NAME: 13})
    with SegmentLog.open(path) as log:
        assert log.scrub.run_pass().seals_made == 2
        second = list(log.batches(0))[1].header
    tail = Tail(path, REAL_FILESYSTEM)
    assert [one.header.base_offset for one in tail.behind(second, 16)] == [6]
    rot(path, 6, 1, 9)
    assert not Tail(path, REAL_FILESYSTEM).behind(second, 16)


def test_o6_a_segment_without_a_seal_is_read_as_it_is(log_path):
    rot(log_path, 0, 1, 7)
    segment_path(log_path, 0, ".seal").unlink()
    assert firsts_of(log_path) == [2, 7, 12, 23, 30, 40, 43]


class Later(NamedTuple):
    ms: int

    def wall_ms(self):
        return self.ms


class Counting:
    """The real files; it counts looks at seals."""

    looks = 0

    def __getattr__(self, name):
        return getattr(REAL_FILESYSTEM, name)

    def open(self, path, **how):
        self.looks += path.suffix == ".seal"
        return REAL_FILESYSTEM.open(path, **how)


def test_o6_a_segment_is_held_once_in_a_process_and_again_if_its_file_is_another(log_path, monkeypatch):
    settled = segment_path(log_path, 0).stat().st_ctime_ns // 1_000_000 + 60_000
    monkeypatch.setattr(log_reader, "SYSTEM_CLOCK", Later(settled))
    files = Counting()

    def hold():
        with SegmentLog.open_reader(log_path, filesystem=files) as reader:
            list(reader.batches(0))

    hold()
    first = files.looks
    assert first == 2
    hold()
    assert files.looks == first, "both are remembered"
    whole = segment_path(log_path, 0)
    fresh = whole.with_name("fresh")
    fresh.write_bytes(whole.read_bytes())
    fresh.rename(whole)
    hold()
    assert files.looks == first + 1
    rot(log_path, 0, 1, 5)
    with pytest.raises(CorruptBatch):
        hold()
    with pytest.raises(CorruptBatch):
        hold()


def test_o6_dense_segments_cost_no_look_at_a_seal(log_path):
    write_checkpoint(log_path.parent, CheckpointFile.CLEANED_OFFSET, {})
    files = Counting()
    with (
        SegmentLog.open_reader(log_path, filesystem=files) as reader,
        pytest.raises(CorruptBatch, match="mark-cleaned"),
    ):
        list(reader.batches(0))
    assert files.looks == 0


def test_repair_removes_a_seal_that_is_damaged_itself(log_path):
    seal = segment_path(log_path, 0, ".seal")
    data = bytearray(seal.read_bytes())
    data[60] ^= 1
    seal.write_bytes(data)
    assert firsts_of(log_path) == [2, 6, 12, 23, 30, 40, 43], "it counts as none"
    report = Repairer(log_path).repair()
    assert report.after.is_whole
    assert not seal.exists()


def test_repair_from_a_copy_of_the_same_bytes_removes_a_seal_that_lies(log_path, tmp_path):
    copy = tmp_path / "copy" / NAME
    copy.mkdir(parents=True)
    for file in [*log_path.glob("*.log"), log_path / "partition.metadata"]:
        (copy / file.name).write_bytes(file.read_bytes())
    write_checkpoint(copy.parent, CheckpointFile.CLEANED_OFFSET, {NAME: CLEANED_OFFSET})
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
        write_checkpoint(copy.parent, checkpoint, {NAME: END})
    rot(log_path, 0, 1, 5)
    segment_path(log_path, 0, ".seal").unlink()
    with SegmentLog.open(log_path) as log:
        assert log.scrub.run_pass().seals_made == 1
    rot(log_path, 0, 1, 6)
    with pytest.raises(CorruptBatch):
        firsts_of(log_path)
    report = Repairer(log_path).repair(copy=copy)
    assert report.after.is_whole
    assert firsts_of(log_path) == [2, 6, 12, 23, 30, 40, 43]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_o6_a_cleaned_segment_that_was_cut_short_between_batches_is_damaged_not_unsealed(log_path, count):
    """The missing batches look like another gap of compaction: only the seal shows the damage."""
    path, size = segment_path(log_path, 0), len(batch(0))
    seal = segment_path(log_path, 0, ".seal").read_bytes()
    with SegmentLog.open(log_path) as log:
        path.write_bytes(path.read_bytes()[: count * size])
        (found,) = log.scrub.run_pass().findings
        assert "were sealed" in found.reason
    with SegmentLog.open_reader(log_path) as reader, pytest.raises(CorruptBatch, match="were sealed"):
        list(reader.records(0))
    (finding,) = verify_log(log_path).findings
    assert (finding.kind, finding.offset) == (FindingKind.SEAL, 0)
    assert segment_path(log_path, 0, ".seal").read_bytes() == seal, "no other one was made of what is left"
    with SegmentLog.open(log_path) as log:
        assert log.damaged_from == 0, "an opening finds it, too"


def test_o6_a_segment_of_another_size_without_a_hole_is_believed_and_sealed_anew(log_path):
    """The segment as an older version wrote it: its batches confirm each other."""
    firsts = range(0, 20, 3)
    segment_path(log_path, 0).write_bytes(b"".join(map(batch, firsts))[: -len(batch(0))] + two(18))
    assert firsts_of(log_path)[:2] == [0, 3]
    with SegmentLog.open(log_path) as log:
        status = log.scrub.run_pass()
    assert (status.seals_made, status.findings) == (1, ())


def two(first):
    return bytes(encode_batch([b"one", b"two"], base_offset=first, timestamps_ms=1_700_000_000_000).data)


def test_o6_the_first_opening_seals_what_a_cleaner_went_over(log_path, caplog):
    for base in (0, 20):
        segment_path(log_path, base, ".seal").unlink()
    caplog.set_level("INFO")
    with SegmentLog.open(log_path) as log:
        assert log.scrub.status.seals_made == 2
        assert caplog.text.count("unwitnessed") == 2
        assert not read_seal(REAL_FILESYSTEM, log_path, 0).is_witnessed
    with SegmentLog.open(log_path) as log:
        assert log.scrub.status.bytes_read == 0, "only the first"


HOLED = [0, 3, 12, 23, 30]


@pytest.fixture
def holed(tmp_path):
    """A replica that was sent announced holes, open; those are in the segment 12."""
    with SegmentLog.open(tmp_path / "replica" / NAME, has_replicas=True) as log:
        log.append_as_is([RecordBatch(batch(first)) for first in HOLED], cleaned_offset=CLEANED_OFFSET)
        yield log


def killed(log: SegmentLog, tmp_path: Path, *, in_roll: bool = False) -> Path:
    """The files after a kill. in_roll: killed before the segment with the gaps was sealed."""
    path = shutil.copytree(log.path.parent, tmp_path / "killed") / NAME
    if in_roll:
        segment_path(path, 33).unlink()
        segment_path(path, 12, ".seal").unlink()
    return path


def assert_rot_is_found(log: SegmentLog) -> None:
    rot(log.path, 12, 1, 22)
    with pytest.raises(CorruptBatch, match="sealed"):
        list(log.records(12))


@pytest.mark.parametrize("in_roll", [False, True])
def test_o6_what_lies_behind_announced_holes_is_sealed_again_after_a_kill(holed, tmp_path, in_roll):
    """The newest segment, where nothing else witnesses an offset: it is not taken up again."""
    path = killed(holed, tmp_path, in_roll=in_roll)
    with SegmentLog.open(path, has_replicas=True) as log:
        assert [one.header.base_offset for one in log.batches(0)] == HOLED
        assert read_seal(REAL_FILESYSTEM, path, 12).is_witnessed is not in_roll
        assert_rot_is_found(log)
    with SegmentLog.open_reader(path, isolation="written") as reader, pytest.raises(CorruptBatch, match="sealed"):
        list(reader.records(12))


def test_o6_what_rotted_behind_announced_holes_before_the_opening_after_a_kill_is_found(holed, tmp_path):
    path = killed(holed, tmp_path)
    rot(path, 12, 1, 22)
    with SegmentLog.open(path, has_replicas=True) as log:
        assert log.damaged_from == 12


def test_o6_a_cut_behind_announced_holes_leaves_a_seal_for_what_stays(holed):
    assert holed.truncate_to(30, force=True) == 26
    assert [one.header.base_offset for one in holed.batches(0)] == HOLED[:-1]
    holed.append_as_is([RecordBatch(batch(26))])
    assert_rot_is_found(holed)


class Member:
    """Another one, that gives what `log` has."""

    def __init__(self, log: SegmentLog) -> None:
        self.log = log

    def speaks(self, _call):
        return False

    def ask(self, request, answer):
        if answer is FetchRecordsResponse:
            return FetchRecordsResponse(records=(self.log.read(request.offset, request.max_bytes),))
        return DescribeLogResponse()


@pytest.mark.parametrize("rotten", [None, 0, 1])
def test_o8_a_wrong_offset_behind_a_hole_is_repaired_though_all_of_it_seems_whole(holed, tmp_path, rotten):
    """The batch is the last whole one before the missing batches. rotten: a batch before it is damaged, too."""
    tp = TopicIdPartition(UUID(int=3), "compact", 0)
    with SegmentLog.open(killed(holed, tmp_path), has_replicas=True) as log:
        rot(log.path, 12, 2, 29)
        if rotten is not None:
            segment = segment_path(log.path, 12)
            data, at = bytearray(segment.read_bytes()), (rotten + 1) * len(batch(0)) - 1
            data[at] ^= 1
            segment.write_bytes(data)
        assert len(log.scrub.run_pass().findings) == 1
        grant = SimpleNamespace(leader=0, epoch=1, generation=0)
        repairs = Repairs(UUID(int=9), grant, {tp: log})
        repairs.repair("another", Member(holed), lambda: False)
        assert repairs.own_trouble == {}
        assert log.scrub.run_pass().findings == ()
        assert list(log.records(0)) == list(holed.records(0))
