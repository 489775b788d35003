"""Replay under mutual TLS, and by the command line: blocks go through a buffer, the certificate's name is who may."""

import json
import ssl

import pytest

from pushrep.cli import main as cli_main
from pushrep.log import LogConfig
from pushrep.replay import TO_END, NodeAccess, NodeUnreachable, ReplayClient, ReplayRefused, ReplayRequest
from pushrep.replicate.settings import PushSettings
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import offsets, take
from tests.integration.test_push_tls import certificates, server_files

__all__ = ["certificates"]


def access(certificates, name):
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return NodeAccess(tls=context)


def test_replays_over_tls_are_for_whom_the_certificate_names(world, certificates):
    node = world.node(
        certificates=server_files(certificates), allow=frozenset({"billing"}), config=LogConfig(preallocate_bytes=0)
    )
    pushing = PushSettings(tls=access(certificates, "billing").tls)
    leader = world.leader(node, tls=pushing)
    leader.fill(2_000, per_batch=50, size=1_000)
    client = world.client(node, access(certificates, "billing"))
    replay = client.replay(ReplayRequest("orders-0", position=3))
    assert offsets(take(replay, 1_997)) == list(range(3, 2_000))
    leader.append(b"new")
    assert offsets(take(replay, 1)) == [2_000]
    with pytest.raises(ReplayRefused) as refused:
        world.client(node, access(certificates, "node")).replay(ReplayRequest(1))
    assert refused.value.code is ErrorCode.UNAUTHORISED
    for tls in (NodeAccess(), access(certificates, "stranger")):
        with ReplayClient(str(node.address), node=tls) as stranger, pytest.raises(NodeUnreachable):
            stranger.recordings()


def test_the_command_line_replays_a_node_in_every_form(world, node, client, leader, capfdbinary):
    where = str(node.address)

    def pushrep(*arguments):
        code = cli_main.run(["replay", where, *arguments])
        return code, capfdbinary.readouterr().out

    code, out = pushrep("orders-0", "--from", "95", "--until", "98")
    assert (code, [json.loads(line)["offset"] for line in out.splitlines()]) == (0, [95, 96, 97])
    code, out = pushrep("1", "--count", "2", "--format", "raw")
    assert (code, [line[:6] for line in out.splitlines()]) == (0, [b"000000", b"000001"])
    code, out = pushrep("orders-0", "--count", "1", "--format", "table")
    assert (code, b"000000" in out) == (0, True)
    assert pushrep("7", "--count", "1")[0] == 1
    assert offsets(client.replay(ReplayRequest("orders-0", 99, TO_END))) == [99]
