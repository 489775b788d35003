"""RemoteSession: the subscriber's side of a node's session: takes blocks, gives credit, reconnects.

    connect ─ StartReplay ─ Attach ─▶ ReplayData ... ─▶ queue ─ step ─▶ block      credit as blocks are taken
       ▲                                 └ CRC checked here, of every batch
       └──────── broken, silent, stalled, the node stops: from (position, epoch before it), as long as `reconnect`
       allows

When it reconnects it asks for the rest of its request: the remaining records of n, or the end that TO_END had at first.

RemoteReplays is ReplayClient's implementation for a node: a connection for requests, and one for each replay.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from filtering.closing import closed_on_error
from filtering.retry import Backoff
from pushrep.env import Clock
from pushrep.env.network import Address
from pushrep.log.directory_files import is_log_name, parse_log_name
from pushrep.records import RecordBatch
from pushrep.records.header import SplitBatches, split_batches
from pushrep.replay import events as e
from pushrep.replay.node_connection import (
    NodeAccess,
    NodeConnection,
    NodeUnreachable,
    accepted,
    request_to_wire,
    started,
)
from pushrep.replay.plan import TO_END, RecordingInfo, ReplayedBlock, ReplayRefused, ReplayRequest, Span
from pushrep.replay.waiting import ReplayWaiter
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState, ReplayEndReason
from pushrep.wire.values import OFFSET_MAX, Struct

_LATER = frozenset(
    {ErrorCode.MAX_REPLAYS, ErrorCode.NODE_STOPPING, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.UNKNOWN_REPLAY}
)


def end_of_refused(refused: ReplayRefused, at: int, left: int | None, until: int | None) -> e.SendEnd | None:
    """The end of a refused replay at offset `at`; None: ask again later. left: records of n that are still to come.

    until: the end that TO_END had at the first request.

        the node is full, stops, was slow              wait
        its new session was given up before it came    wait                this machine was stopped before it attached
        TRUNCATED; its position is above the end       TRUNCATED           what was given is not in the log any more
        its position is below the start                ERROR               retention removed what comes next
        the recording is unknown                       RECORDING_DELETED
        it stands at the end: n records                LIMIT_REACHED       the log was stopped
                              TO_END, all of it given  LIMIT_REACHED
                              TO_END, more was there   wait                a restarted node's watermark is late
        anything else                                  ERROR
    """
    code, start, end = refused.code, refused.start, refused.end
    is_shorter = code is ErrorCode.INVALID_POSITION and end is not None and at > end
    if code in _LATER:
        return None
    if code is ErrorCode.TRUNCATED or is_shorter:
        cut = at if end is None else min(at, end)
        return e.SendEnd(ReplayEndReason.TRUNCATED, at, ErrorCode.TRUNCATED, refused.why, cut_offset=cut)
    if code is ErrorCode.INVALID_POSITION and start is not None and at < start:
        why = f"retention took what lies below offset {start}"
        return e.SendEnd(ReplayEndReason.ERROR, at, ErrorCode.OFFSET_OUT_OF_RANGE, why)
    if code is ErrorCode.UNKNOWN_RECORDING:
        why = "the recording was deleted"
        return e.SendEnd(ReplayEndReason.RECORDING_DELETED, at, ErrorCode.RECORDING_DELETED, why)
    if is_at_end(refused, at) and (left is not None or until is not None):
        has_all = until is None or at >= until
        return e.SendEnd(ReplayEndReason.LIMIT_REACHED, at) if has_all else None
    return e.SendEnd(ReplayEndReason.ERROR, at, code, refused.why, segment=refused.segment)


def is_at_end(refused: ReplayRefused, at: int) -> bool:
    """Whether it was refused because there is nothing more to replay from `at` on."""
    if refused.code is ErrorCode.EMPTY_RECORDING:
        return True
    start, end = refused.start, refused.end
    is_inside = start is not None and end is not None and start <= at <= end
    return refused.code is ErrorCode.INVALID_POSITION and is_inside


_GOODBYE_S = 1.0
_COMES_AGAIN = frozenset({ErrorCode.STALLED, ErrorCode.NODE_STOPPING})
"""Ends after which the session reconnects without telling its reader: it was too slow, or the node stops."""


class RemoteSession:
    """One replay over the network, a Feed. request: None if another client has started the session."""

    def __init__(
        self,
        address: Address,
        recording_id: int,
        request: ReplayRequest | None,
        settings: NodeAccess,
        clock: Clock,
    ) -> None:
        self.end: e.SendEnd | None = None
        self._address, self._recording_id, self._request = address, recording_id, request
        self._settings, self._clock = settings, clock
        self.session_id = 0
        """All 64 bits of it; after a reconnect another one."""
        self.position = 0
        """The offset after the last delivered block."""
        self._attached: NodeConnection | None = None
        self._correlation_id = self._received = self._tip = 0
        self._until: int | None = None
        self._left = request.length if request is not None and isinstance(request.length, int) else None
        self._epoch = request.epoch_before if request is not None else None
        self._blocks: deque[ReplayedBlock] = deque()
        self._pending_end: e.SendEnd | None = None
        self._taken_bytes = 0  # by the program, and no credit given for them yet
        self._heard_ms = self._lost_ms = self._retry_ms = clock.monotonic_ms()
        self._failures = 0
        self._bad_at = -1
        self._expected, self._is_inside = 0, True  # the first batch may begin below the position
        self._is_short = False
        self._is_stopped = False
        self._using = threading.Lock()
        self._waiting = ReplayWaiter(settings.network)

    # ---- what is known of it

    @property
    def tip(self) -> int:
        """The end of readable records by the node's last message."""
        return max(self._tip, self.position)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.end is not None

    # ---- beginning

    def start(self, connection: NodeConnection, response: wire.StartReplayResponse) -> None:
        """Subscribe to the session in `response`. Raises ReplayRefused, NodeUnreachable."""
        self.position = self._received = response.start_offset
        self._tip = max(0, response.end_offset)
        if self._request is not None and self._request.length is TO_END:
            self._until = response.end_offset
        self.attach(connection, response.session_id)

    def attach(self, connection: NodeConnection, session_id: int) -> None:
        """The same for a session that is known by its id alone."""
        self._taken_bytes = 0
        request = wire.AttachRequest(session_id=session_id, credit_bytes=self._settings.credit_bytes)
        accepted(connection.ask(request, wire.AttachResponse))
        connection.socket.settimeout(0)
        self._expected = self._received
        self._attached, self._correlation_id, self.session_id = connection, connection.correlation_id, session_id
        self._heard_ms = self._clock.monotonic_ms()

    # ---- going on

    @property
    def step_waits(self) -> bool:
        """Whether the next step connects, or ends the session at the node, and so may wait."""
        return self._attached is None or self._is_stopped

    def step(self) -> ReplayedBlock | None:
        """A block, or None. Waits only to reconnect."""
        with self._using:
            if self._is_stop_sent() or self.end is not None:
                return None
            if not self._blocks:
                self._read_received()
            if self._blocks:
                block = self._blocks.popleft()
                self.position = block.end
                self._give_credit(sum([len(batch.data) for batch in block.batches]))
                return block
            if self._pending_end is not None:
                self.end, self._pending_end = self._pending_end, None
                self._hang_up()
            return None

    def rest(self) -> None:
        """While paused: receive what was sent, so that the node does not block; give no credit."""
        with self._using:
            if not self._is_stop_sent():
                self._read_received()

    def _read_received(self) -> None:
        if self._pending_end is not None:
            return
        if self._attached is None:
            self._reconnect_if_due()
        attached = self._attached
        if attached is None:
            return
        try:
            for found in attached.receive():
                self._on_message(found.message)
                if self._attached is not attached:
                    return
        except NodeUnreachable as error:
            self._lost(error.why)
        else:
            if self._clock.monotonic_ms() - self._heard_ms > self._settings.silence_max_ms:
                self._lost("it has not said a word")

    def _on_message(self, message: Struct) -> None:
        self._heard_ms = self._clock.monotonic_ms()
        if isinstance(message, wire.ReplayData):
            self._failures = 0
            self._tip = message.tip_offset
            self._begins_at(message.start_offset)
            if message.records:
                self._on_block(message)
        elif isinstance(message, wire.ReplayEnd):
            self._on_end(message)

    def _begins_at(self, offset: int) -> None:
        """The position of a session that is known by its id alone, from its first message."""
        if self._request is None and not self._received:
            self.position = self._received = self._expected = offset

    def _on_block(self, data: wire.ReplayData) -> None:
        view = data.records[0]
        assert isinstance(view, memoryview), "a decoded message's records are a view"
        found = split_batches(view)
        if found.placed:
            self._on_batches(data, view, found)
        if found.why_not is not None and self._pending_end is None:
            # The log may have been cut meanwhile, which reconnecting shows. If it is damaged, the node says where.
            if self._bad_at == self._received or not self._may_reconnect():
                self._fail(ErrorCode.CORRUPT_MESSAGE, found.why_not)
            else:
                self._bad_at = self._received
                self._lost(found.why_not)

    def _on_batches(self, data: wire.ReplayData, view: memoryview, found: SplitBatches) -> None:
        """The whole batches at the beginning of a block: all of it, or those before damage."""
        if found.why_not is not None:
            data = replace(data, end_offset=min(data.end_offset, found.placed[-1][1].next_offset))
        batches = [RecordBatch(view[at : at + header.size_bytes], header) for at, header in found.placed]
        why_not = self._why_not_next(data, batches, joins=found.joins)
        if why_not is not None:
            self._fail(ErrorCode.CORRUPT_MESSAGE, f"offset {self._received}: {why_not}")
            return
        end = data.end_offset if self._until is None else min(data.end_offset, self._until)
        self._expected, self._is_inside = data.end_offset, data.end_offset < batches[-1].header.next_offset
        if self._left is not None:
            self._left -= sum(Span.of(batch.header).count_in(data.start_offset, end) for batch in batches)
        self._received, self._epoch = end, batches[-1].header.leader_epoch
        self._blocks.append(ReplayedBlock(batches, data.start_offset, end))

    def _why_not_next(self, data: wire.ReplayData, batches: list[RecordBatch], *, joins: bool) -> str | None:
        """Why these batches can't follow those received, None if they can: no CRC covers their offsets."""
        expected, first, last = self._expected, batches[0].header, batches[-1].header
        why_not = None if joins else "its batches do not follow each other"
        is_begun = self._is_inside and first.base_offset < expected < first.next_offset
        if first.base_offset != expected and not is_begun:
            why_not = f"base offset {first.base_offset} came where {expected} is expected"
        begins = max(last.base_offset, data.start_offset)
        if why_not is None and not begins < data.end_offset <= last.next_offset:
            why_not = f"it is said to go to {data.end_offset}, its last batch has [{begins}, {last.next_offset})"
        if why_not is None and data.start_offset != expected:
            why_not = f"it is said to begin at {data.start_offset}"
        return why_not

    def _on_end(self, end: wire.ReplayEnd) -> None:
        is_short = self._is_short and end.reason is ReplayEndReason.LIMIT_REACHED
        if (end.error_code in _COMES_AGAIN or is_short) and self._may_reconnect():
            self._lost(end.error_message)
            return
        is_cut = end.reason is ReplayEndReason.TRUNCATED
        self._begins_at(end.offset)
        if end.reason is ReplayEndReason.LIMIT_REACHED and end.offset > self._expected:
            why = f"it is said to end at {end.offset}, and nothing came from {self._expected} on"
            self._fail(ErrorCode.CORRUPT_MESSAGE, f"offset {self._received}: {why}")
            return
        self._pending_end = e.SendEnd(
            end.reason,
            self._received,
            end.error_code,
            end.error_message,
            segment=end.segment if end.segment >= 0 else None,
            cut_offset=end.offset if is_cut else None,
            leader_epoch=end.leader_epoch,
        )

    def _give_credit(self, size_bytes: int) -> None:
        """The program has taken so much: give credit, a quarter of what may be in flight or more."""
        self._taken_bytes += size_bytes
        is_due = self._taken_bytes >= self._settings.credit_bytes // 4
        if self._attached is None or self._pending_end is not None or not is_due:
            return
        credit, self._taken_bytes = wire.Credit(session_id=self.session_id, bytes=self._taken_bytes), 0
        try:
            self._attached.send_event(self._correlation_id, credit)
        except NodeUnreachable as error:
            self._lost(error.why)

    # ---- coming again

    def _may_reconnect(self) -> bool:
        return self._settings.reconnect and self._request is not None

    def _lost(self, why: str) -> None:
        self._hang_up()
        if not self._may_reconnect():
            self._fail(ErrorCode.REQUEST_TIMED_OUT, f"the connection broke: {why}")
        elif self._failures:  # nothing came since it was lost before
            self._later(why)
        else:
            self._failures, self._lost_ms = 1, self._clock.monotonic_ms()

    def _reconnect_if_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        request = self._rest_of_request()
        if request is None or now_ms < self._retry_ms:
            return
        try:
            with closed_on_error(NodeConnection(self._address, self._settings)) as connection:
                self.attach(connection, self._started_again(connection, request))
        except NodeUnreachable as error:
            self._later(error.why)
        except ReplayRefused as refused:
            end = end_of_refused(refused, self._received, self._left, self._until)
            if end is None:
                self._later(refused.why)
            else:
                self._pending_end = end

    def _started_again(self, connection: NodeConnection, request: ReplayRequest) -> int:
        try:
            response = started(connection, request_to_wire(self._recording_id, request))
        except ReplayRefused as refused:
            self._until_what_is_left(connection, refused)
            raise
        # After a crash of the node its watermark may be lower, and TO_END would end below its first end.
        self._is_short = self._until is not None and response.end_offset < self._until
        return response.session_id

    def _until_what_is_left(self, connection: NodeConnection, refused: ReplayRefused) -> None:
        """If the log was cut, TO_END now ends at its new end."""
        if self._until is None or not is_at_end(refused, self._received):
            return
        try:
            started(connection, request_to_wire(self._recording_id, ReplayRequest(0, OFFSET_MAX, bound="written")))
        except ReplayRefused as outside:  # no log has that offset: the refusal has its range
            if outside.code is ErrorCode.INVALID_POSITION and outside.end is not None:
                self._until = min(self._until, outside.end)

    def _rest_of_request(self) -> ReplayRequest | None:
        """The rest of the request; None, and the session ends, if there is none."""
        request = self._request
        assert request is not None, "only a request is made again"
        if self._left == 0 or (self._until is not None and self._received >= self._until):
            self._pending_end = e.SendEnd(ReplayEndReason.LIMIT_REACHED, self._received)
            return None
        length = request.length if self._left is None else self._left
        return replace(request, position=self._received, epoch_before=self._epoch, length=length)

    def _later(self, why: str) -> None:
        now_ms = self._clock.monotonic_ms()
        self._failures += 1
        if now_ms - self._lost_ms > self._settings.reconnect_for_ms:
            self._fail(ErrorCode.REQUEST_TIMED_OUT, f"no way back for {now_ms - self._lost_ms} ms: {why}")
            return
        first_s, longest_s = self._settings.backoff_min_ms / 1000, self._settings.backoff_max_ms / 1000
        self._retry_ms = now_ms + round(1000 * Backoff(first_s, longest_s, least=0.5).pause_s(self._failures))

    def _fail(self, code: ErrorCode, why: str) -> None:
        self._hang_up()
        self._pending_end = e.SendEnd(ReplayEndReason.ERROR, self._received, code, why)

    # ---- waiting

    def wait(self, timeout_s: float) -> None:
        """Until something comes."""
        self._waiting.wait(self._socket(), self._wait_s(timeout_s))

    async def wait_async(self, timeout_s: float) -> None:
        """Until something comes."""
        await self._waiting.wait_async(self._socket(), self._wait_s(timeout_s))

    def wake(self) -> None:
        """End a wait."""
        self._waiting.wake()

    def _socket(self) -> Any:
        return self._attached.socket if self._attached is not None else None

    def _wait_s(self, timeout_s: float) -> float:
        if self._attached is None:
            return min(timeout_s, max(0.001, (self._retry_ms - self._clock.monotonic_ms()) / 1000))
        return timeout_s

    # ---- the end

    def stop(self) -> None:
        """End it. The node's slot is free when this returns or, if another thread uses the session, soon after."""
        self._is_stopped = True
        if self._using.acquire(blocking=False):
            try:
                self._is_stop_sent()
            finally:
                self._using.release()
        else:
            self.wake()

    def close(self) -> None:
        """Close the connection."""
        with self._using:
            self._is_stop_sent()
            self._hang_up()
            self._waiting.close()

    def _is_stop_sent(self) -> bool:
        """Whether it was stopped; the first call then tells the node."""
        if not self._is_stopped:
            return False
        if self.end is None:
            self.end = self._pending_end or e.SendEnd(ReplayEndReason.STOPPED, self.position)
            if self._attached is not None:
                with suppress(NodeUnreachable, OSError):
                    self._attached.socket.settimeout(_GOODBYE_S)
                    self._attached.ask(wire.StopReplayRequest(session_id=self.session_id), wire.StopReplayResponse)
            self._hang_up()
        return True

    def _hang_up(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None


S = TypeVar("S", bound=Struct)
_MAY_BE_REPEATED = (wire.DescribeRecordingsRequest, wire.StopReplayRequest, wire.StartReplayRequest)
"""A started session without a subscriber ends by itself."""


@dataclass(slots=True)
class Deletion:
    """A recording that is being deleted: it can't be replayed any more; `wait` until its files are removed."""

    recording_id: int
    _connection: NodeConnection = field(repr=False)
    _correlation_id: int = field(repr=False)

    def wait(self, timeout_s: float = 60) -> int:
        """Bytes that were freed. Raises ReplayRefused if files could not be removed, NodeUnreachable."""
        try:
            done = self._connection.event_of(self._correlation_id, timeout_s)
        finally:
            self._connection.close()
        assert isinstance(done, wire.DeleteDone), "a deletion has no other event"
        if done.error_code is not ErrorCode.NONE:
            raise ReplayRefused(done.error_code, done.error_message)
        return done.freed_bytes


class RemoteReplays:
    """ReplayClient's implementation for a node. Thread-safe. Everything raises NodeUnreachable."""

    def __init__(self, address: Address, settings: NodeAccess, clock: Clock) -> None:
        self._address, self._settings, self._clock = address, settings, clock
        self._lock = threading.Lock()
        self._asking: NodeConnection | None = None
        self._started: dict[int, tuple[int, ReplayRequest, wire.StartReplayResponse]] = {}
        self._running: set[RemoteSession] = set()

    def recordings(self, topic: str, from_id: int, limit: int | None) -> list[RecordingInfo]:
        """By id. Raises ReplayRefused (UNAUTHORISED)."""
        there = (one for one in self._described(topic, from_id, limit) if one.state is not RecordingState.DELETED)
        return [_info(one) for one in islice(there, limit)]

    def tip_of(self, recording: int | str, bound: str) -> int:
        """Where what comes from now on begins. Raises ReplayRefused."""
        recording_id = self.id_of(recording)
        if bound == "stable":
            tip = next((one.tip_offset for one in self._described("") if one.recording_id == recording_id), None)
            if tip is None:
                raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording}")
            return tip
        asked = request_to_wire(recording_id, ReplayRequest(recording_id, OFFSET_MAX, bound=bound))
        response = self.ask(asked, wire.StartReplayResponse)  # no log has that offset: the refusal has its range
        if response.error_code is not ErrorCode.INVALID_POSITION:
            raise ReplayRefused(response.error_code, response.error_message)
        return response.end_offset

    def replay(self, request: ReplayRequest) -> RemoteSession:
        """Start a session on a connection of its own, and subscribe to it. Raises ReplayRefused."""
        recording_id = self.id_of(request.recording)
        with closed_on_error(NodeConnection(self._address, self._settings)) as connection:
            response = started(connection, request_to_wire(recording_id, request))
            return self._attached(connection, recording_id, request, response)

    def start_replay(self, request: ReplayRequest) -> int:
        """Start a session without a subscriber. Raises ReplayRefused."""
        recording_id = self.id_of(request.recording)
        response = accepted(self.ask(request_to_wire(recording_id, request), wire.StartReplayResponse))
        self._started[response.session_id] = (recording_id, request, response)
        return response.session_id

    def attach(self, session_id: int) -> RemoteSession:
        """The one subscriber of a session that has none yet. Raises ReplayRefused (UNKNOWN_REPLAY)."""
        known = self._started.pop(session_id, None)
        with closed_on_error(NodeConnection(self._address, self._settings)) as connection:
            if known is not None:
                return self._attached(connection, *known)
            session = RemoteSession(self._address, 0, None, self._settings, self._clock)
            session.attach(connection, session_id)
        self._running.add(session)
        return session

    def stop(self, session_id: int) -> None:
        """End a session; unknown ids, and those that are over, are fine."""
        self._started.pop(session_id, None)
        self.ask(wire.StopReplayRequest(session_id=session_id), wire.StopReplayResponse)

    def stop_all(self, recording: int | str) -> int:
        """End all sessions of a recording; how many. Raises ReplayRefused."""
        response = self.ask(wire.StopReplayRequest(recording_id=self.id_of(recording)), wire.StopReplayResponse)
        if response.error_code is not ErrorCode.NONE:
            raise ReplayRefused(response.error_code, response.error_code.meaning)
        return response.stopped

    def close(self) -> None:
        """End everything that was started here; a second call is fine."""
        for session in list(self._running):
            session.stop()
        self._running.clear()
        for session_id in list(self._started):
            with suppress(NodeUnreachable):
                self.stop(session_id)
        with self._lock:
            self._hang_up()

    def delete(self, recording: int | str, *, force: bool, outbox_gone: bool) -> Deletion:
        """Mark it as deleted; its files are removed in the background. Raises ReplayRefused."""
        recording_id = self.id_of(recording)
        with closed_on_error(NodeConnection(self._address, self._settings)) as connection:
            asked = wire.DeleteRequest(recording_id=recording_id, force=force, outbox_gone=outbox_gone)
            accepted(connection.ask(asked, wire.DeleteResponse))
        return Deletion(recording_id, connection, connection.correlation_id)

    # ---- inside

    def _attached(
        self,
        connection: NodeConnection,
        recording_id: int,
        request: ReplayRequest,
        response: wire.StartReplayResponse,
    ) -> RemoteSession:
        session = RemoteSession(self._address, recording_id, request, self._settings, self._clock)
        session.start(connection, response)
        self._running = {one for one in self._running if not one.is_over} | {session}
        return session

    def id_of(self, recording: int | str) -> int:
        """The id of a recording given by id or name. Raises ReplayRefused."""
        if not isinstance(recording, str):
            return recording
        found = []
        if is_log_name(recording):
            topic, partition = parse_log_name(recording)
            found = [
                one.recording_id
                for one in self._described(topic)
                if one.tp.partition == partition and one.state is not RecordingState.DELETED
            ]
        if not found:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording}")
        if len(found) > 1:
            ids = ", ".join(map(str, found))
            why = f"several outboxes have a log {recording} here: name it by its id, one of {ids}"
            raise ReplayRefused(ErrorCode.INVALID_REQUEST, why)
        return found[0]

    def _described(self, topic: str, first: int = 0, limit: int | None = None) -> Iterator[wire.Recording]:
        """All of them, deleted ones included, asked for by pages of `limit`."""
        more = {} if limit is None else {"limit": max(1, limit)}
        while True:
            asked = wire.DescribeRecordingsRequest(from_recording_id=first, topic=topic, **more)
            response = accepted(self.ask(asked, wire.DescribeRecordingsResponse))
            yield from response.recordings
            if not response.has_more:
                return
            first = response.recordings[-1].recording_id + 1

    def ask(self, request: Struct, answer: type[S]) -> S:
        """Ask the node; if the idle connection was broken and the request may be repeated, reconnect once."""
        with self._lock:
            may_be_old = self._asking is not None and isinstance(request, _MAY_BE_REPEATED)
            while True:
                try:
                    if self._asking is None:
                        self._asking = NodeConnection(self._address, self._settings)
                    found = self._asking.ask(request, answer)
                except NodeUnreachable:
                    self._hang_up()
                    if not may_be_old:
                        raise
                    may_be_old = False
                else:
                    if getattr(found, "error_code", None) is ErrorCode.UNAUTHORISED:
                        self._hang_up()  # as the node does, if this identity has no role at all
                    return found

    def _hang_up(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None


def _info(one: wire.Recording) -> RecordingInfo:
    is_live = one.stop_offset < 0
    return RecordingInfo(
        recording_id=one.recording_id,
        topic=one.tp.topic,
        partition=one.tp.partition,
        log_id=one.tp.topic_id,
        start_offset=one.start_offset,
        stable_offset=one.tip_offset,
        end_offset=one.tip_offset if is_live else one.stop_offset,
        is_live=is_live,
        state=one.state,
        outbox_id=one.outbox_id,
        damaged_from=one.damaged_from if one.damaged_from >= 0 else None,
        invalid=one.invalid,
        origin=one.origin,
    )
