"""An outbox as Prometheus sees it: a collector that an embedding service registers. Everything is read when scraped.

    from prometheus_client import REGISTRY, start_http_server
    collector = OutboxCollector(outbox)
    REGISTRY.register(collector)            collector.add(another)       collector.remove(outbox)

One collector for all outboxes of a registry: their samples differ in the labels `outbox` (its id) and `topic`. A closed
outbox tells nothing more. Needs the extra `metrics`.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import ForkedProcess, PushrepError
from pushrep.kafka.fence import Fence
from pushrep.kafka.progress import read_progress
from pushrep.kafka.sink_state import DestinationLag
from pushrep.log import LogClosed
from pushrep.log.directory_files import log_name
from pushrep.log.inspection import lock_holder, summarize
from pushrep.log.slots import slot_directories
from pushrep.metrics import Families
from pushrep.outbox.identity import read_identity
from pushrep.outbox.shipping import holder_name
from pushrep.outbox.status import Facts, LeadingState, MemberStatus, OutboxStatus, partitions_of, status_of
from pushrep.push.manager import PushManager

_LOG = logging.getLogger("pushrep.outbox")


class SlotsCollector(Collector):
    """The slots of one directory (`Outbox.open_slot`), in any process: by what their files say, the dead ones' too."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def describe(self) -> Iterable[Metric]:
        """Nothing yet, as above."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Of each slot whether somebody has it open, where its logs end, what a topic has not acknowledged."""
        families = Families()
        for path in slot_directories(self._directory):
            try:
                self._collect(families, path)
            except (PushrepError, OSError) as error:  # it is being made, or damaged: the others are told of
                _LOG.warning("%s: no figures of this slot: %s", path, error)
        return families

    @staticmethod
    def _collect(families: Families, path: Path) -> None:
        identity = read_identity(REAL_FILESYSTEM, path)
        if identity is None:
            return
        labels = {"slot": path.name, "outbox": identity.outbox_id, "topic": identity.topic}
        families.gauge("pushrep_slot_open", "1 while a process has it open.", labels, lock_holder(path) is not None)
        ends = [summarize(path / log_name(identity.topic, n)).log_end_offset or 0 for n in range(identity.partitions)]
        families.gauge("pushrep_slot_log_end_offsets", "Sum over its partitions.", labels, sum(ends))
        for topic, progress in read_progress(REAL_FILESYSTEM, path).items():
            has = (progress.partitions[n].acknowledged if n in progress.partitions else 0 for n in range(len(ends)))
            left = sum(max(0, end - acknowledged) for end, acknowledged in zip(ends, has, strict=True))
            help_ = "Not known to be acknowledged by the topic; known a second after it is."
            families.gauge("pushrep_slot_unshipped_records", help_, {**labels, "destination": topic}, left)


class HasFacts(Protocol):
    """What a collector asks of an outbox: an `Outbox` has it."""

    @property
    def facts(self) -> Facts:
        """What it consists of. Raises ForkedProcess in a fork."""


class OutboxView(NamedTuple):
    """An outbox by its facts alone, for who must not keep it from being collected."""

    facts: Facts


class OutboxCollector(Collector):
    """Thread-safe. by_partition: samples of each partition, too; without it they are as few however many there are."""

    def __init__(self, *outboxes: HasFacts, by_partition: bool = True) -> None:
        self._outboxes = tuple(outboxes)
        self._by_partition = by_partition

    def add(self, outbox: HasFacts) -> None:
        """Tell of this one, too."""
        self._outboxes = (*self._outboxes, outbox)

    def remove(self, outbox: HasFacts) -> None:
        """Tell of it no more."""
        self._outboxes = tuple(one for one in self._outboxes if one is not outbox)

    def describe(self) -> Iterable[Metric]:
        """Nothing yet: a registry that asks beforehand shall not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every family, with the samples of all open outboxes."""
        families = Families()
        for outbox in self._outboxes:
            try:
                self._collect(families, outbox.facts)
            except (LogClosed, ForkedProcess):  # a fork's copy: its owner is scraped
                continue
        return families

    def _collect(self, families: Families, facts: Facts) -> None:
        labels = {"outbox": facts.identity.outbox_id, "topic": facts.identity.topic}
        status = status_of(facts)
        _outbox(families, labels, facts, status)
        for member in status.members:
            _member(families, labels, member)
        for destination, lag in facts.shipping.lag().items():
            _destination(families, {**labels, "destination": destination}, lag)
        if facts.shipping.shipper is not None and (fence := facts.shipping.shipper.fence) is not None:
            _fence(families, {**labels, "destination": holder_name(facts.shipping.shipper.topic)}, fence)
        if facts.replication is not None and (manager := facts.replication.manager) is not None:
            _pushing(families, labels, manager)
        if self._by_partition:
            _partitions(families, labels, facts)


