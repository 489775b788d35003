"""outbox.json, byte by byte."""

import re
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import CorruptFile
from pushrep.outbox.identity import FILE_NAME, OutboxIdentity, read_identity, write_identity

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "formats" / "outbox-json.md"
IDENTITY = OutboxIdentity(
    outbox_id="7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa", producer="billing", topic="orders", partitions=4, carrier="key"
)


def golden():
    return re.search(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1].encode()


@pytest.fixture
def read(tmp_path):
    """The identity in these bytes."""

    def of(data):
        (tmp_path / FILE_NAME).write_bytes(data)
        return read_identity(REAL_FILESYSTEM, tmp_path)

    return of


def test_the_documented_bytes_are_written_and_read(tmp_path, read):
    write_identity(REAL_FILESYSTEM, tmp_path, IDENTITY)
    assert (tmp_path / FILE_NAME).read_bytes() == golden()
    assert read(golden()) == IDENTITY
    assert IDENTITY.pid == read(golden()).pid


def test_every_flipped_bit_and_every_cut_is_noticed(read):
    data = golden()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = read(bytes(flipped))
        except CorruptFile:
            continue
        assert found == IDENTITY, f"bit {bit} went unnoticed"  # white space
    for size in range(len(data) - 2):
        with pytest.raises(CorruptFile):
            read(data[:size])
