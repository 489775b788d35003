"""Marks as files on this machine's disk: what was written survives any stop, damage is never read as an empty store."""

import dataclasses
import errno
import os
import struct
import zlib
from pathlib import Path

import pytest

from filtering import HighwaterMarks
from spark_jobs import file_marks
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksFenced, MarksKey, MarksStoreDamaged
from spark_jobs.file_marks import FileMarks, local_path


def batch(number: int, query: str = "q", pairs: int = 3) -> BatchMarks:
    marks = HighwaterMarks.from_columns(range(pairs), [0] * pairs, [number + 1] * pairs, 0)
    return BatchMarks(query, number, (LogRange("t", 0, number, number + 1),), {MarksKey("t"): marks})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "marks"


def test_written_batches_are_there_again_after_a_restart(path):
    store = FileMarks(path)
    assert (store.owner(), store.batches("q"), store.read("q", 0)) == (None, [], None)
    assert not path.exists(), "a look makes nothing"
    for n in range(3):
        store.write(batch(n), keep=9)
        assert store.read("q", n) == batch(n)
    assert store.read("q", 0) == batch(0)
    store = FileMarks(path)
    assert (store.owner(), store.batches("q")) == ("q", [0, 1, 2])
    assert [store.read("q", n) for n in range(4)] == [batch(0), batch(1), batch(2), None]
    assert store.read("other", 1) is None


def test_a_url_of_this_machine_is_the_same_store(path):
    FileMarks(path).write(batch(0), keep=9)
    assert FileMarks(f"file://{path}").read("q", 0) == batch(0)
    assert (local_path("hdfs:///marks"), local_path("s3a://bucket/marks")) == (None, None)


def test_large_marks_are_one_file(path):
    FileMarks(path).write(batch(0, pairs=200_000), keep=9)
    assert FileMarks(path).read("q", 0) == batch(0, pairs=200_000)
    assert len(list(path.iterdir())) == 1


@pytest.mark.parametrize("stops_at", ["fsync", "link"])
def test_a_writer_that_is_stopped_leaves_no_part_of_a_batch(path, monkeypatch, stops_at):
    FileMarks(path).write(batch(0), keep=9)

    class Killed(BaseException):
        pass

    def stop(*_):
        raise Killed

    monkeypatch.setattr(file_marks.os, stops_at, stop)
    monkeypatch.setattr(file_marks.Path, "unlink", lambda *_, **__: None)  # nothing is tidied up any more
    with pytest.raises(Killed):
        FileMarks(path).write(batch(1), keep=9)
    monkeypatch.undo()
    store = FileMarks(path)
    assert (store.owner(), store.batches("q")) == ("q", [0])
    store.write(batch(1), keep=9)
    assert sorted(one.suffix for one in path.iterdir()) == [".marks", ".marks"], "what it left aside is gone"


def test_each_write_is_on_disk_when_it_returns(path, monkeypatch):
    """The file before it has its name; then the directories."""
    synced, fsync, link = [], os.fsync, os.link
    own = Path("/proc/self/fd")
    monkeypatch.setattr(file_marks.os, "fsync", lambda fd: synced.append(str((own / str(fd)).readlink())) or fsync(fd))
    monkeypatch.setattr(file_marks.os, "link", lambda *names: synced.append("named") or link(*names))
    FileMarks(path).write(batch(0), keep=9)
    *made, aside, named, directory = synced
    assert {str(path.parent), str(path.parent.parent)} == set(made)
    assert (aside.endswith(".writing"), named, directory) == (True, "named", str(path))
    FileMarks(path).drop_from("q", 0)
    assert synced[-1] == str(path), "a removal, too"


def test_of_two_drivers_the_second_is_fenced_also_in_the_same_instant(path, monkeypatch):
    first, second = FileMarks(path), FileMarks(path)
    assert (first.owner(), second.owner()) == (None, None)
    monkeypatch.setattr(second, "_files", list)  # it looked before the first one wrote
    first.write(batch(0), keep=9)
    with pytest.raises(MarksFenced, match="batch 0 of query q"):
        second.write(batch(0, pairs=1), keep=9)
    monkeypatch.undo()
    with pytest.raises(MarksFenced):
        second.owner()
    assert FileMarks(path).read("q", 0) == batch(0)


def test_who_only_looks_is_not_fenced_by_the_query_that_runs(path):
    running, looking = FileMarks(path), FileMarks(path, read_only=True)
    for number in range(4):
        running.write(batch(number), keep=2)
        assert looking.batches("q") == running.batches("q")
        assert looking.read("q", number) == batch(number)


def test_a_file_system_without_links_renames(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(file_marks.os, "link", refuse)
    store = FileMarks(path)
    store.write(batch(0), keep=9)
    second = FileMarks(path)
    monkeypatch.setattr(second, "_files", list)
    with pytest.raises(MarksFenced):
        second.write(batch(0, pairs=1), keep=9)
    assert FileMarks(path).read("q", 0) == batch(0)


def test_damage_is_named_and_stays(path):
    FileMarks(path).write(batch(0), keep=9)
    (file,) = path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(MarksStoreDamaged, match=file.name):
        FileMarks(path).read("q", 0)
    assert file.read_bytes() == bytes(data), "the evidence stays"


def test_marks_of_another_version_are_refused_by_name(path):
    FileMarks(path).write(batch(0), keep=9)
    (file,) = path.iterdir()
    body = bytearray(file.read_bytes()[:-4])
    body[7] = 4
    file.write_bytes(bytes(body) + struct.pack(">I", zlib.crc32(body)))
    with pytest.raises(MarksStoreDamaged, match="version 4, this release reads version 6"):
        FileMarks(path).read("q", 0)


def test_a_query_id_that_is_no_name_is_refused(path):
    with pytest.raises(MarksStoreDamaged, match="is no name of a file"):
        FileMarks(path).write(dataclasses.replace(batch(0), query_id="../q"), keep=9)
