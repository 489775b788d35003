"""What both sides of a store stand on: its journal and checkpoints, looking without a lock, changes, its life.

A change is one transaction. Where others can't be kept out meanwhile (a topic), it ends as Overtaken instead, nothing
of it is written, and it is done again from its beginning: so a change decides anew each time, and keeps nothing.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from pushrep.env import Clock
from pushrep.startpoints.changing import Change, EventLogFollower, FactLog
from pushrep.startpoints.checkpoints import Checkpoint
from pushrep.startpoints.errors import Overtaken, StoreBusy, StoreClosed
from pushrep.startpoints.event_log import EventLog, ReaderState
from pushrep.startpoints.events import Fact
from pushrep.startpoints.model import Reader

_PAUSE_MAX_S = 0.5

_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")


class CheckpointKeeper(Protocol):
    """Where checkpoints lie. Whoever saves one is alone with the store."""

    def load(self, reader: Reader) -> Checkpoint:
        """What stands there now; an empty one (generation 0) if there is none. Raises CorruptStore."""
        ...

    def save(self, checkpoint: Checkpoint) -> None:
        """It is stored when this returns. Raises NotWritten."""
        ...

    def all(self) -> list[Checkpoint]:
        """Every reader's, sorted."""
        ...


class BaseStore:
    """The middle of a StartpointStore."""

    def __init__(self, facts: FactLog, checkpoints: CheckpointKeeper, clock: Clock) -> None:
        """Use `StartpointStore.open`, or `pushrep.kafka.startpoints.open_store` for a topic."""
        self.place = facts.place
        self._clock = clock
        self._journal, self._checkpoints = facts, checkpoints
        # One is looked at beside changes, by any thread; the other by whoever holds the store's lock.
        self._reads, self._reads_lock = EventLogFollower(facts), threading.Lock()
        self._changes = EventLogFollower(facts)
        self._closed = False

    def event_log(self) -> EventLog:
        """All that was ever written and what became of it, as of now; takes no lock. What is due may not be marked."""
        self._check()
        return EventLogFollower(self._journal).current()

    def reader_state(self, sequence: int, reader: Reader) -> ReaderState | None:
        """How startpoint `sequence` stands for this reader; None if there is none for it. Takes no lock."""
        self._check()
        with self._reads_lock:
            return self._reads.current().reader_state(sequence, reader)

    def history(self) -> list[Fact]:
        """Every fact in order; takes no lock."""
        self._check()
        return self._all_facts()

    def checkpoints(self) -> list[Checkpoint]:
        """Every reader's, sorted; takes no lock."""
        self._check()
        return self._checkpoints.all()

    def checkpoint(self, reader: Reader) -> Checkpoint:
        """How far this reader is; takes no lock."""
        self._check()
        return self._checkpoints.load(reader)

    def size_bytes(self) -> int:
        """A number that changes with every change of a startpoint: how a running reader sees that it shall look."""
        self._check()
        return self._journal.size_bytes()

    def within(self, timeout_s: float) -> AbstractContextManager[None]:
        """What this thread asks of the store inside takes so long altogether, or raises as if nobody answered."""
        return self._journal.budget.within(timeout_s)

    # ---- inside

    def _all_facts(self) -> list[Fact]:
        view = self._journal.view()
        return view.facts[: view.length]

    @contextmanager
    def _transaction(self) -> Iterator["Change"]:
        self._check()
        with self._journal.transaction() as transaction:
            yield Change(transaction, self._changes, self._clock.wall_ms())

    def _check(self) -> None:
        if self._closed:
            raise StoreClosed(self.place)

    # ---- life

    def close(self) -> None:
        """Let go; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.place)!r})"


def changes(
    method: Callable[Concatenate["_Store", _Parameters], _Answer],
) -> Callable[Concatenate["_Store", _Parameters], _Answer]:
    """A method that changes the store: anew from its beginning when others came in between. Raises StoreBusy."""

    @functools.wraps(method)
    def changing(self: "_Store", /, *args: _Parameters.args, **more: _Parameters.kwargs) -> _Answer:
        wait_s = self._journal.budget.left_s(self._journal.lock_wait_s)
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(Overtaken),
                wait=wait_random_exponential(multiplier=0.02, max=_PAUSE_MAX_S),
                stop=stop_after_delay(wait_s),
                reraise=True,
            ):
                with attempt:
                    return method(self, *args, **more)
        except Overtaken as error:
            raise StoreBusy(self.place, None, wait_s) from error
        raise AssertionError("unreachable: tenacity returns or raises")

    return changing


_Store = TypeVar("_Store", bound=BaseStore)
