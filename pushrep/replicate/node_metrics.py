"""The collector of a node for Prometheus; it reads all values at each scrape. `pushrep replica serve --metrics
HOST:PORT` serves it.

REGISTRY.register(NodeCollector(node))          needs the extra `metrics` (prometheus-client)
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.metrics import Families
from pushrep.replay.events import ReplayState
from pushrep.replay.session import ReplayCounters
from pushrep.replicate.node_status import NodeLog
from pushrep.replicate.replica_node import ReplicaNode

RUNNING = (ReplayState.INIT, ReplayState.REPLAY, ReplayState.INACTIVE)


class NodeCollector(Collector):
    """Metrics of a node. Thread-safe.

    by_partition: add samples of each log; without them the number of samples does not grow with the logs.
    """

    def __init__(self, node: ReplicaNode, *, by_partition: bool = True) -> None:
        self._node, self._by_partition = node, by_partition

    def describe(self) -> Iterable[Metric]:
        """No families, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families with their samples."""
        families, node, status = Families(), self._node, self._node.status()
        offline = sum(one.failure is not None or one.finding is not None for one in status.logs)
        families.build_info()
        families.problems({}, status.problems())
        families.add_all(
            {},
            {
                "pushrep_node_connections": status.connections,
                "pushrep_node_replica_epoch": status.replica_epoch,
                "pushrep_node_open_logs": len(status.logs),
                "pushrep_node_offline_logs": offline,
            },
        )
        for (call, code), count in status.refusals.items():
            families.add("pushrep_node_refusals_total", {"call": call, "code": code}, count)
        for (call, identity), count in status.unauthorised.items():
            families.add("pushrep_node_unauthorised_total", {"call": call, "identity": identity}, count)
        for standby_of, (state, _) in status.standbys.items():
            families.add("pushrep_node_standby", {"outbox": standby_of, "state": state}, 1)
        for outbox, (topic, hold) in status.holds.items():
            until_s = 0 if hold is None else hold.until_ms / 1000
            families.add("pushrep_takeovers_held_until_timestamp_seconds", {"outbox": outbox, "topic": topic}, until_s)
        families.certificates({}, {"node": status.certificate_expires_s})
        _replays(families, status.replays)
        if self._by_partition:
            for one in status.logs:
                _log(families, one)
        logs: dict[tuple[str, str], list[SegmentLog]] = {}
        for outbox_id, replica in node.replicas():
            logs.setdefault((str(outbox_id), replica.tp.topic), []).append(replica.log)
        for (outbox, topic), kept in logs.items():
            labels = {"outbox": outbox, "topic": topic}
            with suppress(PushrepError):  # the log may have been closed since `status`
                families.logs(labels, kept)
                families.disk(labels, kept[0].disk)
                families.scrub(labels, kept[0].scrub.status)
        return families


def _replays(families: Families, replays: ReplayCounters) -> None:
    states = Counter(one.state for one in replays.sessions)
    families.counted("pushrep_replay_sessions", {}, "state", {one.name.lower(): states[one] for one in RUNNING})
    families.add_all(
        {},
        {
            "pushrep_replay_sessions_limit": replays.sessions_max,
            "pushrep_replay_lag_max_records": replays.lag_max,
            "pushrep_replay_stalled_seconds": replays.stalled_ms / 1000,
            "pushrep_replay_sent_bytes_total": replays.bytes_sent,
            "pushrep_replay_sent_records_total": replays.records_sent,
        },
    )
    ended = {reason.name: count for reason, count in replays.ended.items()}
    families.counted("pushrep_replay_session_ends_total", {}, "reason", ended)
    refused = {code.name: count for code, count in replays.refused.items()}
    families.counted("pushrep_replay_refusals_total", {}, "code", refused)


def _log(families: Families, log: NodeLog) -> None:
    families.add_all(
        {"outbox": log.outbox_id, "topic": log.topic, "partition": str(log.partition)},
        {
            "pushrep_log_start_offset": log.log_start_offset,
            "pushrep_log_end_offset": log.log_end_offset,
            "pushrep_flushed_offset": log.flushed_offset,
            "pushrep_high_watermark": log.high_watermark,
            "pushrep_node_log_offline": log.failure is not None,
            "pushrep_node_log_waits_for_operator": log.finding is not None,
            "pushrep_node_last_contact_timestamp_seconds": log.last_contact_ms / 1000,
        },
    )
