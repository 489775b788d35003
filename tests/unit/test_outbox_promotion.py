"""What a promotion that accepts a loss decides by the answers of the members that are left: which it refuses before
anything is stored, what it fetches first, and what its grant says. The members' answers are scripted.
"""

from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.election.candidate import Fetch, MemberAnswer, MemberLog
from pushrep.election.epochs import EpochEnd, LogEnds, Unfenced
from pushrep.election.errors import CantLead, LeaderMayBeAlive, LogNotFit, NotAhead, NotLeader
from pushrep.election.grants import Grant, Member, next_generation
from pushrep.env import REAL_FILESYSTEM
from pushrep.log.directory_id import DirectoryId, write_directory_id
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.promotion import Heard, ListChange, list_change, with_loss
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.election_state import ElectionState, ElectionStateStore

T_MS = 1_700_000_000_000
GRANT = Grant(
    outbox_id=UUID(int=1), epoch=256, leader=0, members=tuple(Member(n, f"m{n}:1", UUID(int=n + 10)) for n in range(3)),
    min_insync_replicas=2, members_epoch=256, pid_epoch=5, topic_id=UUID(int=2), topic="orders", partitions=1,
    carrier="key",
)  # fmt: skip


def forced(leader, epoch, tag, members=GRANT.members):
    generation = next_generation(0, tag)
    return GRANT.forced(epoch, leader, generation, members=members, min_insync_replicas=2)


FORCED = forced(2, 514, 5)


def log(end, *epochs, high_watermark=8, **changes):
    """A log whose epochs start at these offsets."""
    ends = LogEnds(0, end, LeaderEpochs(epochs or ((256, 0),)))
    return MemberLog(log=ends, high_watermark=high_watermark, **changes)


def answer(index, one, **changes):
    fields = {"grant": GRANT, "highest_epoch": 256, "directory_id": UUID(int=index + 10), "generation": 0}
    return MemberAnswer(index=index, logs={0: one}, **fields | changes)


class Voters:
    """As an Election of member 1. others: what members answer, who are silent else."""

    def __init__(self, directory, own, *others, grant=GRANT):
        self.index, self.leader_alive_ms = 1, 15_000
        self.state_store = ElectionStateStore(directory, UUID(int=1), REAL_FILESYSTEM)
        self.state_store.keep(ElectionState(grant=grant, member=1))
        self.found, self.own_log, self.done = {one.index: one for one in others}, own, []
        self.coming, self.after = {}, {}

    def own(self):
        grant = self.state_store.kept.grant
        return answer(1, self.own_log, grant=grant, highest_epoch=grant.epoch)

    def describe_members(self, grant, timeout_s):
        return dict(self.found)

    def describe_new(self, coming, timeout_s):
        self.done.append(f"look at {[one.address for one in coming]}")
        return self.coming

    def fetch(self, fetch, grant):
        assert (grant.leader, grant.generation) == (1, GRANT.generation)
        self.done.append(fetch)

    def store(self, grant):
        self.state_store.keep(replace(self.state_store.kept, grant=grant))
        self.done.append("store")

    def give_up_lost(self):
        self.done.append("give up")

    def offer(self, grant, timeout_s):
        self.done.append("offer")
        return self.after or {index: replace(one, grant=grant) for index, one in self.found.items()}


def force(voters, **changes):
    given = {"catch_up": False, "timeout_s": 1.0, "repair": lambda _grant: (("damaged.log",), False)}
    return with_loss(voters, T_MS, **given | changes)


STORED = ["store", "give up", "offer"]


def test_who_is_left_alone_leads_in_a_generation_and_under_a_pid_of_its_own_and_says_what_may_be_lost(
    tmp_path, monkeypatch
):
    voters = Voters(tmp_path, log(10))
    monkeypatch.setattr("pushrep.outbox.promotion.secrets.randbelow", lambda _: 0)
    granted = force(voters, heard={2: Heard(T_MS + 1_000, {0: 9})})
    grant = granted.grant
    assert voters.done == STORED
    assert voters.state_store.kept.grant == grant
    assert (grant.leader, grant.generation > 0, grant.epoch) == (1, True, 257)
    assert grant.pid_epoch == 6
    assert [one.directory_id for one in grant.members] == [None, UUID(int=11), None], "the others' may be other ones"
    assert (grant.previous_members, grant.min_insync_replicas) == ((grant.members[1],), 2)
    assert (granted.unreached, granted.damaged, granted.is_read) == ((0, 2), ("damaged.log",), False)
    assert grant.accepted_loss == (
        "members [0, 2]; last contact with a leader 2023-11-14 22:13:20Z; partition 0: high watermark 8, log end 10; "
        "member 0 does not answer: last contact 2023-11-14 22:13:20Z; high watermark and log end unknown; "
        "member 2 does not answer: last contact 2023-11-14 22:13:21Z; partition 0: high watermark unknown, log end 9"
    )


