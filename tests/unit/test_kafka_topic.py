"""What a topic's leader reports about producers, and the errors if no broker can answer."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Uuid
from confluent_kafka.admin import ResourceType

from pushrep import KafkaDestination, Outbox, OutboxConfig
from pushrep.errors import BadArgument
from pushrep.kafka.destination import destination_of
from pushrep.kafka.errors import KafkaUnreachable, ShippingTimeout
from pushrep.kafka.topic import look_at_topic
from tests.integration.outboxes import WAIT_S, wait_until


def done(answer):
    future = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


OF_TOPIC = {
    "cleanup.policy": "delete", "max.message.bytes": "1048588", "retention.ms": "-1", "delete.retention.ms": "1000",
    "message.timestamp.type": "CreateTime",
}  # fmt: skip
EXPIRATIONS = "producer.id.expiration.ms", "transactional.id.expiration.ms"


class Admin:
    """Answers with what it was made with: who leads the topic's partitions, and what each broker says of itself."""

    def __init__(self, leaders=(1,), brokers=None):
        self.leaders, self.brokers = leaders, brokers or {}

    def __call__(self, _settings):
        return self

    def describe_topics(self, topics):
        partitions = [SimpleNamespace(leader=None if one is None else SimpleNamespace(id=one)) for one in self.leaders]
        return {"orders": done(SimpleNamespace(topic_id=Uuid(7, 7), partitions=partitions))}

    def describe_cluster(self):
        return done(SimpleNamespace(cluster_id="a cluster"))

    def describe_configs(self, resources):
        (resource,) = resources
        answer = OF_TOPIC
        if resource.restype == ResourceType.BROKER:
            answer = self.brokers[resource.name]
            if not isinstance(answer, Exception):
                answer = dict.fromkeys(EXPIRATIONS, answer)
        if not isinstance(answer, Exception):
            answer = {name: SimpleNamespace(value=value, source=5) for name, value in answer.items()}
        return {resource: done(answer)}


@pytest.fixture
def looked(monkeypatch):
    """The facts, as a cluster shows them."""

    def look(**cluster):
        monkeypatch.setattr("pushrep.kafka.topic.AdminClient", Admin(**cluster))
        return look_at_topic(KafkaDestination(bootstrap_servers="127.0.0.1:1"), "orders")

    return look


def refused(code):
    return KafkaException(KafkaError(code))


def test_any_leader_will_do_and_none_is_waited_for(looked):
    facts = looked(leaders=[None, -1, 3, 1], brokers={"3": "1000"})
    assert (facts.partitions, facts.producer_id_expiration_ms) == (4, 1000)
    with pytest.raises(KafkaUnreachable, match="no partition of topic orders has a leader now"):
        looked(leaders=[None, -1])


def test_who_may_not_ask_takes_the_brokers_default(looked):
    def expirations_ms(answer):
        facts = looked(brokers={"1": answer})
        return facts.producer_id_expiration_ms, facts.transactional_id_expiration_ms

    assert expirations_ms("1000") == (1000, 1000)
    for answer in (refused(KafkaError.CLUSTER_AUTHORIZATION_FAILED), refused(KafkaError.UNSUPPORTED_VERSION), None):
        assert expirations_ms(answer) == (86_400_000, 604_800_000)


@pytest.mark.parametrize(
    "failure", [refused(KafkaError._TIMED_OUT), refused(KafkaError._TRANSPORT), TimeoutError()], ids=repr
)
def test_a_broker_that_does_not_answer_now_may_forget_sooner_than_by_the_default(looked, failure):
    with pytest.raises(KafkaUnreachable):
        looked(brokers={"1": failure})


def test_certificates_that_can_not_be_read_now_are_read_again_and_end_no_shipping(tmp_path, monkeypatch):
    """Files are replaced while a service runs, and the topic is looked at every half minute."""
    missing = KafkaDestination(bootstrap_servers="127.0.0.1:1", security_protocol="SSL", ssl_cafile=tmp_path / "ca.pem")
    with pytest.raises(KafkaUnreachable, match=r"ssl\.ca\.location"):
        look_at_topic(missing, "orders")
    looks = []
    monkeypatch.setattr("pushrep.kafka.sink.look_at_topic", lambda *of: looks.append(of) or look_at_topic(*of))
    destination = replace(missing, retry_backoff_ms=1, retry_backoff_max_ms=1)
    with Outbox.open(
        tmp_path / "outbox", "orders", 1, "test", kafka=destination, config=OutboxConfig(open_timeout_s=0.0)
    ) as outbox:
        outbox.append(0, b"waits").result(WAIT_S)
        wait_until(lambda: len(looks) > 2, "it is tried again")
        waits_ms = [given.request_timeout_ms for given, _ in looks[:3]]
        assert waits_ms == [5_000, 10_000, 20_000], "a broker that hangs is soon given up for another one"
        assert "ssl.ca.location" in outbox.lag()["kafka:orders"].trouble
        with pytest.raises(ShippingTimeout, match=r"ssl\.ca\.location"):
            outbox.wait_shipped(0)


@pytest.mark.parametrize(
    ("line", "setting", "why"),
    [
        ("security.protocol", "config", "line 3"),
        ("secruity.protocol=SSL", "secruity.protocol", "line 3: known are client.id"),
        ("security.protocol=NONE", "security.protocol", ""),
    ],
)
def test_a_properties_file_names_the_line_and_the_setting_that_is_wrong(tmp_path, line, setting, why):
    file = tmp_path / "client.properties"
    file.write_text(f"# a comment\n! and another\n{line}\n")
    with pytest.raises(BadArgument) as refused:
        destination_of("127.0.0.1:9092", None, file)
    assert refused.value.argument == setting
    assert refused.value.why.startswith(why)


def test_a_properties_file_gives_what_it_names(tmp_path):
    file = tmp_path / "client.properties"
    lines = (
        "",
        "# a comment",
        " security.protocol = SASL_SSL ",
        "sasl.mechanism=PLAIN",
        "sasl.username=u",
        "sasl.password=a=b",
    )
    file.write_text("\n".join(lines))
    found = destination_of("127.0.0.1:9092", "orders", file, "park")
    assert (found.security_protocol, found.sasl_mechanism, found.sasl_password) == ("SASL_SSL", "PLAIN", "a=b")
    assert (found.topic, found.on_refused) == ("orders", "park")
