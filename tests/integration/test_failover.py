"""Who leads: grants on members' disks, promotion, the old leader that comes back. Nodes and outboxes of one process."""

import threading
from contextlib import contextmanager
from uuid import UUID

import pytest

from pushrep import Acks, Outbox
from pushrep.log import LogConfig, SegmentLog
from pushrep.node.promises import find_promises
from pushrep.outbox.adoption import adopt
from pushrep.outbox.promotion import promote
from pushrep.push.settings import PushSettings
from pushrep.replication.errors import NotLeader
from pushrep.replication.grants import owner_of
from pushrep.seams import REAL_FILESYSTEM

WAIT_S = 30
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, shutdown_timeout_ms=200)
SMALL = LogConfig(preallocate_bytes=0)


def open_outbox(directory, replicas, **settings):
    given = {"partitions": 1, "log_config": SMALL, "push": QUICK, "replica_lag_max_ms": 300, **settings}
    return Outbox.open(directory, "orders", producer="billing", replicas=[str(one) for one in replicas], **given)


def wait_until(what, why):
    pause = threading.Event()
    for _ in range(WAIT_S * 200):
        if what():
            return
        pause.wait(0.005)
    pytest.fail(f"never so: {why}")


def caught_up(outbox, *replicas):
    lag = outbox.lag()
    return all(lag[str(one)].records == 0 and lag[str(one)].in_sync for one in replicas)


def promised(directory):
    return find_promises(directory, REAL_FILESYSTEM)[1]


def record_bytes(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def values(directory):
    with SegmentLog.open_reader(directory, isolation="written") as reader:
        return [record.value for record in reader.records(0)]


class Members:
    """Member 0 leads from `outbox`; members 1 and 2 are nodes. Everything is one directory below the other."""

    def __init__(self, world):
        self.world = world
        for index in (1, 2):
            world.node(index)
        self.outbox_id = ""

    def address(self, index):
        return self.world.nodes[index].address

    def lead(self, **settings):
        outbox = open_outbox(self.world.root / "outbox", [self.address(1), self.address(2)], **settings)
        self.outbox_id = outbox.identity.outbox_id
        return outbox

    def directory(self, index):
        return self.world.root / f"node-{index}" / self.outbox_id

    @contextmanager
    def let_go(self, index):
        with self.world.nodes[index].let_go(UUID(self.outbox_id)):
            yield self.directory(index)

    def promote(self, index, **choices):
        with self.let_go(index) as directory:
            return promote(directory, push=QUICK, **choices)

    def adopt_old_leader(self, data=0):
        self.world.node(data)
        return adopt(self.world.root / f"node-{data}", self.world.root / "outbox")


@pytest.fixture
def members(world):
    return Members(world)


def test_a_real_grant_is_stored_by_enough_members_before_it_leads(members):
    """Leading needs N - m + 1 members that stored the grant, this one first, beside outbox.json."""
    with members.lead(partitions=2) as outbox:
        assert outbox.append(0, b"a").result(WAIT_S) == 0
        own = promised(members.world.root / "outbox")
        assert (own.member, own.grant.leader, own.grant.min_insync_replicas) == (0, 0, 2)
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both are in sync")
        kept = [promised(members.directory(index)) for index in (1, 2)]
        assert [one.grant for one in kept] == [own.grant, own.grant]
        assert [one.member for one in kept] == [1, 2], "each knows which member it is"
        assert [one.address for one in own.grant.members] == ["", str(members.address(1)), str(members.address(2))]
        first = own.grant.epoch
    with members.lead(partitions=2):
        again = promised(members.world.root / "outbox").grant
        assert again.epoch > first, "every open takes a new number"
        assert owner_of(again.epoch) == 0
        assert again.members_epoch == own.grant.members_epoch, "a renewal changes no list"


def test_promoted_and_reopened_it_holds_everything_and_the_old_leader_follows(members):
    """`pushrep promote`: all partitions; the node lets go; the old leader gets NotLeader, rejoins, is cut by epoch."""
    with members.lead(partitions=2, acks=Acks.LOCAL) as outbox:
        for number in range(40):
            assert outbox.append(number % 2, b"%d" % number).result(WAIT_S) == number // 2
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        members.world.nodes[1].stop()
        members.world.nodes[2].stop()
        for partition in range(2):
            assert outbox.append(partition, b"in this log only").result(WAIT_S) == 20
    for index in (1, 2):
        members.world.node(index)
    done = members.promote(1)
    assert (done.grant.leader, owner_of(done.grant.epoch)) == (1, 1)
    assert [(one.partition, one.log_end_offset) for one in done.partitions] == [(0, 20), (1, 20)]
    assert done.replicas == (str(members.address(2)),)
    with open_outbox(members.directory(1), [members.address(2)], partitions=2) as promoted:
        assert promoted.append(0, b"new").result(WAIT_S) == 20
        assert promoted.identity.member == 1
        with pytest.raises(NotLeader) as refused:
            members.lead(partitions=2)
        assert refused.value.leader == 1
        adopted = members.adopt_old_leader()
    replicas = [members.address(2), members.address(0)]
    with open_outbox(members.directory(1), replicas, partitions=2) as promoted:
        assert promoted.append(1, b"newer").result(WAIT_S) == 20
        wait_until(lambda: caught_up(promoted, *replicas), "the old leader follows")
        assert promised(adopted).grant.leader == 1
    members.world.close()
    for partition in range(2):
        own = record_bytes(members.directory(1) / f"orders-{partition}")
        copies = [record_bytes(members.directory(index) / f"orders-{partition}") for index in (0, 2)]
        assert copies == [own, own]
        assert values(adopted / f"orders-{partition}")[:20] == [b"%d" % (2 * n + partition) for n in range(20)]
        cut = list((adopted / f"orders-{partition}").glob("*.cut"))
        assert cut, "what only the old leader had is kept aside"
