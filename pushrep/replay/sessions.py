"""ReplaySessions: all sessions of one node or client: slots, ids, what was refused. Sans-IO.

    session id, 64 bits    | serial, rising, 32 | random, 32 |      nobody guesses another's, none comes twice

Whose turn it is says the shell: a local session steps when its reader asks, a node's take one block each in a queue
(pushrep/replicate/replay_server.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator

from pushrep.replay.errors import ReplayRefused
from pushrep.replay.events import Event, Forget, Refuse, Stop
from pushrep.replay.model import LogSnapshot, ReplayRequest, ReplaySettings
from pushrep.replay.plan import Node, plan_replay
from pushrep.replay.session import Effects, ReplaySession
from pushrep.wire.error_codes import ErrorCode

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
