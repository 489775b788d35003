"""What a batch reads, without Spark: starts, limits, progress, losses, and cuts by bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.sources.logs import BatchSpan, cut_range
from spark_jobs.sources.options import AtOffsets, AtTimestamp, BadOption, Edge
from spark_jobs.sources.planning import (
    DataLoss,
    Extent,
    StreamOffset,
    StreamOffsetUnusable,
    StreamPosition,
    check_present,
    end_of_batch,
    first_step,
    initial_words,
    next_step,
    ranges_between,
    resolve,
    share,
)

EXTENTS = {0: Extent(5, 20, "a"), 1: Extent(0, 0, "b")}


def no_time(partition: int, ms: int) -> int | None:
    raise AssertionError("no timestamp was asked for")


def written_end_is(extents):
    return lambda partition: extents[partition].end


def advance(before, extents, *, fail_on_data_loss=True):
    step = next_step(before, extents, written_end=written_end_is(extents), fail_on_data_loss=fail_on_data_loss)
    ends = {partition: end for partition, (_, end) in step.ranges.items()}
    return end_of_batch(before, before.topic, step, ends, extents)


# Where a read starts.


@pytest.mark.parametrize(
    ("place", "starts"),
    [
        (Edge.EARLIEST, {0: 5, 1: 0}),
        (Edge.LATEST, {0: 20, 1: 0}),
        (AtOffsets({0: 7, 1: 0}), {0: 7, 1: 0}),
        (AtOffsets({0: -2, 1: -1}), {0: 5, 1: 0}),
        (AtOffsets({0: 20, 1: -2}), {0: 20, 1: 0}),
    ],
)
def test_places_resolve(place, starts):
    assert resolve("startingOffsets", place, EXTENTS, no_time) == starts


@pytest.mark.parametrize(("found", "start"), [(None, 20), (9, 9), (3, 5), (25, 20)])
def test_a_timestamp_resolves_inside_what_is_readable(found, start):
    assert resolve("startingTimestamp", AtTimestamp(1), {0: EXTENTS[0]}, lambda partition, ms: found) == {0: start}


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        ({0: 4, 1: 0}, ["offset 4", "partition 0", "below the log start", "[5, 20)"]),
        ({0: 21, 1: 0}, ["offset 21", "partition 0", "beyond the end", "[5, 20)"]),
        ({0: 7}, ["missing: 1"]),
        ({0: 7, 1: 0, 2: 0, 9: 1}, ["2, 9"]),
    ],
)
def test_offsets_outside_the_log_are_refused_by_name(offsets, named):
    with pytest.raises(BadOption) as refusal:
        resolve("startingOffsets", AtOffsets(offsets), EXTENTS, no_time)
    assert refusal.value.option == "startingOffsets"
    for words in named:
        assert words in str(refusal.value)


# How a limit is shared.


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 10**12), max_size=20), st.integers(1, 10**9))
def test_shares_keep_the_limit_and_waste_none_of_it(available, limit):
    shares = share(available, limit)
    assert shares.keys() == available.keys()
    assert all(0 <= shares[partition] <= available[partition] for partition in available)
    total = sum(shares.values())
    assert total <= limit
    assert total >= min(limit, sum(available.values())) - len(available), "rounding costs one each at most"
    waiting = [partition for partition, count in available.items() if count]
    if limit >= len(waiting):
        assert all(shares[partition] for partition in waiting), "no partition starves beside a large one"


# How a stream goes on.


def test_the_first_batch_carries_its_own_start():
    step = first_step({0: 7, 1: 0}, EXTENTS)
    after = end_of_batch(None, "orders", step, {0: 10, 1: 0}, EXTENTS)
    assert after is not None
    assert after.starts == {0: 7, 1: 0}
    assert ranges_between(None, after) == {0: (7, 10)}
    later = {0: Extent(5, 99, "a"), 1: Extent(0, 3, "b")}
    assert ranges_between(None, after) == {0: (7, 10)}, f"whatever the logs hold by then: {later}"


def test_an_empty_first_batch_still_fixes_the_start():
    extents = {0: Extent(0, 20, "a")}
    after = end_of_batch(None, "orders", first_step({0: 20}, extents), {0: 20}, extents)
    assert after == StreamOffset("orders", {0: StreamPosition(20, "a")}, {0: 20})


def test_a_batch_goes_on_where_the_one_before_it_ended():
    before = StreamOffset("orders", {0: StreamPosition(10, "a", epoch=3), 1: StreamPosition(0, "b")}, {0: 7, 1: 0})
    after = advance(before, EXTENTS)
    assert after == StreamOffset("orders", {0: StreamPosition(20, "a", epoch=3), 1: StreamPosition(0, "b")}, {})
    assert ranges_between(before, after) == {0: (10, 20)}
    assert advance(after, EXTENTS) is None, "nothing new moves nothing"


def test_a_new_partition_joins_with_its_first_record_and_begins_at_0():
    before = StreamOffset("orders", {0: StreamPosition(20, "a")}, {})
    assert advance(before, EXTENTS) is None, "partition 1 is empty"
    after = advance(before, EXTENTS | {1: Extent(0, 4, "b")})
    assert after is not None
    assert after.starts == {1: 0}
    assert ranges_between(before, after) == {1: (0, 4)}


@pytest.mark.parametrize(
    ("position", "extent", "gone", "goes_on_at"),
    [
        (StreamPosition(3, "a"), Extent(5, 20, "a"), (3, 5), 5),
        (StreamPosition(30, "a"), Extent(5, 20, "a"), (20, 30), 20),
        (StreamPosition(8, "old"), Extent(5, 20, "a"), (8, 8), 5),
        (None, Extent(5, 20, "a"), (0, 5), 5),
    ],
    ids=["below the log start", "beyond the end", "made anew", "new, but its beginning is gone"],
)
def test_a_loss_names_the_range_or_is_stepped_over(position, extent, gone, goes_on_at, caplog):
    before = StreamOffset("orders", {} if position is None else {0: position}, {})
    with pytest.raises(DataLoss) as loss:
        advance(before, {0: extent})
    assert (loss.value.topic, loss.value.partition, loss.value.start, loss.value.end) == ("orders", 0, *gone)
    assert "orders-0" in str(loss.value)
    assert f"[{gone[0]}, {gone[1]})" in str(loss.value)
    assert "failOnDataLoss" in str(loss.value)
    after = advance(before, {0: extent}, fail_on_data_loss=False)
    assert after is not None
    assert after.starts == {0: goes_on_at}, "a batch that is run again begins at the same place"
    assert "orders-0" in caplog.text


def test_what_is_written_but_not_stable_yet_is_waited_for():
    before = StreamOffset("orders", {0: StreamPosition(30, "a")}, {})
    step = next_step(before, {0: Extent(0, 20, "a")}, written_end=lambda partition: 30, fail_on_data_loss=True)
    assert end_of_batch(before, "orders", step, {0: step.ranges[0][1]}, {0: Extent(0, 20, "a")}) is None


def test_a_partition_that_vanished_is_a_loss(caplog):
    before = StreamOffset("orders", {0: StreamPosition(3, "a"), 1: StreamPosition(4, "b")}, {})
    check_present(before, {0, 1, 2}, fail_on_data_loss=True)
    with pytest.raises(DataLoss, match="orders-1"):
        check_present(before, {0}, fail_on_data_loss=True)
    check_present(before, {0}, fail_on_data_loss=False)
    assert "orders-1" in caplog.text


# What Spark logs.

OFFSETS = st.integers(0, 2**63 - 1)
POSITIONS = st.builds(StreamPosition, OFFSETS, st.uuids().map(str), st.integers(0, 9))


@given(st.dictionaries(st.integers(0, 999), POSITIONS), st.dictionaries(st.integers(0, 999), OFFSETS))
def test_an_offset_survives_json(positions, starts):
    offset = StreamOffset("orders", positions, starts)
    logged = json.loads(json.dumps(offset.to_json()))
    assert StreamOffset.from_json(logged, "orders") == offset
    assert json.dumps(logged) == json.dumps(offset.to_json()), "equal offsets are equal texts to Spark"


def test_the_logged_form_is_fixed():
    logged = StreamOffset("orders", {10: StreamPosition(5, "id-b"), 2: StreamPosition(23, "id-a")}, {10: 0}).to_json()
    assert json.dumps(logged) == (
        '{"version": 1, "topic": "orders", "partitions": {"2": {"epoch": 0, "offset": 23, "log": "id-a"}, '
        '"10": {"epoch": 0, "offset": 5, "log": "id-b"}}, "start": {"10": 0}}'
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, {"startingOffsets": "earliest"}),
        ({"startingOffsets": "latest"}, {"startingOffsets": "latest"}),
        ({"startingTimestamp": "2013-01-01T00:00:00Z"}, {"startingTimestamp": "2013-01-01T00:00:00Z"}),
    ],
)
def test_before_the_first_batch_there_are_only_words(given, words):
    logged = initial_words("orders", given)
    assert logged == {"version": 1, "topic": "orders"} | words
    assert StreamOffset.from_json(logged, "orders") is None


@pytest.mark.parametrize(
    ("logged", "named"),
    [
        ({"version": 2, "topic": "orders"}, "version=2"),
        ({"version": 1, "topic": "other"}, "topic='other'"),
        ({}, "version=None"),
    ],
)
def test_a_foreign_checkpoint_is_refused(logged, named):
    with pytest.raises(StreamOffsetUnusable, match=named):
        StreamOffset.from_json(logged, "orders")


# Cuts by bytes.


def batches_of(sizes: list[tuple[int, int]]):
    """A probe over batches given as (records, bytes); counts how often it was asked."""
    spans, base = [], 0
    for records, size in sizes:
        spans.append(BatchSpan(base, base + records, size))
        base += records
    asked: list[int] = []

    def probe(offset: int) -> BatchSpan:
        asked.append(offset)
        return next(span for span in spans if span.base <= offset < span.end)

    return probe, spans, asked


BATCHES = st.lists(st.tuples(st.integers(1, 50), st.integers(62, 5000)), min_size=1, max_size=40)


@given(BATCHES, st.integers(1, 100_000), st.data())
def test_cuts_cover_the_range_once_at_batch_boundaries(sizes, piece_bytes, data):
    probe, spans, _ = batches_of(sizes)
    last = spans[-1].end
    start = data.draw(st.integers(0, last - 1))
    end = data.draw(st.integers(start + 1, last))
    pieces = cut_range(start, end, probe, piece_bytes)
    assert pieces[0][0] == start
    assert pieces[-1][1] == end
    assert all(low < high for low, high in pieces)
    assert [high for _, high in pieces[:-1]] == [low for low, _ in pieces[1:]], "contiguous"
    assert {low for low, _ in pieces[1:]} <= {span.base for span in spans}, "no batch is read by two tasks"


def test_equal_batches_are_cut_into_equal_pieces():
    probe, _, asked = batches_of([(100, 10_000)] * 64)
    assert cut_range(0, 6400, probe, 80_000) == [(start, start + 800) for start in range(0, 6400, 800)]
    assert len(asked) < 20, "a large log is measured by a few looks"


def test_a_small_range_is_looked_at_once():
    probe, _, asked = batches_of([(100, 10_000)] * 64)
    assert cut_range(50, 350, probe, 1 << 20) == [(50, 350)]
    assert len(asked) == 1
