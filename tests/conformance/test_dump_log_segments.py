"""Kafka's DumpLogSegments reads every file that a log leaves: of all codecs, after roll, close, kill -9 and cut.

The tool exits 0 on damage, so every line is read. One run for many files: a Java machine takes a second to start.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec

pytestmark = pytest.mark.java

DUMP = "org.apache.kafka.tools.DumpLogSegments"
KINDS = (".log", ".index", ".timeindex")
BATCH = re.compile(r"baseOffset: (\d+) lastOffset: (\d+) count: (\d+) .* isvalid: (\w+)")
BROKEN = re.compile(
    r"isvalid: false|mismatch|Mismatches|out of order|not found|Exception|Could not|Found timestamp", re.IGNORECASE
)
CONFIG = {"segment_bytes": 60_000, "batch_bytes": 1500, "index_interval_bytes": 4096}


@pytest.fixture(scope="module")
def dump(kafka_tool):
    """Dump all segment files of these logs: (batches as (path, base, last, count), the whole output)."""

    def run(*logs):
        files = [path for log in logs for path in sorted(log.iterdir()) if path.suffix in KINDS]
        assert files, "there is something to judge"
        said = kafka_tool(DUMP, "--deep-iteration", "--files", ",".join(map(str, files)))
        bad = [line for line in said.splitlines() if BROKEN.search(line)]
        assert not bad, f"Kafka's tool objects: {bad[:10]}"
        for path in files:
            assert f"Dumping {path}" in said, f"{path} was not looked at"
        return [(int(b), int(last), int(n)) for b, last, n, valid in BATCH.findall(said) if valid == "true"], said

    return run


def fill(log, first=0, count=3000, start_ms=1_700_000_000_000):
    """Lists of different lengths, times that also go back, keys, headers and nulls."""
    end = first + count
    while first < end:
        n = min(end - first, 1 + first % 97)
        values = [None if i % 50 == 49 else b"value %d " % i * (i % 9) for i in range(first, first + n)]
        times = [start_ms + i * 10 - (i % 7) * 25 for i in range(first, first + n)]
        headers = [[("h", b"x")] if i % 3 else [] for i in range(first, first + n)]
        keys = [b"k%d" % i for i in range(first, first + n)]
        log.append(values, keys=keys, headers=headers, timestamps_ms=times, durability=Durability.BUFFERED)
        first += n
    return end


def assert_covers(batches, ends):
    """The dumped batches are those of whole logs, without a hole."""
    logs, expected = 0, 0
    for base, last, count in batches:
        if base == 0:
            logs, expected = logs + 1, 0
        assert base == expected, f"a batch begins at {base}, {expected} was expected"
        assert count == last - base + 1
        expected = last + 1
        if expected == ends.get(logs):
            ends.pop(logs)
    assert not ends, f"these logs (number: end offset) were not dumped whole: {ends}"


def test_every_codec_after_roll_and_close(dump, tmp_path):
    logs = [tmp_path / f"codec{codec.name.lower()}-0" for codec in Codec]
    for codec, path in zip(Codec, logs, strict=True):
        preallocate = 30_000 if codec in (Codec.NONE, Codec.LZ4) else 0
        with SegmentLog.open(path, LogConfig(**CONFIG, codec=codec, preallocate_bytes=preallocate)) as log:
            fill(log)
        if codec is Codec.NONE:
            assert len(list(path.glob("*.log"))) > 3, "segments rolled"
            assert any(p.stat().st_size for p in path.glob("*.index")), "offset indexes have entries"
    batches, _ = dump(*logs)
    assert_covers(batches, dict.fromkeys(range(1, len(logs) + 1), 3000))


def test_a_log_that_was_closed_reopened_and_cut(dump, tmp_path):
    path = tmp_path / "orders-3"
    with SegmentLog.open(path, LogConfig(**CONFIG)) as log:
        fill(log)
    with SegmentLog.open(path, LogConfig(**CONFIG)) as log:
        end = log.truncate_to(1771, force=True)
        assert 0 < end <= 1771
        fill(log, end, 900, start_ms=1_700_000_900_000)
    with SegmentLog.open(path, LogConfig(**CONFIG)) as log:
        fill(log, log.log_end_offset, 10)
        assert log.log_end_offset == end + 910
    batches, _ = dump(path)
    assert_covers(batches, {1: end + 910})


WRITER = """
import sys
from pathlib import Path
from pushrep.log import Durability, LogConfig, SegmentLog
path, preallocate = Path(sys.argv[1]), int(sys.argv[2])
config = LogConfig(segment_bytes=60_000, batch_bytes=1500, preallocate_bytes=preallocate)
log = SegmentLog.open(path, config)
while True:
    result = log.append([b"value %d" % i * (i % 9) for i in range(70)], durability=Durability.BUFFERED)
    print(result.last_offset, flush=True)
"""


def test_a_writer_that_was_killed_then_reopened(dump, tmp_path):
    logs = [tmp_path / "plain-0", tmp_path / "ahead-0"]
    ends = {}
    for number, (path, preallocate) in enumerate(zip(logs, (0, 40_000), strict=True), 1):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path, str(preallocate)], stdout=subprocess.PIPE)
        acknowledged = [int(writer.stdout.readline()) for _ in range(150)][-1]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with SegmentLog.open(path, LogConfig(**CONFIG)) as log:
            assert log.log_end_offset > acknowledged, "what was acknowledged is there"
            fill(log, log.log_end_offset, 500, start_ms=1_900_000_000_000)
            ends[number] = log.log_end_offset
    batches, _ = dump(*logs)
    assert_covers(batches, ends)


def test_the_judge_sees_a_flipped_bit(kafka_tool, tmp_path):
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, LogConfig()) as log:
        log.append([b"value"] * 10)
    file = path / "00000000000000000000.log"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert "isvalid: false" in kafka_tool(DUMP, "--files", file)
