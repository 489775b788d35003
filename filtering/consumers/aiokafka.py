"""aiokafka's consumer, yielding each record once: positions are committed with the marks that belong to them.

    start ─▶ assigned: committed offset and marks, one fact ─▶ getone, getmany: replays are dropped ─▶ commit: both
             revoked: your callback may commit, then they are forgotten

What was yielded and not committed is yielded again after a crash. aiokafka tells a commit's metadata through its admin
client only, and knows eager rebalances only. Marks that do not fit beside an offset need confluent-kafka's consumer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata

from filtering.consumers.aiokafka_asking import ask_committed
from filtering.consumers.errors import MarksTooLarge, SettingOverwritesMarks
from filtering.consumers.positions import METADATA_CHARACTERS_MAX, Position, decode, encode
from filtering.consumers.reading import NO_MARKS, FilterSettings, Reading
from filtering.errors import BadFilterSetting
from filtering.replay_filter import FilterCounts
from filtering.stream_metadata import METADATA_HEADER

_LOG = logging.getLogger(__name__)
_SHARED = frozenset({"bootstrap_servers", "security_protocol", "ssl_context", "client_id", "request_timeout_ms"})

OnPartitions = Callable[["ReplayFilteredConsumer", set[TopicPartition]], Awaitable[None]]


class ReplayFilteredConsumer:
    """A consumer of topics whose records carry stream metadata. Use it in `async with`, in one event loop.

    topics: what is read. group_id: positions and marks are kept under it. carrier: where the 20 bytes travel, "key" or
    "header". window, only_pids, ttl_s: ReplayFilter's. on_assign, on_revoke: called with this consumer and partitions;
    in `on_revoke` a commit still counts. settings: AIOKafkaConsumer's; auto-commit is refused by name.
    Raises SettingOverwritesMarks, BadFilterSetting; entering it raises the client's KafkaError.
    """

    def __init__(  # noqa: PLR0913 - what is read, and how
        self,
        *topics: str,
        group_id: str,
        carrier: Literal["key", "header"] = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        **settings: Any,
    ) -> None:
        if carrier not in {"key", "header"}:
            raise BadFilterSetting("carrier", carrier, '"key" or "header"')
        if settings.pop("enable_auto_commit", False):
            raise SettingOverwritesMarks("enable_auto_commit", value=True)
        if not group_id:
            raise BadFilterSetting("group_id", group_id, "needed: positions and marks are kept under it")
        self._topics, self._group, self._settings = topics, group_id, settings
        self._key_of = _key if carrier == "key" else _header
        pids = None if only_pids is None else frozenset(only_pids)
        self._reading = Reading(FilterSettings(window=window, only_pids=pids, ttl_s=ttl_s))
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._moving = asyncio.Lock()
        self._failure: Exception | None = None
        self._client: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None

    @property
    def client(self) -> AIOKafkaConsumer:
        """The consumer inside, for what this class does not do; never commit or seek by it."""
        if self._client is None:
            raise BadFilterSetting("consumer", "not started", "used in `async with`")
        return self._client

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """What became of the records, by topic."""
        return self._reading.counts

    async def start(self) -> None:
        """Connect and join the group."""
        shared = {name: value for name, value in self._settings.items() if name in _SHARED or name.startswith("sasl_")}
        self._admin = AIOKafkaAdminClient(**shared)
        await self._admin.start()
        self._client = AIOKafkaConsumer(**self._settings, group_id=self._group, enable_auto_commit=False)
        self._client.subscribe(list(self._topics), listener=_Listener(self))
        try:
            await self._client.start()
        except BaseException:
            await self.close()
            raise

    async def getone(self) -> ConsumerRecord:
        """The next record that is no replay. Raises PairSplit, and the client's KafkaError."""
        while True:
            self._check()
            record = await self.client.getone()
            async with self._moving:
                partition = (record.topic, record.partition)
                if partition in self._reading and self._admit(partition, record):
                    return record

    async def getmany(
        self, *, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """What the client hands over at once, without the replays; the fast road. Raises as `getone`.

        It may be empty although there was something to read: all of it were replays.
        """
        self._check()
        found = await self.client.getmany(timeout_ms=timeout_ms, max_records=max_records)
        async with self._moving:
            kept = {}
            for partition, records in found.items():
                if (partition.topic, partition.partition) in self._reading and records:
                    passed = self._passed(partition, records)
                    if passed:
                        kept[partition] = passed
            return kept

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        while True:
            yield await self.getone()

    async def commit(self) -> None:
        """Store, for every partition, the position behind what was yielded, with its marks.

        Raises MarksTooLarge, CommitFailedError: then nothing of it counts, what follows the last commit comes again.
        """
        due = self._reading.due(time.time_ns() // 1_000_000)
        offsets = {}
        for one in due:
            metadata = encode(Position(one.marks, None, one.startpoint))
            if len(metadata) > METADATA_CHARACTERS_MAX:
                raise MarksTooLarge(one.topic, one.partition, len(metadata), METADATA_CHARACTERS_MAX, len(one.marks))
            offsets[TopicPartition(one.topic, one.partition)] = (one.offset, metadata)
        if offsets:
            await self.client.commit(offsets)
            self._reading.committed(due)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`. The committed position brings its marks; any other begins with none."""
        async with self._moving:
            self._failure = None
            committed = (await self._committed([partition]))[partition]
            if committed.offset == offset:
                self._begin(partition, committed.offset, committed.metadata)
            else:
                _LOG.warning(
                    "%s-%d goes on at %d, which is not its committed position: it begins with empty marks",
                    partition.topic, partition.partition, offset,
                )  # fmt: skip
                self._reading.assign((partition.topic, partition.partition), offset)
            self.client.seek(partition, offset)

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

    def _check(self) -> None:
        """After a refused batch its records are gone from the client: going on would lose them."""
        if self._failure is not None:
            raise self._failure

    def _admit(self, partition: tuple[str, int], record: ConsumerRecord) -> bool:
        try:
            return self._reading.admit(partition, record.offset, self._key_of(record))
        except Exception as error:
            self._failure = error
            raise

    def _passed(self, partition: TopicPartition, records: Sequence[ConsumerRecord]) -> list[ConsumerRecord]:
        keys = [self._key_of(record) for record in records]
        offsets = [record.offset for record in records]
        try:
            passes = self._reading.admit_batch(partition.topic, [partition.partition] * len(records), offsets, keys)
        except Exception as error:
            self._failure = error
            raise
        return list(records) if passes.all() else [records[at] for at in passes.nonzero()[0].tolist()]

    async def assigned(self, partitions: set[TopicPartition]) -> None:
        """The client's call: the committed position of each comes with its marks."""
        async with self._moving:
            self._reading.drop([(one.topic, one.partition) for one in partitions])
            self._failure = None  # the client begins again at the committed positions
            try:
                for partition, committed in sorted((await self._committed(sorted(partitions))).items()):
                    if committed.offset >= 0:
                        self._begin(partition, committed.offset, committed.metadata)
                    else:
                        self._begin(partition, None, None)
            except Exception as error:
                self._failure = error  # the client logs it and goes on, with records that nobody has marks for
                raise
        if self._on_assign is not None:
            await self._on_assign(self, partitions)

    async def revoked(self, partitions: set[TopicPartition]) -> None:
        """The client's call."""
        if self._on_revoke is not None and partitions:
            await self._on_revoke(self, partitions)
        async with self._moving:
            self._reading.drop([(one.topic, one.partition) for one in partitions])

    def _begin(self, partition: TopicPartition, offset: int | None, metadata: str | None) -> None:
        position = decode(metadata)
        name = (partition.topic, partition.partition)
        if position.stored is not None:
            raise BadFilterSetting("group_id", self._group, f"of a consumer whose marks of {name[0]} fit into commits")
        if position.marks is None and offset is not None:
            _LOG.warning("%s-%d starts at %d, committed without marks: it begins with empty ones", *name, offset)
        self._reading.assign(name, offset, position.marks or NO_MARKS, startpoint=position.startpoint)

    async def _committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        assert self._admin is not None, "it lives as long as the client"
        return await ask_committed(self._admin, self._group, partitions)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, consumer: ReplayFilteredConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._consumer.revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self._consumer.assigned(assigned)


def _key(record: ConsumerRecord) -> bytes | None:
    key: bytes | None = record.key
    return key


def _header(record: ConsumerRecord) -> bytes | None:
    """The last header of our name."""
    for name, value in reversed(record.headers):
        if name == METADATA_HEADER:
            found: bytes | None = value
            return found
    return None
