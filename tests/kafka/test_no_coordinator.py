"""A single broker with Kafka's defaults: it can't make the topic of transactions, so no coordinator is there."""

import pytest

from pushrep.kafka import DestinationRefused, KafkaDestination
from pushrep.outbox import Outbox
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
DEFAULTS = {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"}


def test_where_brokers_can_not_make_the_topic_of_transactions_it_ships_unfenced(tool_or_skip, tmp_path, caplog):
    """identity T3: without a fence it ships "unfenced, with warning and metric; `fence="required"` refuses"."""
    tool_or_skip(missing())

    def opened(fence):
        destination = KafkaDestination(bootstrap_servers=cluster.bootstrap_servers, fence=fence)
        return Outbox.open(tmp_path / "outbox", "orders", 2, "test", kafka=destination, open_timeout_s=WAIT_S)

    with KafkaCluster(tmp_path / "broker", settings=DEFAULTS) as cluster:
        create_topic(cluster.bootstrap_servers, "orders", 2)
        with opened("preferred") as outbox:
            outbox.append_many(0, [b"%d" % n for n in range(20)])
            outbox.wait_shipped(WAIT_S)
            assert not outbox.facts.shipping.shipper.fence.is_standing
            found = read_filtered(cluster.bootstrap_servers, "orders", 2)
            assert [record.value for record in found.of(outbox.pid, 0)] == [b"%d" % n for n in range(20)]
        assert "shipped to without a fence" in caplog.text
        assert "transaction.state.log.replication.factor" in caplog.text
        with pytest.raises(DestinationRefused, match=r"transaction\.state\.log\.replication"):
            opened("required")
