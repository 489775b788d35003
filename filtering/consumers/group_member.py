"""What a filtering consumer does as partitions come, move and go, and when it commits. Pure.

    come      load: each from its committed position with its marks, or where its startpoint says, or stopped
    reads     load_again: what could not be loaded      follow: startpoints that are new, between two reads
              admit: replays are dropped; a record the filter refuses is kept as `failure`, which the next read raises
    commit    positions: offsets with their marks (commits.py)      committed: they are stored
    go        forget

A method that needs the client is a generator: it yields calls (Seek, Pause ...) and is sent their answers. So one order
of steps serves a client that blocks (confluent.py, by `run`) and one that is awaited (aiokafka.py, by `run_async`). A
call that fails raises at its yield.

A client keeps an assignment whatever its callback raises, and would hand over records without their marks. So a
partition whose loading failed stays assigned and paused, and every read loads it again or raises why it cannot.
A partition that was stopped begins anew as soon as its startpoint is cancelled or a newer one is there.
"""

import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from filtering.consumers.assignment import (
    NO_MARKS,
    Assignment,
    FilterSettings,
    Spans,
    TopicPartition,
)
from filtering.consumers.commits import CommitPosition, Commits, DeleteMarks, ReadMarks, WriteMarks
from filtering.consumers.startpoints import Answer, PartitionFacts, Startpoints, StartpointWatcher, StartTarget
from filtering.retry import Failure

_LOG = logging.getLogger(__name__)
_LOAD_AGAIN_S = 1.0
_Answer = TypeVar("_Answer")
_Record = TypeVar("_Record")


class Seek(NamedTuple):
    """Fetch from `offset` on; None: from where the client's reset policy says."""

    partition: TopicPartition
    offset: int | None


class Reset(NamedTuple):
    """Nothing is committed of this one, which was held: fetch from where the client's reset policy says."""

    partition: TopicPartition


class Pause(NamedTuple):
    """Fetch nothing of these, which the client has."""

    partitions: list[TopicPartition]


class Resume(NamedTuple):
    """Fetch these again."""

    partitions: list[TopicPartition]


class AskCommitted(NamedTuple):
    """What the group committed of each → a mapping to CommittedOffset."""

    partitions: list[TopicPartition]


class AskStartpoints(NamedTuple):
    """A question to their store, which may block → what it returns."""

    question: Callable[[], Any]


ClientCall: TypeAlias = (
    Seek | Reset | Pause | Resume | AskCommitted | ReadMarks | WriteMarks | DeleteMarks | AskStartpoints
)
Steps: TypeAlias = Generator[ClientCall, Any, _Answer]


class CommittedOffset(NamedTuple):
    """None: nothing is committed."""

    offset: int | None
    metadata: str | None


class ClientFacts(NamedTuple):
    """How to ask the client about a partition and its log; what an error means; whether it says "not yet" to a seek;
    what a record of it carries in the header.
    """

    facts_of: Callable[[str, int, int | None], PartitionFacts]
    failure_of: Callable[[BaseException], Failure]
    is_too_early: Callable[[BaseException], bool]
    header_of: Callable[[Any], bytes | None]


async def run_async(steps: Steps[_Answer], do: Callable[[ClientCall], Awaitable[Any]]) -> _Answer:
    """Run the steps to the end; `do` makes each call. Returns and raises what the steps do."""
    resume: Callable[[Any], ClientCall] = steps.send
    given: Any = None
    while True:
        try:
            call = resume(given)
        except StopIteration as end:
            answer: _Answer = end.value
            return answer
        try:
            resume, given = steps.send, await do(call)
        except BaseException as error:  # noqa: BLE001 - the steps end it, or raise it again
            resume, given = steps.throw, error


def run(steps: Steps[_Answer], do: Callable[[ClientCall], Any]) -> _Answer:
    """As `run_async`, with a client that blocks: there is nothing to wait for, so one step goes to the end."""

    async def done(call: ClientCall) -> Any:
        return do(call)

    try:
        run_async(steps, done).send(None)
    except StopIteration as end:
        answer: _Answer = end.value
        return answer
    raise AssertionError("a client that blocks is never waited for")


