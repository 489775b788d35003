"""Matching a topic with the logs: a partition is read from its last known offset and compared with the logs' records.

    topic from the destination offset on:   x  a5  a6  x  b2  a7 │ end        x: others', or copies of ours
    log a from its acknowledged offset on:     a5  a6         a7 ─▶ a8 is next        log b:  b2 ─▶ b3 is next

A record of the topic is ours if its 20 bytes of metadata and its content are those of a record of a log. The next one
of each log is found by its 20 bytes; any other that has a PID of this outbox is looked up by the offset in them:

    the log has there        under an earlier PID epoch    under the present one, or a later one
    the same record          it is held                    it is held
    the same 20 bytes, but
    another content          OutboxDiverged                OutboxDiverged
    another record           nobody's                      OutboxDiverged
    nothing, it ends below   nobody's                      DestinationAhead
    nothing, it begins above nobody's                      nobody's

Records are sent in order, so a log's record that is missing before one that is held is a hole: sent now, it would come
behind later ones, and every filtering reader would drop it. Retention makes none, as it removes a partition's first
records. So none is seen where the partition may have lost its first ones, unless one producer wrote on both sides.

Timestamps are compared too, with two exceptions: a record with the caller's own metadata may be appended again with
another timestamp, and a topic may have the broker's append time instead. Pure, except that it reads the logs.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from filtering import METADATA_HEADER, StreamMetadata
from pushrep.kafka.errors import DestinationAhead, OutboxDiverged
from pushrep.kafka.progress import OffsetRanges, ShippedRecord
from pushrep.kafka.source import UNREADABLE, raise_if_damaged
from pushrep.log import OffsetOutOfRange, SegmentLog
from pushrep.records import CorruptRecordBatch, Record, RecordBatch, TimestampType, UnsupportedCodec
from pushrep.records.header import split_batches

_LOG = logging.getLogger("pushrep.kafka")

_PID_BYTES = 8
_NOTHING = OffsetRanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOrigin:
    """The outbox's identity in the topic. pids: its own ones by epoch: the present, later and earlier ones."""

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

    def epoch_of(self, metadata: bytes) -> int | None:
        """The PID epoch of these 20 bytes; None for a caller's own PID or another outbox's."""
        return self._epochs.get(metadata[:_PID_BYTES])

    def is_one(self, in_log: Record, in_topic: Record) -> bool:
        """Whether a record of a log and one of the topic are the same, by their 20 bytes and content."""
        return self.metadata_of(in_log) == self.metadata_of(in_topic) and self.is_same(in_log, in_topic)

    def is_same(self, in_log: Record, in_topic: Record) -> bool:
        """Whether two records with the same 20 bytes have the same content; the key is those bytes, or the caller's."""
        if (in_log.value, in_log.key, in_log.headers) != (in_topic.value, in_topic.key, in_topic.headers):
            return False
        if in_log.timestamp_ms == in_topic.timestamp_ms or in_topic.timestamp_type is TimestampType.LOG_APPEND_TIME:
            return True
        metadata = self.metadata_of(in_log)
        return metadata is None or self.epoch_of(metadata) is None


class _Expected(NamedTuple):
    """The next record of a log, and those after it."""

    partition: int
    record: Record
    following: Iterator[Record]


