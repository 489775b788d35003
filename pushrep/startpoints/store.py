"""StartpointStore: operators write startpoints, readers get starts and commit; everything is kept as history.

    operator   write ─▶ pending      cancel, delete, delete_all ─▶ cancelled      sweep ─▶ expired      fan_out
    reader     claim ─▶ start (apply, else checkpoint, else default) ─▶ commit ─▶ consume

Every change is one transaction under the store's lock: read all facts, decide (pure: event_log, resolve) and
append. Writers in any number of processes lose nothing, and a reader killed anywhere finds the same answer again:

    killed before `applied` is on disk       it is resolved then, for the first time
    after it, before a commit                the stored offset is used again, nothing is resolved anew
    after the commit, before `consumed`      the commit carries the sequence: not pending any more; start marks it

If others can't be kept out meanwhile (in a topic), a change ends with Overtaken, nothing of it is written, and it is
repeated from its beginning: so a change decides anew each time, and keeps no state.

`StorePoll` is used by a running reader. Each call of the store has a time limit, and the pauses between calls grow
while the store does not answer, so that the reader goes on reading:

    answers    asked as often as the reader likes: a question within 10 s, a look at the store's size within 3 s
    away       logged once; asked again after 1 s, then after 2, 4 ... 60 s; new startpoints wait
    back       logged once; the reader looks at all that there is

A partition that starts waits for the store's answer instead, because it has to know where.

`store_at` opens a store by its place, as commands, jobs and options name it:

    store_at("out/startpoints")                                                a directory
    store_at("kafka:startpoints", {"bootstrap.servers": "broker:9092"})        a compacted topic; librdkafka's names

A kind other than a directory is opened by the entry point of its name in the group `pushrep.startpoint_stores`, so that
no Kafka client is loaded unless it is used.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from filtering.closing import ClosedAtExit
from filtering.extras import MissingExtra, needed_by
from filtering.retry import Backoff, RetryPolicy
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument, checked_path
from pushrep.settings import printable_text, whole_number
from pushrep.startpoints.event_log import Change, EventLog, EventLogFollower, FactLog, ReaderState
from pushrep.startpoints.journal import CheckpointFiles, Journal
from pushrep.startpoints.model import (
    Applied,
    Cancelled,
    Checkpoint,
    Claim,
    Consumed,
    Fact,
    Failed,
    Kind,
    Overtaken,
    PartitionLost,
    Reader,
    Startpoint,
    StartpointEvent,
    StartpointFailed,
    StartpointRefused,
    State,
    StoreUnavailable,
    Target,
    Written,
    author_name,
    busy,
)
from pushrep.startpoints.resolve import LogFacts, Start, answer_of, from_startpoint, without_startpoint

_BACKOFF = Backoff(first_s=0.02, longest_s=0.5)

_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")


class CheckpointStore(Protocol):
    """Stores checkpoints. `save` is called under the store's lock."""

    def load(self, reader: Reader) -> Checkpoint:
        """What stands there now; an empty one (generation 0) if there is none. Raises CorruptFile."""
        ...

    def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint before returning. Raises StoreUnavailable."""
        ...

    def all(self) -> list[Checkpoint]:
        """Every reader's, sorted."""
        ...


def changes(
    method: Callable[Concatenate["_Store", _Parameters], _Answer],
) -> Callable[Concatenate["_Store", _Parameters], _Answer]:
    """Decorator: repeat the method if another writer changed the store meanwhile. Raises StoreUnavailable."""

    @functools.wraps(method)
    def changing(self: "_Store", /, *args: _Parameters.args, **more: _Parameters.kwargs) -> _Answer:
        wait_s = self._journal.budget.left_s(self._journal.lock_wait_s)
        try:
            policy = RetryPolicy(
                is_retriable=lambda error: isinstance(error, Overtaken), backoff=_BACKOFF, within_s=wait_s
            )
            return policy.call(lambda: method(self, *args, **more))
        except Overtaken as error:
            raise busy(self.place, None, wait_s) from error

    return changing


_Store = TypeVar("_Store", bound="StartpointStore")


