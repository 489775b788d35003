"""A damaged segment of an open log is rebuilt with batches from another member: identity O8."""

import errno
import os
import shutil
from contextlib import closing
from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.env.filesystem import RealFile
from pushrep.log import CorruptBatch, Durability, LogClosed, LogConfig, SegmentLog
from pushrep.log.cut_files import remove_segments
from pushrep.log.directory_files import REPAIR_SUFFIX, SEAL_SUFFIX, CheckpointFile, segment_path, write_checkpoint
from pushrep.log.errors import RepairRefused
from pushrep.log.seals import read_seal, write_seal
from pushrep.log.verify import verify_log
from pushrep.records.header import HEADER_BYTES

pytestmark = pytest.mark.usefixtures("closes_its_files")

SMALL = LogConfig(segment_bytes=2000, preallocate_bytes=0)
LOG_ID = UUID(int=5)
EPOCH_AT, RECORDS_AT = 15, HEADER_BYTES + 3


def fill(log, count=12):
    for first in range(0, count * 10, 10):
        if first == 60:
            log.begin_epoch(3, log.log_end_offset)
        append(log, first)


def append(log, first, filler=bytes(40)):
    """Ten records, the same bytes each time."""
    values = [b"%06d" % n + filler for n in range(first, first + 10)]
    log.append(values, timestamps_ms=1_700_000_000_000 + first, durability=Durability.BUFFERED)


@pytest.fixture
def leader(tmp_path):
    with SegmentLog.open(tmp_path / "leader" / "orders-0", SMALL, log_id=LOG_ID) as log:
        fill(log)
        yield log


@pytest.fixture
def copy(tmp_path, leader):
    """A replica's log with the content of `leader`, open."""
    path = tmp_path / "copy" / "orders-0"
    with SegmentLog.open(path, SMALL, log_id=LOG_ID, has_replicas=True) as log:
        log.append_as_is(list(leader.batches(0)))
        log.advance_high_watermark(log.log_end_offset)
        log.flush()
        yield log


def bases(log):
    return sorted(int(path.stem) for path in log.path.glob("*.log"))


def starts(log, base):
    """The positions of the segment's batches."""
    data, at, found = segment_path(log.path, base).read_bytes(), 0, []
    while at < len(data):
        found.append(at)
        at += 12 + int.from_bytes(data[at + 8 : at + 12])
    return found


def flip(log, base, *places):
    path = segment_path(log.path, base)
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 0x01
    path.write_bytes(data)


def heal(log, leader, base, max_bytes=1 << 20):
    """Repair the log; returns the number of bytes that came from the leader."""
    with closing(log.repair_segment(base)) as repair:
        rounds = 0
        while not repair.is_done:
            repair.add(leader.read(repair.wanted, max_bytes))
            rounds += 1
            assert rounds < 100
        return repair.taken_bytes


def found(log):
    return [one.base_offset for one in log.scrub.run_pass().findings]


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    "places",
    [
        [RECORDS_AT],
        [EPOCH_AT],
        [7],
        [11],
        [16],
        [RECORDS_AT, 700 + RECORDS_AT],
        [8],
    ],
    ids=["records", "epoch", "base offset", "length", "magic", "two batches", "a huge length"],
)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_o8_a_damaged_batch_comes_from_another_member(leader, copy, number, places, max_bytes):
    base = bases(copy)[1]
    at = starts(copy, base)[number]
    whole = segment_path(leader.path, base).read_bytes()
    flip(copy, base, *(at + place for place in places if at + place < len(whole)))
    assert found(copy) == [base]
    watermark, end = copy.high_watermark, copy.log_end_offset
    assert heal(copy, leader, base, max_bytes) < len(whole), "what is whole here stays"
    assert segment_path(copy.path, base).read_bytes() == whole
    assert (copy.high_watermark, copy.log_end_offset) == (watermark, end)
    assert (copy.damaged_segments, found(copy)) == ((), [])
    assert (copy.scrub.status.damaged, copy.scrub.status.repaired) == (1, 1)
    assert [record.offset for record in copy.records(0)] == list(range(end))
    assert not list(copy.path.glob("*.corrupt")), "the seal proves it: nothing has to be kept"


