"""The chunks of the operator form without Spark: packed by tasks, in any order at the operator, and unpacked."""

import itertools
import json
import logging
import random
from unittest import mock

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.listener import QueryProgressEvent

from filtering import HighwaterMarks, PairSplit, StreamMetadata
from filtering.replay_filter import FilterCounts
from spark_jobs import keyed_state, row_chunks
from spark_jobs.columns import FilterRule
from spark_jobs.decide import BatchCounts, Epoch
from spark_jobs.errors import FrameUnusable, SparkJobError
from spark_jobs.keyed_state import decided_frames, warn_of_none
from spark_jobs.operator_counts import CountsListener, Reports, operator_counts, operator_gaps
from spark_jobs.row_chunks import (
    CHUNK_BYTES,
    PairChunk,
    PairMarks,
    PairName,
    decide_pair,
    is_outside,
    opened,
    pack_rows,
    places_of,
    unpack_rows,
)

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)


def batch_of(rows):
    cells = [dict(zip(SCHEMA.names, row.cells(), strict=False)) for row in rows]
    return pa.RecordBatch.from_pylist(cells, schema=SCHEMA)


def packed(batches, **packing):
    return [row for out in pack_rows(batches, "key", travels=True, **packing) for row in out.to_pylist()]


def pair_of(chunk):
    return PairName(chunk["topic"], chunk["pid"], chunk["source_partition"])


def chunk_of(row):
    epoch = Epoch(row["startpoint_epoch"], row["marks_epoch"])
    return PairChunk(row["partition"], epoch, row["first_offset"], row["places"], row["data"])


def rows_in(data):
    column = pa.RecordBatch.from_arrays([pa.array(data, pa.binary())], names=["data"])
    return [row for batch in unpack_rows([column]) for row in batch.to_pylist()]


class Operator:
    """Does what Spark's operator does with the chunks of a batch, in any order."""

    def __init__(self, rule):
        self.rule, self.state = rule, {}
        self.kept = self.dropped = self.late = 0

    def batch(self, chunks):
        data = []
        for pair, group in itertools.groupby(sorted(chunks, key=pair_of), key=pair_of):
            if is_outside(pair.source_partition):
                data += [chunk["data"] for chunk in group]
                continue
            known = self.state.get(pair, PairMarks())
            answer = decide_pair(pair, map(chunk_of, group), known, self.rule, now_ms=None)
            self.state[pair] = answer.after
            data += answer.kept
            self.kept, self.dropped = self.kept + answer.counts.kept, self.dropped + answer.counts.dropped
        return {row["value"] for row in rows_in(data)}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])  # `logs` holds functions only
@given(
    st.integers(0, 2**32),
    st.sampled_from([{}, {"window": 4}, {"only_pids": frozenset([5, -7])}]),
    st.sampled_from(["ranges", "interleaved", "shuffled"]),
    st.sampled_from([1, 200, 1500, CHUNK_BYTES]),
)
def test_the_exact_definition_whatever_the_physical_order_of_rows_and_chunks(logs, seed, rule, cut, chunk_bytes):
    """A row is kept iff its offset is above the mark and those of its pair's rows before it in the destination log."""
    rng = random.Random(seed)
    rows = [row for n in range(2) for row in logs.random_topic(seed + n, rows=60)]
    model, operator = logs.Model(rule.get("window", 0), rule.get("only_pids")), Operator(FilterRule(**rule))
    batches = logs.in_batches(rows, 2, seed)
    with mock.patch.object(row_chunks, "CHUNK_BYTES", chunk_bytes), mock.patch.object(row_chunks, "GATHER_BYTES", 2000):
        for batch in batches:
            tasks = tasks_of(batch, cut, rng)
            chunks = [chunk for task in tasks for chunk in packed(task, only_pids=rule.get("only_pids"))]
            rng.shuffle(chunks)
            assert operator.batch(chunks) == model.kept(batch)
    keyed = [r for r in rows if r.metadata and r.metadata.pid in rule.get("only_pids", [r.metadata.pid])]
    assert operator.kept + operator.dropped == len(keyed), "every row of the rule is counted, and no other"


def tasks_of(rows, cut, rng):
    """Each task's rows as Arrow batches of a few rows: contiguous ranges, ranges that overlap, or no order at all."""
    rows = sorted(rows, key=lambda row: (row.topic, row.partition, row.offset))
    if cut == "shuffled":
        rng.shuffle(rows)
    if cut == "interleaved":
        rows = rows[::2] + rows[1::2]
    tasks = [rows[low : low + 50] for low in range(0, len(rows), 50)]
    return [[batch_of(task[low : low + 7]) for low in range(0, len(task), 7)] for task in tasks]


