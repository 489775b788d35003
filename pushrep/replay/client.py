"""ReplayClient: replays of the logs in a directory, beside their writers, or of a node over the network.

with ReplayClient("out") as client:                                  # or ReplayClient("replica-1:7400")
    for record in client.replay(ReplayRequest("orders-0", position=AtTime(since_ms), length=TO_END)):
        ...

Comparing two copies of a log: the bytes of their batches, each read by its own reader.

here   | batch | batch | batch | ...          batches that lie whole in the stable range of both
there  | batch | batch | batch | ...          by the same offsets: equal, or the first that is not
"""

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from filtering.closing import ClosedAtExit
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.env.network import Address
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.log.published import read_published
from pushrep.replay.local import Counters, LocalReplays
from pushrep.replay.node_connection import NodeAccess, NodeUnreachable, accepted
from pushrep.replay.plan import LOG_BOUNDS, TO_END, RecordingInfo, ReplayRefused, ReplayRequest, ReplaySettings
from pushrep.replay.remote import Deletion, RemoteReplays
from pushrep.replay.replay import Replay, ReplayFailed
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode

if TYPE_CHECKING:
    from pushrep.replay.consumer import LogConsumer
    from pushrep.startpoints import StartpointStore


class ReplayClient(ClosedAtExit):
    """Replays of local logs, or of a node's. Thread-safe; a context manager, which ends its sessions.

    where: a directory of logs, or `host:port`. For a directory: `logs`: those that this process has open for writing,
    whose replays hold retention and see appended records at once; `counters`: other bounds of a replay, name to
    function; `settings`: of the sessions. For a node: `node`: how to connect. Methods that ask a node also raise
    NodeUnreachable.
    """

    def __init__(  # noqa: PLR0913 - all by name
        self,
        where: Path | str,
        *,
        logs: Iterable[SegmentLog] = (),
        counters: Counters | None = None,
        settings: ReplaySettings | None = None,
        node: NodeAccess | None = None,
        clock: Clock = SYSTEM_CLOCK,
        filesystem: Filesystem = REAL_FILESYSTEM,
    ) -> None:
        """Opens nothing yet. Raises BadArgument if `where` is neither, or for an option of the other kind."""
        self.where = str(where)
        self._replays: LocalReplays | RemoteReplays
        self._disk = filesystem if filesystem.exists(Path(where)) else None
        self._clock = clock
        if self._disk is not None:
            if Path(where).is_file():
                raise BadArgument("where", f"{where} is a file: give a directory of logs, or a node as host:port")
            if node is not None:
                raise BadArgument("node", f"{where} is a directory, and no node is spoken to")
            self._replays = LocalReplays(
                where, logs=logs, counters=counters, settings=settings, clock=clock, filesystem=filesystem
            )
            return
        try:
            address = Address.parse(self.where)
        except BadArgument as error:
            raise BadArgument("where", f"{where} is no directory of logs, and no address: {error.why}") from None
        if counters is not None or settings is not None or tuple(logs):
            raise BadArgument("where", f"{where} is a node: logs, counters and settings are its own to say")
        self._replays = RemoteReplays(address, node if node is not None else NodeAccess(), clock)

    def recordings(
        self, topic: str | None = None, *, from_id: int | None = None, limit: int | None = None
    ) -> list[RecordingInfo]:
        """Every log there, or those of `topic`, by topic and partition. Raises NotALog, ReplayRefused.

        A page of them: by id, from `from_id` on, `limit` at most; the next one begins at the last id + 1. A directory
        that was never a node's has no ids, and is listed whole.
        """
        found = self._replays.recordings(topic or "", from_id or 0, limit)
        if from_id is None and limit is None:
            return sorted(found, key=lambda one: (one.topic, one.partition, one.recording_id or 0))
        return found

    def tip_of(self, recording: int | str, bound: str = "stable") -> int:
        """The offset at which later records begin. Raises ReplayRefused (UNKNOWN_RECORDING), BadArgument."""
        if bound not in LOG_BOUNDS:
            raise BadArgument("bound", f"{bound!r} is none of {', '.join(LOG_BOUNDS)}")
        return self._replays.tip_of(recording, bound)

    def replay(self, request: ReplayRequest) -> Replay:
        """Start a replay and subscribe to it. Raises ReplayRefused."""
        try:
            return Replay(self._replays.replay(request))
        except ReplayRefused as refused:
            if refused.code is not ErrorCode.UNKNOWN_REPLAY:
                raise
        # This machine was stopped between start and attach, so that the session expired: start another.
        return Replay(self._replays.replay(request))

    def subscribe(
        self,
        topic: str,
        *,
        consumer: str,
        startpoints: "StartpointStore | None" = None,
        partitions: Iterable[int] | None = None,
        reset: bool = False,
    ) -> "LogConsumer":
        """A consumer of these partitions (None: all) that starts where its startpoints and checkpoints say.

        startpoints: the store of both; by default that of a directory of logs, `<directory>/startpoints`. The consumer
        (poll, commit, close) follows newer startpoints while it runs. reset: ignore checkpoints. Each partition needs
        one session, here or at the node. Raises ReplayRefused (UNKNOWN_RECORDING), BadArgument for a node without
        `startpoints`, and what the store raises.
        """
        from pushrep.replay.consumer import LogConsumer, replayed_logs  # noqa: PLC0415 - a replay alone loads none of it

        store = startpoints if startpoints is not None else self._own_startpoints()
        wanted = None if partitions is None else frozenset(partitions)
        logs = replayed_logs(self.recordings, self.replay, self._end_is_published, topic, wanted)
        return LogConsumer(logs, topic, consumer, store=store, reset=reset, clock=self._clock)

    def _end_is_published(self, name: str) -> bool:
        """Of a node always: it opened its logs."""
        log = Path(self.where, name)
        return self._disk is None or read_published(log.parent, log.name, self._disk) is not None

    def start_replay(self, request: ReplayRequest) -> int:
        """Start without a subscriber, for `attach` in `connect_timeout_ms`; the session's id. Raises ReplayRefused."""
        return self._replays.start_replay(request)

    def attach(self, session_id: int) -> Replay:
        """Become the only subscriber of a session. Raises ReplayRefused (UNKNOWN_REPLAY).

        At a node another client may have started it; then the replay does not reconnect if its connection breaks.
        """
        return Replay(self._replays.attach(session_id))

    def stop(self, session_id: int) -> None:
        """End a session; does nothing for unknown and ended ones."""
        self._replays.stop(session_id)

    def stop_all(self, recording: int | str) -> int:
        """End all sessions of a recording; how many it ended."""
        return self._replays.stop_all(recording)

    def extend(self, recording: int | str, leader_epoch: int) -> int:
        """Let a stopped recording of a node go on at its end, under a higher epoch; returns that end.

        This and the following raise ReplayRefused, and BadArgument for a directory: `pushrep log` keeps those.
        """
        node = self._node()
        asked = wire.ExtendRequest(recording_id=node.id_of(recording), leader_epoch=leader_epoch)
        return accepted(node.ask(asked, wire.ExtendResponse)).end_offset

    def truncate(self, recording: int | str, offset: int, *, keep: bool = False) -> int:
        """Cut a recording of a node at the batch that holds `offset`, ending replays above it; returns the new end.

        All above is erased, or with `keep` set aside beside the log, in `.cut` files for `pushrep log restore`.
        """
        node = self._node()
        asked = wire.TruncateRequest(recording_id=node.id_of(recording), offset=offset, keep=keep)
        return accepted(node.ask(asked, wire.TruncateResponse)).end_offset

    def purge(self, recording: int | str, before_offset: int) -> int:
        """Remove the whole segments below `before_offset`; returns the recording's new start."""
        node = self._node()
        asked = wire.PurgeRequest(recording_id=node.id_of(recording), before_offset=before_offset)
        return accepted(node.ask(asked, wire.PurgeResponse)).log_start_offset

    def delete(self, recording: int | str, *, force: bool = False, outbox_gone: bool = False) -> Deletion:
        """Mark a recording as deleted (force: although replays run); its files are removed in the background:
        `.wait()`.

        outbox_gone: also the copy of a member, whose outbox is no more and whose leader is not heard. If it comes back
        after all, this node counts as that member once it was given everything again.
        """
        return self._node().delete(recording, force=force, outbox_gone=outbox_gone)

    def close(self) -> None:
        """End every session; closing twice is fine."""
        self._replays.close()

    def _own_startpoints(self) -> "StartpointStore":
        """The store beside the logs. Raises BadArgument for a node, which has none."""
        if self._disk is None:
            why = "a node keeps none for its readers: give a store, as pushrep.startpoints.store_at opens it"
            raise BadArgument("startpoints", why)
        from pushrep.startpoints import STORE_NAME, StartpointStore  # noqa: PLC0415 - a replay alone needs none

        return StartpointStore.open(Path(self.where) / STORE_NAME, filesystem=self._disk, clock=self._clock)

    def _node(self) -> RemoteReplays:
        if isinstance(self._replays, LocalReplays):
            raise BadArgument("where", f"{self.where} is a directory: keep its logs with `pushrep log`")
        return self._replays


