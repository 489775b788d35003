"""The entry point of stores of startpoints in Kafka: `pushrep.startpoints.store_at("kafka:TOPIC", settings)` calls it.

It is a separate module because the metadata of installations contains its name.
"""

from collections.abc import Mapping

from pushrep.kafka.destination import destination_by
from pushrep.kafka.startpoints import open_store
from pushrep.startpoints import StartpointStore


def store_in_topic(topic: str, settings: Mapping[str, str]) -> StartpointStore:
    """The store in `topic`. settings: with librdkafka's names. Raises BadArgument, StoreUnavailable."""
    return open_store(destination_by(settings, topic))
