"""Encoding and decoding of record batches beside aiokafka's builder and reader (its C extension), on one core.

Each side makes or reads whole batches of about 512 KiB, checksum included; batches are dropped as they are made, as a
log drops them. Values come from the random pool. `records()` gives Python records, `columns()` the positions that
Arrow columns are built from; aiokafka gives Python records.
"""

from collections.abc import Callable
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from benchmarks.harness import Side, compare, random_values
from pushrep.records import Codec, HeaderColumn, RecordBatch, encode_batch

BATCH_BYTES = 512 << 10
BATCHES = 40
NOW_MS = 1_700_000_000_000
NAME = "stream-metadata"


def run(rounds: int) -> dict[str, Any]:
    """A result per shape of records and direction."""
    results = {}
    for label, size in (("100 B", 100), ("1 KiB", 1024)):
        values = random_values(BATCH_BYTES // size, size)
        metadata = random_values(len(values), 20, seed=2)
        for carrier in ("no key", "key", "header"):
            results[f"encode {label}, {carrier}"] = compare(encoders(values, metadata, carrier), rounds=rounds)
        results[f"decode {label}, key"] = compare(decoders(values, metadata), rounds=rounds)
    ragged = [value[: 50 + n % 101] for n, value in enumerate(random_values(BATCH_BYTES // 100, 150))]
    results["encode 50-150 B, key"] = compare(encoders(ragged, metadata_of(ragged), "key"), rounds=rounds)
    results["decode 50-150 B, key"] = compare(decoders(ragged, metadata_of(ragged)), rounds=rounds)
    return results


def metadata_of(values: list[bytes]) -> list[bytes]:
    """A 20-byte key for each."""
    return random_values(len(values), 20, seed=2)


def encoders(values: list[bytes], metadata: list[bytes], carrier: str) -> dict[str, Side]:
    """Ours and aiokafka's, over the same records."""
    whole = b"".join(metadata)
    keys = whole if carrier == "key" else None
    headers = HeaderColumn(NAME, whole) if carrier == "header" else None
    their_keys: list[bytes | None] = [*metadata] if carrier == "key" else [None] * len(values)
    their_headers = [[(NAME, each)] if carrier == "header" else [] for each in metadata]

    def ours() -> None:
        encode_batch(values, keys=keys, headers=headers, timestamps_ms=NOW_MS)

    def aiokafka() -> None:
        builder = DefaultRecordBatchBuilder(2, int(Codec.NONE), 0, -1, -1, -1, 1 << 30)
        for n, value in enumerate(values):
            builder.append(n, timestamp=NOW_MS, key=their_keys[n], value=value, headers=their_headers[n])
        builder.build()

    return {"pushrep": repeated(ours, len(values)), "aiokafka": repeated(aiokafka, len(values))}


def decoders(values: list[bytes], metadata: list[bytes]) -> dict[str, Side]:
    """The same batch by columns, by records and by aiokafka's reader, the checksum verified by each."""
    data = bytes(encode_batch(values, keys=b"".join(metadata), timestamps_ms=NOW_MS).data)

    def columns() -> None:
        RecordBatch.check(data).columns()

    def records() -> None:
        RecordBatch.check(data).records()

    def aiokafka() -> None:
        batch = DefaultRecordBatch(data)
        if not batch.validate_crc():
            raise AssertionError("aiokafka finds the checksum wrong")
        for record in batch:
            _ = record.offset, record.timestamp, record.key, record.value, record.headers

    count = len(values)
    return {
        "pushrep, columns": repeated(columns, count),
        "pushrep, records": repeated(records, count),
        "aiokafka": repeated(aiokafka, count),
    }


def repeated(once: Callable[[], None], count: int) -> Side:
    """`once` for every batch of a round; gives the number of records."""

    def side() -> float:
        for _ in range(BATCHES):
            once()
        return BATCHES * count

    return side
