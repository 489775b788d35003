"""Push replication: appended records are sent to replicas, and their acknowledgements come back.

leading.py        Leading(...): every partition of an outbox and its replicas
manager.py        PushManager(...): which partition replicas are pushed to; Confluent's ten methods
connecting.py     ReplicaClient(address): one question after another
replica_node.py   ReplicaNode(directory, NodeSettings(...)): the replicas' server; `pushrep replica serve`

docs/push.md shows the parts; the rules are pushrep.election.
"""
