"""The status of a running node: its logs and replays, its refusals; the same for `pushrep status` and /readyz.

ReplicaNode.status() ─▶ NodeStatus ─ as_dict() ─▶ JSON of control.sock ─ without logs, bounded ─▶ DescribeNode
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.election.grants import Hold
from pushrep.errors import PushrepError
from pushrep.log.disk_space import DiskStatus
from pushrep.log.scrub import ScrubStatus
from pushrep.problems import (
    STALLED_LIMIT_S,
    Problem,
    certificate_problems,
    disk_problems,
    scrub_problems,
    worst_first,
)
from pushrep.replay.session import ReplayCounters
from pushrep.replicate.replica import ReplicaLog

_ANSWER_BYTES_MAX = 900_000
"""Of an answer's header, which has room for 1 MiB."""
_ANSWER_ITEMS = (1000, 100, 20)


class NodeLog(NamedTuple):
    """A log that is in use. Half-open offsets.

    last_contact_ms: wall clock of its leader's last request, -1 for none since the node started. failure: why its disk
    failed; finding: why it waits for an operator; refused: why its disk refused the last write; each None without a
    reason. damaged_from: the first offset that was on disk and can't be read.
    """

    outbox_id: str
    topic: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    flushed_offset: int
    high_watermark: int
    leader_epoch: int
    last_contact_ms: int
    failure: str | None
    finding: str | None
    refused: str | None
    damaged_from: int | None


