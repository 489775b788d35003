"""RemoteReplays: what ReplayClient does with a node: a connection for questions, and one for each replay."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pushrep.env import Clock
from pushrep.env.network import HostPort
from pushrep.log.directory_files import is_log_name, parse_log_name
from pushrep.replay.errors import KeepingRefused, NodeUnreachable, ReplayRefused
from pushrep.replay.model import RecordingInfo, ReplayRequest
from pushrep.replay.remote import RemoteSession
from pushrep.replay.wire import NodeAccess, NodeConnection, accepted, request_to_wire, started
from pushrep.wire import replay_messages as wire
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState
from pushrep.wire.values import OFFSET_MAX, Struct

S = TypeVar("S", bound=Struct)
_MAY_BE_REPEATED = (wire.DescribeRecordingsRequest, wire.StopReplayRequest, wire.StartReplayRequest)
"""A session that was started and not heard of ends by itself."""


@dataclass(slots=True)
class Deletion:
    """A recording that is being deleted: nobody is given it any more, its files go. `wait` for that."""

    recording_id: int
    _connection: NodeConnection = field(repr=False)
    _correlation_id: int = field(repr=False)

    def wait(self, timeout_s: float = 60) -> int:
        """Bytes that were freed. Raises KeepingRefused if files could not be removed, NodeUnreachable."""
        try:
            done = self._connection.event_of(self._correlation_id, timeout_s)
        finally:
            self._connection.close()
        assert isinstance(done, wire.DeleteDone), "a deletion has no other event"
        if done.error_code is not ErrorCode.NONE:
            raise KeepingRefused(done.error_code, done.error_message)
        return done.freed_bytes


class RemoteReplays:
    """The replays of a node. Thread-safe. Everything raises NodeUnreachable."""

    def __init__(self, address: HostPort, settings: NodeAccess, clock: Clock) -> None:
        self._address, self._settings, self._clock = address, settings, clock
        self._lock = threading.Lock()
        self._asking: NodeConnection | None = None
        self._started: dict[int, tuple[int, ReplayRequest, wire.StartReplayResponse]] = {}
        self._running: set[RemoteSession] = set()

    def recordings(self) -> list[RecordingInfo]:
        """By topic and partition. Raises ReplayRefused (UNAUTHORISED)."""
        found = [_info(one) for one in self._described("") if one.state is not RecordingState.DELETED]
        return sorted(found, key=lambda info: (info.topic, info.partition, info.recording_id or 0))

    def tip_of(self, recording: int | str, bound: str) -> int:
        """Where what comes from now on begins. Raises ReplayRefused."""
        recording_id = self._id_of(recording)
        if bound == "stable":
            tip = next((one.tip_offset for one in self._described("") if one.recording_id == recording_id), None)
            if tip is None:
                raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording}")
            return tip
        asked = request_to_wire(recording_id, ReplayRequest(recording_id, OFFSET_MAX, bound=bound))
        response = self._ask(asked, wire.StartReplayResponse)  # no log has that offset: the refusal tells its range
        if response.error_code is not ErrorCode.INVALID_POSITION:
            raise ReplayRefused(response.error_code, response.error_message)
        return response.end_offset

    def replay(self, request: ReplayRequest) -> RemoteSession:
        """A session and its subscriber in one, on a connection of its own. Raises ReplayRefused."""
        recording_id = self._id_of(request.recording)
        connection = NodeConnection(self._address, self._settings)
        try:
            response = started(connection, request_to_wire(recording_id, request))
            return self._attached(connection, recording_id, request, response)
        except BaseException:
            connection.close()
            raise

    def start_replay(self, request: ReplayRequest) -> int:
        """A session without a subscriber. Raises ReplayRefused."""
        recording_id = self._id_of(request.recording)
        response = accepted(self._ask(request_to_wire(recording_id, request), wire.StartReplayResponse))
        self._started[response.session_id] = (recording_id, request, response)
        return response.session_id

    def attach(self, session_id: int) -> RemoteSession:
        """The one subscriber of a session that has none yet. Raises ReplayRefused (UNKNOWN_REPLAY)."""
        known = self._started.pop(session_id, None)
        connection = NodeConnection(self._address, self._settings)
        try:
            if known is not None:
                return self._attached(connection, *known)
            session = RemoteSession(self._address, 0, None, self._settings, self._clock)
            session.attach(connection, session_id)
        except BaseException:
            connection.close()
            raise
        self._running.add(session)
        return session

    def stop(self, session_id: int) -> None:
        """End a session; unknown ids, and those that are over, are fine."""
        self._started.pop(session_id, None)
        self._ask(wire.StopReplayRequest(session_id=session_id), wire.StopReplayResponse)

    def stop_all(self, recording: int | str) -> int:
        """End all sessions of a recording; how many. Raises ReplayRefused."""
        response = self._ask(wire.StopReplayRequest(recording_id=self._id_of(recording)), wire.StopReplayResponse)
        if response.error_code is not ErrorCode.NONE:
            raise ReplayRefused(response.error_code, response.error_code.meaning)
        return response.stopped

    def close(self) -> None:
        """End what was started here; again is fine."""
        for session in list(self._running):
            session.close() if session.is_over else session.stop()
        self._running.clear()
        for session_id in list(self._started):
            with suppress(NodeUnreachable):
                self.stop(session_id)
        with self._lock:
            self._hang_up()

    # ---- keeping house: all of it raises KeepingRefused, ReplayRefused (UNKNOWN_RECORDING for a name)

    def extend(self, recording: int | str, leader_epoch: int) -> int:
        """A stopped recording goes on; at which offset."""
        asked = wire.ExtendRequest(recording_id=self._id_of(recording), leader_epoch=leader_epoch)
        return self._kept(asked, wire.ExtendResponse).end_offset

    def truncate(self, recording: int | str, offset: int) -> int:
        """Cut it at the batch that holds `offset`; its end then."""
        asked = wire.TruncateRequest(recording_id=self._id_of(recording), offset=offset)
        return self._kept(asked, wire.TruncateResponse).end_offset

    def purge(self, recording: int | str, before_offset: int) -> int:
        """Remove whole segments below; where it begins then."""
        asked = wire.PurgeRequest(recording_id=self._id_of(recording), before_offset=before_offset)
        return self._kept(asked, wire.PurgeResponse).log_start_offset

    def delete(self, recording: int | str, *, force: bool) -> Deletion:
        """Mark it as deleted; its files go meanwhile."""
        recording_id = self._id_of(recording)
        connection = NodeConnection(self._address, self._settings)
        try:
            asked = wire.DeleteRequest(recording_id=recording_id, force=force)
            correlation_id, response = connection.ask(asked, wire.DeleteResponse)
            _refuse_unless_kept(response.error_code, response.error_message)
        except BaseException:
            connection.close()
            raise
        return Deletion(recording_id, connection, correlation_id)

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

    def _id_of(self, recording: int | str) -> int:
        """The id that is meant. Raises ReplayRefused."""
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

    def _described(self, topic: str) -> Iterator[wire.Recording]:
        first = 0
        while True:
            asked = wire.DescribeRecordingsRequest(from_recording_id=first, topic=topic)
            response = self._ask(asked, wire.DescribeRecordingsResponse)
            if response.error_code is not ErrorCode.NONE:
                raise ReplayRefused(response.error_code, response.error_message)
            yield from response.recordings
            if not response.has_more:
                return
            first = response.recordings[-1].recording_id + 1

    def _kept(self, request: Struct, answer: type[S]) -> S:
        response = self._ask(request, answer)
        _refuse_unless_kept(response.error_code, response.error_message)  # type: ignore[attr-defined]  # all have both
        return response

    def _ask(self, request: Struct, answer: type[S]) -> S:
        """A connection that broke while nothing was asked is made anew, for what may be repeated."""
        with self._lock:
            may_be_old = self._asking is not None and isinstance(request, _MAY_BE_REPEATED)
            try:
                return self._connection().ask(request, answer)[1]
            except NodeUnreachable:
                self._hang_up()
                if not may_be_old:
                    raise
            try:
                return self._connection().ask(request, answer)[1]
            except NodeUnreachable:
                self._hang_up()
                raise

    def _hang_up(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    def _connection(self) -> NodeConnection:
        if self._asking is None:
            self._asking = NodeConnection(self._address, self._settings)
        return self._asking


def _refuse_unless_kept(code: ErrorCode, why: str) -> None:
    if code is not ErrorCode.NONE:
        raise KeepingRefused(code, why)


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
    )