def test_o8_two_damaged_ranges_of_a_segment_are_repaired_together(leader, copy):
    base = bases(copy)[0]
    first, *_, last = starts(copy, base)
    flip(copy, base, first + RECORDS_AT, last + RECORDS_AT)
    assert found(copy) == [base]
    heal(copy, leader, base, 1)
    assert segment_path(copy.path, base).read_bytes() == segment_path(leader.path, base).read_bytes()


@pytest.mark.parametrize("size", [0, 1, 700, -1])
def test_o8_a_segment_that_was_cut_short_is_filled(leader, copy, size):
    base = bases(copy)[1]
    whole = segment_path(leader.path, base).read_bytes()
    segment_path(copy.path, base).write_bytes(whole[:size])
    assert found(copy) == [base]
    heal(copy, leader, base)
    assert segment_path(copy.path, base).read_bytes() == whole
    assert found(copy) == []


def test_o8_a_foreign_segment_goes_as_a_whole(tmp_path, leader, copy):
    """Every batch of it is whole and in place: the seal alone tells, and decides about what comes instead."""
    with SegmentLog.open(tmp_path / "other" / "orders-0", SMALL) as other:
        for first in range(0, 120, 10):
            append(other, first, b"x" * 40)
        base = bases(copy)[1]
        assert base in bases(other)
        shutil.copy(segment_path(other.path, base), segment_path(copy.path, base))
    assert found(copy) == [base]
    heal(copy, leader, base)
    assert segment_path(copy.path, base).read_bytes() == segment_path(leader.path, base).read_bytes()
    assert found(copy) == []


def test_o8_without_a_seal_what_goes_is_kept_and_a_seal_is_made(leader, copy):
    base = bases(copy)[1]
    at = starts(copy, base)[1]
    flip(copy, base, at + RECORDS_AT)
    segment_path(copy.path, base, SEAL_SUFFIX).unlink()
    assert found(copy) == [base]
    rotten = segment_path(copy.path, base).read_bytes()
    taken = heal(copy, leader, base)
    assert segment_path(copy.path, base).read_bytes() == segment_path(leader.path, base).read_bytes()
    (kept,) = copy.path.glob("*.corrupt")
    assert kept.read_bytes() == rotten[at : at + taken]
    ours, theirs = (segment_path(log.path, base, SEAL_SUFFIX).read_bytes() for log in (copy, leader))
    assert ours == theirs
    assert verify_log(copy.path).is_whole


def test_o6_a_seal_that_proves_nothing_goes_before_the_new_file_is_put(leader, copy, monkeypatch):
    base, done = bases(copy)[1], []
    seal = read_seal(REAL_FILESYSTEM, copy.path, base)
    write_seal(REAL_FILESYSTEM, copy.path, replace(seal, end_offset=seal.end_offset + 10))
    flip(copy, base, RECORDS_AT)
    assert found(copy) == [base]

    def note(name):
        call = getattr(RealFilesystem, name)

        def noted(filesystem, path, *more):
            done.append((name, path.name))
            return call(filesystem, path, *more)

        monkeypatch.setattr(RealFilesystem, name, noted)

    note("remove")
    note("rename")
    heal(copy, leader, base)
    removed, put = f"{base:020d}{SEAL_SUFFIX}", f"{base:020d}.log{REPAIR_SUFFIX}"
    assert done.index(("remove", removed)) < done.index(("rename", put))
    assert verify_log(copy.path).is_whole


def test_o8_what_goes_is_kept_to_the_end_of_a_file_that_is_too_long(leader, copy):
    base = bases(copy)[1]
    at, path = starts(copy, base)[-1], segment_path(copy.path, base)
    path.write_bytes(path.read_bytes() + b"more than was written")
    flip(copy, base, at + RECORDS_AT)
    segment_path(copy.path, base, SEAL_SUFFIX).unlink()
    rotten = path.read_bytes()
    assert found(copy) == [base]
    heal(copy, leader, base)
    (kept,) = copy.path.glob("*.corrupt")
    assert kept.read_bytes() == rotten[at:]


def test_o8_a_closed_log_gives_nothing_to_repair_others_with(leader):
    base = bases(leader)[1]
    assert leader.read_to_repair(base, 1) == leader.read(base, 1)
    leader.close()
    with pytest.raises(LogClosed):
        leader.read_to_repair(base, 1)


