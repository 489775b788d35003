"""A plain consumer of local logs: where it starts, new startpoints while it runs, fencing, bootstrap."""

import pytest

from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, write_checkpoint
from pushrep.log.published import PUBLISHED_NAME
from pushrep.replay import ReplayClient, ReplayRefused, ReplayTruncated
from pushrep.startpoints import (
    Consumed,
    PartitionLost,
    Startpoint,
    StartpointFailed,
    StartpointRefused,
    StartpointStore,
    StoreUnavailable,
)
from pushrep.startpoints.model import Reader
from tests.support.simulated_disk import SimulatedClock

RECORDS = 60
T0 = 1_700_000_000_000


@pytest.fixture
def logs(tmp_path):
    """Two partitions with 60 records each, a second apart, their writers still there."""
    directory = tmp_path / "out"
    opened = [SegmentLog.open(directory / f"orders-{n}") for n in range(2)]
    for log in opened:
        for first in range(0, RECORDS, 15):
            offsets = range(first, first + 15)
            log.append([b"%d" % n for n in offsets], timestamps_ms=[T0 + 1000 * n for n in offsets])
    yield opened
    for log in opened:
        log.close()


@pytest.fixture
def directory(logs):
    return logs[0].path.parent


@pytest.fixture
def store(directory):
    return StartpointStore.open(directory / "startpoints")


def drain(consumer, count=RECORDS * 4):
    """Poll to the end; returns {partition: offsets}."""
    got = {}
    while found := consumer.poll(count):
        for partition, _, records in found:
            got.setdefault(partition, []).extend(record.offset for record in records)
    return got


def test_it_goes_on_where_it_committed(directory):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        first = consumer.poll(20)
        assert [(p, len(records)) for p, _, records in first] == [(0, 10), (1, 10)]
        consumer.commit()
        consumer.poll(20)
        assert consumer.positions() == {0: 20, 1: 20}
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer) == {0: list(range(10, RECORDS)), 1: list(range(10, RECORDS))}
        assert consumer.poll() == []


def test_no_more_than_asked_for(directory):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert sum(len(records) for _, _, records in consumer.poll(1)) == 1
        assert sum(len(records) for _, _, records in consumer.poll(7)) == 7


def test_a_startpoint_moves_a_running_consumer_once(directory, store):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        drain(consumer)
        consumer.commit()
        sequence = store.write("billing", "orders", 0, Startpoint.timestamp(T0 + 41_500), "nonsense since 41.5 s")
        assert [(p, epoch, records[0].offset) for p, epoch, records in consumer.poll()] == [(0, sequence, 42)]
        consumer.commit()
        assert drain(consumer) == {}
    assert store.read("billing", "orders", 0) is None
    assert [type(fact).__name__ for fact in store.history()] == ["Written", "Applied", "Consumed"]
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer) == {}, "once"
        assert consumer.positions() == {0: RECORDS, 1: RECORDS}


def test_a_startpoint_that_is_written_while_partitions_begin_is_met_by_the_next_poll(directory, store, monkeypatch):
    begun = StartpointStore.start

    def start(opened, claim, *given, **more):
        found = begun(opened, claim, *given, **more)
        if claim.reader.partition == 1:
            monkeypatch.undo()
            store.write("billing", "orders", 0, Startpoint.specific(42), "written behind its own look")
        return found

    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        monkeypatch.setattr(StartpointStore, "start", start)
        assert drain(consumer) == {0: [*range(RECORDS), *range(42, RECORDS)], 1: list(range(RECORDS))}


def test_a_startpoint_without_progress_is_not_used_up(directory, store, logs):
    store.write("billing", "orders", 0, Startpoint.latest(), "only what is new")
    with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        assert consumer.poll() == []
        consumer.commit()
    logs[0].append(b"new")
    with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        assert drain(consumer) == {0: [RECORDS]}, "the latest of then, not of now"
        consumer.commit()
    assert any(isinstance(fact, Consumed) for fact in store.history())


def test_what_was_read_and_not_committed_is_given_again(directory, store):
    store.write("billing", "orders", 0, Startpoint.specific(30), "go")
    for _ in range(2):
        with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0]) as consumer:
            assert drain(consumer) == {0: list(range(30, RECORDS))}


def test_who_lost_the_partitions_commits_nothing(directory, store):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as old:
        old.poll()
        with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[1]) as new:
            new.poll(10)
            new.commit()
            with pytest.raises(PartitionLost):
                old.commit()
            assert old.positions() == {0: RECORDS}, "the lost one is read no more"
            assert store.checkpoint(Reader("billing", "orders", 1)).offset == 10
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        consumer.poll(0)
        assert consumer.positions() == {0: RECORDS, 1: 10}


