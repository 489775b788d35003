"""The processes of this machine, for tests that must leave none behind; and programs that are forked instead of
started.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path


def mentioning(path):
    """Processes whose command line names this path."""
    needle, found = str(path).encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


_COMMANDS = "pushrep.cli.main"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *(_COMMANDS, "pushrep.cli.replica", "pushrep.cli.outbox", "pushrep.startpoints"),
        *("pushrep.replicate.replica_node", "pushrep.outbox.standby", "pushrep.cli.tables"),
    ]
)


PUSHREP = Path(__file__).parent / "house" / "programs" / "pushrep"
"""The command, forked of a Python that has imported it, for `subprocess.run`: a signal would meet who waits for it.
test_worker_forks.py holds it equal to the installed one."""


class PythonProgram:
    """Like `subprocess.Popen` of a Python, but forked from a process that has imported pushrep: this saves half a
    second of CPU.

    arguments: those of Python, "-c" and a program, "-m" and a module, or a path. Standard output is a pipe; standard
    input with `has_input`; standard error with `has_errors`, else it is discarded. environment: added to that of this
    process. A test ends it by its `pid` like any other process.
    """

    def __init__(self, *arguments, has_input=False, has_errors=False, **environment):
        reading, writing = _FORKS.Pipe(duplex=False)
        given, giving = _FORKS.Pipe(duplex=False) if has_input else (None, None)
        hearing, saying = _FORKS.Pipe(duplex=False) if has_errors else (None, None)
        program = (tuple(map(str, arguments)), environment)
        self._process = _FORKS.Process(target=_run_program, args=(*program, given, writing, saying), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        self.stdin = os.fdopen(os.dup(giving.fileno()), "w") if has_input else None
        self.stderr = os.fdopen(os.dup(hearing.fileno())) if has_errors else None
        for end in (reading, writing, given, giving, hearing, saying):
            if end is not None:
                end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout_s=None):
        """Raises TimeoutError."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout_s} s")
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run_program(arguments, environment, given, writing, saying):
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY) if given is None else given.fileno(), 0)
    os.dup2(writing.fileno(), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if saying is None else saying.fileno(), 2)
    for end in (given, writing, saying):
        if end is not None:
            end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    kind, *more = arguments
    if kind == "-c":
        sys.argv = ["-c", *more[1:]]
        exec(compile(more[0], "<program>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = more
        if more[0] == _COMMANDS:  # as the console script does
            sys.modules[_COMMANDS].main()
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *more]
        runpy.run_path(kind, run_name="__main__")