def test_o8_batches_that_come_from_before_the_last_whole_one_are_passed_over(leader, copy):
    base = bases(copy)[1]
    flip(copy, base, starts(copy, base)[2] + RECORDS_AT)
    assert found(copy) == [base]
    with closing(copy.repair_segment(base)) as repair:
        repair.add(leader.read(base, 1 << 20))
        assert repair.is_done
    assert found(copy) == []


def test_o8_a_batch_that_reaches_into_the_next_segment_is_refused(tmp_path, leader, copy):
    base, end = bases(copy)[1:3]
    flip(copy, base, starts(copy, base)[-1] + RECORDS_AT)
    segment_path(copy.path, base, SEAL_SUFFIX).unlink()
    assert found(copy) == [base]
    with SegmentLog.open(tmp_path / "long" / "orders-0", SMALL, log_id=LOG_ID) as long:
        long.append_as_is(list(leader.batches(0, end - 10)))
        long.append([b"v"] * 20)
        with pytest.raises(RepairRefused, match="reach into the next segment"):
            heal(copy, long, base)


@pytest.mark.parametrize(
    "kept",
    [lambda data, _left: data[:-1] + bytes([data[-1] ^ 1]) if data else data, lambda data, left: data[: max(0, left)]],
    ids=["another byte", "not all of it"],
)
def test_o8_a_new_file_that_does_not_hold_what_was_written_is_not_taken(leader, copy, monkeypatch, kept):
    base = bases(copy)[1]
    _, end, at = starts(copy, base)
    flip(copy, base, at + RECORDS_AT)
    assert found(copy) == [base]
    rotten, read_at = segment_path(copy.path, base).read_bytes(), RealFile.read_at

    def read(file, size, position):
        data = read_at(file, size, position)
        return kept(data, end - position) if file.path.suffix == ".repair" else data

    monkeypatch.setattr(RealFile, "read_at", read)
    with pytest.raises(RepairRefused, match="can't be read again"):
        heal(copy, leader, base)
    assert segment_path(copy.path, base).read_bytes() == rotten


def test_o8_the_new_file_is_on_disk_and_was_read_from_there_before_it_has_the_old_ones_name(leader, copy, monkeypatch):
    base = bases(copy)[1]
    flip(copy, base, RECORDS_AT)
    assert found(copy) == [base]
    done = []

    def note(kind, name, path_of):
        call = getattr(kind, name)

        def noted(*given):
            if path_of(given).suffix == ".repair":
                done.append(name)
            return call(*given)

        monkeypatch.setattr(kind, name, noted)

    for name in ("write_at", "sync", "drop_cache"):
        note(RealFile, name, lambda given: given[0].path)
    note(RealFilesystem, "rename", lambda given: given[1])
    heal(copy, leader, base)
    assert done[-4:] == ["write_at", "sync", "drop_cache", "rename"]


def other_history(tmp_path, name, *, at):
    """A log of the same offsets and sizes whose batches differ from offset `at` on."""
    with SegmentLog.open(tmp_path / name / "orders-0", SMALL, log_id=LOG_ID) as log:
        for first in range(0, 120, 10):
            if first == 60:
                log.begin_epoch(3, log.log_end_offset)
            append(log, first, b"x" * 40 if first >= at else bytes(40))
        return log


@pytest.mark.parametrize(
    ("differs", "has_seal", "why"),
    [(0, True, "does not join"), (0, False, "does not join"), (10, True, "were sealed")],
    ids=["before it", "before it, no seal", "there"],
)
def test_o8_what_does_not_join_or_is_not_what_was_sealed_is_refused_and_nothing_changes(
    tmp_path, leader, copy, differs, has_seal, why
):
    base = bases(copy)[1]
    at = starts(copy, base)[1]
    flip(copy, base, at + RECORDS_AT)
    if not has_seal:
        segment_path(copy.path, base, SEAL_SUFFIX).unlink()
    rotten = segment_path(copy.path, base).read_bytes()
    other_history(tmp_path, "foreign", at=base + differs)
    assert found(copy) == [base]
    foreign = SegmentLog.open_reader(tmp_path / "foreign" / "orders-0", isolation="written")
    with foreign, pytest.raises(RepairRefused, match=why):
        heal(copy, foreign, base)
    assert segment_path(copy.path, base).read_bytes() == rotten
    assert (found(copy), len(copy.damaged_segments)) == ([base], 1)
    assert not list(copy.path.glob("*.repair"))


