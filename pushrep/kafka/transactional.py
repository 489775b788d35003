"""What writers of stores in topics share: who is fenced, what their client may say, and that all was delivered."""

import logging
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from filtering.consumers.confluent_asking import flush

FENCED = {
    KafkaError._FENCED,  # noqa: SLF001 - its only name
    KafkaError._FATAL,  # noqa: SLF001 - fenced before this call
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.INVALID_TXN_STATE,
}
_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001 - their only names
"""What a client reports of records whose transaction has failed; it does not tell of what."""
Report = tuple[KafkaError | None, Message]

QUIET = logging.getLogger("pushrep.kafka.stores.librdkafka")
"""To be fenced is no news, and the client would tell it as fatal; what matters is raised."""
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())


def delivered(producer: Producer, reports: Sequence[Report], count: int, timeout_s: float) -> list[int]:
    """The offsets of so many records, of which `reports` are told, in order. Raises KafkaException."""
    flush(producer, timeout_s)
    for error, message in reports:
        if error is not None and error.code() in _PURGED:
            why = f"the brokers refused the transaction: is the right WRITE on topic {message.topic()!r} there?"
            raise KafkaException(KafkaError(error.code(), why))
        if error is not None:
            raise KafkaException(error)
    if len(reports) < count:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - its only name
    return [int(message.offset() or 0) for _, message in reports]
