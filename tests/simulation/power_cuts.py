"""Seeded steps of three logs on a disk that forgets: after every accident, what was promised is there, and no more.

    world    a simulated disk, three logs in one directory of logs, their config: all of it from one seed
    step     one call of one log (append, flush, truncate, retention ...), or one accident and the opening after it
    promise  the flushed offset as the log told it, after each step of its own
    judge    after a power cut the log ends between its promise and what was handed to it; after a kill nothing is gone;
             in both cases it holds just the values that were appended, in their order

The power goes at any call to the disk: it is armed some calls ahead, and whatever runs then is cut in its middle, an
opening too. A world that goes wrong says how it is run again, alone:

    python -m tests.simulation.power_cuts --seed 1234 --steps 1000
"""

import argparse
import random
import zlib
from collections import deque
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from pushrep.log import AppendFailed, Durability, LogConfig, LogPoisoned, SegmentLog, StillNeeded
from pushrep.records import Codec, encode_batch
from pushrep.records.header import OFFSET_MAX
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

HOME = Path("/logs")
PARTITIONS = 3
RECORDS_MAX = 40
"""A log with more is cut at one of its ends: every opening reads all of it."""


class WrongWorld(AssertionError):
    """A world in which a promise was broken; the message has the step, and the command to run it again."""


class Model:
    """The expected content of one log. `values[n]` is the value at offset n; those below `start` were removed."""

    def __init__(self):
        self.values, self.start, self.promised = [], 0, 0
        self.settle()

    def settle(self):
        """No call is on its way: nothing may be gained or given up by an accident but what was never promised."""
        self.pending, self.lowest_end, self.highest_start = [], None, None


class World:
    """The world of one seed. `run` executes so many steps; any error is a WrongWorld. Steps in `often` are ten times as
    frequent, for the tests of mutations.
    """

    def __init__(self, seed, *, telling=False, often=()):
        self.seed, self.telling = seed, telling
        self.draw = draw = random.Random(seed)
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(draw.getrandbits(32), clock=self.clock)
        self.config = LogConfig(
            segment_bytes=draw.choice([400, 900, 2500]),
            batch_bytes=250,
            index_interval_bytes=draw.choice([0, 100, 4096]),
            preallocate_bytes=draw.choice([0, 600]),
            flush_bytes=draw.choice([700, 3000]),
            flush_ms=50,
            retention_bytes=draw.choice([None, None, 1500]),
            retention_files=2,
            codec=draw.choice([Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4]),
        )
        self.models = [Model() for _ in range(PARTITIONS)]
        self.steps = self.serial = 0
        self.accidents = {}
        self.told = deque(maxlen=12)
        self.chain = 0  # a CRC over everything that was found: two runs of one seed have the same
        self.kinds = list(STEPS)
        self.bounds = list(accumulate(weight * 10 if step in often else weight for step, weight in STEPS.items()))
        self.open()

    def run(self, steps):
        """Take so many steps more, then an ordinary end."""
        try:
            for _ in range(steps):
                self.steps += 1
                self.step()
            self.last_words()
        except Exception as error:
            end_process(self.disk)
            story = "; ".join(f"{kind} {n}" for kind, n in self.told)
            raise WrongWorld(
                f"seed {self.seed}, step {self.steps} ({story}): {error!r}; again by:\n"
                f"python -m tests.simulation.power_cuts --seed {self.seed} --steps {steps}"
            ) from error

    def step(self):
        kind = self.draw.choices(self.kinds, cum_weights=self.bounds)[0]
        n = self.draw.randrange(PARTITIONS)
        model = self.models[n]
        if len(model.values) - model.start > RECORDS_MAX and kind in {append, append_much, append_ready}:
            kind = self.draw.choice([truncate, delete_records, delete_records])
        self.tell(kind.__name__, n)
        try:
            kind(self, self.logs[n], model)
        except PowerLost:
            self.restart(power=True)
        model.settle()

    def last_words(self):
        with suppress(PowerLost):
            for log in self.logs:
                log.close()
        self.restart(power=True)
        for log, model in zip(self.logs, self.models, strict=True):
            assert log.log_end_offset >= model.promised
            log.close()
        end_process(self.disk)

    def tell(self, kind, n):
        self.told.append((kind, n))
        if self.telling:
            ends = [f"{m.start}..{m.promised}..{len(m.values)}" for m in self.models]
            print(f"{self.steps:6} {kind:24} {n} {'  '.join(ends)}")  # noqa: T201

    # ---- accidents

    def restart(self, *, power):
        """The machine (`power`) or the process stops here; all logs are opened again, whatever that takes, and judged.

        An opening in which the power goes, too, is done again. Now and then it is done twice: nothing may change.
        """
        name = "power" if power else "kill"
        self.accidents[name] = self.accidents.get(name, 0) + 1
        while True:
            self.stop(power=power)
            try:
                self.open()
                self.judge(power=power)
                if self.draw.random() < 0.1:
                    ends = [log.log_end_offset for log in self.logs]
                    self.stop(power=(again := self.draw.random() < 0.5))
                    power = power or again
                    self.open()
                    self.judge(power=power)
                    assert [log.log_end_offset for log in self.logs] == ends, "the second recovery found another log"
                    assert all(log.recovery.cut is None for log in self.logs), "it had something left to cut"
            except PowerLost:
                power = True
                continue
            return

    def stop(self, *, power):
        if power:
            self.disk.lose_power()
        end_process(self.disk)
        if self.draw.random() < 0.2:
            self.disk.power_after(self.draw.randrange(1, 120))

    def open(self):
        self.logs = [
            SegmentLog.open(HOME / f"orders-{n}", self.config, filesystem=self.disk, clock=self.clock)
            for n in range(PARTITIONS)
        ]

    def judge(self, *, power):
        """Compare all logs with their models, which take over what was found."""
        for log, model in zip(self.logs, self.models, strict=True):
            start, end = log.log_start_offset, log.log_end_offset
            assert log.recovery.damaged_from is None, f"nothing was flipped: {log.recovery}"
            assert log.flushed_offset == end, "what is found after a recovery is on disk"
            lowest = model.promised if power else len(model.values)
            lowest = lowest if model.lowest_end is None else min(lowest, model.lowest_end)
            possible = model.values + model.pending
            assert end >= lowest, f"{log.path.name}: offsets up to {lowest} were safe, it ends at {end}: {log.recovery}"
            assert end <= len(possible), f"{log.path.name} ends at {end}, above the {len(possible)} that it was given"
            highest = model.start if model.highest_start is None else max(model.start, model.highest_start)
            assert min(model.start, end) <= start <= min(highest, end), (
                f"{log.path.name} starts at {start}, not {model.start}"
            )
            found = [record.value for record in log.records(start)]
            assert found == possible[start:end], f"{log.path.name}: a prefix, never a gap: {log.recovery}"
            model.values, model.start, model.promised = possible[:end], start, end
            self.chain = zlib.crc32(b"%d %d %d" % (self.disk.steps, start, end), self.chain)
            model.settle()


