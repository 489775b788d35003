"""The outbox: durable, ordered append for a producer service, each record with where it first lived.

with Outbox.open("outbox", topic="orders", partitions=4, producer="billing") as outbox:
    receipt = outbox.append(0, b"...")            outbox.append_many(0, values)      the fast path
    offset = receipt.result(timeout=5)            outbox.last_metadata(pid, 0)       where to resume after a crash
"""

from pushrep.election.standby import StandbyState
from pushrep.log.directory_files import slot_directories
from pushrep.outbox.batch import ManyReceipt, Receipt
from pushrep.outbox.errors import (
    BufferFull,
    CloseTimedOut,
    CommandRefused,
    DeliveryFailed,
    LogsMissing,
    LogStopped,
    MetadataGap,
    MetadataNotRising,
    NoFreeSlot,
    NoOutbox,
    NotEnoughReplicas,
    OutboxClosed,
    OutboxDiffers,
    ReceiptTimeout,
    RecordRefused,
    StandbyCancelled,
)
from pushrep.outbox.identity import OutboxIdentity, begin_pid_epoch, outbox_of_log, read_identity
from pushrep.outbox.outbox import Outbox
from pushrep.outbox.settings import Acks, OnDiverged, OutboxConfig

__all__ = [
    "Acks",
    "BufferFull",
    "CloseTimedOut",
    "CommandRefused",
    "DeliveryFailed",
    "LogStopped",
    "LogsMissing",
    "ManyReceipt",
    "MetadataGap",
    "MetadataNotRising",
    "NoFreeSlot",
    "NoOutbox",
    "NotEnoughReplicas",
    "OnDiverged",
    "Outbox",
    "OutboxClosed",
    "OutboxConfig",
    "OutboxDiffers",
    "OutboxIdentity",
    "Receipt",
    "ReceiptTimeout",
    "RecordRefused",
    "StandbyCancelled",
    "StandbyState",
    "begin_pid_epoch",
    "outbox_of_log",
    "read_identity",
    "slot_directories",
]
