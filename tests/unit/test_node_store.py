"""What a node stores of an outbox, when two calls coincide."""

import errno
import inspect
import json
import shutil
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from pushrep.election.epochs import EpochEnd, Unfenced
from pushrep.election.grants import Grant, Hold, Member, SettledList, Takeover, next_generation
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, RealFilesystem
from pushrep.env.checked_json import write_checked_json
from pushrep.errors import CorruptFile
from pushrep.log import LogClosed, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile, read_checkpoint
from pushrep.records import encode_batch
from pushrep.replicate.election import Election
from pushrep.replicate.election_state import (
    ElectionState,
    ElectionStateStore,
    find_election_state,
    write_election_state,
)
from pushrep.replicate.errors import Refusal
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.node_store import KeptOutbox, NodeStore
from pushrep.replicate.replica import DiskTrouble, ReplicaLog
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

OUTBOX = UUID(int=7)
ADDRESSES = ["a:1", "b:1", "c:1"]


def grant(epoch, partitions=1):
    return Grant(
        outbox_id=OUTBOX, epoch=epoch, leader=epoch % 256, members=tuple(map(Member, range(3), ADDRESSES)),
        min_insync_replicas=2, members_epoch=256, pid_epoch=0, topic_id=UUID(int=8), topic="orders",
        partitions=partitions, carrier="key",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    store = NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), REAL_FILESYSTEM, SYSTEM_CLOCK)
    yield store
    store.close()


def test_faults_f1_a_node_goes_on_in_its_moved_directory(tmp_path):
    data, moved = tmp_path / "data", tmp_path / "moved"
    settings = NodeSettings(address=Address("127.0.0.1", 1))
    with closing(NodeStore(data, settings, RealFilesystem(), SYSTEM_CLOCK)) as store:
        data.rename(moved)
        with closing(NodeStore(data, settings, RealFilesystem(), SYSTEM_CLOCK)):
            made = sorted(data.rglob("*"))
            assert KeptOutbox(OUTBOX, store).offer_grant(grant(256), 0, 1) is ErrorCode.NONE
            assert sorted(data.rglob("*")) == made
    assert find_election_state(moved / str(OUTBOX), REAL_FILESYSTEM)[1].grant == grant(256)


def test_no_grant_is_judged_by_what_was_promised_before_a_promotion(store):
    """A leader of old offers its grant at every step of the thread that takes the directory back."""
    kept, offers = KeptOutbox(OUTBOX, store), []
    assert kept.offer_grant(grant(256), 0, 1) is ErrorCode.NONE

    def offer():
        with suppress(Refusal):
            kept.offer_grant(grant(512), 0, 1)

    def at_each_line(frame, event, _arg):
        if frame.f_code is not inspect.unwrap(KeptOutbox.hand_over).__code__:
            return None
        if event == "line":
            offers.append(threading.Thread(target=offer))
            offers[-1].start()
            offers[-1].join(0.05)  # unless it has to wait
        return at_each_line

    before = sys.gettrace()
    try:
        with kept.hand_over() as directory:
            promotion = ElectionStateStore(directory, OUTBOX, REAL_FILESYSTEM)
            promotion.keep(replace(promotion.kept, grant=grant(1025), leader_epoch=1025))
            sys.settrace(at_each_line)
    finally:
        sys.settrace(before)
    for other in offers:
        other.join()
    assert len(offers) > 2
    assert kept.offer_grant(grant(512), 0, 1) is not ErrorCode.NONE
    assert ElectionStateStore(directory, OUTBOX, REAL_FILESYSTEM).kept.grant == grant(1025)


def test_promises_keep_whose_directory_a_member_is_and_the_generation(tmp_path):
    named = tuple(replace(one, directory_id=UUID(int=9 + one.index), identity="billing") for one in grant(256).members)
    kept = ElectionState(grant=replace(grant(256), members=named, generation=3), member=1)
    write_election_state(tmp_path, OUTBOX, kept, REAL_FILESYSTEM)
    assert find_election_state(tmp_path, REAL_FILESYSTEM) == (OUTBOX, kept)
    assert kept.generation == 3


