"""A single broker with Kafka's defaults: it can't create the transaction topic, so there is no coordinator."""

import pytest

from pushrep.kafka import DestinationRefused, KafkaDestination, fence_driver
from pushrep.outbox import Outbox, OutboxConfig
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
DEFAULTS = {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"}


def test_where_brokers_can_not_make_the_topic_of_transactions_it_ships_unfenced(
    tool_or_skip, tmp_path, caplog, monkeypatch
):
    """identity T3: without a fence it ships "unfenced, with warning and metric; `fence="required"` refuses"."""
    tool_or_skip(missing())
    # A coordinator that comes late is waited for 10 s; here none ever comes.
    monkeypatch.setattr(fence_driver, "_TRANSACTIONS_TOPIC_WITHIN_MS", 1_000)

    def opened(fence):
        servers = cluster.bootstrap_servers
        destination = KafkaDestination(bootstrap_servers=servers, fence=fence, retry_backoff_max_ms=500)
        return Outbox.open(
            tmp_path / "outbox", "orders", 2, "test", kafka=destination, config=OutboxConfig(open_timeout_s=WAIT_S)
        )

    with KafkaCluster(tmp_path / "broker", settings=DEFAULTS) as cluster:
        create_topic(cluster.bootstrap_servers, "orders", 2)
        with opened("preferred") as outbox:
            outbox.append_many(0, [b"%d" % n for n in range(20)])
            outbox.wait_shipped(WAIT_S)
            assert not outbox.facts.shipping.sink.fencing.newest.is_standing
            found = read_filtered(cluster.bootstrap_servers, "orders", 2)
            assert [record.value for record in found.of(outbox.pid, 0)] == [b"%d" % n for n in range(20)]
        assert "shipped to without a fence" in caplog.text
        assert "transaction.state.log.replication.factor" in caplog.text
        with pytest.raises(DestinationRefused, match=r"transaction\.state\.log\.replication"):
            opened("required")
