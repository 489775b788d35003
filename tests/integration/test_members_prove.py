"""Members prove who they are: a wiped disk, an older copy of it, and a second address of one node count for nothing."""

import errno
import json
import logging
import os
import platform
import re
import shutil
import sys
from dataclasses import replace

import pytest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from filtering import StreamMetadata
from pushrep import Acks, Durability, Outbox, OutboxConfig, ReplicaNode, SegmentLog
from pushrep.cli.main import run
from pushrep.election.errors import CantLead, LeaderMayBeAlive, NotAhead, NotLeader, TooFewMembers
from pushrep.election.grants import EPOCH_LEAP, Member
from pushrep.election.messages import PushSessionEndReason
from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.kafka.destination import KafkaDestination
from pushrep.log.errors import DirectoryIsCopy
from pushrep.outbox import CommandRefused, DeliveryFailed, NotEnoughReplicas
from pushrep.outbox.directory_handover import HandoverSocket, moved
from pushrep.outbox.identity import identity_in
from pushrep.outbox.member_changes import Phase, add_member
from pushrep.outbox.promotion import promote
from pushrep.outbox.rebase import rebase
from pushrep.outbox.replication import Replication
from pushrep.replicate.election_state import ElectionStateStore, find_election_state
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.sockets import Address
from tests.integration.outboxes import QUICK, SMALL, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.ports import reserve
from tests.support.outbox_arguments import outbox_arguments


@pytest.fixture
def pushrep(capfd):
    def call(*arguments):
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return call


def values(directory):
    with SegmentLog.open_reader(directory / "orders-0", isolation="written") as reader:
        return [record.value for record in reader.records(0)]


def open_listed(world, *, replicas, **settings):
    """Open the outbox with these addresses, in place of those of the world's nodes."""
    given = {"log_config": SMALL, "push": QUICK, "replica_lag_max_ms": 300, "open_timeout_s": 5, **settings}
    directory = given.pop("directory", world.root / "outbox")
    return Outbox.open(directory, "orders", **outbox_arguments(producer="billing", replicas=replicas, **given))


def everywhere(world, index):
    """Start the node on all addresses, so that its own address does not show which of its names is used."""
    world.nodes[index].stop()
    world.ports[index].close()
    world.ports[index] = reserve("0.0.0.0")  # its former port may be in use at another address of this machine
    port = world.ports[index].getsockname()[1]
    settings = NodeSettings(
        address=Address("0.0.0.0", port), allow=frozenset({"any"}), log_config=SMALL, plain_off_loopback=True
    )
    world.nodes[index] = ReplicaNode(world.root / f"node-{index}", settings)
    return port


class Three:
    """Member 0 leads; 20 records are acknowledged by 0 and 2 alone, and then the leader is down."""

    def __init__(self, world):
        self.world = world
        for index in (1, 2):
            world.node(index)
        with self.lead() as outbox:
            self.outbox_id = outbox.facts.replication.grant.outbox_id
            outbox.append(0, b"first").result(WAIT_S)
            wait_for_all(outbox)
            world.nodes[1].stop()
            self.backup = world.root / "backup of 2"
            self.values = [b"first", *(b"%d" % n for n in range(20))]
            for value in self.values[1:]:
                outbox.append(0, value).result(WAIT_S)
        world.nodes[2].stop()

    def lead(self):
        return open_outbox(self.world, 1, 2, durability=Durability.FLUSHED)

    def directory(self, index):
        return self.world.root / f"node-{index}" / str(self.outbox_id)

    def start(self):
        self.world.node(1)
        self.world.node(2)

    def promote(self, index, **choices):
        with self.world.nodes[index].hand_over(self.outbox_id):
            return promote(self.directory(index), push=QUICK, timeout_s=WAIT_S, **choices)


@pytest.fixture
def three(world):
    return Three(world)


def test_a_wiped_disk_under_its_old_address_votes_for_nobody(three):
    shutil.rmtree(three.world.root / "node-2")
    three.start()
    with pytest.raises(TooFewMembers) as refused:
        three.promote(1)
    assert (refused.value.answered, refused.value.needed) == (1, 2)
    with three.lead() as outbox:
        wait_for_all(outbox)
        wait_until(lambda: not three.world.kept(2).election_state.is_unfilled, "it was given everything")
    assert three.promote(2).logs[0].log.log_end_offset == len(three.values)
    assert values(three.directory(2)) == three.values


def test_a_disk_that_is_lost_under_a_running_leader_is_filled_again(world):
    """The next start of its node must not look older than the start that the leader has seen."""
    for index in (1, 2):
        world.node(index)
    for _ in range(3):  # the counter that the leader has seen is above a new directory's
        world.nodes[2].stop()
        world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[2].stop()
        shutil.rmtree(world.root / "node-2")
        world.node(2)
        outbox.append(0, b"b").result(WAIT_S)
        wait_for_all(outbox)
        wait_until(lambda: not world.kept(2).election_state.is_unfilled, "it counts again")
        found = world.kept(2).directory
    assert values(found) == [b"a", b"b"]


