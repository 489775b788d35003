"""Startpoints of consumer groups with a store, without a client: what an assigned or a running partition gets."""

from contextlib import contextmanager
from itertools import pairwise

import pytest

from filtering.consumers.startpoints import PartitionFacts, RefusedStartpoint, StartTarget
from pushrep.errors import BadArgument
from pushrep.startpoints import (
    Applied,
    Consumed,
    Failed,
    GroupStartpoints,
    Startpoint,
    StartpointFailed,
    StartpointStore,
    StoreUnavailable,
    Written,
)
from tests.support.simulated_disk import SimulatedClock


@pytest.fixture
def store(tmp_path):
    return StartpointStore.open(tmp_path / "startpoints")


@pytest.fixture
def group(store):
    return GroupStartpoints(store)


def facts(position, end=100, partition=0):
    def first_at(topic, partition, ms):
        return ms // 1000 if ms // 1000 < end else None

    return PartitionFacts("orders", partition, lambda topic, partition: (10, end), first_at, position)


def write(store, startpoint, partition=0):
    return store.write("billing", "orders", partition, startpoint, "why")


def events(store):
    return [type(fact) for fact in store.history()]


def test_rule_2_a_running_partition_is_told_once_and_keeps_the_stored_offset(store, group):
    assert group.pending("billing", facts(60), 0) is None
    assert group.moved("billing", facts(70), 0) is None
    first = write(store, Startpoint.relative(records=-20, reset_marks=True))
    assert group.moved("billing", facts(70), 0) == StartTarget(50, first, reset_marks=True)
    assert group.moved("billing", facts(90), 0) == StartTarget(50, first, reset_marks=True), "until it runs from it"
    assert group.moved("billing", facts(90), first) is None
    second = write(store, Startpoint.latest())
    assert group.moved("billing", facts(51, end=120), first) == StartTarget(120, second, reset_marks=False)
    another = GroupStartpoints(store)  # after a kill: nothing was committed
    assert another.pending("billing", facts(60, end=130), 0) == StartTarget(120, second, reset_marks=False)
    assert events(store) == [Written, Applied, Written, Applied]


def test_rule_3_consumed_is_said_after_the_commit_and_names_only_that_sequence(store, group):
    group.pending("billing", facts(60), 0)
    first, second = write(store, Startpoint.specific(20)), write(store, Startpoint.specific(30), partition=1)
    group.moved("billing", facts(70), 0)
    group.consumed("billing", "orders", 0, first)
    assert store.history()[-1].sequence == first
    assert store.read("billing", "orders", 1).sequence == second
    assert group.moved("billing", facts(21), first) is None


def test_rule_3_what_was_committed_and_not_said_is_said_by_the_next_holder(store, group):
    sequence = write(store, Startpoint.specific(20))
    group.pending("billing", facts(60), 0)
    assert GroupStartpoints(store).pending("billing", facts(25), sequence) is None
    assert events(store) == [Written, Applied, Consumed]


def test_rule_3_who_lost_the_partition_neither_applies_nor_consumes(store, group):
    sequence = write(store, Startpoint.specific(20))
    group.pending("billing", facts(60), 0)
    GroupStartpoints(store).pending("billing", facts(60), 0)
    write(store, Startpoint.specific(40))
    assert group.moved("billing", facts(60), sequence) is None
    group.consumed("billing", "orders", 0, sequence)
    assert events(store) == [Written, Applied, Written]


def test_rule_4_what_fails_is_a_refusal_with_its_reason(store, group):
    group.pending("billing", facts(60), 0)
    for startpoint, told in ((Startpoint.specific(999), "beyond the end"), (Startpoint.bootstrap(), "take EARLIEST")):
        sequence = write(store, startpoint)
        for ask in (group.moved, group.pending):
            refusal = ask("billing", facts(60), 0)
            assert isinstance(refusal, RefusedStartpoint)
            assert refusal.sequence == sequence
            with pytest.raises(StartpointFailed, match=told):
                raise refusal.error
        assert [fact.why for fact in store.history() if isinstance(fact, Failed)][-1].find(told) >= 0, "it is kept"
        store.cancel(sequence, "a typo")
        assert group.moved("billing", facts(60), 0) is None


def test_rule_9_whether_marks_begin_anew_is_said(store, group):
    for reset_marks in (True, False):
        write(store, Startpoint.timestamp(42_000, reset_marks=reset_marks))
        target = group.pending("billing", facts(60), 0)
        assert (target.offset, target.reset_marks) == (42, reset_marks)


def test_the_version_changes_with_what_is_written_and_not_with_reading(store, group):
    before = group.version()
    group.pending("billing", facts(60), 0)
    assert group.version() == before
    write(store, Startpoint.specific(20))
    assert group.version() != before


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def away(store, monkeypatch):
    """Called with names of the store's methods: brokers that don't answer, while the block lasts."""

    @contextmanager
    def going(*names):
        def silent(*_words, **_named):
            raise StoreUnavailable("kafka:startpoints", "no broker answers")

        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(store, name, silent)
            yield

    return going


