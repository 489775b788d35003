"""What the topic holds already: a partition read from where it is known on, its records held against the log's.

    topic from the destination offset on:   x  a5  a6  x  b2  a7 │ end        x: others', or duplicates of ours
    log a from its acknowledged offset on:     a5  a6         a7 ─▶ a8 is next        log b:  b2 ─▶ b3 is next

A record is known by its 20 bytes of metadata. Pure, but for the logs that are read on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from filtering import METADATA_HEADER, StreamMetadata
from pushrep.kafka.errors import DestinationAhead
from pushrep.kafka.source import ShippedLog
from pushrep.records import BatchHeader, CorruptRecordBatch, Record, RecordBatch

_PID_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose records they are. pids: this outbox's own, by the epoch: the present one and those that could follow."""

    carrier: str
    pids: Mapping[int, int]
    pid_epoch: int
    _epochs: Mapping[bytes, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        packed = {StreamMetadata(pid, 0, 0).pack()[:_PID_BYTES]: epoch for epoch, pid in self.pids.items()}
        object.__setattr__(self, "_epochs", packed)

    def metadata_of(self, record: Record) -> bytes | None:
        """The record's 20 bytes, None where it has none."""
        if self.carrier == "key":
            return record.key
        named = [value for name, value in record.headers if name == METADATA_HEADER]
        return named[-1] if named else None

    def check(self, metadata: bytes | None, log_ends: Mapping[int, int]) -> None:
        """Raise DestinationAhead for a record of ours that its log does not have."""
        if metadata is None or metadata[:_PID_BYTES] not in self._epochs:
            return
        found = StreamMetadata.try_unpack(metadata)
        if found is None:
            return
        epoch, end = self._epochs[metadata[:_PID_BYTES]], log_ends.get(found.partition, 0)
        if epoch > self.pid_epoch or found.offset >= end:
            raise DestinationAhead(found.partition, shipped_offset=found.offset, log_end_offset=end, pid_epoch=epoch)


class Matching:
    """Holds a Kafka partition's records against the logs that go there. `next_offsets`: the first that it lacks."""

    def __init__(self, origin: Origin, logs: Sequence[ShippedLog], start: Mapping[int, int]) -> None:
        self._origin = origin
        self._ends = {log.partition: log.log_end_offset for log in logs}
        self.next_offsets = dict(start)
        self._expected: dict[bytes, tuple[int, Iterator[Record], int]] = {}
        for log in logs:
            at = start[log.partition]
            self._expect(log.partition, log.records(at, max(at, self._ends[log.partition])))

    def take(self, batch: RecordBatch) -> None:
        """The next batch of the topic. Raises DestinationAhead."""
        if batch.header.is_control:
            return
        for record in batch.records():
            metadata = self._origin.metadata_of(record)
            found = self._expected.pop(metadata, None) if metadata is not None else None
            if found is None:
                self._origin.check(metadata, self._ends)
                continue
            partition, following, offset = found
            self.next_offsets[partition] = offset + 1
            self._expect(partition, following)

    def _expect(self, partition: int, following: Iterator[Record]) -> None:
        for record in following:
            metadata = self._origin.metadata_of(record)
            if metadata is not None:  # every record of an outbox has it
                self._expected[metadata] = partition, following, record.offset
                return


def whole_batches(data: bytes) -> Iterator[RecordBatch]:
    """The batches of a fetch; its last one may be cut off, and is fetched again. Raises CorruptRecordBatch."""
    view, position = memoryview(data), 0
    while position < len(view):
        try:
            header = BatchHeader.parse(view, position)
        except CorruptRecordBatch:
            if len(view) - position >= _HEADER_BYTES:
                raise
            return
        end = position + header.size_bytes
        if end > len(view):
            return
        yield RecordBatch.check(view[position:end], header)
        position = end


_HEADER_BYTES = 61
