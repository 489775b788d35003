"""The inside of a change: the facts so far, what one may add to them, who is asking, and for how long."""

import getpass
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.errors import BadArgument
from pushrep.startpoints.errors import CorruptStore
from pushrep.startpoints.event_log import EventLog, ReaderState
from pushrep.startpoints.events import Applied, Expired, Fact, Failed
from pushrep.startpoints.model import REASON_CHARACTERS_MAX, Kind, Reader
from pushrep.startpoints.resolve import LogFacts, Unresolved, resolve
from pushrep.startpoints.states import State


class TimeBudget:
    """The time of each thread by itself."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._own = threading.local()

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """What this thread asks inside takes so long altogether, or less."""
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
    """Facts up to place `end`: the first `length` of `facts`, a list that grows as long as it is the same story."""

    facts: list[Fact]
    length: int
    end: int


class Adding(Protocol):
    """The way to append, while nobody else may."""

    def next_sequence(self, at_least: int) -> int:
        """What a startpoint that the next `append` begins with is numbered; more of them count on."""
        ...

    def append(self, facts: Sequence[Fact]) -> None:
        """Stored, all of them, when this returns. Raises NotWritten, Overtaken."""
        ...


class FactLog(Protocol):
    """Facts in order, wherever they lie: a file (`journal`), or a topic (pushrep.kafka.startpoints). Thread-safe."""

    lock_wait_s: float
    budget: TimeBudget

    @property
    def place(self) -> Path | str:
        """Where, as people name it."""
        ...

    def view(self) -> View:
        """All there is now. Raises StoreUnavailable, CorruptStore."""
        ...

    def size_bytes(self) -> int:
        """A number that changes with every change."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """Alone with the checkpoints. Raises StoreBusy, StoreUnavailable."""
        ...

    def transaction(self) -> AbstractContextManager[Adding]:
        """Alone with facts and checkpoints. Raises StoreBusy, StoreUnavailable, CorruptStore."""
        ...

    def close(self) -> None:
        """Let go of what is held open."""
        ...


class EventLogFollower:
    """The ledger of a journal; each look adds only what is new. For one thread at a time."""

    def __init__(self, journal: FactLog) -> None:
        self._journal = journal
        self._facts: list[Fact] = []
        self._count, self._event_log = 0, EventLog()

    def current(self) -> EventLog:
        """The ledger as of now. Raises CorruptStore."""
        view = self._journal.view()
        if view.facts is not self._facts:  # read anew: what was known is not how the file begins
            self._facts, self._count, self._event_log = view.facts, 0, EventLog()
        try:
            for fact in view.facts[self._count : view.length]:
                self._event_log.add(fact)
        except ValueError as error:
            self._facts = []
            raise CorruptStore(self._journal.place, f"{error}; restore it from a copy") from error
        self._count = view.length
        return self._event_log


class Change:
    """One transaction as the store uses it: it begins with marking what has expired."""

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
        """Stored, all of them, when this returns. Raises NotWritten."""
        if facts:
            self._transaction.append(facts)
            self.event_log = self._follower.current()


class ApplyAnswer(NamedTuple):
    """What a reader that applies is told; `is_new`: it is a fact only once it is written."""

    fact: Applied | Failed
    is_new: bool


def answer_of(  # noqa: PLR0913 - all that decides
    found: ReaderState,
    reader: Reader,
    log: LogFacts,
    *,
    position: int | None,
    now_ms: int,
    refused: Mapping[Kind, str] | None = None,
) -> ApplyAnswer:
    """The stored answer of an applied or failed startpoint, a fresh one of a pending one. Pure.

    `refused`: kinds that this reader can't honour, and why: they fail. A stored offset that the log has lost meanwhile,
    or of another log, fails, too: it is never resolved a second time.
    """
    if found.state is State.FAILED:
        return ApplyAnswer(
            Failed(sequence=found.sequence, reader=reader, at_ms=now_ms, why=found.failure or ""), is_new=False
        )
    if found.applied is not None:
        why = _lost(found.applied, log)
        if why is None:
            return ApplyAnswer(found.applied, is_new=False)
        return ApplyAnswer(Failed(sequence=found.sequence, reader=reader, at_ms=now_ms, why=why), is_new=True)
    written = found.written
    if (why := (refused or {}).get(written.startpoint.kind)) is not None:
        return ApplyAnswer(Failed(sequence=found.sequence, reader=reader, at_ms=now_ms, why=why), is_new=True)
    resolved = resolve(written.startpoint, log, created_ms=written.created_ms, position=position)
    if isinstance(resolved, Unresolved):
        return ApplyAnswer(Failed(sequence=found.sequence, reader=reader, at_ms=now_ms, why=resolved.why), is_new=True)
    applied = Applied(
        sequence=found.sequence,
        reader=reader,
        at_ms=now_ms,
        offset=resolved.offset,
        start=log.start,
        end=log.end,
        log_id=log.log_id,
        until=resolved.until,
        by_policy=resolved.by_policy,
    )
    return ApplyAnswer(applied, is_new=True)


def _lost(applied: Applied, log: LogFacts) -> str | None:
    if applied.log_id and log.log_id and applied.log_id != log.log_id:
        return f"it was resolved to {applied.offset} of a log that was made anew since (it is {log.log_id} now)"
    if applied.offset < log.start:
        return f"it was resolved to {applied.offset}, and the log starts at {log.start} now"
    # Above the end is not lost: without its writer a log's end may not be known up to there.
    return None


def check_text(argument: str, text: object) -> None:
    """Raise BadArgument for what tells nobody anything, or can't be stored."""
    if not isinstance(text, str) or not text.strip() or len(text) > REASON_CHARACTERS_MAX:
        raise BadArgument(argument, f"say in 1 to {REASON_CHARACTERS_MAX} characters, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArgument(argument, f"{text!r} is no text that UTF-8 can carry") from None


def author_name(author: str | None) -> str:
    """Who writes: the name given, else the user whom this process runs as."""
    if author is not None:
        check_text("author", author)
        return author
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"
