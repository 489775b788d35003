"""`Members, grants, epochs`: ballots, who may lead, what may be acknowledged, changes of members, what is stored."""

from dataclasses import replace
from itertools import combinations
from uuid import UUID

import pytest

from pushrep.election.candidate import why_outranked
from pushrep.election.errors import BadGrant, NotLeader, RivalGenerations
from pushrep.election.grants import (
    BALLOT_STRIDE,
    EPOCH_JUMP_MAX,
    EPOCH_LEAP,
    LIST_JUMP_MAX,
    Grant,
    Member,
    OfferedGrant,
    Quorum,
    are_rivals,
    base_of,
    default_min_insync,
    judge_grant,
    newest_of,
    next_ballot,
    next_generation,
    owner_of,
)
from pushrep.errors import BadArgument
from pushrep.wire.error_codes import ErrorCode


def listed(*indexes):
    return tuple(Member(index, f"10.0.0.{index}:7400") for index in indexes)


def grant(epoch=256, members=(0, 1, 2), m=2, **changes):
    fields = {
        "outbox_id": UUID(int=1), "epoch": epoch, "leader": epoch % 256, "members": listed(*members),
        "min_insync_replicas": m, "members_epoch": 0, "pid_epoch": 0, "topic_id": UUID(int=2), "topic": "orders",
        "partitions": 4, "carrier": "key",
    }  # fmt: skip
    return Grant(**fields | changes)


@pytest.mark.parametrize("index", [0, 1, 7, 255])
@pytest.mark.parametrize("seen", [-1, 0, 1, 255, 256, 300, 1_000_000])
def test_a_ballot_is_the_members_own_and_the_next_above_all_seen(index, seen):
    ballot = next_ballot(index, seen)
    assert owner_of(ballot) == index
    assert seen < ballot <= seen + 256


def test_the_default_is_more_than_half_the_leader_counted():
    assert [default_min_insync(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("n", range(1, 7))
def test_leading_sets_meet_every_set_that_acknowledged(n):
    for m in range(1, n + 1):
        quorum = Quorum(frozenset(range(n)), m)
        assert quorum.to_lead == n - m + 1
        for leads in combinations(range(n), quorum.to_lead):
            assert all(set(leads) & set(holds) for holds in combinations(range(n), m))
            assert all(set(leads) & set(stored) for stored in combinations(range(n), quorum.to_change))


def test_with_four_members_two_leading_sets_can_miss_each_other():
    """Why a change of the list needs m members of the old one, not only as many as lead."""
    quorum = Quorum(frozenset(range(4)), 3)
    assert (quorum.to_lead, quorum.to_change) == (2, 3)
    assert not {0, 1} & {2, 3}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"epoch": 257, "leader": 0}, "257"),
        ({"leader": 1}, "member 1"),
        ({"epoch": 3, "leader": 3}, "leader 3"),
        ({"members": (0, 0)}, "stands once"),
        ({"m": 0}, "min_insync_replicas"),
        ({"m": 4}, "min_insync_replicas"),
        ({"members_epoch": 300}, "members_epoch"),
        ({"previous_members": listed(0, 1), "previous_min_insync_replicas": 3}, "min_insync_replicas"),
    ],
)
def test_a_grant_that_contradicts_itself_is_none(changes, names):
    with pytest.raises(BadGrant, match=names):
        grant(**changes)


def test_a_member_has_an_index_by_which_it_can_take_numbers():
    assert Member(BALLOT_STRIDE - 1).index == 255
    with pytest.raises(BadArgument, match="not from 0 to 255"):
        Member(BALLOT_STRIDE)


