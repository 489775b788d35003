"""Where the partitions of confluent-kafka's consumer begin, and where startpoints send them while they are read.

    load     the committed position of each, with its marks; or where its startpoint says, or stopped
    follow   between two reads: what is new is asked for, then the client seeks; a stopped partition is paused

The client takes an assignment whatever its callback raises, and would hand over records that nobody has marks for. So a
partition whose loading failed stays assigned and paused, and every read loads it again or raises why it cannot.
A partition that was stopped begins anew as soon as its startpoint is cancelled or a newer one is there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from filtering.consumers.asking import ask_aside
from filtering.consumers.assignment import NO_MARKS, Assignment, PendingCommit
from filtering.consumers.confluent_asking import ask_bounds, ask_partitions, connection_of, naming_rights
from filtering.consumers.ownership import ASK_WITHIN_S, Held, OwnershipCheck
from filtering.consumers.pauses import Pauses, Reason
from filtering.consumers.positions import CommittedPosition, decode
from filtering.consumers.startpoints import Answer, PartitionFacts, Startpoints, StartpointWatcher, StartTarget
from filtering.marks import HighwaterMarks


class ConfluentMember:
    """config: the consumer's, of which connection and security are used. For one thread at a time."""

    def __init__(self, client: Consumer, config: Mapping[str, Any], group: str) -> None:
        self.client, self.group = client, group
        self._connection = connection_of(config)
        self._ownership = OwnershipCheck(self._ask)

    def is_held(self, topic: str, partition: int) -> bool:
        """Whether the coordinator says that this member has the partition now.

        False while partitions are being given out, for one that was assigned without a group's help, and while no
        answer is there: a later call tells what was answered.
        """
        return self._ownership.is_held(self.client.memberid() or "", topic, partition)

    def _ask(self, member: str) -> "Future[Held]":
        """In a thread that nobody waits for: a client is made in it, which first has to have its `oauth_cb`'s token."""
        return ask_aside(
            lambda: held_by(self._connection, self.group, member), f"pushrep who holds what in {self.group}"
        )


def held_by(connection: Mapping[str, Any], group: str, member: str) -> Held:
    """What the coordinator says that it has; nothing where nobody answers within 5 s, or no token is had in 10 s."""
    try:
        admin = AdminClient({**connection, "log_level": 0})  # held until it has answered
        asked = admin.describe_consumer_groups([group], request_timeout=ASK_WITHIN_S)
        found = asked[group].result(ASK_WITHIN_S)
    except (KafkaException, TimeoutError):
        return frozenset()
    held = [one.assignment.topic_partitions for one in found.members if one.member_id == member]
    return frozenset((one.topic, one.partition) for partitions in held for one in partitions)


_LOG = logging.getLogger(__name__)

MarksOf = Callable[[tuple[str, int], CommittedPosition], HighwaterMarks | None]


def metadata_of(committed: TopicPartition) -> str | None:
    """What stands beside a committed offset.

    Without a NUL at its end, as others may write it, the client reads on in its memory: what is no text then is theirs.
    """
    try:
        found: str | None = committed.metadata
    except UnicodeDecodeError:
        return None
    return found


