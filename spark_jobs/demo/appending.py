"""The producer's half of the demo: start it, follow what it tells, kill it when the plan says so, start it again.

running ──progress ≥ plan──▶ doomed ──delay over──▶ kill -9 ──▶ running (a new process, from its saved position)
   └──"finished", exit 0──▶ done
"""

import json
from collections.abc import Callable
from typing import Any

from spark_jobs.demo.history import PRODUCER, History, Kill
from spark_jobs.demo.plan import ProducerPlan
from spark_jobs.demo.processes import Child, ProgramFailed


class Appending:
    """Drives the producer; `step` never waits.

    `records` in the log and `flights` among them, each flight counted once, are as the producer last told.
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
        """Read what was told, then kill and start again if the plan wants it. Raises ProgramFailed."""
        code = self.child.exit_code()  # before the reading: what an ended program said is then all there
        for line in self.child.lines():
            self._hear(json.loads(line))
        if code is not None:
            if code or not self.done:
                raise ProgramFailed(PRODUCER, code, self.child.errors)
        elif not self.done and self._is_doomed(now_s):
            self._kill(now_s)

    def _hear(self, told: dict[str, Any]) -> None:
        match told["event"]:
            case "opened":
                self.opened = True
                if kills := self._history.kills_of(PRODUCER):
                    kill = kills[-1]
                    kill.in_log, kill.resumes_at = told["in_log"], told["resumes_at"]
                    self._say(
                        f"producer is back at flight {sum(kill.resumes_at):,} while the log holds "
                        f"{sum(kill.in_log):,}: {kill.again:,} records enter again"
                    )
            case "appended":
                self._progress(told)
            case "finished":
                self._progress(told)
                self.done = True
                if left := len(self._plan.producer_kills) - self._killed:
                    self._say(f"producer was done before the last {left} of its kills: a lower --rate gives them time")

    def _progress(self, told: dict[str, Any]) -> None:
        self.log_ends = told["log_ends"]
        self.records = sum(self.log_ends)
        self.flights = max(self.flights, sum(told["next_offsets"]))

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
