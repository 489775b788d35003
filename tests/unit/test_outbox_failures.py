"""The outbox when the disk is slow, full or failing: what receipts say, what waits, what may come next."""

import itertools
import sys
import threading
from pathlib import Path

import pytest

from filtering import StreamMetadata
from pushrep import OutboxConfig
from pushrep.env import RealFilesystem
from pushrep.log import Durability, LogClosed, LogConfig, LogEndMoved, LogPoisoned
from pushrep.outbox import (
    BufferFull,
    CloseTimedOut,
    DeliveryFailed,
    LogStopped,
    MetadataGap,
    Outbox,
    ReceiptTimeout,
)
from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.columns import Columns
from tests.support.outbox_arguments import outbox_arguments
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk
from tests.unit.gated_disk import GatedDisk, LosingDisk, MeetingDisk, until

SIMULATED = Path("/outbox")


def open_outbox(path, filesystem, **settings):
    wanted = {"topic": "orders", "partitions": 1, "producer": "billing", "filesystem": filesystem, **settings}
    wanted["log_config"] = LogConfig(preallocate_bytes=0)  # so that a full disk is full at once
    return Outbox.open(path, **outbox_arguments(**wanted))


def values_and_keys(outbox, partition=0):
    return [(record.value, StreamMetadata.unpack(record.key)) for record in outbox.log(partition).records(0)]


def fill(disk, outbox):
    """Leave room for nothing."""
    outbox.flush()
    disk.capacity_bytes = disk.used_bytes()


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_lingering_batch_is_sealed_in_time_without_being_asked(tmp_path):
    with open_outbox(tmp_path, RealFilesystem(), linger_ms=10) as outbox:
        for n in range(3):
            receipt = outbox.append(0, b"%d" % n)
            until(receipt.done, "the linger timer has it written")
            assert receipt.result(0) == n


def test_a_batch_lingers_until_somebody_asks(tmp_path):
    with open_outbox(tmp_path, RealFilesystem(), linger_ms=3_600_000) as outbox:
        receipts = [outbox.append(0, b"%d" % n) for n in range(5)]
        assert outbox.log(0).log_end_offset == 0, "it waits for more"
        assert receipts[4].result(60) == 4
        assert [receipt.done() for receipt in receipts] == [True] * 5
        assert [len(batch) for batch in outbox.log(0).batches(0)] == [5], "one batch for all"
        outbox.append(0, b"flushed")
        outbox.flush(10)
        assert outbox.log(0).flushed_offset == 6


def test_a_full_batch_does_not_linger(tmp_path):
    with open_outbox(tmp_path, RealFilesystem(), linger_ms=3_600_000, batch_bytes=1000) as outbox:
        receipts = [outbox.append(0, bytes(100)) for _ in range(20)]
        until(receipts[9].done, "full batches are written")
        assert not receipts[19].done(), "the last one is still open"


def test_without_linger_a_record_is_written_at_once(tmp_path):
    with open_outbox(tmp_path, RealFilesystem(), linger_ms=0) as outbox:
        receipt = outbox.append(0, b"now")
        until(receipt.done, "written without linger")


def test_what_one_fdatasync_covers_is_one_commit(tmp_path):
    disk = GatedDisk()
    with open_outbox(tmp_path, disk, linger_ms=0) as outbox:
        disk.gate.clear()
        first = outbox.append(0, b"held by the disk")
        until(lambda: outbox.log(0).log_end_offset == 1, "the writer is in its sync")
        rest = [outbox.append(0, b"%d" % n) for n in range(100)]
        with pytest.raises(ReceiptTimeout, match="may still be delivered"):
            first.result(0.02)
        disk.gate.set()
        assert [receipt.result(60) for receipt in rest] == list(range(1, 101))
        assert len(list(outbox.log(0).batches(0))) == 2, "what came during the sync is one batch"


def test_a_buffered_receipt_does_not_wait_for_the_disk(tmp_path):
    disk = GatedDisk()
    with open_outbox(tmp_path, disk, durability=Durability.BUFFERED) as outbox:
        disk.gate.clear()
        try:
            assert outbox.append(0, b"v").result(60) == 0
            assert outbox.log(0).flushed_offset == 0
        finally:
            disk.gate.set()


