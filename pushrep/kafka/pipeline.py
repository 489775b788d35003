"""One Kafka partition's pipeline: which batch goes next under which sequence number, and what an answer changes. Pure.

    unacknowledged, in order:   [acked] [in flight] [in flight] [in flight]  < 5      next_sequence ─▶ the next batch
                                   └─ leaves when everything before it is acknowledged

A failure closes the pipeline: nothing more is sent until every answer is in. Then the first batch that is not
acknowledged says what to do: the same bytes again in the same order, or a new producer id from what the topic holds on.
Until the first batch under an id is acknowledged it goes alone, because a broker that knows nothing of an id takes any
first sequence number: of several, a later one could land first. The same after a long silence, when it has forgotten;
after a failure and over another connection, since the current leader may have read its log without remembering; and
always for batches that are old: brokers measure by a batch's newest timestamp, not by its arrival, how long an id was
silent.

A sealed batch above the topic's limit is cut at record borders (`pieces_of`): the one case in which records are encoded
again.

    batch [100, 180), 900 KB, limit 500 KB  ─▶  [100, 140) [140, 180)       each below the limit as it is sent
    a record that alone is above it: RecordAboveLimit, with its offset
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pushrep.kafka.answers import AnswerReaction, BrokerAnswer, Code, reaction_to
from pushrep.kafka.errors import RecordAboveLimit
from pushrep.kafka.progress import OffsetRanges
from pushrep.records import Record, RecordBatch, encode_batch
from pushrep.records import header as layout
from pushrep.records.header import crc32c
from pushrep.records.model import Buffer

IN_FLIGHT_MAX = 5
"""Brokers know the last five batches of a producer again (ProducerStateEntry.NUM_BATCHES_TO_RETAIN)."""
_SEQUENCES = 1 << 31  # the number after the last one is 0


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch on its way: records [start, end) of a log partition under `base_sequence`.

    log_crc: of the sealed batch in the log, of which this is all or a part. data: the bytes as they are sent, which may
    lie where the batch lay: it is not to be read any more.
    is_old: its records' times are so far back that a broker may forget the producer at once.
    """

    partition: int
    start: int
    end: int
    log_crc: int
    batch: RecordBatch
    data: bytearray | memoryview = field(default_factory=bytearray)
    is_old: bool = False
    base_sequence: int = -1
    in_flight: bool = False
    base_offset: int | None = None
    """Where it landed; None: not acknowledged, -1: it did, and the broker does not know where."""
    answer: BrokerAnswer | None = None
    """The last bad one."""

    @property
    def is_acknowledged(self) -> bool:
        return self.base_offset is not None


