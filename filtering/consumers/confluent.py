"""confluent-kafka's consumer, yielding each record once: positions are committed with the marks that belong to them.

    subscribe ─▶ assigned: committed offset and marks, one fact ─▶ poll, consume: replays are dropped ─▶ commit: both
                 revoked: your callback may commit, then they are forgotten      lost: forgotten, nothing is committed

After a crash, records that were yielded and not committed are yielded again. Every protocol of the client works: eager,
cooperative and `group.protocol=consumer`.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeVar

from filtering import tracing
from filtering.closing import ClosedAtExit
from filtering.extras import needed_by

with needed_by("filtering.consumers.confluent"):
    import confluent_kafka  # noqa: F401 - the message says how to get it

import numpy as np
import numpy.typing as npt
from confluent_kafka import OFFSET_END, OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition

from filtering.consumers.assignment import FilterSettings, Spans
from filtering.consumers.commits import (
    NO_AUTO_COMMIT,
    CommitFailed,
    CommitPosition,
    DeleteMarks,
    ReadMarks,
    WriteMarks,
    marks_topic_needed,
)
from filtering.consumers.confluent_client import (
    REBALANCED,
    ConfluentMarksTopic,
    ConfluentMember,
    ask_partitions,
    committed_offset,
    failure_of,
    failure_of_transaction,
    is_too_early,
    missing_right,
    naming_rights,
)
from filtering.consumers.group_member import (
    AskCommitted,
    AskStartpoints,
    ClientCall,
    ClientFacts,
    GroupMember,
    Pause,
    Reset,
    Resume,
    Seek,
    Steps,
    run,
)
from filtering.consumers.startpoints import Startpoints
from filtering.errors import BadFilterSetting, MissingRight, NotDeserialized
from filtering.replay_filter import FilterCounts
from filtering.retry import Failure, ask
from filtering.serializers import Deserializer
from filtering.stream_metadata import KEY_BYTES, METADATA_HEADER

_LOG = logging.getLogger(__name__)

_Result = TypeVar("_Result")
OnPartitions = Callable[["ReplayFilteredConsumer", list[TopicPartition]], None]


class ReplayFilteredConsumer(ClosedAtExit):
    """A consumer of topics whose records carry stream metadata. Not thread-safe; its calls are the client's.

    config: librdkafka's settings; `group.id` is needed, auto-commit is refused by name. carrier: where the 20 bytes
    travel, "key" or "header", or a function of the record that returns them, or None for a record that has no position.
    window, only_pids, ttl_s: ReplayFilter's. retention_ms: the topics', the least ttl_s; 0 for any. marks_topic: a
    compacted topic for marks that do not fit beside the offset (about 100 pairs of a partition do). startpoints: their
    store, by which an operator moves this group's partitions, when they are assigned and while they are read.
    deserializer: makes each value of its bytes: a function, or one of confluent-kafka's.
    Raises BadFilterSetting, KafkaException.
    """

    def __init__(  # noqa: PLR0913 - what is read, and how
        self,
        config: Mapping[str, Any],
        *,
        carrier: Literal["key", "header"] | Callable[[Message], bytes | None] = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        retention_ms: int | None = None,
        marks_topic: str | None = None,
        startpoints: Startpoints | None = None,
        deserializer: Callable[[bytes], Any] | None = None,
    ) -> None:
        if not callable(carrier) and carrier not in {"key", "header"}:
            raise BadFilterSetting("carrier", carrier, '"key", "header" or a function')
        self._deserializer = None if deserializer is None else Deserializer(deserializer)
        self._group = _group_of(config)
        self._config = {**config, "enable.auto.commit": False}
        pids = None if only_pids is None else frozenset(only_pids)
        self._missing: MissingRight | None = None
        self._client = Consumer(self._config)
        self._facts = ConfluentMember(self._client, config, self._group)
        settings = FilterSettings(
            window=window, only_pids=pids, ttl_s=ttl_s, retention_ms=retention_ms,
            carrier="function" if callable(carrier) else carrier,
        )  # fmt: skip
        facts = ClientFacts(self._facts.facts_of, failure_of, is_too_early, carried_in_header)
        self._member = GroupMember(self._group, settings, startpoints, facts)
        own = self._member.failing_with(carrier) if callable(carrier) else None
        self._key_of = _of_records(own) if own else Message.key if carrier == "key" else carried_in_header
        self._in_transaction: Sequence[CommitPosition] = ()
        self._on_assign: OnPartitions | None = None
        self._marks_topic = None if marks_topic is None else ConfluentMarksTopic(config, marks_topic)

    @property
    def client(self) -> Consumer:
        """The consumer inside, for what this class does not do; never commit or seek by it."""
        return self._client

    @property
    def stopped(self) -> Mapping[tuple[str, int], Exception]:
        """Partitions that are not read since their startpoint can't be applied, and why; poll and consume raise it."""
        return self._member.watcher.stopped

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """What became of the records, by topic."""
        return self._member.assignment.counts

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
    ) -> None:
        """Join the group. The callbacks get this consumer; in `on_revoke` a commit still counts, in `on_lost` not.

        Partitions whose position or marks can't be loaded are not read, and the next read loads them again. A transient
        error, such as a coordinator that does not answer, is logged; any other is raised by the read. `on_assign` is
        called once they are loaded.
        """
        self._on_assign = on_assign

        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            try:
                if on_revoke is not None:
                    on_revoke(self, partitions)
            finally:  # a commit that fails there must not make us commit for the next owner
                self._release(partitions)

        def lost(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._release(partitions)
            if on_lost is not None:
                on_lost(self, partitions)

        self._client.subscribe(list(topics), on_assign=self._assigned, on_revoke=revoked, on_lost=lost)

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these, without a group's help; each from its committed position, with the marks as of it."""
        self._forget(self._member.partitions)
        self._client.assign(_at(self._run(self._member.load(_names(partitions)))))
        self._run(self._member.pause_stopped())

    def poll(self, timeout_s: float = -1) -> Message | None:
        """The next record that is no replay, or an event of the client (`.error()` is set), or None after the time.

        Raises MissingRight where the brokers refuse, PairSplit, WrongCarrier, NotDeserialized, and what loading
        positions and startpoints raises.
        """
        deadline_s = None if timeout_s < 0 else time.monotonic() + timeout_s
        start_ns = tracing.now_ns()
        while True:
            self._check()
            left_s = -1 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            message = self._client.poll(wait_s := self._member.wait_s(left_s))
            if message is None and wait_s != left_s:
                continue  # time to look for new startpoints, or to load partitions again
            if message is None:
                return message
            if (event := message.error()) is not None:
                if (missing := missing_right(event, self._group, message.topic() or "")) is not None:
                    raise missing
                return message
            partition = (str(message.topic()), int(message.partition() or 0))
            if partition not in self._member.assignment:
                continue  # of a partition that has just gone
            if self._member.admit(partition, int(message.offset() or 0), self._key_of(message), message):
                kept = self._with_values([message])
                return self._received(kept, start_ns)[0] if start_ns else kept[0]
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None

    def consume(self, num_messages: int = 500, timeout_s: float = -1) -> list[Message]:
        """As many records as the client hands over at once, without the replays, and its events; the fast path.

        It may be empty although there was something to read: if all were replays. Raises as `poll`.
        """
        start_ns = tracing.now_ns()
        messages = self._consumed(num_messages, timeout_s)
        if not messages:
            return messages
        assignment = self._member.assignment
        batch = columns_of(messages, assignment.topics, self._key_of)
        if batch is None or not all((batch.topic, one) in assignment for one in batch.spans):
            return self._received(self._with_values(self._one_by_one(messages)), start_ns)
        kept = self._with_values(passing(messages, self._member.admit_columns(*batch, messages)))
        return self._received(kept, start_ns)

    def _received(self, messages: list[Message], start_ns: int) -> list[Message]:
        """The same, and their span."""
        if start_ns and (records := [one for one in messages if one.error() is None]):
            tracing.note_received(self._group, records, str(records[0].topic()), start_ns)
        return messages

    def commit(self) -> None:
        """Store, for every partition, the position behind what was yielded, with its marks.

        Raises CommitFailed while partitions move between members, or a coordinator does not answer for 60 s: read on
        and commit again. Raises MissingRight, KafkaException for what does not pass, BadFilterSetting for marks that do
        not fit. After any of them nothing is committed, and what follows the last commit is read again.
        """
        while positions := self._positions():
            try:
                self._store(positions)
            except KafkaException as error:
                is_too_large = error.args[0].code() == KafkaError.OFFSET_METADATA_TOO_LARGE
                if is_too_large and self._member.refused(positions):
                    continue
                raise
            self._run(self._member.committed(positions))
            return

    def position(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Where each is read next, which is what `commit` stores; OFFSET_INVALID where `auto.offset.reset` decides.

        Raises BadFilterSetting for one that is not read here.
        """
        found = [(one, self._member.assignment.position((one.topic, one.partition))) for one in partitions]
        return [
            TopicPartition(one.topic, one.partition, OFFSET_INVALID if offset is None else offset)
            for one, offset in found
        ]

    def send_to_transaction(self, producer: Any) -> None:
        """Let a transactional producer commit the positions, so that what it wrote and they are one transaction.

        Call it before `producer.commit_transaction()`, then `transaction_committed()`; after an aborted one call
        `transaction_aborted()`: every partition goes back to its committed position.
        """
        positions = self._in_transaction = self._positions()
        group, offsets = self._client.consumer_group_metadata(), _offsets(positions)
        ask(lambda left_s: producer.send_offsets_to_transaction(offsets, group, left_s), failure_of_transaction)

    def transaction_committed(self) -> None:
        """The producer's transaction that had our positions is committed."""
        positions, self._in_transaction = self._in_transaction, ()
        self._run(self._member.committed(positions))

    def transaction_aborted(self) -> None:
        """It is not: read again from the committed positions, with their marks."""
        self._in_transaction = ()
        self._run(self._member.back_to_committed())

    def seek(self, partition: TopicPartition) -> None:
        """Go on at `partition.offset`. The committed position brings its marks; any other begins with none.

        After a refused batch all other partitions go back to their committed positions: the records after it are gone.
        """
        self._run(self._member.seek((partition.topic, partition.partition), partition.offset))

    def close(self) -> None:
        """Leave the group; commits nothing. A second call does nothing."""
        try:
            self._client.close()  # raises what `on_revoke` raises
        finally:
            if self._marks_topic is not None:
                self._marks_topic.close()

    def _check(self) -> None:
        """Raise why nothing can be read; load what could not be loaded; apply new startpoints."""
        if self._member.failure is not None:  # its records are gone from the client: going on would lose them
            raise self._member.failure
        self._raise_missing()
        if self._member.holds_any and (loaded := self._run(self._member.load_again())):
            self._began([TopicPartition(*one) for one in loaded])
        if self._member.follows_startpoints and not self._in_transaction:  # its positions are of before a move
            self._run(self._member.follow(time.monotonic()))

    def _run(self, steps: Steps[_Result]) -> _Result:
        return run(steps, self._do)

    def _do(self, call: ClientCall) -> object:
        match call:
            case Seek(partition, offset):
                self._client.seek(TopicPartition(*partition, OFFSET_INVALID if offset is None else offset))
            case Reset(partition):
                self._client.seek(TopicPartition(*partition, OFFSET_INVALID))
            case Pause(partitions):
                self._client.pause([TopicPartition(*one) for one in partitions])
            case Resume(partitions):
                self._client.resume([TopicPartition(*one) for one in partitions])
            case AskCommitted(partitions):
                found = self._facts.committed([TopicPartition(*one) for one in partitions])
                return {(one.topic, one.partition): committed_offset(one) for one in found}
            case AskStartpoints(question):
                return question()
            case _:
                return self._do_with_marks(call)
        return None

    def _do_with_marks(self, call: ReadMarks | WriteMarks | DeleteMarks) -> object:
        if (topic := self._marks_topic) is None:
            if isinstance(call, DeleteMarks):  # of another consumer, whose position was left by seek
                return None
            raise marks_topic_needed(call)
        match call:
            case ReadMarks(partition, stored):
                return topic.read(partition, stored)
            case WriteMarks(due):
                return topic.write(self._group, (due.topic, due.partition), due.marks)
            case DeleteMarks(stored):
                topic.delete(stored)
        return None

    def _with_values(self, messages: list[Message]) -> list[Message]:
        """The records, their values deserialized in place; events stay as they are."""
        if self._deserializer is None:
            return messages
        records = [one for one in messages if one.error() is None]
        failed = []
        found = self._deserializer.read((str(one.topic()), one.value(), one.headers()) for one in records)
        for message, (value, error) in zip(records, found, strict=True):
            if error is None:
                message.set_value(value)
            else:
                failed.append((message, error))
        if failed:
            refused = {id(one) for one, _ in failed}
            raise NotDeserialized([one for one in messages if id(one) not in refused], failed) from failed[0][1]
        return messages

    def _consumed(self, num_messages: int, timeout_s: float) -> list[Message]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check()
            left_s = -1 if timeout_s < 0 else max(0.0, deadline_s - time.monotonic())
            messages: list[Message] = self._client.consume(num_messages, wait_s := self._member.wait_s(left_s))
            if messages or wait_s == left_s:
                return messages

    def _one_by_one(self, messages: Sequence[Message]) -> list[Message]:
        """Events, or several topics: rare enough to take the slow path.

        Records before a refused one are yielded, since a commit would cover them; the next call raises.
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
            if partition not in self._member.assignment:
                continue
            self._member.assignment.met(partition, offset)
            with suppress(Exception):  # it is the member's `failure` now: the next call raises it, unless this one does
                if self._member.failure is None and self._member.admit(
                    partition, offset, self._key_of(message), message
                ):
                    kept.append(message)
        if self._member.failure is not None and not kept:
            raise self._member.failure
        if not kept:
            self._raise_missing()
        return kept

    def _raise_missing(self) -> None:
        """Once: the client repeats it."""
        missing, self._missing = self._missing, None
        if missing is not None:
            raise missing

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            starts = self._run(self._member.load(_names(partitions)))
        except Exception as error:
            # With a place, else the client asks for the committed one by itself; if it is refused, no seek helps.
            self._assign([TopicPartition(one.topic, one.partition, OFFSET_END) for one in partitions])
            self._run(self._member.hold(_names(partitions)))
            if failure_of(error) is not Failure.TRANSIENT:
                raise
            _LOG.warning("group %r: partitions came and can't be loaded now, reads try again: %s", self._group, error)
            return
        self._assign(_at(starts))
        self._began(partitions)

    def _assign(self, starts: list[TopicPartition]) -> None:
        if self._is_incremental():
            self._client.incremental_assign(starts)
        else:
            self._client.assign(starts)

    def _release(self, partitions: list[TopicPartition]) -> None:
        self._forget(_names(partitions))
        if self._is_incremental():
            self._client.incremental_unassign(partitions)
        else:
            self._client.unassign()

    def _began(self, partitions: list[TopicPartition]) -> None:
        self._run(self._member.pause_stopped())
        if self._on_assign is not None:
            self._on_assign(self, partitions)

    def _is_incremental(self) -> bool:
        """Whether partitions come and go one by one, rather than all at once."""
        return self._config.get("group.protocol") == "consumer" or "cooperative" in str(
            self._config.get("partition.assignment.strategy", "")
        )

    def _positions(self) -> list[CommitPosition]:
        return self._run(self._member.positions(time.time_ns() // 1_000_000))

    def _store(self, positions: Sequence[CommitPosition]) -> None:
        offsets = _offsets(positions)
        try:
            with naming_rights(self._group, offsets[0].topic):
                ask_partitions(lambda _: self._client.commit(offsets=offsets, asynchronous=False))
        except KafkaException as error:
            if error.args[0].code() in REBALANCED or failure_of(error) is not Failure.PERMANENT:
                raise CommitFailed(self._group, error.args[0]) from error
            raise

    def _forget(self, partitions: Iterable[tuple[str, int]]) -> None:
        if paused := self._member.forget(partitions):  # the client remembers what is paused
            self._client.resume([TopicPartition(*one) for one in paused])


def _names(partitions: Iterable[TopicPartition]) -> list[tuple[str, int]]:
    return [(one.topic, one.partition) for one in partitions]


def _at(starts: Mapping[tuple[str, int], int | None]) -> list[TopicPartition]:
    return [TopicPartition(*one, OFFSET_INVALID if start is None else start) for one, start in starts.items()]


def _offsets(positions: Iterable[CommitPosition]) -> list[TopicPartition]:
    return [TopicPartition(due.topic, due.partition, due.offset, metadata) for due, metadata, _ in positions]


def _group_of(config: Mapping[str, Any]) -> str:
    for name in ("enable.auto.commit", "auto.commit.enable"):
        if config.get(name, False) not in {False, "false", "False"}:
            raise BadFilterSetting(name, config[name], NO_AUTO_COMMIT)
    group = config.get("group.id")
    if not group:
        raise BadFilterSetting("group.id", group, "needed: positions and marks are kept under it")
    return str(group)


class MessageColumns(NamedTuple):
    """A batch of one topic, without events. `partitions`: one number where all are of it."""

    topic: str
    keys: bytes | list[bytes | None]
    partitions: int | npt.NDArray[Any]
    spans: Spans


def columns_of(
    messages: Sequence[Message], topics: Collection[str], key_of: Callable[[Message], bytes | None]
) -> MessageColumns | None:
    """The batch in columns; None for one that holds events of the client, or records of several topics.

    topics: all that these messages can be of.
    """
    keys = list(map(key_of, messages))
    column: bytes | list[bytes | None] = keys
    try:
        joined = b"".join(keys)  # type: ignore[arg-type] # None is what is found out
    except TypeError:  # an event has no key, and some records have none
        if any(map(Message.error, messages)):
            return None
    else:
        if set(map(len, keys)) == {KEY_BYTES}:  # type: ignore[arg-type] # as above
            column = joined
    found = topics if len(topics) == 1 else set(map(Message.topic, messages))
    if len(found) != 1:
        return None
    [topic] = found
    numbers: list[Any] = list(map(Message.partition, messages))
    where, spans = _spans(messages, numbers)
    return MessageColumns(str(topic), column, where, spans)


def carried_in_header(message: Message) -> bytes | None:
    """The last header of our name; as `Message.key` for the carrier "header"."""
    for name, value in reversed(message.headers() or ()):
        if name == METADATA_HEADER:
            return value if isinstance(value, bytes) else None
    return None


def _of_records(key_of: Callable[[Message], bytes | None]) -> Callable[[Message], bytes | None]:
    """`key_of` for records; None for the client's events, which have no key."""
    return lambda message: None if message.error() else key_of(message)


def passing(messages: list[Message], passes: npt.NDArray[np.bool_]) -> list[Message]:
    """Those that pass."""
    return messages if passes.all() else list(compress(messages, passes.tobytes()))


def _spans(messages: Sequence[Message], numbers: list[int]) -> tuple[int | npt.NDArray[Any], Spans]:
    """Where each record lies, and the first and the last offset of each partition."""
    try:
        where: npt.NDArray[Any] = np.frombuffer(bytes(numbers), np.uint8)  # a third of what np.array takes
    except ValueError:  # above 255
        where = np.array(numbers)
    starts = [0, *(np.flatnonzero(where[1:] != where[:-1]) + 1).tolist()]
    ends = [*(start - 1 for start in starts[1:]), len(messages) - 1]
    first = {numbers[at]: messages[at].offset() for at in reversed(starts)}
    last = {numbers[at]: messages[at].offset() for at in ends}
    spans = {number: (int(first[number] or 0), int(offset or 0)) for number, offset in last.items()}
    return (numbers[0] if len(spans) == 1 else where), spans
