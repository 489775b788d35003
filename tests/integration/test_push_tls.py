"""Mutual TLS between a leader and its replica: who shows the right certificate is let in, and by its name."""

import ssl
from dataclasses import replace

import pytest

from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.certificates import CertificateFiles
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.settings import PushSettings
from tests.integration.certificates import make_certificates

QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, connect_timeout_ms=60_000)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def server_files(certificates, name="node"):
    return CertificateFiles(certificates / f"{name}.pem", certificates / f"{name}.key", certificates / "ca.pem")


def client_side(certificates, name="billing", ca="ca"):
    context = ssl.create_default_context(cafile=certificates / f"{ca}.pem")
    if name is not None:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return replace(QUICK, tls=context)


def test_records_are_pushed_over_tls_by_whom_the_certificate_names(world, certificates):
    replica = world.node(1, certificates=server_files(certificates), allow=frozenset({"billing"}))
    service = world.service([replica], settings=client_side(certificates)).start()
    for number in range(200):
        service.append(bytes(number * 50))
    assert service.wait() is None
    assert world.replica(1).log.log_end_offset == 200


def test_another_name_may_not_create(world, certificates):
    replica = world.node(1, certificates=server_files(certificates), allow=frozenset({"shipping"}))
    service = world.service([replica], settings=client_side(certificates)).start()
    service.wait_for(lambda _: "may not call" in service.leading.troubles().get(1, ""))
    assert not service.leading.partitions[0].leader.sessions


@pytest.mark.parametrize(
    ("client", "ca", "server"),
    [("stranger", "ca", "node"), (None, "ca", "node"), ("billing", "other-ca", "node"), ("billing", "ca", "expired")],
    ids=["signed by another", "none shown", "an unknown server", "an expired server"],
)
def test_wrong_missing_and_expired_certificates_are_refused(world, certificates, client, ca, server):
    replica = world.node(1, certificates=server_files(certificates, server))
    with pytest.raises(NodeUnreachable, match=r"certificate|closed|reset|alert|EOF|Broken pipe"):
        ReplicaClient(replica.address, client_side(certificates, client, ca))


def test_plain_text_to_a_listener_with_tls_is_refused(world, certificates):
    replica = world.node(1, certificates=server_files(certificates))
    with pytest.raises(NodeUnreachable):
        ReplicaClient(replica.address, QUICK)
