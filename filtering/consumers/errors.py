"""What a filtering consumer refuses, named for what the caller does next; the fields are for code."""

from filtering.errors import FilteringError

NO_AUTO_COMMIT = (
    "not for a filtering consumer: the client would commit positions by itself, without the marks that belong to them; "
    "leave it out and call commit()"
)


class ConsumerError(FilteringError):
    """The root of what consumers refuse."""


class CommitFailed(ConsumerError):
    """Positions are not committed, and nothing is lost: read on and commit again.

    Partitions move between the group's members, or its coordinator does not answer. The next commit stores what this
    one was to store, of the partitions that this consumer still has; the records of others come to their
    current consumers.
    """

    def __init__(self, group: str, why: object) -> None:
        super().__init__(f"the positions of group {group!r} are not committed ({why}): read on and commit again")
        self.group, self.why = group, str(why)


class MarksTooLarge(ConsumerError):
    """The marks of one partition do not fit beside its offset: give the consumer a `marks_topic`."""

    def __init__(self, topic: str, partition: int, size: int, allowed: int, pairs: int) -> None:
        super().__init__(
            f"the marks of {topic}-{partition} ({pairs} pairs) take {size} characters in the commit, the broker allows "
            f"{allowed} (offset.metadata.max.bytes): give the consumer marks_topic=, a compacted topic for them"
        )
        self.topic, self.partition, self.size, self.allowed, self.pairs = topic, partition, size, allowed, pairs


class CorruptPosition(ConsumerError):
    """A commit's metadata is ours and damaged, of another version, or names marks that are not there.

    Commit an older position again, restore the marks topic, or seek to where to begin anew; do not go on.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"the marks of a committed position can't be read: {why}; going on would let replays pass")
        self.why = why


class PositionUnknown(ConsumerError):
    """This partition is not assigned to this consumer now."""

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"{topic}-{partition} is not assigned to this consumer")
        self.topic, self.partition = topic, partition
