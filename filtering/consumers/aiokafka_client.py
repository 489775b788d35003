"""aiokafka's clients: which failures are transient, and what a group's member asks brokers.

Only the admin client reads a committed position's metadata. A store of startpoints may block, so it is asked in a
thread; what it asks about a log runs in the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    KafkaError,
    NoError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.structs import OffsetAndMetadata

from filtering.consumers.group_member import kept_ms
from filtering.consumers.startpoints import ASK_WITHIN_S, Held, OwnershipCheck, PartitionFacts
from filtering.errors import MissingRight
from filtering.retry import TIMEOUT_S, Failure, ask_async

_Answer = TypeVar("_Answer")


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


async def topic_settings(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    """What a topic is set to, asked for 60 s. Raises MissingRight, the client's KafkaError."""

    async def question() -> dict[str, str]:
        [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        [(code, why, _, _, entries)] = answer.resources
        if code:
            raise for_code(code)(why)
        return {name: value for name, value, *_ in entries}

    with naming_rights("", topic, "DESCRIBE_CONFIGS"):
        return await ask_async(question, failure_of)


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


class AiokafkaMember:
    """A member of a group, as startpoints ask about it. Made in its event loop.

    admin: the only client that reads a commit's metadata.
    """

    def __init__(
        self, client: AIOKafkaConsumer, admin: AIOKafkaAdminClient, group: str, *, resets_to_earliest: bool
    ) -> None:
        self._client, self._admin, self._group, self._resets_to_earliest = client, admin, group, resets_to_earliest
        self._loop = asyncio.get_running_loop()
        self._ownership = OwnershipCheck(self._ask_held)

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """What the group committed, offset -1 for nothing; asks for 60 s. Raises MissingRight, KafkaError."""
        return await ask_committed(self._admin, self._group, partitions)

    async def retention_ms(self, topic: str) -> int:
        """How long the topic keeps records, -1: for ever; asks for 60 s. Raises MissingRight, KafkaError."""
        return kept_ms(await topic_settings(self._admin, topic))

    async def seek(self, partition: TopicPartition, offset: int | None) -> None:
        """To an offset; None: where the client's reset policy says."""
        if offset is not None:
            self._client.seek(partition, offset)
        elif self._resets_to_earliest:
            await self._client.seek_to_beginning(partition)
        else:
            await self._client.seek_to_end(partition)

    def facts_of(self, topic: str, partition: int, position: int | None) -> PartitionFacts:
        """A partition and how to look at its log, for a thread while the loop waits for it."""
        return PartitionFacts(topic, partition, self._bounds, self._first_at, position, self._is_held)

    def _is_held(self, topic: str, partition: int) -> bool:
        member = self._client._coordinator.member_id  # noqa: SLF001 - its only place
        return self._ownership.is_held(member, topic, partition)

    def _ask_held(self, member: str) -> "Future[Held]":
        """Called in a thread, while the loop waits for it."""
        return asyncio.run_coroutine_threadsafe(ask_held(self._admin, self._group, member), self._loop)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        asked = TopicPartition(topic, partition)
        start = self._in_loop(lambda: self._client.beginning_offsets([asked]))[asked]
        return start, self._in_loop(lambda: self._client.end_offsets([asked]))[asked]

    def _first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        asked = TopicPartition(topic, partition)
        found = self._in_loop(lambda: self._client.offsets_for_times({asked: timestamp_ms}))[asked]
        return None if found is None else int(found.offset)

    def _in_loop(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Called in a thread, while the loop waits for it."""
        return asyncio.run_coroutine_threadsafe(ask_async(question, failure_of), self._loop).result()
