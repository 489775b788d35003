"""A member of a group by confluent-kafka: its client, and what the group's coordinator says of it."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient

from filtering.consumers.asking import ask_aside
from filtering.consumers.confluent_asking import connection_of
from filtering.consumers.holding import ASK_WITHIN_S, Held, Holding


class ConfluentMember:
    """config: the consumer's, of which connection and security are used. For one thread at a time."""

    def __init__(self, client: Consumer, config: Mapping[str, Any], group: str) -> None:
        self.client, self.group = client, group
        self._connection = connection_of(config)
        self._holding = Holding(self._ask)

    def is_held(self, topic: str, partition: int) -> bool:
        """Whether the coordinator says that this member has the partition now.

        False while partitions are being given out, for one that was assigned without a group's help, and while no
        answer is there: a later call tells what was answered.
        """
        return self._holding.is_held(self.client.memberid() or "", topic, partition)

    def _ask(self, member: str) -> "Future[Held]":
        """In a thread that nobody waits for: a client is made in it, which first has to have its `oauth_cb`'s token."""
        return ask_aside(
            lambda: held_by(self._connection, self.group, member), f"pushrep who holds what in {self.group}"
        )


def held_by(connection: Mapping[str, Any], group: str, member: str) -> Held:
    """What the coordinator says that it has; nothing where nobody answers within 5 s, or no token is had in 10 s."""
    try:
        admin = AdminClient({**connection, "log_level": 0})  # held until it has answered
        asked = admin.describe_consumer_groups([group], request_timeout=ASK_WITHIN_S)
        found = asked[group].result(ASK_WITHIN_S)
    except (KafkaException, TimeoutError):
        return frozenset()
    held = [one.assignment.topic_partitions for one in found.members if one.member_id == member]
    return frozenset((one.topic, one.partition) for partitions in held for one in partitions)
