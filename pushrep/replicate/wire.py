"""Between the messages of the wire and the values of the rules: the same fields, the records split into batches.

wire.AppendRecordsPartition  ◀──▶  election.AppendRecords        leader writes, replica reads
wire.LogDescription          ──▶   election.LogEnds
"""

from operator import attrgetter

from pushrep.election.epochs import LogEnds
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
