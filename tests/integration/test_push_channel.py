"""A channel of pushes whose connection nobody uses any more."""

from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK
from pushrep.replicate.channel import Channel, PushWorker
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address


def test_a_connection_that_was_taken_over_and_never_used_is_closed_with_its_channel(tmp_path):
    """Else the node counts it among its connections until this process ends."""
    settings = PushSettings()
    with ReplicaNode(tmp_path, NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))) as node:
        opened = ReplicaClient(node.address, settings)
        worker = PushWorker("a worker that does not run", SYSTEM_CLOCK, REAL_NETWORK)
        channel = Channel(Replica(1, node.address), settings, worker, SYSTEM_CLOCK, opened)
        assert opened.socket.fileno() >= 0
        channel.cut()
        assert opened.socket.fileno() == -1
        assert channel.hung_up.is_set()
        worker.stop()
