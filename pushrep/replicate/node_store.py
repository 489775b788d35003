"""What a node stores: outboxes, their election state, their logs. Each is opened at its first use.

    <data>/.lock                             one node per directory
          /replica-epoch.json                raised at each start      (election_state.py)
          /<outbox id>/promises.json         newest grant and epoch    (election_state.py)
          /<outbox id>/<topic>-<n>/          a log                     (replica.py)

A log that failed is closed, and opened again when it is described next: its leader tries again with backoff.

Grants decide who opens a directory. While the newest one names this member, its service opens it as an Outbox, and the
node only answers candidates (`exclusive_open`) when the service does not run. With a grant for another member the node
follows.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

from filtering.closing import close_all
from pushrep.election.follower import ReplicaSession
from pushrep.election.grants import Grant, OfferedGrant, are_rivals, judge_grant
from pushrep.env import SYSTEM_CLOCK, Clock, Filesystem, LockHeld
from pushrep.errors import CorruptFile, PushrepError
from pushrep.log.directory import LogDirectory, create_logs
from pushrep.log.directory_files import LOCK_NAME, CheckpointFile, list_logs, read_checkpoint, read_partition_metadata
from pushrep.log.directory_id import DirectoryId, new_directory_id, read_directory_id
from pushrep.log.disk import disk_threads, release_disk_threads
from pushrep.log.errors import CorruptPartitionMetadata, LogLocked
from pushrep.replicate.election_state import (
    NO_MEMBER,
    ElectionState,
    ElectionStateStore,
    raise_replica_epoch,
    read_election_state,
)
from pushrep.replicate.errors import NodeInUse, Refusal
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica import DiskTrouble, ReplicaLog
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

_LOG = logging.getLogger("pushrep.node")
_PROPOSED_MAX = 1024  # of outboxes that were asked for and have no grant yet
_STANDBY_MS = 2_000  # it reports several times a second
_Answer = TypeVar("_Answer")


class LastContact(NamedTuple):
    """The last contact with a leader: wall clock in ms, -1 for none since the node started; age by the monotonic clock,
    None without a leader.
    """

    wall_ms: int = -1
    age_ms: int | None = None


class LeaderContact(NamedTuple):
    """When a leader was in contact last, monotonic; is_over: it said that it leads no more, and named its successor,
    -1: none.
    """

    leader_epoch: int
    at_ms: int
    is_over: bool
    successor: int = NO_MEMBER


class StandbyContact(NamedTuple):
    """A leader's last contact, for a standby. age_ms: how long ago; None: it leads no more. is_successor: it handed the
    lead over to this member.
    """

    age_ms: int | None
    is_successor: bool


class KeptOutbox:
    """The logs of one outbox on this node. Thread-safe."""

    def __init__(self, outbox_id: UUID, store: "NodeStore") -> None:
        self.outbox_id, self.directory = outbox_id, store.data / str(outbox_id)
        self._store = store
        self._lock = threading.Lock()
        self._exclusive_lock = threading.RLock()
        self._aside_lock = threading.Lock()
        self._is_exclusive = False
        self.handovers = 0
        """How many have the directory, or wait for it."""
        self._filled: set[int] = set()  # partitions of an unfilled member that are filled
        self._is_known = False  # whether the directory's id was settled
        self._is_unread = False  # a promotion that had the directory may have changed its election state
        self._contact, self._contact_lock = LeaderContact(-1, store.started_ms, is_over=False), threading.Lock()
        self._replicas: dict[tuple[str, int], ReplicaLog] = {}
        self._removing: set[tuple[str, int]] = set()
        self._standby_ms: int | None = None  # when a standby that could lead reported last
        self._unopened: dict[TopicIdPartition, DiskTrouble] = {}
        self.state_store = ElectionStateStore(self.directory, outbox_id, store.filesystem)

    @property
    def directory_id(self) -> UUID | None:
        """The directory's id, or the one that it will get; None if nobody asked for it yet. Raises OSError."""
        found = self._found_id()
        if found is not None:
            return found.directory_id
        return self._store.proposed_id(self.outbox_id) if self._store.settings.copy_check else None

    @property
    def is_unfilled(self) -> bool:
        """Whether it lacks records and promises of its member: its disk was lost, or it is a copy. Raises OSError."""
        found = self._found_id()
        return self.election_state.is_unfilled or (found is not None and found.is_copy)

    def _found_id(self) -> DirectoryId | None:
        return read_directory_id(self.directory, self._store.filesystem)[0]

    @property
    def election_state(self) -> ElectionState:
        """The newest grant and leader epoch, as on disk."""
        return self.state_store.kept

    def look_again(self) -> None:
        """Read again a directory that was put here while the node runs, or that its service may have written to.

        Raises CorruptFile, OSError.
        """
        if self.state_store.kept == ElectionState() or self.election_state.is_led_here:
            self.state_store.read_again()

    @contextmanager
    def exclusive_open(self) -> Iterator[None]:
        """The context in which a call about grants and logs is answered. Raises Refusal while another process has the
        directory.
        """
        self._check_not_handed_over()
        if not self.election_state.is_led_here:
            self.settle_directory()
            self._finish_setting_aside()
            yield
            return
        with self._exclusive_lock:
            self._check_not_handed_over()  # it may have been handed over while we waited
            with self._held_alone() as held:
                try:
                    self._settle(held)
                    self.state_store.read_again()
                    self._is_exclusive = True
                    self._finish_setting_aside()
                    yield
                finally:
                    self._is_exclusive = False
                    if self.election_state.is_led_here:
                        self.close()  # its service may open it at any time

    def _finish_setting_aside(self) -> None:
        """Before any answer or append: move logs of an older generation than the grant's aside.

        Raises OSError, LogLocked; then nothing may be answered.
        """
        with self._aside_lock:
            if not self.election_state.are_logs_outdated:
                return
            self.close()
            with self._lock:
                self._check_not_handed_over()
                with self._held() as held:
                    self.state_store.set_logs_aside(held)
                    held.forget_original()  # the original's promises do not hold in this generation
                self._filled.clear()
            with self._contact_lock:  # its epochs are of another generation
                self._contact = LeaderContact(-1, self._store.started_ms, is_over=False)

    @contextmanager
    def hand_over(self) -> Iterator[Path]:
        """Close the logs clean and leave the directory alone until the end of the block.

        Its election state then decides who opens it next. While that can't be read nobody does.
        """
        with self._lock, self.state_store.lock:  # grants accepted before are on disk now; others are refused
            self.handovers += 1
        try:
            with self._exclusive_lock:  # wait for the call that is being answered
                self.close()
            yield self.directory
        finally:
            with self._lock, self.state_store.lock:  # no grant is judged in between by the old state
                self.handovers -= 1
                self._is_unread = True
            with suppress(Refusal):  # it is logged; the next call tries again
                self._check_not_handed_over()

    def _check_not_handed_over(self) -> None:
        """Raise Refusal while another process has the directory, or its election state can't be read afterwards."""
        with self.state_store.lock:
            if self.handovers:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} is handed over for now")
            if not self._is_unread:
                return
            try:
                self.state_store.read_again()
            except (OSError, PushrepError) as error:
                _LOG.error("%s: nothing of it is answered until its promises can be read: %s", self.directory, error)
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
            self._is_unread = False

    @contextmanager
    def _held_alone(self) -> Iterator[LogDirectory]:
        """Raises Refusal while its service has the directory."""
        with ExitStack() as stack:
            try:
                held = stack.enter_context(self._held())
            except LogLocked as error:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"its service has it: {error}") from error
            if held.references > 1:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"a service in this process has {self.directory}")
            yield held

    def settle_directory(self, *, create: bool = False) -> None:
        """Called before the first promise: gives the directory an id; a copy gets one of its own and counts as
        unfilled, because it lacks its original's later promises. Raises OSError, LogLocked.
        """
        with self._lock:
            exists = self._store.filesystem.exists(self.directory)
            self._is_known = self._is_known and exists
            if self._is_known or not (exists or create):
                return
            self._store.filesystem.make_directory(self.directory)
            with self._held() as held:
                self._settle(held)
                self._is_known = True

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

    def _held(self) -> LogDirectory:
        store = self._store
        return LogDirectory.acquire(self.directory, store.filesystem, store.clock, copy_check=store.settings.copy_check)

    @property
    def last_contact(self) -> LastContact:
        """The last contact with a leader of any epoch, and the age of that with the present one."""
        clock, contact = self._store.clock, self._contact
        wall_ms = clock.wall_ms() - clock.monotonic_ms() + contact.at_ms if contact.leader_epoch >= 0 else -1
        return LastContact(wall_ms, self.contact_age_ms)

    @property
    def contact_age_ms(self) -> int | None:
        """How long ago the leader by the newest grant was in contact, by the monotonic clock, at most since the node's
        start. None: there is none, it has said that it leads no more, or it is this member.
        """
        state, contact = self.election_state, self._contact
        grant = state.grant
        if grant is None or state.is_led_here or (contact.is_over and contact.leader_epoch >= grant.epoch):
            return None
        since_ms = contact.at_ms if contact.leader_epoch >= grant.epoch else self._store.started_ms
        return self._store.clock.monotonic_ms() - since_ms

    @property
    def standby_contact(self) -> StandbyContact:
        """The last contact with the leader, for a standby. While a leader's successor takes over, the others wait."""
        age_ms, contact, state = self.contact_age_ms, self._contact, self.election_state
        if age_ms is not None or contact.successor == NO_MEMBER or state.is_led_here:
            return StandbyContact(age_ms, is_successor=False)
        if contact.successor == state.member:
            return StandbyContact(None, is_successor=True)
        return StandbyContact(self._store.clock.monotonic_ms() - contact.at_ms, is_successor=False)

    def note_contact(self, leader_epoch: int, *, is_last: bool = False, successor: int = NO_MEMBER) -> None:
        """The leader of this epoch, which is not fenced here, is alive. is_last: it leads no more."""
        with self._contact_lock:
            before = self._contact
            if leader_epoch > before.leader_epoch or (leader_epoch == before.leader_epoch and not before.is_over):
                self._contact = LeaderContact(leader_epoch, self._store.clock.monotonic_ms(), is_last, successor)

    def note_standby(self) -> None:
        """A service that could lead now stands by here."""
        self._standby_ms = self._store.clock.monotonic_ms()

    @property
    def stands_by(self) -> bool:
        """Whether one did a moment ago."""
        return self._standby_ms is not None and self._store.clock.monotonic_ms() - self._standby_ms < _STANDBY_MS

    def offer_grant(self, offered: Grant, sender: int, addressed_as: int, *, is_first: bool = False) -> ErrorCode:
        """Store the grant if the rules accept it, on disk when this returns; else returns why not. Raises OSError,
        Refusal.

        addressed_as: the member that the sender takes this node for. The node is that member from its first grant on,
        and another one once that was removed. is_first: nothing was ever acknowledged, so a member without a grant has
        lost nothing.
        """
        if self.election_state.grant is None:
            self.settle_directory(create=True)  # the grant may name it, so it needs its id before the grant is stored
        with self.state_store.lock:
            self._check_not_handed_over()  # whoever has the directory writes its election state
            kept = self.election_state
            is_live = kept.member in offered.indexes and not self._was_replaced(offered)
            if addressed_as != kept.member and is_live:
                raise Refusal(
                    ErrorCode.MEMBER_TWICE,
                    f"this node is member {kept.member} of outbox {self.outbox_id}, and it is addressed as member "
                    f"{addressed_as}, too: one disk would count twice",
                )
            outcome = judge_grant(OfferedGrant(offered, sender, kept.grant, kept.leader_epoch, self.is_unfilled))
            if are_rivals(offered.generation, kept.generation) and offered != kept.rival:
                self.state_store.keep(replace(kept, rival=offered))
                _LOG.error("%s: %s was forced beside %s", self.directory, offered, kept.grant)
            if outcome is ErrorCode.NONE and (offered != kept.grant or addressed_as != kept.member):
                # With its epoch, as the leader stores it: else its first request would write this file again.
                state = kept.with_grant(offered, self.directory_id, is_first=is_first)
                self.state_store.keep(replace(state, member=addressed_as))
                if offered.names(self.directory_id) and addressed_as not in offered.entering:
                    self._forget_original()
        self._finish_setting_aside()
        return outcome

    def _was_replaced(self, offered: Grant) -> bool:
        """Whether another directory counts as this member now."""
        member = self.election_state.member
        listed = next((one for one in (*offered.members, *offered.previous_members) if one.index == member), None)
        return listed is not None and not listed.address and not offered.is_member(member, self.directory_id)

    def _forget_original(self) -> None:
        found = self._found_id()
        if found is not None and found.is_copy:
            with self._held() as held:
                held.forget_original()
            _LOG.info("%s has been given everything: it counts under its own id", self.directory)

    def note_filled(self, tp: TopicIdPartition) -> None:
        """The leader has filled `tp`; once all partitions are filled, this member counts. Raises OSError."""
        with self.state_store.lock:
            kept = self.election_state
            if not kept.is_unfilled or kept.grant is None:
                return
            self._filled.add(tp.partition)
            if self._filled >= set(range(kept.grant.partitions)):
                self.state_store.keep(replace(kept, is_unfilled=False))
                _LOG.info("%s has been given everything: it counts as member %d", self.directory, kept.member)

    def count_no_more(self, tp: TopicIdPartition) -> None:
        """Records of `tp` are given up on purpose: this member counts again once it was given everything. Raises
        OSError.
        """
        with self.state_store.lock:
            self._filled.discard(tp.partition)
            self.state_store.keep(replace(self.election_state, is_unfilled=True))

    def replica(self, tp: TopicIdPartition, *, create: bool = False) -> ReplicaLog:
        """The open log of `tp`; one that failed is opened again. Raises Refusal."""
        with self._lock:
            self._check_not_handed_over()
            if self.election_state.are_logs_outdated:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"the logs in {self.directory} are not set aside yet")
            if self.election_state.is_led_here and not self._is_exclusive:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} belongs to its service")
            if (tp.topic, tp.partition) in self._removing:
                self._store.on_wanted()
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
        """Make the logs of which nothing is here, together. Errors are raised later, when each is opened."""
        with suppress(OSError, PushrepError):
            if self.election_state.is_led_here:
                return
            self.settle_directory(create=True)  # it gets its id before its first log
            with self._lock:
                self._check_not_handed_over()
                missing = {
                    str(tp): tp.topic_id
                    for tp in tps
                    if (tp.topic, tp.partition) not in self._replicas.keys() | self._removing
                    and not self._store.filesystem.exists(self.directory / str(tp))
                }
                if len(missing) < 2 or self.election_state.is_led_here or self.election_state.are_logs_outdated:
                    return
                with self._held() as held:
                    # A removed log is made when it is opened, which notes its lost records.
                    at = CheckpointFile.HIGH_WATERMARK
                    new = {name: log_id for name, log_id in missing.items() if not held.checkpointed(at, name)}
                    create_logs(held, new, has_replicas=True)

    def open_replica(self, tp: TopicIdPartition) -> ReplicaLog | None:
        """The log of `tp` if it is in use."""
        replica = self._replicas.get((tp.topic, tp.partition))
        return replica if replica is not None and replica.tp == tp else None

    def begin_removal(self, tp: TopicIdPartition, may: Callable[[ReplicaSession], bool]) -> bool:
        """Refuse the log to everybody until `end_removal`; False, and nothing changed, if a session forbids it.

        A leader that comes at this moment either comes first, and is found, or is told to ask again.
        """
        with self._lock:
            replica = self._replicas.get((tp.topic, tp.partition))
            if replica is not None and replica.tp == tp and not replica.retire(may):
                return False
            self._removing.add((tp.topic, tp.partition))
            return True

    def end_removal(self, tp: TopicIdPartition) -> None:
        """The removal is over: a log of that name may be opened again."""
        with self._lock:
            self._removing.discard((tp.topic, tp.partition))

    def forget_removed(self, tp: TopicIdPartition) -> None:
        """If the log is missing, it was removed on purpose, and is no loss. Raises OSError, LogLocked."""
        if self._store.filesystem.exists(self.directory):
            with self._held() as held:
                held.forget_missing(str(tp))

    def release(self, tp: TopicIdPartition) -> None:
        """Close and forget the log, before its files are removed. Raises Refusal while another process has it."""
        with self._lock:
            self._check_not_handed_over()
            replica = self._replicas.pop((tp.topic, tp.partition), None)
        if replica is not None:
            replica.close()

    def open_replicas(self) -> list[ReplicaLog]:
        """Every log that is in use."""
        with self._lock:
            return list(self._replicas.values())

    def is_unopened(self, tp: TopicIdPartition) -> bool:
        """Whether the log could not be opened when it was asked for last."""
        return tp in self._unopened

    def refused(self, tps: Iterable[TopicIdPartition]) -> str:
        """Why the disk refused the last write of one of these logs; empty if it did not."""
        for tp in tps:
            unopened, replica = self._unopened.get(tp), self._replicas.get((tp.topic, tp.partition))
            why = unopened.why if unopened is not None else replica.refused if replica is not None else None
            if why is not None:
                return why
        return ""

    def found(self) -> Iterator[tuple[str, int, UUID | CorruptPartitionMetadata]]:
        """(topic, partition, topic id) of every log here, in use or not; in place of the id why it can't be read."""
        if not self._store.filesystem.exists(self.directory):
            return
        for topic, partition in list_logs(self.directory, self._store.filesystem):
            try:
                topic_id = read_partition_metadata(self.directory / f"{topic}-{partition}", self._store.filesystem)
            except CorruptPartitionMetadata as error:
                yield topic, partition, error
                continue
            if topic_id is not None:
                yield topic, partition, topic_id

    def partitions(self) -> Iterator[TopicIdPartition]:
        """Every log here, in use or not. Raises CorruptPartitionMetadata."""
        for topic, partition, topic_id in self.found():
            if isinstance(topic_id, CorruptPartitionMetadata):
                raise topic_id
            yield TopicIdPartition(topic_id, topic, partition)

    def close(self) -> None:
        """Close every log. Raises the first error, after all are closed."""
        with self._lock:
            replicas = list(self._replicas.values())
            self._replicas.clear()
        close_all(replica.close for replica in replicas)

    def _open(self, tp: TopicIdPartition, *, create: bool) -> ReplicaLog:
        try:
            replica = self._opened(tp, create=create)
        except Refusal:
            raise
        except (OSError, PushrepError) as error:
            store = self._store
            new = DiskTrouble(store.data, store.filesystem, store.clock)
            self._unopened.setdefault(tp, new).note(f"{tp} can't be opened", error)
            raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
        self._unopened.pop(tp, None)
        return replica

    def _opened(self, tp: TopicIdPartition, *, create: bool) -> ReplicaLog:
        store = self._store
        found = read_partition_metadata(self.directory / str(tp), store.filesystem)
        if found is None and not create:
            ends = read_checkpoint(self.directory, CheckpointFile.HIGH_WATERMARK, store.filesystem)
            if end := ends.get(str(tp), 0):
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"{tp} is gone: it held records up to offset {end}")
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"no log {tp} here")
        if found not in {None, tp.topic_id}:
            raise Refusal(ErrorCode.INCONSISTENT_TOPIC_ID, f"{tp} has topic id {found} here")
        with self._held():
            return ReplicaLog(
                tp,
                self.directory,
                config=store.settings.log_config,
                replica_epoch=store.replica_epoch,
                flush=store.settings.flush,
                state_store=self.state_store,
                note_filled=self.note_filled,
                note_contact=self.note_contact,
                news=store.changed,
                filesystem=store.filesystem,
                clock=store.clock,
            )


