"""Leading: all partitions of one outbox and their replicas, for the appending side.

    leading = Leading(outbox_id, grant, logs, replicas, durability=Durability.FLUSHED)     epochs begin, on disk
    leading.start()
    led = leading.partitions[partition]
    led.on_append(result.base_offset, batches, now_ms)      after each append, in the log's order
    led.on_flush(log.flushed_offset)                        after each flush
    led.when_replicated(end_offset, callback)               callback(None), or callback(why not)
    leading.close()

For each replica a thread begins its sessions: connect ─▶ Grant ─▶ DescribeLog ─▶ match epochs ─▶ start_push. A session
that ended begins again after a pause, unless its reason is final.

A member that shows a newer grant of the same generation is asked again by each heartbeat, as all others are, and
`Confirmations` (rules) decides within `LEADER_ALIVE_MS` whether this member leads on.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from uuid import UUID

from pushrep.election.candidate import LEADER_ALIVE_MS
from pushrep.election.epochs import LogEnds
from pushrep.election.errors import NotLeader
from pushrep.election.grants import Grant, newest_of
from pushrep.election.leader import REPLICA_LAG_MAX_MS, Confirmations, Contested, PartitionLeader
from pushrep.election.messages import PushSessionEndReason
from pushrep.election.push_session import BEGINS_ANEW
from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK, Clock, Thread
from pushrep.log import Durability, SegmentLog
from pushrep.log.flush_scheduler import Tick
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.channel import Beats
from pushrep.replicate.connecting import ReplicaClient, pause_s, retry_connecting
from pushrep.replicate.election_state import NO_MEMBER
from pushrep.replicate.errors import IllegalState
from pushrep.replicate.led_partition import LedPartition, OnReplicated, PushSession
from pushrep.replicate.manager import PushManager
from pushrep.replicate.repairing import Repairs
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as wire
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse, LogDescription

_LOG = logging.getLogger("pushrep.push")
_TICKS_PER_LAG = 4
_LOOKS_PER_ALIVE = 6
_CREATED_AT_ONCE = 200
"""How many logs one request asks for: the node may have to make and sync each before it answers."""
_NOBODY_THERE = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.MEMBER_TWICE,
        ErrorCode.UNAUTHORISED,
    }
)
"""Answers to an offered grant: the node is not that member, and nothing is pushed to it."""


_NEW_DIRECTORY = (
    "its directory is not the one that the grant names, its disk is new or a copy: it is filled, and counts for "
    "nothing before enough others know it"
)


class Leading:
    """One outbox that this member leads by a grant. Thread-safe; the caller appends to one partition in order.

    logs: by partition, opened with `has_replicas`. durability: with FLUSHED only records on disk count. Raises OSError
    if an epoch can't be written.
    """

    def __init__(  # noqa: PLR0913 - what is led, and how
        self,
        outbox_id: UUID,
        grant: Grant,
        logs: Mapping[int, SegmentLog],
        replicas: Sequence[Replica],
        *,
        durability: Durability,
        settings: PushSettings | None = None,
        replica_lag_max_ms: int = REPLICA_LAG_MAX_MS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.outbox_id, self.grant = outbox_id, grant
        beat = wire.BeatRequest(
            outbox_id=outbox_id, leader=grant.leader, leader_epoch=grant.epoch, generation=grant.generation
        )
        self._last_beat: wire.BeatRequest | None = replace(beat, is_last=True)
        beats = Beats(beat, self._on_another_grant, self._on_own_grant, lambda: self._last_beat)
        self.manager = PushManager(settings, clock=clock, beats=beats)
        self._clock, self._lag_ms = clock, replica_lag_max_ms
        self._stop = self.manager.settings.network.threads.event()
        self._session_ids = count(1)
        self.partitions: dict[int, LedPartition] = {}
        """By number."""
        for number, log in logs.items():
            log.begin_epoch(grant.epoch, log.log_end_offset)
            leader = PartitionLeader(
                grant,
                LogEnds(log.log_start_offset, log.log_end_offset, log.leader_epochs),
                flushed_offset=log.flushed_offset,
                high_watermark=log.high_watermark,
                flushed_only=durability is Durability.FLUSHED,
                now_ms=clock.monotonic_ms(),
                replica_lag_max_ms=replica_lag_max_ms,
            )
            tp = TopicIdPartition(log.log_id, log.topic, log.partition)
            led = self.partitions[number] = LedPartition(tp, log, leader, self.manager, self._session_ended)
            led.on_contested = self._contested
        self._by_tp = {led.tp: led for led in self.partitions.values()}
        self.repairs = Repairs(outbox_id, grant, {tp: led.log for tp, led in self._by_tp.items()})
        self.directories: dict[int, UUID | None] = {}
        """The directories that replicas have shown since this member leads, by index; None: a node that gives none an
        id (`copy_check`).
        """
        self.new_directories: dict[int, UUID] = {}
        """The directories of those that are not the grant's, and may come in."""
        self.on_directory: Callable[[], None] | None = None
        """Called in any thread when a replica showed its directory: once it is in sync, it may come in. None: no
        directory comes in, and a member without one in the grant counts by its index.
        """
        self.standbys: set[int] = set()
        """The members at which a service stands by that could lead, by their last answers."""
        self.on_kept: Callable[[int], None] = lambda _replica: None
        """Called in any thread, at least once a second, with the index of a replica that answered with our grant."""
        self.troubled_since_ms: dict[int, int] = {}
        """By member index: since when `troubles` has something of it, wall clock, as the last look found."""
        self._confirmations = Confirmations(grant, LEADER_ALIVE_MS)
        self._confirming = threading.Lock()  # guards `_confirmations` and `_doubting`
        self._doubting: Thread | None = None
        self._shown: dict[int, tuple[int, int]] = {}
        """By member: the newer grant that it showed since it was in sync last."""
        self._drivers = [_Driver(self, replica, self._by_tp) for replica in replicas]
        self._is_started = False
        self._tick: Tick | None = None
        self._ticker: Thread | None = None

    def start(self) -> None:
        """Begin to push."""
        self._is_started = True
        for led in self.partitions.values():
            led.start()
        self.manager.startup()
        for driver in self._drivers:
            driver.start()
        every_ms = max(1, min(self._lag_ms // _TICKS_PER_LAG, self.manager.settings.repair_interval_ms or self._lag_ms))
        if self.manager.settings.network is REAL_NETWORK and self._clock is SYSTEM_CLOCK:
            self._tick = Tick(every_ms, self._look_around)
        else:  # a simulated run needs repeatable threads
            self._ticker = self.manager.settings.network.threads.thread(lambda: self._keep_looking(every_ms), "lag")
            self._ticker.start()

    def troubles(self) -> dict[int, str]:
        """By member index: why its sessions can't begin or go on, its disk refuses writes, or its damage can't be
        repaired; members without troubles are left out.
        """
        found = {}
        if own := "; ".join(self.repairs.own_trouble.values()):
            found[self.grant.leader] = own
        away = self.manager.away()
        for driver in list(self._drivers):
            index = driver.replica.index
            if driver.trouble is not None:
                found[index] = driver.trouble
            elif index in self.grant.indexes and index in self.new_directories.keys() | self.grant.entering:
                found[index] = _NEW_DIRECTORY
            elif not self._is_in_sync(index) and (
                why := driver.refused or driver.refusal or self._why_contested(index)
            ):
                found[index] = why
            elif driver.damage is not None:
                found[index] = driver.damage
            elif index in away:
                found[index] = away[index]
        now_ms, before = self._clock.wall_ms(), self.troubled_since_ms
        self.troubled_since_ms = {index: before.get(index, now_ms) for index in found}
        return found

    def _is_in_sync(self, index: int) -> bool:
        return all(index in led.leader.in_sync for led in self.partitions.values())

    def _why_contested(self, index: int) -> str:
        shown = self._shown.get(index)
        return "" if shown is None else _shows_newer(*shown)

    def is_away(self, index: int) -> bool:
        """Whether this replica can't be reached now; one that refuses sessions can."""
        drivers = [driver for driver in list(self._drivers) if driver.replica.index == index]
        return index in self.manager.away() or any(one.trouble is not None and not one.has_answered for one in drivers)

    def push_to(self, replica: Replica) -> None:
        """Push to this one, too: a node that is to become a member gets all records first."""
        driver = _Driver(self, replica, self._by_tp)
        self._drivers.append(driver)
        if self._is_started:
            driver.start()

    def stop_pushing_to(self, index: int) -> None:
        """Stop pushing to this one, if it is known."""
        for driver in [driver for driver in self._drivers if driver.replica.index == index]:
            self._drivers.remove(driver)
            driver.stop()
        for led in self.partitions.values():
            self.manager.stop_push(led.tp, [index], PushSessionEndReason.REPLICA_REMOVED)

    def hand_over(self) -> dict[int, list[tuple[int, OnReplicated]]]:
        """Stop, and return the waiting callbacks for the next Leading: (end offset, callback) by partition.

        The lead goes on, so no replica is told goodbye.
        """
        self._last_beat = None
        waiting = {number: led.hand_over() for number, led in self.partitions.items()}
        self.close()
        return waiting

    def close(self) -> None:
        """End the sessions and the threads, and fail the waiting callbacks. A second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        for driver in self._drivers:
            driver.stop()
        self.manager.shutdown()
        if self._tick is not None:
            self._tick.end()
        with self._confirming:
            threads = [one for one in (self._ticker, self._doubting) if one is not None]
        for thread in threads:
            thread.join()
        for led in self.partitions.values():
            led.close()

    def notify_grant(self, replica: int, grants: Sequence[Grant], *, is_unfilled: bool) -> Grant | None:
        """A member showed these grants. One of a higher generation than ours, or a rival forced beside it, ends our
        lead; a newer one of ours puts it in doubt. Returns one after which the member takes nothing from us.

        is_unfilled: it counts for nothing, so of our generation it deposes nobody.
        """
        ours = [one for one in grants if one.generation == self.grant.generation]
        for grant in grants:
            if not (is_unfilled and grant in ours):
                self._notify_grant(replica, grant.generation, grant.epoch, grant.leader)
        return newest_of(one for one in ours if self.grant.is_refused_after(one))

    def _on_another_grant(self, replica: int, generation: int, epoch: int, leader: int) -> None:
        """A replica answered a heartbeat with another grant. If that is older, or none, the replica lost its state,
        although it has no push to refuse: its sessions begin again, with our grant and a look at its logs.
        """
        self._notify_grant(replica, generation, epoch, leader)
        if (generation, epoch) < self.grant.rank:
            for led in self.partitions.values():
                led.end_session_of(replica, PushSessionEndReason.STALE_REPLICA_EPOCH)

    def resign(self, why: NotLeader, successor: int = NO_MEMBER) -> None:
        """Stop leading: waiting callbacks fail with `why`, and a last heartbeat tells the members that this leader has
        gone, and to which member it hands over.
        """
        if self._last_beat is not None:
            self._last_beat = replace(self._last_beat, successor=successor)
        for led in self.partitions.values():
            led.resign(why)

    def _on_own_grant(self, replica: int, stands_by: bool) -> None:  # noqa: FBT001 - a callback
        (self.standbys.add if stands_by else self.standbys.discard)(replica)
        self.notify_kept(replica)

    def notify_kept(self, replica: int) -> None:
        """A replica answered, and has our grant."""
        with self._confirming:
            self._confirmations.on_own(replica, self._clock.monotonic_ms())
            if self._is_in_sync(replica):
                self._shown.pop(replica, None)
        self.on_kept(replica)

    def _notify_grant(self, replica: int, generation: int, epoch: int, leader: int) -> None:
        for led in self.partitions.values():
            led.on_grant_shown(replica, generation, epoch, leader)

    @property
    def has_resigned(self) -> bool:
        """Whether nothing is acknowledged any more."""
        return any(led.leader.has_resigned for led in self.partitions.values())

    def _contested(self, shown: Contested) -> None:
        """Of each partition that notices it: the member's other sessions end, and the others are heard."""
        with self._confirming:
            is_known = self._confirmations.contesting.get(shown.replica) == shown[1:]
            self._confirmations.on_newer(*shown, self._clock.monotonic_ms())
            if self._doubting is None and not self._stop.is_set():
                thread = self.manager.settings.network.threads.thread(self._find_out, "pushrep-doubt")
                with suppress(RuntimeError):  # the system has no thread left: the next answer tries again
                    thread.start()
                    self._doubting = thread
            is_news, self._shown[shown.replica] = self._shown.get(shown.replica) != shown[1:], shown[1:]
        if not is_known:
            level = logging.WARNING if is_news else logging.DEBUG
            _LOG.log(level, "%s: replica %d %s", self.outbox_id, shown.replica, _shows_newer(*shown[1:]))
            for led in self.partitions.values():
                led.end_session_of(shown.replica, PushSessionEndReason.STALE_REPLICA_EPOCH)

    def _find_out(self) -> None:
        """Until no member shows a newer grant any more: resign by it, unless enough confirm ours."""
        while not self._stop.wait(LEADER_ALIVE_MS / 1000 / _LOOKS_PER_ALIVE):
            with self._confirming:
                newer = self._confirmations.newer_grant(self._clock.monotonic_ms())
                if newer is None and not self._confirmations.contesting:
                    self._doubting = None
                    return
            if newer is not None:
                epoch, leader = newer
                self.resign(NotLeader(leader, epoch))
                return

    def notify_directory(self, replica: int, directory_id: UUID | None, *, is_unfilled: bool) -> None:
        """A replica that has our grant showed its directory. If that is not the grant's, the replica is filled and does
        not count.
        """
        named, before = self.grant.directory_of(replica), {one.index for one in self.grant.previous_members}
        is_new = bool(before) and replica not in before  # empty at first, when each counts by what it holds
        is_counted = is_new or directory_id is None or not is_unfilled or self.on_directory is None
        is_members = directory_id == named if named is not None else is_counted
        if is_members or directory_id is None:
            self.new_directories.pop(replica, None)
        elif self.new_directories.get(replica) != directory_id:
            self.new_directories[replica] = directory_id
            if replica in self.grant.indexes:
                _LOG.warning("%s: member %d: %s", self.outbox_id, replica, _NEW_DIRECTORY)
        self.directories[replica] = directory_id
        for led in self.partitions.values():
            led.on_directory(replica, is_members=is_members)
        if self.on_directory is not None:
            self.on_directory()

    def start_session(
        self,
        replica: Replica,
        replica_epoch: int,
        description: LogDescription,
        client: ReplicaClient | None = None,
    ) -> None:
        """Push to the log that the replica described; over the connection of `client`, if it can be taken over."""
        led = self._by_tp[description.tp]
        self.manager.start_push(
            led.tp,
            led.start_session(replica, replica_epoch, next(self._session_ids), description.log_ends()),
            client,
        )

    def _session_ended(self, session: PushSession, reason: PushSessionEndReason) -> None:
        self.manager.on_session_ended(session, reason)
        if reason in BEGINS_ANEW and not self._stop.is_set():
            is_quiet = reason is PushSessionEndReason.STALE_REPLICA_EPOCH  # the replica was restarted
            level = logging.INFO if is_quiet else logging.WARNING
            _LOG.log(level, "%s: session with %s: %s", session.partition.tp, session.replica, reason.name)
            for driver in list(self._drivers):
                if driver.replica == session.replica:
                    driver.refusal = session.trouble or ("" if session.log_end_offset >= 0 else driver.refusal)
                    driver.begin_anew(session.partition.tp, is_first_success=session.log_end_offset >= 0)

    def _keep_looking(self, every_ms: int) -> None:
        while not self._stop.wait(every_ms / 1000):
            self._look_around()

    def _look_around(self) -> None:
        self.troubles()
        for led in self.partitions.values():
            try:
                led.on_tick(self._clock.monotonic_ms())
            except Exception:  # noqa: BLE001 - one log that fails keeps no other's replicas in sync
                _LOG.exception("%s: the check for replicas that lag failed", led.tp)
        for driver in list(self._drivers):
            driver.start()
            if interval_ms := self.manager.settings.repair_interval_ms:
                driver.on_tick(self._clock.monotonic_ms(), interval_ms)


class _Driver:
    """Begins the sessions of one replica, in a thread of its own that runs while some have to begin."""

    def __init__(self, leading: Leading, replica: Replica, tps: Iterable[TopicIdPartition]) -> None:
        self.replica = replica
        self._leading = leading
        self._wanted = list(tps)
        self._logged: dict[TopicIdPartition, str] = {}  # the last logged reason why no session of a log begins
        self._failures = 0
        self._client: ReplicaClient | None = None
        self.trouble: str | None = None
        """Why no session can begin now."""
        self.has_answered = False
        """Whether it answered when sessions were to begin last."""
        self.refused = ""
        """The replica's last report on its disk, when sessions began."""
        self.refusal = ""
        """Why the last session that ended with a final reason could not go on."""
        self.damage: str | None = None
        """The damage that its scrub found and no member could repair."""
        self._threads = leading.manager.settings.network.threads
        self._lock = threading.Lock()
        self._stop = self._threads.event()
        self._thread: Thread | None = None
        self._is_repair_due = False
        self._looked_ms: int | None = None  # when its damage was last asked for

    def start(self) -> None:
        with self._lock:
            self._run_if_wanted()

    def on_tick(self, now_ms: int, interval_ms: int) -> None:
        """Ask for its damage, once an interval."""
        with self._lock:
            if self._looked_ms is None or now_ms - self._looked_ms < interval_ms:
                self._looked_ms = now_ms if self._looked_ms is None else self._looked_ms
                return
            self._looked_ms, self._is_repair_due = now_ms, True
            self._run_if_wanted()

    def stop(self) -> None:
        self._stop.set()
        if (client := self._client) is not None:
            client.cut()
        with self._lock:
            thread = self._thread
        if thread is not None:  # a thread that is connecting ends by itself
            thread.join(self._leading.manager.settings.shutdown_timeout_ms / 1000)

    def begin_anew(self, tp: TopicIdPartition, *, is_first_success: bool) -> None:
        """A session of this partition is over; begin another, sooner if that one had worked."""
        with self._lock:
            self._failures = 0 if is_first_success else self._failures + 1
            self._wanted.append(tp)
            self._run_if_wanted()

    def _run_if_wanted(self) -> None:
        if (self._wanted or self._is_repair_due) and self._thread is None and not self._stop.is_set():
            thread = self._threads.thread(self._run, f"pushrep-sessions-{self.replica.index}")
            with suppress(RuntimeError):  # the system has no thread left: the next tick tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        settings = self._leading.manager.settings
        while True:
            with self._lock:
                wanted, self._wanted = list(dict.fromkeys(self._wanted)), []
                failures = self._failures
                is_due, self._is_repair_due = self._is_repair_due, False
                if not wanted and not is_due:
                    self._thread = None
                    return
            if self._stop.is_set() or (failures and self._stop.wait(pause_s(settings, failures))):
                return
            if not wanted:
                self._repair()
                continue
            try:
                retry_connecting(lambda wanted=wanted: self._begin(wanted), settings, self._stop, self._report)  # type: ignore[misc]
            except (IllegalState, NodeUnreachable):  # stopped
                return
            except Exception as error:  # noqa: BLE001 - whatever it is: nobody else would begin sessions again
                _LOG.exception("%s: sessions can't begin", self.replica)
                self.trouble = f"{type(error).__name__}: {error}"
                with self._lock:
                    self._failures += 1
                    self._wanted += wanted

    def _repair(self) -> None:
        """Repair its damage; sessions that are to begin come first."""
        try:
            with ReplicaClient(self.replica.address, self._leading.manager.settings) as client:
                self._client = client
                gave_up = lambda: bool(self._wanted) or self._stop.is_set()  # noqa: E731 - one question
                self.damage = self._leading.repairs.repair(self.replica, client, gave_up)
        except NodeUnreachable as error:
            _LOG.debug("%s: nothing is repaired: %s", self.replica, error)  # its sessions log it, if it stays away
        except Exception:  # noqa: BLE001 - whatever it is: nobody else would begin sessions again
            _LOG.exception("%s: nothing is repaired", self.replica)

    def _begin(self, wanted: Sequence[TopicIdPartition]) -> None:
        self.has_answered = False
        if self._leading.has_resigned:
            return
        with ReplicaClient(self.replica.address, self._leading.manager.settings) as client:
            self._client = client
            if self._stop.is_set():
                return
            self._offer(client)
            left = list(wanted)
            while left:
                answer = client.ask(
                    DescribeLogRequest(
                        outbox_id=self._leading.outbox_id,
                        member=self._leading.grant.leader,
                        create=True,
                        partitions=tuple(left[:_CREATED_AT_ONCE]),
                        generation=self._leading.grant.generation,
                    ),
                    DescribeLogResponse,
                )
                if answer.error_code is not ErrorCode.NONE or not answer.logs:
                    raise self._refused(answer)
                self._notify_grant(answer)
                if self._stop.is_set():
                    return
                why = answer.error_message
                self.refused = f"{ErrorCode.KAFKA_STORAGE_ERROR.name}: {why}" if why else ""
                left = left[len(answer.logs) :]  # an answer describes as many logs as fit into a frame
                for description in answer.logs:
                    self._on_description(answer.replica_epoch, description, client if not left else None)
            self.trouble = None

    def _offer(self, client: ReplicaClient) -> None:
        """Offer our grant: the replica was away when the others stored it, or it is new."""
        grant = self._leading.grant
        answer = client.ask(
            wire.GrantRequest(grant=grant, sender=grant.leader, member=self.replica.index), wire.GrantResponse
        )
        self.has_answered = True
        self._notify_grant(answer)
        if answer.error_code in _NOBODY_THERE or (answer.error_code is not ErrorCode.NONE and answer.is_unfilled):
            raise self._refused(answer)
        if answer.member != self.replica.index and answer.member in grant.indexes:
            # Two addresses of one node: its disk would count twice, and records on it alone would count as safe.
            twice = f"{ErrorCode.MEMBER_TWICE.name}: it is member {answer.member}, not {self.replica.index}"
            raise NodeUnreachable(str(self.replica.address), twice)
        if answer.error_code is not ErrorCode.NONE:  # its answers to pushes decide
            _LOG.warning("%s refuses our grant: %s", self.replica, answer.why)
            return
        self._leading.notify_kept(self.replica.index)
        self._leading.notify_directory(self.replica.index, answer.directory_id, is_unfilled=answer.is_unfilled)

    def _notify_grant(self, answer: wire.GrantResponse | DescribeLogResponse) -> None:
        """Raises NodeUnreachable if it shows a newer grant: no session begins with it before it has ours."""
        newer = self._leading.notify_grant(self.replica.index, answer.grants, is_unfilled=answer.is_unfilled)
        if newer is not None:
            raise NodeUnreachable(str(self.replica.address), _shows_newer(newer.epoch, newer.leader))

    def _refused(self, answer: wire.GrantResponse | DescribeLogResponse) -> NodeUnreachable:
        """The name and the text of the refusal."""
        code = answer.error_code
        detail = f" ({answer.error_message})" if answer.error_message else ""
        return NodeUnreachable(str(self.replica.address), f"{code.name}: {code.meaning}{detail}")

    def _on_description(self, replica_epoch: int, description: LogDescription, client: ReplicaClient | None) -> None:
        why = description.error_code.meaning
        if description.error_code is ErrorCode.NONE:
            try:
                self._leading.start_session(self.replica, replica_epoch, description, client)
            except ValueError as error:  # no log has such a list of epochs
                why = str(error)
            else:
                self._logged.pop(description.tp, None)
                return
        is_news = self._logged.get(description.tp) != why
        self._logged[description.tp] = why
        _LOG.log(logging.WARNING if is_news else logging.DEBUG, "%s: %s: %s", description.tp, self.replica, why)
        if description.error_code is not ErrorCode.KAFKA_STORAGE_ERROR:  # `refused` has the details
            self.refusal = f"{description.error_code.name}: {why}"
        self.begin_anew(description.tp, is_first_success=False)

    def _report(self, error: BaseException) -> None:
        why = str(error)
        is_news, self.trouble = why != self.trouble, why
        _LOG.log(logging.WARNING if is_news else logging.INFO, "%s: %s", self.replica, why)


def _shows_newer(epoch: int, leader: int) -> str:
    shown = f"shows a newer grant or member list, of epoch {epoch} for member {leader}"
    newer = shown if leader >= 0 else "refuses our grant as old"
    return f"{newer}: until it shows ours it gets nothing, and if too few others show ours, this member leads no more"
