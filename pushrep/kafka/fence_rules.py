"""Only one instance ships an outbox to a topic: the states of fencing the others before this one sends. Pure.

                    ┌───── refused ────┐  named: with the producer id and epoch that it has
    NEW ─ begin ─▶ INIT ─▶ ADD ─▶ END ─▶ MARKERS ─▶ MATCH ─▶ SHIPPING ─ renew (drained) ─▶ ADD, or INIT
                    │ refused by name                            ▲ after a renewal: straight from MARKERS
                    ▼                                            (any state) ─ begin: another session ─▶ INIT, named
                  ASKING ─ this one leads by the newest grant ─▶ INIT without a name
                    └──── another leads, or too few answer, or nobody is to be asked ─▶ TAKEN_OVER
    If the coordinator answers a named init with another producer id, it forgot ours: the state is ASKING, too. Without
    members to ask, it goes on under the new id, or is FORGOTTEN if a fence is required. If the epochs of our id were
    nearly used up, a new id is expected, and nobody is asked. UNFENCED, FORGOTTEN: see FenceState.

A transactional id has one producer id, whose epoch rises with each InitProducerId. Aborting a transaction over all
partitions writes a marker of that epoch into each, and after it the partition refuses older epochs. EndTxn answers
before the markers are written, so each partition is read up to its marker. The first init of an opening names no
producer id: opening an outbox takes it over. Every later one names the present id and epoch, so that a shipper that was
replaced gets an error (KIP-360). Where the cluster has transaction version 2 an empty transaction raises the epoch by
itself (KIP-890); below, a renewal needs an init.
fence_driver.py carries out the effects; each results in an event that the state waits for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from pushrep.kafka.answers import Code

EPOCH_MAX = (1 << 15) - 1
"""Kafka's epochs have 16 bits; near their end a coordinator assigns a new producer id by itself."""
_EXHAUSTED_FROM = EPOCH_MAX - 2


class ProducerId(NamedTuple):
    """The producer id and epoch in batches."""

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


# Effects: what the driver does next.


class InitProducer(NamedTuple):
    """Ask for the transactional id's next epoch; `named` is what this shipper has, or NO_PRODUCER."""

    named: ProducerId


class AddPartitions(NamedTuple):
    """Begin a transaction over all partitions of the topic."""

    producer: ProducerId


class AbortTransaction(NamedTuple):
    """Abort the transaction, which writes the markers."""

    producer: ProducerId


class ReadMarkers(NamedTuple):
    """Read every partition up to a marker of this producer id with this epoch or a later one."""

    producer: ProducerId


class Match(NamedTuple):
    """Read what the topic holds. No earlier instance can add to it, unless `earlier_unfenced`."""


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


# Events: the results of effects.


class Begun(NamedTuple):
    """A session begins; effects of an earlier one are void."""


class Given(NamedTuple):
    """InitProducerId's answer."""

    producer: ProducerId


class Added(NamedTuple):
    """The partitions are in the transaction."""


class Ended(NamedTuple):
    """EndTxn's answer; None: it names no producer id (below transaction version 2)."""

    producer: ProducerId | None


class MarkersRead(NamedTuple):
    """Each partition has its marker."""


class Matched(NamedTuple):
    """The topic's content is known."""


class RenewalDue(NamedTuple):
    """The id has to be renewed, and nothing is in flight."""


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
"""The events that each state accepts; any other is a bug of the driver."""
assert EXPECTED.keys() == set(FenceState)


class CoordinatorReaction(Enum):
    """What to do after the coordinator's answer."""

    DONE = auto()
    SOON = auto()
    """Ask the same again in a moment."""
    AGAIN = auto()
    """Look the coordinator up again, and ask it after a pause."""
    SHORTER = auto()
    """Ask again with a shorter transaction timeout."""
    REFUSED = auto()
    NOT_ALLOWED = auto()


_REACTIONS: Mapping[int, CoordinatorReaction] = {
    Code.NONE: CoordinatorReaction.DONE,
    Code.COORDINATOR_LOAD_IN_PROGRESS: CoordinatorReaction.SOON,
    Code.CONCURRENT_TRANSACTIONS: CoordinatorReaction.SOON,  # the last transaction's markers are being written
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
    """The reaction to an error code; for one that is not in the table, the coordinator is looked up again."""
    return _REACTIONS.get(error_code, CoordinatorReaction.AGAIN)


@dataclass(slots=True)
class Fence:
    """See the file's map. `on` takes an event and returns the next effect.

    has_members: there are members to ask who leads. is_required: nothing is shipped without a fence. has_shipped: the
    topic holds records of an earlier opening. is_standing: brokers refuse batches of other instances. why_unfenced: why
    they don't: a missing right or an old broker. earlier_unfenced: the coordinator did not know the transactional id,
    so earlier instances have other producer ids and are not fenced.
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
            return self._init(self.producer)  # perhaps the transaction only timed out: the init decides
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
        self._is_renewal = False  # another instance may have shipped meanwhile: match again
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
