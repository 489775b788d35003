"""Programs that are started, watched, killed with all they started, and never left behind.

    Child.start(...)   a session of its own: setsid marks everything it starts, through any fork and any setpgid
       driver (python) ── java ── python worker daemons        one session id, read from /proc
    .kill()            SIGKILL to each member, until none is left; returns who they were
    .stop()            SIGTERM to the program, a while to leave, then .kill()

A process group isn't enough: Spark's worker daemons move to one of their own. Orphans come to us
(PR_SET_CHILD_SUBREAPER) and are waited for, so no zombie stays where process 1 waits for nobody, as in many containers.
`ChildProcesses` holds the children of one run, from their start to their end, and the run's clock; `Watchdog` ends a
run that makes no progress.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from examples.demo import parent_death
from spark_jobs.errors import SparkJobError

_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h
KILL_WAIT_S: Final = 60.0  # a sync of the disk holds a process, dead or not, until it is done


class ProgramFailed(SparkJobError):
    """One of the demo's programs ended by itself and not well; `log` holds everything it said."""

    def __init__(self, program: str, code: int, log: Path) -> None:
        said = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "nothing")
        super().__init__(f"the {program} ended with exit code {code}; its last words: {last} (all of them: {log})")
        self.program, self.code, self.log = program, code, log


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """What /proc/<pid>/stat says of a process."""

    pid: int
    name: str
    state: str
    parent: int
    session: int

    @property
    def alive(self) -> bool:
        """False for a zombie: dead, and only waiting to be waited for."""
        return self.state not in "ZX"


def parse_stat(text: str) -> ChildProcess:
    """Read one /proc/<pid>/stat line: `pid (name) state ppid pgrp session ...`; the name may hold anything."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    state, parent, _group, session = tail.split()[:4]
    return ChildProcess(int(pid), name, state, int(parent), int(session))


def processes() -> Iterator[ChildProcess]:
    """Every process of the machine that this user may see; those that end meanwhile are left out."""
    if not Path("/proc/self/stat").exists():
        yield from _processes_by_ps()
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended between the listing and the reading
                yield parse_stat((entry / "stat").read_text())


def _processes_by_ps() -> Iterator[ChildProcess]:
    """The same where there is no /proc (macOS)."""
    command = ["ps", "-A", "-o", "pid=,ppid=,state=,comm="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - a fixed command
    for line in listing.splitlines():
        pid, parent, state, name = line.split(None, 3)
        with contextlib.suppress(OSError):
            yield ChildProcess(int(pid), Path(name).name, state[0], int(parent), os.getsid(int(pid)))


def adopt_orphans() -> None:
    """Make this process the one that its descendants' orphans come to, so that it can wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Wait for adopted orphans that are dead. For the end: a Child that nobody waited for would be taken for one."""
    for process in list(processes()):
        if not process.alive and process.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


class Child:
    """A program in a session of its own; `output` is its standard output, unbuffered bytes, not blocking."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", errors: Path) -> None:
        assert process.stdout is not None, "started with a pipe"
        self.name, self.errors = name, errors
        self.output: IO[bytes] = process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._process, self._unread = process, b""

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], *, directory: Path, errors: Path, environment: Mapping[str, str]
    ) -> Self:
        """Start `command` in `directory`; its standard error is appended to the file `errors`."""
        with errors.open("ab") as file:
            process = subprocess.Popen(  # noqa: S603 - our own programs, no shell
                [sys.executable, "-IS", parent_death.__file__, str(os.getpid()), *command],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(name, process, errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def members(self) -> list[ChildProcess]:
        """The program and everything it started, zombies included."""
        return [p for p in processes() if p.session == self.pid]

    def lines(self) -> Iterator[bytes]:
        """Whole lines written since the last call; never waits. A last line without an end is held back."""
        while data := self.output.read(1 << 16):
            self._unread += data
        *whole, self._unread = self._unread.split(b"\n")
        yield from whole

    def freeze(self) -> None:
        """SIGSTOP to every member: nothing moves until `thaw` or `kill`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to every member."""
        self._signal(signal.SIGCONT)

    def kill(self) -> list[ChildProcess]:
        """SIGKILL to every member, and wait until each is gone and waited for; returns those that were alive."""
        killed: dict[int, ChildProcess] = {}
        deadline = time.monotonic() + KILL_WAIT_S
        while members := self.members():
            for member in members:
                if member.alive:
                    killed[member.pid] = member
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member.pid, signal.SIGKILL)
            self._reap(members)
            if time.monotonic() > deadline:
                names = ", ".join(f"{p.name} {p.pid}" for p in members)
                raise TimeoutError(f"{names}: alive {KILL_WAIT_S:.0f} s after SIGKILL")
            time.sleep(0.005)  # until the kernel has torn their memory down
        self._process.wait()
        return list(killed.values())

    def stop(self, wait_s: float) -> None:
        """SIGTERM and `wait_s` seconds to leave by itself; then everything that is left is killed."""
        if self.exit_code() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        self.kill()

    def close(self) -> None:
        """Kill what is left and close the pipe."""
        self.kill()
        self.output.close()

    def _signal(self, number: signal.Signals) -> None:
        for member in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def _reap(self, members: Sequence[ChildProcess]) -> None:
        """Wait for the dead: the program by its handle, adopted orphans by pid; others have parents of their own."""
        for member in members:
            if member.pid == self.pid:
                self._process.poll()
            elif not member.alive and member.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(member.pid, os.WNOHANG)


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
    """Called again and again with how far a run is; `root`: where its programs' output is."""

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
