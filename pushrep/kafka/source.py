"""Reads one log partition for shipping: its batches in order, below the stable offset.

log ─ read ─▶ [batch] [batch] ─ CRC checked, split if needed ─▶ pieces ─▶ next_piece()
acknowledged ≤ next_offset ≤ stable offset

Batches are read into reused buffers, because new memory pages cost more time than reading into them:

    slice of a segment ─ read ─▶ a buffer of 1 MiB ─ CRC checked ─▶ batches ─ patched in place ─▶ the connection
                                   ▲───── used again when no view of it exists any more ◀───────────────┘

A small read gets new memory instead of a whole buffer. The log's own reader reads batches that are too large or do not
parse, and raises the error.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from os import preadv

import numpy as np

from pushrep.election.leader import AppendTimes
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.pipeline import BatchPiece, SentBatch, pieces_of
from pushrep.kafka.progress import OffsetRanges, ShippedRecord
from pushrep.log import CorruptBatch, LogDamaged, SegmentLog
from pushrep.log.reader import LogSlices
from pushrep.records import RecordBatch
from pushrep.records.header import split_batches

_PAGE_BYTES = 4096
BUFFER_BYTES = (1 << 20) + _PAGE_BYTES
"""Kafka's default of max.message.bytes is 1 MiB and 12 bytes."""
_BUFFERS_MAX = 16
_WORTHWHILE_BYTES = BUFFER_BYTES // 4


class ReusedMemory:
    """A pool of at most `_BUFFERS_MAX` buffers of BUFFER_BYTES. For one thread."""

    def __init__(self) -> None:
        self._buffers: list[tuple[bytearray, int]] = []  # page-aligned: the kernel copies a third faster

    def acquire(self) -> memoryview | None:
        """A buffer that no view refers to; None if all are in use."""
        for number, (buffer, _) in enumerate(self._buffers):
            try:
                buffer.append(buffer.pop())  # raises BufferError while a view exists; moves nothing
            except BufferError:
                continue
            self._buffers.append(self._buffers.pop(number))
            break
        else:
            if len(self._buffers) == _BUFFERS_MAX:
                return None
            made = bytearray(BUFFER_BYTES + _PAGE_BYTES)
            self._buffers.append((made, -np.frombuffer(made, np.uint8).ctypes.data % _PAGE_BYTES))
        buffer, start = self._buffers[-1]
        return memoryview(buffer)[start : start + BUFFER_BYTES]


class SealedReader:
    """Reads the batches of one log into reused memory. For one thread."""

    def __init__(self, slices: LogSlices, memory: ReusedMemory) -> None:
        self._slices, self._memory = slices, memory

    def read(self, offset: int, limit: int) -> list[RecordBatch]:
        """Batches from the one that holds `offset`, up to `limit`; none if the log's own reader has to read them.

        Batches in reused memory are writable. Raises OSError.
        """
        found = self._slices.read(offset, limit, BUFFER_BYTES)
        if found is None or found.size_bytes > BUFFER_BYTES:
            return []
        view = self._memory.acquire() if found.size_bytes >= _WORTHWHILE_BYTES else None
        if view is None:
            data = memoryview(found.file.read_at(found.size_bytes, found.position))
        else:
            read_bytes = preadv(found.file.fileno(), [view[: found.size_bytes]], found.position)
            data = view[:read_bytes]  # a file that was cut gives fewer; the buffer has old bytes behind them
        return _checked(data, found.base_offset)


def _checked(data: memoryview, base_offset: int) -> list[RecordBatch]:
    """The batches before the first one that is not whole, fails its CRC, or has another base offset than the next."""
    batches: list[RecordBatch] = []
    for position, header in split_batches(data).placed:
        if header.base_offset != base_offset:  # the log was cut, and appended to again, since its headers were read
            break
        batches.append(RecordBatch(data[position : position + header.size_bytes], header))
        base_offset = header.next_offset
    return batches


_LOG = logging.getLogger("pushrep.kafka")
_READ_BYTES = 1 << 20
STORED_EVERY_MS = 60_000
"""Of the times of appends, those that are stored lie so far apart."""


UNREADABLE = (CorruptBatch, LogDamaged, OSError)
"""Errors for a record that can't be read now; the log may still hold it, so it does not count as missing."""


def raise_if_damaged(log: SegmentLog) -> None:
    """Raise LogDamaged if the log is damaged: its records from the damage on are unknown."""
    if log.damaged_from is not None:
        raise LogDamaged(log.path, log.damaged_from, log.recovery.damage or "")


