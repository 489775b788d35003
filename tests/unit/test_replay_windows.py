"""The walk in windows: what the log's own reader gives; stops before whatever is odd; leaves lent memory alone."""

import os
import shutil
from itertools import chain
from weakref import WeakValueDictionary

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.reader import LogSlices
from pushrep.log.repair import Repairer
from pushrep.records import Codec, encode_batch
from pushrep.replay import ReplayClient, ReplayRequest, ReplaySettings, ReplayTruncated, slices
from pushrep.replay.slices import BUFFER_BYTES, BatchWindows, Buffers
from tests.support.simulated_disk import SimulatedClock


@pytest.fixture
def log(tmp_path, torture):
    """Batches of 1 to 60 records of any size and codec, in many segments."""
    chosen = torture.random("windows")
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=32 << 10)) as opened:
        for _ in range(120):
            values = [chosen.randbytes(chosen.choice([0, 5, 400])) for _ in range(chosen.randint(1, 60))]
            codec = chosen.choice([Codec.NONE, Codec.NONE, Codec.GZIP])
            opened.append(encode_batch(values, codec=codec, timestamps_ms=1), durability=Durability.BUFFERED)
        opened.flush()
        yield opened


def walk(log, start, end):
    return [
        batch
        for window in BatchWindows(log.path, REAL_FILESYSTEM, Buffers(BUFFER_BYTES)).windows(start, end)
        for batch in window.batches
    ]


@pytest.mark.parametrize("window_bytes", [200, 4096, 512 << 10])
def test_it_gives_the_batches_of_the_logs_own_reader(log, torture, monkeypatch, window_bytes):
    monkeypatch.setattr(slices, "WINDOW_BYTES", window_bytes)
    chosen = torture.random("windows", window_bytes)
    for _ in range(torture.count(6, 300)):
        start, end = sorted(chosen.sample(range(log.log_end_offset + 1), 2))
        got = [bytes(batch.data) for batch in walk(log, start, end)]
        assert got == [bytes(batch.data) for batch in log.batches(start, end)]


def test_it_stops_before_damage_and_raises_nothing(log):
    path = sorted(log.path.glob("*.log"))[1]
    base = int(path.stem)
    data = bytearray(path.read_bytes())
    data[90] ^= 1
    path.write_bytes(data)
    assert [batch.header.next_offset for batch in walk(log, 0, log.log_end_offset)][-1] == base
    assert walk(log, base, base + 1) == []
    assert walk(log, log.log_end_offset, log.log_end_offset + 5) == []


def test_a_buffer_that_somebody_looks_into_is_not_used_again():
    buffers = Buffers(100)
    view = buffers.acquire()[3:5]
    other = buffers.acquire().obj
    assert other is not view.obj
    assert buffers.acquire().obj is other, "nobody looks into that one any more"
    view.release()


def test_slices_name_the_bytes_of_the_batches_and_their_offsets(log, torture):
    chosen = torture.random("slices")
    reader = LogSlices(REAL_FILESYSTEM, log.path)
    for _ in range(torture.count(20, 300)):
        start, end = sorted(chosen.sample(range(log.log_end_offset + 1), 2))
        max_bytes = chosen.choice([1, 3000, 1 << 20])
        found = reader.read(start, end, max_bytes)
        expected = list(log.batches(start, end))[: len(found.batches)]
        got = found.file.read_at(found.size_bytes, found.position)
        assert got == b"".join(bytes(batch.data) for batch in expected)
        assert [one[1:4] + one[5:6] for one in found.batches] == [
            (b.header.base_offset, b.header.next_offset, b.header.size_bytes, len(b)) for b in expected
        ]
        assert found.size_bytes <= max_bytes or len(expected) == 1
    assert reader.read(log.log_end_offset, log.log_end_offset + 1, 1) is None


