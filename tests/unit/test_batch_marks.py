"""The bytes of a batch's marks: what is written is read, and nothing else is believed."""

import dataclasses
import struct
import zlib

import pytest

from filtering import HighwaterMarks
from spark_jobs.batch_marks import (
    BatchMarks,
    LogRange,
    MarksKey,
    MarksStoreDamaged,
    RowCounts,
)

MARKS = BatchMarks(
    "0b5a",
    17,
    (LogRange("orders", 0, 5, 9), LogRange("orders", 2, 0, 1)),
    {
        MarksKey("orders"): HighwaterMarks.from_columns([7, -7], [0, 3], [4, 2**62], [0, 2], advanced_ms=1_700_000),
        MarksKey("orders", 1): HighwaterMarks(),
    },
    carrier="header",
)
HEAD = (
    b'{"query":"0b5a","batch":17,"first":0,"ranges":[["orders",0,5,9,0],["orders",2,0,1,0]],"replaced":[],"counts":null,'
    b'"carrier":"header","marks":[["orders",0,88],["orders",1,24]]}'
)


def test_what_is_written_is_read():
    assert BatchMarks.from_bytes(MARKS.to_bytes()) == MARKS
    empty = BatchMarks("q", -1)
    assert BatchMarks.from_bytes(empty.to_bytes()) == empty
    replaced = dataclasses.replace(
        MARKS, replaced=(LogRange("orders", 0, 5, 8, 7),), first=18, counts=RowCounts(9, 4, 3, 2, 1, None)
    )
    assert BatchMarks.from_bytes(replaced.to_bytes()) == replaced
    assert replaced.is_adopted


def test_the_format_stays_as_it_is():
    data = MARKS.to_bytes()
    assert data[:12] == b"PBMK" + struct.pack(">II", 6, len(HEAD))
    assert data[12 : 12 + len(HEAD)] == HEAD
    assert data[-4:] == struct.pack(">I", zlib.crc32(data[:-4]))


def test_every_flipped_bit_and_every_cut_is_found():
    data = MARKS.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            with pytest.raises(MarksStoreDamaged, match="corrupt"):
                BatchMarks.from_bytes(bytes(bad))
    for size in range(len(data)):
        with pytest.raises(MarksStoreDamaged, match="corrupt"):
            BatchMarks.from_bytes(data[:size])


def _sealed(body: bytes) -> bytes:
    return body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 7])
def test_another_version_is_refused_by_number(version):
    body = bytearray(MARKS.to_bytes()[:-4])
    body[7] = version
    with pytest.raises(MarksStoreDamaged, match=f"format version {version}, this release reads version 6"):
        BatchMarks.from_bytes(_sealed(bytes(body)))


EMPTY = b'{"query":"q","batch":%s,"first":%s,"ranges":%s,"replaced":[],"counts":null,"carrier":null,"marks":%s}'


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b"[]",
        b"{}",
        EMPTY % (b"-2", b"0", b"[]", b"[]"),
        EMPTY % (b"0", b"2", b"[]", b"[]"),
        EMPTY % (b"0", b"0", b"[[1]]", b"[]"),
        EMPTY % (b"0", b"0", b"[]", b'[["t",0,40]]'),
    ],
)
def test_a_right_checksum_over_nonsense_is_refused_too(head):
    with pytest.raises(MarksStoreDamaged, match=r"head|shortest marks"):
        BatchMarks.from_bytes(_sealed(b"PBMK" + struct.pack(">II", 6, len(head)) + head))


@pytest.mark.parametrize(("query", "batch"), [("", 0), ("q", -2)])
def test_a_batch_of_nothing_is_refused_at_birth(query, batch):
    with pytest.raises(ValueError, match="not a batch of a query"):
        BatchMarks(query, batch)
