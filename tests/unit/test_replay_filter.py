"""ReplayFilter by example: the rule, its counts, what it refuses and what it leaves alone."""

import logging

import numpy as np
import pytest

from filtering import (
    BadFilterSetting,
    FilterCounts,
    HighwaterMarks,
    MarkEntry,
    PairSplit,
    ReplayFilter,
    StreamMetadata,
    pack_keys,
)
from pushrep.log.directory_files import parse_shown_name


def key(offset, pid=1, partition=0):
    return StreamMetadata(pid, partition, offset).pack()


def keys(*offsets, pid=1, partition=0):
    return [key(offset, pid, partition) for offset in offsets]


def counts(**some):
    return FilterCounts(
        **{"kept": 0, "dropped": 0, "unkeyed": 0, "other_pids": 0, "late": 0, "pairs": 0, "jumped": 0} | some
    )


def test_each_offset_passes_once_and_equal_is_a_replay():
    replay_filter = ReplayFilter()
    answers = [replay_filter.admit(k) for k in keys(0, 1, 1, 0, 2, 5, 4, 5, 6)]
    assert answers == [True, True, False, False, True, True, False, False, True]
    assert replay_filter.counts == counts(kept=5, dropped=4, pairs=1, jumped=2)
    assert replay_filter.gaps == {(1, 0): 2}


def test_the_first_sight_of_a_pair_passes_and_is_no_gap():
    replay_filter = ReplayFilter()
    assert replay_filter.admit_batch(keys(1_000, 1_001)).all()
    assert replay_filter.gaps == {}


def test_pairs_do_not_touch_one_another():
    replay_filter = ReplayFilter()
    mixed = [key(5, 1, 0), key(3, 1, 1), key(3, 2, 0), key(4, 1, 0), key(4, 1, 1), key(4, 2, 0)]
    assert replay_filter.admit_batch(mixed).tolist() == [True, True, True, False, True, True]


@pytest.mark.parametrize("odd", [None, b"", b"business", key(1)[:19], key(1) + b"x", key(1)[:12] + b"\xff" * 8, "text"])
def test_a_key_that_is_no_metadata_passes_and_touches_nothing(odd):
    one, batch = ReplayFilter(), ReplayFilter()
    assert one.admit(odd)
    assert one.admit(key(1))
    assert one.admit(odd)
    assert batch.admit_batch([odd, key(1), odd]).all()
    assert one.counts == batch.counts == counts(kept=1, unkeyed=2, pairs=1)


def test_only_the_named_pids_are_filtered():
    one, batch = ReplayFilter(only_pids=[2]), ReplayFilter(only_pids=[2])
    rows = [key(1, 1), key(1, 1), key(1, 2), key(1, 2), None]
    assert [one.admit(row) for row in rows] == batch.admit_batch(rows).tolist() == [True, True, True, False, True]
    assert one.counts == batch.counts == counts(kept=1, dropped=1, unkeyed=1, other_pids=2, pairs=1)
    assert [pair for pair, _ in batch.marks().items()] == [(2, 0)]


@pytest.mark.parametrize("given", ["4711", b"4711", 4711, ["4711"], [1.5], [2**63], [-(2**63) - 1], [None]], ids=repr)
def test_what_names_no_pids_is_refused(given):
    with pytest.raises(BadFilterSetting, match=r"only_pids.*as in \[4711\]"):
        ReplayFilter(only_pids=given)


@pytest.mark.parametrize("pid", [-(2**63), 2**63 - 1, np.int64(7)])
def test_each_number_of_64_bits_names_a_pid(pid):
    one = ReplayFilter(only_pids=[pid])
    assert [one.admit(key(1, int(pid))) for _ in range(2)] == [True, False]


def test_the_window_lets_a_hole_be_filled_once():
    replay_filter = ReplayFilter(window=4)
    offsets = (10, 20, 18, 18, 16, 15, 20, 21, 17)
    expected = [True, True, True, False, True, False, False, True, True]
    assert [replay_filter.admit(k) for k in keys(*offsets)] == expected
    assert replay_filter.counts == counts(kept=6, dropped=3, late=1, pairs=1, jumped=9)
    assert replay_filter.marks().get(1, 0).bitmap == bytes([0b1111 - 0b0010])
    batch = ReplayFilter(window=4)
    assert batch.admit_batch(keys(*offsets)).tolist() == expected
    assert batch.counts == replay_filter.counts


