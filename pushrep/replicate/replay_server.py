"""ReplayServer: all replays of a node in one thread; a session is not a thread, and an idle one is a timer.

    node_connections.py ─ adopt ─▶ ReplayConnection ─▶ ReplayCalls ─▶ worker: opens logs, finds times, ...
    appends ─ changed ─▶ sessions of that log are ready                     └──── post ────▶ answers, sessions
    ready: | session | session | ... |   each its turn, one block, then to the end of the queue: all get the same
    timers: heartbeats, time to attach, liveness, rates

If the disk delays a turn, all sessions wait; so work that may take long is done by the worker.

`ServedSession`: a ReplaySession over a log of this node, for a subscriber at the other end of a ReplayConnection.

    turn ─▶ ReadBlock ─▶ headers ─▶ BlockRead ─▶ SendBlock ─▶ ReplayData: a header and slices of files ─▶ Sent

`ReplayConnection`: never waits, and sends slices of files without reading them into memory.

    send(parts, sent) ─▶ | frame | frame | ... ─▶ flush ─▶ socket        how a slice is sent: sockets.py
                                                     └ sent(), once all of a frame has left

A block in flight costs only its header and slices in memory, however slow the subscriber is.
"""

import logging
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from pushrep.env import READABLE, WRITABLE, Clock, Network, Poller, Thread
from pushrep.log import Lease, LeaseBroken, OffsetOutOfRange
from pushrep.log.errors import is_shortage
from pushrep.log.published import LogOffsets
from pushrep.log.reader import LogSlice, LogSlices, SlicedFile
from pushrep.records import BatchHeader
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.local import Counters
from pushrep.replay.plan import ReplaySettings, Span
from pushrep.replay.session import ReplayCounters, ReplaySession, ReplaySessions
from pushrep.replay.source import READ_ERRORS
from pushrep.replicate.budget import SEND_S, Admitted
from pushrep.replicate.replay_recordings import KeptRecording, NodeSource, Recordings
from pushrep.replicate.sockets import Piece, pieces_of, send_some
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey
from pushrep.wire.connection import Call, ClientEvent, ServerConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import Prefix, ProtocolError
from pushrep.wire.replay_messages import ReplayEndReason
from pushrep.wire.values import FileSlice, Part, Struct

_LOG = logging.getLogger("pushrep.node")


_WAIT_S = 0.1
_LOOK_MS = 500
"""How often every session has a turn, because background flushes, counters and a writer's end are not signalled."""
_FRAMES_MAX = 256
"""How many unsent answers a connection may have; with more, nothing is read from it."""
_READS_MAX = 16
_LOOKS_MAX = 50
"""How often a missing batch is looked for, a few ms apart, because a cut takes a moment."""
_LOOK_AGAIN_MS, _SETTLED_MS = 10, 2_000


class AcceptedConnection(NamedTuple):
    """A connection with replay calls. calls: those already read. sender: its identity.

    closed: to be called when it is closed.
    """

    budget: Admitted
    protocol: ServerConnection
    calls: Sequence[Call | ClientEvent]
    name: str
    sender: str
    closed: Callable[[], None]


class ReplayConnection:
    """The server's end of a connection. For one thread. Everything raises OSError once the peer has disconnected."""

    def __init__(self, handed: AcceptedConnection) -> None:
        self.name, self.sender, self.protocol = handed.name, handed.sender, handed.protocol
        self.closed, self.budget = handed.closed, handed.budget
        self.protocol.hold = _refuse_large
        self.sessions = 0
        """How many sessions send to it: these may be as slow as they like, because what they send is in files."""
        self.socket = handed.budget.socket
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
            self.budget.relax()
            if sent is not None:
                sent()

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._frames.clear()
        self.protocol.drop()
        self.closed()

    def expect(self) -> None:
        """Set its deadline, if the peer has to do something: take what is sent, or finish its request."""
        is_slow = bool(self._frames) and not self.sessions
        if not is_slow and not self.protocol.held_bytes:
            self.budget.relax()
        elif self.budget.due_ms is None:
            self.budget.expect(SEND_S)


