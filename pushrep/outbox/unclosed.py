"""Outboxes that nobody closed: what they still hold is written when the program ends, or when they are collected.

    interpreter exits      atexit, in the main thread     each is closed within its close_timeout_s    WARNING, or ERROR
    multiprocessing        a finalizer of that module: its children end by os._exit, without atexit       as above
    garbage collected      a thread of its own            the same; its lock is free then              ResourceWarning

The collector may run in any thread at any allocation, in one that holds a lock of the outbox, too: so nothing is waited
for there. A process that is killed, or itself calls os._exit, gets nothing of this.
"""

import _thread
import atexit
import logging
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Protocol

_LOG = logging.getLogger("pushrep.outbox")
_HINT = "close it, or use it as a context manager"


class Closable(Protocol):
    """What is needed of an Outbox."""

    @property
    def directory(self) -> Path: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def owner_pid(self) -> int: ...
    def pending_records(self) -> int: ...
    def close(self) -> None: ...


_OPEN: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_BEING_CLOSED: "dict[threading.Event, float]" = {}  # by collected ones' threads: done, the seconds that it may take
_child = 0  # the process of multiprocessing that ends by our finalizer


def close_if_forgotten(outbox: Closable) -> None:
    """See the file's map. Called when it is open."""
    _OPEN.add(outbox)
    _close_at_the_end_of_a_child()


def _close_at_the_end_of_a_child() -> None:
    global _child  # noqa: PLW0603 - once a process
    util, process = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "process"))
    if util is None or process is None or process.parent_process() is None or _child == os.getpid():
        return
    _child = os.getpid()
    util.Finalize(None, _close_at_exit, exitpriority=0)


def collected(outbox: Closable, close_timeout_s: float) -> None:
    """It is being garbage-collected open. Raises nothing but a ResourceWarning that is an error."""
    _OPEN.discard(outbox)
    done = threading.Event()
    _BEING_CLOSED[done] = close_timeout_s
    try:
        _thread.start_new_thread(_close_in_thread, (outbox, done))  # threading's own start waits, and takes locks
    except RuntimeError:  # the interpreter is ending
        del _BEING_CLOSED[done]
        return
    warnings.warn(f"the outbox in {outbox.directory} was not closed: {_HINT}", ResourceWarning, 2, source=outbox)


def _close_in_thread(outbox: Closable, done: threading.Event) -> None:
    try:
        outbox.close()
    except Exception:  # noqa: BLE001 - there is no caller to raise it to
        _LOG.exception("the outbox in %s was not closed, and what it held", outbox.directory)
    finally:
        done.set()
        del _BEING_CLOSED[done]


def _close_at_exit() -> None:
    for outbox in list(_OPEN):
        if outbox.is_closed or outbox.owner_pid != os.getpid():
            continue
        records = outbox.pending_records()
        try:
            outbox.close()
        except Exception as error:  # noqa: BLE001 - the other outboxes are to be closed, too
            _LOG.error(
                "the outbox in %s was still open when the program ended, and %d records waited: %s; %s",
                outbox.directory,
                records,
                error,
                _HINT,
            )
        else:
            _LOG.warning(
                "the outbox in %s was still open when the program ended: closed now, with %d records that waited; %s",
                outbox.directory,
                records,
                _HINT,
            )
    for done, limit_s in list(_BEING_CLOSED.items()):
        done.wait(limit_s + 1)


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_BEING_CLOSED.clear)  # these threads stayed in the parent
