"""Replays of the logs in a directory, without a server, beside their writers.

LocalReplays is the client: it finds logs, starts sessions, attaches subscribers. LocalSession drives one ReplaySession
over a log of this machine; one `step` is one turn:

    step:  Turn ─▶ ReadBlock ─▶ batches from the walk ─▶ BlockRead ─▶ SendBlock ─▶ ReplayedBlock

The scan of the files goes on from block to block. When it begins again - at the tip, after a pause, and whenever the
log was cut since - it begins one batch early and checks that the last batch delivered is still there: so a log that
was cut and grew again ends the replay, and nothing of the new history follows the old one.

A node drives the same ReplaySession for its subscribers in pushrep/replicate/replay_server.py. The two drivers share
the session, LogSource and the handling of read errors, but turns come from different sides: here the caller's iteration
asks for the next block and waits in its own thread; there one loop takes turns over all sessions, reads no record bytes
(sendfile) and waits for sockets.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeAlias

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import PushrepError
from pushrep.log import Lease, LeaseBroken, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import log_name, parse_shown_name, readable_logs, real_log_path, shown_name
from pushrep.log.errors import InvalidLogName
from pushrep.log.published import LogOffsets
from pushrep.records import BatchHeader, RecordBatch
from pushrep.replay import events as e
from pushrep.replay.catalogue import CatalogueEntry, read_catalogue
from pushrep.replay.events import ReplayState
from pushrep.replay.plan import (
    RecordingInfo,
    ReplayedBlock,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
    Span,
    tip_of,
)
from pushrep.replay.session import ReplaySession, ReplaySessions
from pushrep.replay.slices import BUFFER_BYTES, BatchWindows, Buffers, Window, size_of_batch
from pushrep.replay.source import READ_ERRORS, LogSource
from pushrep.replay.waiting import Listening
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState

_FEW = 16
"""So few offsets, as a follower finds at the tip, need no window."""
_FACTS_MS = 100
"""How long the log's offsets are cached while there is something to read; at the tip they are read every time."""
CREDIT_BYTES = 1 << 62
"""No limit: in one process nothing is in flight, because the reader takes block by block."""

Counters: TypeAlias = Mapping[str, Callable[[], int | None]]
"""By name, a function that returns the counter's value, None once it is closed. Called in any thread."""


