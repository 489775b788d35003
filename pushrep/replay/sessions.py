"""ReplaySessions: all sessions of one node or client: slots, ids, what was refused, and counters. Sans-IO.

    session id, 64 bits    | serial, rising, 32 | random, 32 |      nobody guesses another's, none comes twice

The shell says whose turn it is: a local session steps when its reader asks, a node's take one block each in a queue
(pushrep/replicate/replay_server.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pushrep.replay.errors import ReplayRefused
from pushrep.replay.events import Event, Forget, Refuse, ReplayState, Stop
from pushrep.replay.limits import LogSnapshot, ReplayRequest, ReplaySettings
from pushrep.replay.plan import Node, plan_replay
from pushrep.replay.session import Effects, ReplaySession
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason

_SERIAL_END = 1 << 31
_RANDOM_BITS = 32


class ReplaySessions:
    """The sessions that are not DONE. Not thread-safe: one loop, or a lock around it.

    `random_bits(n)` gives n random bits. `refused` counts refusals by code.
    """

    def __init__(self, settings: ReplaySettings, random_bits: Callable[[int], int]) -> None:
        self.settings = settings
        self.refused: Counter[ErrorCode] = Counter()
        self._random_bits = random_bits
        self._sessions: dict[int, ReplaySession] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ReplaySession]:
        return iter(tuple(self._sessions.values()))

    def get(self, session_id: int) -> ReplaySession | None:
        """The session of this id, all 64 bits of it; None once it is DONE."""
        return self._sessions.get(session_id)

    def start(  # noqa: PLR0913 - all that a request is judged by
        self,
        request: ReplayRequest,
        facts: LogSnapshot | None,
        first_at: Callable[[int], int | None],
        now_ms: int,
        *,
        counters: frozenset[str] = frozenset(),
        is_allowed: bool = True,
    ) -> ReplaySession:
        """A session in INIT, which has its slot; open its segment next. Arguments as `plan_replay`.

        Raises ReplayRefused, and counts it.
        """
        node = Node(len(self._sessions), self.settings.max_sessions, counters, is_allowed)
        try:
            plan = plan_replay(request, facts, first_at, node)
        except ReplayRefused as refusal:
            self.refused[refusal.code] += 1
            raise
        self._serial = self._serial % (_SERIAL_END - 1) + 1
        session_id = self._serial << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        session = self._sessions[session_id] = ReplaySession(session_id, plan, self.settings, now_ms)
        return session

    def handle(self, session: ReplaySession, event: Event, now_ms: int) -> Effects:
        """Give it an event; a session that is over gives its slot back."""
        effects = session.handle(event, now_ms)
        for effect in effects:
            if isinstance(effect, Forget):
                self._sessions.pop(session.id, None)
            elif isinstance(effect, Refuse):
                self.refused[effect.code] += 1
        return effects

    def stop(self, session_id: int, now_ms: int) -> list[tuple[ReplaySession, Effects]]:
        """End one session; unknown ids, and those that are over, are fine."""
        session = self._sessions.get(session_id)
        return [] if session is None else [(session, self.handle(session, Stop(), now_ms))]

    def notify_all(self, recording: int | str, event: Event, now_ms: int) -> list[tuple[ReplaySession, Effects]]:
        """An event for every session of a recording: Stop, Deleted, Truncated, LeaseBroken."""
        chosen = [session for session in self if session.plan.recording == recording]
        return [(session, self.handle(session, event, now_ms)) for session in chosen]


class SessionCounters(NamedTuple):
    """One session. lag: offsets between what was sent and what could be. idle_ms: since anything was sent last.

    credit: bytes that its subscriber is ready to take.
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


class ReplayCounters(NamedTuple):
    """All of a node. bytes_sent, records_sent: since it started, of sessions that are over, too.

    refused: by code, since it started; ended: sessions by the reason of their end.
    """

    sessions: tuple[SessionCounters, ...]
    sessions_max: int
    bytes_sent: int
    records_sent: int
    refused: Mapping[ErrorCode, int]
    ended: Mapping[ReplayEndReason, int]

    @property
    def sessions_active(self) -> int:
        """How many there are."""
        return len(self.sessions)

    @property
    def lag_max(self) -> int:
        """Of the session that is furthest behind."""
        return max((session.lag for session in self.sessions), default=0)

    @property
    def stalled_ms(self) -> int:
        """The longest time that a session which is behind has sent nothing."""
        return max((session.idle_ms for session in self.sessions if session.lag), default=0)


class Totals:
    """Adds up what sessions that are over have done."""

    def __init__(self) -> None:
        self._bytes = self._records = 0
        self._ended: Counter[ReplayEndReason] = Counter()

    def ended(self, session: ReplaySession) -> None:
        """It is over."""
        self._bytes += session.bytes_sent
        self._records += session.records_sent
        if session.end_reason is not None:
            self._ended[session.end_reason] += 1

    def snapshot(self, many: ReplaySessions, now_ms: int) -> ReplayCounters:
        """Everything, now. In any thread: a session that ends meanwhile may be counted twice for a moment."""
        sessions = tuple(_counted(session, now_ms) for session in many)
        return ReplayCounters(
            sessions=sessions,
            sessions_max=many.settings.max_sessions,
            bytes_sent=self._bytes + sum(one.bytes_sent for one in sessions),
            records_sent=self._records + sum(one.records_sent for one in sessions),
            refused=dict(many.refused),
            ended=dict(self._ended),
        )


def _counted(session: ReplaySession, now_ms: int) -> SessionCounters:
    return SessionCounters(
        session.id,
        session.plan.recording,
        session.state,
        session.position,
        session.bytes_sent,
        session.records_sent,
        session.lag,
        max(0, now_ms - session.last_progress_ms),
        session.credit,
    )
