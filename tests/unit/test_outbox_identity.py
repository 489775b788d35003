"""outbox.json, byte by byte."""

import re
from pathlib import Path

import pytest

from pushrep.outbox import CorruptOutboxFile
from pushrep.outbox.identity import OutboxIdentity, decode, encode

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "formats" / "outbox-json.md"
IDENTITY = OutboxIdentity(
    outbox_id="7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa", producer="billing", topic="orders", partitions=4, carrier="key"
)
PATH = Path("outbox.json")


def golden():
    return re.search(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1].encode()


def test_the_documented_bytes_are_written_and_read():
    assert encode(IDENTITY) == golden()
    assert decode(PATH, golden()) == IDENTITY
    assert IDENTITY.pid == decode(PATH, golden()).pid


def test_every_flipped_bit_and_every_cut_is_noticed():
    data = golden()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(PATH, bytes(flipped))
        except CorruptOutboxFile:
            continue
        assert found == IDENTITY, f"bit {bit} went unnoticed"  # white space
    for size in range(len(data) - 2):
        with pytest.raises(CorruptOutboxFile):
            decode(PATH, data[:size])
