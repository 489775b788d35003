"""`pushrep promote` and `pushrep replica adopt`: what they print, refuse, and leave as it was."""

import pytest

from pushrep import Acks, LogConfig, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address

WAIT_S = 60
HERE = NodeSettings(
    address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=LogConfig(preallocate_bytes=0)
)


@pytest.fixture
def pair(tmp_path):
    """An outbox of two members with three records, closed; its replica's node, which answers promotions."""
    with ReplicaNode(tmp_path / "data-1", HERE) as node, HandoverSocket(node):
        with Outbox.open(
            tmp_path / "service",
            "orders",
            1,
            "billing",
            replicas=[str(node.address)],
            acks=Acks.ALL,
            config=OutboxConfig(open_timeout_s=WAIT_S, log_config=HERE.log_config),
        ) as outbox:
            for number in range(3):
                assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        yield node, tmp_path / "data-1" / outbox.identity.outbox_id


def test_a_promotion_prints_where_to_go_on_and_the_running_node_lets_go(pair, capsys, tmp_path):
    _, directory = pair
    assert run(["promote", str(directory), "--timeout-s", str(WAIT_S)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("member 1 leads outbox")
    assert told[0].endswith("(orders) under epoch 257")
    assert told[1] == "  orders-0: high watermark 3, log end 3, epoch 256"
    assert told[2] == f"open the service's Outbox on {directory} with replicas=[]"
    assert run(["replica", "adopt", str(tmp_path / "data-0"), str(tmp_path / "service")]) == 0
    assert f"{tmp_path / 'service'} was moved to {tmp_path / 'data-0' / directory.name}\n" in capsys.readouterr().out
    with (
        ReplicaNode(tmp_path / "data-0", HERE) as old,
        Outbox.open(
            directory,
            "orders",
            1,
            "billing",
            replicas=[str(old.address)],
            config=OutboxConfig(open_timeout_s=WAIT_S, log_config=HERE.log_config),
        ) as outbox,
    ):
        assert outbox.append(0, b"3").result(WAIT_S) == 3
        assert run(["promote", str(directory)]) == 1
        assert "has it open" in capsys.readouterr().err


def test_a_node_that_does_not_let_go_stops_the_promotion(pair, capsys, monkeypatch):
    """The node refuses by closing the connection: a directory that it keeps open must not be written by others."""
    node, directory = pair
    before = find_election_state(directory, REAL_FILESYSTEM)

    def refuse(_):
        raise OSError("its disk is gone")

    monkeypatch.setattr(node, "hand_over", refuse)
    assert run(["promote", str(directory)]) == 1
    assert "does not hand it over" in capsys.readouterr().err
    assert find_election_state(directory, REAL_FILESYSTEM) == before


def test_what_is_refused_is_one_line_and_changes_nothing(pair, capsys, tmp_path):
    _, directory = pair
    before = find_election_state(directory, REAL_FILESYSTEM)
    for arguments, why in (
        (["promote", str(tmp_path)], "give <data>/<outbox id> of a node"),
        (
            ["replica", "adopt", str(tmp_path / "data-1"), str(tmp_path / "service")],
            "is there already: the node began a copy",
        ),
        (["replica", "adopt", str(tmp_path / "data-0"), str(tmp_path)], "there is no outbox in it"),
    ):
        assert run(arguments) == 1
        said = capsys.readouterr()
        assert why in said.err
        assert said.out == ""
    assert run(["promote", str(directory), "--cert", str(tmp_path / "no.pem")]) == 2
    assert "all three or none" in capsys.readouterr().err
    assert find_election_state(directory, REAL_FILESYSTEM) == before
