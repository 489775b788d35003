"""A partition while it is led: the rules under a lock, its log, and the callbacks that wait for its high watermark.

    appends, flushes ─┐                         ┌─▶ log.advance_high_watermark, then the waiting callbacks
    answers ──────────┼─▶ PartitionLeader ──────┼─▶ the manager: this replica has something to be sent
    connections gone ─┘   (rules, one lock)     └─▶ the session: it has ended

The rules run under the lock, and their effects are carried out after it: no callback runs with the lock held, and every
effect may come late or twice without harm (a watermark only rises, a session ends once, an unneeded push sends
nothing).
"""

import heapq
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import ParamSpec, Protocol

from pushrep.election.epochs import LogEnds
from pushrep.election.errors import NotLeader, RivalGenerations
from pushrep.election.leader import (
    Contested,
    HighWatermarkMoved,
    Joined,
    LeaderEffect,
    Left,
    PartitionLeader,
    Push,
    Resigned,
    SessionEnded,
)
from pushrep.election.messages import PushSessionEndReason
from pushrep.election.push_session import NEEDS_SOMEBODY, SessionId
from pushrep.log import LogClosed, SegmentLog
from pushrep.records import RecordBatch
from pushrep.replicate.errors import MayStillBeDelivered
from pushrep.replicate.settings import Replica
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult

_LOG = logging.getLogger("pushrep.push")
_Asked = ParamSpec("_Asked")

OnReplicated = Callable[[BaseException | None], None]
"""Called once: with None when the records are below the high watermark, else with the reason why they may never be."""


class PushSession:
    """One session with one replica of one partition: its identifiers and its callbacks. A LedPartition makes it.

    Newer identifiers win: leader epoch, then replica epoch, then session id. The rules of the session (push_session.py
    of pushrep.election, by its leader.py) are asked under the lock of its partition.
    """

    __slots__ = (
        "_lock",
        "_told_watermarks",
        "ended",
        "id",
        "log_end_offset",
        "log_start_offset",
        "partition",
        "replica",
        "started",
        "trouble",
    )

    def __init__(
        self, leader_epoch: int, replica_epoch: int, session_id: int, replica: Replica, partition: "LedPartition"
    ) -> None:
        self.id = SessionId(leader_epoch, replica_epoch, session_id)
        self.replica, self.partition = replica, partition
        self.started: Future[bool] = Future()
        """True at the first success; False if the session ended before it."""
        self.ended: PushSessionEndReason | None = None
        self.trouble = ""
        """Why it can't go on until an operator acts; None if there is no such reason."""
        self.log_end_offset = self.log_start_offset = -1
        """The replica's log end offset by its last success; -1 before one."""
        self._told_watermarks = (-1, -1)
        self._lock = threading.Lock()

    def on_append_records_response(self, log_end_offset: int, log_start_offset: int) -> bool:
        """The replica succeeded, with these offsets. Returns whether the watermark rose, so that waiting requests may
        be done.
        """
        is_first = self.log_end_offset < 0
        self.log_end_offset, self.log_start_offset = log_end_offset, log_start_offset
        watermarks = (self.partition.leader.high_watermark, log_start_offset)
        rose = watermarks > self._told_watermarks
        self._told_watermarks = watermarks
        if is_first and not self.started.done():
            self.started.set_result(True)
        return rose

    def try_complete_delayed_requests(self) -> None:
        """Make the callbacks whose offset the watermark has reached."""
        self.partition.complete_waiting()

    def on_push_session_ended(self, reason: PushSessionEndReason) -> None:
        """The session is over; the first reason counts."""
        with self._lock:
            if self.ended is not None:
                return
            self.ended = reason
        if not self.started.done():
            self.started.set_result(False)


class Pushes(Protocol):
    """What a partition needs of a PushManager."""

    def on_leader_append(
        self, tp: TopicIdPartition, replica_ids: Iterable[int], append_offset: int, records: "Sequence[RecordBatch]"
    ) -> None: ...
    def wake(self, tp: TopicIdPartition, replica_id: int, *, backoff: bool = False) -> None:
        """There is something to send to this replica, or to send again."""
        ...

    def record_follower_not_caught_up(self, tp: TopicIdPartition, replica_id: int) -> None: ...
    def record_refusal(self, replica_id: int, error: ErrorCode) -> None: ...


