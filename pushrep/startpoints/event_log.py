"""All facts of a store in order: which startpoint is pending for which reader, and how a change appends facts.

    pending for a reader = the newest startpoint for it, if it is above its floor and not consumed, expired or cancelled
    floor                = the highest sequence that it committed or consumed

An older one is superseded for good, also once the newer one is cancelled or expires: it may be the typing error that
the newer one corrected. So a task whose copy of a fan-out was cancelled does not get the original.

A failed one counts as pending, too: it stops the start. Late facts (without a next state in the table of `model`)
change nothing, so the first `applied` in order wins. State is kept per reader for every target: a reader that applies a
topic-wide startpoint leaves it pending for the others.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.errors import CorruptFile
from pushrep.startpoints.model import (
    NEXT,
    OVER,
    Applied,
    Cancelled,
    Consumed,
    Expired,
    Fact,
    Failed,
    Reader,
    StartpointEvent,
    State,
    Written,
)


@dataclass(frozen=True, slots=True)
class ReaderState:
    """A startpoint's state for one reader; `applied` and `failure` once there are such facts."""

    written: Written
    state: State
    applied: Applied | None = None
    failure: str | None = None

    @property
    def sequence(self) -> int:
        return self.written.sequence


@dataclass(slots=True)
class _Entry:
    """One startpoint: its state for each reader that acted on it, and for all others."""

    written: Written
    rest: State = State.PENDING
    readers: dict[Reader, ReaderState] = field(default_factory=dict)

    def reader_state(self, reader: Reader) -> ReaderState:
        return self.readers.get(reader) or ReaderState(self.written, self.rest)

    def only_reader(self) -> Reader | None:
        """The one that the startpoint is for, if its target names just one."""
        target = self.written.target
        if target.consumer is None or target.partition is None:
            return None
        return Reader(target.consumer, target.topic, target.partition, target.task or "")

    def for_reader(self, reader: Reader, event: StartpointEvent, fact: Applied | Consumed | Failed) -> State | None:
        now = self.reader_state(reader)
        state = NEXT[now.state][event]
        if state is not None:
            applied = fact if isinstance(fact, Applied) else now.applied
            failure = fact.why if isinstance(fact, Failed) else now.failure
            self.readers[reader] = ReaderState(self.written, state, applied, failure)
        return state

    def for_all(self, event: StartpointEvent) -> None:
        self.rest = NEXT[self.rest][event] or self.rest
        for reader, now in self.readers.items():
            state = NEXT[now.state][event]
            if state is not None:
                self.readers[reader] = ReaderState(self.written, state, now.applied, now.failure)


class EventLog:
    """Facts in; the state of each startpoint for each reader out."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._entries: dict[int, _Entry] = {}
        self._consumed: dict[Reader, int] = {}
        for fact in facts:
            self.add(fact)

    @property
    def next_sequence(self) -> int:
        """The next startpoint's number; they count from 1, because 0 means "started from none"."""
        return next(reversed(self._entries), 0) + 1

    def add(self, fact: Fact) -> None:
        """Take the next fact. Raises ValueError for one that names no startpoint, or numbers one out of order."""
        if isinstance(fact, Written):
            if fact.sequence < self.next_sequence:
                raise ValueError(f"startpoint {fact.sequence} is numbered below {self.next_sequence}")
            self._entries[fact.sequence] = _Entry(fact)
            return
        entry = self._entries.get(fact.sequence)
        if entry is None:
            raise ValueError(f"it names startpoint {fact.sequence}, which was never written")
        match fact:
            case Applied():
                entry.for_reader(fact.reader, StartpointEvent.APPLY, fact)
            case Failed():
                entry.for_reader(fact.reader, StartpointEvent.FAIL, fact)
            case Consumed():
                if entry.for_reader(fact.reader, StartpointEvent.CONSUME, fact) is not None:
                    self._consumed[fact.reader] = max(fact.sequence, self._consumed.get(fact.reader, 0))
            case Expired():
                entry.for_all(StartpointEvent.EXPIRE)
            case Cancelled():
                entry.for_all(StartpointEvent.CANCEL)

    def pending(self, reader: Reader, committed: int = 0) -> ReaderState | None:
        """The startpoint from which the reader starts next, or that stops it. committed: its checkpoint's sequence."""
        floor = max(committed, self._consumed.get(reader, 0))
        for sequence in reversed(self._entries):  # they were added in order
            if sequence <= floor:
                return None
            entry = self._entries[sequence]
            if entry.written.target.covers(reader):
                reader_state = entry.reader_state(reader)
                return None if reader_state.state in OVER else reader_state
        return None

    def reader_state(self, sequence: int, reader: Reader) -> ReaderState | None:
        """The state of startpoint `sequence` for this reader; None if it has none of that number."""
        entry = self._entries.get(sequence)
        return entry.reader_state(reader) if entry is not None and entry.written.target.covers(reader) else None

    def written(self, sequence: int) -> Written | None:
        entry = self._entries.get(sequence)
        return entry.written if entry is not None else None

    def all_written(self) -> Iterator[Written]:
        """Every startpoint, in order."""
        for entry in self._entries.values():
            yield entry.written

    def readers(self, sequence: int) -> dict[Reader, ReaderState]:
        """Its state for each reader that applied, consumed or failed it."""
        return dict(sorted(self._entries[sequence].readers.items()))

    def state(self, sequence: int) -> State:
        """Its state for its only reader, or else for readers that have not acted on it."""
        entry = self._entries[sequence]
        only = entry.only_reader()
        return entry.reader_state(only).state if only in entry.readers else entry.rest

    def superseded_by(self, sequence: int) -> int | None:
        """The newest one that replaces it for all its readers, for good."""
        target = self._entries[sequence].written.target
        for newer in reversed(self._entries):
            if newer <= sequence:
                return None
            if self._entries[newer].written.target.covers(target):
                return newer
        return None

    def can(self, sequence: int, event: StartpointEvent) -> bool:
        """Whether this event, for all readers, would change a state."""
        entry = self._entries[sequence]
        states = [reader_state.state for reader_state in entry.readers.values()]
        # A startpoint for one reader alone is over when that reader is done with it.
        if entry.only_reader() not in entry.readers:
            states.append(entry.rest)
        return any(NEXT[state][event] is not None for state in states)

    def due(self, now_ms: int) -> list[int]:
        """Startpoints to be marked expired: overdue, and perhaps not applied by every reader."""
        return [
            sequence
            for sequence, entry in self._entries.items()
            if entry.written.is_due(now_ms) and self.can(sequence, StartpointEvent.EXPIRE)
        ]


