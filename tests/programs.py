"""What runs on this machine, for tests that must leave nothing behind; and programs that are forked, not started."""

import multiprocessing
import os
import runpy
import signal
import sys
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


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["pushrep.cli.main", "pushrep.cli.replica", "pushrep.replicate.replica_node", "pushrep.outbox.standby"]
)


class PythonProgram:
    """A Python like one of `subprocess.Popen`, forked of one that has imported pushrep: half a second of CPU time less.

    arguments: as Python's own, "-c" and a program, "-m" and a module, or a path. Standard output is a pipe, so is
    standard input if `has_input`; errors are nobody's. It is ended by its `pid` like any other process.
    """

    def __init__(self, *arguments, has_input=False):
        reading, writing = _FORKS.Pipe(duplex=False)
        given, giving = _FORKS.Pipe(duplex=False) if has_input else (None, None)
        self._process = _FORKS.Process(target=_run_program, args=(arguments, given, writing), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        self.stdin = os.fdopen(os.dup(giving.fileno()), "w") if has_input else None
        for end in (reading, writing, given, giving):
            if end is not None:
                end.close()

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
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run_program(arguments, given, writing):
    os.dup2(os.open(os.devnull, os.O_RDONLY) if given is None else given.fileno(), 0)
    os.dup2(writing.fileno(), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for end in (given, writing):
        if end is not None:
            end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    kind, *more = arguments
    if kind == "-c":
        sys.argv = ["-c", *more[1:]]
        exec(compile(more[0], "<program>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = more
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *more]
        runpy.run_path(kind, run_name="__main__")
