"""pushrep: a crash-safe local log in Kafka's own format, pushed to replicas and topics, replayed from any point.

Names resolve when first used, so that `import pushrep.log` loads no Kafka client and `import pushrep` loads nothing.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pushrep.importing import installed_version, refuse_hidden

if TYPE_CHECKING:
    __version__: str
    """Of the installed distribution."""
    from pushrep.election.messages import PushSessionEndReason
    from pushrep.errors import ForkedProcess, PushrepError
    from pushrep.kafka import KafkaDestination
    from pushrep.log import AppendResult, Durability, LogConfig, SegmentLog
    from pushrep.outbox import Acks, OnDiverged, Outbox, OutboxConfig, Receipt
    from pushrep.outbox.async_outbox import AsyncOutbox
    from pushrep.records import Codec, Record
    from pushrep.replay import ReplayClient, ReplayRequest
    from pushrep.replicate.led_partition import PushSession
    from pushrep.replicate.manager import PushManager
    from pushrep.replicate.replica_node import ReplicaNode
    from pushrep.startpoints import Startpoint, StartpointStore
    from pushrep.topic_id_partition import TopicIdPartition

refuse_hidden("filtering")  # every room needs it; the others are looked for when a command wants them

_HOME = {
    "Acks": "pushrep.outbox",
    "AppendResult": "pushrep.log",
    "AsyncOutbox": "pushrep.outbox.async_outbox",
    "Codec": "pushrep.records",
    "Durability": "pushrep.log",
    "ForkedProcess": "pushrep.errors",
    "KafkaDestination": "pushrep.kafka",
    "LogConfig": "pushrep.log",
    "OnDiverged": "pushrep.outbox",
    "Outbox": "pushrep.outbox",
    "OutboxConfig": "pushrep.outbox",
    "PushManager": "pushrep.replicate.manager",
    "PushSession": "pushrep.replicate.led_partition",
    "PushSessionEndReason": "pushrep.election.messages",
    "PushrepError": "pushrep.errors",
    "Receipt": "pushrep.outbox",
    "Record": "pushrep.records",
    "ReplicaNode": "pushrep.replicate.replica_node",
    "ReplayClient": "pushrep.replay",
    "ReplayRequest": "pushrep.replay",
    "SegmentLog": "pushrep.log",
    "Startpoint": "pushrep.startpoints",
    "StartpointStore": "pushrep.startpoints",
    "TopicIdPartition": "pushrep.topic_id_partition",
}

__all__ = [
    "Acks",
    "AppendResult",
    "AsyncOutbox",
    "Codec",
    "Durability",
    "ForkedProcess",
    "KafkaDestination",
    "LogConfig",
    "OnDiverged",
    "Outbox",
    "OutboxConfig",
    "PushManager",
    "PushSession",
    "PushSessionEndReason",
    "PushrepError",
    "Receipt",
    "Record",
    "ReplayClient",
    "ReplayRequest",
    "ReplicaNode",
    "SegmentLog",
    "Startpoint",
    "StartpointStore",
    "TopicIdPartition",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed_version()
    if name not in _HOME:
        near = get_close_matches(name, _HOME, 1)
        hint = f". Did you mean: {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'pushrep' has no attribute {name!r}{hint}", name=name)
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
