"""A session ships to one topic until something about it changes: what is sent to which broker, and when.

    sources ─▶ Pipeline (one per Kafka partition) ─▶ requests per broker, one batch a partition ─▶ answers
       ▲ look: what is stable now                       < 5 on the way to each broker         │
       └───────────── recovery.py: again, in parts, under a new producer id ◀── a failure ────┘

Each Kafka partition begins by itself, as soon as it has a leader (`PartitionState` in fence_rules.py): what it lost is
looked for, it is fenced, what it holds is matched, and its pipeline is opened. None waits for another.

Runs in one event loop, so it needs no locks.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from filtering import tracing
from filtering.retry import ask_in_background
from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.kafka.answers import AnswerReaction, BrokerAnswer, Code
from pushrep.kafka.cluster import DOES_NOT_ANSWER, UNREACHABLE, Cluster, Connection
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import KafkaUnreachable, RefusedByTopic, ShippingError, TopicLostRecords
from pushrep.kafka.fence_driver import Fencing
from pushrep.kafka.fence_rules import PartitionState
from pushrep.kafka.parking import ParkingLog
from pushrep.kafka.pipeline import Pipeline, SentBatch, connection_lost
from pushrep.kafka.progress import ShippedRecord
from pushrep.kafka.recovery import SHORTAGE_RETRY_MS, STOPPED_RETRY_MS, ShippingRecovery
from pushrep.kafka.requests import ProduceBatches, answers_of
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink_state import FENCE, IN_TROUBLE_MS, SinkState
from pushrep.kafka.source import ShippedPartition
from pushrep.kafka.topic import TopicFacts
from pushrep.log import LogClosed, SegmentLog
from pushrep.log.errors import is_shortage

_LOG = logging.getLogger("pushrep.kafka")

_REQUEST_BYTES = 1 << 20  # as Kafka's max.request.size; a larger batch is sent alone
_REQUESTS_IN_FLIGHT_MAX = 5
_LOOK_S_MIN, _LOOK_S_MAX = 0.002, 0.02
_LOOK_SHARE = 50  # polling logs takes 1/50 of the time at most: ten thousand idle partitions take 20 ms
_IDLE_MAX_MS = 10_000
_AT_A_TIME = 16  # partitions of a broker that are read at once, when thousands of them begin
_SILENT_EVERY_S = 0.5
_LOSSES_S = 5.0  # how long one loss waits for those of other partitions, which are told with it
WATCH_S = 30.0
"""How often the topic's settings and ends are read again; contract: once a minute at least."""