def test_o8_batches_of_another_epoch_than_our_list_says_are_refused(tmp_path, leader, copy):
    with SegmentLog.open(tmp_path / "newer" / "orders-0", SMALL, log_id=LOG_ID) as newer:
        newer.begin_epoch(2, 0)
        fill(newer)
        base = bases(copy)[0]
        flip(copy, base, RECORDS_AT)
        assert found(copy) == [base]
        with pytest.raises(RepairRefused, match="leader epoch"):
            heal(copy, newer, base)


def test_o8_a_log_that_was_cut_meanwhile_is_left_alone(leader, copy):
    base = bases(copy)[1]
    flip(copy, base, starts(copy, base)[1] + RECORDS_AT)
    assert found(copy) == [base]
    with closing(copy.repair_segment(base)) as repair:
        copy.truncate_to(base, force=True)
        copy.append_as_is(list(leader.batches(copy.log_end_offset)))
        assert base in bases(copy)
        with pytest.raises(RepairRefused, match="cut meanwhile"):
            repair.add(leader.read(repair.wanted, 1 << 20))
    assert not list(copy.path.glob("*.repair"))
    assert found(copy) == []


@pytest.mark.parametrize(
    "cut", [lambda log: log.delete_records(bases(log)[2]), lambda log: log.truncate_to(bases(log)[0], force=True)]
)
def test_o8_what_was_cut_or_removed_is_no_finding_any_more(leader, copy, cut):
    """Otherwise the leader would try to repair it again and again, and report that it can't."""
    base = bases(copy)[1]
    flip(copy, base, RECORDS_AT)
    assert found(copy) == [base]
    cut(copy)
    assert (copy.damaged_segments, copy.scrub.status.findings) == ((), ())
    assert copy.repair_segment(base) is None


def test_o8_a_repair_that_finds_no_room_leaves_no_file_behind(leader, copy, monkeypatch):
    base = bases(copy)[1]
    flip(copy, base, starts(copy, base)[1] + RECORDS_AT)
    assert found(copy) == [base]
    truncate = RealFile.truncate

    def full(file, size):
        if file.path.name.endswith(REPAIR_SUFFIX):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        truncate(file, size)

    with monkeypatch.context() as patched:
        patched.setattr(RealFile, "truncate", full)
        with pytest.raises(OSError, match=REPAIR_SUFFIX):
            copy.repair_segment(base)
    assert list(copy.path.glob(f"*{REPAIR_SUFFIX}")) == []
    heal(copy, leader, base)
    assert found(copy) == []


def test_o8_a_segment_that_retention_removes_meanwhile_does_not_come_back(leader, copy, monkeypatch):
    base, _, kept = bases(copy)[:3]
    flip(copy, base, RECORDS_AT)
    assert found(copy) == [base]
    with closing(copy.repair_segment(base)) as repair:

        def remove_and_repair(*args):
            remove_segments(*args)
            with pytest.raises(RepairRefused, match="meanwhile"):
                repair.add(leader.read(repair.wanted, 1 << 20))

        monkeypatch.setattr("pushrep.log.writer.remove_segments", remove_and_repair)
        copy.delete_records(kept)
    assert bases(copy)[0] == kept
    assert verify_log(copy.path).is_whole


def test_o8_readers_beside_a_repair_see_no_wrong_record(leader, copy):
    base = bases(copy)[1]
    flip(copy, base, starts(copy, base)[1] + RECORDS_AT)
    assert found(copy) == [base]
    with SegmentLog.open_reader(copy.path, isolation="written") as reader:
        before = reader.records(0)
        assert next(before).offset == 0
        with pytest.raises(CorruptBatch):
            list(reader.records(0))
        heal(copy, leader, base)
        values = [record.value for record in leader.records(0)]
        assert [record.value for record in reader.records(0)] == values
        assert [record.value for record in before] == values[1:]


def test_o8_a_segment_that_is_repaired_while_the_scrub_reads_it_is_no_finding_any_more(leader, copy):
    base = bases(copy)[0]
    flip(copy, base, starts(copy, base)[1] + RECORDS_AT)
    assert found(copy) == [base]
    healed = []

    def after_a_piece():  # it has the old file open
        if not healed:
            healed.append(heal(copy, leader, base))

    assert copy.scrub.run_pass(after_a_piece).findings == ()
    assert healed


