"""aiokafka's consumer, yielding each record once: positions are committed with the marks that belong to them.

    start ─▶ assigned: committed offset and marks, one fact ─▶ getone, getmany: replays are dropped ─▶ commit: both
             revoked: your callback may commit, then they are forgotten

After a crash, records that were yielded and not committed are yielded again. aiokafka reads a commit's metadata
through its admin client only, and knows eager rebalances only. Marks that do not fit beside an offset need
confluent-kafka's consumer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from filtering import tracing
from filtering.extras import needed_by

with needed_by("filtering.consumers.aiokafka"):
    import aiokafka  # noqa: F401 - the message says how to get it

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    IllegalStateError,
    KafkaError,
    NoError,
    OffsetMetadataTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata

from filtering.consumers.assignment import FilterSettings
from filtering.consumers.commits import (
    END,
    NO_AUTO_COMMIT,
    CommitFailed,
    CommitPosition,
    DeleteMarks,
    ReadMarks,
    WriteMarks,
    marks_topic_needed,
)
from filtering.consumers.group_member import (
    AskCommitted,
    AskStartpoints,
    ClientCall,
    ClientFacts,
    CommittedOffset,
    GroupMember,
    Pause,
    Reset,
    Resume,
    Seek,
    Steps,
    run_async,
)
from filtering.consumers.startpoints import ASK_WITHIN_S, Held, OwnershipCheck, PartitionFacts, Startpoints
from filtering.errors import BadFilterSetting, MissingRight, NotDeserialized
from filtering.replay_filter import FilterCounts
from filtering.retry import TIMEOUT_S, Failure, ask_async
from filtering.serializers import Deserialized, Deserializer
from filtering.stream_metadata import METADATA_HEADER

_SHARED = frozenset({"bootstrap_servers", "security_protocol", "ssl_context", "client_id", "request_timeout_ms"})

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")
OnPartitions = Callable[["ReplayFilteredConsumer", set[TopicPartition]], Awaitable[None]]


def failure_of(error: BaseException) -> Failure:
    """How `retry.ask_async` treats aiokafka's KafkaError."""
    if isinstance(error, UnknownTopicOrPartitionError):
        return Failure.NOT_THERE
    # NoError: how the client raises a broker's error about one partition when the answer as a whole is right.
    if isinstance(error, NoError | TimeoutError) or (isinstance(error, KafkaError) and error.retriable):
        return Failure.TRANSIENT
    return Failure.PERMANENT


def missing_right(error: BaseException, group: str, topic: str, on_topic: str = "READ") -> MissingRight | None:
    """The right that the brokers say is missing, if that is what they say. on_topic: what was done with the topic."""
    if isinstance(error, GroupAuthorizationFailedError):
        return MissingRight("READ", "group", group, repr(error))
    if isinstance(error, TopicAuthorizationFailedError):
        named = error.args[0] if error.args else None
        names = sorted(named) if isinstance(named, set | frozenset | list | tuple) else []
        return MissingRight(on_topic, "topic", str(names[0]) if names else topic, repr(error))
    return None


@contextmanager
def naming_rights(group: str, topic: str, on_topic: str = "READ") -> Iterator[None]:
    """An error of a missing right becomes MissingRight inside of this block."""
    try:
        yield
    except KafkaError as error:
        missing = missing_right(error, group, topic, on_topic)
        if missing is None:
            raise
        raise missing from error


async def ask_committed(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition], timeout_s: float = TIMEOUT_S
) -> Mapping[TopicPartition, OffsetAndMetadata]:
    """The committed position of each, offset -1 where there is none. Raises the client's KafkaError.

    A broker that is no longer the group's coordinator refuses the whole answer. The client overlooks that and
    hands over an empty one, which reads as "nothing was ever committed".
    """
    if not partitions:
        return {}

    async def question() -> Mapping[TopicPartition, OffsetAndMetadata]:
        found: Mapping[TopicPartition, OffsetAndMetadata] = await admin.list_consumer_group_offsets(
            group, partitions=list(partitions)
        )
        if missing := [one for one in partitions if one not in found]:
            raise GroupCoordinatorNotAvailableError(f"the committed positions of {missing} are not in the answer")
        return found

    with naming_rights(group, partitions[0].topic):
        return await ask_async(question, failure_of, timeout_s)


