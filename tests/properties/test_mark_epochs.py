"""Rule 9: marks are keyed by the startpoint epoch; a new epoch starts empty with reset_marks, else it inherits.

Both forms of the filter without Spark, over random logs that are read forth and back, against a filter for each
partition that is reset when a startpoint resets marks.
"""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from filtering import HighwaterMarks, PairSplit, ReplayFilter, StreamMetadata
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey
from spark_jobs.columns import FilterRule
from spark_jobs.decide import BITMAP_OFFSETS, Epoch, PartitionRows, Runs, decide, ranges_of
from spark_jobs.errors import FrameUnusable
from spark_jobs.frame import KEY
from spark_jobs.row_chunks import PairChunk, PairMarks, PairName, decide_pair, pack_rows, unpack_rows
from spark_jobs.row_decision import decide_rows, decided

PARTITIONS = 2
FIELDS = ("topic", "partition", "offset", KEY, "startpoint_epoch", "marks_epoch")
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        (KEY, pa.binary()),
        ("startpoint_epoch", pa.int64()),
        ("marks_epoch", pa.int64()),
    ]
)

logs = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=14),
    min_size=PARTITIONS,
    max_size=PARTITIONS,
)
# Of each partition in each batch: how many records it reads, and where it is sent before, if it is, with which reset.
steps = st.lists(
    st.tuples(
        *[st.tuples(st.integers(0, 6), st.none() | st.tuples(st.integers(0, 14), st.booleans()))] * PARTITIONS,
    ),
    min_size=1,
    max_size=6,
)


def rows_of(partition, drawn):
    for offset, (pair, source, unkeyed) in enumerate(drawn):
        key = None if unkeyed == 0 else StreamMetadata(5, partition * 2 + pair, source).pack()
        yield ("t", partition, offset, key)


class Stream:
    """Reads batches; a startpoint gives its partition a new epoch."""

    def __init__(self, drawn):
        self.logs = [list(rows_of(partition, rows)) for partition, rows in enumerate(drawn)]
        self.positions, self.epochs = [0] * PARTITIONS, [Epoch()] * PARTITIONS
        self.filters = None
        self.sequence = 0

    def batch(self, step, window):
        """The rows of the next batch with their epochs, and those that the rule keeps."""
        self.filters = self.filters or [ReplayFilter(window=window) for _ in range(PARTITIONS)]
        batch, kept = [], set()
        for partition, (count, sent) in enumerate(step):
            if sent is not None:
                self.sequence += 1
                place, reset = sent
                self.positions[partition] = min(place, len(self.logs[partition]))
                self.epochs[partition] = Epoch(self.sequence, self.sequence if reset else self.epochs[partition].marks)
                if reset:
                    self.filters[partition] = ReplayFilter(window=window)
            start = self.positions[partition]
            found = self.logs[partition][start : start + count]
            self.positions[partition] = start + len(found)
            batch += [(*row, *self.epochs[partition]) for row in found]
            kept |= {row[1:3] for row in found if self.filters[partition].admit(row[3], partition)}
        return batch, kept


def as_arrow(rows):
    return pa.RecordBatch.from_pylist([dict(zip(FIELDS, row, strict=True)) for row in rows], schema=SCHEMA)


