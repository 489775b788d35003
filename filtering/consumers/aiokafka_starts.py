"""Where the partitions of aiokafka's consumer begin, and where startpoints send them while they are read.

    load     the committed position of each, with its marks; or where its startpoint says, or stopped
    follow   between two reads: what is new is asked for, then the client seeks; a stopped partition is paused

Startpoints block, so they are asked in a thread; what they want to know of the log is asked here in the loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from filtering.consumers.aiokafka_asking import ask_committed, ask_held, failure_of
from filtering.consumers.asking import ask_async
from filtering.consumers.assignment import NO_MARKS, Assignment, PendingCommit
from filtering.consumers.ownership import Held, OwnershipCheck
from filtering.consumers.positions import CommittedPosition, decode
from filtering.consumers.startpoints import Answer, PartitionFacts, Startpoints, StartpointWatcher, StartTarget
from filtering.errors import BadFilterSetting

_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class AiokafkaMember(NamedTuple):
    """A member of a group: its client, and the admin client, which alone tells a commit's metadata."""

    client: AIOKafkaConsumer
    admin: AIOKafkaAdminClient
    group: str
    resets_to_earliest: bool


class AiokafkaStarts:
    """For one event loop; its calls are made one at a time."""

    def __init__(
        self,
        member: AiokafkaMember,
        assignment: Assignment,
        watcher: StartpointWatcher,
        startpoints: Startpoints | None,
        paused: Collection[TopicPartition] = (),
    ) -> None:
        """paused: those that the caller paused, which are not resumed here."""
        self._paused = paused
        self._member, self._client, self._group = member, member.client, member.group
        self._assignment, self._watcher, self._startpoints = assignment, watcher, startpoints
        self._loop = asyncio.get_running_loop()
        self._ownership = OwnershipCheck(self._ask_held)
        self.moves = 0
        self._moved: dict[tuple[str, int], int] = {}

    async def load(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        """Where each begins, None: by the client's reset policy; the client is there, and stopped ones are paused."""
        found = []
        for partition, committed in sorted((await self.committed(partitions)).items()):
            offset = committed.offset if committed.offset >= 0 else None
            position = decode(committed.metadata if offset is not None else None)
            name = (partition.topic, partition.partition)
            if position.stored is not None:
                why = f"of a consumer whose marks of {partition.topic} fit into commits"
                raise BadFilterSetting("group_id", self._group, why)
            if position.marks is None and offset is not None:
                _LOG.warning("%s-%d starts at %d, committed without marks: it begins with empty ones", *name, offset)
            found.append((partition, offset, position, await self._pending(name, offset, position)))
        starts = {}
        for partition, offset, position, answer in found:
            name = (partition.topic, partition.partition)
            begins = self._watcher.begin(name, offset, position.marks or NO_MARKS, position.startpoint, answer)
            if isinstance(answer, StartTarget):
                self._client.seek(partition, answer.offset)
                self.on_seek(name)  # the client may have handed over what lies at the committed position
            if name not in self._assignment:
                self._client.pause(partition)
            starts[partition] = begins
        return starts

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """What the group committed, offset -1 for nothing. Raises the client's KafkaError."""
        return await ask_committed(self._member.admin, self._group, partitions)

    async def follow(self) -> None:
        """Obey what is new, if it is time to ask. Raises why a partition was stopped, once for each."""
        now_s = self._loop.time()
        if self._startpoints is not None and self._watcher.is_time(now_s):
            version = await asyncio.to_thread(self._startpoints.version)
            if self._watcher.is_new(version):
                stopped = list(self._watcher.stopped)
                for name in list(self._assignment):
                    await self._move(name, self._startpoints)
                for name in stopped:
                    await self._begin_again(TopicPartition(*name))
            self._watcher.looked(version, now_s)
        self._watcher.raise_untold()

    def has_moved(self, name: tuple[str, int], since: int) -> bool:
        """Whether the partition was sent elsewhere since `moves` was that: what was read before is not of its run."""
        return self._moved.get(name, 0) > since

    async def consumed(self, due: Sequence[PendingCommit]) -> None:
        """A commit of these is stored."""
        for one in due:
            if one.has_new_startpoint and self._startpoints is not None:
                names = (self._group, one.topic, one.partition, one.startpoint)
                await asyncio.to_thread(self._startpoints.consumed, *names)

    async def _pending(self, name: tuple[str, int], offset: int | None, position: CommittedPosition) -> Answer:
        if self._startpoints is None:
            return None
        facts = self._facts(name, offset)
        return await asyncio.to_thread(self._startpoints.pending, self._group, facts, position.startpoint)

    async def _move(self, name: tuple[str, int], startpoints: Startpoints) -> None:
        facts = self._facts(name, self._assignment.position(name))
        answer = await asyncio.to_thread(startpoints.moved, self._group, facts, self._assignment.startpoint(name))
        partition = TopicPartition(*name)
        if isinstance(answer, StartTarget):
            self._client.seek(partition, answer.offset)
            _LOG.info("%s-%d goes on at %d, by startpoint %d", *name, answer.offset, answer.sequence)
        self._watcher.move(name, answer)
        if answer is not None:
            self.on_seek(name)
        if name not in self._assignment:
            self._client.pause(partition)

    async def _begin_again(self, partition: TopicPartition) -> None:
        start = (await self.load([partition]))[partition]
        if (partition.topic, partition.partition) in self._assignment:
            await self._go(partition, start)
            if partition not in self._paused:
                self._client.resume(partition)

    async def back_to_committed(self) -> None:
        """Every partition that is read begins again; where nothing is committed, where its run began."""
        began = {TopicPartition(*name): self._assignment.began(name) for name in self._assignment}
        for partition, start in (await self.load(sorted(began))).items():
            place = began[partition] if start is None else start
            if place is not None and (partition.topic, partition.partition) in self._assignment:
                await self._go(partition, place)  # else nothing came of it: it stands where its reset policy put it

    async def _go(self, partition: TopicPartition, start: int | None) -> None:
        """To an offset; None: where the client's reset policy says."""
        if start is not None:
            self._client.seek(partition, start)
        elif self._member.resets_to_earliest:
            await self._client.seek_to_beginning(partition)
        else:
            await self._client.seek_to_end(partition)
        self.on_seek((partition.topic, partition.partition))

    def on_seek(self, name: tuple[str, int]) -> None:
        """The client was sent elsewhere in it."""
        self.moves += 1
        self._moved[name] = self.moves

    def _facts(self, name: tuple[str, int], position: int | None) -> PartitionFacts:
        return PartitionFacts(*name, self._bounds, self._first_at, position, self._is_held)

    def _is_held(self, topic: str, partition: int) -> bool:
        member = self._client._coordinator.member_id  # noqa: SLF001 - the client tells it nowhere else
        return self._ownership.is_held(member, topic, partition)

    def _ask_held(self, member: str) -> "Future[Held]":
        """Called in a thread, while the loop waits for it."""
        return asyncio.run_coroutine_threadsafe(ask_held(self._member.admin, self._group, member), self._loop)

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
