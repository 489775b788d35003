"""Everything that filtering refuses, named for what the caller does next; the fields are for code."""

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


class MetadataOutOfRange(FilteringError, ValueError):
    """A part of a stream metadata does not fit its field: correct the producer."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} does not fit stream metadata: {field} is {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class UnsupportedKeys(FilteringError, TypeError):
    """A column of keys came in a form that holds no bytes: cast it, or pass another column."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"keys come as {what}; pass n x 20 contiguous bytes, a uint8 array of shape (n, 20), an Arrow binary, "
            "large_binary or fixed_size_binary array, or a sequence of bytes and None"
        )
        self.what = what


class AmbiguousProducerId(FilteringError):
    """Two different names give one PID: rename one of them, or the filter takes one for a replay of the other."""

    def __init__(self, pid: int, first: tuple[str, ...], second: tuple[str, ...]) -> None:
        super().__init__(f"PID {pid} belongs to {first} and would also be that of {second}: rename one of them")
        self.pid, self.first, self.second = pid, first, second


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
    """A setting or argument is outside its range: correct it."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value!r}: {setting} is {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


class TtlTooShort(FilteringError, ValueError):
    """Marks would be forgotten while the topic still holds records of theirs: raise `ttl_s`, or force it."""

    def __init__(self, ttl_s: float, retention_ms: int | None) -> None:
        kept = "for a time that was not given" if retention_ms is None else f"for retention.ms={retention_ms}"
        super().__init__(
            f"ttl_s={ttl_s} forgets marks while the topic keeps their records, {kept}: read again, these would pass "
            "a second time. Give retention_ms=, the topic's retention.ms (-1: for ever), and a ttl_s that is not below "
            "it; with retention_ms=0 any ttl_s is accepted"
        )
        self.ttl_s, self.retention_ms = ttl_s, retention_ms


class CorruptMarks(FilteringError):
    """The bytes of marks are damaged, or of another version. Take an older batch's; never go on with empty ones."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"marks can't be read, {what}: {why}; restore an older copy, do not start from empty marks")
        self.what, self.why = what, why
