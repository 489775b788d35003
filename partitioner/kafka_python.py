"""For kafka-python: `KafkaProducer(..., partitioner=SourcePartitionPartitioner(partition_counts={"orders": 4}))`.

A plugin only places records; the prefix condition stays the user's (source_partition.py). kafka-python gives up a batch
whose time is over and goes on with the next: catch that failure, and send nothing more to that partition until the
failed record is through.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kafka.partitioner import DefaultPartitioner

from partitioner.source_partition import SourcePartitionPartitioner as _Place
from partitioner.source_partition import topic_missing


class SourcePartitionPartitioner(DefaultPartitioner):  # type: ignore[misc]  # kafka-python has no types
    """Places every record by the source partition in its key, topic by topic.

    `partition_counts`: how many partitions are used, by topic; of one that is not named the number at its first record,
    so keep `.partition_counts` with the producer's state and pass it after a restart. `fallback`: as for aiokafka's.
    Raises TopicUnfit, and as aiokafka's does.
    """

    def __init__(
        self, fallback: Literal["default"] | None = None, partition_counts: Mapping[str, int] | None = None
    ) -> None:
        self._fallback: Literal["default"] | None = fallback
        self._places = {topic: _Place(fallback, count) for topic, count in (partition_counts or {}).items()}
        _Place(fallback)  # a wrong word is refused here, not at the first record

    @property
    def partition_counts(self) -> dict[str, int]:
        """How many partitions are used, by topic."""
        return {topic: n for topic, place in self._places.items() if (n := place.partition_count) is not None}

    def partition(  # noqa: PLR0913, PLR0917 - the client's signature
        self, topic: str, key: Any, serialized_key: bytes | None, value: Any, serialized_value: Any, cluster: Any
    ) -> int:
        """The client's question, since its version 3."""
        del key, value, serialized_value
        partitions = cluster.partitions_for_topic(topic)
        if not partitions:
            raise topic_missing(topic)
        available: Sequence[int] = list(cluster.available_partitions_for_topic(topic) or ())
        place = self._places.setdefault(topic, _Place(self._fallback))
        return place(serialized_key, list(partitions), available)
