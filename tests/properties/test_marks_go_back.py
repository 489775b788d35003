"""Where a startpoint sends a partition back and its rows are replaced, its marks are those of that place again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from filtering import HighwaterMarks
from spark_jobs.batch_marks import MarksKey
from spark_jobs.decide import Epoch, carried, lowered, taken_back

PAIRS = [(7, 0), (7, 1), (-3, 0)]
LOG = st.lists(st.tuples(st.sampled_from(PAIRS), st.integers(0, 12)), min_size=1, max_size=40)


def kept_of(log, highest):
    """The rule by brute force: the places of the log that pass; `highest` is updated."""
    passed = []
    for place, (pair, offset) in enumerate(log):
        if offset > highest.get(pair, -1):
            highest[pair] = offset
            passed.append(place)
    return passed


def marks_of(highest, partition=0):
    pairs = sorted(highest)
    return HighwaterMarks.from_columns(
        [pid for pid, _ in pairs], [source for _, source in pairs], [highest[pair] for pair in pairs], partition
    )


@given(LOG, st.data())
def test_marks_are_lowered_to_where_the_second_reading_begins(log, data):
    start = data.draw(st.integers(0, len(log)))
    before = {}
    kept_of(log[:start], before)
    at_start, at_end = dict(before), dict(before)
    kept = [start + place for place in kept_of(log[start:], at_end)]
    lowest = {}
    for place in kept:
        pair, offset = log[place]
        lowest[pair] = min(offset, lowest.get(pair, offset))
    columns = [np.array([pair[n] for pair in lowest], np.int64) for n in range(2)]
    held = HighwaterMarks.from_columns(*columns, np.array(list(lowest.values()), np.int64))
    back = lowered(marks_of(at_end), held)
    entries = {pair: entry.offset for pair, entry in back.items()}
    again = [start + place for place in kept_of(log[start:], entries)]
    assert again == kept, "the second reading keeps the rows of the first one, and no replay of what lies before them"
    # What stands between a mark and the lowest row that was kept never came: any number there is the same mark.
    for pair, offset in at_start.items():
        assert entries[pair] >= offset


def test_only_the_partition_that_begins_anew_goes_back_and_stands_under_its_epoch():
    before = {
        MarksKey("orders", 0): marks_of({(7, 0): 9}, 0).merge(marks_of({(7, 1): 9}, 1)),
        MarksKey("orders", 3): marks_of({(7, 2): 9}, 2),
        MarksKey("bills", 0): marks_of({(7, 0): 9}, 0),
    }
    epochs = {0: Epoch(0, 0), 1: Epoch(5, 4), 2: Epoch(6, 3)}
    seen = HighwaterMarks()
    held = HighwaterMarks.from_columns([7], [1], [4])
    went_back = []

    def as_of(partition, marks):
        went_back.append(partition)
        return lowered(marks, held)

    after = taken_back(before, "orders", epochs, seen, as_of)
    assert went_back == [1], "partition 2 began anew in epoch 3 already, and was moved in 6 without a reset"
    assert {key: dict(marks.items()) for key, marks in after.items()} == {
        MarksKey("orders", 0): dict(marks_of({(7, 0): 9}, 0).items()),
        MarksKey("orders", 3): dict(marks_of({(7, 2): 9}, 2).items()),
        MarksKey("orders", 5): dict(marks_of({(7, 1): 3}, 1).items()),
        MarksKey("bills", 0): dict(marks_of({(7, 0): 9}, 0).items()),
    }
    assert taken_back(after, "orders", epochs, seen, as_of) is after, "the next batch goes on with them"
    assert carried(after, "orders", epochs, seen).get(7, 1).offset == 3
