"""Between the messages of the wire and the values of the rules: the same fields, the records split into batches.

wire.AppendRecordsPartition  ◀──▶  election.AppendRecords        leader writes, replica reads
wire.LogDescription          ──▶   election.LogEnds
wire.WireGrant               ◀──▶  election.Grant
"""

from operator import attrgetter
from uuid import UUID

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant, Hold, Member, Takeover
from pushrep.election.messages import AppendRecords, batches_of
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as wire
from pushrep.wire.values import Records


def request_to_wire(tp: TopicIdPartition, request: AppendRecords, records: Records) -> wire.AppendRecordsPartition:
    """A partition's part of a request; `records` are its batches as they lie in the log."""
    return wire.AppendRecordsPartition(
        tp=tp,
        leader_epoch=request.leader_epoch,
        replica_epoch=request.replica_epoch,
        session_id=request.session_id,
        append_offset=request.append_offset,
        previous_epoch=request.previous_epoch,
        epoch_start_offset=request.epoch_start_offset,
        high_watermark=request.high_watermark,
        log_start_offset=request.log_start_offset,
        flush_wanted=request.flush_wanted,
        restart=request.restart,
        end_session_reason=request.end_session_reason,
        cleaned_offset=request.cleaned_offset,
        generation=request.generation,
        records=records,
    )


_same_of = attrgetter(*AppendRecords._fields[:-2])
"""What both have by the same name: all but `batches` and `is_whole`, which are the records, split and checked."""


def request_from_wire(part: wire.AppendRecordsPartition) -> AppendRecords:
    """The same for the rules: every batch's magic, size and CRC-32C is checked here."""
    batches, is_whole = batches_of(part.records[0]) if part.records else ((), True)  # type: ignore[arg-type]
    return AppendRecords._make((*_same_of(part), batches, is_whole))


def log_ends_of(description: wire.LogDescription) -> LogEnds:
    """A described log as the rules compare it. Raises ValueError for a list of epochs that is none."""
    epochs = LeaderEpochs(tuple((entry.epoch, entry.start_offset) for entry in description.leader_epochs))
    return LogEnds(description.log_start_offset, description.log_end_offset, epochs)


def epochs_to_wire(epochs: LeaderEpochs) -> tuple[wire.EpochStart, ...]:
    """A log's list of epochs."""
    return tuple(wire.EpochStart(epoch=epoch, start_offset=start) for epoch, start in epochs.entries)


def grant_to_wire(grant: Grant) -> wire.WireGrant:
    """A grant as it travels."""
    hold, takeover = grant.hold or Hold(-1, -1, -1, ""), grant.takeover or Takeover(-1, -1)
    return wire.WireGrant(
        outbox_id=grant.outbox_id,
        epoch=grant.epoch,
        leader=grant.leader,
        members=_members_to_wire(grant.members),
        min_insync_replicas=grant.min_insync_replicas,
        members_epoch=grant.members_epoch,
        pid_epoch=grant.pid_epoch,
        topic_id=grant.topic_id,
        topic=grant.topic,
        partitions=grant.partitions,
        carrier=grant.carrier,
        destinations=tuple(wire.Destination(topic_id=id_, partitions=count) for id_, count in grant.destinations),
        accepted_loss=grant.accepted_loss,
        previous_members=_members_to_wire(grant.previous_members),
        previous_min_insync_replicas=grant.previous_min_insync_replicas,
        next_index=grant.next_index,
        generation=grant.generation,
        hold_epoch=hold.epoch,
        hold_since_ms=hold.since_ms,
        hold_until_ms=hold.until_ms,
        hold_reason=hold.reason,
        takeover_epoch=takeover.epoch,
        takeover_ms=takeover.at_ms,
    )


def grant_from_wire(grant: wire.WireGrant) -> Grant:
    """The same for the rules. Raises BadGrant if it contradicts itself."""
    hold = Hold(grant.hold_epoch, grant.hold_since_ms, grant.hold_until_ms, grant.hold_reason)
    takeover = Takeover(grant.takeover_epoch, grant.takeover_ms)
    return Grant(
        outbox_id=grant.outbox_id,
        epoch=grant.epoch,
        leader=grant.leader,
        members=_members_from_wire(grant.members),
        min_insync_replicas=grant.min_insync_replicas,
        members_epoch=grant.members_epoch,
        pid_epoch=grant.pid_epoch,
        topic_id=grant.topic_id,
        topic=grant.topic,
        partitions=grant.partitions,
        carrier=grant.carrier,
        destinations=tuple((one.topic_id, one.partitions) for one in grant.destinations),
        accepted_loss=grant.accepted_loss,
        previous_members=_members_from_wire(grant.previous_members),
        previous_min_insync_replicas=grant.previous_min_insync_replicas,
        next_index=grant.next_index,
        generation=grant.generation,
        hold=hold if hold.epoch >= 0 else None,
        takeover=takeover if takeover.epoch >= 0 else None,
    )


def _members_to_wire(members: tuple[Member, ...]) -> tuple[wire.WireMember, ...]:
    return tuple(
        wire.WireMember(
            index=member.index,
            address=member.address,
            directory_id=member.directory_id or wire.NO_DIRECTORY,
            identity=member.identity,
        )
        for member in members
    )


def _members_from_wire(members: tuple[wire.WireMember, ...]) -> tuple[Member, ...]:
    return tuple(
        Member(member.index, member.address, _directory_from_wire(member.directory_id), member.identity)
        for member in members
    )


def _directory_from_wire(directory_id: UUID) -> UUID | None:
    """None where none is said."""
    return None if directory_id == wire.NO_DIRECTORY else directory_id
