"""A transactional producer whose answers get lost on the way."""

from confluent_kafka import KafkaError, KafkaException


class AnswerLost:
    """A producer whose commit is not answered: it was done, or not."""

    def __init__(self, producer, *, is_done):
        self._producer, self._is_done = producer, is_done

    def __getattr__(self, name):
        return getattr(self._producer, name)

    def commit_transaction(self, timeout_s):
        if self._is_done:
            self._producer.commit_transaction(timeout_s)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
