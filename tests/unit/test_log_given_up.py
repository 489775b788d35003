"""Given-up offsets: what readers may have seen of a log that no longer holds it, noted before it goes."""

import shutil
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.log import LogConfig, LogEndMoved, NoRoomToCut, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile, list_segments, read_checkpoint, write_checkpoint
from pushrep.log.published import SLOTS_AT, LogOffsets, PublishedFile
from pushrep.log.segment import Segment
from pushrep.records.header import OFFSET_MAX

CONFIG = LogConfig(preallocate_bytes=0)


def given_up(directory, name="orders-0"):
    return read_checkpoint(directory, CheckpointFile.GIVEN_UP).get(name, 0)


def written(directory, records, name="orders-0"):
    with SegmentLog.open(directory / name, CONFIG) as log:
        for n in range(records):
            log.append(b"%d" % n)


def shorten(directory, bytes_taken, name="orders-0"):
    path = directory / name / f"{list_segments(REAL_FILESYSTEM, directory / name)[-1]:020d}.log"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - bytes_taken)


def lower_recovery_point(directory, offset):
    """The files after a kill: the recovery point is below the flushed offset, and there is no clean marker."""
    (directory / ".pushrep_cleanshutdown").unlink()
    for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
        write_checkpoint(directory, checkpoint, {"orders-0": offset})


class EarlierStart(RealFilesystem):
    """The files as they were before this start of the machine: another boot id."""

    def open(self, path, *, create=False, writable=True):
        if path.name == "boot_id":
            path = self.boot_id
        return super().open(path, create=create, writable=writable)


def machine_stopped(directory):
    """The state was published before this start of the machine: it does not prove what the disk holds."""
    earlier = EarlierStart()
    earlier.boot_id = directory / "earlier-boot-id"
    earlier.boot_id.write_text(f"{UUID(int=7)}\n")
    file = PublishedFile(directory, 4711, earlier)
    earlier.boot_id.unlink()
    for _ in SLOTS_AT:
        file.entry("orders-0").publish(LogOffsets(0, 10, 10, 10), 0)


def test_a_cut_by_name_is_noted_before_a_file_changes(tmp_path, monkeypatch):
    written(tmp_path, 10)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        seen, cut = [], Segment.cut
        monkeypatch.setattr(Segment, "cut", lambda *to: seen.append(given_up(tmp_path)) or cut(*to))
        log.truncate_to(4, force=True)
    assert seen == [10]


def test_the_highest_end_counts_until_it_is_struck_out(tmp_path):
    written(tmp_path, 10)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.truncate_to(4, force=True)
        log.append(b"again")
        log.truncate_to(2, force=True)
        assert given_up(tmp_path) == 10
        log.truncate_to(2)  # at its end: nothing goes
    assert given_up(tmp_path) == 10


def test_a_log_that_only_grows_gives_nothing_up(tmp_path):
    written(tmp_path, 10)
    written(tmp_path, 10)
    assert not (tmp_path / CheckpointFile.GIVEN_UP.value).exists()


def test_what_was_published_as_stable_and_is_gone_after_a_crash_is_noted(tmp_path, caplog):
    """A disk that lied about a sync: the recovery point had not come so far, but readers had."""
    written(tmp_path, 10)
    lower_recovery_point(tmp_path, 5)
    machine_stopped(tmp_path)
    shorten(tmp_path, 1)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        assert log.recovery.cut is not None
        assert log.log_end_offset == 9
    assert given_up(tmp_path) == 10
    assert "ends at offset 9: records up to 10 were on disk and are gone" in caplog.text


def test_a_whole_batch_that_is_missing_at_the_end_is_noted_too(tmp_path):
    written(tmp_path, 10)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        last = next(log.batches(9)).header.size_bytes
    lower_recovery_point(tmp_path, 5)
    machine_stopped(tmp_path)
    shorten(tmp_path, last)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        assert log.recovery.cut is None, "nothing is torn"
        assert log.log_end_offset == 9
    assert given_up(tmp_path) == 10


def test_another_start_of_the_machine_does_not_hide_what_was_seen(tmp_path):
    written(tmp_path, 10)
    lower_recovery_point(tmp_path, 5)
    machine_stopped(tmp_path)
    shorten(tmp_path, 1)
    written(tmp_path, 0)
    assert given_up(tmp_path) == 10


def test_a_tail_that_was_never_flushed_is_nobodys_loss(tmp_path):
    written(tmp_path, 10)
    with (tmp_path / "orders-0" / f"{0:020d}.log").open("ab") as file:
        file.write(b"torn")
    (tmp_path / ".pushrep_cleanshutdown").unlink()
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        assert log.recovery.cut is not None
    assert given_up(tmp_path) == 0


def test_damage_gives_nothing_up_until_it_is_set_aside(tmp_path):
    written(tmp_path, 10)
    shorten(tmp_path, 1)
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        assert log.damaged_from == 9
        assert given_up(tmp_path) == 0, "a copy may bring it back"
        log.quarantine()
        assert given_up(tmp_path) == 10


@pytest.mark.parametrize("when", ["before the directory is opened", "while it is open"])
def test_a_removed_log_is_remembered_by_its_end(tmp_path, when):
    written(tmp_path, 10)
    written(tmp_path, 3, "orders-1")
    directory = LogDirectory.acquire(tmp_path) if when == "while it is open" else None
    shutil.rmtree(tmp_path / "orders-0")
    if directory is None:
        written(tmp_path, 1, "orders-1")  # somebody else's session forgets that log's checkpoints
        assert given_up(tmp_path) == 10
    written(tmp_path, 2)
    assert given_up(tmp_path) == 10
    if directory is not None:
        directory.release()
    assert given_up(tmp_path, "orders-1") == 0


def test_a_bad_file_may_have_told_of_any_log(tmp_path, caplog):
    written(tmp_path, 2)
    (tmp_path / CheckpointFile.GIVEN_UP.value).write_bytes(b"0\n1\norders-0")
    directory = LogDirectory.acquire(tmp_path)
    assert directory.checkpointed(CheckpointFile.GIVEN_UP, "orders-0") == OFFSET_MAX
    assert directory.checkpointed(CheckpointFile.GIVEN_UP, ".lock") is None
    directory.release()
    assert "is damaged" in caplog.text


def test_an_append_made_for_another_end_writes_nothing(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.append([b"a", b"b"], base_offset=0)
        for wrong in (0, 1, 3):
            with pytest.raises(LogEndMoved) as moved:
                log.append(b"c", base_offset=wrong)
            assert (moved.value.expected, moved.value.end) == (wrong, 2)
        assert log.append(b"c", base_offset=2).base_offset == 2
        assert [record.value for record in log.records(0)] == [b"a", b"b", b"c"]


def test_a_full_disk_refuses_the_cut_and_leaves_the_log_usable(tmp_path, monkeypatch):
    written(tmp_path, 10)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        with monkeypatch.context() as patched:
            patched.setattr("pushrep.log.directory.write_checkpoint", refuse)
            with pytest.raises(NoRoomToCut, match="nothing was cut: free space"):
                log.truncate_to(4, force=True)
        assert log.log_end_offset == 10
        log.append(b"goes on")
