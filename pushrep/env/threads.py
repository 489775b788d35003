"""Time and threads as parameters: two clocks that must never be mixed, threads, events and conditions.

Locks are not parameters: they are held for a few operations and never during a wait, so a simulation, which runs one
thread at a time until it waits, never meets a locked one.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Clock(Protocol):
    """Wall time for display and records; monotonic time for every duration and deadline."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump back."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some moment of this process's own; never goes back."""
        ...

    def boot_ms(self) -> int:
        """Milliseconds since the machine started, its sleep included; never set, as the wall clock is."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """CLOCK_MONOTONIC in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def boot_ms(self) -> int:
        """CLOCK_BOOTTIME in milliseconds."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


SYSTEM_CLOCK = SystemClock()


_T = TypeVar("_T")


class Thread(Protocol):
    """As threading.Thread, daemonic: it does not keep the process alive."""

    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Event(Protocol):
    """As threading.Event."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, at the latest after `timeout` seconds."""
        ...


class Condition(Protocol):
    """As threading.Condition, with a lock of its own."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def notify_all(self) -> None: ...
    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """The predicate's last answer."""
        ...


class Threads(Protocol):
    """Makes threads, events and conditions."""

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """Not started yet."""
        ...

    def event(self) -> Event: ...
    def condition(self) -> Condition: ...


class SystemThreads:
    """The operating system's."""

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def event(self) -> Event:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()


SYSTEM_THREADS: Threads = SystemThreads()


class SharedByProcess(Generic[_T]):
    """One object for many users in this process, by key: made for the first, ended after the last. Thread-safe.

    A fork starts with none: threads stay with the parent.
    """

    def __init__(self, end: Callable[[_T], object]) -> None:
        self._end = end
        self.forget()

    def forget(self) -> None:
        """In a forked child: forget all objects, and make a new lock, because the old one may be held."""
        self._lock = threading.Lock()
        self._users: dict[Hashable, int] = {}
        self._held: dict[Hashable, tuple[_T, Any]] = {}

    def acquire(self, key: Hashable, make: Callable[[], _T], *, keep: object = None) -> _T:
        """The object of `key`, made if need be. Each call needs a `release`. keep: an object that must live as long."""
        with self._lock:
            if key not in self._held:
                self._held[key] = (make(), keep)
                self._users[key] = 0
            self._users[key] += 1
            return self._held[key][0]

    def release(self, one: _T) -> bool:
        """Release it; the last user's call ends it. False, without effect, for an object that is not shared here."""
        with self._lock:
            keys = [key for key, (held, _) in self._held.items() if held is one]
            if not keys:
                return False
            key = keys[0]
            self._users[key] -= 1
            if self._users[key]:
                return True
            del self._held[key], self._users[key]
        self._end(one)
        return True


def shared_by_process(end: Callable[[_T], object]) -> SharedByProcess[_T]:
    """An empty SharedByProcess, which a fork of this process empties again."""
    shared = SharedByProcess(end)
    os.register_at_fork(after_in_child=shared.forget)
    return shared


class Disownable(Protocol):
    """Something that a fork of its owner must not use."""

    def disown(self) -> None:
        """From now on, every use raises `ForkedProcess`."""
        ...


_OPEN: "weakref.WeakSet[Disownable]" = weakref.WeakSet()


def refuse_in_forks(owned: Disownable) -> None:
    """In every later fork of this process, `owned.disown()` is called before anything else runs there."""
    _OPEN.add(owned)


def _after_fork_in_child() -> None:
    for owned in list(_OPEN):
        owned.disown()


os.register_at_fork(after_in_child=_after_fork_in_child)
