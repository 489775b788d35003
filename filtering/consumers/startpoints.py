"""What a consumer asks of startpoints: a Protocol, so that consumers depend on nobody who keeps them.

assigned    pending ─▶ StartTarget: begin there │ RefusedStartpoint: do not begin │ None: at the committed position
running     version changed? moved ─▶ StartTarget: seek, between two reads │ RefusedStartpoint: stop │ None: continue
committed   consumed
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol


def _by_nobody(_topic: str, _partition: int) -> bool:
    return False


class PartitionFacts(NamedTuple):
    """One partition of a topic, and how to look at its log.

    bounds(topic, partition): (log start, log end). first_at(topic, partition, timestamp_ms): the first offset of a
    record at or after that time, None if there is none. position: where it stands, committed when it comes, the next
    offset to read while it runs; None if that is not known. is_held(topic, partition): whether the group's coordinator
    says that this member has it; False while that is not known, which nobody waits for. The others may block.
    """

    topic: str
    partition: int
    bounds: Callable[[str, int], tuple[int, int]]
    first_at: Callable[[str, int, int], int | None]
    position: int | None = None
    is_held: Callable[[str, int], bool] = _by_nobody


class StartTarget(NamedTuple):
    """A startpoint that was applied: begin at `offset`, and say `sequence` with every commit from there on."""

    offset: int
    sequence: int
    reset_marks: bool


class RefusedStartpoint(NamedTuple):
    """A startpoint that can't be applied: the partition is not read. `error` is raised to the caller, once for it."""

    sequence: int
    error: Exception


Answer = StartTarget | RefusedStartpoint | None


class Startpoints(Protocol):
    """Where an operator may send a group's partitions. Calls may block, and come from one thread at a time."""

    look_every_s: float
    """How often a running consumer asks whether there is something new."""

    def version(self) -> int:
        """A number that changes whenever there may be something new for anyone."""
        ...

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Answer:
        """The partition comes: apply the newest startpoint above the committed one, once; None if there is none."""
        ...

    def moved(self, consumer: str, facts: PartitionFacts, running_sequence: int) -> Answer:
        """The partition runs from startpoint `running_sequence` (0: none): apply a newer one, once; None: go on."""
        ...

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """A commit that carries this sequence is stored."""
        ...
