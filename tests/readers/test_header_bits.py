"""Any bit of any header may flip: each reader gets the right records before it, or an error that names the place.

It never gets a record at a wrong offset, a silent end, or an endless wait. The judge parses the bytes independently.
"""

import pytest

from tests.readers.small_logs import Flip, make_log
from tests.readers.ways import WAYS, fault_of

KINDS = ("dense", "cleaned")
_FAULTS_MAX = 20
OUTBOX = "00000000-0000-0000-0000-000000000007"
MISSED_ONCE = [Flip(2, 98)]
"""An epoch so high that the next batch's falls, before a hole between segments: the rest of its segment was skipped."""
NOT_YET = {}
"""What is known to be wrong, strictly: whoever mends it takes the line away."""


def cases():
    for way in WAYS:
        for kind in KINDS:
            reason = NOT_YET.get((way.name, kind))
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(way, kind, marks=marks, id=f"{way.name.replace(' ', '-')}-{kind}")


def whole():
    for case in cases():
        way, kind = case.values
        yield pytest.param(way, kind, marks=case.marks if (way.name, kind) == ("push", "cleaned") else (), id=case.id)


@pytest.mark.parametrize(("way", "kind"), list(whole()))
def test_an_undamaged_log_is_read_whole(way, kind, directory):
    log = make_log(directory / "logs" / OUTBOX, cleaned=kind == "cleaned")
    with way.open(log, directory) as read:
        found = list(read(list(range(log.end))))
    assert found
    assert [(one, fault) for one in found if (fault := fault_of(log, one)) or one.error is not None] == []


@pytest.mark.parametrize(("way", "kind"), list(cases()))
def test_one_rotten_bit_of_a_header_gives_no_wrong_record_and_no_silent_end(way, kind, directory, torture):
    log = make_log(directory / "logs" / OUTBOX, cleaned=kind == "cleaned")
    flips = log.flips(torture)
    if not torture.is_long:  # each bit meets a third of the ways
        stride = 7 if way.is_dear else 3
        flips = flips[WAYS.index(way) % stride :: stride]
    flips += MISSED_ONCE
    faults = faults_of(way, log, directory, flips, torture)
    assert not faults


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_rotten_base_offset_behind_a_cleaners_hole_gives_no_wrong_record(way, directory, torture):
    log = make_log(directory / "logs" / OUTBOX, cleaned=True)
    flips = [
        Flip(number, bit) for number in range(len(log.batches)) for bit in ((62,) if way.is_dear else range(60, 64))
    ]
    flips = [flip for flip in flips if is_without_witness(log, flip)]
    assert not faults_of(way, log, directory, flips, torture)


def is_without_witness(log, flip):
    """Whether offsets may be missing at the flip: without a seal any base offset is plausible there."""
    return flip.field == "base offset" and log.batches[flip.batch].base_offset < log.cleaned_offset


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