def _refuse_large(prefix: Prefix) -> None:
    raise ProtocolError(f"{prefix.place}: {prefix.size} bytes are no request of a replay")


class ServedSession:
    """One session. For the server's thread, but for `open`, which the worker does."""

    def __init__(self, session: ReplaySession, source: NodeSource, server: "ReplayServer", identity: str) -> None:
        """identity: that started it; only this one may attach."""
        self.session, self.source, self.identity = session, source, identity
        entry = source.recording.entry
        self.tp, self.outbox_id = entry.tp, entry.outbox_id
        self.connection: ReplayConnection | None = None
        self.not_before_ms = 0
        """A turn before that would do nothing."""
        self._server, self._slices = server, LogSlices(source.filesystem, source.path, files=server.files)
        self._slices.forget()  # without readers the log may have been cut, or deleted and made anew
        self._call: Call | None = None
        self._lease: Lease | None = None
        self._found: LogSlice | None = None  # kept until the next one, so that its file stays open
        self._looks = 0
        self._is_cut = False
        self._marker = source.marker()
        self._before: int | None = None
        """Leader epoch of the record before the position."""
        self._sent: tuple[int, ...] | None = None
        """The last batch that was sent, as a ScannedHeader without its position."""
        self._facts: LogOffsets | None = None

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
        post, gone, opened = self._server.post, self._lease_gone, self.source.reopened
        self._lease = self.source.lease(self.session.position, lambda reason: post(lambda: gone(reason, opened)))

    # ---- the server's thread

    def attach(self, connection: ReplayConnection, call: Call, credit_bytes: int) -> None:
        """Its subscriber has attached."""
        self.connection, self._call = connection, call
        connection.sessions += 1
        self.handle(e.SubscriberAttached(credit_bytes))

    def handle(self, event: e.Event) -> list[e.Effect]:
        """Give the session an event and carry out the effects; returns them."""
        if isinstance(event, e.Truncated):
            self._slices.forget()
        effects = self._server.handle(self.session, event)
        self.carry_out(effects)
        if isinstance(event, _WAKING) and self.session.state is ReplayState.REPLAY:
            self._server.ready(self)
        return effects

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
            wants = self.session.wants_liveness
            self._facts, is_live = self.source.live_facts() if wants else (self.source.facts(), True)
            if self._was_cut(self._facts):
                return
        except READ_ERRORS as error:
            self.handle(self._failure(error))
            return
        counter = self._server.counter(self.session.plan.bound)
        self.carry_out(self._server.handle(self.session, e.Turn(self._facts, counter, is_live)))

    def carry_out(self, effects: list[e.Effect]) -> None:
        """Do what the session wants done."""
        for effect in effects:
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
                    self.source.close()
                    self._server.forget(self)
                case _:
                    pass  # Started and Refuse: answered where the session was asked for

    def _read(self, wanted: e.ReadBlock) -> None:
        assert self._facts is not None, "a turn has looked"
        try:
            found = self._slices.read(wanted.position, wanted.limit, wanted.max_bytes)
            # A batch that reaches above what was written then is a damaged header, or the log was cut meanwhile.
            if found is None or found.end_offset > self._facts.end:
                self._look_again(wanted)
                return
        except READ_ERRORS as error:
            if is_shortage(error):
                self._looks = 1
                self._pause()
            else:
                self.handle(self._failure(error))
            return
        self._found, self._looks = found, 0
        spans = [Span(base, end, size_bytes, records) for _, base, end, size_bytes, _, records, _ in found.batches]
        self.handle(e.BlockRead(tuple(spans)))

    def _look_again(self, wanted: e.ReadBlock) -> None:
        """Raises as LogReader.batches what is wrong there, once the batch was looked for often enough."""
        self._slices.forget()
        self._looks += 1
        if self._looks > _LOOKS_MAX:
            next(self.source.batches(wanted.position, wanted.limit), None)
            why = f"{self.source.path}: no header of a batch is in its place at offset {wanted.position}"
            self.handle(e.ReadFailed(ErrorCode.CORRUPT_MESSAGE, why))
            return
        self._pause()

    def _pause(self) -> None:
        self.not_before_ms = self._server.now_ms() + _LOOK_AGAIN_MS
        self.handle(e.BlockRead(()))

    def _send_block(self, block: e.SendBlock) -> None:
        assert self._found is not None, "its batches were read"
        last = self._found.batches[block.spans - 1]
        self._before, self._sent, position = last[4], last[1:], self._found.position
        piece = FileSlice(self._found.file, position, last[0] + last[3] - position)
        self._send(
            wire.ReplayData(
                session_id=self.session.id,
                start_offset=block.start,
                end_offset=block.end,
                tip_offset=max(block.tip, block.end),
                records=(piece,),
            ),
            lambda: self.handle(e.BlockSent()),
        )

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

    def _lease_gone(self, reason: str, opened: int) -> None:
        """The lease was broken, or the log was closed because its leader reconnected and the log was opened anew.

        opened: `reopened` of the log that the lease was of; a turn may have found the new one already.
        """
        with suppress(LeaseBroken, *READ_ERRORS):
            self.source.facts()  # so it notices the new log
            if self.source.reopened != opened and self.session.end_reason is None:
                with suppress(OffsetOutOfRange):  # its next turn tells what it lacks
                    self._take_lease()
                return
        self.handle(e.LeaseLost(reason))

    def _was_cut(self, facts: LogOffsets) -> bool:
        """Whether the log was cut below the position, and has perhaps grown again; then the session ends.

        Checked when the log is shorter, was cut, or was opened anew: the batch before the position has to be the same.
        """
        position, marker = self.session.position, self.source.marker()
        is_shorter = facts.end < position
        if self.session.state is not ReplayState.REPLAY or (marker == self._marker and not is_shorter):
            return False
        self._slices.forget()
        if is_shorter and not self._is_cut:
            self._is_cut, self.not_before_ms = True, self._server.now_ms() + _SETTLED_MS
            self._server.on_disk(self._wait_for_the_leader)
            return True  # once the request that cuts it is done, its new epoch is known
        self._marker = marker
        batch = None
        if facts.start < position <= facts.end:
            batch = next(self.source.batches(position - 1, position), None)
        is_same = batch is None or (self._before in {None, batch.header.leader_epoch} and self._is_sent(batch.header))
        if is_same and not is_shorter:
            self._is_cut = False  # removed by retention, which is no cut; nothing can be compared
            return False
        self.handle(self.source.cut_since(*self._given, facts))
        return True

    @property
    def _given(self) -> tuple[int, int]:
        """Offset and leader epoch of the last batch that was sent: after a cut all of it is to be taken back."""
        return (
            self.session.position if self._sent is None else self._sent[0],
            -1 if self._before is None else self._before,
        )

    def _is_sent(self, header: BatchHeader) -> bool:
        """Whether it is the last batch that was sent, as far as the scan tells; also if there is none."""
        records = 0 if header.is_control else header.record_count
        shown = (header.base_offset, header.next_offset, header.size_bytes, header.leader_epoch, records)
        return self._sent in {None, (*shown, header.max_timestamp_ms)}

    def _wait_for_the_leader(self) -> None:
        """In the worker's thread."""
        self.source.wait_settled()
        self._server.post(self._settled)

    def _settled(self) -> None:
        self.not_before_ms = 0
        self._server.ready(self)

    def _failure(self, error: Exception) -> e.Event:
        self._slices.forget()
        facts = self._facts or LogOffsets(0, self.session.position, 0, 0)
        with suppress(*READ_ERRORS):
            facts = self.source.facts()
        return self.source.failure(error, self.session.position, facts, self._given)

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


