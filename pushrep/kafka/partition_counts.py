"""How many partitions of a topic are used is kept by every member of an outbox: here is what shipping asks of it.

The number stands in destinations.json, which lies on one disk. A member that leads next, or a directory that lost the
file, would fix it anew, and a topic that grew meanwhile would get one pair in two partitions.
"""

from typing import Protocol
from uuid import UUID

from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable
from pushrep.kafka.progress import ShippingProgress


class FixedPartitionCounts(Protocol):
    """The numbers of each PID epoch, oldest first, by the topic's id."""

    def known(self, topic_id: UUID) -> tuple[int, ...]:
        """As the members keep them; empty for a topic that was never shipped to."""
        ...

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """Enough members have them on disk when this returns. Waits for them; raises NotPinned."""
        ...


class OwnPartitionCounts:
    """Of an outbox without other members: destinations.json alone."""

    def known(self, topic_id: UUID) -> tuple[int, ...]:  # noqa: ARG002 - the Protocol's
        """Nothing more."""
        return ()

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """Nobody else is to know."""


def fixed_count(progress: ShippingProgress, topic: str, partitions: int, known: tuple[int, ...]) -> int:
    """How many of a topic's `partitions` are used where nothing is fixed yet; `known` as in Pins.

    Raises DestinationRefused if there are several, and nothing says where in the logs which of them began.
    """
    if progress.epochs or not known:
        return partitions
    if len(set(known)) > 1:
        raise DestinationRefused(
            topic,
            "partitions",
            partitions,
            f"the outbox has used {', '.join(map(str, known))} of them in turn, and destinations.json, which knows "
            "from which offsets on, is missing: copy it from the member that shipped last, or ship to a new topic",
        )
    return min(known[0], partitions)


def check_seen(progress: ShippingProgress, topic: str, topic_id: UUID, partitions: int) -> None:
    """Raises KafkaUnreachable if a broker knows fewer partitions than are used: it lags behind, no topic shrinks."""
    used = max(counts_of(progress), default=0)
    if progress.topic_id == topic_id and used > partitions:
        raise KafkaUnreachable(
            f"the broker that was asked knows {partitions} of topic {topic}'s partitions, {used} are used"
        )


def check_kept(progress: ShippingProgress, topic: str, known: tuple[int, ...]) -> None:
    """Raises DestinationRefused if the members keep numbers that the file, which knows where each began, does not.

    Then another member shipped since this one did: by the file's numbers a pair would get into a second partition.
    """
    counts = counts_of(progress)
    if counts[: len(known)] != known:
        raise DestinationRefused(
            topic,
            "partitions",
            ", ".join(map(str, counts)),
            f"so says destinations.json, but the outbox has used {', '.join(map(str, known))} of them in turn: copy it "
            "from the member that shipped last, or ship to a new topic",
        )


def counts_of(progress: ShippingProgress) -> tuple[int, ...]:
    """What members are to keep of it: each number that was used, oldest first."""
    found: list[int] = []
    for epoch in progress.epochs:
        if epoch.partitions is not None and found[-1:] != [epoch.partitions]:
            found.append(epoch.partitions)
    return tuple(found)
