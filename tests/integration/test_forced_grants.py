"""After an accepted loss (identity M6): lost members reconnect, and none of their old records gets into the new
history.
"""

import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count

import pytest

from pushrep import Durability, SegmentLog
from pushrep.cli.main import run
from pushrep.election.errors import NotAhead, NotLeader, RivalGenerations, label
from pushrep.election.grants import are_rivals
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import DeliveryFailed, promotion
from pushrep.outbox.directory_handover import adopt
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.promotion import promote
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election import Election
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.member_clients import MemberClients
from tests.integration.outboxes import QUICK, WAIT_S, open_outbox, wait_for_all, wait_until

KEPT, LOST, NEW = [b"first"], [b"lost %d" % n for n in range(20)], [b"new %d" % n for n in range(30)]


def values(directory):
    with SegmentLog.open_reader(directory / "orders-0", isolation="written") as reader:
        return [record.value for record in reader.records(0)]


@contextmanager
def cut_off(patch, *calls):
    """These calls fail to all members; without arguments, all calls fail."""

    def ask(self, *_, **__):
        raise NodeUnreachable("somebody", "the line is cut")

    with patch.context() as cut:
        for call in calls or ("describe", "offer"):
            cut.setattr(MemberClients, call, ask)
        yield


class Lost:
    """Member 0 led; what it and member 2 acknowledged last never reached member 1, which is all that is left."""

    def __init__(self, world, patch):
        self.world, self.patch = world, patch
        for index in (1, 2):
            world.node(index)
        with self.lead() as outbox:
            self.outbox_id = outbox.facts.replication.grant.outbox_id
            outbox.append(0, KEPT[0]).result(WAIT_S)
            wait_for_all(outbox)
            world.nodes[1].stop()
            for value in LOST:
                outbox.append(0, value).result(WAIT_S)
        world.nodes[2].stop()
        self.old = world.root / "outbox"

    def lead(self, index=None, *replicas, open_timeout_s=WAIT_S):
        directory = self.world.root / "outbox" if index is None else self.directory(index)
        replicas = replicas or (1, 2)
        given = {"directory": directory, "durability": Durability.FLUSHED, "open_timeout_s": open_timeout_s}
        return open_outbox(self.world, *replicas, **given)

    def directory(self, index):
        return self.world.root / f"node-{index}" / str(self.outbox_id)

    def promises(self, directory):
        return find_election_state(directory, REAL_FILESYSTEM)[1]

    def force(self, directory=None, **choices):
        """Force a grant while no other member can be reached."""
        with cut_off(self.patch):
            choices = {"accept_loss": True, "timeout_s": 1, "push": QUICK, "depose": True, **choices}
            return promote(directory or self.directory(1), **choices)

    def take_in(self, index=0):
        """The directory of the service that led goes under a node."""
        adopt(self.world.root / f"node-{index}", self.old)
        self.world.node(index)

    def check(self, acknowledged, *indexes):
        for index in indexes:
            assert values(self.directory(index)) == acknowledged, index


@pytest.fixture
def lost(world, monkeypatch):
    return Lost(world, monkeypatch)


def why_offline(outbox):
    return outbox.facts.replication.why_not_leading()


def wait_until_settled(outbox):
    def is_settled():
        grant = outbox.facts.replication.grant
        return grant is not None and not grant.previous_members and not grant.nameless and not grant.entering

    wait_until(is_settled, "the list has its say, and every directory is named")


@pytest.mark.parametrize("comes", ["before new records", "after new records"])
def test_the_lost_come_back_and_are_filled_with_what_went_on(lost, comes):
    done = lost.force()
    assert done.granted.unreached == (0, 2)
    assert done.grant.is_led_alone
    lost.take_in()
    lost.world.node(2)
    if comes == "after new records":  # an empty disk took their place meanwhile; then the old one is put back
        aside = lost.world.root / "old 2"
        lost.world.nodes[2].stop()
        (lost.world.root / "node-2").rename(aside)
        lost.world.node(2)
        lost.world.nodes[0].stop()
        with lost.lead(1, 0, 2) as outbox:
            for value in NEW[:10]:
                outbox.append(0, value).result(WAIT_S)
            wait_for_all(outbox, lost.world.nodes[2].address)
        lost.world.nodes[2].stop()
        shutil.rmtree(lost.world.root / "node-2")
        aside.rename(lost.world.root / "node-2")
        lost.world.node(0)
        lost.world.node(2)
    with lost.lead(1, 0, 2) as outbox:
        for value in NEW[10:] if comes == "after new records" else NEW:
            outbox.append(0, value).result(WAIT_S)
        wait_for_all(outbox)
        wait_until_settled(outbox)
        grant = outbox.facts.replication.grant
        assert grant.generation == done.grant.generation
    lost.check([*KEPT, *NEW], 0, 1, 2)
    for index in (0, 2):
        aside = lost.directory(index) / "generation-0.stale"
        assert values(aside) == [*KEPT, *LOST], "whole, for an operator to read"
        assert lost.promises(aside).grant.leader == 0
        assert not lost.promises(lost.directory(index)).is_unfilled
    lost.world.nodes[1].stop()  # each of them may lead what went on
    with lost.world.nodes[2].hand_over(lost.outbox_id):
        again = promote(lost.directory(2), catch_up=True, push=QUICK, timeout_s=WAIT_S, depose=True)
    assert again.logs[0].log.log_end_offset == len(KEPT + NEW)
    assert again.grant.generation == done.grant.generation


