"""Writers that are killed without warning, readers beside them, and children of a fork: real processes."""

import os
import signal
import threading

import pytest

from pushrep import ForkedProcess
from pushrep.log import Durability, LogConfig, LogLocked, OffsetOutOfRange, SegmentLog, list_logs
from tests.programs import PythonProgram
from tests.support.forks import code_in_fork

CONFIG = LogConfig(segment_bytes=50_000, batch_bytes=2000, preallocate_bytes=16_384)

# Two partitions of one directory, by turns; a line on stdout is an acknowledgement: partition, first and last offset.
WRITER = """
import sys
from pathlib import Path
from pushrep.log import Durability, LogConfig, SegmentLog
directory, round_ = Path(sys.argv[1]), sys.argv[2]
config = LogConfig(segment_bytes=50_000, batch_bytes=2000, preallocate_bytes=16_384, flush_ms=20)
logs = [SegmentLog.open(directory / f"orders-{n}", config) for n in range(2)]
n = 0
while True:
    partition = n % 2
    durability = Durability.FLUSHED if n % 10 == 9 else Durability.BUFFERED
    base = logs[partition].log_end_offset
    values = [f"{round_} {partition} {base + i} {'x' * (n % 50)}".encode() for i in range(1 + n % 60)]
    result = logs[partition].append(values, durability=durability)
    print(partition, result.base_offset, result.last_offset, flush=True)
    n += 1
"""


def start(program, *arguments):
    return PythonProgram("-c", program, *arguments)


def kill(process):
    """kill -9, and everything it had acknowledged before."""
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().splitlines()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL, "the writer ended by itself"
    return rest


@pytest.mark.parametrize("seed", range(3))
def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path, seed):
    acknowledged = {0: {}, 1: {}}  # partition -> offset -> round
    for round_ in range(3):
        writer = start(WRITER, tmp_path, round_)
        lines = [writer.stdout.readline() for _ in range(40 + 61 * seed + 30 * round_)] + kill(writer)
        for line in lines:
            parts = line.split()
            if len(parts) == 3:  # the last line may be torn
                partition, first, last = map(int, parts)
                acknowledged[partition].update(dict.fromkeys(range(first, last + 1), round_))
    assert list_logs(tmp_path) == [("orders", 0), ("orders", 1)]
    for partition, offsets in acknowledged.items():
        with SegmentLog.open(tmp_path / f"orders-{partition}", CONFIG) as log:
            assert log.recovery.damaged_from is None
            found = {record.offset: record.value.split() for record in log.records(0)}
            assert list(found) == list(range(log.log_end_offset))
            lost = [offset for offset in offsets if offset not in found]
            assert not lost, f"partition {partition}: {len(lost)} acknowledged records are gone: {log.recovery}"
            for offset, round_ in offsets.items():
                assert found[offset][:3] == [b"%d" % round_, b"%d" % partition, b"%d" % offset]


def test_a_second_process_is_refused_with_the_first_ones_pid(tmp_path):
    writer = start(WRITER, tmp_path, 0)
    writer.stdout.readline()
    try:
        with pytest.raises(LogLocked) as refused:
            SegmentLog.open(tmp_path / "orders-0")
        assert refused.value.pid == writer.pid
        assert str(writer.pid) in str(refused.value)
    finally:
        kill(writer)
    SegmentLog.open(tmp_path / "orders-0").close()


@pytest.mark.parametrize("isolation", ["stable", "written"])
def test_a_reader_follows_a_rolling_writer_without_a_torn_batch(tmp_path, isolation):
    writer = start(WRITER, tmp_path, 0)
    try:
        writer.stdout.readline()
        writer.stdout.readline()
        drain = threading.Thread(target=writer.stdout.read)  # a full pipe would stop the writer
        path, at, ends = tmp_path / "orders-1", 0, set()
        with SegmentLog.open_reader(path, isolation=isolation) as reader:
            drain.start()
            while at < 20_000 or len(ends) < 3:
                for record in reader.records(at):
                    assert record.offset == at
                    assert record.value.startswith(b"0 1 %d " % at)
                    at += 1
                ends.add(at)
                assert reader.log_end_offset >= at
                assert isolation == "written" or reader.stable_offset >= at
        assert len(list(path.glob("*.log"))) > 3, "the writer rolled meanwhile"
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        drain.join()
        writer.stdout.close()
    with SegmentLog.open_reader(path, isolation=isolation) as reader:
        assert reader.log_end_offset >= at, "what was published outlives its writer"
        with pytest.raises(OffsetOutOfRange):
            reader.read(reader.log_end_offset + 1, 10)


def test_a_forked_child_is_refused_at_every_use(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log, SegmentLog.open_reader(tmp_path / "orders-0") as reader:
        log.append([b"before"])
        uses = [
            lambda: log.append([b"in the child"]),
            lambda: log.log_end_offset,
            lambda: log.read(0, 100),
            lambda: list(log.records(0)),
            lambda: log.truncate_to(0, force=True),
            log.flush,
            log.close,
            lambda: reader.stable_offset,
            lambda: list(reader.records(0)),
        ]

        def all_refused():
            for use in uses:
                with pytest.raises(ForkedProcess) as refused:
                    use()
                assert refused.value.owner_pid == os.getppid()

        assert code_in_fork(all_refused) == 0
        log.append([b"after"], durability=Durability.FLUSHED)
        assert [record.value for record in log.records(0)] == [b"before", b"after"]


def test_a_forked_child_opens_for_itself_when_the_parent_is_done(tmp_path):
    log = SegmentLog.open(tmp_path / "orders-0")
    log.append([b"parent"])
    log.close()

    def append():
        with SegmentLog.open(tmp_path / "orders-0") as own:
            assert own.append([b"child"]).base_offset == 1

    assert code_in_fork(append) == 0
    with SegmentLog.open(tmp_path / "orders-0") as log:
        assert [record.value for record in log.records(0)] == [b"parent", b"child"]
