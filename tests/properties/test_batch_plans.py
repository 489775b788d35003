"""Verdicts without Spark: for any log, split into any tasks, by runs or row by row, they are what the rule decides row
by row.
"""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from filtering import HighwaterMarks, ReplayFilter, StreamMetadata
from spark_jobs.batch_marks import MarksKey
from spark_jobs.columns import FilterRule
from spark_jobs.decide import (
    BITMAP_OFFSETS,
    NO_PAIR,
    Bitmaps,
    PartitionRows,
    Runs,
    Stretches,
    decide,
    verdict_of_runs,
)
from spark_jobs.errors import FrameUnusable
from spark_jobs.row_decision import decide_rows, decided

TOPICS = ("a", "b")

# (topic, log partition, pair, step of the source position, key without metadata)
rows_of_logs = st.lists(
    st.tuples(
        st.sampled_from(TOPICS),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([1, 1, 1, 1, 1, 1, 2, 0, -1, -3]),
        st.integers(0, 11).map(lambda n: n == 0),
    ),
    max_size=40,
)


def log_of(drawn):
    """(topic, partition, log offset, key): each pair lives in one partition, log offsets have holes."""
    ends, positions, log = {}, {}, []
    for number, (topic, partition, pair, step, unkeyed) in enumerate(drawn):
        offset = ends[topic, partition] = ends.get((topic, partition), -1) + 1 + (number % 7 == 6)
        source = partition * 2 + pair
        positions[topic, source] = max(0, positions.get((topic, source), -1) + step)
        key = None if unkeyed else StreamMetadata(-5, source, positions[topic, source]).pack()
        log.append((topic, partition, offset, key))
    return log


def tasks_of(log, cuts):
    """Contiguous ranges of each log partition, dealt out to tasks; one task may hold several ranges."""
    tasks = [[] for _ in range(3)]
    for _, group in itertools.groupby(sorted(log, key=lambda row: row[:2]), key=lambda row: row[:2]):
        own = sorted(group, key=lambda row: row[2])
        places = sorted({min(cut, len(own)) for cut in cuts})
        for n, (low, high) in enumerate(itertools.pairwise([0, *places, len(own)])):
            tasks[min(n, 2)].extend(own[low:high])
    return [task for task in tasks if task]


def columns_of(task):
    topics, partitions, offsets, keys = zip(*task, strict=True)
    return (
        pa.array(keys, pa.binary()),
        pa.array(topics, pa.string()),
        pa.array(partitions, pa.int32()),
        pa.array(offsets, pa.int64()),
    )


def found_by_rows(rows, before, rule, arrow_rows=7):
    """The rows as Python workers decide them: sorted as by Spark, in Arrow batches of this size."""
    in_order = sorted(rows, key=lambda row: row[:3])
    names = ["key", "topic", "partition", "offset"]
    batches = [
        pa.RecordBatch.from_arrays(list(columns_of(in_order[first : first + arrow_rows])), names=names)
        for first in range(0, len(in_order), arrow_rows)
    ]
    return decided(pa.Table.from_batches(list(decide_rows(batches, before, rule))))


def found_by_runs(tasks):
    """The rows as runs of the first pass. Rows are numbered as by Spark's `monotonically_increasing_id`."""
    rows = sorted((row[:2], (n << 33) + place, row) for n, task in enumerate(tasks) for place, row in enumerate(task))
    for (topic, partition), group in itertools.groupby(rows, key=lambda row: row[0]):
        own = [(place, row) for _, place, row in group]
        runs, keyed = runs_of(own), sum(row[3] is not None for _, row in own)
        pairs = runs.some(np.flatnonzero(runs.partitions != NO_PAIR))
        marks = HighwaterMarks.from_columns(pairs.pids, pairs.partitions, pairs.highs, partition)
        start, end = int(runs.starts.min()), int(runs.lasts.max()) + 1
        yield PartitionRows(topic, partition, start, end, len(own), len(own) - keyed, marks, runs=runs)


def runs_of(rows):
    """As the first pass groups them: by pair, by the distance of both offsets, by the distance to the row's place."""
    groups = {}
    for place, (_, _, offset, key) in rows:
        one = StreamMetadata.try_unpack(key)
        pid, source, position = (one.pid, one.partition, one.offset) if one else (0, NO_PAIR, offset)
        groups.setdefault((pid, source, position - offset, offset - place), []).append((offset, position))
    columns = [
        (pid, source, min(o for o, _ in g), max(o for o, _ in g), min(s for _, s in g), max(s for _, s in g), len(g))
        for (pid, source, *_), g in groups.items()
    ]
    return Runs(*(np.array(c, np.int64) for c in zip(*columns, strict=True)))


