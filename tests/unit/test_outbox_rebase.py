"""Which records a rebase appends again, by a table over what the topic holds of a log of 100 records; and what is sent
again because the topic has lost it.
"""

from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import pytest

from pushrep import KafkaDestination, LogConfig, Outbox, OutboxConfig
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka.errors import AnotherCluster
from pushrep.kafka.progress import (
    EpochPartitions,
    OffsetRanges,
    PartitionProgress,
    ShippingProgress,
    read_progress,
    write_progress,
)
from pushrep.outbox import rebase as rebasing
from pushrep.outbox.rebase import appended_again, rebase

NOWHERE = KafkaDestination(bootstrap_servers="127.0.0.1:1")

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
    assert rebase(tmp_path, NOWHERE, dry_run=True).lost == before.lost
    assert read_progress(REAL_FILESYSTEM, tmp_path)["orders"] == before
    done = rebase(tmp_path, NOWHERE)
    assert (done.lost, done.records) == (before.lost, 0)
    after = read_progress(REAL_FILESYSTEM, tmp_path)["orders"]
    again = {0: PartitionProgress(5, -1, batches[0][4].header.crc), 1: PartitionProgress(0, -1, 0)}
    assert after == replace(before, partitions=again, lost={})
    with Outbox.open(tmp_path, "orders", 2, "test") as outbox:
        assert outbox.pid == pid


@pytest.fixture
def fives(tmp_path):
    """The directory of an outbox with 10 records in partition 1, in batches of five, and the CRC of each batch."""
    config = OutboxConfig(
        linger_ms=0, log_config=LogConfig(segment_bytes=300, batch_bytes_max=300, preallocate_bytes=0)
    )
    with Outbox.open(tmp_path, "orders", 2, "test", config=config) as outbox:
        for first in (0, 5):
            outbox.append_many(1, [b"%d" % n for n in range(first, first + 5)]).result(60)
        crcs = [one.header.crc for one in outbox.log(1).batches(0)]
    return tmp_path, crcs


@pytest.mark.parametrize(
    ("purged", "first", "expected"), [(0, 5, (5, 0)), (5, 5, (5, None)), (5, 3, (5, None)), (0, 7, (7, 1))]
)
def test_what_was_lost_below_the_logs_start_can_not_be_sent_again(fives, purged, first, expected):
    """Shipping then goes on from where the log begins; the batch before it is gone, so nothing is compared with it."""
    directory, crcs = fives
    with Outbox.open(directory, "orders", 2, "test") as outbox:
        outbox.log(1).delete_records(purged)
        assert outbox.log(1).log_start_offset == purged
    before = ShippingProgress(partitions={1: PartitionProgress(10, 50, 1)}, lost={1: (first, 10)})
    write_progress(REAL_FILESYSTEM, directory, {"orders": before})
    rebase(directory, NOWHERE)
    start, batch = expected
    again = PartitionProgress(start, -1, 0 if batch is None else crcs[batch])
    assert read_progress(REAL_FILESYSTEM, directory)["orders"] == replace(before, partitions={1: again}, lost={})


def topic(monkeypatch, *, cluster_id="ours", **contents):
    """Every topic is this one."""

    async def read_contents(destination, facts, state, origin):
        return SimpleNamespace(**{"held": {}, "contested": {}, "holes": {}, "first": {0: 0, 1: 10}, **contents})

    monkeypatch.setattr(rebasing, "look_at_topic", lambda *_: SimpleNamespace(cluster_id=cluster_id))
    monkeypatch.setattr(rebasing, "read_contents", read_contents)


def test_a_topic_of_another_cluster_is_not_compared_with_the_log(fives, monkeypatch):
    directory, _ = fives
    before = ShippingProgress(cluster_id="ours", epochs=(EpochPartitions(0, 2),))
    write_progress(REAL_FILESYSTEM, directory, {"orders": before})
    topic(monkeypatch, cluster_id="theirs")
    with pytest.raises(AnotherCluster, match="theirs"):
        rebase(directory, NOWHERE)
    assert read_progress(REAL_FILESYSTEM, directory) == {"orders": before}
    for known in (replace(before, cluster_id=None), replace(before, cluster_id="theirs")):
        write_progress(REAL_FILESYSTEM, directory, {"orders": known})
        topic(monkeypatch, cluster_id="theirs", progress=known, ends={1: 70})
        assert rebase(directory, NOWHERE, dry_run=True).records == 0


def test_a_log_that_ends_below_what_was_acknowledged_is_compared_from_its_start(fives, monkeypatch):
    """Else it could be rebased no more: shipping refuses it for that very reason."""
    directory, _ = fives
    before = ShippingProgress(partitions={1: PartitionProgress(11, 70, 1)}, epochs=(EpochPartitions(0, 1),))
    write_progress(REAL_FILESYSTEM, directory, {"orders": before})
    topic(monkeypatch, progress=before, ends={0: 70}, contested={1: [(8, 10)]})
    assert rebase(directory, NOWHERE, dry_run=True).partitions[1].again == ((8, 10),)


@pytest.mark.parametrize(("border", "at"), [(9, 71), (10, -1), (11, 70)])
def test_how_far_the_topic_was_read_is_noted_unless_the_next_record_goes_to_another_partition(
    fives, monkeypatch, border, at
):
    directory, crcs = fives
    epochs = (EpochPartitions(0, 1), EpochPartitions(0, 2, {1: border}))
    before = ShippingProgress(epochs=epochs)
    topic(monkeypatch, progress=before, ends={0: 70, 1: 71}, contested={1: [(8, 10)]})
    with Outbox.open(directory, "orders", 2, "test") as outbox:
        pid = outbox.pid
    assert rebase(directory, NOWHERE).records == 2
    after = read_progress(REAL_FILESYSTEM, directory)["orders"]
    assert after.partitions == {1: PartitionProgress(10, at, crcs[1])}
    assert list(after.skipped_of(1)) == [(8, 10)]
    with Outbox.open(directory, "orders", 2, "test") as outbox:
        assert outbox.pid != pid
        assert after.pid_epoch == outbox.identity.pid_epoch
        assert after.skipped[-1].reason == f"rebased: appended again under PID epoch {after.pid_epoch}"
        assert [one.value for one in outbox.log(1).records(8)] == [b"8", b"9", b"8", b"9"]