class ConfluentStarts:
    """marks_of: the marks that a committed position names. Not thread-safe; asks brokers for 30 s at most."""

    def __init__(
        self,
        member: ConfluentMember,
        assignment: Assignment,
        startpoints: Startpoints | None,
        marks_of: MarksOf,
        pauses: Pauses,
    ) -> None:
        self._pauses = pauses
        self._member, self._client, self._group, self._assignment = member, member.client, member.group, assignment
        self._startpoints, self._marks_of = startpoints, marks_of
        self.watcher = StartpointWatcher(assignment, None if startpoints is None else startpoints.look_every_s)

    def load(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Where the client is to begin; OFFSET_INVALID: its reset policy decides. All of them, or it raises."""
        found = []
        for committed in self.committed(partitions):
            partition = (committed.topic, committed.partition)
            offset = committed.offset if committed.offset >= 0 else None
            position = decode(metadata_of(committed))
            marks = self._marks_of(partition, position)
            if marks is None and offset is not None:
                _LOG.warning(
                    "%s-%d starts at %d, committed without marks: it begins with empty ones", *partition, offset
                )
            found.append((partition, offset, marks, position.startpoint, self._pending(partition, offset, position)))
        starts = []
        for partition, offset, marks, sequence, answer in found:
            kept = NO_MARKS if marks is None else marks
            begins = self.watcher.begin(partition, offset, kept, sequence, answer)
            starts.append(TopicPartition(*partition, OFFSET_INVALID if begins is None else begins))
        return starts

    def committed(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """What the group committed. Raises KafkaException."""
        plain = [TopicPartition(one.topic, one.partition) for one in partitions]
        with naming_rights(self._group, plain[0].topic if plain else ""):
            return ask_partitions(lambda left_s: self._client.committed(plain, left_s))

    def follow(self) -> None:
        """Obey what is new, if it is time to ask. Raises why a partition was stopped, once for each."""
        now_s = time.monotonic()
        if self._startpoints is not None and self.watcher.is_time(now_s):
            version = self._startpoints.version()
            if not self.watcher.is_new(version) or self._obeyed(self._startpoints):
                self.watcher.looked(version, now_s)
        self.watcher.raise_untold()

    def pause_stopped(self) -> None:
        """Those that may not be read, once the client has them."""
        self._pauses.add(Reason.STOPPED, set(self.watcher.stopped) - self._pauses.of(Reason.STOPPED))

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are going."""
        self.watcher.forget({(one.topic, one.partition) for one in partitions})

    def consumed(self, due: Sequence[PendingCommit]) -> None:
        """A commit of these is stored."""
        for one in due:
            if one.has_new_startpoint and self._startpoints is not None:
                self._startpoints.consumed(self._group, one.topic, one.partition, one.startpoint)

    def _obeyed(self, startpoints: Startpoints) -> bool:
        """Whether all is done; a partition that has just come can't be moved yet, and is at the next call."""
        try:
            stopped = self._pauses.of(Reason.STOPPED)
            for partition in set(self._assignment) - stopped:
                self._move(partition, startpoints)
            for partition in stopped:
                self._begin_again(partition)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:  # noqa: SLF001 - its only name
                raise
            return False
        finally:
            self.pause_stopped()
        return True

    def _pending(self, partition: tuple[str, int], offset: int | None, position: CommittedPosition) -> Answer:
        if self._startpoints is None:
            return None
        facts = self._facts(partition, offset)
        return self._startpoints.pending(self._group, facts, position.startpoint)

    def _move(self, partition: tuple[str, int], startpoints: Startpoints) -> None:
        facts = self._facts(partition, self._assignment.position(partition))
        answer = startpoints.moved(self._group, facts, self._assignment.startpoint(partition))
        if isinstance(answer, StartTarget):
            # First: if the client can't, all is as it was, and the next look gets the same answer again.
            self._client.seek(TopicPartition(*partition, answer.offset))
            _LOG.info("%s-%d goes on at %d, by startpoint %d", *partition, answer.offset, answer.sequence)
        self.watcher.move(partition, answer)

    def _begin_again(self, partition: tuple[str, int]) -> None:
        [start] = self.load([TopicPartition(*partition)])
        if partition in self._assignment:
            self._client.seek(start)
            self._pauses.remove(Reason.STOPPED, [partition])

    def _facts(self, partition: tuple[str, int], position: int | None) -> PartitionFacts:
        return PartitionFacts(*partition, self._bounds, self._first_at, position, self._member.is_held)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        return ask_bounds(self._client, topic, partition)

    def _first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        asked = [TopicPartition(topic, partition, timestamp_ms)]
        [found] = ask_partitions(lambda left_s: self._client.offsets_for_times(asked, left_s))
        return found.offset if found.offset >= 0 else None


Load = Callable[[Sequence[TopicPartition]], list[TopicPartition]]


class PendingAssignment:
    """load: where the client is to begin, all of these or it raises. Not thread-safe."""

    def __init__(self, client: Consumer, load: Load, pauses: Pauses) -> None:
        self._client, self._load, self._pauses = client, load, pauses

    def __len__(self) -> int:
        return len(self._pauses.of(Reason.UNLOADED))

    def __contains__(self, partition: tuple[str, int]) -> bool:
        return partition in self._pauses.of(Reason.UNLOADED)

    def hold(self, partitions: Sequence[TopicPartition]) -> None:
        """They were assigned just now, and are not to be read."""
        self._pauses.add(Reason.UNLOADED, [(one.topic, one.partition) for one in partitions])

    def load_again(self) -> list[TopicPartition]:
        """Those that are read from now on. Raises what loading raises: then all are held until the next call."""
        held = sorted(self._pauses.of(Reason.UNLOADED))
        if not held:
            return []
        loaded = []
        for start in self._load([TopicPartition(*one) for one in held]):
            if not self._begun(start):
                break
            loaded.append(TopicPartition(start.topic, start.partition))
        return loaded

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are read now, or begin elsewhere."""
        self._pauses.remove(Reason.UNLOADED, [(one.topic, one.partition) for one in partitions])

    def _begun(self, start: TopicPartition) -> bool:
        """False if the client can't seek yet in a partition that has only just come."""
        try:
            if start.offset >= 0:  # else nothing is committed, and it stands where its reset policy put it
                self._client.seek(start)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:  # noqa: SLF001 - its only name
                raise
            return False
        self.forget([start])
        return True
