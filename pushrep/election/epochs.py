"""Where two logs diverge, by their leader epochs (KIP-101, KIP-279), and which of two logs is ahead.

    leader   (1, 0) ........ (4, 7) .........            epochs of the records: 1 1 1 1 1 1 1 4 4 4
    replica  (1, 0) ..... (3, 5) ...                                            1 1 1 1 1 3 3 3
                          ^ 5: the replica's largest epoch at or below 4 is 3, which the leader lacks; the leader's
                               largest at or below 3 is 1, its end there 7, the replica's 5: go on at min(7, 5)

It is correct because only one member appends in an epoch, so two logs with the same epoch before an offset are equal
below that offset. It ends because every question goes back by at least one record.
"""

from bisect import bisect_right
from typing import NamedTuple

from pushrep.records.leader_epochs import LeaderEpochs

NO_EPOCH = -1


class EpochEnd(NamedTuple):
    """An epoch and its end offset. Of two logs the one with the greater EpochEnd is ahead."""

    epoch: int
    end_offset: int


class LogEnds(NamedTuple):
    """A log's start, end and epochs, as replication compares them."""

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
        """The log after a cut at `end_offset`.

        An epoch that starts exactly there stays in the list: records below the cut may be safe only because of it (see
        `granted_end`).
        """
        if end_offset >= self.log_end_offset:
            return self
        return self._replace(log_end_offset=end_offset, leader_epochs=self.leader_epochs.cut_from(end_offset + 1))


def step_back(ours: LogEnds, theirs: EpochEnd) -> int:
    """The next offset to ask about, after the other log's answer `theirs` to an epoch that it does not have there."""
    if theirs.epoch == NO_EPOCH:  # its log starts there; records before were below a watermark, so they are the same
        return max(ours.log_start_offset, min(theirs.end_offset, ours.log_end_offset))
    return max(ours.log_start_offset, min(theirs.end_offset, ours.end_at_or_below(theirs.epoch).end_offset))


def common_end(ours: LogEnds, theirs: LogEnds) -> int:
    """The end of the equal part of two logs: where pushing goes on, or a cut has to be made."""
    lowest = max(ours.log_start_offset, theirs.log_start_offset)
    offset = min(ours.log_end_offset, theirs.log_end_offset)
    while offset > lowest and (epoch := ours.epoch_before(offset)) != theirs.epoch_before(offset):
        before = offset
        offset = step_back(ours, theirs.end_at_or_below(epoch))
        assert offset < before, "an epoch that differs ends earlier in one of the two logs"
    return offset


class Unfenced(NamedTuple):
    """Records appended with acks=LOCAL while too few members answered, which do not count yet.

    granted: the log's newest granted epoch and its end, before the first unfenced epoch. It is stored, because an epoch
    without a record is replaced in the list by the next one that starts there.
    """

    start_offset: int
    granted: EpochEnd


def granted_end(log: LogEnds, unfenced: Unfenced | None) -> EpochEnd:
    """(newest granted epoch in the log, its end), which candidates compare. The log with the greatest holds all that m
    members held.
    """
    if unfenced is None:
        return EpochEnd(log.leader_epochs.latest_epoch, log.log_end_offset)
    if log.log_end_offset >= unfenced.granted.end_offset:
        return unfenced.granted
    # A power cut took some of it.
    return EpochEnd(log.end_at_or_below(unfenced.granted.epoch).epoch, log.log_end_offset)


def marked_unfenced(log: LogEnds, unfenced: Unfenced | None) -> Unfenced:
    """The mark that has to be on disk before an epoch without a grant begins at the log's end."""
    if unfenced is not None and unfenced.start_offset <= log.log_end_offset:
        return unfenced
    return Unfenced(log.log_end_offset, granted_end(log, unfenced))


def without_unfenced(log: LogEnds, unfenced: Unfenced | None) -> LogEnds:
    """The log after its unfenced end was cut aside; its newest granted epoch is in the list again."""
    if unfenced is None:
        return log
    kept = log.cut(unfenced.start_offset)
    epochs, (epoch, end_offset) = kept.leader_epochs.cut_from(unfenced.start_offset), unfenced.granted
    if epoch > epochs.latest_epoch and kept.log_end_offset >= end_offset:
        epochs = epochs.assigned(epoch, end_offset)
    return kept._replace(leader_epochs=epochs)
