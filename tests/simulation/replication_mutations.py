"""Each rule of replication broken once: how, and in which world that must be seen. Patches, undone by their caller."""

from dataclasses import replace
from typing import NamedTuple

from pushrep.election import candidate, epochs, follower, grants, leader
from pushrep.election.follower import BeginEpoch, Found, RequestFinding, StoreEpoch
from pushrep.election.grants import Grant, Quorum
from pushrep.election.leader import PartitionLeader
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.wire.error_codes import ErrorCode
from tests.simulation.replication_world import Rules, World


class Mutation(NamedTuple):
    """`apply(patch)` breaks the rule by `patch(object, name, value)`; `rules`: the world that must see it.

    first_seed: where the search begins, near one that is known to see it.
    """

    breaks: str
    apply: object
    rules: Rules = Rules()
    first_seed: int = 0


def without(checks, error):
    return tuple(check for check in checks if check[0] is not error)


def skip_the_epoch_check(patch):
    patch(follower, "LEADER_CHECKS", without(follower.LEADER_CHECKS, ErrorCode.FENCED_LEADER_EPOCH))


def skip_the_grant_check(patch):
    patch(grants, "GRANT_CHECKS", without(grants.GRANT_CHECKS, ErrorCode.FENCED_LEADER_EPOCH))


def skip_the_previous_epoch_check(patch):
    before = follower._before
    patch(follower, "_before", lambda *a: None if before(*a) is RequestFinding.DIVERGED_BEFORE else before(*a))


def advance_with_too_few_in_sync(patch):
    patch(Grant, "may_acknowledge", lambda self, in_sync: True)


def lead_with_too_few_grants(patch):
    patch(Grant, "too_few_to_lead", lambda self, stored: None)


def count_who_did_not_store_the_grant(patch):
    patch(candidate.Candidate, "_counting", lambda self: frozenset(self._answers))
    patch(
        candidate.Candidate,
        "_on_look",
        lambda self, look=candidate.Candidate._on_look: _keeping_answers(self, look),
    )


def _keeping_answers(self, look):
    answers = dict(self._answers)
    effects = look(self)
    if self.state is candidate.CandidateState.GRANTING:
        self._answers = {**answers, self.index: self._answers[self.index]}
        effects += self._on_stored()
    return effects


def lead_without_fetching(patch):
    patch(candidate.Candidate, "_fetches", lambda self: [])


def follow_below_own_watermark(patch):
    patch(follower, "_other_epoch", lambda offset, _: Found(RequestFinding.OTHER_EPOCH, offset))


def join_below_the_epoch_start(patch):
    def has_caught_up(self, replica):
        held = self._verified(replica)
        return held is not None and held >= self.high_watermark

    patch(PartitionLeader, "_has_caught_up", has_caught_up)
    acknowledge_below_the_epoch_start(patch)


def forget_that_an_epoch_began(patch):
    drop_effects(patch, BeginEpoch)


def drop_effects(patch, kind):
    def follow(*arguments, original=follower.follow):
        return tuple(effect for effect in original(*arguments) if not isinstance(effect, kind))

    patch(follower, "follow", follow)


def take_no_epoch(patch):
    drop_effects(patch, StoreEpoch)


def take_a_promise_for_an_epoch_in_the_log(patch):
    def follow(state, request, batch_at, original=follower.follow):
        found = original(state, request, batch_at)
        if not any(isinstance(effect, StoreEpoch) for effect in found):
            return found
        return (BeginEpoch(request.leader_epoch, state.log.log_end_offset), *found)

    patch(follower, "follow", follow)


def cut_away_the_epoch_that_begins_there(patch):
    def cut(self, end_offset):
        if end_offset >= self.log_end_offset:
            return self
        return self._replace(log_end_offset=end_offset, leader_epochs=self.leader_epochs.cut_from(end_offset))

    patch(epochs.LogEnds, "cut", cut)


def begin_anew_without_an_epoch(patch):
    def set_aside(self, machine, effect, original=World.set_aside):
        original(self, machine, effect)
        machine.disk.epochs = LeaderEpochs()

    patch(World, "set_aside", set_aside)


def count_ungranted_records(patch):
    patch(candidate, "granted_end", lambda log, _: epochs.granted_end(log, None))


def acknowledge_below_the_epoch_start(patch):
    def moved(self):
        held = min(self._verified(replica) or 0 for replica in self.in_sync)
        if not self.may_append_all or held <= self.high_watermark:
            return []
        self.high_watermark = held
        return [leader.HighWatermarkMoved(held)]

    patch(PartitionLeader, "_moved", moved)


