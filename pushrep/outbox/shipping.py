"""Shipping an outbox to Kafka: opened with the outbox, closed before its logs; and what the logs keep for it.

A destination that was used once holds its unsent records in the logs, whether the outbox is opened with it or not,
until it is dropped by name. Kafka's clients are loaded when there is a destination, and not before.

The grant holds how many partitions of a topic are used, so that each member has that on disk before the first batch is
sent. Grant.destinations: topic id and n of each destination; of a repartitioned one, oldest first.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

from filtering.extras import needed_by
from pushrep.env import Clock, Filesystem
from pushrep.errors import BadArgument, PushrepError
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import PartitionCountNotStored
from pushrep.kafka.progress import ShippingProgress, Skip, read_progress, write_progress
from pushrep.log import SegmentLog
from pushrep.outbox.destinations import checked_skip, destination_of
from pushrep.outbox.epoch import LATER_EPOCHS
from pushrep.outbox.errors import OutboxInUse
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.settings import OnDiverged

if TYPE_CHECKING:
    from pushrep.election.grants import Grant
    from pushrep.kafka.resume import RecordOrigin
    from pushrep.kafka.sink import KafkaSink, SinkConfig
    from pushrep.kafka.sink_state import DestinationLag
    from pushrep.outbox.replication import Replication

_LOG = logging.getLogger("pushrep.outbox")


class GrantedPartitionCounts:
    """pushrep.kafka.progress.FixedPartitionCounts over the members of an open outbox."""

    def __init__(self, replication: "Replication") -> None:
        self._replication = replication

    def known(self, topic_id: UUID) -> tuple[int, ...]:
        """The partition count in the grant by which this outbox leads. Raises PartitionCountNotStored while it does not
        lead.
        """
        return tuple(one.partitions for one in self._grant().destinations if one.topic_id == topic_id)

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """Store the count in a new grant, unless the grant has it already. Raises PartitionCountNotStored."""
        replication = self._replication
        if self.known(topic_id) == partitions:
            return
        if not replication.own_appenders:
            raise PartitionCountNotStored("the outbox is not open yet")
        try:
            with replication.step_lock:
                replication.change_members(lambda newest, epoch: newest.with_partitions_of(epoch, topic_id, partitions))
        except (PushrepError, OSError) as error:
            raise PartitionCountNotStored(str(error)) from error

    def _grant(self) -> "Grant":
        grant = self._replication.grant
        if grant is None:
            raise PartitionCountNotStored("too few members answer")
        return grant


class GrantedLeadership:
    """pushrep.kafka.fence_driver.Leadership over the members of an open outbox."""

    has_members = True

    def __init__(self, replication: "Replication") -> None:
        self._replication = replication

    def is_newest(self) -> bool:
        """Whether enough members answer, and none has stored a newer grant than the one that this outbox leads by."""
        try:
            return self._replication.leads_by_the_newest_grant()
        except (PushrepError, OSError) as error:
            _LOG.warning("whether this outbox leads by the newest grant can't be found out: %s", error)
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippingSource:
    """What is shipped. copy_id: the directory's own id, if it is a copy of another that may be in use."""

    directory: Path
    identity: OutboxIdentity
    logs: Sequence[SegmentLog]
    batch_bytes: int
    filesystem: Filesystem
    clock: Clock
    replication: "Replication | None" = None
    is_new: bool = False
    copy_id: str | None = None


class Shipping:
    """The destinations of an open outbox; made by `start_shipping`."""

    def __init__(self, to_ship: ShippingSource, sink: "KafkaSink | None") -> None:
        self._to_ship, self.sink = to_ship, sink
        self._logs, self._clock = to_ship.logs, to_ship.clock
        self._dropping = threading.Lock()

    def lag(self) -> "dict[str, DestinationLag]":
        """The lag, by `kafka:<topic>`; empty without a destination."""
        return {} if self.sink is None else {holder_name(self.sink.topic): self.sink.lag()}

    def wait(self, flush: Callable[[float | None], None], timeout: float | None) -> None:
        """Flush, then return when the topic holds everything. Raises as `Outbox.wait_shipped`."""
        if self.sink is None:
            raise BadArgument("kafka", "the outbox was opened without a destination: Outbox.open(..., kafka=...)")
        deadline_s = None if timeout is None else monotonic() + timeout
        flush(timeout)
        self.sink.wait({log.partition: log.log_end_offset for log in self._logs}, timeout, deadline_s)

    def skip(self, partition: object, offset: object, reason: object, topic: object = None) -> None:
        """As `pushrep outbox skip`, asked of the open outbox. Raises BadArgument, BadArgument, OSError."""
        if self.sink is None:
            raise BadArgument("kafka", "the outbox was opened without a destination: there is nothing to skip for")
        if topic not in {None, self.sink.topic}:
            raise BadArgument("topic", f"the service that has the outbox open ships to {self.sink.topic}")
        if not isinstance(partition, int) or not isinstance(offset, int) or not isinstance(reason, str):
            raise BadArgument("skip", "give partition and offset as numbers, and a reason")
        ends = {log.partition: log.log_end_offset for log in self._logs}
        if partition not in ends:
            raise BadArgument("partition", f"{partition} is not one of the {len(ends)}, counted from 0")
        skip = Skip(partition, offset, reason, self._clock.wall_ms())
        self.sink.skip(checked_skip(skip, self.sink.needed_from(partition), ends[partition]))

    def when_diverged(self, call: Callable[[Exception], None]) -> None:
        """Call `call(error)` once, in any thread, when the topic turns out to hold other records than the logs."""
        if self.sink is not None:
            self.sink.when_diverged(call)

    def when_head_was_cut(self, call: Callable[[str], None]) -> None:
        """Call `call(why)`, in any thread, when records that are appended from then on need another PID."""
        if self.sink is not None:
            self.sink.when_head_was_cut(call)

    def stop(self) -> None:
        """Stop shipping, because another member leads. Raises OSError."""
        if self.sink is not None:
            self.sink.close()

    def drop(self, topic: object) -> None:
        """As `pushrep outbox drop-destination`, asked of the open outbox. Raises BadArgument, CorruptDestinationsFile,
        OSError.
        """
        sink = self.sink
        if sink is not None and topic == sink.topic:
            raise BadArgument(
                "topic",
                f"{topic} is what the service ships to (process {os.getpid()}), and would from the logs' start at its "
                "next open: open the outbox without it, then drop it",
            )
        with self._dropping:
            filesystem, directory = self._to_ship.filesystem, self._to_ship.directory
            known = read_progress(filesystem, directory)
            name = destination_of(known, topic)
            if sink is not None:
                sink.forget(name)
            else:
                write_progress(filesystem, directory, {one: at for one, at in known.items() if one != name})
            for log in self._logs:
                log.drop_holder(holder_name(name))

    def repartition(self) -> NoReturn:
        """Raises OutboxInUse: a PID lasts from an open to a close."""
        raise OutboxInUse(self._to_ship.directory, os.getpid())


