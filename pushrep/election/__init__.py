"""The rules of push replication. Pure: events in, effects out; no clock, disk, network or thread.

follow(state, request, batch_at) -> effects     what a replica does with an AppendRecords: a table
PartitionLeader                                 in-sync set, high watermark, sessions, progress of each replica
Candidate                                       grants and ballots: an opening, a promotion
judge_grant(OfferedGrant) -> ErrorCode          whether a member stores a grant

docs/replication.md draws the tables.
"""
