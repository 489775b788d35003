"""The status of a running node: its logs and replays, its refusals.

ReplicaNode.status() ─▶ NodeStatus ─ as_dict() ─▶ JSON of control.sock ─ without logs, bounded ─▶ DescribeNode
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.election.grants import Hold
from pushrep.errors import PushrepError
from pushrep.log.disk import DiskStatus
from pushrep.log.segment_log import LogsStatus, logs_problems, logs_status
from pushrep.replay.events import ReplayState
from pushrep.replay.session import ReplayCounters
from pushrep.replicate.replica import ReplicaLog
from pushrep.status import Blocks, Problem, Status
from pushrep.status.problem import ShownProblem
from pushrep.status.value import fits, plain

STALLED_MS = 60_000
"""A replay that is behind and receives nothing for less than this is no problem yet: its consumer may be busy."""
_ANSWER_BYTES_MAX = 900_000
"""Of an answer's header, which has room for 1 MiB."""
_ANSWER_ITEMS = (1000, 100, 20)


class NodeLog(NamedTuple):
    """A log that is in use. Half-open offsets.

    last_contact_ms: wall clock of its leader's last request, -1 for none since the node started. failure: why its disk
    failed; finding: why it waits for an operator; refused: why its disk refused the last write; each None without a
    reason. damaged_from: the first offset that was on disk and can't be read. since_ms: of what is wrong, wall clock.
    At an address the answer of ListLogs has fewer of them.
    """

    outbox_id: str
    topic: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    flushed_offset: int | None
    high_watermark: int
    leader_epoch: int
    last_contact_ms: int = -1
    failure: str | None = None
    finding: str | None = None
    refused: str | None = None
    damaged_from: int | None = None
    since_ms: int | None = None

    @property
    def is_offline(self) -> bool:
        """Whether its disk failed."""
        return self.failure is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it needs an operator."""
        return self.finding is not None

    @property
    def name(self) -> str:
        """Outbox, topic and partition."""
        return f"{self.outbox_id}/{self.topic}-{self.partition}"


class OutboxLeader(NamedTuple):
    """The leader of an outbox by this node's newest grant. is_here: it is this member, whose service has the logs.

    silent_ms: since its last contact or the node's start; None: it is here, or has said that it leads no more. hold:
    while no standby takes over by itself. owner: the identity that created it here.
    """

    outbox_id: str
    topic: str
    leader: int
    address: str
    epoch: int
    is_here: bool
    silent_ms: int | None
    hold: Hold | None = None
    owner: str = ""

    @property
    def held_until_ms(self) -> int:
        """Until when takeovers are held; 0: they are not."""
        return 0 if self.hold is None else self.hold.until_ms


@dataclass(frozen=True, slots=True)
class CallRefusals:
    """Answers with an error since the node started."""

    call: str
    code: str
    count: int


@dataclass(frozen=True, slots=True)
class UnauthorisedCalls:
    """Calls of an identity that were refused as unauthorised since the node started."""

    call: str
    identity: str
    count: int


class BudgetStatus(NamedTuple):
    """The peers' resources, and limits. closed: by reason: full (closed for another one, or it found no room), late.

    held_bytes: of large requests and answers.
    """

    connections_max: int
    held_bytes: int
    held_bytes_max: int
    closed: Mapping[str, int]


class StandbyStatus(NamedTuple):
    """A service that stands by here. outbox_id: "" while its outbox is not made yet. why: its state is no better."""

    outbox_id: str
    state: str
    why: str

    @property
    def is_there(self) -> bool:
        """For metrics, which have a sample of each that is there."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(Status):
    """A running node. outboxes: their logs in use, together. leaders: of the outboxes that were asked for since it
    started. certificates: "node", the first of its certificate and its CA's, if it knows of files.
    """

    kind: str = "node"
    state: str = "running"
    pid: int
    replica_epoch: int
    connections: int
    budget: BudgetStatus
    logs: tuple[NodeLog, ...]
    outboxes: tuple[LogsStatus, ...]
    replays: ReplayCounters
    refusals: tuple[CallRefusals, ...]
    unauthorised: tuple[UnauthorisedCalls, ...]
    standbys: tuple[StandbyStatus, ...]
    leaders: tuple[OutboxLeader, ...]

    @property
    def is_ready(self) -> bool:
        """While it serves its directory; else it has no status."""
        return True

    @property
    def disk(self) -> DiskStatus | None:
        """Of its directory; None without a log in use."""
        return self.outboxes[0].disk if self.outboxes else None

    @property
    def parts(self) -> tuple[NodeLog, ...]:
        """`logs`, by the name that an outbox has for its partitions."""
        return self.logs

    @property
    def grants(self) -> tuple[OutboxLeader, ...]:
        """What has `held_until_ms`."""
        return self.leaders

    @property
    def logs_offline(self) -> int:
        """Logs whose disk failed, or that need an operator."""
        return sum(one.is_offline or one.is_waiting for one in self.logs)

    @property
    def replay_states(self) -> Mapping[str, int]:
        """How many replays are in each state."""
        states = Counter(one.state for one in self.replays.sessions)
        return {one.name.lower(): states[one] for one in ReplayState if one is not ReplayState.DONE}

    def find_problems(self) -> Iterator[Problem]:
        yield from log_problems(self.logs)
        for replay in self.replays.sessions:
            if replay.stalled_ms > STALLED_MS:
                session = f"{replay.session_id:016x}"
                subject = f"replay {session} of {replay.recording}"
                why = f"it is {replay.lag} records behind, and takes nothing for {replay.stalled_ms / 1000:.0f} s"
                since_ms = time.time_ns() // 1_000_000 - int(replay.stalled_ms)
                yield Problem("replay_stalled", subject, why, since_ms, argument=session)
        yield from logs_problems(self.outboxes, Blocks.REPLICATION)

    def as_dict(self) -> dict[str, Any]:
        """See `Status`."""
        return {**Status.as_dict(self), "disk": plain(self.disk)}

    def as_answer(self) -> str:
        """As JSON for DescribeNode: without `logs`, which ListLogs answers, and with long lists shortened."""
        found = {name: value for name, value in self.as_dict().items() if name != "logs"}
        texts = [json.dumps(_shortened(found, items)) for items in _ANSWER_ITEMS]
        return next((text for text in texts if len(text) <= _ANSWER_BYTES_MAX), texts[-1])


