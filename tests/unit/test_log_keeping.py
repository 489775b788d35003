"""Retention, purge, readers that need records, leases and a filling disk, with small segments and a clock that stands
still.
"""

import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from pushrep.log import (
    AppendFailed,
    Durability,
    LeaseBroken,
    LogConfig,
    LogPoisoned,
    OffsetOutOfRange,
    SegmentLog,
    StillNeeded,
)
from pushrep.log.directory_files import TIME_INDEX_SUFFIX, list_segments, segment_path
from pushrep.log.flush_scheduler import Flusher
from pushrep.log.indexes import IndexFile
from pushrep.log.retention import Retention
from pushrep.log.segment import TIME_ENTRY
from pushrep.log.segment_log import logs_problems, logs_status
from pushrep.status import Blocks
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

pytestmark = pytest.mark.usefixtures("closes_its_files")

PATH = Path("/logs/orders-0")
DAY_MS = 86_400_000
RECORDS = 40  # of about 150 bytes, five to a segment


class Machine:
    def __init__(self):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(clock=self.clock)
        self.log = None

    def open(self, *, holders=None, **settings):
        config = LogConfig(**{"segment_bytes": 1000, "preallocate_bytes": 0, "flush_ms": 50} | settings)
        self.log = SegmentLog.open(PATH, config, filesystem=self.disk, clock=self.clock, holders=holders)
        return self.log

    def end_process(self):
        self.disk.crash()
        self.log = None

    def fill(self, records=RECORDS, age_ms=lambda n: 0):
        for n in range(records):
            self.log.append(b"%03d" % n * 30, timestamps_ms=self.clock.wall_ms() - age_ms(n))

    def tick(self):
        """Appends until one of them is late enough to bring flush and checkpoints with it."""
        for _ in range(2):
            self.clock.advance(100)
            self.log.append(b"tick")

    def bases(self):
        return list_segments(self.disk, PATH)

    def retain(self):
        """Passes until nothing goes any more."""
        gone = []
        while found := self.log.apply_retention():
            gone += found
        return gone


@pytest.fixture
def machine():
    machine = Machine()
    yield machine
    if machine.log is not None:
        machine.log.close()


def values(log):
    return [(record.offset, record.value[:3]) for record in log.records(log.log_start_offset)]


def test_without_rules_nothing_ever_goes(machine):
    log = machine.open()
    assert log.apply_retention() == (), "nothing is sealed"
    machine.fill(age_ms=lambda n: 1000 * DAY_MS)
    assert log.apply_retention() == ()
    assert log.log_start_offset == 0


def test_by_size_whole_old_segments_go_and_the_log_starts_behind_them(machine):
    log = machine.open(retention_bytes=2500, retention_files=2)
    machine.fill()
    before = machine.bases()
    first_pass = log.apply_retention()
    assert first_pass == tuple(before[:2]), "a few files per pass"
    gone = list(first_pass) + machine.retain()
    assert gone == before[: len(gone)]
    assert machine.bases() == before[len(gone) :]
    kept_bytes = sum(len(machine.disk.contents(segment_path(PATH, base))) for base in machine.bases())
    assert kept_bytes >= 2500
    assert log.log_start_offset == machine.bases()[0] > 0
    assert values(log) == [(n, b"%03d" % n) for n in range(log.log_start_offset, RECORDS)]
    with pytest.raises(OffsetOutOfRange) as caught:
        log.read(0, 100)
    assert (caught.value.start, caught.value.end) == (log.log_start_offset, RECORDS)
    assert not [name for name in machine.disk.list(PATH) if name.startswith("0" * 20)], "indexes go with their segment"


@pytest.mark.parametrize("time", ["its own", "none"])
def test_by_time_the_newest_segment_goes_too_once_all_its_records_are_old(machine, time):
    """30 days of a few small records would stay under a week's retention, in one segment that is never full."""
    log, week = machine.open(retention_ms=7 * DAY_MS, segment_bytes=1 << 20), 7 * DAY_MS
    for _ in range(30):
        log.append(b"a small one", timestamps_ms=machine.clock.wall_ms() if time == "its own" else -1)
        machine.clock.advance(DAY_MS)
        machine.retain()
    assert log.log_start_offset == 0, "its newest record is young"
    machine.clock.advance(week - DAY_MS)
    assert machine.retain() == []
    machine.clock.advance(DAY_MS)
    assert machine.retain() == [0]
    assert (log.log_start_offset, machine.bases(), values(log)) == (30, [30], [])
    assert machine.retain() == [], "an empty segment stays"
    assert log.append(b"more") == (30, 30)
    log.close()
    assert values(machine.open()) == [(30, b"mor")]


