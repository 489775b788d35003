"""What replays have done, as plain values for whoever exports them."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pushrep.replay.session import ReplaySession
from pushrep.replay.sessions import ReplaySessions
from pushrep.replay.states import ReplayState
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason


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
