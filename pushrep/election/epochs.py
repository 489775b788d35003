"""Where two logs part, by the epochs that wrote them (KIP-101, KIP-279), and which of two logs is ahead.

    leader   (1, 0) ........ (4, 7) .........            epochs of the records: 1 1 1 1 1 1 1 4 4 4
    replica  (1, 0) ..... (3, 5) ...                                            1 1 1 1 1 3 3 3
                          ^ 5: the replica's largest epoch at or below 4 is 3, which the leader lacks; the leader's
                               largest at or below 3 is 1, its end there 7, the replica's 5: go on at min(7, 5)

What makes it right: within an epoch one member appends, so two logs with the same epoch before an offset are equal
below that offset. Every question goes back by a record at least, so it ends.
"""

from bisect import bisect_right
from typing import NamedTuple

from pushrep.records.leader_epochs import LeaderEpochs

NO_EPOCH = -1


class EpochEnd(NamedTuple):
    """An epoch and the offset behind its last record. Of two logs the greater one is ahead."""

    epoch: int
    end_offset: int


class LogEnds(NamedTuple):
    """A log as far as replication compares it: both its ends and its epochs."""

    log_start_offset: int
    log_end_offset: int
    leader_epochs: LeaderEpochs

    def epoch_before(self, offset: int) -> int:
        """Epoch of the record before `offset`, -1 where the log does not hold it."""
        if not self.log_start_offset < offset <= self.log_end_offset:
            return NO_EPOCH
        return self.leader_epochs.epoch_of(offset - 1)

    def end_at_or_below(self, epoch: int) -> EpochEnd:
        """The largest epoch here that is not above `epoch`, and its end; (-1, the log's start) if there is none."""
        entries = self.leader_epochs.entries
        above = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if above == 0:
            return EpochEnd(NO_EPOCH, self.log_start_offset)
        return EpochEnd(entries[above - 1][0], entries[above][1] if above < len(entries) else self.log_end_offset)

    def cut(self, end_offset: int) -> "LogEnds":
        """As it is after a cut at `end_offset`. An epoch that starts right there stays in the list.

        It was in the log before, and what is below the cut may be safe only by that (see `granted_end`).
        """
        if end_offset >= self.log_end_offset:
            return self
        return self._replace(log_end_offset=end_offset, leader_epochs=self.leader_epochs.cut_from(end_offset + 1))


def step_back(ours: LogEnds, theirs: EpochEnd) -> int:
    """Where to ask again after `theirs`, the other log's answer to a previous epoch that it does not have there."""
    if theirs.epoch == NO_EPOCH:  # its log starts there; what was before lay below a watermark, and is the same
        return max(ours.log_start_offset, min(theirs.end_offset, ours.log_end_offset))
    return max(ours.log_start_offset, min(theirs.end_offset, ours.end_at_or_below(theirs.epoch).end_offset))


def common_end(ours: LogEnds, theirs: LogEnds) -> int:
    """Up to where the two logs are equal, as far as both hold it: where push goes on, or a cut has to be made."""
    lowest = max(ours.log_start_offset, theirs.log_start_offset)
    offset = min(ours.log_end_offset, theirs.log_end_offset)
    while offset > lowest and (epoch := ours.epoch_before(offset)) != theirs.epoch_before(offset):
        before = offset
        offset = step_back(ours, theirs.end_at_or_below(epoch))
        assert offset < before, "an epoch that differs ends earlier in one of the two logs"
    return offset


class Unfenced(NamedTuple):
    """Appended with acks=LOCAL while too few members answered: kept beside the grant, for nothing of it counts yet.

    granted: the log's newest granted epoch and its end, from before the first unfenced number was taken. It has to be
    kept, because an epoch that holds no record gives its place in the list to the next one that starts there.
    """

    start_offset: int
    granted: EpochEnd


def granted_end(log: LogEnds, unfenced: Unfenced | None) -> EpochEnd:
    """(newest granted epoch in the log, its end): what candidates compare. The greatest holds what m members held."""
    if unfenced is None:
        return EpochEnd(log.leader_epochs.latest_epoch, log.log_end_offset)
    if log.log_end_offset >= unfenced.granted.end_offset:
        return unfenced.granted
    # A power cut took some of it.
    return EpochEnd(log.end_at_or_below(unfenced.granted.epoch).epoch, log.log_end_offset)


def marked_unfenced(log: LogEnds, unfenced: Unfenced | None) -> Unfenced:
    """What has to be on disk before an epoch without a grant begins at the log's end."""
    if unfenced is not None and unfenced.start_offset <= log.log_end_offset:
        return unfenced
    return Unfenced(log.log_end_offset, granted_end(log, unfenced))


def without_unfenced(log: LogEnds, unfenced: Unfenced | None) -> LogEnds:
    """The log as it is once its unfenced end was set aside; its newest granted epoch stands in the list again."""
    if unfenced is None:
        return log
    kept = log.cut(unfenced.start_offset)
    epochs, (epoch, end_offset) = kept.leader_epochs.cut_from(unfenced.start_offset), unfenced.granted
    if epoch > epochs.latest_epoch and kept.log_end_offset >= end_offset:
        epochs = epochs.assigned(epoch, end_offset)
    return kept._replace(leader_epochs=epochs)
