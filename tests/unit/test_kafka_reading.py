"""Sealed batches in memory that is used again: the log's own bytes, never two batches in one place."""

import numpy as np
import pytest

from filtering import pack_keys
from pushrep.kafka.pipeline import Pipeline
from pushrep.kafka.source import BUFFER_BYTES, ReusedMemory, SealedReader, ShippedPartition
from pushrep.log import CorruptBatch, Durability, LogConfig, LogPoisoned, SegmentLog
from pushrep.records import BatchHeader, RecordBatch, encode_batch

LARGE = 900_000


@pytest.fixture
def log(tmp_path):
    with SegmentLog.open(
        tmp_path / "orders-0", LogConfig(preallocate_bytes=0, segment_bytes=4 << 20, batch_bytes_max=3 << 20)
    ) as opened:
        yield opened


def fill(log, count, size=LARGE):
    for number in range(count):
        key = pack_keys(7, 0, log.log_end_offset, 1)
        value = bytes([number]) * (size - 1) + b"."
        log.append(encode_batch([value], keys=key, timestamps_ms=1000), durability=Durability.FLUSHED)
    return [bytes(batch.data) for batch in log.batches(0)]


def reader(log):
    return SealedReader(log.slices(), ReusedMemory())


class CutAfterLooking:
    """Slices of a log whose file is cut to `size` between the look at the headers and the read."""

    def __init__(self, log, size):
        self._slices, self._file, self._size = log.slices(), log.path / "00000000000000000000.log", size

    def read(self, offset, limit, max_bytes):
        found = self._slices.read(offset, limit, max_bytes)
        with self._file.open("r+b") as file:
            file.truncate(self._size)
        return found


@pytest.mark.parametrize("size", [10, 5000, 300_000, LARGE])
def test_the_same_batches_as_by_the_log(log, size):
    wanted = fill(log, 12, size)
    found, ours = [], reader(log)
    while len(found) < len(wanted):
        batches = ours.read(len(found), log.stable_offset)
        assert batches
        found += [bytes(batch.data) for batch in batches]
    assert found == wanted


def test_memory_that_somebody_looks_into_is_not_written_to(log):
    """More batches than buffers: those without one get bytes of their own."""
    wanted = fill(log, 20)
    ours = reader(log)
    held = [batch for offset in range(20) for batch in ours.read(offset, 20)]
    assert [bytes(batch.data) for batch in held] == wanted
    assert sum(not batch.data.readonly for batch in held) == 16
    del held[3]
    again = ours.read(3, 20)
    assert not again[0].data.readonly
    held.insert(3, *again)
    assert [bytes(batch.data) for batch in held] == wanted


def test_a_file_that_ends_early_brings_back_nothing_of_another_log(tmp_path):
    """After the bytes read, the buffer has those of an earlier read: a whole batch with exactly the expected offset."""
    memory = ReusedMemory()
    with SegmentLog.open(tmp_path / "orders-1", LogConfig(preallocate_bytes=0, batch_bytes_max=3 << 20)) as other:
        fill(other, 2, 300_000)
        assert len(SealedReader(other.slices(), memory).read(0, 2)) == 2
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0, batch_bytes_max=3 << 20))
    first, _ = fill(log, 2, 300_000)
    cut = SealedReader(CutAfterLooking(log, len(first)), memory)
    assert [bytes(batch.data) for batch in cut.read(0, 2)] == [first]
    with pytest.raises(LogPoisoned, match="another program"):
        log.close()


def test_a_buffer_is_used_again_and_begins_with_a_page():
    memory = ReusedMemory()
    places = set()
    for _ in range(5):
        view = memory.acquire()
        assert len(view) == BUFFER_BYTES
        view[:3] = b"abc"
        places.add(np.frombuffer(view, np.uint8).ctypes.data)
        del view
    [place] = places
    assert place % 4096 == 0


def test_what_is_patched_in_place_is_the_sealed_batch_under_its_producer(log):
    """Contract: "the sealed batches as they are ... patched into the batch header and the CRC redone"."""
    wanted = fill(log, 2)
    source = ShippedPartition(log, 0, 0)
    source.poll()
    pipeline = Pipeline(0)
    pipeline.begin(4711, 2)
    for number, sealed in enumerate(wanted):
        sent = source.next_piece(1 << 20)
        pipeline.add(sent)
        assert bytes(sent.data) == RecordBatch(sealed).with_producer(4711, 2, number)
        assert sent.log_crc == BatchHeader.parse(sealed).crc
    assert [bytes(batch.data) for batch in log.batches(0)] == wanted, "the log keeps what it has"


def test_under_a_new_producer_nothing_is_written_where_an_old_connection_may_still_read(log):
    """A TLS connection keeps what it has not sent: sent again by another the bytes stay, by a new id they move."""
    wanted = fill(log, 2)
    source, pipeline = ShippedPartition(log, 0, 0), Pipeline(0)
    source.poll()
    pipeline.begin(4711, 2)
    sent = [source.next_piece(1 << 20) for _ in wanted]
    for one in sent:
        pipeline.add(one)
    backlog = [one.data for one in sent]
    old = [bytes(data) for data in backlog]
    pipeline.reopen()
    assert pipeline.waiting() is sent[0]
    assert [bytes(one.data) for one in sent] == old, "the same bytes again"
    del sent, one
    pipeline.begin(4712, 0)
    source.rewind()
    for number, sealed in enumerate(wanted):
        again = source.next_piece(1 << 20)
        pipeline.add(again)
        assert not again.data.readonly, "it is in memory that is used again"
        assert bytes(again.data) == RecordBatch(sealed).with_producer(4712, 0, number)
    assert [bytes(data) for data in backlog] == old


def test_a_batch_larger_than_a_buffer_is_read_by_the_log(log):
    [wanted] = fill(log, 1, 2 * BUFFER_BYTES)
    assert reader(log).read(0, 1) == []
    source = ShippedPartition(log, 0, 0)
    source.poll()
    assert bytes(source.next_piece(4 * BUFFER_BYTES).batch.data) == wanted


@pytest.mark.parametrize("size", [100, LARGE])
def test_what_the_disk_broke_is_not_read_and_the_log_names_it(log, size):
    """The batch before it is sent. The CRC is computed again for the topic, so it is checked before."""
    fill(log, 2, size)
    file = log.path / "00000000000000000000.log"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    source = ShippedPartition(log, 0, 0)
    source.poll()
    assert source.next_piece(1 << 20).end == 1
    with pytest.raises(CorruptBatch):
        source.next_piece(1 << 20)