KEPT = grant(epoch=512)
OFFERS = {
    "newer": (grant(epoch=768), ErrorCode.NONE),
    "newer, of another member": (grant(epoch=769), ErrorCode.NONE),
    "the very same": (KEPT, ErrorCode.NONE),
    "older": (grant(epoch=256), ErrorCode.FENCED_LEADER_EPOCH),
    "older than an epoch that was taken": (grant(epoch=600, leader=88, members=(0, 1, 88)), ErrorCode.NOT_A_MEMBER),
    "the same number, another content": (grant(epoch=512, m=3), ErrorCode.IMPOSSIBLE_EPOCH),
    "a jump": (grant(epoch=512 + EPOCH_JUMP_MAX + 256), ErrorCode.IMPOSSIBLE_EPOCH),
    "just no jump": (grant(epoch=512 + EPOCH_JUMP_MAX), ErrorCode.NONE),
    "of another list, just no jump": (grant(epoch=512 + LIST_JUMP_MAX, members_epoch=768), ErrorCode.NONE),
    "of another list, a jump": (grant(epoch=768 + LIST_JUMP_MAX, members_epoch=768), ErrorCode.IMPOSSIBLE_EPOCH),
    "another outbox": (grant(epoch=768, outbox_id=UUID(int=9)), ErrorCode.INCONSISTENT_OUTBOX),
    "other partitions": (grant(epoch=768, partitions=5), ErrorCode.INCONSISTENT_OUTBOX),
    "another carrier": (grant(epoch=768, carrier="header"), ErrorCode.INCONSISTENT_OUTBOX),
}


@pytest.mark.parametrize(("offered", "outcome"), OFFERS.values(), ids=OFFERS)
def test_what_a_member_stores(offered, outcome):
    assert judge_grant(OfferedGrant(offered, offered.leader, KEPT, 512)) is outcome


def test_a_member_that_missed_changes_of_the_list_takes_the_grant_of_a_leader_whose_lists_go_on_from_its_own():
    now = KEPT
    for coming in (3, 4):
        longer = now.with_members(next_ballot(0, now.epoch), (*now.members, *listed(coming)))
        longer = longer.settled(next_ballot(0, longer.epoch))
        shorter = longer.with_members(
            next_ballot(0, longer.epoch), tuple(one for one in longer.members if one.index != coming - 2)
        )
        now = shorter.settled(next_ballot(0, shorter.epoch))
    assert now.indexes == {0, 3, 4}
    assert [one.indexes for one in now.lists] == [{0, 1, 2}, {0, 1, 2, 3}, {0, 2, 3}, {0, 2, 3, 4}]
    by_another = now.renewed(next_ballot(4, now.epoch), 4)
    assert judge_grant(OfferedGrant(by_another, 4, KEPT, 512)) is ErrorCode.NONE
    stranger = replace(by_another, lists=())
    assert judge_grant(OfferedGrant(stranger, 4, KEPT, 512)) is ErrorCode.NOT_A_MEMBER
    assert judge_grant(OfferedGrant(stranger, 4, KEPT, 512, is_unfilled=True)) is ErrorCode.NONE
    assert (
        judge_grant(OfferedGrant(stranger, 4, KEPT, now.epoch + 512, is_unfilled=True)) is ErrorCode.FENCED_LEADER_EPOCH
    )


def test_a_leader_in_a_change_that_is_not_settled_is_known_by_the_list_before():
    joint = KEPT.with_members(next_ballot(0, KEPT.epoch), (*KEPT.members, *listed(3)))
    by_the_new_one = joint.renewed(next_ballot(3, joint.epoch), 3)
    assert judge_grant(OfferedGrant(by_the_new_one, 3, KEPT, 512)) is ErrorCode.NONE


def test_a_member_that_was_away_while_many_new_directories_came_in_takes_the_grant_of_now():
    now = KEPT
    for number in range(60):
        joint = now.with_directory(next_ballot(0, now.epoch), number % 2 + 1, UUID(int=number + 1))
        now = joint.settled(next_ballot(0, joint.epoch))
    assert now.epoch > 60 * EPOCH_LEAP
    assert judge_grant(OfferedGrant(now, 0, KEPT, 512)) is ErrorCode.NONE


def test_an_epoch_taken_in_a_log_fences_grants_too():
    assert judge_grant(OfferedGrant(grant(epoch=768), 0, KEPT, 769)) is ErrorCode.FENCED_LEADER_EPOCH


def test_only_the_leader_itself_offers_its_grant():
    assert judge_grant(OfferedGrant(grant(epoch=768), 1, KEPT, 512)) is ErrorCode.IMPOSSIBLE_EPOCH


def test_a_member_without_a_grant_takes_any():
    assert judge_grant(OfferedGrant(grant(epoch=EPOCH_JUMP_MAX * 4), 0, None, -1)) is ErrorCode.NONE


def test_a_candidate_that_counted_by_an_older_list_is_refused():
    kept = KEPT.with_members(768, listed(0, 1, 2, 3))
    assert judge_grant(OfferedGrant(KEPT.renewed(1025, 1), 1, kept, 768)) is ErrorCode.FENCED_LEADER_EPOCH
    assert judge_grant(OfferedGrant(kept.renewed(1025, 1), 1, kept, 768)) is ErrorCode.NONE


