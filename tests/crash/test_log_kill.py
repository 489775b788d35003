"""Repeated kill -9 in one directory: several threads and partitions, each acknowledgement is written to a pipe.

A record contains its round, thread, partition and number, and a checksum: so each proves that it was written there.
lost: an acknowledged number is missing. reordered: the numbers of one thread do not ascend one by one. invented: a
broken checksum, a record twice, or more than one append beyond what was acknowledged.
"""

import os
import signal
import struct
import threading
import time
import zlib
from collections import defaultdict
from itertools import count

import pytest

from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec
from tests.support.forks import fork

PARTITIONS, THREADS = 3, 4
RECORDS_MAX = 40
RECORD = struct.Struct(">IIIQI")  # round, partition, thread, number, CRC of these and the padding
REPORT = struct.Struct(">IIQqqI")  # partition, thread, next number, base and last offset, CRC of the record's values
CODECS = [Codec.NONE, Codec.LZ4, Codec.ZSTD]


def config_of(round_, partition):
    """Every second round allocates ahead; rolls, indexes and the flusher are all at work within a round."""
    return LogConfig(
        segment_bytes=60_000,
        batch_bytes=3000,
        index_interval_bytes=1024,
        preallocate_bytes=0 if round_ % 2 else 30_000,
        flush_ms=15,
        codec=CODECS[partition],
    )


def value(round_, partition, thread, number):
    padding = b"x" * (number * 7 % 90)
    fields = (round_, partition, thread, number)
    return RECORD.pack(*fields, zlib.crc32(b"%d %d %d %d" % fields + padding)) + padding


def parsed(data):
    """(round, partition, thread, number) of a record that is whole."""
    *fields, crc = RECORD.unpack_from(data)
    assert crc == zlib.crc32(b"%d %d %d %d" % tuple(fields) + data[RECORD.size :]), f"invented: {data!r}"
    return tuple(fields)


def write_until_killed(directory, round_, pipe):
    """The child: reports are shorter than a pipe's atomic write, so those of several threads never mix."""
    logs = [SegmentLog.open(directory / f"orders-{n}", config_of(round_, n)) for n in range(PARTITIONS)]
    os.write(pipe, bytes(REPORT.size))

    def work(thread):
        numbers = [0] * PARTITIONS
        for turn in count(thread):
            partition = turn % PARTITIONS
            amount = 1 + (turn * 13 + thread) % RECORDS_MAX
            first = numbers[partition]
            values = [value(round_, partition, thread, number) for number in range(first, first + amount)]
            durability = Durability.FLUSHED if turn % 5 == thread else Durability.BUFFERED
            result = logs[partition].append(values, durability=durability)
            numbers[partition] = first + amount
            crc = zlib.crc32(b"".join(values))
            offsets = (result.base_offset, result.last_offset)
            os.write(pipe, REPORT.pack(partition, thread, first + amount, *offsets, crc))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def run_and_kill(directory, round_, reports_wanted, delay_s):
    """Every report of a child that was killed `delay_s` after it had sent so many."""
    reading, writing = os.pipe()

    def write():
        os.close(reading)
        write_until_killed(directory, round_, writing)

    child = fork(write)
    os.close(writing)
    data = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while len(data) < reports_wanted * REPORT.size and (more := pipe.read(1 << 16)):
            data += more
        time.sleep(delay_s)  # nothing waits for this: it only moves the place where the kill strikes
        os.kill(child, signal.SIGKILL)
        while more := pipe.read(1 << 16):
            data += more
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the writer ended by itself"
    assert len(data) % REPORT.size == 0
    reports = [REPORT.unpack_from(data, at) for at in range(REPORT.size, len(data), REPORT.size)]
    assert len(reports) >= reports_wanted - 1
    return reports


