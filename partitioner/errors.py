"""What a partitioner refuses, named for what the caller does next; the fields are for code."""

from filtering import StreamMetadata
from filtering.errors import PicklableError


class PartitionerError(PicklableError):
    """The root of every error of this package."""


class BadPartitionerSetting(PartitionerError, ValueError):
    """A setting or argument is outside its range: correct it."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value!r}: {setting} is {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


class KeyNotStreamMetadata(PartitionerError):
    """The key says no source partition: send stream metadata as the key, or choose `fallback="default"`.

    With the fallback, too, a key is bytes or None: what the broker will see.
    """

    def __init__(self, why: str, remedy: str = 'send it packed, or set fallback="default"') -> None:
        super().__init__(f"the key is not stream metadata ({why}); {remedy}")
        self.why = why


class TopicShrunk(PartitionerError):
    """The topic has fewer partitions than were fixed, so it is another topic now: raise the PID epoch for it."""

    def __init__(self, pinned: int, partitions: int) -> None:
        super().__init__(
            f"partition_count={pinned} is fixed but the topic has {partitions} partitions: this is another topic; "
            "give it a partitioner of its own and a new PID epoch"
        )
        self.pinned, self.partitions = pinned, partitions


class BreaksPrefixCondition(BadPartitionerSetting):
    """A setting of the client would let a record overtake or skip another: leave it out."""

    def __init__(self, setting: str, value: object, needed: str) -> None:
        super().__init__(setting, value, f"{needed}: else readers that filter replays lose records; leave it out")


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


NOT_THERE = "does not exist: create it first, its partitions are counted at first use"


class TopicUnfit(PartitionerError):
    """The destination topic is not there, or is compacted: the message says what to do."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic!r} {why}")
        self.topic, self.why = topic, why
