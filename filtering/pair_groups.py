"""Rows brought together by pair (PID, source partition), each pair's rows still in log order.

Kafka hands a partition's records out in runs of one producer's batch, so runs are grouped, not rows. The runs are
sorted by a 16-bit hash of their pair, for which numpy's stable sort is a radix sort; if two pairs share a hash, by a
32-bit one; if even these meet, by the pairs themselves. One pair alone needs no sort at all.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

# Odd multipliers (2^64 / golden ratio, and xxHash's second prime) spread PIDs and small partition numbers
# over the upper bits. A poor spread costs time, never correctness.
_PID_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_PARTITION_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)


Column = TypeVar("Column", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PairGroups:
    """Pair k owns the places `starts[k] : starts[k] + sizes[k]` of the rows put together by `order`.

    `order` is None where the rows lie together already.
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
    """Group n rows by (pid, partition). Each pair comes once, in no particular order of pairs."""
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
    # Rows of a run keep their distance, so each place is its run's first row plus the steps into the run.
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
