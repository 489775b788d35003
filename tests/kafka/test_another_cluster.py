"""Brokers of another cluster at a known address, brokers that moved, and brokers that do not answer."""

import signal
import socket

import pytest

from pushrep.kafka import AnotherCluster, KafkaDestination, sink_state
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox
from tests.integration.outboxes import wait_until
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.plain_client import consume, create_topic, delete_topic
from tests.kafka.spoiling import SpoilingProxy
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120


def opened(directory, topic, servers, **settings):
    destination = KafkaDestination(bootstrap_servers=servers, retry_backoff_ms=20)
    defaults = {"open_timeout_s": WAIT_S, "durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
    return Outbox.open(directory, topic, 1, "test", **outbox_arguments(kafka=destination, **defaults | settings))


def trouble(outbox):
    [lag] = outbox.lag().values()
    return lag.trouble or ""


def test_another_cluster_at_the_same_address_gets_nothing(tool_or_skip, tmp_path):
    """faults B5: "another cluster at a known address ... is closed and forgotten; if only such answer: AnotherCluster,
    never "made anew"".
    """
    tool_or_skip(missing())
    with KafkaCluster(tmp_path / "one") as one:
        create_topic(servers := one.bootstrap_servers, "orders")
        with opened(tmp_path / "outbox", "orders", servers) as outbox:
            outbox.append_many(0, [b"before"] * 20)
            outbox.wait_shipped(WAIT_S)
            one.kill()
            with KafkaCluster(tmp_path / "two", at=one) as two:
                assert two.bootstrap_servers == servers
                create_topic(servers, "orders")
                outbox.append_many(0, [b"behind"] * 20)
                wait_until(lambda: f"answers as cluster {two.cluster_id}" in trouble(outbox), "the cluster is another")
                with pytest.raises(AnotherCluster) as caught:
                    outbox.wait_shipped(WAIT_S)
                assert (caught.value.expected, caught.value.found) == (one.cluster_id, two.cluster_id)
                outbox.close()
                with pytest.raises(AnotherCluster, match="pushrep outbox skip all"):
                    opened(tmp_path / "outbox", "orders", servers)
                assert consume(servers, "orders") == []
        one.start()
        one.wait_ready()
        with opened(tmp_path / "outbox", "orders", servers) as outbox:
            outbox.wait_shipped(WAIT_S)
        assert [record.value for record in consume(servers, "orders")] == [b"before"] * 20 + [b"behind"] * 20


def test_brokers_that_were_seen_are_asked_where_the_first_address_is_gone(broker, tmp_path):
    """faults B5: "Brokers that were seen alive are remembered beside `bootstrap_servers`, across sessions"."""
    servers, topic = broker.bootstrap_servers, "moved"
    create_topic(servers, topic)
    with SpoilingProxy() as first:
        first.target = int(servers.rpartition(":")[2])
        outbox = opened(tmp_path, topic, f"127.0.0.1:{first.port}")
        outbox.append_many(0, [b"before"] * 20)
        outbox.wait_shipped(WAIT_S)
    with outbox:
        delete_topic(servers, topic)
        create_topic(servers, topic)  # ends the session
        outbox.append_many(0, [b"behind"] * 20)
        wait_until(lambda: len(consume(servers, topic)) == 40, "another session ships", 0.2)


def test_brokers_that_do_not_answer_are_said(broker, tmp_path, monkeypatch):
    """faults S4: "in trouble after 5 s, whether its address refuses, hangs or is wrong; the text says which"."""
    monkeypatch.setattr(sink_state, "IN_TROUBLE_MS", 500)
    servers, topic = broker.bootstrap_servers, "hangs"
    create_topic(servers, topic)
    with opened(tmp_path, topic, servers) as outbox:
        outbox.append(0, b"before")
        outbox.wait_shipped(WAIT_S)
        broker.send_signal(signal.SIGSTOP)
        try:
            outbox.append(0, b"meanwhile")
            outbox.flush()
            wait_until(lambda: f"at {servers} does not answer" in trouble(outbox), "it hangs")
        finally:
            broker.send_signal(signal.SIGCONT)
        outbox.wait_shipped(WAIT_S)
        wait_until(lambda: not trouble(outbox), "it answers")
        broker.kill()
        outbox.append(0, b"while it is away")
        outbox.flush()
        wait_until(lambda: "Connect" in trouble(outbox), "it refuses")
        broker.start()
        broker.wait_ready()
        outbox.wait_shipped(WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        with opened(tmp_path, topic, address, open_timeout_s=0.1) as outbox:
            assert f"{address} have not answered" in trouble(outbox)
    with opened(tmp_path, topic, "no-such-host.invalid:9092", open_timeout_s=0.1) as outbox:
        wait_until(lambda: "resolve" in trouble(outbox), "the name is wrong")
