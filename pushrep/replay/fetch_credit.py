"""Fetch credit: how many bytes a replay may send now. Both sides count here; neither socket nor clock is known.

    reader (remote.py)                                             session, at the node (session.py)
    FetchWindow(4 MiB)        ── Attach: credit_bytes 4 MiB ──▶    FetchCredit.give(4 MiB)
    blocks come          ◀── ReplayData ── of at most block_bytes, and no more than the credit; spend(bytes)
    taken(bytes)  ── Credit: bytes, a quarter of the window each ──▶    FetchCredit.give(bytes)

A block is no larger than the credit, but for one thing: a batch is never split. A first batch that is larger is a block
by itself, and overdraws the credit by less than the batch. A replay that may send so many bytes a second gets small
blocks and pauses between them.
"""

_BLOCKS_PER_S_LIMITED = 10


class FetchCredit:
    """What one session may send. max_bytes_per_s: the request's own limit. Times are one monotonic clock's, in ms."""

    def __init__(self, max_bytes_per_s: int | None, now_ms: int) -> None:
        self.left_bytes = 0
        """What the subscriber is ready to take; below 0 behind a batch that is larger than what was left."""
        self.send_from_ms = now_ms
        """Before this nothing is sent, so that the limit holds."""
        self._max_bytes_per_s = max_bytes_per_s

    def give(self, credit_bytes: int) -> bool:
        """The subscriber takes so much more. Returns whether it took nothing until now."""
        was_empty = self.left_bytes <= 0
        self.left_bytes += credit_bytes
        return was_empty and self.left_bytes > 0

    def block_bytes(self, block_bytes_max: int, now_ms: int) -> int:
        """How large a block may be now; 0: none may be sent."""
        if self.left_bytes <= 0 or now_ms < self.send_from_ms:
            return 0
        size_bytes = min(block_bytes_max, self.left_bytes)
        if self._max_bytes_per_s is None:
            return size_bytes
        # Small, so that the limit holds within a tenth of a second.
        return min(size_bytes, max(1, self._max_bytes_per_s // _BLOCKS_PER_S_LIMITED))

    def spend(self, size_bytes: int, now_ms: int) -> None:
        """A block of so many bytes goes out."""
        self.left_bytes -= size_bytes
        if self._max_bytes_per_s is not None:
            cost_ms = -(-size_bytes * 1000 // self._max_bytes_per_s)
            self.send_from_ms = max(self.send_from_ms, now_ms) + cost_ms


class FetchWindow:
    """The reader's side: at most `window_bytes` are on their way to it or wait for its program."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._taken_bytes = 0

    def attach(self) -> int:
        """A session begins: its credit, the whole window."""
        self._taken_bytes = 0
        return self.window_bytes

    def taken(self, size_bytes: int) -> int:
        """The program took so much. Returns the credit to give now, a quarter of the window or more; 0: none yet."""
        self._taken_bytes += size_bytes
        if self._taken_bytes < self.window_bytes // 4:
            return 0
        credit_bytes, self._taken_bytes = self._taken_bytes, 0
        return credit_bytes
