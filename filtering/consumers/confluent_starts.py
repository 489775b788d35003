"""Where the partitions of confluent-kafka's consumer begin, and where startpoints send them while they are read.

    load     the committed position of each, with its marks; or where its startpoint says, or stopped
    follow   between two reads: what is new is asked for, then the client seeks; a stopped partition is paused

A partition that was stopped begins anew as soon as its startpoint is cancelled or a newer one is there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from filtering.consumers.confluent_asking import ask_bounds, ask_partitions, naming_rights
from filtering.consumers.confluent_member import ConfluentMember
from filtering.consumers.following import Following
from filtering.consumers.pauses import Pauses, Reason
from filtering.consumers.positions import CommittedPosition, decode
from filtering.consumers.reading import NO_MARKS, PendingCommit, Reading
from filtering.consumers.startpoints import Answer, PartitionFacts, Startpoints, StartTarget
from filtering.highwater import HighwaterMarks

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
        reading: Reading,
        startpoints: Startpoints | None,
        marks_of: MarksOf,
        pauses: Pauses,
    ) -> None:
        self._pauses = pauses
        self._member, self._client, self._group, self._reading = member, member.client, member.group, reading
        self._startpoints, self._marks_of = startpoints, marks_of
        self.following = Following(reading, None if startpoints is None else startpoints.look_every_s)

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
            begins = self.following.begin(partition, offset, kept, sequence, answer)
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
        if self._startpoints is not None and self.following.is_time(now_s):
            version = self._startpoints.version()
            if not self.following.is_new(version) or self._obeyed(self._startpoints):
                self.following.looked(version, now_s)
        self.following.tell()

    def pause_stopped(self) -> None:
        """Those that may not be read, once the client has them."""
        self._pauses.add(Reason.STOPPED, set(self.following.stopped) - self._pauses.of(Reason.STOPPED))

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are going."""
        self.following.forget({(one.topic, one.partition) for one in partitions})

    def consumed(self, due: Sequence[PendingCommit]) -> None:
        """A commit of these is stored."""
        for one in due:
            if one.has_new_startpoint and self._startpoints is not None:
                self._startpoints.consumed(self._group, one.topic, one.partition, one.startpoint)

    def _obeyed(self, startpoints: Startpoints) -> bool:
        """Whether all is done; a partition that has just come can't be moved yet, and is at the next call."""
        try:
            stopped = self._pauses.of(Reason.STOPPED)
            for partition in set(self._reading) - stopped:
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
        facts = self._facts(partition, self._reading.position(partition))
        answer = startpoints.moved(self._group, facts, self._reading.startpoint(partition))
        if isinstance(answer, StartTarget):
            # First: if the client can't, all is as it was, and the next look gets the same answer again.
            self._client.seek(TopicPartition(*partition, answer.offset))
            _LOG.info("%s-%d goes on at %d, by startpoint %d", *partition, answer.offset, answer.sequence)
        self.following.move(partition, answer)

    def _begin_again(self, partition: tuple[str, int]) -> None:
        [start] = self.load([TopicPartition(*partition)])
        if partition in self._reading:
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
