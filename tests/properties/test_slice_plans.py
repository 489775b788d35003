"""Plans and slice filters without Spark: any log, cut into tasks anywhere, gives what the rule says row by row."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from filtering import HighwaterMarks, ReplayFilter, StreamMetadata
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import LogRowTwice
from spark_jobs.filter_settings import FilterRule
from spark_jobs.slice_filter import COUNT_SHIFT, JUMPED, KIND_MASK, LATE, SliceFilters, scan_batches
from spark_jobs.slices import Runs, Slice, decide, plan_batch

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


def scanned(tasks, rule):
    """What the first pass finds, by its Python form, with the runs of each slice beside it."""
    for task in tasks:
        batch = pa.RecordBatch.from_arrays(list(columns_of(task)), names=["key", "topic", "partition", "offset"])
        for found in itertools.chain.from_iterable(b.to_pylist() for b in scan_batches([batch], rule)):
            marks = HighwaterMarks.from_bytes(found.pop("marks"))
            own = [(place, row) for place, row in enumerate(task) if row[:2] == (found["topic"], found["partition"])]
            runs = {} if rule.window else {"runs": runs_of(own), "unkeyed_runs": runs_of(own, keyed=False)}
            yield Slice(**found, marks=marks, **runs)


def runs_of(rows, *, keyed=True):
    """As the first pass groups them: by pair, by the distance of both offsets, by the distance to the row's place."""
    groups = {}
    for place, (_, partition, offset, key) in rows:
        metadata = StreamMetadata.try_unpack(key)
        one = metadata or StreamMetadata(0, partition, offset)
        if keyed == (metadata is not None):
            name = one.pid, one.partition, one.offset - offset, offset - place
            groups.setdefault(name, []).append((offset, one.offset))
    columns = [
        (pid, source, min(o for o, _ in g), max(o for o, _ in g), min(s for _, s in g), max(s for _, s in g), len(g))
        for (pid, source, *_), g in groups.items()
    ]
    return (
        Runs(*(np.array(c, np.int64) for c in zip(*columns, strict=True)))
        if columns
        else Runs(*[np.empty(0, np.int64)] * 7)
    )


