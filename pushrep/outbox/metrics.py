"""The collectors of outboxes for Prometheus. A service registers one; it reads all values at each scrape.

    from prometheus_client import REGISTRY, start_http_server
    collector = OutboxCollector(outbox)
    REGISTRY.register(collector)            collector.add(another)       collector.remove(outbox)

Use one collector for all outboxes of a registry: their samples differ in the labels `outbox` (the id) and `topic`. A
closed outbox has no samples. SlotsCollector reads worker slots from their files. The names and help texts are in
pushrep/metrics.py.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import ForkedProcess, PushrepError
from pushrep.kafka.progress import read_progress
from pushrep.log import LogClosed
from pushrep.log.directory_files import log_name, slot_directories
from pushrep.log.inspection import lock_holder, summarize
from pushrep.metrics import Families
from pushrep.outbox.identity import read_identity
from pushrep.outbox.shipping import holder_name
from pushrep.outbox.status import Facts, LeadingState, MemberStatus, OutboxStatus, partitions_of, status_of
from pushrep.replicate.manager import PushManager

if TYPE_CHECKING:
    from pushrep.kafka.sink import KafkaSink

_LOG = logging.getLogger("pushrep.outbox")


class SlotsCollector(Collector):
    """The slots of one directory (`Outbox.open_slot`), for any process: it reads their files, so it has samples of
    workers that were killed, too.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Samples of each slot: whether a process has it open, the sum of its log end offsets, and how many records
        each topic has not acknowledged.
        """
        families = Families()
        for path in slot_directories(self._directory):
            try:
                self._collect(families, path)
            except (PushrepError, OSError) as error:  # the slot is being made, or is damaged; the others have samples
                _LOG.warning("%s: no metrics of this slot: %s", path, error)
        return families

    @staticmethod
    def _collect(families: Families, path: Path) -> None:
        identity = read_identity(REAL_FILESYSTEM, path)
        if identity is None:
            return
        labels = {"slot": path.name, "outbox": identity.outbox_id, "topic": identity.topic}
        families.add("pushrep_slot_open", labels, lock_holder(path) is not None)
        ends = [summarize(path / log_name(identity.topic, n)).log_end_offset or 0 for n in range(identity.partitions)]
        families.add("pushrep_slot_log_end_offsets", labels, sum(ends))
        for topic, progress in read_progress(REAL_FILESYSTEM, path).items():
            has = (progress.partitions[n].acknowledged if n in progress.partitions else 0 for n in range(len(ends)))
            left = sum(max(0, end - acknowledged) for end, acknowledged in zip(ends, has, strict=True))
            families.add("pushrep_slot_unshipped_records", {**labels, "destination": topic}, left)


class HasFacts(Protocol):
    """What a collector needs of an outbox. `Outbox` has it."""

    @property
    def facts(self) -> Facts:
        """The parts of the outbox. Raises ForkedProcess in a forked child."""


class OutboxView(NamedTuple):
    """The facts of an outbox without the outbox: a collector that holds this does not keep the `Outbox` alive."""

    facts: Facts


class OutboxCollector(Collector):
    """Metrics of outboxes. Thread-safe.

    by_partition: add samples of each partition; without them the number of samples does not grow with the partitions.
    kafka_away_limit_s: seconds without contact to Kafka after which `kafka_away` is a problem; None: the limit of the
        outbox.
    """

    def __init__(self, *outboxes: HasFacts, by_partition: bool = True, kafka_away_limit_s: float | None = None) -> None:
        self._outboxes = tuple(outboxes)
        self._by_partition, self._away_limit_s = by_partition, kafka_away_limit_s

    def add(self, outbox: HasFacts) -> None:
        """Collect from this outbox, too."""
        self._outboxes = (*self._outboxes, outbox)

    def remove(self, outbox: HasFacts) -> None:
        """Collect from this outbox no more."""
        self._outboxes = tuple(one for one in self._outboxes if one is not outbox)

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families, with the samples of all open outboxes."""
        families = Families()
        for outbox in self._outboxes:
            try:
                self._collect(families, outbox.facts)
            except (LogClosed, ForkedProcess):  # ForkedProcess: in a forked child; the parent has the samples
                continue
        return families

    def _collect(self, families: Families, facts: Facts) -> None:
        labels = {"outbox": facts.identity.outbox_id, "topic": facts.identity.topic}
        status = status_of(facts)
        families.build_info()
        families.problems(labels, status.problems(self._away_limit_s))
        families.certificates(labels, status.certificates)
        _outbox(families, labels, facts, status)
        _appending(families, labels, facts)
        for member in status.members:
            _member(families, labels, member)
        if (sink := facts.shipping.sink) is not None:
            _destination(families, {**labels, "destination": holder_name(sink.topic)}, sink)
        if facts.replication is not None and (manager := facts.replication.manager) is not None:
            _pushing(families, labels, manager)
        if self._by_partition:
            _partitions(families, labels, facts)


