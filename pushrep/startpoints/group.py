"""Startpoints for consumers that store their positions in Kafka: what `filtering.consumers` needs, by a
StartpointStore.

    ReplayFilteredConsumer(settings, startpoints=GroupStartpoints(store))

    assigned    claim ─▶ what the group committed is consumed ─▶ apply: `applied` is stored, then the offset is used
    running     every look_every_s, if the store has changed: apply a newer one, then go there between two reads
    committed   the group's commit carries the sequence ─▶ consume

If it is killed before `applied`, nothing has happened; after it, the stored offset is used again; after the commit, the
next holder sees the sequence in it, stores `consumed`, and goes on from the committed position.

A member whose start was delayed may claim a partition that the group has given to another member meanwhile. A member
that lost its claim therefore asks the group's coordinator, and claims again if the partition is its own.
"""

import logging
from contextlib import suppress

from filtering.consumers.startpoints import Answer, PartitionFacts, RefusedStartpoint, StartTarget
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.errors import BadArgument
from pushrep.startpoints.model import Claim, Kind, PartitionLost, Reader, StartpointFailed, State, StoreUnavailable
from pushrep.startpoints.resolve import LogFacts
from pushrep.startpoints.store import StartpointStore, StorePoll

_LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
_REFUSED = {Kind.BOOTSTRAP: "BOOTSTRAP holds other partitions, which a consumer group can't: take EARLIEST"}


class GroupStartpoints:
    """The startpoints of a store, in a directory or a topic, for the groups of one process. The group is the consumer.

    look_every_s: how often a running consumer looks whether the store has changed: a look at a file, or one question
    to a broker. While the store does not answer, a running consumer goes on, and asks less and less often, once a
    minute at last. A startpoint that can't be applied stops its partition, StartpointFailed says why; cancel it or set
    another one. BOOTSTRAP is refused by name: a group's other partitions can't be held. Raises BadArgument.
    """

    def __init__(
        self, store: StartpointStore, *, look_every_s: float = LOOK_EVERY_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if not look_every_s > 0:
            raise BadArgument("look_every_s", f"give seconds above 0, not {look_every_s!r}")
        self.look_every_s = look_every_s
        self._store, self._poll = store, StorePoll(store, clock)
        self._claims: dict[Reader, Claim] = {}
        self._version, self._size_bytes = 0, -1
        self._is_open = False  # a call failed and has to be repeated, though the store did not change
        self._unacknowledged: set[tuple[Reader, int]] = set()  # committed, but `consumed` is not stored yet

    def version(self) -> int:
        """A number that changes with every change of the store; the last one while the store can't be reached."""
        try:
            size_bytes = self._poll.poll_size() if self._version else self._store.size_bytes()
        except StoreUnavailable:
            if not self._version:
                raise
            return self._version
        if self._is_open or size_bytes != self._size_bytes:
            self._version, self._size_bytes, self._is_open = self._version + 1, size_bytes, False
        return self._version

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Answer:
        """Claim the partition and apply the newest startpoint above the committed one, once; None without one."""
        reader = Reader(consumer, facts.topic, facts.partition)
        self._unacknowledged -= self._unacknowledged_of(reader)
        claim = self._claims[reader] = self._store.claim(*_names(reader))
        committed = self._store.reader_state(committed_sequence, reader)
        if committed is not None and committed.state is State.APPLIED:
            self._store.consume(claim, committed_sequence, committed=committed_sequence)
        return self._newer(claim, facts, committed_sequence)

    def moved(self, consumer: str, facts: PartitionFacts, running_sequence: int) -> Answer:
        """Apply a startpoint newer than the partition's present one, once; None without one."""
        reader = Reader(consumer, facts.topic, facts.partition)
        if reader not in self._claims:
            return None
        try:
            return self._poll.ask(lambda: self._followed(reader, facts, running_sequence))
        except StoreUnavailable:
            self._is_open = True
        except PartitionLost as lost:
            _LOG.info("%s; its holder applies what is new", lost)
            self._is_open = True
        return None

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """The group has a commit with this sequence: store that it is consumed.

        If the store can't be reached, a later look does it, or the next holder, by the sequence in the commit.
        """
        reader = Reader(consumer, topic, partition)
        self._unacknowledged.add((reader, sequence))
        try:
            with suppress(StoreUnavailable):
                self._poll.ask(lambda: self._acknowledge(reader))
        except PartitionLost as lost:
            _LOG.info("%s; startpoint %d is marked as consumed later", lost, sequence)
        self._is_open |= bool(self._unacknowledged)

    def _acknowledge(self, reader: Reader) -> None:
        """Store `consumed` for committed startpoints that lack it."""
        for one in sorted(self._unacknowledged_of(reader)):
            self._store.consume(self._claims[reader], one[1], committed=one[1])
            self._unacknowledged.remove(one)

    def _unacknowledged_of(self, reader: Reader) -> set[tuple[Reader, int]]:
        return {one for one in self._unacknowledged if one[0] == reader}

    def _followed(self, reader: Reader, facts: PartitionFacts, sequence: int) -> Answer:
        """The newer startpoint of a running partition. Raises PartitionLost if another member has the partition."""
        try:
            return self._answer(reader, facts, sequence)
        except PartitionLost:
            if not facts.is_held(facts.topic, facts.partition):
                raise
        self._claims[reader] = self._store.claim(*_names(reader))
        return self._answer(reader, facts, sequence)

    def _answer(self, reader: Reader, facts: PartitionFacts, sequence: int) -> Answer:
        self._acknowledge(reader)
        return self._newer(self._claims[reader], facts, sequence)

    def _newer(self, claim: Claim, facts: PartitionFacts, sequence: int) -> Answer:
        reader = claim.reader
        waiting = self._store.read(*_names(reader))
        if waiting is None or waiting.sequence <= sequence:
            return None
        start, end = facts.bounds(facts.topic, facts.partition)
        log = LogFacts(start=start, end=end, first_at=lambda ms: facts.first_at(facts.topic, facts.partition, ms))
        try:
            applied = self._store.apply(claim, log, position=facts.position, committed=sequence, refused=_REFUSED)
        except StartpointFailed as failed:
            return RefusedStartpoint(failed.sequence, failed)
        if applied is None:
            return None
        reader_state = self._store.reader_state(applied.sequence, reader)
        assert reader_state is not None, "applied is only what was written"
        return StartTarget(applied.offset, applied.sequence, reader_state.written.startpoint.reset_marks)


def _names(reader: Reader) -> tuple[str, str, int]:
    return reader.consumer, reader.topic, reader.partition
