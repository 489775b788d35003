"""The logs of a node as recordings: their ids, access rights, and whether a leader writes them.

    <data>/.pushrep_recordings          the catalogue: an id once given is never another log's (pushrep/replay)

A log is live while a leader's session is open on it, and while one may come back: if there was none since the node's
start, and the newest grant names this node. An extended log is live until the node stops.
"""

from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pushrep.election.follower import NO_SESSION
from pushrep.env import Filesystem
from pushrep.log import LogClosed, LogReader, NotALog, SegmentLog
from pushrep.log.directory_files import PARTITION_METADATA_NAME, read_partition_metadata
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replay.catalogue import Catalogue, CatalogueEntry, FoundLog
from pushrep.replay.source import LogSource
from pushrep.replicate.access import Access
from pushrep.replicate.node_store import KeptOutbox, NodeStore, Refusal
from pushrep.wire import replay_messages as wire
from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode

Marker: TypeAlias = tuple[int, LeaderEpochs | None]
"""How often a log was opened anew, and its epochs: the same objects as long as nothing has happened."""


class KeptRecording(NamedTuple):
    """A recording and the outbox whose log it is."""

    entry: CatalogueEntry
    kept: KeptOutbox


class NodeSource(LogSource):
    """A log of this node. Its leader may make the node close it and open it again."""

    def __init__(self, recording: KeptRecording, recordings: "Recordings", log: SegmentLog | None) -> None:
        self._recording, self._recordings = recording, recordings
        self.reopened = 0
        path = recording.kept.directory / str(recording.entry.tp)
        super().__init__(path, log, recordings.store.filesystem)

    def marker(self) -> Marker:
        """Changes with a cut, even if the log has grown over it since, when its epochs differ or it was reopened."""
        try:
            epochs = self._log.leader_epochs if isinstance(self._log, SegmentLog) else None
        except LogClosed:
            epochs = None
        return self.reopened, epochs

    def wait_settled(self) -> None:
        """Wait until what its leader has asked for is carried out."""
        replica = self._recording.kept.open_replica(self._recording.entry.tp)
        if replica is not None:
            replica.settled_state()

    def _now_open(self) -> SegmentLog | LogReader:
        self.reopened += 1
        replica = self._recording.kept.open_replica(self._recording.entry.tp)
        if replica is not None and replica.failure is None:
            return replica.log
        return self._reader(self.path)

    def _is_live(self) -> bool:
        return self._recordings.is_live(self._recording)


