"""The table of a startpoint's life, every state and event of it, as the ledger lives it; and how targets overlap."""

import itertools

import pytest

from pushrep.startpoints import (
    Applied,
    Cancelled,
    Consumed,
    EventLog,
    Expired,
    Failed,
    Reader,
    Startpoint,
    State,
    Target,
    Written,
)
from pushrep.startpoints.model import NEXT, OVER, StartpointEvent

READER = Reader("billing", "orders", 0)

# The contract, said a second time and without the code's own table: what each event makes of each state.
AFTER = {
    state: dict(zip(("applied", "consumed", "failed", "expired", "cancelled"), row.split(), strict=True))
    for state, row in {
        #             applied    consumed   failed     expired    cancelled
        "pending":   "applied    consumed   failed     expired    cancelled",
        "applied":   "applied    consumed   failed     applied    cancelled",
        "failed":    "failed     failed     failed     failed     cancelled",
        "consumed":  "consumed   consumed   consumed   consumed   consumed",
        "expired":   "expired    expired    expired    expired    expired",
        "cancelled": "cancelled  cancelled  cancelled  cancelled  cancelled",
    }.items()
}  # fmt: skip

REACHED_BY = {
    State.PENDING: [],
    State.APPLIED: [StartpointEvent.APPLY],
    State.CONSUMED: [StartpointEvent.APPLY, StartpointEvent.CONSUME],
    State.FAILED: [StartpointEvent.FAIL],
    State.EXPIRED: [StartpointEvent.EXPIRE],
    State.CANCELLED: [StartpointEvent.CANCEL],
}


def fact(event, reader=READER, sequence=1, offset=5):
    match event:
        case StartpointEvent.APPLY:
            return Applied(sequence=sequence, reader=reader, at_ms=0, offset=offset, start=0, end=9, log_id="")
        case StartpointEvent.CONSUME:
            return Consumed(sequence=sequence, reader=reader, at_ms=0)
        case StartpointEvent.FAIL:
            return Failed(sequence=sequence, reader=reader, at_ms=0, why="why")
        case StartpointEvent.EXPIRE:
            return Expired(sequence=sequence, at_ms=0)
        case StartpointEvent.CANCEL:
            return Cancelled(sequence=sequence, at_ms=0, author="a", reason="r")


def written(sequence=1, target=None, ttl_s=None):
    return Written(
        sequence=sequence,
        target=target or Target("billing", "orders", 0),
        startpoint=Startpoint.earliest(),
        author="a",
        reason="r",
        created_ms=0,
        ttl_s=ttl_s,
    )


def test_the_table_is_complete():
    assert (
        {str(state) for state in State} == AFTER.keys() == {str(state) for state in NEXT} == set(map(str, REACHED_BY))
    )
    for state in State:
        assert {str(event) for event in StartpointEvent} == AFTER[state].keys() == {str(event) for event in NEXT[state]}
    assert {State.CONSUMED, State.EXPIRED, State.CANCELLED} == OVER


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", StartpointEvent)
def test_every_state_and_event(state, event):
    ledger = EventLog([written(), *map(fact, REACHED_BY[state])])
    assert ledger.reader_state(1, READER).state is state
    ledger.add(fact(event))
    after = State(AFTER[state][event])
    assert ledger.reader_state(1, READER).state is after
    found = ledger.pending(READER)
    assert (found is None) == (after in OVER)


@pytest.mark.parametrize("first", StartpointEvent)
@pytest.mark.parametrize("second", StartpointEvent)
def test_one_reader_s_events_leave_the_others_alone(first, second):
    other = Reader("audit", "orders", 3)
    ledger = EventLog([written(target=Target(None, "orders", None)), fact(first), fact(second, other)])
    for_all = {StartpointEvent.EXPIRE, StartpointEvent.CANCEL}
    alone = EventLog([written(target=Target(None, "orders", None)), *([fact(first)] if first in for_all else [])])
    alone.add(fact(second, other))
    assert ledger.reader_state(1, other).state is alone.reader_state(1, other).state


def test_the_first_applied_in_order_wins():
    ledger = EventLog([written(), fact(StartpointEvent.APPLY, offset=5), fact(StartpointEvent.APPLY, offset=7)])
    assert ledger.reader_state(1, READER).applied.offset == 5


def test_a_fact_about_nothing_is_refused():
    with pytest.raises(ValueError, match="never written"):
        EventLog([fact(StartpointEvent.EXPIRE)])
    with pytest.raises(ValueError, match="numbered below"):
        EventLog([written(2), written(1)])


def test_targets_cover_whom_they_name():
    targets = [
        Target(consumer, "orders", partition, task)
        for consumer, partition, task in itertools.product(["billing", None], [0, None], ["a", None])
        if not (consumer is None and task is not None)
    ]
    readers = [
        Reader(consumer, topic, partition, task)
        for consumer, topic, partition, task in itertools.product(
            ["billing", "audit"], ["orders", "x"], [0, 1], ["", "a"]
        )
    ]
    for target in targets:
        for reader in readers:
            wanted = (
                reader.topic == "orders"
                and (target.consumer is None or target.consumer == reader.consumer)
                and (target.partition is None or target.partition == reader.partition)
                and (target.task is None or target.task == reader.task)
            )
            assert target.covers(reader) == wanted, (target, reader)
    for wide, narrow in itertools.product(targets, targets):
        covered = {reader for reader in readers if narrow.covers(reader)}
        assert wide.covers(narrow) == (covered <= {reader for reader in readers if wide.covers(reader)})


def test_one_stands_before_another_only_for_all_of_its_readers():
    ledger = EventLog([written(1), written(2, Target("billing", "orders", None)), written(3)])
    assert [ledger.superseded_by(n) for n in (1, 2, 3)] == [3, None, None]
    ledger.add(fact(StartpointEvent.CANCEL, sequence=3))
    assert ledger.superseded_by(1) == 3, "for good"
