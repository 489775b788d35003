"""ReplayServer: all replays of a node in one thread; a session is not a thread, and an idle one is a timer.

    node_connections.py ─ adopt ─▶ ReplayConnection ─▶ ReplayCalls ─▶ worker: opens logs, finds times, ...
    appends ─ changed ─▶ sessions of that log are ready                     └──── post ────▶ answers, sessions
    ready: | session | session | ... |   each its turn, one block, then to the end of the queue: all get the same
    timers: heartbeats, time to attach, liveness, rates

If the disk delays a turn, all sessions wait; so work that may take long is done by the worker.

`ReplayCalls`: the answers to calls, in the server's thread.

StartReplay   worker: find the log, its offsets, the time ─▶ judge (plan.py) ─▶ worker: lease, first batch ─▶ answer
Attach        at once                           StopReplay           at once
Describe, Extend, Truncate, Purge, Delete       worker (replay_recordings.py) ─▶ answer

`DiskWorker`: a thread for jobs that wait for the disk: opening logs, looking up times, cutting, deleting.

Its thread starts with the first job, so that a node without replays has none.
"""

import logging
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

from pushrep.env import Clock, Network, Poller, Thread, Threads
from pushrep.errors import BadArgument, PushrepError
from pushrep.replay import events as e
from pushrep.replay.errors import ReplayRefused
from pushrep.replay.events import ReplayState
from pushrep.replay.local import Counters
from pushrep.replay.plan import (
    FOLLOW,
    TO_END,
    AtTime,
    Length,
    LogSnapshot,
    Position,
    ReplayPlan,
    ReplayRequest,
    ReplaySettings,
    tip_of,
)
from pushrep.replay.session import Effects, ReplayCounters, ReplaySession, ReplaySessions, Totals
from pushrep.replay.slices import OpenSegments
from pushrep.replay.source import READ_ERRORS
from pushrep.replicate.access import audit
from pushrep.replicate.replay_recordings import KeptRecording, NodeSource, Recordings
from pushrep.replicate.replay_session_io import AcceptedConnection, ReplayConnection, ServedSession
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey, refusal
from pushrep.wire.connection import Call, ClientEvent
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import ProtocolError
from pushrep.wire.values import Struct

_LOG = logging.getLogger("pushrep.node")


class DiskWorker:
    """Runs jobs in order. Any thread may call `do` and `stop`; a job handles its own errors."""

    def __init__(self, threads: Threads, name: str) -> None:
        self._threads, self._name = threads, name
        self._changed = threads.condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: Thread | None = None
        self._is_stopped = False

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job; does nothing after `stop`."""
        with self._changed:
            if self._is_stopped:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = self._threads.thread(self._run, self._name)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Finish the job that runs, forget the others."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_stopped)
                if self._is_stopped:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:  # noqa: BLE001 - a fault of one job ends no other
                _LOG.exception("a job of %s failed", self._name)


_WAIT_S = 0.1
_LOOK_MS = 500
"""How often every session has a turn, because background flushes, counters and a writer's end are not signalled."""

REPLAY_CALLS = frozenset(
    {
        ApiKey.START_REPLAY, ApiKey.ATTACH, ApiKey.STOP_REPLAY, ApiKey.DESCRIBE_RECORDINGS,
        ApiKey.EXTEND, ApiKey.TRUNCATE, ApiKey.PURGE, ApiKey.DELETE,
    }
)  # fmt: skip
"""Calls that move a connection to the replay server."""


class _Looked(NamedTuple):
    """The worker's result for a request."""

    is_allowed: bool
    source: NodeSource | None = None
    facts: LogSnapshot | None = None
    first_at: int | None = None


