"""Which partition is meant, for ever: a topic's name can be used again by another topic, its id can't."""

import re
from dataclasses import dataclass
from uuid import UUID

from pushrep.errors import BadArgument

PARTITION_MAX = 2**31 - 1
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")  # Kafka's Topic.validate: a name that is also a directory's


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
        if _TOPIC.fullmatch(self.topic) is None or self.topic in {".", ".."}:
            raise BadArgument("topic", f"{self.topic[:300]!r} is not 1 to 249 of a-z A-Z 0-9 . _ -")
        if not 0 <= self.partition <= PARTITION_MAX:
            raise BadArgument("partition", f"{self.partition} is not from 0 to {PARTITION_MAX}")

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
