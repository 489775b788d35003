"""Runs: rows of one pair whose source and log offsets keep one distance. They can decide a batch without its rows.

    log offset      10  11  12  13  14  15      A has two runs: 10 to 12 at distance -10, 15 at -12. A run is known by
    pair A           0   1   2           3      its bounds alone: with one distance, source offsets rise with log
    pair B                       7   8          offsets. No row stands in it twice: who finds runs sees to that

If the runs of a pair, put in log order, lie one behind the other, then before each of them the maximum of all rows
before it is known, and the rule falls on whole stretches of it, whatever the physical order of the rows:

    maximum before   below the run's lowest   inside it                  at its highest or above
    of the run       all is kept              the part up to it drops    all drops

Anything else (runs that cross, holes where a run is cut) proves nothing, and the rows decide one by one. A row that
stands in two runs makes them cross. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from filtering.marks import HighwaterMarks

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
        none = cls(*[np.empty(0, np.int64)] * len(cls._fields))
        return cls(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))

    def some(self, rows: Numbers) -> Self:
        """The runs of these numbers."""
        return self._replace(**{name: column[rows] for name, column in zip(self._fields, self, strict=True)})


class Stretch(NamedTuple):
    """Log offsets [start, end) whose records of one pair are replays."""

    pid: int
    partition: int
    start: int
    end: int


class RunsVerdict(NamedTuple):
    """What becomes of every row of the runs: those in `dropped` go, all others stay.

    `dropped_rows`: how many go. `jumped`: source offsets that the marks pass over.
    """

    dropped: tuple[Stretch, ...]
    dropped_rows: int
    jumped: int


def decide(runs: Runs, marks: HighwaterMarks) -> RunsVerdict | None:
    """The rule over whole runs, beginning with `marks`; None where their bounds alone don't decide."""
    if not len(runs.rows):
        return RunsVerdict((), 0, 0)
    in_order, first = _by_pair(runs)
    if not _one_behind_another(in_order, first):
        return None
    spans = in_order.lasts - in_order.starts + 1
    known = _marks_of(in_order.pids[first], in_order.partitions[first], marks)
    before = _highest_before(in_order.highs, first, known)
    # The first so many offsets of the run; in this order no sum leaves 64 bits.
    replayed = np.where(before < in_order.lows, 0, np.minimum(before - in_order.lows, spans - 1) + 1)
    kept = np.where(replayed == spans, 0, in_order.rows - replayed)
    if ((replayed > 0) & (replayed < spans) & (in_order.rows < spans)).any():
        return None  # cut inside a run with holes: how many of its rows stay is not known
    ends = np.append(np.flatnonzero(first)[1:], len(first)) - 1
    final = np.maximum(before[ends], in_order.highs[ends])
    begins = np.where(known < 0, in_order.lows[first] - 1, known)
    kept_rows, rows = int(kept.sum()), int(in_order.rows.sum())
    stretches = tuple(_stretches(in_order, first, replayed, spans))
    return RunsVerdict(stretches, rows - kept_rows, int((final - begins).sum()) - kept_rows)


def hold_each_row_once(runs: Runs) -> bool:
    """Whether no row stands in two of the runs: those of each pair lie one behind another."""
    return _one_behind_another(*_by_pair(runs))


def _by_pair(runs: Runs) -> tuple[Runs, npt.NDArray[np.bool_]]:
    """The runs pair by pair in log order, and which are the first of their pair."""
    order = np.lexsort((runs.starts, runs.partitions, runs.pids))
    in_order = Runs(*(column[order] for column in runs))
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(in_order.pids) != 0) | (np.diff(in_order.partitions) != 0)
    return in_order, first


def _one_behind_another(in_order: Runs, first: npt.NDArray[np.bool_]) -> bool:
    behind = first.copy()
    behind[1:] |= in_order.starts[1:] > in_order.lasts[:-1]
    # More rows than offsets are no runs.
    return bool(behind.all() and (in_order.rows <= in_order.lasts - in_order.starts + 1).all())


def _highest_before(highs: Numbers, first: npt.NDArray[np.bool_], known: Numbers) -> Numbers:
    """Before each run, the highest source offset of its pair: the mark, and the runs in front of it.

    A running maximum that begins anew at each pair: over ranks, since offsets themselves leave no bits to add to.
    """
    pair = np.cumsum(first) - 1
    candidates = np.empty(len(highs), np.int64)
    candidates[1:] = highs[:-1]
    candidates[first] = known
    values, ranks = np.unique(candidates, return_inverse=True)
    floor = pair * len(values)
    found: Numbers = values[np.maximum.accumulate(floor + ranks) - floor]
    return found


def _stretches(runs: Runs, first: npt.NDArray[np.bool_], replayed: Numbers, spans: Numbers) -> list[Stretch]:
    """What drops; neighbours of one pair are one, for between them lies no other row of it."""
    stretches: list[Stretch] = []
    whole_before = -2  # the last run that dropped whole
    for i in np.flatnonzero(replayed).tolist():
        pid, partition, start = int(runs.pids[i]), int(runs.partitions[i]), int(runs.starts[i])
        end = start + int(replayed[i])
        joins = bool(stretches) and not first[i] and whole_before == i - 1
        if joins:
            stretches[-1] = stretches[-1]._replace(end=end)
        else:
            stretches.append(Stretch(pid, partition, start, end))
        whole_before = i if replayed[i] == spans[i] else -2
    return stretches


def _marks_of(pids: Numbers, partitions: Numbers, marks: HighwaterMarks) -> Numbers:
    """The marks of these pairs, -1 for those without."""
    found = marks.find(pids, partitions)
    offsets = marks.to_columns().offsets
    return np.where(found >= 0, offsets[found] if len(offsets) else -1, -1)
