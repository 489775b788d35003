"""Leadership: grants on the members' disks, promotion, and former leaders that reconnect. Nodes and outboxes in one
process.
"""

import errno
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from uuid import UUID

import pytest

from pushrep import Acks, Durability, Outbox, OutboxConfig
from pushrep.election.errors import LeaderMayBeAlive, LogNotFit, NotAhead, NotLeader, TooFewMembers
from pushrep.election.grants import next_ballot, owner_of
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.env.filesystem import RealFile
from pushrep.log import LogConfig, SegmentLog
from pushrep.outbox import DeliveryFailed, LogStopped, NotEnoughReplicas, OutboxDiffers, promotion, read_identity
from pushrep.outbox.control import ask
from pushrep.outbox.directory_handover import adopt
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.promotion import election_in, promote, with_loss
from pushrep.records import encode_batch
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.settings import PushSettings
from pushrep.wire.push_messages import GrantRequest, GrantResponse
from tests.readers.batch_bytes import HEADER_BYTES, parse_batches
from tests.support.outbox_arguments import outbox_arguments

WAIT_S = 60
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1)
SMALL = LogConfig(preallocate_bytes=0)


def open_outbox(directory, replicas, **settings):
    given = {"partitions": 1, "log_config": SMALL, "push": QUICK, "replica_lag_max_ms": 300, "open_timeout_s": WAIT_S}
    given |= settings
    return Outbox.open(
        directory, "orders", **outbox_arguments(producer="billing", replicas=[str(one) for one in replicas], **given)
    )


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
    return find_election_state(directory, REAL_FILESYSTEM)[1]


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
        with self.world.nodes[index].hand_over(UUID(self.outbox_id)) as last_contact:
            yield self.directory(index), last_contact

    def promote(self, index, **choices):
        with self.let_go(index) as (directory, last_contact):
            return promote(directory, push=QUICK, last_contact=last_contact, **{"timeout_s": WAIT_S, **choices})

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


def test_what_was_set_where_a_member_leads_holds_in_each_takeover_by_it(members):
    """From the first log that it opens on: retention by other settings would remove what is to be kept."""

    def promoted():
        return open_outbox(members.directory(1), [members.address(2)])

    with members.lead() as outbox:
        # Its goodbye goes over these connections.
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both are in sync")
    members.promote(1)
    with promoted() as outbox:
        wait_until(lambda: caught_up(outbox, members.address(2)), "it is in sync")
        assert ask(members.directory(1), "set", {"changes": {"segment_ms": 7}, "deleted": []}) == {"segment_ms": 7}
        assert outbox.log(0).config.segment_ms == 7
    members.promote(2)
    with (
        members.let_go(1) as (directory, _),
        election_in(
            directory,
            UUID(members.outbox_id),
            contact_age_ms=None,
            push=QUICK,
            log_config=SMALL,
            filesystem=REAL_FILESYSTEM,
            clock=SYSTEM_CLOCK,
        ) as election,
    ):
        config = election.logs[0].config
        assert (config.segment_ms, config.preallocate_bytes) == (7, 0)
    members.promote(1, catch_up=True)
    with promoted() as outbox:
        assert outbox.log(0).config.segment_ms == 7


