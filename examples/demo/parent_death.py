"""Run a program that can't outlive its parent: `python -IS parent_death.py PARENT PROGRAM ...`.

The kernel is asked to kill this process when its parent dies (Linux, prctl PR_SET_PDEATHSIG), then the program takes
its place. A program of its own and not a `preexec_fn`: nothing runs between fork and exec in a parent that has threads.
The JVM that a driver starts needs none of it: it ends when its standard input, the driver, is gone. Run as a file, it
imports nothing of ours: that would cost as much as the program's own start.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def main(arguments: Sequence[str]) -> None:
    """Ask the kernel, and become the program; returns only if it can't be run."""
    parent, program = int(arguments[0]), list(arguments[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 - the demo's own programs, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
