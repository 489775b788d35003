"""Startpoints as a consumer sees them: the Protocol of their store, and what they do to its partitions. Pure.

assigned    pending ─▶ StartTarget: begin there │ RefusedStartpoint: do not begin │ None: at the committed position
running     version changed? moved ─▶ StartTarget: seek, between two reads │ RefusedStartpoint: stop │ None: continue
committed   consumed

The store is asked every look_every_s, and again only if its version changed. A stopped partition is neither read nor
committed, and its error is raised once; each new version asks about it again. The shells ask the store and move their
client.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol, TypeAlias

from filtering.consumers.assignment import NO_MARKS, Assignment, TopicPartition
from filtering.marks import HighwaterMarks


class PartitionFacts(NamedTuple):
    """One partition of a topic, and how to look at its log.

    bounds(topic, partition): (log start, log end). first_at(topic, partition, timestamp_ms): the first offset of a
    record at or after that time, None if there is none. position: where it stands, committed when it comes, the next
    offset to read while it runs; None if that is not known. is_held(topic, partition): whether the group's coordinator
    says that this member has it; False while that is not known, which nobody waits for. The others may block.
    """

    topic: str
    partition: int
    bounds: Callable[[str, int], tuple[int, int]]
    first_at: Callable[[str, int, int], int | None]
    position: int | None = None
    is_held: Callable[[str, int], bool] = lambda _topic, _partition: False


class StartTarget(NamedTuple):
    """A startpoint that was applied: begin at `offset`, and say `sequence` with every commit from there on."""

    offset: int
    sequence: int
    reset_marks: bool


class RefusedStartpoint(NamedTuple):
    """A startpoint that can't be applied: the partition is not read. `error` is raised to the caller, once for it."""

    sequence: int
    error: Exception


Answer = StartTarget | RefusedStartpoint | None


class Startpoints(Protocol):
    """Where an operator may send a group's partitions. Calls may block, and come from one thread at a time."""

    look_every_s: float
    """How often a running consumer asks whether there is something new."""

    def version(self) -> int:
        """A number that changes whenever there may be something new for anyone."""
        ...

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Answer:
        """The partition comes: apply the newest startpoint above the committed one, once; None if there is none."""
        ...

    def moved(self, consumer: str, facts: PartitionFacts, running_sequence: int) -> Answer:
        """The partition runs from startpoint `running_sequence` (0: none): apply a newer one, once; None: go on."""
        ...

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """A commit that carries this sequence is stored."""
        ...


