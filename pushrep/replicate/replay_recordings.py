"""The logs of a node as recordings: their ids, access rights, and whether a leader writes them.

    <data>/.pushrep_recordings          the catalogue: an id once given is never another log's (pushrep/replay)

extend     a stopped log goes on at its end, under a higher epoch           refused for a member's log
truncate   sessions above the cut end first, then all above is erased, or set aside     refused for a member's log
purge      whole segments below an offset; of a member's log, none above the leader's log start
delete     marked DELETED, sessions end; then the files go; then DeleteDone refused for a member's log, or while
                                                                            replays run, unless forced
A deletion goes on until its files are gone, also after a failure or a restart: until then nobody gets a log of that
name. It is tried again when somebody asks for the log, when recordings are listed, and when the node starts.
A member's log: the newest grant lists this node's directory, or a leader's session is open on it. Only that leader may
change it; a copy whose outbox is no more can be deleted all the same, if its leader is not heard (outbox_gone).
A log is live while a leader's session is open on it, and while one may come back: if there was none since the node's
start, and the newest grant names this node. An extended log is live until the node stops.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias
from uuid import UUID

from pushrep.election.candidate import LEADER_ALIVE_MS
from pushrep.election.follower import NO_SESSION, ReplicaSession
from pushrep.env import Filesystem
from pushrep.errors import PushrepError
from pushrep.log import (
    BelowHighWatermark,
    LogReader,
    NotALog,
    OffsetOutOfRange,
    SegmentLog,
    StillNeeded,
)
from pushrep.log.directory_files import PARTITION_METADATA_NAME, read_partition_metadata
from pushrep.log.published import LogOffsets
from pushrep.replay.catalogue import Catalogue, CatalogueEntry, FoundLog
from pushrep.replay.events import Deleted, Event, Truncated
from pushrep.replay.plan import ReplayRefused
from pushrep.replay.source import LogSource
from pushrep.replicate.access import Access, audit
from pushrep.replicate.errors import Refusal
from pushrep.replicate.node_store import KeptOutbox, NodeStore
from pushrep.status.table import time_text
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode

_LOG = logging.getLogger("pushrep.node")

_Asked: TypeAlias = wire.ExtendRequest | wire.TruncateRequest | wire.PurgeRequest | wire.DeleteRequest
Marker: TypeAlias = tuple[int, int]
"""How often a log was opened anew, and its history."""


class KeptRecording(NamedTuple):
    """A recording and the outbox whose log it is."""

    entry: CatalogueEntry
    kept: KeptOutbox


class NodeSource(LogSource):
    """A log of this node. Its leader may make the node close it and open it again."""

    def __init__(self, recording: KeptRecording, recordings: "Recordings", log: SegmentLog | None) -> None:
        self.recording, self._recordings = recording, recordings
        self.reopened = 0
        super().__init__(recording.kept.directory / str(recording.entry.tp), log, recordings.store.filesystem)

    def marker(self) -> Marker:
        """Changes with a cut, even if the log has grown over it since."""
        return self.reopened, self.history()

    def wait_settled(self) -> None:
        """Wait until what its leader has asked for is carried out."""
        replica = self.recording.kept.open_replica(self.recording.entry.tp)
        if replica is not None:
            replica.settled_state()

    def _now_open(self) -> SegmentLog | LogReader:
        self.reopened += 1
        replica = self.recording.kept.open_replica(self.recording.entry.tp)
        if replica is not None and replica.failure is None:
            return replica.log
        return self._reader(self.path)

    def _is_live(self) -> bool:
        return self._recordings.is_live(self.recording)


class Recordings:
    """The recordings of a node. For the worker's thread, except `is_live`, `may` and `source`.

    `extend`, `truncate`, `purge` and `mark_deleted` are calls; they raise ReplayRefused, PushrepError, OSError.
    """

    def __init__(self, store: NodeStore, access: Access) -> None:
        self.store, self.access = store, access
        self.sessions_of: Callable[[KeptRecording], int] = lambda _recording: 0
        """How many sessions a recording has; the replay server's, as the next one."""
        self.notify_sessions: Callable[[KeptRecording, Event], object] = lambda _recording, _event: None
        """Gives all of them an event."""
        self.is_copied: Callable[[int], bool] = lambda _recording_id: False
        """Whether it is being copied from another node."""
        self._opened: Catalogue | None = None
        self._extended: set[int] = set()
        self._unfinished: set[int] = set()
        """Deletions to try again."""

    def hold_deleted(self) -> None:
        """Refuse the logs whose deletion is not finished to everybody. Before anybody can ask for one."""
        try:
            for entry in Catalogue.open(self.store.data, self.store.filesystem):
                if entry.is_removing:
                    self.store.outbox(entry.outbox_id).begin_removal(entry.tp, lambda _session: True)
                    self._unfinished.add(entry.recording_id)
        except (OSError, PushrepError) as error:
            _LOG.error("not every unfinished deletion of a recording goes on: %s", error)

    @property
    def catalogue(self) -> Catalogue:
        """Opened when it is first asked for. Raises ReplayRefused, OSError."""
        if self._opened is None:
            self._opened = Catalogue.open(self.store.data, self.store.filesystem)
            for entry in self._opened:
                if entry.is_removing and entry.recording_id not in self._unfinished:
                    self._opened.removed(entry.recording_id)  # a leader may have written there since the start
            self.reconcile()
        return self._opened

    def reconcile(self) -> None:
        """Finish deletions, and give an id to every log here without one. Raises OSError."""
        catalogue = self.catalogue
        self.finish_deletions()
        known = {(one.outbox_id, one.tp.topic, one.tp.partition): one.tp.topic_id for one in catalogue}
        logs = []
        for kept in self.store.outboxes():
            for topic, partition, read in kept.found():
                topic_id = read if isinstance(read, UUID) else known.get((kept.outbox_id, topic, partition))
                if topic_id is not None:  # else its file is damaged, and it was never listed
                    logs.append(FoundLog(TopicIdPartition(topic_id, topic, partition), 0, outbox_id=kept.outbox_id))
        catalogue.reconcile(logs, self.store.clock.wall_ms())

    def find(self, recording_id: int) -> KeptRecording | None:
        """The recording, if it is not deleted. Raises ReplayRefused, OSError."""
        for entry in self.catalogue:
            if entry.recording_id == recording_id and entry.state is not wire.RecordingState.DELETED:
                return KeptRecording(entry, self.store.outbox(entry.outbox_id))
        return None

    def source(self, recording: KeptRecording) -> NodeSource:
        """Its log, opened for leases. Raises ReplayRefused (INVALID_RECORDING) if it can't be opened."""
        return NodeSource(recording, self, self._log_of(recording))

    def _log_of(self, recording: KeptRecording) -> SegmentLog:
        try:
            return self.store.describe(recording.kept, recording.entry.tp, create=False).log
        except (Refusal, NotALog) as error:
            raise ReplayRefused(ErrorCode.INVALID_RECORDING, str(error)) from error

    def may(self, call: ApiKey, recording: KeptRecording | None, sender: str) -> bool:
        """Whether `sender` may make this call about it (None: one that is not here); a refusal is counted."""
        outbox_id = None if recording is None else recording.entry.outbox_id
        if self.access.may(sender, call, outbox_id):
            return True
        self.access.refused(sender, call)  # the same text, whether it is another's or not here
        return False

    def is_live(self, recording: KeptRecording) -> bool:
        """Whether it has a writer."""
        if recording.entry.recording_id in self._extended or self.is_copied(recording.entry.recording_id):
            return True
        session = _session_of(recording)
        return self.is_member(recording) if session == NO_SESSION else not session.is_over

    def is_led(self, recording: KeptRecording) -> bool:
        """Whether only a leader may change it: the newest grant names this node, or a leader's session is open."""
        session = _session_of(recording)
        return self.is_member(recording) or (session != NO_SESSION and not session.is_over)

    def is_member(self, recording: KeptRecording) -> bool:
        """Whether the newest grant lists this node: by its directory, or by its index alone if it names none."""
        kept = recording.kept
        grant, member = kept.election_state.grant, kept.election_state.member
        return grant is not None and member in grant.indexes and grant.is_member(member, kept.directory_id)

    def deleted(self, recording: KeptRecording, *, outbox_gone: bool = False) -> bool:
        """Mark it as deleted, durably; False, and nothing changed, if a leader has it. Raises OSError.

        It can't be replayed any more, and leaders can't have its log until `remove` ends. outbox_gone: also where a
        grant relies on it. If that outbox comes back all the same, this member counts for nothing before it is filled.
        """
        kept, tp = recording.kept, recording.entry.tp
        if not kept.begin_removal(tp, lambda session: outbox_gone or session == NO_SESSION or session.is_over):
            return False
        with ExitStack() as undo:
            undo.callback(kept.end_removal, tp)
            if self.is_member(recording):
                if not outbox_gone:  # a grant that came meanwhile relies on these logs
                    return False
                kept.count_no_more(tp)
            self.catalogue.deleted(recording.entry.recording_id)
            undo.pop_all()
        return True

    def remove(self, recording: KeptRecording) -> wire.DeleteDone:
        """Remove the files of a log that `deleted` has marked; returns their bytes, or why not all were removed."""
        recording_id = recording.entry.recording_id
        try:
            return wire.DeleteDone(recording_id=recording_id, freed_bytes=self._remove(recording))
        except (OSError, PushrepError) as error:
            self._unfinished.add(recording_id)
            _LOG.error("%s is deleted, and its files are not gone yet: %s", recording.entry.tp, error)
            code, why = ErrorCode.KAFKA_STORAGE_ERROR, f"{error}: it is tried again"
            return wire.DeleteDone(recording_id=recording_id, error_code=code, error_message=why)

    def _remove(self, recording: KeptRecording) -> int:
        entry, kept, filesystem = recording.entry, recording.kept, self.store.filesystem
        directory, freed = kept.directory / str(entry.tp), 0
        kept.release(entry.tp)
        if filesystem.exists(directory) and read_partition_metadata(directory, filesystem) in {None, entry.tp.topic_id}:
            freed = remove_files(filesystem, directory)
        kept.forget_removed(entry.tp)
        self._end_deletion(recording)
        return freed

    def _end_deletion(self, recording: KeptRecording) -> None:
        self.catalogue.removed(recording.entry.recording_id)
        self._unfinished.discard(recording.entry.recording_id)
        recording.kept.end_removal(recording.entry.tp)

    def finish_deletions(self) -> None:
        """Try those again that failed, or that the node's end interrupted. Raises ReplayRefused, OSError."""
        if not self._unfinished:
            return
        for entry in self.catalogue:
            if entry.is_removing and entry.recording_id in self._unfinished:
                recording = KeptRecording(entry, self.store.outbox(entry.outbox_id))
                if self.is_member(recording) and not recording.kept.election_state.is_unfilled:
                    self._end_deletion(recording)  # a grant relies on these files: that is another recording now
                else:
                    self.remove(recording)

    def extend(self, asked: wire.ExtendRequest, sender: str) -> wire.ExtendResponse:
        """Let a stopped log go on at its end."""
        recording, log = self._own(ApiKey.EXTEND, asked, sender)
        if self.is_live(recording):
            why = f"{recording.entry.tp} is written: only a stopped log can be extended"
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, why)
        newest = max(log.leader_epochs.latest_epoch, recording.kept.election_state.newest_epoch)
        if asked.leader_epoch <= newest:
            why = f"leader epoch {asked.leader_epoch} is not above {newest}: a log goes on under a higher one only"
            raise ReplayRefused(ErrorCode.FENCED_LEADER_EPOCH, why)
        log.flush()
        end = log.log_end_offset
        log.begin_epoch(asked.leader_epoch, end)
        self._extended.add(asked.recording_id)
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
        self.notify_sessions(recording, Truncated(cut, epoch))
        end = log.truncate_to(cut, force=True, keep=asked.keep)
        self.notify_sessions(recording, Truncated(cut, epoch))  # sessions that have begun meanwhile
        return wire.TruncateResponse(end_offset=end)

    def purge(self, asked: wire.PurgeRequest, sender: str) -> wire.PurgeResponse:
        """Remove the whole segments below the offset."""
        recording, log = self._log(ApiKey.PURGE, asked, sender)
        before = asked.before_offset
        if self.is_led(recording):
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
        if self.is_led(recording) and (not asked.outbox_gone or _may_be_alive(recording)):
            raise _led(recording)
        running = self.sessions_of(recording)
        if running and not asked.force:
            why = f"{running} replays of recording {asked.recording_id} run: stop them, or force it"
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, why)
        if not self.deleted(recording, outbox_gone=asked.outbox_gone):
            raise _led(recording)  # a leader came at this moment
        try:
            self.notify_sessions(recording, Deleted())
        except BaseException:
            self._unfinished.add(recording.entry.recording_id)  # nobody removes its files now
            raise
        return recording

    def _found(self, call: ApiKey, asked: _Asked, sender: str) -> KeptRecording:
        recording_id = asked.recording_id
        recording = self.find(recording_id)
        if not self.may(call, recording, sender):
            raise ReplayRefused(ErrorCode.UNAUTHORISED, f"recording {recording_id} is not yours to keep")
        if recording is None:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording_id}")
        audit(sender, asked, call)
        return recording

    def _log(self, call: ApiKey, asked: _Asked, sender: str) -> tuple[KeptRecording, SegmentLog]:
        recording = self._found(call, asked, sender)
        return recording, self._log_of(recording)

    def _own(self, call: ApiKey, asked: _Asked, sender: str) -> tuple[KeptRecording, SegmentLog]:
        """The recording, if no leader owns its log."""
        recording, log = self._log(call, asked, sender)
        if self.is_led(recording):
            raise _led(recording)
        return recording, log

    def described(self, asked: wire.DescribeRecordingsRequest, sender: str) -> wire.DescribeRecordingsResponse:
        """The answer. Raises ReplayRefused, OSError."""
        self.reconcile()
        chosen: list[wire.Recording] = []
        for entry in self.catalogue:
            if entry.recording_id >= asked.from_recording_id and asked.topic in {"", entry.tp.topic}:
                if not self._may_see(entry, sender):
                    continue
                if len(chosen) == min(max(1, asked.limit), _ENTRIES_MAX):
                    return wire.DescribeRecordingsResponse(recordings=tuple(chosen), has_more=True)
                chosen.append(self._wire(entry))
        could = self.access.may(sender, ApiKey.DESCRIBE_RECORDINGS, None)
        if not chosen and not could and not any(self._may_see(entry, sender) for entry in self.catalogue):
            self.access.refused(sender, ApiKey.DESCRIBE_RECORDINGS)
            return wire.DescribeRecordingsResponse(
                error_code=ErrorCode.UNAUTHORISED, error_message="no recording here is for you: ask for --allow"
            )
        return wire.DescribeRecordingsResponse(recordings=tuple(chosen))

    def _may_see(self, entry: CatalogueEntry, sender: str) -> bool:
        return self.access.may(sender, ApiKey.DESCRIBE_RECORDINGS, entry.outbox_id)

    def _wire(self, entry: CatalogueEntry) -> wire.Recording:
        start, tip, stop, state = entry.start_offset, entry.start_offset, -1, entry.state
        damaged_from, invalid = None, ""
        if state is not wire.RecordingState.DELETED:
            recording = KeptRecording(entry, self.store.outbox(entry.outbox_id))
            replica = recording.kept.open_replica(entry.tp)
            try:
                with closing(NodeSource(recording, self, replica.log if replica is not None else None)) as source:
                    facts, is_live = source.live_facts()
                    damaged_from = source.damaged_from(facts)
                    invalid = "" if replica is not None else self._why_invalid(recording, source, facts)
                start, tip, stop = facts.start, max(facts.start, facts.stable), -1 if is_live else facts.end
            except PushrepError as error:
                invalid = str(error)
            state = wire.RecordingState.INVALID if invalid else state
        return wire.Recording(
            recording_id=entry.recording_id,
            outbox_id=entry.outbox_id,
            tp=entry.tp,
            start_offset=start,
            stop_offset=stop,
            tip_offset=tip,
            created_ms=entry.created_ms,
            state=state,
            damaged_from=-1 if damaged_from is None else damaged_from,
            invalid=invalid,
            origin="" if entry.origin is None else str(entry.origin),
        )

    def _why_invalid(self, recording: KeptRecording, source: NodeSource, facts: LogOffsets) -> str:
        """Of a log that is not open. One that could not be opened is tried again: its files may be back."""
        if recording.kept.is_unopened(recording.entry.tp):
            try:
                self._log_of(recording)
            except ReplayRefused as refused:
                return refused.why
        return source.why_invalid(facts)


