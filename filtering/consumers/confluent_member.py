"""A member of a group by confluent-kafka: its client, and what the group's coordinator says of it."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from filtering.consumers.confluent_asking import connection_of

_TIMEOUT_S = 5.0


class Member:
    """config: the consumer's, of which connection and security are used."""

    def __init__(self, client: Consumer, config: Mapping[str, Any], group: str) -> None:
        self.client, self.group = client, group
        self._connection = connection_of(config)

    def is_held(self, topic: str, partition: int) -> bool:
        """Whether the coordinator says that this member has the partition now.

        False while partitions are being given out, for one that was assigned without a group's help, and where nobody
        answers within 5 s, or the consumer's `oauth_cb` gives no token within the client's 10 s.
        """
        own = self.client.memberid()
        if not own:
            return False
        try:
            admin = AdminClient({**self._connection, "log_level": 0})  # held until it has answered
            asked = admin.describe_consumer_groups([self.group], request_timeout=_TIMEOUT_S)
            found = asked[self.group].result(_TIMEOUT_S)
        except (KafkaException, TimeoutError):
            return False
        wanted = TopicPartition(topic, partition)
        return any(wanted in one.assignment.topic_partitions for one in found.members if one.member_id == own)