def test_readers_share_an_open_file_that_stays_open_as_long_as_somebody_sends_from_it(log):
    files = WeakValueDictionary()
    one, other = (LogSlices(REAL_FILESYSTEM, log.path, files=files) for _ in range(2))
    found = one.read(0, 1, 1)
    assert other.read(0, 1, 1).file is found.file
    other.forget()
    assert not files
    descriptor = found.file.fileno()
    assert other.read(0, 1, 1).file is not found.file
    assert found.file.read_at(1, 0)
    del found
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("block_bytes", [200, 4000])
@pytest.mark.parametrize("cut_at", [5, 29, 30, 47])
def test_faults_f5_a_log_that_is_cut_and_grown_again_between_two_looks_ends_its_replay(
    tmp_path, beside, block_bytes, cut_at
):
    """Byte for byte in the place of the old records, under the same leader epoch."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as log:
        for _ in range(8):
            log.append([b"old"] * 10, timestamps_ms=1)
        settings, logs = ReplaySettings(block_bytes=block_bytes), [] if beside else [log]
        with ReplayClient(tmp_path, logs=logs, settings=settings, clock=SimulatedClock()) as client:
            replay = client.replay(ReplayRequest("orders-0", bound="written"))
            blocks = iter(replay.batches())
            assert [next(blocks).batch.header.base_offset for _ in range(3)] == [0, 10, 20]
            end = log.truncate_to(cut_at, force=True)
            while log.log_end_offset < 90:
                log.append([b"new"] * 10, timestamps_ms=1)
            if end >= 30 and block_bytes == 200:  # what was given stands
                behind = [record for _ in range(end // 10 - 1) for record in next(blocks).records()]
                assert [record.offset for record in behind] == list(range(30, end + 20))
                assert [record.value for record in behind] == [b"old"] * (end - 30) + [b"new"] * 20
                return
            given = []
            with pytest.raises(ReplayTruncated) as told:
                given.extend(record.value for record in chain.from_iterable(batch.records() for batch in blocks))
            assert set(given) <= {b"old"}, "nothing of the new history behind the old one"
            assert told.value.cut_offset <= 70


def _cut_by_a_tool(path):
    Repairer(path).repair(cut_at=5)


def _made_anew(path):
    shutil.rmtree(path)


@pytest.mark.parametrize("cut", [_cut_by_a_tool, _made_anew])
def test_faults_f5_a_log_that_was_cut_while_it_was_closed_ends_its_replay(tmp_path, cut):
    def append(log, value, until):
        while log.log_end_offset < until:
            log.append([value] * 10, timestamps_ms=1)

    path = tmp_path / "orders-0"
    with ReplayClient(tmp_path, settings=ReplaySettings(block_bytes=200), clock=SimulatedClock()) as client:
        with SegmentLog.open(path) as log:
            append(log, b"old", 80)
            replay = client.replay(ReplayRequest("orders-0", bound="written"))
            blocks = iter(replay.batches())
            assert [next(blocks).batch.header.base_offset for _ in range(3)] == [0, 10, 20]
        cut(path)
        with SegmentLog.open(path) as log:
            append(log, b"new", 90)
            with pytest.raises(ReplayTruncated):
                next(blocks)


def test_a_log_that_is_cut_and_grows_past_the_reader_while_it_is_walked_is_found_out(tmp_path):
    """Between two windows, and before the log's offsets are read again: the file continues under a higher epoch."""
    config, clock = LogConfig(preallocate_bytes=0), SimulatedClock()
    with SegmentLog.open(tmp_path / "orders-0", config, has_replicas=True) as log:
        for _ in range(40):
            log.append([b"a" * 100_000], durability=Durability.BUFFERED)
        with ReplayClient(tmp_path, clock=clock) as client:
            replay = client.replay(ReplayRequest("orders-0", bound="written"))
            batches = iter(replay.batches())
            next(batches)
            log.truncate_to(1)
            log.begin_epoch(5, 1)
            for _ in range(45):
                log.append([b"b" * 100_000], durability=Durability.BUFFERED)
            with pytest.raises(ReplayTruncated) as told:
                assert {batch.batch.header.leader_epoch for batch in batches} == {0}, "nothing of the new history"
            assert told.value.cut_offset == 1
