"""What an outbox with members does by their answers. The members' side is scripted: who answers what, what an election
finds, which sessions a leader has. The grants, their store and all that is decided are the real ones.
"""

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep import Acks, OutboxConfig
from pushrep.election.candidate import MemberAnswer
from pushrep.election.errors import NotLeader, TooFewMembers
from pushrep.election.grants import next_ballot, next_generation
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import LogPoisoned
from pushrep.log.directory_id import DirectoryId, write_directory_id
from pushrep.outbox import replication as module
from pushrep.outbox.errors import CommandRefused, NotEnoughReplicas, OutboxClosed
from pushrep.outbox.identity import new_identity
from pushrep.outbox.member_changes import Phase, add_member, remove_member, replace_lost
from pushrep.outbox.replication import LEFT_MS, Replication
from pushrep.outbox.settings import OutboxSettings
from pushrep.replicate.election_state import ElectionStateStore
from pushrep.replicate.errors import MayStillBeDelivered
from pushrep.replicate.member_clients import Ending
from tests.support.simulated_disk import SimulatedClock
from tests.unit.gated_disk import until

WAIT_S = 5
TOO_FEW = TooFewMembers(answered=1, needed=2, silent=(1, 2))


class World:
    """The other members, and what this outbox asked of them. `troubles` are what the next elections raise."""

    def __init__(self, tmp_path):
        self.store = ElectionStateStore(tmp_path, UUID(int=1), REAL_FILESYSTEM)
        self.silent, self.shown, self.troubles, self.hooks = set(), {}, [], {}
        self.done, self.leads, self.held = [], [], {1, 2}
        self.elected = threading.Semaphore(0)
        self.index = 0

    # ---- as an Election

    def own(self):
        return MemberAnswer(index=0, grant=self.store.kept.grant, highest_epoch=0)

    def describe_members(self, grant, timeout_s):
        self.done.append(f"ask {timeout_s:g}")
        others = sorted(grant.indexes - {0} - self.silent)
        return {n: answer(n, self.shown.get(n, grant), grant) for n in others}

    def run(self, purpose, timeout_s, *, first, change, may_cut, leads):
        self.done.append("run")
        self.elected.release()
        if self.troubles:
            raise self.troubles.pop(0)
        newest = self.store.kept.grant or first
        grant = change(newest, next_ballot(0, newest.epoch))
        self.store.keep(replace(self.store.kept, grant=grant))
        return grant

    def begin(self, grant):
        self.done.append(f"begin {grant.epoch}")

    def begin_unfenced(self):
        self.done.append("unfenced")

    def offer(self, grant, timeout_s):
        return {n: answer(n, grant, grant) for n in grant.indexes & self.held}

    def offer_removed(self, grant, gone, timeout_s):
        self.done.append(f"removed {[one.index for one in gone]}")

    # ---- as a Leading

    def lead(self, outbox_id, grant, logs, replicas, **given):
        lead = Lead(grant, logs, replicas)
        self.leads.append(lead)
        return lead


def answer(index, grant, asked):
    return MemberAnswer(index=index, grant=grant, highest_epoch=asked.epoch, directory_id=asked.directory_of(index))


class Lead(SimpleNamespace):
    def __init__(self, grant, logs, replicas):
        super().__init__(grant=grant, replicas=[one.index for one in replicas], directories={}, new_directories={})
        self.partitions = {number: Led() for number in logs}
        self.standbys, self.away, self.resigned, self.is_closed = set(), set(), [], False

    def start(self):
        pass

    def is_away(self, index):
        return index in self.away

    def troubles(self):
        return {}

    def push_to(self, replica):
        self.replicas.append(replica.index)

    def stop_pushing_to(self, index):
        self.replicas.remove(index)

    def hand_over(self):
        return {number: list(led.waiting) for number, led in self.partitions.items() if led.waiting}

    def resign(self, why, successor=-1):
        self.resigned.append((why, successor))

    def close(self):
        self.is_closed = True


class Led(SimpleNamespace):
    """A partition of which every member holds everything."""

    def __init__(self):
        super().__init__(resigned=None, lock=threading.Lock(), waiting=[])
        self.leader = SimpleNamespace(
            in_sync={0, 1, 2}, caught_up={0, 1, 2}, may_append_all=True, may_settle=True, has_resigned=False,
            has_all=lambda _index: True, may_enter=lambda _index: True, held_by=lambda _index: 0,
            owes_since=lambda _index: None,
        )  # fmt: skip

    def when_replicated(self, end_offset, callback):
        self.waiting.append((end_offset, callback))