def flip(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_promotion_notices_what_rotted_long_ago_and_fetches_or_names_it(members):
    """identity O8: below the watermark, where no opening looks."""
    small = LogConfig(preallocate_bytes=0, segment_bytes=1000)
    for index in (1, 2):
        members.world.nodes[index].stop()
        members.world.node(index, log_config=small)
    with members.lead(log_config=small) as outbox:
        for _ in range(10):
            outbox.append(0, bytes(300)).result(WAIT_S)
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    first, second = sorted((members.directory(1) / "orders-0").glob("*.log"))[:2]
    whole = first.read_bytes()
    flip(first)
    flip(second)
    flip(members.directory(2) / "orders-0" / second.name)
    done = members.promote(1)
    assert first.read_bytes() == whole
    [damaged] = done.granted.damaged
    assert f"orders-0/{second.name} from offset" in damaged
    assert done.granted.is_read
    assert not members.promote(1, verify_s=0).granted.is_read


def test_promoted_and_reopened_it_holds_everything_and_the_old_leader_follows(members):
    """`pushrep promote` of all partitions: the node releases the directory; the old leader gets NotLeader, rejoins, and
    is cut by epoch.
    """
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
    done = members.promote(1, depose=True)  # they started just now, and may have heard the leader before
    assert (done.grant.leader, owner_of(done.grant.epoch)) == (1, 1)
    assert [(partition, one.log.log_end_offset) for partition, one in sorted(done.logs.items())] == [(0, 20), (1, 20)]
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


def test_another_that_holds_more_is_not_passed_over(members):
    """Only the highest may lead, another is refused with both pairs shown, or with catch_up fetches first."""
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
        members.world.nodes[2].stop()
        for number in range(1, 6):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
    members.world.node(2)
    with pytest.raises(NotAhead) as refused:
        members.promote(2, depose=True)  # it started just now, and knows nothing of the leader's end
    assert (refused.value.own[1], refused.value.member, refused.value.theirs[1]) == (1, 1, 6)
    assert "ends at 1 in epoch" in str(refused.value)
    assert "at 6 in epoch" in str(refused.value)
    assert promised(members.directory(1)).grant.leader == 0, "a refused promotion fenced nobody"
    done = members.promote(2, catch_up=True, depose=True)
    assert done.logs[0].log.log_end_offset == 6
    with open_outbox(members.directory(2), [members.address(1)]) as promoted:
        assert [record.value for record in promoted.log(0).records(0)] == [b"%d" % n for n in range(6)]
        assert promoted.append(0, b"6").result(WAIT_S) == 6
        assert promoted.last_metadata(promoted.pid, 0) == 6, "the new leader goes on under the PID of the outbox"


def test_too_few_members_refuse_a_promotion_unless_the_loss_is_accepted(members):
    """Fewer members: refused, or accept_loss, which shows HWM, LEO and last contact and is written into the grant."""
    with members.lead() as outbox:
        for number in range(3):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        wait_until(lambda: members.world.replica(1).log.high_watermark == 3, "the last watermark has come, too")
        pid = outbox.pid
    members.world.nodes[2].stop()
    with pytest.raises(TooFewMembers) as refused:
        members.promote(1)
    assert (refused.value.answered, refused.value.needed, refused.value.silent) == (1, 2, (0, 2))
    assert promised(members.directory(1)).grant.leader == 0, "an attempt that can't succeed fences nobody"
    done = members.promote(1, accept_loss=True)
    assert "members [0, 2]; last contact with a leader 20" in done.grant.accepted_loss
    assert "partition 0: high watermark 3, log end 3" in done.grant.accepted_loss
    assert "member 0 does not answer: last contact 20" in done.grant.accepted_loss
    assert (
        "member 2 does not answer: last contact unknown; high watermark and log end unknown" in done.grant.accepted_loss
    )
    assert promised(members.directory(1)).grant.accepted_loss == done.grant.accepted_loss
    members.world.node(2)
    with open_outbox(members.directory(1), [members.address(2)]) as promoted:
        assert promoted.append(0, b"3").result(WAIT_S) == 3
        assert promoted.pid != pid, "offsets that the others gave out are given out again"


def test_a_member_of_a_higher_index_leads_by_numbers_of_its_own_and_gives_the_lead_back(members):
    """Member i uses only epochs that are i mod 256; each leader can be replaced again, also by the first one."""
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
    members.promote(2)
    with open_outbox(members.directory(2), [members.address(1)]) as second:
        assert second.append(0, b"2").result(WAIT_S) == 1
        assert owner_of(second.log(0).leader_epochs.latest_epoch) == 2
    members.adopt_old_leader()
    with open_outbox(members.directory(2), [members.address(1), members.address(0)]) as second:
        wait_until(lambda: caught_up(second, members.address(1), members.address(0)), "both follow")
    done = members.promote(0)
    assert owner_of(done.grant.epoch) == 0
    assert set(done.replicas) == {str(members.address(1)), str(members.address(2))}
    with open_outbox(members.directory(0), done.replicas) as first:  # node 2 keeps its copy beside what it led from
        assert first.append(0, b"0 again").result(WAIT_S) == 2
        wait_until(lambda: caught_up(first, *done.replicas), "the leader before follows without an adoption")
    members.world.close()
    own = record_bytes(members.directory(0) / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2)] == [own, own]


