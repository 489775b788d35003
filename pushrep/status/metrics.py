"""The names, types and help of all metrics, each with the field of a status that it shows; and the collector.

    REGISTRY.register(StatusCollector(outbox.status))          an outbox; of a node: node.status; of a job of your own:
    REGISTRY.register(StatusCollector(lambda: JobStatus(name="billing", counts=consumer.counts)))

Names follow Prometheus' guide: they begin with `pushrep_`, end with the base unit (`_bytes`, `_seconds`,
`_timestamp_seconds` since 1970), and counters end in `_total`. docs/metrics.md is generated from FAMILIES. Values are
read at each scrape. This module needs the extra `metrics` (prometheus-client).

The samples of a path: one for each item of a sequence, and for each key of a mapping, which is the last label. At the
path's end a histogram is the sample, of a sequence its length, of a field `..._ms` its seconds; None has no sample. A
label is an attribute of an object on the path, the innermost that has it; `outbox` and `topic` of the outermost.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from filtering.extras import needed_by

with needed_by("the collector for Prometheus"):
    import prometheus_client  # noqa: F401 - without it, needed_by raises an error that names the extra to install

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.errors import PushrepError
from pushrep.importing import installed_version
from pushrep.status.value import Histogram, Sample, Status


class Family(NamedTuple):
    """One metric. name: as scraped. by: which statuses have it. labels: the label names of each sample, in order.
    path: the field of the status; empty: another collector fills it.
    """

    name: str
    by: str
    labels: tuple[str, ...]
    path: str
    help: str

    @property
    def kind(self) -> str:
        """The metric's type in Prometheus: counter, gauge or histogram."""
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.name.endswith("_duration_seconds") else "gauge"