_WAKING = (e.SegmentOpened, e.SubscriberAttached, e.Credited, e.BlockSent, e.BlockRead, e.Truncated)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # noqa: BLE001 - a fault of ours with one session ends no other
        _LOG.exception("a job of the replay server failed")


class ReplayServer:
    """The replays of one node. `adopt`, `changed`, `post`, `counters` and `stop` may come from any thread."""

    def __init__(
        self,
        recordings: Recordings,
        settings: ReplaySettings,
        counters: Counters,
        *,
        network: Network,
        clock: Clock,
    ) -> None:
        self.recordings, self.named_counters = recordings, counters
        self.sessions = ReplaySessions(settings, random.SystemRandom().getrandbits)
        self._disk = ThreadPoolExecutor(1, "pushrep-node-replay-disk")  # its thread starts with the first job
        self.files = WeakValueDictionary[Path, SlicedFile]()
        """The segments that sessions send from."""
        self.served: dict[int, ServedSession] = {}
        self._readers: dict[TopicIdPartition, dict[int, ServedSession]] = {}
        self._changed: set[TopicIdPartition] = set()
        self._network, self._clock = network, clock
        self.dispatch: Callable[[ReplayConnection, Call | ClientEvent], None] = lambda _connection, _call: None
        """Carries out a peer's request or event: see ReplayCalls."""
        recordings.sessions_of = lambda recording: len(self._sessions_of(recording))
        recordings.notify_sessions = self.post_and_wait
        self._connections: set[ReplayConnection] = set()
        self._posted: deque[Callable[[], None]] = deque()
        self._ready: deque[ServedSession] = deque()
        self._is_ready: set[int] = set()
        self._timers: list[tuple[int, int]] = []
        self._due: dict[int, int] = {}
        self._looked_ms = 0
        self._stopping = self._is_over = False
        self._poller: Poller | None = None
        self._thread: Thread | None = None
        self._waking = threading.Lock()
        self._start_lock = network.threads.condition()

    # ---- any thread

    def adopt(self, handed: AcceptedConnection) -> None:
        """Take over this connection."""
        with self._start_lock:
            if not self._stopping:
                if self._thread is None:
                    self._poller = self._network.poller()
                    self._thread = self._network.threads.thread(self._run, "pushrep-node-replay")
                    self._thread.start()
                self.post(lambda: self._begin(handed))
                return
        handed.closed()

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` in the server's thread, soon."""
        self._posted.append(job)
        self._wake()

    def changed(self, tp: TopicIdPartition) -> None:
        """Readers may see something new in this log. Never waits."""
        if tp in self._readers and tp not in self._changed:
            self._changed.add(tp)
            self._wake()

    def post_and_wait(self, recording: KeptRecording, event: e.Event) -> None:
        """Give all sessions of a recording an event. For the worker's thread."""
        self._count_ended(lambda: self._sessions_of(recording), event)

    def stop_session(self, session_id: int) -> bool:
        """End any client's session; whether it ran. Waits for the server's thread, so call it from another one."""
        return bool(self._count_ended(lambda: [one for one in [self.served.get(session_id)] if one], e.Stop()))

    def _count_ended(self, chosen: Callable[[], list[ServedSession]], event: e.Event) -> int:
        if self._thread is None:
            return 0
        done, ended, failed = self._network.threads.event(), [0], list[Exception]()

        def notify() -> None:
            for served in chosen():
                before = served.session.end_reason
                try:
                    served.handle(event)
                except Exception as error:  # noqa: BLE001 - a fault of ours; whoever waits is told
                    failed.append(error)
                ended[0] += before is None and served.session.end_reason is not None
            done.set()

        self.post(notify)
        while not self._is_over and not done.wait(_WAIT_S):
            pass
        if failed:
            raise failed[0]
        return ended[0]

    def recheck(self) -> None:
        """The allow list has changed: end sessions without a right."""
        if self._thread is not None:
            self.post(self._end_unauthorised)

    def _end_unauthorised(self) -> None:
        access = self.recordings.access
        for served in list(self.served.values()):
            if not access.may(served.identity, ApiKey.START_REPLAY, served.outbox_id):
                access.refused(served.identity, ApiKey.START_REPLAY, served.outbox_id)
                served.handle(e.Stop())

    def _sessions_of(self, recording: KeptRecording) -> list[ServedSession]:
        return list(self._readers.get(recording.entry.tp, {}).values())

    def counters(self) -> ReplayCounters:
        """The counters of all sessions."""
        return self.sessions.counters(self.now_ms())

    def stop(self) -> None:
        """End every session, notify the subscribers, close the connections. Before the logs are closed."""
        with self._start_lock:
            self._stopping = True
        if self._thread is not None:
            self.post(lambda: None)
            self._thread.join()
        self._disk.shutdown(cancel_futures=True)
        with self._waking:
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()

    def _wake(self) -> None:
        with self._waking:  # a closed poller's descriptors may be reused
            if self._poller is not None:
                self._poller.wake()

    # ---- its own thread: what calls and sessions use

    def now_ms(self) -> int:
        """The monotonic clock."""
        return self._clock.monotonic_ms()

    def counter(self, bound: str) -> int | None:
        """The counter's value; None without such a counter, or if it is closed."""
        ask = self.named_counters.get(bound)
        return ask() if ask is not None else None

    def handle(self, session: ReplaySession, event: e.Event) -> list[e.Effect]:
        """Give a session an event."""
        return self.sessions.handle(session, event, self.now_ms())

    def on_disk(self, job: Callable[[], None]) -> None:
        """Do what waits for the disk (open logs, look up times, cut, delete) in the worker's thread, in order."""
        with suppress(RuntimeError):  # the node stops
            self._disk.submit(_logged, job)

    def on_worker(self, call: Callable[[], Any]) -> Any:
        """The result of a call in the worker's thread; waits for it. Raises RuntimeError once the node stops."""
        return self._disk.submit(call).result()

    def ready(self, served: ServedSession) -> None:
        """Give this session a turn."""
        if served.session.id not in self._is_ready:
            self._is_ready.add(served.session.id)
            self._ready.append(served)

    def keep(self, served: ServedSession) -> None:
        """A session in INIT."""
        self.served[served.session.id] = served
        self._readers.setdefault(served.tp, {})[served.session.id] = served
        self.schedule(served)

    def forget(self, served: ServedSession) -> None:
        """The session is DONE; hang up on a subscriber that did not take its end."""
        self.served.pop(served.session.id, None)
        self._due.pop(served.session.id, None)
        readers = self._readers.get(served.tp, {})
        readers.pop(served.session.id, None)
        if not readers:
            self._readers.pop(served.tp, None)
        connection = served.connection
        if connection is not None:
            connection.sessions -= 1
        if connection is not None and connection.is_open and not connection.is_idle:
            self.flush(connection)
            is_stuck = connection.is_open and not connection.is_idle and served.session.state is ReplayState.DONE
            if is_stuck and not any(other.connection is connection for other in self.served.values()):
                self._hang_up(connection, None)

    def schedule(self, served: ServedSession) -> None:
        """Give the session its next turn at the time that it asks for, at the latest."""
        session_id, due_ms = served.session.id, served.next_turn_ms
        if session_id in self.served and due_ms < self._due.get(session_id, due_ms + 1):
            self._due[session_id] = due_ms
            heappush(self._timers, (due_ms, session_id))

    def flush(self, connection: ReplayConnection) -> None:
        """Send queued frames, as far as the network accepts them."""
        try:
            connection.flush()
        except OSError as error:
            self._hang_up(connection, error)
            return
        self._watch_connection(connection)

    # ---- inside

    def _run(self) -> None:
        assert self._poller is not None, "it is made before the thread"
        while not self._stopping:
            self._do_posted()
            self._find_work()
            self._step_ready()
            for found in self._poller.select(self._wait_s()):
                self._serve(found.data)
        try:
            self._end()
        finally:
            self._is_over = True

    def _wait_s(self) -> float:
        if self._ready or self._posted:
            return 0
        now_ms = self.now_ms()
        due_ms = self._timers[0][0] if self._timers else now_ms + 60_000
        if self.served:
            due_ms = min(due_ms, self._looked_ms + _LOOK_MS)
        return max(0, due_ms - now_ms) / 1000

    def _do_posted(self) -> None:
        for _ in range(len(self._posted)):
            _logged(self._posted.popleft())

    def _find_work(self) -> None:
        """Find the sessions that have something to do, by changes of their logs and by time."""
        now_ms = self.now_ms()
        woken: list[ServedSession] = []
        while self._changed:  # taken off before anybody looks: what comes then is noted anew
            woken += self._readers.get(self._changed.pop(), {}).values()
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms, woken = now_ms, list(self.served.values())
        for served in woken:
            self.ready(served)
        while self._timers and self._timers[0][0] <= now_ms:
            due_ms, session_id = heappop(self._timers)
            due = self.served.get(session_id)
            if due is None or self._due.get(session_id) != due_ms:
                continue
            del self._due[session_id]
            if due.next_turn_ms <= now_ms:
                self.ready(due)
            else:
                self.schedule(due)

    def _step_ready(self) -> None:
        for _ in range(len(self._ready)):
            served = self._ready.popleft()
            self._is_ready.discard(served.session.id)
            if served.session.id not in self.served:
                continue
            try:
                served.turn()
            except Exception:  # noqa: BLE001 - as above
                _LOG.exception("a replay session failed")
                served.handle(e.SubscriberGone())
                if served.connection is not None:
                    self._hang_up(served.connection, None)
            self.schedule(served)

    def _begin(self, handed: AcceptedConnection) -> None:
        connection = ReplayConnection(handed)
        self._connections.add(connection)
        assert self._poller is not None, "it runs"
        self._poller.register(connection.socket, connection.mask, connection)
        self._dispatch(connection, list(handed.calls))
        self._serve(connection)  # TLS may have read more than was asked for

    def _serve(self, connection: ReplayConnection) -> None:
        if not connection.is_open:
            return
        try:
            connection.flush()
            calls = connection.receive()
        except ProtocolError as error:
            _LOG.warning("%s is cut off: %s", connection.name, error.reason)
            self._hang_up(connection, None)
        except (OSError, ssl.SSLError) as error:
            self._hang_up(connection, error)
        else:
            self._dispatch(connection, calls)
            if connection.protocol.failure is not None:  # it came behind these calls
                self._hang_up(connection, connection.protocol.failure)
            self._watch_connection(connection)

    def _dispatch(self, connection: ReplayConnection, calls: list[Call | ClientEvent]) -> None:
        for call in calls:
            try:
                self.dispatch(connection, call)
            except Exception:  # noqa: BLE001 - a fault of ours ends one connection, not the server
                _LOG.exception("%s is cut off", connection.name)
                self._hang_up(connection, None)
                return

    def _watch_connection(self, connection: ReplayConnection) -> None:
        connection.expect()
        wanted = connection.wanted_mask
        if connection.is_open and wanted != connection.mask and self._poller is not None:
            connection.mask = wanted
            self._poller.modify(connection.socket, wanted, connection)

    def _hang_up(self, connection: ReplayConnection, error: Exception | None) -> None:
        if not connection.is_open:
            return
        if error is not None:
            _LOG.info("%s went: %s", connection.name, error)
        self._connections.discard(connection)
        assert self._poller is not None, "a connection is served while it runs"
        self._poller.unregister(connection.socket)
        connection.close()
        for served in [served for served in self.served.values() if served.connection is connection]:
            served.handle(e.SubscriberGone())

    def _end(self) -> None:
        self._do_posted()  # connections that were handed over before it was to stop
        for served in list(self.served.values()):
            served.node_stops()
        for connection in list(self._connections):
            self._hang_up(connection, None)