def test_a_disk_that_is_lost_under_an_idle_leader_is_noticed_and_filled_without_a_record(world):
    """Until the next record the member would count as in sync."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        wait_until(lambda: world.replica(2).log.high_watermark == 1, "nothing is left to be told")
        lose(world, 2)
        world.node(2)
        wait_until(lambda: counts(world, 2), "it is filled, and counts again")
        found = world.kept(2).directory
        ended = outbox.facts.replication.leading.manager.session_ends
        assert ended.keys() <= {PushSessionEndReason.STALE_REPLICA_EPOCH, PushSessionEndReason.SHUTDOWN}
    assert values(found) == [b"a"]


def counts(world, index):
    if not (found := world.outboxes(index)):
        return False
    (state,) = (one.election_state for one in found)
    return state.grant is not None and not state.is_unfilled


def test_a_new_member_of_an_empty_outbox_is_filled_at_once(world):
    world.node(1)
    with open_outbox(world, 1, partitions=2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        found = world.kept(1)
        wait_until(lambda: not found.election_state.is_unfilled, "it counts")


def test_replicas_that_are_first_given_to_an_outbox_with_records_count_from_its_first_grant_on(world):
    """The service ends before they are filled: nothing was acknowledged with them, and it leads again."""
    with Outbox.open(world.root / "outbox", "orders", 1, "billing", config=OutboxConfig(log_config=SMALL)) as alone:
        alone.append_many(0, [b"x" * 100] * 50).result(WAIT_S)
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, open_timeout_s=WAIT_S):  # one of them is enough to lead

        def has_grant(index):
            return any(one.election_state.grant for one in world.outboxes(index))

        wait_until(lambda: has_grant(1) and has_grant(2), "both nodes keep it")
    for index in (1, 2):
        assert not world.kept(index).election_state.is_unfilled
    with open_outbox(world, 1, 2) as outbox:
        assert outbox.append(0, b"more").result(WAIT_S) == 50
        wait_for_all(outbox)


def test_an_older_copy_of_a_disk_takes_no_part_until_it_is_filled_anew(three):
    three.world.node(2)
    three.world.nodes[2].stop()
    source = three.world.root / "node-2"
    source.rename(three.backup)
    shutil.copytree(three.backup, source)
    three.start()
    with pytest.raises(TooFewMembers):
        three.promote(1, depose=True)
    with pytest.raises(DirectoryIsCopy, match="pushrep replica moved"):
        three.promote(2)
    with three.lead() as outbox:  # the leader itself is enough with member 1
        before = outbox.facts.replication.kept_grant
        assert three.world.kept(2).is_unfilled
        assert three.world.kept(2).directory_id != before.directory_of(2)
        wait_for_all(outbox)
        grant = outbox.facts.replication.kept_grant
        assert grant.directory_of(2) == three.world.kept(2).directory_id
        assert grant.members_epoch > before.members_epoch
    assert not three.world.kept(2).is_unfilled, "it is a copy of nothing any more"
    assert three.promote(2, depose=True).logs[0].log.log_end_offset == len(three.values)


def test_a_new_disk_acknowledges_nothing_before_enough_others_know_of_it(world):
    """Its old disk may have stored a newer grant, whose leader the other members follow."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, durability=Durability.FLUSHED) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[1].stop()
        lose(world, 2)
        world.node(2)
        waiting = outbox.append(0, b"b")

        def is_filled():
            told = outbox.status().members[2]
            return "counts for nothing" in (told.trouble or "") and (told.lag.records, told.lag.in_sync) == (0, 0)

        wait_until(is_filled, "it holds everything")
        found = world.kept(2)
        wait_until(lambda: not found.election_state.is_unfilled, "its node says the same")
        wait_until(lambda: values(found.directory) == [b"a", b"b"], "the newest record, too, once it is sent")
        assert not waiting.done()
        world.node(1)
        assert waiting.result(WAIT_S) == 1, "its name is in a grant that enough others stored"


def test_a_new_disk_that_comes_in_is_said_to_count_for_nothing_until_that_is_settled(world, monkeypatch):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, durability=Durability.FLUSHED) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        lose(world, 2)
        with monkeypatch.context() as unsettled:
            unsettled.setattr(Replication, "may_settle", property(lambda _: False))
            world.node(2)
            wait_until(lambda: getattr(outbox.facts.replication.grant, "entering", ()) == {2}, "a grant names it")
            wait_until(lambda: "counts for nothing" in (outbox.status().members[2].trouble or ""), "and it is told")
        wait_until(lambda: outbox.status().members[2].trouble is None, "it counts")


def test_a_new_disk_comes_in_by_itself_while_a_majority_is_there(world):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, durability=Durability.FLUSHED) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        lose(world, 2)
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        world.node(2)
        wait_for_all(outbox)
        grant = outbox.facts.replication.kept_grant
        assert grant.directory_of(2) == world.kept(2).directory_id
        assert not grant.entering
        world.nodes[1].stop()
        assert outbox.append(0, b"c").result(WAIT_S) == 2, "it counts for ALL"


def test_a_member_that_was_moved_whole_goes_on_after_the_operator_said_so(three, pushrep):
    source = three.world.root / "node-2"
    shutil.copytree(source, three.backup)
    shutil.rmtree(source)
    three.backup.rename(source)
    three.start()
    with pytest.raises(DirectoryIsCopy):
        three.promote(2)
    assert pushrep("replica", "moved", three.directory(2))[0] == 0
    assert three.promote(2, depose=True).logs[0].log.log_end_offset == len(three.values)


