"""Push replication: appended records are sent to replicas, and their acknowledgements come back.

Leading(...)                                every partition of an outbox and its replicas
PushManager(...)                            which partition replicas are pushed to; Confluent's ten methods
ReplicaClient(address)                      one question after another
ReplicaNode(directory, NodeSettings(...))   the replicas' server; `pushrep replica serve` on the command line

docs/push.md shows the parts; the rules are pushrep.election.

Names are imported at their first use: an outbox without replicas needs the settings, and no wire code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushrep.election.messages import PushSessionEndReason
    from pushrep.replicate.connecting import ReplicaClient
    from pushrep.replicate.errors import (
        CantListen,
        CorruptNodeFile,
        IllegalState,
        MayStillBeDelivered,
        NodeInUse,
        ReplicaUnreachable,
    )
    from pushrep.replicate.leading import Leading
    from pushrep.replicate.led_partition import PushSession
    from pushrep.replicate.manager import FileRecords, PushManager
    from pushrep.replicate.node_settings import NodeSettings
    from pushrep.replicate.node_store import LastContact
    from pushrep.replicate.replica_node import ReplicaNode
    from pushrep.replicate.settings import PushSettings, Replica
    from pushrep.replicate.sockets import Address

_HOME = {
    "Address": "pushrep.replicate.sockets",
    "CantListen": "pushrep.replicate.errors",
    "CorruptNodeFile": "pushrep.replicate.errors",
    "FileRecords": "pushrep.replicate.manager",
    "IllegalState": "pushrep.replicate.errors",
    "LastContact": "pushrep.replicate.node_store",
    "Leading": "pushrep.replicate.leading",
    "MayStillBeDelivered": "pushrep.replicate.errors",
    "NodeInUse": "pushrep.replicate.errors",
    "NodeSettings": "pushrep.replicate.node_settings",
    "PushManager": "pushrep.replicate.manager",
    "PushSession": "pushrep.replicate.led_partition",
    "PushSessionEndReason": "pushrep.election.messages",
    "PushSettings": "pushrep.replicate.settings",
    "Replica": "pushrep.replicate.settings",
    "ReplicaClient": "pushrep.replicate.connecting",
    "ReplicaNode": "pushrep.replicate.replica_node",
    "ReplicaUnreachable": "pushrep.replicate.errors",
}

__all__ = [
    "Address",
    "CantListen",
    "CorruptNodeFile",
    "FileRecords",
    "IllegalState",
    "LastContact",
    "Leading",
    "MayStillBeDelivered",
    "NodeInUse",
    "NodeSettings",
    "PushManager",
    "PushSession",
    "PushSessionEndReason",
    "PushSettings",
    "Replica",
    "ReplicaClient",
    "ReplicaNode",
    "ReplicaUnreachable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(_HOME[name]), name)
