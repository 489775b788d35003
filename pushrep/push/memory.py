"""What is kept in memory for replicas that have not acknowledged it: a cache over the log, counted and bounded.

    append ──▶ Buffered(base, end, parts, users=2) ──▶ queue of replica 1, queue of replica 2; the bytes are there once
                          │ the last user releases it, or the oldest has to go for a newer one
                          ▼
                     parts = None        a replica that still wants it reads the log

Queued and in flight both count. Eviction takes the oldest of all partitions first: what is longest unacknowledged
belongs to the slowest replica, and that one reads the log anyway.
"""

import threading
from collections import deque

from pushrep.protocol.values import Buffer

_SWEEP_MIN = 1024


class Buffered:
    """The records [base_offset, end_offset) of one append; `parts` is None once they are given up."""

    __slots__ = ("base_offset", "end_offset", "parts", "size_bytes", "users")

    def __init__(self, base_offset: int, end_offset: int, parts: tuple[Buffer, ...], users: int) -> None:
        self.base_offset, self.end_offset = base_offset, end_offset
        self.parts: tuple[Buffer, ...] | None = parts
        self.size_bytes = sum(map(len, parts))
        self.users = users


class MemoryTracker:
    """The bytes of everything that is buffered, at most `limit_bytes`. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.evicted_bytes = 0
        """Since the beginning: what had to be read from the log again, if it still was wanted."""
        self._oldest: deque[Buffered] = deque()
        self._live = 0
        self._lock = threading.Lock()

    def hold(self, base_offset: int, end_offset: int, parts: tuple[Buffer, ...], users: int) -> Buffered | None:
        """Keep these records for so many users; None if they are larger than everything that may be kept."""
        entry = Buffered(base_offset, end_offset, parts, users)
        with self._lock:
            if entry.size_bytes > self.limit_bytes:
                return None
            while self.used_bytes + entry.size_bytes > self.limit_bytes:
                self._evict_oldest()
            self.used_bytes += entry.size_bytes
            self._live += 1
            self._oldest.append(entry)
            if len(self._oldest) > _SWEEP_MIN + 2 * self._live:
                self._oldest = deque(held for held in self._oldest if held.parts is not None)
        return entry

    def release(self, entry: Buffered) -> None:
        """One user needs it no more."""
        with self._lock:
            entry.users -= 1
            if entry.users == 0 and entry.parts is not None:
                self._drop(entry)

    def _evict_oldest(self) -> None:
        entry = self._oldest.popleft()
        if entry.parts is not None:
            self.evicted_bytes += entry.size_bytes
            self._drop(entry)

    def _drop(self, entry: Buffered) -> None:
        entry.parts = None
        self.used_bytes -= entry.size_bytes
        self._live -= 1
