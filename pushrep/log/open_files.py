"""Few files stay open, however many logs a directory has: the newest segment's of each log in use, up to a limit.

    a log opens its file ─▶ | oldest ... newest |       above the limit: the oldest that was not used since it was last
                                                        looked at closes its file (second chance, a cheap kind of LRU)

A file is closed only when all of it is flushed: a write error that the kernel finds later is told to descriptors that
were open then, and to nobody if there were none. So a log with unflushed bytes is flushed first.
"""

import threading
from collections import deque
from contextlib import suppress
from typing import Protocol


class Opener(Protocol):
    """A log that keeps a file open for writing."""

    used: bool
    """Set by the log at each use, cleared here."""

    def let_go(self, *, flush: bool) -> bool:
        """Close the file, if nothing unflushed is in it (with `flush`: after flushing), and no use is under way."""
        ...


class OpenFiles:
    """The logs of one directory that have a file open. Thread-safe; call it without holding any log's lock."""

    def __init__(self) -> None:
        self.limit = 512
        self._lock = threading.Lock()
        self._open: deque[Opener] = deque()
        self._known: set[Opener] = set()

    def __len__(self) -> int:
        return len(self._known)

    def opened(self, log: Opener) -> None:
        """`log` has a file open; others may have to close theirs. Raises LogPoisoned for none but `log`."""
        log.used = True
        with self._lock:
            if log in self._known:
                return
            self._known.add(log)
            self._open.append(log)
        for flush in (False, True):
            for _ in range(2 * len(self._open)):
                if len(self._known) <= self.limit:
                    return
                self._close_one(log, flush=flush)

    def forget(self, log: Opener) -> None:
        """`log` has closed its file by itself."""
        with self._lock:
            if log in self._known:
                self._known.discard(log)
                with suppress(ValueError):  # somebody is about to close it
                    self._open.remove(log)

    def _close_one(self, newcomer: Opener, *, flush: bool) -> None:
        with self._lock:
            if not self._open:
                return
            log = self._open.popleft()
        closed = False
        if log is not newcomer and (flush or not log.used):
            closed = log.let_go(flush=flush)
        log.used = False
        with self._lock:
            if closed:
                self._known.discard(log)
            elif log in self._known:
                self._open.append(log)
