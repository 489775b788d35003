"""PIDs: published vectors, names that differ, names that would be one PID."""

import pytest

from filtering import BadFilterSetting, FilteringError, producer_id, sqe_producer_id
from filtering.murmur import murmur_hash2_64a
from filtering.producer_id import ProducerNames

NAME = {"application": "billing", "stream": "orders", "source": "src", "destination": "dst"}


def test_the_hash_gives_the_published_vectors():
    assert murmur_hash2_64a(b"ABCDEF") == 0x0F6106105304A543
    assert murmur_hash2_64a(b"") == -7207201254813729732
    assert sqe_producer_id("test-topo", "test-stream", "brokerspath") == -7334467018974291969
    assert producer_id(**NAME) == 2847492858326323121


def test_the_hash_reads_blocks_little_endian_and_every_length_of_tail_differs():
    data = bytes(range(1, 25))
    assert len({murmur_hash2_64a(data[:length]) for length in range(25)}) == 25
    assert murmur_hash2_64a(data, seed=0) != murmur_hash2_64a(data)


@pytest.mark.parametrize(
    "other", [{"application": "b"}, {"stream": "o"}, {"source": "s"}, {"destination": "d"}, {"epoch": 1}, {"fanout": 2}]
)
def test_every_part_of_the_name_counts(other):
    assert producer_id(**NAME) != producer_id(**{**NAME, **other})


def test_parts_cannot_flow_into_one_another():
    first = {**NAME, "application": "ab", "stream": "c"}
    second = {**NAME, "application": "a", "stream": "bc"}
    assert producer_id(**first) != producer_id(**second)


def test_the_same_name_may_be_asked_again():
    assert producer_id(**NAME) == producer_id(**NAME)


def test_two_names_of_one_pid_are_refused_by_both_names():
    sqe_producer_id("ambiguous-ab", "c")
    with pytest.raises(FilteringError) as refusal:
        sqe_producer_id("ambiguous-a", "bc")
    for name in (("sqe", "ambiguous-ab", "c", ""), ("sqe", "ambiguous-a", "bc", "")):
        assert str(name) in str(refusal.value)


def test_a_registry_of_its_own_knows_only_its_own_names():
    names = ProducerNames()
    assert names.claim(7, ("a",)) == 7
    assert names.claim(7, ("a",)) == 7
    with pytest.raises(FilteringError, match="PID 7 belongs to"):
        names.claim(7, ("b",))
    assert ProducerNames().claim(7, ("b",)) == 7


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"application": None}, "application"),
        ({"stream": "\ud800"}, "stream"),
        ({"epoch": -1}, "epoch"),
        ({"fanout": 0}, "fanout"),
        ({"epoch": 1.5}, "epoch"),
    ],
)
def test_a_part_that_cannot_be_hashed_is_named(part, field):
    with pytest.raises(BadFilterSetting) as refusal:
        producer_id(**{**NAME, **part})
    assert refusal.value.setting == field
    assert f"{field}=" in str(refusal.value)
