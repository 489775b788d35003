"""outbox.json, byte by byte; and which replicas an opening may name."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep.election.grants import Grant, Member
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import CorruptFile
from pushrep.outbox.errors import OutboxDiffers
from pushrep.outbox.identity import FILE_NAME, OutboxIdentity, read_identity, settle_identity, write_identity
from pushrep.replicate.election_state import ElectionState

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


# -- which replicas an opening may name --------------------------------------------------------------------------------

REPLICAS = ((1, "a:1"), (2, "b:1"))


@pytest.fixture
def settle(tmp_path):
    """The identity of an opening with these replicas, and what is on disk then."""
    held = SimpleNamespace(filesystem=REAL_FILESYSTEM, path=tmp_path)

    def with_(addresses, lead=None, **known):
        write_identity(REAL_FILESYSTEM, tmp_path, replace(IDENTITY, **known))
        wanted = replace(IDENTITY, replicas=tuple(enumerate(addresses, start=1)), min_insync_replicas=2)
        settled, is_new = settle_identity(held, wanted, None, lead)
        assert not is_new
        assert read_identity(REAL_FILESYSTEM, tmp_path) == settled
        return settled

    return with_


def test_replicas_are_kept_from_when_they_are_first_given_and_in_any_order(settle):
    assert settle(["a:1", "b:1"]).replicas == REPLICAS
    assert settle(["b:1", "a:1"], replicas=REPLICAS).replicas == REPLICAS
    for others in (["a:1"], ["a:1", "c:1"], ["a:1", "b:1", "c:1"], []):
        with pytest.raises(OutboxDiffers, match="replicas"):
            settle(others, replicas=REPLICAS)


@pytest.mark.parametrize(
    ("granted", "named", "settled"),
    [
        (["", "b:1"], ["a:1", "b:1"], ["a:1", "b:1"]),  # whose leader did not listen gets the address that is new
        (["", "b:1"], ["b:1"], ["", "b:1"]),
        (["a:1", "b:1"], ["b:1", "a:1"], ["a:1", "b:1"]),
        (["a:1", "b:1"], ["a:1"], None),
        (["a:1", "b:1"], ["a:1", "b:1", "c:1"], None),
        (["", ""], ["a:1", "b:1"], None),  # nobody knows which is which
        (["", ""], ["a:1"], ["a:1", ""]),
        (["", "b:1"], ["a:1", "b:1", "c:1"], None),
    ],
)
def test_a_grant_names_the_replicas_and_the_opening_at_most_one_that_it_does_not_know(settle, granted, named, settled):
    members = (Member(0), *(Member(index, address) for index, address in enumerate(granted, start=1)))
    grant = Grant(
        outbox_id=UUID(IDENTITY.outbox_id), epoch=256, leader=0, members=members, min_insync_replicas=2,
        members_epoch=256, pid_epoch=3, topic_id=UUID(int=7), topic="orders", partitions=4, carrier="key",
    )  # fmt: skip
    lead = ElectionState(member=0, grant=grant)
    if settled is None:
        with pytest.raises(OutboxDiffers, match="replicas"):
            settle(named, lead, replicas=REPLICAS)
        return
    for pid_epoch in (1, 5):
        found = settle(named, lead, replicas=REPLICAS, pid_epoch=pid_epoch)
        assert [address for _, address in found.replicas] == settled
        assert found.pid_epoch == max(pid_epoch, 3), "no epoch is used twice, whoever knows it"
