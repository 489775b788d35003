"""Repair: a splice restores the same bytes, a cut is made at the chosen offset, and a copy that does not match is
refused.
"""

import shutil

import pytest

from pushrep.log import LogConfig, LogLocked, SegmentLog
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, write_checkpoint
from pushrep.log.errors import RepairRefused
from pushrep.log.published import PUBLISHED_NAME
from pushrep.log.repair import Repairer
from pushrep.log.verify import verify_log

pytestmark = pytest.mark.usefixtures("closes_its_files")

CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=100)
SEGMENTS = ("00000000000000000000.log", "00000000000000000009.log", "00000000000000000018.log")


def fill(path, lists=7, word=b"value"):
    with SegmentLog.open(path, CONFIG) as log:
        for number in range(lists):
            log.append([word + b" %d" % number] * 3, timestamps_ms=1_700_000_000_000 + number)
    return path


@pytest.fixture
def log(tmp_path):
    return fill(tmp_path / "logs" / "orders-0")


@pytest.fixture
def copy(log, tmp_path):
    shutil.copytree(log, tmp_path / "copy" / log.name)
    return tmp_path / "copy" / log.name


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def overwrite(path, start, size):
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(size) + data[start + size :])


def shorten(path, size):
    path.write_bytes(path.read_bytes()[:size])


def lose_bytes(path, start, size):
    data = path.read_bytes()
    path.write_bytes(data[:start] + data[start + size :])