def test_the_same_command_goes_on_where_one_that_answered_went_away_before_it_stored_the_grant(world, monkeypatch):
    for index in (1, 2, 3):
        world.node(index)
    with open_outbox(world, 1, 2, min_insync_replicas=3) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
    world.nodes[1].stop()
    shutil.rmtree(world.root / "node-1")
    given = {"accept_loss": True, "lost": [1], "new": [str(world.nodes[3].address)], "push": QUICK, "timeout_s": WAIT_S}
    with monkeypatch.context() as cut:
        cut.setattr(Election, "offer", lambda *_: {})
        with pytest.raises(CommandRefused, match="Then run the same command again"):
            promote(outbox.directory, **given)
    done = promote(outbox.directory, **given)
    assert [one.index for one in done.grant.members] == [0, 2, 3]
    with open_outbox(world, 2, 3) as outbox:
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        wait_for_all(outbox)


def test_a_leader_of_an_older_generation_leads_on_alone_and_deposes_nobody(lost):
    """The old leader was only unreachable: it acknowledges with member 2, until that one gets the new generation."""
    lost.world.node(2)
    with lost.lead() as old:
        old.append(0, b"beside it").result(WAIT_S)
        lost.force()
        old.append(0, b"once more").result(WAIT_S)
        lost.world.node(1)  # which tells it of the new generation
        with lost.lead(1, 2) as outbox:
            for value in NEW:
                outbox.append(0, value).result(WAIT_S)
            with pytest.raises((NotLeader, DeliveryFailed)):
                old.append(0, b"too late").result(WAIT_S)
            outbox.append(0, b"on").result(WAIT_S)
    lost.check([*KEPT, *NEW, b"on"], 1, 2)
    with pytest.raises(NotLeader):
        lost.lead()
    with pytest.raises(NotAhead):  # not even by force: what it held is set aside
        promote(lost.old, accept_loss=True, depose=True, push=QUICK, timeout_s=WAIT_S)


@pytest.mark.parametrize("tags", [(1, 2), (2, 1)], ids=["the second is newer", "the first is newer"])
def test_two_that_were_forced_beside_each_other_go_offline_and_name_each_other(lost, caplog, monkeypatch, tags):
    left = chain(tags, count(3))
    monkeypatch.setattr(promotion.secrets, "randbits", lambda _bits: next(left))
    first = lost.force().grant
    other = lost.force(lost.old).grant
    assert are_rivals(first.generation, other.generation)
    assert first.pid_epoch != other.pid_epoch, "both give out the offsets that were not reached, each under its own PID"
    lost.world.node(2)
    with lost.lead() as outbox:
        outbox.append(0, b"in one").result(WAIT_S)
        with lost.lead(1, 2, open_timeout_s=1) as beside:
            for one, own, rival in ((beside, first, other), (outbox, other, first)):
                # Until they meet, too few may be in sync.
                wait_until(lambda one=one: isinstance(why_offline(one), RivalGenerations), "it met the other")
                why = str(why_offline(one))
                assert f"here in generation {label(own.generation)}, by" in why
                assert label(rival.generation) in why
                assert "--accept-loss" in why
                with pytest.raises((RivalGenerations, DeliveryFailed)):
                    one.append(0, b"nowhere").result(WAIT_S)
    wait_until(lambda: "refuses our grant" in caplog.text, "the log says it behind the status")
    refused = [one for one in caplog.messages if "refuses our grant" in one]
    assert all("they are rivals" in one for one in refused), refused
    lost.world.nodes[2].stop()
    lost.world.node(2)
    kept = lost.promises(lost.directory(2)).grant.leader
    with lost.lead(*((1, 2) if kept == 1 else ()), open_timeout_s=1) as outbox:
        wait_until(lambda: isinstance(why_offline(outbox), RivalGenerations), "the node that was started again tells")
    promote(lost.directory(1), accept_loss=True, depose=True, push=QUICK, timeout_s=5)  # the one that is to go on
    with lost.lead(1, 2) as outbox:
        outbox.append(0, b"on").result(WAIT_S)
        wait_for_all(outbox, lost.world.nodes[2].address)
    lost.check([*KEPT, b"on"], 1, 2)


