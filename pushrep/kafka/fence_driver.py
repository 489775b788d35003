"""Carries out the fence at one topic for a session: fence_rules.py decides, this module asks the brokers.

    init ─▶ transaction over the partitions that have a leader and lost nothing ─▶ the marker of each, broker by broker
               ▲                                                                          │
               └── partitions that have a leader later, or need another epoch             └─▶ on_marked(partition)

Transactional id: pushrep-<outbox id>-<topic id>, with -<directory id> for a copy, which must not stop the original. A
renewal is due at a quarter of `transactional.id.expiration.ms`, before the coordinator forgets the id, and at half of
`producer.id.expiration.ms`, before a partition forgets the epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, Protocol
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
    FencedPartitions,
    FenceState,
    PartitionState,
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
_SOON_MS, _SOON_TRIES = 20, 50
_RENEW_AGAIN_MS = 60_000
_TRANSACTIONS_TOPIC = "__transaction_state"
_TOO_FEW_BROKERS = "transaction.state.log.replication.factor (Kafka's default: 3) is above their number"
_TRANSACTIONS_TOPIC_WITHIN_MS = 10_000  # brokers make it at the first request, if they can
_LOOK_S_MIN, _LOOK_S_MAX = 0.005, 0.2  # between two looks for markers: a fetch that waits would keep batches waiting
_WATCH_S = 1.0
_REFRESH_MS = 500
_TOGETHER_S = 0.05  # partitions whose ends are being asked for may get into the same transaction


Leads = Callable[[], bool]
"""Asks whether min_insync_replicas members, this one counted, answer and none has a newer grant. Blocks."""


def transactional_id(outbox_id: str, topic_id: UUID, copy_id: str | None = None) -> str:
    """The fence's transactional id. copy_id: the directory id of a copy whose original may be in use; None: no copy."""
    return f"pushrep-{outbox_id}-{topic_id}" + ("" if copy_id is None else f"-{copy_id}")


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
        self, session: "FencedSession", facts: TopicFacts, cluster: Cluster, *, has_shipped: bool
    ) -> "FenceDriver":
        """The driver of a session. has_shipped: the topic is known to hold records of an earlier opening."""
        mode = self._destination.fence
        if mode != "off":
            new = Fence(self._leads is not None, is_required=mode == "required", has_shipped=has_shipped)
            self.newest = self._fences.setdefault(facts.topic_id, new)
        name = transactional_id(self._outbox_id, facts.topic_id, self._copy_id)
        return FenceDriver(self.newest, name, self._leads, self._destination, facts, cluster, session, self._clock)


class FencedSession(Protocol):
    """What the driver needs of a session."""

    async def ends(self, node: int, partitions: Collection[int]) -> dict[int, int]:
        """The ends of a broker's partitions; those that it does not tell are left out."""
        ...

    async def check_loss(self, partition: int, end: int) -> None:
        """Find out whether it lost records, which a marker would hide. Raises TopicLostRecords."""
        ...

    def acknowledged_end(self, partition: int) -> int | None:
        """The end of all that was sent; None while something is not acknowledged."""
        ...

    def on_marked(self, partition: int) -> None:
        """It may be matched, or after a renewal be shipped to."""
        ...

    def go_on(self, partition: int) -> None:
        """It is shipped to as before."""
        ...

    def note_fence(self, why: str | None) -> None:
        """Why partitions wait for the fence; None: they don't."""
        ...

    def refresh_soon(self) -> None:
        """Ask who leads which partition."""
        ...

    def run_beside(self, work: Awaitable[None]) -> object:
        """Run it until the session ends, which an error of it does."""
        ...