def test_a_services_directory_with_replicas_that_is_a_copy_is_refused(three):
    three.start()
    home = three.world.root / "outbox"
    shutil.copytree(home, three.world.root / "copy")
    shutil.rmtree(home)
    (three.world.root / "copy").rename(home)
    with pytest.raises(DirectoryIsCopy, match="pushrep replica moved"):
        three.lead()
    with pytest.raises(DirectoryIsCopy, match="pushrep replica moved"):  # before a PID epoch and a plan are on disk
        rebase(home, KafkaDestination(bootstrap_servers="127.0.0.1:1"))
    moved(home)
    with three.lead() as outbox:
        assert outbox.append(0, b"more").result(WAIT_S) == len(three.values)


def replace_by_a_copy(directory):
    aside = directory.with_name(directory.name + "-original")
    directory.rename(aside)
    shutil.copytree(aside, directory)
    shutil.rmtree(aside)


def test_an_older_copy_of_a_node_that_was_started_since_is_filled_by_the_leader_that_runs(world):
    """The copy counts its node's starts from where it was made."""
    world.node(1), world.node(2)
    data, backup = world.root / "node-2", world.root / "backup"
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        for number in range(3):
            world.nodes[2].stop()
            if not number:
                shutil.copytree(data, backup)
            world.node(2)
            outbox.append(0, b"b").result(WAIT_S)
            wait_for_all(outbox)
        world.nodes[2].stop()
        shutil.rmtree(data)
        shutil.copytree(backup, data)
        world.node(2)
        outbox.append(0, b"c").result(WAIT_S)
        wait_for_all(outbox)
    assert values(world.kept(2).directory) == [b"a", b"b", b"b", b"b", b"c"]


def test_a_copy_of_a_services_directory_is_filled_below_a_node(three, pushrep):
    three.start()
    home = three.world.root / "outbox"
    replace_by_a_copy(home)
    with pytest.raises(DirectoryIsCopy, match="pushrep replica adopt"):
        three.lead()
    three.promote(2, depose=True)
    assert pushrep("replica", "adopt", three.world.root / "node-0", home)[0] == 0
    three.world.node(0)
    with open_outbox(three.world, 0, 1, directory=three.directory(2), durability=Durability.FLUSHED) as outbox:
        assert outbox.append(0, b"more").result(WAIT_S) == len(three.values)
        wait_for_all(outbox)
        assert outbox.facts.replication.kept_grant.directory_of(0) == three.world.kept(0).directory_id
    assert not three.world.kept(0).is_unfilled
    assert values(three.directory(0)) == [*three.values, b"more"]


def test_a_whole_site_that_was_restored_goes_on_with_the_highest_as_an_accepted_loss(three, pushrep):
    """The command that the refusal prints. Who holds less is refused; what is given out again is under another PID."""
    directories = [three.world.root / "outbox", three.directory(1), three.directory(2)]
    for directory in directories:
        replace_by_a_copy(directory)
    three.start()
    with pytest.raises(DirectoryIsCopy) as refused:
        three.lead()
    assert f"pushrep promote {directories[0]} --accept-loss" in str(refused.value)
    with pytest.raises(NotAhead):
        three.promote(1, accept_loss=True, depose=True)
    before = find_election_state(directories[0], REAL_FILESYSTEM)[1].grant
    code, output, errors = pushrep("promote", directories[0], "--accept-loss", "--timeout-s", WAIT_S)
    assert code == 0, errors
    assert "after it was copied to here" in output
    with three.lead() as outbox:
        grant = outbox.facts.replication.grant
        assert (grant.generation > before.generation, grant.pid_epoch > before.pid_epoch) == (True, True)
        assert outbox.append(0, b"more").result(WAIT_S) == len(three.values)
        wait_for_all(outbox)

        def count():
            states = [three.world.kept(index) for index in (1, 2)]
            return not any(one.is_unfilled or one.election_state.grant.is_led_alone for one in states)

        wait_until(count, "they count again")
    for index in (1, 2):
        assert values(three.directory(index)) == [*three.values, b"more"]
    three.promote(1, depose=True, catch_up=True)  # the other member may have been the last to hear of an epoch


def test_a_copy_leads_by_no_accepted_loss_where_enough_others_are_left(three):
    three.start()
    replace_by_a_copy(three.world.root / "outbox")
    with pytest.raises(
        CommandRefused, match=r"it is a copy, and members \[1, 2\] lead without it: promote one of them"
    ):
        promote(three.world.root / "outbox", accept_loss=True, push=QUICK, timeout_s=WAIT_S)
    with pytest.raises(DirectoryIsCopy):
        three.lead()


def test_a_whole_site_that_was_moved_goes_on_after_the_operator_said_so(three):
    directories = [three.world.root / "outbox", three.directory(1), three.directory(2)]
    for directory in directories:
        replace_by_a_copy(directory)
    three.start()
    for refused in (three.lead, lambda: three.promote(2)):
        with pytest.raises(DirectoryIsCopy, match="If all members are copies"):
            refused()
    for index in (1, 2):
        three.world.nodes[index].stop()
    for directory in directories:
        moved(directory)
    three.start()
    with three.lead() as outbox:
        assert outbox.append(0, b"more").result(WAIT_S) == len(three.values)
        wait_for_all(outbox)


