"""N10: one member shows a newer grant. The leader leads on while m members confirm its own; else it stops in time."""

from dataclasses import replace

import pytest

from pushrep.election.errors import NotLeader
from pushrep.election.grants import next_ballot
from pushrep.election.leader import Confirmations
from pushrep.outbox.errors import DeliveryFailed
from pushrep.replicate import channel, leading
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_calls import NodeCalls
from pushrep.wire import push_messages as wire
from pushrep.wire.error_codes import ErrorCode
from tests.integration.outboxes import QUICK, WAIT_S, open_outbox, wait_for_all, wait_until

ALIVE_MS = 2_000
LOOKS = 10  # half as long again as the leader may be in doubt


class Liar:
    """Node 1 once it is bad: as `lies` says, an answer shows a grant that nobody has."""

    def __init__(self, world, patch):
        self.world, self.lies, self.looks = world, lambda _answer: False, 0
        whole, newer_grant = NodeCalls.answer, Confirmations.newer_grant

        def answer(calls, request, sender):
            found = whole(calls, request, sender)
            return self.altered(found) if calls is world.nodes[1].calls and self.lies(found) else found

        def counted(confirmations, now_ms):
            self.looks += 1
            return newer_grant(confirmations, now_ms)

        patch.setattr(NodeCalls, "answer", answer)
        patch.setattr(Confirmations, "newer_grant", counted)
        patch.setattr(leading, "LEADER_ALIVE_MS", ALIVE_MS)
        patch.setattr(channel, "BEAT_MS", 50)

    def altered(self, answer):
        if isinstance(answer, wire.BeatResponse):
            return replace(answer, grant_epoch=answer.grant_epoch + 258, grant_leader=2)
        if isinstance(answer, wire.AppendRecordsResponse):
            newer = {"error_code": ErrorCode.FENCED_LEADER_EPOCH, "grant_leader": 2}
            results = [replace(one, grant_epoch=one.grant_epoch + 258, **newer) for one in answer.results]
            return replace(answer, results=tuple(results))
        if isinstance(answer, wire.GrantResponse | wire.DescribeLogResponse):
            made = tuple(one.renewed(next_ballot(2, one.epoch), 2) for one in answer.grants)
            return replace(answer, grants=made, highest_epoch=1 << 30)
        return answer

    def wait_through_doubt(self, outbox):
        """Longer than a leader that too few confirm would lead on."""
        troubles = outbox.facts.replication.leading.troubles
        wait_until(
            lambda: "shows a newer grant or member list, of epoch" in troubles().get(1, ""), "the status says it"
        )
        before = self.looks
        wait_until(lambda: self.looks >= before + LOOKS, "the leader was in doubt for long")


@pytest.fixture
def liar(world, monkeypatch):
    made = Liar(world, monkeypatch)
    for index in (1, 2):
        world.node(index)
    return made


@pytest.mark.parametrize(
    "kind",
    [wire.BeatResponse, wire.AppendRecordsResponse, wire.GrantResponse | wire.DescribeLogResponse, wire.Response],
    ids=["heartbeats", "pushes", "looks", "all"],
)
def test_n10_one_members_altered_answers_end_no_lead(world, liar, kind):
    """Neither while the leader only leads nor when it makes the next grant; and the member is back once it is well."""
    with open_outbox(world, 1, 2, min_insync_replicas=2) as outbox:
        wait_for_all(outbox)
        led_by = outbox.facts.replication.leads_by_the_newest_grant
        liar.lies = lambda answer: isinstance(answer, kind | wire.BeatResponse)
        liar.wait_through_doubt(outbox)
        outbox.append(0, b"led on").result(WAIT_S)
        assert led_by()
        outbox.facts.replication.change_members(lambda newest, epoch: newest.renewed(epoch, 0))
        wait_for_all(outbox, world.nodes[2].address)  # the liar may be in sync first, and alone until its next answer
        outbox.append(0, b"by the next grant").result(WAIT_S)
        liar.lies = lambda _answer: False
        wait_for_all(outbox)


def test_n10_one_altered_answer_ends_no_lead_of_two_that_need_each_other(world, liar, monkeypatch):
    """It is asked again, and shows the grant that it has; a delay later on is not put down to that answer."""
    lies = iter([True])
    with open_outbox(world, 1, min_insync_replicas=2) as outbox:
        wait_for_all(outbox)
        liar.lies = lambda answer: isinstance(answer, wire.BeatResponse) and next(lies, False)
        wait_until(lambda: liar.looks, "the answer was heard")
        outbox.append(0, b"led on").result(WAIT_S)
        wait_for_all(outbox)

        leads = outbox.facts.replication.leading

        def troubles_of_a_slow_one():
            with monkeypatch.context() as slow:
                for led in leads.partitions.values():
                    slow.setattr(led.leader, "in_sync", {0})
                return leads.troubles()

        wait_until(lambda: troubles_of_a_slow_one() == {}, "what is over is forgotten")


def test_n10_a_grant_that_only_one_member_stored_ends_no_lead(world, liar):
    """A promotion that went no further: no lie, but no lead either."""
    with open_outbox(world, 1, 2, min_insync_replicas=2) as outbox:
        wait_for_all(outbox)
        grant = outbox.facts.replication.grant
        newer = grant.renewed(next_ballot(2, grant.epoch), 2)
        with ReplicaClient(world.nodes[1].address, QUICK) as client:
            told = client.ask(wire.GrantRequest(grant=newer, sender=2, member=1), wire.GrantResponse)
        assert told.grants == (newer,)
        liar.wait_through_doubt(outbox)
        outbox.append(0, b"led on").result(WAIT_S)
        wait_for_all(outbox, world.nodes[2].address)
        outbox.facts.replication.hold_takeovers(1_000, "to see whether it may")
        outbox.append(0, b"by the next grant").result(WAIT_S)


def test_n10_a_leader_that_too_few_confirm_stops(world, liar):
    with open_outbox(world, 1, 2, min_insync_replicas=2) as outbox:
        wait_for_all(outbox)
        world.nodes[2].stop()
        liar.lies = lambda _answer: True
        late = outbox.append(0, b"to nobody")
        wait_until(lambda: outbox.facts.replication.why_not_leading() is not None, "it stops")
        assert isinstance(outbox.facts.replication.why_not_leading(), NotLeader)
        with pytest.raises((NotLeader, DeliveryFailed)):
            late.result(WAIT_S)
