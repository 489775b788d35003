"""An outbox's replicas as a whole: look at the other members, fetch what they have more, lead, show how far they are.

    open    ─▶ look ─▶ fetch ─▶ Leading ─▶ wait until enough are in sync (acks=ALL, up to open_timeout_s)
               └ too few answered: LOCAL leads all the same; ALL looks on in the background and takes no record
    while open ─▶ a tick fails what waits for longer than delivery_timeout_ms

This directory leads, at every open under the next number that is its own; nobody else is made the leader here.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from uuid import UUID

from pushrep.errors import PushrepError
from pushrep.log import Durability, SegmentLog
from pushrep.outbox.errors import NotReplicatedInTime
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.lag import ReplicaLag, lag_of
from pushrep.outbox.lane import Lane
from pushrep.outbox.lane_replicas import LaneReplicas
from pushrep.outbox.members import Asker, Seen, fetch, highest_epoch, look, members_ahead, tp_of
from pushrep.outbox.positions_store import PositionsStore
from pushrep.outbox.settings import ReplicaSettings
from pushrep.push.leading import Leading
from pushrep.push.manager import PushManager
from pushrep.push.settings import PushSettings, Replica
from pushrep.push.sockets import Address
from pushrep.replication.errors import LogNotFit, NotAhead
from pushrep.replication.grants import Grant, Member, Quorum, next_ballot
from pushrep.seams import Clock

_LOG = logging.getLogger("pushrep.outbox")
_PAUSE_S = 0.005  # between looks at the in-sync sets while `open` waits
_LOOK_AGAIN_S = 0.5
_TICKS_PER_TIMEOUT = 4
_TICK_MAX_S = 1.0


class Replication:
    """The replicas of an open outbox. `catch_up`, `start`, `watch` in this order, `close` at the end."""

    def __init__(
        self,
        identity: OutboxIdentity,
        logs: Sequence[tuple[SegmentLog, PositionsStore]],
        settings: ReplicaSettings,
        durability: Durability,
        clock: Clock,
    ) -> None:
        self._identity, self._settings, self._durability, self._clock = identity, settings, durability, clock
        self._stores = {log.partition: store for log, store in logs}
        self._logs = {log.partition: log for log, _ in logs}
        self._replicas = [Replica(index, Address.parse(address)) for index, address in identity.replicas]
        self._push = settings.push or PushSettings()
        self._leading: Leading | None = None
        self._leading_lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.lanes: Mapping[int, LaneReplicas] = {
            n: LaneReplicas(
                f"{log.topic}-{n}",
                needs_all=settings.needs_all,
                min_insync_replicas=identity.min_insync_replicas,
                clock=clock,
            )
            for n, log in self._logs.items()
        }

    @property
    def _outbox_id(self) -> UUID:
        return UUID(self._identity.outbox_id)

    def catch_up(self) -> list[Seen]:
        """Look at the other members, and fetch what one of them has more. Nobody appends yet.

        Raises NotLeader, LogNotFit, ReplicaUnreachable if who is ahead goes away meanwhile, and as the log does.
        """
        for log in self._logs.values():
            if (damaged := log.damaged_from) is not None:
                raise LogNotFit(log.partition, f"it is damaged from offset {damaged} on")
        seen = self._look(self._settings.open_timeout_s)
        epoch = self._next_epoch(seen)
        for ahead in members_ahead(self._identity.member, self._logs.values(), seen):
            log = self._logs[ahead.partition]
            before = log.log_end_offset
            count = fetch(ahead, log, self._stores[ahead.partition], epoch, self._push)
            _LOG.warning("%s ended at %d; %d records were fetched from %s", log.path, before, count, ahead.replica)
        return seen

    def start(self, seen: Sequence[Seen], pid_epoch: int) -> None:
        """Lead, or look on until it can. Raises OSError, LogPoisoned."""
        self._identity = replace(self._identity, pid_epoch=pid_epoch)
        started = monotonic()
        if not self._settings.needs_all:
            self._lead(seen)
            return
        if not self._are_enough(seen):
            _LOG.warning(
                "%d of %d needed members answer: no record is taken until they do", len(seen) + 1, self._quorum.to_lead
            )
            self._run("pushrep-look", self._look_on)
            return
        self._lead(seen)
        while monotonic() - started < self._settings.open_timeout_s:
            if all(lane.refusal() is None for lane in self.lanes.values()) or self._stop.wait(_PAUSE_S):
                return

    def watch(self, lanes: Sequence[Lane]) -> None:
        """From now on fail what waits in them for longer than `delivery_timeout_ms`."""
        if self._settings.needs_all:
            self._run("pushrep-delivery", lambda: self._expire_late(lanes))

    def lag(self) -> dict[str, ReplicaLag]:
        """By address."""
        lags = self.lag_by_index()
        return {str(one.address): lags[one.index] for one in self._replicas}

    def lag_by_index(self) -> dict[int, ReplicaLag]:
        """By the member's index."""
        now_ms = self._clock.monotonic_ms()
        return {one.index: lag_of(one.index, self.lanes, self._logs, now_ms) for one in self._replicas}

    @property
    def manager(self) -> PushManager | None:
        """Who pushes; None until this outbox leads."""
        leading = self._leading
        return None if leading is None else leading.manager

    @property
    def needs_all(self) -> bool:
        """Whether receipts wait for replicas."""
        return self._settings.needs_all

    def close(self) -> None:
        """End the sessions and the threads. A second call does nothing."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        with self._leading_lock:
            leading = self._leading
        if leading is not None:
            leading.close()

    @property
    def _quorum(self) -> Quorum:
        indexes = {self._identity.member, *(index for index, _ in self._identity.replicas)}
        return Quorum(frozenset(indexes), self._identity.min_insync_replicas)

    def _look(self, timeout_s: float) -> list[Seen]:
        asker = Asker(self._outbox_id, self._identity.member, list(self._logs.values()), self._push)
        return look(asker, self._replicas, timeout_s)

    def _are_enough(self, seen: Sequence[Seen]) -> bool:
        return len(seen) + 1 >= self._quorum.to_lead

    def _next_epoch(self, seen: Sequence[Seen]) -> int:
        return next_ballot(self._identity.member, highest_epoch(self._logs.values(), seen))

    def _lead(self, seen: Sequence[Seen]) -> None:
        identity, epoch = self._identity, self._next_epoch(seen)
        grant = Grant(
            outbox_id=self._outbox_id,
            epoch=epoch,
            leader=identity.member,
            members=(Member(identity.member), *(Member(index, address) for index, address in identity.replicas)),
            min_insync_replicas=identity.min_insync_replicas,
            members_epoch=epoch,
            pid_epoch=identity.pid_epoch,
            topic_id=tp_of(self._logs[0]).topic_id,
            topic=identity.topic,
            partitions=identity.partitions,
            carrier=identity.carrier,
        )
        leading = Leading(
            self._outbox_id,
            grant,
            self._logs,
            self._replicas,
            durability=self._durability,
            settings=self._push,
            replica_lag_max_ms=self._settings.replica_lag_max_ms,
            clock=self._clock,
        )
        with self._leading_lock:
            self._leading = leading
        leading.start()
        for number, lane in self.lanes.items():
            lane.led = leading.partitions[number]

    def _look_on(self) -> None:
        """Until enough members answer. What one of them has more is fetched by the next open."""
        try:
            while not self._stop.wait(_LOOK_AGAIN_S):
                seen = self._look(self._settings.open_timeout_s)
                if not self._are_enough(seen) or self._stop.is_set():
                    continue
                for ahead in members_ahead(self._identity.member, self._logs.values(), seen):
                    log = self._logs[ahead.partition]
                    raise NotAhead(
                        partition=ahead.partition,
                        own=(log.leader_epochs.latest_epoch, log.log_end_offset),
                        member=ahead.replica.index,
                        theirs=(ahead.ends.leader_epochs.latest_epoch, ahead.ends.log_end_offset),
                    )
                self._lead(seen)
                return
        except (OSError, PushrepError) as error:
            _LOG.error("can't lead, open the outbox again: %s", error)
            for lane in self.lanes.values():
                lane.failure = error

    def _expire_late(self, lanes: Sequence[Lane]) -> None:
        timeout_ms = self._settings.delivery_timeout_ms
        while not self._stop.wait(min(_TICK_MAX_S, timeout_ms / 1000 / _TICKS_PER_TIMEOUT)):
            since_ms = self._clock.monotonic_ms() - timeout_ms
            for lane in lanes:
                lane.expire(since_ms, NotReplicatedInTime(timeout_ms))

    def _run(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