class Matching:
    """Compares one partition of the topic with the logs.

    logs: all of the outbox's. start: those of which this partition of the topic gets the records, and the first offset
    that it is not known to hold. skipped: what is never sent, by the log's partition.
    next_offsets: of the same logs, the first that the topic lacks. held: of any log, the offsets that were seen.
    newest: of the same logs, the last of those that it was found to hold from there on. contested: of any log, those in
    whose place the topic held another record first, where `is_strict` is False; then nothing is raised. unreadable: the
    logs that could not be read where a record was to be compared.
    """

    def __init__(  # noqa: PLR0913 - two sides, and how they are compared
        self,
        origin: RecordOrigin,
        logs: Sequence[SegmentLog],
        start: Mapping[int, int],
        topic_partition: tuple[str, int] = ("the topic", 0),
        skipped: Mapping[int, OffsetRanges] | None = None,
        *,
        is_strict: bool = True,
        is_whole: bool = False,
    ) -> None:
        self._origin, self._topic_partition, self._skipped = origin, topic_partition, skipped or {}
        self._is_strict, self._is_whole = is_strict, is_whole
        self._logs = {log.partition: _RecordsByOffset(log) for log in logs}
        self.next_offsets = dict(start)
        self.newest: dict[int, ShippedRecord] = {}
        self.held: dict[int, OffsetRanges] = {}
        self.contested: dict[int, OffsetRanges] = {}
        self.unreadable: dict[int, Exception] = {}
        self._expected: dict[bytes, _Expected] = {}
        self._producer_id = -1  # of the batch that is matched
        self._held_to: dict[int, tuple[int, int]] = {}  # by log: the end of what is held, who wrote the last of it
        self._jumps: dict[int, OffsetRanges] = {}
        for partition, at in start.items():
            log = self._logs[partition].log
            first = max(at, log.log_start_offset)
            if is_whole:
                self._held_to[partition] = first, -1
            self._expect(partition, log.records(first, max(first, log.log_end_offset)))

    def match_batch(self, batch: RecordBatch, first: int = 0) -> None:
        """The next batch of the topic, from its offset `first` on. Raises OutboxDiverged, DestinationAhead."""
        if batch.header.is_control:
            return
        try:
            records = batch.records()
        except (CorruptRecordBatch, UnsupportedCodec) as error:  # its CRC is right, so it was written this way
            _LOG.warning("%s-%d: a batch of others can't be read: %s", *self._topic_partition, error)
            return
        self._producer_id = batch.header.producer_id
        for record in records:
            metadata = self._origin.metadata_of(record)
            if metadata is None or record.offset < first:
                continue
            expected = self._expected.get(metadata)
            if expected is None:
                self._look_up(metadata, record)
            elif self._origin.is_same(expected.record, record):
                del self._expected[metadata]
                self._hold(expected.partition, expected.record.offset)
                self.next_offsets[expected.partition] = expected.record.offset + 1
                self.newest[expected.partition] = ShippedRecord(expected.record.offset, record.offset)
                self._expect(expected.partition, expected.following)
            else:
                self._contest(expected.partition, expected.record, record)

    def _expect(self, partition: int, following: Iterator[Record]) -> None:
        skipped = self._skipped.get(partition, _NOTHING)
        try:
            for record in following:
                if record.offset in skipped:
                    continue
                metadata = self._origin.metadata_of(record)
                if metadata is not None:  # every record of an outbox has metadata
                    self._expected[metadata] = _Expected(partition, record, following)
                    return
        except UNREADABLE as error:
            self.unreadable[partition] = error

    def _look_up(self, metadata: bytes, record: Record) -> None:
        """Judge a record that is not the next one of any log."""
        epoch = self._origin.epoch_of(metadata)
        found = None if epoch is None else StreamMetadata.try_unpack(metadata)
        if epoch is None or found is None:
            return
        partition, offset = found.partition, found.offset
        records, is_past = self._logs.get(partition), epoch < self._origin.pid_epoch
        try:
            if records is None or offset >= records.log.log_end_offset or epoch > self._origin.pid_epoch:
                if is_past or not self._is_strict:
                    return
                end = 0
                if records is not None:
                    raise_if_damaged(records.log)
                    end = records.log.log_end_offset
                raise DestinationAhead(partition, shipped_offset=offset, log_end_offset=end, pid_epoch=epoch)
            in_log = None if offset in self._skipped.get(partition, _NOTHING) else records.at(offset)
        except UNREADABLE as error:
            self.unreadable[partition] = error
            return
        if in_log is None:
            return
        if self._origin.metadata_of(in_log) != metadata:
            if not is_past and self._is_strict:
                raise self._diverged(partition, in_log, record)
        elif self._origin.is_same(in_log, record):
            self._hold(partition, offset)
        else:
            self._contest(partition, in_log, record)

    def _hold(self, partition: int, offset: int) -> None:
        if offset in self.contested.get(partition, _NOTHING):
            return
        self.held.setdefault(partition, OffsetRanges()).add(offset, offset + 1)
        end, producer_id = self._held_to.get(partition, (offset, -1))
        if end < offset and (self._is_whole or producer_id == self._producer_id):
            self._jumps.setdefault(partition, OffsetRanges()).add(end, offset)
        self._held_to[partition] = max(end, offset + 1), self._producer_id

    def holes(self, partition: int) -> OffsetRanges:
        """The log's records that the topic lacks, but for given up ones, though it holds one before and one behind."""
        found, skipped = OffsetRanges(), self._skipped.get(partition, _NOTHING)
        held = self.held.get(partition, _NOTHING)
        lacking = [one for start, end in self._jumps.get(partition, ()) for one in held.missing(start, end)]
        try:
            for start, end in lacking:
                for record in self._logs[partition].log.records(start, end):
                    metadata = self._origin.metadata_of(record)
                    is_own = metadata is not None and self._origin.epoch_of(metadata) is not None
                    if is_own and record.offset not in skipped:  # a caller's own one behind the next is not looked up
                        found.add(record.offset, record.offset + 1)
        except UNREADABLE as error:
            self.unreadable[partition] = error
        return found

    def _diverged(self, partition: int, in_log: Record, in_topic: Record) -> OutboxDiverged:
        topic, number = self._topic_partition
        return OutboxDiverged(
            partition, in_log.offset, in_log=in_log, in_topic=in_topic, topic=topic, topic_partition=number
        )

    def _contest(self, partition: int, in_log: Record, in_topic: Record) -> None:
        """The topic holds another record here: raise, or note it, because filtering readers keep the first."""
        if self._is_strict:
            raise self._diverged(partition, in_log, in_topic)
        if in_log.offset not in self.held.get(partition, _NOTHING):
            self.contested.setdefault(partition, OffsetRanges()).add(in_log.offset, in_log.offset + 1)