STORE_NAME = "startpoints"
"""Where a directory of logs keeps its startpoints, if nobody says otherwise."""
TTL_S = 12 * 3600
"""The default time within which a startpoint has to be applied."""


class StartpointStore(ClosedAtExit):
    """Startpoints and checkpoints in a directory. Thread-safe, for any number of processes. Made by `open`.

    After `close` its methods raise StartpointRefused. Every change raises StoreUnavailable and CorruptFile, which the
    methods don't repeat; it is on disk when the method returns.
    """

    def __init__(self, facts: FactLog, checkpoints: CheckpointStore, clock: Clock) -> None:
        """Use `open`, or `pushrep.kafka.startpoints.open_store` for a topic."""
        self.place = facts.place
        self._clock = clock
        self._journal, self._checkpoints = facts, checkpoints
        # `_reads` is for calls without the store's lock, by any thread; `_changes` for calls that hold it.
        self._reads, self._reads_lock = EventLogFollower(facts), threading.Lock()
        self._changes = EventLogFollower(facts)
        self._closed = False

    @classmethod
    def open(
        cls, location: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM, clock: Clock = SYSTEM_CLOCK
    ) -> Self:
        """The store in this directory, which the first change makes. Reads and writes nothing yet.

        Raises StoreUnavailable for a location that names another kind of store.
        """
        if "://" in str(location) or str(location).startswith(f"{KAFKA}:"):
            why = "name a directory; one in a Kafka topic is opened by pushrep.startpoints.store_at"
            raise StoreUnavailable(location, why)
        directory = checked_path("location", location)
        return cls(Journal(directory, filesystem), CheckpointFiles(directory, filesystem), clock)

    # ---- operators

    @changes
    def write(  # noqa: PLR0913 - what a startpoint is made of
        self,
        consumer: str | None,
        topic: str,
        partition: int | None,
        startpoint: Startpoint,
        reason: str,
        *,
        task: str | None = None,
        author: str | None = None,
        ttl_s: int | None = TTL_S,
    ) -> int:
        """Write that `consumer` (None: every one) starts `partition` (None: every one) at `startpoint`. Its sequence.

        The newest wins. For a consumer that has not applied it after `ttl_s` (None: never) it has expired.
        """
        (sequence,) = self._write({Target(consumer, topic, partition, task): startpoint}, reason, author, ttl_s)
        return sequence

    @changes
    def write_each(  # noqa: PLR0913 - what startpoints are made of
        self,
        consumer: str,
        topic: str,
        startpoints: Mapping[int, Startpoint],
        reason: str,
        *,
        author: str | None = None,
        ttl_s: int | None = TTL_S,
    ) -> dict[int, int]:
        """As `write`, one startpoint for each partition, all or none. Returns sequences by partition."""
        wanted = {Target(consumer, topic, partition): one for partition, one in startpoints.items()}
        return dict(zip(startpoints, self._write(wanted, reason, author, ttl_s), strict=True))

    @changes
    def cancel(self, sequence: int, reason: str, *, author: str | None = None) -> None:
        """Cancel a startpoint, for all that have not consumed it. Raises StartpointRefused."""
        printable_text("reason", reason)
        who = author_name(author)
        with self._transaction() as change:
            if change.event_log.written(sequence) is None:
                raise StartpointRefused(f"there is no startpoint {sequence}: look with list")
            if not change.event_log.can(sequence, StartpointEvent.CANCEL):
                state = change.event_log.state(sequence)
                raise StartpointRefused(
                    f"startpoint {sequence} is {state} already: cancelling can't undo that, set another one"
                )
            at_ms = self._clock.wall_ms()
            change.append(Cancelled(sequence=sequence, at_ms=at_ms, author=who, reason=reason))

    def delete(  # noqa: PLR0913 - a target and who says so
        self,
        consumer: str | None,
        topic: str,
        partition: int | None,
        reason: str,
        *,
        task: str | None = None,
        author: str | None = None,
    ) -> list[int]:
        """Cancel every startpoint for exactly this target that is not over; returns their sequences."""
        target = Target(consumer, topic, partition, task)
        return self._cancel_where(lambda written: written.target == target, reason, author)

    def delete_all(self, reason: str, *, author: str | None = None) -> list[int]:
        """Cancel every startpoint that is not over; returns their sequences."""
        return self._cancel_where(lambda _written: True, reason, author)

    @changes
    def fan_out(self, consumer: str, topic: str, tasks: Mapping[str, Iterable[int]]) -> dict[tuple[str, int], int]:
        """Give each task its own copy of what is pending for all tasks; returns sequences by (task, partition).

        One transaction: all copies or none. A task keeps what is newer of its own, and nobody gets a second copy, so
        doing it again after a crash, or with more tasks, adds only what is missing. Copies keep time, reason and age.
        """
        if "" in tasks:
            raise BadArgument("tasks", "a task has a name")
        readers = [Reader(consumer, topic, n, task) for task, numbers in sorted(tasks.items()) for n in sorted(numbers)]
        copies: dict[tuple[str, int], int] = {}
        with self._transaction() as change:
            facts: list[Fact] = []
            for reader in readers:
                found = change.event_log.pending(reader)
                if found is None or found.state is not State.PENDING or found.written.target.task is not None:
                    continue
                sequence = change.next_sequence + len(facts)
                target = Target(reader.consumer, reader.topic, reader.partition, reader.task)
                facts.append(replace(found.written, sequence=sequence, target=target, origin=found.sequence))
                copies[reader.task, reader.partition] = sequence
            change.append(*facts)
        return copies

    @changes
    def sweep(self) -> list[int]:
        """Mark startpoints as expired after their `ttl_s`; returns their sequences. Every change does this first."""
        self._check()
        with self._reads_lock:
            if not self._reads.current().due(self._clock.wall_ms()):
                return []
        with self._transaction() as change:
            return change.swept

    # ---- readers

    @changes
    def read(  # noqa: PLR0913 - a reader and what to do with what it finds
        self, consumer: str, topic: str, partition: int, *, task: str = "", remove: bool = False, only: int = 0
    ) -> ReaderState | None:
        """The startpoint pending for this reader (or failed, which stops it); None without one.

        remove: for jobs without checkpoints here, consume it at once (with `only` above 0, only the one of that
        sequence). A job that dies after this call has lost it.
        """
        reader = Reader(consumer, topic, partition, task)
        if not remove:
            self._check()
            committed = self._checkpoints.load(reader).sequence
            with self._reads_lock:
                found = self._reads.current().pending(reader, committed)
            overdue = found is not None and found.state is State.PENDING and found.written.is_due(self._clock.wall_ms())
            if not overdue:
                return found
            self.sweep()
            return self.read(consumer, topic, partition, task=task)
        with self._transaction() as change:
            found = change.event_log.pending(reader, self._checkpoints.load(reader).sequence)
            if found is not None and found.state is not State.FAILED and only in (0, found.sequence):
                change.append(Consumed(sequence=found.sequence, reader=reader, at_ms=self._clock.wall_ms()))
            return found

    @changes
    def claim(self, consumer: str, topic: str, partition: int, *, task: str = "") -> Claim:
        """Claim the partition: its old holder can neither apply, commit nor consume any more."""
        self._check()
        reader = Reader(consumer, topic, partition, task)
        with self._journal.locked():
            # A killed process's commit may be readable and not on disk yet. Saving syncs all names, so this claim can
            # rely on what it read.
            checkpoint = self._checkpoints.load(reader)
            claim = Claim(reader, checkpoint.generation + 1)
            self._checkpoints.save(replace(checkpoint, generation=claim.generation))
        return claim

    @changes
    def start(
        self,
        claim: Claim,
        log: LogFacts,
        *,
        default: Startpoint | None = None,
        reset: bool = False,
        position: int | None = None,
    ) -> Start:
        """Where the claimed partition starts: startpoint > checkpoint > `default` (None: earliest).

        reset: ignore the checkpoint, not a startpoint. position: of a running reader; None: its checkpoint. Raises
        StartpointFailed, PartitionLost, CheckpointUnusable.
        """
        default = default if default is not None else Startpoint.earliest()
        with self._transaction() as change:
            checkpoint = self._owned(claim)
            applied = self._apply(change, checkpoint, log, position)
            if applied is not None:
                written = change.event_log.written(applied.sequence)
                assert written is not None, "applied is only what was written"
                return from_startpoint(applied, written.startpoint)
            last = change.event_log.reader_state(checkpoint.sequence, claim.reader)
            if last is not None and last.state is State.APPLIED:
                # The reader committed and was killed before `consume`.
                change.append(Consumed(sequence=last.sequence, reader=claim.reader, at_ms=self._clock.wall_ms()))
            return without_startpoint(checkpoint, last, log, default, reset=reset, now_ms=self._clock.wall_ms())

    @changes
    def apply(
        self,
        claim: Claim,
        log: LogFacts,
        *,
        position: int | None = None,
        committed: int = 0,
        refused: Mapping[Kind, str] | None = None,
    ) -> Applied | None:
        """Resolve the pending startpoint, once; later calls return the stored answer; None without one.

        committed: the sequence in the reader's own commits, if they are elsewhere (in a Kafka group). refused: kinds
        that the reader can't apply, and why: they fail. Raises StartpointFailed, PartitionLost.
        """
        with self._transaction() as change:
            return self._apply(change, self._owned(claim), log, position, committed, refused)

    @changes
    def commit(self, claim: Claim, offset: int, *, sequence: int = 0, log_id: str = "") -> bool:
        """Store that everything below `offset` is done by a run that started from startpoint `sequence` (0: none).

        False, and nothing is stored, as long as the run made no progress past what the startpoint resolved to: a start
        alone uses nothing up. Raises PartitionLost, StartpointRefused.
        """
        whole_number("offset", offset)
        self._check()
        with self._journal.locked():
            checkpoint = self._owned(claim)
            if sequence < checkpoint.sequence:
                raise BadArgument("sequence", f"{sequence} is below {checkpoint.sequence}, which was committed already")
            if sequence > checkpoint.sequence:
                reader_state = self._changes.current().reader_state(sequence, claim.reader)
                if reader_state is None or reader_state.applied is None:
                    raise _not_applied(claim.reader, sequence)
                if offset <= reader_state.applied.offset:
                    return False
            self._checkpoints.save(replace(checkpoint, offset=offset, sequence=sequence, log_id=log_id))
        return True

    @changes
    def consume(self, claim: Claim, sequence: int, *, committed: int = 0) -> None:
        """Mark `sequence`, and only that, as consumed; call it after the commit with it. A second call is fine.

        committed: as in `apply`. Raises PartitionLost, StartpointRefused.
        """
        with self._transaction() as change:
            checkpoint = self._owned(claim)
            reader_state = change.event_log.reader_state(sequence, claim.reader)
            if reader_state is None or reader_state.applied is None:
                raise _not_applied(claim.reader, sequence)
            if max(committed, checkpoint.sequence) < sequence:
                raise StartpointRefused(
                    f"{claim.reader} has not committed behind startpoint {sequence}: commit, then consume it"
                )
            if reader_state.state is State.APPLIED:
                change.append(Consumed(sequence=sequence, reader=claim.reader, at_ms=self._clock.wall_ms()))

    # ---- looks

    def event_log(self) -> EventLog:
        """All startpoints and their states; takes no lock. Overdue ones may not be marked yet."""
        self._check()
        return EventLogFollower(self._journal).current()

    def reader_state(self, sequence: int, reader: Reader) -> ReaderState | None:
        """The state of startpoint `sequence` for this reader; None if there is none for it. Takes no lock."""
        self._check()
        with self._reads_lock:
            return self._reads.current().reader_state(sequence, reader)

    def history(self) -> list[Fact]:
        """Every fact in order; takes no lock."""
        self._check()
        view = self._journal.view()
        return view.facts[: view.length]

    def checkpoints(self) -> list[Checkpoint]:
        """Every reader's, sorted; takes no lock."""
        self._check()
        return self._checkpoints.all()

    def checkpoint(self, reader: Reader) -> Checkpoint:
        """This reader's checkpoint; takes no lock."""
        self._check()
        return self._checkpoints.load(reader)

    def size_bytes(self) -> int:
        """A number that changes with every change of a startpoint: a running reader looks when it has changed."""
        self._check()
        return self._journal.size_bytes()

    def within(self, timeout_s: float) -> AbstractContextManager[None]:
        """Calls of this thread in the block take at most so long together, else StoreUnavailable."""
        return self._journal.budget.within(timeout_s)

    # ---- life

    def close(self) -> None:
        """Close files and clients; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._journal.close()

    # ---- inside

    def _write(
        self, wanted: Mapping[Target, Startpoint], reason: str, author: str | None, ttl_s: int | None
    ) -> list[int]:
        for one in wanted.values():
            if not isinstance(one, Startpoint):
                raise BadArgument("startpoint", f"give a Startpoint, as Startpoint.earliest(), not {one!r:.60}")
        printable_text("reason", reason)
        if ttl_s is not None:
            whole_number("ttl_s", ttl_s, 1)
        who = author_name(author)
        with self._transaction() as change:
            sequences = [change.next_sequence + n for n in range(len(wanted))]
            now_ms = self._clock.wall_ms()
            change.append(
                *(
                    Written(
                        sequence=sequence,
                        target=target,
                        startpoint=startpoint,
                        author=who,
                        reason=reason,
                        created_ms=now_ms,
                        ttl_s=ttl_s,
                    )
                    for sequence, (target, startpoint) in zip(sequences, wanted.items(), strict=True)
                )
            )
        return sequences

    @contextmanager
    def _transaction(self) -> Iterator["Change"]:
        self._check()
        with self._journal.transaction() as transaction:
            yield Change(transaction, self._changes, self._clock.wall_ms())

    def _check(self) -> None:
        if self._closed:
            raise StartpointRefused(f"the store of startpoints {self.place} is closed: open it again")

    def _apply(  # noqa: PLR0913, PLR0917 - the arguments of `apply`
        self,
        change: Change,
        checkpoint: Checkpoint,
        log: LogFacts,
        position: int | None,
        committed: int = 0,
        refused: Mapping[Kind, str] | None = None,
    ) -> Applied | None:
        reader = checkpoint.reader
        found = change.event_log.pending(reader, max(committed, checkpoint.sequence))
        if found is None:
            return None
        stands_at = position if position is not None else checkpoint.offset
        now_ms = self._clock.wall_ms()
        answer = answer_of(found, reader, log, position=stands_at, now_ms=now_ms, refused=refused)
        if answer.is_new:
            change.append(answer.fact)
        if isinstance(answer.fact, Failed):
            raise StartpointFailed(reader, found.sequence, answer.fact.why)
        return answer.fact

    def _owned(self, claim: Claim) -> Checkpoint:
        checkpoint = self._checkpoints.load(claim.reader)
        if checkpoint.generation != claim.generation:
            raise PartitionLost(claim.reader, held=claim.generation, generation=checkpoint.generation)
        return checkpoint

    @changes
    def _cancel_where(self, wanted: Callable[[Written], bool], reason: str, author: str | None) -> list[int]:
        printable_text("reason", reason)
        who = author_name(author)
        with self._transaction() as change:
            chosen = [
                written.sequence
                for written in change.event_log.all_written()
                if wanted(written) and change.event_log.can(written.sequence, StartpointEvent.CANCEL)
            ]
            now_ms = self._clock.wall_ms()
            change.append(*(Cancelled(sequence=n, at_ms=now_ms, author=who, reason=reason) for n in chosen))
        return chosen


GROUP = "pushrep.startpoint_stores"
KAFKA = "kafka"
BOOTSTRAP_SERVERS = "bootstrap.servers"


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A store's place: the directory `name` for kind "", the topic `name` for "kafka".

    settings: of the client, by librdkafka's names; shown nowhere.
    """

    kind: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str | Path, settings: Mapping[str, str] | None = None) -> "StorePlace":
        """Parse a directory, or kafka:TOPIC with its client's settings. Raises BadArgument, StoreUnavailable.

        BadArgument names the setting that is missing, or that a directory does not need.
        """
        words, given = str(text), dict(settings or {})
        if not words.strip():
            raise BadArgument("store", "it is empty: name a directory, or kafka:TOPIC")
        if kind_of(words) == KAFKA:
            name = words.removeprefix(f"{KAFKA}:")
            if not name:
                raise StoreUnavailable(words, "name the topic: kafka:TOPIC")
            if not given.get(BOOTSTRAP_SERVERS):
                raise BadArgument(BOOTSTRAP_SERVERS, f"{words} lies on brokers: say where, HOST:PORT")
            return cls(KAFKA, name, given)
        if "://" in words:
            raise StoreUnavailable(words, "a store lies in a directory of this machine, or in kafka:TOPIC")
        if given:
            raise BadArgument(min(given), f"{words} is a directory; settings of a client are for kafka:TOPIC")
        return cls("", words)

    def open(self) -> StartpointStore:
        """Open the store; the caller closes it. Raises StoreUnavailable, BadArgument for invalid settings."""
        if not self.kind:
            return StartpointStore.open(self.name)
        place = f"{self.kind}:{self.name}"
        for entry in entry_points(group=GROUP, name=self.kind):
            try:
                with needed_by("it"):
                    make = entry.load()
            except MissingExtra as error:
                raise StoreUnavailable(place, str(error)) from error
            opened: StartpointStore = make(self.name, self.settings)
            return opened
        why = f"this installation has no {self.kind!r} in its entry points {GROUP}: install pushrep again"
        raise StoreUnavailable(place, why)


