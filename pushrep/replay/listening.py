"""Listening: the wait at the tip of a log that another process writes.

a write ─▶ look at once ─▶ not there yet: its end is published a moment later, its flush and its watermark
                           milliseconds later, without a sound ─▶ look again: soon, then less and less often
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pushrep.replay.waiting import ReplayWaiter
from pushrep.seams import REAL_NETWORK, Filesystem, Watch

_AT_ONCE_S, _AT_ONCE = 0.000_1, 2
"""Between a write and its publication are some microseconds, unless its writer loses the processor there."""
_SOON_S, _SOON = 0.001, 16
"""A flush takes so long, and the way of a watermark."""
_SELDOM_S, _HARDLY_S = 0.05, 0.5
"""For what may come without a sound; and to find out that the log itself is gone."""
_QUIET: Final = 1_000
"""So many looks without anything new: soon is over."""


class Listening:
    """For one thread or task at a time; `wake` may come from any. Without a watch it looks now and then."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory, filesystem
        self._waiting = ReplayWaiter(REAL_NETWORK)
        self._watch: Watch | None = None
        self._is_begun = False
        self._looks = 0

    def wait(self, timeout_s: float, *, needs_write: bool = False) -> None:
        """Until there may be something new, `wake`, or the time is over. `needs_write`: nothing is, before a write."""
        pause_s = min(self._pause_s(needs_write=needs_write), timeout_s)
        if pause_s < _SOON_S:  # below what a poller can wait
            time.sleep(pause_s)
        else:
            with suppress(ValueError, OSError):  # closed in this moment: the next look finds that it is over
                self._waiting.wait(self._watch, pause_s)
        self._note()

    async def wait_async(self, timeout_s: float, *, needs_write: bool = False) -> None:
        """The same in an event loop."""
        pause_s = max(_SOON_S, self._pause_s(needs_write=needs_write))
        await self._waiting.wait_async(self._watch, min(pause_s, timeout_s))
        self._note()

    def wake(self) -> None:
        """End the wait, or the next one."""
        self._waiting.wake()

    def found(self, *, needs_write: bool) -> None:
        """There was something. Where the next comes with a write, and writes are told, nobody looks for it before."""
        self._looks = _QUIET if needs_write and self._watch is not None else 0

    def close(self) -> None:
        """Let go."""
        self._is_begun = True
        self._waiting.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _pause_s(self, *, needs_write: bool) -> float:
        if not self._is_begun:  # what does not come to a tip needs none
            self._is_begun, self._watch = True, self._filesystem.watch(self._directory)
            return 0  # what was written before it
        self._looks += 1
        if self._looks <= _AT_ONCE:
            return _AT_ONCE_S
        if self._looks <= _AT_ONCE + _SOON:
            return _SOON_S
        if needs_write and self._watch is not None:
            return _HARDLY_S
        return min(_SELDOM_S, _SOON_S * (1 << min(self._looks - _AT_ONCE - _SOON, 10)))  # doubling

    def _note(self) -> None:
        watch = self._watch
        if watch is not None and watch.heard():
            self._looks = 0
