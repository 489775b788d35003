"""The same walk in long strides, for who needs headers and not records: recovery, verify, the rebuilding of indexes.

    window   | batch | batch | batch | bat|      all of its whole batches are checked together       BatchRun
             ──────────────────────────▶         next window from the first that is not whole

The rules are scan.py's, and it has the last word: the first batch that does not pass here, the end of the file
included, is looked at by `scan`, which goes on from there to its end and says what is the matter. So this module can
be wrong in one way only, by taking a batch that `scan` would refuse: tests/properties holds the two against each other.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.log.checkpoints import OFFSET_MAX
from pushrep.log.config import BATCH_BYTES_LIMIT, POSITION_MAX
from pushrep.log.scan import ScanEnd, ScanRange, WholeBatch, scan
from pushrep.records import HEADER_BYTES, BatchRun
from pushrep.records.batch_run import checked_run, length_of_first
from pushrep.seams import File

RunStep: TypeAlias = BatchRun | ScanEnd

WINDOW_BYTES_MAX = 2 << 20
"""A run costs 0.1 ms before its first batch, whatever the batches' size: 2 MiB hide that; the memory of 4 MiB goes back
to the system after each of them, and every page of it has to be had again."""
_WINDOW_BYTES_MIN = 64 << 10  # ten thousand logs with a few records each are opened, too
_GROWTH = 8


def scan_runs(file: File, what: ScanRange, *, window_bytes: int = _WINDOW_BYTES_MIN) -> Iterator[RunStep]:
    """Every whole batch in order, in runs, then exactly one CleanEnd, TornTail or Damage: those of `scan`.

    `window_bytes`: of the first read; the following ones grow.
    """
    _advise(file)
    while run := _next_run(file, what, window_bytes):
        yield run
        window_bytes = min(window_bytes * _GROWTH, WINDOW_BYTES_MAX)
        what = replace(what, position=run.end, next_offset=run.next_offset, leader_epoch=int(run.leader_epoch[-1]))
    for step in scan(file, what):
        yield BatchRun.of(step.position, step.batch.header) if isinstance(step, WholeBatch) else step


def _advise(file: File) -> None:
    """From front to back: the system doubles what it reads ahead, at half the cost a byte.

    More is less: asking for 2 to 16 MiB ahead by hand (WILLNEED) halved the speed where the system reads 8 MiB ahead
    by itself.
    """
    with suppress(OSError):  # a file in memory has no descriptor
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _next_run(file: File, what: ScanRange, window_bytes: int) -> BatchRun | None:
    """What can be taken at once from `what.position` on; None if `scan` has to look."""
    if what.base_offset > OFFSET_MAX:  # twenty digits can name what no offset is, and no column holds
        return None
    data = file.read_at(window_bytes, what.position)
    size = length_of_first(data)
    if not HEADER_BYTES <= size <= BATCH_BYTES_LIMIT:
        return None
    if size > len(data) == window_bytes:
        data = file.read_at(size, what.position)  # one batch that is larger than the window
    run = checked_run(data, what.position, BATCH_BYTES_LIMIT)
    if not len(run):
        return None
    good = _well_placed(run, what)
    run = run if good.all() else run.first(int(good.argmin()))
    return run if len(run) else None


def _well_placed(run: BatchRun, what: ScanRange) -> NDArray[np.bool_]:
    """Which batches may stand where they stand: scan.py's `_misplaced` for all at once."""
    before = np.empty_like(run.base_offset)
    before[0] = what.base_offset if what.next_offset is None else what.next_offset
    before[1:] = run.last_offset[:-1] + 1
    epoch_before = np.empty_like(run.leader_epoch)
    epoch_before[0], epoch_before[1:] = what.leader_epoch, run.leader_epoch[:-1]
    good = (
        (run.base_offset >= before)
        & (run.last_offset - what.base_offset <= POSITION_MAX)
        & (run.leader_epoch >= epoch_before)
    )
    if what.end_offset is not None:
        good &= (run.last_offset < what.end_offset) | (run.base_offset == before)
    return good