class Log(SimpleNamespace):
    def __init__(self, number):
        super().__init__(topic="orders", partition=number, log_id=UUID(int=2), path=Path(f"orders-{number}"))
        self.stopped_by, self.why, self.log_start_offset, self.log_end_offset = None, "", 0, 0

    def why_no_append(self):
        return self.why


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)

    def election(store, logs, push, *, addresses, fetched, clock):
        world.addresses, world.ending = addresses, Ending(push)
        return world

    monkeypatch.setattr(module, "Election", election)
    monkeypatch.setattr(module, "Leading", world.lead)
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(module, "_NAME_AGAIN_S", 0.001)
    return world


@pytest.fixture
def opened(world):
    """`opened(acks)`: the replication of an outbox of three members and two partitions, which leads if it can."""
    with ExitStack() as resources:

        def opened(acks=Acks.ALL, **config):
            replicas = ["127.0.0.1:1", "127.0.0.1:2"]
            identity = new_identity(producer="p", topic="orders", partitions=2, carrier="key", replicas=replicas)
            identity = replace(identity, outbox_id=str(UUID(int=1)))
            settings = OutboxSettings(replicas=replicas, acks=acks, config=OutboxConfig(**config))
            world.clock, world.logs = SimulatedClock(), [Log(n) for n in range(2)]
            logs = [(log, SimpleNamespace(dispatch=None)) for log in world.logs]
            one = Replication(identity, logs, world.store, settings, world.clock)
            resources.callback(one.close)
            one.open()
            one.start(0)
            world.done.clear()
            return one

        yield opened


def renewal(newest, epoch):
    return newest.renewed(epoch, 0)


def wait(callbacks):
    """A record of partition 0 that waits for the members; what became of it."""
    found = []
    callbacks.append((1, found.append))
    return found


def test_once_it_is_closing_no_member_is_asked_and_nothing_changes(opened, world):
    """A close ends all waiting for members, and no change begins any more; it leads on until its end."""
    outbox = opened()
    outbox.end_change()
    for change in (
        lambda: outbox.change_members(renewal),
        lambda: outbox.stop_addressing(1),
        lambda: outbox.replace_lost(frozenset({1}), []),
    ):
        with pytest.raises(OutboxClosed):
            change()
    assert world.done == []
    assert outbox.why_not_leading() is None
    outbox.close()
    assert isinstance(outbox.why_not_leading(), OutboxClosed)
    assert world.leads[-1].is_closed
    gone_on = []
    with pytest.raises(OutboxClosed):
        outbox.lead_anew(lambda: gone_on.append(1))
    assert (world.done, gone_on) == ([], [])


@pytest.mark.parametrize(
    ("silent", "shown", "expected"),
    [
        (set(), {}, True),
        ({1}, {}, True),
        ({1, 2}, {}, False),
        (set(), {1: "later"}, True),
        (set(), {1: "later", 2: "later"}, False),
        ({1}, {2: "later"}, False),
        (set(), {1: "forced"}, False),
        (set(), {1: "before"}, True),
        ({2}, {1: None}, True),
    ],
)
def test_it_leads_by_the_newest_grant_if_so_many_answer_without_a_newer_one_as_could_have_granted_it(
    opened, world, silent, shown, expected
):
    outbox = opened()
    own = outbox.grant
    later, generation = own.renewed(own.epoch + 1, 1), next_generation(0, 5)
    forced = own.forced(own.epoch + 1, 1, generation, members=own.members, min_insync_replicas=2, reached={1})
    kinds = {"later": later, "forced": forced, "before": own, None: None}
    world.silent, world.shown = silent, {index: kinds[kind] for index, kind in shown.items()}
    assert outbox.leads_by_the_newest_grant() is expected


def test_who_leads_no_more_asks_nobody_whether_it_leads(opened, world):
    outbox = opened()
    for appender in outbox.appenders.values():
        appender.failure = NotLeader(1, 300)
    assert not outbox.leads_by_the_newest_grant()
    assert world.done == []


def test_a_member_is_silent_once_it_can_not_be_reached_or_has_not_answered_for_some_time(opened, world):
    outbox = opened()
    lead = world.leads[-1]
    assert not outbox.is_silent(1), "it is not asked yet"
    lead.away = {1}
    assert (outbox.is_silent(1), outbox.is_silent(2)) == (True, False)
    lead.away = set()
    world.clock.advance(module.LEADER_ALIVE_MS - 1)
    assert not outbox.is_silent(2)
    lead.on_kept(2)
    world.clock.advance(1)
    assert (outbox.is_silent(1), outbox.is_silent(2)) == (True, False)