_OUTBOX, _NODE, _BOTH, _ALL = "service", "node", "service, node", "service, node, job"
_O = ("outbox", "topic")
_D = (*_O, "destination")
_F = ("name", "source")
_P = (*_O, "partition")
_R = (*_O, "replica")
_TABLE: Mapping[tuple[str, tuple[str, ...]], tuple[tuple[str, str, str], ...]] = {
    # (by, labels): (name, path, help), ...
    (_ALL, ("version", "python")): (
        ("build_info", "", "Always 1; the labels have the versions."),
    ),
    (_ALL, (*_O, "problem")): (
        ("problem", "problem_flags", "1 while `pushrep status` shows this problem, else 0."),
    ),
    (_ALL, (*_O, "use")): (
        ("certificate_expiry_timestamp_seconds", "certificates",
         "Unix time when the certificate or its CA expires, whichever is earlier."),
    ),
    (_OUTBOX, _O): (
        ("append_records_total", "appends.records", "Records written to the logs."),
        ("append_bytes_total", "appends.size_bytes", "Bytes of record batches written to the logs."),
        ("append_batches_total", "appends.batches", "Record batches written to the logs."),
        ("append_duration_seconds", "appends.appended",
         "Time from a batch's first record to the write of the batch, with durability FLUSHED to its sync."),
        ("acknowledge_duration_seconds", "appends.acknowledged",
         "Time from a batch's first record to the acknowledgement of the batch."),
        ("outbox_buffer_bytes", "appends.buffer_bytes",
         "Bytes of records that are neither acknowledged nor failed yet."),
        ("outbox_buffer_limit_bytes", "appends.buffer_limit_bytes",
         "The setting buffer_bytes: above it, append waits."),
        ("outbox_epoch", "epoch", "Leader epoch of the outbox's grant, -1 without a grant."),
        ("outbox_min_insync_replicas", "min_insync_replicas", "In-sync members that an append with acks=ALL needs."),
        ("outbox_in_sync_members_min", "in_sync_min", "Members in the smallest in-sync set of all partitions."),
        ("outbox_under_min_insync_partitions", "under_min_insync",
         "Partitions with fewer than min_insync_replicas in-sync members: they refuse acks=ALL."),
        ("outbox_damaged_partitions", "damaged", "Partitions whose log lost records that were on disk."),
        ("outbox_stopped_partitions", "stopped", "Partitions whose log refused its last append."),
        ("push_buffer_bytes", "push.buffer_bytes", "Bytes of records kept in memory for replicas."),
        ("push_buffer_limit_bytes", "push.buffer_limit_bytes", "The setting buffer_bytes_max of the push."),
        ("push_buffer_evicted_bytes_total", "push.evicted_bytes",
         "Bytes evicted from memory, which pushes then read from the log."),
        ("table_relayed_rows_total", "relay.relayed", "Rows of a database that were relayed into the outbox."),
        ("table_lag_rows", "relay.rows.waiting", "Rows of a database that wait for the relay."),
        ("table_lag_seconds", "relay.rows.age_ms", "Age of the row that waits longest for the relay."),
        ("table_parked_rows", "relay.rows.parked", "Rows that the outbox refused, and that wait for an operator."),
        ("table_oldest_snapshot_seconds", "relay.rows.snapshot.age_ms",
         "Age of the snapshot that keeps deleted rows of the database from vacuum for the longest."),
        ("table_oldest_snapshot_transactions", "relay.rows.snapshot.transactions",
         "Transactions that began since that snapshot."),
    ),
    (_OUTBOX, (*_O, "reason")): (
        ("append_refused_total", "appends.refused", "Calls of append that were refused, by error."),
        ("append_failed_records_total", "appends.failed", "Accepted records that failed, by error."),
        ("push_session_ends_total", "push.session_ends", "Push sessions that ended, by reason."),
    ),
    (_OUTBOX, (*_O, "state")): (
        ("outbox_state", "state_flags", "1 for the outbox's present state, 0 for the others."),
    ),
    (_BOTH, _O): (
        ("takeovers_held_until_timestamp_seconds", "grants.held_until_ms",
         "Unix time until which no standby takes over by itself (`pushrep outbox hold`); 0: takeovers are not held."),
        ("log_recoveries_total", "outboxes.recovery.recoveries", "Logs that were opened after an unclean stop."),
        ("log_recovery_seconds_total", "outboxes.recovery.seconds", "Time spent on opening the logs."),
        ("log_recovery_cut_bytes_total", "outboxes.recovery.cut_bytes",
         "Bytes of torn tails that opening the logs cut off."),
        ("log_cuts_total", "outboxes.recovery.cuts", "Times that an open log was truncated."),
        ("log_quarantines_total", "outboxes.recovery.quarantines", "Times that damaged batches were quarantined."),
        ("fsync_duration_seconds", "outboxes.syncs", "Duration of a sync of a segment."),
        ("scrub_findings", "outboxes.scrub.findings", "Sealed segments that are damaged, and not repaired yet."),
        ("scrub_passes_total", "outboxes.scrub.passes", "Times that the scrub has read all sealed segments."),
        ("scrub_last_pass_timestamp_seconds", "outboxes.scrub.passed_ms", "Unix time when the last pass ended."),
        ("scrub_read_bytes_total", "outboxes.scrub.bytes_read", "Bytes that the scrub has read."),
        ("scrub_seals_made_total", "outboxes.scrub.seals_made", "Segments that had no seal and got one."),
        ("scrub_damaged_total", "outboxes.scrub.damaged", "Sealed segments that were found damaged."),
        ("scrub_repaired_total", "outboxes.scrub.repaired", "Segments repaired with batches from another member."),
    ),
    (_OUTBOX, (*_R, "address")): (
        ("replica_lag_records", "members.lag.records", "Records that the replica has not acknowledged."),
        ("replica_lag_bytes", "members.lag.size_bytes", "Bytes that the replica has not acknowledged."),
        ("replica_lag_seconds", "members.lag.age_ms",
         "Age of the oldest record that the replica has not acknowledged."),
        ("replica_in_sync_partitions", "members.lag.in_sync", "Partitions whose in-sync set contains the replica."),
        ("replica_sessions", "members.pushed_to", "Push sessions to the replica that are open."),
    ),
    (_OUTBOX, (*_R, "code")): (
        ("replica_refusals_total", "push.refusals.count", "Error responses of the replica, by code."),
    ),
    (_OUTBOX, (*_P, "replica")): (
        ("replica_partition_lag_records", "parts.sessions.lag", "Records that the replica is not known to hold."),
    ),
    (_OUTBOX, (*_P, "destination")): (
        ("destination_partition_lag_records", "parts.unshipped", "Records that the topic has not acknowledged."),
    ),
    (_OUTBOX, _R): (
        ("replica_request_duration_seconds", "push.requests.durations",
         "Time from sending records to the replica to its answer."),
        ("replica_connections_lost_total", "push.connections_lost",
         "Connections to the replica that broke; the leader reconnects."),
        ("follower_not_caught_up_total", "push.not_caught_up",
         "Times that the replica left the in-sync set because it lagged longer than replica_lag_max_ms."),
    ),
    (_OUTBOX, _D): (
        ("destination_lag_records", "destinations.records", "Records that the topic has not acknowledged."),
        ("destination_lag_bytes", "destinations.size_bytes", "Bytes that the topic has not acknowledged."),
        ("destination_lag_seconds", "destinations.age_ms",
         "Age of the oldest unacknowledged record, by its timestamp."),
        ("destination_stopped_partitions", "destinations.stopped",
         "Partitions that are not shipped until an operator acts; see pushrep status."),
        ("destination_in_trouble", "destinations.in_trouble", "1 while nothing can be shipped, else 0."),
        ("destination_trouble_seconds", "destinations.trouble_ms",
         "Seconds since shipping began to fail; 0 while it works."),
        ("destination_fenced", "destinations.is_fenced",
         "1 while brokers refuse batches of other instances of the outbox."),
        ("destination_earlier_unfenced", "destinations.earlier_unfenced",
         "1 if brokers may accept batches of earlier instances."),
        ("destination_request_duration_seconds", "destinations.requests",
         "Time from sending a Produce request to the broker's answer."),
        ("destination_shipped_records_total", "destinations.counts.records", "Records that the topic acknowledged."),
        ("destination_shipped_bytes_total", "destinations.counts.size_bytes",
         "Bytes of batches that the topic acknowledged."),
        ("destination_shipped_batches_total", "destinations.counts.batches", "Batches that the topic acknowledged."),
        ("destination_retried_batches_total", "destinations.counts.retried", "Batches that were sent again."),
        ("destination_connections_total", "destinations.counts.connections",
         "Connections made to partition leaders at brokers."),
        ("destination_taken_over_total", "destinations.counts.taken_over",
         "Times that another instance fenced this one."),
    ),
    (_OUTBOX, (*_D, "code")): (
        ("destination_errors_total", "destinations.counts.errors", "Batches that brokers answered with an error."),
    ),
    (_BOTH, _P): (
        ("log_start_offset", "parts.log_start_offset", "First offset that can be read."),
        ("log_end_offset", "parts.log_end_offset", "The offset that the next record gets."),
        ("flushed_offset", "parts.flushed_offset", "First offset not known to be on disk."),
        ("high_watermark", "parts.high_watermark", "First offset not known to be held by enough members."),
    ),
    (_OUTBOX, _P): (
        ("in_sync_members", "parts.in_sync", "Members in the in-sync set, the leader counted."),
    ),
    (_BOTH, ("mount",)): (
        ("disk_used_bytes", "outboxes.disk.used_bytes", "Used bytes of a file system with logs."),
        ("disk_size_bytes", "outboxes.disk.size_bytes", "Size of a file system with logs."),
    ),
    (_NODE, ()): (
        ("node_connections", "connections", "Open connections to the node."),
        ("node_connections_limit", "budget.connections_max",
         "The most open connections: connections_max, or a quarter of the descriptors."),
        ("node_held_bytes", "budget.held_bytes", "Bytes of large requests and answers that the node holds."),
        ("node_held_limit_bytes", "budget.held_bytes_max", "The setting requests_bytes_max."),
        ("node_replica_epoch", "replica_epoch", "The node's replica epoch, which each start raises."),
        ("node_open_logs", "logs", "Logs that the node has open."),
        ("node_offline_logs", "logs_offline", "Logs whose disk failed, or that need an operator to continue."),
        ("replay_sessions_limit", "replays.sessions_max", "The most replay sessions at once, of all identities."),
        ("replay_lag_max_records", "replays.lag_max", "Lag of the replay that is furthest behind, in records."),
        ("replay_stalled_seconds", "replays.stalled_ms",
         "The longest time for which a replay that is behind has sent nothing."),
        ("replay_sent_bytes_total", "replays.bytes_sent", "Bytes that replays sent."),
        ("replay_sent_records_total", "replays.records_sent", "Records that replays sent."),
    ),
    (_NODE, ("outbox", "state")): (
        ("node_standby", "standbys.is_there", "1 while a service stands by on this node, by its state."),
    ),
    (_NODE, _P): (
        ("node_log_offline", "logs.is_offline", "1 if the log's disk failed, else 0."),
        ("node_log_waits_for_operator", "logs.is_waiting", "1 if the log needs an operator to follow its leader."),
        ("node_last_contact_timestamp_seconds", "logs.last_contact_ms",
         "Unix time of the leader's last request for the log; below 0 if there was none since the node started."),
    ),
    (_NODE, ("call", "code")): (
        ("node_refusals_total", "refusals.count", "Error codes in responses, one for each partition."),
    ),
    (_NODE, ("call", "identity")): (
        ("node_unauthorised_total", "unauthorised.count", "Calls that were refused as unauthorised."),
    ),
    (_NODE, ("state",)): (
        ("replay_sessions", "replay_states", "Replay sessions by state."),
    ),
    (_NODE, ("reason",)): (
        ("node_closed_connections_total", "budget.closed",
         "Connections closed to make room for others or for want of it (full), and that missed a deadline (late)."),
        ("replay_session_ends_total", "replays.ended", "Replays that ended, by reason."),
    ),
    (_NODE, ("code",)): (
        ("replay_refusals_total", "replays.refused", "Replays that were refused, by code."),
    ),
    ("filter", _F): (
        ("filter_kept_records_total", "filters.counts.kept", "Records with metadata that the filter kept."),
        ("filter_dropped_records_total", "filters.counts.dropped", "Replayed records that the filter dropped."),
        ("filter_late_records_total", "filters.counts.late", "Dropped records that are older than the window."),
        ("filter_unkeyed_records_total", "filters.unchecked",
         "Records kept without a check: they have no metadata, or another PID than the chosen ones."),
        ("filter_jumped_offsets_total", "filters.counts.jumped", "Source offsets that are missing between records."),
        ("filter_pairs", "filters.counts.pairs", "Pairs of PID and source partition that the filter has marks of."),
    ),
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    f"pushrep_{name}": Family(f"pushrep_{name}", by, labels, path, help_)
    for (by, labels), rows in _TABLE.items()
    for name, path, help_ in rows
}
"""All metrics by name, in the order of docs/metrics.md. A label without a value in a sample is empty."""