def test_a_leader_that_said_goodbye_is_heard_no_more_until_another_leads(store):
    """The leader has resigned, and its later requests do not show that it leads."""
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(grant(256), 0, 1) is ErrorCode.NONE
    kept.note_contact(256)
    assert kept.contact_age_ms is not None
    kept.note_contact(256, is_last=True)
    assert kept.contact_age_ms is None
    kept.note_contact(256)
    assert kept.contact_age_ms is None
    assert kept.offer_grant(grant(514), 2, 1) is ErrorCode.NONE
    kept.note_contact(514)
    assert kept.contact_age_ms is not None


def test_a_standby_is_told_whether_it_is_the_successor_and_the_others_wait_as_after_a_contact(store):
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(grant(256), 0, 1) is ErrorCode.NONE
    kept.note_contact(256, is_last=True, successor=1)
    assert kept.standby_contact == (None, True)
    assert kept.offer_grant(grant(512), 0, 1) is ErrorCode.NONE
    assert not kept.standby_contact.is_successor, "the leader leads again"
    kept.note_contact(512, is_last=True, successor=2)
    age_ms, is_successor = kept.standby_contact
    assert (age_ms is None, is_successor) == (False, False)
    assert kept.contact_age_ms is None, "for who looks it leads no more"


def test_a_copy_takes_a_newer_grant_of_a_leader_that_it_does_not_know(store):
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(grant(256), 0, 1, is_first=True) is ErrorCode.NONE
    others = (Member(1, "b:1"), Member(5, "f:1"))
    by_another = replace(grant(256), members=others, epoch=261, members_epoch=261, leader=5)
    assert kept.offer_grant(by_another, 5, 1) is ErrorCode.NOT_A_MEMBER
    kept.state_store.keep(replace(kept.election_state, is_unfilled=True))
    assert kept.offer_grant(by_another, 5, 1) is ErrorCode.NONE


HOLD, TAKEOVER = Hold(256, 1_700_000_000_000, 1_700_003_600_000, "new switches"), Takeover(512, 1_700_000_000_007)
GOLDEN = Path(__file__).parents[1] / "conformance" / "golden" / "promises.json"


def test_promises_are_written_and_read_as_their_file(tmp_path):
    before = (SettledList(members=(Member(0), Member(1))),)
    kept = ElectionState(grant=replace(grant(256), hold=HOLD, takeover=TAKEOVER, lists=before), member=1)
    write_election_state(tmp_path, OUTBOX, kept, REAL_FILESYSTEM)
    assert (tmp_path / "promises.json").read_bytes() == GOLDEN.read_bytes()
    assert find_election_state(tmp_path, REAL_FILESYSTEM) == (OUTBOX, kept)


def test_promises_of_another_version_are_refused_by_name(tmp_path):
    fields = json.loads(GOLDEN.read_text())
    del fields["version"], fields["crc32c"]
    write_checked_json(REAL_FILESYSTEM, tmp_path / "promises.json", fields, 2)
    with pytest.raises(CorruptFile, match="its version is 2, this pushrep reads 1"):
        find_election_state(tmp_path, REAL_FILESYSTEM)


def test_a_grant_without_the_newest_hold_is_refused(store):
    """Its candidate looked before the hold was stored: enough members that have it meet every number that leads."""
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(replace(grant(256), hold=HOLD), 0, 1) is ErrorCode.NONE
    assert kept.offer_grant(grant(768), 0, 1) is ErrorCode.FENCED_LEADER_EPOCH
    assert kept.offer_grant(replace(grant(768), hold=HOLD), 0, 1) is ErrorCode.NONE
    assert kept.offer_grant(grant(768), 0, 1) is ErrorCode.FENCED_LEADER_EPOCH
    assert kept.election_state.grant.hold == HOLD


TPS = [TopicIdPartition(UUID(int=3), "orders", number) for number in range(2)]


def forced(epoch=257, tag=5):
    return replace(
        grant(epoch, 2), generation=next_generation(0, tag), previous_members=(Member(1, ADDRESSES[1]),),
        previous_min_insync_replicas=1, members_epoch=epoch,
    )  # fmt: skip


