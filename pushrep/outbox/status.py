"""What an open outbox says of itself: members, sessions, watermarks; the same for its caller, the CLI and metrics.

status_of(facts) ─▶ OutboxStatus          of all partitions together: a few lines however many there are
partitions_of(facts, numbers) ─▶ PartitionStatus ...     one by one, where somebody asks for them
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pushrep.election.errors import LeadGivenUp
from pushrep.election.grants import Hold, Takeover, hold_of
from pushrep.log import SegmentLog
from pushrep.log.disk_space import DiskStatus
from pushrep.log.scrub import ScrubStatus
from pushrep.outbox.batch import Budget
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.partition_replicas import ReplicaLag
from pushrep.outbox.settings import OutboxSettings
from pushrep.outbox.shipping import Shipping, holder_name
from pushrep.problems import (
    AWAY_LIMIT_S,
    Problem,
    certificate_problems,
    disk_problems,
    scrub_problems,
    worst_first,
)

if TYPE_CHECKING:
    from pushrep.outbox.partition_appender import AppendCounts
    from pushrep.outbox.replication import Replication
    from pushrep.replicate.led_partition import LedPartition


class LeadingState(Enum):
    """Whether an outbox takes records for its replicas."""

    ALONE = "alone"
    """It has no replicas."""
    LEADING = "leading"
    LOOKING = "looking for members"
    """Too few answered yet: with ALL nothing is taken."""
    RESIGNED = "resigned"
    """Another member leads, or may: this one gave the lead up."""
    FAILED = "failed"
    """It can't lead; open it again."""


class Facts(NamedTuple):
    """What an open outbox consists of."""

    directory: Path
    identity: OutboxIdentity
    settings: OutboxSettings
    logs: Mapping[int, SegmentLog]
    replication: "Replication | None"
    budget: Budget
    shipping: Shipping
    appends: Sequence["AppendCounts"]
    refused: Mapping[str, int]
    """Calls of append that took nothing, by the error's name."""
    certificates: Callable[[], Mapping[str, int | None]]
    """When each expires, by its use; see OutboxStatus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member, or (`is_joining`) a node that is to become one and counts for nothing yet.

    sessions: how many of its partitions are pushed to now. trouble: why no session can begin, or what is damaged there
    and can't be repaired; None if there is nothing in the way. lag: None for the leader itself.
    """

    index: int
    address: str
    is_leader: bool
    is_joining: bool
    sessions: int
    last_end_reason: str | None
    trouble: str | None
    lag: ReplicaLag | None


class StoppedPartition(NamedTuple):
    """Of a topic that is shipped to: it goes no further than `offset` until somebody acts."""

    partition: int
    offset: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationStatus:
    """A Kafka topic that is shipped to; `name` is `kafka:<topic>`.

    records, size_bytes, age_ms, trouble: as `DestinationLag`; bytes and age are None while nobody has the outbox open.
    trouble_ms: for how long that has been so. is_fenced: whether brokers refuse other instances of the outbox; None
    where none are to be shut out, or nobody knows yet.
    """

    name: str
    topic: str
    records: int
    size_bytes: int | None = None
    age_ms: int | None = None
    stopped: tuple[StoppedPartition, ...] = ()
    trouble: str | None = None
    trouble_ms: int | None = None
    is_fenced: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """An open outbox, all partitions together.

    epoch, members_epoch: of the grant that it leads by, -1 without one. is_changing: a change of members is not settled
    yet, both lists have their say. hold: while no standby may take over. takeover: the last one by a standby.
    in_sync_min: members in the smallest in-sync
    set, the leader counted. ends, high_watermarks, flushed: summed over the partitions. damaged: partitions whose log
    lost records that were on disk. scrub: what the reading of sealed segments in the background has found.
    certificates: by what they are for ("replicas", "kafka", "health"), when the one in use or its CA's expires, Unix
    time; None: that can't be read. kafka_away_limit_s: of its `health`; a Kafka that nothing reaches for less is no
    problem.
    """

    directory: str
    pid: int
    outbox_id: str
    producer: str
    topic: str
    partitions: int
    durability: str
    acks: str
    state: LeadingState
    why: str | None
    member: int
    leader: int
    epoch: int
    members_epoch: int
    is_changing: bool
    hold: Hold | None
    takeover: Takeover | None
    min_insync_replicas: int
    in_sync_min: int
    under_min_insync: int
    log_end_offsets: int
    flushed_offsets: int
    high_watermarks: int
    buffer_bytes: int
    session_ends: Mapping[str, int]
    members: tuple[MemberStatus, ...]
    destinations: tuple[DestinationStatus, ...]
    damaged: tuple[int, ...]
    disk: DiskStatus
    scrub: ScrubStatus
    certificates: Mapping[str, int | None]
    kafka_away_limit_s: float = AWAY_LIMIT_S

    def problems(self, kafka_away_limit_s: float | None = None) -> list[Problem]:
        """What is wrong, worst first. kafka_away_limit_s: another limit than its own."""
        limit_s = self.kafka_away_limit_s if kafka_away_limit_s is None else kafka_away_limit_s
        return worst_first(_problems(self, limit_s))

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            **asdict(self),
            "state": self.state.value,
            "takeover": self.takeover and {"epoch": self.takeover.epoch, "at_ms": self.takeover.ms},
            "session_ends": dict(self.session_ends),
            "certificates": dict(self.certificates),
            "members": [{**asdict(one), "lag": one.lag and one.lag._asdict()} for one in self.members],
            "destinations": [
                {**asdict(one), "stopped": [stopped._asdict() for stopped in one.stopped]} for one in self.destinations
            ],
            "disk": {**self.disk._asdict(), "level": self.disk.level.name.lower()},
            "problems": [one.as_dict() for one in self.problems()],
        }


