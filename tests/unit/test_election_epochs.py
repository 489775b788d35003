"""Where two logs part (KIP-101, KIP-279), and which of two is ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.election.epochs import (
    EpochEnd,
    LogEnds,
    Unfenced,
    common_end,
    granted_end,
    step_back,
    without_unfenced,
)
from pushrep.election.messages import batches_of
from pushrep.records import encode_batch
from pushrep.records.leader_epochs import LeaderEpochs


def log_of(epochs, start=0):
    """A log whose records have these epochs."""
    entries = LeaderEpochs()
    for offset, epoch in enumerate(epochs, start):
        entries = entries.assigned(epoch, offset)
    return LogEnds(start, start + len(epochs), entries)


def test_the_drawing_of_the_module():
    leader, replica = log_of([1] * 7 + [4] * 3), log_of([1] * 5 + [3] * 3)
    assert replica.end_at_or_below(4) == (3, 8)
    assert step_back(leader, EpochEnd(3, 8)) == 7
    assert replica.end_at_or_below(1) == (1, 5)
    assert common_end(leader, replica) == common_end(replica, leader) == 5


@pytest.mark.parametrize(("asked", "answer"), [(0, (-1, 0)), (1, (1, 2)), (2, (1, 2)), (3, (3, 4)), (9, (3, 4))])
def test_the_largest_epoch_at_or_below(asked, answer):
    assert log_of([1, 1, 3, 3]).end_at_or_below(asked) == answer


HISTORIES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=6)


@given(shared=HISTORIES, ours=HISTORIES, theirs=HISTORIES)
def test_the_common_end_is_where_the_epochs_part(shared, ours, theirs):
    """Against the records' epochs one by one, where each epoch belongs to one history as ballots make sure."""
    prefix = [epoch for epoch, count in sorted(dict(shared).items()) for _ in range(count)]
    above = max(prefix, default=0)
    left = prefix + [above + 2 * epoch + 1 for epoch, count in sorted(dict(ours).items()) for _ in range(count)]
    right = prefix + [above + 2 * epoch + 2 for epoch, count in sorted(dict(theirs).items()) for _ in range(count)]
    expected = len(prefix)
    assert common_end(log_of(left), log_of(right)) == expected
    # By the dialogue of requests and answers, from either end.
    leader, replica = log_of(left), log_of(right)
    offset = min(leader.log_end_offset, replica.log_end_offset)
    rounds = 0
    while leader.epoch_before(offset) != replica.epoch_before(offset):
        before = offset
        offset = step_back(leader, replica.end_at_or_below(leader.epoch_before(offset)))
        rounds += 1
        assert offset < before
    assert offset == expected
    assert rounds <= len(leader.leader_epochs.entries) + len(replica.leader_epochs.entries)


def test_an_epoch_that_began_counts_without_a_record_of_it():
    log = log_of([1, 1])._replace(leader_epochs=LeaderEpochs(((1, 0), (4, 2))))
    assert granted_end(log, None) == (4, 2) > granted_end(log_of([1, 3, 3]), None)


def test_what_was_not_granted_counts_for_nothing_and_hides_nothing():
    """An unfenced number takes the place of an epoch that began at the same offset and has no record."""
    begun = LogEnds(0, 2, LeaderEpochs(((1, 0), (4, 2))))
    unfenced = Unfenced(2, granted_end(begun, None))
    appended = LogEnds(0, 5, begun.leader_epochs.assigned(6, 2))
    assert appended.leader_epochs.entries == ((1, 0), (6, 2))
    assert granted_end(appended, unfenced) == (4, 2)
    assert without_unfenced(appended, unfenced) == begun


def test_a_power_cut_below_the_granted_end_lowers_what_counts():
    unfenced = Unfenced(4, EpochEnd(3, 4))
    assert granted_end(log_of([1, 1, 3]), unfenced) == (3, 3)
    assert granted_end(log_of([1, 1]), unfenced) == (1, 2)


def test_batches_of_splits_and_says_whether_all_is_whole():
    data = b"".join(
        bytes(encode_batch([b"v"] * count, timestamps_ms=1, base_offset=base, leader_epoch=2).data)
        for base, count in ((5, 3), (8, 1))
    )
    batches, whole = batches_of(data)
    assert [(b.base_offset, b.next_offset, b.leader_epoch) for b in batches] == [(5, 8, 2), (8, 9, 2)]
    assert whole
    assert b"".join(batch.data for batch in batches) == data
    for damaged in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1])):
        batches, whole = batches_of(damaged)
        assert not whole
        assert len(batches) == (2 if damaged[:-1] == data else 1)
    assert batches_of(b"") == ((), True)
