"""Which directory of an outbox is a copy of another, and what an outbox without replicas makes of it."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from filtering import ReplayFilter
from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM, FileWitness, RealFilesystem
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, write_checkpoint, write_leader_epochs
from pushrep.log.directory_id import (
    DIRECTORY_ID_NAME,
    UNKNOWN_ID,
    CopyVerdict,
    DirectoryId,
    judge_witness,
    read_directory_id,
    write_directory_id,
)
from pushrep.log.errors import DirectoryIsCopy
from pushrep.log.published import PUBLISHED_NAME
from pushrep.outbox import Outbox, begin_pid_epoch, read_identity
from pushrep.outbox.destinations import locked_outbox
from pushrep.outbox.directory_handover import moved
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import write_identity
from pushrep.records.leader_epochs import LeaderEpochs
from tests.support.outbox_arguments import outbox_arguments

CONFIG = LogConfig(preallocate_bytes=0, segment_bytes=2000)
FILE = FileWitness(inode=7, generation=3, birth_ns=9)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "outbox"


def opened(home, **settings):
    return Outbox.open(home, "orders", 1, "billing", **outbox_arguments(**{"log_config": CONFIG, **settings}))


def append(home, *values, **settings):
    with opened(home, **settings) as outbox:
        for value in values:
            outbox.append(0, value).result(60)
        return outbox.pid


def look(home):
    return read_directory_id(home, REAL_FILESYSTEM)


def run(*arguments):
    return cli_main.run([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("written", "now", "verdict"),
    [
        (FILE, FILE, CopyVerdict.ORIGINAL),
        (FILE, FILE._replace(generation=4), CopyVerdict.COPY),
        (FILE, FILE._replace(birth_ns=10), CopyVerdict.COPY),
        (FILE, FILE._replace(inode=8), CopyVerdict.COPY),
        (FILE, FILE._replace(links=2), CopyVerdict.COPY),
        (FILE, FILE._replace(generation=None), CopyVerdict.ORIGINAL),
        (FILE._replace(generation=None), FILE._replace(birth_ns=None), CopyVerdict.UNKNOWN),
        (FILE, None, CopyVerdict.UNKNOWN),
        (None, FILE, CopyVerdict.UNKNOWN),
    ],
)
def test_inode_and_a_second_half_decide(written, now, verdict):
    assert judge_witness(written, now) is verdict


def cp(home, copy):
    subprocess.run(["cp", "-a", home, copy], check=True)


def tar(home, copy):
    copy.mkdir()
    packed = home.with_suffix(".tar")
    subprocess.run(["tar", "-C", home, "-cf", packed, "."], check=True)
    subprocess.run(["tar", "-C", copy, "-xpf", packed], check=True)


def hard_links(home, copy):
    subprocess.run(["cp", "-al", home, copy], check=True)


def to_another_file_system(home, copy):
    shutil.copytree(home, copy)
    shutil.rmtree(home)


@pytest.mark.parametrize("made_by", [cp, tar, hard_links, to_another_file_system], ids=lambda way: way.__name__)
def test_a_copy_is_noticed_and_goes_on_under_another_pid(home, tmp_path, made_by, caplog):
    pid = append(home, b"one")
    original, verdict = look(home)
    assert verdict is CopyVerdict.ORIGINAL
    copy = tmp_path / "copy"
    made_by(home, copy)
    assert look(copy) == (original, CopyVerdict.COPY)
    if made_by is hard_links:
        assert look(home) == (original, CopyVerdict.COPY), "two names of one file"
    assert append(copy, b"two") != pid
    assert f"is a copy of directory {original.directory_id.hex}" in caplog.text
    found, verdict = look(copy)
    assert verdict is CopyVerdict.ORIGINAL
    assert found.copy_of == (original.directory_id,)
    assert found.directory_id != original.directory_id
    again = append(copy, b"three")
    assert again == append(copy), "one copy, one PID"
    if made_by is not to_another_file_system:
        assert append(home, b"two") == pid, "the original goes on as before"


def rename(home, copy):
    home.rename(copy)


def rename_and_back(home, copy):
    home.rename(copy)
    copy.rename(home)
    home.rename(copy)


def change_owner_and_mode(home, copy):
    for path in [home, *home.rglob("*")]:
        os.chown(path, os.getuid(), os.getgid())
        path.chmod(path.stat().st_mode | 0o040)
    home.rename(copy)


@pytest.mark.parametrize("moved_by", [rename, rename_and_back, change_owner_and_mode], ids=lambda way: way.__name__)
def test_what_was_only_moved_is_no_copy(home, tmp_path, moved_by):
    pid = append(home, b"one")
    moved_by(home, tmp_path / "moved")
    assert append(tmp_path / "moved", b"two") == pid
    assert look(tmp_path / "moved")[0].copy_of == ()


def test_a_backup_written_into_the_present_files_is_noticed(home, tmp_path):
    """`cp -a backup/. data/` keeps the inodes; each opening writes the file anew, so the backup's witness is older."""
    pid = append(home, b"one")
    cp(home, tmp_path / "backup")
    append(home, b"two", b"three")
    inode = (home / DIRECTORY_ID_NAME).stat().st_ino
    subprocess.run(["cp", "-a", f"{tmp_path / 'backup'}/.", home], check=True)
    assert (home / DIRECTORY_ID_NAME).stat().st_ino == inode
    assert append(home, b"four") != pid


