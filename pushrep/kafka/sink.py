"""KafkaSink: one outbox's logs into one Kafka topic, in a thread of its own, from `start` to `close`.

look at the topic ─▶ refused? (tried again now and then) ─▶ Session ─▶ ends: the topic changed, nobody answers ─┐
▲                                                                                                         │
└─────────────────────────────────────── a pause ◀────────────────────────────────────────────────────────┘
every second: destinations.json, if something moved
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol
from uuid import UUID

from pushrep.env import Clock, Filesystem
from pushrep.kafka.cluster import UNREACHABLE, Cluster, KnownBrokers
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import (
    AnotherCluster,
    BeginsAnew,
    DestinationAhead,
    DestinationRefused,
    OutboxDiverged,
    OutboxTakenOver,
    ShippingError,
    TopicLostRecords,
    TopicMissing,
    TopicReplaced,
)
from pushrep.kafka.fence_driver import Fencing, Leads
from pushrep.kafka.parking import ParkingLog
from pushrep.kafka.progress import (
    ShippingProgress,
    Skip,
    check_kept,
    check_seen,
    counts_of,
    fixed_count,
    write_progress,
)
from pushrep.kafka.recovery import backoff_of, in_thread, places_of_records, retrying, unless_set, used_partitions
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink_session import SinkSession
from pushrep.kafka.sink_state import SinkState
from pushrep.kafka.topic import TopicFacts, look_at_topic
from pushrep.log import LogClosed, SegmentLog

_LOG = logging.getLogger("pushrep.kafka")

CHECKPOINT_S = 1.0
_REFUSED_RETRY_S = 5.0
_CLOSE_S = 30.0
_SKIP_S = 5.0  # the loop may end in this moment, and takes no more calls then
_FIRST_LOOK_MS = 5_000  # then twice as long each time: a broker that hangs keeps those of other partitions unasked


class PartitionCounts(Protocol):
    """Stores the partition counts of each PID epoch, oldest first, by the topic's id. Raises BeginsAnew."""

    def known(self, topic_id: UUID) -> tuple[int, ...]:
        """The members' counts; empty for a topic that was never shipped to."""
        ...

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """Store the counts on enough members' disks, and wait for that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    """Whose logs are shipped: the outbox's directory, its topic, logs and own PIDs.

    batch_bytes: the size of its batches; 0: none are made any more. partition_counts: the members' store of them, and
    leads: asks these whether this instance leads; None: there are no members. is_new: it was made just now, so no topic
    holds its PIDs. copy_id: as in `transactional_id`. parking: where refused records are or go. all_progress: by topic,
    as it was read from the directory.
    """

    directory: Path
    outbox_id: str
    topic: str
    logs: Sequence[SegmentLog]
    origin: RecordOrigin
    batch_bytes: int
    filesystem: Filesystem
    clock: Clock
    all_progress: Mapping[str, ShippingProgress] = field(default_factory=dict)
    partition_counts: PartitionCounts | None = None
    is_new: bool = False
    leads: Leads | None = None
    copy_id: str | None = None
    parking: ParkingLog | None = None


class KafkaSink:
    """See the file's map. Thread-safe. Raises DestinationAhead, ShippingError."""

    def __init__(self, shipped: SinkConfig, destination: KafkaDestination) -> None:
        self._config, self._destination = shipped, destination
        self.topic = destination.topic or shipped.topic
        self._all_progress = dict(shipped.all_progress)
        progress = self._all_progress.get(self.topic, ShippingProgress())
        if progress.rebase:
            how = f"stop the service, then again: pushrep outbox rebase {shipped.directory}"
            raise ShippingError(f"a rebase was interrupted, and nothing is shipped before it has run to its end: {how}")
        self._written = self._all_progress.get(self.topic)
        self._is_first = self._written is None
        if shipped.parking is not None:  # what was parked last may not be in the file yet
            progress = progress.skipping(shipped.parking.skips(self.topic))
        servers = destination.bootstrap_servers
        epoch, clock, parking = shipped.origin.pid_epoch, shipped.clock, shipped.parking
        self.state = SinkState(shipped.logs, progress, epoch, clock, self.topic, servers, parking)
        """What is known of the topic, and what was sent there."""
        self._brokers = KnownBrokers(progress.cluster_id)
        self._writing = threading.Lock()
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._session: SinkSession | None = None
        self.fencing = Fencing(destination, shipped.outbox_id, shipped.copy_id, shipped.leads, shipped.clock)
        self._failures = 0  # failed sessions in a row
        self.on_diverged: Callable[[ShippingError], None] | None = None
        """Called in the sink's thread when log and topic have diverged, before waiting callers get the error."""
        for source in self.state.sources.values():
            source.is_new = shipped.is_new
        self._thread = threading.Thread(target=self._run, name=f"pushrep-kafka-{self.topic}", daemon=True)

    def start(self, timeout_s: float, *, despite_divergence: bool = False) -> None:
        """Begin, and wait at most `timeout_s` for the topic's metadata. If Kafka is away, records are sent later.

        despite_divergence: begin also if the outbox has diverged from its topic.
        Raises DestinationRefused, TopicMissing, AnotherCluster, OutboxDiverged, DestinationAhead, TopicLostRecords, if
        it is known by then.
        """
        if self._is_first:  # who finds the directory after a crash knows then that its records are to be shipped
            try:
                self._checkpoint()
            except OSError as error:
                self._warn_unwritten(error)
        self._thread.start()
        self._started.wait(timeout_s)
        if (refusal := self.state.refusal) is not None and not (
            despite_divergence and isinstance(refusal, OutboxDiverged)
        ):
            self.close()
            if self._is_first:  # the name may be a mistake
                self._remove(self.topic)
            raise refusal

    def close(self) -> None:
        """Stop sending, and write the progress. A second call does nothing. Raises OSError."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, maybe at this very moment: nobody waits any more
                self._loop.call_soon_threadsafe(self._stop)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._checkpoint()

    def needed_from(self, partition: int) -> int:
        """The first offset that the topic has not acknowledged: retention keeps it."""
        return self.state.sources[partition].acknowledged

    def skip(self, skips: Sequence[Skip]) -> None:
        """Do not ship these records; on disk when this returns, not sent from now on, and no reason to be stopped any
        more. Raises OSError.
        """
        state, done = self.state, threading.Event()
        state.change(lambda progress: progress.skipping(skips))
        self._checkpoint()
        for partition in {one.partition for one in skips}:
            source, skipped = state.sources[partition], state.progress.skipped_of(partition)
            source.skipped = skipped
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: the next start begins with them
                    self._loop.call_soon_threadsafe(source.skip, skipped)
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(done.set)
                done.wait(_SKIP_S)

    def forget(self, topic: str) -> None:
        """Remove another destination from the file. Raises OSError."""
        assert topic != self.topic, "what is shipped to is not forgotten"
        self._remove(topic)

    def _remove(self, topic: str) -> None:
        with self._writing:
            kept = {name: progress for name, progress in self._all_progress.items() if name != topic}
            write_progress(self._config.filesystem, self._config.directory, kept)
            self._all_progress = kept

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would look like one that waits
            _LOG.exception("shipping to %s ended", self.topic)
            self.state.refused(error if isinstance(error, ShippingError) else ShippingError(repr(error)))
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.state.note_ends()
        checkpoints = asyncio.ensure_future(self._checkpoint_always())
        try:
            while not self._stopping.is_set():
                pause_s = _REFUSED_RETRY_S
                try:
                    await self._ship()
                    continue
                except (TopicMissing, DestinationRefused, AnotherCluster) as error:
                    self.state.refused(error)
                except (OutboxDiverged, DestinationAhead, TopicLostRecords, OutboxTakenOver) as error:
                    if self._is_stopped_by(error):
                        return
                except TopicReplaced as error:
                    _LOG.warning("%s: it is shipped again from the logs' start", error)
                    pause_s = 0.0
                except (*UNREACHABLE, BeginsAnew) as error:
                    self.state.set_trouble(str(error) or repr(error))
                    self._failures += 1
                    pause_s = backoff_of(self._destination).pause_s(self._failures)
                except LogClosed:
                    return
                if self.state.refusal is not None:
                    self._started.set()
                await self._sleep(pause_s)
        finally:
            checkpoints.cancel()

    def _is_stopped_by(self, error: ShippingError) -> bool:
        """Whether shipping stops until the outbox is opened again, because an operator has to act.

        Not if another instance took over and members may confirm later that this one leads.
        """
        if isinstance(error, TopicLostRecords):  # on disk first: once the topic grows again, the loss does not show
            lost = error.lost
            self.state.change(lambda progress: replace(progress, lost=lost))
            try:
                self._checkpoint()
            except OSError as failure:
                _LOG.warning("what the topic has lost could not be written down: %s", failure)
        self.state.counts.taken_over += isinstance(error, OutboxTakenOver)
        if isinstance(error, OutboxDiverged | DestinationAhead) and self.on_diverged is not None:
            self.on_diverged(error)  # before waiting callers get the error, so that their next append is refused
        self.state.refused(error)
        if isinstance(error, OutboxTakenOver) and self._config.leads is not None:
            return False
        _LOG.error("shipping to %s stops: %s", self.topic, error)
        self._started.set()
        return True

    def _began(self) -> None:
        self._failures = 0
        self._started.set()

    async def _ship(self) -> None:
        cluster = Cluster(self._destination, self.topic, self._brokers)
        try:
            facts = await self._look(cluster)
            if facts is not None:
                await self._ship_by(facts, cluster)
        finally:
            await cluster.close()

    async def _look(self, cluster: Cluster) -> TopicFacts | None:
        """The topic's settings; None if shipping ends meanwhile.

        Raises AnotherCluster, KafkaUnreachable, TopicMissing.
        """

        async def look() -> TopicFacts | None:
            within_ms = min(self._destination.request_timeout_ms, _FIRST_LOOK_MS << min(self._failures, 8))
            destination = replace(cluster.destination, request_timeout_ms=within_ms)
            return await unless_set(self._wake, in_thread(lambda: look_at_topic(destination, self.topic)))

        facts = await look()
        if facts is None or self._brokers.cluster_id in {None, facts.cluster_id}:
            return facts
        await unless_set(self._wake, cluster.refresh())  # finds those of the right cluster, if any is left
        facts = None if self._stopping.is_set() else await look()
        if facts is not None and (expected := self._brokers.cluster_id) not in {None, facts.cluster_id}:
            servers = cluster.destination.bootstrap_servers
            raise AnotherCluster(self.topic, servers, expected=str(expected), found=str(facts.cluster_id))
        return facts

    async def _ship_by(self, facts: TopicFacts, cluster: Cluster) -> None:
        facts.check(batch_bytes=self._config.batch_bytes)
        self.state.refused(None)
        try:
            await self._fix_topic(facts)
        except BeginsAnew:
            self._started.set()  # the topic is known; members may answer later
            raise
        # Before fencing, whose markers raise the topic's end and would hide a loss.
        if lost := self.state.progress.lost:
            raise TopicLostRecords(self.topic, lost)
        await unless_set(self._wake, cluster.refresh())
        shipped = self._config
        self._session = SinkSession(
            self._destination, facts, cluster, self.state, shipped.origin, shipped.clock, self.fencing
        )
        try:
            if not self._stopping.is_set():
                await self._session.run(self._began)
        finally:
            self._session = None

    async def _fix_topic(self, facts: TopicFacts) -> None:
        """Fix the partition count at first use: on disk, and at the members, before the first batch is sent.

        Raises BeginsAnew, DestinationRefused, KafkaUnreachable.
        """
        state = self.state
        before = state.progress
        check_seen(before, self.topic, facts.topic_id, facts.partitions)
        if before.topic_id not in {None, facts.topic_id}:
            _LOG.warning("%s is not the topic that it was (%s): all is shipped again", self.topic, facts.topic_id)
            state.void()
        fixed = self._config.partition_counts
        stored = known = () if fixed is None else fixed.known(facts.topic_id)
        if (used := await self._used_partitions(before, facts, known)) is not None:
            known = (used,)
        partitions = fixed_count(before, self.topic, facts.partitions, known)
        progress = before.with_topic(facts.topic_id, partitions, state.pid_epoch)
        progress = replace(progress, cluster_id=facts.cluster_id)
        check_kept(progress, self.topic, stored)
        state.change(lambda now: replace(progress, skipped=now.skipped))  # an operator may have skipped some meanwhile
        self._checkpoint()
        self._brokers.cluster_id = facts.cluster_id
        counts = counts_of(state.progress)
        if fixed is not None:
            await unless_set(self._wake, in_thread(lambda: fixed.keep(facts.topic_id, counts)))

    async def _used_partitions(self, before: ShippingProgress, facts: TopicFacts, known: tuple[int, ...]) -> int | None:
        """How many partitions are used, found by the topic's records if nothing else says it; None if they don't
        either.
        """
        shipped = self._config
        has_records = any(log.log_end_offset > 0 for log in shipped.logs)
        if before.epochs or known or shipped.is_new or not has_records or min(facts.partitions, len(shipped.logs)) == 1:
            return None
        cluster = Cluster(self._destination, self.topic, self._brokers)
        try:
            until_done = retrying(self._destination, cluster)
            await unless_set(self._wake, until_done(cluster.refresh))
            work = places_of_records(cluster, shipped.origin, facts.partitions, until_done)
            places = await unless_set(self._wake, work)
        finally:
            await cluster.close()
        return used_partitions(self.topic, facts.partitions, places or set())

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _stop(self) -> None:
        self._wake.set()
        if self._session is not None:
            self._session.stop()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def _checkpoint_always(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            self.state.note_ends()
            try:
                await in_thread(partial(self._checkpoint, self.state.current()))
            except OSError as error:
                self._warn_unwritten(error)

    @staticmethod
    def _warn_unwritten(error: OSError) -> None:
        _LOG.warning("progress could not be written down, and is tried again: %s", error)

    def _checkpoint(self, progress: ShippingProgress | None = None) -> None:
        with self._writing:
            current = progress if progress is not None else self.state.current()
            if current == self._written:
                return
            self._all_progress[self.topic] = current
            write_progress(self._config.filesystem, self._config.directory, self._all_progress)
            self._written = current
