"""The fence's states: every event that may come in every state, walked to its end, and what must hold in each."""

from copy import copy
from dataclasses import fields
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
    FenceState,
    ProducerId,
    coordinator_reaction_to,
)

WAITS_FOR = {
    core.InitProducer: core.Given,
    core.AddPartitions: core.Added,
    core.AbortTransaction: core.Ended,
    core.ReadMarkers: core.MarkersRead,
    core.AskMembers: core.MembersAnswered,
    core.Match: core.Matched,
    core.Ship: core.RenewalDue,
    core.RefuseShipping: core.Begun,
}


def go(fence, *events):
    """The last effect."""
    for event in events:
        effect = fence.on(event)
    return effect


GIVEN, ENDED = ProducerId(7, 4), ProducerId(7, 5)


def shipping(fence, given=GIVEN, ended=ENDED):
    """The fence, all the way to its first batch."""
    assert go(fence, core.Begun()) == core.InitProducer(NO_PRODUCER)
    assert go(fence, core.Given(given)) == core.AddPartitions(given)
    assert go(fence, core.Added()) == core.AbortTransaction(given)
    assert go(fence, core.Ended(ended)) == core.ReadMarkers(ended or given)
    assert go(fence, core.MarkersRead()) == core.Match()
    assert go(fence, core.Matched()) == core.Ship(ended or given)
    return fence


def test_an_opening_names_nothing_and_every_later_init_names_what_it_has():
    """Contract: "The first init of an opening names no epoch; every later one ... names its producer id and epoch"."""
    fence = shipping(Fence(has_members=False))
    assert go(fence, core.Begun()) == core.InitProducer(ProducerId(7, 5))
    assert go(fence, core.Given(ProducerId(7, 6)), core.Begun()) == core.InitProducer(ProducerId(7, 6))


def test_a_renewal_is_an_empty_transaction_and_matches_nothing_anew():
    fence = shipping(Fence(has_members=False))
    assert go(fence, core.RenewalDue()) == core.AddPartitions(ProducerId(7, 5))
    assert go(fence, core.Added(), core.Ended(ProducerId(7, 6))) == core.ReadMarkers(ProducerId(7, 6))
    assert go(fence, core.MarkersRead()) == core.Ship(ProducerId(7, 6))


def test_below_transaction_version_2_a_renewal_begins_with_an_init_that_names_id_and_epoch():
    fence = shipping(Fence(has_members=False), ended=None)
    assert go(fence, core.RenewalDue()) == core.InitProducer(ProducerId(7, 4))
    assert go(fence, core.Given(ProducerId(7, 5)), core.Added()) == core.AbortTransaction(ProducerId(7, 5))
    assert go(fence, core.Ended(None), core.MarkersRead()) == core.Ship(ProducerId(7, 5))


def test_a_transaction_that_is_refused_is_decided_by_a_named_init():
    """The coordinator aborts a transaction that took too long, and raises the epoch: no other instance did it."""
    for events in ((), (core.Added(),)):
        fence = shipping(Fence(has_members=False))
        assert go(fence, core.RenewalDue(), *events, core.FenceRefused("x")) == core.InitProducer(ProducerId(7, 5))
        assert go(fence, core.Given(ProducerId(7, 6))) == core.AddPartitions(ProducerId(7, 6))


def test_without_members_a_refused_init_stops_this_opening_for_good():
    fence = shipping(Fence(has_members=False))
    refused = core.RefuseShipping("PRODUCER_FENCED", is_taken_over=True)
    assert go(fence, core.Begun(), core.FenceRefused("PRODUCER_FENCED")) == refused
    assert go(fence, core.Begun()) == refused


