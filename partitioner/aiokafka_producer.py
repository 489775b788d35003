"""For aiokafka: a producer that owns its client and leaves no hole.

    send ─▶ queue ─▶ a task for each partition: one batch on its way, the next only when that one is acknowledged
                       └ given up by the client ─▶ a new client; the same records go out again, from the first on

aiokafka gives up a batch whose leader stays unknown past its timeout, idempotent or not, and goes on with the next.
With one batch on its way there is no next one: the batch that was given up is still the first, and is sent again.
"""

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from filtering.extras import needed_by

with needed_by("partitioner.aiokafka_producer"):
    import aiokafka  # noqa: F401 - the message says how to get it

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerClosed,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from filtering import METADATA_HEADER, StreamMetadata
from filtering.consumers.aiokafka_client import missing_right, naming_rights, topic_settings
from filtering.retry import Backoff, RetryPolicy
from partitioner.errors import (
    BadPartitionerSetting,
    BreaksPrefixCondition,
    NoSuchTopic,
    NotDelivered,
    TopicCompacted,
    TopicShrunk,
)
from partitioner.in_flight_queue import InFlightQueue
from partitioner.source_partition import check_partition_count, partition_for

Header = tuple[str, bytes | None]

_REQUIRED: dict[str, tuple[object, frozenset[object]]] = {
    "enable_idempotence": (True, frozenset({True})),
    "acks": ("all", frozenset({"all", -1})),
}
_REFUSED = {
    "transactional_id": "not for this producer: an aborted transaction takes records back that were acknowledged",
    "partitioner": "not for this producer: it picks the partition itself",
    "key_serializer": "not for this producer: it takes bytes",
    "value_serializer": "not for this producer: it takes bytes",
}
# Sent again, these fail again: the record, the topic or the rights have to be corrected first.
_FINAL = (
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    ClusterAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    InvalidTopicError,
)
_RETRY = RetryPolicy(
    is_retriable=lambda error: isinstance(error, KafkaError) and not isinstance(error, _FINAL),
    backoff=Backoff(first_s=0.05, longest_s=5.0),
)
_SHARED = {"bootstrap_servers", "security_protocol", "ssl_context", "client_id"}
_PENDING_MAX = 100_000
_STOP_S = 5.0


class _Connected(NamedTuple):
    """A client, and a future that is resolved once another client has replaced it."""

    producer: AIOKafkaProducer
    replaced: "asyncio.Future[None]"


class _Pending(NamedTuple):
    partition: int
    metadata: StreamMetadata
    value: bytes | None
    key: bytes | None
    headers: list[Header]
    timestamp_ms: int
    delivered: "asyncio.Future[int]"


