"""The names, types and help of all metrics (FAMILIES), and the parts that all collectors share.

Names follow Prometheus' guide: they begin with `pushrep_`, end with the base unit (`_bytes`, `_seconds`,
`_timestamp_seconds` since 1970), and counters end in `_total`. docs/metrics.md is generated from FAMILIES. The
collectors here and in pushrep/outbox/metrics.py and pushrep/replicate/node_metrics.py read the values at each scrape.
These modules need the extra `metrics` (prometheus-client), and are imported only by programs that use them.

    REGISTRY.register(FilterCollector(consumer, name="billing"))             a filtering consumer, or a CountsListener
    REGISTRY.register(StartpointCollector(store))
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from filtering.extras import needed_by

with needed_by("the collector for Prometheus"):
    import prometheus_client  # noqa: F401 - without it, needed_by raises an error that names the extra to install

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from filtering.replay_filter import FilterCounts
from pushrep.importing import installed_version
from pushrep.log import SegmentLog
from pushrep.log.disk_space import DiskWatch, Durations
from pushrep.log.recovery import Opening
from pushrep.log.scrub import ScrubStatus
from pushrep.problems import BLOCKS, Problem
from pushrep.startpoints.model import State
from pushrep.startpoints.store import StartpointStore


class Family(NamedTuple):
    """One metric. name: as scraped. by: which collectors expose it. labels: the label names of each sample, in
    order.
    """

    name: str
    by: str
    labels: tuple[str, ...]
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
FAMILIES: Mapping[str, Family] = {
    name: Family(name, by, labels, help_)
    for name, by, labels, help_ in (
        ("pushrep_build_info", _ALL, ("version", "python"), "Always 1; the labels have the versions."),
        ("pushrep_problem", _ALL, (*_O, "problem"), "1 while `pushrep status` shows this problem, else 0."),
        (
            "pushrep_certificate_expiry_timestamp_seconds",
            _ALL,
            (*_O, "use"),
            "Unix time when the certificate or its CA expires, whichever is earlier.",
        ),
        # -- appending
        ("pushrep_append_records_total", _OUTBOX, _O, "Records written to the logs."),
        ("pushrep_append_bytes_total", _OUTBOX, _O, "Bytes of record batches written to the logs."),
        ("pushrep_append_batches_total", _OUTBOX, _O, "Record batches written to the logs."),
        ("pushrep_append_refused_total", _OUTBOX, (*_O, "reason"), "Calls of append that were refused, by error."),
        ("pushrep_append_failed_records_total", _OUTBOX, (*_O, "reason"), "Accepted records that failed, by error."),
        (
            "pushrep_append_duration_seconds",
            _OUTBOX,
            _O,
            "Time from a batch's first record to the write of the batch, with durability FLUSHED to its sync.",
        ),
        (
            "pushrep_acknowledge_duration_seconds",
            _OUTBOX,
            _O,
            "Time from a batch's first record to the acknowledgement of the batch.",
        ),
        ("pushrep_outbox_buffer_bytes", _OUTBOX, _O, "Bytes of records that are neither acknowledged nor failed yet."),
        ("pushrep_outbox_buffer_limit_bytes", _OUTBOX, _O, "The setting buffer_bytes: above it, append waits."),
        # -- leading
        ("pushrep_outbox_state", _OUTBOX, (*_O, "state"), "1 for the outbox's present state, 0 for the others."),
        ("pushrep_outbox_epoch", _OUTBOX, _O, "Leader epoch of the outbox's grant, -1 without a grant."),
        (
            "pushrep_takeovers_held_until_timestamp_seconds",
            _BOTH,
            _O,
            "Unix time until which no standby takes over by itself (`pushrep outbox hold`); 0: takeovers are not held.",
        ),
        ("pushrep_outbox_min_insync_replicas", _OUTBOX, _O, "In-sync members that an append with acks=ALL needs."),
        ("pushrep_outbox_in_sync_members_min", _OUTBOX, _O, "Members in the smallest in-sync set of all partitions."),
        (
            "pushrep_outbox_under_min_insync_partitions",
            _OUTBOX,
            _O,
            "Partitions with fewer than min_insync_replicas in-sync members: they refuse acks=ALL.",
        ),
        ("pushrep_outbox_damaged_partitions", _OUTBOX, _O, "Partitions whose log lost records that were on disk."),
        ("pushrep_replica_lag_records", _OUTBOX, (*_R, "address"), "Records that the replica has not acknowledged."),
        ("pushrep_replica_lag_bytes", _OUTBOX, (*_R, "address"), "Bytes that the replica has not acknowledged."),
        (
            "pushrep_replica_lag_seconds",
            _OUTBOX,
            (*_R, "address"),
            "Age of the oldest record that the replica has not acknowledged.",
        ),
        (
            "pushrep_replica_in_sync_partitions",
            _OUTBOX,
            (*_R, "address"),
            "Partitions whose in-sync set contains the replica.",
        ),
        ("pushrep_replica_sessions", _OUTBOX, (*_R, "address"), "Push sessions to the replica that are open."),
        ("pushrep_replica_refusals_total", _OUTBOX, (*_R, "code"), "Error responses of the replica, by code."),
        (
            "pushrep_replica_connections_lost_total",
            _OUTBOX,
            _R,
            "Connections to the replica that broke; the leader reconnects.",
        ),
        (
            "pushrep_follower_not_caught_up_total",
            _OUTBOX,
            _R,
            "Times that the replica left the in-sync set because it lagged longer than replica_lag_max_ms.",
        ),
        ("pushrep_push_session_ends_total", _OUTBOX, (*_O, "reason"), "Push sessions that ended, by reason."),
        ("pushrep_push_buffer_bytes", _OUTBOX, _O, "Bytes of records kept in memory for replicas."),
        ("pushrep_push_buffer_limit_bytes", _OUTBOX, _O, "The setting buffer_bytes_max of the push."),
        (
            "pushrep_push_buffer_evicted_bytes_total",
            _OUTBOX,
            _O,
            "Bytes evicted from memory, which pushes then read from the log.",
        ),
        # -- shipping
        ("pushrep_destination_lag_records", _OUTBOX, _D, "Records that the topic has not acknowledged."),
        ("pushrep_destination_lag_bytes", _OUTBOX, _D, "Bytes that the topic has not acknowledged."),
        ("pushrep_destination_lag_seconds", _OUTBOX, _D, "Age of the oldest unacknowledged record, by its timestamp."),
        (
            "pushrep_destination_stopped_partitions",
            _OUTBOX,
            _D,
            "Partitions that are not shipped until an operator acts; see pushrep status.",
        ),
        ("pushrep_destination_in_trouble", _OUTBOX, _D, "1 while nothing can be shipped, else 0."),
        ("pushrep_destination_trouble_seconds", _OUTBOX, _D, "Seconds since shipping began to fail; 0 while it works."),
        ("pushrep_destination_fenced", _OUTBOX, _D, "1 while brokers refuse batches of other instances of the outbox."),
        ("pushrep_destination_earlier_unfenced", _OUTBOX, _D, "1 if brokers may accept batches of earlier instances."),
        ("pushrep_destination_shipped_records_total", _OUTBOX, _D, "Records that the topic acknowledged."),
        ("pushrep_destination_shipped_bytes_total", _OUTBOX, _D, "Bytes of batches that the topic acknowledged."),
        ("pushrep_destination_shipped_batches_total", _OUTBOX, _D, "Batches that the topic acknowledged."),
        ("pushrep_destination_retried_batches_total", _OUTBOX, _D, "Batches that were sent again."),
        ("pushrep_destination_errors_total", _OUTBOX, (*_D, "code"), "Batches that brokers answered with an error."),
        ("pushrep_destination_connections_total", _OUTBOX, _D, "Connections made to partition leaders at brokers."),
        ("pushrep_destination_taken_over_total", _OUTBOX, _D, "Times that another instance fenced this one."),
        # -- logs and disk
        ("pushrep_log_start_offset", _BOTH, _P, "First offset that can be read."),
        ("pushrep_log_end_offset", _BOTH, _P, "The offset that the next record gets."),
        ("pushrep_flushed_offset", _BOTH, _P, "First offset not known to be on disk."),
        ("pushrep_high_watermark", _BOTH, _P, "First offset not known to be held by enough members."),
        ("pushrep_in_sync_members", _OUTBOX, _P, "Members in the in-sync set, the leader counted."),
        ("pushrep_log_recoveries_total", _BOTH, _O, "Logs that were opened after an unclean stop."),
        ("pushrep_log_recovery_seconds_total", _BOTH, _O, "Time spent on opening the logs."),
        ("pushrep_log_recovery_cut_bytes_total", _BOTH, _O, "Bytes of torn tails that opening the logs cut off."),
        ("pushrep_log_cuts_total", _BOTH, _O, "Times that an open log was truncated."),
        ("pushrep_log_quarantines_total", _BOTH, _O, "Times that damaged batches were quarantined."),
        ("pushrep_fsync_duration_seconds", _BOTH, _O, "Duration of a sync of a segment."),
        ("pushrep_disk_used_bytes", _BOTH, ("mount",), "Used bytes of a file system with logs."),
        ("pushrep_disk_size_bytes", _BOTH, ("mount",), "Size of a file system with logs."),
        ("pushrep_scrub_findings", _BOTH, _O, "Sealed segments that are damaged, and not repaired yet."),
        ("pushrep_scrub_passes_total", _BOTH, _O, "Times that the scrub has read all sealed segments."),
        ("pushrep_scrub_read_bytes_total", _BOTH, _O, "Bytes that the scrub has read."),
        ("pushrep_scrub_seals_made_total", _BOTH, _O, "Segments that had no seal and got one."),
        ("pushrep_scrub_damaged_total", _BOTH, _O, "Sealed segments that were found damaged."),
        ("pushrep_scrub_repaired_total", _BOTH, _O, "Segments repaired with batches from another member."),
        # -- worker slots
        ("pushrep_slot_open", "slots", ("slot", *_O), "1 while a process has the slot open."),
        ("pushrep_slot_log_end_offsets", "slots", ("slot", *_O), "Log end offsets, summed over the slot's partitions."),
        ("pushrep_slot_unshipped_records", "slots", ("slot", *_D), "Records that the topic has not acknowledged."),
        # -- nodes
        ("pushrep_node_connections", _NODE, (), "Open connections to the node."),
        ("pushrep_node_replica_epoch", _NODE, (), "The node's replica epoch, which each start raises."),
        ("pushrep_node_open_logs", _NODE, (), "Logs that the node has open."),
        ("pushrep_node_offline_logs", _NODE, (), "Logs whose disk failed, or that need an operator to continue."),
        ("pushrep_node_standby", _NODE, ("outbox", "state"), "1 while a service stands by on this node, by its state."),
        ("pushrep_node_log_offline", _NODE, _P, "1 if the log's disk failed, else 0."),
        ("pushrep_node_log_waits_for_operator", _NODE, _P, "1 if the log needs an operator to follow its leader."),
        (
            "pushrep_node_last_contact_timestamp_seconds",
            _NODE,
            _P,
            "Unix time of the leader's last request for the log; below 0 if there was none since the node started.",
        ),
        ("pushrep_node_refusals_total", _NODE, ("call", "code"), "Error codes in responses, one for each partition."),
        ("pushrep_node_unauthorised_total", _NODE, ("call", "identity"), "Calls that were refused as unauthorised."),
        ("pushrep_replay_sessions", _NODE, ("state",), "Replay sessions by state."),
        ("pushrep_replay_sessions_limit", _NODE, (), "The most replay sessions at once (max_sessions)."),
        ("pushrep_replay_lag_max_records", _NODE, (), "Lag of the replay that is furthest behind, in records."),
        (
            "pushrep_replay_stalled_seconds",
            _NODE,
            (),
            "The longest time for which a replay that is behind has sent nothing.",
        ),
        ("pushrep_replay_sent_bytes_total", _NODE, (), "Bytes that replays sent."),
        ("pushrep_replay_sent_records_total", _NODE, (), "Records that replays sent."),
        ("pushrep_replay_session_ends_total", _NODE, ("reason",), "Replays that ended, by reason."),
        ("pushrep_replay_refusals_total", _NODE, ("code",), "Replays that were refused, by code."),
        # -- filters and startpoints
        ("pushrep_filter_kept_records_total", "filter", _F, "Records with metadata that the filter kept."),
        ("pushrep_filter_dropped_records_total", "filter", _F, "Replayed records that the filter dropped."),
        ("pushrep_filter_late_records_total", "filter", _F, "Dropped records that are older than the window."),
        (
            "pushrep_filter_unkeyed_records_total",
            "filter",
            _F,
            "Records kept without a check: they have no metadata, or another PID than the chosen ones.",
        ),
        ("pushrep_filter_jumped_offsets_total", "filter", _F, "Source offsets that are missing between records."),
        ("pushrep_filter_pairs", "filter", _F, "Pairs of PID and source partition that the filter has marks of."),
        (
            "pushrep_startpoints",
            "startpoints",
            ("state",),
            "Startpoints by state; one that readers have reached counts once for each reader.",
        ),
    )
}  # fmt: skip
"""All metrics by name, in the order of docs/metrics.md. A label without a value in a sample is empty."""

_MAKES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Families:
    """The metric families of one scrape. A family is made when it gets its first sample."""

    def __init__(self) -> None:
        self._made: dict[str, Metric] = {}
        self._mounts: set[str] = set()

    def build_info(self) -> None:
        """Add pushrep_build_info, once."""
        if "pushrep_build_info" not in self._made:
            self.add("pushrep_build_info", {"version": installed_version(), "python": platform.python_version()}, 1)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of a counter or a gauge."""
        family = self._of(name, labels)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily), f"{name} has buckets"
        family.add_metric([labels.get(label, "") for label in FAMILIES[name].labels], value)

    def add_all(self, labels: Mapping[str, str], values: Mapping[str, float]) -> None:
        """Add samples with the same labels. values: by name of the metric."""
        for name, value in values.items():
            self.add(name, labels, value)

    def counted(self, name: str, labels: Mapping[str, str], label: str, counts: Mapping[str, int]) -> None:
        """Add a sample for each count. label: the label that gets the key."""
        for value, count in list(counts.items()):
            self.add(name, {**labels, label: value}, count)

    def durations(self, name: str, labels: Mapping[str, str], *many: Durations) -> None:
        """Add one sample of a histogram: the sum of `many`, which have the same bounds. Without any, add nothing."""
        if not many:
            return
        family = self._of(name, labels)
        assert isinstance(family, HistogramMetricFamily), f"{name} has no buckets"
        read = [one.read() for one in many]
        counts = [sum(column) for column in zip(*(counts for counts, _ in read), strict=True)]
        buckets = list(_buckets(many[0].bounds_s, counts))
        family.add_metric([labels[label] for label in FAMILIES[name].labels], buckets, sum(s for _, s in read))

    def problems(self, labels: Mapping[str, str], problems: Iterable[Problem]) -> None:
        """Add a sample for each kind of problem, 0 if it is absent: then an alert rule has data from the first
        scrape.
        """
        words = {one.problem for one in problems}
        for word in BLOCKS:
            self.add("pushrep_problem", {**labels, "problem": word}, word in words)

    def certificates(self, labels: Mapping[str, str], certificates: Mapping[str, int | None]) -> None:
        """Add the expiry of each certificate, by its use. Those that can't be read are left out."""
        for use, expires_s in certificates.items():
            if expires_s is not None:
                self.add("pushrep_certificate_expiry_timestamp_seconds", {**labels, "use": use}, expires_s)

    def disk(self, labels: Mapping[str, str], disk: DiskWatch) -> None:
        """Add used bytes and size, once for each file system, and the durations of syncs."""
        status = disk.status()
        if status.mount not in self._mounts:
            self._mounts.add(status.mount)
            mount = {"mount": status.mount}
            self.add("pushrep_disk_used_bytes", mount, status.used_bytes)
            self.add("pushrep_disk_size_bytes", mount, status.size_bytes)
        self.durations("pushrep_fsync_duration_seconds", labels, disk.syncs)

    def scrub(self, labels: Mapping[str, str], status: ScrubStatus) -> None:
        """Add the results of the scrub."""
        self.add_all(
            labels,
            {
                "pushrep_scrub_findings": len(status.findings),
                "pushrep_scrub_passes_total": status.passes,
                "pushrep_scrub_read_bytes_total": status.bytes_read,
                "pushrep_scrub_seals_made_total": status.seals_made,
                "pushrep_scrub_damaged_total": status.damaged,
                "pushrep_scrub_repaired_total": status.repaired,
            },
        )

    def logs(self, labels: Mapping[str, str], logs: Iterable[SegmentLog]) -> None:
        """Add how the logs of one outbox were opened, cut and quarantined."""
        logs = list(logs)
        reports = [log.recovery for log in logs]
        self.add_all(
            labels,
            {
                "pushrep_log_recoveries_total": sum(one.opening is Opening.ABNORMAL for one in reports),
                "pushrep_log_recovery_seconds_total": sum(one.seconds for one in reports),
                "pushrep_log_recovery_cut_bytes_total": sum(one.cut.size_bytes for one in reports if one.cut),
                "pushrep_log_cuts_total": sum(log.cuts for log in logs),
                "pushrep_log_quarantines_total": sum(log.quarantines for log in logs),
            },
        )

    def _of(self, name: str, labels: Mapping[str, str]) -> Metric:
        family = FAMILIES[name]
        assert labels.keys() <= set(family.labels), f"{name} has the labels {family.labels}, not {tuple(labels)}"
        if name not in self._made:
            self._made[name] = _MAKES[family.kind](name, family.help, labels=family.labels)
        return self._made[name]

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._made.values())


