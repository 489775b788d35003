"""A single broker with settings that are in the way: Kafka's defaults, by which it can't create the transaction topic,
so that there is no coordinator; less metadata in a commit than the default; topics that are made by whoever asks.
"""

import asyncio

import pytest
from confluent_kafka.admin import AdminClient

from filtering import StreamMetadata, sqe_producer_id
from filtering.consumers import MarksTooLarge
from pushrep.kafka import DestinationRefused, KafkaDestination, TopicMissing, fence_driver
from pushrep.outbox import Outbox, OutboxConfig
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.plain_client import consume, create_topic, plain_producer, send
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
DEFAULTS = {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"}


@pytest.fixture(scope="module")
def cluster(tool_or_skip, tmp_path_factory):
    tool_or_skip(missing())
    settings = {**DEFAULTS, "offset.metadata.max.bytes": "300", "auto.create.topics.enable": "true"}
    with KafkaCluster(tmp_path_factory.mktemp("odd"), settings=settings) as made:
        yield made


def records_of_many_sources(cluster, topic, sources):
    create_topic(cluster.bootstrap_servers, topic)
    keys = [StreamMetadata(sqe_producer_id("topology", str(n)), n, 10).pack() for n in range(sources)]
    send(plain_producer(cluster.bootstrap_servers), topic, [(key, b"v") for key in keys])


def test_marks_that_a_broker_allows_no_room_for_lie_in_the_marks_topic(cluster):
    """A small offset.metadata.max.bytes, which only the broker's answer tells: `MarksTooLarge`, whose advice works."""
    from filtering.consumers import aiokafka, confluent

    servers = cluster.bootstrap_servers
    records_of_many_sources(cluster, "sources", 50)
    create_topic(servers, "marks", cleanup_policy="compact")
    group = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "log_level": 0}

    def read(name, **given):
        with confluent.ReplayFilteredConsumer(group | {"group.id": name}, **given) as consumer:
            consumer.subscribe(["sources"])
            found = []
            while len(found) < 50:
                found += consumer.consume(50, 0.1)
            consumer.commit()

    with pytest.raises(MarksTooLarge, match=r"marks_topic.*offset\.metadata\.max\.bytes"):
        read("without")
    read("with", marks_topic="marks")

    async def story():
        given = {"group_id": "aiokafka", "bootstrap_servers": servers, "auto_offset_reset": "earliest"}
        async with asyncio.timeout(WAIT_S), aiokafka.ReplayFilteredConsumer("sources", **given) as consumer:
            found = 0
            while found < 50:
                found += sum(map(len, (await consumer.getmany(timeout_ms=100)).values()))
            with pytest.raises(MarksTooLarge):
                await consumer.commit()

    asyncio.run(story())


def test_where_brokers_can_not_make_the_topic_of_transactions_it_ships_unfenced(cluster, tmp_path, caplog, monkeypatch):
    """identity T3: without a fence it ships "unfenced, with warning and metric; `fence="required"` refuses"."""
    # A coordinator that comes late is waited for 10 s; here none ever comes.
    monkeypatch.setattr(fence_driver, "_TRANSACTIONS_TOPIC_WITHIN_MS", 1_000)

    def opened(fence):
        servers = cluster.bootstrap_servers
        destination = KafkaDestination(bootstrap_servers=servers, fence=fence, retry_backoff_max_ms=500)
        return Outbox.open(
            tmp_path / "outbox", "orders", 2, "test", kafka=destination, config=OutboxConfig(open_timeout_s=WAIT_S)
        )

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


def test_a_topic_that_brokers_make_for_whoever_asks_is_not_made_by_shipping(cluster, tmp_path):
    """Its number of partitions would be fixed by the brokers' default. One that another client made is shipped to."""

    def opened():
        destination = KafkaDestination(bootstrap_servers=cluster.bootstrap_servers, fence="off")
        return Outbox.open(
            tmp_path / "outbox", "made", 3, "test", kafka=destination, config=OutboxConfig(open_timeout_s=WAIT_S)
        )

    with pytest.raises(TopicMissing):
        opened()
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    assert "made" not in admin.list_topics(timeout=WAIT_S).topics
    send(plain_producer(cluster.bootstrap_servers), "made", [(b"of another client", b"v")])
    with opened() as outbox:
        for partition in range(3):
            outbox.append_many(partition, [b"%d" % n for n in range(20)])
        outbox.wait_shipped(WAIT_S)
    assert len(consume(cluster.bootstrap_servers, "made")) == 61
