"""The rule over arrays: many records of many pairs at once. `ReplayFilter.admit` is the rule for one record.

    mark M, window W          offset > M           keep, and M = offset          new
                     M - W <= offset < M, unseen   keep, and remember its bit    fills a hole
                              offset <= M, seen    drop                          a replay
                              offset < M - W       drop, whatever was seen       late (a replay where W is 0)

Hence, for rows of one pair in log order: row r is new iff offset(r) > max(mark, offsets of the rows before it).
`highest_before` computes that maximum for all pairs at once, of rows as of runs of rows. A pair without a mark has
mark -1. A property test holds both writings against each other.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from filtering import window_bits

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_MARK = -1
_SAFE_MAX = 2**62  # so that one more addition stays below int64's end

# Odd multipliers (2^64 / golden ratio, and xxHash's second prime) spread PIDs and small partition numbers
# over the upper bits. A poor spread costs time, never correctness.
_PID_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_PARTITION_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)


Column = TypeVar("Column", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PairGroups:
    """Rows brought together by pair, each pair's rows still in log order.

    `order` puts the rows of each pair together; it is None if they lie together already. Pair k has the places
    `starts[k] : starts[k] + sizes[k]` of that order.
    """

    order: Numbers | None
    starts: Numbers
    sizes: Numbers
    pids: Numbers
    partitions: Numbers

    def together(self, column: npt.NDArray[Column]) -> npt.NDArray[Column]:
        """A column of the rows, put together by pair."""
        return column if self.order is None else column[self.order]

    def back(self, column: npt.NDArray[Column]) -> npt.NDArray[Column]:
        """A column put together by pair, again in the rows' own order."""
        if self.order is None:
            return column
        own = np.empty_like(column)
        own[self.order] = column
        return own

    def pair_of_place(self) -> Numbers:
        """For each place of the order the number of its pair."""
        return np.repeat(np.arange(len(self.starts)), self.sizes)


def group_pairs(pids: Numbers, partitions: Numbers) -> PairGroups:
    """Group n rows by (pid, partition). Each pair comes once, in no particular order of pairs.

    Kafka hands out a partition's records in runs of one producer's batch, so runs are grouped, not rows. Runs are
    sorted by a 16-bit hash of their pair, for which numpy's stable sort is a radix sort; by a 32-bit hash if two pairs
    share the first one; by the pairs themselves if they share both. One pair alone needs no sort.
    """
    count = len(pids)
    run_starts = _run_starts(pids, partitions)
    if len(run_starts) == 1:
        return PairGroups(None, run_starts, np.array([count]), pids[:1], partitions[:1])
    run_order = _sorted_pairs(pids[run_starts], partitions[run_starts])
    run_sizes = np.diff(run_starts, append=count)[run_order]
    run_starts = run_starts[run_order]
    first_of_pair = _run_starts(pids[run_starts], partitions[run_starts])
    run_places = np.cumsum(run_sizes) - run_sizes
    starts = run_places[first_of_pair]
    # Rows of a run lie together, so each place is its run's first row plus the distance into the run.
    order = np.repeat(run_starts - run_places, run_sizes) + np.arange(count)
    firsts = run_starts[first_of_pair]
    return PairGroups(order, starts, np.diff(starts, append=count), pids[firsts], partitions[firsts])


def _run_starts(pids: Numbers, partitions: Numbers) -> Numbers:
    """Where the pair differs from the row before; row 0 always does. Empty for no rows."""
    if len(pids) == 0:
        return np.empty(0, np.int64)
    differs = (pids[1:] != pids[:-1]) | (partitions[1:] != partitions[:-1])
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(differs) + 1])


def _sorted_pairs(pids: Numbers, partitions: Numbers) -> Numbers:
    """A stable order that brings equal pairs together."""
    mixed = (pids.view(np.uint64) * _PID_FACTOR) ^ (partitions.view(np.uint64) * _PARTITION_FACTOR)
    mixed *= _PID_FACTOR
    order = np.argsort((mixed >> np.uint64(48)).astype(np.uint16), kind="stable")
    if not _collide(mixed[order] >> np.uint64(48), pids[order], partitions[order]):
        return order
    order = np.argsort(((mixed >> np.uint64(32)) & np.uint64(0xFFFF)).astype(np.uint16), kind="stable")
    order = order[np.argsort((mixed[order] >> np.uint64(48)).astype(np.uint16), kind="stable")]
    if not _collide(mixed[order] >> np.uint64(32), pids[order], partitions[order]):
        return order
    return np.lexsort((partitions, pids))


def _collide(hashes: npt.NDArray[np.uint64], pids: Numbers, partitions: Numbers) -> bool:
    """Whether two pairs share a hash: then their rows lie mixed."""
    same_hash = hashes[1:] == hashes[:-1]
    return bool((same_hash & ((pids[1:] != pids[:-1]) | (partitions[1:] != partitions[:-1]))).any())


