"""Any bit of an index may rot: it is a hint, so every reader gives every record, and every opening opens (O7)."""

from contextlib import contextmanager
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.directory_files import segment_path, write_partition_metadata
from pushrep.log.segment_repair import rebuild_indexes
from pushrep.log.verify import verify_log
from pushrep.records import encode_batch
from tests.readers.small_logs import CONFIG, make_log
from tests.readers.ways import WAYS, fault_of

ENTRY_BYTES = {".index": 8, ".timeindex": 12}
BY_INDEX = [way for way in WAYS if way.name.startswith(("reader", "writer", "directory"))]


def index_bits(log, torture):
    """(file, bit): all of them; in the short form the sign of every number, the lowest bits, and some between."""
    chosen = torture.random("index bits")
    for path in sorted(log.path.glob("*.*index")):
        size, entry = path.stat().st_size, ENTRY_BYTES[path.suffix]
        assert size % entry == 0
        bits = range(8 * size)
        if not torture.is_long:
            signs = [8 * (start + column) for start in range(0, size, entry) for column in (0, entry - 4)]
            lowest = [8 * (start + column) - 1 for start in range(0, size, entry) for column in (entry - 4, entry)]
            bits = sorted({*signs, *lowest, *chosen.sample(bits, min(8, len(bits)))})
        yield from ((path, bit) for bit in bits)


@contextmanager
def flipped(path, bit):
    whole = path.read_bytes()
    data = bytearray(whole)
    data[bit // 8] ^= 0x80 >> bit % 8
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("way", BY_INDEX, ids=str)
def test_o7_a_rotten_bit_of_an_index_costs_no_read(way, tmp_path, torture):
    log = make_log(tmp_path / "logs")
    faults, number = [], 0
    with way.open(log, tmp_path) as read:
        for number, (path, bit) in enumerate(index_bits(log, torture)):
            with flipped(path, bit):
                for found in read([number % log.end]):
                    fault = fault_of(log, found) or (repr(found.error) if found.error is not None else None)
                    faults += [(path.name, bit, fault)] if fault else []
    assert number > 50
    assert faults[:10] == []


EQUAL, FALLING = [100] * 6, [100, 105, 103, 105, 99, 107]


@pytest.mark.parametrize("times", [EQUAL, FALLING], ids=["equal", "falling"])
def test_o7_a_rotten_bit_of_a_time_index_skips_no_record(times, tmp_path, torture):
    """Its entry may then lead to a later batch that has the very same time."""
    path = tmp_path / "logs" / "orders-0"
    path.mkdir(parents=True)
    write_partition_metadata(path, UUID(int=1), REAL_FILESYSTEM)
    batches = [encode_batch([b"v"] * 2, timestamps_ms=time, base_offset=2 * n) for n, time in enumerate(times)]
    segment_path(path, 0).write_bytes(b"".join(bytes(batch.data) for batch in batches))
    config = LogConfig(index_interval_bytes=0)
    with SegmentLog.open(path, config):
        pass
    rebuild_indexes(REAL_FILESYSTEM, path, None, config)
    wanted = {
        asked: next((2 * n for n, time in enumerate(times) if time >= asked), None)
        for asked in range(min(times) - 1, max(times) + 2)
    }
    index = segment_path(path, 0, ".timeindex")
    entries = index.stat().st_size // 12
    assert entries
    # The time's low byte and the offset's: other bits lead out of so small a file.
    low = [8 * (12 * entry + byte) + bit for entry in range(entries) for byte in (7, 11) for bit in range(8)]
    with SegmentLog.open_reader(path) as reader:
        for bit in range(8 * index.stat().st_size) if torture.is_long else low:
            with flipped(index, bit):
                assert {asked: reader.offset_for_timestamp(asked) for asked in wanted} == wanted, bit


@pytest.mark.parametrize("is_clean", [True, False])
def test_o7_a_rotten_bit_of_an_index_costs_no_opening(is_clean, tmp_path, torture):
    """And after a reader found it, the next close rebuilds the index."""
    log = make_log(tmp_path / "logs")
    marker = log.path.parent / ".pushrep_cleanshutdown"
    met = 0
    for path, bit in index_bits(log, torture):
        if not is_clean:
            marker.unlink(missing_ok=True)
        with flipped(path, bit):
            with SegmentLog.open(log.path, CONFIG) as opened:
                assert opened.damaged_from is None, (path.name, bit)
                assert [record.offset for record in opened.records(0)] == [record.offset for record in log.records]
                for record in log.records:
                    assert next(opened.records(record.offset)).offset == record.offset
                    opened.offset_for_timestamp(record.timestamp_ms)
                is_met = opened.ignored_index_entries > 0
            met += is_met
            if is_met:
                assert not [one for one in verify_log(log.path).findings if one.file == path.name], (path.name, bit)
    assert met > 20