def test_a_learner_that_nobody_goes_on_with_is_left_until_it_is_a_member_or_given_up(opened, world):
    outbox = opened()
    for index in (3, 4):
        outbox.push_to(index, f"127.0.0.1:{index}")
        outbox.want_learner(index)
    began_ms = world.clock.wall_ms()
    assert world.leads[-1].replicas == [1, 2, 3, 4]
    assert outbox.learners == {3: "127.0.0.1:3", 4: "127.0.0.1:4"}
    world.clock.advance(LEFT_MS - 1)
    assert outbox.left_learners == {}
    outbox.want_learner(4)
    world.clock.advance(1)
    assert outbox.left_learners == {3: began_ms}
    outbox.stop_pushing_to(3)
    outbox.stop_pushing_to(3)
    outbox.forget_learner(4)
    assert (outbox.left_learners, outbox.learners) == ({}, {})
    assert world.leads[-1].replicas == [1, 2, 4]


@pytest.mark.parametrize("acks", Acks)
def test_records_that_wait_go_on_waiting_under_the_next_grant_or_are_told_that_they_may_be_delivered(
    opened, world, acks, monkeypatch
):
    outbox = opened(acks)
    found = wait(world.leads[-1].partitions[0].waiting)
    granted = outbox.change_members(renewal)
    assert (outbox.grant, found) == (granted, [])
    assert [end for end, _ in world.leads[-1].partitions[0].waiting] == [1]
    assert world.leads[-1].partitions[1].waiting == []
    world.troubles.append(TOO_FEW)
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", WAIT_S)
    with pytest.raises(TooFewMembers):
        outbox.change_members(renewal)
    (why,) = found
    assert isinstance(why, MayStillBeDelivered)
    assert "the members could not be changed: 1 of 2 needed members" in str(why)
    assert outbox.grant is None, "it does not lead"
    assert (outbox.has_caught_up(1), outbox.may_settle) == (False, False)
    assert ("unfenced" in world.done) is (acks is Acks.LOCAL)
    assert isinstance(outbox.why_not_leading(), NotEnoughReplicas)


def test_a_change_that_too_few_members_took_leaves_it_to_lead_again_once_enough_answer(opened, world):
    outbox = opened()
    outbox.watch([])
    before = outbox.grant
    world.troubles.append(TOO_FEW)
    with pytest.raises(TooFewMembers):
        outbox.change_members(renewal)
    until(lambda: outbox.grant is not None, "it leads again")
    assert outbox.grant.epoch > before.epoch


@pytest.mark.parametrize(
    "trouble", [TOO_FEW, OSError("full"), LogPoisoned(Path("orders-0"), OSError())], ids=["members", "disk", "log"]
)
def test_what_passes_keeps_nobody_from_leading_once_it_has_passed(opened, world, trouble):
    world.troubles = [TOO_FEW, trouble]
    outbox = opened()
    assert outbox.grant is None
    reset = []
    outbox.watch([SimpleNamespace(reset_to_log_end=lambda: reset.append(1), expire=lambda *_: None)])
    for _ in range(3):
        assert world.elected.acquire(timeout=WAIT_S)
    with outbox.step_lock:
        outbox.who_answers()  # waits for the change that is under way
    assert outbox.grant is not None
    assert reset == [1], "what was fetched stands before its next append"
    assert outbox.why_not_leading() is None


def test_what_does_not_pass_is_told_to_each_append_until_it_is_opened_again(opened, world):
    world.troubles = [TOO_FEW, why := NotLeader(1, 300)]
    outbox = opened()
    outbox.watch([])
    for _ in range(2):
        assert world.elected.acquire(timeout=WAIT_S)
    outbox.close()
    assert [appender.failure for appender in outbox.appenders.values()] == [why, why]


def test_a_log_that_was_opened_anew_goes_on_under_a_new_grant_and_not_before(opened, world):
    outbox = opened()
    before, gone_on = outbox.grant, []
    world.logs[1].stopped_by = OSError()
    with pytest.raises(CommandRefused, match="once orders-1 can be opened again"):
        outbox.lead_anew(lambda: gone_on.append(1))
    assert (outbox.grant, gone_on) == (before, [])
    world.logs[1].stopped_by = None
    outbox.lead_anew(lambda: gone_on.append(outbox.grant.epoch))
    assert gone_on == [outbox.grant.epoch]
    assert outbox.grant.epoch > before.epoch
    world.troubles.append(TOO_FEW)
    with pytest.raises(TooFewMembers):
        outbox.lead_anew(lambda: gone_on.append(None))
    assert gone_on[1:] == [None], "its writer waits for that"


