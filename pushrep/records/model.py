"""The words of a record batch: what one record is, and the small enumerations in a batch's attributes."""

from enum import IntEnum
from typing import NamedTuple, TypeAlias

Header: TypeAlias = tuple[str, bytes | None]
Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes in one piece."""


class Codec(IntEnum):
    """Compression of a batch's records; the numbers are Kafka's (attributes, bits 0-2)."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class TimestampType(IntEnum):
    """Who set the timestamps: the producer, or the log that appended the batch (attributes, bit 3)."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Record(NamedTuple):
    """One decoded record. `timestamp_ms` counts from 1970-01-01 UTC, -1 for none; null keys and values are None.

    A tuple and not a dataclass: a reader makes millions, and tuples are built in C.
    """

    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
