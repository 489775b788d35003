"""No flushed record is lost in 10,000 seeded steps, 10^6 in the long form; mutated code is detected.

The seeds of the worlds come from the seed of the run (in its header). The message of a failed world has the command to
run that world again, alone.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from pushrep.env import write_atomic, write_beside
from pushrep.errors import PushrepError
from pushrep.log.cut_files import move_aside
from pushrep.log.recovery import Recovery
from pushrep.log.segment import Segment
from pushrep.log.segment_log import SegmentLog
from pushrep.log.writer import LogWriter
from pushrep.records import RecordBatch
from pushrep.records.header import checked_run
from tests.simulation.mutations import Mutation, mutated
from tests.simulation.power_cuts import (
    World,
    WrongWorld,
    a_write_fails,
    append_much,
    arm_the_power,
    delete_records,
    kill,
    lose_power,
    the_disk_is_full,
    truncate,
)

WORLD_STEPS = 1000

BROKEN = {
    "a flush that does not sync": Mutation(LogWriter, "self._context.view.disk.timed(file.sync)", "pass"),
    "an answer before the flush": Mutation(
        SegmentLog.append, "writer.flush_acknowledged(reopened_after, result.last_offset + 1)", "pass"
    ),
    "a roll that leaves the old segment unsynced": Mutation(LogWriter, "self._sync_file(old.file)", "pass"),
    "a new segment whose name is not synced": Mutation(Segment.create, "filesystem.sync_directory(directory)", "pass"),
    "a small file renamed before its bytes are synced": Mutation(write_beside, "file.sync()", "pass"),
    "a small file whose new name is not synced": Mutation(
        write_atomic, "filesystem.sync_directory(path.parent)", "pass"
    ),
    "a recovery point ahead of the flush": Mutation(
        LogWriter.checkpoint, "min(flushed_offset, self.flushed_offset)", "self.log_end_offset"
    ),
    "a recovery point that stays above the cut": Mutation(
        LogWriter,
        "self._lower_checkpoints(min(end, self.flushed_offset), high_watermark=min(end, self.high_watermark))",
        "pass",
    ),
    "later segments moved aside oldest first": Mutation(move_aside, "sorted(bases, reverse=True)", "sorted(bases)"),
    "a cut that is not synced": Mutation(Segment.cut, "self.file.sync()", "pass"),
    "refused records that are not cut off durably": Mutation(LogWriter, "self._sync_file(self._active.file)", "pass"),
    "refused records that are not cut off": Mutation(
        Segment.cut_back, "self.file.truncate(self._tail.size_bytes)", "pass"
    ),
    "files that go before the new start is on disk": Mutation(
        LogWriter.move_log_start,
        "context.view.reserve.call(self.checkpoint)",
        "remove_segments(context.filesystem, context.view.path, gone); self.checkpoint()",
    ),
    "a failed sync that does not poison": Mutation(
        LogWriter,
        "            raise\n        self._poison_by(error)",
        "            raise\n        raise LogPoisoned(self.path, error)",
    ),
    "a recovery that does not sync what it believes": Mutation(
        Recovery, "file.sync()\n                file.drop_cache()", "file.drop_cache()"
    ),
    "a recovery that believes the page cache": Mutation(Recovery, "file.drop_cache()", "pass"),
    "a scan that believes batches whose CRC is wrong": (
        Mutation(RecordBatch.check, "if crc != batch.header.crc", "if False"),
        Mutation(checked_run, '(headers["crc"] == crcs) & _possible', "_possible"),
    ),
}


BROKEN_STEPS_MAX = 20_000
"""What it takes at most to catch any of them; most are caught within a few hundred steps."""

OFTEN = {
    "later segments moved aside oldest first": (append_much, truncate, arm_the_power),
    "files that go before the new start is on disk": (delete_records, arm_the_power),
    "a recovery that does not sync what it believes": (kill, lose_power),
    "refused records that are not cut off durably": (a_write_fails, the_disk_is_full, lose_power),
    "refused records that are not cut off": (a_write_fails, the_disk_is_full, kill),
}


def run_worlds(seeds, often=()):
    """(steps taken, accidents by kind) of so many worlds."""
    taken, accidents = 0, Counter()
    for seed in seeds:
        world = World(seed, often=often)
        world.run(WORLD_STEPS)
        taken += world.steps
        accidents.update(world.accidents)
    return taken, accidents


@pytest.mark.slow
def test_nothing_flushed_is_lost(torture):
    wanted = torture.count(10_000, 1_000_000)
    draw = torture.random("power cuts")
    taken, accidents = run_worlds([draw.getrandbits(40) for _ in range(wanted // WORLD_STEPS)])
    print(f"{taken:,} steps, {dict(accidents)} and openings after them, PUSHREP_TORTURE_SEED={torture.seed}")  # noqa: T201
    assert taken == wanted
    assert accidents["power"] > wanted // 100
    assert accidents["kill"] > wanted // 200


@pytest.mark.parametrize("name", BROKEN)
def test_code_that_is_broken_on_purpose_is_caught(name):
    broken = BROKEN[name]
    with mutated(*[broken] if isinstance(broken, Mutation) else broken), pytest.raises(WrongWorld) as caught:
        run_worlds(range(BROKEN_STEPS_MAX // WORLD_STEPS), OFTEN.get(name, ()))
    cause = caught.value.__cause__
    assert isinstance(cause, AssertionError | PushrepError | OSError), f"the mutation itself is broken: {cause!r}"
    print(name, "is caught:", caught.value)  # noqa: T201


def test_a_seed_tells_the_same_story_in_another_process():
    """Neither the pid nor the order of a set has a say: the command in the message repeats what went wrong."""
    command = [sys.executable, "-m", "tests.simulation.power_cuts", "--seed", "7", "--steps", "300", "--quiet"]
    stories = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        stories.add(run.stdout)
    world = World(7)
    world.run(300)
    assert len(stories) == 1, stories
    assert f"found {world.chain:08x}" in stories.pop()


def test_a_world_that_goes_wrong_says_how_it_is_run_again():
    with mutated(BROKEN["a flush that does not sync"]), pytest.raises(WrongWorld) as first:
        World(3).run(WORLD_STEPS)
    with mutated(BROKEN["a flush that does not sync"]), pytest.raises(WrongWorld) as second:
        World(3).run(WORLD_STEPS)
    assert str(first.value) == str(second.value)
    assert str(first.value).endswith("python -m tests.simulation.power_cuts --seed 3 --steps 1000")