def a_row(logs, offset, source=None, pid=5, partition=0, value=None):
    metadata = StreamMetadata(pid, 0, offset if source is None else source)
    return logs.Row("t", partition, offset, metadata, None, value or f"{pid}:{offset}")


def test_a_chunk_is_at_most_one_mib_of_one_pair_in_log_order_and_names_its_first_offset(logs):
    rng = random.Random(1)
    sizes = [rng.choice([10, 2_000, 300_000]) for _ in range(60)]
    sizes[17] = CHUNK_BYTES + 5  # a row that is too large by itself travels alone
    rows = [a_row(logs, n, pid=n % 3, value=f"{n}:" + "x" * size) for n, size in enumerate(sizes)]
    rng.shuffle(rows)
    found = packed([batch_of(rows[:31]), batch_of(rows[31:])])
    assert {pair_of(chunk) for chunk in found} == {("t", pid, 0) for pid in range(3)}
    for chunk in found:
        batch = opened(chunk["data"])
        log_offsets, source_offsets = (column.tolist() for column in places_of(chunk["places"]))
        assert log_offsets == sorted(log_offsets) == batch["offset"].to_pylist() == source_offsets
        assert {offset % 3 for offset in log_offsets} == {chunk["pid"]}
        assert (chunk["first_offset"], chunk["rows"]) == (log_offsets[0], batch.num_rows)
        assert len(chunk["data"]) <= CHUNK_BYTES or chunk["rows"] == 1
    assert sorted(row["value"] for chunk in found for row in rows_in([chunk["data"]])) == sorted(r.id for r in rows)


def test_a_chunk_that_passes_whole_is_handed_on_as_it_came(logs):
    """Only where some rows of a chunk pass and some do not is it taken apart."""
    first, mixed, old = (
        packed([batch_of([a_row(logs, n, source) for n, source in places])])[0]
        for places in ([(0, 0), (1, 1)], [(2, 1), (3, 2)], [(4, 0), (5, 2)])
    )
    answer = decide_pair(
        PairName("t", 5, 0), map(chunk_of, (old, mixed, first)), PairMarks(), FilterRule(), now_ms=None
    )
    whole, cut = answer.kept
    assert whole is first["data"]
    assert [row["offset"] for row in rows_in([cut])] == [3]
    assert (answer.counts.kept, answer.counts.dropped) == (3, 3)


def test_rows_without_metadata_make_chunks_of_their_own_and_have_no_places(logs):
    rows = [logs.Row("t", n % 2, n, None, b"business", str(n)) for n in range(4)]
    found = packed([batch_of(rows)])
    assert [(c["source_partition"], c["partition"], c["places"], c["rows"]) for c in found] == [
        (-1, 0, b"", 2),
        (-2, 1, b"", 2),
    ]


@pytest.mark.parametrize("is_keyed", [False, True])
def test_faults_s7_a_batch_frame_without_metadata_is_warned_of_by_the_task_that_sees_all_of_its_topic(
    logs, caplog, is_keyed
):
    rows = [
        logs.Row("t", 0, n, StreamMetadata(5, 0, n) if is_keyed and n == 3 else None, b"", f"{n}") for n in range(4)
    ]
    tasks = [packed([batch_of(some)], carrier="key") for some in (rows[:2], rows[2:])]
    own = [pd.DataFrame([one for one in chunks if one["source_partition"] == row_chunks.CARRIER]) for chunks in tasks]
    assert [len(one) for one in own] == [1, 1], "each task tells it once"
    warn_of_none("t", own, FilterRule())
    assert [record.message.startswith("topic t: no record") for record in caplog.records] == (
        [] if is_keyed else [True]
    )


def test_a_pair_in_two_partitions_is_split_and_one_in_two_epochs_is_refused(logs):
    here, there = (packed([batch_of([a_row(logs, 3, partition=p)])])[0] for p in (0, 1))
    name = PairName("t", 5, 0)
    with pytest.raises(PairSplit, match="pid 5, source partition 0 was in destination partition 0"):
        decide_pair(name, [chunk_of(there), chunk_of(here)], PairMarks(), FilterRule(), now_ms=None)
    known = PairMarks(0, HighwaterMarks.from_columns([5], [0], [9], [1]))
    with pytest.raises(PairSplit):
        decide_pair(name, [chunk_of(here)], known, FilterRule(), now_ms=None)
    moved = chunk_of(here)._replace(epoch=Epoch(4, 0), first_offset=9)
    with pytest.raises(FrameUnusable, match="startpoint epochs 0, 4"):
        decide_pair(name, [chunk_of(here), moved], PairMarks(), FilterRule(), now_ms=None)