def test_marks_given_are_gone_on_from_and_never_changed():
    given = HighwaterMarks.from_columns([1, 2], [0, 0], [10, 20])
    before = given.to_bytes()
    replay_filter = ReplayFilter(given)
    assert replay_filter.admit_batch(keys(9, 10, 11)).tolist() == [False, False, True]
    assert given.to_bytes() == before
    assert [(pair, entry.offset) for pair, entry in replay_filter.marks().items()] == [((1, 0), 11), ((2, 0), 20)]


def test_a_pair_in_two_destination_partitions_stops_and_changes_nothing():
    for admit in (
        lambda f: f.admit(key(7), 3),
        lambda f: f.admit_batch(keys(6, 7), [2, 3]),
        lambda f: f.admit_batch(keys(7), 3),
    ):
        replay_filter = ReplayFilter(window=8)
        replay_filter.admit_batch(keys(4, 5), 2)
        state = (replay_filter.marks().to_bytes(), replay_filter.counts, replay_filter.gaps)
        with pytest.raises(PairSplit, match="partition_count") as refusal:
            admit(replay_filter)
        assert (refusal.value.pid, refusal.value.partition) == (1, 0)
        assert (refusal.value.first, refusal.value.second) == (2, 3)
        assert state == (replay_filter.marks().to_bytes(), replay_filter.counts, replay_filter.gaps)


def test_a_split_between_worker_slots_names_them():
    numbers = [number for _, number in map(parse_shown_name, ("slot-0/orders-3", "slot-999/orders-4"))]
    assert "in destination partition slot-0/3 and now appears in slot-999/4:" in str(PairSplit(1, 3, *numbers))


def test_a_split_is_met_through_marks_too_and_the_first_row_is_named():
    given = HighwaterMarks.from_columns([1, 2], [0, 0], [10, 20], [5, 6])
    with pytest.raises(PairSplit) as refusal:
        ReplayFilter(given).admit(key(3), 4)
    assert (refusal.value.first, refusal.value.second) == (5, 4)
    replay_filter = ReplayFilter(given)
    with pytest.raises(PairSplit) as refusal:
        replay_filter.admit_batch([key(21, 2), key(11, 1), key(22, 2)], np.array([6, 4, 0]))
    assert (refusal.value.pid, refusal.value.first, refusal.value.second) == (1, 5, 4)
    assert replay_filter.counts == counts()


def test_rows_without_metadata_split_no_pair():
    assert ReplayFilter().admit_batch([key(1), None, key(2)], [0, 1, 0]).all()


def test_the_destination_partition_is_remembered_once_told():
    replay_filter = ReplayFilter()
    replay_filter.admit(key(1))
    assert replay_filter.marks().get(1, 0).destination_partition is None
    replay_filter.admit(key(1), 3)
    assert replay_filter.marks().get(1, 0).destination_partition == 3


@pytest.mark.parametrize(
    ("rows", "destination"), [([1], -1), ([1], "0"), ([1], [0, 1]), ([1, 2], [0, -1]), ([1], [0.5]), ([1], 2**31)]
)
def test_a_destination_partition_that_is_none_is_refused(rows, destination):
    replay_filter = ReplayFilter()
    with pytest.raises(BadFilterSetting, match="destination_partition"):
        replay_filter.admit_batch(keys(*rows), destination)
    assert replay_filter.counts == counts()


def test_a_known_pair_does_not_take_a_wrong_destination_by_its_fast_path():
    replay_filter = ReplayFilter()
    replay_filter.admit(key(1))
    with pytest.raises(BadFilterSetting, match="destination_partition=-1"):
        replay_filter.admit(key(2), -1)


