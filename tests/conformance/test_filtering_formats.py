"""Golden bytes of the formats, and a second reader and writer that is written from docs/internals/formats/ alone."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from filtering import HighwaterMarks, ReplayFilter, StreamMetadata

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "internals" / "formats"


def plain_marks():
    """Extreme and ordinary pairs, known and unknown destinations and times."""
    return HighwaterMarks.from_columns(
        [-7334467018974291969, 2847492858326323121, 2847492858326323121, -(2**63), 2**63 - 1],
        [1, 0, 7, 0, 2**31 - 1],
        [0, 336_775, 41, 2**63 - 1, 5],
        [1, 0, -1, 3, 2**31 - 1],
        advanced_ms=[1_700_000_000_000, 1_700_000_000_001, -1, 0, 2**63 - 1],
    )


def window_marks():
    """A window of 12: holes, a mark near 0 whose bits end early, a fresh pair."""
    replay_filter = ReplayFilter(window=12)
    for offset in (100, 105, 103, 109, 90):
        replay_filter.admit(StreamMetadata(-5, 0, offset).pack(), 2)
    for offset in (0, 3, 1):
        replay_filter.admit(StreamMetadata(-5, 1, offset).pack(), 3)
    replay_filter.admit(StreamMetadata(6, 0, 50).pack())
    return replay_filter.marks(1_700_000_000_000)


GOLDEN = {"marks-v1.bin": plain_marks, "marks-v1-window12.bin": window_marks}


@pytest.mark.parametrize("name", GOLDEN)
def test_marks_have_the_released_bytes(name):
    golden = (HERE / "golden" / name).read_bytes()
    assert GOLDEN[name]().to_bytes() == golden, f"{name} is released: a change of bytes is a new version"
    assert HighwaterMarks.from_bytes(golden) == GOLDEN[name]()


def written_by_the_book(marks):
    """docs/internals/formats/marks.md, field by field."""
    width = -(-marks.window // 8)
    body = struct.pack(">4sIIQ", b"HWMK", 1, marks.window, len(marks))
    for (pid, partition), entry in sorted(marks.items()):
        destination = -1 if entry.destination_partition is None else entry.destination_partition
        advanced = -1 if entry.advanced_ms is None else entry.advanced_ms
        body += struct.pack(f">qiqiq{width}s", pid, partition, entry.offset, destination, advanced, entry.bitmap)
    return body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_documentation_is_enough_to_write_marks(name):
    assert written_by_the_book(GOLDEN[name]()) == (HERE / "golden" / name).read_bytes()


def test_the_example_in_the_documentation_of_marks_is_true():
    text = (DOCS / "marks.md").read_text()
    (block,) = re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    example = bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines()))
    marks = HighwaterMarks.from_bytes(example)
    assert marks == HighwaterMarks.from_columns(
        [-7334467018974291969],
        [1],
        [9],
        [1],
        advanced_ms=1_700_000_000_000,
        window=8,
        bitmaps=np.array([[0b101]], np.uint8),
    )


def test_the_example_in_the_documentation_of_the_key_is_true():
    text = (DOCS / "stream-metadata-key.md").read_text()
    (block,) = re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    example = bytes.fromhex("".join(line.split("#")[0] for line in block.splitlines()))
    assert StreamMetadata.unpack(example) == StreamMetadata(-7334467018974291969, 1, 0)
