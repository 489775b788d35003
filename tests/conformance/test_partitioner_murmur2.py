"""Kafka's default partitioner as aiokafka and kafka-python compute it: two oracles for ours."""

import warnings
from importlib import import_module

import aiokafka.partitioner
import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering.murmur import murmur2
from partitioner import SourcePartitionPartitioner

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python reads its own files by a deprecated call
    kafka_python = import_module("kafka.partitioner.default")


@given(st.binary(max_size=70))
def test_the_hash_agrees_with_both_clients(key):
    assert murmur2(key) == aiokafka.partitioner.murmur2(key) & 0xFFFFFFFF
    assert murmur2(key) == kafka_python.murmur2(key) & 0xFFFFFFFF


@given(st.binary(max_size=40).filter(lambda key: len(key) != 20), st.integers(1, 50))
def test_the_fallback_places_keys_as_aiokafka_does(key, count):
    theirs = aiokafka.partitioner.DefaultPartitioner()(key, list(range(count)), [])
    assert SourcePartitionPartitioner(fallback="default")(key, list(reversed(range(count))), []) == theirs


# Kafka's own UtilsTest.testMurmur2 publishes these.
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_agrees_with_kafkas_published_values(key, expected):
    assert murmur2(key) == expected & 0xFFFFFFFF