class Stopping(RealFilesystem):
    """A disk that fails at one of its renames, as a kill would stop it."""

    def __init__(self):
        self.left = None

    def rename(self, source, target):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "the power went")
        super().rename(source, target)


def filled(store):
    """Two logs with a record each, pushed by the leader of epoch 512."""
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(grant(512, 2), 0, 2) is ErrorCode.NONE
    for tp in TPS:
        log = store.describe(kept, tp, create=True).log
        log.append_as_is([encode_batch([b"old"], timestamps_ms=1, leader_epoch=512)])
        log.advance_high_watermark(1)
        kept.note_filled(tp)
    assert not kept.is_unfilled
    kept.state_store.note_lost("orders-0", 7)
    return kept


def check_set_aside(kept, old):
    aside = kept.directory / "generation-0.stale"
    assert find_election_state(aside, REAL_FILESYSTEM) == (OUTBOX, old)
    for tp in TPS:
        with SegmentLog.open_reader(aside / str(tp), isolation="written") as reader:
            assert [record.value for record in reader.records(0)] == [b"old"]
        assert not (kept.directory / str(tp)).exists()
    assert read_checkpoint(aside, CheckpointFile.HIGH_WATERMARK, REAL_FILESYSTEM) == {str(tp): 1 for tp in TPS}
    promises = kept.election_state
    assert not promises.are_logs_outdated
    assert (promises.grant, promises.leader_epoch, promises.member) == (forced(), 257, 2)
    assert (promises.is_unfilled, promises.unfilled) == (True, {})


def test_what_held_for_logs_of_an_older_generation_ends_with_it():
    unfenced = {"orders-0": Unfenced(0, EpochEnd(256, 0))}
    before = ElectionState(
        grant=grant(512), leader_epoch=900, unfenced=unfenced, unfilled={"orders-1": 7}, rival=forced(tag=6)
    )
    after = before.with_grant(forced(), None)
    assert (after.unfenced, after.unfilled, after.rival) == ({}, {}, None)
    assert (after.is_unfilled, after.leader_epoch, after.are_logs_outdated) == (True, 257, True)
    same = before.with_grant(grant(768), None)
    assert same == replace(before, grant=grant(768)), "900 was taken, and fences still"


def test_a_first_grant_counts_where_nothing_can_have_been_lost():
    """Also where an opening learned it from others, because one of them leads: its disk may be another one since."""
    own, another = UUID(int=40), UUID(int=41)
    named = replace(grant(512), members=tuple(map(Member, range(3), ADDRESSES, (None, own, None))))
    without, member = ElectionState(), ElectionState(grant=grant(256), leader_epoch=256, member=1)
    assert without.with_grant(grant(512), own).is_unfilled
    assert without.with_grant(named, another).is_unfilled
    assert without.with_grant(named, None).is_unfilled
    assert not without.with_grant(named, own).is_unfilled, "whoever named it knows it"
    assert not without.with_grant(grant(512), own, is_first=True).is_unfilled, "nothing was ever acknowledged"
    assert not member.with_grant(grant(512), own).is_unfilled, "it had one"
    assert replace(member, is_unfilled=True).with_grant(grant(512), own, is_first=True).is_unfilled


@pytest.mark.parametrize("is_first", [False, True])
def test_an_openings_own_first_grant_counts_by_the_same_rule(tmp_path, is_first):
    """Should it end before it leads, it is a member like any other."""
    store = ElectionStateStore(tmp_path, OUTBOX, REAL_FILESYSTEM)
    Election(store, {}, PushSettings()).store(grant(512), is_first=is_first)
    assert (store.kept.grant, store.kept.is_unfilled) == (grant(512), not is_first)


