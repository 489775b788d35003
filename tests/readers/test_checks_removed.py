"""Each check that a reader's walk makes, taken out: one rotten bit then passes by a way that named it before.

What no single rotten bit shows (a file of another log, an offset too far, an index entry that leads astray) has its own
tests: tests/unit/test_log_scan.py, test_log_scan_headers.py, test_log_seals.py, tests/properties/test_log_scan_runs.py.
"""

from contextlib import contextmanager
from typing import NamedTuple

import pytest

from pushrep.log import reader, walk
from pushrep.log.verify import verify_log
from pushrep.records import CorruptRecordBatch, header
from pushrep.records.batch import RecordBatch
from pushrep.replay import slices
from pushrep.replicate import pusher
from tests.readers.small_logs import Flip, make_log
from tests.readers.test_header_bits import OUTBOX
from tests.readers.ways import WAYS, Given, fault_of
from tests.simulation.mutations import Mutation, mutated

_WHY, _RUN = walk.ScanRange.why_misplaced, header.checked_run
_READER = reader.BatchReader


class Removed(NamedTuple):
    """A check: the function or what is around it, the words that go, what comes instead; and a bit that is named by
    `way` because of it.
    """

    where: object
    old: str
    new: str
    way: str
    flip: Flip


CHECKS = {
    "an offset below the expected one": Removed(
        _WHY, "base_offset != expected:", "base_offset > expected:", "reader", Flip(1, 62)
    ),
    "an offset above it": Removed(_WHY, "base_offset != expected:", "base_offset < expected:", "reader", Flip(0, 61)),
    "a leader epoch that falls": Removed(
        _WHY, "elif leader_epoch < epoch_before:", "elif False:", "reader", Flip(2, 98)
    ),
    "from one segment to the next": Removed(
        _READER, "following._replace(leader_epoch=epoch)", "following", "reader", Flip(2, 98)
    ),
    "at the second look": Removed(
        _READER, "before = start - 1 if start > self._log.bounds().start else start", "before = start",
        "reader", Flip(2, 98),
    ),
    "the CRC": Removed(RecordBatch.check, "if crc != batch.header.crc:", "if False:", "reader", Flip(5, 411)),
    "the CRC of many": Removed(_RUN, '(headers["crc"] == crcs) & ', "", "verify", Flip(5, 411)),
    "headers of many that can't be": Removed(_RUN, " & _possible(run, headers)", "", "verify", Flip(7, 129)),
    "offsets of many": Removed(
        walk.well_placed, "(run.base_offset == before)\n        & ", "", "verify", Flip(3, 62)
    ),
    "epochs of many": Removed(
        walk.well_placed,
        " & (run.leader_epoch >= epoch_before)\n    )\n    if what.closed_at is not None:\n"
        "        good &= run.last_offset < what.closed_at\n    if what.epochs is not None:",
        "\n    )\n    if False:", "verify", Flip(4, 119),
    ),
    "offsets of a window": Removed(
        slices.BatchWindows.windows, "one.base_offset != at or ", "", "directory replay", Flip(1, 62)
    ),
    "epochs of a window": Removed(
        slices.BatchWindows.windows, " or one.leader_epoch < was", "", "directory replay", Flip(6, 119)
    ),
    "offsets by the headers alone": Removed(
        walk.scan_headers, "if (base != expected or epoch < epoch_before) and", "if False and", "push", Flip(1, 62)
    ),
    "CRCs one by one": Removed(
        header.split_batches, "if crc != header.crc:", "if False:",
        "directory replay", Flip(1, 172),
    ),
    "lengths by the headers alone": Removed(
        walk.scan_headers, "or not size_min <= size <= size_max", "", "shipping", Flip(7, 64)
    ),
    "the file's end by the headers alone": Removed(
        walk.scan_headers, "if end > file_bytes:\n                return", "if False:\n                return",
        "push", Flip(0, 70),
    ),
    "the epoch that a slice begins with": Removed(
        reader,
        "if (epoch != newest or first < newest_from) and epochs.contradiction(first, epoch) is not None:", "if False:",
        "push", Flip(6, 127),
    ),
    "epochs of what is fetched": Removed(
        pusher.whole_batches,
        "if (why := epochs.contradiction(header.base_offset, header.leader_epoch)) is not None:", "if False:",
        "fetching", Flip(6, 127),
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_that_is_taken_out_is_missed(check, directory):
    log = make_log(directory / "logs" / OUTBOX)
    starts = sorted({0, log.batches[check.flip.batch].base_offset})
    with opened(check.way, log, directory) as read, log.flipped(check.flip):
        found = list(read(starts))
        assert [fault for one in found if (fault := fault_of(log, one))] == []
        named = sum(one.error is not None for one in found)
        assert named
        with mutated(Mutation(*check[:3])):
            assert missed(log, read, starts, named), "another check holds alone: is this one needed?"


def missed(log, read, starts, named):
    """Whether the reader got wrong records, or reports less damage than before."""
    try:
        found = list(read(starts))
    except Exception:  # noqa: BLE001 - the judge could not make sense of what came
        return True
    return any(fault_of(log, one) for one in found) or sum(one.error is not None for one in found) < named


@contextmanager
def opened(way, log, directory):
    if way != "verify":
        with next(one for one in WAYS if one.name == way).open(log, directory) as read:
            yield read
        return

    def verify(_starts):
        found = verify_log(log.path)
        # It gives no records: what it names counts.
        yield Given(0, 0, [], None if found.is_whole else CorruptRecordBatch(str(found.findings)))

    yield verify
