"""Where the scan of an opening log begins: a table of facts and answers."""

import pytest

from pushrep.log.directory_files import CleanLog
from pushrep.log.recovery import Opening, recovery_plan

BASES = (0, 1000, 2000, 3000)
CLEAN = CleanLog(end_offset=3500, last_segment_bytes=777, leader_epoch=0)


def plan(*, recovery_point, clean=None, whole=BASES, bases=BASES, newest_bytes=777, verify=0):
    asked = []

    def first_batch_is_whole(base):
        asked.append(base)
        return base in whole

    found = recovery_plan(
        bases,
        first_batch_is_whole,
        newest_bytes=newest_bytes,
        recovery_point=recovery_point,
        clean=clean,
        verify_last_segments=verify,
    )
    return found, asked


@pytest.mark.parametrize(
    ("recovery_point", "first", "start_offset"),
    [(3500, 3, 3500), (3000, 3, 3000), (2999, 2, 2999), (1000, 1, 1000), (999, 0, 999), (0, 0, 0), (None, 0, 0)],
)
def test_abnormal_begins_at_the_segment_that_holds_the_recovery_point(recovery_point, first, start_offset):
    found, _ = plan(recovery_point=recovery_point)
    assert (found.opening, found.first, found.start_offset) == (Opening.ABNORMAL, first, start_offset)
    assert found.recovery_point == (recovery_point or 0)


def test_abnormal_walks_back_over_segments_whose_first_batch_is_not_whole():
    found, asked = plan(recovery_point=3500, whole=(0, 1000))
    assert (found.first, found.start_offset) == (1, 3500)
    assert asked == [3000, 2000, 1000], "no more is read than needed"
    assert plan(recovery_point=3500, whole=())[0].first == 0


def test_a_log_whose_start_moved_begins_at_its_first_segment():
    found, _ = plan(recovery_point=10, bases=(1000, 2000))
    assert (found.first, found.start_offset, found.recovery_point) == (0, 1000, 1000)


def test_normal_looks_at_the_end_of_the_newest_segment_only():
    found, asked = plan(recovery_point=3500, clean=CLEAN)
    assert (found.opening, found.first, found.start_offset) == (Opening.NORMAL, 3, 3500)
    assert not asked
    assert found.recovery_point == 3500, "the marker is written when all is on disk"


@pytest.mark.parametrize(("verify", "first"), [(1, 3), (3, 1), (9, 0)])
def test_normal_scans_the_last_segments_if_asked(verify, first):
    found, _ = plan(recovery_point=3500, clean=CLEAN, verify=verify)
    assert (found.opening, found.first, found.start_offset) == (Opening.NORMAL, first, BASES[first])


def test_a_log_that_changed_since_its_marker_opens_abnormally():
    found, _ = plan(recovery_point=3100, clean=CLEAN, newest_bytes=778)
    assert (found.opening, found.first, found.start_offset) == (Opening.ABNORMAL, 3, 3100)
    assert "changed" in found.reason