def test_with_members_the_newest_grant_decides():
    """Contract: "its grant is the newest: it inits anew; else, or with fewer answers, it neither inits nor ships"."""
    fence = shipping(Fence(has_members=True))
    assert go(fence, core.Begun(), core.FenceRefused("PRODUCER_FENCED")) == core.AskMembers()
    assert go(fence, core.MembersAnswered(is_newest=False)) == core.RefuseShipping(
        "PRODUCER_FENCED", is_taken_over=True
    )
    assert go(fence, core.Begun()) == core.AskMembers(), "they may say otherwise later"
    assert go(fence, core.MembersAnswered(is_newest=True)) == core.InitProducer(NO_PRODUCER)


@pytest.mark.parametrize("has_members", [False, True])
def test_a_changed_producer_id_goes_on_and_is_said(has_members):
    """Contract: "a changed producer id ... counts as a refusal: ask the members first, and report"."""
    fence = shipping(Fence(has_members=has_members))
    effect = go(fence, core.Begun(), core.Given(ProducerId(9, 0)))
    if has_members:
        assert effect == core.AskMembers()
        effect = go(fence, core.MembersAnswered(is_newest=True))
    assert effect == core.AddPartitions(ProducerId(9, 0))
    assert fence.earlier_unfenced


@pytest.mark.parametrize("has_members", [False, True])
def test_a_changed_producer_id_is_refused_where_a_fence_is_required(has_members):
    fence = shipping(Fence(has_members=has_members, is_required=True))
    effect = go(fence, core.Begun(), core.Given(ProducerId(9, 0)))
    if has_members:
        assert effect == core.AskMembers()
        effect = go(fence, core.MembersAnswered(is_newest=True))
    assert isinstance(effect, core.RefuseShipping)
    assert "earlier instances are not fenced" in effect.why
    assert not effect.is_taken_over
    assert go(fence, core.Begun()) == effect


def test_a_renewal_that_had_to_begin_anew_matches():
    """Another instance shipped meanwhile, before this one was found to lead after all."""
    fence = shipping(Fence(has_members=True))
    go(fence, core.RenewalDue(), core.FenceRefused("x"), core.FenceRefused("x"), core.MembersAnswered(is_newest=True))
    go(fence, core.Given(ProducerId(7, 9)), core.Added(), core.Ended(ProducerId(7, 10)))
    assert go(fence, core.MarkersRead()) == core.Match()


def test_exhausted_epochs_are_no_refusal():
    """Contract: "exhaustion of its epochs excepted"."""
    last = ProducerId(7, EPOCH_MAX - 1)
    fence = shipping(Fence(has_members=True), given=last, ended=last)
    assert go(fence, core.Begun(), core.Given(ProducerId(9, 0))) == core.AddPartitions(ProducerId(9, 0))
    fence = shipping(Fence(has_members=True), given=last, ended=last)
    effect = go(fence, core.RenewalDue(), core.Added(), core.Ended(ProducerId(9, 0)))
    assert effect == core.ReadMarkers(last), "markers are written under the id that the transaction had"
    assert go(fence, core.MarkersRead()) == core.Ship(ProducerId(9, 0))


def test_an_id_that_is_new_to_the_coordinator_fences_nobody_from_before():
    assert shipping(Fence(has_members=False, has_shipped=True), given=ProducerId(7, 0)).earlier_unfenced
    assert not shipping(Fence(has_members=False, has_shipped=False), given=ProducerId(7, 0)).earlier_unfenced
    assert not shipping(Fence(has_members=False, has_shipped=True), given=ProducerId(7, 2)).earlier_unfenced


@pytest.mark.parametrize("events", [(), (core.Given(ProducerId(7, 0)),), (core.Given(ProducerId(7, 0)), core.Added())])
def test_without_the_right_it_ships_unfenced_or_not_at_all(events):
    fence = Fence(has_members=False)
    assert go(fence, core.Begun(), *events, core.NotAllowed("no right")) == core.Ship(None)
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
    has_markers: bool
    has_matched: bool


