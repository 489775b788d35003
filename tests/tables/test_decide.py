"""Do database and outbox continue each other? The decision, beside a model that knows the whole history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.tables.decide import BatchState, EventId, GoesOn, NotContinued, RelayedLog, judge

CLOSED, OPEN = BatchState(1, 4, False, {0: 10}), BatchState(1, 5, True, {0: 10})
NONE: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("state", "log", "said"),
    [
        (CLOSED, RelayedLog(0, 10), "goes on"),
        (CLOSED, RelayedLog(10, 10), "goes on"),  # retention removed all of it
        (CLOSED, RelayedLog(0, 12), "goes on"),  # somebody appended by hand
        (CLOSED, RelayedLog(0, 12, (1, 3), frozenset({7})), "goes on"),  # and sent an old record again
        (CLOSED, RelayedLog(0, 9), "outbox"),
        (CLOSED, RelayedLog(0, 0), "outbox"),
        (CLOSED, RelayedLog(0, 12, (1, 5), frozenset({7})), "database"),
        (CLOSED, RelayedLog(0, 12, (2, 1), frozenset({7})), "database"),
        (CLOSED, RelayedLog(0, 12, (1, 4), frozenset({7})), "database"),
        (CLOSED, RelayedLog(11, 12), "database"),
        (OPEN, RelayedLog(0, 10), "goes on"),
        (OPEN, RelayedLog(0, 12, (1, 5), frozenset({7, 8})), {0: frozenset({7, 8})}),
        (OPEN, RelayedLog(0, 12, (1, 6), frozenset({7})), "database"),
        (OPEN, RelayedLog(0, 9), "outbox"),
    ],
)
@pytest.mark.parametrize("noted", [None, (1, 0), (1, 3)])
def test_the_table(state, log, said, noted):
    """Whatever a note says that is behind, or lost."""
    verdict = judge(state, {0: log}, noted)
    if isinstance(said, dict):
        assert verdict == GoesOn(said)
    elif said == "goes on":
        assert verdict == GoesOn({})
    else:
        assert isinstance(verdict, NotContinued)
        assert verdict.outbox_is_old == (said == "outbox")


@pytest.mark.parametrize(
    ("state", "noted", "goes_on"),
    [
        (CLOSED, (1, 4), True),
        (CLOSED, (1, 5), False),  # batch 5 left no record: it was empty, or all of it was refused
        (CLOSED, (2, 0), False),
        (OPEN, (1, 4), True),
        (OPEN, (1, 5), False),
        (BatchState(1, 0, False, {}), (1, 1), False),  # no relay of this database ever ran
        (BatchState(2, 0, False, {}), (1, 7), True),  # adopted
    ],
)
def test_a_batch_without_a_record_is_known_by_the_note(state, noted, goes_on):
    verdict = judge(state, {0: RelayedLog(0, 10)}, noted)
    assert (verdict == GoesOn({})) is goes_on
    if not goes_on:
        assert not verdict.outbox_is_old


@pytest.mark.parametrize("state", [CLOSED, OPEN])
def test_what_is_gone_was_of_no_open_batch_if_the_note_says_that_the_newest_one_was_closed(state):
    """Somebody appended by hand to the outbox of a relay, and retention removed it: nothing of the relay's is gone."""
    assert judge(state, {0: RelayedLog(15, 20)}, (1, 4)) == GoesOn({})


@given(st.data())
def test_whoever_is_restored_to_an_earlier_moment_is_refused(data):
    """A history of batches over two partitions; each moment is (state, logs). Moments of two times do not fit."""
    moments = []
    ends, logs, state = {0: 0, 1: 0}, {0: [], 1: []}, BatchState(1, 0, False, {0: 0, 1: 0})
    row = 0

    def note():
        moments.append((state, {n: list(log) for n, log in logs.items()}))

    note()
    for _ in range(data.draw(st.integers(1, 4))):
        state = state._replace(batch=state.batch + 1, is_open=True)
        note()
        for _ in range(data.draw(st.integers(1, 3))):
            row += 1
            logs[data.draw(st.integers(0, 1))].append(EventId(1, state.batch, row))
            note()
        ends = {n: len(log) for n, log in logs.items()}
        state = state._replace(is_open=False, ends=ends)
        note()
    at = data.draw(st.integers(0, len(moments) - 1))
    of = data.draw(st.integers(0, len(moments) - 1))
    database, outbox = moments[at][0], moments[of][1]
    found = {}
    for n, log in outbox.items():
        behind = log[database.ends[n] :]
        newest = max((one[:2] for one in behind), default=None)
        rows = frozenset(one.row_id for one in behind if one[:2] == newest)
        found[n] = RelayedLog(0, len(log), newest, rows)
    verdict = judge(database, found)
    held = {one for log in outbox.values() for one in log}
    given_before = {one for log in moments[at][1].values() for one in log}
    if isinstance(verdict, GoesOn):
        # All that the database ever closed is in the outbox, and what else is there is of its open batch.
        closed = {one for one in given_before if one.batch < database.batch or not database.is_open}
        assert closed <= held
        assert all(database.is_open and one.batch == database.batch for one in held - closed)
        assert {one.row_id for one in held - closed} == set().union(*verdict.appended.values(), NONE)
    else:
        assert held != given_before


@pytest.mark.parametrize("written", [None, b"", b"1-2", b"1-2-x", b"1-2-3-4", b"-1-2-3", b"1-2-" + b"9" * 40])
def test_a_header_that_is_no_event_id_is_none(written):
    assert EventId.parse(written) is None


def test_an_event_id_comes_back():
    assert EventId.parse(str(EventId(1, 2, 3)).encode()) == EventId(1, 2, 3)
