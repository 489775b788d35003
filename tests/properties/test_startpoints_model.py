"""A store under any order of writes, starts, commits, cancels, time and crashes, compared with a simple model.

The model has one state for each startpoint and reader in a dict, and finds pending ones by looking at all. Whatever
returned is durable: a power cut between two calls changes nothing.
"""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pushrep.startpoints import (
    LogFacts,
    Origin,
    PartitionLost,
    Reader,
    Startpoint,
    StartpointFailed,
    StartpointRefused,
    StartpointStore,
)
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

READERS = [Reader(consumer, "orders", partition) for consumer in ("a", "b") for partition in (0, 1)]
END_MAX = 30
readers = st.sampled_from(READERS)


class Model:
    """state[n][reader]; wishes[n] = (consumer, partition, offset or None for the latest, expires at)."""

    def __init__(self):
        self.wishes, self.state, self.offset = {}, {}, {}
        self.committed = dict.fromkeys(READERS, 0)
        self.checkpoint = dict.fromkeys(READERS)

    def write(self, n, consumer, partition, place, expires):
        self.wishes[n] = (consumer, partition, place, expires)
        self.state[n] = {
            reader: "pending"
            for reader in READERS
            if consumer in (None, reader.consumer) and partition in (None, reader.partition)
        }

    def sweep(self, now):
        for n, (_, _, _, expires) in self.wishes.items():
            for reader, state in self.state[n].items():
                if state == "pending" and now >= expires:
                    self.state[n][reader] = "expired"

    def pending(self, reader):
        floor = max([self.committed[reader], *(n for n, by in self.state.items() if by.get(reader) == "consumed")])
        newest = max((n for n, by in self.state.items() if n > floor and reader in by), default=None)
        is_alive = newest is not None and self.state[newest][reader] in ("pending", "applied", "failed")
        return newest if is_alive else None


class Startpoints(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        self.model = Model()
        self.end = 5
        self.claims, self.started = {}, {}
        self.reopen()

    def reopen(self):
        self.store = StartpointStore.open(Path("/s"), filesystem=self.disk, clock=self.clock)

    def log(self):
        return LogFacts(start=0, end=self.end, first_at=lambda _ms: None)

    @rule(consumer=st.sampled_from(["a", "b", None]), partition=st.sampled_from([0, 1, None]),
          place=st.integers(0, END_MAX) | st.none(), ttl_s=st.integers(1, 4))  # fmt: skip
    def write(self, consumer, partition, place, ttl_s):
        startpoint = Startpoint.latest() if place is None else Startpoint.specific(place)
        n = self.store.write(consumer, "orders", partition, startpoint, "go", ttl_s=ttl_s)
        assert n == len(self.model.wishes) + 1
        self.model.sweep(self.clock.wall_ms())
        self.model.write(n, consumer, partition, place, self.clock.wall_ms() + 1000 * ttl_s)

    @rule(n=st.integers(1, 12))
    def cancel(self, n):
        self.model.sweep(self.clock.wall_ms())
        by = self.model.state.get(n)
        try:
            self.store.cancel(n, "no")
        except StartpointRefused:
            assert by is None or all(state in ("consumed", "expired", "cancelled") for state in by.values()), by
        else:
            for reader, state in by.items():
                if state in ("pending", "applied", "failed"):
                    by[reader] = "cancelled"

    @rule(reader=readers)
    def claim(self, reader):
        self.claims[reader] = self.store.claim(reader.consumer, reader.topic, reader.partition)
        self.started.pop(reader, None)
        self.model.sweep(self.clock.wall_ms())

    @rule(reader=readers)
    def start(self, reader):
        if reader not in self.claims:
            return
        model = self.model
        model.sweep(self.clock.wall_ms())
        n = model.pending(reader)
        place = model.wishes[n][2] if n is not None else None
        fails = n is not None and (
            model.state[n][reader] == "failed"
            or (model.state[n][reader] == "pending" and place is not None and place > self.end)
        )
        if fails:
            with pytest.raises(StartpointFailed) as failed:
                self.store.start(self.claims[reader], self.log())
            assert failed.value.sequence == n
            model.state[n][reader] = "failed"
            return
        start = self.store.start(self.claims[reader], self.log())
        if n is None:
            given_back = model.checkpoint[reader]
            assert (start.origin is Origin.CHECKPOINT) == (given_back is not None)
            assert start.offset == (given_back if given_back is not None else 0)
            last = model.committed[reader]
            if last and model.state[last][reader] == "applied":
                model.state[last][reader] = "consumed"
        else:
            wanted = model.offset.setdefault((n, reader), self.end if place is None else place)
            assert (start.origin, start.sequence, start.offset) == (Origin.STARTPOINT, n, wanted)
            assert model.state[n][reader] in ("pending", "applied")
            model.state[n][reader] = "applied"
        self.started[reader] = [start, start.offset]

    @rule(reader=readers, records=st.integers(0, 3), say_so=st.booleans())
    def commit(self, reader, records, say_so):
        if reader not in self.started:
            return
        model, (start, position) = self.model, self.started[reader]
        model.sweep(self.clock.wall_ms())
        position = min(position + records, max(self.end, position))
        done = self.store.commit(self.claims[reader], position, sequence=start.sequence)
        first = start.sequence > model.committed[reader]
        assert done == (not first or position > model.offset[start.sequence, reader])
        if not done:
            return
        self.started[reader][1] = position
        model.checkpoint[reader], model.committed[reader] = position, start.sequence
        if say_so and start.sequence:
            self.store.consume(self.claims[reader], start.sequence)
            if model.state[start.sequence][reader] == "applied":
                model.state[start.sequence][reader] = "consumed"

    @rule(reader=readers)
    def another_instance_takes_it(self, reader):
        old = self.claims.pop(reader, None)
        self.started.pop(reader, None)
        self.store.claim(reader.consumer, reader.topic, reader.partition)
        self.model.sweep(self.clock.wall_ms())
        if old is not None:
            try:
                self.store.start(old, self.log())
            except PartitionLost:
                pass
            else:
                raise AssertionError("who lost the partition started it")

    @rule(reader=readers)
    def read_and_remove(self, reader):
        self.model.sweep(self.clock.wall_ms())
        n = self.model.pending(reader)
        found = self.store.read(reader.consumer, reader.topic, reader.partition, remove=True)
        assert (found.sequence if found is not None else None) == n
        if n is not None and self.model.state[n][reader] != "failed":
            self.model.state[n][reader] = "consumed"

    @rule(records=st.integers(1, 5))
    def the_log_grows(self, records):
        self.end = min(END_MAX - 2, self.end + records)

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds):
        self.clock.advance(1000 * seconds)

    @rule(power=st.booleans())
    def crash(self, power):
        if power:
            self.disk.lose_power()
        else:
            self.disk.crash()
        self.claims.clear()
        self.started.clear()
        self.reopen()

    @invariant()
    def what_is_pending_is_what_the_model_says(self):
        if not hasattr(self, "model"):
            return
        self.model.sweep(self.clock.wall_ms())
        for reader in READERS:
            found = self.store.read(reader.consumer, reader.topic, reader.partition)
            n = self.model.pending(reader)
            assert (found.sequence if found is not None else None) == n, reader
            if found is not None:
                assert str(found.state) == self.model.state[n][reader]


def test_any_order_of_events(torture):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Startpoints, settings=settings(max_examples=torture.count(40, 2000), stateful_step_count=torture.count(25, 60))
    )
