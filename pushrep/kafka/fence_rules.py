"""One instance ships an outbox to a topic: states by which others' batches are shut out before this one sends. Pure.

                    ┌───── refused ────┐  named: with the producer id and epoch that it has
    NEW ─ begin ─▶ INIT ─▶ ADD ─▶ END ─▶ MARKERS ─▶ MATCH ─▶ SHIPPING ─ renew (drained) ─▶ ADD, or INIT
                    │ refused by name                            ▲ after a renewal: straight from MARKERS
                    ▼                                            (any state) ─ begin: another session ─▶ INIT, named
                  ASKING ─ this one leads by the newest grant ─▶ INIT without a name
                    └──── another leads, or too few answer, or nobody is to be asked ─▶ TAKEN_OVER
    A named init that is answered with another producer id leads to ASKING, too: the coordinator forgot ours. Where
    nobody is to be asked, it goes on under the new id, or is FORGOTTEN if a fence is required. A new id is expected,
    and nobody is asked, where the epochs of ours were nearly used up. UNFENCED, FORGOTTEN: see FenceState.

A transactional id has one producer id, and its epoch rises with each InitProducerId. A transaction over all partitions
that is aborted writes a marker of that epoch into each: behind it the partition refuses older ones. EndTxn answers
before the markers are written, so each partition is read up to its own. The first init of an opening names nothing: who
opens an outbox takes it over. Every later one names what it has, and so a shipper that was replaced finds it out
(KIP-360). Where the cluster has transaction version 2 an empty transaction raises the epoch by itself (KIP-890); below,
a renewal needs an init.
Effects are carried out by fence_driver.py; each brings the event that the state waits for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from pushrep.kafka.answers import Code

EPOCH_MAX = (1 << 15) - 1
"""Kafka's epochs have 16 bits; near their end a coordinator gives a new producer id by itself."""
_EXHAUSTED_FROM = EPOCH_MAX - 2


class ProducerId(NamedTuple):
    """What batches carry: a producer id and its epoch."""

    id: int
    epoch: int

    @property
    def is_exhausted(self) -> bool:
        """Whether the coordinator may answer with a new producer id because this one has no epochs left."""
        return self.epoch >= _EXHAUSTED_FROM


NO_PRODUCER = ProducerId(-1, -1)


class FenceState(Enum):
    """See the file's map."""

    NEW = auto()
    INIT = auto()
    ADD = auto()
    END = auto()
    MARKERS = auto()
    MATCH = auto()
    SHIPPING = auto()
    ASKING = auto()
    TAKEN_OVER = auto()
    FORGOTTEN = auto()
    """A fence is required, and the coordinator forgot the id: nothing is shipped until the outbox is opened again."""
    UNFENCED = auto()
    """This instance has no right to fence, or the brokers can't: it ships under ids that the brokers give out, nobody
    is shut out, and each session tries the fence again."""


# What the shell is to do next.


class InitProducer(NamedTuple):
    """Ask for the transactional id's next epoch; `named` is what this shipper has, or NO_PRODUCER."""

    named: ProducerId


class AddPartitions(NamedTuple):
    """Begin a transaction over all partitions of the topic."""

    producer: ProducerId


class AbortTransaction(NamedTuple):
    """End it without records, which writes the markers."""

    producer: ProducerId


class ReadMarkers(NamedTuple):
    """Read every partition until a marker of this producer id, of this epoch or a later one, is met."""

    producer: ProducerId


class Match(NamedTuple):
    """Find out what the topic holds. No earlier instance adds to it any more, unless `earlier_unfenced`."""


class Ship(NamedTuple):
    """Send under this producer id and epoch, sequence numbers from 0; None: under ids that the brokers give out."""

    producer: ProducerId | None


class AskMembers(NamedTuple):
    """Ask the members whether this one leads by the newest grant."""


class RefuseShipping(NamedTuple):
    """Neither init nor ship."""

    why: str
    is_taken_over: bool


Effect = InitProducer | AddPartitions | AbortTransaction | ReadMarkers | Match | Ship | AskMembers | RefuseShipping


# What came of it.


class Begun(NamedTuple):
    """A session begins; whatever was under way is over."""


class Given(NamedTuple):
    """InitProducerId's answer."""

    producer: ProducerId


class Added(NamedTuple):
    """The partitions are in the transaction."""


class Ended(NamedTuple):
    """EndTxn's answer; None: it names no producer id (below transaction version 2)."""

    producer: ProducerId | None


