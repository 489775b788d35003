"""How long a store may hold up whoever asks it: each step in its own time, and all of them in what the caller gives."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeBudget:
    """The time of each thread by itself."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._own = threading.local()

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """What this thread asks inside takes so long altogether, or less."""
        before = self._until_s
        self._own.until_s = min(before, self._now_s() + timeout_s)
        try:
            yield
        finally:
            self._own.until_s = before

    def left_s(self, most_s: float) -> float:
        """How long a step that would take `most_s` may take now."""
        return max(0.0, min(most_s, self._until_s - self._now_s()))

    @property
    def _until_s(self) -> float:
        return float(getattr(self._own, "until_s", math.inf))
