"""ServedSession: a ReplaySession over a log of this node, for a subscriber at the other end of a ReplayConnection.

    turn ─▶ ReadBlock ─▶ headers ─▶ BlockRead ─▶ SendBlock ─▶ ReplayData: a header and slices of files ─▶ Sent

ReplayConnection: never waits, and sends slices of files without reading them into memory.

    send(parts, sent) ─▶ | frame | frame | ... ─▶ flush ─▶ socket        how a slice is sent: sockets.py
                                                     └ sent(), once all of a frame has left

A block in flight costs only its header and slices in memory, however slow the subscriber is.
"""

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple, Protocol

from pushrep.env import READABLE, WRITABLE
from pushrep.log import Lease, LeaseBroken
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.plan import LogSnapshot
from pushrep.replay.session import ReplaySession
from pushrep.replay.slices import BatchNotFound, FoundBatch, OpenSegment, OpenSegments, SliceReader
from pushrep.replay.source import READ_ERRORS
from pushrep.replicate.replay_recordings import NodeSource
from pushrep.replicate.sockets import AnySocket, Piece, pieces_of, send_some
from pushrep.wire import replay_messages as wire
from pushrep.wire.connection import Call, ClientEvent, ServerConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason
from pushrep.wire.values import Part, Struct

_LOOKS_MAX = 50
"""How often a missing batch is looked for, a few ms apart, because a cut takes a moment."""
_LOOK_AGAIN_MS, _SETTLED_MS = 10, 2_000


_FRAMES_MAX = 256
"""How many unsent answers a connection may have; with more, nothing is read from it."""
_READS_MAX = 16


class AcceptedConnection(NamedTuple):
    """A connection with replay calls. calls: those already read. sender: its identity.

    closed: to be called when it is closed.
    """

    socket: AnySocket
    protocol: ServerConnection
    calls: Sequence[Call | ClientEvent]
    name: str
    sender: str
    closed: Callable[[], None]


