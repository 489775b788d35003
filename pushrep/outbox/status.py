"""What an outbox says of itself: members, sessions, watermarks, destinations; open by its parts, closed by its files.

status_of(facts) ─▶ OutboxStatus          an open outbox, with its partitions one by one
closed_status(directory) ─▶ ClosedOutbox  its files, while no process that answers has it open
"""

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pushrep.election.errors import NotLeader
from pushrep.election.grants import Hold, Takeover, hold_of
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import PushrepError
from pushrep.kafka.parking import parking_name
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, read_progress
from pushrep.log import SegmentLog
from pushrep.log.directory_files import is_slot, log_name, parse_log_name, slot_directories
from pushrep.log.disk import DiskLevel, DiskStatus
from pushrep.log.inspection import lock_holder, logs_at, summarize
from pushrep.log.retention import RetentionHeld
from pushrep.log.scrub import ScrubStatus
from pushrep.log.segment_log import LogsStatus, RecoveryStatus, logs_problems, logs_status
from pushrep.outbox.batch import Budget
from pushrep.outbox.control import CallRefused, NobodyAnswers, ask
from pushrep.outbox.destinations import parked_records
from pushrep.outbox.identity import OutboxIdentity, identity_in
from pushrep.outbox.kept_settings import KeptSettings, read_kept
from pushrep.outbox.partition_replicas import ReplicaLag
from pushrep.outbox.relay_note import RelayNotes
from pushrep.outbox.settings import OutboxSettings
from pushrep.outbox.shipping import Shipping, holder_name
from pushrep.replicate.election_state import find_election_state
from pushrep.status import Blocks, Histogram, Leads, Problem, Status
from pushrep.status.value import Sample

if TYPE_CHECKING:
    from pushrep.kafka.sink_state import ShippingCounts
    from pushrep.outbox.partition_appender import PartitionAppender, StoppedLog
    from pushrep.outbox.replication import Replication
    from pushrep.replicate.led_partition import LedPartition
    from pushrep.replicate.manager import PushManager

SLOT_WAITS_MS = 10_000
"""A free slot waits for less than this until another worker ships it."""
KAFKA_AWAY_MS = 5_000
"""A topic that took nothing for less than this is no problem yet: a broker may be restarting."""
PAUSE_MS = 5_000
"""Requests go elsewhere once appends are refused, or wait, for so long, and no sooner: members come back."""
_ASK_S = 0.5
"""How long a worker waits for another worker's answer. The probe that asked it waits for a second."""
HELD = "held by a process that does not answer"
"""The state of an outbox whose process hangs, or belongs to another user."""
_LEFT = "it was to become a member, and nobody goes on with that: give the same command again, or drop it"
_PARKING = "parking log", Blocks.SHIPPING
VACUUM_HELD_MS, VACUUM_HELD_TRANSACTIONS = 3_600_000, 10_000_000
"""Deleted rows that vacuum can't remove for so long, or over so many transactions, make each look at the table slow."""
TRIED_AGAIN_MS = 60_000
"""After this time a log whose disk refused the last append is sent requests again."""


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


_InLog = TypeVar("_InLog", "LateRecords", "StoppedLog")