class ReplayCalls:
    """The calls of one server."""

    def __init__(self, server: "ReplayServer") -> None:
        self._server = server
        recordings = server.recordings
        self._calls: Mapping[type[Struct], Callable[[ReplayConnection, Call, Any], None]] = {
            wire.StartReplayRequest: self._start,
            wire.AttachRequest: self._attach,
            wire.StopReplayRequest: self._stop,
            wire.DescribeRecordingsRequest: self._keep(recordings.described),
            wire.ExtendRequest: self._keep(recordings.extend),
            wire.TruncateRequest: self._keep(recordings.truncate),
            wire.PurgeRequest: self._keep(recordings.purge),
            wire.DeleteRequest: self._delete,
        }

    def dispatch(self, connection: ReplayConnection, call: Call | ClientEvent) -> None:
        """Carry out a peer's request or event."""
        if isinstance(call, ClientEvent):
            self._on_event(connection, call)
        elif call.api_key is ApiKey.API_VERSIONS:
            connection.send(connection.protocol.answer_versions(call))
            self._server.flush(connection)
        elif (carry_out := self._calls.get(type(call.request))) is not None:
            access = self._server.recordings.access
            if access.could(connection.sender, call.api_key):
                carry_out(connection, call, call.request)
            else:
                refused = access.refused(connection.sender, call.api_key)
                self.refuse(connection, call, refused.code, str(refused))
        else:
            # All sessions share this thread: a leader's request could hold them up.
            self.refuse(connection, call, ErrorCode.INVALID_REQUEST, "this connection replays: push on another one")

    def answer(self, connection: ReplayConnection, call: Call, response: Struct) -> None:
        """Send the answer, if the peer is still connected."""
        if connection.is_open:
            connection.send(connection.protocol.answer(call, response))
            self._server.flush(connection)

    def refuse(self, connection: ReplayConnection, call: Call, code: ErrorCode, why: str) -> None:
        """Send an error answer."""
        self.answer(connection, call, refusal(call.api_key, code, why))

    def on_disk(
        self, connection: ReplayConnection, call: Call, job: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """Run `job` in the worker's thread, then `then(result)` in this one; errors of `job` are answered."""
        post = self._server.post

        def run() -> None:
            try:
                found = job()
            except ReplayRefused as refused:
                code, why = refused.code, refused.why
            except (OSError, PushrepError) as error:
                _LOG.error("%s failed: %s", type(call.request).__name__, error)
                code, why = ErrorCode.KAFKA_STORAGE_ERROR, str(error)
            except Exception:  # noqa: BLE001 - a fault of ours; the caller gets an error
                _LOG.exception("%s failed", type(call.request).__name__)
                code, why = ErrorCode.UNKNOWN_SERVER_ERROR, "a fault of the node: see its log"
            else:
                post(lambda: then(found))
                return
            post(lambda: self.refuse(connection, call, code, why))

        self._server.on_disk(run)

    # ---- sessions

    def _start(self, connection: ReplayConnection, call: Call, asked: wire.StartReplayRequest) -> None:
        asked_ms = self._server.now_ms()
        try:
            request = request_of(asked)
        except BadArgument as error:
            self.refuse(connection, call, ErrorCode.INVALID_REQUEST, str(error))
            return
        self.on_disk(
            connection,
            call,
            lambda: self._look_up(request, connection.sender),
            lambda looked: self._judge(connection, call, request, looked, asked_ms),
        )

    def _look_up(self, request: ReplayRequest, sender: str) -> _Looked:
        """In the worker's thread."""
        recordings = self._server.recordings
        assert isinstance(request.recording, int), "ids go over the wire"
        recording = recordings.find(request.recording)
        if not recordings.may(ApiKey.START_REPLAY, recording, sender):
            return _Looked(is_allowed=False)
        source = recordings.source(recording) if recording is not None else None
        if recording is None or source is None:
            return _Looked(is_allowed=True)
        try:
            facts = source.facts(with_liveness=True)
            position = request.position
            first_at = source.first_at(position.timestamp_ms) if isinstance(position, AtTime) else None
        except READ_ERRORS:
            source.close()
            return _Looked(is_allowed=True)
        return _Looked(True, source, facts, first_at)

    def _judge(
        self, connection: ReplayConnection, call: Call, request: ReplayRequest, looked: _Looked, asked_ms: int
    ) -> None:
        server = self._server
        try:
            session = server.sessions.start(
                request,
                looked.facts,
                lambda _: looked.first_at,
                asked_ms,
                counters=frozenset(server.named_counters),
                is_allowed=looked.is_allowed,
            )
        except ReplayRefused as refused:
            self._refuse_start(connection, call, self._with_cut(refused, request, looked))
            if looked.source is not None:
                looked.source.close()
            return
        assert looked.source is not None, "without a log it was refused"
        served = ServedSession(session, looked.source, server.files, server, connection.sender)
        server.keep(served)
        server.on_disk(lambda: self._open(connection, call, served, looked))

    def _open(self, connection: ReplayConnection, call: Call, served: ServedSession, looked: _Looked) -> None:
        """In the worker's thread."""
        event = served.open()
        self._server.post(lambda: self._opened(connection, call, served, event, looked))

    def _opened(
        self, connection: ReplayConnection, call: Call, served: ServedSession, event: e.Event, looked: _Looked
    ) -> None:
        if served.session.state is ReplayState.DONE:  # a cut, a deletion or a timeout came first
            served.never_opened()
            self._refuse_start(connection, call, _ended_early(served.session))
            return
        for effect in served.handle(event):
            if isinstance(effect, e.Refuse):
                refused = ReplayRefused(effect.code, effect.why)
                self._refuse_start(connection, call, self._with_cut(refused, served.session.plan, looked))
            elif isinstance(effect, e.Started) and not connection.is_open:
                served.handle(e.Stop())  # its id was not sent to anybody
            elif isinstance(effect, e.Started):
                facts, plan = looked.facts, served.session.plan
                assert facts is not None, "it was judged by them"
                tip = max(facts.start, tip_of(facts, plan.bound, self._server.counter(plan.bound)).bound)
                response = wire.StartReplayResponse(
                    session_id=served.session.id,
                    start_offset=effect.position,
                    log_start_offset=facts.start,
                    end_offset=tip if plan.end is None else plan.end,
                )
                self.answer(connection, call, response)

    def _with_cut(self, refused: ReplayRefused, asked: ReplayRequest | ReplayPlan, looked: _Looked) -> ReplayRefused:
        """For a reader that resumes above a cut, the refusal's range ends at the cut."""
        source, facts, before, position = looked.source, looked.facts, asked.epoch_before, asked.position
        is_late = refused.code is ErrorCode.TRUNCATED or refused.code is ErrorCode.INVALID_POSITION
        if source is None or facts is None or before is None or not isinstance(position, int) or not is_late:
            return refused
        with suppress(*READ_ERRORS):
            cut = source.cut_since(position, before, facts).offset
            return ReplayRefused(refused.code, refused.why, start=facts.start, end=cut)
        return refused

    def _refuse_start(self, connection: ReplayConnection, call: Call, refused: ReplayRefused) -> None:
        response = wire.StartReplayResponse(error_code=refused.code, error_message=refused.why)
        if refused.start is not None and refused.end is not None:
            response = replace(response, log_start_offset=refused.start, end_offset=refused.end)
        self.answer(connection, call, response)

    def _attach(self, connection: ReplayConnection, call: Call, asked: wire.AttachRequest) -> None:
        served = self._server.served.get(asked.session_id)
        if served is not None and served.identity != connection.sender:
            self._server.recordings.access.refused(connection.sender, ApiKey.ATTACH)
            served = None  # as one that is not there
        if served is None or served.connection is not None or served.session.state is not ReplayState.INIT:
            why = "no such replay, or its time to attach is over, or it has a subscriber"
            self.refuse(connection, call, ErrorCode.UNKNOWN_REPLAY, why)
            return
        self.answer(connection, call, wire.AttachResponse())
        if connection.is_open:
            served.attach(connection, call, asked.credit_bytes)

    def _on_event(self, connection: ReplayConnection, event: ClientEvent) -> None:
        if isinstance(event.message, wire.Credit):
            served = self._server.served.get(event.message.session_id)
            if served is not None and served.connection is connection:
                served.handle(e.Credited(event.message.bytes))

    def _stop(self, connection: ReplayConnection, call: Call, asked: wire.StopReplayRequest) -> None:
        access = self._server.recordings.access
        if asked.recording_id < 0:
            served = self._server.served.get(asked.session_id)
            is_own = served is None or served.identity == connection.sender
            if served is not None and not is_own and not access.may(connection.sender, ApiKey.DELETE, served.outbox_id):
                access.refused(connection.sender, ApiKey.STOP_REPLAY)
                self.answer(connection, call, wire.StopReplayResponse(stopped=0))  # as of one that is not there
                return
            if not is_own:
                audit(connection.sender, asked, ApiKey.STOP_REPLAY)
            now_ms = self._server.now_ms()
            self._answer_stopped(connection, call, self._server.sessions.stop(asked.session_id, now_ms))
            return
        recording_id, recordings = asked.recording_id, self._server.recordings

        def may() -> None:
            recording = recordings.find(recording_id)
            # Who may delete it may end the sessions of others.
            if not access.may(connection.sender, ApiKey.DELETE, recording and recording.entry.outbox_id):
                access.refused(connection.sender, ApiKey.STOP_REPLAY)
                raise ReplayRefused(ErrorCode.UNAUTHORISED, "")
            audit(connection.sender, asked, ApiKey.STOP_REPLAY)

        def stop(_: None) -> None:
            sessions, now_ms = self._server.sessions, self._server.now_ms()
            self._answer_stopped(connection, call, sessions.notify_all(recording_id, e.Stop(), now_ms))

        self.on_disk(connection, call, may, stop)

    def _answer_stopped(
        self, connection: ReplayConnection, call: Call, stopped: list[tuple[ReplaySession, Effects]]
    ) -> None:
        for session, effects in stopped:
            served = self._server.served.get(session.id)
            if served is not None:
                served.carry_out(effects)
        self.answer(connection, call, wire.StopReplayResponse(stopped=sum(1 for _, effects in stopped if effects)))

    # ---- keeping house

    def _keep(self, job: Callable[[Any, str], Struct]) -> Callable[[ReplayConnection, Call, Any], None]:
        return lambda connection, call, asked: self.on_disk(
            connection, call, lambda: job(asked, connection.sender), lambda found: self.answer(connection, call, found)
        )

    def _delete(self, connection: ReplayConnection, call: Call, asked: wire.DeleteRequest) -> None:
        def marked(recording: KeptRecording) -> None:
            self.answer(connection, call, wire.DeleteResponse())
            self._server.on_disk(lambda: self._remove(connection, call, recording))

        self.on_disk(connection, call, lambda: self._server.recordings.mark_deleted(asked, connection.sender), marked)

    def _remove(self, connection: ReplayConnection, call: Call, recording: KeptRecording) -> None:
        """In the worker's thread."""
        done = self._server.recordings.remove(recording)

        def answer() -> None:
            if connection.is_open:
                connection.send(connection.protocol.event(call, done))
                self._server.flush(connection)

        self._server.post(answer)


def _ended_early(session: ReplaySession) -> ReplayRefused:
    codes = {
        wire.ReplayEndReason.TRUNCATED: ErrorCode.TRUNCATED,
        wire.ReplayEndReason.RECORDING_DELETED: ErrorCode.UNKNOWN_RECORDING,
    }
    reason = session.end_reason
    code = ErrorCode.REQUEST_TIMED_OUT if reason is None else codes.get(reason, ErrorCode.REQUEST_TIMED_OUT)
    why = "its time to attach was over" if reason is None else f"it ended by {reason.name}"
    return ReplayRefused(code, f"{why} before offset {session.position} could be read: ask again")


def request_of(asked: wire.StartReplayRequest) -> ReplayRequest:
    """What is asked for. Raises BadArgument."""
    positions: Mapping[wire.PositionKind, Callable[[], Position]] = {
        wire.PositionKind.LOG_START: lambda: None,
        wire.PositionKind.OFFSET: lambda: asked.position,
        wire.PositionKind.TIMESTAMP_MS: lambda: AtTime(asked.position),
    }
    lengths: Mapping[wire.LengthKind, Length | int] = {
        wire.LengthKind.FOLLOW: FOLLOW,
        wire.LengthKind.TO_END: TO_END,
        wire.LengthKind.RECORDS: asked.length,
    }
    return ReplayRequest(
        recording=asked.recording_id,
        position=positions[asked.position_kind](),
        length=lengths[asked.length_kind],
        bound=asked.bound,
        max_bytes_per_s=asked.max_bytes_per_s or None,
        epoch_before=asked.epoch_before if asked.epoch_before >= 0 else None,
    )


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
        self.worker = DiskWorker(network.threads, "pushrep-node-replay-disk")
        self.files = OpenSegments(recordings.store.filesystem)
        self.served: dict[int, ServedSession] = {}
        self._readers: dict[TopicIdPartition, dict[int, ServedSession]] = {}
        self._changed: set[TopicIdPartition] = set()
        self._totals = Totals()
        self._network, self._clock = network, clock
        self._calls = ReplayCalls(self)
        recordings.sessions_of, recordings.notify_sessions = self.sessions_of, self.post_and_wait
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
            if self._thread is None and not self._stopping:
                self._poller = self._network.poller()
                self._thread = self._network.threads.thread(self._run, "pushrep-node-replay")
                self._thread.start()
        if self._stopping:
            handed.closed()
            return
        self.post(lambda: self._begin(handed))

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` in the server's thread, soon."""
        self._posted.append(job)
        self._wake()

    def changed(self, tp: TopicIdPartition) -> None:
        """Readers may see something new in this log. Never waits."""
        if tp in self._readers and tp not in self._changed:
            self._changed.add(tp)
            self._wake()

    def post_and_wait(self, recording: KeptRecording, event: e.Event) -> int:
        """Give all sessions of a recording an event; returns how many it ended. For the worker's thread."""
        return self._count_ended(lambda: self._sessions_of(recording), event)

    def stop_session(self, session_id: int) -> bool:
        """End any client's session; whether it ran. Waits for the server's thread, so call it from another one."""
        return bool(self._count_ended(lambda: [one for one in [self.served.get(session_id)] if one], e.Stop()))

    def _count_ended(self, chosen: Callable[[], list[ServedSession]], event: e.Event) -> int:
        if self._thread is None:
            return 0
        done, ended = self._network.threads.event(), [0]

        def notify() -> None:
            for served in chosen():
                before = served.session.end_reason
                served.handle(event)
                ended[0] += before is None and served.session.end_reason is not None
            done.set()

        self.post(notify)
        while not self._is_over and not done.wait(_WAIT_S):
            pass
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

    def sessions_of(self, recording: KeptRecording) -> int:
        """How many sessions a recording has. For any thread."""
        return len(self._sessions_of(recording))

    def _sessions_of(self, recording: KeptRecording) -> list[ServedSession]:
        return list(self._readers.get(recording.entry.tp, {}).values())

    def counters(self) -> ReplayCounters:
        """The counters of all sessions."""
        return self._totals.snapshot(self.sessions, self.now_ms())

    def stop(self) -> None:
        """End every session, notify the subscribers, close the connections. Before the logs are closed."""
        with self._start_lock:
            self._stopping = True
        if self._thread is not None:
            self.post(lambda: None)
            self._thread.join()
        self.worker.stop()
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
        """Do it in the worker's thread."""
        self.worker.do(job)

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
        self._totals.ended(served.session)
        connection = served.connection
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
            job = self._posted.popleft()
            try:
                job()
            except Exception:  # noqa: BLE001 - a fault of ours with one session ends no other
                _LOG.exception("a job of the replay server failed")

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
            self._watch_connection(connection)

    def _dispatch(self, connection: ReplayConnection, calls: list[Call | ClientEvent]) -> None:
        for call in calls:
            try:
                self._calls.dispatch(connection, call)
            except Exception:  # noqa: BLE001 - a fault of ours ends one connection, not the server
                _LOG.exception("%s is cut off", connection.name)
                self._hang_up(connection, None)
                return

    def _watch_connection(self, connection: ReplayConnection) -> None:
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
        for served in list(self.served.values()):
            served.node_stops()
        for connection in list(self._connections):
            self._hang_up(connection, None)
        self.files.close()
