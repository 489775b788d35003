"""Forks of the tests' own process that never go on as a second test run."""

import os
import traceback
from collections.abc import Callable

FAILED = 99


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a fork, which ends with 0, or with FAILED after it printed what `work` raised. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it ends here
        traceback.print_exc()
    finally:
        os._exit(code)


def code_in_fork(work: Callable[[], object]) -> int:
    """The code with which `work` ends in a fork; of one that a signal ended, the signal's number below zero."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])
