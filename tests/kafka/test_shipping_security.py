"""A broker that wants TLS and SASL: shipping gets in with the right secrets, and says what is wrong with others."""

import subprocess

import pytest

from pushrep.kafka import KafkaDestination, ShippingTimeout
from pushrep.outbox import Outbox
from tests.kafka.cluster import KafkaCluster, free_ports, missing
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered, same

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 60
LOGIN = (
    'org.apache.kafka.common.security.plain.PlainLoginModule required username="broker" password="b" '
    'user_broker="b" user_billing="s3cret";'
)


class SecureCluster(KafkaCluster):
    """One broker with a second listener, which speaks TLS and asks for a name and a password."""

    def __init__(self, directory):
        super().__init__(directory)
        (port,) = free_ports(1)
        self.secure_servers = f"127.0.0.1:{port}"
        both = f"PLAINTEXT://127.0.0.1:{self._ports[1]},SECURE://{self.secure_servers}"
        directory.mkdir(parents=True, exist_ok=True)
        self._settings |= {
            "listeners": f"{both},CONTROLLER://127.0.0.1:{self._controllers[1]}",
            "advertised.listeners": both,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL",
            "listener.name.secure.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secure.plain.sasl.jaas.config": LOGIN,
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(directory / "broker.pem"),
            "listener.name.secure.ssl.client.auth": "none",
        }


def make_certificate(directory):
    """ca.pem, which is the broker's own certificate, and broker.pem with its key."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", "key.pem", "-out", "ca.pem"], cwd=directory, check=True, capture_output=True)
    key, certificate = (directory / "key.pem").read_text(), (directory / "ca.pem").read_text()
    (directory / "broker.pem").write_text(key + certificate)


def test_tls_and_sasl(tool_or_skip, tmp_path):
    """Contract: "TLS and SASL as the Kafka client library does them"."""
    tool_or_skip(missing())
    home = tmp_path / "kafka"
    make_certificate(home)
    with SecureCluster(home) as cluster:
        create_topic(cluster.bootstrap_servers, "orders", 2)
        right = {
            "bootstrap_servers": cluster.secure_servers,
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "billing",
            "sasl_password": "s3cret",
            "ssl_cafile": home / "ca.pem",
            "request_timeout_ms": 2000,
        }
        with open_outbox(tmp_path, right, WAIT_S) as outbox:
            outbox.append_many(0, [b"v"] * 100)
            outbox.wait_shipped(WAIT_S)
            records, pid = list(outbox.log(0).records(0)), outbox.pid
        assert same(read_filtered(cluster.bootstrap_servers, "orders", 2).of(pid, 0), records)
        for wrong, told in (({"sasl_password": "wr0ng"}, "uthentication"), ({"ssl_cafile": None}, "certificate")):
            with open_outbox(tmp_path, right | wrong, 0.1) as outbox:
                outbox.append(0, b"not yet")
                outbox.flush()
                trouble = ""
                for _ in range(10 * WAIT_S):
                    with pytest.raises(ShippingTimeout) as caught:
                        outbox.wait_shipped(0.1)
                    trouble = outbox.lag()["kafka:orders"].trouble or ""
                    if told in trouble:
                        break
                assert told in trouble
                assert "wr0ng" not in trouble + str(caught.value)


def open_outbox(tmp_path, destination, open_timeout_s):
    where = tmp_path / "outbox"
    return Outbox.open(where, "orders", 1, "test", kafka=KafkaDestination(**destination), open_timeout_s=open_timeout_s)