class Facts(NamedTuple):
    """What an open outbox consists of."""

    directory: Path
    identity: OutboxIdentity
    settings: OutboxSettings
    logs: Mapping[int, SegmentLog]
    replication: "Replication | None"
    budget: Budget
    shipping: Shipping
    appenders: Sequence["PartitionAppender"]
    refused: Mapping[str, int]
    """Calls of append that took nothing, by the error's name."""
    certificates: Callable[[], Mapping[str, int | None]]
    """When each expires, by its use; see OutboxStatus."""
    kept_settings: KeptSettings
    relays: "list[Callable[[], RelayStatus]]"
    """What the relay of a database's rows says of itself (pushrep/tables), while it runs or has failed."""
    relay_notes: RelayNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member; or a node that is to become one (`is_joining`), and counts for nothing yet.

    sessions: how many of its partitions are pushed to now. trouble: why no session can begin, or what is damaged there
    and can't be repaired; None without any. trouble_since_ms: wall clock. is_left: nobody has gone on adding the
    joining node since then. is_silent: it has not answered for some seconds. lag: None for the leader itself.
    """

    index: int
    address: str
    is_leader: bool
    is_joining: bool = False
    is_left: bool = False
    sessions: int = 0
    last_end_reason: str | None = None
    trouble: str | None = None
    trouble_since_ms: int | None = None
    is_silent: bool = False
    lag: ReplicaLag | None = None

    @property
    def replica(self) -> int:
        """`index`, as metrics call it."""
        return self.index

    @property
    def pushed_to(self) -> int | None:
        """`sessions`; None for the leader itself."""
        return None if self.lag is None else self.sessions


class StoppedPartition(NamedTuple):
    """A partition whose shipping stopped at `offset` until somebody acts.

    since_ms: wall clock. is_refused: whether it goes on once the record at `offset` is given up.
    """

    partition: int
    offset: int
    why: str
    since_ms: int
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationStatus:
    """A Kafka topic that is shipped to; `name` is `kafka:<topic>`.

    records, size_bytes, age_ms, trouble: as `DestinationLag`; bytes and age are None while nobody has the outbox open.
    trouble_ms: for how long that has been so, 0 without trouble. fence_waits: why partitions wait for the fence, and
    since when (wall clock); None: they don't. is_fenced: whether brokers refuse other instances of
    the outbox; None where none are to be shut out, or nobody knows yet. earlier_unfenced: whether brokers may take
    batches of earlier ones. counts, requests (that were answered): since the outbox was opened. parked: refused records
    that wait for an operator.
    """

    name: str
    topic: str
    records: int
    size_bytes: int | None = None
    age_ms: int | None = None
    stopped: tuple[StoppedPartition, ...] = ()
    trouble: str | None = None
    trouble_ms: int | None = None
    fence_waits: tuple[str, int] | None = None
    is_fenced: bool | None = None
    earlier_unfenced: bool | None = None
    counts: "ShippingCounts | None" = None
    requests: Histogram | None = None
    parked: int = 0
    parked_since_ms: int | None = None

    @property
    def in_trouble(self) -> bool:
        """Whether nothing can be shipped."""
        return self.trouble is not None

    def find_problems(self) -> Iterator[Problem]:
        """What keeps records from the topic."""
        now_ms = time.time_ns() // 1_000_000
        if self.fence_waits is not None:
            yield Problem("fence_waits", f"topic {self.topic}", *self.fence_waits)
        elif (away_ms := self.trouble_ms or 0) >= KAFKA_AWAY_MS:
            since_ms = now_ms - away_ms
            why = f"{self.records} records are not shipped: {self.trouble}"
            yield Problem("kafka_away", f"topic {self.topic}", why, since_ms)
        for one in self.stopped:
            subject = f"partition {one.partition} to topic {self.topic}"
            why = f"stopped at offset {one.offset}: {one.why}"
            record = f"{one.offset} --partition {one.partition} --topic {self.topic}"
            command = "" if one.is_refused else "pushrep status {at} --partitions"
            yield Problem("shipping_stopped", subject, why, one.since_ms, argument=record, command=command)
        if self.parked:
            why = f"it refused {self.parked} records, which are parked"
            yield Problem("records_parked", f"topic {self.topic}", why, self.parked_since_ms)


class OldestSnapshot(NamedTuple):
    """What keeps deleted rows of a database from vacuum for the longest. who: a process, a prepared transaction or a
    replication slot. transactions: how many began since. since_ms: when it began, wall clock; None: unknown.
    """

    who: str
    transactions: int
    since_ms: int | None

    @property
    def age_ms(self) -> int | None:
        """For how long."""
        return None if self.since_ms is None else _ago_ms(self.since_ms)


class TableRows(NamedTuple):
    """The rows of a topic in the service's database. oldest_ms: when the one that waits longest was inserted.

    snapshot: None where there is none, and in SQLite. sees_all: whether the database shows the relay what other users'
    sessions keep from vacuum.
    """

    waiting: int
    oldest_ms: int | None
    parked: int
    snapshot: OldestSnapshot | None
    sees_all: bool

    @property
    def age_ms(self) -> int:
        """Of the row that waits longest; 0 if none waits."""
        return 0 if self.oldest_ms is None else _ago_ms(self.oldest_ms)


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """How far the relay of a topic's rows is. relayed: by this process. rows: None while the database did not tell.

    trouble: why it does not go on now, or for good (`is_stopped`), and since when; None if it does.
    """

    topic: str
    relayed: int
    rows: TableRows | None
    trouble: str | None
    trouble_since_ms: int | None
    is_stopped: bool

    def find_problems(self) -> Iterator[Problem]:
        """What keeps rows from the outbox, and what an operator is wanted for."""
        table = f"the table of topic {self.topic}"
        if self.trouble is not None and (self.is_stopped or _ago_ms(self.trouble_since_ms or 0) >= PAUSE_MS):
            name = "table_stopped" if self.is_stopped else "table_waits"
            yield Problem(name, table, self.trouble, self.trouble_since_ms, argument=self.topic)
        if self.rows is None:
            return
        if self.rows.parked:
            why = f"{self.rows.parked} rows were refused, and are parked"
            yield Problem("rows_parked", table, why, argument=self.topic)
        if (held := self.rows.snapshot) is not None and (
            (held.age_ms or 0) >= VACUUM_HELD_MS or held.transactions >= VACUUM_HELD_TRANSACTIONS
        ):
            why = f"{held.who} has kept deleted rows from vacuum for {held.transactions:,} transactions"
            yield Problem("vacuum_held", table, why, held.since_ms, argument=self.topic)


def _ago_ms(ms: int) -> int:
    return max(0, time.time_ns() // 1_000_000 - ms)


class AppendStatus(NamedTuple):
    """Appends since the outbox was opened. refused: calls that took nothing, failed: records, both by the error's name.

    buffer_bytes: of records that are neither acknowledged nor failed yet. appended, acknowledged: from a batch's first
    record to the log, and to its receipts.
    """

    records: int
    size_bytes: int
    batches: int
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    buffer_bytes: int
    buffer_limit_bytes: int
    appended: Histogram | None
    acknowledged: Histogram | None


@dataclass(frozen=True, slots=True)
class ReplicaRefusals:
    """How often a replica answered with an error."""

    replica: int
    code: str
    count: int


class ReplicaRequests(NamedTuple):
    """How long a replica took to answer pushes."""

    replica: int
    durations: Histogram | None


class PushStatus(NamedTuple):
    """Pushing to replicas since the outbox was opened; connections_lost, not_caught_up: by member."""

    buffer_bytes: int
    buffer_limit_bytes: int
    evicted_bytes: int
    session_ends: Mapping[str, int]
    connections_lost: Mapping[int, int]
    not_caught_up: Mapping[int, int]
    refusals: tuple[ReplicaRefusals, ...]
    requests: tuple[ReplicaRequests, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedOutbox(Status):
    """An outbox that no process has open, or one that does not answer (then with its pid, and `why`).

    ends, high_watermarks, flushed: summed over the partitions. settings: those that `pushrep outbox set` changed.
    written_ms: when a file of it was last written, wall clock; 0 where that is not asked.
    """

    kind: str = "outbox"
    pid: int | None
    outbox_id: str
    producer: str
    topic: str
    partitions: int
    state: "LeadingState | str"
    why: str | None
    member: int
    epoch: int
    min_insync_replicas: int
    log_end_offsets: int
    flushed_offsets: int
    high_watermarks: int
    members: tuple["MemberStatus", ...]
    destinations: tuple[DestinationStatus, ...]
    settings: Mapping[str, int | None]
    parts: tuple["PartitionStatus", ...] = ()
    written_ms: int = 0

    def find_problems(self) -> Iterator[Problem]:
        if self.pid is not None:
            yield Problem("not_answering", "outbox", f"process {self.pid} has it open: {self.why}")
        for one in self.destinations:
            yield from one.find_problems()
        yield from self.slot_problems()

    def slot_problems(self) -> Iterator[Problem]:
        """`slot_waits` for each topic that lacks records of a worker's slot which nobody has open."""
        slot = Path(self.directory).name
        is_free = self.pid is None and self.written_ms < time.time_ns() // 1_000_000 - SLOT_WAITS_MS
        if is_free and is_slot(Path(self.directory)):
            for one in self.destinations:
                if one.records:
                    why = f"{one.records} records are not shipped to topic {one.topic}, and no worker has the slot open"
                    yield Problem("slot_waits", slot, why, self.written_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus(ClosedOutbox):
    """An open outbox, all partitions together.

    epoch, members_epoch: of the grant that it leads by, -1 without one. is_changing: a change of members is not settled
    yet, both lists have their say. hold: while no standby may take over. takeover: the last one by a standby.
    in_sync_min: members in the smallest in-sync set, the leader counted. damaged: partitions whose log lost records
    that were on disk; damaged_since_ms: when their opening found that. stopped: logs that refused the last append.
    takes_appends: whether a partition takes some. refused_ms: since when (wall clock) too few members are in sync, or
    this one does not lead; None: it is not so. moved_ms: since when its directory's path leads elsewhere. late:
    partitions whose records wait for longer than PAUSE_MS. scrub: what the reading of sealed segments in the background
    has found. certificates: by what they are for ("replicas", "kafka", "health"). relay: of the rows of a database that
    are brought here, if some are.
    """

    state: LeadingState
    durability: str
    acks: str
    leader: int
    members_epoch: int
    is_changing: bool
    hold: Hold | None
    takeover: Takeover | None
    in_sync_min: int
    under_min_insync: int
    damaged: tuple[int, ...]
    damaged_since_ms: tuple[int, ...]
    stopped: "tuple[StoppedLog, ...]"
    takes_appends: bool
    refused_ms: int | None
    late: "tuple[LateRecords, ...]"
    moved_ms: int | None
    disk: DiskStatus
    scrub: ScrubStatus
    recovery: RecoveryStatus
    syncs: Histogram | None
    held: RetentionHeld | None
    appends: AppendStatus
    push: PushStatus | None
    relay: RelayStatus | None

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here."""
        return self.takes_appends

    @property
    def leads(self) -> Leads:
        """See `Status`."""
        is_here = self.state in {LeadingState.ALONE, LeadingState.LEADING}
        address = next((one.address for one in self.members if one.index == self.leader), "")
        return Leads(is_here, self.leader, "" if is_here else address)

    @property
    def held_until_ms(self) -> int:
        """Until when takeovers are held; 0: they are not."""
        return 0 if self.hold is None else self.hold.until_ms

    @property
    def grants(self) -> "tuple[OutboxStatus]":
        """What has `held_until_ms`."""
        return (self,)

    @property
    def state_flags(self) -> Mapping[str, bool]:
        """For each state, whether it is the present one."""
        return {one.name.lower(): one is self.state for one in LeadingState}

    @property
    def outboxes(self) -> tuple[LogsStatus]:
        """Its logs, together."""
        known = (self.outbox_id, self.topic, self.directory, self.moved_ms)
        return (LogsStatus(*known, self.disk, self.scrub, self.recovery, self.syncs, self.held),)

    def _append_problems(self) -> Iterator[Problem]:
        refuses = self.state in {LeadingState.RESIGNED, LeadingState.FAILED}
        if refuses or (self.state is LeadingState.LOOKING and self.acks == "ALL"):
            why = f"{self.state.value}{f': {self.why}' if self.why else ''}"
            yield Problem("not_leading", f"outbox {self.topic}", why, self.refused_ms)
        elif self.under_min_insync and self.acks == "ALL":
            needed = f"{self.min_insync_replicas} in-sync members are needed, {self.in_sync_min} are there"
            subject = f"{self.under_min_insync} of {self.partitions} partitions"
            yield Problem("under_min_insync", subject, needed, self.refused_ms)
        else:
            for subject, blocks, late in self._by_log(self.late):
                oldest = min(late, key=lambda one: one.since_ms)
                why = f"records wait for {oldest.waits_for}"
                yield Problem("not_acknowledged", subject, why, oldest.since_ms, blocks)

    def find_problems(self) -> Iterator[Problem]:
        yield from self._append_problems()
        for partition, since_ms in zip(self.damaged, self.damaged_since_ms, strict=True):
            why = "its log lost records that were on disk"
            is_own = partition < self.partitions
            name = log_name(self.topic, partition) if is_own else parking_name(self.topic, self.partitions)
            subject, blocks = (f"partition {partition}", None) if is_own else _PARKING
            yield Problem("damaged", subject, why, since_ms, blocks, f" {name}")
        for one in self.destinations:
            yield from one.find_problems()
        for member in self.members:
            if member.trouble is not None:
                subject = f"member {member.index} at {member.address}"
                blocks = Blocks.NOTHING if member.is_left else None
                command = f"pushrep replica remove {{at}} {member.index}" if member.is_left else ""
                since = member.trouble_since_ms
                yield Problem("replica_away", subject, member.trouble, since, blocks, command=command)
        if self.disk.level is not DiskLevel.FULL:  # else that is why
            for why in {one.why: one for one in self.stopped}:
                for subject, blocks, logs in self._by_log([one for one in self.stopped if one.why == why]):
                    yield Problem("log_stopped", subject, why, min(one.since_ms for one in logs), blocks)
        yield from logs_problems(self.outboxes)
        if self.relay is not None:
            yield from self.relay.find_problems()

    def _by_log(self, found: "Sequence[_InLog]") -> "Iterator[tuple[str, Blocks | None, list[_InLog]]]":
        """Those of the partitions, and those of the parking log, to which only shipping appends."""
        if own := [one for one in found if one.partition < self.partitions]:
            subject = f"{len(own)} of {self.partitions} partitions"
            yield f"partition {own[0].partition}" if len(own) == 1 else subject, None, own
        if len(own) < len(found):
            yield *_PARKING, [one for one in found if one.partition >= self.partitions]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStatus(Status):
    """All worker slots of a directory, as told by the worker that serves their health port.

    others: by the slot's directory, what the process answers that has it open; or what is wrong with a slot that nobody
    has open.
    """

    kind: str = "workers"
    worker: OutboxStatus
    others: Mapping[Path, Mapping[str, Any]]

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent to at least one of the workers."""
        return self.worker.is_ready or any(one.get("takes_appends") for one in self.others.values())

    @property
    def leads(self) -> Leads:
        """See `Status`."""
        return self.worker.leads

    @property
    def own(self) -> Status:
        """See `Status`."""
        return self.worker

    def find_problems(self) -> Iterator[Problem]:
        here = Path(self.worker.directory)
        own = [one.as_dict(shlex.quote(str(here))) for one in self.worker.problems()]
        for path, problems in [(here, own), *((path, other["problems"]) for path, other in self.others.items())]:
            for told in problems:
                subject = told["subject"] if told["subject"] == path.name else f"{path.name}, {told['subject']}"
                command = told["command"].replace("{", "{{").replace("}", "}}")
                why, since_ms, blocks = told["why"], told["since_ms"], Blocks(told["blocks"])
                yield Problem(told["problem"], subject, why, since_ms, blocks, command=command)

    def elsewhere(self) -> Iterator[Sample]:
        """See `Status`; of a slot whose worker does not answer only its problems."""
        for path, other in self.others.items():
            for told in other["problems"] if "takes_appends" not in other else ():
                labels = {"outbox": other.get("outbox_id", ""), "topic": other.get("topic", self.worker.topic)}
                yield Sample("pushrep_problem", {**labels, "problem": told["problem"]}, 1)
            with suppress(NobodyAnswers, CallRefused):
                for name, labels, value in ask(path, "metrics", timeout_s=_ASK_S):
                    yield Sample(name, labels, Histogram(*value) if isinstance(value, list) else value)


def workers_status(own: OutboxStatus) -> WorkersStatus:
    """The status of all workers' slots beside an open one."""
    others: dict[Path, Mapping[str, Any]] = {}
    here = Path(own.directory)
    for path in slot_directories(here.parent):
        if path != here:
            try:
                others[path] = ask(path, "status", timeout_s=_ASK_S)
            except (NobodyAnswers, CallRefused) as error:
                if (pid := lock_holder(path)) is not None:
                    held = Problem("not_answering", "outbox", f"process {pid} has it open: {error}")
                    others[path] = {"problems": [held.as_dict(str(path))]}
                else:
                    with suppress(PushrepError, OSError):  # a worker opens it now, say
                        found = closed_status(path, error.why).as_dict()
                        others[path] = {name: found[name] for name in ("problems", "outbox_id", "topic")}
    return WorkersStatus(directory=str(here.parent), worker=own, others=others)


class LateRecords(NamedTuple):
    """A partition whose oldest unacknowledged record was appended at `since_ms` (wall clock), and what it waits for."""

    partition: int
    since_ms: int
    waits_for: str


class SessionStatus(NamedTuple):
    """One replica of one partition. acknowledged, flushed: -1 before it has said so in this session. lag: the records
    that it is not known to hold.
    """

    replica: int
    state: str
    replica_epoch: int
    session_id: int
    acknowledged: int
    flushed: int
    next_offset: int
    in_flight: int
    end_reason: str | None
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """One partition as its leader sees it. Half-open offsets; damaged_from: the first one that was on disk and can't be
    read. in_sync holds indexes, the leader's own as well.

    shipped: by `kafka:<topic>` the first offset that the topic has not acknowledged.
    """

    partition: int
    log_start_offset: int
    log_end_offset: int
    flushed_offset: int
    high_watermark: int
    leader_epoch: int
    damaged_from: int | None = None
    in_sync: tuple[int, ...] = ()
    sessions: tuple[SessionStatus, ...] = ()
    shipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def unshipped(self) -> Mapping[str, int]:
        """By `kafka:<topic>` how many records the topic has not acknowledged."""
        return {name: max(0, self.log_end_offset - at) for name, at in self.shipped.items()}


def status_of(facts: Facts, partitions: Iterable[int] | None = None) -> OutboxStatus:
    """The status of an open outbox. partitions: these one by one, too; None: all. Raises LogClosed once the outbox is
    closed, ForkedProcess in a forked child.
    """
    identity, settings, logs = facts.identity, facts.settings, list(facts.logs.values())
    state, why = leading_state(facts)
    replicas = {} if facts.replication is None else facts.replication.appenders
    led = {number: found for number, one in replicas.items() if (found := one.led) is not None}
    grant = facts.replication.grant if facts.replication is not None else None
    in_own = [one.leader for number, one in led.items() if number < identity.partitions]
    leading = facts.replication.leading if facts.replication is not None else None
    shared, now_ms = logs_status(identity.outbox_id, logs), time.time_ns() // 1_000_000
    refused_ms = [ms for one in replicas.values() if (ms := one.refused_ms()) is not None]
    damaged = [one for one in facts.appenders if one.log.damaged_from is not None]
    own = facts.appenders[: identity.partitions]  # without that of the parking log, to which no request appends
    return OutboxStatus(
        directory=str(facts.directory),
        certificates=facts.certificates(),
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
        hold=hold_of(grant, now_ms),
        takeover=None if grant is None else grant.takeover,
        min_insync_replicas=grant.min_insync_replicas if grant is not None else identity.min_insync_replicas,
        in_sync_min=min((len(one.in_sync) for one in in_own), default=1),
        under_min_insync=sum(not one.may_append_all for one in in_own),
        log_end_offsets=sum(log.log_end_offset for log in logs),
        flushed_offsets=sum(log.flushed_offset for log in logs),
        high_watermarks=sum(log.high_watermark for log in logs),
        members=_members(facts, led),
        destinations=tuple(_destinations(facts.shipping)),
        damaged=tuple(one.partition for one in damaged),
        damaged_since_ms=tuple(one.opened_ms for one in damaged),
        stopped=tuple(one.stopped for one in facts.appenders if one.stopped is not None),
        takes_appends=shared.disk.level is not DiskLevel.FULL
        and any(one not in damaged and _takes_appends(facts, one, now_ms) for one in own),
        refused_ms=now_ms - max(refused_ms) if refused_ms else None,
        late=tuple(_late(facts, now_ms)),
        moved_ms=shared.moved_ms,
        disk=shared.disk,
        scrub=shared.scrub,
        recovery=shared.recovery,
        syncs=shared.syncs,
        held=shared.held,
        appends=_appends(facts),
        push=None if leading is None else _push(leading.manager),
        relay=facts.relays[-1]() if facts.relays else None,
        settings=facts.kept_settings.values,
        parts=tuple(
            _partition(facts.logs[n], led.get(n), facts.shipping)
            for n in (facts.logs if partitions is None else partitions)
            if n in facts.logs
        ),
    )


def closed_status(directory: Path, why: str) -> ClosedOutbox:
    """The status by the files. why: nobody answers. Raises NoOutbox, CorruptFile."""
    identity = identity_in(REAL_FILESYSTEM, directory)
    kept = find_election_state(directory, REAL_FILESYSTEM)
    grant = None if kept is None else kept[1].grant
    leader = identity.member if grant is None else grant.leader
    parts = []
    for log in logs_at(directory):
        topic, number = parse_log_name(log.name)
        if topic == identity.topic:
            one = summarize(log)
            parts.append(
                PartitionStatus(
                    partition=number,
                    log_start_offset=one.log_start_offset,
                    log_end_offset=one.log_end_offset or 0,
                    flushed_offset=one.flushed_offset or 0,
                    high_watermark=one.high_watermark or 0,
                    leader_epoch=one.leader_epoch,
                )
            )
    writer, parked = lock_holder(directory), parked_records(directory)
    return ClosedOutbox(
        directory=str(directory.resolve()),
        pid=writer,
        outbox_id=identity.outbox_id,
        producer=identity.producer,
        topic=identity.topic,
        partitions=identity.partitions,
        state="closed" if writer is None else HELD,
        why=why,
        member=identity.member,
        epoch=max((one.leader_epoch for one in parts), default=-1),
        min_insync_replicas=identity.min_insync_replicas,
        log_end_offsets=sum(one.log_end_offset for one in parts),
        flushed_offsets=sum(one.flushed_offset for one in parts),
        high_watermarks=sum(one.high_watermark for one in parts),
        members=tuple(
            MemberStatus(index=index, address=address, is_leader=index == leader)
            for index, address in sorted([(identity.member, ""), *identity.replicas])
        ),
        destinations=tuple(
            DestinationStatus(
                name=holder_name(topic),
                topic=topic,
                records=sum(
                    max(0, one.log_end_offset - (known[one.partition].acknowledged if one.partition in known else 0))
                    for one in parts
                ),
                parked=sum(one.topic == topic for one in parked),
                parked_since_ms=min((one.at_ms for one in parked if one.topic == topic), default=None),
            )
            for topic, known in _progress_of(directory).items()
        ),
        settings=read_kept(REAL_FILESYSTEM, directory),
        parts=tuple(parts),
        written_ms=_written_ms(directory),
    )


def _takes_appends(facts: Facts, appender: "PartitionAppender", now_ms: int) -> bool:
    """Whether requests for this partition are worth sending; its log is not damaged, and the disk not full."""
    stopped = appender.stopped
    if appender.is_refusing or (
        stopped is not None and now_ms - stopped.since_ms >= PAUSE_MS and now_ms - stopped.last_ms < TRIED_AGAIN_MS
    ):
        return False
    if facts.replication is None:
        return True
    replicas = facts.replication.appenders[appender.partition]
    return replicas.refused_ms(PAUSE_MS) is None and replicas.acknowledges(PAUSE_MS)


def _late(facts: Facts, now_ms: int) -> Iterator[LateRecords]:
    for appender in facts.appenders:
        if (waits := appender.waits_since_s()) is not None:
            age_ms = int(1000 * (perf_counter() - waits[0]))
            if age_ms >= PAUSE_MS + facts.settings.config.linger_ms:
                yield LateRecords(appender.partition, now_ms - age_ms, waits[1])


def _progress_of(directory: Path) -> dict[str, Mapping[int, PartitionProgress]]:
    """By topic. A slot's worker may have died before it reached a broker; then the other slots know the topics."""
    places = slot_directories(directory.parent) if is_slot(directory) else [directory]
    found = {place: read_progress(REAL_FILESYSTEM, place) for place in places}
    topics = dict.fromkeys(topic for progress in found.values() for topic in progress)
    return {topic: found[directory].get(topic, ShippingProgress()).partitions for topic in topics}


def _written_ms(directory: Path) -> int:
    newest = 0
    for place in (directory, *logs_at(directory)):
        for one in place.iterdir():
            with suppress(FileNotFoundError):  # whoever opens it now removes some
                newest = max(newest, one.stat().st_mtime_ns)
    return newest // 1_000_000


def leading_state(facts: Facts) -> tuple[LeadingState, str | None]:
    """The state, and why it is no better one."""
    if facts.replication is None:
        return LeadingState.ALONE, None
    for appender in facts.replication.appenders.values():
        if appender.failure is not None:
            resigned = isinstance(appender.failure, NotLeader)
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
    lags, leading = facts.replication.lag_by_index(), facts.replication.leading
    troubles, left = {} if leading is None else leading.troubles(), facts.replication.left_learners
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
            is_left=index in left,
            sessions=live[index],
            last_end_reason=ended.get(index),
            trouble=_LEFT
            if index in left
            else troubles[index].removeprefix(f"{address}: ")
            if index in troubles
            else None,
            trouble_since_ms=left.get(index, None if leading is None else leading.troubled_since_ms.get(index)),
            is_silent=index != facts.identity.member and facts.replication.is_silent(index),
            lag=lags.get(index),
        )
        for index, address in sorted({**facts.replication.learners, **listed}.items())
    )


