"""The local marks store: written marks survive any stop, and damage is never read as an empty store."""

import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from filtering import HighwaterMarks
from pushrep.log import LogLocked, SegmentLog
from spark_jobs import marks as marks_module
from spark_jobs.batch_marks import VERSION, BatchMarks, LogRange, MarksKey
from spark_jobs.errors import StoreUnfit
from spark_jobs.marks import LocalMarks, MarksStoreDamaged


def batch(number: int, query: str = "q", pairs: int = 3) -> BatchMarks:
    marks = HighwaterMarks.from_columns(range(pairs), [0] * pairs, [number + 1] * pairs, 0)
    return BatchMarks(query, number, (LogRange("t", 0, number, number + 1),), {MarksKey("t"): marks})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "marks"


def test_written_batches_are_there_again_after_a_restart(path):
    with LocalMarks(path) as store:
        assert (store.owner(), store.batches("q"), store.read("q", 0)) == (None, [], None)
        for n in range(3):
            store.write(batch(n), keep=9)
            assert store.read("q", n) == batch(n)
        assert store.read("q", 0) == batch(0)
    with LocalMarks(path) as store:
        assert (store.owner(), store.batches("q")) == ("q", [0, 1, 2])
        assert [store.read("q", n) for n in range(4)] == [batch(0), batch(1), batch(2), None]
        assert store.read("other", 1) is None


def test_the_last_word_on_a_batch_counts(path):
    with LocalMarks(path) as store:
        store.write(batch(0, pairs=1), keep=9)
        store.write(batch(0, pairs=2), keep=9)
        assert store.read("q", 0) == batch(0, pairs=2)
    with LocalMarks(path) as store:
        assert store.read("q", 0) == batch(0, pairs=2)


def test_dropped_batches_stay_dropped(path):
    with LocalMarks(path) as store:
        for n in range(4):
            store.write(batch(n), keep=9)
        store.drop_from("q", 2)
        store.drop_from("q", 3)
        store.write(batch(0, "other"), keep=9)
        assert (store.batches("q"), store.read("q", 3)) == ([0, 1], None)
    with LocalMarks(path) as store:
        assert (store.batches("q"), store.batches("other"), store.owner()) == ([0, 1], [0], "other")
        store.write(batch(2, pairs=5), keep=9)
    with LocalMarks(path) as store:
        assert store.read("q", 2) == batch(2, pairs=5)


def test_large_marks_travel_in_parts(path, monkeypatch):
    monkeypatch.setattr(marks_module, "PART_BYTES", 1000)
    big = batch(0, pairs=500)
    with LocalMarks(path) as store:
        store.write(big, keep=9)
        store.write(batch(1), keep=9)
        assert store.read("q", 0) == big
    with LocalMarks(path) as store:
        assert (store.read("q", 0), store.read("q", 1)) == (big, batch(1))


def test_the_log_is_rewritten_when_most_of_it_is_old(path, monkeypatch):
    monkeypatch.setattr(marks_module, "REWRITE_AT_LEAST_BYTES", 4000)
    with LocalMarks(path) as store:
        for n in range(200):
            store.write(batch(n), keep=3)
            size = sum(f.stat().st_size for f in path.rglob("*.log"))
            assert size < 20_000, f"{size} bytes of log after {n} batches"
        assert store.batches("q")[-3:] == [197, 198, 199]
    assert len(list(path.glob("marks-*"))) == 1, "only the newest generation stays"
    with LocalMarks(path) as store:
        assert store.read("q", 199) == batch(199)


