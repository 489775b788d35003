"""Which leader epoch wrote which offsets: the value behind truncation by epoch (KIP-101, KIP-279).

    epochs      3        5            6
    offsets  |--------|------------|-------->      an epoch ends where the next one starts, the last at the log's end
             0        40           95       LEO
    entries  (3, 0)   (5, 40)      (6, 95)

Invariant: epochs and start offsets both ascend strictly. The value is immutable; a change returns a new one. The log
stores it in a file, and replication compares it.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from pushrep.records.header import OFFSET_MAX

EPOCH_MAX = 2**31 - 1
UNDEFINED = (-1, -1)
"""Kafka's answer if nothing is known: UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET."""


@dataclass(frozen=True, slots=True)
class LeaderEpochs:
    """(epoch, start offset) of every leader epoch of a log, oldest first. Raises ValueError if they do not ascend."""

    entries: tuple[tuple[int, int], ...] = ()
    latest_epoch: int = field(init=False, repr=False, compare=False)
    """The newest epoch, -1 before the first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "latest_epoch", self.entries[-1][0] if self.entries else -1)  # asked at each append
        for epoch, start in self.entries:
            if not (0 <= epoch <= EPOCH_MAX and 0 <= start <= OFFSET_MAX):
                raise ValueError(f"no leader epoch: {epoch} from offset {start}")
        for before, after in pairwise(self.entries):
            if not (before[0] < after[0] and before[1] < after[1]):
                raise ValueError(f"leader epochs must ascend with their offsets: {after} follows {before}")

    def epoch_of(self, offset: int) -> int:
        """The epoch that wrote `offset`, -1 if it lies below the first entry."""
        if self.entries and offset >= self.entries[-1][1]:
            return self.entries[-1][0]  # what is pushed and appended nearly always is of the newest
        at = bisect_right(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[at - 1][0] if at else -1

    def contradiction(self, offset: int, epoch: int) -> str | None:
        """Why a batch at `offset` can't be of `epoch`, as text; None if it can, or if the list begins after it.

        A batch of -1 has no epoch: in the list it is 0.
        """
        newest = self.entries[-1] if self.entries else (epoch, offset)
        known = newest[0] if offset >= newest[1] else self.epoch_of(offset)
        if known in {epoch, -1} or known == 0 > epoch:
            return None
        return f"leader epoch {epoch}, the checkpoint says {known}"

    def end_of(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(largest epoch at or below `epoch`, where it ends): up to there a follower with that epoch agrees with us.

        The answer of OffsetsForLeaderEpoch: an unknown newer epoch is UNDEFINED; one older than the first entry
        answers itself and the first entry's start (Kafka's LeaderEpochFileCache.endOffsetFor).
        """
        if epoch < 0 or epoch > self.latest_epoch:
            return UNDEFINED
        if epoch == self.latest_epoch:
            return epoch, log_end_offset
        above = bisect_right(self.entries, epoch, key=lambda entry: entry[0])
        return (self.entries[above - 1][0] if above else epoch), self.entries[above][1]

    def assigned(self, epoch: int, start_offset: int) -> Self:
        """The list with a batch of `epoch` at `start_offset`; the same object if nothing changes.

        Entries at or above the epoch or the offset are replaced, because the newest write is the log.
        """
        if self.entries and epoch == self.latest_epoch and start_offset >= self.entries[-1][1]:
            return self
        kept = tuple(entry for entry in self.entries if entry[0] <= epoch and entry[1] < start_offset)
        if kept and kept[-1][0] == epoch:  # the epoch goes on; a newer one without a record is removed
            return type(self)(kept)
        return type(self)((*kept, (epoch, start_offset)))

    def cut_from(self, end_offset: int) -> Self:
        """Without the epochs that start at or above `end_offset`, for a log that was cut there."""
        count = bisect_left(self.entries, end_offset, key=lambda entry: entry[1])
        return self if count == len(self.entries) else type(self)(self.entries[:count])

    def cut_below(self, start_offset: int) -> Self:
        """Without the epochs that end at or below `start_offset`; the one that holds it then starts there."""
        count = bisect_right(self.entries, start_offset, key=lambda entry: entry[1])
        if count == 0 or (count == 1 and self.entries[0][1] == start_offset):
            return self
        return type(self)(((self.entries[count - 1][0], start_offset), *self.entries[count:]))
