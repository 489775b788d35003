"""A reader in another process follows a writer that rolls segments, cuts the end off and raises the log start.

Each record contains the number of cuts before it, its offset and a checksum. So the reader can check each batch: never
a torn batch, never a record at another offset, never a record from before a cut after one from after it. The only
allowed error is OffsetOutOfRange.
"""

import os
import random
import signal
import zlib
from contextlib import contextmanager

import pytest

from pushrep.log import Durability, LogConfig, LogLocked, OffsetOutOfRange, SegmentLog
from pushrep.records import BatchHeader, Codec, RecordBatch
from tests.support.forks import fork

KEPT_BYTES = 30_000


def value(life, offset):
    body = b"%d %d %s" % (life, offset, b"x" * (offset * 13 % 120))
    return b"%d %s" % (zlib.crc32(body), body)


def life_of(record):
    crc, body = record.value.split(b" ", 1)
    assert int(crc) == zlib.crc32(body), f"offset {record.offset} holds {record.value!r}"
    life, offset, _ = body.split(b" ", 2)
    assert int(offset) == record.offset, f"offset {record.offset} holds the record of {int(offset)}"
    return int(life)


def write_until_killed(path, seed, codec, ready):
    draw, life = random.Random(seed), 0
    config = LogConfig(
        segment_bytes=8_000,
        batch_bytes=2000,
        index_interval_bytes=500,
        preallocate_bytes=3000,
        retention_bytes=KEPT_BYTES,
        codec=codec,
    )
    log = SegmentLog.open(path, config)
    os.write(ready, b"!")
    while True:
        start, end = log.log_start_offset, log.log_end_offset
        what = draw.random()
        if what < 0.1 and end > start:
            end = log.truncate_to(draw.randrange(max(start, end - draw.choice([5, 50, 400])), end), force=True)
            life += 1
        elif what < 0.15:
            log.apply_retention()
        amount = draw.choice([1, 5, 40])
        durability = Durability.FLUSHED if what > 0.8 else Durability.BUFFERED
        log.append([value(life, offset) for offset in range(end, end + amount)], durability=durability)


@contextmanager
def writer(path, seed, codec):
    """The writer's process id, once its log is open; it is killed at the end."""
    reading, writing = os.pipe()
    child = fork(lambda: write_until_killed(path, seed, codec, writing))
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!", "the writer opened its log"
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGKILL, "the writer ended by itself"


class Follower:
    """Reads without end, and stores for each offset the highest number of cuts that it has seen there."""

    def __init__(self, reader):
        self.reader, self.at = reader, 0
        self.lives = {}
        self.newest = 0
        self.read = 0

    def step(self, by_bytes):
        try:
            self.at = max(self.at, self.reader.log_start_offset)
            for record in self._by_bytes() if by_bytes else self.reader.records(self.at):
                self._take(record)
        except OffsetOutOfRange as refusal:
            if self.at > refusal.end:  # it was cut: read again what came since, and some of what was before
                self.at = max(refusal.start, refusal.end - 300)
        self.newest = 0  # the next step is another look: what a cut left may be of an older life

    def _by_bytes(self):
        data = memoryview(self.reader.read(self.at, 30_000))
        while data:
            size = BatchHeader.parse(data).size_bytes
            batch = RecordBatch.check(bytes(data[:size]))
            yield from (record for record in batch.records() if record.offset >= self.at)
            data = data[size:]

    def _take(self, record):
        assert record.offset == self.at, f"{record.offset} where {self.at} is next"
        life = life_of(record)
        assert life >= self.newest, f"offset {record.offset} of life {life} behind one of life {self.newest}"
        assert life >= self.lives.get(record.offset, 0), f"offset {record.offset} went back to life {life}"
        self.newest = self.lives[record.offset] = life
        self.at += 1
        self.read += 1


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
@pytest.mark.parametrize("isolation", ["stable", "written"])
def test_a_reader_follows_through_rolls_cuts_and_retention(tmp_path, isolation, codec, torture):
    path, seed = tmp_path / "orders-0", torture.random(isolation, codec).randrange(1 << 30)
    wanted, starts = torture.count(2_000, 60_000), set()
    with writer(path, seed, codec), SegmentLog.open_reader(path, isolation=isolation) as reader:
        follower = Follower(reader)
        while follower.read < wanted or len(starts) < 4 or max(follower.lives.values()) < 5:
            follower.step(by_bytes=len(starts) % 2 == 0)
            starts.add(reader.log_start_offset)
    with SegmentLog.open(path) as log:
        assert log.recovery.damaged_from is None
        offsets = [record.offset for record in log.records(log.log_start_offset) if life_of(record) >= 0]
        assert offsets == list(range(log.log_start_offset, log.log_end_offset))


def test_a_second_process_is_refused_with_the_writers_pid_while_readers_are_not(tmp_path):
    path = tmp_path / "orders-0"
    with writer(path, 1, Codec.NONE) as pid:
        for name in ("orders-0", "orders-1"):
            with pytest.raises(LogLocked) as refused:
                SegmentLog.open(tmp_path / name)
            assert refused.value.pid == pid
        SegmentLog.open_reader(path).close()
    with SegmentLog.open(path) as log:
        assert log.recovery.damaged_from is None