def end_process(disk):
    """Simulate a kill: locks and descriptors are freed, and the memory of the process is lost."""
    disk.crash()


# ---- steps: each gets the world, one of its logs, and that log's model


def values_of(world, count, size_max=60):
    """Unlike any other value of this world: an old one that comes back at its offset is seen."""
    made = []
    for _ in range(count):
        world.serial += 1
        made.append(b"%d " % world.serial + bytes(world.draw.randrange(size_max)))
    return made


def hand_over(world, log, model, values, data, **columns):
    """Append, with either durability; the model has the values, and the promise if there is one."""
    world.clock.advance(world.draw.randrange(8))
    durability = Durability.FLUSHED if world.draw.random() < 0.3 else Durability.BUFFERED
    model.pending = values
    result = log.append(data, durability=durability, **columns)
    assert result == (len(model.values), len(model.values) + len(values) - 1)
    model.values += values
    model.pending = []
    note_promise(log, model)
    assert durability is Durability.BUFFERED or model.promised == len(model.values)


def note_promise(log, model):
    flushed_offset = log.flushed_offset
    assert model.promised <= flushed_offset <= len(model.values)
    model.promised = flushed_offset
    model.start = max(model.start, log.log_start_offset)  # retention may have run by itself


def may_retain(world, model):
    """Retention runs by itself after a flush: after an accident the log start may be higher."""
    if world.config.retention_bytes is not None:
        model.highest_start = OFFSET_MAX


def append(world, log, model):
    may_retain(world, model)
    values = values_of(world, world.draw.choice([1, 1, 1, 2, 5]))
    columns = {"keys": [b"key"] * len(values)} if world.draw.random() < 0.1 else {}
    hand_over(world, log, model, values, values[0] if len(values) == 1 and not columns else values, **columns)


def append_much(world, log, model):
    """Several batches, over a segment's end: all of them or none."""
    may_retain(world, model)
    values = values_of(world, 12, size_max=150)
    hand_over(world, log, model, values, values)


def append_ready(world, log, model):
    may_retain(world, model)
    values = values_of(world, 3)
    batch = encode_batch(values, timestamps_ms=world.clock.wall_ms(), headers=[[("h", b"v")]] * 3)
    hand_over(world, log, model, values, batch)


