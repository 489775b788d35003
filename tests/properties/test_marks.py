"""The laws of merging, and bytes that say exactly what the marks say."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from filtering import CorruptMarks, HighwaterMarks, PairSplit, ReplayFilter, StreamMetadata

ROWS = st.lists(st.tuples(st.sampled_from([1, -5]), st.integers(0, 2), st.integers(0, 60)), max_size=12)
TIMES = st.one_of(st.none(), st.integers(0, 5))


def destination_of(pid, partition):
    return (pid + partition) % 3


@st.composite
def marks(draw):
    """Marks as filters make them, with and without a window, a time and destination partitions."""
    replay_filter = ReplayFilter(window=draw(st.sampled_from([0, 3, 8, 20])))
    told = draw(st.booleans())
    for pid, partition, offset in draw(ROWS):
        key = StreamMetadata(pid, partition, offset).pack()
        replay_filter.admit(key, destination_of(pid, partition) if told else None)
    return replay_filter.marks(draw(TIMES))


@given(marks(), marks())
def test_merge_is_commutative(first, second):
    assert first.merge(second) == second.merge(first)
    assert first.merge(second).to_bytes() == second.merge(first).to_bytes()


@given(marks(), marks(), marks())
def test_merge_is_associative(first, second, third):
    assert first.merge(second).merge(third) == first.merge(second.merge(third))


@given(marks(), marks())
def test_merge_is_idempotent(first, second):
    copy = HighwaterMarks.from_bytes(first.to_bytes())
    assert first.merge(copy) == first
    assert first.merge(second).merge(second) == first.merge(second)
    assert first.merge(HighwaterMarks()) == HighwaterMarks().merge(first) == first


@given(st.permutations(list(range(4))), st.lists(marks(), min_size=4, max_size=4))
def test_columns_of_many_marks_are_merged_in_any_order(order, parts):
    merged = HighwaterMarks()
    for part in parts:
        merged = merged.merge(part)
    again = HighwaterMarks()
    for k in order:
        again = again.merge(parts[k])
    assert again == merged


@settings(max_examples=settings().max_examples // 2)  # each asks for 372 offsets by three filters
@given(marks(), marks())
def test_whoever_has_the_merge_drops_what_either_would_drop(first, second):
    merged = first.merge(second)
    for pid in (1, -5):
        for partition in range(3):
            keys = [StreamMetadata(pid, partition, offset).pack() for offset in range(62)]

            def passes(start, keys=keys):
                return [ReplayFilter(start, window=merged.window).admit(key) for key in keys]

            both = [a and b for a, b in zip(passes(first), passes(second), strict=True)]
            mark = max((m.get(pid, partition).offset for m in (first, second) if m.get(pid, partition)), default=-1)
            expected = [b and (offset > mark or offset >= mark - merged.window) for offset, b in enumerate(both)]
            assert passes(merged) == expected


@given(marks())
def test_bytes_are_canonical_and_come_back(value):
    data = value.to_bytes()
    assert HighwaterMarks.from_bytes(data) == value
    assert HighwaterMarks.from_bytes(bytearray(data)).to_bytes() == data
    columns = value.to_columns()
    shuffled = HighwaterMarks.from_columns(
        columns.pids[::-1],
        columns.partitions[::-1],
        columns.offsets[::-1],
        columns.destination_partitions[::-1],
        advanced_ms=columns.advanced_ms[::-1],
        bitmaps=columns.bitmaps[::-1],
        window=columns.window,
    )
    assert shuffled.to_bytes() == data


@given(marks(), st.data())
def test_damaged_bytes_are_refused_and_never_read_as_other_marks(value, data):
    damaged = bytearray(value.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptMarks):
        HighwaterMarks.from_bytes(bytes(damaged))
    with pytest.raises(CorruptMarks):
        HighwaterMarks.from_bytes(value.to_bytes()[: data.draw(st.integers(0, len(damaged) - 1))])


@given(st.binary(max_size=200))
def test_any_bytes_are_marks_or_refused(data):
    with contextlib.suppress(CorruptMarks):
        assert HighwaterMarks.from_bytes(data).to_bytes() == data


@given(marks(), st.integers(0, 40), st.integers(0, 40))
def test_narrowing_then_widening_never_lets_a_seen_offset_through(value, narrow, wide):
    there_and_back = value.with_window(narrow).with_window(wide)
    for (pid, partition), entry in value.items():
        for offset in range(entry.offset + 1):
            key = StreamMetadata(pid, partition, offset).pack()
            if ReplayFilter(there_and_back, window=wide).admit(key):
                assert ReplayFilter(value, window=max(value.window, wide)).admit(key)


@given(marks(), marks())
def test_one_pair_in_two_destinations_does_not_merge(first, second):
    moved = second.to_columns()._replace(destination_partitions=second.to_columns().destination_partitions + 1)
    other = HighwaterMarks.from_columns(**moved._asdict())
    split = any(
        entry.destination_partition is not None
        and other.get(*pair) is not None
        and other.get(*pair).destination_partition not in (None, entry.destination_partition)
        for pair, entry in first.items()
    )
    if split:
        with pytest.raises(PairSplit):
            first.merge(other)
    else:
        first.merge(other)
