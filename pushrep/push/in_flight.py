"""What is in flight on a connection, and how much of a log's file goes in one request: less once a large one was lost.

A node may take smaller frames than we send, or a way may be too slow for a large one within `request_timeout_ms`. What
`request_bytes_max` allows is always tried: larger requests only cost less.
"""

from typing import NamedTuple

from pushrep.push.pusher import Sent
from pushrep.push.settings import PushSettings

_STEPS = 16
"""So many answers win back `request_bytes_max`: what was lost by chance comes back, what is refused is tried seldom."""


class OnItsWay(NamedTuple):
    """A request without an answer. `file_bytes` of it lay in files; it takes `slots` of those that may be in flight."""

    sent_ms: int
    parts: list[Sent]
    slots: int
    file_bytes: int


class FileRequests:
    """Of one connection's place, over all connections made for it. Sizes count bytes that lie in files."""

    def __init__(self, settings: PushSettings) -> None:
        self._most_bytes = self.bytes_max = settings.request_file_bytes_max
        self._least_bytes = min(settings.request_bytes_max, self._most_bytes)
        """So many go in one request."""

    def answered(self, size_bytes: int) -> None:
        """A request with so many was."""
        if size_bytes:
            self.bytes_max = min(self._most_bytes, self.bytes_max + max(1, self._least_bytes // _STEPS))

    def lost(self, size_bytes: int) -> None:
        """A connection went, with a request without an answer that had so many."""
        if size_bytes > self._least_bytes:
            self.bytes_max = max(self._least_bytes, self.bytes_max // 2)
