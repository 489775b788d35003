"""What `pushrep.startpoints.store_at("kafka:TOPIC", settings)` calls: the entry point of the kind of store "kafka".

A module of its own, because installations keep its name in their metadata.
"""

from collections.abc import Mapping

from pushrep.kafka.destination import destination_by
from pushrep.kafka.startpoints import open_store
from pushrep.startpoints import StartpointStore


def store_in_topic(topic: str, settings: Mapping[str, str]) -> StartpointStore:
    """The store in `topic`, with settings as librdkafka spells them. Raises BadArgument, StoreUnavailable."""
    return open_store(destination_by(settings, topic))