_ENTRIES_MAX = 1000


def _session_of(recording: KeptRecording) -> ReplicaSession:
    replica = recording.kept.open_replica(recording.entry.tp)
    return replica.state().session if replica is not None else NO_SESSION


def _may_be_alive(recording: KeptRecording) -> bool:
    age_ms = recording.kept.contact_age_ms
    return age_ms is not None and age_ms < LEADER_ALIVE_MS


def _led(recording: KeptRecording) -> ReplayRefused:
    """Why it is not changed: who leads it, and whether they were heard; what a node can know of an outbox that is
    gone.
    """
    kept, tp = recording.kept, recording.entry.tp
    grant, contact = kept.election_state.grant, kept.last_contact
    led = "is written by a leader without a grant"
    if grant is not None:
        where = next((one.address for one in grant.members if one.index == grant.leader), "") or "its own service"
        led = f"is member {grant.leader}'s to change ({where}), which leads outbox {kept.outbox_id}"
    last = "none since this node's start" if contact.wall_ms < 0 else time_text(contact.wall_ms)
    replica = kept.open_replica(tp)
    held = (
        "" if replica is None else f"; it holds records [{replica.log.log_start_offset}, {replica.log.log_end_offset})"
    )
    why = f"{tp} {led}; last contact: {last}{held}"
    return ReplayRefused(ErrorCode.RECORDING_IN_USE, why)


def remove_files(filesystem: Filesystem, directory: Path) -> int:
    """Remove the segments, newest first, then the rest; returns the bytes.

    After a crash a shorter log is left, marked as deleted. partition.metadata goes last: without it another log could
    begin among these files.
    """
    freed = 0
    names = filesystem.list(directory)
    for name in sorted(
        names, key=lambda name: (name.endswith(".log"), name != PARTITION_METADATA_NAME, name), reverse=True
    ):
        path = directory / name
        with closing(filesystem.open(path, writable=False)) as file:
            freed += file.size()
        filesystem.remove(path)
    filesystem.sync_directory(directory)
    with suppress(OSError):
        directory.rmdir()  # an empty directory is no log, either
    return freed
