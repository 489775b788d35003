"""A stream's part of a demo: start it, follow its checkpoint, kill its JVM inside a batch, start it again, stop it.

    running ──inside the planned batch──▶ doomed ──depth reached──▶ frozen ── still inside? ──yes──▶ kill -9 ──▶ running
       ▲                                                                 └──no: thaw, next batch──▶ running
       └──everything there is is committed──▶ SIGTERM ──▶ done

The freeze (SIGSTOP to every process) makes "in the middle of a batch" a fact: whatever the checkpoint shows while
nothing moves is what the kill leaves behind.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_jobs.demo.checkpoint import batch_inside, committed_batch, end_offsets
from spark_jobs.demo.history import STREAM, History, Kill
from spark_jobs.demo.plan import InsideBatch
from spark_jobs.demo.processes import Child, ProgramFailed

STOP_WAIT_S: Final = 20.0
"""How long a stream may take to end its batch and its JVM after SIGTERM."""
FIRST_GUESS_S: Final = 1.0
"""Length of a batch before one was seen."""


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """What the job told of a batch: records read, and records passed on.

    `passed` is None where the job didn't count: it was killed between storing the batch and telling of it, and its
    successor found it done.
    """

    rows: int
    passed: int | None


def count_dropped(batches: Mapping[int, AppliedBatch], in_table: Mapping[int, int]) -> int:
    """Records that the filter dropped over all batches; where it didn't count, the table tells what passed."""
    return sum(
        batch.rows - (in_table.get(number, 0) if batch.passed is None else batch.passed)
        for number, batch in batches.items()
    )


class Applying:
    """Drives the stream; `step` waits only while it stops or kills.

    `records` of what it reads are read and committed, replays included. `program` is what history calls it.
    """

    def __init__(  # noqa: PLR0913 - what to start and when to kill it, whom to tell, and a name
        self,
        start: Callable[[], Child],
        checkpoint: Path,
        doom: InsideBatch,
        history: History,
        say: Callable[[str], None],
        *,
        program: str = STREAM,
    ) -> None:
        self._start, self._checkpoint, self._doom = start, checkpoint, doom
        self._history, self._say, self._program = history, say, program
        self._killed = False
        self._inside: int | None = None
        self._inside_since_s, self._batch_s = 0.0, FIRST_GUESS_S
        self._committed: int | None = None
        self.ends: dict[int, int] = {}
        self.batches: dict[int, AppliedBatch] = {}
        self.done = False
        self.child = start()

    @property
    def records(self) -> int:
        return sum(self.ends.values())

    def step(self, now_s: float, final_ends: list[int] | None) -> None:
        """Look at the checkpoint, kill if the plan wants it; stop when `final_ends` (None: not known) is reached.

        Raises ProgramFailed.
        """
        if self.done:
            return
        self._hear()
        if (code := self.child.exit_code()) is not None:
            raise ProgramFailed(self._program, code, self.child.errors)
        self._poll_checkpoint(now_s)
        if not self._killed and self._is_doomed(now_s):
            self._kill(now_s)
        elif final_ends is not None and self._inside is None and self.ends == dict(enumerate(final_ends)):
            self.child.stop(STOP_WAIT_S)
            self._hear()
            self.done = True
            if not self._killed:
                self._say(f"{self._program} was done before its kill: no batch took as long as the one before it")

    def _hear(self) -> None:
        """What the job tells of its batches; where it stands is the checkpoint's to say."""
        for line in self.child.lines():
            told = json.loads(line)
            if told["event"] == "batch" and not (told["skipped"] and told["batch"] in self.batches):
                known = None if told["kept"] is None else told["kept"] + told["unkeyed"]
                self.batches[told["batch"]] = AppliedBatch(told["rows"], known)

    def _poll_checkpoint(self, now_s: float) -> None:
        if (batch := committed_batch(self._checkpoint)) is not None and batch != self._committed:
            self.ends = dict(end_offsets(self._checkpoint, batch)) or self.ends
            self._committed = batch
        if (inside := batch_inside(self._checkpoint)) != self._inside:
            if self._inside is not None:
                self._batch_s = now_s - self._inside_since_s
            self._inside, self._inside_since_s = inside, now_s

    def _is_doomed(self, now_s: float) -> bool:
        """Inside the planned batch or a later one, for long enough."""
        if self._inside is None or self._inside < self._doom.batch:
            return False
        return now_s - self._inside_since_s >= self._doom.depth * self._batch_s

    def _kill(self, now_s: float) -> None:
        self.child.freeze()
        if batch_inside(self._checkpoint) != self._inside:
            self.child.thaw()  # it committed while the signal was on its way: the next batch, then
            return
        dead = self.child.kill()
        self._hear()  # of batches that it committed before
        self.child.close()
        ends = [self.ends.get(partition, 0) for partition in range(max(self.ends, default=-1) + 1)]
        kill = Kill(self._program, now_s, [(p.pid, p.name) for p in dead], batch=self._inside, in_log=ends)
        self._history.kills.append(kill)
        self._killed = True
        self._say(f"kill -9: all of the {self._program}'s processes, inside batch {kill.batch}: {kill.victims()}")
        self._inside, self._inside_since_s = None, now_s
        self.child = self._start()
