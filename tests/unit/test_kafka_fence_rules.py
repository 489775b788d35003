"""The fence's states: every event that may come in every state, walked to its end, and what must hold in each."""

from copy import copy
from dataclasses import fields
from random import Random
from typing import NamedTuple

import pytest

from pushrep.kafka import fence_rules as core
from pushrep.kafka.answers import Code
from pushrep.kafka.fence_rules import (
    EPOCH_MAX,
    EXPECTED,
    NO_PRODUCER,
    CoordinatorReaction,
    Fence,
    FencedPartitions,
    FenceState,
    PartitionState,
    ProducerId,
    coordinator_reaction_to,
)

WAITS_FOR = {
    core.InitProducer: core.Given,
    core.AddPartitions: core.Added,
    core.AbortTransaction: core.Ended,
    core.Await: core.Due,
    core.SeekMarkers: core.Due,
    core.AskMembers: core.MembersAnswered,
    core.RefuseShipping: core.Begun,
    core.ShipUnfenced: core.Begun,
}


def go(fence, *events):
    """The last effect."""
    for event in events:
        effect = fence.on(event)
    return effect


GIVEN, ENDED = ProducerId(7, 4), ProducerId(7, 5)
RENEWAL = core.Due([0, 1], is_renewal=True)


def fenced(fence, given=GIVEN, ended=ENDED):
    """The fence, behind its first transaction."""
    assert go(fence, core.Begun()) == core.InitProducer(NO_PRODUCER)
    assert go(fence, core.Given(given)) == core.Await()
    assert go(fence, core.Due([0, 1])) == core.AddPartitions(given, [0, 1])
    assert go(fence, core.Added()) == core.AbortTransaction(given)
    assert go(fence, core.Ended(ended)) == core.SeekMarkers(ended or given)
    return fence


def test_an_opening_names_nothing_and_every_later_init_names_what_it_has():
    """Contract: "The first init of an opening names no epoch; every later one ... names its producer id and epoch"."""
    fence = fenced(Fence(has_members=False))
    assert go(fence, core.Begun()) == core.InitProducer(ProducerId(7, 5))
    assert go(fence, core.Given(ProducerId(7, 6)), core.Begun()) == core.InitProducer(ProducerId(7, 6))


def test_a_renewal_is_an_empty_transaction_and_a_late_partition_gets_one_of_its_own():
    fence = fenced(Fence(has_members=False))
    assert go(fence, RENEWAL) == core.AddPartitions(ProducerId(7, 5), [0, 1])
    assert go(fence, core.Added(), core.Ended(ProducerId(7, 6))) == core.SeekMarkers(ProducerId(7, 6))
    assert go(fence, core.Due([2])) == core.AddPartitions(ProducerId(7, 6), [2])


def test_faults_b3_of_a_transaction_that_can_not_begin_only_those_without_a_marker_are_kept():
    fence = fenced(Fence(has_members=False), ended=None)
    assert go(fence, RENEWAL, core.Busy([1])) == core.InitProducer(ProducerId(7, 4))
    assert go(fence, core.Given(ProducerId(7, 5)), core.Busy([1])) == core.AddPartitions(ProducerId(7, 5), [1])
    assert go(fence, core.Busy([])) == core.Await()
    assert go(fence, core.Due([2])) == core.AddPartitions(ProducerId(7, 5), [2])


def test_below_transaction_version_2_a_renewal_begins_with_an_init_that_names_id_and_epoch():
    fence = fenced(Fence(has_members=False), ended=None)
    assert go(fence, core.Due([2])) == core.AddPartitions(ProducerId(7, 4), [2]), "it takes the epoch as it stands"
    go(fence, core.Added(), core.Ended(None))
    assert go(fence, RENEWAL) == core.InitProducer(ProducerId(7, 4))
    assert go(fence, core.Given(ProducerId(7, 5))) == core.AddPartitions(ProducerId(7, 5), [0, 1])
    assert go(fence, core.Added()) == core.AbortTransaction(ProducerId(7, 5))
    assert go(fence, core.Ended(None)) == core.SeekMarkers(ProducerId(7, 5))


