"""Carries out the fence at one topic for a session: fence_rules.py decides, this module asks the brokers.

    FenceDriver.begin ─▶ init ─▶ add ─▶ end ─▶ markers ─▶ (the session matches) ─▶ matched ─▶ producer id and epoch
    FenceDriver.renew ─▶ (init, where the end raises no epoch) ─▶ add ─▶ end ─▶ markers ─▶ the next epoch
                         when `wants_renewal`, and nothing is under way

Transactional id: pushrep-<outbox id>-<topic id>, with -<directory id> for a copy, which must not stop the original. A
renewal is due at a quarter of `transactional.id.expiration.ms`, before the coordinator forgets the id, and at half of
`producer.id.expiration.ms`, before a partition forgets the epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest

from pushrep.env import Clock
from pushrep.kafka import fence_rules as core
from pushrep.kafka.answers import Code
from pushrep.kafka.cluster import UNREACHABLE, Cluster, broker_refused, right_missing
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import BeginsAnew, DestinationRefused, KafkaUnreachable, OutboxTakenOver
from pushrep.kafka.fence_rules import (
    CoordinatorReaction,
    Effect,
    Event,
    Fence,
    FenceState,
    ProducerId,
    coordinator_reaction_to,
)
from pushrep.kafka.recovery import backoff_of, in_thread
from pushrep.kafka.requests import (
    ASK_FEATURES,
    END_TXN_AND_BUMP_EPOCH,
    INIT_PRODUCER_ID,
    Ask,
    transaction_version_of,
)
from pushrep.kafka.resume import whole_batches
from pushrep.kafka.topic import TopicFacts

_LOG = logging.getLogger("pushrep.kafka")

_BAD = core.FenceRefused | core.NotAllowed
_TRANSACTION_MS_MAX = 900_000  # brokers' default of transaction.max.timeout.ms
_TRANSACTION_MS_MIN = 1_000
_MARKERS_WITHIN_MS = 30_000
_SOON_MS, _SOON_TRIES = 20, 50
_TRANSACTIONS_TOPIC = "__transaction_state"
_TOO_FEW_BROKERS = "transaction.state.log.replication.factor (Kafka's default: 3) is above their number"
_TRANSACTIONS_TOPIC_WITHIN_MS = 10_000  # brokers make it at the first request, if they can
_NOT_DRAINED_MS = 30_000  # how long other partitions wait at most for one that does not drain
_LATER_MS = 600_000


Leads = Callable[[], bool]
"""Asks whether min_insync_replicas members, this one counted, answer and none has a newer grant. Blocks."""


def transactional_id(outbox_id: str, topic_id: UUID, copy_id: str | None = None) -> str:
    """The fence's transactional id. copy_id: the directory id of a copy whose original may be in use; None: no copy."""
    return f"pushrep-{outbox_id}-{topic_id}" + ("" if copy_id is None else f"-{copy_id}")


UntilDone = Callable[[Callable[[], Awaitable[Event]]], Awaitable[Event]]


class Fencing:
    """The fences of one opening of an outbox, one for each id of its topic.

    copy_id: as for `transactional_id`. leads: whether this instance leads; None: it has no members to ask.
    """

    def __init__(
        self,
        destination: KafkaDestination,
        outbox_id: str,
        copy_id: str | None,
        leads: Leads | None,
        clock: Clock,
    ) -> None:
        self._destination, self._outbox_id, self._copy_id = destination, outbox_id, copy_id
        self._leads, self._clock = leads, clock
        self._fences: dict[UUID, Fence] = {}
        self.newest: Fence | None = None
        """The fence of the present topic; None before it was seen, and without fencing."""

    def driver(
        self, facts: TopicFacts, cluster: Cluster, until_done: UntilDone, *, has_shipped: bool
    ) -> "FenceDriver | None":
        """The driver of a session. has_shipped: the topic is known to hold records of an earlier opening."""
        mode = self._destination.fence
        if mode == "off":
            return None
        new = Fence(self._leads is not None, is_required=mode == "required", has_shipped=has_shipped)
        self.newest = self._fences.setdefault(facts.topic_id, new)
        name = transactional_id(self._outbox_id, facts.topic_id, self._copy_id)
        given = self._destination, facts, cluster, until_done, self._clock
        return FenceDriver(self.newest, name, self._leads, *given)


