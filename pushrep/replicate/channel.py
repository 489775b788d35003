"""Channel: one connection to one replica, with several requests in flight, each with many partitions.

    push(pusher) ─▶ no other pusher waits or sends? its request goes out in the appending thread (two switches saved) └
                      no ─▶ wake
    wake(pusher) ─▶ ready ─▶ pump: request of many parts ─▶ socket ─▶ in flight ─▶ answer ─▶ each pusher's result
      any thread └ only pushers with something to send are looked at: idle ones cost nothing once a second ─▶ a
    heartbeat, whatever else is sent: it shows the node that its leader is alive
    connection lost ─▶ requests in flight fail, in order ─▶ connect again with backoff ─▶ records sent again

A lock keeps requests on the wire in the order in which they were built. The worker waits for it; `push` never does.
Any thread may call `push`, `notify`, `wake`, `wake_later`, `close` and `wait_closed`. `_connect` has a thread of its
own. Everything else runs in the worker's thread, or in that of a shutdown, for a channel that no worker runs.

A node may accept only smaller frames, or a network may be too slow for a large one within `request_timeout_ms`. After
a large request from a file was lost, those that follow have half of its bytes, down to `request_bytes_max`: larger ones
only cost less.

`Workers`: a few threads that run channels, and sleep while there is nothing to send. All PushManagers of a process
share them (`workers_for`), so that twenty outboxes have no more threads than one. With a simulated network or clock
each manager has its own, so that a run is repeatable.
"""

import heapq
import logging
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from pushrep.election.messages import AppendRecordsPartition, PushSessionEndReason
from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK, Clock, Network, Thread, shared_by_process
from pushrep.env.network import READABLE, WRITABLE
from pushrep.errors import PushrepError
from pushrep.log import OffsetOutOfRange
from pushrep.log.disk import Durations
from pushrep.log.errors import is_shortage
from pushrep.replicate.connecting import ReplicaClient, pause_s, retry_connecting
from pushrep.replicate.pusher import PendingWork, Pusher, Sent
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import AnySocket, Piece, bytes_in_files, pieces_of, send_some
from pushrep.wire.connection import CallAnswer, ClientConnection
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import ProtocolError
from pushrep.wire.push_messages import (
    AppendRecordsRequest,
    AppendRecordsResponse,
    AppendRecordsResult,
    BeatRequest,
    BeatResponse,
)
from pushrep.wire.values import size_of


class RequestInFlight(NamedTuple):
    """A request without an answer yet. file_bytes: how much of it came from files; slots: its share of
    `requests_in_flight_max`.
    """

    sent_ms: int
    parts: list[Sent]
    slots: int
    file_bytes: int


_LOG = logging.getLogger("pushrep.push")
BEAT_MS = 1_000
_GRACE_S = 0.2
_PARTS_MAX = 1024  # partitions in one request: its header stays far below the peers' limit
_SMALL_SHARE = 4
"""A request of less than this part of `request_bytes_max`, in bytes, and of `_PARTS_MAX` is small. It takes half of the
requests that may be in flight: one is carried out and one is at hand, and what comes meanwhile goes together. A node
syncs the partitions of one request beside each other, but requests one after the other."""


class Beats(NamedTuple):
    """A leader's heartbeats, one a second. on_another(replica, generation, epoch, leader): the answer showed another
    grant than the leader's: a newer one, or an older one or none (-1), because the replica's disk was replaced.
    on_own(replica, stands_by): it showed the leader's. last(): the one that a connection ends with, if one.
    """

    request: BeatRequest
    on_another: Callable[[int, int, int, int], None]
    on_own: Callable[[int, bool], None]
    last: Callable[[], BeatRequest | None]