class GroupMember:
    """See the file's map. `failure`: why a batch was refused, until a seek. Not thread-safe."""

    def __init__(
        self, group: str, settings: FilterSettings, startpoints: Startpoints | None, client: ClientFacts
    ) -> None:
        self._group, self._startpoints, self._client = group, startpoints, client
        self.assignment = Assignment(settings, client.header_of)
        self.watcher = StartpointWatcher(self.assignment, None if startpoints is None else startpoints.look_every_s)
        self.failure: Exception | None = None
        self.moves = 0
        self._moved: dict[TopicPartition, int] = {}
        # Fetched is a partition that is in neither of them.
        self._unloaded: set[TopicPartition] = set()  # its position or its marks are not known yet
        self._stopped: set[TopicPartition] = set()  # its startpoint can't be applied
        self._commits = Commits(group, settings.carrier)

    # ---- partitions come and go

    def load(self, partitions: Iterable[TopicPartition]) -> Steps[dict[TopicPartition, int | None]]:
        """The offset at which the client is to begin in each of them; None: where its reset policy says.

        Those that are stopped are not paused yet.
        """
        asked, found = list(partitions), []
        for partition, (offset, metadata) in (yield from self.committed_of(asked)).items():
            position = yield from self._commits.read(partition, offset, metadata)
            marks, startpoint = position.marks, position.startpoint
            if marks is None and offset is not None:
                _LOG.warning(
                    "%s-%d starts at %d, committed without marks: it begins with empty ones", *partition, offset
                )
            answer = yield from self._pending_startpoint(partition, offset, startpoint)
            found.append((partition, offset, marks, startpoint, answer))
        return {
            partition: self.watcher.begin(partition, offset, NO_MARKS if marks is None else marks, sequence, answer)
            for partition, offset, marks, sequence, answer in found
        }

    def committed_of(self, partitions: Iterable[TopicPartition]) -> Steps[Mapping[TopicPartition, CommittedOffset]]:
        """What the group committed of each, in their order."""
        asked = list(partitions)
        answer = yield AskCommitted(asked)
        return {partition: answer[partition] for partition in asked}

    def hold(self, partitions: Iterable[TopicPartition]) -> Steps[None]:
        """Pause these, which the client has been assigned, until they are loaded."""
        yield from self._pause(self._unloaded, partitions)

    @property
    def holds_any(self) -> bool:
        """Whether there is something for `load_again`."""
        return bool(self._unloaded)

    @property
    def follows_startpoints(self) -> bool:
        """Whether there may be something for `follow`."""
        return self._startpoints is not None

    def load_again(self) -> Steps[list[TopicPartition]]:
        """Those of the held ones that are read from now on; none, and a warning, where brokers do not answer now."""
        return (yield from self._ignoring_transient(self._load_held())) or []

    def pause_stopped(self) -> Steps[None]:
        """Those that may not be read, once the client has them."""
        yield from self._pause(self._stopped, set(self.watcher.stopped) - self._stopped)

    def forget(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Forget these, which are given up. Returns those of them that the client has paused."""
        gone = set(partitions)
        self.watcher.forget(gone)
        if not list(self.assignment):  # nothing more of the refused batch is read: partitions that come now begin anew
            self.failure = None
        paused = sorted(gone & (self._unloaded | self._stopped))
        self._unloaded -= gone
        self._stopped -= gone
        return paused

    @property
    def partitions(self) -> set[TopicPartition]:
        """All that are assigned, whether they are read or not."""
        return {*self.assignment, *self.watcher.stopped, *self._unloaded}

    # ---- reads

    def wait_s(self, left_s: float) -> float:
        """How long of `left_s` (below 0: for ever) the client may wait for records before something else is due."""
        wait_s = self.watcher.wait_s(left_s)
        if self.holds_any and (wait_s < 0 or wait_s > _LOAD_AGAIN_S):
            return _LOAD_AGAIN_S
        return wait_s

    def follow(self, now_s: float) -> Steps[None]:
        """Apply new startpoints, if it is time to ask for them. Raises why a partition was stopped, once for each."""
        yield from self._ignoring_transient(self._followed(now_s))

    def failing_with(self, key_of: Callable[[_Record], bytes | None]) -> Callable[[_Record], bytes | None]:
        """The same function; what it raises is kept as `failure`, so that no read goes on past that record."""

        def key(record: _Record) -> bytes | None:
            try:
                return key_of(record)
            except Exception as error:
                self.failure = error
                raise

        return key

    def admit(self, partition: TopicPartition, offset: int, key: bytes | None, record: Any) -> bool:
        """As Assignment's; what is refused stays as `failure`."""
        try:
            return self.assignment.admit(partition, offset, key, record)
        except Exception as error:
            self.failure = error
            raise

    def admit_columns(
        self,
        topic: str,
        keys: bytes | Sequence[bytes | None],
        partitions: int | npt.NDArray[Any],
        spans: Spans,
        records: Sequence[Any],
    ) -> npt.NDArray[np.bool_]:
        """As Assignment's; what is refused stays as `failure`."""
        try:
            return self.assignment.admit_columns(topic, keys, partitions, spans, records)
        except Exception as error:
            self.failure = error
            raise

    def has_moved(self, partition: TopicPartition, since: int) -> bool:
        """Whether it was moved after `moves` was `since`: then records that were fetched before are not yielded."""
        return self._moved.get(partition, 0) > since

    def seek(self, partition: TopicPartition, offset: int) -> Steps[None]:
        """Go on there: with its marks at the committed position, else with none. Raises BadFilterSetting.

        After a refused batch all other partitions go back to their committed positions: the records after it are gone.
        """
        if self.failure is not None:
            yield from self.back_to_committed()
            self.failure = None
        committed = yield from self.committed_of([partition])
        if committed[partition].offset == offset:
            start = (yield from self.load([partition]))[partition]
            yield from self._seek(partition, start)
            yield from self.pause_stopped()
            return
        _LOG.warning(
            "%s-%d goes on at %d, which is not its committed position: it begins with empty marks", *partition, offset
        )
        if partition in self._unloaded:
            self.assignment.assign(partition, offset)
        else:
            self.assignment.seek(partition, offset)
        yield from self._seek(partition, offset)
        yield from self._resume(self._unloaded, [partition])

    def back_to_committed(self) -> Steps[None]:
        """Every partition begins again, where nothing is committed at the first record that the client handed over."""
        began = {partition: self.assignment.began(partition) for partition in sorted(self.assignment)}
        for partition, start in (yield from self.load(began)).items():
            place = began[partition] if start is None else start
            # None: no record of it came, so its position is where the reset policy put it.
            if place is not None and partition in self.assignment:
                yield from self._seek(partition, place)
        yield from self.pause_stopped()

    # ---- commits

    def positions(self, now_ms: int) -> Steps[list[CommitPosition]]:
        """What a commit says now; marks that do not fit beside an offset are stored before this returns."""
        return (yield from self._commits.of(self.assignment.due(now_ms)))

    def refused(self, positions: Sequence[CommitPosition]) -> bool:
        """As `Commits.refused`."""
        return self._commits.refused(positions)

    def committed(self, positions: Sequence[CommitPosition]) -> Steps[None]:
        """The commit is stored: the marks that it replaced are deleted, and startpoints are consumed."""
        self.assignment.committed([one.due for one in positions])
        yield from self._commits.stored(positions)
        for due, _, _ in positions:
            if due.has_new_startpoint and self._startpoints is not None:
                named = (self._group, due.topic, due.partition, due.startpoint)
                yield AskStartpoints(partial(self._startpoints.consumed, *named))

    # ---- inside

    def _load_held(self) -> Steps[list[TopicPartition]]:
        held = sorted(self._unloaded)
        if not held:
            return []
        loaded: list[TopicPartition] = []
        for partition, start in (yield from self.load(held)).items():
            try:
                if start is None:
                    yield Reset(partition)
                else:
                    yield from self._seek(partition, start)
            except Exception as error:
                if not self._client.is_too_early(error):
                    raise
                break
            loaded.append(partition)
        yield from self.pause_stopped()
        yield from self._resume(self._stopped, [one for one in loaded if one in self.assignment])
        yield from self._resume(self._unloaded, loaded)
        return loaded

    def _followed(self, now_s: float) -> Steps[None]:
        if self._startpoints is not None and self.watcher.is_time(now_s):
            version = yield AskStartpoints(self._startpoints.version)
            if not self.watcher.is_new(version) or (yield from self._applied_startpoints(self._startpoints)):
                self.watcher.looked(version, now_s)
        self.watcher.raise_pending_error()

    def _applied_startpoints(self, startpoints: Startpoints) -> Steps[bool]:
        """Whether all partitions were asked for. One that was just assigned can't be moved yet: then call again."""
        try:
            stopped = set(self._stopped)
            for partition in sorted(set(self.assignment) - stopped):
                yield from self._move(partition, startpoints)
            for partition in sorted(stopped):
                yield from self._begin_again(partition)
        except Exception as error:
            if not self._client.is_too_early(error):
                raise
            return False
        finally:
            yield from self.pause_stopped()
        return True

    def _pending_startpoint(self, partition: TopicPartition, offset: int | None, startpoint: int) -> Steps[Answer]:
        if self._startpoints is None:
            return None
        facts = self._client.facts_of(*partition, offset)
        answer: Answer = yield AskStartpoints(partial(self._startpoints.pending, self._group, facts, startpoint))
        return answer

    def _move(self, partition: TopicPartition, startpoints: Startpoints) -> Steps[None]:
        facts = self._client.facts_of(*partition, self.assignment.position(partition))
        running = self.assignment.startpoint(partition)
        answer: Answer = yield AskStartpoints(partial(startpoints.moved, self._group, facts, running))
        if isinstance(answer, StartTarget):
            # The client first: if it can't, nothing has changed, and the next look gives the same answer again.
            yield from self._seek(partition, answer.offset)
            _LOG.info("%s-%d goes on at %d, by startpoint %d", *partition, answer.offset, answer.sequence)
        self.watcher.move(partition, answer)

    def _begin_again(self, partition: TopicPartition) -> Steps[None]:
        start = (yield from self.load([partition]))[partition]
        if partition in self.assignment:
            yield from self._seek(partition, start)
            yield from self._resume(self._stopped, [partition])

    def _seek(self, partition: TopicPartition, offset: int | None) -> Steps[None]:
        yield Seek(partition, offset)
        self.moves += 1
        self._moved[partition] = self.moves

    def _pause(self, why: set[TopicPartition], partitions: Iterable[TopicPartition]) -> Steps[None]:
        """Pause all of these, paused ones too, since the client may have been given them anew."""
        if wanted := sorted(set(partitions)):
            why.update(wanted)
            yield Pause(wanted)

    def _resume(self, why: set[TopicPartition], partitions: Iterable[TopicPartition]) -> Steps[None]:
        over = why & set(partitions)
        why -= over
        if free := sorted(over - self._unloaded - self._stopped):
            yield Resume(free)

    def _ignoring_transient(self, steps: Steps[_Answer]) -> Steps[_Answer | None]:
        """Run the steps, and return what they return; None, and a warning, where a later read may succeed."""
        try:
            return (yield from steps)
        except Exception as error:
            if self._client.failure_of(error) is not Failure.TRANSIENT:
                raise
            _LOG.warning("group %r: brokers do not answer now, a later read asks again: %s", self._group, error)
            return None