def by_rows(rows, marks, rule, cut):
    """The foreachBatch form: what it keeps, and the marks after the batch."""
    found = found_by_rows([rows[:cut], rows[cut:]], marks, rule)
    verdict = decide(found, marks, rule=rule, now_ms=1)
    gone = {
        (partition, number * BITMAP_OFFSETS + bit)
        for (_, partition), bitmaps in verdict.dropped.items()
        for number, words in zip(bitmaps.numbers.tolist(), bitmaps.words.tolist(), strict=True)
        for bit in range(BITMAP_OFFSETS)
        if words[bit // 64] >> bit % 64 & 1
    }
    return {row[1:3] for row in rows} - gone, verdict


def found_by_rows(parts, marks, rule):
    batches = [as_arrow(part).select([KEY, *(name for name in FIELDS if name != KEY)]) for part in parts]
    return decided(pa.Table.from_batches(list(decide_rows(batches, marks, rule))))


def by_pairs(rows, state, rule):
    """The operator form; `state` as Spark keeps it."""
    data = []
    packed = [row for batch in pack_rows([as_arrow(rows)] if rows else [], KEY) for row in batch.to_pylist()]
    name = lambda row: PairName(row["topic"], row["pid"], row["source_partition"])  # noqa: E731
    for pair, group in itertools.groupby(sorted(packed, key=name), key=name):
        own = list(group)
        if pair.source_partition < 0:
            data += [row["data"] for row in own]
            continue
        chunks = [
            PairChunk(
                row["partition"],
                Epoch(row["startpoint_epoch"], row["marks_epoch"]),
                row["first_offset"],
                row["places"],
                row["data"],
            )
            for row in reversed(own)
        ]
        answer = decide_pair(pair, chunks, state.get(pair, PairMarks()), rule, now_ms=1)
        state[pair] = answer.after
        data += answer.kept
    out = pa.RecordBatch.from_arrays([pa.array(data, pa.binary())], names=["data"])
    return {(row["partition"], row["offset"]) for batch in unpack_rows([out]) for row in batch.to_pylist()}


@settings(max_examples=settings().max_examples // 2)
@given(logs, steps, st.sampled_from([0, 0, 3]), st.integers(0, 12))
def test_rule_9_both_forms_keep_what_a_filter_that_forgets_on_demand_keeps(drawn, taken, window, cut):
    rule, stream, marks, state = FilterRule(window=window), Stream(drawn), {}, {}
    for number, step in enumerate(taken):
        rows, expected = stream.batch(step, window)
        kept, verdict = by_rows(rows, marks, rule, cut)
        assert kept == expected, f"batch {number}"
        again = by_rows(rows, marks, rule, 0)[1]
        assert again.marks == verdict.marks, "run again it is the same batch"
        marks = verdict.marks
        assert by_pairs(rows, state, rule) == expected, f"batch {number}"
        assert all(
            key.startpoint_epoch == stream.epochs[partition].startpoint
            for key, own in marks.items()
            for partition in set(own.to_columns().destination_partitions.tolist()) & {row[1] for row in rows}
        ), "marks stand under the epoch that their partition is in"
        assert BatchMarks.from_bytes(BatchMarks("q", number, marks=marks).to_bytes()).marks == marks


def rows_in(partition, epoch, marks, start=0):
    """The rows of one partition in a batch, without runs."""
    count, none = len(marks), np.empty(0, np.int64)
    return PartitionRows("t", partition, start, start + count, count, 0, marks, *epoch, Runs(*[none] * 7))


def single(source, offset, partition):
    return HighwaterMarks.from_columns([5], [source], [offset], [partition])


def verdictned(found, before):
    return decide(found, before, rule=FilterRule(), now_ms=1)


def test_an_epoch_without_a_row_is_not_missed():
    """Startpoint 5 reset the marks and gave no record; 7, which does not, inherits nothing from before it."""
    before = {MarksKey("t", 3): single(0, 9, 0)}
    verdict = verdictned([rows_in(0, (7, 5), single(0, 4, 0))], before)
    assert {key: marks.get(5, 0).offset for key, marks in verdict.marks.items()} == {MarksKey("t", 7): 4}


def test_marks_that_do_not_say_where_their_pair_lies_are_forgotten_once_it_is_seen():
    before = {MarksKey("t"): HighwaterMarks.from_columns([5, 5], [0, 1], [9, 9])}
    verdict = verdictned([rows_in(0, (1, 1), single(0, 4, 0))], before)
    assert (verdict.marks[MarksKey("t", 1)].get(5, 0).offset, verdict.marks[MarksKey("t")].get(5, 1).offset) == (4, 9)


def test_a_pair_in_two_partitions_is_split_across_epochs_too():
    before = {MarksKey("t", 3): single(0, 9, 0)}
    with pytest.raises(PairSplit):
        verdictned([rows_in(1, (4, 0), single(0, 10, 1))], before)


def test_a_partition_in_two_epochs_at_once_is_refused():
    found = [rows_in(0, (3, 0), single(0, 4, 0)), rows_in(0, (4, 0), single(0, 4, 0), start=7)]
    with pytest.raises(FrameUnusable, match="startpoint epochs 3, 4"):
        verdictned(found, {})
    rows = [("t", 0, n, StreamMetadata(5, 0, n).pack(), epoch, 0) for n, epoch in enumerate((3, 4))]
    for parts in ([rows], [[row] for row in rows]):
        with pytest.raises(FrameUnusable):
            found_by_rows(parts, {}, FilterRule(window=2))


def test_ranges_of_another_epoch_are_another_batch():
    """Rolled back and sent to the same place by a startpoint, a batch reads the same offsets and is not the same."""
    marks = single(0, 4, 0)
    first, again = (ranges_of([rows_in(0, epoch, marks)]) for epoch in ((0, 0), (2, 2)))
    assert first == (LogRange("t", 0, 0, 1),)
    assert again == (LogRange("t", 0, 0, 1, 2),)
    old, new = (BatchMarks("q", 1, ranges, {MarksKey("t"): marks}) for ranges in (first, again))
    assert BatchMarks.from_bytes(new.to_bytes()) == new != old