def test_a_backup_of_a_running_service_written_into_the_present_files_is_noticed(home, tmp_path):
    """The backup was made after the last opening: the close after it writes the file again."""
    with opened(home) as outbox:
        outbox.append(0, b"one").result(60)
        cp(home, tmp_path / "backup")
        outbox.append(0, b"two").result(60)
        pid = outbox.pid
    subprocess.run(["cp", "-a", f"{tmp_path / 'backup'}/.", home], check=True)
    assert append(home, b"three") != pid


def test_a_restored_outbox_gives_no_offset_twice_under_one_pid(home, tmp_path):
    """The original continued after the backup: a reader that has all of it must keep what the restored one appends."""
    reader, kept = ReplayFilter(), []

    def read():
        with SegmentLog.open_reader(home / "orders-0") as log:
            kept.extend(record.value for record in log.records(0) if reader.admit(record.key, 0))

    append(home, b"one")
    cp(home, tmp_path / "backup")
    append(home, b"two", b"three")
    read()
    shutil.rmtree(home)
    cp(tmp_path / "backup", home)
    append(home, b"four", b"five", b"six")
    read()
    assert kept == [b"one", b"two", b"three", b"four", b"five", b"six"]


def test_a_directory_without_an_id_gets_one_and_is_no_copy(home):
    pid = append(home, b"one")
    (home / DIRECTORY_ID_NAME).unlink()
    assert look(home) == (None, CopyVerdict.NO_ID)
    assert append(home, b"two") == pid
    assert look(home)[1] is CopyVerdict.ORIGINAL


@pytest.mark.parametrize(
    "damage",
    [b"{}", b"", b"\xff", b"{", b"{" * 300_000],
    ids=["empty object", "empty", "no text", "cut off", "too large"],
)
def test_a_damaged_id_counts_as_a_copy(home, damage, caplog):
    pid = append(home, b"one")
    (home / DIRECTORY_ID_NAME).write_bytes(damage)
    assert append(home, b"two") != pid
    assert "can't be believed" in caplog.text
    assert look(home)[0].copy_of == (UNKNOWN_ID,)


def test_each_bit_of_the_file_is_covered(home):
    append(home, b"one")
    data = (home / DIRECTORY_ID_NAME).read_bytes()
    copy_of = json.loads(data)
    assert set(copy_of) == {"version", "directory_id", "copy_of", "is_settled", "witness", "crc32c"}
    for at in range(0, len(data) - 1, 7):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        (home / DIRECTORY_ID_NAME).write_bytes(flipped)
        found, verdict = look(home)
        assert verdict is CopyVerdict.COPY or found == read_directory_id(home, REAL_FILESYSTEM)[0]


class WithoutWitness(RealFilesystem):
    def witness(self, path):
        super().witness(path)


def test_without_a_witness_there_is_no_verdict_and_that_is_said(home, tmp_path, caplog):
    filesystem = WithoutWitness()
    pid = append(home, b"one", filesystem=filesystem)
    assert "nothing that distinguishes a directory from a copy" in caplog.text
    caplog.clear()
    cp(home, tmp_path / "copy")
    assert append(tmp_path / "copy", b"two", filesystem=filesystem) == pid
    assert "nothing that distinguishes a directory from a copy" in caplog.text
    caplog.clear()
    append(home, b"two", filesystem=filesystem, copy_check=False)
    assert "nothing that distinguishes" not in caplog.text


def test_without_the_check_nobody_vouches_for_a_copy(home, tmp_path):
    pid = append(home, b"one")
    cp(home, tmp_path / "copy")
    assert append(tmp_path / "copy", b"two", copy_check=False) == pid
    assert look(tmp_path / "copy")[1] is CopyVerdict.COPY
    assert append(tmp_path / "copy", b"three") != pid