def holder_name(topic: str) -> str:
    """What a destination is called in lags, and where it holds a log."""
    return f"kafka:{topic}"


def start_shipping(
    resources: ExitStack,
    to_ship: ShippingSource,
    destination: KafkaDestination | None,
    timeout_s: float,
    on_diverged: OnDiverged = OnDiverged.REFUSE,
) -> Shipping:
    """Ship from now on; `resources` ends it. Waits up to `timeout_s` for the topic's metadata, then goes on without.

    Raises the error for a topic that can't be used, CorruptDestinationsFile, OutboxDiverged, DestinationAhead,
    TopicLostRecords.
    """
    sink = None
    if destination is not None:
        with needed_by("Outbox.open(kafka=...)"):
            from pushrep.kafka.sink import KafkaSink  # noqa: PLC0415 - Kafka's clients are an extra of their own

        sink = KafkaSink(_shipped(to_ship), destination)
    _hold(to_ship, sink)
    if sink is not None:
        resources.callback(sink.close)
        sink.start(timeout_s, despite_divergence=on_diverged is OnDiverged.GO_ON)
    return Shipping(to_ship, sink)


def _hold(to_ship: ShippingSource, sink: "KafkaSink | None") -> None:
    known = read_progress(to_ship.filesystem, to_ship.directory)
    for log in to_ship.logs:
        for topic, progress in known.items():
            if sink is None or topic != sink.topic:
                at = progress.partitions.get(log.partition)
                offset = at.acknowledged if at is not None else log.log_start_offset
                log.hold(holder_name(topic), partial(int, offset))
        if sink is not None:
            log.hold(holder_name(sink.topic), partial(sink.needed_from, log.partition))


def origin_of(identity: OutboxIdentity, progress: Iterable[ShippingProgress]) -> "RecordOrigin":
    """The PIDs of the outbox's records in a topic: of its present epoch, of those that could follow, and of earlier
    ones, which after a leap are in destinations.json.
    """
    from pushrep.kafka.resume import RecordOrigin  # noqa: PLC0415

    pid_epoch = identity.pid_epoch
    epochs = {*range(LATER_EPOCHS), *range(max(0, pid_epoch - LATER_EPOCHS), pid_epoch + LATER_EPOCHS + 1)}
    for one in progress:
        epochs |= {one.pid_epoch, *one.pid_epochs, *(epoch.pid_epoch for epoch in one.epochs)}
    pids = {epoch: replace(identity, pid_epoch=epoch).pid for epoch in epochs}
    return RecordOrigin(carrier=identity.carrier, pids=pids, pid_epoch=pid_epoch)


def _shipped(to_ship: ShippingSource) -> "SinkConfig":
    from pushrep.kafka.fence_driver import AloneLeadership  # noqa: PLC0415
    from pushrep.kafka.progress import OwnPartitionCounts  # noqa: PLC0415
    from pushrep.kafka.sink import SinkConfig  # noqa: PLC0415

    identity = to_ship.identity
    return SinkConfig(
        directory=to_ship.directory,
        outbox_id=identity.outbox_id,
        topic=identity.topic,
        logs=to_ship.logs,
        origin=origin_of(identity, read_progress(to_ship.filesystem, to_ship.directory).values()),
        batch_bytes=to_ship.batch_bytes,
        filesystem=to_ship.filesystem,
        clock=to_ship.clock,
        is_new=to_ship.is_new,
        partition_counts=(
            OwnPartitionCounts() if to_ship.replication is None else GrantedPartitionCounts(to_ship.replication)
        ),
        copy_id=to_ship.copy_id,
        leadership=AloneLeadership() if to_ship.replication is None else GrantedLeadership(to_ship.replication),
    )
