"""When does what was appended have to be on disk, and who sees to it?

    bytes not on disk    0 ............ flush_bytes ............ 2 * flush_bytes
      machine's clock    the flusher    the flusher, at once     who appends waits for a sync: the disk is slower
                         in flush_ms
      simulated clock    who appends,   who appends
                         after flush_ms

A simulated clock gets no thread, so that a run can be repeated.
"""

from enum import Enum, auto

from pushrep.log.config import LogConfig
from pushrep.log.flusher import Flushable, process_flusher
from pushrep.seams import SYSTEM_CLOCK, Clock


class Due(Enum):
    """What the thread that appends has to do itself."""

    NOTHING = auto()
    FLUSH = auto()
    FLUSH_AND_CHECKPOINT = auto()


ACKNOWLEDGED_MS = 750
"""The recovery point rises over what was acknowledged as flushed within a second, whatever flush_ms says: so long after
it, and a quarter of a second later if another log of the directory has just written the checkpoints."""
SHARE_MS = 250


class FlushPromise:
    """The flushed offset and the recovery point of `log` rise at least once per flush_bytes or flush_ms. Thread-safe.

    While it stands, `log` is called back by the flusher; `end` it.
    """

    def __init__(self, log: Flushable, config: LogConfig, clock: Clock) -> None:
        self._log, self._config, self._clock = log, config, clock
        self._flusher = process_flusher() if clock is SYSTEM_CLOCK else None
        self._since_ms: int | None = None  # of the first byte that is not on disk, by a simulated clock
        self._within_ms = config.flush_ms  # of that; less while something was acknowledged
        if self._flusher is not None:
            self._flusher.attach(log)

    def made(self, unflushed_bytes: int = 0) -> Due:
        """Something has changed that is to come to disk, and so many bytes of the log are not there yet."""
        much = unflushed_bytes >= self._config.flush_bytes
        if self._flusher is None:
            return Due.FLUSH_AND_CHECKPOINT if self._is_old() or much else Due.NOTHING
        if self._since_ms is None:
            self.again()
        if not much:
            return Due.NOTHING
        self._flusher.soon(self._log, 0)
        return Due.FLUSH if unflushed_bytes >= 2 * self._config.flush_bytes else Due.NOTHING

    def acknowledged(self) -> Due:
        """Something was said to be on disk; the recovery point has to rise over it soon."""
        if self._within_ms > ACKNOWLEDGED_MS:
            self._within_ms = ACKNOWLEDGED_MS
            if self._flusher is not None:
                self._flusher.soon(self._log, ACKNOWLEDGED_MS)
        return self.made()

    def again(self, delay_ms: int | None = None) -> None:
        """Let the flusher come in `delay_ms` (None: flush_ms, unless it is about to)."""
        if self._flusher is None:
            return
        if delay_ms is not None:
            self._flusher.soon(self._log, delay_ms)
        elif self._since_ms is None:
            self._since_ms = 0 if self._flusher.soon(self._log, self._within_ms) else None

    def kept(self) -> None:
        """All that was there until now is about to be brought to disk."""
        self._since_ms, self._within_ms = None, self._config.flush_ms

    def end(self) -> None:
        """The flusher is not under way for this log when this returns, and does not come again."""
        if self._flusher is not None:
            self._flusher.detach(self._log)

    def _is_old(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        if now_ms - self._since_ms < self._within_ms:
            return False
        self.kept()
        return True
