"""Fetch credit: how many bytes a replay may send now, counted by both sides. No socket, no clock.

    reader (remote.py)                                             session, at the node (session.py)
    FetchWindow(4 MiB)        ── Attach: credit_bytes 4 MiB ──▶    FetchCredit.give(4 MiB)
    blocks come          ◀── ReplayData ── of at most block_bytes, and no more than the credit; spend(bytes)
    taken(bytes)  ── Credit: bytes, a quarter of the window each ──▶    FetchCredit.give(bytes)

A block is no larger than the credit, except that a batch is never split: a larger first batch is a block by itself and
overdraws the credit. A replay with a rate limit gets small blocks and pauses between them.
"""

_BLOCKS_PER_S_LIMITED = 10


class FetchCredit:
    """What one session may send. max_bytes_per_s: the request's limit. Times are of one monotonic clock, in ms."""

    def __init__(self, max_bytes_per_s: int | None, now_ms: int) -> None:
        self.left_bytes = 0
        """Bytes that the subscriber accepts; below 0 after a batch larger than the credit."""
        self.send_from_ms = now_ms
        """Nothing is sent before this time, to keep the rate limit."""
        self._max_bytes_per_s = max_bytes_per_s

    def give(self, credit_bytes: int) -> bool:
        """The subscriber accepts so much more. Returns whether it accepted nothing before."""
        was_empty = self.left_bytes <= 0
        self.left_bytes += credit_bytes
        return was_empty and self.left_bytes > 0

    def block_bytes(self, block_bytes_max: int, now_ms: int) -> int:
        """The largest size of a block now; 0: none may be sent."""
        if self.left_bytes <= 0 or now_ms < self.send_from_ms:
            return 0
        size_bytes = min(block_bytes_max, self.left_bytes)
        if self._max_bytes_per_s is None:
            return size_bytes
        # Small, so that the limit holds within a tenth of a second.
        return min(size_bytes, max(1, self._max_bytes_per_s // _BLOCKS_PER_S_LIMITED))

    def spend(self, size_bytes: int, now_ms: int) -> None:
        """A block of so many bytes is sent."""
        self.left_bytes -= size_bytes
        if self._max_bytes_per_s is not None:
            cost_ms = -(-size_bytes * 1000 // self._max_bytes_per_s)
            self.send_from_ms = max(self.send_from_ms, now_ms) + cost_ms


class FetchWindow:
    """The reader's side: at most `window_bytes` are in flight or wait for its program."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._taken_bytes = 0

    def attach(self) -> int:
        """Begin a session; returns its first credit, the whole window."""
        self._taken_bytes = 0
        return self.window_bytes

    def taken(self, size_bytes: int) -> int:
        """The program took so much. Returns the credit to give now, a quarter of the window or more; 0: none yet."""
        self._taken_bytes += size_bytes
        if self._taken_bytes < self.window_bytes // 4:
            return 0
        credit_bytes, self._taken_bytes = self._taken_bytes, 0
        return credit_bytes
