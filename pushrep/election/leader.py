"""The leader of one partition: in-sync set, high watermark, sessions. Events in, effects out; no I/O.

on_append, on_flush ─┐                        ┌─▶ HighWatermarkMoved   waiting receipts resolve
start_session ───────┤                        ├─▶ Joined, Left         the in-sync set, shown and logged
on_answer ───────────┼─▶ PartitionLeader ─────┼─▶ SessionEnded         once a session
on_disconnect        │                        ├─▶ Push                 something may be sent to this replica
on_tick ─────────────┘                        ├─▶ Contested            a member shows a newer grant: who leads?
                                              └─▶ Resigned             another leads: appends fail from now on

HWM = min LEO over the in-sync set, the leader in it (flushed offsets where records must be on disk first). It moves
only while the set has m members. A replica joins when its present session has shown LEO >= HWM and >= the start of the
current epoch: an older epoch's record that m members hold is safe only once they have begun this epoch as well.

A newer grant that one member shows ends no lead by itself: the member may be bad, or the grant never got enough.
`Confirmations` decides, for all partitions of an outbox. It costs no safety: N - m + 1 members have to store a grant
before another leads by it, so from then on fewer than m are left that acknowledge an older leader's records.

`AppendTimes` stores when records were appended, for the age of a replica's lag: a mark (base offset, time) per append,
at most one in MARK_EVERY_MS, so that a log of a million appends a second has 600 for half a minute; an age is too high
by at most that. Ages beyond every rule are only displayed: they are too high by at most an eighth, for which 100 marks
last for weeks.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from pushrep.election.epochs import NO_EPOCH, LogEnds
from pushrep.election.grants import Grant, are_rivals
from pushrep.election.messages import AppendRecordsPartition, PushSessionEndReason
from pushrep.election.push_session import REACTIONS, InFlight, ReplicaProgress, SessionId, Step
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult
from pushrep.wire.values import Records

MARK_EVERY_MS = 50
_COARSE_PER_AGE = 8


class AppendTimes:
    """Offsets and times ascend. Not thread-safe."""

    __slots__ = ("_marks",)

    def __init__(self, log_end_offset: int, now_ms: int) -> None:
        # An older leader's records count as appended now: their earlier wait is not counted.
        self._marks: deque[tuple[int, int]] = deque([(0, now_ms)] if log_end_offset else [])

    def on_append(self, base_offset: int, now_ms: int) -> None:
        """A record at `base_offset` was appended."""
        if not self._marks or now_ms - self._marks[-1][1] >= MARK_EVERY_MS:
            self._marks.append((base_offset, now_ms))

    def time_of(self, offset: int) -> int | None:
        """When the record at `offset` was appended, at most MARK_EVERY_MS too early; None if there is none."""
        at = bisect_right(self._marks, offset, key=lambda mark: mark[0])
        return self._marks[max(0, at - 1)][1] if self._marks else None

    def every(self, ms: int) -> Iterator[tuple[int, int]]:
        """Marks (base offset, time), so far apart."""
        last_ms = None
        for mark in self._marks:
            if last_ms is None or mark[1] - last_ms >= ms:
                last_ms = mark[1]
                yield mark

    def forget(self, offset: int, before_ms: int) -> None:
        """Drop marks below `offset`, which nobody lacks, and thin out marks older than `before_ms`."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= offset:
            marks.popleft()
        old = bisect_right(marks, before_ms, key=lambda mark: mark[1])
        if old <= _COARSE_PER_AGE:
            return
        kept = [marks[0]]
        for at in range(1, old - 1):
            if (marks[at + 1][1] - kept[-1][1]) * _COARSE_PER_AGE > before_ms - marks[at + 1][1]:
                kept.append(marks[at])
        self._marks = deque([*kept, *list(marks)[old - 1 :]])


REPLICA_LAG_MAX_MS = 30_000


class HighWatermarkMoved(NamedTuple):
    """Records below are held by m members: their receipts resolve, and the next requests carry it."""

    high_watermark: int


class Joined(NamedTuple):
    """The replica joined the in-sync set."""

    replica: int