def test_a_node_under_two_names_is_one_member(world):
    """The node listens on an address that no grant has, so only the index in the requests identifies it."""
    world.node(1)
    port = everywhere(world, 1)
    listed = [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    with pytest.raises(CantLead, match="MEMBER_TWICE: the addresses of members 1 and 2 lead"):
        open_listed(world, partitions=1, replicas=listed, min_insync_replicas=3)
    with open_listed(world, partitions=1, replicas=listed[:1], directory=world.root / "other") as outbox:
        outbox.append(0, b"a").result(WAIT_S)


def test_a_second_address_of_a_member_is_not_added(world, pushrep):
    world.node(1)
    port = everywhere(world, 1)
    with open_listed(world, partitions=1, replicas=[f"127.0.0.1:{port}"]) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        code, _, errors = pushrep("replica", "add", outbox.directory, f"127.0.0.2:{port}")
        assert code == 1
        assert "MEMBER_TWICE" in errors
        assert [one.index for one in outbox.status().members] == [0, 1]


@pytest.mark.parametrize("is_led", [True, False])
def test_a_second_address_of_a_member_takes_the_place_of_none_that_is_lost(world, pushrep, is_led):
    """The list would name three, and two disks would be there."""
    for index in (1, 2):
        world.node(index)
    ports = [everywhere(world, index) for index in (1, 2)]
    replicas = [f"127.0.0.1:{port}" for port in ports]
    with open_listed(world, partitions=1, replicas=replicas, min_insync_replicas=3) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[1].stop()
        shutil.rmtree(world.root / "node-1")
        if is_led:
            code, _, errors = pushrep("replica", "replace", outbox.directory, 1, f"127.0.0.2:{ports[1]}", "--lost", 1)
            assert (code, "MEMBER_TWICE" in errors) == (1, True), errors
            assert [one.index for one in outbox.status().members] == [0, 1, 2]
    if not is_led:
        given = {"lost": [1], "new": [f"127.0.0.2:{ports[1]}"], "push": QUICK, "timeout_s": WAIT_S, "depose": True}
        with pytest.raises(CantLead, match="MEMBER_TWICE: the addresses of members 2 and 3 lead"):
            promote(outbox.directory, accept_loss=True, **given)
    assert find_election_state(outbox.directory, REAL_FILESYSTEM)[1].grant.generation == 0, "nothing was changed"


def test_no_replace_makes_the_list_shorter(world, pushrep):
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        epoch = outbox.facts.replication.grant.epoch
        own, others = str(world.nodes[1].address), str(world.nodes[2].address)
        code, _, errors = pushrep("replica", "replace", outbox.directory, 1, own)
        assert code == 1
        assert f"{own} is member 1 itself" in errors
        code, _, errors = pushrep("replica", "replace", outbox.directory, 1, others)
        assert code == 1
        assert f"{others} is member 2 already" in errors
        fresh = str(world.node(3).address)
        for index, why in ((7, "there is no member 7"), (0, "member 0 leads")):
            code, _, errors = pushrep("replica", "replace", outbox.directory, index, fresh)
            assert (code, why in errors) == (1, True), errors
        assert [one.index for one in outbox.status().members] == [0, 1, 2]
        assert outbox.facts.replication.grant.epoch == epoch, "nothing was changed"


def shown_as_new(outbox, index):
    leading = outbox.facts.replication.leading  # none for a moment, while it is handed on
    return leading is not None and index in leading.new_directories


def test_a_new_disk_under_its_old_address_becomes_a_new_member(world, pushrep, monkeypatch):
    """M4: with an index that was never used, so that the disk before it can't come back as the one after it."""
    monkeypatch.setattr(Replication, "_see_directory", lambda *_: None)  # else it may come in by itself first
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, durability=Durability.FLUSHED) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        lose(world, 2)
        own = str(world.nodes[2].address)
        code, _, errors = pushrep("replica", "replace", outbox.directory, 2, own)
        assert (code, "shows no new directory" in errors) == (1, True), errors
        world.node(2)
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        wait_until(lambda: shown_as_new(outbox, 2), "it shows its new directory")
        code, output, errors = pushrep("replica", "replace", outbox.directory, 2, own, "--timeout", WAIT_S)
        assert code == 0, errors
        assert f"member 2 was replaced by member 3 ({own})" in output
        assert [one.index for one in outbox.status().members] == [0, 1, 3]
        world.nodes[1].stop()
        assert outbox.append(0, b"c").result(WAIT_S) == 2, "it counts for ALL"
        found = world.kept(2)
        assert (found.election_state.member, found.election_state.is_unfilled) == (3, False)
        world.node(1)
        wait_for_all(outbox)
    monkeypatch.undo()
    with open_outbox(world, 1, 2) as outbox:
        wait_until(lambda: not nameless(outbox), "its directory gets into the grant")
        assert outbox.facts.replication.kept_grant.directory_of(3) == found.directory_id
    assert values(found.directory) == [b"a", b"b", b"c"]


def test_one_of_two_is_not_replaced_where_its_quorum_needs_it(world, pushrep, monkeypatch):
    """With two members both have to store a new list, so a change that can't end is not begun."""
    monkeypatch.setattr(Replication, "_see_directory", lambda *_: None)
    world.node(1)
    with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        lose(world, 1)
        world.node(1)
        outbox.append(0, b"b").result(WAIT_S)
        wait_until(lambda: shown_as_new(outbox, 1), "it shows its new directory")
        epoch = outbox.facts.replication.grant.epoch
        code, _, errors = pushrep("replica", "replace", outbox.directory, 1, world.nodes[1].address)
        assert (code, "comes in by itself" in errors) == (1, True), errors
        assert outbox.facts.replication.grant.epoch == epoch, "nothing was changed"


