"""What a partitioner refuses, named for what the caller does next; the fields are for code."""

from filtering import StreamMetadata
from filtering.errors import PicklableError


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
