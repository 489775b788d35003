"""Asking brokers again: what fails for a moment while coordinators and leaders move, or a topic has just been made.

    a passing failure (no coordinator yet, it moved, no connection ...)   asked again until the time is over
    a topic that is not there                                             for 3 s: not every broker knows a new one yet
    anything else                                                         raised at once

For both clients; each says with its own errors what passes: `confluent_asking`, `aiokafka.KafkaError.retriable`.
"""

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from enum import Enum, auto
from threading import Thread
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, wait_random_exponential

TIMEOUT_S = 30.0
APPEARS_WITHIN_S = 3.0
_Answer = TypeVar("_Answer")


class Failure(Enum):
    """What a failed call tells about the next one."""

    PASSES = auto()
    NOT_THERE = auto()
    STAYS = auto()


Judge = Callable[[BaseException], Failure]


def ask(question: Callable[[float], _Answer], judge: Judge, timeout_s: float = TIMEOUT_S) -> _Answer:
    """What `question` returns, called with the seconds that are left. Raises its last failure.

    Blocks up to `timeout_s`, if `question` keeps to the time it is given.
    """
    deadline_s = time.monotonic() + timeout_s
    retrying = Retrying(
        retry=retry_if_exception(lambda error: judge(error) is not Failure.STAYS),
        stop=_Enough(judge, timeout_s),
        wait=wait_random_exponential(multiplier=0.02, max=1.0),
        reraise=True,
    )
    return retrying(lambda: question(max(0.001, deadline_s - time.monotonic())))


async def ask_async(question: Callable[[], Awaitable[_Answer]], judge: Judge, timeout_s: float = TIMEOUT_S) -> _Answer:
    """As `ask`, in an event loop."""
    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: judge(error) is not Failure.STAYS),
        stop=_Enough(judge, timeout_s),
        wait=wait_random_exponential(multiplier=0.02, max=1.0),
        reraise=True,
    )

    async def called() -> _Answer:  # what tenacity awaits has to be a coroutine function
        return await question()

    return await retrying(called)


def ask_aside(question: Callable[[], _Answer], name: str) -> "Future[_Answer]":
    """What `question` returns or raises, in a thread of that name, which holds up no exit."""
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the answer raises it
            answer.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return answer


class _Enough:
    """Tenacity's question after every failure: is its time over?"""

    def __init__(self, judge: Judge, timeout_s: float) -> None:
        self._judge, self._timeout_s = judge, timeout_s

    def __call__(self, state: RetryCallState) -> bool:
        error = None if state.outcome is None else state.outcome.exception()
        is_missing = error is not None and self._judge(error) is Failure.NOT_THERE
        allowed_s = min(APPEARS_WITHIN_S, self._timeout_s) if is_missing else self._timeout_s
        return (state.seconds_since_start or 0.0) + (state.upcoming_sleep or 0.0) >= allowed_s
