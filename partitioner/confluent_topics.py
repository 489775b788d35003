"""What a relay has to know of a topic before it sends: which topic this is, how many partitions, how long it keeps.

A name says nothing about identity: a topic that is deleted and made anew counts its offsets from 0 again. So the
incarnation, cluster id and topic id, is part of every PID.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from filtering.consumers.confluent_asking import ask_brokers
from partitioner.errors import NoSuchTopic

_MASK = 2**64 - 1


class DestinationTopic(NamedTuple):
    """`incarnation`: cluster id / topic id; `retention_ms`: None where nothing is deleted by age."""

    incarnation: str
    partitions: int
    retention_ms: int | None


def topic_facts(config: Mapping[str, Any], topic: str) -> DestinationTopic:
    """Ask the brokers; config: librdkafka's settings for servers and security. Raises NoSuchTopic, KafkaException."""
    admin = AdminClient(dict(config))  # held until it has answered
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def question(left_s: float) -> tuple[Any, Any, Any]:
        cluster = admin.describe_cluster(request_timeout=left_s)
        described = admin.describe_topics(TopicCollection([topic]), request_timeout=left_s)[topic]
        settings = admin.describe_configs([resource], request_timeout=left_s)[resource]
        return cluster.result(left_s), described.result(left_s), settings.result(left_s)

    try:
        cluster, found, settings = ask_brokers(question)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise NoSuchTopic(topic) from error
        raise
    high, low = found.topic_id.get_most_significant_bits(), found.topic_id.get_least_significant_bits()
    topic_id = UUID(int=(high & _MASK) << 64 | (low & _MASK))
    retention_ms = int(settings["retention.ms"].value)
    incarnation = f"{cluster.cluster_id}/{topic_id}"
    return DestinationTopic(incarnation, len(found.partitions), None if retention_ms < 0 else retention_ms)