class MarkersRead(NamedTuple):
    """Each partition holds its marker."""


class Matched(NamedTuple):
    """What the topic holds is known."""


class RenewalDue(NamedTuple):
    """The id is to be renewed, and nothing is under way."""


class FenceRefused(NamedTuple):
    """The coordinator refuses this producer id or epoch."""

    why: str


class NotAllowed(NamedTuple):
    """The right to the transactional id is missing, or the brokers don't know the calls."""

    why: str


class MembersAnswered(NamedTuple):
    """Whether this member leads by the newest grant; False also where too few answered."""

    is_newest: bool


Event = Begun | Given | Added | Ended | MarkersRead | Matched | RenewalDue | FenceRefused | NotAllowed | MembersAnswered

EXPECTED: Mapping[FenceState, frozenset[type[Event]]] = {
    FenceState.NEW: frozenset({Begun}),
    FenceState.INIT: frozenset({Begun, Given, FenceRefused, NotAllowed}),
    FenceState.ADD: frozenset({Begun, Added, FenceRefused, NotAllowed}),
    FenceState.END: frozenset({Begun, Ended, FenceRefused, NotAllowed}),
    FenceState.MARKERS: frozenset({Begun, MarkersRead}),
    FenceState.MATCH: frozenset({Begun, Matched}),
    FenceState.SHIPPING: frozenset({Begun, RenewalDue}),
    FenceState.ASKING: frozenset({Begun, MembersAnswered}),
    FenceState.TAKEN_OVER: frozenset({Begun}),
    FenceState.FORGOTTEN: frozenset({Begun}),
    FenceState.UNFENCED: frozenset({Begun}),
}
"""Which events a state may meet; any other is a fault of the shell."""
assert EXPECTED.keys() == set(FenceState)


class CoordinatorReaction(Enum):
    """What an answer of the coordinator means."""

    DONE = auto()
    SOON = auto()
    """The same again in a moment."""
    AGAIN = auto()
    """The same after a pause, of the coordinator that is asked for anew."""
    SHORTER = auto()
    """The same with a shorter time for a transaction."""
    REFUSED = auto()
    NOT_ALLOWED = auto()


_REACTIONS: Mapping[int, CoordinatorReaction] = {
    Code.NONE: CoordinatorReaction.DONE,
    Code.COORDINATOR_LOAD_IN_PROGRESS: CoordinatorReaction.SOON,
    Code.CONCURRENT_TRANSACTIONS: CoordinatorReaction.SOON,  # the markers of the last one are being written
    Code.INVALID_TRANSACTION_TIMEOUT: CoordinatorReaction.SHORTER,
    Code.INVALID_PRODUCER_EPOCH: CoordinatorReaction.REFUSED,
    Code.PRODUCER_FENCED: CoordinatorReaction.REFUSED,
    Code.INVALID_PRODUCER_ID_MAPPING: CoordinatorReaction.REFUSED,
    Code.INVALID_TXN_STATE: CoordinatorReaction.REFUSED,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: CoordinatorReaction.NOT_ALLOWED,
    Code.CLUSTER_AUTHORIZATION_FAILED: CoordinatorReaction.NOT_ALLOWED,
    Code.TOPIC_AUTHORIZATION_FAILED: CoordinatorReaction.NOT_ALLOWED,
    Code.UNSUPPORTED_VERSION: CoordinatorReaction.NOT_ALLOWED,
}


def coordinator_reaction_to(error_code: int) -> CoordinatorReaction:
    """A code that is not in the table passes: the coordinator is asked for anew."""
    return _REACTIONS.get(error_code, CoordinatorReaction.AGAIN)


