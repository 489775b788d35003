"""A transactional producer whose answers get lost on the way."""

from confluent_kafka import KafkaError, KafkaException, Producer


class LosesAnswers(Producer):
    """Every producer of the stores, for a test that wants it."""

    lost = None
    """What became of the next commit, which is not answered: it was done, or not. None: all are answered."""
    away = None
    """Raised where one begins after that."""

    def init_transactions(self, timeout_s):
        if LosesAnswers.away is not None and LosesAnswers.lost is None:
            raise LosesAnswers.away
        super().init_transactions(timeout_s)

    def commit_transaction(self, timeout_s):
        is_done, LosesAnswers.lost = LosesAnswers.lost, None
        if is_done is not False:
            super().commit_transaction(timeout_s)
        if is_done is not None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
