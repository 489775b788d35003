"""Partitions that came to confluent-kafka's consumer and could not be loaded: held without being read, tried again.

    assigned, loading fails ─▶ hold: the client has them, paused ─▶ every read loads again, or raises why it can't
                                                                    └─▶ seek to the committed position, resume

The client takes an assignment whatever the callback raises, and would hand over records that nobody has marks for.
"""

from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

Load = Callable[[Sequence[TopicPartition]], list[TopicPartition]]


class Unloaded:
    """load: where the client is to begin, all of these or it raises. Not thread-safe."""

    def __init__(self, client: Consumer, load: Load) -> None:
        self._client, self._load = client, load
        self._held: set[tuple[str, int]] = set()

    def __contains__(self, partition: tuple[str, int]) -> bool:
        return partition in self._held

    def hold(self, partitions: Sequence[TopicPartition]) -> None:
        """They were assigned just now, and are not to be read."""
        self._client.pause(list(partitions))
        self._held |= {(one.topic, one.partition) for one in partitions}

    def load_again(self) -> list[TopicPartition]:
        """Those that are read from now on. Raises what loading raises: then all are held until the next call."""
        if not self._held:
            return []
        loaded = []
        for start in self._load([TopicPartition(*one) for one in sorted(self._held)]):
            if not self._begun(start):
                break
            loaded.append(TopicPartition(start.topic, start.partition))
        return loaded

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are gone, or begin elsewhere; a client keeps in mind what is paused, even when it comes again."""
        gone = self._held & {(one.topic, one.partition) for one in partitions}
        if gone:
            self._client.resume([TopicPartition(*one) for one in gone])
            self._held -= gone

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
