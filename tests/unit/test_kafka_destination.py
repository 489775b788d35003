"""A destination is a value: invalid settings are refused by name, and secrets are never shown."""

import pickle

import pytest

from pushrep.errors import BadArgument
from pushrep.kafka import KafkaDestination

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "me", "sasl_password": "s3cret"}


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("bootstrap_servers", {"bootstrap_servers": ""}),
        ("bootstrap_servers", {"bootstrap_servers": "broker"}),
        ("bootstrap_servers", {"bootstrap_servers": "a:1,b:0"}),
        ("bootstrap_servers", {"bootstrap_servers": 9092}),
        ("topic", {"topic": "no/slash"}),
        ("request_timeout_ms", {"request_timeout_ms": 0}),
        ("retry_backoff_ms", {"retry_backoff_ms": True}),
        ("security_protocol", {"security_protocol": "TLS"}),
        ("sasl_mechanism", {"sasl_mechanism": "PLAIN"}),
        ("sasl_mechanism", SASL | {"sasl_mechanism": "GSSAPI"}),
        ("sasl_username", SASL | {"sasl_password": None}),
        ("sasl_oauth_token", SASL | {"sasl_mechanism": "OAUTHBEARER"}),
        ("ssl_cafile", {"ssl_cafile": "ca.pem"}),
        ("ssl_certfile", {"security_protocol": "SSL", "ssl_keyfile": "key.pem"}),
    ],
)
def test_what_cannot_be_is_refused_by_name(setting, values):
    with pytest.raises(BadArgument) as caught:
        KafkaDestination(**{"bootstrap_servers": "broker:9092"} | values)
    assert caught.value.argument == setting
    assert "s3cret" not in str(caught.value)


def test_secrets_are_in_no_repr():
    destination = KafkaDestination(bootstrap_servers="[::1]:9092,b:1", ssl_keyfile_password="t0p", **SASL)
    assert "s3cret" not in repr(destination)
    assert "t0p" not in repr(destination)
    assert pickle.loads(pickle.dumps(destination)) == destination


def test_librdkafka_gets_the_same_settings():
    settings = KafkaDestination(bootstrap_servers="b:1", ssl_cafile="ca.pem", ssl_check_hostname=False, **SASL)
    assert settings.librdkafka_settings() == {
        "bootstrap.servers": "b:1",
        "client.id": "pushrep",
        "security.protocol": "SASL_SSL",
        "socket.timeout.ms": 30_000,
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": "s3cret",
        "ssl.ca.location": "ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
    }