class _RecordsByOffset:
    """A log's records by offset. A batch is decoded once for consecutive look-ups."""

    def __init__(self, log: SegmentLog) -> None:
        self.log = log
        self._start = self._end = 0
        self._records: dict[int, Record] = {}

    def at(self, offset: int) -> Record | None:
        """The record; None if the log begins above or has a hole there. Raises as reading a log does."""
        if not self._start <= offset < self._end:
            try:
                batch = next(iter(self.log.batches(offset, offset + 1)), None)
            except OffsetOutOfRange:
                return None
            if batch is None:
                return None
            self._start, self._end = batch.header.base_offset, batch.header.next_offset
            self._records = {record.offset: record for record in batch.records()}
        return self._records.get(offset)


def whole_batches(data: bytes) -> Iterator[RecordBatch]:
    """The whole batches of a fetch; a cut-off last one is fetched again. Raises CorruptRecordBatch, also for a message
    of the format before Kafka 0.11.
    """
    view, found = memoryview(data), split_batches(data, of_log=False)
    for position, header in found.placed:
        yield RecordBatch(view[position : position + header.size_bytes], header)
    if found.why_not is not None and not found.is_cut:
        raise CorruptRecordBatch(found.why_not)


def _record_at(offset: int, data: bytes) -> Record | None:
    try:
        for batch in whole_batches(data):
            if offset < batch.header.next_offset:
                return next((one for one in batch.records() if one.offset == offset), None)
    except (CorruptRecordBatch, UnsupportedCodec):
        pass
    return None


def holds_record(origin: RecordOrigin, log: SegmentLog, offset: int, at: int, data: bytes) -> bool:
    """Whether a fetch has the log's record of `offset` at its own offset `at`; True if the log can't be read."""
    try:
        in_log = _RecordsByOffset(log).at(offset)
    except UNREADABLE:  # shipping stops there and reports it
        return True
    found = None if in_log is None else _record_at(at, data)
    return in_log is None or (found is not None and origin.is_one(in_log, found))
