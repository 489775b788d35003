"""Startpoints: "where should this consumer's partition start next", written out of band, applied once, kept as history.

StartpointStore.open(directory)      write, cancel, history for operators; claim, start, commit, consume for readers
store_at(place, settings)            the same by its place: a directory, or kafka:TOPIC
GroupStartpoints(store)              for consumers that keep their positions in Kafka (filtering.consumers)
Startpoint.timestamp(ms)             its kinds: see `model`

A plain loop that starts where the store says is `ReplayClient.subscribe` of pushrep.replay.
"""

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
    PartitionLost,
    Reader,
    Startpoint,
    StartpointFailed,
    StartpointRefused,
    State,
    StoreUnavailable,
    Target,
    Written,
)
from pushrep.startpoints.resolve import BootstrapGate, LogFacts, Origin, Resolved, Start, Unresolved, resolve
from pushrep.startpoints.store import STORE_NAME, TTL_S, StartpointStore, StorePlace, store_at

__all__ = [
    "STORE_NAME",
    "TTL_S",
    "Applied",
    "BootstrapGate",
    "Cancelled",
    "Checkpoint",
    "Claim",
    "Consumed",
    "EventLog",
    "Expired",
    "Fact",
    "Failed",
    "GroupStartpoints",
    "Kind",
    "LogFacts",
    "Origin",
    "OutOfRange",
    "PartitionLost",
    "Reader",
    "ReaderState",
    "Resolved",
    "Start",
    "Startpoint",
    "StartpointFailed",
    "StartpointRefused",
    "StartpointStore",
    "State",
    "StorePlace",
    "StoreUnavailable",
    "Target",
    "Unresolved",
    "Written",
    "resolve",
    "store_at",
]
