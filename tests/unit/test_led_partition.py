"""A led partition: the thread shell around the rules of leading."""

from uuid import UUID

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant, Member
from pushrep.election.leader import PartitionLeader
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.led_partition import LedPartition
from pushrep.topic_id_partition import TopicIdPartition

TP = TopicIdPartition(UUID(int=2), "t", 0)


class SlowLog:
    """A log whose watermark is looked at while it is being raised."""

    def __init__(self):
        self.high_watermark, self.log_start_offset, self.while_raised = 0, 0, lambda: None

    def advance_high_watermark(self, offset):
        self.while_raised()
        self.high_watermark = offset


def test_who_waits_is_called_back_only_when_the_log_shows_its_records():
    """The rules are updated before the log: until the log is, another thread must not acknowledge records that no
    reader finds.
    """
    log, told = SlowLog(), []
    grant = Grant(
        outbox_id=UUID(int=1), epoch=256, leader=0, members=(Member(0),), min_insync_replicas=1, members_epoch=0,
        pid_epoch=0, topic_id=TP.topic_id, topic="t", partitions=1, carrier="key",
    )  # fmt: skip
    ends = LogEnds(0, 4, LeaderEpochs([(0, 0), (256, 4)]))
    leader = PartitionLeader(grant, ends, flushed_offset=4, high_watermark=0, flushed_only=False, now_ms=0)
    led = LedPartition(TP, log, leader, None, lambda *_: None)

    def look():
        assert led.leader.high_watermark == 4, "the rules are ahead of the log"
        led.when_replicated(4, lambda error: told.append((error, log.high_watermark)))
        led.complete_waiting()
        assert told == [], "acknowledged before a reader of the log could find it"

    log.while_raised = look
    led.start()
    assert told == [(None, 4)]
    led.when_replicated(3, lambda error: told.append((error, log.high_watermark)))
    assert told[1:] == [(None, 4)]
