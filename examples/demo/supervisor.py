"""Runs the demo from the first append to the last check, in one thread, and leaves no process behind.

    producer ──▶ log ──▶ stream ──▶ table            both killed as planned, each followed by a state machine of its own
                  └────────────────────┴──▶ check    when both are done
    every way out, an exception and Ctrl-C included, kills what still runs

Appending and Applying decide; this loop only gives them the time and shows what they know.
"""

import json
import time
from collections.abc import Mapping
from typing import Final

from examples.demo.driving import Appending, AppliedBatch, Applying, count_dropped
from examples.demo.history import Findings, History, Sample
from examples.demo.plan import ChaosPlan
from examples.demo.processes import TICK_S, ChildProcesses, Watchdog
from examples.demo.programs import Programs
from examples.demo.report import moments
from examples.demo.shell import Bar, Live, behind

SAMPLE_EVERY_S: Final = 0.25


class Supervisor:
    """One run. `run` may be called once; `close` may be called at any time and ends every program."""

    def __init__(self, programs: Programs, plan: ChaosPlan, live: Live) -> None:
        self._programs, self._plan, self._live = programs, plan, live
        self._children = ChildProcesses()
        self.history = History()
        self.dropped = 0
        """Records that the replay filter said it dropped; known after `run`."""

    def run(self) -> Findings:
        """Append, apply, kill, check. Raises ProgramFailed and Stalled; children may live until `close`."""
        batches = self._append_and_apply()
        began = self._children.now_s()
        self._live.say("comparing the table with the original file (Spark SQL, a new JVM)")
        found = self._check()
        self.history.check_s = self._children.now_s() - began
        self.history.total_s = self._children.now_s()
        self.dropped = count_dropped(batches, found.batches)
        return found

    def close(self) -> None:
        """Kill what still runs, with all it started; a second Ctrl-C doesn't keep it from that."""
        self._children.close()

    def _append_and_apply(self) -> Mapping[int, AppliedBatch]:
        """Returns what the stream reported of its batches."""
        appending = Appending(self._children.tracked(self._programs.producer), self._plan, self.history, self._live.say)
        while not appending.opened:  # there is no topic to read before that
            appending.step(self._children.now_s())
            time.sleep(TICK_S)
        applying = Applying(
            self._children.tracked(self._programs.stream),
            self._programs.output.checkpoint,
            self._plan.stream_kill,
            self.history,
            self._live.say,
        )
        self._live.say("producer and stream have started")
        watchdog = Watchdog(self._programs.output.root, 0.0)
        while not (appending.done and applying.done):
            now_s = self._children.now_s()
            appending.step(now_s)
            if appending.done and not self.history.append_s:
                self.history.append_s = now_s
                self._live.say(f"producer is done: {appending.records:,} records, {appending.flights:,} flights")
            applying.step(self._children.now_s(), appending.log_ends if appending.done else None)
            self._sample(appending, applying)
            watchdog.look(now_s, (appending.records, applying.records, len(self.history.kills)))
            time.sleep(TICK_S)
        self.history.apply_s = self._children.now_s()
        self._live.say(f"stream is done: {applying.records:,} records read")
        return applying.batches

    def _sample(self, appending: Appending, applying: Applying) -> None:
        """Remember and show how far it is; the picture needs no more than four points a second."""
        now_s, samples = self._children.now_s(), self.history.samples
        done = appending.done and applying.done
        if samples and not done and now_s - samples[-1].at_s < SAMPLE_EVERY_S:
            return
        # The stream may have committed what the producer wrote since its last report.
        appended = max(appending.records, applying.records)
        samples.append(sample := Sample(now_s, appended, appending.flights, applying.records))
        flights = self._programs.pace.flights
        bars = [
            Bar(sample.flights, flights, f"{max(0, sample.appended - sample.flights):,} of them twice"),
            behind(sample.applied, sample.appended, flights),
        ]
        sentence = (
            f"{sample.flights:,} of {flights:,} flights appended in {sample.appended:,} records, "
            f"{sample.applied:,} read by the stream"
        )
        self._live.show(now_s, bars, sentence)

    def _check(self) -> Findings:
        asked = json.dumps(moments(self.history))
        return Findings.from_json(self._children.answer_of(lambda: self._programs.check(asked)))
