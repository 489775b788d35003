"""What a node keeps: outboxes, their promises, their logs. Everything is opened when it is first asked for.

    <data>/.lock                             one node per directory
          /replica-epoch.json                raised at each start      (election_state.py)
          /<outbox id>/promises.json         newest grant and epoch    (election_state.py)
          /<outbox id>/<topic>-<n>/          a log                     (replica.py)

A log that failed is closed, and opened again when it is described next: its leader comes back with backoff.

Grants decide whose a directory is. While the newest one names this member, its service opens it as an Outbox, and the
node only answers candidates (`at_home`), when the service is not running. With a grant for another it follows.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

from pushrep.election.follower import ReplicaSession
from pushrep.election.grants import Grant, OfferedGrant, are_rivals, judge_grant
from pushrep.env import SYSTEM_CLOCK, Clock, Filesystem, LockHeld
from pushrep.errors import PushrepError
from pushrep.log.directory import LogDirectory, create_logs
from pushrep.log.directory_files import CheckpointFile, list_logs, read_checkpoint, read_partition_metadata
from pushrep.log.directory_id import DirectoryId, new_directory_id, read_directory_id
from pushrep.log.disk_threads import disk_threads, release_disk_threads
from pushrep.log.errors import LogLocked
from pushrep.replicate.election_state import (
    NO_MEMBER,
    ElectionState,
    ElectionStateStore,
    raise_replica_epoch,
    read_election_state,
)
from pushrep.replicate.errors import CorruptNodeFile, NodeInUse
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica import DiskTrouble, ReplicaLog
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

_LOG = logging.getLogger("pushrep.node")
_LOCK_NAME = ".lock"
_PROPOSED_MAX = 1024  # of outboxes that were asked for and not granted yet
_Answer = TypeVar("_Answer")


class Refusal(PushrepError):
    """A log can't be had; `code` goes into the answer."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class LastContact(NamedTuple):
    """With a leader: wall clock in ms, -1 for none since the node started; how long ago by the monotonic clock, None
    where there is no leader.
    """

    wall_ms: int = -1
    age_ms: int | None = None


class LeaderContact(NamedTuple):
    """When a leader was in contact last, monotonic; is_over: it said that it leads no more."""

    leader_epoch: int
    at_ms: int
    is_over: bool


