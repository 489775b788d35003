"""A topic with a partition that has no leader: the others are fenced, matched and shipped, at an opening as while
running; it follows when it has one.

Three brokers with a partition each, and no copies; that of partition 0 is killed.
"""

import re
import signal

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from pushrep.kafka import KafkaDestination, fence_rules, sink_state
from pushrep.kafka.answers import Code
from pushrep.kafka.fence_rules import Fence
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox
from tests.integration.outboxes import wait_until
from tests.kafka.coordinator_client import send_under
from tests.kafka.plain_client import wait_known
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
AWAY = 2
"""The broker that has the only copy of partition 0."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(sink_state, "IN_TROUBLE_MS", 300)
    monkeypatch.setattr(fence_rules, "MARKER_WITHIN_MS", 1_000)


def is_made(admin, wanted):
    """False while a broker that has just started has no place for a partition."""
    try:
        admin.create_topics([wanted])[wanted.topic].result(WAIT_S)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.INVALID_REPLICA_ASSIGNMENT:
            raise
        return False
    return True


@pytest.fixture
def topic(three_brokers, request):
    name = request.node.name.removeprefix("test_")[:100]
    admin = AdminClient({"bootstrap.servers": three_brokers.bootstrap_servers, "log_level": 0})
    wanted = NewTopic(name, 3, replica_assignment=[[AWAY], [1], [3]], config={"min.insync.replicas": "1"})
    wait_until(lambda: is_made(admin, wanted), "all brokers are there")
    wait_known(three_brokers.bootstrap_servers, name, 3)
    yield name
    if not three_brokers.is_running(AWAY):
        three_brokers.start(AWAY)
    three_brokers.wait_ready()


@pytest.fixture
def opened(three_brokers, topic, tmp_path):
    def open_outbox(name="outbox", fence="preferred", **settings):
        servers = three_brokers.bootstrap_servers
        destination = KafkaDestination(bootstrap_servers=servers, retry_backoff_ms=20, fence=fence)
        defaults = {"open_timeout_s": WAIT_S, "durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
        given = outbox_arguments(kafka=destination, **defaults | settings)
        return Outbox.open(tmp_path / name, topic, 3, "test", **given)

    return open_outbox


def append(outbox, label):
    for partition in range(3):
        outbox.append_many(partition, [f"{label} {n}".encode() for n in range(20)])
    outbox.flush()


def acknowledged(outbox):
    return [outbox.facts.shipping.sink.needed_from(partition) for partition in range(3)]


def trouble(outbox):
    [lag] = outbox.lag().values()
    return lag.trouble


def assert_each_once(cluster, topic, outbox):
    found = read_filtered(cluster.bootstrap_servers, topic, 3)
    for partition in range(3):
        assert same(found.of(outbox.pid, partition), list(outbox.log(partition).records(0))), f"partition {partition}"
    assert found.copies == 0


def test_the_others_are_shipped_at_an_opening_as_while_running(three_brokers, topic, opened):
    """faults B3: "one without a leader keeps nobody else waiting, at an opening as while running", `fence` any."""
    for fence in ("preferred", "off"):
        with opened(fence, fence) as outbox:
            append(outbox, "before")
            outbox.wait_shipped(WAIT_S)
    three_brokers.kill(AWAY)
    for fence in ("preferred", "off"):
        with opened(fence, fence) as outbox:
            append(outbox, "after a deploy")
            wait_until(lambda: acknowledged(outbox)[1:] == [40, 40], "the others are shipped")
            append(outbox, "while running")
            wait_until(lambda: acknowledged(outbox) == [20, 60, 60], "the others are shipped, and that one is not")
            wait_until(
                lambda: f"{topic}-0 has no leader" in (outbox.lag()[f"kafka:{topic}"].trouble or ""), "it is said"
            )
    with opened("preferred") as outbox:
        append(outbox, "until it is back")
        wait_until(lambda: acknowledged(outbox)[1:] == [80, 80], "the others are shipped")
        three_brokers.start(AWAY)
        outbox.wait_shipped(WAIT_S)
        assert outbox.facts.shipping.sink.fencing.newest.is_standing
        wait_until(lambda: trouble(outbox) is None, "nothing is in the way")
        assert_each_once(three_brokers, topic, outbox)
    with opened("off", "off") as outbox:
        outbox.wait_shipped(WAIT_S)
        assert_each_once(three_brokers, topic, outbox)


def test_a_marker_that_never_comes_is_asked_for_again(three_brokers, topic, opened, monkeypatch):
    """faults B3: "Kafka 4.3.1 drops the marker of a leaderless partition, reports CompleteAbort, ... a second
    transaction over that partition alone fenced it while the others went on under the earlier epoch".
    """
    with opened() as outbox:
        append(outbox, "before")
        outbox.wait_shipped(WAIT_S)
        older = outbox.facts.shipping.sink.fencing.newest.producer
    added, listed = Fence.on, []

    def away(self, event):
        effect = added(self, event)
        if isinstance(effect, fence_rules.AddPartitions):
            listed.append(effect.partitions)
        is_listed = isinstance(effect, fence_rules.AbortTransaction) and 0 in listed[-1]
        if is_listed and three_brokers.is_running(AWAY) and not any(0 in one for one in listed[:-1]):
            three_brokers.kill(AWAY)
        return effect

    monkeypatch.setattr(Fence, "on", away)
    with opened() as outbox:
        append(outbox, "meanwhile")
        wait_until(lambda: acknowledged(outbox)[1:] == [40, 40], "the others are shipped")
        earlier = outbox.facts.shipping.sink.fencing.newest.producer
        assert acknowledged(outbox)[0] == 20
        assert any(0 in one for one in listed)
        three_brokers.start(AWAY)
        append(outbox, "when it is back")
        outbox.wait_shipped(WAIT_S)
        assert listed[-1] == [0], "a transaction for it alone"
        assert outbox.facts.shipping.sink.fencing.newest.producer > earlier
        refused = dict.fromkeys(range(3), Code.INVALID_PRODUCER_EPOCH)
        assert send_under(three_brokers.bootstrap_servers, topic, range(3), older, 60) == refused
        assert_each_once(three_brokers, topic, outbox)


def test_a_broker_that_hangs_keeps_no_partition_of_another_one_waiting(three_brokers, topic, opened):
    """faults B3, S4: while running and at an opening; and it is said which."""
    with opened() as outbox:
        append(outbox, "before")
        outbox.wait_shipped(WAIT_S)
        three_brokers.send_signal(signal.SIGSTOP, AWAY)
        try:
            append(outbox, "while running")
            wait_until(lambda: acknowledged(outbox)[1:] == [40, 40], "the others are shipped")
            said = re.compile(rf"broker {AWAY} at .* does not answer|{topic}-0 has no leader")
            wait_until(lambda: said.search(trouble(outbox) or ""), "it is said")
            outbox.close()
            with opened() as again:
                append(again, "after a deploy")
                wait_until(lambda: acknowledged(again)[1:] == [60, 60], "the others are shipped")
        finally:
            three_brokers.send_signal(signal.SIGCONT, AWAY)
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
        assert_each_once(three_brokers, topic, outbox)