def test_the_node_stays_away_from_a_directory_that_its_service_has_open(members):
    """After a promotion the node releases the directory, and describes it only while the service does not have it
    open.
    """
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
    members.promote(1)
    with open_outbox(members.directory(1), [members.address(2)]) as promoted:
        assert promoted.append(0, b"1").result(WAIT_S) == 1
        with pytest.raises(LeaderMayBeAlive):
            members.promote(2)
        wait_until(lambda: caught_up(promoted, members.address(2)), "it follows on")
        with pytest.raises(CommandRefused, match="has it open"):
            members.promote(1, timeout_s=0)  # nobody ends: waiting for it is the next tests' business
        assert promoted.append(0, b"2").result(WAIT_S) == 2
    assert members.promote(2, catch_up=True).logs[0].log.log_end_offset == 3
    with pytest.raises(NotLeader):
        open_outbox(members.directory(1), [members.address(2)])


def test_letting_go_waits_for_the_look_that_is_being_answered(members):
    """A node that was promoted has its directory while it answers; who is let in finds it free."""
    with members.lead() as outbox:
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "they know the grant")
    members.promote(1)
    kept = members.world.kept(1)
    done = []
    with kept.exclusive_open():
        promoting = threading.Thread(target=lambda: done.append(members.promote(1)))
        promoting.start()
        wait_until(lambda: kept.handovers, "it is asked to let go")
        promoting.join(0.5)
        assert not done, "not while a look is answered"
    promoting.join(WAIT_S)
    assert done[0].grant.leader == 1


def test_who_promotes_waits_for_a_process_that_is_just_ending(members, monkeypatch):
    monkeypatch.setattr(promotion, "_TAKE_S", WAIT_S)
    with members.lead() as outbox:
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "they know the grant")
    with members.let_go(1) as (directory, _):
        holder = "from pushrep.log.directory_files import DirectoryLock; from pushrep.env import REAL_FILESYSTEM as r; \
import sys, time, pathlib; it = DirectoryLock(pathlib.Path(sys.argv[1]), r); print('held', flush=True); time.sleep(0.3)"
        with subprocess.Popen([sys.executable, "-c", holder, str(directory)], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"held\n"
            assert promote(directory, push=QUICK, timeout_s=WAIT_S).grant.leader == 1


def test_a_running_leader_that_is_replaced_takes_nothing_more(members):
    """A newer grant: sessions end, appends fail; its record may still be delivered."""
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
        members.promote(1, depose=True)

        failed = []

        def is_refused():
            try:
                outbox.append(0, b"too late").result(WAIT_S)
            except NotLeader:
                return True
            except NotEnoughReplicas:  # the one was let go, the other is slow: it does not know of the new leader yet
                return False
            except DeliveryFailed as error:
                failed.append(error)
            return False

        wait_until(is_refused, "refused")
        assert all(error.may_be_delivered and isinstance(error.__cause__, NotLeader) for error in failed)
    with open_outbox(members.directory(1), [members.address(2)]) as promoted:
        assert [record.value for record in promoted.log(0).records(0)] == [b"0"]


def test_a_deposed_leader_whose_disk_failed_says_that_another_leads_and_frees_its_directory(members, monkeypatch):
    """A service ends its part only for NotLeader: with LogStopped it would keep the directory for ever."""
    sync, place = RealFile.sync, members.world.root / "outbox"

    def failing(file):
        if place in file.path.parents:
            raise OSError(errno.EIO, "the disk is gone")
        sync(file)

    with members.lead(durability=Durability.FLUSHED) as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
        with monkeypatch.context() as patch:
            patch.setattr(RealFile, "sync", failing)
            with pytest.raises(DeliveryFailed):
                outbox.append(0, b"1").result(WAIT_S)
            with pytest.raises(LogStopped):
                outbox.append(0, b"2")
            members.promote(1, depose=True, catch_up=True)  # the record may be at the other one

            def is_deposed():
                with pytest.raises((NotLeader, LogStopped)) as refused:
                    outbox.append(0, b"3")
                return refused.type is NotLeader

            wait_until(is_deposed, "it says that another leads")
    members.adopt_old_leader()
    with open_outbox(members.directory(1), [members.address(0), members.address(2)]) as promoted:
        wait_until(lambda: caught_up(promoted, members.address(0)), "it follows")


def test_members_come_from_the_grant_and_others_are_refused_by_name(members):
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
    members.promote(1)
    for replicas in ([], [members.address(1)], [members.address(2), "127.0.0.1:1", "127.0.0.1:2"]):
        with pytest.raises(OutboxDiffers, match=r"^replicas: "):
            open_outbox(members.directory(1), replicas)
    for setting, value in (("partitions", 2), ("carrier", "header"), ("min_insync_replicas", 1)):
        with pytest.raises(OutboxDiffers, match=f"^{setting}: "):
            open_outbox(members.directory(1), [members.address(2)], **{setting: value})
    with open_outbox(members.directory(1), [members.address(2), "127.0.0.1:1"]) as promoted:
        assert promoted.identity.replicas == ((0, "127.0.0.1:1"), (2, str(members.address(2))))
        assert read_identity(REAL_FILESYSTEM, members.directory(1)) == promoted.identity
        assert {one.index: one.address for one in promised(members.directory(1)).grant.members}[0] == "127.0.0.1:1"


def test_what_cant_be_promoted_or_adopted_says_what_to_do(members, tmp_path):
    with pytest.raises(CommandRefused, match="give <data>/<outbox id>"):
        promote(tmp_path)
    with pytest.raises(CommandRefused, match="no outbox"):
        adopt(tmp_path / "data", tmp_path)
    with Outbox.open(tmp_path / "alone", "orders", 1, "billing", config=OutboxConfig(log_config=SMALL)):
        pass
    with pytest.raises(CommandRefused, match="never had replicas"):
        adopt(tmp_path / "data", tmp_path / "alone")
    with members.lead() as outbox:
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "they know the grant")
        with pytest.raises(NotLeader):
            open_outbox(members.directory(1), [members.address(2)])
    (members.world.root / "node-3" / members.outbox_id).mkdir(parents=True)
    with pytest.raises(CommandRefused, match="the node began a copy"):
        adopt(members.world.root / "node-3", members.world.root / "outbox")


