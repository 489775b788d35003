"""Whose turn is it to sync a log? One thread's at a time: it also is who may close or swap the log's descriptors.

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

A Condition's own `with` can be interrupted with its lock held; a plain lock's can't.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

_LOOK_AGAIN_S = 1.0  # in case that who had the turn was interrupted before it could tell


class SyncTurn:
    """One log's. Thread-safe; a thread that has the turn must not take it again.

    owner: the thread that has the turn, None if nobody has; set to None to give it back, see above.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)

    def take(self, settled: Callable[[int], bool], wanted: int) -> bool:
        """Wait until the turn is free and take it. False, without it, as soon as `settled(wanted)`.

        Raises what `settled` raises. It is asked again whenever somebody gave the turn back.
        """
        with self._lock:
            while not settled(wanted):
                if self.owner is None:
                    self.owner = get_ident()
                    return True
                self._given_back.wait(_LOOK_AGAIN_S)
        return False

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
            self._given_back.notify_all()

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