class LedPartition:
    """One partition and its replicas. Thread-safe; the caller passes appends one after another, in log order.

    on_ended(session, reason): a session is over; Leading starts the next one.
    """

    def __init__(
        self,
        tp: TopicIdPartition,
        log: SegmentLog,
        leader: PartitionLeader,
        pushes: Pushes,
        on_ended: Callable[[PushSession, PushSessionEndReason], None],
    ) -> None:
        self.tp, self.log, self.leader = tp, log, leader
        self.lock = threading.Lock()
        self.resigned: NotLeader | None = None
        """Set when another leads, or may: new appends are not acknowledged any more."""
        self._pushes, self.on_ended = pushes, on_ended
        self.on_contested: Callable[[Contested], None] = lambda _shown: None
        """Called in any thread when a member shows a newer grant."""
        self._sessions: dict[SessionId, PushSession] = {}
        self._waiting: list[tuple[int, int, OnReplicated]] = []
        # The log's high watermark, not the rules': a callback may read its records from the log at once.
        self._reached = leader.high_watermark
        self._waiting_lock = threading.Lock()
        self._tickets = count()
        self._closed: MayStillBeDelivered | None = None

    def start(self) -> None:
        """Carry out what already holds without an answer, because this member alone may be enough."""
        self._decide(self.leader.start)

    def on_append(self, append_offset: int, batches: Sequence[RecordBatch], now_ms: int) -> None:
        """Push these batches, which are in the log at `append_offset`. Never waits."""
        with self.lock:
            if self.leader.has_resigned:
                return
            effects = self.leader.on_append(batches[-1].header.next_offset, now_ms)
            replica_ids = [index for index, progress in self.leader.sessions.items() if progress.is_live]
        if replica_ids:
            self._pushes.on_leader_append(self.tp, replica_ids, append_offset, batches)
        self._apply(_without_pushes(effects))

    def on_flush(self, flushed_offset: int) -> None:
        """Everything below is on this disk."""
        if flushed_offset > self.leader.flushed_offset:
            self._decide(self.leader.on_flush, flushed_offset)

    def on_log_start(self, log_start_offset: int) -> None:
        """Records below were removed here; the replicas get the new log start."""
        self._decide(self.leader.on_log_start, log_start_offset)

    def look_at_log_start(self) -> None:
        """Notify replicas if retention, or the log's owner, has raised the log start."""
        with suppress(LogClosed):  # then pushing ends soon
            if (log_start_offset := self.log.log_start_offset) > self.leader.log.log_start_offset:
                self.on_log_start(log_start_offset)

    def on_tick(self, now_ms: int) -> None:
        """Remove replicas that lag too long from the in-sync set, and look at the log start."""
        self.look_at_log_start()
        self._decide(self.leader.on_tick, now_ms)

    def start_session(self, replica: Replica, replica_epoch: int, session_id: int, theirs: LogEnds) -> PushSession:
        """Make the session for a replica whose log was described as `theirs`, for `PushManager.start_push`."""
        key = SessionId(self.leader.grant.epoch, replica_epoch, session_id)
        session = PushSession(*key, replica, self)
        with self.lock:
            if self.leader.has_resigned:
                session.ended = PushSessionEndReason.NEW_LEADER_EPOCH
                return session
            self._sessions[key] = session
            effects = self.leader.start_session(replica.index, key, theirs)
        self._apply(_without_pushes(effects))
        return session

    def on_directory(self, replica: int, *, is_members: bool) -> None:
        """A replica showed its directory. is_members: whether it is the one that the grant names."""
        self._decide(self.leader.on_directory, replica, is_members=is_members)

    def on_answer(self, session: PushSession, sequence: int, result: AppendRecordsResult) -> None:
        """A replica answered a request of this session."""
        if (code := result.error_code) is not ErrorCode.NONE:
            self._pushes.record_refusal(session.replica.index, code)
            if code in NEEDS_SOMEBODY:
                session.trouble = f"{code.name}: {code.meaning}"
        self._decide(self.leader.on_answer, session.replica.index, session.id, sequence, result)

    def on_disconnect(self, session: PushSession) -> None:
        """The connection is lost: requests in flight are sent again."""
        with self.lock:
            effects = self.leader.on_disconnect(session.replica.index) if self._is_live(session) else []
        self._apply(_without_pushes(effects))

    def end_session(self, session: PushSession, reason: PushSessionEndReason) -> None:
        """End it from this side, if it is the live one."""
        with self.lock:
            effects = self.leader.end_session(session.replica.index, reason) if self._is_live(session) else []
        self._apply(effects)

    def _is_live(self, session: PushSession) -> bool:
        progress = self.leader.sessions.get(session.replica.index)
        return progress is not None and progress.id == session.id

    def end_session_of(self, replica: int, reason: PushSessionEndReason) -> None:
        """End the live session of this replica, if it has one."""
        self._decide(self.leader.end_session, replica, reason)

    def on_grant_shown(self, replica: int, generation: int, epoch: int, leader: int) -> None:
        """A member showed a grant: of a higher generation, or a rival forced beside ours, it ends this lead."""
        self._decide(self.leader.on_grant_shown, replica, generation, epoch, leader)

    def resign(self, why: NotLeader) -> None:
        """Stop leading without another's grant; waiting callbacks fail with `why`. A second call does nothing."""
        with self.lock:
            if self.leader.has_resigned:
                return
            self.resigned = why
            effects = self.leader.resign(why.epoch, why.leader)
        self._apply(effects)

    def when_replicated(self, end_offset: int, callback: OnReplicated) -> None:
        """Call back with None once the high watermark has reached `end_offset`, or with NotLeader or
        MayStillBeDelivered if it may never. In any thread, at once in this one if it has; `callback` must not wait.
        """
        with self._waiting_lock:
            failure = self.resigned or self._closed  # else the end of the lead will find this callback
            is_reached = end_offset <= self._reached
            if failure is None and not is_reached:
                heapq.heappush(self._waiting, (end_offset, next(self._tickets), callback))
                return
        self._call_back(callback, None if is_reached else failure)

    def close(self) -> None:
        """Fail the waiting callbacks: their records may still be replicated."""
        self._closed = MayStillBeDelivered("the leader was closed before enough replicas had them")
        self.complete_waiting()

    def hand_over(self) -> list[tuple[int, OnReplicated]]:
        """Remove and return the waiting callbacks: (end offset, callback)."""
        with self._waiting_lock:
            waiting, self._waiting = self._waiting, []
        return [(end_offset, callback) for end_offset, _, callback in sorted(waiting, key=lambda one: one[:2])]

    def complete_waiting(self) -> None:
        """Make the callbacks whose records are below the high watermark."""
        failure = self.resigned or self._closed
        if failure is None and not self._waiting:  # a wait that begins now reads the new watermark
            return
        done: list[tuple[OnReplicated, BaseException | None]] = []
        with self._waiting_lock:
            while self._waiting and self._waiting[0][0] <= self._reached:
                done.append((heapq.heappop(self._waiting)[2], None))
            if failure is not None:
                done += [(callback, failure) for _, _, callback in sorted(self._waiting)]
                self._waiting.clear()
        for callback, error in done:
            self._call_back(callback, error)

    def _call_back(self, callback: OnReplicated, error: BaseException | None) -> None:
        """Call back; log a callback's error, because other callbacks and effects follow."""
        try:
            callback(error)
        except Exception:  # noqa: BLE001 - it is not ours
            _LOG.exception("%s: a callback that waited for replicas failed", self.tp)

    def _decide(
        self, rule: Callable[_Asked, Sequence[LeaderEffect]], *arguments: _Asked.args, **named: _Asked.kwargs
    ) -> None:
        with self.lock:
            effects = rule(*arguments, **named)
            if effects and isinstance(effects[0], Resigned):  # with the lock: an append finds out why
                self._note_resigned(effects[0])
        self._apply(effects)

    def _note_resigned(self, effect: Resigned) -> None:
        why, own = (effect.leader, effect.epoch), self.leader.grant.generation
        rivals = effect.rival is not None and RivalGenerations(*why, generation=own, rival=effect.rival)
        self.resigned = self.resigned or rivals or NotLeader(*why)
        _LOG.error("%s: %s", self.tp, self.resigned)

    def _apply(self, effects: Sequence[LeaderEffect]) -> None:
        for effect in effects:
            match effect:
                case Push():
                    self._pushes.wake(self.tp, effect.replica, backoff=effect.backoff)
                case HighWatermarkMoved():
                    self.log.advance_high_watermark(effect.high_watermark)
                    with self._waiting_lock:
                        self._reached = max(self._reached, effect.high_watermark)
                    self.complete_waiting()
                case SessionEnded():
                    self._session_ended(effect)
                case Joined():
                    _LOG.info("%s: replica %d is in sync", self.tp, effect.replica)
                case Left():
                    if effect.too_slow:
                        self._pushes.record_follower_not_caught_up(self.tp, effect.replica)
                    level = logging.WARNING if effect.too_slow else logging.INFO  # an end is logged by its reason
                    _LOG.log(level, "%s: replica %d left the in-sync set", self.tp, effect.replica)
                case Contested():
                    self.on_contested(effect)
                case Resigned():
                    self.complete_waiting()

    def _session_ended(self, effect: SessionEnded) -> None:
        if effect.is_alarm:
            _LOG.error("%s: replica %d waits for an operator", self.tp, effect.replica)
        session = self._sessions.pop(effect.id, None)
        if session is not None:
            session.on_push_session_ended(effect.reason)
            self.on_ended(session, effect.reason)


def _without_pushes(effects: Iterable[LeaderEffect]) -> list[LeaderEffect]:
    """For calls of a pusher, or before one is made: it looks itself at what it has to send."""
    return [effect for effect in effects if not isinstance(effect, Push)]
