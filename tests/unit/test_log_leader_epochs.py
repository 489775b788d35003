"""Leader epochs: the answers of KIP-101 and KIP-279 as a table, and the two files."""

import pytest

from pushrep.env import RealFilesystem
from pushrep.log.directory_files import (
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    encode_leader_epochs,
    read_leader_epochs,
    write_leader_epochs,
)
from pushrep.records.leader_epochs import UNDEFINED, LeaderEpochs

EPOCHS = LeaderEpochs(((3, 10), (5, 40), (6, 95)))


@pytest.mark.parametrize(
    ("epoch", "answer"),
    [
        (-1, UNDEFINED),  # the follower has none
        (2, (2, 10)),  # older than all: it may keep what lies below the first entry
        (3, (3, 40)),
        (4, (3, 40)),  # never led here: the largest epoch below it answers
        (5, (5, 95)),
        (6, (6, 120)),  # the newest ends at the log's end
        (7, UNDEFINED),  # newer than all: this leader can't know
    ],
)
def test_end_of_an_epoch(epoch, answer):
    assert EPOCHS.end_of(epoch, log_end_offset=120) == answer


def test_an_empty_list_knows_nothing():
    empty = LeaderEpochs()
    assert empty.latest_epoch == -1
    assert empty.end_of(0, 100) == UNDEFINED
    assert empty.epoch_of(0) == -1
    assert empty.cut_from(0) is empty
    assert empty.cut_below(100) is empty


@pytest.mark.parametrize(
    ("offset", "epoch"), [(0, -1), (9, -1), (10, 3), (39, 3), (40, 5), (94, 5), (95, 6), (10**12, 6)]
)
def test_epoch_of_an_offset(offset, epoch):
    assert EPOCHS.epoch_of(offset) == epoch


@pytest.mark.parametrize(
    ("epoch", "start", "entries"),
    [
        (6, 95, ((3, 10), (5, 40), (6, 95))),
        (6, 300, ((3, 10), (5, 40), (6, 95))),  # goes on
        (7, 120, ((3, 10), (5, 40), (6, 95), (7, 120))),
        (7, 95, ((3, 10), (5, 40), (7, 95))),  # epoch 6 wrote nothing
        (7, 50, ((3, 10), (5, 40), (7, 50))),  # the log was cut at 50
        (4, 120, ((3, 10), (4, 120))),
        (6, 90, ((3, 10), (5, 40), (6, 90))),
        (0, 0, ((0, 0),)),
    ],
)
def test_assigning_an_epoch(epoch, start, entries):
    assert EPOCHS.assigned(epoch, start).entries == entries


def test_nothing_new_is_the_same_object():
    assert EPOCHS.assigned(6, 200) is EPOCHS
    assert EPOCHS.cut_from(96) is EPOCHS
    assert EPOCHS.cut_below(10) is EPOCHS
    assert EPOCHS.cut_below(3) is EPOCHS


@pytest.mark.parametrize(("end", "kept"), [(200, 3), (96, 3), (95, 2), (41, 2), (40, 1), (10, 0), (0, 0)])
def test_cut_from_an_end(end, kept):
    assert EPOCHS.cut_from(end).entries == EPOCHS.entries[:kept]


@pytest.mark.parametrize(
    ("start", "entries"),
    [
        (11, ((3, 11), (5, 40), (6, 95))),
        (40, ((5, 40), (6, 95))),
        (94, ((5, 94), (6, 95))),
        (95, ((6, 95),)),
        (500, ((6, 500),)),
    ],
)
def test_cut_below_a_start(start, entries):
    assert EPOCHS.cut_below(start).entries == entries


@pytest.mark.parametrize(
    "entries", [((3, 10), (3, 20)), ((3, 10), (4, 10)), ((3, 10), (2, 20)), ((-1, 0),), ((0, -1),)]
)
def test_entries_that_do_not_ascend_are_refused(entries):
    with pytest.raises(ValueError, match="leader epoch"):
        LeaderEpochs(entries)


def test_golden_bytes(tmp_path):
    write_leader_epochs(tmp_path, EPOCHS)
    assert (tmp_path / LEADER_EPOCHS_NAME).read_bytes() == b"0\n3\n3 10\n5 40\n6 95\n"
    assert (tmp_path / LEADER_EPOCHS_CRC_NAME).read_bytes() == b"098dd42f 098dd42f\n"


def test_absent_is_none_and_what_kafka_rewrote_counts_as_absent(tmp_path):
    assert read_leader_epochs(tmp_path) is None
    write_leader_epochs(tmp_path, EPOCHS)
    assert read_leader_epochs(tmp_path) == EPOCHS
    (tmp_path / LEADER_EPOCHS_NAME).write_bytes(encode_leader_epochs(EPOCHS.assigned(7, 200)))
    assert read_leader_epochs(tmp_path) is None


class StopsAtRename(RealFilesystem):
    def __init__(self, target):
        self.target = target

    def rename(self, source, target):
        if target.name == self.target:
            raise OSError(5, "stopped here")
        super().rename(source, target)


@pytest.mark.parametrize("target", [LEADER_EPOCHS_CRC_NAME, LEADER_EPOCHS_NAME])
def test_a_crash_between_the_two_renames_leaves_the_old_list(tmp_path, target):
    write_leader_epochs(tmp_path, EPOCHS)
    newer = EPOCHS.assigned(7, 200)
    with pytest.raises(OSError, match="stopped here"):
        write_leader_epochs(tmp_path, newer, StopsAtRename(target))
    assert read_leader_epochs(tmp_path) == EPOCHS
    write_leader_epochs(tmp_path, newer)
    assert read_leader_epochs(tmp_path) == newer


def test_a_bad_list_does_not_become_good_by_the_start_of_a_write(tmp_path):
    write_leader_epochs(tmp_path, EPOCHS)
    (tmp_path / LEADER_EPOCHS_NAME).write_bytes(b"0\n1\n3 11\n")
    with pytest.raises(OSError, match="stopped here"):
        write_leader_epochs(tmp_path, EPOCHS, StopsAtRename(LEADER_EPOCHS_NAME))
    assert read_leader_epochs(tmp_path) is None


def test_an_older_epoch_that_goes_on_takes_a_newer_one_without_records_away():
    """A replica has epoch 5 from offset 80 on; then its next leader's log continues in epoch 4."""
    epochs = LeaderEpochs(((4, 40), (5, 80)))
    assert epochs.assigned(4, 80).entries == ((4, 40),)
