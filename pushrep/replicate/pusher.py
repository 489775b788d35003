"""Pusher: decides what is sent next to one replica of one partition.

    on_leader_append ──▶ queue of Buffered ──┐
    the log (transition, gaps, evicted) ─────┴─▶ part of a request ──▶ in flight ──▶ answer: released, or sent again

Its channel's worker takes answers and builds requests, except those that `Channel.push` builds in the appending thread;
appends come from any thread. The log is read with no lock held. Nothing of the queue is sent before the session's first
success: until then one request at a time checks whether the logs agree, and carries the transition records.

Records kept in memory for replicas that have not acknowledged them: a bounded cache over the log.

    append ──▶ Buffered(base, end, parts, users=2) ──▶ queue of replica 1, queue of replica 2; the bytes are there once
                          │ the last user releases it, or it is evicted for a newer one
                          ▼
                     parts = None        a replica that still wants it reads the log

Queued and in-flight records both count. Eviction takes the oldest of all partitions first: they belong to the slowest
replica, which reads the log anyway.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from pushrep.election.messages import AppendRecordsPartition, PushSessionEndReason
from pushrep.election.push_session import SessionState
from pushrep.log.reader import LogSlices
from pushrep.records import CorruptRecordBatch
from pushrep.records.header import split_batches
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.led_partition import PushSession
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult
from pushrep.wire.values import Buffer, FileSlice, Part, size_of

_SWEEP_MIN = 1024


class Buffered:
    """The records [base_offset, end_offset) of one append; `parts` is None once they are evicted or released."""

    __slots__ = ("base_offset", "end_offset", "parts", "size_bytes", "users")

    def __init__(self, base_offset: int, end_offset: int, parts: tuple[Buffer, ...], users: int) -> None:
        self.base_offset, self.end_offset = base_offset, end_offset
        self.parts: tuple[Buffer, ...] | None = parts
        self.size_bytes = sum(map(len, parts))
        self.users = users


class MemoryTracker:
    """Limits the buffered bytes to `limit_bytes`. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.evicted_bytes = 0
        """Bytes evicted since the start, which are read from the log again if they are still needed."""
        self._oldest: deque[Buffered] = deque()
        self._live = 0
        self._lock = threading.Lock()

    def hold(self, base_offset: int, end_offset: int, parts: tuple[Buffer, ...], users: int) -> Buffered | None:
        """Buffer these records for so many users; None if they exceed the limit."""
        entry = Buffered(base_offset, end_offset, parts, users)
        with self._lock:
            if entry.size_bytes > self.limit_bytes:
                return None
            while self.used_bytes + entry.size_bytes > self.limit_bytes:
                if (oldest := self._oldest.popleft()).parts is not None:
                    self.evicted_bytes += oldest.size_bytes
                    self._drop(oldest)
            self.used_bytes += entry.size_bytes
            self._live += 1
            self._oldest.append(entry)
            if len(self._oldest) > _SWEEP_MIN + 2 * self._live:
                self._oldest = deque(held for held in self._oldest if held.parts is not None)
        return entry

    def release(self, entry: Buffered) -> None:
        """One user does not need it any more."""
        with self._lock:
            entry.users -= 1
            if entry.users == 0 and entry.parts is not None:
                self._drop(entry)

    def _drop(self, entry: Buffered) -> None:
        entry.parts = None
        self.used_bytes -= entry.size_bytes
        self._live -= 1


_ONE_AT_A_TIME = (SessionState.STARTING, SessionState.REREADING)  # a tuple of two, because a set would hash in Python
_SLICE_BYTES_MIN = 64 << 10
_NOTHING: "deque[Buffered]" = deque(maxlen=0)  # shared by pushers without appends, of which there may be ten thousand


class Sent(NamedTuple):
    """A part of a request in flight. sequence: -1 for the end-of-session request."""

    pusher: "Pusher"
    sequence: int


class PendingWork(Enum):
    """What a pusher has to send now."""

    NOTHING = auto()
    WATERMARK = auto()
    """Only a risen watermark that no request has carried yet."""
    REQUEST = auto()
    """Records, a request without records, or the end of the session."""


