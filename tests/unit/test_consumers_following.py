"""Startpoints on a consumer's partitions, without a client: rules 1, 3, 4 and 9 for consumer groups."""

import pytest

from filtering import HighwaterMarks, StreamMetadata
from filtering.consumers.assignment import Assignment, FilterSettings
from filtering.consumers.startpoints import RefusedStartpoint, StartpointWatcher, StartTarget

A, B = ("orders", 0), ("orders", 1)


def key(offset, partition=0):
    return StreamMetadata(7, partition, offset).pack()


@pytest.fixture
def reading():
    return Assignment(FilterSettings())


@pytest.fixture
def following(reading):
    return StartpointWatcher(reading, look_every_s=2.0)


def read(reading, *offsets, partition=A):
    """Which of these pass; each record's source offset is its offset."""
    return [offset for offset in offsets if reading.admit(partition, offset, key(offset, partition[1]))]


def test_rule_1_a_startpoint_comes_before_the_committed_position(following, reading):
    assert following.begin(A, 30, HighwaterMarks(), 0, StartTarget(12, 5, reset_marks=False)) == 12
    assert following.begin(B, 30, HighwaterMarks(), 4, None) == 30
    assert following.begin(B, None, HighwaterMarks(), 0, None) is None
    assert (reading.startpoint(A), reading.startpoint(B)) == (5, 0)


def test_rule_3_a_start_or_a_move_alone_commits_nothing(following, reading):
    following.begin(A, 30, HighwaterMarks(), 0, StartTarget(12, 5, reset_marks=True))
    assert reading.due(0) == []
    read(reading, 12)
    [due] = reading.due(0)
    assert (due.offset, due.startpoint, due.has_new_startpoint) == (13, 5, True)
    reading.committed([due])
    assert reading.due(0) == []
    following.move(A, StartTarget(3, 6, reset_marks=True))
    assert reading.due(0) == []
    read(reading, 3)
    [due] = reading.due(0)
    assert (due.offset, due.startpoint, due.has_new_startpoint) == (4, 6, True)


def test_rule_3_a_seek_of_ones_own_goes_on_under_the_startpoint(following, reading):
    following.begin(A, 30, HighwaterMarks(), 0, StartTarget(12, 5, reset_marks=True))
    reading.seek(A, 20)
    assert reading.due(0) == []
    read(reading, 20)
    [due] = reading.due(0)
    assert (due.startpoint, due.has_new_startpoint) == (5, True)


def test_rule_4_what_fails_stops_its_partition_only_and_is_told_once(following, reading):
    failed = RefusedStartpoint(5, ValueError("beyond the end"))
    assert following.begin(A, 30, HighwaterMarks(), 0, failed) == 30
    following.begin(B, 10, HighwaterMarks(), 0, None)
    assert (A in reading, B in reading) == (False, True)
    assert following.stopped == {A: failed.error}
    with pytest.raises(ValueError, match="beyond the end"):
        following.raise_pending_error()
    following.begin(A, 30, HighwaterMarks(), 0, failed)
    following.raise_pending_error()
    read(reading, 10, partition=B)
    following.move(B, failed)
    assert reading.due(0) == []
    assert set(following.stopped) == {A, B}
    with pytest.raises(ValueError, match="beyond the end"):
        following.raise_pending_error()
    following.begin(A, 30, HighwaterMarks(), 0, StartTarget(8, 6, reset_marks=False))
    assert set(following.stopped) == {B}
    following.forget([A, B])
    assert following.stopped == {}


def test_rule_4_a_run_that_was_stopped_before_its_first_commit_begins_where_it_began(following, reading):
    """It does not begin where the reset policy leads by now: with `latest` that would be after the records that
    arrived.
    """
    following.begin(A, None, HighwaterMarks(), 0, None)
    assert read(reading, 100, 101) == [100, 101]
    failed = RefusedStartpoint(5, ValueError("beyond the end"))
    following.move(A, failed)
    assert following.begin(A, None, HighwaterMarks(), 0, RefusedStartpoint(6, failed.error)) == 100, (
        "another one that fails"
    )
    assert following.begin(A, None, HighwaterMarks(), 0, None) == 100
    assert read(reading, 100, 101) == [100, 101], "nothing of it was committed"
    following.move(A, failed)
    following.forget([A])
    assert following.begin(A, None, HighwaterMarks(), 0, None) is None, "it went, and came again"


@pytest.mark.parametrize("reset_marks", [True, False])
def test_rule_9_a_move_takes_the_marks_along_or_begins_anew(following, reading, reset_marks):
    for partition in (A, B):
        following.begin(partition, 0, HighwaterMarks(), 0, None)
        assert read(reading, *range(10), partition=partition) == list(range(10))
    following.move(A, StartTarget(4, 6, reset_marks=reset_marks))
    assert read(reading, *range(4, 12)) == list(range(4 if reset_marks else 10, 12))
    assert read(reading, 8, 9, 10, partition=B) == [10], "its own marks are as they were"


def test_a_follower_asks_now_and_then_and_looks_when_something_changed(following):
    assert following.is_time(0.0)
    assert following.is_new(0)
    following.looked(0, 0.0)
    assert not following.is_time(1.9)
    assert following.is_time(2.0)
    assert not following.is_new(0)
    assert following.is_new(1)
    assert (following.wait_s(-1), following.wait_s(0.5), following.wait_s(60)) == (2.0, 0.5, 2.0)


def test_who_follows_nothing_never_asks(reading):
    following = StartpointWatcher(reading, look_every_s=None)
    assert not following.is_time(1e9)
    assert (following.wait_s(-1), following.wait_s(60)) == (-1, 60)