def change_members_by_leading_sets_only(patch):
    patch(Quorum, "to_change", property(lambda self: self.to_lead))


def settle_at_once(patch):
    patch(Grant, "may_settle", lambda self, stored, holding: True)


def swap_lists_without_a_joint_grant(patch):
    def with_members(self, epoch, members, original=Grant.with_members):
        return original(self, epoch, members).settled(epoch)

    patch(Grant, "with_members", with_members)


def ignore_what_the_list_was(patch):
    keep = tuple(check for check in grants.GRANT_CHECKS if "members_epoch" not in check.refuses.__code__.co_names)
    patch(grants, "GRANT_CHECKS", keep)


def ask_nobody_whether_the_leader_lives(patch):
    patch(candidate, "leader_alive", lambda *_: None)


def take_the_silent_for_gone(patch):
    def leader_alive(own, newest, answers, silent, alive_ms, original=candidate.leader_alive):
        return original(own, newest, answers, frozenset(), alive_ms)

    patch(candidate, "leader_alive", leader_alive)


def count_whatever_directory_answers(patch):
    patch(Grant, "is_member", lambda *_: True)


def settle_a_directory_at_once(patch):
    def may_settle(self, stored, holding, original=Grant.may_settle):
        return bool(self.entering) or original(self, stored, holding)

    patch(Grant, "may_settle", may_settle)


def count_a_directory_before_it_is_settled(patch):
    def with_directory(self, epoch, index, directory_id):
        return self.with_names(epoch, {index: directory_id})

    patch(Grant, "with_directory", with_directory)


def take_the_numbers_of_a_directory_that_is_gone(patch):
    patch(grants, "EPOCH_LEAP", 0)


def name_a_directory_that_is_not_filled(patch):
    patch(PartitionLeader, "caught_up", property(lambda self: frozenset(self._sessions) | {self.grant.leader}))


def compare_epochs_before_generations(patch):
    patch(grants, "GENERATION_CHECKS", grants.GENERATION_CHECKS[:2])
    patch(grants.OfferedGrant, "begins_generation", property(lambda _: False))


def store_an_older_generation(patch):
    patch(grants, "GENERATION_CHECKS", grants.GENERATION_CHECKS[:2])


def leave_the_logs_of_an_older_generation(patch):
    def finish(self, machine):
        disk = machine.disk
        disk.generation = disk.grant.generation if disk.grant else 0

    patch(World, "finish_setting_aside", finish)


def forget_what_was_to_be_set_aside(patch):
    def finish(self, machine, original=World.finish_setting_aside):
        disk = machine.disk
        if machine.role == "node":
            original(self, machine)
        elif disk.grant is not None:  # behind a crash
            disk.generation = disk.grant.generation

    patch(World, "finish_setting_aside", finish)


def count_the_others_at_once_behind_a_loss(patch):
    def forced(self, *arguments, original=Grant.forced, **options):
        alone = original(self, *arguments, **options)
        return replace(alone, previous_members=(), previous_min_insync_replicas=0)

    patch(Grant, "forced", forced)

    def durable(self, machine, original=World.durable, **values):
        if "grant" in values and values.get("is_unfilled"):
            values["is_unfilled"] = False
        original(self, machine, **values)

    patch(World, "durable", durable)


def follow_another_generation(patch):
    patch(follower.ReplicaState, "generation", property(lambda _: EVERY))


class _Every(int):
    """Equal to every generation."""

    __eq__ = lambda self, other: True  # noqa: E731 - one word
    __ne__ = lambda self, other: False  # noqa: E731 - as above
    __hash__ = int.__hash__


EVERY = _Every(0)


def let_rivals_be(patch):
    for room in (grants, follower, leader, candidate):
        patch(room, "are_rivals", lambda *_: False)


def end_a_lead_at_one_answer(patch):
    def contested(self, _, epoch, leader_index):
        return self.resign(epoch, leader_index)

    patch(PartitionLeader, "_contested", contested)


def lead_on_whatever_is_shown(patch):
    patch(leader.Confirmations, "newer_grant", lambda *_: None)


