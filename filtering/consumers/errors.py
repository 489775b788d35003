"""What a filtering consumer refuses, named for what the caller does next; the fields are for code."""

from filtering.errors import FilteringError


class ConsumerError(FilteringError):
    """The root of what consumers refuse."""


class SettingOverwritesMarks(ConsumerError, ValueError):
    """A setting of the client would commit positions without their marks: leave it out."""

    def __init__(self, setting: str, value: object) -> None:
        super().__init__(
            f"{setting}={value!r}: the client would commit positions by itself, without the marks that belong to them; "
            "leave it out and call commit()"
        )
        self.setting, self.value = setting, value


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


class MarksLost(ConsumerError):
    """The marks topic does not hold what a commit names: bring that topic back, or seek to where to begin anew."""

    def __init__(self, topic: str, partition: int, marks_topic: str, version: str) -> None:
        super().__init__(
            f"the committed position of {topic}-{partition} names marks {version!r} in topic {marks_topic!r}, and they "
            "are not there: restore that topic; or seek to a position, which begins with empty marks"
        )
        self.topic, self.partition, self.marks_topic, self.version = topic, partition, marks_topic, version


class CorruptPosition(ConsumerError):
    """A commit's metadata is ours and damaged, or of a later version: commit an older position again, do not go on."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the metadata of a committed position can't be read: {why}; going on would let replays pass")
        self.why = why


class PositionUnknown(ConsumerError):
    """This partition is not assigned to this consumer now."""

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"{topic}-{partition} is not assigned to this consumer")
        self.topic, self.partition = topic, partition