def test_a_transaction_that_is_refused_is_decided_by_a_named_init():
    """The coordinator aborts a transaction that took too long, and raises the epoch: no other instance did it."""
    for events in ((), (core.Added(),)):
        fence = fenced(Fence(has_members=False))
        assert go(fence, RENEWAL, *events, core.FenceRefused("x")) == core.InitProducer(ProducerId(7, 5))
        assert go(fence, core.Given(ProducerId(7, 6))) == core.AddPartitions(ProducerId(7, 6), [0, 1])


def test_without_members_a_refused_init_stops_this_opening_for_good():
    fence = fenced(Fence(has_members=False))
    refused = core.RefuseShipping("PRODUCER_FENCED", is_taken_over=True)
    assert go(fence, core.Begun(), core.FenceRefused("PRODUCER_FENCED")) == refused
    assert go(fence, core.Begun()) == refused


def test_with_members_the_newest_grant_decides():
    """Contract: "its grant is the newest: it inits anew; else, or with fewer answers, it neither inits nor ships"."""
    fence = fenced(Fence(has_members=True))
    assert go(fence, core.Begun(), core.FenceRefused("PRODUCER_FENCED")) == core.AskMembers()
    assert go(fence, core.MembersAnswered(is_newest=False)) == core.RefuseShipping(
        "PRODUCER_FENCED", is_taken_over=True
    )
    assert go(fence, core.Begun()) == core.AskMembers(), "they may say otherwise later"
    assert go(fence, core.MembersAnswered(is_newest=True)) == core.InitProducer(NO_PRODUCER)


@pytest.mark.parametrize("has_members", [False, True])
def test_a_changed_producer_id_goes_on_and_is_said(has_members):
    """Contract: "a changed producer id ... counts as a refusal: ask the members first, and report"."""
    fence = fenced(Fence(has_members=has_members))
    effect = go(fence, core.Begun(), core.Given(ProducerId(9, 0)))
    if has_members:
        assert effect == core.AskMembers()
        effect = go(fence, core.MembersAnswered(is_newest=True))
    assert effect == core.Await()
    assert go(fence, core.Due([0])) == core.AddPartitions(ProducerId(9, 0), [0])
    assert fence.earlier_unfenced


@pytest.mark.parametrize("has_members", [False, True])
def test_a_changed_producer_id_is_refused_where_a_fence_is_required(has_members):
    fence = fenced(Fence(has_members=has_members, is_required=True))
    effect = go(fence, core.Begun(), core.Given(ProducerId(9, 0)))
    if has_members:
        assert effect == core.AskMembers()
        effect = go(fence, core.MembersAnswered(is_newest=True))
    assert isinstance(effect, core.RefuseShipping)
    assert "earlier instances are not fenced" in effect.why
    assert not effect.is_taken_over
    assert go(fence, core.Begun()) == effect


def test_a_renewal_that_had_to_begin_anew_voids_what_is_known():
    """Another instance shipped meanwhile, before this one was found to lead after all."""
    fence = fenced(Fence(has_members=True))
    go(fence, RENEWAL, core.FenceRefused("x"), core.FenceRefused("x"))
    assert fence.times_anew == 0
    go(fence, core.MembersAnswered(is_newest=True))
    assert fence.times_anew == 1


def test_exhausted_epochs_are_no_refusal():
    """Contract: "exhaustion of its epochs excepted"."""
    last = ProducerId(7, EPOCH_MAX - 1)
    fence = fenced(Fence(has_members=True), given=last, ended=last)
    assert go(fence, core.Begun(), core.Given(ProducerId(9, 0))) == core.Await()
    fence = fenced(Fence(has_members=True), given=last, ended=last)
    effect = go(fence, RENEWAL, core.Added(), core.Ended(ProducerId(9, 0)))
    assert effect == core.SeekMarkers(ProducerId(7, EPOCH_MAX)), "the last epoch of the id that the transaction had"
    assert go(fence, RENEWAL) == core.AddPartitions(ProducerId(9, 0), [0, 1])


