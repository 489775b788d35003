"""A node as Prometheus sees it; `pushrep replica serve --metrics HOST:PORT` serves it. Everything is read when scraped.

REGISTRY.register(NodeCollector(node))          the extra `metrics` brings prometheus-client
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.errors import PushrepError
from pushrep.metrics import Families
from pushrep.node.replica import ReplicaLog
from pushrep.node.replica_node import ReplicaNode


class NodeCollector(Collector):
    """Thread-safe. by_partition: samples of each log, too; without it they are as few however many there are."""

    def __init__(self, node: ReplicaNode, *, by_partition: bool = True) -> None:
        self._node, self._by_partition = node, by_partition

    def describe(self) -> Iterable[Metric]:
        """Nothing yet: a registry that asks beforehand shall not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every family, with its samples."""
        families, node = Families(), self._node
        replicas = node.replicas()
        offline = sum(replica.failure is not None or replica.finding is not None for _, replica in replicas)
        for name, help_, value in (
            ("pushrep_node_connections", "Connections that are open.", node.connections),
            ("pushrep_node_replica_epoch", "Raised at each start.", node.replica_epoch),
            ("pushrep_node_open_logs", "Logs that are in use.", len(replicas)),
            ("pushrep_node_offline_logs", "Logs whose disk failed, or that wait for an operator.", offline),
        ):
            families.gauge(name, help_, {}, value)
        for (call, code), count in node.refusals().items():
            help_ = "Answers with an error, a partition's counted alone."
            families.counter("pushrep_node_refusals", help_, {"call": call, "code": code.name}, count)
        for (call, identity), count in node.unauthorised().items():
            help_ = "Calls that this identity may not make."
            families.counter("pushrep_node_unauthorised", help_, {"call": call, "identity": identity}, count)
        if (expires_s := node.certificate_expires_s()) is not None:
            help_ = "Unix time when this node's certificate, or its CA's, expires."
            families.gauge("pushrep_node_certificate_expiry_seconds", help_, {}, expires_s)
        self._replays(families)
        disks = {}
        for outbox_id, replica in replicas:
            labels = {"outbox": str(outbox_id), "topic": replica.tp.topic}
            try:
                disks[outbox_id] = (labels, replica.log.disk, replica.log.scrub.status)
                if self._by_partition:
                    _log(families, {**labels, "partition": str(replica.tp.partition)}, replica)
            except PushrepError:  # it was closed meanwhile
                continue
        for labels, disk, scrubbed in disks.values():
            families.disk(labels, disk)
            families.scrub(labels, scrubbed)
        return families

    def _replays(self, families: Families) -> None:
        replays = self._node.replays()
        families.gauge("pushrep_replay_sessions", "Replays that run.", {}, replays.sessions_active)
        families.counter("pushrep_replay_sent_bytes", "Sent by replays.", {}, replays.bytes_sent)
        families.counter("pushrep_replay_sent_records", "Sent by replays.", {}, replays.records_sent)


def _log(families: Families, labels: dict[str, str], replica: ReplicaLog) -> None:
    log, last_contact_s = replica.log, replica.last_contact_ms / 1000
    for name, help_, value in (
        ("pushrep_log_start_offset", "First offset that can be read.", log.log_start_offset),
        ("pushrep_log_end_offset", "The offset that the next record gets.", log.log_end_offset),
        ("pushrep_flushed_offset", "First offset not known to be on disk.", log.flushed_offset),
        ("pushrep_high_watermark", "First offset not known to be held by enough members.", log.high_watermark),
        ("pushrep_node_log_offline", "1 if its disk failed.", replica.failure is not None),
        ("pushrep_node_log_waits_for_operator", "1 if it can't follow by itself.", replica.finding is not None),
        ("pushrep_node_last_contact_seconds", "Unix time of its last request, below 0: none.", last_contact_s),
    ):
        families.gauge(name, help_, labels, value)
