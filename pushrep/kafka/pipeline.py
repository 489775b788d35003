"""One Kafka partition's pipeline: the next batch, its sequence number, and the effect of an answer. Pure.

    unacknowledged, in order:   [acked] [in flight] [in flight] [in flight]  < 5      next_sequence ─▶ the next batch
                                   └─ leaves when everything before it is acknowledged

A failure closes the pipeline: nothing more is sent until all answers are in. Then the first unacknowledged batch
decides: the same bytes again in the same order, or a new producer id after what the topic holds. The first batch under
an id is sent alone, because a broker without state of the id accepts any first sequence number: of several batches a
later one could land first. So is a batch after a long silence, when the broker may have forgotten the id; after a
failure or over a new connection, because a new leader may lack the id's state; and an old batch, because brokers
measure an id's silence by the batch's newest timestamp, not by its arrival.

A sealed batch above the topic's limit is split between records (`pieces_of`): only then are records encoded again.

    batch [100, 180), 900 KB, limit 500 KB  ─▶  [100, 140) [140, 180)              each below the limit as it is sent
    record 111 was refused                  ─▶  [100, 111) [111, 112) [112, 180)   what is before it, then it alone
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pushrep.kafka.answers import AnswerReaction, BrokerAnswer, Code, reaction_to
from pushrep.kafka.progress import OffsetRanges
from pushrep.records import Codec, Record, RecordBatch, encode_batch

IN_FLIGHT_MAX = 5
"""Brokers recognise the last five batches of a producer (ProducerStateEntry.NUM_BATCHES_TO_RETAIN)."""
_SEQUENCES = 1 << 31  # sequence numbers wrap to 0 here


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch to be sent: records [start, end) of a log partition under `base_sequence`.

    log_crc: of the sealed batch in the log, of which this is all or a part. data: the bytes to send; the batch may have
    been patched in place, so don't read it any more. is_old: its timestamps are so old that a broker may forget the
    producer at once.
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
    """Its offset in the topic; None: not acknowledged, -1: acknowledged, but the broker does not know where."""
    answer: BrokerAnswer | None = None
    """The last error answer."""
    sent_ns: int = 0
    """When it was sent last, for its span; 0 without tracing."""

    @property
    def is_acknowledged(self) -> bool:
        return self.base_offset is not None

    @property
    def has_one_record(self) -> bool:
        return self.batch.header.last_offset_delta == 0


class Pipeline:
    """The unacknowledged batches of one Kafka partition. Has no clock and no network."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.producer_id, self.producer_epoch = -1, -1
        self._next_sequence = 0
        self._sent: deque[SentBatch] = deque()
        self.in_flight = 0
        """How many batches wait for an answer."""
        self._is_known = False  # whether the broker has state of our id
        self._is_closed = False

    def begin(self, producer_id: int, producer_epoch: int) -> None:
        """Go on under another producer id. Nothing is in flight, and unacknowledged records are read again."""
        assert not self.in_flight, "a retry of the old id could land between the new one's batches"
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self._next_sequence, self._is_known, self._is_closed = 0, False, False
        self._sent.clear()

    @property
    def producer(self) -> tuple[int, int]:
        """The producer id and epoch of its batches."""
        return self.producer_id, self.producer_epoch

    def has_been_idle(self) -> None:
        """It has been idle for so long that the broker may have forgotten the id: the next batch is sent alone."""
        if not self._sent:
            self._is_known = False

    def meets_another(self) -> None:
        """The new leader or connection may not know our producer id: the next batch is sent alone."""
        self._is_known = False

    @property
    def is_empty(self) -> bool:
        """Whether everything that was sent is acknowledged."""
        return not self._sent

    @property
    def is_drained(self) -> bool:
        """Whether a failure closed it and all answers are in: then `verdict` says what to do."""
        return self._is_closed and not self.in_flight

    @property
    def may_send(self) -> bool:
        """Whether one more batch may be sent now."""
        if self._is_closed or self.producer_id < 0:
            return False
        is_remembered = self._is_known and not any(one.is_old for one in self._sent)
        return self.in_flight < (IN_FLIGHT_MAX if is_remembered else 1)

    def waiting(self) -> SentBatch | None:
        """The next batch to send again, before any new one; None if there is none."""
        return next((one for one in self._sent if not one.in_flight and not one.is_acknowledged), None)

    @property
    def has_room(self) -> bool:
        """Whether a new batch may be added: at most five are unacknowledged."""
        return len(self._sent) < IN_FLIGHT_MAX

    def add(self, sent: SentBatch) -> None:
        """Give a new batch the next sequence number, and patch it into its bytes."""
        sent.base_sequence = self._next_sequence
        sent.data = sent.batch.with_producer(self.producer_id, self.producer_epoch, sent.base_sequence)
        offsets = sent.batch.header.last_offset_delta + 1
        self._next_sequence = (self._next_sequence + offsets) % _SEQUENCES
        self._sent.append(sent)

    def on_sent(self, sent: SentBatch) -> None:
        """The batch was sent."""
        sent.in_flight = True
        self.in_flight += 1

    def on_answer(self, sent: SentBatch, answer: BrokerAnswer) -> Iterator[SentBatch]:
        """Returns the batches that are acknowledged now together with everything before them, in log order."""
        sent.in_flight = False
        self.in_flight -= 1
        if reaction_to(answer.error_code) is AnswerReaction.DONE:
            sent.base_offset, sent.answer = answer.base_offset, None
            self._is_known = not sent.is_old  # by an old batch's time the id may be forgotten before the next batch
            while self._sent and self._sent[0].is_acknowledged:
                yield self._sent.popleft()
            self._is_closed = self._is_closed and bool(self._sent)
        else:
            sent.answer = answer
            self._is_closed = True

    def verdict(self) -> tuple[SentBatch, AnswerReaction]:
        """For a drained pipeline: the first unacknowledged batch, and the reaction to its answer."""
        assert self.is_drained, "an answer that is still to come may change it"
        first = next(one for one in self._sent if not one.is_acknowledged)
        answer = first.answer
        if answer is None:  # it was not sent again after a later one failed
            return first, AnswerReaction.RETRY
        reaction = reaction_to(answer.error_code)
        is_refused = reaction in {AnswerReaction.SPLIT, AnswerReaction.ISOLATE, AnswerReaction.STOP}
        if is_refused and any(one.is_acknowledged for one in self._sent):
            # A later one is in the topic, so this one is, too; its answer was lost.
            return first, AnswerReaction.RESYNC
        return first, reaction

    def reopen(self) -> None:
        """Send unacknowledged batches again, the same bytes in the same order."""
        for one in self._sent:
            one.answer = None
        self._is_closed = self._is_known = False

    def forget(self, first: SentBatch) -> list[SentBatch]:
        """Remove the batches from `first` on, none of which the broker took, and reuse their sequence numbers."""
        taken = []
        while self._sent and self._sent[-1] is not first:
            taken.append(self._sent.pop())
        taken.append(self._sent.pop())
        self._next_sequence = first.base_sequence
        self._is_closed = self._is_known = False
        return taken[::-1]


