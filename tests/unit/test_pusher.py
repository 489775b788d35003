"""What a pusher sends next: from memory, from the log, at the end of a session; over a log on disk, without sockets."""

import gc
from uuid import UUID

import pytest

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant, Member
from pushrep.election.leader import PartitionLeader
from pushrep.election.messages import PushSessionEndReason
from pushrep.log import SegmentLog
from pushrep.records import encode_batch
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.led_partition import LedPartition
from pushrep.replicate.pusher import Buffered, MemoryTracker, PendingWork, Pusher
from pushrep.replicate.settings import Replica
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult
from pushrep.wire.values import FileSlice

TP = TopicIdPartition(UUID(int=2), "t", 0)
EPOCH, MEMORY = 256, 1000


class Pushing:
    """A led log and the pusher of its one replica; what a partition needs of a manager is done here at once."""

    def __init__(self, log):
        self.log, self.memory = log, MemoryTracker(MEMORY)
        grant = Grant(
            outbox_id=UUID(int=1), epoch=EPOCH, leader=0, members=(Member(0), Member(1)), min_insync_replicas=2,
            members_epoch=0, pid_epoch=0, topic_id=TP.topic_id, topic="t", partitions=1, carrier="key",
        )  # fmt: skip
        leader = PartitionLeader(
            grant, LogEnds(0, log.log_end_offset, LeaderEpochs([(EPOCH, 0)])), flushed_offset=log.log_end_offset,
            high_watermark=0, flushed_only=False, now_ms=0,
        )  # fmt: skip
        self.led = LedPartition(TP, log, leader, self, lambda *_: None)
        none = LogEnds(0, 0, LeaderEpochs([]))
        self.session = self.led.start_session(Replica(1, Address("127.0.0.1", 1)), 1, 1, none)
        self.pusher = Pusher(self.session, self.memory)

    def wake(self, *_, **__): ...
    def record_follower_not_caught_up(self, *_): ...
    def record_refusal(self, *_): ...

    def on_leader_append(self, _tp, _replica_ids, append_offset, records):
        self.offer(append_offset, records)

    def offer(self, append_offset, records):
        held = self.memory.hold(append_offset, records[-1].header.next_offset, tuple(one.data for one in records), 1)
        if held is not None:
            self.pusher.offer(held)

    def append(self, count, size=100):
        """So many batches of one record."""
        for _ in range(count):
            at = self.log.log_end_offset
            self.led.on_append(at, [appended(self.log, size)], 0)

    def next(self, bytes_max=1 << 20):
        """(the request's part, what it is answered by)."""
        part, sent, _ = self.pusher.next_part(bytes_max, file_bytes_max=1 << 20)
        return part, sent

    def answer(self, sent, end, code=ErrorCode.NONE):
        self.pusher.on_result(sent, AppendRecordsResult(error_code=code, log_end_offset=end, flushed_offset=end))

    def begin(self):
        """The first success, of a request without records."""
        part, sent = self.next()
        assert (part.append_offset, part.records) == (0, ())
        self.answer(sent, 0)
        return self

    def pushed(self):
        """The offset after each request that is sent now; nothing is answered."""
        ends = []
        while self.pusher.has_something():
            self.next()
            ends.append(self.sent_to)
        return ends

    @property
    def sent_to(self):
        return self.led.leader.sessions[1].next_offset


def appended(log, size=100):
    """One batch of one record, as it is in the log now."""
    batch = encode_batch([b"x" * size], timestamps_ms=1)
    batch.stamp(log.log_end_offset, EPOCH)
    log.append_as_is([batch])
    return batch


@pytest.fixture
def started(tmp_path):
    """A session before its first success."""
    with SegmentLog.open(tmp_path / "t-0", has_replicas=True, log_id=TP.topic_id) as log:
        yield Pushing(log)


@pytest.fixture
def pushing(started):
    return started.begin()


