"""A node copies recordings of other nodes: by a replay of each, batch for batch as it is, into a log of its own.

    replicate ─▶ the catalogue names the origin ─▶ replay from where the copy ends, with the epoch before it
                     ▲                                ├─ batches ─▶ append_as_is, flush, high watermark
                     │ restart of this node           ├─ the source is away, the disk is full: again, with backoff
                     └────────────────────────────────├─ the source has another history there: TRUNCATED, it ends
                                                      └─ a leader pushes to the copy: it ends, the push goes on from it

The copy lies under the outbox and name of its source, so a leader of that outbox finds its records and epochs there.
One that ends is not begun again by a restart; `replicate` begins it again.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from filtering.closing import ClosedAtExit
from filtering.retry import Backoff
from pushrep.errors import PushrepError
from pushrep.replay.catalogue import CATALOGUE_NAME, Catalogue, CopyOrigin
from pushrep.replay.client import ReplayClient
from pushrep.replay.node_connection import NodeAccess
from pushrep.replay.plan import FOLLOW, TO_END, RecordingInfo, ReplayRefused, ReplayRequest
from pushrep.replay.remote import is_at_end
from pushrep.replay.replay import Replay, ReplayFailed, ReplayTruncated
from pushrep.replicate.errors import Refusal
from pushrep.replicate.replay_recordings import KeptRecording, Recordings
from pushrep.replicate.replica import ReplicaLog
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState

_LOG = logging.getLogger("pushrep.node")
_BACKOFF = Backoff(first_s=0.1, longest_s=10.0)
_FLUSH_BYTES = 16 << 20
_FINAL = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.INVALID_POSITION,
        ErrorCode.OFFSET_OUT_OF_RANGE,
        ErrorCode.RECORDING_DELETED,
        ErrorCode.RECORDING_IN_USE,
        ErrorCode.TRUNCATED,
        ErrorCode.UNAUTHORISED,
        ErrorCode.UNKNOWN_RECORDING,
    }
)
"""What trying again does not change."""


class CopyState(NamedTuple):
    """A copy: the next offset, and the source's end as it was seen last. end: why it is over, None while it runs.

    why: the last trouble, or the reason of the end.
    """

    recording_id: int
    name: str
    position: int
    tip: int
    end: str | None
    why: str


class _Copy:
    """One copy. `state` is replaced whole. noting: held while the catalogue is told that it begins or is over."""

    def __init__(self, recording: KeptRecording) -> None:
        assert recording.entry.origin is not None, "it is a copy"
        self.recording, self.origin = recording, recording.entry.origin
        self.noting, self.stopped = threading.Lock(), threading.Event()
        self.state = CopyState(recording.entry.recording_id, str(recording.entry.tp), 0, 0, None, "")
        self.replay: Replay | None = None
        self.thread: threading.Thread | None = None


class RecordingCopies(ClosedAtExit):
    """The copies of a node. Thread-safe. on_worker: calls in the thread that may use the catalogue.
    access: how to connect to the sources.
    """

    def __init__(
        self, recordings: Recordings, on_worker: Callable[[Callable[[], Any]], Any], access: Callable[[], NodeAccess]
    ) -> None:
        self._recordings, self._on_worker, self.access = recordings, on_worker, access
        self._copies: dict[int, _Copy] = {}
        self._lock, self._closing = threading.Lock(), False
        recordings.is_copied = self._runs

    def resume(self) -> None:
        """Go on with the copies that ran when the node stopped. In the worker's thread.

        Reads the catalogue beside `Recordings`, which looks at every outbox when it opens.
        """
        store = self._recordings.store
        if not store.filesystem.exists(store.data / CATALOGUE_NAME):
            return
        for entry in Catalogue.open(store.data, store.filesystem):
            if entry.origin is None or entry.origin.is_done or entry.state is RecordingState.DELETED:
                continue
            with self._lock:
                if self._runs(entry.recording_id):
                    continue
                copy = self._copies[entry.recording_id] = _Copy(KeptRecording(entry, store.outbox(entry.outbox_id)))
            self._start(copy)

    def replicate(self, origin: CopyOrigin, *, into: int | None = None) -> CopyState:
        """Begin to copy, or go on, or do nothing if it runs; the state. into: the id that the copy has here.

        Raises ReplayRefused, NodeUnreachable for a source that does not answer now.
        """
        with ReplayClient(origin.address, node=self.access()) as client:
            info = _described(client, origin.recording_id)
        recording = self._target(info, into)
        recording_id = recording.entry.recording_id
        with self._lock:
            if self._closing:  # nobody would end it
                raise ReplayRefused(ErrorCode.NODE_STOPPING, "the node stops")
            before = self._copies.get(recording_id)
            if before is not None and self._runs(recording_id):
                if replace(before.origin, is_done=False) != origin:
                    why = f"recording {recording_id} is a copy of {before.origin}, which runs: stop it"
                    raise ReplayRefused(ErrorCode.RECORDING_IN_USE, why)
                return before.state
            copy = _Copy(KeptRecording(replace(recording.entry, origin=origin), recording.kept))
            self._copies[recording_id] = copy
        try:
            with copy.noting:
                if not copy.stopped.is_set():
                    self._on_worker(lambda: self._recordings.catalogue.originates(recording_id, origin))
        except BaseException as error:
            copy.state = copy.state._replace(end="FAILED", why=str(error))
            raise
        self._start(copy)
        return copy.state

    def state(self, recording_id: int) -> CopyState:
        """Raises ReplayRefused (UNKNOWN_RECORDING) for what is no copy, or did not run since the node started."""
        copy = self._copies.get(recording_id)
        if copy is None:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"no copy {recording_id} was begun here")
        return copy.state

    def end(self, recording_id: int) -> CopyState:
        """End a copy; it is what it is. Raises ReplayRefused (UNKNOWN_RECORDING)."""
        self.state(recording_id)
        self._stop(copy := self._copies[recording_id])
        with copy.noting:
            self._over(copy, "STOPPED", "it was stopped here")
        return copy.state

    def close(self) -> None:
        """Stop all; a node that starts again goes on with them."""
        with self._lock:
            self._closing = True
        for copy in list(self._copies.values()):
            self._stop(copy)

    def _runs(self, recording_id: int) -> bool:
        copy = self._copies.get(recording_id)
        return copy is not None and copy.state.end is None

    def _target(self, info: RecordingInfo, into: int | None) -> KeptRecording:
        """The recording here of that log, made if it is not there. Raises ReplayRefused."""
        assert info.outbox_id is not None, "a node knows it"
        assert info.log_id is not None, "a node knows it"
        kept = self._recordings.store.outbox(info.outbox_id)
        tp = TopicIdPartition(info.log_id, info.topic, info.partition)
        try:
            self._recordings.store.describe(kept, tp, create=True)
        except Refusal as error:
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, str(error)) from error
        self._on_worker(self._recordings.reconcile)
        there = [one for one in self._on_worker(lambda: list(self._recordings.catalogue)) if one.tp == tp]
        mine = [one for one in there if one.outbox_id == kept.outbox_id and one.state is not RecordingState.DELETED]
        if not mine:
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, f"{tp} is being deleted here: ask again")
        entry = mine[0]
        recording = KeptRecording(entry, kept)
        if into not in {None, entry.recording_id}:
            why = f"{tp} of outbox {kept.outbox_id} is recording {entry.recording_id} here, not {into}"
            raise ReplayRefused(ErrorCode.INVALID_REQUEST, why)
        if self._recordings.is_led(recording):
            raise ReplayRefused(ErrorCode.RECORDING_IN_USE, f"{tp} is its leader's to write here")
        return recording

    def _start(self, copy: _Copy) -> None:
        with self._lock:
            if not self._closing and not copy.stopped.is_set():
                copy.thread = threading.Thread(target=self._run, args=(copy,), name="pushrep-copy", daemon=True)
                copy.thread.start()

    def _stop(self, copy: _Copy) -> None:
        copy.stopped.set()
        if (replay := copy.replay) is not None:
            replay.stop()
        with self._lock:
            thread = copy.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _over(self, copy: _Copy, end: str, why: str = "") -> None:
        done = replace(copy.origin, is_done=True)
        self._on_worker(lambda: self._recordings.catalogue.originates(copy.state.recording_id, done))
        copy.state = copy.state._replace(end=end, why=why)
        _LOG.info("%s is copied up to offset %d from %s: %s %s", copy.state.name, copy.state.position, done, end, why)

    def _run(self, copy: _Copy) -> None:
        failures = 0
        while not copy.stopped.is_set():
            before, end, why = copy.state.position, "", ""
            try:
                end, why = self._copied(copy)
            except ReplayTruncated as cut:
                why = str(cut)  # perhaps above what is in the copy: the next request tells
            except (ReplayRefused, ReplayFailed) as error:
                end, why = (error.code.name, str(error)) if error.code in _FINAL else ("", str(error))
            except (OSError, PushrepError) as error:
                why = str(error)
            if end:
                self._over(copy, end, why)
                return
            failures = 0 if copy.state.position > before else failures + 1
            if why and why != copy.state.why:
                _LOG.warning("%s is copied from %s, and waits: %s", copy.state.name, copy.origin, why)
            copy.state = copy.state._replace(why=why)
            copy.stopped.wait(_BACKOFF.pause_s(max(1, failures)))

    def _copied(self, copy: _Copy) -> tuple[str, str]:
        """Copy until something ends it; why it is over, empty if it is to be tried again."""
        origin = copy.origin
        if self._on_worker(lambda: self._recordings.find(copy.state.recording_id)) is None:
            return "RECORDING_DELETED", "it was deleted here"
        with ReplayClient(origin.address, node=self.access()) as client:
            info = _described(client, origin.recording_id)
            entry = copy.recording.entry
            if (info.outbox_id, info.log_id) != (entry.outbox_id, entry.tp.topic_id):
                raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"{origin} is another log now")
            replica = self._recordings.store.describe(copy.recording.kept, entry.tp, create=False)
            log = replica.log
            at = log.log_end_offset
            copy.state = copy.state._replace(position=at)
            if origin.until is not None and at >= origin.until:
                return "LIMIT_REACHED", ""
            before = log.leader_epochs.epoch_of(at - 1) if at > log.log_start_offset else None
            length = FOLLOW if origin.follows else TO_END
            request = ReplayRequest(
                origin.recording_id, at if before is not None else None, length, epoch_before=before
            )
            try:
                replay = client.replay(request)
            except ReplayRefused as refused:
                return _why_refused(client, origin, refused, at)
            with replay:
                copy.replay = replay
                if copy.stopped.is_set():  # by who did not see this replay
                    return "", ""
                replica.show_copied()  # after a crash the high watermark may be behind; the source has all of this
                return self._append_all(copy, replica, replay, is_new=before is None)

    def _append_all(self, copy: _Copy, replica: ReplicaLog, replay: Replay, *, is_new: bool) -> tuple[str, str]:
        unflushed, until = 0, copy.origin.until
        for one in replay.batches():
            header = one.batch.header
            if copy.stopped.is_set() or (until is not None and header.next_offset > until):
                break
            anew = header if is_new and header.base_offset > 0 else None
            if not replica.copy([one.batch], anew, lambda: self._recordings.is_led(copy.recording)):
                return "LED", "a leader writes it now, from where the copy ends"
            is_new, unflushed = False, unflushed + header.size_bytes
            if unflushed >= _FLUSH_BYTES or replay.position >= replay.tip:
                replica.show_copied()
                unflushed = 0
            copy.state = copy.state._replace(position=header.next_offset, tip=replay.tip, why="")
        else:
            replica.show_copied()
            return ("", "") if replay.end_reason is None or copy.stopped.is_set() else (replay.end_reason.name, "")
        replica.show_copied()
        return ("", "") if copy.stopped.is_set() else ("LIMIT_REACHED", "")


def _described(client: ReplayClient, recording_id: int) -> RecordingInfo:
    found = client.recordings(from_id=recording_id, limit=1)
    if not found or found[0].recording_id != recording_id:
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"{client.where} has no recording {recording_id}")
    return found[0]


def _why_refused(client: ReplayClient, origin: CopyOrigin, refused: ReplayRefused, at: int) -> tuple[str, str]:
    """The end for a source that can't be replayed from `at` on; of one that was not cut, its end may only be late."""
    if is_at_end(refused, at):
        return ("", "") if origin.follows else ("LIMIT_REACHED", "")
    is_above = refused.code is ErrorCode.INVALID_POSITION and refused.end is not None and at > refused.end
    if not is_above:
        raise refused
    if client.tip_of(origin.recording_id, "written") >= at:
        return "", "its source has not shown these records again since it started"
    return "TRUNCATED", f"its source ends at offset {refused.end}, the copy at {at}"