class StartpointWatcher:
    """See the file's map. Not thread-safe."""

    def __init__(self, assignment: Assignment, look_every_s: float | None) -> None:
        """look_every_s: None if there are no startpoints to follow."""
        self._assignment, self._look_every_s = assignment, look_every_s
        self._stopped: dict[TopicPartition, RefusedStartpoint] = {}
        self._began: dict[TopicPartition, int] = {}
        self._pending_errors: list[Exception] = []
        self._next_look_s = 0.0
        self._seen: int | None = None

    @property
    def stopped(self) -> Mapping[TopicPartition, Exception]:
        """Partitions that are assigned and not read, and why."""
        return {partition: refusal.error for partition, refusal in self._stopped.items()}

    def begin(
        self, partition: TopicPartition, offset: int | None, marks: HighwaterMarks, sequence: int, answer: Answer
    ) -> int | None:
        """A partition comes that a run of startpoint `sequence` committed at `offset`. Where the client begins.

        None: by its reset policy. A run that was stopped before it committed anything begins anew where it began.
        """
        offset = self._began.get(partition) if offset is None else offset
        if isinstance(answer, RefusedStartpoint):
            self._stop(partition, answer)
            return offset
        self._release(partition)
        if answer is None:
            self._assignment.assign(partition, offset, marks, startpoint=sequence)
            return offset
        kept = NO_MARKS if answer.reset_marks else marks
        self._assignment.assign(partition, answer.offset, kept, startpoint=answer.sequence, is_new_startpoint=True)
        return answer.offset

    def move(self, partition: TopicPartition, answer: Answer) -> None:
        """What `moved` said of a running partition, whose client has been sent there."""
        if isinstance(answer, RefusedStartpoint):
            self._stop(partition, answer)
        elif answer is not None:
            self._assignment.move(partition, answer.offset, answer.sequence, reset_marks=answer.reset_marks)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are gone."""
        gone = list(partitions)
        self._assignment.drop(gone)
        for partition in gone:
            self._release(partition)

    def is_time(self, now_s: float) -> bool:
        """Whether to ask for the version; by any clock that only goes on."""
        return self._look_every_s is not None and now_s >= self._next_look_s

    def wait_s(self, left_s: float) -> float:
        """How long of `left_s` (below 0: for ever) a client may wait before it is time to ask again."""
        if self._look_every_s is None:
            return left_s
        return self._look_every_s if left_s < 0 else min(left_s, self._look_every_s)

    def is_new(self, version: int) -> bool:
        """Whether there may be something that was not looked at."""
        return version != self._seen

    def looked(self, version: int, now_s: float) -> None:
        """Every startpoint that there was at `version` has been applied or refused."""
        assert self._look_every_s is not None, "only followers look"
        self._seen, self._next_look_s = version, now_s + self._look_every_s

    def raise_pending_error(self) -> None:
        """Raise the errors that were not raised yet, one at a time."""
        if self._pending_errors:
            raise self._pending_errors.pop(0)

    def _stop(self, partition: TopicPartition, refusal: RefusedStartpoint) -> None:
        known = self._stopped.get(partition)
        if known is None or known.sequence != refusal.sequence:
            self._pending_errors.append(refusal.error)
        self._stopped[partition] = refusal
        if partition in self._assignment and (began := self._assignment.began(partition)) is not None:
            self._began[partition] = began
        self._assignment.drop([partition])

    def _release(self, partition: TopicPartition) -> None:
        self._stopped.pop(partition, None)
        self._began.pop(partition, None)


Held: TypeAlias = frozenset[tuple[str, int]]
"""Topics and numbers of partitions."""
ASK_WITHIN_S = 5.0
"""For a question in the background."""
_WAIT_S = 0.5
_USED_FOR_S = 1.0
"""How long an answer serves after its first use, for the member's other partitions."""
_KEPT_FOR_S = 60.0
"""How long an answer waits for its first use: the longest time between two looks of a reader. If it is wrong by then,
this member claims another's partition, learns so from its next poll, and the other member claims it again."""


class OwnershipCheck:
    """The questions of one client; one is under way at a time. For one thread at a time.

    ask: begins to ask for a member id; what the answer raises, `is_held` raises.
    """

    def __init__(
        self, ask: Callable[[str], "Future[Held]"], wait_s: float = _WAIT_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._wait_s, self._now_s = ask, wait_s, now_s
        self._asked: _Question | None = None

    def is_held(self, member: str, topic: str, partition: int) -> bool:
        """Whether this member has it now; False while that is not known. `member`: its id, empty if it has none."""
        asked = self._asked
        if asked is None or asked.member != member or asked.is_over(self._now_s()):
            if not member:
                return False
            asked = self._asked = _Question(member, self._ask(member), self._now_s)
            wait([asked.answer], self._wait_s)
        if not asked.answer.done():
            return False
        asked.mark_used()
        return (topic, partition) in asked.answer.result()


class _Question:
    """One question to the coordinator, and how long its answer may be used."""

    def __init__(self, member: str, answer: "Future[Held]", now_s: Callable[[], float]) -> None:
        self.member, self.answer, self._now_s = member, answer, now_s
        self._arrived_s: float | None = None
        self._used_s: float | None = None
        answer.add_done_callback(self._arrives)

    def is_over(self, now_s: float) -> bool:
        """Whether to ask again."""
        if self._used_s is not None:
            return now_s > self._used_s + _USED_FOR_S
        return self._arrived_s is not None and now_s > self._arrived_s + _KEPT_FOR_S

    def mark_used(self) -> None:
        """The answer serves for a moment from its first use on."""
        if self._used_s is None:
            self._used_s = self._now_s()

    def _arrives(self, _: object) -> None:
        self._arrived_s = self._now_s()
