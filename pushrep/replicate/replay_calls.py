"""The replay server's answers to calls, in its thread; work that needs the disk runs in the worker.

StartReplay   worker: find the log, its offsets, the time ─▶ judge (plan.py) ─▶ worker: lease, first batch ─▶ answer
Attach        at once                           StopReplay           at once
Describe, Extend, Truncate, Purge, Delete       worker (replay_calls.py) ─▶ answer

`RecordingMaintenance`: extend, truncate, purge and delete recordings. In the worker's thread.

extend     a stopped log goes on at its end, under a higher epoch           refused for a member's log
truncate   sessions above the cut end first, then the log is cut            refused for a member's log
purge      whole segments below an offset; of a member's log, none above the leader's log start
delete     marked DELETED, sessions end; then the files go; then DeleteDone refused for a member's log, or while
                                                                            replays run, unless forced
A member's log: the newest grant names this node, or a leader's session is open on it. Only that leader may change it.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from pushrep.errors import BadArgument, PushrepError
from pushrep.log import BelowHighWatermark, OffsetOutOfRange, SegmentLog, StillNeeded
from pushrep.replay import events as e
from pushrep.replay.errors import ReplayRefused
from pushrep.replay.events import ReplayState
from pushrep.replay.local import Counters
from pushrep.replay.plan import FOLLOW, TO_END, AtTime, Length, LogSnapshot, Position, ReplayPlan, ReplayRequest, tip_of
from pushrep.replay.session import Effects, ReplaySession, ReplaySessions
from pushrep.replay.slices import OpenSegments
from pushrep.replay.source import READ_ERRORS
from pushrep.replicate.access import audit
from pushrep.replicate.node_store import Refusal
from pushrep.replicate.replay_connection import ReplayConnection
from pushrep.replicate.replay_recordings import KeptRecording, NodeSource, Recordings
from pushrep.replicate.replay_session_io import ServedSession, Server
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey, refusal
from pushrep.wire.connection import Call, ClientEvent
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Struct

_Asked = wire.ExtendRequest | wire.TruncateRequest | wire.PurgeRequest | wire.DeleteRequest


class _Log(NamedTuple):
    recording: KeptRecording
    log: SegmentLog


class SessionsByRecording(Protocol):
    """What RecordingMaintenance needs of the ReplayServer."""

    @property
    def recordings(self) -> Recordings: ...
    def sessions_of(self, recording: KeptRecording) -> int:
        """How many sessions a recording has."""
        ...

    def post_and_wait(self, recording: KeptRecording, event: e.Event) -> int:
        """Give all of them an event; returns how many it ended."""
        ...


class RecordingMaintenance:
    """The four calls. Every method raises ReplayRefused, PushrepError, OSError."""

    def __init__(self, server: SessionsByRecording) -> None:
        self._server = server

    def extend(self, asked: wire.ExtendRequest, sender: str) -> wire.ExtendResponse:
        """Let a stopped log go on at its end."""
        recording, log = self._own(ApiKey.EXTEND, asked, sender)
        if self._server.recordings.is_live(recording):
            why = f"{recording.entry.tp} is written: only a stopped log can be extended"
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, why)
        newest = max(log.leader_epochs.latest_epoch, recording.kept.election_state.newest_epoch)
        if asked.leader_epoch <= newest:
            why = f"leader epoch {asked.leader_epoch} is not above {newest}: a log goes on under a higher one only"
            raise ReplayRefused(ErrorCode.FENCED_LEADER_EPOCH, why)
        log.flush()
        end = log.log_end_offset
        log.begin_epoch(asked.leader_epoch, end)
        self._server.recordings.extended(recording)
        return wire.ExtendResponse(end_offset=end)

    def truncate(self, asked: wire.TruncateRequest, sender: str) -> wire.TruncateResponse:
        """Cut the log at the base of the batch that holds the offset."""
        recording, log = self._own(ApiKey.TRUNCATE, asked, sender)
        if not log.log_start_offset <= asked.offset <= log.log_end_offset:
            why = f"offset {asked.offset} is outside of [{log.log_start_offset}, {log.log_end_offset}]"
            raise ReplayRefused(ErrorCode.INVALID_POSITION, why)
        at = next(log.batches(asked.offset, asked.offset + 1), None) if asked.offset < log.log_end_offset else None
        cut = asked.offset if at is None else at.header.base_offset
        if cut < log.log_start_offset:
            assert at is not None, "else it is the offset itself"
            why = f"offset {asked.offset} lies in the batch at {cut}, which begins below the log start"
            raise ReplayRefused(ErrorCode.INVALID_POSITION, f"{why}: cut at {at.header.next_offset} or above")
        epoch = log.leader_epochs.epoch_of(cut - 1)
        stopped = self._server.post_and_wait(recording, e.Truncated(cut, epoch))
        end = log.truncate_to(cut, force=True)
        self._server.post_and_wait(recording, e.Truncated(cut, epoch))  # sessions that have begun meanwhile
        return wire.TruncateResponse(end_offset=end, stopped=stopped)

    def purge(self, asked: wire.PurgeRequest, sender: str) -> wire.PurgeResponse:
        """Remove the whole segments below the offset."""
        recording, log = self._log(ApiKey.PURGE, asked, sender)
        before = asked.before_offset
        if self._server.recordings.is_led(recording):
            before = min(before, log.log_start_offset)  # as the leader gave it last
        try:
            start = log.purge(before)
        except StillNeeded as error:
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, str(error)) from error
        except (OffsetOutOfRange, BelowHighWatermark) as error:
            raise ReplayRefused(ErrorCode.INVALID_POSITION, str(error)) from error
        return wire.PurgeResponse(log_start_offset=start)

    def mark_deleted(self, asked: wire.DeleteRequest, sender: str) -> KeptRecording:
        """Mark it as DELETED in the catalogue, and notify its sessions."""
        recording = self._found(ApiKey.DELETE, asked, sender)
        if self._server.recordings.is_led(recording):
            raise _led(recording)
        running = self._server.sessions_of(recording)
        if running and not asked.force:
            why = f"{running} replays of recording {asked.recording_id} run: stop them, or force it"
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, why)
        if not self._server.recordings.deleted(recording):
            raise _led(recording)  # a leader came at this moment
        self._server.post_and_wait(recording, e.Deleted())
        return recording

    def remove(self, recording: KeptRecording) -> wire.DeleteDone:
        """Remove the files of a marked recording; returns their bytes, or why not all were removed."""
        recording_id = recording.entry.recording_id
        try:
            freed = self._server.recordings.remove(recording)
        except (OSError, PushrepError) as error:
            return wire.DeleteDone(
                recording_id=recording_id, error_code=ErrorCode.KAFKA_STORAGE_ERROR, error_message=str(error)
            )
        return wire.DeleteDone(recording_id=recording_id, freed_bytes=freed)

    # ---- inside

    def _found(self, call: ApiKey, asked: _Asked, sender: str) -> KeptRecording:
        recordings, recording_id = self._server.recordings, asked.recording_id
        recording = recordings.find(recording_id)
        if not recordings.may(call, recording, sender):
            raise ReplayRefused(ErrorCode.UNAUTHORISED, f"recording {recording_id} is not yours to keep")
        if recording is None:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording_id}")
        audit(sender, asked, call)
        return recording

    def _log(self, call: ApiKey, asked: _Asked, sender: str) -> _Log:
        recording = self._found(call, asked, sender)
        try:
            replica = self._server.recordings.store.describe(recording.kept, recording.entry.tp, create=False)
        except Refusal as error:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, str(error)) from error
        return _Log(recording, replica.log)

    def _own(self, call: ApiKey, asked: _Asked, sender: str) -> _Log:
        """The recording, if no leader owns its log."""
        found = self._log(call, asked, sender)
        if self._server.recordings.is_led(found.recording):
            raise _led(found.recording)
        return found


def _led(recording: KeptRecording) -> ReplayRefused:
    why = f"{recording.entry.tp} is its leader's to change: its newest grant names this node, or it is written"
    return ReplayRefused(ErrorCode.RECORDING_IN_USE, why)


_LOG = logging.getLogger("pushrep.node")


class ServerOfCalls(Server, SessionsByRecording, Protocol):
    """What ReplayCalls needs of the ReplayServer."""

    @property
    def sessions(self) -> ReplaySessions: ...
    @property
    def served(self) -> Mapping[int, ServedSession]: ...
    @property
    def files(self) -> OpenSegments: ...
    @property
    def named_counters(self) -> Counters: ...
    def keep(self, served: ServedSession, recording: KeptRecording) -> None:
        """A session in INIT."""
        ...


class _Looked(NamedTuple):
    """The worker's result for a request."""

    is_allowed: bool
    recording: KeptRecording | None = None
    source: NodeSource | None = None
    facts: LogSnapshot | None = None
    first_at: int | None = None


