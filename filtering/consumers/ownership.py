"""Whether a member of a group holds a partition, by its coordinator's word: asked beside the reader, who does not wait.

    is_held ─▶ asked, and answered within 0.5 s ─▶ yes, no          for all partitions, for a second: one look's time
            ─▶ asked, no answer yet ─▶ no; the reader goes on       a later call is given the answer

A coordinator that is away takes the 5 s of a question, and a service that hands out no token the client's own 10 s. A
look comes every second: a reader who waited for each answer would hardly read.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeAlias

Held: TypeAlias = frozenset[tuple[str, int]]
"""Topics and numbers of partitions."""
ASK_WITHIN_S = 5.0
"""For a question, which nobody waits for."""
_WAIT_S = 0.5
_SHARED_S = 1.0
_COUNTS_S = 60.0
"""The rarest looks of a reader are as far apart. What was true so long ago may be so no more: who then claims what is
another's is told so by its next poll, and the other one claims it again."""


class OwnershipCheck:
    """The questions of one client; one is under way at a time. For one thread at a time.

    ask: begins to ask for a member id; what the answer raises, `is_held` raises.
    """

    def __init__(
        self, ask: Callable[[str], "Future[Held]"], wait_s: float = _WAIT_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._wait_s, self._now_s = ask, wait_s, now_s
        self._asked: _Question | None = None

    def is_held(self, member: str, topic: str, partition: int) -> bool:
        """Whether this member has it now; False while that is not known. `member`: its id, empty if it has none."""
        asked = self._asked
        if asked is None or asked.member != member or asked.is_over(self._now_s()):
            if not member:
                return False
            asked = self._asked = _Question(member, self._ask(member), self._now_s)
            wait([asked.answer], self._wait_s)
        if not asked.answer.done():
            return False
        asked.is_told()
        return (topic, partition) in asked.answer.result()


class _Question:
    """From when it is asked until its answer counts no more."""

    def __init__(self, member: str, answer: "Future[Held]", now_s: Callable[[], float]) -> None:
        self.member, self.answer, self._now_s = member, answer, now_s
        self._arrived_s: float | None = None
        self._told_s: float | None = None
        answer.add_done_callback(self._arrives)

    def is_over(self, now_s: float) -> bool:
        """Whether to ask again."""
        if self._told_s is not None:
            return now_s > self._told_s + _SHARED_S
        return self._arrived_s is not None and now_s > self._arrived_s + _COUNTS_S

    def is_told(self) -> None:
        """The first who is given the answer begins the time in which others are given the same."""
        if self._told_s is None:
            self._told_s = self._now_s()

    def _arrives(self, _: object) -> None:
        self._arrived_s = self._now_s()