class LocalSession:
    """One session of `replays` over `source`. `step` is for one thread at a time; other methods for any."""

    step_waits = True  # it reads files

    def __init__(self, replays: "LocalReplays", session: ReplaySession, source: LogSource) -> None:
        self.session, self.source = session, source
        self.end: e.SendEnd | None = None
        self._replays, self._clock = replays, replays.clock
        self._history = source.history()
        self._facts, self._facts_ms, self._is_live = source.facts(), self._clock.monotonic_ms(), True
        self._lease: Lease | None = None
        self._broken: str | None = None
        self._walk: Iterator[Window] | None = None
        self._walk_end = self._walked_ms = 0
        self._pending: list[RecordBatch] = []
        self._last: BatchHeader | None = None
        self._listening = Listening(source.path, source.filesystem)
        self._windows = BatchWindows(source.path, source.filesystem, replays.buffers)

    @property
    def session_id(self) -> int:
        """All 64 bits of it."""
        return self.session.id

    @property
    def position(self) -> int:
        """Behind the last block."""
        return self.session.position

    @property
    def tip(self) -> int:
        """The end of readable records at the last look."""
        return self.session.tip

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes; `end` then has the reason, None if it was refused or nobody attached."""
        return self.session.state in {ReplayState.INACTIVE, ReplayState.DONE}

    def open(self) -> None:
        """Take the lease and read the batch at the position. Raises ReplayRefused."""
        for effect in self.handle(self.source.begin(self.session.position, self._take_lease)):
            if isinstance(effect, e.Refuse):
                raise ReplayRefused(effect.code, effect.why, segment=effect.segment)

    def handle(self, event: e.Event) -> list[e.Effect]:
        """Give the session an event and carry out the effects that read nothing; returns all effects."""
        with self._replays.lock:
            effects = self._replays.sessions.handle(self.session, event, self._clock.monotonic_ms())
            for effect in effects:
                if isinstance(effect, e.RenewLease):
                    self._renew(effect.offset)
                elif isinstance(effect, e.ReleaseLease) and self._lease is not None:
                    self._lease.release()
                elif isinstance(effect, e.SendEnd):
                    self.end = effect
                    self._replays.sessions.handle(self.session, e.EndSent(), self._clock.monotonic_ms())
        return effects

    def rest(self) -> None:
        """Nothing to receive."""

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something new."""
        self._listening.wait(timeout_s, needs_write=self._needs_write)
        self._facts_ms -= _FACTS_MS

    async def wait_async(self, timeout_s: float) -> None:
        """The same in an event loop."""
        await self._listening.wait_async(timeout_s, needs_write=self._needs_write)
        self._facts_ms -= _FACTS_MS

    @property
    def _needs_write(self) -> bool:
        """Whether only a write can bring something new."""
        return self.session.position >= self._facts.end and not self.session.wants_liveness

    def wake(self) -> None:
        """End the wait."""
        self._listening.wake()

    def stop(self) -> None:
        """End it."""
        self.handle(e.Stop())

    def close(self) -> None:
        """Close the log, unless the caller opened it."""
        self.source.close()
        self._listening.close()

    def step(self) -> ReplayedBlock | None:
        """Take a turn: returns a block, or None if there is none now. Never waits."""
        if self._broken is not None:
            self._refresh_offsets()  # a closed log breaks its leases, too, but a reader goes on with it
            if self.source.has_leases:
                self.handle(e.LeaseLost(self._broken))
            self._lease = self._broken = None
        effects: list[e.Effect] = []
        if self._clock.monotonic_ms() - self._facts_ms < _FACTS_MS and not self._was_cut():
            effects = self._turn()
        wanted = _read_wanted(effects)
        if wanted is None and not self.is_over:
            self._refresh_offsets()
            wanted = _read_wanted(self._turn()) if not self.is_over else None
        return self._block(wanted) if wanted is not None else None

    def _turn(self) -> list[e.Effect]:
        if self._facts.end < self.session.position:
            return self.handle(self.source.cut_since(*self._given, self._facts))
        counter = self._replays.counters.get(self.session.plan.bound)
        return self.handle(e.Turn(self._facts, counter() if counter is not None else None, self._is_live))

    def _refresh_offsets(self) -> None:
        """Read the log's offsets again."""
        if self._was_cut():
            self._walk, self._pending = None, []
        self._history = self.source.history()
        try:
            wants = self.session.wants_liveness
            self._facts, self._is_live = self.source.live_facts() if wants else (self.source.facts(), True)
        except READ_ERRORS as error:
            self.handle(self._failure(error))
        self._facts_ms = self._clock.monotonic_ms()

    def _was_cut(self) -> bool:
        """Since the log's offsets were read, or it was closed."""
        return self.source.history() != self._history

    def _block(self, wanted: e.ReadBlock) -> ReplayedBlock | None:
        read = self._read(wanted)
        if not isinstance(read, e.BlockRead):
            if read is not None:
                self.handle(read)
            return None
        send = next((effect for effect in self.handle(read) if isinstance(effect, e.SendBlock)), None)
        if send is None:
            self._pending = self._pending if self.session.position == wanted.position else []
            return None
        batches, self._pending = self._pending[: send.spans], self._pending[send.spans :]
        self._last = batches[-1].header
        self.handle(e.BlockSent())
        self._listening.found()
        return ReplayedBlock(batches, send.start, send.end)

    def _read(self, wanted: e.ReadBlock) -> e.Event | None:
        """Read the wanted block; the event for the session, None if the session has it already."""
        try:
            cut = self._fill(wanted)
            if cut is not None:
                return cut
        except OffsetOutOfRange as error:
            if not self._is_still_there(wanted.position):
                return self._failure(error)
            return e.BlockRead(())  # cut above: the next turn reads the new end
        except READ_ERRORS as error:
            self._walk = None
            if not self._pending:  # else the batches before the error are delivered first; the next read meets it again
                return self._failure(error)
        return e.BlockRead(tuple([Span.of(batch.header) for batch in self._pending]))

    def _fill(self, wanted: e.ReadBlock) -> e.Truncated | e.ReadFailed | None:
        """Read until `wanted.max_bytes` of batches are pending, or all there are. An event if the log was cut."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._walked_ms > _FACTS_MS:
            self._walk, self._pending = None, []
        self._walked_ms = now_ms
        size = sum(map(size_of_batch, self._pending))
        while size < wanted.max_bytes // 2:  # a second window would be split over two blocks and stay in memory longer
            if self._walk is None:
                at = self._pending[-1].header.next_offset if self._pending else wanted.position
                if at >= wanted.limit:
                    break
                if (cut := self._begin_walk(at, wanted.limit)) is not None:
                    return cut
            window = next(self._walk, None) if self._walk is not None else None
            if window is None:
                self._walk = None
                if self._walk_end >= wanted.limit:
                    break
                continue  # the scan began when there was less to read
            self._pending += window.batches
            size += window.size_bytes
        if self._was_cut():  # what was read may be of either history
            self._pending = []
        return None

    def _begin_walk(self, at: int, limit: int) -> e.Truncated | e.ReadFailed | None:
        last, walk, self._walk_end = self._last, None, limit
        if last is not None and not self._pending and last.next_offset == at > self._facts.start:
            walk = self._from(last, limit)
            if (cut := self._cut_behind(last, walk)) is not None:
                return cut
        self._walk = self._batches(at, limit, walk)
        return None

    def _from(self, last: BatchHeader, limit: int) -> Iterator[RecordBatch]:
        """That batch, and what follows it."""
        yield from self.source.batches(max(last.base_offset, self._facts.start), limit)

    def _cut_behind(self, last: BatchHeader, walk: Iterator[RecordBatch]) -> e.Truncated | e.ReadFailed | None:
        """The event for a log without that batch, which was read from it; None if the walk begins with it."""
        try:
            found = next(walk, None)
        except OffsetOutOfRange:  # retention took it meanwhile, which is no cut
            return None
        if found is not None and found.header == last:
            return None
        self._walk, self._pending = None, []
        return self.source.cut_since(last.base_offset, last.leader_epoch, self._facts)

    def _batches(self, at: int, limit: int, walk: Iterator[RecordBatch] | None) -> Iterator[Window]:
        """Batches in windows as far as they are plainly in order; after that, and a few, by the log's own reader."""
        if limit > at + _FEW:
            walk = None
            for window in self._windows.windows(at, limit):
                yield window
                at = window.batches[-1].header.next_offset
        if at < limit:
            for batch in walk or self.source.batches(at, limit):
                yield Window([batch], size_of_batch(batch))

    def _is_still_there(self, position: int) -> bool:
        """Whether the log now holds `position`, or ends there."""
        self._walk, self._pending = None, []
        self._refresh_offsets()
        return not self.is_over and self._facts.start <= position <= self._facts.end

    def _failure(self, error: Exception) -> e.Event:
        self._walk, self._pending = None, []
        with suppress(*READ_ERRORS):
            self._facts = self.source.facts()
        return self.source.failure(error, self.session.position, self._facts, self._given)

    @property
    def _given(self) -> tuple[int, int]:
        """Offset and leader epoch of the last batch that was given: after a cut all of it is to be taken back."""
        last = self._last
        return (self.session.position, -1) if last is None else (last.base_offset, last.leader_epoch)

    def _take_lease(self) -> None:
        self._lease = self.source.lease(self.session.position, self._on_lease_broken)

    def _on_lease_broken(self, reason: str) -> None:
        self._broken = reason

    def _renew(self, offset: int) -> None:
        if self._lease is None or self._broken is not None:
            return
        try:
            self._lease.renew(offset)
        except LeaseBroken as error:
            self._broken = error.reason