class KeptOutbox:
    """The logs of one outbox on this node. Thread-safe."""

    def __init__(self, outbox_id: UUID, store: "NodeStore") -> None:
        self.outbox_id, self.directory = outbox_id, store.data / str(outbox_id)
        self._store = store
        self._lock = threading.Lock()
        self._visiting = threading.RLock()
        self._aside_lock = threading.Lock()
        self._is_visited = False
        self._borrowers = 0
        self._filled: set[int] = set()  # the partitions of an unfilled member that have everything
        self._is_known = False  # whose directory it is
        self._is_unread = False  # its promises may have changed: a promotion that had the directory wrote them
        self._last_contact_ms = -1
        self._contact, self._contact_lock = LeaderContact(-1, store.started_ms, is_over=False), threading.Lock()
        self._replicas: dict[tuple[str, int], ReplicaLog] = {}
        self._removing: set[tuple[str, int]] = set()
        self._unopened: dict[TopicIdPartition, DiskTrouble] = {}
        self._state_store = ElectionStateStore(self.directory, outbox_id, store.filesystem)

    @property
    def directory_id(self) -> UUID | None:
        """Of its directory; the one that it will have, while nothing is kept yet; None where nobody asked whose it is.
        Raises OSError.
        """
        found = self._found_id()
        if found is not None:
            return found.directory_id
        return self._store.proposed_id(self.outbox_id) if self._store.settings.copy_check else None

    @property
    def is_unfilled(self) -> bool:
        """Whether it lacks what its member held and promised: its disk was lost, or it is a copy. Raises OSError."""
        found = self._found_id()
        return self.election_state.is_unfilled or (found is not None and found.is_copy)

    def _found_id(self) -> DirectoryId | None:
        return read_directory_id(self.directory, self._store.filesystem)[0]

    @property
    def election_state(self) -> ElectionState:
        """The newest grant and leader epoch, as they stand on disk."""
        return self._state_store.kept

    def look_again(self) -> None:
        """A directory that was put here while the node runs, or that its service may have written to since.

        Raises CorruptNodeFile, OSError.
        """
        if self._state_store.kept == ElectionState() or self.election_state.is_led_here:
            self._state_store.read_again()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """While a call about grants and logs is answered. Raises Refusal for a directory of another's."""
        self._check_not_handed_over()
        if not self.election_state.is_led_here:
            self.settle_directory()
            self._finish_setting_aside()
            yield
            return
        with self._visiting:
            self._check_not_handed_over()  # while we waited
            held = self._acquire()
            try:
                self._settle(held)
                self._state_store.read_again()
                self._is_visited = True
                self._finish_setting_aside()
                yield
            finally:
                self._is_visited = False
                if self.election_state.is_led_here:
                    self.close()  # its service may come at any time
                held.release()

    def _finish_setting_aside(self) -> None:
        """Before any answer or append: logs of an older generation than the grant's are no part of this member.

        Raises OSError, LogLocked: then nothing is.
        """
        with self._aside_lock:
            if not self.election_state.are_logs_outdated:
                return
            self.close()
            with self._lock:
                self._check_not_handed_over()
                held = self._acquired()
                try:
                    self._state_store.set_logs_aside(held)
                    held.forget_original()  # nothing of what that one promised holds in this generation
                finally:
                    held.release()
                self._filled.clear()
            with self._contact_lock:  # its epochs were another generation's
                self._contact = LeaderContact(-1, self._store.started_ms, is_over=False)

    @contextmanager
    def hand_over(self) -> Iterator[Path]:
        """The directory, its logs closed clean; until the end of the block the node does not touch it.

        What its promises are then decides who opens it next. While they can't be read nobody does.
        """
        with self._lock, self._state_store.lock:  # a grant that was let in before is on disk now, or is refused
            self._borrowers += 1
        try:
            with self._visiting:  # a call that is answered right now has the directory
                self.close()
            yield self.directory
        finally:
            with self._lock, self._state_store.lock:  # no grant is judged between the two by what was promised before
                self._borrowers -= 1
                self._is_unread = True
            with suppress(Refusal):  # it is logged; the next call tries again
                self._check_not_handed_over()

    def _check_not_handed_over(self) -> None:
        """Raise Refusal while the directory is another's, or what that one promised in it can't be read."""
        with self._state_store.lock:
            if self._borrowers:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} is handed over for now")
            if not self._is_unread:
                return
            try:
                self._state_store.read_again()
            except (OSError, PushrepError) as error:
                _LOG.error("%s: nothing of it is answered until its promises can be read: %s", self.directory, error)
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
            self._is_unread = False

    def _acquire(self) -> LogDirectory:
        try:
            held = self._acquired()
        except LogLocked as error:
            raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"its service has it: {error}") from error
        if held.references > 1:
            held.release()
            raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"a service in this process has {self.directory}")
        return held

    def settle_directory(self, *, create: bool = False) -> None:
        """Before the first answer that something is promised here: a copy is one of its own from now on, which lacks
        what its original promised since. Raises OSError, LogLocked.
        """
        with self._lock:
            exists = self._store.filesystem.exists(self.directory)
            self._is_known = self._is_known and exists
            if self._is_known or not (exists or create):
                return
            self._store.filesystem.make_directory(self.directory)
            held = self._acquired()
            try:
                self._settle(held)
                self._is_known = True
            finally:
                held.release()

    def _settle(self, held: LogDirectory) -> None:
        if held.is_unsettled_copy:
            _LOG.warning(
                "%s is a copy, so it counts as no member before the leader has filled it. If it was moved, whole, "
                "and the original is gone: pushrep replica moved %s",
                self.directory,
                self.directory,
            )
        held.settle_id(self._store.proposed_id(self.outbox_id))
        self._store.forget_proposal(self.outbox_id)

    def _acquired(self) -> LogDirectory:
        store = self._store
        return LogDirectory.acquire(self.directory, store.filesystem, store.clock, copy_check=store.settings.copy_check)

    @property
    def last_contact_ms(self) -> int:
        """When a leader last pushed to any log here, wall clock; -1 for never since the node started."""
        return max([self._last_contact_ms, *(replica.last_contact_ms for replica in list(self._replicas.values()))])

    @property
    def contact_age_ms(self) -> int | None:
        """How long ago the leader by the newest grant was in contact, by the monotonic clock; no longer than the node
        runs, which can't know more. None: there is none, it said that it leads no more, or it is this member.
        """
        state, contact = self.election_state, self._contact
        grant = state.grant
        if grant is None or state.is_led_here or (contact.is_over and contact.leader_epoch >= grant.epoch):
            return None
        since_ms = contact.at_ms if contact.leader_epoch >= grant.epoch else self._store.started_ms
        return self._store.clock.monotonic_ms() - since_ms

    def note_contact(self, leader_epoch: int, *, is_last: bool = False) -> None:
        """The leader of this epoch, which is not fenced here, is alive; `is_last`: it leads no more."""
        with self._contact_lock:
            before = self._contact
            if leader_epoch > before.leader_epoch or (leader_epoch == before.leader_epoch and not before.is_over):
                self._contact = LeaderContact(leader_epoch, self._store.clock.monotonic_ms(), is_last)

    def store_epoch(self, leader_epoch: int) -> None:
        """Nothing of an older leader from now on, durably. Raises OSError."""
        with self._state_store.lock:
            if leader_epoch > self.election_state.leader_epoch:
                self._state_store.keep(replace(self.election_state, leader_epoch=leader_epoch))

    def offer_grant(
        self, offered: Grant, sender: int, address: str, addressed_as: int = NO_MEMBER, *, is_first: bool = False
    ) -> ErrorCode:
        """Store it, on disk when this returns, if the rules let it; else why not. Raises OSError, Refusal.

        addressed_as: the member that the sender takes this node for, which it is from its first grant on, and another
        one once that was removed. NO_MEMBER: an older sender, so it is the member that the grant knows at `address`,
        where this node listens. is_first: nothing was ever acknowledged, so a member without a grant has lost nothing.
        """
        if self.election_state.grant is None:
            self.settle_directory(create=True)  # it may be named in the grant, so it has its id before that is kept
        with self._state_store.lock:
            self._check_not_handed_over()  # the one that it is handed to writes election state there
            kept = self.election_state
            is_live = kept.member in offered.indexes and not self._was_replaced(offered)
            if addressed_as not in {NO_MEMBER, kept.member} and is_live:
                raise Refusal(
                    ErrorCode.MEMBER_TWICE,
                    f"this node is member {kept.member} of outbox {self.outbox_id}, and it is addressed as member "
                    f"{addressed_as}, too: one disk would count twice",
                )
            outcome = judge_grant(OfferedGrant(offered, sender, kept.grant, kept.leader_epoch))
            if are_rivals(offered.generation, kept.generation) and offered != kept.rival:
                self._state_store.keep(replace(kept, rival=offered))
                _LOG.error("%s: %s was forced beside %s", self.directory, offered, kept.grant)
            is_renamed = addressed_as not in {NO_MEMBER, kept.member}  # it is no other live one, as was seen above
            is_news = offered != kept.grant or offered.carrying([kept.grant]).carried != kept.carried
            if outcome is ErrorCode.NONE and (is_news or is_renamed):
                found = offered.index_at(address) if addressed_as == NO_MEMBER else addressed_as
                member = kept.member if is_live else found
                member = kept.member if member == NO_MEMBER else member
                is_named = self.directory_id in {one.directory_id for one in offered.members} - {None}
                # Its epoch as well, as the leader keeps it: its first request would be one more write of this file.
                state = kept.with_grant(offered)
                is_unfilled = state.is_unfilled or (kept.grant is None and not is_first and not is_named)
                self._state_store.keep(replace(state, member=member, is_unfilled=is_unfilled))
                if is_named and member not in offered.entering:
                    self._forget_original()
        self._finish_setting_aside()
        return outcome

    def _was_replaced(self, offered: Grant) -> bool:
        """Whether another directory is what counts as this member, and nobody looks for it here any more."""
        member = self.election_state.member
        listed = next((one for one in (*offered.members, *offered.previous_members) if one.index == member), None)
        return listed is not None and not listed.address and not offered.is_member(member, self.directory_id)

    def _forget_original(self) -> None:
        found = self._found_id()
        if found is not None and found.is_copy:
            held = self._acquired()
            try:
                held.forget_original()
            finally:
                held.release()
            _LOG.info("%s has been given everything: it counts under its own id", self.directory)

    def note_filled(self, tp: TopicIdPartition) -> None:
        """Its leader gave `tp` everything; this member counts once that is so of all partitions. Raises OSError."""
        with self._state_store.lock:
            kept = self.election_state
            if not kept.is_unfilled or kept.grant is None:
                return
            self._filled.add(tp.partition)
            if self._filled >= set(range(kept.grant.partitions)):
                self._state_store.keep(replace(kept, is_unfilled=False))
                _LOG.info("%s has been given everything: it counts as member %d", self.directory, kept.member)

    def note_lost(self, log: str, end_offset: int) -> None:
        """See ElectionStateStore.note_lost."""
        self._state_store.note_lost(log, end_offset)

    def note_refilled(self, log: str) -> None:
        """`log` has again what it lost. Raises OSError."""
        with self._state_store.lock:
            kept = self.election_state
            unfilled = {name: end for name, end in kept.unfilled.items() if name != log}
            self._state_store.keep(replace(kept, unfilled=unfilled))

    def forget_unfenced(self, log: str) -> None:
        """What `log` held without a grant is cut off. Raises OSError."""
        with self._state_store.lock:
            kept = self.election_state
            unfenced = {name: mark for name, mark in kept.unfenced.items() if name != log}
            self._state_store.keep(replace(kept, unfenced=unfenced))

    def replica(self, tp: TopicIdPartition, *, create: bool = False) -> ReplicaLog:
        """The open log of `tp`; one that failed is tried again here. Raises Refusal."""
        with self._lock:
            self._check_not_handed_over()
            if self.election_state.are_logs_outdated:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"the logs in {self.directory} are not set aside yet")
            if self.election_state.is_led_here and not self._is_visited:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} belongs to its service")
            if (tp.topic, tp.partition) in self._removing:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{tp} is being removed: ask again")
            replica = self._replicas.get((tp.topic, tp.partition))
            if replica is not None and replica.failure is not None:
                replica.close()
                del self._replicas[tp.topic, tp.partition]
                replica = None
            if replica is None:
                replica = self._replicas[tp.topic, tp.partition] = self._open(tp, create=create)
        if replica.tp != tp:
            raise Refusal(ErrorCode.INCONSISTENT_TOPIC_ID, f"{tp} has topic id {replica.tp.topic_id} here")
        return replica

    def create_missing(self, tps: Sequence[TopicIdPartition]) -> None:
        """Make the logs of which nothing is here, at once. What can't be made is raised where each is opened."""
        with suppress(OSError, PushrepError):
            if not self.election_state.is_led_here:
                self.settle_directory(create=True)  # it has its id before there is a log in it
            with self._lock:
                self._check_not_handed_over()
                if not self.election_state.is_led_here and not self.election_state.are_logs_outdated:
                    self._create_missing(tps)

    def _create_missing(self, tps: Sequence[TopicIdPartition]) -> None:
        missing = {
            str(tp): tp.topic_id
            for tp in tps
            if (tp.topic, tp.partition) not in self._replicas.keys() | self._removing
            and not self._store.filesystem.exists(self.directory / str(tp))
        }
        if len(missing) < 2:
            return
        held = self._acquired()
        try:
            # One that was removed is made by its opening, which notes what it held.
            at = CheckpointFile.HIGH_WATERMARK
            new = {name: log_id for name, log_id in missing.items() if not held.checkpointed(at, name)}
            create_logs(held, new, has_replicas=True)
        finally:
            held.release()

    def open_replica(self, tp: TopicIdPartition) -> ReplicaLog | None:
        """The log of `tp` if it is in use."""
        replica = self._replicas.get((tp.topic, tp.partition))
        return replica if replica is not None and replica.tp == tp else None

    def begin_removal(self, tp: TopicIdPartition, may: Callable[[ReplicaSession], bool]) -> bool:
        """Give the log to nobody until `end_removal`; False, and nothing changed, if its session says otherwise.

        A leader that comes at this moment is either here before, and is found, or gets the answer to ask again.
        """
        with self._lock:
            replica = self._replicas.get((tp.topic, tp.partition))
            if replica is not None and replica.tp == tp and not replica.retire(may):
                return False
            self._removing.add((tp.topic, tp.partition))
            return True

    def end_removal(self, tp: TopicIdPartition) -> None:
        """Its files are gone, or stay: a log of that name may be opened."""
        with self._lock:
            self._removing.discard((tp.topic, tp.partition))

    def forget_removed(self) -> None:
        """Logs whose files are gone went on purpose: see LogDirectory.forget_removed. Raises OSError, LogLocked."""
        held = self._acquired()
        try:
            held.forget_removed()
        finally:
            held.release()

    def release(self, tp: TopicIdPartition) -> None:
        """Close the log and know it no more, before its files go."""
        with self._lock:
            replica = self._replicas.pop((tp.topic, tp.partition), None)
        if replica is not None:
            replica.close()

    def open_replicas(self) -> list[ReplicaLog]:
        """Every log that is in use."""
        with self._lock:
            return list(self._replicas.values())

    def refused(self, tps: Iterable[TopicIdPartition]) -> str:
        """Why the disk took nothing of one of these logs the last time; empty if it did."""
        for tp in tps:
            unopened, replica = self._unopened.get(tp), self._replicas.get((tp.topic, tp.partition))
            why = unopened.why if unopened is not None else replica.refused if replica is not None else None
            if why is not None:
                return why
        return ""

    def partitions(self) -> Iterator[TopicIdPartition]:
        """Every log that lies here, in use or not."""
        if not self._store.filesystem.exists(self.directory):
            return
        for topic, partition in list_logs(self.directory):
            topic_id = read_partition_metadata(self.directory / f"{topic}-{partition}", self._store.filesystem)
            if topic_id is not None:
                yield TopicIdPartition(topic_id, topic, partition)

    def close(self) -> None:
        """Close every log."""
        with self._lock:
            replicas, self._last_contact_ms = list(self._replicas.values()), self.last_contact_ms
            self._replicas.clear()
        for replica in replicas:
            replica.close()

    def _opened(self, tp: TopicIdPartition) -> ReplicaLog:
        store = self._store
        directory = self._acquired()
        try:
            return ReplicaLog(
                tp,
                self.directory,
                config=store.settings.log_config,
                replica_epoch=store.replica_epoch,
                flush=store.settings.flush,
                state=self,
                news=store.changed,
                filesystem=store.filesystem,
                clock=store.clock,
            )
        finally:
            directory.release()

    def _open(self, tp: TopicIdPartition, *, create: bool) -> ReplicaLog:
        try:
            found = read_partition_metadata(self.directory / str(tp), self._store.filesystem)
            refusal = _refusal(tp, found, create=create)
            if found is None and not create and (end := self._lost_of_removed(tp)):
                refusal = Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{tp} is gone: it held records up to offset {end}")
            if refusal is None:
                replica = self._opened(tp)
                self._unopened.pop(tp, None)
                return replica
        except (OSError, PushrepError) as error:
            store = self._store
            trouble = self._unopened.setdefault(tp, DiskTrouble(store.data, store.filesystem, store.clock))
            trouble.note(f"{tp} can't be opened", error)
            raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
        raise refusal

    def _lost_of_removed(self, tp: TopicIdPartition) -> int:
        """Up to where a log was acknowledged whose directory is gone; 0 if none is known. Raises OSError."""
        return read_checkpoint(self.directory, CheckpointFile.HIGH_WATERMARK, self._store.filesystem).get(str(tp), 0)