# -- back-pressure -----------------------------------------------------------------------------------------------------


def test_a_full_buffer_refuses_and_takes_nothing(tmp_path):
    disk = GatedDisk()
    with open_outbox(tmp_path, disk, batch_bytes=2000, buffer_bytes=20_000, block_ms=30) as outbox:
        disk.gate.clear()
        taken = []

        def produce_for_ever():
            for n in itertools.count():
                taken.append(outbox.append(0, b"%d" % n * 20))  # noqa: PERF401 - what was taken counts

        with pytest.raises(BufferFull) as full:
            produce_for_ever()
        assert (full.value.buffer_bytes, full.value.block_ms) == (20_000, 30)
        with pytest.raises(BufferFull):
            outbox.append_many(0, [bytes(1000)] * 10)
        assert outbox.facts.budget.taken <= 20_000
        disk.gate.set()
        assert [receipt.result(60) for receipt in taken] == list(range(len(taken)))
        again = outbox.append(0, b"again")
        assert again.result(60) == len(taken), "the refused ones left nothing"
        until(lambda: outbox.facts.budget.taken == 0, "all room is given back")


@pytest.mark.parametrize("many", [False, True])
def test_a_blocked_append_goes_on_when_there_is_room(tmp_path, many):
    disk = GatedDisk()
    with open_outbox(tmp_path, disk, batch_bytes=2000, buffer_bytes=4000, linger_ms=3_600_000) as outbox:
        disk.gate.clear()
        outbox.append_many(0, [bytes(800)] * 4)
        receipts = []

        def produce():
            receipts.append(outbox.append_many(0, [bytes(900)] * 3) if many else outbox.append(0, bytes(1500)))

        producer = threading.Thread(target=produce)
        producer.start()
        until(lambda: outbox.log(0).log_end_offset > 0, "what lingers is written when room is wanted")
        assert not receipts, "there is no room"
        disk.gate.set()
        producer.join(60)
        assert receipts[0].result(60) == 4


