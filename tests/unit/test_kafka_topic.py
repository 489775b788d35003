"""What a topic's leader reports about producers, and the errors if no broker can answer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from pushrep import KafkaDestination, Outbox
from pushrep.kafka.errors import KafkaUnreachable, ShippingTimeout
from pushrep.kafka.topic import _expirations_ms, _leader_of, look_at_topic
from tests.integration.outboxes import WAIT_S, wait_until


def partition(leader):
    return SimpleNamespace(leader=None if leader is None else SimpleNamespace(id=leader))


def asking(answer):
    def settings_of(resource):
        if isinstance(answer, Exception):
            raise answer
        names = "producer.id.expiration.ms", "transactional.id.expiration.ms"
        return {name: SimpleNamespace(value=answer) for name in names}

    return SimpleNamespace(settings_of=settings_of)


def refused(code):
    return KafkaException(KafkaError(code))


def test_any_leader_will_do_and_none_is_waited_for():
    assert _leader_of("orders", [partition(None), partition(-1), partition(3), partition(1)]) == "3"
    with pytest.raises(KafkaUnreachable, match="no partition of topic orders has a leader now"):
        _leader_of("orders", [partition(None), partition(-1)])


def test_who_may_not_ask_takes_the_brokers_default():
    assert _expirations_ms(asking("1000"), "1") == (1000, 1000)
    for answer in (refused(KafkaError.CLUSTER_AUTHORIZATION_FAILED), refused(KafkaError.UNSUPPORTED_VERSION), None):
        assert _expirations_ms(asking(answer), "1") == (86_400_000, 604_800_000)


@pytest.mark.parametrize(
    "failure", [refused(KafkaError._TIMED_OUT), refused(KafkaError._TRANSPORT), TimeoutError()], ids=repr
)
def test_a_broker_that_does_not_answer_now_may_forget_sooner_than_by_the_default(failure):
    with pytest.raises(type(failure)):
        _expirations_ms(asking(failure), "1")


def test_certificates_that_can_not_be_read_now_are_read_again_and_end_no_shipping(tmp_path):
    """Files are replaced while a service runs, and the topic is looked at every half minute."""
    missing = KafkaDestination(bootstrap_servers="127.0.0.1:1", security_protocol="SSL", ssl_cafile=tmp_path / "ca.pem")
    with pytest.raises(KafkaUnreachable, match=r"ssl\.ca\.location"):
        look_at_topic(missing, "orders")
    destination = replace(missing, retry_backoff_ms=1, retry_backoff_max_ms=1)
    with Outbox.open(tmp_path / "outbox", "orders", 1, "test", kafka=destination, open_timeout_s=0.0) as outbox:
        outbox.append(0, b"waits").result(WAIT_S)
        sink = outbox.facts.shipping.sink
        wait_until(lambda: sink._failures > 1, "it is tried again")
        assert "ssl.ca.location" in outbox.lag()["kafka:orders"].trouble
        with pytest.raises(ShippingTimeout, match=r"ssl\.ca\.location"):
            outbox.wait_shipped(0)
