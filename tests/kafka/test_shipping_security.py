"""A broker with TLS and SASL: each client connects with the right secrets, and names the cause with wrong ones."""

import asyncio
import ssl
import subprocess

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from filtering import StreamMetadata
from partitioner import SourcePartitionPartitioner
from pushrep.kafka import KafkaDestination, ShippingTimeout
from pushrep.outbox import Outbox, OutboxConfig
from tests.kafka.cluster import KafkaCluster, free_ports, missing
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered, same

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
USER, PASSWORD = "billing", "s3cret"
PLAIN_LOGIN = (
    'org.apache.kafka.common.security.plain.PlainLoginModule required username="broker" password="b" '
    f'user_broker="b" user_{USER}="{PASSWORD}";'
)
SCRAM_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
PROTOCOLS = {"secure": "SASL_SSL", "scram": "SASL_PLAINTEXT", "mutual": "SSL"}


class SecureCluster(KafkaCluster):
    """One broker with three more listeners. `servers`: by name.

    secure: TLS, then a name and a password by PLAIN or SCRAM-SHA-512. scram: SCRAM-SHA-256 without TLS. mutual: TLS,
    and the client shows a certificate.
    """

    def __init__(self, directory):
        super().__init__(directory)
        ports = free_ports(len(PROTOCOLS), self._reserved)
        self.servers = {name: f"127.0.0.1:{port}" for name, port in zip(PROTOCOLS, ports, strict=True)}
        own = ",".join(f"{name.upper()}://{server}" for name, server in self.servers.items())
        own = f"PLAINTEXT://127.0.0.1:{self._ports[1]},{own}"
        named = ",".join(f"{name.upper()}:{protocol}" for name, protocol in PROTOCOLS.items())
        directory.mkdir(parents=True, exist_ok=True)
        self._settings |= {
            "listeners": f"{own},CONTROLLER://127.0.0.1:{self._controllers[1]}",
            "advertised.listeners": own,
            "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,{named}",
            "listener.name.secure.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.secure.plain.sasl.jaas.config": PLAIN_LOGIN,
            "listener.name.secure.scram-sha-512.sasl.jaas.config": SCRAM_LOGIN,
            "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "listener.name.scram.scram-sha-256.sasl.jaas.config": SCRAM_LOGIN,
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.mutual.ssl.truststore.type": "PEM",
            "listener.name.mutual.ssl.truststore.location": str(directory / "client.crt"),
        }
        for name in ("secure", "mutual"):
            self._settings |= {
                f"listener.name.{name}.ssl.keystore.type": "PEM",
                f"listener.name.{name}.ssl.keystore.location": str(directory / "broker.pem"),
            }


def make_certificate(directory, name):
    """<name>.crt, which vouches for itself, <name>.key, and both in <name>.pem."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    subprocess.run([*command, *files], cwd=directory, check=True, capture_output=True)
    both = [(directory / f"{name}.{kind}").read_text() for kind in ("key", "crt")]
    (directory / f"{name}.pem").write_text("".join(both))


@pytest.fixture(scope="module")
def secure(tool_or_skip, tmp_path_factory):
    """The broker; its user may come by every mechanism."""
    tool_or_skip(missing())
    home = tmp_path_factory.mktemp("secure") / "kafka"
    for name in ("broker", "client", "stranger"):
        make_certificate(home, name)
    with SecureCluster(home) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credential = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            admin.alter_user_scram_credentials([credential])[USER].result(WAIT_S)
        yield cluster


def settings_of(cluster, name, mechanism=None, certificate="client"):
    """The settings with KafkaDestination's names."""
    home, settings = cluster.directory, {"bootstrap_servers": cluster.servers[name]}
    settings |= {"security_protocol": PROTOCOLS[name], "request_timeout_ms": 5000}
    if mechanism is not None:
        settings |= {"sasl_mechanism": mechanism, "sasl_username": USER, "sasl_password": PASSWORD}
    if name != "scram":
        settings |= {"ssl_cafile": home / "broker.crt"}
    if name == "mutual":
        settings |= {"ssl_certfile": home / f"{certificate}.crt", "ssl_keyfile": home / f"{certificate}.key"}
    return settings


def open_outbox(tmp_path, topic, settings, open_timeout_s):
    kafka = KafkaDestination(**settings)
    return Outbox.open(
        tmp_path / "outbox", topic, 1, "test", kafka=kafka, config=OutboxConfig(open_timeout_s=open_timeout_s)
    )


