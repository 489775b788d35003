"""The leader of a partition, against the contract's sentences, computed again from the history."""

from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant, Member
from pushrep.election.leader import HighWatermarkMoved, Joined, Left, PartitionLeader, SessionEnded
from pushrep.election.messages import PushSessionEndReason
from pushrep.election.push_session import SessionId
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult

TP = TopicIdPartition(UUID(int=2), "t", 0)

LEADER, LAG_MAX_MS = 0, 1_000
REPLICAS = st.sampled_from([1, 2, 3])


class Leading(RuleBasedStateMachine):
    """Three members and one that is not listed; replicas accept or refuse as hypothesis likes."""

    @initialize(start=st.integers(0, 5), watermark=st.integers(0, 5), m=st.integers(1, 3), flushed_only=st.booleans())
    def lead(self, start, watermark, m, flushed_only):
        self.grant = Grant(
            outbox_id=UUID(int=1), epoch=256, leader=LEADER, members=tuple(Member(index) for index in range(3)),
            min_insync_replicas=m, members_epoch=0, pid_epoch=0, topic_id=UUID(int=2), topic="t", partitions=1,
            carrier="key",
        )  # fmt: skip
        epochs = LeaderEpochs(((0, 0), (256, start))) if start else LeaderEpochs(((256, 0),))
        self.start, self.end, self.flushed, self.flushed_only = start, start, start, flushed_only
        self.watermark, self.now_ms, self.sessions = min(start, watermark), 0, 0
        self.leader = PartitionLeader(
            self.grant,
            LogEnds(0, start, epochs),
            flushed_offset=start,
            high_watermark=self.watermark,
            flushed_only=flushed_only,
            now_ms=0,
            replica_lag_max_ms=LAG_MAX_MS,
        )
        self.in_sync = {LEADER}
        self.live, self.held, self.sent, self.ended = {}, {}, {}, []
        self.appended = [(0, 0)] if start else []
        self.take(self.leader.start())
        self.model_watermark()

    def model_watermark(self):
        """min over the in-sync set, while it has m members; monotone; nothing below the epoch's start counts."""
        if len(self.in_sync & {0, 1, 2}) < self.grant.min_insync_replicas:
            return
        own = self.flushed if self.flushed_only else self.end
        held = min([own, *(self.held[replica] for replica in self.in_sync - {LEADER})])
        if held >= self.start:
            self.watermark = max(self.watermark, held)

    def take(self, effects):
        moved = [effect.high_watermark for effect in effects if isinstance(effect, HighWatermarkMoved)]
        assert moved == sorted(set(moved)), "each rise is said once, in order"
        self.ended += [effect.id for effect in effects if isinstance(effect, SessionEnded)]
        return effects

    @rule(count=st.integers(1, 4), ms=st.integers(0, 300))
    def append(self, count, ms):
        self.now_ms += ms
        self.appended.append((self.end, self.now_ms))
        self.end += count
        self.take(self.leader.on_append(self.end, self.now_ms))
        self.model_watermark()

    @rule()
    def flush(self):
        self.flushed = self.end
        self.take(self.leader.on_flush(self.end))
        self.model_watermark()

    @rule(replica=REPLICAS, end=st.integers(0, 8))
    def start_session(self, replica, end):
        self.sessions += 1
        session = SessionId(256, 1, self.sessions)
        effects = self.take(self.leader.start_session(replica, session, LogEnds(0, end, LeaderEpochs(((0, 0),)))))
        assert (replica in self.live) == any(isinstance(effect, SessionEnded) for effect in effects)
        self.forget(replica)
        self.live[replica], self.sent[replica] = session, []
        assert self.leader.start_session(replica, session, LogEnds(0, 0, LeaderEpochs())) == [], "S4: not newer"

    def forget(self, replica):
        self.live.pop(replica, None)
        self.held.pop(replica, None)
        self.sent.pop(replica, None)
        self.in_sync.discard(replica)
        self.model_watermark()

    @rule(replica=REPLICAS, count=st.integers(0, 4))
    def send(self, replica, count):
        if replica in self.live:
            progress = self.leader.sessions[replica]
            offset = progress.next_offset
            end = min(self.end, offset + count)
            sent, request = self.leader.request(replica, offset, end, TP)
            assert request.append_offset == offset
            assert request.high_watermark == self.watermark
            assert request.epoch_start_offset == self.start
            assert request.previous_epoch == (-1 if offset == 0 else 256 if offset > self.start else 0)
            self.sent[replica].append((sent.sequence, offset, end))

    @rule(replica=REPLICAS, beyond=st.integers(0, 5), unflushed=st.integers(0, 3), late=st.booleans())
    def accept(self, replica, beyond, unflushed, late):
        """The oldest request is accepted; the replica may hold more records than it reported, from another leader."""
        if not self.sent.get(replica):
            return
        sequence, _, end = self.sent[replica].pop(0)
        result = AppendRecordsResult(log_end_offset=end + beyond, flushed_offset=max(0, end + beyond - unflushed))
        if late:
            stale = SessionId(256, 1, 0)
            assert self.leader.on_answer(replica, stale, sequence, result) == [], "E3: not of this session"
        self.take(self.leader.on_answer(replica, self.live[replica], sequence, result))
        counted = min(end, result.flushed_offset if self.flushed_only else result.log_end_offset)
        self.held[replica] = max(self.held.get(replica, 0), counted)
        if replica in {1, 2} and self.held[replica] >= max(self.watermark, self.start):
            self.in_sync.add(replica)
        self.model_watermark()
        assert self.leader.on_answer(replica, self.live[replica], sequence, result) == [], "an answer counts once"

    @rule(
        replica=REPLICAS,
        error=st.sampled_from([ErrorCode.STALE_SESSION, ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.LOG_OFFLINE]),
    )
    def refuse(self, replica, error):
        if self.sent.get(replica):
            effects = self.take(
                self.leader.on_answer(
                    replica, self.live[replica], self.sent[replica][0][0], AppendRecordsResult(error_code=error)
                )
            )
            assert [type(effect) for effect in effects][:1] == [SessionEnded]
            self.forget(replica)

    @rule(replica=REPLICAS)
    def stop(self, replica):
        ends = self.take(self.leader.end_session(replica, PushSessionEndReason.PUSH_DISABLED))
        assert bool(ends) == (replica in self.live), "E1: a second call is a no-op"
        self.forget(replica)

    @rule(replica=REPLICAS)
    def disconnect(self, replica):
        before = [offset for _, offset, _ in self.sent.get(replica, [])]
        self.leader.on_disconnect(replica)
        if before:
            assert self.leader.sessions[replica].next_offset == before[0], "the same again, from the oldest on"
            self.sent[replica] = []

    @rule(ms=st.sampled_from([1, 500, 2_000]))
    def tick(self, ms):
        self.now_ms += ms
        effects = self.take(self.leader.on_tick(self.now_ms))
        left = {effect.replica for effect in effects if isinstance(effect, Left)}
        assert not any(isinstance(effect, Joined | SessionEnded) for effect in effects)
        for replica in sorted(self.in_sync - {LEADER}):
            age = self.age(replica)
            if age is not None and age > LAG_MAX_MS:
                assert replica in left, f"{replica} lags by {age} ms"
            if replica in left:
                assert age is not None, f"{replica} has acknowledged everything: an idle one does not age"
                assert age > LAG_MAX_MS - 50, f"{replica} lags by {age} ms only"
        for replica in sorted(left):  # one after the other: what the rest of the set holds is acknowledged in between
            self.in_sync.discard(replica)
            self.model_watermark()

    def age(self, replica):
        since = [at for base, at in self.appended if base <= self.held[replica]]
        return self.now_ms - since[-1] if self.held[replica] < self.end else None

    @invariant()
    def agrees(self):
        if hasattr(self, "leader"):
            assert self.leader.in_sync == self.in_sync
            assert self.leader.high_watermark == self.watermark
            assert self.leader.may_append_all == (len(self.in_sync & {0, 1, 2}) >= self.grant.min_insync_replicas)
            assert len(self.ended) == len(set(self.ended)), "E2: a session's end is said once"

    @precondition(lambda self: hasattr(self, "leader"))
    @invariant()
    def watermark_is_held(self):
        assert self.leader.high_watermark <= self.end


TestLeading = Leading.TestCase
TestLeading.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