class Records(NamedTuple):
    """Whole batches: the offsets [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    parts: tuple[Part, ...]
    size_bytes: int


class Pusher:
    """One replica of one partition, with a session. is_ready: in its channel's queue; is_timed: among its timers."""

    __slots__ = (
        "_end_request",
        "_lock",
        "_memory",
        "_queue",
        "_shipped",
        "_slices",
        "_taken",
        "alone_ms",
        "end_sent",
        "failures",
        "is_ready",
        "is_timed",
        "session",
        "tp",
        "transition_end",
        "watermark_since_ms",
    )

    def __init__(self, session: PushSession, memory: MemoryTracker) -> None:
        self.session, self.tp = session, session.partition.tp
        self.is_ready = self.is_timed = False
        self.failures = 0
        """Retriable errors in a row, for the pause before the next request."""
        self.transition_end = session.partition.leader.log.log_end_offset
        self._memory = memory
        self.watermark_since_ms: int | None = None
        """Since when a watermark waits for records to be sent with; None if none waits."""
        self.alone_ms: int | None = None
        """When a watermark was last sent alone; None while records come soon enough for the next one to wait."""
        self._queue = self._taken = _NOTHING
        self._slices: LogSlices | None = None  # kept while the log is being read
        self._shipped = (-1, -1)  # HWM and LSO of the last request
        self._end_request: AppendRecordsPartition | None = None
        self.end_sent: Future[bool] | None = None
        """For an ended session: done when the replica got the end request, or it can't be sent."""
        self._lock = threading.Lock()  # guards the queue; never held during I/O

    def offer(self, entry: Buffered) -> None:
        """Add appended records."""
        with self._lock:
            if self.session.ended is None:
                if self._queue is _NOTHING:
                    # Taken entries were sent or skipped; they are released when they are acknowledged.
                    self._queue, self._taken = deque(), deque()
                while self._queue and self._queue[0].parts is None:
                    self._queue.popleft()  # evicted: the log has them
                self._queue.append(entry)
                return
        self._memory.release(entry)

    def has_something(self) -> bool:
        """Whether there is something to send."""
        return self.pending_work() is not PendingWork.NOTHING

    def pending_work(self) -> PendingWork:
        """The kind of the next request."""
        if self._end_request is not None:
            return PendingWork.REQUEST
        leader = self.session.partition.leader
        progress = leader.sessions[self.session.replica.index]
        if progress.id != self.session.id or not progress.is_live:
            return PendingWork.NOTHING
        if progress.state in _ONE_AT_A_TIME:
            return PendingWork.NOTHING if progress.in_flight else PendingWork.REQUEST
        if progress.next_offset < leader.log.log_end_offset:
            return PendingWork.REQUEST
        is_sent = (leader.high_watermark, leader.log.log_start_offset) == self._shipped
        return PendingWork.NOTHING if is_sent else PendingWork.WATERMARK

    def next_part(self, bytes_max: int, *, file_bytes_max: int = 0) -> tuple[AppendRecordsPartition, Sent, int] | None:
        """A part of a request of about so many bytes, and its size; None if there is nothing to send.

        file_bytes_max: for records that only the log's file has; 0: also None if the file would have to be read.
        """
        if self._end_request is not None:
            request, self._end_request = self._end_request, None
            return request, Sent(self, -1), 0
        partition, index = self.session.partition, self.session.replica.index
        leader = partition.leader
        with partition.lock:
            progress = leader.sessions[index]
            if progress.id != self.session.id or not progress.is_live or not self.has_something():
                return None
            start, end = progress.next_offset, leader.log.log_end_offset
            if progress.acknowledged is None or progress.acknowledged < self.transition_end:
                end = min(end, max(start, self.transition_end))
                if start == end and progress.in_flight:
                    return None  # the transition is in flight; its last answer wakes this pusher
            state = progress.state
        records = self._buffered(start, end, bytes_max) if state is not SessionState.REREADING else None
        if records is None:
            if not file_bytes_max:
                return None
            # A request that checks whether the logs agree has few bytes.
            found = self._from_log(start, end, file_bytes_max if state is SessionState.PUSHING else bytes_max, state)
            records = _in_memory(found) if found.size_bytes < min(bytes_max, _SLICE_BYTES_MIN) else found
        with partition.lock:
            if not progress.is_live or progress.next_offset != start:
                return None  # cut off, or its log start rose, which wakes this pusher
            sent, part = leader.request(
                index,
                records.base_offset,
                records.end_offset,
                self.tp,
                records=records.parts,
            )
            self._shipped, self.watermark_since_ms = (part.high_watermark, part.log_start_offset), None
        return part, Sent(self, sent.sequence), records.size_bytes

    def sent_records(self, now_ms: int, watermark_linger_ms: int) -> None:
        """A request with records is sent: a watermark sent alone just before should have waited."""
        if self.alone_ms is not None and now_ms - self.alone_ms <= watermark_linger_ms:
            self.alone_ms = None

    def on_result(self, sent: Sent, result: AppendRecordsResult) -> None:
        """The replica answered."""
        if sent.sequence < 0:
            self._resolve_end(was_sent=True)
            return
        session = self.session
        session.partition.on_answer(session, sent.sequence, result)
        progress = session.partition.leader.sessions[session.replica.index]
        if result.error_code is ErrorCode.NONE and session.ended is None and progress.id == session.id:
            self.failures = 0
            self._release_below(progress.acknowledged or 0)
            if session.on_append_records_response(result.log_end_offset, result.log_start_offset):
                session.try_complete_delayed_requests()

    def on_disconnect(self) -> None:
        """The connection is lost; records in flight are still in the queue or in the log."""
        self._shipped = (-1, -1)
        self._resolve_end(was_sent=False)
        self.session.partition.on_disconnect(self.session)

    def end(self, reason: PushSessionEndReason) -> bool:
        """End the session from this side; whether the replica gets an end request."""
        partition, index = self.session.partition, self.session.replica.index
        self.end_sent = Future()
        if reason.is_sent_to_replica:
            with partition.lock:
                progress = partition.leader.sessions.get(index)
                if progress is not None and progress.id == self.session.id and progress.is_live:
                    _, request = partition.leader.request(index, progress.next_offset, progress.next_offset, self.tp)
                    self._end_request = replace(request, end_session_reason=int(reason))
        partition.end_session(self.session, reason)
        self.session.on_push_session_ended(reason)
        with self._lock:
            entries = [*self._taken, *self._queue]
            self._taken.clear()
            self._queue.clear()
        for entry in entries:
            self._memory.release(entry)
        if self._end_request is None:
            self._resolve_end(was_sent=False)
        return self._end_request is not None

    def _resolve_end(self, *, was_sent: bool) -> None:
        self._end_request = None
        if self.end_sent is not None and not self.end_sent.done():
            self.end_sent.set_result(was_sent)

    def _release_below(self, offset: int) -> None:
        while True:
            with self._lock:
                queue = self._taken or self._queue
                if not queue or queue[0].end_offset > offset:
                    return
                entry = queue.popleft()
            self._memory.release(entry)

    def _buffered(self, start: int, end: int, bytes_max: int) -> Records | None:
        """Batches of [start, end) from the queue; None if it does not have them."""
        if start >= end:
            return Records(start, start, (), 0)
        parts: list[Part] = []
        at, size = start, 0
        with self._lock:
            queue, taken = self._queue, self._taken
            while taken and taken[-1].end_offset > start:
                queue.appendleft(taken.pop())  # the replica asked for earlier records
            while queue and (entry := queue[0]).end_offset <= end:
                if entry.end_offset > at:
                    held = entry.parts
                    too_much = bool(parts) and size + entry.size_bytes > bytes_max
                    if entry.base_offset != at or held is None or too_much:
                        break
                    parts += held
                    at, size = entry.end_offset, size + entry.size_bytes
                taken.append(queue.popleft())
        return Records(start, at, tuple(parts), size) if parts else None

    def _from_log(self, start: int, end: int, bytes_max: int, state: SessionState) -> Records:
        if start >= end:
            return Records(start, start, (), 0)
        log = self.session.partition.log
        # Records that a replica refused as corrupt are read and checked before they are sent again.
        if state is not SessionState.REREADING and start >= log.log_start_offset:
            if self._slices is None:
                self._slices = log.slices()
            found = self._slices.read(start, end, bytes_max)
            if found is None or found.end_offset >= end:
                self._slices = None
            if found is not None:
                place = FileSlice(found.file, found.position, found.size_bytes)
                return Records(found.base_offset, found.end_offset, (place,), found.size_bytes)
        return whole_batches(log.read(start, bytes_max), start, end, log.leader_epochs)


