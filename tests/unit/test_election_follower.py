"""`The replica's rules`: every row of the table, every check and their order, the effects' order."""

from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.election.epochs import EpochEnd, LogEnds, Unfenced
from pushrep.election.follower import (
    FOLLOWER_RULES,
    LEADER_CHECKS,
    SESSION_CHECKS,
    Answer,
    Append,
    BeginEpoch,
    CloseSession,
    CutAt,
    Flush,
    GoOffline,
    OpenSession,
    ReplicaSession,
    ReplicaState,
    RequestFinding,
    SetAside,
    SetHighWatermark,
    SetLogStart,
    SetUnfencedAside,
    StoreEpoch,
    Truncate,
    follow,
    storage_error,
)
from pushrep.election.grants import EPOCH_JUMP_MAX, Grant, Member, next_generation
from pushrep.election.messages import AppendRecordsPartition, Batch, PushSessionEndReason
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

TP = TopicIdPartition(UUID(int=2), "t", 0)

LEADER, REPLICA_EPOCH = 256, 7  # epoch 256 is member 0's


def batch(base, epoch, count=1, tag=b""):
    return Batch(base, base + count, epoch, b"%d/%d/%d/" % (epoch, base, count) + tag)


class Log:
    """Records one by one: the epoch of each."""

    def __init__(self, epochs, start=0):
        entries = LeaderEpochs()
        for offset, epoch in enumerate(epochs, start):
            entries = entries.assigned(epoch, offset)
        self.ends = LogEnds(start, start + len(epochs), entries)
        self.epochs, self.start = epochs, start

    def batch_at(self, offset):
        inside = self.start <= offset < self.start + len(self.epochs)
        return batch(offset, self.epochs[offset - self.start]).data if inside else None


def grant(epoch=LEADER, members=3):
    return Grant(
        outbox_id=UUID(int=1), epoch=epoch, leader=epoch % 256, members=tuple(Member(i) for i in range(members)),
        min_insync_replicas=2, members_epoch=0, pid_epoch=0, topic_id=UUID(int=2), topic="t",
        partitions=1, carrier="key",
    )  # fmt: skip


def state(log, **changes):
    fields = {
        "log": log.ends, "flushed_offset": log.ends.log_end_offset, "high_watermark": log.ends.log_start_offset,
        "leader_epoch": LEADER, "replica_epoch": REPLICA_EPOCH, "grant": grant(), "session": ReplicaSession(LEADER, 1),
    }  # fmt: skip
    return ReplicaState(**fields | changes)


def request(append_offset, previous_epoch, *batches, **changes):
    fields = {
        "leader_epoch": LEADER, "replica_epoch": REPLICA_EPOCH, "session_id": 1, "epoch_start_offset": 100,
        "high_watermark": 0, "log_start_offset": 0, "tp": TP,
    }  # fmt: skip
    batches, is_whole = changes.pop("batches", batches), changes.pop("is_whole", True)
    asked = AppendRecordsPartition(append_offset=append_offset, previous_epoch=previous_epoch, **fields | changes)
    return asked.with_batches(batches, is_whole)


def effects(log, asked, **changes):
    return follow(state(log, **changes), asked, log.batch_at)


def result(done):
    assert isinstance(done[-1], Answer), f"the answer comes last: {done}"
    return done[-1].result


THREE = Log([1, 1, 1])


# ---- the table, row by row


def test_at_the_end_and_the_same_before_it_appends():
    done = effects(THREE, request(3, 1, batch(3, 1), batch(4, 2)))
    assert done[0] == Append((batch(3, 1), batch(4, 2)))
    assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.NONE, 5)


@pytest.mark.parametrize("resent", [1, 2, 3])
def test_below_the_end_with_the_same_bytes_only_the_tail_is_appended(resent):
    done = effects(THREE, request(3 - resent, 1 if resent < 3 else -1, *(batch(n, 1) for n in range(3 - resent, 5))))
    assert done[0] == Append((batch(3, 1), batch(4, 1)))
    assert result(done).log_end_offset == 5
    again = effects(THREE, request(1, 1, batch(1, 1), batch(2, 1)))
    assert [type(effect) for effect in again] == [Answer], "a resend is harmless"
    assert result(again).log_end_offset == 3


def test_another_epoch_before_it_is_answered_with_the_largest_that_is_not_above():
    log = Log([1, 1, 3, 3])
    done = effects(log, request(4, 2, batch(4, 5)))
    assert len(done) == 1
    assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.LOG_DIVERGED, 4)
    assert (result(done).epoch, result(done).epoch_end_offset) == (1, 2)
    nothing = result(effects(log, request(4, 0)))
    assert (nothing.epoch, nothing.epoch_end_offset) == (-1, 0)


