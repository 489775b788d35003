"""Opened while too few members answer: what ALL refuses, what LOCAL appends without a grant, and what becomes of it."""

import errno

import pytest

from pushrep import Acks
from pushrep.election.errors import NotAhead, NotLeader, TooFewMembers
from pushrep.election.grants import Member, owner_of
from pushrep.env import RealFilesystem
from pushrep.log import SegmentLog
from pushrep.outbox import DeliveryFailed, NotEnoughReplicas
from pushrep.outbox.promotion import promote
from tests.integration.test_failover import (
    QUICK,
    SMALL,
    WAIT_S,
    Members,
    caught_up,
    open_outbox,
    promised,
    record_bytes,
    values,
    wait_until,
)

LOCAL = {"acks": Acks.LOCAL}


@pytest.fixture
def members(world):
    return Members(world)


def stop_nodes(members):
    for index in (1, 2):
        members.world.nodes[index].stop()


def start_nodes(members):
    for index in (1, 2):
        members.world.node(index)


def lead_once(members, **settings):
    """Three records everywhere, then both nodes go; the epoch it was led by."""
    with members.lead(**settings) as outbox:
        for number in range(3):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    stop_nodes(members)
    return promised(members.world.root / "outbox").grant.epoch


def test_local_appends_without_a_grant_are_marked_and_become_granted_by_the_next_open(members):
    """Too few members, acks=LOCAL: its next own number, marked beside the grant; granted by its next stored one."""
    epoch = lead_once(members)
    with members.lead(**LOCAL) as outbox:
        assert outbox.append(0, b"alone").result(WAIT_S) == 3
        number = outbox.log(0).leader_epochs.latest_epoch
        assert number > epoch
        assert owner_of(number) == 0
        kept = promised(members.world.root / "outbox")
        assert (kept.grant.epoch, kept.number) == (epoch, number)
        assert (kept.unfenced["orders-0"].start_offset, kept.unfenced["orders-0"].granted) == (3, (epoch, 3))
        assert kept.newest_epoch == epoch, "it fences nobody"
    with members.lead(**LOCAL) as outbox:  # a second time: the mark stays where the first one was
        assert outbox.append(0, b"alone again").result(WAIT_S) == 4
        assert promised(members.world.root / "outbox").unfenced["orders-0"].granted == (epoch, 3)
    start_nodes(members)
    with members.lead() as outbox:
        assert promised(members.world.root / "outbox").unfenced == {}
        assert outbox.append(0, b"together").result(WAIT_S) == 5
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    members.world.close()
    own = record_bytes(members.world.root / "outbox" / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2)] == [own, own]


def test_local_leads_beside_its_appends_as_soon_as_enough_answer(members):
    lead_once(members)
    with members.lead(**LOCAL) as outbox:
        assert outbox.append(0, b"alone").result(WAIT_S) == 3
        start_nodes(members)

        def is_pushed():
            outbox.append(0, b"meanwhile").result(WAIT_S)
            return outbox.lag()[str(members.address(1))].in_sync

        wait_until(is_pushed, "it leads")
        assert promised(members.world.root / "outbox").unfenced == {}
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    members.world.close()
    own = record_bytes(members.world.root / "outbox" / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2)] == [own, own]


def test_another_grant_that_came_first_cuts_it_aside(members, caplog):
    """A grant for another cuts it aside: `.cut`, counted, reported; it counts for nothing in comparisons."""
    lead_once(members)
    with members.lead(**LOCAL) as outbox:
        for _ in range(5):
            outbox.append(0, b"alone").result(WAIT_S)
    start_nodes(members)
    done = members.promote(1, depose=True)
    assert done.logs[0].log.log_end_offset == 3
    with open_outbox(members.directory(1), [members.address(2)]) as promoted:
        assert promoted.append(0, b"led by 1").result(WAIT_S) == 3
    with pytest.raises(NotLeader):
        members.lead(**LOCAL)
    adopted = members.adopt_old_leader()
    with open_outbox(members.directory(1), [members.address(2), members.address(0)]) as promoted:
        wait_until(lambda: caught_up(promoted, members.address(0)), "it follows")
    assert promised(adopted).unfenced == {}
    members.world.close()
    assert values(adopted / "orders-0") == [b"0", b"1", b"2", b"led by 1"]
    (kept,) = (adopted / "orders-0").glob("*.cut")
    assert kept.read_bytes().count(b"alone") == 5
    assert "5 records from offset 3 on were appended without a grant" in caplog.text


def test_another_grant_cuts_it_aside_also_where_a_loss_is_accepted(members):
    """A grant for another cuts them aside first: the others are lost for good, and this member leads alone again."""
    lead_once(members)
    with members.lead(**LOCAL) as outbox:
        outbox.append(0, b"alone").result(WAIT_S)
    start_nodes(members)
    members.promote(1, depose=True)
    with pytest.raises(NotLeader):
        members.lead(**LOCAL)
    stop_nodes(members)
    done = promote(members.world.root / "outbox", accept_loss=True, push=QUICK, timeout_s=WAIT_S)
    assert done.logs[0].log.log_end_offset == 3
    assert values(members.world.root / "outbox" / "orders-0") == [b"0", b"1", b"2"]
    (kept,) = (members.world.root / "outbox" / "orders-0").glob("*.cut")
    assert kept.read_bytes().count(b"alone") == 1