class Comparison(NamedTuple):
    """The result for offsets [start, end). differs_at: base offset of the first batch that differs."""

    start: int
    end: int
    batches: int
    size_bytes: int
    differs_at: int | None = None

    @property
    def is_same(self) -> bool:
        """Whether the compared ranges are the same."""
        return self.differs_at is None


def compare_copies(here: ReplayClient, there: ReplayClient, name: str) -> Comparison:
    """Compare the log `name` of a directory with the copy that a node, or another directory, has of it.

    The copy is known by the log's id. Raises ReplayRefused (UNKNOWN_RECORDING) where there is none, and as a replay.
    """
    ours = _found(here, name, None)
    theirs = _found(there, name, ours.log_id)
    start = max(ours.start_offset, theirs.start_offset)
    end = min(ours.stable_offset, theirs.stable_offset)
    if start >= end:
        return Comparison(start, max(start, end), 0, 0)
    request = ReplayRequest(name, start, TO_END)
    identity = theirs.recording_id if theirs.recording_id is not None else name
    batches = size = 0
    with here.replay(request) as mine, there.replay(ReplayRequest(identity, start, TO_END)) as other:
        for a, b in zip_longest(mine.batches(), other.batches()):
            if any(one is not None and one.batch.header.next_offset > end for one in (a, b)):
                break  # it crosses the common range
            if a is None or b is None or bytes(a.batch.data) != bytes(b.batch.data):
                at = min(one.batch.header.base_offset for one in (a, b) if one is not None)
                return Comparison(start, at, batches, size, max(at, start))
            batches, size = batches + 1, size + len(a.batch.data)
    return Comparison(start, end, batches, size)


def why_not_held(there: ReplayClient, name: str, log_id: UUID | None, start: int, end: int) -> str | None:
    """Read [start, end) of a copy of the log; why it does not have all of it, None if it has."""
    try:
        theirs = _found(there, name, log_id)
        if not theirs.start_offset <= start <= end <= theirs.stable_offset:
            return f"it gives [{theirs.start_offset}, {theirs.stable_offset})"
        identity = theirs.recording_id if theirs.recording_id is not None else name
        with there.replay(ReplayRequest(identity, start, TO_END)) as replay:
            for one in replay.batches():
                if one.batch.header.next_offset >= end:
                    return None
    except (ReplayRefused, ReplayFailed, NodeUnreachable) as error:
        return str(error)
    return None if start == end else "it ends early"


def _found(client: ReplayClient, name: str, log_id: UUID | None) -> RecordingInfo:
    for one in client.recordings():
        if one.name == name and log_id in {None, one.log_id}:
            return one
    raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"{client.where} has no copy of {name}")
