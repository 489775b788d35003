"""Any bit of any header may flip: each reader gets the right records before it, or an error that names the place.

It never gets a record at a wrong offset, a silent end, or an endless wait. The judge parses the bytes independently.
"""

import pytest

from tests.readers.small_logs import Flip, make_log
from tests.readers.ways import WAYS, fault_of

_FAULTS_MAX = 20
OUTBOX = "00000000-0000-0000-0000-000000000007"
MISSED_ONCE = [Flip(2, 98)]
"""An epoch so high that the next batch's falls."""


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_undamaged_log_is_read_whole(way, directory):
    log = make_log(directory / "logs" / OUTBOX)
    with way.open(log, directory) as read:
        found = list(read(list(range(log.end))))
    assert found
    assert [(one, fault) for one in found if (fault := fault_of(log, one)) or one.error is not None] == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_rotten_bit_of_a_header_gives_no_wrong_record_and_no_silent_end(way, directory, torture):
    log = make_log(directory / "logs" / OUTBOX)
    flips = log.flips(torture)
    if not torture.is_long:  # each bit meets a third of the ways
        stride = 7 if way.is_dear else 3
        flips = flips[WAYS.index(way) % stride :: stride]
    flips += MISSED_ONCE
    faults = faults_of(way, log, directory, flips, torture)
    assert not faults


def starts_near(log, flip, number):
    """Start offsets: where the batch begins; and in turn the log's start, offsets of the batch, edges of its
    neighbours, any offset.

    All places with each bit take ten times as long; so each bit is tested with each of these places, at some of the
    batches.
    """
    first, behind = log.batches[flip.batch].base_offset, log.batches[flip.batch].next_offset
    places = [0, number % log.end, *range(max(0, first - 1), min(behind + 1, log.end))]
    return sorted({first, places[number % len(places)]})


def faults_of(way, log, directory, flips, torture):
    faults = []
    with way.open(log, directory) as read:
        for number, flip in enumerate(flips):
            if len(faults) >= _FAULTS_MAX:
                break
            base = log.batches[flip.batch].base_offset
            starts = starts_near(log, flip, number) if torture.is_long else [base if number % 2 else number % log.end]
            with log.flipped(flip):
                faults += [(str(flip), fault) for found in read(starts) if (fault := fault_of(log, found))]
    return faults