LOSSY = Rules(accepts_loss=True)
HASTY = Rules(doubt_steps=1)
LYING = Rules(lies=0.2)
FORCED = Rules(forces=True)
FORCED_FIVE = Rules(members=5, min_insync=3, machines=5, forces=True)
WIPED = Rules(wipes=0.1)
WIPED_OF_TWO = Rules(members=2, machines=2, wipes=0.1)
HASTY_OF_TWO = replace(WIPED_OF_TWO, doubt_steps=1)
WIPED_OFTEN = Rules(members=5, min_insync=4, machines=5, wipes=0.4)
FIVE = Rules(members=5, min_insync=3, machines=5)
LIVING = Rules(leader_alive_steps=100)
LIVING_FIVE = Rules(members=5, min_insync=3, machines=5, leader_alive_steps=150)
CHANGING = Rules(machines=5, changes_members=True)
# Without directories' names: the grants that bring them in are stored by more, and hide what a change of members lacks.
EVEN = Rules(members=4, min_insync=3, machines=5, changes_members=True)
MUTATIONS = (
    Mutation("a request of an older leader is refused", skip_the_epoch_check, first_seed=116),
    Mutation("an older grant is refused", skip_the_grant_check, first_seed=2000),
    Mutation("the epoch before the append offset is compared", skip_the_previous_epoch_check),
    Mutation("the watermark moves with m members only", advance_with_too_few_in_sync),
    Mutation("leading needs N - m + 1 grants", lead_with_too_few_grants),
    Mutation("a member counts from its grant on", count_who_did_not_store_the_grant, first_seed=347),
    Mutation("who leads first fetches what it lacks", lead_without_fetching, first_seed=5),
    Mutation(
        "a number and a grant are on disk before they are used",
        lambda _: None,
        Rules(fsyncs_epochs=False),
        first_seed=18,
    ),
    Mutation("the answer comes last", lambda _: None, Rules(answers_last=False), first_seed=9),
    Mutation("a replica never cuts below its watermark", follow_below_own_watermark, LOSSY, first_seed=92),
    Mutation("a replica joins at the epoch's start", join_below_the_epoch_start, first_seed=129),
    Mutation("an epoch that began is in the log", forget_that_an_epoch_began, HASTY, first_seed=247),
    Mutation("a promise is not an epoch in the log", take_a_promise_for_an_epoch_in_the_log, first_seed=193),
    Mutation("a cut leaves the epoch that begins there", cut_away_the_epoch_that_begins_there, first_seed=2029),
    Mutation("a log that begins anew has its epoch", begin_anew_without_an_epoch, first_seed=113),
    Mutation("what was not granted does not count", count_ungranted_records, first_seed=157),
    Mutation("a leader that may be alive is left alone", ask_nobody_whether_the_leader_lives, LIVING),
    Mutation("those that do not answer may be with the leader", take_the_silent_for_gone, LIVING_FIVE, first_seed=226),
    Mutation("m members of the old list know the new one", change_members_by_leading_sets_only, EVEN, first_seed=152),
    Mutation("a change of members settles when it may", settle_at_once, CHANGING, first_seed=81),
    Mutation("a member is the directory that the grant names", count_whatever_directory_answers, WIPED, first_seed=16),
    Mutation("a directory is named once it is filled", name_a_directory_that_is_not_filled, WIPED_OF_TWO, first_seed=3),
    Mutation("a directory comes in by a grant that it stored", settle_a_directory_at_once, WIPED_OFTEN, first_seed=104),
    Mutation("a directory comes in by two grants", count_a_directory_before_it_is_settled, WIPED_OFTEN, first_seed=70),
    Mutation("no number is taken twice", take_the_numbers_of_a_directory_that_is_gone, HASTY_OF_TWO, first_seed=74),
    Mutation("generations are compared before epochs", compare_epochs_before_generations, FORCED, first_seed=5),
    Mutation("a grant of an older generation is refused", store_an_older_generation, FORCED_FIVE, first_seed=10),
    Mutation("logs of an older generation are set aside", leave_the_logs_of_an_older_generation, FORCED, first_seed=9),
    Mutation("setting aside is finished behind a crash", forget_what_was_to_be_set_aside, FORCED, first_seed=108),
    Mutation("who leads behind a loss leads alone", count_the_others_at_once_behind_a_loss, FORCED, first_seed=9),
    Mutation("a replica follows its own generation", follow_another_generation, FORCED_FIVE, first_seed=181),
    Mutation("two that were forced beside each other go offline", let_rivals_be, FORCED_FIVE, first_seed=20),
    Mutation("one member's newer grant ends no lead", end_a_lead_at_one_answer, LYING),
    Mutation("a leader that too few confirm stops", lead_on_whatever_is_shown, LYING),
    Mutation("two lists have their say while they change", swap_lists_without_a_joint_grant, CHANGING, first_seed=21),
)