def _buckets(bounds_s: Sequence[float], counts: Sequence[int]) -> Iterable[tuple[str, float]]:
    return zip([*map(str, bounds_s), "+Inf"], accumulate(counts), strict=True)


class ProcessCollector(Collector):
    """Build info, problems and certificates of a process without outbox or node: a job, a consumer.

    problems, certificates: called at each scrape. certificates: Unix time of expiry, by use.
    """

    def __init__(
        self,
        problems: Callable[[], Iterable[Problem]],
        certificates: Callable[[], Mapping[str, int | None]] = dict[str, int | None],
    ) -> None:
        self._problems, self._certificates = problems, certificates

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families with their samples."""
        families = Families()
        families.build_info()
        families.problems({}, self._problems())
        families.certificates({}, self._certificates())
        return families


class Counting(Protocol):
    """Has counts of a filter: a consumer of `filtering.consumers`, Spark's `CountsListener`."""

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """The counts since the object was made, by topic or query."""


class FilterCollector(Collector):
    """The counts of a replay filter. name: a label, which distinguishes the samples of this job from others."""

    def __init__(self, filtered: Counting, *, name: str) -> None:
        self._filtered, self._name = filtered, name

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families, with a sample for each topic of a consumer, or each query of Spark."""
        families = Families()
        for source, counts in dict(self._filtered.counts).items():
            families.add_all(
                {"name": self._name, "source": source},
                {
                    "pushrep_filter_kept_records_total": counts.kept,
                    "pushrep_filter_dropped_records_total": counts.dropped,
                    "pushrep_filter_late_records_total": counts.late,
                    "pushrep_filter_unkeyed_records_total": counts.unkeyed + counts.other_pids,
                    "pushrep_filter_jumped_offsets_total": counts.jumped,
                    "pushrep_filter_pairs": counts.pairs,
                },
            )
        return families


class StartpointCollector(Collector):
    """How many startpoints of a store are in each state. The store is read at each scrape."""

    def __init__(self, store: StartpointStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One family with a sample for each state. Raises the errors of `StartpointStore.event_log`."""
        event_log, states = self._store.event_log(), Counter[State]()
        for written in event_log.all_written():
            readers = event_log.readers(written.sequence).values()
            states.update([one.state for one in readers] or [event_log.state(written.sequence)])
        families = Families()
        for state in State:
            families.add("pushrep_startpoints", {"state": state.value}, states[state])
        return families
