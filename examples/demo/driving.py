"""Drives a demo's producer and streams: start, follow, kill as the plan says, start again.

Producer, by what it prints:

    running ──progress ≥ plan──▶ doomed ──delay over──▶ kill -9 ──▶ running (a new process, from its saved position)
       └──"finished", exit 0──▶ done

Stream, by its checkpoint (the JVM isn't asked, so it may die):

    running ──inside the planned batch──▶ doomed ──depth reached──▶ frozen ── still inside? ──yes──▶ kill -9 ─▶ running
       ▲                                                                 └──no: thaw, next batch──▶ running
       └──everything there is is committed──▶ SIGTERM ──▶ done

    checkpoint/offsets/7    written before batch 7 runs: the end of what it takes
    checkpoint/commits/7    written when it is done; inside batch 7: the first is there and the second isn't

Files of a checkpoint appear by rename, so a name means a whole file. The freeze (SIGSTOP to every process) makes "in
the middle of a batch" a fact: whatever the checkpoint shows while nothing moves is what the kill leaves behind.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from examples.demo.history import PRODUCER, STREAM, History, Kill
from examples.demo.plan import InsideBatch, ProducerPlan
from examples.demo.processes import Child, ProgramFailed


def batches(directory: Path) -> Iterator[int]:
    """The batch numbers in a log directory of the checkpoint; none while it doesn't exist."""
    if directory.is_dir():
        yield from (int(path.name) for path in directory.iterdir() if path.name.isdigit())


def batch_inside(checkpoint: Path) -> int | None:
    """The batch that is planned and not committed; None between batches."""
    committed = max(batches(checkpoint / "commits"), default=-1)  # first: a commit in between then can't mislead
    planned = max(batches(checkpoint / "offsets"), default=-1)
    return planned if planned > committed and planned not in batches(checkpoint / "commits") else None


def committed_batch(checkpoint: Path) -> int | None:
    """The newest batch that is done."""
    return max(batches(checkpoint / "commits"), default=None)


def end_offsets(checkpoint: Path, batch: int) -> Mapping[int, int]:
    """Next offset per partition of the one log or topic after this batch; empty if the checkpoint was trimmed."""
    try:
        text = (checkpoint / "offsets" / str(batch)).read_text()
    except FileNotFoundError:
        return {}
    logged = json.loads(text.splitlines()[2])
    if "partitions" in logged:
        return {int(partition): position["offset"] for partition, position in logged["partitions"].items()}
    return {int(partition): offset for topic in logged.values() for partition, offset in topic.items()}


class Appending:
    """Drives the producer; `step` never waits.

    `records` in the log and `flights` among them, each flight counted once, are as the producer last reported.
    """

    def __init__(
        self, start: Callable[[], Child], plan: ProducerPlan, history: History, say: Callable[[str], None]
    ) -> None:
        self._start, self._plan, self._history, self._say = start, plan, history, say
        self._killed, self._doomed_at_s = 0, float("inf")
        self.records, self.flights = 0, 0
        self.log_ends: list[int] = []
        self.opened, self.done = False, False
        self.child = start()

    def step(self, now_s: float) -> None:
        """Read its output, then kill and restart it if the plan says so. Raises ProgramFailed."""
        code = self.child.exit_code()  # before the reading: then all output of an ended program is there
        for line in self.child.lines():
            self._on_event(json.loads(line))
        if code is not None:
            if code or not self.done:
                raise ProgramFailed(PRODUCER, code, self.child.errors)
        elif not self.done and self._is_doomed(now_s):
            self._kill(now_s)

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "opened":
                self.opened = True
                if kills := self._history.kills_of(PRODUCER):
                    kill = kills[-1]
                    kill.in_log, kill.resumes_at = event["in_log"], event["resumes_at"]
                    self._say(
                        f"producer is back at flight {sum(kill.resumes_at):,} while the log holds "
                        f"{sum(kill.in_log):,}: {kill.again:,} records enter again"
                    )
            case "appended":
                self._progress(event)
            case "finished":
                self._progress(event)
                self.done = True
                if left := len(self._plan.producer_kills) - self._killed:
                    self._say(f"producer was done before the last {left} of its kills: a lower --rate gives them time")

    def _progress(self, event: dict[str, Any]) -> None:
        self.log_ends = event["log_ends"]
        self.records = sum(self.log_ends)
        self.flights = max(self.flights, sum(event["next_offsets"]))

    def _is_doomed(self, now_s: float) -> bool:
        if self._killed == len(self._plan.producer_kills):
            return False
        if self.flights >= self._plan.producer_kills[self._killed]:
            self._doomed_at_s = min(self._doomed_at_s, now_s + self._plan.producer_delays_s[self._killed])
        return now_s >= self._doomed_at_s

    def _kill(self, now_s: float) -> None:
        dead = self.child.kill()
        self.child.close()
        self._history.kills.append(Kill(PRODUCER, now_s, [(p.pid, p.name) for p in dead]))
        self._killed, self._doomed_at_s = self._killed + 1, float("inf")
        self._say(
            f"kill -9 {self.child.pid}: the producer, {self._killed} of {len(self._plan.producer_kills)}, "
            f"after flight {self.flights:,}"
        )
        self.child = self._start()


