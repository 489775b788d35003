"""`pushrep log dump` prints the same lines as Kafka's DumpLogSegments for the same file: all codecs, each kind of
file.
"""

import pytest

from pushrep.cli import main as cli_main
from pushrep.log import LogConfig, SegmentLog
from pushrep.records import Codec, encode_batch

pytestmark = pytest.mark.java

DUMP = "org.apache.kafka.tools.DumpLogSegments"
BASE = "0" * 20


def fill(path, codec):
    with SegmentLog.open(path, LogConfig(segment_bytes=4000, index_interval_bytes=300, codec=codec)) as log:
        for number in range(60):
            values = [None if i == 3 else b"value %d %d" % (number, i) * (i % 4) for i in range(1 + number % 6)]
            count = len(values)
            log.append(
                values,
                keys=[b"k%d" % i if i % 2 else None for i in range(count)],
                headers=[[("h", b"x"), ("i", None)] if i % 3 else [] for i in range(count)],
                timestamps_ms=[1_700_000_000_000 + number * 10 - i * 7 for i in range(count)],
            )
        log.append(
            encode_batch(
                [b"from an idempotent producer"] * 3,
                timestamps_ms=1_700_000_001_000,
                codec=codec,
                producer_id=4711,
                producer_epoch=2,
                base_sequence=2**31 - 2,
            )
        )


def test_the_same_lines_for_all_codecs_and_files(kafka_tool, tmp_path, capsys):
    for partition, codec in enumerate(Codec):
        fill(tmp_path / f"orders-{partition}", codec)
    files = sorted(path for path in tmp_path.glob("*/*") if path.suffix in {".log", ".index", ".timeindex"})
    assert len(files) > 30
    theirs = kafka_tool(DUMP, "--deep-iteration", "--print-data-log", "--files", ",".join(map(str, files)))
    ours = []
    for file in files:
        assert cli_main.run(["log", "dump", "--records", str(file)]) == 0
        ours += capsys.readouterr().out.splitlines()
    # It takes a segment that does not begin with offset 0 for a hole, and says so on standard error.
    theirs = [line for line in theirs.splitlines() if "Non-consecutive" not in line and "followed by" not in line]
    assert ours == theirs


def test_both_see_damage(kafka_tool, tmp_path, capsys):
    fill(tmp_path / "orders-0", Codec.NONE)
    file = tmp_path / "orders-0" / f"{BASE}.log"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    theirs = kafka_tool(DUMP, "--files", file).splitlines()
    assert cli_main.run(["log", "dump", str(file)]) == 1
    ours = capsys.readouterr().out.splitlines()
    assert ours[:-1] == theirs[:-1], "up to the batch that is bad"
    assert "isvalid: false" in theirs[-1]
    assert "isvalid: false" in ours[-1]
