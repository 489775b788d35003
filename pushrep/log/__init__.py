"""A crash-safe log per topic partition, in Kafka's own file format.

SegmentLog.open(directory / "orders-0")             the one writer: append, flush, read, truncate_to, close
SegmentLog.open_reader(directory / "orders-0")      in any other process, while the writer runs or not
list_logs(directory)                                the partitions in a directory of logs
"""

from pushrep.log.config import AppendResult, Durability, LogConfig
from pushrep.log.directory_files import list_logs, parse_log_name
from pushrep.log.errors import (
    AppendFailed,
    BelowHighWatermark,
    CompactedLog,
    CorruptBatch,
    CorruptLog,
    CorruptPartitionMetadata,
    FileRemoved,
    InvalidLogName,
    LeaseBroken,
    LogClosed,
    LogDamaged,
    LogEndMoved,
    LogLocked,
    LogPoisoned,
    NoRoomToCut,
    NotALog,
    OffsetOutOfRange,
    StillNeeded,
)
from pushrep.log.reader import Isolation, LogReader
from pushrep.log.recovery import Cut, RecoveryReport
from pushrep.log.retention import DerivedStore, Lease
from pushrep.log.segment_log import SegmentLog

__all__ = [
    "AppendFailed",
    "AppendResult",
    "BelowHighWatermark",
    "CompactedLog",
    "CorruptBatch",
    "CorruptLog",
    "CorruptPartitionMetadata",
    "Cut",
    "DerivedStore",
    "Durability",
    "FileRemoved",
    "InvalidLogName",
    "Isolation",
    "Lease",
    "LeaseBroken",
    "LogClosed",
    "LogConfig",
    "LogDamaged",
    "LogEndMoved",
    "LogLocked",
    "LogPoisoned",
    "LogReader",
    "NoRoomToCut",
    "NotALog",
    "OffsetOutOfRange",
    "RecoveryReport",
    "SegmentLog",
    "StillNeeded",
    "list_logs",
    "parse_log_name",
]
