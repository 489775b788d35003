"""An Outbox and nodes in one process, over sockets: which member holds which records, receipts, and refusals by
name.
"""

import shutil
import threading
from contextlib import suppress
from functools import partial
from itertools import cycle

import pytest

from filtering import StreamMetadata
from pushrep import Acks, Durability, KafkaDestination
from pushrep.election.errors import NotLeader
from pushrep.election.grants import owner_of
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log import LogConfig, LogPoisoned, SegmentLog
from pushrep.outbox import (
    BufferFull,
    DeliveryFailed,
    LogStopped,
    NotEnoughReplicas,
    OutboxDiffers,
    ReceiptTimeout,
    read_identity,
)
from pushrep.replicate.errors import MayStillBeDelivered
from tests.integration.outboxes import SMALL, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.unit.gated_disk import GatedDisk, LosingDisk


def copy_of(world, outbox, index, partition=0):
    return world.root / f"node-{index}" / outbox.identity.outbox_id / f"orders-{partition}"


def record_bytes(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


@pytest.mark.parametrize(
    ("members", "settings", "warns"),
    [
        ((1,), {}, True),
        ((1,), {"acks": Acks.LOCAL}, False),
        ((1,), {"min_insync_replicas": 1}, False),
        ((1, 2), {}, False),
    ],
)
def test_an_outbox_whose_only_replica_stops_its_appends_says_so_at_its_opening(world, caplog, members, settings, warns):
    for member in members:
        world.node(member)
    with open_outbox(world, *members, **settings):
        pass
    assert ("has two members and needs both: if one fails, appends stop" in caplog.text) == warns


def test_what_is_appended_is_pushed_and_a_dead_replica_costs_nothing_but_lag(world):
    world.node(1)
    world.node(2)
    world.nodes[2].stop()
    with open_outbox(world, 1, 2, partitions=2, acks=Acks.LOCAL) as outbox:
        for number in range(100):
            outbox.append(number % 2, b"%d" % number)
        outbox.flush(WAIT_S)
        wait_for_all(outbox, world.nodes[1].address)
        lag = outbox.lag()[str(world.nodes[2].address)]
        assert (lag.records, lag.in_sync, lag.partitions) == (100, 0, 2)
        world.node(2)
        wait_for_all(outbox)
    world.close()
    for n in range(2):
        own = record_bytes(world.root / "outbox" / f"orders-{n}")
        assert own
        assert record_bytes(copy_of(world, outbox, 1, n)) == record_bytes(copy_of(world, outbox, 2, n)) == own


def test_a_replica_that_goes_away_is_told_until_it_is_back(world):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        wait_for_all(outbox)
        world.nodes[1].stop()
        wait_until(lambda: "Connection refused" in (outbox.status().members[1].trouble or ""), "it is away")
        world.node(1)
        wait_until(lambda: outbox.status().members[1].trouble is None, "it is back")


@pytest.mark.parametrize("durability", Durability)
def test_a_receipt_with_all_says_that_enough_members_hold_the_record(world, durability):
    world.node(1)
    world.node(2)
    # Many on their way, and a machine that stands still for 300 ms must not make a replica leave.
    with open_outbox(world, 1, 2, durability=durability, min_insync_replicas=3, replica_lag_max_ms=60_000) as outbox:
        receipts = [outbox.append(0, b"%d" % number) for number in range(50)]
        many = outbox.append_many(0, [b"x" * 1000] * 2000)
        assert [receipt.result(WAIT_S) for receipt in receipts] == list(range(50))
        assert many.result(WAIT_S) == 50
        for index in (1, 2):
            log = world.replica(index).log
            assert log.log_end_offset == 2050, "held before the receipt said so"
            assert durability is Durability.BUFFERED or log.flushed_offset == 2050
        assert outbox.log(0).high_watermark == 2050
        assert outbox.last_metadata(outbox.pid, 0) == 2049


def offset_of(outbox, partition, value):
    """The offset of a record that is appended; None if it was refused, and is not in the log."""
    try:
        return outbox.append(partition, value).result(WAIT_S)
    except (LogStopped, NotEnoughReplicas):
        return None
    except DeliveryFailed as error:
        if error.may_be_delivered:
            raise
        return None


def test_too_few_in_sync_refuse_new_records_by_name_and_take_them_when_they_are_back(world):
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, 2, min_insync_replicas=3) as outbox:
        assert outbox.append(0, b"three").result(WAIT_S) == 0
        world.nodes[2].stop()
        taken = []

        def is_refused():
            try:
                taken.append(outbox.append(0, b"two"))
            except NotEnoughReplicas:
                return True
            with suppress(ReceiptTimeout, DeliveryFailed):
                taken[-1].result(0.01)
            return False

        wait_until(is_refused, "refused")
        log, near = outbox.log(0), str(world.nodes[1].address)

        def is_decided():
            """Accepted records wait in the log or have failed; the remaining replica holds them, so it stays in
            sync.
            """
            return log.log_end_offset == 1 + sum(not receipt.done() for receipt in taken)

        wait_until(lambda: is_decided() and outbox.lag()[near][:2] == (0, 1), "nothing is on its way")
        end = log.log_end_offset
        with pytest.raises(NotEnoughReplicas, match="min_insync_replicas=3") as refused:
            outbox.append_many(0, [b"a", b"b"])
        assert (refused.value.in_sync, refused.value.needed) == (2, 3)
        assert log.log_end_offset == end, "nothing was taken"
        world.node(2)
        wait_until(lambda: outbox.status().in_sync_min == 3, "back")
        assert outbox.append(0, b"three again").result(WAIT_S) >= end
        for receipt in taken:  # what was refused while it waited to be written, and what came through after all
            with suppress(DeliveryFailed):
                receipt.result(WAIT_S)


