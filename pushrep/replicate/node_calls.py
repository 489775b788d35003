"""A node's answers to calls: messages and logs, no sockets.

ApiVersions is the connection's own; the calls of replay are refused with UNSUPPORTED.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pushrep.election.epochs import granted_end
from pushrep.election.errors import label
from pushrep.election.grants import Grant, are_rivals
from pushrep.election.messages import AppendRecordsPartition
from pushrep.errors import PushrepError
from pushrep.log import CorruptBatch, OffsetOutOfRange
from pushrep.log.errors import RepairRefused
from pushrep.records import CorruptRecordBatch
from pushrep.replicate.access import Access, audit, unauthorised
from pushrep.replicate.errors import Refusal
from pushrep.replicate.node_store import KeptOutbox, NodeStore
from pushrep.replicate.pusher import whole_batches
from pushrep.replicate.replica import ReplicaLog, begin_epochs
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as wire
from pushrep.wire.calls import PLACE_OF, ApiKey, refusal
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import OFFSET_MAX, Struct

_LOG = logging.getLogger("pushrep.node")
FETCH_BYTES_MAX = 8 << 20
_DAMAGED_MAX = 1000  # further ones are in later answers, once these are repaired
_DESCRIPTIONS_BYTES = 1 << 19  # of an answer's header; lists of epochs grow with every opening
_LOG_BYTES, _EPOCH_BYTES = 128, 15  # at most, in Avro


class NodeCalls:
    """The calls of one node. Thread-safe. describe: the node's status as JSON."""

    def __init__(self, store: NodeStore, address: Address, access: Access, describe: Callable[[], str]) -> None:
        self._store, self._address, self._access, self._describe = store, str(address), access, describe
        self._refusals: Counter[tuple[str, ErrorCode]] = Counter()
        self._lock = threading.Lock()
        self._calls: Mapping[type[Struct], Callable[[Any, str], Struct]] = {
            wire.AppendRecordsRequest: self._append_records,
            wire.BeatRequest: self._beat,
            wire.DescribeLogRequest: self._describe_log,
            wire.DescribeNodeRequest: self._describe_node,
            wire.EndOffsetForEpochRequest: self._end_offset_for_epoch,
            wire.FetchRecordsRequest: self._fetch_records,
            wire.GrantRequest: self._grant,
            wire.ListLogsRequest: self._list_logs,
            wire.DescribeDamageRequest: self._describe_damage,
            wire.RepairRecordsRequest: self._repair_records,
        }

    def answer(self, request: Struct, sender: str) -> Struct:
        """The answer to `request`; `sender` is the connection's identity (access.py). Its errors are counted."""
        answer = self._answer(request, sender)
        if refused := _refused_by(answer):
            name = type(request).__name__.removesuffix("Request")
            with self._lock:
                self._refusals.update((name, code) for code in refused)
        return answer

    def refusals(self) -> Mapping[tuple[str, ErrorCode], int]:
        """How often each call was answered with each error since the node started."""
        with self._lock:
            return dict(self._refusals)

    def _answer(self, request: Struct, sender: str) -> Struct:
        call, (key, _) = self._calls.get(type(request)), PLACE_OF[type(request)]
        try:
            if not self._access.could(sender, key):
                raise self._access.refused(sender, key)
            return refusal(key, ErrorCode.UNSUPPORTED) if call is None else call(request, sender)
        except Refusal as error:
            return refusal(key, error.code, str(error))
        except (OSError, PushrepError) as error:
            _LOG.error("%s failed: %s", type(request).__name__, error)
            return refusal(key, ErrorCode.KAFKA_STORAGE_ERROR, str(error))

    def _append_records(self, request: wire.AppendRecordsRequest, sender: str) -> Struct:
        grants = {}
        self._begin_epochs(request.partitions, sender)
        answered = self._store.carry_out(
            [partial(self._append, part, sender) for part in request.partitions],
            syncs=self._waits_for_several_syncs(request.partitions),
        )
        for part, (result, kept) in zip(request.partitions, answered, strict=True):
            is_another = result.grant_epoch > part.leader_epoch or result.generation != part.generation
            if is_another and kept is not None:
                grants[kept.outbox_id] = _grants(kept)
        return wire.AppendRecordsResponse(
            results=tuple([result for result, _ in answered]),
            grants=tuple(chain.from_iterable(grants.values())),
        )

    def _append(self, part: AppendRecordsPartition, sender: str) -> tuple[wire.AppendRecordsResult, KeptOutbox | None]:
        kept, replica = self._found(part.tp, ApiKey.APPEND_RECORDS, sender)
        if not self._may_lead(sender, ApiKey.APPEND_RECORDS, kept):
            return wire.AppendRecordsResult(error_code=ErrorCode.UNAUTHORISED), None
        if replica is None:
            # It was not described to this leader since the node started.
            return wire.AppendRecordsResult(error_code=ErrorCode.STALE_SESSION), None
        return replica.follow(part), kept

    def _begin_epochs(self, parts: Sequence[AppendRecordsPartition], sender: str) -> None:
        """A leader's sessions begin with such a request; without this, thousands of partitions would each sync an
        epoch.
        """
        asked: dict[ReplicaLog, AppendRecordsPartition] = {}
        for part in parts:
            if _may_begin_epoch(part):
                kept, replica = self._found(part.tp, ApiKey.APPEND_RECORDS, sender)
                if kept is None or replica is None:
                    continue
                if self._access.may(sender, ApiKey.APPEND_RECORDS, kept.outbox_id, begins=True):  # `_append` refuses
                    asked[replica] = part
        if len(asked) > 1:
            begin_epochs(asked)

    def _waits_for_several_syncs(self, parts: Sequence[AppendRecordsPartition]) -> bool:
        """Whether the parts wait for syncs, so that they are run concurrently; not if a partition is named twice."""
        if len(parts) < 2:
            return False
        flushes = self._store.settings.flush
        synced = [
            part.tp for part in parts if (part.records and (flushes or part.flush_wanted)) or _may_begin_epoch(part)
        ]
        return len(synced) > 1 and len({part.tp for part in parts}) == len(parts)

    def _describe_log(self, request: wire.DescribeLogRequest, sender: str) -> Struct:
        create, topics = request.create, [tp.topic for tp in request.partitions]
        self._access.check(sender, ApiKey.DESCRIBE_LOG, request.outbox_id, topics, begins=create)
        kept = self._store.outbox(request.outbox_id) if create else self._store.look_up(request.outbox_id)
        with kept.exclusive_open():
            logs = self._descriptions(kept, request.partitions or tuple(kept.partitions()), create=create)
            return wire.DescribeLogResponse(
                error_message=kept.refused(request.partitions),
                replica_epoch=self._store.replica_epoch,
                logs=logs,
                contact_age_ms=-1 if (age_ms := kept.contact_age_ms) is None else age_ms,
                **_shown(kept),
            )

    def _beat(self, request: wire.BeatRequest, sender: str) -> Struct:
        self._access.check(sender, ApiKey.BEAT, request.outbox_id)
        kept = self._store.look_up(request.outbox_id)
        state = kept.election_state
        generation, shown = state.generation, state.rival or state.grant
        is_fenced = request.generation < generation or (
            request.generation == generation and request.leader_epoch < state.newest_epoch
        )
        if not is_fenced and request.generation == generation:
            kept.note_contact(request.leader_epoch, is_last=request.is_last, successor=request.successor)
        elif request.generation == generation and kept.is_unfilled:
            shown = None  # it counts for nothing, so it deposes nobody
        return wire.BeatResponse(
            error_code=ErrorCode.FENCED_LEADER_EPOCH if is_fenced else ErrorCode.NONE,
            grant_epoch=-1 if shown is None else shown.epoch,
            grant_leader=-1 if shown is None else shown.leader,
            generation=0 if shown is None else shown.generation,
            stands_by=kept.stands_by,
        )

    def _grant(self, request: wire.GrantRequest, sender: str) -> Struct:
        offered = request.grant
        named = (offered.topic, *(tp.topic for tp in request.partitions))
        self._access.check(sender, ApiKey.GRANT, offered.outbox_id, named, begins=True)
        audit(sender, request, ApiKey.GRANT)
        kept = self._store.outbox(offered.outbox_id)
        with kept.exclusive_open():
            outcome = kept.offer_grant(offered, request.sender, request.member, is_first=request.is_first)
            kept_here, why = kept.election_state.generation, ""
            if outcome is not ErrorCode.NONE and are_rivals(offered.generation, kept_here):  # the code does not say it
                forced = f"it was forced in generation {label(offered.generation)}, beside {label(kept_here)}"
                why = f"{forced}, which is kept here: they are rivals"
            self._access.forget(offered.outbox_id)  # the grant may name other identities
            return wire.GrantResponse(
                error_code=outcome,
                error_message=why,
                logs=self._descriptions(kept, request.partitions, create=False),
                **_shown(kept),
            )

    def _descriptions(
        self, kept: KeptOutbox, tps: Iterable[TopicIdPartition], *, create: bool
    ) -> tuple[wire.LogDescription, ...]:
        """Describe as many of the first `tps` as fit into one answer, at least one; the sender asks for the rest."""
        tps = tuple(tps)
        if create:
            kept.create_missing(tps)
        described: list[wire.LogDescription] = []
        room = _DESCRIPTIONS_BYTES
        for tp in tps:
            try:
                one = description(self._store.describe(kept, tp, create=create))
            except Refusal as error:
                one = wire.LogDescription(tp=tp, error_code=error.code)
            room -= _LOG_BYTES + len(tp.topic) + _EPOCH_BYTES * len(one.leader_epochs)
            if described and room < 0:
                break
            described.append(one)
        return tuple(described)

    def _may_lead(self, sender: str, call: ApiKey, kept: KeptOutbox | None) -> bool:
        """Whether the sender may make this call about a partition; True for one that was not described, whose outbox is
        unknown.
        """
        if kept is None or self._access.may(sender, call, kept.outbox_id, begins=call is ApiKey.APPEND_RECORDS):
            return True
        self._access.refused(sender, call, kept.outbox_id)
        return False

    def _end_offset_for_epoch(self, request: wire.EndOffsetForEpochRequest, sender: str) -> Struct:
        results = []
        for question in request.partitions:
            kept, replica = self._found(question.tp, ApiKey.END_OFFSET_FOR_EPOCH, sender)
            if not self._may_lead(sender, ApiKey.END_OFFSET_FOR_EPOCH, kept):
                results.append(wire.WireEpochEnd(error_code=ErrorCode.UNAUTHORISED))
            elif replica is None:
                results.append(wire.WireEpochEnd(error_code=ErrorCode.UNKNOWN_TOPIC_ID))
            else:
                found = replica.state().log.end_at_or_below(question.epoch)
                results.append(wire.WireEpochEnd(epoch=found.epoch, end_offset=found.end_offset))
        return wire.EndOffsetForEpochResponse(results=tuple(results))

    def _fetch_records(self, request: wire.FetchRecordsRequest, sender: str) -> Struct:
        kept = self._owner_of(request.tp, ApiKey.FETCH_RECORDS, sender)
        if kept is not None:
            self._access.check(sender, ApiKey.FETCH_RECORDS, kept.outbox_id)
        log = self._described(request.tp, kept, (request.generation, request.grant_epoch)).log
        try:
            data = log.read_to_repair(request.offset, min(request.max_bytes, FETCH_BYTES_MAX))
            if data:
                whole_batches(data, request.offset, OFFSET_MAX, log.leader_epochs)
        except OffsetOutOfRange as error:
            raise Refusal(ErrorCode.OFFSET_OUT_OF_RANGE, str(error)) from error
        except (CorruptBatch, CorruptRecordBatch) as error:
            raise Refusal(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
        return wire.FetchRecordsResponse(
            log_end_offset=log.log_end_offset,
            log_start_offset=log.log_start_offset,
            high_watermark=log.high_watermark,
            records=(data,) if data else (),
        )

    def _list_logs(self, request: wire.ListLogsRequest, sender: str) -> Struct:
        if request.outbox_id == wire.NO_OUTBOX:
            every = self._store.outboxes()
            outboxes = [kept for kept in every if self._access.may(sender, ApiKey.LIST_LOGS, kept.outbox_id)]
        else:
            self._access.check(sender, ApiKey.LIST_LOGS, request.outbox_id)
            outboxes = [self._store.look_up(request.outbox_id)]
        listed = [self._listed(kept, tp) for kept in outboxes for tp in kept.partitions()]
        return wire.ListLogsResponse(logs=tuple(sorted(listed, key=lambda log: (log.outbox_id, log.tp))))

    def _describe_node(self, _request: wire.DescribeNodeRequest, sender: str) -> Struct:
        if not self._access.may(sender, ApiKey.DESCRIBE_NODE, None):
            raise unauthorised(sender, ApiKey.DESCRIBE_NODE)  # not counted, because scrapers ask, too
        return wire.DescribeNodeResponse(status=self._describe())

    def _describe_damage(self, request: wire.DescribeDamageRequest, sender: str) -> Struct:
        self._access.check(sender, ApiKey.DESCRIBE_DAMAGE, request.outbox_id)
        found = [
            wire.DamagedSegment(
                tp=replica.tp,
                base_offset=one.base_offset,
                offset=one.offset,
                end_offset=one.end_offset,
                reason=one.reason,
            )
            for replica in sorted(self._store.look_up(request.outbox_id).open_replicas(), key=lambda one: one.tp)
            for one in replica.log.damaged_segments
        ]
        return wire.DescribeDamageResponse(segments=tuple(found[:_DAMAGED_MAX]))

    def _repair_records(self, request: wire.RepairRecordsRequest, sender: str) -> Struct:
        self._access.check(sender, ApiKey.REPAIR_RECORDS, request.outbox_id)
        kept = next((one for one in self._store.owners_of(request.tp) if one.outbox_id == request.outbox_id), None)
        replica = self._described(request.tp, kept, (request.generation, request.grant_epoch))
        try:
            wanted = replica.repair(request.base_offset, request.records)
        except RepairRefused as error:
            raise Refusal(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
        return wire.RepairRecordsResponse(wanted_offset=-1 if wanted is None else wanted)

    def _owner_of(self, tp: TopicIdPartition, call: ApiKey, sender: str) -> KeptOutbox | None:
        """The outbox of a call that names only the log; the sender's, if there are several."""
        owners = self._store.owners_of(tp)
        mine = (kept for kept in owners if self._access.may(sender, call, kept.outbox_id))
        return next(mine, owners[0] if owners else None)

    def _found(self, tp: TopicIdPartition, call: ApiKey, sender: str) -> tuple[KeptOutbox | None, ReplicaLog | None]:
        kept = self._owner_of(tp, call, sender)
        return kept, kept.open_replica(tp) if kept is not None else None

    def _described(self, tp: TopicIdPartition, kept: KeptOutbox | None, rank: tuple[int, int]) -> ReplicaLog:
        """A log that was described to a leader with a grant of this rank. Raises Refusal."""
        replica = None if kept is None else kept.open_replica(tp)
        if replica is None or kept is None:
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"{tp} was not described")
        generation, epoch = rank
        if generation != kept.election_state.generation:  # another history
            why = f"generation {label(kept.election_state.generation)} is kept here"
            raise Refusal(ErrorCode.FENCED_LEADER_EPOCH, why)
        if epoch < kept.election_state.newest_epoch:
            raise Refusal(ErrorCode.FENCED_LEADER_EPOCH, f"epoch {kept.election_state.newest_epoch} is granted")
        return replica

    def _listed(self, kept: KeptOutbox, tp: TopicIdPartition) -> wire.ListedLog:
        try:
            log = self._store.describe(kept, tp, create=False).log
        except Refusal as error:
            return wire.ListedLog(outbox_id=kept.outbox_id, tp=tp, error_code=error.code)
        return wire.ListedLog(
            outbox_id=kept.outbox_id,
            tp=tp,
            log_end_offset=log.log_end_offset,
            log_start_offset=log.log_start_offset,
            high_watermark=log.high_watermark,
            leader_epoch=log.leader_epochs.latest_epoch,
            size_bytes=sum(path.stat().st_size for path in log.path.glob("*.log")),
        )


def _may_begin_epoch(part: AppendRecordsPartition) -> bool:
    """Whether this request, without records, may begin an epoch, as the first one of a session does."""
    return not part.records and part.append_offset <= part.epoch_start_offset


def _shown(kept: KeptOutbox) -> dict[str, Any]:
    """What every answer about logs says of the member."""
    state = kept.election_state
    return {
        "member": state.member,
        "highest_epoch": max(state.newest_epoch, state.number),
        "grants": _grants(kept),
        "directory_id": kept.directory_id,
        "is_unfilled": kept.is_unfilled,
        "generation": state.generation,
    }


def _grants(kept: KeptOutbox) -> tuple[Grant, ...]:
    """The newest grant first, then a rival that was forced beside it."""
    shown = (kept.election_state.grant, kept.election_state.rival)
    return tuple(grant for grant in shown if grant is not None)


def description(replica: ReplicaLog) -> wire.LogDescription:
    """The description of a log, for a leader or a candidate."""
    log, state = replica.log, replica.settled_state()
    ends, unfenced = state.log, state.unfenced
    granted = granted_end(ends, unfenced)
    return wire.LogDescription(
        tp=replica.tp,
        error_code=ErrorCode.LOG_OFFLINE if replica.finding is not None else ErrorCode.NONE,
        log_end_offset=ends.log_end_offset,
        log_start_offset=ends.log_start_offset,
        high_watermark=log.high_watermark,
        flushed_offset=log.flushed_offset,
        leader_epochs=tuple(wire.EpochStart(epoch=one, start_offset=at) for one, at in ends.leader_epochs.entries),
        granted_epoch=granted.epoch,
        granted_end_offset=granted.end_offset,
        ungranted_from=-1 if unfenced is None else unfenced.start_offset,
        damaged_from=-1 if (lacks_from := replica.lacks_from) is None else lacks_from,
    )


_NO_REFUSAL = frozenset({ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_ID})
"""A leader that makes its outbox asks for logs that are not here yet: the answer says so, and it makes them."""


def _refused_by(answer: Struct) -> list[ErrorCode]:
    parts = [answer, *getattr(answer, "results", ()), *getattr(answer, "logs", ())]
    return [code for part in parts if (code := getattr(part, "error_code", ErrorCode.NONE)) not in _NO_REFUSAL]