class FenceDriver:
    """See the file's map; for one session. fence: None: no instance is fenced."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a fence stands on
        self,
        fence: Fence | None,
        name: str,
        leads: Leads | None,
        destination: KafkaDestination,
        facts: TopicFacts,
        cluster: Cluster,
        session: FencedSession,
        clock: Clock,
    ) -> None:
        self._fence, self._name, self._leads, self._destination = fence, name, leads, destination
        self._facts, self._cluster, self._session, self._clock = facts, cluster, session, clock
        self._transaction_ms = _TRANSACTION_MS_MAX
        self._coordinator: int | None = None
        self._no_coordinator_since_ms: int | None = None
        self._times_anew = 0
        self._seeking: set[int] = set()  # brokers whose partitions are read for markers
        self._missing: set[int] = set()  # partitions whose marker has not come in time
        self._refresh_at_ms = 0
        self._wake, self._look_now = asyncio.Event(), asyncio.Event()
        expirations_ms = facts.transactional_id_expiration_ms // 4, facts.producer_id_expiration_ms // 2
        self.partitions = FencedPartitions(max(cluster.partitions, facts.partitions), max(1, min(expirations_ms)))

    async def run(self) -> None:
        """Fence, partition by partition, until cancelled.

        Without the right, or with brokers that can't fence, it goes on without a fence or, if one is required, raises
        DestinationRefused. Raises OutboxTakenOver, BeginsAnew, TopicMissing.
        """
        self._session.run_beside(self._look())
        if self._fence is not None:
            await self._drive(core.Begun())
            self._times_anew = self._fence.times_anew
        while True:
            now_ms = self._clock.monotonic_ms()
            if overdue := self.partitions.overdue(now_ms):
                self._missing.update(overdue)
                self._note(f"no marker came into partition {overdue[0]}")
            for partition in list(self.partitions.drain_due(now_ms)):
                if (end := self._session.acknowledged_end(partition)) is not None:
                    self.partitions.on_drained(partition, end)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TOGETHER_S):
                    while self.partitions.in_state(PartitionState.LOOKED_AT):
                        await self._pause(self._wake, _TOGETHER_S)
            if listed := self.partitions.next_transaction():
                await self._transaction(listed)
            await self._pause(self._wake, _WATCH_S if self.partitions.is_settled else _LOOK_S_MAX)

    def begin_again(self, partition: int) -> None:
        """The broker knows our producer no more, or refuses it."""
        self.partitions.on_lost_place(partition)
        self._look_now.set()

    @staticmethod
    async def _pause(event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        event.clear()

    async def _look(self) -> None:
        """Have partitions that got a leader checked, and their markers looked for; ask for leaders that are missing."""
        while True:
            leaders, now_ms = self._cluster.leaders, self._clock.monotonic_ms()
            found: dict[int, list[int]] = {}
            for partition in self.partitions.on_leaders(leaders, now_ms):
                found.setdefault(leaders[partition], []).append(partition)
            for node, some in found.items():
                self._session.run_beside(self._check(node, some))
            for node in {leaders[one] for one in self.partitions.in_state(PartitionState.SOUGHT) if one in leaders}:
                if node not in self._seeking:
                    self._seeking.add(node)
                    self._session.run_beside(self._seek(node))
            if self.partitions.lacks_leader and now_ms >= self._refresh_at_ms:
                self._refresh_at_ms = now_ms + _REFRESH_MS
                self._session.refresh_soon()
            is_settled = self.partitions.is_settled and not self.partitions.lacks_leader
            await self._pause(self._look_now, _WATCH_S if is_settled else _LOOK_S_MAX)

    async def _check(self, node: int, partitions: Collection[int]) -> None:
        ends = await self._session.ends(node, partitions)
        for partition in partitions:
            self._session.run_beside(self._check_loss(partition, ends.get(partition)))

    async def _check_loss(self, partition: int, end: int | None) -> None:
        if end is not None:
            await self._session.check_loss(partition, end)
        self.partitions.on_looked_at(partition, end)
        self._wake.set()

    def _note(self, why: str | None) -> None:
        if why is not None:
            why = f'{why}; KafkaDestination(fence="off") waits for no fence, and shuts no other instance out'
        if why is not None or not self._missing:
            self._session.note_fence(why)

    # -- effects ---------------------------------------------------------------------------------------------------

    async def _transaction(self, listed: Collection[int]) -> None:
        fence = self._fence
        if fence is not None and fence.state is FenceState.READY:
            await self._drive(core.Due(listed, is_renewal=self.partitions.is_renewal(listed)))
        if fence is None or fence.state is FenceState.UNFENCED:
            for partition in self.partitions.on_unfenced():
                self._session.on_marked(partition)

    async def _drive(self, event: Event) -> None:
        """Carry out effects until the next transaction is due. Raises as `run`."""
        assert self._fence is not None, "it decides"
        while True:
            effect = self._fence.on(event)
            if self._fence.times_anew != self._times_anew and isinstance(event, core.MembersAnswered | core.Given):
                self._times_anew = self._fence.times_anew
                if not isinstance(effect, core.RefuseShipping) and self.partitions.are_known:
                    raise BeginsAnew(f"{self._facts.topic}: another instance may have shipped meanwhile")
            match effect:
                case core.Await():
                    return
                case core.SeekMarkers(producer):
                    self.partitions.on_ended(producer, self._clock.monotonic_ms())
                    self._look_now.set()
                    return
                case core.ShipUnfenced():
                    _LOG.warning(
                        "%s is shipped to without a fence, so another instance is not stopped: %s",
                        self._facts.topic,
                        self._fence.why_unfenced,
                    )
                    return
                case core.RefuseShipping(why, is_taken_over):
                    if is_taken_over:
                        raise OutboxTakenOver(self._facts.topic, why)
                    raise DestinationRefused(self._facts.topic, "fence", "required", why)
            event = await self._event_of(effect)

    async def _event_of(self, effect: Effect) -> Event:
        failures = 0
        while True:
            try:
                event = await self._perform(effect)
                break
            except UNREACHABLE as error:
                if isinstance(error, KafkaUnreachable) and error.error_code is not None:
                    if (waits := self._without_renewals(effect)) is not None:
                        event = waits
                        break
                    self._note(str(error))
                failures += 1
                self._session.refresh_soon()
                await asyncio.sleep(backoff_of(self._destination).pause_s(failures))
        self._note(None)
        if isinstance(event, core.FenceRefused):
            _LOG.info("%s: transactional id %s: %s", self._facts.topic, self._name, event.why)
            await asyncio.sleep(backoff_of(self._destination).pause_s(1))
        return event

    def _without_renewals(self, effect: Effect) -> Event | None:
        """The coordinator does not begin the transaction now: what has a marker does not wait for it. None: nothing."""
        if not isinstance(effect, core.InitProducer | core.AddPartitions):
            return None
        renewed = self.partitions.on_busy(self._clock.monotonic_ms() + _RENEW_AGAIN_MS)
        for partition in renewed:
            self._session.go_on(partition)
        return core.Busy(self.partitions.in_state(PartitionState.LISTED)) if renewed else None

    async def _perform(self, effect: Effect) -> Event:
        match effect:
            case core.InitProducer(named):
                return await self._init(named)
            case core.AddPartitions(producer, partitions):
                topics = [(self._facts.topic, list(partitions))]
                answer = await self._ask(AddPartitionsToTxnRequest(self._name, *producer, topics))
                return answer if isinstance(answer, _BAD) else core.Added()
            case core.AbortTransaction(producer):
                return await self._abort(producer)
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

    # -- markers ---------------------------------------------------------------------------------------------------

    async def _seek(self, node: int) -> None:
        """Read a broker's partitions until each has its marker. Raises BeginsAnew."""
        pause_s = _LOOK_S_MIN
        try:
            while sought := self._sought_at(node):
                failed: dict[int, KafkaUnreachable] = {}
                offsets = {partition: self.partitions[partition].read_to for partition in sought}
                found = await self._cluster.fetch_many(offsets, wait_ms=0, failed=failed)
                for partition, error in failed.items():
                    if error.error_code == Code.OFFSET_OUT_OF_RANGE:
                        raise BeginsAnew(f"{self._facts.topic}-{partition} lost its end: {error}") from error
                for partition, data in found.items():
                    self._read(partition, data)
                if failed:
                    self._session.refresh_soon()
                pause_s = _LOOK_S_MIN if any(found.values()) else min(2 * pause_s, _LOOK_S_MAX)
                await asyncio.sleep(pause_s)
        except UNREACHABLE as error:
            if isinstance(error, KafkaUnreachable):  # for example since the right to read is missing
                self._session.note_fence(str(error))
            _LOG.info("broker %d can't be read for markers: %r", node, error)
            self._session.refresh_soon()
        finally:
            self._seeking.discard(node)

    def _sought_at(self, node: int) -> list[int]:
        sought = self.partitions.in_state(PartitionState.SOUGHT)
        return [partition for partition in sought if self._cluster.leaders.get(partition) == node]

    def _read(self, partition: int, data: bytes) -> None:
        one = self.partitions[partition]
        for batch in whole_batches(data):
            header = batch.header
            marker = ProducerId(header.producer_id, header.producer_epoch) if header.is_control else None
            self.partitions.on_read(partition, header.next_offset, marker)
        if one.state in {PartitionState.MATCHED, PartitionState.SHIPPING}:
            self._missing.discard(partition)
            self._standing()
            self._session.on_marked(partition)

    def _standing(self) -> None:
        fence = self._fence
        assert fence is not None, "it has markers"
        is_first, fence.is_standing = not fence.is_standing, self.partitions.is_standing
        fence.why_unfenced = None
        if fence.state is FenceState.READY:
            self._note(None)
        if fence.is_standing and is_first and fence.earlier_unfenced:
            _LOG.warning(
                "%s: earlier instances are not fenced: the coordinator did not know %s", self._facts.topic, self._name
            )

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
        assert self._fence is not None, "it asks"
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


def _error_code_of(answer: Any) -> int:
    """One of the errors in an answer about partitions; OPERATION_NOT_ATTEMPTED only if there is no other."""
    if not hasattr(answer, "errors"):
        return int(answer.error_code)
    codes = {code for _, partitions in answer.errors for _, code in partitions} - {Code.NONE}
    decides = [code for code in codes if code != Code.OPERATION_NOT_ATTEMPTED] or list(codes)
    return int(decides[0]) if decides else Code.NONE