def test_one_of_two_replicas_is_enough_by_default(world):
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, 2) as outbox:
        assert outbox.append(0, b"three").result(WAIT_S) == 0
        world.nodes[1].stop()
        for number in range(20):
            assert outbox.append(0, b"two").result(WAIT_S) == number + 1


def test_what_is_not_replicated_in_time_may_still_be_delivered(world):
    disk = GatedDisk()
    world.node(1, filesystem=disk)
    metadata = StreamMetadata(77, 0, 5)
    with open_outbox(world, 1) as outbox:
        assert outbox.append(0, b"both").result(WAIT_S) == 0
    with open_outbox(world, 1, delivery_timeout_ms=150, replica_lag_max_ms=60_000) as outbox:
        with disk.hanging():
            receipt, told = outbox.append(0, b"late", metadata=metadata), []
            receipt.add_done_callback(told.append)
            with pytest.raises(DeliveryFailed) as failed:
                receipt.result(WAIT_S)
            assert failed.value.may_be_delivered
            assert isinstance(failed.value.__cause__, MayStillBeDelivered)
            assert outbox.last_metadata(77, 0) == 5, "it is in this log"
        following = outbox.append(0, b"next", metadata=StreamMetadata(77, 0, 6))
        with suppress(DeliveryFailed):  # here 150 ms may be too short, too
            assert following.result(WAIT_S) == 2
        with pytest.raises(DeliveryFailed):  # a receipt answers once, and goes on saying so
            receipt.result(WAIT_S)
        wait_for_all(outbox)
    assert told == [receipt], "it is decided once, although it was replicated later"
    assert outbox.facts.budget.taken == 0, "and its bytes are given back once"
    with pytest.raises(DeliveryFailed):
        receipt.result(0)
    world.close()
    with SegmentLog.open_reader(copy_of(world, outbox, 1), isolation="written") as reader:
        assert [record.value for record in reader.records(0)] == [b"both", b"late", b"next"]


def test_records_that_wait_for_replicas_hold_their_room(world):
    disk = GatedDisk()
    world.node(1, filesystem=disk)
    settings = {"buffer_bytes": 8192, "batch_bytes": 4096, "block_ms": 50, "linger_ms": 0}
    with open_outbox(world, 1, replica_lag_max_ms=60_000, **settings) as outbox:
        assert outbox.append(0, b"both").result(WAIT_S) == 0
        receipts = []

        def append_for_ever():
            while True:
                receipts.append(outbox.append(0, b"x" * 1000))

        with disk.hanging():
            with pytest.raises(BufferFull):
                append_for_ever()
            assert 3 <= len(receipts) <= 8
        assert [receipt.result(WAIT_S) for receipt in receipts] == list(range(1, len(receipts) + 1))
        assert outbox.append(0, b"x" * 1000).result(WAIT_S) == len(receipts) + 1
        assert outbox.facts.budget.taken == 0, "everything was given back"


