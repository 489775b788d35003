"""The programs that a run started: each is known here from its first moment, and ends here at the latest.

Beside them what every supervisor needs of time: the run's own clock, and the watchdog when nothing moves any more.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from spark_jobs.demo.processes import Child, ProgramFailed
from spark_jobs.errors import SparkJobError

TICK_S: Final = 0.02
"""Between two looks: a batch takes a second or so, and its commit must not slip by unseen."""
STALL_S: Final = 180.0
"""Without any progress for so long something is wrong; on a busy machine a JVM takes a minute to its first batch."""


class Stalled(SparkJobError):
    """Nothing moved for too long; the programs' own words are in their .err files."""


class ChildProcesses:
    """The children of one run, in one thread."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._children: list[Child] = []

    def now_s(self) -> float:
        """Seconds of the run."""
        return self.at_s(time.monotonic())

    def at_s(self, monotonic_s: float) -> float:
        """Of this machine's monotonic clock, as seconds of the run."""
        return monotonic_s - self._began

    def tracked(self, start: Callable[[], Child]) -> Callable[[], Child]:
        """The same, and `close` knows the child."""

        def tracked() -> Child:
            child = start()
            self._children.append(child)
            return child

        return tracked

    def answer_of(self, start: Callable[[], Child]) -> bytes:
        """The last line that a program says, when it is done. Raises ProgramFailed."""
        child = self.tracked(start)()
        said: list[bytes] = []
        while (code := child.exit_code()) is None:
            said.extend(child.lines())
            time.sleep(TICK_S)
        said.extend(child.lines())
        if code or not said:
            raise ProgramFailed(child.name, code, child.errors)
        return said[-1]

    def close(self, *then: Callable[[], object]) -> None:
        """Kill what still runs, with all it started; a second Ctrl-C doesn't keep it from that. then: what follows."""
        with undisturbed(), ExitStack() as all_of_them:
            for each in reversed(then):
                all_of_them.callback(each)
            for child in self._children:
                all_of_them.callback(child.close)


class Watchdog:
    """Told again and again how far a run is; `root`: where its programs' words are."""

    def __init__(self, root: Path, now_s: float) -> None:
        self._root, self._moved_at_s = root, now_s
        self._state: object = None

    def look(self, now_s: float, state: object) -> None:
        """Raises Stalled when `state` has been the same for STALL_S."""
        if state != self._state:
            self._moved_at_s, self._state = now_s, state
        elif now_s - self._moved_at_s > STALL_S:
            raise Stalled(f"nothing moved for {STALL_S:.0f} s; see *.err in {self._root}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would interrupt the block are ignored: the program is on its way out already."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