class Recordings:
    """The recordings of a node. For the worker's thread, except `is_live`, `may` and `source`."""

    def __init__(self, store: NodeStore, address: str, access: Access) -> None:
        self.store, self.access = store, access
        self._address = address
        self._opened: Catalogue | None = None
        self._extended: set[int] = set()

    @property
    def catalogue(self) -> Catalogue:
        """Opened when it is first asked for. Raises CorruptCatalogue, OSError."""
        if self._opened is None:
            self._opened = Catalogue.open(self.store.data, self.store.filesystem)
            for entry in self._opened:
                if entry.is_removing:  # the node stopped while its files were being removed
                    self._finish_removing(KeptRecording(entry, self.store.outbox(entry.outbox_id)))
            self.reconcile()
        return self._opened

    def reconcile(self) -> None:
        """Give an id to every log here without one. Raises OSError."""
        catalogue = self.catalogue  # first: opening it finishes deletions
        found = [
            FoundLog(tp, 0, outbox_id=kept.outbox_id) for kept in self.store.outboxes() for tp in kept.partitions()
        ]
        catalogue.reconcile(found, self.store.clock.wall_ms())

    def find(self, recording_id: int) -> KeptRecording | None:
        """The recording, if it is not deleted. Raises CorruptCatalogue, OSError."""
        for entry in self.catalogue:
            if entry.recording_id == recording_id and entry.state is not wire.RecordingState.DELETED:
                return KeptRecording(entry, self.store.outbox(entry.outbox_id))
        return None

    def source(self, recording: KeptRecording) -> NodeSource | None:
        """Its log, opened for leases; None if it can't be opened."""
        try:
            replica = self.store.describe(recording.kept, recording.entry.tp, create=False)
            return NodeSource(recording, self, replica.log)
        except (Refusal, NotALog):
            return None

    def may(self, call: ApiKey, recording: KeptRecording | None, sender: str) -> bool:
        """Whether `sender` may make this call about it (None: one that is not here); a refusal is counted."""
        outbox_id = None if recording is None else recording.entry.outbox_id
        if self.access.may(sender, call, outbox_id):
            return True
        self.access.refused(sender, call)  # the same text, whether it is another's or not here
        return False

    def is_live(self, recording: KeptRecording) -> bool:
        """Whether it has a writer."""
        if recording.entry.recording_id in self._extended:
            return True
        replica = recording.kept.open_replica(recording.entry.tp)
        session = replica.state().session if replica is not None else NO_SESSION
        return self.is_member(recording) if session == NO_SESSION else not session.is_over

    def is_led(self, recording: KeptRecording) -> bool:
        """Whether only a leader may change it: the newest grant names this node, or a leader's session is open."""
        replica = recording.kept.open_replica(recording.entry.tp)
        session = replica.state().session if replica is not None else NO_SESSION
        return self.is_member(recording) or (session != NO_SESSION and not session.is_over)

    def is_member(self, recording: KeptRecording) -> bool:
        """Whether the newest grant names this node; a grant that names a member without an address may mean it."""
        grant = recording.kept.election_state.grant
        if grant is None:
            return False
        return any(member.address in {self._address, ""} for member in (*grant.members, *grant.previous_members))

    def extended(self, recording: KeptRecording) -> None:
        """It goes on here. Raises OSError."""
        self.catalogue.resumed(recording.entry.recording_id)
        self._extended.add(recording.entry.recording_id)

    def deleted(self, recording: KeptRecording) -> bool:
        """Mark it as deleted, durably; False, and nothing changed, if a leader has it. Raises OSError.

        It can't be replayed any more, and leaders can't have its log until `remove` ends.
        """
        kept, tp = recording.kept, recording.entry.tp
        if not kept.begin_removal(tp, lambda session: session == NO_SESSION or session.is_over):
            return False
        try:
            if not self.is_member(recording):  # a grant that came meanwhile relies on these logs
                self.catalogue.deleted(recording.entry.recording_id)
                self._extended.discard(recording.entry.recording_id)
                return True
        except BaseException:
            kept.end_removal(tp)
            raise
        kept.end_removal(tp)
        return False

    def remove(self, recording: KeptRecording) -> int:
        """Remove the files of a log that `deleted` has marked; returns their bytes. Raises OSError."""
        try:
            return self._remove(recording)
        finally:
            recording.kept.end_removal(recording.entry.tp)

    def _remove(self, recording: KeptRecording) -> int:
        filesystem, directory = self.store.filesystem, recording.kept.directory / str(recording.entry.tp)
        recording.kept.release(recording.entry.tp)
        if filesystem.exists(directory) and read_partition_metadata(directory, filesystem) in {
            None,
            recording.entry.tp.topic_id,
        }:
            freed = remove_files(filesystem, directory)
            recording.kept.forget_removed()
        else:
            freed = 0
        self.catalogue.removed(recording.entry.recording_id)
        return freed

    def _finish_removing(self, recording: KeptRecording) -> None:
        kept, tp = recording.kept, recording.entry.tp
        if self.is_member(recording) or not kept.begin_removal(tp, lambda session: session == NO_SESSION):
            # Its leader came first and relies on these files: that is another recording now.
            self.catalogue.removed(recording.entry.recording_id)
        else:
            self.remove(recording)

    def described(self, asked: wire.DescribeRecordingsRequest, sender: str) -> wire.DescribeRecordingsResponse:
        """The answer. Raises CorruptCatalogue, OSError."""
        self.reconcile()
        chosen: list[wire.Recording] = []
        for entry in self.catalogue:
            if entry.recording_id >= asked.from_recording_id and asked.topic in {"", entry.tp.topic}:
                if not self._may_see(entry, sender):
                    continue
                if len(chosen) == min(max(1, asked.limit), _ENTRIES_MAX):
                    return wire.DescribeRecordingsResponse(recordings=tuple(chosen), has_more=True)
                chosen.append(self._wire(entry))
        could = self.access.everywhere(sender, ApiKey.DESCRIBE_RECORDINGS)
        if not chosen and not could and not any(self._may_see(entry, sender) for entry in self.catalogue):
            self.access.refused(sender, ApiKey.DESCRIBE_RECORDINGS)
            return wire.DescribeRecordingsResponse(
                error_code=ErrorCode.UNAUTHORISED, error_message="no recording here is for you: ask for --allow"
            )
        return wire.DescribeRecordingsResponse(recordings=tuple(chosen))

    def _may_see(self, entry: CatalogueEntry, sender: str) -> bool:
        return self.access.may(sender, ApiKey.DESCRIBE_RECORDINGS, entry.outbox_id)

    def _wire(self, entry: CatalogueEntry) -> wire.Recording:
        start, tip, stop, state = entry.start_offset, entry.start_offset, entry.stop_offset or -1, entry.state
        damaged_from: int | None = None
        if state is not wire.RecordingState.DELETED:
            recording = KeptRecording(entry, self.store.outbox(entry.outbox_id))
            replica = recording.kept.open_replica(entry.tp)
            source = NodeSource(recording, self, replica.log if replica is not None else None)
            try:
                facts = source.facts(with_liveness=True)
                damaged_from = source.damaged_from(facts)
            finally:
                source.close()
            start, tip, stop = facts.start, max(facts.start, facts.stable), -1 if facts.is_live else facts.written
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
        )


_ENTRIES_MAX = 1000


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
