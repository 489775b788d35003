"""An outbox's replicas as a whole: the lead and its grant, the pushing, the members and their lag.

    open    ─▶ Election: look, take a number, grant, fetch ─▶ PID epoch ─▶ start: Leading, wait for enough in sync
               └ too few answer: with ALL no record is taken, with LOCAL they go under an epoch without a grant;
                 `watch` looks on in the background until it leads
    while open ─▶ a tick fails batches that wait for longer than delivery_timeout_ms
               ─▶ change_members: writers pause, a new grant, a new Leading; waiting batches move to it ─▶ a member with
               a new directory is in sync: new grants name that directory

NotLeader at the open: another member leads. The directory has stored that grant and can be put under a node as it is.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from uuid import UUID

from pushrep.election.candidate import LEADER_ALIVE_MS, Candidate, MemberAnswer, Purpose
from pushrep.election.errors import NotLeader, TooFewMembers
from pushrep.election.grants import Grant, Member, are_rivals, hold_of, newest_of, next_ballot
from pushrep.election.leader import PartitionLeader
from pushrep.election.standby import LeaderHealth, TakeoverTimes
from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.log import LogClosed, LogPoisoned, SegmentLog
from pushrep.log.flush_scheduler import Tick
from pushrep.outbox.directory_handover import NEVER
from pushrep.outbox.errors import (
    CommandRefused,
    NotEnoughReplicas,
    OutboxClosed,
)
from pushrep.outbox.identity import OutboxIdentity, write_identity
from pushrep.outbox.partition_appender import PartitionAppender
from pushrep.outbox.partition_replicas import PartitionReplicas, ReplicaLag, holding_back, lag_of, writes_paused
from pushrep.outbox.positions import PositionsStore
from pushrep.outbox.promotion import Granted, Heard, ListChange, list_change, with_loss
from pushrep.outbox.settings import OutboxSettings
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election import Change, Election
from pushrep.replicate.election_state import NO_MEMBER, ElectionStateStore
from pushrep.replicate.errors import MayStillBeDelivered
from pushrep.replicate.leading import Leading
from pushrep.replicate.member_clients import tp_of
from pushrep.replicate.settings import Replica
from pushrep.replicate.sockets import Address
from pushrep.settings import DURATION_MAX_S

_LOG = logging.getLogger("pushrep.outbox")
_PAUSE_S = 0.005  # between looks at the in-sync sets while `open` waits
_LOOK_AGAIN_S = 0.5
_UNASKED_WAIT_S = 2.0  # how long a change that nobody asked for pauses appends
_NAME_AGAIN_S = 0.05  # between looks whether a member with a new directory was filled
_ASK_S = 5.0  # timeout of asking the members who leads
_ANSWER_S = 1.0  # the same, for a message that names the silent ones
LEFT_MS = 60_000
"""If a change of members makes no step for so long, its command was killed, and the change is left as it is."""
_SILENT_MS = LEADER_ALIVE_MS  # a member answers once a second
_TICKS_PER_TIMEOUT = 4
_TICK_MAX_S = 1.0
_LEAD_LOOK_S = 0.25


class Replication:
    """The replicas of an open outbox. `open`, `start`, `watch` in this order, `close` at the end."""

    def __init__(
        self,
        identity: OutboxIdentity,
        logs: Sequence[tuple[SegmentLog, PositionsStore]],
        state_store: ElectionStateStore,
        settings: OutboxSettings,
        clock: Clock,
    ) -> None:
        self._identity, self._settings, self._config, self._clock = identity, settings, settings.config, clock
        self._stores = {log.partition: store for log, store in logs}
        self._logs = {log.partition: log for log, _ in logs}
        self._push = settings.config.push
        self._state_store, self.directory = state_store, state_store.directory
        self.needs_all = settings.needs_all
        """Whether receipts wait for replicas."""
        if self._state_store.kept.member == NO_MEMBER:
            self._state_store.keep(replace(self._state_store.kept, member=identity.member))
        self._election = Election(
            self._state_store,
            self._logs,
            self._push,
            addresses=dict(identity.replicas),
            fetched=lambda partition, batch: self._stores[partition].dispatch(batch),
            clock=clock,
        )
        self._grant: Grant | None = None
        self.leading: Leading | None = None
        """The leader's side; None until this outbox leads."""
        self._learners: dict[int, Replica] = {}
        self._wanted_ms: dict[int, int] = {}  # by learner, wall clock
        self._opened_ms = clock.wall_ms()
        self._answered_ms: dict[int, int] = {}  # by member, wall clock
        self.too_few: TooFewMembers | None = None
        """Why it could not lead when it asked last."""
        self.own_appenders: Sequence[PartitionAppender] = ()
        self.on_identity: Callable[[OutboxIdentity], None] = lambda _identity: None
        """Called with the new identity when another PID begins while the outbox is open."""
        self._changing = threading.Lock()
        self.step_lock = threading.Lock()
        """Held for each step of a change of members (member_changes.py): a second change sees the first one's."""
        self._stop = threading.Event()
        self._naming_lock = threading.Lock()
        self._is_naming = False
        self._shown = False  # a replica showed its directory since `_name_directories` ran
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()  # held while a thread starts, as `close` can join only started threads
        self._tick: Tick | None = None
        self._health: LeaderHealth | None = None  # with standbys
        self.appenders: Mapping[int, PartitionReplicas] = {
            n: PartitionReplicas(
                f"{log.topic}-{n}",
                needs_all=settings.needs_all,
                min_insync_replicas=identity.min_insync_replicas,
                clock=clock,
            )
            for n, log in self._logs.items()
        }

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Try to become the leader, and fetch records that only other members have. Nobody appends yet.

        Raises NotLeader, LogNotFit, CantLead, NodeUnreachable if the member that is ahead goes away, the logs'
        errors.
        """
        try:
            self._grant = self._run(self._renewal)
        except TooFewMembers as error:
            self._grant, self.too_few = None, error
            taken = "no record is taken" if self.needs_all else "records go under an epoch without a grant"
            _LOG.warning("%s: %s; until they do, %s", self.directory, error, taken)
        if self.needs_all and self._identity.min_insync_replicas > len(self._identity.replicas) == 1:
            _LOG.warning("%s has two members and needs both: if one fails, appends stop", self.directory)

    def start(self, pid_epoch: int) -> None:
        """Lead, if there is a grant, and wait until enough are in sync. Raises as `open`."""
        self._identity = replace(self._identity, pid_epoch=pid_epoch)
        started = monotonic()
        if self._grant is not None and self._grant.pid_epoch != pid_epoch:
            self.open()  # members know the PID epoch before any record has it
        if self._grant is None:
            if not self.needs_all:
                self._election.begin_unfenced()
            return
        self._lead(self._grant)
        self._wait_for_members(started, self._config.open_timeout_s)

    def watch(self, appenders: Sequence[PartitionAppender]) -> None:
        """From now on fail batches that wait for longer than `delivery_timeout_ms`; go on trying to lead, if it could
        not yet.
        """
        self.own_appenders = appenders
        for one in self.appenders.values():
            one.lead_anew = self.lead_anew
        every_s = min(_TICK_MAX_S, self._config.delivery_timeout_ms / 1000 / _TICKS_PER_TIMEOUT)
        self._tick = Tick(max(1, int(every_s * 1000)), self._expire_late)
        if self._grant is None:
            self._thread("pushrep-look", self._look_on)

    def resign_in_time(self, times: TakeoverTimes, on_lost: Callable[[Exception], None]) -> None:
        """From now on give up the lead as soon as another may have it by `times`. on_lost(why) is called once in a
        thread of its own when this outbox has lost the lead, for whatever reason. It may close the outbox.
        """
        self._health = LeaderHealth(times, self._clock.monotonic_ms())
        self._thread("pushrep-lead", partial(self._watch_lead, self._health, on_lost))

    def end_change(self) -> None:
        """End all waiting for members, and begin no change of members any more. The outbox leads on."""
        self._election.ending.set()

    def close(self) -> None:
        """End the sessions and the threads. A second call does nothing."""
        self.end_change()
        self._stop.set()
        if self._tick is not None:
            self._tick.end()
        with self._starting:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():  # `on_lost` may close the outbox
                thread.join()
        with self._changing:  # a change that is under way leads anew at its end
            leading = self.leading
        if leading is not None:
            leading.close()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def grant(self) -> Grant | None:
        """The grant by which this outbox leads; None while too few members answer."""
        return self._grant if self.leading is not None else None

    @property
    def kept_grant(self) -> Grant | None:
        """The newest grant of this directory, whether this outbox leads by it or not."""
        return self._state_store.kept.grant

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the newest grant, this one counted; during a change those of both lists."""
        grant = self._state_store.kept.grant or self._first()
        known = {one.index: one for one in (*grant.previous_members, *grant.members)}
        return tuple(known[index] for index in sorted(known))

    def lag(self) -> dict[str, ReplicaLag]:
        """Each member's lag, by its address."""
        lags = self.lag_by_index()
        return {str(one.address): lags[one.index] for one in self._replicas()}

    def lag_by_index(self) -> dict[int, ReplicaLag]:
        """Each member's lag, by its index."""
        now_ms = self._clock.monotonic_ms()
        return {one.index: lag_of(one.index, self.appenders, self._logs, now_ms) for one in self._replicas()}

    # -- changing members ------------------------------------------------------------------------------------------

    def push_to(self, index: int, address: str) -> None:
        """Push to a node that is to become member `index`. It gets all records and has no vote yet."""
        with self._changing:
            replica = self._learners[index] = Replica(index, Address.parse(address))
            if self.leading is not None:
                self.leading.push_to(replica)

    @property
    def learners(self) -> Mapping[int, str]:
        """The nodes that are pushed to and no members yet: index, address."""
        return {index: str(one.address) for index, one in list(self._learners.items())}

    def want_learner(self, index: int) -> None:
        """A step of its change: whoever changes the members is still there."""
        self._wanted_ms[index] = self._clock.wall_ms()

    @property
    def left_learners(self) -> Mapping[int, int]:
        """The learners whose change nobody goes on with: index, and since when, wall clock."""
        now_ms, learners = self._clock.wall_ms(), self.learners
        return {
            index: at_ms
            for index, at_ms in list(self._wanted_ms.items())
            if index in learners and at_ms <= now_ms - LEFT_MS
        }

    def forget_learner(self, index: int) -> None:
        """The node is a member now, and no learner."""
        self._learners.pop(index, None)

    def stop_pushing_to(self, index: int) -> None:
        """The node is not to become a member after all: stop pushing to it. Does nothing for one that is no learner."""
        with self._changing:
            if self._learners.pop(index, None) is not None and self.leading is not None:
                self.leading.stop_pushing_to(index)

    def has_caught_up(self, index: int) -> bool:
        """Whether it holds everything below the high watermark of every partition."""
        return self._holds(lambda leader: index in leader.caught_up)

    @property
    def may_settle(self) -> bool:
        """Whether the change of members that the grant began is done: `change_members` by `Grant.settled` ends it."""
        return self._holds(lambda leader: leader.may_settle)

    def stop_addressing(self, index: int) -> Grant:
        """Go on under a grant without this member's address, so that its node may become another member. Raises as
        `change_members`.
        """
        grant = self.change_members(lambda newest, epoch: newest.without_address(epoch, index))
        replicas = tuple(one for one in self._identity.replicas if one[0] != index)
        self._identity = replace(self._identity, replicas=replicas)
        self._election.addresses.pop(index, None)
        return grant

    def shows_another_directory(self, index: int) -> bool:
        """Whether a member showed another directory than the grant names, since this outbox leads."""
        leading = self.leading
        return (
            leading is not None and index in leading.new_directories and leading.grant.directory_of(index) is not None
        )

    def change_members(self, change: Change, *, wait_s: float | None = None) -> Grant:
        """Go on under the grant that `change(newest grant, new epoch)` makes. Appends wait meanwhile, and with ALL
        until enough members are in sync again, up to `wait_s` (None: `open_timeout_s`).

        Raises TooFewMembers, BadGrant, NotEnoughReplicas or NotLeader if it does not lead now. If it stops half-way,
        the outbox goes on as after an open that found too few members.
        """
        with self._changing:
            self._check_not_closing()
            grant, looked = self._ask_members(DURATION_MAX_S if wait_s is None else max(wait_s, _UNASKED_WAIT_S))
            found = {index: answer for index, answer in looked.items() if answer.grant is not None}
            refusal = self._too_few(grant, found) or self.why_not_leading()
            if refusal is not None:
                raise refusal
            with writes_paused(self.appenders.values()), holding_back(self.appenders.values()):
                granted, started = self._hand_over(partial(self._run, change, leads=True)), monotonic()
                if granted.may_acknowledge(granted.indexes - granted.entering):  # else not before the change is settled
                    self._wait_for_members(started, self._config.open_timeout_s if wait_s is None else wait_s)
            gone = [one for one in grant.previous_members if one.index not in granted.indexes]
            if gone:  # one that is away keeps its old grant, and its copy stays a member's
                self._election.offer_removed(granted, gone, min(_UNASKED_WAIT_S, self._config.open_timeout_s))
            return granted

    def lead_anew(self, go_on: Callable[[], None]) -> None:
        """A log was opened again after a failure, and lacks records that were pushed: lead by a new grant, as at an
        opening, so that they come from a member that has them. Then call `go_on`; nothing is written meanwhile.

        Raises CommandRefused while another log is stopped, because a lead begins with all logs. Else raises as
        `change_members`, after `go_on`: the outbox goes on as after an open that found too few members.
        """
        with self._changing, writes_paused(self.appenders.values()), holding_back(self.appenders.values()):
            if self._stop.is_set():
                raise OutboxClosed(self.directory)
            if stopped := [log.path.name for log in self._logs.values() if log.stopped_by is not None]:
                raise CommandRefused(f"it goes on once {', '.join(stopped)} can be opened again, too")
            try:
                if self.leading is not None and self._lost() is None:  # else `_look_on` leads later, or another leads
                    self._hand_over(partial(self._run, self._renewal, leads=True))
                    self._wait_for_members(monotonic(), self._config.open_timeout_s)
            finally:
                go_on()

    def hold_takeovers(self, length_ms: int, reason: str) -> Grant:
        """Go on under a grant by which no standby takes over by itself for so long; 0 ends that. `promote` still does.

        Enough members store it to meet every majority. Raises CommandRefused before anything is changed if too few
        members that can store it answer, or later if too few stored it; NotEnoughReplicas, NotLeader as
        `change_members`.
        """
        with self._changing:
            grant, found = self._ask_members()
        can = {index for index, one in found.items() if one.grant is not None}
        self._check_holding(grant, can, "try again")
        now_ms = self._clock.wall_ms()
        granted = self.change_members(
            lambda newest, epoch: newest.held(epoch, since_ms=now_ms, until_ms=now_ms + length_ms, reason=reason)
        )
        with self._changing:
            answers = self._election.offer(granted, self._config.open_timeout_s)
        stored = {index for index, one in answers.items() if one.grant is not None and one.grant.hold == granted.hold}
        self._check_holding(granted, stored, "it is stored there, and has to be said again")
        how_long = f"for {length_ms / 1000:.0f} s: {reason}" if length_ms else "no more"
        _LOG.warning("%s: takeovers are held %s", self.directory, how_long)
        return granted

    def _check_holding(self, grant: Grant, others: Collection[int], what_to_do: str) -> None:
        if (short := grant.too_few_to_change({self._identity.member, *others})) is not None:
            needed = f"{short.answered} of {short.needed} needed members keep the hold"
            raise CommandRefused(f"{needed}, and {list(short.silent)} do not: {what_to_do}")

    def _ask_members(self, within_s: float = DURATION_MAX_S) -> tuple[Grant, dict[int, MemberAnswer]]:
        """The newest grant here, and what its other members answer in `open_timeout_s` or `within_s`."""
        grant = self._state_store.kept.grant or self._first()
        return grant, self._election.describe_members(grant, min(within_s, self._config.open_timeout_s))

    @property
    def has_standbys(self) -> bool:
        """Whether instances stand by for this lead: it was made by `stand_by`, or one of them took over before."""
        grant = self._state_store.kept.grant
        return self._health is not None or (grant is not None and grant.takeover is not None)

    def _check_not_closing(self) -> None:
        if self._election.ending.is_set:
            raise OutboxClosed(self.directory)

    def who_answers(self) -> frozenset[int]:
        """Ask the other members; those that answer at once, and this one."""
        with self._changing:
            _, found = self._ask_members(_ANSWER_S)
        return frozenset({self._identity.member, *found})

    def is_silent(self, index: int) -> bool:
        """Whether another member can't be reached, or has not answered for some time."""
        leading, since_ms = self.leading, self._answered_ms.get(index, self._opened_ms)
        return (leading is not None and leading.is_away(index)) or self._clock.wall_ms() - since_ms >= _SILENT_MS

    def replace_lost(self, lost: frozenset[int], new: Sequence[str]) -> Granted:
        """Go on under a forced grant: the directories of `lost` are destroyed, and the nodes at `new` come into the
        list. Another PID begins; waiting batches go on waiting, until enough members of the new list hold everything.

        Raises CommandRefused, TooFewMembers before anything is changed; NotLeader, RivalGenerations,
        OSError. If it stops half-way, the outbox goes on as after an open that found too few members.
        """
        with self._changing:
            grant, own = self._state_store.kept.grant, self._identity.member
            self._check_not_closing()
            assert grant is not None, "the caller looked at it"
            if (refusal := self.why_not_leading()) is not None and not isinstance(refusal, NotEnoughReplicas):
                raise refusal
            change = list_change(self._election, lost, new)
            _, found = self._ask_members()
            shown = newest_of([grant, *(one.grant for one in found.values())]) or grant
            if shown.rank > grant.rank:
                raise NotLeader(shown.leader, shown.epoch)
            change.check_looked(self.directory, grant, own, found)
            agreeing = {own, *(index for index, one in found.items() if one.grant is not None)} - lost
            if self.leading is not None and grant.too_few_to_change(agreeing) is None:
                raise CommandRefused(
                    f"members {sorted(agreeing)} are enough to agree to a change, so nothing has to be lost: run it "
                    "without --lost. Nothing was changed"
                )
            heard = self._last_contacts(grant)
            with writes_paused(self.appenders.values()), holding_back(self.appenders.values()):
                forced: list[Granted] = []

                def force() -> Grant:
                    forced.append(self._force(change, heard))
                    return forced[0].grant

                self._hand_over(force)
            return forced[0]

    def _last_contacts(self, grant: Grant) -> dict[int, Heard]:
        """Of each other member: the offsets that it acknowledged, and when it answered last."""
        led = {} if self.leading is None else self.leading.partitions
        return {
            index: Heard(
                self._answered_ms.get(index, NEVER),
                {number: one.leader.held_by(index) for number, one in led.items() if index in one.leader.sessions},
            )
            for index in grant.indexes - {grant.leader}
        }

    def _force(self, change: ListChange, heard: Mapping[int, Heard]) -> Granted:
        """Force a grant. The caller has stopped leading and pauses writes."""
        try:
            return with_loss(
                self._election,
                self._clock.wall_ms(),  # last contact with a leader: this member led until now
                catch_up=False,
                timeout_s=self._config.open_timeout_s,
                repair=lambda _grant: ((), True),
                change=change,
                heard=heard,
            )
        finally:
            kept = self._state_store.kept.grant
            if kept is not None and kept.pid_epoch > self._identity.pid_epoch:  # stored, even if a later step failed
                self._begin_pid_epoch(kept, change.lost)

    def _begin_pid_epoch(self, grant: Grant, lost: frozenset[int]) -> None:
        replicas = tuple(one for one in self._identity.replicas if one[0] not in lost)
        self._identity = replace(self._identity, pid_epoch=grant.pid_epoch, replicas=replicas)
        for appender in self.own_appenders:
            appender.begin_pid(self._identity.pid)
        self.on_identity(self._identity)
        try:
            write_identity(self._state_store.filesystem, self.directory, self._identity)
        except OSError as error:  # the next opening takes it from the grant
            _LOG.warning("%s: outbox.json does not show PID epoch %d: %s", self.directory, grant.pid_epoch, error)

    def leads_by_the_newest_grant(self) -> bool:
        """Ask the members: whether min_insync_replicas of them answer and have stored no newer grant, this one counted,
        and none has one of a higher generation.

        So many meet every set of members that could have granted a lead to another.
        """
        with self._changing:
            grant = self.grant
            if grant is None or self.why_not_leading() is not None:
                return False
            _, found = self._ask_members(_ASK_S)
        shown = {index: one.grant for index, one in found.items() if one.grant is not None}
        generations = {one.generation for one in shown.values()}
        if any(one > grant.generation or are_rivals(one, grant.generation) for one in generations):
            return False
        others = {index for index, one in shown.items() if one.generation < grant.generation or one.rank > grant.rank}
        answered = {self._identity.member, *found} - others
        return any(len(one.members & answered) >= one.min_insync_replicas for one in grant.quorums)

    def _lost(self) -> Exception | None:
        """Why this outbox can't lead again before it is opened anew; None if it leads or still may."""
        for appender in self.appenders.values():
            led = appender.led
            if (why := appender.failure or (None if led is None else led.resigned)) is not None:
                return why
        return None

    def _watch_lead(self, health: LeaderHealth, on_lost: Callable[[Exception], None]) -> None:
        while not self._stop.wait(_LEAD_LOOK_S):
            lost = self._lost()
            if self._election.ending.is_set:  # it hands over by itself
                return
            if lost is None:
                try:
                    why_no_append = self._why_no_append()
                except LogClosed:  # by `close`
                    return
                grant = self._state_store.kept.grant or self._first()
                why = health.why_resign(grant, why_no_append, self._clock.monotonic_ms())
                if why is None:
                    continue
                given_up = f"member {grant.leader} gave up its lead of epoch {grant.epoch}: {why}"
                lost = self._resign(NotLeader(grant.leader, grant.epoch, given_up))
            try:
                on_lost(lost)
            except Exception:  # noqa: BLE001 - it is not ours
                _LOG.exception("%s: the callback for a lost lead failed", self.directory)
            return

    def _resign(self, why: NotLeader) -> NotLeader:
        """Stop appending, shipping and pushing; tell the members that can be reached that this leader has gone."""
        _LOG.error("%s: %s", self.directory, why)
        for appender in self.appenders.values():
            appender.failure = why
        with self._changing:  # a change that is under way leads anew at its end
            if self.leading is not None:
                self.leading.resign(why)
        return why

    def transfer(self, to: int | None, within_s: float) -> int:
        """Hand the lead over to member `to`, where a service has to stand by, and return it; None: to the one that is
        furthest. Nothing is appended meanwhile; from then on appends raise NotLeader.

        Raises CommandRefused if it can't, or if that member does not hold everything within `within_s`: then it leads
        on. NotLeader, NotEnoughReplicas if it does not lead.
        """
        with self._changing:
            if (refusal := self.why_not_leading()) is not None:
                raise refusal
            leading = self.leading
            assert leading is not None, "it leads"
            target = self._successor(leading, to)
            until_s, is_closing = monotonic() + within_s, self._election.ending.is_set
            with writes_paused(self.appenders.values()), holding_back(self.appenders.values()):
                while not self._holds(lambda leader: leader.has_all(target)):
                    if why_not := self._why_nothing_moves():
                        raise CommandRefused(
                            f"{why_not}: nothing more is acknowledged, so there is nothing to wait for"
                        )
                    is_ended = self._election.ending.is_set and not is_closing
                    if monotonic() >= until_s or is_ended or self._stop.wait(_PAUSE_S):
                        raise CommandRefused(
                            f"member {target} does not hold everything within {within_s:g} s: this one leads on"
                        )
                own, epoch = leading.grant.leader, leading.grant.epoch
                why = NotLeader(target, epoch, f"member {own} handed its lead of epoch {epoch} over to member {target}")
                with self._state_store.lock:  # first: this member's next instance does not lead on at once
                    self._state_store.keep(replace(self._state_store.kept, is_handed_over=True))
                _LOG.info("%s: %s", self.directory, why)
                for appender in self.appenders.values():
                    appender.failure = why
                leading.resign(why, target)
        return target

    def _why_nothing_moves(self) -> str:
        """Why the watermark can't rise now; empty if it can."""
        are_enough = self._holds(lambda leader: leader.may_append_all)
        return self._why_no_append() or ("" if are_enough else "too few members are in sync")

    def _why_no_append(self) -> str:
        """Of the first log that takes none; empty if all take appends."""
        return next(filter(None, (log.why_no_append() for log in self._logs.values())), "")

    def _successor(self, leading: Leading, to: int | None) -> int:
        grant = leading.grant
        if (held := hold_of(grant, self._clock.wall_ms())) is not None:
            raise CommandRefused(
                f"takeovers are held ({held.reason}), also for who is named: end that first with pushrep outbox hold "
                f"{self.directory} --end"
            )
        listed = sorted(one.index for one in grant.members if one.index != grant.leader)
        can = [index for index in listed if index in leading.standbys]
        if to is None and can:
            lags = self.lag_by_index()
            return min(can, key=lambda index: (lags[index].partitions - lags[index].in_sync, lags[index].records))
        if to is None or to not in can:
            why = f"of the others, {listed}, no service that could lead stands by at "
            raise CommandRefused(
                f"{why}{'any' if to is None else to}: see pushrep status {self.directory}. This one leads on"
            )
        return to

    def why_not_leading(self) -> Exception | None:
        """What an append that waits for replicas would raise; None while this outbox leads."""
        if self._stop.is_set():
            return OutboxClosed(self.directory)
        for appender in self.appenders.values():
            if appender.failure is not None or appender.led is None:
                return appender.failure or NotEnoughReplicas(self._identity.topic, in_sync=1, needed=appender.needed)
            if appender.led.resigned is not None:
                return appender.led.resigned
        return None

    def _hand_over(self, run: Callable[[], Grant]) -> Grant:
        """Lead by the grant that `run` makes; waiting batches go on waiting under it."""
        led, waiting = self.leading, self.leading.hand_over() if self.leading is not None else {}
        self.leading = self._grant = None
        for appender in self.appenders.values():
            appender.led = None
        try:
            self._grant = run()
            leading = self._lead(self._grant)
        except BaseException as error:
            for of_partition in waiting.values():
                for _, callback in of_partition:
                    callback(MayStillBeDelivered(f"the members could not be changed: {error}"))
            if not self.needs_all and isinstance(error, CommandRefused | TooFewMembers):
                self._election.begin_unfenced()
            if led is not None:  # else `_look_on` runs already
                self._thread("pushrep-look", self._look_on)
            raise
        for number, of_partition in waiting.items():
            for end_offset, callback in of_partition:
                leading.partitions[number].when_replicated(end_offset, callback)
        return self._grant

    # -- leading ---------------------------------------------------------------------------------------------------

    def _run(self, change: Change, *, may_cut: bool = True, leads: bool = False) -> Grant:
        first = self._first() if self._state_store.kept.grant is None else None
        timeout_s = self._config.open_timeout_s
        return self._election.run(Purpose.OPEN, timeout_s, first=first, change=change, may_cut=may_cut, leads=leads)

    def _first(self) -> Grant:
        identity, epoch = self._identity, next_ballot(self._identity.member, -1)
        return Grant(
            outbox_id=UUID(identity.outbox_id),
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

    def _renewal(self, base: Grant, epoch: int) -> Grant:
        addresses = dict(self._identity.replicas)
        members = tuple(replace(one, address=addresses.get(one.index) or one.address) for one in base.members)
        pid_epoch = max(base.pid_epoch, self._identity.pid_epoch)
        return replace(base.renewed(epoch, self._identity.member), members=members, pid_epoch=pid_epoch)

    def _lead(self, grant: Grant) -> Leading:
        self._election.begin(grant)
        self._grant = grant
        leading = Leading(
            grant.outbox_id,
            grant,
            self._logs,
            self._replicas(),
            durability=self._settings.durability,
            settings=self._push,
            replica_lag_max_ms=self._config.replica_lag_max_ms,
            clock=self._clock,
        )
        self.leading = leading
        leading.on_directory = partial(self._see_directory, grant, leading)
        leading.on_kept = self._member_answered
        leading.start()
        for number, appender in self.appenders.items():
            appender.needed, appender.led = grant.min_insync_replicas, leading.partitions[number]
        self._see_directory(grant, leading)  # shown before `on_directory` was set
        return leading

    def _member_answered(self, index: int) -> None:
        self._answered_ms[index] = self._clock.wall_ms()
        if self._health is not None:
            self._health.on_answer(index, self._clock.monotonic_ms())

    def _see_directory(self, grant: Grant, leading: Leading) -> None:
        """A replica showed its directory, or the lead is new. If grants have to follow from that, start the thread that
        makes them.
        """
        if not (grant.nameless or grant.entering or grant.is_led_alone or leading.new_directories):
            return
        with self._naming_lock:
            self._shown = True
            if not self._is_naming and not self._stop.is_set():
                self._is_naming = True
                self._thread("pushrep-directories", self._name_on)

    def _name_on(self) -> None:
        """Make grants name the members' new directories, each once it is in sync, and end the time in which this member
        leads alone, once enough others hold everything; end when there is nothing to do.
        """
        pause_s, logged = 0.0, ""
        while not self._stop.wait(pause_s):
            with self._naming_lock:
                self._shown = False
            try:
                with self.step_lock:
                    again_s = self._name_directories()
            except (OSError, PushrepError) as error:
                again_s = _LOOK_AGAIN_S
                level = logging.INFO if str(error) == logged else logging.WARNING
                logged = str(error)
                _LOG.log(level, "%s: the members' grant can't be completed yet: %s", self.directory, error)
            with self._naming_lock:
                if again_s is None and not self._shown:
                    self._is_naming = False
                    return
            pause_s = again_s or _NAME_AGAIN_S

    def _name_directories(self) -> float | None:
        """One step of `_name_on`. After how many seconds the next one is to come, if one is."""
        grant, leading = self.grant, self.leading
        if grant is None or leading is None or self.why_not_leading() is not None:
            return None
        if grant.entering or grant.is_led_alone:
            if self.may_settle:
                self._change_if_still(grant, lambda newest, epoch: newest.settled(epoch))
            return _NAME_AGAIN_S if grant.entering else _LOOK_AGAIN_S
        new_directories = {index: one for index, one in leading.new_directories.items() if index in grant.indexes}
        if not grant.previous_members:
            for index, directory_id in sorted(new_directories.items()):
                if self._holds(lambda leader, index=index: leader.may_enter(index)):  # type: ignore[misc]
                    _LOG.info("member %d was filled: it comes in with directory %s", index, directory_id.hex)
                    self._change_if_still(grant, partial(_with_directory, index, directory_id))
                    return _NAME_AGAIN_S
            names = self._names_missing(grant, leading)
            if names and all(self.has_caught_up(index) for index in grant.indexes):
                self._change_if_still(grant, lambda newest, epoch: newest.with_names(epoch, names))
                return None
            return _NAME_AGAIN_S if new_directories or names else None
        return _NAME_AGAIN_S if new_directories else None

    def _names_missing(self, grant: Grant, leading: Leading) -> dict[int, UUID]:
        """The directories of the members without one in the grant, once each of them has shown its own."""
        shown = {**leading.directories, self._identity.member: self._state_store.directory_id}
        names = {index: one for index in grant.nameless if (one := shown.get(index)) is not None}
        return names if names.keys() == grant.nameless and not leading.new_directories else {}

    def _change_if_still(self, grant: Grant, change: Change) -> None:
        """`change_members`, or a mere renewal if the list has changed meanwhile."""

        def changed(newest: Grant, epoch: int) -> Grant:
            is_still = (newest.members, newest.previous_members) == (grant.members, grant.previous_members)
            return change(newest, epoch) if is_still else newest.renewed(epoch, self._identity.member)

        self.change_members(changed, wait_s=_UNASKED_WAIT_S)

    def _look_on(self) -> None:
        """Try to lead until enough members answer. A log that would have to be cut is left to the next open."""
        try:
            while not self._stop.wait(_LOOK_AGAIN_S) and self._lost() is None:
                with self._changing:
                    if self._lead_if_enough():
                        return
        except (OSError, PushrepError) as error:
            _LOG.error("can't lead, open the outbox again: %s", error)
            for appender in self.appenders.values():
                appender.failure = error

    def _lead_if_enough(self) -> bool:
        if self.leading is not None:  # a forced grant came first
            return True
        grant, found = self._ask_members(_ASK_S)
        is_led_by_another = any(
            one.grant is not None and one.grant.rank > grant.rank and one.grant.leader != grant.leader
            for one in found.values()
        )
        self.too_few = self._too_few(grant, found)
        is_enough = is_led_by_another or self.too_few is None
        if self._stop.is_set() or not is_enough:
            return False
        try:
            with writes_paused(self.appenders.values()):
                granted = self._run(self._renewal, may_cut=False)
                for appender in self.own_appenders:
                    appender.reset_to_log_end()
                self._lead(granted)
        except (TooFewMembers, NodeUnreachable):
            return False
        except (LogPoisoned, OSError) as error:  # its appender opens a stopped log again; a shortage ends
            _LOG.info("%s: it can't lead yet: %s", self.directory, error)
            return False
        return True

    def _too_few(self, first: Grant, found: Mapping[int, MemberAnswer]) -> TooFewMembers | None:
        """Why an election by these answers has too few members; None if it has enough. first: as a Candidate's."""
        return Candidate(self._election.index, Purpose.OPEN, self._election.own(), first=first).too_few_with(found)

    def _wait_for_members(self, started_s: float, wait_s: float) -> None:
        """With ALL wait until enough members are in sync to append, another leads, or `wait_s` is over."""
        waiting = deque(self.appenders.values())  # looking at thousands often would delay pushers
        while self.needs_all and monotonic() - started_s < wait_s:
            while waiting and (led := waiting[0].led) is not None and (led.leader.may_append_all or led.resigned):
                waiting.popleft()
            if not waiting or self._election.ending.is_set or self._stop.wait(_PAUSE_S):
                return

    def _replicas(self) -> list[Replica]:
        own = self._identity.member
        found = {one.index: one.address for one in self.members if one.index != own and one.address}
        listed = [Replica(index, Address.parse(address)) for index, address in found.items()]
        return [*listed, *(one for index, one in self._learners.items() if index not in found)]

    def _holds(self, of_leader: Callable[[PartitionLeader], bool]) -> bool:
        for appender in self.appenders.values():
            led = appender.led
            if led is None:
                return False
            with led.lock:
                if not of_leader(led.leader):
                    return False
        return True

    def _expire_late(self) -> None:
        timeout_ms = self._config.delivery_timeout_ms
        since_ms = self._clock.monotonic_ms() - timeout_ms
        for appender in self.own_appenders:
            late = f"not enough replicas had them within delivery_timeout_ms={timeout_ms}"
            appender.expire(since_ms, MayStillBeDelivered(late))
        for replicas in self.appenders.values():
            replicas.look()

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        with self._starting:
            if self._stop.is_set():
                return
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)


def _with_directory(index: int, directory_id: UUID, newest: Grant, epoch: int) -> Grant:
    return newest.with_directory(epoch, index, directory_id)
