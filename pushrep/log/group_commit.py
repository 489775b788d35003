"""Group commit: one thread at a time, the leader, syncs a log for all threads that wait for it.

    A  acquire ─ fdatasync ─ release ─┐
    B  acquire: waits ────────────────┤ A's sync has brought B's records to disk, too: B returns without leading
    C  acquire: waits ────────────────┘ C's came behind it: C leads, for all that came meanwhile

While the log is open, only the leader closes descriptors that a sync may use. A thread that is interrupted (Ctrl-C)
must not stay the leader. So it acquires inside of the `try` that releases, and releases by an assignment: Python
handles signals where a function begins, so a call might end before it did anything.

    try:
        if leader.acquire(settled, wanted):
            ...
    finally:
        if leader.owner == get_ident():
            leader.owner = None
            leader.notify()

Each waiting thread sleeps on a lock of its own. The thread that releases wakes the threads whose records are on disk,
each once, and one of the others to lead: no thread wakes only to sleep again. The woken threads wake one another in a
few rows; all at once they would queue for the interpreter's lock. A `with` of a Condition can be interrupted with its
lock held; that of a plain lock can't.

The leader also writes the batches that other threads queued (`CommitRequest`):

    A  queues, leads ─ writes A ─ syncs ─┐
    B  queues, sleeps ───────────────────┤ C  leads ─ writes B, C, D ─ syncs ─┐ all return
    C  queues, sleeps ───────────────────┤                                    │
    D  queues, sleeps ───────────────────┘────────────────────────────────────┘

If each caller wrote its own batches, it would compete with all others for the log's and the interpreter's lock.

Only threads that Ctrl-C can't interrupt may write for others: an interrupted one would leave their requests neither
written nor refused. Python interrupts the main thread alone.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Any, TypeVar

from pushrep.errors import PushrepError
from pushrep.log.config import AppendResult
from pushrep.records import RecordBatch

_LOOK_AGAIN_S = 1.0  # in case the leader, or the thread that should wake the next one, was interrupted
_ROWS = 4  # in one row, all would wait for a thread that gets no processor

_Wanted = TypeVar("_Wanted")


class _Waiter:
    """A thread that sleeps until another releases its lock, and then wakes the next one of its row."""

    __slots__ = ("_settled", "_wanted", "lock", "next")

    def __init__(self, settled: Callable[[Any], bool], wanted: object) -> None:
        self._settled, self._wanted = settled, wanted
        self.next: _Waiter | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def may_go(self) -> bool:
        try:
            return self._settled(self._wanted)
        except PushrepError:  # the waiting thread calls `settled` itself, and raises the error
            return True


class GroupCommitLeader:
    """Which thread leads the group commit of one log. Thread-safe; not reentrant.

    owner: the leader's thread, None if there is none; set to None to release, see above.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[_Waiter, None] = {}

    def acquire(self, settled: Callable[[_Wanted], bool], wanted: _Wanted) -> bool:
        """Wait until nobody leads, then lead. False, without leading, once `settled(wanted)` is true.

        Raises its errors. `settled` is called again whenever a leader has released.
        """
        while True:
            with self._lock:
                if settled(wanted):
                    return False
                if self.owner is None:
                    self.owner = get_ident()
                    return True
                waiter = _Waiter(settled, wanted)
                self._waiting[waiter] = None
            woken = False
            try:
                woken = waiter.lock.acquire(timeout=_LOOK_AGAIN_S)
            finally:
                if not woken:
                    with self._lock:  # another thread may have put it into a row meanwhile
                        self._waiting.pop(waiter, None)
                if waiter.next is not None:
                    waiter.next.lock.release()

    def try_acquire(self) -> bool:
        """Lead if nobody does."""
        with self._lock:
            if self.owner is None:
                self.owner = get_ident()
                return True
        return False

    def notify(self) -> None:
        """Wake the threads that need not wait any more, and one to lead. Called after a release, and when the log is
        closed.
        """
        with self._lock:
            row = [waiter for waiter in self._waiting if waiter.may_go()]
            for waiter in row:
                del self._waiting[waiter]
            if self.owner is None and self._waiting:  # else the leader notifies when it releases
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                row.insert(0, longest)
            for waiter, following in zip(row, row[_ROWS:], strict=False):
                waiter.next = following
        for waiter in row[:_ROWS]:
            waiter.lock.release()

    def do_unless_held(self, do: Callable[[], None]) -> bool:
        """Call `do` while no thread leads or can begin to. False, without a call, if one leads."""
        with self._lock:
            if self.owner is not None:
                return False
            do()
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which this thread leads."""
        try:
            self.acquire(lambda _wanted: False, 0)
            yield
        finally:
            if self.owner == get_ident():
                self.owner = None
                self.notify()


class CommitRequest:
    """One caller's batches, then the result of their append, or its error."""

    __slots__ = ("batches", "error", "result")

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self.batches = batches
        self.result: AppendResult | None = None
        self.error: BaseException | None = None

    def written(self) -> None:
        """The batches were written, at their stamped offsets."""
        self.result = AppendResult(self.batches[0].header.base_offset, self.batches[-1].header.next_offset - 1)

    def answer(self) -> AppendResult:
        """The offsets of the append; raises its error if it failed."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise AssertionError("asked before anybody wrote")
        return self.result


def may_be_interrupted() -> bool:
    """Whether this thread is the one that gets Ctrl-C."""
    return get_ident() == main_thread().ident


def write_each(requests: Sequence[CommitRequest], write: Callable[[Sequence[RecordBatch]], None]) -> None:
    """Write the requests at once or, if that fails, one by one, so that each has its own result.

    `write` writes all or nothing. Its errors are the requests' results; none is raised.
    """
    try:
        write([batch for one in requests for batch in one.batches])
    except BaseException as error:  # noqa: BLE001 - its caller would wait for ever, whatever it was
        for one in requests:
            if len(requests) > 1:
                write_each([one], write)
            else:
                one.error = error
    else:
        for one in requests:
            one.written()
