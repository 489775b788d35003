"""What a replica cuts of records that were appended without a grant."""

from uuid import UUID

from pushrep.election.epochs import LogEnds
from pushrep.log import SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.replica import cut_unfenced


def append(log, epoch):
    batch = encode_batch([b"x"], timestamps_ms=1)
    batch.stamp(log.log_end_offset, epoch)
    log.append_as_is([batch])


def test_a_granted_epoch_without_a_record_is_back_once_the_ungranted_records_in_its_place_are_cut(tmp_path):
    """A leader of that epoch goes on there; without it the log would count as one of an older leader."""
    with SegmentLog.open(tmp_path / "t-0", has_replicas=True, log_id=UUID(int=2)) as log:
        append(log, 1)
        log.begin_epoch(3, 1)
        granted = LogEnds(0, 1, log.leader_epochs)
        assert granted.leader_epochs.latest_epoch == 3
        append(log, 5)
        assert [epoch for epoch, _ in log.leader_epochs.entries] == [1, 5], "the ungranted one replaced it"
        cut_unfenced(log, granted)
        assert (log.log_end_offset, log.leader_epochs) == (1, granted.leader_epochs)
        assert len(list(log.path.glob("*.cut"))) == 1, "what is cut is kept for an operator"