def test_what_the_writer_told_readers_goes_with_the_copy_no_further(home, tmp_path):
    append(home, b"one")
    cp(home, tmp_path / "copy")
    LogDirectory.acquire(tmp_path / "copy").release()
    held = LogDirectory.acquire(tmp_path / "copy")
    try:
        assert held.is_unsettled_copy, "no tool settles it"
        assert not (tmp_path / "copy" / CLEAN_MARKER_NAME).exists()
        assert held.attach("orders-0").published_before is None
    finally:
        held.release()
    assert (home / PUBLISHED_NAME).exists()


def test_what_the_original_published_is_no_recovery_point_of_a_copy(home, tmp_path):
    """identity P2: the opening that detected the copy was killed before it removed the published state, and the next
    one has copy_check=False.
    """
    append(home, b"one", b"two", b"three")
    cp(home, copy := tmp_path / "copy")
    found, _ = read_directory_id(copy, REAL_FILESYSTEM)
    noted = replace(found, copy_of=(found.directory_id,), is_settled=False)
    write_directory_id(copy, REAL_FILESYSTEM, noted)
    write_checkpoint(copy, CheckpointFile.RECOVERY_POINT, {"orders-0": 1})
    held = LogDirectory.acquire(copy, copy_check=False)
    try:
        view = held.attach("orders-0")
        assert view.published_before.flushed_offset == 3
        assert view.known_on_disk == 1
    finally:
        held.release()


def torn(home, tmp_path):
    """A copy that was made while the original was written: the checkpoint is newer than the file."""
    append(home, b"one" * 50, b"two" * 50, b"three" * 50)
    copy = tmp_path / "copy"
    cp(home, copy)
    return copy, copy / "orders-0" / f"{0:020d}.log"