def test_a_replace_that_was_interrupted_goes_on_while_it_settles(world):
    for index in (1, 2, 3):
        world.node(index)
    with open_outbox(world, 1, 2, partitions=1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        where = str(world.nodes[3].address)
        wait_until(lambda: add_member(outbox.facts, where, replaced=2).phase is Phase.SETTLING, "a joint grant")
        assert add_member(outbox.facts, where, replaced=2).phase in {Phase.SETTLING, Phase.DONE}
        wait_until(lambda: not settled_again(outbox, where), "settled")
        with pytest.raises(CommandRefused, match="pushrep replica remove DIRECTORY 2"):
            add_member(outbox.facts, where, replaced=2)


def settled_again(outbox, where):
    add_member(outbox.facts, where)
    return outbox.status().is_changing


def nameless(outbox):
    grant = outbox.facts.replication.grant
    return grant is None or grant.nameless


class FullDisk(RealFilesystem):
    """A node's disk on which logs can't grow, while it is set to be full."""

    is_full = False

    def open(self, path, *, create=False, writable=True):
        return FullFile(super().open(path, create=create, writable=writable), self, path)


class FullFile:
    def __init__(self, file, disk, path):
        self._file, self._disk, self._path = file, disk, path

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write_at(self, data, position):
        if self._disk.is_full and self._path.suffix == ".log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._file.write_at(data, position)


def test_a_full_replica_says_so_in_its_leaders_status_and_goes_on_when_there_is_room(world, caplog):
    disk = FullDisk()
    world.node(1)
    address = world.nodes[1].address
    world.nodes[1].stop()
    settings = NodeSettings(address=address, allow=frozenset({"any"}), log_config=SMALL)
    world.nodes[1] = ReplicaNode(world.root / "node-1", settings, filesystem=disk)
    with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        disk.is_full = True
        outbox.append(0, b"b").result(WAIT_S)

        def told():
            return outbox.status().members[1].trouble or ""

        wait_until(lambda: "KAFKA_STORAGE_ERROR" in told(), "the status says why")
        assert "No space left on device" in told()
        assert "% of its disk are used" in told()
        assert platform.node() in told()
        wait_until(lambda: sum("ended" in one or "session" in one for one in caplog.messages) > 5, "it tries on")
        assert sum("% of its disk are used" in one for one in caplog.messages) == 1, "logged once a minute"
        disk.is_full = False
        wait_for_all(outbox)
        assert outbox.status().members[1].trouble is None
        assert [replica.refused for _, replica in world.nodes[1].replicas()] == [None], "nothing of it is told any more"


class Unreadable(RealFilesystem):
    """A disk that opens no segment, as one that failed under a node which was started since."""

    is_broken = True

    def open(self, path, **how):
        if self.is_broken and path.suffix == ".log":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().open(path, **how)


def test_a_replica_whose_log_can_not_be_opened_says_why_in_its_leaders_status(world, caplog):
    world.node(1)
    with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        disk, address = Unreadable(), world.nodes[1].address
        world.nodes[1].stop()
        settings = NodeSettings(address=address, allow=frozenset({"any"}), log_config=SMALL)
        world.nodes[1] = ReplicaNode(world.root / "node-1", settings, filesystem=disk)

        def trouble():
            return outbox.status().members[1].trouble or ""

        wait_until(lambda: "KAFKA_STORAGE_ERROR" in trouble(), "the status says why")
        assert "Input/output error" in trouble()
        assert platform.node() in trouble()
        wait_until(lambda: sum(world.nodes[1].calls.refusals().values()) > 5, "it is asked on")
        for who in ("can't be opened", "orders-0: replica 1"):
            told = [one for one in caplog.records if who in one.getMessage() and one.levelno >= logging.WARNING]
            assert len(told) == 1, "logged once a minute, by the node and by its leader"
        disk.is_broken = False
        wait_for_all(outbox)
        assert outbox.status().members[1].trouble is None


def rewrite(directory, change):
    """Rewrite a member's election state while no process has its directory open."""
    outbox_id, state = find_election_state(directory, REAL_FILESYSTEM)
    ElectionStateStore(directory, outbox_id, REAL_FILESYSTEM).keep(change(state))


def test_a_member_that_was_away_while_many_new_disks_came_in_is_given_everything(world):
    """Each of them makes the epochs leap, so that no directory before it took one of the numbers that come."""
    world.node(1), world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
    world.nodes[2].stop()

    def leap(state):
        epoch = state.grant.epoch + 2 * EPOCH_LEAP - 1024
        return replace(state, number=epoch, grant=replace(state.grant, epoch=epoch, members_epoch=epoch))

    for _ in range(2):
        rewrite(world.root / "outbox", leap)
        with open_outbox(world, 1, 2) as outbox:
            outbox.append(0, b"b").result(WAIT_S)
    world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        wait_for_all(outbox)
        assert outbox.status().members[2].trouble is None


def test_a_replica_that_refuses_says_so_in_its_leaders_status_by_name(world):
    """Whatever it is that the node refuses: here it keeps a grant that does not list who leads."""
    world.node(1), world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        own = world.kept(2).directory
    world.nodes[2].stop()
    others = (Member(2, "127.0.0.1:1"), Member(5))
    rewrite(
        own,
        lambda state: replace(state, grant=replace(state.grant, epoch=5, members_epoch=5, leader=5, members=others)),
    )
    world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"b").result(WAIT_S)
        told = lambda: outbox.status().members[2]  # noqa: E731 - asked again and again
        wait_until(lambda: "NOT_A_MEMBER" in (told().trouble or ""), "the status says why")
        assert "replica_away" in {one.name for one in outbox.status().problems()}


