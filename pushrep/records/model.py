"""The words of a record batch: what one record is, the small enumerations in a batch's attributes, and what reading or
building one may refuse, named for what the caller does next.
"""

from enum import IntEnum
from typing import NamedTuple, TypeAlias

from pushrep.errors import PushrepError

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


class CorruptRecordBatch(PushrepError):
    """These bytes are no whole record batch v2: quarantine them or fetch them again; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a valid record batch: {reason}")
        self.reason = reason


class UnsupportedCodec(PushrepError):
    """The batch is whole, but its attributes name compression `number`, which this version can't read: upgrade."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"compression {number} is unknown (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd): upgrade the reader"
        )
        self.number = number


class RecordTooLarge(PushrepError):
    """A record or batch of `size` bytes exceeds `limit`: split it, or raise the limit where the message says so."""

    def __init__(self, size: int, limit: int, setting: str = "batch_bytes_max") -> None:
        super().__init__(f"{size} bytes exceed {setting} = {limit}: split the data or raise {setting}")
        self.size, self.limit, self.setting = size, limit, setting