class SourcePartitionProducer:
    """Sends records with their source position; a (PID, source partition) stays in one partition, in order, gapless.

    settings: AIOKafkaProducer's (`bootstrap_servers`, security, `max_batch_size`, `compression_type` ...); one that
    would break the prefix condition is refused by name. partition_count, carrier: as in partitioner/confluent.py.
    Use it in `async with`, in one event loop. Raises BreaksPrefixCondition, BadPartitionerSetting; entering it raises
    NoSuchTopic, TopicShrunk, TopicCompacted and the client's KafkaError.
    """

    def __init__(
        self,
        topic: str,
        *,
        partition_count: int | None = None,
        carrier: Literal["key", "header"] = "key",
        **settings: Any,
    ) -> None:
        if carrier not in {"key", "header"}:
            raise BadPartitionerSetting("carrier", carrier, '"key" or "header"')
        check_partition_count(partition_count)
        self.topic, self._carrier = topic, carrier
        self._settings = _with_required(settings)
        self._partition_count = partition_count
        self._in_flight: InFlightQueue[_Pending] = InFlightQueue()
        self._senders: dict[int, asyncio.Task[None]] = {}
        self._wake: dict[int, asyncio.Event] = {}
        self._changed = asyncio.Condition()
        self._renewing = asyncio.Lock()
        self._client: _Connected | None = None
        self.failures = 0
        """How often the client gave a batch up that then went out again."""

    @property
    def partition_count(self) -> int:
        """How many partitions are used: keep it with the producer's state."""
        if self._partition_count is None:
            raise BadPartitionerSetting("producer", "not started", "used in `async with`")
        return self._partition_count

    @property
    def stopped(self) -> dict[int, Exception]:
        """The partitions whose first record can't be delivered, each with the reason."""
        return self._in_flight.stopped

    def __len__(self) -> int:
        """Records that are not acknowledged."""
        return len(self._in_flight)

    async def start(self) -> None:
        """Connect, and fix the number of partitions. Raises what the class says."""
        with naming_rights("", self.topic, "WRITE"):
            self._client = await self._connected()
        try:
            await self._fix_partition_count(self._client.producer)
        except BaseException:
            await self._release()
            raise

    async def send(
        self,
        metadata: StreamMetadata,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[Header] = (),
        timestamp_ms: int | None = None,
    ) -> "asyncio.Future[int]":
        """Take a record; it goes out behind all others of its partition. A future of its offset in the topic.

        Waits while 100,000 records are not acknowledged. Raises OffsetNotAbove, PartitionStopped,
        BadPartitionerSetting for a key beside the key carrier.
        """
        if key is not None and self._carrier == "key":
            raise BadPartitionerSetting("key", key, 'the metadata\'s own; make the producer with carrier="header"')
        partition = partition_for(metadata.partition, self.partition_count)
        self._in_flight.check(partition, metadata)
        if len(self._in_flight) >= _PENDING_MAX:
            await self._wait_for_room()
            self._in_flight.check(partition, metadata)
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        packed = metadata.pack()
        kept = [header for header in headers if header[0] != METADATA_HEADER] if headers else []
        if self._carrier == "header":
            kept.append((METADATA_HEADER, packed))
        else:
            key = packed
        delivered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._in_flight.enqueue(_Pending(partition, metadata, value, key, kept, timestamp_ms, delivered))
        wake = self._wake.get(partition)
        if wake is None:
            wake = self._wake[partition] = asyncio.Event()
            self._senders[partition] = asyncio.create_task(self._send_all(partition))
        wake.set()
        return delivered

    async def _wait_for_room(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._in_flight) < _PENDING_MAX)

    async def flush(self, timeout_s: float = 60) -> None:
        """Every record that was taken is in the log when this returns.

        Raises PartitionStopped as soon as only records of stopped partitions are left, NotDelivered after the time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: next(self._in_flight.outgoing(), None) is None)
        except TimeoutError:
            raise NotDelivered(len(self._in_flight), timeout_s) from None
        if stopped := self._in_flight.stopped:
            raise self._in_flight.refusal(min(stopped))

    def retry(self, partition: int) -> None:
        """Why its first record failed is corrected: send the partition's records again, from that one on."""
        self._in_flight.resume(partition)
        if partition in self._wake:
            self._wake[partition].set()

    async def close(self, timeout_s: float = 60) -> None:
        """Flush, then drop the client. Raises as `flush`; it is closed in any case. A second call does nothing."""
        if self._client is None:
            return
        try:
            await self.flush(timeout_s)
        finally:
            await self._release()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self._release()

    async def _send_all(self, partition: int) -> None:
        """One partition, batch behind batch, until cancelled."""
        wake = self._wake[partition]
        while True:
            await wake.wait()
            wake.clear()
            while (first := next(self._in_flight.outgoing(partition), None)) is not None:
                try:
                    await self._send_first(partition)
                except _FINAL as error:
                    self._in_flight.fail(first, missing_right(error, "", self.topic, "WRITE") or error)
                    await self._notify()

    async def _send_first(self, partition: int) -> None:
        """As much of what waits as one batch takes, until it is in the log. Raises errors that no retry can solve."""

        async def attempt() -> tuple[list[_Pending], int]:
            client = self._client
            assert client is not None, "senders end before the client does"
            try:
                return await self._send_batch(client, partition)
            except KafkaError:
                self.failures += 1
                await self._renew(client)  # the batch that the old one gave up left a hole in its sequence numbers
                raise

        sent, offset = await _RETRY.call_async(attempt)
        for number, pending in enumerate(sent):
            self._in_flight.acknowledge(pending)
            if not pending.delivered.done():
                pending.delivered.set_result(offset + number)
        await self._notify()

    async def _send_batch(self, client: _Connected, partition: int) -> tuple[list[_Pending], int]:
        batch, sent = client.producer.create_batch(), []
        append = batch.append
        for pending in self._in_flight.outgoing(partition):
            _, _, value, key, headers, timestamp_ms, _ = pending
            if append(key=key, value=value, timestamp=timestamp_ms, headers=headers) is None:
                break
            sent.append(pending)
        if not sent:
            raise MessageSizeTooLargeError("the record is larger than max_batch_size")
        delivered = await client.producer.send_batch(batch, self.topic, partition=partition)
        await asyncio.wait({delivered, client.replaced}, return_when=asyncio.FIRST_COMPLETED)
        if not delivered.done():
            raise ProducerClosed
        return sent, delivered.result().offset

    async def _renew(self, failed: _Connected) -> None:
        async with self._renewing:
            if self._client is failed:
                if not failed.replaced.done():
                    failed.replaced.set_result(None)
                    await _stop(failed.producer)
                self._client = await self._connected()

    async def _connected(self) -> _Connected:
        producer = AIOKafkaProducer(**self._settings)
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        return _Connected(producer, asyncio.get_running_loop().create_future())

    async def _release(self) -> None:
        for task in self._senders.values():
            task.cancel()
        await asyncio.gather(*self._senders.values(), return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await _stop(client.producer)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _fix_partition_count(self, producer: AIOKafkaProducer) -> None:
        try:
            found = len(await producer.partitions_for(self.topic))
        except UnknownTopicOrPartitionError:
            raise NoSuchTopic(self.topic) from None
        if self._partition_count is not None and found < self._partition_count:
            raise TopicShrunk(self._partition_count, found)
        await self._refuse_compaction()
        self._partition_count = self._partition_count or found

    async def _refuse_compaction(self) -> None:
        shared = {name: value for name, value in self._settings.items() if name in _SHARED or name.startswith("sasl_")}
        admin = AIOKafkaAdminClient(**shared)
        await admin.start()
        try:
            policy = (await topic_settings(admin, self.topic))["cleanup.policy"]
        except UnknownTopicOrPartitionError:
            raise NoSuchTopic(self.topic) from None
        finally:
            await admin.close()
        if "compact" in policy:
            raise TopicCompacted(self.topic, policy)


async def _stop(producer: AIOKafkaProducer) -> None:
    """Stop a client. Its own `stop` waits for a batch on its way to a broker that does not answer: 5 s are enough."""
    try:
        async with asyncio.timeout(_STOP_S):
            await producer.stop()
    except TimeoutError:
        await producer._sender.close()  # noqa: SLF001 - else its task runs for ever; no public method ends it
        await producer.client.close()


def _with_required(settings: dict[str, Any]) -> dict[str, Any]:
    """The user's settings and those that hold the prefix condition. Raises BreaksPrefixCondition."""
    for name, value in settings.items():
        if name in _REFUSED:
            raise BreaksPrefixCondition(name, value, _REFUSED[name])
        if name in _REQUIRED and value not in _REQUIRED[name][1]:
            raise BreaksPrefixCondition(name, value, f"{_REQUIRED[name][0]} in this producer")
    return {**settings, **{name: value for name, (value, _) in _REQUIRED.items()}}