def test_a_wiped_disk_counts_for_nothing_before_every_partition_is_filled(store):
    """The mark is on its disk with its first grant, before anything is pushed."""
    kept = KeptOutbox(OUTBOX, store)
    assert kept.offer_grant(grant(256, 2), 0, 1) is ErrorCode.NONE
    for _ in range(2):
        assert find_election_state(kept.directory, REAL_FILESYSTEM)[1].is_unfilled, "one of two is not enough"
        kept.note_filled(TPS[0])
    kept.note_filled(TPS[1])
    assert not find_election_state(kept.directory, REAL_FILESYSTEM)[1].is_unfilled


def test_a_generation_is_filled_and_led_by_nothing_of_the_one_before(store):
    kept = filled(store)
    kept.note_contact(512, is_last=True)
    assert kept.contact_age_ms is None
    assert kept.offer_grant(forced(), 1, 2) is ErrorCode.NONE
    assert kept.contact_age_ms is not None, "who said goodbye led another generation"
    kept.note_filled(TPS[1])
    assert kept.is_unfilled, "the first partition was filled before, and set aside"
    kept.note_filled(TPS[0])
    assert not kept.is_unfilled


def write_checkpoints(kept):
    """The logs are closed; who is the last to give their directory back writes what it shares."""
    LogDirectory.acquire(kept.directory).release()


def test_a_grant_of_a_higher_generation_sets_the_logs_aside_whole(store):
    kept = filled(store)
    old, replica = kept.election_state, kept.open_replica(TPS[0])
    assert kept.offer_grant(forced(), 1, 2) is ErrorCode.NONE
    check_set_aside(kept, old)
    assert replica.failure is not None
    assert [one.open_replica(TPS[0]) for one in store.owners_of(TPS[0])] == [None], "its leader begins a session anew"
    log = store.describe(kept, TPS[0], create=True).log
    assert (log.log_end_offset, log.high_watermark) == (0, 0)
    assert kept.election_state.unfilled == {}, "it lost nothing of this generation"
    assert kept.offer_grant(grant(1024, 2), 0, 2) is ErrorCode.FENCED_LEADER_EPOCH
    assert kept.offer_grant(forced(tag=6), 1, 2) is ErrorCode.INCONSISTENT_OUTBOX


def test_what_was_removed_before_a_generation_is_no_loss_of_it(store):
    kept = filled(store)
    kept.close()
    write_checkpoints(kept)
    shutil.rmtree(kept.directory / str(TPS[0]))
    with pytest.raises(Refusal, match="held records up to offset 1") as refused:
        store.describe(kept, TPS[0], create=False)
    assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR, "so that it does not count"
    assert kept.offer_grant(forced(), 1, 2) is ErrorCode.NONE
    for tp in TPS:
        assert store.describe(kept, tp, create=True).log.log_end_offset == 0
    assert kept.election_state.unfilled == {}


def test_removed_logs_are_made_anew_as_ones_that_lost_what_they_held(store):
    kept = filled(store)
    kept.state_store.note_refilled("orders-0")
    kept.close()
    write_checkpoints(kept)
    for tp in TPS:
        shutil.rmtree(kept.directory / str(tp))
    kept.create_missing(TPS)
    for tp in TPS:
        assert store.describe(kept, tp, create=True).log.log_end_offset == 0
    assert kept.election_state.unfilled == {str(tp): 1 for tp in TPS}


@pytest.mark.parametrize("renames", range(5))
def test_setting_aside_is_finished_at_the_next_opening(tmp_path, renames):
    """Promises of old, promises, the high watermarks, two logs, promises: the power goes before each."""
    disk = Stopping()
    first = NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), disk, SYSTEM_CLOCK)
    kept = filled(first)
    for replica in kept.open_replicas():
        replica.close()
    write_checkpoints(kept)
    old, disk.left = kept.election_state, renames
    with pytest.raises(OSError, match="the power went"):
        kept.offer_grant(forced(), 1, 2)
    if renames > 1:
        with pytest.raises(Refusal, match="not set aside"):
            kept.replica(TPS[0], create=True)
        later = [TopicIdPartition(UUID(int=3), "orders", number) for number in (2, 3)]
        kept.create_missing(later)
        assert not [tp for tp in later if (kept.directory / str(tp)).exists()], "they would be taken for older ones"
    disk.left = None
    first.close()
    again = NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), REAL_FILESYSTEM, SYSTEM_CLOCK)
    try:
        kept = again.outbox(OUTBOX)
        if renames > 1:
            with kept.exclusive_open():
                pass
        else:
            assert kept.election_state == old
            kept.offer_grant(forced(), 1, 2)
        check_set_aside(kept, old)
    finally:
        again.close()


