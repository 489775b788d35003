"""A member of a group against a model of its client: what is paused, where each partition is read, what is consumed.

The client does what it is told; brokers and the operator are the test's.
"""

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from filtering import StreamMetadata
from filtering.consumers.assignment import FilterSettings
from filtering.consumers.group_member import (
    AskCommitted,
    AskStartpoints,
    ClientFacts,
    CommittedOffset,
    GroupMember,
    Pause,
    Reset,
    Resume,
    Seek,
    run,
)
from filtering.consumers.startpoints import PartitionFacts, RefusedStartpoint, StartTarget
from filtering.errors import BadFilterSetting
from filtering.retry import Failure

PARTITIONS = [("orders", n) for n in range(3)]
RESET_TO = 10
"""Where the client's reset policy begins."""
SAYS = ["there", "there, without marks", "nowhere", "off"]
some = st.sets(st.sampled_from(PARTITIONS), min_size=1)
one = st.sampled_from(PARTITIONS)


class Away(Exception):
    """No broker answers now."""


class Refused(Exception):
    """It can't be applied."""


class Operator:
    """The newest startpoint of each partition, and which of them a commit has consumed."""

    look_every_s = 30.0

    def __init__(self):
        self.newest, self.done, self.changes, self.asked = {}, {}, 0, 0

    def say(self, partition, answer):
        self.changes += 1
        self.newest[partition] = (self.changes, answer(self.changes))

    def version(self):
        self.asked += 1
        return self.changes

    def pending(self, _group, facts, committed):
        return self._above((facts.topic, facts.partition), committed)

    def moved(self, _group, facts, running):
        return self._above((facts.topic, facts.partition), running)

    def _above(self, partition, known):
        sequence, answer = self.newest.get(partition, (0, None))
        return answer if sequence > known else None

    def consumed(self, _group, topic, partition, sequence):
        self.done[topic, partition] = sequence


