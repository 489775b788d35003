"""One log of a node: the rules judge its leader's requests, and the effects are carried out on the disk.

    request ─ follow(state, request) ─▶ effects ─ one by one, each done before the next ─▶ answer └ the disk fails: stop
                                             there, KAFKA_STORAGE_ERROR, this log is offline

One request at a time: the effects of one are done before the next is judged.
"""

import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pushrep.election import follower as does
from pushrep.election.epochs import LogEnds
from pushrep.election.follower import (
    NO_SESSION,
    Answer,
    FollowerEffect,
    ReplicaSession,
    ReplicaState,
    RequestFinding,
    follow,
    storage_error,
)
from pushrep.election.messages import AppendRecordsPartition
from pushrep.env import Clock, Filesystem
from pushrep.errors import PushrepError
from pushrep.log import AppendFailed, LogConfig, OffsetOutOfRange, SegmentLog, StillNeeded
from pushrep.log.errors import RepairRefused, is_shortage
from pushrep.log.segment_repair import SegmentRepair
from pushrep.records import BatchHeader, RecordBatch
from pushrep.replicate.election_state import ElectionStateStore
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult
from pushrep.wire.values import Part

_LOG = logging.getLogger("pushrep.node")
_LOGGED_AGAIN_MS = 60_000


class DiskTrouble:
    """Why a node's disk refused its last write, with the host and how full it is; None after a success.

    Logged at once, and again after a minute.
    """

    def __init__(self, path: Path, filesystem: Filesystem, clock: Clock) -> None:
        self._path, self._filesystem, self._clock = path, filesystem, clock
        self._logged_at_ms: int | None = None
        self.why: str | None = None

    def note(self, what: str, error: BaseException) -> None:
        try:
            full = f"{self._filesystem.usage(self._path).used_percent:.0f} % of its disk are used"
        except OSError:  # a lost disk: the first error has the reason
            full = "its disk does not say how full it is"
        self.why = f"{error} ({full}, host {platform.node()})"
        now_ms = self._clock.monotonic_ms()
        if self._logged_at_ms is None or now_ms - self._logged_at_ms >= _LOGGED_AGAIN_MS:
            self._logged_at_ms = now_ms
            _LOG.warning("%s: %s", what, self.why)


