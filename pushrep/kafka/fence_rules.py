"""Only one instance ships an outbox to a topic: how the others are fenced before this one sends. Pure.

The transactional id, one transaction after another:

                  ┌───── refused ────┐  named: with the producer id and epoch that it has
    NEW ─ begin ─▶ INIT ─▶ READY ─ due ─▶ ADD ─▶ END ─▶ READY ...
                  │ refused by name                    (any state) ─ begin: another session ─▶ INIT, named
                  ▼
                ASKING ─ this one leads by the newest grant ─▶ INIT without a name
                  └──── another leads, or too few answer, or nobody is to be asked ─▶ TAKEN_OVER
    If the coordinator answers a named init with another producer id, it forgot ours, and the state is ASKING; without
    members to ask, this one goes on under the new id, or is FORGOTTEN if a fence is required. Where the epochs of our
    id were nearly used up, a new id is expected, and nobody is asked. UNFENCED, FORGOTTEN: see FenceState.

Each Kafka partition by itself:

    NO_LEADER ─▶ LOOKED_AT ─▶ WAITING ─▶ LISTED ─▶ SOUGHT ─▶ MATCHED ─▶ SHIPPING ─ renewal due ─▶ DRAINING ─▶ WAITING
        ▲  has a leader  nothing lost  in a    it ended,  its marker       ▲ a renewal: straight from SOUGHT, or LISTED
        └── no leader any more       transaction           was met         └─── what the topic holds is known

A transactional id has one producer id, whose epoch rises with each InitProducerId. Aborting a transaction writes a
marker of that epoch into each partition that it lists, and after it the partition refuses older epochs. EndTxn answers
before the markers are written, and a partition that has no leader then may never get its marker; so each partition is
read up to its own marker, is shipped to under that marker's epoch, and keeps it when later transactions raise the epoch
elsewhere. The first init of an opening names no producer id: opening an outbox takes it over. Every later one names the
present id and epoch, so that a shipper that was replaced gets an error (KIP-360). Where the cluster has transaction
version 2 an empty transaction raises the epoch by itself (KIP-890); below, a renewal needs an init.
fence_driver.py carries out the effects; each results in an event that the state waits for.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
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
    READY = auto()
    ADD = auto()
    END = auto()
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
    """Begin a transaction over these partitions of the topic."""

    producer: ProducerId
    partitions: Collection[int]


class AbortTransaction(NamedTuple):
    """Abort the transaction, which writes the markers."""

    producer: ProducerId


class Await(NamedTuple):
    """Wait until a transaction is due."""


class SeekMarkers(NamedTuple):
    """The listed partitions get a marker of this producer id and epoch."""

    producer: ProducerId


class ShipUnfenced(NamedTuple):
    """Send under ids that the brokers give out."""


class AskMembers(NamedTuple):
    """Ask the members whether this one leads by the newest grant."""


class RefuseShipping(NamedTuple):
    """Neither init nor ship."""

    why: str
    is_taken_over: bool


Effect = (
    InitProducer | AddPartitions | AbortTransaction | Await | SeekMarkers | ShipUnfenced | AskMembers | RefuseShipping
)


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


class Due(NamedTuple):
    """These partitions need a marker; is_renewal: they have one of this session."""

    partitions: Collection[int]
    is_renewal: bool = False


class Busy(NamedTuple):
    """The coordinator ends another transaction first; of this one, only these partitions can't go on without it."""

    partitions: Collection[int]


class FenceRefused(NamedTuple):
    """The coordinator refuses this producer id or epoch."""

    why: str


class NotAllowed(NamedTuple):
    """The right to the transactional id is missing, or the brokers don't know the calls."""

    why: str


class MembersAnswered(NamedTuple):
    """Whether this member leads by the newest grant; False also where too few answered."""

    is_newest: bool


Event = Begun | Given | Due | Busy | Added | Ended | FenceRefused | NotAllowed | MembersAnswered

