"""Keeping house on the copies that a real outbox made, by its own grants and sessions."""

import shutil

import pytest

from pushrep import Acks
from pushrep.cli import main as cli_main
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox.member_changes import Phase, remove_member
from pushrep.replay import TO_END, ReplayRefused, ReplayRequest
from pushrep.replicate.election_state import find_election_state
from pushrep.wire.error_codes import ErrorCode
from tests.integration.outboxes import open_outbox as open_with
from tests.integration.outboxes import wait_for_all
from tests.integration.replay.conftest import WAIT_S, offsets, until

IN_USE = ErrorCode.RECORDING_IN_USE


@pytest.fixture
def nodes(world):
    """The nodes of members 1 and 2; `world.nodes` is what open_outbox asks for."""
    world.nodes = {index: world.node(directory=f"node-{index}") for index in (1, 2)}
    return world.nodes


@pytest.fixture
def outbox(world, nodes):
    opened = open_with(world, 1, 2, acks=Acks.ALL)
    world.opened.callback(opened.close)
    opened.append_many(0, [b"%06d" % n for n in range(100)]).result(WAIT_S)
    opened.append(0, b"the last batch").result(WAIT_S)
    wait_for_all(opened)
    return opened


def refused(call, *args, **more):
    with pytest.raises(ReplayRefused) as told:
        call(*args, **more)
    assert told.value.code is IN_USE
    return told.value.why


def test_a_members_copy_is_its_leaders_until_the_member_is_removed_and_then_it_is_kept_as_one_likes(
    world, nodes, outbox
):
    """The settled list goes to the removed node, too: the joint one, which it had, names it as a member before."""
    client = world.client(nodes[2])
    for call in (lambda: client.extend("orders-0", 1 << 20), lambda: client.truncate("orders-0", 100)):
        refused(call)
    refused(client.delete, "orders-0", force=True)
    until(lambda: remove_member(outbox.facts, 2).phase is Phase.DONE)
    until(lambda: not client.recordings()[0].is_live)
    assert client.truncate("orders-0", 100) == 100
    assert client.extend("orders-0", 1 << 20) == 100
    nodes[2] = world.again(nodes[2], directory="node-2")
    client = world.client(nodes[2])
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(100))
    assert client.delete("orders-0").wait() > 0
    refused(world.client(nodes[1]).delete, "orders-0")


def test_a_copy_of_an_outbox_that_is_no_more_is_deleted_once_its_leader_was_shown(world, nodes, outbox, capfd):
    outbox.close()
    shutil.rmtree(world.root / "outbox")
    nodes[1] = world.again(nodes[1], directory="node-1")
    where = str(nodes[1].address)
    client = world.client(nodes[1])
    for call in (lambda: client.extend("orders-0", 1 << 20), lambda: client.truncate("orders-0", 100)):
        refused(call)
    assert "member 0's to change" in refused(client.delete, "orders-0", force=True)
    assert cli_main.run(["recording", "delete", where, "orders-0", "--yes"]) == 1
    capfd.readouterr()
    deleted = ["recording", "delete", where, "orders-0", "--outbox-gone", "--yes"]
    until(lambda: cli_main.run(deleted) == 0, "its leader may come within seconds of the node's start")
    out, err = capfd.readouterr()
    assert "orders-0 is deleted" in out
    assert "which leads outbox" in err
    assert "last contact: none since this node's start; it holds records [0, 101)" in err
    assert client.recordings() == []


def test_a_leader_that_is_heard_keeps_its_copy_and_one_that_comes_back_finds_a_member_that_does_not_count(
    world, nodes, outbox
):
    client = world.client(nodes[2])
    refused(client.delete, "orders-0", outbox_gone=True)
    outbox.close()
    assert client.delete("orders-0", outbox_gone=True).wait() > 0
    (kept,) = nodes[2].directory.glob("*-*-*-*-*")
    assert find_election_state(kept, REAL_FILESYSTEM)[1].is_unfilled
    with open_with(world, 1, 2, acks=Acks.ALL) as again:
        again.append(0, b"more").result(WAIT_S)
        wait_for_all(again)
        until(lambda: not find_election_state(kept, REAL_FILESYSTEM)[1].is_unfilled)
    assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(102))
