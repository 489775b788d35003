"""The node that follows: pushed to by many leaders, it keeps their logs byte for byte.

ReplicaNode(directory, NodeSettings(...))       the server; `pushrep replica serve` on the command line
"""

from pushrep.node.errors import CantListen, CorruptNodeFile, NodeError, NodeInUse
from pushrep.node.replica_node import ReplicaNode
from pushrep.node.settings import NodeSettings
from pushrep.node.store import LastContact

__all__ = ["CantListen", "CorruptNodeFile", "LastContact", "NodeError", "NodeInUse", "NodeSettings", "ReplicaNode"]