EXPECTED: Mapping[FenceState, frozenset[type[Event]]] = {
    FenceState.NEW: frozenset({Begun}),
    FenceState.INIT: frozenset({Begun, Given, Busy, FenceRefused, NotAllowed}),
    FenceState.READY: frozenset({Begun, Due}),
    FenceState.ADD: frozenset({Begun, Added, Busy, FenceRefused, NotAllowed}),
    FenceState.END: frozenset({Begun, Ended, FenceRefused, NotAllowed}),
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
    topic holds records of an earlier opening. is_standing: brokers refuse batches of other instances, in every
    partition. why_unfenced: why they don't: a missing right or an old broker. earlier_unfenced: the coordinator did not
    know the transactional id, so earlier instances have other producer ids and are not fenced. times_anew: how often
    another instance may have shipped under an id of its own meanwhile: what is known of the partitions is void.
    """

    has_members: bool
    is_required: bool = False
    has_shipped: bool = False
    state: FenceState = FenceState.NEW
    producer: ProducerId = NO_PRODUCER
    is_standing: bool = False
    why_unfenced: str | None = None
    earlier_unfenced: bool = False
    times_anew: int = 0
    _raises: bool = field(default=False, init=False)  # EndTxn raises the epoch
    _listed: Collection[int] = field(default=(), init=False)  # of the transaction that is to be ended
    _changed: ProducerId | None = field(default=None, init=False)  # a new producer id, until the members were asked
    _why: str = field(default="", init=False)

    def on(self, event: Event) -> Effect:  # noqa: PLR0911 - one arm an event
        """The next effect. The event has to be one that the state may meet."""
        assert type(event) in EXPECTED[self.state], f"{event} in {self.state}"
        match event:
            case Begun():
                return self._begin()
            case Given(producer):
                return self._on_producer_id(producer)
            case Due(partitions, is_renewal):
                self._listed = partitions
                raises = self._raises or not is_renewal
                return self._add(self.producer) if raises else self._init(self.producer)
            case Busy(partitions):
                return self._wait(partitions)
            case Added():
                self.state = FenceState.END
                return AbortTransaction(self.producer)
            case Ended(producer):
                return self._ended(producer)
            case FenceRefused(why):
                return self._refused(why)
            case NotAllowed(why):
                return self._not_allowed(why)
            case MembersAnswered(is_newest):
                return self._go_on() if is_newest else self._taken_over()

    def _begin(self) -> Effect:
        self._listed, self.is_standing = (), False
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
        return self._has(producer)

    def _has(self, producer: ProducerId) -> Effect:
        self.producer, self.state = producer, FenceState.READY
        return self._add(producer) if self._listed else Await()

    def _add(self, producer: ProducerId) -> Effect:
        self.state = FenceState.ADD
        return AddPartitions(producer, self._listed)

    def _wait(self, partitions: Collection[int]) -> Effect:
        if self._listed and not partitions:
            self.state, self._listed = FenceState.READY, ()
            return Await()
        self._listed = partitions
        return self._init(self.producer) if self.state is FenceState.INIT else self._add(self.producer)

    def _ended(self, producer: ProducerId | None) -> Effect:
        marked = producer or self.producer
        if marked.id != self.producer.id:  # its epochs are used up; the last one is the marker's
            marked = ProducerId(self.producer.id, self.producer.epoch + 1)
        self._raises = producer is not None
        self.producer, self.state, self._listed = producer or self.producer, FenceState.READY, ()
        return SeekMarkers(marked)

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

    def _go_on(self) -> Effect:
        changed, self._changed = self._changed, None
        self.times_anew += 1
        if changed is None:
            self.producer = NO_PRODUCER
            return self._init(NO_PRODUCER)
        self.earlier_unfenced, self.producer = True, changed
        return self._forgotten() if self.is_required else self._has(changed)

    def _forgotten(self) -> Effect:
        self.state, self.is_standing = FenceState.FORGOTTEN, False
        return RefuseShipping(f"{self._why}: earlier instances are not fenced", is_taken_over=False)

    def _taken_over(self) -> Effect:
        self.state, self.is_standing = FenceState.TAKEN_OVER, False
        return RefuseShipping(self._why, is_taken_over=True)

    def _not_allowed(self, why: str) -> Effect:
        self.why_unfenced, self.is_standing = why, False
        self.state = FenceState.NEW if self.is_required else FenceState.UNFENCED
        return RefuseShipping(why, is_taken_over=False) if self.is_required else ShipUnfenced()


MARKER_WITHIN_MS = 10_000
"""A partition that has had a leader for so long without its marker gets a transaction for itself alone."""


class PartitionState(Enum):
    """See the file's map."""

    NO_LEADER = auto()
    LOOKED_AT = auto()
    """Its end is asked for, and compared with what it had acknowledged: a marker would hide a loss."""
    WAITING = auto()
    LISTED = auto()
    SOUGHT = auto()
    MATCHED = auto()
    """Its marker was met, or it is shipped to unfenced: what it holds is found out."""
    SHIPPING = auto()
    DRAINING = auto()
    """Nothing new is sent until all is acknowledged, because its marker will refuse what is on the way."""


_MAY_BECOME: Mapping[PartitionState, frozenset[PartitionState]] = {
    PartitionState.NO_LEADER: frozenset({PartitionState.LOOKED_AT}),
    PartitionState.LOOKED_AT: frozenset({PartitionState.NO_LEADER, PartitionState.WAITING}),
    PartitionState.WAITING: frozenset(
        {PartitionState.NO_LEADER, PartitionState.LISTED, PartitionState.MATCHED, PartitionState.SHIPPING}
    ),
    PartitionState.LISTED: frozenset({PartitionState.WAITING, PartitionState.SOUGHT, PartitionState.SHIPPING}),
    PartitionState.SOUGHT: frozenset({PartitionState.WAITING, PartitionState.MATCHED, PartitionState.SHIPPING}),
    PartitionState.MATCHED: frozenset({PartitionState.SHIPPING}),
    PartitionState.SHIPPING: frozenset({PartitionState.NO_LEADER, PartitionState.DRAINING}),
    PartitionState.DRAINING: frozenset({PartitionState.NO_LEADER, PartitionState.WAITING}),
}
assert _MAY_BECOME.keys() == set(PartitionState)


@dataclass(slots=True)
class FencedPartition:
    """A Kafka partition.

    producer: of its own marker; None before it, and unfenced. used: under which it was shipped to in this session.
    read_to: its marker lies behind this offset. marked_from: where the search for it began, None if batches that are no
    markers came meanwhile. led_since_ms: None without a leader. has_shipped: what it holds is known, so that a renewal
    matches nothing. is_alone: the next transaction is for it alone.
    """

    state: PartitionState = PartitionState.NO_LEADER
    producer: ProducerId | None = None
    used: ProducerId | None = None
    read_to: int = 0
    marked_from: int | None = None
    wanted: ProducerId = NO_PRODUCER
    led_since_ms: int | None = None
    sought_since_ms: int = 0
    renew_at_ms: int = 0
    is_alone: bool = False
    has_shipped: bool = False

    def become(self, state: PartitionState) -> None:
        """Take another state. It has to be one that may follow."""
        assert state in _MAY_BECOME[self.state], f"{self.state} to {state}"
        self.state = state


class FencedPartitions:
    """The partitions of a topic, in one session; see the file's map. renew_every_ms: a marker lasts for so long."""

    def __init__(self, count: int, renew_every_ms: int) -> None:
        self._all = {partition: FencedPartition() for partition in range(count)}
        self._renew_every_ms = renew_every_ms

    def __getitem__(self, partition: int) -> FencedPartition:
        if partition not in self._all:  # the topic has grown since the session began
            self._all[partition] = FencedPartition()
        return self._all[partition]

    def in_state(self, state: PartitionState) -> list[int]:
        """The partitions in this state."""
        return [partition for partition, one in self._all.items() if one.state is state]

    @property
    def is_standing(self) -> bool:
        """Whether each partition has a marker of this session."""
        return all(one.producer is not None for one in self._all.values())

    @property
    def is_settled(self) -> bool:
        """Whether all are shipped to."""
        return all(one.state is PartitionState.SHIPPING for one in self._all.values())

    def marker_ends(self) -> dict[int, int]:
        """Where the marker of each partition ends; an end below it means that the marker is lost."""
        return {partition: one.read_to for partition, one in self._all.items() if one.has_shipped and one.producer}

    @property
    def are_known(self) -> bool:
        """Whether a partition has a marker of this session, or is known."""
        return any(one.has_shipped or one.producer is not None for one in self._all.values())

    @property
    def lacks_leader(self) -> bool:
        """Whether a partition has no known leader."""
        return any(one.led_since_ms is None for one in self._all.values())

    def on_leaders(self, leaders: Collection[int], now_ms: int) -> list[int]:
        """These have a leader now. Returns those that are to be looked at."""
        for partition, one in self._all.items():
            if partition not in leaders:
                one.led_since_ms = None
                if one.state is PartitionState.WAITING:  # the next leader may have lost records
                    one.become(PartitionState.NO_LEADER)
            elif one.led_since_ms is None:
                one.led_since_ms = now_ms
        found = [one for one in self.in_state(PartitionState.NO_LEADER) if one in leaders]
        for partition in found:
            self._all[partition].become(PartitionState.LOOKED_AT)
        return found

    def on_looked_at(self, partition: int, end: int | None) -> None:
        """It ends there, and has lost nothing; None: its leader does not say so."""
        one = self._all[partition]
        if end is None:
            one.become(PartitionState.NO_LEADER)
            return
        one.become(PartitionState.WAITING)
        one.read_to, one.has_shipped, one.producer = end, False, None

    def next_transaction(self) -> list[int]:
        """The partitions that the next transaction lists; one that had no marker for too long is listed alone."""
        found = [one for one in self.in_state(PartitionState.WAITING) if self._all[one].led_since_ms is not None]
        listed = next(([one] for one in found if self._all[one].is_alone), found)
        for partition in listed:
            one = self._all[partition]
            one.become(PartitionState.LISTED)
            one.is_alone, one.marked_from = False, one.read_to
        return listed

    def on_busy(self, renew_at_ms: int) -> list[int]:
        """Nothing is in the transaction yet: those that have a marker go on under it, and are renewed later. Returns
        them.
        """
        found = []
        for partition in self.in_state(PartitionState.LISTED):
            one = self._all[partition]
            if one.has_shipped and one.producer is not None and one.wanted == one.producer:
                one.become(PartitionState.SHIPPING)
                one.renew_at_ms = renew_at_ms
                found.append(partition)
        return found

    def is_renewal(self, partitions: Iterable[int]) -> bool:
        """Whether one of these was shipped to under an epoch, and needs another one."""
        return any(self._all[one].used is not None for one in partitions)

    def on_ended(self, producer: ProducerId, now_ms: int) -> None:
        """The transaction is aborted: the listed ones get a marker of this producer or a later epoch."""
        for partition in self.in_state(PartitionState.LISTED):
            one = self._all[partition]
            one.become(PartitionState.SOUGHT)
            one.wanted, one.sought_since_ms = producer, now_ms

    def on_read(self, partition: int, end: int, marker: ProducerId | None) -> None:
        """A batch that ends there was read behind `read_to`; marker: whose it is, None: it is none.

        A later epoch of ours is another instance's, and the next transaction tells whether it leads.
        """
        one = self._all[partition]
        if one.state is not PartitionState.SOUGHT:
            return
        one.read_to = max(one.read_to, end)
        if marker is None:
            one.marked_from = None
        elif marker == one.wanted:
            one.producer = marker
            one.become(PartitionState.SHIPPING if one.has_shipped else PartitionState.MATCHED)
        elif marker.id == one.wanted.id and marker.epoch > one.wanted.epoch:
            one.become(PartitionState.WAITING)

    def on_unfenced(self) -> list[int]:
        """No marker is to be had: those that wait go on without, or under the one that they have. Returns them."""
        found = self.in_state(PartitionState.LISTED)
        for partition in found:
            self._all[partition].become(PartitionState.WAITING)
        found = self.in_state(PartitionState.WAITING)
        for partition in found:
            one = self._all[partition]
            one.marked_from = None
            one.become(PartitionState.SHIPPING if one.has_shipped else PartitionState.MATCHED)
        return found

    def on_matched(self, partition: int, now_ms: int) -> None:
        """Ship to the partition: its content is known, or its producer was renewed."""
        one = self._all[partition]
        if one.state is PartitionState.MATCHED:
            one.become(PartitionState.SHIPPING)
        one.has_shipped, one.used, one.renew_at_ms = True, one.producer, now_ms + self._renew_every_ms

    def on_lost_place(self, partition: int) -> None:
        """The broker knows our producer no more, or refuses it: it begins anew."""
        one = self._all[partition]
        one.become(PartitionState.NO_LEADER)
        one.has_shipped = False

    def drain_due(self, now_ms: int) -> Iterator[int]:
        """Those whose marker gets old take nothing new from now on. Returns all that drain."""
        for partition, one in self._all.items():
            if one.state is PartitionState.SHIPPING and one.producer is not None and now_ms >= one.renew_at_ms:
                one.become(PartitionState.DRAINING)
            if one.state is PartitionState.DRAINING:
                yield partition

    def on_drained(self, partition: int, end: int) -> None:
        """All that was sent is acknowledged; it ended there then."""
        one = self._all[partition]
        one.become(PartitionState.WAITING)
        one.read_to = max(one.read_to, end)

    def overdue(self, now_ms: int) -> list[int]:
        """Those that had a leader for too long without their marker are listed again, alone. Returns them."""
        found = []
        for partition in self.in_state(PartitionState.SOUGHT):
            one = self._all[partition]
            led_ms = None if one.led_since_ms is None else now_ms - max(one.led_since_ms, one.sought_since_ms)
            if led_ms is not None and led_ms >= MARKER_WITHIN_MS:
                one.become(PartitionState.WAITING)
                one.is_alone = True
                found.append(partition)
        return found
