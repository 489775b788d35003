"""What a topic holds of an outbox that nobody has open, for who works on its directory or has lost its checkpoint.

log partition 3 in partition 1 of the topic, 2 in 0   ─▶   2 of its 4 partitions were used
held, contested                                       ─▶   what a rebase appends again
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from filtering import StreamMetadata
from pushrep.kafka.cluster import UNREACHABLE, BrokerError, Cluster
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable
from pushrep.kafka.offset_ranges import OffsetRanges
from pushrep.kafka.partition_counts import counts_of
from pushrep.kafka.progress import ShippingProgress
from pushrep.kafka.recovery import backoff_s, known_offset, read_partition
from pushrep.kafka.resume import Matching, RecordOrigin
from pushrep.kafka.sink_state import SinkState
from pushrep.kafka.source import ShippedPartition
from pushrep.kafka.topic import TopicFacts
from pushrep.records import RecordBatch

_T = TypeVar("_T")
_FAILURES_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicContents:
    """By log partition: `held` and `contested` as in Matching, `first`: the first offset that it is not known to hold.

    progress: with the topic as it is now. ends: partition of the topic to the offset up to which it was read.
    """

    progress: ShippingProgress
    held: Mapping[int, OffsetRanges]
    contested: Mapping[int, OffsetRanges]
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
    cluster = Cluster(destination, facts.topic)
    patiently = _Patiently(destination, cluster)
    try:
        await patiently(cluster.refresh)
        used = None
        if not state.progress.epochs:
            places = await places_of_records(cluster, origin, facts.partitions, patiently)
            used = used_partitions(facts.topic, facts.partitions, places)
        progress = state.progress.with_topic(facts.topic_id, used or facts.partitions, state.pid_epoch)
        at: dict[int, list[ShippedPartition]] = {}
        for source in state.sources.values():
            at.setdefault(progress.topic_partition(source.partition, source.acknowledged), []).append(source)
        held: dict[int, OffsetRanges] = {}
        contested: dict[int, OffsetRanges] = {}
        first = {number: source.acknowledged for number, source in state.sources.items()}
        ends = {}
        for number in range(max(counts_of(progress))):
            sources = at.get(number, [])
            bounds = await patiently(lambda number=number: cluster.bounds(number))  # type: ignore[misc]
            known = max(bounds.start, known_offset(sources, bounds) if sources else 0)
            matching = Matching(
                origin,
                [source.log for source in state.sources.values()],
                {source.partition: source.acknowledged for source in sources},
                (facts.topic, number),
                {one: progress.skipped_of(one) for one in state.sources},
                is_strict=False,
            )
            ends[number] = await read_partition(cluster, patiently, number, known, matching.match_batch)
            for error in matching.unreadable.values():
                raise error
            first |= matching.next_offsets
            for found, into in ((matching.held, held), (matching.contested, contested)):
                for partition, ranges in found.items():
                    into[partition] = OffsetRanges([*into.get(partition, ()), *ranges])
    finally:
        await cluster.close()
    return TopicContents(progress=progress, held=held, contested=contested, first=first, ends=ends)


class _Patiently:
    """Tries for a while, with growing pauses."""

    def __init__(self, destination: KafkaDestination, cluster: Cluster) -> None:
        self._destination, self._cluster = destination, cluster

    async def __call__(self, what: Callable[[], Awaitable[_T]], /) -> _T:
        for failures in range(1, _FAILURES_MAX):
            try:
                if failures > 1:
                    await self._cluster.refresh()
                return await what()
            except (*UNREACHABLE, BrokerError, KafkaUnreachable):
                await asyncio.sleep(backoff_s(self._destination, failures))
        return await what()


async def places_of_records(
    cluster: Cluster, origin: RecordOrigin, partitions: int, until_done: "_Patiently | None" = None
) -> set[tuple[int, int]]:
    """(log partition, partition of the topic) of every record there that has a PID of the outbox.

    Reads all that the topic holds. Raises BrokerError, KafkaUnreachable and what UNREACHABLE names.
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
        await read_partition(cluster, until_done or _once, number, 0, note)
    return found


async def _once(what: Callable[[], Awaitable[_T]], /) -> _T:
    return await what()


def used_partitions(topic: str, partitions: int, places: Collection[tuple[int, int]]) -> int | None:
    """The largest number of partitions by which every record lies where it does; None: there are no records.

    Raises DestinationRefused if there is none: several were used in turn.
    """
    if not places:
        return None
    for count in range(partitions, 0, -1):
        if all(at == log % count for log, at in places):
            return count
    raise DestinationRefused(
        topic,
        "partitions",
        partitions,
        "it holds records of this outbox by several numbers of partitions, and destinations.json, which knows from "
        "which offsets on each was used, is missing: restore it from a copy, or ship to a new topic",
    )