def test_a_failed_startpoint_stops_its_partition_only(directory, store):
    sequence = store.write("billing", "orders", 0, Startpoint.specific(RECORDS + 1), "a typo")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        with pytest.raises(StartpointFailed, match="beyond the end"):
            consumer.poll()
        assert drain(consumer) == {1: list(range(RECORDS))}
        assert consumer.stopped[0].sequence == sequence
        consumer.commit()
        store.cancel(sequence, "a typo")
        assert drain(consumer) == {0: list(range(RECORDS))}
        assert consumer.stopped == {}


def test_a_failed_startpoint_stops_a_running_partition_too(directory, store, logs):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        drain(consumer)
        consumer.commit()
        store.write("billing", "orders", 0, Startpoint.timestamp(T0 + 10**9), "in the future")
        with pytest.raises(StartpointFailed, match="no record"):
            consumer.poll()
        for log in logs:
            log.append(b"new")
        assert drain(consumer) == {1: [RECORDS]}
        store.write("billing", "orders", 0, Startpoint.specific(RECORDS), "go on")
        assert drain(consumer) == {0: [RECORDS]}


def test_bootstrap_comes_first(directory, store, logs):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        drain(consumer)
        consumer.commit()
    logs[0].append(b"new")
    store.write("billing", "orders", 1, Startpoint.bootstrap(), "read the table first")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        seen = []
        while found := consumer.poll(25):
            seen += [(p, record.offset) for p, _, records in found for record in records]
            consumer.commit()
        assert seen == [*((1, offset) for offset in range(RECORDS)), (0, RECORDS)]


def test_bootstrapping_ones_run_together_and_go_on_after_a_restart(directory, store, logs):
    log = SegmentLog.open(directory / "orders-2")
    log.append([b"x"] * 5)
    store.write("billing", "orders", 0, Startpoint.bootstrap(), "first")
    store.write("billing", "orders", 1, Startpoint.bootstrap(), "first")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert [p for p, _, _ in consumer.poll(20)] == [0, 1]
        consumer.commit()
    logs[0].append(b"behind the end it saw")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert [p for p, _, _ in consumer.poll(20)] == [0, 1]
        partitions = [[p for p, _, _ in found] for found in iter(lambda: consumer.poll(20), [])]
    assert partitions[0] == [0, 1]
    assert any(2 in found for found in partitions)
    log.close()


def test_an_empty_bootstrap_holds_nobody(directory, store):
    SegmentLog.open(directory / "orders-2").close()
    store.write("billing", "orders", 2, Startpoint.bootstrap(), "first")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer).keys() == {0, 1}


def test_a_failed_bootstrap_holds_nobody(directory, store):
    store.write("billing", "orders", 1, Startpoint.bootstrap(), "first")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        consumer.poll(10)
        store.write("billing", "orders", 1, Startpoint.specific(RECORDS + 1), "a typo")
        with pytest.raises(StartpointFailed):
            consumer.poll(10)
        assert drain(consumer).keys() == {0}


def test_a_revoked_bootstrap_holds_nobody(directory, store):
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        drain(consumer)
        consumer.commit()
    store.write("billing", "orders", 1, Startpoint.bootstrap(), "first")
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        assert [p for p, _, _ in consumer.poll(10)] == [1]
        taken = ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[1])
        with taken, pytest.raises(PartitionLost):
            consumer.commit()
        store.write("billing", "orders", 0, Startpoint.specific(RECORDS - 2), "the last two")
        assert drain(consumer) == {0: [RECORDS - 2, RECORDS - 1]}


def test_retention_and_cuts_are_told(directory, logs):
    with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        drain(consumer)
        consumer.commit()
        logs[0].truncate_to(40, force=True)
        with pytest.raises(ReplayTruncated):
            consumer.poll()


def test_a_log_made_anew_is_told(directory, logs, tmp_path):
    with ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        drain(consumer)
        consumer.commit()
    logs[0].close()
    logs[0].path.rename(tmp_path / "orders-0")
    with SegmentLog.open(directory / "orders-0") as log:
        log.append(b"another life")
        again = ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0])
        with again as consumer, pytest.raises(StartpointRefused, match="made anew"):
            consumer.poll()


def test_a_topic_that_is_not_there(directory):
    with pytest.raises(ReplayRefused, match="no recording payments-0"):
        ReplayClient(directory).subscribe("payments", consumer="billing")
    with pytest.raises(ReplayRefused, match="no recording orders-7"):
        ReplayClient(directory).subscribe("orders", consumer="billing", partitions=[0, 7])


