"""How far each replica of an outbox is behind: records, bytes, and the age of the oldest one that it owes.

What counts as held is what the replica has said to this leader: by its acknowledgements, over sessions, and before the
first by the description of its log. So a replica that went away owes what came since, and one that was never there all.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.outbox.partition_replicas import PartitionReplicas


class ReplicaLag(NamedTuple):
    """How far a replica is, over all partitions.

    records, size_bytes: that it is not known to hold; bytes are too many by an index entry (4 KiB) a partition at most.
    age_ms: how long ago the oldest of them was appended, 0 if there are none; what is older than this opening counts
        from there on. Too high by an eighth at most.
    in_sync, partitions: in how many of them it is in the in-sync set.
    """

    records: int = 0
    in_sync: int = 0
    partitions: int = 0
    size_bytes: int = 0
    age_ms: int = 0


def lag_of(
    index: int, appenders: Mapping[int, PartitionReplicas], logs: Mapping[int, SegmentLog], now_ms: int
) -> ReplicaLag:
    """Of the member `index`. now_ms: of the clock that the leaders were given."""
    records = in_sync = size_bytes = age_ms = 0
    for number, log in logs.items():
        led = appenders[number].led
        held, since = 0, None
        if led is not None:
            with led.lock:
                held, since = led.leader.held_by(index), led.leader.owes_since(index)
                in_sync += index in led.leader.in_sync
        held = max(held, log.log_start_offset)
        owed = max(0, log.log_end_offset - held)
        if not owed:
            continue
        records += owed
        with suppress(OSError, PushrepError):  # the bytes are for people; a disk that fails is told by the log itself
            size_bytes += log.size_from(held)
        age_ms = max(age_ms, 0 if since is None else now_ms - since)
    return ReplicaLag(records, in_sync, len(logs), size_bytes, age_ms)