_Check = Callable[["ShippedPartition", BatchPiece], None]


class ShippedPartition:
    """A log partition that is shipped, and how far; see the module's docstring.

    acknowledged: all records below it are in the topic, or skipped. stopped: why it can't be shipped until it is tried
    again; None: it is shipped. is_refused: it goes on, too, once the record where it stopped is given up. is_new:
    nothing was ever shipped under the outbox's PIDs. newest: the last record that the topic is known to hold.
    is_matching: whether it waits until the topic's content is known, and match_at_ms: when that is looked for again;
    None: it was, or is now. is_doubtful: whether `prove` has to check that the log is still the one that was shipped.
    append_times: when records below `noted_end` were appended. alone: the records that were refused in a batch; while
    one of them is in flight, no other record of the log is. parking: one of them is on its way to the parking log, also
    after its session. parked_in_a_row: how many were parked since the topic last took one.
    """

    is_new = False
    is_matching = False
    is_doubtful = False

    def __init__(self, log: SegmentLog, acknowledged: int, log_crc: int, memory: ReusedMemory | None = None) -> None:
        self.log, self.partition = log, log.partition
        self.acknowledged, self.log_crc = acknowledged, log_crc
        self.destination_offset = -1
        self.newest: ShippedRecord | None = None
        self.skipped = OffsetRanges()
        self.alone = OffsetRanges()
        self.parking: Future[None] | None = None
        self.parked_in_a_row = 0
        self.stopped: str | None = None
        self.is_refused = False
        self.stopped_since_ms = self.stopped_until_ms = 0
        self.match_at_ms: int | None = None
        self.next_offset = acknowledged
        self.stable_offset = acknowledged
        self.boundary: int | None = None
        self.in_flight = 0
        self.append_times = AppendTimes(0, 0)
        self.noted_end = log.log_end_offset
        self._reader = SealedReader(log.slices(), memory or ReusedMemory())
        self._read: deque[RecordBatch] = deque()
        self._pieces: deque[tuple[BatchPiece, int]] = deque()
        self._waits = False  # a record of `alone` is in flight
        self._old, self._old_ms = OffsetRanges(), 0

    def poll(self) -> bool:
        """Read the log's stable offset, and return whether there are records to send. Raises LogClosed."""
        self.stable_offset = self.log.stable_offset
        return self.next_offset < self.stable_offset

    def rewind(self) -> None:
        """Go back to the first unacknowledged record."""
        assert not self.in_flight, "a batch in flight belongs to the records that were read before"
        self.next_offset = self.acknowledged
        self._read.clear()
        self._pieces.clear()

    def note_end(self, now_ms: int) -> None:
        """Note when the newest records were appended. now_ms: wall clock; called once a second."""
        if (end := self.log.log_end_offset) > self.noted_end:
            self.append_times.on_append(self.noted_end, now_ms)
            self.noted_end = end
        self.append_times.forget(self.acknowledged, now_ms - STORED_EVERY_MS)

    def prove(self) -> None:
        """Forget the acknowledged offset, unless the log still has the batch that was acknowledged last.

        If retention has removed that batch, the offset stays. Raises the errors of UNREADABLE; then nothing changes.
        """
        if self.acknowledged > self.log.log_end_offset:
            raise_if_damaged(self.log)
        if self.is_doubtful and self.acknowledged > self.log.log_start_offset:
            last = next(iter(self.log.batches(self.acknowledged - 1, self.acknowledged)), None)
            if last is None or last.header.crc != self.log_crc:
                self.forget()
        self.is_doubtful = False

    def forget(self) -> None:
        """Ship again from the log's start, because it is not the log that was shipped."""
        _LOG.warning("partition %d was cut and appended to again: it is shipped from its start", self.partition)
        self.acknowledged = self.next_offset = self.log.log_start_offset
        self.log_crc, self.destination_offset, self.newest, self.is_doubtful = 0, -1, None, False

    def begin_elsewhere(self) -> None:
        """Forget the end of the Kafka partition, because the next record goes to another one."""
        self.destination_offset, self.newest = -1, None

    def stop(self, why: Exception, now_ms: int, until_ms: int) -> None:
        """Stop for this reason; shipping is tried again at `until_ms`."""
        if self.stopped is None:
            self.stopped_since_ms = now_ms
        if self.stopped != str(why):
            _LOG.error("partition %d is stopped at offset %d: %s", self.partition, self.stopped_at, why)
        self.stopped, self.stopped_until_ms = str(why), until_ms
        self.is_refused = RefusedByTopic in {type(why), type(why.__cause__)}

    @property
    def stopped_at(self) -> int:
        """The record at which it is stopped: the first one that is neither acknowledged nor skipped."""
        return self.skipped.end_of(self.acknowledged)

    def skip(self, offsets: OffsetRanges) -> None:
        """From now on leave these records out; those in flight are not taken back. If the partition waits to be
        matched, that is tried at once.
        """
        self.skipped, self.stopped, self.stopped_until_ms = offsets, None, 0
        self.match_at_ms = None if self.match_at_ms is None else 0
        if not self.in_flight:
            self.rewind()

    def isolate(self, sent: SentBatch, numbers: Sequence[int]) -> None:
        """Send these records of a batch alone, by their numbers in it; without a number each of its records."""
        offsets = self.offsets_of(sent)
        for offset in [offsets[n] for n in numbers if 0 <= n < len(offsets)] or offsets:
            self.alone.add(offset, offset + 1)

    def offsets_of(self, sent: SentBatch) -> list[int]:
        """The offsets of a batch's records; fewer if some of them were skipped since it was sent."""
        return [one for one in range(sent.start, sent.end) if one not in self.skipped]

    def has_since(self, time_ms: int) -> bool:
        """Whether a record that is still to be sent is of `time_ms` or later. While that rises, each is read once."""
        if time_ms < self._old_ms:
            self._old = OffsetRanges()
        self._old_ms = time_ms
        start = self._old.end_of(self.next_offset)
        for batch in self.log.batches(start, self.stable_offset) if start < self.stable_offset else ():
            if batch.header.max_timestamp_ms >= time_ms and any(
                one.timestamp_ms >= time_ms and one.offset >= start and one.offset not in self.skipped
                for one in batch.records()
            ):
                return True
            self._old.add(max(start, batch.header.base_offset), batch.header.next_offset)
        return False

    def next_piece(self, size_max_bytes: int, check: _Check = lambda *_: None) -> SentBatch | None:
        """The next piece to send, usually a whole batch; None: there is none now.

        check: raises for a piece that the topic would not keep. Raises what it does, and the errors of reading a log:
        CorruptRecordBatch, CorruptBatch, LogClosed, OSError.
        """
        if self._waits and self.in_flight:
            return None
        self._waits = False
        while self._pieces or self._cut_next(size_max_bytes):
            piece, log_crc = self._pieces[0]
            is_alone = self.alone.meets(piece.start, piece.end)
            if (is_alone or piece.batch is None) and self.in_flight:
                return None
            if piece.batch is None:  # skipped: counts as acknowledged once all records before it are
                self.on_acknowledged(piece.end, log_crc, -1)
            else:
                check(self, piece)
            self._pieces.popleft()
            self.next_offset = piece.end
            if piece.batch is not None:
                self._waits = is_alone
                return SentBatch(self.partition, piece.start, piece.end, log_crc, piece.batch)
        return None

    def on_acknowledged(
        self, end: int, log_crc: int, destination_offset: int, newest: ShippedRecord | None = None
    ) -> None:
        """Note that the topic holds all records below `end`, below its own `destination_offset` (-1: not known)."""
        self.acknowledged, self.log_crc, self.stopped = end, log_crc, None
        self.destination_offset = max(self.destination_offset, destination_offset)
        self.newest = newest or self.newest
        self.is_new = False

    def _cut_next(self, size_max_bytes: int) -> bool:
        batch = self._next_batch()
        if batch is None:
            return False
        for piece in pieces_of(batch, self.next_offset, size_max_bytes, self.skipped, self.alone):
            self._pieces.append((piece, batch.header.crc))
        return True

    def _next_batch(self) -> RecordBatch | None:
        if not self._read and self.next_offset < self.stable_offset:
            # The CRC is checked, because the batch gets a new CRC for the topic, which would hide damage.
            self._read.extend(self._reader.read(self.next_offset, self.stable_offset) or self._read_by_log())
        if not self._read or self._read[0].header.next_offset > self.stable_offset:
            return None
        return self._read.popleft()

    def _read_by_log(self) -> Iterator[RecordBatch]:
        data = memoryview(self.log.read(self.next_offset, _READ_BYTES))
        for position, header in split_batches(data).placed:
            yield RecordBatch(data[position : position + header.size_bytes], header)
