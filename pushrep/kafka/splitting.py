"""A sealed batch in smaller pieces, cut at record borders: the one case in which records are encoded again.

batch [100, 180), 900 KB, limit 500 KB  ─▶  [100, 140) [140, 180)       each below the limit as it is sent
a record that alone is above it: RecordAboveLimit, with its offset
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pushrep.kafka.errors import RecordAboveLimit
from pushrep.kafka.progress import OffsetRanges
from pushrep.records import Record, RecordBatch, encode_batch


class BatchPiece(NamedTuple):
    """Records [start, end) of the log as one batch; None where all of them are given up."""

    start: int
    end: int
    batch: RecordBatch | None


def pieces_of(batch: RecordBatch, start: int, size_max_bytes: int, skipped: OffsetRanges) -> Iterator[BatchPiece]:
    """The batch's records from offset `start` on, as it is if it fits; without the `skipped` offsets.

    Raises RecordAboveLimit when it comes to a record that does not fit alone; CorruptRecordBatch.
    """
    header = batch.header
    end = header.next_offset
    is_whole = start <= header.base_offset and not skipped.meets(start, end)
    if is_whole and header.size_bytes <= size_max_bytes:
        yield BatchPiece(header.base_offset, end, batch)
        return
    records = [one for one in batch.records() if one.offset >= start and one.offset not in skipped]
    at, begin = 0, start
    while at < len(records):
        count = len(records) - at
        piece = _encoded(batch, records[at : at + count])
        while piece.header.size_bytes > size_max_bytes and count > 1:
            # By size, with a little room: the halves of a batch of unequal records are not of equal size.
            share = size_max_bytes / piece.header.size_bytes
            count = max(1, min(count // 2 if share < 0.9 else count - 1, int(count * share * 0.95)))
            piece = _encoded(batch, records[at : at + count])
        if piece.header.size_bytes > size_max_bytes:
            raise RecordAboveLimit(records[at].offset, piece.header.size_bytes, size_max_bytes)
        at += count
        piece_end = records[at].offset if at < len(records) else end
        yield BatchPiece(begin, piece_end, piece)
        begin = piece_end
    if begin < end:
        yield BatchPiece(begin, end, None)


def _encoded(batch: RecordBatch, records: Sequence[Record]) -> RecordBatch:
    return encode_batch(
        [one.value for one in records],
        keys=[one.key for one in records],
        headers=[one.headers for one in records],
        timestamps_ms=[one.timestamp_ms for one in records],
        codec=batch.header.codec,
    )
