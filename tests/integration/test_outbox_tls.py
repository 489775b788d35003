"""Mutual TLS from an Outbox to its nodes, with certificate files: records are pushed, and errors name the cause."""

import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest

from pushrep import Acks, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.errors import BadArgument
from pushrep.outbox import NotEnoughReplicas
from pushrep.replicate.certificates import expires_s, mutual_tls
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import QUICK, SMALL, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.integration.test_push_tls import server_files
from tests.programs import PythonProgram


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates, name, ca="ca"):
    paths = {"cert": certificates / f"{name}.pem", "key": certificates / f"{name}.key"}
    return mutual_tls(**paths, ca=certificates / f"{ca}.pem")


def shown(certificates, name, ca="ca"):
    return replace(QUICK, tls=tls(certificates, name, ca), connect_timeout_ms=60_000)


def test_records_go_to_replicas_over_mutual_tls_and_only_to_whom_the_certificate_names(world, certificates):
    for index, allowed in ((1, "billing"), (2, "billing"), (3, "shipping")):
        world.node(index, certificates=server_files(certificates), allow=frozenset({allowed}))
    with open_outbox(world, 1, 2, min_insync_replicas=3, push=shown(certificates, "billing")) as outbox:
        for number in range(50):
            outbox.append(0, bytes(number * 100)).result(WAIT_S)
        wait_for_all(outbox)
        assert world.replica(1).log.log_end_offset == 50
    directory = world.root / "other"
    with open_outbox(world, 3, directory=directory, acks=Acks.LOCAL, push=shown(certificates, "billing")) as other:
        wait_until(lambda: other.status().members[1].trouble, "it may not create there")
        assert other.append(0, b"here").result(WAIT_S) == 0


@pytest.mark.parametrize(
    ("client", "ca", "server", "why"),
    [
        ("stranger", "ca", "node", r"it refuses our certificate|behind the TLS handshake"),
        ("expired", "ca", "node", r"it refuses our certificate|behind the TLS handshake"),
        ("billing", "other-ca", "node", "its certificate is refused: self-signed certificate"),
        ("billing", "ca", "expired", "its certificate is refused: certificate has expired"),
        ("billing", "ca", "elsewhere", "its certificate is refused: IP address mismatch"),
        (None, "ca", "node", "perhaps it wants TLS"),
    ],
    ids=["signed by another", "expired", "an unknown replica", "an expired replica", "another host's", "none at all"],
)
def test_a_wrong_expired_or_missing_certificate_is_said_in_words(world, certificates, caplog, client, ca, server, why):
    """With ALL no record is accepted, and the log, `status()` and `pushrep status` have the reason."""
    world.node(1, certificates=server_files(certificates, server))
    push = QUICK if client is None else shown(certificates, client, ca)
    caplog.set_level(logging.WARNING, "pushrep")
    with open_outbox(world, 1, push=push, open_timeout_s=0.5) as outbox:
        with pytest.raises(NotEnoughReplicas):
            outbox.append(0, b"a")
        wait_until(lambda: outbox.status().members[1].trouble, "told")
        assert outbox.log(0).log_end_offset == 0
        wait_until(lambda: matches(outbox.status().members[1].trouble, why), f"{why}")
        wait_until(lambda: matches(caplog.text, why), "it stands in the log, too")


def matches(text, why):
    return text is not None and any(one in text for one in why.split("|"))


def test_a_node_that_speaks_no_tls_is_named(world, certificates):
    world.node(1)
    with open_outbox(world, 1, push=shown(certificates, "billing"), open_timeout_s=0.5) as outbox:
        wait_until(lambda: "TLS" in (outbox.status().members[1].trouble or ""), "told")
        with pytest.raises(NotEnoughReplicas):
            outbox.append(0, b"a")


@pytest.mark.parametrize(
    ("argument", "change", "why"),
    [
        ("cert", lambda paths: paths | {"cert": "nowhere.pem"}, "nowhere.pem can't be read: No such file"),
        ("key", lambda paths: paths | {"key": paths["key"].parent}, "can't be read: Is a directory"),
        ("ca", lambda paths: paths | {"ca": paths["key"]}, "holds no certificate"),
        ("cert", lambda paths: paths | {"key": paths["key"].parent / "node.key"}, "together: key values mismatch"),
    ],
    ids=["no such file", "a directory", "a key for a certificate", "another's key"],
)  # fmt: skip
def test_a_file_that_can_not_be_used_is_named(certificates, argument, change, why):
    paths = {name: certificates / f"billing.{suffix}" for name, suffix in (("cert", "pem"), ("key", "key"))}
    with pytest.raises(BadArgument, match=f"^{argument}: ") as refused:
        mutual_tls(**change(paths | {"ca": certificates / "ca.pem"}))
    assert why in str(refused.value)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(certificates, tmp_path):
    key = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-v2", "aes-256-cbc", "-passout", "pass:secret"]
    subprocess.run([*command, "-in", certificates / "billing.key", "-out", key], check=True, capture_output=True)
    with pytest.raises(BadArgument, match="password"):
        mutual_tls(cert=certificates / "billing.pem", key=key, ca=certificates / "ca.pem")


def test_the_commands_speak_tls_by_path(world, certificates, tmp_path, capfd):
    """A node as a process with --cert, and `pushrep replica add` to it with the caller's certificate."""
    world.node(1, certificates=server_files(certificates))
    with open_outbox(world, 1, push=shown(certificates, "billing")) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
    node = ["--cert", certificates / "node.pem", "--key", certificates / "node.key", "--ca", certificates / "ca.pem"]
    serve = ("replica", "serve", tmp_path / "copies", "--allow", "billing", "--listen", "127.0.0.1:0", *node)
    with PythonProgram("-m", "pushrep.cli.main", *serve) as serving:
        try:
            address = serving.stdout.readline().split()[2].rstrip(",")
            mine = [f"--{name}={certificates}/{file}" for name, file in
                    (("cert", "billing.pem"), ("key", "billing.key"), ("ca", "ca.pem"))]  # fmt: skip
            capfd.readouterr()
            assert run(["replica", "add", str(outbox.directory), address, "--json", *mine]) == 0
            sys.stdout.flush()
            assert json.loads(capfd.readouterr().out)["member"] == 2
            assert run(["status", address, "--json", *mine]) == 3
            sys.stdout.flush()
            (told,) = json.loads(capfd.readouterr().out)["places"]
            assert told["certificates"]["node"] == expires_s(certificates / "node.pem")
            assert [one["problem"] for one in told["problems"]] == ["certificate_expires"]
            addresses = [str(world.nodes[1].address), address]
            with Outbox.open(
                outbox.directory,
                "orders",
                1,
                "billing",
                replicas=addresses,
                config=OutboxConfig(push=shown(certificates, "billing"), log_config=SMALL, open_timeout_s=WAIT_S),
            ) as again:
                assert again.append(0, b"b").result(WAIT_S) == 1
                wait_for_all(again)
        finally:
            serving.terminate()
    assert run(["replica", "add", str(outbox.directory), address, mine[0]]) == 2
    assert "all three or none" in capfd.readouterr().err