def test_who_answers_is_reached_and_said_with_its_last_contact(tmp_path):
    voters = Voters(tmp_path, log(10), answer(2, log(9), contact_age_ms=20_000))
    granted = force(voters)
    assert granted.unreached == (0,)
    assert granted.grant.directory_of(2) == UUID(int=12)
    assert granted.grant.accepted_loss.endswith(
        "member 2: last contact 20.0 s ago; partition 0: high watermark 8, log end 9"
    )
    voters.after = {2: answer(2, log(9))}  # it has stored no more than before
    assert force(voters).unreached == (0, 2)


@pytest.mark.parametrize(
    ("own", "others", "error", "why"),
    [
        (log(10), [answer(2, log(10), contact_age_ms=14_999)], LeaderMayBeAlive, "contact"),
        (log(10), [answer(2, log(11))], NotAhead, "member 2"),
        (log(10), [answer(2, log(10, (256, 0), (300, 9)))], NotAhead, "member 2"),
        (log(10), [answer(2, log(10), grant=FORCED, generation=FORCED.generation)], NotLeader, "generation"),
        (log(10), [answer(2, log(10), directory_id=UUID(int=11))], CantLead, "MEMBER_TWICE"),
        (log(7), [], LogNotFit, "ends at 7, below its high watermark 8"),
        (log(10, is_damaged=True), [], LogNotFit, "it is damaged"),
        (log(10, is_damaged=True), [answer(0, log(9)), answer(2, log(9))], LogNotFit, r"members \[0, 2\] lead"),
    ],
)
def test_what_must_not_be_lost_is_refused_before_anything_is_stored(tmp_path, own, others, error, why):
    voters = Voters(tmp_path, own, *others)
    with pytest.raises(error, match=why):
        force(voters)
    assert voters.done == []
    assert voters.state_store.kept.grant == GRANT


def test_what_is_damaged_here_may_be_given_up_where_nobody_else_could_lead(tmp_path):
    own = log(7, held_to=EpochEnd(256, 9))
    voters = Voters(tmp_path, own, answer(2, log(7)))
    said = force(voters, may_be_damaged=True).grant.accepted_loss
    assert "partition 0: lost here from offset 7 on, of 9" in said
    voters = Voters(tmp_path, log(10, is_damaged=True), answer(0, log(9)), answer(2, log(9)))
    with pytest.raises(LogNotFit, match="lead without it"):
        force(voters, may_be_damaged=True)
    assert voters.done == []


def test_what_others_have_more_is_fetched_before_they_set_it_aside(tmp_path):
    voters = Voters(tmp_path, log(10), answer(0, log(11)), answer(2, log(12, (256, 0), (300, 11))))
    force(voters, catch_up=True)
    assert voters.done == [Fetch(0, 2, 10, EpochEnd(300, 12)), *STORED]
    voters = Voters(tmp_path, log(10, high_watermark=10), answer(2, log(12, (256, 0), (300, 9))))
    with pytest.raises(LogNotFit, match="it agrees with member 2 only up to 9: promote that one"):
        force(voters, catch_up=True)
    assert voters.done == []
    voters.own_log = log(10, high_watermark=9)
    force(voters, catch_up=True)
    assert voters.done == [Fetch(0, 2, 9, EpochEnd(300, 12)), *STORED]


def test_records_without_a_grant_are_kept_aside_once_another_has_led_since(tmp_path):
    unfenced = Unfenced(9, EpochEnd(256, 9))
    own = log(12, (256, 0), (257, 9), unfenced=unfenced)
    voters = Voters(tmp_path, own)
    force(voters)
    assert voters.done == [Fetch(0, 1, 9, EpochEnd(256, 9)), *STORED]
    voters = Voters(tmp_path, own, grant=GRANT.renewed(257, 1))
    force(voters)
    assert voters.done == STORED, "its own go on"


def test_an_answer_that_counts_for_nothing_is_nothing_to_fetch(tmp_path):
    voters = Voters(tmp_path, log(10), answer(2, log(12), is_unfilled=True))
    force(voters, catch_up=True)
    assert voters.done == STORED
    rival, own = forced(2, 514, 7), forced(1, 513, 6)
    voters = Voters(tmp_path, log(10), answer(2, log(12), grant=rival, generation=rival.generation), grant=own)
    grant = force(voters).grant
    assert grant.accepted_loss.startswith("members [0, 2]; "), "the rival's records are not asked for"
    assert grant.generation > max(rival.generation, own.generation)