class Verdicts(NamedTuple):
    """The answer for rows put together by pair, and what each pair's state becomes."""

    keep: Mask  # by row
    late: int
    kept: Numbers  # from here on by pair: rows kept
    marks: Numbers
    jumped: Numbers  # offsets that the mark passed over; the first record of a pair passes over none
    bitmaps: npt.NDArray[np.uint8]


def judge_rows(
    offsets: Numbers, groups: PairGroups, marks: Numbers, bitmaps: npt.NDArray[np.uint8], window: int
) -> Verdicts:
    """Many records of many pairs: `offsets` together by pair, `marks` and `bitmaps` one row a pair. Pure."""
    starts = groups.starts
    before = highest_before(offsets, groups, marks)
    keep = offsets > before

    ends = starts + groups.sizes - 1
    new_marks = np.maximum(before[ends], offsets[ends])
    new_rows = np.add.reduceat(keep, starts, dtype=np.int64)
    # A mark rises by the rows that raised it plus the offsets that it passed over; without a mark, from the pair's
    # first row on.
    rose_from = np.where(marks == NO_MARK, offsets[starts] - 1, marks)
    jumped = new_marks - rose_from - new_rows
    if not window:
        return Verdicts(keep, 0, new_rows, new_marks, jumped, bitmaps)

    behind = before - offsets
    late = behind > window
    fills = _unseen(offsets, groups, marks, bitmaps, (behind > 0) & ~late)
    keep |= fills
    kept = np.add.reduceat(keep, starts, dtype=np.int64)
    bits = _with_rows(offsets, groups, (marks, new_marks), bitmaps, window)
    return Verdicts(keep, int(late.sum()), kept, new_marks, jumped, bits)


def highest_before(offsets: Numbers, groups: PairGroups, marks: Numbers) -> Numbers:
    """For each place the highest offset of its pair before it: its mark, or an earlier place's offset."""
    before = np.empty_like(offsets)
    before[1:] = _running_maximum(offsets, groups)[:-1]
    before[groups.starts] = marks
    np.maximum(before, np.repeat(marks, groups.sizes), out=before)
    return before


def _running_maximum(offsets: Numbers, groups: PairGroups) -> Numbers:
    """For each place the highest offset of its pair up to and with it."""
    starts, sizes = groups.starts, groups.sizes
    if len(starts) == 1:
        return np.maximum.accumulate(offsets)
    ascends = offsets[1:] > offsets[:-1]
    ascends[starts[1:] - 1] = True
    if ascends.all():
        return offsets
    # One accumulate for all pairs: each pair's offsets are shifted above those of the pair before it, then back.
    lowest = np.minimum.reduceat(offsets, starts)
    steps = offsets - np.repeat(lowest, sizes)
    lift = int(steps.max()) + 1
    if lift * len(starts) < _SAFE_MAX:
        floor = np.repeat(np.arange(len(starts)) * lift, sizes)
        lifted: Numbers = np.maximum.accumulate(steps + floor)
        return np.asarray(lifted - floor + np.repeat(lowest, sizes))
    # Offsets too far apart to shift: use their ranks, which are below the number of rows.
    values, ranks = np.unique(offsets, return_inverse=True)
    floor = np.repeat(np.arange(len(starts)) * len(values), sizes)
    lifted = np.maximum.accumulate(ranks + floor)
    return np.asarray(values[lifted - floor])


def _unseen(
    offsets: Numbers, groups: PairGroups, marks: Numbers, bitmaps: npt.NDArray[np.uint8], candidates: Mask
) -> Mask:
    """Which rows inside their window have an offset that neither the bits nor an earlier row knows."""
    if not candidates.any():
        return candidates
    pair = groups.pair_of_place()
    places = np.lexsort((offsets, pair))
    again = (offsets[places[1:]] == offsets[places[:-1]]) & (pair[places[1:]] == pair[places[:-1]])
    unseen = candidates.copy()
    unseen[places[1:][again]] = False
    below = marks[pair] - offsets
    unseen[below == 0] = False
    asked = np.flatnonzero(unseen & (below > 0))
    unseen[asked[window_bits.test_bits(bitmaps, pair[asked], below[asked] - 1)]] = False
    return unseen


def _with_rows(
    offsets: Numbers,
    groups: PairGroups,
    from_to: tuple[Numbers, Numbers],
    bitmaps: npt.NDArray[np.uint8],
    window: int,
) -> npt.NDArray[np.uint8]:
    """The bits after the marks rose and every row that is inside its pair's window was seen."""
    marks, new_marks = from_to
    known = np.where(marks == NO_MARK, new_marks, marks)
    bits = window_bits.raised(bitmaps, known, new_marks - known, window)
    pair = groups.pair_of_place()
    below = new_marks[pair] - offsets
    inside = np.flatnonzero((below > 0) & (below <= window))
    window_bits.set_bits(bits, pair[inside], below[inside] - 1)
    return bits
