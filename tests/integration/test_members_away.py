"""Members that were away while the list changed, or come back from a backup, learn the list and follow who leads."""

import shutil
from contextlib import contextmanager

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox.directory_handover import adopt
from pushrep.outbox.member_changes import Phase, add_member, remove_member
from pushrep.outbox.promotion import promote
from pushrep.replicate.election_state import find_election_state
from tests.integration.outboxes import QUICK, WAIT_S, open_outbox, wait_for_all, wait_until


class Away:
    """Members 0, 1 and 2, of which 2 is away while 3 takes the place of 1. Then 0 is lost, and 3 is to lead."""

    def __init__(self, world):
        self.world = world
        for index in (1, 2, 3):
            world.node(index)
        with open_outbox(world, 1, 2) as outbox:
            self.outbox_id = outbox.facts.replication.grant.outbox_id
            outbox.append(0, b"first").result(WAIT_S)
            wait_for_all(outbox)
            world.nodes[2].stop()
            shutil.copytree(world.root / "node-2", world.root / "backup of 2")
            address = str(world.nodes[3].address)
            wait_until(lambda: add_member(outbox.facts, address, replaced=1).phase is Phase.DONE, "3 is there")
            wait_until(lambda: remove_member(outbox.facts, 1).phase is Phase.DONE, "1 has gone")
            outbox.append(0, b"second").result(WAIT_S)

    def directory(self, index):
        return self.world.root / f"node-{index}" / str(self.outbox_id)

    @contextmanager
    def led_by_three(self, *others):
        with self.world.nodes[3].hand_over(self.outbox_id) as contact:
            promote(self.directory(3), push=QUICK, timeout_s=WAIT_S, last_contact=contact, depose=True, catch_up=True)
        with open_outbox(self.world, *others, directory=self.directory(3)) as outbox:
            yield outbox

    def grant_of(self, index):
        return find_election_state(self.directory(index), REAL_FILESYSTEM)[1].grant


@pytest.fixture
def away(world):
    return Away(world)


def test_a_member_that_was_away_while_another_was_replaced_follows_and_counts(away):
    """Its own list does not name the new leader; one more loss would be the end, with two of three well."""
    away.world.node(2)
    away.world.node(0)  # an empty directory: it is not 0
    with away.led_by_three(0, 2) as outbox:
        assert outbox.append(0, b"third").result(WAIT_S) == 2
        wait_for_all(outbox, away.world.nodes[2].address)
    assert away.grant_of(2).indexes == {0, 2, 3}
    assert away.grant_of(2).leader == 3


def test_a_backup_that_is_older_than_the_change_is_filled_by_the_new_leader(away):
    world = away.world
    world.node(2)
    world.node(0)
    with away.led_by_three(0, 2) as outbox:
        world.nodes[0].stop()
        shutil.rmtree(world.root / "node-0")
        adopt(world.root / "node-0", world.root / "outbox")
        world.node(0)
        wait_for_all(outbox)
        world.nodes[2].stop()
        shutil.rmtree(world.root / "node-2")
        shutil.copytree(world.root / "backup of 2", world.root / "node-2")
        world.node(2)
        assert outbox.append(0, b"third").result(WAIT_S) == 2
        wait_for_all(outbox)
        wait_until(lambda: not world.kept(2).election_state.is_unfilled, "it was given everything")
    assert away.grant_of(2).indexes == {0, 2, 3}
