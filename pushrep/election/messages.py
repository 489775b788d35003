"""AppendRecords as the rules see it: the fields of the wire by the same names, the batches already split. Its answer is
the wire's own class.

`batches_of` splits and checks what came in; nothing here keeps a copy of a record.
"""

from typing import NamedTuple

from pushrep.push_session_end_reason import NOT_ENDED
from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.batch_run import checked_run, length_of_first, misjoined

_RUN_MIN = 32  # batches as large as the first; for fewer, looking at all at once costs more than one after the other


class Batch(NamedTuple):
    """A record batch: the offsets [base_offset, next_offset), the epoch that wrote it, and its bytes.

    header: of these very bytes, where their CRC was checked.
    """

    base_offset: int
    next_offset: int
    leader_epoch: int
    data: bytes | memoryview
    header: BatchHeader | None = None


class AppendRecords(NamedTuple):
    """What one push session says about one partition; `batches` may be empty.

    previous_epoch: of the batch that ends at `append_offset`, -1 where the leader's log starts.
    epoch_start_offset: where `leader_epoch` starts in the leader's log; what lies below was there when it was granted.
    restart: the leader's log starts above what the replica has; begin anew at `append_offset`.
    cleaned_offset: 0, or the leader says that Kafka's cleaner went so far: only below it may offsets be missing.
    generation: of the leader's grant. is_whole: False if some bytes were no batch (`batches_of` says so).
    """

    leader_epoch: int
    replica_epoch: int
    session_id: int
    append_offset: int
    previous_epoch: int
    epoch_start_offset: int
    high_watermark: int
    log_start_offset: int
    flush_wanted: bool = False
    restart: bool = False
    end_session_reason: int = NOT_ENDED
    cleaned_offset: int = 0
    generation: int = 0
    batches: tuple[Batch, ...] = ()
    is_whole: bool = True

    @property
    def epoch_at_append_offset(self) -> int:
        """The leader's epoch there: of the batch, or its own, which wrote everything from its start on."""
        return self.batches[0].leader_epoch if self.batches else self.leader_epoch

    @property
    def joins(self) -> bool:
        """Whether each batch begins where the one before ends, but for announced holes, and no leader epoch falls."""
        expected, epoch, is_dense = self.append_offset, self.previous_epoch, True
        for batch in self.batches:
            if batch.leader_epoch < epoch:
                return False
            is_dense = is_dense and batch.base_offset == expected
            expected, epoch = batch.next_offset, batch.leader_epoch
        if is_dense:
            return True
        spans = (batch[:2] for batch in self.batches)
        return misjoined(spans, self.append_offset, self.cleaned_offset) is None

    @property
    def end_offset(self) -> int:
        """Up to here a replica that accepts it holds what the leader holds."""
        return self.batches[-1].next_offset if self.batches else self.append_offset


def batches_of(data: bytes) -> tuple[tuple[Batch, ...], bool]:
    """The batches in `data`, each with good magic, size and CRC-32C, and whether `data` is nothing but those."""
    view, first = memoryview(data), length_of_first(data)
    if first and len(data) >= _RUN_MIN * first:
        run = checked_run(data, 0, len(data))
        found = tuple(_batch(view, at, header) for at, header in run.headers())
        return found, bool(found) and run.end == len(data)
    batches: list[Batch] = []
    at = 0
    try:
        while at < len(data):
            header = BatchHeader.parse(data, at)
            batch = _batch(view, at, header)
            RecordBatch.check(batch.data, header)
            batches.append(batch)
            at += header.size_bytes
    except CorruptRecordBatch:
        return tuple(batches), False
    return tuple(batches), True


def _batch(view: memoryview, at: int, header: BatchHeader) -> Batch:
    data = view[at : at + header.size_bytes]
    return Batch(header.base_offset, header.next_offset, header.leader_epoch, data, header)
