"""The scan's four answers, each from the bytes that call for it."""

from pathlib import Path

import pytest

from pushrep.log.walk import CleanEnd, Damage, ScanRange, TornTail, WholeBatch, scan, scan_vectorised
from pushrep.records import encode_batch
from tests.support.simulated_disk import SimulatedDisk

BASE = 100


def batch(offset, count=2, epoch=3):
    return bytes(encode_batch([b"value"] * count, timestamps_ms=0, base_offset=offset, leader_epoch=epoch).data)


TWO = batch(100) + batch(102)


def steps(data, window_bytes=64, way=scan, **what):
    disk = SimulatedDisk()
    disk.make_directory(Path("/logs"))
    file = disk.open(Path("/logs/x"), create=True)
    file.write_at(data, 0)
    return list(way(file, ScanRange(**{"base_offset": BASE, **what}), window_bytes=window_bytes))


@pytest.mark.parametrize("window_bytes", [1, 61, 100, 1 << 20])
def test_whole_batches_then_a_clean_end(window_bytes):
    first, second, end = steps(TWO, window_bytes)
    assert (first.position, first.batch.header.base_offset) == (0, 100)
    assert (second.position, second.end) == (first.end, len(TWO))
    assert bytes(second.batch.data) == batch(102)
    assert end == CleanEnd(len(TWO), 104)


def test_an_empty_file_and_a_start_in_the_middle():
    assert steps(b"") == [CleanEnd(0, 100)]
    half = len(TWO) // 2
    assert [type(s) for s in steps(TWO, position=half, next_offset=102)] == [WholeBatch, CleanEnd]


def flipped(data, at):
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


SECOND = len(TWO) // 2
BAD_SECOND = {
    "cut in its header": TWO[: SECOND + 30],
    "cut in its records": TWO[:-1],
    "a flipped bit in a record": flipped(TWO, len(TWO) - 3),
    "another magic": flipped(TWO, SECOND + 16),
    "a length beyond the file": flipped(TWO, SECOND + 10),
    "a length beyond any batch": flipped(TWO, SECOND + 8),
    "an offset that was there before": batch(100) + batch(101),
    "an epoch that falls": batch(100) + batch(102, epoch=2),
    "zeros, then something": batch(100) + bytes(100) + b"x",
    "something, then zeros": batch(100) + b"x" + bytes(100),
}


@pytest.mark.parametrize("what", BAD_SECOND)
@pytest.mark.parametrize(("recovery_point", "answer"), [(0, TornTail), (102, TornTail), (103, Damage), (500, Damage)])
def test_what_is_no_batch_is_torn_above_the_recovery_point_and_damage_below(what, recovery_point, answer):
    whole, end = steps(BAD_SECOND[what], recovery_point=recovery_point)
    assert isinstance(whole, WholeBatch)
    assert isinstance(end, answer), end
    assert (end.position, end.next_offset) == (SECOND, 102)
    assert end.reason


@pytest.mark.parametrize("what", BAD_SECOND)
def test_in_runs_the_same_is_refused(what):
    disk = SimulatedDisk()
    disk.make_directory(Path("/logs"))
    file = disk.open(Path("/logs/x"), create=True)
    file.write_at(BAD_SECOND[what], 0)
    first, end = scan_vectorised(file, ScanRange(base_offset=BASE))
    assert (len(first), end) == (1, steps(BAD_SECOND[what])[-1])


def test_whole_batches_behind_a_bad_one_are_never_looked_at():
    assert [type(s) for s in steps(flipped(TWO, 70) + batch(104))] == [TornTail]


def test_zeros_are_space_at_the_end_of_the_newest_segment():
    assert steps(TWO + bytes(300))[-1] == CleanEnd(len(TWO), 104)
    assert isinstance(steps(TWO + bytes(300), recovery_point=105)[-1], Damage), "offset 104 was on disk"


@pytest.mark.parametrize(
    ("tail", "end_offset", "recovery_point", "answer"),
    [
        (b"", 104, 0, CleanEnd),
        (bytes(200), 104, 200, CleanEnd),  # space that a roll did not come to cut off
        (bytes(200), 110, 0, TornTail),
        (bytes(200), 110, 200, Damage),
        (b"", 110, 200, CleanEnd),  # a gap between two names: the opener's to refuse
    ],
)
def test_the_end_of_a_segment_that_is_not_the_last(tail, end_offset, recovery_point, answer):
    end = steps(TWO + tail, end_offset=end_offset, recovery_point=recovery_point)[-1]
    assert isinstance(end, answer), end
    assert end.next_offset == 104


def test_offsets_that_reach_into_the_next_segment():
    in_sequence = steps(TWO, end_offset=103)
    assert in_sequence[-1].next_offset == 104, "an overlap of two names: the opener's to refuse"


@pytest.mark.parametrize("recovery_point", [0, 200])
@pytest.mark.parametrize("base", [103, BASE + 2**31])
def test_no_offset_is_missing(base, recovery_point):
    """A whole batch behind a hole is damage whatever was promised: no write that tears leaves one."""
    end = steps(batch(100) + batch(base), recovery_point=recovery_point)[-1]
    assert steps(batch(100) + batch(base), 1 << 16, scan_vectorised, recovery_point=recovery_point)[-1] == end
    assert end == Damage(SECOND, 102, f"base offset {base} where 102 is expected", base)


@pytest.mark.parametrize(("last_offset", "base_offset"), [(103, 102), (102, None), (104, None)])
def test_a_first_batch_is_believed_if_an_index_entry_names_its_last_offset(last_offset, base_offset):
    first, *_ = steps(TWO, position=SECOND, last_offset=last_offset)
    assert (first.batch.header.base_offset if isinstance(first, WholeBatch) else None) == base_offset