def test_a_store_that_is_away_for_a_while_holds_no_running_consumer(store, clock, away, caplog):
    started, fresh = GroupStartpoints(store, clock=clock), GroupStartpoints(store)
    known = started.version()
    write(store, Startpoint.specific(20))
    with away("size_bytes"):
        for _ in range(3):
            assert started.version() == known
            clock.advance(60_000)
        assert caplog.text.count("new startpoints wait") == 1, "told once"
        with pytest.raises(StoreUnavailable):
            fresh.version()
    assert started.version() != known


def test_a_store_that_goes_away_between_two_questions_is_asked_again(store, clock, away, caplog):
    group = GroupStartpoints(store, clock=clock)
    group.pending("billing", facts(60), 0)
    group.version()
    first = write(store, Startpoint.specific(20))
    seen = group.version()
    with away("read", "size_bytes"):
        assert group.moved("billing", facts(60), 0) is None, "the consumer goes on"
        assert group.version() == seen
    assert caplog.text.count("no broker answers") == 1
    assert group.version() == seen, "not at once"
    clock.advance(1_000)
    assert group.version() != seen, "nothing was written meanwhile, and yet there is something to look at"
    assert group.moved("billing", facts(60), 0) == StartTarget(20, first, reset_marks=False)
    seen = group.version()
    with away("consume"):
        group.consumed("billing", "orders", 0, first)
    assert events(store) == [Written, Applied]
    clock.advance(1_000)
    assert group.version() != seen
    assert group.moved("billing", facts(21), first) is None
    assert events(store) == [Written, Applied, Consumed], "said as soon as that can be"


def test_rule_3_a_start_consumes_what_the_groups_commit_says_and_not_what_was_committed_before(store, clock, away):
    """Its offsets were set back meanwhile: the startpoint is applied again, and consumed once that is committed."""
    group = GroupStartpoints(store, clock=clock)
    sequence = write(store, Startpoint.specific(20))
    group.pending("billing", facts(60), 0)
    with away("consume"):
        group.consumed("billing", "orders", 0, sequence)
    clock.advance(1_000)
    assert group.pending("billing", facts(60), 0) == StartTarget(20, sequence, reset_marks=False)
    assert group.moved("billing", facts(60), sequence) is None
    assert events(store) == [Written, Applied]


def test_the_longer_nobody_answers_the_more_rarely_is_asked(store, clock, monkeypatch):
    asked = []

    def silent():
        asked.append(clock.monotonic_ms())
        raise StoreUnavailable("kafka:startpoints", "no broker answers")

    group = GroupStartpoints(store, clock=clock)
    group.version()
    monkeypatch.setattr(store, "size_bytes", silent)
    for _ in range(2_000):
        group.version()
        clock.advance(100)
    pauses = [later - before for before, later in pairwise(asked)]
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]


def ours(position):
    """Facts about a partition that belongs to this member, by the group's coordinator."""
    return facts(position)._replace(is_held=lambda topic, partition: (topic, partition) == ("orders", 0))


def test_a_late_claim_of_who_was_held_up_inside_its_start_leaves_the_holder_not_deaf(store, group):
    """The group assigned the partition to another member while this one was inside its start; then this one continues,
    and claims it.
    """
    group.pending("billing", facts(60), 0)
    late = GroupStartpoints(store)
    late.pending("billing", facts(60), 0)
    first = write(store, Startpoint.relative(records=-20))
    assert late.moved("billing", ours(60), 0) == StartTarget(40, first, reset_marks=False), "it has the claim"
    assert group.moved("billing", facts(70), 0) is None, "rule 3: who lost the partition applies nothing"
    group.version()
    seen = group.version()
    assert group.moved("billing", facts(70), 0) is None
    assert group.version() != seen, "it asks again: the partition may be its own, as soon as the group is at rest"
    assert group.moved("billing", ours(70), 0) == StartTarget(40, first, reset_marks=False), "resolved once"
    assert late.moved("billing", facts(60), 0) is None
    second = write(store, Startpoint.specific(30))
    assert group.moved("billing", ours(70), first) == StartTarget(30, second, reset_marks=False)
    group.consumed("billing", "orders", 0, second)
    assert events(store) == [Written, Applied, Written, Applied, Consumed]


def test_what_a_holder_committed_after_a_late_claim_is_consumed_all_the_same(store, group):
    group.pending("billing", facts(60), 0)
    first = write(store, Startpoint.specific(20))
    group.moved("billing", facts(60), 0)
    GroupStartpoints(store).pending("billing", facts(60), 0)
    group.consumed("billing", "orders", 0, first)
    assert events(store) == [Written, Applied]
    assert group.moved("billing", facts(21), first) is None
    assert events(store) == [Written, Applied], "rule 3: who lost the partition consumes nothing"
    assert group.moved("billing", ours(21), first) is None
    assert events(store) == [Written, Applied, Consumed]


def test_a_partition_that_never_came_is_told_nothing(store, group):
    write(store, Startpoint.specific(20))
    assert group.moved("billing", facts(60), 0) is None


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_looking_takes_time_above_0(store, seconds):
    with pytest.raises(BadArgument, match="look_every_s"):
        GroupStartpoints(store, look_every_s=seconds)