@pytest.mark.parametrize("column", ["topic", "partition", "offset"])
def test_a_row_that_does_not_say_where_it_lies_is_refused_by_name(logs, column):
    batch = batch_of([a_row(logs, 1)])
    holed = batch.set_column(batch.schema.get_field_index(column), column, pa.nulls(1, batch.schema.field(column).type))
    with pytest.raises(SparkJobError, match=f"column '{column}': a row has a null"):
        packed([holed])


def test_marks_expire_at_the_end_of_the_batch_by_last_advance(logs):
    """Contract: "by last advance, judged only at commit; a dropped record does not refresh it"."""
    name, rule = PairName("t", 5, 0), FilterRule(ttl_s=10)
    known = decide_pair(
        name, map(chunk_of, packed([batch_of([a_row(logs, 7)])])), PairMarks(), rule, now_ms=1_000
    ).after
    again = list(map(chunk_of, packed([batch_of([a_row(logs, 8, source=7)])])))
    replay = decide_pair(name, again, known, rule, now_ms=11_000)
    assert list(replay.kept) == []
    assert replay.after.marks.get(5, 0).advanced_ms == 1_000
    late = decide_pair(name, again, replay.after, rule, now_ms=11_001)
    assert (list(late.kept), len(late.after.marks)) == ([], 0), "this batch still goes by it"
    assert len(list(decide_pair(name, again, late.after, rule, now_ms=11_002).kept)) == 1
    assert list(decide_pair(name, again, replay.after, rule, now_ms=None).kept) == []


class State:
    """Spark's state of one pair, and its timers, in memory."""

    def __init__(self):
        self.value, self.timers = None, []

    def getValueState(self, *_):  # noqa: N802 - Spark's names
        return self

    def registerTimer(self, at_ms):  # noqa: N802
        self.timers.append(at_ms)

    def get(self):
        return self.value

    def update(self, value):
        self.value = value

    def clear(self):
        self.value = None


class At(int):
    """A batch's own time."""

    def getCurrentProcessingTimeInMs(self):  # noqa: N802 - Spark's name
        return int(self)


def test_a_pair_has_one_timer_which_looks_again_while_its_marks_rise_and_then_ends_its_state(logs):
    state, pair = State(), ("t", 5, 0)
    processor = keyed_state.PairProcessor(FilterRule(ttl_s=10))
    processor.init(state)

    def rows(offset, at_ms):
        frames = iter(frames_of([batch_of([a_row(logs, offset)])]))
        return sum(
            data is not None for frame in processor.handleInputRows(pair, frames, At(at_ms)) for data in frame["data"]
        )

    assert rows(7, 1_000) == 1
    assert state.timers == [11_001], "the first moment at which it has expired"
    assert rows(8, 5_000) == 1
    assert state.timers == [11_001], "one is enough"
    assert list(processor.handleExpiredTimer(pair, At(11_001), None)) == []
    assert state.value is not None
    assert state.timers == [11_001, 15_001]
    assert list(processor.handleExpiredTimer(pair, At(15_001), None)) == []
    assert (state.value, state.timers) == (None, [11_001, 15_001])
    assert rows(8, 15_002) == 1, "as if never seen"
    assert state.timers[2:] == [25_003]


def frames_of(batches):
    """The pandas frames that Spark passes to the operator, with a few chunks each."""
    frame = next(pack_rows(batches, "key", travels=True)).to_pandas()
    return [frame[low : low + 2] for low in range(0, len(frame), 2)]


def test_a_pair_s_output_is_handed_on_in_frames_and_tells_once_what_became_of_it(logs):
    """The output of a group is never one record batch: each frame becomes a separate one."""
    name = PairName("t", 5, 0)
    rows = [a_row(logs, n, value=f"{n}:" + "x" * 900_000) for n in range(7)]
    with mock.patch.object(keyed_state, "_FRAME_BYTES", 2 << 20):
        frames, after = decided_frames(
            name, frames_of([batch_of(rows)]), PairMarks(), FilterRule(), Reports(), now_ms=None
        )
        found = list(frames)
    assert [len(frame) for frame in found] == [3, 3, 1]
    assert [row["value"] for frame in found for row in rows_in(frame["data"].tolist())] == [r.id for r in rows]
    first, *others = [report for frame in found for report in frame["report"]]
    assert others == [None] * 6
    assert json.loads(first) == {"pairs": 1, "kept": 7, "dropped": 0, "late": 0, "jumped": 0, "unlikely": 0}
    frames, same = decided_frames(name, frames_of([batch_of(rows)]), after, FilterRule(), Reports(), now_ms=None)
    (nothing,) = frames
    assert nothing["data"].tolist() == [None]
    assert json.loads(json.loads(nothing["report"][0])["all_dropped"]) == list(name)
    assert same.marks == after.marks