LOOKING = replace(SMALL, verify_last_segments=1)
"""A log that looks for damage at every opening."""


def damage(directory, offset):
    """Flip a byte of the batch that holds `offset`, as a disk that rots; its node is stopped."""
    with SegmentLog.open_reader(directory, isolation="written") as reader:
        (batch,) = (bytes(one.data) for one in reader.batches(offset, offset + 1))
    for path in directory.glob("*.log"):
        data = path.read_bytes()
        if batch in data:
            at = data.index(batch) + len(batch) - 3
            path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            return
    pytest.fail(f"no file holds {offset}")


def test_a_damaged_replica_is_refilled_by_push_and_counts_for_nothing_before(members):
    """From the bad byte on `.corrupt`, refilled if the leader reaches past it; it is not promoted until then."""
    with members.lead(durability=Durability.FLUSHED) as outbox:
        for number in range(30):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    members.world.nodes[1].stop()
    damage(members.directory(1) / "orders-0", offset=15)
    members.world.node(1, log_config=LOOKING)
    with pytest.raises(LogNotFit, match="it is damaged"):
        members.promote(1, log_config=LOOKING)
    members.world.nodes[2].stop()
    with members.lead() as outbox, pytest.raises(NotEnoughReplicas):
        outbox.append(0, b"two members answer, and one of them is damaged").result(WAIT_S)
    assert promised(members.directory(1)).unfilled["orders-0"] >= 30
    members.world.node(2)
    with members.lead() as outbox:
        assert outbox.append(0, b"30").result(WAIT_S) == 30
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "it was filled again")
        assert promised(members.directory(1)).unfilled == {}
    assert members.promote(1).logs[0].log.log_end_offset == 31
    members.world.close()
    own = record_bytes(members.world.root / "outbox" / "orders-0")
    assert [record_bytes(members.directory(index) / "orders-0") for index in (1, 2)] == [own, own]
    assert list((members.directory(1) / "orders-0").glob("*.corrupt")), "what lay behind the damage is kept"


