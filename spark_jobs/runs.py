"""Runs: rows of one pair whose source and log offsets keep one distance. They can prove that a batch has no replay.

    log offset      10  11  12  13  14  15      A has two runs: 10 to 12 at distance -10, 15 at -12. A run is known by
    pair A           0   1   2           3      its bounds alone: with one distance, source offsets rise with log
    pair B                       7   8          offsets, and no two rows are equal

If the runs of a pair, put in log order, lie one behind the other in both offsets and all above its mark, every row is
above the maximum of those before it: the rule keeps them all, whatever the physical order. Anything else proves
nothing, and the rows decide one by one. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from filtering.highwater import HighwaterMarks

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """n runs as columns: the pair, first and last log offset, first and last source offset, number of rows."""

    pids: Numbers
    partitions: Numbers
    starts: Numbers
    lasts: Numbers
    lows: Numbers
    highs: Numbers
    rows: Numbers

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """All of several."""
        return cls(*(np.concatenate([np.empty(0, np.int64), *columns]) for columns in zip(*parts, strict=True)))


def jumped_if_all_kept(runs: Runs, marks: HighwaterMarks) -> int | None:
    """How many source offsets the marks jump over if every row is new; None where that is not proven."""
    if not len(runs.rows):
        return 0
    order = np.lexsort((runs.starts, runs.partitions, runs.pids))
    pids, partitions, starts, lasts, lows, highs, rows = (column[order] for column in runs)
    first = np.ones(len(rows), np.bool_)
    first[1:] = (pids[1:] != pids[:-1]) | (partitions[1:] != partitions[:-1])
    before = np.empty(len(rows), np.int64)
    before[1:] = highs[:-1]
    before[first] = _marks_of(pids[first], partitions[first], marks)
    behind = first.copy()
    behind[1:] |= starts[1:] > lasts[:-1]
    # More rows than offsets: the frame holds log records twice.
    if not (behind.all() and (lows > before).all() and (rows <= lasts - starts + 1).all()):
        return None
    known = np.where(before[first] < 0, lows[first] - 1, before[first])
    ends = np.append(np.flatnonzero(first)[1:], len(rows)) - 1
    return int((highs[ends] - known).sum() - rows.sum())


def _marks_of(pids: Numbers, partitions: Numbers, marks: HighwaterMarks) -> Numbers:
    """The marks of these pairs, -1 for those without."""
    found = marks.find(pids, partitions)
    offsets = marks.to_columns().offsets
    return np.where(found >= 0, offsets[found] if len(offsets) else -1, -1)
