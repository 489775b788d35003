"""confluent-kafka's consumer, yielding each record once: positions are committed with the marks that belong to them.

    subscribe ─▶ assigned: committed offset and marks, one fact ─▶ poll, consume: replays are dropped ─▶ commit: both
                 revoked: your callback may commit, then they are forgotten      lost: forgotten, nothing is committed

What was yielded and not committed is yielded again after a crash. Every protocol of the client works: eager,
cooperative and `group.protocol=consumer`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

from filtering.extras import needed_by

with needed_by("filtering.consumers.confluent"):
    import confluent_kafka  # noqa: F401 - the message says how to get it

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException, Message, TopicPartition

from filtering.consumers.asking import Failure, ask, ask_aside
from filtering.consumers.assignment import Assignment, FilterSettings, PendingCommit
from filtering.consumers.confluent_asking import (
    REBALANCED,
    ask_partitions,
    failure_of,
    failure_of_transaction,
    missing_right,
    naming_rights,
)
from filtering.consumers.confluent_batches import carried_in_header, columns_of, passing
from filtering.consumers.confluent_marks import ConfluentMarksTopic
from filtering.consumers.confluent_starts import ConfluentMember, ConfluentStarts, PendingAssignment
from filtering.consumers.errors import CommitFailed, MarksTooLarge, PositionUnknown, SettingOverwritesMarks
from filtering.consumers.pauses import Pauses, Reason
from filtering.consumers.positions import METADATA_CHARACTERS_MAX, CommittedPosition, Stored, encode
from filtering.consumers.startpoints import Startpoints
from filtering.errors import BadFilterSetting, MissingRight
from filtering.marks import HighwaterMarks
from filtering.replay_filter import FilterCounts

_LOG = logging.getLogger(__name__)

_LOAD_AGAIN_S = 1.0
_Result = TypeVar("_Result")
OnPartitions = Callable[["ReplayFilteredConsumer", list[TopicPartition]], None]
OnCommit = Callable[[Exception | None], None]


class _Commit(NamedTuple):
    """What is being committed in another thread."""

    due: Sequence[PendingCommit]
    written: Mapping[tuple[str, int], Stored]
    on_commit: OnCommit | None
    answer: "Future[object]"


class ReplayFilteredConsumer:
    """A consumer of topics whose records carry stream metadata. Not thread-safe; its calls are the client's.

    config: librdkafka's settings; `group.id` is needed, auto-commit is refused by name. carrier: where the 20 bytes
    travel, "key" or "header". window, only_pids, ttl_s: ReplayFilter's. marks_topic: a compacted topic for marks that
    do not fit beside the offset (about 100 pairs of a partition do). startpoints: where an operator may send this
    group's partitions, when they come and while they are read.
    Raises SettingOverwritesMarks, BadFilterSetting, KafkaException.
    """

    def __init__(  # noqa: PLR0913 - what is read, and how
        self,
        config: Mapping[str, Any],
        *,
        carrier: Literal["key", "header"] = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        marks_topic: str | None = None,
        startpoints: Startpoints | None = None,
    ) -> None:
        if carrier not in {"key", "header"}:
            raise BadFilterSetting("carrier", carrier, '"key" or "header"')
        self._group = _group_of(config)
        self._config = {**config, "enable.auto.commit": False}
        self._key_of = Message.key if carrier == "key" else carried_in_header
        pids = None if only_pids is None else frozenset(only_pids)
        self._assignment = Assignment(FilterSettings(window=window, only_pids=pids, ttl_s=ttl_s))
        self._stored: dict[tuple[str, int], Stored] = {}
        self._failure: Exception | None = None
        self._missing: MissingRight | None = None
        self._client = Consumer(self._config)
        member = ConfluentMember(self._client, config, self._group)
        self._pauses = Pauses(
            lambda names: self._client.pause([TopicPartition(*one) for one in names]),
            lambda names: self._client.resume([TopicPartition(*one) for one in names]),
        )
        self._starts = ConfluentStarts(member, self._assignment, startpoints, self._marks_at, self._pauses)
        self._pending = PendingAssignment(self._client, self._starts.load, self._pauses)
        self._commit: _Commit | None = None
        self._on_assign: OnPartitions | None = None
        self._marks_topic = None if marks_topic is None else ConfluentMarksTopic(config, marks_topic)

    @property
    def client(self) -> Consumer:
        """The consumer inside, for what this class does not do; never commit or seek by it."""
        return self._client

    @property
    def stopped(self) -> Mapping[tuple[str, int], Exception]:
        """Partitions that are not read since their startpoint can't be applied, and why; poll and consume raise it."""
        return self._starts.watcher.stopped

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """What became of the records, by topic."""
        return self._assignment.counts

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
    ) -> None:
        """Join the group. The callbacks get this consumer; in `on_revoke` a commit still counts, in `on_lost` not.

        Partitions whose position or marks can't be loaded are not read, and the next read loads them again. What only
        passes, such as a coordinator that does not answer, is logged; anything else the read raises. `on_assign` is
        called once they are loaded.
        """
        self._on_assign = on_assign

        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            try:
                if on_revoke is not None:
                    on_revoke(self, partitions)
            finally:  # a commit that fails there must not leave us committing for who reads them next
                self._end_commit_and_let_go(partitions)

        def lost(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._end_commit_and_let_go(partitions)
            if on_lost is not None:
                on_lost(self, partitions)

        self._client.subscribe(list(topics), on_assign=self._assigned, on_revoke=revoked, on_lost=lost)

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these, without a group's help; each from its committed position, with the marks as of it."""
        self._end_commit()
        self._forget([TopicPartition(*one) for one in [*self._assignment, *self.stopped]])
        self._client.assign(self._starts.load(partitions))
        self._starts.pause_stopped()

    def poll(self, timeout_s: float = -1) -> Message | None:
        """The next record that is no replay, or an event of the client (`.error()` is set), or None after the time.

        Raises MissingRight where the brokers refuse, PairSplit, and what loading positions and startpoints raises.
        """
        deadline_s = None if timeout_s < 0 else time.monotonic() + timeout_s
        while True:
            self._check()
            left_s = -1 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            message = self._client.poll(wait_s := self._wait_s(left_s))
            if message is None and wait_s != left_s:
                continue  # there may be a new startpoint, or partitions to load again
            if message is None:
                return message
            if (event := message.error()) is not None:
                if (missing := missing_right(event, self._group, message.topic() or "")) is not None:
                    raise missing
                return message
            partition = (str(message.topic()), int(message.partition() or 0))
            if partition not in self._assignment:
                continue  # of a partition that has just gone
            try:
                if self._assignment.admit(partition, int(message.offset() or 0), self._key_of(message)):
                    return message
            except Exception as error:
                self._failure = error
                raise
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None

    def consume(self, num_messages: int = 500, timeout_s: float = -1) -> list[Message]:
        """As many records as the client hands over at once, without the replays, and its events; the fast road.

        It may be empty although there was something to read: all of it were replays. Raises as `poll`.
        """
        messages = self._consumed(num_messages, timeout_s)
        if not messages:
            return messages
        batch = columns_of(messages, self._assignment.topics, self._key_of)
        if batch is None or not all((batch.topic, one) in self._assignment for one in batch.spans):
            return self._one_by_one(messages)
        try:
            return passing(messages, self._assignment.admit_columns(*batch))
        except Exception as error:
            self._failure = error
            raise

    def commit(self) -> None:
        """Store, for every partition, the position behind what was yielded, with its marks.

        Raises CommitFailed while partitions move between members, or a coordinator does not answer for 30 s: read on
        and commit again. Raises MarksTooLarge, MissingRight, KafkaException for what does not pass. After any of them
        nothing of it counts, what follows the last commit comes again.
        """
        self._end_commit()
        due = self._assignment.due(_now_ms())
        if not due:
            return
        positions, written = self._positions(due)
        self._store(positions)
        self._on_committed(due, written)

    def commit_async(self, on_commit: OnCommit | None = None) -> bool:
        """Begin to commit as `commit` does, and return; False, and nothing is begun, while one is under way.

        A later read, commit or `close` of this consumer calls `on_commit(None)`, or with what `commit` would raise;
        without `on_commit` that is logged. Partitions do not go before it is over. Raises MarksTooLarge; marks that do
        not fit beside an offset are written before this returns.
        """
        self._end_commit(wait=False)
        if self._commit is not None:
            return False
        due = self._assignment.due(_now_ms())
        positions, written = self._positions(due)
        answer: Future[object]
        if due:
            answer = ask_aside(lambda: self._store(positions), f"pushrep commits of {self._group}")
        else:
            answer = Future()
            answer.set_result(None)
        self._commit = _Commit(due, written, on_commit, answer)
        return True

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Read nothing of these until `resume`, or until they go. Raises PositionUnknown for one that is not here."""
        self._pauses.add(Reason.CALLER, self._names(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these again. Raises PositionUnknown for one that is not here."""
        self._pauses.remove(Reason.CALLER, self._names(partitions))

    def position(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Where each is read next, which is what `commit` stores; OFFSET_INVALID where `auto.offset.reset` decides.

        Raises PositionUnknown for one that is not read here.
        """
        found = [(one, self._assignment.position((one.topic, one.partition))) for one in partitions]
        return [
            TopicPartition(one.topic, one.partition, OFFSET_INVALID if offset is None else offset)
            for one, offset in found
        ]

    def committed(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """What the group committed of each, OFFSET_INVALID for nothing; asks for 30 s. Raises KafkaException."""
        return self._starts.committed(partitions)

    def send_to_transaction(self, producer: Any) -> None:
        """Let a transactional producer commit the positions, so that what it wrote and they are one transaction.

        Call it before `producer.commit_transaction()`, then `transaction_committed()`; after an aborted one call
        `transaction_aborted()`: every partition goes back to its committed position.
        """
        self._end_commit()
        due = self._assignment.due(_now_ms())
        positions, written = self._positions(due)
        self._in_transaction = (due, written)
        group = self._client.consumer_group_metadata()
        ask(lambda left_s: producer.send_offsets_to_transaction(positions, group, left_s), failure_of_transaction)

    def transaction_committed(self) -> None:
        """The producer's transaction that had our positions is committed."""
        self._on_committed(*self._in_transaction)
        self._in_transaction = ((), {})

    def transaction_aborted(self) -> None:
        """It is not: read again from the committed positions, with their marks."""
        self._in_transaction = ((), {})
        self._back_to_committed()

    def _back_to_committed(self) -> None:
        """Every partition begins again, where nothing is committed at the first record that the client handed over."""
        self._end_commit()
        began = {one: self._assignment.began(one) for one in self._assignment}
        for start in self._starts.load([TopicPartition(*one) for one in began]):
            first = began[start.topic, start.partition]
            if start.offset < 0 and first is not None:  # nothing is committed yet: back to where this run began
                start.offset = first
            if start.offset >= 0:  # else nothing came of it: it stands where its reset policy put it
                self._client.seek(start)
        self._starts.pause_stopped()

    def seek(self, partition: TopicPartition) -> None:
        """Go on at `partition.offset`. The committed position brings its marks; any other begins with none.

        After a refused batch all other partitions go back to their committed positions: what came behind it is gone.
        """
        if self._failure is not None:
            self._back_to_committed()
            self._failure = None
        self._end_commit()
        [committed] = self._starts.committed([partition])
        if committed.offset == partition.offset:
            [start] = self._starts.load([partition])
            self._client.seek(start)
            self._starts.pause_stopped()
            return
        _LOG.warning(
            "%s-%d goes on at %d, which is not its committed position: it begins with empty marks",
            partition.topic, partition.partition, partition.offset,
        )  # fmt: skip
        name = (partition.topic, partition.partition)
        if name in self._pending:
            self._assignment.assign(name, partition.offset)
        else:
            self._assignment.seek(name, partition.offset)
        self._client.seek(partition)
        self._pending.forget([partition])

    def close(self) -> None:
        """Leave the group; commits nothing. A second call does nothing."""
        try:
            self._end_commit()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._client.close()  # raises what `on_revoke` raises
        finally:
            if self._marks_topic is not None:
                self._marks_topic.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    _in_transaction: tuple[Sequence[PendingCommit], Mapping[tuple[str, int], Stored]] = ((), {})

    def _check(self) -> None:
        """After a refused batch its records are gone from the client: going on would lose them."""
        self._end_commit(wait=False)
        if self._failure is not None:
            raise self._failure
        self._raise_missing()
        if loaded := self._unless_it_passes(self._pending.load_again):
            self._began(loaded)
        if not self._in_transaction[0]:  # what that commits is of the run before
            self._unless_it_passes(self._starts.follow)

    def _unless_it_passes(self, step: Callable[[], _Result]) -> _Result | None:
        """What `step` returns; None, and a warning, where it fails of what a later read may find mended."""
        try:
            return step()
        except Exception as error:
            if failure_of(error) is not Failure.PASSES:
                raise
            _LOG.warning("group %r: brokers do not answer now, a later read asks again: %s", self._group, error)
            return None

    def _wait_s(self, left_s: float) -> float:
        """So long of `left_s` (below 0: for ever) the client may wait."""
        wait_s = self._starts.watcher.wait_s(left_s)
        if len(self._pending) and (wait_s < 0 or wait_s > _LOAD_AGAIN_S):
            return _LOAD_AGAIN_S
        return wait_s

    def _consumed(self, num_messages: int, timeout_s: float) -> list[Message]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check()
            left_s = -1 if timeout_s < 0 else max(0.0, deadline_s - time.monotonic())
            messages: list[Message] = self._client.consume(num_messages, wait_s := self._wait_s(left_s))
            if messages or wait_s == left_s:
                return messages

    def _one_by_one(self, messages: Sequence[Message]) -> list[Message]:
        """Events, or several topics: rare enough to take the slow road.

        What stands before a refused record is yielded, since a commit would say so; the next call raises.
        """
        kept = []
        for message in messages:
            if (event := message.error()) is not None:
                missing = missing_right(event, self._group, message.topic() or "")
                if missing is None:
                    kept.append(message)
                else:
                    self._missing = missing
                continue
            partition, offset = (str(message.topic()), int(message.partition() or 0)), int(message.offset() or 0)
            if partition not in self._assignment:
                continue
            self._assignment.met(partition, offset)
            try:
                if self._failure is None and self._assignment.admit(partition, offset, self._key_of(message)):
                    kept.append(message)
            except Exception as error:  # noqa: BLE001 - told by the next call, unless this one has nothing to say
                self._failure = error
        if self._failure is not None and not kept:
            raise self._failure
        if not kept:
            self._raise_missing()
        return kept

    def _raise_missing(self) -> None:
        """Once: the client says it again."""
        missing, self._missing = self._missing, None
        if missing is not None:
            raise missing

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            starts = self._starts.load(partitions)
        except Exception as error:
            self._assign(partitions)
            self._pending.hold(partitions)
            if failure_of(error) is not Failure.PASSES:
                raise
            _LOG.warning("group %r: partitions came and can't be loaded now, reads try again: %s", self._group, error)
            return
        self._assign(starts)
        self._began(partitions)

    def _assign(self, starts: list[TopicPartition]) -> None:
        if self._is_incremental():
            self._client.incremental_assign(starts)
        else:
            self._client.assign(starts)

    def _end_commit_and_let_go(self, partitions: list[TopicPartition]) -> None:
        try:
            # Until these are given up the client does not join anew, under which membership the commit would count.
            self._end_commit()
        finally:
            self._release(partitions)

    def _release(self, partitions: list[TopicPartition]) -> None:
        self._forget(partitions)
        if self._is_incremental():
            self._client.incremental_unassign(partitions)
        else:
            self._client.unassign()

    def _began(self, partitions: list[TopicPartition]) -> None:
        """They are loaded, and the client has them."""
        self._starts.pause_stopped()
        if self._on_assign is not None:
            self._on_assign(self, partitions)

    def _is_incremental(self) -> bool:
        """Whether partitions come and go one by one, rather than all at once."""
        return self._config.get("group.protocol") == "consumer" or "cooperative" in str(
            self._config.get("partition.assignment.strategy", "")
        )

    def _marks_at(self, partition: tuple[str, int], position: CommittedPosition) -> HighwaterMarks | None:
        """The marks of a committed position; None if it has none."""
        stored = position.stored
        if stored is None:
            return position.marks
        self._stored[partition] = stored
        if self._marks_topic is None:
            raise BadFilterSetting(
                "marks_topic", None, f"needed: the marks of {partition[0]}-{partition[1]} lie in one"
            )
        return self._marks_topic.read(partition, stored)

    def _positions(self, due: Sequence[PendingCommit]) -> tuple[list[TopicPartition], dict[tuple[str, int], Stored]]:
        positions, written = [], {}
        for one in due:
            partition = (one.topic, one.partition)
            metadata = encode(CommittedPosition(one.marks, None, one.startpoint))
            if len(metadata) > METADATA_CHARACTERS_MAX:
                if self._marks_topic is None:
                    allowed = METADATA_CHARACTERS_MAX
                    raise MarksTooLarge(*partition, len(metadata), allowed, len(one.marks))
                written[partition] = self._marks_topic.write(self._group, partition, one.marks)
                metadata = encode(CommittedPosition(None, written[partition], one.startpoint))
            positions.append(TopicPartition(*partition, one.offset, metadata))
        return positions, written

    def _store(self, positions: list[TopicPartition]) -> None:
        """Commit these. Raises CommitFailed, KafkaException."""
        try:
            with naming_rights(self._group, positions[0].topic):
                ask_partitions(lambda _: self._client.commit(offsets=positions, asynchronous=False))
        except KafkaException as error:
            if error.args[0].code() in REBALANCED or failure_of(error) is not Failure.STAYS:
                raise CommitFailed(self._group, error.args[0]) from error
            raise

    def _end_commit(self, *, wait: bool = True) -> None:
        """What an asynchronous commit came to, if it is over or is waited for; the caller is told."""
        commit = self._commit
        if commit is None or not (wait or commit.answer.done()):
            return
        error = commit.answer.exception()
        self._commit = None
        if error is None:
            self._on_committed(commit.due, commit.written)
        if error is not None and not isinstance(error, Exception):
            raise error
        if commit.on_commit is not None:
            commit.on_commit(error)
        elif error is not None:
            _LOG.warning("an asynchronous commit failed: %s", error)

    def _names(self, partitions: Iterable[TopicPartition]) -> list[tuple[str, int]]:
        names = [(one.topic, one.partition) for one in partitions]
        for name in names:
            if name not in self._assignment and name not in self._pending and name not in self.stopped:
                raise PositionUnknown(*name)
        return names

    def _on_committed(self, due: Sequence[PendingCommit], written: Mapping[tuple[str, int], Stored]) -> None:
        """The commit is stored: what it replaced goes, and startpoints are consumed."""
        self._assignment.committed(due)
        for one in due:
            partition = (one.topic, one.partition)
            old = self._stored.pop(partition, None)
            if partition in written:
                self._stored[partition] = written[partition]
            if old is not None and self._marks_topic is not None:
                self._marks_topic.delete(old)
        self._starts.consumed(due)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        gone = list(partitions)
        self._starts.forget(gone)
        self._pauses.forget((one.topic, one.partition) for one in gone)  # the client remembers what is paused
        for one in gone:
            self._stored.pop((one.topic, one.partition), None)
        if not list(self._assignment):  # of a refused batch nothing is read any more: what comes, begins anew
            self._failure = None


def _group_of(config: Mapping[str, Any]) -> str:
    for name in ("enable.auto.commit", "auto.commit.enable"):
        if config.get(name, False) not in {False, "false", "False"}:
            raise SettingOverwritesMarks(name, config[name])
    group = config.get("group.id")
    if not group:
        raise BadFilterSetting("group.id", group, "needed: positions and marks are kept under it")
    return str(group)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
