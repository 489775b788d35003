"""A topic that changes while it is shipped to: what it loses, and settings that would lose or hide records."""

from contextlib import ExitStack

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import DestinationRefused, KafkaDestination, TopicLostRecords, sink, sink_session
from pushrep.kafka.answers import Code
from pushrep.kafka.progress import read_progress
from pushrep.kafka.topic import look_at_topic
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.records import BatchHeader
from tests.integration.outboxes import wait_until
from tests.kafka.coordinator_client import send_under
from tests.kafka.plain_client import alter_topic, consume, create_topic, wait_known
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(sink_session, "WATCH_S", 0.2)
    monkeypatch.setattr(sink_session, "STOPPED_RETRY_MS", 200)
    monkeypatch.setattr(sink, "_REFUSED_RETRY_S", 0.2)


def test_it_is_looked_at_once_a_minute_at_least(monkeypatch):
    monkeypatch.undo()
    assert sink_session.WATCH_S < 60


@pytest.fixture
def topic(broker, request):
    """A topic's name that no other test has; the test makes the topic."""
    return request.node.name.removeprefix("test_")[:100].rstrip("]").replace("[", "-")


@pytest.fixture
def opened(broker, topic, tmp_path):
    def open_outbox(partitions=1, **settings):
        destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20)
        defaults = {"open_timeout_s": WAIT_S, "durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
        return Outbox.open(
            tmp_path / "outbox", topic, partitions, "test", **outbox_arguments(kafka=destination, **defaults | settings)
        )

    return open_outbox


def cut_tail(broker, topic, keep):
    """Take all but the first records off the end of a topic, as an unclean election does: by the file of its broker."""
    broker.kill()
    directory = broker.log_directory() / f"{topic}-0"
    file = directory / "00000000000000000000.log"
    data = file.read_bytes()
    at = 0
    while (header := BatchHeader.parse(data, at)).next_offset <= keep:
        at += header.size_bytes
        if at >= len(data) or not any(data[at : at + 61]):
            break
    file.write_bytes(data[:at])
    for other in directory.iterdir():
        if other.suffix in {".index", ".timeindex", ".snapshot"}:
            other.unlink()
    broker.start()
    broker.wait_ready()


def append(outbox, label, count, partition=0):
    outbox.append_many(partition, [f"{label} {n}".encode() for n in range(count)]).result(WAIT_S)


def in_topic(broker, topic):
    return [one.value for one in consume(broker.bootstrap_servers, topic)]


def test_what_a_topic_loses_is_said_and_sent_again(broker, topic, opened, tmp_path, capsys):
    """identity T2: `TopicLostRecords` with the range while running, and at an open; `outbox rebase` sends it again."""
    create_topic(broker.bootstrap_servers, topic)
    with opened(2) as outbox:
        for label in ("one", "two", "three"):
            append(outbox, label, 100)
            append(outbox, f"of 1: {label}", 10, partition=1)
            outbox.wait_shipped(WAIT_S)
        cut_tail(broker, topic, consume(broker.bootstrap_servers, topic)[110].offset)
        wait_until(lambda: "has lost" in (outbox.lag()[f"kafka:{topic}"].trouble or ""), "it is seen")
        with pytest.raises(TopicLostRecords) as caught:
            outbox.wait_shipped(WAIT_S)
        assert caught.value.lost == {0: (100, 300), 1: (10, 30)}
        noted = read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic].lost
        assert noted == caught.value.lost, "on disk: behind a kill -9 the topic may have grown, which would hide it"
        assert outbox.lag()[f"kafka:{topic}"].records == 220
        append(outbox, "appended meanwhile", 5)
    with pytest.raises(TopicLostRecords, match="pushrep outbox rebase"):
        opened(2)
    rebase = ["outbox", "rebase", str(tmp_path / "outbox"), "--bootstrap-servers", broker.bootstrap_servers]
    assert run([*rebase, "--dry-run"]) == 0
    assert "partition 0: the topic has lost [100, 300): the next start would send" in capsys.readouterr().out
    assert read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic].lost == noted, "nothing was changed"
    assert run(rebase) == 0
    with opened(2) as outbox:
        outbox.wait_shipped(WAIT_S)
        logs = [[record.value for record in outbox.log(n).records(0)] for n in range(2)]
    found = in_topic(broker, topic)
    assert [value for value in found if not value.startswith(b"of 1")] == logs[0]
    assert [value for value in found if value.startswith(b"of 1")] == logs[1]


