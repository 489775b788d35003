"""Which records a rebase appends again, by a table over what the topic holds of a log of 100 records; and what is sent
again because the topic has lost it.
"""

from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep import KafkaDestination, Outbox, OutboxConfig
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka.progress import (
    EpochPartitions,
    OffsetRanges,
    PartitionProgress,
    ShippingProgress,
    read_progress,
    write_progress,
)
from pushrep.outbox.rebase import appended_again, rebase

#   held, contested, the first that is not known to be held, skipped    -> appended again
CASES = {
    "nothing is known to be there": ([], [], 0, [], [(0, 100)]),
    "the rest is not there": ([(0, 40)], [], 40, [], [(40, 100)]),
    "another's records, then nothing": ([], [(40, 60)], 40, [], [(40, 100)]),
    "another's records came first, ours behind them": ([(60, 100)], [(40, 60)], 100, [], [(40, 60)]),
    "another's records behind a head that was cut": ([], [(50, 60)], 40, [], [(40, 100)]),
    "a head that was cut, then ours": ([(30, 70)], [], 0, [], [(70, 100)]),
    "one of ours behind another's proves nothing of those before": ([(80, 81)], [(50, 60)], 40, [], [(40, 100)]),
    "what was given up stays so": ([], [(40, 60)], 40, [(40, 45), (99, 100)], [(45, 99)]),
    "a record is missing before later ones": ([(0, 40), (41, 100)], [], 40, [], [(40, 41)], (40, 41)),
    "all is there": ([(0, 100)], [], 100, [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_readers_of_the_topic_do_not_see_is_appended_again(name):
    """identity T4: "what the topic does not hold is appended again"."""
    held, contested, first, skipped, expected, *holes = CASES[name]
    contents = SimpleNamespace(
        progress=SimpleNamespace(skipped_of=lambda _: OffsetRanges(skipped)),
        held={0: OffsetRanges(held)},
        contested={0: OffsetRanges(contested)},
        first={0: first},
        holes={0: OffsetRanges(holes)},
    )
    assert list(appended_again(contents, 0, 100)) == expected


def test_what_the_topic_has_lost_is_shipped_again_under_its_own_pid(tmp_path):
    """identity T2, T4: only the acknowledgement is forgotten, from the first lost record on; no broker is asked."""
    with Outbox.open(tmp_path, "orders", 2, "test", config=OutboxConfig(linger_ms=0)) as outbox:
        for n in range(40):
            outbox.append(n % 2, b"%d" % n).result(60)
        batches = [list(outbox.log(partition).batches(0)) for partition in (0, 1)]
        pid = outbox.pid
    held = {0: PartitionProgress(20, 50, 1), 1: PartitionProgress(20, 51, 2)}
    before = ShippingProgress(
        topic_id=UUID(int=7), epochs=(EpochPartitions(0, 2),), partitions=held, lost={0: (5, 20), 1: (0, 20)}
    )
    write_progress(REAL_FILESYSTEM, tmp_path, {"orders": before})
    nowhere = KafkaDestination(bootstrap_servers="127.0.0.1:1")
    assert rebase(tmp_path, nowhere, dry_run=True).lost == before.lost
    assert read_progress(REAL_FILESYSTEM, tmp_path)["orders"] == before
    done = rebase(tmp_path, nowhere)
    assert (done.lost, done.records) == (before.lost, 0)
    after = read_progress(REAL_FILESYSTEM, tmp_path)["orders"]
    again = {0: PartitionProgress(5, -1, batches[0][4].header.crc), 1: PartitionProgress(0, -1, 0)}
    assert after == replace(before, partitions=again, lost={})
    with Outbox.open(tmp_path, "orders", 2, "test") as outbox:
        assert outbox.pid == pid
