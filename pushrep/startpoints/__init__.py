"""Startpoints: "where should this consumer's partition start next", written out of band, applied once, kept as history.

StartpointStore.open(directory)      write, cancel, history for operators; claim, start, commit, consume for readers
store_at(place, settings)            the same by its place: a directory, or kafka:TOPIC
LogConsumer.open(logs, topic, name)  a plain loop over local logs that starts where the store says
GroupStartpoints(store)              the same for consumers that keep their positions in Kafka (filtering.consumers)
Startpoint.timestamp(ms)             its kinds: see `model`
"""

from pushrep.startpoints.consumer import STORE_NAME, LocalLog, LogConsumer, PartitionLog, PartitionRecords, facts_of
from pushrep.startpoints.errors import (
    CheckpointUnusable,
    CorruptStore,
    NotWritten,
    PartitionLost,
    StartpointFailed,
    StartpointRefused,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
)
from pushrep.startpoints.event_log import EventLog, ReaderState
from pushrep.startpoints.group import GroupStartpoints
from pushrep.startpoints.model import (
    Applied,
    Cancelled,
    Checkpoint,
    Claim,
    Consumed,
    Expired,
    Fact,
    Failed,
    Kind,
    OutOfRange,
    Reader,
    Startpoint,
    State,
    Target,
    Written,
)
from pushrep.startpoints.resolve import BootstrapGate, LogFacts, Origin, Resolved, Start, Unresolved, resolve
from pushrep.startpoints.store import TTL_S, StartpointStore, StorePlace, store_at

__all__ = [
    "STORE_NAME",
    "TTL_S",
    "Applied",
    "BootstrapGate",
    "Cancelled",
    "Checkpoint",
    "CheckpointUnusable",
    "Claim",
    "Consumed",
    "CorruptStore",
    "EventLog",
    "Expired",
    "Fact",
    "Failed",
    "GroupStartpoints",
    "Kind",
    "LocalLog",
    "LogConsumer",
    "LogFacts",
    "NotWritten",
    "Origin",
    "OutOfRange",
    "PartitionLog",
    "PartitionLost",
    "PartitionRecords",
    "Reader",
    "ReaderState",
    "Resolved",
    "Start",
    "Startpoint",
    "StartpointFailed",
    "StartpointRefused",
    "StartpointStore",
    "State",
    "StoreBusy",
    "StoreClosed",
    "StorePlace",
    "StoreUnavailable",
    "Target",
    "Unresolved",
    "Written",
    "facts_of",
    "resolve",
    "store_at",
]
