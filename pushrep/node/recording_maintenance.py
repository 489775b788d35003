"""Keeping house among recordings: extend, truncate, purge, delete. In the worker's thread.

extend     a stopped log goes on at its end, under a higher epoch           refused for a member's log
truncate   sessions above the cut end first, then the log is cut            refused for a member's log
purge      whole segments below an offset; of a member's log, none above the leader's log start
delete     marked DELETED, sessions end; then the files go; then DeleteDone refused for a member's log, or while
                                                                            replays run, unless forced
A member's log: the newest grant names this node, or a leader's session is open on it. It is that leader's to change.
"""

from typing import NamedTuple, Protocol

from pushrep.errors import PushrepError
from pushrep.log import BelowHighWatermark, OffsetOutOfRange, SegmentLog, StillNeeded
from pushrep.node.access import audit
from pushrep.node.replay_recordings import KeptRecording, Recordings
from pushrep.node.store import Refusal
from pushrep.protocol import replay_messages as wire
from pushrep.protocol.calls import ApiKey
from pushrep.protocol.error_codes import ErrorCode
from pushrep.replay import events as e
from pushrep.replay.errors import KeepingRefused

_Asked = wire.ExtendRequest | wire.TruncateRequest | wire.PurgeRequest | wire.DeleteRequest


class _Log(NamedTuple):
    recording: KeptRecording
    log: SegmentLog


class SessionsByRecording(Protocol):
    """What is needed of the ReplayServer: its recordings, and the sessions of each."""

    @property
    def recordings(self) -> Recordings: ...
    def sessions_of(self, recording: KeptRecording) -> int:
        """How many there are."""
        ...

    def post_and_wait(self, recording: KeptRecording, event: e.Event) -> int:
        """Tell all of them; how many that ended."""
        ...


class RecordingMaintenance:
    """The four calls. Every method raises KeepingRefused, PushrepError, OSError."""

    def __init__(self, server: SessionsByRecording) -> None:
        self._server = server

    def extend(self, asked: wire.ExtendRequest, sender: str) -> wire.ExtendResponse:
        """The log goes on at its end."""
        recording, log = self._own(ApiKey.EXTEND, asked, sender)
        if self._server.recordings.is_live(recording):
            why = f"{recording.entry.tp} is written: only a stopped log can be extended"
            raise KeepingRefused(ErrorCode.RECORDING_IN_USE, why)
        newest = max(log.leader_epochs.latest_epoch, recording.kept.election_state.newest_epoch)
        if asked.leader_epoch <= newest:
            why = f"leader epoch {asked.leader_epoch} is not above {newest}: a log goes on under a higher one only"
            raise KeepingRefused(ErrorCode.FENCED_LEADER_EPOCH, why)
        log.flush()
        end = log.log_end_offset
        log.begin_epoch(asked.leader_epoch, end)
        self._server.recordings.extended(recording)
        return wire.ExtendResponse(end_offset=end)

    def truncate(self, asked: wire.TruncateRequest, sender: str) -> wire.TruncateResponse:
        """The log is cut at the base of the batch that holds the offset."""
        recording, log = self._own(ApiKey.TRUNCATE, asked, sender)
        if not log.log_start_offset <= asked.offset <= log.log_end_offset:
            why = f"offset {asked.offset} is outside of [{log.log_start_offset}, {log.log_end_offset}]"
            raise KeepingRefused(ErrorCode.INVALID_POSITION, why)
        at = next(log.batches(asked.offset, asked.offset + 1), None) if asked.offset < log.log_end_offset else None
        cut = asked.offset if at is None else at.header.base_offset
        if cut < log.log_start_offset:
            assert at is not None, "else it is the offset itself"
            why = f"offset {asked.offset} lies in the batch at {cut}, which begins below the log start"
            raise KeepingRefused(ErrorCode.INVALID_POSITION, f"{why}: cut at {at.header.next_offset} or above")
        epoch = log.leader_epochs.epoch_of(cut - 1)
        stopped = self._server.post_and_wait(recording, e.Truncated(cut, epoch))
        end = log.truncate_to(cut, force=True)
        self._server.post_and_wait(recording, e.Truncated(cut, epoch))  # who has begun meanwhile
        return wire.TruncateResponse(end_offset=end, stopped=stopped)

    def purge(self, asked: wire.PurgeRequest, sender: str) -> wire.PurgeResponse:
        """Whole segments below the offset go."""
        recording, log = self._log(ApiKey.PURGE, asked, sender)
        before = asked.before_offset
        if self._server.recordings.is_led(recording):
            before = min(before, log.log_start_offset)  # as the leader said last
        try:
            start = log.purge(before)
        except StillNeeded as error:
            raise KeepingRefused(ErrorCode.RECORDING_IN_USE, str(error)) from error
        except (OffsetOutOfRange, BelowHighWatermark) as error:
            raise KeepingRefused(ErrorCode.INVALID_POSITION, str(error)) from error
        return wire.PurgeResponse(log_start_offset=start)

    def mark_deleted(self, asked: wire.DeleteRequest, sender: str) -> KeptRecording:
        """It is DELETED in the catalogue, and its sessions are told."""
        recording = self._found(ApiKey.DELETE, asked, sender)
        if self._server.recordings.is_led(recording):
            raise _led(recording)
        running = self._server.sessions_of(recording)
        if running and not asked.force:
            why = f"{running} replays of recording {asked.recording_id} run: stop them, or force it"
            raise KeepingRefused(ErrorCode.RECORDING_IN_USE, why)
        if not self._server.recordings.deleted(recording):
            raise _led(recording)  # it came at this moment
        self._server.post_and_wait(recording, e.Deleted())
        return recording

    def remove(self, recording: KeptRecording) -> wire.DeleteDone:
        """The files of a recording that is marked; how many bytes that was, or why not all of them went."""
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
            raise KeepingRefused(ErrorCode.UNAUTHORISED, f"recording {recording_id} is not yours to keep")
        if recording is None:
            raise KeepingRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording_id}")
        audit(sender, asked, call)
        return recording

    def _log(self, call: ApiKey, asked: _Asked, sender: str) -> _Log:
        recording = self._found(call, asked, sender)
        try:
            replica = self._server.recordings.store.describe(recording.kept, recording.entry.tp, create=False)
        except Refusal as error:
            raise KeepingRefused(ErrorCode.UNKNOWN_RECORDING, str(error)) from error
        return _Log(recording, replica.log)

    def _own(self, call: ApiKey, asked: _Asked, sender: str) -> _Log:
        """A log that no leader has a say in."""
        found = self._log(call, asked, sender)
        if self._server.recordings.is_led(found.recording):
            raise _led(found.recording)
        return found


def _led(recording: KeptRecording) -> KeepingRefused:
    why = f"{recording.entry.tp} is its leader's to change: its newest grant names this node, or it is written"
    return KeepingRefused(ErrorCode.RECORDING_IN_USE, why)
