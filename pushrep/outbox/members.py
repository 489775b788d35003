"""Before an outbox leads: what its other members hold, and fetching what this one has not.

    look ─▶ Seen of each member that answered ─▶ enough of them? ─▶ is one ahead? ─▶ fetch its records ─▶ lead

Enough are N - m + 1, this member counted: any m that hold an acknowledged record meet them. A member whose log is
damaged, offline, or shorter than its own high watermark does not count.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple
from uuid import UUID

from pushrep.log import SegmentLog
from pushrep.outbox.positions_store import PositionsStore
from pushrep.protocol.error_codes import ErrorCode
from pushrep.protocol.push_messages import (
    DescribeLogRequest,
    DescribeLogResponse,
    FetchRecordsRequest,
    FetchRecordsResponse,
    LogDescription,
)
from pushrep.push.errors import ReplicaUnreachable
from pushrep.push.replica_client import ReplicaClient
from pushrep.push.settings import PushSettings, Replica
from pushrep.push.wire import log_ends_of
from pushrep.records import RecordBatch
from pushrep.replication.epochs import NO_EPOCH, EpochEnd, LogEnds, common_end, granted_end
from pushrep.replication.errors import LogNotFit, NotLeader
from pushrep.replication.grants import owner_of
from pushrep.replication.messages import batches_of
from pushrep.topic_id_partition import TopicIdPartition

_DESCRIBED_AT_ONCE = 1000
_FETCH_BYTES = 4 << 20


class Seen(NamedTuple):
    """A member that answered, and its logs by partition; one that it does not have is not there."""

    replica: Replica
    logs: Mapping[int, LogEnds]

    @property
    def highest_epoch(self) -> int:
        """Of all its logs."""
        return max((ends.leader_epochs.latest_epoch for ends in self.logs.values()), default=NO_EPOCH)


class Ahead(NamedTuple):
    """A member holds more of a partition than this one."""

    partition: int
    replica: Replica
    ends: LogEnds


def tp_of(log: SegmentLog) -> TopicIdPartition:
    """What a log is called among its members."""
    return TopicIdPartition(log.log_id, log.topic, log.partition)


def ends_of(log: SegmentLog) -> LogEnds:
    """A log as the rules compare it."""
    return LogEnds(log.log_start_offset, log.log_end_offset, log.leader_epochs)


class Asker(NamedTuple):
    """Who asks for which logs: member `member` of an outbox."""

    outbox_id: UUID
    member: int
    logs: Sequence[SegmentLog]
    settings: PushSettings


def look(asker: Asker, replicas: Iterable[Replica], timeout_s: float) -> list[Seen]:
    """Ask all at once; those that answered within the time and count."""
    seen: list[Seen] = []

    def ask(replica: Replica) -> None:
        try:
            found = _describe(asker, replica)
        except (ReplicaUnreachable, ValueError):
            return
        if found is not None:
            seen.append(found)

    threads = [
        threading.Thread(target=ask, args=(replica,), name=f"pushrep-look-{replica.index}", daemon=True)
        for replica in replicas
    ]
    for thread in threads:
        thread.start()
    deadline = monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    return list(seen)


def highest_epoch(logs: Iterable[SegmentLog], seen: Iterable[Seen]) -> int:
    """Of all that anybody shows."""
    own = [log.leader_epochs.latest_epoch for log in logs]
    return max([*own, *(one.highest_epoch for one in seen)], default=NO_EPOCH)


def members_ahead(member: int, logs: Iterable[SegmentLog], seen: Iterable[Seen]) -> list[Ahead]:
    """For each partition of which somebody holds more than this member: who holds most. Raises NotLeader."""
    found = []
    for log in logs:
        best: Ahead | None = None
        most: EpochEnd = granted_end(ends_of(log), None)
        for one in seen:
            theirs = one.logs.get(log.partition)
            if theirs is None:
                continue
            end = granted_end(theirs, None)
            if end.epoch > max(most.epoch, NO_EPOCH) and owner_of(end.epoch) != member:
                raise NotLeader(owner_of(end.epoch), end.epoch)
            if end > most and theirs.log_end_offset > theirs.log_start_offset:
                best, most = Ahead(log.partition, one.replica, theirs), end
        if best is not None:
            found.append(best)
    return found


def fetch(ahead: Ahead, log: SegmentLog, store: PositionsStore, epoch: int, settings: PushSettings) -> int:
    """Bring the log to the other's end, on disk; how many records came. Raises LogNotFit, ReplicaUnreachable, OSError.

    What this log has and the other has not was written in an epoch that ended before: it goes, unless it lies below the
    high watermark.
    """
    ours = ends_of(log)
    at = common_end(ours, ahead.ends)
    if ahead.ends.log_start_offset > ours.log_end_offset or at < log.high_watermark:
        raise LogNotFit(
            log.partition,
            f"it ends at {ours.log_end_offset} with its high watermark at {log.high_watermark}, and agrees with "
            f"{ahead.replica} (which starts at {ahead.ends.log_start_offset}) only up to {at}",
        )
    if at < ours.log_end_offset and log.truncate_to(at, force=True) != at:
        raise LogNotFit(log.partition, f"{at} lies inside of a batch")
    with ReplicaClient(ahead.replica.address, settings) as client:
        while (offset := log.log_end_offset) < ahead.ends.log_end_offset:
            request = FetchRecordsRequest(tp=tp_of(log), grant_epoch=epoch, offset=offset, max_bytes=_FETCH_BYTES)
            answer = client.ask(request, FetchRecordsResponse)
            if answer.error_code is not ErrorCode.NONE or not answer.records:
                raise ReplicaUnreachable(str(ahead.replica.address), answer.error_code.meaning)
            found, is_whole = batches_of(bytes(answer.records[0]))  # type: ignore[arg-type]
            if not is_whole:
                raise ReplicaUnreachable(str(ahead.replica.address), f"it sent broken batches at offset {offset}")
            batches = [RecordBatch(batch.data) for batch in found]
            log.append_as_is(batches)
            log.flush()
            for batch in batches:
                store.dispatch(batch)
    return log.log_end_offset - at


def _describe(asker: Asker, replica: Replica) -> Seen | None:
    """None: it does not count."""
    found: dict[int, LogEnds] = {}
    with ReplicaClient(replica.address, asker.settings) as client:
        for at in range(0, len(asker.logs), _DESCRIBED_AT_ONCE):
            tps = tuple(tp_of(log) for log in asker.logs[at : at + _DESCRIBED_AT_ONCE])
            request = DescribeLogRequest(outbox_id=asker.outbox_id, member=asker.member, partitions=tps)
            answer = client.ask(request, DescribeLogResponse)
            if answer.error_code is not ErrorCode.NONE:
                return None
            for description in answer.logs:
                if description.error_code is ErrorCode.UNKNOWN_TOPIC_ID:
                    continue
                if description.error_code is not ErrorCode.NONE or not _is_fit(description):
                    return None
                found[description.tp.partition] = log_ends_of(description)
    return Seen(replica, found)


def _is_fit(description: LogDescription) -> bool:
    return description.damaged_from < 0 and description.log_end_offset >= description.high_watermark
