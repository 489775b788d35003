"""The replay server's answers to calls, in its thread; work that needs the disk runs in the worker.

StartReplay   worker: find the log, its offsets, the time ─▶ judge (plan.py) ─▶ worker: lease, first batch ─▶ answer
Attach        at once                           StopReplay           at once
Describe, Extend, Truncate, Purge, Delete       worker (replay_recordings.py) ─▶ answer
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pushrep.errors import BadArgument, PushrepError
from pushrep.log.published import LogOffsets
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.plan import (
    FOLLOW,
    TO_END,
    AtTime,
    Length,
    Position,
    ReplayPlan,
    ReplayRefused,
    ReplayRequest,
    tip_of,
)
from pushrep.replay.session import Effects, ReplaySession
from pushrep.replay.source import READ_ERRORS
from pushrep.replicate.access import audit
from pushrep.replicate.replay_recordings import KeptRecording, NodeSource
from pushrep.replicate.replay_server import ReplayConnection, ReplayServer, ServedSession
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey, refusal
from pushrep.wire.connection import Call, ClientEvent
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Struct

_LOG = logging.getLogger("pushrep.node")

REPLAY_CALLS = frozenset(
    {
        ApiKey.START_REPLAY, ApiKey.ATTACH, ApiKey.STOP_REPLAY, ApiKey.DESCRIBE_RECORDINGS,
        ApiKey.EXTEND, ApiKey.TRUNCATE, ApiKey.PURGE, ApiKey.DELETE,
    }
)  # fmt: skip
"""Calls that move a connection to the replay server."""
_FAULT = "a fault of the node: see its log"


class _Looked(NamedTuple):
    """The worker's result for a request."""

    is_allowed: bool
    source: NodeSource | None = None
    facts: LogOffsets | None = None
    is_live: bool = True
    first_at: int | None = None
    invalid: ReplayRefused | None = None


