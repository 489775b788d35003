"""Which partitions a client does not fetch, and why: it fetches one only when no reason is left.

    CALLER      `pause` was called
    UNLOADED    its position or its marks are not known yet
    STOPPED     its startpoint can't be applied

Pure: the clients' own pause and resume come in by the constructor.
"""

from collections.abc import Callable, Iterable
from enum import Enum, auto

from filtering.consumers.assignment import TopicPartition

_Call = Callable[[list[TopicPartition]], None]


class Reason(Enum):
    """Why a partition is paused."""

    CALLER = auto()
    UNLOADED = auto()
    STOPPED = auto()


class Pauses:
    """pause, resume: the client's, called with partitions that it has. Not thread-safe."""

    def __init__(self, pause: _Call, resume: _Call) -> None:
        self._pause, self._resume = pause, resume
        self._reasons: dict[TopicPartition, set[Reason]] = {}

    def of(self, reason: Reason) -> set[TopicPartition]:
        """The partitions that are paused for this reason."""
        return {partition for partition, reasons in self._reasons.items() if reason in reasons}

    def add(self, reason: Reason, partitions: Iterable[TopicPartition]) -> None:
        """Pause these, also where they are paused already: the client may have been given them anew."""
        wanted = sorted(set(partitions))
        if wanted:
            self._pause(wanted)
            for partition in wanted:
                self._reasons.setdefault(partition, set()).add(reason)

    def remove(self, reason: Reason, partitions: Iterable[TopicPartition]) -> None:
        """This reason is over; what has no other is fetched again."""
        free = []
        for partition in sorted(set(partitions)):
            reasons = self._reasons.get(partition, set())
            if reason in reasons:
                reasons.remove(reason)
                if not reasons:
                    del self._reasons[partition]
                    free.append(partition)
        if free:
            self._resume(free)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are going: no reason holds for whoever has them next, which may be this client."""
        gone = sorted(self._reasons.keys() & set(partitions))
        if gone:
            self._resume(gone)
            for partition in gone:
                del self._reasons[partition]
