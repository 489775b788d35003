"""Group commit: one thread at a time, the leader, syncs a log for all threads that wait for it.

    A  acquire ─ fdatasync ─ release ─┐
    B  acquire: waits ────────────────┤ A's sync has brought B's records to disk, too: B returns without leading
    C  acquire: waits ────────────────┘ C's came behind it: C leads, for all that came meanwhile

Only the leader may close or swap the log's descriptors. A thread that is interrupted (Ctrl-C) must not stay the leader.
So it acquires inside of the `try` that releases, and it releases by an assignment: Python looks for signals where a
function begins, a call could end before it did anything.

    try:
        if leader.acquire(settled, wanted):
            ...
    finally:
        if leader.owner == get_ident():
            leader.owner = None
            leader.notify()

Each waiting thread sleeps on a lock of its own. The thread that releases wakes those that need no leader any more, each
once, and one of the others to lead: no thread wakes only to sleep again. They wake one another in a few rows; all at
once they would queue for the interpreter's lock. A Condition's own `with` can be interrupted with its lock held; a
plain lock's can't.

The leader also writes the batches that other threads queued (`CommitRequest`):

    A  queues, leads ─ writes A ─ syncs ─┐
    B  queues, sleeps ───────────────────┤ C  leads ─ writes B, C, D ─ syncs ─┐ all return
    C  queues, sleeps ───────────────────┤                                    │
    D  queues, sleeps ───────────────────┘────────────────────────────────────┘

A caller that wrote by itself would take the log's lock and the interpreter's for each record, against all others.

Only threads that Ctrl-C can't reach may lead so: a thread that is interrupted between two of its steps would leave the
requests of others neither written nor refused. Python interrupts none but the main thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Any, TypeVar

from pushrep.errors import PushrepError
from pushrep.log.config import AppendResult
from pushrep.records import RecordBatch

_LOOK_AGAIN_S = 1.0  # in case the leader, or the thread that had to wake the next one, was interrupted first
_ROWS = 4  # with one row, all behind a thread that gets no processor would wait for it

_Wanted = TypeVar("_Wanted")


class _Waiter:
    """A thread that sleeps until somebody releases its lock, and then wakes the next of its row."""

    __slots__ = ("_settled", "_wanted", "lock", "next")

    def __init__(self, settled: Callable[[Any], bool], wanted: object) -> None:
        self._settled, self._wanted = settled, wanted
        self.next: _Waiter | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def may_go(self) -> bool:
        try:
            return self._settled(self._wanted)
        except PushrepError:  # the waiting thread asks again itself, and raises it
            return True


class GroupCommitLeader:
    """Which thread leads, of one log. Thread-safe; the leader must not acquire again.

    owner: the leader's thread, None if there is none; set to None to release, see above.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[_Waiter, None] = {}

    def acquire(self, settled: Callable[[_Wanted], bool], wanted: _Wanted) -> bool:
        """Wait until nobody leads, then lead. False, without leading, as soon as `settled(wanted)`.

        Raises what `settled` raises. It is asked again whenever a leader has released.
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
        """Wake the threads that need not wait any more, and one to lead: after a release, or when the log has ended."""
        with self._lock:
            row = [waiter for waiter in self._waiting if waiter.may_go()]
            for waiter in row:
                del self._waiting[waiter]
            if self.owner is None and self._waiting:  # else the leader notifies, when it releases
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                row.insert(0, longest)
            for waiter, following in zip(row, row[_ROWS:], strict=False):
                waiter.next = following
        for waiter in row[:_ROWS]:
            waiter.lock.release()

    def do_unless_held(self, do: Callable[[], None]) -> bool:
        """Call `do` while no thread leads or can begin to lead. False, without a call, if one leads."""
        with self._lock:
            if self.owner is not None:
                return False
            do()
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lead meanwhile."""
        try:
            self.acquire(_never, 0)
            yield
        finally:
            if self.owner == get_ident():
                self.owner = None
                self.notify()


def _never(_: int) -> bool:
    return False


class CommitRequest:
    """One caller's batches, then the result of their append, or its error."""

    __slots__ = ("batches", "error", "result")

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self.batches = batches
        self.result: AppendResult | None = None
        self.error: BaseException | None = None

    def written(self) -> None:
        """They were written at the offsets that are stamped into them."""
        self.result = AppendResult(self.batches[0].header.base_offset, self.batches[-1].header.next_offset - 1)

    def answer(self) -> AppendResult:
        """Where they were appended. Raises the error if they were not."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise AssertionError("asked before anybody wrote")
        return self.result


def may_be_interrupted() -> bool:
    """Whether this thread is the one that gets Ctrl-C."""
    return get_ident() == main_thread().ident


def write_each(requests: Sequence[CommitRequest], write: Callable[[Sequence[RecordBatch]], None]) -> None:
    """Write the requests in one go; if that fails, one by one, so that each gets its own answer.

    `write` writes all it is given or nothing. Raises nothing: what it raised is the answer.
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