def _outbox(families: Families, labels: dict[str, str], facts: Facts, status: OutboxStatus) -> None:
    for state in LeadingState:
        families.add("pushrep_outbox_state", {**labels, "state": state.name.lower()}, status.state is state)
    families.add_all(
        labels,
        {
            "pushrep_outbox_epoch": status.epoch,
            "pushrep_takeovers_held_until_timestamp_seconds": 0 if status.hold is None else status.hold.until_ms / 1000,
            "pushrep_outbox_min_insync_replicas": status.min_insync_replicas,
            "pushrep_outbox_in_sync_members_min": status.in_sync_min,
            "pushrep_outbox_under_min_insync_partitions": status.under_min_insync,
            "pushrep_outbox_damaged_partitions": len(status.damaged),
        },
    )
    families.logs(labels, facts.logs.values())
    families.disk(labels, next(iter(facts.logs.values())).disk)
    families.scrub(labels, status.scrub)


def _appending(families: Families, labels: dict[str, str], facts: Facts) -> None:
    many, failed = facts.appends, Counter[str]()
    for one in many:
        failed.update(one.failed)
    families.add_all(
        labels,
        {
            "pushrep_append_records_total": sum(one.records for one in many),
            "pushrep_append_bytes_total": sum(one.size_bytes for one in many),
            "pushrep_append_batches_total": sum(one.batches for one in many),
            "pushrep_outbox_buffer_bytes": facts.budget.taken,
            "pushrep_outbox_buffer_limit_bytes": facts.budget.limit,
        },
    )
    families.counted("pushrep_append_refused_total", labels, "reason", facts.refused)
    families.counted("pushrep_append_failed_records_total", labels, "reason", failed)
    families.durations("pushrep_append_duration_seconds", labels, *(one.appended for one in many))
    families.durations("pushrep_acknowledge_duration_seconds", labels, *(one.acknowledged for one in many))


def _member(families: Families, labels: dict[str, str], member: MemberStatus) -> None:
    lag = member.lag
    if lag is None:
        return
    families.add_all(
        {**labels, "replica": str(member.index), "address": member.address},
        {
            "pushrep_replica_lag_records": lag.records,
            "pushrep_replica_lag_bytes": lag.size_bytes,
            "pushrep_replica_lag_seconds": lag.age_ms / 1000,
            "pushrep_replica_in_sync_partitions": lag.in_sync,
            "pushrep_replica_sessions": member.sessions,
        },
    )


def _destination(families: Families, labels: dict[str, str], sink: "KafkaSink") -> None:
    lag, counts, fence = sink.lag(), sink.counts, sink.fence
    families.add_all(
        labels,
        {
            "pushrep_destination_lag_records": lag.records,
            "pushrep_destination_lag_bytes": lag.size_bytes,
            "pushrep_destination_lag_seconds": (lag.age_ms or 0) / 1000,
            "pushrep_destination_stopped_partitions": len(lag.stopped),
            "pushrep_destination_in_trouble": lag.trouble is not None,
            "pushrep_destination_trouble_seconds": (sink.trouble_ms() or 0) / 1000,
            "pushrep_destination_shipped_records_total": counts.records,
            "pushrep_destination_shipped_bytes_total": counts.size_bytes,
            "pushrep_destination_shipped_batches_total": counts.batches,
            "pushrep_destination_retried_batches_total": counts.retried,
            "pushrep_destination_connections_total": counts.connections,
            "pushrep_destination_taken_over_total": counts.taken_over,
        },
    )
    families.counted("pushrep_destination_errors_total", labels, "code", counts.errors)
    if fence is not None:
        families.add("pushrep_destination_fenced", labels, fence.is_standing)
        families.add("pushrep_destination_earlier_unfenced", labels, fence.earlier_unfenced)


def _pushing(families: Families, labels: dict[str, str], manager: PushManager) -> None:
    memory = manager.memory
    families.add_all(
        labels,
        {
            "pushrep_push_buffer_bytes": memory.used_bytes,
            "pushrep_push_buffer_limit_bytes": memory.limit_bytes,
            "pushrep_push_buffer_evicted_bytes_total": memory.evicted_bytes,
        },
    )
    ends = {reason.name: count for reason, count in list(manager.session_ends.items())}
    families.counted("pushrep_push_session_ends_total", labels, "reason", ends)
    for (replica, error), count in list(manager.refusals.items()):
        more = {**labels, "replica": str(replica), "code": error.name}
        families.add("pushrep_replica_refusals_total", more, count)
    for name, counts in (
        ("pushrep_follower_not_caught_up_total", manager.not_caught_up),
        ("pushrep_replica_connections_lost_total", manager.connections_lost),
    ):
        families.counted(name, labels, "replica", {str(replica): count for replica, count in list(counts.items())})


def _partitions(families: Families, labels: dict[str, str], facts: Facts) -> None:
    for one in partitions_of(facts, facts.logs):
        families.add_all(
            {**labels, "partition": str(one.partition)},
            {
                "pushrep_log_start_offset": one.log_start_offset,
                "pushrep_log_end_offset": one.log_end_offset,
                "pushrep_flushed_offset": one.flushed_offset,
                "pushrep_high_watermark": one.high_watermark,
                "pushrep_in_sync_members": len(one.in_sync),
            },
        )