@given(
    rows_of_logs,
    st.lists(st.integers(0, 20), max_size=3),
    st.sampled_from([0, 0, 3]),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_slices_decide_as_one_filter_over_the_whole_log(drawn, cuts, window, earlier, arrow_rows):
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

    tasks = tasks_of(batch, cuts)
    plan = plan_batch(scanned(tasks, rule), before, rule=rule, now_ms=7, sort=False)
    assert not plan.must_sort

    kept, late, jumped = set(), 0, 0
    for task in tasks:
        slices = SliceFilters(plan.starts, rule)
        for first in range(0, len(task), arrow_rows):
            rows = task[first : first + arrow_rows]
            key, topic, partition, offset = columns_of(rows)
            decisions = slices.decide(key, topic, partition, offset)
            kept |= {row[:3] for row, decision in zip(rows, decisions, strict=True) if decision & 1}
            for decision in decisions.tolist():
                late += (decision >> COUNT_SHIFT) * (decision & KIND_MASK == LATE)
                jumped += (decision >> COUNT_SHIFT) * (decision & KIND_MASK == JUMPED)
        slices.check_whole()
    assert kept == expected
    assert (late, jumped) == tuple(map(sum, zip(*grown, strict=True)))

    for topic, filter_ in filters.items():
        mine = plan.marks.get(MarksKey(topic), HighwaterMarks()).to_columns()
        theirs = filter_.marks().to_columns()
        for name in ("pids", "partitions", "offsets", "destination_partitions", "bitmaps"):
            assert (getattr(mine, name) == getattr(theirs, name)).all(), f"{topic}: {name}"

    if plan.verdict is not None:
        gone = {row[:3] for row in batch if any(covers(topic, stretch, row) for topic, stretch in plan.verdict.dropped)}
        assert {row[:3] for row in batch} - gone == expected, "the runs decided otherwise than the rows"
        assert (plan.verdict.dropped_rows, plan.verdict.jumped) == (len(batch) - len(expected), jumped)
    elif not window:
        assert expected != {row[:3] for row in batch}, "every row is new, and the runs did not prove it"


@given(rows_of_logs, st.lists(st.integers(0, 20), max_size=3), st.data(), st.sampled_from([0, 0, 3]))
def test_a_record_that_stands_twice_is_never_decided_by_runs_and_refused_where_rows_are(drawn, cuts, data, window):
    """The frame is not the log then; whichever record it is, wherever its copy lies."""
    tasks, rule = tasks_of(log_of(drawn), cuts), FilterRule(window=window)
    assume(tasks)
    row = data.draw(st.sampled_from([row for task in tasks for row in task]))
    task = data.draw(st.sampled_from(tasks))
    task.insert(data.draw(st.integers(0, len(task))), row)

    plan = plan_batch(scanned(tasks, rule), {}, rule=rule, now_ms=7, sort=False)
    assert plan.verdict is None

    in_order = sorted((row for task in tasks for row in task), key=lambda row: row[:3])
    plan = plan_batch(scanned([in_order], rule), {}, rule=rule, now_ms=7, sort=True)
    with pytest.raises(LogRowTwice) as refused:
        SliceFilters(plan.starts, rule).decide(*columns_of(in_order))
    assert (refused.value.topic, refused.value.partition, refused.value.offset) == row[:3]


def covers(topic, stretch, row):
    metadata = StreamMetadata.try_unpack(row[3])
    pair = metadata and (row[0], metadata.pid, metadata.partition)
    return pair == (topic, stretch.pid, stretch.partition) and stretch.start <= row[2] < stretch.end


def run(pair, start, low, rows, last=None):
    last = start + rows - 1 if last is None else last
    return (-5, pair, start, last, low, low + last - start, rows)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        pytest.param([run(0, 10, 5, 3)], ([], 0), id="first sight"),
        pytest.param([run(1, 10, 101, 3)], ([], 0), id="all above the mark"),
        pytest.param([run(1, 10, 105, 3)], ([], 4), id="a gap above the mark"),
        pytest.param([run(1, 10, 98, 3)], ([(1, 10, 13)], 0), id="all below the mark, the last equal"),
        pytest.param([run(1, 10, 99, 4)], ([(1, 10, 12)], 0), id="the mark inside"),
        pytest.param([run(0, 10, 0, 5), run(0, 20, 2, 5)], ([(0, 20, 23)], 0), id="a replay inside the batch"),
        pytest.param(
            [run(0, 10, 0, 5), run(0, 20, 0, 2), run(0, 30, 2, 4)], ([(0, 20, 33)], 0), id="neighbours are one stretch"
        ),
        pytest.param(
            [run(0, 10, 0, 5), run(0, 20, 0, 2), run(0, 30, 5, 2), run(0, 40, 3, 2)],
            ([(0, 20, 22), (0, 40, 42)], 0),
            id="kept rows between two stretches",
        ),
        pytest.param([run(1, 10, 99, 3, last=14)], None, id="cut inside a run with a hole"),
        pytest.param([run(1, 10, 50, 3, last=14)], ([(1, 10, 15)], 0), id="a run with a hole, all below"),
        pytest.param([run(0, 10, 0, 5), run(0, 12, 9, 5)], None, id="runs of one pair cross"),
        pytest.param([run(0, 10, 0, 3, last=11)], None, id="more rows than offsets"),
        pytest.param([run(1, 0, 2**63 - 2, 2)], ([], 2**63 - 103), id="the highest offset there is"),
        pytest.param([run(2, 5, 0, 2)], ([(2, 5, 7)], 0), id="a mark at the highest offset"),
    ],
)
def test_the_table_of_runs_against_marks(runs, verdict):
    marks = HighwaterMarks.from_columns([-5, -5], [1, 2], [100, 2**63 - 1])
    for order in itertools.permutations(runs):
        found = decide(Runs(*(np.array(c, np.int64) for c in zip(*order, strict=True))), marks)
        assert (found and ([stretch[1:] for stretch in found.dropped], found.jumped)) == verdict


@given(rows_of_logs, st.randoms(use_true_random=False))
def test_a_shuffled_batch_is_recognised_or_in_order(drawn, rng):
    log = log_of(drawn)
    rng.shuffle(log)
    middle = rng.randint(0, len(log))
    tasks = [task for task in (log[:middle], log[middle:]) if task]
    plan = plan_batch(scanned(tasks, FilterRule(window=2)), {}, rule=FilterRule(window=2), now_ms=7, sort=False)
    if plan.must_sort:
        assert sum(start.rows for start in plan.starts) == len(log)
        assert len({(start.topic, start.partition) for start in plan.starts}) == len(plan.starts), "whole partitions"
    else:
        for task in tasks:
            SliceFilters(plan.starts, FilterRule(window=2)).decide(*columns_of(task))  # refuses rows out of order