def test_an_id_that_is_new_to_the_coordinator_fences_nobody_from_before():
    assert fenced(Fence(has_members=False, has_shipped=True), given=ProducerId(7, 0)).earlier_unfenced
    assert not fenced(Fence(has_members=False, has_shipped=False), given=ProducerId(7, 0)).earlier_unfenced
    assert not fenced(Fence(has_members=False, has_shipped=True), given=ProducerId(7, 2)).earlier_unfenced


GIVEN_AND_DUE = (core.Given(ProducerId(7, 0)), core.Due([0]))


@pytest.mark.parametrize("events", [(), GIVEN_AND_DUE, (*GIVEN_AND_DUE, core.Added())])
def test_without_the_right_it_ships_unfenced_or_not_at_all(events):
    fence = Fence(has_members=False)
    assert go(fence, core.Begun(), *events, core.NotAllowed("no right")) == core.ShipUnfenced()
    assert (fence.state, fence.why_unfenced) == (FenceState.UNFENCED, "no right")
    assert isinstance(go(fence, core.Begun()), core.InitProducer), "the right may be given meanwhile"
    required = Fence(has_members=False, is_required=True)
    assert go(required, core.Begun(), *events, core.NotAllowed("no right")) == core.RefuseShipping(
        "no right", is_taken_over=False
    )
    assert isinstance(go(required, core.Begun()), core.InitProducer)


class World(NamedTuple):
    """The state of a random walk: what must be true of an effect depends on the earlier ones."""

    fence: Fence
    effect: object
    may_be_unnamed: bool
    listed: tuple[int, ...]


def events_of(kind):
    """Every kind of an event."""
    return {
        core.Begun: [core.Begun()],
        core.Given: [core.Given(ProducerId(7, 1)), core.Given(ProducerId(7, 2)), core.Given(ProducerId(8, 0))],
        core.Due: [core.Due((0,)), core.Due((0, 1), is_renewal=True)],
        core.Added: [core.Added()],
        core.Ended: [core.Ended(None), core.Ended(ProducerId(7, 3)), core.Ended(ProducerId(8, 1))],
        core.FenceRefused: [core.FenceRefused("refused")],
        core.NotAllowed: [core.NotAllowed("not allowed")],
        core.Busy: [core.Busy(())],
        core.MembersAnswered: [core.MembersAnswered(is_newest=True), core.MembersAnswered(is_newest=False)],
    }[kind]


def identity(world):
    known = {field.name: getattr(world.fence, field.name) for field in fields(Fence)}
    known["times_anew"] = 0  # it only rises
    return (*known.values(), *world[1:])


@pytest.mark.parametrize("has_members", [False, True])
@pytest.mark.parametrize("is_required", [False, True])
def test_every_walk(has_members, is_required):
    """All states that can be reached by any events in any order: a transaction lists what was due, its markers are of
    its own id, and an init without a name is an opening's first, or what the members allowed.
    """
    first = World(Fence(has_members, is_required), None, True, ())
    seen, todo, states = set(), [first], set()
    while todo:
        world = todo.pop()
        if identity(world) in seen:
            continue
        seen.add(identity(world))
        states.add(world.fence.state)
        for kind in EXPECTED[world.fence.state]:
            todo += [step(world, event) for event in events_of(kind)]
        for kind in EXPECTED[FenceState.INIT] | EXPECTED[FenceState.ASKING] | {core.Added, core.Due}:
            if kind not in EXPECTED[world.fence.state]:
                with pytest.raises(AssertionError):
                    copy(world.fence).on(events_of(kind)[0])
    expected = set(FenceState) - ({FenceState.ASKING} if not has_members else set())
    assert states == expected - {FenceState.UNFENCED if is_required else FenceState.FORGOTTEN}