def _destinations(shipping: Shipping) -> Iterator[DestinationStatus]:
    if (sink := shipping.sink) is None:
        return
    parked = [] if sink.state.parking is None else sink.state.parking.waiting(sink.topic)
    lag, fence, now_ms = sink.state.lag(), sink.fencing.newest, time.time_ns() // 1_000_000
    yield DestinationStatus(
        name=holder_name(sink.topic),
        topic=sink.topic,
        records=lag.records,
        size_bytes=lag.size_bytes,
        age_ms=lag.age_ms or 0,
        stopped=tuple(
            StoppedPartition(
                one.partition,
                one.offset,
                one.reason,
                now_ms - sink.state.stopped_ms(one.partition),
                sink.state.sources[one.partition].is_refused,
            )
            for one in lag.stopped
        ),
        trouble=lag.trouble,
        trouble_ms=sink.state.trouble_ms() or 0,
        fence_waits=None if (waits := sink.state.fence_waits()) is None else (waits[0], now_ms - waits[1]),
        is_fenced=None if fence is None else fence.is_standing,
        earlier_unfenced=None if fence is None else fence.earlier_unfenced,
        counts=sink.state.counts,
        requests=Histogram.of([sink.state.requests]),
        parked=len(parked),
        parked_since_ms=min((one.at_ms for one in parked), default=None),
    )