def connection_lost(why: str) -> BrokerAnswer:
    """Stands for a missing answer: the batch may be in the topic or not."""
    return BrokerAnswer(Code.NETWORK_EXCEPTION, -1, why)


_NONE = OffsetRanges()


class BatchPiece(NamedTuple):
    """Records [start, end) of the log as one batch; batch is None if all of them are skipped."""

    start: int
    end: int
    batch: RecordBatch | None


def pieces_of(
    batch: RecordBatch, start: int, size_max_bytes: int, skipped: OffsetRanges, alone: OffsetRanges = _NONE
) -> Iterator[BatchPiece]:
    """The batch's records from offset `start` on, without the `skipped` ones: the batch itself if it fits.

    A record of `alone`, and one that does not fit, is a piece of its own. Raises CorruptRecordBatch.
    """
    header = batch.header
    end = header.next_offset
    is_whole = start <= header.base_offset and not skipped.meets(start, end) and not alone.meets(start, end)
    if is_whole and header.size_bytes <= size_max_bytes:
        yield BatchPiece(header.base_offset, end, batch)
        return
    records = [one for one in batch.records() if one.offset >= start and one.offset not in skipped]
    at, begin = 0, start
    while at < len(records):
        count = next((n - at for n in range(at, len(records)) if records[n].offset in alone), len(records) - at) or 1
        piece = _encoded(header.codec, records[at : at + count])
        while piece.header.size_bytes > size_max_bytes and count > 1:
            # By size, with a margin: parts of a batch of unequal records are not of equal size.
            share = size_max_bytes / piece.header.size_bytes
            count = max(1, min(count // 2 if share < 0.9 else count - 1, int(count * share * 0.95)))
            piece = _encoded(header.codec, records[at : at + count])
        at += count
        piece_end = records[at].offset if at < len(records) else end
        yield BatchPiece(begin, piece_end, piece)
        begin = piece_end
    if begin < end:
        yield BatchPiece(begin, end, None)


def size_alone(record: Record) -> int:
    """The size in bytes of the batch that is sent for this record alone."""
    return _encoded(Codec.NONE, [record]).header.size_bytes


def _encoded(codec: Codec, records: Sequence[Record]) -> RecordBatch:
    return encode_batch(
        [one.value for one in records],
        keys=[one.key for one in records],
        headers=[one.headers for one in records],
        timestamps_ms=[one.timestamp_ms for one in records],
        codec=codec,
    )
