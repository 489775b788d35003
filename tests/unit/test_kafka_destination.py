"""A destination is a value: invalid settings are refused by name, and secrets are never shown."""

import pickle
import ssl
from pathlib import Path

import pytest

from pushrep.errors import BadArgument
from pushrep.kafka import KafkaDestination
from pushrep.kafka.destination import destination_by

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "me", "sasl_password": "s3cret"}
SASL_ONLY = {name: value for name, value in SASL.items() if name != "security_protocol"}


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
        ("sasl_mechanism", SASL | {"sasl_mechanism": None}),
        ("sasl_username", SASL | {"sasl_username": None}),
        ("sasl_username", {"sasl_username": "me"}),
        ("sasl_password", {"security_protocol": "SSL", "sasl_password": "s3cret"}),
        ("sasl_oauth_token", {"sasl_oauth_token": lambda: ("s3cret", 1.0)}),
        ("bootstrap_servers", {"bootstrap_servers": "a:1,b:65536"}),
        ("bootstrap_servers", {"bootstrap_servers": ":9092"}),
        ("ssl_cafile", {"ssl_cafile": "ca.pem"}),
        ("ssl_certfile", {"ssl_certfile": "cert.pem"}),
        ("ssl_keyfile", {"ssl_keyfile": "key.pem"}),
        ("ssl_keyfile_password", SASL | {"security_protocol": "SASL_PLAINTEXT", "ssl_keyfile_password": "s3cret"}),
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


def test_what_is_not_asked_for_is_not_given_and_tokens_paths_and_times_are_as_librdkafka_takes_them():
    plain = KafkaDestination(bootstrap_servers="b:65535", ssl_check_hostname=False).librdkafka_settings()
    assert plain == {
        "bootstrap.servers": "b:65535",
        "client.id": "pushrep",
        "security.protocol": "PLAINTEXT",
        "socket.timeout.ms": 30_000,
    }
    tokens = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token": lambda: ("t", 1.0)}
    given = KafkaDestination(bootstrap_servers="b:1", ssl_cafile=Path("ca.pem"), **tokens).librdkafka_settings()
    assert given.pop("oauth_cb")("what the broker asks") == ("t", 1.0)
    assert given["ssl.ca.location"] == "ca.pem"
    assert "ssl.endpoint.identification.algorithm" not in given
    for asked_ms, given_ms in ((1, 10), (10, 10), (299_999, 299_999), (300_001, 300_000)):
        short = KafkaDestination(bootstrap_servers="b:1", request_timeout_ms=asked_ms)
        assert short.librdkafka_settings()["socket.timeout.ms"] == given_ms


def test_tls_checks_a_brokers_name_and_shows_a_certificate_where_it_is_told_to(tmp_path):
    assert KafkaDestination(bootstrap_servers="b:1").ssl_context() is None
    for checks in (True, False):
        context = KafkaDestination(
            bootstrap_servers="b:1", security_protocol="SSL", ssl_check_hostname=checks
        ).ssl_context()
        assert (context.check_hostname, context.verify_mode) == (checks, ssl.CERT_REQUIRED)
    (tmp_path / "cert.pem").write_text("no certificate")
    for name in ("ssl_cafile", "ssl_certfile"):
        files = {name: tmp_path / "cert.pem"}
        with pytest.raises(ssl.SSLError):
            KafkaDestination(bootstrap_servers="b:1", security_protocol="SASL_SSL", **SASL_ONLY, **files).ssl_context()


def test_settings_by_kafkas_names_make_the_same_destination_and_a_wrong_one_is_named_so():
    found = destination_by(
        {"bootstrap.servers": "b:1", "request.timeout.ms": "20", "sasl.mechanisms": "PLAIN"}
        | {"security.protocol": "SASL_SSL", "sasl.username": "me", "sasl.password": "s3cret"},
        "orders",
    )
    assert found == KafkaDestination(bootstrap_servers="b:1", topic="orders", request_timeout_ms=20, **SASL)
    for name, value, argument in (
        ("request.timeout.ms", "0", "request.timeout.ms"),
        ("request.timeout.ms", "soon", "request.timeout.ms"),
        ("linger.ms", "5", "linger.ms"),
        ("bootstrap.servers", "", "bootstrap_servers"),
    ):
        with pytest.raises(BadArgument) as caught:
            destination_by({"bootstrap.servers": "b:1", name: value}, None)
        assert caught.value.argument == argument
