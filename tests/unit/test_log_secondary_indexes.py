"""Derived stores: the table, a store that keeps step with a log through every accident, and stores that misbehave."""

from pathlib import Path

import pytest

from pushrep.errors import PushrepError
from pushrep.log import Durability, LogConfig, SegmentLog, StillNeeded
from pushrep.log.reader import Bounds
from pushrep.log.retention import judge
from pushrep.records import encode_batch
from pushrep.records.leader_epochs import LeaderEpochs
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

PATH = Path("/logs/orders-0")
CONFIG = LogConfig(segment_bytes=1000, preallocate_bytes=0, flush_ms=50)
KEPT, DESTROYED = None, 0
EPOCHS = LeaderEpochs(((3, 10), (5, 40), (6, 95)))


@pytest.mark.parametrize(
    ("end", "last", "bounds", "expected"),
    [
        (0, None, (0, 0), KEPT),
        (0, None, (10, 100), KEPT),
        (7, (6, 3), (0, 0), DESTROYED),
        (7, (6, 3), (10, 10), DESTROYED),
        (10, (9, 3), (10, 10), KEPT),
        (101, (100, 6), (10, 100), 100),
        (100, (99, 6), (10, 100), KEPT),
        (40, (39, 3), (10, 100), KEPT),
        (41, (40, 3), (10, 100), 40),
        (60, (59, 3), (10, 100), 40),
        (60, (59, 9), (10, 100), 40),
        (98, (97, 5), (10, 100), 95),
        (30, (29, 2), (10, 100), DESTROYED),
        (30, (29, 5), (10, 100), DESTROYED),
        (50, (49, 3), (40, 100), DESTROYED),
        (15, (14, 1), (20, 100), KEPT),
        (50, None, (10, 100), DESTROYED),
        (50, (50, 5), (10, 100), DESTROYED),
    ],
)
def test_every_row(end, last, bounds, expected):
    assert judge(end, last, Bounds(*bounds), EPOCHS) == expected


class Counting:
    """Values by offset, kept in a file of a disk that forgets; each sync replaces it."""

    name = "counting"

    def __init__(self, disk=None):
        self.disk, self.path = disk, Path("/derived/counting")
        self.values, self.epochs, self.told = {}, {}, []
        self.end_offset, self.cuts = 0, []
        self.saved = ({}, {}, 0)

    @property
    def last(self):
        return (max(self.values), self.epochs[max(self.values)]) if self.values else None

    def dispatch(self, batch):
        self.told.append((batch.header.base_offset, batch.header.next_offset))
        for record in batch.records():
            self.values[record.offset] = record.value
            self.epochs[record.offset] = batch.header.leader_epoch
        self.end_offset = batch.header.next_offset

    def cut_to(self, offset):
        self.cuts.append(offset)
        self.values = {n: value for n, value in self.values.items() if n < offset}
        self.end_offset = max(self.values, default=-1) + 1
        self.sync()

    def destroy(self):
        self.cuts.append("destroyed")
        self.values, self.end_offset = {}, 0
        self.sync()

    def sync(self):
        self.saved = (dict(self.values), dict(self.epochs), self.end_offset)

    def crash(self):
        self.values, self.epochs, self.end_offset = dict(self.saved[0]), dict(self.saved[1]), self.saved[2]
        self.told, self.cuts = [], []
        return self


@pytest.fixture
def place():
    clock = SimulatedClock()
    disk = SimulatedDisk(clock=clock)
    return disk, clock


def opened(place, *stores, config=CONFIG):
    return SegmentLog.open(PATH, config, derived=stores, filesystem=place[0], clock=place[1])


def end_process(disk):
    disk.crash()


def fill(log, count, prefix=b"v"):
    for n in range(count):
        log.append([prefix + b"%d" % n * 20], durability=Durability.FLUSHED)


def in_log(log):
    return {record.offset: record.value for record in log.records(log.log_start_offset)}


def test_a_new_store_is_told_everything_in_order_and_only_once(place):
    store = Counting()
    with opened(place) as log:
        fill(log, 30)
        expected = in_log(log)
    with opened(place, store):
        assert store.values == expected
        assert [start for start, _ in store.told] == sorted({start for start, _ in store.told})
    with opened(place, store) as log:
        assert store.told[-1][1] == log.log_end_offset == len(expected)
        assert len(store.told) == 30, "nothing was told twice"


def test_closing_brings_the_store_to_the_end_and_to_disk(place):
    store = Counting()
    with opened(place, store) as log:
        log.append([b"x"] * 7, durability=Durability.BUFFERED)
        assert store.end_offset == 0, "not flushed yet"
    assert store.saved[2] == 7


def test_while_the_log_is_open_the_store_follows_what_is_flushed(place):
    store = Counting()
    with opened(place, store) as log:
        log.append([b"x"] * 7)
        place[1].advance(100)
        log.append([b"y"], durability=Durability.BUFFERED)
        assert store.end_offset == log.flushed_offset == 8