class Left(NamedTuple):
    """The replica left the in-sync set. too_slow: its session goes on."""

    replica: int
    too_slow: bool


class SessionEnded(NamedTuple):
    """A session ended, once for each. is_alarm: the replica waits for an operator."""

    replica: int
    id: SessionId
    reason: PushSessionEndReason
    is_alarm: bool = False


class Push(NamedTuple):
    """There is something to send to this replica, or to send again. backoff: after a pause."""

    replica: int
    backoff: bool = False


class Contested(NamedTuple):
    """`replica` shows a newer grant of our generation: of `epoch`, for member `leader` (-1: it refuses ours, and names
    none). Its session ended, and it counts for nothing until it shows our grant again; `Confirmations` decides.
    """

    replica: int
    epoch: int
    leader: int


class Resigned(NamedTuple):
    """Member `leader` has a newer grant, of `epoch` (-1: unknown): nothing is appended or acknowledged from now on.

    rival: the generation of a grant forced independently of this leader's; None: a newer grant.
    """

    epoch: int
    leader: int
    rival: int | None = None


LeaderEffect: TypeAlias = HighWatermarkMoved | Joined | Left | SessionEnded | Push | Contested | Resigned


class Confirmations:
    """Whether a leader leads on while members show a newer grant of its generation. It does unless `alive_ms` pass in
    which fewer than m members, itself among them, show its own grant. Not thread-safe; monotonic milliseconds.
    """

    def __init__(self, grant: Grant, alive_ms: int) -> None:
        self._grant, self._alive_ms = grant, alive_ms
        self._confirmed_ms: dict[int, int] = {}
        self._unsure_since_ms: int | None = None
        self.contesting: dict[int, tuple[int, int]] = {}
        """By member: epoch and leader of the newer grant that it showed last."""

    def on_own(self, member: int, now_ms: int) -> None:
        """A member showed this leader's grant."""
        self._confirmed_ms[member] = now_ms
        self.contesting.pop(member, None)
        if not self.contesting:
            self._unsure_since_ms = None

    def on_newer(self, member: int, epoch: int, leader: int, now_ms: int) -> None:
        """A member showed a newer grant."""
        self._confirmed_ms.pop(member, None)
        self.contesting[member] = (epoch, leader)
        if self._unsure_since_ms is None:
            self._unsure_since_ms = now_ms

    def newer_grant(self, now_ms: int) -> tuple[int, int] | None:
        """Epoch and leader of the grant that ends this lead now; None if it leads on."""
        if (since_ms := self._unsure_since_ms) is None:
            return None
        confirming = {member for member, at_ms in self._confirmed_ms.items() if at_ms >= since_ms}
        if self._grant.may_acknowledge({self._grant.leader, *confirming}):
            self._unsure_since_ms = now_ms
        elif now_ms - since_ms >= self._alive_ms:
            return max(self.contesting.values())
        return None


