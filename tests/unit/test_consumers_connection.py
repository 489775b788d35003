"""A consumer's further clients connect to its brokers with the same settings: all connection settings of librdkafka."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, MemberAssignment, MemberDescription

from filtering.consumers.confluent_client import ConfluentMember, connection_of, held_by

WAY = {
    "bootstrap.servers": "127.0.0.1:9",
    "metadata.broker.list": "127.0.0.1:9",
    "metadata.recovery.strategy": "none",
    "metadata.recovery.rebootstrap.trigger.ms": 60_000,
    "client.id": "billing-1",
    "client.dns.lookup": "resolve_canonical_bootstrap_servers_only",
    "broker.address.family": "v4",
    "broker.address.ttl": 500,
    "broker.version.fallback": "0.10.0",
    "api.version.request": True,
    "api.version.request.timeout.ms": 5_000,
    "api.version.fallback.ms": 0,
    "socket.timeout.ms": 5_000,
    "socket.connection.setup.timeout.ms": 5_000,
    "socket.keepalive.enable": True,
    "socket.nagle.disable": False,
    "connections.max.idle.ms": 60_000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "log_level": 0,
    "log.connection.close": False,
}
SECURITY = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.mechanisms": "OAUTHBEARER",
    "sasl.username": "ann",
    "sasl.password": "hush",
    "sasl.kerberos.service.name": "kafka",
    "sasl.oauthbearer.config": "principal=ann",
    "sasl.oauthbearer.method": "default",
    "sasl.oauthbearer.client.secret": "hush",
    "enable.sasl.oauthbearer.unsecure.jwt": False,
    "ssl.endpoint.identification.algorithm": "none",
    "ssl.key.password": "hush",
    "enable.ssl.certificate.verification": False,
}
READING = {
    "group.id": "billing",
    "group.instance.id": "billing-1",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "session.timeout.ms": 6_000,
    "fetch.min.bytes": 1,
    "error_cb": print,
    "stats_cb": print,
    "statistics.interval.ms": 1_000,
}
KINDS = {
    "admin": AdminClient,
    "producer": Producer,
    "consumer": lambda config: Consumer({**config, "group.id": "unused"}),
}


class Joined:
    """A consumer that is a member of a group."""

    def memberid(self):
        return "billing-1-of-the-group"


@pytest.mark.parametrize(
    "name", [*WAY, *SECURITY, "https.ca.location", "https.ca.pem", "plugin.library.paths", "oauth_cb"]
)
def test_what_says_how_to_reach_the_brokers_is_handed_on(name):
    value = {**WAY, **SECURITY}.get(name, "anything")
    assert connection_of({**READING, name: value}) == {name: value}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_client_takes_what_is_handed_on(kind):
    KINDS[kind](connection_of({**READING, **WAY, **SECURITY, "oauth_cb": lambda _: ("token", time.time() + 3600)}))


@pytest.mark.parametrize("name", ["bootstrap.servers", "metadata.broker.list"])
def test_brokers_are_found_by_either_name_of_the_setting(name):
    brokers = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    [broker] = brokers.list_topics(timeout=30).brokers.values()
    client = AdminClient(connection_of({**READING, name: f"{broker.host}:{broker.port}", "log_level": 0}))
    assert [found.port for found in client.list_topics(timeout=30).brokers.values()] == [broker.port]


def test_a_member_asks_its_coordinator_with_a_token_of_its_consumer(monkeypatch):
    """Without a token no broker answers, and each partition seems to belong to another member."""
    monkeypatch.setattr("filtering.consumers.confluent_client.ASK_WITHIN_S", 0.1)
    asked = []

    def token(config):
        asked.append(config)
        return "token", time.time() + 3600

    security = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.config": "x"}
    config = {**READING, **security, "bootstrap.servers": "127.0.0.1:9", "oauth_cb": token}
    assert held_by(connection_of(config), "billing", "billing-1-of-the-group") == set(), "no broker is there"
    assert asked == ["x"]


def test_a_member_that_gets_no_token_to_ask_with_does_not_say_that_it_holds_a_partition(monkeypatch):
    """The client gives up on its token while it is made."""

    def without_token(config):
        raise KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED))

    monkeypatch.setattr("filtering.consumers.confluent_client.AdminClient", without_token)
    assert held_by(connection_of({**READING, **SECURITY}), "billing", "billing-1-of-the-group") == set()


class Answering:
    """An admin client that waits for its token in its constructor, and then learns that a member has orders-0."""

    def __init__(self, token):
        assert token.wait(60), "nobody gave a token"

    def describe_consumer_groups(self, groups, request_timeout):
        assigned = MemberAssignment([TopicPartition("orders", 0)])
        member = MemberDescription("billing-1-of-the-group", "billing-1", "127.0.0.1", assigned)
        answer = Future()
        answer.set_result(SimpleNamespace(members=[member]))
        return {groups[0]: answer}


def test_a_service_that_hands_out_no_token_holds_no_reader_and_what_is_told_later_counts(monkeypatch):
    """The client waits for its token for 10 s, at each look: who waited with it would hardly read."""
    token = threading.Event()
    monkeypatch.setattr("filtering.consumers.confluent_client.AdminClient", lambda _: Answering(token))
    member = ConfluentMember(Joined(), {**READING, **SECURITY}, "billing")
    try:
        assert not member.is_held("orders", 0)
        assert not member.is_held("orders", 1)
    finally:
        token.set()
    deadline_s = time.monotonic() + 60
    while not member.is_held("orders", 0):
        assert time.monotonic() < deadline_s, "the answer is never told"
        time.sleep(0.01)
    assert not member.is_held("orders", 1)