def kept(verdict, rows):
    """The rows that a verdict lets pass, by place."""
    return {row[:3] for row in rows if not drops(verdict, row)}


def drops(verdict, row):
    found = verdict.dropped.get(row[:2])
    if found is None:
        return False
    if isinstance(found, Stretches):
        return any(start <= row[2] < end for start, end in zip(*found, strict=True))
    number, bit = divmod(row[2], BITMAP_OFFSETS)
    words = [own for n, own in zip(*found, strict=True) if n == number]
    return bool(words and int(words[0][bit // 64]) >> bit % 64 & 1)


@given(
    rows_of_logs,
    st.lists(st.integers(0, 20), max_size=3),
    st.sampled_from([0, 0, 3]),
    st.integers(0, 30),
    st.integers(1, 9),
    st.none() | st.randoms(use_true_random=False),
)
def test_verdicts_are_those_of_one_filter_over_the_whole_log(drawn, cuts, window, earlier, arrow_rows, shuffled):
    rule = FilterRule(window=window)
    log = log_of(drawn)
    past, batch = log[:earlier], log[earlier:]
    filters = {topic: ReplayFilter(window=window) for topic in TOPICS}
    for topic, partition, _, key in past:
        filters[topic].admit(key, partition)
    before = {MarksKey(topic): f.marks() for topic, f in filters.items() if len(f.marks())}
    counts_before = [f.counts for f in filters.values()]
    expected = {row[:3] for row in batch if filters[row[0]].admit(row[3], row[1])}
    grown = [
        (a.late - b.late, a.jumped - b.jumped)
        for a, b in zip((f.counts for f in filters.values()), counts_before, strict=True)
    ]

    by_rows = decide(found_by_rows(batch, before, rule, arrow_rows), before, rule=rule, now_ms=7)
    tasks = tasks_of(batch, cuts)
    for task in tasks if shuffled is not None else ():
        shuffled.shuffle(task)
    by_runs = None if window else decide(list(found_by_runs(tasks)), before, rule=rule, now_ms=7)
    for verdict in filter(None, (by_rows, by_runs)):
        assert kept(verdict, batch) == expected
        counts = verdict.counts
        assert (counts.rows, counts.dropped) == (len(batch), len(batch) - len(expected))
        assert (counts.late, counts.jumped) == tuple(map(sum, zip(*grown, strict=True)))
        for topic, filter_ in filters.items():
            mine = verdict.marks.get(MarksKey(topic), HighwaterMarks()).to_columns()
            theirs = filter_.marks().to_columns()
            for name in ("pids", "partitions", "offsets", "destination_partitions", "bitmaps"):
                assert (getattr(mine, name) == getattr(theirs, name)).all(), f"{topic}: {name}"
    if by_runs is not None:
        assert (by_runs.marks, by_runs.counts) == (by_rows.marks, by_rows.counts)


@given(rows_of_logs, st.lists(st.integers(0, 20), max_size=3), st.integers(0, 30))
def test_new_rows_without_a_gap_in_their_source_are_decided_by_runs(drawn, cuts, earlier):
    """Where a gap and a row of others take each other back, a pair has one distance twice, and the rows decide."""
    log = log_of([(topic, partition, pair, 1, unkeyed) for topic, partition, pair, _, unkeyed in drawn])
    past, batch = log[:earlier], log[earlier:]
    filters = {topic: ReplayFilter() for topic in TOPICS}
    for topic, partition, _, key in past:
        filters[topic].admit(key, partition)
    before = {MarksKey(topic): f.marks() for topic, f in filters.items()}
    verdict = decide(list(found_by_runs(tasks_of(batch, cuts))), before, rule=FilterRule(), now_ms=7)
    assert verdict is not None
    assert verdict.counts.dropped == 0


@given(rows_of_logs, st.lists(st.integers(0, 20), max_size=3), st.data(), st.sampled_from([0, 0, 3]))
def test_a_record_that_stands_twice_is_never_decided_by_runs_and_refused_where_rows_are(drawn, cuts, data, window):
    """The frame differs from the log then, whichever record is repeated and wherever its copy is."""
    tasks, rule = tasks_of(log_of(drawn), cuts), FilterRule(window=window)
    assume(tasks)
    row = data.draw(st.sampled_from([row for task in tasks for row in task]))
    task = data.draw(st.sampled_from(tasks))
    task.insert(data.draw(st.integers(0, len(task))), row)

    assert decide(list(found_by_runs(tasks)), {}, rule=rule, now_ms=7) is None
    topic, partition, offset = row[:3]
    with pytest.raises(FrameUnusable, match=f"log offset {offset} of partition {partition} of {topic} stands twice"):
        found_by_rows([row for task in tasks for row in task], {}, rule)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), max_size=6))
