"""Push replication, the leader's side."""