class ReplayCalls:
    """The calls of one server."""

    def __init__(self, server: ServerOfCalls) -> None:
        self._server = server
        self._keeping = RecordingMaintenance(server)
        self._calls: Mapping[type[Struct], Callable[[ReplayConnection, Call, Any], None]] = {
            wire.StartReplayRequest: self._start,
            wire.AttachRequest: self._attach,
            wire.StopReplayRequest: self._stop,
            wire.DescribeRecordingsRequest: self._describe,
            wire.ExtendRequest: self._keep(self._keeping.extend),
            wire.TruncateRequest: self._keep(self._keeping.truncate),
            wire.PurgeRequest: self._keep(self._keeping.purge),
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
            if not access.could(connection.sender, call.api_key):
                self.refuse(
                    connection, call, ErrorCode.UNAUTHORISED, str(access.refused(connection.sender, call.api_key))
                )
                return
            carry_out(connection, call, call.request)
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
                post(lambda: self.refuse(connection, call, code, why))
            except (OSError, PushrepError) as error:
                _LOG.error("%s failed: %s", type(call.request).__name__, error)
                text = str(error)
                post(lambda: self.refuse(connection, call, ErrorCode.KAFKA_STORAGE_ERROR, text))
            except Exception:  # noqa: BLE001 - a fault of ours; the caller gets an error
                _LOG.exception("%s failed", type(call.request).__name__)
                post(
                    lambda: self.refuse(
                        connection, call, ErrorCode.UNKNOWN_SERVER_ERROR, "a fault of the node: see its log"
                    )
                )
            else:
                post(lambda: then(found))

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
        return _Looked(True, recording, source, facts, first_at)

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
        assert looked.recording is not None, "the log is a recording's"
        served = ServedSession(session, looked.source, server.files, server)
        served.identity, served.outbox_id = connection.sender, looked.recording.entry.outbox_id
        server.keep(served, looked.recording)
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
            if served is not None and not is_own and not access.may_stop(connection.sender, served.outbox_id):
                access.refused(connection.sender, ApiKey.STOP_REPLAY)
                self.answer(connection, call, wire.StopReplayResponse(stopped=0))  # as of one that is not there
                return
            if not is_own:
                audit(connection.sender, asked, ApiKey.STOP_REPLAY)
            now_ms = self._server.now_ms()
            self._answer_stopped(connection, call, self._server.sessions.stop(asked.session_id, now_ms))
            return
        recording_id, recordings = asked.recording_id, self._server.recordings

        def may() -> bool:
            recording = recordings.find(recording_id)
            if not access.may_stop(connection.sender, None if recording is None else recording.entry.outbox_id):
                access.refused(connection.sender, ApiKey.STOP_REPLAY)
                return False
            audit(connection.sender, asked, ApiKey.STOP_REPLAY)
            return True

        def stop(is_allowed: bool) -> None:  # noqa: FBT001 - the worker's answer
            if is_allowed:
                sessions, now_ms = self._server.sessions, self._server.now_ms()
                self._answer_stopped(connection, call, sessions.notify_all(recording_id, e.Stop(), now_ms))
            else:
                self.refuse(connection, call, ErrorCode.UNAUTHORISED, "")

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

    def _describe(self, connection: ReplayConnection, call: Call, asked: wire.DescribeRecordingsRequest) -> None:
        recordings, sender = self._server.recordings, connection.sender
        self.on_disk(
            connection,
            call,
            lambda: recordings.described(asked, sender),
            lambda found: self.answer(connection, call, found),
        )

    def _keep(self, job: Callable[[Any, str], Struct]) -> Callable[[ReplayConnection, Call, Any], None]:
        return lambda connection, call, asked: self.on_disk(
            connection, call, lambda: job(asked, connection.sender), lambda found: self.answer(connection, call, found)
        )

    def _delete(self, connection: ReplayConnection, call: Call, asked: wire.DeleteRequest) -> None:
        def marked(recording: KeptRecording) -> None:
            self.answer(connection, call, wire.DeleteResponse())
            self._server.on_disk(lambda: self._remove(connection, call, recording))

        self.on_disk(connection, call, lambda: self._keeping.mark_deleted(asked, connection.sender), marked)

    def _remove(self, connection: ReplayConnection, call: Call, recording: KeptRecording) -> None:
        """In the worker's thread."""
        done = self._keeping.remove(recording)

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