def test_while_it_is_open_another_grant_ends_its_appends(members):
    lead_once(members)
    with members.lead(**LOCAL) as outbox:
        assert outbox.append(0, b"alone").result(WAIT_S) == 3
        with outbox.facts.replication._changing:  # it looks on for members: not before the other one leads
            start_nodes(members)
            members.promote(1, depose=True)

        def is_refused():
            try:
                outbox.append(0, b"too late").result(WAIT_S)
            except NotLeader:
                return True
            except DeliveryFailed:  # it waited to be written meanwhile
                pass
            return False

        wait_until(is_refused, "refused")
    assert promised(members.world.root / "outbox").grant.leader == 1, "it keeps the grant that it was shown"


def test_all_takes_nothing_until_enough_answer_and_gets_what_they_have_more(members):
    """Too few members, acks=ALL: NOT_ENOUGH_REPLICAS until enough do; what they hold and it has not is fetched."""
    lead_once(members)
    with SegmentLog.open(members.world.root / "outbox" / "orders-0", SMALL, has_replicas=True) as log:
        log.truncate_to(1, force=True)
    with members.lead() as outbox:
        with pytest.raises(NotEnoughReplicas):
            outbox.append(0, b"alone")
        assert outbox.log(0).log_end_offset == 1
        assert promised(members.world.root / "outbox").unfenced == {}
        start_nodes(members)

        def is_taken():
            try:
                return outbox.append(0, b"together").result(WAIT_S) == 3
            except NotEnoughReplicas:
                return False

        wait_until(is_taken, "it leads")
        assert [record.value for record in outbox.log(0).records(0)] == [b"0", b"1", b"2", b"together"]


def test_a_grant_that_can_not_be_written_is_tried_again(members, monkeypatch):
    """A shortage while it looks for members must not keep it from leading until it is opened again."""
    lead_once(members)
    refused, opened = [], RealFilesystem.open

    def without_descriptors(disk, path, **more):
        if path.name.startswith("promises.json") and more.get("create"):
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return opened(disk, path, **more)

    with members.lead(acks=Acks.ALL, open_timeout_s=0.2) as outbox:
        with pytest.raises(NotEnoughReplicas):
            outbox.append(0, b"refused")
        monkeypatch.setattr(RealFilesystem, "open", without_descriptors)
        start_nodes(members)
        wait_until(lambda: refused, "it tries to lead")
        monkeypatch.undo()

        def offset():
            try:
                return outbox.append(0, b"taken").result(WAIT_S)
            except NotEnoughReplicas:
                return None

        wait_until(lambda: offset() == 3, "it leads once the grant can be written")


def test_what_would_have_to_be_cut_beside_appends_is_left_to_the_next_open(members):
    lead_once(members)
    with SegmentLog.open(members.world.root / "outbox" / "orders-0", SMALL, has_replicas=True) as log:
        log.truncate_to(1, force=True)
    with members.lead(**LOCAL) as outbox:
        assert outbox.append(0, b"alone").result(WAIT_S) == 1
        start_nodes(members)

        def is_refused():
            try:
                outbox.append(0, b"more").result(WAIT_S)
            except NotAhead:
                return True
            except DeliveryFailed:
                pass
            return False

        wait_until(is_refused, "refused")
    with members.lead() as outbox:
        assert [record.value for record in outbox.log(0).records(0)] == [b"0", b"1", b"2"]
        assert outbox.append(0, b"3").result(WAIT_S) == 3
    assert list((members.world.root / "outbox" / "orders-0").glob("*.cut")), "what was appended alone is kept"


def test_members_change_beside_appends(members):
    """One at a time, stored as a grant: a joint one, then one of the new list alone once the new one has caught up."""
    members.world.node(3)
    with members.lead(replica_lag_max_ms=60_000) as outbox:  # many are on their way, and nobody has to leave
        receipts = [outbox.append(0, b"%d" % number) for number in range(50)]
        replication = outbox.facts.replication
        replication.push_to(3, str(members.address(3)))
        wait_until(lambda: replication.has_caught_up(3), "it holds everything")
        before = replication.grant
        joined = Member(3, str(members.address(3)))
        joint = replication.change_members(lambda base, epoch: base.with_members(epoch, (*base.members, joined)))
        receipts += [outbox.append(0, b"%d" % number) for number in range(50, 100)]
        assert [one.index for one in joint.previous_members] == [0, 1, 2]
        wait_until(lambda: replication.may_settle, "the change is done")
        settled = replication.change_members(lambda base, epoch: base.settled(epoch))
        assert before.epoch < joint.epoch < settled.epoch == settled.members_epoch
        assert [one.index for one in settled.members] == [0, 1, 2, 3]
        assert settled.min_insync_replicas == 3
        receipts += [outbox.append(0, b"%d" % number) for number in range(100, 150)]
        assert [receipt.result(WAIT_S) for receipt in receipts] == list(range(150))
        wait_until(lambda: caught_up(outbox, *(members.address(index) for index in (1, 2, 3))), "all have all")
    members.world.close()
    own = record_bytes(members.world.root / "outbox" / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2, 3)] == [own] * 3
    assert promised(members.directory(3)).member == 3


def test_a_change_that_finds_too_few_half_way_goes_on_without_a_grant_until_it_leads_again(members):
    with members.lead(**LOCAL) as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")

        def change(base, epoch):
            stop_nodes(members)  # behind the look, before the grant is offered
            return base.renewed(epoch, 0)

        with pytest.raises(TooFewMembers):
            outbox.facts.replication.change_members(change)
        assert outbox.append(0, b"alone").result(WAIT_S) == 1
        kept = promised(members.world.root / "outbox")
        assert kept.unfenced["orders-0"].start_offset == 1
        assert outbox.log(0).leader_epochs.latest_epoch == kept.number > kept.grant.epoch
        start_nodes(members)
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "it leads again")
        assert promised(members.world.root / "outbox").unfenced == {}
    members.world.close()
    own = record_bytes(members.world.root / "outbox" / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2)] == [own, own]