def test_the_last_advance_is_when_the_mark_rose_and_a_dropped_row_does_not_refresh_it():
    replay_filter = ReplayFilter()
    replay_filter.admit_batch(keys(1, 2))
    assert replay_filter.marks().get(1, 0).advanced_ms is None
    assert replay_filter.marks(1_000).get(1, 0).advanced_ms == 1_000
    replay_filter.admit_batch(keys(1, 2))
    assert replay_filter.marks(2_000).get(1, 0).advanced_ms == 1_000
    replay_filter.admit(key(3))
    assert replay_filter.marks().get(1, 0) == MarkEntry(3, None, None, b"")
    assert replay_filter.marks(3_000).get(1, 0).advanced_ms == 3_000


@pytest.mark.parametrize("window", [0, 8])
def test_marks_expire_at_the_commit_only(window):
    given = HighwaterMarks.from_columns([1, 2], [0, 0], [10, 20], advanced_ms=1_000)
    replay_filter = ReplayFilter(given, ttl_s=5, window=window)
    assert replay_filter.admit_batch([key(11, 1), key(20, 2)]).tolist() == [True, False]
    assert len(replay_filter.marks()) == 2, "without a time nothing expires"
    committed = replay_filter.marks(6_001)
    assert [pair for pair, _ in committed.items()] == [(1, 0)]
    assert replay_filter.admit(key(20, 2)), "what was forgotten is new again, here as after a restart"
    assert ReplayFilter(committed, ttl_s=5, window=window).admit(key(20, 2))


def test_what_expired_does_not_come_back_from_the_marks_given():
    given = HighwaterMarks.from_columns([1], [0], [10])  # nobody told when it rose, so by itself it stays
    replay_filter = ReplayFilter(given, ttl_s=5)
    replay_filter.admit(key(11))
    assert replay_filter.marks(1_000).get(1, 0).advanced_ms == 1_000
    assert replay_filter.marks(7_000) == HighwaterMarks()
    assert replay_filter.admit(key(4))
    assert replay_filter.marks(8_000).get(1, 0) == MarkEntry(4, None, 8_000, b"")


def test_a_pair_whose_every_row_was_dropped_is_named_and_logged_once(caplog):
    replay_filter = ReplayFilter()
    with caplog.at_level(logging.WARNING, logger="filtering.replay_filter"):
        replay_filter.admit_batch(keys(5, 6) + keys(1, pid=2))
        assert replay_filter.all_dropped == ()
        assert not caplog.records
        replay_filter.admit_batch(keys(0, 1) + keys(2, pid=2))
        assert replay_filter.all_dropped == ((1, 0),)
        assert "[(1, 0)]" in caplog.text
        assert "re-used PID" in caplog.text
        replay_filter.admit_batch(keys(2, 3))
        assert replay_filter.all_dropped == ((1, 0),)
        assert len(caplog.records) == 1, "the same stretch goes on: it was said"
        replay_filter.admit_batch(keys(7))
        replay_filter.admit_batch(keys(7))
        assert len(caplog.records) == 2, "it had recovered: this is news"


def test_an_empty_batch_changes_nothing():
    replay_filter = ReplayFilter()
    assert replay_filter.admit_batch([]).tolist() == []
    assert replay_filter.counts == counts()


def test_a_batch_may_be_larger_than_any_cache_and_hold_many_pairs():
    rng = np.random.default_rng(7)
    pairs = np.repeat(np.arange(50_000), 4)
    rng.shuffle(pairs)
    rows = b"".join(pack_keys(int(pair) * 65_536, int(pair) % 3, 4, 1) for pair in pairs)
    replay_filter = ReplayFilter()
    passes = replay_filter.admit_batch(rows)
    first = np.zeros(len(pairs), bool)
    first[np.unique(pairs, return_index=True)[1]] = True
    assert (passes == first).all()
    assert replay_filter.counts == counts(kept=50_000, dropped=150_000, pairs=50_000)
    assert len(replay_filter.marks()) == 50_000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": -1}, "window"),
        ({"window": 1 << 21}, "window"),
        ({"window": True}, "window"),
        ({"window": 1.5}, "window"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": "1"}, "ttl_s"),
    ],
)
def test_settings_are_checked_at_birth(settings, named):
    with pytest.raises(BadFilterSetting) as refusal:
        ReplayFilter(**settings)
    assert refusal.value.setting == named
