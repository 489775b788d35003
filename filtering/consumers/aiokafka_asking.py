"""Which of aiokafka's failures pass; what a group's coordinator tells: every committed position, who holds what."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    KafkaError,
    NoError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata

from filtering.consumers.asking import TIMEOUT_S, Failure, ask_async
from filtering.consumers.ownership import ASK_WITHIN_S, Held
from filtering.errors import MissingRight


def failure_of(error: BaseException) -> Failure:
    """The judge of aiokafka's KafkaError for `asking.ask_async`."""
    if isinstance(error, UnknownTopicOrPartitionError):
        return Failure.NOT_THERE
    # NoError: how the client raises what a broker says of one partition, beside a whole that is well.
    if isinstance(error, NoError | TimeoutError) or (isinstance(error, KafkaError) and error.retriable):
        return Failure.PASSES
    return Failure.STAYS


def missing_right(error: BaseException, group: str, topic: str, on_topic: str = "READ") -> MissingRight | None:
    """The right that the brokers say is missing, if that is what they say. on_topic: what was done with the topic."""
    if isinstance(error, GroupAuthorizationFailedError):
        return MissingRight("READ", "group", group, repr(error))
    if isinstance(error, TopicAuthorizationFailedError):
        named = error.args[0] if error.args else None
        names = sorted(named) if isinstance(named, set | frozenset | list | tuple) else []
        return MissingRight(on_topic, "topic", str(names[0]) if names else topic, repr(error))
    if isinstance(error, ClusterAuthorizationFailedError):  # an idempotent producer without WRITE on any topic
        return MissingRight("WRITE", "topic", topic, repr(error))
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

    The client takes no notice of an answer that is refused as a whole, by a broker that isn't the group's coordinator
    any more: it hands over an empty one, which reads as "nothing was ever committed".
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
    """What the group's coordinator says that this member has now; nothing where nobody answers within 5 s."""
    try:
        async with asyncio.timeout(ASK_WITHIN_S):
            [found] = await admin.describe_consumer_groups([group])
    except (KafkaError, TimeoutError):
        return frozenset()
    members = [one for described in found.groups for one in described[5]]  # by place: names differ by version
    assigned = [one[-1] for one in members if one[0] == member]
    held = [ConsumerProtocol.ASSIGNMENT.decode(one).partitions() for one in assigned if one]
    return frozenset((one.topic, one.partition) for partitions in held for one in partitions)
