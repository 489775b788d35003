"""Calls that are made again: one policy for brokers, locks, databases and connections, and the pauses between.

    RetryPolicy   which errors are retriable, for how long or how often it is tried, and the Backoff between
    Backoff       pauses that double up to the longest, at random: many that lost one broker must not all come at once
    ask           asks a broker by such a policy:
        a transient failure (no coordinator yet, it moved, no connection ...) asked again until the time is over
        a topic that is not there                                             3 s: not every broker knows a new one yet
        anything else                                                         raised at once

It stands here because every package may import filtering. It waits by the process's own monotonic clock, since no
simulation drives a broker, a lock or a database. A caller that must be woken earlier gives `call` a `sleep` of its own.
A caller that must not block takes only the length of a pause (`Backoff.pause_s`), and waits itself;
docs/ARCHITECTURE.md names these callers.
"""

import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception

TIMEOUT_S = 60.0
"""How long brokers are asked altogether: as long as Kafka's own clients do (`default.api.timeout.ms`)."""
APPEARS_WITHIN_S = 3.0
"""How long a topic that is not there is asked for: it may just have been created."""
_DOUBLINGS_MAX = 30
_Answer = TypeVar("_Answer")
JITTER = random.Random()  # noqa: S311 - spreads load, keeps no secret
"""The random generator of all pauses, for any thread. The service may have seeded `random`'s own generator."""


class Backoff(NamedTuple):
    """How long to wait after failures in a row: `first_s` after the first, doubled with each more, at most `longest_s`.

    The pause is drawn at random between `least` (0 to 1) of that and all of it.
    """

    first_s: float
    longest_s: float
    least: float = 0.0

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row, drawn anew each time; 0 for none."""
        if failures < 1:
            return 0.0
        most_s = min(self.longest_s, self.first_s * (1 << min(failures - 1, _DOUBLINGS_MAX)))
        return JITTER.uniform(self.least * most_s, most_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a call that failed is made again.

    is_retriable: whether the call is made again after this error; if not, it is raised at once. within_s: seconds after
    the first call in which others may begin, or a function that says so for the last error; None: for ever. attempts:
    how many calls at most; None: any number. Where no other call may begin, the last error is raised.
    """

    is_retriable: Callable[[BaseException], bool]
    backoff: Backoff
    within_s: Callable[[BaseException], float] | float | None = None
    attempts: int | None = None

    def call(
        self,
        question: Callable[[], _Answer],
        *,
        sleep: Callable[[float], object] = time.sleep,
        is_stopped: Callable[[], bool] = lambda: False,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> _Answer:
        """What `question` returns. Blocks.

        is_stopped: asked after each retriable failure; if so, that error is raised. on_failure: called with each
        retriable error.
        """

        def notify(state: RetryCallState) -> None:
            error = None if state.outcome is None else state.outcome.exception()
            if on_failure is not None and error is not None:
                on_failure(error)

        settings = self._settings()
        settings["stop"] = lambda state: is_stopped() or self._is_enough(state)

        def pause(seconds: float) -> None:
            sleep(seconds)

        return Retrying(**settings, sleep=pause, after=notify)(question)

    async def call_async(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """As `call`, in an event loop."""

        async def called() -> _Answer:  # what tenacity awaits has to be a coroutine function
            return await question()

        return await AsyncRetrying(**self._settings())(called)

    def _settings(self) -> dict[str, Any]:
        return {
            "retry": retry_if_exception(self.is_retriable),
            "wait": lambda state: self.backoff.pause_s(state.attempt_number),
            "stop": self._is_enough,
            "reraise": True,
        }

    def _is_enough(self, state: RetryCallState) -> bool:
        if self.attempts is not None and state.attempt_number >= self.attempts:
            return True
        error = None if state.outcome is None else state.outcome.exception()
        if self.within_s is None or error is None:
            return False
        allowed_s = self.within_s(error) if callable(self.within_s) else self.within_s
        return (state.seconds_since_start or 0.0) + (state.upcoming_sleep or 0.0) >= allowed_s


class Failure(Enum):
    """What the failure of a call means for the next one."""

    TRANSIENT = auto()
    """The next call may succeed."""
    NOT_THERE = auto()
    """As TRANSIENT, for APPEARS_WITHIN_S."""
    PERMANENT = auto()


Judge = Callable[[BaseException], Failure]


_ASK_BACKOFF = Backoff(first_s=0.02, longest_s=1.0)


def ask(question: Callable[[float], _Answer], judge: Judge, timeout_s: float = TIMEOUT_S) -> _Answer:
    """What `question` returns, called with the seconds that are left. Raises its last failure.

    Blocks up to `timeout_s`, if `question` keeps to the time it is given.
    """
    deadline_s = time.monotonic() + timeout_s
    return _broker_policy(judge, timeout_s).call(lambda: question(max(0.001, deadline_s - time.monotonic())))


async def ask_async(question: Callable[[], Awaitable[_Answer]], judge: Judge, timeout_s: float = TIMEOUT_S) -> _Answer:
    """As `ask`, in an event loop."""
    return await _broker_policy(judge, timeout_s).call_async(question)


def _broker_policy(judge: Judge, timeout_s: float) -> RetryPolicy:
    def within_s(error: BaseException) -> float:
        return min(APPEARS_WITHIN_S, timeout_s) if judge(error) is Failure.NOT_THERE else timeout_s

    return RetryPolicy(
        is_retriable=lambda error: judge(error) is not Failure.PERMANENT, backoff=_ASK_BACKOFF, within_s=within_s
    )


def ask_in_background(question: Callable[[], _Answer], name: str) -> "Future[_Answer]":
    """What `question` returns or raises; it runs once, in a daemon thread called `name`."""
    answer: Future[_Answer] = Future()
    answer.set_running_or_notify_cancel()  # the thread can't be stopped

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - the caller that asks for the answer raises it
            answer.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return answer
