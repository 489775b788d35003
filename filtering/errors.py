"""Everything that filtering refuses, named for what the caller does next; the fields are for code."""

from collections.abc import Sequence
from typing import Any


class PicklableError(Exception):
    """Survives pickle, by which Spark brings an error to the driver, though its constructor takes no message."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuilt from message and fields."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[PicklableError], args: tuple[Any, ...], fields: dict[str, Any]) -> PicklableError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class FilteringError(PicklableError):
    """The root of every error of this package."""


class NotStreamMetadata(FilteringError):
    """These bytes name no source record. The filter lets such a record pass; `unpack` raises this."""

    def __init__(self, why: str) -> None:
        super().__init__(f"not stream metadata: {why}")
        self.why = why


PARTITION_BITS, SLOT_BIT = 20, 1 << 30
"""Partition n of worker slot s has a number above all of a topic's: SLOT_BIT | s << PARTITION_BITS | n."""


def shown_partition(number: int) -> str:
    """`3`, or `slot-7/3` for partition 3 of a worker's slot."""
    if number >> 30 != 1:
        return str(number)
    return f"slot-{(number ^ SLOT_BIT) >> PARTITION_BITS}/{number % (1 << PARTITION_BITS)}"


class PairSplit(FilteringError):
    """One (PID, source partition) was read from two destination partitions, so its records have no single order.

    The batch is refused and nothing is remembered of it. Usual causes: the destination topic grew and the producer
    followed it without a new PID epoch, or two partitioners write one topic.
    """

    def __init__(self, pid: int, partition: int, first: int, second: int) -> None:
        super().__init__(
            f"pid {pid}, source partition {partition} was in destination partition {shown_partition(first)} and now "
            f"appears in {shown_partition(second)}: fix the producer's partition_count, or raise its epoch after the "
            "topic has grown"
        )
        self.pid, self.partition, self.first, self.second = pid, partition, first, second


class MissingRight(FilteringError):
    """Kafka's authorizer refuses: give this principal the right, by an ACL that allows `operation` on the resource.

    operation: by its name in `kafka-acls` ("READ", "WRITE", "DESCRIBE_CONFIGS"); resource: "topic", "group",
    "transactional-id" or "cluster".
    """

    def __init__(self, operation: str, resource: str, name: str, why: object) -> None:
        super().__init__(f"the right {operation} on {resource} {name!r} is missing: allow it by an ACL ({why})")
        self.operation, self.resource, self.name, self.why = operation, resource, name, str(why)


class BadFilterSetting(FilteringError, ValueError):
    """A setting, an argument or a part of a key is outside its range, or a name is taken: correct it."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value!r}: {setting} is {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


class WrongCarrier(BadFilterSetting):
    """The metadata are carried elsewhere, or the marks were made with another carrier: give `right` as carrier.

    Read in the wrong place, no record has metadata, and all of them pass. Nothing of the batch was given to anybody.
    """

    def __init__(self, carrier: str, right: str, why: str) -> None:
        super().__init__("carrier", carrier, f"{right!r} {why}")
        self.right, self.why = right, why


class NotDeserialized(FilteringError):
    """The deserializer refused values. `failed`: (record, error) of each, the value as it came; `records`: the others
    of this read. All of them count as read: a commit passes them. To read them again end without a commit.
    """

    def __init__(self, records: Sequence[Any], failed: Sequence[tuple[Any, Exception]]) -> None:
        why = failed[0][1]
        super().__init__(f"{len(failed)} of {len(records) + len(failed)} values: {type(why).__name__}: {why}")
        self.records, self.failed = records, failed


class CorruptMarks(FilteringError):
    """The bytes of marks are damaged, or of another version. Take an older batch's; never go on with empty ones."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"marks can't be read, {what}: {why}; restore an older copy, do not start from empty marks")
        self.what, self.why = what, why