def test_o8_a_leader_whose_newest_segment_is_damaged_fetches_the_rest_or_names_it(members, caplog):
    home = members.world.root / "outbox" / "orders-0"
    with members.lead() as outbox:
        for number in range(30):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        identity, own = outbox.identity, record_bytes(home)
    damage(home, offset=15)
    members.world.nodes[2].stop()
    with pytest.raises(LogNotFit, match=r"of \[15, 30\) it lost records"):
        members.lead(log_config=LOOKING, open_timeout_s=1.0)
    assert not list(home.glob("*.corrupt")), "nothing was set aside"
    members.world.node(2)
    with members.lead(log_config=LOOKING) as outbox:
        assert record_bytes(home) == own
        assert "filled again; it lies in" in caplog.text
        assert outbox.identity.pid_epoch == identity.pid_epoch, "no record was lost"
        assert outbox.append(0, b"30").result(WAIT_S) == 30
    assert values(home) == [b"%d" % number for number in range(31)]
    assert promised(home.parent).unfilled == {}
    assert list(home.glob("*.corrupt")), "what lay behind the damage is kept"


def test_o8_a_leaders_damage_below_its_log_start_costs_no_record(members):
    """The damage is in the newest segment below the log start: no reader reads it, and it is filled from the log start
    on.
    """
    home = members.world.root / "outbox" / "orders-0"
    with members.lead() as outbox:
        for number in range(30):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        outbox.facts.logs[0].delete_records(20)
        identity = outbox.identity
        outbox.append(0, b"30").result(WAIT_S)
        wait_until(lambda: members.world.replica(1).log.log_start_offset == 20, "the replica's begins there, too")
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    [path] = home.glob("*.log")
    [rotten] = [batch for batch in parse_batches(path.read_bytes()) if batch.base_offset == 7]
    flip(path, rotten.position + HEADER_BYTES)
    with members.lead(log_config=LOOKING) as outbox:
        assert outbox.append(0, b"31").result(WAIT_S) == 31
        assert outbox.identity.pid_epoch == identity.pid_epoch, "no record was lost"
        log = outbox.facts.logs[0]
        assert log.log_start_offset == 20
        assert [record.value for record in log.records(20)] == [b"%d" % number for number in range(20, 32)]


KILLED_WHEN_SET_ASIDE = """
import os, signal, sys
from pushrep import Outbox, OutboxConfig
from pushrep.log import LogConfig, SegmentLog
from pushrep.replicate.settings import PushSettings

quarantine = SegmentLog.quarantine

def killed(log):
    assert quarantine(log)
    os.kill(os.getpid(), signal.SIGKILL)

SegmentLog.quarantine = killed
config = LogConfig(preallocate_bytes=0, verify_last_segments=3)
Outbox.open(
    sys.argv[1], "orders", partitions=1, producer="billing", replicas=sys.argv[2:],
    config=OutboxConfig(
        log_config=config,
    ),
)
"""


def test_o8_a_leader_that_is_killed_when_it_has_set_damage_aside_leads_only_once_it_has_the_rest(members):
    """Its log is undamaged then, and shorter than what was acknowledged."""
    home = members.world.root / "outbox" / "orders-0"
    with members.lead() as outbox:
        for number in range(30):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        own = record_bytes(home)
    damage(home, offset=15)
    addresses = [str(members.address(index)) for index in (1, 2)]
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WHEN_SET_ASIDE, str(home.parent), *addresses],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    with SegmentLog.open_reader(home, isolation="written") as reader:
        assert reader.log_end_offset == 15
    members.world.nodes[2].stop()
    with pytest.raises(LogNotFit, match=r"of \[15, 30\) it lost records"):
        members.lead(open_timeout_s=1.0)
    members.world.node(2)
    with members.lead() as outbox:
        assert record_bytes(home) == own
        assert outbox.append(0, b"30").result(WAIT_S) == 30