class FenceDriver:
    """See the file's map; for one session. until_done: retries for a while (recovery.py)."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a fence stands on
        self,
        fence: Fence,
        name: str,
        leads: Leads | None,
        destination: KafkaDestination,
        facts: TopicFacts,
        cluster: Cluster,
        until_done: UntilDone,
        clock: Clock,
    ) -> None:
        self._fence, self._name, self._leads, self._destination = fence, name, leads, destination
        self._facts, self._cluster, self._until_done, self._clock = facts, cluster, until_done, clock
        self._transaction_ms = _TRANSACTION_MS_MAX
        self._coordinator: int | None = None
        self._no_coordinator_since_ms: int | None = None
        self._unmarked: dict[int, int] = {}  # by Kafka partition, where the search for its marker goes on
        self._ends: dict[int, int] = {}  # where the search began, for partitions with only markers since
        self.markers: dict[int, tuple[int, int]] = {}
        """Of each Kafka partition, from its end before the transaction to behind the fence's marker, if only control
        batches lie there; partitions in which other batches came are left out."""
        expirations_ms = facts.transactional_id_expiration_ms // 4, facts.producer_id_expiration_ms // 2
        self._renew_every_ms = max(1, min(expirations_ms))
        self._renew_at_ms = 0
        self._wait_until_ms: int | None = None

    @property
    def ships_fenced(self) -> bool:
        """Whether batches go under the fence's producer id; not while it is renewed."""
        return self._fence.state is FenceState.SHIPPING

    @property
    def _partitions(self) -> int:
        """All known partitions of the topic, also those that the last broker asked does not know yet."""
        return max(self._cluster.partitions, self._facts.partitions)

    async def begin(self) -> None:
        """Fence all other instances, except those of `Fence.earlier_unfenced`.

        Without the right, or with brokers that can't fence, it goes on without a fence or, if one is required, raises
        DestinationRefused. Raises OutboxTakenOver, BeginsAnew, TopicMissing.
        """
        await self._run(core.Begun())

    def matched(self) -> ProducerId | None:
        """The producer id and epoch for shipping, from sequence number 0; None without a fence."""
        if self._fence.state is FenceState.MATCH:
            self._shipping(self._fence.on(core.Matched()))
        return self._fence.producer if self.ships_fenced else None

    def wants_renewal(self) -> bool:
        """Whether the fence has to be renewed before anything new is sent."""
        now_ms = self._clock.monotonic_ms()
        has_leaders = len(self._cluster.leaders) == self._partitions  # so that all can get a marker
        if not self.ships_fenced or now_ms < self._renew_at_ms or not has_leaders:
            return False
        if self._wait_until_ms is None:
            self._wait_until_ms = now_ms + _NOT_DRAINED_MS
        elif now_ms > self._wait_until_ms:
            self._renew_at_ms, self._wait_until_ms = now_ms + min(_LATER_MS, self._renew_every_ms), None
            return False
        return True

    async def renew(self) -> None:
        """Get the next epoch, which `matched` then returns. Nothing may be in flight. Raises as `begin`."""
        await self._run(core.RenewalDue())
        if self._fence.state is FenceState.MATCH:
            raise BeginsAnew(f"{self._facts.topic}: another instance may have shipped meanwhile")

    # -- effects ---------------------------------------------------------------------------------------------------

    async def _run(self, event: Event) -> None:
        effect = self._fence.on(event)
        while True:
            match effect:
                case core.Match():
                    return
                case core.Ship():
                    self._shipping(effect)
                    return
                case core.RefuseShipping(why, is_taken_over):
                    if is_taken_over:
                        raise OutboxTakenOver(self._facts.topic, why)
                    raise DestinationRefused(self._facts.topic, "fence", "required", why)
            effect = self._fence.on(await self._event_of(effect))

    async def _event_of(self, effect: Effect) -> Event:
        async def perform() -> Event:
            return await self._perform(effect)

        event = await self._until_done(perform)
        if isinstance(event, core.FenceRefused):
            _LOG.info("%s: transactional id %s: %s", self._facts.topic, self._name, event.why)
            await asyncio.sleep(backoff_of(self._destination).pause_s(1))
        return event

    async def _perform(self, effect: Effect) -> Event:
        match effect:
            case core.InitProducer(named):
                return await self._init(named)
            case core.AddPartitions(producer):
                self._unmarked = await self._cluster.ends(range(self._partitions))
                self._ends, self.markers = dict(self._unmarked), {}
                topics = [(self._facts.topic, list(self._unmarked))]
                answer = await self._ask(AddPartitionsToTxnRequest(self._name, *producer, topics))
                return answer if isinstance(answer, _BAD) else core.Added()
            case core.AbortTransaction(producer):
                return await self._abort(producer)
            case core.ReadMarkers(producer):
                return await self._read_markers(producer)
            case core.AskMembers():
                assert self._leads is not None, "without members nobody is asked"
                return core.MembersAnswered(await in_thread(self._leads))
        raise AssertionError(f"{effect} is the session's")

    async def _init(self, named: ProducerId) -> Event:
        while True:
            answer = await self._ask(Ask(INIT_PRODUCER_ID, self._name, self._transaction_ms, *named))
            if answer is not CoordinatorReaction.SHORTER:
                break
            self._transaction_ms //= 2
            if self._transaction_ms < _TRANSACTION_MS_MIN:
                return core.NotAllowed("transaction.max.timeout.ms of the brokers is below a second")
        if isinstance(answer, _BAD):
            return answer
        return core.Given(ProducerId(answer.producer_id, answer.producer_epoch))

    async def _abort(self, producer: ProducerId) -> Event:
        features = await self._ask(ASK_FEATURES)
        if isinstance(features, _BAD):
            return features
        bumps_epoch = transaction_version_of(features) >= 2
        aborted = self._name, *producer, False
        answer = await self._ask(Ask(END_TXN_AND_BUMP_EPOCH, *aborted) if bumps_epoch else EndTxnRequest(*aborted))
        if isinstance(answer, _BAD):
            return answer
        return core.Ended(ProducerId(answer.producer_id, answer.producer_epoch) if bumps_epoch else None)

    async def _read_markers(self, producer: ProducerId) -> Event:
        until_ms = self._clock.monotonic_ms() + _MARKERS_WITHIN_MS
        while self._unmarked:
            try:
                found = await self._cluster.fetch_many(self._unmarked)
            except KafkaUnreachable as error:
                if error.error_code == Code.OFFSET_OUT_OF_RANGE:
                    raise BeginsAnew(f"{self._facts.topic} lost its end: {error}") from error
                raise
            for partition, data in found.items():
                for batch in whole_batches(data):
                    header = batch.header
                    self._unmarked[partition] = max(self._unmarked[partition], header.next_offset)
                    if not header.is_control:
                        self._ends.pop(partition, None)
                    is_own = header.is_control and header.producer_id == producer.id
                    if is_own and header.producer_epoch >= producer.epoch:
                        end = self._unmarked.pop(partition)
                        if partition in self._ends:
                            self.markers[partition] = self._ends[partition], end
                        break
            if self._unmarked and self._clock.monotonic_ms() > until_ms:
                raise BeginsAnew(f"no marker of {producer} came into {self._facts.topic}-{min(self._unmarked)}")
        return core.MarkersRead()

    # -- the coordinator -------------------------------------------------------------------------------------------

    async def _ask(self, request: Any) -> Any:
        """The coordinator's answer, or for a refusal the event FenceRefused or NotAllowed, or SHORTER.

        Raises what UNREACHABLE names.
        """
        code: int = Code.NONE
        for _ in range(_SOON_TRIES):
            try:
                code, answer = await self._ask_once(request)
            except (IncompatibleBrokerVersion, NotImplementedError) as error:
                return core.NotAllowed(f"the brokers are too old ({error})")
            match coordinator_reaction_to(code):
                case CoordinatorReaction.DONE:
                    return answer
                case CoordinatorReaction.SHORTER as shorter:
                    return shorter
                case CoordinatorReaction.REFUSED:
                    return core.FenceRefused(Code.name_of(code))
                case CoordinatorReaction.NOT_ALLOWED:
                    return core.NotAllowed(self._not_allowed(code))
                case CoordinatorReaction.AGAIN:
                    self._coordinator = None
                    if code == Code.COORDINATOR_NOT_AVAILABLE and await self._has_no_transactions():
                        return core.NotAllowed(f"the brokers don't make {_TRANSACTIONS_TOPIC}: {_TOO_FEW_BROKERS}")
                    break
            await asyncio.sleep(_SOON_MS / 1000)
        raise broker_refused(f"transactional id {self._name}", code)

    async def _has_no_transactions(self) -> bool:
        """Whether the brokers' transaction topic has been missing for so long that it can't be made.

        False once this fence has a producer id: then the coordinator is only unavailable for a while.
        """
        if self._fence.producer != core.NO_PRODUCER or await self._cluster.has_topic(_TRANSACTIONS_TOPIC):
            self._no_coordinator_since_ms = None
            return False
        now_ms = self._clock.monotonic_ms()
        if self._no_coordinator_since_ms is None:
            self._no_coordinator_since_ms = now_ms
        return now_ms - self._no_coordinator_since_ms >= _TRANSACTIONS_TOPIC_WITHIN_MS

    def _not_allowed(self, code: int) -> str:
        if code == Code.TOPIC_AUTHORIZATION_FAILED:
            return right_missing("WRITE", "topic", self._facts.topic, code).why
        if code == Code.UNSUPPORTED_VERSION:
            return "the brokers are too old"
        return right_missing("WRITE", "transactional-id", self._name, code).why

    async def _ask_once(self, request: Any) -> tuple[int, Any]:
        try:
            if self._coordinator is None:
                self._coordinator = await self._cluster.find_coordinator(self._name)
            answer = await self._cluster.ask(self._coordinator, request)
        except UNREACHABLE as error:
            if isinstance(error, KafkaUnreachable) and error.error_code is not None:
                return error.error_code, None
            self._coordinator = None
            raise
        return _error_code_of(answer), answer

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def _shipping(self, effect: Effect) -> None:
        assert isinstance(effect, core.Ship), "nothing else follows"
        fence, topic = self._fence, self._facts.topic
        self._renew_at_ms, self._wait_until_ms = self._clock.monotonic_ms() + self._renew_every_ms, None
        if fence.why_unfenced is not None:
            _LOG.warning(
                "%s is shipped to without a fence, so another instance is not stopped: %s", topic, fence.why_unfenced
            )
        elif fence.earlier_unfenced:
            _LOG.warning("%s: earlier instances are not fenced: the coordinator did not know %s", topic, self._name)


def _error_code_of(answer: Any) -> int:
    """One of the errors in an answer about partitions; OPERATION_NOT_ATTEMPTED only if there is no other."""
    if not hasattr(answer, "errors"):
        return int(answer.error_code)
    codes = {code for _, partitions in answer.errors for _, code in partitions} - {Code.NONE}
    decides = [code for code in codes if code != Code.OPERATION_NOT_ATTEMPTED] or list(codes)
    return int(decides[0]) if decides else Code.NONE