def test_status_says_what_a_directory_is(three, pushrep):
    """A replica's and a node's directory, and a leader that was replaced while it was closed."""
    three.start()
    assert three.promote(2, depose=True).grant.leader == 2
    for directory, kind in ((three.world.root / "node-1", "node"), (three.directory(1), "logs")):
        code, output, _ = pushrep("status", directory, "--json")
        told = 3 if kind == "node" else 0  # a node of this process has no socket: nobody can tell how it is
        assert (code, json.loads(output)["places"][0]["kind"]) == (told, kind)
    with pytest.raises(NotLeader):
        three.lead()
    code, output, _ = pushrep("status", three.world.root / "outbox", "--json")
    assert [one["index"] for one in json.loads(output)["places"][0]["members"] if one["is_leader"]] == [2]


def lose(world, *indexes):
    for index in indexes:
        world.nodes[index].stop()
        shutil.rmtree(world.root / f"node-{index}")


@pytest.mark.parametrize("lost", [(1,), (1, 2)], ids=["one of two", "two of three"])
def test_there_is_a_way_back_from_every_loss(world, pushrep, lost):
    """The test runs the command in the error. Afterwards the outbox accepts records with ALL again, on as many disks as
    printed, and each new member may lead.
    """
    coming = [index + 2 for index in lost]
    for index in (*lost, *coming):
        world.node(index)
    home = world.root / "outbox"
    with open_outbox(world, *lost) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        pid = outbox.pid
    lose(world, *lost)
    if len(lost) > 1:  # a single other member is not needed to lead, only to acknowledge
        code, _, errors = pushrep("promote", home, "--timeout-s", "1")
        assert code == 1
        printed = errors[errors.index("pushrep promote") :].strip()
        assert printed == f"pushrep promote {home} --accept-loss --lost 1 --lost 2 --new HOST:PORT --new HOST:PORT"
    new = [str(world.nodes[index].address) for index in coming]
    options = [part for index in lost for part in ("--lost", index)] + [part for one in new for part in ("--new", one)]
    code, output, errors = pushrep("promote", home, "--accept-loss", *options, "--timeout-s", "2")
    assert code == 0, errors
    assert "accepted loss" in output
    assert f"replicas={json.dumps(new)}" in output
    with open_outbox(world, *coming) as outbox:
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        wait_for_all(outbox)
        outbox_id = outbox.facts.replication.grant.outbox_id

        def is_settled():
            grant = outbox.facts.replication.grant  # none for a moment, while it is handed on
            return grant is not None and not grant.previous_members

        wait_until(is_settled, "the new list has its say without an operator")
        wait_for_all(outbox)
        status = outbox.status()
        assert (len(status.members), status.min_insync_replicas) == (1 + len(new), 2)
        assert outbox.pid != pid, "what the lost ones gave out may be given out again"
    for index in coming:
        found, member = world.kept(index).directory, world.kept(index).election_state.member
        assert values(found) == [b"a", b"b"]
        # The service has just ended. Where its last beat was lost, the refusal says "try again some seconds later".
        again = retry_if_exception_type(LeaderMayBeAlive)
        for attempt in Retrying(retry=again, wait=wait_fixed(0.1), stop=stop_after_delay(WAIT_S), reraise=True):
            with attempt, world.nodes[index].hand_over(outbox_id) as last_contact:
                done = promote(found, catch_up=True, push=QUICK, timeout_s=WAIT_S, last_contact=last_contact)
        assert done.grant.leader == member


def test_a_member_that_lives_is_not_given_up(three, pushrep):
    """Two that neither answer nor are lost could lead by the old list; one that answers is not lost."""
    three.start()
    home = three.world.root / "outbox"
    code, _, errors = pushrep("promote", home, "--accept-loss", "--lost", 1, "--timeout-s", "5")
    assert code == 1
    assert "member 1 answers: it is not lost" in errors
    for index in (1, 2):
        three.world.nodes[index].stop()
    code, _, errors = pushrep("promote", home, "--accept-loss", "--new", "127.0.0.1:9", "--timeout-s", "1")
    assert code == 1
    assert "--lost 1 --lost 2" in errors
    code, _, errors = pushrep("promote", home, "--accept-loss", "--lost", 7, "--timeout-s", "1")
    assert (code, "there is no member 7" in errors) == (1, True)
    code, _, errors = pushrep("promote", home, "--lost", 1, "--timeout-s", "1")
    assert (code, "--accept-loss" in errors) == (1, True)
    three.start()
    with three.lead() as outbox:
        assert outbox.append(0, b"nothing was changed").result(WAIT_S) == len(three.values)
        wait_for_all(outbox)


