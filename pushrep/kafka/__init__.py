"""From a log to a Kafka topic: the sealed batches as they are, in order, without holes, each record visible once.

Outbox.open(..., kafka=KafkaDestination(bootstrap_servers="broker:9092"))

Loads no Kafka client: the room's other modules do, and are imported when something is shipped (`pushrep[kafka]`).
"""

from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import (
    AnotherCluster,
    DestinationAhead,
    DestinationRefused,
    KafkaUnreachable,
    OutboxDiverged,
    OutboxTakenOver,
    RecordsParked,
    ShippingError,
    ShippingStopped,
    ShippingTimeout,
    TopicLostRecords,
    TopicMissing,
)

__all__ = [
    "AnotherCluster",
    "DestinationAhead",
    "DestinationRefused",
    "KafkaDestination",
    "KafkaUnreachable",
    "OutboxDiverged",
    "OutboxTakenOver",
    "RecordsParked",
    "ShippingError",
    "ShippingStopped",
    "ShippingTimeout",
    "TopicLostRecords",
    "TopicMissing",
]
