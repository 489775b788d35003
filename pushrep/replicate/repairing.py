"""Repair among members: a member's damaged segment is rebuilt with another's batches.

    the replica's   DescribeDamage ─▶ segments ─ RepairRecords with what our log has, from where it asks ─▶ whole
    our own         found by our scrub ─ FetchRecords from where the repair asks ─▶ log.repair_segment ─▶ whole

It does not change sessions, watermarks or the in-sync set. The repair checks received batches
(pushrep/log/segment_repair.py).
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from uuid import UUID

from pushrep.election.grants import Grant
from pushrep.errors import PushrepError
from pushrep.log import CorruptBatch, SegmentLog
from pushrep.log.errors import RepairRefused
from pushrep.log.scrub import ScrubFinding
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.pusher import whole_batches
from pushrep.replicate.settings import Replica
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import (
    DamagedSegment,
    DescribeDamageRequest,
    DescribeDamageResponse,
    DescribeLogRequest,
    DescribeLogResponse,
    FetchRecordsRequest,
    FetchRecordsResponse,
    RepairRecordsRequest,
    RepairRecordsResponse,
)
from pushrep.wire.values import OFFSET_MAX, Records

_LOG = logging.getLogger("pushrep.push")
_PIECE_BYTES = 1 << 20
_REMEDY = "start a member that holds these records, or stop this one and run pushrep log repair --from-copy"


class Repairs:
    """The repairs of one outbox's logs by its leader. Thread-safe: each replica is handled in its own thread.

    logs: the leader's. gave_up: called between two pieces; if it is true, the rest waits for the next time.
    """

    def __init__(self, outbox_id: UUID, grant: Grant, logs: Mapping[TopicIdPartition, SegmentLog]) -> None:
        self._outbox_id, self._grant, self._logs = outbox_id, grant, logs
        self._own_turn = threading.Lock()
        self.own_trouble: dict[TopicIdPartition, str] = {}
        """Why our own segments are still damaged, by the last member asked."""

    def repair(self, replica: Replica, client: ReplicaClient, gave_up: Callable[[], bool]) -> str | None:
        """Repair this replica's damage, then our own; returns why some of the replica's remains.

        Raises NodeUnreachable.
        """
        trouble = self._theirs(replica, client, gave_up)
        found = [(tp, log) for tp, log in self._logs.items() if log.scrub.status.findings]
        damaged = [(tp, one) for tp, log in found for one in log.damaged_segments]
        if damaged and self._own_turn.acquire(blocking=False):
            try:
                self._ours(replica, client, damaged, gave_up)
            finally:
                self._own_turn.release()
        if not damaged:
            self.own_trouble = {}
        return trouble

    def _theirs(self, replica: Replica, client: ReplicaClient, gave_up: Callable[[], bool]) -> str | None:
        answer = client.ask(DescribeDamageRequest(outbox_id=self._outbox_id), DescribeDamageResponse)
        if answer.error_code is not ErrorCode.NONE:
            return f"its damage is not known: {answer.error_message or answer.error_code.meaning}"
        troubles = []
        for one in answer.segments:
            if one.tp not in self._logs or gave_up():
                continue
            why_not = self._push(client, self._logs[one.tp], one, gave_up)
            where = f"segment {one.base_offset} of {one.tp}, damaged from offset {one.offset} on"
            if why_not is None:
                _LOG.warning("%s: %s, is repaired", replica, where)
            else:
                troubles.append(f"{where} ({one.reason}), is not repaired: {why_not}")
                _LOG.log(_level(gave_up), "%s: %s", replica, troubles[-1])
        return "; ".join(troubles) or None

    def _push(
        self, client: ReplicaClient, log: SegmentLog, one: DamagedSegment, gave_up: Callable[[], bool]
    ) -> str | None:
        """Send the replica the batches that it asks for; returns why its segment is not repaired."""
        records, last = Records(), -1
        while not gave_up():
            request = RepairRecordsRequest(
                outbox_id=self._outbox_id,
                tp=one.tp,
                grant_epoch=self._grant.epoch,
                base_offset=one.base_offset,
                generation=self._grant.generation,
                records=records,
            )
            answer = client.ask(request, RepairRecordsResponse)
            if answer.error_code is not ErrorCode.NONE:
                return answer.error_message or answer.error_code.meaning
            wanted = answer.wanted_offset
            if wanted < 0:
                return None
            if wanted == last:
                return f"it asks for offset {wanted} again and again"
            last = wanted
            try:
                records = _read(log, wanted)
            except (OSError, PushrepError) as error:
                return f"the leader's log can't give offset {wanted}: {error}"
        return "it goes on later"

    def _ours(
        self,
        replica: Replica,
        client: ReplicaClient,
        damaged: list[tuple[TopicIdPartition, ScrubFinding]],
        gave_up: Callable[[], bool],
    ) -> None:
        troubles: dict[TopicIdPartition, list[str]] = {}
        for tp, one in damaged:
            where = f"{one.segment}, damaged from offset {one.offset} on, of [{one.base_offset}, {one.end_offset})"
            try:
                self._fetch(client, tp, one, gave_up)
            except NodeUnreachable:
                raise
            except (OSError, PushrepError) as error:
                why = f"{where} ({one.reason}), is not repaired by {replica}: {error}"
                troubles.setdefault(tp, []).append(why)
                _LOG.log(_level(gave_up), "%s: %s; %s", tp, why, _REMEDY)
            else:
                _LOG.warning("%s: %s, is repaired with the batches of %s", tp, where, replica)
        self.own_trouble = {tp: f"{'; '.join(of_log)}; {_REMEDY}" for tp, of_log in troubles.items()}

    def _fetch(
        self, client: ReplicaClient, tp: TopicIdPartition, one: ScrubFinding, gave_up: Callable[[], bool]
    ) -> None:
        """Raises RepairRefused, NodeUnreachable, OSError."""
        described = client.ask(
            DescribeLogRequest(outbox_id=self._outbox_id, member=self._grant.leader, partitions=(tp,)),
            DescribeLogResponse,
        )
        if described.error_code is not ErrorCode.NONE:
            raise RepairRefused(described.error_message or described.error_code.meaning)
        repair = self._logs[tp].repair_segment(one.base_offset)
        if repair is None:
            return
        with closing(repair):
            last = (-1, 0)
            while not repair.is_done:
                wanted, taken = repair.wanted, repair.taken_bytes  # it may start over at the same offset
                if (wanted, taken) == last:
                    raise RepairRefused(f"it gave nothing that helps at offset {wanted}")
                if gave_up():
                    raise RepairRefused("it goes on later")
                last = (wanted, taken)
                answer = self._fetched(client, tp, wanted)
                if answer.error_code is not ErrorCode.NONE or not answer.records:
                    why = answer.error_message or answer.error_code.meaning
                    raise RepairRefused(f"it gave no records at offset {wanted}: {why}")
                repair.add(bytes(answer.records[0]))  # type: ignore[arg-type]  # off the wire they are bytes

    def _fetched(self, client: ReplicaClient, tp: TopicIdPartition, offset: int) -> FetchRecordsResponse:
        for max_bytes in (_PIECE_BYTES, 1):  # the other member's own damage may follow soon
            request = FetchRecordsRequest(
                tp=tp,
                grant_epoch=self._grant.epoch,
                offset=offset,
                max_bytes=max_bytes,
                generation=self._grant.generation,
            )
            answer = client.ask(request, FetchRecordsResponse)
            if answer.error_code is not ErrorCode.CORRUPT_MESSAGE:
                break
        return answer


def _level(gave_up: Callable[[], bool]) -> int:
    """The log level: a repair that goes on later is no trouble."""
    return logging.DEBUG if gave_up() else logging.ERROR


def _read(log: SegmentLog, offset: int) -> Records:
    """Some whole batches, at least one. Raises PushrepError, OSError."""
    try:
        data = log.read_to_repair(offset, _PIECE_BYTES)
    except CorruptBatch:
        data = log.read_to_repair(offset, 1)
    return whole_batches(data, offset, OFFSET_MAX, log.leader_epochs).parts