def test_lingering_records_of_idle_partitions_make_room(tmp_path):
    with open_outbox(
        tmp_path, RealFilesystem(), partitions=10, batch_bytes=1000, buffer_bytes=2000, linger_ms=3_600_000
    ) as outbox:
        receipts = [outbox.append(n % 10, bytes(500)) for n in range(40)]
        assert [receipt.result(60) for receipt in receipts] == [n // 10 for n in range(40)]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_fails_receipts_and_gives_their_offsets_back():
    disk = SimulatedDisk()
    with open_outbox(SIMULATED, disk) as outbox:
        outbox.append(0, b"before").result(60)
        fill(disk, outbox)
        receipt = outbox.append(0, b"lost")
        with pytest.raises(DeliveryFailed, match=r"it is not in the log: .*free space") as failed:
            receipt.result(60)
        assert not failed.value.may_be_delivered
        with pytest.raises(DeliveryFailed):
            receipt.result(60)  # it resolved once, and says so again
        disk.capacity_bytes = None
        assert outbox.append(0, b"after").result(60) == 1
        counts = outbox.facts.appenders[0].counts
        assert (counts.records, counts.batches, sum(counts.failed.values())) == (2, 2, 1), "the metrics' numbers"
        assert values_and_keys(outbox) == [
            (value, StreamMetadata(outbox.pid, 0, offset)) for offset, value in enumerate([b"before", b"after"])
        ]


def test_after_a_failure_the_failed_position_comes_first():
    disk = SimulatedDisk()
    with open_outbox(SIMULATED, disk, linger_ms=3_600_000) as outbox:
        outbox.append(0, b"0", metadata=StreamMetadata(7, 0, 0)).result(60)
        fill(disk, outbox)
        lost = [outbox.append(0, b"%d" % n, metadata=StreamMetadata(7, 0, n)) for n in (3, 4)]
        other = outbox.append(0, b"other", metadata=StreamMetadata(8, 0, 0))
        for receipt in [*lost, other]:
            with pytest.raises(DeliveryFailed):
                receipt.result(60)
        disk.capacity_bytes = None
        with pytest.raises(MetadataGap, match=r"source offset 3 of PID 7, partition 0 failed .*free space") as gap:
            outbox.append(0, b"5", metadata=StreamMetadata(7, 0, 5))
        assert (gap.value.failed, gap.value.got) == (3, 5)
        assert outbox.last_metadata(7, 0) == 0
        outbox.append_many(0, [b"3", b"4"], metadata=StreamMetadata(7, 0, 3))
        outbox.append(0, b"5", metadata=StreamMetadata(7, 0, 5))
        outbox.append(0, b"other", metadata=StreamMetadata(8, 0, 0))
        outbox.flush()
        assert [value for value, _ in values_and_keys(outbox)] == [b"0", b"3", b"4", b"5", b"other"]
        assert outbox.last_metadata(7, 0) == 5


def test_append_many_tells_how_far_it_came():
    disk = SimulatedDisk()
    with open_outbox(SIMULATED, disk, batch_bytes=1000, linger_ms=3_600_000) as outbox:
        fill(disk, outbox)
        disk.capacity_bytes += 2500
        receipt = outbox.append_many(0, [bytes(200)] * 20)
        with pytest.raises(DeliveryFailed, match="records are in the log") as failed:
            receipt.result(60)
        assert receipt.done()
        assert 0 < failed.value.delivered == outbox.log(0).log_end_offset < 20
        disk.capacity_bytes = None


def taken(outbox, value, partition=0, **how):
    """The offset of the record; None while the partition is stopped."""
    try:
        return outbox.append(partition, value, **how).result(60)
    except LogStopped:
        return None


def test_a_failed_fdatasync_stops_the_partition_until_its_log_is_open_again(caplog):
    disk = SimulatedDisk()
    with open_outbox(SIMULATED, disk, partitions=2) as outbox:
        outbox.append(0, b"before", metadata=StreamMetadata(7, 0, 0)).result(60)
        disk.fail_sync()
        with pytest.raises(DeliveryFailed, match="may still be delivered") as failed:
            outbox.append(0, b"maybe", metadata=StreamMetadata(7, 0, 2)).result(60)
        assert failed.value.may_be_delivered
        with pytest.raises(LogStopped, match=r"Input/output error; it is opened again as soon as the disk works"):
            outbox.append(0, b"never")
        assert outbox.append(1, b"the other partition goes on").result(60) == 0
        until(lambda: taken(outbox, b"after") == 1, "its log is opened again by itself")
        until(lambda: "orders-0 was opened again after a failure" in caplog.text, "it is told")
        assert values_and_keys(outbox) == [
            (b"before", StreamMetadata(7, 0, 0)), (b"after", StreamMetadata(outbox.pid, 0, 1)),
        ]  # fmt: skip
        assert outbox.last_metadata(7, 0) == 0, "what the disk lost is not said to be in the log"
        with pytest.raises(MetadataGap):
            outbox.append(0, b"later", metadata=StreamMetadata(7, 0, 3))
        outbox.append(0, b"again", metadata=StreamMetadata(7, 0, 2)).result(60)
        assert outbox.log(0).recovery.opening.value == "abnormal"
    disk.lose_power()
    with open_outbox(SIMULATED, disk, partitions=2) as outbox:
        assert [value for value, _ in values_and_keys(outbox)] == [b"before", b"after", b"again"]


def test_a_disk_that_stays_broken_is_tried_again_at_least_every_minute(caplog):
    clock = SimulatedClock()
    disk = SimulatedDisk(clock=clock)
    with open_outbox(SIMULATED, disk, clock=clock) as outbox:
        outbox.append(0, b"before").result(60)
        disk.read_only = True
        with pytest.raises(DeliveryFailed, match="Read-only file system"):
            outbox.append(0, b"refused").result(60)
        for number in range(9):  # the pauses double up to a minute
            clock.advance(60_000)
            until(lambda number=number: caplog.text.count("can't be opened again yet") > number, "it is tried again")
            assert taken(outbox, b"refused") is None
        disk.read_only = False
        clock.advance(60_000)
        until(lambda: taken(outbox, b"after") == 1, "the file system can be written again")
        assert [record.value for record in outbox.log(0).records(0)] == [b"before", b"after"]


def test_buffered_records_that_a_failed_sync_lost_are_told():
    disk = SimulatedDisk()
    outbox = open_outbox(SIMULATED, disk, durability=Durability.BUFFERED)
    outbox.append(0, b"on disk").result(60)
    outbox.flush()
    assert [outbox.append(0, b"only in memory").result(60) for _ in range(3)] == [1, 2, 3]
    disk.fail_sync()
    with pytest.raises(LogPoisoned):
        outbox.flush()
    until(lambda: taken(outbox, b"after") == 1, "its log is opened again by itself")
    with pytest.raises(DeliveryFailed, match="offsets 1 to 3 were acknowledged as BUFFERED") as lost:
        outbox.flush()
    assert not lost.value.may_be_delivered
    outbox.flush()  # told once
    assert [record.value for record in outbox.log(0).records(0)] == [b"on disk", b"after"]
    outbox.close()


@pytest.mark.parametrize("loses_again", [True, False])
def test_a_second_failure_hides_no_buffered_records_that_the_first_one_lost(loses_again):
    disk = SimulatedDisk()
    outbox = open_outbox(SIMULATED, disk, durability=Durability.BUFFERED)
    assert [outbox.append(0, b"only in memory").result(60) for _ in range(3)] == [0, 1, 2]
    disk.fail_sync()
    with pytest.raises(LogPoisoned):
        outbox.log(0).flush()
    until(lambda: taken(outbox, b"after") == 0, "its log is opened again by itself")
    if loses_again:
        disk.fail_sync()
        with pytest.raises(LogPoisoned):
            outbox.log(0).flush()
    else:
        outbox.log(0).flush()
        disk.read_only = True
        with pytest.raises(DeliveryFailed, match="Read-only"):
            outbox.append(0, b"refused").result(60)
        disk.read_only = False
    until(lambda: taken(outbox, b"again") is not None, "its log is opened again by itself")
    with pytest.raises(DeliveryFailed, match="offsets 0 to 2, 0 to 0 were" if loses_again else "offsets 0 to 2 were"):
        outbox.close()


def test_a_close_tells_of_buffered_records_that_may_be_lost(tmp_path):
    disk = LosingDisk()
    outbox = open_outbox(tmp_path, disk, durability=Durability.BUFFERED)
    disk.fails = True
    assert [outbox.append(0, b"only in memory").result(60) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LogPoisoned):
        outbox.log(0).flush()
    with pytest.raises(DeliveryFailed, match="offsets 0 to 2 were acknowledged as BUFFERED") as lost:
        outbox.close()
    assert lost.value.may_be_delivered


def test_a_close_whose_own_sync_fails_tells_so(tmp_path):
    disk = LosingDisk()
    outbox = open_outbox(tmp_path, disk, durability=Durability.BUFFERED)
    assert outbox.append(0, b"only in memory").result(60) == 0
    disk.fails = True
    with pytest.raises(LogPoisoned, match="Input/output error"):
        outbox.close()
    disk.fails = False
    with open_outbox(tmp_path, disk) as outbox:
        assert outbox.log(0).recovery.opening.value == "abnormal"


def test_what_a_failed_sync_did_not_lose_is_found(tmp_path):
    disk = LosingDisk()
    with open_outbox(tmp_path, disk) as outbox:
        outbox.append(0, b"before", metadata=StreamMetadata(7, 0, 0)).result(60)
        disk.fails, disk.loses = True, False
        with pytest.raises(DeliveryFailed):
            outbox.append(0, b"found", metadata=StreamMetadata(7, 0, 1)).result(60)
        disk.fails = False
        until(lambda: taken(outbox, b"after") == 2, "its log is opened again by itself")
        assert [record.value for record in outbox.log(0).records(0)] == [b"before", b"found", b"after"]
        assert outbox.last_metadata(7, 0) == 1


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_failure_that_nobody_asked_about_is_told_at_the_end(end):
    disk = SimulatedDisk()
    outbox = open_outbox(SIMULATED, disk)
    fill(disk, outbox)
    receipt = outbox.append(0, b"lost")
    until(receipt.done, "the write failed")
    with pytest.raises(DeliveryFailed):
        getattr(outbox, end)()
    disk.capacity_bytes = None
    if end == "flush":
        outbox.flush()  # told once
        outbox.close()


def test_an_error_in_the_block_is_not_hidden_by_the_close():
    disk = SimulatedDisk()

    def block():
        with open_outbox(SIMULATED, disk) as outbox:
            fill(disk, outbox)
            until(outbox.append(0, b"lost").done, "the write failed")
            raise KeyError("the caller's own")

    with pytest.raises(KeyError) as raised:
        block()
    assert "it is not in the log" in raised.value.__notes__[0]


def test_close_waits_no_longer_than_told(tmp_path):
    disk = GatedDisk()
    outbox = open_outbox(tmp_path, disk, close_timeout_s=0.05)
    disk.gate.clear()
    held = outbox.append(0, b"held by the disk")
    until(lambda: outbox.log(0).log_end_offset == 1, "the writer is in its sync")
    behind = outbox.append(0, b"behind it")
    try:
        with pytest.raises(CloseTimedOut, match=r"close_timeout_s=0\.05"):
            outbox.close()
        for receipt, may_be_delivered in ((held, True), (behind, False)):
            with pytest.raises(DeliveryFailed) as failed:
                receipt.result(0)
            assert failed.value.may_be_delivered is may_be_delivered
    finally:
        disk.gate.set()
        outbox._resources.close()  # what the end of the process does


def test_syncs_of_many_partitions_wait_beside_each_other(tmp_path):
    disk = MeetingDisk()
    with open_outbox(tmp_path, disk, partitions=12, linger_ms=0) as outbox:
        disk.meet(12)
        receipts = [outbox.append(partition, b"x") for partition in range(12)]
        assert [receipt.result(60) for receipt in receipts] == [0] * 12
        disk.party = None


def test_an_outbox_on_a_disk_that_hangs_holds_up_no_other(tmp_path):
    hanging, well = GatedDisk(), GatedDisk()
    with open_outbox(tmp_path / "a", hanging, partitions=40, linger_ms=0) as stuck, open_outbox(
        tmp_path / "b", well, linger_ms=0
    ) as other:  # fmt: skip
        hanging.gate.clear()
        try:
            receipts = [stuck.append(partition, b"x") for partition in range(40)]
            assert other.append(0, b"x").result(60) == 0
            assert not any(receipt.done() for receipt in receipts)
        finally:
            hanging.gate.set()
        assert [receipt.result(60) for receipt in receipts] == [0] * 40


def test_what_a_log_that_was_closed_meanwhile_holds_nobody_knows(tmp_path):
    before = set(threading.enumerate())
    outbox = open_outbox(tmp_path, RealFilesystem())
    assert outbox.append(0, b"before").result(60) == 0
    outbox.log(0).close()
    with pytest.raises(DeliveryFailed) as failed:
        outbox.append(0, b"of a batch that was perhaps being written").result(60)
    assert isinstance(failed.value.__cause__, LogClosed)
    assert failed.value.may_be_delivered
    with pytest.raises(LogStopped):
        outbox.append(0, b"more")
    outbox.close()
    left = {thread for thread in threading.enumerate() if thread.name.startswith("pushrep-")} - before
    assert left == set(), "a log that was closed by hand keeps no other part of the outbox open"


def test_somebody_elses_append_is_noticed(tmp_path, monkeypatch):
    with open_outbox(tmp_path, RealFilesystem()) as outbox:
        log = outbox.log(0)
        append = log.append

        def meddled(batch, **how):
            append(b"by hand")
            return append(batch, **how)

        monkeypatch.setattr(log, "append", meddled)
        with pytest.raises(DeliveryFailed) as failed:
            outbox.append(0, b"sealed for 0").result(60)
        assert isinstance(failed.value.__cause__, LogEndMoved)
        assert (failed.value.__cause__.expected, failed.value.__cause__.end) == (0, 1)
        assert not failed.value.may_be_delivered
        assert [record.value for record in log.records(0)] == [b"by hand"], "its keys would say another offset"
        with pytest.raises(LogStopped, match=r"ends at offset 1, the append was made for 0.*open the outbox again"):
            outbox.append(0, b"more")


ADDING = {PendingBatch.add.__code__, PendingBatch.extend.__code__}


@pytest.mark.parametrize(
    ("how", "step"), [("one", 0), ("quick", 0), ("quick", 1), ("many", 0), ("list", 0), ("headers", 0)]
)
def test_an_interrupted_append_leaves_neither_half_a_record_nor_a_hole(tmp_path, how, step):
    """Ctrl-C in the middle of `append`, when the batch has a part of the record, in a program that continues."""
    steps = itertools.count()

    def interrupt(frame, event, _arg):
        if frame.f_back.f_code in ADDING and event == "return" and next(steps) == step:
            raise KeyboardInterrupt
        return interrupt

    with Outbox.open(tmp_path, "orders", 1, "billing", config=OutboxConfig(linger_ms=60_000)) as outbox:
        outbox.append(0, b"before", metadata=StreamMetadata(7, 0, 0))
        first = StreamMetadata(7, 0, 1)
        appends = {
            "one": lambda: outbox.append(0, b"lost", headers=[("h", b"")], timestamp_ms=5, metadata=first),
            "quick": lambda: outbox.append(0, b"lost", timestamp_ms=5, metadata=first),
            "many": lambda: outbox.append_many(0, [b"lost"] * 3, timestamps_ms=5, metadata=first),
            "list": lambda: outbox.append_many(0, [b"lost"], metadata=[first]),
            "headers": lambda: outbox.append_many(0, [b"lost"] * 3, headers=[[("h", b"")]] * 3, metadata=first),
        }
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                appends[how]()
        finally:
            sys.settrace(before)
        with pytest.raises(MetadataGap):
            outbox.append(0, b"later", metadata=StreamMetadata(7, 0, 2))
        outbox.append(0, b"again", metadata=StreamMetadata(7, 0, 1))
        outbox.append(0, b"later", metadata=StreamMetadata(7, 0, 2))
        outbox.flush()
        records = list(outbox.log(0).records(0))
        assert [(r.value, StreamMetadata.unpack(r.key).offset) for r in records] == [
            (b"before", 0), (b"again", 1), (b"later", 2),
        ]  # fmt: skip
        assert all(record.timestamp_ms > 5 and not record.headers for record in records)


@pytest.mark.parametrize("position", [None, StreamMetadata(8, 0, 1), StreamMetadata(9, 0, 0)])
def test_what_a_batch_could_not_take_whole_leaves_each_of_its_columns_as_it_was(position):
    """Of one record, and of two of which the first has a position that continues a run, or begins one."""
    batch = PendingBatch(None, 1_000, 0.0)
    for n in range(2):
        batch.add(b"", None, None)
        batch.add(b"", 5, StreamMetadata(7 + n, 0, 0))
    batch.keys += [b"k"] * 4
    batch.headers += [(("h", b""),)] * 4
    columns = Columns([b"lost"] * 2, [0, 40, 80], [b"lost"] * 2, [(("h", b""),)] * 2, [6, 6], [position, None])
    with pytest.raises(AttributeError):
        batch.add(b"lost", 6, object()) if position is None else batch.extend(columns, 0, 2)
    assert (batch.values, batch.keys, batch.headers) == ([b""] * 4, [b"k"] * 4, [(("h", b""),)] * 4)
    assert batch.timestamps_ms == [1_000, 5, 1_000, 5]
    assert [(one.start, one.records, one.pid) for one in batch.runs] == [(1, 1, 7), (3, 1, 8)]
