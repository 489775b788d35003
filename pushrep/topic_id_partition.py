"""Which partition is meant, for ever: a topic's name can be used again by another topic, its id can't."""

import re
from dataclasses import dataclass
from uuid import UUID

from pushrep.errors import BadArgument

TOPIC_CHARACTERS_MAX = 249
PARTITION_MAX = 2**31 - 1
_TOPIC = re.compile(r"[a-zA-Z0-9._-]+")


def topic_fault(topic: str) -> str | None:
    """Why Kafka refuses this name of a topic (Topic.validate), which is also a directory's; None if it does not."""
    if topic in {".", ".."}:
        return "a topic is neither . nor .."
    if len(topic) > TOPIC_CHARACTERS_MAX:
        return f"a topic has at most {TOPIC_CHARACTERS_MAX} characters"
    if _TOPIC.fullmatch(topic) is None:
        return "a topic has only a-z A-Z 0-9 . _ -"
    return None


def check_topic(argument: str, topic: object) -> None:
    """Raise BadArgument for what can't name a topic of Kafka."""
    if not isinstance(topic, str) or topic_fault(topic) is not None:
        raise BadArgument(argument, f"{topic!r} is no topic name: 1 to {TOPIC_CHARACTERS_MAX} of a-z A-Z 0-9 . _ -")


@dataclass(frozen=True, slots=True, order=True)
class TopicIdPartition:
    """One partition of one topic, Kafka's TopicIdPartition. Raises BadArgument for a name that Kafka would refuse.

    The topic becomes a directory's name on other machines, so `..` and slashes end here.
    """

    topic_id: UUID
    topic: str
    partition: int

    def __post_init__(self) -> None:
        if self.topic_id.int == 0:
            raise BadArgument("topic_id", "the zero uuid is no topic id")
        if (why := topic_fault(self.topic)) is not None:
            raise BadArgument("topic", f"{self.topic[:300]!r}: {why}")
        if not 0 <= self.partition <= PARTITION_MAX:
            raise BadArgument("partition", f"{self.partition} is not from 0 to {PARTITION_MAX}")

    def __hash__(self) -> int:
        return hash((self.topic_id.int, self.partition))  # a third of the generated one, and every push looks some up

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
