"""`pushrep outbox rebase`: an outbox and a topic that hold different records at one position agree again afterwards.

    topic   0 .......... 1000 ........ 2000                 what others, or a lost continuation, put there: [1000, 2000)
    log     0 .......... 1000 ..... 1500                    never shipped: [1000, 1500)
    after   0 .......... 1000 ..... 1500 ..... 2000         appended again as [1500, 2000) under a new PID epoch;
                                                            the originals are skipped for this topic

Each step is on disk before the next begins; a rebase that is interrupted is finished by running it again:

    the new PID epoch ─▶ what is to be done, in destinations.json ─▶ the records again ─▶ the originals skipped, done

The topic's records are matched as by shipping (pushrep/kafka/resume.py). Of two records at one position a filtering
reader sees the first, so a record of ours that came second is appended again as well.

Records that the topic acknowledged and has lost (`TopicLostRecords`) have no rival there: only their acknowledgement is
forgotten, and they are shipped again under their own PID.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from filtering import StreamMetadata
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import AnotherCluster, ShippingError
from pushrep.kafka.progress import (
    OffsetRanges,
    PartitionProgress,
    Rebase,
    ShippingProgress,
    Skip,
    read_progress,
    write_progress,
)
from pushrep.kafka.recovery import TopicContents, read_contents
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink_state import SinkState
from pushrep.kafka.topic import look_at_topic
from pushrep.log import Durability, SegmentLog
from pushrep.outbox.destinations import locked_outbox, opened_log
from pushrep.outbox.identity import OutboxIdentity, begin_pid_epoch
from pushrep.outbox.outbox import Outbox
from pushrep.outbox.settings import Acks, OutboxConfig
from pushrep.outbox.shipping import content_of, is_own, origin_of
from pushrep.records import Record

_RECORDS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """What a rebase did, or would do: by log partition its log's end, and the ranges that are appended again. Or, in
    `lost`, the range of offsets that the next start sends again: then nothing is appended.
    """

    topic: str
    partitions: Mapping[int, Rebase] = field(default_factory=dict)
    lost: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """How many records are appended again."""
        return sum(end - start for one in self.partitions.values() for start, end in one.again)


def rebase(
    directory: Path | str,
    destination: KafkaDestination,
    *,
    dry_run: bool = False,
) -> Rebased:
    """Let an outbox that `OutboxDiverged`, `DestinationAhead` or `TopicLostRecords` stopped go on. Nobody may have it
    open.

    dry_run: change nothing, only return what would be done.
    Raises ShippingError for records with the caller's own metadata, NoOutbox, LogLocked, CorruptFile,
    DirectoryIsCopy for a member's, TopicMissing, KafkaUnreachable, DestinationRefused.
    """
    with locked_outbox(Path(directory), refuse_copy=True) as (path, identity):
        topic = destination.topic or identity.topic
        known = read_progress(REAL_FILESYSTEM, path)
        progress = known.get(topic, ShippingProgress())
        if progress.lost:
            if not dry_run:
                again = _sent_again(path, identity, progress)
                write_progress(REAL_FILESYSTEM, path, known | {topic: again})
            return Rebased(topic=topic, lost=progress.lost)
        if not progress.rebase:
            with ExitStack() as stack:
                logs = [
                    stack.enter_context(opened_log(path, identity, partition))
                    for partition in range(identity.partitions)
                ]
                progress = _planned(destination, topic, logs, identity, progress, known)
            if not dry_run:
                raised = begin_pid_epoch(path)
                progress = progress.under(raised.pid_epoch)
                write_progress(REAL_FILESYSTEM, path, known | {topic: progress})
        done = Rebased(topic=topic, partitions=progress.rebase)
        if dry_run:
            return done
    _append_again(Path(directory), identity, progress)
    with locked_outbox(Path(directory)) as (path, _):
        known = read_progress(REAL_FILESYSTEM, path)
        write_progress(REAL_FILESYSTEM, path, known | {topic: _finished(known[topic], SYSTEM_CLOCK.wall_ms())})
    return done


def _sent_again(path: Path, identity: OutboxIdentity, progress: ShippingProgress) -> ShippingProgress:
    """The progress without the acknowledgement of what the topic has lost. The next shipping looks these records up in
    the topic, and sends those that it does not find.
    """
    partitions = dict(progress.partitions)
    for number, (first, _) in progress.lost.items():
        with opened_log(path, identity, number) as log:
            start = max(first, log.log_start_offset)
            before = next(iter(log.batches(start - 1, start)), None) if start > log.log_start_offset else None
        partitions[number] = PartitionProgress(start, -1, 0 if before is None else before.header.crc)
    return replace(progress, partitions=partitions, lost={})


def _planned(  # noqa: PLR0913, PLR0917 - both sides, and what is known of them
    destination: KafkaDestination,
    topic: str,
    logs: Sequence[SegmentLog],
    identity: OutboxIdentity,
    progress: ShippingProgress,
    known: Mapping[str, ShippingProgress],
) -> ShippingProgress:
    facts = look_at_topic(destination, topic)
    if progress.cluster_id not in {None, facts.cluster_id}:
        servers, found = destination.bootstrap_servers, str(facts.cluster_id)
        raise AnotherCluster(topic, servers, expected=str(progress.cluster_id), found=found)
    origin = origin_of(identity, known.values())
    # Under another epoch, so that a log that went back is read from its start instead of being refused.
    state = SinkState(logs, progress, identity.pid_epoch + 1, SYSTEM_CLOCK, topic, destination.bootstrap_servers)
    contents = asyncio.run(read_contents(destination, facts, state, origin))
    plan, partitions = {}, {}
    for log in logs:
        number, end = log.partition, log.log_end_offset
        again = appended_again(contents, number, end)
        _check_own(log, again, origin)
        plan[number] = Rebase(end, tuple(again))
        if end > log.log_start_offset:
            last = next(iter(log.batches(end - 1, end)))
            place = contents.progress.topic_partition(number, end)
            at = contents.ends[place] if place == contents.progress.topic_partition(number, end - 1) else -1
            partitions[number] = PartitionProgress(end, at, last.header.crc)
    return replace(contents.progress.under(identity.pid_epoch), rebase=plan, partitions=partitions)


def appended_again(contents: TopicContents, partition: int, log_end: int) -> OffsetRanges:
    """The ranges of a log with this end that filtering readers of the topic do not see."""
    skipped = contents.progress.skipped_of(partition)
    contested = contents.contested.get(partition, OffsetRanges())
    first_contested = min((start for start, _ in contested), default=log_end)
    # Records were sent in order, so what the topic lacks before the first of them was removed by retention.
    below = [end for start, end in contents.held.get(partition, ()) if start < first_contested]
    first = max([contents.first[partition], *below])
    wanted = OffsetRanges([*contested, *contents.holes.get(partition, ()), (first, log_end)])
    return OffsetRanges(one for start, end in wanted for one in skipped.missing(start, end))


def _check_own(log: SegmentLog, again: OffsetRanges, origin: RecordOrigin) -> None:
    refused = [record for record in _records(log, tuple(again)) if not is_own(record, origin)]
    if refused:
        metadata = origin.metadata_of(refused[0])
        named = StreamMetadata.try_unpack(metadata) if metadata is not None else None
        raise ShippingError(
            f"{len(refused)} records of partition {log.partition}, the first at offset {refused[0].offset}, are not in "
            f"the topic and carry the caller's own metadata ({named or 'none'}), which they would lose: let their "
            "source append them again, and give these up (pushrep outbox skip)"
        )


def _records(log: SegmentLog, ranges: Sequence[tuple[int, int]]) -> Iterator[Record]:
    for start, end in ranges:
        yield from log.records(start, end)


def _append_again(directory: Path, identity: OutboxIdentity, progress: ShippingProgress) -> None:
    with Outbox.open(
        directory, identity.topic, identity.partitions, identity.producer,
        carrier=identity.carrier, durability=Durability.FLUSHED, config=OutboxConfig(create=False),
        replicas=[address for _, address in identity.replicas], acks=Acks.LOCAL if identity.replicas else None,
    ) as outbox:  # fmt: skip
        for partition, plan in progress.rebase.items():
            log = outbox.log(partition)
            following = log.records(plan.log_end)  # appended by an earlier try
            left = _records(log, plan.again)
            for original, copy in zip(_records(log, plan.again), following, strict=False):
                if content_of(original, identity.carrier) != content_of(copy, identity.carrier):
                    break
                next(left)
            while some := list(islice(left, _RECORDS_AT_ONCE)):
                contents = [content_of(record, identity.carrier) for record in some]
                outbox.append_many(
                    partition,
                    [value for value, *_ in contents],
                    keys=[key for _, key, *_ in contents] if identity.carrier == "header" else None,
                    headers=[headers for *_, headers, _ in contents],
                    timestamps_ms=[time_ms for *_, time_ms in contents],
                )
        outbox.flush()


def _finished(progress: ShippingProgress, now_ms: int) -> ShippingProgress:
    reason = f"rebased: appended again under PID epoch {progress.pid_epoch}"
    skips = [
        Skip(partition, start, reason, now_ms, end)
        for partition, plan in progress.rebase.items()
        for start, end in plan.again
    ]
    return replace(progress, rebase={}, skipped=(*progress.skipped, *skips))