class BadSector(RealFile):
    """Bytes of it can't be read."""

    bad = range(600, 700)

    def read_at(self, size, position):
        if position < self.bad.stop and self.bad.start < position + size:
            raise OSError(errno.EIO, "Input/output error")
        return super().read_at(size, position)


class Failing(RealFilesystem):
    """A sector of one file can't be read any more."""

    path = None

    def open(self, path, *, create=False, writable=True):
        if path == self.path and not writable:
            return BadSector(os.open(path, os.O_RDONLY), path)
        return super().open(path, create=create, writable=writable)


def test_o8_a_segment_with_a_sector_that_can_not_be_read_is_repaired(tmp_path, leader):
    filesystem = Failing()
    path = tmp_path / "copy" / "orders-0"
    with SegmentLog.open(path, SMALL, log_id=LOG_ID, has_replicas=True, filesystem=filesystem) as copy:
        copy.append_as_is(list(leader.batches(0)))
        copy.flush()
        base = bases(copy)[1]
        filesystem.path = segment_path(path, base)
        assert found(copy) == [base]
        with closing(copy.repair_segment(base)) as repair:
            repair.add(leader.read(repair.wanted, 1 << 20))
            assert repair.is_done
        filesystem.path = None
        assert segment_path(path, base).read_bytes() == segment_path(leader.path, base).read_bytes()
        assert found(copy) == []


@pytest.mark.parametrize(
    ("what", "is_killed"),
    [("a bit", False), *((what, dead) for what in ("cut short", "emptied", "a file is missing") for dead in (0, 1))],
)
def test_o8_what_an_opening_finds_damaged_in_a_sealed_segment_is_repaired_as_the_scrubs_findings(
    leader, copy, what, is_killed
):
    base, following, end = *bases(copy)[1:3], copy.log_end_offset
    copy.close()
    path = segment_path(copy.path, base)
    if what == "a bit":
        flip(copy, base, RECORDS_AT)
    elif what == "a file is missing":
        path.unlink()
        base = 0
    else:
        os.truncate(path, 0 if what == "emptied" else starts(copy, base)[1])
    if is_killed:
        (copy.path.parent / ".pushrep_cleanshutdown").unlink()
    looking = LogConfig(segment_bytes=2000, preallocate_bytes=0, verify_last_segments=9)
    with SegmentLog.open(copy.path, looking, has_replicas=True) as opened:
        [finding] = opened.recovery.damaged_segments
        assert (finding.base_offset, finding.end_offset) == (base, following)
        assert opened.damaged_segments == (finding,)
        assert (opened.log_end_offset, opened.damaged_from, opened.high_watermark) == (end, None, end)
        assert "another member" in str(opened.recovery)
        with pytest.raises(CorruptBatch):
            list(opened.records(0))
        append(opened, end)
        heal(opened, leader, base)
        assert [record.value for record in opened.records(0, end)] == [record.value for record in leader.records(0)]
        assert opened.damaged_segments == ()
    assert not verify_log(copy.path).findings
    with SegmentLog.open(copy.path, looking, has_replicas=True) as again:
        assert again.recovery.damaged_segments == ()
        assert again.log_end_offset == end + 10


@pytest.mark.parametrize("without", ["replicas", "epochs", "recovery point"])
def test_o8_a_log_that_can_not_be_repaired_so_ends_at_the_damage_that_its_opening_finds(copy, without):
    base, following = bases(copy)[1:3]
    copy.close()
    flip(copy, base, RECORDS_AT)
    if without == "epochs":
        (copy.path / "leader-epoch-checkpoint").unlink()
    if without == "recovery point":  # so that nobody knows what followed the damage
        (copy.path.parent / ".pushrep_cleanshutdown").unlink()
        (copy.path.parent / ".pushrep_published").unlink()
        write_checkpoint(
            copy.path.parent, CheckpointFile.RECOVERY_POINT, {copy.path.name: following - 1}, REAL_FILESYSTEM
        )
    looking = LogConfig(segment_bytes=2000, preallocate_bytes=0, verify_last_segments=9)
    with SegmentLog.open(copy.path, looking, has_replicas=without != "replicas") as opened:
        assert opened.damaged_from == opened.log_end_offset == base
        assert opened.damaged_segments == ()
