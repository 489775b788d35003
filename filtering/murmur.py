"""MurmurHash2 (Austin Appleby, public domain): 64 bits of it name producers, 32 bits place keys as Kafka does."""

import struct
from typing import Final

SQE_SEED: Final = 0xE17A1465
_KAFKA_SEED: Final = 0x9747B28C
_MULTIPLIER_64: Final = 0xC6A4A7935BD1E995
_MULTIPLIER_32: Final = 0x5BD1E995
_SHIFT: Final = 47
_MASK_64: Final = 2**64 - 1
_MASK_32: Final = 2**32 - 1


def murmur_hash2_64a(data: bytes, seed: int = SQE_SEED) -> int:
    """MurmurHash2-64A of `data` as a signed 64-bit number. Pure."""
    value = (seed ^ (len(data) * _MULTIPLIER_64)) & _MASK_64
    tail = len(data) & 7
    for (block,) in struct.iter_unpack("<Q", data[: len(data) - tail]):
        mixed = (block * _MULTIPLIER_64) & _MASK_64
        mixed ^= mixed >> _SHIFT
        value = ((value ^ ((mixed * _MULTIPLIER_64) & _MASK_64)) * _MULTIPLIER_64) & _MASK_64
    if tail:
        value = ((value ^ int.from_bytes(data[-tail:], "little")) * _MULTIPLIER_64) & _MASK_64
    value ^= value >> _SHIFT
    value = (value * _MULTIPLIER_64) & _MASK_64
    value ^= value >> _SHIFT
    return value - 2**64 if value >= 2**63 else value


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bits, little-endian, with Kafka's seed, as an unsigned number (Kafka's Utils.murmur2)."""
    value = (_KAFKA_SEED ^ len(data)) & _MASK_32
    tail = len(data) & 3
    for (block,) in struct.iter_unpack("<I", data[: len(data) - tail]):
        mixed = (block * _MULTIPLIER_32) & _MASK_32
        mixed ^= mixed >> 24
        value = ((value * _MULTIPLIER_32) & _MASK_32) ^ ((mixed * _MULTIPLIER_32) & _MASK_32)
    if tail:
        value = ((value ^ int.from_bytes(data[-tail:], "little")) * _MULTIPLIER_32) & _MASK_32
    value ^= value >> 13
    value = (value * _MULTIPLIER_32) & _MASK_32
    return value ^ (value >> 15)


def default_partition(key: bytes, partition_count: int) -> int:
    """Where Kafka's default partitioner puts a key that is not null: murmur2, sign bit off, modulo."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count