@pytest.fixture
def behind(tmp_path):
    """A session before its first success, whose replica lacks ten records of an earlier leader."""
    with SegmentLog.open(tmp_path / "t-0", has_replicas=True, log_id=TP.topic_id) as log:
        for _ in range(10):
            appended(log)
        yield Pushing(log)


def test_a_transition_is_sent_a_little_first_and_new_records_follow_once_it_is_acknowledged(behind):
    """The first request finds out whether the logs agree; of what they disagree about much would be sent in vain."""
    behind.append(1)
    _, sent = behind.next(200)
    assert 0 < behind.sent_to < 10, "the first request carried all"
    assert behind.pusher.pending_work() is PendingWork.NOTHING, "one at a time"
    behind.answer(sent, behind.sent_to)
    _, sent = behind.next(200)
    assert behind.sent_to == 10
    assert behind.pusher.next_part(1 << 20, file_bytes_max=1 << 20) is None, "it goes on before the transition is there"
    behind.answer(sent, 10)
    assert behind.pushed() == [11]


def test_a_small_read_of_the_log_holds_no_open_file_and_a_large_one_is_not_copied(pushing):
    for size, kind in ((2_000, bytes), (100_000, FileSlice)):
        pushing.append(1, size)
        part, sent = pushing.next(1 << 20)
        assert isinstance(part.records[0], kind), f"{size} bytes from the log"
        pushing.answer(sent, pushing.sent_to)


def test_records_of_a_file_that_came_damaged_are_checked_before_they_are_sent_again(pushing):
    """A slice of the file would send the same bytes unread."""
    pushing.append(1, 100_000)
    part, sent = pushing.next()
    assert isinstance(part.records[0], FileSlice)
    pushing.answer(sent, 0, ErrorCode.CORRUPT_MESSAGE)
    part, _ = pushing.next()
    assert isinstance(part.records[0], bytes)


def test_a_watermark_waits_no_longer_once_a_request_carries_it(pushing):
    pushing.append(1)
    pushing.pusher.watermark_since_ms = 5
    pushing.next()
    assert pushing.pusher.watermark_since_ms is None


def test_evicted_records_take_no_place_in_the_queue_of_a_replica_that_is_away(pushing):
    pushing.append(200)
    gc.collect()
    assert sum(isinstance(one, Buffered) for one in gc.get_objects()) < 30, "what was evicted is kept in the queue"
    assert pushing.memory.used_bytes <= MEMORY
    ends = pushing.pushed()
    assert ends[-1] == 200, "what is not in memory was not sent"


def test_records_that_come_after_the_end_of_a_session_are_held_for_nobody(pushing):
    pushing.append(2)
    pushing.pusher.end(PushSessionEndReason.SHUTDOWN)
    assert pushing.memory.used_bytes == 0, "records of an ended session are held"
    batch = encode_batch([b"x"], timestamps_ms=1)
    pushing.offer(2, [batch])
    assert pushing.memory.used_bytes == 0, "records after the end of the session are held"


def test_the_end_of_a_session_is_sent_once_and_then_nothing(pushing):
    pushing.append(2)
    assert pushing.pusher.end(PushSessionEndReason.SHUTDOWN), "the replica gets an end request"
    assert pushing.pusher.pending_work() is PendingWork.REQUEST
    part, sent = pushing.next()
    assert (part.end_session_reason, part.records) == (PushSessionEndReason.SHUTDOWN, ())
    assert (pushing.pusher.pending_work(), pushing.pusher.end_sent.done()) == (PendingWork.NOTHING, False)
    pushing.answer(sent, 0)
    assert pushing.pusher.end_sent.result(0)


@pytest.mark.parametrize("how", ["not told", "gone"])
def test_an_end_that_the_replica_is_not_told_is_known_at_once(pushing, how):
    """A stale session has nobody to tell, and a lost connection tells nobody."""
    reasons = {"not told": PushSessionEndReason.STALE_REPLICA_EPOCH, "gone": PushSessionEndReason.SHUTDOWN}
    is_sent = pushing.pusher.end(reasons[how])
    if is_sent:
        pushing.pusher.on_disconnect()
    assert (is_sent, pushing.pusher.end_sent.result(0)) == (how == "gone", False)
    assert pushing.pusher.pending_work() is PendingWork.NOTHING