class PartitionLeader:
    """One partition while its leader has the grant. Not thread-safe: the partition's lock is the caller's.

    log: as it is at the beginning. The last epoch in its list is the grant's, from the log's end on.
    flushed_only: only records on disk count (FLUSHED). Times are milliseconds of one monotonic clock.
    """

    def __init__(  # noqa: PLR0913 - what a log is, and two settings
        self,
        grant: Grant,
        log: LogEnds,
        *,
        flushed_offset: int,
        high_watermark: int,
        flushed_only: bool,
        now_ms: int,
        replica_lag_max_ms: int = REPLICA_LAG_MAX_MS,
    ) -> None:
        assert log.leader_epochs.latest_epoch == grant.epoch, "the epoch is on disk before it is led"
        self.grant, self.log = grant, log
        self.epoch_start_offset = log.log_end_offset
        self.flushed_offset, self.high_watermark = flushed_offset, high_watermark
        self.in_sync: set[int] = {grant.leader}
        self.stored: set[int] = {grant.leader}
        """The members that have shown this grant."""
        self.uncounted: frozenset[int] = grant.entering
        """Replicas with another directory than the grant's, or entering by it: they are pushed to, and their
        acknowledgements do not count.
        """
        self.has_resigned = False
        self._flushed_only, self._lag_max_ms = flushed_only, replica_lag_max_ms
        self._sessions: dict[int, ReplicaProgress] = {}
        self.sessions: Mapping[int, ReplicaProgress] = self._sessions
        """The newest session of each replica, ended ones too."""
        self._times = AppendTimes(log.log_end_offset, now_ms)

    @property
    def may_append_all(self) -> bool:
        """Whether an append with ALL may begin; else NotEnoughReplicas."""
        return not self.has_resigned and self.grant.may_acknowledge(self.in_sync)

    @property
    def caught_up(self) -> frozenset[int]:
        """The replicas, members or not yet, that hold everything below the high watermark."""
        return frozenset({self.grant.leader, *(index for index in self._sessions if self._has_caught_up(index))})

    def has_all(self, replica: int) -> bool:
        """Whether an in-sync replica holds every record, and every one is acknowledged."""
        end = self.log.log_end_offset
        return replica in self.in_sync and (self._verified(replica) or 0) >= end and self.high_watermark >= end

    @property
    def may_settle(self) -> bool:
        """Whether the member change of this grant is complete for this partition: the next grant may settle it."""
        stored = self.stored - self.uncounted | self.stored & self.grant.entering
        return not self.has_resigned and self.grant.may_settle(stored, self.caught_up)

    def may_enter(self, replica: int) -> bool:
        """Whether a replica with another directory than the grant's is filled, and enough others can agree to a grant
        that names it.
        """
        others = self.stored & self.in_sync - {replica}
        return not self.has_resigned and replica in self.caught_up and self.grant.may_enter(others)

    def start(self) -> list[LeaderEffect]:
        """Begin: with m = 1 the watermark moves at once."""
        return self._moved()

    def on_append(self, log_end_offset: int, now_ms: int) -> list[LeaderEffect]:
        """Records of this epoch were appended up to `log_end_offset`."""
        self._check_leading()
        base = self.log.log_end_offset
        assert log_end_offset > base, f"an append rises above {base}"
        self._times.on_append(base, now_ms)
        self.log = LogEnds(self.log.log_start_offset, log_end_offset, self.log.leader_epochs)
        return [*self._moved(), *self._push_to_all()]

    def on_flush(self, flushed_offset: int) -> list[LeaderEffect]:
        """Everything below is on this disk."""
        self.flushed_offset = max(self.flushed_offset, flushed_offset)
        return self._moved()

    def on_log_start(self, log_start_offset: int) -> list[LeaderEffect]:
        """Records below were removed here; replicas get the new log start with the next request."""
        epochs = self.log.leader_epochs.cut_below(log_start_offset)
        self.log = self.log._replace(log_start_offset=log_start_offset, leader_epochs=epochs)
        for progress in self._sessions.values():
            progress.on_log_start(self.log)
        return self._push_to_all()

    def start_session(self, replica: int, session: SessionId, theirs: LogEnds) -> list[LeaderEffect]:
        """Push to a replica whose log was described as `theirs`. Ignored unless newer than a live session.

        After an ended session any identifiers are accepted, because a node on an older copy of its disk has lower ones.
        """
        self._check_leading()
        live = self._sessions.get(replica)
        if live is not None and live.is_live and session <= live.id:
            return []
        ended = self.end_session(replica, PushSessionEndReason.STALE_REPLICA_EPOCH) if live else []
        self._sessions[replica] = ReplicaProgress(replica, session, self.log, theirs)
        return [*ended, Push(replica)]

    def on_directory(self, replica: int, *, is_members: bool) -> list[LeaderEffect]:
        """A replica showed a directory. is_members: it is the one that counts as that member."""
        if is_members and replica not in self.grant.entering:
            self.uncounted -= {replica}
            return [*self._join(replica), *self._moved()]
        self.uncounted |= {replica}
        return self._leave(replica, too_slow=False)

    def end_session(self, replica: int, reason: PushSessionEndReason) -> list[LeaderEffect]:
        """End it from this side. Unknown or over already: nothing."""
        progress = self._sessions.get(replica)
        if progress is None or not progress.end(reason):
            return []
        return [SessionEnded(replica, progress.id, reason), *self._leave(replica, too_slow=False)]

    def request(
        self,
        replica: int,
        append_offset: int,
        end_offset: int,
        tp: TopicIdPartition,
        *,
        records: Records = (),
    ) -> tuple[InFlight, AppendRecordsPartition]:
        """The next request to a replica with a live session. records: the batches of [append_offset, end_offset).

        append_offset: the session's next_offset, or the base of the batch that holds it. With no batch both are equal.
        """
        progress = self._sessions[replica]
        sent = progress.sent(append_offset, end_offset)
        return sent, AppendRecordsPartition(
            tp=tp,
            leader_epoch=progress.id.leader_epoch,
            replica_epoch=progress.id.replica_epoch,
            session_id=progress.id.session_id,
            append_offset=sent.append_offset,
            previous_epoch=self.log.epoch_before(sent.append_offset),
            epoch_start_offset=self.epoch_start_offset,
            high_watermark=self.high_watermark,
            log_start_offset=self.log.log_start_offset,
            flush_wanted=self._flushed_only,
            restart=sent.restart,
            generation=self.grant.generation,
            records=records,
        )

    def on_answer(  # noqa: PLR0911 - an answer a line
        self, replica: int, session: SessionId, sequence: int, result: AppendRecordsResult
    ) -> list[LeaderEffect]:
        """A replica answered. Answers of an ended session, or to a request that was given up, change nothing."""
        progress = self._sessions.get(replica)
        if progress is None or progress.id != session or not progress.is_live:
            return []
        # Every answer shows the newest grant, whatever its result.
        is_ours = result.grant_epoch <= self.grant.epoch and result.generation == self.grant.generation
        if not is_ours and (effects := self._on_another_grant(replica, result)):
            return effects
        if REACTIONS[progress.state, result.error_code].step is Step.CONTEST:
            return self._contested(replica, result.grant_epoch, result.grant_leader)
        if result.grant_epoch == self.grant.epoch:
            self.stored.add(replica)
        reaction = progress.on_answer(sequence, result, self.log)
        if reaction.step is Step.IGNORE:
            return []
        if reaction.step is Step.ADVANCE:
            behind = [Push(replica)] if progress.next_offset < self.log.log_end_offset else []
            return [*self._join(replica), *self._moved(), *behind]
        if reaction.reason is not None:
            ended = SessionEnded(replica, session, reaction.reason, reaction.is_alarm)
            return [ended, *self._leave(replica, too_slow=False)]
        return [Push(replica, backoff=reaction.step is Step.RESEND)]

    def on_disconnect(self, replica: int) -> list[LeaderEffect]:
        """The connection is gone or timed out: batches in flight are sent again on the next one."""
        progress = self._sessions.get(replica)
        if progress is None or not progress.is_live:
            return []
        progress.resend(self.log)
        return [Push(replica, backoff=True)]

    def on_tick(self, now_ms: int) -> list[LeaderEffect]:
        """Remove replicas that have owed an answer for too long from the in-sync set. An idle replica does not age."""
        effects: list[LeaderEffect] = []
        for replica in sorted(self.in_sync - {self.grant.leader}):
            held = self._verified(replica)
            since = self._times.time_of(held) if held is not None and held < self.log.log_end_offset else None
            if since is not None and now_ms - since > self._lag_max_ms:
                effects += self._leave(replica, too_slow=True)
        self._times.forget(min(map(self.held_by, self.grant.indexes)), now_ms - self._lag_max_ms)
        return effects

    def held_by(self, replica: int) -> int:
        """The offset up to which the replica has told this leader that it holds the records; no rule uses it.

        By its last acknowledgement in any session; before one by the description of its log; 0 before that.
        """
        if replica == self.grant.leader:
            return self.log.log_end_offset
        progress = self._sessions.get(replica)
        if progress is None:
            return 0
        return progress.described if progress.acknowledged is None else progress.acknowledged

    def owes_since(self, replica: int) -> int | None:
        """When the oldest record that the replica is not known to hold was appended; None if it holds all.

        Older leaders' records count as appended when this one began to lead.
        """
        held = self.held_by(replica)
        return self._times.time_of(held) if held < self.log.log_end_offset else None

    def on_grant_shown(self, replica: int, generation: int, epoch: int, leader: int) -> list[LeaderEffect]:
        """A member showed a grant of this rank. One of a higher generation, or a rival forced beside ours, ends this
        lead; of our own generation, a newer one is `Contested`.
        """
        rival = generation if are_rivals(generation, self.grant.generation) else None
        if rival is not None or generation > self.grant.generation:
            return self.resign(epoch, leader, rival)
        return self._contested(replica, epoch, leader) if (generation, epoch) > self.grant.rank else []

    def _contested(self, replica: int, epoch: int, leader: int) -> list[LeaderEffect]:
        if self.has_resigned:
            return []
        self.stored.discard(replica)
        ended = self.end_session(replica, PushSessionEndReason.STALE_REPLICA_EPOCH)  # the next one offers our grant
        return [Contested(replica, epoch, leader), *ended]

    def resign(self, epoch: int, leader: int, rival: int | None = None) -> list[LeaderEffect]:
        """Another has the lead: every session ends, and the watermark never moves again."""
        if self.has_resigned:
            return []
        self.has_resigned = True
        effects: list[LeaderEffect] = [Resigned(epoch, leader, rival)]
        for replica in sorted(self._sessions):
            effects += self.end_session(replica, PushSessionEndReason.NEW_LEADER_EPOCH)
        return effects

    def _on_another_grant(self, replica: int, result: AppendRecordsResult) -> list[LeaderEffect]:
        """The effects of the grant that an answer shows.

        An older one deposes nobody and acknowledges nothing: the next session begins by offering our grant. An answer
        without a grant, as from a log that is not open, shows none.
        """
        if newer := self.on_grant_shown(replica, result.generation, result.grant_epoch, result.grant_leader):
            return newer
        shows_grant = result.grant_epoch != NO_EPOCH or result.error_code is ErrorCode.FENCED_LEADER_EPOCH
        if shows_grant and result.generation < self.grant.generation:
            return self.end_session(replica, PushSessionEndReason.STALE_REPLICA_EPOCH)
        return []

    def _check_leading(self) -> None:
        assert not self.has_resigned, "a leader that resigned takes nothing any more"

    def _verified(self, replica: int) -> int | None:
        """The member's offset that counts for the watermark, also of the leader itself."""
        if replica == self.grant.leader:
            return self.flushed_offset if self._flushed_only else self.log.log_end_offset
        progress = self._sessions.get(replica)
        return progress.verified(flushed_only=self._flushed_only) if progress and progress.is_live else None

    def _has_caught_up(self, replica: int) -> bool:
        held = self._verified(replica)
        return held is not None and held >= max(self.high_watermark, self.epoch_start_offset)

    def _join(self, replica: int) -> list[LeaderEffect]:
        counts = replica in self.grant.indexes and replica not in self.in_sync | self.uncounted
        if not counts or not self._has_caught_up(replica):
            return []
        self.in_sync.add(replica)
        return [Joined(replica)]

    def _leave(self, replica: int, *, too_slow: bool) -> list[LeaderEffect]:
        if replica not in self.in_sync:
            return []
        self.in_sync.discard(replica)
        return [Left(replica, too_slow), *self._moved()]

    def _moved(self) -> list[LeaderEffect]:
        """The watermark's rise, if any: it rises only while m members are in sync, and never falls."""
        if not self.may_append_all:
            return []
        held = min([self._verified(replica) or 0 for replica in self.in_sync])
        if held <= self.high_watermark or held < self.epoch_start_offset:
            return []  # below the epoch's start even the leader has not begun the epoch on disk
        self.high_watermark = held
        return [HighWatermarkMoved(held), *self._push_to_all()]

    def _push_to_all(self) -> list[LeaderEffect]:
        return [Push(replica) for replica, progress in sorted(self._sessions.items()) if progress.is_live]