def flush(world, log, model):
    may_retain(world, model)
    log.flush()
    model.promised = len(model.values)
    note_promise(log, model)


def wait(world, log, model):
    """Time passes: the next append finds a flush due."""
    world.clock.advance(60)


def read(world, log, model):
    start = world.draw.randint(model.start, len(model.values))
    end = min(start + world.draw.randrange(12), len(model.values))
    assert [record.value for record in log.records(start, end)] == model.values[start:end]


def truncate(world, log, model):
    offset = world.draw.randint(model.start, len(model.values))
    firsts = [batch.header.base_offset for batch in log.batches(model.start)]
    model.lowest_end = max((first for first in firsts if first <= offset), default=offset)
    end = log.truncate_to(offset, force=True)
    assert end <= offset
    del model.values[end:]
    model.start, model.promised = min(model.start, end), min(model.promised, end)
    note_promise(log, model)


def delete_records(world, log, model):
    offset = world.draw.randint(model.start, len(model.values))
    model.highest_start = offset
    with suppress(StillNeeded):
        (log.purge if world.draw.random() < 0.3 else log.delete_records)(offset)
    note_promise(log, model)


def retain(world, log, model):
    may_retain(world, model)
    log.apply_retention()
    note_promise(log, model)


def close_one(world, log, model):
    log.close()
    model.promised = len(model.values)
    at = world.logs.index(log)
    world.logs[at] = log = SegmentLog.open(log.path, world.config, filesystem=world.disk, clock=world.clock)
    assert log.log_end_offset == len(model.values)


def close_all(world, log, model):
    for its_model, each in zip(world.models, world.logs, strict=True):
        each.close()
        its_model.promised = len(its_model.values)
    world.open()
    for each in world.logs:
        assert each.recovery.opening.value == "normal", each.recovery
    world.judge(power=False)


def tidy(world, log, model):
    """Remove the files that were kept aside."""
    for name in world.disk.list(log.path):
        if name.endswith(".cut"):
            world.disk.remove(log.path / name)


def arm_the_power(world, log, model):
    world.disk.power_after(world.draw.choice([1, 5, 20, 60]) + world.draw.randrange(20))


def lose_power(world, log, model):
    world.restart(power=True)


def kill(world, log, model):
    world.restart(power=False)


def a_sync_fails(world, log, model):
    """The log is poisoned; opened again, with or without a power cut in between, it holds what the disk does."""
    model.pending = values_of(world, 2)
    world.disk.fail_sync()
    refused = 0
    for durability in (Durability.FLUSHED, Durability.BUFFERED):
        try:
            log.append(model.pending, durability=durability)
        except LogPoisoned:
            refused += 1
    world.disk.fail_sync(0)
    assert refused == 2, "a failed sync poisons"
    model.lowest_end = model.promised
    world.restart(power=world.draw.random() < 0.5)


def a_write_fails(world, log, model):
    refused_or_not(world, log, model, world.disk.fail_write, lambda: world.disk.fail_write(0))


def the_disk_is_full(world, log, model):
    def fill():
        world.disk.capacity_bytes = world.disk.used_bytes() + world.draw.randrange(400)

    def free():
        world.disk.capacity_bytes = None

    refused_or_not(world, log, model, fill, free)


def refused_or_not(world, log, model, begin, end):
    may_retain(world, model)
    values = values_of(world, world.draw.choice([1, 8]))
    model.pending = values
    begin()
    try:
        log.append(values, durability=Durability.BUFFERED)
        model.values += values
    except AppendFailed:
        assert log.log_end_offset == len(model.values), "its offsets were given back"
    except OSError:  # a checkpoint failed: the records are in
        model.values += values
    finally:
        end()
    model.pending = []
    note_promise(log, model)


STEPS = {
    append: 520,
    append_much: 25,
    append_ready: 60,
    flush: 60,
    wait: 40,
    read: 60,
    truncate: 20,
    delete_records: 20,
    retain: 15,
    close_one: 10,
    close_all: 4,
    tidy: 20,
    arm_the_power: 16,
    lose_power: 4,
    kill: 6,
    a_sync_fails: 3,
    a_write_fails: 20,
    the_disk_is_full: 20,
}


def main():
    arguments = argparse.ArgumentParser(description="One world of seeded steps, each of them told.")
    arguments.add_argument("--seed", type=int, required=True)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--quiet", action="store_true")
    chosen = arguments.parse_args()
    world = World(chosen.seed, telling=not chosen.quiet)
    world.run(chosen.steps)
    print(f"seed {world.seed}: {world.steps} steps, accidents {world.accidents}, found {world.chain:08x}")  # noqa: T201


if __name__ == "__main__":
    main()
