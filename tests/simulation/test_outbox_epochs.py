"""No (PID, partition, offset) is assigned to two records that a reader may see: the outbox is stopped at any call, with
cuts in any order.

`Reader` has one real ReplayFilter for the whole run, like a consumer that outlives all crashes. It reads wherever a
reader of stable records may read, and each record that it sees for the first time has to pass.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from filtering import ReplayFilter, StreamMetadata
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import CheckpointFile, read_checkpoint
from pushrep.log.directory_id import CopyVerdict, read_directory_id
from pushrep.outbox import LogsMissing, Outbox
from tests.support.outbox_arguments import outbox_arguments
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

HOME = Path("/outbox")
CONFIG = LogConfig(segment_bytes=900, preallocate_bytes=0, batch_bytes_max=800, flush_ms=3_600_000)


class Reader:
    def __init__(self):
        self.filter, self.names, self.kept = ReplayFilter(), {}, set()

    def read(self, log):
        for record in log.records(log.log_start_offset, log.stable_offset):
            metadata = StreamMetadata.unpack(record.key)
            named = self.names.setdefault(metadata, record.value)
            assert named == record.value, f"{metadata} names {named!r} and {record.value!r}"
            passed = self.filter.admit(record.key, log.partition)
            assert passed or record.value in self.kept, f"{record.value!r} is dropped as a replay of {metadata}"
            self.kept.add(record.value)


class Machine:
    """A disk, what writes on it, and the reader. `values` are never used twice."""

    def __init__(self, seed=0, partitions=1):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(seed, clock=self.clock)
        self.reader, self.partitions, self.count = Reader(), partitions, 0
        self.outbox = None

    def open(self, **how):
        self.outbox = Outbox.open(
            HOME,
            "orders",
            self.partitions,
            "billing",
            **outbox_arguments(linger_ms=0, log_config=CONFIG, filesystem=self.disk, clock=self.clock, **how),
        )
        return self.outbox

    def log(self, partition):
        return SegmentLog.open(HOME / f"orders-{partition}", CONFIG, filesystem=self.disk, clock=self.clock)

    def append(self, partition, count):
        self.count += count
        values = [b"%06d" % (self.count - n) * 10 for n in range(count)]
        return [self.outbox.append(partition, value).result(60) for value in values]

    def read(self):
        for partition in range(self.partitions):
            self.reader.read(self.outbox.log(partition))

    def close(self):
        self.outbox.close()
        self.outbox = None

    def kill(self, *, power):
        """Stop the process, or the machine; what was open fails from now on, and its threads end."""
        self.disk.power_at, self.disk.is_off = None, False
        if power:
            self.disk.lose_power()
        self.disk.crash()
        if self.outbox is not None:
            with suppress(Exception):
                self.outbox.close()
            self.outbox = None

    def remove(self, partition):
        path = HOME / f"orders-{partition}"
        self.disk.remove_tree(path)


# -- every call of a cut and of the open behind it ---------------------------------------------------------------------


def cut_offline(machine):
    with machine.log(0) as log:
        log.truncate_to(2, force=True)
    machine.open()
    machine.append(0, 3)
    machine.close()


def cut_live(machine):
    machine.open().log(0).truncate_to(2, force=True)
    machine.close()
    machine.open()
    machine.append(0, 3)
    machine.close()


def lose_the_directory(machine):
    machine.open(accept_loss=True)
    machine.append(0, 3)
    machine.close()


def with_records(seed, way):
    machine = Machine(seed)
    machine.open()
    machine.append(0, 7)
    machine.read()
    machine.close()
    if way is lose_the_directory:
        machine.remove(0)
    return machine


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("way", [cut_offline, cut_live, lose_the_directory], ids=lambda way: way.__name__)
def test_a_crash_at_any_call_gives_no_offset_twice(way, power, torture):
    whole = with_records(0, way)
    before = whole.disk.steps
    way(whole)
    steps = whole.disk.steps - before
    for seed in range(torture.count(1, 5)):
        first = torture.random(way.__name__, power, seed).randrange(1, torture.count(18, 2))
        for step in range(first, steps + 1, torture.count(18, 1)):
            machine = with_records(seed, way)
            machine.disk.power_after(step)
            with suppress(Exception):  # it hits a writer's thread or us, and comes as what each makes of it
                way(machine)
            machine.kill(power=power)
            machine.open(accept_loss=True)
            machine.read()
            machine.append(0, 9)
            machine.read()
            machine.close()
            assert len(machine.reader.kept) >= 16, f"seed {seed}, stopped at call {step} of {steps}"


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
def test_a_missing_directory_is_not_forgotten_by_an_opening_that_was_stopped(power, torture):
    """A power cut took the marker and what was published: the missing name is all that tells of the records."""
    for step in range(1, 200, torture.count(3, 1)):
        machine = Machine(step)
        machine.open()
        machine.append(0, 2)
        machine.read()
        machine.kill(power=True)
        machine.remove(0)
        machine.disk.power_after(step)
        is_stopped = True
        with suppress(Exception):
            machine.open(accept_loss=True)
            is_stopped = False
        machine.kill(power=power)
        machine.open(accept_loss=True)
        machine.append(0, 2)
        machine.read()
        machine.close()
        if not is_stopped:  # it takes fewer calls than that
            break
    assert not is_stopped, "an opening takes more calls than are looked at"


# -- any order of all of them ------------------------------------------------------------------------------------------

PARTITIONS = st.integers(0, 1)


class Epochs(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16))
    def make(self, seed):
        self.machine = Machine(seed, 2)
        self.machine.open()

    def teardown(self):
        if hasattr(self, "machine") and self.machine.outbox is not None:
            self.machine.close()

    def is_open(self):
        return self.machine.outbox is not None

    @precondition(is_open)
    @rule(partition=PARTITIONS, count=st.integers(1, 5))
    def append(self, partition, count):
        with suppress(Exception):  # an appender that met a cut refuses until the next open
            self.machine.append(partition, count)

    @precondition(is_open)
    @rule()
    def read(self):
        self.machine.read()

    @precondition(is_open)
    @rule(partition=PARTITIONS, back=st.integers(0, 9))
    def cut_live(self, partition, back):
        log = self.machine.outbox.log(partition)
        log.truncate_to(max(log.log_start_offset, log.log_end_offset - back), force=True)

    @precondition(is_open)
    @rule()
    def close(self):
        self.machine.close()

    @precondition(is_open)
    @rule(power=st.booleans())
    def kill(self, power):
        self.machine.kill(power=power)

    @precondition(lambda self: not self.is_open())
    @rule(accept_loss=st.booleans(), durability=st.sampled_from(Durability))
    def open(self, accept_loss, durability):
        with suppress(LogsMissing):
            self.machine.open(accept_loss=accept_loss, durability=durability)

    @precondition(lambda self: not self.is_open())
    @rule(steps=st.integers(1, 150), power=st.booleans())
    def open_and_die(self, steps, power):
        self.machine.disk.power_after(steps)
        with suppress(Exception):
            self.machine.open(accept_loss=True)
        self.machine.kill(power=power)

    @precondition(lambda self: not self.is_open())
    @rule(partition=PARTITIONS, back=st.integers(0, 9), steps=st.none() | st.integers(1, 120), power=st.booleans())
    def cut_offline(self, partition, back, steps, power):
        """Cut the log with the tools, which do not know of the outbox; the tool may be stopped."""
        if steps is not None:
            self.machine.disk.power_after(steps)
        with suppress(Exception), self.machine.log(partition) as log:
            log.truncate_to(max(log.log_start_offset, log.log_end_offset - back), force=True)
        if steps is not None:
            self.machine.kill(power=power)

    @precondition(lambda self: not self.is_open())
    @rule(partition=PARTITIONS)
    def remove(self, partition):
        if self.machine.disk.exists(HOME / f"orders-{partition}"):
            self.machine.remove(partition)

    @rule()
    def everything_passes_in_the_end(self):
        machine = self.machine
        if machine.outbox is not None:
            machine.close()
        machine.open(accept_loss=True)
        for partition in (0, 1):
            machine.append(partition, 2)
        machine.read()
        assert not any(read_checkpoint(HOME, CheckpointFile.GIVEN_UP, machine.disk).values())


def test_no_order_of_cuts_and_crashes_gives_an_offset_twice(torture):
    run_state_machine_as_test(
        Epochs,
        settings=settings(
            max_examples=torture.count(25, 2000),
            stateful_step_count=torture.count(20, 40),
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- every call of the opening of a copy -------------------------------------------------------------------------------

BACKUP = Path("/backup")


def a_restored_copy(seed, *, while_open):
    """The original continued after its backup, and was lost; a reader has seen all of its records."""
    machine = Machine(seed)
    machine.open()
    machine.append(0, 5)
    if not while_open:
        machine.close()
    machine.disk.copy(HOME, BACKUP)
    if not while_open:
        machine.open()
    machine.append(0, 6)
    machine.read()
    machine.close()
    machine.disk.remove_tree(HOME)
    machine.disk.copy(BACKUP, HOME)
    return machine


def open_and_append(machine):
    machine.open()
    machine.append(0, 3)
    machine.close()


@pytest.mark.parametrize("while_open", [False, True], ids=["closed", "running"])
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
def test_a_crash_at_any_call_of_a_copys_opening_gives_no_offset_twice(power, while_open, torture):
    whole = a_restored_copy(0, while_open=while_open)
    original = read_directory_id(BACKUP, whole.disk)[0]
    before = whole.disk.steps
    open_and_append(whole)
    steps = whole.disk.steps - before
    stride = torture.count(22, 1)
    for step in range(torture.random("copy", power, while_open).randrange(1, stride + 1), steps + 1, stride):
        machine = a_restored_copy(step, while_open=while_open)
        original = read_directory_id(BACKUP, machine.disk)[0]
        machine.disk.power_after(step)
        with suppress(Exception):
            open_and_append(machine)
        machine.kill(power=power)
        machine.open()
        machine.read()
        machine.append(0, 9)
        machine.read()
        machine.close()
        found, verdict = read_directory_id(HOME, machine.disk)
        assert verdict is CopyVerdict.ORIGINAL, f"stopped at call {step} of {steps}"
        assert found.copy_of == (original.directory_id,)
        assert found.directory_id != original.directory_id
        machine.open()
        machine.append(0, 2)
        machine.read()
        machine.close()
        assert len(machine.reader.kept) >= 22
