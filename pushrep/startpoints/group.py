"""Startpoints for consumers that keep their positions in Kafka: what `filtering.consumers` asks, by a StartpointStore.

    ReplayFilteredConsumer(settings, startpoints=GroupStartpoints(store))

    assigned    claim ─▶ what the group committed is consumed ─▶ apply: `applied` is stored, then the offset is used
    running     every look_every_s, if the store has changed: apply a newer one, then go there between two reads
    committed   the group's commit carries the sequence ─▶ consume

Killed in between: before `applied` nothing has happened; after it the stored offset is used again; after the commit the
next holder sees the sequence in it, says `consumed`, and goes on from the committed position.
"""

import logging

from filtering.consumers.startpoints import Answer, PartitionFacts, Refusal, Wish
from pushrep.errors import BadArgument
from pushrep.startpoints.checkpoints import Claim
from pushrep.startpoints.errors import NotWritten, PartitionLost, StartpointFailed, StoreBusy, StoreUnavailable
from pushrep.startpoints.model import Kind, Reader
from pushrep.startpoints.resolve import LogFacts
from pushrep.startpoints.states import State
from pushrep.startpoints.store import StartpointStore

_LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
_AWAY = (StoreUnavailable, StoreBusy, NotWritten)
_REFUSED = {Kind.BOOTSTRAP: "BOOTSTRAP holds other partitions, which a consumer group can't: take EARLIEST"}


class GroupStartpoints:
    """The startpoints of a store, in a directory or a topic, for the groups of one process. The group is the consumer.

    look_every_s: how often a running consumer looks whether the store has changed: a look at a file, or one question
    to a broker. A startpoint that can't be applied stops its partition, StartpointFailed says why; cancel it or set
    another one. BOOTSTRAP is refused by name: a group's other partitions can't be held. Raises BadArgument.
    """

    def __init__(self, store: StartpointStore, *, look_every_s: float = LOOK_EVERY_S) -> None:
        if not look_every_s > 0:
            raise BadArgument("look_every_s", f"give seconds above 0, not {look_every_s!r}")
        self.look_every_s = look_every_s
        self._store = store
        self._claims: dict[Reader, Claim] = {}
        self._version, self._size_bytes = 0, -1
        self._is_away = False  # since a partition asked in vain: what it asked for is looked at again

    def version(self) -> int:
        """A number that changes with every change of the store. One that can't be reached holds no running consumer."""
        try:
            size_bytes = self._store.size_bytes()
        except StoreUnavailable as error:
            if self._version == 0:
                raise
            self._warn(error)
            return self._version
        if self._is_away or size_bytes != self._size_bytes:
            self._version, self._size_bytes, self._is_away = self._version + 1, size_bytes, False
        return self._version

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Answer:
        """Take the partition over; apply the newest startpoint above the committed one, once. None: there is none."""
        reader = Reader(consumer, facts.topic, facts.partition)
        claim = self._claims[reader] = self._store.claim(*_names(reader))
        committed = self._store.standing(committed_sequence, reader)
        if committed is not None and committed.state is State.APPLIED:
            self._store.consume(claim, committed_sequence, committed=committed_sequence)
        return self._newer(claim, facts, committed_sequence)

    def moved(self, consumer: str, facts: PartitionFacts, running_sequence: int) -> Answer:
        """Apply a startpoint newer than the one that the partition runs from, once. None: there is none."""
        claim = self._claims.get(Reader(consumer, facts.topic, facts.partition))
        if claim is None or self._is_away:
            return None
        try:
            return self._newer(claim, facts, running_sequence)
        except PartitionLost as lost:
            _LOG.info("%s; its next holder applies what is new", lost)
        except _AWAY as error:
            self._is_away = True
            self._warn(error)
        return None

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """A commit that carries this sequence is stored. Who took the partition over meanwhile says so instead."""
        reader = Reader(consumer, topic, partition)
        try:
            self._store.consume(self._claims[reader], sequence, committed=sequence)
        except PartitionLost as lost:
            _LOG.info("%s; its next holder finds the sequence in the commit", lost)
        except _AWAY as error:
            _LOG.warning("%s; the commit is stored, the next holder finds the sequence in it", error)

    def _warn(self, error: Exception) -> None:
        _LOG.warning("%s; new startpoints wait, it is looked at again in %g s", error, self.look_every_s)

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
            return Refusal(failed.sequence, failed)
        if applied is None:
            return None
        standing = self._store.standing(applied.sequence, reader)
        assert standing is not None, "applied is only what was written"
        return Wish(applied.offset, applied.sequence, standing.written.startpoint.reset_marks)


def _names(reader: Reader) -> tuple[str, str, int]:
    return reader.consumer, reader.topic, reader.partition