def events_of(kind):
    """Every kind of an event."""
    return {
        core.Begun: [core.Begun()],
        core.Given: [core.Given(ProducerId(7, 1)), core.Given(ProducerId(7, 2)), core.Given(ProducerId(8, 0))],
        core.Added: [core.Added()],
        core.Ended: [core.Ended(None), core.Ended(ProducerId(7, 3)), core.Ended(ProducerId(8, 1))],
        core.MarkersRead: [core.MarkersRead()],
        core.Matched: [core.Matched()],
        core.RenewalDue: [core.RenewalDue()],
        core.FenceRefused: [core.FenceRefused("refused")],
        core.NotAllowed: [core.NotAllowed("not allowed")],
        core.MembersAnswered: [core.MembersAnswered(is_newest=True), core.MembersAnswered(is_newest=False)],
    }[kind]


def identity(world):
    return (*(getattr(world.fence, field.name) for field in fields(Fence)), *world[1:])


@pytest.mark.parametrize("has_members", [False, True])
@pytest.mark.parametrize("is_required", [False, True])
def test_every_walk(has_members, is_required):
    """All states that can be reached by any events in any order: nothing is shipped before markers and matching, and
    an init without a name is an opening's first, or what the members allowed.
    """
    first = World(Fence(has_members, is_required), None, True, False, False)
    seen, todo, states = set(), [first], set()
    while todo:
        world = todo.pop()
        if identity(world) in seen:
            continue
        seen.add(identity(world))
        states.add(world.fence.state)
        for kind in EXPECTED[world.fence.state]:
            todo += [step(world, event) for event in events_of(kind)]
        for kind in EXPECTED[FenceState.INIT] | EXPECTED[FenceState.ASKING] | {core.Added, core.RenewalDue}:
            if kind not in EXPECTED[world.fence.state]:
                with pytest.raises(AssertionError):
                    copy(world.fence).on(events_of(kind)[0])
    expected = set(FenceState) - ({FenceState.ASKING} if not has_members else set())
    assert states == expected - {FenceState.UNFENCED if is_required else FenceState.FORGOTTEN}


def step(world, event):
    fence, before = copy(world.fence), world.fence
    effect = fence.on(event)
    assert type(event) in EXPECTED[before.state]
    assert WAITS_FOR[type(effect)] in EXPECTED[fence.state] or effect == core.Ship(None)
    has_given = before.producer != NO_PRODUCER or fence.producer != NO_PRODUCER
    allowed = event == core.MembersAnswered(is_newest=True)
    may_be_unnamed = (world.may_be_unnamed and not has_given) or allowed
    has_markers = isinstance(event, core.MarkersRead)
    is_another = isinstance(event, core.Given) and before.producer.id not in {-1, event.producer.id}
    is_anew = isinstance(event, core.Begun | core.MembersAnswered) or (is_another and not before.producer.is_exhausted)
    has_matched = isinstance(event, core.Matched) or (world.has_matched and not is_anew)
    if isinstance(effect, core.InitProducer) and effect.named == NO_PRODUCER:
        assert world.may_be_unnamed or allowed
    if isinstance(effect, core.Ship) and effect.producer is not None:
        assert has_matched
        assert effect.producer == fence.producer
        assert before.state in {FenceState.MATCH, FenceState.MARKERS}
        assert isinstance(event, core.Matched | core.MarkersRead)
    if isinstance(effect, core.Match):
        assert has_markers
    if isinstance(effect, core.RefuseShipping):
        assert effect.is_taken_over or fence.is_required
    if isinstance(effect, core.AskMembers):
        assert fence.has_members
    return World(fence, effect, may_be_unnamed, has_markers, has_matched)


def test_what_a_coordinator_may_answer():
    assert coordinator_reaction_to(Code.COORDINATOR_NOT_AVAILABLE) is CoordinatorReaction.AGAIN
    assert coordinator_reaction_to(Code.COORDINATOR_LOAD_IN_PROGRESS) is CoordinatorReaction.SOON
    assert coordinator_reaction_to(Code.PRODUCER_FENCED) is CoordinatorReaction.REFUSED
    assert coordinator_reaction_to(12345) is CoordinatorReaction.AGAIN
