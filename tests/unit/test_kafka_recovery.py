"""Looking at a topic while nothing is sent to it."""

import asyncio

import pytest

from pushrep.env import SYSTEM_CLOCK
from pushrep.kafka import recovery
from pushrep.kafka.answers import Code
from pushrep.kafka.cluster import BrokerError, PartitionBounds
from pushrep.kafka.recovery import ShippingRecovery
from pushrep.kafka.topic import TopicFacts


class MovedCluster:
    """Partition 0 is led by another broker than the one that is asked, and ends at 100."""

    def __init__(self):
        self.knows_leader = False

    async def refresh(self):
        self.knows_leader = True

    async def ends(self, partitions):
        if not self.knows_leader:
            raise BrokerError("the end of t-0", Code.NOT_LEADER_OR_FOLLOWER)
        return {0: 100}

    async def bounds(self, partition):
        return PartitionBounds(0, (await self.ends([partition]))[partition])


class Shipped:
    went_back = set()  # noqa: RUF012 - one test uses it

    def oldest_unsent_age_ms(self):
        return None


def test_who_sends_nothing_learns_that_another_broker_leads(monkeypatch):
    """Else the end of a topic that lost records is asked of a broker that does not lead it, for ever."""
    facts = TopicFacts("t", None, 1, "delete", 1 << 20, -1, has_append_time=False, producer_id_expiration_ms=86_400_000)
    monkeypatch.setattr(recovery, "look_at_topic", lambda *_: facts)
    monkeypatch.setattr(recovery, "_LOOK_AT_END_S", 0)
    cluster, shipped = MovedCluster(), Shipped()
    looking = ShippingRecovery(None, facts, cluster, shipped, None, SYSTEM_CLOCK, lambda _: None)
    asyncio.run(looking.check_topic({0: 150}))
    assert cluster.knows_leader
    with pytest.raises(BrokerError, match="ends below"):
        asyncio.run(looking.check_topic({0: 150}))
    assert shipped.went_back == {0}
