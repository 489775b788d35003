"""Shipping an outbox to Kafka: opened with the outbox, closed before its logs; and what the logs keep for it.

A destination that was used once holds its unsent records in the logs, whether the outbox is opened with it or not,
until it is dropped by name. Kafka's clients are loaded when there is a destination, and not before.

The grant holds how many partitions of a topic are used, so that each member has that on disk before the first batch is
sent. Grant.destinations: topic id and n of each destination; of a repartitioned one, oldest first.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, cast
from uuid import UUID

from filtering import METADATA_HEADER
from pushrep.errors import BadArgument, PushrepError
from pushrep.kafka.errors import BeginsAnew, ShippingError
from pushrep.kafka.parking import ParkingLog
from pushrep.kafka.progress import ShippingProgress, Skip, read_progress, write_progress
from pushrep.log import SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.outbox.destinations import SkippedRecords, destination_of
from pushrep.outbox.identity import LATER_EPOCHS, OutboxIdentity
from pushrep.outbox.settings import OnDiverged, OutboxSettings
from pushrep.records import Record

if TYPE_CHECKING:
    from pushrep.kafka.resume import RecordOrigin
    from pushrep.kafka.sink import KafkaSink
    from pushrep.kafka.sink_state import DestinationLag
    from pushrep.outbox.batch import Receipt
    from pushrep.outbox.replication import Replication

_LOG = logging.getLogger("pushrep.outbox")
_NOT_KEPT = "how many partitions are used is not kept by enough members yet"


class GrantedPartitionCounts:
    """pushrep.kafka.sink.PartitionCounts over the members of an open outbox."""

    def __init__(self, replication: "Replication") -> None:
        self._replication = replication

    def known(self, topic_id: UUID) -> tuple[int, ...]:
        """The partition count in the grant by which this outbox leads. Raises BeginsAnew while it does not
        lead.
        """
        grant = self._replication.grant
        if grant is None:
            raise BeginsAnew(f"{_NOT_KEPT}: too few members answer")
        return tuple(one.partitions for one in grant.destinations if one.topic_id == topic_id)

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """Store the count in a new grant, unless the grant has it already. Raises BeginsAnew."""
        replication = self._replication
        if self.known(topic_id) == partitions:
            return
        try:
            with replication.step_lock:
                replication.change_members(lambda newest, epoch: newest.with_partitions_of(epoch, topic_id, partitions))
        except (PushrepError, OSError) as error:
            raise BeginsAnew(f"{_NOT_KEPT}: {error}") from error


def _leads_by_newest_grant(replication: "Replication") -> bool:
    """Whether enough members answer, and none has stored a newer grant than the one that this outbox leads by."""
    try:
        return replication.leads_by_the_newest_grant()
    except (PushrepError, OSError) as error:
        _LOG.warning("whether this outbox leads by the newest grant can't be found out: %s", error)
        return False


class Shipping:
    """The destinations of an open outbox; made by `open_shipping`."""

    def __init__(
        self,
        held: LogDirectory,
        logs: Sequence[SegmentLog],
        sink: "KafkaSink | None",
        parking: ParkingLog | None,
        origin: "RecordOrigin | None",
    ) -> None:
        self._held, self._logs, self.sink, self._origin = held, logs, sink, origin
        self.parking = parking
        self._dropping = threading.Lock()

    def start(self, resources: ExitStack, settings: OutboxSettings) -> None:
        """Ship from now on; `resources` ends it. Waits up to `open_timeout_s` for the topic's metadata, then goes on
        without.

        Raises the error for a topic that can't be used, OutboxDiverged, DestinationAhead, TopicLostRecords.
        """
        if self.sink is not None:
            resources.callback(self.sink.close)
            go_on = settings.config.on_diverged is OnDiverged.GO_ON
            self.sink.start(settings.config.open_timeout_s, despite_divergence=go_on)

    def lag(self) -> "dict[str, DestinationLag]":
        """The lag, by `kafka:<topic>`; empty without a destination."""
        return {} if self.sink is None else {holder_name(self.sink.topic): self.sink.state.lag()}

    def wait(self, flush: Callable[[float | None], None], timeout: float | None) -> None:
        """Flush, then return when the topic holds everything. Raises as `Outbox.wait_shipped`."""
        if self.sink is None:
            raise BadArgument("kafka", "the outbox was opened without a destination: Outbox.open(..., kafka=...)")
        deadline_s = None if timeout is None else monotonic() + timeout
        flush(timeout)
        self.sink.state.wait({log.partition: log.log_end_offset for log in self._logs}, timeout, deadline_s)

    def skip(self, wanted: SkippedRecords, topic: str | None = None) -> list[Skip]:
        """As `pushrep outbox skip`, asked of the open outbox. Raises BadArgument, OSError."""
        if self.sink is None:
            raise BadArgument("kafka", "the outbox was opened without a destination: there is nothing to skip for")
        if topic not in {None, self.sink.topic}:
            raise BadArgument("topic", f"the service that has the outbox open ships to {self.sink.topic}")
        logs = {log.partition: log for log in self._logs}
        found = wanted.found_in(self.sink.state.current(), logs, self._held.clock.wall_ms())
        if found:
            self.sink.skip(found)
        return found

    def finish_parked(self, numbers: Sequence[int]) -> bool:
        """As `pushrep outbox parked done`, asked of the open outbox. Raises BadArgument, what an append raises."""
        parking = self._parking_with(numbers)
        for number in numbers:
            parking.finish(number, self._held.clock.wall_ms())
        return True

    def resend_parked(self, numbers: Sequence[int], append: Callable[..., "Receipt"]) -> list[tuple[int, int]]:
        """As `pushrep outbox parked resend`, asked of the open outbox; returns partition and offset of each new record.

        append: the outbox's. Raises BadArgument, ShippingError for a record with the caller's own metadata, which it
        would lose, and what an append raises.
        """
        parking, origin = self._parking_with(numbers), self._origin
        assert origin is not None, "it comes with the parking log"
        parked = {one.number: one for one in parking.all()}
        records = {number: parking.record(number) for number in numbers}
        for number, record in records.items():
            if not is_own(record, origin):
                raise ShippingError(
                    f"parked record {number} carries the caller's own metadata, which it would lose: let its source "
                    f"append it again, then: pushrep outbox parked done {number}"
                )
        found = []
        for number, record in records.items():
            if not parked[number].is_done:
                value, key, headers, time_ms = content_of(record, origin.carrier)
                partition = parked[number].partition
                found.append((partition, append(partition, value, key, headers, time_ms).result()))
                parking.finish(number, self._held.clock.wall_ms())
        return found

    def _parking_with(self, numbers: Sequence[int]) -> ParkingLog:
        known = set() if self.parking is None else {one.number for one in self.parking.all()}
        for number in numbers:
            if number not in known:
                raise BadArgument("offset", f"{number} is not that of a parked record: see pushrep outbox parked list")
        if self.parking is None:
            raise BadArgument("offset", "give that of a parked record: none was parked yet")
        return self.parking

    def drop(self, topic: str) -> bool:
        """As `pushrep outbox skip all`, asked of the open outbox. Raises BadArgument, CorruptFile,
        OSError.
        """
        sink = self.sink
        if sink is not None and topic == sink.topic:
            raise BadArgument(
                "topic",
                f"{topic} is what the service ships to (process {os.getpid()}), and would from the logs' start at its "
                "next open: open the outbox without it, then skip all",
            )
        with self._dropping:
            filesystem, directory = self._held.filesystem, self._held.path
            known = read_progress(filesystem, directory)
            name = destination_of(known, topic)
            if sink is not None:
                sink.forget(name)
            else:
                write_progress(filesystem, directory, {one: at for one, at in known.items() if one != name})
            for log in self._logs:
                log.drop_holder(holder_name(name))
        return True


def holder_name(topic: str) -> str:
    """What a destination is called in lags, and where it holds a log."""
    return f"kafka:{topic}"


def open_shipping(  # noqa: PLR0913, PLR0917 - what is shipped, and for whom
    held: LogDirectory,
    identity: OutboxIdentity,
    logs: Sequence[SegmentLog],
    replication: "Replication | None",
    settings: OutboxSettings,
    parking: ParkingLog | None,
    known: Mapping[str, ShippingProgress],
    *,
    is_new: bool,
) -> Shipping:
    """What destinations need is held in the logs from now on. `known`: the stored progress by topic. Raises
    ShippingError for a rebase that was interrupted.
    """
    sink = None
    origin = None if settings.kafka is None and parking is None else origin_of(identity, known.values())
    if settings.kafka is not None:
        from pushrep.kafka.sink import KafkaSink, SinkConfig  # noqa: PLC0415 - loaded already, see OutboxSettings

        own_id = held.directory_id
        config = SinkConfig(
            directory=held.path,
            outbox_id=identity.outbox_id,
            topic=identity.topic,
            logs=logs,
            origin=cast("RecordOrigin", origin),
            batch_bytes=settings.config.log_config.batch_target_bytes,
            all_progress=known,
            filesystem=held.filesystem,
            clock=held.clock,
            is_new=is_new,
            partition_counts=None if replication is None else GrantedPartitionCounts(replication),
            copy_id=own_id.directory_id.hex if own_id is not None and own_id.is_copy else None,
            leads=None if replication is None else partial(_leads_by_newest_grant, replication),
            parking=parking,
        )
        sink = KafkaSink(config, settings.kafka)
    for log in logs:
        for topic, progress in known.items():
            if sink is None or topic != sink.topic:
                at = progress.partitions.get(log.partition)
                log.hold(holder_name(topic), partial(int, log.log_start_offset if at is None else at.acknowledged))
        if sink is not None:
            log.hold(holder_name(sink.topic), partial(sink.needed_from, log.partition))
    return Shipping(held, logs, sink, parking, origin)


def is_own(record: Record, origin: "RecordOrigin") -> bool:
    """Whether a record's metadata is the outbox's own, and not its caller's."""
    metadata = origin.metadata_of(record)
    return metadata is not None and origin.epoch_of(metadata) is not None


Content = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]


def content_of(record: Record, carrier: str) -> Content:
    """Value, the caller's key and headers, timestamp: everything but the position."""
    if carrier == "key":
        return record.value, None, record.headers, record.timestamp_ms
    headers = list(record.headers)
    own = max(n for n, (name, _) in enumerate(headers) if name == METADATA_HEADER)
    return record.value, record.key, (*headers[:own], *headers[own + 1 :]), record.timestamp_ms


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