def test_a_newer_grant_that_an_answer_to_the_own_one_shows_is_followed(tmp_path):
    voters = Voters(tmp_path, log(10), answer(2, log(10)))
    voters.after = {2: answer(2, log(10), grant=replace(FORCED, generation=next_generation(1 << 40, 5)))}
    with pytest.raises(NotLeader):
        force(voters)
    assert voters.done == STORED


def test_a_copy_is_no_loss_that_has_to_be_accepted_while_the_others_lead_without_it(tmp_path):
    write_directory_id(tmp_path, REAL_FILESYSTEM, DirectoryId(directory_id=UUID(int=11), copy_of=(UUID(int=77),)))
    voters = Voters(tmp_path, log(10), answer(0, log(10)), answer(2, log(10)))
    with pytest.raises(CommandRefused, match=r"it is a copy, and members \[0, 2\] lead without it"):
        force(voters)
    assert voters.done == []
    voters = Voters(tmp_path, log(10), answer(2, log(10)))
    assert f"what directory {UUID(int=77).hex} took after it was copied" in force(voters).grant.accepted_loss


# -- another list ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "new", "expected"),
    [
        ({2}, ["d:1"], ({2}, ["d:1"])),
        ({2}, ["m2:1"], ({2}, ["m2:1"])),
        (set(), [], (set(), [])),
        ({7}, [], r"there is no member 7, but \[0, 1, 2\]"),
        ({1}, [], "member 1 is this directory itself"),
        ({2}, ["m0:1"], "m0:1 is member 0 already"),
    ],
)
def test_which_change_of_the_list_may_be_asked_for(tmp_path, lost, new, expected):
    voters = Voters(tmp_path, log(10))
    if isinstance(expected, str):
        with pytest.raises(CommandRefused, match=expected):
            list_change(voters, frozenset(lost), new)
    else:
        found = list_change(voters, frozenset(lost), new)
        assert (found.lost, list(found.new)) == expected
        assert found.is_any is bool(lost or new)


def test_what_an_earlier_try_has_done_is_not_asked_for_again(tmp_path):
    change = ListChange(frozenset({2}), ["d:1", "e:1"])
    voters = Voters(tmp_path, log(10))
    granted = force(voters, change=change)
    grant = granted.grant
    assert voters.done == ["look at ['d:1', 'e:1']", *STORED]
    assert [(one.index, one.address) for one in grant.members] == [(0, "m0:1"), (1, "m1:1"), (3, "d:1"), (4, "e:1")]
    assert granted.unreached == (0,), "member 2 is lost"
    again = list_change(voters, frozenset({2}), ["d:1", "f:1"])
    assert (again.lost, list(again.new)) == (frozenset(), ["f:1"])
    with pytest.raises(CommandRefused, match="there is no member 5"):
        list_change(voters, frozenset({2, 5}), [])
    settled = replace(GRANT.renewed(257, 1), members=GRANT.members[:2], next_index=3)
    with pytest.raises(CommandRefused, match="there is no member 2"):
        list_change(Voters(tmp_path, log(10), grant=settled), frozenset({2}), [])
    by_another = Voters(tmp_path, log(10), grant=forced(0, 512, 5, members=grant.members))
    with pytest.raises(CommandRefused, match="there is no member 2"):
        list_change(by_another, frozenset({2}), [])


def test_a_lost_member_that_answers_is_not_lost(tmp_path):
    voters = Voters(tmp_path, log(10), answer(2, log(10)))
    with pytest.raises(CommandRefused, match="member 2 answers: it is not lost"):
        force(voters, change=ListChange(frozenset({2})))
    assert voters.done == []
    voters.found = {2: answer(2, log(0, high_watermark=0), is_unfilled=True)}  # a new disk at its address
    force(voters, change=ListChange(frozenset({2})))
    assert voters.done == STORED


def test_two_nodes_of_one_disk_do_not_come_in(tmp_path):
    voters = Voters(tmp_path, log(10))
    voters.coming = {3: answer(3, log(0, high_watermark=0), grant=None, directory_id=UUID(int=11))}
    with pytest.raises(CantLead, match="members 1 and 3 lead to one directory"):
        force(voters, change=ListChange(frozenset({2}), ["d:1"]))
    assert "store" not in voters.done
