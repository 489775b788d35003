"""pending, applied, consumed, stopped at any call to the disk, by a kill or a power cut: once, never lost, never twice.

One life of a startpoint: an operator writes it, a consumer claims, starts, reads and commits; then the consumer comes
again and again. The log grows between any two starts, so a second resolution would be seen at once.
"""

from pathlib import Path

import pytest

from pushrep.startpoints import Applied, Consumed, LogFacts, Origin, Startpoint, StartpointStore, Written
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

READ = 3


class Life:
    """The observed history: which calls returned, and their results."""

    def __init__(self, seed):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        self.log_end = 10
        self.written, self.promised, self.committed = False, None, None
        self.attempted = None  # a commit that did not return may have been done

    def store(self):
        return StartpointStore.open(Path("/s"), filesystem=self.disk, clock=self.clock)

    def operator(self):
        self.store().write("billing", "orders", 0, Startpoint.latest(), "go")
        self.written = True

    def consumer(self):
        """One run: start, read, commit. Checks each answer against what was promised before."""
        store = self.store()
        self.log_end += 10
        claim = store.claim("billing", "orders", 0)
        start = store.start(claim, LogFacts(start=0, end=self.log_end, first_at=lambda _ms: None))
        if start.origin is Origin.DEFAULT:
            assert not self.written, "never lost"
            return
        self.written = True
        if start.origin is Origin.STARTPOINT:
            assert self.committed is None, "never twice"
            assert self.promised in (None, start.offset), "the resolved offset stays"
            self.promised = start.offset
        else:
            assert start.offset in (self.committed, self.attempted)
            self.committed = start.offset
        self.attempted = start.offset + READ
        assert store.commit(claim, self.attempted, sequence=start.sequence)
        self.committed = self.attempted
        if start.origin is Origin.STARTPOINT:
            store.consume(claim, start.sequence)

    def whole(self):
        self.operator()
        self.consumer()
        self.consumer()

    def begin_or_go_on(self):
        """An operator who was stopped looks whether it was written; what is seen is no promise yet."""
        if not self.written and not self.store().history():
            self.operator()

    def crash(self, end):
        if end == "power":
            self.disk.lose_power()
        else:
            self.disk.power_at, self.disk.is_off = None, False  # the machine goes on, the process does not
            self.disk.crash()

    def check(self):
        facts = self.store().history()
        assert [type(fact) for fact in facts] == [Written, Applied, Consumed], facts
        assert facts[1].offset == self.promised


def calls_of_a_whole_life():
    life = Life(0)
    life.whole()
    steps = life.disk.steps
    life.check()
    return steps


@pytest.mark.parametrize("end", ["kill", "power"])
def test_stopped_at_any_call(end, torture):
    steps = calls_of_a_whole_life()
    assert steps > 100
    for seed in range(torture.count(1, 20)):
        for step in range(1, steps + 1):
            life = Life(seed)
            life.disk.power_after(step)
            told = f"seed {seed}, {end} at call {step} of {steps}"
            with pytest.raises(PowerLost):
                life.whole()
            life.crash(end)
            was_committed = life.committed
            try:
                life.begin_or_go_on()
                for _ in range(2):
                    life.consumer()
                life.check()
            except AssertionError as error:
                raise AssertionError(told) from error
            assert was_committed is None or life.committed > was_committed, told


def test_killed_and_then_without_power(torture):
    """After a kill, unsynced writes can still be read; a result that relied on them must not be lost by a later power
    cut.
    """
    steps = calls_of_a_whole_life()
    for n in range(torture.count(150, 20_000)):
        chance = torture.random(n)
        life = Life(chance.randrange(1 << 30))
        told = []
        for end in ("kill", "power", "kill", "power"):
            life.disk.power_after(chance.randint(1, steps // 2))
            told.append((end, life.disk.power_at - life.disk.steps))
            try:
                life.begin_or_go_on()
                life.consumer()
            except PowerLost:
                life.crash(end)
            except AssertionError as error:
                raise AssertionError(f"life {n}: {told}") from error
        life.disk.power_after(1 << 40)
        try:
            life.begin_or_go_on()
            life.consumer()
            life.check()
        except AssertionError as error:
            raise AssertionError(f"life {n}: {told}") from error
