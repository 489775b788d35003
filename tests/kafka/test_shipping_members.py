"""What the members of an outbox store about its destinations: the number of partitions used, by the topic's id.

destinations.json is on one disk only: the next leader does not have it, and the topic may have grown.
"""

import json
import time
from uuid import UUID

import pytest
from confluent_kafka import Consumer, TopicPartition

from pushrep.cli.main import run
from pushrep.election.grants import Destination
from pushrep.kafka import DestinationRefused, KafkaDestination, RecordsParked
from pushrep.log import LogConfig
from pushrep.outbox import Acks, Outbox, OutboxConfig
from pushrep.outbox.destinations import repartition
from pushrep.outbox.promotion import promote
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from tests.integration.outboxes import wait_until
from tests.kafka.plain_client import add_partitions, consume, create_topic
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, shutdown_timeout_ms=200)


@pytest.fixture
def node(tmp_path):
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    with ReplicaNode(tmp_path / "node", settings) as running:
        yield running


@pytest.fixture
def opened(broker, node, tmp_path, request):
    """Open the outbox, whose one replica is `node`, with the test's topic as destination."""
    topic = request.node.name.removeprefix("test_")[:100]

    def open_outbox(**more):
        given = {
            "replicas": [str(node.address)], "acks": Acks.ALL, "push": QUICK, "open_timeout_s": WAIT_S,
            "log_config": LogConfig(preallocate_bytes=0),
            "kafka": KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20),
        }  # fmt: skip
        return Outbox.open(tmp_path / "outbox", topic, 4, "test", **outbox_arguments(**given | more))

    create_topic(broker.bootstrap_servers, topic, 2)
    open_outbox.topic = topic
    return open_outbox


def kept_by(node):
    """(topic id, n) as the node has it on disk."""
    [promises] = node.directory.glob("*/promises.json")
    return [(UUID(one), n) for one, n in json.loads(promises.read_text())["grant"]["destinations"]]


def test_a_member_that_lost_the_file_uses_as_many_partitions_as_before(broker, node, opened, tmp_path):
    """Contract: a grant says "per destination (topic id, n)"; "n is fixed at first use"."""
    with opened() as outbox:
        for partition in range(4):
            outbox.append_many(partition, [b"one"] * 20)
        outbox.wait_shipped(WAIT_S)
        [(topic_id, n)] = kept_by(node)
        assert (topic_id, n) == (outbox.facts.shipping.sink.state.progress.topic_id, 2)
        assert outbox.facts.replication.grant.destinations == (Destination(topic_id, 2),)
    (tmp_path / "outbox" / "destinations.json").unlink()
    add_partitions(broker.bootstrap_servers, opened.topic, 4)
    with opened() as outbox:
        outbox.append_many(3, [b"two"] * 20)
        outbox.wait_shipped(WAIT_S)
        logs = {partition: list(outbox.log(partition).records(0)) for partition in range(4)}
        pid = outbox.pid
    assert consume(broker.bootstrap_servers, opened.topic, 3) == []
    found = read_filtered(broker.bootstrap_servers, opened.topic, 4)
    assert all(same(found.of(pid, partition), records) for partition, records in logs.items())
    assert found.copies == 0, "what the topic held was found there"


def test_after_a_repartition_the_file_has_to_be_there(broker, node, opened, tmp_path):
    """Several partition counts were used in turn, and only destinations.json has the offsets where each begins."""
    file = tmp_path / "outbox" / "destinations.json"
    with opened() as outbox:
        outbox.append_many(3, [b"one"] * 20)
        outbox.wait_shipped(WAIT_S)
    add_partitions(broker.bootstrap_servers, opened.topic, 4)
    repartition(tmp_path / "outbox")
    with opened() as outbox:
        outbox.append_many(3, [b"two"] * 20)
        outbox.wait_shipped(WAIT_S)
        assert [n for _, n in kept_by(node)] == [2, 4]
    saved = file.read_bytes()
    file.unlink()
    with pytest.raises(DestinationRefused, match=r"used 2, 4 of them in turn.*copy it") as caught:
        opened()
    assert caught.value.setting == "partitions"
    file.write_bytes(saved)
    with opened() as outbox:
        outbox.append_many(3, [b"three"] * 20)
        outbox.wait_shipped(WAIT_S)
    assert [len(consume(broker.bootstrap_servers, opened.topic, partition)) for partition in range(4)] == [0, 20, 0, 40]


