"""Each promise of the shells broken once: how, and in which world that must be seen. Patches; the caller undoes them.

What two places hold is broken in both: alone, the other one heals it, and the pure rules' own world sees it.
"""

from dataclasses import replace
from functools import partialmethod
from typing import NamedTuple

from pushrep.election import candidate, follower, push_session
from pushrep.election.follower import RequestFinding
from pushrep.election.grants import Grant
from pushrep.election.leader import PartitionLeader
from pushrep.env.checked_json import checked_json
from pushrep.log import SegmentLog
from pushrep.replicate import election_state, replica
from pushrep.replicate.led_partition import LedPartition
from pushrep.replicate.pusher import Pusher
from pushrep.wire.error_codes import ErrorCode
from tests.simulation.shells_world import Rules


class Mutation(NamedTuple):
    """`apply(patch)` breaks the promise by `patch(object, name, value)`; `rules`: the world that must see it."""

    breaks: str
    apply: object
    rules: Rules = Rules()
    first_seed: int = 0


def without(checks, error):
    return tuple(check for check in checks if check[0] is not error)


def skip_the_epoch_check(patch):
    patch(follower, "LEADER_CHECKS", without(follower.LEADER_CHECKS, ErrorCode.FENCED_LEADER_EPOCH))
    patch(follower, "_is_stale", lambda newest, request: False)

    def on_answer(self, replica, session, sequence, result, original=PartitionLeader.on_answer):
        return original(self, replica, session, sequence, replace(result, grant_epoch=-1, grant_leader=-1))

    patch(PartitionLeader, "on_answer", on_answer)


def skip_the_previous_epoch_check(patch):
    before = follower._before
    patch(follower, "_before", lambda *a: None if before(*a) is RequestFinding.DIVERGED_BEFORE else before(*a))
    patch(push_session, "common_end", lambda ours, theirs: min(ours.log_end_offset, theirs.log_end_offset))


def advance_with_too_few_in_sync(patch):
    patch(Grant, "may_acknowledge", lambda self, in_sync: True)


def lead_with_too_few_grants(patch):
    patch(Grant, "too_few_to_lead", lambda self, stored: None)


def take_an_epoch_before_its_fsync(patch):
    def write(filesystem, path, fields, version):
        file = filesystem.open(path, create=True)
        file.truncate(0)
        file.write_at(checked_json(fields, version), 0)
        file.close()

    patch(election_state, "write_checked_json", write)


def lead_without_fetching(patch):
    patch(candidate.Candidate, "_fetches", lambda self: [])


def drop_the_transition_records(patch):
    def from_log(self, start, *rest, original=Pusher._from_log):
        found = original(self, start, *rest)
        return found._replace(parts=(), size_bytes=0) if start < self.transition_end else found

    patch(Pusher, "_from_log", from_log)


def answer_before_the_flush(patch):
    done = dict(replica._DONE_BY)
    done[follower.Flush] = lambda self, _: None
    patch(replica, "_DONE_BY", done)


def answer_before_the_write(patch):
    def follow(state, request, batch_at, original=follower.follow):
        found = original(state, request, batch_at)
        return tuple(effect for effect in found if not isinstance(effect, follower.Append | follower.Flush))

    patch(replica, "follow", follow)


def count_answers_of_any_session(patch):
    def on_answer(self, replica, session, sequence, result, original=PartitionLeader.on_answer):
        progress = self._sessions.get(replica)
        return original(self, replica, progress.id if progress else session, sequence, result)

    patch(PartitionLeader, "on_answer", on_answer)


def follow_below_own_watermark(patch):
    patch(follower, "_other_epoch", lambda offset, _: follower.Found(RequestFinding.OTHER_EPOCH, offset))
    patch(SegmentLog, "truncate_to", partialmethod(SegmentLog.truncate_to, force=True))


def keep_what_was_acknowledged(patch):
    patch(Pusher, "_release_below", lambda self, offset: None)


def forget_who_waits(patch):
    def complete(self, original=LedPartition.complete_waiting):
        if self.leader.high_watermark % 3:
            original(self)

    patch(LedPartition, "complete_waiting", complete)


UNREST = Rules(accidents=(0.5, 0.2, 0.2, 2, 6, 3, 0, 6, 0, 1), rates=(0.02, 0.04))
LOSSY = Rules(accepts_loss=True, accidents=(1, 0, 0, 0, 10, 0, 0, 5, 1, 0.5), rates=(0.02,))
MUTATIONS = (
    Mutation("a request of an older leader is refused", skip_the_epoch_check, UNREST, 71),
    Mutation("the epoch before the append offset is compared", skip_the_previous_epoch_check, UNREST, 1),
    Mutation("the watermark moves with m members only", advance_with_too_few_in_sync),
    Mutation("leading needs N - m + 1 grants", lead_with_too_few_grants, first_seed=2),
    Mutation("an epoch is on disk before it is taken", take_an_epoch_before_its_fsync, first_seed=43),
    Mutation("who leads first fetches what it lacks", lead_without_fetching, first_seed=25),
    Mutation("the transition records are sent", drop_the_transition_records, Rules(quiet_steps=6_000), 6),
    Mutation("an answer comes after the flush", answer_before_the_flush),
    Mutation("an answer comes after the write", answer_before_the_write),
    Mutation("a replica never cuts below its watermark", follow_below_own_watermark, LOSSY, 94),
    Mutation("buffers are given back", keep_what_was_acknowledged),
    Mutation("every receipt is told", forget_who_waits),
)
