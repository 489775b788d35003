"""Memory for the bodies of frames, used again and again: new pages cost more than what is read into them.

    take ─▶ body is read ─▶ message ─▶ answered ─▶ give back       the last one given is taken first, its bytes are near

A buffer is a mapping of its own: it begins with a page, which a third of the copying's time hangs on, and what was
never written in it takes no memory, so a peer that claims a large body makes us hold what it sends.
"""

import mmap

SPARE_BYTES = 6 << 20
"""A request of 4 MiB from a file behind others from memory."""
_KEPT_MAX = 4


class Spares:
    """Buffers of SPARE_BYTES. Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def acquire(self) -> mmap.mmap:
        """One that nobody else has; what is in it is left from before."""
        try:
            return self._kept.pop()
        except IndexError:
            return mmap.mmap(-1, SPARE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has pages of its own

    def give_back(self, buffer: mmap.mmap) -> None:
        """Nobody looks into it any more: the next to take it writes there."""
        if len(self._kept) < _KEPT_MAX:
            self._kept.append(buffer)
