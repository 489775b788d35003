"""Verify and dump beside a writer in another process that appends, rolls and truncates: what moves is no damage."""

import os
import signal
from contextlib import contextmanager

import pytest

from pushrep.log.dump import DumpedBatch, DumpedEnd, OffsetWindow, dump_file, files_to_dump
from pushrep.log.errors import LogLocked
from pushrep.log.inspection import summarize
from pushrep.log.repair import Repairer
from pushrep.log.verify import verify_log
from tests.programs import PythonProgram

WRITER = """
import random, sys
from pathlib import Path
from pushrep.log import Durability, LogConfig, SegmentLog
seed, cuts = int(sys.argv[2]), sys.argv[3] == "cuts"
draw = random.Random(seed)
path = Path(sys.argv[1])
log = SegmentLog.open(path, LogConfig(segment_bytes=200_000, preallocate_bytes=50_000))
number = 0
while True:
    number += 1
    values = [draw.randbytes(draw.randrange(200))] * draw.randrange(1, 60)
    log.append(values, durability=Durability.BUFFERED)
    if number == 400:
        print("going", flush=True)
    if cuts and number > 400 and number % 97 == 0:
        log.truncate_to(draw.randrange(log.log_end_offset // 2, log.log_end_offset), force=True)
    if number > 3000 and sys.argv[3] == "rolls":
        log.truncate_to(log.log_end_offset // 2, force=True)
        for kept in path.glob("*.cut"):  # as an operator would: else the long form fills the disk
            kept.unlink()
        number = 401
"""


@contextmanager
def writer(path, seed, mode):
    process = PythonProgram("-c", WRITER, path, seed, mode)
    try:
        assert process.stdout.readline() == "going\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("mode", ["rolls", "cuts"])
def test_what_moves_is_no_damage(tmp_path, torture, mode):
    path = tmp_path / "orders-0"
    with writer(path, torture.seed, mode) as process:
        for _ in range(torture.count(12, 400)):
            report = verify_log(path)
            assert report.is_whole, f"seed {torture.seed}: {report.findings}"
            assert report.writer_pid == process.pid
            assert summarize(path).known_by == "writer"
        assert report.verified_to > 0
        with pytest.raises(LogLocked) as refused:
            Repairer(path).repair()
        assert refused.value.pid == process.pid
        assert process.poll() is None, "the writer goes on"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    report = verify_log(path)
    assert report.is_whole, report.findings
    assert report.writer_pid is None


def test_damage_is_found_beside_the_writer(tmp_path, torture):
    path = tmp_path / "orders-0"
    with writer(path, torture.seed, "grows"):
        first = path / f"{0:020d}.log"
        data = bytearray(first.read_bytes())
        at = len(data) // 3
        with first.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))
        report = verify_log(path)
        assert [finding.file for finding in report.findings] == [first.name], report.findings
        assert report.findings[0].position <= at


def test_a_dump_never_shows_a_torn_batch(tmp_path, torture):
    path = tmp_path / "orders-0"
    with writer(path, torture.seed, "grows"):
        for _ in range(torture.count(5, 200)):
            (*_, newest) = files_to_dump(path, OffsetWindow(), indexes=False)
            entries = list(dump_file(newest, OffsetWindow()))
            assert all(isinstance(entry, DumpedBatch) or entry.is_clean for entry in entries), entries[-1]
            assert sum(isinstance(entry, DumpedEnd) for entry in entries) <= 1