def test_a_change_is_joint_until_both_lists_are_safe():
    joint = grant(m=2).with_members(512, listed(0, 1, 2, 3))
    assert (joint.min_insync_replicas, joint.previous_min_insync_replicas) == (3, 2)
    assert joint.indexes == {0, 1, 2, 3}
    assert joint.too_few_to_lead({0, 3}) is not None, "two of the new list lead, but only one of the old"
    assert joint.too_few_to_lead({0, 1}) is None
    assert not joint.may_acknowledge({0, 1}), "enough of the old list, not of the new"
    assert joint.may_acknowledge({0, 1, 3})
    assert not joint.may_settle({0, 3}, {0, 1, 3}), "N - m + 1 of the old list have not stored it"
    assert not joint.may_settle({0, 1}, {0, 1}), "m' of the new list do not hold all below the watermark"
    assert joint.may_settle({0, 1}, {0, 1, 3})
    settled = joint.settled(768)
    assert (settled.quorums, settled.members_epoch) == ((Quorum(frozenset(range(4)), 3),), 768)
    assert not settled.may_settle({0, 1, 2, 3}, {0, 1, 2, 3}), "nothing to settle"


def test_an_even_list_is_left_only_when_m_of_it_know():
    joint = grant(members=(0, 1, 2, 3), m=3).with_members(512, listed(0, 1, 2))
    assert joint.too_few_to_lead({0, 1}) is None
    assert not joint.may_settle({0, 1}, {0, 1, 2}), "2 and 3 never heard of it and could lead by the old list"
    assert joint.may_settle({0, 1, 2}, {0, 1})


def test_members_change_one_at_a_time():
    with pytest.raises(BadGrant, match="one at a time"):
        grant().with_members(512, listed(0, 1, 3))
    joint = grant().with_members(512, listed(0, 1))
    with pytest.raises(BadGrant, match="not settled"):
        joint.with_members(768, listed(0))


def test_a_renewal_keeps_the_list_but_not_an_accepted_loss():
    lossy = replace(grant(), accepted_loss="promoted with loss")
    renewed = lossy.renewed(257, 1)
    assert (renewed.epoch, renewed.leader, renewed.members_epoch, renewed.accepted_loss) == (257, 1, 0, "")
    assert renewed.members == lossy.members


def test_a_grant_knows_the_lowest_index_that_nobody_ever_had():
    """Contract: "each with an index 0-255 that is never reused"."""
    first = grant()
    top = max(first.indexes)
    assert first.next_index == top + 1
    joint = first.with_members(1024, (*first.members, Member(top + 1)))
    assert joint.next_index == top + 2
    alone = joint.settled(1280)
    without = alone.with_members(1536, first.members).settled(1792)
    assert max(without.indexes) == top
    assert without.next_index == top + 2, "what was removed is not forgotten"
    assert without.renewed(2048, 0).next_index == top + 2


def test_a_member_that_is_the_whole_list_before_leads_alone_and_has_its_say_in_everything():
    """After a forced change: the others are empty, so the opening needs none; what is acknowledged is on it, too."""
    forced = grant(members=(0, 3, 4, 5), m=3, previous_members=listed(0), previous_min_insync_replicas=1)
    assert forced.too_few_to_lead({0}) is None
    assert forced.too_few_to_lead({3, 4, 5}) is not None, "nobody leads without it"
    assert not forced.may_acknowledge({3, 4, 5})
    assert not forced.may_acknowledge({0, 3})
    assert forced.may_acknowledge({0, 3, 4})
    assert not forced.may_settle({0}, {0, 3, 4}), "the new list has to know it, too"
    assert forced.may_settle({0, 3}, {0, 3, 4})
    wide = grant(members=(0, 3, 4), m=1, previous_members=listed(0), previous_min_insync_replicas=1)
    assert not wide.may_acknowledge({0}), "nothing rests on one member before the new list can be settled"
    assert wide.may_acknowledge({0, 3, 4})


def test_a_generation_is_above_all_seen_and_two_of_one_number_are_rivals():
    first, other = next_generation(0, 7), next_generation(0, 0xFFFFFFFF)
    assert 0 < first < other < next_generation(first, 0)
    assert are_rivals(first, other)
    assert not are_rivals(first, first)
    assert not any(are_rivals(one, two) for one, two in ((0, first), (first, next_generation(other, 7))))