def test_close_waits_for_replicas_as_long_as_it_was_told(world):
    disk = GatedDisk()
    world.node(1, filesystem=disk)
    outbox = open_outbox(world, 1, close_timeout_s=0.1, replica_lag_max_ms=60_000)
    assert outbox.append(0, b"both").result(WAIT_S) == 0
    with disk.hanging():
        receipt = outbox.append(0, b"late")
        wait_until(lambda: outbox.log(0).flushed_offset == 2, "it is in this log")
        with pytest.raises(DeliveryFailed) as failed:
            outbox.close()
        assert failed.value.may_be_delivered
        with pytest.raises(DeliveryFailed, match="may still be delivered"):
            receipt.result(0)
    with open_outbox(world, 1) as again:
        assert again.append(0, b"next").result(WAIT_S) == 2
        assert again.log(0).leader_epochs.latest_epoch > 256, "every open takes a new number"
        assert owner_of(again.log(0).leader_epochs.latest_epoch) == 0


def test_too_few_members_at_the_open_take_no_record_until_they_answer(world):
    world.node(1)
    world.node(2)
    world.nodes[1].stop()
    world.nodes[2].stop()
    with open_outbox(world, 1, 2) as outbox:
        with pytest.raises(NotEnoughReplicas) as refused:
            outbox.append(0, b"alone")
        assert (refused.value.in_sync, refused.value.needed) == (1, 2)
        assert outbox.log(0).log_end_offset == 0
        world.node(1)
        wait_until(lambda: outbox.lag()[str(world.nodes[1].address)].in_sync, "it leads")
        assert outbox.append(0, b"two").result(WAIT_S) == 0


def test_a_log_that_lost_its_end_gets_it_back_from_a_replica_under_the_same_pid(world):
    world.node(1)
    world.node(2)
    with open_outbox(world, 1, 2, durability=Durability.BUFFERED) as outbox:
        pid = outbox.pid
        for number in range(10):
            assert outbox.append(0, b"%d" % number).result(WAIT_S) == number
        wait_for_all(outbox)
    with SegmentLog.open(world.root / "outbox" / "orders-0", SMALL) as log:
        log.truncate_to(4, force=True)
    with open_outbox(world, 1, 2) as outbox:
        assert outbox.log(0).log_end_offset == 10
        assert outbox.pid == pid, "nothing was lost: readers know these records"
        assert outbox.last_metadata(pid, 0) == 9
        assert outbox.append(0, b"10").result(WAIT_S) == 10
        wait_for_all(outbox)
    world.close()
    own = record_bytes(world.root / "outbox" / "orders-0")
    assert record_bytes(copy_of(world, outbox, 1)) == record_bytes(copy_of(world, outbox, 2)) == own


def test_members_are_kept_in_outbox_json_and_others_are_refused_by_name(world):
    world.node(1)
    world.node(2)
    world.node(3)
    addresses = [str(world.nodes[index].address) for index in (1, 2)]
    with open_outbox(world, 1, 2) as outbox:
        assert outbox.identity.replicas == ((1, addresses[0]), (2, addresses[1]))
        assert outbox.identity.min_insync_replicas == 2
    assert read_identity(REAL_FILESYSTEM, world.root / "outbox") == outbox.identity
    for indexes, settings, name in (
        ((), {}, "replicas"),
        ((1,), {}, "replicas"),
        ((1, 3), {}, "replicas"),
        ((1, 2), {"min_insync_replicas": 3}, "min_insync_replicas"),
    ):
        with pytest.raises(OutboxDiffers, match=f"^{name}: ") as refused:
            open_outbox(world, *indexes, **settings)
        assert refused.value.argument == name
    with open_outbox(world, 2, 1) as outbox:
        assert outbox.identity.replicas == ((1, addresses[0]), (2, addresses[1])), "an index stays with its member"
    with pytest.raises(BadArgument, match=r"^kafka: "):
        open_outbox(world, 1, 2, kafka=object())


def test_an_outbox_without_replicas_gets_them_at_a_later_open(world):
    world.node(1)
    with open_outbox(world) as outbox:
        outbox.append(0, b"alone").result(WAIT_S)
        assert outbox.lag() == {}
    with open_outbox(world, 1) as outbox:
        assert outbox.append(0, b"both").result(WAIT_S) == 1
        wait_for_all(outbox)
    world.close()
    assert record_bytes(copy_of(world, outbox, 1)) == record_bytes(world.root / "outbox" / "orders-0")


