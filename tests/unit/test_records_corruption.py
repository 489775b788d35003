"""The corruption table: what is wrong with a record's bytes, by name, and that both ways of reading refuse it."""

import pytest

from pushrep.records import CorruptRecordBatch, RecordTooLarge, encode_batch
from pushrep.records.columns import columns_by_arrays
from pushrep.records.decoder import scan
from pushrep.records.header import crc32c
from pushrep.records.varint import varint

FAR = (1 << 31) - 1


def record(*, time=b"\0", offset=b"\0", key=b"\1", value=b"\2v", headers=b"\0", more=b""):
    body = b"\0" + time + offset + key + value + headers + more
    return varint(len(body)) + body


def header_field(name=b"\2n", value=b"\2v"):
    return b"\2" + name + value


GOOD = record()
TABLE = {
    "length of nothing": b"\0" + GOOD,
    "negative length": b"\1" + GOOD,
    "negative length after a good record": GOOD + b"\x0d" + GOOD,
    "length past the end": varint(400) + GOOD[1:],
    "length of six bytes": b"\xff" * 6 + GOOD,
    "length cut off": b"\xff",
    "bytes behind the last record": GOOD + b"\0\0\0\0\0\0\0",
    "bytes inside a record behind its fields": record(more=b"\0"),
    "record ends after its attributes": varint(1) + b"\0" + bytes(6),
    "record ends inside its value": varint(7) + record(value=varint(20) + b"v" * 20)[1:],
    "time of eleven bytes": record(time=b"\xff" * 10 + b"\0"),
    "time of more than 64 bits": record(time=b"\xff" * 9 + b"\x7f"),
    "time beyond 64 bits with its base": record(time=varint((1 << 63) - 1)),
    "offset before the base": record(offset=varint(-1)),
    "offset past the last": record(offset=varint(9)),
    "offset of more than 32 bits": record(offset=b"\xff\xff\xff\xff\x7f"),
    "offset of six bytes": record(offset=b"\xff\xff\xff\xff\xff\0"),
    "key of length -2": record(key=varint(-2)),
    "key longer than the record": record(key=varint(50) + b"k"),
    "key as long as memory": record(key=varint(FAR) + b"k"),
    "value of length -2": record(value=varint(-2)),
    "value longer than the record": record(value=varint(50) + b"v"),
    "negative number of headers": record(headers=varint(-1)),
    "more headers than bytes": record(headers=varint(FAR) + b"ab"),
    "header with a null name": record(headers=header_field(name=b"\1")),
    "header name longer than the record": record(headers=header_field(name=varint(60) + b"n")),
    "header value of length -2": record(headers=header_field(value=varint(-2))),
    "header value longer than the record": record(headers=header_field(value=varint(60) + b"v")),
    "record ends inside its headers": record(headers=b"\4" + b"\2n\2v"),
    "record ends inside a header's name length": record(headers=b"\2\x80\x80"),
    "fortieth header has a null name": record(headers=varint(40) + b"\0\1" * 39 + b"\1\1"),
    "fortieth header is missing": record(headers=varint(40) + b"\0\1" * 38 + b"\2n\2v"),
    "fortieth header is longer than the record": record(headers=varint(40) + b"\0\1" * 39 + b"\0\x7e"),
    "fortieth header's length is cut off": record(headers=varint(40) + b"\0\1" * 39 + b"\0\x80"),
}


def header_of(payload, count):
    header = encode_batch([b"v"], timestamps_ms=1_700_000_000_000).header
    return header._replace(record_count=count, last_offset_delta=max(count - 1, 2), batch_length=49 + len(payload))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("read", [scan, lambda h, p: columns_by_arrays(h, memoryview(p))])
def test_it_is_refused(read, name):
    payload = TABLE[name]
    count = 2 if name.endswith("after a good record") else 1
    with pytest.raises(CorruptRecordBatch) as caught:
        read(header_of(payload, count), payload)
    assert caught.value.reason


@pytest.mark.parametrize("read", [scan, lambda h, p: columns_by_arrays(h, memoryview(p))])
def test_the_pieces_of_the_table_are_good_where_they_are_not_broken(read):
    good = GOOD + record(offset=b"\2", headers=header_field(), time=varint(-5), key=b"\0") + record(offset=b"\4")
    read(header_of(good, 3), good)


def test_the_checksum_of_nothing_and_of_a_middle():
    # RFC 3720 B.4: 32 zero bytes.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"xx" + bytes(32) + b"yy", 2, 34) == 0x8A9136AA
    assert crc32c(b"") == crc32c(b"abc", 3) == 0


def test_a_batch_beyond_its_length_field_is_too_large(monkeypatch):
    monkeypatch.setattr("pushrep.records.encoder._BATCH_BYTES_LIMIT", 1_000)
    with pytest.raises(RecordTooLarge) as caught:
        encode_batch([bytes(2_000)], timestamps_ms=1)
    assert (caught.value.size, caught.value.limit) == (2_070, 1_000)


def test_times_have_to_be_integers():
    with pytest.raises(ValueError, match="integers of 64 bits"):
        encode_batch([b"v"], timestamps_ms=[1.5])
    with pytest.raises(ValueError, match="timestamps_ms"):
        encode_batch([b"v"], timestamps_ms=[1 << 70])
