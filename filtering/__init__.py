"""Replay filtering: the 20-byte key that names a source record, and the rule that lets each one through once.

What this file exports is pure (no clock, disk, network or client) and needs numpy at most, so that it runs in a Spark
executor or a client's plugin. Kafka clients appear in consumers/ alone; retry.py waits, and is imported only there and
by other packages.
"""

from filtering.errors import (
    BadFilterSetting,
    CorruptMarks,
    FilteringError,
    MissingRight,
    NotDeserialized,
    NotStreamMetadata,
    PairSplit,
    WrongCarrier,
)
from filtering.marks import HighwaterMarks, MarkColumns, MarkEntry
from filtering.producer_id import ProducerNames, producer_id, sqe_producer_id
from filtering.replay_filter import FilterCounts, ReplayFilter
from filtering.stream_metadata import (
    KEY_BYTES,
    METADATA_HEADER,
    Keys,
    PositionBits,
    StreamMetadata,
    pack_keys,
    parse_keys,
)

__all__ = [
    "KEY_BYTES",
    "METADATA_HEADER",
    "BadFilterSetting",
    "CorruptMarks",
    "FilterCounts",
    "FilteringError",
    "HighwaterMarks",
    "Keys",
    "MarkColumns",
    "MarkEntry",
    "MissingRight",
    "NotDeserialized",
    "NotStreamMetadata",
    "PairSplit",
    "PositionBits",
    "ProducerNames",
    "ReplayFilter",
    "StreamMetadata",
    "WrongCarrier",
    "pack_keys",
    "parse_keys",
    "producer_id",
    "sqe_producer_id",
]