class _NotKept(KeptOutbox):
    """An outbox that was not kept a moment ago. It opens no log: another thread may have opened it by now."""

    def replica(self, tp: TopicIdPartition, *, create: bool = False) -> ReplicaLog:  # noqa: ARG002 - as the other
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"no log {tp} here")


def _refusal(tp: TopicIdPartition, found: UUID | None, *, create: bool) -> Refusal | None:
    """Why the log is not to be had. `found`: the topic id that lies there under its name."""
    if found is None:
        return None if create else Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"no log {tp} here")
    if found != tp.topic_id:
        return Refusal(ErrorCode.INCONSISTENT_TOPIC_ID, f"{tp} has topic id {found} here")
    return None


class NodeStore:
    """The directory of a node. Thread-safe. Raises NodeInUse, CorruptNodeFile, OSError."""

    def __init__(self, data: Path, settings: NodeSettings, filesystem: Filesystem, clock: Clock) -> None:
        self.data, self.settings, self.filesystem, self.clock = data, settings, filesystem, clock
        self.started_ms = clock.monotonic_ms()
        filesystem.make_directory(data)
        try:
            self._lock_file = filesystem.lock(data / _LOCK_NAME)
        except LockHeld as error:
            raise NodeInUse(data, error.pid) from error
        try:
            self.replica_epoch = raise_replica_epoch(data, filesystem, clock)
        except BaseException:
            self._lock_file.close()
            raise
        self.on_change: Callable[[TopicIdPartition], None] | None = None
        """Called when readers of a log may see something new, in any thread. It must not wait."""
        # A simulated clock gets no threads, so that a run can be repeated.
        self._threads = disk_threads(filesystem, data) if clock is SYSTEM_CLOCK else None
        self._lock = threading.Lock()
        self._proposed: dict[UUID, UUID] = {}
        self._outboxes: dict[UUID, KeptOutbox] = {}
        self._owners_of: dict[TopicIdPartition, tuple[KeptOutbox, ...]] = {}

    def changed(self, tp: TopicIdPartition) -> None:
        """Readers of this log may see something new."""
        if self.on_change is not None:
            self.on_change(tp)

    def carry_out(self, calls: Sequence[Callable[[], _Answer]], *, syncs: bool) -> list[_Answer]:
        """What each call answers. `syncs`: they wait for the disk, so they run beside each other."""
        if not syncs or self._threads is None:
            return [call() for call in calls]
        return self._threads.run_all(calls)

    def outbox(self, outbox_id: UUID) -> KeptOutbox:
        """What is kept of an outbox, perhaps nothing yet. Raises CorruptNodeFile, OSError."""
        with self._lock:
            kept = self._outboxes.get(outbox_id)
            if kept is None:
                kept = self._outboxes[outbox_id] = KeptOutbox(outbox_id, self)
            else:
                kept.look_again()
            return kept

    def proposed_id(self, outbox_id: UUID) -> UUID:
        """The id that the outbox's directory will have: a first grant names it before it is there."""
        while len(self._proposed) >= _PROPOSED_MAX:
            self._proposed.pop(next(iter(self._proposed)), None)
        return self._proposed.setdefault(outbox_id, new_directory_id())

    def forget_proposal(self, outbox_id: UUID) -> None:
        """Its directory is made: another one gets another id."""
        self._proposed.pop(outbox_id, None)

    def look_up(self, outbox_id: UUID) -> KeptOutbox:
        """The same for a question: an outbox that nothing is kept of is not remembered. Raises as `outbox`."""
        if outbox_id in self._outboxes or self.filesystem.exists(self.data / str(outbox_id)):
            return self.outbox(outbox_id)
        return _NotKept(outbox_id, self)

    def describe(self, kept: KeptOutbox, tp: TopicIdPartition, *, create: bool) -> ReplicaLog:
        """The log of `tp`, known from now on by its topic id alone, as AppendRecords names it. Raises Refusal."""
        replica = kept.replica(tp, create=create)
        with self._lock:
            owners = self._owners_of.get(tp, ())
            if owners[:1] != (kept,):
                self._owners_of[tp] = (kept, *(one for one in owners if one is not kept))
        return replica

    def identities(self) -> frozenset[str]:
        """Those that the newest grants of all that lies here name, as far as these can be read."""
        found = frozenset[str]()
        for name in self.filesystem.list(self.data):
            with suppress(ValueError, CorruptNodeFile, OSError):  # a file of the node's own; it says why elsewhere
                outbox_id = UUID(name)
                found |= read_election_state(self.data / name, outbox_id, self.filesystem).identities
        return found

    def outboxes(self) -> list[KeptOutbox]:
        """Everything that lies here."""
        found = []
        for name in self.filesystem.list(self.data):
            try:
                found.append(self.outbox(UUID(name)))
            except ValueError:
                continue  # a file of the node's own
        return found

    def kept(self) -> list[KeptOutbox]:
        """The outboxes that were asked for since the node started."""
        with self._lock:
            return list(self._outboxes.values())

    def owners_of(self, tp: TopicIdPartition) -> tuple[KeptOutbox, ...]:
        """The outboxes of a log that was described since the node started, the last one first: one, as long as nobody
        makes a log of another outbox's topic id.
        """
        return self._owners_of.get(tp, ())

    def close(self) -> None:
        """Close every log, release the directory."""
        for kept in list(self._outboxes.values()):
            kept.close()
        if self._threads is not None:
            release_disk_threads(self._threads)
        self._lock_file.close()