class OutboxLeader(NamedTuple):
    """The leader of an outbox by this node's newest grant. is_here: it is this member, whose service has the logs.

    silent_ms: since its last contact or the node's start; None: it is here, or has said that it leads no more.
    """

    outbox_id: str
    topic: str
    leader: int
    address: str
    epoch: int
    is_here: bool
    silent_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A running node. scrubs: by outbox id. replays: running sessions, and counts of all.

    refusals: answers with an error since the start, by (call, code); unauthorised: by (call, identity).
    certificate_expires_s: Unix time, the first of its certificate and its CA's; None: it knows of no files. standbys:
    services that stand by here, by outbox id: (state, why it is no better one). holds: by outbox id, the topic, and
    until when no standby takes over by itself. leaders: of the outboxes that were asked for since the node started.
    """

    directory: str
    address: str
    pid: int
    replica_epoch: int
    connections: int
    certificate_expires_s: int | None
    logs: tuple[NodeLog, ...]
    disk: DiskStatus | None
    scrubs: Mapping[str, ScrubStatus]
    replays: ReplayCounters
    refusals: Mapping[tuple[str, str], int]
    unauthorised: Mapping[tuple[str, str], int]
    standbys: Mapping[str, tuple[str, str]]
    holds: Mapping[str, tuple[str, Hold | None]]
    leaders: tuple[OutboxLeader, ...]

    def problems(self) -> list[Problem]:
        """The problems, worst first."""
        return worst_first(_problems(self))

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        replays = self.replays
        return {
            "directory": self.directory,
            "address": self.address,
            "pid": self.pid,
            "state": "running",
            "replica_epoch": self.replica_epoch,
            "connections": self.connections,
            "certificate_expires_s": self.certificate_expires_s,
            "logs": [one._asdict() for one in self.logs],
            "disk": None if self.disk is None else {**self.disk._asdict(), "level": self.disk.level.name.lower()},
            "scrubs": {outbox_id: asdict(one) for outbox_id, one in self.scrubs.items()},
            "replays": {
                "sessions_max": replays.sessions_max,
                "bytes_sent": replays.bytes_sent,
                "records_sent": replays.records_sent,
                "sessions": [{**one._asdict(), "state": one.state.name.lower()} for one in replays.sessions],
                "refused": {code.name: count for code, count in replays.refused.items()},
                "ended": {reason.name: count for reason, count in replays.ended.items()},
            },
            "refusals": [{"call": call, "code": code, "count": n} for (call, code), n in self.refusals.items()],
            "unauthorised": [
                {"call": call, "identity": identity, "count": n} for (call, identity), n in self.unauthorised.items()
            ],
            "standbys": [{"outbox_id": one, "state": state, "why": why} for one, (state, why) in self.standbys.items()],
            "holds": [
                {"outbox_id": one, "topic": topic, **asdict(hold)}
                for one, (topic, hold) in self.holds.items()
                if hold is not None
            ],
            "leaders": [one._asdict() for one in self.leaders],
            "problems": [one.as_dict() for one in self.problems()],
        }

    def as_answer(self) -> str:
        """As JSON for DescribeNode: without `logs`, which ListLogs answers, and with long lists shortened."""
        found = {name: value for name, value in self.as_dict().items() if name != "logs"}
        texts = [json.dumps(_shortened(found, items)) for items in _ANSWER_ITEMS]
        return next((text for text in texts if len(text) <= _ANSWER_BYTES_MAX), texts[-1])


class OpenLogs(NamedTuple):
    """The status of a node's logs in use, of each outbox's scrub, and of their disk."""

    logs: tuple[NodeLog, ...]
    scrubs: Mapping[str, ScrubStatus]
    disk: DiskStatus | None


def open_logs(replicas: Iterable[tuple[UUID, ReplicaLog]]) -> OpenLogs:
    """The present status; a log that is closed meanwhile is left out."""
    logs: list[NodeLog] = []
    scrubs: dict[str, ScrubStatus] = {}
    disk: DiskStatus | None = None
    for outbox_id, replica in replicas:
        try:
            logs.append(_kept(str(outbox_id), replica))
            scrubs[str(outbox_id)] = replica.log.scrub.status
            disk = disk or replica.log.disk.status()
        except PushrepError:
            continue
    return OpenLogs(tuple(sorted(logs)), scrubs, disk)


def _shortened(value: Any, items: int) -> Any:
    """Shorten each list and object to so many items."""
    if isinstance(value, Mapping):
        return {name: _shortened(one, items) for name, one in islice(value.items(), items)}
    return [_shortened(one, items) for one in value[:items]] if isinstance(value, list | tuple) else value


def _kept(outbox_id: str, replica: ReplicaLog) -> NodeLog:
    log = replica.log
    return NodeLog(
        outbox_id=outbox_id,
        topic=replica.tp.topic,
        partition=replica.tp.partition,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        flushed_offset=log.flushed_offset,
        high_watermark=log.high_watermark,
        leader_epoch=log.leader_epochs.latest_epoch,
        last_contact_ms=replica.last_contact_ms,
        failure=None if replica.failure is None else str(replica.failure) or repr(replica.failure),
        finding=None if replica.finding is None else replica.finding.name,
        refused=replica.refused,
        damaged_from=log.damaged_from,
    )


def _problems(status: NodeStatus) -> Iterator[Problem]:
    for one in status.logs:
        name = f"{one.outbox_id}/{one.topic}-{one.partition}"
        if one.failure is not None or one.refused is not None:
            yield Problem("log_offline", f"{name}: {one.failure or one.refused}")
        if one.finding is not None:
            yield Problem("log_waits", f"{name}: {one.finding}")
        if one.damaged_from is not None:
            yield Problem("damaged", f"{name} from offset {one.damaged_from} on: see `pushrep log verify`")
    for replay in status.replays.sessions:
        if replay.stalled_ms > 1000 * STALLED_LIMIT_S:
            why = f"{replay.lag} records behind, nothing taken for {replay.stalled_ms / 1000:.0f} s"
            yield Problem("replay_stalled", f"session {replay.session_id:016x} of recording {replay.recording}: {why}")
    if status.disk is not None:
        yield from disk_problems(status.disk)
    for scrub in status.scrubs.values():
        yield from scrub_problems(scrub)
    yield from certificate_problems({"node": status.certificate_expires_s}, time.time())