def step(world, event):
    fence, before = copy(world.fence), world.fence
    effect = fence.on(event)
    assert WAITS_FOR[type(effect)] in EXPECTED[fence.state]
    has_given = before.producer != NO_PRODUCER or fence.producer != NO_PRODUCER
    allowed = event == core.MembersAnswered(is_newest=True)
    may_be_unnamed = (world.may_be_unnamed and not has_given) or allowed
    listed = (
        event.partitions
        if isinstance(event, core.Due | core.Busy)
        else ()
        if isinstance(event, core.Begun)
        else world.listed
    )
    if isinstance(effect, core.InitProducer) and effect.named == NO_PRODUCER:
        assert world.may_be_unnamed or allowed
    if isinstance(effect, core.AddPartitions):
        assert (effect.partitions, effect.producer) == (listed, fence.producer)
    if isinstance(effect, core.SeekMarkers):
        assert effect.producer.id == before.producer.id
        listed = ()
    if isinstance(effect, core.RefuseShipping):
        assert effect.is_taken_over or fence.is_required
    if isinstance(effect, core.AskMembers):
        assert fence.has_members
    return World(fence, effect, may_be_unnamed, listed)


def test_what_a_coordinator_may_answer():
    assert coordinator_reaction_to(Code.COORDINATOR_NOT_AVAILABLE) is CoordinatorReaction.AGAIN
    assert coordinator_reaction_to(Code.COORDINATOR_LOAD_IN_PROGRESS) is CoordinatorReaction.SOON
    assert coordinator_reaction_to(Code.PRODUCER_FENCED) is CoordinatorReaction.REFUSED
    assert coordinator_reaction_to(12345) is CoordinatorReaction.AGAIN


class Topic:
    """Partitions at brokers: what they hold, the highest epoch that they saw, and markers that are still to be written.

    A transaction's marker for a partition without a leader may be dropped, and nobody hears of it (KAFKA-20734).
    """

    def __init__(self, count):
        self.leaders = set(range(count))
        self.held = [[("record", ProducerId(7, 0))] for _ in range(count)]
        self.epochs = [0] * count
        self.coming = []

    def write(self, partition, producer, kind="record"):
        """Whether it is taken: an epoch below the highest one is refused."""
        if partition not in self.leaders or producer.epoch < self.epochs[partition]:
            return False
        self.epochs[partition] = producer.epoch
        self.held[partition].append((kind, producer))
        return True

    def deliver(self, random):
        """A marker comes, in any order; without a leader it may be lost."""
        if self.coming:
            partition, producer = self.coming.pop(random.randrange(len(self.coming)))
            if partition in self.leaders:
                self.write(partition, producer, "marker")
            elif random.random() < 0.5:
                self.coming.append((partition, producer))


class Shipper:
    """What the driver and a session do with the partitions' states. `matched_at`: where each was found out last."""

    def __init__(self, topic, count):
        self.topic, self.epoch, self.now_ms = topic, 1, 0
        self.partitions = FencedPartitions(count, renew_every_ms=60_000)
        self.matched_at, self.asked = {}, []

    def look(self):
        self.asked += self.partitions.on_leaders(frozenset(self.topic.leaders), self.now_ms)

    def answer(self):
        for partition in self.asked:
            is_led = partition in self.topic.leaders
            self.partitions.on_looked_at(partition, len(self.topic.held[partition]) if is_led else None)
        self.asked = []

    def transact(self):
        self.partitions.overdue(self.now_ms)
        for partition in list(self.partitions.drain_due(self.now_ms)):
            self.partitions.on_drained(partition, len(self.topic.held[partition]))
        listed = self.partitions.next_transaction()
        if listed:
            assert not any(self.partitions[one].led_since_ms is None for one in listed), "all of them have a leader"
            self.epoch += 1
            self.topic.coming += [(partition, ProducerId(7, self.epoch)) for partition in listed]
            self.partitions.on_ended(ProducerId(7, self.epoch), self.now_ms)

    def seek(self, partition):
        one = self.partitions[partition]
        if partition not in self.topic.leaders:
            return
        for at in range(one.read_to, len(self.topic.held[partition])):
            kind, producer = self.topic.held[partition][at]
            self.partitions.on_read(partition, at + 1, producer if kind == "marker" else None)
        if one.state is PartitionState.MATCHED:
            self.matched_at[partition] = len(self.topic.held[partition])
        if one.state in {PartitionState.MATCHED, PartitionState.SHIPPING}:
            self.partitions.on_matched(partition, self.now_ms)

    def ship(self, partition):
        one = self.partitions[partition]
        if one.state is PartitionState.SHIPPING and partition in self.topic.leaders:
            assert self.topic.write(partition, one.producer), "the epoch of its own marker is taken"