def test_a_torn_end_below_the_recovery_point_is_cut_in_a_copy(home, tmp_path):
    copy, path = torn(home, tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    append(copy, b"four")
    with SegmentLog.open_reader(copy / "orders-0") as log:
        assert [record.value for record in log.records(0)] == [b"one" * 50, b"two" * 50, b"four"]
    assert list((copy / "orders-0").glob("*.cut"))


def test_damage_before_a_whole_batch_stays_damage_in_a_copy(home, tmp_path):
    copy, path = torn(home, tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with opened(copy) as outbox:
        assert outbox.log(0).damaged_from == 1


def test_the_list_of_epochs_of_a_copy_may_be_of_another_moment(home, tmp_path):
    copy, _ = torn(home, tmp_path)
    for name in (CLEAN_MARKER_NAME, CheckpointFile.RECOVERY_POINT.value):
        (copy / name).unlink()
    write_leader_epochs(copy / "orders-0", LeaderEpochs(((1, 0),)))  # what was copied before it is of epoch 0
    append(copy, b"four")
    with SegmentLog.open_reader(copy / "orders-0") as log:
        assert [record.value for record in log.records(0)] == [b"one" * 50, b"two" * 50, b"three" * 50, b"four"]


def test_moved_makes_a_copy_the_original_again(home, tmp_path, capsys):
    pid = append(home, b"one")
    original, _ = look(home)
    cp(home, tmp_path / "there")
    shutil.rmtree(home)
    assert run("replica", "moved", tmp_path / "there") == 0
    assert original.directory_id.hex in capsys.readouterr().out
    assert append(tmp_path / "there", b"two") == pid
    assert look(tmp_path / "there") == (original, CopyVerdict.ORIGINAL)
    assert run("replica", "moved", tmp_path / "there") == 1
    assert "it is the original" in capsys.readouterr().err


def test_moved_is_heard_after_an_opening_too(home, tmp_path):
    append(home, b"one")
    original, _ = look(home)
    home.rename(tmp_path / "kept")
    cp(tmp_path / "kept", home)
    append(home, b"two")
    cp(home, tmp_path / "copy of the copy")
    append(tmp_path / "copy of the copy", b"three")
    assert len(look(tmp_path / "copy of the copy")[0].copy_of) == 2
    between, _ = look(home)
    for still_there in (home, tmp_path / "kept"):
        with pytest.raises(CommandRefused, match=f"a copy of {still_there}, which is still there"):
            moved(tmp_path / "copy of the copy")
        shutil.rmtree(still_there)
        assert moved(tmp_path / "copy of the copy") == (between if still_there == home else original)


def test_another_copy_beside_it_is_not_the_original(home, tmp_path):
    append(home, b"one")
    original, _ = look(home)
    for name in ("there", "a backup"):
        cp(home, tmp_path / name)
    shutil.rmtree(home)
    (tmp_path / "else").mkdir()
    (tmp_path / "file").write_bytes(b"")
    assert moved(tmp_path / "there") == original
    assert look(tmp_path / "there") == (original, CopyVerdict.ORIGINAL)
    assert look(tmp_path / "a backup") == (original, CopyVerdict.COPY)
    with pytest.raises(CommandRefused, match=f"a copy of {tmp_path / 'there'}, which is still there"):
        moved(tmp_path / "a backup")


def test_moved_refuses_what_is_no_directory_of_an_outbox(tmp_path):
    with pytest.raises(CommandRefused, match="there is no such directory"):
        moved(tmp_path / "none")
    with pytest.raises(CommandRefused, match="it has no id"):
        moved(tmp_path)


def test_another_pid_that_was_asked_for_is_that_of_a_copy(home, tmp_path):
    """`new-epoch` after a restore: the next opening begins no other."""
    append(home, b"one")
    cp(home, tmp_path / "copy")
    asked = begin_pid_epoch(tmp_path / "copy")
    assert append(tmp_path / "copy", b"two") == asked.pid


def test_another_pid_does_not_settle_whose_copy_a_members_directory_is(home, tmp_path):
    append(home, b"one")
    known = read_identity(REAL_FILESYSTEM, home)
    write_identity(REAL_FILESYSTEM, home, replace(known, replicas=((1, "127.0.0.1:9"),)))
    cp(home, tmp_path / "copy")
    begin_pid_epoch(tmp_path / "copy")
    with pytest.raises(DirectoryIsCopy), locked_outbox(tmp_path / "copy", refuse_copy=True):
        pass


def test_a_copy_of_an_outbox_without_replicas_may_be_rebased(home, tmp_path):
    """It goes on under a PID of its own anyway."""
    append(home, b"one")
    cp(home, tmp_path / "copy")
    with locked_outbox(tmp_path / "copy", refuse_copy=True) as (path, _):
        assert path == tmp_path / "copy"


def test_a_copy_is_asked_for_the_original_before_it_has_replicas(home, tmp_path):
    append(home, b"one")
    cp(home, tmp_path / "copy")
    with pytest.raises(DirectoryIsCopy, match="pushrep replica moved"):
        opened(tmp_path / "copy", replicas=["127.0.0.1:9"])


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")
def test_a_tmpfs_tells_copies_by_birth_time():
    path = Path(f"/dev/shm/pushrep-{os.getpid()}")
    path.mkdir()
    try:
        pid = append(path / "outbox", b"one")
        (path / "outbox").rename(path / "moved")
        assert append(path / "moved", b"two") == pid
        cp(path / "moved", path / "copy")
        assert append(path / "copy", b"three") != pid
    finally:
        shutil.rmtree(path)


def test_the_bytes_are_as_they_are_documented(tmp_path):
    """The example of docs/internals/formats/directory-files.md is read, and written so."""
    page = (Path(__file__).parents[2] / "docs/internals/formats/directory-files.md").read_text(encoding="utf-8")
    example = page.partition("## `directory-id.json`")[2].partition("```json\n")[2].partition("```")[0]
    (tmp_path / DIRECTORY_ID_NAME).write_text(example)
    found, verdict = look(tmp_path)
    assert found == DirectoryId(directory_id=UUID(hex="5bd0f3c2b8e94f5c9d0e6a1b7c8d9e0f"))
    assert verdict is CopyVerdict.COPY, "this file is no file of ours"
    witness = FileWitness(inode=9977974, generation=4024739680, birth_ns=1795387581796078310)

    class AsWritten(RealFilesystem):
        def witness(self, path):
            return witness

    write_directory_id(tmp_path, AsWritten(), found)
    assert (tmp_path / DIRECTORY_ID_NAME).read_text() == example


@pytest.fixture
def overlay(tmp_path):
    place = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for path in place.values():
        path.mkdir()
    options = ",".join(f"{name}dir={place[name]}" for name in ("lower", "upper", "work"))
    command = ["mount", "-t", "overlay", "overlay", "-o", options, place["merged"]]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no overlay can be mounted here")
    yield place["merged"]
    subprocess.run(["umount", place["merged"]], check=True)


def test_an_overlay_gives_no_verdict(overlay, caplog):
    pid = append(overlay / "outbox", b"one")
    cp(overlay / "outbox", overlay / "copy")
    assert look(overlay / "copy")[1] is CopyVerdict.UNKNOWN
    assert append(overlay / "copy", b"two") == pid
    assert "nothing that distinguishes a directory from a copy" in caplog.text


def test_a_bind_mount_is_no_copy(home, tmp_path):
    pid = append(home, b"one")
    (tmp_path / "bound").mkdir()
    command = ["mount", "--bind", home, tmp_path / "bound"]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        assert append(tmp_path / "bound", b"two") == pid
    finally:
        subprocess.run(["umount", tmp_path / "bound"], check=True)
