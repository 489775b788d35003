"""Threads that run one at a time, each until it waits, in an order that a seed draws: `Threads` for tests.

    Scheduler.step()    one thread that can go on runs until it waits again; when none can, the clock goes on to the
                        first moment at which one can, or at which something arrives
    ThreadGroup         some threads that live and die together; pausing it stops them all

Threads are greenlets: every wait (for an event, a condition, a join, a socket) switches to the scheduler, in the middle
of ordinary blocking code. Locks are not simulated, since no code waits while it holds one. Needs `pip install
greenlet`.
"""

import math
import random
from collections.abc import Callable
from types import TracebackType

from greenlet import GreenletExit, getcurrent, greenlet

from pushrep.env import Condition, Event, Thread
from tests.support.simulated_disk import PowerLost, SimulatedClock

Ready = Callable[[], object]
_NEVER_MS = math.inf
_PAUSE_RATE = 0.02  # a step takes a millisecond so often, else nothing that keeps busy would ever see time pass


class NothingHappens(RuntimeError):
    """All threads wait, and nothing can ever wake one."""


class Scheduler:
    """Whose turn it is. `arrivals()`: when something else happens next, in ms of the clock; infinity for never."""

    def __init__(self, seed: int, clock: SimulatedClock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.steps = 0
        self.arrivals: Callable[[], float] = lambda: _NEVER_MS
        self.errors: list[BaseException] = []
        """What threads died of, other than the power."""
        self.current: SimulatedThread | None = None
        self._tasks: list[SimulatedThread] = []

    def step(self, limit_ms: float = _NEVER_MS) -> bool:
        """Let one thread go on, or time, to `limit_ms` at most; False if nothing can ever happen any more."""
        self.steps += 1
        if self.random.random() < _PAUSE_RATE:
            self.clock.advance(1)
        now = self.clock.monotonic_ms()
        able = [task for task in self._tasks if task.can_go_on(now)]
        if able:
            self.random.choice(able).go_on()
            return True
        times = [task.until_ms for task in self._tasks if not task.process.is_paused]
        next_ms = min([limit_ms, self.arrivals(), *times])
        if next_ms == _NEVER_MS:
            return False
        self.clock.advance(max(1, math.ceil(next_ms) - now))
        return True

    def wait(self, ready: Ready, timeout_s: float | None = None) -> bool:
        """Called by a thread: switch to the scheduler until `ready()`; whether it is. Else: step until then."""
        now = self.clock.monotonic_ms()
        until_ms = _NEVER_MS if timeout_s is None else now + math.ceil(max(0.0, timeout_s) * 1000)
        if self.current is not None:
            self.current.park(ready, until_ms)
            return bool(ready())
        while not ready() and self.clock.monotonic_ms() < until_ms:
            if not self.step(until_ms):
                raise NothingHappens(f"after {self.steps} steps")
        return bool(ready())

    def begin(self, task: "SimulatedThread") -> None:
        """Let the thread take turns from now on."""
        self._tasks.append(task)

    def end(self, task: "SimulatedThread") -> None:
        """Let the thread take no more turns."""
        if task in self._tasks:
            self._tasks.remove(task)


class ThreadGroup:
    """`Threads` of one process. `kill` ends them as SIGKILL does: nothing of theirs runs any more.

    What stands in their `finally` is run by Python all the same: take its disk and its network away first.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.is_alive, self.is_paused = True, False
        self._threads: list[SimulatedThread] = []

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        return SimulatedThread(self, target, name)

    def event(self) -> Event:
        return _Event(self.scheduler)

    def condition(self) -> Condition:
        return _Condition(self.scheduler)

    def sleep(self, seconds: float) -> None:
        """Make the calling thread wait."""
        self.scheduler.wait(lambda: False, seconds)

    def started(self, thread: "SimulatedThread") -> None:
        """Dies with the process."""
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)

    def kill(self) -> None:
        """Not to be called by one of its own threads."""
        self.is_alive = False
        for thread in self._threads:
            thread.kill()
        self._threads.clear()


class SimulatedThread:
    """One thread; made by its process."""

    def __init__(self, process: ThreadGroup, target: Callable[[], object], name: str) -> None:
        self.process, self.name = process, name
        self._greenlet = greenlet(self._run)
        self.until_ms = _NEVER_MS
        self._target = target
        self._ready: Ready | None = None
        self._state = "new"

    def start(self) -> None:
        if not self.process.is_alive:
            raise RuntimeError("can't start new thread: its process is dead")
        self._state = "alive"
        self._ready = lambda: True
        self.process.started(self)
        self.process.scheduler.begin(self)

    def is_alive(self) -> bool:
        return self._state == "alive"

    def join(self, timeout: float | None = None) -> None:
        self.process.scheduler.wait(lambda: self._state != "alive", timeout)

    def can_go_on(self, now_ms: int) -> bool:
        """Whether what it waits for is there, or its time is over."""
        if self.process.is_paused or self._ready is None:
            return False
        return now_ms >= self.until_ms or bool(self._ready())

    def go_on(self) -> None:
        """Until it waits again."""
        self._let(self._greenlet.switch)

    def park(self, ready: Ready, until_ms: float) -> None:
        """Called by itself: until `ready()` or that time."""
        if self._state == "over":
            raise GreenletExit  # it is being killed, and something of it wants to wait once more
        self._ready, self.until_ms = ready, until_ms
        self._greenlet.parent.switch()

    def kill(self) -> None:
        """End it, wherever it waits."""
        self._end()
        if not self._greenlet.dead:
            self._let(lambda: self._greenlet.throw(GreenletExit))

    def _let(self, go_on: Callable[[], object]) -> None:
        scheduler = self.process.scheduler
        scheduler.current, self._greenlet.parent = self, getcurrent()
        try:
            go_on()
        finally:
            scheduler.current = None

    def _run(self) -> None:
        try:
            self._target()
        except (GreenletExit, PowerLost):
            pass
        except BaseException as error:  # noqa: BLE001 - whatever a thread died of fails the simulation
            self.process.scheduler.errors.append(error)
        finally:
            self._end()

    def _end(self) -> None:
        self._state = "over"
        self.process.scheduler.end(self)


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(self.is_set, timeout)


class _Condition:
    """Without a lock, as one thread runs at a time; predicates are evaluated whenever a turn is drawn."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        if not (found := predicate()):
            self._scheduler.wait(predicate, timeout)
            found = predicate()
        return found