def test_who_has_lost_the_lead_opens_its_log_again_and_asks_for_none(opened, world):
    outbox = opened()
    for led in world.leads[-1].partitions.values():
        led.resigned = NotLeader(1, 300)
    gone_on = []
    outbox.lead_anew(lambda: gone_on.append(1))
    assert (gone_on, world.done) == ([1], [])


def test_takeovers_are_held_by_so_many_members_as_meet_every_majority(opened, world):
    outbox = opened()
    before = outbox.grant
    world.silent = {1, 2}
    with pytest.raises(CommandRefused, match=r"1 of 2 needed members keep the hold, and \[1, 2\] do not: try again"):
        outbox.hold_takeovers(60_000, "an upgrade")
    assert outbox.grant is before
    world.silent, world.held = {2}, set()
    with pytest.raises(CommandRefused, match="it is stored there, and has to be said again"):
        outbox.hold_takeovers(60_000, "an upgrade")
    world.held = {1}
    granted = outbox.hold_takeovers(60_000, "an upgrade")
    now_ms = world.clock.wall_ms()
    assert (granted.hold.since_ms, granted.hold.until_ms, granted.hold.reason) == (
        now_ms,
        now_ms + 60_000,
        "an upgrade",
    )
    assert outbox.grant == granted


def test_the_lead_is_handed_to_who_stands_by_and_holds_everything_and_to_nobody_else(opened, world):
    outbox = opened()
    lead = world.leads[-1]
    with pytest.raises(CommandRefused, match="no service that could lead stands by at any"):
        outbox.transfer(None, WAIT_S)
    lead.standbys = {2}
    with pytest.raises(CommandRefused, match="no service that could lead stands by at 1"):
        outbox.transfer(1, WAIT_S)
    lead.partitions[1].leader.has_all = lambda index: index != 2
    with pytest.raises(CommandRefused, match="member 2 does not hold everything within 0 s: this one leads on"):
        outbox.transfer(2, 0)
    world.logs[1].why = "the disk is full"
    with pytest.raises(CommandRefused, match="the disk is full: nothing more is acknowledged"):
        outbox.transfer(2, WAIT_S)
    world.logs[1].why, lead.partitions[1].leader.may_append_all = "", False
    with pytest.raises(CommandRefused, match="too few members are in sync"):
        outbox.transfer(2, WAIT_S)
    assert (lead.resigned, outbox.why_not_leading(), world.store.kept.is_handed_over) == ([], None, False)
    lead.partitions[1].leader.may_append_all, lead.partitions[1].leader.has_all = True, lambda _: True
    assert outbox.transfer(None, WAIT_S) == 2
    ((why, successor),) = lead.resigned
    assert (why.leader, successor) == (2, 2)
    assert outbox.why_not_leading() is why
    assert world.store.kept.is_handed_over, "else its next instance leads on at once"
    with pytest.raises(NotLeader):
        outbox.transfer(2, WAIT_S)


def directory_of(index):
    return UUID(int=100 + index)


def test_members_get_their_directories_into_the_grant_once_all_have_shown_them_and_hold_everything(opened, world):
    """A member without a directory in the grant counts by its index until a grant names all."""
    outbox = opened()
    write_directory_id(world.store.directory, REAL_FILESYSTEM, DirectoryId(directory_id=directory_of(0)))
    before, lead = outbox.grant, world.leads[-1]
    assert before.nameless == {0, 1, 2}
    lead.directories = {1: directory_of(1)}
    for _ in range(2):
        lead.on_directory()
        until(lambda: not is_naming(), "one look, as member 2 has shown none")
    looked = threading.Semaphore(0)

    class Watched(set):
        def __contains__(self, index):
            looked.release()
            return super().__contains__(index)

    lead.partitions[1].leader.caught_up = caught_up = Watched({0, 1})
    lead.directories[2] = directory_of(2)
    lead.on_directory()
    for _ in range(9):
        assert looked.acquire(timeout=WAIT_S)
    assert outbox.grant is before
    caught_up.add(2)
    until(lambda: not is_naming(), "all is named")
    assert [one.directory_id for one in outbox.grant.members] == [directory_of(n) for n in range(3)]
    assert outbox.grant.epoch > before.epoch


def is_naming():
    return any(thread.name == "pushrep-directories" for thread in threading.enumerate())


