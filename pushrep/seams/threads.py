"""Threads come through the door: what runs beside its caller, and what it waits with.

Locks do not: they are held for a few operations and never over a wait, so who runs one thread after another (a
simulation) never meets a locked one.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


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
    """Makes what runs and waits."""

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