class ReplicaLog:
    """A replica's log. Thread-safe. A failed one is opened again when it is described next."""

    def __init__(  # noqa: PLR0913 - what a log stands on, all by name
        self,
        tp: TopicIdPartition,
        directory: Path,
        *,
        config: LogConfig,
        replica_epoch: int,
        flush: bool,
        state_store: ElectionStateStore,
        note_filled: Callable[[TopicIdPartition], None],
        note_contact: Callable[[int], None],
        news: Callable[[TopicIdPartition], None],
        filesystem: Filesystem,
        clock: Clock,
    ) -> None:
        """state_store: the outbox's. note_filled, note_contact: called when its leader filled the log, or was heard.
        news: called when readers may see something new. It must not wait.
        """
        self.tp, self.replica_epoch = tp, replica_epoch
        self.failure: BaseException | None = None
        """Why the log is offline, if its disk failed."""
        self.finding: RequestFinding | None = None
        """Why it waits for an operator; None if it does not."""
        self.last_contact_ms = -1
        self.wrong_since_ms = clock.wall_ms()
        """Since when `failure`, `finding`, `refused` or its damage is there; the newest of them."""
        self._trouble = DiskTrouble(directory, filesystem, clock)
        self._state_store, self._note_filled, self._note_contact = state_store, note_filled, note_contact
        self._clock, self._flush, self._news = clock, flush, news
        self._session: ReplicaSession = NO_SESSION
        self.lock = threading.Lock()
        """Held while a request is judged and carried out."""
        self._repair: SegmentRepair | None = None
        self._repair_lock = threading.Lock()
        self.log = SegmentLog.open(
            directory / str(tp),
            config,
            log_id=tp.topic_id,
            has_replicas=True,
            on_lost=partial(state_store.note_lost, str(tp)),
            filesystem=filesystem,
            clock=clock,
        )

    def settled_state(self) -> ReplicaState:
        """The state after the running request, if there is one; for the answer to a grant that was just stored.

        A request that was judged before the grant may still append records, which the answer has to include.
        """
        with self.lock:
            return self.state()

    def state(self) -> ReplicaState:
        """The state for the rules."""
        log, state = self.log.state(), self._state_store.kept
        return ReplicaState(
            log=LogEnds(log.log_start_offset, log.log_end_offset, log.leader_epochs),
            flushed_offset=log.flushed_offset,
            high_watermark=log.high_watermark,
            leader_epoch=state.leader_epoch,
            replica_epoch=self.replica_epoch,
            grant=state.grant,
            session=self._session,
            unfenced=state.unfenced.get(str(self.tp)) if state.unfenced else None,
            is_offline=self.finding is not None or log.damaged_from is not None,
        )

    def follow(self, request: AppendRecordsPartition) -> AppendRecordsResult:
        """Judge a request, carry out the effects, and return the answer."""
        if self._flush and not request.flush_wanted:
            request = replace(request, flush_wanted=True)
        request.split()
        with self.lock:
            if self.failure is not None:
                return AppendRecordsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR)
            self.last_contact_ms = self._clock.wall_ms()
            state = self.state()
            try:
                effects = follow(state, request, self._batch_at)
                if state.is_offline and self._begins_refill(effects[-1], request):
                    effects = follow(self.state(), request, self._batch_at)
                self._carry_out_all(effects[:-1])
            except (OSError, PushrepError) as error:
                if not isinstance(error, AppendFailed) and not is_shortage(error):
                    return self._fail(error, state)
                # Nothing was written; the leader retries with backoff.
                self.wrong_since_ms = self._clock.wall_ms() if self.refused is None else self.wrong_since_ms
                self._trouble.note(str(self.tp), error)
                return storage_error(self.state())
            answer = effects[-1]
            assert isinstance(answer, Answer), "the last effect answers"
            if self.refused is not None and answer.result.error_code is ErrorCode.NONE and request.batches:
                self._trouble.why = None
            if answer.result.error_code is not ErrorCode.FENCED_LEADER_EPOCH:
                self._note_contact(request.leader_epoch)
            promised = self._state_store.kept
            if promised.unfilled:
                self._end_refill()
            if answer.result.error_code is ErrorCode.NONE and promised.is_unfilled:
                self._end_filling(request)
            return answer.result

    def epoch_to_begin(self, request: AppendRecordsPartition) -> does.BeginEpoch | None:
        """The epoch without a record that `follow` would first write, if any. Call it only under `lock`."""
        if self.failure is not None:
            return None
        for effect in follow(self.state(), request, self._batch_at):
            if not isinstance(effect, does.OpenSession):
                return effect if isinstance(effect, does.BeginEpoch) else None
        return None

    @property
    def refused(self) -> str | None:
        """Why its disk refused the last write; None after a success."""
        return self._trouble.why

    @property
    def lacks_from(self) -> int | None:
        """First offset of lost records; None if it has lost nothing."""
        unfilled_to = self._state_store.kept.unfilled.get(str(self.tp), 0)
        if self.log.damaged_from is None and unfilled_to > self.log.log_end_offset:
            return self.log.log_end_offset
        return self.log.damaged_from

    def _begins_refill(self, judged: FollowerEffect, request: AppendRecordsPartition) -> bool:
        """If a leader has the records after the damage, quarantine them here and be filled again.

        It surely has those below its high watermark, and those that it sends. If these are too few, wait for an
        operator.
        """
        damaged_from = self.log.damaged_from
        is_damaged = damaged_from is not None and self.finding is None
        if not is_damaged or not isinstance(judged, Answer) or judged.result.error_code is not ErrorCode.LOG_OFFLINE:
            return False
        unfilled_to = self._state_store.kept.unfilled.get(str(self.tp), 0)
        if max(request.high_watermark, request.end_offset) < unfilled_to:
            _LOG.warning(
                "%s is damaged from offset %d on, and its leader ends below %d", self.tp, damaged_from, unfilled_to
            )
            return False
        kept = self.log.quarantine()
        _LOG.warning(
            "%s is damaged from offset %d on and is filled again; what lay there: %s", self.tp, damaged_from, kept
        )
        return True

    def _end_filling(self, request: AppendRecordsPartition) -> None:
        """Note that the log is filled, by the same condition as for joining the in-sync set: it has everything
        acknowledged before this leader.
        """
        if self.log.log_end_offset >= max(request.high_watermark, request.epoch_start_offset):
            self.log.flush()  # the member will count as holding the records
            self._note_filled(self.tp)

    def _end_refill(self) -> None:
        unfilled_to = self._state_store.kept.unfilled.get(str(self.tp))
        if unfilled_to is not None and self.lacks_from is None:
            self._state_store.note_refilled(str(self.tp))
            _LOG.warning("%s holds everything up to offset %d again", self.tp, unfilled_to)

    def repair(self, base_offset: int, records: Sequence[Part]) -> int | None:
        """Repair a damaged segment with its leader's batches.

        Returns from which offset more are needed, None once it is whole. Pushes go on meanwhile. Raises RepairRefused,
        OSError; then nothing was changed.
        """
        with self._repair_lock:
            if self.failure is not None:
                raise RepairRefused(f"it is offline: {self.failure}")
            if self.finding is not None:  # a leader can't decide which of two histories is right
                raise RepairRefused(f"it waits for an operator: {self.finding.name}")
            repair, self._repair = self._repair, None
            try:
                if repair is not None and repair.base_offset != base_offset:
                    repair.close()
                    repair = None
                if repair is None and (repair := self.log.repair_segment(base_offset)) is None:
                    return None
                for part in records:
                    repair.add(part)  # type: ignore[arg-type]  # off the wire they are bytes
                if not repair.is_done:
                    self._repair = repair
                    return repair.wanted
            finally:
                if repair is not None and self._repair is None:
                    repair.close()
            _LOG.warning("%s: the segment %d was damaged, and is repaired by its leader", self.tp, base_offset)
            return None

    def copy(self, batches: Sequence[RecordBatch], begins: BatchHeader | None, is_led: Callable[[], bool]) -> bool:
        """Append batches of another node's recording; False, and nothing changed, if a leader has the log now.

        begins: the first one's header, if the log begins with it, above offset 0. Raises OSError, PushrepError.
        """
        with self.lock:
            if self.failure is not None:
                raise PushrepError(f"{self.tp} is closed: {self.failure}")
            if is_led():
                return False
            if begins is not None:
                self.log.begin_anew(begins.base_offset, begins.leader_epoch)
            self.log.append_as_is(batches)
            return True

    def show_copied(self) -> None:
        """Bring what was copied to disk, and show it to readers. Raises LogPoisoned."""
        self.log.flush()
        self.log.advance_high_watermark(self.log.log_end_offset)
        self._news(self.tp)

    def retire(self, may: Callable[[ReplicaSession], bool]) -> bool:
        """Stop following, if its session allows it; no request runs that could change that."""
        with self.lock:
            if not may(self._session):
                return False
            if self.failure is None:
                self.failure = PushrepError(f"{self.tp} is being removed")
            return True

    def close(self) -> None:
        """Close the log; disk errors are logged. A failed log is scanned when it is opened again."""
        with self.lock:
            if self.failure is None:
                self.failure = PushrepError(f"{self.tp} is closed")
        with self._repair_lock:  # no repair begins any more
            if self._repair is not None:
                self._repair.close()
                self._repair = None
        with self.lock:
            try:
                self.log.close()
            except (OSError, PushrepError) as error:
                _LOG.warning("%s was not closed clean: %s", self.tp, error)

    def _fail(self, error: BaseException, state: ReplicaState) -> AppendRecordsResult:
        _LOG.error("%s is offline, the others go on: %s", self.tp, error)
        self.failure, self.wrong_since_ms = error, self._clock.wall_ms()
        return replace(storage_error(state), flushed_offset=0)

    def _carry_out_all(self, effects: Sequence[FollowerEffect]) -> None:
        """Carry out the effects in order. Readers of written records are notified before they are flushed."""
        is_notified = True
        try:
            for effect in effects:
                if not is_notified and type(effect) is does.Flush:
                    self._news(self.tp)
                is_notified = False
                _DONE_BY[type(effect)](self, effect)
        finally:
            if not is_notified:
                self._news(self.tp)

    def _set_aside(self, effect: does.SetAside) -> None:
        kept = self.log.begin_anew(effect.offset, effect.leader_epoch)
        _LOG.warning("%s begins anew at offset %d; what it held is in %s", self.tp, effect.offset, kept)

    def _set_unfenced_aside(self, log: LogEnds) -> None:
        before = self.log.log_end_offset
        cut_unfenced(self.log, log)
        self._state_store.forget_unfenced(str(self.tp))
        _LOG.warning(
            "%s: %d records from offset %d on were appended without a grant, and another leads: they are kept in .cut",
            self.tp,
            before - log.log_end_offset,
            log.log_end_offset,
        )

    def _open_session(self, session: ReplicaSession) -> None:
        self._session = session

    def _go_offline(self, finding: RequestFinding) -> None:
        self.finding, self.wrong_since_ms = finding, self._clock.wall_ms()
        _LOG.error("%s waits for an operator: %s", self.tp, finding.name)

    def _cut(self, offset: int) -> None:
        if offset < self.log.log_end_offset and self._batch_at(offset) is None:
            # A log is cut between batches, and cutting at the batch's base could remove acknowledged records.
            raise PushrepError(f"{self.tp} was to be cut at {offset}, inside of a batch: one epoch has two histories")
        self.log.truncate_to(offset, keep=True)
        _LOG.warning("%s was cut at offset %d: its leader has other records there", self.tp, offset)

    def _move_start(self, offset: int) -> None:
        try:
            self.log.delete_records(offset)
        except StillNeeded:
            self.log.flush()  # records below may not be on disk yet
            try:
                self.log.delete_records(offset)
            except StillNeeded as error:  # a reader needs them; the leader repeats it with its next request
                _LOG.info("%s: %s", self.tp, error)

    def _batch_at(self, offset: int) -> bytes | None:
        try:
            data = self.log.read(offset, 1)
        except OffsetOutOfRange:
            return None
        return data if data and RecordBatch(data).header.base_offset == offset else None


