"""What writers of stores in topics share: who is fenced, what their client may say, and that all was delivered."""

import logging
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

FENCED = {
    KafkaError._FENCED,  # noqa: SLF001 - its only name
    KafkaError._FATAL,  # noqa: SLF001 - fenced before this call
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.INVALID_TXN_STATE,
}
Report = tuple[KafkaError | None, Message]

QUIET = logging.getLogger("pushrep.kafka.stores.librdkafka")
"""To be fenced is no news, and the client would tell it as fatal; what matters is raised."""
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())


def delivered(producer: Producer, reports: Sequence[Report], count: int, timeout_s: float) -> list[int]:
    """The offsets of so many records, of which `reports` are told, in order. Raises KafkaException."""
    try:
        producer.flush(timeout_s)
    except SystemError as raised:  # how a fatal error comes out when a delivery is reported behind it
        if isinstance(raised.__cause__, KafkaException):
            raise raised.__cause__ from raised
        raise
    for error, _ in reports:
        if error is not None:
            raise KafkaException(error)
    if len(reports) < count:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - its only name
    return [int(message.offset() or 0) for _, message in reports]
