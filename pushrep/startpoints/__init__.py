"""Startpoints: "where should this consumer's partition start next", written out of band, applied once, kept as history.

StartpointStore.open(directory)      write, cancel, history for operators; claim, start, commit, consume for readers
store_at(place, settings)            the same by its place: a directory, or kafka:TOPIC
LogConsumer.open(logs, topic, name)  a plain loop over local logs that starts where the store says
GroupStartpoints(store)              the same for consumers that keep their positions in Kafka (filtering.consumers)
Startpoint.timestamp(ms)             what can be wished: see `model`
"""

from pushrep.startpoints.checkpoints import Checkpoint, Claim
from pushrep.startpoints.consumer import STORE_NAME, LogConsumer, PartitionRecords
from pushrep.startpoints.errors import (
    CheckpointUnusable,
    CorruptStore,
    DefaultUnusable,
    NoSuchStartpoint,
    NotApplied,
    NotCancellable,
    NotCommitted,
    NotWritten,
    PartitionLost,
    StartpointFailed,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
)
from pushrep.startpoints.event_log import EventLog, ReaderState
from pushrep.startpoints.events import Applied, Cancelled, Consumed, Expired, Fact, Failed, Written
from pushrep.startpoints.group import GroupStartpoints
from pushrep.startpoints.model import Kind, OutOfRange, Reader, Startpoint, Target
from pushrep.startpoints.partition_log import LocalLog, PartitionLog, facts_of
from pushrep.startpoints.places import StorePlace, store_at
from pushrep.startpoints.resolve import LogFacts, Resolved, Unresolved, resolve
from pushrep.startpoints.starting import BootstrapGate, Origin, Start
from pushrep.startpoints.states import State
from pushrep.startpoints.store import TTL_S, StartpointStore

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
    "DefaultUnusable",
    "EventLog",
    "Expired",
    "Fact",
    "Failed",
    "GroupStartpoints",
    "Kind",
    "LocalLog",
    "LogConsumer",
    "LogFacts",
    "NoSuchStartpoint",
    "NotApplied",
    "NotCancellable",
    "NotCommitted",
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
