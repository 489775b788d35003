"""Partitioners that keep each source partition together: one destination partition for each (PID, source partition)."""

from partitioner.aiokafka import SourcePartitionPartitioner
from partitioner.errors import BadPartitionerSetting, KeyNotStreamMetadata, PartitionerError, TopicShrunk
from partitioner.source_partition import partition_for

__all__ = [
    "BadPartitionerSetting",
    "KeyNotStreamMetadata",
    "PartitionerError",
    "SourcePartitionPartitioner",
    "TopicShrunk",
    "partition_for",
]