@pytest.mark.parametrize(("forced", "refused"), [(1, RivalGenerations), (2, NotLeader)], ids=["rival", "newer"])
def test_a_forced_grant_that_meets_another_forced_one_is_refused_by_its_name(lost, forced, refused):
    """No member answered the look. When the grant is offered, a member has stored another forced grant meanwhile."""
    other = lost.force(lost.old).grant
    if forced == 2:
        other = lost.force(lost.old, lost=[1]).grant
    lost.world.node(2)
    with lost.lead(None, *other.indexes - {0}) as outbox:
        wait_until(outbox.facts.replication.leads_by_the_newest_grant, "member 2 keeps it")
    with cut_off(lost.patch, "describe"), pytest.raises(NotLeader) as met:
        promote(lost.directory(1), accept_loss=True, depose=True, push=QUICK, timeout_s=WAIT_S)
    assert type(met.value) is refused
    assert (met.value.leader, met.value.epoch >= other.epoch) == (0, True), "it names who leads"


def test_a_loss_is_not_accepted_where_a_newer_generation_is_led(lost):
    """The list lacks the members that would refuse: they have the newer history, which would be set aside."""
    done = lost.force()
    lost.world.node(1)
    newer = label(done.grant.generation)
    with pytest.raises(NotLeader, match=rf"is of generation 0, member \d leads in {newer} since"):
        promote(lost.old, accept_loss=True, lost=[2], depose=True, push=QUICK, timeout_s=WAIT_S)
    assert lost.promises(lost.old).grant.generation == 0, "nothing was changed"


def test_an_accepted_loss_fetches_what_another_holds_more_or_is_refused(world):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, min_insync_replicas=1) as outbox:  # so all three have to agree to another leader
        outbox_id = outbox.facts.replication.grant.outbox_id
        outbox.append(0, KEPT[0]).result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[1].stop()
        for value in NEW:
            outbox.append(0, value).result(WAIT_S)
        wait_for_all(outbox, world.nodes[2].address)
    directory = world.root / "node-1" / str(outbox_id)
    given = {"accept_loss": True, "depose": True, "push": QUICK, "timeout_s": WAIT_S}
    with pytest.raises(NotAhead) as refused:
        promote(directory, **given)
    assert (refused.value.member, refused.value.theirs.end_offset, refused.value.own.end_offset) == (2, 31, 1)
    done = promote(directory, **given, catch_up=True)
    assert done.logs[0].log.log_end_offset == 31
    assert values(directory) == [*KEPT, *NEW]


def test_members_are_not_given_up_by_a_leader_that_another_replaced(world, monkeypatch):
    """The leader does not know of the new one: its connections are closed, and it waits long before it reconnects."""
    for index in (1, 2, 3):
        world.node(index)
    patient = replace(QUICK, backoff_min_ms=600_000, backoff_max_ms=600_000)
    with open_outbox(world, 1, 2, push=patient) as outbox:
        replication = outbox.facts.replication
        wait_for_all(outbox)
        world.nodes[1].stop()
        world.nodes[2].stop()
        wait_until(lambda: replication.leading.troubles().keys() == {1, 2}, "both are away")
        with cut_off(monkeypatch):
            directory = world.root / "node-1" / str(replication.grant.outbox_id)
            done = promote(directory, accept_loss=True, depose=True, push=QUICK, timeout_s=1)
        world.node(1)
        with pytest.raises(NotLeader) as refused:
            replication.replace_lost(frozenset({2}), [str(world.nodes[3].address)])
        assert (refused.value.leader, refused.value.epoch) == (1, done.grant.epoch)


def test_the_command_says_who_is_not_fenced(lost, capfd):
    with cut_off(lost.patch):
        assert run(["promote", str(lost.directory(1)), "--accept-loss", "--timeout-s", "1", "--depose"]) == 0
    sys.stdout.flush()
    told = capfd.readouterr().out
    assert "generation 1." in told
    assert "members [0, 2] did not answer and are not fenced" in told