def _appends(facts: Facts) -> AppendStatus:
    failed = Counter[str]()
    counts = [one.counts for one in facts.appenders]
    for one in counts:
        failed.update(one.failed)
    return AppendStatus(
        records=sum(one.records for one in counts),
        size_bytes=sum(one.size_bytes for one in counts),
        batches=sum(one.batches for one in counts),
        refused=facts.refused,
        failed=failed,
        buffer_bytes=facts.budget.taken,
        buffer_limit_bytes=facts.budget.limit,
        appended=Histogram.of(one.appended for one in counts),
        acknowledged=Histogram.of(one.acknowledged for one in counts),
    )


def _push(manager: "PushManager") -> PushStatus:
    requests = list(manager.requests.items())
    return PushStatus(
        buffer_bytes=manager.memory.used_bytes,
        buffer_limit_bytes=manager.memory.limit_bytes,
        evicted_bytes=manager.memory.evicted_bytes,
        session_ends={reason.name: count for reason, count in list(manager.session_ends.items())},
        connections_lost=dict(manager.connections_lost),
        not_caught_up=dict(manager.not_caught_up),
        refusals=tuple(
            ReplicaRefusals(replica, code.name, count) for (replica, code), count in list(manager.refusals.items())
        ),
        requests=tuple(
            ReplicaRequests(replica, Histogram.of(one for (index, _), one in requests if index == replica))
            for replica in sorted({index for (index, _), _ in requests})
        ),
    )


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
                        lag=max(0, log.log_end_offset - max(led.leader.held_by(index), log.log_start_offset)),
                    )
                )
    return PartitionStatus(
        partition=log.partition,
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        flushed_offset=log.flushed_offset,
        high_watermark=log.high_watermark,
        leader_epoch=log.leader_epochs.latest_epoch,
        damaged_from=log.damaged_from,
        in_sync=in_sync,
        sessions=tuple(sessions),
        shipped={} if (sink := shipping.sink) is None else {holder_name(sink.topic): sink.needed_from(log.partition)},
    )