class Channel:
    """One connection of a worker."""

    def __init__(  # noqa: PLR0913, PLR0917 - whose connection, and what it stands on
        self,
        replica: Replica,
        settings: PushSettings,
        worker: "PushWorker",
        clock: Clock,
        opened: ReplicaClient | None,
        beats: Beats | None = None,
        lost: "Counter[int] | None" = None,
        requests: Durations | None = None,
    ) -> None:
        """opened: a connection to take over; None: it connects itself.

        lost: counts broken connections by the replica's index. requests: gets the duration of each answered push.
        """
        self._lost = Counter[int]() if lost is None else lost
        self._requests = requests or Durations()
        self.away: str | None = None
        """Why the replica can't be reached; None if it can, or that is unknown yet."""
        self.replica, self.is_closing = replica, False
        self.pushers: dict[Pusher, None] = {}  # in the order in which they came
        """The pushers with a session. Each sends something over a new connection, because the replica may be a new
        process.
        """
        self._beats, self._is_beating, self._has_sent_end = beats, False, False
        self._beat_ms: int | None = None  # when the next one is due
        self._settings, self.worker, self._clock = settings, worker, clock
        self._ready: deque[Pusher] = deque()
        self._later: deque[tuple[int, Pusher]] = deque()
        self._timers: list[tuple[int, int, Pusher]] = []
        self._tickets = count()
        self._send_lock = threading.Lock()  # guards the connection and its requests in flight; never held while waiting
        self._failed: BaseException | None = None  # an error in `push`: the worker then closes the connection
        self._sock: AnySocket | None = None
        self._protocol: ClientConnection | None = None
        self._outgoing: list[Piece] = []
        self._events = READABLE
        self._in_flight: dict[int, RequestInFlight] = {}
        self._slots = 0  # of all requests in flight
        self._file_bytes_max = settings.request_file_bytes_max
        self._linger_until_ms: int | None = None
        self._opened = opened
        self._connecting: Thread | None = None
        self._fruitless = int(opened is not None)  # connections in a row without an answer to a push
        self._stop = settings.network.threads.event()
        self.hung_up = settings.network.threads.event()
        self._until_ms: int | None = None

    def is_done(self, now_ms: int) -> bool:
        """Whether it is closed and has nothing more to send, or may not wait longer."""
        if not self.is_closing:
            return False
        is_connected = self._sock is not None or self._opened is not None
        if self._until_ms is not None and (not is_connected or now_ms >= self._until_ms):
            return True
        may_beat = self._opened is not None or self._beat_ms is not None
        is_idle = not self._ready and not self._in_flight and not self._outgoing
        return is_idle and not (self._beats is not None and may_beat and not self._has_sent_end)

    def wake(self, pusher: Pusher) -> None:
        """The pusher has something to send. Thread-safe."""
        if not pusher.is_ready:
            pusher.is_ready = True
            self._ready.append(pusher)
            self.worker.wake()

    def push(self, pusher: Pusher) -> None:
        """The pusher has new records: send them now if nothing else waits, else as `wake`. Thread-safe; never waits."""
        if self._is_free() and self._send_lock.acquire(blocking=False):
            try:
                # A request of this pusher alone, with records from memory.
                if self._is_free() and (found := pusher.next_part(self._settings.request_bytes_max)) is not None:
                    self._send([found[0]], [found[1]], self._clock.monotonic_ms())
            except (OSError, ProtocolError) as error:
                self._failed = error
            finally:
                self._send_lock.release()
            if self._failed is None and not self._outgoing and not pusher.has_something():
                return
        self.wake(pusher)

    def notify(self, pusher: Pusher) -> None:
        """The pusher's state changed, so that it may have something to send. Thread-safe."""
        pending = pusher.pending_work()
        if pending is PendingWork.REQUEST:
            self.wake(pusher)
        elif pending is PendingWork.WATERMARK:
            self._wake_for_watermark(pusher)

    def wake_later(self, pusher: Pusher) -> None:
        """The pusher has to send again, after a pause that grows with its failures. Thread-safe."""
        pusher.failures += 1
        delay_ms = int(1000 * pause_s(self._settings, pusher.failures))
        self._later.append((self._clock.monotonic_ms() + delay_ms, pusher))
        self.worker.wake()

    def can_send(self) -> bool:
        """Whether `pump` would do something now."""
        if self._later or self._opened is not None or self._failed is not None:
            return True
        if self._sock is None:
            return self._connecting is None and not self._stop.is_set()
        has_room = not self._outgoing and self._slots < self._settings.requests_in_flight_max
        return bool(self._ready) and has_room and self._linger_until_ms is None

    def pump(self, now_ms: int) -> int | None:
        """Send what can be sent; returns when to be called again without an event, None for never."""
        while self._later:
            due_ms, pusher = self._later.popleft()
            heapq.heappush(self._timers, (due_ms, next(self._tickets), pusher))
        while self._timers and self._timers[0][0] <= now_ms:
            pusher = heapq.heappop(self._timers)[2]
            pusher.is_timed = False
            self.wake(pusher)
        with self._send_lock:
            self._keep_connected(now_ms)
            if self._sock is not None:
                try:
                    self._send_ready(now_ms)
                    self._beat(now_ms)
                    self._watch()
                except (OSError, ProtocolError) as error:
                    self._lose(error)
            oldest = next(iter(self._in_flight.values()), None)
            # `push` wakes nobody: a request that it sends from now on times out no earlier than this.
            sent_ms = oldest.sent_ms if oldest is not None else now_ms if self._sock is not None else None
        times = [
            self._until_ms,
            self._timers[0][0] if self._timers else None,
            self._linger_until_ms,
            sent_ms + self._settings.request_timeout_ms if sent_ms is not None else None,
            # A late heartbeat is sent after what delays it, whose end wakes this channel.
            self._beat_ms if self._beat_ms is not None and self._beat_ms > now_ms else None,
        ]
        return min((time for time in times if time is not None), default=None)

    def on_io(self, mask: int) -> None:
        """The socket can be read or written."""
        with self._send_lock:
            try:
                if mask & WRITABLE:
                    self._write()
                    self._watch()
                if mask & READABLE:
                    self._read()
            except (OSError, ProtocolError) as error:
                self._lose(error)

    def close(self, until_ms: int | None = None) -> None:
        """Have the worker send what is left, until `until_ms` at most, then hang up. Thread-safe."""
        self._until_ms = until_ms
        self.is_closing = True
        self.worker.poller.wake()  # wakes also a worker that is about to sleep

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until it has hung up and its connecting thread has ended."""
        self.hung_up.wait(timeout_s)
        if self._connecting is not None:
            self._connecting.join(_GRACE_S)  # a running attempt ends by itself

    def cut(self) -> None:
        """Hang up now, and stop connecting."""
        self._stop.set()
        self.lose()
        if self._opened is not None:
            self._opened.socket.close()
        self.hung_up.set()

    def lose(self) -> None:
        """Close the connection and connect again."""
        with self._send_lock:
            self._lose(None)

    def _wake_for_watermark(self, pusher: Pusher) -> None:
        """The pusher's watermark rose: send it alone if no records come within `watermark_linger_ms`. Thread-safe."""
        linger_ms = self._settings.watermark_linger_ms
        if not linger_ms or (pusher.alone_ms is not None and len(self._in_flight) <= 1):  # the one is just answered
            self.wake(pusher)
            return
        if pusher.is_timed and pusher.watermark_since_ms is not None:
            return
        now_ms = self._clock.monotonic_ms()
        if pusher.watermark_since_ms is None:
            pusher.watermark_since_ms = now_ms
        if not pusher.is_timed:
            pusher.is_timed = True
            self._later.append((now_ms + linger_ms, pusher))
            self.worker.wake()

    def _is_free(self) -> bool:
        """Whether `push` may send a request of one pusher now."""
        if self._sock is None or self._outgoing or self._ready or self._failed is not None or self._settings.linger_ms:
            return False
        return self._slots < self._settings.requests_in_flight_max

    def _keep_connected(self, now_ms: int) -> None:
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is not None and now_ms - oldest.sent_ms >= self._settings.request_timeout_ms:
            self._lose(TimeoutError(f"no answer within {self._settings.request_timeout_ms} ms"))
        if self._failed is not None:
            self._lose(self._failed)
        if self._opened is not None:
            opened, self._opened, self._connecting = self._opened, None, None
            opened.socket.setblocking(False)
            self.away = None
            self._sock, self._protocol = opened.socket, opened.protocol
            self._beat_ms = now_ms if self._beats is not None else None
            self._events = READABLE
            self.worker.poller.register(self._sock, self._events, self)
            _LOG.info("%s is connected", self.replica)
        if self._sock is None and self._connecting is None and not self._stop.is_set():
            threads = self._settings.network.threads
            connecting = threads.thread(self._connect, f"pushrep-connect-{self.replica.index}")
            with suppress(RuntimeError):  # the system has no thread left: the next turn tries again
                connecting.start()
                self._connecting = connecting

    def _connect(self) -> None:
        """Connect, in a thread of its own, until it succeeds."""
        if self._fruitless and self._stop.wait(pause_s(self._settings, self._fruitless)):
            return
        self._fruitless += 1
        last = ""

        def failed(error: BaseException) -> None:
            nonlocal last
            self.away = str(error)
            if str(error) != last:  # logged once, not at every attempt
                last = str(error)
                _LOG.warning("%s can't be reached, trying on: %s", self.replica, error)

        with suppress(PushrepError, OSError):  # stopped
            self._opened = retry_connecting(
                lambda: ReplicaClient(self.replica.address, self._settings), self._settings, self._stop, failed
            )
            if self._stop.is_set():
                self._opened.socket.close()
            else:
                self.worker.wake()

    def _send_ready(self, now_ms: int) -> None:
        settings = self._settings
        while self._ready and not self._outgoing and self._slots < settings.requests_in_flight_max:
            if settings.linger_ms:
                if self._linger_until_ms is None:
                    self._linger_until_ms = now_ms + settings.linger_ms
                if now_ms < self._linger_until_ms:
                    return
                self._linger_until_ms = None
            parts, sents = self._build(now_ms)
            if not parts:
                return
            self._send(parts, sents, now_ms)

    def _send(self, parts: list[AppendRecordsPartition], sents: list[Sent], now_ms: int) -> None:
        assert self._protocol is not None, "there is a socket"
        correlation_id, frame = self._protocol.ask(AppendRecordsRequest(partitions=tuple(parts)))
        self._outgoing = pieces_of(frame)
        file_bytes = bytes_in_files(self._outgoing)
        request = RequestInFlight(now_ms, sents, self._slots_of(parts, file_bytes), file_bytes)
        self._in_flight[correlation_id], self._slots = request, self._slots + request.slots
        for part, sent in zip(parts, sents, strict=True):
            if part.records:
                sent.pusher.sent_records(now_ms, self._settings.watermark_linger_ms)
        self._write()

    def _slots_of(self, parts: list[AppendRecordsPartition], file_bytes: int) -> int:
        settings = self._settings
        is_small = len(parts) * _SMALL_SHARE < _PARTS_MAX and not file_bytes
        if is_small and sum(size_of(part.records) for part in parts) * _SMALL_SHARE < settings.request_bytes_max:
            return max(1, settings.requests_in_flight_max // 2)
        return max(1, file_bytes // settings.request_bytes_max)

    def _beat(self, now_ms: int) -> None:
        """One heartbeat a second, one at a time: it shows that the leader is alive.

        The last one is sent after everything else, whether that was answered or not, so that a closed leader does not
        count as alive, however slow its replica is.
        """
        if self._beats is None or self._beat_ms is None or self._outgoing or self._has_sent_end:
            return
        if self.is_closing and not self._ready:
            self._has_sent_end = True
            if (last := self._beats.last()) is not None:
                self._send_beat(last, now_ms)
        elif now_ms >= self._beat_ms and not self._is_beating:
            self._send_beat(self._beats.request, now_ms)

    def _send_beat(self, request: BeatRequest, now_ms: int) -> None:
        assert self._protocol is not None, "there is a socket"
        correlation_id, frame = self._protocol.ask(request)
        self._outgoing += pieces_of(frame)
        self._in_flight[correlation_id] = RequestInFlight(now_ms, [], 0, 0)
        self._beat_ms, self._is_beating = now_ms + BEAT_MS, True
        self._write()

    def _build(self, now_ms: int) -> tuple[list[AppendRecordsPartition], list[Sent]]:
        """Build a request: each ready pusher once, until it is full. One with more goes to the end of the queue."""
        parts: list[AppendRecordsPartition] = []
        sents: list[Sent] = []
        room, again = self._settings.request_bytes_max, []
        for _ in range(len(self._ready)):
            if room <= 0 or len(parts) >= _PARTS_MAX:
                break
            pusher = self._ready.popleft()
            pusher.is_ready = False  # before it is asked, so that later news make it ready again
            if self._wait_for_company(pusher, now_ms):
                continue
            try:
                found = pusher.next_part(room, file_bytes_max=self._file_bytes_max)
            except OffsetOutOfRange:
                pusher.session.partition.look_at_log_start()  # the log start may have passed the records to send
                self.wake_later(pusher)
                continue
            except (OSError, PushrepError) as error:
                if is_shortage(error):
                    self.wake_later(pusher)
                    continue
                _LOG.error("%s: the log can't be read: %s", pusher.tp, error)
                pusher.end(PushSessionEndReason.LEADER_LOG_ERROR)
                continue
            if found is not None:
                part, sent, size = found
                parts.append(part)
                sents.append(sent)
                room -= size
                if pusher.has_something():
                    again.append(pusher)
        for pusher in again:
            self.wake(pusher)
        return parts, sents

    def _wait_for_company(self, pusher: Pusher, now_ms: int) -> bool:
        """Let a watermark wait a moment for records to join: else each acknowledgement would cause a request."""
        linger_ms = self._settings.watermark_linger_ms
        if not linger_ms or pusher.pending_work() is not PendingWork.WATERMARK:
            return False
        if pusher.watermark_since_ms is None:
            pusher.watermark_since_ms = now_ms
        due_ms = pusher.watermark_since_ms + linger_ms
        if now_ms >= due_ms or (pusher.alone_ms is not None and not self._in_flight):
            pusher.alone_ms = now_ms
            return False
        if not pusher.is_timed:
            pusher.is_timed = True
            heapq.heappush(self._timers, (due_ms, next(self._tickets), pusher))
        return True

    def _write(self) -> None:
        assert self._sock is not None, "there is a socket"
        try:
            while self._outgoing:
                send_some(self._sock, self._outgoing)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass

    def _watch(self) -> None:
        """Poll the socket for writing while a rest is unsent."""
        wanted = READABLE | (WRITABLE if self._outgoing else 0)
        if wanted != self._events:
            self._events = wanted
            self.worker.poller.modify(self._sock, wanted, self)

    def _read(self) -> None:
        sock, protocol = self._sock, self._protocol
        assert sock is not None, "there is a socket"
        assert protocol is not None, "it speaks"
        while True:
            try:
                count = sock.recv_into(protocol.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                raise ConnectionError("the replica closed the connection")
            for answer in protocol.buffer_updated(count):
                if isinstance(answer, CallAnswer):
                    # In flight until every part is done: if one raises, the others fail with the connection.
                    request = self._in_flight[answer.correlation_id]
                    if isinstance(answer.message, AppendRecordsResponse):
                        self._answered(request, answer.message)
                    elif isinstance(answer.message, BeatResponse):
                        self._beat_answered(answer.message)
                    if self._in_flight.pop(answer.correlation_id, None) is not None:
                        self._slots -= request.slots
            if self._sock is not sock or not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
                return

    def _beat_answered(self, response: BeatResponse) -> None:
        self._is_beating = False
        if self._beats is None:
            return
        ours = (self._beats.request.generation, self._beats.request.leader_epoch)
        if (response.generation, response.grant_epoch) != ours:
            self._beats.on_another(self.replica.index, response.generation, response.grant_epoch, response.grant_leader)
        elif response.error_code is ErrorCode.NONE:
            self._beats.on_own(self.replica.index, response.stands_by)

    def _answered(self, request: RequestInFlight, response: AppendRecordsResponse) -> None:
        if response.error_code is not ErrorCode.NONE or len(response.results) != len(request.parts):
            results = [AppendRecordsResult(error_code=response.error_code)] * len(request.parts)
        else:
            results = list(response.results)
            self._fruitless = 0
            self._requests.add((self._clock.monotonic_ms() - request.sent_ms) / 1000)
        for sent, result in zip(request.parts, results, strict=True):
            sent.pusher.on_result(sent, result)
            self.notify(sent.pusher)

    def _lose(self, error: BaseException | None) -> None:
        """The connection is lost: requests in flight are sent again on the next one."""
        self._failed = None
        if self._sock is None:
            return
        if error is not None:
            self._lost[self.replica.index] += 1
            _LOG.warning("%s is lost: %s", self.replica, error)
        self.worker.poller.unregister(self._sock)
        with suppress(OSError):
            self._sock.close()
        self._sock = self._protocol = self._linger_until_ms = None
        self._outgoing, self._is_beating, self._beat_ms = [], False, None
        given_up, self._in_flight, self._slots = self._in_flight, {}, 0
        least_bytes = min(self._settings.request_bytes_max, self._file_bytes_max)
        if any(request.file_bytes > least_bytes for request in given_up.values()):
            self._file_bytes_max = max(least_bytes, self._file_bytes_max // 2)
        sent_by = (sent.pusher for request in given_up.values() for sent in request.parts)
        for pusher in dict.fromkeys([*sent_by, *self.pushers]):
            pusher.on_disconnect()
            self.notify(pusher)


class PushWorker:
    """Runs channels of any manager. Thread-safe: `add`, `wake`, `start`, `stop`."""

    def __init__(self, name: str, clock: Clock, network: Network) -> None:
        self.poller = network.poller()
        self._clock = clock
        self.channels: list[Channel] = []
        self._is_asleep = False
        self._is_stopping = False
        self._thread = network.threads.thread(self._run, name)

    def add(self, channel: Channel) -> None:
        """Run it from now on, until it is closed."""
        self.channels.append(channel)
        self.wake()

    def wake(self) -> None:
        """End the worker's sleep."""
        if self._is_asleep:
            self._is_asleep = False
            self.poller.wake()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; channels that are not closed yet hang up."""
        if self._thread.is_alive():
            self._is_stopping = True
            self.poller.wake()
            self._thread.join()
        self.poller.close()

    def _run(self) -> None:
        wake_ms = self._pump()  # channels that were woken before the start
        while not self._is_stopping:
            self._is_asleep = True  # from here on `wake` has to end the wait
            if any(channel.can_send() for channel in self.channels):
                wake_ms = 0
            timeout_s = None if wake_ms is None else max(0, wake_ms - self._clock.monotonic_ms()) / 1000
            ready = self.poller.select(timeout_s)
            self._is_asleep = False
            for channel, mask in ready:
                self._guarded(channel, channel.on_io, mask)
            wake_ms = self._pump()
        for channel in self.channels:
            channel.cut()

    def _pump(self) -> int | None:
        earliest: int | None = None
        for channel in list(self.channels):
            now_ms = self._clock.monotonic_ms()
            wake_ms = None if channel.is_done(now_ms) else self._guarded(channel, channel.pump, now_ms)
            if channel.is_done(now_ms):
                channel.cut()
                self.channels.remove(channel)
                continue
            if wake_ms is not None and (earliest is None or wake_ms < earliest):
                earliest = wake_ms
        return earliest

    def _guarded(self, channel: Channel, act: Callable[[int], int | None], argument: int) -> int | None:
        """Call `act`; a bug in it costs one connection, not the shared thread."""
        try:
            return act(argument)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged and the connection made anew
            _LOG.exception("%s: the connection is given up", channel.replica)
            channel.lose()
            return None


class Workers:
    """The workers of one manager, or of all managers of a process."""

    def __init__(self, count: int, clock: Clock, network: Network) -> None:
        self.workers = [PushWorker(f"pushrep-push-{n}", clock, network) for n in range(count)]
        self._is_started = False

    def start(self) -> None:
        """Begin. Once is enough."""
        if not self._is_started:
            self._is_started = True
            for worker in self.workers:
                worker.start()

    def least_loaded(self) -> PushWorker:
        """The worker for the next channel."""
        return min(self.workers, key=lambda worker: len(worker.channels))

    def stop(self) -> None:
        """End the threads."""
        for worker in self.workers:
            worker.stop()


_OF_PROCESS = shared_by_process(Workers.stop)


def workers_for(settings: PushSettings, clock: Clock) -> Workers:
    """The Workers shared by all managers with as many workers. Each call needs a `release_workers`."""
    if settings.network is not REAL_NETWORK or clock is not SYSTEM_CLOCK:
        return Workers(settings.max_workers, clock, settings.network)
    return _OF_PROCESS.acquire(settings.max_workers, lambda: _started(settings, clock))


def release_workers(workers: Workers) -> None:
    """Release them, after closing their channels; the threads end with the last manager."""
    if not _OF_PROCESS.release(workers):
        workers.stop()


def _started(settings: PushSettings, clock: Clock) -> Workers:
    workers = Workers(settings.max_workers, clock, settings.network)
    workers.start()
    return workers
