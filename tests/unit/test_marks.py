"""HighwaterMarks: the value, its merge and what its bytes refuse."""

import pickle
import struct
import zlib

import numpy as np
import pytest

from filtering import (
    BadFilterSetting,
    CorruptMarks,
    HighwaterMarks,
    MarkEntry,
    PairSplit,
    ReplayFilter,
    StreamMetadata,
)


def marks_of(*rows, **settings):
    """Rows of (pid, partition, offset, destination, advanced_ms)."""
    pids, partitions, offsets, destinations, advanced = zip(*rows, strict=True)
    return HighwaterMarks.from_columns(pids, partitions, offsets, destinations, advanced_ms=advanced, **settings)


def seen(*offsets, window, pid=1, partition=0):
    replay_filter = ReplayFilter(window=window)
    for offset in offsets:
        replay_filter.admit(StreamMetadata(pid, partition, offset).pack())
    return replay_filter.marks()


def test_no_marks():
    empty = HighwaterMarks()
    assert len(empty) == 0
    assert empty.get(1, 0) is None
    assert list(empty.items()) == []
    assert empty.find(np.array([1]), np.array([0])).tolist() == [-1]
    assert HighwaterMarks.from_bytes(empty.to_bytes()) == empty
    assert ReplayFilter(window=64).marks() == empty, "no pairs are one value, whatever the window"


def test_entries_come_sorted_and_unknown_parts_are_none():
    marks = marks_of((5, 1, 10, 3, 1000), (-5, 2, 7, -1, -1), (5, 0, 9, 3, -1))
    assert list(marks.items()) == [
        ((-5, 2), MarkEntry(7, None, None, b"")),
        ((5, 0), MarkEntry(9, 3, None, b"")),
        ((5, 1), MarkEntry(10, 3, 1000, b"")),
    ]
    assert marks.get(5, 1) == MarkEntry(10, 3, 1000, b"")
    assert [marks.get(*pair) for pair in ((5, 2), (4, 0), (6, 0), (-6, 2))] == [None] * 4


def test_many_pairs_are_found_at_once():
    rows = [(pid, partition, 1, 0, 0) for pid in (-9, 0, 2**63 - 1) for partition in (0, 5, 2**31 - 1)]
    marks = marks_of(*rows)
    pids = np.array([-9, -9, 0, 1, 2**63 - 1, -(2**63)])
    partitions = np.array([0, 1, 5, 5, 2**31 - 1, 0])
    assert marks.find(pids, partitions).tolist() == [0, -1, 4, -1, 8, -1]


def test_marks_cannot_be_changed():
    marks = marks_of((1, 0, 5, 0, 0))
    with pytest.raises(ValueError, match="read-only"):
        marks.to_columns().offsets[0] = 7
    pids = np.array([1])
    made = HighwaterMarks.from_columns(pids, [0], [5])
    pids[0] = 9
    assert made.get(1, 0) is not None, "a caller's own array must not be shared"


def test_equal_marks_are_equal_values_and_travel_by_pickle():
    first, second = marks_of((1, 0, 5, 0, 0), (2, 0, 6, 0, 0)), marks_of((2, 0, 6, 0, 0), (1, 0, 5, 0, 0))
    assert first == second
    assert hash(first) == hash(second)
    assert first != marks_of((1, 0, 5, 0, 0))
    assert first != "marks"
    assert pickle.loads(pickle.dumps(first)) == first
    assert repr(first) == "<HighwaterMarks of 2 pairs, window 0>"


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (([1], [0], [-1]), "offsets"),
        (([1], [-1], [0]), "partitions"),
        (([1], [2**31], [0]), "partitions"),
        (([1], [0], [0], [-2]), "destination_partitions"),
        (([1, 2], [0], [0, 0]), "partitions"),
        (([1.5], [0], [0]), "pids"),
        (([[1]], [[0]], [[0]]), "pids"),
    ],
)
def test_a_column_out_of_range_is_named(columns, named):
    with pytest.raises(BadFilterSetting) as refusal:
        HighwaterMarks.from_columns(*columns)
    assert refusal.value.setting == named


def test_settings_of_columns_are_checked():
    with pytest.raises(BadFilterSetting, match="advanced_ms"):
        HighwaterMarks.from_columns([1], [0], [5], advanced_ms=-2)
    with pytest.raises(BadFilterSetting, match="bitmaps"):
        HighwaterMarks.from_columns([1], [0], [5], window=9, bitmaps=np.zeros((1, 1), np.uint8))
    with pytest.raises(BadFilterSetting, match="window"):
        HighwaterMarks.from_columns([1], [0], [5], window=-1)


def test_a_pair_that_comes_twice_is_merged():
    marks = marks_of((1, 0, 5, -1, 100), (1, 0, 9, 3, 50), (1, 0, 7, 3, 900))
    assert list(marks.items()) == [((1, 0), MarkEntry(9, 3, 50, b""))]


def test_merge_takes_the_larger_offset_and_its_time():
    merged = marks_of((1, 0, 5, 0, 900), (2, 0, 5, 0, 900)).merge(marks_of((1, 0, 6, 0, 1_000), (3, 0, 1, 4, -1)))
    assert [(pair, entry.offset, entry.advanced_ms) for pair, entry in merged.items()] == [
        ((1, 0), 6, 1_000),
        ((2, 0), 5, 900),
        ((3, 0), 1, None),
    ]


