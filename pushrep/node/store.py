"""What a node keeps: outboxes, their promises, their logs. Everything is opened when it is first asked for.

    <data>/.lock                             one node per directory
          /replica-epoch.json                raised at each start      (promises.py)
          /<outbox id>/promises.json         newest grant and epoch    (promises.py)
          /<outbox id>/<topic>-<n>/          a log                     (replica.py)

A log that failed is closed, and opened again when it is described next: its leader comes back with backoff.
"""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from pushrep.errors import PushrepError
from pushrep.log.log_names import list_logs
from pushrep.log.partition_metadata import read_partition_metadata
from pushrep.node.errors import NodeInUse
from pushrep.node.promises import Promises, raise_replica_epoch, read_promises, write_promises
from pushrep.node.replica import Replica
from pushrep.node.settings import NodeSettings
from pushrep.protocol.error_codes import ErrorCode
from pushrep.replication.grants import Grant, OfferedGrant, judge_grant
from pushrep.replication.outcome import Outcome
from pushrep.seams import Clock, Filesystem, LockHeld
from pushrep.topic_id_partition import TopicIdPartition

_LOG = logging.getLogger("pushrep.node")
_LOCK_NAME = ".lock"


class Refusal(PushrepError):
    """A log can't be had; `code` goes into the answer."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class KeptOutbox:
    """The logs of one outbox on this node. Thread-safe."""

    def __init__(self, outbox_id: UUID, store: "NodeStore") -> None:
        self.outbox_id, self.directory = outbox_id, store.data / str(outbox_id)
        self._store = store
        self._lock = threading.Lock()
        self._replicas: dict[tuple[str, int], Replica] = {}
        self._promises = read_promises(self.directory, outbox_id, store.filesystem)

    @property
    def promises(self) -> Promises:
        """The newest grant and leader epoch, as they stand on disk."""
        return self._promises

    @property
    def last_contact_ms(self) -> int:
        """When a leader last pushed to any log here, wall clock; -1 for never since the node started."""
        return max((replica.last_contact_ms for replica in list(self._replicas.values())), default=-1)

    def take_epoch(self, leader_epoch: int) -> None:
        """Nothing of an older leader from now on, durably. Raises OSError."""
        with self._lock:
            if leader_epoch > self._promises.leader_epoch:
                self._keep(self._promises._replace(leader_epoch=leader_epoch))

    def offer_grant(self, offered: Grant, sender: int) -> Outcome:
        """Store it, on disk when this returns, if the rules let it; else why not. Raises OSError."""
        with self._lock:
            kept = self._promises
            outcome = judge_grant(OfferedGrant(offered, sender, kept.grant, kept.leader_epoch))
            if outcome is Outcome.NONE and offered != kept.grant:
                self._keep(kept._replace(grant=offered))
            return outcome

    def replica(self, tp: TopicIdPartition, *, create: bool = False) -> Replica:
        """The open log of `tp`; one that failed is tried again here. Raises Refusal."""
        with self._lock:
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

    def open_replica(self, tp: TopicIdPartition) -> Replica | None:
        """The log of `tp` if it is in use."""
        replica = self._replicas.get((tp.topic, tp.partition))
        return replica if replica is not None and replica.tp == tp else None

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
            replicas = list(self._replicas.values())
            self._replicas.clear()
        for replica in replicas:
            replica.close()

    def _open(self, tp: TopicIdPartition, *, create: bool) -> Replica:
        store = self._store
        try:
            found = read_partition_metadata(self.directory / str(tp), store.filesystem)
            refusal = _refusal(tp, found, create=create)
            if refusal is None:
                return Replica(
                    tp,
                    self.directory,
                    config=store.settings.log_config,
                    replica_epoch=store.replica_epoch,
                    flush=store.settings.flush,
                    promises=lambda: self._promises,
                    take_epoch=self.take_epoch,
                    filesystem=store.filesystem,
                    clock=store.clock,
                )
        except (OSError, PushrepError) as error:
            _LOG.error("%s can't be opened: %s", tp, error)
            raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
        raise refusal

    def _keep(self, promises: Promises) -> None:
        self._store.filesystem.make_directory(self.directory)
        write_promises(self.directory, self.outbox_id, promises, self._store.filesystem)
        self._promises = promises


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
        filesystem.make_directory(data)
        try:
            self._lock_file = filesystem.lock(data / _LOCK_NAME)
        except LockHeld as error:
            raise NodeInUse(data, error.pid) from error
        try:
            self.replica_epoch = raise_replica_epoch(data, filesystem)
        except BaseException:
            self._lock_file.close()
            raise
        self._lock = threading.Lock()
        self._outboxes: dict[UUID, KeptOutbox] = {}
        self._owner_of: dict[TopicIdPartition, KeptOutbox] = {}

    def outbox(self, outbox_id: UUID) -> KeptOutbox:
        """What is kept of an outbox, perhaps nothing yet. Raises CorruptNodeFile, OSError."""
        with self._lock:
            kept = self._outboxes.get(outbox_id)
            if kept is None:
                kept = self._outboxes[outbox_id] = KeptOutbox(outbox_id, self)
            return kept

    def describe(self, kept: KeptOutbox, tp: TopicIdPartition, *, create: bool) -> Replica:
        """The log of `tp`, known from now on by its topic id alone, as AppendRecords names it. Raises Refusal."""
        replica = kept.replica(tp, create=create)
        self._owner_of[tp] = kept
        return replica

    def described(self, tp: TopicIdPartition) -> Replica | None:
        """The log of `tp` if it was described since the node started; else its leader has to begin a session anew."""
        kept = self._owner_of.get(tp)
        return kept.open_replica(tp) if kept is not None else None

    def outboxes(self) -> list[KeptOutbox]:
        """Everything that lies here."""
        found = []
        for name in self.filesystem.list(self.data):
            try:
                found.append(self.outbox(UUID(name)))
            except ValueError:
                continue  # a file of the node's own
        return found

    def owner_of(self, tp: TopicIdPartition) -> KeptOutbox | None:
        """The outbox of a described log."""
        return self._owner_of.get(tp)

    def close(self) -> None:
        """Close every log, let go of the directory."""
        for kept in list(self._outboxes.values()):
            kept.close()
        self._lock_file.close()
