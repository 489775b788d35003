"""What a consumer asks of startpoints: a Protocol, so that consumers depend on nobody who keeps them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class PartitionFacts(NamedTuple):
    """One partition of a topic, and how to look at its log.

    bounds(topic, partition): (log start, log end). first_at(topic, partition, timestamp_ms): the first offset of a
    record at or after that time, None if there is none. position: the committed offset, None if there is none.
    """

    topic: str
    partition: int
    bounds: Callable[[str, int], tuple[int, int]]
    first_at: Callable[[str, int, int], int | None]
    position: int | None = None


class Wish(NamedTuple):
    """A startpoint that was applied: begin at `offset`, and say `sequence` with every commit from there on."""

    offset: int
    sequence: int
    reset_marks: bool


class Startpoints(Protocol):
    """Where an operator may send a group's partitions."""

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Wish | None:
        """Apply the newest startpoint above the committed one, once; None if there is none. Raises if it fails."""
        ...

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """A commit that carries this sequence is stored."""
        ...
