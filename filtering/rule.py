"""The rule over arrays: many records of many pairs at once. `ReplayFilter.admit` is the rule for one record.

    mark M, window W          offset > M           keep, and M = offset          new
                     M - W <= offset < M, unseen   keep, and remember its bit    fills a hole
                              offset <= M, seen    drop                          a replay
                              offset < M - W       drop, whatever was seen       late (a replay where W is 0)

Hence, for rows of one pair in log order: row r is new iff offset(r) > max(mark, offsets of the rows before it).
`highest_before` computes that maximum for all pairs at once, of rows as of runs of rows. A pair without a mark has
mark -1. A property test holds both writings against each other.

The bits behind a mark: which offsets just below it were seen. Many pairs at once, one row of bytes each.

    mark m, window W:    offset  m-1  m-2  m-3 ...  m-W   | below m-W: closed, whatever was seen
                         bit      0    1    2  ...  W-1      bit i lies in byte i // 8, at 1 << (i % 8)

A row is ceil(W / 8) bytes. Bits at or above W, and bits of negative offsets (i >= m), are always 0, so that one
state has one form. Everything here is pure; rows are uint8 arrays of shape (n, ceil(W / 8)).
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.uint8]

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
    bitmaps: Rows


def judge_rows(offsets: Numbers, groups: PairGroups, marks: Numbers, bitmaps: Rows, window: int) -> Verdicts:
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


def _unseen(offsets: Numbers, groups: PairGroups, marks: Numbers, bitmaps: Rows, candidates: Mask) -> Mask:
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
    unseen[asked[test_bits(bitmaps, pair[asked], below[asked] - 1)]] = False
    return unseen


def _with_rows(
    offsets: Numbers,
    groups: PairGroups,
    from_to: tuple[Numbers, Numbers],
    bitmaps: Rows,
    window: int,
) -> Rows:
    """The bits after the marks rose and every row that is inside its pair's window was seen."""
    marks, new_marks = from_to
    known = np.where(marks == NO_MARK, new_marks, marks)
    bits = raised_bits(bitmaps, known, new_marks - known, window)
    pair = groups.pair_of_place()
    below = new_marks[pair] - offsets
    inside = np.flatnonzero((below > 0) & (below <= window))
    set_bits(bits, pair[inside], below[inside] - 1)
    return bits


def row_bytes(window: int) -> int:
    """Bytes that the bits of one pair take."""
    return (window + 7) // 8


def no_bits(count: int, window: int) -> Rows:
    """Rows of pairs below whose mark nothing was seen."""
    return np.zeros((count, row_bytes(window)), np.uint8)


def lowest_bits(counts: Numbers, window: int) -> Rows:
    """Rows with the lowest `counts[i]` bits set, at most `window` of them."""
    rows: Rows = np.repeat(_lowest_bits(np.array([window]), window), len(counts), axis=0)
    short = np.flatnonzero(counts < window)  # marks near offset 0 only, so few
    rows[short] = _lowest_bits(counts[short], window)
    return rows


def _lowest_bits(counts: Numbers, window: int) -> Rows:
    in_byte = counts[:, None] - 8 * np.arange(row_bytes(window), dtype=np.int64)
    ones: Rows = ((1 << np.clip(in_byte, 0, 8)) - 1).astype(np.uint8)
    return ones


def resized_bits(rows: Rows, marks: Numbers, old: int, new: int) -> Rows:
    """Rows of another window: narrower forgets, wider takes everything that was below the old window as seen."""
    if old == new:
        return rows
    if new < old:
        narrow: Rows = rows[:, : row_bytes(new)].copy()
        narrow &= lowest_bits(np.full(len(rows), new, np.int64), new)
        return narrow
    wide = no_bits(len(rows), new)
    wide[:, : row_bytes(old)] = rows
    closed = lowest_bits(marks, new) & ~lowest_bits(np.full(len(rows), old, np.int64), new)
    wide |= closed
    return wide


def raised_bits(rows: Rows, marks: Numbers, by: Numbers, window: int) -> Rows:
    """Rows after each mark went up by `by[i]` >= 0; where it did, the old mark itself becomes a bit."""
    result = rows.copy()
    rose = np.flatnonzero(by > 0)
    if len(rose):
        result[rose] = _shifted_bits(rows[rose], np.minimum(by[rose], 8 * rows.shape[1]))
        near = rose[by[rose] <= window]
        set_bits(result, near, by[near] - 1)
        result[rose] &= lowest_bits((marks + by)[rose], window)
    return result


def _shifted_bits(rows: Rows, by: Numbers) -> Rows:
    """Each row moved up by 0 to 8 x width bits."""
    width = rows.shape[1]
    # One zero byte on the left gives "the byte below byte 0", one behind it all gives "far outside".
    padded = np.zeros((len(rows), width + 2), np.uint16)
    padded[:, 1 : width + 1] = rows
    source = 1 + np.arange(width, dtype=np.int64) - (by >> 3)[:, None]
    bit = (by & 7).astype(np.uint16)[:, None]
    upper = np.take_along_axis(padded, np.where(source > 0, source, width + 1), axis=1)
    lower = np.take_along_axis(padded, np.where(source > 1, source - 1, width + 1), axis=1)
    moved: Rows = (((upper << bit) | (lower >> (8 - bit))) & 0xFF).astype(np.uint8)
    return moved


def set_bits(rows: Rows, of: Numbers, bits: Numbers) -> None:
    """Set bit `bits[k]` of row `of[k]`, in place; a row may come several times."""
    np.bitwise_or.at(rows, (of, bits >> 3), np.left_shift(1, bits & 7).astype(np.uint8))


def test_bits(rows: Rows, of: Numbers, bits: Numbers) -> npt.NDArray[np.bool_]:
    """Whether bit `bits[k]` of row `of[k]` is set."""
    octets: Rows = rows[of, bits >> 3]
    octets >>= (bits & 7).astype(np.uint8)
    return np.asarray(octets & 1, np.bool_)