_BUILD_INFO = Sample("pushrep_build_info", {"version": installed_version(), "python": platform.python_version()}, 1)
_MAKES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_BY = {"outbox": {"service"}, "node": {"node"}, "job": {"job", "filter"}, "standby": {"job"}}
_ATTRIBUTES = {"outbox": "outbox_id", "destination": "name"}


class Families:
    """The metric families of one scrape. A family is made when it gets its first sample."""

    def __init__(self) -> None:
        self._made: dict[str, Metric] = {}
        self._labels: set[tuple[str, ...]] = set()

    def add(self, name: str, labels: Mapping[str, str], value: float | Histogram) -> None:
        """Add a sample, unless the family has one with these labels."""
        family = FAMILIES[name]
        assert labels.keys() <= set(family.labels), f"{name} has the labels {family.labels}, not {tuple(labels)}"
        values = [labels.get(label, "") for label in family.labels]
        if (name, *values) in self._labels:
            return
        self._labels.add((name, *values))
        if name not in self._made:
            self._made[name] = _MAKES[family.kind](name, family.help, labels=family.labels)
        made = self._made[name]
        if isinstance(made, HistogramMetricFamily):
            assert isinstance(value, Histogram), f"{name} has buckets"
            bounds = [*map(str, value.bounds_s), "+Inf"]
            made.add_metric(values, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum_s)
        else:
            assert isinstance(made, CounterMetricFamily | GaugeMetricFamily)
            assert not isinstance(value, Histogram), f"{name} has no buckets"
            made.add_metric(values, value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._made.values())