def test_o8_a_damaged_leader_whom_no_quorum_can_make_whole_is_told_the_way_out(members):
    """With m = 1 every member has to answer, and a damaged one does not count: another member begins a generation."""
    home = members.world.root / "outbox" / "orders-0"
    replicas = [members.address(1)]
    with open_outbox(home.parent, replicas, min_insync_replicas=1) as outbox:
        members.outbox_id = outbox.identity.outbox_id
        for number in range(30):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1)), "it has all")
    damage(home, offset=15)
    with pytest.raises(LogNotFit, match=r"of \[15, 30\) it lost records") as refused:
        open_outbox(home.parent, replicas, log_config=LOOKING, open_timeout_s=1.0, min_insync_replicas=1)
    assert f"Member 1 ({members.address(1)}) holds all of it" in str(refused.value)
    assert "pushrep promote" in str(refused.value)
    assert "--accept-loss" in str(refused.value)
    assert not list(home.glob("*.corrupt")), "nothing was set aside"
    members.promote(1, accept_loss=True)
    members.adopt_old_leader()
    with open_outbox(members.directory(1), [members.world.nodes[0].address]) as promoted:
        assert promoted.append(0, b"30").result(WAIT_S) == 30
        wait_until(lambda: caught_up(promoted, members.world.nodes[0].address), "it is filled again")
        assert values(members.directory(1) / "orders-0") == [b"%d" % number for number in range(31)]


class Damaged:
    """Member 0 led, and is gone; member 1 has lost [15, 30) of what all three held."""

    def __init__(self, members, **settings):
        self.members = members
        with members.lead(durability=Durability.FLUSHED, **settings) as outbox:
            for number in range(30):
                assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
            wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
            self.pid = outbox.pid
        members.world.nodes[1].stop()
        self.directory = members.directory(1)
        damage(self.directory / "orders-0", offset=15)

    def promote(self, timeout_s=WAIT_S, **choices):
        return promote(self.directory, push=QUICK, timeout_s=timeout_s, log_config=LOOKING, **choices)


def test_m6_the_last_copy_leads_though_it_is_damaged_and_says_what_is_lost(members):
    damaged = Damaged(members)
    members.world.nodes[2].stop()
    with pytest.raises(LogNotFit, match=r"Where no other is left, .* --accept-loss"):
        damaged.promote(timeout_s=1.0)  # nobody answers
    done = damaged.promote(timeout_s=1.0, accept_loss=True)
    assert done.logs[0].log.log_end_offset == 15
    assert "partition 0: lost here from offset 15 on, of 30" in done.grant.accepted_loss
    assert list((damaged.directory / "orders-0").glob("*.corrupt")), "what lay behind the damage is kept"
    members.world.node(2)
    with open_outbox(damaged.directory, [members.address(2)]) as promoted:
        assert promoted.append(0, b"on").result(WAIT_S) == 15
        assert promoted.pid != damaged.pid, "offsets that were lost are given out again"
        wait_until(lambda: caught_up(promoted, members.address(2)), "it begins anew")
    for index in (1, 2):
        assert values(members.directory(index) / "orders-0") == [*(b"%d" % n for n in range(15)), b"on"]


def test_m6_a_damaged_member_gives_nothing_up_that_another_holds(members):
    damaged = Damaged(members)
    with pytest.raises(NotAhead) as refused:
        damaged.promote(accept_loss=True)
    assert (refused.value.member, refused.value.own.end_offset, refused.value.theirs.end_offset) == (2, 15, 30)
    assert promised(damaged.directory).grant.generation == 0, "nothing was changed"
    done = damaged.promote(accept_loss=True, catch_up=True)
    assert "lost here" not in done.grant.accepted_loss
    assert values(damaged.directory / "orders-0") == [b"%d" % n for n in range(30)]


def test_m6_a_damaged_member_does_not_lead_where_others_do_without_it(members):
    damaged = Damaged(members, min_insync_replicas=3)  # so any one of them leads
    with pytest.raises(LogNotFit, match=r"members \[2\] lead without it: promote one of them"):
        damaged.promote(accept_loss=True)
    assert members.promote(2, depose=True).logs[0].log.log_end_offset == 30


