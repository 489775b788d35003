"""What a session does when something failed, and at its beginning: find out what the topic holds, and go on from there.

    the answer asks for   what is done with the pipeline
    RETRY, REFRESH        the same bytes again after a pause; REFRESH asks who leads
    CHECK_TOPIC           the same, if the topic is still the one it was: else the session ends with TopicReplaced
    RESYNC                the topic is read from the last known offset to its end, our records in it are counted, and
                          the rest goes under a new producer id
    SPLIT                 what is not acknowledged is read again from the log, in smaller pieces
    STOP                  the same, and the log partition waits until somebody acted

Nothing is in flight then. A request of a connection that broke may still be in a broker's queue; whatever it appends
later continues what the topic held, in order and without holes, so a reader's filter drops what then comes twice.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from pushrep.kafka.answers import Code, Reaction
from pushrep.kafka.cluster import UNREACHABLE, BrokerError, Cluster
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import KafkaUnreachable, TopicReplaced
from pushrep.kafka.pipeline import Pipeline, Sent
from pushrep.kafka.resume import Matching, Origin, whole_batches
from pushrep.kafka.shipment import Shipment
from pushrep.kafka.source import LogSource
from pushrep.kafka.topic import TopicFacts, look_at_topic

_LOG = logging.getLogger("pushrep.kafka")
_T = TypeVar("_T")

_TAIL_OFFSETS = 1000  # where nothing is known of a topic, so much of its end is held against the log
_DOUBLINGS_MAX = 10


class Recovery:
    """See the file's map. `size_max_bytes`: the largest batch that the topic takes."""

    def __init__(
        self,
        destination: KafkaDestination,
        facts: TopicFacts,
        cluster: Cluster,
        shipment: Shipment,
        origin: Origin,
    ) -> None:
        self._destination, self._facts, self._cluster = destination, facts, cluster
        self._shipment, self._origin = shipment, origin
        self.size_max_bytes = facts.max_message_bytes
        self._failures: dict[int, int] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_refreshing(self) -> bool:
        """Whether brokers are being asked who leads."""
        return self._refreshing is not None and not self._refreshing.done()

    def succeeded(self, partition: int) -> None:
        """The next failure of this Kafka partition is its first again."""
        self._failures.pop(partition, None)

    async def refresh(self) -> None:
        """Ask who leads, then pause; one for all who want it. Raises TopicMissing."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._refreshing)

    async def new_producer_id(self) -> tuple[int, int]:
        """Raises BrokerError, KafkaUnreachable."""
        return await self._cluster.init_producer_id()

    async def until_done(self, what: Callable[[], Awaitable[_T]]) -> _T:
        """Try until the brokers let it happen. Raises what can't pass by itself."""
        failures = 0
        while True:
            try:
                return await what()
            except (*UNREACHABLE, BrokerError, KafkaUnreachable) as error:
                self._shipment.told(str(error) or repr(error))
                failures += 1
                await self._pause(failures)
                await self.refresh()

    async def resume(self, partition: int, sources: Sequence[LogSource]) -> None:
        """Find out how much of the logs a Kafka partition holds already. Raises DestinationAhead, CorruptBatch."""
        await self.until_done(lambda: self._match(partition, sources))

    async def recover(self, pipeline: Pipeline, sources: Sequence[LogSource]) -> tuple[LogSource, str] | None:
        """Bring a drained pipeline on its way again; a log partition that has to stop, and why.

        Raises TopicReplaced, TopicMissing, DestinationAhead.
        """
        first, reaction = pipeline.verdict()
        failures = self._failures[pipeline.partition] = self._failures.get(pipeline.partition, 0) + 1
        why = f"{self._facts.topic}-{pipeline.partition}: {first.answer}"
        _LOG.info("%s, so: %s", why, reaction.name)
        if reaction is Reaction.RESYNC:
            await self._resync(pipeline, sources)
        elif reaction is Reaction.SPLIT:
            await self._look_at_topic()
            self._learn_limit(len(first.data))
            self._take_back(pipeline, first)
        elif reaction is Reaction.STOP:
            self._take_back(pipeline, first)
            return self._shipment.sources[first.partition], why
        else:
            if failures > 1:
                self._shipment.told(why)
            await self._pause(failures)
            if reaction is Reaction.CHECK_TOPIC:
                await self._look_at_topic()
            if reaction is not Reaction.RETRY:
                await self.refresh()
            pipeline.reopen()
        return None

    def look_again(self) -> None:
        """Somebody may have changed the topic's settings; found out in the background."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_quietly())

    async def _look_quietly(self) -> None:
        try:
            self.size_max_bytes = (await self._look_at_topic()).max_message_bytes
        except (KafkaUnreachable, TopicReplaced, BrokerError) as error:
            _LOG.info("%s", error)  # whoever sends next finds it out for sure

    async def _resync(self, pipeline: Pipeline, sources: Sequence[LogSource]) -> None:
        _LOG.warning("%s-%d: the broker lost our producer id", self._facts.topic, pipeline.partition)
        for source in sources:
            source.in_flight = 0
        await self.resume(pipeline.partition, sources)
        producer = await self.until_done(self.new_producer_id)
        pipeline.begin(*producer)

    def _take_back(self, pipeline: Pipeline, first: Sent) -> None:
        for sent in pipeline.forget(first):
            source = self._shipment.sources[sent.partition]
            source.in_flight -= 1
            if not source.in_flight:
                source.rewind()

    def _learn_limit(self, refused_bytes: int) -> None:
        """The broker took no batch of this size, whatever the setting says (segment.bytes is a limit, too)."""
        self.size_max_bytes = self._facts.max_message_bytes
        if refused_bytes <= self.size_max_bytes:
            self.size_max_bytes = max(1, refused_bytes // 2)

    async def _match(self, partition: int, sources: Sequence[LogSource]) -> None:
        if not sources:
            return
        bounds = await self._cluster.bounds(partition)
        known = max(source.destination_offset for source in sources)
        if known > bounds.end:
            _LOG.warning("%s-%d lost what it had acknowledged: it is shipped again", self._facts.topic, partition)
            for source in sources:
                since = self._shipment.progress.same_since(source.partition, source.acknowledged)  # what went there
                source.acknowledged = max(source.log.log_start_offset, since)
                source.destination_offset = -1
            known = -1
        for source in sources:
            source.rewind()
        at = max(bounds.start, known if known >= 0 else bounds.end - _TAIL_OFFSETS)
        starts = {source.partition: source.acknowledged for source in sources}
        matching = Matching(self._origin, [source.log for source in sources], starts)
        while at < bounds.end:
            found = whole_batches(await self._cluster.fetch(partition, at))
            before = at
            for batch in found:
                if batch.header.next_offset > at:
                    matching.take(batch)
                    at = batch.header.next_offset
            if at == before:
                raise BrokerError(f"{self._facts.topic}-{partition} gives nothing at {at}", Code.OFFSET_OUT_OF_RANGE)
        for source in sources:
            self._advance(source, matching.next_offsets[source.partition], at)
            source.rewind()

    def _advance(self, source: LogSource, offset: int, destination_offset: int) -> None:
        if offset > source.acknowledged:
            last = next(iter(source.log.batches(offset - 1, offset)))
            source.on_acknowledged(offset, last.header.crc, destination_offset)
        else:
            source.destination_offset = max(source.destination_offset, destination_offset)

    async def _look_at_topic(self) -> TopicFacts:
        """Raises TopicReplaced, TopicMissing, KafkaUnreachable."""
        facts = await in_thread(lambda: look_at_topic(self._destination, self._facts.topic))
        if facts.topic_id != self._facts.topic_id:
            raise TopicReplaced(facts.topic)
        self._facts = facts
        return facts

    async def _refresh(self) -> None:
        try:
            await self._cluster.refresh()
        except (KafkaUnreachable, BrokerError) as error:
            self._shipment.told(str(error))
        await self._pause(1)

    async def _pause(self, failures: int) -> None:
        await asyncio.sleep(backoff_s(self._destination, failures))


def backoff_s(destination: KafkaDestination, failures: int) -> float:
    """The pause after so many failures in a row."""
    longest_ms = max(destination.retry_backoff_ms, destination.retry_backoff_max_ms)
    doubled_ms = destination.retry_backoff_ms << min(failures - 1, _DOUBLINGS_MAX)
    return min(doubled_ms, longest_ms) / 1000


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run what waits in a thread of its own; who is cancelled does not wait for it, as the loop's own threads would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type] # without an error there is a value

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            failure = error
        with suppress(RuntimeError):  # the loop is closed, maybe at this very moment: nobody waits any more
            loop.call_soon_threadsafe(tell, value, failure)

    threading.Thread(target=run, name="pushrep-kafka-admin", daemon=True).start()
    return await done