def test_a_leader_that_another_heard_lately_is_not_given_up(world):
    """The leader does not answer the promotion and is given as --lost, but the member that answers had contact with
    it.
    """
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        outbox_id = world.kept(2).outbox_id
        choices = {"accept_loss": True, "lost": [0], "leader_alive_ms": 600_000, "push": QUICK, "timeout_s": WAIT_S}
        with world.nodes[2].hand_over(outbox_id) as told, pytest.raises(LeaderMayBeAlive) as refused:
            promote(world.root / "node-2" / str(outbox_id), last_contact=told, **choices)
        assert 1 in refused.value.contacts
        assert outbox.append(0, b"on").result(WAIT_S) == 1, "nobody was fenced"


@pytest.mark.parametrize("is_led", [True, False], ids=["its leader runs", "opened afterwards"])
def test_a_change_that_fails_prints_the_list_and_the_command_that_leads_out_works(world, pushrep, is_led):
    """Two of three members are destroyed: the old list has no majority for a change, and the service continues."""
    for index in (1, 2, 3, 4):
        world.node(index)
    waiting = []
    with open_outbox(world, 1, 2, open_timeout_s=2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        pid = outbox.pid
        if is_led:
            lose(world, 1, 2)
            waiting.append(outbox.append(0, b"b"))
            go_on_with(world, pushrep, outbox)
            assert waiting[0].result(WAIT_S) == 1, "it was not acknowledged before, and is now"
    if not is_led:
        lose(world, 1, 2)
        with open_outbox(world, 1, 2, open_timeout_s=5) as outbox:
            with pytest.raises(NotEnoughReplicas):
                outbox.append(0, b"b")
            go_on_with(world, pushrep, outbox)
    with open_outbox(world, 3, 4) as outbox:
        outbox.append(0, b"d").result(WAIT_S)
        wait_for_all(outbox)
        records = list(outbox.log(0).records(0))
    wanted = [b"a", *([b"b"] if is_led else []), b"c", b"d"]
    for index in (3, 4):
        assert values(world.kept(index).directory) == wanted
    pids = [StreamMetadata.unpack(record.key).pid for record in records]
    first = 1 + is_led
    assert pids[:first] == [pid] * first
    assert pids[first:] == [outbox.pid] * 2
    assert outbox.pid != pid, "what the lost ones gave out may be given out again"


def go_on_with(world, pushrep, outbox):
    home = outbox.directory
    code, _, errors = pushrep("replica", "remove", home, 1, "--timeout", "1")
    assert code == 1
    assert "the members are 0 (here), 1 (" in errors
    assert "from the next open on: replicas=[" in errors
    command = f"pushrep replica replace {home} 1 HOST:PORT --lost 1"
    assert command in errors.splitlines()[-1]
    new = str(world.nodes[3].address)
    code, output, errors = pushrep(*command.replace("HOST:PORT", new).split()[1:], "--timeout", WAIT_S)
    assert code == 0, errors
    assert f"member 1 was replaced by member 3 ({new})" in output
    assert "members [2] were not reached" in errors
    assert outbox.append(0, b"c").result(WAIT_S)
    code, output, errors = pushrep("replica", "replace", home, 2, world.nodes[4].address)
    assert code == 0, errors
    assert [one.index for one in outbox.status().members] == [0, 3, 4]


def test_members_are_given_up_under_a_running_leader_only_where_too_few_are_left(world, pushrep):
    for index in (1, 2, 3):
        world.node(index)
    new = world.nodes[3].address
    with open_outbox(world, 1, 2, min_insync_replicas=3, open_timeout_s=2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        home, epoch, pid = outbox.directory, outbox.facts.replication.grant.epoch, outbox.pid
        for lost, why in (
            ((1,), "member 1 answers: it is not lost"),
            ((0,), "member 0 leads"),
            ((7,), "there is no member 7"),
        ):
            options = [part for one in lost for part in ("--lost", one)]
            code, _, errors = pushrep("replica", "replace", home, lost[0], new, *options)
            assert (code, why in errors) == (1, True), errors
        code, _, errors = pushrep("replica", "replace", home, 1, new, "--lost", 2)
        assert (code, "--lost must name member 1, too" in errors) == (2, True)
        assert outbox.facts.replication.grant.epoch == epoch
        outbox.append(0, b"b").result(WAIT_S)
        lose(world, 2)
        world.nodes[1].stop()
        code, _, errors = pushrep("replica", "replace", home, 2, new, "--lost", 2)
        assert code == 1
        printed = f"pushrep replica replace {home} 2 {new} --lost 1 --lost 2"
        assert printed in errors, "all three have to agree: the other one is destroyed, or comes back"
        world.node(1)
        wait_for_all(outbox, world.nodes[1].address)
        assert (outbox.facts.replication.grant.epoch, outbox.pid) == (epoch, pid), "nothing was changed"
        code, _, errors = pushrep("replica", "replace", home, 2, new, "--lost", 2, "--timeout", WAIT_S)
        assert code == 0, errors
        lost = r"member 2 does not answer: last contact 20[^;]*; partition 0: high watermark unknown, log end 2"
        told = (
            rf"without members \[2\]; .* log end 2; {lost}; member 1: last contact (none|[0-9.]+ s ago); .* log end 2"
        )
        assert re.search(told, errors), errors
        assert outbox.append(0, b"c").result(WAIT_S) == 2
        wait_for_all(outbox)
        assert [one.index for one in outbox.status().members] == [0, 1, 3]
        shown = [StreamMetadata.unpack(record.key).pid for record in outbox.log(0).records(0)]
        assert shown == [pid, pid, outbox.pid], "offsets that member 2 gave out are given out again: under another PID"
        assert outbox.pid != pid
        assert identity_in(REAL_FILESYSTEM, home).pid == outbox.pid
    for index in (1, 3):
        assert values(world.kept(index).directory) == [b"a", b"b", b"c"]
    with open_outbox(world, 1, 3, partitions=1) as outbox:
        wait_for_all(outbox)
        world.node(2)
        code, _, errors = pushrep("replica", "replace", outbox.directory, 3, world.nodes[2].address, "--lost", 3)
        assert (code, "it is not lost" in errors) == (1, True)
        lose(world, 3)
        code, _, errors = pushrep("replica", "replace", outbox.directory, 3, world.nodes[2].address, "--lost", 3)
        assert (code, "are enough to agree" in errors) == (1, True), errors
        code, _, errors = pushrep("replica", "replace", outbox.directory, 3, world.nodes[2].address)
        assert code == 0, errors


def test_a_replace_that_can_not_settle_goes_on_by_the_command_that_it_prints(world, pushrep):
    """One of two is lost for good: the new one is in the list already, and the old list still has its say."""
    for index in (1, 2, 3):
        world.node(index)
    with open_outbox(world, 1, open_timeout_s=2) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
        lose(world, 1)
        home, new = outbox.directory, str(world.nodes[2].address)
        code, _, errors = pushrep("replica", "replace", home, 1, new, "--timeout", 1)
        assert code == 1
        assert "is still settling" in errors
        assert "the change is not finished, majorities of both lists are needed: run the same command" in errors
        command = next(line for line in errors.splitlines() if "--lost" in line).partition("destroyed: ")[2]
        assert command == f"pushrep replica replace {home} 1 HOST:PORT --lost 1"
        code, output, errors = pushrep(*command.replace("HOST:PORT", new).split()[1:], "--timeout", WAIT_S)
        assert code == 0, errors
        assert f"member 1 was replaced by member 2 ({new}); members: 0 (here), 2" in output
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        another = world.nodes[3].address
        code, _, errors = pushrep("replica", "replace", home, 2, new, "--lost", 2)
        assert (code, "it is not lost" in errors) == (1, True), errors
        assert pushrep("replica", "add", home, another)[0] == 0
        code, _, errors = pushrep("replica", "replace", home, 2, another, "--lost", 2)
        assert (code, "is member 3 already" in errors) == (1, True), errors
        wait_for_all(outbox)
    for index in (2, 3):
        assert values(world.kept(index).directory) == [b"a", b"b"]


def test_a_lost_member_is_replaced_while_nobody_has_the_outbox_open(world, pushrep):
    world.node(1)
    world.node(2)
    with open_outbox(world, 1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        wait_for_all(outbox)
    lose(world, 1)
    command = ("replica", "replace", outbox.directory, 1, world.nodes[2].address, "--lost", 1)
    for _ in range(2):  # a second time it is done already
        code, output, errors = pushrep(*command)
        assert code == 0, errors
        assert "member 1 was replaced by member 2" in output
    with open_outbox(world, 2) as outbox:
        assert outbox.append(0, b"b").result(WAIT_S) == 1
        wait_for_all(outbox)
    assert values(world.kept(2).directory) == [b"a", b"b"]


def test_a_refused_promote_leaves_the_leader_leading(three, pushrep):
    """A replica is promoted by the command while the leader is healthy: only `--depose` replaces it."""
    three.start()
    with three.lead() as outbox, HandoverSocket(three.world.nodes[1]):
        wait_for_all(outbox)
        three.world.nodes[2].stop()
        epoch = outbox.facts.replication.grant.epoch
        for choices in ((), ("--catch-up",), ("--accept-loss",)):
            code, _, errors = pushrep("promote", three.directory(1), "--timeout-s", "5", *choices)
            assert code == 1
            assert f"member 0 may lead on by epoch {epoch}: member 1 was in contact with it" in errors
            assert "Nobody was fenced" in errors
        at = outbox.append(0, b"still").result(WAIT_S)
        assert outbox.facts.replication.grant.epoch == epoch
        code, _, errors = pushrep("promote", three.directory(1), "--timeout-s", "5", "--accept-loss", "--depose")
        assert code == 0, errors
        with pytest.raises((NotLeader, DeliveryFailed, NotEnoughReplicas)):
            outbox.append(0, b"deposed").result(WAIT_S)
    assert values(three.directory(1))[at] == b"still"


def test_an_idle_leader_is_heard_once_a_second_and_says_when_it_ends(three):
    """On each connection, whatever else is sent; one that closed in order is not taken for alive."""
    three.start()
    with three.lead() as outbox:
        wait_for_all(outbox)
        ages = [0]
        beats = []

        def is_heard():
            age_ms = three.world.kept(1).contact_age_ms
            beats.extend([ages[-1]] if age_ms < ages[-1] else [])
            ages.append(age_ms)
            return len(beats) > 2

        wait_until(is_heard, "beats came while nothing was pushed")
    assert three.world.kept(1).contact_age_ms is None
    with three.world.nodes[1].hand_over(three.outbox_id) as last_contact:
        done = promote(three.directory(1), push=QUICK, timeout_s=WAIT_S, last_contact=last_contact)
    assert done.grant.leader == 1