def samples_of(status: Status) -> Iterator[Sample]:
    """A sample for each value of the status that FAMILIES names."""
    yield _BUILD_INFO
    for family in FAMILIES.values():
        path = family.path.split(".")
        if family.path and not _BY[status.kind].isdisjoint(family.by.split(", ")):
            for labels, value in _samples(status, path, family.labels):
                yield Sample(family.name, labels, value)


def _samples(
    status: Any, path: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[dict[str, str], float | Histogram]]:
    for passed, value in _walk([status], path):
        labels = {}
        for name in names:
            attribute = _ATTRIBUTES.get(name, name)
            having = [one for one in passed if hasattr(one, attribute)]
            if having:
                labels[name] = str(getattr(having[0 if name in _O else -1], attribute))
        if isinstance(value, Mapping):
            for key, one in list(value.items()):
                if one is not None:
                    yield {**labels, names[-1]: getattr(key, "name", str(key))}, one
        elif value is not None:
            is_many = isinstance(value, Sequence) and not isinstance(value, Histogram)
            number = len(value) if is_many else value
            yield labels, number / 1000 if path[-1].endswith("_ms") else number


def _walk(passed: list[Any], path: Sequence[str]) -> Iterator[tuple[list[Any], Any]]:
    """Yield each value at the end of the path, with the objects on the way."""
    value = getattr(passed[-1], path[0])
    if len(path) == 1:
        yield passed, value
    elif value is not None:
        is_one = hasattr(value, "_fields") or not isinstance(value, Sequence)
        for one in [value] if is_one else list(value):
            yield from _walk([*passed, one], path[1:])


class StatusCollector(Collector):
    """Metrics of outboxes, nodes and jobs: all of one registry, which differ in the labels `outbox` and `topic`, or
    `name`. Thread-safe. A source that fails, as that of a closed outbox does, has no samples.

    sources: called at each scrape.
    """

    def __init__(self, *sources: Callable[[], Status]) -> None:
        self.sources = list(sources)

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families with their samples."""
        families = Families()
        for source in list(self.sources):
            try:
                status = source()
            except PushrepError:  # it is closed; or in a forked child, where the parent has the samples
                continue
            for sample in chain(samples_of(status.own), status.elsewhere()):
                families.add(*sample)
        return families
