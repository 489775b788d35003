"""Push replication, the leader's side: what is appended here goes to replicas, and their acknowledgements come back.

Leading(...)            every partition of an outbox and its replicas: the door for who appends
PushManager(...)        which partition replicas are pushed to; Confluent's ten methods
ReplicaClient(address)  one question after another

docs/push.md shows the parts; the rules are pushrep.replication.

Names resolve when first used: an outbox without replicas takes settings from here, and no wire.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushrep.push.errors import IllegalState, MayStillBeDelivered, PushError, ReplicaUnreachable
    from pushrep.push.leading import Leading
    from pushrep.push.led_partition import PushSession
    from pushrep.push.manager import FileRecords, PushManager
    from pushrep.push.replica_client import ReplicaClient
    from pushrep.push.settings import PushSettings, Replica
    from pushrep.push.sockets import Address
    from pushrep.push_session_end_reason import PushSessionEndReason

_HOME = {
    "Address": "pushrep.push.sockets",
    "FileRecords": "pushrep.push.manager",
    "IllegalState": "pushrep.push.errors",
    "Leading": "pushrep.push.leading",
    "MayStillBeDelivered": "pushrep.push.errors",
    "PushError": "pushrep.push.errors",
    "PushManager": "pushrep.push.manager",
    "PushSession": "pushrep.push.led_partition",
    "PushSessionEndReason": "pushrep.push_session_end_reason",
    "PushSettings": "pushrep.push.settings",
    "Replica": "pushrep.push.settings",
    "ReplicaClient": "pushrep.push.replica_client",
    "ReplicaUnreachable": "pushrep.push.errors",
}

__all__ = [
    "Address",
    "FileRecords",
    "IllegalState",
    "Leading",
    "MayStillBeDelivered",
    "PushError",
    "PushManager",
    "PushSession",
    "PushSessionEndReason",
    "PushSettings",
    "Replica",
    "ReplicaClient",
    "ReplicaUnreachable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(_HOME[name]), name)