def test_a_task_names_no_more_than_ten_pairs_of_a_kind():
    reports, counts = Reports(), FilterCounts(0, 3, 0, 0, 0, 1, 5)
    told = [json.loads(reports.of(("t", 5, n), counts, is_unlikely=False)) for n in range(25)]
    assert [n for n, report in enumerate(told) if "all_dropped" in report] == list(range(10))
    assert json.loads(told[9]["gap"]) == ["t", 5, 9, 5]
    assert "gap" not in told[10]
    assert sum(report["dropped"] for report in told) == 75


@pytest.mark.parametrize(("partition", "offset", "unlikely"), [(0, 7, 0), (1 << 20, 7, 1), (0, 1 << 53, 1)])
def test_a_pair_that_no_source_has_is_told_as_the_foreachbatch_form_tells_it(logs, partition, offset, unlikely):
    name, rows = PairName("t", 5, partition), [a_row(logs, 3, source=offset)]
    frames, _ = decided_frames(name, frames_of([batch_of(rows)]), PairMarks(), FilterRule(), Reports(), now_ms=None)
    assert json.loads(next(frames)["report"][0])["unlikely"] == unlikely


def test_a_pair_s_state_is_constant_in_records_and_below_1_kib(logs):
    """G17: the bytes that Spark keeps of a pair."""
    name, known, sizes = PairName("t", 5, 0), PairMarks(), []
    for first, count in ((0, 3), (3, 20_000)):
        rows = [a_row(logs, n) for n in range(first, first + count)]
        known = decide_pair(name, map(chunk_of, packed([batch_of(rows)])), known, FilterRule(), now_ms=None).after
        sizes.append(len(known.marks.to_bytes()))
    assert sizes[0] == sizes[1] < 1024
    assert known.marks.get(5, 0).offset == 20_002


def progress_of(**observed):
    """A progress as Spark's own class, from the JSON that Spark writes."""
    query_id = "00000000-0000-0000-0000-000000000007"
    told = {"id": query_id, "runId": query_id, "name": None, "timestamp": "2026-01-01T00:00:00Z", "batchId": 3}
    told |= {"batchDuration": 1, "stateOperators": [], "sources": [], "observedMetrics": observed}
    told |= {"sink": {"description": "noop", "numOutputRows": -1}, "inputRowsPerSecond": 0, "processedRowsPerSecond": 0}
    return QueryProgressEvent.fromJson({"progress": told})


def test_a_listener_hears_of_its_own_filter_and_names_pairs_that_were_dropped_whole(caplog):
    heard = []
    listener = CountsListener(lambda query_id, counts: heard.append((query_id, counts)))
    after = {"pairs": 2, "kept": 5, "dropped": 4, "late": 1, "jumped": 9, "unlikely": 2, "all_dropped": ['["t", 6, 1]']}
    after["gaps"] = ['["t", 5, 0, 9]']
    event = progress_of(**{"filter_replays.before": {"rows": 10, "unkeyed": 1}, "filter_replays.after": after})
    listener.onQueryProgress(event)
    listener.onQueryProgress(progress_of(**{"another.before": {"rows": 10}}))
    counts = BatchCounts(3, 10, 1, 2, kept=5, dropped=4, late=1, jumped=9, all_dropped=(("t", 6, 1),), unlikely_pairs=2)
    assert heard == [("00000000-0000-0000-0000-000000000007", counts)]
    assert "batch 3: every row of 1 (topic, pid, source partition) was dropped: [('t', 6, 1)]" in caplog.text
    assert "batch 3: 2 of 2 (pid, source partition) name a source partition from 1048576" in caplog.text
    assert operator_counts(event.progress) == counts
    assert operator_counts(event.progress, "another") is None
    assert operator_gaps(event.progress) == {("t", 5, 0): 9}


@pytest.fixture(autouse=True)
def quiet():
    """A pair whose every row is dropped is no news here."""
    log = logging.getLogger("filtering.replay_filter")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)
