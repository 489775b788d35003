"""How a running reader asks its store: for a bounded time, and rarely while nobody answers, so that reading goes on.

    answers    asked as often as the reader likes, each time within 10 s; a mere look, which it takes all the time, 3 s
    away       logged once; asked again after 1 s, then after 2, 4 ... 60 s; new startpoints wait
    back       logged once; the reader looks at all that there is

A partition that is to start has to know where, so at a start nobody asks in this way.
"""

import logging
import math
from collections.abc import Callable
from typing import TypeVar

from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.startpoints.errors import NotWritten, StoreBusy, StoreUnavailable
from pushrep.startpoints.store import StartpointStore

_LOG = logging.getLogger(__name__)
AWAY = (StoreUnavailable, StoreBusy, NotWritten)
"""What a store raises that can't be reached now, and may be later."""
ASK_WITHIN_S = 10.0
LOOK_WITHIN_S = 3.0
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0

_Answer = TypeVar("_Answer")


class NotNow(Exception):
    """The store did not answer, now or a moment ago; whoever asked goes on without."""


class Looking:
    """One reader's questions to one store, in turns that begin with a look. For one thread at a time."""

    def __init__(self, store: StartpointStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._clock = store, clock
        self._pause_s, self._next_s = 0.0, -math.inf
        self._since_ms, self._asked, self._failed = 0, False, False
        self.away: Exception | None = None
        """Why a question was not answered, until a whole turn is: who tells may not take, and a look is a little."""

    def poll_size(self) -> int:
        """The store's `size_bytes`, within 3 s: a turn begins. Raises NotNow."""
        if self.away is not None and self._asked and not self._failed:
            _LOG.info("%s answers again", self._store.place)
            self.away, self._pause_s = None, 0.0
        self._asked = self._failed = False
        return self._answer(self._store.size_bytes, LOOK_WITHIN_S)

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """What it returns, within 10 s. Raises NotNow, and what else the question raises."""
        answer = self._answer(question, ASK_WITHIN_S)
        self._asked = True
        return answer

    def words(self) -> str | None:
        """For people: since when nobody answers, and why; None while somebody does."""
        if self.away is None:
            return None
        since_s = (self._clock.monotonic_ms() - self._since_ms) / 1000
        return f"no answer for {since_s:.0f} s, new startpoints wait: {self.away}"

    def _answer(self, question: Callable[[], _Answer], within_s: float) -> _Answer:
        if self._now_s() < self._next_s:
            self._failed = True
            raise NotNow
        try:
            with self._store.within(within_s):
                return question()
        except AWAY as error:
            self._on_failure(error)
            raise NotNow from error

    def _on_failure(self, error: Exception) -> None:
        if self.away is None:
            self._since_ms = self._clock.monotonic_ms()
            _LOG.warning("%s; reading goes on, and new startpoints wait until it answers", error)
        self.away, self._failed = error, True
        self._pause_s = min(PAUSE_MAX_S, max(PAUSE_S, 2 * self._pause_s))
        self._next_s = self._now_s() + self._pause_s

    def _now_s(self) -> float:
        return self._clock.monotonic_ms() / 1000