class TimeBudget:
    """The time limit of a store's calls, per thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._own = threading.local()

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """All calls of this thread in the block take at most so long together."""
        before = self._until_s
        self._own.until_s = min(before, self._now_s() + timeout_s)
        try:
            yield
        finally:
            self._own.until_s = before

    def left_s(self, most_s: float) -> float:
        """How long a step that would take `most_s` may take now."""
        return max(0.0, min(most_s, self._until_s - self._now_s()))

    @property
    def _until_s(self) -> float:
        return float(getattr(self._own, "until_s", math.inf))


class View(NamedTuple):
    """Facts up to position `end`: the first `length` of `facts`, a list that later views extend."""

    facts: list[Fact]
    length: int
    end: int


class Adding(Protocol):
    """Appends facts, while nobody else may."""

    def next_sequence(self, at_least: int) -> int:
        """What a startpoint that the next `append` begins with is numbered; more of them count on."""
        ...

    def append(self, facts: Sequence[Fact]) -> None:
        """Store all of them before returning. Raises StoreUnavailable, Overtaken."""
        ...


class FactLog(Protocol):
    """Facts in order, in a file (`journal`) or a topic (pushrep.kafka.startpoints). Thread-safe."""

    lock_wait_s: float
    budget: TimeBudget

    @property
    def place(self) -> Path | str:
        """Its place, for messages."""
        ...

    def view(self) -> View:
        """All present facts. Raises StoreUnavailable, CorruptFile."""
        ...

    def size_bytes(self) -> int:
        """A number that changes with every change."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """Exclusive access to the checkpoints. Raises StoreUnavailable."""
        ...

    def transaction(self) -> AbstractContextManager[Adding]:
        """Exclusive access to facts and checkpoints. Raises StoreUnavailable, CorruptFile."""
        ...

    def close(self) -> None:
        """Close what is held open."""
        ...


class EventLogFollower:
    """The event log of a journal; each look adds only new facts. For one thread at a time."""

    def __init__(self, journal: FactLog) -> None:
        self._journal = journal
        self._facts: list[Fact] = []
        self._count, self._event_log = 0, EventLog()

    def current(self) -> EventLog:
        """The event log as of now. Raises CorruptFile."""
        view = self._journal.view()
        if view.facts is not self._facts:  # read from the start: the file does not begin with the known facts
            self._facts, self._count, self._event_log = view.facts, 0, EventLog()
        try:
            for fact in view.facts[self._count : view.length]:
                self._event_log.add(fact)
        except ValueError as error:
            self._facts = []
            raise CorruptFile(self._journal.place, f"{error}; restore it from a copy") from error
        self._count = view.length
        return self._event_log


class Change:
    """One transaction of the store; it begins by marking overdue startpoints as expired."""

    def __init__(self, transaction: Adding, follower: EventLogFollower, now_ms: int) -> None:
        self._transaction, self._follower = transaction, follower
        self.event_log = follower.current()
        self.swept = self.event_log.due(now_ms)
        self.append(*(Expired(sequence=sequence, at_ms=now_ms) for sequence in self.swept))

    @property
    def next_sequence(self) -> int:
        """Of a startpoint in the next `append`; more of them count on."""
        return self._transaction.next_sequence(self.event_log.next_sequence)

    def append(self, *facts: Fact) -> None:
        """Stored, all of them, when this returns. Raises StoreUnavailable."""
        if facts:
            self._transaction.append(facts)
            self.event_log = self._follower.current()
