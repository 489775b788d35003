"""A partition's part of AppendRecords: what the leader's rules say and the wire carries, and its batches once split.

`batches_of` splits and checks what came in; nothing here keeps a copy of a record. PushSessionEndReason: why a session
ended, with its number on the wire and whether it is sent to the replica.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Self

from pushrep.records import BatchHeader
from pushrep.records.header import split_batches
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.values import Counter, CountOrNone, Epoch, EpochOrNone, Offset, Records, Struct

NOT_ENDED = -1
"""Stands in a request in place of a reason while the session goes on."""


class PushSessionEndReason(IntEnum):
    """A number is never given a second meaning; one that is unknown here reads as UNKNOWN."""

    UNKNOWN = 0
    NEW_LEADER_EPOCH = 1
    STALE_REPLICA_EPOCH = 2
    NON_RETRIABLE_ERROR = 3
    LEADER_LOG_ERROR = 4
    LOG_DIVERGED = 5
    REPLICA_REMOVED = 6
    PARTITION_DELETED = 7
    PUSH_DISABLED = 8
    SHUTDOWN = 9

    @classmethod
    def _missing_(cls, value: object) -> "PushSessionEndReason | None":
        return cls.UNKNOWN if isinstance(value, int) else None

    @property
    def is_sent_to_replica(self) -> bool:
        """Whether an end-session signal goes to the replica: not where it has said so itself, or would refuse it."""
        return self in _SENT_TO_REPLICA


_SENT_TO_REPLICA = frozenset(
    {
        PushSessionEndReason.LEADER_LOG_ERROR,
        PushSessionEndReason.REPLICA_REMOVED,
        PushSessionEndReason.PARTITION_DELETED,
        PushSessionEndReason.PUSH_DISABLED,
        PushSessionEndReason.SHUTDOWN,
    }
)


class Batch(NamedTuple):
    """A record batch: the offsets [base_offset, next_offset), the epoch that wrote it, and its bytes.

    header: of these very bytes, where their CRC was checked.
    """

    base_offset: int
    next_offset: int
    leader_epoch: int
    data: bytes | memoryview
    header: BatchHeader | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRecordsPartition(Struct):
    """What one push session says about one partition in one request; `records` may be empty.

    previous_epoch: of the batch that ends at `append_offset`, -1 where the leader's log starts.
    epoch_start_offset: where `leader_epoch` starts in the leader's log; what lies below was there when it was granted.
    restart: the leader's log starts above what the replica has; begin anew at `append_offset`.
    end_session_reason: -1 while the session goes on. generation: of the leader's grant.
    """

    tp: TopicIdPartition
    leader_epoch: Epoch
    replica_epoch: Counter
    session_id: Counter
    append_offset: Offset
    previous_epoch: EpochOrNone
    epoch_start_offset: Offset
    high_watermark: Offset
    log_start_offset: Offset
    flush_wanted: bool = False
    restart: bool = False
    end_session_reason: CountOrNone = NOT_ENDED
    generation: Counter = 0
    records: Records = ()
    batches: tuple[Batch, ...] = field(init=False, default=(), repr=False, compare=False)
    """Of a request that came in: what `records` holds, once they were `split`."""
    is_whole: bool = field(init=False, default=True, repr=False, compare=False)
    """False if some bytes of `records` were no batch (`batches_of` says so)."""

    def split(self) -> Self:
        """The same, for the rules: every batch's magic, size and CRC-32C is checked here."""
        return self.with_batches(*batches_of(self.records[0])) if self.records else self  # type: ignore[arg-type]

    def with_batches(self, batches: tuple[Batch, ...], is_whole: bool) -> Self:  # noqa: FBT001 - as `batches_of` says
        """The same, once it is known what its records are."""
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "is_whole", is_whole)
        return self

    @property
    def epoch_at_append_offset(self) -> int:
        """The leader's epoch there: of the batch, or its own, which wrote everything from its start on."""
        return self.batches[0].leader_epoch if self.batches else self.leader_epoch

    @property
    def joins(self) -> bool:
        """Whether each batch begins where the one before ends, and no leader epoch falls."""
        expected, epoch = self.append_offset, self.previous_epoch
        for batch in self.batches:
            if batch.leader_epoch < epoch or batch.base_offset != expected:
                return False
            expected, epoch = batch.next_offset, batch.leader_epoch
        return True

    @property
    def end_offset(self) -> int:
        """Up to here a replica that accepts it holds what the leader holds."""
        return self.batches[-1].next_offset if self.batches else self.append_offset


def batches_of(data: bytes) -> tuple[tuple[Batch, ...], bool]:
    """The batches in `data`, each with good magic, size and CRC-32C, and whether `data` is nothing but those."""
    view, found = memoryview(data), split_batches(data)
    batches = [
        Batch(header.base_offset, header.next_offset, header.leader_epoch, view[at : at + header.size_bytes], header)
        for at, header in found.placed
    ]
    return tuple(batches), found.why_not is None