@pytest.mark.parametrize("owner", [ReplicaLog, KeptOutbox])
def test_after_an_error_of_one_close_the_others_and_the_directory_are_closed(tmp_path, store, monkeypatch, owner):
    store.outbox(OTHER)
    replicas, close, failed = filled(store).open_replicas(), owner.close, []

    def fail(one):
        failed.append(f"error {len(failed)}")
        close(one)
        raise MemoryError(failed[-1])

    with monkeypatch.context() as failing:
        failing.setattr(owner, "close", fail)
        with pytest.raises(MemoryError, match="error 0") as raised:
            store.close()
    assert len(failed) == 2, "logs, or outboxes"
    assert raised.value.__notes__ == ["and then: error 1"]
    for replica in replicas:
        with pytest.raises(LogClosed):
            replica.log.append(b"late")
    NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), REAL_FILESYSTEM, SYSTEM_CLOCK).close()


OTHER = UUID(int=9)


def test_a_rival_is_not_forgotten_by_a_restart_until_another_generation_is_granted(tmp_path, store):
    """The rival is stored, so that each later beat can report it to the leader of the stored grant."""
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(forced(), 1, 2) is ErrorCode.NONE
    assert kept.offer_grant(forced(tag=6), 1, 2) is ErrorCode.INCONSISTENT_OUTBOX
    store.close()
    again = NodeStore(tmp_path, NodeSettings(address=Address("127.0.0.1", 1)), REAL_FILESYSTEM, SYSTEM_CLOCK)
    try:
        kept = again.outbox(OUTBOX)
        assert (kept.election_state.grant, kept.election_state.rival) == (forced(), forced(tag=6))
        decided = replace(forced(513), generation=next_generation(forced().generation, 7))
        assert kept.offer_grant(decided, 1, 2) is ErrorCode.NONE
        assert (kept.election_state.grant, kept.election_state.rival) == (decided, None)
    finally:
        again.close()


@pytest.mark.parametrize(
    ("address", "directory", "outcome"),
    [("", OTHER, 3), (ADDRESSES[2], OTHER, ErrorCode.MEMBER_TWICE), ("", None, ErrorCode.MEMBER_TWICE)],
    ids=["replaced", "still addressed", "its directory is the member's, as far as the grant says"],
)
def test_m4_a_node_becomes_another_member_where_it_was_replaced_as_the_one_that_it_was(
    store, address, directory, outcome
):
    """Also under the grant that it stores: it is asked again when its leader begins another session."""
    kept = store.outbox(OUTBOX)
    assert kept.offer_grant(grant(512), 0, 2) is ErrorCode.NONE
    members = (*(one for one in grant(512).members if one.index != 2), Member(2, address, directory))
    offered = replace(grant(768), members=members)
    assert kept.offer_grant(offered, 0, 2) is ErrorCode.NONE
    if outcome == 3:
        assert kept.offer_grant(offered, 0, 3) is ErrorCode.NONE
        assert kept.election_state.member == 3
        assert kept.offer_grant(offered, 0, 3) is ErrorCode.NONE
    else:
        with pytest.raises(Refusal) as refused:
            kept.offer_grant(offered, 0, 3)
        assert refused.value.code is outcome
        assert kept.election_state.member == 2


def test_a_disk_that_answers_nothing_is_in_trouble_by_its_first_error():
    class Gone(RealFilesystem):
        def usage(self, path):
            raise OSError(errno.EIO, "Input/output error", str(path))

    trouble = DiskTrouble(Path("data"), Gone(), SYSTEM_CLOCK)
    trouble.note("orders-0 can't be opened", OSError(errno.ENODEV, "No such device"))
    assert "No such device" in trouble.why
