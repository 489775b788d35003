"""Which batches of what was read from a leader's log are pushed: a table over `whole_batches`."""

import pytest

from pushrep.records import CorruptRecordBatch, encode_batch
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.pusher import whole_batches

EPOCHS = LeaderEpochs(((3, 0), (5, 14)))


def batch(base_offset, next_offset, epoch=3):
    made = encode_batch([b"x"] * (next_offset - base_offset), timestamps_ms=1)
    made.stamp(base_offset, epoch)
    return bytes(made.data)


A, B, C = batch(10, 12), batch(12, 14), batch(14, 17, 5)
TABLE = {
    # name: (what was read, up to which offset, which batches are pushed)
    "all": (A + B + C, 17, [A, B, C]),
    "below the end of a transition": (A + B + C, 14, [A, B]),
    "a batch that holds that end": (A + B + C, 13, [A, B]),
    "the first, wherever that ends": (A + B, 10, [A]),
    "before a part of a batch": (A + B[:-1], 17, [A]),
    "before damage": (A + B[:-1] + b"?", 17, [A]),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_whole_batches_are_pushed_up_to_the_end(row):
    data, end, expected = row
    found = whole_batches(data, 10, end, EPOCHS)
    pushed = b"".join(expected)
    ends = {A: 12, B: 14, C: 17}
    assert b"".join(map(bytes, found.parts)) == pushed
    assert (found.base_offset, found.end_offset, found.size_bytes) == (10, ends[expected[-1]], len(pushed))


REFUSED = {
    "nothing": (b"", "it ends at 17"),
    "a part of a batch": (A[:-1], "no batch from offset 10 on"),
    "damage": (A[:-1] + b"?", "no batch from offset 10 on"),
    "an epoch that never was": (batch(10, 12, 4), "leader epoch"),
    "an epoch that began later": (batch(10, 12, 5), "leader epoch"),
    "such a batch behind a whole one": (A + batch(12, 14, 5), "offset 12 has"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_replica_would_take_for_another_history_is_not_pushed(row):
    data, why = row
    with pytest.raises(CorruptRecordBatch, match=why):
        whole_batches(data, 10, 17, EPOCHS)
