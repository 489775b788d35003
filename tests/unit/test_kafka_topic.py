"""What a topic's leader says of producers, and when nobody can say it."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from pushrep.kafka.errors import KafkaUnreachable
from pushrep.kafka.topic import _expirations_ms, _leader_of


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