class SessionStatus(NamedTuple):
    """One replica of one partition. acknowledged, flushed: -1 before it has said so in this session."""

    replica: int
    state: str
    replica_epoch: int
    session_id: int
    acknowledged: int
    flushed: int
    next_offset: int
    in_flight: int
    end_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """One partition as its leader sees it. Half-open offsets; in_sync holds indexes, the leader's own as well.

    shipped: by `kafka:<topic>` the first offset that the topic has not acknowledged.
    """

    partition: int
    log_start_offset: int
    log_end_offset: int
    flushed_offset: int
    high_watermark: int
    leader_epoch: int
    in_sync: tuple[int, ...]
    sessions: tuple[SessionStatus, ...]
    shipped: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return {**asdict(self), "sessions": [session._asdict() for session in self.sessions]}


def status_of(facts: Facts) -> OutboxStatus:
    """All partitions together. Raises LogClosed once the outbox is closed."""
    identity, settings, logs = facts.identity, facts.settings, facts.logs.values()
    state, why = leading_state(facts)
    led = led_of(facts)
    grant = facts.replication.grant if facts.replication is not None else None
    in_sync = [len(one.leader.in_sync) for one in led.values()]
    manager = facts.replication.manager if facts.replication is not None else None
    return OutboxStatus(
        directory=str(facts.directory),
        pid=os.getpid(),
        outbox_id=identity.outbox_id,
        producer=identity.producer,
        topic=identity.topic,
        partitions=identity.partitions,
        durability=settings.durability.name,
        acks="ALL" if facts.replication is not None and facts.replication.needs_all else "LOCAL",
        state=state,
        why=why,
        member=identity.member,
        leader=identity.member if grant is None else grant.leader,
        epoch=-1 if grant is None else grant.epoch,
        members_epoch=-1 if grant is None else grant.members_epoch,
        is_changing=grant is not None and bool(grant.previous_members),
        hold=hold_of(grant, time.time_ns() // 1_000_000),
        takeover=None if grant is None else grant.takeover,
        min_insync_replicas=grant.min_insync_replicas if grant is not None else identity.min_insync_replicas,
        in_sync_min=min(in_sync, default=1),
        under_min_insync=sum(not one.may_append_all for one in led.values()),
        log_end_offsets=sum(log.log_end_offset for log in logs),
        flushed_offsets=sum(log.flushed_offset for log in logs),
        high_watermarks=sum(log.high_watermark for log in logs),
        buffer_bytes=0 if manager is None else manager.memory.used_bytes,
        session_ends={} if manager is None else {reason.name: count for reason, count in manager.session_ends.items()},
        members=_members(facts, led),
        destinations=tuple(_destinations(facts.shipping)),
        damaged=tuple(log.partition for log in logs if log.damaged_from is not None),
        disk=next(iter(logs)).disk.status(),
        scrub=next(iter(logs)).scrub.status,
        certificates=facts.certificates(),
        kafka_away_limit_s=AWAY_LIMIT_S if settings.health is None else settings.health.kafka_away_limit_s,
    )


def partitions_of(facts: Facts, numbers: Iterable[int]) -> list[PartitionStatus]:
    """These partitions, one by one; those that do not exist are left out."""
    led = led_of(facts)
    return [_partition(facts.logs[n], led.get(n), facts.shipping) for n in numbers if n in facts.logs]


def led_of(facts: Facts) -> "dict[int, LedPartition]":
    """The partitions that are led, by number; none while nobody leads."""
    if facts.replication is None:
        return {}
    return {n: appender.led for n, appender in facts.replication.appenders.items() if appender.led is not None}


def leading_state(facts: Facts) -> tuple[LeadingState, str | None]:
    """The state, and why it is no better one."""
    if facts.replication is None:
        return LeadingState.ALONE, None
    for appender in facts.replication.appenders.values():
        if appender.failure is not None:
            resigned = isinstance(appender.failure, LeadGivenUp)
            return LeadingState.RESIGNED if resigned else LeadingState.FAILED, str(appender.failure)
        if appender.led is None:
            return LeadingState.LOOKING, None
        if appender.led.resigned is not None:
            return LeadingState.RESIGNED, str(appender.led.resigned)
    return LeadingState.LEADING, None


def _members(facts: Facts, led: "Mapping[int, LedPartition]") -> tuple[MemberStatus, ...]:
    if facts.replication is None:
        return ()
    listed = {one.index: one.address for one in facts.replication.members}
    lags, troubles = facts.replication.lag_by_index(), facts.replication.troubles()
    live: Counter[int] = Counter()
    ended: dict[int, str] = {}
    for one in led.values():
        with one.lock:
            for index, progress in one.leader.sessions.items():
                live[index] += progress.is_live
                if progress.reason is not None:
                    ended[index] = progress.reason.name
    return tuple(
        MemberStatus(
            index=index,
            address=address,
            is_leader=index == facts.identity.member,
            is_joining=index not in listed,
            sessions=live[index],
            last_end_reason=ended.get(index),
            trouble=troubles.get(index),
            lag=lags.get(index),
        )
        for index, address in sorted({**facts.replication.learners, **listed}.items())
    )


def _destinations(shipping: Shipping) -> Iterator[DestinationStatus]:
    if (sink := shipping.sink) is None:
        return
    lag, fence = sink.lag(), sink.fence
    yield DestinationStatus(
        name=holder_name(sink.topic),
        topic=sink.topic,
        records=lag.records,
        size_bytes=lag.size_bytes,
        age_ms=lag.age_ms,
        stopped=tuple(StoppedPartition(one.partition, one.offset, one.reason) for one in lag.stopped),
        trouble=lag.trouble,
        trouble_ms=sink.trouble_ms(),
        is_fenced=None if fence is None else fence.is_standing,
    )


def _problems(status: OutboxStatus, away_limit_s: float) -> Iterator[Problem]:
    refuses = status.state in {LeadingState.RESIGNED, LeadingState.FAILED}
    if refuses or (status.state is LeadingState.LOOKING and status.acks == "ALL"):
        yield Problem("not_leading", f"{status.state.value}{f': {status.why}' if status.why else ''}")
    elif status.under_min_insync and status.acks == "ALL":
        needed = f"{status.min_insync_replicas} in-sync members are needed, {status.in_sync_min} are there"
        yield Problem("under_min_insync", f"{status.under_min_insync} of {status.partitions} partitions: {needed}")
    if status.damaged:
        yield Problem("damaged", f"partitions {', '.join(map(str, status.damaged))}: see `pushrep log verify`")
    for one in status.destinations:
        if one.trouble is not None and (one.trouble_ms or 0) >= away_limit_s * 1000:
            yield Problem("kafka_away", f"{one.topic}, {one.records} records behind: {one.trouble}")
        for stopped in one.stopped:
            where = f"{one.topic}, partition {stopped.partition} at offset {stopped.offset}"
            yield Problem("shipping_stopped", f"{where}: {stopped.why}")
    for member in status.members:
        if member.trouble is not None:
            yield Problem("replica_away", f"member {member.index} at {member.address}: {member.trouble}")
    yield from disk_problems(status.disk)
    yield from scrub_problems(status.scrub)
    yield from certificate_problems(status.certificates, time.time())


def _partition(log: SegmentLog, led: "LedPartition | None", shipping: Shipping) -> PartitionStatus:
    in_sync: tuple[int, ...] = ()
    sessions: list[SessionStatus] = []
    if led is not None:
        with led.lock:
            in_sync = tuple(sorted(led.leader.in_sync))
            for index, progress in sorted(led.leader.sessions.items()):
                sessions.append(
                    SessionStatus(
                        replica=index,
                        state=progress.state.name,
                        replica_epoch=progress.id.replica_epoch,
                        session_id=progress.id.session_id,
                        acknowledged=-1 if progress.acknowledged is None else progress.acknowledged,
                        flushed=-1 if progress.flushed is None else progress.flushed,
                        next_offset=progress.next_offset,
                        in_flight=len(progress.in_flight),
                        end_reason=None if progress.reason is None else progress.reason.name,
                    )
                )
    return PartitionStatus(
        partition=log.partition,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        flushed_offset=log.flushed_offset,
        high_watermark=log.high_watermark,
        leader_epoch=log.leader_epochs.latest_epoch,
        in_sync=in_sync,
        sessions=tuple(sessions),
        shipped={} if (sink := shipping.sink) is None else {holder_name(sink.topic): sink.needed_from(log.partition)},
    )
