"""Which segments may go: every row of the table, and what stops at the first that stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.log.retention import deletable
from pushrep.log.segment import SealedSegment

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000
# Three sealed segments of 100 bytes each, 9, 5 and 1 days old; the active one begins at 3000 and has 50 bytes.
SEALED = [SealedSegment(0, 1000, 100), SealedSegment(1000, 2000, 100), SealedSegment(2000, 3000, 100)]
NEWEST_MS = {0: NOW_MS - 9 * DAY_MS, 1000: NOW_MS - 5 * DAY_MS, 2000: NOW_MS - 1 * DAY_MS}


def gone(newest_ms=NEWEST_MS, floor=3500, **limits):
    found = deletable(SEALED, floor, lambda segment: newest_ms[segment.base_offset], **limits)
    return [segment.base_offset for segment in found]


def before(age_ms):
    return {"before_ms": NOW_MS - age_ms}


def beyond(kept_bytes):
    return {"excess_bytes": 350 - kept_bytes}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"before_offset": 999}, []),
        ({"before_offset": 1000}, [0]),
        ({"before_offset": 2999}, [0, 1000]),
        (before(10 * DAY_MS), []),
        (before(9 * DAY_MS), []),
        (before(9 * DAY_MS - 1), [0]),
        (before(2 * DAY_MS), [0, 1000]),
        (before(0), [0, 1000, 2000]),
        (beyond(350), []),
        (beyond(251), []),
        (beyond(250), [0]),
        (beyond(0), [0, 1000, 2000]),
        (beyond(250) | before(2 * DAY_MS), [0, 1000]),
        (beyond(0) | {"floor": 2999}, [0, 1000]),
        (beyond(0) | {"floor": 1000}, [0]),
        (beyond(0) | {"floor": 999}, []),
        ({"before_offset": 1000, "floor": 0}, []),
    ],
)
def test_every_row(changed, expected):
    assert gone(**changed) == expected


@pytest.mark.parametrize("strange", [-1, NOW_MS + 9 * DAY_MS])
def test_a_segment_without_times_or_from_the_future_stays_and_keeps_what_is_behind_it(strange):
    assert gone(NEWEST_MS | {1000: strange}, **before(0)) == [0]


def test_times_are_asked_of_no_more_segments_than_needed():
    asked = []
    for limits in (before(2 * DAY_MS), beyond(0) | {"before_offset": 1000}):
        list(deletable(SEALED, 3500, lambda s: asked.append(s.base_offset) or NEWEST_MS[s.base_offset], **limits))
    assert asked == [0, 1000, 2000], "only by time, and only up to the first that stays"


@given(
    ends=st.lists(st.integers(1, 50), max_size=8),
    start=st.integers(0, 300),
    floor=st.integers(0, 300),
    retention_bytes=st.none() | st.integers(0, 500),
    retention_ms=st.none() | st.integers(0, 100),
)
def test_never_above_the_floor_and_always_the_oldest(ends, start, floor, retention_bytes, retention_ms):
    sealed, base = [], 0
    for size in ends:
        sealed.append(SealedSegment(base, base + size, size))
        base += size
    limits = {"before_offset": start}
    if retention_ms is not None:
        limits["before_ms"] = 100 - retention_ms
    if retention_bytes is not None:
        limits["excess_bytes"] = base + 7 - retention_bytes
    found = list(deletable(sealed, floor, lambda segment: segment.base_offset % 101, **limits))
    assert found == sealed[: len(found)], "a prefix: what is left has no hole"
    assert all(segment.end_offset <= floor for segment in found)
    kept_bytes = base + 7 - sum(segment.size_bytes for segment in found)
    if retention_ms is None and retention_bytes is not None:
        assert not found or kept_bytes >= retention_bytes or found[-1].end_offset <= start
    if retention_ms is None and retention_bytes is None:
        assert not found or found[-1].end_offset <= start