def send_again(directory, servers):
    for command in (["outbox", "rebase"], ["ship"]):
        assert run([*command, str(directory), "--bootstrap-servers", servers]) == 0


def leader_of(cluster, topic):
    """The id of the broker that leads partition 0, -1 for none."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions[0].leader


@pytest.mark.timeout(600)
def test_an_unclean_election_is_said_by_a_running_service(request, tmp_path, torture):
    """identity T2: a broker that lacks acknowledged records is elected, the one that has them cuts its log."""
    if not torture.is_long:
        pytest.skip("the tail that is cut by hand above is the short form")
    cluster, topic = request.getfixturevalue("three_brokers"), "unclean-election"
    servers, first, second = cluster.bootstrap_servers, 2, 3
    admin = AdminClient({"bootstrap.servers": servers})
    settings = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    wanted = NewTopic(topic, 1, replica_assignment=[[first, second]], config=settings)
    admin.create_topics([wanted])[topic].result(WAIT_S)
    wait_known(servers, topic, 1)
    destination = KafkaDestination(bootstrap_servers=servers, retry_backoff_ms=20)
    with Outbox.open(
        tmp_path / "outbox", topic, 1, "test", kafka=destination, config=OutboxConfig(open_timeout_s=WAIT_S)
    ) as outbox:
        append(outbox, "both", 100)
        outbox.wait_shipped(WAIT_S)
        cluster.kill(second)
        append(outbox, "one", 50)
        outbox.wait_shipped(WAIT_S)
        cluster.kill(first)
        cluster.start(second)
        wait_until(lambda: leader_of(cluster, topic) == second, "the broker that lacks records leads")
        cluster.start(first)
        cluster.wait_ready()
        wait_until(lambda: "has lost" in (outbox.lag()[f"kafka:{topic}"].trouble or ""), "it is seen")
        with pytest.raises(TopicLostRecords) as caught:
            outbox.wait_shipped(WAIT_S)
        assert caught.value.lost == {0: (100, 150)}
    send_again(tmp_path / "outbox", servers)
    found = [one.value for one in consume(servers, topic)]
    assert found == [b"both %d" % n for n in range(100)] + [b"one %d" % n for n in range(50)]


@pytest.mark.parametrize("is_refused", [False, True], ids=["watch", "refusal"])
def test_settings_that_would_lose_records_stop_a_running_service(broker, topic, opened, monkeypatch, is_refused):
    """identity T5: "Settings of the topic that would lose or hide records ... are looked at again while running, at
    least once a minute and on each refusal".
    """
    if is_refused:
        monkeypatch.setattr(sink_session, "WATCH_S", 1000)
    create_topic(broker.bootstrap_servers, topic, max_message_bytes=5_000)
    with opened(batch_bytes=4_000) as outbox:
        append(outbox, "before", 10)
        outbox.wait_shipped(WAIT_S)
        if is_refused:
            outbox.append(0, bytes(6_000)).result(WAIT_S)  # is not sent: the topic takes no such record
            wait_until(lambda: outbox.lag()[f"kafka:{topic}"].stopped, "it stops its partition")
        alter_topic(broker.bootstrap_servers, topic, cleanup_policy="compact")
        state = outbox.facts.shipping.sink.state
        wait_until(lambda: state.refusal is not None, "the setting is seen")
        if not is_refused:
            append(outbox, "is not sent now", 1)
        with pytest.raises(DestinationRefused) as caught:
            outbox.wait_shipped(0)
        assert caught.value.setting == "cleanup.policy"
        alter_topic(broker.bootstrap_servers, topic, max_message_bytes=20_000, cleanup_policy="delete")
        wait_until(lambda: outbox.lag()[f"kafka:{topic}"].records == 0, "it goes on")
        outbox.wait_shipped(WAIT_S)
    assert len(in_topic(broker, topic)) == 11


def test_one_lost_record_is_not_hidden_by_the_marker_of_the_next_start(broker, topic, opened, tmp_path):
    """identity T2: a topic's end is looked at before the fence adds to it."""
    create_topic(broker.bootstrap_servers, topic)
    with opened() as outbox:
        append(outbox, "one", 100)
        outbox.wait_shipped(WAIT_S)
        append(outbox, "two", 1)
        outbox.wait_shipped(WAIT_S)
    cut_tail(broker, topic, consume(broker.bootstrap_servers, topic)[100].offset)
    with pytest.raises(TopicLostRecords) as caught:
        opened()
    assert caught.value.lost == {0: (100, 101)}
    with pytest.raises(TopicLostRecords):
        opened()
    send_again(tmp_path / "outbox", broker.bootstrap_servers)
    assert in_topic(broker, topic) == [b"one %d" % n for n in range(100)] + [b"two 0"]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_what_a_topic_lost_is_not_hidden_by_what_others_wrote_since(
    broker, topic, opened, tmp_path, monkeypatch, is_open
):
    """identity T2: its end is no lower than it was, but where our newest record lay is another's."""
    monkeypatch.setattr(sink_session, "WATCH_S", 1000)  # what is sent next meets the broker first
    servers = broker.bootstrap_servers
    create_topic(servers, topic)
    with ExitStack() as stack:
        outbox = stack.enter_context(opened())
        for label in ("one", "two"):
            append(outbox, label, 100)
            outbox.wait_shipped(WAIT_S)
        if not is_open:
            stack.close()
        cut_tail(broker, topic, consume(servers, topic)[110].offset)
        others = Producer({"bootstrap.servers": servers})
        for _ in range(500):
            others.produce(topic, b"of others")
        others.flush(WAIT_S)
        if is_open:
            append(outbox, "three", 100)
        with pytest.raises(TopicLostRecords) as caught:
            outbox.wait_shipped(WAIT_S) if is_open else opened()
        assert caught.value.lost == {0: (100, 200)}
    send_again(tmp_path / "outbox", servers)
    labels = ["one", "two", "three"][: 2 + is_open]
    found = [value for value in in_topic(broker, topic) if value != b"of others"]
    assert found == [b"%s %d" % (label.encode(), n) for label in labels for n in range(100)]