def test_after_a_kill_the_store_gets_what_it_lost(place):
    store = Counting()
    log = opened(place, store)
    fill(log, 5)
    store.dispatch(encode_batch([b"never"], timestamps_ms=1, base_offset=5))  # it ran ahead
    store.sync()
    end_process(place[0])
    log = opened(place, store.crash())
    assert store.cuts == [5]
    assert store.values == in_log(log)
    log.close()


def test_a_power_cut_takes_the_store_back_to_what_the_log_still_has(place):
    store = Counting()
    log = opened(place, store)
    fill(log, 5)
    log.append([b"lost"] * 3, durability=Durability.BUFFERED)
    for batch in log.batches(0):
        store.dispatch(batch)
    store.sync()
    place[0].lose_power()
    end_process(place[0])
    log = opened(place, store.crash())
    assert store.values == in_log(log)
    assert store.end_offset == log.log_end_offset
    log.close()


def test_a_cut_cuts_the_store_before_the_log(place):
    store = Counting()
    with opened(place, store) as log:
        fill(log, 20)
        end = log.truncate_to(12, force=True)
        place[1].advance(100)
        fill(log, 5, b"w")
        place[1].advance(100)
        fill(log, 1, b"w")
        expected = in_log(log)
    assert end == 12
    assert store.values == expected


def test_the_power_may_go_at_any_step_of_a_cut(place):
    disk, clock = place
    for steps in range(1, 200):
        disk.__init__(steps, clock=clock)
        store = Counting()
        log = opened(place, store)
        fill(log, 20)
        clock.advance(100)
        fill(log, 2)
        store.sync()
        disk.power_after(steps)
        try:
            log.truncate_to(7, force=True)
            done = True
        except PowerLost:
            done = False
        disk.lose_power()
        end_process(disk)
        log = opened(place, store.crash())
        assert log.log_end_offset in ({7} if done else set(range(7, 23))), f"cut by {steps} steps"
        assert store.values == in_log(log), f"cut by {steps} steps"
        log.close()
        if done:
            return
    pytest.fail("a cut takes fewer steps")


def test_a_store_of_another_history_is_cut_to_where_it_agrees(place):
    store = Counting()
    with opened(place, store) as log:
        fill(log, 10)
    store.epochs = dict.fromkeys(store.epochs, 7)  # records that a leader of a later epoch wrote
    with opened(place, store) as log:
        assert store.cuts == ["destroyed"], "the log's only epoch begins with the log"
        assert store.values == in_log(log)


def test_a_store_beside_an_empty_log_is_destroyed(place):
    store = Counting()
    store.dispatch(encode_batch([b"old"], timestamps_ms=1))
    with opened(place, store) as log:
        assert store.cuts == ["destroyed"]
        assert store.values == {}
        fill(log, 3)
    assert len(store.values) == 3


def test_retention_waits_for_no_store_but_syncs_it_first(place):
    store = Counting()
    with opened(place, store) as log:
        fill(log, 30)
        assert log.purge(15) > 0
        assert store.saved[2] == 30, "what goes is in the store, on disk"
    with opened(place, store) as log:
        assert store.cuts == []
        assert len(store.values) == 30 > log.log_end_offset - log.log_start_offset


def test_a_store_that_stays_behind_keeps_the_log(place):
    class Stuck(Counting):
        def dispatch(self, batch):
            if batch.header.base_offset >= 8:
                raise OSError("its disk is full")
            super().dispatch(batch)

    store = Stuck()
    log = opened(place, store)
    fill(log, 30)
    with pytest.raises(OSError, match="its disk is full"):
        log.purge(30)
    assert log.log_start_offset == 0
    log.close()  # its trouble is told by a warning: the log itself is safe
    with pytest.raises(OSError, match="its disk is full"):
        opened(place, store)
    with opened(place) as log:
        assert log.recovery.opening.value == "abnormal", "an opening that failed does not count as closed clean"


def test_a_store_that_cannot_be_cut_is_named(place):
    class Stubborn(Counting):
        def cut_to(self, offset):
            pass

    store = Stubborn()
    log = opened(place, store)
    fill(log, 6)
    place[1].advance(100)
    fill(log, 1)
    with pytest.raises(PushrepError, match="counting still ends at 7 after it was cut to 3"):
        log.truncate_to(3, force=True)
    assert log.log_end_offset == 7, "the log was not cut"
    log.close()


def test_who_holds_the_log_back_is_named(place):
    store = Counting()
    with opened(place, store) as log:
        fill(log, 9)
        log.append([b"x"], durability=Durability.BUFFERED)
        with pytest.raises(StillNeeded) as caught:
            log.delete_records(10)
        assert caught.value.needed_from == 9
        assert caught.value.by in {"the stable offset", "the derived store counting"}
