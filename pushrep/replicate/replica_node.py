"""ReplicaNode: a server that follows the logs of many leaders, each in files of its own.

    with ReplicaNode(directory, NodeSettings(address=Address("127.0.0.1", 7400), allow=frozenset({"any"}))) as node:
        ...                     listens from here on; node.address has the port

node_store.py keeps the logs, node_calls.py answers, node_connections.py owns sockets and threads,
replay_*.py what is replayed.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from filtering.closing import close_all, closed_on_error
from pushrep.election.grants import Grant, hold_of
from pushrep.env import REAL_FILESYSTEM, REAL_NETWORK, SYSTEM_CLOCK, Clock, Filesystem, Listener, Network
from pushrep.errors import BadArgument, checked_path
from pushrep.log.directory_files import OUTBOX_FILE_NAME
from pushrep.log.inspection import is_log
from pushrep.replay.node_connection import NodeAccess
from pushrep.replicate.access import Access, Kept, audit
from pushrep.replicate.certificates import Reloading, mutual_tls
from pushrep.replicate.copying import RecordingCopies
from pushrep.replicate.node_calls import NodeCalls
from pushrep.replicate.node_connections import Connections
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.node_status import (
    CallRefusals,
    NodeStatus,
    OutboxLeader,
    StandbyStatus,
    UnauthorisedCalls,
    open_logs,
)
from pushrep.replicate.node_store import KeptOutbox, LastContact, NodeStore
from pushrep.replicate.replay_calls import ReplayCalls
from pushrep.replicate.replay_recordings import Recordings
from pushrep.replicate.replay_server import ReplayServer
from pushrep.replicate.replica import ReplicaLog
from pushrep.replicate.sockets import Address
from pushrep.wire.calls import ApiKey
from pushrep.wire.replay_messages import StopReplayRequest

_LOG = logging.getLogger("pushrep.node")
_STANDBY_MS = 5_000  # a standby that is silent for so long has ended, or leads


class ReplicaNode:
    """A running node. Raises NodeInUse, BadArgument, CorruptFile, OSError; `stop` when done, or use it in `with`."""

    def __init__(
        self,
        directory: Path | str,
        settings: NodeSettings | None = None,
        *,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
        network: Network = REAL_NETWORK,
    ) -> None:
        if not isinstance(settings, NodeSettings | None):
            raise BadArgument("settings", f"give a NodeSettings, not {settings!r:.60}")
        home = checked_path("directory", directory)
        for is_taken, what in (
            (filesystem.exists(home / OUTBOX_FILE_NAME), "the directory of an outbox"),
            (is_log(home, filesystem), "a single log"),
            (home.is_file(), "a file"),
        ):
            if is_taken:
                raise BadArgument("directory", f"{home} is {what}: give a node one of its own")
        settings = settings or NodeSettings()
        with closed_on_error(_listen(settings.address, network)) as listener:
            self.store = NodeStore(home, settings, filesystem, clock)
            """The outboxes and logs in the node's directory."""
        host, port = listener.getsockname()[:2]
        self.address = Address(host, port)
        """Where it listens."""
        self.directory = self.store.data
        """Its directory."""
        self.replica_epoch = self.store.replica_epoch
        self._settings = settings
        listed = lambda: [kept.outbox_id for kept in self.store.outboxes()]  # noqa: E731 - of now
        self.access = Access(settings.rules, self._kept, filesystem, clock, named=self.store.identities, listed=listed)
        recordings = Recordings(self.store, self.access)
        recordings.hold_deleted()
        self.replay_server = ReplayServer(
            recordings,
            settings.replay,
            settings.replay_counters,
            network=network,
            clock=clock,
        )
        """The replays of its logs that it serves."""
        self.replay_server.dispatch = ReplayCalls(self.replay_server).dispatch
        self.copies = RecordingCopies(recordings, self.replay_server.on_worker, self._access_others)
        """The recordings of other nodes that it copies."""
        self.store.on_change = self.replay_server.changed
        self.store.on_wanted = partial(self.replay_server.on_disk, recordings.finish_deletions)
        self.calls = NodeCalls(self.store, self.address, self.access, lambda: self.status().as_answer())
        self.connections = Connections(
            listener, settings, self.calls.answer, self.access, self.replay_server.adopt, network=network, clock=clock
        )
        self._clock = clock
        self._standbys: dict[UUID, tuple[StandbyStatus, int]] = {}  # the last reports, with their monotonic times
        self._is_stopped = False
        files = [*(settings.certificates or ()), *([] if settings.allow_file is None else [settings.allow_file])]
        self.reloading = Reloading(files, self.reload)
        """Reads its files again when they change, or `soon`."""
        if not settings.address.is_loopback and settings.certificates is None:
            _LOG.warning("%s is served without TLS: everybody who reaches it is 'anonymous'", self.address)
        self.connections.start()
        self.store.on_wanted()
        self.replay_server.on_disk(self.copies.resume)
        if files:
            self.reloading.start()

    def _access_others(self) -> NodeAccess:
        files = self._settings.certificates
        return NodeAccess(tls=None if files is None else mutual_tls(**files._asdict()))

    def reload(self) -> None:
        """Read certificates and allow list again. Connections go on; replays without a right are ended.

        Raises BadArgument; then nothing has changed.
        """
        tls = None if self._settings.certificates is None else self._settings.certificates.context()
        self.access.reload()
        self.connections.tls = tls
        self.replay_server.recheck()

    def certificate_expires_s(self) -> int | None:
        """When this node's certificate or its CA expires first, Unix time; None without files."""
        certificates = self._settings.certificates
        try:
            return None if certificates is None else certificates.expires_s()
        except BadArgument as error:
            _LOG.warning("%s", error)
            return None

    def _kept(self, outbox_id: UUID) -> Kept:
        kept = self.store.look_up(outbox_id)
        state = kept.election_state
        # Also of a log whose metadata are damaged: a rule for some topics would get at the others beside it.
        topics = {topic for topic, _, _ in kept.found()} | ({state.grant.topic} if state.grant is not None else set())
        return Kept(kept.directory, frozenset(topics), state.identities, is_led_here=state.is_led_here)

    def replicas(self) -> list[tuple[UUID, ReplicaLog]]:
        """The logs in use, each with its outbox's id."""
        return [(kept.outbox_id, replica) for kept in self.store.kept() for replica in kept.open_replicas()]

    def status(self) -> NodeStatus:
        """Its status and problems, as `pushrep status` shows them."""
        logs, outboxes = open_logs(self.replicas())
        expires_s = self.certificate_expires_s()
        now_ms, since_ms = self._clock.wall_ms(), self._clock.monotonic_ms() - _STANDBY_MS
        return NodeStatus(
            directory=str(self.directory),
            address=str(self.address),
            certificates={} if expires_s is None else {"node": expires_s},
            pid=os.getpid(),
            replica_epoch=self.replica_epoch,
            connections=len(self.connections),
            budget=self.connections.budget.status(),
            logs=logs,
            outboxes=outboxes,
            replays=self.replay_server.counters(),
            refusals=tuple(
                CallRefusals(call, code.name, count) for (call, code), count in self.calls.refusals().items()
            ),
            unauthorised=tuple(UnauthorisedCalls(*who, count) for who, count in self.access.refusals().items()),
            leaders=tuple(
                _leader_of(one, grant, now_ms, self.access.owner_of(one.outbox_id))
                for one in self.store.kept()
                if (grant := one.election_state.grant)
            ),
            standbys=tuple(report for report, at_ms in list(self._standbys.values()) if at_ms >= since_ms),
        )

    def stop_replay(self, session_id: int, by: str) -> bool:
        """End any client's session and notify its subscriber; whether it ran. by: for the audit log."""
        audit(by, StopReplayRequest(session_id=session_id), ApiKey.STOP_REPLAY)
        return self.replay_server.stop_session(session_id)

    def note_standby(self, outbox_id: UUID, state: str, why: str) -> None:
        """Note a standby's state, which it reports several times a second."""
        report = StandbyStatus(str(outbox_id) if outbox_id.int else "", state, why)
        self._standbys[outbox_id] = (report, self._clock.monotonic_ms())
        if outbox_id.int:  # a standby that waited for its outbox to be made; if it still waits, it reports again
            self._standbys.pop(UUID(int=0), None)

    @contextmanager
    def hand_over(self, outbox_id: UUID) -> Iterator[LastContact]:
        """For a promotion: close the outbox's logs clean and leave them alone until the end of the block.

        Yields the last contact with a leader, for `promote`. Raises CorruptFile, OSError.
        """
        contact = self.store.look_up(outbox_id).last_contact
        try:
            with self.store.outbox(outbox_id).hand_over():
                yield contact
        finally:
            self.access.forget(outbox_id)

    def stop(self) -> None:
        """Answer the running requests, refuse others, close the logs. A second call does nothing. Raises the first
        error, after all is closed.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        close_all(
            [
                self.reloading.stop,
                self.copies.close,
                self.replay_server.stop,
                self.connections.stop,
                self.store.close,
            ]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _listen(address: Address, network: Network) -> Listener:
    try:
        return network.listen(address)
    except OSError as error:
        raise BadArgument("address", f"can't listen on {address}: {error.strerror or error}") from error


def _leader_of(kept: KeptOutbox, grant: Grant, now_ms: int, owner: str) -> OutboxLeader:
    return OutboxLeader(
        outbox_id=str(kept.outbox_id),
        topic=grant.topic,
        leader=grant.leader,
        address=next((one.address for one in grant.members if one.index == grant.leader), ""),
        epoch=grant.epoch,
        is_here=kept.election_state.is_led_here,
        silent_ms=kept.contact_age_ms,
        hold=hold_of(grant, now_ms),
        owner=owner,
    )