def test_a_topic_made_again_between_look_and_ship_has_lost_nothing(broker, topic, opened, monkeypatch):
    """identity T2: it is another topic, which is shipped to from the logs' start."""
    create_topic(broker.bootstrap_servers, topic)
    with opened() as outbox:
        append(outbox, "one", 100)
        outbox.wait_shipped(WAIT_S)
    admin, looks = AdminClient({"bootstrap.servers": broker.bootstrap_servers}), []

    def look_then_make_again(*given):
        facts = look_at_topic(*given)
        if not looks:
            admin.delete_topics([topic])[topic].result(WAIT_S)
            create_topic(broker.bootstrap_servers, topic)
        looks.append(facts.topic_id)
        return facts

    monkeypatch.setattr(sink, "look_at_topic", look_then_make_again)
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
        assert len(set(looks)) == 2
    assert in_topic(broker, topic) == [b"one %d" % n for n in range(100)]


def test_a_partition_that_lost_only_its_marker_is_fenced_anew(broker, topic, opened):
    """faults B3: "An end below its marker: fence anew"; an older instance's batches would be taken there."""
    servers = broker.bootstrap_servers
    create_topic(servers, topic)
    with opened() as outbox:
        append(outbox, "one", 100)
        outbox.wait_shipped(WAIT_S)
    with opened() as outbox:
        fence = outbox.facts.shipping.sink.fencing.newest
        older = fence.producer
        cut_tail(broker, topic, consume(servers, topic)[-1].offset + 1)
        wait_until(lambda: fence.producer > older and fence.is_standing, "it is fenced anew")
        assert send_under(servers, topic, [0], older) == {0: Code.INVALID_PRODUCER_EPOCH}
        append(outbox, "two", 10)
        outbox.wait_shipped(WAIT_S)
    assert in_topic(broker, topic) == [b"one %d" % n for n in range(100)] + [b"two %d" % n for n in range(10)]
