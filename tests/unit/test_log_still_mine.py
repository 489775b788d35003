"""Somebody else moves, removes or cuts a log's files while its writer runs: what was acknowledged is there, or said to
be gone.

Each way is that of a real command: `mv`, `rm`, logrotate by rename, by rename and create, and by copytruncate, `cp -al`
and `rm`, `truncate -s 0`.

the newest file was          its bytes are                      opened again in place
removed, renamed             in the open descriptor             written back under its name: nothing is lost
renamed and made anew        in the open descriptor             the same, over the empty file
cut, by copying before       gone, or in the copy               damaged from its first record on
the directory was removed    in no place that can be found      refused, for ever
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pushrep import Outbox, OutboxConfig
from pushrep.env import RealFilesystem
from pushrep.env.filesystem import RealFile
from pushrep.log import CorruptLog, Durability, FileRemoved, LogConfig, LogDamaged, LogPoisoned, SegmentLog
from pushrep.log.seals import read_seal
from pushrep.log.verify import verify_log
from pushrep.outbox.control import ask
from pushrep.startpoints import Startpoint, StartpointStore
from tests.support.forks import code_in_fork

SMALL = LogConfig(segment_bytes=3000, batch_bytes=1000, flush_ms=600_000)
MARKER = ".pushrep_cleanshutdown"


def segments(log):
    return sorted(log.path.glob("*.log"))


def removed(path):
    path.unlink()


def renamed(path):
    path.rename(path.with_name(path.name + ".1"))


def renamed_and_made_anew(path):
    renamed(path)
    path.touch()


def linked_elsewhere_and_removed(path):
    subprocess.run(["cp", "-al", path.parent, path.parents[2] / "linked"], check=True)
    path.unlink()


def copied_and_truncated(path):
    shutil.copy(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)


def emptied(path):
    os.truncate(path, 0)


STILL_OPEN = [removed, renamed, renamed_and_made_anew, linked_elsewhere_and_removed]
CUT = [copied_and_truncated, emptied]
of_some_sizes = pytest.mark.parametrize("records", [3, 12])


@pytest.fixture
def make_log(tmp_path):
    opened = []

    def make(records=12, filesystem=None, home="data"):
        log = SegmentLog.open(tmp_path / home / "orders-0", SMALL, filesystem=filesystem or RealFilesystem())
        opened.append(log)
        for n in range(log.log_end_offset, records):
            log.append(b"%03d" % n * 100)
        return log

    yield make
    for log in opened:
        with suppress(LogPoisoned):
            log.close()


def values(log):
    return [record.value[:3] for record in log.records(0)]


def numbered(count):
    return [b"%03d" % n for n in range(count)]


def refused(log, durability=Durability.FLUSHED):
    with pytest.raises(LogPoisoned) as raised:
        log.append(b"not acknowledged", durability=durability)
    assert isinstance(raised.value.cause, FileRemoved), raised.value
    return raised.value.cause


@pytest.mark.parametrize("way", STILL_OPEN + CUT)
@pytest.mark.parametrize("durability", Durability)
@of_some_sizes
def test_faults_f2_no_append_is_acknowledged_into_a_file_that_is_another(make_log, way, records, durability):
    log = make_log(records)
    path = segments(log)[-1]
    expected_bytes = path.stat().st_size
    way(path)
    for _ in range(2):
        cause = refused(log, durability)
    assert cause.path == path
    assert (cause.expected_bytes, cause.found_bytes) == (expected_bytes, 0 if way in CUT else None)
    assert log.flushed_offset == log.log_end_offset == records, "nothing more was taken"
    assert isinstance(log.stopped_by, FileRemoved)


@pytest.mark.parametrize("way", STILL_OPEN)
def test_faults_f2_what_was_buffered_before_the_sync_that_finds_it_is_written_back_too(make_log, way):
    """Appends into the page cache are looked at once for all that a sync brings to disk."""
    log = make_log(3)
    log.append(b"003", durability=Durability.BUFFERED)
    way(segments(log)[-1])
    log.append(b"004", durability=Durability.BUFFERED)
    with pytest.raises(LogPoisoned) as raised:
        log.flush()
    assert isinstance(raised.value.cause, FileRemoved)
    assert log.flushed_offset == 3
    log.reopen()
    assert values(log) == numbered(5)


@pytest.mark.parametrize("way", STILL_OPEN)
@of_some_sizes
def test_faults_f2_what_is_still_open_is_written_back_and_the_log_goes_on(make_log, way, records):
    log = make_log(records)
    way(segments(log)[-1])
    refused(log)
    log.reopen()
    assert log.stopped_by is None
    log.append(b"%03d" % records)
    assert values(log) == numbered(records + 1)
    log.close()
    again = make_log(records)
    assert again.recovery.opening.value == "normal"
    assert values(again) == numbered(records + 1)


@pytest.mark.parametrize("way", CUT)
@of_some_sizes
def test_faults_f2_what_was_cut_is_said_to_be_gone(make_log, way, records):
    log = make_log(records)
    base = int(segments(log)[-1].stem)
    way(segments(log)[-1])
    refused(log)
    log.reopen()
    assert log.damaged_from == base
    with pytest.raises(LogDamaged):
        log.append(b"not acknowledged")
    log.close()
    assert "orders" not in (log.path.parent / MARKER).read_text()
    assert make_log(0).damaged_from == base, "also after a restart"


@pytest.mark.parametrize("way", STILL_OPEN + CUT)
@of_some_sizes
def test_faults_f2_a_close_says_so_and_lists_the_log_as_unclean(make_log, way, records):
    log = make_log(records)
    way(segments(log)[-1])
    with pytest.raises(LogPoisoned) as raised:
        log.close()
    assert isinstance(raised.value.cause, FileRemoved)
    assert "orders" not in (log.path.parent / MARKER).read_text()
    again = make_log(records) if way in STILL_OPEN else make_log(0)
    if way in STILL_OPEN:
        assert values(again) == numbered(records), "the close has written it back"
    else:
        assert again.damaged_from is not None


def test_faults_f2_a_log_that_nobody_wrote_to_since_it_was_opened_is_not_listed_as_clean_either(make_log):
    make_log(3).close()
    log = make_log(0)
    removed(segments(log)[-1])
    with pytest.raises(LogPoisoned):
        log.close()
    assert "orders" not in (log.path.parent / MARKER).read_text()
    with pytest.raises(CorruptLog, match="no segment is there, but offsets up to 3 were on disk"):
        make_log(0)


def test_faults_f2_a_removed_directory_is_not_made_anew(make_log):
    log = make_log(3)
    shutil.rmtree(log.path)
    refused(log)
    for _ in range(2):
        with pytest.raises(CorruptLog, match="the directory is gone"):
            log.reopen()
    assert not log.path.exists()
    assert log.log_end_offset == 3


@pytest.mark.parametrize("way", STILL_OPEN + CUT)
def test_faults_f2_a_change_during_the_sync_is_not_acknowledged(make_log, way, monkeypatch):
    log, sync, ways = make_log(3), RealFile.sync, [way]

    def changing(file):
        sync(file)
        if ways:
            ways.pop()(file.path)

    monkeypatch.setattr(RealFile, "sync", changing)
    refused(log)
    assert log.flushed_offset == 3


@pytest.mark.parametrize("durability", Durability)
def test_faults_f2_a_cut_between_the_look_and_the_write_is_found_by_its_hole_when_the_segment_rolls(
    tmp_path, durability, monkeypatch
):
    """Blocks of a file system are larger than these batches, so the first one is as large as several blocks."""
    with closing(
        SegmentLog.open(tmp_path / "data" / "large-0", LogConfig(segment_bytes=100_000, preallocate_bytes=0))
    ) as log:
        log.append(b"x" * 40_000)
        write = RealFile.write_at

        def cutting(file, data, position):
            if position > 40_000 and file.path.suffix == ".log" and log.log_end_offset == 1:
                os.truncate(file.path, 0)
            write(file, data, position)

        monkeypatch.setattr(RealFile, "write_at", cutting)
        log.append(b"y" * 40_000, durability=durability)
        with pytest.raises(LogPoisoned) as raised:
            log.append(b"z" * 40_000)
        assert isinstance(raised.value.cause, FileRemoved)
        assert not list(log.path.glob("*.seal"))
        log.reopen()
        assert log.damaged_from == 0


def test_faults_f2_a_hole_of_zeros_that_belong_there_stops_nothing(make_log, monkeypatch):
    """As a compressing file system may store them."""
    monkeypatch.setattr(RealFile, "has_hole", lambda _file, _size: True)
    log = make_log(20)
    bases = [int(path.stem) for path in segments(log)]
    seals = [read_seal(RealFilesystem(), log.path, base) for base in bases[:-1]]
    assert len(seals) > 1
    assert None not in seals
    log.close()
    assert verify_log(log.path).is_whole
    assert values(make_log(20)) == numbered(20)


def test_faults_f1_a_moved_directory_keeps_its_own_files_and_the_new_one_is_not_touched(make_log, tmp_path, caplog):
    log, data = make_log(3), tmp_path / "data"
    data.rename(tmp_path / "data.bak")
    assert log.moved_ms() is not None
    new = make_log(6, RealFilesystem())
    made = {path.relative_to(data): path.read_bytes() for path in data.rglob("*") if path.is_file()}
    for n in range(3, 24):
        log.append(b"%03d" % n * 100)
    log.delete_records(8)
    log.begin_epoch(7, 24)
    log.truncate_to(22, force=True)
    log.flush()
    assert {path.relative_to(data): path.read_bytes() for path in data.rglob("*") if path.is_file()} == made
    assert (log.moved_ms() is not None, new.moved_ms()) == (True, None)
    assert "leads to another directory now" in caplog.text
    log.close()
    new.append(b"006" * 100)
    new.close()
    assert values(make_log(7)) == numbered(7)
    moved = make_log(0, home="data.bak")
    assert moved.recovery.opening.value == "normal"
    assert [record.value[:3] for record in moved.records(8)] == numbered(22)[8:]


def test_faults_f1_a_directory_that_is_moved_back_is_no_problem_any_more(make_log, tmp_path):
    log, data = make_log(3), tmp_path / "data"
    data.rename(tmp_path / "data.bak")
    assert log.moved_ms() is not None
    (tmp_path / "data.bak").rename(data)
    assert log.moved_ms() is None


def test_faults_f1_a_lock_file_that_was_replaced_lets_another_writer_in_and_is_a_problem(make_log, tmp_path):
    log = make_log(3)
    (tmp_path / "data" / ".lock").unlink()
    assert log.moved_ms() is not None


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_faults_f1_an_outbox_goes_on_in_its_moved_directory_and_says_so(tmp_path, monkeypatch):
    """It was opened by a relative path, and the process has another working directory since."""
    monkeypatch.chdir(tmp_path)
    small = OutboxConfig(log_config=SMALL)
    old = Outbox.open("data", topic="orders", partitions=1, producer="a", config=small, filesystem=RealFilesystem())
    monkeypatch.chdir("/")
    data = tmp_path / "data"
    data.rename(tmp_path / "data.bak")
    new = Outbox.open(data, topic="orders", partitions=1, producer="b", config=small, filesystem=RealFilesystem())
    with closing(new):
        with closing(old):
            (problem,) = old.status().problems()
            assert (problem.name, problem.subject) == ("directory_moved", "directory data")
            assert new.status().problems() == []
            made = contents(data)
            for n in range(12):
                old.append(0, b"%03d" % n * 100).result(30)
            assert contents(data) == made
            assert ask(data, "status")["producer"] == "b"
            assert ask(tmp_path / "data.bak", "status")["producer"] == "a"
        assert contents(data) == made
        assert ask(data, "status")["producer"] == "b", "the other's close has left it its socket"
    with closing(SegmentLog.open(tmp_path / "data.bak" / "orders-0")) as log:
        assert log.recovery.opening.value == "normal"
        assert values(log) == numbered(12)


@pytest.fixture
def home_of_nobody():
    """Not below pytest's own directory, which every run of it closes to others."""
    with tempfile.TemporaryDirectory() as made:
        nobody = pwd.getpwnam("nobody")
        os.chown(made, nobody.pw_uid, nobody.pw_gid)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_faults_f9_what_root_makes_belongs_to_the_owner_of_the_directory(home_of_nobody):
    """A command that root runs rolls a segment, and the service goes on as its own user."""
    nobody, home = pwd.getpwnam("nobody"), home_of_nobody

    def append(first, last):
        with SegmentLog.open(home / "orders-0", SMALL) as log:
            assert log.log_end_offset == first
            for n in range(first, last):
                log.append(b"%03d" % n * 100)
        with StartpointStore.open(home / "startpoints") as store:
            store.write("billing", "orders", 0, Startpoint.specific(first), "as root, and as the service")

    def as_nobody(first, last):
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        append(first, last)

    assert code_in_fork(lambda: append(0, 1)) == 0
    assert code_in_fork(lambda: as_nobody(1, 12)) == 0
    assert code_in_fork(lambda: append(12, 24)) == 0
    assert code_in_fork(lambda: as_nobody(24, 36)) == 0, "root has locked it out"
    owners = {path.relative_to(home): path.stat().st_uid for path in home.rglob("*")}
    assert set(owners.values()) == {nobody.pw_uid}, owners