def test_a_member_that_was_filled_anew_comes_in_with_its_directory_once_it_may(opened, world):
    outbox = opened()
    write_directory_id(world.store.directory, REAL_FILESYSTEM, DirectoryId(directory_id=directory_of(0)))
    lead = world.leads[-1]
    lead.directories = {1: directory_of(1), 2: directory_of(2)}
    lead.on_directory()
    until(lambda: not is_naming(), "all is named")
    assert not outbox.shows_another_directory(2)
    lead, asked, may_enter = world.leads[-1], threading.Semaphore(0), set()

    def may(index):
        asked.release()
        return index in may_enter

    lead.partitions[1].leader.may_enter = may
    lead.new_directories = {2: directory_of(7), 9: directory_of(9)}
    lead.on_directory()
    for _ in range(3):
        assert asked.acquire(timeout=WAIT_S)
    assert outbox.shows_another_directory(2)
    assert outbox.grant.directory_of(2) == directory_of(2)
    may_enter.add(9)  # no member
    before = outbox.grant
    for _ in range(4):
        assert asked.acquire(timeout=WAIT_S)
    assert outbox.grant is before
    may_enter.add(2)
    until(lambda: not is_naming(), "member 2 has come in, and that is settled")
    assert outbox.grant.directory_of(2) == directory_of(7)
    assert (outbox.grant.previous_members, outbox.grant.entering) == ((), frozenset())


# -- changes of members by an operator ---------------------------------------------------------------------------------


def test_a_list_that_can_not_change_is_refused_with_the_way_on(opened, world):
    outbox = opened()
    facts = SimpleNamespace(replication=outbox, directory=outbox.directory)
    before = outbox.grant
    with pytest.raises(CommandRefused, match="name the members that are lost"):
        replace_lost(facts, "127.0.0.1:4", [])
    for lost, why in ((0, "member 0 leads: promote another one first"), (7, "there is no member 7, but 0")):
        with pytest.raises(CommandRefused, match=why):
            replace_lost(facts, "127.0.0.1:4", [lost])
        with pytest.raises(CommandRefused, match=why):
            add_member(facts, "127.0.0.1:4", replaced=lost)
    with pytest.raises(CommandRefused, match="is member 1 already, so the list would only become shorter"):
        add_member(facts, "127.0.0.1:1", replaced=2)
    assert (outbox.grant, outbox.learners) == (before, {})
    assert add_member(facts, "127.0.0.1:1") == (Phase.DONE, 1, before.members, 2, ""), "it is there"
    with pytest.raises(CommandRefused, match="this outbox has no replicas"):
        add_member(SimpleNamespace(replication=None), "127.0.0.1:4")
    outbox.push_to(255, "127.0.0.1:5")
    with pytest.raises(CommandRefused, match="all 256 indexes have been used"):
        add_member(facts, "127.0.0.1:4")


def test_too_few_members_for_a_change_are_named_with_the_command_for_those_that_are_destroyed(opened, world):
    outbox = opened()
    facts = SimpleNamespace(replication=outbox, directory=outbox.directory)
    world.silent = {1, 2}
    with pytest.raises(CommandRefused) as raised:
        remove_member(facts, 1, no_standbys=True)
    assert str(raised.value) == (
        "1 of 2 needed members count; [1, 2] do not answer: bring them back, and run the same command again. If they "
        f"are destroyed: pushrep replica replace {outbox.directory} 1 HOST:PORT --lost 1"
    )
    assert raised.value.__cause__.silent == (1, 2)


def test_a_node_that_is_added_catches_up_before_it_is_in_the_list(opened, world):
    outbox = opened()
    facts = SimpleNamespace(replication=outbox, directory=outbox.directory)
    step = add_member(facts, "127.0.0.1:4")
    assert (step.phase, step.member, outbox.learners) == (Phase.CATCHING_UP, 3, {3: "127.0.0.1:4"})
    world.clock.advance(LEFT_MS)
    assert outbox.left_learners.keys() == {3}
    assert add_member(facts, "127.0.0.1:4")[:2] == (Phase.CATCHING_UP, 3), "asked again, it is the same node"
    assert outbox.left_learners == {}
    for led in world.leads[-1].partitions.values():
        led.leader.caught_up = {0, 1, 2, 3}
    step = add_member(facts, "127.0.0.1:4")
    assert (step.phase, step.member, outbox.learners) == (Phase.SETTLING, 3, {})
    assert [one.index for one in outbox.grant.members] == [0, 1, 2, 3]
    assert [one.index for one in outbox.grant.previous_members] == [0, 1, 2]
    step = add_member(facts, "127.0.0.1:4")
    assert (step.phase, step.member, outbox.grant.previous_members) == (Phase.DONE, 3, ())