def is_node_status(found: Mapping[str, Any]) -> bool:
    """Whether it is such as `NodeStatus.as_dict` gives; a node may be of another version, or another program."""
    more = {"disk": DiskStatus | None, "problems": Sequence[ShownProblem]}
    return fits(found, NodeStatus) and all(name in found and fits(found[name], more[name]) for name in more)


def open_logs(replicas: Iterable[tuple[UUID, ReplicaLog]]) -> tuple[tuple[NodeLog, ...], tuple[LogsStatus, ...]]:
    """The status of the logs in use, one by one, and together by outbox; a log that is closed meanwhile is left out."""
    logs: list[NodeLog] = []
    outboxes: list[LogsStatus] = []
    by_outbox: dict[UUID, list[ReplicaLog]] = {}
    for outbox_id, replica in replicas:
        by_outbox.setdefault(outbox_id, []).append(replica)
    for outbox_id, kept in by_outbox.items():
        try:
            outboxes.append(logs_status(str(outbox_id), [one.log for one in kept]))
            logs += [_kept(str(outbox_id), one) for one in kept]
        except PushrepError:
            continue
    return tuple(sorted(logs)), tuple(outboxes)


def log_problems(logs: Iterable[NodeLog]) -> Iterator[Problem]:
    """The problems of a node's logs."""
    for one in logs:
        subject, argument = f"log {one.name}", f"/{one.outbox_id} {one.topic}-{one.partition}"
        if (why := one.failure or one.refused) is not None:
            yield Problem("log_offline", subject, why, one.since_ms, argument=argument)
        if one.finding is not None:
            yield Problem("log_waits", subject, one.finding, one.since_ms, argument=argument)
        if one.damaged_from is not None:
            why = f"it lost records that were on disk, from offset {one.damaged_from} on"
            yield Problem("damaged", subject, why, one.since_ms, Blocks.REPLICATION, argument)


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
        since_ms=replica.wrong_since_ms,
    )