def test_bitmaps_hold_the_offsets_of_stretches(gaps_and_sizes):
    edges = np.cumsum([n for pair in gaps_and_sizes for n in pair], dtype=np.int64)
    bitmaps = Bitmaps.of(Stretches(edges[::2], edges[1::2]))
    words = [
        (n * BITMAP_OFFSETS, w.view(np.uint64)) for n, w in zip(bitmaps.numbers.tolist(), bitmaps.words, strict=True)
    ]
    found = [
        first + bit for first, own in words for bit in range(BITMAP_OFFSETS) if int(own[bit // 64]) >> bit % 64 & 1
    ]
    assert found == [o for start, end in zip(edges[::2], edges[1::2], strict=True) for o in range(start, end)]


def run(pair, start, low, rows, last=None):
    last = start + rows - 1 if last is None else last
    return (-5, pair, start, last, low, low + last - start, rows)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        pytest.param([run(0, 10, 5, 3)], ([], 0), id="first sight"),
        pytest.param([run(1, 10, 101, 3)], ([], 0), id="all above the mark"),
        pytest.param([run(1, 10, 105, 3)], ([], 4), id="a gap above the mark"),
        pytest.param([run(1, 10, 98, 3)], ([(10, 13)], 0), id="all below the mark, the last equal"),
        pytest.param([run(1, 10, 99, 4)], ([(10, 12)], 0), id="the mark inside"),
        pytest.param([run(0, 10, 0, 5), run(0, 20, 2, 5)], ([(20, 23)], 0), id="a replay inside the batch"),
        pytest.param(
            [run(0, 10, 0, 5), run(0, 20, 0, 2), run(0, 30, 2, 4)], ([(20, 33)], 0), id="neighbours are one stretch"
        ),
        pytest.param(
            [run(0, 10, 0, 5), run(0, 20, 0, 2), run(0, 5000, 2, 4)],
            ([(20, 22), (5000, 5003)], 0),
            id="neighbours far away from one another are two",
        ),
        pytest.param(
            [run(0, 10, 0, 5), run(0, 20, 0, 2), run(0, 30, 5, 2), run(0, 40, 3, 2)],
            ([(20, 22), (40, 42)], 0),
            id="kept rows between two stretches",
        ),
        pytest.param(
            [run(1, 10, 50, 3), run(3, 14, 60, 2), run(1, 17, 60, 2)], ([(10, 19)], 0), id="neighbours of two pairs"
        ),
        pytest.param(
            [run(1, 10, 50, 3), run(NO_PAIR, 14, 14, 1), run(1, 17, 60, 2)],
            ([(10, 13), (17, 19)], 0),
            id="a row without metadata between two stretches",
        ),
        pytest.param([run(NO_PAIR, 10, 10, 1, last=15)], ([], 0), id="holes between rows without metadata are no gap"),
        pytest.param([run(1, 10, 99, 3, last=14)], None, id="cut inside a run with a hole"),
        pytest.param([run(1, 10, 50, 3, last=14)], ([(10, 15)], 0), id="a run with a hole, all below"),
        pytest.param(
            [run(1, 10, 50, 3, last=14), run(0, 11, 0, 2)], None, id="a run with a hole, in which others may lie"
        ),
        pytest.param(
            [run(0, 10, 0, 3, last=24), run(1, 12, 50, 5), run(1, 18, 55, 3)],
            ([(12, 17), (18, 21)], 12),
            id="others may lie in the hole between two stretches",
        ),
        pytest.param([run(0, 10, 0, 5), run(0, 12, 9, 5)], None, id="runs of one pair cross"),
        pytest.param([run(0, 10, 0, 3, last=11)], None, id="more rows than offsets"),
        pytest.param([run(1, 0, 2**63 - 2, 2)], ([], 2**63 - 103), id="the highest offset there is"),
        pytest.param([run(2, 5, 0, 2)], ([(5, 7)], 0), id="a mark at the highest offset"),
    ],
)
def test_the_table_of_runs_against_marks(runs, verdict):
    marks = HighwaterMarks.from_columns([-5, -5, -5], [1, 2, 3], [100, 2**63 - 1, 100])
    for order in itertools.permutations(runs):
        found = verdict_of_runs(Runs(*(np.array(c, np.int64) for c in zip(*order, strict=True))), marks)
        assert (found and (list(zip(*map(np.ndarray.tolist, found.dropped), strict=True)), found.jumped)) == verdict
