"""destinations.json: what is written is read again, and what is broken is refused by name."""

import json
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import checked_json
from pushrep.errors import CorruptFile
from pushrep.kafka.progress import (
    FILE_NAME,
    VERSION,
    EpochPartitions,
    PartitionProgress,
    Rebase,
    ShippedRecord,
    ShippingProgress,
    Skip,
    encode_progress,
    read_progress,
    write_progress,
)

PROGRESS = ShippingProgress(
    topic_id=UUID(int=7),
    cluster_id="a cluster",
    pid_epoch=2,
    epochs=(EpochPartitions(0, 3), EpochPartitions(2, None, {0: 100, 1: 50})),
    partitions={0: PartitionProgress(90, 95, 4711), 1: PartitionProgress(50, 51, 0)},
    skipped=(Skip(1, 40, "too large", 1_700_000_000_000),),
    appended={1: ((50, 1_700_000_000_000), (60, 1_700_000_060_000))},
)
GOLDEN = (
    b'{"crc32c": 3329763832, "destinations": {"orders": {"appended": {"1": [[50, 1700000000000], [60, '
    b'1700000060000]]}, "cluster_id": "a cluster", "epochs": [{"partitions": 3, "pid_epoch": 0, "starts": {}}, '
    b'{"partitions": null, "pid_epoch": 2, "starts": {"0": 100, "1": 50}}], "lost": {}, "newest": {}, '
    b'"pid_epoch": 2, "pid_epochs": [], "progress": {"0": [90, 95, 4711], "1": [50, 51, 0]}, "rebase": {}, '
    b'"skipped": [{"at_ms": 1700000000000, "end": null, "offset": 40, "partition": 1, "reason": "too large"}], '
    b'"topic_id": "00000000-0000-0000-0000-000000000007"}}, "version": 1}\n'
)


def test_golden_bytes(tmp_path):
    assert encode_progress({"orders": PROGRESS}) == GOLDEN
    (tmp_path / FILE_NAME).write_bytes(GOLDEN)
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {"orders": PROGRESS}


def test_what_a_rebase_notes_is_read_again(tmp_path):
    """identity T4"""
    rebased = replace(
        PROGRESS.under(19),
        lost={1: (20, 50)},
        partitions={0: PartitionProgress(90, 95, 4711, ShippedRecord(89, 93)), 1: PartitionProgress(50, 51, 0)},
        rebase={0: Rebase(200, ((90, 95), (120, 200))), 1: Rebase(50, ())},
        skipped=(*PROGRESS.skipped, Skip(0, 10, "rebased", 5, 20)),
    )
    write_progress(REAL_FILESYSTEM, tmp_path, {"orders": rebased})
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {"orders": rebased}
    assert (rebased.pid_epoch, rebased.pid_epochs, rebased.under(20).pid_epochs) == (19, (2,), (2, 19))
    assert rebased.with_topic(UUID(int=7), 3, 19).lost == {1: (20, 50)}
    assert rebased.with_topic(UUID(int=8), 3, 19).lost == {}, "another topic has lost nothing yet"
    assert list(rebased.skipped_of(0)) == [(10, 20)]
    assert list(rebased.skipped_of(1)) == [(40, 41)]


def test_a_file_is_replaced_whole(tmp_path):
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {}
    write_progress(REAL_FILESYSTEM, tmp_path, {"orders": PROGRESS, "b": ShippingProgress()})
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {"orders": PROGRESS, "b": ShippingProgress()}


