"""Which destination partition a record goes to."""

import numpy as np
import pytest

from filtering import StreamMetadata
from partitioner import (
    BadPartitionerSetting,
    PartitionerError,
    SourcePartitionPartitioner,
    TopicUnfit,
    partition_for,
)


def key(source_partition):
    return StreamMetadata(7, source_partition, 0).pack()


@pytest.mark.parametrize(
    ("source", "count", "expected"), [(0, 1, 0), (3, 3, 0), (4, 3, 1), (5, 8, 5), (2**31 - 1, 7, 1)]
)
def test_source_partition_modulo_destination(source, count, expected):
    assert partition_for(source, count) == expected


def test_with_more_destination_partitions_each_keeps_its_number():
    assert [partition_for(source, 100) for source in range(64)] == list(range(64))
    assert partition_for(np.int32(5), 3) == 2


@pytest.mark.parametrize(
    ("source", "count", "setting"),
    [(-1, 3, "source_partition"), (0, 0, "partition_count"), (0, -2, "partition_count"), (1.5, 3, "source_partition")],
)
def test_nonsense_is_refused_by_name(source, count, setting):
    with pytest.raises(BadPartitionerSetting) as refusal:
        partition_for(source, count)
    assert refusal.value.setting == setting
    assert isinstance(refusal.value, PartitionerError)


def test_the_callable_sorts_what_the_client_lists():
    place = SourcePartitionPartitioner()
    assert [place(key(source), [2, 0, 1], [2]) for source in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_count_seen_first_is_pinned_while_the_topic_grows():
    place = SourcePartitionPartitioner()
    assert place.partition_count is None
    assert place(key(3), [0, 1, 2], []) == 0
    assert place.partition_count == 3
    assert place(key(3), list(range(6)), []) == 0, "a pair must not move to a partition added later"


def test_a_given_count_is_used_from_the_first_record_on():
    place = SourcePartitionPartitioner(partition_count=3)
    assert place(key(4), list(range(6)), []) == 1


def test_a_topic_with_fewer_partitions_than_pinned_is_another_topic():
    with pytest.raises(TopicUnfit, match="partition_count=6 is fixed but the topic has 3"):
        SourcePartitionPartitioner(partition_count=6)(key(0), [0, 1, 2], [])


@pytest.mark.parametrize("other", [None, b"", b"business key", b"\xff" * 20])
def test_strict_refuses_a_key_that_is_not_metadata(other):
    with pytest.raises(BadPartitionerSetting, match="fallback"):
        SourcePartitionPartitioner()(other, [0, 1], [0, 1])


@pytest.mark.parametrize("other", ["customer 7", 7, ("a",)])
def test_the_fallback_refuses_what_is_no_bytes_by_name(other):
    with pytest.raises(BadPartitionerSetting, match="bytes or None: serialize it"):
        SourcePartitionPartitioner(fallback="default")(other, [0, 1], [])


def test_the_fallback_takes_other_keys_and_leaves_metadata_alone():
    place = SourcePartitionPartitioner(fallback="default")
    assert place(key(4), [0, 1, 2], [0]) == 1
    assert place(None, [0, 1, 2], [2]) == 2
    assert place(None, [0, 1, 2], []) in {0, 1, 2}
    assert place(b"business key", [2, 1, 0], [0]) == place(b"business key", [0, 1, 2], [2])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fallback": "random"}, "fallback"),
        ({"partition_count": 0}, "partition_count"),
        ({"partition_count": "3"}, "partition_count"),
    ],
)
def test_settings_are_checked_at_birth(settings, name):
    with pytest.raises(BadPartitionerSetting) as refusal:
        SourcePartitionPartitioner(**settings)
    assert refusal.value.setting == name


class Listed:
    """What kafka-python tells of its topics."""

    def partitions_for_topic(self, topic):
        return {"orders": {0, 1, 2}, "wide": set(range(6))}.get(topic)

    def available_partitions_for_topic(self, topic):
        return {"orders": {2}}.get(topic)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # kafka-python's own, while it is imported
def test_for_kafka_python_each_topic_has_its_own_count_and_one_that_is_not_there_is_named():
    from partitioner.kafka_python import SourcePartitionPartitioner as KafkaPythonPartitioner

    place = KafkaPythonPartitioner("default", partition_counts={"wide": 4})

    def of(topic, packed):
        return place.partition(topic, None, packed, None, None, Listed())

    assert place.partition_counts == {"wide": 4}
    assert [of("wide", key(source)) for source in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [of("orders", key(source)) for source in range(4)] == [0, 1, 2, 0]
    assert place.partition_counts == {"wide": 4, "orders": 3}
    assert {of("orders", None) for _ in range(9)} == {2}, "without a key: one that has a leader"
    assert of("wide", None) in range(6)
    with pytest.raises(TopicUnfit, match="missing"):
        of("missing", key(0))
    with pytest.raises(BadPartitionerSetting):
        KafkaPythonPartitioner("murmur")
