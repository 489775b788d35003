"""Where a record goes: its source partition, modulo the destination's partitions.

So a pair (PID, source partition) lives in exactly one destination partition, whose order the replay filter relies on;
with more destination than source partitions each keeps its number. Pure.
"""

import operator
import struct
from typing import Final, SupportsIndex

from partitioner.errors import BadPartitionerSetting

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 2**32 - 1


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


def _whole(number: SupportsIndex) -> int | None:
    try:
        return operator.index(number)
    except TypeError:
        return None


def default_partition(key: bytes, partition_count: int) -> int:
    """Where Kafka's default partitioner puts a key that is not null: murmur2, sign bit off, modulo."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bits, little-endian, with Kafka's seed, as an unsigned number (Kafka's Utils.murmur2)."""
    value = (_SEED ^ len(data)) & _MASK
    tail = len(data) & 3
    for (block,) in struct.iter_unpack("<I", data[: len(data) - tail]):
        mixed = (block * _MULTIPLIER) & _MASK
        mixed ^= mixed >> 24
        value = ((value * _MULTIPLIER) & _MASK) ^ ((mixed * _MULTIPLIER) & _MASK)
    if tail:
        value = ((value ^ int.from_bytes(data[-tail:], "little")) * _MULTIPLIER) & _MASK
    value ^= value >> 13
    value = (value * _MULTIPLIER) & _MASK
    return value ^ (value >> 15)
