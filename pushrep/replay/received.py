"""What a reader makes of bytes from the network: batches whose CRC it has checked itself, and their records."""

from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.batch_run import checked_run, length_of_first
from pushrep.replay.limits import Span

_BATCH_BYTES_MAX = (1 << 31) - 1
_RUN_MIN = 32
"""From so many batches of the first one's length on they are looked at together: below, the numpy calls cost more."""


def checked(data: memoryview) -> tuple[list[RecordBatch], bool]:
    """The batches that `data` is made of, each with its CRC checked; and whether each begins where the one before ends.

    Raises CorruptRecordBatch.
    """
    if len(data) < _RUN_MIN * length_of_first(data):  # type: ignore[arg-type]  # what follows a log closely is one batch
        return _checked_singly(data)
    run = checked_run(data, 0, _BATCH_BYTES_MAX)  # type: ignore[arg-type]
    batches = [RecordBatch(data[at : at + header.size_bytes], header) for at, header in run.headers()]
    end = run.end if len(run) else 0
    if end != len(data):
        RecordBatch.check(data[end:])
        raise CorruptRecordBatch(f"{len(data) - end} bytes at {end} are no batch")
    return batches, bool((run.base_offset[1:] == run.last_offset[:-1] + 1).all())


def _checked_singly(data: memoryview) -> tuple[list[RecordBatch], bool]:
    batches: list[RecordBatch] = []
    at, expected, is_dense = 0, 0, True
    while at < len(data):
        header = BatchHeader.parse(data, at)
        end = at + header.size_bytes
        is_dense = is_dense and (not batches or header.base_offset == expected)
        batches.append(RecordBatch.check(data[at:end], header))
        at, expected = end, header.next_offset
    return batches, is_dense


def count_records(batch: RecordBatch, start: int, end: int) -> int:
    """How many of its records have an offset in [start, end)."""
    header = batch.header
    records = 0 if header.is_control else header.record_count
    span = Span(header.base_offset, header.next_offset, header.size_bytes, records)
    if not span.is_dense and records and not (start <= header.base_offset and header.next_offset <= end):
        span = span._replace(offsets=tuple(record.offset for record in batch.records()))
    return span.count_in(start, end)
