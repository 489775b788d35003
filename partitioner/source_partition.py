"""Where a record goes: its source partition, modulo the destination's partitions.

So a pair (PID, source partition) lives in exactly one destination partition, whose order the replay filter relies on;
with more destination than source partitions each keeps its number.

A plugin of a client only places records. The prefix condition, on which the replay filter rests, stays the user's: what
each attempt writes for a pair must reach the log in order and without holes. aiokafka drops a batch whose leader stays
unknown past its timeout, idempotent or not, and goes on with the next: catch that failure and send nothing more to
that partition until the failed record is through.
"""

import operator
import random
from collections.abc import Sequence
from typing import Literal, SupportsIndex

from filtering import NotStreamMetadata, StreamMetadata
from filtering.errors import PicklableError
from filtering.murmur import default_partition


class PartitionerError(PicklableError):
    """The root of every error of this package."""


class BadPartitionerSetting(PartitionerError, ValueError):
    """A setting or argument is outside its range, or would let a record overtake or skip another: correct it."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value!r}: {setting} is {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


class OffsetNotAbove(PartitionerError, ValueError):
    """Readers would drop this record as a replay: begin at the first source offset that was not sent in this run."""

    def __init__(self, metadata: StreamMetadata, highest: int) -> None:
        super().__init__(
            f"source offset {metadata.offset} of source partition {metadata.partition} (PID {metadata.pid}) is not "
            f"above {highest}, the last one taken: readers would drop it as a replay"
        )
        self.metadata, self.highest = metadata, highest


class PartitionStopped(PartitionerError):
    """A record can't be delivered, and nothing goes past it: remove the cause, then call `retry`."""

    def __init__(self, partition: int, metadata: StreamMetadata, cause: Exception) -> None:
        super().__init__(
            f"partition {partition} stopped at source offset {metadata.offset} of source partition "
            f"{metadata.partition} (PID {metadata.pid}): {cause}; remove the cause, then call retry({partition})"
        )
        self.partition, self.metadata, self.cause = partition, metadata, cause


class NotDelivered(PartitionerError):
    """The time is over and records are not acknowledged; they may still be delivered. Wait again, or close."""

    def __init__(self, records: int, timeout_s: float) -> None:
        super().__init__(f"{records} records are not acknowledged after {timeout_s} s; they may still be delivered")
        self.records, self.timeout_s = records, timeout_s


class TopicUnfit(PartitionerError):
    """The destination topic is not there, is compacted or has shrunk: the message says what to do."""


def topic_missing(topic: str) -> TopicUnfit:
    """There is no such topic."""
    return TopicUnfit(f"topic {topic!r} does not exist: create it first, its partitions are counted at first use")


def partition_for(source_partition: SupportsIndex, partition_count: SupportsIndex) -> int:
    """The destination partition of a source partition. Raises BadPartitionerSetting for s < 0 or n < 1."""
    if type(source_partition) is type(partition_count) is int and source_partition >= 0 < partition_count:
        return source_partition % partition_count  # the usual case, for every record
    source, count = _whole(source_partition), _whole(partition_count)
    if source is None or source < 0:
        raise BadPartitionerSetting("source_partition", source_partition, "a whole number from 0 on")
    if count is None or count < 1:
        raise BadPartitionerSetting("partition_count", partition_count, "a whole number from 1 on")
    return source % count


def check_partition_count(count: object) -> None:
    """A setting partition_count. Raises BadPartitionerSetting unless it is None, or a whole number from 1 on."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise BadPartitionerSetting("partition_count", count, "None or a whole number from 1 on")


def check_not_shrunk(pinned: int, partitions: int) -> None:
    """Raise TopicUnfit if a topic has fewer partitions than were fixed."""
    if partitions < pinned:
        raise TopicUnfit(
            f"partition_count={pinned} is fixed but the topic has {partitions} partitions: this is another topic; "
            "give it a partitioner of its own and a new PID epoch"
        )


def _whole(number: SupportsIndex) -> int | None:
    try:
        return operator.index(number)
    except TypeError:
        return None


class SourcePartitionPartitioner:
    """For aiokafka: `AIOKafkaProducer(..., partitioner=SourcePartitionPartitioner(partition_count=4))`.

    A callable `(key, all_partitions, available) -> partition`; one for each topic, since it fixes the topic's count.

    `partition_count` is how many partitions are used. Without it the number at the first record is used for this
    object's life: keep it (`.partition_count`) with the producer's state and pass it after a restart. Partitions
    added later are not used; to use them, raise the count together with the PID epoch.
    `fallback="default"` places keys that are not stream metadata as Kafka's default partitioner does (murmur2; null
    goes to any available partition); without it such a key is refused.
    Raises BadPartitionerSetting, and TopicUnfit when the topic has fewer partitions than are used.
    """

    def __init__(self, fallback: Literal["default"] | None = None, partition_count: int | None = None) -> None:
        if fallback not in (None, "default"):
            raise BadPartitionerSetting("fallback", fallback, 'None or "default"')
        check_partition_count(partition_count)
        self._fallback = fallback
        self.partition_count = partition_count
        """How many partitions are used; None before the first record, if none was given."""

    def __call__(self, key: bytes | None, all_partitions: Sequence[int], available: Sequence[int]) -> int:
        # The client lists a set, so the order it comes in means nothing.
        partitions = sorted(all_partitions)
        try:
            source_partition = StreamMetadata.unpack(key).partition
        except NotStreamMetadata as refusal:
            if self._fallback is None:
                remedy = 'stream metadata: send it packed, or set fallback="default"'
                raise BadPartitionerSetting("key", key, remedy) from refusal
            if key is None:
                return random.choice(list(available) or partitions)  # noqa: S311 - spreads load, keeps no secret
            given: object = key  # whatever its type says, a client without a serializer passes on what it got
            if not isinstance(given, bytes | bytearray | memoryview):
                remedy = "bytes or None: serialize it, the fallback places what the broker will see"
                raise BadPartitionerSetting("key", given, remedy) from refusal
            return partitions[default_partition(key, len(partitions))]
        return partitions[partition_for(source_partition, self._fixed_count(len(partitions)))]

    def _fixed_count(self, partitions: int) -> int:
        if self.partition_count is None:
            self.partition_count = partitions
        check_not_shrunk(self.partition_count, partitions)
        return self.partition_count