def test_a_half_written_generation_does_not_count(path, monkeypatch):
    with LocalMarks(path) as store:
        store.write(batch(0), keep=9)
        store.write(batch(1), keep=9)
    monkeypatch.setattr(marks_module, "COMPLETE", b'{"almost": true}')
    monkeypatch.setattr(marks_module, "REWRITE_AT_LEAST_BYTES", 1)
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    with LocalMarks(path) as store:
        for n in range(2, 12):
            store.write(batch(n), keep=1)
    generation = max(path.glob("marks-*"), key=lambda p: int(p.name[6:]))
    shutil.copytree(generation, kept / "marks-1")  # a copy that a kill left without its last record
    monkeypatch.undo()
    with LocalMarks(kept) as store:
        assert store.read("q", 1) == batch(1)
        assert store.batches("q") == [0, 1]
        monkeypatch.setattr(marks_module, "REWRITE_AT_LEAST_BYTES", 1)
        for n in range(2, 12):
            store.write(batch(n), keep=2)
    assert [p.name for p in kept.glob("marks-*")] != ["marks-1"], "a number is never used for two logs"
    with LocalMarks(kept) as store:
        assert store.read("q", 11) == batch(11)


def append_part(path, value, part, parts):
    """Append to the log of a closed store, as in docs/internals/formats/batch-marks.md."""
    (directory,) = path.glob("marks-*")
    with SegmentLog.open(directory) as log:
        log.append([value], keys=[struct.pack(">II", part, parts)])


def test_parts_without_their_rest_do_not_count(path, monkeypatch):
    monkeypatch.setattr(marks_module, "PART_BYTES", 500)
    with LocalMarks(path) as store:
        store.write(batch(0), keep=9)
    append_part(path, b"x" * 500, 0, 2)
    with LocalMarks(path) as store:
        assert (store.owner(), store.batches("q")) == ("q", [0])
        store.write(batch(1), keep=9)
    with LocalMarks(path) as store:
        assert store.read("q", 1) == batch(1)


def test_a_flipped_bit_is_refused_by_name_and_nothing_is_cut(path):
    with LocalMarks(path) as store:
        for n in range(3):
            store.write(batch(n), keep=9)
    (file,) = path.rglob("*.log")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with LocalMarks(path) as store, pytest.raises(MarksStoreDamaged, match=str(path)):
        store.batches("q")
    assert file.read_bytes() == bytes(data), "the evidence stays"


def test_marks_of_another_version_are_refused_by_name(path):
    with LocalMarks(path) as store:
        store.write(batch(0), keep=9)
    body = bytearray(batch(1).to_bytes()[:-4])
    body[7] = VERSION + 1
    append_part(path, bytes(body) + struct.pack(">I", zlib.crc32(body)), 0, 1)
    with (
        LocalMarks(path) as store,
        pytest.raises(MarksStoreDamaged, match="version 6, this release reads version 5"),
    ):
        store.owner()


def test_another_process_is_named(path):
    with LocalMarks(path) as store:
        store.write(batch(0), keep=9)
        code = (
            "import sys\nfrom pushrep.log import LogLocked\nfrom spark_jobs.marks import LocalMarks\n"
            "try:\n    LocalMarks(sys.argv[1]).owner()\n"
            "except LogLocked as error:\n    print(error.pid)\n"
        )
        answer = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert answer.stdout.strip() == str(os.getpid())
        with pytest.raises(LogLocked):
            LocalMarks(path).owner()


def test_a_closed_store_opens_again(path):
    store = LocalMarks(path)
    store.write(batch(0), keep=9)
    store.close()
    store.close()
    assert store.read("q", 0) == batch(0)
    store.close()


@pytest.mark.parametrize("url", ["s3a://bucket/marks", "hdfs:/marks", "file:///marks"])
def test_a_url_is_refused_by_name_and_no_directory_is_made(tmp_path, monkeypatch, url):
    """Also as a path, which has one slash less: it would be a directory below the one where the driver was started."""
    monkeypatch.chdir(tmp_path)
    for place in (url, Path(url)):
        with pytest.raises(StoreUnfit, match="FileMarks keeps marks"):
            LocalMarks(place)
    with LocalMarks("at:noon") as store:
        assert store.owner() is None
    assert [path.name for path in tmp_path.iterdir()] == ["at:noon"]