def test_who_was_overtaken_by_another_leader_takes_nothing_any_more(world):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        assert outbox.append(0, b"ours").result(WAIT_S) == 0
        # Else its own grant may be under way once more, to name the directory, and be refused first.
        wait_until(lambda: (grant := outbox.facts.replication.grant) is not None and not grant.nameless, "it is named")
        kept = world.kept(1)
        kept.state_store.store_epoch(2**20 + 1)  # member 1 has taken a number of its own: it leads
        with pytest.raises(DeliveryFailed) as failed:
            outbox.append(0, b"too late").result(WAIT_S)
        # The watermark of "ours" may have brought the news before this record was written. Then the replica is out of
        # sync, before the outbox has found out that it leads no more.
        assert isinstance(failed.value.__cause__, NotLeader | NotEnoughReplicas)
        assert failed.value.may_be_delivered == (outbox.log(0).log_end_offset > 1)

        def is_refused():
            try:
                acknowledged = outbox.append(0, b"refused").result(WAIT_S)
            except NotLeader:
                return True
            except (DeliveryFailed, NotEnoughReplicas):
                return False
            pytest.fail(f"acknowledged at {acknowledged}")

        wait_until(is_refused, "it has resigned")


def test_a_pid_epoch_that_an_opening_begins_is_granted_before_a_record_of_it_is_anywhere(world):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        outbox.append(0, b"a").result(WAIT_S)
        before = outbox.identity.pid_epoch
    shutil.rmtree(world.root / "outbox" / "orders-0")
    with open_outbox(world, 1, accept_loss=True, open_timeout_s=1) as outbox:
        (kept,) = [one.election_state.grant for one in world.nodes[1].store.kept()]
        granted = outbox.facts.replication.grant
        assert kept.pid_epoch == granted.pid_epoch == outbox.identity.pid_epoch > before


def test_behind_a_head_that_was_cut_unread_the_next_opening_leaps_the_pid(world, caplog):
    """identity T1: "A known one below the topic's start: later appends leap the PID epoch"; here by a grant."""
    world.node(1)
    away = KafkaDestination(bootstrap_servers="127.0.0.1:1", request_timeout_ms=500)
    with open_outbox(world, 1, kafka=away, open_timeout_s=1) as outbox:
        before = outbox.pid
        outbox.append(0, b"before").result(WAIT_S)
        outbox.facts.shipping.sink.state.head_was_cut("orders-0", 1000, 2000)
        outbox.append(0, b"still under the grant").result(WAIT_S)
    assert "so its new PID begins with its next opening" in caplog.text
    for _ in range(2):
        with open_outbox(world, 1) as outbox:
            outbox.append(0, b"behind it").result(WAIT_S)
            assert outbox.facts.replication.grant.pid_epoch == outbox.identity.pid_epoch > 1, "members keep it"
            pids = [StreamMetadata.unpack(one.key).pid for one in outbox.log(0).records(0)]
    assert pids == [before, before, outbox.pid, outbox.pid]
    assert outbox.pid != before


def test_a_leader_whose_sync_failed_leads_on_with_what_members_hold(world):
    """The record that its disk lost is on a member: it comes back from there before another gets its offset."""
    world.node(1)
    world.node(2)
    disk = LosingDisk()
    with open_outbox(world, 1, 2, partitions=2, filesystem=disk) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        wait_for_all(outbox)
        epoch = outbox.log(0).leader_epochs.latest_epoch
        disk.fails = True
        with pytest.raises(DeliveryFailed) as failed:
            outbox.append(0, b"lost here").result(WAIT_S)
        assert failed.value.may_be_delivered
        with pytest.raises(LogStopped):
            outbox.append(0, b"refused")
        disk.fails = False

        def offset():
            try:
                return outbox.append(0, b"after").result(WAIT_S)
            except LogStopped:
                return None

        wait_until(lambda: offset() is not None, "its log is opened again by itself")
        assert outbox.append(1, b"the other partition goes on").result(WAIT_S) == 0
        values = [record.value for record in outbox.log(0).records(0)]
        assert values in ([b"before", b"after"], [b"before", b"lost here", b"after"])
        wait_for_all(outbox)
        assert outbox.log(0).leader_epochs.latest_epoch > epoch
        held = [
            record_bytes(path) for path in (outbox.log(0).path, copy_of(world, outbox, 1), copy_of(world, outbox, 2))
        ]
        assert held[0] == held[1] == held[2]