@pytest.mark.parametrize("other", [batch(1, 1, tag=b"x"), batch(1, 1, count=2)])
def test_the_same_epoch_with_other_bytes_takes_the_log_offline(other):
    done = effects(THREE, request(1, 1, other))
    assert done[0] == GoOffline(RequestFinding.OTHER_BYTES)
    assert (result(done).error_code, result(done).epoch_end_offset) == (ErrorCode.LOG_DIVERGED, -1)


def test_a_batch_of_another_epoch_is_cut_where_it_begins():
    log = Log([1, 1, 1, 3, 3])
    done = effects(log, request(2, 1, batch(2, 1), batch(3, 256)), high_watermark=3)
    assert done[:2] == (Truncate(3), Append((batch(3, 256),)))
    assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.NONE, 4)


def test_never_below_its_own_watermark():
    done = effects(Log([1, 1, 1, 3, 3]), request(2, 1, batch(2, 1), batch(3, 256)), high_watermark=4)
    assert done[0] == GoOffline(RequestFinding.OTHER_EPOCH_BELOW_WATERMARK)
    assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.LOG_DIVERGED, 5)


def test_above_the_end_is_answered_with_the_end():
    done = effects(THREE, request(5, 1, batch(5, 1)))
    assert done == (Answer(result(done)),)
    assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 3)


def test_restart_above_the_end_begins_anew():
    asked = request(8, -1, batch(8, 2), restart=True, log_start_offset=8, high_watermark=9)
    done = effects(THREE, asked)
    assert done[:2] == (SetAside(8, 2), Append((batch(8, 2),)))
    assert SetHighWatermark(9) in done
    assert (result(done).log_start_offset, result(done).log_end_offset) == (8, 9)


def test_a_restart_that_was_carried_out_is_a_resend():
    log = Log([2, 2], start=8)
    done = effects(log, request(8, -1, batch(8, 2), batch(9, 2), restart=True, log_start_offset=8), high_watermark=8)
    assert [type(effect) for effect in done] == [Answer]
    assert result(done).error_code is ErrorCode.NONE


def test_a_restart_does_not_set_aside_what_goes_on_like_the_leaders_log():
    """The replica holds [0, 3) of epoch 1, the leader's log starts at 2 in the same epoch: the same log."""
    done = effects(THREE, request(2, -1, batch(2, 1), batch(3, 1), restart=True, log_start_offset=2))
    assert done[0] == Append((batch(3, 1),))


def test_a_restart_sets_aside_what_goes_on_otherwise_but_not_below_the_watermark():
    asked = request(2, -1, batch(2, 256), restart=True, log_start_offset=2)
    assert effects(THREE, asked, high_watermark=2)[0] == SetAside(2, 256)
    assert effects(THREE, asked, high_watermark=3)[0] == GoOffline(RequestFinding.RESTART_BELOW_WATERMARK)


def test_below_its_own_start_a_replica_says_where_it_ends():
    """The leader read the replica's description before the replica's log start rose."""
    log = Log([2, 2], start=8)
    for restart in (False, True):
        done = effects(log, request(4, -1, batch(4, 1), restart=restart), high_watermark=8)
        assert (result(done).error_code, result(done).log_end_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 10)


def test_at_its_own_start_there_is_nothing_to_compare():
    log = Log([2], start=8)
    assert result(effects(log, request(8, 1, batch(8, 2), batch(9, 2)), high_watermark=8)).log_end_offset == 10


def test_every_finding_has_a_row_and_offline_rows_take_nothing():
    assert FOLLOWER_RULES.keys() == set(RequestFinding)
    for finding, rule in FOLLOWER_RULES.items():
        assert rule.accepts == (rule.error is ErrorCode.NONE), finding
        assert rule.accepts or rule.cut is CutAt.NOTHING, finding
        assert not (rule.is_offline and rule.accepts), finding


# ---- the checks and their order


def test_an_unknown_log_is_said_first():
    assert follow(None, request(0, -1), lambda _: None)[0].result.error_code is ErrorCode.UNKNOWN_TOPIC_ID


