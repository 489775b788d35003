"""Runs the route through Kafka from the first append to the last check, in one thread, and leaves no process behind.

    producer ─▶ log ─▶ first topic ─▶ relay ─▶ second topic ─▶ apply ─▶ PostgreSQL        each followed by a state
                       └── broker ──────────────┘                                         machine of its own

Each is done when it has read up to the end of what the one before it wrote; then comes the check. Every way out, an
exception and Ctrl-C included, kills what still runs.
"""

import json
import time
from collections.abc import Callable
from typing import Final

from examples.demo.driving import Appending, Applying, batches, count_dropped, end_offsets
from examples.demo.history import APPLY, RELAY, History
from examples.demo.kafka.programs import Brokering, Home, KafkaPrograms, Route, Servers, Watching
from examples.demo.kafka.report import KafkaSample, moments
from examples.demo.kafka.summary import Counted, KafkaFindings
from examples.demo.plan import KafkaPlan
from examples.demo.processes import TICK_S, Child, ChildProcesses, Watchdog, reap_orphans
from examples.demo.shell import Bar, Live, behind
from examples.demo.supervisor import SAMPLE_EVERY_S

LABELS: Final = ("append", "ship", "relay", "apply")


class KafkaSupervisor:
    """One run. `run` may be called once; `close` may be called at any time and ends every program."""

    def __init__(self, home: Home, servers: Servers, plan: KafkaPlan, live: Live) -> None:
        self._home, self._servers, self._plan, self._live = home, servers, plan, live
        self._children = ChildProcesses()
        self.history = History()
        self.samples: list[KafkaSample] = []
        self.counted = Counted(logged=0, relay_dropped=0, apply_dropped=0, relay_s=0.0)

    def run(self, programs: Callable[[Route], KafkaPrograms]) -> KafkaFindings:
        """Start, append, relay, apply, kill, check. Raises ProgramFailed, Stalled, NotReady."""
        brokering, route = self._start_servers()
        run = _Run(programs(route), self._plan, self.history, self._live.say, self._children.tracked)
        watching = Watching(
            self._children.tracked(lambda: self._servers.watch(route.servers, route.first, route.second)),
            (route.first, route.second),
            self._children.at_s,
        )
        self._live.say("producer, relay and apply job have started")
        watchdog = Watchdog(self._servers.output.root, self._children.now_s())
        while not (run.done and (brokering is None or brokering.done)):
            now_s = self._children.now_s()
            watching.step()
            if brokering is not None:
                done = watching.records(route.first) + run.relaying.records + run.applying.records
                brokering.step(done // 3, watching.answered_at_s)
            run.step(self._children.now_s, watching)
            self._sample(run, watching, route)
            watchdog.look(now_s, (sum(self.samples[-1][1:]), len(self.history.kills)))
            time.sleep(TICK_S)
        return self._judge(run)

    def close(self) -> None:
        """Kill what still runs, with all it started; a second Ctrl-C doesn't keep it from that."""
        self._children.close(self._home.close, reap_orphans)

    def _start_servers(self) -> tuple[Brokering | None, Route]:
        database = self._home.database()
        self._home.prepare_broker()
        brokering = None
        if self._home.home is not None:
            start = self._children.tracked(self._home.start_broker)
            brokering = Brokering(start, self._plan.broker_kills, self.history, self._live.say, self._children.now_s)
        return brokering, self._home.route(database)

    def _judge(self, run: "_Run") -> KafkaFindings:
        began = self._children.now_s()
        self.history.append_s, self.history.apply_s = run.shipped_at_s, run.applied_at_s
        self._live.say("comparing the table with the original file, and counting both topics (SQL in PostgreSQL)")
        asked = {"moments": moments(self.history), "relay_ends": run.relay_ends()}
        found = KafkaFindings.from_json(self._children.answer_of(lambda: run.programs.check(json.dumps(asked))))
        self.history.check_s = self._children.now_s() - began
        self.history.total_s = self._children.now_s()
        self.counted = Counted(
            logged=run.appending.records,
            relay_dropped=count_dropped(run.relaying.batches, found.relay_batches),
            apply_dropped=count_dropped(run.applying.batches, found.apply_batches),
            relay_s=run.relayed_at_s,
        )
        return found

    def _sample(self, run: "_Run", watching: Watching, route: Route) -> None:
        """Remember and show how far it is; the picture needs no more than four points a second."""
        now_s, samples = self._children.now_s(), self.samples
        if samples and not run.done and now_s - samples[-1].at_s < SAMPLE_EVERY_S:
            return
        appending, relaying, applying = run.appending, run.relaying, run.applying
        # A checkpoint may know of records before the watch asked again, and the watch before the producer reports it.
        second = max(watching.records(route.second), applying.records)
        first = max(watching.records(route.first), relaying.records)
        logged = max(appending.records, first)
        samples.append(KafkaSample(now_s, logged, appending.flights, first, relaying.records, second, applying.records))
        flights = run.programs.pace.flights
        bars = [
            Bar(appending.flights, flights, f"{max(0, logged - appending.flights):,} of them twice"),
            Bar(first, max(logged, flights), f"{logged - first:,} behind"),
            behind(relaying.records, first, flights),
            behind(applying.records, second, flights),
        ]
        sentence = (
            f"{appending.flights:,} of {flights:,} flights appended in {logged:,} records; first topic {first:,}, "
            f"relayed {relaying.records:,}; second topic {second:,}, applied {applying.records:,}"
        )
        self._live.show(now_s, bars, sentence)


class _Run:
    """The three programs that move the records; each is stopped when it has read all that the one before it wrote."""

    def __init__(
        self,
        programs: KafkaPrograms,
        plan: KafkaPlan,
        history: History,
        say: Callable[[str], None],
        tracked: Callable[[Callable[[], Child]], Callable[[], Child]],
    ) -> None:
        self.programs, self._say = programs, say
        output = programs.output
        self.appending = Appending(tracked(programs.producer), plan, history, say)
        self.relaying = Applying(tracked(programs.relay), output.relay, plan.relay_kill, history, say, program=RELAY)
        self.applying = Applying(tracked(programs.apply), output.apply, plan.apply_kill, history, say, program=APPLY)
        self.shipped_at_s = self.relayed_at_s = self.applied_at_s = 0.0

    @property
    def done(self) -> bool:
        return self.appending.done and self.relaying.done and self.applying.done

    def step(self, clock: Callable[[], float], watching: Watching) -> None:
        """One look at each, kills included. Raises ProgramFailed."""
        self.appending.step(clock())
        if self.appending.done and not self.shipped_at_s:
            self.shipped_at_s = clock()
            self._say(f"producer is done: {self.appending.records:,} records, shipped")
        route = self.programs.route
        # An answer that was asked for later holds everything that was acknowledged before.
        shipped = self.shipped_at_s and watching.answered_at_s > self.shipped_at_s
        self.relaying.step(clock(), watching.ends[route.first] if shipped else None)
        if self.relaying.done and not self.relayed_at_s:
            self.relayed_at_s = clock()
            self._say(f"relay is done: {self.relaying.records:,} records read")
        relayed = self.relayed_at_s and watching.answered_at_s > self.relayed_at_s
        self.applying.step(clock(), watching.ends[route.second] if relayed else None)
        if self.applying.done and not self.applied_at_s:
            self.applied_at_s = clock()
            self._say(f"apply job is done: {self.applying.records:,} records read")

    def relay_ends(self) -> dict[int, dict[int, int]]:
        """By the relay's batch, where in the first topic it ended."""
        checkpoint = self.programs.output.relay
        return {batch: dict(end_offsets(checkpoint, batch)) for batch in sorted(batches(checkpoint / "commits"))}
