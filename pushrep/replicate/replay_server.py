"""ReplayServer: all replays of a node in one thread; a session is not a thread, and an idle one is a timer.

    node_connections.py ─ adopt ─▶ ReplayConnection ─▶ calls (replay_calls.py) ─▶ worker: opens logs, finds times, ...
    appends ─ changed ─▶ sessions of that log are ready                     └──── post ────▶ answers, sessions
    ready: | session | session | ... |   each its turn, one block, then to the end of the queue: all get the same
    timers: heartbeats, time to attach, liveness, rates

If the disk delays a turn, all sessions wait; so work that may take long is done by the worker.

`DiskWorker`: a thread for jobs that wait for the disk: opening logs, looking up times, cutting, deleting.

Its thread starts with the first job, so that a node without replays has none.

`Watched`: which sessions read which log, so that a change of a log wakes only them.
"""

import logging
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heappop, heappush
from typing import TypeAlias

from pushrep.env import Clock, Network, Poller, Thread, Threads
from pushrep.errors import PushrepError
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.local import Counters
from pushrep.replay.plan import LOG_BOUNDS, LogSnapshot, ReplaySettings, tip_of
from pushrep.replay.session import ReplayCounters, ReplaySession, ReplaySessions, Totals
from pushrep.replay.slices import OpenSegments
from pushrep.replicate.replay_calls import ReplayCalls
from pushrep.replicate.replay_connection import AcceptedConnection, ReplayConnection
from pushrep.replicate.replay_recordings import KeptRecording, Marker, Recordings
from pushrep.replicate.replay_session_io import ServedSession
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import ApiKey
from pushrep.wire.connection import Call, ClientEvent
from pushrep.wire.frames import ProtocolError

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


Looks: TypeAlias = tuple[LogSnapshot, Marker]
"""The facts of a log for readers, and a marker that changes when it is another one."""


class Watched:
    """Logs and their sessions. For the server's thread, except `has` and `mark_changed`."""

    def __init__(self) -> None:
        self._sessions: dict[TopicIdPartition, dict[int, ServedSession]] = {}
        self._log_of: dict[int, TopicIdPartition] = {}
        self._looks: dict[TopicIdPartition, Looks] = {}
        self._changed: set[TopicIdPartition] = set()

    def has(self, tp: TopicIdPartition) -> bool:
        """Whether a session reads the log. For any thread."""
        return tp in self._sessions

    def mark_changed(self, tp: TopicIdPartition) -> bool:
        """Note that the log has changed; False if that is noted already. For any thread."""
        if tp in self._changed:
            return False
        self._changed.add(tp)
        return True

    def add(self, tp: TopicIdPartition, served: ServedSession) -> None:
        """`served` reads it from now on."""
        self._sessions.setdefault(tp, {})[served.session.id] = served
        self._log_of[served.session.id] = tp

    def remove(self, served: ServedSession) -> None:
        """It reads nothing any more."""
        tp = self._log_of.pop(served.session.id, None)
        if tp is None:
            return
        self._sessions[tp].pop(served.session.id, None)
        if not self._sessions[tp]:
            del self._sessions[tp]
            self._looks.pop(tp, None)

    def of(self, tp: TopicIdPartition) -> list[ServedSession]:
        """The log that a session reads."""
        return list(self._sessions.get(tp, {}).values())

    def news(self) -> Iterator[ServedSession]:
        """The sessions of logs that were marked since the last call."""
        while self._changed:
            yield from self._moved(self._changed.pop())  # taken off before anybody looks: what comes then is noted anew

    def moved(self) -> Iterator[ServedSession]:
        """The sessions of logs that have changed since the last call, and those that wait for a writer to stop."""
        for tp in list(self._sessions):
            yield from self._moved(tp)

    def _moved(self, tp: TopicIdPartition) -> Iterator[ServedSession]:
        sessions = self.of(tp)
        if not sessions:
            return
        looks = None
        with suppress(PushrepError, OSError):  # their next turn meets the error, too
            source = sessions[0].source
            looks = (source.facts(with_liveness=False), source.marker())
        before = self._looks.get(tp)
        if looks is not None:
            self._looks[tp] = looks
        is_all_news = looks is None or before is None or not _has_only_grown(before, looks)
        facts = looks[0] if looks is not None and looks != before else None
        for served in sessions:
            if is_all_news or _is_for(served.session, facts):
                yield served


def _is_for(session: ReplaySession, facts: LogSnapshot | None) -> bool:
    """Whether the session may have something to read in a log with these facts (None: unknown, or as before)."""
    bound = session.plan.bound
    if bound not in LOG_BOUNDS or session.wants_liveness:  # a counter moves by itself, and so does a writer's life
        return True
    return facts is not None and tip_of(facts, bound, None).bound != session.tip


def _has_only_grown(before: Looks, now: Looks) -> bool:
    """Whether the log has only grown: then only sessions that may read further are woken."""
    (facts, marker), (facts_now, marker_now) = before, now
    return marker == marker_now and facts.start == facts_now.start and facts.written <= facts_now.written


_LOG = logging.getLogger("pushrep.node")
_WAIT_S = 0.1
_LOOK_MS = 500
"""How often logs with replays are polled, because background flushes are not signalled."""

REPLAY_CALLS = frozenset(
    {
        ApiKey.START_REPLAY, ApiKey.ATTACH, ApiKey.STOP_REPLAY, ApiKey.DESCRIBE_RECORDINGS,
        ApiKey.EXTEND, ApiKey.TRUNCATE, ApiKey.PURGE, ApiKey.DELETE,
    }
)  # fmt: skip
"""Calls that move a connection to the replay server."""


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
        self.watched = Watched()
        self._totals = Totals()
        self._network, self._clock = network, clock
        self._calls = ReplayCalls(self)
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
        if self.watched.has(tp) and self.watched.mark_changed(tp):
            self._wake()

    def post_and_wait(self, recording: KeptRecording, event: e.Event) -> int:
        """Give all sessions of a recording an event; returns how many it ended. For the worker's thread."""
        return self._count_ended(lambda: list(self.watched.of(recording.entry.tp)), event)

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
        return len(self.watched.of(recording.entry.tp))

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

    def keep(self, served: ServedSession, recording: KeptRecording) -> None:
        """A session in INIT."""
        self.served[served.session.id] = served
        self.watched.add(recording.entry.tp, served)
        self.schedule(served)

    def forget(self, served: ServedSession) -> None:
        """The session is DONE; hang up on a subscriber that did not take its end."""
        self.served.pop(served.session.id, None)
        self._due.pop(served.session.id, None)
        self.watched.remove(served)
        self._totals.ended(served.session)
        connection = served.connection
        if connection is not None and connection.is_open and not connection.is_idle:
            self.flush(connection)
            if connection.is_open and not connection.is_idle and served.session.state is ReplayState.DONE:
                self._close_if_stuck(connection)

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
        for served in self.watched.news():
            self.ready(served)
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = now_ms
            for served in self.watched.moved():
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

    def _close_if_stuck(self, connection: ReplayConnection) -> None:
        if not any(served.connection is connection for served in self.served.values()):
            self._hang_up(connection, None)

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