@pytest.mark.parametrize(("first", "second", "kept"), [(100, 900, 100), (-1, 900, 900), (100, -1, 100), (-1, -1, None)])
def test_at_equal_offsets_the_earlier_known_advance_stays(first, second, kept):
    """A batch of replays ends at the old mark: its time must not make the pair younger."""
    merged = marks_of((1, 0, 5, 0, first)).merge(marks_of((1, 0, 5, 0, second)))
    assert merged.get(1, 0).advanced_ms == kept


def test_merge_refuses_a_pair_in_two_destination_partitions():
    with pytest.raises(PairSplit) as refusal:
        marks_of((1, 4, 5, 2, 0)).merge(marks_of((1, 4, 9, 3, 0)))
    split = pickle.loads(pickle.dumps(refusal.value))
    assert (split.pid, split.partition, {split.first, split.second}) == (1, 4, {2, 3})
    known = marks_of((1, 4, 5, 2, 0)).merge(marks_of((1, 4, 9, -1, 0)))
    assert known.get(1, 4).destination_partition == 2


def test_bits_are_shifted_to_the_larger_mark():
    merged = seen(2, 5, window=8).merge(seen(7, window=8))
    assert merged.get(1, 0) == MarkEntry(7, None, None, bytes([0b10010]))
    assert merged == seen(2, 5, 7, window=8)


def test_a_wider_window_takes_what_was_below_the_old_one_as_seen():
    widened = seen(2, 10, window=4).with_window(12)
    assert widened.get(1, 0).bitmap == (0b11_1111_0000).to_bytes(2, "little"), "offsets 0 to 5 are closed, none below 0"
    assert widened.with_window(4) == seen(2, 10, window=4)
    assert seen(9, 10, window=4).with_window(0) == seen(10, window=0)


def test_expiry_is_by_last_advance():
    marks = marks_of((1, 0, 5, 0, 1_000), (2, 0, 5, 0, 2_000), (3, 0, 5, 0, -1))
    assert [pair for pair, _ in marks.without_expired(now_ms=3_500, ttl_s=2).items()] == [(2, 0), (3, 0)]
    assert marks.without_expired(now_ms=3_000, ttl_s=2) is marks, "exactly ttl_s old is still alive"


def test_a_million_pairs_from_columns_to_bytes_and_back():
    pids, partitions = np.divmod(np.arange(1_000_000), 1_000)
    marks = HighwaterMarks.from_columns(pids[::-1], partitions[::-1], np.arange(1_000_000)[::-1], 0, advanced_ms=5)
    data = marks.to_bytes()
    assert len(data) == 24 + 32 * 1_000_000
    assert HighwaterMarks.from_bytes(data) == marks
    assert marks.get(999, 999) == MarkEntry(999_999, 0, 5, b"")
    assert marks.merge(marks_of((999, 999, 2_000_000, 0, 9))).get(999, 999).offset == 2_000_000


SAMPLE = ReplayFilter(window=11)
for sample_offset in (3, 5, 4, 9, 30, 25):
    SAMPLE.admit(StreamMetadata(-3, 2, sample_offset).pack(), 6)
    SAMPLE.admit(StreamMetadata(4, 0, sample_offset * 2).pack())
SAMPLE_BYTES = SAMPLE.marks(1_700_000_000_000).to_bytes()


def test_every_flipped_bit_is_refused():
    for bit in range(len(SAMPLE_BYTES) * 8):
        damaged = bytearray(SAMPLE_BYTES)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptMarks) as refusal:
            HighwaterMarks.from_bytes(bytes(damaged))
        assert refusal.value.what in {"magic", "checksum"}, f"bit {bit}"


def test_every_truncation_and_every_growth_is_refused():
    for length in range(len(SAMPLE_BYTES)):
        with pytest.raises(CorruptMarks):
            HighwaterMarks.from_bytes(SAMPLE_BYTES[:length])
    with pytest.raises(CorruptMarks):
        HighwaterMarks.from_bytes(SAMPLE_BYTES + b"\0")


def with_checksum(body):
    return body + struct.pack(">I", zlib.crc32(body))


def rewritten(position, layout, value):
    body = bytearray(SAMPLE_BYTES[:-4])
    struct.pack_into(layout, body, position, value)
    return with_checksum(bytes(body))


def test_another_version_is_named():
    with pytest.raises(CorruptMarks, match=r"version 2.*version 1") as refusal:
        HighwaterMarks.from_bytes(rewritten(4, ">I", 2))
    assert refusal.value.what == "version"


@pytest.mark.parametrize(
    ("position", "layout", "value", "what"),
    [
        (8, ">I", 2**32 - 1, "window"),
        (12, ">Q", 2**63, "count"),
        (12, ">Q", 1, "count"),
        (28, ">i", -1, "partitions"),
        (32, ">q", -1, "offsets"),
        (40, ">i", -2, "destination_partitions"),
        (44, ">q", -2, "advanced_ms"),
        (20, ">q", 5, "entries"),
        (53, ">B", 0xFF, "bits"),
    ],
)
def test_a_right_checksum_over_wrong_fields_is_refused_by_field(position, layout, value, what):
    with pytest.raises(CorruptMarks) as refusal:
        HighwaterMarks.from_bytes(rewritten(position, layout, value))
    assert refusal.value.what == what


def test_a_window_without_pairs_has_no_form():
    with pytest.raises(CorruptMarks, match="window"):
        HighwaterMarks.from_bytes(with_checksum(struct.pack(">4sIIQ", b"HWMK", 1, 8, 0)))