DAMAGES = {
    "a value in the first batch": lambda log: flip(log / SEGMENTS[0], 80),
    "the last byte of a sealed segment": lambda log: flip(log / SEGMENTS[1], -1),
    "the last byte of the log": lambda log: flip(log / SEGMENTS[2], -1),
    "a base offset": lambda log: flip(log / SEGMENTS[1], 7),
    "a leader epoch": lambda log: flip(log / SEGMENTS[1], 15),
    "zeros over two batches": lambda log: overwrite(log / SEGMENTS[0], 100, 160),
    "zeros to the end of the log": lambda log: overwrite(log / SEGMENTS[2], 10, 90),
    "a segment that is cut off": lambda log: shorten(log / SEGMENTS[0], 150),
    "an empty segment": lambda log: shorten(log / SEGMENTS[1], 0),
    "a newest segment that is cut off": lambda log: shorten(log / SEGMENTS[2], 30),
    "bytes that are gone from the middle": lambda log: lose_bytes(log / SEGMENTS[1], 40, 17),
    "the first file": lambda log: (log / SEGMENTS[0]).unlink(),
    "a file in the middle": lambda log: (log / SEGMENTS[1]).unlink(),
    "the newest file": lambda log: (log / SEGMENTS[2]).unlink(),
    "all files but one": lambda log: [(log / name).unlink() for name in SEGMENTS[1:]],
    "every file": lambda log: [(log / name).unlink() for name in SEGMENTS],
    "the end of one and the start of the next": lambda log: [flip(log / SEGMENTS[0], -1), flip(log / SEGMENTS[1], 70)],
    "two places in one segment": lambda log: [flip(log / SEGMENTS[0], 80), flip(log / SEGMENTS[0], -1)],
    "a batch, and the whole file behind it": lambda log: [flip(log / SEGMENTS[0], 80), (log / SEGMENTS[1]).unlink()],
    "an offset index": lambda log: flip(log / SEGMENTS[0].replace(".log", ".index"), 2),
    "a time index": lambda log: flip(log / SEGMENTS[0].replace(".log", ".timeindex"), 5),
    "the list of leader epochs": lambda log: flip(log / "leader-epoch-checkpoint", 4),
    "the metadata": lambda log: flip(log / "partition.metadata", 30),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_gives_back_the_very_bytes(log, copy, damage):
    DAMAGES[damage](log)
    assert not verify_log(log).is_whole
    report = Repairer(log).repair(copy=copy)
    assert report.is_whole, report.after.findings
    assert verify_log(log).is_whole
    assert not (log / SEGMENTS[2]).with_suffix(".seal").exists(), "the newest segment goes on"
    for name in SEGMENTS:
        assert (log / name).read_bytes() == (copy / name).read_bytes(), name
    assert (log / "partition.metadata").read_bytes() == (copy / "partition.metadata").read_bytes()
    with SegmentLog.open(log, CONFIG) as opened:
        assert opened.recovery.damaged_from is None
        assert opened.recovery.cut is None
        assert [record.value for record in opened.records(0)] == [b"value %d" % (i // 3) for i in range(21)]
        assert opened.append(b"more").base_offset == 21
    assert verify_log(log).is_whole


@pytest.mark.parametrize("damage", ["a value in the first batch", "the last byte of the log", "the first file"])
def test_one_of_its_own_batches_tells_a_copy_of_a_log_that_has_lost_its_id(log, copy, damage):
    """The batch behind, before, and after whole files."""
    DAMAGES[damage](log)
    (log / "partition.metadata").unlink()
    assert Repairer(log).repair(copy=copy).is_whole


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_dry_run_changes_nothing(log, copy, damage):
    DAMAGES[damage](log)
    before = {path: path.read_bytes() for path in log.parent.rglob("*") if path.is_file() and path.name != ".lock"}
    report = Repairer(log).repair(copy=copy, dry_run=True)
    assert report.spliced or report.rebuilt
    after = {path: path.read_bytes() for path in log.parent.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_every_byte_that_is_flipped_is_mended(log, copy):
    path = log / SEGMENTS[1]
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        flip(path, at)
        assert Repairer(log).repair(copy=copy).is_whole, at
        assert path.read_bytes() == whole, at


def test_what_is_replaced_is_kept(log, copy):
    path = log / SEGMENTS[0]
    flip(path, 80)
    size = int.from_bytes(path.read_bytes()[8:12], "big") + 12
    damaged = path.read_bytes()[:size]
    (kept,) = Repairer(log).repair(copy=copy).kept_as
    assert kept == f"{SEGMENTS[0]}.0.corrupt"
    assert (log / kept).read_bytes() == damaged


def other_values(copy):
    shutil.rmtree(copy)
    fill(copy, word=b"other")


def too_short(copy):
    (copy / SEGMENTS[2]).unlink()
    shorten(copy / SEGMENTS[1], 70)


def damaged_at_the_same_place(copy):
    flip(copy / SEGMENTS[1], 70)


def other_batches(copy):
    """The same records in other batches: they hold offsets on both sides of the joints."""
    shutil.rmtree(copy)
    with SegmentLog.open(copy, LogConfig(segment_bytes=100_000)) as log:
        log.append([b"value"] * 21, timestamps_ms=1_700_000_000_000)


@pytest.mark.parametrize("spoil", [other_values, too_short, damaged_at_the_same_place, other_batches])
def test_a_copy_that_does_not_join_is_refused(log, copy, spoil):
    flip(log / SEGMENTS[1], 70)
    spoil(copy)
    before = {path: path.read_bytes() for path in log.parent.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(RepairRefused, match=r"join|holds no batch|up to offset"):
        Repairer(log).repair(copy=copy)
    after = {path: path.read_bytes() for path in log.parent.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before, "a refused repair changes nothing"


def test_a_copy_that_does_not_join_behind_what_is_taken_is_refused(log, copy):
    flip(log / SEGMENTS[0], -1)
    (log / SEGMENTS[0]).with_suffix(".seal").unlink()
    shutil.rmtree(copy)
    fill(copy, lists=2)
    with SegmentLog.open(copy, CONFIG) as other:
        other.append([b"other 2"] * 3, timestamps_ms=1_700_000_000_002)
        other.append([b"other 3"] * 3, timestamps_ms=1_700_000_000_003)
    with pytest.raises(RepairRefused, match="the first whole one behind the damage"):
        Repairer(log).repair(copy=copy)


def test_a_whole_log_is_not_taken_from_another_one(log, copy):
    shutil.rmtree(copy)
    fill(copy)  # the same values, another id
    for name in SEGMENTS:
        (log / name).unlink()
    with pytest.raises(RepairRefused, match="nothing of"):
        Repairer(log).repair(copy=copy)


def test_the_copy_must_be_one_of_this_log(log, tmp_path):
    other = fill(tmp_path / "copy" / "orders-1")
    with pytest.raises(RepairRefused, match="copy of orders-1"):
        Repairer(log).repair(copy=other)
    with pytest.raises(RepairRefused, match="the log itself"):
        Repairer(log).repair(copy=log)


def test_a_cut_at_the_damage_keeps_all_before_and_aside_all_behind(log):
    whole = {name: (log / name).read_bytes() for name in SEGMENTS}
    flip(log / SEGMENTS[1], 70)
    damaged = (log / SEGMENTS[1]).read_bytes()
    report = Repairer(log).repair(cut=True)
    assert report.is_whole
    assert report.cut.offset == 9
    assert sorted(report.cut.kept_as) == [f"{SEGMENTS[1]}.0.cut", f"{SEGMENTS[2]}.cut"]
    assert (log / f"{SEGMENTS[1]}.0.cut").read_bytes() == damaged
    assert (log / f"{SEGMENTS[2]}.cut").read_bytes() == whole[SEGMENTS[2]]
    with SegmentLog.open(log, CONFIG) as opened:
        assert (opened.log_start_offset, opened.log_end_offset) == (0, 9)
        assert opened.recovery.cut is None
        assert opened.append(b"again").base_offset == 9
    assert verify_log(log).is_whole
    with SegmentLog.open_reader(log) as reader:
        assert reader.log_end_offset == 10


def test_a_cut_by_offset_goes_to_the_base_of_its_batch(log):
    assert Repairer(log).repair(cut_at=4).cut.offset == 3
    assert verify_log(log).is_whole
    with SegmentLog.open_reader(log) as reader:
        assert (reader.log_end_offset, reader.stable_offset) == (3, 3), "readers are told at once"


def test_a_cut_that_would_leave_damage_is_refused(log):
    flip(log / SEGMENTS[0], 80)
    with pytest.raises(RepairRefused, match="up to offset 0"):
        Repairer(log).repair(cut_at=4)


def test_without_a_word_batches_are_not_touched(log):
    flip(log / SEGMENTS[1], 70)
    before = (log / SEGMENTS[1]).read_bytes()
    with pytest.raises(RepairRefused, match="--from-copy"):
        Repairer(log).repair()
    assert (log / SEGMENTS[1]).read_bytes() == before


def test_a_log_in_use_is_refused(log, copy):
    with SegmentLog.open(log, CONFIG), pytest.raises(LogLocked):
        Repairer(log).repair(copy=copy)


def test_indexes_are_made_anew(log):
    for path in [*log.glob("*.index"), *log.glob("*.timeindex")]:
        path.write_bytes(b"not an entry")
    names = Repairer(log).repair().rebuilt
    assert len(names) == 6
    assert all((log / name).exists() for name in names)
    assert verify_log(log).is_whole
    with SegmentLog.open(log, CONFIG) as opened:
        assert opened.offset_for_timestamp(1_700_000_000_004) == 12


def never_promised_behind(log, offset):
    write_checkpoint(log.parent, CheckpointFile.RECOVERY_POINT, {log.name: offset})
    (log.parent / CLEAN_MARKER_NAME).unlink()
    (log.parent / PUBLISHED_NAME).unlink(missing_ok=True)  # the machine stopped: what was published died with it


def test_a_torn_tail_stays_one_when_something_else_is_repaired(log):
    """The recovery point does not rise over it: what was never promised does not become damage."""
    never_promised_behind(log, 9)
    flip(log / SEGMENTS[1], 70)
    (log / SEGMENTS[0].replace(".log", ".index")).write_bytes(b"nonsense")
    report = Repairer(log).repair()
    assert report.is_whole
    assert report.after.torn is not None
    with SegmentLog.open(log, CONFIG) as opened:
        assert opened.damaged_from is None
        assert (opened.log_end_offset, opened.recovery.cut.offset) == (9, 9)


def test_a_torn_tail_is_what_cut_cuts_where_there_is_no_damage(log):
    never_promised_behind(log, 9)  # as a cut leaves it that was stopped
    flip(log / SEGMENTS[1], 70)
    report = Repairer(log).repair(cut=True)
    assert report.is_whole
    assert report.cut.offset == 9
    assert not (log / SEGMENTS[2]).exists()
