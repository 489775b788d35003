"""Few records of any size: read in one go where they are plain, and left to the other decoders else."""

import pytest

from pushrep.records import CorruptRecordBatch, TimestampType, encode_batch
from pushrep.records.decoder import read_small_batch, scan
from pushrep.records.varint import varint

HEADER = encode_batch([b""], timestamps_ms=1).header


def record(*, key, value, offset=0, time=b"\0", length=None, tail=b"\0"):
    """A record with arbitrary fields: `key` and `value` include their length varint."""
    fields = b"\0" + time + varint(offset) + key + value + tail
    return varint(len(fields) if length is None else length) + fields


PLAIN = {"key": varint(-1), "value": varint(2) + b"ok"}


@pytest.mark.parametrize(
    "payload",
    [
        record(**{**PLAIN, "key": varint(-2)}),
        record(**{**PLAIN, "value": varint(-3)}),
        record(key=varint(-4), value=b"x", time=varint(3)),  # who went back so far would meet a value that fits
        record(**{**PLAIN, "value": varint(300) + b"ok"}),
        record(**{**PLAIN, "key": varint(3) + b"ok"}),
        record(**PLAIN, length=-8),
        record(**PLAIN, length=3),
        record(**PLAIN, length=300),
        record(**PLAIN, offset=1),
        record(**PLAIN, offset=-1),
        record(**PLAIN, time=b"\xff" * 9 + b"\x7f"),
        record(**PLAIN, time=varint((1 << 63) - 1)),
        record(**PLAIN, tail=b"\2"),
        record(**PLAIN, tail=b"\0\0"),
        record(**PLAIN) + b"\0",
        record(**PLAIN)[:-1],
        b"",
    ],
)
def test_what_is_wrong_is_left_to_who_refuses_it(payload):
    with pytest.raises(CorruptRecordBatch):
        scan(HEADER, payload)
    assert read_small_batch(HEADER, payload) is None


def test_offsets_that_do_not_ascend_are_left_to_who_refuses_them():
    header = HEADER._replace(record_count=2, last_offset_delta=5)
    for offsets, is_taken in (((0, 5), True), ((2, 2), False), ((3, 1), False), ((4, 6), False)):
        payload = b"".join(record(**PLAIN, offset=offset) for offset in offsets)
        found = read_small_batch(header, payload)
        assert (found is not None) == is_taken
        assert found is None or [one.offset for one in found] == list(offsets)


def test_the_time_of_the_append_is_that_of_the_header():
    header = HEADER._replace(attributes=8, max_timestamp_ms=5, base_timestamp_ms=(1 << 63) - 1)
    [found] = read_small_batch(header, record(**PLAIN, time=varint(700)))
    assert (found.timestamp_ms, found.timestamp_type) == (5, TimestampType.LOG_APPEND_TIME)
    assert read_small_batch(header._replace(attributes=0), record(**PLAIN, time=varint(700))) is None, "beyond 64 bits"


def test_headers_are_for_the_others():
    batch = encode_batch([b"a", b"bc"], headers=[(), [("name", b"value")]], timestamps_ms=1)
    assert read_small_batch(batch.header, batch.payload().tobytes()) is None
    assert [one.headers for one in batch.records()] == [(), (("name", b"value"),)]