def test_m6_a_running_leader_gives_nothing_up_that_it_lost_itself(members):
    """`pushrep replica replace --lost` states that another's directory is destroyed, and nothing about its own."""
    damaged = Damaged(members)
    members.world.nodes[2].stop()
    with election_in(
        damaged.directory,
        UUID(members.outbox_id),
        contact_age_ms=None,
        push=QUICK,
        log_config=LOOKING,
        filesystem=REAL_FILESYSTEM,
        clock=SYSTEM_CLOCK,
    ) as election:
        with pytest.raises(LogNotFit, match="it is damaged"):
            with_loss(election, 0, catch_up=False, timeout_s=1.0, repair=lambda _grant: ((), True))
        assert election.state_store.kept.grant.generation == 0, "nothing was changed"


def cut_behind(directory, end):
    """Cut the log like a disk that lied about its syncs, as if no flush had happened."""
    path = max(directory.glob("*.log"))
    with SegmentLog.open(directory, SMALL, has_replicas=True) as log:
        size = sum(len(batch.data) for batch in log.batches(0, end))
    for name in (".pushrep_cleanshutdown", ".pushrep_published", "recovery-point-offset-checkpoint"):
        (directory.parent / name).unlink()
    path.write_bytes(path.read_bytes()[:size])


def test_a_member_that_ends_below_its_own_watermark_checkpoint_counts_for_nothing_until_refilled(members):
    """Neither as one that leads nor as one that answers: the checkpoint outlives a power cut, and so does the note."""
    with members.lead() as outbox:
        for number in range(10):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    cut_behind(members.world.root / "outbox" / "orders-0", 6)
    members.world.nodes[2].stop()  # with the other it would be enough
    for _ in range(2):  # the first opening lowers the log's own checkpoint
        with pytest.raises(LogNotFit):
            members.lead(open_timeout_s=1.0)
    assert promised(members.world.root / "outbox").unfilled == {"orders-0": 10}
    members.world.node(2)
    members.promote(1, depose=True)  # who has just started can't say since when nobody leads
    adopted = members.adopt_old_leader()
    with open_outbox(members.directory(1), [members.address(2), members.address(0)]) as promoted:
        wait_until(lambda: caught_up(promoted, members.address(0)), "it is filled again")
    assert promised(adopted).unfilled == {}
    assert members.promote(0).logs[0].log.log_end_offset == 10


def ten_of_which_member_2_lacks_five(members, **settings):
    """All are acknowledged, and neither node runs any more."""
    with members.lead(**settings) as outbox:
        for number in range(5):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have them")
        members.world.nodes[2].stop()
        for number in range(5, 10):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: members.world.replica(1).log.high_watermark == 10, "it knows that all are acknowledged")
    members.world.nodes[1].stop()


def test_a_directory_that_ends_below_its_own_watermark_is_not_promoted_though_no_node_opened_it_since(members):
    ten_of_which_member_2_lacks_five(members)
    cut_behind(members.directory(1) / "orders-0", 5)
    members.world.node(2)  # these two would be enough, and hold as much as each other
    for _ in range(2):  # the first opening lowers the log's own checkpoint
        with pytest.raises(LogNotFit):
            promote(members.directory(1), push=QUICK, timeout_s=WAIT_S, depose=True)
    assert promised(members.directory(1)).unfilled == {"orders-0": 10}


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_member_whose_log_was_removed_votes_for_nobody_and_is_not_promoted(members, is_asked):
    """The directory of the log is gone; the checkpoint beside it still has how far it was acknowledged."""
    ten_of_which_member_2_lacks_five(members, partitions=2)
    shutil.rmtree(members.directory(1) / "orders-0")
    members.world.node(2)  # it lacks half of them, so these two hold less than what was acknowledged
    if is_asked:
        members.world.node(1)
        with pytest.raises(TooFewMembers):
            members.promote(2, depose=True, timeout_s=1.0)
        members.world.nodes[1].stop()
    for _ in range(2):
        with pytest.raises(LogNotFit):
            promote(members.directory(1), push=QUICK, timeout_s=1.0, depose=True)
    members.world.node(1)
    with members.lead(partitions=2) as outbox:
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "it is filled again")
    assert promised(members.directory(1)).unfilled == {}
    assert members.promote(1, depose=True).logs[0].log.log_end_offset == 10


