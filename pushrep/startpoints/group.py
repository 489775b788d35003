"""Startpoints for consumers that keep their positions in Kafka: what `filtering.consumers` asks, by a StartpointStore.

    ReplayFilteredConsumer(settings, startpoints=GroupStartpoints(store))

    assigned    claim ─▶ what the group committed is consumed ─▶ apply: `applied` is stored, then the offset is used
    committed   the group's commit carries the sequence ─▶ consume

Killed in between: before `applied` nothing has happened; after it the stored offset is used again; after the commit the
next holder sees the sequence in it, says `consumed`, and goes on from the committed position.
"""

import logging

from filtering.consumers.startpoints import PartitionFacts, Wish
from pushrep.startpoints.checkpoints import Claim
from pushrep.startpoints.errors import PartitionLost, StartpointFailed
from pushrep.startpoints.model import Kind, Reader
from pushrep.startpoints.resolve import LogFacts
from pushrep.startpoints.states import State
from pushrep.startpoints.store import StartpointStore

_LOG = logging.getLogger(__name__)


class GroupStartpoints:
    """The startpoints of a store, in a directory or a topic, for the groups of one process. The group is the consumer.

    A startpoint that can't be applied raises StartpointFailed out of the assignment, so nothing of it is read; cancel
    it or set another one. BOOTSTRAP fails by name: a group's other partitions can't be held.
    """

    def __init__(self, store: StartpointStore) -> None:
        self._store = store
        self._claims: dict[Reader, Claim] = {}

    def pending(self, consumer: str, facts: PartitionFacts, committed_sequence: int) -> Wish | None:
        """Take the partition over; apply the newest startpoint above the committed one, once. None: there is none."""
        reader = Reader(consumer, facts.topic, facts.partition)
        claim = self._claims[reader] = self._store.claim(*_names(reader))
        committed = self._store.standing(committed_sequence, reader)
        if committed is not None and committed.state is State.APPLIED:
            self._store.consume(claim, committed_sequence, committed=committed_sequence)
        self._store.sweep()
        waiting = self._store.ledger().pending(reader, committed_sequence)
        if waiting is None:
            return None
        if waiting.written.startpoint.kind is Kind.BOOTSTRAP:
            why = "BOOTSTRAP holds other partitions, which a consumer group can't: take EARLIEST"
            raise StartpointFailed(reader, waiting.sequence, why)
        start, end = facts.bounds(facts.topic, facts.partition)
        log = LogFacts(start=start, end=end, first_at=lambda ms: facts.first_at(facts.topic, facts.partition, ms))
        applied = self._store.apply(claim, log, position=facts.position, committed=committed_sequence)
        if applied is None:
            return None
        standing = self._store.standing(applied.sequence, reader)
        assert standing is not None, "applied is only what was written"
        return Wish(applied.offset, applied.sequence, standing.written.startpoint.reset_marks)

    def consumed(self, consumer: str, topic: str, partition: int, sequence: int) -> None:
        """A commit that carries this sequence is stored. Who took the partition over meanwhile says so instead."""
        reader = Reader(consumer, topic, partition)
        try:
            self._store.consume(self._claims[reader], sequence, committed=sequence)
        except PartitionLost as lost:
            _LOG.info("%s; its next holder finds the sequence in the commit", lost)


def _names(reader: Reader) -> tuple[str, str, int]:
    return reader.consumer, reader.topic, reader.partition