def test_a_session_that_ends_while_the_log_is_read_sends_its_end_and_no_records(pushing, monkeypatch):
    pushing.append(20)
    slices = SegmentLog.slices

    def ended_by_then(log):
        pushing.pusher.end(PushSessionEndReason.SHUTDOWN)
        return slices(log)

    monkeypatch.setattr(SegmentLog, "slices", ended_by_then)
    assert pushing.pusher.next_part(1 << 20, file_bytes_max=1 << 20) is None
    assert pushing.next()[0].end_session_reason == PushSessionEndReason.SHUTDOWN


def test_a_request_without_records_that_came_damaged_is_sent_again_without_records(started):
    _, sent = started.next()
    started.answer(sent, 0, ErrorCode.CORRUPT_MESSAGE)
    part, sent = started.next()
    assert (part.append_offset, part.records) == (0, ())
    started.answer(sent, 0)
    assert started.session.ended is None


def test_records_that_came_damaged_are_read_from_the_log_and_sent_once_more(pushing):
    pushing.append(1)
    first, sent = pushing.next()
    assert isinstance(first.records[0], bytearray | memoryview), "they were in memory"
    pushing.answer(sent, 0, ErrorCode.CORRUPT_MESSAGE)
    again, sent = pushing.next()
    assert isinstance(again.records[0], bytes), "what was refused was sent again as it was"
    assert b"".join(again.records) == b"".join(first.records)
    assert pushing.pusher.pending_work() is PendingWork.NOTHING, "one at a time"
    pushing.answer(sent, 1)
    assert pushing.memory.used_bytes == 0, "what is acknowledged is held"


def test_records_in_flight_are_sent_again_from_memory_after_a_lost_connection(pushing):
    pushing.append(3)
    assert pushing.pushed() == [3]
    assert not pushing.pusher.has_something()
    pushing.pusher.on_disconnect()
    part, sent = pushing.next()
    assert (part.append_offset, pushing.sent_to) == (0, 3)
    assert not any(isinstance(one, FileSlice | bytes) for one in part.records), "the log was read"
    pushing.answer(sent, 3)
    assert pushing.memory.used_bytes == 0


def test_a_new_connection_gets_a_request_even_if_there_is_nothing_new(pushing):
    """The replica may be a new process that knows of no session."""
    pushing.append(1)
    _, sent = pushing.next()
    pushing.answer(sent, 1)
    assert pushing.pushed() == [1], "the watermark"
    pushing.pusher.on_disconnect()
    assert pushing.pushed() == [1]


def test_a_success_ends_a_row_of_failures(pushing):
    pushing.append(1)
    pushing.pusher.failures = 3
    _, sent = pushing.next()
    pushing.answer(sent, 0, ErrorCode.REQUEST_TIMED_OUT)
    assert pushing.pusher.failures == 3
    _, sent = pushing.next()
    pushing.answer(sent, 1)
    assert pushing.pusher.failures == 0


def test_an_answer_to_an_ended_session_releases_nothing_and_resets_nothing(pushing):
    pushing.append(1)
    pushing.pusher.failures = 3
    _, sent = pushing.next()
    pushing.pusher.end(PushSessionEndReason.STALE_REPLICA_EPOCH)
    pushing.answer(sent, 1)
    assert (pushing.pusher.failures, pushing.session.log_end_offset) == (3, 0)


def test_a_watermark_was_sent_alone_too_soon_if_records_follow_within_the_time_it_should_have_waited(pushing):
    for alone_ms, expected in ((100, 100), (150, None), (None, None)):
        pushing.pusher.alone_ms = alone_ms
        pushing.pusher.sent_records(160, 50)
        assert pushing.pusher.alone_ms == expected
