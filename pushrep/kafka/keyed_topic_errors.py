"""What a topic that serves as a map says no to, named for what the caller does next.

ChangedByOther    look again and decide anew        ChangeNotStored   mend what it names, then do it again
RecordsOfOthers   take a topic of its own
"""

from pushrep.errors import PushrepError


class KeyedTopicError(PushrepError):
    """Anything a KeyedTopic refuses; brokers that don't answer are KafkaUnreachable."""


class ChangedByOther(KeyedTopicError):
    """Someone else changed the topic since it was looked at. Nothing of this change is stored."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} was changed by another writer meanwhile; nothing of this change is stored")
        self.topic = topic


class ChangeNotStored(KeyedTopicError):
    """The brokers refused a change; nothing of it is stored."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic} took nothing of a change: {why}")
        self.topic, self.why = topic, why


class RecordsOfOthers(KeyedTopicError):
    """The topic holds records that are none of this map's: take a topic of its own, or restore it."""

    def __init__(self, topic: str, offset: int, why: str) -> None:
        super().__init__(
            f"topic {topic}: the record at offset {offset} is none of ours ({why}): take a topic of its own"
        )
        self.topic, self.offset, self.why = topic, offset, why
