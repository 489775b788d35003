"""ReplaySession: the rules of one replay. Events in, effects out; no file, socket or clock.

    Opened + Attached ──▶ REPLAY:  Turn ──▶ ReadBlock ──▶ BlockRead ──▶ SendBlock ──▶ Sent ──▶ the next Turn
                                     ├──▶ Heartbeat       at the log's end, at a bound (a counter that it must
                                     │                   not pass), without credit, or ahead of its rate
                                     └──▶ SendEnd         limit reached, or stalled

One block is in flight at a time, so a slow subscriber costs one block. The next one is due while there is credit: the
bytes that the reader (remote.py) accepts, which both sides count.

    reader                                                   session, at the node
    Attach: credit_bytes 4 MiB              ──▶              FetchCredit.give(4 MiB)
    blocks come                             ◀── ReplayData   of at most block_bytes, and no more than the credit
    Credit: what its program took, a quarter of it each ──▶  FetchCredit.give(bytes)

A batch is never split (`clip` of plan.py): a first batch larger than the credit is a block by itself and overdraws the
credit. A replay with a rate limit gets small blocks and pauses between them.

ReplaySessions holds all sessions of a node or client: their limit, ids, refusals and counters.

    session id, 64 bits    | serial, rising, 32 | random, 32 |      can't be guessed, never repeats

A driver gives turns: a local session takes one when its reader asks (local.py); a node's sessions take turns of one
block each (pushrep/replicate/replay_server.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from pushrep.log import CorruptBatch
from pushrep.log.published import LogOffsets
from pushrep.replay import events as e
from pushrep.replay.events import NEXT, ReplayState, impossible
from pushrep.replay.plan import (
    Node,
    ReplayPlan,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
    Tip,
    clip,
    plan_replay,
    tip_of,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason

Effects = list[e.Effect]


_BLOCKS_PER_S_LIMITED = 10


class FetchCredit:
    """What one session may send. max_bytes_per_s: the request's limit. Times are of one monotonic clock, in ms."""

    def __init__(self, max_bytes_per_s: int | None, now_ms: int) -> None:
        self.left_bytes = 0
        """Bytes that the subscriber accepts; below 0 after a batch larger than the credit."""
        self.send_from_ms = now_ms
        """Nothing is sent before this time, to keep the rate limit."""
        self._max_bytes_per_s = max_bytes_per_s

    def give(self, credit_bytes: int) -> bool:
        """The subscriber accepts so much more. Returns whether it accepted nothing before."""
        was_empty = self.left_bytes <= 0
        self.left_bytes += credit_bytes
        return was_empty and self.left_bytes > 0

    def block_bytes(self, block_bytes_max: int, now_ms: int) -> int:
        """The largest size of a block now; 0: none may be sent."""
        if self.left_bytes <= 0 or now_ms < self.send_from_ms:
            return 0
        size_bytes = min(block_bytes_max, self.left_bytes)
        if self._max_bytes_per_s is None:
            return size_bytes
        # Small, so that the limit holds within a tenth of a second.
        return min(size_bytes, max(1, self._max_bytes_per_s // _BLOCKS_PER_S_LIMITED))

    def spend(self, size_bytes: int, now_ms: int) -> None:
        """A block of so many bytes is sent."""
        self.left_bytes -= size_bytes
        if self._max_bytes_per_s is not None:
            cost_ms = -(-size_bytes * 1000 // self._max_bytes_per_s)
            self.send_from_ms = max(self.send_from_ms, now_ms) + cost_ms


class ReplaySession:
    """One session over one recording. `plan` comes from `plan_replay`; times are the monotonic clock's, in ms."""

    def __init__(self, session_id: int, plan: ReplayPlan, settings: ReplaySettings, now_ms: int) -> None:
        self.id, self.plan = session_id, plan
        self.identity = ""
        """Of which node's client; a slot is its."""
        self.state = ReplayState.INIT
        self.position = plan.position
        self.end_reason: ReplayEndReason | None = None
        self.bytes_sent = self.records_sent = 0
        self.tip = plan.position
        self.last_progress_ms = self._behind_since_ms = now_ms
        self._end, self._left = plan.end, plan.records
        self._settings, self._now_ms = settings, now_ms
        self._beats_together_ms = max(1, settings.heartbeat_ms // 20)
        self._due_ms = now_ms + settings.connect_timeout_ms  # by then it is attached; later, its end is sent
        self._is_opened = self._is_attached = False
        self._credit = FetchCredit(plan.max_bytes_per_s, now_ms)
        self._reading: e.ReadBlock | None = None
        self._reading_bound = 0
        self._is_sending = False
        self._under_way_since_ms = 0
        self._held_until = 0
        self._heard_ms = now_ms
        self._last_counter = 0

    @property
    def credit(self) -> int:
        """Bytes that the subscriber accepts; below 0 after a batch larger than the credit."""
        return self._credit.left_bytes

    @property
    def lag(self) -> int:
        """Offsets between the position and the tip of the last turn."""
        return max(0, self.tip - self.position)

    @property
    def is_behind(self) -> bool:
        """Whether there are records to send, apart from a batch that waits for its bound."""
        return self.lag > 0 and self._held_until <= self.tip

    def stalled_ms(self, now_ms: int) -> int:
        """For how long it has had records to send and sent nothing; 0 if it has none."""
        return max(0, now_ms - max(self.last_progress_ms, self._behind_since_ms)) if self.is_behind else 0

    @property
    def wants_liveness(self) -> bool:
        """Whether its turns need `Turn.is_live`: a bounded replay at the tip ends when its writer stops."""
        is_held = self._held_until > self.tip
        if self._left is None:
            return self._end is not None and is_held
        return self.position >= self.tip or is_held

    @property
    def next_turn_ms(self) -> int:
        """When its next turn is due, unless an event or a change of the log comes first.

        Heartbeats may be late by a twentieth, so that those of many sessions coincide and wake a node once.
        """
        if self.state is not ReplayState.REPLAY:
            return self._due_ms
        if self._reading is not None or self._is_sending:
            since_ms = max(self.last_progress_ms, self._under_way_since_ms)
            return since_ms + self._settings.liveness_timeout_ms
        beat_ms = self._heard_ms + self._settings.heartbeat_ms
        beat_ms += -beat_ms % self._beats_together_ms
        send_from_ms = self._credit.send_from_ms
        return min(beat_ms, send_from_ms) if send_from_ms > self._now_ms else beat_ms

    def handle(self, event: e.Event, now_ms: int) -> Effects:
        """Handle an event; returns the effects for the driver, in order. AssertionError: it can't happen now."""
        cell = NEXT[self.state][type(event)]
        if cell is None:
            raise impossible(self.state, type(event))
        before, self._now_ms = self.state, max(now_ms, self._now_ms)
        handler = self.HANDLERS[before].get(type(event))
        effects = handler(self, event) if handler is not None else []
        if self.state is not before and self.state not in cell:
            raise impossible(before, type(event))
        return effects

    # ---- INIT

    def _opened(self, event: e.SegmentOpened) -> Effects:
        if event.epoch_by_log is not None and event.leader_epoch != event.epoch_by_log:
            why = f"its batch is of leader epoch {event.leader_epoch}, the log says {event.epoch_by_log}"
            return self._refuse(ErrorCode.CORRUPT_MESSAGE, f"offset {self.position}: {why}")
        wanted = self.plan.epoch_before
        if wanted is not None and event.epoch_before is not None and event.epoch_before != wanted:
            why = f"the record before offset {self.position} is of leader epoch {event.epoch_before}, not {wanted}"
            return self._refuse(ErrorCode.TRUNCATED, f"{why}: the log was cut and written anew")
        self._is_opened = True
        return [e.Started(self.position), *self._begin_if_both()]

    def _refuse(self, code: ErrorCode, why: str, segment: int | None = None) -> Effects:
        self.end_reason = ReplayEndReason.ERROR
        return [e.Refuse(code, why, segment), *self._done()]

    def _attached(self, event: e.SubscriberAttached) -> Effects:
        self._is_attached = True
        self._credit.give(event.credit_bytes)
        return self._begin_if_both()

    def _begin_if_both(self) -> Effects:
        if self._is_opened and self._is_attached:
            self.state = ReplayState.REPLAY
            self.last_progress_ms = self._heard_ms = self._now_ms
        return []

    def _turn_in_init(self, _event: e.Turn) -> Effects:
        if self._now_ms < self._due_ms:
            return []
        return self._over(ReplayEndReason.ERROR, ErrorCode.REQUEST_TIMED_OUT, "no subscriber attached in time")

    # ---- REPLAY

    def _credited(self, event: e.Credited) -> Effects:
        if self._credit.give(event.credit_bytes):
            self.last_progress_ms = self._now_ms  # time without credit does not count as stalled
        return []

    def _turn(self, event: e.Turn) -> Effects:
        tip, was_behind = self._tip(event.facts, event.counter), self.is_behind
        self.tip = tip.bound
        if not was_behind:
            self._behind_since_ms = self._now_ms
        if self._end is not None and event.facts.end < self._end:
            self._end, self._held_until = event.facts.end, 0  # the log was cut below the former end
        if self._reading is not None or self._is_sending:
            return self._stalled_if_due()
        if self._left == 0 or (self._end is not None and self.position >= self._end):
            return self._over(ReplayEndReason.LIMIT_REACHED)
        damage = event.facts.damage
        if damage is not None and self.position >= damage.offset:
            failed = e.ReadFailed(ErrorCode.CORRUPT_MESSAGE, str(CorruptBatch(*damage)), int(damage.segment.stem))
            effects = self._ended(failed)
        elif self.position < tip.bound and self._held_until <= tip.bound:
            effects = self._next_block(tip, tip.bound if damage is None else min(tip.bound, damage.offset))
        elif self._ends_at(tip, is_live=event.is_live):
            effects = self._over(ReplayEndReason.LIMIT_REACHED)
        else:
            effects = self._heartbeat_if_due(renew=True)
        return effects

    def _tip(self, facts: LogOffsets, counter: int | None) -> Tip:
        if counter is not None:
            self._last_counter = counter
        return tip_of(facts, self.plan.bound, counter, self._last_counter)

    def _ends_at(self, tip: Tip, *, is_live: bool) -> bool:
        """Whether no more records can come: the bound is frozen, or a bounded replay is at the end of a stopped log."""
        if tip.is_frozen and (self._held_until > tip.bound or self.position >= tip.bound):
            return True
        is_at_end = self.position >= tip.recorded or self._held_until > tip.recorded
        return not is_live and is_at_end and self.wants_liveness

    def _next_block(self, tip: Tip, readable: int) -> Effects:
        budget_bytes = self._credit.block_bytes(self._settings.block_bytes, self._now_ms)
        if not budget_bytes:
            # Without credit it renews no lease, so that an idle subscriber does not keep records on the disk.
            return self._heartbeat_if_due(renew=self.credit > 0)
        limit = readable if self._end is None else min(readable, self._end)
        self._reading_bound = tip.bound
        self._reading = e.ReadBlock(self.position, limit, budget_bytes)
        self._under_way_since_ms = self._now_ms
        return [self._reading]

    def _heartbeat_if_due(self, *, renew: bool) -> Effects:
        if self._now_ms - self._heard_ms < self._settings.heartbeat_ms:
            return []
        self._heard_ms = self._now_ms
        beat = e.Heartbeat(self.position, self.tip)
        return [e.RenewLease(self.position), beat] if renew else [beat]

    def _stalled_if_due(self) -> Effects:
        waited_ms = self._now_ms - max(self.last_progress_ms, self._under_way_since_ms)
        if waited_ms < self._settings.liveness_timeout_ms:
            return []
        what = "read" if self._reading is not None else "sent"
        return self._over(ReplayEndReason.ERROR, ErrorCode.STALLED, f"nothing could be {what} for {waited_ms} ms")

    def _block_read(self, event: e.BlockRead) -> Effects:
        reading, self._reading = self._reading, None
        if reading is None:
            raise impossible(self.state, type(event))
        part = clip(
            event.spans,
            position=self.position,
            end=self._end,
            left=self._left,
            bound=self._reading_bound,
            budget_bytes=reading.max_bytes,
        )
        self._held_until = part.held_until or 0
        self.position = part.end
        if not part.spans:
            return []  # the batch waits for the bound
        self._is_sending, self._under_way_since_ms = True, self._now_ms
        self._credit.spend(part.size_bytes, self._now_ms)
        self.bytes_sent += part.size_bytes
        self.records_sent += part.records
        if self._left is not None:
            self._left -= part.records
        return [e.SendBlock(part.start, part.end, part.spans, part.size_bytes, self.tip)]

    def _sent(self, event: e.BlockSent) -> Effects:
        if not self._is_sending:
            raise impossible(self.state, type(event))
        self._is_sending = False
        self.last_progress_ms = self._heard_ms = self._now_ms
        return [e.RenewLease(self.position)]

    # ---- the end

    def _ended(self, event: e.Event) -> Effects:
        match event:
            case e.ReadFailed(code, why, segment):
                return self._over(ReplayEndReason.ERROR, code, why, segment=segment)
            case e.LeaseLost(why):
                return self._over(ReplayEndReason.LEASE_BROKEN, ErrorCode.LEASE_BROKEN, why)
            case e.Deleted():
                code, why = ErrorCode.RECORDING_DELETED, "the recording was deleted"
                return self._over(ReplayEndReason.RECORDING_DELETED, code, why)
            case _:
                return self._over(ReplayEndReason.STOPPED)

    def _truncated(self, event: e.Truncated) -> Effects:
        if event.offset < self.position:
            return self._cut_at(event.offset, event.leader_epoch)
        if self._end is not None:
            self._end = min(self._end, event.offset)  # records above the cut are gone
        self._held_until = 0
        return []

    def _cut_at(self, offset: int, leader_epoch: int) -> Effects:
        why = f"the log was cut at offset {offset}"
        return self._over(
            ReplayEndReason.TRUNCATED, ErrorCode.TRUNCATED, why, cut_offset=offset, leader_epoch=leader_epoch
        )

    def _subscriber_gone(self, _event: e.SubscriberGone) -> Effects:
        if self.end_reason is None:
            self.end_reason = ReplayEndReason.SUBSCRIBER_GONE
        return self._done()

    def _over(self, reason: ReplayEndReason, code: ErrorCode = ErrorCode.NONE, why: str = "", **more: Any) -> Effects:
        self.end_reason = reason
        if not self._is_attached:
            return self._done()
        self.state = ReplayState.INACTIVE
        self._due_ms = self._now_ms + self._settings.liveness_timeout_ms
        return [e.ReleaseLease(), e.SendEnd(reason, self.position, code, why, **more)]

    def _done(self) -> Effects:
        return [e.ReleaseLease(), *self._forget()]

    def _forget(self) -> Effects:
        self.state = ReplayState.DONE
        return [e.Forget()]

    _ENDS: ClassVar[Mapping[type[e.Event], Any]] = {
        e.Stop: _ended,
        e.Deleted: _ended,
        e.Truncated: _truncated,
        e.LeaseLost: _ended,
        e.SubscriberGone: _subscriber_gone,
    }
    HANDLERS: ClassVar[Mapping[ReplayState, Mapping[type[e.Event], Any]]] = {
        ReplayState.INIT: {
            **_ENDS,
            e.SegmentOpened: _opened,
            e.OpenFailed: lambda self, event: self._refuse(event.code, event.why, event.segment),
            e.SubscriberAttached: _attached,
            e.Credited: _credited,
            e.Turn: _turn_in_init,
        },
        ReplayState.REPLAY: {
            **_ENDS,
            e.Credited: _credited,
            e.Turn: _turn,
            e.BlockRead: _block_read,
            e.ReadFailed: _ended,
            e.BlockSent: _sent,
        },
        ReplayState.INACTIVE: {
            e.Turn: lambda self, _event: self._forget() if self._now_ms >= self._due_ms else [],
            e.SubscriberGone: _subscriber_gone,
            e.EndSent: lambda self, _event: self._forget(),
        },
        ReplayState.DONE: {},
    }
    """Events without a handler need no action; every cell of the table that may change the state has one."""


assert all(
    ReplaySession.HANDLERS[state].keys() >= {kind for kind, cell in row.items() if cell} for state, row in NEXT.items()
)


class SessionCounters(NamedTuple):
    """The counters of one session. lag: offsets between what was sent and the tip. idle_ms: since the last message.

    credit: bytes that its subscriber accepts. stalled_ms: as `ReplaySession.stalled_ms`.
    """

    session_id: int
    recording: int | str
    state: ReplayState
    position: int
    bytes_sent: int
    records_sent: int
    lag: int
    idle_ms: int
    credit: int
    stalled_ms: int


class ReplayCounters(NamedTuple):
    """The counters of a node since its start. bytes_sent, records_sent: ended sessions included.

    refused: by code; ended: sessions by end reason.
    """

    sessions: tuple[SessionCounters, ...]
    sessions_max: int
    bytes_sent: int
    records_sent: int
    refused: Mapping[ErrorCode, int]
    ended: Mapping[ReplayEndReason, int]

    @property
    def lag_max(self) -> int:
        """The lag of the session that is furthest behind."""
        return max((session.lag for session in self.sessions), default=0)

    @property
    def stalled_ms(self) -> int:
        """The longest time that a session has had records to send and sent nothing."""
        return max((session.stalled_ms for session in self.sessions), default=0)


_SERIAL_END = 1 << 31
_RANDOM_BITS = 32


class ReplaySessions:
    """The sessions that are not DONE. Not thread-safe: use it in one loop, or under a lock.

    random_bits(n): returns n random bits. refused: counts refusals by code.
    """

    def __init__(self, settings: ReplaySettings, random_bits: Callable[[int], int]) -> None:
        self.settings = settings
        self.refused: Counter[ErrorCode] = Counter()
        self._ended: Counter[ReplayEndReason] = Counter()
        self._ended_bytes = self._ended_records = 0
        self._random_bits = random_bits
        self._sessions: dict[int, ReplaySession] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ReplaySession]:
        return iter(tuple(self._sessions.values()))

    def start(  # noqa: PLR0913 - all that a request is judged by
        self,
        request: ReplayRequest,
        facts: LogOffsets | None,
        first_at: Callable[[int], int | None],
        now_ms: int,
        *,
        is_live: bool = True,
        counters: frozenset[str] = frozenset(),
        is_allowed: bool = True,
        identity: str = "",
    ) -> ReplaySession:
        """Make a session in INIT, which takes a slot; the caller opens its segment next. Arguments as of `plan_replay`.

        identity: whose slot it is. Raises ReplayRefused, and counts it.
        """
        most = self.settings.max_sessions
        is_full = len(self._sessions) >= self.settings.sessions_in_sum
        active = most if is_full else sum(one.identity == identity for one in self._sessions.values())
        node = Node(is_live, active, most, counters, is_allowed)
        try:
            plan = plan_replay(request, facts, first_at, node)
        except ReplayRefused as refusal:
            self.refused[refusal.code] += 1
            raise
        self._serial = self._serial % (_SERIAL_END - 1) + 1
        session_id = self._serial << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        session = self._sessions[session_id] = ReplaySession(session_id, plan, self.settings, now_ms)
        session.identity = identity
        return session

    def handle(self, session: ReplaySession, event: e.Event, now_ms: int) -> Effects:
        """Give a session an event; its slot is free once it is DONE."""
        effects = session.handle(event, now_ms)
        for effect in effects:
            if isinstance(effect, e.Forget):
                self._sessions.pop(session.id, None)
                self._ended_bytes += session.bytes_sent
                self._ended_records += session.records_sent
                if session.end_reason is not None:
                    self._ended[session.end_reason] += 1
            elif isinstance(effect, e.Refuse):
                self.refused[effect.code] += 1
        return effects

    def stop(self, session_id: int, now_ms: int) -> list[tuple[ReplaySession, Effects]]:
        """End one session; unknown ids, and those that are over, are fine."""
        session = self._sessions.get(session_id)
        return [] if session is None else [(session, self.handle(session, e.Stop(), now_ms))]

    def notify_all(self, recording: int | str, event: e.Event, now_ms: int) -> list[tuple[ReplaySession, Effects]]:
        """Give every session of a recording an event: Stop, Deleted, Truncated, LeaseLost."""
        chosen = [session for session in self if session.plan.recording == recording]
        return [(session, self.handle(session, event, now_ms)) for session in chosen]

    def counters(self, now_ms: int) -> ReplayCounters:
        """All counters at this moment. For any thread: a session that ends meanwhile may be counted twice."""
        sessions = tuple(
            SessionCounters(
                one.id,
                one.plan.recording,
                one.state,
                one.position,
                one.bytes_sent,
                one.records_sent,
                one.lag,
                max(0, now_ms - one.last_progress_ms),
                one.credit,
                one.stalled_ms(now_ms),
            )
            for one in self
        )
        return ReplayCounters(
            sessions=sessions,
            sessions_max=self.settings.sessions_in_sum,
            bytes_sent=self._ended_bytes + sum(one.bytes_sent for one in sessions),
            records_sent=self._ended_records + sum(one.records_sent for one in sessions),
            refused=dict(self.refused),
            ended=dict(self._ended),
        )