@dataclass(slots=True)
class Fence:
    """See the file's map. `on` takes an event and says what to do next.

    has_members: there are others who know whether this one leads. is_required: without a fence nothing is shipped.
    has_shipped: the topic holds records of an earlier opening.
    is_standing: brokers refuse batches of other instances. why_unfenced: why they don't, by a missing right or an old
    broker. earlier_unfenced: the coordinator does not know the transactional id, or forgot it; so instances from before
    have other producer ids and are not shut out.
    """

    has_members: bool
    is_required: bool = False
    has_shipped: bool = False
    state: FenceState = FenceState.NEW
    producer: ProducerId = NO_PRODUCER
    is_standing: bool = False
    why_unfenced: str | None = None
    earlier_unfenced: bool = False
    _raises: bool = field(default=False, init=False)  # EndTxn raises the epoch
    _is_renewal: bool = field(default=False, init=False)
    _changed: ProducerId | None = field(default=None, init=False)  # a new producer id, until the members were asked
    _why: str = field(default="", init=False)

    def on(self, event: Event) -> Effect:  # noqa: C901, PLR0911 - one arm an event
        """The next effect. The event has to be one that the state may meet."""
        assert type(event) in EXPECTED[self.state], f"{event} in {self.state}"
        match event:
            case Begun():
                return self._begin()
            case Given(producer):
                return self._on_producer_id(producer)
            case Added():
                self.state = FenceState.END
                return AbortTransaction(self.producer)
            case Ended(producer):
                return self._ended(producer)
            case MarkersRead():
                return self._ship() if self._is_renewal else self._match()
            case Matched():
                return self._ship()
            case RenewalDue():
                self._is_renewal = True
                return self._add(self.producer) if self._raises else self._init(self.producer)
            case FenceRefused(why):
                return self._refused(why)
            case NotAllowed(why):
                return self._not_allowed(why)
            case MembersAnswered(is_newest):
                return self._members_said(is_newest=is_newest)

    def _begin(self) -> Effect:
        self._is_renewal = False
        if self.state in {FenceState.TAKEN_OVER, FenceState.ASKING}:
            return self._ask(self._why)
        return self._forgotten() if self.state is FenceState.FORGOTTEN else self._init(self.producer)

    def _init(self, named: ProducerId) -> Effect:
        self.state = FenceState.INIT
        return InitProducer(named)

    def _on_producer_id(self, producer: ProducerId) -> Effect:
        is_other = self.producer not in {NO_PRODUCER, producer} and producer.id != self.producer.id
        if is_other and not self.producer.is_exhausted:
            self._changed = producer
            return self._ask(f"the coordinator has forgotten producer id {self.producer.id}, and gave {producer.id}")
        if self.producer == NO_PRODUCER:
            self.earlier_unfenced = self.has_shipped and producer.epoch == 0  # the id is new to the coordinator
        return self._add(producer)

    def _add(self, producer: ProducerId) -> Effect:
        self.producer, self.state = producer, FenceState.ADD
        return AddPartitions(producer)

    def _ended(self, producer: ProducerId | None) -> Effect:
        marked = self.producer if producer is None or producer.id != self.producer.id else producer
        self._raises = producer is not None
        self.producer, self.state = producer or self.producer, FenceState.MARKERS
        return ReadMarkers(marked)

    def _match(self) -> Effect:
        self.state = FenceState.MATCH
        return Match()

    def _ship(self) -> Effect:
        self.state, self.why_unfenced, self.is_standing = FenceState.SHIPPING, None, True
        return Ship(self.producer)

    def _refused(self, why: str) -> Effect:
        if self.state is not FenceState.INIT or self.producer == NO_PRODUCER:
            return self._init(self.producer)  # a transaction that timed out refuses nothing: the init decides
        return self._ask(why)

    def _ask(self, why: str) -> Effect:
        self._why = why
        if self.has_members:
            self.state = FenceState.ASKING
            return AskMembers()
        # Nobody else knows. A forgotten id is no sign of another shipper; an epoch above ours is one.
        return self._go_on() if self._changed is not None else self._taken_over()

    def _members_said(self, *, is_newest: bool) -> Effect:
        return self._go_on() if is_newest else self._taken_over()

    def _go_on(self) -> Effect:
        changed, self._changed = self._changed, None
        self._is_renewal = False  # another instance may have shipped meanwhile: that has to be matched
        if changed is None:
            self.producer = NO_PRODUCER
            return self._init(NO_PRODUCER)
        self.earlier_unfenced, self.producer = True, changed
        return self._forgotten() if self.is_required else self._add(changed)

    def _forgotten(self) -> Effect:
        self.state, self.is_standing = FenceState.FORGOTTEN, False
        return RefuseShipping(f"{self._why}: earlier instances are not fenced", is_taken_over=False)

    def _taken_over(self) -> Effect:
        self.state, self.is_standing = FenceState.TAKEN_OVER, False
        return RefuseShipping(self._why, is_taken_over=True)

    def _not_allowed(self, why: str) -> Effect:
        self.why_unfenced, self.is_standing = why, False
        self.state = FenceState.NEW if self.is_required else FenceState.UNFENCED
        return RefuseShipping(why, is_taken_over=False) if self.is_required else Ship(None)