async def ask_held(admin: AIOKafkaAdminClient, group: str, member: str) -> Held:
    """The partitions that the group's coordinator says this member has; empty if it does not answer within 5 s."""
    try:
        async with asyncio.timeout(ASK_WITHIN_S):
            [found] = await admin.describe_consumer_groups([group])
    except (KafkaError, TimeoutError):
        return frozenset()
    members = [one for described in found.groups for one in described[5]]  # by place: names differ by version
    assigned = [one[-1] for one in members if one[0] == member]
    held = [ConsumerProtocol.ASSIGNMENT.decode(one).partitions() for one in assigned if one]
    return frozenset((one.topic, one.partition) for partitions in held for one in partitions)


class ReplayFilteredConsumer:
    """A consumer of topics whose records carry stream metadata. Use it in `async with`, in one event loop.

    topics: what is read. group_id: positions and marks are kept under it. carrier: where the 20 bytes travel, "key" or
    "header", or a function of the record that returns them, or None for a record that has no position. window,
    only_pids, ttl_s: ReplayFilter's. retention_ms: the topics', the least ttl_s; 0 for any. startpoints: their store,
    by which an operator moves this group's partitions; it is asked in a thread, when partitions are assigned and while
    they are read. deserializer: makes each value of its bytes: a function, or one of confluent-kafka's, which then runs
    in a thread, since it may wait for a registry. on_assign, on_revoke: called with this consumer and partitions; in
    `on_revoke` a commit still counts. settings: AIOKafkaConsumer's; auto-commit is refused by name.
    Raises BadFilterSetting; entering it raises the client's KafkaError.
    """

    def __init__(  # noqa: PLR0913 - what is read, and how
        self,
        *topics: str,
        group_id: str,
        carrier: Literal["key", "header"] | Callable[[ConsumerRecord], bytes | None] = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        retention_ms: int | None = None,
        startpoints: Startpoints | None = None,
        deserializer: Callable[[bytes], Any] | None = None,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        **settings: Any,
    ) -> None:
        if not callable(carrier) and carrier not in {"key", "header"}:
            raise BadFilterSetting("carrier", carrier, '"key", "header" or a function')
        if settings.pop("enable_auto_commit", False):
            raise BadFilterSetting("enable_auto_commit", True, NO_AUTO_COMMIT)
        if not group_id:
            raise BadFilterSetting("group_id", group_id, "needed: positions and marks are kept under it")
        self._deserializer = None if deserializer is None else Deserializer(deserializer)
        self._topics, self._group, self._settings = topics, group_id, settings
        pids = None if only_pids is None else frozenset(only_pids)
        settings_of_filter = FilterSettings(
            window=window, only_pids=pids, ttl_s=ttl_s, retention_ms=retention_ms,
            carrier="function" if callable(carrier) else carrier,
        )  # fmt: skip
        facts = ClientFacts(self._facts_of, failure_of, lambda _: False, _header)
        self._member = GroupMember(group_id, settings_of_filter, startpoints, facts)
        own = self._member.failing_with(carrier) if callable(carrier) else None
        self._key_of = own or (_key if carrier == "key" else _header)
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._moving = asyncio.Lock()
        self._not_yielded: dict[tuple[str, int], int] = {}  # first offset handed over to a call that was cancelled
        self._committing = asyncio.Lock()
        self._client: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._ownership = OwnershipCheck(self._ask_held)

    @property
    def client(self) -> AIOKafkaConsumer:
        """The consumer inside, for what this class does not do; never commit or seek by it."""
        if self._client is None:
            raise BadFilterSetting("consumer", "not started", "used in `async with`")
        return self._client

    @property
    def stopped(self) -> Mapping[tuple[str, int], Exception]:
        """Partitions that are not read since their startpoint can't be applied, and why; getone, getmany raise it."""
        return self._member.watcher.stopped

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """What became of the records, by topic."""
        return self._member.assignment.counts

    async def start(self) -> None:
        """Connect and join the group."""
        shared = {name: value for name, value in self._settings.items() if name in _SHARED or name.startswith("sasl_")}
        self._admin = AIOKafkaAdminClient(**shared)
        await self._admin.start()
        self._client = AIOKafkaConsumer(**self._settings, group_id=self._group, enable_auto_commit=False)
        self._loop = asyncio.get_running_loop()
        self._client.subscribe(list(self._topics), listener=_Listener(self))
        try:
            with naming_rights(self._group, ", ".join(self._topics)):
                await self._client.start()
        except BaseException:
            await self.close()
            raise

    async def getone(self) -> ConsumerRecord:
        """The next record that is no replay. Raises PairSplit, WrongCarrier, NotDeserialized, the client's errors."""
        start_ns = tracing.now_ns()
        while True:
            await self._follow()
            moves = self._member.moves
            for record in await self._next():
                partition = (record.topic, record.partition)
                values = await self._begin_read({partition: record.offset}, [record])
                try:
                    if self._is_read(partition, moves) and self._member.admit(
                        partition, record.offset, self._key_of(record), record
                    ):
                        kept = self._with_values({TopicPartition(*partition): [record]}, values)[partition][0]
                        if start_ns:
                            tracing.note_received(self._group, [kept], record.topic, start_ns)
                        return kept
                finally:
                    self._moving.release()

    async def getmany(
        self, *, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """What the client hands over at once, without the replays; the fast path. Raises as `getone`.

        It may be empty although there was something to read: if all were replays.
        """
        deadline_s, start_ns = time.monotonic() + timeout_ms / 1000, tracing.now_ns()
        while True:
            await self._follow()
            moves, left_s = self._member.moves, max(0.0, deadline_s - time.monotonic())
            wait_s = self._member.wait_s(left_s)
            with naming_rights(self._group, ", ".join(self._topics)):
                found = await self.client.getmany(timeout_ms=math.ceil(wait_s * 1000), max_records=max_records)
            if found or wait_s >= left_s:
                break
        values = await self._begin_read(
            {(one.topic, one.partition): records[0].offset for one, records in found.items() if records},
            [one for records in found.values() for one in records],
        )
        try:
            kept = self._with_values(self._kept(found, moves), values)
        finally:
            self._moving.release()
        if start_ns and kept:
            tracing.note_received(self._group, chain(*kept.values()), next(iter(kept)).topic, start_ns)
        return kept

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        while True:
            yield await self.getone()

    async def commit(self) -> None:
        """Store, for every partition, the position behind what was yielded, with its marks.

        Other tasks may read on meanwhile, and commits go one after the other: to commit without waiting, make a task of
        it. Raises CommitFailed while partitions move between members: read on and commit again. Raises BadFilterSetting
        for marks that do not fit, and the client's KafkaError. After any of them nothing is committed, and records
        after the last commit are read again.
        """
        async with self._committing:
            while positions := await self._run(self._member.positions(time.time_ns() // 1_000_000)):
                if await self._store(positions):
                    await self._run(self._member.committed(positions))
                    return

    async def _store(self, positions: Sequence[CommitPosition]) -> bool:
        """False: the broker allows less metadata, and another try is worth it."""
        offsets = {
            TopicPartition(due.topic, due.partition): (due.offset, metadata + END) for due, metadata, _ in positions
        }
        try:
            with naming_rights(self._group, positions[0].due.topic):
                await self.client.commit(offsets)
        except OffsetMetadataTooLargeError:
            if self._member.refused(positions):
                return False
            raise
        except (CommitFailedError, IllegalStateError) as error:  # the second: a partition has just gone
            raise CommitFailed(self._group, error) from error
        return True

    def position(self, partition: TopicPartition) -> int | None:
        """Where it is read next, which is what `commit` stores; None while `auto_offset_reset` decides.

        Raises BadFilterSetting for one that is not read here.
        """
        return self._member.assignment.position((partition.topic, partition.partition))

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. The committed position brings its marks; any other begins with none.

        After a refused batch all other partitions go back to their committed positions: the records after it are gone.
        """
        async with self._moving:
            await self._run(self._member.seek((partition.topic, partition.partition), offset))

    async def close(self) -> None:
        """Leave the group; commits nothing. A second call does nothing."""
        client, self._client = self._client, None
        admin, self._admin = self._admin, None
        if client is not None:
            await client.stop()
        if admin is not None:
            await admin.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[_Result]) -> _Result:
        return await run_async(steps, self._do)

    async def _do(self, call: ClientCall) -> object:
        match call:
            case Seek(partition, offset):
                at = TopicPartition(*partition)
                if offset is not None:
                    self.client.seek(at, offset)
                elif self._settings.get("auto_offset_reset", "latest") == "earliest":
                    await self.client.seek_to_beginning(at)
                else:
                    await self.client.seek_to_end(at)
            case AskCommitted(partitions):
                found = await ask_committed(self._admin, self._group, [TopicPartition(*one) for one in partitions])
                return {
                    (one.topic, one.partition): CommittedOffset(at.offset if at.offset >= 0 else None, at.metadata)
                    for one, at in found.items()
                }
            case AskStartpoints(question):
                return await asyncio.to_thread(question)
            case Pause(partitions):
                self.client.pause(*(TopicPartition(*one) for one in partitions))
            case Resume(partitions):
                self.client.resume(*(TopicPartition(*one) for one in partitions))
            case ReadMarks() | WriteMarks():
                raise marks_topic_needed(call)
            case DeleteMarks() | Reset():
                pass  # marks of another consumer, whose position was left by seek; the client has reset by itself
        return None

    # ---- what startpoints ask about a log: called in a thread, while the loop waits for it

    def _facts_of(self, topic: str, partition: int, position: int | None) -> PartitionFacts:
        return PartitionFacts(topic, partition, self._bounds, self._first_at, position, self._is_held)

    def _is_held(self, topic: str, partition: int) -> bool:
        member = self.client._coordinator.member_id  # noqa: SLF001 - its only place
        return self._ownership.is_held(member, topic, partition)

    def _ask_held(self, member: str) -> "Future[Held]":
        return asyncio.run_coroutine_threadsafe(ask_held(self._admin, self._group, member), self._loop)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        asked = TopicPartition(topic, partition)
        start = self._in_loop(lambda: self.client.beginning_offsets([asked]))[asked]
        return start, self._in_loop(lambda: self.client.end_offsets([asked]))[asked]

    def _first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        asked = TopicPartition(topic, partition)
        found = self._in_loop(lambda: self.client.offsets_for_times({asked: timestamp_ms}))[asked]
        return None if found is None else int(found.offset)

    def _in_loop(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        return asyncio.run_coroutine_threadsafe(ask_async(question, failure_of), self._loop).result()

    # ---- reads

    async def _next(self) -> list[ConsumerRecord]:
        """The client's next record; none, now and then, where startpoints are to be asked for."""
        wait_s = self._member.wait_s(-1)
        with naming_rights(self._group, ", ".join(self._topics)):
            if wait_s < 0:
                return [await self.client.getone()]
            found = await self.client.getmany(timeout_ms=math.ceil(wait_s * 1000), max_records=1)
        return [record for records in found.values() for record in records]

    def _is_read(self, partition: tuple[str, int], moves: int) -> bool:
        """Whether records that were fetched at that count of moves belong to the partition's present position.

        If not, the client fetches again from that position: some of them may have been fetched after the move.
        """
        if partition not in self._member.assignment:
            return False
        at = self._member.assignment.position(partition)
        if at is None or not self._member.has_moved(partition, moves):
            return True
        self.client.seek(TopicPartition(*partition), at)
        return False

    def _kept(
        self, found: Mapping[TopicPartition, Sequence[ConsumerRecord]], moves: int
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Records before a refused partition are yielded, since a commit would cover them; the next call raises."""
        kept: dict[TopicPartition, list[ConsumerRecord]] = {}
        for partition, records in found.items():
            name = (partition.topic, partition.partition)
            if not records or not self._is_read(name, moves):
                continue
            self._member.assignment.met(name, records[0].offset)
            with suppress(Exception):  # it is the member's `failure` now: the next call raises it, unless this one does
                if self._member.failure is None and (passed := self._passed(partition, records)):
                    kept[partition] = passed
        if self._member.failure is not None and not kept:
            raise self._member.failure
        return kept

    def _passed(self, partition: TopicPartition, records: Sequence[ConsumerRecord]) -> list[ConsumerRecord]:
        keys = [self._key_of(record) for record in records]
        spans = {partition.partition: (records[0].offset, records[-1].offset)}
        passes = self._member.admit_columns(partition.topic, keys, partition.partition, spans, records)
        return list(records) if passes.all() else list(compress(records, passes.tobytes()))

    async def assigned(self, partitions: set[TopicPartition]) -> None:
        """The client's call: the committed position of each comes with its marks."""
        self.client.pause(*partitions)  # before it fetches: if loading fails, the client ignores the error
        names = _names(partitions)
        async with self._moving:
            self._member.forget([*self._member.partitions, *names])
            self._not_yielded.clear()
            await self._run(self._member.hold(names))
        await self._load_again()

    async def _load_again(self) -> None:
        """Load assigned partitions that are not loaded yet. They are paused, but the client may have moved in them."""
        async with self._moving:
            loaded = await self._run(self._member.load_again())
        if loaded and self._on_assign is not None:
            await self._on_assign(self, {TopicPartition(*one) for one in loaded})

    async def revoked(self, partitions: set[TopicPartition]) -> None:
        """The client's call."""
        try:
            if self._on_revoke is not None and partitions:
                await self._on_revoke(self, partitions)
        finally:  # a commit that fails there must not make us commit for the next owner
            # Wait for a commit that is on its way. The client joins the group again once this returns, and would send
            # that commit again: under its new membership the coordinator would take it.
            async with self._committing, self._moving:
                self._member.forget(_names(partitions))

    async def _follow(self) -> None:
        """Between two reads: raise why nothing can be read; apply new startpoints."""
        if self._member.failure is not None:  # its records are gone from the client: going on would lose them
            raise self._member.failure
        if self._member.holds_any:
            await self._load_again()
        if self._not_yielded or self._member.follows_startpoints:
            async with self._moving:
                self._seek_back()
                await self._run(self._member.follow(asyncio.get_running_loop().time()))

    async def _begin_read(
        self, handed_over: Mapping[tuple[str, int], int], records: Sequence[ConsumerRecord]
    ) -> Mapping[int, Deserialized]:
        """Deserialize, wait until no partition is moved, and take the lock. Returns what became of the values.

        handed_over: the first offset of each partition that the client handed over. If the caller gives up waiting, as
        `asyncio.wait_for` does, the next read seeks back there, so that none of these records is lost. That is why
        values are made before a record is admitted.
        """
        try:
            values = await self._deserialized(records)
            await self._moving.acquire()
        except asyncio.CancelledError:
            self._not_yielded = {**handed_over, **self._not_yielded}
            raise
        return values

    async def _deserialized(self, records: Sequence[ConsumerRecord]) -> Mapping[int, Deserialized]:
        """By the id of the record, which is no key."""
        if self._deserializer is None:
            return {}
        read = partial(self._deserializer.read, [(one.topic, one.value, list(one.headers)) for one in records])
        found = await asyncio.to_thread(read) if self._deserializer.asks_registry else read()
        return dict(zip(map(id, records), found, strict=True))

    def _with_values(
        self, kept: dict[TopicPartition, list[ConsumerRecord]], values: Mapping[int, Deserialized]
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """The records with their values; raises NotDeserialized."""
        if self._deserializer is None:
            return kept
        failed = [(one, error) for some in kept.values() for one in some if (error := values[id(one)].error)]
        made = {
            partition: [replace(one, value=values[id(one)].value) for one in some if values[id(one)].error is None]
            for partition, some in kept.items()
        }
        if failed:
            raise NotDeserialized([one for some in made.values() for one in some], failed) from failed[0][1]
        return made

    def _seek_back(self) -> None:
        for name, first in self._not_yielded.items():
            if name in self._member.assignment:
                at = self._member.assignment.position(name)
                self.client.seek(TopicPartition(*name), first if at is None else at)
        self._not_yielded.clear()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, consumer: ReplayFilteredConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._consumer.revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self._consumer.assigned(assigned)


def _names(partitions: Iterable[TopicPartition]) -> list[tuple[str, int]]:
    return [(one.topic, one.partition) for one in partitions]


def _key(record: ConsumerRecord) -> bytes | None:
    key: bytes | None = record.key
    return key


def _header(record: ConsumerRecord) -> bytes | None:
    for name, value in reversed(record.headers):
        if name == METADATA_HEADER:
            found: bytes | None = value
            return found
    return None
