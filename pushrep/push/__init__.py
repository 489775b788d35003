"""Push replication, the leader's side: what is appended here goes to replicas, and their acknowledgements come back.

Leading(...)            every partition of an outbox and its replicas: the door for who appends
PushManager(...)        which partition replicas are pushed to; Confluent's ten methods
ReplicaClient(address)  one question after another

docs/push.md shows the parts; the rules are pushrep.replication.
"""

from pushrep.push.errors import IllegalState, MayStillBeDelivered, PushError, ReplicaUnreachable
from pushrep.push.leading import Leading
from pushrep.push.led_partition import PushSession
from pushrep.push.manager import FileRecords, PushManager
from pushrep.push.replica_client import ReplicaClient
from pushrep.push.settings import PushSettings, Replica
from pushrep.push.sockets import Address
from pushrep.push_session_end_reason import PushSessionEndReason

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