def forced(epoch, generation, kept=KEPT, **changes):
    members = changes.pop("members", kept.members)
    made = kept.forced(epoch, owner_of(epoch), generation, members=members, min_insync_replicas=len(members) // 2 + 1)
    return replace(made, **changes)


FIRST, SECOND = next_generation(0, 7), next_generation(next_generation(0, 7), 3)
OF_GENERATIONS = {
    "a higher one, of a lower epoch": (forced(1, SECOND), ErrorCode.NONE),
    "a higher one, of an epoch that jumps": (forced(513 + 2 * LIST_JUMP_MAX, SECOND), ErrorCode.NONE),
    "a higher one, by a member that came in meanwhile": (forced(9, SECOND, members=listed(1, 9)), ErrorCode.NONE),
    "a higher one, of the same number": (forced(512, SECOND), ErrorCode.NONE),
    "a higher one, by somebody else": (replace(forced(513, SECOND), epoch=514, leader=2), ErrorCode.IMPOSSIBLE_EPOCH),
    "a higher one, of another outbox": (forced(513, SECOND, outbox_id=UUID(int=9)), ErrorCode.INCONSISTENT_OUTBOX),
    "an older one, of a higher epoch": (grant(epoch=768), ErrorCode.FENCED_LEADER_EPOCH),
    "its own": (replace(KEPT, epoch=768, generation=FIRST), ErrorCode.NONE),
    "its own, older": (replace(KEPT, epoch=256, generation=FIRST), ErrorCode.FENCED_LEADER_EPOCH),
    "a rival": (forced(768, next_generation(0, 8)), ErrorCode.INCONSISTENT_OUTBOX),
    "a rival of a lower random part": (forced(768, next_generation(0, 6)), ErrorCode.INCONSISTENT_OUTBOX),
}


@pytest.mark.parametrize(("offered", "outcome"), OF_GENERATIONS.values(), ids=OF_GENERATIONS)
def test_generations_are_compared_before_everything_else(offered, outcome):
    kept = replace(KEPT, generation=FIRST)
    sender = 1 if outcome is ErrorCode.IMPOSSIBLE_EPOCH else offered.leader
    assert judge_grant(OfferedGrant(offered, sender, kept, 512)) is outcome


def test_of_two_grants_the_one_of_the_higher_generation_is_newer_and_has_the_newer_list():
    older = replace(grant(epoch=2048), members_epoch=2048)
    newer = forced(513, FIRST)
    assert newest_of([older, None, newer]) is base_of([newer, older]) is newer
    assert newest_of([None]) is None


def test_who_leads_behind_a_loss_leads_alone_and_any_directory_may_come_for_one_that_was_not_reached():
    named = tuple(replace(one, directory_id=UUID(int=one.index + 1)) for one in listed(0, 1, 2))
    made = replace(KEPT, members=named).forced(
        513, 1, FIRST, members=named, min_insync_replicas=2, reached=frozenset({2})
    )
    assert [one.directory_id for one in made.members] == [None, UUID(int=2), UUID(int=3)]
    assert made.rank == (FIRST, 513)
    assert made.is_led_alone
    assert made.too_few_to_lead({1}) is None
    assert made.too_few_to_lead({0, 2}) is not None
    assert not made.may_acknowledge({1})
    assert made.may_acknowledge({1, 2})
    assert not made.entering
    alone = KEPT.forced(513, 1, FIRST, members=listed(1), min_insync_replicas=1)
    assert not alone.previous_members
    assert alone.may_acknowledge({1})


@pytest.mark.parametrize(
    ("generation", "epoch", "expected"),
    [
        (FIRST, 512, None),
        (FIRST, 256, None),
        (FIRST, 513, NotLeader),
        (0, 513, None),
        (SECOND, 1, NotLeader),
        (FIRST + 1, 512, RivalGenerations),
        (FIRST + 1, 1, RivalGenerations),
    ],
)
def test_who_leads_is_outranked_by_a_newer_grant_of_its_own_history_or_by_a_later_one(generation, epoch, expected):
    why = why_outranked(grant(512, generation=FIRST), grant(epoch, generation=generation))
    assert type(why) is (expected or type(None))
    assert why is None or (why.leader, why.epoch) == (epoch % 256, epoch)