def test_acknowledged_records_that_the_leaders_disk_lost_come_back_from_a_member(world):
    """BUFFERED and ALL: each member had them in memory, and one of them forgets them in a failed sync."""
    world.node(1)
    world.node(2)
    disk, config = LosingDisk(), LogConfig(preallocate_bytes=0, flush_ms=600_000)
    with open_outbox(
        world, 1, 2, partitions=3, filesystem=disk, log_config=config, durability=Durability.BUFFERED
    ) as outbox:
        for partition in range(3):
            assert [outbox.append(partition, b"%d" % n).result(WAIT_S) for n in range(3)] == [0, 1, 2]
        wait_for_all(outbox)
        disk.fails = True
        for partition in range(2):
            with pytest.raises(LogPoisoned):
                outbox.log(partition).flush()
        disk.fails = False

        for partition in range(3):
            after = partial(offset_of, outbox, partition, b"after")
            wait_until(lambda after=after: after() == 3, "it goes on behind what members hold")
            assert [record.value for record in outbox.log(partition).records(0)] == [b"0", b"1", b"2", b"after"]
        outbox.flush()  # nothing was lost
        wait_for_all(outbox)
        for partition in range(3):
            own = record_bytes(outbox.log(partition).path)
            assert [record_bytes(copy_of(world, outbox, index, partition)) for index in (1, 2)] == [own, own]
        status = outbox.status()
        assert list(status.problems()) == []


def test_threads_that_can_not_start_are_started_later(world, monkeypatch):
    """A moment without threads must not keep a replica away until the outbox is opened again."""
    world.node(1)
    start, refused = threading.Thread.start, []

    def start_the_second_time(thread):
        if thread.name in {"pushrep-sessions-1", "pushrep-connect-1"} and thread.name not in refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_the_second_time)
    with open_outbox(world, 1, open_timeout_s=5) as outbox:
        wait_for_all(outbox)
        assert outbox.append(0, b"taken").result(WAIT_S) == 0
        world.nodes[1].stop()
        world.node(1)
        wait_until(lambda: len(refused) == 2, "it connects anew")
        wait_until(lambda: offset_of(outbox, 0, b"taken, too") == 1, "it is in sync again")
    assert set(refused) == {"pushrep-sessions-1", "pushrep-connect-1"}


@pytest.mark.parametrize(("durability", "every"), [(Durability.FLUSHED, 60), (Durability.BUFFERED, 20)])
def test_syncs_that_fail_on_every_member_lose_nothing_acknowledged(world, durability, every):
    """Each disk forgets now and then what a failed sync should have written."""
    disks = [LosingDisk() for _ in range(3)]
    for index, disk in enumerate(disks):
        disk.fails = partial(next, cycle([*[False] * (every + 7 * index), True]))
    for index in (1, 2):
        world.node(index, filesystem=disks[index])
    config = LogConfig(preallocate_bytes=0, flush_ms=20, segment_bytes=3000, batch_bytes_max=2000)
    acknowledged = {partition: {} for partition in range(2)}

    def append(partition, value):
        try:
            acknowledged[partition][outbox.append(partition, value).result(WAIT_S)] = value
        except (DeliveryFailed, LogStopped, NotEnoughReplicas):
            return False
        return True

    given = {"filesystem": disks[0], "log_config": config, "durability": durability}
    with open_outbox(world, 1, 2, partitions=2, **given) as outbox:
        for number in range(120):
            for partition in range(2):
                wait_until(lambda p=partition, n=number: append(p, b"%d" % n), "it goes on", every_s=0.02)
        for disk in disks:
            disk.fails = False
        for partition in range(2):
            wait_until(lambda p=partition: append(p, b"last"), "it goes on")
        wait_for_all(outbox)
        reopened = sum("not closed" in outbox.log(partition).recovery.reason for partition in range(2))
        assert reopened, "else it shows nothing"
        for partition in range(2):
            values = {record.offset: record.value for record in outbox.log(partition).records(0)}
            assert acknowledged[partition].items() <= values.items()
            own = record_bytes(outbox.log(partition).path)
            assert [record_bytes(copy_of(world, outbox, index, partition)) for index in (1, 2)] == [own, own]