def _in_memory(records: Records) -> Records:
    """Small reads are copied: else a request for many partitions would hold as many open files until it is sent."""
    parts = [
        part.file.read_at(part.size_bytes, part.position) if isinstance(part, FileSlice) else part
        for part in records.parts
    ]
    return records._replace(parts=tuple(parts)) if size_of(parts) == records.size_bytes else records


def whole_batches(data: bytes, start: int, end: int, epochs: LeaderEpochs) -> Records:
    """The log's batches from `start` on, up to the one that begins at or above `end`.

    The log's reader has checked their places. Raises CorruptRecordBatch for a leader epoch that differs from the log's
    list, because a replica would take it for another history.
    """
    found, size, end_offset = split_batches(data), 0, start
    for at, header in found.placed:
        if at and header.base_offset >= end:
            break
        if (why := epochs.contradiction(header.base_offset, header.leader_epoch)) is not None:
            raise CorruptRecordBatch(f"the batch at offset {header.base_offset} has {why}")
        size, end_offset = at + header.size_bytes, header.next_offset
    if not size:
        why = found.why_not or f"it ends at {end}"
        raise CorruptRecordBatch(f"the log holds no batch from offset {start} on: {why}")
    view = data if size == len(data) else memoryview(data)[:size]
    return Records(found.placed[0][1].base_offset, end_offset, (view,), size)