class _Channel:
    """A broker's unanswered requests, and the end of its throttling."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.blocked_until_s = 0.0
        self.connection: Connection | None = None
        self.connecting: asyncio.Task[None] | None = None


class SinkSession:
    """See the file's map. `run` returns when `stop` was called; it raises what ends the session."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a session stands on
        self,
        destination: KafkaDestination,
        facts: TopicFacts,
        cluster: Cluster,
        state: SinkState,
        origin: RecordOrigin,
        clock: Clock,
        fencing: Fencing,
    ) -> None:
        self._destination, self._facts, self._cluster = destination, facts, cluster
        self._state, self._clock = state, clock
        self._began: Callable[[], object] | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._pipelines: dict[int, Pipeline] = {}
        self._sources: dict[int, list[ShippedPartition]] = {}
        self._nodes: dict[int, int] = {}  # by Kafka partition, the broker that has its unanswered batches
        self._connections: dict[int, Connection | None] = {}  # over which a partition's newest record was found
        self._meeting: set[int] = set()
        self._last_answer_ms: dict[int, int] = {}
        self._idle_ms = min(_IDLE_MAX_MS, facts.producer_id_expiration_ms // 2)
        self._ready: dict[int, None] = {}
        self._channels: dict[int, _Channel] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answers: set[asyncio.Task[Any]] = set()  # of them, those that wait for a broker's answer to batches
        self._failure: BaseException | None = None
        self._look_at_s = 0.0
        self._ends: dict[int, int] = {}  # by Kafka partition, its acknowledged end
        self._recovery = ShippingRecovery(destination, facts, cluster, state, origin, clock, self._fail)
        has_shipped = any(source.destination_offset >= 0 for source in state.sources.values())
        self._fence = fencing.driver(self, facts, cluster, has_shipped=has_shipped)
        self._unfenced_id: asyncio.Task[tuple[int, int]] | None = None
        self._at_a_time: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_A_TIME))
        self._looking: set[asyncio.Task[Any]] = set()
        self._noted_leaders: object = None
        self._noted_silent: set[int] = set()
        self._silent_at_s = 0.0

    def stop(self) -> None:
        """End soon, sending nothing new."""
        self._stopping.set()
        self._wake.set()

    async def run(self, began: Callable[[], object]) -> None:
        """Ship; `began` is called once the content of each partition with a leader is known.

        Raises TopicReplaced, TopicMissing, KafkaUnreachable, OutboxDiverged, DestinationAhead, TopicLostRecords,
        OutboxTakenOver, DestinationRefused, BeginsAnew, LogClosed.
        """
        self._began = began
        try:
            self._state.begin()
            self._ends = self._state.known_ends()
            for source in self._state.sources.values():
                source.in_flight = 0
                source.rewind()  # first: unacknowledged records may belong to another Kafka partition
                self._place(source)
            self.run_beside(self._fence.run())
            for partition in self._state.unread:
                self.run_beside(self._read_others(partition))
            self.run_beside(self._watch())
            while not self._stopping.is_set():
                self._poll_logs()
                self._dispatch()
                self._note_leaders()
                self._note_silent()
                self._note_begun()
                if self._failure is not None:
                    if isinstance(self._failure, TopicLostRecords) and self._looking:
                        # It stops shipping to the whole topic: those of other partitions are told with it.
                        await asyncio.wait(self._looking, timeout=_LOSSES_S)
                    raise self._failure
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._look_at_s - self._loop.time())):
                        await self._wake.wait()
        finally:
            await self._end()

    def _note_begun(self) -> None:
        """Call `began` once no partition with a leader is on its way to the first batch."""
        if self._began is None:
            return
        leaders, begun = self._cluster.leaders, self._begun()
        if begun and all(one in begun or one not in leaders for one in self._pipelines):
            self._began()
            self._began = None

    def _begun(self) -> set[int]:
        """The partitions whose content is known."""
        return {partition for partition in self._pipelines if self._fence.partitions[partition].has_shipped}

    def _note_silent(self) -> None:
        """Note the brokers that take no connection or give no answer, once a second."""
        if self._loop.time() < self._silent_at_s:
            return
        self._silent_at_s = self._loop.time() + _SILENT_EVERY_S
        silent = self._cluster.silent(IN_TROUBLE_MS / 1000)
        for node, (why, age_s) in silent.items():
            self._state.set_trouble(why, ("silent", node), age_ms=int(1000 * age_s))
        for node in self._noted_silent - silent.keys():
            self._state.set_trouble(None, ("silent", node))
        self._noted_silent = set(silent)

    def _note_leaders(self) -> None:
        """Note the partitions without a leader; brokers that lead nothing any more are not missed."""
        leaders = self._cluster.leaders
        if leaders is self._noted_leaders:
            return
        self._noted_leaders = leaders
        for partition in self._pipelines:
            why = None if partition in leaders else f"{self._facts.topic}-{partition} has no leader"
            self._state.set_trouble(why, ("leader", partition))
        for node in self._channels.keys() - leaders.values():
            self._state.set_trouble(None, ("broker", node))

    # -- how a partition begins ------------------------------------------------------------------------------------

    async def ends(self, node: int, partitions: Collection[int]) -> dict[int, int]:
        """As in FencedSession."""
        failed: dict[int, KafkaUnreachable] = {}
        with self._reading():
            try:
                ends = await self._cluster.ends(partitions, failed)
            except UNREACHABLE as error:
                _LOG.info("broker %d does not tell the ends of its partitions: %r", node, error)
                ends = {}
        if len(ends) < len(partitions):
            self.refresh_soon()
        return ends

    async def check_loss(self, partition: int, end: int) -> None:
        """As in FencedSession. Raises as `resume`."""
        with self._reading():
            await self._recovery.find_shortened({partition: self._ends.get(partition, 0)}, {partition: end})
            if partition in self._state.went_back and partition in self._pipelines:
                await self._recovery.resume(partition, self._sources[partition])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What runs in here may find a loss."""
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        self._looking.add(task)
        try:
            yield
        finally:
            self._looking.discard(task)

    def on_marked(self, partition: int) -> None:
        """As in FencedSession."""
        one, pipeline = self._fence.partitions[partition], self._pipelines.get(partition)
        if pipeline is not None and one.state is PartitionState.MATCHED:
            self.run_beside(self._match(partition, pipeline))
            return
        if pipeline is not None:
            if one.producer is not None and pipeline.producer != one.producer:
                for source in self._sources.get(partition, ()):
                    # Else a topic whose retention removed markers would seem to have lost records.
                    if one.marked_from is not None and source.destination_offset == one.marked_from:
                        source.destination_offset = one.read_to
                pipeline.begin(*one.producer)
            self.go_on(partition)
        self._fence.partitions.on_matched(partition, self._clock.monotonic_ms())

    def go_on(self, partition: int) -> None:
        """As in FencedSession."""
        if partition in self._pipelines:
            self._ready[partition] = None
            self._wake.set()

    async def _match(self, partition: int, pipeline: Pipeline) -> None:
        """Find out what the partition holds, and open its pipeline."""
        known: list[ShippedPartition] = []
        async with self._at_a_time[self._cluster.leaders.get(partition, -1)]:
            self._connections[partition] = self._cluster.connection_of(partition)
            with self._reading():
                while sources := [one for one in self._sources[partition] if one not in known]:
                    await self._recovery.resume(partition, sources)
                    known += sources
        self._ends[partition] = max(0, *(one.destination_offset for one in known), 0)
        producer = self._fence.partitions[partition].producer
        pipeline.begin(*(producer or await self._new_producer_id(pipeline)))
        self._fence.partitions.on_matched(partition, self._clock.monotonic_ms())
        self._ready[partition] = None
        self._state.moved()

    async def _new_producer_id(self, pipeline: Pipeline) -> tuple[int, int]:
        """A producer id from the brokers: one for all that begin, another for one that has lost its place."""
        if pipeline.producer_id >= 0:
            return await self._recovery.until_done(self._cluster.init_producer_id)
        if self._unfenced_id is None:
            self._unfenced_id = asyncio.ensure_future(self._recovery.until_done(self._cluster.init_producer_id))
        return await asyncio.shield(self._unfenced_id)

    def acknowledged_end(self, partition: int) -> int | None:
        """As in FencedSession."""
        pipeline = self._pipelines.get(partition)
        return None if pipeline is not None and not pipeline.is_empty else self._ends.get(partition, 0)

    def note_fence(self, why: str | None) -> None:
        """As in FencedSession."""
        self._state.set_trouble(why, FENCE)

    async def _watch(self) -> None:
        """Detect changes of the topic and its leaders that no answer to a batch would show."""
        while True:
            await asyncio.sleep(WATCH_S)
            begun = self._begun()
            shipped = ((partition, sources) for partition in begun if (sources := self._sources[partition]))
            known = {partition: max(one.destination_offset for one in sources) for partition, sources in shipped}
            await self._recovery.check_topic({**self._fence.partitions.marker_ends(), **known})
            for partition in begun:
                if (connection := self._cluster.connection_of(partition)) is not None:
                    self._has_met(partition, connection)

    async def _end(self) -> None:
        """Wait a moment for outstanding answers, so that the next start has less to match."""
        for task in self._tasks - self._answers:
            task.cancel()
        if self._unfenced_id is not None:
            self._unfenced_id.cancel()
        if self._answers:
            await asyncio.wait(self._answers, timeout=1.0 if self._stopping.is_set() else 0.0)
        for task in self._tasks:  # late answers, and what an answer began
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _place(self, source: ShippedPartition) -> None:
        """Assign a log partition to the Kafka partition of its next record, by the partition count of its PID epoch."""
        for sources in self._sources.values():
            if source in sources:
                sources.remove(source)
        progress = self._state.progress
        partition = progress.topic_partition(source.partition, source.next_offset)
        if 0 < source.next_offset == progress.same_since(source.partition, source.next_offset):
            source.begin_elsewhere()
        if partition not in self._pipelines:
            self._pipelines[partition], self._sources[partition] = Pipeline(partition), []
        self._sources[partition].append(source)
        source.boundary = progress.next_boundary(source.partition, source.next_offset)

    # -- what there is to send -------------------------------------------------------------------------------------

    def _poll_logs(self) -> None:
        now_s = self._loop.time()
        if now_s < self._look_at_s:
            return
        now_ms = self._clock.monotonic_ms()
        for partition, sources in self._sources.items():
            for source in sources:
                has_more = source.poll()
                if source.match_at_ms is not None and now_ms >= source.match_at_ms:
                    source.match_at_ms = None
                    self.run_beside(self._join(partition, source))
                elif has_more:
                    self._ready[partition] = None
        took_s = self._loop.time() - now_s
        is_busy = any(channel.in_flight for channel in self._channels.values())
        self._look_at_s = now_s + max(_LOOK_S_MIN if is_busy else _LOOK_S_MAX, took_s * _LOOK_SHARE)

    def _next_of(self, pipeline: Pipeline) -> SentBatch | None:
        if not pipeline.may_send:
            return None
        waiting = pipeline.waiting()
        if waiting is not None:
            self._state.counts.retried += 1
            return waiting
        if not pipeline.has_room or self._fence.partitions[pipeline.partition].state is not PartitionState.SHIPPING:
            return None
        sources = self._sources[pipeline.partition]
        for _ in range(len(sources)):
            source = sources.pop(0)
            sources.append(source)
            sent = self._next_piece(source, pipeline)
            if sent is not None:
                return sent
        return None

    def _next_piece(self, source: ShippedPartition, pipeline: Pipeline) -> SentBatch | None:
        if source.boundary is not None and source.next_offset >= source.boundary:
            if not source.in_flight:
                self._cross(source)
            return None
        rests = self._clock.monotonic_ms() < source.stopped_until_ms
        if source.is_matching or rests or self._is_parking(source):
            return None
        before = source.acknowledged
        try:
            sent = source.next_piece(self._recovery.size_max_bytes, self._recovery.check_piece)
        except LogClosed:
            raise
        except (PushrepError, OSError) as error:  # the topic would not keep it, or the log can't be read there
            if not source.in_flight:  # else it is met again once all before it is acknowledged
                self._refuse(source, error)
            return None
        self._state.set_trouble(None, ("log", source.partition))
        if source.acknowledged != before:  # what is skipped counts as acknowledged
            self._state.moved()
        if sent is not None:
            forgotten_ms = self._clock.wall_ms() - self._facts.producer_id_expiration_ms // 2
            sent.is_old = not self._facts.has_append_time and sent.batch.header.max_timestamp_ms < forgotten_ms
            idle_since_ms = self._last_answer_ms.get(pipeline.partition, 0)
            if self._clock.monotonic_ms() - idle_since_ms > self._idle_ms:
                pipeline.has_been_idle()
            pipeline.add(sent)
            source.in_flight += 1
        return sent

    def _cross(self, source: ShippedPartition) -> None:
        """The next record is of a later PID epoch, which may go to another partition."""
        self._place(source)
        source.is_matching = True
        partition = self._state.progress.topic_partition(source.partition, source.next_offset)
        self.run_beside(self._join(partition, source))

    async def _join(self, partition: int, source: ShippedPartition) -> None:
        """Match another log with a Kafka partition; if it has not begun yet, `_match` does it."""
        one = self._fence.partitions[partition]
        if not one.has_shipped:
            return
        await self._recovery.resume(partition, [source])
        pipeline = self._pipelines[partition]
        if pipeline.producer_id < 0 and pipeline.is_empty:  # the topic's partition was not used before
            pipeline.begin(*(one.producer or await self._new_producer_id(pipeline)))
        self._ready[partition] = None

    def _refuse(self, source: ShippedPartition, error: Exception) -> None:
        """Park the record that the error names, or stop its log partition there."""
        parking, now_ms = self._state.parking, self._clock.wall_ms()
        if parking is not None and isinstance(error, RefusedByTopic) and self._destination.on_refused == "park":
            why_not = parking.why_not(error, source.parked_in_a_row, now_ms)
            if why_not is None:
                source.stopped = None
                park = partial(self._park, parking, source.log, error, now_ms)
                source.parking = ask_in_background(park, "pushrep-kafka-parking")
                return
            refused, error = error, ShippingError(f"not parked: {why_not}. {error}")
            error.__cause__ = refused
        self._stop_source(source, error)

    def _park(self, parking: ParkingLog, log: SegmentLog, error: RefusedByTopic, now_ms: int) -> None:
        """In a thread of its own, which goes on if the session ends: the next one waits for it."""
        (record,) = log.records(error.offset, error.offset + 1)
        parking.park(record, error, now_ms)
        self._state.change(lambda progress: progress.skipping(parking.skips(error.topic)))
        _LOG.warning("parked: %s", error)

    def _is_parking(self, source: ShippedPartition) -> bool:
        """Whether the source waits for the parking log. What is there by now is passed. Raises LogClosed."""
        if source.parking is None or not source.parking.done():
            return source.parking is not None
        failure, source.parking = source.parking.exception(), None
        if failure is None:
            source.parked_in_a_row += 1
            source.skip(self._state.progress.skipped_of(source.partition))
            return False
        if isinstance(failure, LogClosed) or not isinstance(failure, OSError | PushrepError):
            raise failure
        self._stop_source(source, failure)
        return True

    def _stop_source(self, source: ShippedPartition, error: Exception) -> None:
        """Stop a log partition until it is tried again; for a shortage let it only wait a moment."""
        now_ms = self._clock.monotonic_ms()
        if is_shortage(error) or (error.__cause__ is not None and is_shortage(error.__cause__)):
            source.stopped_until_ms = now_ms + SHORTAGE_RETRY_MS
            self._state.set_trouble(str(error), ("log", source.partition))
            return
        source.stop(error, now_ms, now_ms + STOPPED_RETRY_MS)
        self._recovery.look_again()
        self._state.moved()

    # -- sending ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for node, partitions in self._by_broker().items():
            channel = self._channels[node]
            while partitions and channel.in_flight < _REQUESTS_IN_FLIGHT_MAX:
                batches = self._collect(partitions, node)
                if not batches or not self._send(node, channel, batches):
                    break

    def _by_broker(self) -> dict[int, list[int]]:
        """The ready Kafka partitions by their leader, for brokers that may be sent to now."""
        found: dict[int, list[int]] = {}
        now_s = self._loop.time()
        for partition in self._ready:
            node = self._cluster.leaders.get(partition)
            if node is None or not self._fence.partitions[partition].has_shipped:  # the fence's driver looks for them
                continue
            channel = self._channels.setdefault(node, _Channel())
            if channel.connection is None or not channel.connection.connected():
                if channel.connecting is None or channel.connecting.done():
                    channel.connecting = self.run_beside(self._connected(node, channel))
            elif now_s >= channel.blocked_until_s:
                found.setdefault(node, []).append(partition)
        return found

    def _collect(self, partitions: list[int], node: int) -> dict[int, SentBatch]:
        """A batch of each partition, up to a request's size; partitions without another batch leave `partitions`."""
        batches: dict[int, SentBatch] = {}
        size, connection = 0, self._channels[node].connection
        assert connection is not None, "`_by_broker` names connected brokers only"
        for partition in tuple(partitions):
            pipeline = self._pipelines[partition]
            if not self._has_met(partition, connection):
                partitions.remove(partition)
                self._ready.pop(partition, None)
                continue
            if pipeline.in_flight and self._nodes.get(partition) != node:
                partitions.remove(partition)  # the former leader has to answer first
                continue
            sent = self._next_of(pipeline)
            if sent is None:
                partitions.remove(partition)
                self._ready.pop(partition, None)
                continue
            batches[partition] = sent
            self._nodes[partition] = node
            pipeline.on_sent(sent)
            sent.sent_ns = tracing.now_ns()
            size += len(sent.data)
            if size >= _REQUEST_BYTES:
                break
        for partition in batches:  # so that others come first next time
            self._ready.pop(partition)
            self._ready[partition] = None
            if partition in partitions:
                partitions.remove(partition)
                partitions.append(partition)
        return batches

    def _has_met(self, partition: int, connection: Connection) -> bool:
        """Whether this connection's broker has shown the partition's newest record; if not, start the check."""
        if self._connections.get(partition) is connection:
            return True
        if partition not in self._meeting:
            self._meeting.add(partition)
            self.run_beside(self._meet(partition, connection))
        return False

    async def _meet(self, partition: int, connection: Connection) -> None:
        """Check that the broker has our newest record before it gets more, because later records would hide a loss."""
        try:
            await self._recovery.check_newest(partition, self._sources[partition])
        finally:
            self._meeting.discard(partition)
        self._pipelines[partition].meets_another()
        self._connections[partition] = connection
        self._ready[partition] = None

    def _send(self, node: int, channel: _Channel, batches: dict[int, SentBatch]) -> bool:
        data = {partition: sent.data for partition, sent in batches.items()}
        timeout_ms = self._destination.request_timeout_ms
        assert channel.connection is not None, "a channel with batches is connected"
        try:  # written at once, so that batches are sent in order
            request = ProduceBatches(self._facts.topic, self._facts.topic_id, data, timeout_ms)
            answer = channel.connection.send_in_parts(request)
        except UNREACHABLE as error:
            self._lost(node, batches, error)
            return False
        channel.in_flight += 1
        self._answers.add(task := self.run_beside(self._receive(node, channel, batches, answer)))
        task.add_done_callback(self._answers.discard)
        return True

    async def _receive(
        self, node: int, channel: _Channel, batches: dict[int, SentBatch], answer: Awaitable[Any]
    ) -> None:
        sent_s = self._loop.time()
        try:
            with self._cluster.awaiting(node, DOES_NOT_ANSWER):
                answers, throttle_ms = answers_of(await answer)
        except UNREACHABLE as error:
            channel.in_flight -= 1
            self._lost(node, batches, error)
            return
        channel.in_flight -= 1
        self._state.requests.add(self._loop.time() - sent_s)
        if throttle_ms:
            channel.blocked_until_s = self._loop.time() + throttle_ms / 1000
        missing = connection_lost("the broker's answer leaves it out")
        for partition, sent in batches.items():
            self._on_answer(self._pipelines[partition], sent, answers.get(partition, missing))
        self._state.moved()
        self._wake.set()

    def _lost(self, node: int, batches: dict[int, SentBatch], error: BaseException) -> None:
        self._cluster.drop(node)
        self.refresh_soon()
        for partition, sent in batches.items():
            self._on_answer(self._pipelines[partition], sent, connection_lost(repr(error)))
        self._wake.set()

    def _on_answer(self, pipeline: Pipeline, sent: SentBatch, answer: BrokerAnswer) -> None:
        partition = pipeline.partition
        if sent.sent_ns:
            self._trace(sent, partition, answer)
        counts = self._state.counts
        for done in pipeline.on_answer(sent, answer):
            counts.batches += 1
            counts.records += done.end - done.start
            counts.size_bytes += len(done.data)
            source = self._state.sources[done.partition]
            source.in_flight -= 1
            assert done.base_offset is not None, "it was acknowledged"
            at = done.base_offset + len(done.batch) if done.base_offset >= 0 else -1
            newest = ShippedRecord(done.end - 1, at - 1) if at >= 0 else None
            if 0 <= done.base_offset < self._ends.get(partition, 0):
                self._fail(self._recovery.went_back(partition))
                return
            if (
                done.base_offset > (known := self._ends.get(partition, 0))
                and self._fence.partitions[partition].producer is None
            ):
                self._others_wrote(partition, known, done.base_offset)
            self._ends[partition] = max(at, known)
            source.on_acknowledged(done.end, done.log_crc, at, newest)
            source.parked_in_a_row = 0
            self._recovery.succeeded(partition)
        if sent.answer is not None:
            counts.errors[Code.name_of(sent.answer.error_code)] += 1
        self._last_answer_ms[partition] = self._clock.monotonic_ms()
        if pipeline.is_drained:
            self.run_beside(self._recover(pipeline))
        else:
            self._ready[partition] = None

    def _trace(self, sent: SentBatch, partition: int, answer: BrokerAnswer) -> None:
        span = tracing.TracedBatch("kafka", "send", "send", self._facts.topic, start_ns=sent.sent_ns)
        if span.is_traced:
            span.set(destination__partition__id=str(partition))
            span.add(record.headers for record in sent.batch.records())
            span.end(Code.name_of(answer.error_code) if answer.error_code else None)

    def _others_wrote(self, partition: int, start: int, end: int) -> None:
        """Read what others wrote to [start, end) between our records: a copy of this outbox may have."""
        unread = self._state.unread
        is_read_already = partition in unread
        unread[partition] = (unread[partition][0] if is_read_already else start, end)
        if not is_read_already:
            self.run_beside(self._read_others(partition))

    async def _read_others(self, partition: int) -> None:
        while partition in self._state.unread:
            await self._recovery.read_others(partition)
            self._state.moved()

    async def _recover(self, pipeline: Pipeline) -> None:
        first, reaction = pipeline.verdict()
        if reaction is AnswerReaction.RESYNC:
            # The broker has lost our producer's state, or refuses its epoch: the partition begins anew.
            _LOG.warning("%s-%d: %s", self._facts.topic, pipeline.partition, first.answer)
            for source in self._sources[pipeline.partition]:
                source.in_flight = 0
            self._fence.begin_again(pipeline.partition)
            return
        stopped = await self._recovery.recover(pipeline)
        if stopped is not None:
            self._refuse(*stopped)
        self._ready[pipeline.partition] = None

    # -- brokers ---------------------------------------------------------------------------------------------------

    async def _connected(self, node: int, channel: _Channel) -> None:
        try:
            channel.connection = await self._cluster.connection(node)
            self._state.counts.connections += 1
        except UNREACHABLE as error:
            self._state.set_trouble(f"broker {node} can't be reached: {error!r}", ("broker", node))
            await self._recovery.refresh()
        else:
            self._state.set_trouble(None, ("broker", node))

    def refresh_soon(self) -> None:
        """As in FencedSession."""
        if not self._recovery.is_refreshing:
            self.run_beside(self._recovery.refresh())

    def run_beside(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """As in FencedSession."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        elif isinstance(error, TopicLostRecords) and isinstance(self._failure, TopicLostRecords):
            self._failure = TopicLostRecords(self._facts.topic, {**self._failure.lost, **error.lost})
        self._wake.set()
