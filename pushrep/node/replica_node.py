"""ReplicaNode: a server that follows the logs of many leaders, each in files of its own.

    with ReplicaNode(directory, NodeSettings(address=Address("127.0.0.1", 7400), allow=frozenset({"any"}))) as node:
        ...                     listens from here on; node.address tells the port

store.py keeps the logs, answers.py answers, connections.py owns sockets and threads, replay_*.py what is replayed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from pushrep.node.answers import Answers
from pushrep.node.connections import Connections
from pushrep.node.errors import CantListen
from pushrep.node.refusals import CountedAnswers, Refused
from pushrep.node.replay_recordings import Recordings
from pushrep.node.replay_server import ReplayServer
from pushrep.node.replica import Replica
from pushrep.node.settings import NodeSettings
from pushrep.node.store import NodeStore
from pushrep.push.sockets import Address
from pushrep.replay.counters import ReplayCounters
from pushrep.seams import REAL_FILESYSTEM, REAL_NETWORK, SYSTEM_CLOCK, Clock, Filesystem, Listener, Network


class ReplicaNode:
    """A running node. Raises NodeInUse, CantListen, CorruptNodeFile, OSError; `stop` when done, or use it in `with`."""

    def __init__(
        self,
        directory: Path | str,
        settings: NodeSettings | None = None,
        *,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
        network: Network = REAL_NETWORK,
    ) -> None:
        settings = settings or NodeSettings()
        listener = _listen(settings.address, network)
        try:
            self._store = NodeStore(Path(directory), settings, filesystem, clock)
        except BaseException:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        self.address = Address(host, port)
        """Where it listens."""
        self.directory = self._store.data
        """Where it keeps what it is sent."""
        self.replica_epoch = self._store.replica_epoch
        self._replays = ReplayServer(
            Recordings(self._store, str(self.address)),
            settings.replay,
            settings.replay_counters,
            network=network,
            clock=clock,
        )
        self._store.on_change = self._replays.changed
        self._answers = CountedAnswers(Answers(self._store, self.address).answer)
        answer = self._answers.answer
        self._connections = Connections(listener, settings, answer, self._replays.adopt, network=network, clock=clock)
        self._is_stopped = False
        self._connections.start()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def replicas(self) -> list[tuple[UUID, Replica]]:
        """The logs in use, each with its outbox's id."""
        return [(kept.outbox_id, replica) for kept in self._store.kept() for replica in kept.open_replicas()]

    def refusals(self) -> Mapping[Refused, int]:
        """How often each call was answered with each error since the node started."""
        return self._answers.read()

    def replays(self) -> ReplayCounters:
        """What its replays have done so far, as plain values to export."""
        return self._replays.counters()

    @contextmanager
    def let_go(self, outbox_id: UUID) -> Iterator[int]:
        """For a promotion: the outbox's logs are closed clean, and left alone until the end of the block.

        Its last contact with a leader, wall clock in ms; -1 for none since the node started. Raises CorruptNodeFile,
        OSError.
        """
        kept = self._store.outbox(outbox_id)
        last_contact_ms = kept.last_contact_ms
        with kept.let_go():
            yield last_contact_ms

    def stop(self) -> None:
        """Answer what is being carried out, refuse the rest, close the logs. A second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._replays.stop()
        self._connections.stop()
        self._store.close()

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
        raise CantListen(str(address), error.strerror or str(error)) from error