REFUSALS = {
    "a sender that is no member": ({"leader_epoch": 5}, {}, ErrorCode.NOT_A_MEMBER),
    "an older leader epoch": ({"leader_epoch": 0}, {}, ErrorCode.FENCED_LEADER_EPOCH),
    "an older leader epoch than the grant's": ({}, {"grant": grant(257)}, ErrorCode.FENCED_LEADER_EPOCH),
    "a jump": ({"leader_epoch": LEADER * (2 + EPOCH_JUMP_MAX // 256)}, {}, ErrorCode.IMPOSSIBLE_EPOCH),
    "an offline log": ({}, {"is_offline": True}, ErrorCode.LOG_OFFLINE),
    "another run of the node": ({"replica_epoch": REPLICA_EPOCH - 1}, {}, ErrorCode.STALE_SESSION),
    "an older session": ({}, {"session": ReplicaSession(LEADER, 2)}, ErrorCode.STALE_SESSION),
    "a session that is over": ({}, {"session": ReplicaSession(LEADER, 1, is_over=True)}, ErrorCode.STALE_SESSION),
    "bytes that are no batch": ({"is_whole": False}, {}, ErrorCode.CORRUPT_MESSAGE),
    "a batch above the leader's epoch": ({"batches": (batch(3, 300),)}, {}, ErrorCode.CORRUPT_MESSAGE),
    "offsets that do not rise": ({"batches": (batch(3, 1), batch(3, 1))}, {}, ErrorCode.CORRUPT_MESSAGE),
    "a hole at its place": ({"batches": (batch(4, 1),)}, {}, ErrorCode.CORRUPT_MESSAGE),
    "a hole between batches": ({"batches": (batch(3, 1), batch(5, 1))}, {}, ErrorCode.CORRUPT_MESSAGE),
    "an overlap": ({"batches": (batch(3, 1, 3), batch(5, 1))}, {}, ErrorCode.CORRUPT_MESSAGE),
    "epochs that fall": ({"batches": (batch(3, 2), batch(4, 1))}, {}, ErrorCode.CORRUPT_MESSAGE),
    "a restart that shows no epoch": ({"restart": True}, {}, ErrorCode.INVALID_REQUEST),
}


@pytest.mark.parametrize(("asked", "kept", "error"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_request_changes_nothing(asked, kept, error):
    done = effects(THREE, request(3, 1, **asked), **kept)
    assert [type(effect) for effect in done] == [Answer]
    assert result(done).error_code is error
    assert result(done).log_end_offset == 3
    newest = kept.get("grant", grant())
    assert (result(done).grant_epoch, result(done).grant_leader) == (newest.epoch, newest.leader), (
        "shown in every answer"
    )


def test_identity_o5_a_first_batch_without_an_epoch_is_refused():
    """Before it is none that it could fall from, and a list of epochs has no place for it."""
    done = effects(Log([]), request(0, -1, batch(0, -1)))
    assert [type(effect) for effect in done] == [Answer]
    assert result(done).error_code is ErrorCode.CORRUPT_MESSAGE


def test_the_checks_come_in_the_contracts_order():
    """Each request fails its own check and every later one; the first is answered."""
    asked, kept = {}, {}
    for what in reversed(list(REFUSALS)[3:9]):
        changes, state_changes, error = REFUSALS[what]
        asked, kept = asked | changes, kept | state_changes
        assert result(effects(THREE, request(3, 1, **asked), **kept)).error_code is error, what
    assert [error for error, _ in SESSION_CHECKS][:2] == [ErrorCode.STALE_SESSION] * 2
    assert LEADER_CHECKS[0][0] is ErrorCode.NOT_A_MEMBER


def test_empty_requests_are_checked_as_well():
    assert result(effects(THREE, request(3, 0))).error_code is ErrorCode.LOG_DIVERGED
    assert result(effects(THREE, request(3, 1))).error_code is ErrorCode.NONE


def test_a_newer_leader_epoch_is_taken_durably_whatever_comes_after_it():
    newer = LEADER + 1
    done = effects(THREE, request(3, 1, leader_epoch=newer))
    assert done[:2] == (StoreEpoch(newer), OpenSession(ReplicaSession(newer, 1)))
    done = effects(THREE, request(3, 1, leader_epoch=newer, replica_epoch=0))
    assert done[0] == StoreEpoch(newer)
    assert result(done).error_code is ErrorCode.STALE_SESSION
    assert result(effects(THREE, request(5, 1, leader_epoch=newer))).error_code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_the_first_request_with_a_higher_triple_opens_the_session():
    assert OpenSession(ReplicaSession(LEADER, 2)) in effects(THREE, request(3, 1, session_id=2))
    assert not any(isinstance(effect, OpenSession) for effect in effects(THREE, request(3, 1)))


def test_the_leaders_end_of_session_is_kept():
    done = effects(THREE, request(3, 1, end_session_reason=int(PushSessionEndReason.SHUTDOWN)))
    assert CloseSession(PushSessionEndReason.SHUTDOWN) in done


# ---- what follows the table


def test_truncate_append_flush_watermark_start_in_this_order():
    log = Log([1, 1, 1, 3, 3])
    asked = request(
        3, 1, batch(3, 256), batch(4, 256), epoch_start_offset=3, high_watermark=4, log_start_offset=2,
        flush_wanted=True,
    )  # fmt: skip
    done = effects(log, asked, high_watermark=1)
    kinds = [Truncate, Append, Flush, SetHighWatermark, SetLogStart, Answer]
    assert [type(effect) for effect in done] == kinds
    assert done[3:5] == (SetHighWatermark(4), SetLogStart(2))
    answer = result(done)
    assert (answer.log_end_offset, answer.log_start_offset, answer.flushed_offset) == (5, 2, 5)


@pytest.mark.parametrize(
    ("leaders", "own", "after"),
    [(0, 2, None), (2, 0, 2), (9, 0, 3), (1, 2, None)],
    ids=["lower", "rise", "above", "back"],
)
def test_the_watermark_rises_and_stays_below_the_end(leaders, own, after):
    done = effects(THREE, request(3, 1, high_watermark=leaders), high_watermark=own)
    assert [e.high_watermark for e in done if isinstance(e, SetHighWatermark)] == ([after] if after else [])


def test_the_watermark_stays_within_what_the_request_verified():
    """Above it the log may hold what an older leader left."""
    done = effects(Log([1, 1, 1, 1]), request(1, 1, batch(1, 1), high_watermark=4))
    assert SetHighWatermark(2) in done


def test_the_log_start_never_passes_the_watermark():
    done = effects(THREE, request(3, 1, high_watermark=2, log_start_offset=3))
    assert SetLogStart(2) in done


def test_an_epoch_begins_in_the_log_once_its_start_is_verified():
    begin = BeginEpoch(LEADER, 3)
    assert begin in effects(THREE, request(3, 1, epoch_start_offset=3))
    assert not any(isinstance(e, BeginEpoch) for e in effects(THREE, request(3, 1, epoch_start_offset=4)))
    records = effects(THREE, request(3, 1, batch(3, LEADER), epoch_start_offset=3))
    assert not any(isinstance(e, BeginEpoch) for e in records), "the record's epoch is in the list by itself"
    below = effects(THREE, request(1, 1, batch(1, 1), epoch_start_offset=3))
    assert not any(isinstance(e, BeginEpoch) for e in below), "the log is longer, but nobody compared the rest"


def test_what_lies_above_the_epochs_start_and_is_not_of_it_goes():
    log = Log([1, 1, 3, 3])
    done = effects(log, request(2, 1, epoch_start_offset=2), high_watermark=2)
    assert done[:2] == (Truncate(2), BeginEpoch(LEADER, 2))
    assert effects(log, request(2, 1, epoch_start_offset=2), high_watermark=3)[0] == GoOffline(
        RequestFinding.OTHER_EPOCH_BELOW_WATERMARK
    )


def test_what_was_not_granted_goes_first_and_takes_its_flushed_offset_with_it():
    log = Log([1, 1, 6])
    mark = Unfenced(2, EpochEnd(1, 2))
    done = effects(log, request(2, 1, batch(2, LEADER), epoch_start_offset=2, flush_wanted=True), unfenced=mark)
    assert [type(effect) for effect in done] == [SetUnfencedAside, Append, Flush, Answer]
    assert done[0].log == Log([1, 1]).ends


def test_a_disk_error_is_answered_with_what_the_log_holds_now():
    answer = storage_error(state(THREE))
    assert (answer.error_code, answer.log_end_offset) == (ErrorCode.KAFKA_STORAGE_ERROR, 3)


FORCED = next_generation(0, 5)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (0, ErrorCode.FENCED_LEADER_EPOCH),
        (FORCED, ErrorCode.NONE),
        (FORCED + 1, ErrorCode.INCONSISTENT_OUTBOX),
        (next_generation(FORCED, 0), ErrorCode.STALE_SESSION),
    ],
    ids=["older", "its own", "a rival", "newer: its grant has to come first"],
)
def test_a_replica_follows_its_own_generation_alone(asked, error):
    kept = replace(grant(), generation=FORCED)
    for epoch in (LEADER, LEADER + 256):  # compared before the epoch is, and before that is taken
        done = effects(THREE, request(3, 1, batch(3, 1), leader_epoch=epoch, generation=asked), grant=kept)
        assert result(done).error_code is error
        assert result(done).generation == FORCED
        assert len(done) == 1 or error is ErrorCode.NONE, done
