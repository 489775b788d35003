"""Group commit: one thread at a time syncs a log, for all threads that wait; only it may close or swap descriptors.

    A  take ─ fdatasync ─ give back ─┐
    B  take: waits ──────────────────┤ A's sync has brought B's records to disk, too: B goes without a turn
    C  take: waits ──────────────────┘ C's came behind it: C takes the turn, for all who came meanwhile

Whoever is interrupted (Ctrl-C) must not keep the turn. So it is taken inside of the `try` that gives it back, and it is
given back by an assignment: Python looks for signals where a function begins, a call could end before it did anything.

    try:
        if turn.take(settled, wanted):
            ...
    finally:
        if turn.owner == get_ident():
            turn.owner = None
            turn.tell()

Each who waits sleeps on a lock of its own. Who gives the turn back wakes those that may go, each once, and one of the
others for the next turn: nobody wakes only to sleep again. They wake one another in a few rows; all at once they would
queue for the interpreter's lock. A Condition's own `with` can be interrupted with its lock held; a plain lock's can't.

The thread that has the turn also writes the appends that other threads left to it (`HandedOver`):

    A  hands over, takes the turn ─ writes A ─ syncs ─┐
    B  hands over, sleeps ────────────────────────────┤ C  takes the turn ─ writes B, C, D ─ syncs ─┐ all go
    C  hands over, sleeps ────────────────────────────┤                                             │
    D  hands over, sleeps ────────────────────────────┘─────────────────────────────────────────────┘

A caller that wrote by itself would take the log's lock and the interpreter's for each record, against all others.

Only for threads that Ctrl-C can't reach: interrupted between two of its steps, a thread would leave what others gave it
neither written nor refused. Python interrupts none but the main thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Any, TypeVar

from pushrep.errors import PushrepError
from pushrep.log.config import AppendResult
from pushrep.records import RecordBatch

_LOOK_AGAIN_S = 1.0  # in case that who had the turn, or who was to wake the next, was interrupted before it could
_ROWS = 4  # one would stand still wherever the system is slow to give one of them a processor

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
        except PushrepError:  # it asks again itself, and raises that
            return True


class SyncTurn:
    """One log's. Thread-safe; a thread that has the turn must not take it again.

    owner: the thread that has the turn, None if nobody has; set to None to give it back, see above.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[_Waiter, None] = {}

    def take(self, settled: Callable[[_Wanted], bool], wanted: _Wanted) -> bool:
        """Wait until the turn is free and take it. False, without it, as soon as `settled(wanted)`.

        Raises what `settled` raises. It is asked again when somebody gave the turn back.
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
                    with self._lock:  # somebody may have put it into a row meanwhile
                        self._waiting.pop(waiter, None)
                if waiter.next is not None:
                    waiter.next.lock.release()

    def take_now(self) -> bool:
        """Take the turn if nobody has it."""
        with self._lock:
            if self.owner is None:
                self.owner = get_ident()
                return True
        return False

    def tell(self) -> None:
        """Who waits looks again: the turn was given back, or what it waits for has come to an end."""
        with self._lock:
            row = [waiter for waiter in self._waiting if waiter.may_go()]
            for waiter in row:
                del self._waiting[waiter]
            if self.owner is None and self._waiting:  # else its owner tells, when it gives it back
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                row.insert(0, longest)
            for waiter, following in zip(row, row[_ROWS:], strict=False):
                waiter.next = following
        for waiter in row[:_ROWS]:
            waiter.lock.release()

    def do_unless_taken(self, do: Callable[[], None]) -> bool:
        """`do` while nobody has the turn nor can take it; False if somebody has it, and nothing was done."""
        with self._lock:
            if self.owner is not None:
                return False
            do()
            return True

    @contextmanager
    def own(self) -> Iterator[None]:
        """Have the turn meanwhile."""
        try:
            self.take(_never, 0)
            yield
        finally:
            if self.owner == get_ident():
                self.owner = None
                self.tell()


def _never(_: int) -> bool:
    return False


class HandedOver:
    """One caller's batches, and where they went or why they did not; neither is known at first."""

    __slots__ = ("batches", "error", "result")

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self.batches = batches
        self.result: AppendResult | None = None
        self.error: BaseException | None = None

    def written(self) -> None:
        """They stand where they were stamped to."""
        self.result = AppendResult(self.batches[0].header.base_offset, self.batches[-1].header.next_offset - 1)

    def answer(self) -> AppendResult:
        """Where they went. Raises why they did not."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise AssertionError("asked before anybody wrote")
        return self.result


def may_be_interrupted() -> bool:
    """Whether this thread is the one that gets Ctrl-C."""
    return get_ident() == main_thread().ident


def write_each(handed: Sequence[HandedOver], write: Callable[[Sequence[RecordBatch]], None]) -> None:
    """Write what was handed over in one go; if that fails, one by one, so that each gets its own answer.

    `write` writes all it is given or nothing. Raises nothing: what it raised is the answer.
    """
    try:
        write([batch for one in handed for batch in one.batches])
    except BaseException as error:  # noqa: BLE001 - who handed over would wait for ever, whatever it was
        for one in handed:
            if len(handed) > 1:
                write_each([one], write)
            else:
                one.error = error
    else:
        for one in handed:
            one.written()