class Pipeline:
    """The batches of one Kafka partition that are not acknowledged yet. Knows no clock and no network."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.producer_id, self.producer_epoch = -1, -1
        self._next_sequence = 0
        self._sent: deque[SentBatch] = deque()
        self._in_flight = 0
        self._is_known = False  # the broker has state of our id
        self._is_closed = False

    def begin(self, producer_id: int, producer_epoch: int) -> None:
        """Go on under another producer id; nothing is in flight, and what was not acknowledged is read again."""
        assert not self._in_flight, "a retry of the old id could land between the new one's batches"
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self._next_sequence, self._is_known, self._is_closed = 0, False, False
        self._sent.clear()

    def has_been_idle(self) -> None:
        """For so long that the broker may have forgotten: the next batch goes alone."""
        if not self._sent:
            self._is_known = False

    def meets_another(self) -> None:
        """The broker that is asked from now on may not know our producer id: the next batch goes alone."""
        self._is_known = False

    @property
    def in_flight(self) -> int:
        """Batches that wait for an answer."""
        return self._in_flight

    @property
    def is_empty(self) -> bool:
        """Everything that was sent is acknowledged."""
        return not self._sent

    @property
    def is_drained(self) -> bool:
        """A failure closed it, and every answer is in: `verdict` says what to do."""
        return self._is_closed and not self._in_flight

    @property
    def may_send(self) -> bool:
        """Whether one more batch may be sent now."""
        if self._is_closed or self.producer_id < 0:
            return False
        is_remembered = self._is_known and not any(one.is_old for one in self._sent)
        return self._in_flight < (IN_FLIGHT_MAX if is_remembered else 1)

    def waiting(self) -> SentBatch | None:
        """The batch to send before any new one: the first that was sent before and is to be sent again."""
        return next((one for one in self._sent if not one.in_flight and not one.is_acknowledged), None)

    @property
    def has_room(self) -> bool:
        """Whether a new batch may be added: what is not known to be acknowledged spans five at most."""
        return len(self._sent) < IN_FLIGHT_MAX

    def add(self, sent: SentBatch) -> None:
        """Give a new batch its sequence number, the next one after all others, and patch it into its bytes."""
        sent.base_sequence = self._next_sequence
        sent.data = _patched(sent.batch.data, self.producer_id, self.producer_epoch, sent.base_sequence)
        offsets = sent.batch.header.last_offset_delta + 1
        self._next_sequence = (self._next_sequence + offsets) % _SEQUENCES
        self._sent.append(sent)

    def on_sent(self, sent: SentBatch) -> None:
        """It is on the wire."""
        sent.in_flight = True
        self._in_flight += 1

    def on_answer(self, sent: SentBatch, answer: BrokerAnswer) -> Iterator[SentBatch]:
        """Those that are acknowledged now, in log order, with everything before them."""
        sent.in_flight = False
        self._in_flight -= 1
        if reaction_to(answer.error_code) is AnswerReaction.DONE:
            sent.base_offset, sent.answer = answer.base_offset, None
            self._is_known = not sent.is_old  # by an old one's time the id may be forgotten before the next comes
            while self._sent and self._sent[0].is_acknowledged:
                yield self._sent.popleft()
            self._is_closed = self._is_closed and bool(self._sent)
        else:
            sent.answer = answer
            self._is_closed = True

    def verdict(self) -> tuple[SentBatch, AnswerReaction]:
        """Of a drained pipeline: the first batch that is not acknowledged, and what its answer asks for."""
        assert self.is_drained, "an answer that is still to come may change it"
        first = next(one for one in self._sent if not one.is_acknowledged)
        answer = first.answer
        if answer is None:  # it was not sent again since a later one failed
            return first, AnswerReaction.RETRY
        reaction = reaction_to(answer.error_code)
        if reaction in {AnswerReaction.SPLIT, AnswerReaction.STOP} and any(one.is_acknowledged for one in self._sent):
            # A later one is in the topic, so this one is as well, from a try whose answer was lost.
            return first, AnswerReaction.RESYNC
        return first, reaction

    def reopen(self) -> None:
        """Send again what is not acknowledged, the same bytes in the same order."""
        for one in self._sent:
            one.answer = None
        self._is_closed = self._is_known = False

    def forget(self, first: SentBatch) -> list[SentBatch]:
        """Take back the batches from `first` on, of which the broker took none, and their sequence numbers."""
        taken = []
        while self._sent and self._sent[-1] is not first:
            taken.append(self._sent.pop())
        taken.append(self._sent.pop())
        self._next_sequence = first.base_sequence
        self._is_closed = self._is_known = False
        return taken[::-1]


def _patched(batch: Buffer, producer_id: int, producer_epoch: int, base_sequence: int) -> bytearray | memoryview:
    """As `RecordBatch.with_producer`, but in place where it can be written: a copy costs as much as its new CRC."""
    data = batch if isinstance(batch, memoryview) and not batch.readonly else bytearray(batch)
    layout.stamp(data, 0, -1)
    layout.write_producer(data, producer_id, producer_epoch, base_sequence)
    layout.write_crc(data, crc32c(data, layout.CRC_COVERS_FROM))
    return data


def connection_lost(why: str) -> BrokerAnswer:
    """The answer of a broker that gave none: the batch may have been taken or not."""
    return BrokerAnswer(Code.NETWORK_EXCEPTION, -1, why)


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