STOP_WAIT_S: Final = 20.0
"""How long a stream may take to end its batch and its JVM after SIGTERM."""
FIRST_GUESS_S: Final = 1.0
"""Length of a batch before one was seen."""


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """A batch as the job reported it: records read, and records passed on.

    `passed` is None where the job didn't count: it was killed between storing the batch and reporting it, and its
    successor found it stored.
    """

    rows: int
    passed: int | None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> "AppliedBatch":
        """By a line of the job's `--json`."""
        return cls(event["rows"], None if event["skipped"] else event["kept"] + event["unkeyed"])


def count_dropped(batches: Mapping[int, AppliedBatch], in_table: Mapping[int, int]) -> int:
    """Records that the filter dropped over all batches; where it didn't count, the table shows what passed."""
    return sum(
        batch.rows - (in_table.get(number, 0) if batch.passed is None else batch.passed)
        for number, batch in batches.items()
    )


class Applying:
    """Drives the stream; `step` waits only while it stops or kills.

    `records` of what it reads are read and committed, replays included. `program` is what history calls it.
    """

    def __init__(  # noqa: PLR0913 - what to start and when to kill it, what to call, and a name
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
        self._read_output()
        if (code := self.child.exit_code()) is not None:
            raise ProgramFailed(self._program, code, self.child.errors)
        self._poll_checkpoint(now_s)
        if not self._killed and self._is_doomed(now_s):
            self._kill(now_s)
        elif final_ends is not None and self._inside is None and self.ends == dict(enumerate(final_ends)):
            self.child.stop(STOP_WAIT_S)
            self._read_output()
            self.done = True
            if not self._killed:
                self._say(f"{self._program} was done before its kill: no batch took as long as the one before it")

    def _read_output(self) -> None:
        """Read what the job reports of its batches; its position is read from the checkpoint."""
        for line in self.child.lines():
            event = json.loads(line)
            if event["event"] == "batch" and not (event["skipped"] and event["batch"] in self.batches):
                self.batches[event["batch"]] = AppliedBatch.of(event)

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
        self._read_output()  # of batches that it committed before
        self.child.close()
        ends = [self.ends.get(partition, 0) for partition in range(max(self.ends, default=-1) + 1)]
        kill = Kill(self._program, now_s, [(p.pid, p.name) for p in dead], batch=self._inside, in_log=ends)
        self._history.kills.append(kill)
        self._killed = True
        self._say(f"kill -9: all of the {self._program}'s processes, inside batch {kill.batch}: {kill.victims()}")
        self._inside, self._inside_since_s = None, now_s
        self.child = self._start()
