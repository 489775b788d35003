"""A list of values beside the real log, on a disk that forgets what was never synced: the model is always right."""

import pickle
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pushrep.env import read_whole, write_atomic
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
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

PATH = Path("/logs/orders-0")
DAY_MS = 86_400_000
VALUES = st.lists(st.binary(max_size=120), min_size=1, max_size=12)


def end_process(disk):
    """Simulate a kill: the disk frees locks and descriptors, and the memory of the process is lost."""
    disk.crash()


class Kept:
    """A store derived from the log: the values by offset, in a file of the same disk."""

    name = "kept"

    def __init__(self, disk):
        self.disk, self.path = disk, PATH / "kept"
        self.values, self.epoch, self.end_offset = pickle.loads(read_whole(disk, self.path, 1 << 20) or NOTHING)

    @property
    def last(self):
        return (self.end_offset - 1, self.epoch) if self.end_offset else None

    def dispatch(self, batch):
        assert batch.header.next_offset > self.end_offset, "told twice"
        self.values |= {record.offset: record.value for record in batch.records()}
        self.epoch, self.end_offset = batch.header.leader_epoch, batch.header.next_offset

    def cut_to(self, offset):
        self.values = {n: value for n, value in self.values.items() if n < offset}
        self.end_offset = offset
        self.sync()

    def destroy(self):
        self.values, self.epoch, self.end_offset = pickle.loads(NOTHING)
        self.sync()

    def sync(self):
        write_atomic(self.disk, self.path, [pickle.dumps((self.values, self.epoch, self.end_offset))])


NOTHING = pickle.dumps(({}, -1, 0))