def test_by_time_a_newest_segment_that_somebody_needs_is_not_rolled(machine):
    log = machine.open(retention_ms=DAY_MS, segment_bytes=1 << 20, holders={"kafka": lambda: 39})
    machine.fill(age_ms=lambda n: 5 * DAY_MS)
    log.flush()
    assert (machine.retain(), machine.bases()) == ([], [0])
    log.drop_holder("kafka")
    assert (machine.retain(), machine.bases()) == ([0], [RECORDS])


@pytest.mark.parametrize("how", ["clean", "killed"])
def test_the_list_of_epochs_is_the_same_after_an_opening_behind_delete_records(machine, how):
    log = machine.open(segment_bytes=1 << 20)
    for epoch in (1, 3, 5):
        log.begin_epoch(epoch, log.log_end_offset)
        log.append([b"first", b"second"])
        log.append([b"third", b"fourth"])
    log.begin_epoch(7, log.log_end_offset)
    log.delete_records(7)
    before = log.leader_epochs
    assert before.entries == ((3, 7), (5, 8), (7, 12))
    machine.disk.crash() if how == "killed" else log.close()
    assert machine.open().leader_epochs == before


def test_by_time_a_younger_record_keeps_its_segment_and_what_is_behind_it(machine):
    machine.open(retention_ms=DAY_MS)
    machine.fill(age_ms=lambda n: 0 if n == 17 else 5 * DAY_MS)
    before = machine.bases()
    machine.retain()
    holds_17 = next(base for base, after in pairwise(before) if base <= 17 < after)
    assert machine.bases()[0] == holds_17
    machine.clock.advance(2 * DAY_MS)
    machine.retain()
    assert machine.bases() == [RECORDS], "all of it is old by now"


@pytest.mark.parametrize("damage", ["missing", "older", "elsewhere", "shorter"])
def test_a_time_index_that_lies_makes_no_record_old(machine, damage):
    machine.open(retention_ms=DAY_MS)
    machine.fill(age_ms=lambda n: 0 if n % 5 == 2 else 5 * DAY_MS)
    for base in machine.bases():
        path = segment_path(PATH, base, TIME_INDEX_SUFFIX)
        if damage == "missing" and machine.disk.exists(path):
            machine.disk.remove(path)
        if damage != "missing" and machine.disk.exists(path):
            file = machine.disk.open(path)
            size = file.size()
            if damage == "shorter":
                file.truncate(max(0, size - TIME_ENTRY.size))
            elif size:
                rel = 4 if damage == "elsewhere" else IndexFile(machine.disk, path, TIME_ENTRY).last[1]
                file.write_at(TIME_ENTRY.pack(machine.clock.wall_ms() - 9 * DAY_MS, rel), size - TIME_ENTRY.size)
    assert machine.retain() == []


def test_a_segment_that_has_rotted_is_not_deleted_by_its_times(machine, caplog):
    machine.open(retention_ms=DAY_MS)
    machine.fill(age_ms=lambda n: 5 * DAY_MS)
    machine.disk.flip_bit(segment_path(PATH, machine.bases()[0]), 8 * 500)
    assert machine.retain() == []
    assert "can't be read, so it stays" in caplog.text


@pytest.mark.parametrize("strange", [-1, 4_102_444_800_000])
def test_faults_f3_a_record_without_a_time_or_from_2100_keeps_nothing_for_ever(machine, strange):
    log = machine.open(retention_ms=DAY_MS)
    log.append(b"strange" * 100, timestamps_ms=strange)
    machine.fill()
    machine.clock.advance(9 * DAY_MS)
    machine.fill(6)
    young = 1 + RECORDS
    machine.retain()
    first, second, *_ = machine.bases()
    assert first <= young < second, "all that are older went, the first one by its file's time"


@pytest.mark.parametrize("strange", [-1, 4_102_444_800_000])
def test_faults_f3_nor_does_it_keep_the_newest_segment(machine, strange):
    log = machine.open(retention_ms=DAY_MS, segment_bytes=100_000)
    machine.fill(6)
    log.append(b"strange", timestamps_ms=strange)
    machine.clock.advance(DAY_MS)
    assert machine.retain() == []
    machine.clock.advance(1)
    assert machine.retain() == [0]