def test_every_broken_byte_is_refused(tmp_path):
    """Contract, Kafka as a destination: "n is fixed at first use" - a file that may lie about n is not believed."""
    path = tmp_path / FILE_NAME
    for at in range(len(GOLDEN) - 1):
        path.write_bytes(GOLDEN[:at] + bytes([GOLDEN[at] ^ 1]) + GOLDEN[at + 1 :])
        with suppress(CorruptFile):
            found = read_progress(REAL_FILESYSTEM, tmp_path)
            assert found == {"orders": PROGRESS}, f"byte {at} changed the meaning unseen"


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"version": 2, "crc32c": 0, "destinations": {}}'])
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(CorruptFile, match="restore it"):
        read_progress(REAL_FILESYSTEM, tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"progress": {"0": [90.0, 95, 4711]}},
        {"progress": {"0": [90, "95", 4711]}},
        {"progress": {"0": [90, 95, True]}},
        {"newest": {"0": [89, None]}},
        {"newest": {"0": [89.5, 93]}},
        {"pid_epochs": [2, 3.0]},
    ],
)
def test_a_number_that_is_no_whole_one_is_refused_whoever_wrote_the_file(tmp_path, changed):
    path = tmp_path / FILE_NAME
    fields = json.loads(GOLDEN)["destinations"]
    path.write_bytes(checked_json({"destinations": fields}, VERSION))
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {"orders": PROGRESS}, "the file is else as it should be"
    fields["orders"] |= changed
    path.write_bytes(checked_json({"destinations": fields}, VERSION))
    with pytest.raises(CorruptFile, match="restore it"):
        read_progress(REAL_FILESYSTEM, tmp_path)


def test_each_epoch_goes_by_its_own_number_of_partitions():
    """Contract: "Each PID epoch keeps its own n, so unshipped batches of the old one go by the old n"."""
    fixed = PROGRESS.with_topic(UUID(int=7), 4, 2)
    assert [one.partitions for one in fixed.epochs] == [3, 4]
    assert [fixed.topic_partition(1, offset) for offset in (0, 49, 50, 60)] == [1, 1, 1, 1]
    assert [fixed.topic_partition(3, offset) for offset in (0, 10**9)] == [3 % 4, 3], "partition 3 came with epoch 2"
    assert fixed.topic_partition(0, 99) == 0
    assert (fixed.next_boundary(0, 0), fixed.next_boundary(0, 100), fixed.next_boundary(9, 5)) == (100, None, None)


def test_where_records_of_another_partition_end():
    """Records that a partition of the topic lost are sent again from there on, and no records of other partitions."""
    epochs = (EpochPartitions(0, 2), EpochPartitions(1, 4, {3: 20, 1: 20}), EpochPartitions(2, 8, {3: 50, 1: 50}))
    progress = ShippingProgress(epochs=epochs)
    assert [progress.topic_partition(3, offset) for offset in (19, 20, 49, 50)] == [1, 3, 3, 3]
    assert [progress.same_since(3, offset) for offset in (0, 19, 20, 49, 50, 90)] == [0, 0, 20, 20, 20, 20]
    assert [progress.same_since(1, offset) for offset in (0, 19, 20, 50, 90)] == [0, 0, 0, 0, 0]
    assert progress.same_since(0, 99) == 0, "a partition that no epoch names goes by the last from its beginning"


def test_a_grown_topic_changes_nothing_before_repartition():
    """Contract: "n is fixed at first use: more partitions change nothing until `pushrep outbox repartition`"."""
    first = ShippingProgress().with_topic(UUID(int=1), 3, 0)
    grown = first.with_topic(UUID(int=1), 6, 0)
    assert [grown.topic_partition(p, 10) for p in range(6)] == [0, 1, 2, 0, 1, 2]
    again = grown.repartitioned(1, dict.fromkeys(range(6), 20)).with_topic(UUID(int=1), 6, 1)
    assert [again.topic_partition(p, 19) for p in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [again.topic_partition(p, 20) for p in range(6)] == [0, 1, 2, 3, 4, 5]


def test_another_topic_id_voids_what_was_acknowledged():
    """Contract: "a re-created topic voids that destination's checkpoint, shipping begins at the log's start"."""
    assert PROGRESS.with_topic(UUID(int=8), 3, 2).partitions == {}
    assert PROGRESS.with_topic(UUID(int=7), 3, 2).partitions == PROGRESS.partitions


def test_a_cut_below_a_later_epochs_start_lowers_it():
    cut = PROGRESS.within({0: 70, 1: 60})
    assert cut.epochs[1].starts == {0: 70, 1: 50}
