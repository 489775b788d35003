"""The bytes of a batch's marks: what is written is read, and nothing else is believed."""

import dataclasses
import struct
import zlib

import pytest

from filtering import HighwaterMarks
from spark_jobs.batch_marks import (
    ADOPTED,
    BatchMarks,
    BatchMarksVersionUnsupported,
    CorruptBatchMarks,
    LogRange,
    MarksKey,
    SentBack,
)

MARKS = BatchMarks(
    "0b5a",
    17,
    (LogRange("orders", 0, 5, 9), LogRange("orders", 2, 0, 1)),
    {
        MarksKey("orders"): HighwaterMarks.from_columns([7, -7], [0, 3], [4, 2**62], [0, 2], advanced_ms=1_700_000),
        MarksKey("orders", 1): HighwaterMarks(),
    },
)
GOLDEN = (
    "50424d4b0000000100000072"
    "7b227175657279223a2230623561222c226261746368223a31372c2272616e676573223a5b5b226f7264657273222c302c352c395d2c"
    "5b226f7264657273222c322c302c315d5d2c226d61726b73223a5b5b226f7264657273222c302c38385d2c5b226f7264657273222c31"
    "2c32345d5d7d"
)


def test_what_is_written_is_read():
    assert BatchMarks.from_bytes(MARKS.to_bytes()) == MARKS
    empty = BatchMarks("q", ADOPTED)
    assert BatchMarks.from_bytes(empty.to_bytes()) == empty


def test_the_released_format_stays_as_it_is():
    data = MARKS.to_bytes()
    assert data[:12] == b"PBMK" + struct.pack(">II", 1, len(bytes.fromhex(GOLDEN)) - 12)
    assert data.hex().startswith(GOLDEN)
    assert data[-4:] == struct.pack(">I", zlib.crc32(data[:-4]))


def test_ranges_that_were_replaced_are_told_beside_what_releases_before_read():
    plain = BatchMarks("q", 3, (LogRange("t", 0, 5, 9, 7),))
    told = dataclasses.replace(plain, replaced=(LogRange("t", 0, 5, 8, 7),))
    assert BatchMarks.from_bytes(told.to_bytes()) == told
    assert told.to_bytes()[:8] == plain.to_bytes()[:8], "the same version"
    golden = b'{"query":"q","batch":3,"ranges":[["t",0,5,9,7]],"marks":[],"replaced":[["t",0,5,8,7]]}'
    assert told.to_bytes()[12:-4] == golden


def test_partitions_that_were_sent_back_are_told_in_a_version_that_releases_before_refuse():
    told = BatchMarks("q", 3, (LogRange("t", 0, 5, 9),), sent_back=(SentBack("t", 0, 2, 60), SentBack("t", 1, 1, 7, 5)))
    assert BatchMarks.from_bytes(told.to_bytes()) == told
    assert told.to_bytes()[4:8] == struct.pack(">I", 3)
    golden = b'{"query":"q","batch":3,"ranges":[["t",0,5,9,0]],"marks":[],"sent_back":[["t",0,2,60,0],["t",1,1,7,5]]}'
    assert told.to_bytes()[12:-4] == golden


def test_where_rows_stay_is_told_in_a_version_that_releases_before_refuse():
    told = BatchMarks("q", 3, (), sent_back=(SentBack("t", 0, 2, 60), SentBack("t", 1, 1, 9, 0, replace_until=5)))
    assert BatchMarks.from_bytes(told.to_bytes()) == told
    assert told.to_bytes()[4:8] == struct.pack(">I", 4)
    golden = b'"sent_back":[["t",0,2,60,0,9223372036854775807],["t",1,1,9,0,5]]}'
    assert told.to_bytes()[12:-4].endswith(golden)


def test_every_flipped_bit_and_every_cut_is_found():
    data = MARKS.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            with pytest.raises(CorruptBatchMarks):
                BatchMarks.from_bytes(bytes(bad))
    for size in range(len(data)):
        with pytest.raises(CorruptBatchMarks):
            BatchMarks.from_bytes(data[:size])


def _sealed(body: bytes) -> bytes:
    return body + struct.pack(">I", zlib.crc32(body))


def test_another_version_is_refused_by_number():
    body = bytearray(MARKS.to_bytes()[:-4])
    body[7] = 9
    with pytest.raises(BatchMarksVersionUnsupported, match="version 9") as refused:
        BatchMarks.from_bytes(_sealed(bytes(body)))
    assert (refused.value.version, refused.value.supported) == (9, 4)


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"query":"q","batch":-2,"ranges":[],"marks":[]}',
        b'{"query":"q","batch":0,"ranges":[[1]],"marks":[]}',
        b'{"query":"q","batch":0,"ranges":[],"marks":[["t",0,40]]}',
    ],
)
def test_a_right_checksum_over_nonsense_is_refused_too(head):
    with pytest.raises(CorruptBatchMarks):
        BatchMarks.from_bytes(_sealed(b"PBMK" + struct.pack(">II", 1, len(head)) + head))


@pytest.mark.parametrize(("query", "batch"), [("", 0), ("q", -2)])
def test_a_batch_of_nothing_is_refused_at_birth(query, batch):
    with pytest.raises(ValueError, match="not a batch of a query"):
        BatchMarks(query, batch)