@pytest.mark.parametrize("seed", range(60))
def test_each_partition_is_shipped_to_behind_its_own_marker_whatever_becomes_of_the_others(seed):
    """faults B3: leaders go and come, markers are late or lost, an older instance goes on sending, epochs rise
    elsewhere: nothing of the older instance comes behind what was matched, and each epoch is taken where it is used.
    """
    random, count = Random(seed), 4
    topic = Topic(count)
    shipper = Shipper(topic, count)
    topic.leaders -= {random.randrange(count)}
    for _ in range(400):
        partition = random.randrange(count)
        match random.randrange(9):
            case 0:
                topic.leaders ^= {partition}
            case 1:
                topic.deliver(random)
            case 2:
                topic.write(partition, ProducerId(7, 0))
            case 3:
                shipper.now_ms += random.choice([1, 1_000, 10_000])
            case 4:
                shipper.look()
            case 5:
                shipper.answer()
            case 6:
                shipper.transact()
            case 7:
                shipper.seek(partition)
            case 8:
                shipper.ship(partition)
    for partition, at in shipper.matched_at.items():
        assert ("record", ProducerId(7, 0)) not in topic.held[partition][at:]
    kept = random.randrange(count)
    topic.leaders = set(range(count)) - {kept}
    settle(shipper, topic, random)
    assert all(shipper.partitions[one].state is PartitionState.SHIPPING for one in topic.leaders), "none waits for it"
    topic.leaders.add(kept)
    settle(shipper, topic, random)
    assert shipper.partitions[kept].state is PartitionState.SHIPPING


def settle(shipper, topic, random):
    for _ in range(100):
        shipper.now_ms += 1_000
        shipper.look()
        shipper.answer()
        shipper.transact()
        topic.deliver(random)
        for partition in range(4):
            shipper.seek(partition)


def test_a_marker_that_does_not_come_is_asked_for_again_and_alone():
    """faults B3: "No marker 10 s after it has a leader: a transaction for it alone"."""
    partitions = FencedPartitions(3, renew_every_ms=1_000_000)
    for partition in partitions.on_leaders({0, 1, 2}, 0):
        partitions.on_looked_at(partition, 5)
    assert partitions.next_transaction() == [0, 1, 2]
    partitions.on_ended(GIVEN, 100)
    partitions.on_leaders({1, 2}, 200)
    partitions.on_read(1, 6, GIVEN)
    partitions.on_matched(1, 300)
    assert (partitions.overdue(10_099), partitions.overdue(10_100)) == ([], [2]), "1 has its own, 0 has no leader"
    partitions.on_leaders({0, 1, 2}, 10_200)
    assert partitions.next_transaction() == [2]
    partitions.on_ended(ENDED, 10_300)
    assert partitions.overdue(20_200) == [0]
    partitions.on_read(2, 6, GIVEN)
    assert partitions[2].state is PartitionState.SOUGHT, "the epoch is above that of a marker that was late"
    partitions.on_read(2, 7, ENDED)
    assert (partitions[2].producer, partitions[1].producer) == (ENDED, GIVEN), "it keeps the epoch that was met in it"