def _outbox(families: Families, labels: dict[str, str], facts: Facts, status: OutboxStatus) -> None:
    for state in LeadingState:
        help_ = "1 in the state that the outbox is in."
        families.gauge("pushrep_outbox_state", help_, {**labels, "state": state.name.lower()}, status.state is state)
    for name, help_, value in (
        ("pushrep_outbox_epoch", "Of the grant that it leads by, -1 without one.", status.epoch),
        ("pushrep_outbox_min_insync_replicas", "Members that ALL waits for, at least.", status.min_insync_replicas),
        ("pushrep_outbox_in_sync_members_min", "Members in the smallest in-sync set.", status.in_sync_min),
        ("pushrep_outbox_under_min_insync_partitions", "Partitions that refuse ALL now.", status.under_min_insync),
        ("pushrep_outbox_buffer_bytes", "Records that are not decided yet.", facts.budget.taken),
        ("pushrep_outbox_buffer_limit_bytes", "buffer_bytes; at it appends wait.", facts.budget.limit),
    ):
        families.gauge(name, help_, labels, value)
    log = next(iter(facts.logs.values()))
    families.disk(labels, log.disk)
    families.scrub(labels, log.scrub.status)


def _member(families: Families, labels: dict[str, str], member: MemberStatus) -> None:
    lag = member.lag
    if lag is None:
        return
    labels = {**labels, "replica": str(member.index), "address": member.address}
    for name, help_, value in (
        ("pushrep_replica_lag_records", "Records that it is not known to hold.", lag.records),
        ("pushrep_replica_lag_bytes", "Bytes that it is not known to hold.", lag.size_bytes),
        ("pushrep_replica_lag_seconds", "Age of the oldest record that it is not known to hold.", lag.age_ms / 1000),
        ("pushrep_replica_in_sync_partitions", "Partitions in whose in-sync set it is.", lag.in_sync),
        ("pushrep_replica_sessions", "Live push sessions.", member.sessions),
    ):
        families.gauge(name, help_, labels, value)


def _destination(families: Families, labels: dict[str, str], lag: DestinationLag) -> None:
    for name, help_, value in (
        ("pushrep_destination_lag_records", "Records that the topic has not acknowledged.", lag.records),
        ("pushrep_destination_lag_bytes", "Bytes that the topic has not acknowledged.", lag.size_bytes),
        ("pushrep_destination_lag_seconds", "Age of the oldest of them by its timestamp.", (lag.age_ms or 0) / 1000),
        ("pushrep_destination_stopped_partitions", "Partitions that wait for an operator.", len(lag.stopped)),
        ("pushrep_destination_in_trouble", "1 while something keeps all of it back.", lag.trouble is not None),
    ):
        families.gauge(name, help_, labels, value)


def _fence(families: Families, labels: dict[str, str], fence: Fence) -> None:
    help_ = "1 while brokers refuse batches of other instances of the outbox."
    families.gauge("pushrep_destination_fenced", help_, labels, fence.is_standing)
    help_ = "1 if the coordinator did not know this outbox, so that instances from before are not refused."
    families.gauge("pushrep_destination_earlier_unfenced", help_, labels, fence.earlier_unfenced)


def _pushing(families: Families, labels: dict[str, str], manager: PushManager) -> None:
    memory = manager.memory
    families.gauge("pushrep_push_buffer_bytes", "Records kept in memory for replicas.", labels, memory.used_bytes)
    families.gauge("pushrep_push_buffer_limit_bytes", "buffer_bytes_max.", labels, memory.limit_bytes)
    help_ = "Given up before replicas had them, and read from the log again."
    families.counter("pushrep_push_buffer_evicted_bytes", help_, labels, memory.evicted_bytes)
    for reason, count in list(manager.session_ends.items()):
        more = {**labels, "reason": reason.name}
        families.counter("pushrep_push_session_ends", "Push sessions that ended, by reason.", more, count)
    for (replica, error), count in list(manager.refusals.items()):
        more = {**labels, "replica": str(replica), "code": error.name}
        families.counter("pushrep_replica_refusals", "Answers of a replica with an error.", more, count)
    for replica, count in list(manager.not_caught_up.items()):
        help_ = "Times that a replica was found behind for longer than replica_lag_max_ms."
        families.counter("pushrep_follower_not_caught_up", help_, {**labels, "replica": str(replica)}, count)


def _partitions(families: Families, labels: dict[str, str], facts: Facts) -> None:
    for one in partitions_of(facts, facts.logs):
        more = {**labels, "partition": str(one.partition)}
        for name, help_, value in (
            ("pushrep_log_start_offset", "First offset that can be read.", one.log_start_offset),
            ("pushrep_log_end_offset", "The offset that the next record gets.", one.log_end_offset),
            ("pushrep_flushed_offset", "First offset not known to be on disk.", one.flushed_offset),
            ("pushrep_high_watermark", "First offset not held by enough members.", one.high_watermark),
            ("pushrep_in_sync_members", "Members in the in-sync set, the leader counted.", len(one.in_sync)),
        ):
            families.gauge(name, help_, more, value)