class ReplayConnection:
    """The server's end of a connection. For one thread. Everything raises OSError once the peer has disconnected."""

    def __init__(self, handed: AcceptedConnection) -> None:
        self.name, self.sender, self.protocol = handed.name, handed.sender, handed.protocol
        self.closed = handed.closed
        self.socket = handed.socket
        self.socket.setblocking(False)
        self.is_open = True
        self.mask = READABLE
        """What the poller was asked for last."""
        self._frames: deque[tuple[list[Piece], Callable[[], object] | None]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._frames

    @property
    def wanted_mask(self) -> int:
        """What the poller should wait for."""
        mask = READABLE if len(self._frames) < _FRAMES_MAX else 0
        return mask | WRITABLE if self._frames else mask

    def receive(self) -> list[Call | ClientEvent]:
        """The received calls. Raises ProtocolError; ConnectionError at the end of the stream."""
        calls: list[Call | ClientEvent] = []
        for reads in count(1):
            try:
                size = self.socket.recv_into(self.protocol.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if size == 0 and not calls:
                raise ConnectionError("the peer hung up")
            calls += self.protocol.buffer_updated(size)
            # The poller does not see the bytes that TLS has decrypted already.
            is_rest = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()
            if size == 0 or (not is_rest and (calls or reads >= _READS_MAX)):  # the next call meets the end again
                break
        return calls

    def send(self, parts: Sequence[Part], sent: Callable[[], object] | None = None) -> None:
        """Queue a frame; `flush` calls `sent` once it was sent."""
        self._frames.append((pieces_of(parts), sent))

    def flush(self) -> None:
        """Send as much as the network takes now."""
        while self._frames:
            pieces, sent = self._frames[0]
            while pieces:
                try:
                    send_some(self.socket, pieces)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return
            self._frames.popleft()
            if sent is not None:
                sent()

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._frames.clear()
        self.closed()


class Server(Protocol):
    """What a session needs of its server; all in the server's thread, except `post`."""

    def now_ms(self) -> int: ...
    def handle(self, session: ReplaySession, event: e.Event) -> list[e.Effect]: ...
    def counter(self, bound: str) -> int | None: ...
    def ready(self, served: "ServedSession") -> None:
        """It wants a turn."""
        ...

    def forget(self, served: "ServedSession") -> None:
        """It is DONE."""
        ...

    def flush(self, connection: ReplayConnection) -> None:
        """Send the connection's queued frames."""
        ...

    def post(self, job: Callable[[], None]) -> None:
        """Do it in the server's thread, soon. From any thread."""
        ...

    def on_disk(self, job: Callable[[], None]) -> None:
        """Do it in the worker's thread."""
        ...


class ServedSession:
    """One session. For the server's thread, but for `open`, which the worker does."""

    def __init__(
        self, session: ReplaySession, source: NodeSource, files: OpenSegments, server: Server, identity: str
    ) -> None:
        """identity: that started it; only this one may attach."""
        self.session, self.source, self.identity = session, source, identity
        entry = source.recording.entry
        self.tp, self.outbox_id = entry.tp, entry.outbox_id
        self.connection: ReplayConnection | None = None
        self.not_before_ms = 0
        """A turn before that would do nothing."""
        self._server, self._slices = server, SliceReader(source.path, source.filesystem, files)
        self._slices.forget()  # without readers the log may have been cut, or deleted and made anew
        self._call: Call | None = None
        self._lease: Lease | None = None
        self._found: list[FoundBatch] = []
        self._held: list[OpenSegment] = []
        self._looks = 0
        self._is_cut = False
        self._marker = source.marker()
        self._before: int | None = None
        """Leader epoch of the record before the position."""
        self._facts: LogSnapshot | None = None

    @property
    def next_turn_ms(self) -> int:
        """See ReplaySession; a look for a missing batch comes first."""
        return self.not_before_ms if self._looks or self._is_cut else self.session.next_turn_ms

    # ---- opening: the worker's thread

    def open(self) -> e.Event:
        """Take the lease and read the batch at the position; returns the session's event."""
        opened = self.source.begin(self.session.position, self._take_lease)
        if isinstance(opened, e.SegmentOpened):
            self._before = opened.epoch_before
        return opened

    def _take_lease(self) -> None:
        post, gone = self._server.post, self._lease_gone
        self._lease = self.source.lease(self.session.position, lambda reason: post(lambda: gone(reason)))

    # ---- the server's thread

    def attach(self, connection: ReplayConnection, call: Call, credit_bytes: int) -> None:
        """Its subscriber has attached."""
        self.connection, self._call = connection, call
        self.handle(e.SubscriberAttached(credit_bytes))

    def handle(self, event: e.Event) -> list[e.Effect]:
        """Give the session an event and carry out the effects; returns them."""
        if isinstance(event, e.Truncated):
            self._slices.forget()
        effects = self._server.handle(self.session, event)
        self.carry_out(effects)
        if event.kind in _WAKING and self.session.state is ReplayState.REPLAY:
            self._server.ready(self)
        return effects

    def never_opened(self) -> None:
        """The session ended before `open` did: release the lease and files."""
        if self._lease is not None:
            self._lease.release()
        self.source.close()

    def node_stops(self) -> None:
        """End it because the node stops; its subscriber may reconnect later."""
        end = e.SendEnd(ReplayEndReason.STOPPED, self.session.position, ErrorCode.NODE_STOPPING, "the node stops")
        if self.session.state is ReplayState.REPLAY:
            self._send(self._end_to_wire(end))
        self.handle(e.SubscriberGone())

    def turn(self) -> None:
        """Take a turn: one block at most."""
        if self.session.state is ReplayState.REPLAY and self._server.now_ms() < self.not_before_ms:
            return
        try:
            self._facts = self.source.facts(with_liveness=self.session.wants_liveness)
            if self._was_cut(self._facts):
                return
        except READ_ERRORS as error:
            self.handle(self._failure(error))
            return
        counter = self._server.counter(self.session.plan.bound)
        self.carry_out(self._server.handle(self.session, e.Turn(self._facts, counter)))

    def carry_out(self, effects: list[e.Effect]) -> None:
        """Do what the session wants done."""
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: e.Effect) -> None:
        match effect:
            case e.ReadBlock():
                self._read(effect)
            case e.SendBlock():
                self._send_block(effect)
            case e.Heartbeat():
                self._beat(effect)
            case e.RenewLease():
                self._renew(effect.offset)
            case e.ReleaseLease():
                if self._lease is not None:
                    self._lease.release()
            case e.SendEnd():
                self._send(self._end_to_wire(effect), lambda: self.handle(e.EndSent()))
            case e.Forget():
                self._release()
                self._server.forget(self)
            case _:
                pass  # Started and Refuse: answered where the session was asked for

    def _read(self, wanted: e.ReadBlock) -> None:
        assert self._facts is not None, "a turn has looked"
        try:
            found = self._slices.read(
                wanted.position,
                wanted.limit,
                wanted.max_bytes,
                written=self._facts.written,
            )
        except BatchNotFound as error:
            self._look_again(error)
            return
        except READ_ERRORS as error:
            self.handle(self._failure(error))
            return
        self._found, self._looks = found, 0
        self.handle(e.BlockRead(tuple([one.span for one in found])))

    def _look_again(self, error: BatchNotFound) -> None:
        self._slices.forget()
        self._looks += 1
        if self._looks > _LOOKS_MAX:
            self.handle(e.ReadFailed(ErrorCode.CORRUPT_MESSAGE, str(error), error.segment))
            return
        self.not_before_ms = self._server.now_ms() + _LOOK_AGAIN_MS
        self.handle(e.BlockRead(()))

    def _send_block(self, block: e.SendBlock) -> None:
        going = self._found[: block.spans]
        self._slices.rewind(self._found, block.spans)
        self._before, self._found = going[-1].leader_epoch, []
        try:
            pieces = self._slices.slices(going, self._held)
        except OSError as error:
            self.handle(self._failure(error))
            return
        data = wire.ReplayData(
            session_id=self.session.id,
            start_offset=block.start,
            end_offset=block.end,
            tip_offset=max(block.tip, block.end),
            records=pieces,
        )
        self._send(data, self._sent)

    def _sent(self) -> None:
        self._release_files()
        self.handle(e.BlockSent())

    def _beat(self, beat: e.Heartbeat) -> None:
        if self.connection is not None and self.connection.is_idle:  # else frames are in flight anyway
            at = beat.position
            tip = max(beat.tip, at)
            self._send(wire.ReplayData(session_id=self.session.id, start_offset=at, end_offset=at, tip_offset=tip))

    def _send(self, event: Struct, sent: Callable[[], object] | None = None) -> None:
        connection, call = self.connection, self._call
        if connection is not None and call is not None and connection.is_open:
            connection.send(connection.protocol.event(call, event), sent)
            self._server.flush(connection)

    def _renew(self, offset: int) -> None:
        if self._lease is not None:
            with suppress(LeaseBroken):  # `_lease_gone` handles it
                self._lease.renew(offset)

    def _lease_gone(self, reason: str) -> None:
        """The lease was broken, or the log was closed because its leader reconnected and the log was opened anew."""
        reopened = self.source.reopened
        with suppress(*READ_ERRORS):
            self.source.facts(with_liveness=False)  # so it notices the new log
            if self.source.reopened != reopened:
                self._take_lease()
                self._server.ready(self)
                return
        self.handle(e.LeaseLost(reason))

    def _was_cut(self, facts: LogSnapshot) -> bool:
        """Whether the log was cut below the position, and has perhaps grown again; then the session ends.

        Checked when the log is shorter, when its epochs have changed, and when it was opened anew: the batch before the
        position has to be the same.
        """
        position, marker = self.session.position, self.source.marker()
        is_shorter = facts.written < position
        if self.session.state is not ReplayState.REPLAY or (marker == self._marker and not is_shorter):
            return False
        self._slices.forget()
        if is_shorter and not self._is_cut:
            self._is_cut, self.not_before_ms = True, self._server.now_ms() + _SETTLED_MS
            self._server.on_disk(self._wait_for_the_leader)
            return True  # once the request that cuts it is done, its new epoch is known
        self._marker = marker
        batch = None
        if facts.start < position <= facts.written:
            batch = next(self.source.batches(position - 1, position), None)
        is_same = batch is None or self._before in {None, batch.header.leader_epoch}
        if is_same and not is_shorter:
            self._is_cut = False  # removed by retention, which is no cut; nothing can be compared
            return False
        self.handle(self.source.cut_since(position, -1 if self._before is None else self._before, facts))
        return True

    def _wait_for_the_leader(self) -> None:
        """In the worker's thread."""
        self.source.wait_settled()
        self._server.post(self._settled)

    def _settled(self) -> None:
        self.not_before_ms = 0
        self._server.ready(self)

    def _failure(self, error: Exception) -> e.Event:
        self._slices.forget()
        facts = self._facts or LogSnapshot(start=0, written=self.session.position, flushed=0, high_watermark=0)
        with suppress(*READ_ERRORS):
            facts = self.source.facts(with_liveness=False)
        return self.source.failure(error, self.session.position, facts)

    def _release_files(self) -> None:
        for one in self._held:
            one.release()
        self._held.clear()

    def _release(self) -> None:
        self._release_files()
        self.source.close()

    def _end_to_wire(self, end: e.SendEnd) -> wire.ReplayEnd:
        return wire.ReplayEnd(
            session_id=self.session.id,
            reason=end.reason,
            offset=end.offset if end.cut_offset is None else end.cut_offset,
            error_code=end.code,
            error_message=end.why,
            leader_epoch=end.leader_epoch,
            segment=-1 if end.segment is None else end.segment,
        )


_WAKING = frozenset(
    {
        e.SegmentOpened.kind,
        e.SubscriberAttached.kind,
        e.Credited.kind,
        e.BlockSent.kind,
        e.BlockRead.kind,
        e.Truncated.kind,
    }
)