def kind_of(place: str | Path) -> str:
    """Empty for a directory, "kafka" for a topic."""
    return KAFKA if str(place).startswith(f"{KAFKA}:") and "://" not in str(place) else ""


def store_at(place: str | Path, settings: Mapping[str, str] | None = None) -> StartpointStore:
    """The store at a directory or at kafka:TOPIC; close it. Raises as `StorePlace.parse` and `StorePlace.open` do."""
    return StorePlace.parse(place, settings).open()


_LOG = logging.getLogger(__name__)


def _not_applied(reader: Reader, sequence: int) -> StartpointRefused:
    return StartpointRefused(f"startpoint {sequence} was not applied for {reader}: apply it, then commit behind it")


ASK_WITHIN_S = 10.0
LOOK_WITHIN_S = 3.0
_AWAY_PAUSES = Backoff(first_s=1.0, longest_s=60.0, least=1.0)


class StorePoll:
    """One reader's calls to one store. `poll_size` begins a turn, in which `ask` may be called. For one thread at a
    time. Both raise StoreUnavailable if the store does not answer, or was not asked because it did not answer lately.
    """

    def __init__(self, store: StartpointStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._clock = store, clock
        self._failures, self._next_s = 0, -math.inf
        self._since_ms, self._asked, self._failed = 0, False, False
        self.away: StoreUnavailable | None = None
        """The last failure, until every question of a turn was answered.

        Not until the next answer: a store that can be read may still refuse changes.
        """

    def poll_size(self) -> int:
        """The store's `size_bytes`, within 3 s: a turn begins."""
        if self.away is not None and self._asked and not self._failed:
            _LOG.info("%s answers again", self._store.place)
            self.away, self._failures = None, 0
        self._asked = self._failed = False
        return self._answer(self._store.size_bytes, LOOK_WITHIN_S)

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """The result of `question`, within 10 s. Raises the question's other errors, too."""
        answer = self._answer(question, ASK_WITHIN_S)
        self._asked = True
        return answer

    def words(self) -> str | None:
        """Since when the store has not answered, and why, as text; None while it answers."""
        if self.away is None:
            return None
        since_s = (self._clock.monotonic_ms() - self._since_ms) / 1000
        return f"no answer for {since_s:.0f} s, new startpoints wait: {self.away}"

    def _answer(self, question: Callable[[], _Answer], within_s: float) -> _Answer:
        if self.away is not None and self._clock.monotonic_ms() / 1000 < self._next_s:
            self._failed = True
            raise StoreUnavailable(self.away.location, self.away.why)
        try:
            with self._store.within(within_s):
                return question()
        except StoreUnavailable as error:
            if self.away is None:
                self._since_ms = self._clock.monotonic_ms()
                _LOG.warning("%s; reading goes on, and new startpoints wait until it answers", error)
            self.away, self._failed = error, True
            self._failures += 1
            self._next_s = self._clock.monotonic_ms() / 1000 + _AWAY_PAUSES.pause_s(self._failures)
            raise
