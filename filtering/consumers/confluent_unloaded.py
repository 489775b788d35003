"""Partitions that came to confluent-kafka's consumer and could not be loaded: held without being read, tried again.

    assigned, loading fails ─▶ hold: the client has them, paused ─▶ every read loads again, or raises why it can't
                                                                    └─▶ seek to the committed position, resume

The client takes an assignment whatever the callback raises, and would hand over records that nobody has marks for.
"""

from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from filtering.consumers.pauses import Pauses, Reason

Load = Callable[[Sequence[TopicPartition]], list[TopicPartition]]


class Unloaded:
    """load: where the client is to begin, all of these or it raises. Not thread-safe."""

    def __init__(self, client: Consumer, load: Load, pauses: Pauses) -> None:
        self._client, self._load, self._pauses = client, load, pauses

    def __len__(self) -> int:
        return len(self._pauses.of(Reason.UNLOADED))

    def __contains__(self, partition: tuple[str, int]) -> bool:
        return partition in self._pauses.of(Reason.UNLOADED)

    def hold(self, partitions: Sequence[TopicPartition]) -> None:
        """They were assigned just now, and are not to be read."""
        self._pauses.add(Reason.UNLOADED, [(one.topic, one.partition) for one in partitions])

    def load_again(self) -> list[TopicPartition]:
        """Those that are read from now on. Raises what loading raises: then all are held until the next call."""
        held = sorted(self._pauses.of(Reason.UNLOADED))
        if not held:
            return []
        loaded = []
        for start in self._load([TopicPartition(*one) for one in held]):
            if not self._begun(start):
                break
            loaded.append(TopicPartition(start.topic, start.partition))
        return loaded

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are read now, or begin elsewhere."""
        self._pauses.remove(Reason.UNLOADED, [(one.topic, one.partition) for one in partitions])

    def _begun(self, start: TopicPartition) -> bool:
        """False if the client can't seek yet in a partition that has only just come."""
        try:
            if start.offset >= 0:  # else nothing is committed, and it stands where its reset policy put it
                self._client.seek(start)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:  # noqa: SLF001 - its only name
                raise
            return False
        self.forget([start])
        return True