class ReplayCalls:
    """The calls of one server."""

    def __init__(self, server: ReplayServer) -> None:
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
            if isinstance(call.message, wire.Credit):
                served = self._server.served.get(call.message.session_id)
                if served is not None and served.connection is connection:
                    served.handle(e.Credited(call.message.bytes))
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
        """Run `job` in the worker's thread, then `then(result)` in this one; errors of both are answered."""
        post = self._server.post

        def go_on(found: Any) -> None:
            try:
                then(found)
            except Exception:  # noqa: BLE001 - a fault of ours; the caller gets an error
                _LOG.exception("%s failed", type(call.request).__name__)
                self.refuse(connection, call, ErrorCode.UNKNOWN_SERVER_ERROR, _FAULT)

        def run() -> None:
            try:
                found = job()
            except ReplayRefused as refused:
                code, why = refused.code, refused.why
            except (OSError, PushrepError) as error:
                _LOG.error("%s failed: %s", type(call.request).__name__, error)
                code, why = ErrorCode.KAFKA_STORAGE_ERROR, str(error)
            except Exception:  # noqa: BLE001 - the same
                _LOG.exception("%s failed", type(call.request).__name__)
                code, why = ErrorCode.UNKNOWN_SERVER_ERROR, _FAULT
            else:
                post(lambda: go_on(found))
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
        if recording is None:
            return _Looked(is_allowed=True)
        try:
            source = recordings.source(recording)
        except ReplayRefused as refused:
            return _Looked(is_allowed=True, invalid=refused)
        try:
            facts, is_live = source.live_facts()
            position = request.position
            first_at = source.first_at(position.timestamp_ms) if isinstance(position, AtTime) else None
        except ReplayRefused as refused:
            source.close()
            return _Looked(is_allowed=True, invalid=refused)
        except READ_ERRORS as error:
            source.close()
            is_there = source.filesystem.exists(source.path)
            invalid = ReplayRefused(ErrorCode.INVALID_RECORDING, str(error)) if is_there else None
            return _Looked(is_allowed=True, invalid=invalid)
        return _Looked(True, source, facts, is_live, first_at)

    def _judge(
        self, connection: ReplayConnection, call: Call, request: ReplayRequest, looked: _Looked, asked_ms: int
    ) -> None:
        server = self._server
        try:
            if looked.invalid is not None:
                server.sessions.refused[looked.invalid.code] += 1
                raise looked.invalid
            session = server.sessions.start(
                request,
                looked.facts,
                lambda _: looked.first_at,
                asked_ms,
                is_live=looked.is_live,
                counters=frozenset(server.named_counters),
                is_allowed=looked.is_allowed,
                identity=connection.sender,
            )
        except ReplayRefused as refused:
            self._refuse_start(connection, call, self._with_cut(refused, request, looked))
            if looked.source is not None:
                looked.source.close()
            return
        assert looked.source is not None, "without a log it was refused"
        served = ServedSession(session, looked.source, server, connection.sender)
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
            served.carry_out([e.ReleaseLease()])
            served.source.close()
            self._refuse_start(connection, call, _ended_early(served.session))
            return
        for effect in served.handle(event):
            if isinstance(effect, e.Refuse):
                refused = ReplayRefused(effect.code, effect.why, segment=effect.segment)
                self._refuse_start(connection, call, self._with_cut(refused, served.session.plan, looked))
            elif isinstance(effect, e.Started) and not connection.is_open:
                served.handle(e.Stop())  # its id was not sent to anybody
            elif isinstance(effect, e.Started):
                facts, plan = looked.facts, served.session.plan
                assert facts is not None, "it was judged by them"
                tip = max(facts.start, tip_of(facts, plan.bound, self._server.counter(plan.bound)).bound)
                self.answer(
                    connection,
                    call,
                    wire.StartReplayResponse(
                        session_id=served.session.id,
                        start_offset=effect.position,
                        log_start_offset=facts.start,
                        end_offset=tip if plan.end is None else plan.end,
                    ),
                )

    def _with_cut(self, refused: ReplayRefused, asked: ReplayRequest | ReplayPlan, looked: _Looked) -> ReplayRefused:
        """For a reader that resumes above a cut, the refusal's range ends at the cut."""
        source, facts, before, position = looked.source, looked.facts, asked.epoch_before, asked.position
        is_late = refused.code is ErrorCode.TRUNCATED or refused.code is ErrorCode.INVALID_POSITION
        if source is None or facts is None or before is None or not isinstance(position, int) or not is_late:
            return refused
        told = source.cut_since(position, before, facts)
        if isinstance(told, e.ReadFailed):
            return ReplayRefused(told.code, told.why)
        return ReplayRefused(refused.code, refused.why, start=facts.start, end=told.offset)

    def _refuse_start(self, connection: ReplayConnection, call: Call, refused: ReplayRefused) -> None:
        segment = -1 if refused.segment is None else refused.segment
        response = wire.StartReplayResponse(error_code=refused.code, error_message=refused.why, segment=segment)
        if refused.start is not None and refused.end is not None:
            response = replace(response, log_start_offset=refused.start, end_offset=refused.end)
        self.answer(connection, call, response)

    def _attach(self, connection: ReplayConnection, call: Call, asked: wire.AttachRequest) -> None:
        served = self._server.served.get(asked.session_id)
        if served is not None and served.identity != connection.sender:
            self._server.recordings.access.refused(connection.sender, ApiKey.ATTACH)
            served = None  # as one that is not there
        if served is None or served.session.state is not ReplayState.INIT:
            why = "no such replay, or its time to attach is over, or it has a subscriber"
            self.refuse(connection, call, ErrorCode.UNKNOWN_REPLAY, why)
            return
        self.answer(connection, call, wire.AttachResponse())
        if connection.is_open:
            served.attach(connection, call, asked.credit_bytes)

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
            # The right to delete a recording includes the right to end others' sessions of it.
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