class Ledger:
    """The records acknowledged so far, and how much of each log has been compared with them."""

    def __init__(self):
        self.acknowledged = defaultdict(int)  # (round, partition, thread) -> numbers below it were
        self.ranges = [[] for _ in range(PARTITIONS)]  # (base, last, crc of the values)

    def take(self, round_, reports):
        for partition, thread, end, base, last, crc in reports:
            key = (round_, partition, thread)
            self.acknowledged[key] = max(self.acknowledged[key], end)
            self.ranges[partition].append((base, last, crc))

    def compare(self, partition, records, *, start=0):
        """Compare all records of a log from `start`, where a round began, to its end."""
        found, next_offset = defaultdict(int), start
        values = []
        for record in records:
            assert record.offset == next_offset, f"offset {record.offset} where {next_offset} should be"
            next_offset += 1
            round_, its_partition, thread, number = parsed(record.value)
            key = (round_, partition, thread)
            assert its_partition == partition, "a record of another partition"
            assert number == found[key], f"round {round_}, thread {thread}: {number} follows {found[key] - 1}"
            found[key] += 1
            values.append(record.value)
        for base, last, crc in self.ranges[partition]:
            if base >= start:
                assert last < next_offset, (
                    f"partition {partition}: {base} to {last} are lost, the log ends at {next_offset}"
                )
                assert crc == zlib.crc32(b"".join(values[base - start : last + 1 - start])), f"{base} to {last} changed"
        for key, amount in found.items():
            beyond = amount - self.acknowledged[key]
            assert beyond >= 0, f"{key}: {-beyond} acknowledged records are lost"
            assert beyond <= RECORDS_MAX, f"{key}: {beyond} records that nobody wrote"
        return next_offset


@pytest.mark.slow
def test_rounds_of_kill_9_lose_reorder_and_invent_nothing(tmp_path, torture):
    """Some children are killed while they open: what follows is the recovery of a recovery."""
    draw, ledger = torture.random("rounds of kill -9"), Ledger()
    verified = [0] * PARTITIONS
    rounds, round_ = torture.count(10, 100), 0
    while round_ < rounds or sum(ledger.acknowledged.values()) <= rounds * 100:  # some draws are short rounds only
        reports_wanted = draw.choice([0, 1, 1 + draw.randrange(60), 30 + draw.randrange(200)])
        reports = run_and_kill(tmp_path, round_, reports_wanted, draw.random() * 0.03)
        ledger.take(round_, reports)
        for partition in range(PARTITIONS):
            path = tmp_path / f"orders-{partition}"
            if not path.exists() or draw.random() < 0.5:
                continue  # the next child finds it as the kill left it
            with SegmentLog.open(path, config_of(round_, partition)) as log:
                assert log.recovery.damaged_from is None, log.recovery
                verified[partition] = ledger.compare(
                    partition, log.records(verified[partition]), start=verified[partition]
                )
        round_ += 1
    for partition in range(PARTITIONS):
        with SegmentLog.open(tmp_path / f"orders-{partition}") as log:
            assert log.recovery.damaged_from is None, log.recovery
            assert ledger.compare(partition, log.records(0)) == log.log_end_offset


def test_the_ledger_sees_what_it_is_there_for(tmp_path):
    """A record lost, exchanged, doubled, changed: each of them is found."""

    class Found:
        def __init__(self, offset, data):
            self.offset, self.value = offset, data

    values = [value(0, 0, 1, n) for n in range(5)]

    def compare(these, acknowledged=5):
        ledger = Ledger()
        whole = zlib.crc32(b"".join(values[:acknowledged]))
        ledger.take(0, [(0, 1, acknowledged, 0, acknowledged - 1, whole)])
        return ledger.compare(0, [Found(offset, data) for offset, data in enumerate(these)])

    assert compare(values) == 5
    assert compare(values, 3) == 5, "an append that was not answered yet may be there"
    for wrong in (
        values[:4],
        values[1:],
        [*values[:3], values[4], values[3]],
        [*values, values[4]],
        [*values[:4], values[4] + b"x"],
        [*values[:4], value(0, 1, 1, 4)],
        [*values[:4], value(0, 0, 2, 0)],
    ):
        with pytest.raises(AssertionError):
            compare(wrong)
    with pytest.raises(AssertionError, match="nobody wrote"):
        compare([value(0, 0, 1, n) for n in range(60)])