class _NotKept(KeptOutbox):
    """An outbox that was not here a moment ago. It opens no log, because another thread may have opened it by now."""

    def replica(self, tp: TopicIdPartition, *, create: bool = False) -> ReplicaLog:  # noqa: ARG002 - as the other
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"no log {tp} here")


class NodeStore:
    """The directory of a node. Thread-safe. Raises NodeInUse, CorruptFile, OSError."""

    def __init__(self, data: Path, settings: NodeSettings, filesystem: Filesystem, clock: Clock) -> None:
        self.data, self.settings, self.filesystem, self.clock = data, settings, filesystem, clock
        self.started_ms = clock.monotonic_ms()
        filesystem.make_directory(data)
        with ExitStack() as undone:
            undone.callback(filesystem.hold(data))
            try:
                undone.callback(filesystem.lock(data / LOCK_NAME).close)
            except LockHeld as error:
                raise NodeInUse(data, error.pid) from error
            self.replica_epoch = raise_replica_epoch(data, filesystem, clock)
            self._release = undone.pop_all().close
        self.on_change: Callable[[TopicIdPartition], None] = lambda _tp: None
        """Called in any thread when readers of a log may see something new. It must not wait."""
        self.on_wanted: Callable[[], None] = lambda: None
        """Called when somebody asks for a log that is being removed. It must not wait."""
        # A simulated clock gets no threads, so that a run is repeatable.
        self._threads = disk_threads(filesystem, data) if clock is SYSTEM_CLOCK else None
        self._lock = threading.Lock()
        self._proposed: dict[UUID, UUID] = {}
        self._outboxes: dict[UUID, KeptOutbox] = {}
        self._owners_of: dict[TopicIdPartition, tuple[KeptOutbox, ...]] = {}

    def changed(self, tp: TopicIdPartition) -> None:
        """Readers of this log may see something new."""
        self.on_change(tp)

    def carry_out(self, calls: Sequence[Callable[[], _Answer]], *, syncs: bool) -> list[_Answer]:
        """The results of the calls. syncs: they wait for the disk, so they run concurrently."""
        if not syncs or self._threads is None:
            return [call() for call in calls]
        return self._threads.run_all(calls)

    def outbox(self, outbox_id: UUID) -> KeptOutbox:
        """The outbox as it is stored here, perhaps nothing yet. Raises CorruptFile, OSError."""
        with self._lock:
            kept = self._outboxes.get(outbox_id)
            if kept is None:
                kept = self._outboxes[outbox_id] = KeptOutbox(outbox_id, self)
            else:
                kept.look_again()
            return kept

    def proposed_id(self, outbox_id: UUID) -> UUID:
        """The id that the outbox's directory will get: a first grant names it before the directory is made."""
        while len(self._proposed) >= _PROPOSED_MAX:
            self._proposed.pop(next(iter(self._proposed)), None)
        return self._proposed.setdefault(outbox_id, new_directory_id())

    def forget_proposal(self, outbox_id: UUID) -> None:
        """The directory was made: a later one gets another id."""
        self._proposed.pop(outbox_id, None)

    def look_up(self, outbox_id: UUID) -> KeptOutbox:
        """The same for a query: an outbox that is not stored here is not remembered. Raises as `outbox`."""
        if outbox_id in self._outboxes or self.filesystem.exists(self.data / str(outbox_id)):
            return self.outbox(outbox_id)
        return _NotKept(outbox_id, self)

    def describe(self, kept: KeptOutbox, tp: TopicIdPartition, *, create: bool) -> ReplicaLog:
        """The log of `tp`, which AppendRecords may name by its topic id alone from now on. Raises Refusal."""
        replica = kept.replica(tp, create=create)
        with self._lock:
            owners = self._owners_of.get(tp, ())
            if owners[:1] != (kept,):
                self._owners_of[tp] = (kept, *(one for one in owners if one is not kept))
        return replica

    def identities(self) -> frozenset[str]:
        """The identities in the newest grants of all outboxes here, as far as these can be read."""
        found = frozenset[str]()
        for name in self.filesystem.list(self.data):
            with suppress(ValueError, CorruptFile, OSError):  # one of the node's own files, or logged elsewhere
                found |= read_election_state(self.data / name, UUID(name), self.filesystem).identities
        return found

    def outboxes(self) -> list[KeptOutbox]:
        """All outboxes here."""
        found = []
        for name in self.filesystem.list(self.data):
            try:
                found.append(self.outbox(UUID(name)))
            except ValueError:
                continue  # one of the node's own files
        return found

    def kept(self) -> list[KeptOutbox]:
        """The outboxes that were asked for since the node started."""
        with self._lock:
            return list(self._outboxes.values())

    def owners_of(self, tp: TopicIdPartition) -> tuple[KeptOutbox, ...]:
        """The outboxes of a log that was described since the node started, the last one first: one, unless logs of two
        outboxes have the same topic id.
        """
        return self._owners_of.get(tp, ())

    def close(self) -> None:
        """Close every log, release the directory. Raises the first error, after all is closed."""
        threads = [] if self._threads is None else [partial(release_disk_threads, self._threads)]
        close_all([*(kept.close for kept in list(self._outboxes.values())), *threads, self._release])
