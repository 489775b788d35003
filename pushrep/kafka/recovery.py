"""What a session does after a failure, and at its beginning: read what the topic holds, and go on after that.

    reaction              what is done with the pipeline
    RETRY, REFRESH        the same bytes again after a pause; REFRESH asks who leads
    CHECK_TOPIC           the same, if the topic is still the one it was: else the session ends with TopicReplaced
    RESYNC                the session lets the partition begin anew: it is fenced again, or gets a new producer id, and
                          our records in it are matched from the last known offset on
    SPLIT                 unacknowledged records are read again from the log, in smaller pieces
    ISOLATE               the same: up to the refused record, then this record alone
    STOP                  the same, and the log partition waits until somebody acts; so it does at a record that is
                          refused alone

Nothing is in flight then. A request of a broken connection may still be in a broker's queue; what it appends later
continues the topic's records in order and without holes, so a reader's filter drops the second copies.

TopicContents reads a topic for an outbox that nobody has open: for commands, or if its progress file is lost:

log partition 3 in partition 1 of the topic, 2 in 0   ─▶   2 of its 4 partitions were used
held, contested                                       ─▶   what a rebase appends again
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import itemgetter
from shlex import quote
from typing import Any, Protocol, TypeVar

import numpy as np

from filtering import StreamMetadata
from filtering.retry import Backoff, RetryPolicy, ask_in_background
from pushrep.env import Clock
from pushrep.kafka.answers import AnswerReaction, Code
from pushrep.kafka.cluster import UNREACHABLE, Cluster, KnownBrokers, PartitionBounds, broker_refused, right_missing
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import (
    BeginsAnew,
    DestinationRefused,
    KafkaUnreachable,
    RefusedByTopic,
    ShippingError,
    TopicLostRecords,
    TopicMissing,
    TopicReplaced,
    skip_command,
)
from pushrep.kafka.pipeline import BatchPiece, Pipeline, SentBatch
from pushrep.kafka.progress import OffsetRanges, ShippingProgress, counts_of
from pushrep.kafka.resume import (
    Matching,
    RecordOrigin,
    holds_record,
    whole_batches,
)
from pushrep.kafka.sink_state import SinkState
from pushrep.kafka.source import UNREADABLE, ShippedPartition
from pushrep.kafka.topic import TopicFacts, look_at_topic
from pushrep.log.errors import is_shortage
from pushrep.records import RecordBatch

_LOG = logging.getLogger("pushrep.kafka")
_T = TypeVar("_T")

STOPPED_RETRY_MS, SHORTAGE_RETRY_MS = 5_000, 200
_NEVER_MS = 1 << 62
_LOOKS_AT_END, _LOOK_AT_END_S = 5, 0.3
_LIMITS: Mapping[int, str] = {Code.MESSAGE_TOO_LARGE: "max.message.bytes", Code.RECORD_LIST_TOO_LARGE: "segment.bytes"}
_ONE_BATCH = 1  # byte: a broker answers with one whole batch, whatever its size


class UntilDone(Protocol):
    """The type of `ShippingRecovery.until_done`, for modules that it imports."""

    async def __call__(self, what: Callable[[], Awaitable[_T]], /) -> _T: ...


class ShippingRecovery:
    """See the file's map. `size_max_bytes`: the largest batch that is sent, as far as records can be parted."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a session stands on, and how it ends
        self,
        destination: KafkaDestination,
        facts: TopicFacts,
        cluster: Cluster,
        state: SinkState,
        origin: RecordOrigin,
        clock: Clock,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._destination, self._facts, self._cluster = destination, facts, cluster
        self._state, self._origin, self._fail = state, origin, fail
        self.size_max_bytes = facts.max_message_bytes
        self._failures: dict[int, int] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_refreshing(self) -> bool:
        """Whether brokers are being asked who leads."""
        return self._refreshing is not None and not self._refreshing.done()

    def succeeded(self, partition: int) -> None:
        """Reset this Kafka partition's count of failures; brokers answer again, if they did not."""
        self._state.set_trouble(None)  # of a refresh that failed, and is not made again
        if self._failures.pop(partition, None):
            self._state.set_trouble(None, partition)

    async def refresh(self) -> None:
        """Refresh metadata, then pause; concurrent callers share one request. Raises TopicMissing."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._refreshing)

    async def until_done(self, what: Callable[[], Awaitable[_T]], partition: int | None = None) -> _T:
        """Retry `what` until it succeeds; partition: the Kafka partition that waits for it, None: all do.

        Raises errors that are not retriable.
        """
        failures = 0
        while True:
            try:
                done = await what()
            except UNREACHABLE as error:
                self._state.set_trouble(str(error) or repr(error), partition)
                failures += 1
                await self._pause(failures)
                await self.refresh()
            else:
                if failures:
                    self._state.set_trouble(None, partition)
                return done

    async def resume(self, partition: int, sources: Sequence[ShippedPartition]) -> None:
        """Find out how much of the logs a Kafka partition holds.

        A log that can't be read for that is stopped, and one of which it lacks a record before later ones.

        Raises OutboxDiverged, DestinationAhead, TopicLostRecords, TopicReplaced, BeginsAnew.
        """
        if not sources:
            return
        state, topic = self._state, self._facts.topic
        unreadable = _unproved(sources)
        until_done = partial(self.until_done, partition=partition)
        bounds = await until_done(lambda: self._cluster.bounds(partition))
        known = known_offset(sources, bounds)
        newest = max(source.destination_offset for source in sources)
        lost = partition in state.went_back
        if newest > bounds.end:
            lost |= await until_done(lambda: self._confirmed_end(partition, newest)) < newest
            bounds = await until_done(lambda: self._cluster.bounds(partition))
        lost = lost or not await self._holds_newest(partition, sources)
        known = -1 if lost else known
        at = max(bounds.start, known)
        if 0 <= known < bounds.start:
            state.head_was_cut(f"{topic}-{partition}", known, bounds.start)
        is_whole = _is_whole(known, bounds)
        for source in sources:
            source.rewind()
        logs = [source.log for source in state.sources.values()]
        starts = {
            source.partition: self._first_offset(source, lost=lost)
            for source in sources
            if source.partition not in unreadable
        }
        skipped = {number: source.skipped for number, source in state.sources.items()}
        matching = Matching(self._origin, logs, starts, (topic, partition), skipped, is_whole=is_whole)
        end = await read_partition(self._cluster, until_done, partition, at, matching.match_batch)
        holes = {number: list(found) for number in starts if (found := matching.holes(number))}
        unreadable = matching.unreadable | unreadable
        whole = [source for source in sources if source.partition not in unreadable]
        if lost:
            await until_done(self._look_at_topic)  # raises if it was made again: no loss
            self._check_lost([source for source in whole if source.partition not in holes], matching)
            if len(whole) == len(sources):
                state.went_back.discard(partition)  # only records of others were lost at its end
        for source in sources:
            number = source.partition
            if number in unreadable:
                self._match_later(source, unreadable[number])
            elif number in holes:
                self._stop_at_hole(source, partition, holes[number])
            else:
                self._matched(source, matching, end)

    async def read_others(self, partition: int) -> None:
        """Compare records that others wrote between ours with the logs. Raises OutboxDiverged, DestinationAhead."""
        state = self._state
        logs = [source.log for source in state.sources.values()]
        skipped = {number: source.skipped for number, source in state.sources.items()}
        matching = Matching(self._origin, logs, {}, (self._facts.topic, partition), skipped)
        start = state.unread[partition][0]
        until_done = partial(self.until_done, partition=partition)
        read_to = await read_partition(self._cluster, until_done, partition, start, matching.match_batch)
        end = state.unread[partition][1]
        if read_to < end:
            state.unread[partition] = (read_to, end)
        else:
            del state.unread[partition]

    async def recover(self, pipeline: Pipeline) -> tuple[ShippedPartition, ShippingError] | None:
        """Reopen a drained pipeline; returns a log partition that has to stop, and why.

        The reaction is not RESYNC. Raises TopicReplaced, TopicMissing.
        """
        first, reaction = pipeline.verdict()
        failures = self._failures[pipeline.partition] = self._failures.get(pipeline.partition, 0) + 1
        why = f"{self._facts.topic}-{pipeline.partition}: {first.answer}"
        _LOG.info("%s, so: %s", why, reaction.name)
        if reaction is AnswerReaction.ISOLATE:
            return self._part(pipeline, first)
        if reaction is AnswerReaction.SPLIT:
            await self._look_at_topic()
            self._learn_limit(first)
            return self._part(pipeline, first)
        if reaction is AnswerReaction.STOP:
            self._take_back(pipeline, first)
            return self._state.sources[first.partition], self._why_stopped(first)
        if failures > 1:
            self._state.set_trouble(why, pipeline.partition)
        await self._pause(failures)
        if reaction is AnswerReaction.CHECK_TOPIC:
            await self._look_at_topic()
        if reaction is not AnswerReaction.RETRY:
            await self.refresh()
        pipeline.reopen()
        return None

    def _why_stopped(self, refused: SentBatch) -> ShippingError:
        topic = self._facts.topic
        assert refused.answer is not None, "it is what stops"
        if refused.answer.error_code == Code.TOPIC_AUTHORIZATION_FAILED:
            return right_missing("WRITE", "topic", topic, refused.answer.error_code)
        return ShippingError(f"topic {topic}: {refused.answer}")

    def _part(self, pipeline: Pipeline, first: SentBatch) -> tuple[ShippedPartition, ShippingError] | None:
        """Send the records of a refused batch in smaller pieces. A record that was sent alone: return why it stops."""
        assert first.answer is not None, "it was refused"
        code, _, words, refused = first.answer
        source = self._state.sources[first.partition]
        offsets = source.offsets_of(first)
        if first.has_one_record or code in {Code.INVALID_TIMESTAMP, Code.INVALID_RECORD}:
            source.isolate(first, [number for number, _ in refused])
        self._take_back(pipeline, first)
        if not first.has_one_record or not offsets:  # without: it was skipped meanwhile
            return None
        time_ms = first.batch.header.max_timestamp_ms
        why = f"{Code.name_of(code)} ({(refused and refused[0][1]) or words})"
        if code == Code.INVALID_TIMESTAMP:
            why += f", its time is {np.datetime64(time_ms, 'ms')}Z"
            is_late = time_ms < self._clock.wall_ms()
            setting = self._facts.named(f"message.timestamp.{'before' if is_late else 'after'}.max.ms")
        else:
            why += f" in a batch of {len(first.data)} bytes"
            setting = self._facts.named(_LIMITS.get(code, ""))
        return source, self._refused(source, offsets[0], code, why, setting)

    def check_piece(self, source: ShippedPartition, piece: BatchPiece) -> None:
        """Raise RefusedByTopic for a piece that the topic would not keep: too large, or too old."""
        assert piece.batch is not None, "skipped records are not sent"
        header, facts = piece.batch.header, self._facts
        offset = source.skipped.end_of(piece.start)
        is_stopping = self._destination.on_refused == "stop"  # else the broker has to refuse it before it is parked
        if header.size_bytes > facts.max_message_bytes and header.last_offset_delta == 0 and is_stopping:
            why = f"it makes a batch of {header.size_bytes} bytes"
            limit = facts.named("max.message.bytes")
            raise self._refused(source, offset, Code.MESSAGE_TOO_LARGE, why, limit)
        since_ms = self._clock.wall_ms() - facts.retention_ms
        if facts.retention_ms < 0 or header.max_timestamp_ms >= since_ms or facts.has_append_time:
            return
        if not source.has_since(since_ms):
            time = np.datetime64(header.base_timestamp_ms, "ms")
            why = f"its time is {time}Z, and nothing younger is to be sent, so the topic would delete it on arrival"
            raise self._refused(source, offset, None, why, facts.named("retention.ms"))

    def _refused(
        self, source: ShippedPartition, offset: int, code: int | None, why: str, setting: str
    ) -> RefusedByTopic:
        directory = source.log.path.parent
        topic = self._facts.topic
        return RefusedByTopic(topic, source.partition, offset, directory=directory, code=code, why=why, setting=setting)

    def look_again(self) -> None:
        """Read the topic's settings again in the background, in case they were changed."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_quietly())

    async def _look_quietly(self) -> None:
        try:
            self.size_max_bytes = (await self._look_at_topic()).max_message_bytes
        except DestinationRefused as error:
            self._fail(error)
        except (*UNREACHABLE, TopicReplaced, TopicMissing) as error:
            _LOG.info("%s", error)  # the next batch's answer will decide

    def _take_back(self, pipeline: Pipeline, first: SentBatch) -> None:
        for sent in pipeline.forget(first):
            source = self._state.sources[sent.partition]
            source.in_flight -= 1
            if not source.in_flight:
                source.rewind()

    def _learn_limit(self, refused: SentBatch) -> None:
        """Lower the batch size if a batch below max.message.bytes was refused: segment.bytes is a limit, too, and
        brokers may compress otherwise. A single record is sent alone, however large.
        """
        self.size_max_bytes = self._facts.max_message_bytes
        if len(refused.data) <= self.size_max_bytes and not refused.has_one_record:
            self.size_max_bytes = max(1, len(refused.data) // 2)

    def _matched(self, source: ShippedPartition, matching: Matching, end: int) -> None:
        offset = matching.next_offsets[source.partition]
        if offset > source.acknowledged:
            last = next(iter(source.log.batches(offset - 1, offset)))
            source.on_acknowledged(offset, last.header.crc, end)
        else:
            source.destination_offset = max(source.destination_offset, end)
        source.newest = matching.newest.get(source.partition, source.newest)
        source.rewind()
        self._state.set_trouble(None, ("log", source.partition))
        if source.is_matching:
            source.is_matching, source.stopped, source.stopped_until_ms = False, None, 0

    def _stop_at_hole(self, source: ShippedPartition, partition: int, holes: Sequence[tuple[int, int]]) -> None:
        """Stop the log before the first hole until it is given up; then the topic is read again."""
        (first, end), log, topic = holes[0], source.log, self._facts.topic
        before = next(iter(log.batches(first - 1, first))) if first > log.log_start_offset else None
        source.on_acknowledged(first, 0 if before is None else before.header.crc, -1)
        source.begin_elsewhere()
        source.rewind()
        offsets = str(first) if end == first + 1 else f"{first}-{end - 1}"
        again = skip_command(offsets, source.partition, topic, log.path.parent)
        why = (
            f"{topic}-{partition} lacks offset {offsets} of partition {source.partition} and holds later ones, and "
            f"every filtering reader drops what comes behind its successors. If it was given up before: {again}. Else "
            f"stop the service, then: pushrep outbox rebase {quote(str(log.path.parent))}"
        )
        self._match_later(source, ShippingError(why), _NEVER_MS)

    def _match_later(self, source: ShippedPartition, why: Exception, in_ms: int = STOPPED_RETRY_MS) -> None:
        """Stop the log until it is matched again. For a shortage only let it wait a moment."""
        now_ms, is_short = self._clock.monotonic_ms(), is_shortage(why)
        source.is_matching, source.match_at_ms = True, now_ms + (SHORTAGE_RETRY_MS if is_short else in_ms)
        self._state.set_trouble(str(why) if is_short else None, ("log", source.partition))
        if not is_short:
            source.stop(why, now_ms, source.match_at_ms)

    def _first_offset(self, source: ShippedPartition, *, lost: bool) -> int:
        """The first offset to match: the acknowledged one, or the log's start if the topic lost something."""
        if not lost:
            return source.acknowledged
        since = self._state.progress.same_since(source.partition, source.acknowledged)
        return max(source.log.log_start_offset, since)

    def _check_lost(self, sources: Sequence[ShippedPartition], matching: Matching) -> None:
        """Raise TopicLostRecords for acknowledged records that the topic, read from its start, does not have."""
        lost = {}
        for source in sources:
            held = matching.held.get(source.partition)
            below = [min(end, source.acknowledged) for start, end in held or () if start < source.acknowledged]
            # After the last record that is there: retention may have removed the first ones, which is no loss.
            first = max([matching.next_offsets[source.partition], *below])
            if first < source.acknowledged:
                lost[source.partition] = (first, source.acknowledged)
            else:
                source.destination_offset, source.newest = -1, None
        if lost:
            raise TopicLostRecords(self._facts.topic, lost)

    async def check_topic(self, known_ends: Mapping[int, int]) -> None:
        """Check the topic's settings, and that its partitions still reach `known_ends`.

        Does nothing if no broker answers now. Raises DestinationRefused, TopicReplaced, TopicMissing;
        KafkaUnreachable for a partition that ends below: the session then begins anew and finds out what is lost.
        """
        try:
            self.size_max_bytes = (await self._look_at_topic()).max_message_bytes
            failed: dict[int, KafkaUnreachable] = {}  # the end of a partition without a leader keeps no other unknown
            led = known_ends.keys() & self._cluster.leaders.keys()
            below = await self._below(known_ends, await self._cluster.ends(led, failed))
            if failed:
                await self._cluster.refresh()
        except UNREACHABLE as error:
            _LOG.info("the topic can't be looked at now: %r", error)
            with suppress(*UNREACHABLE):
                await self._cluster.refresh()  # without batches to send, only this shows a new leader
            return
        for partition in below:
            raise self.went_back(partition)

    async def _below(self, known_ends: Mapping[int, int], ends: Mapping[int, int]) -> list[int]:
        doubtful = [partition for partition, known in known_ends.items() if ends.get(partition, known) < known]
        return [one for one in doubtful if await self._confirmed_end(one, known_ends[one]) < known_ends[one]]

    async def check_newest(self, partition: int, sources: Sequence[ShippedPartition]) -> None:
        """Raise KafkaUnreachable, as `check_topic`, if the leader lacks the newest acknowledged record."""
        if not await self._holds_newest(partition, sources):
            raise self.went_back(partition)

    async def _holds_newest(self, partition: int, sources: Sequence[ShippedPartition]) -> bool:
        """Whether a Kafka partition still has our newest record at its offset.

        A topic loses records at its end, so the newest one is lost whenever any is, even if the end has grown again.
        """
        known = [
            (source.newest.destination_offset, source.newest.offset, source.log) for source in sources if source.newest
        ]
        if not known:
            return True
        at, offset, log = max(known, key=itemgetter(0))

        async def look() -> bool:
            data = b""
            try:  # first: usually the record is there, and this is the only request
                data = await self._cluster.fetch(partition, at, _ONE_BATCH)
            except KafkaUnreachable as error:
                if error.error_code != Code.OFFSET_OUT_OF_RANGE:
                    raise
            if data:
                return holds_record(self._origin, log, offset, at, data)
            bounds = await self._cluster.bounds(partition)
            if not bounds.start <= at < bounds.end:
                return at < bounds.start or await self._confirmed_end(partition, at + 1) > at
            raise broker_refused(f"reading {self._facts.topic}-{partition} at {at}", Code.LEADER_NOT_AVAILABLE)

        return await self.until_done(look, partition)

    async def find_shortened(self, known_ends: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Mark the partitions that end below their known end; `resume` then finds what they lost."""
        self._state.went_back.update(await self._below(known_ends, ends))

    def went_back(self, partition: int) -> KafkaUnreachable:
        """Mark the partition, and return the error that ends the session; the next one reads it from its start."""
        self._state.went_back.add(partition)
        return broker_refused(
            f"{self._facts.topic}-{partition} ends below what it had acknowledged", Code.OFFSET_OUT_OF_RANGE
        )

    async def _confirmed_end(self, partition: int, known: int) -> int:
        """The end of a Kafka partition; asked several times if it is below `known`, because a new leader learns it
        late.
        """
        for left in range(_LOOKS_AT_END, 0, -1):
            try:
                end = (await self._cluster.bounds(partition)).end
            except KafkaUnreachable as error:
                _LOG.info("%s", error)
                end = -1
            if end >= known or left == 1:
                break
            await asyncio.sleep(_LOOK_AT_END_S)
        return end if end >= 0 else known

    async def _look_at_topic(self) -> TopicFacts:
        destination = self._cluster.destination
        facts = await in_thread(lambda: look_at_topic(destination, self._facts.topic))
        if facts.cluster_id != self._facts.cluster_id:
            raise KafkaUnreachable(f"a broker of cluster {facts.cluster_id} answered")
        if facts.topic_id != self._facts.topic_id:
            raise TopicReplaced(facts.topic)
        facts.check(batch_bytes=0)  # a lower max.message.bytes loses no record: larger batches are split
        self._facts = facts
        return facts

    async def _refresh(self) -> None:
        try:
            await self._cluster.refresh()
        except KafkaUnreachable as error:
            self._state.set_trouble(str(error))
        else:
            self._state.set_trouble(None)
        await self._pause(1)

    async def _pause(self, failures: int) -> None:
        await asyncio.sleep(backoff_of(self._destination).pause_s(failures))


def _unproved(sources: Sequence[ShippedPartition]) -> dict[int, Exception]:
    """By log partition, the error that keeps it unknown whether its log is the shipped one.

    Raises BeginsAnew if one is another log.
    """
    found: dict[int, Exception] = {}
    for source in sources:
        before = source.acknowledged
        try:
            source.prove()
        except UNREADABLE as error:
            found[source.partition] = error
        if source.acknowledged != before:
            raise BeginsAnew(f"partition {source.partition} is shipped from its start")
    return found


def known_offset(sources: Sequence[ShippedPartition], bounds: PartitionBounds) -> int:
    """The offset up to which a Kafka partition's content is known for all these logs; -1: none."""
    if all(source.is_new for source in sources):
        return bounds.end  # no topic can hold the PID of a new outbox
    if any(source.destination_offset < 0 for source in sources):
        return -1
    return max(source.destination_offset for source in sources)


def _is_whole(known: int, bounds: PartitionBounds) -> bool:
    """Whether nothing was removed between what is known and what is read. known: as of `known_offset`."""
    return max(known, 0) >= bounds.start


async def read_partition(
    cluster: Cluster, until_done: UntilDone, partition: int, at: int, take: Callable[[RecordBatch, int], None]
) -> int:
    """Call `take` with each batch of a Kafka partition from offset `at` up to its present end, which is returned.

    `take` gets whole batches, and the offset in each from which on its records count.
    """
    end = (await until_done(lambda: cluster.bounds(partition))).end

    async def fetch() -> bytes:
        nonlocal at
        try:
            return await cluster.fetch(partition, at)
        except KafkaUnreachable as error:
            if error.error_code == Code.OFFSET_OUT_OF_RANGE:  # retention removes records meanwhile
                at = max(at, (await cluster.bounds(partition)).start)
            raise

    while at < end:
        before = at
        data = await until_done(fetch)
        for batch in whole_batches(data):
            if batch.header.next_offset > at:
                take(batch, at)
                at = batch.header.next_offset
        if at == before:
            raise broker_refused(f"partition {partition} gives nothing at {at}", Code.OFFSET_OUT_OF_RANGE)
    return max(at, end)


def backoff_of(destination: KafkaDestination) -> Backoff:
    """The growing pauses after failures."""
    longest_ms = max(destination.retry_backoff_ms, destination.retry_backoff_max_ms)
    return Backoff(destination.retry_backoff_ms / 1000, longest_ms / 1000, least=1.0)


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run blocking work in a thread of its own; unlike with the loop's executor, a cancelled caller does not wait for
    it.
    """
    return await asyncio.wrap_future(ask_in_background(work, "pushrep-kafka-admin"))


async def unless_set(stopped: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """What `work` returns; None if the event is set before: then it is cancelled."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicContents:
    """By log partition: `held`, `contested`, `holes`: as in Matching; `first`: the first offset not known to be held.

    progress: with the topic as it is now. ends: partition of the topic to the offset up to which it was read.
    """

    progress: ShippingProgress
    held: Mapping[int, OffsetRanges]
    contested: Mapping[int, OffsetRanges]
    holes: Mapping[int, OffsetRanges]
    first: Mapping[int, int]
    ends: Mapping[int, int]


async def read_contents(
    destination: KafkaDestination, facts: TopicFacts, state: SinkState, origin: RecordOrigin
) -> TopicContents:
    """Read what a topic holds, from where it is known on.

    Raises KafkaUnreachable, DestinationRefused, BrokerError, and what is UNREADABLE: a log can't be compared with it.
    """
    for source in state.sources.values():
        source.prove()
    if state.progress.topic_id not in {None, facts.topic_id}:
        state.void()
    cluster = Cluster(destination, facts.topic, KnownBrokers(facts.cluster_id))
    until_done = retrying(destination, cluster)
    try:
        await until_done(cluster.refresh)
        used = None
        if not state.progress.epochs:
            places = await places_of_records(cluster, origin, facts.partitions, until_done)
            used = used_partitions(facts.topic, facts.partitions, places)
        progress = state.progress.with_topic(facts.topic_id, used or facts.partitions, state.pid_epoch)
        at: dict[int, list[ShippedPartition]] = {}
        for source in state.sources.values():
            at.setdefault(progress.topic_partition(source.partition, source.acknowledged), []).append(source)
        held: dict[int, OffsetRanges] = {}
        contested: dict[int, OffsetRanges] = {}
        holes: dict[int, OffsetRanges] = {}
        first = {number: source.acknowledged for number, source in state.sources.items()}
        ends = {}
        for number in range(max(counts_of(progress))):
            sources = at.get(number, [])
            bounds = await until_done(lambda number=number: cluster.bounds(number))  # type: ignore[misc]
            known = known_offset(sources, bounds) if sources else 0
            matching = Matching(
                origin,
                [source.log for source in state.sources.values()],
                {source.partition: source.acknowledged for source in sources},
                (facts.topic, number),
                {one: progress.skipped_of(one) for one in state.sources},
                is_strict=False,
                is_whole=_is_whole(known, bounds),
            )
            at_first = max(bounds.start, known)
            ends[number] = await read_partition(cluster, until_done, number, at_first, matching.match_batch)
            holes |= {source.partition: matching.holes(source.partition) for source in sources}
            for error in matching.unreadable.values():
                raise error
            first |= matching.next_offsets
            for found, into in ((matching.held, held), (matching.contested, contested)):
                for partition, ranges in found.items():
                    into[partition] = OffsetRanges([*into.get(partition, ()), *ranges])
    finally:
        await cluster.close()
    return TopicContents(progress=progress, held=held, contested=contested, holes=holes, first=first, ends=ends)


def retrying(destination: KafkaDestination, cluster: Cluster) -> UntilDone:
    """Retries for a while, with growing pauses and refreshed metadata."""
    policy = RetryPolicy(
        is_retriable=lambda error: isinstance(error, UNREACHABLE), backoff=backoff_of(destination), attempts=_ATTEMPTS
    )

    async def until_done(what: Callable[[], Awaitable[_T]], /) -> _T:
        calls = count()

        async def attempt() -> _T:
            if next(calls):
                await cluster.refresh()
            return await what()

        return await policy.call_async(attempt)

    return until_done


async def places_of_records(
    cluster: Cluster, origin: RecordOrigin, partitions: int, until_done: UntilDone
) -> set[tuple[int, int]]:
    """(log partition, partition of the topic) of every record there that has a PID of the outbox.

    Reads all that the topic holds. Raises what UNREACHABLE names.
    """
    found = set()

    def note(batch: RecordBatch, _: int) -> None:
        for record in () if batch.header.is_control else batch.records():
            metadata = origin.metadata_of(record)
            if metadata is not None and origin.epoch_of(metadata) is not None:
                unpacked = StreamMetadata.try_unpack(metadata)
                if unpacked is not None:
                    found.add((unpacked.partition, number))

    for number in range(partitions):
        await read_partition(cluster, until_done, number, 0, note)
    return found


def used_partitions(topic: str, partitions: int, places: Collection[tuple[int, int]]) -> int | None:
    """The largest partition count that agrees with the place of every record; None without records.

    Raises DestinationRefused if there is none: several were used in turn.
    """
    if not places:
        return None
    for used in range(partitions, 0, -1):
        if all(at == log % used for log, at in places):
            return used
    raise DestinationRefused(
        topic,
        "partitions",
        partitions,
        "it holds records of this outbox by several numbers of partitions, and destinations.json, which knows from "
        "which offsets on each was used, is missing: restore it from a copy, or ship to a new topic",
    )