class LogBesideAList(RuleBasedStateMachine):
    """`values[n]` is the value at offset n; the first `promised` of them are reported as on disk.

    Values below `start` were removed: by retention, which keeps what `needed` and the lease hold, or by purge.
    `born[n]` is the machine's own time when value n was appended: whatever the wall clock was set to, none goes by time
    before it is a day old, as long as the machine has power.
    """

    @initialize(
        seed=st.integers(0, 2**32),
        segment_bytes=st.integers(300, 2000),
        index_interval_bytes=st.sampled_from([0, 100, 4096]),
        preallocate_bytes=st.sampled_from([0, 700]),
        flush_bytes=st.integers(200, 3000),
        retention_bytes=st.sampled_from([None, 0, 2500]),
        retention_ms=st.sampled_from([None, 3 * DAY_MS]),
    )
    def make(
        self, seed, segment_bytes, index_interval_bytes, preallocate_bytes, flush_bytes, retention_bytes, retention_ms
    ):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            batch_bytes=250,
            index_interval_bytes=index_interval_bytes,
            preallocate_bytes=preallocate_bytes,
            flush_bytes=flush_bytes,
            flush_ms=50,
            retention_bytes=retention_bytes,
            retention_ms=retention_ms,
            retention_files=2,
        )
        self.born, self.has_lost_power, self.purged = [], False, 0
        self.values, self.promised, self.start = [], 0, 0
        self.needed, self.lease = None, None
        self.log = None
        self.open()

    def open(self):
        self.log = self.walk = None
        store = Kept(self.disk)
        self.log = SegmentLog.open(
            PATH,
            self.config,
            derived=(store,),
            holders={"destination": lambda: self.needed},
            filesystem=self.disk,
            clock=self.clock,
        )
        self.store, self.lease = store, None
        self.promised = max(self.promised, self.log.flushed_offset)

    def lose_all_power(self):
        self.disk.lose_power()
        self.has_lost_power = True

    def reopen_after(self, *, possible, at_least):
        """Open after an accident: the log holds a prefix of `possible`, at least so many of them."""
        self.open()
        assert self.log.recovery.damaged_from is None, f"nothing was flipped: {self.log.recovery}"
        start, end = self.log.log_start_offset, self.log.log_end_offset
        assert start >= min(self.start, end), "what was given up stays gone"
        assert start <= self.floor(end), "what is needed was not given up"
        found = [record.value for record in self.log.records(start)]
        assert found == possible[start:end], "a prefix, never a gap"
        assert end >= at_least, f"{at_least} were safe, {end} are there: {self.log.recovery}"
        assert self.log.flushed_offset == end
        assert self.store.end_offset == end, "the store was told all of it"
        self.values, self.start = possible[:end], start

    def floor(self, end):
        """Above it nothing was given up since the last rule."""
        return max(self.start, min(end, end if self.needed is None else self.needed))

    def note_start(self):
        """Read the log start, because retention may have run by itself."""
        start, floor = self.log.log_start_offset, self.floor(len(self.values))
        if self.lease is not None and self.lease.broken is None:
            floor = max(self.start, min(floor, self.lease.offset))
        assert self.start <= start <= floor
        now_ms = self.clock.boot_ms()
        self.born += [now_ms] * (len(self.values) - len(self.born))
        del self.born[len(self.values) :]
        if self.config.retention_bytes is None and not self.has_lost_power:
            gone = self.born[max(self.start, self.purged) : start]
            assert all(now_ms - born_ms >= DAY_MS for born_ms in gone), "a clock that was set made them old"
        self.start = start

    @rule(days=st.sampled_from([-30, -1, 0.001, 1, 30]))
    def the_clock_is_set(self, days):
        self.clock.set_wall(self.clock.wall_ms() + int(days * DAY_MS))

    @rule(days=st.sampled_from([0.1, 1, 4]))
    def time_passes(self, days):
        self.note_start()
        self.clock.advance(int(days * DAY_MS))

    @precondition(lambda self: self.values)
    @rule(data=st.data(), beside=st.booleans())
    def begin_a_walk(self, data, beside):
        at = data.draw(st.integers(self.start, len(self.values)))
        reader = self.log
        if beside:  # this machine has no id, so that it reads no further than the checkpoints say
            reader = SegmentLog.open_reader(PATH, isolation="written", filesystem=self.disk)
            at = max(reader.bounds().start, min(at, reader.bounds().end))
        self.walk, self.walk_from, self.walk_at, self.walk_history = reader.records(at), at, at, None

    @precondition(lambda self: self.walk is not None)
    @rule(count=st.integers(1, 10))
    def go_on_walking(self, count):
        """What was cut off below the walk's place is not followed by what is there now, once it has given a record."""
        for _ in range(count):
            try:
                record = next(self.walk, None)
            except OffsetOutOfRange:
                assert self.walk_history is not None or self.start > self.walk_at or len(self.values) <= self.walk_at
                record = None
            if record is None:
                self.walk = None
                return
            assert record.offset == self.walk_at
            assert record.value == (self.walk_history or self.values)[record.offset]
            self.walk_at += 1

    @precondition(lambda self: self.log is not None)
    @rule(values=VALUES, durability=st.sampled_from(Durability), ms=st.integers(0, 30))
    def append(self, values, durability, ms):
        self.clock.advance(ms)
        result = self.log.append(values, durability=durability)
        assert result == (len(self.values), len(self.values) + len(values) - 1)
        self.values += values
        if durability is Durability.FLUSHED:
            self.promised = len(self.values)
        assert self.log.flushed_offset >= self.promised
        self.promised = self.log.flushed_offset

    @rule(needed=st.none() | st.integers(0, 60))
    def a_destination_acknowledges(self, needed):
        self.needed = needed

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def take_a_lease(self, data):
        if self.lease is not None:
            self.lease.release()
        with suppress(LeaseBroken):
            self.lease = self.log.acquire_lease("audit", data.draw(st.integers(self.start, len(self.values))))

    @rule()
    def apply_retention(self):
        gone = self.log.apply_retention()
        assert len(gone) <= 2
        has_rule = self.config.retention != (None, None)  # how old it was is looked at by `note_start`
        assert not gone or has_rule or gone[-1] < self.start

    @precondition(lambda self: self.values)
    @rule(data=st.data(), whole_segments=st.booleans())
    def give_up(self, data, whole_segments):
        offset = data.draw(st.integers(self.start, len(self.values)))
        try:
            start = (self.log.purge if whole_segments else self.log.delete_records)(offset)
        except StillNeeded:
            assert self.log.log_start_offset == self.start, "nothing was removed"
            assert self.lease is not None or self.needed is not None or self.log.flushed_offset < offset
        else:
            assert start <= offset if whole_segments else start == offset
            assert start == self.log.log_start_offset
            self.purged = start

    @precondition(lambda self: self.values)
    @rule(data=st.data(), steps=st.integers(1, 30))
    def lose_power_while_giving_up(self, data, steps):
        offset = data.draw(st.integers(self.start, len(self.values)))
        self.disk.power_after(steps)
        with suppress(PowerLost, StillNeeded):
            self.log.delete_records(offset)
            self.log.apply_retention()
        self.lose_all_power()
        end_process(self.disk)
        self.reopen_after(possible=self.values, at_least=self.promised)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), steps=st.integers(1, 40))
    def lose_power_while_truncating(self, data, steps):
        offset = data.draw(st.integers(self.start, len(self.values)))
        firsts = [batch.header.base_offset for batch in self.log.batches(self.start)]
        lowest = max((first for first in firsts if first <= offset), default=offset)
        self.disk.power_after(steps)
        with suppress(PowerLost):
            self.log.truncate_to(offset, force=True)
        self.lose_all_power()
        end_process(self.disk)
        self.reopen_after(possible=self.values, at_least=min(self.promised, lowest))
        self.promised = self.log.flushed_offset

    @rule()
    def close_and_reopen(self):
        self.log.close()
        self.promised = len(self.values)
        self.reopen_after(possible=self.values, at_least=len(self.values))
        assert self.log.recovery.opening.value == "normal", self.log.recovery

    @rule()
    def kill(self):
        end_process(self.disk)
        self.reopen_after(possible=self.values, at_least=len(self.values))
        assert self.log.recovery.cut is None

    @rule()
    def lose_power(self):
        self.lose_all_power()
        end_process(self.disk)
        self.reopen_after(possible=self.values, at_least=self.promised)

    @rule(steps=st.integers(1, 40), values=VALUES, durability=st.sampled_from(Durability), appends=st.integers(1, 6))
    def lose_power_in_the_middle(self, steps, values, durability, appends):
        self.disk.power_after(steps)
        possible, promised = list(self.values), self.promised
        try:
            for _ in range(appends):
                possible += values
                self.log.append(values, durability=durability)
                promised = self.log.flushed_offset
            self.log.close()
            promised = len(possible)
        except PowerLost:
            pass
        self.lose_all_power()
        end_process(self.disk)
        self.promised = promised
        self.reopen_after(possible=possible, at_least=promised)

    @rule(steps=st.integers(1, 25))
    def lose_power_during_recovery(self, steps):
        end_process(self.disk)
        self.disk.power_after(steps)
        with suppress(PowerLost):
            self.open()
        self.lose_all_power()
        end_process(self.disk)
        self.reopen_after(possible=self.values, at_least=self.promised)

    @rule(values=VALUES)
    def a_write_fails(self, values):
        self.disk.fail_write()
        try:
            self.log.append(values, durability=Durability.BUFFERED)
            self.values += values  # what failed was to allocate ahead, or an index: both can be done without
        except AppendFailed:
            assert self.log.log_end_offset == len(self.values), "its offsets were given back"
        self.disk.fail_write(0)

    @rule(room=st.integers(0, 600), values=VALUES)
    def the_disk_is_full(self, room, values):
        self.disk.capacity_bytes = self.disk.used_bytes() + room
        try:
            self.log.append(values, durability=Durability.BUFFERED)
            self.values += values
        except AppendFailed:
            assert self.log.log_end_offset == len(self.values), "its offsets were given back"
        except OSError:  # a checkpoint found no room: the records are in
            self.values += values
        finally:
            self.disk.capacity_bytes = None

    @rule(values=VALUES)
    def a_sync_fails(self, values):
        self.disk.fail_sync()
        with pytest.raises(LogPoisoned):
            self.log.append(values, durability=Durability.FLUSHED)
        with pytest.raises(LogPoisoned):
            self.log.append(values)
        self.disk.fail_sync(0)
        self.log.close()
        self.lose_all_power()
        end_process(self.disk)
        self.reopen_after(possible=self.values + values, at_least=self.promised)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def truncate(self, data):
        offset = data.draw(st.integers(self.start, len(self.values)))
        end = self.log.truncate_to(offset, force=True)
        assert end <= offset
        assert self.log.log_end_offset == end
        has_given = self.walk is not None and self.walk_from < self.walk_at  # else it begins with what is there then
        if has_given and end < self.walk_at and self.walk_history is None:
            self.walk_history = list(self.values)
        del self.values[end:]
        self.start = min(self.start, end)
        self.promised = self.log.flushed_offset

    @precondition(lambda self: self.values)
    @rule(data=st.data(), max_bytes=st.integers(1, 2000))
    def read_somewhere(self, data, max_bytes):
        start = data.draw(st.integers(self.start, len(self.values)))
        end = data.draw(st.integers(start, len(self.values)))
        assert [(r.offset, r.value) for r in self.log.records(start, end)] == [
            (n, self.values[n]) for n in range(start, end)
        ]
        assert bool(self.log.read(start, max_bytes)) == (start < len(self.values)), "at least one batch"

    @invariant()
    def everything_is_there(self):
        if self.log is not None:
            self.note_start()
            assert [record.value for record in self.log.records(self.start)] == self.values[self.start :]
            assert self.store.end_offset <= len(self.values), "told no further than the log goes"
            assert all(self.values[n] == value for n, value in self.store.values.items())

    def teardown(self):
        if self.log is not None:
            self.log.close()
        end_process(self.disk)


def test_no_order_of_calls_and_accidents_loses_or_invents_a_record(torture):
    """Without shrinking: a run of a machine over a whole log is slow to trace, and the seed replays it anyway."""
    phases = [Phase.explicit, Phase.generate]
    examples, steps = torture.count(60, 2000), torture.count(25, 50)
    run_state_machine_as_test(
        LogBesideAList, settings=settings(phases=phases, max_examples=examples, stateful_step_count=steps)
    )