def _read_wanted(effects: list[e.Effect]) -> e.ReadBlock | None:
    return next((effect for effect in effects if isinstance(effect, e.ReadBlock)), None)


_BLOCK_BYTES = 4 << 20
"""Larger than at a node, because no other session waits for its turn here."""
_SESSIONS_MAX = 1024
"""More than at a node, whose limit is against others: here one consumer reads as many partitions as the topic has."""
_NO_FACTS = LogOffsets(0, 0, 0, 0)


class LocalReplays:
    """ReplayClient's implementation for a directory. Thread-safe."""

    def __init__(  # noqa: PLR0913 - all by name
        self,
        directory: Path | str,
        *,
        logs: Iterable[SegmentLog] = (),
        counters: Counters | None = None,
        settings: ReplaySettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        filesystem: Filesystem = REAL_FILESYSTEM,
    ) -> None:
        self.clock, self.counters = clock, counters if counters is not None else {}
        self.lock = threading.RLock()  # held while a session handles an event
        self.buffers = Buffers(BUFFER_BYTES)
        self._directory, self._filesystem = Path(directory), filesystem
        self._logs = {log.path.name: log for log in logs}
        self.sessions = ReplaySessions(
            settings or ReplaySettings(block_bytes=_BLOCK_BYTES, max_sessions=_SESSIONS_MAX),
            random.SystemRandom().getrandbits,
        )
        self._locals: dict[int, LocalSession] = {}
        self._waiting: set[int] = set()  # sessions without a subscriber yet

    def recordings(self, topic: str, from_id: int, limit: int | None) -> list[RecordingInfo]:
        """The logs of the directory, of its worker slots, too, by id. Raises NotALog."""
        entries = read_catalogue(self._directory, self._filesystem)
        known = {entry.tp: entry for entry in entries if entry.state is not RecordingState.DELETED}
        found = []
        for name, partition in readable_logs(self._directory, self._filesystem):
            try:
                source = self._source(shown_name(name, partition)) if topic in {"", name} else None
                if source is not None:
                    with closing(source):
                        found.append(_info(source, name, partition, known))
            except PushrepError as error:  # it can't be opened
                found.append(_invalid(name, partition, str(error)))
        found.sort(key=lambda one: (one.recording_id or 0, one.topic, one.partition))
        return [one for one in found if (one.recording_id or 0) >= from_id][:limit]

    def tip_of(self, recording: int | str, bound: str) -> int:
        """Where what comes from now on begins. Raises ReplayRefused (UNKNOWN_RECORDING)."""
        source = self._source(self._name(recording))
        if source is None:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording}")
        with closing(source):
            facts = source.facts()
        return max(facts.start, tip_of(facts, bound, None).recorded)

    def start_replay(self, request: ReplayRequest) -> int:
        """Start without a subscriber, for `attach` in `connect_timeout_ms`; the session's id. Raises ReplayRefused."""
        name = self._name(request.recording)
        try:
            source = self._source(name)
        except PushrepError as error:
            self.sessions.refused[ErrorCode.INVALID_RECORDING] += 1
            raise ReplayRefused(ErrorCode.INVALID_RECORDING, str(error)) from error
        facts, is_live = (None, True) if source is None else source.live_facts()
        try:
            with self.lock:
                self._sweep()
                session = self.sessions.start(
                    request,
                    facts,
                    source.first_at if source is not None else lambda _ms: None,
                    self.clock.monotonic_ms(),
                    is_live=is_live,
                    counters=frozenset(self.counters),
                )
                assert source is not None, "a request without a log was refused"
                local = self._locals[session.id] = LocalSession(self, session, source)
                self._waiting.add(session.id)
            local.open()
        except BaseException:
            if source is not None:
                source.close()
            raise
        return session.id

    def replay(self, request: ReplayRequest) -> LocalSession:
        """Start a session and subscribe to it. Raises ReplayRefused."""
        return self.attach(self.start_replay(request))

    def attach(self, session_id: int) -> LocalSession:
        """The one subscriber of a session that has none yet. Raises ReplayRefused (UNKNOWN_REPLAY)."""
        with self.lock:
            self._sweep()
            local = self._locals.get(session_id) if session_id in self._waiting else None
            self._waiting.discard(session_id)
        if local is None:
            why = "no such replay, or its time to attach is over, or it has a subscriber"
            raise ReplayRefused(ErrorCode.UNKNOWN_REPLAY, why)
        local.handle(e.SubscriberAttached(CREDIT_BYTES))
        return local

    def stop(self, session_id: int) -> None:
        """End a session; unknown ids, and those that are over, are fine."""
        local = self._locals.get(session_id)
        if local is not None:
            local.handle(e.Stop())
        self._sweep()

    def stop_all(self, recording: int | str) -> int:
        """End all sessions of a recording; how many it ended."""
        name = self._name(recording)
        path = None if name is None else real_log_path(self._directory / name)
        ended = [local for local in list(self._locals.values()) if local.source.path == path and not local.is_over]
        for local in ended:
            local.handle(e.Stop())
        self._sweep()
        return len(ended)

    def close(self) -> None:
        """End every session; closing twice is fine."""
        for session_id in list(self._locals):
            self.stop(session_id)

    # ---- inside

    def _name(self, recording: int | str) -> str | None:
        """The name of a log given by id or name; None if there is no such log."""
        if isinstance(recording, str):
            try:
                return shown_name(*parse_shown_name(recording))
            except InvalidLogName:
                return None
        entries = read_catalogue(self._directory, self._filesystem)
        known = next((entry for entry in entries if entry.recording_id == recording), None)
        if known is None or known.state is RecordingState.DELETED:
            return None
        return log_name(known.tp.topic, known.tp.partition)

    def _source(self, name: str | None) -> LogSource | None:
        if name is not None:
            with suppress(NotALog):
                return LogSource(self._directory / name, self._logs.get(name), self._filesystem)
        return None

    def _sweep(self) -> None:
        """Remove ended sessions, and those to which nobody attached in time."""
        with self.lock:
            for session_id, local in list(self._locals.items()):
                if local.session.state is ReplayState.INIT:
                    local.handle(e.Turn(_NO_FACTS))
                if local.is_over:
                    del self._locals[session_id]
                    self._waiting.discard(session_id)


def _info(
    source: LogSource, topic: str, partition: int, known: Mapping[TopicIdPartition, CatalogueEntry]
) -> RecordingInfo:
    entry = None if source.log_id is None else known.get(TopicIdPartition(source.log_id, topic, partition))
    facts, is_live = source.live_facts()
    invalid = source.why_invalid(facts)
    return RecordingInfo(
        recording_id=None if entry is None else entry.recording_id,
        topic=topic,
        partition=partition,
        log_id=source.log_id,
        start_offset=facts.start,
        stable_offset=facts.stable,
        end_offset=facts.end,
        is_live=is_live,
        state=RecordingState.INVALID if invalid else RecordingState.VALID,
        damaged_from=source.damaged_from(facts),
        invalid=invalid,
    )


def _invalid(topic: str, partition: int, why: str) -> RecordingInfo:
    return RecordingInfo(
        recording_id=None,
        topic=topic,
        partition=partition,
        log_id=None,
        start_offset=0,
        stable_offset=0,
        end_offset=0,
        is_live=False,
        state=RecordingState.INVALID,
        invalid=why,
    )
