"""Back-pressure: how many bytes of records may wait in memory, over all partitions.

Bytes are taken in slices by a partition's open batch and given back when the batch was written or failed, so a
record costs no call here while its slice lasts.
"""

import threading
from collections.abc import Callable

from pushrep.env import Clock


class Budget:
    """`limit` bytes to share. Thread-safe."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._free = limit
        self._lock = threading.Lock()  # not the condition's own `with`: Ctrl-C could leave that locked
        self._changed = threading.Condition(self._lock)
        self._clock = clock
        self._calls: list[Callable[[], object]] = []

    @property
    def taken(self) -> int:
        """Bytes in use now."""
        return self.limit - self._free

    def try_take(self, wanted: int, at_least: int) -> int:
        """`wanted` bytes, or what is left if that is `at_least`; else 0. Never waits."""
        with self._lock:
            taken = min(wanted, self._free)
            if taken < at_least:
                return 0
            self._free -= taken
            return taken

    def give(self, size: int) -> None:
        """Bytes that no longer wait in memory."""
        if size:
            with self._lock:
                self._free += size
                self._changed.notify_all()
                calls, self._calls = self._calls, []
            for call in calls:
                call()

    def when_given(self, call: Callable[[], object]) -> None:
        """`call()` once, when bytes are given back next, in whichever thread does; it must neither wait nor raise."""
        with self._lock:
            self._calls.append(call)

    def wait_for(self, size: int, deadline_ms: int) -> bool:
        """Wait until `size` bytes were free, at most to `deadline_ms` of the monotonic clock; True if they were."""
        with self._lock:
            while self._free < size:
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    return False
                self._changed.wait(left_ms / 1000)
            return True