def test_close_is_idempotent(directory):
    consumer = ReplayClient(directory).subscribe("orders", consumer="billing")
    consumer.close()
    consumer.close()
    for use in (consumer.poll, consumer.commit):
        with pytest.raises(StartpointRefused, match="closed"):
            use()


def test_a_store_that_is_away_holds_no_consumer_that_has_begun(logs, directory, store, monkeypatch, caplog):
    def silent(*_words, **_named):
        raise StoreUnavailable("kafka:startpoints", "no broker answers")

    clock = SimulatedClock()
    fresh = ReplayClient(directory).subscribe("orders", consumer="audit", startpoints=store)
    begun = ReplayClient(directory, clock=clock).subscribe("orders", consumer="billing", startpoints=store)
    assert len(drain(begun)[0]) == RECORDS
    first = store.write("billing", "orders", 0, Startpoint.specific(50), "again")
    for lost in ("size_bytes", "read"):
        logs[0].append([b"more"])
        with monkeypatch.context() as patched:
            patched.setattr(store, lost, silent)
            assert len(drain(begun)[0]) == 1, lost
            clock.advance(60_000)
            assert drain(begun) == {}
            with pytest.raises(StoreUnavailable):
                fresh.poll()
        clock.advance(60_000)
        if lost == "size_bytes":
            assert drain(begun) == {0: list(range(50, RECORDS + 1))}
            begun.commit()
            store.write("billing", "orders", 0, Startpoint.specific(55), "and again")
    assert drain(begun) == {0: list(range(55, RECORDS + 2))}
    assert caplog.text.count("new startpoints wait") == 2, "once each time"
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [first]


def test_what_was_read_of_others_before_an_error_is_given_first(logs, directory):
    for log in logs:
        log.close()
    [segment] = logs[1].path.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    given, told = {0: 0, 1: 0}, []
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        for _ in range(20):
            try:
                for partition, _, records in consumer.poll(20):
                    given[partition] += len(records)
            except PushrepError as error:
                told.append(error)
            consumer.commit()
            assert consumer.positions() == given, "what is committed was given"
    assert given == {0: RECORDS, 1: RECORDS - 15}
    assert len(told) > 1, "the damage is told again and again"


def test_an_error_is_raised_by_the_next_poll_although_other_partitions_have_more(logs, directory):
    for log in logs:
        log.close()
    [segment] = logs[1].path.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[70] ^= 1
    segment.write_bytes(data)
    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        for read in (2, 4):
            assert [partition for partition, _, _ in consumer.poll(4)] == [0]
            with pytest.raises(PushrepError):
                consumer.poll(4)
            assert consumer.positions() == {0: read, 1: 0}


def test_a_topic_of_many_partitions(tmp_path):
    for n in range(30):
        with SegmentLog.open(tmp_path / f"orders-{n}") as log:
            log.append(b"x")
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer) == {n: [0] for n in range(30)}


def test_above_what_checkpoints_know_it_waits_for_the_writer(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"x"] * 10)
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer) == {0: list(range(10))}
        consumer.commit()
    for name in (PUBLISHED_NAME, CLEAN_MARKER_NAME):  # as after a power cut
        (tmp_path / name).unlink()
    write_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT, {"orders-0": 5})
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer:
        assert consumer.poll() == []
        with SegmentLog.open(tmp_path / "orders-0") as log:
            log.append(b"more")
            assert drain(consumer) == {0: [10]}


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_partition_keeps_no_other_unread(tmp_path, damaged):
    for n in range(3):
        with SegmentLog.open(tmp_path / f"orders-{n}") as log:
            log.append([b"x"] * 5)
            log.append([b"y"] * 5)
    [segment] = (tmp_path / f"orders-{damaged}").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    given, told = dict.fromkeys(range(3), 0), 0
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer:
        for _ in range(40):
            try:
                for partition, _, records in consumer.poll(6):
                    given[partition] += len(records)
            except PushrepError:
                told += 1
            consumer.commit()
            assert consumer.positions() == given, "what is committed was given"
    assert given == dict.fromkeys(range(3), 10) | {damaged: 5}
    assert told > 1


def test_above_a_cut_that_is_published_nobody_waits(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"x"] * 10)
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer:
        assert drain(consumer) == {0: list(range(10))}
        consumer.commit()
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.truncate_to(0, force=True)
    with ReplayClient(tmp_path).subscribe("orders", consumer="billing") as consumer, pytest.raises(PushrepError):
        consumer.poll()