def test_faults_f3_a_files_time_makes_no_segment_older_than_its_records_say(machine):
    log = machine.open()
    now_ms = machine.clock.wall_ms()
    log.append([b"old" * 100, b"strange", b"young" * 100], timestamps_ms=[1, 4_102_444_800_000, now_ms - DAY_MS // 2])
    machine.fill(age_ms=lambda n: 2 * DAY_MS)
    machine.fill()
    log.close()
    machine.disk.set_modified(segment_path(PATH, 0), 0)  # as a restore may leave it
    machine.open(retention_ms=DAY_MS)
    assert machine.retain() == []
    machine.clock.advance(DAY_MS + 1)
    assert machine.retain()[0] == 0


def test_faults_f3_a_time_that_is_ahead_by_less_than_an_hour_is_believed_beside_one_from_2100(machine):
    log = machine.open(retention_ms=DAY_MS)
    ahead_ms = machine.clock.wall_ms() + 50 * 60_000
    log.append([b"strange" * 100, b"a fast clock"], timestamps_ms=[4_102_444_800_000, ahead_ms])
    machine.fill(age_ms=lambda n: 5 * DAY_MS)
    assert machine.retain() == [], "looked at"
    machine.clock.advance(DAY_MS + 45 * 60_000)
    assert machine.retain() == []
    machine.clock.advance(10 * 60_000)
    assert machine.retain()[0] == 0


@pytest.mark.parametrize("days", [30, -30])
def test_faults_f3_a_clock_that_was_set_removes_nothing_for_a_day(machine, days):
    log = machine.open(retention_ms=7 * DAY_MS)
    machine.fill(age_ms=lambda n: 0 if n > 2 else 9 * DAY_MS)
    machine.clock.set_wall(machine.clock.wall_ms() + days * DAY_MS)
    assert machine.retain() == [], "the records are seconds old"
    assert log.retention_held is not None
    machine.clock.advance(DAY_MS - 1)
    assert machine.retain() == []
    machine.clock.advance(1)
    assert bool(machine.retain()) == (days > 0), "it is right now"
    assert log.retention_held is None


def test_faults_f3_small_steps_and_time_that_passes_hold_nothing(machine):
    log = machine.open(retention_ms=DAY_MS)
    machine.fill()
    for _ in range(50):
        machine.clock.set_wall(machine.clock.wall_ms() + 60_000)
        machine.clock.advance(DAY_MS // 24)
        log.apply_retention()
        assert log.retention_held is None
    assert machine.bases()[0] > 0


def test_faults_f3_what_is_left_of_the_day_is_kept_over_restarts_and_a_size_goes_on(machine):
    settings = {"retention_ms": 7 * DAY_MS, "retention_bytes": 3000}
    machine.open(**settings)
    machine.fill()
    machine.clock.set_wall(machine.clock.wall_ms() + 30 * DAY_MS)
    assert machine.log.apply_retention(), "by size"
    machine.retain()
    left = machine.bases()
    for is_killed in (True, False, True):
        machine.end_process() if is_killed else machine.log.close()
        machine.clock.advance(DAY_MS // 4)
        log = machine.open(**settings)
        assert log.retention_held is not None
        assert machine.retain() == []
    machine.clock.advance(DAY_MS // 4)
    assert machine.retain() == left


def test_faults_f3_a_clock_that_was_set_while_the_log_was_closed_is_seen(machine):
    machine.open(retention_ms=7 * DAY_MS)
    machine.fill(age_ms=lambda n: 3 * DAY_MS)
    machine.log.close()
    machine.clock.set_wall(machine.clock.wall_ms() + 6 * DAY_MS)
    log = machine.open(retention_ms=10 * DAY_MS)
    assert log.retention_held is not None


def test_faults_f3_an_opening_beyond_all_records_removes_nothing_for_a_day_and_says_so(machine):
    machine.open(retention_ms=7 * DAY_MS)
    machine.fill()
    machine.log.close()
    machine.clock.advance(8 * DAY_MS)
    log = machine.open(retention_ms=7 * DAY_MS)
    assert machine.retain() == []
    (problem,) = logs_problems([logs_status("", [log])])
    assert problem.name == "retention_held"
    assert problem.blocked is Blocks.NOTHING
    old = machine.bases()
    machine.clock.advance(DAY_MS)
    assert machine.retain() == old
    assert not list(logs_problems([logs_status("", [log])]))


def test_faults_f3_a_log_of_old_times_that_was_open_of_late_is_not_held(machine):
    """Records may carry the times of what they are about."""
    for is_restart in (False, True):
        log = machine.open(retention_ms=7 * DAY_MS)
        assert log.retention_held is None
        machine.fill(age_ms=lambda n: 900 * DAY_MS)
        machine.clock.advance(6 * DAY_MS)
        assert is_restart or machine.retain()
        log.apply_retention()
        log.close()
        machine.clock.advance(6 * DAY_MS)


def test_what_is_not_flushed_stays(machine):
    log = machine.open(retention_bytes=0, flush_ms=3_600_000)
    log.append([b"x" * 90] * 30, durability=Durability.BUFFERED)
    flushed = log.flushed_offset
    machine.retain()
    assert log.log_start_offset <= flushed
    log.flush()
    machine.retain()
    assert len(machine.bases()) == 1


def test_a_holder_is_asked_and_dropped_by_its_name(machine):
    acknowledged = {"kafka": 12}
    log = machine.open(retention_bytes=0, holders={"kafka": lambda: acknowledged["kafka"]})
    machine.fill()
    log.hold("replica-2", lambda: None)
    machine.retain()
    assert log.log_start_offset <= 12 < machine.bases()[1]
    with pytest.raises(ValueError, match="kafka holds the log already"):
        log.hold("kafka", lambda: 0)
    with pytest.raises(StillNeeded, match="kafka needs them from 12") as caught:
        log.purge(RECORDS)
    assert (caught.value.needed_from, caught.value.by) == (12, "kafka")
    acknowledged["kafka"] = 25
    machine.retain()
    assert log.log_start_offset <= 25 < machine.bases()[1]
    log.drop_holder("kafka")
    with pytest.raises(ValueError, match="nobody of the name 'kafka'"):
        log.drop_holder("kafka")
    machine.retain()
    assert len(machine.bases()) == 1


def test_a_holder_that_fails_stops_the_pass_and_keeps_everything(machine):
    def unreachable():
        raise OSError("no route")

    log = machine.open(retention_bytes=0, holders={"kafka": unreachable})
    machine.fill()
    with pytest.raises(OSError, match="no route"):
        log.apply_retention()
    assert log.log_start_offset == 0


def test_a_lease_holds_until_it_moves_or_ends(machine):
    log = machine.open(retention_bytes=0, lease_max_s=60)
    machine.fill()
    with log.acquire_lease("audit", 12) as lease:
        machine.retain()
        assert log.log_start_offset <= 12 < machine.bases()[1]
        with pytest.raises(OffsetOutOfRange):
            log.acquire_lease("late", 0)
        lease.renew(27)
        machine.retain()
        assert log.log_start_offset <= 27 < machine.bases()[1]
        machine.clock.advance(60_001)
        machine.retain()
        assert lease.broken == "it was not renewed for 60 s"
    assert len(machine.bases()) == 1


@pytest.mark.parametrize("purge", [lambda log, at: log.purge(at), lambda log, at: log.purge_old(before_offset=at)])
def test_a_purge_waits_for_no_lease_that_was_not_renewed_in_time(machine, purge):
    log = machine.open(lease_max_s=60)
    machine.fill()
    lease, second = log.acquire_lease("audit", 0), machine.bases()[1]
    machine.clock.advance(60_001)
    purge(log, second)
    assert (log.log_start_offset, lease.broken) == (second, "it was not renewed for 60 s")


def test_closing_the_log_ends_the_leases(machine):
    told = []
    log = machine.open()
    log.append(b"x")
    lease = log.acquire_lease("audit", 0, told.append)
    log.close()
    machine.log = None
    assert told == ["the log was closed"] == [lease.broken]


def test_purge_takes_whole_segments_and_delete_records_moves_the_start(machine):
    log = machine.open()
    machine.fill()
    second, third = machine.bases()[1:3]
    assert log.purge(third - 1) == second
    assert machine.bases()[0] == second
    assert log.purge(second) == second, "nothing more to do"
    assert log.delete_records(third + 2) == third + 2
    assert machine.bases()[0] == third
    assert values(log)[0][0] == third + 2, "in the middle of a segment"
    assert log.delete_records(RECORDS) == RECORDS
    assert values(log) == []
    assert len(machine.bases()) == 1
    for outside in (0, RECORDS + 1):
        with pytest.raises(OffsetOutOfRange):
            log.purge(outside)
        with pytest.raises(OffsetOutOfRange):
            log.delete_records(outside)
    assert log.append(b"next") == (RECORDS, RECORDS)
    log.close()
    log = machine.open()
    assert (log.log_start_offset, log.log_end_offset) == (RECORDS, RECORDS + 1)


def test_the_kept_start_is_on_disk_before_a_file_goes(machine):
    """Whatever call the power cut hits, the log opens, and it starts at the old place or at the new one."""
    steps = 0
    while True:
        steps += 1
        machine.__init__()
        machine.disk.seed = steps
        log = machine.open()
        machine.fill()
        target = machine.bases()[4] + 1
        machine.disk.power_after(steps)
        done = False
        with suppress(PowerLost):
            log.delete_records(target)
            done = True
        machine.disk.lose_power()
        machine.end_process()
        log = machine.open()
        assert log.recovery.damaged_from is None
        assert log.log_start_offset in ({target} if done else {0, target})
        assert values(log) == [(n, b"%03d" % n) for n in range(log.log_start_offset, RECORDS)]
        assert machine.bases()[0] <= log.log_start_offset < machine.bases()[1], "what lies below is gone"
        log.close()
        machine.log = None
        if done:
            break
    assert steps > 10


def test_a_reader_beside_the_writer_is_told_the_range(machine):
    log = machine.open()
    machine.fill()
    machine.tick()
    end = log.log_end_offset
    with SegmentLog.open_reader(PATH, filesystem=machine.disk) as reader:
        going = reader.records(0)
        assert next(going).offset == 0
        log.purge(machine.bases()[3])
        with pytest.raises(OffsetOutOfRange) as caught:
            list(going)
        assert (caught.value.start, caught.value.end) == (log.log_start_offset, end)
        with pytest.raises(OffsetOutOfRange):
            reader.read(1, 100)
        assert reader.log_start_offset == log.log_start_offset
        assert reader.offset_for_timestamp(0) == log.log_start_offset


@pytest.mark.parametrize("beside", [False, True])
def test_a_search_by_time_during_retention_answers_by_what_is_left(machine, beside, monkeypatch):
    log = machine.open()
    machine.fill()
    machine.tick()
    reading = SegmentLog.open_reader(PATH, filesystem=machine.disk) if beside else log
    opened, first, kept = machine.disk.open, segment_path(PATH, 0), machine.bases()[3]

    def purge_and_open(path, **how):
        if path == first:  # the search has found that it begins there
            monkeypatch.undo()
            log.purge(kept)
        return opened(path, **how)

    monkeypatch.setattr(machine.disk, "open", purge_and_open)
    assert reading.offset_for_timestamp(0) == kept
    assert not machine.disk.exists(first)


def test_a_poisoned_log_removes_nothing(machine):
    log = machine.open(retention_bytes=0)
    machine.fill()
    machine.disk.fail_sync()
    with pytest.raises(LogPoisoned):
        log.append(b"x")
    assert log.apply_retention() == ()
    with pytest.raises(LogPoisoned):
        log.purge(10)
    assert log.log_start_offset == 0


def test_retention_runs_by_itself_after_a_roll(tmp_path, monkeypatch):
    """On the machine's clock: the flusher's thread does it."""
    config = LogConfig(segment_bytes=1000, preallocate_bytes=0, retention_bytes=1500, retention_files=1)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        done, run = threading.Event(), Retention.run

        def watched(retention):
            gone = run(retention)
            if log.log_start_offset and not gone:
                done.set()
            return gone

        monkeypatch.setattr(Retention, "run", watched)
        log.append([b"x" * 100] * 100)
        assert done.wait(60), "no pass of retention ran"


def test_a_holder_with_a_fault_of_its_own_stops_no_other_logs_flushes(tmp_path, caplog):
    """On the machine's clock: one thread flushes all logs of the process, and asks the holders, too."""
    asked = threading.Event()

    def faulty():
        asked.set()
        raise RuntimeError("a programmer's mistake")

    config = LogConfig(segment_bytes=1000, preallocate_bytes=0, retention_bytes=0, flush_ms=10)
    with (
        SegmentLog.open(tmp_path / "orders-0", config, holders={"kafka": faulty}) as held,
        SegmentLog.open(tmp_path / "orders-1", config) as other,
    ):
        held.append([b"x" * 100] * 100)
        assert asked.wait(60)
        for log in (held, other):
            end = log.append(b"y", durability=Durability.BUFFERED).last_offset + 1
            end_s = time.monotonic() + 60
            while log.flushed_offset < end and time.monotonic() < end_s:
                time.sleep(0.005)
            assert log.flushed_offset == end, "nobody flushes any more"
        assert held.log_start_offset == 0
    assert "a programmer's mistake" in caplog.text


def test_without_a_thread_for_the_flusher_appends_go_on_and_the_next_one_asks_again(tmp_path, monkeypatch):
    """Python 3.12.1 gives none to an interpreter that ends, and a system may have no more for a while."""
    start, refused = threading.Thread.start, []

    def no_flusher(thread):
        if thread.name == "pushrep-flusher":
            refused.append(thread)
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    flusher = Flusher()
    monkeypatch.setattr("pushrep.log.flush_scheduler.process_flusher", lambda: flusher)
    monkeypatch.setattr(threading.Thread, "start", no_flusher)
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(flush_ms=1)) as log:
        log.append(b"a", durability=Durability.BUFFERED)
        log.append(b"b", durability=Durability.BUFFERED)
        assert len(refused) == 2, "the second append asks again"
        monkeypatch.setattr(threading.Thread, "start", start)
        log.append(b"c", durability=Durability.BUFFERED)
        flushed_by_s = time.monotonic() + 60
        while log.flushed_offset < 3:
            assert time.monotonic() < flushed_by_s
            time.sleep(0.001)


def test_a_flusher_that_met_an_error_serves_on(caplog):
    class Log:
        def __init__(self, error=None):
            self.error, self.called = error, threading.Event()

        def flush_in_background(self):
            self.called.set()
            if self.error is not None:
                raise self.error

    flusher, logs = Flusher(), [Log(MemoryError()), Log()]
    for log in logs:
        flusher.attach(log)
        flusher.soon(log, 0)
        assert log.called.wait(60)
    for log in logs:
        flusher.detach(log)
    assert "MemoryError" in caplog.text


class TestFillingDisk:
    def fill_to(self, machine, percent):
        machine.disk.capacity_bytes = int(machine.disk.used_bytes() * 100 / percent)
        machine.clock.advance(1000)

    def test_above_the_second_limit_leases_break_and_retention_runs_at_once(self, machine):
        told = []
        log = machine.open(retention_bytes=1500)
        log.acquire_lease("audit", 0, told.append)
        machine.fill()
        assert log.log_start_offset == 0
        self.fill_to(machine, 82)
        machine.tick()
        assert told == []
        self.fill_to(machine, 86)
        machine.tick()
        (reason,) = told
        assert reason.startswith("the disk is 8")
        assert "the limit is disk_pressed_percent=85 and disk_pressed_free_bytes=21474836480" in reason
        assert log.log_start_offset > 0
        machine.disk.capacity_bytes = machine.disk.used_bytes() * 100 // 86
        machine.clock.advance(1000)
        with pytest.raises(LeaseBroken, match="the limit is disk_pressed_percent=85"):
            log.acquire_lease("audit", log.log_start_offset)

    def test_above_the_third_appends_are_refused_until_it_is_below_the_second(self, machine):
        log = machine.open()
        machine.fill()
        self.fill_to(machine, 91)
        with suppress(AppendFailed):
            machine.tick()  # the look comes with a flush
        end = log.log_end_offset
        with pytest.raises(AppendFailed) as caught:
            log.append(b"y")
        error = caught.value
        assert "bytes are used, 9" in str(error)
        for setting in ("disk_refuse_percent=90", "disk_refuse_free_bytes=10737418240", "disk_pressed_percent=85"):
            assert setting in str(error), "the message names what can be set"
        assert log.log_end_offset == end
        machine.disk.capacity_bytes = machine.disk.used_bytes() * 100 // 87
        with pytest.raises(AppendFailed):
            log.append(b"y")
        machine.disk.capacity_bytes = machine.disk.used_bytes() * 100 // 80
        assert log.append(b"y") == (end, end), "at once, not a second later"
        assert log.truncate_to(end, force=True) == end

    def test_the_limits_are_settings(self, machine):
        log = machine.open(disk_warn_percent=100, disk_pressed_percent=100, disk_refuse_percent=100)
        machine.fill()
        self.fill_to(machine, 97)
        for _ in range(5):
            machine.clock.advance(100)
            log.append(b"")
        assert log.log_end_offset == RECORDS + 5

    def test_the_last_bytes_come_from_what_was_allocated_ahead(self, machine):
        log = machine.open(preallocate_bytes=4000, segment_bytes=3000)
        machine.fill()
        machine.disk.capacity_bytes = machine.disk.used_bytes()
        start = machine.bases()[2]
        assert log.purge(start) == start
        assert machine.bases()[0] == start
