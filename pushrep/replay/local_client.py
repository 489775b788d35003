"""LocalReplays: replays of the logs in a directory, beside their writers, without a server."""

import random
from collections.abc import Iterable
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.log.directory_files import log_name, real_log_path
from pushrep.log.errors import InvalidLogName
from pushrep.log.slots import parse_shown_name, readable_logs, shown_name
from pushrep.replay import events as e
from pushrep.replay.catalogue import read_catalogue
from pushrep.replay.errors import ReplayRefused
from pushrep.replay.events import ReplayState
from pushrep.replay.limits import LOG_BOUNDS, LogSnapshot, RecordingInfo, ReplayRequest, ReplaySettings, tip_of
from pushrep.replay.local import CREDIT_BYTES, Around, Counters, LocalSession
from pushrep.replay.plan import needs_liveness
from pushrep.replay.session import ReplaySessions
from pushrep.replay.source import LogSource, open_source
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState

_BLOCK_BYTES = 4 << 20
"""No other session waits for its turn here, so a turn may take longer than at a node."""
_NO_FACTS = LogSnapshot(start=0, written=0, flushed=0, high_watermark=0)


class LocalReplays:
    """What ReplayClient does with a directory. Thread-safe."""

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
        self.directory = Path(directory)
        self._logs = {log.path.name: log for log in logs}
        self._around = Around(clock, counters if counters is not None else {})
        self._filesystem = filesystem
        self._many = ReplaySessions(
            settings if settings is not None else ReplaySettings(block_bytes=_BLOCK_BYTES),
            random.SystemRandom().getrandbits,
        )
        self._locals: dict[int, LocalSession] = {}
        self._waiting: set[int] = set()  # for their subscriber

    def recordings(self) -> list[RecordingInfo]:
        """Every log of the directory, of its worker slots, too, by topic and partition. Raises NotALogDirectory."""
        entries = read_catalogue(self.directory, self._filesystem)
        known = {entry.tp: entry for entry in entries if entry.state is not RecordingState.DELETED}
        found = []
        for topic, partition in readable_logs(self.directory, self._filesystem):
            source = self._source(shown_name(topic, partition))
            if source is None:
                continue
            try:
                tp = TopicIdPartition(source.log_id, topic, partition) if source.log_id is not None else None
                entry = known.get(tp) if tp is not None else None
                state = entry.state if entry is not None else RecordingState.VALID
                found.append(_info(source, topic, partition, None if entry is None else entry.recording_id, state))
            finally:
                source.close()
        return found

    def tip_of(self, recording: int | str, bound: str = "stable") -> int:
        """Where what comes from now on begins. Raises ReplayRefused (UNKNOWN_RECORDING), BadArgument for the bound."""
        if bound not in LOG_BOUNDS:
            raise BadArgument("bound", f"{bound!r} is none of {', '.join(LOG_BOUNDS)}")
        source = self._source(self._name(recording))
        if source is None:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording}")
        try:
            facts = source.facts(with_liveness=False)
        finally:
            source.close()
        return max(facts.start, tip_of(facts, bound, None).recorded)

    def start_replay(self, request: ReplayRequest) -> int:
        """Start without a subscriber, for `attach` in `connect_timeout_ms`; the session's id. Raises ReplayRefused."""
        source = self._source(self._name(request.recording))
        facts = None if source is None else source.facts(with_liveness=False)
        if source is not None and facts is not None and needs_liveness(request, facts):
            facts = source.facts(with_liveness=True)  # ten milliseconds, where the kernel has to list its locks
        clock = self._around.clock
        try:
            with self._around.lock:
                self._sweep()
                session = self._many.start(
                    request,
                    facts,
                    source.first_at if source is not None else lambda _ms: None,
                    clock.monotonic_ms(),
                    counters=frozenset(self._around.counters),
                )
                assert source is not None, "a request without a log was refused"
                local = self._locals[session.id] = LocalSession(self._many, session, source, self._around)
                self._waiting.add(session.id)
            local.open()
        except BaseException:
            if source is not None:
                source.close()
            raise
        return session.id

    def replay(self, request: ReplayRequest) -> LocalSession:
        """A session and its subscriber in one. Raises ReplayRefused."""
        return self.attach(self.start_replay(request))

    def attach(self, session_id: int) -> LocalSession:
        """The one subscriber of a session that has none yet. Raises ReplayRefused (UNKNOWN_REPLAY)."""
        with self._around.lock:
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
        path = None if name is None else real_log_path(self.directory / name)
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
        """The log that is meant; None if there is none."""
        if isinstance(recording, str):
            try:
                return shown_name(*parse_shown_name(recording))
            except InvalidLogName:
                return None
        entries = read_catalogue(self.directory, self._filesystem)
        known = next((entry for entry in entries if entry.recording_id == recording), None)
        if known is None or known.state is RecordingState.DELETED:
            return None
        return log_name(known.tp.topic, known.tp.partition)

    def _source(self, name: str | None) -> LogSource | None:
        if name is None:
            return None
        return open_source(self.directory / name, self._logs.get(name), self._filesystem)

    def _sweep(self) -> None:
        """Forget sessions that are over, and those that nobody attached to in time."""
        with self._around.lock:
            for session_id, local in list(self._locals.items()):
                if local.session.state is ReplayState.INIT:
                    local.handle(e.Turn(_NO_FACTS))
                if local.is_over:
                    del self._locals[session_id]
                    self._waiting.discard(session_id)


def _info(
    source: LogSource, topic: str, partition: int, recording_id: int | None, state: RecordingState
) -> RecordingInfo:
    facts = source.facts(with_liveness=True)
    return RecordingInfo(
        recording_id=recording_id,
        topic=topic,
        partition=partition,
        log_id=source.log_id,
        start_offset=facts.start,
        stable_offset=facts.stable,
        end_offset=facts.written,
        is_live=facts.is_live,
        state=state,
    )