def test_a_leader_whose_log_was_removed_fetches_it_or_does_not_lead(members):
    """accept_loss allows the directory to be made again, not to give up records that other members hold."""
    ten_of_which_member_2_lacks_five(members, partitions=2)
    shutil.rmtree(members.world.root / "outbox" / "orders-0")
    members.world.node(2)
    for _ in range(2):
        with pytest.raises(LogNotFit, match=r"of \[0, 10\) it lost records"):
            members.lead(partitions=2, accept_loss=True, open_timeout_s=1.0)
    members.world.node(1)
    with members.lead(partitions=2, accept_loss=True) as outbox:
        assert outbox.append(0, b"10").result(WAIT_S) == 10
    assert values(members.world.root / "outbox" / "orders-0") == [b"%d" % n for n in range(11)]


@pytest.mark.parametrize("by", ["promotion", "opening"])
def test_a_loss_is_remembered_though_another_partition_could_not_be_opened(members, monkeypatch, by):
    """The opening that finds it lowers the log's own checkpoint: no later one sees it."""
    directory = members.world.root / "outbox"
    with members.lead(partitions=2) as outbox:
        for number in range(5):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
        wait_until(lambda: members.world.replica(1).log.high_watermark == 5, "it knows that all are acknowledged")
    opening = partial(members.lead, partitions=2)
    if by == "promotion":
        members.world.nodes[1].stop()
        directory = members.directory(1)
        opening = partial(promote, directory, push=QUICK, timeout_s=WAIT_S, depose=True)
    cut_behind(directory / "orders-0", 3)
    opened = SegmentLog.open

    def failing(path, *arguments, **settings):
        if path.name == "orders-1":
            raise OSError(errno.EMFILE, "too many open files")
        return opened(path, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "open", failing)
        with pytest.raises(OSError, match="too many"):
            opening()
    assert promised(directory).unfilled == {"orders-0": 5}


def test_what_a_member_shows_after_a_grant_has_every_append_that_was_judged_before_it(members):
    """A request in the middle of its effects while the grant is stored: it is acknowledged, so it has to be shown."""
    with members.lead() as outbox:
        assert outbox.append(0, b"0").result(WAIT_S) == 0
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have it")
    kept = members.world.kept(2)
    replica = members.world.replica(2)
    grant = kept.election_state.grant.renewed(next_ballot(1, kept.election_state.grant.epoch), leader=1)
    request = GrantRequest(grant=grant, sender=1, member=2, partitions=(replica.tp,))
    shown = []

    def offer():
        with ReplicaClient(members.address(2), QUICK) as client:
            shown.append(client.ask(request, GrantResponse))

    offering = threading.Thread(target=offer)
    with replica.lock:  # as `follow` holds it
        offering.start()
        wait_until(lambda: kept.election_state.grant == grant, "the grant is stored")
        threading.Event().wait(0.2)  # as long as an answer too early would need; a right one does not come
        batch = encode_batch([b"judged before"], timestamps_ms=1)
        batch.stamp(1, replica.log.leader_epochs.latest_epoch)
        replica.log.append_as_is([batch])
    offering.join(WAIT_S)
    assert shown[0].logs[0].log_end_offset == 2


def test_a_damaged_replica_waits_for_an_operator_while_its_leader_ends_below_what_it_lost(members, caplog):
    with members.lead() as outbox:
        for number in range(5):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_until(lambda: caught_up(outbox, members.address(1), members.address(2)), "both have all")
    members.world.nodes[1].stop()
    damage(members.directory(1) / "orders-0", offset=2)
    members.world.node(1, log_config=LOOKING)
    kept = members.world.kept(1)
    kept.state_store.note_lost("orders-0", 1000)
    with members.lead() as outbox:
        wait_until(lambda: "its leader ends below 1000" in caplog.text, "it says why it waits")
        assert outbox.append(0, b"5").result(WAIT_S) == 5, "the others go on"
        assert not outbox.lag()[str(members.address(1))].in_sync
    assert not list((members.directory(1) / "orders-0").glob("*.corrupt")), "nothing was set aside"
