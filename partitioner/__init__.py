"""Partitioners that keep each source partition together: one destination partition for each (PID, source partition)."""

from partitioner.aiokafka import SourcePartitionPartitioner
from partitioner.errors import (
    BadPartitionerSetting,
    BreaksPrefixCondition,
    KeyNotStreamMetadata,
    NoSuchTopic,
    NotDelivered,
    OffsetNotAbove,
    PartitionerError,
    PartitionStopped,
    TopicCompacted,
    TopicShrunk,
)
from partitioner.source_partition import partition_for

__all__ = [
    "BadPartitionerSetting",
    "BreaksPrefixCondition",
    "KeyNotStreamMetadata",
    "NoSuchTopic",
    "NotDelivered",
    "OffsetNotAbove",
    "PartitionStopped",
    "PartitionerError",
    "SourcePartitionPartitioner",
    "TopicCompacted",
    "TopicShrunk",
    "partition_for",
]