def test_a_clean_failover_ships_nothing_twice(broker, node, opened, tmp_path):
    """identity T1, a mirror image: the promoted member finds in the topic, by content, what its old leader shipped."""
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    with ReplicaNode(tmp_path / "other", settings) as other:
        with opened(replicas=[str(node.address), str(other.address)]) as outbox:
            for partition in range(4):
                outbox.append_many(partition, [b"one"] * 20)
            outbox.wait_shipped(WAIT_S)
            outbox_id = outbox.identity.outbox_id
            outbox.append_many(1, [b"perhaps not shipped"] * 20).result(WAIT_S)
        directory = tmp_path / "node" / outbox_id
        with node.hand_over(UUID(outbox_id)) as last_contact:
            done = promote(directory, push=QUICK, last_contact=last_contact, timeout_s=WAIT_S)
        kafka = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20)
        with Outbox.open(
            directory,
            opened.topic,
            4,
            "test",
            replicas=list(done.replicas),
            acks=Acks.ALL,
            kafka=kafka,
            config=OutboxConfig(push=QUICK, open_timeout_s=WAIT_S, log_config=LogConfig(preallocate_bytes=0)),
        ) as promoted:
            promoted.append_many(2, [b"two"] * 20)
            promoted.wait_shipped(WAIT_S)
            logs, pid = {n: list(promoted.log(n).records(0)) for n in range(4)}, promoted.pid
    found = read_filtered(broker.bootstrap_servers, opened.topic, 2)
    assert all(same(found.of(pid, partition), records) for partition, records in logs.items())
    assert found.copies == 0


def test_a_promoted_member_passes_what_the_old_leader_parked(broker, node, opened, tmp_path):
    """faults B7: the parking log is made under a new grant when `park` is first asked for, and pushed like the others:
    the next leader does not have destinations.json, and neither sends what is parked nor parks it again.
    """
    parks = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20, on_refused="park")
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    with ReplicaNode(tmp_path / "other", settings) as other:
        members = [str(node.address), str(other.address)]
        with opened(replicas=members) as outbox:
            outbox.append_many(0, [b"one"] * 20)
            outbox.wait_shipped(WAIT_S)
        with opened(replicas=members, kafka=parks) as outbox:
            ahead = time.time_ns() // 1_000_000 + 7_200_000
            outbox.append_many(0, [b"a", b"ahead", b"c"], timestamps_ms=[1, ahead, ahead - 7_200_000])
            with pytest.raises(RecordsParked, match="offset 21 of partition 0"):
                outbox.wait_shipped(WAIT_S)
            outbox_id = outbox.identity.outbox_id
        directory = tmp_path / "node" / outbox_id
        with node.hand_over(UUID(outbox_id)) as last_contact:
            done = promote(directory, push=QUICK, last_contact=last_contact, timeout_s=WAIT_S)
        with Outbox.open(
            directory,
            opened.topic,
            4,
            "test",
            replicas=list(done.replicas),
            acks=Acks.ALL,
            kafka=parks,
            config=OutboxConfig(push=QUICK, open_timeout_s=WAIT_S, log_config=LogConfig(preallocate_bytes=0)),
        ) as promoted:
            promoted.append_many(0, [b"two"] * 20)
            with pytest.raises(RecordsParked, match="offset 21 of partition 0"):
                promoted.wait_shipped(WAIT_S)
            parking = promoted.facts.shipping.parking
            assert [one.offset for one in parking.all()] == [21]
            assert run(["outbox", "parked", "done", "0", "--directory", str(directory)]) == 0
            promoted.wait_shipped(WAIT_S)
            records, pid = list(promoted.log(0).records(0)), promoted.pid
        wait_until(
            lambda: list((tmp_path / "other").glob("*/*.parked-4")), "the other member holds the parking log, too"
        )
    del records[21]
    assert same(read_filtered(broker.bootstrap_servers, opened.topic, 2).of(pid, 0), records)


def test_an_open_without_a_grant_sends_nothing_and_shuts_nobody_out(broker, node, opened):
    """identity T3: another member may lead, and its batches are to be taken."""
    m_of_one = {"min_insync_replicas": 1}  # so that a lead needs both
    with opened(**m_of_one) as outbox:
        outbox.append(0, b"granted").result(WAIT_S)
        outbox.wait_shipped(WAIT_S)
    before = topic_ends(broker, opened.topic)
    node.stop()
    with opened(acks=Acks.LOCAL, open_timeout_s=0.2, **m_of_one) as outbox:
        outbox.append(0, b"without a grant").result(WAIT_S)
        wait_until(lambda: "too few members" in (outbox.lag()[f"kafka:{opened.topic}"].trouble or ""), "it waits")
        assert topic_ends(broker, opened.topic) == before, "neither records nor the fence's markers"


def topic_ends(broker, topic):
    """Markers counted."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "nobody"})
    try:
        return [consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=WAIT_S)[1] for n in range(2)]
    finally:
        consumer.close()