class Member(RuleBasedStateMachine):
    def __init__(self, *, follows=True):
        super().__init__()
        self.operator, self.committed = Operator(), {}
        self.assigned, self.paused, self.at = set(), set(), {}
        self.is_away, self.now_s = False, 0.0
        facts = ClientFacts(
            lambda topic, n, position: PartitionFacts(topic, n, None, None, position),
            lambda error: Failure.TRANSIENT if isinstance(error, Away) else Failure.PERMANENT,
            lambda _error: False,
            lambda _record: None,
        )
        self.member = GroupMember("g", FilterSettings(carrier="key"), self.operator if follows else None, facts)

    def do(self, call):
        match call:
            case Seek(partition, offset):
                assert partition in self.assigned
                self.at[partition] = offset
            case Reset(partition):
                self.at[partition] = None
            case Pause(partitions):
                assert self.assigned.issuperset(partitions)
                self.paused.update(partitions)
            case Resume(partitions):
                assert self.paused.issuperset(partitions), "nothing is resumed that is not paused"
                self.paused.difference_update(partitions)
            case AskStartpoints(question):
                return question()
            case AskCommitted(partitions):
                if self.is_away:
                    raise Away
                return {one: self.committed.get(one, CommittedOffset(None, None)) for one in partitions}
        return None

    def run(self, steps):
        return run(steps, self.do)

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(partitions=some, is_away=st.booleans())
    def come(self, partitions, is_away):
        self.is_away = is_away
        partitions -= self.assigned
        try:
            starts = self.run(self.member.load(sorted(partitions)))
        except Away:
            self.assigned |= partitions
            self.run(self.member.hold(partitions))
        else:
            self.assigned |= partitions
            self.at.update(starts)
            self.run(self.member.pause_stopped())

    @rule(partitions=some)
    def go(self, partitions):
        partitions &= self.assigned
        assert set(self.member.forget(partitions)) == partitions & self.paused
        self.assigned -= partitions
        self.paused -= partitions

    @rule(is_away=st.booleans())
    def load_again(self, is_away):
        self.is_away = is_away
        held = self.assigned - set(self.member.assignment) - set(self.member.watcher.stopped)
        assert self.member.holds_any == bool(held)
        loaded = self.run(self.member.load_again())
        assert set(loaded) == (set() if self.is_away else held)

    @rule(
        partition=one, at=st.integers(0, 30), what=st.sampled_from(["there", "there, without marks", "nowhere", "off"])
    )
    def operator_says(self, partition, at, what):
        self.operator.say(
            partition,
            lambda sequence: {"nowhere": RefusedStartpoint(sequence, Refused()), "off": None}.get(
                what, StartTarget(at, sequence, reset_marks="without" in what)
            ),
        )

    @rule(is_away=st.booleans())
    def follow(self, is_away):
        self.is_away = is_away
        self.now_s += Operator.look_every_s
        for _ in range(2):  # of which the second asks nobody
            asked = self.operator.asked
            with suppress(Refused):
                self.run(self.member.follow(self.now_s))
        if not self.is_away:
            assert self.operator.asked == asked, "it is not time yet"
            for partition in sorted(self.assigned & {*self.member.assignment, *self.member.watcher.stopped}):
                _, answer = self.operator.newest.get(partition, (0, None))
                assert (partition in self.member.watcher.stopped) == isinstance(answer, RefusedStartpoint)

    @rule(count=st.integers(1, 3))
    def read(self, count):
        for partition in sorted(self.assigned - self.paused):
            for _ in range(count):
                if (offset := self.at[partition]) is None:
                    offset = RESET_TO
                key = StreamMetadata(7, partition[1], offset).pack()
                self.member.admit(partition, offset, key, None)
                self.at[partition] = offset + 1

    @rule()
    def commit(self):
        for due, metadata, stored in (positions := self.run(self.member.positions(0))):
            assert stored is None
            self.committed[due.topic, due.partition] = CommittedOffset(due.offset, metadata)
        self.run(self.member.committed(positions))
        for due, *_ in positions:
            if due.has_new_startpoint:
                assert self.operator.done[due.topic, due.partition] == due.startpoint
        assert not self.run(self.member.positions(0)), "nothing is due any more"

    @rule(partition=one, at=st.none() | st.integers(0, 30), is_away=st.booleans())
    def seek(self, partition, at, is_away):
        """at: None: the committed position."""
        self.is_away = is_away
        if at is None and (at := self.committed.get(partition, CommittedOffset(None, None)).offset) is None:
            return
        if partition not in self.assigned:
            return
        before = self.at.get(partition)
        try:
            self.run(self.member.seek(partition, at))
        except Away:
            assert self.at.get(partition) == before
        except BadFilterSetting:
            assert partition not in self.member.assignment, "it is not read here"

    @rule()
    def back(self):
        self.is_away = False
        self.run(self.member.back_to_committed())

    @rule(partition=one)
    def come_anew(self, partition):
        """The client is given it again, and may have forgotten that it was paused."""
        if partition in self.assigned:
            self.is_away = True
            self.paused.discard(partition)
            self.member.watcher.forget([partition])
            self.run(self.member.hold([partition]))

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_assigned_is_read_or_paused(self):
        assert self.member.partitions == self.assigned
        assert self.paused == self.assigned - set(self.member.assignment)

    @invariant()
    def each_is_read_where_a_commit_would_say(self):
        for partition in self.member.assignment:
            position = self.member.assignment.position(partition)
            assert position is None or position == self.at[partition], partition

    @invariant()
    def a_read_waits_no_longer_than_for_what_is_held(self):
        waits_s = self.member.wait_s(-1.0), self.member.wait_s(100.0), self.member.wait_s(0.0)
        assert waits_s == ((1.0, 1.0, 0.0) if self.member.holds_any else (30.0, 30.0, 0.0))


P, Q, _ = PARTITIONS


@pytest.mark.parametrize(
    "story",
    [
        [("come", {P}, False), ("operator_says", P, 5, "nowhere"), ("back",)],
        [("come", {P}, False), ("read", 1), ("commit",), ("operator_says", P, 5, "nowhere"), ("seek", P, None, False)],
        [("operator_says", P, 5, "nowhere"), ("come", {P}, False), ("go", {P}), ("come", {P}, False)],
        [
            ("come", {P, Q}, False), ("operator_says", P, 5, "nowhere"), ("follow", False), ("come_anew", P),
            ("operator_says", P, 5, "off"), ("load_again", True), ("load_again", False), ("read", 1), ("commit",),
        ],
        [("come", {P}, True), ("operator_says", P, 5, "nowhere"), ("load_again", False), ("go", {P})],
    ],
)  # fmt: skip
def test_stopped_is_what_may_not_be_read_and_nothing_else(story):
    told = Member()
    for name, *given in story:
        getattr(told, name)(*given)
        told.what_is_assigned_is_read_or_paused()
        told.each_is_read_where_a_commit_would_say()


def test_without_startpoints_too_a_read_waits_no_longer_than_for_what_is_held():
    told = Member(follows=False)
    assert [told.member.wait_s(one) for one in (-1.0, 0.5, 100.0)] == [-1.0, 0.5, 100.0]
    told.come({P}, True)
    assert [told.member.wait_s(one) for one in (-1.0, 0.5, 100.0)] == [1.0, 0.5, 1.0]


Member.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_member_and_its_client_agree = Member.TestCase