@pytest.mark.parametrize(
    ("listener", "mechanism"),
    [("secure", "PLAIN"), ("secure", "SCRAM-SHA-512"), ("scram", "SCRAM-SHA-256"), ("mutual", None)],
)
def test_tls_and_sasl(secure, tmp_path, listener, mechanism):
    """Contract: "TLS and SASL as the Kafka client library does them"."""
    create_topic(secure.bootstrap_servers, topic := f"orders-{listener}-{mechanism}", 2)
    with open_outbox(tmp_path, topic, settings_of(secure, listener, mechanism), WAIT_S) as outbox:
        outbox.append_many(0, [b"v"] * 100)
        outbox.wait_shipped(WAIT_S)
        records, pid = list(outbox.log(0).records(0)), outbox.pid
    assert same(read_filtered(secure.bootstrap_servers, topic, 2).of(pid, 0), records)


@pytest.mark.parametrize(
    ("listener", "mechanism", "wrong", "told"),
    [
        ("scram", "SCRAM-SHA-256", {"sasl_password": "wr0ng"}, "uthentication"),
        ("secure", "PLAIN", {"ssl_cafile": None}, "certificate"),
        ("mutual", None, {"certificate": "stranger"}, ""),
    ],
)
def test_what_is_wrong_is_told_and_no_secret_is(secure, tmp_path, listener, mechanism, wrong, told):
    """Nothing is shipped; the service continues, and `lag` has the reason."""
    create_topic(secure.bootstrap_servers, topic := f"refused-{listener}-{'-'.join(wrong)}")
    settings = settings_of(secure, listener, mechanism, wrong.get("certificate", "client"))
    settings |= {name: value for name, value in wrong.items() if name != "certificate"} | {"request_timeout_ms": 2000}
    with open_outbox(tmp_path, topic, settings, 0.1) as outbox:
        outbox.append(0, b"not yet")
        outbox.flush()
        trouble = "the brokers have not answered yet"
        for _ in range(10 * WAIT_S):
            with pytest.raises(ShippingTimeout) as caught:
                outbox.wait_shipped(0.1)
            trouble = outbox.lag()[f"kafka:{topic}"].trouble or ""
            if told in trouble and "have not answered" not in trouble:
                break
        assert told in trouble
        assert "have not answered" not in trouble
        assert "wr0ng" not in trouble + str(caught.value)


def test_producers_and_consumers_take_their_clients_settings(secure):
    """The further clients of a producer or a consumer use the same settings, secrets included."""
    from filtering.consumers.confluent import ReplayFilteredConsumer
    from partitioner.confluent import SourcePartitionProducer

    create_topic(secure.bootstrap_servers, "doors-confluent", 2)
    settings = KafkaDestination(**settings_of(secure, "secure", "SCRAM-SHA-512")).librdkafka_settings()
    with SourcePartitionProducer(settings | {"log_level": 0}, "doors-confluent") as producer:
        for offset in range(20):
            producer.produce(StreamMetadata(7, 0, offset), b"%d" % offset)
    group = {"group.id": "doors-confluent", "auto.offset.reset": "earliest", "log_level": 0}
    found = []
    for _ in range(2):
        with ReplayFilteredConsumer(settings | group) as consumer:
            consumer.subscribe(["doors-confluent"])
            for _ in range(10 * WAIT_S):
                found += [message.value() for message in consumer.consume(10, 0.1)]
                if len(found) == 20:
                    break
            consumer.commit()
    assert found == [b"%d" % offset for offset in range(20)], "the second one began behind them"


def test_the_same_of_aiokafka(secure):
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    create_topic(secure.bootstrap_servers, "doors-aiokafka", 2)
    settings = {
        "bootstrap_servers": secure.servers["secure"],
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": USER,
        "sasl_plain_password": PASSWORD,
        "ssl_context": ssl.create_default_context(cafile=secure.directory / "broker.crt"),
    }

    async def story():
        place = SourcePartitionPartitioner()
        async with AIOKafkaProducer(partitioner=place, **settings) as producer:
            for offset in range(20):
                await producer.send("doors-aiokafka", b"%d" % offset, StreamMetadata(7, 0, offset).pack())
        found = []
        given = settings | {"group_id": "doors-aiokafka", "auto_offset_reset": "earliest"}
        async with asyncio.timeout(WAIT_S), ReplayFilteredConsumer("doors-aiokafka", **given) as consumer:
            while len(found) < 20:
                batches = await consumer.getmany(timeout_ms=100)
                found += [record.value for records in batches.values() for record in records]
            await consumer.commit()
        assert found == [b"%d" % offset for offset in range(20)]

    asyncio.run(story())