_DONE_BY: Mapping[type, Callable[[ReplicaLog, Any], None]] = {
    does.Append: lambda self, do: self.log.append_as_is(
        [RecordBatch(batch.data, batch.header) for batch in do.batches]
    ),
    does.BeginEpoch: lambda self, do: self.log.begin_epoch(do.leader_epoch, do.start_offset),
    does.CloseSession: lambda self, _: self._open_session(self._session._replace(is_over=True)),
    does.Flush: lambda self, _: self.log.flush(),
    does.GoOffline: lambda self, do: self._go_offline(do.finding),
    does.OpenSession: lambda self, do: self._open_session(do.session),
    does.SetAside: lambda self, do: self._set_aside(do),
    does.SetHighWatermark: lambda self, do: self.log.advance_high_watermark(do.high_watermark),
    does.SetLogStart: lambda self, do: self._move_start(do.log_start_offset),
    does.SetUnfencedAside: lambda self, do: self._set_unfenced_aside(do.log),
    does.StoreEpoch: lambda self, do: self._state_store.store_epoch(do.leader_epoch),
    does.Truncate: lambda self, do: self._cut(do.offset),
}
assert {*_DONE_BY, Answer} == set(get_args(FollowerEffect)), "every effect is carried out"


def begin_epochs(asked: Mapping[ReplicaLog, AppendRecordsPartition]) -> None:
    """Write the epochs that these requests begin without a record together. `follow` finds them written.

    Failures are left to `follow`.
    """
    with ExitStack() as held:
        begun = []
        for replica, request in sorted(asked.items(), key=lambda one: one[0].tp):  # two requests that meet take turns
            held.enter_context(replica.lock)
            if (effect := replica.epoch_to_begin(request)) is not None:
                begun.append((replica.log, effect.leader_epoch, effect.start_offset))
        with suppress(OSError, PushrepError):
            if len(begun) > 1:
                begun[0][0].begin_epochs(begun)


def cut_unfenced(log: SegmentLog, kept: LogEnds) -> None:
    """Cut records appended without a grant, durably: the log is `kept` afterwards, the rest is in `.cut`.

    After the cut an epoch that starts exactly there is still in the list; the newest granted one replaces it. Raises
    LogPoisoned, OSError.
    """
    log.truncate_to(kept.log_end_offset, keep=True)
    newest = kept.leader_epochs.latest_epoch
    log.forget_epochs_above(newest)
    if log.leader_epochs.latest_epoch < newest:  # it had no record, and the unfenced one replaced it
        log.begin_epoch(newest, kept.log_end_offset)
