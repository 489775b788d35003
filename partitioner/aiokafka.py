"""For aiokafka: `AIOKafkaProducer(..., partitioner=SourcePartitionPartitioner(partition_count=4))`.

    key ─ StreamMetadata ─▶ source partition ─ mod partition_count ─▶ the destination's partition of that number

A plugin only places records. The prefix condition, on which the replay filter rests, stays the user's: what each
attempt writes for a pair must reach the log in order and without holes. aiokafka drops a batch whose leader stays
unknown past its timeout, idempotent or not, and goes on with the next: catch that failure and send nothing more to
that partition until the failed record is through.
"""

import random
from collections.abc import Sequence
from typing import Literal

from filtering import NotStreamMetadata, StreamMetadata
from partitioner.errors import BadPartitionerSetting, KeyNotStreamMetadata, TopicShrunk
from partitioner.source_partition import check_partition_count, default_partition, partition_for


class SourcePartitionPartitioner:
    """A callable `(key, all_partitions, available) -> partition`; one for each topic, since it fixes the topic's count.

    `partition_count` is how many partitions are used. Without it the number at the first record is used for this
    object's life: keep it (`.partition_count`) with the producer's state and pass it after a restart. Partitions
    added later are not used; to use them, raise the count together with the PID epoch.
    `fallback="default"` places keys that are not stream metadata as Kafka's default partitioner does (murmur2; null
    goes to any available partition); without it such a key raises KeyNotStreamMetadata.
    Raises BadPartitionerSetting, and TopicShrunk when the topic has fewer partitions than are used.
    """

    def __init__(self, fallback: Literal["default"] | None = None, partition_count: int | None = None) -> None:
        if fallback not in (None, "default"):
            raise BadPartitionerSetting("fallback", fallback, 'None or "default"')
        check_partition_count(partition_count)
        self._fallback, self._partition_count = fallback, partition_count

    @property
    def partition_count(self) -> int | None:
        """How many partitions are used; None before the first record, if none was given."""
        return self._partition_count

    def __call__(self, key: bytes | None, all_partitions: Sequence[int], available: Sequence[int]) -> int:
        # The client lists a set, so the order it comes in means nothing.
        partitions = sorted(all_partitions)
        try:
            source_partition = StreamMetadata.unpack(key).partition
        except NotStreamMetadata as refusal:
            if self._fallback is None:
                raise KeyNotStreamMetadata(refusal.why) from refusal
            if key is None:
                return random.choice(list(available) or partitions)  # noqa: S311 - spreads load, keeps no secret
            given: object = key  # whatever its type says, a client without a serializer passes on what it got
            if not isinstance(given, bytes | bytearray | memoryview):
                remedy = "serialize it to bytes, the fallback places what the broker will see"
                raise KeyNotStreamMetadata(refusal.why, remedy) from refusal
            return partitions[default_partition(key, len(partitions))]
        return partitions[partition_for(source_partition, self._fixed_count(len(partitions)))]

    def _fixed_count(self, partitions: int) -> int:
        if self._partition_count is None:
            self._partition_count = partitions
        if partitions < self._partition_count:
            raise TopicShrunk(self._partition_count, partitions)
        return self._partition_count
